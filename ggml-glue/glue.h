// Declarations that the files of the glue share. They translate ggml's types
// into the structs of npu.h. Rust decides everything that needs no ggml type.
#pragma once

#include "ggml-backend-impl.h"

#include <stdatomic.h>

// The library that contains the glue also contains the Rust code, and exports
// neither.
#pragma GCC visibility push(hidden)
#include "npu.h"
#pragma GCC visibility pop

// One NPU as ggml sees it. It exists from the first registration to the end of
// the process.
struct glue_device {
  size_t index;     // `device` in the functions of npu.h
  uint32_t buffers; // NPU_BUFFERS_*
  struct ggml_backend_device dev;
  struct ggml_backend_buffer_type
      host_buft; // ggml's layout, in memory that the CPU reads and writes
  struct ggml_backend_buffer_type
      packed_buft; // weights in the NPU's layout; all tensors with
                   // NPU_BUFFERS_ONE
  ggml_backend_buffer_type_t
      extra_bufts[2]; // the list of ggml_backend_dev_get_extra_bufts, ending in
                      // NULL; empty with NPU_BUFFERS_ONE
  char packed_name[64];
  // The device got nodes that the CPU computes inside its graphs.
  atomic_bool shares_graphs;
  // ggml's device for `-sm tensor` has slices of tensors in this device's
  // buffers.
  atomic_bool is_sliced;
  // The buffer of the last weight of a layer that the program keeps on the CPU.
  // It is only compared, because it may have been freed since.
  _Atomic(ggml_backend_buffer_t) cpu_layers;
  // 1 plus the number of the last layer that ggml asked about, if the program
  // keeps that layer on the CPU; else 0.
  atomic_int cpu_layer;
  atomic_bool told_of_training;
};

// buffer.c

// Fills the two buffer types of a device whose other fields are set.
void glue_device_init_bufts(struct glue_device *device);

// Returns true if the buffer is memory of any NPU: an npu_buffer.
bool glue_is_npu_buffer(ggml_backend_buffer_t buffer);

// Returns true if `op` writes a tensor in a buffer of the device that only the
// device can reach. ggml aborts if no backend computes such an operation.
bool glue_only_device_writes(const struct glue_device *device,
                             const struct ggml_tensor *op);

// cpu.c

// The CPU backend of one stream of graphs. All zeros before its first use.
struct glue_cpu {
  ggml_backend_t backend; // created when first needed
  bool has_failed;        // it could not be created
  int n_threads;          // 0 until the program sets them
  // Threads that persist from graph to graph, and their number.
  struct ggml_threadpool *pool;
  int pool_threads;
  ggml_abort_callback abort_callback;
  void *abort_data;
};

// Returns true if the CPU backend computes `op`.
bool glue_cpu_supports(const struct ggml_tensor *op);

// Returns the CPU backend. If it cannot be created, logs a line about `device`
// and returns NULL.
ggml_backend_t glue_cpu_backend(struct glue_cpu *cpu, const char *device);

void glue_cpu_set_n_threads(struct glue_cpu *cpu, int n_threads);

void glue_cpu_set_abort_callback(struct glue_cpu *cpu,
                                 ggml_abort_callback callback, void *data);

void glue_cpu_free(struct glue_cpu *cpu);

// graph.c

// Returns true if buffers of this type belong to the device (npu_buffer).
bool glue_is_ours(const struct glue_device *device,
                  ggml_backend_buffer_type_t buft);

// Describes `tensor` for `device`. `with_data` is false where ggml has only
// metadata: in supports_op and for the sizes of allocations.
npu_tensor glue_tensor(const struct glue_device *device,
                       const struct ggml_tensor *tensor, bool with_data);

// Describes `node` with its sources. Returns false if it has more sources than
// npu.h allows.
bool glue_node(const struct glue_device *device, const struct ggml_tensor *node,
               bool with_data, npu_node *out);

// Returns true if a question about `op` is about a graph in slices, that of
// `-sm tensor`, and records that the device has slices. An operation whose
// operands have no buffers yet belongs to the same graph as this thread's last
// question, because ggml's scheduler first asks about all nodes with weights or
// caches.
bool glue_is_of_slices(struct glue_device *device,
                       const struct ggml_tensor *op);

// Records that the CPU computes `node`, and so reads and writes its caches in
// place.
void glue_mark_cpu_reader(const struct glue_device *device,
                          const struct ggml_tensor *node);

// Returns true if the CPU backend computes `op` inside the device's graphs,
// whose operands and results are in memory of the CPU. A graph is then not cut
// wherever the NPU computes nothing, and the device gets whole layers. Layers
// that the program keeps on the CPU stay there.
bool glue_computes_on_cpu(struct glue_device *device,
                          const struct ggml_tensor *op);

// Creates a backend, which is one stream of graphs, on `device`. Logs a line
// and returns NULL if that fails.
ggml_backend_t glue_backend_new(struct glue_device *device);

// Sets the number of threads with which the CPU computes its nodes of graphs.
void glue_backend_set_n_threads(ggml_backend_t backend, int n_threads);

// Sets the function that ends the CPU's part of a graph early when it returns
// true.
void glue_backend_set_abort_callback(ggml_backend_t backend,
                                     ggml_abort_callback callback, void *data);

// params.c

// Finds out for a newer ggml which operations have their parameters where the
// glue reads them. Called at most once, before the first question to a device.
// Without this call, all operations count as unchanged.
void glue_prove_params(void);

// Returns true if the glue reads the parameters of `op` from the right place,
// or if it has none.
bool glue_params_are_known(const struct ggml_tensor *op);

// differs.c

// Compares ggml's structs and numbers with those that the glue was compiled
// for, by calling the program's functions. Returns NULL if they agree, else the
// name of the first that differs.
const char *glue_differs(void);
