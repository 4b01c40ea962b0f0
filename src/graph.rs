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
    /// Memory that we share with the CPU, in ggml's layout; or a result that will be there.
    Device,
    /// Memory of another device.
    Foreign,
}

/// What a tensor's memory is for, or that of the tensor that it is a view of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The result of an operation.
    Result,
    /// Weights: the CPU may write them in place when it loads them.
    Weights,
    /// What outlives a graph or comes from outside of it: caches, inputs.
    State,
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
    /// What it is for.
    pub role: Role,
    /// Its bytes, for an operand that is to be read.
    pub memory: Option<Region<'a>>,
    /// Offset in its packed buffer, for [`Place::Packed`].
    pub packed_offset: usize,
    /// ggml's own way to `f32`, for quantized types.
    pub dequantize: Option<&'a dyn Dequantize>,
}

/// Declares the operations with ggml's names.
macro_rules! ops {
    ($($op:ident = $name:literal,)*) => {
        /// What a node does: ggml's operations, those of GGML_OP_UNARY and GGML_OP_GLU one by one.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Op {
            $(#[doc = concat!("ggml's ", $name, ".")] $op,)*
        }

        impl Op {
            /// ggml's name.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$op => $name,)*
                }
            }

            /// The operation of that name, if it is one of these.
            #[must_use]
            pub fn from_name(name: &[u8]) -> Option<Self> {
                // Compiled to a search by length and content.
                match std::str::from_utf8(name).ok()? {
                    $($name => Some(Self::$op),)*
                    _ => None,
                }
            }
        }
    };
}

ops! {
    MulMat = "MUL_MAT",
    MulMatId = "MUL_MAT_ID",
    Add = "ADD",
    Sub = "SUB",
    Mul = "MUL",
    Div = "DIV",
    Scale = "SCALE",
    Clamp = "CLAMP",
    Sqr = "SQR",
    Sqrt = "SQRT",
    SumRows = "SUM_ROWS",
    Silu = "SILU",
    Gelu = "GELU",
    GeluQuick = "GELU_QUICK",
    GeluErf = "GELU_ERF",
    Relu = "RELU",
    Sigmoid = "SIGMOID",
    Tanh = "TANH",
    Exp = "EXP",
    Neg = "NEG",
    Abs = "ABS",
    Swiglu = "SWIGLU",
    Geglu = "GEGLU",
    Reglu = "REGLU",
    RmsNorm = "RMS_NORM",
    Norm = "NORM",
    L2Norm = "L2_NORM",
    SoftMax = "SOFT_MAX",
    Rope = "ROPE",
    GetRows = "GET_ROWS",
    SetRows = "SET_ROWS",
    Cpy = "CPY",
    Cont = "CONT",
    Dup = "DUP",
    Concat = "CONCAT",
    Repeat = "REPEAT",
    Softplus = "SOFTPLUS",
    Hardswish = "HARDSWISH",
    Hardsigmoid = "HARDSIGMOID",
    Elu = "ELU",
    Step = "STEP",
    Sgn = "SGN",
    Expm1 = "EXPM1",
    Floor = "FLOOR",
    Ceil = "CEIL",
    Round = "ROUND",
    Trunc = "TRUNC",
    Xielu = "XIELU",
    Log = "LOG",
    Sin = "SIN",
    Cos = "COS",
    LeakyRelu = "LEAKY_RELU",
    GegluErf = "GEGLU_ERF",
    GegluQuick = "GEGLU_QUICK",
    SwigluOai = "SWIGLU_OAI",
    SwigluClamp = "SWIGLU_CLAMP",
    Mean = "MEAN",
    Sum = "SUM",
    Cumsum = "CUMSUM",
    SsmConv = "SSM_CONV",
    AddId = "ADD_ID",
    Argsort = "ARGSORT",
    Pad = "PAD",
    Roll = "ROLL",
    DiagMaskInf = "DIAG_MASK_INF",
    Tri = "TRI",
    Diag = "DIAG",
    RopeBack = "ROPE_BACK",
    Add1 = "ADD1",
    TopK = "TOP_K",
    Fill = "FILL",
    Arange = "ARANGE",
    Im2col = "IM2COL",
    Im2col3d = "IM2COL_3D",
    Pool1d = "POOL_1D",
    Pool2d = "POOL_2D",
    FlashAttnExt = "FLASH_ATTN_EXT",
}

/// Most operands of an operation: attention has queries, keys, values, a mask and sinks.
pub const MAX_SOURCES: usize = 5;
/// 32-bit words of parameters.
pub const PARAMS: usize = 16;

/// The operands, in ggml's order; some operations have gaps.
pub type Sources<'a> = [Option<Tensor<'a>>; MAX_SOURCES];

/// The operands `tensors`, and no more.
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
    /// What to do.
    pub op: Op,
    /// ggml's parameters of the operation.
    pub params: [i32; PARAMS],
    /// The result.
    pub dst: Tensor<'a>,
    /// Operands.
    pub src: Sources<'a>,
}

/// An operation that is to be computed.
pub struct Node<'a> {
    /// The operation; its operands have memory.
    pub operation: Operation<'a>,
    /// Where the result goes.
    pub out: RegionMut<'a>,
    /// Whether nothing but the next node reads the result, perhaps in another shape.
    pub feeds_next: bool,
}
