// The registry entry RUST_NPU and its devices. ggml asks these functions before
// it allocates or computes anything.

#include "ggml-rust-npu.h"

#include "ggml-impl.h"
#include "glue.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// The glue fills or reads these structs. If a new llama.cpp changes one of
// them, compiling must fail until the change is understood.
#if UINTPTR_MAX == UINT64_MAX
_Static_assert(GGML_BACKEND_API_VERSION == 2 || GGML_BACKEND_API_VERSION == 3,
               "ggml backend API version");
_Static_assert(sizeof(struct ggml_backend_reg) == 48, "ggml_backend_reg");
_Static_assert(offsetof(struct ggml_backend_reg, iface) == 8,
               "ggml_backend_reg.iface");
_Static_assert(offsetof(struct ggml_backend_reg, context) == 40,
               "ggml_backend_reg.context");
_Static_assert(sizeof(struct ggml_backend_device) == 136,
               "ggml_backend_device");
_Static_assert(offsetof(struct ggml_backend_device, reg) == 120,
               "ggml_backend_device.reg");
_Static_assert(offsetof(struct ggml_backend_device, context) == 128,
               "ggml_backend_device.context");
_Static_assert(sizeof(struct ggml_backend_dev_props) == 56,
               "ggml_backend_dev_props");
_Static_assert(sizeof(struct ggml_backend_dev_caps) == 5,
               "ggml_backend_dev_caps");
#endif

// The first call of start() creates the devices. They are never changed or
// freed afterwards.
static struct glue_device *g_devices;
static size_t g_n_devices;
static pthread_once_t g_once = PTHREAD_ONCE_INIT;

static struct glue_device *glue_device_of(ggml_backend_dev_t dev) {
  return (struct glue_device *)dev->context;
}

static const char *device_get_name(ggml_backend_dev_t dev) {
  return npu_device_name(glue_device_of(dev)->index);
}

static const char *device_get_description(ggml_backend_dev_t dev) {
  return npu_device_description(glue_device_of(dev)->index);
}

static void device_get_memory(ggml_backend_dev_t dev, size_t *free,
                              size_t *total) {
  npu_device_memory(glue_device_of(dev)->index, free, total);
}

// Returns GPU, because llama.cpp gives layers to devices of this type only.
static enum ggml_backend_dev_type device_get_type(ggml_backend_dev_t dev) {
  (void)dev;
  return GGML_BACKEND_DEVICE_TYPE_GPU;
}

static void device_get_props(ggml_backend_dev_t dev,
                             struct ggml_backend_dev_props *props) {
  *props = (struct ggml_backend_dev_props){
      .name = device_get_name(dev),
      .description = device_get_description(dev),
      .type = device_get_type(dev),
      // All capabilities stay false: weights must pass through set_tensor,
      // which packs them, and computing is synchronous.
  };
  device_get_memory(dev, &props->memory_free, &props->memory_total);
}

static ggml_backend_t device_init_backend(ggml_backend_dev_t dev,
                                          const char *params) {
  (void)params;
  return glue_backend_new(glue_device_of(dev));
}

static ggml_backend_buffer_type_t
device_get_buffer_type(ggml_backend_dev_t dev) {
  struct glue_device *device = glue_device_of(dev);
  return device->buffers == NPU_BUFFERS_ONE ? &device->packed_buft
                                            : &device->host_buft;
}

// Logs once that a program trains weights that the device has packed.
static void tell_of_training(struct glue_device *device,
                             const struct ggml_tensor *op) {
  static const char step[] = "OPT_STEP_";
  if (strncmp(ggml_op_name(op->op), step, sizeof(step) - 1) == 0 &&
      !atomic_exchange(&device->told_of_training, true)) {
    GGML_LOG_INFO("ggml-rust-npu: %s: the program trains: the CPU takes the "
                  "optimizer's steps, and weights in F32 are multiplied in "
                  "FP32\n",
                  npu_device_name(device->index));
  }
}

static bool device_supports_op(ggml_backend_dev_t dev,
                               const struct ggml_tensor *op) {
  if (ggml_op_is_empty(op->op)) {
    return true;
  }
  struct glue_device *device = glue_device_of(dev);
  const bool of_slices = glue_is_of_slices(device, op);
  npu_node node;
  const bool described =
      glue_params_are_known(op) && glue_node(device, op, false, &node);
  if (described && npu_supports_op(device->index, &node)) {
    return true;
  }
  if (of_slices && device->buffers != NPU_BUFFERS_ONE &&
      glue_cpu_supports(op)) {
    // ggml adds up the partial sums of slices only in graphs of its device for
    // `-sm tensor`, and cannot give them to the CPU. So the whole graph is
    // computed here.
    atomic_store_explicit(&device->shares_graphs, true, memory_order_relaxed);
    return true;
  }
  if (glue_computes_on_cpu(device, op)) {
    return true;
  }
  if (glue_only_device_writes(device, op)) {
    // For example an optimizer's step on packed weights. If there is no CPU
    // backend either, the graph fails with a log line.
    tell_of_training(device, op);
    atomic_store_explicit(&device->shares_graphs, true, memory_order_relaxed);
    return true;
  }
  glue_mark_cpu_reader(device, op);
  return false;
}

static bool device_supports_buft(ggml_backend_dev_t dev,
                                 ggml_backend_buffer_type_t buft) {
  const struct glue_device *device = glue_device_of(dev);
  return glue_is_ours(device, buft) || buft == &device->host_buft ||
         (device->buffers == NPU_BUFFERS_HOST_AND_PACKED &&
          ggml_backend_buft_is_host(buft));
}

static const struct ggml_backend_device_i device_iface = {
    .get_name = device_get_name,
    .get_description = device_get_description,
    .get_memory = device_get_memory,
    .get_type = device_get_type,
    .get_props = device_get_props,
    .init_backend = device_init_backend,
    .get_buffer_type = device_get_buffer_type,
    .supports_op = device_supports_op,
    .supports_buft = device_supports_buft,
};

static const char *reg_get_name(ggml_backend_reg_t reg) {
  (void)reg;
  return "RUST_NPU";
}

static size_t reg_get_device_count(ggml_backend_reg_t reg) {
  (void)reg;
  return g_n_devices;
}

static ggml_backend_dev_t reg_get_device(ggml_backend_reg_t reg, size_t index) {
  (void)reg;
  GGML_ASSERT(index < g_n_devices);
  return &g_devices[index].dev;
}

static ggml_backend_buffer_type_t *get_extra_bufts(ggml_backend_dev_t dev) {
  return glue_device_of(dev)->extra_bufts;
}

// Answers `-sm row`. NULL stands for the device's usual buffer types: with this
// option, layers are divided among devices as they are without it, but rows are
// not.
static ggml_backend_buffer_type_t split_buffer_type(int main_device,
                                                    const float *tensor_split) {
  static atomic_flag told = ATOMIC_FLAG_INIT;
  (void)main_device;
  (void)tensor_split;
  if (!atomic_flag_test_and_set(&told)) {
    GGML_LOG_WARN("ggml-rust-npu: -sm row shares out layers as -sm layer does, "
                  "because no tensor is split by rows\n");
  }
  return NULL;
}

static void *reg_get_proc_address(ggml_backend_reg_t reg, const char *name) {
  (void)reg;
  // ISO C has no cast from a function pointer to an object pointer.
  void *address = NULL;
  if (strcmp(name, "ggml_backend_dev_get_extra_bufts") == 0) {
    const ggml_backend_dev_get_extra_bufts_t fn = get_extra_bufts;
    _Static_assert(sizeof(address) == sizeof(fn),
                   "pointers to functions and to objects");
    memcpy(&address, &fn, sizeof(address));
  } else if (strcmp(name, "ggml_backend_split_buffer_type") == 0) {
    const ggml_backend_split_buffer_type_t fn = split_buffer_type;
    memcpy(&address, &fn, sizeof(address));
  } else if (strcmp(name, "ggml_backend_set_n_threads") == 0) {
    const ggml_backend_set_n_threads_t fn = glue_backend_set_n_threads;
    memcpy(&address, &fn, sizeof(address));
  } else if (strcmp(name, "ggml_backend_set_abort_callback") == 0) {
    const ggml_backend_set_abort_callback_t fn =
        glue_backend_set_abort_callback;
    memcpy(&address, &fn, sizeof(address));
  }
  return address;
}

static struct ggml_backend_reg g_reg = {
    .api_version = GGML_BACKEND_API_VERSION,
    .iface =
        {
            .get_name = reg_get_name,
            .get_device_count = reg_get_device_count,
            .get_device = reg_get_device,
            .get_proc_address = reg_get_proc_address,
        },
};

static void host_log(uint32_t level, const char *text) {
  enum ggml_log_level ggml_level = GGML_LOG_LEVEL_DEBUG;
  switch (level) {
  case NPU_LOG_ERROR:
    ggml_level = GGML_LOG_LEVEL_ERROR;
    break;
  case NPU_LOG_WARN:
    ggml_level = GGML_LOG_LEVEL_WARN;
    break;
  case NPU_LOG_INFO:
    ggml_level = GGML_LOG_LEVEL_INFO;
    break;
  default:
    break;
  }
  ggml_log_internal(ggml_level, "%s\n", text);
}

static void start(void) {
  static const npu_host host = {.log = host_log};

  const size_t n_devices = npu_start(&host);
  if (n_devices == 0) {
    return;
  }
  g_devices = calloc(n_devices, sizeof(g_devices[0]));
  if (g_devices == NULL) {
    GGML_LOG_ERROR("ggml-rust-npu: no memory for %zu devices\n", n_devices);
    return;
  }
  for (size_t i = 0; i < n_devices; i++) {
    struct glue_device *device = &g_devices[i];
    device->index = i;
    device->buffers = npu_device_buffers(i);
    device->dev = (struct ggml_backend_device){
        .iface = device_iface, .reg = &g_reg, .context = device};
    glue_device_init_bufts(device);
  }
  g_n_devices = n_devices;
}

ggml_backend_reg_t ggml_backend_rust_npu_reg(void) {
  pthread_once(&g_once, start);
  return &g_reg;
}

GGML_BACKEND_DL_IMPL(ggml_backend_rust_npu_reg)
