//! The kernels of operations on tensors in ggml's own layouts. The kernel itself decides if it
//! accepts the operands.

use hexagon_ops::serve;
use hexagon_ops::wire::{self, Attention, NarrowTensor, TensorOp, WideOp};

use super::reshape::as_kernel_takes;
use crate::graph::Refusal;
use crate::graph::{Op, Operation, PARAMS, Place, Tensor};
use crate::tensor::{DType, Format};

const NOT_TAKEN: Refusal = "the kernel does not take these operands";

/// Plans a node. Buffers are numbers of operands (0 for the result, 1 and more for ggml's sources),
/// and offsets are 0: the caller fills in the memory.
///
/// # Errors
/// The reason why the device cannot compute it.
pub fn command(operation: &Operation) -> Result<TensorOp, Refusal> {
    let operation = &as_kernel_takes(operation);
    let (kernel, reads) = (operation.op.kernel()).ok_or("not an operation of this NPU")?;
    if rounds_elsewhere(operation) {
        return Err("the CPU rounds BF16 at other places");
    }
    if operation.op == Op::GroupNorm {
        return Err("groups have gaps or different sizes");
    }
    let dense = |tensor: &Tensor| Some(tensor.shape.nb[0]) == tensor.dtype.step_bytes();
    if operation.op == Op::Sum && !operation.src[0].as_ref().is_some_and(dense) {
        // ggml's CPU code for SUM assumes that the elements of a row are contiguous, and gives
        // other sums if they are not.
        return Err("the CPU sums dense rows only");
    }
    let mut body = TensorOp {
        kernel,
        reserved: 0,
        params: params(operation)?,
        dst: describe(&operation.dst, 0)?,
        src: bytemuck::Zeroable::zeroed(),
    };
    // A node that was turned into a copy may have its operand as the second source only.
    let skipped = match operation.op {
        Op::Cpy => usize::from(operation.src[0].is_none()),
        _ => 0,
    };
    for (to, index) in body.src.iter_mut().zip(reads) {
        let index = index + skipped;
        if let Some(source) = &operation.src[index] {
            *to = describe(source, word(index)? + 1)?;
        }
    }
    match serve::accepts(&body) {
        Ok(()) => Ok(body),
        Err(_) => Err(NOT_TAKEN),
    }
}

/// Plans a node with more sources than a [`TensorOp`] has. Buffers are as for [`command`].
///
/// # Errors
/// The reason why the device cannot compute it.
pub fn wide(operation: &Operation) -> Result<WideOp, Refusal> {
    let operation = &as_kernel_takes(operation);
    let (kernel, reads) = (operation.op.kernel()).ok_or("not an operation of this NPU")?;
    let narrow = |tensor: &Tensor, number| {
        NarrowTensor::new(&describe(tensor, number)?).ok_or("a stride needs more than 32 bits")
    };
    let mut body = WideOp {
        kernel,
        reserved: 0,
        params: params(operation)?,
        dst: narrow(&operation.dst, 0)?,
        src: bytemuck::Zeroable::zeroed(),
    };
    for (to, index) in body.src.iter_mut().zip(reads) {
        if let Some(source) = &operation.src[index] {
            *to = narrow(source, word(index)? + 1)?;
        }
    }
    match serve::accepts_wide(&body) {
        Ok(()) => Ok(body),
        Err(_) => Err(NOT_TAKEN),
    }
}

/// Returns `true` if ggml rounds intermediate values to BF16 where kernels keep F32. The results
/// would then differ by a step of BF16, which is more than ggml's tests allow.
fn rounds_elsewhere(operation: &Operation) -> bool {
    let bf16 = |tensor: &Tensor| tensor.dtype == DType::Bf16;
    let from = operation.src[0].as_ref().is_some_and(bf16);
    match operation.op {
        Op::Swiglu | Op::Geglu | Op::GegluQuick | Op::SwigluOai | Op::SwigluClamp => {
            from || bf16(&operation.dst)
        }
        _ => false,
    }
}

/// Returns ggml's parameters, and additional ones that kernels need.
fn params(operation: &Operation) -> Result<[u32; PARAMS], Refusal> {
    let mut params = operation.params.map(i32::cast_unsigned);
    match (operation.op, &operation.src[0]) {
        // SOURCE: ggml.h, ggml_sort_order: 1 is descending.
        (Op::TopK, _) => params[0] = 1,
        // SOURCE: ggml_dsv4_hc_pre of ggml 0.25.3 passes a factor. ggml 0.21 has no such parameter
        // and multiplies by 1, so its parameter is 0.
        (Op::Dsv4HcPre, _) if params[0] == 0 => return Err("this version of ggml gives no factor"),
        (Op::Im2col, Some(weights)) => {
            let [width, height, ..] = weights.shape.ne;
            // SOURCE: ggml.h, ggml_im2col: parameter 6 is 1 for a two-dimensional window.
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

/// Returns a tensor for the DSP, in buffer `number`.
pub(super) fn describe(tensor: &Tensor, number: u32) -> Result<wire::Tensor, Refusal> {
    let dtype = match (tensor.dtype, tensor.format) {
        (DType::F32, _) => wire::TYPE_F32,
        (DType::F16, _) => wire::TYPE_F16,
        (DType::Bf16, _) => wire::TYPE_BF16,
        (DType::I8, _) => wire::TYPE_I8,
        (DType::I16, _) => wire::TYPE_I16,
        (DType::I32, _) => wire::TYPE_I32,
        (DType::I64, _) => wire::TYPE_I64,
        (DType::Quantized { .. }, Some(format)) => blocks(format),
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

/// Returns the number of a type of blocks.
fn blocks(format: Format) -> u32 {
    match format {
        Format::Q8_0 => wire::TYPE_Q8_0,
        Format::Q4_0 => wire::TYPE_Q4_0,
        Format::Q4_1 => wire::TYPE_Q4_1,
        Format::Q5_0 => wire::TYPE_Q5_0,
        Format::Q5_1 => wire::TYPE_Q5_1,
        Format::Iq4Nl => wire::TYPE_IQ4_NL,
        Format::Mxfp4 => wire::TYPE_MXFP4,
        Format::Q4K => wire::TYPE_Q4_K,
        Format::Q5K => wire::TYPE_Q5_K,
        Format::Q6K => wire::TYPE_Q6_K,
        Format::Iq4Xs => wire::TYPE_IQ4_XS,
        Format::Q3K => wire::TYPE_Q3_K,
        Format::Q2K => wire::TYPE_Q2_K,
    }
}
