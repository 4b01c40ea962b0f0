//! Unpacks native C of several K segments, each with its own scales, into FP32 rows.
//!
//! ```text
//! for 64 columns at a time            as in scalar/unpack.rs: few streams, every line of input read at once
//!   for 4 rows of the product at a time
//!     tile[4][64] = 0
//!     for each segment, row, column: tile[row][column] += (c + half) * w_scale * a_scale     kernel::scaled_tile
//!     for each row: out[64] = tile[row]
//! ```

use std::ops::Range;

use super::Digits;
use crate::kernel;
use crate::layout::NativeC;
use crate::pack::{OutputRows, Rows};

/// Columns of a [`SumTile`]; a multiple of every `t`.
const COLUMNS: usize = 64;

/// Rows of a [`SumTile`].
const ROWS: usize = 4;

/// FP32 sums of a part of a product.
pub type SumTile = [[f32; COLUMNS]; ROWS];

/// Element of C that [`unpack_scaled`] accepts: `i16`, `i32` or `f32`.
pub trait SumElem: Copy + Default + kernel::Quad {
    /// Returns the value in FP32: exact for `i16` and `f32`, rounded to 24 bits for `i32`.
    fn to_f32(self) -> f32;
}

impl SumElem for i16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from(self)
    }
}

impl SumElem for i32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        // CAST: rounds to 24 bits, as documented at the trait.
        self as f32
    }
}

impl SumElem for f32 {
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

/// A product with weights that have a scale for each column and K segment:
/// `p[m][n] = sum over segments of ((c[m][n] + half[m][segment]) * w_scales[n]) *
/// a_scale[m][segment]`.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a, T> {
    pub(crate) segments: &'a [ScaledOutput<'a, T>],
    /// Columns of a native slice: 4, 8 or 16.
    pub(crate) t: usize,
    /// Rows of C.
    pub(crate) m: usize,
    pub(crate) digits: Digits,
    /// The factors of each row.
    factors: Rows<'a, f32>,
}

impl<'a, T> Product<'a, T> {
    /// Returns a product that combines the device's results of all K segments.
    ///
    /// - `segments`: in order of K, at least one; `layout`: of C
    /// - `m`: rows of the buffers (the bucket); `digits`: of the activations: with two, row `m` of
    ///   the product is `15 * c[2 m] + c[2 m + 1]`, and with two bytes `255 * c[2 m] + c[2 m + 1]`
    /// - `factors`: for each row of the product [`factors_i4`](super::factors_i4) or
    ///   [`factors`](super::factors) elements
    ///
    /// # Panics
    /// If `segments` is empty, if `layout.t` is not 4, 8 or 16, or if a length disagrees.
    #[must_use]
    pub fn new(
        segments: &'a [ScaledOutput<'a, T>],
        layout: NativeC,
        m: usize,
        digits: Digits,
        factors: Rows<'a, f32>,
    ) -> Self {
        let t = layout.t;
        assert!(matches!(t, 4 | 8 | 16), "native slices of {t} columns");
        assert!(
            m > 0 && !segments.is_empty(),
            "{m} rows, {} segments",
            segments.len()
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
        let per_row = factors.row_len();
        assert!(
            [super::factors, super::factors_i4]
                .iter()
                .any(|f| f(segments.len()) == per_row),
            "{per_row} factors in a row of {} segments",
            segments.len()
        );
        Self {
            segments,
            t,
            m,
            digits,
            factors,
        }
    }

    /// Returns the number of columns of the product.
    #[must_use]
    pub const fn columns(&self) -> usize {
        self.segments[0].w_scales.len()
    }

    /// Returns the scale and the half of a row of activations in a segment.
    #[inline(always)]
    pub(crate) fn factors(&self, m: usize, segment: usize) -> (f32, f32) {
        let row = self.factors.row(m);
        let scales = row.len() - self.segments.len();
        (row[segment.min(scales - 1)], row[scales + segment])
    }
}

/// Unpacks rows of a product.
///
/// - the sum with the half is exact for `i16`, also with two digits (it has at most 20 bits), and
///   for `i32` below 2^23, as all sums of a K segment of INT4 weights are; two digits of `i32` are
///   rounded each, and their sum; then one FP32 rounding each for the product with the weight
///   scale, the product with the activation scale, and the addition, in order of K
/// - a NaN scale makes its row or column NaN
///
/// # Panics
/// If `rows` leaves the bucket, or a row of `dst` differs in length from the columns.
pub fn unpack_scaled<T: SumElem>(
    product: Product<'_, T>,
    rows: Range<usize>,
    dst: &mut impl OutputRows,
) {
    assert!(
        rows.end * product.digits.rows() <= product.m,
        "rows {rows:?} with {} digits in a bucket of {}",
        product.digits.rows(),
        product.m
    );
    let columns = product.columns();
    for n0 in (0..columns).step_by(COLUMNS) {
        let range = n0..columns.min(n0 + COLUMNS);
        for m0 in rows.clone().step_by(ROWS) {
            let part = m0..rows.end.min(m0 + ROWS);
            let mut tile = [[0.0; COLUMNS]; ROWS];
            kernel::scaled_tile(product, part.clone(), range.clone(), &mut tile);
            for (m, values) in part.zip(&tile) {
                let row = dst.row(m);
                assert_eq!(row.len(), columns, "columns of output row {m}");
                row[range.clone()].copy_from_slice(&values[..range.len()]);
            }
        }
    }
}
