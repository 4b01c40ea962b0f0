//! The memory of a head in VTCM while it is taken through chunks of tokens.

use super::TOKENS;
use super::unit::HalvesMut;
use super::vectors::{PerToken, TOKEN_LINES, TokenRows};
use crate::error::Result;
use crate::hvx;
use crate::layout::{Line, TILE_DIM, Tile, f16_tile_offset};
use crate::ops::rows::{all_lanes, first_lane};
use crate::ops::square::Gathered;
use crate::rt::Arena;

/// Least largest magnitude of an operand: what is left of an f16 of this size is rounded to 2^-17 of it.
const LEAST: f32 = 1.0 / 256.0;
/// Most of an operand: half of what f16 holds.
const MOST: f32 = 32768.0;
/// Bits of the largest f16.
const LARGEST_F16: i32 = 0x7bff;

/// A number for each token, in whole lines.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(128))]
pub(super) struct Numbers(pub(super) PerToken);

/// Largest magnitudes of all chunks.
pub(super) struct Largest<'m> {
    pub(super) keys: &'m mut Line,
    pub(super) queries: &'m mut Line,
    /// Those of states and of values, which change them.
    pub(super) states: &'m mut Line,
    /// Those of the changes, and of what they are computed from.
    pub(super) changes: &'m mut Line,
    /// Those of products, as f16.
    pub(super) products: &'m mut Line,
}

impl Largest<'_> {
    /// Returns `true` if f16 held all operands and products.
    pub(super) fn is_exact(&self) -> bool {
        let largest = |line: &Line| hvx::widest(LargestLane(line));
        let fit = |line: &Line| (LEAST..=MOST).contains(&largest(line));
        let product = hvx::widest(LargestHalf(self.products));
        fit(self.keys)
            && fit(self.queries)
            && fit(self.states)
            && largest(self.changes) <= MOST
            && product.to_bits().cast_signed() < LARGEST_F16
    }
}

/// The largest lane of magnitudes of f32.
struct LargestLane<'a>(&'a Line);

impl hvx::Kernel for LargestLane<'_> {
    type Output = f32;

    #[inline(always)]
    fn run(self) -> f32 {
        first_lane(all_lanes(hvx::load(self.0), hvx::max_w))
    }
}

/// The largest lane of magnitudes of f16, as the bits of the result.
struct LargestHalf<'a>(&'a Line);

impl hvx::Kernel for LargestHalf<'_> {
    type Output = f32;

    #[inline(always)]
    fn run(self) -> f32 {
        let halves = hvx::load(self.0);
        let words = hvx::max_h(halves, hvx::shr_w(halves, 16));
        let words = hvx::and(words, hvx::splat_w(0xffff));
        first_lane(all_lanes(words, hvx::max_w))
    }
}

/// The memory of a head of `32 · L` columns.
pub(super) struct Space<'m, const L: usize> {
    pub(super) keys: HalvesMut<'m>,
    pub(super) queries: HalvesMut<'m>,
    /// Keys with a row for each of their elements.
    pub(super) turned: HalvesMut<'m>,
    pub(super) state: HalvesMut<'m>,
    pub(super) inverse: HalvesMut<'m>,
    pub(super) weights: HalvesMut<'m>,
    pub(super) wanted: HalvesMut<'m>,
    pub(super) changes: HalvesMut<'m>,
    pub(super) late_changes: HalvesMut<'m>,
    pub(super) key_products: HalvesMut<'m>,
    pub(super) query_products: HalvesMut<'m>,
    pub(super) old_keys: HalvesMut<'m>,
    pub(super) old_queries: HalvesMut<'m>,
    pub(super) change_products: HalvesMut<'m>,
    pub(super) new_queries: HalvesMut<'m>,
    pub(super) updates: HalvesMut<'m>,

    pub(super) key_rows: &'m mut [[Line; L]; TOKENS],
    pub(super) value_rows: &'m mut [[Line; L]; TOKENS],
    /// The queries until they are split, and then the outputs.
    pub(super) queries_or_outputs: &'m mut [[Line; L]; TOKENS],
    /// The state, with a row for each element of a key.
    pub(super) state_rows: &'m mut [[Line; L]],
    pub(super) reads: &'m mut TokenRows,
    pub(super) inverse_rows: &'m mut TokenRows,
    /// The unit matrix.
    pub(super) unit: &'m [Line; TILE_DIM],
    pub(super) gathered: &'m mut Gathered,
    /// Decay of each token.
    pub(super) decays: &'m mut Numbers,
    /// Decay from the state before the chunk to each token.
    pub(super) through: &'m mut Numbers,
    /// Decay from each token to the last one.
    pub(super) late: &'m mut Numbers,
    pub(super) betas: &'m mut Numbers,
    pub(super) largest: Largest<'m>,
}

impl<'m, const L: usize> Space<'m, L> {
    /// Takes the memory from `arena`.
    ///
    /// # Errors
    /// `VtcmFull` if it has too little.
    pub(super) fn new(arena: &mut Arena<'m>) -> Result<Self> {
        let [row, square, tokens] = [TOKEN_LINES * L, L * L, TOKEN_LINES * TOKEN_LINES];
        let mut tiles = |count: usize| -> Result<HalvesMut<'m>> {
            let (high, low) = arena
                .tiles("halves of a matrix", 2 * count)?
                .split_at_mut(count);
            Ok(HalvesMut { high, low })
        };
        let [keys, queries, turned] = [tiles(row)?, tiles(row)?, tiles(row)?];
        let [state, updates] = [tiles(square)?, tiles(square)?];
        let [inverse, weights] = [tiles(tokens)?, tiles(tokens)?];
        let [key_products, query_products] = [tiles(tokens)?, tiles(tokens)?];
        let [wanted, changes, late_changes] = [tiles(row)?, tiles(row)?, tiles(row)?];
        let [old_keys, old_queries] = [tiles(row)?, tiles(row)?];
        let [change_products, new_queries] = [tiles(row)?, tiles(row)?];

        let token_rows = 3 * TOKENS * L + 2 * TOKENS * TOKEN_LINES;
        let count = token_rows + TILE_DIM * square + 2 * TILE_DIM + 4 * TOKEN_LINES + 5;
        let mut lines = Lines(arena.lines("rows of a head", count)?);
        Ok(Self {
            keys,
            queries,
            turned,
            state,
            inverse,
            weights,
            wanted,
            changes,
            late_changes,
            key_products,
            query_products,
            old_keys,
            old_queries,
            change_products,
            new_queries,
            updates,
            key_rows: lines.rows(),
            value_rows: lines.rows(),
            queries_or_outputs: lines.rows(),
            state_rows: lines.take(TILE_DIM * square).as_chunks_mut().0,
            reads: lines.rows(),
            inverse_rows: lines.rows(),
            unit: lines.unit(),
            gathered: lines.array(),
            decays: lines.numbers(),
            through: lines.numbers(),
            late: lines.numbers(),
            betas: lines.numbers(),
            largest: Largest {
                keys: lines.zero(),
                queries: lines.zero(),
                states: lines.zero(),
                changes: lines.zero(),
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
        let numbers: &mut [Numbers] = bytemuck::cast_slice_mut(self.take(TOKEN_LINES));
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

/// Writes the unit matrix, negated.
pub(super) fn negated_unit(tile: &mut Tile) {
    *tile = Tile::ZERO;
    let bytes: &mut [u8] = bytemuck::bytes_of_mut(tile);
    for i in 0..TILE_DIM {
        let at = f16_tile_offset(i, i);
        bytes[at..at + 2].copy_from_slice(&0xbc00_u16.to_le_bytes());
    }
}
