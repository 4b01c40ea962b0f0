//! Accumulators where the arithmetic unit computes in f32: chips with IEEE arithmetic, and the
//! host.

use super::{Vector, add_f32, mul_f32, splat_h, sub_f32, widen_mul_add_f16, widen_mul_f16};

/// Returns `sum - bias`, a whole number, for the sum of `bias`, 2^23 or 1.5 · 2^23, and a number of
/// at most a third of it.
#[must_use]
#[inline(always)]
pub fn unbias(sum: Vector, bias: f32) -> Vector {
    sub_f32(sum, super::splat_f32(bias))
}

/// 32 f32 lanes that are kept between operations.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "hexagon"), derive(Debug))]
pub struct Accumulator(Vector);

impl Accumulator {
    /// Returns a sum that starts at `v`.
    #[must_use]
    #[inline(always)]
    pub fn from_f32(v: Vector) -> Self {
        Self(v)
    }

    /// Returns zero.
    #[must_use]
    #[inline(always)]
    pub fn zero() -> Self {
        Self(super::splat_w(0))
    }

    /// Returns `value` in all lanes. `_beside` matters only to qfloat.
    #[must_use]
    #[inline(always)]
    pub fn constant(value: f32, _beside: Vector) -> Self {
        Self(super::splat_f32(value))
    }

    /// Returns the f32 product `a · b`: `Q6_Vsf_vmpy_VsfVsf`.
    #[must_use]
    #[inline(always)]
    pub fn product(a: Vector, b: Vector) -> Self {
        Self(mul_f32(a, b))
    }

    /// Returns the f32 difference `a - b`: `Q6_Vsf_vsub_VsfVsf`.
    #[must_use]
    #[inline(always)]
    pub fn difference(a: Vector, b: Vector) -> Self {
        Self(sub_f32(a, b))
    }

    /// Multiplies by `by`: `Q6_Vsf_vmpy_VsfVsf`.
    #[must_use]
    #[inline(always)]
    pub fn times(self, by: Self) -> Self {
        Self(mul_f32(self.0, by.0))
    }

    /// Adds the f32 products `a · b`: `Q6_Vsf_vmpy_VsfVsf`, `Q6_Vsf_vadd_VsfVsf`.
    #[must_use]
    #[inline(always)]
    pub fn mul_add(self, a: Vector, b: Vector) -> Self {
        self.plus(Self::product(a, b))
    }

    /// Returns the sum with `other`: `Q6_Vsf_vadd_VsfVsf`.
    #[must_use]
    #[inline(always)]
    pub fn plus(self, other: Self) -> Self {
        Self(add_f32(self.0, other.0))
    }

    /// Adds f32 lanes: `Q6_Vsf_vadd_VsfVsf`.
    #[must_use]
    #[inline(always)]
    pub fn plus_f32(self, v: Vector) -> Self {
        Self(add_f32(self.0, v))
    }

    /// Returns the products of f16 lanes, (those of even lanes, those of odd lanes):
    /// [`widen_mul_f16`].
    #[must_use]
    #[inline(always)]
    pub fn widen_mul(a: Vector, b: Vector) -> (Self, Self) {
        let (even, odd) = widen_mul_f16(a, b);
        (Self(even), Self(odd))
    }

    /// Adds the products of f16 lanes to two sums, (those of even lanes, those of odd lanes):
    /// [`widen_mul_f16`], `Q6_Vsf_vadd_VsfVsf`.
    #[must_use]
    #[inline(always)]
    pub fn widen_mul_add(sums: (Self, Self), a: Vector, b: Vector) -> (Self, Self) {
        let (even, odd) = Self::widen_mul(a, b);
        (sums.0.plus(even), sums.1.plus(odd))
    }

    /// Adds f16 lanes to two sums, (even lanes, odd lanes): [`widen_mul_add_f16`] by 1.
    #[must_use]
    #[inline(always)]
    pub fn add_f16(sums: (Self, Self), v: Vector) -> (Self, Self) {
        let (even, odd) = widen_mul_add_f16((sums.0.0, sums.1.0), v, splat_h(0x3c00));
        (Self(even), Self(odd))
    }

    /// Returns the lanes as f32.
    #[must_use]
    #[inline(always)]
    pub fn to_f32(self) -> Vector {
        self.0
    }
}
