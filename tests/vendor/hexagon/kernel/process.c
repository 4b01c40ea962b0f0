// A process on the DSP: the emulator that runs it, and the calls into it.
//
// Each channel has a thread, which passes one call at a time through its
// socket. Callers wait for their call, unless a rule simulates a signal.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "kernel.h"

extern char **environ;

// A call that takes longer than this counts as one that waits.
#define LONG_CALL_MS 3

// A call with copies of its buffers, as in the driver.
struct call {
  struct request request;
  unsigned char data[MAX_CALL_BYTES];
  uint64_t handle;
  int status, done, abandoned;
  struct call *next;
};

struct process {
  int dsp;
  pid_t pid;
  char library[512];
  struct control *control;
  int sockets[CHANNELS];
  pthread_t threads[CHANNELS];
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  struct call *waiting;
  int dead, ending;
};

struct channel {
  struct process *process;
  int index;
};

static int transfer(int fd, void *at, size_t bytes, int out) {
  unsigned char *next = at;
  while (bytes) {
    ssize_t moved =
        out ? send(fd, next, bytes, MSG_NOSIGNAL) : recv(fd, next, bytes, 0);
    if (moved < 0 && errno == EINTR)
      continue;
    if (moved <= 0)
      return -1;
    next += moved;
    bytes -= (size_t)moved;
  }
  return 0;
}

// The sum of the sizes of `count` buffers, starting at `first`.
static size_t sum(const struct request *request, uint32_t first,
                  uint32_t count) {
  size_t bytes = 0;
  for (uint32_t i = first; i < first + count; i++)
    bytes += request->bytes[i];
  return bytes;
}

static int pass(int fd, struct call *call) {
  uint32_t scalars = call->request.scalars;
  uint32_t inputs = scalars_inputs(scalars), outputs = scalars_outputs(scalars);
  size_t in_bytes = sum(&call->request, 0, inputs);
  size_t out_bytes = sum(&call->request, inputs, outputs);
  int32_t status;
  if (transfer(fd, &call->request, sizeof call->request, 1) ||
      transfer(fd, call->data, in_bytes, 1) ||
      transfer(fd, &status, sizeof status, 0))
    return -1;
  if (scalars_handles(scalars) &&
      transfer(fd, &call->handle, sizeof call->handle, 0))
    return -1;
  if (transfer(fd, call->data + in_bytes, out_bytes, 0))
    return -1;
  call->status = status;
  return 0;
}

static void *serve_channel(void *arg) {
  struct channel channel = *(struct channel *)arg;
  struct process *process = channel.process;
  free(arg);
  pthread_mutex_lock(&process->mutex);
  for (;;) {
    while (!process->waiting && !process->dead)
      pthread_cond_wait(&process->changed, &process->mutex);
    if (process->dead)
      break;
    struct call *call = process->waiting;
    process->waiting = call->next;
    pthread_mutex_unlock(&process->mutex);
    int failed = pass(process->sockets[channel.index], call);
    pthread_mutex_lock(&process->mutex);
    if (failed)
      process->dead = 1;
    else
      call->done = 1;
    if (call->abandoned)
      free(call);
    pthread_cond_broadcast(&process->changed);
  }
  pthread_mutex_unlock(&process->mutex);
  return NULL;
}

// The environment without the variables that are only for this process.
static char **child_environment(void) {
  size_t count = 0, kept = 0;
  while (environ[count])
    count++;
  char **copy = calloc(count + 1, sizeof *copy);
  for (size_t i = 0; copy && i < count; i++)
    if (strncmp(environ[i], "LD_", 3) && strncmp(environ[i], "QEMU_", 5))
      copy[kept++] = environ[i];
  return copy;
}

static int spawn(struct process *process, const int *theirs, int control_fd) {
  char *emulator = getenv("LOOP_QEMU"), *loader = getenv("LOOP_LOADER");
  if (!emulator || !loader) {
    report("LOOP_QEMU and LOOP_LOADER name the emulator and the DSP process");
    return ENOENT;
  }
  char *arguments[] = {emulator, "-cpu",           getenv("LOOP_CPU"),
                       loader,   process->library, NULL};
  if (!arguments[2])
    arguments[2] = "v73";
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, control_fd, CONTROL_FD);
  posix_spawn_file_actions_adddup2(&actions, vtcm_fd(process->dsp), VTCM_FD);
  for (int i = 0; i < CHANNELS; i++)
    posix_spawn_file_actions_adddup2(&actions, theirs[i], FIRST_CHANNEL_FD + i);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  // A separate process group, so that stopping the host does not stop the DSP.
  posix_spawnattr_setpgroup(&attributes, 0);
  posix_spawnattr_setflags(&attributes,
                           POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP);
  char **environment = child_environment();
  int error = posix_spawn(&process->pid, emulator, &actions, &attributes,
                          arguments, environment);
  free(environment);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  if (error)
    report("%s: %s", emulator, strerror(error));
  return error;
}

// Duplicates the descriptor above those that the process inherits, because dup2
// would overwrite one that is still needed.
static int raised(int fd) {
  int high = fcntl(fd, F_DUPFD_CLOEXEC, FIRST_CHANNEL_FD + CHANNELS);
  close(fd);
  return high;
}

static struct control *make_control(int *fd) {
  *fd = raised(memfd_create("control", MFD_CLOEXEC));
  if (*fd < 0 || ftruncate(*fd, CONTROL_BYTES))
    return NULL;
  struct control *control =
      mmap(NULL, CONTROL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
  return control == MAP_FAILED ? NULL : control;
}

static void start_threads(struct process *process) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (int i = 0; i < CHANNELS; i++) {
    struct channel *channel = malloc(sizeof *channel);
    *channel = (struct channel){process, i};
    pthread_create(&process->threads[i], NULL, serve_channel, channel);
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

struct process *process_start(const char *library, uint32_t stack_bytes,
                              int dsp) {
  static _Atomic uint32_t last;
  struct process *process = calloc(1, sizeof *process);
  process->dsp = dsp;
  snprintf(process->library, sizeof process->library, "%s", library);
  pthread_mutex_init(&process->mutex, NULL);
  pthread_cond_init(&process->changed, NULL);
  int control_fd, theirs[CHANNELS];
  process->control = make_control(&control_fd);
  if (!process->control) {
    free(process);
    return NULL;
  }
  char *stack = getenv("LOOP_STACK"), *arch = getenv("LOOP_ARCH");
  *process->control = (struct control){
      .host_pid = getpid(),
      .process = ++last,
      .stack_bytes = stack ? (uint32_t)strtoul(stack, NULL, 0) : stack_bytes,
      .rules = (rules.refuse_votes ? RULE_VOTES : 0) |
               (rules.whole_pages ? RULE_WHOLE_PAGES : 0) |
               (rules.dma_stuck ? RULE_DMA_STUCK : 0) |
               (rules.no_weak ? RULE_NO_WEAK : 0) |
               (rules.no_priority ? RULE_NO_PRIORITY : 0) |
               (rules.no_hmx ? RULE_NO_HMX : 0) |
               rules.workers << RULE_WORKERS_SHIFT,
      .verbose = (uint32_t)verbose,
      .arch = arch ? (uint32_t)strtoul(arch, NULL, 0) : 0,
      .vtcm_bytes = rules.vtcm_bytes ? rules.vtcm_bytes : VTCM_BYTES,
  };
  memcpy(process->control->blacklist, rules.blacklist, sizeof rules.blacklist);
  for (int i = 0; i < CHANNELS; i++) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair)) {
      report("no sockets: %s", strerror(errno));
      _exit(2);
    }
    process->sockets[i] = pair[0];
    theirs[i] = raised(pair[1]);
  }
  process->dead = spawn(process, theirs, control_fd) != 0;
  close(control_fd);
  for (int i = 0; i < CHANNELS; i++)
    close(theirs[i]);
  start_threads(process);
  return process;
}

struct control *process_control(struct process *process) {
  return process->control;
}

static struct call *make_call(uint64_t handle, uint32_t scalars,
                              const struct buffer *buffers) {
  uint32_t inputs = scalars_inputs(scalars);
  uint32_t count = inputs + scalars_outputs(scalars);
  struct call *call = calloc(1, sizeof *call);
  size_t at = 0;
  call->request.scalars = scalars;
  call->request.handle = handle;
  for (uint32_t i = 0; i < count; i++) {
    if (i >= MAX_BUFFERS || buffers[i].bytes > MAX_CALL_BYTES - at) {
      free(call);
      return NULL;
    }
    call->request.bytes[i] = (uint32_t)buffers[i].bytes;
    if (i < inputs && buffers[i].bytes)
      memcpy(call->data + at, buffers[i].at, buffers[i].bytes);
    at += buffers[i].bytes;
  }
  return call;
}

// Appends a call; the caller holds the mutex.
static void enqueue(struct process *process, struct call *call) {
  struct call **last = &process->waiting;
  while (*last)
    last = &(*last)->next;
  *last = call;
  pthread_cond_broadcast(&process->changed);
}

// Waits until the call is done, the process is dead, or a rule simulates a
// signal; returns whether it was a signal. The caller holds the mutex.
static int wait_call(struct process *process, struct call *call,
                     int may_interrupt) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_nsec += LONG_CALL_MS * 1000000L;
  until.tv_sec += until.tv_nsec / 1000000000L;
  until.tv_nsec %= 1000000000L;
  while (!call->done && !process->dead) {
    if (!may_interrupt)
      pthread_cond_wait(&process->changed, &process->mutex);
    else if (pthread_cond_timedwait(&process->changed, &process->mutex,
                                    &until) == ETIMEDOUT)
      return 1;
  }
  return 0;
}

// Passes a call on and waits for it. Returns 0 when it is done, ECONNRESET, or
// after a signal EINTR or ERESTART. Unless the call is done, the caller no
// longer owns it.
static int attempt(struct process *process, struct call *call, int serves) {
  pthread_mutex_lock(&process->mutex);
  enqueue(process, call);
  if (serves && rules.no_ieee && strstr(process->library, "_v73.so"))
    kill(process->pid, SIGILL);
  int may_interrupt = serves && (rules.restarts > 0 || rules.interrupts > 0);
  int result = 0;
  if (wait_call(process, call, may_interrupt)) {
    if (rule_take(&rules.restarts))
      result = ERESTART;
    else if (rule_take(&rules.interrupts))
      result = EINTR;
    else
      wait_call(process, call, 0);
  }
  if (result)
    call->abandoned = 1;
  else if (!call->done)
    result = ECONNRESET; // a channel that still works on the call frees it
  pthread_mutex_unlock(&process->mutex);
  return result;
}

int process_call(struct process *process, uint64_t handle, uint32_t scalars,
                 struct buffer *buffers, uint64_t *handle_out, int *status) {
  // The long call that serves the ring is the only one that returns no data.
  int serves = handle != 0 && scalars_outputs(scalars) == 0;
  struct call *call;
  int error;
  // If a signal interrupts a call, mainline's driver lets it run on the DSP;
  // the system call is restarted, or returns EINTR.
  do {
    call = make_call(handle, scalars, buffers);
    if (!call)
      return EINVAL;
    error = attempt(process, call, serves);
    if (error)
      note("a call ends with %s", strerror(error));
  } while (error == ERESTART);
  if (error)
    return error;
  uint32_t inputs = scalars_inputs(scalars);
  size_t at = sum(&call->request, 0, inputs);
  for (uint32_t i = 0; i < scalars_outputs(scalars); i++) {
    struct buffer *out = &buffers[inputs + i];
    memcpy(out->at, call->data + at, out->bytes);
    at += out->bytes;
  }
  if (handle_out)
    *handle_out = call->handle;
  *status = call->status;
  free(call);
  return 0;
}

static void describe_end(const struct process *process, int status) {
  const struct control *control = process->control;
  if (control->message[0])
    report("process %u: %s", control->process, control->message);
  if (WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL)
    report("process %u: died of signal %d", control->process, WTERMSIG(status));
  if (control->workers != control->workers_joined)
    note("process %u ends with %u of %u workers", control->process,
         control->workers - control->workers_joined, control->workers);
  report("process %u: %u calls, deepest stack %u of %u bytes, "
         "%u multiplications, %u copies",
         control->process, control->calls, control->deepest_stack,
         control->stack_bytes, control->multiplications, control->copies);
}

void process_end(struct process *process) {
  pthread_mutex_lock(&process->mutex);
  int died = process->dead;
  process->dead = 1;
  pthread_cond_broadcast(&process->changed);
  pthread_mutex_unlock(&process->mutex);
  int status = 0;
  if (process->pid) {
    if (!died)
      kill(process->pid, SIGKILL);
    waitpid(process->pid, &status, 0);
  }
  for (int i = 0; i < CHANNELS; i++)
    shutdown(process->sockets[i], SHUT_RDWR);
  for (int i = 0; i < CHANNELS; i++)
    pthread_join(process->threads[i], NULL);
  for (int i = 0; i < CHANNELS; i++)
    close(process->sockets[i]);
  describe_end(process, status);
  vtcm_release(process->dsp, process->control->process);
  int left = 0;
  for (int i = 0; i < MAPPINGS; i++) {
    if (!process->control->mappings[i].bytes)
      continue;
    close(process->control->mappings[i].kernel_fd);
    left++;
  }
  if (left && !died && !rules.unmap_has_failed)
    report("process %u: %d mappings left at its end", process->control->process,
           left);
  munmap(process->control, CONTROL_BYTES);
  free(process);
}
