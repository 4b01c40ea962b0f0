//! Unpacks native C into FP32 rows: sums the K segments, scales, and writes pieces of rows.
//!
//! ```text
//! for 64 columns at a time            16 native slices of 4: few enough streams for the prefetcher
//!   for 4 rows at a time              4 rows x 4 columns of 32 bits are one cache line of a native slice
//!     sums[4][64]  = segment 0        each line of input is read once
//!     sums[4][64] += segment 1 …
//!     for each row: out[64] = sums * scale
//! ```
//!
//! If rows were unpacked one by one, each input line would be read four times, far apart, at a
//! stride that maps all of them to the same few cache sets when M is a power of two.

use std::ops::{AddAssign, Range};

use crate::pack::{NativeOutput, OutputRows};

/// Columns of a step; a multiple of every `t`.
const COLUMNS: usize = 64;

/// Rows of a step.
const ROWS: usize = 4;

/// Computes `dst[m][n] = (sum over segments of c[m][n]) * w_scales[n] * a_scale(m)`, in this order.
///
/// # Panics
/// If `rows` or the columns of `w_scales` leave the buffers, or a row of `dst` differs in length
/// from `w_scales`.
pub fn unpack_i32(
    c: NativeOutput<'_, i32>,
    rows: Range<usize>,
    a_scale: impl Fn(usize) -> f32,
    w_scales: &[f32],
    dst: &mut impl OutputRows,
) {
    unpack(c, rows, w_scales.len(), dst, |m, n0, sums, out| {
        scale_i32(sums, &w_scales[n0..], a_scale(m), out);
    });
}

/// Computes `dst[m][n] = (sum over segments of c[m][n]) * factor(m)`.
///
/// # Panics
/// If `rows` or `columns` leave the buffers, or a row of `dst` differs in length from `columns`.
pub fn unpack_f32(
    c: NativeOutput<'_, f32>,
    rows: Range<usize>,
    factor: impl Fn(usize) -> f32,
    columns: usize,
    dst: &mut impl OutputRows,
) {
    unpack(c, rows, columns, dst, |m, _, sums, out| {
        scale_f32(sums, factor(m), out);
    });
}

/// Computes `out[n] = sums[n] * w_scales[n] * a_scale`, in this order.
#[inline(always)]
fn scale_i32(sums: &[i32; COLUMNS], w_scales: &[f32], a_scale: f32, out: &mut [f32]) {
    let w_scales = &w_scales[..out.len()];
    // CAST: rounds to 24 bits, the first of the roundings that unpack_i32 documents.
    fill(out, |n| sums[n] as f32 * w_scales[n] * a_scale);
}

/// Computes `out[n] = sums[n] * factor`.
#[inline(always)]
fn scale_f32(sums: &[f32; COLUMNS], factor: f32, out: &mut [f32]) {
    fill(out, |n| sums[n] * factor);
}

/// Computes `out[n] = value(n)`, with a constant number of steps for a whole piece.
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

/// Sums the segments, and calls `finish(m, n0, sums, out)` for each piece of a row, which starts at
/// column `n0`.
#[inline(always)]
fn unpack<T: Copy + Default + AddAssign>(
    c: NativeOutput<'_, T>,
    rows: Range<usize>,
    columns: usize,
    dst: &mut impl OutputRows,
    finish: impl Fn(usize, usize, &[T; COLUMNS], &mut [f32]),
) {
    c.check(&rows, columns);
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

/// Copies columns `range` of row `m0 + r` of one segment to `to[r]`. A last native slice that is
/// only partly in `range` is copied whole.
#[inline(always)]
fn gather<T: Copy, const R: usize>(
    c: NativeOutput<'_, T>,
    segment: &[T],
    m0: usize,
    range: Range<usize>,
    to: &mut [[T; COLUMNS]; R],
) {
    // Each arm is a separate copy of the loops with a constant width of a native slice.
    match c.t {
        // With one row, native slices of all widths are equal.
        _ if c.m == 1 && range.len() == COLUMNS => {
            to[0].copy_from_slice(&segment[range]);
        }
        4 => gather_by::<T, 4, R>(segment, c.m, m0, range, to),
        8 => gather_by::<T, 8, R>(segment, c.m, m0, range, to),
        16 => gather_by::<T, 16, R>(segment, c.m, m0, range, to),
        t => unreachable!("NativeOutput::new admits no native slices of {t}"),
    }
}

/// Implements [`gather`] for native slices of `W` columns and `m` rows.
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
