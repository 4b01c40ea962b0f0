//! Memory with a file descriptor, as the vendors' allocators return it, and poisoned copies of it.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::FromRawFd as _;

use memmap2::{MmapMut, MmapRaw};

/// Makes `bytes` bytes of memory with a descriptor, maps them, and fills them with `poison` if
/// there is one; otherwise they are zeros.
///
/// # Errors
/// The system's error if it has no memory, no descriptor or no room for the mapping.
pub fn with_descriptor(name: &CStr, bytes: u64, poison: Option<u8>) -> io::Result<(File, MmapRaw)> {
    // SAFETY: the name is a C string, and the flags are valid.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, and nothing else owns it.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(bytes)?;
    let map = MmapRaw::map_raw(&file)?;
    if let Some(poison) = poison {
        // SAFETY: the mapping is new and `len` bytes long.
        unsafe { map.as_mut_ptr().write_bytes(poison, map.len()) };
    }
    Ok((file, map))
}

/// Makes a device's or a cache's separate copy of `bytes` bytes, filled with `poison`.
///
/// # Errors
/// The system's error if it has no memory.
pub fn poisoned(bytes: usize, poison: u8) -> io::Result<MmapRaw> {
    let mut copy = MmapMut::map_anon(bytes)?;
    copy.fill(poison);
    Ok(MmapRaw::from(copy))
}
