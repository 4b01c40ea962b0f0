//! Whole graphs: operations on tensors together with multiplications, one submission, computed
//! again without its nodes.

use std::path::Path;
use std::sync::Arc;

use ggml_rust_npu::backend::{Buffer, Content, Node, Stream};
use ggml_rust_npu::graph::{MAX_SOURCES, Op, Operation, PARAMS, Place, Role, Tensor, sources};
use ggml_rust_npu::hexagon::{HexBuffer, HexDevice, HexStream, Options};
use ggml_rust_npu::reference::{mul_mat, nmse};
use ggml_rust_npu::tensor::{DType, Format};
use half::f16;

use crate::alloc::{allocations, live_bytes};
use crate::common::node;
use crate::common::{
    Kind, Numbers, OPTIONS, Weight, buffer_with, device, device_with, strict, tensor,
};

/// A layer's beginning: x is normed, scaled by g, multiplied with w; x is added, and the sum stored
/// as F16 in a cache.
struct Layer {
    weights: HexBuffer,
    w: Weight,
    memory: HexBuffer,
    x: Tensor<'static>,
    g: Tensor<'static>,
    cache: Tensor<'static>,
    results: [Tensor<'static>; 4],
    /// `true` if the program declares that no other node reads the normed x and the product.
    fuses: bool,
}

const K: usize = 64;
const M: usize = 5;
const EPS: f32 = 1e-5;

impl Layer {
    fn new(device: &Arc<HexDevice>) -> Self {
        let w = Weight::random(
            &mut Numbers::new(1),
            Kind::Blocks(Format::Q8_0),
            [K, K, 1, 1],
        );
        let weights = buffer_with(device, &w, Place::Packed);
        let bytes = K * M * 4;
        let memory = HexBuffer::new(device, 7 * bytes, true).unwrap();
        let state = |name, dtype, at| Tensor {
            role: Role::State,
            ..tensor(name, dtype, [K, M, 1, 1], at)
        };
        let result = |name, at| Tensor {
            role: Role::Result,
            ..tensor(name, DType::F32, [K, M, 1, 1], at)
        };
        let layer = Self {
            weights,
            w,
            memory,
            x: state("x", DType::F32, 0),
            g: Tensor {
                role: Role::Weights,
                ..tensor("g", DType::F32, [K, 1, 1, 1], bytes)
            },
            cache: state("cache", DType::F16, 2 * bytes),
            results: [
                result("norm", 3 * bytes),
                result("scaled", 4 * bytes),
                result("product", 5 * bytes),
                // In place.
                result("sum", 5 * bytes),
            ],
            fuses: true,
        };
        layer.write(&layer.g, &Numbers::new(2).floats(K));
        layer
    }

    fn write(&self, tensor: &Tensor, values: &[f32]) {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        (self.memory)
            .write(tensor, 0, bytes.len(), Content::Bytes(bytes))
            .unwrap();
    }

    fn node<'a>(&'a self, op: Op, dst: Tensor<'a>, src: &[Tensor<'a>]) -> Node<'a> {
        let mut params = [0; PARAMS];
        if op == Op::RmsNorm {
            params[0] = EPS.to_bits().cast_signed();
        }
        let operation = Operation {
            op,
            params,
            dst,
            src: sources(src),
        };
        let memory = Some(&self.memory);
        let first = if matches!(op, Op::MulMat | Op::MulMatId) {
            Some(&self.weights)
        } else {
            memory
        };
        let mut src = [memory; MAX_SOURCES];
        src[0] = first;
        Node {
            feeds_next: self.fuses && matches!(op, Op::RmsNorm | Op::MulMat),
            ..node(operation, memory, src)
        }
    }

    fn nodes(&self) -> [Node<'_>; 5] {
        let [norm, scaled, product, sum] = self.results;
        let w = self.w.tensor(0, Place::Packed);
        [
            self.node(Op::RmsNorm, norm, &[self.x]),
            self.node(Op::Mul, scaled, &[norm, self.g]),
            self.node(Op::MulMat, product, &[w, scaled]),
            self.node(Op::Add, sum, &[product, self.x]),
            self.node(Op::Cpy, self.cache, &[sum, self.cache]),
        ]
    }

    fn compute(&self, stream: &HexStream, graph: u64) {
        stream.submit(graph, &mut self.nodes()).unwrap();
    }

    /// As `compute`, several times in one graph.
    fn compute_times(&self, stream: &HexStream, graph: u64, times: usize) {
        let mut nodes: Vec<Node> = (0..times).flat_map(|_| self.nodes()).collect();
        stream.submit(graph, &mut nodes).unwrap();
    }

    /// Returns the content of the cache.
    fn result(&self) -> Vec<f32> {
        let mut bytes = vec![0; K * M * 2];
        self.memory.read(&self.cache, 0, &mut bytes).unwrap();
        let halves = bytes.as_chunks().0.iter();
        halves
            .map(|half| f16::from_le_bytes(*half).to_f32())
            .collect()
    }

    fn check(&self, x: &[f32]) {
        let g = Numbers::new(2).floats(K);
        let normed: Vec<f32> = x
            .chunks_exact(K)
            .flat_map(|row| {
                let square = row.iter().map(|x| f64::from(x * x)).sum::<f64>() / K as f64;
                let root = (square + f64::from(EPS)).sqrt() as f32;
                let scaled = row.iter().zip(&g).map(move |(x, g)| x / root * g);
                scaled.collect::<Vec<_>>()
            })
            .collect();
        let product = mul_mat(&normed, &self.w.values, K);
        let sum = product.iter().zip(x).map(|(a, b)| a + f64::from(*b));
        let want: Vec<f64> = sum.collect();
        // The matrix unit reads and writes FP16, and so does the cache: three roundings to 11 bits.
        let error = nmse(&self.result(), &want);
        assert!(error <= 1e-6, "{error:.2e}");
    }
}

#[test]
fn a_graph_is_computed_and_computed_again_without_its_nodes() {
    let device = device();
    let layer = Layer::new(&device);
    let stream = HexStream::new(Arc::clone(&device));
    assert!(stream.replay(7).is_none(), "nothing was computed yet");
    for seed in 0..3 {
        let x = Numbers::new(10 + seed).floats(K * M);
        layer.write(&layer.x, &x);
        if seed == 0 {
            layer.compute(&stream, 7);
        } else {
            stream.replay(7).unwrap().unwrap();
        }
        layer.check(&x);
    }
    // Allocations of the DSP's thread are not counted.
    let replay = || allocations(|| stream.replay(7).unwrap().unwrap());
    assert_eq!([replay(), replay()], [0, 0]);
    assert!(
        allocations(|| layer.compute(&stream, 8)) > 0,
        "is the allocator counted?"
    );
    // A graph without a number is not cached.
    layer.compute(&stream, 0);
    assert!(stream.replay(0).is_none());
}

/// 256 graphs are cached; another one replaces the least recently used.
#[test]
fn the_graph_that_was_used_longest_ago_is_forgotten() {
    let device = device();
    let layer = Layer::new(&device);
    let stream = HexStream::new(Arc::clone(&device));
    layer.write(&layer.x, &Numbers::new(10).floats(K * M));
    (1..=256).for_each(|graph| layer.compute(&stream, graph));
    for graph in [1, 2] {
        stream.replay(graph).unwrap().unwrap();
    }
    layer.compute(&stream, 257);
    let gone = (1..=257).filter(|graph| stream.replay(*graph).is_none());
    assert_eq!(gone.collect::<Vec<_>>(), [3]);
    // All other graphs were used in this order since then.
    layer.compute(&stream, 258);
    assert!(stream.replay(1).is_none());
    assert_eq!(stream.device_name(), "HEX0");
}

#[test]
fn what_only_the_next_node_reads_is_one_command_with_it() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fused.csv");
    let table = path.with_extension("HEX0.csv");
    // A file of an earlier run must not be mistaken for this one's.
    let _ = std::fs::remove_file(&table);
    let options = Options {
        trace: Some(&path),
        ..OPTIONS
    };
    let device = device_with(strict(75), options).unwrap();
    let x = Numbers::new(10).floats(K * M);
    let mut results = Vec::new();
    for fuses in [true, false] {
        let layer = Layer {
            fuses,
            ..Layer::new(&device)
        };
        layer.write(&layer.x, &x);
        layer.compute(&HexStream::new(Arc::clone(&device)), 0);
        layer.check(&x);
        results.push(layer.result());
    }
    assert_eq!(results[0], results[1]);
    let trace = std::fs::read_to_string(&table).unwrap();
    let lines: Vec<Vec<&str>> = (trace.lines().skip(2))
        .map(|line| line.split(',').collect())
        .collect();
    let of_graph = |graph: &str| -> Vec<&str> {
        let of_it = lines.iter().filter(|line| line[1] == graph);
        of_it.map(|line| line[3]).collect()
    };
    assert_eq!(of_graph("0"), ["RMS_NORM+MUL", "MUL_MAT+ADD", "CPY"]);
    assert_eq!(of_graph("1"), ["RMS_NORM", "MUL", "MUL_MAT", "ADD", "CPY"]);
    let head = trace.lines().nth(1).unwrap();
    assert_eq!(head.split(',').count(), lines[0].len());
}

#[test]
fn a_recorded_graph_has_its_nodes_commands_and_inputs_and_is_not_computed() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("graph.commands");
    let _ = std::fs::remove_file(&path);
    let options = Options {
        trace: Some(&path),
        ..OPTIONS
    };
    let device = device_with(strict(75), options).unwrap();
    let layer = Layer {
        fuses: true,
        ..Layer::new(&device)
    };
    let x = Numbers::new(12).floats(K * M);
    layer.write(&layer.x, &x);
    let stream = HexStream::new(Arc::clone(&device));
    layer.compute(&stream, 1);
    stream.replay(1).unwrap().unwrap();
    // Memory that was never written is poisoned.
    assert!(layer.result().iter().all(|x| x.is_nan()));
    let text = std::fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 2);
    // The same commands with the same numbers.
    assert_eq!(lines[0], lines[1]);
    let after = |key: &str| -> Vec<&str> { lines[0].split(key).skip(1).collect() };
    let ops = after("\"ops\":\"");
    assert_eq!(ops.len(), 3);
    for (ops, want) in ops.iter().zip(["RMS_NORM+MUL\"", "MUL_MAT+ADD\"", "CPY\""]) {
        assert!(ops.starts_with(want), "{ops}");
    }
    assert_eq!(after("\"op\":\"").len(), 5);
    for command in after("\"command\":\"") {
        assert_eq!(
            command.find('"'),
            Some(2 * size_of::<hexagon_ops::wire::Command>())
        );
    }
    let input: String = bytemuck::cast_slice::<f32, u8>(&x)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    assert!(lines[0].contains(&input));
}

#[test]
fn a_trace_that_cannot_be_written_leaves_a_device_that_computes() {
    for name in ["trace.csv", "trace.json", "trace.commands"] {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join("no/such/folder")
            .join(name);
        let options = Options {
            trace: Some(&path),
            ..OPTIONS
        };
        let device = device_with(strict(75), options).unwrap();
        let x = Numbers::new(11).floats(K * M);
        let layer = Layer::new(&device);
        layer.write(&layer.x, &x);
        layer.compute(&HexStream::new(Arc::clone(&device)), 0);
        layer.check(&x);
        assert!(!path.exists());
    }
}

/// A change of a graph's memory.
type Change = fn(&Layer);

#[test]
fn a_graph_is_forgotten_when_its_memory_changes() {
    let device = device();
    let stream = HexStream::new(Arc::clone(&device));
    let changes: [(&str, Change); 4] = [
        ("cleared", |layer| layer.weights.clear(0)),
        ("left unfinished", |layer| layer.weights.forget_graphs()),
        ("packed anew", |layer| {
            let w = Weight::random(&mut Numbers::new(3), Kind::F16, [32, 32, 1, 1]);
            let view = w.tensor(0, Place::Packed);
            layer.weights.clear(0);
            (layer.weights)
                .write(&view, 0, w.bytes.len(), Content::Bytes(&w.bytes))
                .unwrap();
        }),
        ("used by the CPU", |layer| layer.memory.mark_cpu_reader()),
    ];
    for (graph, (what, change)) in (1..).zip(changes) {
        let layer = Layer::new(&device);
        layer.write(&layer.x, &Numbers::new(4).floats(K * M));
        layer.compute(&stream, graph);
        stream.replay(graph).unwrap().unwrap();
        change(&layer);
        assert!(stream.replay(graph).is_none(), "{what}");
    }
    let layer = Layer::new(&device);
    layer.write(&layer.x, &Numbers::new(4).floats(K * M));
    layer.compute(&stream, 9);
    // The weights are written again to the same place, so the cached commands are still valid.
    let bytes = layer.w.bytes.clone();
    (layer.weights)
        .write(
            &layer.w.tensor(0, Place::Packed),
            0,
            bytes.len(),
            Content::Bytes(&bytes),
        )
        .unwrap();
    stream.replay(9).unwrap().unwrap();
    drop(layer);
    assert!(stream.replay(9).is_none(), "freed");
}

/// With every other layer on the CPU, a token has a graph for each of the others. Regression: none
/// of nine graphs was still known when it came again.
#[test]
fn many_small_graphs_are_remembered_and_few_that_hold_much() {
    let device = device();
    let layer = Layer::new(&device);
    layer.write(&layer.x, &Numbers::new(4).floats(K * M));
    let stream = HexStream::new(Arc::clone(&device));
    (1..=49).for_each(|graph| layer.compute(&stream, graph));
    assert!((1..=49).all(|graph| stream.replay(graph).is_some()));

    // Each graph needs 8 MiB in which F16 activations become F32.
    let w = Weight::random(&mut Numbers::new(5), Kind::F16, [1 << 10, 32, 1, 1]);
    let buffer = buffer_with(&device, &w, Place::Packed);
    let act = tensor("act", DType::F16, [1 << 10, 1 << 11, 1, 1], 0);
    let dst = tensor("dst", DType::F32, [32, 1 << 11, 1, 1], 4 << 20);
    let work = HexBuffer::new(&device, 5 << 20, false).unwrap();
    work.clear(0);
    let stream = HexStream::new(device);
    for graph in 1..=12 {
        let operation = Operation {
            op: Op::MulMat,
            params: [0; PARAMS],
            dst,
            src: sources(&[w.tensor(0, Place::Device), act]),
        };
        let mut src = [None; MAX_SOURCES];
        src[..2].copy_from_slice(&[Some(&buffer), Some(&work)]);
        stream
            .submit(graph, &mut [node(operation, Some(&work), src)])
            .unwrap();
    }
    let kept = (1..=12).filter(|graph| stream.replay(*graph).is_some());
    assert_eq!(kept.collect::<Vec<_>>(), [5, 6, 7, 8, 9, 10, 11, 12]);
    // Later graphs do not keep the memory of those that were dropped for them.
    (101..=149).for_each(|graph| layer.compute(&stream, graph));
    assert!((101..=149).all(|graph| stream.replay(graph).is_some()));
}

/// Regression: neither the buffers of each command nor the room for larger graphs was counted, so
/// graphs held three times their limit.
#[test]
fn bytes_that_remembered_graphs_hold_are_counted_and_limited() {
    const LIMIT_BYTES: isize = 64 << 20;
    let device = device();
    let layer = Layer::new(&device);
    layer.write(&layer.x, &Numbers::new(4).floats(K * M));
    let stream = HexStream::new(Arc::clone(&device));
    // The memory that the session and the stream keep for their largest graph.
    layer.compute_times(&stream, 0, 400);
    // A graph without a number passes its memory on to the next graph, which frees it.
    layer.compute_times(&stream, 500, 3);
    let counted = || stream.heap_bytes().cast_signed();
    let before = counted();
    let live = live_bytes(|| {
        for graph in 1..=40 {
            let times = if graph % 2 == 0 { 90 } else { 3 };
            layer.compute_times(&stream, graph, times);
        }
    });
    let counted = counted() - before;
    assert!(live > 1 << 20, "{live} bytes are held");
    let difference = (counted - live).abs();
    assert!(
        difference < live / 20,
        "{counted} bytes are counted, {live} are held"
    );

    // Small graphs that replace large ones must not keep the memory of the large ones.
    let more = live_bytes(|| {
        (101..=220).for_each(|graph| layer.compute_times(&stream, graph, 400));
        (301..=420).for_each(|graph| layer.compute_times(&stream, graph, 3));
    });
    let all = live + more;
    assert!(all < LIMIT_BYTES + LIMIT_BYTES / 20, "{all} bytes are held");
}

/// A result that overlaps an operand without being the same is an error of this graph, not the end
/// of the device.
#[test]
fn operands_that_overlap_or_are_not_aligned_are_refused_before_the_device_sees_them() {
    let device = device();
    let layer = Layer::new(&device);
    let x = Numbers::new(4).floats(K * M);
    layer.write(&layer.x, &x);
    let stream = HexStream::new(Arc::clone(&device));
    let dst = Tensor {
        packed_offset: layer.x.packed_offset + 4,
        ..layer.results[0]
    };
    let first = || layer.node(Op::Neg, layer.results[1], &[layer.x]);
    let refused = layer.node(Op::Neg, dst, &[layer.x]);
    let failed = stream.submit(2, &mut [first(), refused]).unwrap_err();
    let error = failed.error.to_string();
    assert!(error.contains("overlap"), "{error}");
    assert_eq!(failed.node, Some(1));
    // An operand that is not aligned, which the planner could not know.
    let dst = Tensor {
        packed_offset: layer.results[0].packed_offset + 2,
        ..layer.results[0]
    };
    let refused = layer.node(Op::Neg, dst, &[layer.x]);
    let failed = stream.submit(2, &mut [first(), refused]).unwrap_err();
    let error = failed.error.to_string();
    assert!(error.contains("aligned"), "{error}");
    assert_eq!(failed.node, Some(1));
    layer.compute(&stream, 1);
    layer.check(&x);
}

/// Products are checked in the same way, because the device would be lost if the DSP refused one.
#[test]
fn products_that_overlap_or_are_not_aligned_are_refused_before_the_device_sees_them() {
    let device = device();
    let layer = Layer::new(&device);
    let x = Numbers::new(4).floats(K * M);
    layer.write(&layer.x, &x);
    let stream = HexStream::new(Arc::clone(&device));
    let [product, w] = [layer.results[2], layer.w.tensor(0, Place::Packed)];
    let at = |tensor: Tensor<'static>, by: usize| Tensor {
        packed_offset: tensor.packed_offset + by,
        ..tensor
    };
    let halves = Tensor {
        role: Role::State,
        ..layer.cache
    };
    for (dst, act, words) in [
        (at(layer.x, 4), layer.x, "overlap"),
        (at(product, 2), layer.x, "aligned"),
        (product, at(layer.x, 2), "aligned"),
        (product, at(halves, 1), "aligned"),
    ] {
        let refused = layer.node(Op::MulMat, dst, &[w, act]);
        let failed = stream.submit(2, &mut [refused]).unwrap_err();
        let error = failed.error.to_string();
        assert!(error.contains(words), "{error}");
    }
    // Products of experts in which each row of x chooses the only expert.
    let row_each =
        |at: Tensor<'static>| tensor(at.name, DType::F32, [K, 1, M, 1], at.packed_offset);
    let [act, dst] = [layer.x, product].map(row_each);
    let choice = tensor(
        "choice",
        DType::I32,
        [1, M, 1, 1],
        layer.results[1].packed_offset,
    );
    let node = |dst| layer.node(Op::MulMatId, dst, &[w, act, choice]);
    layer.write(&choice, &[0.0; M]);
    stream.submit(3, &mut [node(dst)]).unwrap();
    let overlapping = at(act, 4);
    let failed = stream.submit(3, &mut [node(overlapping)]).unwrap_err();
    let error = failed.error.to_string();
    assert!(error.contains("overlap"), "{error}");
    layer.compute(&stream, 1);
    layer.check(&x);
}

/// Weights in F32 are packed as F16 if they have three dimensions. Other operations need ggml's
/// layout, so the weights are put back into it.
#[test]
fn packed_floats_are_put_back_for_what_reads_or_writes_them_as_they_lie() {
    let device = device();
    let layer = Layer::new(&device);
    let stream = HexStream::new(Arc::clone(&device));
    layer.write(&layer.x, &Numbers::new(4).floats(K * M));
    let floats = Weight::random(&mut Numbers::new(5), Kind::F32, [K, M, 2, 1]);
    let weight = floats.tensor(0, Place::Packed);
    let read = |tensor: &Tensor, buffer: &HexBuffer| -> Vec<f32> {
        let mut bytes = vec![0; tensor.shape.ne.iter().product::<usize>() * 4];
        buffer.read(tensor, 0, &mut bytes).unwrap();
        let elements = bytes.as_chunks().0.iter();
        elements.map(|x| f32::from_le_bytes(*x)).collect()
    };
    // Read as activations.
    let buffer = buffer_with(&device, &floats, Place::Packed);
    let product = Tensor {
        role: Role::Result,
        ..tensor(
            "product",
            DType::F32,
            [K, M, 2, 1],
            layer.results[2].packed_offset,
        )
    };
    let mut node = layer.node(
        Op::MulMat,
        product,
        &[layer.w.tensor(0, Place::Packed), weight],
    );
    node.src[1] = Some(&buffer);
    stream.submit(0, &mut [node]).unwrap();
    let have = read(&product, &layer.memory);
    for (have, act) in have.chunks_exact(K).zip(floats.values.chunks_exact(K)) {
        let want = mul_mat(act, &layer.w.values, K);
        assert!(nmse(have, &want) <= 1e-4);
    }
    // Read as activations of a product that is computed unpacked.
    let floats = Weight::random(&mut Numbers::new(6), Kind::Bf16, [K, M, 1, 1]);
    let buffer = buffer_with(&device, &floats, Place::Packed);
    layer.compute(&stream, 0);
    let square = Tensor {
        role: Role::Result,
        ..tensor(
            "square",
            DType::F32,
            [M, M, 1, 1],
            layer.results[0].packed_offset,
        )
    };
    let mut node = layer.node(
        Op::MulMat,
        square,
        &[layer.cache, floats.tensor(0, Place::Packed)],
    );
    node.src[0] = Some(&layer.memory);
    node.src[1] = Some(&buffer);
    stream.submit(0, &mut [node]).unwrap();
    let have = read(&square, &layer.memory);
    for (have, act) in have.chunks_exact(M).zip(floats.values.chunks_exact(K)) {
        let want = mul_mat(act, &layer.result(), K);
        assert!(nmse(have, &want) <= 1e-4);
    }
    // Written as a result: the first plane.
    let floats = Weight::random(&mut Numbers::new(5), Kind::F32, [K, M, 2, 1]);
    let buffer = buffer_with(&device, &floats, Place::Packed);
    let plane = Tensor {
        shape: layer.x.shape,
        ..weight
    };
    let mut node = layer.node(Op::Neg, plane, &[layer.x]);
    node.dst = Some(&buffer);
    stream.submit(0, &mut [node]).unwrap();
    let mut want: Vec<f32> = read(&layer.x, &layer.memory).iter().map(|x| -x).collect();
    want.extend(&floats.values[K * M..]);
    assert!(read(&weight, &buffer) == want);
}

/// ggml copies from memory that the CPU reads in place by writing the bytes that it finds.
/// Regression: a saved sequence was as old as the CPU's cache.
#[test]
fn a_cache_is_copied_as_the_dsp_left_it() {
    let device = device();
    let layer = Layer::new(&device);
    let stream = HexStream::new(Arc::clone(&device));
    layer.write(&layer.x, &Numbers::new(3).floats(K * M));
    layer.compute(&stream, 0);
    let address = layer.memory.base() + layer.cache.packed_offset;
    let other = HexBuffer::new(&device, 128, true).unwrap();
    let mut want = vec![0; K * M * 2];
    let copied = other.shared_bytes(address, want.len()).unwrap();
    layer.memory.read(&layer.cache, 0, &mut want).unwrap();
    assert_eq!(copied, want);
    assert!(want.iter().any(|byte| *byte != 0));
    // Bytes that are elsewhere, only partly inside, or released do not count as the device's.
    let weights = layer.weights.base();
    let end = layer.memory.base() + 7 * K * M * 4;
    let outside = [
        (want.as_ptr().addr(), 8),
        (end - 4, 8),
        (weights, 8),
        (address, usize::MAX),
    ];
    for (address, bytes) in outside {
        assert_eq!(other.shared_bytes(address, bytes), None);
    }
    drop((stream, layer));
    assert_eq!(other.shared_bytes(address, 8), None);
}
