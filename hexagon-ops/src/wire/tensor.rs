//! Operations on tensors in ggml's own layouts: everything but the products with packed weights.
//!
//! # Kernels
//!
//! *float* is F32, F16 or BF16, computed with as f32; *readable* is float, I32 and every type of blocks; *writable* is that
//! without MXFP4; *any* is every type. Types of a row of this table may differ from each other unless it says *same*.
//! `d`, `a`,
//! `b`, `c` are the dimensions of the result and the three sources; a `*` is any number. Parameters are words of `params`,
//! ggml's own `op_params` at the same places, `f` for f32 and `i` for i32; what is not listed is not read. Only i13
//! to i15 of
//! IM2COL are not ggml's.
//!
//! | number | kernel | result | src0 | src1, src2 | shapes | parameters |
//! |---|---|---|---|---|---|---|
//! | 1–4 | ADD SUB MUL DIV | float | float | float | a = d, b divides d in each dimension | |
//! | 5 | SCALE | float | float | | a = d | f0 factor, f1 bias |
//! | 6 | CLAMP | float | float | | a = d | f0 low, f1 high |
//! | 7–18, 34–44, 46–48 | unary functions | float | float | | a = d | |
//! | 45 | XIELU | float | float | | a = d | f1 alpha_n, f2 alpha_p, f3 beta, f4 eps |
//! | 49 | LEAKY_RELU | float | float | | a = d | f0 slope |
//! | 19–21, 50, 51 | SWIGLU GEGLU REGLU GEGLU_ERF GEGLU_QUICK | float | float | float or none | a = b = d, or a = (2 d0, d1, d2, d3) | i1 swapped |
//! | 52 | SWIGLU_OAI | float | float | float or none | as above | i1 swapped, f2 alpha, f3 limit |
//! | 53 | SWIGLU_CLAMP | float | float | float or none | as above | i1 swapped, f3 limit |
//! | 22–24 | RMS_NORM NORM L2_NORM, then MUL, then ADD | float | float | MUL: float or none; ADD: float or none | a = d, b and c divide d in each dimension | f0 eps |
//! | 25, 54 | SUM_ROWS MEAN | float | float | | d = (1, a1, a2, a3) | |
//! | 55 | SUM | float | float | | d = (1, 1, 1, 1) | |
//! | 56 | CUMSUM | float | float | | a = d | |
//! | 26 | SOFT_MAX | F32 | float | mask: float or none; sinks: F32 or none | a = d; b0 = d0, b1 ≥ d1, b2 and b3 divide d2 and d3; c0 = d2 | f0 scale, f1 max_bias |
//! | 27, 33 | ROPE ROPE_BACK | float | float | positions: I32 or I64; factors: float or none | a = d; b0 ≥ d2 (modes 8, 24, 40: 4 d2); c0 ≥ pairs | i1 n_dims, i2 mode (0, 2, 8, 24, 40), i4 n_ctx_orig, f5–f10, i11–i14 sections, i15 offset |
//! | 71 | ROPE, then SET_ROWS | float | float | positions as for ROPE; numbers: I32 or I64 | a0 = d0, a1 = d1, a3 = d3 = 1, c = (a2, 1, 1, 1) | as for ROPE |
//! | 28 | GET_ROWS | writable, or same as src0 | readable or any | numbers: I32 or I64 | d = (a0, b0, b1, b2), a2 = d2, a3 = d3, b3 = 1 | |
//! | 29 | SET_ROWS | writable | float | numbers: I32 or I64 | a0 = d0, a2 = d2, a3 = d3, b0 = a1, b1 and b2 divide a2 and a3, b3 = 1 | |
//! | 30 | COPY | writable, or same as src0 | readable or any | | as many elements, in ggml's order | |
//! | 31 | CONCAT | writable, or same | readable or any | readable or any | a + b = d in dimension i0, a = b = d in the others | i0 dimension |
//! | 32 | REPEAT | writable, or same as src0 | readable or any | | a divides d in each dimension | |
//! | 57 | SSM_CONV | F32 | F32 | F32 | d = (a1, a0 - b0 + 1, a2, 1), b = (*, a1, 1, 1), a3 = 1 | |
//! | 58 | ADD_ID | float | float | float; numbers: I32 or I64 | a = d, b = (d0, *, 1, 1), c = (d1, d2, 1, 1) | |
//! | 59 | ARGSORT | I32, rows without gaps | F32 | | d0 ≤ a0, the others the same | i0 order |
//! | 60 | MUL_MAT | F32 | float or type of blocks | float | a0 = b0, d = (a1, b1, b2, b3), a2 and a3 divide b2 and b3 | |
//! | 61 | PAD | any without blocks, same as src0 | any without blocks | | d ≥ a + front, unless circular | i0, i2, i4, i6 front, i8 circular |
//! | 62 | ROLL | as PAD | as PAD | | | i0–i3 |
//! | 63 | DIAG_MASK_INF | float | float | | a = d | i0 n_past |
//! | 64 | TRI | float | float | | a = d | i0 type |
//! | 65 | DIAG | float | float | | d = (a0, a0, a2, a3), a1 = 1 | |
//! | 66 | FILL | float | none | | | f0 first value, f2 step |
//! | 67 | IM2COL | float | F32: ggml's src1 | | i6 = 1: d = (a2 KH KW, *, *, a3), KD = 1; i6 = 0: d = (a1 KW, *, a2, 1), KH = KD = 1 | i0–i6; i13–i15 KW, KH, KD |
//! | 68 | IM2COL_3D | float | F32: ggml's src1 | | d = (IC KD KH KW, *, *, * N), a3 = IC N | i0–i9; i13–i15 KW, KH, KD |
//! | 69 | POOL_1D | float | F32 | | d = (*, a1, a2, a3) | i0–i3 |
//! | 70 | POOL_2D | float | F32 | | d = (*, *, a2, a3) | i0–i6 |
//!
//! ROPE rotates at most 512 elements of a row: n_dims + offset ≤ d0, mode 24: 2 n_dims = d0 at most. Where a type has
//! blocks,
//! rows of all operands of COPY, CONCAT and REPEAT are whole blocks.
//!
//! What has no kernel of its own: TOP_K is ARGSORT in descending order with k elements in the result's rows, ARGMAX
//! the same
//! with one; ADD1 is ADD; ACC and SET are a COPY of src0, then ADD (in place) or COPY on the part of the result that their
//! parameters name; GROUP_NORM is NORM of a reshaped tensor; ARANGE is FILL; DUP, CPY and CONT are COPY. A type that is not
//! listed below is copied as rows of I8.
//!
//! # Strides
//!
//! Sources have any strides, zero included (not for SUM). Rows of results are disjoint, and none lies inside another
//! one; elements of a row
//! may have gaps. Only for COPY between equal shapes without blocks may dimension 0 have a larger stride than the others. A
//! source of 1–24, 26, 27, 30, 32–53, 56, 58, 63 and 64 may be the result itself: src0, for 1–4, 26 and gated units
//! src1 as well.

use bytemuck::{Pod, Zeroable};

/// A tensor with ggml's dimensions and strides, at any place of a buffer.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Tensor {
    /// Buffer that it is in.
    pub buffer: u32,
    /// `TYPE_*`; [`TYPE_NONE`] if there is no such tensor, and zeros in all other fields then.
    pub dtype: u32,
    /// Byte offset of the first element, a multiple of its size (of a block: of 2, of [`TYPE_MXFP4`]'s: of 1).
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

/// [`Tensor::dtype`]: the upper half of an f32.
pub const TYPE_BF16: u32 = 7;
/// [`Tensor::dtype`]: i16, which is moved and not computed with.
pub const TYPE_I16: u32 = 8;
/// [`Tensor::dtype`]: i8, which is moved and not computed with.
pub const TYPE_I8: u32 = 9;
/// [`Tensor::dtype`]: ggml `block_q4_1`, 20 bytes for 32 elements.
pub const TYPE_Q4_1: u32 = 10;
/// [`Tensor::dtype`]: ggml `block_q5_0`, 22 bytes for 32 elements.
pub const TYPE_Q5_0: u32 = 11;
/// [`Tensor::dtype`]: ggml `block_q5_1`, 24 bytes for 32 elements.
pub const TYPE_Q5_1: u32 = 12;
/// [`Tensor::dtype`]: ggml `block_iq4_nl`, 18 bytes for 32 elements.
pub const TYPE_IQ4_NL: u32 = 13;
/// [`Tensor::dtype`]: ggml `block_mxfp4`, 17 bytes for 32 elements.
pub const TYPE_MXFP4: u32 = 14;

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
    /// Keys: float or a type of blocks (f16, Q8_0 and Q4_0 are fast), `[Dk, positions, heads / r, streams]`.
    pub k: Tensor,
    /// Values: types as for keys, `[Dv, positions, heads / r, streams]`; may share memory with the keys.
    pub v: Tensor,
    /// Float `[positions, at least queries, n, m]` with n and m dividing heads and streams, or nothing. Minus infinity
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
    KERNEL_RMS_NORM = 22, "rows divided by the root of their mean square plus f32 param 0; times src1 and plus src2, repeated, if there are";
    KERNEL_NORM = 23, "rows less their mean, divided by the root of their variance plus f32 param 0; see [`KERNEL_RMS_NORM`]";
    KERNEL_L2_NORM = 24, "rows divided by their length, at least f32 param 0; see [`KERNEL_RMS_NORM`]";
    KERNEL_SUM_ROWS = 25, "sums of rows";
    KERNEL_SOFT_MAX = 26, "softmax of rows times f32 param 0, plus mask (src1), with sinks (src2); f32 param 1: largest ALiBi bias";
    KERNEL_ROPE = 27, "rotated pairs; src1 are positions, src2 frequency factors; params as ggml's ROPE";
    KERNEL_GET_ROWS = 28, "rows of src0 that src1 names";
    KERNEL_SET_ROWS = 29, "rows of src0 to the rows of the result that src1 names; the other rows stay";
    KERNEL_COPY = 30, "src0 in the result's type, strides and shape, element by element";
    KERNEL_CONCAT = 31, "src0 then src1 along dimension param 0";
    KERNEL_REPEAT = 32, "src0 again and again in all dimensions";
    KERNEL_ROPE_BACK = 33, "[`KERNEL_ROPE`] with the opposite angles";
    KERNEL_SOFTPLUS = 34, "`ln(1 + exp(x))`";
    KERNEL_HARDSWISH = 35, "`x · hardsigmoid(x)`";
    KERNEL_HARDSIGMOID = 36, "`(x + 3) / 6` between 0 and 1";
    KERNEL_ELU = 37, "`x`, below 0 `exp(x) - 1`";
    KERNEL_STEP = 38, "1 above 0, else 0";
    KERNEL_SGN = 39, "-1, 0 or 1";
    KERNEL_EXPM1 = 40, "`exp(x) - 1`";
    KERNEL_FLOOR = 41, "the largest whole number that is not larger";
    KERNEL_CEIL = 42, "the smallest whole number that is not smaller";
    KERNEL_ROUND = 43, "the nearest whole number, halves away from zero";
    KERNEL_TRUNC = 44, "the whole number towards zero";
    KERNEL_XIELU = 45, "xIELU; f32 params 1 to 4: alpha_n, alpha_p, beta, eps";
    KERNEL_LOG = 46, "natural logarithm";
    KERNEL_SIN = 47, "sine";
    KERNEL_COS = 48, "cosine";
    KERNEL_LEAKY_RELU = 49, "`x`, below 0 times f32 param 0";
    KERNEL_GEGLU_ERF = 50, "`gelu_erf(a) · b`, see [`KERNEL_SWIGLU`]";
    KERNEL_GEGLU_QUICK = 51, "`gelu_quick(a) · b`, see [`KERNEL_SWIGLU`]";
    KERNEL_SWIGLU_OAI = 52, "`x / (1 + exp(-α x)) · (y + 1)`, x = a up to the limit, y = b within it; f32 params 2 and 3: α, limit";
    KERNEL_SWIGLU_CLAMP = 53, "`silu(x) · y`, x = a up to the limit, y = b within it; f32 param 3: limit";
    KERNEL_MEAN = 54, "means of rows";
    KERNEL_SUM = 55, "the sum of all elements";
    KERNEL_CUMSUM = 56, "sums along rows";
    KERNEL_SSM_CONV = 57, "windows of src0's rows times src1's rows: ggml's SSM_CONV";
    KERNEL_ADD_ID = 58, "`src0 + ` the rows of src1 that src2 names";
    KERNEL_ARGSORT = 59, "numbers of src0's elements in ascending (param 0: 0) or descending (1) order, as many as the result has";
    KERNEL_MUL_MAT = 60, "rows of src0 times rows of src1, planes of src0 repeated: ggml's MUL_MAT";
    KERNEL_PAD = 61, "src0 behind params 0, 2, 4 and 6 zeros in each dimension; repeated instead, if param 8 is not 0";
    KERNEL_ROLL = 62, "src0 moved on by i32 params 0 to 3 in each dimension, round";
    KERNEL_DIAG_MASK_INF = 63, "src0, minus infinity behind column param 0 + row";
    KERNEL_TRI = 64, "a triangle of src0, zeros beside it; param 0 as ggml's `ggml_tri_type`";
    KERNEL_DIAG = 65, "src0's rows as diagonals";
    KERNEL_FILL = 66, "f32 param 0 + index · f32 param 2; no source: ggml's FILL and ARANGE";
    KERNEL_IM2COL = 67, "windows of src0, ggml's src1, as rows: its IM2COL; params 13 to 15: width, height and depth of the window";
    KERNEL_IM2COL_3D = 68, "the same for its IM2COL_3D";
    KERNEL_POOL_1D = 69, "the largest (param 0: 0) or the mean (1) of windows of src0's rows: ggml's POOL_1D";
    KERNEL_POOL_2D = 70, "the same of windows of its planes: ggml's POOL_2D";
    KERNEL_ROPE_SET_ROWS = 71, "[`KERNEL_ROPE`] without factors, rows of all heads to the indices of dimension 2 that src2 names; the others stay";
}
