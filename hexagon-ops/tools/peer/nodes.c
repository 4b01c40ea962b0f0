// Packets of ggml-hexagon's DSP code for nodes of graphs: its dispatcher, its
// kernels, its host's choice of kernels, on one thread under qemu-hexagon. What
// the DMA engine would copy is copied here and not counted; packets of the
// matrix unit and of the functions that drive it count.
//
// Standard input has a node on each line:
//   OP PARAMETER{16} DST SOURCE{n}    of a tensor: TYPE NE{4} NB{4} USE
// TYPE is ggml's number, -1 for a source that is not there; USE selects the
// content of the tensor:
//   0 zeros  1 random floats  2 weights  3 LIMIT: numbers below it, which
//   differ in a row  4 numbers from 0 on 5 POSITIONS: a mask of so many visible
//   positions in the first row, and one more in each further row
// Each line is answered: packets, those of the operation without the
// dispatcher, bytes copied; or "none" if there is no such operation, or it
// refuses.
// Sources of ggml-hexagon, whose order matters.
#include "main.c"

#include "hmx-queue.c"

#include "flash-attn-ops.h"
#include "matmul-ops.h"

#include "cnt.h"
#include "peer.h"

#include <math.h>
#include <sys/mman.h>

uint8_t *peer_vtcm;

static uint32_t dma_packets;
static uint64_t dma_bytes;

// Packets for a call and its return: about as many as the instructions that the call replaces.
enum { CALL_PACKETS = 2 };

// Makes the copy of one descriptor, linear or of rows, as dma-queue.h writes
// it. Its packets are subtracted.
__attribute__((noinline)) void peer_dma(void *descriptor) {
  const uint32_t start = packets();
  dma_descriptor_2d *d = descriptor;
  if (d->desc_size == 0) {
    dma_descriptor_1d *l = descriptor;
    memcpy((void *)(uintptr_t)l->dst, (void *)(uintptr_t)l->src, l->size);
    dma_bytes += l->size;
  } else {
#if __HVX_ARCH__ < 75
    const uint32_t rows = d->nrows;
#else
    const uint32_t rows = d->nrows_lo | (uint32_t)d->nrows_hi << 8;
#endif
    for (uint32_t i = 0; i < rows; i++)
      memcpy((uint8_t *)(uintptr_t)d->dst + i * d->dst_stride,
             (uint8_t *)(uintptr_t)d->src + i * d->src_stride, d->row_size);
    dma_bytes += (uint64_t)rows * d->row_size;
  }
  ((dma_descriptor_1d *)descriptor)->done = 1;
  dma_packets += packets() - start + CALL_PACKETS;
}

static struct htp_context *ctx;

// Matrix units: 1, or 0 with an argument.
static int n_hmx = 1;

// The thread of the matrix unit runs here, at once.
void peer_futex_wake(void *address) {
  if (!ctx || !ctx->hmx_queue || address != (void *)&ctx->hmx_queue->seqn)
    return;
  bool killed = false;
  hmx_queue_process(ctx->hmx_queue, &killed);
}

typedef struct ggml_tensor T;

enum use { ZEROS, RANDOM, WEIGHTS, NUMBERS, COUNTED, MASK };

static size_t element(int type) {
  return type == GGML_TYPE_F16    ? 2
         : type == GGML_TYPE_I64  ? 8
         : type == GGML_TYPE_Q8_0 ? 34
                                  : 4;
}

static size_t mapped(const T *t) {
  size_t bytes = element(t->type) + 4096;
  for (int i = 0; i < 4; i++)
    bytes += (t->ne[i] > 0 ? t->ne[i] - 1 : 0) * t->nb[i];
  // A row of blocks is longer than its first block alone.
  return bytes + t->ne[0] * 4;
}

static void fill(T *t, int use, int limit) {
  const int64_t *ne = t->ne;
  if (use == ZEROS || use == WEIGHTS)
    return;
  uint32_t seed = 1;
  for (int64_t l = 0; l < ne[3]; l++)
    for (int64_t k = 0; k < ne[2]; k++)
      for (int64_t j = 0; j < ne[1]; j++) {
        uint8_t *row =
            (uint8_t *)t->data + j * t->nb[1] + k * t->nb[2] + l * t->nb[3];
        for (int64_t i = 0; i < ne[0]; i++) {
          uint8_t *at = row + i * t->nb[0];
          const uint32_t number =
              use == COUNTED ? i + ne[0] * j
                             : ((uint32_t)(j + k * ne[1]) * 0x9e3779b9u >> 7) +
                                   i * (limit / ne[0] ? limit / ne[0] : 1);
          seed = seed * 1664525u + 1013904223u;
          const float x = (float)(seed >> 8) / (1 << 23) - 1.0f;
          if (t->type == GGML_TYPE_F32)
            *(float *)at = use == MASK ? (i < limit + j ? 0 : -INFINITY) : x;
          else if (t->type == GGML_TYPE_F16)
            *(__fp16 *)at =
                use == MASK ? (i < limit + j ? (__fp16)0 : (__fp16) - INFINITY)
                            : (__fp16)x;
          else if (t->type == GGML_TYPE_I32)
            *(int32_t *)at = use == COUNTED ? number : number % limit;
          else if (t->type == GGML_TYPE_I64)
            *(int64_t *)at = use == COUNTED ? number : number % limit;
        }
      }
}

static int parse(T *t, char **at) {
  t->type = strtol(*at, at, 10);
  if ((int)t->type < 0)
    return 0;
  for (int i = 0; i < 4; i++)
    t->ne[i] = strtoll(*at, at, 10);
  for (int i = 0; i < 4; i++)
    t->nb[i] = strtoull(*at, at, 10);
  const int use = strtol(*at, at, 10);
  const int limit = use == NUMBERS || use == MASK ? strtol(*at, at, 10) : 0;
  const uint32_t tile = htp_mm_get_weight_tile_size(t->type);
  t->is_weight = use == WEIGHTS;
  if (t->is_weight && tile) {
    // Repacked: 32 x 32 tiles.
    t->is_repacked = 1;
    t->nb[0] = 18;
    t->nb[1] = (size_t)(t->ne[0] / 32) * (tile / 32);
    t->nb[2] = t->nb[1] * ((t->ne[1] + 31) / 32 * 32);
    t->nb[3] = t->nb[2] * t->ne[2];
  }
  t->data = mmap(NULL, mapped(t), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (t->data == MAP_FAILED) {
    printf("no memory\n");
    exit(1);
  }
  fill(t, use, limit);
  return 1;
}

static struct htp_tensor message(const T *t, uint16_t index) {
  struct htp_tensor h;
  memset(&h, 0, sizeof h);
  h.data = (uintptr_t)t->data;
  h.type = t->type;
  h.ti = index;
  for (int i = 0; i < 4; i++) {
    h.ne[i] = t->ne[i];
    h.nb[i] = t->nb[i];
  }
  if (t->is_repacked)
    h.size = t->nb[3];
  else {
    h.size = element(t->type);
    for (int i = 0; i < 4; i++)
      h.size += (t->ne[i] - 1) * t->nb[i];
  }
  h.flags = (t->is_weight ? HTP_TENSOR_WEIGHT : 0) |
            (t->is_repacked ? HTP_TENSOR_REPACK : 0);
  return h;
}

// Sources of the operation that is counted, and its result.
static struct htp_tensor tensors[12] __attribute__((aligned(8)));

static int run(uint32_t opcode, enum peer_kind kind, T *op,
               uint32_t counts[2]) {
  static struct htp_op_desc desc;
  memset(&desc, 0, sizeof desc);
  desc.opcode = opcode;
  memcpy(desc.params, op->op_params, sizeof desc.params);
  peer_params(kind, opcode, op, ctx->n_threads, ctx->vtcm_size, n_hmx,
              desc.kernel_params);
  for (int i = 0; i < HTP_OP_MAX_INPUTS; i++) {
    const int have = i < 10 && op->src[i];
    desc.src[i] = have ? i : 0xffff;
    if (have)
      tensors[i] = message(op->src[i], i);
  }
  tensors[11] = message(op, 11);
  for (int i = 0; i < HTP_OP_MAX_OUTPUTS; i++)
    desc.dst[i] = i ? 0xffff : 11;
  struct htp_ops_context *octx = &ctx->octx;
  memset(octx, 0, sizeof *octx);
  octx->n_threads = ctx->n_threads;
  octx->n_threads_div = ctx->n_threads_div;
  octx->ctx = ctx;
  octx->status = HTP_STATUS_OK;
  memset(ctx->dirty_ranges, 0, sizeof ctx->dirty_ranges);
  dma_packets = 0;
  dma_bytes = 0;
  const uint32_t start = packets();
  const int status = proc_op_req(octx, NULL, 0, tensors, 0, &desc);
  counts[0] = packets() - start - dma_packets;
  counts[1] = dma_bytes / 1024;
  return status == HTP_STATUS_OK;
}

static const struct {
  const char *name;
  uint32_t opcode;
  enum peer_kind kind;
} OPERATIONS[] = {
    {"MUL_MAT", HTP_OP_MUL_MAT, PEER_MUL_MAT},
    {"MUL_MAT_ID", HTP_OP_MUL_MAT_ID, PEER_MUL_MAT},
    {"FLASH_ATTN_EXT", HTP_OP_FLASH_ATTN_EXT, PEER_FA},
    {"RMS_NORM+MUL", HTP_OP_RMS_NORM_MUL, PEER_UNARY},
    {"RMS_NORM", HTP_OP_RMS_NORM, PEER_UNARY},
    {"NORM", HTP_OP_NORM, PEER_UNARY},
    {"L2_NORM", HTP_OP_L2_NORM, PEER_UNARY},
    {"ADD", HTP_OP_ADD, PEER_BINARY},
    {"SUB", HTP_OP_SUB, PEER_BINARY},
    {"MUL", HTP_OP_MUL, PEER_BINARY},
    {"DIV", HTP_OP_DIV, PEER_BINARY},
    {"ADD_ID", HTP_OP_ADD_ID, PEER_BINARY},
    {"SCALE", HTP_OP_SCALE, PEER_UNARY},
    {"CLAMP", HTP_OP_CLAMP, PEER_UNARY},
    {"SQR", HTP_OP_SQR, PEER_UNARY},
    {"SQRT", HTP_OP_SQRT, PEER_UNARY},
    {"LOG", HTP_OP_UNARY_LOG, PEER_UNARY},
    {"SILU", HTP_OP_UNARY_SILU, PEER_UNARY},
    {"GELU", HTP_OP_UNARY_GELU, PEER_UNARY},
    {"GELU_ERF", HTP_OP_UNARY_GELU_ERF, PEER_UNARY},
    {"SIGMOID", HTP_OP_UNARY_SIGMOID, PEER_UNARY},
    {"EXP", HTP_OP_UNARY_EXP, PEER_UNARY},
    {"NEG", HTP_OP_UNARY_NEG, PEER_UNARY},
    {"SOFTPLUS", HTP_OP_UNARY_SOFTPLUS, PEER_UNARY},
    {"TANH", HTP_OP_UNARY_TANH, PEER_UNARY},
    {"RELU", HTP_OP_UNARY_RELU, PEER_UNARY},
    {"ABS", HTP_OP_UNARY_ABS, PEER_UNARY},
    {"STEP", HTP_OP_UNARY_STEP, PEER_UNARY},
    {"TRI", HTP_OP_TRI, PEER_UNARY},
    {"SWIGLU", HTP_OP_GLU_SWIGLU, PEER_NONE},
    {"SWIGLU_OAI", HTP_OP_GLU_SWIGLU_OAI, PEER_NONE},
    {"GEGLU", HTP_OP_GLU_GEGLU, PEER_NONE},
    {"GEGLU_ERF", HTP_OP_GLU_GEGLU_ERF, PEER_NONE},
    {"GEGLU_QUICK", HTP_OP_GLU_GEGLU_QUICK, PEER_NONE},
    {"SOFT_MAX", HTP_OP_SOFTMAX, PEER_SOFTMAX},
    {"ROPE", HTP_OP_ROPE, PEER_ROPE},
    {"SET_ROWS", HTP_OP_SET_ROWS, PEER_SET_ROWS},
    {"GET_ROWS", HTP_OP_GET_ROWS, PEER_GET_ROWS},
    {"CPY", HTP_OP_CPY, PEER_NONE},
    {"CONT", HTP_OP_CPY, PEER_NONE},
    {"ARGSORT", HTP_OP_ARGSORT, PEER_SORT},
    {"TOP_K", HTP_OP_TOP_K, PEER_TOPK},
    {"ARGMAX", HTP_OP_ARGMAX, PEER_NONE},
    {"SUM_ROWS", HTP_OP_SUM_ROWS, PEER_NONE},
    {"SSM_CONV", HTP_OP_SSM_CONV, PEER_SSM_CONV},
    {"GATED_DELTA_NET", HTP_OP_GATED_DELTA_NET, PEER_GDN},
    {"REPEAT", HTP_OP_REPEAT, PEER_NONE},
    {"CUMSUM", HTP_OP_CUMSUM, PEER_NONE},
    {"CONCAT", HTP_OP_CONCAT, PEER_NONE},
    {"FILL", HTP_OP_FILL, PEER_NONE},
    {"DIAG", HTP_OP_DIAG, PEER_NONE},
    {"SOLVE_TRI", HTP_OP_SOLVE_TRI, PEER_NONE},
    {"PAD", HTP_OP_PAD, PEER_NONE},
    {"ROLL", HTP_OP_ROLL, PEER_NONE},
    {"IM2COL", HTP_OP_IM2COL, PEER_NONE},
};

static void answer(char *line) {
  char *at = strchr(line, ' ');
  if (!at) {
    printf("none\n");
    return;
  }
  *at++ = 0;
  T all[11];
  memset(all, 0, sizeof all);
  for (int i = 0; i < 16; i++)
    all[0].op_params[i] = strtol(at, &at, 10);
  int there[11] = {0};
  for (int i = 0; i < 11; i++) {
    while (*at == ' ')
      at++;
    if (*at == 0 || *at == '\n')
      break;
    there[i] = parse(&all[i], &at);
    if (i && there[i])
      all[0].src[i - 1] = &all[i];
  }
  int done = 0;
  uint32_t counts[2] = {0};
  for (size_t i = 0; i < sizeof OPERATIONS / sizeof *OPERATIONS; i++) {
    if (strcmp(line, OPERATIONS[i].name) != 0)
      continue;
    if (OPERATIONS[i].opcode == HTP_OP_MUL_MAT_ID)
      all[0].op = GGML_OP_MUL_MAT_ID;
    // Warm.
    done = run(OPERATIONS[i].opcode, OPERATIONS[i].kind, &all[0], counts);
    done =
        done && run(OPERATIONS[i].opcode, OPERATIONS[i].kind, &all[0], counts);
  }
  if (done)
    printf("%u %u\n", counts[0], counts[1]);
  else
    printf("none\n");
  fflush(stdout);
  for (int i = 0; i < 11; i++)
    if (there[i])
      munmap(all[i].data, mapped(&all[i]));
}

int main(int argc, char **argv) {
  (void)argv;
  n_hmx = argc < 2;
  static char line[4096];
  peer_vtcm = memalign(1 << 16, PEER_VTCM);
  static struct htp_handle handle;
  const int err = htp_iface_start((remote_handle64)(uintptr_t)&handle, 0, 0, 1,
                                  n_hmx, 3u << 30);
  ctx = handle.ctx;
  if (err || !ctx) {
    printf("start failed %d\n", err);
    return 1;
  }
  vtcm_acquire(ctx);
  while (fgets(line, sizeof line, stdin))
    answer(line);
  return 0;
}
