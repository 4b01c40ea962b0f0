//! Calls into a kernel's driver.
#![expect(unsafe_code, reason = "system calls with pointers")]

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd as _;
use std::time::Duration;

use super::memory::Descriptor;

/// The flags with which a driver makes a descriptor that can be written to, and is not inherited.
pub const READ_WRITE: u32 = (libc::O_CLOEXEC | libc::O_RDWR).cast_unsigned();

/// Calls a function of the driver to which the node `file` belongs, again if a signal interrupted
/// it.
///
/// # Safety
/// - `argument` is the function's struct, and addresses in it are valid.
///
/// # Errors
/// The driver's.
pub unsafe fn call(file: &File, number: u32, argument: *mut u8) -> io::Result<()> {
    loop {
        // The C libraries disagree about the type of the number.
        let request = number as _;
        // SAFETY: passed on to the caller; the descriptor is open.
        if unsafe { libc::ioctl(file.as_raw_fd(), request, argument) } >= 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// As [`call`], for memory with a descriptor.
///
/// # Safety
/// As for [`call`].
///
/// # Errors
/// The driver's.
pub unsafe fn call_buffer(buffer: &Descriptor, number: u32, argument: *mut u8) -> io::Result<()> {
    // SAFETY: passed on to the caller.
    unsafe { call(&buffer.0, number, argument) }
}

/// Returns `true` for the error of a file whose driver does not have the function.
#[must_use]
pub fn is_unknown_call(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENOTTY)
}

/// Returns the time of the clock that drivers' deadlines are of.
///
/// # Errors
/// The system's error.
pub fn monotonic() -> io::Result<Duration> {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the place is this function's own.
    if unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let seconds = Duration::from_secs(u64::try_from(time.tv_sec).unwrap_or(0));
    Ok(seconds + Duration::from_nanos(u64::try_from(time.tv_nsec).unwrap_or(0)))
}
