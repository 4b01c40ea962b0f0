//! Differences between operating systems, in two halves with the same items: `unix.rs` and
//! `windows.rs`. No other crate names a system, except in tests.
//!
//! | module | holds |
//! |---|---|
//! | [`files`] | opening, reading at an offset, permissions, identity |
//! | [`locks`] | locks on single bytes of a file |
//! | [`memory`] | memory with a descriptor, and pages that go back to the system |
//! | [`node`] | calls into a kernel's driver |
//! | [`process`] | signals, forks, the limit of open files |
//! | [`threads`] | the CPUs of a thread |
//! | [`libraries`] | libraries that the process has loaded |
//!
//! The Windows half has all functions that the library, the tool and the stand-ins need. NPUs are
//! not reached there: functions that only a device needs return the error [`NotHere`], which names
//! the missing feature.

use std::fmt;
use std::io;

#[cfg(unix)]
mod unix;
#[cfg(unix)]
pub use unix::{files, libraries, locks, memory, node, process, threads};

#[cfg(windows)]
mod windows;
#[cfg(windows)]
pub use windows::{files, libraries, locks, memory, node, process, threads};

/// Something that this operating system does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotHere(pub &'static str);

impl fmt::Display for NotHere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: not on this operating system", self.0)
    }
}

impl std::error::Error for NotHere {}

impl From<NotHere> for io::Error {
    fn from(error: NotHere) -> Self {
        Self::new(io::ErrorKind::Unsupported, error)
    }
}

#[cfg(all(test, unix))]
mod tests;
