//! The command for attention: checks the fields, makes the operands visible to the DSP, and runs
//! [`crate::ops::attention`].

use super::Platform;
use super::access::of_attention;
use super::coherence::{Cache, CachedRanges};
use super::detail::{Failure, OPERAND, RESERVED};
use super::tensor_op::{bind, shape_of};
use super::tensor_run::CheckedTensor;
use crate::error::Error;
use crate::layout::Line;
use crate::ops::attention::{self, Attention, AttentionPlan, Sources, TABLE_LINES};
use crate::ops::matmul::Machine;
#[cfg(doc)]
use crate::ops::tensor::Shape;
use crate::ops::tensor::{View, ViewMut};
use crate::rt::cache::Access;
use crate::rt::memory::{CheckedOperands, Operands, Table};
use crate::wire;

/// Checks that [`wire::OP_ATTENTION`] accepts these types, dimensions, strides and parameters.
/// Buffers and offsets are not read.
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

/// An attention whose fields were checked, in decoded form.
#[derive(Clone, Copy, Debug)]
pub(super) struct CheckedAttention {
    params: Attention,
    dst: CheckedTensor,
    /// Dimensions of the result as [`Shape::row_order`] returns them.
    order: [usize; 3],
    src: [CheckedTensor; SOURCES],
    pub(super) operands: CheckedOperands<SOURCES>,
}

/// Checks the fields of [`wire::OP_ATTENTION`], and returns them decoded, with the operands; `None`
/// if the result has no elements.
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
    for (i, ((src, place), tensor)) in src.iter_mut().zip(&mut bounds).zip(tensors).enumerate() {
        let mut found = None;
        bind(tensor, &buffers, &mut found)?;
        if let Some(found) = found {
            let access = if i == 0 {
                of_attention(&found.shape)
            } else {
                Access::Scalar
            };
            *src = CheckedTensor::new(found.shape, true, access);
            *place = Some(found.bound);
        }
    }
    if bounds[..3].iter().any(Option::is_none) {
        return Err(missing);
    }
    // Overlapping operands are refused before any cache line is changed.
    let operands = buffers.operands(dst.bound, bounds)?;
    let checked = CheckedAttention {
        params: params(body),
        dst: CheckedTensor::new(dst.shape, true, of_attention(&dst.shape)),
        order: dst.shape.row_order().ok_or(Failure::from(Error::Operand))?,
        src,
        operands: operands.to_checked(),
    };
    Ok(Some((checked, operands)))
}

impl CheckedAttention {
    /// Executes the attention on its operands. `table` is in VTCM.
    ///
    /// Keys, values and the mask need no cache operations if the DMA engine reads them, except for
    /// lines that earlier commands of the submission wrote.
    pub(super) fn run(
        &self,
        mut operands: Operands<'_, SOURCES>,
        table: Option<&[Line; TABLE_LINES]>,
        (platform, ranges): (&mut impl Platform, &mut CachedRanges),
        mut machine: Machine<'_>,
    ) -> Result<(), Failure> {
        let mut cache = Cache {
            mappings: operands.mappings(),
            platform,
            ranges,
        };
        let described = self
            .src
            .map(|src| src.is_present().then(|| View::described(*src.shape())));
        let described = sources(described)?;
        let has_table = table.is_some();
        let plan = AttentionPlan::new(
            &self.params,
            &described,
            self.dst.shape(),
            &machine,
            has_table,
        )?;
        let (of_cache, of_mask) = (plan.copies_cache(), plan.copies_mask());
        let is_direct = [false, of_cache, of_cache, of_mask, false];
        for (i, (src, is_direct)) in self.src.iter().zip(is_direct).enumerate() {
            let Some(bound) = operands.bound(i) else {
                continue;
            };
            operands.read_directly(i, is_direct);
            if is_direct {
                cache.before_dma(&bound);
            } else {
                src.read(&bound, &mut cache);
            }
        }
        let to = operands.dst();
        self.dst.prepare(&to, &mut cache);
        let mut done = self.on(&mut operands, |dst, src| {
            plan.run_on_tiles(machine.reborrow(), dst, src, table)
        });
        if done == Ok(false) {
            for (i, src) in self.src.iter().enumerate().filter(|(i, _)| is_direct[*i]) {
                if let Some(bound) = operands.bound(i) {
                    src.read(&bound, &mut cache);
                    operands.read_directly(i, false);
                }
            }
            done = self.on(&mut operands, |dst, src| {
                plan.run_by_dots(machine, dst, src).map(|()| true)
            });
        }
        self.dst.written(&to, &mut cache);
        done.map(|_| ())
    }

    /// Runs `run` on the result and the sources.
    fn on<R>(
        &self,
        operands: &mut Operands<'_, SOURCES>,
        run: impl FnOnce(&mut ViewMut<'_>, &Sources<'_>) -> crate::error::Result<R>,
    ) -> Result<R, Failure> {
        let (bytes, slices) = operands.slices();
        let mut views = [None; SOURCES];
        for (view, (bytes, src)) in views.iter_mut().zip(slices.into_iter().zip(&self.src)) {
            *view = bytes.map(|bytes| View::bound(bytes, *src.shape()));
        }
        let mut dst = ViewMut::bound(bytes, *self.dst.shape(), self.order);
        Ok(run(&mut dst, &sources(views)?)?)
    }
}

/// Returns the sources in the order of [`SOURCES`].
fn sources<'a>(
    [q, k, v, mask, sinks]: [Option<View<'a>>; SOURCES],
) -> Result<Sources<'a>, Failure> {
    let missing = Failure::bad(OPERAND);
    Ok(Sources {
        q: q.ok_or(missing)?,
        k: k.ok_or(missing)?,
        v: v.ok_or(missing)?,
        mask,
        sinks,
    })
}
