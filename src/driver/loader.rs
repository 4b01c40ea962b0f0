//! Opens a vendor's library and finds its functions. Errors have the loader's message.
#![expect(unsafe_code, reason = "a library's initializers run when it is opened")]

use std::ffi::c_void;
use std::path::Path;

use libloading::Library;

use crate::error::{Error, Result};

fn failed(library: &Path, error: &libloading::Error) -> Error {
    Error::Library {
        library: library.into(),
        // libloading's error wraps the loader's message, which is its source.
        reason: std::error::Error::source(error)
            .map_or_else(|| error.to_string(), ToString::to_string),
    }
}

/// Opens a library: a path, or a name that the system's loader finds.
///
/// # Errors
/// `Library`.
pub(crate) fn open(name: &Path) -> Result<Library> {
    // SAFETY: the initializers of the vendors' libraries have no requirements.
    unsafe { Library::new(name) }.map_err(|error| failed(name, &error))
}

/// Returns the address of a function. The caller's table determines its type.
///
/// # Errors
/// `Library`.
pub(crate) fn address(
    library: &Library,
    name: &Path,
    symbol: &'static str,
) -> Result<*const c_void> {
    // SAFETY: only the symbol's address is used; nothing is called through this type.
    let found = unsafe { library.get::<unsafe extern "C" fn()>(symbol) };
    found
        .map(|found| *found as *const c_void)
        .map_err(|error| failed(name, &error))
}
