//! Functions of f32 lanes: range reduction, then a polynomial. Errors are relative to the exact
//! value of the f32 argument.
//!
//! | function | largest error | method |
//! |---|---|---|
//! | [`exp`] | 2e-7 | `2^n · P(r)`, `r = x - n ln 2` in two parts |
//! | [`exp_below_one`] | 3e-6 for x of -30, less for larger x | `2^n · P(f)` |
//! | [`reciprocal`] | 3e-7 | a linear estimate of the fraction, three Newton steps |
//! | [`divide`] | rounded once | the product with [`reciprocal`], and the rest |
//! | [`sqrt`], [`rsqrt`] | 5e-7 | an estimate by half the exponent, three Newton steps |
//! | [`tanh`] | 4e-6 | odd polynomial below 0.625, else by [`sigmoid`] |
//! | [`exp_m1`] | 6e-7 | the polynomial of [`exp`] below 0.34, else by it |
//! | [`ln`], [`ln_1p`] | 3e-7 | `n ln 2 + P(f)`, fraction 1 + f between the roots of 1/2 and 2 |
//! | [`floor`], [`trunc`], [`round`] | exact | sums with 2^23 |
//! | [`sigmoid`], [`silu`], [`gelu`] | 1e-5 | `2^n · P(f)` of fewer terms, an estimate, two Newton steps |
//! | [`erf`] | 1e-6 | odd polynomial below 0.927, else `1 - exp(-Q(x))` |
//! | [`sin_cos`] | 3e-7 absolute, for angles up to 2^20 | quarter turns in three parts, two polynomials |
//!
//! Subnormal arguments and results may be zero. NaN is outside the contract, because the device's
//! maximum does not propagate it; [`or_nan`] adds it where results must have it.
//!
//! The polynomials are Chebyshev fits (mpmath `chebyfit`, 40 digits) of the functions that the
//! comments name.

mod logarithm;
mod round;
pub mod scalar;

pub use logarithm::{ln, ln_1p};
pub use round::{floor, round, trunc};

use crate::hvx::{
    self, Accumulator, Vector, add_f32, add_w, and, max_f32, min_f32, mul_f32, or, select_gt_f32,
    shl_w, splat_f32, splat_w, sub_f32, sub_w,
};

/// 1.5 · 2^23. Adding it rounds to a whole number, which is then in the low bits of the sum.
const ROUNDER: f32 = 12_582_912.0;
/// Coefficients of 2^f, highest power first.
const POWER_OF_TWO: [f32; 6] = [
    1.327_647_2e-3,
    9.675_542e-3,
    5.550_713e-2,
    2.402_212e-1,
    6.931_469_4e-1,
    1.0,
];
/// All bits but the sign.
const MAGNITUDE: i32 = 0x7fff_ffff;
/// The sign.
const SIGN: i32 = i32::MIN;

/// Evaluates a polynomial in `x`, highest power first. `beside` as in [`Accumulator::constant`].
#[inline(always)]
fn polynomial<const N: usize>(
    x: Accumulator,
    beside: Vector,
    coefficients: [f32; N],
) -> Accumulator {
    let mut sum = Accumulator::constant(coefficients[0], beside);
    for c in &coefficients[1..] {
        sum = sum.times(x).plus_f32(splat_f32(*c));
    }
    sum
}

/// Returns the magnitude of each lane.
#[must_use]
#[inline(always)]
pub fn abs(x: Vector) -> Vector {
    and(x, splat_w(MAGNITUDE))
}

/// Returns `-x`.
#[must_use]
#[inline(always)]
pub fn neg(x: Vector) -> Vector {
    // Adding the sign bit flips it.
    add_w(x, splat_w(SIGN))
}

/// Returns `result`, and NaN where `x` is NaN. By integers, because comparisons of f32 may not have
/// NaN.
#[must_use]
#[inline(always)]
pub fn or_nan(x: Vector, result: Vector) -> Vector {
    // `rest` is negative for NaN, whose bits are above those of infinity.
    let rest = sub_w(splat_f32(f32::INFINITY), abs(x));
    or(result, hvx::shr_add_w(splat_w(0), rest, 31))
}

/// Returns `magnitude`, which is not negative, with the sign of `x`.
#[inline(always)]
fn with_sign(magnitude: Vector, x: Vector) -> Vector {
    or(magnitude, and(x, splat_w(SIGN)))
}

/// Returns `e^r - 1` for magnitudes up to ln 2 / 2. `beside` as in [`Accumulator::constant`].
#[inline(always)]
fn exp_rest(r: Accumulator, beside: Vector) -> Accumulator {
    // (e^r - 1 - r) / r^2 for |r| <= ln 2 / 2, to 6.5e-8.
    let p = polynomial(
        r,
        beside,
        [
            1.392_620_3e-3,
            8.363_195e-3,
            4.166_655_4e-2,
            1.666_657_7e-1,
            0.5,
        ],
    );
    r.times(r).times(p).plus(r)
}

/// Returns `e^x - 1`; bounds as [`exp`].
#[must_use]
#[inline(always)]
pub fn exp_m1(x: Vector) -> Vector {
    let large = sub_f32(exp(x), splat_f32(1.0));
    let small = exp_rest(Accumulator::from_f32(x), x).to_f32();
    select_gt_f32(abs(x), splat_f32(0.34), large, small)
}

/// Returns `e^x`: less than 2^-126 below -87.33, 0 at -88.1 and below, infinity above 88.72.
#[must_use]
#[inline(always)]
pub fn exp(x: Vector) -> Vector {
    // The powers of two at these limits are just beyond the normal numbers.
    let bounded = min_f32(max_f32(x, splat_f32(-88.1)), splat_f32(89.0));
    let scaled = exp_bounded(bounded, x);
    // Below the exponents of subnormal numbers the word is negative; above the largest exponent it
    // is more than infinity.
    let infinity = splat_f32(f32::INFINITY);
    hvx::min_w(hvx::max_w(scaled, splat_w(0)), infinity)
}

/// Returns `e^x` for results that are normal numbers; beyond them, the exponent leaves its bits.
/// `beside` as in [`Accumulator::constant`].
#[inline(always)]
fn exp_bounded(bounded: Vector, beside: Vector) -> Vector {
    let rounder = splat_f32(ROUNDER);
    let turns = Accumulator::product(bounded, splat_f32(core::f32::consts::LOG2_E));
    // The whole number is in the low bits of its f32 form.
    let biased = turns.plus_f32(rounder).to_f32();
    let n = hvx::unbias(biased, ROUNDER);
    // ln 2 in two parts: one of 15 bits, whose products with n are exact, and the remainder.
    let r = Accumulator::product(n, splat_f32(-0.693_145_75)).plus_f32(bounded);
    let r = r.mul_add(n, splat_f32(-1.428_606_8e-6));
    let p = exp_rest(r, beside).plus_f32(splat_f32(1.0)).to_f32();
    add_w(p, shl_w(biased, 23))
}

/// Returns `e^x` of x up to 0: 0 below -88.
#[must_use]
#[inline(always)]
pub fn exp_below_one(x: Vector) -> Vector {
    let y = mul_f32(x, splat_f32(core::f32::consts::LOG2_E));
    let bounded = max_f32(y, splat_f32(-150.0));
    let biased = add_f32(bounded, splat_f32(ROUNDER));
    let n = hvx::unbias(biased, ROUNDER);
    // 2^f for |f| <= 1/2, to 7.5e-8.
    let p = polynomial(Accumulator::difference(bounded, n), x, POWER_OF_TWO);
    // Below the exponents of subnormal numbers the word is negative.
    hvx::max_w(add_w(p.to_f32(), shl_w(biased, 23)), splat_w(0))
}

/// Returns `1 / x`: infinity for zeros and subnormals, zero for infinities and magnitudes of
/// 2^127 or more.
#[must_use]
#[inline(always)]
pub fn reciprocal(x: Vector) -> Vector {
    let magnitude = abs(x);
    let normal = inverse(magnitude);
    let smallest = splat_f32(f32::MIN_POSITIVE);
    let infinity = splat_f32(f32::INFINITY);
    with_sign(select_gt_f32(smallest, magnitude, infinity, normal), x)
}

/// Returns `1 / x` of normal positive `x` and of infinity; zero for 2^127 and more.
#[inline(always)]
fn inverse(x: Vector) -> Vector {
    let exponent = and(x, splat_w(0x7f80_0000));
    let fraction = or(and(x, splat_w(0x007f_ffff)), splat_f32(1.0));
    let power = hvx::max_w(sub_w(splat_w(254 << 23), exponent), splat_w(0));
    mul_f32(inverse_fraction(fraction), power)
}

/// Returns `1 / x` of `x` in [1, 2).
#[inline(always)]
fn inverse_fraction(x: Vector) -> Vector {
    // The estimate is 12 % off; each step reduces the error: 1.5e-2, 2.1e-4, 4.4e-8.
    let estimate = sub_w(splat_w(0x7ef3_11c7), x);
    let minus = Accumulator::from_f32(neg(x));
    let mut r = Accumulator::from_f32(estimate);
    for _ in 0..3 {
        r = r.times(minus.times(r).plus_f32(splat_f32(2.0)));
    }
    r.to_f32()
}

/// Returns `a / b`, rounded once where both numbers and the quotient are normal numbers below
/// 2^127. It is the product with the [`reciprocal`], plus the remainder of `a` times the
/// reciprocal. Infinities, zeros and NaN give the results of IEEE arithmetic.
#[must_use]
#[inline(always)]
pub fn divide(a: Vector, b: Vector) -> Vector {
    let inverse = reciprocal(b);
    let quotient = mul_f32(a, inverse);
    // Splits numbers into halves of 12 bits, whose products are exact.
    let halves = |x: Vector| {
        let high = and(x, splat_w(!0xfff));
        (high, sub_f32(x, high))
    };
    let (high, low) = halves(neg(quotient));
    let (b_high, b_low) = halves(b);
    let rest = Accumulator::product(high, b_high).plus_f32(a);
    let rest = rest.mul_add(high, b_low).mul_add(low, b_high);
    let rest = rest.mul_add(low, b_low).to_f32();
    let better = add_f32(quotient, mul_f32(rest, inverse));
    // All bits are set where quotient and divisor are finite. Elsewhere the computed remainder is
    // meaningless.
    let largest = hvx::max_w(abs(quotient), abs(b));
    let above = sub_w(largest, splat_f32(f32::INFINITY));
    let is_finite = hvx::shr_add_w(splat_w(0), above, 31);
    let kept = and(quotient, sub_w(splat_w(-1), is_finite));
    let result = or(and(better, is_finite), kept);
    // Adding two zeros would lose the sign, so the quotient's sign is set.
    or_nan(b, or(result, and(quotient, splat_w(SIGN))))
}

/// Returns `1 / sqrt(x)` for normal positive `x`.
#[must_use]
#[inline(always)]
pub fn rsqrt(x: Vector) -> Vector {
    let mut r = Accumulator::from_f32(sub_w(splat_w(0x5f37_59df), hvx::shr_w(x, 1)));
    let half = Accumulator::product(x, splat_f32(-0.5));
    // The estimate is 3.5 % off; each step reduces the error: 1.8e-3, 4.7e-6, 3e-11.
    for _ in 0..3 {
        r = r.times(half.times(r).times(r).plus_f32(splat_f32(1.5)));
    }
    r.to_f32()
}

/// Returns `sqrt(x)`; NaN below zero.
#[must_use]
#[inline(always)]
pub fn sqrt(x: Vector) -> Vector {
    let finite = mul_f32(x, rsqrt(x));
    let result = select_gt_f32(x, splat_f32(f32::MAX), x, finite);
    select_gt_f32(splat_w(0), x, splat_f32(f32::NAN), result)
}

/// -log2(e): `e^-x` is 2 to the power of x times it.
const MINUS_LOG2_E: f32 = -core::f32::consts::LOG2_E;

/// Returns `1 / (1 + 2^y)`, 0 for y above 101 and more.
#[inline(always)]
fn logistic(y: Vector) -> Vector {
    // Within these limits, sums and their inverses are normal numbers.
    let bounded = min_f32(max_f32(y, splat_f32(-126.0)), splat_f32(125.0));
    let biased = add_f32(bounded, splat_f32(ROUNDER));
    let n = hvx::unbias(biased, ROUNDER);
    let f = Accumulator::difference(bounded, n);
    let p = if hvx::HAS_IEEE {
        // 2^f for |f| <= 1/2, to 2.6e-6.
        let coefficients = [
            9.570_102e-3,
            5.591_786_3e-2,
            2.402_474_4e-1,
            6.931_218e-1,
            9.999_993e-1,
        ];
        polynomial(f, y, coefficients)
    } else {
        // V73's qf32 rounds to even numbers only, and |f| is up to 1. The error is then 1.5e-4, but
        // 7.5e-8 for |f| up to 1/2.
        polynomial(f, y, POWER_OF_TWO)
    };
    let power = add_w(p.to_f32(), shl_w(biased, 23));
    let minus = sub_f32(splat_f32(-1.0), power);
    // The estimate of the inverse is up to 5.3 % off. The first Newton step uses a factor above 2,
    // which leaves errors of up to 1.5e-3 of either sign; the second step leaves 2.3e-6.
    let estimate = sub_w(splat_w(0x7ef3_7000 ^ SIGN), minus);
    let minus = Accumulator::from_f32(minus);
    let mut r = Accumulator::from_f32(estimate);
    for two in [2.0015, 2.0] {
        r = r.times(minus.times(r).plus_f32(splat_f32(two)));
    }
    // The result for the largest sum is exactly zero, so that its product with infinity is not
    // infinite.
    max_f32(r.plus_f32(splat_f32(-2.5e-38)).to_f32(), splat_w(0))
}

/// Returns `1 / (1 + e^-x)`: 0 below -70.
#[must_use]
#[inline(always)]
pub fn sigmoid(x: Vector) -> Vector {
    logistic(mul_f32(x, splat_f32(MINUS_LOG2_E)))
}

/// Returns `x / (1 + e^-x)`.
#[must_use]
#[inline(always)]
pub fn silu(x: Vector) -> Vector {
    mul_f32(x, sigmoid(x))
}

/// Returns the hyperbolic tangent.
#[must_use]
#[inline(always)]
pub fn tanh(x: Vector) -> Vector {
    let magnitude = abs(x);
    let wide = Accumulator::from_f32(x);
    let square = wide.times(wide);
    // (tanh x / x - 1) / x^2 for x^2 <= 0.3907, to 4.3e-8.
    let p = polynomial(
        square,
        x,
        [
            -6.096_299_5e-3,
            2.099_689_4e-2,
            -5.385_085e-2,
            1.333_277e-1,
            -3.333_332_9e-1,
        ],
    );
    let small = square.times(p).times(wide).plus_f32(x).to_f32();
    let half = logistic(mul_f32(magnitude, splat_f32(-2.0 * MINUS_LOG2_E)));
    let tail = add_f32(half, half);
    let large = with_sign(sub_f32(splat_f32(1.0), tail), x);
    select_gt_f32(magnitude, splat_f32(0.625), large, small)
}

/// Returns the error function.
#[must_use]
#[inline(always)]
pub fn erf(x: Vector) -> Vector {
    // From 4 on the function is 1 to within 2e-8.
    let t = min_f32(abs(x), splat_f32(4.0));
    let wide = Accumulator::from_f32(t);
    // erf x / x for x^2 <= 0.86, to 4.5e-10.
    let p = polynomial(
        wide.times(wide),
        x,
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
        wide,
        x,
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
    let large = sub_f32(splat_f32(1.0), exp(neg(q.to_f32())));
    let small = wide.times(p).to_f32();
    with_sign(select_gt_f32(t, splat_f32(0.927), large, small), x)
}

/// Returns `x / 2 · (1 + tanh(sqrt(2 / π) · (x + 0.044715 x^3)))`.
#[must_use]
#[inline(always)]
pub fn gelu(x: Vector) -> Vector {
    // (1 + tanh u) / 2 = 1 / (1 + e^-2u), which does not cancel. The two factors are -2 log2(e)
    // sqrt(2 / π), and 0.044715 times that.
    let square = Accumulator::product(x, x);
    let slope = square
        .times(Accumulator::constant(-0.102_943_24, x))
        .plus_f32(splat_f32(-2.302_208_2));
    mul_f32(x, logistic(mul_f32(slope.to_f32(), x)))
}

/// Returns `x / (1 + e^(-1.702 x))`.
#[must_use]
#[inline(always)]
pub fn gelu_quick(x: Vector) -> Vector {
    mul_f32(x, logistic(mul_f32(x, splat_f32(1.702 * MINUS_LOG2_E))))
}

/// Returns `x / 2 · (1 + erf(x / sqrt 2))`.
#[must_use]
#[inline(always)]
pub fn gelu_erf(x: Vector) -> Vector {
    let erf = erf(mul_f32(x, splat_f32(core::f32::consts::FRAC_1_SQRT_2)));
    mul_f32(mul_f32(x, splat_f32(0.5)), add_f32(erf, splat_f32(1.0)))
}

/// Returns (sine, cosine) of angles in radians.
///
/// The quarter turns n are exact for angles up to 2^20. Beyond that the angle's last bit is the
/// error, and for 2^22 quarter turns and more the results mean nothing.
#[must_use]
#[inline(always)]
pub fn sin_cos(angle: Vector) -> (Vector, Vector) {
    let rounder = splat_f32(ROUNDER);
    let turns = Accumulator::product(angle, splat_f32(core::f32::consts::FRAC_2_PI));
    // The whole number is in the low bits of its f32 form.
    let biased = turns.plus_f32(rounder).to_f32();
    let n = hvx::unbias(biased, ROUNDER);
    // π / 2 as a sum of 25 / 2^4, 17 / 2^11 and a remainder. Products of the first two with n up to
    // 671,088 are exact, and so are the sums with them.
    let mut r = Accumulator::product(n, splat_f32(-25.0 / 16.0)).plus_f32(angle);
    for part in [-17.0 / 2048.0, 4.454_455e-6] {
        r = r.mul_add(n, splat_f32(part));
    }
    let square = r.times(r);
    // (sin r / r - 1) / r^2 to 2e-8, (cos r - 1 + r^2 / 2) / r^4 to 2e-9, for |r| <= π / 4.
    let s = polynomial(
        square,
        angle,
        [-1.958_764e-4, 8.332_747e-3, -1.666_666_5e-1],
    );
    let sine = r.times(square).times(s).plus(r).to_f32();
    let c = polynomial(
        square,
        angle,
        [2.454_769e-5, -1.388_830_2e-3, 4.166_666_5e-2],
    );
    let c = square.times(square).times(c).plus_f32(splat_f32(1.0));
    let half = Accumulator::constant(-0.5, angle);
    let cosine = c.plus(square.times(half)).to_f32();
    // In odd quarters sine and cosine are exchanged. Bit 1 of n is the sine's sign, bit 1 of n + 1
    // the cosine's.
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
