//! Proves the C border: calls the functions of `include/npu.h` as `ggml-glue/` does, on the
//! stand-in for a Hexagon NPU under strict coherence, and on that for a Rockchip NPU.
#![expect(unsafe_code, reason = "calls what C calls")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use ggml_rust_npu::abi::*;
use ggml_rust_npu::reference::{mul_mat, nmse};
use half::f16;

const HEX: usize = 1;
const RK: usize = 0;

thread_local! {
    /// Has the next debug line of this thread panic: a fault at any place that logs.
    static PANIC: Cell<bool> = const { Cell::new(false) };
    /// Lines of this thread.
    static LINES: Mutex<Vec<String>> = const { Mutex::new(Vec::new()) };
}

/// Takes the lines in place of the host program's function, which must not unwind.
struct Lines;

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
fn lines_with(word: &str) -> usize {
    let lines = LINES.with(|lines| std::mem::take(&mut *lines.lock().unwrap()));
    lines.iter().filter(|line| line.contains(word)).count()
}

/// One test at a time: what one does to the device's buffers has it look at the other's graphs
/// again.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn start() {
    static STARTED: OnceLock<usize> = OnceLock::new();
    let devices = *STARTED.get_or_init(|| {
        log::set_logger(&Lines).unwrap();
        for (name, value) in [
            ("GGML_RUST_NPU_SIM", "rk3588,hexagon-v75"),
            ("GGML_RUST_NPU_SIM_COHERENCE", "strict"),
            ("GGML_RUST_NPU_LOG", "debug"),
        ] {
            // SAFETY: all tests wait here, and none reads the environment before.
            unsafe { std::env::set_var(name, value) };
        }
        // SAFETY: NULL is allowed.
        unsafe { npu_start(null()) }
    });
    assert_eq!(devices, 2);
}

/// A buffer of a device; freed at its end.
struct Buffer(*mut NpuBuffer);

impl Buffer {
    fn new(device: usize, bytes: usize, shared: bool) -> Self {
        start();
        let buffer = npu_buffer_new(device, bytes, shared);
        assert!(!buffer.is_null());
        Self(buffer)
    }

    fn at(&self, offset: usize) -> *mut c_void {
        // SAFETY: alive.
        unsafe { npu_buffer_base(self.0) }.wrapping_byte_add(offset)
    }

    fn set(&self, tensor: &NpuTensor, bytes: &[u8]) -> u32 {
        self.set_at(tensor, bytes, 0)
    }

    fn set_at(&self, tensor: &NpuTensor, bytes: &[u8], offset: usize) -> u32 {
        let data = bytes.as_ptr().cast();
        // SAFETY: alive and of that size.
        unsafe { npu_buffer_set(self.0, tensor, data, offset, bytes.len()) }
    }

    fn get(&self, tensor: &NpuTensor, bytes: usize, offset: usize) -> (u32, Vec<u8>) {
        let mut out = vec![1; bytes];
        let data = out.as_mut_ptr().cast();
        // SAFETY: alive and of that size.
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

struct Stream(*mut NpuBackend);

impl Stream {
    fn new(device: usize) -> Self {
        start();
        Self(npu_backend_new(device))
    }

    fn compute(&self, uid: u64, nodes: &[NpuNode]) -> u32 {
        // SAFETY: alive, and so is all that the nodes point to.
        unsafe { npu_backend_compute(self.0, uid, nodes.as_ptr(), nodes.len()) }
    }

    fn replay(&self, uid: u64) -> Option<u32> {
        let mut status = 99;
        // SAFETY: alive, and so is all that the graph's nodes pointed to.
        unsafe { npu_backend_replay(self.0, uid, &raw mut status) }.then_some(status)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: from `npu_backend_new`, and not used after this.
        unsafe { npu_backend_free(self.0) };
    }
}

fn none() -> NpuTensor {
    // SAFETY: numbers, NULL pointers, and no function: the tensor that is not there.
    unsafe { std::mem::zeroed() }
}

fn tensor(
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

fn node(op: &'static CStr, dst: NpuTensor, src: &[NpuTensor]) -> NpuNode {
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

const K: usize = 64;
const N: usize = 40;
const M: usize = 3;

fn floats(count: usize, seed: u32) -> Vec<f32> {
    let number = |i: u32| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 20) as u16;
    let values = (0..u32::try_from(count).unwrap()).map(|i| f32::from(number(i)) / 2048.0 - 1.0);
    values.collect()
}

/// A product of weights in a packed buffer with activations in a shared one, all of them at odd
/// offsets.
struct Product {
    weights: Buffer,
    memory: Buffer,
    w: NpuTensor,
    act: NpuTensor,
    node: NpuNode,
    want: Vec<f64>,
}

const AT: usize = 256;

impl Product {
    fn new() -> Self {
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

    /// Fills the result with something else.
    fn spoil(&self) {
        let status = self.memory.set(&self.node.dst, &[0x33; N * M * 4]);
        assert_eq!(status, NPU_STATUS_OK);
    }

    fn check(&self) {
        let (status, bytes) = self.memory.get(&self.node.dst, N * M * 4, 0);
        assert_eq!(status, NPU_STATUS_OK);
        let words = bytes.as_chunks().0.iter();
        let have: Vec<f32> = words.map(|word| f32::from_le_bytes(*word)).collect();
        self.check_values(&have);
    }

    fn check_values(&self, have: &[f32]) {
        let error = nmse(have, &self.want);
        // Factors in FP16, sums in FP32.
        assert!(error <= 1e-6, "{error:.2e}");
    }
}

/// Returns the floats that the CPU sees at an address.
fn values_at(data: *const c_void, count: usize) -> Vec<f32> {
    // SAFETY: floats of a live buffer, which nothing writes now.
    unsafe { std::slice::from_raw_parts(data.cast(), count) }.to_vec()
}

#[test]
fn a_product_is_computed_and_computed_again_where_its_tensors_are() {
    let _turn = turn();
    let product = Product::new();
    assert!(
        // SAFETY: a node with all it points to.
        unsafe { npu_supports_op(HEX, &product.node) }
    );
    let stream = Stream::new(HEX);
    assert_eq!(stream.replay(5), None);
    for round in 0..3 {
        product.spoil();
        let status = match round {
            0 => stream.compute(5, &[product.node]),
            _ => stream.replay(5).unwrap(),
        };
        assert_eq!(status, NPU_STATUS_OK);
        product.check();
    }
}

/// The CPU computes with results in place, and sees them there only after its caches were
/// maintained.
#[test]
fn results_in_shared_memory_are_there_for_the_cpu() {
    let _turn = turn();
    let product = Product::new();
    let stream = Stream::new(HEX);
    for round in 0..3 {
        product.spoil();
        let status = match round {
            0 => stream.compute(6, &[product.node]),
            _ => stream.replay(6).unwrap(),
        };
        assert_eq!(status, NPU_STATUS_OK);
        product.check_values(&values_at(product.node.dst.data, N * M));
    }
}

/// Weights of a norm lie in shared memory, where the loader may write them without a function of
/// ours.
#[test]
fn weights_that_the_cpu_writes_in_place_reach_the_device() {
    let _turn = turn();
    let memory = Buffer::new(HEX, 3 * 4096, true);
    let of = |name, role, at| {
        let ne = [64, 1, 1, 1];
        tensor(name, false, ne, NPU_PLACE_DEVICE, role, &memory, at)
    };
    let (x, g) = (
        of(c"x", NPU_ROLE_STATE, 0),
        of(c"g", NPU_ROLE_WEIGHTS, 4096),
    );
    let dst = of(c"dst", NPU_ROLE_RESULT, 8192);
    let ones = [1.0f32; 64];
    assert_eq!(memory.set(&x, bytemuck::cast_slice(&ones)), NPU_STATUS_OK);
    let stream = Stream::new(HEX);
    let sum = node(c"ADD", dst, &[x, g]);
    for round in 0..3 {
        let weights = floats(64, round);
        let to = g.data.cast::<f32>();
        // SAFETY: 64 floats of a live buffer, which nothing else uses now.
        unsafe { std::ptr::copy_nonoverlapping(weights.as_ptr(), to, 64) };
        let status = match round {
            0 => stream.compute(8, &[sum]),
            _ => stream.replay(8).unwrap(),
        };
        assert_eq!(status, NPU_STATUS_OK);
        let want: Vec<f32> = weights.iter().map(|g| 1.0 + g).collect();
        assert_eq!(values_at(dst.data, 64), want, "round {round}");
    }
}

/// ggml's device for `-sm tensor` hands nodes that the NPU does not compute to nobody else, so the
/// CPU computes them within a graph, in caches, too.
#[test]
fn a_cache_that_the_device_and_the_cpu_write_by_turns_is_seen_by_both() {
    let _turn = turn();
    let memory = Buffer::new(HEX, 3 * 4096, true);
    let of = |name, role, at| {
        let ne = [64, 1, 1, 1];
        tensor(name, false, ne, NPU_PLACE_DEVICE, role, &memory, at)
    };
    let x = of(c"x", NPU_ROLE_STATE, 0);
    let cache = of(c"cache", NPU_ROLE_STATE, 4096);
    let result = of(c"result", NPU_ROLE_RESULT, 8192);
    let stream = Stream::new(HEX);
    let [to_cache, from_cache] = [
        node(c"ADD", cache, &[x, x]),
        node(c"ADD", result, &[cache, x]),
    ];
    let twice = |values: &[f32]| values.iter().map(|value| 2.0 * value).collect::<Vec<_>>();
    for round in 0..3 {
        let values = floats(64, round);
        assert_eq!(memory.set(&x, bytemuck::cast_slice(&values)), NPU_STATUS_OK);
        assert_eq!(stream.compute(0, &[to_cache]), NPU_STATUS_OK);
        assert_ne!(values_at(cache.data, 64), twice(&values), "seen unasked");
        // SAFETY: a tensor of a live buffer.
        unsafe { npu_show_to_cpu(&raw const cache) };
        assert_eq!(values_at(cache.data, 64), twice(&values), "round {round}");

        let other = floats(64, round + 100);
        let to = cache.data.cast::<f32>();
        // SAFETY: 64 floats of a live buffer, which nothing else uses now.
        unsafe { std::ptr::copy_nonoverlapping(other.as_ptr(), to, 64) };
        // SAFETY: a tensor of a live buffer.
        unsafe { npu_take_from_cpu(&raw const cache) };
        assert_eq!(stream.compute(0, &[from_cache]), NPU_STATUS_OK);
        let want: Vec<f32> = other.iter().zip(&values).map(|(a, b)| a + b).collect();
        assert_eq!(values_at(result.data, 64), want, "round {round}");
    }
}

/// Weights that the CPU has just written are not fetched from the device, which never writes them.
#[test]
fn weights_that_are_shown_to_the_cpu_stay_as_it_wrote_them() {
    let _turn = turn();
    let memory = Buffer::new(HEX, 4096, true);
    let ne = [64, 1, 1, 1];
    let w = tensor(
        c"w",
        false,
        ne,
        NPU_PLACE_DEVICE,
        NPU_ROLE_WEIGHTS,
        &memory,
        0,
    );
    let weights = floats(64, 1);
    let to = w.data.cast::<f32>();
    // SAFETY: 64 floats of a live buffer, which nothing else uses now.
    unsafe { std::ptr::copy_nonoverlapping(weights.as_ptr(), to, 64) };
    // SAFETY: a tensor of a live buffer.
    unsafe { npu_show_to_cpu(&raw const w) };
    assert_eq!(values_at(w.data, 64), weights);
}

#[test]
fn nodes_that_no_npu_computes_are_for_the_cpu_if_it_can_read_them() {
    let _turn = turn();
    let memory = Buffer::new(HEX, 3 * 4096, true);
    let at = |place| {
        tensor(
            c"t",
            false,
            [64, 1, 1, 1],
            place,
            NPU_ROLE_STATE,
            &memory,
            0,
        )
    };
    let prefers = |device, op, place| {
        let node = node(op, at(place), &[at(place), at(place)]);
        // SAFETY: a node with all it points to.
        unsafe { npu_prefers_cpu(device, &raw const node) }
    };
    for (op, hex, rk) in [
        (c"ADD", false, true),
        (c"MUL_MAT", true, true),
        (c"FFT", true, true),
    ] {
        assert_eq!(prefers(HEX, op, NPU_PLACE_DEVICE), hex, "{op:?}");
        assert_eq!(prefers(RK, op, NPU_PLACE_HOST), rk, "{op:?}");
    }
    assert!(!prefers(HEX, c"MUL_MAT", NPU_PLACE_PACKED), "not readable");
}

#[test]
fn a_graph_without_a_number_is_never_computed_again_without_its_nodes() {
    let _turn = turn();
    let product = Product::new();
    let stream = Stream::new(HEX);
    assert_eq!(stream.compute(0, &[product.node]), NPU_STATUS_OK);
    assert_eq!(stream.replay(0), None);
}

/// The stream's lock stayed poisoned, which reset it with each node: later graphs were successes
/// that computed nothing.
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

/// The nodes before it stayed in the stream, and were computed with the next graph.
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

/// Panics while bytes were written or read were successes.
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
    // The device continues to work, and so does the buffer when all of it has been written.
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

/// Sizes were multiplied before anything looked at them: a panic, or in a release build a small
/// number.
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
        // SAFETY: a node with all it points to; only metadata is read.
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
    let product = Product::new();
    assert_eq!(stream.compute(0, &[product.node]), NPU_STATUS_OK);
    product.check();
}

#[test]
fn what_is_null_is_refused() {
    let _turn = turn();
    start();
    let mut status = 99;
    // SAFETY: NULL is checked.
    let computed = unsafe { npu_backend_compute(null(), 1, null(), 0) };
    // SAFETY: NULL is checked.
    let set = unsafe { npu_buffer_set(null(), null(), null(), 0, 0) };
    // SAFETY: NULL is checked.
    let filled = unsafe { npu_buffer_fill(null(), null(), 0, 0, 0) };
    assert_eq!([computed, set, filled], [NPU_STATUS_FAILED; 3]);
    let mut out = [1u8; 4];
    // SAFETY: NULL is checked.
    let got = unsafe { npu_buffer_get(null(), null(), out.as_mut_ptr().cast(), 0, 4) };
    assert_eq!((got, out), (NPU_STATUS_FAILED, [0xff; 4]));
    // SAFETY: NULL is checked.
    let replayed = unsafe { npu_backend_replay(null(), 1, &raw mut status) };
    assert!(!replayed && status == 99);
    assert!(npu_buffer_new(9, 64, false).is_null() && npu_backend_new(9).is_null());
    let name: *const c_char = npu_device_name(9);
    // SAFETY: a constant.
    assert_eq!(unsafe { CStr::from_ptr(name) }, c"");
    // SAFETY: NULL is checked.
    unsafe { npu_buffer_free(null_mut()) };
    // SAFETY: NULL is checked.
    unsafe { npu_backend_free(null_mut()) };
    // SAFETY: NULL is checked.
    unsafe { npu_show_to_cpu(null()) };
    // SAFETY: NULL is checked.
    unsafe { npu_take_from_cpu(null()) };
}

/// A weight that fits no buffer is left to the CPU, and a line says so once, however often ggml
/// asks.
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
        // SAFETY: a node with all it points to; only metadata is read.
        assert!(!unsafe { npu_supports_op(HEX, &node) });
    }
    assert_eq!(lines_with("output.weight is left to the CPU"), 1);
}

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

/// Each was a panic, which the border caught.
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

/// A packed weight of a Rockchip device is there once, so its own bytes are gone: the process used
/// to end there.
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
    // All of it can be written again.
    // SAFETY: alive.
    unsafe { npu_buffer_clear(weights.0, 0) };
    assert_eq!(weights.set(&w, &bytes), NPU_STATUS_OK);
    assert_eq!(stream.compute(0, &[product]), NPU_STATUS_OK);
}

/// The line about a model is told when the first token's graph comes again, or its stream ends.
#[test]
fn a_token_is_counted_and_told_once() {
    let _turn = turn();
    let product = Product::new();
    let mut node = product.node;
    (node.dst.ne[1], node.src[1].ne[1]) = (1, 1);
    for ends_after in [1, 3] {
        let stream = Stream::new(HEX);
        lines_with("");
        for graph in 0..ends_after {
            assert_eq!(stream.compute(5, &[node]), NPU_STATUS_OK);
            let told = lines_with("nodes of a token, in 1 split");
            assert_eq!(told, usize::from(graph == 1), "{graph}");
        }
        drop(stream);
        let told = lines_with("nodes of a token, in 1 split");
        assert_eq!(told, usize::from(ends_after == 1));
    }
}

/// Answers to questions that ggml asks before it allocates anything.
#[test]
fn devices_say_what_they_are_and_what_buffers_they_have() {
    start();
    for (device, chip, buffers, alignment) in [
        (RK, "RK3588", NPU_BUFFERS_HOST_AND_PACKED, 4096),
        (HEX, "V75", NPU_BUFFERS_SHARED_AND_PACKED, 128),
    ] {
        // SAFETY: alive for ever, as devices are.
        let description = unsafe { CStr::from_ptr(npu_device_description(device)) };
        let description = description.to_str().unwrap();
        assert!(
            description.contains(chip) && description.contains("simulated"),
            "{description}"
        );
        assert_eq!(npu_device_buffers(device), buffers, "{chip}");
        assert_eq!(npu_packed_alignment(device), alignment, "{chip}");
        // Less than what 32 bits address, and enough for most weights.
        assert!((1 << 30..1 << 32).contains(&npu_packed_max_size(device)));
    }
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
    // Written whole, it is there again.
    // SAFETY: alive.
    unsafe { npu_buffer_clear(weights.0, 0) };
    assert_eq!(weights.set(&w, &[0x11; 64 * 96 * 2]), NPU_STATUS_OK);
    assert_eq!(stream.compute(0, &[node]), NPU_STATUS_OK);
}
