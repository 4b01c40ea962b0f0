// Threads that the library starts: pthread_*, and QuRT's functions for waiting
// and priorities, by the emulator's threads and futexes.

#include "dsp.h"

// SOURCE: crate libc 0.2.191, src/new/qurt: the fields' order, and
// PTHREAD_DEFAULT_STACKSIZE, _MIN_STACKSIZE and _MAX_STACKSIZE.
struct attributes {
  void *stack;
  int32_t internal_stack;
  uint32_t stack_bytes;
};
#define DEFAULT_STACK_BYTES 16384u
#define LEAST_STACK_BYTES 512u
#define MOST_STACK_BYTES 1048576u
#define EINVAL 22
#define EAGAIN 11

// A chip has four to eight vector contexts.
#define VECTOR_UNITS 4
#define MAX_WORKERS 16
#define DEFAULT_PRIORITY 254
#define CALL_PRIORITY 192

static struct worker {
  struct thread *thread;
  void *(*entry)(void *);
  void *argument;
  uint32_t stack_bytes;
  uint32_t is_used;
  int priority;
} workers[MAX_WORKERS];

static struct worker *this_worker(void) {
  uint32_t index = this_thread()->index;
  return index < CHANNELS ? NULL : &workers[index - CHANNELS];
}

int pthread_attr_init(struct attributes *attributes) {
  memset(attributes, 0, sizeof *attributes);
  attributes->stack_bytes = DEFAULT_STACK_BYTES;
  return 0;
}

int pthread_attr_setstacksize(struct attributes *attributes, uint32_t bytes) {
  if (bytes < LEAST_STACK_BYTES || bytes > MOST_STACK_BYTES)
    return EINVAL;
  attributes->stack_bytes = bytes;
  return 0;
}

static void run_worker(struct thread *thread) {
  struct worker *worker = &workers[thread->index - CHANNELS];
  worker->entry(worker->argument);
  system_call(SYS_EXIT, 0, 0, 0, 0, 0, 0);
  __builtin_trap();
}

static struct worker *take_worker(void) {
  for (uint32_t i = 0; i < MAX_WORKERS; i++)
    if (!__atomic_exchange_n(&workers[i].is_used, 1, __ATOMIC_SEQ_CST))
      return &workers[i];
  return NULL;
}

static int may_start(void) {
  uint32_t most = control->rules >> RULE_WORKERS_SHIFT & 255;
  uint32_t running = control->workers - control->workers_joined;
  return !most || running < most - 1;
}

int pthread_create(uint32_t *id, const struct attributes *attributes,
                   void *(*entry)(void *), void *argument) {
  struct worker *worker = may_start() ? take_worker() : NULL;
  if (!worker)
    return EAGAIN;
  uint32_t index = CHANNELS + (uint32_t)(worker - workers);
  struct thread *thread = make_block(index);
  thread->stack = guarded(attributes->stack_bytes);
  thread->running = 1;
  worker->thread = thread;
  worker->entry = entry;
  worker->argument = argument;
  worker->stack_bytes = attributes->stack_bytes;
  worker->priority = DEFAULT_PRIORITY;
  // A stack of QuRT's is aligned to 8 bytes, no more.
  long error = clone_thread(thread->stack + attributes->stack_bytes - 8,
                            run_worker, thread, &thread->running);
  if (is_error(error))
    die("no worker, error %d", (int)-error);
  __atomic_fetch_add(&control->workers, 1, __ATOMIC_RELAXED);
  *id = index + 1;
  return 0;
}

int pthread_join(uint32_t id, void **result) {
  if (id <= CHANNELS || id > CHANNELS + MAX_WORKERS)
    die("join of thread %u", id);
  struct worker *worker = &workers[id - 1 - CHANNELS];
  struct thread *thread = worker->thread;
  if (!worker->is_used)
    die("join of thread %u, which does not run", id);
  const long wait = 0;
  while (__atomic_load_n(&thread->running, __ATOMIC_SEQ_CST))
    system_call(SYS_FUTEX, (long)&thread->running, wait, 1, 0, 0, 0);
  if (worker->priority != CALL_PRIORITY)
    die("a worker had priority %d", worker->priority);
  unmap_guarded(thread->stack, worker->stack_bytes);
  unmap_guarded(thread->emulation_stack - OWN_STACK_BYTES, OWN_STACK_BYTES);
  system_call(SYS_MUNMAP, (long)thread, sizeof *thread, 0, 0, 0, 0);
  __atomic_fetch_add(&control->workers_joined, 1, __ATOMIC_RELAXED);
  __atomic_store_n(&worker->is_used, 0, __ATOMIC_SEQ_CST);
  if (result)
    *result = NULL;
  return 0;
}

int qurt_futex_wait(void *word, int value) {
  const long wait_private = 128;
  return (int)system_call(SYS_FUTEX, (long)word, wait_private, value, 0, 0, 0);
}

int qurt_futex_wake(void *word, int count) {
  const long wake_private = 129;
  return (int)system_call(SYS_FUTEX, (long)word, wake_private, count, 0, 0, 0);
}

// SOURCE: hexagon-ops/skel/src/hap.rs: bits 15 to 8 count contexts of 128
// bytes.
int qurt_hvx_get_units(void) { return VECTOR_UNITS << 8; }

uint32_t qurt_thread_get_id(void) { return this_thread()->index + 1; }

int qurt_thread_get_priority(uint32_t id) {
  if (id != qurt_thread_get_id())
    die("priority of thread %u", id);
  const struct worker *worker = this_worker();
  return worker ? worker->priority : CALL_PRIORITY;
}

int qurt_thread_set_priority(uint32_t id, uint16_t priority) {
  struct worker *worker = this_worker();
  if (id != qurt_thread_get_id() || !worker)
    die("priority %u for thread %u", priority, id);
  worker->priority = priority;
  return 0;
}
