//! Moves of elements without conversion, between rows of one type.

use core::ops::Range;

use super::{Row, View};

impl Row<'_> {
    /// Writes `n` elements starting at `to`: the bits of the elements of row `at` of `view` that
    /// start at `from`, indices modulo its dimensions. For block types all three numbers are whole
    /// blocks.
    ///
    /// `view` has this row's type. Elements outside either row are left out.
    #[inline(always)]
    pub fn take(&mut self, to: usize, n: usize, view: &View<'_>, at: [usize; 3], from: usize) {
        let dtype = self.shape.dtype;
        let (block, size) = (dtype.block(), dtype.block_bytes());
        let source = view.tail(view.shape.row(at));
        let dense = self.shape.has_dense_rows() && view.shape.has_dense_rows();
        let [to_stride, from_stride] = [self.shape.nb[0], view.shape.nb[0]];
        let blocks = view.shape.blocks();
        // Blocks are powers of two, and divisions are function calls on the DSP.
        let [mut to, mut left, mut from] = [to, n, from].map(|k| k >> block.trailing_zeros());
        if from >= blocks {
            from %= blocks;
        }
        while left > 0 {
            let count = left.min(blocks - from);
            if dense {
                let source = source.get(from * size..(from + count) * size);
                let target = self.bytes.get_mut(to * size..(to + count) * size);
                if let (Some(target), Some(source)) = (target, source) {
                    target.copy_from_slice(source);
                }
            } else {
                let target = self.bytes.get_mut(to * to_stride..).unwrap_or_default();
                let source = source.get(from * from_stride..).unwrap_or_default();
                let strides = (to_stride, from_stride);
                match size {
                    1 => gather::<1>(target, source, strides, count),
                    2 => gather::<2>(target, source, strides, count),
                    4 => gather::<4>(target, source, strides, count),
                    8 => gather::<8>(target, source, strides, count),
                    _ => gather_blocks(target, source, strides, count, size),
                }
            }
            (to, left, from) = (to + count, left - count, 0);
        }
    }
}

impl Row<'_> {
    /// Writes zeros to elements `range`, whole blocks for block types.
    #[inline(always)]
    pub fn clear(&mut self, range: Range<usize>) {
        let (block, size) = (self.shape.dtype.block(), self.shape.dtype.block_bytes());
        let stride = self.shape.nb[0].max(size);
        for i in range.start / block..range.end / block {
            if let Some(bytes) = self.bytes.get_mut(i * stride..i * stride + size) {
                bytes.fill(0);
            }
        }
    }
}

/// Moves `count` elements of `N` bytes.
#[inline(always)]
fn gather<const N: usize>(target: &mut [u8], source: &[u8], strides: (usize, usize), count: usize) {
    for i in 0..count {
        let to = target.get_mut(i * strides.0..).unwrap_or_default();
        let from = source.get(i * strides.1..).unwrap_or_default();
        if let (Some(to), Some(from)) = (to.first_chunk_mut::<N>(), from.first_chunk::<N>()) {
            *to = *from;
        }
    }
}

/// Moves `count` blocks of `size` bytes.
#[inline(always)]
fn gather_blocks(
    target: &mut [u8],
    source: &[u8],
    strides: (usize, usize),
    count: usize,
    size: usize,
) {
    for i in 0..count {
        let to = target.get_mut(i * strides.0..i * strides.0 + size);
        let from = source.get(i * strides.1..i * strides.1 + size);
        if let (Some(to), Some(from)) = (to, from) {
            to.copy_from_slice(from);
        }
    }
}
