//! The command for operations with more sources: checks the fields, makes the operands visible to
//! the DSP, and runs [`crate::ops::run_wide`].

use super::Platform;
use super::access::of_wide;
use super::coherence::{Cache, CachedRanges};
use super::detail::{Failure, OPERAND, RESERVED};
use super::kernel::decode;
use super::tensor_op::{bind, shape_of};
use crate::error::Error;
use crate::ops::matmul::Machine;
use crate::ops::run_wide;
use crate::ops::tensor::{Source, View, ViewMut};
use crate::rt::Engine;
use crate::rt::cache::Access;
use crate::rt::memory::{Addresses, Table};
use crate::wire::{WIDE_SOURCES, WideOp};

/// Checks that [`crate::wire::OP_WIDE`] accepts these types, dimensions, strides and parameters.
/// Buffers and offsets are not read.
///
/// # Errors
/// The failure with which the DSP would answer the command.
pub fn accepts_wide(body: &WideOp) -> Result<(), Failure> {
    let op = decode(body.kernel, &body.params)?;
    let dst = shape_of(&body.dst.widen())?.ok_or(Failure::bad(OPERAND))?;
    let mut sources = [Source::None; WIDE_SOURCES];
    for (source, tensor) in sources.iter_mut().zip(&body.src) {
        if let Some(shape) = shape_of(&tensor.widen())? {
            *source = Source::Apart(View::described(shape));
        }
    }
    let described = ViewMut::described(dst)?;
    match run_wide(&Engine::new(1), &mut [], None, &op, described, &sources) {
        // Kernels check indices last. There are no indices yet, so this error means that all other
        // checks passed.
        Ok(()) | Err(Error::Index { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Executes [`crate::wire::OP_WIDE`]; returns the addresses that it wrote to.
pub(super) fn wide_op(
    body: &WideOp,
    memory: &mut Table,
    (platform, ranges): (&mut impl Platform, &mut CachedRanges),
    machine: Machine<'_>,
) -> Result<Option<Addresses>, Failure> {
    if body.reserved != 0 {
        return Err(Failure::bad(RESERVED));
    }
    let op = decode(body.kernel, &body.params)?;
    let buffers = memory.lend();
    let mut dst = None;
    bind(&body.dst.widen(), &buffers, &mut dst)?;
    let dst = dst.ok_or(Failure::bad(OPERAND))?;
    let mut src = [None; WIDE_SOURCES];
    for (src, tensor) in src.iter_mut().zip(&body.src) {
        bind(&tensor.widen(), &buffers, src)?;
    }
    let mut cache = Cache {
        mappings: buffers.mappings(),
        platform,
        ranges,
    };
    // Overlapping operands are refused before any cache line is changed.
    let mut operands = buffers.operands(dst.bound, src.map(|src| src.map(|src| src.bound)))?;
    let shapes = src.each_ref().map(|src| src.as_ref().map(|src| &src.shape));
    let (of_dst, of_src) = of_wide(&op, &dst.shape, shapes);
    for (src, access) in src.iter().zip(of_src) {
        if let Some(src) = src {
            src.read(access, &mut cache);
        }
    }
    dst.prepare(&mut cache);
    if op.may_skip_parts() {
        dst.read(Access::Scalar, &mut cache);
    }

    let (bytes, slices) = operands.slices();
    let mut sources = [Source::None; WIDE_SOURCES];
    for (source, (bytes, src)) in sources.iter_mut().zip(slices.into_iter().zip(src)) {
        if let (Some(bytes), Some(src)) = (bytes, src) {
            *source = Source::Apart(View::new(bytes, src.shape)?);
        }
    }
    let view = ViewMut::new(bytes, dst.shape)?;
    let Machine { engine, vtcm, hmx } = machine;
    let done = run_wide(engine, vtcm, Some(hmx), &op, view, &sources);
    dst.written(of_dst, &mut cache);
    done?;
    Ok(Some(dst.bound.addresses()))
}
