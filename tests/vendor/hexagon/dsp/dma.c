// The DMA engine of a hardware thread: starting a chain of descriptors copies
// all of it at once.

#include "dsp.h"

// SOURCE: words and bits as in hexagon-ops/src/rt/descriptor.rs.
struct descriptor {
  uint32_t next, control, source, destination;
  // Fields that only descriptors of rows have.
  uint32_t kind, low, high, offsets;
};
#define BYTES 0xffffffu
#define TYPE 0x3000000u
#define ROWS 0x1000000u
#define DONE 0x80000000u
enum { NARROW = 0, WIDE = 9 };
// SOURCE: the status word's two lowest bits, as hexagon-ops/src/rt/qurt/dma.rs.
enum { IDLE = 0, RUNNING = 1 };

// RULE_DMA_STUCK: the engine runs until it is paused.
static uint32_t starts, status;

// Copies rows; the form of the descriptor depends on the chip.
static void copy_rows(const struct descriptor *it) {
  uint32_t row, rows, from_stride, to_stride;
  if ((uint32_t)it % 32)
    die("descriptor of rows at 0x%x is not aligned", (uint32_t)it);
  if (it->kind == NARROW) {
    row = it->low & 0xffff;
    rows = it->low >> 16;
    from_stride = it->high & 0xffff;
    to_stride = it->high >> 16;
    if (it->control & BYTES)
      die("narrow rows of %u bytes", it->control & BYTES);
  } else if (it->kind == WIDE) {
    row = it->low & BYTES;
    rows = it->low >> 24 | (it->high & 0xff) << 8;
    from_stride = it->high >> 8;
    to_stride = it->control & BYTES;
  } else {
    die("rows of kind %u", it->kind);
  }
  if (!row || !rows || !from_stride || !to_stride || it->offsets)
    die("%u rows of %u bytes, strides %u and %u, offsets 0x%x", rows, row,
        from_stride, to_stride, it->offsets);
  for (uint32_t i = 0; i < rows; i++)
    memcpy((void *)(it->destination + i * to_stride),
           (void *)(it->source + i * from_stride), row);
}

static void run(uint32_t address) {
  struct descriptor *it = (struct descriptor *)address;
  if (address % 16)
    die("descriptor at 0x%x is not aligned", address);
  for (; it; it = (struct descriptor *)it->next) {
    uint32_t type = it->control & TYPE;
    if (type == ROWS)
      copy_rows(it);
    else if (!type)
      memcpy((void *)it->destination, (void *)it->source, it->control & BYTES);
    else
      die("descriptor of type %u", type >> 24);
    __atomic_fetch_or(&it->control, DONE, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&control->copies, 1, __ATOMIC_RELAXED);
  }
}

void dma_word(uint32_t kind, uint32_t *r) {
  uint32_t *operand = &r[kind & 31];
  switch (kind & 0xff00) {
  case DMA_PAUSE:
    *operand = status;
    status = IDLE;
    return;
  case DMA_POLL:
    *operand = status;
    return;
  case DMA_WAIT:
    while (status == RUNNING)
      system_call(SYS_NANOSLEEP, (long)(uint32_t[4]){1}, 0, 0, 0, 0, 0);
    *operand = status;
    return;
  case DMA_LINK:
    ((struct descriptor *)r[kind >> 16])->next = *operand;
    // A running engine reaches the new descriptor by itself.
    if (status == IDLE)
      run(*operand);
    return;
  }
  if (status == RUNNING)
    die("the DMA engine was started while it was running");
  if ((control->rules & RULE_DMA_STUCK) && ++starts == 2) {
    status = RUNNING;
    return;
  }
  run(*operand);
}
