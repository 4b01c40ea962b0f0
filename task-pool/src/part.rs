//! Memory that tasks share in parts: each index has its own part.
#![expect(
    unsafe_code,
    reason = "exclusive parts are handed out through a shared reference"
)]

use std::marker::PhantomData;

/// Values that can be divided into independent parts.
///
/// # Safety
/// Parts of different indices may be used at the same time on different threads.
pub unsafe trait Divisible: Sync {
    /// The part of one index.
    type Part;

    /// Returns the number of parts.
    fn count(&self) -> usize;

    /// Returns the part with number `index`.
    ///
    /// # Safety
    /// - `index` is below the count, and is requested only once,
    /// - the part is not used after the end of `self`.
    unsafe fn part(&self, index: usize) -> Self::Part;
}

/// A slice in chunks of `size` elements; the last one may be shorter.
#[derive(Debug)]
pub struct SliceChunks<'a, T> {
    base: *mut T,
    len: usize,
    size: usize,
    owner: PhantomData<&'a mut [T]>,
}

/// Cuts a slice into chunks of `size` elements; the last one may be shorter.
///
/// # Panics
/// If `size` is 0.
#[must_use]
pub fn chunks<T>(slice: &mut [T], size: usize) -> SliceChunks<'_, T> {
    assert!(size > 0, "chunks of 0 elements");
    SliceChunks {
        base: slice.as_mut_ptr(),
        len: slice.len(),
        size,
        owner: PhantomData,
    }
}

// SAFETY: a shared reference only gives out disjoint parts (`Parts::part`), each to one thread.
unsafe impl<T: Send> Sync for SliceChunks<'_, T> {}

// SAFETY: chunks of different indices share no element.
unsafe impl<'a, T: Send> Divisible for SliceChunks<'a, T> {
    type Part = &'a mut [T];

    fn count(&self) -> usize {
        self.len.div_ceil(self.size)
    }

    unsafe fn part(&self, index: usize) -> &'a mut [T] {
        let start = index * self.size;
        let len = self.size.min(self.len - start);
        // SAFETY: inside the slice, because the index is below the count.
        let base = unsafe { self.base.add(start) };
        // SAFETY: inside the slice that is borrowed for `'a`, and only this part has these
        // elements.
        unsafe { std::slice::from_raw_parts_mut(base, len) }
    }
}

// SAFETY: the parts of both are disjoint, so pairs of them are.
unsafe impl<A: Divisible, B: Divisible> Divisible for (A, B) {
    type Part = (A::Part, B::Part);

    fn count(&self) -> usize {
        self.0.count().min(self.1.count())
    }

    unsafe fn part(&self, index: usize) -> Self::Part {
        // SAFETY: guaranteed by the caller.
        let first = unsafe { self.0.part(index) };
        // SAFETY: guaranteed by the caller.
        (first, unsafe { self.1.part(index) })
    }
}
