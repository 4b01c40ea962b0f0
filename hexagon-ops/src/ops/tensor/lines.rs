//! Rows as f32 in lines, for kernels that use a row several times.

use core::ops::Range;

use super::block::values;
use super::convert::widen_bf16;
use super::{CHUNK, Chunk, Type, View};
use crate::hvx::{self, Vector, larger_f16, larger_f32, splat_w};
use crate::layout::{LINE_BYTES, Line};

/// f32 of a line.
const LANES: usize = LINE_BYTES / 4;

/// Loads the first 128 of `bytes`, with zeros past their end.
#[inline(always)]
fn load(bytes: &[u8]) -> Vector {
    match bytes.first_chunk() {
        Some(whole) => hvx::load_bytes(whole),
        None => {
            let [mut padded] = hvx::zeros();
            padded.0[..bytes.len()].copy_from_slice(bytes);
            hvx::load(&padded)
        }
    }
}

/// Returns ones in the first `count` halfwords, up to all, and zeros in the others.
#[inline(always)]
pub(in crate::ops) fn first_halves(count: usize) -> Vector {
    const HALVES: usize = LINE_BYTES / 2;
    const ENDS: [u8; 2 * LINE_BYTES] = {
        let mut ends = [0; 2 * LINE_BYTES];
        let mut i = 0;
        while i < LINE_BYTES {
            ends[i] = 0xff;
            i += 1;
        }
        ends
    };
    let skipped = 2 * (HALVES - count.min(HALVES));
    let ends = ENDS.get(skipped..).and_then(<[u8]>::first_chunk);
    ends.map_or(splat_w(0), hvx::load_bytes)
}

/// The arguments of [`View::read_rows`].
struct ReadRows<'a> {
    view: &'a View<'a>,
    rows: Range<usize>,
    plane: [usize; 2],
    range: Range<usize>,
    out: &'a mut [Line],
}

impl hvx::Kernel for ReadRows<'_> {
    type Output = Vector;

    #[inline(always)]
    fn run(self) -> Vector {
        let Self {
            view, rows, range, ..
        } = self;
        let mut largest = splat_w(0);
        let [i2, i3] = self.plane;
        let lines = range.len().div_ceil(LANES);
        let mut out = self.out;
        if let Some(mut dense) = view.dense_rows(rows.clone(), self.plane, range.start) {
            for _ in rows {
                let (row, rest) = out.split_at_mut(lines);
                dense.read_lines(range.len(), row, &mut largest);
                out = rest;
            }
        } else {
            for row in rows {
                let (lines, rest) = out.split_at_mut(lines);
                view.read_scattered([row, i2, i3], range.clone(), lines);
                for line in &*lines {
                    largest = larger_f32(largest, hvx::load(line));
                }
                out = rest;
            }
        }
        hvx::clear(out);
        largest
    }
}

impl<'v> View<'v> {
    /// Reads elements `range` of rows `rows` (dimension 1) of a plane, each as [`Self::read_lines`]
    /// does, with zeros after them. Returns the bits of their largest magnitudes.
    ///
    /// # Panics
    /// If `out` is too short.
    pub fn read_rows(
        &self,
        rows: Range<usize>,
        plane: [usize; 2],
        range: Range<usize>,
        out: &mut [Line],
    ) -> Vector {
        hvx::widest(ReadRows {
            view: self,
            rows,
            plane,
            range,
            out,
        })
    }

    /// Reads elements `range` of row `at` as f32, with zeros after them. Row indices wrap around at
    /// the dimensions.
    ///
    /// - `range`: within the row; whole blocks
    /// - `out`: `ceil(range / 32)` lines
    #[inline(always)]
    pub fn read_lines(&self, at: [usize; 3], range: Range<usize>, out: &mut [Line]) {
        let [row, i2, i3] = at;
        match self.dense_rows(row..row + 1, [i2, i3], range.start) {
            Some(mut dense) => dense.read_lines(range.len(), out, &mut splat_w(0)),
            None => self.read_scattered(at, range, out),
        }
    }

    /// Reads up to 64 elements `range` of rows `rows` (dimension 1) of a plane as f16, a line each,
    /// with zeros after them. Returns the bits of their largest magnitudes.
    ///
    /// - `out`: a line for each row; remaining lines become zeros
    #[inline(always)]
    pub fn read_halves(
        &self,
        rows: Range<usize>,
        plane: [usize; 2],
        range: Range<usize>,
        out: &mut [Line],
    ) -> Vector {
        let (out, rest) = out.split_at_mut(rows.len());
        hvx::clear(rest);
        let mut largest = splat_w(0);
        let dtype = self.shape.dtype;
        let is_line = 2 * range.len() == LINE_BYTES;
        match self.dense_rows(rows.clone(), plane, range.start) {
            // Whole lines need no function call, as parts of lines do, so vectors stay in
            // registers.
            Some(mut dense) if dtype == Type::F16 && is_line => {
                for out in out {
                    let elems = dense.next(LINE_BYTES).first_chunk();
                    let elems = elems.map_or(splat_w(0), hvx::load_bytes);
                    largest = larger_f16(largest, elems);
                    hvx::store(out, elems);
                }
            }
            Some(mut dense) if dtype == Type::Bf16 && is_line => {
                for out in out {
                    let elems = dense.next(LINE_BYTES).first_chunk();
                    let (even, odd) = widen_bf16(elems.map_or(splat_w(0), hvx::load_bytes));
                    let elems = hvx::narrow_f32(even, odd);
                    largest = larger_f16(largest, elems);
                    hvx::store(out, elems);
                }
            }
            Some(mut dense) if dtype.is_block() => {
                for out in out {
                    let row = dense.bytes;
                    let first = dense.block();
                    let second = if is_line { dense.block() } else { splat_w(0) };
                    let (even, odd) = hvx::deal_w(first, second);
                    dense.bytes = row.get(dense.stride..).unwrap_or_default();
                    let elems = hvx::narrow_f32(even, odd);
                    largest = larger_f16(largest, elems);
                    hvx::store(out, elems);
                }
            }
            Some(mut dense) if dtype == Type::F16 => {
                let kept = first_halves(range.len());
                for out in out {
                    // If a whole line can be read, because the tensor's memory goes on after the
                    // row, read it and mask the end. That is faster than the function call for
                    // parts of lines.
                    let line = dense.bytes.first_chunk();
                    let row = dense.next(2 * range.len());
                    let elems = match line {
                        Some(line) => hvx::and(hvx::load_bytes(line), kept),
                        None => load(row),
                    };
                    largest = larger_f16(largest, elems);
                    hvx::store(out, elems);
                }
            }
            mut dense => {
                let [i2, i3] = plane;
                for (row, out) in rows.zip(out) {
                    let mut lines = hvx::zeros::<2>();
                    let used = &mut lines[..range.len().div_ceil(LANES)];
                    match &mut dense {
                        Some(dense) => dense.read_lines(range.len(), used, &mut splat_w(0)),
                        None => self.read_scattered([row, i2, i3], range.clone(), used),
                    }
                    let (even, odd) = hvx::deal_w(hvx::load(&lines[0]), hvx::load(&lines[1]));
                    let elems = hvx::narrow_f32(even, odd);
                    largest = larger_f16(largest, elems);
                    hvx::store(out, elems);
                }
            }
        }
        largest
    }

    /// Returns rows of a plane starting at element `first`, if elements are consecutive and of a
    /// type that is common in this function.
    ///
    /// - `rows`: the first index wraps around at the dimension; no other index is past the end
    #[inline(always)]
    fn dense_rows(
        &self,
        rows: Range<usize>,
        plane: [usize; 2],
        first: usize,
    ) -> Option<DenseRows<'_>> {
        let shape = &self.shape;
        let dtype = shape.dtype;
        if !shape.has_dense_rows() || !dtype.is_computed() {
            return None;
        }
        let skipped = match dtype.is_block() {
            true => first / 32 * dtype.block_bytes(),
            false => first * dtype.block_bytes(),
        };
        let [i2, i3] = plane;
        Some(DenseRows {
            dtype,
            bytes: self.tail(shape.row([rows.start, i2, i3]) + skipped),
            stride: shape.nb[1],
        })
    }

    /// Returns the row `at`, if it is f32 without gaps.
    #[must_use]
    pub fn floats(&self, at: [usize; 3]) -> Option<&'v [f32]> {
        self.dense_row(Type::F32, at)
    }

    /// Returns the row `at`, if it is i32 without gaps.
    #[must_use]
    pub fn words(&self, at: [usize; 3]) -> Option<&'v [i32]> {
        self.dense_row(Type::I32, at)
    }

    /// Returns the row `at`, if it is of type `dtype` and without gaps.
    #[inline(always)]
    fn dense_row<T: bytemuck::Pod>(&self, dtype: Type, at: [usize; 3]) -> Option<&'v [T]> {
        if self.shape.dtype != dtype || !self.shape.has_dense_rows() {
            return None;
        }
        // Many operations have only one row, at index 0.
        let start = match at {
            [0, 0, 0] => 0,
            at => self.shape.row(at),
        };
        let bytes = self.tail(start).get(..size_of::<T>() * self.shape.ne[0])?;
        bytemuck::try_cast_slice(bytes).ok()
    }

    /// Reads as [`Self::read_lines`] does, where elements are not consecutive, and for types that
    /// are rare in kernels.
    #[inline(never)]
    fn read_scattered(&self, at: [usize; 3], range: Range<usize>, out: &mut [Line]) {
        let mut chunk: Chunk = [0.0; CHUNK];
        for (i, out) in out.chunks_mut(CHUNK / LANES).enumerate() {
            let start = range.start + i * CHUNK;
            let range = start..range.end.min(start + CHUNK);
            out.fill(Line::ZERO);
            let elems = self.read(at, range, &mut chunk);
            let all: &mut [f32] = bytemuck::cast_slice_mut(out);
            all[..elems.len()].copy_from_slice(elems);
        }
    }
}

/// Rows that are read in order. Only the place of the first row is computed.
struct DenseRows<'a> {
    dtype: Type,
    /// Bytes starting with the next row's first element.
    bytes: &'a [u8],
    stride: usize,
}

impl<'a> DenseRows<'a> {
    /// Returns the next row's first `count` bytes.
    #[inline(always)]
    fn next(&mut self, count: usize) -> &'a [u8] {
        let row = self.bytes.get(..count).unwrap_or_default();
        self.bytes = self.bytes.get(self.stride..).unwrap_or_default();
        row
    }

    /// Returns the next block of the row as f32.
    #[inline(always)]
    fn block(&mut self) -> Vector {
        let (block, dtype) = (self.bytes, self.dtype);
        self.bytes = block.get(dtype.block_bytes()..).unwrap_or_default();
        values(dtype, block)
    }

    /// Reads `count` elements of the next row as f32, with zeros after them.
    ///
    /// - `largest`: bits of the largest magnitudes so far
    #[inline(always)]
    fn read_lines(&mut self, count: usize, out: &mut [Line], largest: &mut Vector) {
        match self.dtype {
            Type::F16 => widen(self.next(2 * count), out, largest),
            Type::Bf16 => widen_all_bf16(self.next(2 * count), out, largest),
            Type::F32 => {
                let (whole, rest) = self.next(4 * count).as_chunks();
                for (elems, out) in whole.iter().zip(&mut *out) {
                    let elems = hvx::load_bytes(elems);
                    *largest = larger_f32(*largest, elems);
                    hvx::store(out, elems);
                }
                if let Some(out) = out.get_mut(whole.len())
                    && !rest.is_empty()
                {
                    let elems = load(rest);
                    *largest = larger_f32(*largest, elems);
                    hvx::store(out, elems);
                }
            }
            _ => {
                let row = self.bytes;
                for out in &mut out[..count / 32] {
                    let elems = self.block();
                    *largest = larger_f32(*largest, elems);
                    hvx::store(out, elems);
                }
                self.bytes = row.get(self.stride..).unwrap_or_default();
            }
        }
    }
}

/// Converts f16 to f32, two lines for each 64.
#[inline(always)]
fn widen(halves: &[u8], out: &mut [Line], largest: &mut Vector) {
    let (whole, rest) = halves.as_chunks::<LINE_BYTES>();
    let (pairs, _) = out.as_chunks_mut::<2>();
    for (halves, [first, second]) in whole.iter().zip(pairs) {
        let (low, high) = hvx::widen_in_order_f16(hvx::load_bytes(halves));
        *largest = larger_f32(larger_f32(*largest, low), high);
        hvx::store(first, low);
        hvx::store(second, high);
    }
    if !rest.is_empty() {
        let (low, high) = hvx::widen_in_order_f16(load(rest));
        for (out, v) in out.iter_mut().skip(2 * whole.len()).zip([low, high]) {
            *largest = larger_f32(*largest, v);
            hvx::store(out, v);
        }
    }
}

/// Converts bf16 to f32, two lines for each 64.
#[inline(always)]
fn widen_all_bf16(halves: &[u8], out: &mut [Line], largest: &mut Vector) {
    for (halves, out) in halves.chunks(LINE_BYTES).zip(out.chunks_mut(2)) {
        let (even, odd) = widen_bf16(load(halves));
        let (low, high) = hvx::interleave_w(even, odd);
        for (out, v) in out.iter_mut().zip([low, high]) {
            *largest = larger_f32(*largest, v);
            hvx::store(out, v);
        }
    }
}
