//! The graph as ggml handed it over: metadata copied, memory borrowed for one call. No planning, no device.

use crate::shm::{Region, RegionMut};
use crate::tensor::{DType, Dequantize, Shape};

/// Where a tensor's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// No buffer yet: the question is about the operation as such.
    Unknown,
    /// Plain memory that the CPU reads.
    Host,
    /// One of our buffers for packed weights.
    Packed,
    /// Memory of another device.
    Foreign,
}

/// One operand or result.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    /// Name for log lines.
    pub name: &'a str,
    /// Element type.
    pub dtype: DType,
    /// Dimensions and strides.
    pub shape: Shape,
    /// Where it is.
    pub place: Place,
    /// Its bytes, for an operand that is to be read.
    pub memory: Option<Region<'a>>,
    /// Offset in its packed buffer, for [`Place::Packed`].
    pub packed_offset: usize,
    /// ggml's own way to `f32`, for quantized types.
    pub dequantize: Option<&'a dyn Dequantize>,
}

/// What a node does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// A view or nothing at all.
    None,
    /// `dst[M,N] = src1[M,K] · src0[K,N]`, batched and broadcast over the outer dimensions.
    MulMat,
    /// Something that no device of ours computes.
    Other,
}

/// One operation to compute.
pub struct Node<'a> {
    /// Index in what ggml submitted, for messages.
    pub index: usize,
    /// What to do.
    pub op: Op,
    /// Result; its bytes are `out`.
    pub dst: Tensor<'a>,
    /// Where the result goes.
    pub out: RegionMut<'a>,
    /// First operand: the weights of a multiplication.
    pub src0: Tensor<'a>,
    /// Second operand: the activations of a multiplication.
    pub src1: Tensor<'a>,
}
