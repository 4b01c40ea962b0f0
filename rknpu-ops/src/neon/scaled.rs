//! One tile of a product with a scale for each column and K segment.
//!
//! ```text
//! for each segment                    the factors of four rows stay in registers
//!   for each native slice of Q times four columns
//!     for each four columns           their weight scales are loaded once
//!       for each of 4 rows: tile += ((c + half) * w_scale) * a_scale
//! ```
//!
//! Fewer than four rows go one by one, and columns left over from groups of four go through the
//! portable version.

use std::arch::aarch64::{
    float32x4_t, vaddq_f32, vcvtq_f32_s32, vdupq_n_f32, vld1_s16, vld1q_s32, vmovl_s16, vmulq_f32,
};
use std::array::from_fn;
use std::ops::Range;

use super::{load, store};
use crate::int4::{Digits, Product, SumElem, SumTile};
use crate::scalar;

/// Rows that are computed together: those of a tile.
const ROWS: usize = 4;

/// Columns of a tile.
const COLUMNS: usize = 64;

/// Computes the same as [`scalar::scaled_tile`].
///
/// # Panics
/// As [`scalar::scaled_tile`].
pub fn scaled_tile<T: SumElem>(
    product: Product<'_, T>,
    rows: Range<usize>,
    columns: Range<usize>,
    tile: &mut SumTile,
) {
    if !columns.len().is_multiple_of(4) {
        return scalar::scaled_tile(product, rows, columns, tile);
    }
    // SAFETY: NEON belongs to the base instruction set of this target.
    unsafe { by_shape(product, rows, columns, tile) }
}

/// Chooses the copy of the loops for the width of native slices and the digits.
#[target_feature(enable = "neon")]
fn by_shape<T: SumElem>(
    product: Product<'_, T>,
    rows: Range<usize>,
    columns: Range<usize>,
    tile: &mut SumTile,
) {
    match (product.t, product.digits) {
        (4, Digits::One) => by_rows::<T, 1, 1>(product, rows, columns, tile),
        (4, _) => by_rows::<T, 1, 2>(product, rows, columns, tile),
        (8, Digits::One) => by_rows::<T, 2, 1>(product, rows, columns, tile),
        (8, _) => by_rows::<T, 2, 2>(product, rows, columns, tile),
        (16, Digits::One) => by_rows::<T, 4, 1>(product, rows, columns, tile),
        (16, _) => by_rows::<T, 4, 2>(product, rows, columns, tile),
        (t, _) => unreachable!("Product::new admits no native slices of {t}"),
    }
}

/// Implements [`scaled_tile`] for native slices of `Q` times four columns and `D` digits.
#[target_feature(enable = "neon")]
fn by_rows<T: SumElem, const Q: usize, const D: usize>(
    product: Product<'_, T>,
    rows: Range<usize>,
    columns: Range<usize>,
    tile: &mut SumTile,
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

/// Adds to `R` rows of the tile, starting with row `m0` of the product.
#[inline]
#[target_feature(enable = "neon")]
fn fill<T: SumElem, const Q: usize, const D: usize, const R: usize>(
    product: Product<'_, T>,
    m0: usize,
    columns: Range<usize>,
    tile: &mut [[f32; COLUMNS]; R],
) {
    let pitch = product.m * 4 * Q;
    let base = vdupq_n_f32(product.digits.base());
    for (index, segment) in product.segments.iter().enumerate() {
        let factors: [_; R] = from_fn(|r| {
            let (a, half) = product.factors(m0 + r, index);
            (vdupq_n_f32(a), vdupq_n_f32(half))
        });
        let (w_scales, _) = segment.w_scales[columns.clone()].as_chunks::<4>();
        let (whole, rest) = w_scales.as_chunks::<Q>();
        let first = columns.start * product.m + m0 * D * 4 * Q;
        for (j, w_scales) in whole.iter().enumerate() {
            let lines: &[[[[T; 4]; Q]; D]; R] = block(&segment.c[first + j * pitch..]);
            for (q, w) in w_scales.iter().enumerate() {
                add(lines, q, (load(w), base), &factors, tile, j * Q + q);
            }
        }
        if !rest.is_empty() {
            let lines: &[[[[T; 4]; Q]; D]; R] = block(&segment.c[first + whole.len() * pitch..]);
            for (q, w) in rest.iter().enumerate() {
                add(
                    lines,
                    q,
                    (load(w), base),
                    &factors,
                    tile,
                    whole.len() * Q + q,
                );
            }
        }
    }
}

/// Adds four columns, the `q`-th of a native slice, to place `at` of each row of the tile.
///
/// - `w`, `base`: scales of the columns; the weight of a high digit
#[inline]
#[target_feature(enable = "neon")]
fn add<T: SumElem, const Q: usize, const D: usize, const R: usize>(
    lines: &[[[[T; 4]; Q]; D]; R],
    q: usize,
    (w, base): (float32x4_t, float32x4_t),
    factors: &[(float32x4_t, float32x4_t); R],
    tile: &mut [[f32; COLUMNS]; R],
    at: usize,
) {
    for ((digits, (a, half)), row) in lines.iter().zip(factors).zip(tile) {
        let mut value = T::quad(&digits[0][q]);
        if D == 2 {
            let high = vmulq_f32(value, base);
            value = vaddq_f32(high, T::quad(&digits[D - 1][q]));
        }
        let term = vmulq_f32(vmulq_f32(vaddq_f32(value, *half), w), *a);
        let (quads, _) = row.as_chunks_mut::<4>();
        let sum = vaddq_f32(load(&quads[at]), term);
        store(&mut quads[at], sum);
    }
}

/// Returns the pieces of `R` rows with `D` digits in a native slice, starting at its beginning.
#[inline]
fn block<T, const Q: usize, const D: usize, const R: usize>(slice: &[T]) -> &[[[[T; 4]; Q]; D]; R] {
    let (quads, _) = slice.as_chunks::<4>();
    let (pieces, _) = quads.as_chunks::<Q>();
    let (rows, _) = pieces.as_chunks::<D>();
    // PANIC: each segment of a product contains its rows and columns.
    rows.first_chunk().unwrap_or_else(|| unreachable!())
}

/// Elements of C that the vector unit can load.
pub trait Quad: Sized {
    /// Returns four elements in FP32.
    fn quad(elements: &[Self; 4]) -> float32x4_t;
}

impl Quad for i16 {
    #[inline(always)]
    fn quad(elements: &[Self; 4]) -> float32x4_t {
        // SAFETY: a reference to four numbers is readable for four, and the load needs no stricter
        // alignment.
        let narrow = unsafe { vld1_s16(elements.as_ptr()) };
        // SAFETY: NEON belongs to the base instruction set of this target.
        let words = unsafe { vmovl_s16(narrow) };
        // SAFETY: as above.
        unsafe { vcvtq_f32_s32(words) }
    }
}

impl Quad for i32 {
    #[inline(always)]
    fn quad(elements: &[Self; 4]) -> float32x4_t {
        // SAFETY: a reference to four numbers is readable for as many; the load needs no more
        // alignment.
        let words = unsafe { vld1q_s32(elements.as_ptr()) };
        // SAFETY: NEON belongs to the base instruction set of this target.
        unsafe { vcvtq_f32_s32(words) }
    }
}

impl Quad for f32 {
    #[inline(always)]
    fn quad(elements: &[Self; 4]) -> float32x4_t {
        // SAFETY: NEON belongs to the base instruction set of this target.
        unsafe { load(elements) }
    }
}
