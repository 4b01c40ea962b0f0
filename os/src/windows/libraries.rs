//! Libraries that the process has loaded.
#![expect(unsafe_code, reason = "the loader's interface is C")]

use std::ffi::{OsString, c_void};
use std::os::windows::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use libloading::Library;
use libloading::os::windows::Library as Handle;
use windows_sys::Win32::System::LibraryLoader::{
    GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS, GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT,
    GetModuleFileNameW, GetModuleHandleExW,
};

/// The longest path that is asked for, in units of 16 bits.
// SOURCE: Windows has paths of up to 32,767 characters.
const MOST: u16 = 32_767;

/// Returns the file that has the code at an address.
#[must_use]
pub fn file_of(address: *const c_void) -> Option<PathBuf> {
    let mut module = std::ptr::null_mut();
    let flags =
        GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT;
    // SAFETY: with the first flag the name is any address; the place for the module is this
    // function's own.
    if unsafe { GetModuleHandleExW(flags, address.cast(), &raw mut module) } == 0 {
        return None;
    }
    let mut name = vec![0_u16; MOST.into()];
    // SAFETY: the module is loaded, since the caller has the address of code in it; the buffer has
    // this many units.
    let units = unsafe { GetModuleFileNameW(module, name.as_mut_ptr(), MOST.into()) };
    let name = name.get(..usize::try_from(units).ok()?)?;
    (!name.is_empty()).then(|| OsString::from_wide(name).into())
}

/// Opens a library that is already loaded.
#[must_use]
pub fn open_again(file: &Path) -> Option<Library> {
    Handle::open_already_loaded(file).ok().map(Library::from)
}

/// Returns the program itself.
#[must_use]
pub fn of_program() -> Option<Library> {
    Handle::this().ok().map(Library::from)
}
