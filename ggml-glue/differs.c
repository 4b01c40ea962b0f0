// Asks the program's ggml about the structs and numbers that the glue was
// compiled for. Used where the glue is compiled before the program's ggml is
// known.
//
// ggml does not report the sizes of its structs. So this file passes structs of
// our layout to ggml, which must find the last member of each, and reads
// structs that ggml makes.

#include "glue.h"

#include "ggml-impl.h"

#include <string.h>

struct operation {
  enum ggml_op op;
  const char *name;
};

// The operations that the glue knows by number. All others are passed to Rust
// by name.
static const struct operation operations[] = {
    {GGML_OP_NONE, "NONE"},   {GGML_OP_RESHAPE, "RESHAPE"},
    {GGML_OP_VIEW, "VIEW"},   {GGML_OP_PERMUTE, "PERMUTE"},
    {GGML_OP_UNARY, "UNARY"}, {GGML_OP_TRANSPOSE, "TRANSPOSE"},
    {GGML_OP_GLU, "GLU"},
};

struct type {
  enum ggml_type type;
  const char *name;
  int64_t block_elems;
  size_t block_bytes;
};

static const struct type types[] = {
    {GGML_TYPE_F32, "f32", 1, 4},
    {GGML_TYPE_F16, "f16", 1, 2},
    {GGML_TYPE_BF16, "bf16", 1, 2},
    {GGML_TYPE_I32, "i32", 1, 4},
    {GGML_TYPE_I64, "i64", 1, 8},
    {GGML_TYPE_Q4_0, "q4_0", 32, 18},
    {GGML_TYPE_Q4_1, "q4_1", 32, 20},
    {GGML_TYPE_Q8_0, "q8_0", 32, 34},
    {GGML_TYPE_IQ4_NL, "iq4_nl", 32, 18},
    {GGML_TYPE_MXFP4, "mxfp4", 32, 17},
    {GGML_TYPE_Q4_K, "q4_K", 256, 144},
    {GGML_TYPE_Q5_0, "q5_0", 32, 22},
    {GGML_TYPE_Q6_K, "q6_K", 256, 210},
    {GGML_TYPE_Q5_1, "q5_1", 32, 24},
    {GGML_TYPE_IQ4_XS, "iq4_xs", 256, 136},
    {GGML_TYPE_Q5_K, "q5_K", 256, 176},
    {GGML_TYPE_Q3_K, "q3_K", 256, 110},
    {GGML_TYPE_Q2_K, "q2_K", 256, 84},
    {GGML_TYPE_I8, "i8", 1, 1},
    {GGML_TYPE_I16, "i16", 1, 2},
};

static const char *differing_number(void) {
  for (size_t i = 0; i < sizeof(operations) / sizeof(operations[0]); i++) {
    if (strcmp(ggml_op_name(operations[i].op), operations[i].name) != 0) {
      return operations[i].name;
    }
  }
  for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
    const struct ggml_type_traits *traits = ggml_get_type_traits(types[i].type);
    if (traits == NULL || traits->type_name == NULL ||
        strcmp(traits->type_name, types[i].name) != 0 ||
        traits->blck_size != types[i].block_elems ||
        traits->type_size != types[i].block_bytes) {
      return types[i].name;
    }
  }
  return NULL;
}

static bool always(ggml_backend_buffer_type_t buft) {
  (void)buft;
  return true;
}

static void no_props(ggml_backend_dev_t dev,
                     struct ggml_backend_dev_props *props) {
  (void)dev;
  (void)props;
}

static int found;

static void *get_found(ggml_backend_reg_t reg, const char *name) {
  (void)reg;
  (void)name;
  return &found;
}

static const char *differing_backend_struct(void) {
  struct ggml_backend_reg reg = {.iface.get_proc_address = get_found};
  if (ggml_backend_reg_get_proc_address(&reg, "") != &found) {
    return "ggml_backend_reg";
  }
  struct ggml_backend_device device = {.reg = &reg,
                                       .iface.get_props = no_props};
  if (ggml_backend_dev_backend_reg(&device) != &reg) {
    return "ggml_backend_device";
  }
  struct ggml_backend backend = {.device = &device};
  if (ggml_backend_get_device(&backend) != &device) {
    return "ggml_backend";
  }
  struct ggml_backend_buffer_type buft = {.iface.is_host = always,
                                          .device = &device};
  if (ggml_backend_buft_get_device(&buft) != &device ||
      !ggml_backend_buft_is_host(&buft)) {
    return "ggml_backend_buffer_type";
  }

  // Members are set to 0 before the device is asked.
  union {
    struct ggml_backend_dev_props props;
    unsigned char bytes[2 * sizeof(struct ggml_backend_dev_props)];
  } probe;
  memset(&probe, 0xFF, sizeof(probe));
  ggml_backend_dev_get_props(&device, &probe.props);
  size_t zeros = 0;
  while (zeros < sizeof(probe) && probe.bytes[zeros] == 0) {
    zeros++;
  }
  if (zeros != sizeof(probe.props)) {
    return "ggml_backend_dev_props";
  }

  const struct ggml_backend_buffer_i none = {.get_base = NULL};
  ggml_backend_buffer_t buffer =
      ggml_backend_buffer_init(&buft, none, &found, 4711);
  if (buffer == NULL) {
    return "ggml_backend_buffer";
  }
  ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
  const bool agrees = buffer->buft == &buft && buffer->context == &found &&
                      buffer->size == 4711 &&
                      buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS &&
                      ggml_backend_buffer_get_usage(buffer) == buffer->usage &&
                      ggml_backend_buffer_get_size(buffer) == buffer->size;
  ggml_backend_buffer_free(buffer);
  return agrees ? NULL : "ggml_backend_buffer";
}

static const char *differing_tensor_of(struct ggml_context *ctx) {
  struct ggml_tensor *a = ggml_new_tensor_2d(ctx, GGML_TYPE_Q4_0, 64, 3);
  struct ggml_tensor *b = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 64, 5);
  struct ggml_tensor *product = ggml_mul_mat(ctx, a, b);
  struct ggml_tensor *view = ggml_view_1d(ctx, product, 3, 12);
  struct ggml_tensor *silu = ggml_silu(ctx, view);
  ggml_set_output(silu);
  struct ggml_cgraph *graph = ggml_new_graph(ctx);
  ggml_build_forward_expand(graph, silu);

  const bool tensors_agree =
      a->type == GGML_TYPE_Q4_0 && a->ne[0] == 64 && a->ne[1] == 3 &&
      a->ne[3] == 1 && a->nb[0] == 18 && a->nb[1] == 36 && a->nb[3] == 108 &&
      a->buffer == NULL && a->data == NULL && a->view_src == NULL &&
      a->name == ggml_get_name(a) && product->src[0] == a &&
      product->src[1] == b && product->src[2] == NULL &&
      product->src[GGML_MAX_SRC - 1] == NULL &&
      strcmp(ggml_op_name(product->op), "MUL_MAT") == 0 &&
      view->op == GGML_OP_VIEW && view->view_src == product &&
      view->view_offs == 12 && silu->op == GGML_OP_UNARY &&
      (enum ggml_unary_op)silu->op_params[0] == ggml_get_unary_op(silu) &&
      strcmp(ggml_unary_op_name(ggml_get_unary_op(silu)), "SILU") == 0 &&
      (silu->flags & GGML_TENSOR_FLAG_OUTPUT) != 0 &&
      (product->flags & GGML_TENSOR_FLAG_OUTPUT) == 0 &&
      (product->flags & GGML_TENSOR_FLAG_COMPUTE) != 0 &&
      ggml_tensor_overhead() == sizeof(struct ggml_tensor) + 32;
  if (!tensors_agree) {
    return "ggml_tensor";
  }
  const bool graphs_agree =
      graph->n_nodes == 3 && ggml_graph_n_nodes(graph) == 3 &&
      graph->nodes == ggml_graph_nodes(graph) && graph->nodes[0] == product &&
      graph->nodes[1] == view && graph->nodes[2] == silu &&
      ggml_node_get_use_count(graph, 0) == 1 &&
      ggml_node_get_use_count(graph, 2) == 0;
  return graphs_agree ? NULL : "ggml_cgraph";
}

static const char *differing_tensor(void) {
  struct ggml_context *ctx = ggml_init((struct ggml_init_params){
      .mem_size = 1 << 20, .mem_buffer = NULL, .no_alloc = true});
  if (ctx == NULL) {
    return "ggml_init_params";
  }
  const char *name = differing_tensor_of(ctx);
  ggml_free(ctx);
  return name;
}

const char *glue_differs(void) {
  const char *name = differing_number();
  name = name != NULL ? name : differing_backend_struct();
  return name != NULL ? name : differing_tensor();
}
