//! Locks on single bytes of a file.
//!
//! A lock belongs to an open file, not to a process (`F_OFD_SETLK`, fcntl(2)). It ends when the
//! last descriptor of that open file is closed, so a process that dies gives it back. The file need
//! not have such bytes: the kernel compares the numbers alone.
#![expect(unsafe_code, reason = "locks on bytes are system calls")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use libc::{c_int, c_short, off_t};

/// Locks a byte for this open file alone. Returns `false` if another open file has a lock on it.
///
/// # Errors
/// The system's error, such as `EBADF` for a file that is not open for writing.
pub fn lock(file: &File, byte: u16) -> io::Result<bool> {
    set(file, byte, libc::F_WRLCK)
}

/// As [`lock`], but lets other open files share the byte.
///
/// # Errors
/// As for [`lock`].
pub fn share(file: &File, byte: u16) -> io::Result<bool> {
    set(file, byte, libc::F_RDLCK)
}

/// Gives back this open file's lock on a byte, if it has one.
///
/// # Errors
/// The system's error.
pub fn unlock(file: &File, byte: u16) -> io::Result<()> {
    set(file, byte, libc::F_UNLCK).map(drop)
}

/// Returns `true` if another open file has a lock on a byte.
///
/// # Errors
/// The system's error.
pub fn is_locked(file: &File, byte: u16) -> io::Result<bool> {
    let mut range = range(byte, libc::F_WRLCK);
    call(file, libc::F_OFD_GETLK, &mut range)?;
    Ok(c_int::from(range.l_type) != libc::F_UNLCK)
}

fn set(file: &File, byte: u16, kind: c_int) -> io::Result<bool> {
    match call(file, libc::F_OFD_SETLK, &mut range(byte, kind)) {
        Ok(()) => Ok(true),
        // SOURCE: fcntl(2): a lock of another open file is EAGAIN or EACCES.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "the C library's numbers of kinds fit into the field for them"
)]
fn range(byte: u16, kind: c_int) -> libc::flock {
    libc::flock {
        l_type: kind as c_short,
        l_whence: libc::SEEK_SET as c_short,
        l_start: off_t::from(byte),
        l_len: 1,
        // SOURCE: fcntl(2): 0 for locks of open files.
        l_pid: 0,
    }
}

fn call(file: &File, command: c_int, range: &mut libc::flock) -> io::Result<()> {
    // SAFETY: the descriptor is open, and the command takes a pointer to this struct, which is
    // alive during the call.
    let code = unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut *range) };
    if code == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
