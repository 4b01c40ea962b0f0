//! Graphs of random operations on both families' stand-ins, through the C border: each result is compared with the reference,
//! computed in f64 from the operands that the device had, as far as they are still there. Nodes that a device leaves to the CPU are computed here, as ggml's
//! scheduler would have it, so graphs are cut into submissions at any place. Then the same graph is computed again, with
//! other inputs, from memory where the device remembers it.
//!
//! ```text
//! input = device, shape, seed of the numbers, { operation, operands, choices }
//! ```
#![no_main]

use std::ffi::CStr;

use ggml_rust_npu::abi::*;
use ggml_rust_npu::dequantize;
use ggml_rust_npu::gguf::GgmlType;
use ggml_rust_npu::reference;
use ggml_rust_npu_fuzz::Input;
use ggml_rust_npu_fuzz::border::*;
use libfuzzer_sys::fuzz_target;

/// Most nodes of a graph.
const NODES: usize = 8;
/// Most values of a tensor.
const LARGEST: usize = 1 << 14;

/// Uniform numbers in [-1, 1).
struct Numbers(u64);

impl Numbers {
    // SOURCE: splitmix64, Steele, Lea and Flood 2014.
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn float(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.float()).collect()
    }
}

/// Memory of tensors, on the device or on the host.
struct Memory {
    device: usize,
    shared: Option<Buffer>,
    host: Vec<f32>,
    used: usize,
}

impl Memory {
    fn new(device: usize, bytes: usize) -> Self {
        Self {
            device,
            shared: (device == HEX).then(|| Buffer::new(HEX, bytes, true).expect("memory")),
            host: if device == RK {
                vec![f32::NAN; bytes / 4]
            } else {
                Vec::new()
            },
            used: 0,
        }
    }

    fn place(&mut self, tensor: Tensor, role: u32) -> Tensor {
        let at = self.used;
        let bytes = tensor.nb[3] * tensor.ne[3].unsigned_abs();
        self.used += usize::try_from(bytes).expect("small").next_multiple_of(128);
        match &self.shared {
            Some(buffer) => buffer.tensor(tensor, at, role),
            None => Tensor {
                place: NPU_PLACE_HOST,
                role,
                data: self.host[at / 4..].as_mut_ptr().cast(),
                ..tensor
            },
        }
    }

    fn write(&mut self, tensor: &Tensor, bytes: &[u8]) {
        match &self.shared {
            Some(buffer) => assert_eq!(buffer.set(tensor, bytes, 0), NPU_STATUS_OK),
            None => {
                let at = tensor.data.addr() - self.host.as_ptr().addr();
                bytemuck::cast_slice_mut(&mut self.host)[at..][..bytes.len()]
                    .copy_from_slice(bytes);
            }
        }
    }

    fn read(&self, tensor: &Tensor, count: usize) -> Vec<f32> {
        match &self.shared {
            Some(buffer) => {
                let (status, bytes) = buffer.get(tensor, 0, count * 4);
                assert_eq!(status, NPU_STATUS_OK);
                bytes
                    .as_chunks()
                    .0
                    .iter()
                    .map(|word| f32::from_le_bytes(*word))
                    .collect()
            }
            None => {
                self.host[(tensor.data.addr() - self.host.as_ptr().addr()) / 4..][..count].to_vec()
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Op {
    MulMat,
    MulMatId { used: usize, experts: usize },
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

/// A node: what it is for ggml, and for the reference.
struct Step {
    op: Op,
    name: &'static CStr,
    node: Node,
    /// Numbers of its operands among the values; weights are no values.
    from: Vec<usize>,
    weights: Vec<f32>,
    ints: Vec<i32>,
}

struct Value {
    ne: [usize; 4],
    tensor: Tensor,
    role: u32,
    /// A later result lies in its memory: no step after that one reads it.
    is_gone: bool,
}

impl Value {
    fn count(&self) -> usize {
        self.ne.iter().product()
    }
}

/// The result of a step, and the error that each value may have.
struct Want {
    values: Vec<f64>,
    errors: Vec<f64>,
}

/// Five standard deviations of a rounding to a grid, for a grid of 1.
const ROUNDING: f64 = 5.0 * 0.289;
/// Distance of neighbours in FP16, for numbers of 1 to 2; and the smallest normal number.
const HALF_STEP: f64 = 1.0 / 1024.0;
const HALF_SMALLEST: f64 = 1.0 / 16384.0;

fn relu(x: f64) -> f64 {
    x.max(0.0)
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Unary operations with their largest slopes.
const UNARY: [(&CStr, fn(f64) -> f64, f64); 9] = [
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

const GATES: [(&CStr, fn(f64) -> f64); 3] = [
    (c"SWIGLU", reference::silu),
    (c"GEGLU", reference::gelu),
    (c"REGLU", relu),
];

const EPS: f32 = 1e-5;
const BASE: f32 = 10_000.0;

struct Graph {
    device: usize,
    memory: Memory,
    weights: Vec<Buffer>,
    values: Vec<Value>,
    inputs: usize,
    steps: Vec<Step>,
}

/// Weights of a type, and what they stand for.
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
    fn new(device: usize, bytes: usize) -> Self {
        Self {
            device,
            memory: Memory::new(device, bytes),
            weights: Vec::new(),
            values: Vec::new(),
            inputs: 0,
            steps: Vec::new(),
        }
    }

    fn value(&mut self, ne: [usize; 4], role: u32) -> usize {
        let tensor = self.memory.place(Tensor::dense(F32, ne), role);
        self.values.push(Value {
            ne,
            tensor,
            role,
            is_gone: false,
        });
        self.values.len() - 1
    }

    /// Numbers of the values that can be read.
    fn there(&self) -> Vec<usize> {
        (0..self.values.len())
            .filter(|at| !self.values[*at].is_gone)
            .collect()
    }

    /// A result, perhaps in the memory of one that nothing reads any more, as ggml's allocator has it: also in place of the
    /// first operand, for operations that ggml computes so.
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
        if old.is_empty() || input.byte() % 4 != 0 {
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
    fn step(&mut self, input: &mut Input, numbers: &mut Numbers) {
        let kind = input.byte() % 16;
        let there = self.there();
        // The newest one is always there.
        let a = if input.byte() % 2 == 0 {
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
                let shared = if input.byte() % 4 == 0 { planes } else { 1 };
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
                // A token uses an expert once.
                for _ in 0..planes {
                    let first = input.below(experts);
                    chosen.extend(
                        (0..used)
                            .map(|slot| i32::try_from((first + slot) % experts).expect("small")),
                    );
                }
                (
                    Op::MulMatId { used, experts },
                    c"MUL_MAT_ID",
                    [n, used, planes, 1],
                )
            }
            5 => {
                from.push(self.partner(a, input));
                let (op, name) =
                    input.one_of(&[(Op::Add, c"ADD"), (Op::Sub, c"SUB"), (Op::Mul, c"MUL")]);
                (op, name, ne)
            }
            6 => {
                // One row, or one number, for all: the first input has it in its first row.
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
                    if input.byte() % 2 == 0 {
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
                let halves = input.byte() % 2 == 0;
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
        // Results are in the order of steps behind the inputs; rows that were added in between are none.
        let last = self.steps.len() - 1;
        self.steps[last].from.push(dst);
    }

    /// Marks results that only the next node reads, of operations that may become one.
    fn mark(&mut self, input: &mut Input) {
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
            self.steps[at].node.feeds_next = fuses && readers == [at + 1] && input.byte() % 4 != 0;
        }
    }

    fn fill(&mut self, numbers: &mut Numbers) {
        for at in 0..self.inputs {
            let values = numbers.floats(self.values[at].count());
            let tensor = self.values[at].tensor;
            self.memory.write(&tensor, bytemuck::cast_slice(&values));
        }
    }

    /// Spoils all results, so that none is taken for a new one.
    fn spoil(&mut self) {
        for step in 0..self.steps.len() {
            let dst = *self.steps[step].from.last().expect("its result");
            let (tensor, count) = (self.values[dst].tensor, self.values[dst].count());
            self.memory
                .write(&tensor, bytemuck::cast_slice(&vec![f32::NAN; count]));
        }
    }

    fn operand(&self, value: usize, wanted: &[Option<Want>]) -> (Vec<f32>, f64) {
        match &wanted[value] {
            // It was not stored, or is not known to be.
            Some(want) => {
                let error = want.errors.iter().copied().fold(0.0, f64::max);
                (want.values.iter().map(|x| *x as f32).collect(), error)
            }
            None => {
                let value = &self.values[value];
                (self.memory.read(&value.tensor, value.count()), 0.0)
            }
        }
    }

    /// Returns the result of a step.
    fn reference(&self, step: &Step, wanted: &[Option<Want>]) -> Want {
        let (x, x_error) = self.operand(step.from[0], wanted);
        let (y, y_error) = match step.from.len() {
            3.. => self.operand(step.from[1], wanted),
            _ => (Vec::new(), 0.0),
        };
        let error = x_error + y_error;
        let ne = self.values[step.from[0]].ne;
        let [k, m, planes, _] = ne;
        let double = |x: &f32| f64::from(*x);
        let largest = |values: &[f32]| {
            values
                .iter()
                .fold(0.0, |most: f64, x| most.max(double(x).abs()))
        };
        let pairs = |f: &dyn Fn(f64, f64) -> f64| -> Vec<f64> {
            (x.iter().enumerate())
                .map(|(i, x)| f(double(x), double(&y[i % y.len()])))
                .collect()
        };
        let map = |f: &dyn Fn(f64) -> f64| -> Vec<f64> { x.iter().map(|x| f(double(x))).collect() };
        let most = largest(&x).max(largest(&y));
        // Functions differ in their last bits, sums in their order.
        let plain = |values: Vec<f64>, error: f64| Want {
            errors: values
                .iter()
                .map(|v| error + 5e-4 * v.abs() + 1e-5 * most + 1e-9)
                .collect(),
            values,
        };
        let exact = |values: Vec<f64>| Want {
            errors: vec![error; values.len()],
            values,
        };
        match step.op {
            Op::MulMat | Op::MulMatId { .. } => self.product(step, &x, error, ne),
            Op::Add => plain(pairs(&|x, y| x + y), error),
            Op::Sub => plain(pairs(&|x, y| x - y), error),
            Op::Mul => plain(
                pairs(&|x, y| x * y),
                x_error * largest(&y) + y_error * largest(&x),
            ),
            Op::Unary(f, slope) => plain(map(&f), error * slope),
            Op::Scale(scale, bias) => {
                let [scale, bias] = [scale, bias].map(f64::from);
                plain(map(&|x| x * scale + bias), error * scale.abs())
            }
            Op::Clamp(low, high) => exact(map(&|x| x.clamp(double(&low), double(&high)))),
            Op::Norm { centered } => {
                plain(reference::norm(&x, k, double(&EPS), centered), error * 1e3)
            }
            Op::L2Norm => plain(reference::l2_norm(&x, k, double(&EPS)), error * 2e5),
            Op::SoftMax(scale) => {
                let mask = vec![0.0; x.len()];
                plain(reference::soft_max(&x, &mask, k, double(&scale)), error)
            }
            // An angle of F32 has an error of its own after many turns.
            Op::Rope { halves } => plain(
                reference::rope(&x, k, m, &step.ints, double(&BASE), halves),
                2.0 * error + 1e-4 * most,
            ),
            Op::Glu(gate) => plain(
                pairs(&|x, y| gate(x) * y),
                1.2 * (x_error * largest(&y) + y_error * largest(&x)),
            ),
            Op::SumRows => {
                let sums = x
                    .chunks_exact(k)
                    .map(|row| row.iter().map(double).sum())
                    .collect();
                plain(sums, (error + 1e-6 * most) * k as f64)
            }
            Op::Cont => exact(map(&|x| x)),
            Op::Concat(dim) => {
                let inner: usize = ne[..=dim].iter().product();
                let parts = x.chunks_exact(inner).zip(y.chunks_exact(inner));
                exact(
                    parts
                        .flat_map(|(x, y)| x.iter().chain(y).map(double))
                        .collect(),
                )
            }
            Op::GetRows => {
                let rows = step.ints.len() / planes;
                let pick = |(at, row): (usize, &i32)| {
                    let row = at / rows * m + usize::try_from(*row).expect("a row");
                    x[row * k..][..k].iter().map(double).collect::<Vec<_>>()
                };
                exact(step.ints.iter().enumerate().flat_map(pick).collect())
            }
        }
    }

    /// Returns the result of a product with activations of `ne`.
    fn product(&self, step: &Step, x: &[f32], error: f64, [k, m, planes, _]: [usize; 4]) -> Want {
        let n = self.values[*step.from.last().expect("its result")].ne[0];
        let is_f16 = step.node.src[0].dtype == NPU_DTYPE_F16;
        let is_id = matches!(step.op, Op::MulMatId { .. });
        let square = |x: &f32| f64::from(*x).powi(2);
        let length = |row: &[f32]| row.iter().map(square).sum::<f64>().sqrt();
        let largest = |row: &[f32]| {
            row.iter()
                .fold(0.0, |most: f64, x| most.max(f64::from(*x).abs()))
        };
        // The largest error of a sum of products.
        let of_row = |x: &[f32], w: &[f32], value: f64| {
            let terms = x
                .iter()
                .zip(w)
                .map(|(x, w)| square(x) * square(w))
                .sum::<f64>()
                .sqrt();
            let half = ROUNDING * HALF_STEP * 1.5 * terms
                + HALF_SMALLEST * (length(w) + length(x))
                + HALF_STEP * value.abs()
                + HALF_SMALLEST;
            let bytes = match self.device {
                RK if is_f16 => 0.0,
                // Both are rounded after a rotation, which leaves lengths; no number is longer than its row.
                RK => ROUNDING * 2.0 / 127.0 * length(x) * length(w),
                // One or two rows of activations are rounded to bytes.
                _ if m <= 2 || is_id => ROUNDING / 127.0 * largest(x) * length(w),
                _ => 0.0,
            };
            half + bytes + error * w.iter().map(|w| f64::from(*w).abs()).sum::<f64>()
        };
        let mut want = Want {
            values: Vec::new(),
            errors: Vec::new(),
        };
        let mut multiply = |act: &[f32], w: &[f32]| {
            for row in act.chunks_exact(k) {
                let values = reference::mul_mat(row, w, k);
                let rows = w.chunks_exact(k).zip(&values);
                want.errors
                    .extend(rows.map(|(w, value)| of_row(row, w, *value)));
                want.values.extend(values);
            }
        };
        for plane in 0..planes {
            let act = &x[plane * m * k..][..m * k];
            if let Op::MulMatId { used, .. } = step.op {
                for slot in 0..used {
                    let expert = step.ints[plane * used + slot];
                    let expert = usize::try_from(expert).expect("an expert");
                    multiply(
                        &act[slot % m * k..][..k],
                        &step.weights[expert * n * k..][..n * k],
                    );
                }
            } else {
                let slices = step.weights.len() / (n * k);
                multiply(act, &step.weights[plane % slices * n * k..][..n * k]);
            }
        }
        want
    }

    /// Compares the results of steps with the reference.
    fn check(&self, round: usize) {
        let mut wanted: Vec<Option<Want>> = self.values.iter().map(|_| None).collect();
        for (index, step) in self.steps.iter().enumerate() {
            let dst = *step.from.last().expect("its result");
            let want = self.reference(step, &wanted);
            let value = &self.values[dst];
            if step.node.feeds_next || value.is_gone {
                wanted[dst] = Some(want);
                continue;
            }
            let have = self.memory.read(&value.tensor, value.count());
            assert_eq!(have.len(), want.values.len());
            // Beyond FP16 the matrix unit has infinities.
            let is_wrong = |(x, want): (&f32, (&f64, &f64))| {
                let (want, error) = want;
                want.abs() < 3e4 && !((f64::from(*x) - want).abs() <= *error)
            };
            let wants = want.values.iter().zip(&want.errors);
            let Some(at) = have.iter().zip(wants).position(is_wrong) else {
                continue;
            };
            for step in &self.steps {
                let ne: Vec<_> = step.from.iter().map(|at| self.values[*at].ne).collect();
                let (from, feeds) = (&step.from, step.node.feeds_next);
                eprintln!(
                    "{:?} of {from:?}, shapes {ne:?}, feeds next: {feeds}",
                    step.name
                );
            }
            panic!(
                "device {}, round {round}, node {index} {:?}: element {at} is {} instead of {} ± {:.3e}",
                self.device, step.name, have[at], want.values[at], want.errors[at]
            );
        }
    }

    /// Computes all steps: on the device where it takes them, here where it does not.
    fn compute(&mut self, stream: &Stream, supported: &[bool], uid: u64) {
        let mut begin = 0;
        while begin < self.steps.len() {
            let end = (begin..self.steps.len()).find(|at| supported[*at] != supported[begin]);
            let end = end.unwrap_or(self.steps.len());
            if supported[begin] {
                let nodes: Vec<Node> = self.steps[begin..end]
                    .iter()
                    .map(|step| step.node)
                    .collect();
                let uid = if nodes.len() == self.steps.len() {
                    uid
                } else {
                    0
                };
                assert_eq!(
                    stream.compute(uid, &nodes),
                    NPU_STATUS_OK,
                    "FUZZ_LOG=1 says why"
                );
            } else {
                for at in begin..end {
                    let nothing: Vec<Option<Want>> = self.values.iter().map(|_| None).collect();
                    let want = self.reference(&self.steps[at], &nothing);
                    let values: Vec<f32> = want.values.iter().map(|x| *x as f32).collect();
                    let dst = *self.steps[at].from.last().expect("its result");
                    let tensor = self.values[dst].tensor;
                    self.memory.write(&tensor, bytemuck::cast_slice(&values));
                }
            }
            begin = end;
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    start();
    let mut input = Input::new(bytes);
    let device = if input.byte() % 4 == 0 { RK } else { HEX };
    let k = input.one_of(&[32, 64, 96, 128, 256, 40, 7]);
    let m = input.one_of(&[1, 2, 3, 4, 5, 8, 9, 31, 32, 33]);
    let planes = 1 + input.below(2);
    let mut numbers = Numbers(u64::from(input.word()));
    let mut graph = Graph::new(device, (2 * NODES + 4) * (LARGEST + 64) * 4);
    for _ in 0..1 + input.below(2) {
        graph.value([k, m, planes, 1], NPU_ROLE_STATE);
        graph.inputs += 1;
    }
    while !input.is_empty() && graph.steps.len() < NODES {
        graph.step(&mut input, &mut numbers);
    }
    if graph.steps.is_empty() {
        return;
    }
    graph.mark(&mut input);
    let supported: Vec<bool> = graph
        .steps
        .iter()
        .map(|step| supports(device, &step.node))
        .collect();
    // A result that is computed here is stored.
    for at in 0..graph.steps.len() {
        let both = supported[at] && supported.get(at + 1).copied().unwrap_or(false);
        graph.steps[at].node.feeds_next &= both && device == HEX;
    }
    let stream = Stream::new(device);
    for round in 0..3 {
        graph.fill(&mut numbers);
        graph.spoil();
        match (round, stream.replay(1)) {
            (1.., Some(status)) => assert_eq!(status, NPU_STATUS_OK, "FUZZ_LOG=1 says why"),
            _ => graph.compute(&stream, &supported, 1),
        }
        graph.check(round);
    }
});
