//! A look at the stack that a call arrives on.

use hexagon_ops::wire::STACK_NEEDED_BYTES;

use crate::{hap, log};

/// Smallest plausible size of the remaining stack: FastRPC's threads have 16 KiB or more, and START
/// has used little of it. A smaller answer means something else.
///
/// SOURCE: qualcomm/fastrpc src/fastrpc_apps_user.c (`DEFAULT_UTHREAD_STACK_SIZE`).
/// `HAP_mem_available_stack` returns an error code if it fails, and one public implementation
/// returns the bytes in use.
const LEAST_BYTES: u64 = 8 << 10;

/// Returns `true` if the calling thread reports less stack left than commands need.
pub fn is_too_small() -> bool {
    // SAFETY: the loader has set the symbol, and nothing writes it later.
    let Some(available) = (unsafe { hap::HAP_mem_available_stack }) else {
        return false;
    };
    // SAFETY: the function takes no arguments.
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
