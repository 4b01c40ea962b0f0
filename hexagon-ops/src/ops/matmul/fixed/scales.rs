//! Scales of weights in fixed point: the f16 of a plane become integers of 16 bits with one power
//! of two for each column.
//!
//! ```text
//! E          = largest exponent of a column's scales
//! scale      = ± mantissa (11 bits) · 2^(4 - bits) / 2^(E - exponent)       rounded
//! column     = 2^(E - 29 + bits) · 2^15, f32: the factor of the column's sums; NaN if a scale is not finite
//! ```

use super::Bits;
use crate::hvx::{self, Vector};
use crate::layout::Line;

/// Replaces the f16 of a strip's scales, and writes the factor of each column to `column`.
pub(in super::super) fn fix_scales(scales: &mut [Line], bits: Bits, column: &mut Line) {
    hvx::widest(FixScales {
        scales,
        bits,
        column,
    });
}

struct FixScales<'a> {
    scales: &'a mut [Line],
    bits: Bits,
    column: &'a mut Line,
}

impl hvx::Kernel for FixScales<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let one = hvx::splat_h(1);
        let mut largest = hvx::splat_w(0);
        for line in self.scales.iter() {
            largest = hvx::larger_f16(largest, hvx::load(line));
        }
        // A word has two tiles of one column.
        let other = hvx::or(hvx::shl_w(largest, 16), hvx::shr_w(largest, 16));
        // Subnormal numbers have the exponent of the smallest normal ones.
        let exponent = hvx::max_h(hvx::shr_h(hvx::max_h(largest, other), 10), one);
        let bits = self.bits.scales;
        let most = hvx::add_h(exponent, hvx::splat_h(bits));
        for line in self.scales.iter_mut() {
            let fixed = fixed(hvx::load(line), most);
            hvx::store(line, fixed);
        }
        let exponent = hvx::and(exponent, hvx::splat_w(0xffff));
        let bias = hvx::splat_w(127 - 29 + 15 + i32::from(bits));
        let power = hvx::shl_w(hvx::add_w(exponent, bias), 23);
        // 31 is the exponent of infinity and NaN.
        let is_nan = hvx::shr_w(hvx::add_w(exponent, hvx::splat_w(1)), 5);
        hvx::store(
            self.column,
            hvx::or(power, hvx::sub_w(hvx::splat_w(0), is_nan)),
        );
    }
}

/// Returns f16 as integers, multiples of 2^(`most` - 29).
#[inline(always)]
fn fixed(scales: Vector, most: Vector) -> Vector {
    let one = hvx::splat_h(1);
    let magnitude = hvx::and(scales, hvx::splat_h(0x7fff));
    let exponent = hvx::shr_h(magnitude, 10);
    let first_bit = hvx::shl_h(hvx::min_h(exponent, one), 10);
    let mantissa = hvx::or(hvx::and(magnitude, hvx::splat_h(0x3ff)), first_bit);
    // most - exponent, by the complement of the exponent.
    let complement = hvx::xor(hvx::max_h(exponent, one), hvx::splat_h(0xffff));
    let count = hvx::add_h(hvx::add_h(most, complement), one);
    let count = hvx::min_h(count, hvx::splat_h(15));
    // One bit more than the result has, which is rounded.
    let twice = hvx::shr_h_each(hvx::shl_h(mantissa, 5), count);
    let rounded = hvx::shr_h(hvx::add_h(twice, one), 1);
    let sign = hvx::asr_h(scales, 15);
    hvx::add_h(hvx::xor(rounded, sign), hvx::shr_h(scales, 15))
}
