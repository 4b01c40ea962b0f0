//! Native C of several K segments to FP32 rows, each segment with scales of its own.
//!
//! ```text
//! for 64 columns at a time            as in pack/unpack.rs: few streams, every line of input read at once
//!   for 4 rows of the product at a time
//!     for each segment
//!       for each row: sums[row][64] += (c * w_scale) * a_scale
//!     for each row: out[64] = sums
//! ```

use std::ops::Range;

use super::Digits;
use crate::layout::NativeC;
use crate::pack::{OutputRows, Rows};

/// Columns of a step; a multiple of every `t`.
const COLUMNS: usize = 64;

/// Rows of the product in a step.
const ROWS: usize = 4;

/// Element of C that [`unpack_scaled`] takes: `i16`, `i32` or `f32`.
pub trait Accumulator: Copy + Default {
    /// Its value in FP32: exact for `i16` and `f32`, rounded to 24 bits for `i32`.
    fn to_f32(self) -> f32;
}

impl Accumulator for i16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from(self)
    }
}

impl Accumulator for i32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        // CAST: rounds to 24 bits, as the trait says.
        self as f32
    }
}

impl Accumulator for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
}

/// The result of one K segment.
#[derive(Clone, Copy, Debug)]
pub struct ScaledOutput<'a, T> {
    /// Native C: whole native slices, as many columns as every other segment.
    pub c: &'a [T],
    /// One scale for each column to unpack.
    pub w_scales: &'a [f32],
}

/// What [`add`] needs to find an element.
#[derive(Clone, Copy)]
struct Shape {
    /// Rows of C.
    m: usize,
    digits: Digits,
}

/// Unpacks a product with weights that have a scale for each column and K segment:
/// `dst[m][n] = sum over segments of (c[m][n] * w_scales[n]) * a_scales[m][segment]`.
///
/// - `segments`: in order of K, at least one; `layout`: of C
/// - `m`: rows of the buffers (the bucket); `digits`: of the activations: with two, row `m` of the product is
///   `15 * c[2 m] + c[2 m + 1]`
/// - `rows`: rows of the product to unpack; `a_scales`: indexed by them, each row with one scale, or one a segment
/// - one FP32 rounding each for the conversion of a sum (none for `i16`, also with two digits: it has at most 19 bits),
///   its product with the weight scale, the product with the activation scale, and the addition, in order of K
/// - a NaN scale makes its row or column NaN
///
/// # Panics
/// If there is no segment, if `rows` leaves the bucket, if `layout.t` is not 4, 8 or 16, or if a length disagrees.
pub fn unpack_scaled<T: Accumulator>(
    segments: &[ScaledOutput<'_, T>],
    layout: NativeC,
    m: usize,
    digits: Digits,
    rows: Range<usize>,
    a_scales: Rows<'_, f32>,
    dst: &mut impl OutputRows,
) {
    let t = layout.t;
    assert!(matches!(t, 4 | 8 | 16), "native slices of {t} columns");
    assert!(!segments.is_empty(), "a product of no segments");
    assert!(
        m > 0 && rows.end * digits.rows() <= m,
        "rows {rows:?} with {} digits in a bucket of {m}",
        digits.rows()
    );
    let (len, columns) = (segments[0].c.len(), segments[0].w_scales.len());
    for segment in segments {
        assert!(
            segment.c.len() == len && len.is_multiple_of(t * m),
            "output of {} elements, first of {len}, native slices of {t} x {m}",
            segment.c.len()
        );
        assert_eq!(segment.w_scales.len(), columns, "scales of a segment");
    }
    assert!(columns <= len / m, "{columns} columns of {}", len / m);
    let per_row = a_scales.row_len();
    assert!(
        per_row == 1 || per_row == segments.len(),
        "{per_row} scales in a row of {} segments",
        segments.len()
    );
    let shape = Shape { m, digits };
    for n0 in (0..columns).step_by(COLUMNS) {
        let range = n0..columns.min(n0 + COLUMNS);
        for m0 in rows.clone().step_by(ROWS) {
            let part = m0..rows.end.min(m0 + ROWS);
            let mut sums = [[0.0; COLUMNS]; ROWS];
            for (index, segment) in segments.iter().enumerate() {
                let w_scales = &segment.w_scales[range.clone()];
                for (m, sums) in part.clone().zip(&mut sums) {
                    let a_scale = a_scales.row(m)[index.min(per_row - 1)];
                    let sums = &mut sums[..w_scales.len()];
                    match t {
                        4 => add::<T, 4>(segment.c, shape, (m, n0), w_scales, a_scale, sums),
                        8 => add::<T, 8>(segment.c, shape, (m, n0), w_scales, a_scale, sums),
                        _ => add::<T, 16>(segment.c, shape, (m, n0), w_scales, a_scale, sums),
                    }
                }
            }
            for (m, sums) in part.zip(&sums) {
                let row = dst.row(m);
                assert_eq!(row.len(), columns, "columns of output row {m}");
                row[range.clone()].copy_from_slice(&sums[..range.len()]);
            }
        }
    }
}

/// Adds columns of row `m` of the product, from `n0` on, as many as `sums` has, from native slices of `W` columns.
#[inline(always)]
fn add<T: Accumulator, const W: usize>(
    c: &[T],
    shape: Shape,
    (m, n0): (usize, usize),
    w_scales: &[f32],
    a_scale: f32,
    sums: &mut [f32],
) {
    let digits = shape.digits.rows();
    let slices = c[n0 * shape.m..].chunks_exact(W * shape.m);
    for ((slice, sums), w_scales) in slices.zip(sums.chunks_mut(W)).zip(w_scales.chunks(W)) {
        let at = |digit: usize| &slice[(m * digits + digit) * W..][..W];
        let mut values = [0.0; W];
        match shape.digits {
            Digits::One => {
                for (value, c) in values.iter_mut().zip(at(0)) {
                    *value = c.to_f32();
                }
            }
            Digits::Two => {
                for ((value, high), low) in values.iter_mut().zip(at(0)).zip(at(1)) {
                    *value = high.to_f32() * Digits::BASE + low.to_f32();
                }
            }
        }
        for ((sum, value), w_scale) in sums.iter_mut().zip(values).zip(w_scales) {
            *sum += value * w_scale * a_scale;
        }
    }
}
