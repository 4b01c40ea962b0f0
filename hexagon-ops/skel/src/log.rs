//! The DSP's log, which the host's log contains: logcat on Android, the journal where adsprpcd or
//! cdsprpcd runs.

use core::ffi::CStr;

use crate::hap;

/// `HAP_LEVEL_ERROR`.
///
/// SOURCE: qualcomm/fastrpc inc/HAP_debug.h.
const LEVEL_ERROR: i32 = 3;

/// Writes "ggml-rust-npu: `what`: `name` `code`", where there is a log.
pub fn line(what: &CStr, name: &CStr, code: i32) {
    // SAFETY: the loader has set the symbol, and nothing writes it later.
    if let Some(debug) = unsafe { hap::HAP_debug_v2 } {
        let format = c"ggml-rust-npu: %s: %s %#x";
        let file = c"skel";
        // SAFETY: both texts are C strings, followed by the arguments that the format names.
        unsafe {
            debug(
                LEVEL_ERROR,
                file.as_ptr(),
                0,
                format.as_ptr(),
                what.as_ptr(),
                name.as_ptr(),
                code,
            );
        }
    }
}
