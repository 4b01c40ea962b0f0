//! The C functions: find the machine, count the call, inject faults, check pointers, catch panics.
#![expect(
    unsafe_code,
    reason = "these are the C functions; their pointers come from the caller"
)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::{MACHINES, MachineState, control, vendor_error};
use crate::ffi::{Api, Handle, RemoteArg, Scalars, code};
use crate::rt::invoke::Call;

/// Returns the machine for a call of `symbol`, and counts the call, which may fail on request.
fn entered(slot: usize, symbol: &str) -> Result<Arc<MachineState>, c_int> {
    let Some(state) = MACHINES.get(slot) else {
        vendor_error!("{symbol}: no device");
        return Err(code::ECONNREFUSED);
    };
    state.injector.call(symbol)?;
    Ok(state)
}

/// Runs the body of a C function that returns a code.
fn guarded(
    slot: usize,
    symbol: &str,
    body: impl FnOnce(&MachineState) -> Result<(), c_int>,
) -> c_int {
    let run = || {
        let state = entered(slot, symbol)?;
        body(&state).inspect_err(|_| state.injector.refuse(symbol))
    };
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => code::SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => code::EFAILED,
    }
}

/// Allocates; null on failure, or `MAP_FAILED` for a fault with the code -1.
///
/// SOURCE: qualcomm/fastrpc src/rpcmem_linux.c compares the result of `mmap` with null only.
fn allocate(slot: usize, symbol: &str, bytes: usize) -> *mut c_void {
    let run = || {
        let state = entered(slot, symbol)?;
        Ok::<_, c_int>(state.memory.alloc(bytes, &state.options))
    };
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(address)) => address,
        Ok(Err(-1)) => os::memory::MAP_FAILED,
        _ => std::ptr::null_mut(),
    }
}

/// Returns the table of functions. Each function has the C API's safety contract: pointers are null
/// or point at valid objects of their types, and nothing else uses the buffers of a call while it
/// runs.
unsafe extern "C" fn rpcmem_alloc<const SLOT: usize>(
    _heap: c_int,
    _flags: u32,
    bytes: c_int,
) -> *mut c_void {
    match usize::try_from(bytes) {
        Ok(bytes) => allocate(SLOT, "rpcmem_alloc", bytes),
        Err(_) => std::ptr::null_mut(),
    }
}

unsafe extern "C" fn rpcmem_alloc2<const SLOT: usize>(
    _heap: c_int,
    _flags: u32,
    bytes: usize,
) -> *mut c_void {
    allocate(SLOT, "rpcmem_alloc2", bytes)
}

unsafe extern "C" fn rpcmem_init<const SLOT: usize>() {
    guarded(SLOT, "rpcmem_init", |state| {
        state.memory.init();
        Ok(())
    });
}

unsafe extern "C" fn rpcmem_free<const SLOT: usize>(address: *mut c_void) {
    guarded(SLOT, "rpcmem_free", |state| {
        state.memory.free(address);
        Ok(())
    });
}

unsafe extern "C" fn rpcmem_to_fd<const SLOT: usize>(address: *mut c_void) -> c_int {
    let run = || {
        let state = entered(SLOT, "rpcmem_to_fd")?;
        Ok::<_, c_int>(state.memory.to_fd(address))
    };
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(fd)) => fd,
        _ => -1,
    }
}

unsafe extern "C" fn remote_handle64_open<const SLOT: usize>(
    uri: *const c_char,
    handle: *mut Handle,
) -> c_int {
    guarded(SLOT, "remote_handle64_open", |state| {
        if uri.is_null() || handle.is_null() {
            return Err(code::EBADPARM);
        }
        // SAFETY: a C string by the C contract; checked for null.
        let uri = unsafe { CStr::from_ptr(uri) };
        let uri = uri.to_str().map_err(|_| code::EBADPARM)?;
        let opened = state.sessions.open(state, uri)?;
        // SAFETY: the C contract of `handle`; checked for null.
        unsafe { handle.write(opened) };
        Ok(())
    })
}

unsafe extern "C" fn remote_handle64_invoke<const SLOT: usize>(
    handle: Handle,
    scalars: u32,
    args: *mut RemoteArg,
) -> c_int {
    // Only the state is held during the call, not the machine's slot: the machine may be removed
    // while a call still runs.
    guarded(SLOT, "remote_handle64_invoke", |state| {
        // SAFETY: by the C contract `args` has the number of entries in `scalars`, and nothing else
        // uses their buffers during the call.
        let call = unsafe { Call::new(Scalars(scalars), args) };
        state.sessions.invoke(state, handle, call)
    })
}

unsafe extern "C" fn remote_handle64_close<const SLOT: usize>(handle: Handle) -> c_int {
    guarded(SLOT, "remote_handle64_close", |state| {
        state.sessions.close(handle)
    })
}

unsafe extern "C" fn remote_session_control<const SLOT: usize>(
    request: u32,
    data: *mut c_void,
    bytes: u32,
) -> c_int {
    guarded(SLOT, "remote_session_control", |state| {
        // SAFETY: the C contract of `data`.
        unsafe { control::session(state, request, data, bytes) }
    })
}

unsafe extern "C" fn remote_handle_control<const SLOT: usize>(
    request: u32,
    data: *mut c_void,
    bytes: u32,
) -> c_int {
    guarded(SLOT, "remote_handle_control", |state| {
        // SAFETY: the C contract of `data`.
        unsafe { control::handle(state, request, data, bytes) }
    })
}

unsafe extern "C" fn remote_handle64_control<const SLOT: usize>(
    handle: Handle,
    request: u32,
    data: *mut c_void,
    bytes: u32,
) -> c_int {
    guarded(SLOT, "remote_handle64_control", |state| {
        if !state.sessions.is_open(handle) {
            return Err(code::EINVHANDLE);
        }
        // SAFETY: the C contract of `data`.
        unsafe { control::handle(state, request, data, bytes) }
    })
}

unsafe extern "C" fn fastrpc_mmap<const SLOT: usize>(
    domain: c_int,
    fd: c_int,
    _address: *mut c_void,
    offset: c_int,
    bytes: usize,
    flags: c_int,
) -> c_int {
    guarded(SLOT, "fastrpc_mmap", |state| {
        // SOURCE: qualcomm/fastrpc src/fastrpc_mem.c (`fastrpc_mmap`): offsets other than 0 are
        // refused.
        if fd < 0 || offset != 0 {
            return Err(code::EBADPARM);
        }
        state.sessions.announce(state, domain, fd, bytes, flags)
    })
}

unsafe extern "C" fn fastrpc_munmap<const SLOT: usize>(
    domain: c_int,
    fd: c_int,
    _address: *mut c_void,
    bytes: usize,
) -> c_int {
    guarded(SLOT, "fastrpc_munmap", |state| {
        state.sessions.retract(state, domain, fd, bytes)
    })
}

/// Returns the table of functions of the machine in a slot.
fn table<const SLOT: usize>() -> Api {
    Api {
        rpcmem_alloc: rpcmem_alloc::<SLOT>,
        rpcmem_free: rpcmem_free::<SLOT>,
        rpcmem_to_fd: rpcmem_to_fd::<SLOT>,
        remote_handle64_open: remote_handle64_open::<SLOT>,
        remote_handle64_invoke: remote_handle64_invoke::<SLOT>,
        remote_handle64_close: remote_handle64_close::<SLOT>,
        remote_session_control: remote_session_control::<SLOT>,
        remote_handle_control: remote_handle_control::<SLOT>,
        remote_handle64_control: remote_handle64_control::<SLOT>,
        fastrpc_mmap: fastrpc_mmap::<SLOT>,
        fastrpc_munmap: fastrpc_munmap::<SLOT>,
        rpcmem_alloc2: Some(rpcmem_alloc2::<SLOT>),
        rpcmem_init: Some(rpcmem_init::<SLOT>),
    }
}

/// Returns the [`table`] of a slot that is known at run time.
pub(super) fn of_slot(slot: usize) -> Api {
    sim_common::of_slot!(table, Api, slot)
}
