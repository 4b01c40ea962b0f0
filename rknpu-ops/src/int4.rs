//! INT4 products on the NPU: rotation, activations of one or two digits, weights with a scale for
//! each row and K segment.
//!
//! The matrix unit of the RK3588 multiplies 4-bit by 4-bit integers into 16-bit sums, and later
//! chips multiply 8-bit or FP16 activations by 4-bit weights. Both read half the bytes of INT8.
//! With only 16 levels for a weight, accuracy depends on everything around the multiplication,
//! which is this module:
//!
//! ```text
//! weights, once:
//!   for each row n:  w' = rotate(w)
//!     for each K segment s of at most 576 elements
//!       clip = calibrated magnitude; w_scale[s][n] = the step that fits best
//!       q[n][k] = the nibble whose level q + 1/2 is nearest to w'[k] / step
//!   nibbles --pack_group_i4--> native B of each segment
//!
//! activations, for each product:
//!   for each row m:  x' = rotate(x)
//!     for each K segment s
//!       a_scale[m][s] = clip / levels;  a[m][k] = round(x'[k] / a_scale)    one or two digits
//!       half[m][s]    = 1/2 · Σ a[m][k]
//!   nibbles --interleave_a_i4--> native A
//!
//! device, for each K segment:  c[m][n] = Σ over k of a[m][k] · q[n][k]      I16, saturating
//! result (unpack_scaled):
//!   dst[m][n] = Σ over s of (c[m][n] + half[m][s]) · w_scale[s][n] · a_scale[m][s]
//! ```
//!
//! 1. **Rotation.** A signed Hadamard transform ([`crate::rotation`]) of both operands leaves their
//!    product unchanged and spreads outliers, so that one step suits all elements of a segment.
//! 2. **A scale for each K segment.** The device adds within a segment only. The segments' results
//!    are scaled and added in FP32, so each segment of a row can have its own scale, on both sides.
//! 3. **Saturation cannot happen.** Activations are in [-7, 7], weights in [-8, 7], and a segment
//!    has at most [`SAFE_K_I4`] elements, so no sum leaves the I16 range, whatever the data.
//! 4. **The half.** A nibble `q` of a weight means `(q + 1/2)` steps, so that all of -8 … 7 are
//!    used and reach equally far to both sides of 0. The device multiplies by `q`. The halves
//!    contribute the same to every column: `sum(a (q + 1/2)) = sum(a q) + h`, where `h` is half the
//!    sum of a row's activations in the segment. It is computed where they are quantized, and
//!    added, exactly, where the result is unpacked.
//! 5. **Two digits.** An activation may be split into two digits of base 15, `q = 15 * high + low`,
//!    each in [-7, 7], which are two rows of A (`2 m` high, `2 m + 1` low). That gives an
//!    activation 225 levels, close to INT8, against INT4 weights: the device multiplies twice as
//!    many rows and reads the same weights, and either row's sum is as safe from saturation as with
//!    one digit.
//! 6. **Nibbles move as bytes.** Two 4-bit elements share a byte, the even K in the low nibble, and
//!    every native slice and tile has an even number of elements. So a K of `k` elements is `k / 2`
//!    bytes to [`crate::pack`], which moves INT4, INT8 and FP16 by the same code.

use half::f16;
use multiversion::multiversion;

use crate::calibrate::{self, LEVEL_MAX, Method};
use crate::layout::NativeA;
use crate::pack::{self, Rows};
use crate::quant;
use crate::rotation::Rotation;
use crate::round::{self, clamped, halfway, low_byte};

mod unpack;
mod weight;

pub use unpack::{Product, ScaledOutput, SumElem, SumTile, unpack_scaled};
pub use weight::{pack_group_i4, quantize_group_i4, unpack_group_i4};

/// Largest magnitude of an activation's digit. -8 is left unused so that the range is symmetric.
pub const I4_MAX: f32 = 7.0;

/// Largest magnitude of two digits.
const TWO_DIGITS_MAX: f32 = I4_MAX * Digits::BASE + I4_MAX;

/// Largest K of a call with I16 results: `7 * 8 * 576 = 32,256`, and 608, the next multiple of the
/// alignment of K, would reach 34,048 and saturate.
// SOURCE: one open-source driver project reports saturation instead of wrapping; another bounds a
// column's sum in the same way, by 7 and 8 times its positive and negative weights.
pub const SAFE_K_I4: usize = 576;

/// Number of digits of an activation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Digits {
    /// 15 levels, one row of A.
    #[default]
    One,
    /// 225 levels, two rows of A.
    Two,
    /// 65,025 levels of INT8, two rows of A.
    TwoBytes,
}

impl Digits {
    /// Weight of the high one of two nibbles.
    const BASE: f32 = 15.0;

    /// Clip of one digit in units of the RMS. The squared error of normal values is least at 2.46,
    /// and rotated rows are nearly normal. With this clip it is 1.29 % of their square, and no
    /// search for each row did better.
    ///
    /// SOURCE: the error of 2,000,000 normal values at clips from 2.3 to 3.6; KL divergence of a
    /// small model with this clip, with clips of 2.3 to 2.8 and with a search of 12 clips for each
    /// row.
    const CLIP_RMS: f32 = 2.5;

    /// Returns the number of rows of A and C for each activation row.
    #[must_use]
    pub const fn rows(self) -> usize {
        match self {
            Self::One => 1,
            Self::Two | Self::TwoBytes => 2,
        }
    }

    /// Returns the weight of the high digit.
    #[inline(always)]
    pub(crate) const fn base(self) -> f32 {
        match self {
            Self::One | Self::Two => Self::BASE,
            Self::TwoBytes => quant::WIDE_BASE,
        }
    }

    /// Returns the scale of the values of one row and segment; 0 for zeros, NaN if one is not
    /// finite.
    fn scale(self, values: &[f32]) -> f32 {
        let (clip, levels) = match self {
            Self::One => (calibrate::rms_clip(values, Self::CLIP_RMS), I4_MAX),
            Self::Two | Self::TwoBytes => (calibrate::clip(values, Method::AbsMax), TWO_DIGITS_MAX),
        };
        let scale = clip.magnitude() / levels;
        if scale < f32::MIN_POSITIVE {
            0.0
        } else {
            scale
        }
    }
}

/// Returns the number of factors of a row of activations in `segments` K segments: a scale for
/// each, then [the half](self) for each.
#[must_use]
pub const fn factors_i4(segments: usize) -> usize {
    2 * segments
}

/// Returns the number of factors of a row of activations with one scale: the scale, then [the
/// half](self) for each K segment.
#[must_use]
pub const fn factors(segments: usize) -> usize {
    1 + segments
}

/// Computes step 1 for INT4 activations: rotates and quantizes rows into a row-major scratch of
/// nibbles.
///
/// - `src`: any rows, K elements each (K even); `work`: at least K elements of scratch
/// - `segment_k`: elements of a K segment (even, the last segment may be short); each has its own
///   scale
/// - `out`: `src.count() * digits.rows() * K / 2` bytes, row-major without gaps; the digits of a
///   row follow each other, the high one first
/// - `factors`: [`factors_i4`] elements for each row; the scale is NaN for a segment with a
///   non-finite element
///
/// # Panics
/// If a length disagrees, K or `segment_k` is odd or 0, or `digits` are bytes.
pub fn quantize_rows_i4(
    src: Rows<'_, f32>,
    rotation: &Rotation,
    segment_k: usize,
    digits: Digits,
    work: &mut [f32],
    out: &mut [u8],
    factors: &mut [f32],
) {
    assert!(digits != Digits::TwoBytes, "nibbles do not hold bytes");
    let k = src.row_len();
    let row_bytes = nibble_bytes(k, segment_k);
    let (segments, digit_rows) = (k.div_ceil(segment_k), digits.rows());
    assert_eq!(
        out.len(),
        src.count() * digit_rows * row_bytes,
        "scratch does not hold the digits"
    );
    assert_eq!(
        factors.len(),
        src.count() * factors_i4(segments),
        "a scale and a half for each row and segment"
    );
    for m in 0..src.count() {
        let row = rotation.of(src.row(m), work);
        let out = &mut out[m * digit_rows * row_bytes..][..digit_rows * row_bytes];
        let (high, low) = out.split_at_mut(row_bytes);
        let factors = &mut factors[m * factors_i4(segments)..][..factors_i4(segments)];
        let (scales, halves) = factors.split_at_mut(segments);
        let factors = scales.iter_mut().zip(halves);
        for (index, (values, (scale, half))) in row.chunks(segment_k).zip(factors).enumerate() {
            let range = index * segment_k / 2..(index * segment_k + values.len()) / 2;
            let high = &mut high[range.clone()];
            *scale = digits.scale(values);
            let inverse = 1.0 / *scale;
            let sum = match digits {
                Digits::One if *scale > 0.0 => quantize_one(values, inverse, high),
                _ if *scale > 0.0 => quantize_two(values, inverse, high, &mut low[range]),
                Digits::One => {
                    high.fill(0);
                    0
                }
                _ => {
                    high.fill(0);
                    low[range].fill(0);
                    0
                }
            };
            *half = half_of(sum);
        }
    }
}

/// Computes step 1 for INT8 activations of INT4 weights: [`pack::quantize_rows_i8`] with factors
/// for [`unpack_scaled`].
///
/// - `segment_k`: elements of a K segment; `factors`: [`factors`] elements for each row
///
/// # Panics
/// If a length disagrees, or `segment_k` is 0.
pub fn quantize_rows_i8(
    src: Rows<'_, f32>,
    rotation: &Rotation,
    segment_k: usize,
    work: &mut [f32],
    out: &mut [i8],
    factors: &mut [f32],
) {
    let k = src.row_len();
    for (m, factors) in each_row(src, segment_k, factors) {
        let (row, out) = (src.rows(m..m + 1), &mut out[m * k..][..k]);
        let (scale, halves) = factors.split_at_mut(1);
        pack::quantize_rows_i8(row, rotation, work, out, scale);
        for (q, half) in out.chunks(segment_k).zip(halves) {
            *half = half_of(sum(q));
        }
    }
}

/// Computes step 1 for FP16 activations of INT4 weights: [`pack::convert_rows_f16`] with factors
/// for [`unpack_scaled`].
///
/// - `segment_k`: elements of a K segment; `factors`: [`factors`] elements for each row; the first
///   undoes the row's power of two
///
/// # Panics
/// If a length disagrees, or `segment_k` is 0.
pub fn convert_rows_f16(
    src: Rows<'_, f32>,
    rotation: &Rotation,
    segment_k: usize,
    work: &mut [f32],
    out: &mut [f16],
    factors: &mut [f32],
) {
    let k = src.row_len();
    for (m, factors) in each_row(src, segment_k, factors) {
        let (row, out) = (src.rows(m..m + 1), &mut out[m * k..][..k]);
        let (scale, halves) = factors.split_at_mut(1);
        pack::convert_rows_f16(row, rotation, work, out, scale);
        for (values, half) in out.chunks(segment_k).zip(halves) {
            *half = 0.5 * sum_f16(values);
        }
    }
}

/// Returns each row of `src` with its number and its factors.
fn each_row<'a>(
    src: Rows<'_, f32>,
    segment_k: usize,
    factors: &'a mut [f32],
) -> impl Iterator<Item = (usize, &'a mut [f32])> {
    let per_row = self::factors(src.row_len().div_ceil(segment_k));
    assert_eq!(
        factors.len(),
        src.count() * per_row,
        "a scale and halves for each row"
    );
    factors.chunks_exact_mut(per_row).enumerate()
}

/// Returns half of a sum of integers, exactly, since a K segment has a few hundred of them.
fn half_of(sum: i32) -> f32 {
    // CAST: |sum| is at most 127 * 576 times the segments of a row, far below 2^24.
    0.5 * sum as f32
}

#[multiversion(targets("x86_64+avx2"))]
fn sum(values: &[i8]) -> i32 {
    values.iter().map(|q| i32::from(*q)).sum()
}

/// Sums in FP32, in the order of eight lanes.
fn sum_f16(values: &[f16]) -> f32 {
    let mut lanes = [0.0; 8];
    for part in values.chunks(8) {
        for (lane, x) in lanes.iter_mut().zip(part) {
            *lane += x.to_f32();
        }
    }
    lanes.iter().sum()
}

/// Computes step 2 for INT4 activations: [`pack::interleave_a`] on bytes.
///
/// - `src`: rows of nibbles, `digits.rows()` for each activation row, of the K range that `dst`
///   covers ([`Rows::columns`] in bytes); `m`: rows of the bucket, at least that many
///
/// # Panics
/// As [`pack::interleave_a`].
pub fn interleave_a_i4(src: Rows<'_, u8>, layout: NativeA, m: usize, dst: &mut [u8]) {
    let layout = NativeA {
        s: layout.s / 2,
        ..layout
    };
    pack::interleave_a(src, layout, m, dst);
}

/// Returns the bytes of a row of nibbles.
///
/// # Panics
/// If K or the length of segments is odd, or the length is 0.
fn nibble_bytes(k: usize, segment_k: usize) -> usize {
    assert!(
        k.is_multiple_of(2) && segment_k.is_multiple_of(2) && segment_k > 0,
        "rows of {k} nibbles in segments of {segment_k}"
    );
    k / 2
}

/// Computes the nibbles `clamp(round(x * inverse), -7, 7)`, ties to even, two to the byte. Returns
/// their sum.
///
/// - `out`: half as many bytes as values
#[multiversion(targets("x86_64+avx2"))]
fn quantize_one(values: &[f32], inverse: f32, out: &mut [u8]) -> i32 {
    let mut total = 0;
    for (values, out) in values.chunks(CHUNK).zip(out.chunks_mut(CHUNK / 2)) {
        let mut digits = [0; CHUNK];
        for (digit, x) in digits.iter_mut().zip(values) {
            *digit = low_byte(clamped(x * inverse, I4_MAX));
        }
        total += digits.iter().map(|q| i32::from(*q)).sum::<i32>();
        join_nibbles(&digits, out);
    }
    total
}

/// Computes two digits of base 15 of `clamp(round(x * inverse), -112, 112)`. Returns the sum of
/// these integers.
#[multiversion(targets("x86_64+avx2"))]
fn quantize_two(values: &[f32], inverse: f32, high: &mut [u8], low: &mut [u8]) -> i32 {
    let mut total = 0;
    let out = high.chunks_mut(CHUNK / 2).zip(low.chunks_mut(CHUNK / 2));
    for (values, (high, low)) in values.chunks(CHUNK).zip(out) {
        let mut digits = [[0; CHUNK]; 2];
        let mut integers = [0; CHUNK];
        let [highs, lows] = &mut digits;
        for (((h, l), integer), x) in highs.iter_mut().zip(lows).zip(&mut integers).zip(values) {
            let rounded = clamped(x * inverse, TWO_DIGITS_MAX);
            *integer = low_byte(rounded);
            let q = rounded - round::MAGIC;
            // The base is odd, so no quotient is halfway between two integers.
            let digit = clamped(q * (1.0 / Digits::BASE), I4_MAX);
            *h = low_byte(digit);
            *l = low_byte(q - (digit - round::MAGIC) * Digits::BASE + round::MAGIC);
        }
        total += integers.iter().map(|q| i32::from(*q)).sum::<i32>();
        join_nibbles(&digits[0], high);
        join_nibbles(&digits[1], low);
    }
    total
}

/// Computes the nibbles `q` for which `q + 1/2` is nearest to `x * inverse`, two to the byte.
///
/// - `out`: half as many bytes as values
#[multiversion(targets("x86_64+avx2"))]
fn quantize_weights(values: &[f32], inverse: f32, out: &mut [u8]) {
    for (values, out) in values.chunks(CHUNK).zip(out.chunks_mut(CHUNK / 2)) {
        let mut nibbles = [0; CHUNK];
        for (nibble, x) in nibbles.iter_mut().zip(values) {
            *nibble = low_byte(halfway(x * inverse, LEVEL_MAX));
        }
        join_nibbles(&nibbles, out);
    }
}

/// Values that are quantized at a time; even.
const CHUNK: usize = 64;

/// Joins pairs of 4-bit integers, one to a byte, into bytes with the first of a pair in the low
/// nibble.
#[inline(always)]
fn join_nibbles(digits: &[i8; CHUNK], out: &mut [u8]) {
    let (pairs, _) = digits.as_chunks();
    for (out, [low, high]) in out.iter_mut().zip(pairs) {
        *out = (low & 0xf | high << 4).cast_unsigned();
    }
}
