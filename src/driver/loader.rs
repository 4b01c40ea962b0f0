//! Opens a vendor's library and finds its functions; errors in the loader's own words.
#![expect(unsafe_code, reason = "a library's initializers run when it is opened")]

use std::ffi::c_void;
use std::path::Path;

use libloading::Library;

use crate::error::{Error, Result};

fn failed(library: &Path, error: &libloading::Error) -> Error {
    Error::Library {
        library: library.into(),
        // The loader's own words are the source of libloading's error.
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

/// Returns the address of a function, to be given its type by the caller's table.
///
/// # Errors
/// `Library`.
pub(crate) fn address(
    library: &Library,
    name: &Path,
    symbol: &'static str,
) -> Result<*const c_void> {
    // SAFETY: only the address is taken; nothing is called through this type.
    let found = unsafe { library.get::<unsafe extern "C" fn()>(symbol) };
    found
        .map(|found| *found as *const c_void)
        .map_err(|error| failed(name, &error))
}
