// A Linux kernel's FastRPC driver and dma-buf heap, for one process, in user
// space. hooks.c puts it under an unmodified program.

#ifndef KERNEL_H
#define KERNEL_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "../protocol.h"

// rules.c: what LOOP_RULES asks for, a comma list of NAME or NAME=NUMBER.
struct rules {
  // On by default; "any-length" switches it off.
  int whole_pages;
  // Bytes that a process's mappings may add up to.
  uint64_t window_bytes;
  // Long calls that a signal ends with EINTR.
  int interrupts;
  // Long calls that a signal restarts: the DSP gets each of them twice.
  int restarts;
  // The first mmap of shared memory that fails, from 1; 0 for none.
  int mmap_fails_at;
  // HAP_power_set refuses power for the matrix unit.
  int refuse_votes;
  // The DMA engine never finishes its second copy.
  int dma_stuck;
  // Threads that the library can start, and one more; 0 for any number.
  uint32_t workers;
  // The chip has no IEEE vector arithmetic: a library for V73 that is not the
  // qfloat one dies of it in its first serving call.
  int no_ieee;
  // Another process holds VTCM for that long after the start.
  uint32_t vtcm_held_ms;
  // Symbols that the DSP's loader refuses, each after a space.
  char blacklist[sizeof(((struct control *)0)->blacklist)];
  // The loader refuses a library with a weak import that is missing.
  int no_weak;
  // The shell lacks the function that changes the priority of a holder of VTCM.
  int no_priority;
  // The system refuses the lock of the matrix unit.
  int no_hmx;
  // Bytes of VTCM; 0 for the most.
  uint32_t vtcm_bytes;
  // A mapping goes at the end of a call in which the DSP has unmapped it.
  int vanish;
  // What is unmapped takes room in the window until a call of the library ends.
  int late_unmap;
  // The request to unmap that fails, from 1; 0 for none; and whether it has.
  int unmap_fails_at;
  int unmap_has_failed;
};
extern struct rules rules;
void rules_init(void);

// Takes one from a rule's count; returns 0 when none is left.
int rule_take(int *count);

// LOOP_LOG=1: one line of stderr.
extern int verbose;
void note(const char *format, ...) __attribute__((format(printf, 1, 2)));
// Always one line of stderr.
void report(const char *format, ...) __attribute__((format(printf, 1, 2)));

// device.c: a file descriptor of /dev/fastrpc-cdsp.
struct session *session_open(void);
void session_close(struct session *session);
// Returns whether a descriptor is the number of a mapping.
int session_maps(struct session *session, int fd);
// Returns what ioctl returns, with errno.
int session_ioctl(struct session *session, unsigned long request, void *arg);

// process.c: a process on the DSP.
struct buffer {
  void *at;
  size_t bytes;
};
struct process *process_start(const char *library, uint32_t stack_bytes);
struct control *process_control(struct process *process);
// Calls the library; `handle_out` is for scalars that ask for a handle. Returns
// 0 and the library's status, or an errno.
int process_call(struct process *process, uint64_t handle, uint32_t scalars,
                 struct buffer *buffers, uint64_t *handle_out, int *status);
// Kills it and says what it did.
void process_end(struct process *process);

// vtcm.c: the chip's VTCM.
int vtcm_fd(void);
// Takes it from a process that has ended.
void vtcm_release(uint32_t process);

#endif
