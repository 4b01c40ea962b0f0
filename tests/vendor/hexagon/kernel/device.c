// Answers the requests of include/uapi/misc/fastrpc.h as mainline's driver
// does. One descriptor is one user process on the DSP.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <misc/fastrpc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernel.h"

// Handles and methods that belong to the shell.
// SOURCE: qualcomm/fastrpc inc/remotectl1.h, adsp_listener1.h,
// adsp_current_process1.h and their stubs.
#define CURRENT_PROCESS 4
#define LISTENER 7
#define REMOTECTL 8
#define REMOTECTL_OPEN 2
#define REMOTECTL_CLOSE 3
#define REMOTECTL_SET_PARAM 5
#define CURRENT_PROCESS_EXIT 2
// SOURCE: inc/remote.h FASTRPC_THREAD_PARAMS.
#define THREAD_PARAMS 1

// Handles of libraries start at this number.
#define FIRST_HANDLE 0x1000
#define MAX_HANDLES 16

// SOURCE: qualcomm/fastrpc src/fastrpc_apps_user.c DEFAULT_UTHREAD_STACK_SIZE.
#define DEFAULT_STACK_BYTES (16 * 1024)

// SOURCE: inc/remote.h ARCH_VER.
#define ATTRIBUTE_ARCH_VER 6

#define AEE_EUNABLETOLOAD 0x80000406u

struct session {
  int dsp;
  pthread_mutex_t mutex;
  pthread_cond_t ended;
  int created, closing;
  uint32_t stack_bytes;
  struct process *process;
  uint64_t handles[MAX_HANDLES];
  uint32_t handle_count;
  uint64_t mapped_bytes;
  // How many requests for a mapping, by its index, were not yet taken back.
  uint32_t references[MAPPINGS];
  // Bytes that the rule "late-unmap" still has to subtract from `mapped_bytes`.
  uint64_t late_bytes;
};

struct session *session_open(int dsp) {
  struct session *session = calloc(1, sizeof *session);
  session->dsp = dsp;
  pthread_mutex_init(&session->mutex, NULL);
  pthread_cond_init(&session->ended, NULL);
  session->stack_bytes = DEFAULT_STACK_BYTES;
  return session;
}

// Makes all waiting calls return, the listener's first.
static void end(struct session *session) {
  pthread_mutex_lock(&session->mutex);
  session->closing = 1;
  pthread_cond_broadcast(&session->ended);
  pthread_mutex_unlock(&session->mutex);
}

void session_close(struct session *session) {
  end(session);
  // The session's memory is kept, because a thread of the program may still be
  // leaving it.
  if (session->process)
    process_end(session->process);
  session->process = NULL;
}

int session_maps(struct session *session, int fd) {
  pthread_mutex_lock(&session->mutex);
  int found = 0;
  if (session->process && !session->closing) {
    struct mapping *mappings = process_control(session->process)->mappings;
    for (int i = 0; i < MAPPINGS && !found; i++)
      found = mappings[i].bytes && mappings[i].fd == fd;
  }
  pthread_mutex_unlock(&session->mutex);
  return found;
}

static int fail(int error) {
  errno = error;
  return -1;
}

// Looks for the library of `file:///NAME?...` as the shell does, among the
// host's files.
// SOURCE: qualcomm/fastrpc src/apps_std_imp.c: DSP_LIBRARY_PATH is used if it
// is set, and then ADSP_LIBRARY_PATH is ignored.
static int find_library(const char *uri, char *path, size_t bytes) {
  const char *name = strstr(uri, "///"), *folders = getenv("DSP_LIBRARY_PATH");
  if (!folders)
    folders = getenv("ADSP_LIBRARY_PATH");
  if (!name || !folders)
    return 0;
  name += 3;
  int name_bytes = (int)strcspn(name, "?");
  while (*folders) {
    int folder_bytes = (int)strcspn(folders, ";");
    snprintf(path, bytes, "%.*s/%.*s", folder_bytes, folders, name_bytes, name);
    if (folder_bytes && !access(path, R_OK))
      return 1;
    folders += folder_bytes + (folders[folder_bytes] == ';');
  }
  return 0;
}

// Loads a library and opens it; returns the shell's status.
static uint32_t open_library(struct session *session, char *uri,
                             uint32_t *handle) {
  char path[512];
  if (!find_library(uri, path, sizeof path)) {
    report("%s is in no folder of DSP_LIBRARY_PATH or ADSP_LIBRARY_PATH", uri);
    return AEE_EUNABLETOLOAD;
  }
  if (session->process || session->handle_count == MAX_HANDLES)
    return AEE_EUNABLETOLOAD; // one library in a process is all that is needed
  session->process = process_start(path, session->stack_bytes, session->dsp);
  if (!session->process)
    return AEE_EUNABLETOLOAD;
  uint32_t length = (uint32_t)strlen(uri) + 1;
  struct buffer buffers[2] = {{&length, sizeof length}, {uri, length}};
  uint64_t opened;
  int status;
  if (process_call(session->process, 0, 2 << 16 | 1, buffers, &opened, &status))
    return AEE_EUNABLETOLOAD;
  note("%s opens with status 0x%x", path, (unsigned)status);
  session->handles[session->handle_count] = opened;
  *handle = FIRST_HANDLE + session->handle_count++;
  return (uint32_t)status;
}

static int remotectl(struct session *session, uint32_t method,
                     struct fastrpc_invoke_args *args) {
  switch (method) {
  case REMOTECTL_OPEN: {
    char *uri = (char *)(uintptr_t)args[1].ptr;
    uint32_t *answer = (uint32_t *)(uintptr_t)args[2].ptr;
    answer[0] = 0;
    answer[1] = open_library(session, uri, &answer[0]);
    if (args[3].length)
      snprintf((char *)(uintptr_t)args[3].ptr, args[3].length, "%s",
               answer[1] ? "the library was not opened" : "");
    return 0;
  }
  case REMOTECTL_CLOSE: {
    uint32_t *answer = (uint32_t *)(uintptr_t)args[1].ptr;
    answer[0] = 0;
    return 0;
  }
  case REMOTECTL_SET_PARAM: {
    const uint32_t *head = (const uint32_t *)(uintptr_t)args[0].ptr;
    const uint32_t *values = (const uint32_t *)(uintptr_t)args[1].ptr;
    if (head[0] == THREAD_PARAMS && args[1].length >= 8) {
      note("threads have %u bytes of stack", values[1]);
      session->stack_bytes = values[1];
    }
    return 0;
  }
  }
  return fail(EINVAL);
}

// The listener's calls wait until the process ends, because the DSP requests
// nothing.
static int listen(struct session *session,
                  const struct fastrpc_invoke *invoke) {
  if (scalars_inputs(invoke->sc) + scalars_outputs(invoke->sc) == 0)
    return 0;
  pthread_mutex_lock(&session->mutex);
  while (!session->closing)
    pthread_cond_wait(&session->ended, &session->mutex);
  pthread_mutex_unlock(&session->mutex);
  return fail(ECONNRESET);
}

// Ends a mapping; the caller holds the mutex.
static void drop_mapping(struct session *session, struct mapping *mapping) {
  uint64_t bytes = mapping->bytes;
  if (rules.late_unmap)
    session->late_bytes += bytes;
  else
    session->mapped_bytes -= bytes;
  close(mapping->kernel_fd);
  __atomic_store_n(&mapping->bytes, 0, __ATOMIC_SEQ_CST);
}

// Drops the mappings that the DSP reports as unmapped, as the driver does.
// SOURCE: Linux drivers/misc/fastrpc.c, `fastrpc_put_args`, by number of
// descriptor.
static void end_of_call(struct session *session) {
  pthread_mutex_lock(&session->mutex);
  struct mapping *mappings = process_control(session->process)->mappings;
  for (int i = 0; i < MAPPINGS; i++)
    if (rules.vanish && mappings[i].bytes &&
        __atomic_load_n(&mappings[i].unmapped, __ATOMIC_SEQ_CST)) {
      note("the mapping of descriptor %d goes with a call", mappings[i].fd);
      session->references[i] = 0;
      drop_mapping(session, &mappings[i]);
    }
  session->mapped_bytes -= session->late_bytes;
  session->late_bytes = 0;
  pthread_mutex_unlock(&session->mutex);
}

static int call_library(struct session *session, uint64_t handle,
                        const struct fastrpc_invoke *invoke,
                        const struct fastrpc_invoke_args *args) {
  struct buffer buffers[MAX_BUFFERS];
  uint32_t count = scalars_inputs(invoke->sc) + scalars_outputs(invoke->sc);
  if (count > MAX_BUFFERS)
    return fail(EINVAL);
  for (uint32_t i = 0; i < count; i++)
    buffers[i] =
        (struct buffer){(void *)(uintptr_t)args[i].ptr, args[i].length};
  int status;
  int error = process_call(session->process, handle, invoke->sc, buffers, NULL,
                           &status);
  end_of_call(session);
  return error ? fail(error) : status;
}

static int invoke(struct session *session,
                  const struct fastrpc_invoke *invoke) {
  struct fastrpc_invoke_args *args = (void *)(uintptr_t)invoke->args;
  uint32_t method = scalars_method(invoke->sc);
  switch (invoke->handle) {
  case REMOTECTL:
    return remotectl(session, method, args);
  case LISTENER:
    return listen(session, invoke);
  case CURRENT_PROCESS:
    if (method == CURRENT_PROCESS_EXIT)
      end(session);
    return 0;
  }
  uint32_t index = invoke->handle - FIRST_HANDLE;
  if (invoke->handle < FIRST_HANDLE || index >= session->handle_count) {
    note("no handle %u", invoke->handle);
    return fail(EINVAL);
  }
  return call_library(session, session->handles[index], invoke, args);
}

static int map(struct session *session, struct fastrpc_mem_map *request) {
  struct stat file;
  note("map of descriptor %d, %llu bytes", request->fd,
       (unsigned long long)request->length);
  if (rules.whole_pages && request->length % 4096) {
    report("a mapping of %llu bytes is not whole pages",
           (unsigned long long)request->length);
    return fail(EINVAL);
  }
  if (!request->length || fstat(request->fd, &file) ||
      request->length > (uint64_t)file.st_size)
    return fail(EINVAL);
  if (!session->process)
    return fail(EINVAL);
  if (session->mapped_bytes + request->length > rules.window_bytes) {
    note("the address window is full");
    return fail(ENOMEM);
  }
  struct mapping *mappings = process_control(session->process)->mappings;
  // SOURCE: `fastrpc_map_lookup` of Linux up to 5.18 compares only the number,
  // so a number that is used again refers to the earlier memory.
  for (int i = 0; i < MAPPINGS; i++)
    if (mappings[i].bytes && mappings[i].fd == request->fd) {
      session->references[i]++;
      request->vaddrout = 0;
      return 0;
    }
  for (int i = 0; i < MAPPINGS; i++) {
    if (mappings[i].bytes)
      continue;
    // The driver keeps the memory, whatever the program closes.
    mappings[i].kernel_fd = fcntl(request->fd, F_DUPFD_CLOEXEC, 64);
    if (mappings[i].kernel_fd < 0)
      return -1;
    mappings[i].fd = request->fd;
    mappings[i].unmapped = 0;
    session->references[i] = 1;
    __atomic_store_n(&mappings[i].bytes, (uint32_t)request->length,
                     __ATOMIC_SEQ_CST);
    session->mapped_bytes += request->length;
    request->vaddrout = 0;
    return 0;
  }
  return fail(ENOMEM);
}

static int unmap(struct session *session,
                 const struct fastrpc_mem_unmap *request) {
  note("unmap of descriptor %d, %llu bytes", request->fd,
       (unsigned long long)request->length);
  if (!session->process)
    return fail(EINVAL);
  if (rules.unmap_fails_at && !--rules.unmap_fails_at) {
    note("it fails");
    rules.unmap_has_failed = 1;
    return fail(EIO);
  }
  struct mapping *mappings = process_control(session->process)->mappings;
  for (int i = 0; i < MAPPINGS; i++) {
    if (!mappings[i].bytes || mappings[i].fd != request->fd)
      continue;
    // The process may return from its call much later. The strictest behaviour
    // is that its mapping is gone before it is asked for.
    if (rules.vanish &&
        __atomic_load_n(&mappings[i].unmapped, __ATOMIC_SEQ_CST)) {
      note("it went before");
      session->references[i] = 0;
      drop_mapping(session, &mappings[i]);
      return fail(EINVAL);
    }
    if (!--session->references[i])
      drop_mapping(session, &mappings[i]);
    return 0;
  }
  return fail(EINVAL);
}

static uint32_t capability(uint32_t attribute) {
  const char *arch = getenv("LOOP_ARCH");
  return attribute == ATTRIBUTE_ARCH_VER && arch
             ? (uint32_t)strtoul(arch, NULL, 0)
             : 0;
}

int session_ioctl(struct session *session, unsigned long request, void *arg) {
  switch ((uint32_t)request) {
  case FASTRPC_IOCTL_INIT_CREATE: {
    struct fastrpc_init_create *create = arg;
    note("a process with attributes 0x%x", create->attrs);
    if (!(create->attrs & FASTRPC_MODE_UNSIGNED_MODULE))
      return fail(ECONNREFUSED); // no library here is signed
    session->created = 1;
    return 0;
  }
  case FASTRPC_IOCTL_INIT_ATTACH:
    return 0;
  case FASTRPC_IOCTL_INVOKE:
    return session->created ? invoke(session, arg) : fail(ENOTCONN);
  case FASTRPC_IOCTL_MEM_MAP: {
    pthread_mutex_lock(&session->mutex);
    int result = map(session, arg);
    pthread_mutex_unlock(&session->mutex);
    return result;
  }
  case FASTRPC_IOCTL_MEM_UNMAP: {
    pthread_mutex_lock(&session->mutex);
    int result = unmap(session, arg);
    pthread_mutex_unlock(&session->mutex);
    return result;
  }
  case FASTRPC_IOCTL_GET_DSP_INFO: {
    struct fastrpc_ioctl_capability *question = arg;
    question->capability = capability(question->attribute_id);
    return 0;
  }
  }
  // Quality of service, notifications and others exist only in vendors'
  // kernels.
  note("no request %lu", request & 0xff);
  return fail(ENOTTY);
}
