//! The file descriptors that a process with a real NPU needs from the system.

use std::fs::File;
use std::io;

use crate::rockchip::caps;

/// Raises the limit of open files as far as the system allows, and warns if that is little.
pub fn raise_file_limit() {
    match os::process::raise_file_limit(caps::FILE_DESCRIPTORS) {
        Ok(limit) if limit >= caps::FILE_DESCRIPTORS => {}
        Ok(limit) => log::warn!(
            "at most {limit} files can be open; large models may need {} (ulimit -n)",
            caps::FILE_DESCRIPTORS
        ),
        Err(error) => log::warn!("cannot raise the limit of open files: {error}"),
    }
}

/// Returns the number of files that the process may have open.
#[must_use]
pub fn file_limit() -> u64 {
    // SOURCE: 1024 is the usual soft limit of Linux, should the system not tell.
    os::process::file_limit().unwrap_or(1024)
}

/// Most file descriptors that a context of the library needs.
// SOURCE: librknnrt's own buffers and DRM handles, 3 to 4 for each context (estimate; not counted
// on a board).
pub const DESCRIPTORS_PER_CONTEXT: u64 = 4;

/// Returns the limit of open files of the process if it may not open `needed` more.
#[must_use]
pub fn file_limit_reached(needed: u64) -> Option<u64> {
    // SOURCE: open(2): EMFILE means the process's limit. Only opening files reveals how many
    // descriptors are left.
    const EMFILE: i32 = 24;
    // All files are opened before any is closed; a call that failed has already closed those that
    // it opened.
    let files: io::Result<Vec<File>> = (0..needed).map(|_| File::open("/dev/null")).collect();
    let error = files.err()?;
    let limit = os::process::file_limit().ok()?;
    (error.raw_os_error() == Some(EMFILE)).then_some(limit)
}
