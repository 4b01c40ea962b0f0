//! Operands that are not in the form that kernels need: activations in F16, weights of a cache,
//! which are packed when they are used, and both as views with their heads and tokens exchanged.

use std::sync::Arc;

use ggml_rust_npu::backend::{Buffer, Content, Device, Node, Stream};
use ggml_rust_npu::config::Repack;
use ggml_rust_npu::graph::{MAX_SOURCES, Op, Operation, PARAMS, Place, Role, Tensor, sources};
use ggml_rust_npu::hexagon::{HexBuffer, HexDevice, HexStream, Options};
use ggml_rust_npu::reference::{self, nmse};
use ggml_rust_npu::tensor::{DType, Format};
use half::f16;

use super::common::*;

/// Bytes of a buffer before the tensor in it.
const AT: usize = 256;

/// Order of the rows of a tensor in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rows {
    /// The rows follow each other.
    Dense,
    /// The rows of dimensions 1 and 2 are exchanged, as heads and tokens of a cache are.
    Exchanged,
}

/// Numbers in F16 in a separate buffer.
struct Halves {
    buffer: HexBuffer,
    /// As the program wrote them.
    whole: Tensor<'static>,
    /// As an operation reads them.
    view: Tensor<'static>,
}

impl Halves {
    fn new(device: &Arc<HexDevice>, ne: [usize; 4], rows: Rows, place: Place) -> Self {
        let mut stored = ne;
        if rows == Rows::Exchanged {
            stored.swap(1, 2);
        }
        let whole = Tensor {
            place,
            ..tensor("halves", DType::F16, stored, AT)
        };
        let mut view = whole;
        view.shape.ne = ne;
        if rows == Rows::Exchanged {
            view.shape.nb.swap(1, 2);
        }
        let bytes = AT + device.packed_bytes(&whole);
        let buffer = HexBuffer::new(device, bytes, false).unwrap();
        Self {
            buffer,
            whole,
            view,
        }
    }

    /// Writes random numbers; returns them in the order of the view.
    fn fill(&self, numbers: &mut Numbers) -> Vec<f32> {
        let [k, n1, n2, n3] = self.view.shape.ne;
        let floats = numbers.floats(k * n1 * n2 * n3);
        let halves: Vec<f16> = floats.into_iter().map(f16::from_f32).collect();
        let bytes: &[u8] = bytemuck::cast_slice(&halves);
        let content = Content::Bytes(bytes);
        (self.buffer.write(&self.whole, 0, bytes.len(), content)).unwrap();
        let nb = self.view.shape.nb.map(|bytes| bytes / 2);
        let mut values = Vec::new();
        for i3 in 0..n3 {
            for i2 in 0..n2 {
                for i1 in 0..n1 {
                    let row = i1 * nb[1] + i2 * nb[2] + i3 * nb[3];
                    values.extend(halves[row..row + k].iter().map(|half| half.to_f32()));
                }
            }
        }
        values
    }
}

/// Room for a product of two views.
struct Product {
    w: Halves,
    act: Halves,
    out: HexBuffer,
    dst: Tensor<'static>,
}

const K: usize = 64;
const N: usize = 40;

impl Product {
    /// Returns a product whose dimensions all have different sizes, so that no two of them can be
    /// confused.
    fn new(device: &Arc<HexDevice>, m: usize, [w, act]: [Rows; 2], place: Place) -> Self {
        let dst = tensor("dst", DType::F32, [N, m, 4, 9], AT);
        let bytes = AT + N * m * 36 * 4;
        Self {
            w: Halves::new(device, [K, N, 2, 3], w, place),
            act: Halves::new(device, [K, m, 4, 9], act, place),
            out: HexBuffer::new(device, bytes, false).unwrap(),
            dst,
        }
    }

    fn node(&self) -> Node<'_> {
        let operation = Operation {
            op: Op::MulMat,
            params: [0; PARAMS],
            dst: self.dst,
            src: sources(&[self.w.view, self.act.view]),
        };
        let mut src = [None; MAX_SOURCES];
        src[..2].copy_from_slice(&[Some(&self.w.buffer), Some(&self.act.buffer)]);
        node(operation, Some(&self.out), src)
    }

    fn check(&self, w: &[f32], act: &[f32]) {
        let m = self.dst.shape.ne[1];
        let mut have = vec![0.0_f32; N * m * 36];
        let bytes = bytemuck::cast_slice_mut(&mut have);
        self.out.read(&self.dst, 0, bytes).unwrap();
        let planes = have.chunks_exact(m * N).zip(act.chunks_exact(m * K));
        for (plane, (have, act)) in planes.enumerate() {
            let slice = plane / 4 / 3 * 2 + plane % 4 / 2;
            let want = reference::mul_mat(act, &w[slice * K * N..][..K * N], K);
            let error = nmse(have, &want);
            // Factors are in FP16, sums in FP32.
            assert!(error <= 1e-6, "plane {plane}: {error:.2e}");
        }
    }
}

#[test]
fn views_in_f16_are_multiplied_wherever_they_lie() {
    use Rows::{Dense, Exchanged};
    for (repack, place) in [
        (Repack::Weights, Place::Device),
        (Repack::Always, Place::Packed),
    ] {
        let options = Options { repack, ..OPTIONS };
        let device = device_with(strict(75), options).unwrap();
        let stream = HexStream::new(Arc::clone(&device));
        let mut numbers = Numbers::new(5);
        for rows in [[Dense, Dense], [Exchanged, Dense], [Dense, Exchanged]] {
            // Two products in one graph, the larger one last. Each needs separate memory.
            let products = [1, 3].map(|m| Product::new(&device, m, rows, place));
            for _ in 0..2 {
                let values = (products.each_ref()).map(|product| {
                    let w = product.w.fill(&mut numbers);
                    (w, product.act.fill(&mut numbers))
                });
                // What the host packed for a graph is out of date when the graph runs again.
                match stream.replay(3) {
                    Some(done) => done.unwrap(),
                    None => {
                        (stream.submit(3, &mut products.each_ref().map(Product::node))).unwrap()
                    }
                }
                for (product, (w, act)) in products.iter().zip(&values) {
                    product.check(w, act);
                }
            }
        }
    }
}

/// The DSP converts them each time, from their original place.
#[test]
fn activations_in_f16_are_read_again_when_their_graph_is_computed_again() {
    let device = device();
    let mut numbers = Numbers::new(6);
    let mut product = Product::new(&device, 3, [Rows::Dense, Rows::Exchanged], Place::Device);
    product.w = Halves::new(&device, [K, N, 2, 3], Rows::Dense, Place::Packed);
    let w = product.w.fill(&mut numbers);
    let stream = HexStream::new(Arc::clone(&device));
    for round in 0..3 {
        let act = product.act.fill(&mut numbers);
        match round {
            0 => stream.submit(4, &mut [product.node()]).unwrap(),
            _ => stream.replay(4).unwrap().unwrap(),
        }
        product.check(&w, &act);
    }
}

/// RWKV multiplies with `ggml_reshape_4d(w, k, n, 1, 5)` of a weight of [k, n, 5]. Regression: the
/// host packed it again for each graph.
#[test]
fn a_reshaped_weight_is_used_as_it_was_packed() {
    let device = device();
    let mut numbers = Numbers::new(7);
    let w = Weight::random(&mut numbers, KINDS[1], [K, N, 6, 1]);
    let buffer = buffer_with(&device, &w, Place::Packed);
    let stream = HexStream::new(Arc::clone(&device));
    for (graph, slices) in [(1, [1, 6]), (2, [3, 2]), (3, [6, 1])] {
        let ne = [K, 3, slices[0], slices[1]];
        let act = numbers.floats(ne.iter().product());
        let work = Work::new(&device, &act, ne, [N, 3, slices[0], slices[1]], &[]).unwrap();
        let mut view = w.tensor(0, Place::Packed);
        view.shape = tensor("w (reshaped)", DType::F32, [K, N, slices[0], slices[1]], 0).shape;
        let row = w.bytes.len() / (N * 6);
        view.shape.nb = [18, row, row * N, row * N * slices[0]];
        let mut nodes = [work.node(Op::MulMat, view, &buffer)];
        stream.submit(graph, &mut nodes).unwrap();
        let have = work.result();
        for (slice, have) in have.chunks_exact(3 * N).enumerate() {
            let want = reference::mul_mat(&act[slice * 3 * K..][..3 * K], w.matrix(slice), K);
            let error = nmse(have, &want);
            assert!(error <= 2e-6, "{slices:?} {slice}: {error:.2e}");
        }
        assert!(
            stream.replay(graph).is_some(),
            "{slices:?}: it was packed again"
        );
    }
}

/// Without flash attention a graph writes keys into a cache, then multiplies with it. Regression:
/// the host packed the cache for the product before the write, so the product had the keys of the
/// previous graph.
#[test]
fn a_cache_that_is_packed_at_use_has_what_its_graph_wrote() {
    const ROWS: [usize; 3] = [30, 0, 7];
    let mut numbers = Numbers::new(8);
    for (repack, place) in [
        (Repack::Weights, Place::Device),
        (Repack::Always, Place::Packed),
    ] {
        let options = Options { repack, ..OPTIONS };
        let device = device_with(strict(75), options).unwrap();
        // The error limits for keys of 16, 8 and 4 bits.
        for (kind, limit) in [
            (Kind::F16, 1e-6),
            (Kind::Blocks(Format::Q8_0), 1e-4),
            (Kind::Blocks(Format::Q4_0), 2e-2),
        ] {
            let whole = Weight::random(&mut numbers, kind, [K, 32, 1, 1]);
            let cache = Tensor {
                place,
                role: Role::State,
                ..whole.tensor(0, place)
            };
            let state = |name, dtype, ne, offset| Tensor {
                place,
                ..tensor(name, dtype, ne, offset)
            };
            let keys = state("k", DType::F32, [K, 3, 1, 1], 4096);
            let indices = state("indices", DType::I64, [3, 1, 1, 1], 5120);
            let q = state("q", DType::F32, [K, 4, 1, 1], 5248);
            let kq = Tensor {
                role: Role::Result,
                ..state("kq", DType::F32, [32, 4, 1, 1], 6272)
            };
            let operation = |op, dst, src: &[Tensor<'static>]| Operation {
                op,
                params: [0; PARAMS],
                dst,
                src: sources(src),
            };
            let graph = [
                operation(Op::SetRows, cache, &[keys, indices, cache]),
                operation(Op::MulMat, kq, &[cache, q]),
            ];
            assert!(graph.iter().all(|operation| device.supports(operation)));
            let buffer = HexBuffer::new(&device, 8192, false).unwrap();
            buffer.clear(0);
            let write = |tensor: &Tensor, bytes: &[u8]| {
                (buffer.write(tensor, 0, bytes.len(), Content::Bytes(bytes))).unwrap();
            };
            write(&indices, bytemuck::cast_slice(&ROWS.map(|row| row as i64)));
            let stream = HexStream::new(Arc::clone(&device));
            for round in 0..2 {
                let [values, queries] = [3, 4].map(|rows| numbers.floats(rows * K));
                write(&keys, bytemuck::cast_slice(&values));
                write(&q, bytemuck::cast_slice(&queries));
                match stream.replay(5) {
                    Some(done) => done.unwrap(),
                    None => {
                        let whole = Some(&buffer);
                        let node = |operation| node(operation, whole, [whole; MAX_SOURCES]);
                        stream.submit(5, &mut graph.map(node)).unwrap();
                    }
                }
                let mut have = vec![0.0_f32; 32 * 4];
                (buffer.read(&kq, 0, bytemuck::cast_slice_mut(&mut have))).unwrap();
                let mut cached = vec![0.0_f32; K * 32];
                for (row, values) in ROWS.iter().zip(values.chunks_exact(K)) {
                    cached[row * K..][..K].copy_from_slice(values);
                }
                let error = nmse(&have, &reference::mul_mat(&queries, &cached, K));
                assert!(error <= limit, "{repack:?} {kind:?} {round}: {error:.2e}");
            }
            // An index outside the table is the first node's failure, although the second node
            // needed its result.
            write(&indices, bytemuck::cast_slice(&[99_i64, 0, 7]));
            let whole = Some(&buffer);
            let node = |operation| node(operation, whole, [whole; MAX_SOURCES]);
            let failed = stream.submit(6, &mut graph.map(node)).unwrap_err();
            assert_eq!(failed.node, Some(0), "{repack:?}: {}", failed.error);
        }
    }
}
