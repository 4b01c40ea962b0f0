//! Native C of several K segments to FP32 rows, each segment with scales of its own.
//!
//! ```text
//! for 64 columns at a time            as in scalar/unpack.rs: few streams, every line of input read at once
//!   for 4 rows of the product at a time
//!     tile[4][64] = 0
//!     for each segment, row, column: tile[row][column] += (c * w_scale) * a_scale      kernel::scaled_tile
//!     for each row: out[64] = tile[row]
//! ```

use std::ops::Range;

use super::Digits;
use crate::kernel;
use crate::layout::NativeC;
use crate::pack::{OutputRows, Rows};

/// Columns of a tile; a multiple of every `t`.
const COLUMNS: usize = 64;

/// Rows of the product in a tile.
pub(crate) const ROWS: usize = 4;

/// Results of a tile.
pub(crate) type Tile = [[f32; COLUMNS]; ROWS];

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

/// A product that was checked: its segments, and where an element is.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a, T> {
    pub(crate) segments: &'a [ScaledOutput<'a, T>],
    /// Columns of a native slice: 4, 8 or 16.
    pub(crate) t: usize,
    /// Rows of C.
    pub(crate) m: usize,
    pub(crate) digits: Digits,
    /// One scale in a row, or one for each segment.
    pub(crate) a_scales: Rows<'a, f32>,
}

impl<T> Product<'_, T> {
    /// Scale of a row of activations in a segment.
    #[inline(always)]
    pub(crate) fn a_scale(&self, m: usize, segment: usize) -> f32 {
        let row = self.a_scales.row(m);
        row[segment.min(row.len() - 1)]
    }
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
    let product = Product {
        segments,
        t,
        m,
        digits,
        a_scales,
    };
    for n0 in (0..columns).step_by(COLUMNS) {
        let range = n0..columns.min(n0 + COLUMNS);
        for m0 in rows.clone().step_by(ROWS) {
            let part = m0..rows.end.min(m0 + ROWS);
            let mut sums = [[0.0; COLUMNS]; ROWS];
            kernel::scaled_tile(product, part.clone(), range.clone(), &mut sums);
            for (m, sums) in part.zip(&sums) {
                let row = dst.row(m);
                assert_eq!(row.len(), columns, "columns of output row {m}");
                row[range.clone()].copy_from_slice(&sums[..range.len()]);
            }
        }
    }
}
