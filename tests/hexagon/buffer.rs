//! Buffers keep every byte, packed or not: against a plain vector.

use std::sync::{Arc, Barrier, OnceLock, mpsc};
use std::time::Duration;

use ggml_rust_npu::backend::{Buffer, Content, Device, Node, Stream};
use ggml_rust_npu::config::Repack;
use ggml_rust_npu::graph::{MAX_SOURCES, Op, Operation, PARAMS, Place, Tensor, sources};
use ggml_rust_npu::hexagon::{HexBuffer, HexDevice, HexStream, Options};
use ggml_rust_npu::reference;
use ggml_rust_npu::tensor::{DType, Dequantize, Format};
use proptest::prelude::*;

use super::common::*;

/// A write or fill of part of a tensor.
#[derive(Clone, Debug)]
struct Write {
    from: f64,
    to: f64,
    fill: bool,
    seed: u64,
}

fn writes() -> impl Strategy<Value = Vec<Write>> {
    let write = (0.0..1.0, 0.0..1.0, any::<bool>(), any::<u64>()).prop_map(
        |(from, to, fill, seed): (f64, f64, bool, u64)| Write {
            from,
            to,
            fill,
            seed,
        },
    );
    prop::collection::vec(write, 1..6)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_was_written_is_read(
        kind in prop::sample::select(KINDS.to_vec()),
        blocks in 1usize..4,
        n in 1usize..70,
        slices in 1usize..3,
        packed in any::<bool>(),
        writes in writes(),
    ) {
        thread_local!(static DEVICE: Arc<ggml_rust_npu::hexagon::HexDevice> = device());
        let device = DEVICE.with(Arc::clone);
        let w = Weight::random(&mut Numbers::new(9), kind, [kind.block_elems() * blocks, n, slices, 1]);
        let place = if packed { Place::Packed } else { Place::Device };
        // Placed after another tensor, so that a wrong offset would be noticed.
        let tensor = w.tensor(256, place);
        let buffer = HexBuffer::new(&device, 256 + device.packed_bytes(&tensor), false).unwrap();
        buffer.write(&tensor, 0, w.bytes.len(), Content::Bytes(&w.bytes)).unwrap();
        let mut model = w.bytes.clone();
        for write in writes {
            let place = |part: f64| (part * model.len() as f64) as usize;
            let (a, b) = (place(write.from), place(write.to));
            let range = a.min(b)..a.max(b);
            let mut numbers = Numbers::new(write.seed);
            if write.fill {
                model[range.clone()].fill(write.seed as u8);
                buffer.write(&tensor, range.start, range.len(), Content::Fill(write.seed as u8)).unwrap();
            } else {
                model[range.clone()].fill_with(|| numbers.bits() as u8);
                buffer.write(&tensor, range.start, range.len(), Content::Bytes(&model[range.clone()])).unwrap();
            }
            let mut part = vec![0; range.len()];
            buffer.read(&tensor, range.start, &mut part).unwrap();
            prop_assert_eq!(&part[..], &model[range]);
        }
        let mut all = vec![0; model.len()];
        buffer.read(&tensor, 0, &mut all).unwrap();
        prop_assert_eq!(all, model);
    }
}

/// Regression: for floats whose packed form fits into a buffer although they do not, the first
/// write of a part was a panic.
#[test]
fn floats_that_end_behind_the_buffer_are_not_packed() {
    let device = device();
    let w = Weight::random(&mut Numbers::new(10), Kind::F32, [256, 64, 2, 1]);
    let tensor = w.tensor(0, Place::Packed);
    let buffer = HexBuffer::new(&device, w.bytes.len() * 3 / 4, false).unwrap();
    let row = &w.bytes[..256 * 4];
    buffer
        .write(&tensor, 0, row.len(), Content::Bytes(row))
        .unwrap();
    let mut have = vec![0; row.len()];
    buffer.read(&tensor, 0, &mut have).unwrap();
    assert_eq!(have, row);
}

#[test]
fn views_of_packed_tensors_are_parts_of_them() {
    let device = device();
    let w = Weight::random(&mut Numbers::new(10), KINDS[1], [64, 40, 1, 1]);
    let buffer = buffer_with(&device, &w, Place::Packed);
    // Rows 10 to 19.
    let row = w.bytes.len() / 40;
    let view = Weight::random(&mut Numbers::new(11), KINDS[1], [64, 10, 1, 1]);
    let tensor = view.tensor(10 * row, Place::Packed);
    let mut bytes = vec![0; view.bytes.len()];
    buffer.read(&tensor, 0, &mut bytes).unwrap();
    assert_eq!(bytes, w.bytes[10 * row..20 * row]);
    buffer
        .write(&tensor, 0, view.bytes.len(), Content::Bytes(&view.bytes))
        .unwrap();
    let mut all = vec![0; w.bytes.len()];
    buffer
        .read(&w.tensor(0, Place::Packed), 0, &mut all)
        .unwrap();
    assert_eq!(all[10 * row..20 * row], view.bytes);
    assert_eq!(all[..10 * row], w.bytes[..10 * row]);
    // A product with the view uses only the view's rows.
    let act = Numbers::new(12).floats(64);
    let work = Work::new(&device, &act, [64, 1, 1, 1], [10, 1, 1, 1], &[]).unwrap();
    let stream = HexStream::new(Arc::clone(&device));
    stream
        .submit(0, &mut [work.node(Op::MulMat, tensor, &buffer)])
        .unwrap();
    let want = ggml_rust_npu::reference::mul_mat(&act, &view.values, 64);
    let error = ggml_rust_npu::reference::nmse(&work.result(), &want);
    assert!(error <= 1e-4, "{error:.2e}");
}

/// Regression: the bytes were converted as if they were of the other tensor's type, or the write
/// did not fit the packed form. This was a panic, which the C interface caught.
#[test]
fn a_weight_that_a_tensor_of_another_type_changed_is_used_with_its_new_values() {
    const AT: usize = 4096;
    let device = device();
    for kind in KINDS {
        let ne = [kind.block_elems().max(64), 40, 1, 1];
        let old = Weight::random(&mut Numbers::new(13), kind, ne);
        let new = Weight::random(&mut Numbers::new(14), kind, ne);
        let (row, w) = (old.bytes.len() / ne[1], old.tensor(AT, Place::Packed));
        let act = Numbers::new(15).floats(ne[0]);
        // The rows that the other tensor writes, and how many of its bytes are before and after the
        // weight.
        for (rows, before, behind) in [
            (7..9, 0, 0),
            (0..3, 50, 0),
            (37..40, 0, 50),
            (0..40, 50, 50),
        ] {
            let buffer = HexBuffer::new(&device, AT + device.packed_bytes(&w) + AT, false).unwrap();
            let write = |tensor: &Tensor, bytes: &[u8]| {
                (buffer.write(tensor, 0, bytes.len(), Content::Bytes(bytes))).unwrap();
            };
            write(&w, &old.bytes);
            let changed = rows.start * row..rows.end * row;
            let others = [
                &vec![0xa5; before],
                &new.bytes[changed.clone()],
                &vec![0x5a; behind],
            ]
            .concat();
            let other = tensor(
                "other",
                DType::I8,
                [others.len(), 1, 1, 1],
                AT + changed.start - before,
            );
            write(&other, &others);
            let mut have = vec![0; others.len()];
            buffer.read(&other, 0, &mut have).unwrap();
            assert!(have == others, "{kind:?} {rows:?}");
            let (mut want, mut values) = (old.bytes.clone(), old.values.clone());
            want[changed.clone()].copy_from_slice(&new.bytes[changed]);
            let elems = rows.start * ne[0]..rows.end * ne[0];
            values[elems.clone()].copy_from_slice(&new.values[elems]);
            let mut have = vec![0; want.len()];
            buffer.read(&w, 0, &mut have).unwrap();
            assert!(have == want, "{kind:?} {rows:?}");
            let work = Work::new(&device, &act, [ne[0], 1, 1, 1], [ne[1], 1, 1, 1], &[]).unwrap();
            let stream = HexStream::new(Arc::clone(&device));
            let node = work.node(Op::MulMat, old.tensor(AT, Place::Device), &buffer);
            stream.submit(0, &mut [node]).unwrap();
            let want = ggml_rust_npu::reference::mul_mat(&act, &values, ne[0]);
            let error = ggml_rust_npu::reference::nmse(&work.result(), &want);
            assert!(error <= 1e-4, "{kind:?} {rows:?}: {error:.2e}");
        }
    }
}

/// Tensors that overlap in any way, each written in parts: a byte has the value that was written
/// last, whichever tensor reads it. After a weight's end, its packed form may have changed bytes.
#[test]
fn overlapping_tensors_keep_the_bytes_that_were_written_last() {
    let device = device();
    let mut numbers = Numbers::new(16);
    for round in 0..200 {
        let mut model = vec![Some(0u8); 1 << 16];
        let buffer = HexBuffer::new(&device, model.len(), false).unwrap();
        buffer.clear(0);
        let weights: Vec<_> = (0..3)
            .map(|_| {
                let kind = KINDS[numbers.below(KINDS.len())];
                let ne = [
                    kind.block_elems() * (1 + numbers.below(2)),
                    32 * (1 + numbers.below(2)),
                    1,
                    1,
                ];
                let w = Weight::random(&mut numbers, kind, ne);
                let tensor = w.tensor(128 * numbers.below(96), Place::Packed);
                (w, tensor)
            })
            .collect();
        let bytes_of = |tensor: &Tensor| tensor.shape.span_bytes(tensor.dtype).unwrap();
        let plain = tensor(
            "plain",
            DType::I8,
            [6000, 1, 1, 1],
            1000 + numbers.below(5000),
        );
        let tensors: Vec<_> = weights
            .iter()
            .map(|(_, tensor)| *tensor)
            .chain([plain])
            .collect();
        for step in 0..12 {
            let tensor = tensors[numbers.below(tensors.len())];
            let bytes = bytes_of(&tensor);
            let (from, to) = match numbers.below(3) {
                0 => (0, bytes),
                _ => {
                    let ends = [0; 2].map(|_: usize| numbers.below(bytes + 1));
                    (ends[0].min(ends[1]), ends[0].max(ends[1]))
                }
            };
            // The bytes are finite numbers in every type.
            let value = 1 + numbers.below(40) as u8;
            buffer
                .write(&tensor, from, to - from, Content::Fill(value))
                .unwrap();
            model[tensor.packed_offset..][from..to].fill(Some(value));
            model[tensor.packed_offset..][bytes..device.packed_bytes(&tensor)].fill(None);
            for tensor in &tensors {
                let mut have = vec![0; bytes_of(tensor)];
                buffer.read(tensor, 0, &mut have).unwrap();
                let mut want = model[tensor.packed_offset..].iter();
                let is_wrong = |have: &u8| want.next().unwrap().is_some_and(|want| want != *have);
                let wrong = have.iter().position(is_wrong);
                assert_eq!(
                    wrong, None,
                    "round {round}, step {step}, {:?}",
                    tensor.format
                );
            }
        }
    }
}

/// `GGML_RUST_NPU_REPACK=always` under an RPC client, which places tensors by their size in ggml's
/// layout. Regression: the packed form of a mask used the bytes of the indices after it.
#[test]
fn a_packed_form_takes_no_bytes_that_others_wrote() {
    const AT: usize = 1024;
    type Writer = fn(&Arc<HexDevice>, &HexBuffer);
    fn packed<'a>(name: &'a str, dtype: DType, ne: [usize; 4], offset: usize) -> Tensor<'a> {
        Tensor {
            place: Place::Packed,
            ..tensor(name, dtype, ne, offset)
        }
    }
    let writers: [(&str, Writer); 4] = [
        ("the program", |_, buffer| {
            let indices = packed("indices", DType::I64, [4, 1, 1, 1], AT);
            let content = Content::Bytes(bytemuck::cast_slice(&[3_i64, 4, 5, 6]));
            buffer.write(&indices, 0, 32, content).unwrap();
        }),
        ("the program, a row of a packed tensor", |_, buffer| {
            let rows = packed("rows", DType::F16, [512, 32, 1, 1], AT);
            let row = 31 * 1024..32 * 1024;
            let content = Content::Fill(0x2c);
            buffer.write(&rows, row.start, row.len(), content).unwrap();
        }),
        ("a clear", |_, buffer| buffer.clear(7)),
        ("the device", |device, buffer| {
            let from = HexBuffer::new(device, 1024, false).unwrap();
            let ones = packed("ones", DType::F32, [256, 1, 1, 1], 0);
            from.write(&ones, 0, 1024, Content::Fill(0x3f)).unwrap();
            let copying = Operation {
                op: Op::Cpy,
                params: [0; PARAMS],
                dst: packed("copy", DType::F32, [256, 1, 1, 1], AT),
                src: sources(&[ones]),
            };
            let mut src = [None; MAX_SOURCES];
            src[0] = Some(&from);
            let stream = HexStream::new(Arc::clone(device));
            let mut nodes = [node(copying, Some(buffer), src)];
            stream.submit(0, &mut nodes).unwrap();
        }),
    ];
    let options = Options {
        repack: Repack::Always,
        ..OPTIONS
    };
    let device = device_with(strict(75), options).unwrap();
    let mask = packed("mask", DType::F16, [512, 1, 1, 1], 0);
    assert_eq!(device.packed_bytes(&mask), AT + 31 * 1024);
    let halves: Vec<u8> = [half::f16::NEG_ONE.to_le_bytes(); 512].concat();
    let behind = tensor("behind", DType::I8, [32 * 1024, 1, 1, 1], AT);
    for (who, write) in writers {
        let buffer = HexBuffer::new(&device, AT + 32 * 1024, false).unwrap();
        write(&device, &buffer);
        let [mut want, mut have] = [vec![0; 32 * 1024], vec![0; 32 * 1024]];
        buffer.read(&behind, 0, &mut want).unwrap();
        assert!(want.iter().any(|byte| *byte != 0), "{who}");
        (buffer.write(&mask, 0, AT, Content::Bytes(&halves))).unwrap();
        buffer.read(&behind, 0, &mut have).unwrap();
        assert!(have == want, "{who}");
        buffer.read(&mask, 0, &mut have[..AT]).unwrap();
        assert!(have[..AT] == halves, "{who}");
    }
}

/// The allocator gave them room for their packed form. Regression: nothing was written there.
#[test]
fn weights_with_room_are_packed_where_everything_is() {
    let options = Options {
        repack: Repack::Always,
        ..OPTIONS
    };
    let device = device_with(strict(75), options).unwrap();
    let mut numbers = Numbers::new(17);
    let weights = [0; 2].map(|_| Weight::random(&mut numbers, Kind::F16, [64, 40, 1, 1]));
    let step = device.packed_bytes(&weights[0].tensor(0, Place::Packed));
    let buffer = HexBuffer::new(&device, 2 * step, false).unwrap();
    let tensors = [0, 1].map(|index| weights[index].tensor(index * step, Place::Packed));
    // The upper tensor first.
    for index in [1, 0] {
        let bytes = &weights[index].bytes;
        (buffer.write(&tensors[index], 0, bytes.len(), Content::Bytes(bytes))).unwrap();
    }
    let act = numbers.floats(64);
    let stream = HexStream::new(Arc::clone(&device));
    for (w, tensor) in weights.iter().zip(tensors) {
        let work = Work::new(&device, &act, [64, 1, 1, 1], [40, 1, 1, 1], &[]).unwrap();
        stream
            .submit(6, &mut [work.node(Op::MulMat, tensor, &buffer)])
            .unwrap();
        assert!(stream.replay(6).is_some(), "the host packed it at use");
        let error = reference::nmse(&work.result(), &reference::mul_mat(&act, &w.values, 64));
        assert!(error <= 1e-6, "{error:.2e}");
    }
}

/// A program that reads its weights back through ggml alone may have them once.
#[test]
fn weights_of_an_encoder_take_their_packed_form_alone_where_everything_is_packed() {
    let options = Options {
        repack: Repack::Always,
        ..OPTIONS
    };
    let device = device_with(strict(75), options).unwrap();
    let mut numbers = Numbers::new(23);
    for (kind, most_error) in [
        (Kind::F16, 1e-6),
        // With activations of 8 bits.
        (Kind::Blocks(Format::Q8_0), 1e-4),
        (Kind::Blocks(Format::Q4_0), 1e-4),
    ] {
        // SigLIP-base.
        for [k, n] in [[768, 3072], [3072, 768], [768, 576], [768, 96]] {
            let w = Weight::random(&mut numbers, kind, [k, n, 1, 1]);
            let tensor = w.tensor(0, Place::Packed);
            let bytes = w.bytes.len();
            let allocated = device.packed_bytes(&tensor).max(bytes);
            assert!(allocated * 100 <= bytes * 105, "{kind:?} {k}x{n}");
            let buffer = HexBuffer::new(&device, allocated, false).unwrap();
            let content = Content::Bytes(&w.bytes);
            buffer.write(&tensor, 0, bytes, content).unwrap();
            let mut read = vec![0; bytes];
            buffer.read(&tensor, 0, &mut read).unwrap();
            assert!(read == w.bytes, "{kind:?} {k}x{n}");
            if n > 96 {
                continue;
            }
            let act = numbers.floats(k);
            let work = Work::new(&device, &act, [k, 1, 1, 1], [n, 1, 1, 1], &[]).unwrap();
            let stream = HexStream::new(Arc::clone(&device));
            let mut nodes = [work.node(Op::MulMat, tensor, &buffer)];
            stream.submit(6, &mut nodes).unwrap();
            assert!(stream.replay(6).is_some(), "{kind:?}: packed at use");
            let error = reference::nmse(&work.result(), &reference::mul_mat(&act, &w.values, k));
            assert!(error <= most_error, "{kind:?}: {error:.2e}");
        }
    }
    assert_eq!(device.bytes_beside(), 0);
}

/// A type whose conversion waits for a product on the same device.
struct Meeting {
    device: Arc<HexDevice>,
    /// A weight that was packed before, because the threads that pack are waiting.
    other: Arc<(Weight, HexBuffer)>,
    computed: OnceLock<bool>,
}

impl Meeting {
    fn new(device: &Arc<HexDevice>) -> Self {
        let w = Weight::random(&mut Numbers::new(14), KINDS[1], [64, 40, 1, 1]);
        let buffer = buffer_with(device, &w, Place::Packed);
        Self {
            device: Arc::clone(device),
            other: Arc::new((w, buffer)),
            computed: OnceLock::new(),
        }
    }
}

impl Dequantize for Meeting {
    fn dequantize(&self, _: &[u8], out: &mut [f32]) {
        out.fill(0.5);
        self.computed.get_or_init(|| {
            let (send, receive) = mpsc::channel();
            let (device, other) = (Arc::clone(&self.device), Arc::clone(&self.other));
            std::thread::spawn(move || {
                let act = Numbers::new(15).floats(64);
                let product = mul_mat(&device, &other.0, &other.1, &act, [64, 1, 1, 1]);
                send.send(product.is_ok())
            });
            receive
                .recv_timeout(Duration::from_secs(20))
                .unwrap_or(false)
        });
    }
}

/// Regression: while a model was loaded, the tokens of another one waited for each of its weights
/// to be packed.
#[test]
fn the_device_computes_while_a_weight_is_packed() {
    let device = device();
    let meeting = Meeting::new(&device);
    let dtype = DType::Quantized {
        block_elems: 32,
        block_bytes: 128,
    };
    let w = Tensor {
        place: Place::Packed,
        dequantize: Some(&meeting),
        ..tensor("weight", dtype, [64, 40, 1, 1], 0)
    };
    let bytes = vec![1; 64 * 40 * 4];
    let buffer = HexBuffer::new(&device, device.packed_bytes(&w), false).unwrap();
    buffer
        .write(&w, 0, bytes.len(), Content::Bytes(&bytes))
        .unwrap();
    assert_eq!(meeting.computed.get(), Some(&true));
    // The same while a part is written.
    let meeting = Meeting::new(&device);
    let w = Tensor {
        dequantize: Some(&meeting),
        ..w
    };
    buffer.write(&w, 256, 256, Content::Fill(2)).unwrap();
    assert_eq!(meeting.computed.get(), Some(&true));
}

/// Regression: padding of the packed form kept the memory's previous content, which gave NaN in
/// results and graphs that failed.
#[test]
fn a_weight_that_is_filled_has_padding_of_zeros() {
    const N: usize = 40;
    let device = device();
    let check = |kind: Kind, k: usize| {
        let w = Weight {
            kind,
            ne: [k, N, 1, 1],
            bytes: Vec::new(),
            values: Vec::new(),
        };
        let tensor = w.tensor(0, Place::Packed);
        let all = vec![0x2c; tensor.shape.span_bytes(tensor.dtype).unwrap()];
        let buffer = HexBuffer::new(&device, device.packed_bytes(&tensor), false).unwrap();
        for m in [1, 3] {
            let [filled, written] = [Content::Fill(0x2c), Content::Bytes(&all)].map(|content| {
                buffer.clear(0xff);
                buffer.write(&tensor, 0, all.len(), content).unwrap();
                let product = mul_mat(&device, &w, &buffer, &vec![1.0; k * m], [k, m, 1, 1]);
                product.unwrap_or_else(|error| panic!("{kind:?} K={k} M={m}: {error:?}"))
            });
            assert_eq!(filled, written, "{kind:?} K={k} M={m}");
            assert!(
                filled.iter().all(|value| value.is_finite()),
                "{kind:?} K={k} M={m}"
            );
        }
    };
    for kind in KINDS {
        // An even and an odd number of blocks.
        check(kind, kind.block_elems() * 2);
        check(kind, kind.block_elems() * 3);
    }
    // Rows of floats need not be whole blocks.
    check(Kind::F16, 33);
    check(Kind::Bf16, 33);
}

#[test]
fn a_cleared_buffer_has_no_packed_tensors() {
    let device = device();
    let w = Weight::random(&mut Numbers::new(13), KINDS[3], [32, 32, 1, 1]);
    let buffer = buffer_with(&device, &w, Place::Packed);
    buffer.clear(0x5a);
    let mut bytes = vec![0; 100];
    let floats = tensor("floats", DType::F32, [25, 1, 1, 1], 12);
    buffer.read(&floats, 0, &mut bytes).unwrap();
    assert_eq!(bytes, [0x5a; 100]);
    buffer
        .write(&floats, 3, 4, Content::Bytes(&[1, 2, 3, 4]))
        .unwrap();
    buffer.read(&floats, 0, &mut bytes).unwrap();
    assert_eq!(bytes[..8], [0x5a, 0x5a, 0x5a, 1, 2, 3, 4, 0x5a]);
}

/// The DSP refuses packed weights that do not begin at a line. Regression: the device was lost by
/// that.
#[test]
fn a_weight_that_does_not_begin_at_a_line_is_packed_when_it_is_used() {
    let device = device();
    let mut numbers = Numbers::new(71);
    let w = Weight::random(&mut numbers, Kind::F16, [64, 40, 1, 1]);
    let at = 64;
    let tensor = w.tensor(at, Place::Packed);
    let bytes = at + device.packed_bytes(&tensor);
    let buffer = HexBuffer::new(&device, bytes, false).unwrap();
    let content = Content::Bytes(&w.bytes);
    buffer.write(&tensor, 0, w.bytes.len(), content).unwrap();
    let act = numbers.floats(3 * 64);
    let work = Work::new(&device, &act, [64, 3, 1, 1], [40, 3, 1, 1], &[]).unwrap();
    let stream = HexStream::new(Arc::clone(&device));
    let mut nodes = [work.node(Op::MulMat, tensor, &buffer)];
    stream.submit(0, &mut nodes).unwrap();
    let want = reference::mul_mat(&act, &w.values, 64);
    let error = reference::nmse(&work.result(), &want);
    assert!(error <= 2e-6, "{error:.2e}");
}

/// Regression: a weight in floats that another stream reads unpacked was put back into ggml's
/// layout while a graph was planned with its packed form, which gave wrong numbers.
#[test]
fn a_weight_is_put_back_while_no_other_stream_plans_with_it() {
    const K: usize = 64;
    let device = device();
    let mut numbers = Numbers::new(16);
    let w = Weight::random(&mut numbers, Kind::F32, [K, K, 2, 1]);
    let act = numbers.floats(2 * K);
    let want = [0, 1].map(|plane| reference::mul_mat(&act[plane * K..][..K], w.matrix(plane), K));
    let weight = w.tensor(0, Place::Device);
    fn negative<'a>(from: Tensor<'static>, buffer: &'a HexBuffer, out: &'a HexBuffer) -> Node<'a> {
        let operation = Operation {
            op: Op::Neg,
            params: [0; PARAMS],
            dst: Tensor {
                packed_offset: 0,
                ..from
            },
            src: sources(&[from]),
        };
        let mut src = [None; MAX_SOURCES];
        src[0] = Some(buffer);
        node(operation, Some(out), src)
    }
    for round in 0..40 {
        let buffer = buffer_with(&device, &w, Place::Packed);
        let out = HexBuffer::new(&device, w.bytes.len(), false).unwrap();
        let begin = Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let stream = HexStream::new(Arc::clone(&device));
                begin.wait();
                // Starts at a different moment of the other stream's planning each time.
                std::thread::sleep(Duration::from_micros(100 * round));
                stream
                    .submit(0, &mut [negative(weight, &buffer, &out)])
                    .unwrap();
            });
            let work = Work::new(&device, &act, [K, 1, 2, 1], [K, 1, 2, 1], &[]).unwrap();
            let other = HexBuffer::new(&device, size_of_val(&act[..]), false).unwrap();
            let stream = HexStream::new(Arc::clone(&device));
            // The other nodes take long to plan.
            let mut nodes = vec![work.node(Op::MulMat, weight, &buffer)];
            nodes.extend((0..500).map(|_| negative(work.act, &work.buffer, &other)));
            begin.wait();
            stream.submit(0, &mut nodes).unwrap();
            let error = reference::nmse(&work.result(), &want.concat());
            assert!(error <= 1e-4, "round {round}: {error:.2e}");
        });
    }
}
