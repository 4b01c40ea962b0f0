//! Rows of any type to f32 and back. Chunks of quantized rows start at whole blocks.

use super::block::{dequantize, quantize};
use super::shape::{Shape, Type};
use super::super_block;
use crate::hvx::{self, Vector, and, splat_w};
use crate::layout::Line;

/// f16 1.
pub(super) const ONE_F16: u16 = 0x3c00;

/// Reads elements of `row` as f32, starting at element `k`. Elements outside the row are left out.
#[inline(always)]
pub(super) fn read(shape: &Shape, row: &[u8], k: usize, out: &mut [f32]) {
    let bytes = row.get(4 * k..4 * (k + out.len())).unwrap_or_default();
    match bytemuck::try_cast_slice::<u8, f32>(bytes) {
        Ok(elems) if is_dense_f32(shape) && elems.len() == out.len() => hvx::copy_f32(out, elems),
        _ => {
            let done = out.len() / 64 * 64;
            let halves = row.get(2 * k..2 * (k + done)).unwrap_or_default();
            if shape.dtype == Type::F16 && shape.has_dense_rows() && done > 0 && !halves.is_empty()
            {
                let (out, rest) = out.split_at_mut(done);
                hvx::widest(Widen { halves, out });
                if !rest.is_empty() {
                    convert_read(shape, row, k + done, rest);
                }
            } else {
                convert_read(shape, row, k, out);
            }
        }
    }
}

/// f16 without gaps to as many f32, a multiple of 64. A separate kernel, so that its loop has no
/// conditions.
struct Widen<'a> {
    halves: &'a [u8],
    out: &'a mut [f32],
}

impl hvx::Kernel for Widen<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let lines = self.halves.as_chunks::<128>().0;
        for (out, halves) in self.out.as_chunks_mut::<64>().0.iter_mut().zip(lines) {
            let (low, high) = hvx::widen_in_order_f16(hvx::load_bytes(halves));
            let [first, second]: &mut [[f32; 32]; 2] = bytemuck::cast_mut(out);
            hvx::store_f32(first, low);
            hvx::store_f32(second, high);
        }
    }
}

/// f32 to as many f16 without gaps, a multiple of 64. A separate kernel, so that its loop has no
/// conditions.
struct Narrow<'a> {
    elems: &'a [f32],
    out: &'a mut [u8],
}

impl hvx::Kernel for Narrow<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let bytes: &[u8] = bytemuck::cast_slice(self.elems);
        // A load and a store of aligned lines share a packet.
        if let (Ok(elems), Ok(out)) = (
            bytemuck::try_cast_slice::<u8, Line>(bytes),
            bytemuck::try_cast_slice_mut::<u8, Line>(&mut *self.out),
        ) {
            for (out, [first, second]) in out.iter_mut().zip(elems.as_chunks().0) {
                let (even, odd) = hvx::deal_w(hvx::load(first), hvx::load(second));
                hvx::store(out, hvx::narrow_f32(even, odd));
            }
            return;
        }
        let groups = self.elems.as_chunks::<64>().0;
        for (out, elems) in self.out.as_chunks_mut::<128>().0.iter_mut().zip(groups) {
            let [first, second]: &[[f32; 32]; 2] = bytemuck::cast_ref(elems);
            let (even, odd) = hvx::deal_w(hvx::load_f32(first), hvx::load_f32(second));
            hvx::store_bytes(out, hvx::narrow_f32(even, odd));
        }
    }
}

/// Converts rows of f32 to rows of as many f16 without gaps inside, a multiple of 64. It is for
/// short rows, for which a call for each row would be slow.
pub(super) struct NarrowRows<'a> {
    /// Elements starting with the first row, and the number of elements from one row to the next.
    pub(super) elems: (&'a [f32], usize),
    /// Bytes starting with the first row, and the number of bytes from one row to the next.
    pub(super) out: (&'a mut [u8], usize),
    /// Elements of a row.
    pub(super) n: usize,
    pub(super) count: usize,
}

impl hvx::Kernel for NarrowRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let ((elems, step), (out, stride)) = (self.elems, self.out);
        for i in 0..self.count {
            let row = elems.get(i * step..i * step + self.n);
            let to = out.get_mut(i * stride..i * stride + 2 * self.n);
            let (Some(row), Some(to)) = (row, to) else {
                return;
            };
            let groups = row.as_chunks::<64>().0;
            for (to, elems) in to.as_chunks_mut::<128>().0.iter_mut().zip(groups) {
                let [first, second]: &[[f32; 32]; 2] = bytemuck::cast_ref(elems);
                let (even, odd) = hvx::deal_w(hvx::load_f32(first), hvx::load_f32(second));
                hvx::store_bytes(to, hvx::narrow_f32(even, odd));
            }
        }
    }
}

/// Rows of 32 f32 to rows of as many f16 that follow each other: two at a time are a vector.
pub(super) struct NarrowPairs<'a> {
    /// Elements starting with the first row, and the number of elements from one row to the next.
    pub(super) elems: (&'a [f32], usize),
    /// A vector for each two rows.
    pub(super) out: &'a mut [[u8; 128]],
}

impl hvx::Kernel for NarrowPairs<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let (mut elems, step) = self.elems;
        for to in self.out {
            let second = elems.get(step..).unwrap_or_default();
            let (Some(first), Some(last)) = (elems.first_chunk(), second.first_chunk()) else {
                return;
            };
            let (even, odd) = hvx::deal_w(hvx::load_f32(first), hvx::load_f32(last));
            hvx::store_bytes(to, hvx::narrow_f32(even, odd));
            elems = second.get(step..).unwrap_or_default();
        }
    }
}

/// Returns `true` if rows are f32 without gaps, which kernels read and write without a function
/// call.
#[inline(always)]
fn is_dense_f32(shape: &Shape) -> bool {
    shape.dtype == Type::F32 && shape.has_dense_rows()
}

/// Reads as [`read`] does, for every type and stride. All kernels share this one copy of the code.
#[inline(never)]
fn convert_read(shape: &Shape, row: &[u8], k: usize, out: &mut [f32]) {
    hvx::widest(ReadElems { shape, row, k, out });
}

/// The arguments of [`convert_read`].
struct ReadElems<'a> {
    shape: &'a Shape,
    row: &'a [u8],
    k: usize,
    out: &'a mut [f32],
}

impl hvx::Kernel for ReadElems<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        read_any(self.shape, self.row, self.k, self.out);
    }
}

/// Implements [`convert_read`], inlined.
#[inline(always)]
fn read_any(shape: &Shape, row: &[u8], k: usize, out: &mut [f32]) {
    let stride = shape.nb[0];
    let dense = shape.has_dense_rows();
    match shape.dtype {
        Type::F32 => {
            let stride = if dense { 4 } else { stride };
            for (i, out) in out.iter_mut().enumerate() {
                let bytes = row.get((k + i) * stride..).unwrap_or_default();
                if let Some(bytes) = bytes.first_chunk() {
                    *out = f32::from_le_bytes(*bytes);
                }
            }
        }
        Type::F16 | Type::Bf16 => {
            let stride = if dense { 2 } else { stride };
            for (group, out) in out.chunks_mut(64).enumerate() {
                let [mut line] = hvx::zeros();
                let at = k + 64 * group;
                if dense {
                    let bytes = row.get(2 * at..2 * (at + out.len())).unwrap_or_default();
                    line.0[..bytes.len()].copy_from_slice(bytes);
                } else {
                    for (i, half) in line.0.as_chunks_mut::<2>().0[..out.len()]
                        .iter_mut()
                        .enumerate()
                    {
                        let bytes = row.get((at + i) * stride..).unwrap_or_default();
                        *half = *bytes.first_chunk().unwrap_or(&[0; 2]);
                    }
                }
                let (even, odd) = if shape.dtype == Type::F16 {
                    hvx::widen_mul_f16(hvx::load(&line), hvx::splat_h(ONE_F16))
                } else {
                    widen_bf16(hvx::load(&line))
                };
                interleave(even, odd, out);
            }
        }
        Type::I32 => {
            let stride = if dense { 4 } else { stride };
            for (group, out) in out.chunks_mut(32).enumerate() {
                let mut words = [0; 32];
                for (i, word) in words.iter_mut().enumerate().take(out.len()) {
                    let bytes = row.get((k + 32 * group + i) * stride..).unwrap_or_default();
                    *word = bytes.first_chunk().map_or(0, |b| i32::from_le_bytes(*b));
                }
                let lanes = hvx::f32_from_w(hvx::load_f32(bytemuck::cast_ref(&words)));
                store(lanes, out);
            }
        }
        Type::I8 | Type::I16 | Type::I64 => {}
        _ => {
            let (block, bytes) = (shape.dtype.block(), shape.dtype.block_bytes());
            for (i, out) in out.chunks_mut(block).enumerate() {
                let at = (k / block + i) * stride.max(bytes);
                let block = row.get(at..at + bytes).unwrap_or_default();
                if shape.dtype.is_super_block() {
                    super_block::dequantize(shape.dtype, block, out);
                } else {
                    dequantize(shape.dtype, block, out);
                }
            }
        }
    }
}

/// Writes elements of `row`, starting at element `k`. Elements outside the row are left out.
#[inline(always)]
pub(super) fn write(shape: &Shape, row: &mut [u8], k: usize, elems: &[f32]) {
    if is_dense_f32(shape) {
        if let Some(bytes) = row.get_mut(4 * k..4 * (k + elems.len())) {
            match bytemuck::try_cast_slice_mut(bytes) {
                Ok(out) => hvx::copy_f32(out, elems),
                Err(_) => bytes.copy_from_slice(bytemuck::cast_slice(elems)),
            }
        }
        return;
    }
    let (whole, rest) = elems.split_at(elems.len() / 64 * 64);
    let halves = row.get_mut(2 * k..2 * (k + whole.len()));
    match halves {
        Some(out) if shape.dtype == Type::F16 && shape.has_dense_rows() && !whole.is_empty() => {
            hvx::widest(Narrow { elems: whole, out });
            if !rest.is_empty() {
                convert_write(shape, row, k + whole.len(), rest);
            }
        }
        _ => convert_write(shape, row, k, elems),
    }
}

/// Writes as [`write()`] does, for every type and stride. All kernels share this one copy of the
/// code.
#[inline(never)]
fn convert_write(shape: &Shape, row: &mut [u8], k: usize, elems: &[f32]) {
    hvx::widest(WriteElems {
        shape,
        row,
        k,
        elems,
    });
}

/// The arguments of [`convert_write`].
struct WriteElems<'a> {
    shape: &'a Shape,
    row: &'a mut [u8],
    k: usize,
    elems: &'a [f32],
}

impl hvx::Kernel for WriteElems<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        write_any(self.shape, self.row, self.k, self.elems);
    }
}

/// Implements [`convert_write`], inlined.
#[inline(always)]
fn write_any(shape: &Shape, row: &mut [u8], k: usize, elems: &[f32]) {
    let stride = shape.nb[0];
    let dense = shape.has_dense_rows();
    match shape.dtype {
        Type::F32 => {
            let stride = if dense { 4 } else { stride };
            for (i, elem) in elems.iter().enumerate() {
                let bytes = row.get_mut((k + i) * stride..).unwrap_or_default();
                if let Some(bytes) = bytes.first_chunk_mut() {
                    *bytes = elem.to_le_bytes();
                }
            }
        }
        Type::F16 | Type::Bf16 => {
            for (group, elems) in elems.chunks(64).enumerate() {
                let (even, odd) = hvx::deal_w(load(elems, 0), load(elems, 32));
                let halves = if shape.dtype == Type::F16 {
                    hvx::narrow_f32(even, odd)
                } else {
                    narrow_bf16(even, odd)
                };
                let at = k + 64 * group;
                let mut line = Line::ZERO;
                hvx::store(&mut line, halves);
                if dense {
                    if let Some(bytes) = row.get_mut(2 * at..2 * (at + elems.len())) {
                        bytes.copy_from_slice(&line.0[..bytes.len()]);
                    }
                } else {
                    for (i, half) in line.0.as_chunks::<2>().0[..elems.len()].iter().enumerate() {
                        let bytes = row.get_mut((at + i) * stride..).unwrap_or_default();
                        if let Some(bytes) = bytes.first_chunk_mut() {
                            *bytes = *half;
                        }
                    }
                }
            }
        }
        Type::I32 => {
            let stride = if dense { 4 } else { stride };
            for (i, elem) in elems.iter().enumerate() {
                let bytes = row.get_mut((k + i) * stride..).unwrap_or_default();
                if let Some(bytes) = bytes.first_chunk_mut() {
                    *bytes = whole(*elem).to_le_bytes();
                }
            }
        }
        Type::I8 | Type::I16 | Type::I64 => {}
        _ => {
            let bytes = shape.dtype.block_bytes();
            for (i, elems) in elems.chunks(32).enumerate() {
                let at = (k / 32 + i) * stride.max(bytes);
                let block = row.get_mut(at..at + bytes);
                if let (Some(block), Some(elems)) = (block, elems.first_chunk()) {
                    quantize(shape.dtype, elems, block);
                }
            }
        }
    }
}

/// Loads the 32 elements of `elems` that start at `k`, with zeros past its end.
#[inline(always)]
fn load(elems: &[f32], k: usize) -> Vector {
    match elems.get(k..).and_then(<[f32]>::first_chunk::<32>) {
        Some(whole) => hvx::load_f32(whole),
        None => {
            let mut padded = [0.0; 32];
            let rest = elems.get(k..).unwrap_or_default();
            padded[..rest.len()].copy_from_slice(rest);
            hvx::load_f32(&padded)
        }
    }
}

/// Writes the lanes of up to 32 elements.
#[inline(always)]
pub(super) fn store(v: Vector, out: &mut [f32]) {
    match out.first_chunk_mut::<32>() {
        Some(whole) => hvx::store_f32(whole, v),
        None => {
            let mut lanes = [0.0; 32];
            hvx::store_f32(&mut lanes, v);
            out.copy_from_slice(&lanes[..out.len()]);
        }
    }
}

/// Writes up to 64 elements: those of even places and those of odd places.
#[inline(always)]
fn interleave(even: Vector, odd: Vector, out: &mut [f32]) {
    let (low, high) = hvx::interleave_w(even, odd);
    for (out, v) in out.chunks_mut(32).zip([low, high]) {
        store(v, out);
    }
}

/// Returns `x` rounded towards zero to a whole number.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "saturates")]
fn whole(x: f32) -> i32 {
    x as i32
}

/// Returns the f32 of the bf16 at even and at odd positions.
#[inline(always)]
pub(super) fn widen_bf16(halves: Vector) -> (Vector, Vector) {
    let high = splat_w(0xffff_0000_u32.cast_signed());
    (hvx::shl_w(halves, 16), and(halves, high))
}

/// Returns the bf16 nearest to f32, ties to even, as the upper halves of words; NaN stays NaN.
#[inline(always)]
fn round_bf16(x: Vector) -> Vector {
    let sign = and(x, splat_w(i32::MIN));
    let magnitude = and(x, splat_w(i32::MAX));
    let infinity = splat_w(0x7f80_0000);
    // The word becomes 1 for NaN, then NaN's quiet bit.
    let above = hvx::max_w(hvx::sub_w(magnitude, infinity), splat_w(0));
    let quiet = hvx::shl_w(hvx::min_w(above, splat_w(1)), 22);
    // NaN's fraction is limited, so that rounding does not carry into the sign.
    let magnitude = hvx::min_w(hvx::or(magnitude, quiet), splat_w(0x7fff_7fff));
    let odd = and(hvx::shr_w(magnitude, 16), splat_w(1));
    let rounded = hvx::add_w(hvx::add_w(magnitude, splat_w(0x7fff)), odd);
    hvx::or(rounded, sign)
}

/// Converts words to bf16, lanes of `even` in even places.
#[inline(always)]
fn narrow_bf16(even: Vector, odd: Vector) -> Vector {
    let high = splat_w(0xffff_0000_u32.cast_signed());
    hvx::or(hvx::shr_w(round_bf16(even), 16), and(round_bf16(odd), high))
}

/// Returns the f16 of one f32.
#[inline(always)]
pub(super) fn narrow_one(x: f32) -> [u8; 2] {
    let v = hvx::splat_f32(x);
    let mut line = Line::ZERO;
    hvx::store(&mut line, hvx::narrow_f32(v, v));
    [line.0[0], line.0[1]]
}

/// Returns the f32 of one f16.
#[inline(always)]
pub(super) fn widen_one(half: [u8; 2]) -> f32 {
    let v = hvx::splat_h(u16::from_le_bytes(half));
    let (even, _) = hvx::widen_mul_f16(v, hvx::splat_h(ONE_F16));
    let mut lanes = [0.0; 32];
    hvx::store_f32(&mut lanes, even);
    lanes[0]
}
