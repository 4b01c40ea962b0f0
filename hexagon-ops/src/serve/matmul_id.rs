//! The command for products with experts' weights: checks the fields, makes the operands visible to
//! the DSP, and cuts the command into products of [`crate::ops::matmul`].

use super::access::of_product;
use super::coherence::{Cache, CachedRanges};
use super::detail::{ALIGNMENT, BOUNDS, Failure, PLANES, SLOTS};
use super::matmul::{cast, dots, weights};
use super::region::{BoundRows, Strided, accepts_rows};
use super::{Platform, Scratch};
use crate::layout::{Line, MatrixLayout};
use crate::ops::matmul::{Dots, ExpertMatMul, Machine};
use crate::rt::cache::Access;
use crate::rt::memory::{CheckedOperands, Operands, Table};
use crate::wire;

/// Maximum number of choices of experts in one pass: tokens of a usual ubatch (512) times experts
/// of a token (8). More choices need several passes, and each pass reads the weights again.
pub const MAX_CHOICES: usize = 4096;

/// A product with experts whose fields were checked, in decoded form.
#[derive(Clone, Copy, Debug)]
pub(super) struct CheckedExperts {
    layout: MatrixLayout,
    act: Strided,
    dst: Strided,
    ids: Strided,
    slots: usize,
    act_slots: usize,
    tokens: usize,
    dots: Dots,
    /// Results; weights, activations, choices.
    pub(super) operands: CheckedOperands<3>,
}

/// Checks that [`wire::OP_MUL_MAT_ID`] accepts the places of activations, choices and results.
///
/// # Errors
/// The failure with which the DSP would answer the command.
pub fn accepts_experts(body: &wire::MatMulId) -> Result<(), Failure> {
    let (slots, tokens) = (body.slots, body.tokens);
    if [slots, body.act_slots, tokens].contains(&0) {
        return Ok(());
    }
    let dst = (&body.dst, body.weights.n, [slots, tokens, 1]);
    let act = (&body.act, body.weights.k, [body.act_slots, tokens, 1]);
    accepts_rows(dst, [act, (&body.ids, slots, [tokens, 1, 1])])
}

/// Checks the fields of [`wire::OP_MUL_MAT_ID`], and returns them decoded, with the operands;
/// `None` if there are no tokens.
pub(super) fn check<'a>(
    body: &wire::MatMulId,
    memory: &'a mut Table,
) -> Result<Option<(CheckedExperts, Operands<'a, 3>)>, Failure> {
    let dots = dots(body.dots)?;
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
        return Ok(None);
    }
    let counts = [body.slots, body.tokens, 1];
    let dst = BoundRows::new(&body.dst, body.weights.n, counts, &buffers)?;
    dst.rows.disjoint()?;
    let counts = [body.act_slots, body.tokens, 1];
    let act = BoundRows::new(&body.act, body.weights.k, counts, &buffers)?;
    let ids = BoundRows::new(&body.ids, body.slots, [body.tokens, 1, 1], &buffers)?;
    // Expert ids must not overlap the result either, although they are read before the result is
    // written.
    let sources = [w.bound, act.bound, ids.bound].map(Some);
    let operands = buffers.operands(dst.bound, sources)?;
    let experts = CheckedExperts {
        layout: w.layout,
        act: act.rows,
        dst: dst.rows,
        ids: ids.rows,
        slots,
        act_slots,
        tokens: size(body.tokens)?,
        dots,
        operands: operands.to_checked(),
    };
    Ok(Some((experts, operands)))
}

impl CheckedExperts {
    /// Executes the product on its operands.
    pub(super) fn run(
        &self,
        mut operands: Operands<'_, 3>,
        (platform, ranges): (&mut impl Platform, &mut CachedRanges),
        scratch: &mut Scratch,
        mut machine: Machine<'_>,
    ) -> Result<(), Failure> {
        let bounds = Failure::bad(BOUNDS);
        let mut cache = Cache {
            mappings: operands.mappings(),
            platform,
            ranges,
        };
        let bound = |i: usize| operands.bound(i).ok_or(bounds);
        let rows = |rows: Strided, bound| BoundRows { bound, rows };
        let (act, ids) = (rows(self.act, bound(1)?), rows(self.ids, bound(2)?));
        let dst = rows(self.dst, operands.dst());
        cache.before_dma(&bound(0)?);
        act.read(of_product(&act.rows), &mut cache);
        ids.read(Access::Scalar, &mut cache);
        dst.read_edges(&mut cache);
        let (dst_bytes, [weight_bytes, act_bytes, id_bytes]) = operands.slices();
        let (weights, act_elems) = (cast::<Line>(weight_bytes)?, cast::<f32>(act_bytes)?);
        let chosen = cast::<i32>(id_bytes)?;
        let dst_elems: &mut [f32] =
            bytemuck::try_cast_slice_mut(dst_bytes).map_err(|_| Failure::bad(ALIGNMENT))?;
        let (slots, act_slots, tokens) = (self.slots, self.act_slots, self.tokens);

        // Activations that all slots of a token share have a stride of 0. Otherwise activations may
        // repeat after a period, and each period is multiplied separately.
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
                let dst_start =
                    first_token * dst.rows.strides[1] + first_slot * dst.rows.strides[0];
                let product = ExpertMatMul {
                    layout: self.layout,
                    weights,
                    dots: self.dots,
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
        dst.written(of_product(&dst.rows), &mut cache);
        done
    }
}
