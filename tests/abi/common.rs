//! A logger, buffers, streams and tensors as `ggml-glue/` makes them.

use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::ptr::null;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use ggml_rust_npu::abi::*;
use ggml_rust_npu::reference::{mul_mat, nmse};
use half::f16;

pub const HEX: usize = 1;
pub const RK: usize = 0;

thread_local! {
    /// Makes the next debug line of this thread panic, which is a fault at any place that logs.
    pub static PANIC: Cell<bool> = const { Cell::new(false) };
    /// Lines of this thread.
    static LINES: Mutex<Vec<String>> = const { Mutex::new(Vec::new()) };
}

/// Receives the lines instead of the host program's function, which must not unwind.
pub struct Lines;

impl log::Log for Lines {
    fn enabled(&self, _: &log::Metadata) -> bool {
        true
    }

    fn log(&self, record: &log::Record) {
        let text = format!("{}: {}", record.level(), record.args());
        LINES.with(|lines| lines.lock().unwrap().push(text));
        if record.level() == log::Level::Debug && PANIC.replace(false) {
            panic!("a fault of the test");
        }
    }

    fn flush(&self) {}
}

/// The lines of this thread since the last call that have a word in them.
pub fn lines_with(word: &str) -> usize {
    let lines = LINES.with(|lines| std::mem::take(&mut *lines.lock().unwrap()));
    lines.iter().filter(|line| line.contains(word)).count()
}

/// Lets one test run at a time, because one test's changes to the device's buffers invalidate
/// another test's cached graphs.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn start() {
    static STARTED: OnceLock<usize> = OnceLock::new();
    let devices = *STARTED.get_or_init(|| {
        log::set_logger(&Lines).unwrap();
        log::set_max_level(log::LevelFilter::Debug);
        for name in test_kit::foreign_variables() {
            // SAFETY: all tests wait here, and no test reads the environment before.
            unsafe { std::env::remove_var(name) };
        }
        for (name, value) in [
            ("GGML_RUST_NPU_SIM", "rk3588,hexagon-v75"),
            ("GGML_RUST_NPU_SIM_COHERENCE", "strict"),
            ("GGML_RUST_NPU_SIM_MEMORY", "8192"),
            // The level of the lines that ggml gets. A program's own logger keeps its level.
            ("GGML_RUST_NPU_LOG", "off"),
        ] {
            // SAFETY: all tests wait here, and no test reads the environment before.
            unsafe { std::env::set_var(name, value) };
        }
        // SAFETY: NULL is an allowed argument.
        unsafe { npu_start(null()) }
    });
    assert_eq!(devices, 2);
}

/// A buffer of a device, which is freed on drop.
pub struct Buffer(pub *mut NpuBuffer);

impl Buffer {
    pub fn new(device: usize, bytes: usize, shared: bool) -> Self {
        start();
        let buffer = npu_buffer_new(device, bytes, shared);
        assert!(!buffer.is_null());
        Self(buffer)
    }

    pub fn at(&self, offset: usize) -> *mut c_void {
        // SAFETY: alive.
        unsafe { npu_buffer_base(self.0) }.wrapping_byte_add(offset)
    }

    pub fn set(&self, tensor: &NpuTensor, bytes: &[u8]) -> u32 {
        self.set_at(tensor, bytes, 0)
    }

    pub fn set_at(&self, tensor: &NpuTensor, bytes: &[u8], offset: usize) -> u32 {
        let data = bytes.as_ptr().cast();
        // SAFETY: the buffer is alive and has that size.
        unsafe { npu_buffer_set(self.0, tensor, data, offset, bytes.len()) }
    }

    pub fn get(&self, tensor: &NpuTensor, bytes: usize, offset: usize) -> (u32, Vec<u8>) {
        let mut out = vec![1; bytes];
        let data = out.as_mut_ptr().cast();
        // SAFETY: the buffer is alive and has that size.
        let status = unsafe { npu_buffer_get(self.0, tensor, data, offset, bytes) };
        (status, out)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: from `npu_buffer_new`, and not used after this.
        unsafe { npu_buffer_free(self.0) };
    }
}

pub struct Stream(pub *mut NpuBackend);

impl Stream {
    pub fn new(device: usize) -> Self {
        start();
        Self(npu_backend_new(device))
    }

    pub fn compute(&self, uid: u64, nodes: &[NpuNode]) -> u32 {
        // SAFETY: the graph is alive, and so is all that its nodes point to.
        unsafe { npu_backend_compute(self.0, uid, nodes.as_ptr(), nodes.len()) }
    }

    pub fn replay(&self, uid: u64) -> Option<u32> {
        let mut status = 99;
        // SAFETY: the graph is alive, and so is all that its nodes pointed to.
        unsafe { npu_backend_replay(self.0, uid, &raw mut status) }.then_some(status)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: from `npu_backend_new`, and not used after this.
        unsafe { npu_backend_free(self.0) };
    }
}

pub fn none() -> NpuTensor {
    // SAFETY: consists of numbers, NULL pointers and no function, so zeros are valid: the absent
    // tensor.
    unsafe { std::mem::zeroed() }
}

pub fn tensor(
    name: &'static CStr,
    f16: bool,
    ne: [i64; 4],
    place: u32,
    role: u32,
    buffer: &Buffer,
    offset: usize,
) -> NpuTensor {
    let bytes: u32 = if f16 { 2 } else { 4 };
    let mut nb = [u64::from(bytes); 4];
    for dim in 1..4 {
        nb[dim] = nb[dim - 1] * ne[dim - 1].unsigned_abs();
    }
    let mut tensor = none();
    tensor.dtype = if f16 { NPU_DTYPE_F16 } else { NPU_DTYPE_F32 };
    (tensor.place, tensor.role) = (place, role);
    (tensor.block_elems, tensor.block_bytes) = (1, bytes);
    (tensor.ne, tensor.nb) = (ne, nb);
    (tensor.data, tensor.buffer) = (buffer.at(offset), buffer.0);
    tensor.name = name.as_ptr();
    tensor
}

/// 64 floats at `offset` of a shared buffer.
pub fn row_of_64(name: &'static CStr, role: u32, buffer: &Buffer, offset: usize) -> NpuTensor {
    let ne = [64, 1, 1, 1];
    tensor(name, false, ne, NPU_PLACE_DEVICE, role, buffer, offset)
}

pub fn node(op: &'static CStr, dst: NpuTensor, src: &[NpuTensor]) -> NpuNode {
    let mut node = NpuNode {
        op: op.as_ptr(),
        op_params: [0; NPU_OP_PARAMS],
        dst,
        src: [none(); NPU_MAX_SRC],
        feeds_next: false,
    };
    node.src[..src.len()].copy_from_slice(src);
    node
}

pub const K: usize = 64;
pub const N: usize = 40;
pub const M: usize = 3;

pub fn floats(count: usize, seed: u32) -> Vec<f32> {
    // Odd factors, so that neighbours and seeds differ in their upper bits, which are the ones
    // used.
    let start = seed.wrapping_mul(2_246_822_519);
    let number = |i: u32| (i.wrapping_mul(2_654_435_761).wrapping_add(start) >> 20) as u16;
    let values = (0..u32::try_from(count).unwrap()).map(|i| f32::from(number(i)) / 2048.0 - 1.0);
    values.collect()
}

/// A product of weights in a packed buffer with activations in a shared one, all of them at odd
/// offsets.
pub struct Product {
    pub weights: Buffer,
    pub memory: Buffer,
    pub w: NpuTensor,
    pub act: NpuTensor,
    pub node: NpuNode,
    pub want: Vec<f64>,
}

pub const AT: usize = 256;

impl Product {
    pub fn new() -> Self {
        let weights = Buffer::new(HEX, 2 * AT + K * N * 2 + 8192, false);
        let memory = Buffer::new(HEX, AT + (K + N) * M * 4, true);
        let [k, n, m] = [K, N, M].map(|size| i64::try_from(size).unwrap());
        let w = tensor(
            c"w",
            true,
            [k, n, 1, 1],
            NPU_PLACE_PACKED,
            NPU_ROLE_WEIGHTS,
            &weights,
            AT,
        );
        let act = tensor(
            c"act",
            false,
            [k, m, 1, 1],
            NPU_PLACE_DEVICE,
            NPU_ROLE_STATE,
            &memory,
            AT,
        );
        let dst = tensor(
            c"dst",
            false,
            [n, m, 1, 1],
            NPU_PLACE_DEVICE,
            NPU_ROLE_RESULT,
            &memory,
            AT + K * M * 4,
        );
        let values: Vec<f16> = floats(K * N, 1).into_iter().map(f16::from_f32).collect();
        assert_eq!(
            weights.set(&w, bytemuck::cast_slice(&values)),
            NPU_STATUS_OK
        );
        let values: Vec<f32> = values.into_iter().map(f16::to_f32).collect();
        let x = floats(K * M, 2);
        assert_eq!(memory.set(&act, bytemuck::cast_slice(&x)), NPU_STATUS_OK);
        Self {
            want: mul_mat(&x, &values, K),
            node: node(c"MUL_MAT", dst, &[w, act]),
            weights,
            memory,
            w,
            act,
        }
    }

    /// Overwrites the result with other values.
    pub fn spoil(&self) {
        let status = self.memory.set(&self.node.dst, &[0x33; N * M * 4]);
        assert_eq!(status, NPU_STATUS_OK);
    }

    pub fn check(&self) {
        let (status, bytes) = self.memory.get(&self.node.dst, N * M * 4, 0);
        assert_eq!(status, NPU_STATUS_OK);
        let words = bytes.as_chunks().0.iter();
        let have: Vec<f32> = words.map(|word| f32::from_le_bytes(*word)).collect();
        self.check_values(&have);
    }

    pub fn check_values(&self, have: &[f32]) {
        let error = nmse(have, &self.want);
        // Factors are in FP16, sums in FP32.
        assert!(error <= 1e-6, "{error:.2e}");
    }
}

/// Returns the floats that the CPU sees at an address.
pub fn values_at(data: *const c_void, count: usize) -> Vec<f32> {
    // SAFETY: floats of a live buffer, which nothing is writing.
    unsafe { std::slice::from_raw_parts(data.cast(), count) }.to_vec()
}
