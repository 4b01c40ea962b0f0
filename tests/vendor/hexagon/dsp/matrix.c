// The matrix unit: FP16 tiles, sums in FP32. Before V73 it cannot scale when it
// stores: the control block is zero, and results have the range of a tile.
//
// A tile is 32 x 32; element (i, j) is the half word at
// 128 * (i / 2) + 4 * j + 2 * (i % 2), so a vector holds a pair of rows. The
// products of two FP16 are exact in FP32.

#include <hexagon_protos.h>
#include <hexagon_types.h>

#include "dsp.h"

#define TILE_BYTES 2048
#define DIM 32
#define MAX_TILES 32

// Row by row, with 32 columns in a vector.
static HVX_Vector sums[2][DIM];
static uint32_t current;
// Scale and bias of each column, as the two halves of a word.
static HVX_Vector scale_block[2];

static void check(const char *what, uint32_t at, uint32_t bytes,
                  uint32_t alignment) {
  uint32_t first = (uint32_t)vtcm;
  if (at % alignment)
    die("%s at 0x%x is not aligned to %u", what, at, alignment);
  uint32_t all = control->vtcm_bytes;
  if (at < first || bytes > all || at - first > all - bytes)
    die("%s at 0x%x, %u bytes, is not inside VTCM", what, at, bytes);
}

static void clear(HVX_Vector *rows) {
  for (uint32_t i = 0; i < DIM; i++)
    rows[i] = Q6_V_vzero();
}

// The two halves of row i for K and K + 1.
static uint32_t pair(const uint16_t *tile, uint32_t i, uint32_t k) {
  const uint16_t *at = tile + 64 * (i / 2) + 2 * k + i % 2;
  return at[0] | (uint32_t)at[2] << 16;
}

static void multiply_tile(const uint16_t *activations,
                          const HVX_Vector *weights) {
  for (uint32_t i = 0; i < DIM; i++) {
    HVX_Vector sum = sums[current][i];
    for (uint32_t k = 0; k < DIM; k += 2) {
      uint32_t both = pair(activations, i, k);
      // In a small batch most rows are zero.
      if ((both & 0x7fff7fff) == 0)
        continue;
      HVX_VectorPair products =
          Q6_Wsf_vmpy_VhfVhf(Q6_V_vsplat_R((int)both), weights[k / 2]);
      sum = Q6_Vsf_vadd_VsfVsf(sum, Q6_V_lo_W(products));
      sum = Q6_Vsf_vadd_VsfVsf(sum, Q6_V_hi_W(products));
    }
    sums[current][i] = sum;
  }
}

static void multiply(const uint32_t *r) {
  uint32_t bytes = r[2] + 1, tiles = bytes / TILE_BYTES;
  if (r[2] != r[3] || bytes % TILE_BYTES || tiles < 1 || tiles > MAX_TILES)
    die("a multiplication of 0x%x and 0x%x bytes", r[2] + 1, r[3] + 1);
  check("activation", r[0], bytes, TILE_BYTES);
  check("weight", r[1], bytes, TILE_BYTES);
  for (uint32_t tile = 0; tile < tiles; tile++)
    multiply_tile((const uint16_t *)(r[0] + tile * TILE_BYTES),
                  (const HVX_Vector *)(r[1] + tile * TILE_BYTES));
  __atomic_fetch_add(&control->multiplications, tiles, __ATOMIC_RELAXED);
}

// Rounds to FP16, to nearest even.
static uint16_t narrow(float value) {
  union {
    float f;
    uint32_t u;
  } bits = {value};
  uint32_t sign = bits.u >> 16 & 0x8000, magnitude = bits.u & 0x7fffffff;
  if (magnitude >= 0x47800000)
    die("a result leaves FP16's range: 0x%x", bits.u);
  if (magnitude < 0x38800000) {
    // Below the least normal number: adding 0.5 rounds at the right bit.
    bits.u = magnitude;
    bits.f += 0.5f;
    return (uint16_t)(sign | (bits.u - 0x3f000000));
  }
  magnitude += 0xfff + (magnitude >> 13 & 1);
  return (uint16_t)(sign | ((magnitude - 0x38000000) >> 13));
}

static int has_scales(void) { return !control->arch || control->arch >= 0x73; }

static void store(const uint32_t *r) {
  if (r[1] != (has_scales() ? 0 : TILE_BYTES - 1))
    die("a store of range 0x%x", r[1]);
  check("result", r[0], TILE_BYTES, TILE_BYTES);
  uint16_t *tile = (uint16_t *)r[0];
  const HVX_Vector one = Q6_V_vsplat_R(0x3c003c00);
  // Even halves are scales, odd halves are biases; multiplying by 1 widens
  // them.
  HVX_VectorPair wide = Q6_Wsf_vmpy_VhfVhf(scale_block[0], one);
  for (uint32_t i = 0; i < DIM; i++) {
    union {
      HVX_Vector vector;
      float columns[DIM];
    } row;
    row.vector = Q6_Vsf_vadd_VsfVsf(
        Q6_Vsf_vmpy_VsfVsf(sums[current][i], Q6_V_lo_W(wide)), Q6_V_hi_W(wide));
    for (uint32_t j = 0; j < DIM; j++)
      tile[64 * (i / 2) + 2 * j + i % 2] = narrow(row.columns[j]);
  }
  clear(sums[current]);
  current ^= 1;
}

static void load_scale(const HVX_Vector *block) {
  scale_block[0] = block[0];
  scale_block[1] = block[1];
  if (has_scales())
    return;
  for (uint32_t word = 0; word < 64; word++)
    if (((const uint32_t *)block)[word])
      die("a control block that is not zero");
  scale_block[0] = Q6_V_vsplat_R(0x3c00);
}

void matrix_word(enum word word, const uint32_t *r) {
  if (matrix_locked != this_thread()->index + 1)
    die("word %u of the matrix unit without its lock", word);
  switch (word) {
  case MATRIX_CLEAR:
    clear(sums[0]);
    clear(sums[1]);
    break;
  case MATRIX_SCALE:
    check("scale", r[0], 256, 256);
    load_scale((const HVX_Vector *)r[0]);
    break;
  case MATRIX_MULTIPLY:
    multiply(r);
    break;
  case MATRIX_STORE:
    store(r);
    break;
  default:
    die("word %u of the matrix unit", word);
  }
}
