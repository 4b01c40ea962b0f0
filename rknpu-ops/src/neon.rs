//! The loops of `quant`, `pack` and `int4` on aarch64's vector unit (NEON), with the bits of
//! [`scalar`](crate::scalar).
//!
//! NEON is part of the base instruction set of aarch64 Linux, so nothing is detected at run time:
//! every aarch64 build contains and uses this module. It stays within that base set because the
//! smaller cores of these chips (Cortex-A53) have no more: no dot product and no FP16 arithmetic,
//! only FP16 conversion.
//!
//! A loop adds and multiplies in the order of its portable version and never fuses the two.
//! Elements after the last whole vector go through the portable version.
#![expect(
    unsafe_code,
    reason = "loads and stores of vectors take pointers, and one instruction is inline assembly"
)]

use std::arch::aarch64::{float32x4_t, vld1q_f32, vst1q_f32};

mod hadamard;
mod interleave;
mod row;
mod scaled;
mod unpack;

pub use hadamard::hadamard;
pub use interleave::interleave;
pub use row::{absmax_bits, quantize, scale_to_f16};
pub use scaled::{Quad, scaled_tile};
pub use unpack::{unpack_f32, unpack_i32};

/// Loads four numbers into a register.
#[inline]
#[target_feature(enable = "neon")]
fn load(from: &[f32; 4]) -> float32x4_t {
    // SAFETY: a reference to four numbers is readable for four, and the load needs no stricter
    // alignment.
    unsafe { vld1q_f32(from.as_ptr()) }
}

/// Stores a register as four numbers.
#[inline]
#[target_feature(enable = "neon")]
fn store(to: &mut [f32; 4], value: float32x4_t) {
    // SAFETY: an exclusive reference to four numbers is writable for four, and the store needs no
    // stricter alignment.
    unsafe { vst1q_f32(to.as_mut_ptr(), value) }
}

/// Returns sixteen elements as four times four.
#[inline]
fn quads<T>(part: &[T; 16]) -> &[[T; 4]; 4] {
    let (quads, _) = part.as_chunks::<4>();
    // PANIC: sixteen elements are four times four.
    quads.first_chunk().unwrap_or_else(|| unreachable!())
}
