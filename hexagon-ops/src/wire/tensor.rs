//! Operations on tensors in ggml's own layouts: everything but the products with packed weights.

use bytemuck::{Pod, Zeroable};

/// A tensor with ggml's dimensions and strides, at any place of a buffer.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Tensor {
    /// Buffer that it is in.
    pub buffer: u32,
    /// `TYPE_*`; [`TYPE_NONE`] if there is no such tensor, and zeros in all other fields then.
    pub dtype: u32,
    /// Byte offset of the first element, a multiple of its size (of a block: of 2).
    pub offset: u64,
    /// Elements in dimensions 0 to 3.
    pub ne: [u32; 4],
    /// Bytes from one index to the next; in dimension 0 of quantized types from one block to the next.
    pub nb: [u64; 4],
}

/// [`Tensor::dtype`]: no tensor.
pub const TYPE_NONE: u32 = 0;
/// [`Tensor::dtype`]: f32.
pub const TYPE_F32: u32 = 1;
/// [`Tensor::dtype`]: IEEE half precision.
pub const TYPE_F16: u32 = 2;
/// [`Tensor::dtype`]: i32.
pub const TYPE_I32: u32 = 3;
/// [`Tensor::dtype`]: i64.
pub const TYPE_I64: u32 = 4;
/// [`Tensor::dtype`]: ggml `block_q8_0`, 34 bytes for 32 elements.
pub const TYPE_Q8_0: u32 = 5;
/// [`Tensor::dtype`]: ggml `block_q4_0`, 18 bytes for 32 elements.
pub const TYPE_Q4_0: u32 = 6;

/// Most sources of an operation.
pub const SOURCES: usize = 3;

/// `dst = kernel(src, params)`. A source may be the result's own memory with the same type, dimensions and strides; any
/// other overlap with the result is refused.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct TensorOp {
    /// `KERNEL_*`.
    pub kernel: u32,
    /// 0.
    pub reserved: u32,
    /// ggml's own parameters of the operation (`op_params`); zeros where an operation has fewer.
    pub params: [u32; 16],
    /// The result.
    pub dst: Tensor,
    /// The sources, in ggml's order.
    pub src: [Tensor; SOURCES],
}

/// `dst[·][h][i] = Σ_j softmax_j(scale · q[i][h]·k[j][h / r] + slope[h] · mask[i][j]) · v[j][h / r]` for each stream, where r is
/// the number of query heads that share a head of keys and values. As ggml's FLASH_ATTN_EXT.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Attention {
    /// Bits of the f32 factor of the scores.
    pub scale: u32,
    /// Bits of the f32 largest ALiBi bias; 0: the mask's factor is 1 for all heads.
    pub max_bias: u32,
    /// Bits of the f32 cap c of the scores, which become `c · tanh(x / c)` before the mask is added; 0: none.
    pub softcap: u32,
    /// 0.
    pub reserved: u32,
    /// The result: f32 `[Dv, heads, queries, streams]`, elements of a row without gaps.
    pub dst: Tensor,
    /// Queries: f32 `[Dk, queries, heads, streams]`.
    pub q: Tensor,
    /// Keys: f16, f32, Q8_0 or Q4_0, `[Dk, positions, heads / r, streams]`.
    pub k: Tensor,
    /// Values: types as for keys, `[Dv, positions, heads / r, streams]`; may share memory with the keys.
    pub v: Tensor,
    /// f16 or f32 `[positions, at least queries, n, m]` with n and m dividing heads and streams, or nothing. Minus infinity
    /// hides a position.
    pub mask: Tensor,
    /// f32 `[heads]`: a further score of each head, whose value is zero; or nothing.
    pub sinks: Tensor,
}

/// Declares the kernels' numbers.
macro_rules! kernels {
    ($($name:ident = $value:literal, $text:literal;)*) => {
        $(#[doc = concat!("[`TensorOp::kernel`]: ", $text, ".")]
        pub const $name: u32 = $value;)*
    };
}

kernels! {
    KERNEL_ADD = 1, "`src0 + src1`, src1 repeated";
    KERNEL_SUB = 2, "`src0 - src1`, src1 repeated";
    KERNEL_MUL = 3, "`src0 · src1`, src1 repeated";
    KERNEL_DIV = 4, "`src0 / src1`, src1 repeated";
    KERNEL_SCALE = 5, "`src0 · f32 param 0 + f32 param 1`";
    KERNEL_CLAMP = 6, "src0 between f32 params 0 and 1";
    KERNEL_SQR = 7, "the square";
    KERNEL_SQRT = 8, "the square root";
    KERNEL_SILU = 9, "`x / (1 + exp(-x))`";
    KERNEL_GELU = 10, "GELU by tanh";
    KERNEL_GELU_QUICK = 11, "`x / (1 + exp(-1.702 x))`";
    KERNEL_GELU_ERF = 12, "GELU by erf";
    KERNEL_RELU = 13, "`max(x, 0)`";
    KERNEL_SIGMOID = 14, "`1 / (1 + exp(-x))`";
    KERNEL_TANH = 15, "tanh";
    KERNEL_EXP = 16, "exp";
    KERNEL_NEG = 17, "`-x`";
    KERNEL_ABS = 18, "`|x|`";
    KERNEL_SWIGLU = 19, "`silu(a) · b`; a and b are src0 and src1, or the halves of src0, exchanged if param 1 is not 0";
    KERNEL_GEGLU = 20, "`gelu(a) · b`, see [`KERNEL_SWIGLU`]";
    KERNEL_REGLU = 21, "`relu(a) · b`, see [`KERNEL_SWIGLU`]";
    KERNEL_RMS_NORM = 22, "rows divided by the root of their mean square plus f32 param 0";
    KERNEL_NORM = 23, "rows less their mean, divided by the root of their variance plus f32 param 0";
    KERNEL_L2_NORM = 24, "rows divided by their length, at least f32 param 0";
    KERNEL_SUM_ROWS = 25, "sums of rows";
    KERNEL_SOFT_MAX = 26, "softmax of rows times f32 param 0, plus mask (src1), with sinks (src2); f32 param 1: largest ALiBi bias";
    KERNEL_ROPE = 27, "rotated pairs; src1 are positions, src2 frequency factors; params as ggml's ROPE";
    KERNEL_GET_ROWS = 28, "rows of src0 that src1 names";
    KERNEL_SET_ROWS = 29, "rows of src0 to the rows of the result that src1 names; the other rows stay";
    KERNEL_COPY = 30, "src0 in the result's type, strides and shape, element by element";
    KERNEL_CONCAT = 31, "src0 then src1 along dimension param 0";
    KERNEL_REPEAT = 32, "src0 again and again in all dimensions";
}
