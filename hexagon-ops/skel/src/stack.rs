//! A look at the stack that a call arrives on.

use hexagon_ops::wire::STACK_NEEDED_BYTES;

use crate::{hap, log};

/// Smaller answers are not the size of the remaining stack: FastRPC's threads have 16 KiB or more,
/// of which START has used little.
///
/// SOURCE: qualcomm/fastrpc src/fastrpc_apps_user.c (`DEFAULT_UTHREAD_STACK_SIZE`).
/// `HAP_mem_available_stack` returns an error code if it fails, and one public implementation
/// returns the bytes in use.
const LEAST_BYTES: u64 = 8 << 10;

/// Returns `true` if the system says that the calling thread has less stack left than commands
/// need.
pub fn is_too_small() -> bool {
    // SAFETY: the loader has set it, and nothing writes it.
    let Some(available) = (unsafe { hap::HAP_mem_available_stack }) else {
        return false;
    };
    // SAFETY: takes no arguments.
    let bytes = unsafe { available() } & u64::from(u32::MAX);
    let is_too_small = (LEAST_BYTES..u64::from(STACK_NEEDED_BYTES)).contains(&bytes);
    if is_too_small {
        log::line(
            c"too little stack",
            c"bytes",
            i32::try_from(bytes).unwrap_or(0),
        );
    }
    is_too_small
}
