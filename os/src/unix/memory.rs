//! Memory with a descriptor, and pages that go back to the system.
#![expect(unsafe_code, reason = "descriptors and pages are the system's")]

use std::ffi::{CStr, c_int, c_void};
use std::fs::File;
use std::io::{self, Seek as _, SeekFrom};
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _};

use memmap2::{Mmap, MmapMut, MmapOptions, MmapRaw, UncheckedAdvice};

/// The address that `mmap` returns if it fails.
pub const MAP_FAILED: *mut c_void = libc::MAP_FAILED;

/// Makes `bytes` bytes of memory with a descriptor, zeros, and maps them.
///
/// # Errors
/// The system's error if it has no memory, no descriptor or no room for the mapping.
pub fn with_descriptor(name: &CStr, bytes: u64) -> io::Result<(File, MmapRaw)> {
    // SAFETY: the name is a C string, and the flags are valid.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, and nothing else owns it.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(bytes)?;
    let map = MmapRaw::map_raw(&file)?;
    Ok((file, map))
}

/// Returns the number of an open file's descriptor.
#[must_use]
pub fn number(file: &File) -> c_int {
    file.as_raw_fd()
}

/// Returns `true` if the descriptor with a number is of the same file.
#[must_use]
pub fn is_behind(file: &File, number: c_int) -> bool {
    let same = || {
        let own = file.metadata().ok()?;
        let other = std::fs::metadata(format!("/proc/self/fd/{number}")).ok()?;
        Some(super::files::identity(&own) == super::files::identity(&other))
    };
    same() == Some(true)
}

/// A descriptor of memory, closed when it is dropped.
#[derive(Debug)]
pub struct Descriptor(pub(super) File);

impl Descriptor {
    /// Takes over the descriptor with a number.
    ///
    /// # Safety
    /// It is open, and nothing else closes it.
    #[must_use]
    pub unsafe fn adopt(number: c_int) -> Self {
        // SAFETY: passed on to the caller.
        Self(unsafe { File::from_raw_fd(number) })
    }

    /// Duplicates the descriptor with a number.
    ///
    /// # Safety
    /// It is open during the call.
    ///
    /// # Errors
    /// The system's.
    pub unsafe fn duplicate(number: c_int) -> io::Result<Self> {
        // SAFETY: passed on to the caller.
        let own = unsafe { BorrowedFd::borrow_raw(number) };
        own.try_clone_to_owned().map(|own| Self(own.into()))
    }

    /// Returns its number.
    #[must_use]
    pub fn number(&self) -> c_int {
        self.0.as_raw_fd()
    }

    /// Returns the bytes of the memory.
    ///
    /// # Errors
    /// The system's.
    pub fn bytes(&self) -> io::Result<usize> {
        let end = (&self.0).seek(SeekFrom::End(0))?;
        usize::try_from(end).map_err(io::Error::other)
    }

    /// Returns `true` if another descriptor is of the same memory.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        is_behind(&self.0, other.number())
    }

    /// Maps the first `bytes` bytes.
    ///
    /// # Errors
    /// The system's.
    pub fn map(&self, bytes: usize) -> io::Result<MmapRaw> {
        MmapOptions::new().len(bytes).map_raw(&self.0)
    }
}

/// Returns whole pages of anonymous memory to the system: they are zeros then.
///
/// # Errors
/// The system's.
///
/// # Panics
/// If the range is not inside of the map.
pub fn release(map: &mut MmapMut, start: usize, bytes: usize) -> io::Result<()> {
    assert!(start + bytes <= map.len(), "pages outside of a map");
    // SAFETY: pages of a private anonymous mapping are zeros after this, and `&mut` is the only
    // access to them.
    unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, bytes) }
}

/// Takes whole pages of a file's map out of this process's memory; who reads them again gets them
/// from the file again. If the system refuses, they stay: the process looks larger than it is, and
/// works.
///
/// # Panics
/// If the range is not inside of the map.
pub fn release_read(map: &Mmap, start: usize, bytes: usize) {
    assert!(start + bytes <= map.len(), "pages outside of a map");
    // SAFETY: pages of a file's map that nothing writes are read from the file again after this.
    let done = unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, bytes) };
    done.unwrap_or_default();
}
