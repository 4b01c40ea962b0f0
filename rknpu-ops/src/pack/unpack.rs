//! Unpacks native C into FP32 rows: sums the K segments, scales, and writes pieces of rows.

use std::ops::Range;

use crate::kernel;
use crate::layout::NativeC;

/// Destination of unpacked FP32 rows.
///
/// A trait and not a slice because several cores write different column ranges of the same rows:
/// the owner of the destination gives each of them an implementation that returns only its own
/// pieces. [`StridedRows`] is the simplest one.
pub trait OutputRows {
    /// Returns the piece of row `m` to write: as many elements as there are columns to unpack.
    /// Called several times per row.
    fn row(&mut self, m: usize) -> &mut [f32];
}

/// [`OutputRows`] in one slice: row `m` at `data[m * stride]`.
#[derive(Debug)]
pub struct StridedRows<'a> {
    data: &'a mut [f32],
    len: usize,
    stride: usize,
}

impl<'a> StridedRows<'a> {
    /// Describes rows of `len` elements, `stride` elements apart.
    #[must_use]
    pub const fn new(data: &'a mut [f32], len: usize, stride: usize) -> Self {
        Self { data, len, stride }
    }
}

impl OutputRows for StridedRows<'_> {
    /// Returns row `m`.
    ///
    /// # Panics
    /// If row `m` leaves the slice.
    #[inline]
    fn row(&mut self, m: usize) -> &mut [f32] {
        &mut self.data[m * self.stride..][..self.len]
    }
}

/// Native C buffers of one matmul, one per K segment; their sum is the product.
#[derive(Clone, Copy, Debug)]
pub struct NativeOutput<'a, T> {
    pub(crate) segments: &'a [&'a [T]],
    pub(crate) t: usize,
    pub(crate) m: usize,
}

impl<'a, T> NativeOutput<'a, T> {
    /// Describes the buffers of `m` rows (the bucket, at least 1), in order of K; all cover the
    /// same columns.
    ///
    /// A buffer is any number of whole native slices of `m * t` elements, so a column range that
    /// starts at a multiple of `t` is a sub-slice of one.
    ///
    /// # Panics
    /// If `segments` is empty, if one is not whole native slices or differs in length from the
    /// first, or if `t` is not 4, 8 or 16.
    #[must_use]
    pub fn new(segments: &'a [&'a [T]], layout: NativeC, m: usize) -> Self {
        let t = layout.t;
        assert!(matches!(t, 4 | 8 | 16), "native slices of {t} columns");
        assert!(
            m > 0 && !segments.is_empty(),
            "{m} rows, {} buffers",
            segments.len()
        );
        let len = segments[0].len();
        for segment in segments {
            assert!(
                segment.len() == len && len.is_multiple_of(t * m),
                "output of {} elements, first of {len}, native slices of {t} x {m}",
                segment.len()
            );
        }
        Self { segments, t, m }
    }

    /// Checks that `rows` and `columns` are in the buffers.
    ///
    /// # Panics
    /// If they are not.
    pub(crate) fn check(&self, rows: &Range<usize>, columns: usize) {
        assert!(
            rows.end <= self.m,
            "rows {rows:?} of a bucket of {}",
            self.m
        );
        let have = self.segments[0].len() / self.m;
        assert!(columns <= have, "{columns} columns of {have}");
    }
}

/// Unpacks an INT8 product:
/// `dst[m][n] = (sum over segments of c[m][n]) * w_scales[n] * a_scales[m]`.
///
/// - `rows`: rows to unpack, within the bucket; `a_scales`: indexed by row; `w_scales`: one per
///   column, as many as columns to unpack
/// - the sum is exact: INT32 holds `127 * 127 * K` for all segments together up to K = 133,144
/// - one FP32 rounding each for the conversion of the sum, the product with the weight scale, and
///   then the product with the row scale, in this order: weight scales are moderate numbers, so the
///   first product neither overflows nor underflows for any magnitude of the row
/// - a NaN scale makes its row or column NaN
///
/// # Panics
/// If `rows` leaves the bucket or `a_scales`, `w_scales` exceeds the columns of the buffers, or a
/// row of `dst` differs in length from `w_scales`.
pub fn unpack_i32(
    c: NativeOutput<'_, i32>,
    rows: Range<usize>,
    a_scales: &[f32],
    w_scales: &[f32],
    dst: &mut impl OutputRows,
) {
    kernel::unpack_i32(c, rows, |m| a_scales[m], w_scales, dst);
}

/// Unpacks an FP16 product: `dst[m][n] = (sum over segments of c[m][n]) * factors[m]`.
///
/// - `rows`: rows to unpack, within the bucket; `factors`: indexed by row, as
///   [`convert_rows_f16`](super::convert_rows_f16) returns them; `columns`: number of columns to
///   unpack
/// - segments are added in FP32 in their order; the factor is a power of two and exact
///
/// # Panics
/// If `rows` leaves the bucket or `factors`, `columns` exceeds those of the buffers, or a row of
/// `dst` differs in length from `columns`.
pub fn unpack_f32(
    c: NativeOutput<'_, f32>,
    rows: Range<usize>,
    factors: &[f32],
    columns: usize,
    dst: &mut impl OutputRows,
) {
    kernel::unpack_f32(c, rows, |m| factors[m], columns, dst);
}
