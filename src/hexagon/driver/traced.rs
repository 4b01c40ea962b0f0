//! The functions of libcdsprpc, recorded.
#![expect(unsafe_code, reason = "calls into the vendor's library")]

use std::ffi::{CStr, c_char, c_int, c_void};

use hexagon_ops::ffi::{Api, Handle, RemoteArg, Scalars};

use crate::driver::trace;

trace::traced! {
    Api {
        rpcmem_alloc = "rpcmem_alloc"(heap: c_int, flags: u32, bytes: c_int) -> *mut c_void, format!("{bytes} bytes");
        rpcmem_free = "rpcmem_free"(address: *mut c_void) -> (), String::new();
        remote_handle64_open = "remote_handle64_open"(uri: *const c_char, handle: *mut Handle) -> c_int, text(uri);
        remote_handle64_invoke = "remote_handle64_invoke"(handle: Handle, scalars: u32, args: *mut RemoteArg) -> c_int,
            format!("method {}", Scalars(scalars).method());
        remote_handle64_close = "remote_handle64_close"(handle: Handle) -> c_int, String::new();
        remote_session_control = "remote_session_control"(request: u32, data: *mut c_void, bytes: u32) -> c_int,
            format!("request {request}");
        remote_handle_control = "remote_handle_control"(request: u32, data: *mut c_void, bytes: u32) -> c_int,
            format!("request {request}");
        remote_handle64_control =
            "remote_handle64_control"(handle: Handle, request: u32, data: *mut c_void, bytes: u32) -> c_int,
            format!("request {request}");
        fastrpc_mmap = "fastrpc_mmap"(
            domain: c_int, fd: c_int, address: *mut c_void, offset: c_int, bytes: usize, flags: c_int
        ) -> c_int, format!("domain {domain}, {bytes} bytes, flags {flags}");
        fastrpc_munmap = "fastrpc_munmap"(domain: c_int, fd: c_int, address: *mut c_void, bytes: usize) -> c_int,
            format!("domain {domain}, {bytes} bytes");
    }
    optional {
        rpcmem_alloc2 = "rpcmem_alloc2"(heap: c_int, flags: u32, bytes: usize) -> *mut c_void, format!("{bytes} bytes");
        rpcmem_init = "rpcmem_init"() -> (), String::new();
    }
}

/// Returns a C string.
fn text(pointer: *const c_char) -> String {
    // SAFETY: the caller passes the same pointer to the library, which reads a string there.
    unsafe { CStr::from_ptr(pointer) }
        .to_string_lossy()
        .into_owned()
}
