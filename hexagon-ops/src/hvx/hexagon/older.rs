//! Exact replacements of instructions that V68 and V69 lack, by integer operations.
//!
//! Conversions to floats normalize the magnitude by its leading zeros, and round to nearest even.
//! They do not go through qfloat, whose sums differ between chips in their last bits.
//!
//! SOURCE: the architecture of each instruction, LLVM 23's HexagonDepInstrInfo.td: `Vsf = Vw` and
//! `Vhf = Vh` need V73, `Vuh = vmpy(Vuh,Vuh):>>16` needs V69. Not run on a device.

use super::{
    Vector, add_h, add_w, and, arch, asr_h, or, shl_h, shl_w, shr_add_w, shr_h, shr_w, splat_h,
    splat_w, sub_w,
};

vector_ops! {
    /// Returns the magnitudes of signed words: `Q6_Vw_vabs_Vw`.
    abs_w(a) = Q6_Vw_vabs_Vw(a);
    /// Returns the magnitudes of signed halfwords: `Q6_Vh_vabs_Vh`.
    abs_h(a) = Q6_Vh_vabs_Vh(a);
    /// Counts the leading zeros of words: `Q6_Vuw_vcl0_Vuw`.
    zeros_w(a) = Q6_Vuw_vcl0_Vuw(a);
    /// Counts the leading zeros of halfwords: `Q6_Vuh_vcl0_Vuh`.
    zeros_h(a) = Q6_Vuh_vcl0_Vuh(a);
    /// Returns the words of `a` shifted left by the counts in `count`; 0 stays 0 for any count:
    /// `Q6_Vw_vasl_VwVw`.
    shl_w_each(a, count) = Q6_Vw_vasl_VwVw(a, count);
    /// Returns the halfwords of `a` shifted left by the counts in `count`; 0 stays 0 for any count:
    /// `Q6_Vh_vasl_VhVh`.
    shl_h_each(a, count) = Q6_Vh_vasl_VhVh(a, count);
    /// Returns the wrapping difference of halfwords: `Q6_Vh_vsub_VhVh`.
    sub_h(a, b) = Q6_Vh_vsub_VhVh(a, b);
}

/// Returns the f32 value of each signed word, rounded to nearest even: for `Q6_Vsf_equals_Vw`.
#[must_use]
#[inline(always)]
pub fn f32_from_w(a: Vector) -> Vector {
    let magnitude = abs_w(a);
    let zeros = zeros_w(magnitude);
    // After the shift the highest set bit is bit 31, except for 0.
    let left = shl_w_each(magnitude, zeros);
    let mantissa = shr_w(left, 8);
    let half = add_w(splat_w(0x7f), and(mantissa, splat_w(1)));
    let carry = shr_w(add_w(and(left, splat_w(0xff)), half), 8);
    // The mantissa's leading 1 adds 1 to the exponent, whose bias is 127.
    let exponent = sub_w(splat_w((127 + 30) << 23), shl_w(zeros, 23));
    let exponent = and(exponent, shr_add_w(splat_w(0), left, 31));
    let sign = and(a, splat_w(i32::MIN));
    or(add_w(add_w(exponent, mantissa), carry), sign)
}

/// As [`f32_from_w`], for magnitudes of at most 2^24, which need no rounding.
#[must_use]
#[inline(always)]
pub fn f32_from_small_w(a: Vector) -> Vector {
    let magnitude = abs_w(a);
    let zeros = zeros_w(magnitude);
    let left = shl_w_each(magnitude, zeros);
    let exponent = sub_w(splat_w((127 + 30) << 23), shl_w(zeros, 23));
    let exponent = and(exponent, shr_add_w(splat_w(0), left, 31));
    or(add_w(exponent, shr_w(left, 8)), and(a, splat_w(i32::MIN)))
}

/// Returns the f16 value of each signed halfword, rounded to nearest even: for `Q6_Vhf_equals_Vh`.
#[must_use]
#[inline(always)]
pub fn f16_from_h(a: Vector) -> Vector {
    let magnitude = abs_h(a);
    let zeros = zeros_h(magnitude);
    let left = shl_h_each(magnitude, zeros);
    let mantissa = shr_h(left, 5);
    let half = add_h(splat_h(0xf), and(mantissa, splat_h(1)));
    let carry = shr_h(add_h(and(left, splat_h(0x1f)), half), 5);
    add_h(from_mantissa(a, zeros, left, mantissa), carry)
}

/// As [`f16_from_h`], for magnitudes of at most 2047, which need no rounding.
#[must_use]
#[inline(always)]
pub fn f16_from_small_h(a: Vector) -> Vector {
    let magnitude = abs_h(a);
    let zeros = zeros_h(magnitude);
    let left = shl_h_each(magnitude, zeros);
    from_mantissa(a, zeros, left, shr_h(left, 5))
}

/// Returns the f16 with the signs of `a` and the eleven bits of `mantissa`.
///
/// - `left`: the magnitude shifted left by `zeros`, so that bit 15 is set unless it is 0
#[inline(always)]
fn from_mantissa(a: Vector, zeros: Vector, left: Vector, mantissa: Vector) -> Vector {
    // The mantissa's leading 1 adds 1 to the exponent, whose bias is 15.
    let exponent = sub_h(splat_h((15 + 14) << 10), shl_h(zeros, 10));
    let exponent = and(exponent, asr_h(left, 15));
    let sign = and(a, splat_h(0x8000));
    or(add_h(exponent, mantissa), sign)
}

/// Returns the upper halves of the products of unsigned halfwords: `Q6_Wuw_vmpy_VuhVuh`,
/// `Q6_Vh_vshuffo_VhVh`, for `Q6_Vuh_vmpy_VuhVuh_rs16`.
#[cfg(not(target_feature = "hvxv69"))]
#[must_use]
#[inline(always)]
pub fn mul_upper_h(a: Vector, b: Vector) -> Vector {
    // SAFETY: [HVX] of the module doc.
    let (even, odd) = super::split(unsafe { arch::Q6_Wuw_vmpy_VuhVuh(a.0, b.0) });
    super::interleave_odd_h(even, odd)
}
