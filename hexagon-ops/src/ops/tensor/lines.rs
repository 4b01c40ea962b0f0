//! Rows as f32 in lines: what kernels read that go over a row more than once.

use core::ops::Range;

use super::{CHUNK, Chunk, Type, View};
use crate::hvx::{self, Vector};
use crate::layout::{LINE_BYTES, Line};

/// f32 of a line.
const LANES: usize = LINE_BYTES / 4;
/// f16 of a line.
const HALVES: usize = LINE_BYTES / 2;

/// The first 128 of `bytes`; zeros past their end.
#[inline(always)]
fn load(bytes: &[u8]) -> Vector {
    match bytes.first_chunk() {
        Some(whole) => hvx::load_bytes(whole),
        None => {
            let mut padded = Line::ZERO;
            padded.0[..bytes.len()].copy_from_slice(bytes);
            hvx::load(&padded)
        }
    }
}

/// [`View::read_rows`].
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
        let [i2, i3] = self.plane;
        let lines = self.range.len().div_ceil(LANES);
        let (out, rest) = self.out.split_at_mut(lines * self.rows.len());
        for (row, out) in self.rows.zip(out.chunks_exact_mut(lines)) {
            self.view.read_lines([row, i2, i3], self.range.clone(), out);
        }
        rest.fill(Line::ZERO);
    }
}

impl View<'_> {
    /// Elements `range` of rows `rows` (dimension 1) of a plane, as [`Self::read_lines`] gives each; zeros behind them.
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

    /// Elements `range` of row `at` as f32, zeros behind them; row indices are taken modulo the dimensions.
    ///
    /// - `range`: within the row; whole blocks
    /// - `out`: `ceil(range / 32)` lines
    #[inline(always)]
    pub fn read_lines(&self, at: [usize; 3], range: Range<usize>, out: &mut [Line]) {
        if !self.shape.has_dense_rows() {
            return self.read_scattered(at, range, out);
        }
        let dtype = self.shape.dtype;
        let first = range.start / dtype.block() * dtype.block_bytes();
        let bytes = self.tail(self.shape.row(at) + first);
        match dtype {
            Type::F16 => {
                widen(bytes.get(..2 * range.len()).unwrap_or_default(), out);
            }
            Type::F32 => {
                let row = bytes.get(..4 * range.len()).unwrap_or_default();
                for (elems, out) in row.chunks(LINE_BYTES).zip(out) {
                    hvx::store(out, load(elems));
                }
            }
            Type::Q8_0 | Type::Q4_0 => {
                let blocks = range.len() / dtype.block();
                dequantize(dtype, bytes, &mut out[..blocks]);
            }
            _ => self.read_scattered(at, range, out),
        }
    }

    /// Up to 64 elements `range` of row `at` as f16, zeros behind them; as [`Self::read_lines`].
    #[inline(always)]
    pub fn read_halves(&self, at: [usize; 3], range: Range<usize>) -> Vector {
        if self.shape.dtype == Type::F16 && self.shape.has_dense_rows() {
            let first = self.shape.row(at) + 2 * range.start;
            let row = self.tail(first).get(..2 * range.len());
            return load(row.unwrap_or_default());
        }
        let mut lines = [Line::ZERO; 2];
        self.read_lines(at, range, &mut lines);
        let (even, odd) = hvx::deal_w(hvx::load(&lines[0]), hvx::load(&lines[1]));
        hvx::narrow_f32(even, odd)
    }

    /// Row `at`, if it is f32 without gaps.
    #[must_use]
    pub fn floats(&self, at: [usize; 3]) -> Option<&[f32]> {
        if self.shape.dtype != Type::F32 || !self.shape.has_dense_rows() {
            return None;
        }
        let bytes = self.tail(self.shape.row(at)).get(..4 * self.shape.ne[0])?;
        bytemuck::try_cast_slice(bytes).ok()
    }

    /// [`Self::read_lines`] where elements do not follow one another, and for types that are rare here.
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

/// f16 to f32, two lines for each 64.
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

/// Blocks that follow one another, a line each.
#[inline(always)]
fn dequantize(dtype: Type, bytes: &[u8], out: &mut [Line]) {
    let size = dtype.block_bytes();
    for (i, out) in out.chunks_mut(HALVES).enumerate() {
        let blocks = bytes.get(i * HALVES * size..).unwrap_or_default();
        let mut halves = Line::ZERO;
        for (half, block) in halves
            .0
            .as_chunks_mut::<2>()
            .0
            .iter_mut()
            .zip(blocks.chunks(size))
            .take(out.len())
        {
            *half = *block.first_chunk().unwrap_or(&[0; 2]);
        }
        let (low, high) = hvx::widen_in_order_f16(hvx::load(&halves));
        let mut scales = [[0.0; LANES]; 2];
        hvx::store_f32(&mut scales[0], low);
        hvx::store_f32(&mut scales[1], high);
        for (j, (out, scale)) in out.iter_mut().zip(scales.as_flattened()).enumerate() {
            let quants = load(blocks.get(j * size + 2..).unwrap_or_default());
            let words = if dtype == Type::Q4_0 {
                // Low nibbles are elements 0 to 15, high ones 16 to 31. SOURCE: ggml dequantize_row_q4_0.
                let low = hvx::and(quants, hvx::splat_b(15));
                let (nibbles, _) = hvx::swap_blocks::<4>(low, hvx::shr_b(quants, 4));
                hvx::sub_w(hvx::widen_b(nibbles), hvx::splat_w(8))
            } else {
                hvx::widen_b(quants)
            };
            let elems = hvx::mul_f32(hvx::f32_from_w(words), hvx::splat_f32(*scale));
            hvx::store(out, elems);
        }
    }
}
