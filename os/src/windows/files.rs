//! Files.

use std::fs::{File, Metadata, OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::windows::fs::{FileExt as _, OpenOptionsExt as _};

/// Lets a file be opened at once. No file of Windows waits for another side.
pub fn at_once(options: &mut OpenOptions) -> &mut OpenOptions {
    options
}

/// As [`at_once`], and a link is opened itself.
pub fn at_once_without_links(options: &mut OpenOptions) -> &mut OpenOptions {
    // SOURCE: FILE_FLAG_OPEN_REPARSE_POINT, CreateFileW in Microsoft's documentation.
    options.custom_flags(0x0020_0000)
}

/// Fills `bytes` from a place of a file; its cursor moves.
///
/// # Errors
/// The system's; `UnexpectedEof` if the file ends before.
pub fn read_exact_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match file.seek_read(&mut bytes[done..], offset + done as u64) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => done += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Writes `bytes` to a place of a file; its cursor moves.
///
/// # Errors
/// The system's.
pub fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match file.seek_write(&bytes[done..], offset + done as u64) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => done += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Returns numbers that all names of one file share: `None`, because std does not tell them.
#[must_use]
pub fn identity(_file: &Metadata) -> Option<(u64, u64)> {
    None
}

/// Returns the bits of permissions: Windows has others.
#[must_use]
pub fn mode(_file: &Metadata) -> Option<u32> {
    None
}

/// Returns the number of the group of a file: Windows has none.
#[must_use]
pub fn group(_file: &Metadata) -> Option<u32> {
    None
}

/// Returns the permissions with bits: Windows has others.
#[must_use]
pub fn permissions(_mode: u32) -> Option<Permissions> {
    None
}

/// Lets every user read and write a file: a file's folder decides that on Windows.
///
/// # Errors
/// None.
pub fn open_to_all(_file: &File) -> io::Result<()> {
    Ok(())
}

/// Returns `true` for the error of a platform or a file system without locks.
#[must_use]
pub fn has_no_locks(error: &io::Error) -> bool {
    error.kind() == ErrorKind::Unsupported
}
