//! qfloat arithmetic: V68, V69, V79 and later, and V73 and V75 if it is selected.
use super::{Vector, arch, split};
use crate::hvx::splat_f32;

/// Converts qf16 to f16.
#[inline(always)]
fn f16_from_qf16(v: arch::HvxVector) -> Vector {
    // SAFETY: [HVX] of the module doc.
    Vector(unsafe { arch::Q6_Vhf_equals_Vqf16(v) })
}

/// Converts qf32 to f32.
#[inline(always)]
fn f32_from_qf32(v: arch::HvxVector) -> Vector {
    // SAFETY: [HVX] of the module doc.
    Vector(unsafe { arch::Q6_Vsf_equals_Vqf32(v) })
}

/// Returns the f16 product: `Q6_Wqf32_vmpy_VhfVhf`, `Q6_Vhf_equals_Wqf32`.
///
/// A qf16 product would have fewer bits: of subnormal numbers, and of all before V79.
#[must_use]
#[inline(always)]
pub fn mul_f16(a: Vector, b: Vector) -> Vector {
    // SAFETY: [HVX] of the module doc.
    let product = unsafe { arch::Q6_Wqf32_vmpy_VhfVhf(a.0, b.0) };
    // SAFETY: [HVX] of the module doc.
    Vector(unsafe { arch::Q6_Vhf_equals_Wqf32(product) })
}

/// Returns the f16 `a · b + c`: `Q6_Vqf16_vmpy_VhfVhf`, `Q6_Vqf16_vadd_Vqf16Vhf`, converted.
#[must_use]
#[inline(always)]
pub fn mul_add_f16(a: Vector, b: Vector, c: Vector) -> Vector {
    // SAFETY: [HVX] of the module doc.
    let product = unsafe { arch::Q6_Vqf16_vmpy_VhfVhf(a.0, b.0) };
    // SAFETY: [HVX] of the module doc.
    f16_from_qf16(unsafe { arch::Q6_Vqf16_vadd_Vqf16Vhf(product, c.0) })
}

/// Returns the f16 difference: `Q6_Vqf16_vsub_VhfVhf`, converted.
#[must_use]
#[inline(always)]
pub fn sub_f16(a: Vector, b: Vector) -> Vector {
    // SAFETY: [HVX] of the module doc.
    f16_from_qf16(unsafe { arch::Q6_Vqf16_vsub_VhfVhf(a.0, b.0) })
}

/// Returns unsigned bytes less `zero` as halfwords for [`f16_from_spread`], (even bytes, odd
/// bytes): `Q6_Wh_vsub_VubVub`.
#[must_use]
#[inline(always)]
pub fn spread_b(bytes: Vector, zero: u8) -> (Vector, Vector) {
    // SAFETY: [HVX] of the module doc.
    split(unsafe { arch::Q6_Wh_vsub_VubVub(bytes.0, super::splat_b(zero).0) })
}

/// Undoes [`spread_b`] for halfwords that it made with the same `zero`: returns the bytes less
/// `zero` as f16, by `Q6_Vhf_equals_Vh`, where there is one.
///
/// A qf16 difference of f16 would have the exponent of its operands, and a product with it too few
/// bits.
#[must_use]
#[inline(always)]
pub fn f16_from_spread(halves: Vector, _zero: u8) -> Vector {
    super::f16_from_small_h(halves)
}

/// Returns the exact f32 products of f16 lanes, (even lanes, odd lanes): `Q6_Wqf32_vmpy_VhfVhf`,
/// converted.
#[must_use]
#[inline(always)]
pub fn widen_mul_f16(a: Vector, b: Vector) -> (Vector, Vector) {
    // SAFETY: [HVX] of the module doc.
    let (even, odd) = split(unsafe { arch::Q6_Wqf32_vmpy_VhfVhf(a.0, b.0) });
    (f32_from_qf32(even.0), f32_from_qf32(odd.0))
}

/// Converts f32 to qf32 by adding zero.
#[inline(always)]
fn qf32_from_f32(v: Vector) -> arch::HvxVector {
    // SAFETY: [HVX] of the module doc.
    unsafe { arch::Q6_Vqf32_vadd_VsfVsf(v.0, super::splat_w(0).0) }
}

/// Converts f32 pairs to f16, lanes of `even` in even places: `Q6_Vqf32_vadd_VsfVsf` and
/// `Q6_Vqf32_vsub_VsfVsf` with zero, `Q6_Vhf_equals_Wqf32`.
///
/// A sum and a difference are two values even if `even` is `odd`. From one value, the compiler
/// would make the pair by copying.
#[must_use]
#[inline(always)]
pub fn narrow_f32(even: Vector, odd: Vector) -> Vector {
    // SAFETY: [HVX] of the module doc.
    let odd = unsafe { arch::Q6_Vqf32_vsub_VsfVsf(odd.0, super::splat_w(0).0) };
    // SAFETY: [HVX] of the module doc.
    let pair = unsafe { arch::Q6_W_vcombine_VV(odd, qf32_from_f32(even)) };
    // SAFETY: [HVX] of the module doc.
    Vector(unsafe { arch::Q6_Vhf_equals_Wqf32(pair) })
}

/// Converts the products of two pairs of f32 to f16, lanes of the first in even places:
/// `Q6_Vqf32_vmpy_VsfVsf`, `Q6_Vhf_equals_Wqf32`.
#[must_use]
#[inline(always)]
pub fn mul_narrow_f32(a: [Vector; 2], b: [Vector; 2]) -> Vector {
    // SAFETY: [HVX] of the module doc.
    let even = unsafe { arch::Q6_Vqf32_vmpy_VsfVsf(a[0].0, b[0].0) };
    // SAFETY: [HVX] of the module doc.
    let odd = unsafe { arch::Q6_Vqf32_vmpy_VsfVsf(a[1].0, b[1].0) };
    // SAFETY: [HVX] of the module doc.
    let pair = unsafe { arch::Q6_W_vcombine_VV(odd, even) };
    // SAFETY: [HVX] of the module doc.
    Vector(unsafe { arch::Q6_Vhf_equals_Wqf32(pair) })
}

/// Returns the f32 product: `Q6_Vqf32_vmpy_VsfVsf`, converted.
#[must_use]
#[inline(always)]
pub fn mul_f32(a: Vector, b: Vector) -> Vector {
    // SAFETY: [HVX] of the module doc.
    f32_from_qf32(unsafe { arch::Q6_Vqf32_vmpy_VsfVsf(a.0, b.0) })
}

/// Returns `v`, but NaN where `power` is NaN instead of a power of two.
///
/// Before V79 qfloat has no NaN: an operation on one gives a number. Bit 22 is set in a NaN, and
/// clear in a power of two.
#[must_use]
#[inline(always)]
pub fn or_nan(v: Vector, power: Vector) -> Vector {
    if cfg!(target_feature = "hvxv79") {
        return v;
    }
    let quiet = super::and(power, super::splat_w(1 << 22));
    super::or(v, super::sub_w(super::splat_w(0), quiet))
}

/// Returns the f32 sum: `Q6_Vqf32_vadd_VsfVsf`, converted.
#[must_use]
#[inline(always)]
pub fn add_f32(a: Vector, b: Vector) -> Vector {
    // SAFETY: [HVX] of the module doc.
    f32_from_qf32(unsafe { arch::Q6_Vqf32_vadd_VsfVsf(a.0, b.0) })
}

/// Returns the f32 difference: `Q6_Vqf32_vsub_VsfVsf`, converted.
#[must_use]
#[inline(always)]
pub fn sub_f32(a: Vector, b: Vector) -> Vector {
    // SAFETY: [HVX] of the module doc.
    f32_from_qf32(unsafe { arch::Q6_Vqf32_vsub_VsfVsf(a.0, b.0) })
}

/// Returns `sum - bias`, a whole number, for the sum of `bias`, 2^23 or 1.5 · 2^23, and a number of
/// at most a third of it: `Q6_Vw_vsub_VwVw`, `Q6_Vsf_equals_Vw`.
///
/// By integers: LLVM's QFP optimizer leaves out the conversion to f32 between a sum and a
/// difference, and a qf32 has bits below those of an f32.
#[must_use]
#[inline(always)]
pub fn unbias(sum: Vector, bias: f32) -> Vector {
    super::f32_from_w(super::sub_w(sum, splat_f32(bias)))
}

/// 32 f32 lanes that are kept between operations, in the unit's arithmetic format: qf32.
#[derive(Clone, Copy)]
pub struct Accumulator(Vector);

impl Accumulator {
    /// Returns a sum that starts at `v`.
    #[must_use]
    #[inline(always)]
    pub fn from_f32(v: Vector) -> Self {
        Self(Vector(qf32_from_f32(v)))
    }

    /// Returns zero, for a sum that starts in a loop.
    ///
    /// It comes from assembly because the compiler computes a constant once before the loop, and
    /// copies it for each sum.
    #[must_use]
    #[inline(always)]
    pub fn zero() -> Self {
        let zero: arch::HvxVector;
        // SAFETY: [HVX] of the module doc; writes one register.
        unsafe {
            core::arch::asm!(
                "{{ {0} = vxor({0},{0}) }}",
                lateout(vreg) zero,
                options(nomem, nostack, preserves_flags)
            );
        }
        // SAFETY: [HVX] of the module doc.
        Self(Vector(unsafe { arch::Q6_Vqf32_vadd_VsfVsf(zero, zero) }))
    }

    /// Returns `value` in all lanes. `beside` is any vector that is computed in the same iteration
    /// of a loop.
    ///
    /// Without `beside` the compiler would compute the qf32 before the loop, and store it where
    /// registers are short.
    #[must_use]
    #[inline(always)]
    pub fn constant(value: f32, beside: Vector) -> Self {
        let one = super::or(super::and(beside, super::splat_w(0)), splat_f32(1.0));
        Self::product(splat_f32(value), one)
    }

    /// Returns the f32 product `a · b`: `Q6_Vqf32_vmpy_VsfVsf`.
    #[must_use]
    #[inline(always)]
    pub fn product(a: Vector, b: Vector) -> Self {
        // SAFETY: [HVX] of the module doc.
        Self(Vector(unsafe { arch::Q6_Vqf32_vmpy_VsfVsf(a.0, b.0) }))
    }

    /// Returns the f32 difference `a - b`: `Q6_Vqf32_vsub_VsfVsf`.
    #[must_use]
    #[inline(always)]
    pub fn difference(a: Vector, b: Vector) -> Self {
        // SAFETY: [HVX] of the module doc.
        Self(Vector(unsafe { arch::Q6_Vqf32_vsub_VsfVsf(a.0, b.0) }))
    }

    /// Multiplies by `by`: `Q6_Vqf32_vmpy_Vqf32Vqf32`.
    #[must_use]
    #[inline(always)]
    pub fn times(self, by: Self) -> Self {
        // SAFETY: [HVX] of the module doc.
        Self(Vector(unsafe {
            arch::Q6_Vqf32_vmpy_Vqf32Vqf32(self.0.0, by.0.0)
        }))
    }

    /// Adds the f32 products `a · b`: `Q6_Vqf32_vmpy_VsfVsf`, `Q6_Vqf32_vadd_Vqf32Vqf32`.
    #[must_use]
    #[inline(always)]
    pub fn mul_add(self, a: Vector, b: Vector) -> Self {
        self.plus(Self::product(a, b))
    }

    /// Returns the sum with `other`: `Q6_Vqf32_vadd_Vqf32Vqf32`.
    #[must_use]
    #[inline(always)]
    pub fn plus(self, other: Self) -> Self {
        // SAFETY: [HVX] of the module doc.
        Self(Vector(unsafe {
            arch::Q6_Vqf32_vadd_Vqf32Vqf32(self.0.0, other.0.0)
        }))
    }

    /// Adds f32 lanes: `Q6_Vqf32_vadd_Vqf32Vsf`.
    #[must_use]
    #[inline(always)]
    pub fn plus_f32(self, v: Vector) -> Self {
        // SAFETY: [HVX] of the module doc.
        Self(Vector(unsafe {
            arch::Q6_Vqf32_vadd_Vqf32Vsf(self.0.0, v.0)
        }))
    }

    /// Returns the products of f16 lanes, (those of even lanes, those of odd lanes):
    /// `Q6_Wqf32_vmpy_VhfVhf`.
    #[must_use]
    #[inline(always)]
    pub fn widen_mul(a: Vector, b: Vector) -> (Self, Self) {
        // SAFETY: [HVX] of the module doc.
        let (even, odd) = split(unsafe { arch::Q6_Wqf32_vmpy_VhfVhf(a.0, b.0) });
        (Self(even), Self(odd))
    }

    /// Adds the products of f16 lanes to two sums, (those of even lanes, those of odd lanes):
    /// [`Self::widen_mul`], [`Self::plus`].
    #[must_use]
    #[inline(always)]
    pub fn widen_mul_add(sums: (Self, Self), a: Vector, b: Vector) -> (Self, Self) {
        let (even, odd) = Self::widen_mul(a, b);
        (sums.0.plus(even), sums.1.plus(odd))
    }

    /// Adds f16 lanes to two sums, (even lanes, odd lanes): [`Self::widen_mul_add`] by 1.
    #[must_use]
    #[inline(always)]
    pub fn add_f16(sums: (Self, Self), v: Vector) -> (Self, Self) {
        Self::widen_mul_add(sums, v, super::splat_h(0x3c00))
    }

    /// Returns the lanes as f32.
    #[must_use]
    #[inline(always)]
    pub fn to_f32(self) -> Vector {
        f32_from_qf32(self.0.0)
    }
}
