//! Return codes of every function (`RKNN_SUCC`, `RKNN_ERR_*`).

use std::ffi::c_int;

/// Success.
pub const SUCC: c_int = 0;
/// Execution failed.
pub const FAIL: c_int = -1;
/// Execution timed out.
pub const TIMEOUT: c_int = -2;
/// No usable device.
pub const DEVICE_UNAVAILABLE: c_int = -3;
/// Memory allocation failed.
pub const MALLOC_FAIL: c_int = -4;
/// A parameter is invalid.
pub const PARAM_INVALID: c_int = -5;
/// The model is invalid.
pub const MODEL_INVALID: c_int = -6;
/// The context handle is invalid.
pub const CTX_INVALID: c_int = -7;
/// An input is invalid.
pub const INPUT_INVALID: c_int = -8;
/// An output is invalid.
pub const OUTPUT_INVALID: c_int = -9;
/// The device does not match.
pub const DEVICE_UNMATCH: c_int = -10;
/// The model was compiled for another version.
pub const INCOMPATIBLE_PRE_COMPILE_MODEL: c_int = -11;
/// The model's optimization level does not match.
pub const INCOMPATIBLE_OPTIMIZATION_LEVEL: c_int = -12;
/// The target platform does not match.
pub const TARGET_PLATFORM_UNMATCH: c_int = -13;

/// Returns the C name of a return code, for log lines.
#[must_use]
pub fn error_name(code: c_int) -> &'static str {
    match code {
        SUCC => "RKNN_SUCC",
        FAIL => "RKNN_ERR_FAIL",
        TIMEOUT => "RKNN_ERR_TIMEOUT",
        DEVICE_UNAVAILABLE => "RKNN_ERR_DEVICE_UNAVAILABLE",
        MALLOC_FAIL => "RKNN_ERR_MALLOC_FAIL",
        PARAM_INVALID => "RKNN_ERR_PARAM_INVALID",
        MODEL_INVALID => "RKNN_ERR_MODEL_INVALID",
        CTX_INVALID => "RKNN_ERR_CTX_INVALID",
        INPUT_INVALID => "RKNN_ERR_INPUT_INVALID",
        OUTPUT_INVALID => "RKNN_ERR_OUTPUT_INVALID",
        DEVICE_UNMATCH => "RKNN_ERR_DEVICE_UNMATCH",
        INCOMPATIBLE_PRE_COMPILE_MODEL => "RKNN_ERR_INCOMPATILE_PRE_COMPILE_MODEL",
        INCOMPATIBLE_OPTIMIZATION_LEVEL => "RKNN_ERR_INCOMPATILE_OPTIMIZATION_LEVEL_VERSION",
        TARGET_PLATFORM_UNMATCH => "RKNN_ERR_TARGET_PLATFORM_UNMATCH",
        _ => "unknown rknn error",
    }
}
