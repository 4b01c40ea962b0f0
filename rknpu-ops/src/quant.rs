//! Numbers in the NPU's formats: the block Hadamard transform, INT8 rows with one scale, FP16 rows
//! with a power of two.
//!
//! Everything here works on a single row along K, so a row's result depends on no other row, on no
//! batch size and on no thread count, bit for bit. The bytes are moved into native layouts by
//! `pack.rs`.
//!
//! ```text
//! activation row  --rotate-->  row'  --row_scale_i8-->  scale, quantize_row_by --> i8     x' = scale * i8
//! weight row      --rotate-->  row'  --(same)-------->  scale, i8                         w' = scale * i8
//! x . w = x' . w' because the rotation is orthonormal and is applied to both
//! ```
//!
//! The loops are in `scalar` and, for aarch64, in `neon`. All versions execute the same additions
//! and multiplications in the same order, without fused multiply-add, so the choice never changes a
//! result.

use half::f16;
use multiversion::multiversion;

use crate::kernel;
use crate::round::{MAGIC, clamped, low_byte};

/// Largest Hadamard block, in elements of K.
///
/// A block spreads an outlier over its elements as `1/sqrt(block)`: at 4096 that is already 1/64 of
/// it, so a longer block gains nothing, while 4096 floats (16 KiB) still fit the smallest
/// first-level cache in use (32 KiB).
pub const HADAMARD_BLOCK_MAX: usize = 4096;

/// Largest quantized magnitude. -128 is left unused so that the range is symmetric and
/// `127 * 127 * K` bounds a sum.
pub const I8_MAX: f32 = 127.0;

/// Weight of the high one of two INT8 digits.
pub const WIDE_BASE: f32 = 255.0;

/// Largest magnitude of two INT8 digits.
const WIDE_MAX: f32 = I8_MAX * WIDE_BASE + I8_MAX;

/// Smallest scale of a row that is not treated as zero: the smallest normal FP32 number, so that
/// `1 / scale` is finite.
const SCALE_MIN: f32 = f32::MIN_POSITIVE;

/// Exponent of the power of two just below an FP16 row's largest magnitude: one binade below the
/// largest finite FP16.
const F16_TARGET_EXPONENT: i32 = 14;

/// Applies the normalized Walsh-Hadamard transform (natural order) to each block of `block`
/// elements, in place.
///
/// - `row`: any multiple of `block` elements; `block`: a power of two, at most
///   [`HADAMARD_BLOCK_MAX`]
/// - the matrix is symmetric and orthonormal (entries `+-1/sqrt(block)`): applied twice it is the
///   identity, applied to both operands it leaves their dot product unchanged, both up to FP32
///   rounding
/// - elements are first multiplied by `1/sqrt(block)`, then added in stages of distance 1, 2, 4, …
///   `block / 2`
/// - a non-finite element makes every element of its block non-finite
///
/// # Panics
/// If `block` is not such a power of two or does not divide the length of `row`.
pub fn hadamard(row: &mut [f32], block: usize) {
    assert!(
        block.is_power_of_two() && block <= HADAMARD_BLOCK_MAX && row.len().is_multiple_of(block),
        "hadamard block {block} does not fit a row of {}",
        row.len()
    );
    if block == 1 {
        return;
    }
    // CAST: a block is a power of two, which FP32 represents exactly.
    let norm = 1.0 / (block as f32).sqrt();
    kernel::hadamard(row, block, norm);
}

/// Returns the scale that maps a row onto [-127, 127]: `max |x| / 127`.
///
/// - 0 for a row of zeros, for an empty row, and for a row so small (`max |x|` below about 1.5e-36)
///   that the scale would be subnormal
/// - NaN if any element is infinite or NaN: every output that is multiplied by the scale is then
///   NaN
#[must_use]
pub fn row_scale_i8(row: &[f32]) -> f32 {
    let max = f32::from_bits(kernel::absmax_bits(row));
    if !max.is_finite() {
        return f32::NAN;
    }
    let scale = max / I8_MAX;
    if scale < SCALE_MIN { 0.0 } else { scale }
}

/// Quantizes a row: `out[k] = clamp(round(row[k] / scale), -127, 127)`, ties to even.
///
/// - `scale`: as [`row_scale_i8`] returns it; the quotient is computed as a product with
///   `1 / scale`
/// - error of `scale * out[k]`: at most `scale / 2 * (1 + 2^-15)` for elements inside the range of
///   the scale
/// - all zeros if `scale` is 0, negative, subnormal or NaN
///
/// # Panics
/// If `row` and `out` differ in length.
pub fn quantize_row_by(row: &[f32], scale: f32, out: &mut [i8]) {
    assert_eq!(row.len(), out.len(), "row and output differ in length");
    if scale >= SCALE_MIN {
        kernel::quantize(row, 1.0 / scale, out);
    } else {
        out.fill(0);
    }
}

/// Quantizes one row with the scale of its largest magnitude, which it returns: [`row_scale_i8`],
/// [`quantize_row_by`].
///
/// ```
/// use rknpu_ops::quant::quantize_row_i8;
///
/// let mut levels = [0; 4];
/// let scale = quantize_row_i8(&[0.5, -1.27, 0.01, 0.0], &mut levels);
/// assert_eq!(levels, [50, -127, 1, 0]);
/// assert!((scale - 0.01).abs() < 1e-6);
/// ```
///
/// # Panics
/// If `row` and `out` differ in length.
pub fn quantize_row_i8(row: &[f32], out: &mut [i8]) -> f32 {
    let scale = row_scale_i8(row);
    quantize_row_by(row, scale, out);
    scale
}

/// Quantizes one row to two INT8 digits with a scale, which it returns:
/// `row[k]` is about `scale * (255 * high[k] + low[k])`.
///
/// - `high`, `low`: as many elements as the row, each in [-127, 127]
/// - scale: `max |x| / 32512`; the error is at most `scale / 2 * (1 + 2^-7)`
/// - 0, and zeros, for rows of zeros and those so small that the scale would be subnormal; NaN, and
///   zeros, if an element is not finite
///
/// ```
/// use rknpu_ops::quant::quantize_row_wide;
///
/// let (mut high, mut low) = ([0; 3], [0; 3]);
/// let scale = quantize_row_wide(&[32512.0, -256.0, 3.0], &mut high, &mut low);
/// assert_eq!((scale, high, low), (1.0, [127, -1, 0], [127, -1, 3]));
/// ```
///
/// # Panics
/// If `row`, `high` and `low` differ in length.
pub fn quantize_row_wide(row: &[f32], high: &mut [i8], low: &mut [i8]) -> f32 {
    let lengths = [high.len(), low.len()];
    assert_eq!(lengths, [row.len(); 2], "row and digits differ in length");
    let max = f32::from_bits(kernel::absmax_bits(row));
    let scale = if max.is_finite() {
        max / WIDE_MAX
    } else {
        f32::NAN
    };
    if scale >= SCALE_MIN {
        digits(row, 1.0 / scale, high, low);
        return scale;
    }
    high.fill(0);
    low.fill(0);
    if scale.is_nan() { scale } else { 0.0 }
}

/// Computes the two digits of `clamp(round(x * inverse), -32512, 32512)`, ties to even.
#[multiversion(targets("x86_64+avx2"))]
fn digits(row: &[f32], inverse: f32, high: &mut [i8], low: &mut [i8]) {
    for ((x, high), low) in row.iter().zip(high).zip(low) {
        let q = clamped(x * inverse, WIDE_MAX) - MAGIC;
        // The base is odd, so no quotient is halfway between two integers.
        let digit = clamped(q * (1.0 / WIDE_BASE), I8_MAX);
        *high = low_byte(digit);
        *low = low_byte(q - (digit - MAGIC) * WIDE_BASE + MAGIC);
    }
}

/// Quantizes one row without rounding. Returns the scale, the largest number of which all elements
/// are multiples. Returns `None` and leaves `out` unwritten if an element is more than 127 times
/// the scale, or if all elements are zero.
///
/// - `scale * out[k]` is `row[k]`, exactly
/// - there is no scale for rows whose scale would be subnormal
///
/// ```
/// use rknpu_ops::quant::exact_row_i8;
///
/// let mut levels = [0; 4];
/// assert_eq!(exact_row_i8(&[0.75, -1.25, 0.0, 31.75], &mut levels), Some(0.25));
/// assert_eq!(levels, [3, -5, 0, 127]);
/// assert_eq!(exact_row_i8(&[0.75, -1.25, 0.0, 32.0], &mut levels), None);
/// ```
///
/// # Panics
/// If `row` and `out` differ in length.
#[must_use]
pub fn exact_row_i8(row: &[f32], out: &mut [i8]) -> Option<f32> {
    assert_eq!(row.len(), out.len(), "row and output differ in length");
    let max = f32::from_bits(kernel::absmax_bits(row));
    if !max.is_finite() {
        return None;
    }
    // Each element is an odd number times a power of two. The common divisor is that of the odd
    // numbers, times the smallest power.
    let (mut divisor, mut exponent) = (0, i32::MAX);
    for x in row.iter().filter(|x| **x != 0.0) {
        let (odd, power) = odd_part(*x);
        if power < exponent || divisor == 0 || odd % divisor != 0 {
            (divisor, exponent) = (common_divisor(odd, divisor), power.min(exponent));
            let unit = f64::from(divisor) * f64::from(exponent).exp2();
            if f64::from(max) > f64::from(I8_MAX) * unit {
                return None;
            }
        }
    }
    // CAST: at most 24 bits, because it divides an FP32 mantissa, times the power of two of one of
    // the elements.
    #[expect(clippy::cast_possible_truncation, reason = "exact, see above")]
    let scale = (f64::from(divisor) * f64::from(exponent).exp2()) as f32;
    if divisor == 0 || scale < SCALE_MIN {
        return None;
    }
    for (out, x) in out.iter_mut().zip(row) {
        // CAST: the element is a multiple of the divisor, so the quotient is a whole number, of at
        // most 127.
        #[expect(clippy::cast_possible_truncation, reason = "see above")]
        let level = (x / scale) as i8;
        *out = level;
    }
    Some(scale)
}

/// Returns the magnitude of a number other than zero as an odd number times a power of two, whose
/// exponent is the second.
fn odd_part(x: f32) -> (u32, i32) {
    let bits = x.to_bits();
    let (field, fraction) = (bits >> 23 & 0xff, bits & 0x7f_ffff);
    // SOURCE: IEEE 754: subnormal numbers have the exponent of the smallest normal ones, and no
    // leading one.
    let (mantissa, exponent) = match field {
        0 => (fraction, -149),
        _ => (fraction | 1 << 23, field.cast_signed() - 150),
    };
    let zeros = mantissa.trailing_zeros();
    (mantissa >> zeros, exponent + zeros.cast_signed())
}

/// Euclid's algorithm; the divisor of a number and 0 is the number.
fn common_divisor(mut a: u32, mut b: u32) -> u32 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// Converts one activation row to FP16 after a multiplication by a power of two, and returns the
/// inverse of this power.
///
/// - `row`, `out`: K elements; `out[k] = f16(row[k] * 2^e)`, ties to even; returns `2^-e`, to
///   multiply output rows by
/// - `e` puts the largest magnitude into `[2^14, 2^15)`. It is at most 126, so that `2^-e` is a
///   normal number: smaller rows stay below that range
/// - a row of zeros: zeros and 1; a row with an infinite or NaN element: zeros and NaN, so that the
///   output row is NaN
///
/// Real models have FP32 activations above 65504, which a plain conversion would turn into
/// infinity, and rows so small that it would leave them with a few bits or none. A power of two is
/// exact in both directions, so the only rounding is that to FP16's 11 bits, relative to each
/// element down to 2^-29 of the row's largest one, and absolute (at most 2^-39 of the largest)
/// below.
///
/// # Panics
/// If `row` and `out` differ in length.
pub fn convert_row_f16(row: &[f32], out: &mut [f16]) -> f32 {
    assert_eq!(row.len(), out.len(), "row and output differ in length");
    let (factor, inverse) = f16_factor(kernel::absmax_bits(row));
    if inverse.is_nan() {
        out.fill(f16::ZERO);
    } else {
        kernel::scale_to_f16(row, factor, out);
    }
    inverse
}

/// Returns `(2^e, 2^-e)` for the largest magnitude of a row, given as bits; `(0, NaN)` if it is not
/// finite.
fn f16_factor(absmax: u32) -> (f32, f32) {
    if absmax == 0 {
        return (1.0, 1.0);
    }
    if absmax >= f32::INFINITY.to_bits() {
        return (0.0, f32::NAN);
    }
    // A subnormal has the exponent field 0, which ends at the upper clamp as every tiny number
    // does.
    let exponent = (absmax >> 23).cast_signed() - 127;
    let e = (F16_TARGET_EXPONENT - exponent).min(126);
    let power_of_two = |e: i32| f32::from_bits((e + 127).cast_unsigned() << 23);
    (power_of_two(e), power_of_two(-e))
}
