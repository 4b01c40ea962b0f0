//! One row along K: its largest magnitude, INT8 by a scale, FP16 by a factor.

use half::f16;
use half::slice::HalfFloatSliceExt as _;
use multiversion::multiversion;

use crate::quant::I8_MAX;

/// 1.5 * 2^23: added to a value of magnitude at most 2^22, it leaves that value, rounded to an integer half to even, in
/// the low bits.
pub(crate) const ROUND_MAGIC: f32 = 12_582_912.0;

/// Largest magnitude of a row as FP32 bits without sign: order of bits is order of magnitude, infinity and NaN on top.
#[multiversion(targets("x86_64+avx2"))]
pub fn absmax_bits(row: &[f32]) -> u32 {
    // Signed compares exist on every vector unit; a cleared sign bit makes them agree with unsigned ones.
    row.iter()
        .map(|x| (x.to_bits() & 0x7fff_ffff).cast_signed())
        .fold(0, i32::max)
        .cast_unsigned()
}

/// `out[k] = clamp(round(row[k] * inverse), -127, 127)`, ties to even; 127 where the product is NaN.
///
/// - `row`, `out`: as many elements; what one has more is left alone
#[multiversion(targets("x86_64+avx2"))]
pub fn quantize(row: &[f32], inverse: f32, out: &mut [i8]) {
    for (o, x) in out.iter_mut().zip(row) {
        let v = x * inverse;
        let v = if v < I8_MAX { v } else { I8_MAX };
        let v = if v > -I8_MAX { v } else { -I8_MAX };
        *o = low_byte(v + ROUND_MAGIC);
    }
}

/// Low byte of the representation of `x`.
#[inline(always)]
#[expect(
    clippy::cast_possible_truncation,
    reason = "the low byte is the rounded integer in two's complement"
)]
fn low_byte(x: f32) -> i8 {
    // CAST: with |v| <= 127, the bits of v + ROUND_MAGIC are those of ROUND_MAGIC plus round(v), whose low byte is 0.
    x.to_bits() as i8
}

/// `out[k] = f16(row[k] * factor)`, ties to even.
///
/// - `row`, `out`: as many elements; `factor`: a power of two
///
/// # Panics
/// If `row` and `out` differ in length.
pub fn scale_to_f16(row: &[f32], factor: f32, out: &mut [f16]) {
    if factor == 1.0 {
        out.convert_from_f32_slice(row);
        return;
    }
    let mut scaled = [0.0f32; 256];
    for (part, out) in row.chunks(scaled.len()).zip(out.chunks_mut(256)) {
        let scaled = &mut scaled[..part.len()];
        for (s, x) in scaled.iter_mut().zip(part) {
            *s = x * factor;
        }
        out.convert_from_f32_slice(scaled);
    }
}
