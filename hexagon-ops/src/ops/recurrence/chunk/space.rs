//! The memory of a head in VTCM while it computes chunks of tokens.

use super::TOKENS;
use super::vectors::{BLOCKS, BlockRows, PerToken};
use crate::error::Result;
use crate::hvx;
use crate::layout::{Line, TILE_DIM};
use crate::ops::halves::{HalvesMut, LargestHalf, LargestLane, MOST, MOST_F16, holds};
use crate::rt::Arena;

/// Most of a decay, and of a factor of changes.
const MOST_DECAY: f32 = 1.0;
const MOST_BETA: f32 = 2.0;

/// A number for each token, in whole lines.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(128))]
pub(super) struct Numbers(pub(super) PerToken);

impl Numbers {
    pub(super) fn lines(&self) -> &[Line; BLOCKS] {
        bytemuck::cast_ref(self)
    }
}

/// Largest magnitudes of all chunks.
pub(super) struct Largest<'m> {
    pub(super) keys: &'m mut Line,
    pub(super) queries: &'m mut Line,
    /// Largest magnitudes of states and of values, which change them.
    pub(super) states: &'m mut Line,
    /// Largest magnitudes of inverses.
    pub(super) changes: &'m mut Line,
    pub(super) decays: &'m mut Line,
    /// Largest magnitudes of factors of changes.
    pub(super) betas: &'m mut Line,
    /// Largest magnitudes of products, as f16.
    pub(super) products: &'m mut Line,
}

impl Largest<'_> {
    /// Returns `true` if f16 held all operands and products.
    pub(super) fn is_exact(&self) -> bool {
        let largest = |line: &Line| hvx::widest(LargestLane(line));
        let fit = |line: &Line| holds(largest(line));
        let product = hvx::widest(LargestHalf(self.products));
        fit(self.keys)
            && fit(self.queries)
            && fit(self.states)
            && largest(self.changes) <= MOST
            && largest(self.decays) <= MOST_DECAY
            && largest(self.betas) <= MOST_BETA
            && product.to_bits().cast_signed() <= MOST_F16
    }
}

/// The memory of a head of `32 · L` columns.
pub(super) struct Space<'m, const L: usize> {
    pub(super) keys: HalvesMut<'m>,
    pub(super) queries: HalvesMut<'m>,
    pub(super) values: HalvesMut<'m>,
    /// Keys with a row for each of their elements; the tiles of all tokens are adjacent.
    pub(super) turned: HalvesMut<'m>,
    /// The state, with a row for each element of a key, and a column for each of a value.
    pub(super) state: HalvesMut<'m>,
    /// The state after the chunk.
    pub(super) next_state: HalvesMut<'m>,
    pub(super) key_products: HalvesMut<'m>,
    pub(super) query_products: HalvesMut<'m>,
    /// Keys and queries times the weight of the state before the chunk.
    pub(super) reading_keys: HalvesMut<'m>,
    pub(super) reading_queries: HalvesMut<'m>,
    /// Inverses of both blocks of tokens.
    pub(super) inverse: HalvesMut<'m>,
    /// The products by which the second block reads the first one, and then this part of the
    /// inverse.
    pub(super) early: HalvesMut<'m>,
    pub(super) early_product: HalvesMut<'m>,
    pub(super) weights: HalvesMut<'m>,
    pub(super) wanted: HalvesMut<'m>,
    pub(super) changes: HalvesMut<'m>,
    pub(super) late_changes: HalvesMut<'m>,
    pub(super) outputs: HalvesMut<'m>,
    /// Diagonal matrices: of `factors`, `betas`, `through` and `late`.
    pub(super) reading_keys_of: HalvesMut<'m>,
    pub(super) betas_of: HalvesMut<'m>,
    pub(super) through_of: HalvesMut<'m>,
    pub(super) late_of: HalvesMut<'m>,
    /// The diagonal matrix of the decay from the state before the chunk to that after it.
    pub(super) whole_of: HalvesMut<'m>,

    /// Rows of fewer tokens than a chunk's.
    pub(super) rows: &'m mut [[Line; L]; TOKENS],
    pub(super) reads: &'m mut BlockRows,
    pub(super) inverse_rows: &'m mut BlockRows,
    /// The unit matrix.
    pub(super) unit: &'m [Line; TILE_DIM],
    /// Decay of each token.
    pub(super) decays: &'m mut Numbers,
    /// Decay from the state before the chunk to each token.
    pub(super) through: &'m mut Numbers,
    /// Decay from each token to the last one.
    pub(super) late: &'m mut Numbers,
    pub(super) betas: &'m mut Numbers,
    /// The values that keys read from the state before the chunk, times the factor of the change,
    /// negated.
    pub(super) factors: &'m mut Numbers,
    /// A line of the decay of the whole chunk.
    pub(super) whole: &'m mut Line,
    pub(super) largest: Largest<'m>,
}

impl<'m, const L: usize> Space<'m, L> {
    /// Takes the memory from `arena`.
    ///
    /// # Errors
    /// `VtcmFull` if it has too little.
    pub(super) fn new(arena: &mut Arena<'m>) -> Result<Self> {
        let [row, square, triangle] = [BLOCKS * L, L * L, 2 * BLOCKS - 1];
        let mut tiles = |count: usize| -> Result<HalvesMut<'m>> {
            let (high, low) = arena
                .tiles("halves of a matrix", 2 * count)?
                .split_at_mut(count);
            Ok(HalvesMut { high, low })
        };
        let [keys, queries, values] = [tiles(row)?, tiles(row)?, tiles(row)?];
        let [reading_keys, reading_queries] = [tiles(row)?, tiles(row)?];
        let [turned, outputs] = [tiles(row)?, tiles(row)?];
        let [wanted, changes, late_changes] = [tiles(row)?, tiles(row)?, tiles(row)?];
        let [state, next_state] = [tiles(square)?, tiles(square)?];
        let [key_products, query_products] = [tiles(triangle)?, tiles(triangle)?];
        let [weights, inverse] = [tiles(triangle)?, tiles(BLOCKS)?];
        let [early, early_product, whole_of] = [tiles(1)?, tiles(1)?, tiles(1)?];
        let [reading_keys_of, betas_of] = [tiles(BLOCKS)?, tiles(BLOCKS)?];
        let [through_of, late_of] = [tiles(BLOCKS)?, tiles(BLOCKS)?];

        let block_rows = 2 * BLOCKS * TILE_DIM;
        let count = TOKENS * L + block_rows + TILE_DIM + 5 * BLOCKS + 8;
        let mut lines = Lines(arena.lines("rows of a head", count)?);
        Ok(Self {
            keys,
            queries,
            values,
            turned,
            state,
            next_state,
            key_products,
            query_products,
            reading_keys,
            reading_queries,
            inverse,
            early,
            early_product,
            weights,
            wanted,
            changes,
            late_changes,
            outputs,
            reading_keys_of,
            betas_of,
            through_of,
            late_of,
            whole_of,
            rows: lines.rows(),
            reads: lines.rows(),
            inverse_rows: lines.rows(),
            unit: lines.unit(),
            decays: lines.numbers(),
            through: lines.numbers(),
            late: lines.numbers(),
            betas: lines.numbers(),
            factors: lines.numbers(),
            whole: lines.zero(),
            largest: Largest {
                keys: lines.zero(),
                queries: lines.zero(),
                states: lines.zero(),
                changes: lines.zero(),
                decays: lines.zero(),
                betas: lines.zero(),
                products: lines.zero(),
            },
        })
    }
}

/// Lines that are cut into parts; the parts together are not longer.
struct Lines<'m>(&'m mut [Line]);

impl<'m> Lines<'m> {
    fn take(&mut self, count: usize) -> &'m mut [Line] {
        let (taken, rest) = core::mem::take(&mut self.0).split_at_mut(count);
        self.0 = rest;
        taken
    }

    fn array<const N: usize>(&mut self) -> &'m mut [Line; N] {
        let lines = self.take(N).as_chunks_mut().0;
        &mut lines[0]
    }

    fn rows<const L: usize, const N: usize>(&mut self) -> &'m mut [[Line; L]; N] {
        let rows = self.take(L * N).as_chunks_mut().0.as_chunks_mut().0;
        &mut rows[0]
    }

    fn numbers(&mut self) -> &'m mut Numbers {
        let numbers: &mut [Numbers] = bytemuck::cast_slice_mut(self.take(BLOCKS));
        &mut numbers[0]
    }

    fn zero(&mut self) -> &'m mut Line {
        let [line] = self.array();
        hvx::clear(core::slice::from_mut(line));
        line
    }

    fn unit(&mut self) -> &'m [Line; TILE_DIM] {
        let lines = self.array();
        hvx::clear(lines);
        for (i, line) in lines.iter_mut().enumerate() {
            let lanes: &mut [f32; TILE_DIM] = bytemuck::cast_mut(line);
            lanes[i] = 1.0;
        }
        lines
    }
}
