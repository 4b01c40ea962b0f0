//! The command for attention: checks the fields, makes the operands visible to the DSP, and runs
//! [`crate::ops::attention`].

use super::Platform;
use super::coherence::{Cache, CachedRanges};
use super::detail::{Failure, OPERAND, RESERVED};
use super::tensor_op::{bind, shape_of};
use super::tensor_run::CheckedTensor;
use crate::error::Error;
use crate::layout::Line;
use crate::ops::attention::{self, Attention, Sources, TABLE_LINES};
use crate::ops::matmul::Machine;
#[cfg(doc)]
use crate::ops::tensor::Shape;
use crate::ops::tensor::{View, ViewMut};
use crate::rt::memory::{CheckedOperands, Operands, Table};
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

/// Sources: queries, keys, values, mask, sinks.
const SOURCES: usize = 5;

/// An attention whose fields are right, and what they say.
#[derive(Clone, Copy, Debug)]
pub(super) struct CheckedAttention {
    params: Attention,
    dst: CheckedTensor,
    /// Dimensions of the result as [`Shape::row_order`] returns them.
    order: [usize; 3],
    src: [CheckedTensor; SOURCES],
    pub(super) operands: CheckedOperands<SOURCES>,
}

/// Checks the fields of [`wire::OP_ATTENTION`], and returns what they say and its operands; `None` if the result has no
/// elements.
pub(super) fn check<'a>(
    body: &wire::Attention,
    memory: &'a mut Table,
) -> Result<Option<(CheckedAttention, Operands<'a, SOURCES>)>, Failure> {
    if body.reserved != 0 {
        return Err(Failure::bad(RESERVED));
    }
    let missing = Failure::bad(OPERAND);
    if body.dst.dtype != wire::TYPE_NONE && body.dst.ne.contains(&0) {
        return Ok(None);
    }
    let buffers = memory.lend();
    let mut dst = None;
    bind(&body.dst, &buffers, &mut dst)?;
    let dst = dst.as_ref().ok_or(missing)?;
    let mut src = [CheckedTensor::NONE; SOURCES];
    let mut bounds = [None; SOURCES];
    let tensors = [&body.q, &body.k, &body.v, &body.mask, &body.sinks];
    for ((src, place), tensor) in src.iter_mut().zip(&mut bounds).zip(tensors) {
        let mut found = None;
        bind(tensor, &buffers, &mut found)?;
        if let Some(found) = found {
            *src = CheckedTensor::new(found.shape, true);
            *place = Some(found.bound);
        }
    }
    if bounds[..3].iter().any(Option::is_none) {
        return Err(missing);
    }
    // Overlapping operands are refused before any cache line changes.
    let operands = buffers.operands(dst.bound, bounds)?;
    let checked = CheckedAttention {
        params: params(body),
        dst: CheckedTensor::new(dst.shape, true),
        order: dst.shape.row_order().ok_or(Failure::from(Error::Operand))?,
        src,
        operands: operands.remember(),
    };
    Ok(Some((checked, operands)))
}

impl CheckedAttention {
    /// Executes the attention on its operands. `table` is in VTCM.
    pub(super) fn run(
        &self,
        mut operands: Operands<'_, SOURCES>,
        table: Option<&[Line; TABLE_LINES]>,
        (platform, ranges): (&mut impl Platform, &mut CachedRanges),
        machine: Machine<'_>,
    ) -> Result<(), Failure> {
        let mut cache = Cache {
            mappings: operands.mappings(),
            platform,
            ranges,
        };
        for (i, src) in self.src.iter().enumerate() {
            if let Some(bound) = operands.bound(i) {
                src.read(&bound, &mut cache);
            }
        }
        let to = operands.dst();
        self.dst.prepare(&to, &mut cache);
        let (bytes, slices) = operands.slices();
        let view = |i: usize| slices[i].map(|bytes| View::bound(bytes, *self.src[i].shape()));
        let missing = Failure::bad(OPERAND);
        let sources = Sources {
            q: view(0).ok_or(missing)?,
            k: view(1).ok_or(missing)?,
            v: view(2).ok_or(missing)?,
            mask: view(3),
            sinks: view(4),
        };
        let dst = ViewMut::bound(bytes, *self.dst.shape(), self.order);
        let done = attention::attention(machine, &self.params, dst, &sources, table);
        self.dst.written(&to, &mut cache);
        done.map_err(Failure::from)
    }
}
