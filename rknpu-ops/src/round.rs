//! Rounding to integers by an addition: the same on every vector unit, and without a conversion.

/// 1.5 * 2^23: added to a value of magnitude at most 2^22, it leaves that value, rounded to an
/// integer half to even, in the low bits.
pub(crate) const MAGIC: f32 = 12_582_912.0;

/// Returns `MAGIC + clamp(round(v), -limit, limit)`, ties to even; `MAGIC + limit` for NaN.
///
/// - `limit`: an integer from 0 to 2^22
#[inline(always)]
pub(crate) fn clamped(v: f32, limit: f32) -> f32 {
    let v = if v < limit { v } else { limit };
    let v = if v > -limit { v } else { -limit };
    v + MAGIC
}

/// Returns `MAGIC + q`, where `q + 1/2` is nearest to `v` between `-limit` and `limit`.
///
/// - `limit`: half of an odd integer, at most 2^22
#[inline(always)]
pub(crate) fn halfway(v: f32, limit: f32) -> f32 {
    shifted(v, limit, 0.5)
}

/// Returns `MAGIC + q`, where `q + shift` is nearest to `v` between `-limit` and `limit`.
///
/// - `limit`: an integer plus `shift`, at most 2^22; `shift`: 0 or 1/2
#[inline(always)]
pub(crate) fn shifted(v: f32, limit: f32, shift: f32) -> f32 {
    let v = if v < limit { v } else { limit };
    let v = if v > -limit { v } else { -limit };
    v - shift + MAGIC
}

/// Returns the integer of a value that [`clamped`] or [`halfway`] returned with a limit of at most
/// 127.
#[inline(always)]
#[expect(
    clippy::cast_possible_truncation,
    reason = "the low byte is the rounded integer in two's complement"
)]
pub(crate) fn low_byte(x: f32) -> i8 {
    // CAST: for |v| <= 127, the bits of v + MAGIC are those of MAGIC plus round(v), and MAGIC's low
    // byte is 0.
    x.to_bits() as i8
}
