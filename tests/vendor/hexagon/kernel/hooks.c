// LD_PRELOAD library: provides the device nodes to an unmodified program.
//
//   /dev/fastrpc-cdsp      session_* of device.c
//   /dev/fastrpc-cdsp1     the same for a second DSP, with the rule dsps=2
//   /dev/dma_heap/system   shared memory, memfds
//   other FastRPC nodes    are not there

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/dma-heap.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernel.h"

#define MAX_FDS 4096

enum kind { NONE, SESSION, HEAP, MEMORY };
static _Atomic(enum kind) kinds[MAX_FDS];
static struct session *sessions[MAX_FDS];

static pthread_once_t once = PTHREAD_ONCE_INIT;

static enum kind kind_of(int fd) {
  return fd >= 0 && fd < MAX_FDS ? kinds[fd] : NONE;
}

// Returns a descriptor that no other file can have while it is open.
static int node(enum kind kind) {
  int fd = (int)syscall(SYS_memfd_create, "node", MFD_CLOEXEC);
  if (fd >= MAX_FDS) {
    syscall(SYS_close, fd);
    errno = EMFILE;
    return -1;
  }
  if (fd >= 0)
    kinds[fd] = kind;
  return fd;
}

static int open_session(int dsp) {
  int fd = node(SESSION);
  if (fd >= 0)
    sessions[fd] = session_open(dsp);
  note("open of the node of DSP %d: descriptor %d", dsp, fd);
  return fd;
}

static int open_path(const char *path, int flags, mode_t mode) {
  pthread_once(&once, rules_init);
  if (!strcmp(path, "/dev/fastrpc-cdsp"))
    return open_session(0);
  if (!strcmp(path, "/dev/fastrpc-cdsp1") && rules.dsps > 1)
    return open_session(1);
  if (!strcmp(path, "/dev/dma_heap/system"))
    return node(HEAP);
  if (!strncmp(path, "/dev/fastrpc-", 13)) {
    errno = ENOENT;
    return -1;
  }
  return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

static mode_t mode_of(int flags, va_list args) {
  return flags & (O_CREAT | __O_TMPFILE) ? va_arg(args, mode_t) : 0;
}

int open(const char *path, int flags, ...) {
  va_list args;
  va_start(args, flags);
  int fd = open_path(path, flags, mode_of(flags, args));
  va_end(args);
  return fd;
}

int open64(const char *path, int flags, ...) {
  va_list args;
  va_start(args, flags);
  int fd = open_path(path, flags | O_LARGEFILE, mode_of(flags, args));
  va_end(args);
  return fd;
}

int close(int fd) {
  enum kind kind = kind_of(fd);
  if (kind != NONE)
    kinds[fd] = NONE;
  if (kind == MEMORY)
    for (int node = 0; node < MAX_FDS; node++)
      if (kinds[node] == SESSION && session_maps(sessions[node], fd))
        report("descriptor %d is closed while the DSP can map it", fd);
  if (kind == SESSION) {
    note("close of the DSP's node: descriptor %d", fd);
    session_close(sessions[fd]);
  }
  return (int)syscall(SYS_close, fd);
}

static int heap_alloc(struct dma_heap_allocation_data *data) {
  int fd = node(MEMORY);
  if (fd < 0)
    return -1;
  // A heap allocates whole pages.
  if (ftruncate(fd, (off_t)((data->len + 4095) & ~4095ull))) {
    int error = errno;
    close(fd);
    errno = error;
    return -1;
  }
  data->fd = (uint32_t)fd;
  return 0;
}

int ioctl(int fd, unsigned long request, ...) {
  va_list args;
  va_start(args, request);
  void *arg = va_arg(args, void *);
  va_end(args);
  switch (kind_of(fd)) {
  case SESSION:
    return session_ioctl(sessions[fd], request, arg);
  case HEAP:
    if (request == DMA_HEAP_IOCTL_ALLOC)
      return heap_alloc(arg);
    errno = ENOTTY;
    return -1;
  default:
    return (int)syscall(SYS_ioctl, fd, request, arg);
  }
}

static void *map(void *at, size_t bytes, int prot, int flags, int fd,
                 off_t offset) {
  if (kind_of(fd) == MEMORY && rules.mmap_fails_at) {
    static atomic_int maps;
    if (++maps == rules.mmap_fails_at) {
      note("mmap of %zu shared bytes fails", bytes);
      errno = ENOMEM;
      return MAP_FAILED;
    }
  }
  return (void *)syscall(SYS_mmap, at, bytes, prot, flags, fd, offset);
}

void *mmap(void *at, size_t bytes, int prot, int flags, int fd, off_t offset) {
  return map(at, bytes, prot, flags, fd, offset);
}

void *mmap64(void *at, size_t bytes, int prot, int flags, int fd,
             off_t offset) {
  return map(at, bytes, prot, flags, fd, offset);
}
