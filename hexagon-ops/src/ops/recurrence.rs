//! Recurrences over tokens: SSM_SCAN, GATED_DELTA_NET, GATED_LINEAR_ATTN, RWKV_WKV6 and RWKV_WKV7.
//!
//! A head has a state, a matrix that each token changes and reads. The heads are independent, so a
//! task computes all tokens of some heads. Meanwhile a head's state is in VTCM, with zeros after
//! rows that do not fill a line.
//!
//! Two forms cover the five operations (`state` has the kernels); GATED_DELTA_NET of many tokens
//! has a third one (`chunk`). In both, a token reads the state as it was before the token and adds
//! its own part, so that the state is read once for the output.

mod check;
mod chunk;
mod state;
mod token;

use core::ops::Range;

use self::check::Sizes;
pub(super) use self::chunk::SplitRows;
use self::state::HeadState;
use super::copy::check_indices;
use super::tensor::{Source, View, ViewMut};
use crate::error::{Error, Result};
use crate::hmx::Hmx;
use crate::layout::Tile;
use crate::rt::{Arena, Engine, SharedColumns, tiles_of_lines};
use crate::wire::WIDE_SOURCES;

/// Most tasks of a step.
const MAX_TASKS: usize = 8;
/// Rows whose outputs are computed together.
const ROWS: usize = 32;

/// A recurrence, with its parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Recurrence {
    /// SSM_SCAN, and the number of states that it returns.
    SsmScan(usize),
    /// GATED_DELTA_NET, and the number of states that it returns.
    GatedDelta(usize),
    /// GATED_LINEAR_ATTN, and the factor of the queries.
    GatedLinear(f32),
    /// RWKV_WKV6.
    Wkv6,
    /// RWKV_WKV7.
    Wkv7,
}

/// The sources of a recurrence in ggml's order, checked.
struct Inputs<'a> {
    kind: Recurrence,
    sizes: Sizes,
    /// Sources that the operation does not have repeat the first one.
    src: [View<'a>; WIDE_SOURCES],
}

impl<'a> Inputs<'a> {
    /// Returns a row of the state that a sequence begins with.
    fn initial(&self, sequence: usize, head: usize, row: usize) -> &'a [f32] {
        let Sizes { rows, columns, .. } = self.sizes;
        let whole = match self.kind {
            Recurrence::SsmScan(_) => {
                let slot = self.src[6].index(sequence, [0; 3]);
                self.src[0].floats([row, head, usize::try_from(slot).unwrap_or(0)])
            }
            Recurrence::GatedDelta(_) => self.src[5].floats([row, head, sequence]),
            Recurrence::GatedLinear(_) => self.src[4].floats([sequence, 0, 0]),
            Recurrence::Wkv6 => self.src[5].floats([sequence, 0, 0]),
            Recurrence::Wkv7 => self.src[6].floats([sequence, 0, 0]),
        };
        let first = match self.kind {
            Recurrence::SsmScan(_) | Recurrence::GatedDelta(_) => 0,
            _ => (head * rows + row) * columns,
        };
        let whole = whole.unwrap_or_default();
        whole.get(first..first + columns).unwrap_or_default()
    }
}

impl<'a> Inputs<'a> {
    /// Returns the state that a head begins with, if [`HeadState::step_square`] computes the
    /// operation's tokens, and the state's rows follow each other.
    fn whole_state(&self, sequence: usize, head: usize) -> Option<&'a [f32]> {
        let Sizes { rows, columns, .. } = self.sizes;
        let (source, plane) = match self.kind {
            Recurrence::GatedDelta(_) => (5, sequence),
            // One decay for all rows of a head.
            Recurrence::SsmScan(_) if self.src[3].shape.ne[0] == 1 => {
                let slot = self.src[6].index(sequence, [0; 3]);
                (0, usize::try_from(slot).unwrap_or(0))
            }
            Recurrence::Wkv7 if rows.is_multiple_of(ROWS) => {
                let elems = self.src[6].floats([sequence, 0, 0])?;
                let first = head * rows * columns;
                return elems.get(first..first + rows * columns);
            }
            _ => return None,
        };
        let (elems, stride) = self.src[source].float_rows([0, head, plane], rows)?;
        (stride == columns && rows.is_multiple_of(ROWS)).then_some(elems)
    }
}

/// The heads of a task.
struct HeadsTask<'a> {
    heads: Range<usize>,
    /// Outputs of these heads, a row for each token of each sequence.
    outputs: SharedColumns<'a>,
    /// States of these heads, a row for each sequence of each returned state.
    states: SharedColumns<'a>,
    scratch: HeadState<'a>,
}

impl HeadsTask<'_> {
    fn run(&mut self, inputs: &Inputs<'_>) {
        for sequence in 0..inputs.sizes.sequences {
            let mut head = self.heads.start;
            while head < self.heads.end {
                let end = inputs.sizes.unit_end(head).min(self.heads.end);
                self.run_heads(inputs, sequence, head..end);
                head = end;
            }
        }
    }

    /// Takes heads that share a matrix in VTCM through all tokens of a sequence.
    fn run_heads(&mut self, inputs: &Inputs<'_>, sequence: usize, heads: Range<usize>) {
        if let (Some(first), 1) = (inputs.whole_state(sequence, heads.start), heads.len()) {
            match inputs.sizes.columns {
                64 => return self.run_square::<2>(inputs, sequence, heads.start, first),
                128 => return self.run_square::<4>(inputs, sequence, heads.start, first),
                _ => {}
            }
        }
        let sizes = &inputs.sizes;
        let scratch = &mut self.scratch;
        scratch.begin(heads.len() * sizes.rows);
        for head in heads.clone() {
            for row in 0..sizes.rows {
                let index = (head - heads.start) * sizes.rows + row;
                scratch.set_row(index, inputs.initial(sequence, head, row));
            }
        }
        let first = (heads.start - self.heads.start) * sizes.rows;
        let range = first..first + heads.len() * sizes.rows;
        for token in 0..sizes.tokens {
            let row = self.outputs.row(sequence * sizes.tokens + token);
            let out = row.get_mut(range.clone()).unwrap_or_default();
            inputs.step(scratch, [token, sequence], heads.clone(), out);
            let age = sizes.tokens - 1 - token;
            if age < sizes.kept {
                let states = self.states.row(age * sizes.sequences + sequence);
                let range = range.start * sizes.columns..range.end * sizes.columns;
                scratch.copy_state(states.get_mut(range).unwrap_or_default());
            }
        }
    }
}

impl HeadsTask<'_> {
    /// Takes a head with a state of `32 · L` columns through all tokens of a sequence. The first
    /// token reads the state where it is, and the last one writes it where it will be.
    fn run_square<const L: usize>(
        &mut self,
        inputs: &Inputs<'_>,
        sequence: usize,
        head: usize,
        first: &[f32],
    ) {
        let sizes = &inputs.sizes;
        let row = (head - self.heads.start) * sizes.rows;
        let range = row..row + sizes.rows;
        let elems = range.start * sizes.columns..range.end * sizes.columns;
        for token in 0..sizes.tokens {
            let row = self.outputs.row(sequence * sizes.tokens + token);
            let out = row.get_mut(range.clone()).unwrap_or_default();
            let age = sizes.tokens - 1 - token;
            let from = (token == 0).then_some(first);
            let mut states = (age < sizes.kept).then(|| {
                let states = self.states.row(age * sizes.sequences + sequence);
                states.get_mut(elems.clone()).unwrap_or_default()
            });
            let to = match age {
                0 => states.take(),
                _ => None,
            };
            let at = [head, token, sequence];
            inputs.step_square::<L>(&mut self.scratch, at, (from, to), out);
            if let Some(states) = states {
                self.scratch.copy_state(states);
            }
        }
    }
}

/// Computes a recurrence.
///
/// # Errors
/// `Operand` if operands differ from [`crate::wire::WideOp`]'s rules; `Index` if a state does not
/// exist; `VtcmFull` if the VTCM does not hold the state of one head.
pub fn recurrence(
    engine: &Engine,
    vtcm: &mut [Tile],
    hmx: Option<&mut Hmx>,
    kind: Recurrence,
    dst: ViewMut<'_>,
    src: &[Source<'_>; WIDE_SOURCES],
) -> Result<()> {
    let inputs = check::check(kind, &dst.shape, src)?;
    let sizes = inputs.sizes;
    if matches!(kind, Recurrence::SsmScan(_)) {
        check_indices(&inputs.src[6], inputs.src[0].shape.ne[3])?;
    }
    if dst.is_empty() {
        return Ok(());
    }
    let elems = dst.into_floats().ok_or(Error::Operand)?;
    let token_elems = sizes.heads * sizes.rows;
    let (outputs, states) = elems.split_at_mut(token_elems * sizes.tokens * sizes.sequences);
    if chunk::chunked(engine, vtcm, hmx, &inputs, outputs, states)? {
        return Ok(());
    }
    let mut outputs = SharedColumns::new(outputs, token_elems);
    let mut states = SharedColumns::new(states, token_elems * sizes.columns);

    let lines = HeadState::lines(sizes.unit_rows(), sizes.columns);
    let tiles = tiles_of_lines(lines);
    let n_tasks = (engine.threads().min(MAX_TASKS))
        .min(sizes.heads)
        .min(vtcm.len() / tiles)
        .max(1);
    let mut arena = Arena::new(vtcm);
    let mut tasks: [Option<HeadsTask<'_>>; MAX_TASKS] = [const { None }; MAX_TASKS];
    let mut start = 0;
    for (i, task) in tasks.iter_mut().take(n_tasks).enumerate() {
        let count = (sizes.heads - start).div_ceil(n_tasks - i);
        let memory = arena.lines("states of heads", lines)?;
        *task = Some(HeadsTask {
            heads: start..start + count,
            outputs: outputs.split_off(count * sizes.rows),
            states: states.split_off(count * sizes.rows * sizes.columns),
            scratch: HeadState::new(memory, sizes.unit_rows(), sizes.columns),
        });
        start += count;
    }
    engine.step(None, &mut tasks[..n_tasks], |task| {
        task.iter_mut().for_each(|task| task.run(&inputs));
    });
    Ok(())
}
