//! The questions of llama.cpp's loader: the operation with which it asks for a weight's place, and
//! the place that the weight must get so that no graph is cut at its real operation.

use ggml_rust_npu::backend::Device;
use ggml_rust_npu::graph::{Op, Operation, PARAMS, Place, Role, Tensor, sources};
use ggml_rust_npu::hexagon::HexDevice;
use ggml_rust_npu::tensor::{DType, Format};

use crate::common::{Kind, device, tensor};

const F: DType = DType::F32;
const I: DType = DType::I32;

/// Location of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lands {
    Shared,
    Packed,
    Cpu,
}

/// A question as `weight_buft_supported` of llama.cpp builds it.
struct Question {
    op: Op,
    params: [i32; PARAMS],
    dst: Tensor<'static>,
    src: Vec<Tensor<'static>>,
    /// Index of the weight.
    weight: usize,
}

impl Question {
    fn new(op: Op, weight: usize, src: &[Tensor<'static>], dst: [usize; 4]) -> Self {
        Self {
            op,
            params: [0; PARAMS],
            dst: Tensor {
                role: Role::Result,
                ..unpacked(F, dst)
            },
            src: src.to_vec(),
            weight,
        }
    }

    /// Asks for the buffer types of a device in the loader's order: ggml's default one, further
    /// ones, the CPU's.
    fn ask(&self, device: &HexDevice) -> Lands {
        for (place, lands) in [(Place::Host, Lands::Shared), (Place::Packed, Lands::Packed)] {
            let mut src = self.src.clone();
            src[self.weight].place = place;
            let operation = Operation {
                op: self.op,
                params: self.params,
                dst: self.dst,
                src: sources(&src),
            };
            if device.supports(&operation) {
                return lands;
            }
        }
        Lands::Cpu
    }
}

/// A tensor that has no memory yet. Only the weight has a buffer, which is empty.
fn unpacked(dtype: DType, ne: [usize; 4]) -> Tensor<'static> {
    Tensor {
        place: Place::Unknown,
        ..tensor("", dtype, ne, 0)
    }
}

fn q8_0(ne: [usize; 4]) -> Tensor<'static> {
    blocks(Format::Q8_0, ne)
}

fn blocks(format: Format, ne: [usize; 4]) -> Tensor<'static> {
    Tensor {
        format: Some(format),
        ..unpacked(Kind::Blocks(format).dtype(), ne)
    }
}

fn mul_mat(w: Tensor<'static>) -> Question {
    let [k, n, n2, n3] = w.shape.ne;
    let act = unpacked(F, [k, 512, n2, n3]);
    Question::new(Op::MulMat, 0, &[w, act], [n, 512, n2, n3])
}

/// A sum, product or quotient of `a` and a weight.
fn binary(op: Op, w: [usize; 4], a: [usize; 4]) -> Question {
    Question::new(op, 1, &[unpacked(F, a), unpacked(F, w)], a)
}

fn rope(n_head: usize) -> Question {
    let ne = [128, n_head, 512, 1];
    let positions = unpacked(I, [512, 1, 1, 1]);
    let factors = unpacked(F, [64, 1, 1, 1]);
    Question::new(Op::Rope, 2, &[unpacked(F, ne), positions, factors], ne)
}

/// Decays of 128 heads with states of 16 columns.
fn scan(columns: usize, rows: usize) -> Question {
    let src = [
        unpacked(F, [16, rows, 128, 3]),
        unpacked(F, [rows, 128, 512, 3]),
        unpacked(F, [128, 512, 3, 1]),
        unpacked(F, [columns, 128, 1, 1]),
        unpacked(F, [16, 1, 512, 3]),
        unpacked(F, [16, 1, 512, 3]),
        unpacked(I, [3, 1, 1, 1]),
    ];
    let elems = rows * 128 * 512 * 3 + 16 * rows * 128 * 3;
    let mut question = Question::new(Op::SsmScan, 3, &src, [elems, 1, 1, 1]);
    question.params[0] = 1;
    question
}

#[test]
fn a_weight_lands_where_its_operation_runs() {
    let device = device();
    let bias = [256, 1, 1, 1];
    let ids = unpacked(I, [512, 1, 1, 1]);
    let chosen = unpacked(I, [2, 512, 1, 1]);
    let slots = unpacked(F, [256, 2, 512, 1]);
    let experts = q8_0([256, 384, 8, 1]);
    let by_expert = [384, 2, 512, 1];
    let mut window = Question::new(
        Op::Im2col,
        0,
        &[
            unpacked(DType::F16, [3, 256, 384, 1]),
            unpacked(F, [256, 256, 1, 1]),
        ],
        [768, 254, 1, 1],
    );
    (window.params[0], window.params[4]) = (1, 1);
    window.dst = unpacked(DType::F16, window.dst.shape.ne);
    let mut scale = Question::new(Op::Scale, 0, &[unpacked(F, bias)], bias);
    scale.params[0] = 1.0_f32.to_bits().cast_signed();
    // The loader invents sizes: every dimension is 123, whatever the weight's size.
    let all = unpacked(F, [123, 123, 123, 1]);
    let first = unpacked(F, [64, 32, 1, 1]);
    let states = unpacked(F, [123, 123, 123, 123]);
    let wkv6 = Question::new(
        Op::RwkvWkv6,
        3,
        &[all, all, all, first, all, states],
        [123 * 123, 123 + 123 * 123, 1, 1],
    );
    let conv = [unpacked(F, [515, 256, 3, 1]), unpacked(F, [4, 256, 1, 1])];
    for (what, question, lands) in [
        ("weights", mul_mat(q8_0([256, 384, 1, 1])), Lands::Packed),
        (
            "F16 weights",
            mul_mat(unpacked(DType::F16, [256, 384, 1, 1])),
            Lands::Packed,
        ),
        (
            "a router",
            mul_mat(unpacked(F, [256, 8, 1, 1])),
            Lands::Shared,
        ),
        (
            "experts",
            Question::new(Op::MulMatId, 0, &[experts, slots, chosen], by_expert),
            Lands::Packed,
        ),
        (
            "a table of rows",
            Question::new(
                Op::GetRows,
                0,
                &[q8_0([256, 128, 1, 1]), ids],
                [256, 512, 1, 1],
            ),
            Lands::Shared,
        ),
        (
            "a table of rows in super-blocks",
            Question::new(
                Op::GetRows,
                0,
                &[blocks(Format::Q4K, [256, 128, 1, 1]), ids],
                [256, 512, 1, 1],
            ),
            Lands::Shared,
        ),
        ("a bias", binary(Op::Add, bias, bias), Lands::Shared),
        (
            "biases of experts",
            Question::new(
                Op::AddId,
                1,
                &[slots, unpacked(F, [256, 8, 1, 1]), chosen],
                [256, 2, 512, 1],
            ),
            Lands::Shared,
        ),
        (
            "a norm's weights",
            binary(Op::Mul, bias, bias),
            Lands::Shared,
        ),
        (
            "an activation's divisor",
            binary(Op::Div, bias, bias),
            Lands::Shared,
        ),
        // The loader does not know the rotation, so it asks with no dimensions and a base of 0.
        ("factors of frequencies", rope(4), Lands::Shared),
        ("factors, first layer without heads", rope(0), Lands::Shared),
        (
            "a convolution of states",
            Question::new(Op::SsmConv, 1, &conv, [256, 512, 3, 1]),
            Lands::Shared,
        ),
        ("decays, one for a head", scan(1, 64), Lands::Shared),
        ("decays of each state", scan(16, 1), Lands::Shared),
        ("a first token's factor", wkv6, Lands::Shared),
        ("a convolution", window, Lands::Shared),
        ("sinks", scale, Lands::Shared),
    ] {
        assert_eq!(question.ask(&device), lands, "{what}");
    }
}

/// Caches and states without rows. Regression: the graphs of LFM2 were split at them.
#[test]
fn a_node_without_elements_is_claimed_whatever_it_is() {
    let device = device();
    let empty = [256, 0, 1, 1];
    for op in [Op::Cpy, Op::GetRows, Op::Add, Op::MulMat] {
        let src = [unpacked(F, empty), unpacked(F, empty)];
        assert_ne!(Question::new(op, 0, &src, empty).ask(&device), Lands::Cpu);
    }
    // The result has elements, but none of them is changed.
    let src = [unpacked(F, empty), unpacked(DType::I64, [0, 1, 1, 1])];
    let set = Question::new(Op::SetRows, 0, &src, [256, 8, 1, 1]);
    assert_ne!(set.ask(&device), Lands::Cpu);
}
