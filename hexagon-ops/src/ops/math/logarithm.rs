//! Natural logarithms.

use super::polynomial;
use crate::hvx::{
    self, Accumulator, Vector, add_f32, mul_f32, select_gt_f32, shl_w, splat_f32, splat_w, sub_f32,
    sub_w,
};

/// ln 2 in a part of 15 bits, whose products with exponents are exact, and the rest.
const LN_2: [f32; 2] = [0.693_145_75, 1.428_606_8e-6];

/// Returns `ln(1 + f)` for `1 + f` between the square roots of 1/2 and 2.
#[inline(always)]
fn ln_fraction(f: Vector) -> Vector {
    let wide = Accumulator::from_f32(f);
    let square = wide.times(wide);
    // (ln(1 + f) - f + f^2 / 2) / f^3, to 2.9e-8.
    let p = polynomial(
        wide,
        f,
        [
            6.972_519e-2,
            -1.148_121_2e-1,
            1.168_578_5e-1,
            -1.242_552_5e-1,
            1.424_900_7e-1,
            -1.666_780_7e-1,
            2.000_071_7e-1,
            -2.499_999_7e-1,
            3.333_333e-1,
        ],
    );
    let rest = square.times(wide).times(p);
    let half = Accumulator::constant(-0.5, f);
    rest.plus(square.times(half)).plus_f32(f).to_f32()
}

/// Returns the natural logarithm: minus infinity for zeros and subnormals, NaN below.
#[must_use]
#[inline(always)]
pub fn ln(x: Vector) -> Vector {
    let root = splat_f32(core::f32::consts::FRAC_1_SQRT_2);
    // n is the exponent for which the fraction is at least the root of 1/2.
    let n = hvx::shr_add_w(splat_w(0), sub_w(x, root), 23);
    let fraction = sub_w(x, shl_w(n, 23));
    let n = hvx::f32_from_w(n);
    let rest = ln_fraction(sub_f32(fraction, splat_f32(1.0)));
    let low = add_f32(rest, mul_f32(n, splat_f32(LN_2[1])));
    let finite = add_f32(mul_f32(n, splat_f32(LN_2[0])), low);
    let result = select_gt_f32(x, splat_f32(f32::MAX), x, finite);
    let smallest = splat_f32(f32::MIN_POSITIVE);
    let result = select_gt_f32(smallest, x, splat_f32(f32::NEG_INFINITY), result);
    select_gt_f32(splat_w(0), x, splat_f32(f32::NAN), result)
}

/// Returns `ln(1 + x)` for x from 0 to 1, accurate where x is small.
#[must_use]
#[inline(always)]
pub fn ln_1p(x: Vector) -> Vector {
    // The fraction would be too large for x > √2 - 1. There, the result is ln 2 plus the logarithm
    // of (1 + x) / 2.
    let limit = splat_f32(core::f32::consts::SQRT_2 - 1.0);
    let halved = mul_f32(sub_f32(x, splat_f32(1.0)), splat_f32(0.5));
    let f = select_gt_f32(x, limit, halved, x);
    let ln_2 = splat_f32(core::f32::consts::LN_2);
    let addend = select_gt_f32(x, limit, ln_2, splat_w(0));
    add_f32(ln_fraction(f), addend)
}
