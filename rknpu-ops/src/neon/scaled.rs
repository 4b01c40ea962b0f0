//! One tile of a product with a scale for each column and K segment.
//!
//! ```text
//! for each native slice               Q registers of 4 columns: Q = 1, 2, 4 for slices of 4, 8, 16
//!   for each segment
//!     for each register of columns    its weight scales are loaded once
//!       for each of 4 rows: sums += ((c + half) * w_scale) * a_scale
//!   store the sums in the tile
//! ```
//!
//! Fewer than four rows go one by one, and columns that are no multiple of four the portable way.

use std::arch::aarch64::{float32x4_t, vaddq_f32, vdupq_n_f32, vmulq_f32};
use std::array::from_fn;
use std::ops::Range;

use super::{load, store};
use crate::int4::{Accumulator, Digits, Product, Tile};
use crate::scalar;

/// Rows that are computed together: those of a tile.
const ROWS: usize = 4;

/// Columns of a tile.
const COLUMNS: usize = 64;

/// As [`scalar::scaled_tile`].
///
/// # Panics
/// As there.
pub fn scaled_tile<T: Accumulator>(
    product: Product<'_, T>,
    rows: Range<usize>,
    columns: Range<usize>,
    tile: &mut Tile,
) {
    if !columns.len().is_multiple_of(4) {
        return scalar::scaled_tile(product, rows, columns, tile);
    }
    // SAFETY: NEON belongs to the base instruction set of this target.
    unsafe {
        match (product.t, product.digits) {
            (4, Digits::One) => by_rows::<T, 1, 1>(product, rows, columns, tile),
            (4, Digits::Two) => by_rows::<T, 1, 2>(product, rows, columns, tile),
            (8, Digits::One) => by_rows::<T, 2, 1>(product, rows, columns, tile),
            (8, Digits::Two) => by_rows::<T, 2, 2>(product, rows, columns, tile),
            (16, Digits::One) => by_rows::<T, 4, 1>(product, rows, columns, tile),
            (16, Digits::Two) => by_rows::<T, 4, 2>(product, rows, columns, tile),
            (t, _) => unreachable!("int4::unpack_scaled admits no native slices of {t}"),
        }
    }
}

/// [`scaled_tile`] for native slices of `Q` times four columns and `D` digits.
#[target_feature(enable = "neon")]
fn by_rows<T: Accumulator, const Q: usize, const D: usize>(
    product: Product<'_, T>,
    rows: Range<usize>,
    columns: Range<usize>,
    tile: &mut Tile,
) {
    if let Some(first) = tile.first_chunk_mut::<ROWS>()
        && rows.len() == ROWS
    {
        return fill::<T, Q, D, ROWS>(product, rows.start, columns, first);
    }
    for (m, row) in rows.zip(tile) {
        fill::<T, Q, D, 1>(product, m, columns.clone(), std::array::from_mut(row));
    }
}

/// Adds to `R` rows of the tile, from row `m0` of the product on.
#[inline]
#[target_feature(enable = "neon")]
#[expect(
    clippy::needless_range_loop,
    reason = "q and r are places in a register block"
)]
fn fill<T: Accumulator, const Q: usize, const D: usize, const R: usize>(
    product: Product<'_, T>,
    m0: usize,
    columns: Range<usize>,
    tile: &mut [[f32; COLUMNS]; R],
) {
    let n_quads = columns.len() / 4;
    let zero = vdupq_n_f32(0.0);
    for j in 0..n_quads.div_ceil(Q) {
        let quads = Q.min(n_quads - j * Q);
        let first = (columns.start / 4 + j * Q) * 4;
        let mut sums = [[zero; Q]; R];
        for r in 0..R {
            for q in 0..quads {
                sums[r][q] = load(quad(&tile[r], j * Q + q));
            }
        }
        for (index, segment) in product.segments.iter().enumerate() {
            let lines: &[[[[T; 4]; Q]; D]; R] =
                block(&segment.c[first * product.m + m0 * D * 4 * Q..]);
            let factors: [_; R] = from_fn(|r| product.factors(m0 + r, index));
            let w_scales = &segment.w_scales[first..];
            for q in 0..quads {
                let w = load(quad(w_scales, q));
                for r in 0..R {
                    let (a, half) = factors[r];
                    let value = vaddq_f32(value(&lines[r], q), vdupq_n_f32(half));
                    let term = vmulq_f32(vmulq_f32(value, w), vdupq_n_f32(a));
                    sums[r][q] = vaddq_f32(sums[r][q], term);
                }
            }
        }
        for r in 0..R {
            for q in 0..quads {
                let (quads, _) = tile[r].as_chunks_mut::<4>();
                store(&mut quads[j * Q + q], sums[r][q]);
            }
        }
    }
}

/// Four elements of a slice.
///
/// # Panics
/// If there are none.
#[inline]
fn quad(values: &[f32], index: usize) -> &[f32; 4] {
    &values.as_chunks().0[index]
}

/// The pieces of `R` rows with `D` digits in a native slice, from its start on.
///
/// # Panics
/// If the slice ends before.
#[inline]
fn block<T, const Q: usize, const D: usize, const R: usize>(slice: &[T]) -> &[[[[T; 4]; Q]; D]; R] {
    let (quads, _) = slice.as_chunks::<4>();
    let (pieces, _) = quads.as_chunks::<Q>();
    let (rows, _) = pieces.as_chunks::<D>();
    // PANIC: int4::unpack_scaled checks that rows and columns lie in every segment.
    rows.first_chunk().unwrap_or_else(|| unreachable!())
}

/// Four columns of a row in FP32, its digits put together.
#[inline]
#[target_feature(enable = "neon")]
fn value<T: Accumulator, const Q: usize, const D: usize>(
    digits: &[[[T; 4]; Q]; D],
    q: usize,
) -> float32x4_t {
    let number = |digit: usize| load(&digits[digit][q].map(T::to_f32));
    if D == 1 {
        return number(0);
    }
    let high = vmulq_f32(number(0), vdupq_n_f32(Digits::BASE));
    vaddq_f32(high, number(1))
}
