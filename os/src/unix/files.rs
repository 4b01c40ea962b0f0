//! Files.

use std::fs::{File, Metadata, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};

/// Lets a file be opened at once: without this, opening a FIFO waits for its other side. It changes
/// nothing for regular files.
pub fn at_once(options: &mut OpenOptions) -> &mut OpenOptions {
    options.custom_flags(libc::O_NONBLOCK)
}

/// As [`at_once`], and a link is an error.
pub fn at_once_without_links(options: &mut OpenOptions) -> &mut OpenOptions {
    options.custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW)
}

/// Fills `bytes` from a place of a file, without moving its cursor.
///
/// # Errors
/// The system's; `UnexpectedEof` if the file ends before.
pub fn read_exact_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    file.read_exact_at(bytes, offset)
}

/// Writes `bytes` to a place of a file, without moving its cursor.
///
/// # Errors
/// The system's.
pub fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    file.write_all_at(bytes, offset)
}

/// Returns the numbers of the file's device and inode, which all names of one file share; `None` if
/// the system does not tell.
#[must_use]
pub fn identity(file: &Metadata) -> Option<(u64, u64)> {
    Some((file.dev(), file.ino()))
}

/// Returns the bits of permissions, `None` if the system has others.
#[must_use]
pub fn mode(file: &Metadata) -> Option<u32> {
    Some(file.mode())
}

/// Returns the number of the group of a file, if the system has groups of files.
#[must_use]
pub fn group(file: &Metadata) -> Option<u32> {
    Some(file.gid())
}

/// Returns the permissions with bits, `None` if the system has others.
#[must_use]
pub fn permissions(mode: u32) -> Option<Permissions> {
    Some(Permissions::from_mode(mode))
}

/// Lets every user read and write a file, whatever the umask is.
///
/// # Errors
/// The system's.
pub fn open_to_all(file: &File) -> io::Result<()> {
    file.set_permissions(Permissions::from_mode(0o666))
}

/// Returns `true` for the error of a platform or a file system without locks. NFS without a lock
/// service has ENOLCK, for which std has no kind.
#[must_use]
pub fn has_no_locks(error: &io::Error) -> bool {
    let codes = [libc::ENOLCK, libc::EOPNOTSUPP, libc::ENOSYS];
    let code = error.raw_os_error();
    error.kind() == io::ErrorKind::Unsupported || code.is_some_and(|code| codes.contains(&code))
}
