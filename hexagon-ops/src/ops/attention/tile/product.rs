//! Products of a group's tiles of rows on the matrix unit: queries by keys, and weights by values.

use super::group::GroupTile;
use crate::hmx::{Hmx, MAX_DEEP, ScaleBlock};
use crate::layout::Tile;
use crate::rt::MatrixPart;

/// The operands of products, which no stage changes.
#[derive(Clone, Copy)]
pub(super) struct Fixed<'m> {
    pub(super) queries: &'m [Tile],
    pub(super) keys: &'m [Tile],
    pub(super) values: &'m [Tile],
    /// Scales of stores: of scores that are completed in f32, and of the other ones of each tile.
    pub(super) stores: &'m [ScaleBlock],
    pub(super) factors: &'m [ScaleBlock],
    pub(super) k_tiles: usize,
    pub(super) v_strips: usize,
    /// Most strips of a block.
    pub(super) strips: usize,
    /// Number of the scale of stores of products with values.
    pub(super) scale: usize,
}

impl Fixed<'_> {
    /// Computes the scores of a group's tiles.
    #[inline(always)]
    fn scores(&self, group: &[GroupTile], scores: &mut [Tile], hmx: &mut Hmx) {
        let k_tiles = self.k_tiles;
        for (it, scores) in group.iter().zip(scores.chunks_mut(self.strips)) {
            let queries = &self.queries[it.tile * k_tiles..][..k_tiles];
            hmx.load_scale(match it.is_exact {
                true => &self.stores[0],
                false => &self.factors[it.tile],
            });
            let mut keys = &self.keys[it.sight.strips().start * k_tiles..];
            for score in &mut scores[it.sight.strips()] {
                let (strip, rest) = keys.split_at(k_tiles);
                keys = rest;
                // Most keys are one product: a loop over products would take longer than it.
                match k_tiles <= MAX_DEEP {
                    true => hmx.multiply(queries, strip),
                    false => (queries.chunks(MAX_DEEP).zip(strip.chunks(MAX_DEEP)))
                        .for_each(|(queries, keys)| hmx.multiply(queries, keys)),
                }
                hmx.store(score);
            }
        }
    }

    /// Multiplies the weights of a group's tiles by the values.
    #[inline(always)]
    fn products(
        &self,
        group: &[GroupTile],
        weights: &[Tile],
        products: &mut [Tile],
        hmx: &mut Hmx,
    ) {
        if group.is_empty() {
            return;
        }
        hmx.load_scale(&self.stores[self.scale]);
        let weights = weights.chunks(self.strips);
        let products = products.chunks_mut(self.v_strips);
        for (it, (weights, products)) in group.iter().zip(weights.zip(products)) {
            let strips = it.sight.strips();
            let weights = &weights[strips.clone()];
            for (product, values) in products
                .iter_mut()
                .zip(self.values.chunks_exact(self.strips))
            {
                hmx.multiply(weights, &values[strips.clone()]);
                hmx.store(product);
            }
        }
    }
}

/// The part of a step that the matrix unit computes.
pub(super) struct Products<'t> {
    pub(super) hmx: &'t mut Hmx,
    pub(super) fixed: Fixed<'t>,
    pub(super) scored: &'t [GroupTile],
    pub(super) scores: &'t mut [Tile],
    pub(super) multiplied: &'t [GroupTile],
    pub(super) weights: &'t [Tile],
    pub(super) products: &'t mut [Tile],
}

impl MatrixPart for Products<'_> {
    fn is_empty(&self) -> bool {
        self.scored.is_empty() && self.multiplied.is_empty()
    }

    fn tile_products(&self) -> usize {
        let strips = |group: &[GroupTile]| -> usize {
            let lengths = group.iter().map(|it| it.sight.strips().len());
            lengths.sum()
        };
        strips(self.scored) * self.fixed.k_tiles + strips(self.multiplied) * self.fixed.v_strips
    }

    fn run(&mut self) {
        if self.is_empty() {
            return;
        }
        self.hmx.clear();
        self.fixed.scores(self.scored, self.scores, self.hmx);
        self.fixed
            .products(self.multiplied, self.weights, self.products, self.hmx);
    }
}
