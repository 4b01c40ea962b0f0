//! Arithmetic on f16 and f32 lanes. Rounding is IEEE's nearest even.

use bytemuck::cast;

use super::{Vector, interleave_b, splat_b, splat_h};
use crate::hvx::f16;
#[cfg(target_arch = "x86_64")]
use crate::hvx::x86;

/// Returns the f32 value of each signed word: `Q6_Vsf_equals_Vw`.
#[must_use]
#[inline(always)]
#[expect(
    clippy::cast_precision_loss,
    reason = "rounding to nearest even is what the instruction does"
)]
pub fn f32_from_w(a: Vector) -> Vector {
    lanes!(i32, 32; a => (a as f32).to_bits().cast_signed())
}

/// As [`f32_from_w`], for magnitudes of at most 2^24, whose conversion is faster on V68 and V69.
#[must_use]
#[inline(always)]
pub fn f32_from_small_w(a: Vector) -> Vector {
    f32_from_w(a)
}

/// Returns the f16 value of each signed halfword: `Q6_Vhf_equals_Vh`.
#[must_use]
#[inline(always)]
pub fn f16_from_h(a: Vector) -> Vector {
    #[expect(
        clippy::cast_precision_loss,
        reason = "f32 holds every value of 16 bits"
    )]
    let even = lanes!(i32, 32; a => (((a << 16) >> 16) as f32).to_bits().cast_signed());
    #[expect(
        clippy::cast_precision_loss,
        reason = "f32 holds every value of 16 bits"
    )]
    let odd = lanes!(i32, 32; a => ((a >> 16) as f32).to_bits().cast_signed());
    narrow_f32(even, odd)
}

/// Returns the f16 product: `Q6_Vhf_vmpy_VhfVhf`.
#[must_use]
#[inline(always)]
pub fn mul_f16(a: Vector, b: Vector) -> Vector {
    portable! {
        fn portable(a: Vector, b: Vector) -> Vector {
            lanes!(u16, 64; a, b => f16::from_f32(f16::to_f32(a) * f16::to_f32(b)))
        }
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(result) = x86::mul_f16(a, b) {
        return result;
    }
    portable(a, b)
}

/// Returns the f16 `a · b + c`, rounded after the sum: `Q6_Vhf_vmpyacc_VhfVhfVhf`.
#[must_use]
#[inline(always)]
pub fn mul_add_f16(a: Vector, b: Vector, c: Vector) -> Vector {
    portable! {
        fn portable(a: Vector, b: Vector, c: Vector) -> Vector {
            lanes!(u16, 64; a, b, c => f16::from_f32(f16::to_f32(a) * f16::to_f32(b) + f16::to_f32(c)))
        }
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(result) = x86::mul_add_f16(a, b, c) {
        return result;
    }
    portable(a, b, c)
}

/// Returns unsigned bytes as halfwords for [`f16_from_spread`], (even bytes, odd bytes):
/// [`interleave_b`].
#[must_use]
#[inline(always)]
pub fn spread_b(bytes: Vector, _zero: u8) -> (Vector, Vector) {
    interleave_b(bytes, splat_b(crate::hvx::SPREAD_EXPONENT))
}

/// Undoes [`spread_b`] for halfwords that it made with the same `zero`: returns the bytes less
/// `zero` as f16, by [`sub_f16`].
#[must_use]
#[inline(always)]
pub fn f16_from_spread(halves: Vector, zero: u8) -> Vector {
    sub_f16(halves, splat_h(0x6400 | u16::from(zero)))
}

/// Returns the f16 difference: `Q6_Vhf_vsub_VhfVhf`.
#[must_use]
#[inline(always)]
pub fn sub_f16(a: Vector, b: Vector) -> Vector {
    portable! {
        fn portable(a: Vector, b: Vector) -> Vector {
            lanes!(u16, 64; a, b => f16::from_f32(f16::to_f32(a) - f16::to_f32(b)))
        }
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(result) = x86::sub_f16(a, b) {
        return result;
    }
    portable(a, b)
}

/// Returns the larger lanes of f16: `Q6_Vhf_vmax_VhfVhf`. NaN is not allowed; which zero is larger
/// is not defined.
#[must_use]
#[inline(always)]
pub fn max_f16(a: Vector, b: Vector) -> Vector {
    // Maps f16 bits to signed integers in the same order: negative numbers have their magnitudes
    // reversed.
    lanes!(i16, 64; a, b => {
        let order = |x: i16| x ^ ((x >> 15) & 0x7fff);
        if order(a) > order(b) { a } else { b }
    })
}

/// Returns the exact f32 products of f16 lanes, (even lanes, odd lanes): `Q6_Wsf_vmpy_VhfVhf`.
#[must_use]
#[inline(always)]
pub fn widen_mul_f16(a: Vector, b: Vector) -> (Vector, Vector) {
    let (a, b) = (widen_f16(a), widen_f16(b));
    (mul_f32(a.0, b.0), mul_f32(a.1, b.1))
}

/// Returns the sums of `(even, odd)` and the exact f32 products of f16 lanes:
/// `Q6_Wsf_vmpyacc_WsfVhfVhf`.
#[must_use]
#[inline(always)]
pub fn widen_mul_add_f16((even, odd): (Vector, Vector), a: Vector, b: Vector) -> (Vector, Vector) {
    let products = widen_mul_f16(a, b);
    (add_f32(even, products.0), add_f32(odd, products.1))
}

/// Returns the f32 values of f16 lanes, (even lanes, odd lanes).
#[inline(always)]
pub(crate) fn widen_f16(v: Vector) -> (Vector, Vector) {
    portable! {
        fn portable(v: Vector) -> (Vector, Vector) {
            (
                lanes!(u32, 32; v => f16::word_to_f32(v & 0xffff).to_bits()),
                lanes!(u32, 32; v => f16::word_to_f32(v >> 16).to_bits()),
            )
        }
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(result) = x86::widen_f16(v) {
        return result;
    }
    portable(v)
}

/// Returns the f32 values of f16 lanes in their order, (first 32, last 32): `Q6_Wsf_vmpy_VhfVhf` by
/// 1, `Q6_W_vshuff_VVR` by -4.
#[must_use]
#[inline(always)]
pub fn widen_in_order_f16(v: Vector) -> (Vector, Vector) {
    #[cfg(target_arch = "x86_64")]
    if let Some(result) = x86::widen_in_order_f16(v) {
        return result;
    }
    let (even, odd) = widen_f16(v);
    super::interleave_w(even, odd)
}

/// Converts f32 pairs to f16, lanes of `even` in even places: `Q6_Vhf_vcvt_VsfVsf`.
#[must_use]
#[inline(always)]
pub fn narrow_f32(even: Vector, odd: Vector) -> Vector {
    portable! {
        fn portable(even: Vector, odd: Vector) -> Vector {
            lanes!(u32, 32; even, odd => u32::from(f16::from_f32(f32::from_bits(even)))
                | u32::from(f16::from_f32(f32::from_bits(odd))) << 16)
        }
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(result) = x86::narrow_f32(even, odd) {
        return result;
    }
    portable(even, odd)
}

/// Converts the products of two pairs of f32 to f16, lanes of the first in even places:
/// [`mul_f32`], [`narrow_f32`].
#[must_use]
#[inline(always)]
pub fn mul_narrow_f32(a: [Vector; 2], b: [Vector; 2]) -> Vector {
    narrow_f32(mul_f32(a[0], b[0]), mul_f32(a[1], b[1]))
}

/// Returns the f32 product: `Q6_Vsf_vmpy_VsfVsf`.
#[must_use]
#[inline(always)]
pub fn mul_f32(a: Vector, b: Vector) -> Vector {
    lanes!(f32, 32; a, b => a * b)
}

/// Returns the f32 sum: `Q6_Vsf_vadd_VsfVsf`.
#[must_use]
#[inline(always)]
pub fn add_f32(a: Vector, b: Vector) -> Vector {
    lanes!(f32, 32; a, b => a + b)
}

/// Returns the f32 difference: `Q6_Vsf_vsub_VsfVsf`.
#[must_use]
#[inline(always)]
pub fn sub_f32(a: Vector, b: Vector) -> Vector {
    lanes!(f32, 32; a, b => a - b)
}

/// Adds pairs of neighbouring blocks of `WORDS` lanes: those of `a` in even blocks,
/// those of `b` in odd ones. As [`swap_blocks`](super::swap_blocks), then [`add_f32`].
#[must_use]
#[inline(always)]
pub fn fold_f32<const WORDS: usize>(a: Vector, b: Vector) -> Vector {
    #[cfg(target_arch = "x86_64")]
    if WORDS < 8
        && let Some(result) = x86::fold_f32::<WORDS>(a, b)
    {
        return result;
    }
    let (a, b): ([f32; 32], [f32; 32]) = (cast(a), cast(b));
    let mut out = [0.0; 32];
    for block in (0..32).step_by(2 * WORDS) {
        for i in block..block + WORDS {
            out[i] = a[i] + a[i + WORDS];
            out[i + WORDS] = b[i] + b[i + WORDS];
        }
    }
    cast(out)
}

/// Returns the larger lanes of f32: `Q6_Vsf_vmax_VsfVsf`. NaN is not allowed.
#[must_use]
#[inline(always)]
pub fn max_f32(a: Vector, b: Vector) -> Vector {
    lanes!(f32, 32; a, b => if a > b { a } else { b })
}

/// Returns the smaller lanes of f32: `Q6_Vsf_vmin_VsfVsf`. NaN is not allowed.
#[must_use]
#[inline(always)]
pub fn min_f32(a: Vector, b: Vector) -> Vector {
    lanes!(f32, 32; a, b => if a < b { a } else { b })
}

/// Returns `x` where `a > b` as f32, else `y`: integer operations on the device. `a` and `b` may
/// not be NaN.
#[must_use]
#[inline(always)]
pub fn select_gt_f32(a: Vector, b: Vector, x: Vector, y: Vector) -> Vector {
    lanes!(f32, 32; a, b, x, y => if a > b { x } else { y })
}
