//! INT4 operands: rotation, activations with one or two digits, weights with a scale for each row and K segment.
//!
//! ```text
//! activation row --rotate--> row' --per segment: scale, digits--> nibbles --interleave_a--> native A
//! weight rows    --rotate--> rows' --per segment: calibrated scale--> nibbles --pack_group--> native B
//! native C of each segment --unpack_scaled--> dst[m][n] = sum over segments of c * w_scale[n] * a_scale[m]
//! ```
//!
//! Two 4-bit elements share a byte, the even K in the low nibble, and every native slice and tile has an even number
//! of elements. So nibbles move as bytes: a K of `k` elements is `k / 2` bytes to [`crate::pack`].
//!
//! **Saturation.** I4 x I4 gives I16, saturated. All digits are in [-7, 7] and a segment has at most [`SAFE_K_I4`]
//! elements, so no sum leaves the I16 range, whatever the data.
//!
//! **Two digits.** An activation may be cut into two digits of base 15, `q = 15 * high + low`, each in [-7, 7], which
//! are two rows of A (`2 m` high, `2 m + 1` low). That is an activation of 225 levels, close to INT8, against INT4
//! weights: the device multiplies twice as many rows and reads the same weights, and a sum of either row is as safe
//! from saturation as with one digit.

use half::f16;
use multiversion::multiversion;

use crate::calibrate::{self, Method};
use crate::layout::NativeA;
use crate::pack::{self, Rows};
use crate::quant;
use crate::rotation::Rotation;
use crate::round::{self, clamped, low_byte};

mod unpack;
mod weight;

pub use unpack::{Accumulator, ScaledOutput, unpack_scaled};
pub(crate) use unpack::{Product, Tile};
pub use weight::{pack_group_i4, quantize_group_i4, unpack_group_i4};

/// Largest magnitude of a digit. -8 is left unused so that the range is symmetric and `7 * 7 * K` bounds a sum.
pub const I4_MAX: f32 = 7.0;

/// Largest magnitude of two digits.
const TWO_DIGITS_MAX: f32 = I4_MAX * Digits::BASE + I4_MAX;

/// Largest K of a call with I16 results: `7 * 7 * 640 = 31,360`, and 672, the next multiple of the alignment of K,
/// would reach 32,928 and saturate.
// SOURCE: saturation instead of wrapping, and 668 as the bound for +-7, from one open-source driver project.
pub const SAFE_K_I4: usize = 640;

/// Digits of an activation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Digits {
    /// 15 levels, one row of A.
    #[default]
    One,
    /// 225 levels, two rows of A.
    Two,
}

impl Digits {
    /// What a unit of the high digit stands for.
    pub(crate) const BASE: f32 = 15.0;

    /// Clip of one digit in units of the RMS. For normal values, and rotated rows nearly are, the squared error is
    /// least at 2.46; here it is 1.29 % of their square, and no search for each row did better.
    ///
    /// SOURCE: the error of 2,000,000 normal values at clips from 2.3 to 3.6; KL divergence of a small model with
    /// this clip, with clips of 2.3 to 2.8 and with a search of 12 clips for each row.
    const CLIP_RMS: f32 = 2.5;

    /// Rows of A and C for each activation row.
    #[must_use]
    pub const fn rows(self) -> usize {
        match self {
            Self::One => 1,
            Self::Two => 2,
        }
    }

    /// Scale of the values of one row and segment; 0 for zeros, NaN if one is not finite.
    fn scale(self, values: &[f32]) -> f32 {
        let (clip, levels) = match self {
            Self::One => (calibrate::rms_clip(values, Self::CLIP_RMS), I4_MAX),
            Self::Two => (calibrate::clip(values, Method::AbsMax), TWO_DIGITS_MAX),
        };
        let scale = clip.magnitude() / levels;
        if scale < f32::MIN_POSITIVE {
            0.0
        } else {
            scale
        }
    }
}

/// Step 1 for INT4 activations: rotates and quantizes rows into a row-major scratch of nibbles.
///
/// - `src`: any rows, K elements each (K even); `work`: at least K elements of scratch
/// - `segment_k`: elements of a K segment (even, the last segment may be short); each has its own scale
/// - `out`: `src.count() * digits.rows() * K / 2` bytes, row-major without gaps; the digits of a row follow each other,
///   the high one first
/// - `scales`: `src.count() * ceil(K / segment_k)` elements, row-major; NaN for a segment with a non-finite element
///
/// # Panics
/// If a length disagrees, or K or `segment_k` is odd or 0.
pub fn quantize_rows_i4(
    src: Rows<'_, f32>,
    rotation: &Rotation,
    segment_k: usize,
    digits: Digits,
    work: &mut [f32],
    out: &mut [u8],
    scales: &mut [f32],
) {
    let k = src.row_len();
    let row_bytes = nibble_bytes(k, segment_k);
    let (segments, digit_rows) = (k.div_ceil(segment_k), digits.rows());
    assert_eq!(
        out.len(),
        src.count() * digit_rows * row_bytes,
        "scratch does not hold the digits"
    );
    assert_eq!(
        scales.len(),
        src.count() * segments,
        "one scale per row and segment"
    );
    for m in 0..src.count() {
        let row = rotated(src.row(m), rotation, work);
        let out = &mut out[m * digit_rows * row_bytes..][..digit_rows * row_bytes];
        let (high, low) = out.split_at_mut(row_bytes);
        let scales = &mut scales[m * segments..][..segments];
        for (index, (values, scale)) in row.chunks(segment_k).zip(scales).enumerate() {
            let range = index * segment_k / 2..(index * segment_k + values.len()) / 2;
            let high = &mut high[range.clone()];
            *scale = digits.scale(values);
            let inverse = 1.0 / *scale;
            match digits {
                Digits::One if *scale > 0.0 => quantize_one(values, inverse, high),
                Digits::Two if *scale > 0.0 => quantize_two(values, inverse, high, &mut low[range]),
                Digits::One => high.fill(0),
                Digits::Two => {
                    high.fill(0);
                    low[range].fill(0);
                }
            }
        }
    }
}

/// Step 1 for INT8 activations that meet INT4 weights: rotates and quantizes rows with one scale each.
///
/// - as [`pack::quantize_rows_i8`], with the rotation in place of the block
///
/// # Panics
/// If a length disagrees.
pub fn quantize_rows_i8(
    src: Rows<'_, f32>,
    rotation: &Rotation,
    work: &mut [f32],
    out: &mut [i8],
    scales: &mut [f32],
) {
    let k = src.row_len();
    for m in 0..src.count() {
        let row = rotated(src.row(m), rotation, work);
        pack::quantize_rows_i8(
            Rows::new(row, 1, k, k),
            1,
            &mut [],
            &mut out[m * k..][..k],
            &mut scales[m..=m],
        );
    }
}

/// Step 1 for FP16 activations that meet INT4 weights: rotates rows and converts them, each with its power of two.
///
/// - as [`pack::convert_rows_f16`], after the rotation
///
/// # Panics
/// If a length disagrees.
pub fn convert_rows_f16(
    src: Rows<'_, f32>,
    rotation: &Rotation,
    work: &mut [f32],
    out: &mut [f16],
    factors: &mut [f32],
) {
    let k = src.row_len();
    for (m, factor) in factors.iter_mut().enumerate() {
        let row = rotated(src.row(m), rotation, work);
        *factor = quant::convert_row_f16(row, &mut out[m * k..][..k]);
    }
}

/// Step 2 for INT4 activations: [`pack::interleave_a`] on bytes.
///
/// - `src`: rows of nibbles, `digits.rows()` for each activation row, of the K range that `dst` covers
///   ([`Rows::columns`] in bytes); `m`: rows of the bucket, at least that many
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

/// The row after its rotation, in `work`.
fn rotated<'a>(row: &[f32], rotation: &Rotation, work: &'a mut [f32]) -> &'a [f32] {
    let work = &mut work[..row.len()];
    work.copy_from_slice(row);
    rotation.apply(work);
    work
}

/// Bytes of a row of nibbles.
///
/// # Panics
/// If K or the length of segments is odd, or the latter 0.
fn nibble_bytes(k: usize, segment_k: usize) -> usize {
    assert!(
        k.is_multiple_of(2) && segment_k.is_multiple_of(2) && segment_k > 0,
        "rows of {k} nibbles in segments of {segment_k}"
    );
    k / 2
}

/// Nibbles `clamp(round(x * inverse), -7, 7)`, ties to even, two to the byte; `out` holds half as many bytes as values.
#[multiversion(targets("x86_64+avx2"))]
fn quantize_one(values: &[f32], inverse: f32, out: &mut [u8]) {
    for (values, out) in values.chunks(CHUNK).zip(out.chunks_mut(CHUNK / 2)) {
        let mut digits = [0; CHUNK];
        for (digit, x) in digits.iter_mut().zip(values) {
            *digit = low_byte(clamped(x * inverse, I4_MAX));
        }
        join_nibbles(&digits, out);
    }
}

/// Two digits of base 15 of `clamp(round(x * inverse), -112, 112)`.
#[multiversion(targets("x86_64+avx2"))]
fn quantize_two(values: &[f32], inverse: f32, high: &mut [u8], low: &mut [u8]) {
    let out = high.chunks_mut(CHUNK / 2).zip(low.chunks_mut(CHUNK / 2));
    for (values, (high, low)) in values.chunks(CHUNK).zip(out) {
        let mut digits = [[0; CHUNK]; 2];
        let [highs, lows] = &mut digits;
        for ((h, l), x) in highs.iter_mut().zip(lows).zip(values) {
            let q = clamped(x * inverse, TWO_DIGITS_MAX) - round::MAGIC;
            // No quotient is halfway between two integers, since the base is odd.
            let digit = clamped(q * (1.0 / Digits::BASE), I4_MAX);
            *h = low_byte(digit);
            *l = low_byte(q - (digit - round::MAGIC) * Digits::BASE + round::MAGIC);
        }
        join_nibbles(&digits[0], high);
        join_nibbles(&digits[1], low);
    }
}

/// Values that a step quantizes; even.
const CHUNK: usize = 64;

/// Pairs of 4-bit integers, one to a byte, as bytes: the first of a pair in the low nibble.
#[inline(always)]
fn join_nibbles(digits: &[i8; CHUNK], out: &mut [u8]) {
    let (pairs, _) = digits.as_chunks();
    for (out, [low, high]) in out.iter_mut().zip(pairs) {
        *out = (low & 0xf | high << 4).cast_unsigned();
    }
}
