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
        Op::MulMat | Op::MulMatId => return None,
    })
}

/// Plans a node. Buffers are numbers of operands (0: the result), offsets are 0: memory is the caller's to fill in.
///
/// # Errors
/// The reason why the device cannot compute it.
pub fn command(operation: &Operation) -> Result<TensorOp, Refusal> {
    let (kernel, reads) = kernel(operation.op).ok_or("not an operation of this NPU")?;
    let mut body = TensorOp {
        kernel,
        reserved: 0,
        params: operation.params.map(i32::cast_unsigned),
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
        (DType::I32, _) => wire::TYPE_I32,
        (DType::I64, _) => wire::TYPE_I64,
        (DType::Quantized { .. }, Some(Format::Q8_0)) => wire::TYPE_Q8_0,
        (DType::Quantized { .. }, Some(Format::Q4_0)) => wire::TYPE_Q4_0,
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
