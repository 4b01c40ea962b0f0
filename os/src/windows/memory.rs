//! Memory with a descriptor, and pages that go back to the system. Descriptors are handles, of
//! whose bits 32 count.
#![expect(unsafe_code, reason = "the functions have the Unix half's contracts")]

use std::ffi::{CStr, c_int, c_void};
use std::fs::File;
use std::io;
use std::os::windows::io::AsRawHandle as _;

use memmap2::{Mmap, MmapMut, MmapRaw};

use crate::NotHere;

/// The address that `mmap` returns if it fails, on systems that have it.
pub const MAP_FAILED: *mut c_void = std::ptr::without_provenance_mut(usize::MAX);

/// Makes `bytes` bytes of memory with a descriptor, zeros, and maps them: a temporary file.
///
/// # Errors
/// The system's error if it has no memory, no descriptor or no room for the mapping.
pub fn with_descriptor(_name: &CStr, bytes: u64) -> io::Result<(File, MmapRaw)> {
    let file = tempfile::tempfile()?;
    file.set_len(bytes)?;
    let map = MmapRaw::map_raw(&file)?;
    Ok((file, map))
}

/// Returns the number of an open file's handle.
#[must_use]
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "32 bits of a handle count: Microsoft's documentation of interoperability"
)]
pub fn number(file: &File) -> c_int {
    file.as_raw_handle().addr() as c_int
}

/// Returns `true` if the descriptor with a number is of the same file; a duplicate is not found.
#[must_use]
pub fn is_behind(file: &File, number: c_int) -> bool {
    self::number(file) == number
}

/// A descriptor. There are none of a device's memory.
#[derive(Debug)]
pub struct Descriptor(c_int);

impl Descriptor {
    /// Takes over the descriptor with a number.
    ///
    /// # Safety
    /// It is open, and nothing else closes it.
    #[must_use]
    pub unsafe fn adopt(number: c_int) -> Self {
        Self(number)
    }

    /// Duplicates the descriptor with a number.
    ///
    /// # Safety
    /// It is open during the call.
    ///
    /// # Errors
    /// [`NotHere`].
    pub unsafe fn duplicate(_number: c_int) -> io::Result<Self> {
        Err(NotHere("duplicates of descriptors").into())
    }

    /// Returns its number.
    #[must_use]
    pub fn number(&self) -> c_int {
        self.0
    }

    /// Returns the bytes of the memory.
    ///
    /// # Errors
    /// [`NotHere`].
    pub fn bytes(&self) -> io::Result<usize> {
        Err(NotHere("descriptors of a device's memory").into())
    }

    /// Returns `true` if another descriptor is of the same memory.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.0 == other.0
    }

    /// Maps the first `bytes` bytes.
    ///
    /// # Errors
    /// [`NotHere`].
    pub fn map(&self, _bytes: usize) -> io::Result<MmapRaw> {
        Err(NotHere("descriptors of a device's memory").into())
    }
}

/// Sets whole pages of anonymous memory to zero; they stay in memory.
///
/// # Errors
/// None.
///
/// # Panics
/// If the range is not inside of the map.
pub fn release(map: &mut MmapMut, start: usize, bytes: usize) -> io::Result<()> {
    map[start..start + bytes].fill(0);
    Ok(())
}

/// Leaves whole pages of a file's map where they are: Windows takes them when it needs memory.
pub fn release_read(_map: &Mmap, _start: usize, _bytes: usize) {}
