#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "kernel.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int fds[MOST_DSPS];
static struct vtcm_owner *owners[MOST_DSPS];

static uint32_t now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint32_t)(now.tv_sec * 1000 + now.tv_nsec / 1000000);
}

static void make_one(int dsp) {
  // Above the descriptors that a process is given.
  int low = memfd_create("vtcm", MFD_CLOEXEC);
  int fd = fcntl(low, F_DUPFD_CLOEXEC, FIRST_CHANNEL_FD + CHANNELS);
  close(low);
  if (fd < 0 || ftruncate(fd, VTCM_FILE_BYTES)) {
    report("no memory for VTCM");
    _exit(2);
  }
  struct vtcm_owner *owner =
      mmap(NULL, VTCM_FILE_BYTES - VTCM_BYTES, PROT_READ | PROT_WRITE,
           MAP_SHARED, fd, VTCM_BYTES);
  if (owner == MAP_FAILED) {
    report("no memory for VTCM");
    _exit(2);
  }
  if (rules.vtcm_held_ms) {
    owner->process = VTCM_OTHER;
    owner->other_until_ms = now_ms() + rules.vtcm_held_ms;
  }
  fds[dsp] = fd;
  owners[dsp] = owner;
}

static void make(void) {
  for (int dsp = 0; dsp < MOST_DSPS; dsp++)
    make_one(dsp);
}

int vtcm_fd(int dsp) {
  pthread_once(&once, make);
  return fds[dsp];
}

void vtcm_release(int dsp, uint32_t process) {
  pthread_once(&once, make);
  uint32_t expected = process;
  __atomic_compare_exchange_n(&owners[dsp]->process, &expected, VTCM_FREE, 0,
                              __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
