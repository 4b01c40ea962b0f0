// Functions of ggml that are found at run time.
//
// The dynamic linker could only find ggml's functions in a library of a known
// name, but the names differ: libggml-base.so, libggml-base.so.0, a name with a
// hash, or no library at all. So this file defines each function that the glue
// calls, and calls the one that was passed to plugin_import_set().

#include "host.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

// X(type, name, parameters, arguments) for each function that returns a value.
#define IMPORTS(X)                                                             \
  X(ggml_backend_buffer_type_t, ggml_backend_cpu_buffer_type, (void), ())      \
  X(ggml_backend_buffer_t, ggml_backend_buft_alloc_buffer,                     \
    (ggml_backend_buffer_type_t buft, size_t size), (buft, size))              \
  X(size_t, ggml_backend_buft_get_alignment,                                   \
    (ggml_backend_buffer_type_t buft), (buft))                                 \
  X(bool, ggml_backend_buft_is_host, (ggml_backend_buffer_type_t buft),        \
    (buft))                                                                    \
  X(ggml_backend_dev_t, ggml_backend_buft_get_device,                          \
    (ggml_backend_buffer_type_t buft), (buft))                                 \
  X(ggml_backend_buffer_t, ggml_backend_buffer_init,                           \
    (ggml_backend_buffer_type_t buft, struct ggml_backend_buffer_i iface,      \
     void *context, size_t size),                                              \
    (buft, iface, context, size))                                              \
  X(enum ggml_backend_buffer_usage, ggml_backend_buffer_get_usage,             \
    (ggml_backend_buffer_t buffer), (buffer))                                  \
  X(size_t, ggml_backend_buffer_get_size, (ggml_backend_buffer_t buffer),      \
    (buffer))                                                                  \
  X(ggml_backend_dev_t, ggml_backend_get_device, (ggml_backend_t backend),     \
    (backend))                                                                 \
  X(enum ggml_status, ggml_backend_graph_compute,                              \
    (ggml_backend_t backend, struct ggml_cgraph * graph), (backend, graph))    \
  X(ggml_backend_reg_t, ggml_backend_dev_backend_reg,                          \
    (ggml_backend_dev_t device), (device))                                     \
  X(void *, ggml_backend_reg_get_proc_address,                                 \
    (ggml_backend_reg_t reg, const char *name), (reg, name))                   \
  X(struct ggml_context *, ggml_init, (struct ggml_init_params params),        \
    (params))                                                                  \
  X(struct ggml_tensor *, ggml_new_tensor_2d,                                  \
    (struct ggml_context * ctx, enum ggml_type type, int64_t ne0,              \
     int64_t ne1),                                                             \
    (ctx, type, ne0, ne1))                                                     \
  X(struct ggml_tensor *, ggml_mul_mat,                                        \
    (struct ggml_context * ctx, struct ggml_tensor * a,                        \
     struct ggml_tensor * b),                                                  \
    (ctx, a, b))                                                               \
  X(struct ggml_tensor *, ggml_new_tensor_4d,                                  \
    (struct ggml_context * ctx, enum ggml_type type, int64_t ne0, int64_t ne1, \
     int64_t ne2, int64_t ne3),                                                \
    (ctx, type, ne0, ne1, ne2, ne3))                                           \
  X(struct ggml_tensor *, ggml_norm,                                           \
    (struct ggml_context * ctx, struct ggml_tensor * a, float eps),            \
    (ctx, a, eps))                                                             \
  X(struct ggml_tensor *, ggml_rms_norm,                                       \
    (struct ggml_context * ctx, struct ggml_tensor * a, float eps),            \
    (ctx, a, eps))                                                             \
  X(struct ggml_tensor *, ggml_l2_norm,                                        \
    (struct ggml_context * ctx, struct ggml_tensor * a, float eps),            \
    (ctx, a, eps))                                                             \
  X(struct ggml_tensor *, ggml_scale_bias,                                     \
    (struct ggml_context * ctx, struct ggml_tensor * a, float s, float b),     \
    (ctx, a, s, b))                                                            \
  X(struct ggml_tensor *, ggml_clamp,                                          \
    (struct ggml_context * ctx, struct ggml_tensor * a, float min, float max), \
    (ctx, a, min, max))                                                        \
  X(struct ggml_tensor *, ggml_concat,                                         \
    (struct ggml_context * ctx, struct ggml_tensor * a,                        \
     struct ggml_tensor * b, int dim),                                         \
    (ctx, a, b, dim))                                                          \
  X(struct ggml_tensor *, ggml_argsort,                                        \
    (struct ggml_context * ctx, struct ggml_tensor * a,                        \
     enum ggml_sort_order order),                                              \
    (ctx, a, order))                                                           \
  X(struct ggml_tensor *, ggml_soft_max_ext,                                   \
    (struct ggml_context * ctx, struct ggml_tensor * a,                        \
     struct ggml_tensor * mask, float scale, float max_bias),                  \
    (ctx, a, mask, scale, max_bias))                                           \
  X(struct ggml_tensor *, ggml_glu,                                            \
    (struct ggml_context * ctx, struct ggml_tensor * a, enum ggml_glu_op op,   \
     bool swapped),                                                            \
    (ctx, a, op, swapped))                                                     \
  X(struct ggml_tensor *, ggml_swiglu_oai,                                     \
    (struct ggml_context * ctx, struct ggml_tensor * a,                        \
     struct ggml_tensor * b, float alpha, float limit),                        \
    (ctx, a, b, alpha, limit))                                                 \
  X(struct ggml_tensor *, ggml_rope_multi,                                     \
    (struct ggml_context * ctx, struct ggml_tensor * a,                        \
     struct ggml_tensor * b, struct ggml_tensor * c, int n_dims,               \
     int sections[GGML_MROPE_SECTIONS], int mode, int n_ctx_orig,              \
     float freq_base, float freq_scale, float ext_factor, float attn_factor,   \
     float beta_fast, float beta_slow),                                        \
    (ctx, a, b, c, n_dims, sections, mode, n_ctx_orig, freq_base, freq_scale,  \
     ext_factor, attn_factor, beta_fast, beta_slow))                           \
  X(struct ggml_tensor *, ggml_rope_ext,                                       \
    (struct ggml_context * ctx, struct ggml_tensor * a,                        \
     struct ggml_tensor * b, struct ggml_tensor * c, int n_dims, int mode,     \
     int n_ctx_orig, float freq_base, float freq_scale, float ext_factor,      \
     float attn_factor, float beta_fast, float beta_slow),                     \
    (ctx, a, b, c, n_dims, mode, n_ctx_orig, freq_base, freq_scale,            \
     ext_factor, attn_factor, beta_fast, beta_slow))                           \
  X(struct ggml_tensor *, ggml_flash_attn_ext,                                 \
    (struct ggml_context * ctx, struct ggml_tensor * q,                        \
     struct ggml_tensor * k, struct ggml_tensor * v,                           \
     struct ggml_tensor * mask, float scale, float max_bias,                   \
     float logit_softcap),                                                     \
    (ctx, q, k, v, mask, scale, max_bias, logit_softcap))                      \
  X(struct ggml_tensor *, ggml_silu,                                           \
    (struct ggml_context * ctx, struct ggml_tensor * a), (ctx, a))             \
  X(struct ggml_tensor *, ggml_view_1d,                                        \
    (struct ggml_context * ctx, struct ggml_tensor * a, int64_t ne0,           \
     size_t offset),                                                           \
    (ctx, a, ne0, offset))                                                     \
  X(struct ggml_cgraph *, ggml_new_graph, (struct ggml_context * ctx), (ctx))  \
  X(int, ggml_graph_n_nodes, (struct ggml_cgraph * graph), (graph))            \
  X(struct ggml_tensor **, ggml_graph_nodes, (struct ggml_cgraph * graph),     \
    (graph))                                                                   \
  X(size_t, ggml_tensor_overhead, (void), ())                                  \
  X(size_t, ggml_nbytes, (const struct ggml_tensor *tensor), (tensor))         \
  X(bool, ggml_is_empty, (const struct ggml_tensor *tensor), (tensor))         \
  X(bool, ggml_is_contiguous, (const struct ggml_tensor *tensor), (tensor))    \
  X(const char *, ggml_get_name, (const struct ggml_tensor *tensor), (tensor)) \
  X(const struct ggml_type_traits *, ggml_get_type_traits,                     \
    (enum ggml_type type), (type))                                             \
  X(const char *, ggml_op_name, (enum ggml_op op), (op))                       \
  X(const char *, ggml_op_desc, (const struct ggml_tensor *tensor), (tensor))  \
  X(const char *, ggml_unary_op_name, (enum ggml_unary_op op), (op))           \
  X(const char *, ggml_glu_op_name, (enum ggml_glu_op op), (op))               \
  X(enum ggml_unary_op, ggml_get_unary_op, (const struct ggml_tensor *tensor), \
    (tensor))                                                                  \
  X(enum ggml_glu_op, ggml_get_glu_op, (const struct ggml_tensor *tensor),     \
    (tensor))

// The same for functions that return nothing.
#define VOID_IMPORTS(X)                                                        \
  X(void, ggml_backend_free, (ggml_backend_t backend), (backend))              \
  X(void, ggml_backend_buffer_free, (ggml_backend_buffer_t buffer), (buffer))  \
  X(void, ggml_backend_buffer_set_usage,                                       \
    (ggml_backend_buffer_t buffer, enum ggml_backend_buffer_usage usage),      \
    (buffer, usage))                                                           \
  X(void, ggml_backend_dev_get_props,                                          \
    (ggml_backend_dev_t device, struct ggml_backend_dev_props * props),        \
    (device, props))                                                           \
  X(void, ggml_free, (struct ggml_context * ctx), (ctx))                       \
  X(void, ggml_set_output, (struct ggml_tensor * tensor), (tensor))            \
  X(void, ggml_build_forward_expand,                                           \
    (struct ggml_cgraph * graph, struct ggml_tensor * tensor),                 \
    (graph, tensor))

// Functions that are defined one by one below.
#define OTHER_IMPORTS(X)                                                       \
  X(, ggml_abort, , )                                                          \
  X(, ggml_log_internal, , )

// The first is newer than the oldest ggml that the plugin works with. The
// others are in another library than the rest, on top of it.
#define OPTIONAL_IMPORTS(X)                                                    \
  X(, ggml_prec_set_acc, , )                                                   \
  X(, ggml_backend_dev_by_type, , )                                            \
  X(, ggml_backend_init_by_type, , )

#define MEMBER(type, name, parameters, arguments) __typeof__(name) *name;
#define NAME(type, name, parameters, arguments) #name,

static const char *const names[] = {IMPORTS(NAME) VOID_IMPORTS(
    NAME) OTHER_IMPORTS(NAME) OPTIONAL_IMPORTS(NAME)};
static const char *const optional[] = {OPTIONAL_IMPORTS(NAME)};

enum {
  N_NAMES = sizeof(names) / sizeof(names[0]),
  N_OPTIONAL = sizeof(optional) / sizeof(optional[0]),
};

static union {
  struct {
    IMPORTS(MEMBER)
    VOID_IMPORTS(MEMBER)
    OTHER_IMPORTS(MEMBER)
    OPTIONAL_IMPORTS(MEMBER)
  };
  void *address[N_NAMES];
} host;
_Static_assert(sizeof(host) == N_NAMES * sizeof(void *),
               "a name for each function, in the same order");

const char *plugin_import_name(size_t index) {
  return index < N_NAMES ? names[index] : NULL;
}

bool plugin_import_is_optional(size_t index) {
  return index >= N_NAMES - N_OPTIONAL;
}

void plugin_import_set(size_t index, void *address) {
  if (index < N_NAMES) {
    host.address[index] = address;
  }
}

#define DEFINE(type, name, parameters, arguments)                              \
  type name parameters { return host.name arguments; }
#define DEFINE_VOID(type, name, parameters, arguments)                         \
  type name parameters { host.name arguments; }

IMPORTS(DEFINE)
VOID_IMPORTS(DEFINE_VOID)

bool ggml_prec_set_acc(struct ggml_tensor *a, enum ggml_prec prec) {
  return host.ggml_prec_set_acc != NULL && host.ggml_prec_set_acc(a, prec);
}

ggml_backend_dev_t ggml_backend_dev_by_type(enum ggml_backend_dev_type type) {
  return host.ggml_backend_dev_by_type == NULL
             ? NULL
             : host.ggml_backend_dev_by_type(type);
}

ggml_backend_t ggml_backend_init_by_type(enum ggml_backend_dev_type type,
                                         const char *params) {
  return host.ggml_backend_init_by_type == NULL
             ? NULL
             : host.ggml_backend_init_by_type(type, params);
}

// Enough bytes for most lines, so that they need no malloc().
enum { LINE_BYTES = 1024 };

// Formats a line: into `room` if it fits, otherwise into memory that the caller
// frees. If there is no memory, the line is cut and ends in a newline.
static char *format_line(char room[LINE_BYTES], const char *format,
                         va_list arguments) {
  va_list again;
  va_copy(again, arguments);
  room[0] = '\0';
  const int length = vsnprintf(room, LINE_BYTES, format, arguments);
  char *text = room;
  if (length >= LINE_BYTES) {
    char *whole = malloc((size_t)length + 1);
    if (whole == NULL) {
      room[LINE_BYTES - 2] = '\n';
    } else {
      vsnprintf(whole, (size_t)length + 1, format, again);
      text = whole;
    }
  }
  va_end(again);
  return text;
}

void ggml_log_internal(enum ggml_log_level level, const char *format, ...) {
  char room[LINE_BYTES];
  va_list arguments;
  va_start(arguments, format);
  char *text = format_line(room, format, arguments);
  va_end(arguments);
  host.ggml_log_internal(level, "%s", text);
  if (text != room) {
    free(text);
  }
}

void ggml_abort(const char *file, int line, const char *format, ...) {
  char room[LINE_BYTES];
  va_list arguments;
  va_start(arguments, format);
  const char *text = format_line(room, format, arguments);
  va_end(arguments);
  host.ggml_abort(file, line, "%s", text);
  __builtin_unreachable();
}
