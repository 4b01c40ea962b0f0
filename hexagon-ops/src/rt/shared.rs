//! Memory that both processors write at the same time: words with acquire and release, copies word by word, and no
//! reference to any of it. The ring lives in such memory.
//!
//! On the DSP each access looks after its cache line: reads drop the line first, writes push it out afterwards. On the
//! host the accesses are plain atomics.

use core::sync::atomic::{AtomicU32, Ordering};

use bytemuck::Pod;

use super::cache;

/// Bytes that a region's start is aligned to: counters of the two sides stand in lines of their own.
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
    /// The `bytes` bytes at `base`; `None` if they do not start at a multiple of [`ALIGN`].
    ///
    /// # Safety
    /// - They stay mapped, readable and writable, for as long as the value lives.
    /// - Whoever else uses them meanwhile in this process does so by atomic operations.
    #[must_use]
    pub unsafe fn new(base: *mut u8, bytes: usize) -> Option<Self> {
        let aligned = !base.is_null() && base.addr().is_multiple_of(ALIGN);
        aligned.then_some(Self { base, bytes })
    }

    /// Bytes of the region.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The word at byte `offset`.
    ///
    /// # Panics
    /// If the word is not aligned, or not in the region.
    fn word(&self, offset: usize) -> &AtomicU32 {
        let inside = offset.is_multiple_of(4) && self.bytes >= 4 && offset <= self.bytes - 4;
        assert!(inside, "word {offset} of {} bytes", self.bytes);
        // SAFETY: in bounds by the assertion.
        let at = unsafe { self.base.add(offset) };
        // SAFETY: in bounds, aligned since the base and the offset are, and used atomically only by the constructor's
        // contract.
        unsafe { AtomicU32::from_ptr(at.cast()) }
    }

    /// Reads a word; what the other side wrote before it is visible afterwards.
    ///
    /// # Panics
    /// If the word is not aligned, or not in the region.
    #[must_use]
    pub fn load(&self, offset: usize) -> u32 {
        let word = self.word(offset);
        cache::invalidate(word.as_ptr().cast(), 4);
        word.load(Ordering::Acquire)
    }

    /// Writes a word; what was written before is visible to whoever sees it.
    ///
    /// # Panics
    /// As [`Self::load`].
    pub fn store(&self, offset: usize, value: u32) {
        let word = self.word(offset);
        word.store(value, Ordering::Release);
        cache::clean(word.as_ptr().cast(), 4);
    }

    /// Copies a value out; it is whole only if the other side does not write it meanwhile.
    ///
    /// # Panics
    /// As [`Self::load`], or if the value does not consist of words.
    #[must_use]
    pub fn read<T: Pod>(&self, offset: usize) -> T {
        let mut value = T::zeroed();
        let words: &mut [u32] = bytemuck::cast_slice_mut(core::slice::from_mut(&mut value));
        cache::invalidate(self.word(offset).as_ptr().cast(), size_of::<T>());
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
        cache::clean(self.word(offset).as_ptr().cast(), size_of::<T>());
    }

    /// Orders every earlier store of this side before every later load: what going idle needs.
    pub fn fence(&self) {
        cache::barrier();
    }
}
