//! Sums over the blocks of positions: the state of a tile of rows.

use super::finish::in_order;
use super::vtcm::{MAXIMA, SUMS};
use crate::hvx::{self, Vector, add_f32, mul_f32, splat_h};
use crate::layout::{Line, TILE_DIM, Tile};

/// f16 1.
const ONE: u16 = 0x3c00;

/// The parts of the state of a tile of rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sums<'a> {
    /// For each pair of rows: the interleaved f16 maxima of the two rows.
    pub(super) maxima: &'a [Line],
    /// For each row: f32 sums of weights in lanes.
    pub(super) weights: &'a [Line],
    /// For each strip of values and row: 32 f32.
    values: &'a [Line],
}

impl<'a> Sums<'a> {
    /// Returns the parts of a tile's state.
    #[inline(always)]
    pub(super) fn new(state: &'a [Line]) -> Self {
        let (maxima, rest) = state.split_at(MAXIMA);
        let (weights, values) = rest.split_at(SUMS);
        Self {
            maxima,
            weights,
            values,
        }
    }

    /// Returns 64 elements of a row in order.
    #[inline(always)]
    pub(super) fn slab(&self, slab: usize, row: usize) -> (Vector, Vector) {
        let first = 2 * slab * TILE_DIM + row;
        in_order(&self.values[first], &self.values[first + TILE_DIM])
    }
}

/// Adds products to sums that are first scaled to the new maximum.
pub(super) struct Add<'a> {
    /// Pairs of rows.
    pub(super) n_pairs: usize,
    /// `true` for the first products, when there are no sums to add to.
    pub(super) is_first: bool,
    /// Inverse of the scale of the unit's stores, as f16.
    pub(super) restore: u16,
    /// A tile for each strip.
    pub(super) products: &'a [Tile],
    pub(super) scales: &'a [Line],
    /// For each strip and pair of rows: f32 of the even row, then of the odd one.
    pub(super) sums: &'a mut [Line],
}

impl hvx::Kernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let restore = splat_h(self.restore);
        let strips = self
            .products
            .iter()
            .zip(self.sums.as_chunks_mut::<TILE_DIM>().0);
        for (product, sums) in strips {
            let pairs = sums.as_chunks_mut::<2>().0.iter_mut();
            let lines = product.0.iter().zip(self.scales).take(self.n_pairs);
            if self.is_first {
                for ([even_sum, odd_sum], (line, _)) in pairs.zip(lines) {
                    let (even, odd) = hvx::widen_mul_f16(hvx::load(line), restore);
                    hvx::store(even_sum, even);
                    hvx::store(odd_sum, odd);
                }
                continue;
            }
            for ([even_sum, odd_sum], (line, scale)) in pairs.zip(lines) {
                let (even, odd) = hvx::widen_mul_f16(hvx::load(line), restore);
                let (even_scale, odd_scale) = hvx::widen_mul_f16(hvx::load(scale), splat_h(ONE));
                let scaled = mul_f32(hvx::load(even_sum), even_scale);
                hvx::store(even_sum, add_f32(scaled, even));
                let scaled = mul_f32(hvx::load(odd_sum), odd_scale);
                hvx::store(odd_sum, add_f32(scaled, odd));
            }
        }
    }
}
