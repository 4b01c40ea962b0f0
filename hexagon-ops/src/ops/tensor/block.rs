//! Blocks of 32 elements: quants with a scale, and a minimum where the type has one. The scale
//! comes first, then the minimum, then fifth bits, then the quants. The nibble of element k is the
//! low half of byte k, or the high half of byte k - 16.
//!
//! Source: ggml `block_*` in ggml-common.h, `dequantize_row_*` and `quantize_row_*_ref`.

use super::convert::{narrow_one, widen_one};
use super::shape::Type;
use crate::hvx;

/// Values of the nibbles of IQ4_NL, ascending.
///
/// SOURCE: ggml-common.h, `kvalues_iq4nl`.
pub(super) const IQ4_NL: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];
/// Twice the values of the nibbles of MXFP4.
///
/// SOURCE: ggml-common.h, `kvalues_mxfp4`.
const MXFP4: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
/// Magnitude below which blocks are zero in IQ4_NL.
///
/// SOURCE: ggml-quants.c, `GROUP_MAX_EPS`.
const IQ4_NL_SMALLEST: f32 = 1e-15;

/// Unpacks the nibbles of a block.
#[inline(always)]
fn nibbles(bytes: &[u8]) -> [i32; 32] {
    let mut out = [0; 32];
    if let Some(bytes) = bytes.first_chunk::<16>() {
        for (k, byte) in bytes.iter().enumerate() {
            out[k] = i32::from(byte & 15);
            out[k + 16] = i32::from(byte >> 4);
        }
    }
    out
}

/// Unpacks five-bit numbers: their fifth bits in a word, then nibbles.
#[inline(always)]
fn fives(bytes: &[u8]) -> [i32; 32] {
    let Some((high, low)) = bytes.split_first_chunk() else {
        return [0; 32];
    };
    let high = u32::from_le_bytes(*high);
    let mut out = nibbles(low);
    for (k, quant) in out.iter_mut().enumerate() {
        *quant |= ((high >> k & 1) << 4).cast_signed();
    }
    out
}

/// Returns the f16 at byte `at`.
#[inline(always)]
fn half_at(block: &[u8], at: usize) -> f32 {
    let bytes = block.get(at..).unwrap_or_default();
    bytes.first_chunk().map_or(0.0, |half| widen_one(*half))
}

/// Returns half the power of two that a byte of MXFP4 stands for: the factor of the doubled values.
///
/// Source: ggml `ggml_e8m0_to_fp32_half`.
#[inline(always)]
fn half_power(exponent: u8) -> f32 {
    let e = u32::from(exponent);
    f32::from_bits(if e < 2 {
        0x0020_0000 << e
    } else {
        (e - 1) << 23
    })
}

/// Reads the elements of a block; only the first ones if `out` is shorter.
#[inline(always)]
pub(super) fn dequantize(dtype: Type, block: &[u8], out: &mut [f32]) {
    let tail = |at: usize| block.get(at..).unwrap_or_default();
    let named = |quants: [i32; 32], table: &[i8; 16]| {
        quants.map(|q| i32::from(table[(q & 15).cast_unsigned() as usize]))
    };
    let (quants, scale, addend) = match dtype {
        Type::Q4_0 => (nibbles(tail(2)).map(|q| q - 8), half_at(block, 0), 0.0),
        Type::Q4_1 => (nibbles(tail(4)), half_at(block, 0), half_at(block, 2)),
        Type::Q5_0 => (fives(tail(2)).map(|q| q - 16), half_at(block, 0), 0.0),
        Type::Q5_1 => (fives(tail(4)), half_at(block, 0), half_at(block, 2)),
        Type::Iq4Nl => (named(nibbles(tail(2)), &IQ4_NL), half_at(block, 0), 0.0),
        Type::Mxfp4 => {
            let power = half_power(block.first().copied().unwrap_or(0));
            (named(nibbles(tail(1)), &MXFP4), power, 0.0)
        }
        _ => {
            let mut quants = [0; 32];
            for (quant, byte) in quants.iter_mut().zip(tail(2)) {
                *quant = i32::from(byte.cast_signed());
            }
            (quants, half_at(block, 0), 0.0)
        }
    };
    let quants = hvx::f32_from_w(hvx::load_f32(bytemuck::cast_ref(&quants)));
    let products = hvx::mul_f32(quants, hvx::splat_f32(scale));
    let mut elems = [0.0; 32];
    hvx::store_f32(&mut elems, hvx::add_f32(products, hvx::splat_f32(addend)));
    let len = out.len().min(32);
    out[..len].copy_from_slice(&elems[..len]);
}

/// Writes a block of 32 elements.
#[inline(always)]
pub(super) fn quantize(dtype: Type, elems: &[f32; 32], block: &mut [u8]) {
    match dtype {
        Type::Q8_0 => {
            if let Some(block) = block.first_chunk_mut() {
                quantize_q8_0(elems, block);
            }
        }
        Type::Q4_0 => signed(elems, 8, block),
        Type::Q5_0 => signed(elems, 16, block),
        Type::Q4_1 => with_minimum(elems, 15, block),
        Type::Q5_1 => with_minimum(elems, 31, block),
        Type::Iq4Nl => quantize_iq4_nl(elems, block),
        _ => {}
    }
}

/// Returns the nearest whole numbers to `x · factor + addend` less a half, at most `most`.
#[inline(always)]
#[expect(
    clippy::cast_possible_truncation,
    reason = "bounded by `most`, or saturated"
)]
fn steps(elems: &[f32; 32], offset: f32, factor: f32, addend: f32, most: i32) -> [u8; 32] {
    elems.map(|x| ((x - offset) * factor + addend).min(most as f32) as i32 as u8)
}

/// Returns `1 / x`; 0 for 0.
#[inline(always)]
fn inverse(x: f32) -> f32 {
    if x == 0.0 { 0.0 } else { 1.0 / x }
}

/// Returns the element of the largest magnitude; the first one if there are several.
#[inline(always)]
fn farthest(elems: &[f32; 32]) -> f32 {
    elems.iter().fold(
        0.0_f32,
        |most, x| if x.abs() > most.abs() { *x } else { most },
    )
}

/// Stores nibbles, preceded by fifth bits if quants have them.
#[inline(always)]
fn store(quants: &[u8; 32], is_five: bool, out: &mut [u8]) {
    let (bits, bytes) = out.split_at_mut(if is_five { 4 } else { 0 });
    if is_five {
        let mut high = 0_u32;
        for (k, quant) in quants.iter().enumerate() {
            high |= u32::from(quant >> 4 & 1) << k;
        }
        bits.copy_from_slice(&high.to_le_bytes());
    }
    for (k, byte) in bytes.iter_mut().enumerate().take(16) {
        *byte = quants[k] & 15 | (quants[k + 16] & 15) << 4;
    }
}

/// Writes Q4_0 or Q5_0: the element of the largest magnitude becomes `-half`, exactly.
#[inline(always)]
fn signed(elems: &[f32; 32], half: u8, block: &mut [u8]) {
    let scale = farthest(elems) / -f32::from(half);
    let quants = steps(
        elems,
        0.0,
        inverse(scale),
        f32::from(half) + 0.5,
        2 * i32::from(half) - 1,
    );
    let (head, tail) = block.split_at_mut(2);
    head.copy_from_slice(&narrow_one(scale));
    store(&quants, half == 16, tail);
}

/// Writes Q4_1 or Q5_1: divides the range of the elements into `most` steps.
#[inline(always)]
fn with_minimum(elems: &[f32; 32], most: u8, block: &mut [u8]) {
    let (low, high) = elems.iter().fold((f32::MAX, f32::MIN), |(low, high), x| {
        (low.min(*x), high.max(*x))
    });
    let scale = (high - low) / f32::from(most);
    let quants = steps(elems, low, inverse(scale), 0.5, i32::from(most));
    let (head, tail) = block.split_at_mut(4);
    head[..2].copy_from_slice(&narrow_one(scale));
    head[2..].copy_from_slice(&narrow_one(low));
    store(&quants, most == 31, tail);
}

/// Writes IQ4_NL: the element of the largest magnitude becomes -127, the others the nearest of the
/// 16 values; then the scale is the one of least squared error, weighted by squares.
#[inline(always)]
fn quantize_iq4_nl(elems: &[f32; 32], block: &mut [u8]) {
    let far = farthest(elems);
    let (mut quants, mut scale) = ([0; 32], 0.0);
    if far.abs() >= IQ4_NL_SMALLEST {
        let factor = 1.0 / (far / f32::from(IQ4_NL[0]));
        let (mut product, mut power) = (0.0, 0.0);
        for (quant, x) in quants.iter_mut().zip(elems) {
            for pair in IQ4_NL.windows(2) {
                let middle = (f32::from(pair[0]) + f32::from(pair[1])) * 0.5;
                *quant += u8::from(x * factor >= middle);
            }
            let value = f32::from(IQ4_NL[usize::from(*quant & 15)]);
            let weight = x * x;
            product += weight * value * x;
            power += weight * value * value;
        }
        scale = if power > 0.0 { product / power } else { 0.0 };
    }
    let (head, tail) = block.split_at_mut(2);
    head.copy_from_slice(&narrow_one(scale));
    store(&quants, false, tail);
}

/// Added to a value of magnitude at most 127, it leaves that value, rounded half to even, in the
/// low byte.
const ROUND: f32 = 12_582_912.0;

/// Writes a block of Q8_0: scale `max |x| / 127`, quants `x · (127 / max |x|)`, rounded half to
/// even.
///
/// This follows ggml's code for vector units and not its reference, because quotients halfway
/// between two integers are common with F16 sources.
///
/// SOURCE: ggml-cpu/arch/x86/quants.c and arm/quants.c, `quantize_row_q8_0`.
#[inline(always)]
fn quantize_q8_0(elems: &[f32; 32], block: &mut [u8; 34]) {
    let most = farthest(elems).abs();
    let factor = if most == 0.0 { 0.0 } else { 127.0 / most };
    let (head, quants) = block.split_at_mut(2);
    head.copy_from_slice(&narrow_one(most / 127.0));
    for (quant, x) in quants.iter_mut().zip(elems) {
        let [low, ..] = (x * factor + ROUND).to_bits().to_le_bytes();
        *quant = low;
    }
}
