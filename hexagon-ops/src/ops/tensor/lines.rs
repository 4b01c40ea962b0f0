//! Rows as f32 in lines, for kernels that use a row several times.

use core::ops::Range;

use super::convert::ONE_F16;
use super::{CHUNK, Chunk, Type, View};
use crate::hvx::{self, Vector};
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

/// The arguments of [`View::read_rows`].
struct ReadRows<'a> {
    view: &'a View<'a>,
    rows: Range<usize>,
    plane: [usize; 2],
    range: Range<usize>,
    out: &'a mut [Line],
}

impl hvx::Kernel for ReadRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let Self {
            view, rows, range, ..
        } = self;
        let [i2, i3] = self.plane;
        let lines = range.len().div_ceil(LANES);
        let mut out = self.out;
        if let Some(mut dense) = view.dense_rows(rows.clone(), self.plane, range.start) {
            for _ in rows {
                let (row, rest) = out.split_at_mut(lines);
                dense.read_lines(range.len(), row);
                out = rest;
            }
        } else {
            for row in rows {
                let (lines, rest) = out.split_at_mut(lines);
                view.read_lines([row, i2, i3], range.clone(), lines);
                out = rest;
            }
        }
        hvx::clear(out);
    }
}

impl View<'_> {
    /// Reads elements `range` of rows `rows` (dimension 1) of a plane, each as [`Self::read_lines`]
    /// does, with zeros after them.
    ///
    /// # Panics
    /// If `out` is too short.
    pub fn read_rows(
        &self,
        rows: Range<usize>,
        plane: [usize; 2],
        range: Range<usize>,
        out: &mut [Line],
    ) {
        hvx::widest(ReadRows {
            view: self,
            rows,
            plane,
            range,
            out,
        });
    }

    /// Reads elements `range` of row `at` as f32, with zeros after them. Row indices are taken
    /// modulo the dimensions.
    ///
    /// - `range`: within the row; whole blocks
    /// - `out`: `ceil(range / 32)` lines
    #[inline(always)]
    pub fn read_lines(&self, at: [usize; 3], range: Range<usize>, out: &mut [Line]) {
        let [row, i2, i3] = at;
        match self.dense_rows(row..row + 1, [i2, i3], range.start) {
            Some(mut dense) => dense.read_lines(range.len(), out),
            None => self.read_scattered(at, range, out),
        }
    }

    /// Reads up to 64 elements `range` of rows `rows` (dimension 1) of a plane as f16, a line each,
    /// with zeros after them.
    ///
    /// - `out`: a line for each row; remaining lines become zeros
    #[inline(always)]
    pub fn read_halves(
        &self,
        rows: Range<usize>,
        plane: [usize; 2],
        range: Range<usize>,
        out: &mut [Line],
    ) {
        let (out, rest) = out.split_at_mut(rows.len());
        hvx::clear(rest);
        let mut dense = self.dense_rows(rows.clone(), plane, range.start);
        if let Some(dense) = &mut dense
            && self.shape.dtype == Type::F16
        {
            for out in out {
                hvx::store(out, load(dense.next(2 * range.len())));
            }
            return;
        }
        let [i2, i3] = plane;
        for (row, out) in rows.zip(out) {
            let mut lines = hvx::zeros::<2>();
            let used = &mut lines[..range.len().div_ceil(LANES)];
            match &mut dense {
                Some(dense) => dense.read_lines(range.len(), used),
                None => self.read_scattered([row, i2, i3], range.clone(), used),
            }
            let (even, odd) = hvx::deal_w(hvx::load(&lines[0]), hvx::load(&lines[1]));
            hvx::store(out, hvx::narrow_f32(even, odd));
        }
    }

    /// Returns rows of a plane starting at element `first`, if elements are consecutive and of a
    /// type that is common here.
    ///
    /// - `rows`: the first is taken modulo the dimension, and no other one is past it
    #[inline(always)]
    fn dense_rows(
        &self,
        rows: Range<usize>,
        plane: [usize; 2],
        first: usize,
    ) -> Option<DenseRows<'_>> {
        let shape = &self.shape;
        let dtype = shape.dtype;
        if !shape.has_dense_rows() || !DenseRows::reads(dtype) {
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
    pub fn floats(&self, at: [usize; 3]) -> Option<&[f32]> {
        if self.shape.dtype != Type::F32 || !self.shape.has_dense_rows() {
            return None;
        }
        let bytes = self.tail(self.shape.row(at)).get(..4 * self.shape.ne[0])?;
        bytemuck::try_cast_slice(bytes).ok()
    }

    /// Reads as [`Self::read_lines`] does where elements are not consecutive, and for types that
    /// are rare here.
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

/// Rows that are read in order: only the first one's place is computed.
struct DenseRows<'a> {
    dtype: Type,
    /// Bytes starting with the next row's first element.
    bytes: &'a [u8],
    stride: usize,
}

impl<'a> DenseRows<'a> {
    /// Returns `true` for the types that are read here.
    #[inline(always)]
    fn reads(dtype: Type) -> bool {
        matches!(dtype, Type::F16 | Type::F32 | Type::Q8_0 | Type::Q4_0)
    }

    /// Returns the next row's first `count` bytes.
    #[inline(always)]
    fn next(&mut self, count: usize) -> &'a [u8] {
        let row = self.bytes.get(..count).unwrap_or_default();
        self.bytes = self.bytes.get(self.stride..).unwrap_or_default();
        row
    }

    /// Reads `count` elements of the next row as f32, with zeros after them.
    #[inline(always)]
    fn read_lines(&mut self, count: usize, out: &mut [Line]) {
        match self.dtype {
            Type::F16 => widen(self.next(2 * count), out),
            Type::F32 => {
                for (elems, out) in self.next(4 * count).chunks(LINE_BYTES).zip(out) {
                    hvx::store(out, load(elems));
                }
            }
            _ => {
                // The slice continues into the next row, because a block's vector is longer than
                // the block.
                dequantize(self.dtype, self.bytes, &mut out[..count / 32]);
                self.next(0);
            }
        }
    }
}

/// Converts f16 to f32, two lines for each 64.
#[inline(always)]
fn widen(halves: &[u8], out: &mut [Line]) {
    let (whole, rest) = halves.as_chunks::<LINE_BYTES>();
    let (pairs, _) = out.as_chunks_mut::<2>();
    for (halves, [first, second]) in whole.iter().zip(pairs) {
        let (low, high) = hvx::widen_in_order_f16(hvx::load_bytes(halves));
        hvx::store(first, low);
        hvx::store(second, high);
    }
    if !rest.is_empty() {
        let (low, high) = hvx::widen_in_order_f16(load(rest));
        for (out, v) in out.iter_mut().skip(2 * whole.len()).zip([low, high]) {
            hvx::store(out, v);
        }
    }
}

/// Dequantizes consecutive blocks, a line each.
#[inline(always)]
fn dequantize(dtype: Type, bytes: &[u8], out: &mut [Line]) {
    let size = dtype.block_bytes();
    let mut bytes = bytes;
    for out in out {
        let Some((scale, quants)) = bytes.split_first_chunk() else {
            return;
        };
        let scale = hvx::splat_h(u16::from_le_bytes(*scale));
        let (scale, _) = hvx::widen_mul_f16(scale, hvx::splat_h(ONE_F16));
        let quants = load(quants);
        let words = if dtype == Type::Q4_0 {
            // Low nibbles are elements 0 to 15, high ones 16 to 31. SOURCE: ggml
            // dequantize_row_q4_0.
            let low = hvx::and(quants, hvx::splat_b(15));
            let (nibbles, _) = hvx::swap_blocks::<4>(low, hvx::shr_b(quants, 4));
            hvx::sub_w(hvx::widen_b(nibbles), hvx::splat_w(8))
        } else {
            hvx::widen_b(quants)
        };
        hvx::store(out, hvx::mul_f32(hvx::f32_from_w(words), scale));
        bytes = bytes.get(size..).unwrap_or_default();
    }
}
