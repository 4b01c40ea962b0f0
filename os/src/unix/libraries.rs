//! Libraries that the process has loaded.
#![expect(unsafe_code, reason = "the dynamic linker's interface is C")]

use std::ffi::{CStr, OsStr, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use libloading::Library;
use libloading::os::unix::{Library as Handle, RTLD_LAZY};

/// Returns the file that has the code at an address, as the dynamic linker calls it.
#[must_use]
#[expect(
    clippy::not_unsafe_ptr_arg_deref,
    reason = "dladdr compares the address and reads nothing at it"
)]
pub fn file_of(address: *const c_void) -> Option<PathBuf> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the function accepts any address and writes only to `info`.
    if unsafe { libc::dladdr(address, info.as_mut_ptr()) } == 0 {
        return None;
    }
    // SAFETY: filled, and valid when zero.
    let name = unsafe { info.assume_init() }.dli_fname;
    if name.is_null() {
        return None;
    }
    // SAFETY: a C string of the dynamic linker's, which is alive while the file is loaded; the
    // caller has the address of code in it.
    let name = unsafe { CStr::from_ptr(name) };
    Some(Path::new(OsStr::from_bytes(name.to_bytes())).to_path_buf())
}

/// Opens a library that is already loaded.
#[must_use]
pub fn open_again(file: &Path) -> Option<Library> {
    let flags = libc::RTLD_NOLOAD | RTLD_LAZY;
    // SAFETY: the library is loaded, so no code of it runs now.
    let handle = unsafe { Handle::open(Some(file), flags) };
    handle.ok().map(Library::from)
}

/// Returns the global scope as a library: the symbols of the program and of all libraries that were
/// loaded globally.
#[must_use]
pub fn of_program() -> Option<Library> {
    Some(Handle::this().into())
}
