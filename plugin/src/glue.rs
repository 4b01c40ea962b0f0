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
    fn glue_prove_params_api2();
    fn glue_prove_params_api3();
    fn ggml_backend_rust_npu_reg_api2() -> *mut c_void;
    fn ggml_backend_rust_npu_reg_api3() -> *mut c_void;
}

/// Returns the name of the function that the glue calls at `index`.
fn import_name(index: usize) -> Option<&'static CStr> {
    let name = plugin_import_name(index);
    // SAFETY: the pointer is NULL, or to a constant that ends in NUL.
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
            // SAFETY: the address is that of the program's function of this name. Its signature is
            // the one in the headers in all versions that are accepted. The glue is called only
            // after this loop.
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

/// Returns the name of the first struct or number of the program's ggml that differs from that for
/// which the glue was compiled. `bind` has to be called before.
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
    // SAFETY: the string is a constant that ends in NUL.
    let name = unsafe { CStr::from_ptr(name) };
    Some(name.to_string_lossy().into_owned())
}

/// Finds out from the program's ggml where operations keep their parameters. `differs` has to be
/// called before.
pub fn prove_params(api: Api) {
    match api {
        // SAFETY: all functions are set, and the structs agree.
        Api::Two => unsafe { glue_prove_params_api2() },
        // SAFETY: as above.
        Api::Three => unsafe { glue_prove_params_api3() },
    }
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

#[cfg(test)]
mod tests {
    use std::ffi::{CString, c_int};
    use std::sync::{Mutex, PoisonError};

    use super::*;

    unsafe extern "C" {
        fn ggml_log_internal(level: c_int, format: *const c_char, ...);
    }

    static LINES: Mutex<Vec<CString>> = Mutex::new(Vec::new());

    /// Replaces ggml's function, which has `...` instead of `text`. On the systems that the plugin
    /// supports, arguments of both kinds are passed in the same way.
    extern "C" fn program_log(_: c_int, format: *const c_char, text: *const c_char) {
        // SAFETY: the plugin passes strings that end in NUL.
        let [format, text] = [format, text].map(|text| unsafe { CStr::from_ptr(text) });
        assert_eq!(format, c"%s");
        let mut lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
        lines.push(text.to_owned());
    }

    /// Regression: lines of 1024 bytes and more lost their end, and with it the newline.
    #[test]
    fn a_line_of_any_length_gets_to_the_program_whole() {
        let is_log = |index: &usize| import_name(*index) == Some(c"ggml_log_internal");
        let index = (0..).find(is_log).unwrap();
        // SAFETY: the function is called with two strings, as `program_log` takes them, and no
        // other test calls the glue.
        unsafe { plugin_import_set(index, program_log as *mut c_void) };
        let lengths = [1, 2, 1022, 1023, 1024, 1025, 100_000];
        let sent = lengths.map(|length| {
            let text = format!("{}\n", "x".repeat(length - 1));
            CString::new(text).unwrap()
        });
        for text in &sent {
            // SAFETY: the format takes one string.
            unsafe { ggml_log_internal(2, c"%s".as_ptr(), text.as_ptr()) };
        }
        let lines = LINES.lock().unwrap();
        let have: Vec<usize> = lines.iter().map(|line| line.count_bytes()).collect();
        assert_eq!(have, lengths);
        assert_eq!(lines[..], sent);
    }
}
