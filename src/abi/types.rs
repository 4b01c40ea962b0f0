//! The types and constants of `include/npu.h`, and how a tensor of C becomes one of Rust.

use std::ffi::{CStr, c_char, c_void};

use super::NpuBuffer;
use crate::dequantize;
use crate::gguf::GgmlType;
use crate::graph::{MAX_SOURCES, Op, Operation, PARAMS, Place, Role, Sources, Tensor};
use crate::tensor::{DType, Dequantize, Format, Shape};

/// Sources of a node that are passed on.
pub const NPU_MAX_SRC: usize = 7;
const _: () = assert!(NPU_MAX_SRC == MAX_SOURCES);
/// 32-bit words of op parameters.
pub const NPU_OP_PARAMS: usize = 16;
const _: () = assert!(NPU_OP_PARAMS == PARAMS);

/// `npu_tensor.dtype`: the tensor is absent; its other fields have no meaning.
pub const NPU_DTYPE_NONE: u32 = 0;
/// `npu_tensor.dtype`: F32.
pub const NPU_DTYPE_F32: u32 = 1;
/// `npu_tensor.dtype`: F16.
pub const NPU_DTYPE_F16: u32 = 2;
/// `npu_tensor.dtype`: BF16.
pub const NPU_DTYPE_BF16: u32 = 3;
/// `npu_tensor.dtype`: I32.
pub const NPU_DTYPE_I32: u32 = 4;
/// `npu_tensor.dtype`: I64.
pub const NPU_DTYPE_I64: u32 = 5;
/// `npu_tensor.dtype`: any quantized type, with `to_float`.
pub const NPU_DTYPE_QUANTIZED: u32 = 6;
/// `npu_tensor.dtype`: anything else.
pub const NPU_DTYPE_OTHER: u32 = 7;
/// `npu_tensor.dtype`: I8.
pub const NPU_DTYPE_I8: u32 = 8;
/// `npu_tensor.dtype`: I16.
pub const NPU_DTYPE_I16: u32 = 9;

/// `npu_tensor.format`: none of the following.
pub const NPU_FORMAT_NONE: u32 = 0;
/// `npu_tensor.format`: Q4_0.
pub const NPU_FORMAT_Q4_0: u32 = 1;
/// `npu_tensor.format`: Q4_1.
pub const NPU_FORMAT_Q4_1: u32 = 2;
/// `npu_tensor.format`: Q8_0.
pub const NPU_FORMAT_Q8_0: u32 = 3;
/// `npu_tensor.format`: IQ4_NL.
pub const NPU_FORMAT_IQ4_NL: u32 = 4;
/// `npu_tensor.format`: MXFP4.
pub const NPU_FORMAT_MXFP4: u32 = 5;
/// `npu_tensor.format`: Q4_K.
pub const NPU_FORMAT_Q4_K: u32 = 6;
/// `npu_tensor.format`: Q5_0.
pub const NPU_FORMAT_Q5_0: u32 = 7;
/// `npu_tensor.format`: Q6_K.
pub const NPU_FORMAT_Q6_K: u32 = 8;
/// `npu_tensor.format`: Q5_1.
pub const NPU_FORMAT_Q5_1: u32 = 9;
/// `npu_tensor.format`: Q5_K.
pub const NPU_FORMAT_Q5_K: u32 = 10;
/// `npu_tensor.format`: IQ4_XS.
pub const NPU_FORMAT_IQ4_XS: u32 = 11;
/// `npu_tensor.format`: Q3_K.
pub const NPU_FORMAT_Q3_K: u32 = 12;
/// `npu_tensor.format`: Q2_K.
pub const NPU_FORMAT_Q2_K: u32 = 13;

/// `npu_tensor.place`: no buffer yet, and not the result of an operation either.
pub const NPU_PLACE_NONE: u32 = 0;
/// `npu_tensor.place`: memory that the CPU reads and writes, in ggml's layout; also a result
/// without a buffer yet that will be there.
pub const NPU_PLACE_HOST: u32 = 1;
/// `npu_tensor.place`: a buffer for packed weights of this device.
pub const NPU_PLACE_PACKED: u32 = 2;
/// `npu_tensor.place`: memory of another device.
pub const NPU_PLACE_OTHER: u32 = 3;
/// `npu_tensor.place`: memory that this device shares with the CPU, in ggml's layout; also a result
/// without a buffer yet that will be there.
pub const NPU_PLACE_DEVICE: u32 = 4;

/// `npu_tensor.role`: the result of an operation.
pub const NPU_ROLE_RESULT: u32 = 0;
/// `npu_tensor.role`: weights.
pub const NPU_ROLE_WEIGHTS: u32 = 1;
/// `npu_tensor.role`: data that outlives a graph or comes from outside of it: caches, inputs.
pub const NPU_ROLE_STATE: u32 = 2;

/// `npu_device_buffers`: computed tensors in any host memory, weights in a separate buffer type.
pub const NPU_BUFFERS_HOST_AND_PACKED: u32 = 0;
/// `npu_device_buffers`: computed tensors in memory that the device shares with the CPU, weights in
/// a separate buffer type.
pub const NPU_BUFFERS_SHARED_AND_PACKED: u32 = 1;
/// `npu_device_buffers`: everything in one buffer type, which the CPU reaches by set and get only.
pub const NPU_BUFFERS_ONE: u32 = 2;
/// `npu_device_buffers`: everything in memory that the device shares with the CPU.
pub const NPU_BUFFERS_SHARED: u32 = 3;

/// The graph was computed.
pub const NPU_STATUS_OK: u32 = 0;
/// The graph was not computed completely; a log line gives the reason.
pub const NPU_STATUS_FAILED: u32 = 1;
/// No memory to compute the graph with.
pub const NPU_STATUS_ALLOC_FAILED: u32 = 2;

/// Log level: an error.
pub const NPU_LOG_ERROR: u32 = 1;
/// Log level: a warning.
pub const NPU_LOG_WARN: u32 = 2;
/// Log level: information.
pub const NPU_LOG_INFO: u32 = 3;
/// Log level: debugging, tracing.
pub const NPU_LOG_DEBUG: u32 = 4;

/// Writes the `n` values of the blocks at `src` to `dst`.
type ToFloatFn = unsafe extern "C" fn(src: *const c_void, dst: *mut f32, n: i64);

/// A tensor's metadata, and where its bytes are.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct NpuTensor {
    /// `NPU_DTYPE_*`.
    pub dtype: u32,
    /// `NPU_FORMAT_*`.
    pub format: u32,
    /// `NPU_PLACE_*`, of the tensor that this one is a view of if it is one.
    pub place: u32,
    /// Elements in a block, 1 for plain types.
    pub block_elems: u32,
    /// Bytes in a block.
    pub block_bytes: u32,
    /// `NPU_ROLE_*`, of the tensor that this one is a view of if it is one.
    pub role: u32,
    /// Elements in each dimension, innermost first.
    pub ne: [i64; 4],
    /// Bytes from one index to the next.
    pub nb: [u64; 4],
    /// First byte; NULL in questions about operations.
    pub data: *mut c_void,
    /// The buffer of ours that it is in, if it is; NULL for ggml's dummy buffers.
    pub buffer: *mut NpuBuffer,
    /// ggml's function that dequantizes to F32; NULL unless `dtype` is `NPU_DTYPE_QUANTIZED`.
    // Private: only C sets it, and promises that the function belongs to the tensor's type.
    to_float: Option<unsafe extern "C" fn(src: *const c_void, dst: *mut f32, n: i64)>,
    /// Name for log lines; may be NULL.
    pub name: *const c_char,
}

/// One node of a graph.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct NpuNode {
    /// ggml's name of the operation, that of the function for GGML_OP_UNARY and GGML_OP_GLU.
    pub op: *const c_char,
    /// ggml's op parameters.
    pub op_params: [i32; NPU_OP_PARAMS],
    /// Result.
    pub dst: NpuTensor,
    /// Sources, in ggml's order.
    pub src: [NpuTensor; NPU_MAX_SRC],
    /// `true` if only the next node reads the result, so that the two can be computed as one.
    pub feeds_next: bool,
}

/// Functions of the host program.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct NpuHost {
    /// Takes one log line, without newline. May be called from any thread.
    pub log: Option<unsafe extern "C" fn(level: u32, text: *const c_char)>,
}

/// A tensor's `to_float`, as the trait that the rest of the crate calls.
#[repr(transparent)]
struct ToFloat(ToFloatFn);

impl ToFloat {
    fn of(tensor: &NpuTensor) -> Option<&Self> {
        let to_float: *const ToFloatFn = tensor.to_float.as_ref()?;
        // SAFETY: the same address with the same layout (repr(transparent)) and lifetime.
        Some(unsafe { &*to_float.cast::<Self>() })
    }
}

impl Dequantize for ToFloat {
    fn dequantize(&self, blocks: &[u8], out: &mut [f32]) {
        let n = i64::try_from(out.len()).unwrap_or(0);
        // SAFETY: this is ggml's function for the type of these blocks. `out` has as many elements
        // as the blocks, because `repack` cuts both at row boundaries.
        unsafe { (self.0)(blocks.as_ptr().cast(), out.as_mut_ptr(), n) };
    }
}

/// Returns the operation that a node names, if a device may know it.
pub(super) fn op(node: &NpuNode) -> Option<Op> {
    Op::from_name(op_name(node).as_bytes())
}

/// Returns ggml's name of the node's operation.
pub(super) fn op_name(node: &NpuNode) -> &str {
    // SAFETY: ggml's names of operations are constants.
    unsafe { text(node.op) }
}

/// Returns the node's metadata, without memory; `None` if no device knows the operation, or as for
/// [`metadata`].
pub(super) fn operation(node: &NpuNode) -> Option<Operation<'_>> {
    let mut src: Sources = [None; MAX_SOURCES];
    for (source, tensor) in src.iter_mut().zip(&node.src) {
        if tensor.dtype != NPU_DTYPE_NONE {
            *source = Some(metadata(tensor)?);
        }
    }
    Some(Operation {
        op: op(node)?,
        params: node.op_params,
        dst: metadata(&node.dst)?,
        src,
    })
}

/// Returns the tensor's metadata, without memory; `None` if a dimension is negative, or no memory
/// could hold it.
pub(super) fn metadata(tensor: &NpuTensor) -> Option<Tensor<'_>> {
    let dtype = match tensor.dtype {
        NPU_DTYPE_F32 => DType::F32,
        NPU_DTYPE_F16 => DType::F16,
        NPU_DTYPE_BF16 => DType::Bf16,
        NPU_DTYPE_I8 => DType::I8,
        NPU_DTYPE_I16 => DType::I16,
        NPU_DTYPE_I32 => DType::I32,
        NPU_DTYPE_I64 => DType::I64,
        NPU_DTYPE_QUANTIZED
            if tensor.to_float.is_some() && tensor.block_elems > 0 && tensor.block_bytes > 0 =>
        {
            DType::Quantized {
                block_elems: tensor.block_elems as usize,
                block_bytes: tensor.block_bytes as usize,
            }
        }
        _ => DType::Other,
    };
    let mut shape = Shape {
        ne: [0; 4],
        nb: [0; 4],
    };
    for i in 0..4 {
        shape.ne[i] = usize::try_from(tensor.ne[i]).ok()?;
        shape.nb[i] = usize::try_from(tensor.nb[i]).ok()?;
    }
    // Everything inside the Rust side relies on this check.
    if !shape.is_addressable(dtype) {
        return None;
    }
    Some(Tensor {
        name: name(tensor),
        dtype,
        format: match tensor.format {
            NPU_FORMAT_Q4_0 => Some(Format::Q4_0),
            NPU_FORMAT_Q4_1 => Some(Format::Q4_1),
            NPU_FORMAT_Q8_0 => Some(Format::Q8_0),
            NPU_FORMAT_IQ4_NL => Some(Format::Iq4Nl),
            NPU_FORMAT_MXFP4 => Some(Format::Mxfp4),
            NPU_FORMAT_Q4_K => Some(Format::Q4K),
            NPU_FORMAT_Q5_0 => Some(Format::Q5_0),
            NPU_FORMAT_Q6_K => Some(Format::Q6K),
            NPU_FORMAT_Q5_1 => Some(Format::Q5_1),
            NPU_FORMAT_Q5_K => Some(Format::Q5K),
            NPU_FORMAT_IQ4_XS => Some(Format::Iq4Xs),
            NPU_FORMAT_Q3_K => Some(Format::Q3K),
            NPU_FORMAT_Q2_K => Some(Format::Q2K),
            _ => None,
        },
        shape,
        place: match tensor.place {
            NPU_PLACE_NONE => Place::Unknown,
            NPU_PLACE_HOST => Place::Host,
            NPU_PLACE_PACKED => Place::Packed,
            NPU_PLACE_DEVICE => Place::Device,
            _ => Place::Foreign,
        },
        role: match tensor.role {
            NPU_ROLE_RESULT => Role::Result,
            NPU_ROLE_WEIGHTS => Role::Weights,
            _ => Role::State,
        },
        memory: None,
        packed_offset: 0,
        dequantize: match dtype {
            DType::F32 => dequantize::of(GgmlType::F32),
            DType::Bf16 => dequantize::of(GgmlType::BF16),
            _ => ToFloat::of(tensor).map(|to_float| to_float as &dyn Dequantize),
        },
    })
}

pub(super) fn name(tensor: &NpuTensor) -> &str {
    // SAFETY: ggml's names live as long as the tensor.
    unsafe { text(tensor.name) }
}

/// Returns a text of ggml's; `?` if there is none.
///
/// # Safety
/// `text` is NULL, or ends in NUL and lives for `'a`.
unsafe fn text<'a>(text: *const c_char) -> &'a str {
    if text.is_null() {
        return "?";
    }
    // SAFETY: guaranteed by the caller.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap_or("?")
}

#[cfg(test)]
mod tests;
