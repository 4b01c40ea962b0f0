//! Products of a group's tiles of rows on the matrix unit: queries by keys, and weights by values.

use super::group::GroupTile;
use super::vtcm::GROUP;
use crate::hmx::{Hmx, MAX_DEEP, ScaleBlock, vectors};
use crate::layout::{TILE_DIM, Tile};
use crate::rt::{Engine, MatrixPart};

/// The operands of products, which no stage changes.
#[derive(Clone, Copy)]
pub(super) struct Fixed<'m> {
    pub(super) queries: &'m [Tile],
    pub(super) keys: &'m [Tile],
    pub(super) values: &'m [Tile],
    /// Scales of stores: one for scores that are completed in f32, and for each tile one for its
    /// other scores.
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
                // Most keys need a single product, and a loop would take longer than that product.
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

impl Fixed<'_> {
    /// Computes the scores of a tile of rows on the vector units.
    fn scores_by_vectors(&self, it: &GroupTile, scores: &mut [Tile]) {
        let k_tiles = self.k_tiles;
        let queries = &self.queries[it.tile * k_tiles..][..k_tiles];
        let scale = match it.is_exact {
            true => &self.stores[0],
            false => &self.factors[it.tile],
        };
        let keys = self.keys[it.sight.strips().start * k_tiles..].chunks_exact(k_tiles);
        for (score, keys) in scores[it.sight.strips()].iter_mut().zip(keys) {
            vectors::multiply(queries, keys, scale, TILE_DIM, score);
        }
    }

    /// Multiplies the weights of a tile of rows by the values on the vector units.
    fn values_by_vectors(&self, it: &GroupTile, weights: &[Tile], products: &mut [Tile]) {
        let strips = it.sight.strips();
        let weights = &weights[strips.clone()];
        let values = self.values.chunks_exact(self.strips);
        for (product, values) in products.iter_mut().zip(values) {
            let (values, scale) = (&values[strips.clone()], &self.stores[self.scale]);
            vectors::multiply(weights, values, scale, TILE_DIM, product);
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

/// A tile of rows on the vector units.
enum VectorProduct<'t> {
    Scores(&'t GroupTile, &'t mut [Tile]),
    Values(&'t GroupTile, &'t [Tile], &'t mut [Tile]),
}

impl Products<'_> {
    /// Computes the part on the vector units of all threads, a task for each tile of rows.
    pub(super) fn by_vectors(self, engine: &Engine) {
        let fixed = self.fixed;
        let mut tasks: [Option<VectorProduct<'_>>; 2 * GROUP] = [const { None }; 2 * GROUP];
        let scores = self.scores.chunks_mut(fixed.strips.max(1));
        let scores =
            (self.scored.iter().zip(scores)).map(|(it, out)| VectorProduct::Scores(it, out));
        let weights = self.weights.chunks(fixed.strips.max(1));
        let products = self.products.chunks_mut(fixed.v_strips.max(1));
        let values = (self.multiplied.iter().zip(weights.zip(products)))
            .map(|(it, (weights, out))| VectorProduct::Values(it, weights, out));
        let mut n_tasks = 0;
        for (place, task) in tasks.iter_mut().zip(scores.chain(values)) {
            *place = Some(task);
            n_tasks += 1;
        }
        engine.step(None, &mut tasks[..n_tasks], |task| match task {
            Some(VectorProduct::Scores(it, out)) => fixed.scores_by_vectors(it, out),
            Some(VectorProduct::Values(it, weights, out)) => {
                fixed.values_by_vectors(it, weights, out);
            }
            None => {}
        });
    }
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
