// The DMA engine of a hardware thread: a descriptor is carried out when it is
// started.

#include "dsp.h"

// SOURCE: words and bits as in hexagon-ops/src/rt/qurt.rs.
struct descriptor {
  uint32_t next, control, source, destination;
};
#define BYTES 0xffffffu
#define TYPE 0x3000000u
#define DONE 0x80000000u

void dma_word(uint32_t kind, uint32_t *r) {
  uint32_t *operand = &r[kind & 31];
  if ((kind & ~31u) != DMA_START) {
    *operand = 0; // idle
    return;
  }
  struct descriptor *descriptor = (struct descriptor *)*operand;
  if (*operand % 16)
    die("descriptor at 0x%x is not aligned", *operand);
  for (; descriptor; descriptor = (struct descriptor *)descriptor->next) {
    if (descriptor->control & TYPE)
      die("descriptor of type %u", descriptor->control >> 24 & 3);
    memcpy((void *)descriptor->destination, (void *)descriptor->source,
           descriptor->control & BYTES);
    __atomic_fetch_or(&descriptor->control, DONE, __ATOMIC_SEQ_CST);
    __atomic_fetch_add(&control->copies, 1, __ATOMIC_RELAXED);
  }
}
