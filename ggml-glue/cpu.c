// The CPU backend inside a device's graphs. It computes the nodes that the NPU
// cannot compute, or not as fast, with the number of threads that the program
// sets.

#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "glue.h"

#include <string.h>

// Weak, because a plugin finds the functions of ggml's registry only if the
// program loaded it with global symbols.
#pragma weak ggml_backend_dev_by_type
#pragma weak ggml_backend_init_by_type

bool glue_cpu_supports(const struct ggml_tensor *op) {
  if (ggml_backend_dev_by_type == NULL) {
    return false;
  }
  ggml_backend_dev_t cpu =
      ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  return cpu != NULL && cpu->iface.supports_op(cpu, op);
}

// Copies the address of a function of the CPU backend to `function`, which has
// `size` bytes. Returns false if there is none of that name.
static bool find_function(ggml_backend_t cpu, const char *name, void *function,
                          size_t size) {
  ggml_backend_reg_t reg =
      ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu));
  // ISO C has no cast from an object pointer to a function pointer.
  void *address = ggml_backend_reg_get_proc_address(reg, name);
  if (address == NULL || size != sizeof(address)) {
    return false;
  }
  memcpy(function, &address, size);
  return true;
}

static void drop_pool(struct glue_cpu *cpu) {
  __typeof__(ggml_threadpool_free) *drop;
  __typeof__(ggml_backend_cpu_set_threadpool) *attach;
  if (cpu->pool != NULL &&
      find_function(cpu->backend, "ggml_threadpool_free", &drop,
                    sizeof(drop)) &&
      find_function(cpu->backend, "ggml_backend_cpu_set_threadpool", &attach,
                    sizeof(attach))) {
    attach(cpu->backend, NULL);
    drop(cpu->pool);
  }
  cpu->pool = NULL;
  cpu->pool_threads = 0;
}

// Gives the CPU backend persistent threads. Without them, a ggml that was built
// without OpenMP starts new threads for each range of nodes between two ranges
// of the NPU.
static void keep_threads(struct glue_cpu *cpu) {
  __typeof__(ggml_threadpool_new) *start;
  __typeof__(ggml_backend_cpu_set_threadpool) *attach;
  if (cpu->n_threads <= cpu->pool_threads ||
      !find_function(cpu->backend, "ggml_threadpool_new", &start,
                     sizeof(start)) ||
      !find_function(cpu->backend, "ggml_backend_cpu_set_threadpool", &attach,
                     sizeof(attach))) {
    return;
  }
  drop_pool(cpu);
  // The threads sleep at once instead of spinning, because the device's threads
  // need the CPUs next.
  // SOURCE: ggml_threadpool_params_init, ggml.c of llama.cpp 0.5.0: threads are
  // not bound to CPUs.
  struct ggml_threadpool_params params = {.n_threads = cpu->n_threads,
                                          .poll = 0};
  cpu->pool = start(&params);
  cpu->pool_threads = cpu->pool != NULL ? cpu->n_threads : 0;
  attach(cpu->backend, cpu->pool);
}

static void apply_threads(struct glue_cpu *cpu) {
  ggml_backend_set_n_threads_t set;
  if (cpu->n_threads > 0 &&
      find_function(cpu->backend, "ggml_backend_set_n_threads", &set,
                    sizeof(set))) {
    set(cpu->backend, cpu->n_threads);
    keep_threads(cpu);
  }
}

static void apply_abort_callback(struct glue_cpu *cpu) {
  ggml_backend_set_abort_callback_t set;
  if (find_function(cpu->backend, "ggml_backend_set_abort_callback", &set,
                    sizeof(set))) {
    set(cpu->backend, cpu->abort_callback, cpu->abort_data);
  }
}

ggml_backend_t glue_cpu_backend(struct glue_cpu *cpu, const char *device) {
  if (cpu->backend != NULL || cpu->has_failed) {
    return cpu->backend;
  }
  if (ggml_backend_init_by_type != NULL) {
    cpu->backend =
        ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, NULL);
  }
  if (cpu->backend == NULL) {
    cpu->has_failed = true;
    GGML_LOG_WARN("ggml-rust-npu: %s: no CPU backend, the NPU computes what it "
                  "can\n",
                  device);
  } else {
    apply_threads(cpu);
    apply_abort_callback(cpu);
  }
  return cpu->backend;
}

void glue_cpu_set_n_threads(struct glue_cpu *cpu, int n_threads) {
  if (cpu->n_threads == n_threads) {
    return;
  }
  cpu->n_threads = n_threads;
  if (cpu->backend != NULL) {
    apply_threads(cpu);
  }
}

void glue_cpu_set_abort_callback(struct glue_cpu *cpu,
                                 ggml_abort_callback callback, void *data) {
  cpu->abort_callback = callback;
  cpu->abort_data = data;
  if (cpu->backend != NULL) {
    apply_abort_callback(cpu);
  }
}

void glue_cpu_free(struct glue_cpu *cpu) {
  if (cpu->backend != NULL) {
    drop_pool(cpu);
    ggml_backend_free(cpu->backend);
  }
}
