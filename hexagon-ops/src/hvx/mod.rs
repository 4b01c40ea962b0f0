//! The 128-byte vector type of Hexagon's vector units (HVX), and the operations that the kernels
//! use.
//!
//! Each operation is named after its effect, and its documentation names the intrinsic.
//! `hexagon.rs` implements it for the device with one intrinsic, or two where the architecture has
//! no single one. `host.rs` gives the same operation its architectural meaning on arrays, written
//! so that the compiler vectorizes it. Lanes are little-endian: b = 8, h = 16, w = 32 bits; f16 and
//! f32 are IEEE numbers in h and w lanes.
//!
//! # Floating point
//!
//! V73 and V75 have IEEE arithmetic (feature `hvx-ieee-fp`); V79 and later have only qfloat, whose
//! register format is not IEEE. Here a `Vector` always holds IEEE numbers: qfloat stays inside one
//! operation, or inside the type [`Accumulator`], so that no kernel can read raw qfloat bits.
//! Results are rounded to nearest even.
//!
//! SOURCE: V79 qfloat rounds as IEEE 754 does, 80-N2040-61; V73/V75 qfloat may differ in the last
//! bit.

#[cfg(target_arch = "hexagon")]
#[expect(unsafe_code, reason = "intrinsics are unsafe functions")]
mod hexagon;
#[cfg(target_arch = "hexagon")]
pub use hexagon::*;

#[cfg(not(target_arch = "hexagon"))]
#[cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "calls code for detected target features")
)]
mod dispatch;
#[cfg(not(target_arch = "hexagon"))]
pub use dispatch::{missing_instructions, widest};
#[cfg(not(target_arch = "hexagon"))]
mod f16;
#[cfg(not(target_arch = "hexagon"))]
pub(crate) mod host;
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "calls code for detected target features")]
mod x86;
#[cfg(not(target_arch = "hexagon"))]
pub use host::*;

#[expect(unsafe_code, reason = "reads memory that it has written before")]
mod stack;
pub use stack::LinePlanes;

#[expect(
    unsafe_code,
    reason = "checks the last of some elements instead of each"
)]
mod rows;
pub use rows::{RowGroups, update_rows};

#[expect(unsafe_code, reason = "moves memory that was checked before")]
mod moves;
pub use moves::{Moved, move_rows};

#[expect(unsafe_code, reason = "reads memory that was checked before")]
mod strided;
pub use strided::{FOURS, Fours, Square, StridedVectors};

#[expect(
    unsafe_code,
    reason = "reads operands in the place of a result, all of which were checked before"
)]
mod streams;
pub use streams::{Group, Groups, Piece, Streams};

#[cfg(any(not(target_arch = "hexagon"), target_feature = "hvx-ieee-fp"))]
mod accumulator;
#[cfg(any(not(target_arch = "hexagon"), target_feature = "hvx-ieee-fp"))]
pub use accumulator::{Accumulator, unbias};

/// Returns `v`, which an operation on `power` made NaN where `power` is NaN.
#[cfg(any(not(target_arch = "hexagon"), target_feature = "hvx-ieee-fp"))]
#[must_use]
#[inline(always)]
pub fn or_nan(v: Vector, _power: Vector) -> Vector {
    v
}

/// Returns the f32 product with powers of two, NaN where `power` is NaN: [`mul_f32`], [`or_nan`].
#[must_use]
#[inline(always)]
pub fn mul_by_power(a: Vector, power: Vector) -> Vector {
    or_nan(mul_f32(a, power), power)
}

/// `true` where the vector unit computes with IEEE numbers: V73, V75 and the host; not with qfloat.
pub const HAS_IEEE: bool = cfg!(any(
    not(target_arch = "hexagon"),
    target_feature = "hvx-ieee-fp"
));

/// With IEEE arithmetic, the upper byte of each halfword that [`spread_b`] makes. With the byte u
/// below it, the halfword is the f16 number 1024 + u.
pub const SPREAD_EXPONENT: u8 = 0x64;

/// Returns the f16 of unsigned bytes less `zero`, (even bytes, odd bytes): [`spread_b`],
/// [`f16_from_spread`].
#[must_use]
#[inline(always)]
pub fn f16_from_b(bytes: Vector, zero: u8) -> (Vector, Vector) {
    let (even, odd) = spread_b(bytes, zero);
    (f16_from_spread(even, zero), f16_from_spread(odd, zero))
}

/// Returns the halfwords of `a` shifted right by `COUNT`, zeros shifted in, as [`shr_h`] does. Uses
/// a multiplier, because there is only one shift unit.
#[must_use]
#[inline(always)]
pub fn shr_by_mul_h<const COUNT: u32>(a: Vector) -> Vector {
    const { assert!(0 < COUNT && COUNT < 16) };
    mul_upper_h(a, splat_h(1 << (16 - COUNT)))
}

/// Returns `value` in all lanes.
#[must_use]
#[inline(always)]
pub fn splat_f32(value: f32) -> Vector {
    splat_w(value.to_bits().cast_signed())
}

/// Copies as many elements as both have: by vectors, without a call of `memcpy`, because the pieces
/// are short.
#[inline(always)]
pub fn copy_f32(to: &mut [f32], from: &[f32]) {
    let count = to.len().min(from.len());
    let (to, to_rest) = to[..count].as_chunks_mut();
    let (from, rest) = from[..count].as_chunks();
    for (to, from) in to.iter_mut().zip(from) {
        store_f32(to, load_f32(from));
    }
    for (to, from) in to_rest.iter_mut().zip(rest) {
        *to = *from;
    }
}

/// Returns the larger ones of `largest` and the magnitudes of f16, as bits: these have the order of
/// magnitudes, with infinity and NaN after all numbers.
#[must_use]
#[inline(always)]
pub fn larger_f16(largest: Vector, elems: Vector) -> Vector {
    max_h(largest, and(elems, splat_h(0x7fff)))
}

/// Returns the larger ones of `largest` and the magnitudes of f32, as bits: these have the order of
/// magnitudes, with infinity and NaN after all numbers.
#[must_use]
#[inline(always)]
pub fn larger_f32(largest: Vector, elems: Vector) -> Vector {
    max_w(largest, and(elems, splat_w(0x7fff_ffff)))
}

/// An entry point with its arguments, for [`widest`].
///
/// `run` and every function with vectors that it calls must be `inline(always)`: only inlined code
/// is compiled for the machine's vectors, and neither closures nor functions passed as values are
/// always inlined.
pub trait Kernel {
    /// Result of the kernel.
    type Output;
    /// Makes the device build inline the kernel into its caller. Otherwise it is a function there.
    const INLINED: bool = false;

    /// Makes a form for x86-64 CPUs without AVX2: these pack weights, and simulate no DSP.
    const ANY_CPU: bool = false;

    /// Runs the kernel.
    fn run(self) -> Self::Output;
}

/// Runs `kernel`; the device build has a single instruction set.
#[cfg(target_arch = "hexagon")]
#[inline(always)]
pub fn widest<K: Kernel>(kernel: K) -> K::Output {
    if K::INLINED {
        kernel.run()
    } else {
        apart(kernel)
    }
}

/// Runs `kernel` in a function that is not inlined: the constants of all kernels in one function
/// would compete for vector registers.
#[cfg(target_arch = "hexagon")]
#[inline(never)]
fn apart<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}
