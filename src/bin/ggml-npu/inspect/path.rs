//! The way of a weight on a chip: the planner's own answer to the multiplication that llama.cpp would ask for.

use std::fmt;

use ggml_rust_npu::caps;
use ggml_rust_npu::gguf::{GgmlType, TensorInfo};
use ggml_rust_npu::graph::{Op, Operation, PARAMS, Place, Role, Tensor, sources};
use ggml_rust_npu::plan::{self, Target, hexagon};
use ggml_rust_npu::rules::Rules;
use ggml_rust_npu::tensor::{DType, Dequantize, Format, Shape};
use serde::Serialize;

use crate::Failure;

/// Rows of activations in the question: llama.cpp's own when it asks where a weight shall go.
const M: usize = 512;

/// A chip, and the user's rules for it.
pub enum Chip {
    /// A Rockchip NPU.
    Rockchip(Box<Target>),
    /// Any Hexagon NPU: they take the same weights.
    Hexagon,
}

/// Where a tensor is computed.
#[derive(Debug, Serialize)]
#[serde(tag = "place", rename_all = "lowercase")]
pub enum Path {
    /// On the NPU.
    Npu {
        /// Arithmetic or type there, and how it comes to be.
        how: String,
        /// Bytes in the NPU's memory.
        packed_bytes: usize,
    },
    /// On the CPU.
    Cpu {
        /// Why.
        reason: String,
    },
}

impl Path {
    /// `NPU` or `CPU`.
    pub fn place(&self) -> &'static str {
        match self {
            Self::Npu { .. } => "NPU",
            Self::Cpu { .. } => "CPU",
        }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Npu { how, packed_bytes } => write!(f, "NPU  {how}, {packed_bytes} bytes"),
            Self::Cpu { reason } => write!(f, "CPU  {reason}"),
        }
    }
}

/// ggml has a way to `f32` for every quantized type; the planner only asks whether there is one.
struct Exists;

impl Dequantize for Exists {
    fn dequantize(&self, _: &[u8], _: &mut [f32]) {
        unreachable!("plans are made of metadata")
    }
}

impl Chip {
    /// The chip of a name.
    ///
    /// # Errors
    /// Text, if there is no such chip.
    pub fn new(name: &str, rules: Rules) -> Result<Self, Failure> {
        if let Some(caps) = caps::rockchip_by_name(name) {
            return Ok(Self::Rockchip(Box::new(Target {
                rules,
                ..Target::from(caps)
            })));
        }
        let hexagon = caps::hexagon_by_name(name).map(|_| Self::Hexagon);
        hexagon.ok_or_else(|| format!("no such chip: {name}").into())
    }

    /// The way of a tensor.
    ///
    /// - `tied`: the token embeddings are the output head, too
    pub fn path(&self, tensor: &TensorInfo, tied: bool) -> Path {
        let cpu = |reason: &str| Path::Cpu {
            reason: reason.into(),
        };
        let is_matrix = tensor.dims >= 2 && tensor.name.ends_with(".weight");
        if !is_matrix {
            return cpu("no matrix");
        }
        if tensor.name.contains("token_embd") && !tied {
            return cpu("rows are looked up, not multiplied");
        }
        match self.ask(tensor) {
            Ok((how, packed_bytes)) => Path::Npu { how, packed_bytes },
            // The planner's word for all of them is one; which it was is seen here.
            Err(reason) => match tensor.dtype {
                GgmlType::F32 | GgmlType::BF16 => Path::Cpu {
                    reason: format!("the NPU takes no {} weights", tensor.dtype.name()),
                },
                _ => cpu(reason),
            },
        }
    }

    /// What the planner says of a multiplication with `tensor` as weights.
    fn ask(&self, tensor: &TensorInfo) -> Result<(String, usize), plan::Refusal> {
        let (dtype, format) = dtype(tensor.dtype);
        let [k, n, experts, outer] = tensor.ne;
        let weights = Tensor {
            format,
            place: Place::Packed,
            ..operand(&tensor.name, dtype, [k, n, experts, outer])
        };
        let experts = tensor.name.contains("_exps");
        let plane = if experts { [1, M] } else { [M, 1] };
        let act = operand("act", DType::F32, [k, plane[0], plane[1], 1]);
        let dst = operand("dst", DType::F32, [n, plane[0], plane[1], 1]);
        let ids = operand("ids", DType::I32, [1, M, 1, 1]);
        let operation = Operation {
            op: if experts { Op::MulMatId } else { Op::MulMat },
            params: [0; PARAMS],
            dst,
            src: sources(&[weights, act, ids]),
        };
        match self {
            Self::Rockchip(target) => {
                let command = plan::question(target, &operation)?;
                let layout = command.weights();
                let (chunks, segments) = (layout.chunks, layout.segments);
                let how = format!("{:?}, {chunks} x {segments} blocks", layout.precision);
                Ok((how, layout.bytes()))
            }
            Self::Hexagon => {
                let command = hexagon::question(VTCM_BYTES, &operation)?;
                let layout = command.weights().ok_or("not a multiplication")?;
                let how = match layout.form {
                    hexagon::Form::Lossless => "lossless tiles",
                    hexagon::Form::Requantized => "quantized again, tiles",
                };
                Ok((format!("{:?}, {how}", layout.weight()), layout.bytes()))
            }
        }
    }
}

/// VTCM to plan with; a device says its own when it is opened.
// SOURCE: ggml-hexagon of ggml 0.25.3 assumes 8 MiB where the DSP cannot be asked.
const VTCM_BYTES: usize = 8 << 20;

/// An operand whose rows follow each other.
fn operand(name: &str, dtype: DType, ne: [usize; 4]) -> Tensor<'_> {
    let step = dtype.step_bytes().unwrap_or(1);
    let row = dtype.row_bytes(ne[0]).unwrap_or(ne[0]);
    Tensor {
        name,
        dtype,
        format: None,
        shape: Shape {
            ne,
            nb: [step, row, row * ne[1], row * ne[1] * ne[2]],
        },
        place: Place::Unknown,
        memory: None,
        packed_offset: 0,
        role: Role::State,
        dequantize: Some(&Exists),
    }
}

fn dtype(dtype: GgmlType) -> (DType, Option<Format>) {
    let quantized = DType::Quantized {
        block_elems: dtype.block_elems(),
        block_bytes: dtype.block_bytes(),
    };
    match dtype {
        GgmlType::F32 => (DType::F32, None),
        GgmlType::F16 => (DType::F16, None),
        GgmlType::I32 => (DType::I32, None),
        GgmlType::Q4_0 => (quantized, Some(Format::Q4_0)),
        GgmlType::Q4_1 => (quantized, Some(Format::Q4_1)),
        GgmlType::Q8_0 => (quantized, Some(Format::Q8_0)),
        GgmlType::IQ4_NL => (quantized, Some(Format::Iq4Nl)),
        GgmlType::MXFP4 => (quantized, Some(Format::Mxfp4)),
        other if other.is_quantized() => (quantized, None),
        _ => (DType::Other, None),
    }
}
