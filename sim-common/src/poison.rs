//! Memory with a file descriptor, as the vendors' allocators return it, and poisoned copies of it.

use std::ffi::CStr;
use std::fs::File;
use std::io;

use memmap2::{MmapMut, MmapRaw};

/// Makes `bytes` bytes of memory with a descriptor, maps them, and fills them with `poison` if
/// there is one; otherwise they are zeros.
///
/// # Errors
/// The system's error if it has no memory, no descriptor or no room for the mapping.
pub fn with_descriptor(name: &CStr, bytes: u64, poison: Option<u8>) -> io::Result<(File, MmapRaw)> {
    let (file, map) = os::memory::with_descriptor(name, bytes)?;
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
