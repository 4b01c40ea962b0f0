//! Blocks of 32 elements: quants with a scale, and a minimum where the type has one. The scale
//! comes first, then the minimum, then fifth bits, then the quants. The nibble of element k is the
//! low half of byte k, or the high half of byte k - 16.
//!
//! Source: ggml `block_*` in ggml-common.h, `dequantize_row_*` and `quantize_row_*_ref`.

use super::convert::{ONE_F16, narrow_one, store};
use super::shape::Type;
use crate::hvx::{self, Vector, splat_w};
use crate::layout::{LINE_BYTES, Line};

/// Values of the nibbles of IQ4_NL, ascending.
///
/// SOURCE: ggml-common.h, `kvalues_iq4nl`.
const IQ4_NL: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];
/// Twice the values of the nibbles of MXFP4.
///
/// SOURCE: ggml-common.h, `kvalues_mxfp4`.
const MXFP4: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
/// [`IQ4_NL`] for [`hvx::lookup16_b`].
pub(super) static IQ4_TABLE: Line = table(IQ4_NL);
/// [`MXFP4`] for [`hvx::lookup16_b`].
static MXFP4_TABLE: Line = table(MXFP4);
/// The number of each lane.
static LANE_NUMBERS: [u32; LINE_BYTES / 4] = {
    let mut numbers = [0; LINE_BYTES / 4];
    let mut lane = 1;
    while lane < numbers.len() {
        numbers[lane] = numbers[lane - 1] + 1;
        lane += 1;
    }
    numbers
};
/// Magnitude below which blocks are zero in IQ4_NL.
///
/// SOURCE: ggml-quants.c, `GROUP_MAX_EPS`.
const IQ4_NL_SMALLEST: f32 = 1e-15;

/// Returns a table of [`hvx::lookup16_b`].
const fn table(values: [i8; 16]) -> Line {
    let mut line = [0; LINE_BYTES];
    let mut entry = 0;
    while entry < 32 {
        line[2 * entry] = values[entry % 16].cast_unsigned();
        entry += 1;
    }
    Line(line)
}

/// Returns the f16 at byte `at` of a block in all lanes, as f32.
#[inline(always)]
fn half_at(block: &[u8], at: usize) -> Vector {
    let half = block.get(at..).unwrap_or_default().first_chunk();
    let half = half.map_or(0, |half| u16::from_le_bytes(*half));
    let (even, _) = hvx::widen_mul_f16(hvx::splat_h(half), hvx::splat_h(ONE_F16));
    even
}

/// Returns the nibbles of the 16 bytes at byte `at` of a block, as the first 32 bytes of a vector.
///
/// Low nibbles are elements 0 to 15, high ones 16 to 31. SOURCE: ggml `dequantize_row_q4_0`.
#[inline(always)]
fn nibbles(block: &[u8], at: usize) -> Vector {
    let quants = load_quants(block, at);
    let low = hvx::and(quants, hvx::splat_b(15));
    let (nibbles, _) = hvx::swap_blocks::<4>(low, hvx::shr_b(quants, 4));
    nibbles
}

/// Returns the five-bit numbers at byte `at` of a block as words: their fifth bits come first, then
/// their nibbles.
///
/// Bit k belongs to element k. SOURCE: ggml `dequantize_row_q5_0`.
#[inline(always)]
fn fives(block: &[u8], at: usize) -> Vector {
    let bits = block.get(at..).unwrap_or_default().first_chunk();
    let bits = splat_w(bits.map_or(0, |bits| i32::from_le_bytes(*bits)));
    let lanes = hvx::load_f32(bytemuck::cast_ref(&LANE_NUMBERS));
    let fifth = hvx::and(hvx::shr_w_each(bits, lanes), splat_w(1));
    hvx::or(hvx::widen_b(nibbles(block, at + 4)), hvx::shl_w(fifth, 4))
}

/// Loads a vector that begins with the quants at byte `at` of a block. It continues after them,
/// with zeros past the end of `block`.
#[inline(always)]
fn load_quants(block: &[u8], at: usize) -> Vector {
    let bytes = block.get(at..).unwrap_or_default();
    if let Some(whole) = bytes.first_chunk() {
        return hvx::load_bytes(whole);
    }
    // Copies of constant length compile to instructions instead of calls, so vectors stay in
    // registers.
    let [mut padded] = hvx::zeros();
    if let (Some(out), Some(quants)) = (padded.0.first_chunk_mut(), bytes.first_chunk::<32>()) {
        *out = *quants;
    } else if let (Some(out), Some(quants)) =
        (padded.0.first_chunk_mut(), bytes.first_chunk::<16>())
    {
        *out = *quants;
    }
    hvx::load(&padded)
}

/// Returns half the power of two of MXFP4's exponent byte: the factor of the doubled values.
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

/// Returns the 32 elements of the block that `block` begins with.
#[inline(always)]
pub(super) fn values(dtype: Type, block: &[u8]) -> Vector {
    let words = match dtype {
        Type::Q8_0 => hvx::widen_b(load_quants(block, 2)),
        Type::Q4_0 => hvx::sub_w(hvx::widen_b(nibbles(block, 2)), splat_w(8)),
        Type::Q5_0 => hvx::sub_w(fives(block, 2), splat_w(16)),
        Type::Q5_1 => fives(block, 4),
        Type::Iq4Nl => {
            let table = hvx::load(&IQ4_TABLE);
            hvx::widen_b(hvx::lookup16_b(nibbles(block, 2), table))
        }
        Type::Mxfp4 => {
            let table = hvx::load(&MXFP4_TABLE);
            hvx::widen_b(hvx::lookup16_b(nibbles(block, 1), table))
        }
        _ => hvx::widen_b(nibbles(block, 4)),
    };
    let scale = match dtype {
        Type::Mxfp4 => hvx::splat_f32(half_power(block.first().copied().unwrap_or(0))),
        _ => half_at(block, 0),
    };
    let products = hvx::mul_f32(hvx::f32_from_w(words), scale);
    match dtype {
        Type::Q4_1 | Type::Q5_1 => hvx::add_f32(products, half_at(block, 2)),
        _ => products,
    }
}

/// Reads the elements of a block; only the first ones if `out` is shorter.
#[inline(always)]
pub(super) fn dequantize(dtype: Type, block: &[u8], out: &mut [f32]) {
    store(values(dtype, block), out);
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
        Type::Mxfp4 => quantize_mxfp4(elems, block),
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
fn store_quants(quants: &[u8; 32], is_five: bool, out: &mut [u8]) {
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
    store_quants(&quants, half == 16, tail);
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
    store_quants(&quants, most == 31, tail);
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
    store_quants(&quants, false, tail);
}

/// Writes MXFP4: the power of two makes the largest magnitude 4 to 8, and each element becomes the
/// nearest of the 16 values, the first one of two that are as near.
#[inline(always)]
fn quantize_mxfp4(elems: &[f32; 32], block: &mut [u8]) {
    let most = farthest(elems).abs().to_bits().to_le_bytes();
    // The exponent of the largest magnitude, minus the exponent of 4.
    let exponent = (most[3] << 1 | most[2] >> 7).saturating_sub(2);
    let factor = half_power(exponent);
    let mut quants = [0; 32];
    for (quant, x) in quants.iter_mut().zip(elems) {
        let mut best = x.abs();
        for (number, value) in (0_u8..).zip(&MXFP4) {
            let error = (f32::from(*value) * factor - x).abs();
            if error < best {
                (*quant, best) = (number, error);
            }
        }
    }
    if let Some((head, tail)) = block.split_first_mut() {
        *head = exponent;
        store_quants(&quants, false, tail);
    }
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
