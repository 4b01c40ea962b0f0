//! Measures the host time of a decode step on a Hexagon device whose commands are answered without
//! being executed: a graph of SmolLM2-135M's 30 layers that is computed again under its number.
//!
//! *Caller*: the waiting thread also reads the ring, as simulated devices do, so that the
//! stand-in's reading is part of the time. *Thread*: a separate thread reads it, as on a device.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ggml_rust_npu::backend::{Buffer, Node, Stream};
use ggml_rust_npu::config::Repack;
use ggml_rust_npu::graph::{Op, Operation, PARAMS, Place, Role, Tensor, sources};
use ggml_rust_npu::hexagon::caps;
use ggml_rust_npu::hexagon::device::Serving;
use ggml_rust_npu::hexagon::driver::FastRpc;
use ggml_rust_npu::hexagon::{HexBuffer, HexDevice, HexStream, Options};
use ggml_rust_npu::host_memory::RegionMut;
use ggml_rust_npu::tensor::{DType, Shape};
use hexagon_ops::sim;

const LAYERS: usize = 30;
const STEPS: usize = 5000;
/// Width.
const D: usize = 576;
/// Width of the feed-forward part.
const F: usize = 1536;
/// Elements of a head.
const HEAD: usize = 64;
/// Heads of queries.
const HEADS: usize = D / HEAD;
/// Heads of keys and values.
const KV_HEADS: usize = 3;
/// Elements of all heads of keys.
const KV: usize = KV_HEADS * HEAD;
/// Cells of the cache.
const CELLS: usize = 256;

/// Allocates tensors from the memory of one buffer.
struct Memory {
    buffer: HexBuffer,
    used: usize,
}

impl Memory {
    fn tensor(&mut self, dtype: DType, ne: [usize; 4], role: Role) -> Tensor<'static> {
        let step = dtype.step_bytes().expect("a float type");
        let mut nb = [step; 4];
        for i in 1..4 {
            nb[i] = nb[i - 1] * ne[i - 1];
        }
        let at = self.used;
        self.used += (nb[3] * ne[3]).next_multiple_of(256);
        Tensor {
            name: "",
            dtype,
            format: None,
            shape: Shape { ne, nb },
            place: Place::Device,
            memory: None,
            packed_offset: at,
            role,
            dequantize: None,
        }
    }

    fn result(&mut self, ne: [usize; 4]) -> Tensor<'static> {
        self.tensor(DType::F32, ne, Role::Result)
    }
}

/// The nodes of one token: each operation, and whether only the next one reads its result.
struct Model {
    memory: Memory,
    nodes: Vec<(Operation<'static>, bool)>,
}

impl Model {
    fn node(&mut self, op: Op, dst: Tensor<'static>, src: &[Tensor<'static>], feeds_next: bool) {
        let mut params = [0; PARAMS];
        match op {
            Op::RmsNorm => params[0] = 1e-5_f32.to_bits().cast_signed(),
            // SOURCE: ggml_rope_ext: dimensions, mode, base and scale of frequencies, factor of the
            // results.
            Op::Rope => {
                params[1] = 64;
                params[5] = 1e4_f32.to_bits().cast_signed();
                params[6] = 1_f32.to_bits().cast_signed();
                params[8] = 1_f32.to_bits().cast_signed();
            }
            Op::FlashAttnExt => params[0] = 0.125_f32.to_bits().cast_signed(),
            _ => {}
        }
        let operation = Operation {
            op,
            params,
            dst,
            src: sources(src),
        };
        self.nodes.push((operation, feeds_next));
    }

    /// `x` times a weight of `n` columns.
    fn product(&mut self, x: Tensor<'static>, n: usize) -> Tensor<'static> {
        let k = x.shape.ne[0];
        // A small F32 weight is not packed. How a product is computed does not change the host's
        // work.
        let w = self.memory.tensor(DType::F32, [k, n, 1, 1], Role::State);
        let out = self.memory.result([n, 1, 1, 1]);
        self.node(Op::MulMat, out, &[w, x], false);
        out
    }

    fn norm(&mut self, x: Tensor<'static>) -> Tensor<'static> {
        let out = self.memory.result([D, 1, 1, 1]);
        let g = self.memory.tensor(DType::F32, [D, 1, 1, 1], Role::Weights);
        self.node(Op::RmsNorm, out, &[x], true);
        self.node(Op::Mul, out, &[out, g], false);
        out
    }

    fn rope(&mut self, x: Tensor<'static>, heads: usize, pos: Tensor<'static>) -> Tensor<'static> {
        let mut view = x;
        view.shape = Shape {
            ne: [HEAD, heads, 1, 1],
            nb: [4, 4 * HEAD, 4 * HEAD * heads, 4 * HEAD * heads],
        };
        let out = self.memory.result([HEAD, heads, 1, 1]);
        self.node(Op::Rope, out, &[view, pos], false);
        out
    }

    /// Adds a cache of 16 bits: writes to it, and returns it in the form that attention reads.
    fn cache(&mut self, x: Tensor<'static>, row: Tensor<'static>) -> Tensor<'static> {
        let cache = self
            .memory
            .tensor(DType::F16, [KV, CELLS, 1, 1], Role::State);
        let mut flat = x;
        flat.shape = Shape {
            ne: [KV, 1, 1, 1],
            nb: [4, 4 * KV, 4 * KV, 4 * KV],
        };
        self.node(Op::SetRows, cache, &[flat, row], false);
        let mut view = cache;
        view.shape = Shape {
            ne: [HEAD, CELLS, KV_HEADS, 1],
            nb: [2, 2 * KV, 2 * HEAD, 2 * KV * CELLS],
        };
        view
    }

    fn layer(
        &mut self,
        x: Tensor<'static>,
        [pos, row, mask]: [Tensor<'static>; 3],
    ) -> Tensor<'static> {
        let normed = self.norm(x);
        let q = self.product(normed, D);
        let q = self.rope(q, HEADS, pos);
        let v = self.product(normed, KV);
        let k = self.product(normed, KV);
        let k = self.rope(k, KV_HEADS, pos);
        let (k, v) = (self.cache(k, row), self.cache(v, row));
        let mut heads = q;
        heads.shape = Shape {
            ne: [HEAD, 1, HEADS, 1],
            nb: [4, 4 * D, 4 * HEAD, 4 * D],
        };
        let attention = self.memory.result([HEAD, HEADS, 1, 1]);
        self.node(Op::FlashAttnExt, attention, &[heads, k, v, mask], false);
        let mut flat = attention;
        flat.shape = x.shape;
        let out = self.product(flat, D);
        let sum = self.memory.result([D, 1, 1, 1]);
        self.node(Op::Add, sum, &[out, x], false);
        let normed = self.norm(sum);
        let (gate, up) = (self.product(normed, F), self.product(normed, F));
        let unit = self.memory.result([F, 1, 1, 1]);
        self.node(Op::Swiglu, unit, &[gate, up], false);
        let down = self.product(unit, D);
        let out = self.memory.result([D, 1, 1, 1]);
        self.node(Op::Add, out, &[down, sum], false);
        out
    }
}

fn main() {
    let mut options = sim::Options::new(75);
    options.compute = false;
    println!("host time of a decode step in microseconds, {STEPS} steps each");
    println!(
        "{:8} {:>6} {:>8} {:>8} {:>8} {:>8}",
        "serving", "nodes", "p10", "p50", "p90", "p99"
    );
    for (name, serving) in [("Caller", Serving::Caller), ("Thread", Serving::Thread)] {
        let rpc = FastRpc::simulate(options.clone()).expect("a stand-in starts");
        let settings = Options {
            dsp: ggml_rust_npu::hexagon::device::Domain::Cdsp,
            session: 0,
            repack: Repack::Weights,
            timeout: Duration::from_secs(20),
            address_bytes: None,
            threads: None,
            activations: ggml_rust_npu::config::ActivationBits::Eight,
            power: hexagon_ops::wire::Power::Burst,
            serving,
            trace: None,
        };
        let caps = caps::by_arch(75).expect("a known architecture");
        let device = HexDevice::untested("HEX0", &rpc, caps, settings).expect("a device opens");
        let device = Arc::new(device);
        let buffer = HexBuffer::new(&device, 600 << 20, true).expect("memory");
        let mut model = Model {
            memory: Memory { buffer, used: 0 },
            nodes: Vec::new(),
        };
        let memory = &mut model.memory;
        let inputs = [
            memory.tensor(DType::I32, [1, 1, 1, 1], Role::State),
            memory.tensor(DType::I64, [1, 1, 1, 1], Role::State),
            memory.tensor(DType::F16, [CELLS, 32, 1, 1], Role::State),
        ];
        let mut x = memory.tensor(DType::F32, [D, 1, 1, 1], Role::State);
        for _ in 0..LAYERS {
            x = model.layer(x, inputs);
        }
        let normed = model.norm(x);
        model.product(normed, 1024);
        let operands = Some(&model.memory.buffer as &dyn Buffer);
        let nodes = (model.nodes.iter()).map(|(operation, feeds_next)| Node {
            operation: *operation,
            out: RegionMut::from(&mut [][..]),
            feeds_next: *feeds_next,
            dst: operands,
            src: [operands; ggml_rust_npu::graph::MAX_SOURCES],
        });
        let stream = HexStream::new(Arc::clone(&device));
        let computed = stream.submit(1, &mut nodes.collect::<Vec<_>>());
        computed.expect("answered");
        let step = || {
            let begun = Instant::now();
            (stream.replay(1)).expect("remembered").expect("answered");
            begun.elapsed()
        };
        let mut times: Vec<_> = (0..STEPS).map(|_| step()).collect();
        times.sort_unstable();
        let [p10, p50, p90, p99] =
            [10, 50, 90, 99].map(|percent| times[STEPS * percent / 100].as_secs_f64() * 1e6);
        println!(
            "{name:8} {:>6} {p10:8.1} {p50:8.1} {p90:8.1} {p99:8.1}",
            model.nodes.len()
        );
    }
}
