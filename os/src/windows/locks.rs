//! Locks on single bytes of a file. They are those of a Rockchip NPU's node, which Windows does not
//! have.

use std::fs::File;
use std::io;

use crate::NotHere;

const LOCKS: NotHere = NotHere("locks on single bytes of a file");

/// Locks a byte for this open file alone.
///
/// # Errors
/// [`NotHere`].
pub fn lock(_file: &File, _byte: u16) -> io::Result<bool> {
    Err(LOCKS.into())
}

/// As [`lock`], but lets other open files share the byte.
///
/// # Errors
/// [`NotHere`].
pub fn share(_file: &File, _byte: u16) -> io::Result<bool> {
    Err(LOCKS.into())
}

/// Gives back this open file's lock on a byte.
///
/// # Errors
/// [`NotHere`].
pub fn unlock(_file: &File, _byte: u16) -> io::Result<()> {
    Err(LOCKS.into())
}

/// Returns `true` if another open file has a lock on a byte.
///
/// # Errors
/// [`NotHere`].
pub fn is_locked(_file: &File, _byte: u16) -> io::Result<bool> {
    Err(LOCKS.into())
}
