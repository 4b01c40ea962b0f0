//! The functions of `glue/host.h`, and the entries of the two copies of `ggml-glue/`.
#![expect(unsafe_code, reason = "the glue is C")]

use std::ffi::{CStr, c_char, c_void};
use std::sync::OnceLock;

use crate::host::Host;
use ggml_rust_npu::ggml_version::{Api, ours};

unsafe extern "C" {
    safe fn plugin_import_name(index: usize) -> *const c_char;
    safe fn plugin_import_is_optional(index: usize) -> bool;
    fn plugin_import_set(index: usize, address: *mut c_void);
    fn glue_differs_api2() -> *const c_char;
    fn glue_differs_api3() -> *const c_char;
    fn ggml_backend_rust_npu_reg_api2() -> *mut c_void;
    fn ggml_backend_rust_npu_reg_api3() -> *mut c_void;
}

/// Returns the name of the function that the glue calls at `index`.
fn import_name(index: usize) -> Option<&'static CStr> {
    let name = plugin_import_name(index);
    // SAFETY: a constant that ends in NUL, unless it is NULL.
    (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) })
}

/// Gives the glue the functions of a program's ggml, once in a process.
pub fn bind(host: &Host, version: &str) -> Result<(), String> {
    static BOUND: OnceLock<Vec<usize>> = OnceLock::new();
    let mut addresses = Vec::new();
    for index in 0.. {
        let Some(name) = import_name(index) else {
            break;
        };
        let address = host.address(name).unwrap_or(std::ptr::null_mut());
        if address.is_null() && !plugin_import_is_optional(index) {
            return Err(format!(
                "this program's ggml {version} does not show the function {} to {}: install a build \
                 of the program that loads its backends from files, or one with shared libraries",
                name.to_string_lossy(),
                ours()
            ));
        }
        addresses.push(address.expose_provenance());
    }
    let bound = BOUND.get_or_init(|| {
        for (index, address) in addresses.iter().enumerate() {
            let address = std::ptr::with_exposed_provenance_mut(*address);
            // SAFETY: the program's function of this name, whose signature is that of the headers
            // in all versions that get here. The glue is not called before this returns.
            unsafe { plugin_import_set(index, address) };
        }
        addresses.clone()
    });
    if *bound != addresses {
        return Err(format!(
            "this process has a second ggml, of version {version}; {} already works for the first",
            ours()
        ));
    }
    Ok(())
}

/// Returns the name of the first struct or number of the program's ggml that is not as the glue was
/// compiled for. `bind` comes first.
pub fn differs(api: Api) -> Option<String> {
    let name = match api {
        // SAFETY: all functions are set, and ggml's version is one of those with these signatures.
        Api::Two => unsafe { glue_differs_api2() },
        // SAFETY: as above.
        Api::Three => unsafe { glue_differs_api3() },
    };
    if name.is_null() {
        return None;
    }
    // SAFETY: a constant that ends in NUL.
    let name = unsafe { CStr::from_ptr(name) };
    Some(name.to_string_lossy().into_owned())
}

/// Returns ggml's registry entry of this backend; opens the devices the first time.
pub fn registry_entry(api: Api) -> *mut c_void {
    match api {
        // SAFETY: all functions are set, and the structs agree.
        Api::Two => unsafe { ggml_backend_rust_npu_reg_api2() },
        // SAFETY: as above.
        Api::Three => unsafe { ggml_backend_rust_npu_reg_api3() },
    }
}
