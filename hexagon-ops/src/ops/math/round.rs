//! Rounding to whole numbers.

use super::{abs, with_sign};
use crate::hvx::{Vector, add_f32, select_gt_f32, splat_f32, splat_w, sub_f32, unbias};

/// 2^23: larger numbers are whole, and sums with it are rounded to whole numbers.
const WHOLE: f32 = 8_388_608.0;

/// Returns the largest whole number not above a magnitude.
#[inline(always)]
fn floor_magnitude(x: Vector) -> Vector {
    let whole = splat_f32(WHOLE);
    let nearest = unbias(add_f32(x, whole), WHOLE);
    let lower = sub_f32(nearest, splat_f32(1.0));
    let below = select_gt_f32(nearest, x, lower, nearest);
    select_gt_f32(whole, x, below, x)
}

/// Returns `x` rounded towards zero to a whole number.
#[must_use]
#[inline(always)]
pub fn trunc(x: Vector) -> Vector {
    with_sign(floor_magnitude(abs(x)), x)
}

/// Returns the largest whole number not above `x`.
#[must_use]
#[inline(always)]
pub fn floor(x: Vector) -> Vector {
    let cut = trunc(x);
    select_gt_f32(cut, x, sub_f32(cut, splat_f32(1.0)), cut)
}

/// Returns the nearest whole number; halves are rounded away from zero.
#[must_use]
#[inline(always)]
pub fn round(x: Vector) -> Vector {
    let magnitude = abs(x);
    let cut = floor_magnitude(magnitude);
    // The difference is exact, which adding a half would not be: 0.49999997 is the largest number
    // below a half.
    let is_up = sub_f32(magnitude, cut);
    let addend = select_gt_f32(is_up, splat_f32(0.499_999_97), splat_f32(1.0), splat_w(0));
    with_sign(add_f32(cut, addend), x)
}
