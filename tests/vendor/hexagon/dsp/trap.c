// Replaces instruction words that the emulator does not know by jumps to stubs.

#include "dsp.h"

// Bits 15 and 14 of an instruction: 11 ends a packet; 00 is a pair of
// instructions, which also ends one.
static int ends_packet(uint32_t word) {
  return (word & 0xc000) == 0xc000 || (word & 0xc000) == 0;
}

// Returns the kind of an instruction word that is replaced, or -1. A
// multiplication has two words.
// SOURCE: encodings as in hexagon-ops/src/hmx/hexagon.rs and, for the DMA
// engine, as LLVM assembles them.
static int kind_of(const uint32_t *word, uint32_t *words) {
  *words = 1;
  if (word[0] == 0xa6e0c013)
    return MATRIX_CLEAR;
  if (word[0] == 0x9200c3fe)
    return MATRIX_SCALE;
  if (word[0] == 0xa6e0e104)
    return MATRIX_STORE;
  if (word[0] == 0x920042e2 && word[1] == 0x9201e3ef) {
    *words = 2;
    return MATRIX_MULTIPLY;
  }
  if ((word[0] & 0xffe0ffff) == 0xa600c020)
    return DMA_START | (int)(word[0] >> 16 & 31);
  if ((word[0] & 0xffe0e0ff) == 0xa600c040)
    return DMA_LINK | (int)(word[0] >> 8 & 31) | (int)(word[0] & 31 << 16);
  if ((word[0] & 0xffffffe0) == 0xa800c020)
    return DMA_WAIT | (int)(word[0] & 31);
  if ((word[0] & 0xffffffe0) == 0xa800c040)
    return DMA_POLL | (int)(word[0] & 31);
  if ((word[0] & 0xffffffe0) == 0xa800c060)
    return DMA_PAUSE | (int)(word[0] & 31);
  return -1;
}

static int is_unknown_matrix_word(uint32_t word) {
  return (word & 0xffe00000) == 0xa6e00000;
}

// `{ jump to }`
static uint32_t jump(const uint32_t *from, const uint32_t *to) {
  uint32_t words = (uint32_t)(to - from);
  return 0x5800c000 | (words >> 13 & 0x1ff) << 16 | (words & 0x1fff) << 1;
}

void trap_words(uint32_t *first, uint32_t *end, uint32_t *room,
                uint32_t *room_end) {
  uint32_t sites = 0, size = (uint32_t)(stub_end - stub);
  int starts_packet = 1;
  for (uint32_t *word = first; word < end; word++) {
    uint32_t words;
    int kind = kind_of(word, &words);
    if (kind < 0 && starts_packet && is_unknown_matrix_word(*word))
      die("word 0x%x at 0x%x is unknown", *word, (uint32_t)word);
    if (kind >= 0 && !starts_packet)
      die("word 0x%x at 0x%x does not start a packet", *word, (uint32_t)word);
    starts_packet = ends_packet(*word);
    if (kind < 0)
      continue;
    if (room + size + 1 > room_end)
      die("no room for stub %u", sites);
    memcpy(room, stub, size * 4);
    room[stub_kind - stub] = (uint32_t)kind;
    room[size] = jump(room + size, word + words);
    *word = jump(word, room);
    room += size + 1;
    word += words - 1;
    starts_packet = 1;
    sites++;
  }
  note("%u words of the matrix unit and the DMA engine", sites);
}

// `trap` of start.S calls this, on the thread's emulation stack.
void emulate(struct registers *registers, uint32_t kind) {
  if (kind < DMA_START)
    matrix_word(kind, registers->r);
  else
    dma_word(kind, registers->r);
}
