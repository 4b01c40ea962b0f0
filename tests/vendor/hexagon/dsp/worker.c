// Threads that the library starts: QuRT's functions for threads, waiting and
// priorities, implemented with the emulator's threads and futexes.

#include "dsp.h"

// SOURCE: public copies of Qualcomm's qurt_thread.h of 2018 to 2023,
// qurt_thread_attr_t and the values of its fields.
struct thread_attributes {
  char name[16];
  uint8_t tcb_partition, stid;
  uint16_t priority;
  uint8_t flags, bus_priority;
  uint16_t timetest_id;
  uint32_t stack_bytes;
  uint8_t *stack;
  uint16_t detach_state;
};
_Static_assert(offsetof(struct thread_attributes, detach_state) == 32,
               "qurt_thread_attr_t");
#define BUS_PRIORITY 255
#define TIMETEST_ID 0xfffe
#define JOINABLE 1
#define LOWEST_PRIORITY 254
#define QURT_EFAILED 12
#define LEAST_STACK_BYTES 4096u
// Fills the end of a worker's stack, which it must not reach.
#define PATTERN 0xa5a5a5a5a5a5a5a5u

// Chips have four to eight vector contexts.
#define VECTOR_UNITS 4
#define MAX_WORKERS 16
#define CALL_PRIORITY 192

static struct worker {
  struct thread *thread;
  void (*entry)(void *);
  void *argument;
  uint32_t is_used;
  int priority;
} workers[MAX_WORKERS];

static struct worker *this_worker(void) {
  uint32_t index = this_thread()->index;
  return index < CHANNELS ? NULL : &workers[index - CHANNELS];
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

static void check_attributes(const struct thread_attributes *attributes) {
  if (!attributes->priority || attributes->priority > LOWEST_PRIORITY)
    die("a thread with priority %u", attributes->priority);
  if (attributes->tcb_partition || attributes->stid || attributes->flags ||
      attributes->bus_priority != BUS_PRIORITY ||
      attributes->timetest_id != TIMETEST_ID ||
      attributes->detach_state != JOINABLE)
    die("attributes of a thread that are not the usual ones");
  if (!attributes->stack || (uintptr_t)attributes->stack % 8 ||
      attributes->stack_bytes < LEAST_STACK_BYTES)
    die("a stack of %u bytes at 0x%x", attributes->stack_bytes,
        (uint32_t)attributes->stack);
  for (uint32_t i = 0; i < MAX_WORKERS; i++) {
    const struct thread *other = workers[i].is_used ? workers[i].thread : NULL;
    if (other && other->stack == attributes->stack)
      die("two threads on one stack");
  }
}

int qurt_thread_create(uint32_t *id, const struct thread_attributes *attributes,
                       void (*entry)(void *), void *argument) {
  check_attributes(attributes);
  struct worker *worker = may_start() ? take_worker() : NULL;
  if (!worker)
    return QURT_EFAILED;
  uint32_t index = CHANNELS + (uint32_t)(worker - workers);
  struct thread *thread = make_block(index);
  thread->stack = attributes->stack;
  thread->running = 1;
  // The lowest bytes must stay unchanged, because there is no guard area below
  // them.
  *(uint64_t *)thread->stack = PATTERN;
  worker->thread = thread;
  worker->entry = entry;
  worker->argument = argument;
  worker->priority = attributes->priority;
  // QuRT aligns a stack to 8 bytes and no more.
  long error = clone_thread(thread->stack + attributes->stack_bytes - 8,
                            run_worker, thread, &thread->running);
  if (is_error(error))
    die("no worker, error %d", (int)-error);
  __atomic_fetch_add(&control->workers, 1, __ATOMIC_RELAXED);
  *id = index + 1;
  return 0;
}

int qurt_thread_join(uint32_t id, int *status) {
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
  if (*(uint64_t *)thread->stack != PATTERN)
    die("a worker used all of its stack");
  unmap_guarded(thread->emulation_stack - OWN_STACK_BYTES, OWN_STACK_BYTES);
  system_call(SYS_MUNMAP, (long)thread, sizeof *thread, 0, 0, 0, 0);
  __atomic_fetch_add(&control->workers_joined, 1, __ATOMIC_RELAXED);
  __atomic_store_n(&worker->is_used, 0, __ATOMIC_SEQ_CST);
  *status = 0;
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
