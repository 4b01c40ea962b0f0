//! One row along K: its largest magnitude, INT8 by a scale, FP16 by a factor.

use half::f16;
use half::slice::HalfFloatSliceExt as _;
use multiversion::multiversion;

use crate::quant::I8_MAX;
use crate::round::{clamped, low_byte};

/// Returns the largest magnitude of a row as FP32 bits without sign. The order of bits is the order
/// of magnitudes; infinity and NaN are the largest.
#[multiversion(targets("x86_64+avx2"))]
pub fn absmax_bits(row: &[f32]) -> u32 {
    // Signed comparisons exist on every vector unit; with the sign bit cleared, they equal unsigned
    // ones.
    row.iter()
        .map(|x| (x.to_bits() & 0x7fff_ffff).cast_signed())
        .fold(0, i32::max)
        .cast_unsigned()
}

/// Computes `out[k] = clamp(round(row[k] * inverse), -127, 127)`, ties to even; 127 where the
/// product is NaN.
///
/// - `row`, `out`: equally many elements; the excess of the longer one is ignored
#[multiversion(targets("x86_64+avx2"))]
pub fn quantize(row: &[f32], inverse: f32, out: &mut [i8]) {
    for (o, x) in out.iter_mut().zip(row) {
        *o = low_byte(clamped(x * inverse, I8_MAX));
    }
}

/// Computes `out[k] = f16(row[k] * factor)`, ties to even.
///
/// - `row`, `out`: equally many elements; `factor`: a power of two
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
