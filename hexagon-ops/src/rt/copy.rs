//! Copies from DDR to VTCM, as a step describes them.

use core::ops::Range;

use crate::layout::{LINE_BYTES, Line};

/// A copy of lines that follow each other in the source and in the destination.
///
/// The source must be in DDR, not only in the DSP's cache, because the DMA engine bypasses the
/// cache.
#[derive(Debug)]
pub struct Copy<'a> {
    /// Source lines.
    pub from: &'a [Line],
    /// Destination, as many lines.
    pub to: &'a mut [Line],
}

/// Number, length and distances of the rows of a copy, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyShape {
    /// Rows, at least 1.
    pub rows: usize,
    /// Bytes of a row.
    pub row_bytes: usize,
    /// Bytes from the start of a source row to that of the next.
    pub from_stride: usize,
    /// The same for the destination; not less than the length of a row.
    pub to_stride: usize,
}

impl CopyShape {
    /// Returns the same bytes as one row if neither side has gaps.
    fn joined(self) -> Self {
        let bytes = self.row_bytes;
        if self.rows == 1 || (self.from_stride, self.to_stride) == (bytes, bytes) {
            return Self::row(self.rows * bytes);
        }
        self
    }

    /// Returns one row of `bytes` bytes.
    fn row(bytes: usize) -> Self {
        Self {
            rows: 1,
            row_bytes: bytes,
            from_stride: bytes,
            to_stride: bytes,
        }
    }

    /// Returns the bytes from the first row's first to the last row's last at `stride`; `None` if
    /// that overflows.
    fn reach(&self, stride: usize) -> Option<usize> {
        let last = self.rows.checked_sub(1)?.checked_mul(stride)?;
        last.checked_add(self.row_bytes)
    }

    /// Returns the bytes that are copied.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.rows * self.row_bytes
    }
}

/// Rows at equal distances, which may differ between the two sides.
///
/// The source must be in DDR, as for [`struct@Copy`]. Rows may start at any byte: the engine has no
/// rule for their alignment.
///
/// SOURCE: llama.cpp ggml-hexagon htp/dma-queue.h and htp/matmul-ops.c at ggml 0.26.0 copy rows of
/// 34-byte blocks, which start at even bytes, with both sides past the cache; QEMU
/// target/hexagon/dma.c has no check of addresses. Not run on a device.
#[derive(Debug)]
pub struct CopyRows<'a> {
    pub(super) from: &'a [u8],
    pub(super) to: &'a mut [u8],
    pub(super) shape: CopyShape,
}

impl<'a> CopyRows<'a> {
    /// Returns a copy of rows. The first row starts at the start of `from` and of `to`. `None` if a
    /// row ends after their ends, if there are no rows, or if rows of the destination overlap.
    #[must_use]
    pub fn new(from: &'a [u8], to: &'a mut [u8], shape: CopyShape) -> Option<Self> {
        if shape.rows > 1 && shape.to_stride < shape.row_bytes {
            return None;
        }
        Some(Self {
            from: from.get(..shape.reach(shape.from_stride)?)?,
            to: to.get_mut(..shape.reach(shape.to_stride)?)?,
            shape: shape.joined(),
        })
    }

    /// Returns the bytes that are copied.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.shape.bytes()
    }

    /// Returns the places of row `row` in the source and in the destination.
    fn places(&self, row: usize) -> [Range<usize>; 2] {
        [self.shape.from_stride, self.shape.to_stride].map(|stride| {
            let start = row * stride;
            start..start + self.shape.row_bytes
        })
    }

    /// Copies by loads and stores. `before` is called with each row of the source before it is
    /// read.
    pub(super) fn by_loads(&mut self, before: impl Fn(&[u8])) {
        for row in 0..self.shape.rows {
            let [from, to] = self.places(row);
            // `new` has checked that both are inside.
            if let (Some(from), Some(to)) = (self.from.get(from), self.to.get_mut(to)) {
                before(from);
                to.copy_from_slice(from);
            }
        }
    }
}

impl<'a> From<Copy<'a>> for CopyRows<'a> {
    /// Copies as many lines as both sides have.
    fn from(Copy { from, to }: Copy<'a>) -> Self {
        let lines = from.len().min(to.len());
        Self {
            from: bytemuck::cast_slice(&from[..lines]),
            to: bytemuck::cast_slice_mut(&mut to[..lines]),
            shape: CopyShape::row(lines * LINE_BYTES),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a shape.
    fn shape(rows: usize, row_bytes: usize, from_stride: usize, to_stride: usize) -> CopyShape {
        CopyShape {
            rows,
            row_bytes,
            from_stride,
            to_stride,
        }
    }

    #[test]
    fn rows_without_gaps_are_one_row() {
        let (from, mut to) = ([1; 600], [0; 600]);
        for (given, want) in [
            (shape(6, 100, 100, 100), shape(1, 600, 600, 600)),
            (shape(1, 100, 7, 9), shape(1, 100, 100, 100)),
            (shape(3, 100, 100, 128), shape(3, 100, 100, 128)),
            (shape(3, 100, 200, 100), shape(3, 100, 200, 100)),
        ] {
            let copy = CopyRows::new(&from, &mut to, given).unwrap();
            assert_eq!(copy.shape, want);
            assert_eq!(copy.bytes(), given.bytes());
        }
    }

    #[test]
    fn rows_outside_of_either_side_or_over_each_other_are_refused() {
        let (from, mut to) = ([1; 300], [0; 300]);
        for given in [
            shape(0, 100, 100, 100),
            shape(4, 100, 100, 50),
            shape(4, 100, 50, 100),
            shape(3, 100, 101, 100),
            shape(3, 100, 100, 101),
            shape(3, 100, 100, 99),
            shape(usize::MAX, 100, 100, 100),
            shape(1, 301, 0, 0),
        ] {
            assert!(CopyRows::new(&from, &mut to, given).is_none(), "{given:?}");
        }
    }

    #[test]
    fn loads_copy_rows_and_leave_what_is_between_them() {
        let from: Vec<u8> = (0..100).collect();
        let mut to = [0xff; 40];
        let mut copy = CopyRows::new(&from[3..], &mut to, shape(3, 5, 30, 16)).unwrap();
        copy.by_loads(|_| ());
        let mut want = [0xff; 40];
        for (row, first) in [3, 33, 63].into_iter().enumerate() {
            for (i, byte) in (first..first + 5).enumerate() {
                want[16 * row + i] = byte;
            }
        }
        assert_eq!(to, want);
    }
}
