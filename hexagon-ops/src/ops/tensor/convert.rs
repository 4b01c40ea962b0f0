//! Rows of any type to f32 and back. Chunks of quantized rows start at whole blocks.

use super::Shape;
use super::shape::Type;
use crate::hvx::{self, Vector};
use crate::layout::Line;

/// f16 1.
const ONE_F16: u16 = 0x3c00;

/// Elements of `row` from `k` on as f32. What lies outside the row is left out.
#[inline(always)]
pub(super) fn read(shape: &Shape, row: &[u8], k: usize, out: &mut [f32]) {
    let bytes = row.get(4 * k..4 * (k + out.len())).unwrap_or_default();
    match bytemuck::try_cast_slice::<u8, f32>(bytes) {
        Ok(elems) if is_plain(shape) && elems.len() == out.len() => out.copy_from_slice(elems),
        _ => convert_read(shape, row, k, out),
    }
}

/// Whether rows are f32 without gaps: all that kernels read and write without a call.
#[inline(always)]
fn is_plain(shape: &Shape) -> bool {
    shape.dtype == Type::F32 && shape.has_dense_rows()
}

/// [`read`] for every type and stride: one copy of the code for all kernels.
#[inline(never)]
fn convert_read(shape: &Shape, row: &[u8], k: usize, out: &mut [f32]) {
    hvx::widest(Read { shape, row, k, out });
}

/// [`convert_read`].
struct Read<'a> {
    shape: &'a Shape,
    row: &'a [u8],
    k: usize,
    out: &'a mut [f32],
}

impl hvx::Kernel for Read<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        read_any(self.shape, self.row, self.k, self.out);
    }
}

/// [`convert_read`], inlined.
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
        Type::F16 => {
            let stride = if dense { 2 } else { stride };
            for (group, out) in out.chunks_mut(64).enumerate() {
                let mut line = Line::ZERO;
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
                widen(&line, out);
            }
        }
        Type::Q8_0 | Type::Q4_0 => {
            let (block, bytes) = (shape.dtype.block(), shape.dtype.block_bytes());
            for (i, out) in out.chunks_mut(block).enumerate() {
                let at = (k / block + i) * stride.max(bytes);
                let block = row.get(at..at + bytes).unwrap_or_default();
                dequantize(shape.dtype, block, out);
            }
        }
        Type::I32 | Type::I64 => {}
    }
}

/// Writes elements of `row` from `k` on. What lies outside the row is left out.
#[inline(always)]
pub(super) fn write(shape: &Shape, row: &mut [u8], k: usize, elems: &[f32]) {
    if is_plain(shape) {
        if let Some(bytes) = row.get_mut(4 * k..4 * (k + elems.len())) {
            bytes.copy_from_slice(bytemuck::cast_slice(elems));
        }
    } else {
        convert_write(shape, row, k, elems);
    }
}

/// [`write`] for every type and stride: one copy of the code for all kernels.
#[inline(never)]
fn convert_write(shape: &Shape, row: &mut [u8], k: usize, elems: &[f32]) {
    hvx::widest(Write {
        shape,
        row,
        k,
        elems,
    });
}

/// [`convert_write`].
struct Write<'a> {
    shape: &'a Shape,
    row: &'a mut [u8],
    k: usize,
    elems: &'a [f32],
}

impl hvx::Kernel for Write<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        write_any(self.shape, self.row, self.k, self.elems);
    }
}

/// [`convert_write`], inlined.
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
        Type::F16 => {
            for (group, elems) in elems.chunks(64).enumerate() {
                let line = narrow(elems);
                let at = k + 64 * group;
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
        Type::Q8_0 => {
            let bytes = Type::Q8_0.block_bytes();
            for (i, elems) in elems.chunks(32).enumerate() {
                let at = (k / 32 + i) * stride.max(bytes);
                let block = row.get_mut(at..).unwrap_or_default();
                if let (Some(block), Some(elems)) = (block.first_chunk_mut(), elems.first_chunk()) {
                    quantize_q8_0(elems, block);
                }
            }
        }
        Type::Q4_0 | Type::I32 | Type::I64 => {}
    }
}

/// 32 elements of `elems` from `k` on, zeros past its end.
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

/// Up to 64 elements to f16; zeros behind them.
#[inline(always)]
fn narrow(elems: &[f32]) -> Line {
    let (even, odd) = hvx::deal_w(load(elems, 0), load(elems, 32));
    let mut line = Line::ZERO;
    hvx::store(&mut line, hvx::narrow_f32(even, odd));
    line
}

/// Up to 64 f16 to f32.
#[inline(always)]
fn widen(line: &Line, out: &mut [f32]) {
    let (even, odd) = hvx::widen_mul_f16(hvx::load(line), hvx::splat_h(ONE_F16));
    let (low, high) = hvx::interleave_w(even, odd);
    for (out, v) in out.chunks_mut(32).zip([low, high]) {
        match out.first_chunk_mut::<32>() {
            Some(whole) => hvx::store_f32(whole, v),
            None => {
                let mut lanes = [0.0; 32];
                hvx::store_f32(&mut lanes, v);
                out.copy_from_slice(&lanes[..out.len()]);
            }
        }
    }
}

/// The f32 of one f16.
#[inline(always)]
fn widen_one(half: [u8; 2]) -> f32 {
    let mut line = Line::ZERO;
    line.0[..2].copy_from_slice(&half);
    let mut out = [0.0];
    widen(&line, &mut out);
    out[0]
}

/// Elements of a block.
#[inline(always)]
fn dequantize(dtype: Type, block: &[u8], out: &mut [f32]) {
    let Some((scale, quants)) = block.split_first_chunk::<2>() else {
        return;
    };
    let scale = widen_one(*scale);
    for (k, out) in out.iter_mut().enumerate() {
        let quant = match dtype {
            // Element k is the low nibble of byte k, element k + 16 the high one. SOURCE: ggml dequantize_row_q4_0.
            Type::Q4_0 => i16::from(quants[k % 16] >> (k / 16 * 4) & 15) - 8,
            _ => i16::from(quants[k].cast_signed()),
        };
        *out = f32::from(quant) * scale;
    }
}

/// A block of Q8_0: scale `max |x| / 127`, quants rounded half away from zero.
///
/// Source: ggml `quantize_row_q8_0_ref`.
#[inline(always)]
#[expect(
    clippy::cast_possible_truncation,
    reason = "quotients by the largest magnitude over 127 are at most 127, rounding included"
)]
fn quantize_q8_0(elems: &[f32; 32], block: &mut [u8; 34]) {
    let amax = elems.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    let scale = amax / 127.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    let (head, quants) = block.split_at_mut(2);
    head.copy_from_slice(&narrow(&[scale]).0[..2]);
    for (quant, x) in quants.iter_mut().zip(elems) {
        let x = x * inverse;
        // Towards zero, exact; then the half that is left.
        let whole = x as i32;
        let rest = x - whole as i8 as f32;
        let away = i32::from(rest >= 0.5) - i32::from(rest <= -0.5);
        *quant = ((whole + away) as i8).cast_unsigned();
    }
}
