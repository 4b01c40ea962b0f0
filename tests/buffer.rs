//! Proves that a buffer of packed weights behaves like memory: whatever was written, in whatever
//! pieces, is read back bit for bit, and multiplications use it.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use common::{F32_IN_BLOCKS, Numbers, Weight, contiguous, device, mul_mat, packed, tensor};
use ggml_rust_npu::backend::{Buffer, Content, Device};
use ggml_rust_npu::graph::{Op, Operation, PARAMS, Place, Tensor, sources};
use ggml_rust_npu::host_memory::system_memory;
use ggml_rust_npu::reference;
use ggml_rust_npu::rockchip::caps::{self, RkCaps};
use ggml_rust_npu::rockchip::driver::Rknn;
use ggml_rust_npu::rockchip::plan::Target;
use ggml_rust_npu::rockchip::{RkBuffer, RkDevice};
use ggml_rust_npu::tensor::{DType, Format};
use rknpu_ops::sim;
use std::sync::Arc;

/// A device that keeps the bytes of its weights.
fn keeping(caps: &'static RkCaps) -> Arc<RkDevice> {
    let rknn = Rknn::simulate(sim::Options::new(caps.soc)).unwrap();
    let target = Target {
        keep: Some(true),
        ..Target::from(caps)
    };
    Arc::new(RkDevice::start(rknn, target).unwrap())
}

#[test]
fn writes_in_any_pieces_and_order_give_the_same_as_one_write() {
    let mut numbers = Numbers::new(11);
    let device = keeping(&caps::RK3588);
    for dtype in [DType::F16, F32_IN_BLOCKS] {
        let (k, n) = (64, 90);
        let w = Weight::random(&mut numbers, dtype, [k, n, 2, 1]);
        let act = numbers.floats(3 * k * 2);
        let ne = [k, 3, 2, 1];
        let whole = packed(&device, &w, 4096);
        let want = mul_mat(&device, &w, Some((&whole, 4096)), &act, ne).unwrap();

        for round in 0..6 {
            let tensor = w.tensor(Some(4096));
            let bytes = 4096 + device.packed_bytes(&tensor);
            let buffer = RkBuffer::new(Arc::clone(&device), bytes).unwrap();
            let total = w.bytes.len();
            // Sizes and offsets are odd, end inside rows, blocks and elements, and overlap; garbage
            // is written first.
            buffer
                .write(&tensor, 5, total - 9, Content::Fill(0x11))
                .unwrap();
            let mut covered = vec![false; total];
            while covered.iter().any(|done| !done) {
                let start = covered.iter().position(|done| !done).unwrap();
                let start = start.saturating_sub(numbers.below(300));
                let size = (1 + numbers.below(4000)).min(total - start);
                let piece = &w.bytes[start..start + size];
                buffer
                    .write(&tensor, start, size, Content::Bytes(piece))
                    .unwrap();
                covered[start..start + size].fill(true);
            }
            let mut back = vec![0; total];
            buffer.read(&tensor, 0, &mut back).unwrap();
            assert!(back == w.bytes, "{dtype:?} round {round}");
            let mut part = vec![0; 77];
            buffer.read(&tensor, 1000, &mut part).unwrap();
            assert_eq!(part, w.bytes[1000..1077]);
            let have = mul_mat(&device, &w, Some((&buffer, 4096)), &act, ne).unwrap();
            assert_eq!(have, want, "{dtype:?} round {round}");
        }
    }
}

/// Regression: it was a panic, which the C interface caught.
#[test]
fn a_weight_whose_packed_form_ends_behind_its_buffer_is_refused() {
    let device = keeping(&caps::RK3588);
    let w = Weight::random(&mut Numbers::new(12), DType::F16, [64, 90, 1, 1]);
    let tensor = w.tensor(Some(4096));
    let (plain, packed) = (w.bytes.len(), device.packed_bytes(&tensor));
    assert!(plain < packed);
    for (bytes, fits) in [(plain, false), (packed - 1, false), (packed, true)] {
        let buffer = RkBuffer::new(Arc::clone(&device), 4096 + bytes).unwrap();
        let written = buffer.write(&tensor, 0, plain, Content::Bytes(&w.bytes));
        if fits {
            written.unwrap();
            continue;
        }
        let text = written.unwrap_err().to_string();
        let want = format!("takes {packed} bytes packed, and its buffer has {bytes} for it");
        assert!(text.ends_with(&want), "{text}");
    }
}

#[test]
fn a_weight_that_is_written_again_is_used_with_its_new_values() {
    let mut numbers = Numbers::new(12);
    let device = keeping(&caps::RK3576);
    let old = Weight::random(&mut numbers, F32_IN_BLOCKS, [96, 40, 1, 1]);
    let new = Weight::random(&mut numbers, F32_IN_BLOCKS, [96, 40, 1, 1]);
    let act = numbers.floats(96);
    let buffer = packed(&device, &old, 0);
    let before = mul_mat(&device, &old, Some((&buffer, 0)), &act, [96, 1, 1, 1]).unwrap();
    let row = new.row_bytes();
    let copy = Content::Bytes(&new.bytes[7 * row..8 * row]);
    buffer
        .write(&new.tensor(Some(0)), 7 * row, row, copy)
        .unwrap();
    let after = mul_mat(&device, &new, Some((&buffer, 0)), &act, [96, 1, 1, 1]).unwrap();
    let changed: Vec<_> = (0..40).filter(|n| before[*n] != after[*n]).collect();
    assert_eq!(changed, [7]);
}

/// Regression: without a dequantizer it was a panic, and with that of another type it read after
/// the rows.
#[test]
fn a_weight_that_a_tensor_of_another_type_changed_is_used_with_its_new_values() {
    let mut numbers = Numbers::new(14);
    let device = keeping(&caps::RK3588);
    let old = Weight::random(&mut numbers, F32_IN_BLOCKS, [96, 40, 1, 1]);
    let mut new = Weight::random(&mut numbers, F32_IN_BLOCKS, [96, 40, 1, 1]);
    let row = old.row_bytes();
    new.bytes[..7 * row].copy_from_slice(&old.bytes[..7 * row]);
    new.bytes[8 * row..].copy_from_slice(&old.bytes[8 * row..]);
    let act = numbers.floats(96);
    let product_in =
        |buffer: &RkBuffer| mul_mat(&device, &new, Some((buffer, 0)), &act, [96, 1, 1, 1]).unwrap();
    let want = product_in(&packed(&device, &new, 0));
    let of_w = old.tensor(Some(0));
    for other in [
        Tensor {
            dtype: DType::I8,
            shape: contiguous(DType::I8, [old.bytes.len(), 1, 1, 1]),
            dequantize: None,
            ..of_w
        },
        // The same size, but a type whose blocks have another meaning.
        Tensor {
            format: Some(Format::Iq4Nl),
            ..of_w
        },
    ] {
        let buffer = packed(&device, &old, 0);
        let change = Content::Bytes(&new.bytes[7 * row..8 * row]);
        buffer.write(&other, 7 * row, row, change).unwrap();
        assert_eq!(product_in(&buffer), want);
        // After a write of a part, all rows must be packed again.
        let same = Content::Bytes(&new.bytes[8 * row..9 * row]);
        buffer.write(&of_w, 8 * row, row, same).unwrap();
        assert_eq!(product_in(&buffer), want);
    }
}

#[test]
fn a_tensor_of_another_shape_at_the_same_place_replaces_the_old_one() {
    let mut numbers = Numbers::new(13);
    let device = keeping(&caps::RK3588);
    let old = Weight::random(&mut numbers, F32_IN_BLOCKS, [128, 64, 1, 1]);
    let new = Weight::random(&mut numbers, F32_IN_BLOCKS, [64, 96, 1, 1]);
    let act = numbers.floats(64);
    let buffer = packed(&device, &old, 0);
    let tensor = new.tensor(Some(0));
    let size = new.bytes.len();
    buffer
        .write(&tensor, 0, size, Content::Bytes(&new.bytes))
        .unwrap();
    let have = mul_mat(&device, &new, Some((&buffer, 0)), &act, [64, 1, 1, 1]).unwrap();
    let fresh = packed(&device, &new, 0);
    let want = mul_mat(&device, &new, Some((&fresh, 0)), &act, [64, 1, 1, 1]).unwrap();
    assert_eq!(have, want);
}

#[test]
fn a_cleared_buffer_is_all_that_value() {
    let mut numbers = Numbers::new(14);
    let device = device(&caps::RK3588);
    let w = Weight::random(&mut numbers, F32_IN_BLOCKS, [32, 32, 1, 1]);
    let buffer = packed(&device, &w, 0);
    buffer.clear(0);
    // ggml's graph allocator aligns addresses, so the base has to be aligned, too.
    assert!(buffer.base() != 0 && buffer.base().is_multiple_of(4096));
    let mut back = vec![1; w.bytes.len()];
    buffer.read(&w.tensor(Some(0)), 0, &mut back).unwrap();
    assert!(back.iter().all(|byte| *byte == 0));
}

#[test]
fn bytes_that_are_not_kept_are_released_when_all_were_written_and_never_misread() {
    let mut numbers = Numbers::new(15);
    let rknn = Rknn::simulate(sim::Options::new(caps::RK3588.soc)).unwrap();
    // The default settings, under which the original bytes are not needed.
    let device = Arc::new(RkDevice::start(rknn, &caps::RK3588).unwrap());
    // Two tensors of 256 KiB each, which is more than a page.
    let (k, n) = (512, 128);
    let [first, second] = [0, 1].map(|_| Weight::random(&mut numbers, F32_IN_BLOCKS, [k, n, 1, 1]));
    let place = device
        .packed_bytes(&first.tensor(Some(0)))
        .next_multiple_of(4096);
    let buffer = RkBuffer::new(Arc::clone(&device), 2 * place).unwrap();
    let act = numbers.floats(k);
    let size = first.bytes.len();
    let write = |w: &Weight, at: usize, from: usize, to: usize| {
        let copy = Content::Bytes(&w.bytes[from..to]);
        buffer.write(&w.tensor(Some(at)), from, to - from, copy)
    };
    let multiply = |w: &Weight, at: usize| {
        let have = mul_mat(&device, w, Some((&buffer, at)), &act, [k, 1, 1, 1]).unwrap();
        reference::nmse(&have, &reference::mul_mat(&act, &w.values, k))
    };
    let read = |w: &Weight, at: usize| {
        let mut back = vec![0; size];
        let result = buffer.read(&w.tensor(Some(at)), 0, &mut back);
        result.map(|()| back).map_err(|error| error.to_string())
    };

    // In pieces and out of order: the bytes can be read until the last piece is written.
    write(&first, 0, 1000, 5000).unwrap();
    write(&first, 0, 4000, size).unwrap();
    write(&second, place, 0, size - 1).unwrap();
    assert!(read(&first, 0).unwrap()[1000..] == first.bytes[1000..]);
    write(&first, 0, 0, 1000).unwrap();
    let error = read(&first, 0).unwrap_err();
    assert!(
        error.contains("read") && error.contains("KEEP=on"),
        "{error}"
    );
    assert!(multiply(&first, 0) < 1e-3);
    // The neighbouring tensor is unchanged.
    assert!(read(&second, place).unwrap()[..size - 1] == second.bytes[..size - 1]);
    write(&second, place, size - 1, size).unwrap();
    assert!(read(&second, place).is_err());
    assert!(multiply(&second, place) < 1e-3);

    // A part would have to be packed together with released bytes. Writing the whole tensor is
    // possible.
    let error = write(&first, 0, 0, 1000).unwrap_err().to_string();
    assert!(error.contains("written in part"), "{error}");
    assert!(multiply(&first, 0) < 1e-3);
    write(&second, 0, 0, size).unwrap();
    assert!(multiply(&second, 0) < 1e-3);
    // The bytes cannot be packed in another shape either.
    let other = Weight {
        ne: [k / 2, n * 2, 1, 1],
        ..second.clone()
    };
    let error = mul_mat(
        &device,
        &other,
        Some((&buffer, 0)),
        &act[..k / 2],
        [k / 2, 1, 1, 1],
    );
    assert!(error.unwrap_err().to_string().contains("another shape"));
}

/// The bytes of the first weight are released, so it could not be packed again.
#[test]
fn a_write_leaves_the_weights_beside_it_and_one_that_is_refused_all() {
    let mut numbers = Numbers::new(32);
    let device = device(&caps::RK3588);
    let first = Weight::random(&mut numbers, F32_IN_BLOCKS, [64, 40, 1, 1]);
    let second = Weight::random(&mut numbers, DType::F16, [64, 40, 1, 1]);
    let size = device.packed_bytes(&first.tensor(Some(0)));
    let [low, at] = [4096, 4096 + size.next_multiple_of(4096)];
    let bytes = at + device.packed_bytes(&second.tensor(Some(at)));
    let buffer = RkBuffer::new(Arc::clone(&device), bytes).unwrap();
    for (w, at) in [(&first, low), (&second, at)] {
        let content = Content::Bytes(&w.bytes);
        (buffer.write(&w.tensor(Some(at)), 0, w.bytes.len(), content)).unwrap();
    }
    let act = numbers.floats(64);
    let check = || {
        for (w, at) in [(&first, low), (&second, at)] {
            let have = mul_mat(&device, w, Some((&buffer, at)), &act, [64, 1, 1, 1]).unwrap();
            let error = reference::nmse(&have, &reference::mul_mat(&act, &w.values, 64));
            assert!(error <= 1e-3, "weight at {at}: {error:.2e}");
        }
    };
    check();
    // The tensor is a part of a larger one, whose other bytes were never written.
    let large = Weight::random(&mut numbers, F32_IN_BLOCKS, [64, 48, 1, 1]);
    let part = Content::Bytes(&large.bytes[..1000]);
    let error = buffer.write(&large.tensor(Some(low)), 0, 1000, part);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("written in part"), "{error}");
    check();
}

#[test]
fn a_part_of_any_matrix_of_a_weight_is_written_where_it_belongs() {
    let mut numbers = Numbers::new(33);
    let device = keeping(&caps::RK3588);
    let [k, n, slices] = [64, 40, 6];
    let mut w = Weight::random(&mut numbers, DType::F16, [k, n, 2, 3]);
    let new = Weight::random(&mut numbers, DType::F16, [k, n, 2, 3]);
    let buffer = packed(&device, &w, 0);
    let (row, act) = (w.row_bytes(), numbers.floats(k * slices));
    for number in [7, 100, 239] {
        let part = number * row..(number + 1) * row;
        let content = Content::Bytes(&new.bytes[part.clone()]);
        (buffer.write(&w.tensor(Some(0)), part.start, row, content)).unwrap();
        let elems = number * k..(number + 1) * k;
        w.values[elems.clone()].copy_from_slice(&new.values[elems]);
        let have = mul_mat(&device, &w, Some((&buffer, 0)), &act, [k, 1, 2, 3]).unwrap();
        for (slice, have) in have.chunks_exact(n).enumerate() {
            let values = &w.values[slice * k * n..][..k * n];
            let want = reference::mul_mat(&act[slice * k..][..k], values, k);
            let error = reference::nmse(have, &want);
            assert!(error <= 1e-6, "row {number}, slice {slice}: {error:.2e}");
        }
    }
}

/// Calls `visit` with the weights of a model of 8 billion parameters in Q8_0: 32 layers of width
/// 4096, feed-forward 14336, 8 heads for keys, a head of 128,256 rows; embeddings stay with the
/// CPU.
fn weights_of_8b(visit: &mut dyn FnMut(Tensor)) {
    const Q8_0: DType = DType::Quantized {
        block_elems: 32,
        block_bytes: 34,
    };
    let mut add = |k, n| {
        let ne = [k, n, 1, 1];
        visit(tensor("weight", Q8_0, contiguous(Q8_0, ne)));
    };
    for _ in 0..32 {
        for (k, n) in [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096)] {
            add(k, n);
        }
        for (k, n) in [(4096, 14336), (4096, 14336), (14336, 4096)] {
            add(k, n);
        }
    }
    add(4096, 128_256);
}

#[test]
fn an_8b_model_takes_its_size_once_and_memory_says_so_where_it_is_twice() {
    let (mut file, mut buffers, mut resident) = (0, 0, [0; 2]);
    let (plain, kept) = (device(&caps::RK3588), keeping(&caps::RK3588));
    weights_of_8b(&mut |tensor| {
        file += tensor.shape.span_bytes(tensor.dtype).unwrap();
        buffers += plain.packed_bytes(&tensor);
        for (sum, device) in resident.iter_mut().zip([&plain, &kept]) {
            *sum += device.resident_bytes(&tensor);
        }
    });
    println!("Q8_0 file {file}, buffers {buffers}, resident {resident:?}");
    assert_eq!(file, 7_973_699_584);
    // Packing adds less than 1 % of padding to each weight, because INT8 has fewer bytes than Q8_0.
    assert_eq!(buffers, file);
    assert_eq!(resident, [file, 2 * file]);
    // llama.cpp compares the size of the buffers with this.
    let machine = system_memory();
    let ((free, total), (half, half_total)) = (plain.memory(machine), kept.memory(machine));
    if total >= plain.address_space().1 {
        println!("skipped: {total} bytes of memory are more than the NPU's address spaces");
        return;
    }
    let about = |have: usize, want: usize| have.abs_diff(want) < want / 10;
    assert!(
        about(half, free / 2) && half_total == total / 2,
        "{free} {half}"
    );
}

#[test]
fn what_the_device_supports_fits_in_a_buffer() {
    const Q8_0: DType = DType::Quantized {
        block_elems: 32,
        block_bytes: 34,
    };
    const F32_BLOCKS: DType = F32_IN_BLOCKS;
    let device = device(&caps::RK3588);
    // The heads of 8B, 12B (Gemma 3) and 70B models, and experts of a large mixture.
    for (dtype, ne, supported) in [
        (DType::F16, [4096, 128_256, 1, 1], true),
        (DType::F16, [3840, 262_144, 1, 1], false),
        (DType::F16, [8192, 128_256, 1, 1], false),
        (Q8_0, [3840, 262_144, 1, 1], true),
        (Q8_0, [8192, 128_256, 1, 1], true),
        (Q8_0, [7168, 2048, 256, 1], false),
        // The packed form fits, but the bytes in ggml's layout do not.
        (F32_BLOCKS, [4096, 128_256, 1, 1], false),
        (DType::F32, [4096, 128_256, 1, 1], false),
    ] {
        let [k, n, experts, _] = ne;
        let weights = Tensor {
            place: Place::Packed,
            ..tensor("output.weight", dtype, contiguous(dtype, ne))
        };
        let act = tensor(
            "act",
            DType::F32,
            contiguous(DType::F32, [k, 512, experts, 1]),
        );
        let dst = tensor(
            "dst",
            DType::F32,
            contiguous(DType::F32, [n, 512, experts, 1]),
        );
        let operation = Operation {
            op: Op::MulMat,
            params: [0; PARAMS],
            dst,
            src: sources(&[weights, act]),
        };
        assert_eq!(device.supports(&operation), supported, "{dtype:?} {ne:?}");
        if supported {
            assert!(device.packed_bytes(&weights) <= caps::DOMAIN_WEIGHT_BYTES);
        }
    }
}

/// RWKV multiplies with `ggml_reshape_4d(w, k, n, 1, 5)` of a weight of [k, n, 5]. Its bytes are
/// released, so the graph failed.
#[test]
fn a_reshaped_weight_is_used_as_it_was_packed() {
    let mut numbers = Numbers::new(31);
    let device = device(&caps::RK3588);
    let mut w = Weight::random(&mut numbers, DType::F16, [64, 40, 6, 1]);
    let buffer = packed(&device, &w, 0);
    for slices in [[1, 6], [3, 2], [6, 1]] {
        w.ne = [64, 40, slices[0], slices[1]];
        let ne = [64, 3, slices[0], slices[1]];
        let act = numbers.floats(ne.iter().product());
        let have = mul_mat(&device, &w, Some((&buffer, 0)), &act, ne).unwrap();
        for (slice, have) in have.chunks_exact(3 * 40).enumerate() {
            let w = &w.values[slice * 64 * 40..][..64 * 40];
            let want = reference::mul_mat(&act[slice * 3 * 64..][..3 * 64], w, 64);
            let error = reference::nmse(have, &want);
            assert!(error <= 1e-6, "{slices:?} {slice}: {error:.2e}");
        }
    }
}
