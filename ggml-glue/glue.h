// What the three files of the glue share. ggml types come in from one side, the
// structs of npu.h go out on the other; everything that can be decided without
// a ggml type is decided in Rust.
#pragma once

#include "ggml-backend-impl.h"
#include "npu.h"

// One NPU as ggml sees it. Lives from the first registration to the end of the
// process.
struct glue_device {
  size_t index;     // what the functions of npu.h call `device`
  uint32_t buffers; // NPU_BUFFERS_*
  struct ggml_backend_device dev;
  struct ggml_backend_buffer_type
      host_buft; // ggml's layout, memory the CPU reads and writes too
  struct ggml_backend_buffer_type
      packed_buft; // weights in the NPU's layout, reached by set and get only;
                   // with NPU_BUFFERS_ONE also everything else
  ggml_backend_buffer_type_t
      extra_bufts[2]; // NULL-terminated list, empty with NPU_BUFFERS_ONE, for
                      // ggml_backend_dev_get_extra_bufts
  char packed_name[64];
};

// buffer.c

// Fills the two buffer types; index, buffers and dev are set before.
void glue_device_init_bufts(struct glue_device *device);

// graph.c

// Whether buffers of this type are the device's own (npu_buffer).
bool glue_is_ours(const struct glue_device *device,
                  ggml_backend_buffer_type_t buft);

// Describes `tensor` as `device` sees it. `with_data` is false where ggml has
// only metadata (supports_op, alloc sizes).
npu_tensor glue_tensor(const struct glue_device *device,
                       const struct ggml_tensor *tensor, bool with_data);

// Describes `node` with its sources; false if it has more of them than npu.h
// can hold.
bool glue_node(const struct glue_device *device, const struct ggml_tensor *node,
               bool with_data, npu_node *out);

// Creates a backend (one stream of graphs) on `device`; NULL after a log line
// if that fails.
ggml_backend_t glue_backend_new(struct glue_device *device);

// Sets how many threads the CPU's share of a backend's graphs takes.
void glue_backend_set_n_threads(ggml_backend_t backend, int n_threads);
