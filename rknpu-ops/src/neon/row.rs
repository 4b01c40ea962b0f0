//! One row along K: its largest magnitude, INT8 by a scale, FP16 by a factor.

use std::arch::aarch64::{
    float32x4_t, uint16x8_t, vabsq_f32, vaddq_f32, vdupq_n_f32, vdupq_n_u32, vmaxnmq_f32,
    vmaxq_u32, vmaxvq_u32, vminnmq_f32, vmulq_f32, vreinterpretq_s8_u16, vreinterpretq_u16_f32,
    vreinterpretq_u32_f32, vst1q_s8, vst1q_u16, vuzp1q_s8, vuzp1q_u16,
};
use std::arch::asm;

use half::f16;

use super::{load, quads};
use crate::quant::I8_MAX;
use crate::{round, scalar};

/// Computes the same as [`scalar::absmax_bits`].
#[must_use]
pub fn absmax_bits(row: &[f32]) -> u32 {
    // SAFETY: NEON belongs to the base instruction set of this target.
    unsafe { absmax(row) }
}

/// Computes the same as [`scalar::quantize`].
///
/// # Panics
/// If `row` and `out` differ in length.
pub fn quantize(row: &[f32], inverse: f32, out: &mut [i8]) {
    assert_eq!(row.len(), out.len(), "row and output differ in length");
    // SAFETY: NEON belongs to the base instruction set of this target.
    unsafe { round_row(row, inverse, out) }
}

/// Computes the same as [`scalar::scale_to_f16`].
///
/// # Panics
/// If `row` and `out` differ in length.
pub fn scale_to_f16(row: &[f32], factor: f32, out: &mut [f16]) {
    assert_eq!(row.len(), out.len(), "row and output differ in length");
    // SAFETY: NEON belongs to the base instruction set of this target.
    unsafe { narrow(row, factor, out) }
}

#[target_feature(enable = "neon")]
fn absmax(row: &[f32]) -> u32 {
    // Without the sign, bits compare like magnitudes. Four maxima, so that none waits for the
    // previous one.
    let mut max = [vdupq_n_u32(0); 4];
    let (parts, rest) = row.as_chunks::<16>();
    for part in parts {
        for (max, quad) in max.iter_mut().zip(quads(part)) {
            *max = vmaxq_u32(*max, vreinterpretq_u32_f32(vabsq_f32(load(quad))));
        }
    }
    let [a, b, c, d] = max;
    let max = vmaxvq_u32(vmaxq_u32(vmaxq_u32(a, b), vmaxq_u32(c, d)));
    max.max(scalar::absmax_bits(rest))
}

#[target_feature(enable = "neon")]
fn round_row(row: &[f32], inverse: f32, out: &mut [i8]) {
    let (parts, rest) = row.as_chunks::<32>();
    let (outs, rest_out) = out.as_chunks_mut::<32>();
    let by = vdupq_n_f32(inverse);
    for (part, out) in parts.iter().zip(outs) {
        let (halves, _) = part.as_chunks::<16>();
        let (outs, _) = out.as_chunks_mut::<16>();
        for (half, out) in halves.iter().zip(outs) {
            round_16(half, by, out);
        }
    }
    scalar::quantize(rest, inverse, rest_out);
}

/// Multiplies sixteen elements by `by`, rounds them by an addition and cuts them to their low
/// bytes, as the portable version does.
///
/// Conversions and saturating moves would be as many instructions, but run on only one of the two
/// vector pipes.
#[inline]
#[target_feature(enable = "neon")]
fn round_16(part: &[f32; 16], by: float32x4_t, out: &mut [i8; 16]) {
    let (high, low) = (vdupq_n_f32(I8_MAX), vdupq_n_f32(-I8_MAX));
    let word = |quad: &[f32; 4]| {
        // The minimum of a number and NaN is the number, so NaN becomes a limit.
        let clamped = vmaxnmq_f32(vminnmq_f32(vmulq_f32(load(quad), by), high), low);
        vreinterpretq_u16_f32(vaddq_f32(clamped, vdupq_n_f32(round::MAGIC)))
    };
    let [a, b, c, d] = quads(part);
    let low = vreinterpretq_s8_u16(vuzp1q_u16(word(a), word(b)));
    let high = vreinterpretq_s8_u16(vuzp1q_u16(word(c), word(d)));
    let bytes = vuzp1q_s8(low, high);
    // SAFETY: out is exclusive and 16 bytes long.
    unsafe { vst1q_s8(out.as_mut_ptr(), bytes) }
}

#[target_feature(enable = "neon")]
fn narrow(row: &[f32], factor: f32, out: &mut [f16]) {
    let (parts, rest) = row.as_chunks::<16>();
    let (outs, rest_out) = out.as_chunks_mut::<16>();
    let by = vdupq_n_f32(factor);
    for (part, out) in parts.iter().zip(outs) {
        convert_16(part, by, out);
    }
    if !rest.is_empty() {
        let (mut part, mut converted) = ([0.0; 16], [f16::ZERO; 16]);
        part[..rest.len()].copy_from_slice(rest);
        convert_16(&part, by, &mut converted);
        rest_out.copy_from_slice(&converted[..rest.len()]);
    }
}

/// Multiplies sixteen elements by `by` and converts them to FP16.
#[inline]
#[target_feature(enable = "neon")]
fn convert_16(part: &[f32; 16], by: float32x4_t, out: &mut [f16; 16]) {
    let [a, b, c, d] = quads(part);
    let low = to_f16(vmulq_f32(load(a), by), vmulq_f32(load(b), by));
    let high = to_f16(vmulq_f32(load(c), by), vmulq_f32(load(d), by));
    let to = out.as_mut_ptr().cast::<u16>();
    // SAFETY: f16 is a transparent u16, and `out` is exclusive with 16 of them.
    unsafe { vst1q_u16(to, low) };
    // SAFETY: as above; these are the second eight of sixteen values.
    unsafe { vst1q_u16(to.wrapping_add(8), high) };
}

/// Converts eight numbers to FP16 bits, ties to even, as the control register is set in Rust
/// programs.
///
/// The instruction is in the base set, unlike FP16 arithmetic, but its intrinsic needs a newer
/// compiler than this crate does.
#[inline]
#[target_feature(enable = "neon")]
fn to_f16(low: float32x4_t, high: float32x4_t) -> uint16x8_t {
    let bits: uint16x8_t;
    // SAFETY: two register moves that touch neither memory nor flags. `out` is written before
    // `high` is read, so it is declared as a separate register.
    unsafe {
        asm!(
            "fcvtn {bits:v}.4h, {low:v}.4s",
            "fcvtn2 {bits:v}.8h, {high:v}.4s",
            bits = out(vreg) bits,
            low = in(vreg) low,
            high = in(vreg) high,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    bits
}
