//! The functions of librknnrt 2.3, implemented with those of 1.5.2, which `RKNN_LOOP_LIBRARY`
//! names.
//!
//! | function of 2.3 | here |
//! |---|---|
//! | `rknn_matmul_create` | the info's fields have other names and places: type by its operand, layouts as whole numbers |
//! | `rknn_matmul_set_io_mem`, `rknn_matmul_set_core_mask`, `rknn_matmul_run`, `rknn_matmul_destroy`, `rknn_create_mem`, `rknn_create_mem_from_fd`, `rknn_destroy_mem` | passed on |
//! | `rknn_query` | passed on; the library's version is given as `VERSION` with its own after it |
//! | `rknn_mem_sync` | nothing to do: memory is coherent here |
//! | `rknn_matmul_create_dynamic_shape`, `rknn_matmul_set_dynamic_shape`, `rknn_matmul_set_quant_params`, `rknn_B_normal_layout_to_native_layout` | `RKNN_ERR_PARAM_INVALID`: 1.5.2 has nothing like them |
#![expect(unsafe_code, reason = "exports and calls C functions")]
#![cfg_attr(
    test,
    expect(
        non_snake_case,
        reason = "names of C functions, which tests do not export"
    )
)]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::OnceLock;

use rknpu_ops::ffi::{
    CoreMask, IoAttr, Layout, MatmulCtx, MatmulInfo, MatmulShape, MatmulType, MemSync,
    QUERY_SDK_VERSION, QuantParams, SdkVersion, TensorAttr, TensorMem, TensorType, code,
};

/// The version that the bridge claims: the oldest that the backend accepts.
const VERSION: &str = "2.3.0 (bridge over librknnrt ";

/// `rknn_matmul_info` of 1.5.2.
// SOURCE: rknn_matmul_api.h of rockchip-linux/rknpu2, runtime 1.5.0.
#[repr(C)]
struct OldInfo {
    m: i32,
    k: i32,
    n: i32,
    operand: TensorType,
    native_b: i32,
    native_ac: i32,
}

/// Finds a function of the vendor's library.
fn symbol(name: &CStr) -> Option<*mut c_void> {
    static LIBRARY: OnceLock<usize> = OnceLock::new();
    let handle = *LIBRARY.get_or_init(|| {
        let path = std::env::var("RKNN_LOOP_LIBRARY").unwrap_or_default();
        let name = CString::new(path.clone()).unwrap_or_default();
        // SAFETY: the name ends in NUL; the vendor's library runs its start-up code.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        if handle.is_null() {
            eprintln!("rknn-loop: RKNN_LOOP_LIBRARY=\"{path}\" cannot be loaded");
        }
        handle.expose_provenance()
    });
    if handle == 0 {
        return None;
    }
    // SAFETY: the handle is that of a library that is never closed, and the name ends in NUL.
    let address =
        unsafe { libc::dlsym(std::ptr::with_exposed_provenance_mut(handle), name.as_ptr()) };
    (!address.is_null()).then_some(address)
}

/// Exports functions that 1.5.2 has with the same arguments.
macro_rules! pass_on {
    ($($name:literal $function:ident($($argument:ident: $type:ty),*) -> $result:ty, or $failure:expr;)*) => {
        $(
            #[doc = concat!("`", stringify!($function), "`, passed on.")]
            ///
            /// # Safety
            /// As the C function.
            #[cfg_attr(not(test), unsafe(no_mangle))]
            pub unsafe extern "C" fn $function($($argument: $type),*) -> $result {
                type Function = unsafe extern "C" fn($($type),*) -> $result;
                let Some(address) = symbol($name) else { return $failure };
                // SAFETY: the function of that name has this type (SOURCE: rknn_matmul_api.h and
                // rknn_api.h, 1.5.0).
                let function = unsafe { std::mem::transmute::<*mut c_void, Function>(address) };
                // SAFETY: guaranteed by the caller.
                unsafe { function($($argument),*) }
            }
        )*
    };
}

pass_on! {
    c"rknn_matmul_set_io_mem" rknn_matmul_set_io_mem(
        context: MatmulCtx, memory: *mut TensorMem, attribute: *mut TensorAttr) -> c_int, or code::DEVICE_UNAVAILABLE;
    c"rknn_matmul_set_core_mask" rknn_matmul_set_core_mask(
        context: MatmulCtx, mask: CoreMask) -> c_int, or code::DEVICE_UNAVAILABLE;
    c"rknn_matmul_run" rknn_matmul_run(context: MatmulCtx) -> c_int, or code::DEVICE_UNAVAILABLE;
    c"rknn_matmul_destroy" rknn_matmul_destroy(context: MatmulCtx) -> c_int, or code::DEVICE_UNAVAILABLE;
    c"rknn_create_mem" rknn_create_mem(context: MatmulCtx, bytes: u32) -> *mut TensorMem, or std::ptr::null_mut();
    c"rknn_create_mem_from_fd" rknn_create_mem_from_fd(
        context: MatmulCtx, descriptor: i32, start: *mut c_void, bytes: u32, offset: i32)
        -> *mut TensorMem, or std::ptr::null_mut();
    c"rknn_destroy_mem" rknn_destroy_mem(
        context: MatmulCtx, memory: *mut TensorMem) -> c_int, or code::DEVICE_UNAVAILABLE;
}

/// Calls `rknn_matmul_create` with the info of 1.5.2.
///
/// # Safety
/// As the C function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn rknn_matmul_create(
    context: *mut MatmulCtx,
    info: *mut MatmulInfo,
    attributes: *mut IoAttr,
) -> c_int {
    type Create = unsafe extern "C" fn(*mut MatmulCtx, *mut OldInfo, *mut IoAttr) -> c_int;
    let Some(address) = symbol(c"rknn_matmul_create") else {
        return code::DEVICE_UNAVAILABLE;
    };
    // SAFETY: the function of that name has this type (SOURCE: as for `OldInfo`).
    let create = unsafe { std::mem::transmute::<*mut c_void, Create>(address) };
    // SAFETY: the caller passes this struct.
    let info = unsafe { *info };
    let Some(mut old) = old_info(&info) else {
        return code::PARAM_INVALID;
    };
    // SAFETY: the caller's pointers are valid, and the struct is the one of this version.
    unsafe { create(context, &raw mut old, attributes) }
}

/// Converts to the info of 1.5.2, if it can express the request.
fn old_info(info: &MatmulInfo) -> Option<OldInfo> {
    let operand = match info.matmul_type {
        MatmulType::F16_F16_F32 => TensorType::F16,
        MatmulType::I8_I8_I32 => TensorType::I8,
        _ => return None,
    };
    let native = |layout| match layout {
        Layout::NORM => Some(0),
        Layout::NATIVE => Some(1),
        _ => None,
    };
    Some(OldInfo {
        m: info.m,
        k: info.k,
        n: info.n,
        operand,
        native_b: native(info.b_layout)?,
        native_ac: native(info.ac_layout)?,
    })
}

/// Implements `rknn_query`; the version shows that the bridge answers.
///
/// # Safety
/// As the C function.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn rknn_query(
    context: MatmulCtx,
    command: c_int,
    info: *mut c_void,
    bytes: u32,
) -> c_int {
    type Query = unsafe extern "C" fn(MatmulCtx, c_int, *mut c_void, u32) -> c_int;
    let Some(address) = symbol(c"rknn_query") else {
        return code::DEVICE_UNAVAILABLE;
    };
    // SAFETY: the function of that name has this type (SOURCE: rknn_api.h, 1.5.0).
    let query = unsafe { std::mem::transmute::<*mut c_void, Query>(address) };
    // SAFETY: guaranteed by the caller.
    let result = unsafe { query(context, command, info, bytes) };
    if result == code::SUCC
        && command == QUERY_SDK_VERSION
        && bytes as usize >= size_of::<SdkVersion>()
    {
        // SAFETY: the caller passes memory for this struct.
        let version = unsafe { &mut *info.cast::<SdkVersion>() };
        rename(&mut version.api_version);
    }
    result
}

/// Writes [`VERSION`] before the library's own version, which is in brackets.
fn rename(text: &mut [c_char; 256]) {
    let own = text.map(|byte| byte.to_ne_bytes()[0]);
    let own = own.split(|byte| *byte == 0).next().unwrap_or_default();
    let named = [VERSION.as_bytes(), own, b")"].concat();
    *text = [0; 256];
    for (place, byte) in text.iter_mut().take(255).zip(named) {
        *place = c_char::from_ne_bytes([byte]);
    }
}

/// Exports functions that 1.5.2 does not have.
macro_rules! missing {
    ($($function:ident($($type:ty),*) = $result:expr;)*) => {
        $(
            #[doc = concat!("`", stringify!($function), "`, which 1.5.2 does not have.")]
            #[cfg_attr(not(test), unsafe(no_mangle))]
            pub extern "C" fn $function($(_: $type),*) -> c_int {
                $result
            }
        )*
    };
}

missing! {
    rknn_mem_sync(MatmulCtx, *mut TensorMem, MemSync) = code::SUCC;
    rknn_matmul_create_dynamic_shape(*mut MatmulCtx, *mut MatmulInfo, c_int, *mut MatmulShape, *mut IoAttr)
        = code::PARAM_INVALID;
    rknn_matmul_set_dynamic_shape(MatmulCtx, *mut MatmulShape) = code::PARAM_INVALID;
    rknn_matmul_set_quant_params(MatmulCtx, *mut QuantParams) = code::PARAM_INVALID;
    rknn_B_normal_layout_to_native_layout(*mut c_void, *mut c_void, c_int, c_int, *mut MatmulInfo)
        = code::PARAM_INVALID;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_says_that_the_bridge_answers() {
        let mut text = [0; 256];
        for (place, byte) in text.iter_mut().zip(*b"1.5.2 (c6b7b351a)") {
            *place = c_char::from_ne_bytes([byte]);
        }
        rename(&mut text);
        let bytes = text.map(|byte| byte.to_ne_bytes()[0]);
        let text = CStr::from_bytes_until_nul(&bytes)
            .unwrap()
            .to_str()
            .unwrap();
        assert_eq!(text, "2.3.0 (bridge over librknnrt 1.5.2 (c6b7b351a))");
    }

    #[test]
    fn types_and_layouts_that_1_5_2_lacks_are_refused() {
        let mut info = MatmulInfo::native(MatmulType::I8_I8_I32, 1, 64, 32);
        let old = old_info(&info).unwrap();
        assert_eq!(
            (old.operand, old.native_b, old.native_ac),
            (TensorType::I8, 1, 1)
        );
        info.b_layout = Layout::TP_NORM;
        assert!(old_info(&info).is_none());
        let info = MatmulInfo::native(MatmulType::I4_I4_I16, 1, 64, 64);
        assert!(old_info(&info).is_none());
    }
}
