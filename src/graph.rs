//! The graph as ggml handed it over: metadata copied, memory borrowed for one call. No planning, no device.

use crate::shm::{Region, RegionMut};
use crate::tensor::{DType, Dequantize, Format, Shape};

/// Where a tensor's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// No buffer yet: the question is about the operation as such.
    Unknown,
    /// Plain memory that the CPU reads.
    Host,
    /// One of our buffers for packed weights.
    Packed,
    /// One of our buffers, in ggml's layout.
    Device,
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
    /// Which quantized type, if devices know it.
    pub format: Option<Format>,
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
    /// `dst[M,N] = src1[M,K] · src0[K,N]`, batched and broadcast over the outer dimensions.
    MulMat,
    /// As `MulMat`, with the slice of src0 (the expert) chosen for each row of src1 by the indices in src2.
    MulMatId,
}

impl Op {
    /// ggml's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::MulMat => "MUL_MAT",
            Self::MulMatId => "MUL_MAT_ID",
        }
    }

    /// How many operands it has.
    #[must_use]
    pub fn sources(self) -> usize {
        match self {
            Self::MulMat => 2,
            Self::MulMatId => 3,
        }
    }
}

/// Most operands of an operation.
pub const MAX_SOURCES: usize = 3;

/// One operation to compute.
pub struct Node<'a> {
    /// What to do.
    pub op: Op,
    /// Result; its bytes are `out`.
    pub dst: Tensor<'a>,
    /// Where the result goes.
    pub out: RegionMut<'a>,
    /// Operands; those behind the ones that the operation has are not looked at.
    pub src: [Tensor<'a>; MAX_SOURCES],
}

impl<'a> Node<'a> {
    /// The operands: weights, activations, and the choice of experts if the operation has one.
    #[must_use]
    pub fn sources(&self) -> &[Tensor<'a>] {
        &self.src[..self.op.sources()]
    }

    /// Operands, result, and where it goes.
    #[must_use]
    pub fn parts(&mut self) -> (&[Tensor<'a>], &Tensor<'a>, &mut RegionMut<'a>) {
        (&self.src[..self.op.sources()], &self.dst, &mut self.out)
    }
}
