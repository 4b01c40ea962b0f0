//! One tile of a product with a scale for each column and K segment.

use std::ops::Range;

use crate::int4::{Accumulator, Digits, Product, Tile};

/// Adds columns `columns` of rows `rows` of a product to a tile, the segments in order:
/// `tile[m][n] += ((c[m][n] + half) * w_scales[n]) * a_scale`.
///
/// - `rows`, `columns`: of the product, at most as many as the tile has, columns from a whole native slice on
///
/// # Panics
/// If rows or columns leave the product or the tile.
pub fn scaled_tile<T: Accumulator>(
    product: Product<'_, T>,
    rows: Range<usize>,
    columns: Range<usize>,
    tile: &mut Tile,
) {
    // Each arm is its own copy of the loops with the width of a native slice a constant.
    match product.t {
        4 => add::<T, 4>(product, rows, columns, tile),
        8 => add::<T, 8>(product, rows, columns, tile),
        16 => add::<T, 16>(product, rows, columns, tile),
        t => unreachable!("Product::new admits no native slices of {t}"),
    }
}

/// [`scaled_tile`] for native slices of `W` columns.
#[inline(always)]
fn add<T: Accumulator, const W: usize>(
    product: Product<'_, T>,
    rows: Range<usize>,
    columns: Range<usize>,
    tile: &mut Tile,
) {
    let digits = product.digits.rows();
    for (index, segment) in product.segments.iter().enumerate() {
        let w_scales = &segment.w_scales[columns.clone()];
        for (m, sums) in rows.clone().zip(&mut *tile) {
            let (a_scale, half) = product.factors(m, index);
            let sums = &mut sums[..columns.len()];
            let slices = segment.c[columns.start * product.m..].chunks_exact(W * product.m);
            for ((slice, sums), w_scales) in slices.zip(sums.chunks_mut(W)).zip(w_scales.chunks(W))
            {
                let at = |digit: usize| &slice[(m * digits + digit) * W..][..W];
                let mut values = [0.0; W];
                match product.digits {
                    Digits::One => {
                        for (value, c) in values.iter_mut().zip(at(0)) {
                            *value = c.to_f32();
                        }
                    }
                    Digits::Two => {
                        for ((value, high), low) in values.iter_mut().zip(at(0)).zip(at(1)) {
                            *value = high.to_f32() * Digits::BASE + low.to_f32();
                        }
                    }
                }
                for ((sum, value), w_scale) in sums.iter_mut().zip(values).zip(w_scales) {
                    *sum += (value + half) * w_scale * a_scale;
                }
            }
        }
    }
}

/// What the portable loops ask of an element of C beyond [`Accumulator`]: nothing.
pub trait Quad {}

impl<T: Copy> Quad for T {}
