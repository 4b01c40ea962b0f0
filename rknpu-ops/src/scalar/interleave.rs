//! Copies rows into native slices, [`TOGETHER`] pieces of a row at a time.

use crate::pack::Rows;

/// Copies row-major rows into native slices of `s` elements times `m` rows, with zeros outside the
/// source.
///
/// - `src`: at most `m` rows; `dst`: whole native slices of `s * m` elements, at least as many as
///   `src` covers
///
/// # Panics
/// If `dst` is not whole native slices or `src` does not fit.
pub fn interleave<T: Copy + Default>(src: Rows<'_, T>, s: usize, m: usize, dst: &mut [T]) {
    assert!(src.count() <= m, "{} rows in a bucket of {m}", src.count());
    assert!(
        dst.len().is_multiple_of(s * m),
        "{} elements are not whole native slices",
        dst.len()
    );
    assert!(
        src.row_len() <= dst.len() / m,
        "rows of {} in {} columns",
        src.row_len(),
        dst.len() / m
    );
    // Each arm is a separate copy of the loops with a constant `s`, so that a piece is one vector
    // move.
    match s {
        4 => interleave_by(src, 4, m, dst),
        8 => interleave_by(src, 8, m, dst),
        16 => interleave_by(src, 16, m, dst),
        32 => interleave_by(src, 32, m, dst),
        _ => interleave_by(src, s, m, dst),
    }
}

/// Native slices that [`interleave_by`] fills together: four INT8 pieces of 16 are one cache line
/// of a row.
const TOGETHER: usize = 4;

/// Rows that [`interleave_by`] reads before it advances along K: as many pages as a first-level TLB
/// holds.
const ROWS_TOGETHER: usize = 32;

/// Implements [`interleave`] after its checks.
#[inline(always)]
fn interleave_by<T: Copy + Default>(src: Rows<'_, T>, s: usize, m: usize, dst: &mut [T]) {
    let whole = src.row_len() / (TOGETHER * s);
    let (groups, rest) = dst.split_at_mut(whole * TOGETHER * s * m);
    for m0 in (0..src.count()).step_by(ROWS_TOGETHER) {
        let m1 = src.count().min(m0 + ROWS_TOGETHER);
        for (g, group) in groups.chunks_exact_mut(TOGETHER * s * m).enumerate() {
            for row in m0..m1 {
                let pieces = &src.row(row)[g * TOGETHER * s..][..TOGETHER * s];
                for j in 0..TOGETHER {
                    group[(j * m + row) * s..][..s].copy_from_slice(&pieces[j * s..][..s]);
                }
            }
        }
    }
    for slice in groups.chunks_exact_mut(s * m) {
        slice[src.count() * s..].fill(T::default());
    }
    for (j, slice) in rest.chunks_exact_mut(s * m).enumerate() {
        let k0 = (whole * TOGETHER + j) * s;
        slice.fill(T::default());
        let part = src.columns(k0.min(src.row_len())..(k0 + s).min(src.row_len()));
        for row in 0..src.count() {
            let piece = part.row(row);
            slice[row * s..][..piece.len()].copy_from_slice(piece);
        }
    }
}
