//! Weights in memory that the CPU also uses get a packed copy, which is updated after every write.
#![expect(unsafe_code, reason = "a program writes weights in place")]

use std::sync::Arc;

use ggml_rust_npu::backend::{Buffer, Content, Device, Node, Stream};
use ggml_rust_npu::config::Repack;
use ggml_rust_npu::graph::{MAX_SOURCES, Op, Operation, PARAMS, Place, Role, Tensor, sources};
use ggml_rust_npu::hexagon::{HexBuffer, HexDevice, HexStream, Options};
use ggml_rust_npu::tensor::Format;
use half::f16;

use super::common::*;

const K: usize = 256;
const N: usize = 48;
const M: usize = 5;
/// Bytes of a buffer before the weight in it.
const AT: usize = 256;

/// A way to write a weight.
type Write = fn(&Shared, &Weight);

/// A weight in memory that the CPU uses, too.
struct Shared {
    device: Arc<HexDevice>,
    stream: HexStream,
    buffer: HexBuffer,
    tensor: Tensor<'static>,
    work: Work,
    graph: u64,
}

impl Shared {
    fn new(device: &Arc<HexDevice>, w: &Weight) -> Self {
        Self::in_role(device, w, Role::Weights)
    }

    fn in_role(device: &Arc<HexDevice>, w: &Weight, role: Role) -> Self {
        let tensor = Tensor {
            role,
            ..w.tensor(AT, Place::Device)
        };
        let buffer = HexBuffer::new(device, AT + w.bytes.len(), true).unwrap();
        let content = Content::Bytes(&w.bytes);
        buffer.write(&tensor, 0, w.bytes.len(), content).unwrap();
        Self {
            device: Arc::clone(device),
            stream: HexStream::new(Arc::clone(device)),
            buffer,
            tensor,
            work: work(device),
            graph: 1,
        }
    }

    /// Multiplies with the weight, in the graph that was computed before.
    fn product(&self) -> Vec<f32> {
        if let Some(replayed) = self.stream.replay(self.graph) {
            replayed.unwrap();
            return self.work.result();
        }
        let mut nodes = [self.node()];
        self.stream.submit(self.graph, &mut nodes).unwrap();
        self.work.result()
    }

    fn node(&self) -> Node<'_> {
        self.work.node(Op::MulMat, self.tensor, &self.buffer)
    }

    /// Copies a tensor over the weight, in a graph.
    fn compute(&self, values: &Weight) {
        let from = HexBuffer::new(&self.device, values.bytes.len(), true).unwrap();
        let tensor = values.tensor(0, Place::Device);
        let content = Content::Bytes(&values.bytes);
        from.write(&tensor, 0, values.bytes.len(), content).unwrap();
        let operation = Operation {
            op: Op::Cpy,
            params: [0; PARAMS],
            dst: self.tensor,
            src: sources(&[tensor, self.tensor]),
        };
        let mut src = [None; MAX_SOURCES];
        src[..2].copy_from_slice(&[Some(&from), Some(&self.buffer)]);
        let mut nodes = [node(operation, Some(&self.buffer), src)];
        self.stream.submit(0, &mut nodes).unwrap();
    }

    fn write_in_place(&self, offset: usize, bytes: &[u8]) {
        let at = self.buffer.base() + AT + offset;
        let at = std::ptr::with_exposed_provenance_mut::<u8>(at);
        // SAFETY: inside the buffer, which lives as long as `self`, and no graph is running.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
    }
}

fn work(device: &Arc<HexDevice>) -> Work {
    let act = Numbers::new(3).floats(K * M);
    Work::new(device, &act, [K, M, 1, 1], [N, M, 1, 1], &[]).unwrap()
}

fn weight(seed: u64, kind: Kind) -> Weight {
    Weight::random(&mut Numbers::new(seed), kind, [K, N, 1, 1])
}

/// The product with a weight that was packed when it was written.
fn packed_product(device: &Arc<HexDevice>, w: &Weight) -> Vec<f32> {
    let work = work(device);
    let buffer = buffer_with(device, w, Place::Packed);
    let stream = HexStream::new(Arc::clone(device));
    let mut nodes = [work.node(Op::MulMat, w.tensor(0, Place::Packed), &buffer)];
    stream.submit(0, &mut nodes).unwrap();
    work.result()
}

/// The product with unpacked weights.
fn plain_product(w: &Weight) -> Vec<f32> {
    let off = Options {
        repack: Repack::Off,
        ..OPTIONS
    };
    Shared::new(&device_with(strict(75), off).unwrap(), w).product()
}

#[test]
fn a_weight_of_each_type_is_multiplied_as_one_that_was_packed() {
    let device = device();
    for kind in [
        Kind::F16,
        Kind::Bf16,
        Kind::Blocks(Format::Q4_0),
        Kind::Blocks(Format::Q4K),
    ] {
        let w = weight(1, kind);
        let shared = Shared::new(&device, &w);
        let want = packed_product(&device, &w);
        assert!(device.supports(&shared.node().operation), "{kind:?}");
        assert_eq!(device.bytes_beside(), 0, "{kind:?}");
        assert_eq!(shared.product(), want, "{kind:?}");
        assert_eq!(shared.product(), want, "{kind:?}, again");
        assert!(device.bytes_beside() > 0, "{kind:?}");
        // The weight's original bytes are unchanged.
        let mut bytes = vec![0; w.bytes.len()];
        shared.buffer.read(&shared.tensor, 0, &mut bytes).unwrap();
        assert_eq!(bytes, w.bytes, "{kind:?}");
    }
}

#[test]
fn a_write_is_noticed_whoever_makes_it() {
    let device = device();
    let (old, new) = (weight(1, Kind::F16), weight(2, Kind::F16));
    let [want_old, want_new] = [&old, &new].map(|w| packed_product(&device, w));
    assert_ne!(want_old, want_new);
    let writes: [(&str, Write); 5] = [
        ("the whole", |shared, new| {
            let content = Content::Bytes(&new.bytes);
            (shared.buffer)
                .write(&shared.tensor, 0, new.bytes.len(), content)
                .unwrap();
        }),
        ("parts", |shared, new| {
            let half = new.bytes.len() / 2 + 2;
            for (at, bytes) in [(0, &new.bytes[..half]), (half, &new.bytes[half..])] {
                let content = Content::Bytes(bytes);
                (shared.buffer)
                    .write(&shared.tensor, at, bytes.len(), content)
                    .unwrap();
            }
        }),
        ("in place", |shared, new| {
            shared.write_in_place(0, &new.bytes)
        }),
        ("one byte in place", |shared, new| {
            let last = new.bytes.len() - 1;
            shared.write_in_place(0, &new.bytes[..last]);
            shared.product();
            shared.write_in_place(last, &new.bytes[last..]);
        }),
        ("the CPU for a graph", |shared, new| {
            shared.buffer.show_to_cpu(&shared.tensor);
            shared.write_in_place(0, &new.bytes);
            shared.buffer.take_from_cpu(&shared.tensor);
            // For a while, the weight is multiplied unpacked.
            let plain = plain_product(new);
            assert_eq!([(); 2].map(|()| shared.product()), [plain.clone(), plain]);
        }),
    ];
    for (what, write) in writes {
        let shared = Shared::new(&device, &old);
        for _ in 0..3 {
            assert_eq!(shared.product(), want_old, "{what}");
        }
        let bytes = device.bytes_beside();
        write(&shared, &new);
        assert_eq!(shared.product(), want_new, "{what}");
        assert_eq!(shared.product(), want_new, "{what}, again");
        assert_eq!(
            device.bytes_beside(),
            bytes,
            "{what}: takes its own place again"
        );
    }
}

/// Each graph writes a weight that is trained, so packing it each time would be wasted work.
#[test]
fn a_weight_that_a_graph_writes_is_packed_once_graphs_only_read_it() {
    let device = device();
    let (old, new) = (weight(1, Kind::F16), weight(2, Kind::F16));
    let (plain, packed) = (plain_product(&new), packed_product(&device, &new));
    assert_ne!(plain, packed);
    let shared = Shared::new(&device, &old);
    assert_eq!(shared.product(), packed_product(&device, &old));
    for _ in 0..3 {
        shared.compute(&new);
        assert_eq!(shared.product(), plain);
    }
    assert_eq!(shared.product(), plain);
    assert_eq!(shared.product(), packed);
}

/// ggml's RPC server does not say which tensors are weights.
#[test]
fn what_many_graphs_read_and_nothing_writes_is_packed_as_a_weight() {
    let device = device();
    let (old, new) = (weight(1, Kind::F16), weight(2, Kind::F16));
    let [packed_old, packed_new] = [&old, &new].map(|w| packed_product(&device, w));
    let [plain_old, plain_new] = [&old, &new].map(plain_product);
    let shared = Shared::in_role(&device, &old, Role::State);
    let products = |count| -> Vec<_> { (0..count).map(|_| shared.product()).collect() };
    assert_eq!(
        products(4),
        [&plain_old, &plain_old, &packed_old, &packed_old].map(Clone::clone)
    );
    let content = Content::Bytes(&new.bytes);
    (shared.buffer)
        .write(&shared.tensor, 0, new.bytes.len(), content)
        .unwrap();
    assert_eq!(
        products(3),
        [&plain_new, &plain_new, &packed_new].map(Clone::clone)
    );
    // Graphs write a cache, so it is never packed.
    shared.compute(&old);
    assert_eq!(products(4), [(); 4].map(|()| plain_old.clone()));
}

#[test]
fn forms_take_about_the_bytes_of_their_weights_and_none_after_free() {
    let device = device();
    for round in 0..100 {
        let w = Weight::random(&mut Numbers::new(round), Kind::F16, [K, 64, 1, 1]);
        let shared = {
            let tensor = Tensor {
                role: Role::Weights,
                ..w.tensor(0, Place::Device)
            };
            HexBuffer::new(&device, w.bytes.len(), true)
                .inspect(|buffer| {
                    let content = Content::Bytes(&w.bytes);
                    buffer.write(&tensor, 0, w.bytes.len(), content).unwrap();
                    let act = Numbers::new(3).floats(K * M);
                    let work = Work::new(&device, &act, [K, M, 1, 1], [64, M, 1, 1], &[]).unwrap();
                    let stream = HexStream::new(Arc::clone(&device));
                    stream
                        .submit(1, &mut [work.node(Op::MulMat, tensor, buffer)])
                        .unwrap();
                })
                .unwrap()
        };
        let beside = device.bytes_beside();
        assert!(beside >= w.bytes.len(), "{beside}");
        assert!(beside * 100 <= w.bytes.len() * 105, "{beside}");
        drop(shared);
        assert_eq!(device.bytes_beside(), 0);
    }
}

#[test]
fn experts_are_packed_beside_their_own_bytes() {
    let device = device();
    let w = Weight::random(
        &mut Numbers::new(5),
        Kind::Blocks(Format::Q8_0),
        [K, N, 4, 1],
    );
    let act = Numbers::new(6).floats(K * 3);
    let ids = [0, 3, 1, 2, 3, 0];
    let product = |place, buffer: &HexBuffer, role| {
        let work = Work::new(&device, &act, [K, 1, 3, 1], [N, 2, 3, 1], &ids).unwrap();
        let tensor = Tensor {
            role,
            ..w.tensor(0, place)
        };
        let mut nodes = [work.node(Op::MulMatId, tensor, buffer)];
        let is_supported = device.supports(&nodes[0].operation);
        let stream = HexStream::new(Arc::clone(&device));
        stream.submit(0, &mut nodes).unwrap();
        (is_supported, work.result())
    };
    let packed = buffer_with(&device, &w, Place::Packed);
    let shared = HexBuffer::new(&device, w.bytes.len(), true).unwrap();
    let content = Content::Bytes(&w.bytes);
    shared
        .write(&w.tensor(0, Place::Device), 0, w.bytes.len(), content)
        .unwrap();
    let want = product(Place::Packed, &packed, Role::Weights);
    assert!(want.0);
    assert_eq!(product(Place::Device, &shared, Role::Weights), want);
    assert!(device.bytes_beside() > 0);
    // These experts are not known to be weights, so each graph would pack them again.
    assert!(!product(Place::Device, &shared, Role::State).0);
}

/// Numbers in F16, whose rows are not whole blocks.
fn halves(seed: u64, ne: [usize; 4]) -> Weight {
    let numbers = Numbers::new(seed).floats(ne.iter().product());
    let halves = numbers.iter().map(|number| f16::from_f32(*number));
    Weight {
        kind: Kind::F16,
        ne,
        bytes: halves.clone().flat_map(f16::to_le_bytes).collect(),
        values: halves.map(f16::to_f32).collect(),
    }
}

/// A convolution multiplies rows that IM2COL made with its kernel, which used FP32 on the vector
/// units.
#[test]
fn a_kernel_that_is_the_second_factor_is_multiplied_on_the_matrix_unit() {
    let device = device();
    // In the last one, a row is longer than a block.
    for [k, n, m] in [[240, 300, 48], [33, 45, 40], [256, 4000, 32]] {
        let [kernel, rows] = [halves(7, [k, m, 1, 1]), halves(8, [k, n, 1, 1])];
        let packed = buffer_with(&device, &kernel, Place::Packed);
        let want = mul_mat(&device, &kernel, &packed, &rows.values, [k, n, 1, 1]).unwrap();

        let shared = Shared::new(&device, &kernel);
        let computed = HexBuffer::new(&device, rows.bytes.len(), true).unwrap();
        let rows_tensor = Tensor {
            role: Role::Result,
            ..rows.tensor(0, Place::Device)
        };
        let content = Content::Bytes(&rows.bytes);
        computed
            .write(&rows_tensor, 0, rows.bytes.len(), content)
            .unwrap();
        let work = Work::new(&device, &[], [0; 4], [n, m, 1, 1], &[]).unwrap();
        let operation = Operation {
            op: Op::MulMat,
            params: [0; PARAMS],
            dst: work.dst,
            src: sources(&[rows_tensor, shared.tensor]),
        };
        assert!(device.supports(&operation));
        let mut src = [None; MAX_SOURCES];
        src[..2].copy_from_slice(&[Some(&computed), Some(&shared.buffer)]);
        let mut nodes = [node(operation, Some(&work.buffer), src)];
        shared.stream.submit(1, &mut nodes).unwrap();
        for again in [false, true] {
            let result = work.result();
            for (index, value) in result.iter().enumerate() {
                let (row, channel) = (index % n, index / n);
                assert_eq!(*value, want[row * m + channel], "{k} {n} {m} {index}");
            }
            if !again {
                shared.stream.replay(1).unwrap().unwrap();
            }
        }
        assert!(
            device.bytes_beside() > 0,
            "the product took the bytes as they lie"
        );
    }
}
