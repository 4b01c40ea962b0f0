//! Requests about sessions and about the DSP: a request number, and a struct of the right size.
#![expect(unsafe_code, reason = "requests point at C structs and strings")]

use std::ffi::{CStr, c_char, c_int, c_void};

use super::{MachineState, vendor_error};
use crate::ffi::{
    ControlLatency, DOMAIN_URI, DSPRPC_CONTROL_LATENCY, DSPRPC_CONTROL_UNSIGNED_MODULE,
    DSPRPC_GET_DSP_INFO, Domain, DspCapability, FASTRPC_GET_URI, FASTRPC_RESERVE_NEW_SESSION,
    FASTRPC_SESSION_CLOSE, FASTRPC_THREAD_PARAMS, GetUri, NUM_SESSIONS, ReserveNewSession,
    SESSION_URI, SessionClose, ThreadParams, UnsignedModule, attribute, code,
};

/// Reads the struct of a request.
///
/// # Safety
/// - `data` is null or points at `bytes` bytes.
unsafe fn read<T: Copy>(data: *mut c_void, bytes: u32) -> Result<T, c_int> {
    if data.is_null() || bytes as usize != size_of::<T>() {
        vendor_error!(
            "a request of {bytes} bytes at {data:p}, want {}",
            size_of::<T>()
        );
        return Err(code::EBADPARM);
    }
    // SAFETY: not null and long enough. The structs consist of integers and pointers, for which all
    // bits are valid.
    Ok(unsafe { data.cast::<T>().read_unaligned() })
}

/// Writes the struct of a request back.
///
/// # Safety
/// - [`read`] has accepted `data` for the same type.
unsafe fn write<T: Copy>(data: *mut c_void, value: T) {
    // SAFETY: not null and long enough, guaranteed by the caller.
    unsafe { data.cast::<T>().write_unaligned(value) };
}

/// Returns the compute DSP with a name; refuses all other names.
///
/// # Safety
/// - `name` is null or a C string.
unsafe fn domain(state: &MachineState, name: *const c_char, bytes: u32) -> Result<Domain, c_int> {
    if name.is_null() || bytes == 0 {
        return Err(code::EBADPARM);
    }
    // SAFETY: the caller guarantees a C string.
    let name = unsafe { CStr::from_ptr(name) };
    let mut known = state.options.domains().iter().copied();
    known
        .find(|domain| domain.name() == name)
        .ok_or(code::EBADPARM)
}

/// Refuses a name without a NUL among its bytes, because the library copies names up to their NUL
/// and ignores their length.
///
/// SOURCE: qualcomm/fastrpc src/fastrpc_apps_user.c (`FASTRPC_RESERVE_NEW_SESSION`: `strlcpy`).
///
/// # Safety
/// - `name` points at `bytes` bytes.
unsafe fn check_terminated(name: *const c_char, bytes: u32) -> Result<(), c_int> {
    // SAFETY: the caller guarantees this number of bytes.
    let name = unsafe { std::slice::from_raw_parts(name.cast::<u8>(), bytes as usize) };
    if name.contains(&0) {
        return Ok(());
    }
    vendor_error!("the session's name has no NUL among its {bytes} bytes");
    Err(code::EBADPARM)
}

/// Implements `remote_session_control`.
///
/// # Safety
/// - `data` is null or points at `bytes` bytes, and pointers in the request's struct are null or
///   point at the documented data.
pub(super) unsafe fn session(
    state: &MachineState,
    request: u32,
    data: *mut c_void,
    bytes: u32,
) -> Result<(), c_int> {
    match request {
        DSPRPC_CONTROL_UNSIGNED_MODULE => {
            // SAFETY: guaranteed by the caller.
            let UnsignedModule { domain, enable } = unsafe { read(data, bytes) }?;
            state.sessions.allow_unsigned(domain, enable != 0)
        }
        FASTRPC_THREAD_PARAMS => {
            // SAFETY: guaranteed by the caller.
            let params: ThreadParams = unsafe { read(data, bytes) }?;
            // SOURCE: qualcomm/fastrpc inc/remote.h: priorities are 1 to 255, -1 is the default.
            if params.prio != -1 && !(1..=255).contains(&params.prio) {
                return Err(code::EBADPARM);
            }
            state.sessions.set_stack(params.domain, params.stack_size)
        }
        FASTRPC_SESSION_CLOSE => {
            // SAFETY: guaranteed by the caller.
            let SessionClose { domain } = unsafe { read(data, bytes) }?;
            state.sessions.close_session(domain)
        }
        FASTRPC_RESERVE_NEW_SESSION => {
            // SAFETY: guaranteed by the caller.
            let mut new: ReserveNewSession = unsafe { read(data, bytes) }?;
            if new.session_name.is_null() || new.session_name_len == 0 {
                return Err(code::EBADPARM);
            }
            // SAFETY: guaranteed by the caller.
            unsafe { check_terminated(new.session_name, new.session_name_len) }?;
            // SAFETY: guaranteed by the caller.
            let domain = unsafe { domain(state, new.domain_name, new.domain_name_len) }?;
            (new.effective_domain_id, new.session_id) = state.sessions.reserve(domain)?;
            // SAFETY: `read` accepted this memory above.
            unsafe { write(data, new) };
            Ok(())
        }
        FASTRPC_GET_URI => {
            // SAFETY: guaranteed by the caller.
            let ask: GetUri = unsafe { read(data, bytes) }?;
            // SAFETY: guaranteed by the caller.
            let domain = unsafe { domain(state, ask.domain_name, ask.domain_name_len) }?;
            // SAFETY: guaranteed by the caller.
            unsafe { uri(&ask, domain) }
        }
        _ => {
            vendor_error!("remote_session_control: unknown request {request}");
            Err(code::EUNSUPPORTED)
        }
    }
}

/// Answers [`FASTRPC_GET_URI`].
///
/// # Safety
/// - `module_uri` is null or a C string, `uri` null or `uri_len` bytes.
unsafe fn uri(ask: &GetUri, domain: Domain) -> Result<(), c_int> {
    let missing = ask.module_uri.is_null() || ask.uri.is_null() || ask.module_uri_len == 0;
    if missing || ask.session_id >= NUM_SESSIONS {
        return Err(code::EBADPARM);
    }
    // SAFETY: the caller guarantees a C string.
    let module = unsafe { CStr::from_ptr(ask.module_uri) };
    let module = module.to_str().map_err(|_| code::EBADPARM)?;
    let domain = domain.name().to_string_lossy();
    let text = format!(
        "{module}{DOMAIN_URI}{domain}{SESSION_URI}{}\0",
        ask.session_id
    );
    if text.len() > ask.uri_len as usize {
        return Err(code::EBADSIZE);
    }
    // SAFETY: the caller guarantees `uri_len` bytes, and the text is not longer.
    unsafe { ask.uri.cast::<u8>().copy_from(text.as_ptr(), text.len()) };
    Ok(())
}

/// Implements `remote_handle_control` and `remote_handle64_control`.
///
/// # Safety
/// - `data` is null or points at `bytes` bytes.
pub(super) unsafe fn handle(
    state: &MachineState,
    request: u32,
    data: *mut c_void,
    bytes: u32,
) -> Result<(), c_int> {
    match request {
        DSPRPC_GET_DSP_INFO => {
            // SAFETY: guaranteed by the caller.
            let mut ask: DspCapability = unsafe { read(data, bytes) }?;
            ask.capability = capability(state, ask.domain, ask.attribute_id)?;
            // SAFETY: `read` accepted this memory above.
            unsafe { write(data, ask) };
            Ok(())
        }
        DSPRPC_CONTROL_LATENCY => {
            // SAFETY: guaranteed by the caller.
            unsafe { read::<ControlLatency>(data, bytes) }.map(|_| ())
        }
        _ => {
            vendor_error!("remote_handle_control: unknown request {request}");
            Err(code::EUNSUPPORTED)
        }
    }
}

/// Returns one attribute of a DSP. All are 0 for others than the compute DSPs.
fn capability(state: &MachineState, domain: u32, attribute: u32) -> Result<u32, c_int> {
    let options = &state.options;
    let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
    let value = match attribute {
        attribute::DOMAIN_SUPPORT => 1,
        attribute::UNSIGNED_PD_SUPPORT => u32::from(options.unsigned_modules),
        attribute::HVX_SUPPORT_64B => 0,
        attribute::HVX_SUPPORT_128B => number(options.hvx_threads),
        attribute::VTCM_PAGE => number(options.vtcm_bytes),
        attribute::VTCM_COUNT => 1,
        // The version is two decimal digits of four bits each.
        attribute::ARCH_VER => ((options.arch / 10) << 4) | (options.arch % 10),
        attribute::HMX_SUPPORT_DEPTH | attribute::HMX_SUPPORT_SPATIAL => {
            u32::from(options.matrix != super::MatrixUnit::Refused)
        }
        attribute::ASYNC_FASTRPC_SUPPORT | attribute::STATUS_NOTIFICATION_SUPPORT => 0,
        _ => {
            vendor_error!("remote_handle_control: unknown attribute {attribute}");
            return Err(code::EBADPARM);
        }
    };
    let mut known = state.options.domains().iter();
    let here = known.any(|known| known.id().cast_unsigned() == domain);
    Ok(if here { value } else { 0 })
}
