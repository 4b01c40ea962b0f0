//! The stages of a chunk of a head's tokens.

use super::TOKENS;
use super::space::{Largest, Numbers, Space};
use super::unit::Unit;
use super::vectors::{
    Invert, Outputs, Renew, SplitChanges, SplitColumns, SplitRows, TOKEN_LINES, Want, Weigh,
};
use crate::hvx;
use crate::layout::{Line, TILE_DIM};
use crate::ops::recurrence::state::{exp, fill};
use crate::ops::recurrence::{Inputs, token};
use crate::ops::square::{GatherRows, WriteColumns};
use crate::ops::tensor::View;
use crate::rt::SharedColumns;

/// A head that is taken through its tokens.
pub(super) struct Head<'a, 'm, const L: usize> {
    pub(super) head: usize,
    /// Outputs of the head, a row for each token of each sequence.
    pub(super) outputs: SharedColumns<'a>,
    /// States of the head, a row for each sequence.
    pub(super) states: SharedColumns<'a>,
    pub(super) space: &'a mut Space<'m, L>,
}

impl<const L: usize> Head<'_, '_, L> {
    /// Reads the state before the tokens of a sequence.
    pub(super) fn begin(&mut self, inputs: &Inputs<'_>, sequence: usize) {
        let elems = inputs.whole_state(sequence, self.head);
        let to: &mut [f32] = bytemuck::cast_slice_mut(self.space.state_rows);
        transpose::<L>(elems.unwrap_or_default(), to, self.space.gathered);
    }

    /// Writes the state after them.
    pub(super) fn end(&mut self, sequence: usize) {
        let elems: &[f32] = bytemuck::cast_slice(self.space.state_rows);
        transpose::<L>(elems, self.states.row(sequence), self.space.gathered);
    }

    /// Reads the chunk of up to [`TOKENS`] tokens that starts with token `first`.
    pub(super) fn read(&mut self, inputs: &Inputs<'_>, [first, sequence]: [usize; 2]) {
        let space = &mut *self.space;
        let count = TOKENS.min(inputs.sizes.tokens - first);
        let at = [self.head, first, sequence];
        let [q, k, v, g, beta, ..] = &inputs.src;
        for (view, at, rows) in [
            (
                q,
                token::shared(inputs, q, at),
                &mut *space.queries_or_outputs,
            ),
            (k, token::shared(inputs, k, at), &mut *space.key_rows),
            (v, at, &mut *space.value_rows),
        ] {
            hvx::widest(ReadTokens {
                view,
                at,
                count,
                rows,
            });
        }
        // A token after the last one changes nothing.
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

        let Largest {
            keys,
            queries,
            states,
            ..
        } = &mut space.largest;
        hvx::widest(SplitRows {
            rows: space.key_rows,
            to: space.keys.lend(),
            steps: [L, 1],
            largest: keys,
        });
        hvx::widest(SplitRows {
            rows: space.queries_or_outputs,
            to: space.queries.lend(),
            steps: [L, 1],
            largest: queries,
        });
        hvx::widest(SplitRows {
            rows: space.state_rows,
            to: space.state.lend(),
            steps: [1, L],
            largest: states,
        });
        let keys: &[f32] = bytemuck::cast_slice(space.key_rows);
        for block in 0..TOKEN_LINES {
            for strip in 0..L {
                hvx::widest(GatherRows {
                    elems: keys,
                    at: TILE_DIM * (block * TILE_DIM * L + strip),
                    stride: TILE_DIM * L,
                    count: TILE_DIM,
                    to: space.gathered,
                });
                let tile = block * L + strip;
                hvx::widest(SplitColumns {
                    gathered: space.gathered,
                    high: &mut space.turned.high[tile],
                    low: &mut space.turned.low[tile],
                });
            }
        }
    }

    /// Multiplies keys and queries with keys and the state.
    pub(super) fn read_old(&mut self, unit: &mut Unit<'_>) {
        let space = &mut *self.space;
        let (turned, state) = (space.turned.get(), space.state.get());
        let ne = [TOKEN_LINES, TOKEN_LINES, L];
        let states = [TOKEN_LINES, L, L];
        for (rows, with_keys, old) in [
            (&space.keys, &mut space.key_products, &mut space.old_keys),
            (
                &space.queries,
                &mut space.query_products,
                &mut space.old_queries,
            ),
        ] {
            let rows = (rows.get(), [L, 1]);
            unit.multiply(rows, (turned, [L, 1]), ne, with_keys.lend());
            unit.multiply(rows, (state, [L, 1]), states, old.lend());
        }
    }

    /// Writes what the changes are made of.
    pub(super) fn solve(&mut self) {
        let space = &mut *self.space;
        hvx::widest(Weigh {
            key_products: space.key_products.get(),
            query_products: space.query_products.get(),
            decays: &space.decays.0,
            betas: &space.betas.0,
            unit: space.unit,
            reads: space.reads,
            weights: space.weights.lend(),
            late: bytemuck::cast_mut(space.late),
        });
        hvx::widest(Invert {
            rows: space.reads,
            unit: space.unit,
            inverse: space.inverse_rows,
        });
        hvx::widest(SplitRows {
            rows: space.inverse_rows,
            to: space.inverse.lend(),
            steps: [TOKEN_LINES, 1],
            largest: space.largest.changes,
        });
        hvx::widest(Want {
            values: space.value_rows,
            old: space.old_keys.get(),
            decays: &space.through.0,
            betas: &space.betas.0,
            to: space.wanted.lend(),
            largest: [&mut space.largest.states, &mut space.largest.changes],
            largest_product: space.largest.products,
        });
    }

    /// Multiplies the changes.
    pub(super) fn change(&mut self, unit: &mut Unit<'_>) {
        let space = &mut *self.space;
        let inverse = (space.inverse.get(), [TOKEN_LINES, 1]);
        let wanted = (space.wanted.get(), [TOKEN_LINES, 1]);
        let to = space.change_products.lend();
        unit.multiply(inverse, wanted, [TOKEN_LINES, L, TOKEN_LINES], to);
    }

    /// Splits the changes.
    pub(super) fn split_changes(&mut self) {
        let space = &mut *self.space;
        hvx::widest(SplitChanges {
            changes: space.change_products.get(),
            strips: L,
            late: &space.late.0,
            to: space.changes.lend(),
            late_to: space.late_changes.lend(),
            largest: space.largest.changes,
        });
    }

    /// Multiplies the changes with what reads them.
    pub(super) fn read_new(&mut self, unit: &mut Unit<'_>) {
        let space = &mut *self.space;
        let weights = (space.weights.get(), [TOKEN_LINES, 1]);
        let changes = (space.changes.get(), [TOKEN_LINES, 1]);
        let to = space.new_queries.lend();
        unit.multiply(weights, changes, [TOKEN_LINES, L, TOKEN_LINES], to);
        let turned = (space.turned.get(), [1, L]);
        let late = (space.late_changes.get(), [TOKEN_LINES, 1]);
        unit.multiply(turned, late, [L, L, TOKEN_LINES], space.updates.lend());
    }

    /// Writes the outputs of the chunk, and the state after it.
    pub(super) fn finish(&mut self, inputs: &Inputs<'_>, [first, sequence]: [usize; 2]) {
        let space = &mut *self.space;
        hvx::widest(Outputs {
            old: space.old_queries.get(),
            new: space.new_queries.get(),
            decays: &space.through.0,
            scale: 1.0 / token::square_root(inputs.sizes.columns),
            to: space.queries_or_outputs,
            largest_product: space.largest.products,
        });
        let tokens = first..inputs.sizes.tokens.min(first + TOKENS);
        for (row, token) in space.queries_or_outputs.iter().zip(tokens) {
            let to = self.outputs.row(sequence * inputs.sizes.tokens + token);
            hvx::copy_f32(to, bytemuck::cast_slice(row));
        }
        hvx::widest(Renew {
            rows: space.state_rows,
            factor: space.through.0[TOKENS - 1],
            add: space.updates.get(),
            largest_product: space.largest.products,
        });
    }
}

/// Transposes a square of `32 · L` rows.
fn transpose<const L: usize>(from: &[f32], to: &mut [f32], gathered: &mut [Line; TILE_DIM]) {
    let stride = TILE_DIM * L;
    for row in 0..L {
        for column in 0..L {
            hvx::widest(GatherRows {
                elems: from,
                at: TILE_DIM * (row * stride + column),
                stride,
                count: TILE_DIM,
                to: gathered,
            });
            hvx::widest(WriteColumns {
                gathered,
                out: to
                    .get_mut(TILE_DIM * (column * stride + row)..)
                    .unwrap_or_default(),
                stride,
                rows: TILE_DIM,
                columns: TILE_DIM,
            });
        }
    }
}

/// Reads rows of tokens, with zeros after them.
struct ReadTokens<'a, const L: usize> {
    view: &'a View<'a>,
    at: [usize; 3],
    count: usize,
    rows: &'a mut [[Line; L]; TOKENS],
}

impl<const L: usize> hvx::Kernel for ReadTokens<'_, L> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut bytes = self.view.tail(self.view.shape.row(self.at));
        let stride = self.view.shape.nb[2];
        let (rows, rest) = self.rows.split_at_mut(self.count.min(TOKENS));
        for row in rows {
            for (line, from) in row.iter_mut().zip(bytes.as_chunks().0) {
                hvx::store(line, hvx::load_bytes(from));
            }
            bytes = bytes.get(stride..).unwrap_or_default();
        }
        hvx::clear(rest.as_flattened_mut());
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
