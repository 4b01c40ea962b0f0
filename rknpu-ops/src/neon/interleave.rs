//! Copies rows into native slices, in squares of four rows by four pieces.
//!
//! ```text
//! for 32 rows at a time                      as many pages as a first-level TLB holds
//!   for 4 native slices at a time
//!     for 4 rows at a time
//!       load  4 rows x 4 pieces              4 x 64 bytes of a row for pieces of 16
//!       store 4 native slices x 4 rows       4 x 64 bytes of a native slice: a whole line of the cache
//! ```
//!
//! A piece is 16 bytes (8 on RK3566) of activations, 32 or 64 of weights. Each is a copy of
//! constant length, which is a vector load and store. Pointers are used because slices would be
//! checked for every piece.

use crate::pack::Rows;
use crate::scalar;

/// Rows and native slices of a square.
const SIDE: usize = 4;

/// Rows that are read before the loop advances along K.
const ROWS_TOGETHER: usize = 32;

/// Copies as [`scalar::interleave`] does.
///
/// # Panics
/// As [`scalar::interleave`].
pub fn interleave<T: Copy + Default>(src: Rows<'_, T>, s: usize, m: usize, dst: &mut [T]) {
    let fits =
        src.count() <= m && dst.len().is_multiple_of(s * m) && src.row_len() <= dst.len() / m;
    if !fits {
        return scalar::interleave(src, s, m, dst);
    }
    if src.count() == 1 && m == 1 {
        let (row, padding) = dst.split_at_mut(src.row_len());
        row.copy_from_slice(src.row(0));
        padding.fill(T::default());
        return;
    }
    let squares = match s {
        4 => squares::<T, 4>(src, m, dst),
        8 => squares::<T, 8>(src, m, dst),
        16 => squares::<T, 16>(src, m, dst),
        32 => squares::<T, 32>(src, m, dst),
        _ => 0,
    };
    let (done, rest) = dst.split_at_mut(squares * s * m);
    for slice in done.chunks_exact_mut(s * m) {
        slice[src.count() * s..].fill(T::default());
    }
    scalar::interleave(src.columns(squares * s..src.row_len()), s, m, rest);
}

/// Fills the real rows of native slices, as many as come in fours. Returns their number.
///
/// - `dst`: at least as many native slices of `m * S` elements
#[inline]
fn squares<T: Copy, const S: usize>(src: Rows<'_, T>, m: usize, dst: &mut [T]) -> usize {
    let n_slices = src.row_len() / S / SIDE * SIDE;
    assert!(src.count() <= m && n_slices * S * m <= dst.len());
    let to = dst.as_mut_ptr();
    for m0 in (0..src.count()).step_by(ROWS_TOGETHER) {
        let rows = src.rows(m0..src.count().min(m0 + ROWS_TOGETHER));
        let (data, stride) = rows.parts();
        assert!((rows.count() - 1) * stride + n_slices * S <= data.len());
        for j in (0..n_slices).step_by(SIDE) {
            let from = data.as_ptr().wrapping_add(j * S);
            let to = to.wrapping_add((j * m + m0) * S);
            // SAFETY: each row of `data` goes on for n_slices pieces, the last one included, and j
            // + 3 is below that. `to` is row m0 of native slice j of `dst`, which holds n_slices of
            // them; m0 + count is at most m. One slice is shared and the other exclusive, so they
            // do not overlap.
            unsafe { square::<T, S>(from, stride, rows.count(), to, m * S) }
        }
    }
    n_slices
}

/// Moves four pieces of each of `count` rows into four native slices, which are `slice` elements
/// apart.
///
/// # Safety
/// - `from` is readable for `4 * S` elements at each multiple of `stride` elements below
///   `count * stride`
/// - `to` is writable for `count * S` elements at each of 0, 1, 2, 3 times `slice`
/// - the two do not overlap
#[inline]
unsafe fn square<T: Copy, const S: usize>(
    from: *const T,
    stride: usize,
    count: usize,
    to: *mut T,
    slice: usize,
) {
    let piece = |row: usize, j: usize| {
        let (from, to) = (
            from.wrapping_add(row * stride + j * S),
            to.wrapping_add(j * slice + row * S),
        );
        // SAFETY: callers pass row < count and j < SIDE, so both ranges are S elements inside this
        // function's arguments.
        unsafe { from.copy_to_nonoverlapping(to, S) }
    };
    let whole = count / SIDE * SIDE;
    for row in (0..whole).step_by(SIDE) {
        for j in 0..SIDE {
            for r in 0..SIDE {
                piece(row + r, j);
            }
        }
    }
    for row in whole..count {
        for j in 0..SIDE {
            piece(row, j);
        }
    }
}
