//! An operation as ggml handed it over: metadata copied, memory borrowed for one call. No planning,
//! no device.

pub use hexagon_ops::wire::GgmlOp as Op;

use std::ops::Range;

use crate::host_memory::Region;
use crate::tensor::{DType, Dequantize, Format, Shape};

/// Location of a tensor's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// No buffer yet: the question is about the operation as such.
    Unknown,
    /// Plain memory that the CPU reads.
    Host,
    /// One of our buffers for packed weights.
    Packed,
    /// Memory that we share with the CPU, in ggml's layout; or a result that will be there.
    Device,
    /// Memory of another device.
    Foreign,
}

/// Use of a tensor's memory, or of the memory of the tensor that it is a view of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The result of an operation.
    Result,
    /// Weights: the CPU may write them in place when it loads them.
    Weights,
    /// Memory that outlives a graph or comes from outside of it: caches, inputs.
    State,
}

/// One operand or result.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    /// Name for log lines.
    pub name: &'a str,
    /// Element type.
    pub dtype: DType,
    /// The quantized type, if devices have a layout for it.
    pub format: Option<Format>,
    /// Dimensions and strides.
    pub shape: Shape,
    /// Location of its bytes.
    pub place: Place,
    /// Use of its memory.
    pub role: Role,
    /// The bytes of the tensor, for an operand that is to be read.
    pub memory: Option<Region<'a>>,
    /// Offset in its packed buffer, for [`Place::Packed`].
    pub packed_offset: usize,
    /// ggml's own dequantizer, for quantized types.
    pub dequantize: Option<&'a dyn Dequantize>,
}

impl Tensor<'_> {
    /// Returns the bytes of its buffer from its first to its last.
    #[must_use]
    pub fn span(&self) -> Range<usize> {
        let bytes = self.shape.span_bytes(self.dtype).unwrap_or(0);
        self.packed_offset..self.packed_offset + bytes
    }
}

/// Most operands of an operation: SSM_SCAN has states, inputs, steps, decays, two projections and
/// numbers.
pub const MAX_SOURCES: usize = 7;
/// 32-bit words of parameters.
pub const PARAMS: usize = 16;

/// The operands, in ggml's order; some operations have gaps.
pub type Sources<'a> = [Option<Tensor<'a>>; MAX_SOURCES];

/// Returns the operands `tensors`, and no more.
///
/// # Panics
/// If there are more than [`MAX_SOURCES`].
#[must_use]
pub fn sources<'a>(tensors: &[Tensor<'a>]) -> Sources<'a> {
    let mut sources = [None; MAX_SOURCES];
    for (source, tensor) in sources[..tensors.len()].iter_mut().zip(tensors) {
        *source = Some(*tensor);
    }
    sources
}

/// An operation with its operands: all that planning looks at.
#[derive(Clone, Copy)]
pub struct Operation<'a> {
    /// The operation to compute.
    pub op: Op,
    /// ggml's parameters of the operation.
    pub params: [i32; PARAMS],
    /// The result.
    pub dst: Tensor<'a>,
    /// Operands.
    pub src: Sources<'a>,
}

/// Fewest rows of either factor for which exchanging the factors of a product is faster, and fewest
/// elements of a row.
const FEWEST_TURNED: usize = 32;

impl<'a> Operation<'a> {
    /// Returns the product with its factors in the other order, as weights times rows, if the
    /// second factor is weights in F16 and the first was computed: a convolution multiplies the
    /// rows of IM2COL with its kernel. The result's rows are the columns of this one's, one after
    /// another in F32, and have no memory yet.
    #[must_use]
    pub fn turned(&self) -> Option<Self> {
        let (Op::MulMat, [Some(rows), Some(kernel), ..]) = (self.op, &self.src) else {
            return None;
        };
        let ([k, n, ..], [_, m, ..]) = (rows.shape.ne, kernel.shape.ne);
        let is_matrix = |tensor: &Tensor| tensor.shape.ne[2..] == [1, 1];
        let halves = |tensor: &Tensor| tensor.dtype == DType::F16 && tensor.shape.nb[0] == 2;
        let is_turned = rows.role == Role::Result
            && kernel.role == Role::Weights
            && [rows, kernel].iter().all(|it| is_matrix(it) && halves(it))
            && [k, n, m].iter().all(|size| *size >= FEWEST_TURNED);
        let ne = [m, n, 1, 1];
        is_turned.then(|| Self {
            dst: Tensor {
                shape: Shape {
                    ne,
                    nb: [4, 4 * m, 4 * m * n, 4 * m * n],
                },
                memory: None,
                ..self.dst
            },
            src: sources(&[*kernel, *rows]),
            ..*self
        })
    }
}

impl Operation<'_> {
    /// Returns `true` if no element is computed: the result has none, or no rows are set in it.
    #[must_use]
    pub fn computes_nothing(&self) -> bool {
        let is_empty = |tensor: &Tensor| tensor.shape.ne.contains(&0);
        let sets_none = self.op == Op::SetRows && self.src[0].as_ref().is_some_and(is_empty);
        sets_none || is_empty(&self.dst)
    }
}

/// Reason why a node is left to the CPU, for traces and for errors about a broken promise.
pub type Refusal = &'static str;
