//! Weights of a Rockchip device, whose own bytes are released when they are packed.

use std::ffi::c_void;
use std::ptr::null_mut;

use ggml_rust_npu::abi::*;
use ggml_rust_npu::reference::{mul_mat, nmse};
use half::f16;

use super::common::*;

/// A weight of 96 rows of 64 on the Rockchip device, not written yet, and its buffer.
fn rk_weight() -> (Buffer, NpuTensor) {
    let weights = Buffer::new(RK, 65536, false);
    let (ne, place) = ([64, 96, 1, 1], NPU_PLACE_PACKED);
    let w = tensor(c"w", true, ne, place, NPU_ROLE_WEIGHTS, &weights, 0);
    (weights, w)
}

/// The product of rows in the test's own memory with `w`, a weight in `weights`.
fn product_of_host(
    (weights, w): (&Buffer, NpuTensor),
    rows: i64,
    act: &[f32],
    out: &mut [f32],
) -> NpuNode {
    let host = |name, columns, role, data: *mut c_void| {
        let ne = [columns, rows, 1, 1];
        let mut tensor = tensor(name, false, ne, NPU_PLACE_HOST, role, weights, 0);
        (tensor.data, tensor.buffer) = (data, null_mut());
        tensor
    };
    let x = host(
        c"x",
        w.ne[0],
        NPU_ROLE_STATE,
        act.as_ptr().cast_mut().cast(),
    );
    let dst = host(c"dst", w.ne[1], NPU_ROLE_RESULT, out.as_mut_ptr().cast());
    node(c"MUL_MAT", dst, &[w, x])
}

/// Regression: each such result was a panic, which the C interface caught.
#[test]
fn a_result_that_is_not_aligned_or_overlaps_itself_is_refused() {
    let _turn = turn();
    let (weights, w) = rk_weight();
    assert_eq!(weights.set(&w, &[0x11; 64 * 96 * 2]), NPU_STATUS_OK);
    let (act, mut out) = (vec![1.0f32; 2 * 64], vec![0.0f32; 4 * 96]);
    let right = product_of_host((&weights, w), 2, &act, &mut out);
    let stream = Stream::new(RK);
    lines_with("");
    for (reason, is_of_shape, change) in [
        (
            "the result's address is not a multiple of 4",
            false,
            (|dst| dst.data = dst.data.wrapping_byte_add(2)) as fn(&mut NpuTensor),
        ),
        (
            "rows of the result are not aligned to 4 bytes",
            true,
            |dst| dst.nb[1] += 2,
        ),
        ("rows of the result overlap", true, |dst| dst.nb[1] -= 4),
    ] {
        let mut wrong = right;
        change(&mut wrong.dst);
        // SAFETY: a node with all it points to; only metadata is read.
        assert_eq!(unsafe { npu_supports_op(RK, &wrong) }, !is_of_shape);
        assert_eq!(stream.compute(0, &[wrong]), NPU_STATUS_FAILED);
        assert_eq!(lines_with(reason), 1, "{reason}");
    }
    assert_eq!(stream.compute(0, &[right]), NPU_STATUS_OK);
}

/// Regression: planes of activations that are converted first use the same scratch, and the second
/// one was mistaken for the first. Overlapping rows were a panic, which disabled the stream.
#[test]
fn activations_that_are_not_aligned_or_overlap_are_multiplied_as_they_lie() {
    let _turn = turn();
    let (weights, w) = rk_weight();
    let (k, n) = (64, 96);
    let halves: Vec<f16> = floats(k * n, 1).into_iter().map(f16::from_f32).collect();
    let bytes = bytemuck::cast_slice(&halves);
    assert_eq!(weights.set(&w, bytes), NPU_STATUS_OK);
    let values: Vec<f32> = halves.into_iter().map(f16::to_f32).collect();
    let stream = Stream::new(RK);
    // Bytes before the first row, between rows and between planes; then the number of rows in each
    // of two planes.
    for (before, row, plane, rows) in [(2, 256, 256, 1), (0, 64, 128, 2), (2, 20, 300, 3)] {
        let x: Vec<f32> = floats(1024, 2);
        let mut memory = vec![0u32; 1025];
        let shifted: &mut [u8] = bytemuck::cast_slice_mut(&mut memory);
        shifted[before..before + 4096].copy_from_slice(bytemuck::cast_slice(&x));
        let mut out = vec![0.0f32; 2 * 3 * n];
        let act: &[f32] = bytemuck::cast_slice(&memory);
        let mut node = product_of_host((&weights, w), rows, act, &mut out);
        for tensor in [&mut node.dst, &mut node.src[1]] {
            (tensor.ne[2], tensor.nb[3]) = (2, 2 * tensor.nb[2]);
        }
        let act = &mut node.src[1];
        act.data = act.data.wrapping_byte_add(before);
        (act.nb[1], act.nb[2], act.nb[3]) = (row, plane, 2 * plane);
        // SAFETY: a node with all it points to.
        assert!(unsafe { npu_supports_op(RK, &node) });
        assert_eq!(stream.compute(0, &[node]), NPU_STATUS_OK);
        let mut seen = Vec::new();
        for at in 0..2 * rows.unsigned_abs() {
            let from = at / rows.unsigned_abs() * plane + at % rows.unsigned_abs() * row;
            seen.extend_from_slice(&x[usize::try_from(from / 4).unwrap()..][..k]);
        }
        let want = mul_mat(&seen, &values, k);
        let error = nmse(&out[..want.len()], &want);
        assert!(error <= 1e-6, "{before} {row} {plane}: {error:.2e}");
    }
}

/// A packed weight of a Rockchip device is stored once, so its own bytes are gone. Regression: the
/// process ended at such a read.
#[test]
fn a_released_weight_reads_as_nan_and_graphs_with_its_buffer_fail() {
    let _turn = turn();
    let (weights, w) = rk_weight();
    let bytes = vec![0x11; 64 * 96 * 2];
    assert_eq!(weights.set(&w, &bytes), NPU_STATUS_OK);
    lines_with("");
    let (status, read) = weights.get(&w, bytes.len(), 0);
    assert_eq!((status, read), (NPU_STATUS_FAILED, vec![0xff; bytes.len()]));
    assert_eq!(
        lines_with("w cannot be read: its bytes were released when it was packed"),
        1
    );
    let (act, mut out) = (vec![1.0f32; 64], vec![0.0f32; 96]);
    let product = product_of_host((&weights, w), 1, &act, &mut out);
    let stream = Stream::new(RK);
    assert_eq!(stream.compute(0, &[product]), NPU_STATUS_FAILED);
    assert_eq!(lines_with("w is in a buffer that an earlier error left"), 1);
    // The whole buffer can be written again.
    // SAFETY: alive.
    unsafe { npu_buffer_clear(weights.0, 0) };
    assert_eq!(weights.set(&w, &bytes), NPU_STATUS_OK);
    assert_eq!(stream.compute(0, &[product]), NPU_STATUS_OK);
}

/// The CPU would compute with zeros; the device reports the missing weight.
#[test]
fn a_node_whose_weight_was_released_is_not_for_the_cpu() {
    let _turn = turn();
    let (weights, w) = rk_weight();
    let sum = node(c"ADD", w, &[w, w]);
    // SAFETY: a node with all it points to.
    let prefers = || unsafe { npu_prefers_cpu(RK, &raw const sum) };
    assert!(prefers(), "no device computes it");
    assert_eq!(weights.set(&w, &[0x11; 64 * 96 * 2]), NPU_STATUS_OK);
    assert!(!prefers());
    let stream = Stream::new(RK);
    assert_eq!(stream.compute(0, &[sum]), NPU_STATUS_FAILED);
    // An error that makes all graphs with the buffer fail has the same effect: before it, few rows
    // were left to the CPU.
    assert_eq!(weights.get(&w, 2, 0).0, NPU_STATUS_FAILED);
    assert!(!prefers());
}

/// Other bytes of the weight are gone, so it cannot be packed again.
#[test]
fn a_part_of_a_weight_whose_bytes_were_released_is_not_written() {
    let _turn = turn();
    let (weights, w) = rk_weight();
    assert_eq!(weights.set(&w, &[0x11; 64 * 96 * 2]), NPU_STATUS_OK);
    lines_with("");
    assert_eq!(weights.set_at(&w, &[0x22; 2], 0), NPU_STATUS_FAILED);
    assert_eq!(lines_with("cannot write w: "), 1);
    let (act, mut out) = (vec![1.0f32; 64], vec![0.0f32; 96]);
    let node = product_of_host((&weights, w), 1, &act, &mut out);
    let stream = Stream::new(RK);
    assert_eq!(stream.compute(0, &[node]), NPU_STATUS_FAILED);
    // After it is written as a whole, the weight is usable again.
    // SAFETY: alive.
    unsafe { npu_buffer_clear(weights.0, 0) };
    assert_eq!(weights.set(&w, &[0x11; 64 * 96 * 2]), NPU_STATUS_OK);
    assert_eq!(stream.compute(0, &[node]), NPU_STATUS_OK);
}
