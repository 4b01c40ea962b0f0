//! Finds the functions of the ggml that loads the plugin.
#![expect(unsafe_code, reason = "the dynamic linker's interface is C")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::ManuallyDrop;

use libloading::Library;
use os::libraries::{file_of, of_program, open_again};

/// ggml's numbers of levels.
// SOURCE: enum ggml_log_level, ggml.h of ggml 0.13 to 0.27.
#[derive(Clone, Copy)]
pub enum Level {
    #[cfg_attr(
        not(glue),
        expect(dead_code, reason = "only a plugin that can serve a program warns")
    )]
    Warn = 3,
    Error = 4,
}

/// A place to look for ggml's functions.
pub struct Host {
    // Never closed, because the program keeps it open for as long as it can call the plugin.
    library: ManuallyDrop<Library>,
}

impl Host {
    /// Returns the ggml that contains the code at `caller`: the calling library together with the
    /// libraries that it needs, or the global scope, which includes the program itself.
    ///
    /// Other places are not searched: a process may have several copies of ggml.
    pub fn of(caller: *const c_void) -> Option<Self> {
        let of_caller = file_of(caller).and_then(|file| open_again(&file));
        [of_caller, of_program()]
            .into_iter()
            .flatten()
            .map(|library| Self {
                library: ManuallyDrop::new(library),
            })
            .find(|host| host.address(c"ggml_version").is_some())
    }

    /// Returns the address of a function.
    pub fn address(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: nothing is called; the code below compiles only if the type has the size of a
        // pointer.
        let symbol = unsafe { self.library.get::<*mut c_void>(name.to_bytes_with_nul()) };
        let address = *symbol.ok()?;
        (!address.is_null()).then_some(address)
    }

    /// Returns ggml's version.
    pub fn version(&self) -> Option<String> {
        let address = self.address(c"ggml_version")?;
        // SAFETY: the signature of this function in all versions that have it.
        let version = unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> *const c_char>(address)
        };
        // SAFETY: the function reads a constant.
        let text = unsafe { version() };
        // SAFETY: the function returns a constant that ends in NUL.
        let text = unsafe { CStr::from_ptr(text) };
        Some(text.to_string_lossy().into_owned())
    }

    /// Returns `true` if a backend of this name is registered.
    #[cfg(glue)]
    pub fn has_backend(&self, name: &CStr) -> bool {
        type ByName = unsafe extern "C" fn(name: *const c_char) -> *mut c_void;
        let Some(address) = self.address(c"ggml_backend_reg_by_name") else {
            return false;
        };
        // SAFETY: the signature of this function in all versions that have it.
        let by_name = unsafe { std::mem::transmute::<*mut c_void, ByName>(address) };
        // SAFETY: the string ends in NUL.
        !unsafe { by_name(name.as_ptr()) }.is_null()
    }

    /// Writes a line to the log of the program's ggml.
    pub fn log(&self, level: Level, line: &str) {
        type Log = unsafe extern "C" fn(level: c_int, format: *const c_char, ...);
        let text = format!("ggml-rust-npu: {line}\n").replace('\0', " ");
        let (Some(address), Ok(text)) = (
            self.address(c"ggml_log_internal"),
            std::ffi::CString::new(text.as_str()),
        ) else {
            eprint!("{text}");
            return;
        };
        // SAFETY: the signature of this function in all versions that have it.
        let log = unsafe { std::mem::transmute::<*mut c_void, Log>(address) };
        // SAFETY: the format takes one string, which is alive during the call.
        unsafe { log(level as c_int, c"%s".as_ptr(), text.as_ptr()) };
    }
}
