//! The library that FastRPC loads on the DSP: `ggml_rust_npu_skel_handle_invoke` over
//! [`hexagon_ops::serve`].
//!
//! ```text
//! method 0  open    host: remote_handle64_open      -> the one session of this process
//!        1  close         remote_handle64_close        ends a call that is running, unmaps, releases
//!        2  START         Server::start                asks how much VTCM there is
//!        3  SERVE         VTCM and matrix unit taken, Server::serve, both given back
//! ```
//!
//! FastRPC calls on its own threads; only close may be called while another call runs. VTCM and the
//! matrix unit belong to the session only while it serves, so that several sessions and other
//! programs can use them one after another.
//!
//! Calls need more stack than the 16 KiB that FastRPC's threads have by default: hosts request
//! `wire::STACK_BYTES` (FASTRPC_THREAD_PARAMS), and START refuses a thread with less than
//! `wire::STACK_NEEDED_BYTES`.
//!
//! Closing the last handle of a process ends the process without calling method 1: the system
//! itself frees everything that close would release.
//!
//! SOURCE: qualcomm/fastrpc inc/remote.h (entry, scalars), src/mod_table.c (open: two buffers in,
//! one handle out; close: one handle in). Not run on a device.

#![no_std]
#![feature(asm_experimental_arch, linkage)]

mod code;
mod hap;
mod log;
mod platform;
mod power;
mod session;
mod stack;

use core::arch::{asm, global_asm};

use hexagon_ops::rt::invoke::{Call, RemoteArg, Scalars};

use crate::code::BAD_PARAMETER;

// FastRPC aligns the stacks of its threads to 8 bytes, but spilled vectors need 128.
global_asm!(
    ".globl ggml_rust_npu_skel_handle_invoke",
    ".type ggml_rust_npu_skel_handle_invoke, @function",
    "ggml_rust_npu_skel_handle_invoke:",
    "{{ allocframe(#0) }}",
    "{{ r29 = and(r29, #-128) }}",
    "{{ call {invoke} }}",
    "{{ dealloc_return }}",
    ".size ggml_rust_npu_skel_handle_invoke, . - ggml_rust_npu_skel_handle_invoke",
    invoke = sym invoke,
);

/// Method that opens a handle.
const METHOD_OPEN: u32 = 0;
/// Method that closes it.
const METHOD_CLOSE: u32 = 1;
/// Argument in which open returns its handle: after the length and the text of the URI.
const OPEN_HANDLE: usize = 2;

/// Implements `ggml_rust_npu_skel_handle_invoke`.
///
/// # Safety
/// - `args` has the number of arguments that `scalars` specifies. Each is a buffer or handle that
///   belongs to this call.
unsafe extern "C" fn invoke(_handle: u64, scalars: u32, args: *mut RemoteArg) -> i32 {
    let scalars = Scalars(scalars);
    let result = match scalars.method() {
        METHOD_OPEN if scalars.inputs() == OPEN_HANDLE && scalars.handles() == 1 => {
            session::open().map(|handle| {
                // SAFETY: the guard has checked that there are two buffers and a handle.
                let out = unsafe { args.add(OPEN_HANDLE) };
                // SAFETY: an argument has room for a handle (`h64` of the union `remote_arg`).
                unsafe { out.cast::<u64>().write(handle) };
            })
        }
        METHOD_CLOSE => session::close(),
        _ => {
            // SAFETY: guaranteed by the caller.
            match unsafe { Call::new(scalars, args) } {
                Some(call) => session::call(call),
                None => Err(BAD_PARAMETER),
            }
        }
    };
    result.err().unwrap_or(0)
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    let line = info.location().map_or(0, |location| location.line());
    log::line(c"panic", c"line", line.cast_signed());
    // Loading from an odd address raises an exception, which ends the process; the host then sees a
    // lost session.
    loop {
        // SAFETY: nothing is loaded, because the address is odd.
        unsafe { asm!("{{ {0} = memw({0}) }}", inout(reg) 0xbadc_0fef_usize => _) };
    }
}
