// Translates ggml's tensors and graphs into the structs of npu.h, and runs
// graphs as a ggml backend.

#include "ggml-impl.h"
#include "glue.h"

#include <stdlib.h>
#include <string.h>

#if UINTPTR_MAX == UINT64_MAX
_Static_assert(sizeof(struct ggml_tensor) == 336, "ggml_tensor");
_Static_assert(offsetof(struct ggml_tensor, ne) == 16, "ggml_tensor.ne");
_Static_assert(offsetof(struct ggml_tensor, nb) == 48, "ggml_tensor.nb");
_Static_assert(offsetof(struct ggml_tensor, op_params) == 84,
               "ggml_tensor.op_params");
_Static_assert(offsetof(struct ggml_tensor, src) == 152, "ggml_tensor.src");
_Static_assert(offsetof(struct ggml_tensor, view_src) == 232,
               "ggml_tensor.view_src");
_Static_assert(offsetof(struct ggml_tensor, data) == 248, "ggml_tensor.data");
_Static_assert(sizeof(struct ggml_cgraph) == 96, "ggml_cgraph");
_Static_assert(offsetof(struct ggml_cgraph, nodes) == 16, "ggml_cgraph.nodes");
_Static_assert(sizeof(struct ggml_backend) == 152, "ggml_backend");
_Static_assert(offsetof(struct ggml_backend, iface) == 8, "ggml_backend.iface");
_Static_assert(offsetof(struct ggml_backend, device) == 136,
               "ggml_backend.device");
_Static_assert(offsetof(struct ggml_backend, context) == 144,
               "ggml_backend.context");
#endif
_Static_assert(GGML_MAX_DIMS == 4, "npu_tensor has four dimensions");
_Static_assert(GGML_MAX_OP_PARAMS == NPU_OP_PARAMS * sizeof(int32_t),
               "npu_node.op_params");

static uint32_t dtype_of(enum ggml_type type,
                         const struct ggml_type_traits *traits) {
  switch (type) {
  case GGML_TYPE_F32:
    return NPU_DTYPE_F32;
  case GGML_TYPE_F16:
    return NPU_DTYPE_F16;
  case GGML_TYPE_BF16:
    return NPU_DTYPE_BF16;
  case GGML_TYPE_I8:
    return NPU_DTYPE_I8;
  case GGML_TYPE_I16:
    return NPU_DTYPE_I16;
  case GGML_TYPE_I32:
    return NPU_DTYPE_I32;
  case GGML_TYPE_I64:
    return NPU_DTYPE_I64;
  default:
    break;
  }
  return traits->is_quantized && traits->to_float != NULL ? NPU_DTYPE_QUANTIZED
                                                          : NPU_DTYPE_OTHER;
}

static uint32_t format_of(enum ggml_type type) {
  switch (type) {
  case GGML_TYPE_Q4_0:
    return NPU_FORMAT_Q4_0;
  case GGML_TYPE_Q4_1:
    return NPU_FORMAT_Q4_1;
  case GGML_TYPE_Q8_0:
    return NPU_FORMAT_Q8_0;
  case GGML_TYPE_IQ4_NL:
    return NPU_FORMAT_IQ4_NL;
  case GGML_TYPE_MXFP4:
    return NPU_FORMAT_MXFP4;
  case GGML_TYPE_Q4_K:
    return NPU_FORMAT_Q4_K;
  case GGML_TYPE_Q5_0:
    return NPU_FORMAT_Q5_0;
  case GGML_TYPE_Q6_K:
    return NPU_FORMAT_Q6_K;
  case GGML_TYPE_Q5_1:
    return NPU_FORMAT_Q5_1;
  case GGML_TYPE_Q5_K:
    return NPU_FORMAT_Q5_K;
  case GGML_TYPE_IQ4_XS:
    return NPU_FORMAT_IQ4_XS;
  case GGML_TYPE_Q3_K:
    return NPU_FORMAT_Q3_K;
  case GGML_TYPE_Q2_K:
    return NPU_FORMAT_Q2_K;
  default:
    return NPU_FORMAT_NONE;
  }
}

// Returns true for buffers of ggml's device for `-sm tensor`, which asks the
// devices about a tensor before it gives each of them a slice.
static bool will_be_sliced(ggml_backend_buffer_type_t buft) {
  ggml_backend_dev_t owner = buft->device;
  return owner != NULL &&
         owner->iface.get_type(owner) == GGML_BACKEND_DEVICE_TYPE_META;
}

static const struct ggml_tensor *owner_of(const struct ggml_tensor *tensor) {
  return tensor->view_src != NULL ? tensor->view_src : tensor;
}

bool glue_is_of_slices(struct glue_device *device,
                       const struct ggml_tensor *op) {
  static _Thread_local bool of_slices;
  for (int i = -1; i < GGML_MAX_SRC; i++) {
    const struct ggml_tensor *tensor = i < 0 ? op : op->src[i];
    if (tensor == NULL || owner_of(tensor)->buffer == NULL) {
      continue;
    }
    ggml_backend_buffer_type_t buft = owner_of(tensor)->buffer->buft;
    if (will_be_sliced(buft)) {
      of_slices = true;
      atomic_store_explicit(&device->is_sliced, true, memory_order_relaxed);
      return true;
    }
    if (buft->device != NULL && buft->device->reg == device->dev.reg) {
      of_slices = false;
    }
    if (buft == &device->packed_buft && owner_of(tensor)->buffer->size > 0) {
      // Slices are never packed, so a packed tensor belongs to another model,
      // whose tensors in ordinary memory are not weights.
      atomic_store_explicit(&device->is_sliced, false, memory_order_relaxed);
    }
  }
  return of_slices;
}

// Returns true if the device's graphs can use a tensor in `buffer` as the CPU
// backend does: in CPU memory, or in this device's shared memory.
static bool is_reached_by_cpu(const struct glue_device *device,
                              ggml_backend_buffer_t buffer) {
  ggml_backend_buffer_type_t buft = buffer->buft;
  if (buft == &device->host_buft) {
    return true;
  }
  // Memory of another NPU would need cache operations.
  const bool is_another_npu_s =
      buft->device != NULL && buft->device->reg == device->dev.reg;
  return !is_another_npu_s && ggml_backend_buft_is_host(buft);
}

static bool begins_with(const char *text, const char *start) {
  return strncmp(text, start, strlen(start)) == 0;
}

static bool is_product(const struct ggml_tensor *op) {
  return begins_with(ggml_op_name(op->op), "MUL_MAT");
}

// Returns true if `tensor`, an operand or the result of `op`, belongs to a
// layer that the program keeps on the CPU. Such a layer must not be cut around
// each operation that the device could compute. If any layer is kept on the
// CPU, everything before the first layer is kept there, too.
//
// ggml asks about nodes in the order of the graph. A layer begins with the
// weight of a norm, which is where the layer is; only matrices may be elsewhere
// (`--override-tensor`, `--cpu-moe`).
static bool is_of_cpu_layer(struct glue_device *device,
                            const struct ggml_tensor *op,
                            const struct ggml_tensor *tensor) {
  // SOURCE: llama.cpp 0.5.0, names of weights in llama-arch.cpp, of caches in
  // llama-kv-cache.cpp and llama-memory-recurrent.cpp.
  static const char of_layer[] = "blk.";
  const struct ggml_tensor *owner = owner_of(tensor);
  ggml_backend_buffer_t buffer = owner->buffer;
  const bool is_cpu_s = buffer->buft != &device->host_buft;
  if (buffer->usage != GGML_BACKEND_BUFFER_USAGE_WEIGHTS) {
    return is_cpu_s && begins_with(owner->name, "cache_");
  }
  if (!begins_with(owner->name, of_layer)) {
    return is_cpu_s && buffer == atomic_load_explicit(&device->cpu_layers,
                                                      memory_order_relaxed);
  }
  const int layer = atoi(owner->name + sizeof(of_layer) - 1);
  if (is_product(op)) {
    return is_cpu_s && layer + 1 == atomic_load_explicit(&device->cpu_layer,
                                                         memory_order_relaxed);
  }
  if (is_cpu_s) {
    atomic_store_explicit(&device->cpu_layers, buffer, memory_order_relaxed);
  }
  atomic_store_explicit(&device->cpu_layer, is_cpu_s ? layer + 1 : 0,
                        memory_order_relaxed);
  return is_cpu_s;
}

bool glue_computes_on_cpu(struct glue_device *device,
                          const struct ggml_tensor *op) {
  if (device->buffers != NPU_BUFFERS_HOST_AND_PACKED) {
    return false;
  }
  for (int i = -1; i < GGML_MAX_SRC; i++) {
    const struct ggml_tensor *tensor = i < 0 ? op : op->src[i];
    ggml_backend_buffer_t buffer =
        tensor == NULL ? NULL : owner_of(tensor)->buffer;
    if (buffer == NULL) {
      continue;
    }
    // The model loader asks with an unnamed operation and a dummy buffer where
    // to put a weight. It should be packed if the NPU multiplies with it; for
    // other weights the CPU's memory has better formats.
    const bool is_loader = buffer->size == 0 && op->name[0] == '\0';
    if ((is_loader && (is_product(op) ||
                       ggml_get_type_traits(tensor->type)->is_quantized)) ||
        !is_reached_by_cpu(device, buffer) ||
        is_of_cpu_layer(device, op, tensor)) {
      return false;
    }
  }
  return glue_cpu_supports(op);
}

// Only compares type pointers, and calls no function of the buffer, because the
// loader calls supports_op with a dummy buffer of size 0 to find a place for a
// weight.
static uint32_t place_of(const struct glue_device *device,
                         const struct ggml_tensor *owner) {
  ggml_backend_buffer_t buffer = owner->buffer;
  const bool shares = device->buffers == NPU_BUFFERS_SHARED ||
                      device->buffers == NPU_BUFFERS_SHARED_AND_PACKED;
  if (buffer == NULL) {
    if (owner->op == GGML_OP_NONE) {
      return NPU_PLACE_NONE; // a leaf may still get any buffer
    }
    return shares ? NPU_PLACE_DEVICE : NPU_PLACE_HOST;
  }
  if (will_be_sliced(buffer->buft)) {
    // Slices are in memory of the device's buffer type.
    return device->buffers == NPU_BUFFERS_ONE ? NPU_PLACE_PACKED
           : shares                           ? NPU_PLACE_DEVICE
                                              : NPU_PLACE_HOST;
  }
  if (buffer->buft == &device->packed_buft) {
    return NPU_PLACE_PACKED;
  }
  if (buffer->buft == &device->host_buft) {
    if (!shares && owner->op == GGML_OP_NONE &&
        atomic_load_explicit(&device->is_sliced, memory_order_relaxed)) {
      return NPU_PLACE_NONE; // a slice of weights, which is packed at each use
    }
    // Weights in this memory get a packed copy, except those that a program
    // trains and therefore writes repeatedly.
    const bool packs_beside =
        shares || (owner->op == GGML_OP_NONE &&
                   (buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS ||
                    ggml_get_type_traits(owner->type)->is_quantized) &&
                   (owner->flags & GGML_TENSOR_FLAG_PARAM) == 0);
    return packs_beside && buffer->size > 0 ? NPU_PLACE_DEVICE : NPU_PLACE_HOST;
  }
  return ggml_backend_buft_is_host(buffer->buft) ? NPU_PLACE_HOST
                                                 : NPU_PLACE_OTHER;
}

static uint32_t role_of(const struct ggml_tensor *owner) {
  if (owner->op != GGML_OP_NONE) {
    return NPU_ROLE_RESULT;
  }
  return owner->buffer != NULL &&
                 owner->buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS
             ? NPU_ROLE_WEIGHTS
             : NPU_ROLE_STATE;
}

bool glue_is_ours(const struct glue_device *device,
                  ggml_backend_buffer_type_t buft) {
  return buft == &device->packed_buft ||
         (buft == &device->host_buft &&
          device->buffers != NPU_BUFFERS_HOST_AND_PACKED);
}

npu_tensor glue_tensor(const struct glue_device *device,
                       const struct ggml_tensor *tensor, bool with_data) {
  const struct ggml_type_traits *traits = ggml_get_type_traits(tensor->type);
  const struct ggml_tensor *owner = owner_of(tensor);

  npu_tensor out = {
      .dtype = dtype_of(tensor->type, traits),
      .format = format_of(tensor->type),
      .place = place_of(device, owner),
      .role = role_of(owner),
      .block_elems = (uint32_t)traits->blck_size,
      .block_bytes = (uint32_t)traits->type_size,
      .data = with_data ? tensor->data : NULL,
      .name = tensor->name,
  };
  for (int i = 0; i < GGML_MAX_DIMS; i++) {
    out.ne[i] = tensor->ne[i];
    out.nb[i] = tensor->nb[i];
  }
  if (out.dtype == NPU_DTYPE_QUANTIZED) {
    out.to_float = traits->to_float;
  }
  if (owner->buffer != NULL && owner->buffer->size > 0 &&
      glue_is_ours(device, owner->buffer->buft)) {
    out.buffer = (npu_buffer *)owner->buffer->context;
  }
  return out;
}

static const char *op_name(const struct ggml_tensor *node) {
  switch (node->op) {
  case GGML_OP_UNARY:
    return ggml_unary_op_name(ggml_get_unary_op(node));
  case GGML_OP_GLU:
    return ggml_glu_op_name(ggml_get_glu_op(node));
  default:
    return ggml_op_name(node->op);
  }
}

bool glue_node(const struct glue_device *device, const struct ggml_tensor *node,
               bool with_data, npu_node *out) {
  for (int i = NPU_MAX_SRC; i < GGML_MAX_SRC; i++) {
    if (node->src[i] != NULL) {
      return false;
    }
  }
  out->op = op_name(node);
  out->feeds_next = false;
  memcpy(out->op_params, node->op_params, sizeof(out->op_params));
  out->dst = glue_tensor(device, node, with_data);
  for (int i = 0; i < NPU_MAX_SRC; i++) {
    out->src[i] = node->src[i] != NULL
                      ? glue_tensor(device, node->src[i], with_data)
                      : (npu_tensor){.dtype = NPU_DTYPE_NONE};
  }
  return true;
}

void glue_mark_cpu_reader(const struct glue_device *device,
                          const struct ggml_tensor *node) {
  npu_node part = {.op = op_name(node),
                   .dst = glue_tensor(device, node, false)};
  for (int i = 0; i < GGML_MAX_SRC; i++) {
    if (node->src[i] != NULL) {
      part.src[0] = glue_tensor(device, node->src[i], false);
      npu_mark_cpu_reader(&part);
    }
  }
}

// A copy, in this device's memory, of a tensor in another device's memory.
struct glue_copy {
  const struct ggml_tensor *copy;
  struct ggml_tensor *original;
};

struct glue_backend {
  struct ggml_backend base;
  const struct glue_device *device;
  npu_backend *npu;
  // Nodes of one graph. The memory grows to the largest graph so far.
  npu_node *nodes;
  size_t nodes_capacity;
  // Computes the nodes that the NPU cannot compute, or not as fast.
  struct glue_cpu cpu;
  // The copies that ggml made for the next graph, in memory that grows as
  // needed.
  struct glue_copy *copies;
  size_t n_copies, copies_capacity;
  bool copies_failed; // there was no memory for all of them
};

static struct glue_backend *backend_of(ggml_backend_t backend) {
  return (struct glue_backend *)backend->context;
}

static ggml_guid_t backend_guid(void) {
  static ggml_guid guid = {
      0x72, 0x75, 0x73, 0x74, 0x6e, 0x70, 0x75, 0x3d,
      0x8b, 0x21, 0x5c, 0x0e, 0x94, 0xd7, 0x6a, 0x13,
  };
  return &guid;
}

static const char *backend_get_name(ggml_backend_t backend) {
  return npu_device_name(backend_of(backend)->device->index);
}

static void backend_free(ggml_backend_t backend) {
  struct glue_backend *self = backend_of(backend);
  npu_backend_free(self->npu);
  free(self->nodes);
  free(self->copies);
  glue_cpu_free(&self->cpu);
  free(self);
}

void glue_backend_set_n_threads(ggml_backend_t backend, int n_threads) {
  glue_cpu_set_n_threads(&backend_of(backend)->cpu, n_threads);
}

void glue_backend_set_abort_callback(ggml_backend_t backend,
                                     ggml_abort_callback callback, void *data) {
  glue_cpu_set_abort_callback(&backend_of(backend)->cpu, callback, data);
}

// Returns the CPU backend. If it cannot be created, logs a line and returns
// NULL.
static ggml_backend_t cpu_of(struct glue_backend *self) {
  return glue_cpu_backend(&self->cpu, npu_device_name(self->device->index));
}

static bool has_work(const struct ggml_tensor *node) {
  return !ggml_op_is_empty(node->op) && !ggml_is_empty(node) &&
         (node->flags & GGML_TENSOR_FLAG_COMPUTE) != 0;
}

static bool reads(const struct ggml_tensor *node,
                  const struct ggml_tensor *source) {
  for (int i = 0; i < GGML_MAX_SRC; i++) {
    if (node->src[i] == source) {
      return true;
    }
  }
  return false;
}

// Returns true if only the next computed node reads the result of node `i`,
// directly or through views that no other node reads.
static bool feeds_next(const struct ggml_cgraph *graph, int i) {
  if (graph->nodes[i]->view_src != NULL) {
    return false; // other nodes may read the tensor that it is a part of
  }
  const struct ggml_tensor *value = NULL;
  for (int j = i; j < graph->n_nodes; j++) {
    const struct ggml_tensor *node = graph->nodes[j];
    if (j > i && !reads(node, value)) {
      if (has_work(node)) {
        return false;
      }
      continue;
    }
    if (j > i && has_work(node)) {
      return true;
    }
    if ((j > i && !ggml_op_is_empty(node->op)) ||
        (node->flags & GGML_TENSOR_FLAG_OUTPUT) != 0 ||
        ggml_node_get_use_count(graph, j) != 1) {
      return false;
    }
    value = node;
  }
  return false;
}

static bool reserve_nodes(struct glue_backend *self, size_t n_nodes) {
  if (n_nodes <= self->nodes_capacity) {
    return true;
  }
  npu_node *nodes = realloc(self->nodes, n_nodes * sizeof(nodes[0]));
  if (nodes == NULL) {
    return false;
  }
  self->nodes = nodes;
  self->nodes_capacity = n_nodes;
  return true;
}

static enum ggml_status status_of(uint32_t status) {
  switch (status) {
  case NPU_STATUS_OK:
    return GGML_STATUS_SUCCESS;
  case NPU_STATUS_ALLOC_FAILED:
    return GGML_STATUS_ALLOC_FAILED;
  default:
    return GGML_STATUS_FAILED;
  }
}

// Computes the first `*n_nodes` of `self->nodes` and sets the number to 0.
// `uid` is the graph's if these are all of its nodes, else 0.
static enum ggml_status compute_on_npu(struct glue_backend *self, uint64_t uid,
                                       size_t *n_nodes) {
  const size_t n = *n_nodes;
  *n_nodes = 0;
  return n == 0
             ? GGML_STATUS_SUCCESS
             : status_of(npu_backend_compute(self->npu, uid, self->nodes, n));
}

// Calls `touch` for the operands of the nodes [begin, end), for their results
// only if `results_only`.
static void each_operand(const struct glue_backend *self,
                         const struct ggml_cgraph *graph, int begin, int end,
                         bool results_only, void (*touch)(const npu_tensor *)) {
  for (int i = begin; i < end; i++) {
    const struct ggml_tensor *node = graph->nodes[i];
    if (!has_work(node)) {
      continue;
    }
    for (int j = -1; j < (results_only ? 0 : GGML_MAX_SRC); j++) {
      const struct ggml_tensor *tensor = j < 0 ? node : node->src[j];
      if (tensor != NULL) {
        const npu_tensor operand = glue_tensor(self->device, tensor, true);
        touch(&operand);
      }
    }
  }
}

// Computes the nodes [begin, *end) of a graph and sets `*end` to 0, because no
// node is left for the CPU.
static enum ggml_status compute_on_cpu(struct glue_backend *self,
                                       const struct ggml_cgraph *graph,
                                       int begin, int *end) {
  if (*end == 0) {
    return GGML_STATUS_SUCCESS;
  }
  struct ggml_cgraph part = *graph;
  part.nodes += begin;
  part.n_nodes = *end - begin;
  part.grads = NULL;
  part.grad_accs = NULL;
  part.leafs = NULL;
  part.n_leafs = 0;
  part.uid = 0;
  // Host memory needs no cache operations.
  const bool is_shared = self->device->buffers != NPU_BUFFERS_HOST_AND_PACKED;
  if (is_shared) {
    each_operand(self, graph, begin, *end, false, npu_show_to_cpu);
  }
  const enum ggml_status status =
      ggml_backend_graph_compute(cpu_of(self), &part);
  if (is_shared) {
    each_operand(self, graph, begin, *end, true, npu_take_from_cpu);
  }
  *end = 0;
  return status;
}

// Returns true if the CPU computes a node that ggml gave to the device.
// `described` is its description, or NULL if npu.h cannot describe it.
static bool is_for_cpu(struct glue_backend *self,
                       const struct ggml_tensor *node,
                       const npu_node *described) {
  const struct glue_device *device = self->device;
  ggml_backend_buffer_t buffer = owner_of(node)->buffer;
  if (device->buffers == NPU_BUFFERS_HOST_AND_PACKED && buffer != NULL &&
      buffer->buft == &device->packed_buft) {
    return false; // the packed copy would keep the old content
                  // one
  }
  // The CPU can read packed weights only if the device also keeps their
  // original bytes.
  const bool cpu_reads =
      device->buffers == NPU_BUFFERS_HOST_AND_PACKED ||
      atomic_load_explicit(&device->shares_graphs, memory_order_relaxed);
  return cpu_reads &&
         (described == NULL || npu_prefers_cpu(device->index, described)) &&
         cpu_of(self) != NULL;
}

// Clears a result that ggml's device for `-sm tensor` expects to be zero. If a
// device has no part of a tensor, the sum over all devices uses its result
// times zero, in a graph of one node. The device never wrote that memory, and a
// NaN in it would stay NaN.
static void clear_absent_part(const struct ggml_cgraph *graph) {
  struct ggml_tensor *node = graph->nodes[0];
  // Gaps between rows may hold bytes of other tensors.
  if (graph->n_nodes != 1 || node->op != GGML_OP_SCALE ||
      node->data != node->src[0]->data || !ggml_is_contiguous(node)) {
    return;
  }
  float factor;
  memcpy(&factor, node->op_params, sizeof(factor));
  ggml_backend_buffer_t buffer = owner_of(node)->buffer;
  if (factor == 0.0F) {
    buffer->iface.memset_tensor(buffer, node, 0, 0, ggml_nbytes(node));
  }
}

// Copies a tensor through ordinary memory.
static void copy_tensor(const struct ggml_tensor *from,
                        struct ggml_tensor *to) {
  ggml_backend_buffer_t source = owner_of(from)->buffer;
  ggml_backend_buffer_t target = owner_of(to)->buffer;
  const size_t size = ggml_nbytes(from);
  // If there is no memory for the whole tensor, it is copied in pieces.
  char piece[4096];
  char *whole = malloc(size);
  char *bytes = whole != NULL ? whole : piece;
  const size_t step = whole != NULL ? size : sizeof(piece);
  for (size_t at = 0; at < size; at += step) {
    const size_t n = size - at < step ? size - at : step;
    source->iface.get_tensor(source, from, bytes, at, n);
    target->iface.set_tensor(target, to, bytes, at, n);
  }
  free(whole);
}

// Records that `copy` is a copy of `original`.
static void note_copy(struct glue_backend *self, struct ggml_tensor *original,
                      const struct ggml_tensor *copy) {
  if (self->n_copies == self->copies_capacity) {
    const size_t capacity = 2 * self->copies_capacity + 16;
    struct glue_copy *copies =
        realloc(self->copies, capacity * sizeof(copies[0]));
    if (copies == NULL) {
      self->copies_failed = true;
      return;
    }
    self->copies = copies;
    self->copies_capacity = capacity;
  }
  self->copies[self->n_copies++] =
      (struct glue_copy){.copy = copy, .original = original};
}

// Writes AdamW's moments back to where they came from, if a graph changed
// copies of them. All moments are on the program's first device, and ggml only
// copies them to the device of the weights.
static bool write_moments_back(struct glue_backend *self,
                               const struct ggml_cgraph *graph) {
  for (int i = 0; i < graph->n_nodes; i++) {
    const struct ggml_tensor *node = graph->nodes[i];
    if (strcmp(ggml_op_name(node->op), "OPT_STEP_ADAMW") != 0) {
      continue;
    }
    if (self->copies_failed) {
      GGML_LOG_ERROR("ggml-rust-npu: %s: no memory to write back what %s "
                     "changes\n",
                     npu_device_name(self->device->index), node->name);
      return false;
    }
    for (size_t j = 0; j < self->n_copies; j++) {
      const struct glue_copy *copy = &self->copies[j];
      if (copy->copy == node->src[2] || copy->copy == node->src[3]) {
        copy_tensor(copy->copy, copy->original);
      }
    }
  }
  return true;
}

static enum ggml_status compute_nodes(struct glue_backend *self,
                                      struct ggml_cgraph *graph) {
  uint32_t replayed;
  if (npu_backend_replay(self->npu, graph->uid, &replayed)) {
    return status_of(replayed);
  }
  size_t n_nodes = 0;
  for (int i = 0; i < graph->n_nodes; i++) {
    n_nodes += has_work(graph->nodes[i]);
  }
  if (n_nodes == 0) {
    return GGML_STATUS_SUCCESS;
  }
  if (!reserve_nodes(self, n_nodes)) {
    GGML_LOG_ERROR("ggml-rust-npu: %s: no memory for a graph of %zu nodes\n",
                   npu_device_name(self->device->index), n_nodes);
    return GGML_STATUS_ALLOC_FAILED;
  }

  clear_absent_part(graph);

  // Consecutive nodes of one processor are computed together. Those for the NPU
  // are collected in `self->nodes`; those for the CPU are a range of the graph.
  size_t n_filled = 0;
  bool all = true; // the NPU has computed all nodes so far
  int cpu_begin = 0, cpu_end = 0;
  enum ggml_status status = GGML_STATUS_SUCCESS;
  for (int i = 0; i < graph->n_nodes && status == GGML_STATUS_SUCCESS; i++) {
    const struct ggml_tensor *node = graph->nodes[i];
    if (!has_work(node)) {
      continue;
    }
    npu_node *out = &self->nodes[n_filled];
    const bool described = glue_node(self->device, node, true, out);
    const bool for_cpu = is_for_cpu(self, node, described ? out : NULL);
    if (!described && !for_cpu) {
      GGML_LOG_ERROR("ggml-rust-npu: %s: cannot compute %s (%s)\n",
                     npu_device_name(self->device->index), ggml_op_desc(node),
                     node->name);
      return GGML_STATUS_FAILED;
    }
    if (for_cpu) {
      status = compute_on_npu(self, 0, &n_filled);
      all = false;
      cpu_begin = cpu_end > 0 ? cpu_begin : i;
      cpu_end = i + 1;
    } else {
      out->feeds_next = feeds_next(graph, i);
      status = compute_on_cpu(self, graph, cpu_begin, &cpu_end);
      n_filled++;
    }
  }
  if (status == GGML_STATUS_SUCCESS) {
    status = compute_on_npu(self, all ? graph->uid : 0, &n_filled);
  }
  if (status == GGML_STATUS_SUCCESS) {
    status = compute_on_cpu(self, graph, cpu_begin, &cpu_end);
  }
  return status;
}

static enum ggml_status backend_graph_compute(ggml_backend_t backend,
                                              struct ggml_cgraph *graph) {
  struct glue_backend *self = backend_of(backend);
  enum ggml_status status = compute_nodes(self, graph);
  if (status == GGML_STATUS_SUCCESS &&
      (self->n_copies > 0 || self->copies_failed) &&
      !write_moments_back(self, graph)) {
    status = GGML_STATUS_ALLOC_FAILED;
  }
  self->n_copies = 0;
  self->copies_failed = false;
  return status;
}

// Copies a tensor that another backend computed into our memory; ggml calls
// this before a graph. If it returns false, ggml reads CPU memory directly and
// writes with npu_buffer_set. Without this function, a GPU or a server would
// write to memory that the NPU shares with the CPU without cache operations,
// and would read stale bytes of another NPU.
static bool backend_cpy_tensor(ggml_backend_t from, ggml_backend_t to,
                               const struct ggml_tensor *src,
                               struct ggml_tensor *dst) {
  if (role_of(owner_of(src)) == NPU_ROLE_STATE &&
      (src->flags & GGML_TENSOR_FLAG_INPUT) == 0) {
    // CAST: ggml passes the source as const, but it is the program's own
    // tensor.
    note_copy(backend_of(to), (struct ggml_tensor *)(uintptr_t)src, dst);
  }
  ggml_backend_buffer_t source = owner_of(src)->buffer;
  if (ggml_backend_buft_is_host(source->buft) && !glue_is_npu_buffer(source)) {
    return false;
  }
  if (ggml_nbytes(src) == 0) {
    return true;
  }
  if (from->iface.synchronize != NULL) {
    from->iface.synchronize(from);
  }
  copy_tensor(src, dst);
  return true;
}

static const struct ggml_backend_i backend_iface = {
    .get_name = backend_get_name,
    .free = backend_free,
    .cpy_tensor_async = backend_cpy_tensor,
    .graph_compute = backend_graph_compute,
};

ggml_backend_t glue_backend_new(struct glue_device *device) {
  struct glue_backend *self = calloc(1, sizeof(*self));
  if (self == NULL) {
    GGML_LOG_ERROR("ggml-rust-npu: %s: no memory for a backend\n",
                   npu_device_name(device->index));
    return NULL;
  }
  self->npu = npu_backend_new(device->index);
  if (self->npu == NULL) {
    free(self);
    return NULL;
  }
  self->device = device;
  self->base = (struct ggml_backend){
      .guid = backend_guid(),
      .iface = backend_iface,
      .device = &device->dev,
      .context = self,
  };
  return &self->base;
}
