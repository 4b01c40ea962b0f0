// A Linux kernel's FastRPC driver and dma-buf heap, for one process, in user
// space. hooks.c provides it to an unmodified program.

#ifndef KERNEL_H
#define KERNEL_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "../protocol.h"

// rules.c: the rules that LOOP_RULES requests, a comma-separated list of NAME
// or NAME=NUMBER.
struct rules {
  // On by default; "any-length" turns it off.
  int whole_pages;
  // The most bytes that a process may have mapped.
  uint64_t window_bytes;
  // How many long calls a signal ends with EINTR.
  int interrupts;
  // How many long calls a signal restarts: the DSP gets each of them twice.
  int restarts;
  // Number of the first mmap of shared memory that fails, counted from 1; 0 for
  // none.
  int mmap_fails_at;
  // HAP_power_set refuses power for the matrix unit.
  int refuse_votes;
  // The DMA engine never finishes its second copy.
  int dma_stuck;
  // How many threads the library can start, plus one; 0 for any number.
  uint32_t workers;
  // The chip has no IEEE vector arithmetic: V73's usual library dies in its
  // first serving call, and only its qfloat library works.
  int no_ieee;
  // Another process holds VTCM for this long after the start.
  uint32_t vtcm_held_ms;
  // Symbols that the DSP's loader refuses, each after a space.
  char blacklist[sizeof(((struct control *)0)->blacklist)];
  // The loader refuses a library if a weak import is missing.
  int no_weak;
  // The shell lacks the function that changes the priority of VTCM's holder.
  int no_priority;
  // The system refuses the lock of the matrix unit.
  int no_hmx;
  // Bytes of VTCM; 0 for the most.
  uint32_t vtcm_bytes;
  // A mapping ends with the call in which the DSP has unmapped it.
  int vanish;
  // Unmapped memory takes room in the window until a call of the library ends.
  int late_unmap;
  // Number of the unmap request that fails, counted from 1; 0 for none. And
  // whether it has failed.
  int unmap_fails_at;
  int unmap_has_failed;
  // DSPs of the chip, 1 or 2.
  int dsps;
};
extern struct rules rules;
void rules_init(void);

// Uses up one of a rule's count; returns 0 if none is left.
int rule_take(int *count);

// LOOP_LOG=1: writes one line to stderr.
extern int verbose;
void note(const char *format, ...) __attribute__((format(printf, 1, 2)));
// Always writes one line to stderr.
void report(const char *format, ...) __attribute__((format(printf, 1, 2)));

// The DSPs that a chip may have.
#define MOST_DSPS 2

// device.c: a file descriptor of /dev/fastrpc-cdsp, or of a later DSP's node.
struct session *session_open(int dsp);
void session_close(struct session *session);
// Returns whether a descriptor is the number of a mapping.
int session_maps(struct session *session, int fd);
// Returns ioctl's result, with errno.
int session_ioctl(struct session *session, unsigned long request, void *arg);

// process.c: a process on the DSP.
struct buffer {
  void *at;
  size_t bytes;
};
struct process *process_start(const char *library, uint32_t stack_bytes,
                              int dsp);
struct control *process_control(struct process *process);
// Calls the library; `handle_out` is for scalars that ask for a handle. Returns
// 0 and the library's status, or an errno.
int process_call(struct process *process, uint64_t handle, uint32_t scalars,
                 struct buffer *buffers, uint64_t *handle_out, int *status);
// Kills the process and logs its work.
void process_end(struct process *process);

// vtcm.c: the VTCM of a DSP.
int vtcm_fd(int dsp);
// Takes it from a process that has ended.
void vtcm_release(int dsp, uint32_t process);

#endif
