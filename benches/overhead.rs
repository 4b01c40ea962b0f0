//! Measures the host time of one MUL_MAT outside the vendor's library (the stand-in's runs return
//! at once, everything else is done as on a board), and the time to pack weights while they are
//! loaded. Shapes are those of SmolLM2-135M.

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ggml_rust_npu::backend::{Buffer, Content, Device, Node};
use ggml_rust_npu::graph::{Op, Operation, PARAMS, Place, Role, Tensor, sources};
use ggml_rust_npu::host_memory::{Region, RegionMut};
use ggml_rust_npu::rockchip::caps::{self, RkCaps};
use ggml_rust_npu::rockchip::driver::Rknn;
use ggml_rust_npu::rockchip::{RkBuffer, RkDevice};
use ggml_rust_npu::tensor::{DType, Dequantize, Shape};
use rknpu_ops::sim;
use task_pool::Pool;

/// Plain floats in blocks of 32. The time to dequantize them is not part of the measurement.
struct F32InBlocks;

const F32_IN_BLOCKS: DType = DType::Quantized {
    block_elems: 32,
    block_bytes: 128,
};

impl Dequantize for F32InBlocks {
    fn dequantize(&self, blocks: &[u8], out: &mut [f32]) {
        bytemuck::cast_slice_mut::<f32, u8>(out).copy_from_slice(blocks);
    }
}

fn tensor(dtype: DType, ne: [usize; 2]) -> Tensor<'static> {
    let row = dtype.row_bytes(ne[0]).unwrap_or(0);
    Tensor {
        name: "bench",
        dtype,
        format: None,
        shape: Shape {
            ne: [ne[0], ne[1], 1, 1],
            nb: [
                dtype.step_bytes().unwrap_or(0),
                row,
                row * ne[1],
                row * ne[1],
            ],
        },
        place: Place::Host,
        memory: None,
        packed_offset: 0,
        role: Role::State,
        dequantize: None,
    }
}

/// A device whose runs return at once.
fn null_device(caps: &'static RkCaps) -> Arc<RkDevice> {
    let mut options = sim::Options::new(caps.soc);
    options.compute = false;
    let rknn = Rknn::simulate(options).expect("a stand-in starts");
    Arc::new(RkDevice::untested(rknn, caps).expect("a device opens"))
}

/// M, K and N of SmolLM2-135M: attention, feed-forward, logits; and a ubatch.
const SHAPES: [[usize; 3]; 5] = [
    [1, 576, 576],
    [1, 576, 1536],
    [1, 1536, 576],
    [1, 576, 49152],
    [512, 576, 1536],
];

/// A multiplication on a null device, with all that it needs.
struct MulMat {
    device: Arc<RkDevice>,
    buffer: RkBuffer,
    weights: Tensor<'static>,
    act: Vec<f32>,
    result: Vec<f32>,
    shape: [usize; 3],
    graph: u64,
}

impl MulMat {
    fn new(device: &Arc<RkDevice>, shape: [usize; 3]) -> Self {
        let [m, k, n] = shape;
        let weights = Tensor {
            place: Place::Packed,
            role: Role::State,
            dequantize: Some(&F32InBlocks),
            ..tensor(F32_IN_BLOCKS, [k, n])
        };
        let bytes = device.packed_bytes(&weights);
        let buffer = RkBuffer::new(Arc::clone(device), bytes).expect("memory for the weights");
        let write = Content::Fill(0x3f);
        buffer
            .write(&weights, 0, k * n * 4, write)
            .expect("views of the weights");
        Self {
            device: Arc::clone(device),
            buffer,
            weights,
            act: vec![1.0; m * k],
            result: vec![0.0; m * n],
            shape,
            graph: 0,
        }
    }

    /// Computes the product once, in a separate graph, so that the activations are packed each
    /// time.
    fn run(&mut self) {
        let [m, k, n] = self.shape;
        self.graph += 1;
        let mut node = Node {
            operation: Operation {
                op: Op::MulMat,
                params: [0; PARAMS],
                dst: tensor(DType::F32, [n, m]),
                src: sources(&[
                    self.weights,
                    Tensor {
                        memory: Some(Region::from(bytemuck::cast_slice(&self.act))),
                        ..tensor(DType::F32, [k, m])
                    },
                ]),
            },
            out: RegionMut::from(&mut self.result[..]),
            feeds_next: false,
            dst: None,
            src: std::array::from_fn(|i| (i == 0).then_some(&self.buffer as &dyn Buffer)),
        };
        self.device
            .compute(&mut node, self.graph)
            .expect("a null run works");
    }
}

/// Chips with one core and with three: they differ in the number of threads that wait for each
/// other.
const CHIPS: [&RkCaps; 2] = [&caps::RK3566, &caps::RK3588];

/// Host time per MUL_MAT, in the mean.
fn overhead(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("overhead");
    group
        .measurement_time(Duration::from_secs(2))
        .sample_size(20);
    for caps in CHIPS {
        let device = null_device(caps);
        for shape @ [m, k, n] in SHAPES {
            let mut mul_mat = MulMat::new(&device, shape);
            group.bench_function(
                BenchmarkId::new(caps.soc.name(), format!("{m}x{k}x{n}")),
                |bench| bench.iter(|| mul_mat.run()),
            );
        }
    }
    group.finish();
}

/// Host time of single calls, sorted: other work on the CPUs is in the mean, but not in the middle
/// of these.
fn quantiles(_: &mut Criterion) {
    const CALLS: usize = 20_000;
    println!("host time of one MUL_MAT in microseconds, {CALLS} calls each");
    println!(
        "{:8} {:>16} {:>8} {:>8} {:>8} {:>8}",
        "chip", "M x K x N", "p10", "p50", "p90", "p99"
    );
    for caps in CHIPS {
        let device = null_device(caps);
        for shape @ [m, k, n] in SHAPES {
            let mut mul_mat = MulMat::new(&device, shape);
            let calls = CALLS / if m > 1 { 10 } else { 1 };
            let mut times: Vec<_> = (0..calls)
                .map(|_| {
                    let start = Instant::now();
                    mul_mat.run();
                    start.elapsed()
                })
                .collect();
            times.sort_unstable();
            let at = |percent: usize| times[calls * percent / 100].as_secs_f64() * 1e6;
            let name = caps.soc.name();
            let [p10, p50, p90, p99] = [10, 50, 90, 99].map(at);
            println!(
                "{name:8} {:>16} {p10:8.2} {p50:8.2} {p90:8.2} {p99:8.2}",
                format!("{m}x{k}x{n}")
            );
        }
    }
}

/// Measures the pool alone, with a task for each core of an NPU: tasks that do nothing, and tasks
/// of 1 us.
fn dispatch(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("dispatch");
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    for threads in [1, 2, 3].into_iter().filter(|threads| *threads <= cpus) {
        let pool = Pool::new(threads, "bench", &[]).expect("threads start");
        for us in [0, 1] {
            let id = BenchmarkId::new(format!("3 tasks of {us} us"), format!("{threads} threads"));
            let time = Duration::from_micros(us);
            group.bench_function(id, |bench| {
                bench.iter(|| {
                    pool.run(3, &|_| {
                        let start = Instant::now();
                        while start.elapsed() < time {
                            std::hint::spin_loop();
                        }
                    });
                });
            });
        }
    }
    group.finish();
}

/// Measures loading weights: dequantized, transformed, quantized and packed, on all threads,
/// compared with a copy of the same bytes.
fn repack(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("repack");
    group
        .measurement_time(Duration::from_secs(2))
        .sample_size(10);
    let device = null_device(&caps::RK3588);
    let (k, n) = (1536, 4096);
    for dtype in [F32_IN_BLOCKS, DType::F16] {
        let weights = Tensor {
            place: Place::Packed,
            role: Role::State,
            dequantize: Some(&F32InBlocks),
            ..tensor(dtype, [k, n])
        };
        let buffer = RkBuffer::new(Arc::clone(&device), device.packed_bytes(&weights))
            .expect("memory for the weights");
        let bytes = vec![0x3f_u8; dtype.row_bytes(k).unwrap_or(0) * n];
        let name = if dtype == F32_IN_BLOCKS {
            "int8 from f32"
        } else {
            "fp16"
        };
        group.throughput(Throughput::Bytes(bytes.len() as u64));
        group.bench_function(name, |bench| {
            let write = Content::Bytes(&bytes);
            bench.iter(|| {
                buffer
                    .write(&weights, 0, bytes.len(), write)
                    .expect("views")
            });
        });
        let mut copy = vec![0u8; bytes.len()];
        group.bench_function(format!("memcpy, {name}"), |bench| {
            bench.iter(|| copy.copy_from_slice(std::hint::black_box(&bytes)));
        });
    }
    group.finish();
}

criterion_group!(benches, quantiles, overhead, dispatch, repack);
criterion_main!(benches);
