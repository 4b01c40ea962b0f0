#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "kernel.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int fd = -1;
static struct vtcm_owner *owner;

static uint32_t now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint32_t)(now.tv_sec * 1000 + now.tv_nsec / 1000000);
}

static void make(void) {
  // Duplicated above the descriptors that a process inherits.
  int low = memfd_create("vtcm", MFD_CLOEXEC);
  fd = fcntl(low, F_DUPFD_CLOEXEC, FIRST_CHANNEL_FD + CHANNELS);
  close(low);
  if (fd < 0 || ftruncate(fd, VTCM_FILE_BYTES)) {
    report("no memory for VTCM");
    _exit(2);
  }
  owner = mmap(NULL, VTCM_FILE_BYTES - VTCM_BYTES, PROT_READ | PROT_WRITE,
               MAP_SHARED, fd, VTCM_BYTES);
  if (owner == MAP_FAILED) {
    report("no memory for VTCM");
    _exit(2);
  }
  if (rules.vtcm_held_ms) {
    owner->process = VTCM_OTHER;
    owner->other_until_ms = now_ms() + rules.vtcm_held_ms;
  }
}

int vtcm_fd(void) {
  pthread_once(&once, make);
  return fd;
}

void vtcm_release(uint32_t process) {
  pthread_once(&once, make);
  uint32_t expected = process;
  __atomic_compare_exchange_n(&owner->process, &expected, VTCM_FREE, 0,
                              __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
