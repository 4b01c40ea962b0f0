//! Vectors at equal distances in memory.

use core::marker::PhantomData;

use super::{Vector, load, load_bytes, splat_w};
use crate::layout::{LINE_BYTES, TILE_DIM};

/// Vectors at equal distances: the first lines of rows of a tensor, for example. At each place
/// there are `WIDTH` successive vectors. If `ALIGNED`, each vector is aligned to its length.
///
/// All of them are inside memory that was checked once, so that loops over them have no branches.
#[derive(Clone, Copy, Debug)]
pub struct StridedVectors<'a, const WIDTH: usize = 1, const ALIGNED: bool = false> {
    first: *const u8,
    stride_bytes: usize,
    count: usize,
    owner: PhantomData<&'a [u8]>,
}

impl<'a, const WIDTH: usize> StridedVectors<'a, WIDTH> {
    /// Returns `count` places, starting with `bytes`; `None` if the last one would end after the
    /// slice, or if `count` is 0.
    #[must_use]
    #[inline(always)]
    pub fn new(bytes: &'a [u8], stride_bytes: usize, count: usize) -> Option<Self> {
        let last = count.checked_sub(1)?.checked_mul(stride_bytes)?;
        let end = last.checked_add(WIDTH * LINE_BYTES)?;
        (end <= bytes.len()).then_some(Self {
            first: bytes.as_ptr(),
            stride_bytes,
            count,
            owner: PhantomData,
        })
    }

    /// Returns the same vectors if all are aligned.
    #[must_use]
    #[inline(always)]
    pub fn aligned(self) -> Option<StridedVectors<'a, WIDTH, true>> {
        let is_aligned = (self.first.addr() | self.stride_bytes).is_multiple_of(LINE_BYTES);
        is_aligned.then_some(StridedVectors {
            first: self.first,
            stride_bytes: self.stride_bytes,
            count: self.count,
            owner: self.owner,
        })
    }
}

impl<'a, const ALIGNED: bool> StridedVectors<'a, 1, ALIGNED> {
    /// Returns the next 32 vectors, and removes them; `None` if fewer are left.
    #[inline(always)]
    pub fn next_square(&mut self) -> Option<Square<'a, ALIGNED>> {
        self.count = self.count.checked_sub(TILE_DIM)?;
        let square = Square(*self);
        self.first = self.first.wrapping_add(TILE_DIM * self.stride_bytes);
        Some(square)
    }
}

/// 32 vectors at equal distances.
#[derive(Clone, Copy, Debug)]
pub struct Square<'a, const ALIGNED: bool>(StridedVectors<'a, 1, ALIGNED>);

impl<'a, const ALIGNED: bool> Square<'a, ALIGNED> {
    /// Returns the vectors i, i + 8, i + 16 and i + 24 for each i.
    #[must_use]
    #[inline(always)]
    pub fn spaced(self) -> Fours<'a, ALIGNED> {
        self.fours(FOURS, 1)
    }

    /// Returns four successive vectors at a time.
    #[must_use]
    #[inline(always)]
    pub fn successive(self) -> Fours<'a, ALIGNED> {
        self.fours(1, 4)
    }

    /// Returns fours whose vectors are `apart` vectors from one another, and that start `step`
    /// vectors after each other: the last vector is 3 · `apart` + 7 · `step` = 31.
    #[inline(always)]
    fn fours(self, apart: usize, step: usize) -> Fours<'a, ALIGNED> {
        let StridedVectors {
            first,
            stride_bytes,
            owner,
            ..
        } = self.0;
        let step_bytes = step * stride_bytes;
        Fours {
            first,
            last: first.wrapping_add((FOURS - 1) * step_bytes),
            apart_bytes: apart * stride_bytes,
            step_bytes,
            owner,
        }
    }
}

/// Fours of a square.
pub const FOURS: usize = TILE_DIM / 4;

/// Eight times four vectors; four of them are the current ones.
#[derive(Debug)]
pub struct Fours<'a, const ALIGNED: bool> {
    /// First vector of the current four, and of the last four.
    first: *const u8,
    last: *const u8,
    apart_bytes: usize,
    step_bytes: usize,
    owner: PhantomData<&'a [u8]>,
}

impl<const ALIGNED: bool> Fours<'_, ALIGNED> {
    /// Returns one of the current four vectors.
    ///
    /// One at a time, so that a caller can store others between them: the compiler does not move a
    /// load past a store.
    #[must_use]
    #[inline(always)]
    pub fn load<const I: usize>(&self) -> Vector {
        const { assert!(I < 4) };
        let place = self.first.wrapping_add(I * self.apart_bytes);
        // SAFETY: `place` is one of the vectors of a square, which are all aligned if the square
        // is.
        unsafe { load_at::<ALIGNED>(place) }
    }

    /// Makes the next four the current ones; the last four stay.
    #[inline(always)]
    pub fn advance(&mut self) {
        self.first = self.first.wrapping_add(self.step_bytes).min(self.last);
    }
}

/// Returns the vector at `place`.
///
/// # Safety
/// - It is inside memory that [`StridedVectors::new`] has checked.
/// - If `ALIGNED`, it is aligned.
#[inline(always)]
unsafe fn load_at<const ALIGNED: bool>(place: *const u8) -> Vector {
    if ALIGNED {
        // SAFETY: guaranteed by the caller.
        load(unsafe { &*place.cast() })
    } else {
        // SAFETY: guaranteed by the caller; bytes need no alignment.
        load_bytes(unsafe { &*place.cast() })
    }
}

impl<const WIDTH: usize, const ALIGNED: bool> Iterator for StridedVectors<'_, WIDTH, ALIGNED> {
    type Item = [Vector; WIDTH];

    #[inline(always)]
    fn next(&mut self) -> Option<[Vector; WIDTH]> {
        self.count = self.count.checked_sub(1)?;
        let mut place = self.first;
        self.first = place.wrapping_add(self.stride_bytes);
        let mut vectors = [splat_w(0); WIDTH];
        for v in &mut vectors {
            // SAFETY: inside the memory that `new` has checked, and `aligned` is its alignment.
            *v = unsafe { load_at::<ALIGNED>(place) };
            place = place.wrapping_add(LINE_BYTES);
        }
        Some(vectors)
    }
}
