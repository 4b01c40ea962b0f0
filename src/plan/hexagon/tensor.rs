//! Operations on tensors in ggml's own layouts: which kernel computes them. Whether it takes the operands is what the
//! kernel itself says.

use hexagon_ops::serve;
use hexagon_ops::wire::{self, TensorOp};

use super::Refusal;
use crate::graph::{Op, Operation, Place, Tensor};
use crate::tensor::{DType, Format};

/// Number of the kernel, and how many of ggml's sources it reads: results that are views of one carry it as a source, too.
fn kernel(op: Op) -> Option<(u32, usize)> {
    Some(match op {
        Op::Add => (wire::KERNEL_ADD, 2),
        Op::Sub => (wire::KERNEL_SUB, 2),
        Op::Mul => (wire::KERNEL_MUL, 2),
        Op::Div => (wire::KERNEL_DIV, 2),
        Op::Scale => (wire::KERNEL_SCALE, 1),
        Op::Clamp => (wire::KERNEL_CLAMP, 1),
        Op::Sqr => (wire::KERNEL_SQR, 1),
        Op::Sqrt => (wire::KERNEL_SQRT, 1),
        Op::SumRows => (wire::KERNEL_SUM_ROWS, 1),
        Op::Silu => (wire::KERNEL_SILU, 1),
        Op::Gelu => (wire::KERNEL_GELU, 1),
        Op::GeluQuick => (wire::KERNEL_GELU_QUICK, 1),
        Op::GeluErf => (wire::KERNEL_GELU_ERF, 1),
        Op::Relu => (wire::KERNEL_RELU, 1),
        Op::Sigmoid => (wire::KERNEL_SIGMOID, 1),
        Op::Tanh => (wire::KERNEL_TANH, 1),
        Op::Exp => (wire::KERNEL_EXP, 1),
        Op::Neg => (wire::KERNEL_NEG, 1),
        Op::Abs => (wire::KERNEL_ABS, 1),
        Op::Swiglu => (wire::KERNEL_SWIGLU, 2),
        Op::Geglu => (wire::KERNEL_GEGLU, 2),
        Op::Reglu => (wire::KERNEL_REGLU, 2),
        Op::RmsNorm => (wire::KERNEL_RMS_NORM, 1),
        Op::Norm => (wire::KERNEL_NORM, 1),
        Op::L2Norm => (wire::KERNEL_L2_NORM, 1),
        Op::SoftMax => (wire::KERNEL_SOFT_MAX, 3),
        Op::Rope => (wire::KERNEL_ROPE, 3),
        Op::GetRows => (wire::KERNEL_GET_ROWS, 2),
        Op::SetRows => (wire::KERNEL_SET_ROWS, 2),
        Op::Cpy | Op::Cont | Op::Dup => (wire::KERNEL_COPY, 1),
        Op::Concat => (wire::KERNEL_CONCAT, 2),
        Op::Repeat => (wire::KERNEL_REPEAT, 1),
        Op::Softplus => (wire::KERNEL_SOFTPLUS, 1),
        Op::Hardswish => (wire::KERNEL_HARDSWISH, 1),
        Op::Hardsigmoid => (wire::KERNEL_HARDSIGMOID, 1),
        Op::Elu => (wire::KERNEL_ELU, 1),
        Op::Step => (wire::KERNEL_STEP, 1),
        Op::Sgn => (wire::KERNEL_SGN, 1),
        Op::Expm1 => (wire::KERNEL_EXPM1, 1),
        Op::Floor => (wire::KERNEL_FLOOR, 1),
        Op::Ceil => (wire::KERNEL_CEIL, 1),
        Op::Round => (wire::KERNEL_ROUND, 1),
        Op::Trunc => (wire::KERNEL_TRUNC, 1),
        Op::Xielu => (wire::KERNEL_XIELU, 1),
        Op::Log => (wire::KERNEL_LOG, 1),
        Op::Sin => (wire::KERNEL_SIN, 1),
        Op::Cos => (wire::KERNEL_COS, 1),
        Op::LeakyRelu => (wire::KERNEL_LEAKY_RELU, 1),
        Op::GegluErf => (wire::KERNEL_GEGLU_ERF, 2),
        Op::GegluQuick => (wire::KERNEL_GEGLU_QUICK, 2),
        Op::SwigluOai => (wire::KERNEL_SWIGLU_OAI, 2),
        Op::SwigluClamp => (wire::KERNEL_SWIGLU_CLAMP, 2),
        Op::Mean => (wire::KERNEL_MEAN, 1),
        Op::Sum => (wire::KERNEL_SUM, 1),
        Op::Cumsum => (wire::KERNEL_CUMSUM, 1),
        Op::SsmConv => (wire::KERNEL_SSM_CONV, 2),
        Op::AddId => (wire::KERNEL_ADD_ID, 3),
        Op::Argsort => (wire::KERNEL_ARGSORT, 1),
        Op::Pad => (wire::KERNEL_PAD, 1),
        Op::Roll => (wire::KERNEL_ROLL, 1),
        Op::DiagMaskInf => (wire::KERNEL_DIAG_MASK_INF, 1),
        Op::Tri => (wire::KERNEL_TRI, 1),
        Op::Diag => (wire::KERNEL_DIAG, 1),
        Op::RopeBack => (wire::KERNEL_ROPE_BACK, 3),
        // One number, repeated.
        Op::Add1 => (wire::KERNEL_ADD, 2),
        Op::TopK => (wire::KERNEL_ARGSORT, 1),
        // FILL's source says only where the result may go.
        Op::Fill | Op::Arange => (wire::KERNEL_FILL, 0),
        Op::MulMat | Op::MulMatId | Op::FlashAttnExt => return None,
    })
}

/// Plans a node. Buffers are numbers of operands (0: the result), offsets are 0: memory is the caller's to fill in.
///
/// # Errors
/// The reason why the device cannot compute it.
pub fn command(operation: &Operation) -> Result<TensorOp, Refusal> {
    let (kernel, reads) = kernel(operation.op).ok_or("not an operation of this NPU")?;
    let mut params = operation.params.map(i32::cast_unsigned);
    if operation.op == Op::TopK {
        // SOURCE: ggml.h, ggml_sort_order: descending is 1.
        params[0] = 1;
    }
    let mut body = TensorOp {
        kernel,
        reserved: 0,
        params,
        dst: describe(&operation.dst, 0)?,
        src: bytemuck::Zeroable::zeroed(),
    };
    for (number, (to, source)) in (1..).zip(body.src.iter_mut().zip(&operation.src[..reads])) {
        if let Some(source) = source {
            *to = describe(source, number)?;
        }
    }
    match serve::accepts(&body) {
        Ok(()) => Ok(body),
        Err(_) => Err("the kernel does not take these operands"),
    }
}

/// A tensor for the DSP, in buffer `number`.
fn describe(tensor: &Tensor, number: u32) -> Result<wire::Tensor, Refusal> {
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
        *ne = u32::try_from(have).map_err(|_| "a dimension needs more than 32 bits")?;
    }
    Ok(wire::Tensor {
        buffer: number,
        dtype,
        offset: 0,
        ne,
        nb: tensor.shape.nb.map(|nb| nb as u64),
    })
}
