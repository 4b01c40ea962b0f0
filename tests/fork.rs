//! Proves that a child process, forked after the NPU was opened, is refused and does not hang: the
//! device's threads, and the owners of its locks, exist only in the parent. A single test, because
//! all threads of a process matter.
#![expect(unsafe_code, reason = "forks")]

use std::ffi::{CStr, c_char};
use std::io::Read;
use std::os::fd::{AsRawFd, IntoRawFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use ggml_rust_npu::abi::*;

/// The descriptor that log lines go to.
static LOG: AtomicI32 = AtomicI32::new(2);

unsafe extern "C" fn log(level: u32, text: *const c_char) {
    // SAFETY: the caller guarantees a C string.
    let bytes = unsafe { CStr::from_ptr(text) }.to_bytes_with_nul();
    if level == NPU_LOG_ERROR {
        // SAFETY: the pointer is to bytes of that length.
        unsafe {
            libc::write(
                LOG.load(Ordering::Relaxed),
                bytes.as_ptr().cast(),
                bytes.len(),
            )
        };
    }
}

const ROWS: usize = 64;
const BYTES: usize = ROWS * 32 * 2;

/// A weight of `BYTES` at the start of a buffer.
fn weight(buffer: *mut NpuBuffer) -> NpuTensor {
    // SAFETY: numbers, NULL pointers, and no function.
    let mut tensor: NpuTensor = unsafe { std::mem::zeroed() };
    (tensor.dtype, tensor.place, tensor.role) = (NPU_DTYPE_F16, NPU_PLACE_PACKED, NPU_ROLE_WEIGHTS);
    (tensor.block_elems, tensor.block_bytes) = (1, 2);
    (tensor.ne, tensor.nb) = ([32, ROWS as i64, 1, 1], [2, 64, BYTES as u64, BYTES as u64]);
    // SAFETY: alive.
    tensor.data = unsafe { npu_buffer_base(buffer) };
    (tensor.buffer, tensor.name) = (buffer, c"weight".as_ptr());
    tensor
}

fn set(buffer: *mut NpuBuffer) -> u32 {
    let tensor = weight(buffer);
    // SAFETY: alive and of that size.
    unsafe { npu_buffer_set(buffer, &tensor, [0u8; BYTES].as_ptr().cast(), 0, BYTES) }
}

/// Calls everything that a program does with devices that its parent opened. Returns a bit for each
/// wrong answer.
fn child(buffers: &[*mut NpuBuffer], streams: &[*mut NpuBackend]) -> i32 {
    let mut wrong = 0;
    for (device, (&buffer, &stream)) in buffers.iter().zip(streams).enumerate() {
        wrong |= i32::from(!npu_buffer_new(device, 4096, false).is_null());
        wrong |= i32::from(!npu_backend_new(device).is_null()) << 1;
        wrong |= i32::from(set(buffer) != NPU_STATUS_FAILED) << 2;
        let mut status = NPU_STATUS_OK;
        // SAFETY: alive.
        let replayed = unsafe { npu_backend_replay(stream, 7, &raw mut status) };
        wrong |= i32::from(!replayed || status != NPU_STATUS_FAILED) << 3;
        // SAFETY: numbers, NULL pointers and no function.
        let mut node: NpuNode = unsafe { std::mem::zeroed() };
        (node.op, node.dst) = (c"ADD".as_ptr(), weight(buffer));
        (node.src[0], node.src[1]) = (node.dst, node.dst);
        // If the child refused the node, ggml would let the CPU compute it, with packed weights
        // that read as NaN.
        // SAFETY: a node with all it points to.
        let supported = unsafe { npu_supports_op(device, &raw const node) };
        wrong |= i32::from(!supported) << 4;
        // SAFETY: as above.
        wrong |= i32::from(unsafe { npu_prefers_cpu(device, &raw const node) }) << 5;
        // SAFETY: `npu_buffer_new` returned this pointer.
        unsafe { npu_buffer_free(buffer) };
        // SAFETY: `npu_backend_new` returned this pointer.
        unsafe { npu_backend_free(stream) };
    }
    wrong
}

/// Regression: Python's servers fork, and the child hung for ever in its first write of a weight.
#[test]
fn a_forked_process_is_refused_in_one_line_and_does_not_hang() {
    for name in test_kit::foreign_variables() {
        // SAFETY: no other thread reads the environment yet.
        unsafe { std::env::remove_var(name) };
    }
    // SAFETY: no other thread reads the environment yet.
    unsafe { std::env::set_var("GGML_RUST_NPU_SIM", "rk3588,hexagon-v75") };
    let host = NpuHost { log: Some(log) };
    // SAFETY: its function may be called at any later time.
    assert_eq!(unsafe { npu_start(&host) }, 2);
    let buffers = [0, 1].map(|device| npu_buffer_new(device, 65536, false));
    let streams = [0, 1].map(|device| npu_backend_new(device));
    // All of the parent's threads have worked by now.
    assert_eq!(buffers.map(set), [NPU_STATUS_OK; 2]);

    let (mut reader, writer) = std::io::pipe().unwrap();
    // SAFETY: the child only calls the library under test, and leaves by `_exit`.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        LOG.store(writer.as_raw_fd(), Ordering::Relaxed);
        let wrong = child(&buffers, &streams);
        // SAFETY: the call ends the process.
        unsafe { libc::_exit(wrong) };
    }
    drop(writer);
    let (begun, mut status) = (Instant::now(), 0);
    // SAFETY: the number is the child's, and the status is a valid place.
    while unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) } == 0 {
        if begun.elapsed() > Duration::from_secs(60) {
            // SAFETY: the number is the child's.
            unsafe { libc::kill(pid, libc::SIGKILL) };
            panic!("the child hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut lines = String::new();
    reader.read_to_string(&mut lines).unwrap();
    assert_eq!(status, 0, "{lines}");
    assert_eq!(lines.matches("forked").count(), 1, "{lines}");
    assert_eq!(lines.matches('\0').count(), 1, "{lines}");
    // The parent still works.
    assert_eq!(buffers.map(set), [NPU_STATUS_OK; 2]);
    let _ = reader.into_raw_fd();
}
