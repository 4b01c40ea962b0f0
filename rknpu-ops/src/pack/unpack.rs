//! Native C to FP32 rows: sums the K segments, scales, and writes pieces of rows.
//!
//! ```text
//! for 64 columns at a time            16 native slices of 4: few enough streams for the prefetcher
//!   for 4 rows at a time              4 rows x 4 columns of 32 bits are one cache line of a native slice
//!     sums[4][64]  = segment 0        each line of input is read once
//!     sums[4][64] += segment 1 …
//!     for each row: out[64] = sums * scale
//! ```
//!
//! Row by row instead, each input line would be read four times, far apart, at a stride that maps all of them to the
//! same few cache sets when M is a power of two.

use std::ops::{AddAssign, Range};

use crate::layout::NativeC;

/// Columns of a step; a multiple of every `t`.
const COLUMNS: usize = 64;

/// Rows of a step.
const ROWS: usize = 4;

/// Where unpacked FP32 rows go.
///
/// A trait and not a slice because several cores write different column ranges of the same rows: who owns the
/// destination hands each of them an implementation that gives out its own pieces only. [`RowsMut`] is the plain one.
pub trait OutputRows {
    /// The piece of row `m` to write: as many elements as there are columns to unpack. Asked for several times per row.
    fn row(&mut self, m: usize) -> &mut [f32];
}

/// [`OutputRows`] in one slice: row `m` at `data[m * stride]`.
#[derive(Debug)]
pub struct RowsMut<'a> {
    data: &'a mut [f32],
    len: usize,
    stride: usize,
}

impl<'a> RowsMut<'a> {
    /// Rows of `len` elements, `stride` elements apart.
    #[must_use]
    pub const fn new(data: &'a mut [f32], len: usize, stride: usize) -> Self {
        Self { data, len, stride }
    }
}

impl OutputRows for RowsMut<'_> {
    /// # Panics
    /// If row `m` leaves the slice.
    #[inline]
    fn row(&mut self, m: usize) -> &mut [f32] {
        &mut self.data[m * self.stride..][..self.len]
    }
}

/// [`OutputRows`] of a single row, whatever its number.
struct OneRow<'a>(&'a mut [f32]);

impl OutputRows for OneRow<'_> {
    #[inline]
    fn row(&mut self, _m: usize) -> &mut [f32] {
        self.0
    }
}

/// Native C buffers of one matmul, one per K segment; their sum is the product.
#[derive(Clone, Copy, Debug)]
pub struct NativeOutput<'a, T> {
    segments: &'a [&'a [T]],
    t: usize,
    m: usize,
}

impl<'a, T> NativeOutput<'a, T> {
    /// Buffers of `m` rows (the bucket, at least 1), in order of K; all cover the same columns.
    ///
    /// A buffer is any number of whole native slices of `m * t` elements, so a column range that starts at a multiple
    /// of `t` is a sub-slice of one.
    ///
    /// # Panics
    /// If there is no buffer, if one is not whole native slices or differs in length from the first, or if `t` is not
    /// 4, 8 or 16.
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
}

/// Unpacks an INT8 product: `dst[m][n] = (sum over segments of c[m][n]) * w_scales[n] * a_scales[m]`.
///
/// - `rows`: rows to unpack, within the bucket; `a_scales`: indexed by row; `w_scales`: one per column, as many as
///   columns to unpack
/// - the sum is exact: INT32 holds `127 * 127 * K` for all segments together up to K = 133,144
/// - one FP32 rounding each for the conversion of the sum, the product with the weight scale, and then the product
///   with the row scale, in this order: weight scales are moderate numbers, so the first product neither overflows nor
///   underflows whatever the row's magnitude
/// - a NaN scale makes its row or column NaN
///
/// # Panics
/// If `rows` leaves the bucket or `a_scales`, `w_scales` exceeds the columns of the buffers, or a row of `dst` differs
/// in length from `w_scales`.
pub fn unpack_i32(
    c: NativeOutput<'_, i32>,
    rows: Range<usize>,
    a_scales: &[f32],
    w_scales: &[f32],
    dst: &mut impl OutputRows,
) {
    unpack(c, rows, w_scales.len(), dst, |m, n0, sums, out| {
        let a_scale = a_scales[m];
        scale_i32(sums, &w_scales[n0..], a_scale, out);
    });
}

/// [`unpack_i32`] for row `m` alone, `out` being as long as `w_scales`; the same bits.
///
/// # Panics
/// As [`unpack_i32`].
pub fn unpack_row_i32(
    c: NativeOutput<'_, i32>,
    m: usize,
    a_scale: f32,
    w_scales: &[f32],
    out: &mut [f32],
) {
    unpack(
        c,
        m..m + 1,
        w_scales.len(),
        &mut OneRow(out),
        |_, n0, sums, out| {
            scale_i32(sums, &w_scales[n0..], a_scale, out);
        },
    );
}

/// Unpacks an FP16 product: `dst[m][n] = (sum over segments of c[m][n]) * factors[m]`.
///
/// - `rows`: rows to unpack, within the bucket; `factors`: indexed by row, as
///   [`convert_rows_f16`](super::convert_rows_f16) returns them; `columns`: number of columns to unpack
/// - segments are added in FP32 in their order; the factor is a power of two and exact
///
/// # Panics
/// If `rows` leaves the bucket or `factors`, `columns` exceeds those of the buffers, or a row of `dst` differs in
/// length from `columns`.
pub fn unpack_f32(
    c: NativeOutput<'_, f32>,
    rows: Range<usize>,
    factors: &[f32],
    columns: usize,
    dst: &mut impl OutputRows,
) {
    unpack(c, rows, columns, dst, |m, _, sums, out| {
        let factor = factors[m];
        scale_f32(sums, factor, out);
    });
}

/// [`unpack_f32`] for row `m` alone; the same bits.
///
/// # Panics
/// As [`unpack_f32`].
pub fn unpack_row_f32(c: NativeOutput<'_, f32>, m: usize, factor: f32, out: &mut [f32]) {
    unpack(
        c,
        m..m + 1,
        out.len(),
        &mut OneRow(out),
        |_, _, sums, out| {
            scale_f32(sums, factor, out);
        },
    );
}

/// `out[n] = sums[n] * w_scales[n] * a_scale`, in this order.
#[inline(always)]
fn scale_i32(sums: &[i32; COLUMNS], w_scales: &[f32], a_scale: f32, out: &mut [f32]) {
    let w_scales = &w_scales[..out.len()];
    // CAST: rounds to 24 bits, the first of the roundings that unpack_i32 documents.
    fill(out, |n| sums[n] as f32 * w_scales[n] * a_scale);
}

/// `out[n] = sums[n] * factor`.
#[inline(always)]
fn scale_f32(sums: &[f32; COLUMNS], factor: f32, out: &mut [f32]) {
    fill(out, |n| sums[n] * factor);
}

/// `out[n] = value(n)`, with a constant number of steps for a whole piece.
#[inline(always)]
fn fill(out: &mut [f32], value: impl Fn(usize) -> f32) {
    if let Ok(out) = <&mut [f32; COLUMNS]>::try_from(&mut *out) {
        for (n, o) in out.iter_mut().enumerate() {
            *o = value(n);
        }
    } else {
        for (n, o) in out.iter_mut().enumerate() {
            *o = value(n);
        }
    }
}

/// Sums the segments and hands `finish(m, n0, sums, out)` each piece of a row, from column `n0` on.
#[inline(always)]
fn unpack<T: Copy + Default + AddAssign>(
    c: NativeOutput<'_, T>,
    rows: Range<usize>,
    columns: usize,
    dst: &mut impl OutputRows,
    finish: impl Fn(usize, usize, &[T; COLUMNS], &mut [f32]),
) {
    assert!(rows.end <= c.m, "rows {rows:?} of a bucket of {}", c.m);
    let have = c.segments[0].len() / c.m;
    assert!(columns <= have, "{columns} columns of {have}");
    let mut sums = [[T::default(); COLUMNS]; ROWS];
    for n0 in (0..columns).step_by(COLUMNS) {
        let range = n0..columns.min(n0 + COLUMNS);
        for m0 in rows.clone().step_by(ROWS) {
            let count = ROWS.min(rows.end - m0);
            if count == ROWS {
                gather_rows(c, m0, range.clone(), &mut sums);
            } else {
                for (m, sums) in (m0..rows.end).zip(&mut sums) {
                    gather_rows(c, m, range.clone(), std::array::from_mut(sums));
                }
            }
            for (m, sums) in (m0..).zip(&sums[..count]) {
                let row = dst.row(m);
                assert_eq!(row.len(), columns, "columns of output row {m}");
                finish(m, n0, sums, &mut row[range.clone()]);
            }
        }
    }
}

/// Fills `sums[r]` with columns `range` of row `m0 + r`, the segments added in order.
#[inline(always)]
fn gather_rows<T: Copy + Default + AddAssign, const R: usize>(
    c: NativeOutput<'_, T>,
    m0: usize,
    range: Range<usize>,
    sums: &mut [[T; COLUMNS]; R],
) {
    gather(c, c.segments[0], m0, range.clone(), sums);
    if c.segments.len() > 1 {
        let mut more = [[T::default(); COLUMNS]; R];
        for segment in &c.segments[1..] {
            gather(c, segment, m0, range.clone(), &mut more);
            for (sum, x) in sums.as_flattened_mut().iter_mut().zip(more.as_flattened()) {
                *sum += *x;
            }
        }
    }
}

/// Copies columns `range` of row `m0 + r` of one segment to `to[r]`. A last native slice that is only partly in `range`
/// is copied whole.
#[inline(always)]
fn gather<T: Copy, const R: usize>(
    c: NativeOutput<'_, T>,
    segment: &[T],
    m0: usize,
    range: Range<usize>,
    to: &mut [[T; COLUMNS]; R],
) {
    // Each arm is its own copy of the loops with the width of a native slice a constant.
    match c.t {
        // With one row, native slices of any width are the same thing.
        _ if c.m == 1 && range.len() == COLUMNS => {
            to[0].copy_from_slice(&segment[range]);
        }
        4 => gather_by::<T, 4, R>(segment, c.m, m0, range, to),
        8 => gather_by::<T, 8, R>(segment, c.m, m0, range, to),
        16 => gather_by::<T, 16, R>(segment, c.m, m0, range, to),
        t => unreachable!("NativeOutput::new admits no native slices of {t}"),
    }
}

/// [`gather`] for native slices of `W` columns and `m` rows.
#[inline(always)]
fn gather_by<T: Copy, const W: usize, const R: usize>(
    segment: &[T],
    m: usize,
    m0: usize,
    range: Range<usize>,
    to: &mut [[T; COLUMNS]; R],
) {
    let slices = segment[range.start * m..].chunks_exact(W * m);
    for (n, slice) in (0..range.len()).step_by(W).zip(slices) {
        let (pieces, _) = slice[m0 * W..][..R * W].as_chunks::<W>();
        for (to, piece) in to.iter_mut().zip(pieces) {
            to[n..][..W].copy_from_slice(piece);
        }
    }
}
