// The two buffer types of a device. NPU_BUFFERS_* selects the ones in use.
//
// Host:   ggml's layout in memory that the CPU can read. Computed tensors are
//         here, so that neither the CPU backend nor the NPU copies the other's
//         results. Such a buffer is either one of the CPU backend with another
//         type pointer, or memory that the device shares with the CPU. Writing
//         and reading shared memory also maintains the caches.
// Packed: weights in the NPU's layout. ggml reaches them through set_tensor and
//         get_tensor only; the Rust side packs and unpacks them.
//
// A buffer of size 0 is ggml's dummy with an empty interface. ggml calls none
// of these functions for it.

#include "ggml-impl.h"
#include "glue.h"

#include <stdio.h>
#include <string.h>

#if UINTPTR_MAX == UINT64_MAX
// Version 3 has two more functions, which may be NULL: alloc_buffer_n and
// get_alloc_size_n.
#define BUFFER_TYPE_FUNCTIONS (GGML_BACKEND_API_VERSION == 2 ? 6 : 8)
_Static_assert(sizeof(struct ggml_backend_buffer_type) ==
                   8 * BUFFER_TYPE_FUNCTIONS + 16,
               "ggml_backend_buffer_type");
_Static_assert(offsetof(struct ggml_backend_buffer_type, device) ==
                   8 * BUFFER_TYPE_FUNCTIONS,
               "ggml_backend_buffer_type.device");
_Static_assert(sizeof(struct ggml_backend_buffer) == 120,
               "ggml_backend_buffer");
_Static_assert(offsetof(struct ggml_backend_buffer, buft) == 88,
               "ggml_backend_buffer.buft");
_Static_assert(offsetof(struct ggml_backend_buffer, context) == 96,
               "ggml_backend_buffer.context");
#endif

static struct glue_device *device_of(ggml_backend_buffer_type_t buft) {
  return (struct glue_device *)buft->context;
}

static npu_buffer *npu_buffer_of(ggml_backend_buffer_t buffer) {
  return (npu_buffer *)buffer->context;
}

static void free_buffer(ggml_backend_buffer_t buffer) {
  npu_buffer_free(npu_buffer_of(buffer));
}

static void *get_base(ggml_backend_buffer_t buffer) {
  return npu_buffer_base(npu_buffer_of(buffer));
}

static const char *host_get_name(ggml_backend_buffer_type_t buft) {
  return npu_device_name(device_of(buft)->index);
}

// Returns the tensor that the bytes of `tensor` belong to, and adds the offset
// of `tensor` in it. A view is part of a tensor that was allocated, and is
// never packed separately.
static const struct ggml_tensor *whole_of(const struct ggml_tensor *tensor,
                                          size_t *offset) {
  if (tensor->view_src == NULL) {
    return tensor;
  }
  *offset += tensor->view_offs;
  return tensor->view_src;
}

// Makes loading a model fail if there is no memory for its weights.
static enum ggml_status init_tensor(ggml_backend_buffer_t buffer,
                                    struct ggml_tensor *tensor) {
  // Views are parts of other tensors, and computed tensors are never packed.
  if (tensor->view_src != NULL || !ggml_op_is_empty(tensor->op)) {
    return GGML_STATUS_SUCCESS;
  }
  const npu_tensor described =
      glue_tensor(device_of(buffer->buft), tensor, true);
  return npu_buffer_prepare(npu_buffer_of(buffer), &described) == NPU_STATUS_OK
             ? GGML_STATUS_SUCCESS
             : GGML_STATUS_ALLOC_FAILED;
}

// These functions cannot report an error to ggml. After a failed write, graphs
// that use the buffer fail. A failed read returns NaN. The Rust side logs both.
static void memset_tensor(ggml_backend_buffer_t buffer,
                          struct ggml_tensor *tensor, uint8_t value,
                          size_t offset, size_t size) {
  const struct ggml_tensor *whole = whole_of(tensor, &offset);
  const npu_tensor described =
      glue_tensor(device_of(buffer->buft), whole, true);
  (void)npu_buffer_fill(npu_buffer_of(buffer), &described, value, offset, size);
}

static void set_tensor(ggml_backend_buffer_t buffer, struct ggml_tensor *tensor,
                       const void *data, size_t offset, size_t size) {
  const struct ggml_tensor *whole = whole_of(tensor, &offset);
  const npu_tensor described =
      glue_tensor(device_of(buffer->buft), whole, true);
  (void)npu_buffer_set(npu_buffer_of(buffer), &described, data, offset, size);
}

static void get_tensor(ggml_backend_buffer_t buffer,
                       const struct ggml_tensor *tensor, void *data,
                       size_t offset, size_t size) {
  const struct ggml_tensor *whole = whole_of(tensor, &offset);
  const npu_tensor described =
      glue_tensor(device_of(buffer->buft), whole, true);
  (void)npu_buffer_get(npu_buffer_of(buffer), &described, data, offset, size);
}

static void clear(ggml_backend_buffer_t buffer, uint8_t value) {
  npu_buffer_clear(npu_buffer_of(buffer), value);
}

static const struct ggml_backend_buffer_i buffer_iface = {
    .free_buffer = free_buffer,
    .get_base = get_base,
    .init_tensor = init_tensor,
    .memset_tensor = memset_tensor,
    .set_tensor = set_tensor,
    .get_tensor = get_tensor,
    .clear = clear,
};

bool glue_is_npu_buffer(ggml_backend_buffer_t buffer) {
  return buffer->iface.set_tensor == set_tensor;
}

bool glue_only_device_writes(const struct glue_device *device,
                             const struct ggml_tensor *op) {
  size_t offset = 0;
  ggml_backend_buffer_t buffer = whole_of(op, &offset)->buffer;
  return buffer != NULL && buffer->buft->device == &device->dev &&
         !ggml_backend_buft_is_host(buffer->buft);
}

// One bit for each device: set if ggml asked this thread about sizes for a
// model that is only measured, not loaded.
static _Thread_local uint64_t measured;

static uint64_t bit_of(const struct glue_device *device) {
  return device->index < 64 ? UINT64_C(1) << device->index : 0;
}

// Records that a model is being measured, when ggml asks for a tensor's size.
// llama.cpp's `-fit` asks about tensors in dummy buffers; tensors that are
// about to be allocated have no buffer.
static void note_size_of(const struct glue_device *device,
                         const struct ggml_tensor *tensor) {
  if (tensor->view_src == NULL && tensor->data == NULL &&
      tensor->buffer != NULL && tensor->buffer->size == 0) {
    measured |= bit_of(device);
  } else {
    measured &= ~bit_of(device);
  }
}

// The CPU backend's function that frees a buffer.
static _Atomic(void (*)(ggml_backend_buffer_t)) cpu_free_buffer;

// Frees host memory. The device may hold packed forms of weights in it.
static void host_free_buffer(ggml_backend_buffer_t buffer) {
  npu_host_memory_freed(device_of(buffer->buft)->index,
                        buffer->iface.get_base(buffer), buffer->size);
  atomic_load_explicit(&cpu_free_buffer, memory_order_relaxed)(buffer);
}

static ggml_backend_buffer_t host_alloc_buffer(ggml_backend_buffer_type_t buft,
                                               size_t size) {
  const struct glue_device *device = device_of(buft);
  measured &= ~bit_of(device);
  if (device->buffers != NPU_BUFFERS_HOST_AND_PACKED) {
    npu_buffer *shared = npu_buffer_new(device->index, size, true);
    return shared == NULL
               ? NULL
               : ggml_backend_buffer_init(buft, buffer_iface, shared, size);
  }
  ggml_backend_buffer_t buffer =
      ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
  if (buffer != NULL) {
    buffer->buft = buft;
  }
  // ggml's dummy buffer of size 0 has no functions.
  if (buffer != NULL && buffer->iface.free_buffer != NULL) {
    atomic_store_explicit(&cpu_free_buffer, buffer->iface.free_buffer,
                          memory_order_relaxed);
    buffer->iface.free_buffer = host_free_buffer;
  }
  return buffer;
}

static size_t host_get_alignment(ggml_backend_buffer_type_t buft) {
  const struct glue_device *device = device_of(buft);
  return device->buffers == NPU_BUFFERS_HOST_AND_PACKED
             ? ggml_backend_buft_get_alignment(ggml_backend_cpu_buffer_type())
             : npu_packed_alignment(device->index);
}

static size_t host_get_max_size(ggml_backend_buffer_type_t buft) {
  const struct glue_device *device = device_of(buft);
  return device->buffers == NPU_BUFFERS_HOST_AND_PACKED
             ? SIZE_MAX
             : npu_packed_max_size(device->index);
}

static size_t host_get_alloc_size(ggml_backend_buffer_type_t buft,
                                  const struct ggml_tensor *tensor) {
  note_size_of(device_of(buft), tensor);
  return ggml_nbytes(tensor);
}

// Returns false in two cases:
//
// - Once after a model was measured, because llama.cpp's `-fit` compares a
//   device's free memory with the tensors that are not in host memory. Caches,
//   results and small weights use the device's share of memory, too. `-fit`
//   asks this question right after the sizes, once for each buffer type.
// - For a device that has slices of tensors. ggml's device for `-sm tensor`
//   returns the same answer, and with true llama.cpp would read a file into the
//   addresses of its tensors, which are placeholders. llama.cpp asks where
//   weights go before it reads any.
static bool host_is_host(ggml_backend_buffer_type_t buft) {
  const struct glue_device *device = device_of(buft);
  const bool is_measured = (measured & bit_of(device)) != 0;
  measured &= ~bit_of(device);
  return !is_measured &&
         !atomic_load_explicit(&device->is_sliced, memory_order_relaxed);
}

static const struct ggml_backend_buffer_type_i host_iface = {
    .get_name = host_get_name,
    .alloc_buffer = host_alloc_buffer,
    .get_alignment = host_get_alignment,
    .get_max_size = host_get_max_size,
    .get_alloc_size = host_get_alloc_size,
    .is_host = host_is_host,
};

static const char *packed_get_name(ggml_backend_buffer_type_t buft) {
  return device_of(buft)->packed_name;
}

static ggml_backend_buffer_t
packed_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
  npu_buffer *packed = npu_buffer_new(device_of(buft)->index, size, false);
  return packed == NULL
             ? NULL
             : ggml_backend_buffer_init(buft, buffer_iface, packed, size);
}

static size_t packed_get_alignment(ggml_backend_buffer_type_t buft) {
  return npu_packed_alignment(device_of(buft)->index);
}

static size_t packed_get_max_size(ggml_backend_buffer_type_t buft) {
  return npu_packed_max_size(device_of(buft)->index);
}

// Returns the packed size for leaves, and for views, which are not allocated.
// Other tensors are never packed, and ggml aborts if most operations ask for
// more than ggml_nbytes.
static size_t packed_get_alloc_size(ggml_backend_buffer_type_t buft,
                                    const struct ggml_tensor *tensor) {
  const struct glue_device *device = device_of(buft);
  note_size_of(device, tensor);
  if (!ggml_op_is_empty(tensor->op)) {
    return ggml_nbytes(tensor);
  }
  const npu_tensor described = glue_tensor(device, tensor, false);
  return MAX(npu_packed_alloc_size(device->index, &described),
             ggml_nbytes(tensor));
}

static const struct ggml_backend_buffer_type_i packed_iface = {
    .get_name = packed_get_name,
    .alloc_buffer = packed_alloc_buffer,
    .get_alignment = packed_get_alignment,
    .get_max_size = packed_get_max_size,
    .get_alloc_size = packed_get_alloc_size,
};

void glue_device_init_bufts(struct glue_device *device) {
  device->host_buft = (struct ggml_backend_buffer_type){
      .iface = host_iface, .device = &device->dev, .context = device};
  device->packed_buft = (struct ggml_backend_buffer_type){
      .iface = packed_iface, .device = &device->dev, .context = device};
  const bool one = device->buffers == NPU_BUFFERS_ONE;
  const bool packs = !one && device->buffers != NPU_BUFFERS_SHARED;
  device->extra_bufts[0] = packs ? &device->packed_buft : NULL;
  snprintf(device->packed_name, sizeof(device->packed_name), "%s%s",
           npu_device_name(device->index), one ? "" : "_PACKED");
}
