// Starting with how many rows is a multiplication faster on the NPU than on the
// CPU? Prints both times for M = 1 to 32 and a few sizes of weights, and the
// resulting value of GGML_RUST_NPU_MIN_M. Built with tests/e2e/link.
//
// usage: crossover [threads]

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// K and N of attention and feed-forward weights of models with 1 to 8 billion
// parameters.
static const int64_t SIZES[][2] = {
    {2048, 2048}, {2048, 8192}, {8192, 2048}, {4096, 4096}};
static const int64_t ROWS[] = {1, 2, 4, 8, 16, 32};

enum { N_SIZES = sizeof(SIZES) / sizeof(SIZES[0]) };
enum { N_ROWS = sizeof(ROWS) / sizeof(ROWS[0]) };
enum { WARM_UP = 3, REPEATS = 15 };

static void fail(const char *what) {
  fprintf(stderr, "crossover: %s\n", what);
  exit(1);
}

// A Q8_0 weight in a buffer of the given type.
static ggml_backend_buffer_t put(struct ggml_tensor *weight,
                                 ggml_backend_buffer_type_t buft) {
  ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(
      buft, ggml_backend_buft_get_alloc_size(buft, weight));
  if (buffer == NULL) {
    fail("no memory for a weight");
  }
  ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
  if (ggml_backend_tensor_alloc(buffer, weight,
                                ggml_backend_buffer_get_base(buffer)) !=
      GGML_STATUS_SUCCESS) {
    fail("a weight does not fit its buffer");
  }
  const int64_t n = ggml_nelements(weight);
  float *values = malloc((size_t)n * sizeof(float));
  void *blocks = malloc(ggml_nbytes(weight));
  if (values == NULL || blocks == NULL) {
    fail("no memory");
  }
  for (int64_t i = 0; i < n; i++) {
    values[i] = (float)(i * 2654435761u % 2001) / 1000.0f - 1.0f;
  }
  ggml_quantize_chunk(weight->type, values, blocks, 0, weight->ne[1],
                      weight->ne[0], NULL);
  ggml_backend_tensor_set(weight, blocks, 0, ggml_nbytes(weight));
  free(blocks);
  free(values);
  return buffer;
}

// The time of one multiplication in microseconds: the shortest of several,
// because other work on the CPU only makes it longer.
static double measure(ggml_backend_t backend, ggml_backend_buffer_type_t buft,
                      int64_t k, int64_t n, int64_t m) {
  const struct ggml_init_params params = {
      .mem_size = 16 * ggml_tensor_overhead() + ggml_graph_overhead(),
      .no_alloc = true};
  struct ggml_context *weights = ggml_init(params), *rest = ggml_init(params);
  struct ggml_tensor *w = ggml_new_tensor_2d(weights, GGML_TYPE_Q8_0, k, n);
  ggml_backend_buffer_t w_buffer = put(w, buft);
  struct ggml_tensor *x = ggml_new_tensor_2d(rest, GGML_TYPE_F32, k, m);
  struct ggml_tensor *y = ggml_mul_mat(rest, w, x);
  struct ggml_cgraph *graph = ggml_new_graph(rest);
  ggml_build_forward_expand(graph, y);
  ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(
      rest, ggml_backend_cpu_buffer_type());
  if (buffer == NULL) {
    fail("no memory for activations");
  }
  for (int64_t i = 0; i < k * m; i++) {
    ((float *)x->data)[i] = sinf((float)i);
  }
  int64_t least = INT64_MAX;
  for (int i = -WARM_UP; i < REPEATS; i++) {
    const int64_t start = ggml_time_us();
    if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
      fail("a multiplication failed");
    }
    const int64_t time = ggml_time_us() - start;
    if (i >= 0 && time < least) {
      least = time;
    }
  }
  ggml_backend_buffer_free(buffer);
  ggml_backend_buffer_free(w_buffer);
  ggml_free(rest);
  ggml_free(weights);
  return (double)least;
}

static void *address_of(ggml_backend_dev_t dev, const char *name) {
  void *address = ggml_backend_reg_get_proc_address(
      ggml_backend_dev_backend_reg(dev), name);
  if (address == NULL) {
    fail(name);
  }
  return address;
}

// The buffer type in which a device packs weights.
static ggml_backend_buffer_type_t packed_of(ggml_backend_dev_t dev) {
  void *address = address_of(dev, "ggml_backend_dev_get_extra_bufts");
  ggml_backend_dev_get_extra_bufts_t get;
  memcpy(&get, &address, sizeof(get));
  return get(dev)[0];
}

static void set_threads(ggml_backend_t backend, int threads) {
  void *address = address_of(ggml_backend_get_device(backend),
                             "ggml_backend_set_n_threads");
  ggml_backend_set_n_threads_t set;
  memcpy(&set, &address, sizeof(set));
  set(backend, threads);
}

int main(int argc, char **argv) {
  // With the variable set, the CPU would be compared with itself.
  if (getenv("GGML_RUST_NPU_MIN_M") != NULL) {
    fail("unset GGML_RUST_NPU_MIN_M: it is what is to be found");
  }
  const int threads = argc > 1 ? atoi(argv[1]) : GGML_DEFAULT_N_THREADS;
  ggml_backend_dev_t dev = ggml_backend_dev_by_name("RKNPU0");
  ggml_backend_t cpu =
      ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, NULL);
  if (dev == NULL || cpu == NULL) {
    fail(dev == NULL ? "no device RKNPU0" : "no CPU backend");
  }
  ggml_backend_t npu = ggml_backend_dev_init(dev, NULL);
  if (npu == NULL) {
    fail("RKNPU0 does not start");
  }
  set_threads(cpu, threads);
  printf("%s, and the CPU with %d threads; Q8_0 weights\n",
         ggml_backend_dev_description(dev), threads);
  printf("%6s %6s %4s %12s %12s\n", "K", "N", "M", "NPU us", "CPU us");
  double npu_us[N_ROWS] = {0}, cpu_us[N_ROWS] = {0};
  for (int s = 0; s < N_SIZES; s++) {
    for (int r = 0; r < N_ROWS; r++) {
      const int64_t k = SIZES[s][0], n = SIZES[s][1], m = ROWS[r];
      const double on_npu = measure(npu, packed_of(dev), k, n, m);
      const double on_cpu =
          measure(cpu, ggml_backend_cpu_buffer_type(), k, n, m);
      printf("%6d %6d %4d %12.0f %12.0f\n", (int)k, (int)n, (int)m, on_npu,
             on_cpu);
      fflush(stdout);
      npu_us[r] += on_npu;
      cpu_us[r] += on_cpu;
    }
  }
  // The smallest M from which the NPU is faster for all sizes together.
  int first = N_ROWS;
  while (first > 0 && npu_us[first - 1] < cpu_us[first - 1]) {
    first--;
  }
  if (first == N_ROWS) {
    printf("the CPU is faster up to M = %d: GGML_RUST_NPU_MIN_M=%d\n",
           (int)ROWS[N_ROWS - 1], (int)ROWS[N_ROWS - 1] + 1);
  } else {
    // The crossover is somewhere between two measured M. All M up to the
    // smaller one go to the CPU.
    const int64_t min_m = first == 0 ? 1 : ROWS[first - 1] + 1;
    printf("GGML_RUST_NPU_MIN_M=%d\n", (int)min_m);
  }
  ggml_backend_free(npu);
  ggml_backend_free(cpu);
  return 0;
}
