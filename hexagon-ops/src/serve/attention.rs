//! The command for attention: checks the fields, makes the operands visible to the DSP, and runs
//! [`crate::ops::attention`].

use super::Platform;
use super::coherence::{Cache, CachedRanges};
use super::detail::{Failure, OPERAND, RESERVED};
use super::tensor_op::{bind, shape_of};
use crate::ops::attention::{self, Attention, ExpTable, Sources};
use crate::ops::matmul::Machine;
use crate::ops::tensor::{View, ViewMut};
use crate::rt::memory::Table;
use crate::wire;

/// Checks that [`wire::OP_ATTENTION`] accepts these types, dimensions, strides and parameters. Buffers
/// and offsets are not read.
///
/// # Errors
/// The failure with which the DSP would answer the command.
pub fn accepts_attention(body: &wire::Attention) -> Result<(), Failure> {
    let missing = Failure::bad(OPERAND);
    let described = |tensor| Ok::<_, Failure>(shape_of(tensor)?.map(View::described));
    let dst = shape_of(&body.dst)?.ok_or(missing)?;
    let sources = Sources {
        q: described(&body.q)?.ok_or(missing)?,
        k: described(&body.k)?.ok_or(missing)?,
        v: described(&body.v)?.ok_or(missing)?,
        mask: described(&body.mask)?,
        sinks: described(&body.sinks)?,
    };
    ViewMut::described(dst)?;
    Ok(attention::check(&params(body), &sources, &dst)?)
}

fn params(body: &wire::Attention) -> Attention {
    Attention {
        scale: f32::from_bits(body.scale),
        max_bias: f32::from_bits(body.max_bias),
        softcap: f32::from_bits(body.softcap),
    }
}

/// Executes [`wire::OP_ATTENTION`].
pub(super) fn attention(
    body: &wire::Attention,
    memory: &mut Table,
    table: &mut ExpTable,
    (platform, ranges): (&mut impl Platform, &mut CachedRanges),
    machine: Machine<'_>,
) -> Result<(), Failure> {
    if body.reserved != 0 {
        return Err(Failure::bad(RESERVED));
    }
    let missing = Failure::bad(OPERAND);
    if body.dst.dtype != wire::TYPE_NONE && body.dst.ne.contains(&0) {
        return Ok(());
    }
    let buffers = memory.lend();
    let mut dst = None;
    bind(&body.dst, &buffers, &mut dst)?;
    let dst = dst.as_ref().ok_or(missing)?;
    let mut src = [None; 5];
    let mut bounds = [None; 5];
    let tensors = [&body.q, &body.k, &body.v, &body.mask, &body.sinks];
    for ((src, bound), tensor) in src.iter_mut().zip(&mut bounds).zip(tensors) {
        bind(tensor, &buffers, src)?;
        *bound = src.as_ref().map(|src| src.bound);
    }
    // Overlapping operands are refused before any cache line changes.
    let mut cache = Cache {
        mappings: buffers.mappings(),
        platform,
        ranges,
    };
    let mut operands = buffers.operands(dst.bound, bounds)?;
    for src in src.iter().flatten() {
        src.read(&mut cache);
    }
    dst.prepare(&mut cache);
    let (bytes, sources) = operands.slices();
    let mut views = [None; 5];
    for (view, (bytes, src)) in views.iter_mut().zip(sources.into_iter().zip(src)) {
        if let (Some(bytes), Some(src)) = (bytes, src) {
            *view = Some(View::new(bytes, src.shape)?);
        }
    }
    let [q, k, v, mask, sinks] = views;
    let sources = Sources {
        q: q.ok_or(missing)?,
        k: k.ok_or(missing)?,
        v: v.ok_or(missing)?,
        mask,
        sinks,
    };
    let dst_view = ViewMut::new(bytes, dst.shape)?;
    let done = attention::attention(machine, &params(body), dst_view, &sources, table);
    dst.written(&mut cache);
    done.map_err(Failure::from)
}
