//! Checks of the command for operations on tensors, and of the tensors of other commands.

use core::ops::Range;

use super::Platform;
use super::access::of_tensors;
use super::coherence::Cache;
use super::detail::{ALIGNMENT, BOUNDS, Failure, OPERAND, RESERVED, SHAPE, TYPE};
use super::kernel::decode;
use super::tensor_run::{CheckedOp, CheckedTensor};
use super::work::is_zero;
use crate::error::Error;
use crate::layout::LINE_BYTES;
use crate::ops::tensor::{Shape, Source, Type, View, ViewMut};
use crate::ops::{Op, run};
use crate::rt::Engine;
use crate::rt::cache::Access;
use crate::rt::memory::{Bound, LentBuffers, Operands, Table};
use crate::wire::{self, SOURCES};

/// Elements with a smaller stride share one cache operation, bytes.
const NEAR_BYTES: usize = 2 * LINE_BYTES;

/// A tensor whose fields are right, and the bytes that hold it.
#[derive(Clone, Copy, Debug)]
pub(super) struct BoundTensor<'a> {
    pub(super) shape: Shape,
    pub(super) bound: Bound<'a>,
}

impl PartialEq for BoundTensor<'_> {
    fn eq(&self, other: &Self) -> bool {
        // Bounds are compared first, because they usually differ.
        self.bound == other.bound && self.shape == other.shape
    }
}

/// Checks a tensor and resolves its buffer, and writes it to `out`; an absent tensor leaves `out`
/// unchanged.
///
/// Bound in place, because a returned tensor would be copied several times on its way to `out`.
pub(super) fn bind<'a>(
    tensor: &wire::Tensor,
    buffers: &LentBuffers<'a>,
    out: &mut Option<BoundTensor<'a>>,
) -> Result<(), Failure> {
    let Some(shape) = shape_of(tensor)? else {
        return Ok(());
    };
    let bytes = shape.bytes().ok_or(Failure::bad(BOUNDS))?;
    let bound = buffers.bind(tensor.buffer, tensor.offset, bytes as u64)?;
    *out = Some(BoundTensor { shape, bound });
    Ok(())
}

/// Returns the type of a tensor's elements from its number, one of `wire::TYPE_*`; `None` if no
/// type has the number.
#[must_use]
pub fn type_of(dtype: u32) -> Option<Type> {
    Some(match dtype {
        wire::TYPE_F32 => Type::F32,
        wire::TYPE_F16 => Type::F16,
        wire::TYPE_I32 => Type::I32,
        wire::TYPE_I64 => Type::I64,
        wire::TYPE_Q8_0 => Type::Q8_0,
        wire::TYPE_Q4_0 => Type::Q4_0,
        wire::TYPE_BF16 => Type::Bf16,
        wire::TYPE_I16 => Type::I16,
        wire::TYPE_I8 => Type::I8,
        wire::TYPE_Q4_1 => Type::Q4_1,
        wire::TYPE_Q5_0 => Type::Q5_0,
        wire::TYPE_Q5_1 => Type::Q5_1,
        wire::TYPE_IQ4_NL => Type::Iq4Nl,
        wire::TYPE_MXFP4 => Type::Mxfp4,
        wire::TYPE_Q2_K => Type::Q2K,
        wire::TYPE_Q3_K => Type::Q3K,
        wire::TYPE_Q4_K => Type::Q4K,
        wire::TYPE_Q5_K => Type::Q5K,
        wire::TYPE_Q6_K => Type::Q6K,
        wire::TYPE_IQ4_XS => Type::Iq4Xs,
        _ => return None,
    })
}

/// Checks a tensor's type, dimensions and strides; `None` if there is none.
#[inline(always)]
pub(super) fn shape_of(tensor: &wire::Tensor) -> Result<Option<Shape>, Failure> {
    if tensor.dtype == wire::TYPE_NONE {
        return if is_zero(bytemuck::bytes_of(tensor)) {
            Ok(None)
        } else {
            Err(Failure::bad(RESERVED))
        };
    }
    let dtype = type_of(tensor.dtype).ok_or(Failure::bad(TYPE))?;
    // All alignments are powers of two.
    let rest = dtype.align() as u64 - 1;
    let all = tensor.nb.iter().fold(tensor.offset, |all, nb| all | nb);
    if all & rest != 0 {
        return Err(Failure::bad(ALIGNMENT));
    }
    // Written out instead of loops, so that the numbers stay in registers.
    let bounds = Failure::bad(BOUNDS);
    let size = |n: u32| usize::try_from(n).map_err(|_| bounds);
    let [n0, n1, n2, n3] = tensor.ne;
    // Dimensions of 2^31 and more would be negative as 32-bit numbers. They are refused, so that
    // kernels can add to indices in the DSP's 32-bit words.
    let least =
        (n0.cast_signed().min(n1.cast_signed())).min(n2.cast_signed().min(n3.cast_signed()));
    let (n0, n1, n2, n3) = (size(n0)?, size(n1)?, size(n2)?, size(n3)?);
    // Blocks have 32 elements, super-blocks 256.
    if least <= 0 || n0 & (dtype.block() - 1) != 0 {
        let is_large = least < 0 && !tensor.ne.contains(&0);
        return Err(if is_large {
            bounds
        } else {
            Failure::bad(SHAPE)
        });
    }
    let elems = n0.checked_mul(n1).and_then(|n| n.checked_mul(n2));
    elems.and_then(|n| n.checked_mul(n3)).ok_or(bounds)?;
    // A dimension of one index uses no stride.
    let stride = |count: usize, have: u64| match count {
        1 => Ok(0),
        _ => usize::try_from(have).map_err(|_| bounds),
    };
    let [b0, b1, b2, b3] = tensor.nb;
    let blocks = n0 >> dtype.block().trailing_zeros();
    let (b0, b1) = (stride(blocks, b0)?, stride(n1, b1)?);
    let (b2, b3) = (stride(n2, b2)?, stride(n3, b3)?);
    Ok(Some(Shape {
        dtype,
        ne: [n0, n1, n2, n3],
        nb: [b0, b1, b2, b3],
    }))
}

/// Checks that [`wire::OP_TENSOR`] accepts these types, dimensions, strides and parameters. Buffers
/// and offsets are only compared, to find the sources that are the result's memory.
///
/// # Errors
/// The failure with which the DSP would answer the command.
pub fn accepts(body: &wire::TensorOp) -> Result<(), Failure> {
    let operand = Failure::bad(OPERAND);
    let op = decode(body.kernel, &body.params)?;
    let mut dst = shape_of(&body.dst)?.ok_or(operand)?;
    let mut src = [None; SOURCES];
    for (src, tensor) in src.iter_mut().zip(&body.src) {
        *src = shape_of(tensor)?;
    }
    if let (Op::Copy, Some(src)) = (&op, &mut src[0]) {
        sort_dimensions(&mut dst, src);
    }
    let mut sources = [Source::None; SOURCES];
    for (i, source) in sources.iter_mut().enumerate() {
        *source = match src[i] {
            None => Source::None,
            Some(_) if body.src[i] == body.dst => Source::InPlace,
            Some(shape) => Source::Apart(View::described(shape)),
        };
    }
    match run(&Engine::new(1), &op, ViewMut::described(dst)?, &sources) {
        // Kernels check indices last. There are no indices yet, so this error means that all other
        // checks passed.
        Ok(()) | Err(Error::Index { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Exchanges dimensions of a copy between equal shapes so that the result's strides grow. The copy
/// stays the same, and the rows of a transposed result become disjoint.
fn sort_dimensions(dst: &mut Shape, src: &mut Shape) {
    if dst.ne != src.ne || dst.dtype.block() > 1 || src.dtype.block() > 1 {
        return;
    }
    let mut order = [0, 1, 2, 3];
    order.sort_unstable_by_key(|i| {
        let single = dst.ne[*i] == 1;
        (single, dst.nb[*i], *i)
    });
    for shape in [dst, src] {
        shape.ne = order.map(|i| shape.ne[i]);
        shape.nb = order.map(|i| shape.nb[i]);
    }
}

impl BoundTensor<'_> {
    /// Calls `f` with the ranges of bytes of the buffer that hold the tensor, and whether other
    /// bytes are between its elements.
    fn runs(&self, mut f: impl FnMut(Range<usize>, bool)) {
        let shape = &self.shape;
        if shape.is_gapless() {
            return f(self.bound.range(), false);
        }
        let mut dims = [
            (shape.nb[0], shape.blocks()),
            (shape.nb[1], shape.ne[1]),
            (shape.nb[2], shape.ne[2]),
            (shape.nb[3], shape.ne[3]),
        ];
        // A stride of 0 only repeats the same elements.
        for dim in dims.iter_mut().filter(|(stride, _)| *stride == 0) {
            dim.1 = 1;
        }
        dims.sort_unstable();
        let (mut bytes, mut has_gaps) = (shape.dtype.block_bytes(), false);
        for (stride, count) in &mut dims {
            if *count == 1 {
                continue;
            }
            if *stride > bytes.max(NEAR_BYTES) {
                break;
            }
            has_gaps |= *stride > bytes;
            bytes += *stride * (*count - 1);
            *count = 1;
        }
        let first = self.bound.range().start;
        let [(s0, n0), (s1, n1), (s2, n2), (s3, n3)] = dims;
        for i3 in 0..n3 {
            for i2 in 0..n2 {
                for i1 in 0..n1 {
                    for i0 in 0..n0 {
                        let start = first + i0 * s0 + i1 * s1 + i2 * s2 + i3 * s3;
                        f(start..start + bytes, has_gaps);
                    }
                }
            }
        }
    }

    /// Makes a source visible to the instructions that `access` names.
    pub(super) fn read(&self, access: Access, cache: &mut Cache<'_, impl Platform>) {
        self.runs(|range, _| cache.read(&self.bound, range, access));
    }

    /// Makes bytes visible that share cache lines with the result, and will be cleaned with it.
    pub(super) fn prepare(&self, cache: &mut Cache<'_, impl Platform>) {
        self.runs(|range, has_gaps| {
            if has_gaps {
                cache.read(&self.bound, range.clone(), Access::Scalar);
            }
            cache.read_edges(&self.bound, &range);
        });
    }

    /// Remembers that the instructions that `access` names wrote the result.
    pub(super) fn written(&self, access: Access, cache: &mut Cache<'_, impl Platform>) {
        self.runs(|range, _| cache.written(&self.bound, &range, access));
    }
}

/// Checks the fields of a command, and returns them decoded, with the operands; `None` if the
/// result has no elements.
pub(super) fn check<'a>(
    body: &wire::TensorOp,
    memory: &'a mut Table,
) -> Result<Option<(CheckedOp, Operands<'a, SOURCES>)>, Failure> {
    if body.reserved != 0 {
        return Err(Failure::bad(RESERVED));
    }
    let op = decode(body.kernel, &body.params)?;
    if body.dst.dtype == wire::TYPE_NONE {
        return Err(Failure::bad(OPERAND));
    }
    if body.dst.ne.contains(&0) {
        return Ok(None);
    }
    let buffers = memory.lend();
    let mut dst = None;
    bind(&body.dst, &buffers, &mut dst)?;
    let dst = dst.as_mut().ok_or(Failure::bad(OPERAND))?;
    let mut src = [None; SOURCES];
    for (src, tensor) in src.iter_mut().zip(&body.src) {
        bind(tensor, &buffers, src)?;
    }
    if let (Op::Copy, Some(src)) = (&op, &mut src[0]) {
        sort_dimensions(&mut dst.shape, &mut src.shape);
    }
    let dst = &*dst;
    let mut apart = [None; SOURCES];
    let mut sources = [CheckedTensor::NONE; SOURCES];
    let shapes = src.each_ref().map(|src| src.as_ref().map(|src| &src.shape));
    let (of_dst, of_src) = of_tensors(&op, &dst.shape, shapes);
    for (i, (apart, source)) in apart.iter_mut().zip(&mut sources).enumerate() {
        let Some(src) = &src[i] else { continue };
        let is_apart = src != dst;
        *apart = is_apart.then_some(src.bound);
        // Bytes that an operation in place leaves unchanged count as written, so they must be
        // visible to scalar instructions before. Examples are ROPE on a part of each row, and a
        // copy to itself.
        let access = if is_apart { of_src[i] } else { Access::Scalar };
        *source = CheckedTensor::new(src.shape, is_apart, access);
    }
    // Overlapping operands are refused before any cache line is changed.
    let operands = buffers.operands(dst.bound, apart)?;
    let checked = CheckedOp {
        op,
        dst: CheckedTensor::new(dst.shape, true, of_dst),
        order: dst.shape.row_order().ok_or(Failure::from(Error::Operand))?,
        src: sources,
        operands: operands.to_checked(),
    };
    Ok(Some((checked, operands)))
}
