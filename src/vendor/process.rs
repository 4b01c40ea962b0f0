//! What a process that uses a real NPU needs from the system: many file descriptors, and to be the only one.

use std::fs::{File, TryLockError};

use crate::caps;
use crate::error::{Error, Result};

/// Raises the limit of open files as far as the system allows, and warns if that is little.
pub fn raise_file_limit() {
    match rlimit::increase_nofile_limit(caps::FILE_DESCRIPTORS) {
        Ok(limit) if limit >= caps::FILE_DESCRIPTORS => {}
        Ok(limit) => log::warn!(
            "at most {limit} files can be open; large models may need {} (ulimit -n)",
            caps::FILE_DESCRIPTORS
        ),
        Err(error) => log::warn!("cannot raise the limit of open files: {error}"),
    }
}

/// How many files the process may have open, if it has that many.
#[must_use]
pub fn file_limit_reached() -> Option<u64> {
    // SOURCE: open(2): EMFILE is the process's limit; there is no other way to ask that counts every descriptor.
    const EMFILE: i32 = 24;
    let error = File::open("/dev/null").err()?;
    let (limit, _) = rlimit::getrlimit(rlimit::Resource::NOFILE).ok()?;
    (error.raw_os_error() == Some(EMFILE)).then_some(limit)
}

/// Takes the NPU for this process, for as long as the result lives.
///
/// SOURCE: two processes that use I/O address spaces of the NPU at once corrupt each other or panic the kernel
/// (rk-llama.cpp's README, igou-kubernetes#869).
///
/// # Errors
/// `Busy` if another process has it.
pub fn take_npu() -> Result<File> {
    let path = std::env::temp_dir().join("ggml-rust-npu.lock");
    let busy = |reason: String| Error::Busy {
        path: path.clone(),
        reason,
    };
    // Append does not truncate, and creates the file for all users of the board.
    let file = File::options()
        .append(true)
        .create(true)
        .open(&path)
        .map_err(|error| busy(error.to_string()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(busy("another process holds it".into())),
        Err(TryLockError::Error(error)) => Err(busy(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_npu_is_taken_once_and_is_free_again_afterwards() {
        let held = take_npu().unwrap();
        let error = take_npu().unwrap_err().to_string();
        assert!(error.contains("ggml-rust-npu.lock"), "{error}");
        drop(held);
        take_npu().unwrap();
    }
}
