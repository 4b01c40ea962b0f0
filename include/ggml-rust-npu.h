#pragma once

#include "ggml-backend.h"

#ifdef __cplusplus
extern "C" {
#endif

// Registers the RUST_NPU backend; returns the same pointer each time.
GGML_BACKEND_API ggml_backend_reg_t ggml_backend_rust_npu_reg(void);

#ifdef __cplusplus
}
#endif
