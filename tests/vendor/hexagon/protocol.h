// What the fake kernel and a DSP process agree on: the descriptors that the
// process inherits, the page that both map, and the format of a call.

#ifndef PROTOCOL_H
#define PROTOCOL_H

#include <stdint.h>

// Threads of a DSP process that wait for calls; each has its own socket.
#define CHANNELS 4

// Descriptors of a DSP process.
#define CONTROL_FD 8
#define VTCM_FD 9
#define FIRST_CHANNEL_FD 10

// A call: this header and its input buffers; then the answer: a status, the
// handle if the scalars ask for one, and the output buffers.
#define MAX_BUFFERS 8
#define MAX_CALL_BYTES 65536

struct request {
  uint32_t scalars;
  uint32_t reserved;
  uint64_t handle;
  uint32_t bytes[MAX_BUFFERS];
};

static inline uint32_t scalars_method(uint32_t scalars) {
  return scalars >> 24 & 31;
}
static inline uint32_t scalars_inputs(uint32_t scalars) {
  return scalars >> 16 & 255;
}
static inline uint32_t scalars_outputs(uint32_t scalars) {
  return scalars >> 8 & 255;
}
static inline uint32_t scalars_handles(uint32_t scalars) {
  return scalars & 15;
}

// Rules for the DSP process, as bits of `control.rules`.
#define RULE_VOTES 1u        // no power for the matrix unit
#define RULE_WHOLE_PAGES 2u  // HAP_mmap takes nothing else
#define RULE_DMA_STUCK 4u    // the DMA engine runs forever at its second copy
#define RULE_NO_WEAK 8u      // the loader refuses a weak import that is missing
#define RULE_NO_PRIORITY 16u // holders of VTCM cannot change their priority
#define RULE_NO_HMX 32u      // the matrix unit's lock is refused
// Bits 15 to 8: how many worker threads can be started, plus one; 0 for any
// number.
#define RULE_WORKERS_SHIFT 8

// Buffers that the host has mapped for the DSP: the host's number of the
// descriptor, and the descriptor that the kernel holds. An entry of 0 bytes is
// free. The process sets `unmapped` when it has unmapped the memory.
#define MAPPINGS 3900
struct mapping {
  int32_t fd;
  int32_t kernel_fd;
  uint32_t bytes;
  uint32_t unmapped;
};

// Both sides map it; its size is a multiple of the emulator's page of 64 KiB.
#define CONTROL_BYTES 65536
struct control {
  // The kernel writes these before the process starts.
  int32_t host_pid;
  uint32_t process; // number of this process, not 0
  uint32_t stack_bytes;
  uint32_t rules;
  uint32_t verbose;
  uint32_t arch;        // number of the chip's architecture, 0x75
  uint32_t vtcm_bytes;  // those that the library gets, at most VTCM_BYTES
  char blacklist[1024]; // symbols that the loader refuses, each after a space
  // The process writes these.
  uint32_t deepest_stack;
  uint32_t calls;
  uint32_t multiplications;
  uint32_t copies;
  uint32_t workers; // threads that the library started, and joined
  uint32_t workers_joined;
  char message[256];
  // The kernel writes these at any time, an entry's bytes last.
  struct mapping mappings[MAPPINGS];
};
_Static_assert(sizeof(struct control) <= CONTROL_BYTES, "control page");

// The most VTCM that a chip has, which all DSP processes share. The word after
// it names the process that holds it.
#define VTCM_BYTES (8u << 20)
#define VTCM_FILE_BYTES (VTCM_BYTES + 65536)
#define VTCM_FREE 0u
#define VTCM_OTHER UINT32_MAX
struct vtcm_owner {
  uint32_t process;        // VTCM_FREE, VTCM_OTHER or the number of a process
  uint32_t other_until_ms; // monotonic clock; then VTCM_OTHER gives it back
  uint32_t waiting;        // processes that wait for it
};

#endif
