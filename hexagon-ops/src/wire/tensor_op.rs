//! Operations on tensors in ggml's own layouts: all operations except products with packed weights
//! and attention.
//!
//! # Operands
//!
//! [`OPERATIONS`](super::OPERATIONS) lists the kernels. This table lists the operands that each of
//! them accepts.
//!
//! *float* is F32, F16 or BF16, computed with as f32; *readable* is float, I32 and every type of
//! blocks and super-blocks; *writable* is readable without super-blocks; *any* is every type. Types
//! of a row of this table may differ from each other except where *same* is written. `d`, `a`, `b`,
//! `c` are the dimensions of the result and the three sources; a `*` is any number. Parameters are
//! words of `params`, ggml's own `op_params` at the same places, `f` for f32 and `i` for i32; other
//! words are not read. Only i13 to i15 of IM2COL are not ggml's.
//!
//! | kernel | result | src0 | src1, src2 | shapes | parameters |
//! |---|---|---|---|---|---|
//! | functions of one element | float | float | | a = d | f0 to f4, see there |
//! | ADD SUB MUL DIV | float | float | float | a = d, b divides d in each dimension | |
//! | gated units: SWIGLU to SWIGLU_CLAMP | float | float | float or none | a = b = d, or a = (2 d0 or 2 d0 + 1, d1, d2, d3) | i1 swapped; f2 alpha (SWIGLU_OAI); f3 limit (SWIGLU_OAI, SWIGLU_CLAMP) |
//! | RMS_NORM NORM L2_NORM, then MUL, then ADD | float | float | MUL: float or none; ADD: float or none | a = d, b and c divide d in each dimension | f0 eps |
//! | SUM_ROWS MEAN | float | float | | d = (1, a1, a2, a3) | |
//! | SUM | float | float | | d = (1, 1, 1, 1) | |
//! | CUMSUM | float | float | | a = d | |
//! | SOFT_MAX | F32 | float | mask: float or none; sinks: F32 or none | a = d; b0 = d0, b1 ≥ d1, b2 and b3 divide d2 and d3; c0 = d2 | f0 scale, f1 max_bias |
//! | ROPE ROPE_BACK | float | float | positions: I32 or I64; factors: float or none | a = d; b0 ≥ d2 (modes 8, 24, 40: 4 d2); c0 ≥ pairs | i1 n_dims, i2 mode (0, 2, 8, 24, 40), i4 n_ctx_orig, f5–f10, i11–i14 sections, i15 offset |
//! | ROPE_SET_ROWS | float | float | positions as for ROPE; numbers: I32 or I64 | a0 = d0, a1 = d1, a3 = d3 = 1, c = (a2, 1, 1, 1) | as for ROPE |
//! | GET_ROWS | writable, or same as src0 | readable or any | numbers: I32 or I64 | d = (a0, b0, b1, b2), a2 = d2, a3 = d3, b3 = 1 | |
//! | SET_ROWS | writable | float | numbers: I32 or I64 | a0 = d0, a2 = d2, a3 = d3, b0 = a1, b1 and b2 divide a2 and a3, b3 = 1 | |
//! | COPY | writable, or same as src0 | readable or any | | as many elements, in ggml's order | |
//! | CONCAT | writable, or same | readable or any | readable or any | a + b = d in dimension i0, a = b = d in the others | i0 dimension |
//! | REPEAT | writable, or same as src0 | readable or any | | a divides d in each dimension | |
//! | SSM_CONV | F32 | F32 | F32 | d = (a1, a0 - b0 + 1, a2, 1), b = (*, a1, 1, 1), a3 = 1 | |
//! | ADD_ID | float | float | float; numbers: I32 or I64 | a = d, b = (d0, *, 1, 1), c = (d1, d2, 1, 1) | |
//! | ARGSORT | I32, rows without gaps | F32 | | d0 ≤ a0, the others the same | i0 order |
//! | MUL_MAT_UNPACKED | F32 | float or type of blocks | float | a0 = b0, d = (a1, b1, b2, b3), a2 and a3 divide b2 and b3 | |
//! | OUT_PROD | F32 | float or blocks | float | a1 = b1, d = (a0, b0, b2, b3), a2 and a3 divide b2 and b3 | |
//! | TIMESTEP_EMBEDDING | float | F32 | | d = (*, a0, 1, 1), a = (*, 1, 1, 1) | i1 period, at least 1 |
//! | COUNT_EQUAL | I64 | I32 | I32 | a = b, d = (1, 1, 1, 1) | |
//! | ACC | F32 without gaps | same as the result | F32 | a = d, b is in d | i0–i2 strides and i3 offset of the part, bytes |
//! | SET | F32 or I32 without gaps | same as the result | same | as ACC | as ACC |
//! | PAD | any without blocks, same as src0 | any without blocks | | d ≥ a + front, unless circular | i0, i2, i4, i6 front, i8 circular |
//! | ROLL | as PAD | as PAD | | | i0–i3 |
//! | DIAG_MASK_INF | float | float | | a = d | i0 n_past |
//! | TRI | float | float | | a = d | i0 type |
//! | DIAG | float | float | | d = (a0, a0, a2, a3), a1 = 1 | |
//! | FILL | float | none | | | f0 first value, f2 step |
//! | IM2COL | float | F32: ggml's src1 | | i6 = 1: d = (a2 KH KW, *, *, a3), KD = 1; i6 = 0: d = (a1 KW, *, a2, 1), KH = KD = 1 | i0–i6; i13–i15 KW, KH, KD |
//! | IM2COL_3D | float | F32: ggml's src1 | | d = (IC KD KH KW, *, *, * N), a3 = IC N | i0–i9; i13–i15 KW, KH, KD |
//! | POOL_1D | float | F32 | | d = (*, a1, a2, a3) | i0–i3 |
//! | POOL_2D | float | F32 | | d = (*, *, a2, a3) | i0–i6 |
//!
//! ROPE rotates at most 512 elements of a row: n_dims + offset ≤ d0, mode 24: 2 n_dims = d0 at
//! most. Where a type has blocks, rows of all operands of COPY, CONCAT and REPEAT are whole blocks.
//! A window of POOL has at most as many elements as a plane of its source, or
//! [`WINDOW_TAPS`](super::WINDOW_TAPS).
//!
//! Some operations of ggml use another operation's kernel: TOP_K is ARGSORT in descending order
//! with k elements in the result's rows, ARGMAX the same with one; ADD1 is ADD; GROUP_NORM is NORM
//! of a reshaped tensor; ARANGE is FILL; DUP, CPY and CONT are COPY. A type that is not listed
//! below is copied as rows of I8.
//!
//! # Strides
//!
//! Sources have any strides, zero included (not for SUM and POOL). Rows of results are disjoint,
//! and none is inside another one; elements of a row may have gaps. Only for COPY between equal
//! shapes without blocks may dimension 0 have a larger stride than the others. src0 may be the
//! result itself for functions of elements, gated units, the norms, SOFT_MAX, ROPE, ROPE_BACK,
//! COPY, REPEAT, CUMSUM, ADD_ID, DIAG_MASK_INF and TRI; src1 may be for ADD, SUB, MUL, DIV,
//! SOFT_MAX and gated units.

use bytemuck::{Pod, Zeroable};

/// A tensor with ggml's dimensions and strides, at any place of a buffer.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Tensor {
    /// Buffer that it is in.
    pub buffer: u32,
    /// `TYPE_*`; [`TYPE_NONE`] if the tensor is absent; then all other fields are zero.
    pub dtype: u32,
    /// Byte offset of the first element, a multiple of its size (of a block: of 2, of
    /// [`TYPE_MXFP4`]'s: of 1).
    pub offset: u64,
    /// Elements in dimensions 0 to 3, each below 2^31.
    pub ne: [u32; 4],
    /// Bytes from one index to the next; in dimension 0 of quantized types from one block to the
    /// next.
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
/// [`Tensor::dtype`]: ggml `block_q2_K`, 84 bytes for 256 elements.
pub const TYPE_Q2_K: u32 = 15;
/// [`Tensor::dtype`]: ggml `block_q3_K`, 110 bytes for 256 elements.
pub const TYPE_Q3_K: u32 = 16;
/// [`Tensor::dtype`]: ggml `block_q4_K`, 144 bytes for 256 elements.
pub const TYPE_Q4_K: u32 = 17;
/// [`Tensor::dtype`]: ggml `block_q5_K`, 176 bytes for 256 elements.
pub const TYPE_Q5_K: u32 = 18;
/// [`Tensor::dtype`]: ggml `block_q6_K`, 210 bytes for 256 elements.
pub const TYPE_Q6_K: u32 = 19;
/// [`Tensor::dtype`]: ggml `block_iq4_xs`, 136 bytes for 256 elements.
pub const TYPE_IQ4_XS: u32 = 20;

/// Most sources of an operation.
pub const SOURCES: usize = 3;

/// `dst = kernel(src, params)`. A source may be the result's own memory with the same type,
/// dimensions and strides; any other overlap with the result is refused.
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

/// `dst[·][h][i] = Σ_j softmax_j(scale · q[i][h]·k[j][h / r] + slope[h] · mask[i][j]) · v[j][h /
/// r]` for each stream, where r is the number of query heads that share a head of keys and values.
/// As ggml's FLASH_ATTN_EXT.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Attention {
    /// Bits of the f32 factor of the scores.
    pub scale: u32,
    /// Bits of the f32 largest ALiBi bias; 0: the mask's factor is 1 for all heads.
    pub max_bias: u32,
    /// Bits of the f32 cap c of the scores, which become `c · tanh(x / c)` before the mask is
    /// added; 0: none.
    pub softcap: u32,
    /// 0.
    pub reserved: u32,
    /// The result: f32 `[Dv, heads, queries, streams]`, elements of a row without gaps.
    pub dst: Tensor,
    /// Queries: f32 `[Dk, queries, heads, streams]`.
    pub q: Tensor,
    /// Keys: float or a type of blocks of 32 (all but f32 are fast), `[Dk, positions, heads / r,
    /// streams]`.
    pub k: Tensor,
    /// Values: types as for keys, `[Dv, positions, heads / r, streams]`; may share memory with the
    /// keys.
    pub v: Tensor,
    /// Float `[positions, at least queries, n, m]` with n and m dividing heads and streams, or
    /// nothing. Minus infinity hides a position.
    pub mask: Tensor,
    /// f32 `[heads]`: a further score of each head, whose value is zero; or nothing.
    pub sinks: Tensor,
}
