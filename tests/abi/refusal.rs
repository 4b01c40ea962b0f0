//! Questions of ggml, and errors: tensors that are refused, and the state after a failure.

use std::ffi::{CStr, c_char};
use std::ptr::{null, null_mut};

use ggml_rust_npu::abi::*;
use half::f16;

use super::common::*;

/// Regression: the stream's lock stayed poisoned, and each node reset the stream. Later graphs were
/// successes that computed nothing.
#[test]
fn a_stream_that_failed_inside_says_so_until_it_is_made_again() {
    let _turn = turn();
    let product = Product::new();
    let stream = Stream::new(HEX);
    assert_eq!(stream.compute(5, &[product.node]), NPU_STATUS_OK);
    product.spoil();
    PANIC.set(true);
    assert_eq!(stream.compute(0, &[product.node]), NPU_STATUS_FAILED);
    assert!(!PANIC.get(), "no debug line while a graph is computed");
    assert_eq!(
        lines_with("internal error in npu_backend_compute: a fault of the test"),
        1
    );
    for _ in 0..3 {
        assert_eq!(stream.compute(0, &[product.node]), NPU_STATUS_FAILED);
        assert_eq!(stream.replay(5), Some(NPU_STATUS_FAILED));
        assert_eq!(lines_with("out of use"), 2);
    }
    drop(stream);
    assert_eq!(Stream::new(HEX).compute(0, &[product.node]), NPU_STATUS_OK);
    product.check();
}

/// Regression: the nodes before it stayed in the stream, and were computed with the next graph.
#[test]
fn a_graph_with_a_node_that_is_refused_leaves_nothing_for_the_next_one() {
    let _turn = turn();
    let (product, other) = (Product::new(), Product::new());
    let stream = Stream::new(HEX);
    let unknown = node(c"NO_SUCH_OP", other.node.dst, &[]);
    other.spoil();
    assert_eq!(stream.compute(0, &[other.node, unknown]), NPU_STATUS_FAILED);
    assert_eq!(stream.compute(0, &[product.node]), NPU_STATUS_OK);
    product.check();
    let (_, bytes) = other.memory.get(&other.node.dst, N * M * 4, 0);
    assert_eq!(bytes, [0x33; N * M * 4]);
}

/// Regression: panics while bytes were written or read were reported as successes.
#[test]
fn a_write_or_read_that_fails_inside_is_reported_and_no_graph_uses_the_buffer() {
    let _turn = turn();
    for (device, packed) in [(HEX, true), (HEX, false), (RK, true)] {
        let buffer = Buffer::new(device, 8192, device == HEX && !packed);
        let place = if packed {
            NPU_PLACE_PACKED
        } else {
            NPU_PLACE_DEVICE
        };
        let end = tensor(
            c"end",
            false,
            [64, 1, 1, 1],
            place,
            NPU_ROLE_STATE,
            &buffer,
            7936,
        );
        assert_eq!(buffer.set(&end, &[7; 256]), NPU_STATUS_OK);
        assert_eq!(buffer.set_at(&end, &[8; 256], 1 << 20), NPU_STATUS_FAILED);
        assert_eq!(
            lines_with("internal error in npu_buffer_set"),
            1,
            "{device}"
        );
        let (status, bytes) = buffer.get(&end, 256, 1 << 20);
        assert_eq!((status, bytes), (NPU_STATUS_FAILED, vec![0xff; 256]));
        assert_eq!(
            lines_with("internal error in npu_buffer_get"),
            1,
            "{device}"
        );
        let (status, bytes) = buffer.get(&end, 256, 0);
        assert_eq!((status, bytes), (NPU_STATUS_OK, vec![7; 256]));
    }
    let product = Product::new();
    let stream = Stream::new(HEX);
    assert_eq!(stream.compute(5, &[product.node]), NPU_STATUS_OK);
    assert_eq!(
        product.weights.set_at(&product.w, &[0; 8], 1 << 20),
        NPU_STATUS_FAILED
    );
    assert_eq!(stream.replay(5), None, "its nodes are looked at");
    lines_with("");
    assert_eq!(stream.compute(5, &[product.node]), NPU_STATUS_FAILED);
    assert_eq!(
        lines_with("w is in a buffer that an earlier error left unfinished"),
        1
    );
    // The device still works, and so does the buffer once all of it has been written again.
    let other = Product::new();
    assert_eq!(stream.compute(0, &[other.node]), NPU_STATUS_OK);
    other.check();
    // SAFETY: alive.
    unsafe { npu_buffer_clear(product.weights.0, 0) };
    let values: Vec<f16> = floats(K * N, 1).into_iter().map(f16::from_f32).collect();
    assert_eq!(
        product
            .weights
            .set(&product.w, bytemuck::cast_slice(&values)),
        NPU_STATUS_OK
    );
    assert_eq!(stream.compute(0, &[product.node]), NPU_STATUS_OK);
    product.check();
}

#[test]
fn a_tensor_outside_of_its_buffer_is_refused() {
    let _turn = turn();
    let product = Product::new();
    let stream = Stream::new(HEX);
    for distance in [-1, 1] {
        let mut node = product.node;
        let size = isize::try_from(AT + (K + N) * M * 4).unwrap();
        node.dst.data = node.dst.data.wrapping_byte_offset(distance * size);
        assert_eq!(stream.compute(0, &[node]), NPU_STATUS_FAILED);
        assert_eq!(lines_with("dst is not inside its buffer"), 1);
    }
    assert_eq!(stream.compute(0, &[product.node]), NPU_STATUS_OK);
    product.check();
}

#[test]
fn a_tensor_with_a_negative_dimension_is_neither_written_nor_read() {
    let _turn = turn();
    let product = Product::new();
    let mut bad = product.act;
    bad.ne[2] = -1;
    lines_with("");
    assert_eq!(product.memory.set(&bad, &[0; 64]), NPU_STATUS_FAILED);
    assert_eq!(lines_with("a dimension is negative"), 1);
    assert_eq!(
        product.memory.get(&bad, 4, 0),
        (NPU_STATUS_FAILED, vec![0xff; 4])
    );
    assert_eq!(Stream::new(HEX).compute(0, &[product.node]), NPU_STATUS_OK);
    product.check();
}

/// Regression: sizes were multiplied without a check, which was a panic or, in a release build, a
/// small number.
#[test]
fn a_tensor_that_no_memory_holds_is_refused() {
    let _turn = turn();
    let product = Product::new();
    let stream = Stream::new(HEX);
    lines_with("");
    for change in [
        |tensor: &mut NpuTensor| tensor.ne[1] = i64::MAX,
        |tensor: &mut NpuTensor| tensor.ne = [1 << 31; 4],
        |tensor: &mut NpuTensor| tensor.nb[3] = u64::MAX,
        |tensor: &mut NpuTensor| (tensor.ne[2], tensor.nb[2]) = (1 << 32, 1 << 32),
    ] {
        let mut node = product.node;
        change(&mut node.src[1]);
        // SAFETY: the node and all it points to are alive; only metadata is read.
        assert!(!unsafe { npu_supports_op(HEX, &node) });
        assert_eq!(stream.compute(0, &[node]), NPU_STATUS_FAILED);
        assert_eq!(
            product.memory.get(&node.src[1], 4, 0),
            (NPU_STATUS_FAILED, vec![0xff; 4])
        );
        assert_eq!(lines_with("internal error"), 0);
        // SAFETY: alive.
        unsafe { npu_buffer_clear(product.memory.0, 0) };
    }
    // Matrices of one element become tiles of several KiB each.
    for (device, ne) in [HEX, RK].iter().flat_map(|device| {
        let shapes = [[1, 1, 1 << 29, 1 << 29], [1, 1 << 58, 1, 1]];
        shapes.map(|ne| (*device, ne))
    }) {
        let mut node = product.node;
        (node.src[0].ne, node.src[0].nb) = (ne, [2; 4]);
        for dim in 1..4 {
            node.src[0].nb[dim] = node.src[0].nb[dim - 1] * ne[dim - 1].unsigned_abs();
        }
        // SAFETY: the node and all it points to are alive; only metadata is read.
        assert!(!unsafe { npu_supports_op(device, &node) });
        assert_eq!(lines_with("internal error"), 0, "{ne:?}");
    }
    let product = Product::new();
    assert_eq!(stream.compute(0, &[product.node]), NPU_STATUS_OK);
    product.check();
}

#[test]
fn what_is_null_is_refused() {
    let _turn = turn();
    start();
    let mut status = 99;
    // SAFETY: the function checks for NULL.
    let computed = unsafe { npu_backend_compute(null(), 1, null(), 0) };
    // SAFETY: the function checks for NULL.
    let set = unsafe { npu_buffer_set(null(), null(), null(), 0, 0) };
    // SAFETY: the function checks for NULL.
    let filled = unsafe { npu_buffer_fill(null(), null(), 0, 0, 0) };
    assert_eq!([computed, set, filled], [NPU_STATUS_FAILED; 3]);
    let mut out = [1u8; 4];
    // SAFETY: the function checks for NULL.
    let got = unsafe { npu_buffer_get(null(), null(), out.as_mut_ptr().cast(), 0, 4) };
    assert_eq!((got, out), (NPU_STATUS_FAILED, [0xff; 4]));
    // SAFETY: the function checks for NULL.
    let replayed = unsafe { npu_backend_replay(null(), 1, &raw mut status) };
    assert!(!replayed && status == 99);
    assert!(npu_buffer_new(9, 64, false).is_null() && npu_backend_new(9).is_null());
    let name: *const c_char = npu_device_name(9);
    // SAFETY: the pointer is a constant.
    assert_eq!(unsafe { CStr::from_ptr(name) }, c"");
    // SAFETY: the function checks for NULL.
    unsafe { npu_buffer_free(null_mut()) };
    // SAFETY: the function checks for NULL.
    unsafe { npu_backend_free(null_mut()) };
    // SAFETY: the function checks for NULL.
    unsafe { npu_show_to_cpu(null()) };
    // SAFETY: the function checks for NULL.
    unsafe { npu_take_from_cpu(null()) };
}

/// A weight that fits no buffer is left to the CPU, which is logged once, however often ggml asks.
#[test]
fn a_weight_over_the_largest_buffer_is_told_of_once() {
    let _turn = turn();
    let memory = Buffer::new(HEX, 8192, true);
    let weights = Buffer::new(HEX, 8192, false);
    let tensor = |name, f16, ne, place, role, buffer| tensor(name, f16, ne, place, role, buffer, 0);
    let w = tensor(
        c"output.weight",
        true,
        [12288, 256_000, 1, 1],
        NPU_PLACE_PACKED,
        NPU_ROLE_WEIGHTS,
        &weights,
    );
    let act = tensor(
        c"x",
        false,
        [12288, 1, 1, 1],
        NPU_PLACE_DEVICE,
        NPU_ROLE_STATE,
        &memory,
    );
    let dst = tensor(
        c"logits",
        false,
        [256_000, 1, 1, 1],
        NPU_PLACE_DEVICE,
        NPU_ROLE_RESULT,
        &memory,
    );
    let node = node(c"MUL_MAT", dst, &[w, act]);
    lines_with("");
    for _ in 0..3 {
        // SAFETY: the node and all it points to are alive; only metadata is read.
        assert!(!unsafe { npu_supports_op(HEX, &node) });
    }
    assert_eq!(lines_with("output.weight is left to the CPU"), 1);
}

/// Answers to questions that ggml asks before it allocates anything.
#[test]
fn devices_say_what_they_are_and_what_buffers_they_have() {
    start();
    for (device, chip, buffers, alignment) in [
        (RK, "RK3588", NPU_BUFFERS_HOST_AND_PACKED, 4096),
        (HEX, "V75", NPU_BUFFERS_SHARED_AND_PACKED, 128),
    ] {
        // SAFETY: the description lives for ever, as devices do.
        let description = unsafe { CStr::from_ptr(npu_device_description(device)) };
        let description = description.to_str().unwrap();
        assert!(
            description.contains(chip) && description.contains("simulated"),
            "{description}"
        );
        assert_eq!(npu_device_buffers(device), buffers, "{chip}");
        assert_eq!(npu_packed_alignment(device), alignment, "{chip}");
        // Less than 32 bits can address, and enough for most weights.
        assert!((1 << 30..1 << 32).contains(&npu_packed_max_size(device)));
    }
}

/// Regression: two devices reported the same memory, so llama.cpp gave them a model of twice its
/// size.
#[test]
fn devices_together_have_the_memory_of_the_machine() {
    const BYTES: usize = 96 << 20;
    let _turn = turn();
    start();
    let shares = || {
        [RK, HEX].map(|device| {
            let (mut free, mut total) = (0, 0);
            // SAFETY: the pointers are to two local numbers.
            unsafe { npu_device_memory(device, &raw mut free, &raw mut total) };
            assert!(0 < free && free <= total, "{free} of {total}");
            (free, total)
        })
    };
    let before = shares();
    let [rk, hex] = before;
    assert_eq!(rk.1 + hex.1, 8192 << 20);
    let buffer = Buffer::new(HEX, BYTES, true);
    let [rk_beside, hex_with] = shares();
    // Both devices have less free memory, and the buffer's device has less by the whole difference.
    assert_eq!(rk.0 + hex.0 - rk_beside.0 - hex_with.0, BYTES);
    let more = (rk_beside.0 + hex.0).abs_diff(hex_with.0 + rk.0);
    assert!(more.abs_diff(BYTES) <= 2, "{more}");
    assert_eq!(rk_beside.1 + hex_with.1, 8192 << 20);
    drop(buffer);
    assert_eq!(shares(), before);
}
