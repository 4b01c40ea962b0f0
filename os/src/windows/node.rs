//! Calls into a kernel's driver, which Windows does not have for these NPUs.
#![expect(unsafe_code, reason = "the functions have the Unix half's contracts")]

use std::fs::File;
use std::io;
use std::time::Duration;

use super::memory::Descriptor;
use crate::NotHere;

/// The flags with which a driver makes a descriptor that can be written to, and is not inherited.
pub const READ_WRITE: u32 = 0;

/// Calls a function of the driver to which a node belongs.
///
/// # Safety
/// - `argument` is the function's struct, and addresses in it are valid.
///
/// # Errors
/// [`NotHere`].
pub unsafe fn call(_file: &File, _number: u32, _argument: *mut u8) -> io::Result<()> {
    Err(NotHere("calls into an NPU's driver").into())
}

/// As [`call`], for memory with a descriptor.
///
/// # Safety
/// As for [`call`].
///
/// # Errors
/// [`NotHere`].
pub unsafe fn call_buffer(
    _buffer: &Descriptor,
    _number: u32,
    _argument: *mut u8,
) -> io::Result<()> {
    Err(NotHere("calls into an NPU's driver").into())
}

/// Returns `true` for the error of a file whose driver does not have the function.
#[must_use]
pub fn is_unknown_call(_error: &io::Error) -> bool {
    false
}

/// Returns the time of the clock that drivers' deadlines are of.
///
/// # Errors
/// [`NotHere`].
pub fn monotonic() -> io::Result<Duration> {
    Err(NotHere("the clock of an NPU's driver").into())
}
