//! From the number of a kernel on tensors, and its parameters, to the operation.

use super::detail::{Failure, KERNEL_NUMBER, OPERAND};
use crate::ops::Op;
use crate::ops::elementwise::{Binary, Glu, Unary};
use crate::ops::im2col::{Im2col, Image};
use crate::ops::place::{Band, Pad};
use crate::ops::pool::Pool;
use crate::ops::rows::{Norm, Order, Rope, RopePairs, SectionOrder, Sections, SoftMax};
use crate::wire;

/// The operation that a command names, with its parameters.
pub(super) fn op(body: &wire::TensorOp) -> Result<Op, Failure> {
    let float = |i: usize| f32::from_bits(body.params[i]);
    let swapped = body.params[1] != 0;
    Ok(match body.kernel {
        wire::KERNEL_ADD => Op::Binary(Binary::Add),
        wire::KERNEL_SUB => Op::Binary(Binary::Sub),
        wire::KERNEL_MUL => Op::Binary(Binary::Mul),
        wire::KERNEL_DIV => Op::Binary(Binary::Div),
        wire::KERNEL_SCALE => Op::Unary(Unary::Scale {
            factor: float(0),
            bias: float(1),
        }),
        wire::KERNEL_CLAMP => Op::Unary(Unary::Clamp {
            low: float(0),
            high: float(1),
        }),
        wire::KERNEL_SQR => Op::Unary(Unary::Sqr),
        wire::KERNEL_SQRT => Op::Unary(Unary::Sqrt),
        wire::KERNEL_SILU => Op::Unary(Unary::Silu),
        wire::KERNEL_GELU => Op::Unary(Unary::Gelu),
        wire::KERNEL_GELU_QUICK => Op::Unary(Unary::GeluQuick),
        wire::KERNEL_GELU_ERF => Op::Unary(Unary::GeluErf),
        wire::KERNEL_RELU => Op::Unary(Unary::Relu),
        wire::KERNEL_SIGMOID => Op::Unary(Unary::Sigmoid),
        wire::KERNEL_TANH => Op::Unary(Unary::Tanh),
        wire::KERNEL_EXP => Op::Unary(Unary::Exp),
        wire::KERNEL_NEG => Op::Unary(Unary::Neg),
        wire::KERNEL_ABS => Op::Unary(Unary::Abs),
        wire::KERNEL_SOFTPLUS => Op::Unary(Unary::Softplus),
        wire::KERNEL_HARDSWISH => Op::Unary(Unary::Hardswish),
        wire::KERNEL_HARDSIGMOID => Op::Unary(Unary::Hardsigmoid),
        wire::KERNEL_ELU => Op::Unary(Unary::Elu),
        wire::KERNEL_STEP => Op::Unary(Unary::Step),
        wire::KERNEL_SGN => Op::Unary(Unary::Sgn),
        wire::KERNEL_EXPM1 => Op::Unary(Unary::Expm1),
        wire::KERNEL_FLOOR => Op::Unary(Unary::Floor),
        wire::KERNEL_CEIL => Op::Unary(Unary::Ceil),
        wire::KERNEL_ROUND => Op::Unary(Unary::Round),
        wire::KERNEL_TRUNC => Op::Unary(Unary::Trunc),
        wire::KERNEL_LOG => Op::Unary(Unary::Log),
        wire::KERNEL_SIN => Op::Unary(Unary::Sin),
        wire::KERNEL_COS => Op::Unary(Unary::Cos),
        wire::KERNEL_XIELU => Op::Unary(Unary::Xielu {
            alpha_n: float(1),
            alpha_p: float(2),
            beta: float(3),
            eps: float(4),
        }),
        wire::KERNEL_LEAKY_RELU => Op::Unary(Unary::LeakyRelu(float(0))),
        wire::KERNEL_SWIGLU => Op::Glu(Glu::Swiglu, swapped),
        wire::KERNEL_GEGLU => Op::Glu(Glu::Geglu, swapped),
        wire::KERNEL_REGLU => Op::Glu(Glu::Reglu, swapped),
        wire::KERNEL_GEGLU_ERF => Op::Glu(Glu::GegluErf, swapped),
        wire::KERNEL_GEGLU_QUICK => Op::Glu(Glu::GegluQuick, swapped),
        wire::KERNEL_SWIGLU_OAI => Op::Glu(
            Glu::SwigluOai {
                alpha: float(2),
                limit: float(3),
            },
            swapped,
        ),
        wire::KERNEL_SWIGLU_CLAMP => Op::Glu(Glu::SwigluClamp { limit: float(3) }, swapped),
        wire::KERNEL_RMS_NORM => Op::Norm(Norm::Rms(float(0))),
        wire::KERNEL_NORM => Op::Norm(Norm::Mean(float(0))),
        wire::KERNEL_L2_NORM => Op::Norm(Norm::L2(float(0))),
        wire::KERNEL_SUM_ROWS => Op::SumRows(false),
        wire::KERNEL_MEAN => Op::SumRows(true),
        wire::KERNEL_SUM => Op::Sum,
        wire::KERNEL_CUMSUM => Op::CumSum,
        wire::KERNEL_SSM_CONV => Op::SsmConv,
        wire::KERNEL_ADD_ID => Op::AddId,
        wire::KERNEL_MUL_MAT => Op::MulMat,
        // SOURCE: ggml.h, GGML_SORT_ORDER_ASC 0 and _DESC 1.
        wire::KERNEL_ARGSORT => Op::Sort(match body.params[0] {
            0 => Order::Ascending,
            1 => Order::Descending,
            _ => return Err(Failure::bad(OPERAND)),
        }),
        wire::KERNEL_PAD => Op::Pad(Pad {
            front: [0, 2, 4, 6].map(|i| body.params[i].cast_signed()),
            is_circular: body.params[8] != 0,
        }),
        wire::KERNEL_ROLL => Op::Pad(Pad {
            front: [0, 1, 2, 3].map(|i| body.params[i].cast_signed()),
            is_circular: true,
        }),
        wire::KERNEL_DIAG_MASK_INF => Op::Band(Band::Past(size(body, 0)?)),
        // SOURCE: ggml.h, enum ggml_tri_type.
        wire::KERNEL_TRI => Op::Band(match body.params[0] {
            0 => Band::UpperDiagonal,
            1 => Band::Upper,
            2 => Band::LowerDiagonal,
            3 => Band::Lower,
            _ => return Err(Failure::bad(OPERAND)),
        }),
        wire::KERNEL_DIAG => Op::Band(Band::Diagonal),
        wire::KERNEL_POOL_1D | wire::KERNEL_POOL_2D => Op::Pool(pool(body)?),
        wire::KERNEL_IM2COL | wire::KERNEL_IM2COL_3D => Op::Im2col(im2col(body)?),
        wire::KERNEL_FILL => Op::Ramp(float(0), float(2)),
        wire::KERNEL_SOFT_MAX => Op::SoftMax(SoftMax {
            scale: float(0),
            max_bias: float(1),
        }),
        wire::KERNEL_ROPE => Op::Rope(rope(body, false)?),
        wire::KERNEL_ROPE_SET_ROWS => Op::RopeSetRows(rope(body, false)?),
        wire::KERNEL_ROPE_BACK => Op::Rope(rope(body, true)?),
        wire::KERNEL_GET_ROWS => Op::GetRows,
        wire::KERNEL_SET_ROWS => Op::SetRows,
        wire::KERNEL_COPY => Op::Copy,
        wire::KERNEL_CONCAT => Op::Concat(size(body, 0)?),
        wire::KERNEL_REPEAT => Op::Repeat,
        _ => return Err(Failure::bad(KERNEL_NUMBER)),
    })
}

/// A parameter that counts something.
fn size(body: &wire::TensorOp, i: usize) -> Result<usize, Failure> {
    usize::try_from(body.params[i]).map_err(|_| Failure::bad(OPERAND))
}

/// The parameters of a rotation, as ggml stores them.
///
/// SOURCE: ggml.h, `GGML_ROPE_TYPE_NORMAL` 0, `_NEOX` 2, `_MROPE` 8, `_VISION` 24, `_IMROPE` 40; ggml.c, `ggml_rope_impl`.
fn rope(body: &wire::TensorOp, is_inverse: bool) -> Result<Rope, Failure> {
    let float = |i: usize| f32::from_bits(body.params[i]);
    let (pairs, order) = match body.params[2] {
        0 => (RopePairs::Adjacent, None),
        2 => (RopePairs::Halves, None),
        8 => (RopePairs::Halves, Some(SectionOrder::Blocks)),
        24 => (RopePairs::Halves, Some(SectionOrder::Apart)),
        40 => (RopePairs::Halves, Some(SectionOrder::Turns)),
        _ => return Err(Failure::bad(OPERAND)),
    };
    let sizes = [
        size(body, 11)?,
        size(body, 12)?,
        size(body, 13)?,
        size(body, 14)?,
    ];
    Ok(Rope {
        pairs,
        sections: order.map(|order| Sections { sizes, order }),
        is_inverse,
        n_dims: size(body, 1)?,
        first: size(body, 15)?,
        n_ctx_orig: body.params[4].cast_signed(),
        freq_base: float(5),
        freq_scale: float(6),
        ext_factor: float(7),
        attn_factor: float(8),
        beta_fast: float(9),
        beta_slow: float(10),
    })
}

/// The parameters of IM2COL and IM2COL_3D, as ggml stores them, and the window behind them.
fn im2col(body: &wire::TensorOp) -> Result<Im2col, Failure> {
    let p = |i: usize| body.params[i];
    let window = [size(body, 13)?, size(body, 14)?, size(body, 15)?];
    Ok(if body.kernel == wire::KERNEL_IM2COL_3D {
        Im2col {
            image: Image::Volume(size(body, 9)?),
            stride: [p(0), p(1), p(2)],
            pad: [p(3), p(4), p(5)].map(u32::cast_signed),
            dilation: [p(6), p(7), p(8)],
            window,
        }
    } else {
        Im2col {
            image: if p(6) == 0 { Image::Line } else { Image::Plane },
            stride: [p(0), p(1), 1],
            pad: [p(2), p(3), 0].map(u32::cast_signed),
            dilation: [p(4), p(5), 1],
            window,
        }
    })
}

/// The parameters of POOL_1D and POOL_2D, as ggml stores them.
///
/// SOURCE: ggml.h, `GGML_OP_POOL_MAX` 0 and `_AVG` 1.
fn pool(body: &wire::TensorOp) -> Result<Pool, Failure> {
    let p = |i: usize| body.params[i];
    let is_mean = match p(0) {
        0 => false,
        1 => true,
        _ => return Err(Failure::bad(OPERAND)),
    };
    let is_line = body.kernel == wire::KERNEL_POOL_1D;
    let (size, stride, pad) = if is_line {
        ([p(1), 1], [p(2), 1], [p(3), 0])
    } else {
        ([p(1), p(2)], [p(3), p(4)], [p(5), p(6)])
    };
    Ok(Pool {
        is_mean,
        counts_inside: is_line,
        size,
        stride,
        pad: pad.map(u32::cast_signed),
    })
}
