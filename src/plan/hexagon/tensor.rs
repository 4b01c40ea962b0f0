//! Operations on tensors in ggml's own layouts: which kernel computes them. Whether it takes the operands is what the
//! kernel itself says.

use std::ops::Range;

use hexagon_ops::serve;
use hexagon_ops::wire::{self, Attention, TensorOp};

use super::Refusal;
use crate::graph::{Op, Operation, PARAMS, Place, Tensor};
use crate::tensor::{DType, Format};

/// Number of the kernel, and which of ggml's sources it reads: results that are views of one carry it as a source, too.
fn kernel(op: Op) -> Option<(u32, Range<usize>)> {
    Some(match op {
        Op::Add => (wire::KERNEL_ADD, 0..2),
        Op::Sub => (wire::KERNEL_SUB, 0..2),
        Op::Mul => (wire::KERNEL_MUL, 0..2),
        Op::Div => (wire::KERNEL_DIV, 0..2),
        Op::Scale => (wire::KERNEL_SCALE, 0..1),
        Op::Clamp => (wire::KERNEL_CLAMP, 0..1),
        Op::Sqr => (wire::KERNEL_SQR, 0..1),
        Op::Sqrt => (wire::KERNEL_SQRT, 0..1),
        Op::SumRows => (wire::KERNEL_SUM_ROWS, 0..1),
        Op::Silu => (wire::KERNEL_SILU, 0..1),
        Op::Gelu => (wire::KERNEL_GELU, 0..1),
        Op::GeluQuick => (wire::KERNEL_GELU_QUICK, 0..1),
        Op::GeluErf => (wire::KERNEL_GELU_ERF, 0..1),
        Op::Relu => (wire::KERNEL_RELU, 0..1),
        Op::Sigmoid => (wire::KERNEL_SIGMOID, 0..1),
        Op::Tanh => (wire::KERNEL_TANH, 0..1),
        Op::Exp => (wire::KERNEL_EXP, 0..1),
        Op::Neg => (wire::KERNEL_NEG, 0..1),
        Op::Abs => (wire::KERNEL_ABS, 0..1),
        Op::Swiglu => (wire::KERNEL_SWIGLU, 0..2),
        Op::Geglu => (wire::KERNEL_GEGLU, 0..2),
        Op::Reglu => (wire::KERNEL_REGLU, 0..2),
        Op::RmsNorm => (wire::KERNEL_RMS_NORM, 0..1),
        Op::Norm => (wire::KERNEL_NORM, 0..1),
        Op::L2Norm => (wire::KERNEL_L2_NORM, 0..1),
        Op::SoftMax => (wire::KERNEL_SOFT_MAX, 0..3),
        Op::Rope => (wire::KERNEL_ROPE, 0..3),
        Op::GetRows => (wire::KERNEL_GET_ROWS, 0..2),
        Op::SetRows => (wire::KERNEL_SET_ROWS, 0..2),
        Op::Cpy | Op::Cont | Op::Dup => (wire::KERNEL_COPY, 0..1),
        Op::Concat => (wire::KERNEL_CONCAT, 0..2),
        Op::Repeat => (wire::KERNEL_REPEAT, 0..1),
        Op::Softplus => (wire::KERNEL_SOFTPLUS, 0..1),
        Op::Hardswish => (wire::KERNEL_HARDSWISH, 0..1),
        Op::Hardsigmoid => (wire::KERNEL_HARDSIGMOID, 0..1),
        Op::Elu => (wire::KERNEL_ELU, 0..1),
        Op::Step => (wire::KERNEL_STEP, 0..1),
        Op::Sgn => (wire::KERNEL_SGN, 0..1),
        Op::Expm1 => (wire::KERNEL_EXPM1, 0..1),
        Op::Floor => (wire::KERNEL_FLOOR, 0..1),
        Op::Ceil => (wire::KERNEL_CEIL, 0..1),
        Op::Round => (wire::KERNEL_ROUND, 0..1),
        Op::Trunc => (wire::KERNEL_TRUNC, 0..1),
        Op::Xielu => (wire::KERNEL_XIELU, 0..1),
        Op::Log => (wire::KERNEL_LOG, 0..1),
        Op::Sin => (wire::KERNEL_SIN, 0..1),
        Op::Cos => (wire::KERNEL_COS, 0..1),
        Op::LeakyRelu => (wire::KERNEL_LEAKY_RELU, 0..1),
        Op::GegluErf => (wire::KERNEL_GEGLU_ERF, 0..2),
        Op::GegluQuick => (wire::KERNEL_GEGLU_QUICK, 0..2),
        Op::SwigluOai => (wire::KERNEL_SWIGLU_OAI, 0..2),
        Op::SwigluClamp => (wire::KERNEL_SWIGLU_CLAMP, 0..2),
        Op::Mean => (wire::KERNEL_MEAN, 0..1),
        Op::Sum => (wire::KERNEL_SUM, 0..1),
        Op::Cumsum => (wire::KERNEL_CUMSUM, 0..1),
        Op::SsmConv => (wire::KERNEL_SSM_CONV, 0..2),
        Op::AddId => (wire::KERNEL_ADD_ID, 0..3),
        Op::Argsort => (wire::KERNEL_ARGSORT, 0..1),
        Op::Pad => (wire::KERNEL_PAD, 0..1),
        Op::Roll => (wire::KERNEL_ROLL, 0..1),
        Op::DiagMaskInf => (wire::KERNEL_DIAG_MASK_INF, 0..1),
        Op::Tri => (wire::KERNEL_TRI, 0..1),
        Op::Diag => (wire::KERNEL_DIAG, 0..1),
        Op::RopeBack => (wire::KERNEL_ROPE_BACK, 0..3),
        // One number, repeated.
        Op::Add1 => (wire::KERNEL_ADD, 0..2),
        Op::TopK => (wire::KERNEL_ARGSORT, 0..1),
        // The weights say only how large the windows are.
        Op::Im2col => (wire::KERNEL_IM2COL, 1..2),
        Op::Im2col3d => (wire::KERNEL_IM2COL_3D, 1..2),
        Op::Pool1d => (wire::KERNEL_POOL_1D, 0..1),
        Op::Pool2d => (wire::KERNEL_POOL_2D, 0..1),
        // FILL's source says only where the result may go.
        Op::Fill | Op::Arange => (wire::KERNEL_FILL, 0..0),
        // Of two tensors that were computed, or are in a cache.
        Op::MulMat => (wire::KERNEL_MUL_MAT, 0..2),
        Op::MulMatId | Op::FlashAttnExt => return None,
    })
}

const NOT_TAKEN: Refusal = "the kernel does not take these operands";

/// Plans a node. Buffers are numbers of operands (0: the result, from 1 on ggml's sources), offsets are 0: memory is the caller's to fill in.
///
/// # Errors
/// The reason why the device cannot compute it.
pub fn command(operation: &Operation) -> Result<TensorOp, Refusal> {
    let (kernel, reads) = kernel(operation.op).ok_or("not an operation of this NPU")?;
    if rounds_elsewhere(operation) {
        return Err("the CPU rounds BF16 at other places");
    }
    let dense = |tensor: &Tensor| Some(tensor.shape.nb[0]) == tensor.dtype.step_bytes();
    if operation.op == Op::Sum && !operation.src[0].as_ref().is_some_and(dense) {
        // ggml's own SUM takes the elements of a row to follow one another, and adds others where they do not.
        return Err("the CPU sums dense rows only");
    }
    let mut body = TensorOp {
        kernel,
        reserved: 0,
        params: params(operation)?,
        dst: describe(&operation.dst, 0)?,
        src: bytemuck::Zeroable::zeroed(),
    };
    for (to, index) in body.src.iter_mut().zip(reads) {
        if let Some(source) = &operation.src[index] {
            *to = describe(source, word(index)? + 1)?;
        }
    }
    match serve::accepts(&body) {
        Ok(()) => Ok(body),
        Err(_) => Err(NOT_TAKEN),
    }
}

/// Whether ggml rounds intermediate values to BF16 or FP16 where kernels keep F32: one step of BF16 is more than it lets
/// results differ by.
fn rounds_elsewhere(operation: &Operation) -> bool {
    let bf16 = |tensor: &Tensor| tensor.dtype == DType::Bf16;
    let from = operation.src[0].as_ref().is_some_and(bf16);
    match operation.op {
        Op::Swiglu
        | Op::Geglu
        | Op::GegluErf
        | Op::GegluQuick
        | Op::SwigluOai
        | Op::SwigluClamp => from || bf16(&operation.dst),
        Op::Cpy | Op::Cont | Op::Dup => {
            from && matches!(operation.dst.dtype, DType::Quantized { .. })
        }
        _ => false,
    }
}

/// ggml's parameters, and what kernels want beside them.
fn params(operation: &Operation) -> Result<[u32; PARAMS], Refusal> {
    let mut params = operation.params.map(i32::cast_unsigned);
    match (operation.op, &operation.src[0]) {
        // SOURCE: ggml.h, ggml_sort_order: descending is 1.
        (Op::TopK, _) => params[0] = 1,
        (Op::Im2col, Some(weights)) => {
            let [width, height, ..] = weights.shape.ne;
            // SOURCE: ggml.h, ggml_im2col: parameter 6 says whether there is a height.
            let height = if params[6] == 1 { height } else { 1 };
            [params[13], params[14], params[15]] = [word(width)?, word(height)?, 1];
        }
        (Op::Im2col3d, Some(weights)) => {
            let [width, height, depth, _] = weights.shape.ne;
            [params[13], params[14], params[15]] = [word(width)?, word(height)?, word(depth)?];
        }
        _ => {}
    }
    Ok(params)
}

fn word(size: usize) -> Result<u32, Refusal> {
    u32::try_from(size).map_err(|_| "a dimension needs more than 32 bits")
}

/// Plans an attention. Buffers are numbers of operands as for [`command`].
///
/// # Errors
/// The reason why the device cannot compute it.
pub fn attention(operation: &Operation) -> Result<Attention, Refusal> {
    let [scale, max_bias, softcap, ..] = operation.params.map(i32::cast_unsigned);
    let source = |index: usize, number| match &operation.src[index] {
        Some(tensor) => describe(tensor, number),
        None => Ok(bytemuck::Zeroable::zeroed()),
    };
    let body = Attention {
        scale,
        max_bias,
        softcap,
        reserved: 0,
        dst: describe(&operation.dst, 0)?,
        q: source(0, 1)?,
        k: source(1, 2)?,
        v: source(2, 3)?,
        mask: source(3, 4)?,
        sinks: source(4, 5)?,
    };
    match serve::accepts_attention(&body) {
        Ok(()) => Ok(body),
        Err(_) => Err(NOT_TAKEN),
    }
}

/// A tensor for the DSP, in buffer `number`.
pub(super) fn describe(tensor: &Tensor, number: u32) -> Result<wire::Tensor, Refusal> {
    let dtype = match (tensor.dtype, tensor.format) {
        (DType::F32, _) => wire::TYPE_F32,
        (DType::F16, _) => wire::TYPE_F16,
        (DType::Bf16, _) => wire::TYPE_BF16,
        (DType::I32, _) => wire::TYPE_I32,
        (DType::I64, _) => wire::TYPE_I64,
        (DType::Quantized { .. }, Some(Format::Q8_0)) => wire::TYPE_Q8_0,
        (DType::Quantized { .. }, Some(Format::Q4_0)) => wire::TYPE_Q4_0,
        (DType::Quantized { .. }, Some(Format::Q4_1)) => wire::TYPE_Q4_1,
        (DType::Quantized { .. }, Some(Format::Iq4Nl)) => wire::TYPE_IQ4_NL,
        (DType::Quantized { .. }, Some(Format::Mxfp4)) => wire::TYPE_MXFP4,
        _ => return Err("a type that no kernel reads"),
    };
    match (tensor.place, tensor.dtype) {
        (Place::Foreign, _) => return Err("an operand is in memory of another device"),
        (Place::Packed, DType::F16 | DType::Quantized { .. }) => {
            return Err("an operand may be packed");
        }
        _ => {}
    }
    let mut ne = [0; 4];
    for (ne, have) in ne.iter_mut().zip(tensor.shape.ne) {
        *ne = word(have)?;
    }
    Ok(wire::Tensor {
        buffer: number,
        dtype,
        offset: 0,
        ne,
        nb: tensor.shape.nb.map(|nb| nb as u64),
    })
}
