// Multiplies through librknpu_matmul.so, as programs for librknnrt do. Compiled
// with Rockchip's own headers.
//
// multiply             products on each core, in each arithmetic; a line for
// each, ends with 1 if one is wrong multiply structures  the header's
// structures: name, bytes; and each field: name, offset
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rknn_matmul_api.h"

#define FIELD(type, field)                                                     \
  printf(#type "." #field " %zu\n", offsetof(type, field))
#define SIZE(type) printf(#type " %zu\n", sizeof(type))

static void structures(void) {
  SIZE(rknn_matmul_info);
  FIELD(rknn_matmul_info, M);
  FIELD(rknn_matmul_info, K);
  FIELD(rknn_matmul_info, N);
  FIELD(rknn_matmul_info, type);
  FIELD(rknn_matmul_info, B_layout);
  FIELD(rknn_matmul_info, B_quant_type);
  FIELD(rknn_matmul_info, AC_layout);
  FIELD(rknn_matmul_info, AC_quant_type);
  FIELD(rknn_matmul_info, iommu_domain_id);
  FIELD(rknn_matmul_info, group_size);
  FIELD(rknn_matmul_info, reserved);
  SIZE(rknn_matmul_tensor_attr);
  FIELD(rknn_matmul_tensor_attr, name);
  FIELD(rknn_matmul_tensor_attr, n_dims);
  FIELD(rknn_matmul_tensor_attr, dims);
  FIELD(rknn_matmul_tensor_attr, size);
  FIELD(rknn_matmul_tensor_attr, type);
  SIZE(rknn_matmul_io_attr);
  FIELD(rknn_matmul_io_attr, A);
  FIELD(rknn_matmul_io_attr, B);
  FIELD(rknn_matmul_io_attr, C);
  SIZE(rknn_quant_params);
  FIELD(rknn_quant_params, name);
  FIELD(rknn_quant_params, scale);
  FIELD(rknn_quant_params, scale_len);
  FIELD(rknn_quant_params, zp);
  FIELD(rknn_quant_params, zp_len);
  SIZE(rknn_matmul_shape);
  FIELD(rknn_matmul_shape, M);
  FIELD(rknn_matmul_shape, K);
  FIELD(rknn_matmul_shape, N);
  SIZE(rknn_tensor_mem);
  FIELD(rknn_tensor_mem, virt_addr);
  FIELD(rknn_tensor_mem, phys_addr);
  FIELD(rknn_tensor_mem, fd);
  FIELD(rknn_tensor_mem, offset);
  FIELD(rknn_tensor_mem, size);
  FIELD(rknn_tensor_mem, flags);
  FIELD(rknn_tensor_mem, priv_data);
  SIZE(rknn_sdk_version);
  FIELD(rknn_sdk_version, api_version);
  FIELD(rknn_sdk_version, drv_version);
}

static void need(int ok, const char *what) {
  if (!ok) {
    fprintf(stderr, "%s failed\n", what);
    exit(1);
  }
}

static int element(unsigned *state) {
  *state = *state * 1103515245u + 12345u;
  return (int)(*state >> 16) % 7 - 3;
}

// Small integers as halves.
static unsigned short half(int value) {
  static const unsigned short halves[] = {0, 0x3c00, 0x4000, 0x4200};
  return (unsigned short)(value < 0 ? 0x8000 | halves[-value] : halves[value]);
}

// Writes an element of row-major A, two to the byte if they have 4 bits, or one
// of B, a byte each then.
static void put(void *place, rknn_matmul_type type, size_t index, int value,
                int is_packed) {
  unsigned char *bytes = place;
  if (type == RKNN_FLOAT16_MM_FLOAT16_TO_FLOAT32) {
    ((unsigned short *)place)[index] = half(value);
  } else if (type == RKNN_INT8_MM_INT8_TO_INT32 || !is_packed) {
    bytes[index] = (unsigned char)value;
  } else {
    bytes[index / 2] |= (unsigned char)((value & 15) << (index % 2 * 4));
  }
}

static double get(const void *place, rknn_matmul_type type, size_t index) {
  switch (type) {
  case RKNN_FLOAT16_MM_FLOAT16_TO_FLOAT32:
    return ((const float *)place)[index];
  case RKNN_INT8_MM_INT8_TO_INT32:
    return ((const int *)place)[index];
  default:
    return ((const short *)place)[index];
  }
}

// Returns the number of results that are wrong.
static size_t multiply(rknn_matmul_type type, rknn_core_mask core, int m, int k,
                       int n) {
  rknn_matmul_ctx context = 0;
  rknn_matmul_io_attr attr;
  rknn_matmul_info info = {.M = m, .K = k, .N = n, .type = type};
  info.B_layout = RKNN_MM_LAYOUT_NATIVE;
  info.AC_layout = RKNN_MM_LAYOUT_NORM;
  need(rknn_matmul_create(&context, &info, &attr) == RKNN_SUCC,
       "rknn_matmul_create");
  need(rknn_matmul_set_core_mask(context, core) == RKNN_SUCC,
       "rknn_matmul_set_core_mask");
  need(attr.A.n_dims == 2 && attr.A.dims[0] == (unsigned)m &&
           attr.A.dims[1] == (unsigned)k,
       "dimensions of A");
  need(attr.C.n_dims == 2 && attr.C.dims[0] == (unsigned)m &&
           attr.C.dims[1] == (unsigned)n,
       "dimensions of C");
  rknn_tensor_mem *a = rknn_create_mem(context, attr.A.size);
  rknn_tensor_mem *b = rknn_create_mem(context, attr.B.size);
  rknn_tensor_mem *c = rknn_create_mem(context, attr.C.size);
  need(a && b && c, "rknn_create_mem");
  signed char *act = malloc((size_t)m * k);
  signed char *weight = malloc((size_t)k * n);
  void *normal = malloc(2 * (size_t)k * n);
  need(act && weight && normal, "malloc");
  unsigned state = (unsigned)(m + k + n);
  memset(a->virt_addr, 0, attr.A.size);
  for (size_t i = 0; i < (size_t)m * k; i++) {
    act[i] = (signed char)element(&state);
    put(a->virt_addr, type, i, act[i], 1);
  }
  for (size_t i = 0; i < (size_t)k * n; i++) {
    weight[i] = (signed char)element(&state);
    put(normal, type, i, weight[i], 0);
  }
  need(rknn_B_normal_layout_to_native_layout(normal, b->virt_addr, k, n,
                                             &info) == RKNN_SUCC,
       "rknn_B_normal_layout_to_native_layout");
  need(rknn_mem_sync(context, a, RKNN_MEMORY_SYNC_TO_DEVICE) == RKNN_SUCC,
       "rknn_mem_sync");
  need(rknn_mem_sync(context, b, RKNN_MEMORY_SYNC_TO_DEVICE) == RKNN_SUCC,
       "rknn_mem_sync");
  need(rknn_matmul_set_io_mem(context, a, &attr.A) == RKNN_SUCC,
       "rknn_matmul_set_io_mem of A");
  need(rknn_matmul_set_io_mem(context, b, &attr.B) == RKNN_SUCC,
       "rknn_matmul_set_io_mem of B");
  need(rknn_matmul_set_io_mem(context, c, &attr.C) == RKNN_SUCC,
       "rknn_matmul_set_io_mem of C");
  need(rknn_matmul_run(context) == RKNN_SUCC, "rknn_matmul_run");
  need(rknn_mem_sync(context, c, RKNN_MEMORY_SYNC_FROM_DEVICE) == RKNN_SUCC,
       "rknn_mem_sync");
  size_t wrong = 0;
  for (int row = 0; row < m; row++) {
    for (int column = 0; column < n; column++) {
      int sum = 0;
      for (int i = 0; i < k; i++)
        sum += act[(size_t)row * k + i] * weight[(size_t)i * n + column];
      wrong += get(c->virt_addr, type, (size_t)row * n + column) != sum;
    }
  }
  free(act);
  free(weight);
  free(normal);
  need(rknn_destroy_mem(context, a) == RKNN_SUCC &&
           rknn_destroy_mem(context, b) == RKNN_SUCC,
       "rknn_destroy_mem");
  need(rknn_destroy_mem(context, c) == RKNN_SUCC, "rknn_destroy_mem");
  need(rknn_matmul_destroy(context) == RKNN_SUCC, "rknn_matmul_destroy");
  need(rknn_matmul_run(context) == RKNN_ERR_CTX_INVALID,
       "a run of a context that was destroyed");
  return wrong;
}

int main(int argc, char **argv) {
  static const rknn_matmul_type types[] = {RKNN_FLOAT16_MM_FLOAT16_TO_FLOAT32,
                                           RKNN_INT8_MM_INT8_TO_INT32,
                                           RKNN_INT4_MM_INT4_TO_INT16};
  static const rknn_core_mask cores[] = {RKNN_NPU_CORE_0, RKNN_NPU_CORE_1,
                                         RKNN_NPU_CORE_2};
  // M alone, filled up to four and in several tiles; K of one pass and of
  // several; N of one group and of several tiles.
  static const int shapes[][3] = {
      {1, 64, 64}, {5, 96, 320}, {300, 576, 128}, {7, 4416, 64}, {2, 8256, 64}};
  if (argc == 2 && strcmp(argv[1], "structures") == 0) {
    structures();
    return 0;
  }
  size_t all = 0;
  for (size_t i = 0; i < 3; i++) {
    for (size_t j = 0; j < sizeof shapes / sizeof *shapes; j++) {
      const int *shape = shapes[j];
      size_t wrong =
          multiply(types[i], cores[(i + j) % 3], shape[0], shape[1], shape[2]);
      printf("%s M=%d K=%d N=%d: %zu wrong\n", get_matmul_type_string(types[i]),
             shape[0], shape[1], shape[2], wrong);
      all += wrong;
    }
  }
  // What the library does not do is refused.
  rknn_matmul_ctx context = 0;
  rknn_matmul_io_attr attr;
  rknn_matmul_info info = {
      .M = 1, .K = 32, .N = 32, .type = RKNN_FLOAT16_MM_INT8_TO_FLOAT32};
  info.B_layout = RKNN_MM_LAYOUT_NATIVE;
  need(rknn_matmul_create(&context, &info, &attr) == RKNN_ERR_PARAM_INVALID,
       "refusing FP16 by INT8");
  return all != 0;
}
