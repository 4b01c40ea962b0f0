//! Graphs of random operations: each step chooses an operation and operands that fit it, among the
//! inputs and the results so far.

use std::ffi::CStr;

use ggml_rust_npu::abi::*;
use ggml_rust_npu::dequantize;
use ggml_rust_npu::gguf::GgmlType;
use ggml_rust_npu::reference;
use ggml_rust_npu_fuzz::Input;
use ggml_rust_npu_fuzz::border::*;
use test_kit::Numbers;

use crate::memory::Memory;

/// Most nodes of a graph.
pub const NODES: usize = 8;
/// Most values of a tensor.
pub const LARGEST: usize = 1 << 14;

#[derive(Clone, Copy, Debug)]
pub enum Op {
    MulMat,
    MulMatId { used: usize },
    Add,
    Sub,
    Mul,
    Unary(fn(f64) -> f64, f64),
    Scale(f32, f32),
    Clamp(f32, f32),
    Norm { centered: bool },
    L2Norm,
    SoftMax(f32),
    Rope { halves: bool },
    Glu(fn(f64) -> f64),
    SumRows,
    Cont,
    Concat(usize),
    GetRows,
}

/// A node, in ggml's form and in the reference's.
pub struct Step {
    pub op: Op,
    pub name: &'static CStr,
    pub node: Node,
    /// Numbers of its operands among the values; weights are not counted.
    pub from: Vec<usize>,
    pub weights: Vec<f32>,
    pub ints: Vec<i32>,
}

pub struct Value {
    pub ne: [usize; 4],
    pub tensor: Tensor,
    pub role: u32,
    /// A later result uses its memory, and no step after that one reads it.
    pub is_gone: bool,
}

impl Value {
    pub fn count(&self) -> usize {
        self.ne.iter().product()
    }
}
fn relu(x: f64) -> f64 {
    x.max(0.0)
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// A function of one number.
type UnaryFn = fn(f64) -> f64;

/// Unary operations with their largest slopes.
const UNARY: [(&CStr, UnaryFn, f64); 9] = [
    (c"SILU", reference::silu, 1.1),
    (c"GELU", reference::gelu, 1.2),
    (c"RELU", relu, 1.0),
    (c"SIGMOID", sigmoid, 0.25),
    (c"TANH", f64::tanh, 1.0),
    (c"NEG", std::ops::Neg::neg, 1.0),
    (c"ABS", f64::abs, 1.0),
    (c"SOFTPLUS", softplus, 1.0),
    (c"HARDSIGMOID", hardsigmoid, 1.0),
];

fn softplus(x: f64) -> f64 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

fn hardsigmoid(x: f64) -> f64 {
    ((x + 3.0) / 6.0).clamp(0.0, 1.0)
}

const GATES: [(&CStr, UnaryFn); 3] = [
    (c"SWIGLU", reference::silu),
    (c"GEGLU", reference::gelu),
    (c"REGLU", relu),
];

/// Added by normalizations.
pub const EPS: f32 = 1e-5;
/// Base of the angles of ROPE.
pub const BASE: f32 = 10_000.0;

pub struct Graph {
    pub device: usize,
    pub memory: Memory,
    pub weights: Vec<Buffer>,
    pub values: Vec<Value>,
    pub inputs: usize,
    pub steps: Vec<Step>,
}

/// Returns weights of a type, and their values.
fn weights(kind: Kind, count: usize, numbers: &mut Numbers) -> (Vec<u8>, Vec<f32>) {
    if kind.dtype == NPU_DTYPE_F16 {
        let halves: Vec<half::f16> = numbers
            .floats(count)
            .into_iter()
            .map(half::f16::from_f32)
            .collect();
        let values = halves.iter().map(|x| x.to_f32()).collect();
        return (bytemuck::cast_slice(&halves).to_vec(), values);
    }
    let mut bytes = Vec::new();
    for _ in 0..count / 32 {
        let is_q4 = kind.format == NPU_FORMAT_Q4_0;
        let scale = numbers.float() / if is_q4 { 8.0 } else { 128.0 };
        bytes.extend(half::f16::from_f32(scale).to_le_bytes());
        for _ in 2..kind.block_bytes {
            let byte = (numbers.bits() >> 20) as u8;
            // ggml's quantizers do not write -128.
            bytes.push(if is_q4 || byte != 128 { byte } else { 127 });
        }
    }
    let dtype = if kind.format == NPU_FORMAT_Q4_0 {
        GgmlType::Q4_0
    } else {
        GgmlType::Q8_0
    };
    let mut values = vec![0.0; count];
    dequantize::of(dtype)
        .expect("a quantized type")
        .dequantize(&bytes, &mut values);
    (bytes, values)
}

impl Graph {
    pub fn new(device: usize, bytes: usize) -> Self {
        Self {
            device,
            memory: Memory::new(device, bytes),
            weights: Vec::new(),
            values: Vec::new(),
            inputs: 0,
            steps: Vec::new(),
        }
    }

    pub fn value(&mut self, ne: [usize; 4], role: u32) -> usize {
        let tensor = self.memory.place(Tensor::dense(F32, ne), role);
        self.values.push(Value {
            ne,
            tensor,
            role,
            is_gone: false,
        });
        self.values.len() - 1
    }

    /// Returns the numbers of the values that can be read.
    fn there(&self) -> Vec<usize> {
        (0..self.values.len())
            .filter(|at| !self.values[*at].is_gone)
            .collect()
    }

    /// Adds a result. As with ggml's allocator, it may be in the memory of one that is no longer
    /// read: also in place of the first operand, for operations that ggml computes in place.
    fn result(&mut self, op: Op, ne: [usize; 4], from: &[usize], input: &mut Input) -> usize {
        let in_place = matches!(
            op,
            Op::Add
                | Op::Sub
                | Op::Mul
                | Op::Unary(..)
                | Op::Scale(..)
                | Op::Norm { centered: false }
                | Op::SoftMax(_)
                | Op::Rope { .. }
        );
        let fits = |at: &usize| {
            let value = &self.values[*at];
            let free = !from.contains(at) || in_place && from[0] == *at && value.ne == ne;
            let room = ne.iter().product::<usize>() <= value.count();
            value.role == NPU_ROLE_RESULT && free && room
        };
        let old: Vec<usize> = self.there().into_iter().filter(fits).collect();
        if old.is_empty() || !input.byte().is_multiple_of(4) {
            return self.value(ne, NPU_ROLE_RESULT);
        }
        let old = &mut self.values[input.one_of(&old)];
        old.is_gone = true;
        let tensor = Tensor {
            place: old.tensor.place,
            data: old.tensor.data,
            buffer: old.tensor.buffer,
            role: NPU_ROLE_RESULT,
            ..Tensor::dense(F32, ne)
        };
        self.values.push(Value {
            ne,
            tensor,
            role: NPU_ROLE_RESULT,
            is_gone: false,
        });
        self.values.len() - 1
    }

    /// An operand of integers.
    fn ints(&mut self, ne: [usize; 4], ints: &[i32]) -> Tensor {
        let tensor = self.memory.place(Tensor::dense(I32, ne), NPU_ROLE_STATE);
        self.memory.write(&tensor, bytemuck::cast_slice(ints));
        tensor
    }

    fn weight(&mut self, kind: Kind, ne: [usize; 4], numbers: &mut Numbers) -> (Tensor, Vec<f32>) {
        let (bytes, values) = weights(kind, ne.iter().product(), numbers);
        let tensor = Tensor::dense(kind, ne);
        let buffer =
            Buffer::new(self.device, alloc_size(self.device, &tensor), false).expect("memory");
        let tensor = buffer.tensor(tensor, 0, NPU_ROLE_WEIGHTS);
        assert_eq!(buffer.set(&tensor, &bytes, 0), NPU_STATUS_OK);
        let (status, back) = buffer.get(&tensor, 0, bytes.len());
        assert!(
            status == NPU_STATUS_OK && back == bytes,
            "weights are not those that were written"
        );
        self.weights.push(buffer);
        (tensor, values)
    }

    /// Another value of the same shape as `a`, or `a`.
    fn partner(&self, a: usize, input: &mut Input) -> usize {
        let ne = self.values[a].ne;
        let mut same = self.there();
        same.retain(|at| self.values[*at].ne == ne);
        input.one_of(&same)
    }

    /// Adds a node, if there is room for its result.
    pub fn step(&mut self, input: &mut Input, numbers: &mut Numbers) {
        let kind = input.byte() % 16;
        let there = self.there();
        // The newest value always exists.
        let a = if input.byte().is_multiple_of(2) {
            self.values.len() - 1
        } else {
            input.one_of(&there)
        };
        let ne = self.values[a].ne;
        let [k, m, planes, _] = ne;
        let (mut from, mut extra) = (vec![a], None);
        let (mut factors, mut chosen) = (Vec::new(), Vec::new());
        let mut params = [0; NPU_OP_PARAMS];
        let bits = |x: f32| x.to_bits().cast_signed();
        let (op, name, dst_ne): (Op, &CStr, [usize; 4]) = match kind {
            0..=3 => {
                let n = input.one_of(&[32, 40, 64, 96, 33]);
                let kind = input.one_of(&[F16, Q8_0, Q4_0]);
                if k % 32 != 0 {
                    return;
                }
                let shared = if input.byte().is_multiple_of(4) {
                    planes
                } else {
                    1
                };
                let (tensor, values) = self.weight(kind, [k, n, shared, 1], numbers);
                (extra, factors) = (Some(tensor), values);
                (Op::MulMat, c"MUL_MAT", [n, m, planes, 1])
            }
            4 => {
                let (n, experts) = (input.one_of(&[32, 64]), 1 + input.below(5));
                let kind = input.one_of(&[F16, Q8_0, Q4_0]);
                let used = m * (1 + input.below(2));
                if k % 32 != 0 || used > experts {
                    return;
                }
                let (tensor, values) = self.weight(kind, [k, n, experts, 1], numbers);
                (extra, factors) = (Some(tensor), values);
                // A token uses each expert at most once.
                for _ in 0..planes {
                    let first = input.below(experts);
                    chosen.extend(
                        (0..used)
                            .map(|slot| i32::try_from((first + slot) % experts).expect("small")),
                    );
                }
                (Op::MulMatId { used }, c"MUL_MAT_ID", [n, used, planes, 1])
            }
            5 => {
                from.push(self.partner(a, input));
                let (op, name) =
                    input.one_of(&[(Op::Add, c"ADD"), (Op::Sub, c"SUB"), (Op::Mul, c"MUL")]);
                (op, name, ne)
            }
            6 => {
                // A single row, or a single number, for all rows: the first input has it in its
                // first row.
                let row = self.value([k, 1, 1, 1], NPU_ROLE_WEIGHTS);
                let values = numbers.floats(k);
                let tensor = self.values[row].tensor;
                self.memory.write(&tensor, bytemuck::cast_slice(&values));
                from.push(row);
                let (op, name) = input.one_of(&[(Op::Add, c"ADD"), (Op::Mul, c"MUL")]);
                (op, name, ne)
            }
            7 => {
                let (name, function, slope) = input.one_of(&UNARY);
                (Op::Unary(function, slope), name, ne)
            }
            8 => {
                let (scale, bias) = (
                    numbers.float() * 2.0,
                    if input.byte().is_multiple_of(2) {
                        0.0
                    } else {
                        numbers.float()
                    },
                );
                (params[0], params[1]) = (bits(scale), bits(bias));
                (Op::Scale(scale, bias), c"SCALE", ne)
            }
            9 => {
                let low = numbers.float();
                let high = low + numbers.float().abs();
                (params[0], params[1]) = (bits(low), bits(high));
                (Op::Clamp(low, high), c"CLAMP", ne)
            }
            10 => {
                params[0] = bits(EPS);
                match input.below(3) {
                    0 => (Op::Norm { centered: true }, c"NORM", ne),
                    1 => (Op::L2Norm, c"L2_NORM", ne),
                    _ => (Op::Norm { centered: false }, c"RMS_NORM", ne),
                }
            }
            11 => {
                let scale = numbers.float().abs();
                params[0] = bits(scale);
                (Op::SoftMax(scale), c"SOFT_MAX", ne)
            }
            12 => {
                if k % 2 != 0 {
                    return;
                }
                let halves = input.byte().is_multiple_of(2);
                (params[1], params[2]) =
                    (i32::try_from(k).expect("small"), if halves { 2 } else { 0 });
                (params[5], params[6], params[8]) = (bits(BASE), bits(1.0), bits(1.0));
                chosen.extend((0..planes).map(|_| i32::from(input.byte())));
                (Op::Rope { halves }, c"ROPE", ne)
            }
            13 => {
                from.push(self.partner(a, input));
                let (name, gate) = input.one_of(&GATES);
                (Op::Glu(gate), name, ne)
            }
            14 => match input.below(3) {
                0 => (Op::SumRows, c"SUM_ROWS", [1, m, planes, 1]),
                1 => (Op::Cont, c"CONT", ne),
                _ => {
                    let dim = input.below(3);
                    from.push(self.partner(a, input));
                    params[0] = i32::try_from(dim).expect("small");
                    let mut dst = ne;
                    dst[dim] *= 2;
                    (Op::Concat(dim), c"CONCAT", dst)
                }
            },
            _ => {
                let rows = 1 + input.below(6);
                chosen.extend(
                    (0..rows * planes).map(|_| i32::try_from(input.below(m)).expect("small")),
                );
                (Op::GetRows, c"GET_ROWS", [k, rows, planes, 1])
            }
        };
        if dst_ne.iter().product::<usize>() > LARGEST {
            return;
        }
        let mut src: Vec<Tensor> = extra.into_iter().collect();
        src.extend(from.iter().map(|at| self.values[*at].tensor));
        if !chosen.is_empty() {
            let shape = match op {
                Op::Rope { .. } => [planes, 1, 1, 1],
                _ => [chosen.len() / planes, planes, 1, 1],
            };
            src.push(self.ints(shape, &chosen));
        }
        let dst = self.result(op, dst_ne, &from, input);
        let mut node = node(name, self.values[dst].tensor, &src);
        node.op_params = params;
        self.steps.push(Step {
            op,
            name,
            node,
            from,
            weights: factors,
            ints: chosen,
        });
        // The values are first the inputs, then one result for each step; rows that were added in
        // between are not among them.
        let last = self.steps.len() - 1;
        self.steps[last].from.push(dst);
    }

    /// Marks results that only the next node reads, for operations that may be joined into one.
    pub fn mark(&mut self, input: &mut Input) {
        for at in 0..self.steps.len().saturating_sub(1) {
            let dst = *self.steps[at].from.last().expect("its result");
            let readers: Vec<usize> = (0..self.steps.len())
                .flat_map(|step| {
                    let from = &self.steps[step].from;
                    let reads = from[..from.len() - 1].iter().filter(|from| **from == dst);
                    reads.map(move |_| step)
                })
                .collect();
            let (first, second) = (self.steps[at].op, self.steps[at + 1].op);
            let fuses = match first {
                Op::Norm { .. } | Op::L2Norm => matches!(second, Op::Mul | Op::Add),
                Op::MulMat => matches!(second, Op::Add | Op::Glu(..)),
                Op::Mul => matches!(second, Op::Add),
                _ => false,
            };
            self.steps[at].node.feeds_next =
                fuses && readers == [at + 1] && !input.byte().is_multiple_of(4);
        }
    }

    /// Fills the inputs. One element of the first input is `odd`.
    pub fn fill(&mut self, numbers: &mut Numbers, odd: Option<f32>) {
        for at in 0..self.inputs {
            let mut values = numbers.floats(self.values[at].count());
            if let (0, Some(odd)) = (at, odd) {
                let index = numbers.bits() as usize % values.len();
                values[index] = odd;
            }
            let tensor = self.values[at].tensor;
            self.memory.write(&tensor, bytemuck::cast_slice(&values));
        }
    }

    /// Spoils all results, so that an old result cannot pass for a new one.
    pub fn spoil(&mut self) {
        for step in 0..self.steps.len() {
            let dst = *self.steps[step].from.last().expect("its result");
            let (tensor, count) = (self.values[dst].tensor, self.values[dst].count());
            self.memory
                .write(&tensor, bytemuck::cast_slice(&vec![f32::NAN; count]));
        }
    }
}
