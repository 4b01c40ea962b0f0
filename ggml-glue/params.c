// Finds out where a ggml that is newer than the glue keeps the parameters of
// operations. Needed for a plugin, which is loaded into programs of any
// version.
//
// Makes nodes from known numbers with ggml's functions. The numbers must be
// where the glue's headers have them. An operation with parameters that no test
// node covers, or whose test fails, is left to the CPU.

#include "glue.h"

#include "ggml-impl.h"

#include <string.h>

// The words of ggml_tensor.op_params.
enum { N_PARAMS = GGML_MAX_OP_PARAMS / sizeof(int32_t) };

// Set once, before the first question to a device.
static bool is_newer;
static const char *proven[16];
static size_t n_proven;

static int32_t bits(float value) {
  int32_t word;
  memcpy(&word, &value, sizeof(word));
  return word;
}

// The words of ggml_tensor.op_params that a node is expected to have.
struct params {
  int32_t words[N_PARAMS];
};

// Returns true if a node has this operation and these parameters.
static bool has(const struct ggml_tensor *node, const char *name,
                struct params params) {
  return node != NULL && strcmp(ggml_op_name(node->op), name) == 0 &&
         memcmp(node->op_params, params.words, sizeof(params.words)) == 0;
}

// Records an operation whose parameters are where the glue reads them.
static void prove(const char *name, bool agrees) {
  if (agrees && n_proven < sizeof(proven) / sizeof(proven[0])) {
    proven[n_proven++] = name;
  }
}

static void prove_all(struct ggml_context *ctx) {
  struct ggml_tensor *a = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 64, 4, 3, 1);
  struct ggml_tensor *b = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 64, 4, 3, 1);
  struct ggml_tensor *positions =
      ggml_new_tensor_4d(ctx, GGML_TYPE_I32, 3, 1, 1, 1);
  struct ggml_tensor *four_positions =
      ggml_new_tensor_4d(ctx, GGML_TYPE_I32, 12, 1, 1, 1);
  struct ggml_tensor *cache =
      ggml_new_tensor_4d(ctx, GGML_TYPE_F16, 64, 32, 3, 1);
  struct ggml_tensor *mask =
      ggml_new_tensor_4d(ctx, GGML_TYPE_F16, 32, 4, 1, 1);

  // All numbers differ, so that a word in another place is noticed.
  const struct params eps = {{bits(0.5f)}};
  prove("NORM", has(ggml_norm(ctx, a, 0.5f), "NORM", eps));
  prove("RMS_NORM", has(ggml_rms_norm(ctx, a, 0.5f), "RMS_NORM", eps));
  prove("L2_NORM", has(ggml_l2_norm(ctx, a, 0.5f), "L2_NORM", eps));
  prove("SCALE", has(ggml_scale_bias(ctx, a, 0.5f, 3.0f), "SCALE",
                     (struct params){{bits(0.5f), bits(3.0f)}}));
  prove("CLAMP", has(ggml_clamp(ctx, a, -2.0f, 5.0f), "CLAMP",
                     (struct params){{bits(-2.0f), bits(5.0f)}}));
  prove("CONCAT",
        has(ggml_concat(ctx, a, b, 2), "CONCAT", (struct params){{2}}));
  prove("ARGSORT", has(ggml_argsort(ctx, a, GGML_SORT_ORDER_DESC), "ARGSORT",
                       (struct params){{GGML_SORT_ORDER_DESC}}));
  prove("SOFT_MAX", has(ggml_soft_max_ext(ctx, a, b, 0.5f, 8.0f), "SOFT_MAX",
                        (struct params){{bits(0.5f), bits(8.0f)}}));
  prove("UNARY",
        has(ggml_silu(ctx, a), "UNARY", (struct params){{GGML_UNARY_OP_SILU}}));
  prove("GLU", has(ggml_glu(ctx, a, GGML_GLU_OP_SWIGLU, true), "GLU",
                   (struct params){{GGML_GLU_OP_SWIGLU, true}}) &&
                   has(ggml_swiglu_oai(ctx, a, b, 1.5f, 7.0f), "GLU",
                       (struct params){{GGML_GLU_OP_SWIGLU_OAI, false,
                                        bits(1.5f), bits(7.0f)}}));
  const struct params rope = {{0, 32, 2, 0, 4096, bits(7.0f), bits(0.5f),
                               bits(0.25f), bits(1.5f), bits(32.0f),
                               bits(3.0f)}};
  struct params of_sections = rope;
  of_sections.words[2] = GGML_ROPE_TYPE_MROPE;
  int sections[GGML_MROPE_SECTIONS] = {3, 5, 7, 1};
  memcpy(&of_sections.words[11], sections, sizeof(sections));
  prove("ROPE", has(ggml_rope_ext(ctx, a, positions, NULL, 32, 2, 4096, 7.0f,
                                  0.5f, 0.25f, 1.5f, 32.0f, 3.0f),
                    "ROPE", rope) &&
                    has(ggml_rope_multi(ctx, a, four_positions, NULL, 32,
                                        sections, GGML_ROPE_TYPE_MROPE, 4096,
                                        7.0f, 0.5f, 0.25f, 1.5f, 32.0f, 3.0f),
                        "ROPE", of_sections));
  struct ggml_tensor *product = ggml_mul_mat(ctx, a, b);
  struct ggml_tensor *attention =
      ggml_flash_attn_ext(ctx, a, cache, cache, mask, 0.5f, 8.0f, 30.0f);
  if (!ggml_prec_set_acc(product, GGML_PREC_F32) ||
      !ggml_prec_set_acc(attention, GGML_PREC_F32)) {
    return;
  }
  prove("MUL_MAT", has(product, "MUL_MAT", (struct params){{GGML_PREC_F32}}));
  prove("FLASH_ATTN_EXT", has(attention, "FLASH_ATTN_EXT",
                              (struct params){{bits(0.5f), bits(8.0f),
                                               bits(30.0f), GGML_PREC_F32}}));
}

void glue_prove_params(void) {
  is_newer = true;
  struct ggml_context *ctx = ggml_init((struct ggml_init_params){
      .mem_size = 1 << 20, .mem_buffer = NULL, .no_alloc = true});
  if (ctx == NULL) {
    return;
  }
  prove_all(ctx);
  ggml_free(ctx);
}

bool glue_params_are_known(const struct ggml_tensor *op) {
  static const int32_t none[N_PARAMS];
  // An operation without parameters cannot have them elsewhere.
  if (!is_newer || memcmp(op->op_params, none, sizeof(none)) == 0) {
    return true;
  }
  for (size_t i = 0; i < n_proven; i++) {
    if (strcmp(ggml_op_name(op->op), proven[i]) == 0) {
      return true;
    }
  }
  return false;
}
