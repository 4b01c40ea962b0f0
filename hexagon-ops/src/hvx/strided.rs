//! Vectors at equal distances in memory.

use core::marker::PhantomData;

use super::{Vector, load, load_bytes};
use crate::layout::{LINE_BYTES, TILE_DIM};

/// Vectors at equal distances: the first lines of rows of a tensor, for example.
///
/// All of them are inside memory that was checked once, so that loops over them have no branches.
#[derive(Clone, Copy, Debug)]
pub struct Strided<'a> {
    first: *const u8,
    stride_bytes: usize,
    count: usize,
    owner: PhantomData<&'a [u8]>,
}

impl<'a> Strided<'a> {
    /// Returns `count` vectors, the first of which starts with `bytes`; `None` if the last one ends after them, or if
    /// there are none.
    #[must_use]
    #[inline(always)]
    pub fn new(bytes: &'a [u8], stride_bytes: usize, count: usize) -> Option<Self> {
        let last = count.checked_sub(1)?.checked_mul(stride_bytes)?;
        let end = last.checked_add(LINE_BYTES)?;
        (end <= bytes.len()).then_some(Self {
            first: bytes.as_ptr(),
            stride_bytes,
            count,
            owner: PhantomData,
        })
    }

    /// Returns `true` if every vector is aligned to its length.
    #[must_use]
    #[inline(always)]
    pub fn is_aligned(&self) -> bool {
        (self.first.addr() | self.stride_bytes).is_multiple_of(LINE_BYTES)
    }

    /// Returns the vectors as a square of 32, if there are as many.
    #[must_use]
    #[inline(always)]
    pub fn square<const ALIGNED: bool>(self) -> Option<Square<'a, ALIGNED>> {
        let fits = self.count >= TILE_DIM && (!ALIGNED || self.is_aligned());
        fits.then_some(Square(self))
    }

    /// Returns the vector `at` bytes after the first one.
    ///
    /// # Safety
    /// - `at` is a multiple of the stride, below `count` times it.
    /// - If `ALIGNED`, all vectors are aligned.
    #[inline(always)]
    unsafe fn load_at<const ALIGNED: bool>(&self, at: usize) -> Vector {
        let place = self.first.wrapping_add(at);
        if ALIGNED {
            // SAFETY: by the caller's promise inside the memory that `new` has checked, and aligned.
            load(unsafe { &*place.cast() })
        } else {
            // SAFETY: by the caller's promise inside the memory that `new` has checked; bytes need no alignment.
            load_bytes(unsafe { &*place.cast() })
        }
    }
}

impl Iterator for Strided<'_> {
    type Item = Vector;

    #[inline(always)]
    fn next(&mut self) -> Option<Vector> {
        self.count = self.count.checked_sub(1)?;
        // SAFETY: the first of the vectors that are left.
        let v = unsafe { self.load_at::<false>(0) };
        self.first = self.first.wrapping_add(self.stride_bytes);
        Some(v)
    }
}

/// 32 vectors at equal distances; aligned if `ALIGNED`.
#[derive(Clone, Copy, Debug)]
pub struct Square<'a, const ALIGNED: bool>(Strided<'a>);

impl<const ALIGNED: bool> Square<'_, ALIGNED> {
    /// Returns vector `row % 32`.
    #[must_use]
    #[inline(always)]
    pub fn load(&self, row: usize) -> Vector {
        let at = row % TILE_DIM * self.0.stride_bytes;
        // SAFETY: there are at least 32 vectors, and their alignment was checked.
        unsafe { self.0.load_at::<ALIGNED>(at) }
    }
}
