//! Lines that a kernel writes and reads again, in memory that nobody clears.

use core::mem::MaybeUninit;

use super::{Vector, store_first};
use crate::layout::Line;

/// Two planes of up to `N` lines each. In each, the first `counts` lines have been written.
pub struct LinePlanes<const N: usize> {
    planes: MaybeUninit<[[Line; N]; 2]>,
    counts: [usize; 2],
}

impl<const N: usize> LinePlanes<N> {
    /// Returns planes without lines. A constant would be copied, bytes without content too.
    #[must_use]
    #[inline(always)]
    pub fn unfilled() -> Self {
        Self {
            planes: MaybeUninit::uninit(),
            counts: [0; 2],
        }
    }

    /// Replaces the lines by those of `items`. Each item adds `COUNT` lines to both planes; items
    /// without room are left out.
    #[inline(always)]
    pub fn fill<const COUNT: usize>(&mut self, items: impl Iterator<Item = [[Vector; COUNT]; 2]>) {
        let planes = self
            .planes
            .as_mut_ptr()
            .cast::<[[MaybeUninit<Line>; N]; 2]>();
        self.counts = [0; 2];
        // SAFETY: `self` borrows the memory. Lines of `MaybeUninit` have the layout of lines and
        // may be uninitialized.
        let [first, second] = unsafe { &mut *planes };
        let first = first.as_chunks_mut::<COUNT>().0.iter_mut();
        let second = second.as_chunks_mut::<COUNT>().0.iter_mut();
        let mut count = 0;
        for ((to, other_to), [vectors, other_vectors]) in first.zip(second).zip(items) {
            for (line, v) in to.iter_mut().zip(vectors) {
                store_first(line, v);
            }
            for (line, v) in other_to.iter_mut().zip(other_vectors) {
                store_first(line, v);
            }
            count += COUNT;
        }
        self.counts = [count; 2];
    }

    /// Replaces the lines of the first plane by those of `items`, and leaves the second one empty;
    /// items that find no room are left out.
    #[inline(always)]
    pub fn fill_first<const COUNT: usize>(&mut self, items: impl Iterator<Item = [Vector; COUNT]>) {
        let planes = self
            .planes
            .as_mut_ptr()
            .cast::<[[MaybeUninit<Line>; N]; 2]>();
        self.counts = [0; 2];
        // SAFETY: as in `fill`.
        let [first, _] = unsafe { &mut *planes };
        let mut count = 0;
        for (to, vectors) in first.as_chunks_mut::<COUNT>().0.iter_mut().zip(items) {
            for (line, v) in to.iter_mut().zip(vectors) {
                store_first(line, v);
            }
            count += COUNT;
        }
        self.counts = [count, 0];
    }

    /// Returns the lines of both planes.
    #[must_use]
    #[inline(always)]
    pub fn lines(&self) -> [&[Line]; 2] {
        let first = self.planes.as_ptr().cast::<Line>();
        let [count, other_count] = self.counts;
        [(first, count), (first.wrapping_add(N), other_count)].map(|(plane, count)| {
            // SAFETY: the first `count` lines of each plane have been written, and `count` is at
            // most `N`, the lines of a plane.
            unsafe { core::slice::from_raw_parts(plane, count) }
        })
    }
}
