//! Memory that both processors write at the same time, such as the ring: words are read with
//! acquire and written with release, values are copied word by word, and there are no references
//! into it.
//!
//! On the DSP each access maintains its cache lines, as scalar loads and stores need it: reads drop
//! the lines first, writes clean them afterwards. On the host the accesses are plain atomics.

use core::sync::atomic::{AtomicU32, Ordering};

use bytemuck::Pod;

use super::cache::{self, Access};

/// Alignment of a region's start in bytes: the counters of the two sides are in separate lines.
pub const ALIGN: usize = 128;

/// A region of memory that is read and written by whole words.
#[derive(Debug)]
pub struct Shared {
    base: *mut u8,
    bytes: usize,
}

// SAFETY: the region belongs to no thread; all accesses to it are atomic.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// Describes the `bytes` bytes at `base`; `None` if they do not start at a multiple of
    /// [`ALIGN`].
    ///
    /// # Safety
    /// - They stay mapped, readable and writable, for as long as the value lives.
    /// - Other users of them in this process access them by atomic operations only.
    #[must_use]
    pub unsafe fn new(base: *mut u8, bytes: usize) -> Option<Self> {
        let aligned = !base.is_null() && base.addr().is_multiple_of(ALIGN);
        aligned.then_some(Self { base, bytes })
    }

    /// Returns the bytes of the region.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the atomic word at byte `offset`.
    ///
    /// # Panics
    /// If the word is not aligned, or not in the region.
    fn word(&self, offset: usize) -> &AtomicU32 {
        let inside = offset.is_multiple_of(4) && self.bytes >= 4 && offset <= self.bytes - 4;
        assert!(inside, "word {offset} of {} bytes", self.bytes);
        // SAFETY: in bounds by the assertion.
        let at = unsafe { self.base.add(offset) };
        // SAFETY: in bounds, aligned since the base and the offset are, and used atomically only by
        // the constructor's contract.
        unsafe { AtomicU32::from_ptr(at.cast()) }
    }

    /// Reads a word. Afterwards, everything that the other side wrote before that word is visible.
    ///
    /// # Panics
    /// If the word is not aligned, or not in the region.
    #[must_use]
    pub fn load(&self, offset: usize) -> u32 {
        let word = self.word(offset);
        cache::invalidate(word.as_ptr().cast(), 4, Access::Scalar);
        word.load(Ordering::Acquire)
    }

    /// Writes a word. A reader that sees the word also sees everything that was written before it.
    ///
    /// # Panics
    /// As [`Self::load`].
    pub fn store(&self, offset: usize, value: u32) {
        let word = self.word(offset);
        word.store(value, Ordering::Release);
        cache::clean(word.as_ptr().cast(), 4, Access::Scalar);
    }

    /// Copies a value out. The copy is consistent only if the other side does not write the value
    /// at the same time.
    ///
    /// # Panics
    /// As [`Self::load`], or if the value does not consist of words.
    #[must_use]
    pub fn read<T: Pod>(&self, offset: usize) -> T {
        let mut value = T::zeroed();
        let words: &mut [u32] = bytemuck::cast_slice_mut(core::slice::from_mut(&mut value));
        let first = self.word(offset).as_ptr().cast();
        cache::invalidate(first, size_of::<T>(), Access::Scalar);
        for (i, word) in words.iter_mut().enumerate() {
            *word = self.word(offset + 4 * i).load(Ordering::Relaxed);
        }
        value
    }

    /// Copies a value in; a later [`Self::store`] publishes it.
    ///
    /// # Panics
    /// As [`Self::read`].
    pub fn write<T: Pod>(&self, offset: usize, value: &T) {
        let words: &[u32] = bytemuck::cast_slice(core::slice::from_ref(value));
        for (i, word) in words.iter().enumerate() {
            self.word(offset + 4 * i).store(*word, Ordering::Relaxed);
        }
        let first = self.word(offset).as_ptr().cast();
        cache::clean(first, size_of::<T>(), Access::Scalar);
    }

    /// Orders every earlier store of this side before every later load, which a side needs before
    /// it goes idle.
    pub fn fence(&self) {
        cache::barrier();
    }
}
