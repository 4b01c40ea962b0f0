//! One tile of a product with a scale for each column and K segment.

use std::array::from_fn;
use std::ops::Range;

use crate::int4::{Digits, Product, SumElem, SumTile};

/// Adds columns `columns` of rows `rows` of a product to a tile, the segments in order:
/// `tile[m][n] += ((c[m][n] + half) * w_scales[n]) * a_scale`.
///
/// - `rows`, `columns`: of the product, at most as many as the tile has; columns start with a whole
///   native slice
///
/// # Panics
/// If rows or columns leave the product or the tile.
pub fn scaled_tile<T: SumElem>(
    product: Product<'_, T>,
    rows: Range<usize>,
    columns: Range<usize>,
    tile: &mut SumTile,
) {
    // Each arm is a separate copy of the loops with a constant width of a native slice.
    match product.t {
        4 => add::<T, 4>(product, rows, columns, tile),
        8 => add::<T, 8>(product, rows, columns, tile),
        16 => add::<T, 16>(product, rows, columns, tile),
        t => unreachable!("Product::new admits no native slices of {t}"),
    }
}

/// Implements [`scaled_tile`] for native slices of `W` columns.
#[inline(always)]
fn add<T: SumElem, const W: usize>(
    product: Product<'_, T>,
    rows: Range<usize>,
    columns: Range<usize>,
    tile: &mut SumTile,
) {
    for (index, segment) in product.segments.iter().enumerate() {
        let (w_scales, last_w_scales) = segment.w_scales[columns.clone()].as_chunks::<W>();
        for (m, sums) in rows.clone().zip(&mut *tile) {
            let factors = product.factors(m, index);
            let (sums, last_sums) = sums[..columns.len()].as_chunks_mut::<W>();
            let mut slices = segment.c[columns.start * product.m..].chunks_exact(W * product.m);
            // Whole native slices have a constant number of columns.
            for ((sums, w_scales), slice) in sums.iter_mut().zip(w_scales).zip(&mut slices) {
                let values = values::<T, W>(slice, m, product.digits);
                add_scaled(sums, &values, w_scales, factors);
            }
            if let Some(slice) = slices.next() {
                let values = values::<T, W>(slice, m, product.digits);
                add_scaled(last_sums, &values, last_w_scales, factors);
            }
        }
    }
}

/// Returns row `m` of the product in a native slice, with its digits combined.
#[inline(always)]
fn values<T: SumElem, const W: usize>(slice: &[T], m: usize, digits: Digits) -> [f32; W] {
    let (pieces, _) = slice.as_chunks::<W>();
    match digits {
        Digits::One => pieces[m].map(T::to_f32),
        Digits::Two | Digits::TwoBytes => {
            let base = digits.base();
            let (high, low) = (&pieces[2 * m], &pieces[2 * m + 1]);
            from_fn(|n| high[n].to_f32() * base + low[n].to_f32())
        }
    }
}

/// Computes `sums[n] += ((values[n] + half) * w_scales[n]) * a_scale` for all sums.
#[inline(always)]
fn add_scaled(sums: &mut [f32], values: &[f32], w_scales: &[f32], (a_scale, half): (f32, f32)) {
    for ((sum, value), w_scale) in sums.iter_mut().zip(values).zip(w_scales) {
        *sum += (value + half) * w_scale * a_scale;
    }
}

/// Requirements of the portable loops for an element of C beyond [`SumElem`]: none.
pub trait Quad {}

impl<T: Copy> Quad for T {}
