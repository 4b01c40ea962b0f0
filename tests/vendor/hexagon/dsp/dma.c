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
// SOURCE: the status word's two lowest bits, as hexagon-ops/src/rt/qurt.rs.
enum { IDLE = 0, RUNNING = 1 };

// RULE_DMA_STUCK: the engine runs until it is paused.
static uint32_t starts, status;

void dma_word(uint32_t kind, uint32_t *r) {
  uint32_t *operand = &r[kind & 31];
  switch (kind & ~31u) {
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
  }
  if (status == RUNNING)
    die("the DMA engine was started while it was running");
  if ((control->rules & RULE_DMA_STUCK) && ++starts == 2) {
    status = RUNNING;
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
