// A process on the DSP, for the emulator's linux-user mode: freestanding C and
// assembly, one file for each group of functions of a FastRPC shell
// or of the chip.

#ifndef DSP_H
#define DSP_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include "../protocol.h"

// SOURCE: include/uapi/asm-generic/unistd.h.
enum {
  SYS_OPENAT = 56,
  SYS_CLOSE = 57,
  SYS_READ = 63,
  SYS_WRITE = 64,
  SYS_EXIT = 93,
  SYS_EXIT_GROUP = 94,
  SYS_FUTEX = 98,
  SYS_NANOSLEEP = 101,
  SYS_CLOCK_GETTIME = 113,
  SYS_MUNMAP = 215,
  SYS_MMAP = 222,
  SYS_MPROTECT = 226
};
#define PAGE 4096u
// The size of the emulator's pages; guard areas are multiples of it.
#define EMULATOR_PAGE 65536u

extern struct control *control;

// system.c
void *memcpy(void *to, const void *from, size_t bytes);
void *memset(void *at, int value, size_t bytes);
int same(const char *a, const char *b);
long system_call(long number, long a, long b, long c, long d, long e, long f);
static inline int is_error(long result) { return (uint32_t)result > -4096u; }
// Writes a line of the loop's log; `debug` does so only with LOOP_LOG.
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
void note(const char *format, ...) __attribute__((format(printf, 1, 2)));
void say_list(const char *head, const char *format, va_list args);
// Ends the process; the kernel reports the text.
_Noreturn void die(const char *format, ...)
    __attribute__((format(printf, 1, 2)));
uint64_t now_us(void);
// Maps whole pages; `fd` < 0 stands for private memory. Ends the process if
// there is no memory.
uint8_t *map(size_t bytes, int fd, long offset_bytes);

// elf.c: loads a library; returns its entry.
typedef int entry_fn(uint64_t handle, uint32_t scalars, void *args);
entry_fn *load_library(const char *path);

// main.c: memory above an area that cannot be touched, of whole pages of the
// emulator, and a thread's block without the stack of the library's code.
#define GUARD_BYTES (1u << 20)
#define OWN_STACK_BYTES (256u << 10)
uint8_t *guarded(uint32_t bytes);
void unmap_guarded(uint8_t *at, uint32_t bytes);
struct thread *make_block(uint32_t index);

// shell.c: symbols that libraries may import; NULL if it is unknown. Ends the
// process for a symbol that unsigned libraries may not have.
void *shell_symbol(const char *name);

// trap.c: replaces the instruction words of the matrix unit and the DMA engine
// by calls.
void trap_words(uint32_t *first, uint32_t *end, uint32_t *room,
                uint32_t *room_end);

// A thread's registers while an instruction is emulated, at the start of its
// block; start.S knows the offsets.
struct registers {
  uint32_t r[32];
  uint32_t other[32];
  uint8_t vectors[36][128];
};
struct thread {
  struct registers registers;
  uint8_t *emulation_stack; // its end
  uint8_t *stack;           // stack of the library's code, its lowest byte
  uint32_t index;
  uint32_t running;
} __attribute__((aligned(128)));

// resource.c
extern uint8_t *vtcm;
extern uint32_t matrix_locked;
void map_vtcm(void);
// Calls the release callback once if this process has VTCM and another waits.
void ask_for_release(void);

// matrix.c: `kind` is one of enum word.
enum word {
  MATRIX_CLEAR,
  MATRIX_SCALE,
  MATRIX_MULTIPLY,
  MATRIX_STORE,
  DMA_START = 0x100, // plus the register's number
  DMA_WAIT = 0x200,
  DMA_POLL = 0x300,
  DMA_PAUSE = 0x400,
  DMA_LINK = 0x500 // plus the tail's register in bits 16 and up
};
void matrix_word(enum word word, const uint32_t *r);
// dma.c
void dma_word(uint32_t kind, uint32_t *r);

// start.S
int call_on_stack(void *stack_end, entry_fn *entry, uint32_t handle_low,
                  uint32_t handle_high, uint32_t scalars, void *args);
void set_thread(struct thread *thread);
struct thread *this_thread(void);
// Starts `run(thread)` on a separate stack; returns an error or a number > 0.
// When the thread ends, `running` becomes 0, which wakes those that wait for
// it.
long clone_thread(void *stack_end, void (*run)(struct thread *),
                  struct thread *thread, uint32_t *running);
extern uint32_t stub[], stub_kind[], stub_end[];

#endif
