//! The stages of a chunk of a head's tokens. Each is a function, which is used both by a single
//! thread and by several.

use super::TOKENS;
use super::space::{Numbers, Space};
use super::vectors::{
    BLOCKS, Diagonal, Invert, Largest, LargestProduct, NegatedProducts, SplitRows, TurnTile, Weigh,
    WriteRows,
};
use crate::hvx::{self, StridedVectors};
use crate::layout::{LINE_BYTES, Line, TILE_DIM, Tile};
use crate::ops::halves::{Halves, HalvesMut, Term, Unit};
use crate::ops::recurrence::state::{exp, fill, splat};
use crate::ops::recurrence::{Inputs, token};
use crate::ops::tensor::View;
use crate::rt::SharedColumns;

/// A head of `E = 32 · L` columns, and its way through the tokens.
pub(super) struct Head<'a, 'm, const L: usize, const E: usize> {
    pub(super) head: usize,
    /// Outputs of the head, a row for each token of each sequence.
    pub(super) outputs: SharedColumns<'a>,
    /// States of the head, a row for each sequence.
    pub(super) states: SharedColumns<'a>,
    pub(super) space: &'a mut Space<'m, L>,
    /// One bits where the unit matrix has ones, as f16.
    pub(super) ones: &'a Tile,
}

impl<const L: usize, const E: usize> Head<'_, '_, L, E> {
    /// Reads the state before the tokens of a sequence.
    #[inline(never)]
    pub(super) fn begin(&mut self, inputs: &Inputs<'_>, sequence: usize) {
        let space = &mut *self.space;
        let elems = inputs.whole_state(sequence, self.head).unwrap_or_default();
        let bytes = bytemuck::cast_slice(elems);
        if let Some(rows) = StridedVectors::new(bytes, LINE_BYTES * L, TILE_DIM * L) {
            hvx::widest(SplitRows::<L> {
                rows,
                to: space.next_state.lend(),
                largest: space.largest.states,
            });
        }
        turn(space.next_state.get(), space.state.lend(), [L, L], [L, 1]);
    }

    /// Writes the state after them.
    #[inline(never)]
    pub(super) fn end(&mut self, sequence: usize) {
        let space = &mut *self.space;
        turn(space.state.get(), space.next_state.lend(), [L, L], [L, 1]);
        let mut rows = SharedColumns::new(self.states.row(sequence), TILE_DIM * L);
        hvx::widest(WriteRows::<L, E> {
            from: space.next_state.get(),
            scale: 1.0,
            rows: &mut rows,
            first: 0,
            count: TILE_DIM * L,
            largest: space.largest.products,
        });
    }

    /// Reads the chunk of up to [`TOKENS`] tokens that starts with token `first`.
    #[inline(never)]
    pub(super) fn read(&mut self, inputs: &Inputs<'_>, [first, sequence]: [usize; 2]) {
        let space = &mut *self.space;
        let count = TOKENS.min(inputs.sizes.tokens - first);
        let at = [self.head, first, sequence];
        let [q, k, v, g, beta, ..] = &inputs.src;
        for (view, at, to, largest) in [
            (
                q,
                token::shared(inputs, q, at),
                &mut space.queries,
                &mut *space.largest.queries,
            ),
            (
                k,
                token::shared(inputs, k, at),
                &mut space.keys,
                &mut *space.largest.keys,
            ),
            (v, at, &mut space.values, &mut *space.largest.states),
        ] {
            split_tokens(view, at, count, space.rows, to.lend(), largest);
        }
        turn(
            space.keys.get(),
            space.turned.lend(),
            [BLOCKS, L],
            [1, BLOCKS],
        );
        // Tokens after the last one are filled in so that they change nothing.
        read_numbers(g, at, count, space.decays);
        read_numbers(beta, at, count, space.betas);
        exp(bytemuck::cast_slice_mut(core::slice::from_mut(
            space.decays,
        )));
        let mut through = 1.0;
        for (through_token, decay) in space.through.0.iter_mut().zip(&space.decays.0) {
            through *= decay;
            *through_token = through;
        }
        hvx::widest(NegatedProducts {
            a: space.through.lines(),
            b: space.betas.lines(),
            to: bytemuck::cast_mut(space.factors),
        });
        splat(core::slice::from_mut(space.whole), through);
        for (numbers, to) in [
            (&space.factors.lines()[..], &mut space.reading_keys_of),
            (space.betas.lines(), &mut space.betas_of),
            (space.through.lines(), &mut space.through_of),
            (core::slice::from_ref(&*space.whole), &mut space.whole_of),
        ] {
            diagonal(self.ones, numbers, to.lend());
        }
        // Products of decays do not exceed 1 if the decays do not.
        for (lines, largest) in [
            (space.decays.lines(), &mut *space.largest.decays),
            (space.betas.lines(), space.largest.betas),
        ] {
            hvx::widest(Largest { lines, largest });
        }
    }

    /// Multiplies keys and queries with keys and the state.
    #[inline(never)]
    pub(super) fn read_old(&mut self, unit: &mut Unit<'_>) {
        let space = &mut *self.space;
        let (turned, state) = (space.turned.get(), space.state.get());
        for (rows, products, diagonal, reading) in [
            (
                space.keys.get(),
                &mut space.key_products,
                &space.reading_keys_of,
                &mut space.reading_keys,
            ),
            (
                space.queries.get(),
                &mut space.query_products,
                &space.through_of,
                &mut space.reading_queries,
            ),
        ] {
            // Products of the tokens of a block with those of the same block and earlier ones.
            for block in 0..BLOCKS {
                let with: [Term<'_>; L] = core::array::from_fn(|k| {
                    let rows = rows.from(block * L + k);
                    rows.times(0, turned.from(k * BLOCKS), [0, 1], 1)
                });
                let to = products.lend_from(block);
                unit.multiply(&with, [1, block + 1], to, [0, 1]);
            }
            let with = diagonal.get().times(1, rows, [L, 1], 1);
            unit.multiply(&[with], [BLOCKS, L], reading.lend(), [L, 1]);
        }
        let old = (space.reading_keys.get()).times(L, state, [0, L], L);
        let new = (space.betas_of.get()).times(1, space.values.get(), [L, 1], 1);
        let to = space.wanted.lend();
        unit.multiply(&[old, new], [BLOCKS, L], to, [1, BLOCKS]);
    }

    /// Writes the terms of the changes.
    #[inline(never)]
    pub(super) fn solve(&mut self) {
        let space = &mut *self.space;
        hvx::widest(Weigh {
            key_products: space.key_products.get(),
            query_products: space.query_products.get(),
            decays: &space.decays.0,
            betas: &space.betas.0,
            unit: space.unit,
            reads: space.reads,
            early: space.early.lend(),
            weights: space.weights.lend(),
            late: bytemuck::cast_mut(space.late),
            largest: space.largest.products,
        });
        diagonal(self.ones, space.late.lines(), space.late_of.lend());
        hvx::widest(Invert {
            rows: space.reads,
            unit: space.unit,
            inverse: space.inverse_rows,
            to: space.inverse.lend(),
            largest: space.largest.changes,
        });
    }

    /// Computes the changes, and multiplies them with the keys and queries that read them.
    #[inline(never)]
    pub(super) fn change(&mut self, unit: &mut Unit<'_>) {
        let space = &mut *self.space;
        let one = [1, 1];
        let (first, last) = (space.inverse.get(), space.inverse.get().from(1));
        let product = (space.early.get()).times(0, first, [0; 2], 1);
        unit.multiply(&[product], one, space.early_product.lend(), [0; 2]);
        let product = last.times(0, space.early_product.get(), [0; 2], 1);
        unit.multiply(&[product], one, space.early.lend(), [0; 2]);
        let wanted = space.wanted.get();
        let early = (space.early.get()).times(0, wanted, [0, BLOCKS], 1);
        for block in 0..BLOCKS {
            let wanted = wanted.from(block);
            let own = (space.inverse.get().from(block)).times(0, wanted, [0, BLOCKS], 1);
            let terms = [own, early];
            let to = space.changes.lend_from(block);
            unit.multiply(&terms[..=block], [1, L], to, [0, BLOCKS]);
        }

        let changes = space.changes.get();
        let late = (space.late_of.get()).times(1, changes, [1, BLOCKS], 1);
        let to = space.late_changes.lend();
        unit.multiply(&[late], [BLOCKS, L], to, [1, BLOCKS]);
        let (state, late) = (space.state.get(), space.late_changes.get());
        for block in 0..BLOCKS {
            let queries = space.reading_queries.get().from(block * L);
            let old = queries.times(0, state, [0, L], L);
            let weights = space.weights.get().from(block);
            let new = weights.times(0, changes, [0, BLOCKS], block + 1);
            let to = space.outputs.lend_from(block * L);
            unit.multiply(&[old, new], [1, L], to, [0, 1]);
        }
        let kept = (space.whole_of.get()).times(0, state, [1, L], 1);
        let added = (space.turned.get()).times(BLOCKS, late, [0, BLOCKS], BLOCKS);
        let to = space.next_state.lend();
        unit.multiply(&[kept, added], [L, L], to, [1, L]);
    }

    /// Writes the outputs of the chunk, and computes the state after it.
    #[inline(never)]
    pub(super) fn finish(&mut self, inputs: &Inputs<'_>, [first, sequence]: [usize; 2]) {
        let space = &mut *self.space;
        let tokens = inputs.sizes.tokens;
        hvx::widest(WriteRows::<L, E> {
            from: space.outputs.get(),
            scale: 1.0 / token::square_root(inputs.sizes.columns),
            rows: &mut self.outputs,
            first: sequence * tokens + first,
            count: TOKENS.min(tokens - first),
            largest: space.largest.products,
        });
        for products in [
            &space.wanted,
            &space.early,
            &space.early_product,
            &space.changes,
            &space.next_state,
        ] {
            hvx::widest(LargestProduct {
                tiles: products.high,
                largest: space.largest.products,
            });
        }
        core::mem::swap(&mut space.state, &mut space.next_state);
    }
}

/// Writes the transposed tiles of a matrix of `[rows, columns]` tiles, with this many tiles from
/// one strip of its rows to the next, and from one strip of its columns to the next.
fn turn(from: Halves<'_>, to: HalvesMut<'_>, [rows, columns]: [usize; 2], to_steps: [usize; 2]) {
    for row in 0..rows {
        for column in 0..columns {
            let at = row * to_steps[0] + column * to_steps[1];
            let tile = row * columns + column;
            for (from, to) in [
                (&from.high[tile], &mut to.high[at]),
                (&from.low[tile], &mut to.low[at]),
            ] {
                hvx::widest(TurnTile { from, to });
            }
        }
    }
}

/// Writes the diagonal matrix of numbers.
fn diagonal(ones: &Tile, numbers: &[Line], to: HalvesMut<'_>) {
    hvx::widest(Diagonal { ones, numbers, to });
}

/// Splits the rows of `count` tokens, and zeros after them.
///
/// - `at`: the first one
/// - `padded`: memory for rows
fn split_tokens<const L: usize>(
    view: &View<'_>,
    at: [usize; 3],
    count: usize,
    padded: &mut [[Line; L]; TOKENS],
    to: HalvesMut<'_>,
    largest: &mut Line,
) {
    let mut bytes = view.tail(view.shape.row(at));
    let stride = view.shape.nb[2];
    let mut rows = StridedVectors::new(bytes, stride, TOKENS).filter(|_| count == TOKENS);
    if rows.is_none() {
        let (rows, rest) = padded.split_at_mut(count.min(TOKENS));
        for row in rows {
            for (line, from) in row.iter_mut().zip(bytes.as_chunks().0) {
                hvx::store(line, hvx::load_bytes(from));
            }
            bytes = bytes.get(stride..).unwrap_or_default();
        }
        hvx::clear(rest.as_flattened_mut());
    }
    let padded = StridedVectors::new(bytemuck::cast_slice(padded), LINE_BYTES * L, TOKENS);
    rows = rows.or(padded);
    if let Some(rows) = rows {
        hvx::widest(SplitRows::<L> { rows, to, largest });
    }
}

/// Reads a number of each token, with zeros after them.
fn read_numbers(view: &View<'_>, at: [usize; 3], count: usize, to: &mut Numbers) {
    let mut bytes = view.tail(view.shape.row(at));
    let stride = view.shape.nb[2];
    fill(bytemuck::cast_slice_mut(core::slice::from_mut(to)), &[]);
    for number in to.0.iter_mut().take(count) {
        let first = bytes.first_chunk();
        *number = first.map_or(0.0, |bytes| f32::from_le_bytes(*bytes));
        bytes = bytes.get(stride..).unwrap_or_default();
    }
}
