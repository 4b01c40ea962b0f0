//! Multiplications against the reference: every type, both kernels, every place of the weights.

use std::sync::Arc;

use ggml_rust_npu::backend::{Buffer, Content, Device, Stream};
use ggml_rust_npu::config::Repack;
use ggml_rust_npu::graph::{MAX_SOURCES, Op, Operation, PARAMS, Place, Role, Tensor, sources};
use ggml_rust_npu::hexagon::device::Serving;
use ggml_rust_npu::hexagon::{self, HexBuffer, HexStream, Options};
use ggml_rust_npu::reference;
use ggml_rust_npu::tensor::{DType, Format};

use super::common::*;

/// Largest normalized mean square error: for M of 1 and 2 activations have 8 bits for each group of
/// 32, an error of (1/127)^2/12 over their variance of 1/3; else the matrix unit reads and writes
/// FP16, and weights are rounded to it.
///
/// Random super-blocks, and blocks of Q4_1, have weights with a common part, which a product
/// multiplies by the sum of all activations. One row's sum may be small, and the sum of its errors
/// large.
fn limit(kind: Kind, m: usize) -> f64 {
    if m <= 2 && matches!(kind, Kind::Blocks(_)) {
        let is_plain = kind.block_elems() == 32 && kind != Kind::Blocks(Format::Q4_1);
        if is_plain { 1e-4 } else { 5e-4 }
    } else {
        2e-6
    }
}

#[test]
fn every_type_is_multiplied_whether_packed_before_or_at_use() {
    let device = device();
    let mut numbers = Numbers::new(1);
    for kind in KINDS {
        let k = 192_usize.next_multiple_of(kind.block_elems());
        let w = Weight::random(&mut numbers, kind, [k, 70, 1, 1]);
        for place in [Place::Packed, Place::Device] {
            let buffer = buffer_with(&device, &w, place);
            for m in [1, 2, 3, 8, 33, 100] {
                let act = numbers.floats(m * k);
                let have = mul_mat(&device, &w, &buffer, &act, [k, m, 1, 1]).unwrap();
                let error = reference::nmse(&have, &reference::mul_mat(&act, &w.values, k));
                assert!(
                    error <= limit(kind, m),
                    "{kind:?} {place:?} M={m}: {error:.2e}"
                );
            }
        }
    }
}

/// The errors of 50 products together, for which no single sum of activations matters: they are
/// those of 8 bits for every type. A step is at most 1/127, a random block's largest element on
/// average 32/33 of 1: (1/127)² / 12 over 1/3, 1.5e-5.
#[test]
fn activations_of_one_row_have_eight_bits_for_every_type() {
    let device = device();
    for kind in KINDS {
        if !matches!(kind, Kind::Blocks(_)) {
            continue;
        }
        let k = 192_usize.next_multiple_of(kind.block_elems());
        let (mut have, mut want) = (Vec::new(), Vec::new());
        for seed in 0..50 {
            let mut numbers = Numbers::new(seed);
            let w = Weight::random(&mut numbers, kind, [k, 70, 1, 1]);
            let buffer = buffer_with(&device, &w, Place::Packed);
            let act = numbers.floats(k);
            have.extend(mul_mat(&device, &w, &buffer, &act, [k, 1, 1, 1]).unwrap());
            want.extend(reference::mul_mat(&act, &w.values, k));
        }
        let error = reference::nmse(&have, &want);
        assert!((1.1e-5..=1.8e-5).contains(&error), "{kind:?}: {error:.2e}");
    }
}

#[test]
fn weights_beyond_f16_are_multiplied_in_f32() {
    let device = device();
    let mut numbers = Numbers::new(9);
    let (k, n) = (64, 40);
    for (kind, slices) in [(Kind::Bf16, 1), (Kind::F32, 2)] {
        let mut w = Weight::random(&mut numbers, kind, [k, n, slices, 1]);
        let elem_bytes = w.bytes.len() / w.values.len();
        let place = w.tensor(0, Place::Packed);
        let in_range = buffer_with(&device, &w, Place::Packed);
        for at in [k - 1, k * n - 1] {
            // 2^17 is representable in both types, but not in F16.
            w.values[at] = 131_072.0;
            let bytes = 131_072.0f32.to_le_bytes();
            w.bytes[at * elem_bytes..][..elem_bytes].copy_from_slice(&bytes[4 - elem_bytes..]);
        }
        let whole = buffer_with(&device, &w, Place::Packed);
        // The same by writing only the changed rows, of which one part is in F16's range.
        let row = k * elem_bytes;
        for n in [0, 39] {
            let part = row * n..row * (n + 1);
            let content = Content::Bytes(&w.bytes[part.clone()]);
            in_range.write(&place, part.start, row, content).unwrap();
        }
        for buffer in [&whole, &in_range] {
            let mut read = vec![0; w.bytes.len()];
            buffer.read(&place, 0, &mut read).unwrap();
            assert!(read == w.bytes, "{kind:?}: other bytes than were written");
            for m in [1, 5] {
                let act = numbers.floats(m * k * slices);
                let have = mul_mat(&device, &w, buffer, &act, [k, m, slices, 1]).unwrap();
                let act = &act[..m * k];
                let want = reference::mul_mat(act, w.matrix(0), k);
                let error = reference::nmse(&have[..m * n], &want);
                assert!(error <= 1e-9, "{kind:?} M={m}: {error:.2e}");
            }
        }
    }
}

/// Regression: the product used the tiles of the whole weight for rows of the part.
#[test]
fn a_part_of_a_packed_weight_of_floats_is_multiplied_as_it_lies() {
    let device = device();
    let mut numbers = Numbers::new(12);
    let (k, n) = (64, 40);
    for (kind, slices) in [(Kind::Bf16, 1), (Kind::F32, 2)] {
        let w = Weight::random(&mut numbers, kind, [2 * k, n, slices, 1]);
        let buffer = buffer_with(&device, &w, Place::Packed);
        // The view has the first half of each row.
        let mut part = w.tensor(0, Place::Packed);
        part.shape.ne[0] = k;
        let values: Vec<f32> = (w.matrix(0).chunks_exact(2 * k))
            .flat_map(|row| &row[..k])
            .copied()
            .collect();
        for m in [1, 5] {
            let act = numbers.floats(m * k * slices);
            let work = Work::new(&device, &act, [k, m, slices, 1], [n, m, slices, 1], &[]);
            let work = work.unwrap();
            let stream = HexStream::new(Arc::clone(&device));
            stream
                .submit(0, &mut [work.node(Op::MulMat, part, &buffer)])
                .unwrap();
            let want = reference::mul_mat(&act[..m * k], &values, k);
            let error = reference::nmse(&work.result()[..m * n], &want);
            assert!(error <= 1e-9, "{kind:?} M={m}: {error:.2e}");
        }
    }
}

#[test]
fn who_calls_the_dsp_makes_no_difference() {
    let mut numbers = Numbers::new(8);
    let w = Weight::random(&mut numbers, KINDS[1], [96, 50, 1, 1]);
    let act = numbers.floats(9 * 96);
    let results = [Serving::Thread, Serving::Caller].map(|serving| {
        let device = device_with(strict(75), Options { serving, ..OPTIONS }).unwrap();
        let buffer = buffer_with(&device, &w, Place::Packed);
        [1, 9].map(|m| mul_mat(&device, &w, &buffer, &act[..96 * m], [96, m, 1, 1]).unwrap())
    });
    assert_eq!(results[0], results[1]);
}

#[test]
fn planes_share_slices_as_ggml_broadcasts() {
    let device = device();
    let mut numbers = Numbers::new(2);
    for kind in [Kind::F16, KINDS[1]] {
        let w = Weight::random(&mut numbers, kind, [64, 40, 2, 3]);
        let buffer = buffer_with(&device, &w, Place::Packed);
        for m in [1, 5] {
            // Each dimension has a different factor, so that an exchange of dimensions would be
            // noticed.
            let ne = [64, m, 4, 9];
            let act = numbers.floats(ne.iter().product());
            let have = mul_mat(&device, &w, &buffer, &act, ne).unwrap();
            for (plane, (have, act)) in have
                .chunks_exact(m * 40)
                .zip(act.chunks_exact(m * 64))
                .enumerate()
            {
                let slice = plane / 4 / 3 * 2 + plane % 4 / 2;
                let want = reference::mul_mat(act, w.matrix(slice), 64);
                let error = reference::nmse(have, &want);
                assert!(
                    error <= limit(kind, m),
                    "{kind:?} M={m} plane {plane}: {error:.2e}"
                );
            }
        }
    }
}

#[test]
fn each_row_goes_to_its_expert() {
    let device = device();
    let mut numbers = Numbers::new(3);
    let (k, n, experts, slots) = (64, 33, 5, 4);
    for kind in [Kind::F16, KINDS[1], KINDS[3], Kind::Bf16, Kind::F32] {
        let w = Weight::random(&mut numbers, kind, [k, n, experts, 1]);
        let buffer = buffer_with(&device, &w, Place::Packed);
        for (tokens, act_slots) in [(1, 1), (1, 4), (7, 1), (40, 2)] {
            let act = numbers.floats(k * act_slots * tokens);
            let ids = numbers.choices(tokens, slots, experts);
            let work = Work::new(
                &device,
                &act,
                [k, act_slots, tokens, 1],
                [n, slots, tokens, 1],
                &ids,
            )
            .unwrap();
            let stream = HexStream::new(Arc::clone(&device));
            stream
                .submit(
                    0,
                    &mut [work.node(Op::MulMatId, w.tensor(0, Place::Packed), &buffer)],
                )
                .unwrap();
            for (row, have) in work.result().chunks_exact(n).enumerate() {
                let (token, slot) = (row / slots, row % slots);
                let act = &act[(token * act_slots + slot % act_slots) * k..][..k];
                let want = reference::mul_mat(act, w.matrix(ids[row] as usize), k);
                let error = reference::nmse(have, &want);
                assert!(
                    error <= limit(kind, 1) * 4.0,
                    "{kind:?} {tokens} tokens, row {row}: {error:.2e}"
                );
            }
        }
    }
}

#[test]
fn an_expert_that_does_not_exist_is_an_error() {
    let mut numbers = Numbers::new(4);
    let w = Weight::random(&mut numbers, KINDS[1], [32, 32, 2, 1]);
    let device = device();
    let buffer = buffer_with(&device, &w, Place::Packed);
    for wrong in [2, -1] {
        let work = Work::new(
            &device,
            &numbers.floats(32),
            [32, 1, 1, 1],
            [32, 2, 1, 1],
            &[0, wrong],
        )
        .unwrap();
        let stream = HexStream::new(Arc::clone(&device));
        // The failing product comes between two correct ones, in memory that was mapped before all
        // of them.
        let right = [(); 2].map(|()| {
            let act = numbers.floats(32);
            Work::new(&device, &act, [32, 1, 1, 1], [32, 2, 1, 1], &[0, 1]).unwrap()
        });
        let weights = w.tensor(0, Place::Packed);
        let mut nodes =
            [&right[0], &work, &right[1]].map(|work| work.node(Op::MulMatId, weights, &buffer));
        let failed = stream.submit(0, &mut nodes).unwrap_err();
        assert_eq!(failed.node, Some(1));
        let text = failed.error.to_string();
        assert!(text.contains("a chosen expert does not exist"), "{text}");
        assert!(!device.npu().is_lost());
    }
    let act = numbers.floats(32);
    let work = Work::new(&device, &act, [32, 1, 1, 1], [32, 2, 1, 1], &[0, 1]).unwrap();
    let stream = HexStream::new(Arc::clone(&device));
    let weights = w.tensor(0, Place::Packed);
    stream
        .submit(0, &mut [work.node(Op::MulMatId, weights, &buffer)])
        .unwrap();
    for (expert, have) in work.result().chunks_exact(32).enumerate() {
        let want = reference::mul_mat(&act, w.matrix(expert), 32);
        assert!(reference::nmse(have, &want) <= 1e-4);
    }
}

/// A view whose experts are one and the same: packed they would be larger than all memory, and the
/// host tried to allocate that.
#[test]
fn experts_of_a_view_that_are_too_large_when_packed_are_refused() {
    let mut numbers = Numbers::new(22);
    let w = Weight::random(&mut numbers, Kind::F16, [64, 32, 1, 1]);
    let device = device();
    let buffer = buffer_with(&device, &w, Place::Packed);
    let act = numbers.floats(64);
    let work = Work::new(&device, &act, [64, 1, 1, 1], [32, 2, 1, 1], &[0, 1]).unwrap();
    let stream = HexStream::new(Arc::clone(&device));
    let view = |experts| {
        let mut view = w.tensor(0, Place::Packed);
        view.shape.ne[2] = experts;
        view.shape.nb[2] = 0;
        work.node(Op::MulMatId, view, &buffer)
    };
    let mut many = [view(1 << 30)];
    assert_eq!(device.refusal(&many[0].operation), Some(hexagon::TOO_LARGE));
    let text = stream.submit(0, &mut many).unwrap_err().error.to_string();
    assert!(
        text.contains("weight takes 4398046511104 bytes packed"),
        "{text}"
    );
    let mut few = [view(2)];
    assert_eq!(device.refusal(&few[0].operation), None);
    stream.submit(0, &mut few).unwrap();
    let want = reference::mul_mat(&act, &w.values, 64);
    for have in work.result().chunks_exact(32) {
        assert!(reference::nmse(have, &want) <= limit(Kind::F16, 1));
    }
}

/// Regression: such weights were packed as infinity, though a log line promised FP32.
#[test]
fn experts_beyond_f16_are_refused_by_name() {
    let device = device();
    for kind in [Kind::Bf16, Kind::F32] {
        let mut w = Weight::random(&mut Numbers::new(5), kind, [64, 32, 2, 1]);
        let (at, elem_bytes) = (w.bytes.len() - 4, w.bytes.len() / w.values.len());
        w.bytes[at..].copy_from_slice(&(-131_072.0_f32).to_le_bytes());
        w.bytes[at..][..4 - elem_bytes].fill(0);
        let buffer = buffer_with(&device, &w, Place::Packed);
        let stream = HexStream::new(Arc::clone(&device));
        // ggml's RPC server does not know which tensors are weights, so the role may be another.
        for (m, role) in [(1, Role::Weights), (4, Role::Weights), (4, Role::State)] {
            let act = Numbers::new(6).floats(64 * m);
            let ids: Vec<i32> = [0, 1].repeat(m);
            let work = Work::new(&device, &act, [64, 1, m, 1], [32, 2, m, 1], &ids).unwrap();
            let experts = Tensor {
                role,
                ..w.tensor(0, Place::Packed)
            };
            let node = work.node(Op::MulMatId, experts, &buffer);
            let failed = stream.submit(0, &mut [node]).unwrap_err();
            let text = failed.error.to_string();
            let want =
                "weight has the value -131072, beyond F16's range, which no product of experts";
            assert!(text.contains(want), "{kind:?} M={m}: {text}");
            assert_eq!(failed.node, Some(0), "{kind:?} M={m}");
            assert!(!device.npu().is_lost());
        }
    }
}

/// Regression: for three and more rows, one row of NaN or infinity lost the device for every
/// context.
#[test]
fn a_row_that_is_not_finite_gives_no_numbers_and_leaves_the_others_alone() {
    let device = device();
    let mut numbers = Numbers::new(8);
    for kind in [KINDS[0], KINDS[1], KINDS[3]] {
        let w = Weight::random(&mut numbers, kind, [96, 64, 1, 1]);
        let buffer = buffer_with(&device, &w, Place::Packed);
        for m in [1, 2, 3, 32, 33] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut act = numbers.floats(96 * m);
                let row = m / 2;
                act[row * 96 + 5] = bad;
                let have = mul_mat(&device, &w, &buffer, &act, [96, m, 1, 1]).unwrap();
                for (m, (have, act)) in have.chunks(64).zip(act.chunks(96)).enumerate() {
                    if m == row {
                        // Dot products may return infinity.
                        let none = (have.iter())
                            .all(|x| x.is_nan() || bad.is_infinite() && x.is_infinite());
                        assert!(none, "{kind:?} {bad} row {m}: {have:?}");
                    } else {
                        let want = reference::mul_mat(act, &w.values, 96);
                        let error = reference::nmse(have, &want);
                        assert!(error <= 1e-4, "{kind:?} {bad} row {m}: {error:.2e}");
                    }
                }
            }
        }
    }
    // The same for products of chosen experts, whose rows are listed.
    let w = Weight::random(&mut numbers, KINDS[1], [96, 64, 2, 1]);
    let buffer = buffer_with(&device, &w, Place::Packed);
    for tokens in [1, 2, 3, 32] {
        let mut act = numbers.floats(96 * tokens);
        act[7] = f32::NAN;
        let ids: Vec<i32> = (0..2 * tokens).map(|i| i as i32 % 2).collect();
        let act_ne = [96, 1, tokens, 1];
        let work = Work::new(&device, &act, act_ne, [64, 2, tokens, 1], &ids).unwrap();
        let stream = HexStream::new(Arc::clone(&device));
        let weights = w.tensor(0, Place::Packed);
        stream
            .submit(0, &mut [work.node(Op::MulMatId, weights, &buffer)])
            .unwrap();
        for (row, have) in work.result().chunks_exact(64).enumerate() {
            if row < 2 {
                assert!(have.iter().all(|x| x.is_nan()), "{tokens} tokens: {have:?}");
            } else {
                let act = &act[row / 2 * 96..][..96];
                let want = reference::mul_mat(act, w.matrix(row % 2), 96);
                assert!(
                    reference::nmse(have, &want) <= 1e-4,
                    "{tokens} tokens, row {row}"
                );
            }
        }
    }
    assert!(!device.npu().is_lost());
}

/// A whole layer's worth of nodes, each reading another's result.
#[test]
fn a_graph_is_one_submission_in_order() {
    let device = device();
    let mut numbers = Numbers::new(5);
    let w = Weight::random(&mut numbers, KINDS[1], [96, 96, 1, 1]);
    let buffer = buffer_with(&device, &w, Place::Packed);
    let act = numbers.floats(3 * 96);
    let first = Work::new(&device, &act, [96, 3, 1, 1], [96, 3, 1, 1], &[]).unwrap();
    let stream = HexStream::new(Arc::clone(&device));
    // The second node reads the first node's result, in the same buffer, and overwrites the
    // activations.
    let weights = w.tensor(0, Place::Packed);
    let mut second = first.node(Op::MulMat, weights, &buffer);
    second.operation.dst = first.act;
    second.operation.src[1] = Some(first.dst);
    let mut nodes = [first.node(Op::MulMat, weights, &buffer), second];
    stream.submit(0, &mut nodes).unwrap();
    let floats = |values: &[f64]| values.iter().map(|x| *x as f32).collect::<Vec<_>>();
    let want = reference::mul_mat(&act, &w.values, 96);
    let want = reference::mul_mat(&floats(&want), &w.values, 96);
    let second = Work {
        dst: first.act,
        ..first
    };
    let error = reference::nmse(&second.result(), &want);
    assert!(error <= 1e-5, "{error:.2e}");
}

#[test]
fn every_architecture_computes() {
    let mut numbers = Numbers::new(6);
    for arch in [73, 75, 79, 81] {
        let device = device_with(strict(arch), OPTIONS).unwrap();
        assert!(
            device.description().contains(&format!("V{arch}")),
            "{}",
            device.description()
        );
        let w = Weight::random(&mut numbers, KINDS[3], [256, 64, 1, 1]);
        let buffer = buffer_with(&device, &w, Place::Packed);
        for m in [1, 4] {
            let act = numbers.floats(m * 256);
            let have = mul_mat(&device, &w, &buffer, &act, [256, m, 1, 1]).unwrap();
            let error = reference::nmse(&have, &reference::mul_mat(&act, &w.values, 256));
            assert!(error <= limit(w.kind, m), "V{arch} M={m}: {error:.2e}");
        }
    }
}

/// Everything is packed (`GGML_RUST_NPU_REPACK=always`). Other operations get ggml's layout, and a
/// graph that multiplies with a tensor before it copies it gives the same results as two graphs.
#[test]
fn what_else_uses_a_packed_tensor_finds_it_unpacked() {
    let options = Options {
        repack: Repack::Always,
        ..OPTIONS
    };
    let device = device_with(strict(75), options).unwrap();
    let mut numbers = Numbers::new(12);
    for kind in [Kind::F16, KINDS[1], KINDS[3]] {
        let w = Weight::random(&mut numbers, kind, [64, 40, 1, 1]);
        let buffer = buffer_with(&device, &w, Place::Packed);
        let act = numbers.floats(5 * 64);
        let work = Work::new(&device, &act, [64, 5, 1, 1], [40, 5, 1, 1], &[]).unwrap();
        let copy = tensor("copy", DType::F32, [64, 40, 1, 1], 0);
        let copies = HexBuffer::new(&device, 64 * 40 * 4, false).unwrap();
        let src0 = w.tensor(0, Place::Packed);
        let stream = HexStream::new(Arc::clone(&device));
        // Packed in the first round, and no longer in the second.
        for _ in 0..2 {
            let copying = Operation {
                op: Op::Cpy,
                params: [0; PARAMS],
                dst: copy,
                src: sources(&[src0]),
            };
            let mut src = [None; MAX_SOURCES];
            src[0] = Some(&buffer);
            let copying = node(copying, Some(&copies), src);
            let mut nodes = [work.node(Op::MulMat, src0, &buffer), copying];
            stream.submit(7, &mut nodes).unwrap();
            assert!(
                stream.replay(7).is_none(),
                "the host unpacked for this one time"
            );
            let error = reference::nmse(&work.result(), &reference::mul_mat(&act, &w.values, 64));
            assert!(error <= limit(kind, 5), "{kind:?}: {error:.2e}");
            let mut copied = vec![0.0f32; 64 * 40];
            copies
                .read(&copy, 0, bytemuck::cast_slice_mut(&mut copied))
                .unwrap();
            assert_eq!(copied, w.values, "{kind:?}");
        }
        let mut bytes = vec![0; w.bytes.len()];
        buffer.read(&src0, 0, &mut bytes).unwrap();
        assert_eq!(bytes, w.bytes, "{kind:?}");
    }
}
