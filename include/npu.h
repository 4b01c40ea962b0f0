// DRAFT by hand; src/abi.rs + cbindgen will produce the real one with these names and this layout.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NPU_MAX_SRC 3
#define NPU_OP_PARAMS 16

// Element types the Rust side knows by itself. NPU_DTYPE_QUANTIZED: any ggml type with to_float.
#define NPU_DTYPE_F32 0
#define NPU_DTYPE_F16 1
#define NPU_DTYPE_I32 2
#define NPU_DTYPE_QUANTIZED 3
#define NPU_DTYPE_OTHER 4

#define NPU_OP_NONE 0      // NONE, VIEW, RESHAPE, PERMUTE, TRANSPOSE, empty, or without the COMPUTE flag: nothing to do
#define NPU_OP_MUL_MAT 1
#define NPU_OP_OTHER 2

// Where a tensor lives (through view_src).
#define NPU_PLACE_NONE 0    // no buffer yet
#define NPU_PLACE_HOST 1    // a buffer whose buft is_host (ours or the CPU's)
#define NPU_PLACE_PACKED 2  // one of our packed weight buffers: `buffer` is set
#define NPU_PLACE_OTHER 3   // somebody else's memory, not readable

#define NPU_STATUS_OK 0
#define NPU_STATUS_FAILED 1
#define NPU_STATUS_ALLOC_FAILED 2

#define NPU_LOG_ERROR 1     // same order as the Rust log crate
#define NPU_LOG_WARN 2
#define NPU_LOG_INFO 3
#define NPU_LOG_DEBUG 4

typedef struct npu_buffer npu_buffer;    // opaque
typedef struct npu_backend npu_backend;  // opaque

typedef void (*npu_to_float_fn)(const void * src, float * dst, int64_t n);

typedef struct npu_tensor {
    uint32_t dtype;
    uint32_t place;
    uint32_t block_elems;        // elements per block, 1 for plain types
    uint32_t block_bytes;        // bytes per block
    int64_t  ne[4];
    uint64_t nb[4];              // bytes
    void * data;                 // NULL in supports_op
    npu_buffer * buffer;         // NULL unless place == NPU_PLACE_PACKED; also NULL for a zero-size dummy buffer
    npu_to_float_fn to_float;    // NULL unless dtype == NPU_DTYPE_QUANTIZED
    const char * name;
} npu_tensor;

typedef struct npu_node {
    uint32_t op;
    uint32_t n_src;
    int32_t op_params[NPU_OP_PARAMS];
    npu_tensor dst;
    npu_tensor src[NPU_MAX_SRC];
} npu_node;

typedef struct npu_host {
    // text ends without newline
    void (*log)(uint32_t level, const char * text);
} npu_host;

size_t npu_start(const npu_host * host);                 // finds devices once; number of devices; later calls return the same
const char * npu_device_name(size_t device);             // "RKNPU0"
const char * npu_device_description(size_t device);      // "Rockchip RK3588 NPU, librknnrt 2.3.2 (simulated)"
void npu_device_memory(size_t device, size_t * free_bytes, size_t * total_bytes);
bool npu_supports_op(size_t device, const npu_node * node);

size_t npu_packed_alignment(size_t device);
size_t npu_packed_max_size(size_t device);
size_t npu_packed_alloc_size(size_t device, const npu_tensor * tensor);
npu_buffer * npu_buffer_new(size_t device, size_t size);  // NULL and a log line on failure
void   npu_buffer_free(npu_buffer * buffer);
void * npu_buffer_base(npu_buffer * buffer);
void   npu_buffer_set(npu_buffer * buffer, const npu_tensor * tensor, const void * data, size_t offset, size_t size);
void   npu_buffer_get(npu_buffer * buffer, const npu_tensor * tensor, void * data, size_t offset, size_t size);
void   npu_buffer_fill(npu_buffer * buffer, const npu_tensor * tensor, uint8_t value, size_t offset, size_t size);
void   npu_buffer_clear(npu_buffer * buffer, uint8_t value);

npu_backend * npu_backend_new(size_t device);             // NULL and a log line on failure
void     npu_backend_free(npu_backend * backend);
uint32_t npu_backend_compute(npu_backend * backend, const npu_node * nodes, size_t n_nodes, uint64_t uid);
