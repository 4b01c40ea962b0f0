//! Moves of elements without conversion, between rows of one type.

use core::ops::Range;

use super::row::Run;
use super::{Row, View};
use crate::hvx::{self, Moved};
use crate::layout::LINE_BYTES;
use crate::rt::cache;

/// Bytes that are moved between two prefetches.
const PIECE: usize = 16 << 10;

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
        // Block sizes are powers of two, so shifts replace divisions, which are function calls on
        // the DSP.
        let [mut to, mut left, mut from] = [to, n, from].map(|k| k >> block.trailing_zeros());
        if from >= blocks {
            from %= blocks;
        }
        let (start, all) = (to, left);
        if dense {
            left = left.min(blocks);
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
        if dense && all > blocks {
            let repeated = self.bytes.get_mut(start * size..(start + all) * size);
            repeat(repeated.unwrap_or_default(), blocks * size);
        }
    }
}

/// Repeats the first `count` bytes up to the end: twice as many each time.
fn repeat(bytes: &mut [u8], count: usize) {
    let mut count = count;
    while count > 0
        && let Some((have, rest)) = bytes.split_at_mut_checked(count)
        && !rest.is_empty()
    {
        let more = count.min(rest.len());
        rest[..more].copy_from_slice(&have[..more]);
        count += more;
    }
}

impl Row<'_> {
    /// Writes zeros to elements `range`, whole blocks for block types.
    #[inline(always)]
    pub fn clear(&mut self, range: Range<usize>) {
        let (block, size) = (self.shape.dtype.block(), self.shape.dtype.block_bytes());
        let stride = self.shape.nb[0].max(size);
        if stride == size {
            let bytes = range.start / block * size..range.end / block * size;
            return self.bytes.get_mut(bytes).unwrap_or_default().fill(0);
        }
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

/// Columns that are moved: elements, or whole blocks.
#[derive(Clone, Copy, Debug)]
pub struct Columns {
    /// First column of the result.
    pub to: usize,
    /// First column of the source.
    pub from: usize,
    /// Number of columns.
    pub count: usize,
}

impl Run<'_> {
    /// Returns `true` if [`Self::take`] moves rows of a source: elements have one type, and follow
    /// each other in rows of both.
    #[must_use]
    pub fn takes(&self, view: &View<'_>) -> bool {
        let is_dense = self.shape.has_dense_rows() && view.shape.has_dense_rows();
        is_dense && self.shape.dtype == view.shape.dtype
    }

    /// Writes columns of rows `rows` of this run, from as many rows of `view`, starting with row
    /// `at`. Rows and columns that do not exist on either side are left out.
    ///
    /// `view` is such that [`Self::takes`] returns `true`.
    pub fn take(&mut self, rows: Range<usize>, view: &View<'_>, at: [usize; 3], columns: Columns) {
        let (block, size) = (self.shape.dtype.block(), self.shape.dtype.block_bytes());
        let bytes = |columns: usize| (columns >> block.trailing_zeros()) * size;
        let Columns { to, from, count } = columns;
        let inside = to + count <= self.shape.ne[0]
            && from + count <= view.shape.ne[0]
            && at[0] + rows.len() <= view.shape.ne[1]
            && rows.end <= self.count;
        if !inside || rows.is_empty() || count == 0 {
            return;
        }
        let from = view.tail(view.shape.row(at) + bytes(from));
        let start = rows.start * self.shape.nb[1] + bytes(to);
        let to = self.bytes.get_mut(start..).unwrap_or_default();
        let moved = Moved {
            count: rows.len(),
            row_bytes: bytes(count),
            to_stride: self.shape.nb[1],
            from_stride: view.shape.nb[1],
        };
        move_pieces(to, from, moved);
    }

    /// Writes the first `n` columns of all rows as [`Self::take`] does, from column 0 of `view`.
    /// For short rows it may also write the rest of a line, which the caller overwrites afterwards.
    pub fn take_lines(&mut self, view: &View<'_>, at: [usize; 3], n: usize) {
        let columns = Columns {
            to: 0,
            from: 0,
            count: n,
        };
        let bytes =
            (n >> self.shape.dtype.block().trailing_zeros()) * self.shape.dtype.block_bytes();
        let from = view.tail(view.shape.row(at));
        let stride = view.shape.nb[1];
        // The number of rows from which a whole line can be read without leaving the source's
        // memory.
        let lines = match from.len().checked_sub(LINE_BYTES) {
            Some(last) if stride > 0 => (last / stride + 1).min(self.count),
            _ => 0,
        };
        let is_short = bytes < LINE_BYTES && self.shape.row_bytes() >= LINE_BYTES;
        if !is_short || lines == 0 || at[0] + self.count > view.shape.ne[1] {
            return self.take(0..self.count, view, at, columns);
        }
        let moved = Moved {
            count: lines,
            row_bytes: LINE_BYTES,
            to_stride: self.shape.nb[1],
            from_stride: stride,
        };
        hvx::move_rows(self.bytes, from, moved);
        let [i1, i2, i3] = at;
        self.take(lines..self.count, view, [i1 + lines, i2, i3], columns);
    }

    /// Copies each row from `view`, which has rows of the same length and type. `offset` returns
    /// the byte at which a row starts in `view`, from the number of the row in this run. Rows that
    /// end outside of `view` or of this run are left out.
    pub fn take_each(&mut self, view: &View<'_>, mut offset: impl FnMut(usize) -> usize) {
        let (bytes, stride) = (self.shape.row_bytes(), self.shape.nb[1]);
        for row in 0..self.count {
            let from = view.tail(offset(row)).get(..bytes);
            let to = self.bytes.get_mut(row * stride..row * stride + bytes);
            match (to, from) {
                // A router's weights have rows of one word, for which a function call would take
                // longer.
                (Some([a, b, c, d]), Some([e, f, g, h])) => (*a, *b, *c, *d) = (*e, *f, *g, *h),
                (Some(to), Some(from)) => to.copy_from_slice(from),
                _ => {}
            }
        }
    }

    /// Writes zeros to rows `rows`.
    pub fn clear(&mut self, rows: Range<usize>) {
        let (row, stride) = (self.shape.row_bytes(), self.shape.nb[1]);
        if self.shape.has_dense_rows() && stride == row {
            let bytes = rows.start * row..rows.end * row;
            return self.bytes.get_mut(bytes).unwrap_or_default().fill(0);
        }
        let n = self.shape.ne[0];
        let mut number = 0;
        self.for_each_row(|mut row| {
            if rows.contains(&number) {
                row.clear(0..n);
            }
            number += 1;
        });
    }
}

/// Moves rows, about [`PIECE`] bytes at a time, while the next ones are fetched.
fn move_pieces(to: &mut [u8], from: &[u8], rows: Moved) {
    let row = rows.row_bytes;
    if (rows.to_stride, rows.from_stride) == (row, row) || rows.count == 1 {
        let bytes = row.saturating_mul(rows.count);
        let (Some(to), Some(from)) = (to.get_mut(..bytes), from.get(..bytes)) else {
            return;
        };
        let mut to = to.chunks_mut(PIECE);
        let mut pieces = from.chunks(PIECE).peekable();
        while let (Some(to), Some(from)) = (to.next(), pieces.next()) {
            if let Some(next) = pieces.peek() {
                cache::fetch(next.as_ptr(), next.len());
            }
            to.copy_from_slice(from);
        }
        return;
    }
    // Shifts instead of divisions, which are function calls on the DSP: rows are often short.
    let shift = PIECE.ilog2().saturating_sub(row.max(1).ilog2() + 1);
    let each = 1 << shift;
    let mut first = 0;
    while first < rows.count {
        let count = each.min(rows.count - first);
        let next = first + count;
        if next < rows.count
            && let Some(start) = from.get(next * rows.from_stride..)
        {
            let count = each.min(rows.count - next);
            cache::fetch_rows(start.as_ptr(), count, row, rows.from_stride);
        }
        let to = to.get_mut(first * rows.to_stride..).unwrap_or_default();
        let from = from.get(first * rows.from_stride..).unwrap_or_default();
        hvx::move_rows(to, from, Moved { count, ..rows });
        first = next;
    }
}
