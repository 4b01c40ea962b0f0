//! The use of a weight by a chip: the planner's answer for the multiplication that llama.cpp would
//! request.

use clap::builder::PossibleValuesParser;
use ggml_rust_npu::backend::offline::Form;
use ggml_rust_npu::config::Config;
use ggml_rust_npu::gguf::{GgmlType, Header, TensorInfo, Value};
use ggml_rust_npu::graph::{Op, Operation, PARAMS, Place, Refusal, Role, Tensor, sources};
use ggml_rust_npu::hexagon::caps::HexCaps;
use ggml_rust_npu::rockchip::layout::WeightLayout;
use ggml_rust_npu::rockchip::plan::Target;
use ggml_rust_npu::tensor::{DType, Dequantize, Shape};
use ggml_rust_npu::{hexagon, rockchip};

use crate::ToolError;

/// Rows of activations in the question: llama.cpp's number when it asks for the place of a weight.
const M: usize = 512;

/// A chip, and the user's choices for it.
pub enum Chip {
    /// A Rockchip NPU.
    Rockchip(Box<Target>),
    /// A Hexagon NPU. All accept the same weights, up to the size for which a session has room.
    Hexagon(&'static HexCaps),
}

/// Returns the names of all chips, for an argument.
pub fn names() -> PossibleValuesParser {
    let rockchip = rockchip::caps::ALL.into_iter().map(|caps| caps.soc.name());
    PossibleValuesParser::new(rockchip.chain(hexagon::caps::ALL.iter().map(|caps| caps.name)))
}

/// The token embeddings.
const EMBEDDINGS: &str = "token_embd.weight";

/// Tables of embeddings that only have rows looked up in them, which llama.cpp does on the CPU.
// SOURCE: LLM_TENSOR_INFOS, llama.cpp 0.6.0: its tensors of the input layer.
const TABLES: [&str; 3] = [
    "per_layer_token_embd.weight",
    "position_embd.weight",
    "token_types.weight",
];

/// Architectures for whose token embeddings llama.cpp has no output head on a device, though their
/// files have no `output.weight`: encoders, which have no head, and bitnet, whose head is the
/// CPU's table.
// SOURCE: the models of llama.cpp 0.6.0 that do not load the token embeddings a second time.
const WITHOUT_HEAD: [&str; 9] = [
    "bert",
    "bitnet",
    "eurobert",
    "jina-bert-v2",
    "jina-bert-v3",
    "modern-bert",
    "neo-bert",
    "nomic-bert",
    "nomic-bert-moe",
];

/// Returns `true` if the token embeddings are the output head, too.
pub fn is_tied(header: &Header) -> bool {
    let architecture = header.get("general.architecture").and_then(Value::as_str);
    let has_head = architecture.is_none_or(|name| !WITHOUT_HEAD.contains(&name));
    has_head && header.tensor("output.weight").is_none()
}

/// Returns `true` if a tensor is a table that llama.cpp keeps on the CPU.
///
/// - `tied`: the token embeddings are the output head, too
fn is_table(tensor: &TensorInfo, tied: bool) -> bool {
    let name = tensor.name.as_str();
    TABLES.contains(&name) || (name == EMBEDDINGS && !tied)
}

/// A dequantizer that does nothing. ggml has one for every quantized type, and the planner only
/// checks that there is one.
struct Exists;

impl Dequantize for Exists {
    fn dequantize(&self, _: &[u8], _: &mut [f32]) {
        unreachable!("plans are made of metadata")
    }
}

impl Chip {
    /// Returns the chip with a name, with the user's rules and calibration.
    ///
    /// # Errors
    /// An error text if the chip is unknown, or if it lacks the arithmetic of a rule.
    pub fn new(name: &str, config: &Config) -> Result<Self, ToolError> {
        if let Some(caps) = rockchip::caps::by_name(name) {
            return Ok(Self::Rockchip(Box::new(rockchip::discovery::target(
                caps, config,
            )?)));
        }
        let hexagon = hexagon::caps::by_name(name).map(Self::Hexagon);
        hexagon.ok_or_else(|| format!("no such chip: {name}").into())
    }

    /// Returns the packed form of a tensor, or the reason why it stays on the CPU.
    ///
    /// - `tied`: the token embeddings are the output head, too
    ///
    /// # Errors
    /// The reason.
    pub fn form(&self, tensor: &TensorInfo, tied: bool) -> Result<Form, String> {
        let is_matrix = tensor.dims >= 2 && tensor.name.ends_with(".weight");
        if !is_matrix {
            return Err("no matrix".into());
        }
        if tensor.ne.contains(&0) {
            return Err("it has no elements".into());
        }
        if is_table(tensor, tied) {
            return Err("llama.cpp looks its rows up on the CPU".into());
        }
        // The planner gives one reason for unsuitable types, sizes and names, so types are
        // explained here.
        self.ask(tensor)
            .map_err(|reason| match (self, tensor.dtype) {
                (Self::Rockchip(_), GgmlType::F32) => "the NPU takes no F32 weights".into(),
                _ => reason.into(),
            })
    }

    /// Returns `true` if the NPU reads a tensor in the file's format, in an operation that
    /// llama.cpp would request: a product with a small matrix, a norm's factor, a bias.
    ///
    /// - `tied`: the token embeddings are the output head, too
    pub fn reads_as_it_is(&self, tensor: &TensorInfo, tied: bool) -> bool {
        let Self::Hexagon(caps) = self else {
            return false;
        };
        if is_table(tensor, tied) || tensor.ne.contains(&0) {
            return false;
        }
        let (dtype, format) = tensor.dtype.tensor_type();
        let [n, rows, ..] = tensor.ne;
        let operand = |name, ne| operand(name, DType::F32, ne);
        let values = Tensor {
            dtype,
            format,
            place: Place::Host,
            ..operand(&tensor.name, tensor.ne)
        };
        let act = operand("act", [n, M, 1, 1]);
        let (op, dst, src) = if tensor.dims >= 2 && tensor.name.ends_with(".weight") {
            (Op::MulMat, [rows, M, 1, 1], [values, act])
        } else if tensor.name.ends_with(".bias") {
            (Op::Add, [n, M, 1, 1], [act, values])
        } else {
            (Op::Mul, [n, M, 1, 1], [act, values])
        };
        let operation = Operation {
            op,
            params: [0; PARAMS],
            dst: operand("dst", dst),
            src: sources(&src),
        };
        ask_hexagon(caps, &operation).is_ok()
    }

    /// Returns the planner's answer for a multiplication with `tensor` as weights.
    fn ask(&self, tensor: &TensorInfo) -> Result<Form, Refusal> {
        let operation = product(tensor, M);
        match self {
            Self::Rockchip(target) => {
                rockchip::plan::question(target, &operation)?;
                let command = rockchip::plan::command(target, &operation)?;
                Ok(Form::Rockchip(*command.weights(), target.calibration))
            }
            Self::Hexagon(caps) => {
                let command = ask_hexagon(caps, &operation)?;
                let weights = command.weights().ok_or("it stays as it is")?;
                Ok(Form::Hexagon(*weights))
            }
        }
    }
}

/// Returns the multiplication of `rows` tokens with a tensor of a file as weights.
fn product(tensor: &TensorInfo, rows: usize) -> Operation<'_> {
    let [k, n, ..] = tensor.ne;
    let experts = tensor.name.contains("_exps");
    let plane = if experts { [1, rows] } else { [rows, 1] };
    let act = operand("act", DType::F32, [k, plane[0], plane[1], 1]);
    let dst = operand("dst", DType::F32, [n, plane[0], plane[1], 1]);
    let ids = operand("ids", DType::I32, [1, rows, 1, 1]);
    Operation {
        op: if experts { Op::MulMatId } else { Op::MulMat },
        params: [0; PARAMS],
        dst,
        src: sources(&[weights(tensor), act, ids]),
    }
}

/// Returns the layout with which a Rockchip NPU multiplies `rows` tokens with a tensor of a file;
/// `None` if the CPU does.
pub fn rockchip_layout(target: &Target, tensor: &TensorInfo, rows: usize) -> Option<WeightLayout> {
    let operation = product(tensor, rows);
    let command = rockchip::plan::command(target, &operation).ok()?;
    let is_cpu = rockchip::plan::prefers_cpu(target, &operation);
    (!is_cpu).then(|| *command.weights())
}

/// VTCM to plan with; an open device reports its own.
// SOURCE: ggml-hexagon of ggml 0.25.3 assumes 8 MiB where the DSP cannot be asked.
const VTCM_BYTES: usize = 8 << 20;

/// Returns a tensor of a file as weights in memory where they are packed.
pub fn weights(tensor: &TensorInfo) -> Tensor<'_> {
    let (dtype, format) = tensor.dtype.tensor_type();
    Tensor {
        format,
        place: Place::Packed,
        ..operand(&tensor.name, dtype, tensor.ne)
    }
}

/// Returns the command for an operation, as a device answers.
fn ask_hexagon(caps: &HexCaps, operation: &Operation) -> Result<hexagon::plan::Command, Refusal> {
    let max_bytes = hexagon::max_tensor_bytes(caps.address_bytes);
    if hexagon::too_large(operation, max_bytes).is_some() {
        return Err(hexagon::TOO_LARGE);
    }
    hexagon::plan::question(VTCM_BYTES, operation, true)
}

/// Returns an operand whose rows follow each other.
fn operand(name: &str, dtype: DType, ne: [usize; 4]) -> Tensor<'_> {
    let step = dtype.step_bytes().unwrap_or(1);
    let row = dtype.row_bytes(ne[0]).unwrap_or(ne[0]);
    // A file may combine any numbers with a dimension of 0, so products saturate.
    let matrix = row.saturating_mul(ne[1]);
    Tensor {
        name,
        dtype,
        format: None,
        shape: Shape {
            ne,
            nb: [step, row, matrix, matrix.saturating_mul(ne[2])],
        },
        place: Place::Unknown,
        role: Role::Weights,
        memory: None,
        packed_offset: 0,
        dequantize: Some(&Exists),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(name: &str, dtype: GgmlType, [k, n]: [usize; 2]) -> TensorInfo {
        let bytes = dtype.row_bytes(k).unwrap() * n;
        TensorInfo {
            name: name.into(),
            dtype,
            ne: [k, n, 1, 1],
            dims: 2,
            range: 0..bytes,
        }
    }

    /// Regression: BF16 is packed as FP16, and F32 is not packed, but the reason claimed that the
    /// NPU accepts neither.
    #[test]
    fn a_bf16_weight_that_stays_on_the_cpu_has_its_own_reason() {
        let chip = Chip::new("rk3588", &Config::from_lookup(|_| None).unwrap()).unwrap();
        let of = |dtype, shape| chip.form(&tensor("output.weight", dtype, shape), false);
        assert!(of(GgmlType::BF16, [2048, 1024]).is_ok());
        let refusal = of(GgmlType::BF16, [1, 1024]).unwrap_err();
        assert_eq!(
            refusal,
            "weights of this type, size or name stay on the CPU"
        );
        let refusal = of(GgmlType::F32, [2048, 1024]).unwrap_err();
        assert_eq!(refusal, "the NPU takes no F32 weights");
    }

    /// The largest tensor is 2/3 of a session's addresses, and at most the largest number of
    /// 32 bits with a sign: V73 has 3000 MiB of addresses, others have more than 3 GiB.
    #[test]
    fn hexagon_leaves_weights_to_the_cpu_that_are_larger_than_a_buffer() {
        let hexagon = |name| Chip::Hexagon(hexagon::caps::by_name(name).unwrap());
        let large = tensor("output.weight", GgmlType::F16, [4096, 256_032]);
        assert_eq!(large.range.len(), 2_097_414_144);
        assert!(hexagon("hexagon-v75").form(&large, false).is_ok());
        let refusal = hexagon("hexagon-v73").form(&large, false).unwrap_err();
        assert_eq!(refusal, hexagon::TOO_LARGE);
        // BF16 is packed as F16, and its reason names the size, too.
        let halved = tensor("output.weight", GgmlType::BF16, [4096, 262_144]);
        let refusal = hexagon("hexagon-v81").form(&halved, false).unwrap_err();
        assert_eq!(refusal, hexagon::TOO_LARGE);
        // IQ1_S has no layout here, and Q8_0 needs more bytes than the file.
        let iq1_s = GgmlType::from_number(19).unwrap();
        let grown = tensor("output.weight", iq1_s, [4096, 524_288]);
        assert!(grown.range.len() < 500_000_000);
        let refusal = hexagon("hexagon-v79").form(&grown, false).unwrap_err();
        assert_eq!(refusal, hexagon::TOO_LARGE);
    }
}
