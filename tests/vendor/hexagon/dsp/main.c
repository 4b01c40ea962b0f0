// The process: threads that wait for calls. Each has a stack as FastRPC's shell
// provides it, with a guard area below it, and a pattern that shows how much of
// it was used.

#include "dsp.h"

struct control *control;

#define PATTERN 0xa5a5a5a5a5a5a5a5u

struct argument {
  uint32_t at;
  uint32_t bytes;
};

static entry_fn *entry;

static uint32_t whole_pages(uint32_t bytes) {
  return (bytes + EMULATOR_PAGE - 1) / EMULATOR_PAGE * EMULATOR_PAGE;
}

uint8_t *guarded(uint32_t bytes) {
  bytes = whole_pages(bytes);
  uint8_t *guard = map(GUARD_BYTES + bytes, -1, 0);
  system_call(SYS_MPROTECT, (long)guard, GUARD_BYTES, 0, 0, 0, 0);
  return guard + GUARD_BYTES;
}

void unmap_guarded(uint8_t *at, uint32_t bytes) {
  system_call(SYS_MUNMAP, (long)(at - GUARD_BYTES),
              GUARD_BYTES + whole_pages(bytes), 0, 0, 0, 0);
}

struct thread *make_block(uint32_t index) {
  struct thread *thread = (struct thread *)map(sizeof *thread, -1, 0);
  thread->emulation_stack = guarded(OWN_STACK_BYTES) + OWN_STACK_BYTES;
  thread->index = index;
  return thread;
}

static struct thread *make_thread(uint32_t index) {
  struct thread *thread = make_block(index);
  // The lowest byte is directly above the guard area, so the stack has exactly
  // the requested length.
  thread->stack = guarded(control->stack_bytes);
  for (uint32_t at = 0; at + 8 <= control->stack_bytes; at += 8)
    *(uint64_t *)(thread->stack + at) = PATTERN;
  return thread;
}

static void measure(const struct thread *thread) {
  uint32_t at = 0,
           deepest = __atomic_load_n(&control->deepest_stack, __ATOMIC_RELAXED);
  uint32_t end = control->stack_bytes - deepest;
  while (at + 8 <= end && *(uint64_t *)(thread->stack + at) == PATTERN)
    at += 8;
  if (at + 8 > end)
    return;
  while (control->stack_bytes - at > deepest &&
         !__atomic_compare_exchange_n(&control->deepest_stack, &deepest,
                                      control->stack_bytes - at, 0,
                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED))
    ;
}

static void transfer(int fd, void *at, uint32_t bytes, long number) {
  uint8_t *next = at;
  while (bytes) {
    long moved = system_call(number, fd, (long)next, (long)bytes, 0, 0, 0);
    if (moved == 0) // the host is gone
      system_call(SYS_EXIT_GROUP, 0, 0, 0, 0, 0, 0);
    if (is_error(moved))
      die("channel %d, error %d", fd, (int)-moved);
    next += moved;
    bytes -= (uint32_t)moved;
  }
}

static void serve_call(struct thread *thread, uint8_t *data) {
  int fd = FIRST_CHANNEL_FD + (int)thread->index;
  struct request request;
  transfer(fd, &request, sizeof request, SYS_READ);
  uint32_t inputs = scalars_inputs(request.scalars);
  uint32_t count = inputs + scalars_outputs(request.scalars);
  struct argument arguments[MAX_BUFFERS + 1];
  uint32_t at = 0;
  for (uint32_t i = 0; i < count; i++) {
    arguments[i] = (struct argument){(uint32_t)data + at, request.bytes[i]};
    if (i < inputs)
      transfer(fd, data + at, request.bytes[i], SYS_READ);
    else
      memset(data + at, 0, request.bytes[i]);
    at = (at + request.bytes[i] + 7) & ~7u;
  }
  int status = call_on_stack(
      thread->stack + control->stack_bytes, entry, (uint32_t)request.handle,
      (uint32_t)(request.handle >> 32), request.scalars, arguments);
  measure(thread);
  __atomic_fetch_add(&control->calls, 1, __ATOMIC_RELAXED);
  transfer(fd, &status, sizeof status, SYS_WRITE);
  if (scalars_handles(request.scalars))
    transfer(fd, &arguments[count], sizeof arguments[count], SYS_WRITE);
  for (uint32_t i = inputs; i < count; i++)
    transfer(fd, (void *)arguments[i].at, arguments[i].bytes, SYS_WRITE);
}

static void serve(struct thread *thread) {
  uint8_t *data = map(MAX_CALL_BYTES + 8 * MAX_BUFFERS, -1, 0);
  for (;;)
    serve_call(thread, data);
}

// `stack` is the stack that the kernel set up: argc, argv.
void run_process(uint32_t *stack) {
  char **arguments = (char **)(stack + 1);
  control = (struct control *)map(CONTROL_BYTES, CONTROL_FD, 0);
  if (stack[0] != 2)
    die("usage: the path of a library");
  map_vtcm();
  entry = load_library(arguments[1]);
  for (uint32_t i = 1; i < CHANNELS; i++) {
    struct thread *thread = make_thread(i);
    long error = clone_thread(guarded(OWN_STACK_BYTES) + OWN_STACK_BYTES, serve,
                              thread, &thread->running);
    if (is_error(error))
      die("no thread, error %d", (int)-error);
  }
  struct thread *first = make_thread(0);
  set_thread(first);
  serve(first);
}
