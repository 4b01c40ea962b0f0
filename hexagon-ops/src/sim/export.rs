//! The C functions under the vendor's names, for a stand-in that is loaded as `libcdsprpc.so`.
//!
//! There is one machine for the process, started by the first call: the first Hexagon chip that
//! `GGML_RUST_NPU_SIM` lists, with the options of [`Options::from_env`] but relaxed coherence,
//! since a loaded library offers no cache operations of the host.
#![expect(unsafe_code, reason = "exported symbols are an unsafe attribute")]

use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

use super::{ARCHS, Coherence, Machine, Options, start};
use crate::ffi::{Api, Handle, RemoteArg, code};

/// Returns the process's machine, if the environment variables request one.
fn machine() -> Option<Api> {
    static MACHINE: OnceLock<Option<Machine>> = OnceLock::new();
    let machine = MACHINE.get_or_init(|| {
        let arch = |name: &str| {
            let arch = name.strip_prefix("hexagon-v")?.parse().ok()?;
            ARCHS.contains(&arch).then_some(arch)
        };
        sim_common::from_env("libcdsprpc", "Hexagon", arch, |arch| {
            start(Options {
                coherence: Coherence::Relaxed,
                ..Options::from_env(arch)?
            })
        })
    });
    machine.as_ref().map(Machine::api)
}

/// Exports functions; the last expression is their result without a machine.
macro_rules! export {
    ($($symbol:ident($($arg:ident: $ty:ty),*) -> $ret:ty, $without:expr;)*) => {
        $(
            #[doc = concat!("`", stringify!($symbol), "` of the process's machine.")]
            ///
            /// # Safety
            /// As the C function.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $symbol($($arg: $ty),*) -> $ret {
                match machine() {
                    // SAFETY: guaranteed by the caller.
                    Some(api) => unsafe { (api.$symbol)($($arg),*) },
                    None => $without,
                }
            }
        )*
    };
}

export! {
    rpcmem_alloc(heap: c_int, flags: u32, bytes: c_int) -> *mut c_void, std::ptr::null_mut();
    rpcmem_free(address: *mut c_void) -> (), ();
    rpcmem_to_fd(address: *mut c_void) -> c_int, -1;
    remote_handle64_open(uri: *const c_char, handle: *mut Handle) -> c_int, code::ECONNREFUSED;
    remote_handle64_invoke(handle: Handle, scalars: u32, args: *mut RemoteArg) -> c_int, code::ECONNREFUSED;
    remote_handle64_close(handle: Handle) -> c_int, code::ECONNREFUSED;
    remote_session_control(request: u32, data: *mut c_void, bytes: u32) -> c_int, code::ECONNREFUSED;
    remote_handle_control(request: u32, data: *mut c_void, bytes: u32) -> c_int, code::ECONNREFUSED;
    remote_handle64_control(handle: Handle, request: u32, data: *mut c_void, bytes: u32) -> c_int, code::ECONNREFUSED;
    fastrpc_mmap(
        domain: c_int, fd: c_int, address: *mut c_void, offset: c_int, bytes: usize, flags: c_int
    ) -> c_int, code::ECONNREFUSED;
    fastrpc_munmap(domain: c_int, fd: c_int, address: *mut c_void, bytes: usize) -> c_int, code::ECONNREFUSED;
}

/// Calls `rpcmem_alloc2` of the process's machine.
///
/// # Safety
/// As the C function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcmem_alloc2(heap: c_int, flags: u32, bytes: usize) -> *mut c_void {
    match machine().and_then(|api| api.rpcmem_alloc2) {
        // SAFETY: guaranteed by the caller.
        Some(alloc) => unsafe { alloc(heap, flags, bytes) },
        None => std::ptr::null_mut(),
    }
}

/// Calls `rpcmem_init` of the process's machine.
///
/// # Safety
/// As the C function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rpcmem_init() {
    if let Some(init) = machine().and_then(|api| api.rpcmem_init) {
        // SAFETY: guaranteed by the caller.
        unsafe { init() };
    }
}
