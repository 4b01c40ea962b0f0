//! Functions of f32 lanes: range reduction, then a polynomial. Errors are relative to the exact value of the f32 argument.
//!
//! | function | largest error | method |
//! |---|---|---|
//! | [`exp`] | 2e-7 | `2^n · P(r)`, `r = x - n ln 2` in two parts |
//! | [`reciprocal`] | 3e-7 | a linear estimate of the fraction, three Newton steps |
//! | [`sqrt`], [`rsqrt`] | 5e-7 | an estimate by half the exponent, three Newton steps |
//! | [`tanh`] | 5e-7 | odd polynomial below 0.625, else by [`exp`] |
//! | [`exp_m1`] | 6e-7 | the polynomial of [`exp`] below 0.34, else by it |
//! | [`ln`], [`softplus`] | 3e-7 | `n ln 2 + P(f)`, fraction 1 + f between the roots of 1/2 and 2 |
//! | [`floor`], [`trunc`], [`round`] | exact | sums with 2^23 |
//! | [`erf`] | 1e-6 | odd polynomial below 0.927, else `1 - exp(-Q(x))` |
//! | [`sin_cos`] | 2e-7 absolute, for angles below 1e5 | quarter turns in three parts, two polynomials |
//!
//! Subnormal arguments and results may be zero. NaN is outside the contract: the device's maxima do not pass it on.
//!
//! The polynomials are Chebyshev fits (mpmath `chebyfit`, 40 digits) of the functions named beside them.

mod logarithm;
mod round;
pub mod scalar;

pub use logarithm::{ln, softplus};
pub use round::{floor, round, trunc};

use crate::hvx::{
    self, Vector, add_f32, add_w, and, max_f32, min_f32, mul_f32, or, select_gt_f32, shl_w, shr_w,
    splat_f32, splat_w, sub_f32, sub_w,
};

/// 1.5 · 2^23: adding it rounds to a whole number, which the low bits of the sum then hold.
const ROUNDER: f32 = 12_582_912.0;
/// All bits but the sign.
const MAGNITUDE: i32 = 0x7fff_ffff;
/// The sign.
const SIGN: i32 = i32::MIN;

/// A polynomial in `x`, highest power first.
#[inline(always)]
fn polynomial<const N: usize>(x: Vector, coefficients: [f32; N]) -> Vector {
    let mut sum = splat_f32(coefficients[0]);
    for c in &coefficients[1..] {
        sum = add_f32(mul_f32(sum, x), splat_f32(*c));
    }
    sum
}

/// Magnitude of each lane.
#[must_use]
#[inline(always)]
pub fn abs(x: Vector) -> Vector {
    and(x, splat_w(MAGNITUDE))
}

/// `-x`.
#[must_use]
#[inline(always)]
pub fn neg(x: Vector) -> Vector {
    // The sum of sign bits is their exclusive or.
    add_w(x, splat_w(SIGN))
}

/// `magnitude`, which is not negative, with the sign of `x`.
#[inline(always)]
fn with_sign(magnitude: Vector, x: Vector) -> Vector {
    or(magnitude, and(x, splat_w(SIGN)))
}

/// `e^r - 1` for magnitudes up to ln 2 / 2.
#[inline(always)]
fn exp_rest(r: Vector) -> Vector {
    // (e^r - 1 - r) / r^2 for |r| <= ln 2 / 2, to 6.5e-8.
    let p = polynomial(
        r,
        [
            1.392_620_3e-3,
            8.363_195e-3,
            4.166_655_4e-2,
            1.666_657_7e-1,
            0.5,
        ],
    );
    add_f32(mul_f32(mul_f32(r, r), p), r)
}

/// `e^x - 1`; bounds as [`exp`].
#[must_use]
#[inline(always)]
pub fn exp_m1(x: Vector) -> Vector {
    let large = sub_f32(exp(x), splat_f32(1.0));
    select_gt_f32(abs(x), splat_f32(0.34), large, exp_rest(x))
}

/// `e^x`: 0 below -87.33, infinity above 88.72.
#[must_use]
#[inline(always)]
pub fn exp(x: Vector) -> Vector {
    // Bounds of normal results: ln 2^-126, and the largest f32 whose exponential is finite.
    let (low, high) = (splat_f32(-87.336_54), splat_f32(88.722_83));
    let bounded = min_f32(max_f32(x, low), high);
    let rounder = splat_f32(ROUNDER);
    let biased = add_f32(
        mul_f32(bounded, splat_f32(core::f32::consts::LOG2_E)),
        rounder,
    );
    let n = sub_f32(biased, rounder);
    // ln 2 in a part of 15 bits, whose products with n are exact, and the rest.
    let r = sub_f32(bounded, mul_f32(n, splat_f32(0.693_145_75)));
    let r = sub_f32(r, mul_f32(n, splat_f32(1.428_606_8e-6)));
    let p = add_f32(exp_rest(r), splat_f32(1.0));
    let scaled = add_w(p, shl_w(biased, 23));
    // Signs of differences, as masks: a comparison would cost twice as much as all of the above.
    let is_below = shr_w(sub_f32(x, low), 31);
    let kept = and(scaled, sub_w(is_below, splat_w(1)));
    let is_above = shr_w(sub_f32(high, x), 31);
    let infinity = and(splat_f32(f32::INFINITY), sub_w(splat_w(0), is_above));
    // Neither is negative, and infinity is larger than what is finite.
    hvx::max_w(kept, infinity)
}

/// `1 / x`: infinity for zeros and subnormals, zero for infinities and magnitudes from 2^127 on.
#[must_use]
#[inline(always)]
pub fn reciprocal(x: Vector) -> Vector {
    let magnitude = abs(x);
    let exponent = and(x, splat_w(0x7f80_0000));
    // The fraction in [1, 2), and its inverse: the estimate is 12 % off, then 1.5e-2, 2.1e-4, 4.4e-8.
    let fraction = or(and(x, splat_w(0x007f_ffff)), splat_f32(1.0));
    let mut r = sub_w(splat_w(0x7ef3_11c7), fraction);
    for _ in 0..3 {
        r = mul_f32(r, sub_f32(splat_f32(2.0), mul_f32(fraction, r)));
    }
    let power = hvx::max_w(sub_w(splat_w(254 << 23), exponent), splat_w(0));
    let normal = mul_f32(r, power);
    let smallest = splat_f32(f32::MIN_POSITIVE);
    let infinity = splat_f32(f32::INFINITY);
    with_sign(select_gt_f32(smallest, magnitude, infinity, normal), x)
}

/// `a / b`: the product with the [`reciprocal`].
#[must_use]
#[inline(always)]
pub fn divide(a: Vector, b: Vector) -> Vector {
    mul_f32(a, reciprocal(b))
}

/// `1 / sqrt(x)` for normal positive `x`.
#[must_use]
#[inline(always)]
pub fn rsqrt(x: Vector) -> Vector {
    let mut r = sub_w(splat_w(0x5f37_59df), hvx::shr_w(x, 1));
    let half = mul_f32(x, splat_f32(0.5));
    // The estimate is 3.5 % off, then 1.8e-3, 4.7e-6, 3e-11.
    for _ in 0..3 {
        let error = mul_f32(mul_f32(half, r), r);
        r = mul_f32(r, sub_f32(splat_f32(1.5), error));
    }
    r
}

/// `sqrt(x)`; NaN below zero.
#[must_use]
#[inline(always)]
pub fn sqrt(x: Vector) -> Vector {
    let finite = mul_f32(x, rsqrt(x));
    let result = select_gt_f32(x, splat_f32(f32::MAX), x, finite);
    select_gt_f32(splat_w(0), x, splat_f32(f32::NAN), result)
}

/// `1 / (1 + e^-x)`.
#[must_use]
#[inline(always)]
pub fn sigmoid(x: Vector) -> Vector {
    reciprocal(add_f32(exp(neg(x)), splat_f32(1.0)))
}

/// `x / (1 + e^-x)`.
#[must_use]
#[inline(always)]
pub fn silu(x: Vector) -> Vector {
    mul_f32(x, sigmoid(x))
}

/// Hyperbolic tangent.
#[must_use]
#[inline(always)]
pub fn tanh(x: Vector) -> Vector {
    let magnitude = abs(x);
    let square = mul_f32(x, x);
    // (tanh x / x - 1) / x^2 for x^2 <= 0.3907, to 4.3e-8.
    let p = polynomial(
        square,
        [
            -6.096_299_5e-3,
            2.099_689_4e-2,
            -5.385_085e-2,
            1.333_277e-1,
            -3.333_332_9e-1,
        ],
    );
    let small = add_f32(x, mul_f32(x, mul_f32(square, p)));
    let e = exp(add_f32(magnitude, magnitude));
    let tail = mul_f32(reciprocal(add_f32(e, splat_f32(1.0))), splat_f32(2.0));
    let large = with_sign(sub_f32(splat_f32(1.0), tail), x);
    select_gt_f32(magnitude, splat_f32(0.625), large, small)
}

/// Error function.
#[must_use]
#[inline(always)]
pub fn erf(x: Vector) -> Vector {
    // From 4 on it is 1 to within 2e-8.
    let t = min_f32(abs(x), splat_f32(4.0));
    let square = mul_f32(t, t);
    // erf x / x for x^2 <= 0.86, to 4.5e-10.
    let p = polynomial(
        square,
        [
            8.351_897e-5,
            -8.138_792e-4,
            5.200_729_6e-3,
            -2.685_929_7e-2,
            1.128_369_4e-1,
            -3.761_263_4e-1,
            core::f32::consts::FRAC_2_SQRT_PI,
        ],
    );
    // -ln(1 - erf x) for x in [0.92, 4], to 4.2e-7.
    let q = polynomial(
        t,
        [
            1.380_193_6e-5,
            -3.265_363_2e-4,
            3.504_952e-3,
            -2.290_096_8e-2,
            1.039_831_4e-1,
            6.381_774e-1,
            1.126_601_6,
            5.518_093e-4,
        ],
    );
    let large = sub_f32(splat_f32(1.0), exp(neg(q)));
    let small = mul_f32(t, p);
    with_sign(select_gt_f32(t, splat_f32(0.927), large, small), x)
}

/// `x / 2 · (1 + tanh(sqrt(2 / π) · (x + 0.044715 x^3)))`.
#[must_use]
#[inline(always)]
pub fn gelu(x: Vector) -> Vector {
    let cubic = mul_f32(mul_f32(x, x), splat_f32(0.044_715));
    let slope = mul_f32(x, splat_f32(0.797_884_6));
    let inner = mul_f32(slope, add_f32(cubic, splat_f32(1.0)));
    // (1 + tanh y) / 2 = 1 / (1 + e^-2y), which does not cancel.
    mul_f32(x, sigmoid(add_f32(inner, inner)))
}

/// `x / (1 + e^(-1.702 x))`.
#[must_use]
#[inline(always)]
pub fn gelu_quick(x: Vector) -> Vector {
    mul_f32(x, sigmoid(mul_f32(x, splat_f32(1.702))))
}

/// `x / 2 · (1 + erf(x / sqrt 2))`.
#[must_use]
#[inline(always)]
pub fn gelu_erf(x: Vector) -> Vector {
    let erf = erf(mul_f32(x, splat_f32(core::f32::consts::FRAC_1_SQRT_2)));
    mul_f32(mul_f32(x, splat_f32(0.5)), add_f32(erf, splat_f32(1.0)))
}

/// (Sine, cosine) of angles in radians.
///
/// The quarter turns n are exact up to angles of 1e5; beyond, the angle's own last bit is the error, and from 2^22
/// quarter turns on results mean nothing.
#[must_use]
#[inline(always)]
pub fn sin_cos(angle: Vector) -> (Vector, Vector) {
    let rounder = splat_f32(ROUNDER);
    let biased = add_f32(
        mul_f32(angle, splat_f32(core::f32::consts::FRAC_2_PI)),
        rounder,
    );
    let n = sub_f32(biased, rounder);
    // π / 2 in parts of 8 and 11 bits, whose products with n up to 2^13 (2^16 for the first) are exact, and the rest.
    let mut r = angle;
    for part in [1.570_312_5, 4.837_513e-4, 7.549_79e-8] {
        r = sub_f32(r, mul_f32(n, splat_f32(part)));
    }
    let square = mul_f32(r, r);
    // (sin r / r - 1) / r^2 to 2e-8, (cos r - 1 + r^2 / 2) / r^4 to 2e-9, for |r| <= π / 4.
    let s = polynomial(square, [-1.958_764e-4, 8.332_747e-3, -1.666_666_5e-1]);
    let sine = add_f32(r, mul_f32(mul_f32(r, square), s));
    let c = polynomial(square, [2.454_769e-5, -1.388_830_2e-3, 4.166_666_5e-2]);
    let c = add_f32(mul_f32(mul_f32(square, square), c), splat_f32(1.0));
    let cosine = sub_f32(c, mul_f32(square, splat_f32(0.5)));
    // Odd quarters exchange the two; bit 1 of n is the sine's sign, bit 1 of n + 1 the cosine's.
    let odd = hvx::f32_from_w(and(biased, splat_w(1)));
    let zero = splat_w(0);
    let swapped_sine = select_gt_f32(odd, zero, cosine, sine);
    let swapped_cosine = select_gt_f32(odd, zero, sine, cosine);
    let sine_sign = shl_w(and(biased, splat_w(2)), 30);
    let next = add_w(biased, splat_w(1));
    let cosine_sign = shl_w(and(next, splat_w(2)), 30);
    (
        add_w(swapped_sine, sine_sign),
        add_w(swapped_cosine, cosine_sign),
    )
}
