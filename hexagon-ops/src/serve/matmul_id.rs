//! The command for products with experts' weights: checks the fields, makes the operands visible to the DSP, and cuts the
//! command into products of [`crate::ops::matmul`].

use super::coherence::{Cache, CachedRanges};
use super::detail::{ALIGNMENT, BOUNDS, Failure, PLANES, SLOTS};
use super::matmul::{cast, dot_rows, weights};
use super::region::BoundRows;
use super::{Platform, Scratch};
use crate::layout::Line;
use crate::ops::matmul::{ExpertMatMul, Machine};
use crate::rt::memory::Table;
use crate::wire;

/// Maximum number of choices of experts in one turn: tokens of a usual ubatch (512) times experts of a
/// token (8). More choices take several turns, and each turn reads the weights again.
pub(super) const MAX_CHOICES: usize = 4096;

/// Executes [`wire::OP_MUL_MAT_ID`].
pub(super) fn mul_mat_id(
    body: &wire::MatMulId,
    memory: &mut Table,
    (platform, ranges): (&mut impl Platform, &mut CachedRanges),
    scratch: &mut Scratch,
    mut machine: Machine<'_>,
) -> Result<(), Failure> {
    let dot_rows = dot_rows(body.dot_rows)?;
    let buffers = memory.lend();
    let w = weights(&body.weights, &buffers)?;
    if body.weights.slices[1] != 1 {
        return Err(Failure::bad(PLANES));
    }
    let bounds = Failure::bad(BOUNDS);
    let size = |value: u32| usize::try_from(value).map_err(|_| bounds);
    let (slots, act_slots) = (size(body.slots)?, size(body.act_slots)?);
    if slots == 0 || act_slots == 0 || slots % act_slots != 0 || slots > MAX_CHOICES {
        return Err(Failure::bad(SLOTS));
    }
    if body.tokens == 0 {
        return Ok(());
    }
    let tokens = size(body.tokens)?;
    let counts = [body.slots, body.tokens, 1];
    let dst = BoundRows::new(&body.dst, body.weights.n, counts, &buffers)?;
    dst.rows.disjoint()?;
    let counts = [body.act_slots, body.tokens, 1];
    let act = BoundRows::new(&body.act, body.weights.k, counts, &buffers)?;
    let ids = BoundRows::new(&body.ids, body.slots, [body.tokens, 1, 1], &buffers)?;
    // Choices share no memory with results either, although they are read before results are written.
    let sources = [w.bound, act.bound, ids.bound].map(Some);
    let mut cache = Cache {
        mappings: buffers.mappings(),
        platform,
        ranges,
    };
    let mut operands = buffers.operands(dst.bound, sources)?;
    cache.before_dma(&w.bound);
    act.read(&mut cache);
    ids.read(&mut cache);
    dst.read_edges(&mut cache);
    let (dst_bytes, [weight_bytes, act_bytes, id_bytes]) = operands.slices();
    let (weights, act_elems) = (cast::<Line>(weight_bytes)?, cast::<f32>(act_bytes)?);
    let chosen = cast::<i32>(id_bytes)?;
    let dst_elems: &mut [f32] =
        bytemuck::try_cast_slice_mut(dst_bytes).map_err(|_| Failure::bad(ALIGNMENT))?;

    // Activations that all slots of a token share have a stride of 0. Activations that repeat are multiplied one period
    // at a time.
    let period = if act_slots == 1 { slots } else { act_slots };
    let per_turn = MAX_CHOICES / period;
    let mut done = Ok(());
    'turns: for first_slot in (0..slots).step_by(period) {
        for first_token in (0..tokens).step_by(per_turn) {
            let n_tokens = per_turn.min(tokens - first_token);
            for t in 0..n_tokens {
                let at = (first_token + t) * ids.rows.strides[0] + first_slot;
                let choices = chosen.get(at..at + period).ok_or(bounds)?;
                scratch.ids[t * period..][..period].copy_from_slice(choices);
            }
            let act_start = first_token * act.rows.strides[1];
            let dst_start = first_token * dst.rows.strides[1] + first_slot * dst.rows.strides[0];
            let product = ExpertMatMul {
                layout: w.layout,
                weights,
                dot_rows,
                ids: &scratch.ids[..n_tokens * period],
                n_slots: period,
                act: act_elems.get(act_start..).unwrap_or_default(),
                act_strides: [act.rows.strides[1], act.rows.strides[0]],
                dst: dst_elems.get_mut(dst_start..).unwrap_or_default(),
                dst_strides: [dst.rows.strides[1], dst.rows.strides[0]],
            };
            let starts = &mut scratch.starts[..2 * n_tokens * period];
            done = product
                .run(machine.reborrow(), starts)
                .map_err(Failure::from);
            if done.is_err() {
                break 'turns;
            }
        }
    }
    dst.written(&mut cache);
    done
}
