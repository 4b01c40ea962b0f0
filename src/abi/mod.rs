//! The functions of `include/npu.h`, called by `ggml-glue/`: check arguments, catch panics, call
//! `backend`. No logic.
//!
//! A panic never crosses into C: it becomes a log line and the failure value of the function.
//! cbindgen makes `include/npu.h` from this file; a test fails when the two differ.
#![expect(unsafe_code, reason = "everything here is called from C")]

use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use crate::backend::{self, Buffer, Buffers, Device, GraphError, Node, Stream};
use crate::config::{self, Config};
use crate::error::{Error, Result};
use crate::graph::{MAX_SOURCES, Op, Tensor};
use crate::host_memory::{Region, RegionMut};

use self::coverage::{ContextId, Coverage};
use self::memory::Held;

pub use self::buffer::*;
pub use self::types::*;
use self::types::{metadata, name, op, op_name, operation};

mod buffer;
mod coverage;
mod log;
mod memory;
mod types;

/// A buffer of a device.
pub struct NpuBuffer {
    buffer: Box<dyn Buffer>,
    _held: Held,
    /// An error left bytes in it that are not those that were written, or gave bytes that are not
    /// those of a tensor.
    failed: AtomicBool,
}

/// A stream of graphs on one device.
pub struct NpuBackend {
    stream: Box<dyn Stream>,
    /// The shares of its device in the models.
    coverage: &'static Coverage,
    context: ContextId,
    /// An internal error left the stream in an unknown state.
    failed: AtomicBool,
}

impl NpuBackend {
    /// Counts nodes that were computed, and logs the line about the model when it is complete.
    fn count(&self, uid: u64, graph: &[Node]) {
        let operations = graph.iter().map(|node| &node.operation);
        let device = self.stream.device_name();
        tell(self.coverage.computed(device, uid, operations));
    }

    /// Runs `compute`, which returns an `NPU_STATUS_*`. A panic in it is a failure, and so is every
    /// later call for this stream.
    fn guarded(&self, what: &str, compute: impl FnOnce() -> u32) -> u32 {
        if is_forked() {
            return NPU_STATUS_FAILED;
        }
        if self.failed.load(Ordering::Relaxed) {
            let device = self.stream.device_name();
            ::log::error!("{device}: an earlier internal error put this stream out of use");
            return NPU_STATUS_FAILED;
        }
        guard(what, None, || Some(compute())).unwrap_or_else(|| {
            self.failed.store(true, Ordering::Relaxed);
            NPU_STATUS_FAILED
        })
    }
}

/// A device with its texts as C strings.
struct DeviceEntry {
    device: Arc<dyn Device>,
    name: CString,
    description: CString,
    coverage: Coverage,
    held_bytes: AtomicUsize,
}

impl DeviceEntry {
    /// Returns the bytes of the device's buffers and of its other memory.
    fn held_bytes(&self) -> usize {
        self.held_bytes.load(Ordering::Relaxed) + self.device.bytes_beside()
    }
}

static DEVICES: OnceLock<Vec<DeviceEntry>> = OnceLock::new();

/// `true` in a child process that was forked after the parent had opened the devices.
static FORKED: AtomicBool = AtomicBool::new(false);

/// Makes processes that are forked from this one able to detect that they are.
///
/// llama.cpp asks about every operation of a graph: a flag, because a comparison of process numbers
/// is a call into the kernel each time.
fn watch_forks() {
    extern "C" fn mark() {
        FORKED.store(true, Ordering::Relaxed);
    }
    // SAFETY: the handler only stores into an atomic, which is allowed between fork and exec.
    if let Err(error) = unsafe { os::process::on_fork(mark) } {
        ::log::warn!("processes that are forked from this one will not be refused: {error}");
    }
}

/// Returns `true` if this process was forked from the one that opened the devices; the first time,
/// with a log line.
///
/// The NPU's session, the threads, and whatever locks they held are the parent's: a child that used
/// them would wait for ever, or write to memory that the parent computes with.
fn is_forked() -> bool {
    static TOLD: AtomicBool = AtomicBool::new(false);
    let forked = FORKED.load(Ordering::Relaxed);
    if forked && !TOLD.swap(true, Ordering::Relaxed) {
        ::log::error!(
            "this process was forked from the one that opened the NPU, which is its parent's alone: \
             start processes before the backend is loaded, or without fork (Python: spawn)"
        );
    }
    forked
}

/// Runs `f`; a panic in it becomes a log line and `fallback`.
fn guard<T>(what: &str, fallback: T, f: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("no message");
        ::log::error!("internal error in {what}: {text}");
        fallback
    })
}

/// Logs a line about where the nodes of a model run.
fn tell(line: Option<String>) {
    if let Some(line) = line {
        // A warning, because llama.cpp's programs hide lines of level "info" unless the user asks
        // for them.
        ::log::warn!("{line}");
    }
}

/// Drops a value of the C interface, unless it is the parent's of a process that was forked.
fn release<T>(what: &str, value: Box<T>) {
    if is_forked() {
        std::mem::forget(value);
    } else {
        guard(what, (), || drop(value));
    }
}

fn entry(device: usize) -> Option<&'static DeviceEntry> {
    DEVICES.get()?.get(device)
}

/// Finds the devices and returns their number. The first call decides; later ones return the same.
///
/// # Safety
/// `host` is NULL or points to a struct whose function may be called at any later time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_start(host: *const NpuHost) -> usize {
    // SAFETY: the caller guarantees that the pointer is NULL or valid.
    let host = unsafe { host.as_ref() };
    guard("npu_start", 0, || DEVICES.get_or_init(|| start(host)).len())
}

fn start(host: Option<&NpuHost>) -> Vec<DeviceEntry> {
    self::log::install(host);
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    for name in config::unknown_variables(names) {
        ::log::warn!(
            "{name} is set, but there is no such variable; known are {}",
            config::known_variables()
        );
    }
    let config = match Config::from_env() {
        Ok(config) => config,
        Err(error) => {
            ::log::error!("no devices: {error}");
            return Vec::new();
        }
    };
    self::log::set_level(config.log);
    watch_forks();
    if let Some(bytes) = config.sim_memory_bytes() {
        memory::simulate(bytes);
    }
    let found = backend::find_devices(&config);
    found.log();
    let entries = found.devices.into_iter().map(|device| DeviceEntry {
        name: CString::new(device.name()).unwrap_or_default(),
        description: CString::new(device.description()).unwrap_or_default(),
        coverage: Coverage::default(),
        held_bytes: AtomicUsize::new(0),
        device,
    });
    entries.collect()
}

/// Returns the name of a device, or "" if the device does not exist.
#[unsafe(no_mangle)]
pub extern "C" fn npu_device_name(device: usize) -> *const c_char {
    entry(device).map_or(c"".as_ptr(), |entry| entry.name.as_ptr())
}

/// Returns the chip, library, driver, and whether it is simulated.
#[unsafe(no_mangle)]
pub extern "C" fn npu_device_description(device: usize) -> *const c_char {
    entry(device).map_or(c"".as_ptr(), |entry| entry.description.as_ptr())
}

/// Writes the free and total bytes of memory that weights can use: the device's part of the
/// system's, as far as its address spaces reach. llama.cpp adds up the parts, which together are
/// the system's memory.
///
/// # Safety
/// Both pointers are valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_device_memory(
    device: usize,
    free_bytes: *mut usize,
    total_bytes: *mut usize,
) {
    let (free, total) = guard("npu_device_memory", (0, 0), || {
        let devices = DEVICES.get().filter(|_| !is_forked());
        devices.map_or((0, 0), |devices| memory::of_device(devices, device))
    });
    // SAFETY: guaranteed by the caller.
    unsafe { free_bytes.write(free) };
    // SAFETY: guaranteed by the caller.
    unsafe { total_bytes.write(total) };
}

/// Returns `true` if the device computes a node. Reads metadata only. In a process that was forked
/// after the NPU was opened, `true` for every node: graphs fail there, and no other backend may
/// compute them.
///
/// # Safety
/// `node` is valid, and so are the names and buffers in it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_supports_op(device: usize, node: *const NpuNode) -> bool {
    // SAFETY: the caller guarantees that the pointer is NULL or valid.
    let Some(node) = (unsafe { node.as_ref() }) else {
        return false;
    };
    guard("npu_supports_op", false, || {
        let Some(entry) = entry(device) else {
            return false;
        };
        if is_forked() {
            // After a fork, claim the operation: its graph then fails. The CPU backend would read
            // NaN for packed weights and write it into caches that are shared with the parent
            // process.
            return true;
        }
        let refusal = match operation(node) {
            Some(operation) => entry.device.refusal(&operation),
            None => Some("not an operation of this NPU"),
        };
        if let Some(reason) = refusal {
            let (device, op, name) = (entry.device.name(), op_name(node), name(&node.dst));
            ::log::trace!("{device}: not {op} {name}: {reason}");
        }
        let sources = node.src.iter().filter(|src| src.dtype != NPU_DTYPE_NONE);
        let (device, op, sources) = (entry.device.name(), op_name(node), sources.map(name));
        tell((entry.coverage).answered(device, op, name(&node.dst), sources, refusal));
        refusal.is_none()
    })
}

/// Notes that the CPU computes a node, whose caches it reads and writes in place.
///
/// # Safety
/// `node` is valid, and so are the buffers in it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_mark_cpu_reader(node: *const NpuNode) {
    // SAFETY: the caller guarantees that the pointer is NULL or valid.
    let Some(node) = (unsafe { node.as_ref() }) else {
        return;
    };
    guard("npu_mark_cpu_reader", (), || {
        if is_forked() {
            return;
        }
        let operands = node.src.iter().chain([&node.dst]);
        for tensor in operands.filter(|tensor| tensor.role == NPU_ROLE_STATE) {
            // SAFETY: the caller guarantees that the pointer is NULL or its target alive.
            if let Some(buffer) = unsafe { tensor.buffer.cast_const().as_ref() } {
                buffer.buffer.mark_cpu_reader();
            }
        }
    });
}

/// Returns `true` if the CPU is to compute a node that ggml gave to the device: the device does not
/// compute it, or the CPU is faster with so few rows. Its weights can be read where they are.
///
/// # Safety
/// `node` is valid, and so are the names and the buffers in it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_prefers_cpu(device: usize, node: *const NpuNode) -> bool {
    // SAFETY: the caller guarantees that the pointer is NULL or valid.
    let Some(node) = (unsafe { node.as_ref() }) else {
        return false;
    };
    guard("npu_prefers_cpu", false, || {
        let Some(entry) = entry(device).filter(|_| !is_forked()) else {
            return false;
        };
        // Most nodes are of operations that the device has nothing of: not described for each
        // token.
        let has_some = op(node).is_some_and(|op| entry.device.computes(op));
        let wants = !has_some
            || operation(node).is_none_or(|operation| entry.device.prefers_cpu(&operation));
        // SAFETY: the caller promises it.
        let is_cpu_s = wants && node.src.iter().all(|tensor| unsafe { is_there(tensor) });
        if is_cpu_s && entry.coverage.counts() {
            if let Some(operation) = operation(node).filter(|it| entry.device.refusal(it).is_none())
            {
                tell(entry.coverage.left_to_cpu(entry.device.name(), &operation));
            }
            if node.dst.role == NPU_ROLE_STATE {
                entry.coverage.cpu_writes_state();
            }
        }
        is_cpu_s
    })
}

/// Makes the device's writes to a tensor visible to the CPU, which is about to read or write it in
/// place. The CPU's earlier writes to it have passed [`npu_take_from_cpu`].
///
/// # Safety
/// `tensor` is valid, and so is its buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_show_to_cpu(tensor: *const NpuTensor) {
    // SAFETY: the caller guarantees that the pointer is NULL or valid.
    let tensor = unsafe { tensor.as_ref() };
    guard("npu_show_to_cpu", (), || {
        // SAFETY: guaranteed by the caller.
        if let Some((buffer, tensor)) = tensor.and_then(|tensor| unsafe { in_buffer(tensor) }) {
            buffer.show_to_cpu(&tensor);
        }
    });
}

/// Makes the CPU's writes in place to a tensor visible to the device.
///
/// # Safety
/// `tensor` is valid, and so is its buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_take_from_cpu(tensor: *const NpuTensor) {
    // SAFETY: the caller guarantees that the pointer is NULL or valid.
    let tensor = unsafe { tensor.as_ref() };
    guard("npu_take_from_cpu", (), || {
        // SAFETY: guaranteed by the caller.
        if let Some((buffer, tensor)) = tensor.and_then(|tensor| unsafe { in_buffer(tensor) }) {
            buffer.take_from_cpu(&tensor);
        }
    });
}

/// Returns `false` for a tensor whose bytes were released, or whose buffer an error left
/// unfinished: the CPU would read zeros, while the device can still compute, or reports an error.
///
/// # Safety
/// The tensor's buffer is NULL or alive.
unsafe fn is_there(tensor: &NpuTensor) -> bool {
    // SAFETY: guaranteed by the caller.
    let handle = unsafe { tensor.buffer.cast_const().as_ref() };
    if handle.is_some_and(NpuBuffer::has_failed) {
        return false;
    }
    // SAFETY: guaranteed by the caller.
    let operand = unsafe { in_buffer(tensor) };
    operand.is_none_or(|(buffer, tensor)| buffer.has_bytes(&tensor))
}

/// Returns a tensor and its buffer, if it is in one of ours.
///
/// # Safety
/// The tensor's buffer is NULL, or alive as long as the result is used.
unsafe fn in_buffer(tensor: &NpuTensor) -> Option<(&dyn Buffer, Tensor<'_>)> {
    if is_forked() {
        return None;
    }
    // SAFETY: guaranteed by the caller.
    let handle = unsafe { tensor.buffer.cast_const().as_ref() }?;
    let mut described = metadata(tensor)?;
    handle.check(tensor, described.span().len()).ok()?;
    described.packed_offset = offset_in(handle, tensor);
    Some((&*handle.buffer, described))
}

/// Returns the buffer types of a device: an `NPU_BUFFERS_*`.
#[unsafe(no_mangle)]
pub extern "C" fn npu_device_buffers(device: usize) -> u32 {
    match entry(device).map(|entry| entry.device.buffers()) {
        Some(Buffers::HostAndPacked) | None => NPU_BUFFERS_HOST_AND_PACKED,
        Some(Buffers::SharedAndPacked) => NPU_BUFFERS_SHARED_AND_PACKED,
        Some(Buffers::Shared) => NPU_BUFFERS_SHARED,
        Some(Buffers::One) => NPU_BUFFERS_ONE,
    }
}

/// Makes a stream of graphs for a device. Returns NULL if the device does not exist, or if this
/// process was forked after it was opened.
#[unsafe(no_mangle)]
pub extern "C" fn npu_backend_new(device: usize) -> *mut NpuBackend {
    let entry = entry(device).filter(|_| !is_forked());
    entry.map_or(std::ptr::null_mut(), |entry| {
        Box::into_raw(Box::new(NpuBackend {
            stream: Arc::clone(&entry.device).stream(),
            coverage: &entry.coverage,
            context: entry.coverage.begin(),
            failed: AtomicBool::new(false),
        }))
    })
}

/// Frees a stream.
///
/// # Safety
/// `backend` came from `npu_backend_new` and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_backend_free(backend: *mut NpuBackend) {
    if !backend.is_null() {
        // SAFETY: guaranteed by the caller.
        let backend = unsafe { Box::from_raw(backend) };
        // Skipped in a forked child: a thread of the parent may have held the counters' lock at the
        // fork.
        if !is_forked() {
            tell(
                backend
                    .coverage
                    .end(backend.stream.device_name(), backend.context),
            );
        }
        release("npu_backend_free", backend);
    }
}

/// Computes again a graph that [`npu_backend_compute`] has computed with the same number, and
/// writes an `NPU_STATUS_*`. Returns false, with nothing done, if that is impossible without the
/// nodes. Each graph begins with this call, by which the graphs of a token are counted.
///
/// # Safety
/// - `backend` is alive, `status` is valid for writes,
/// - the pointers in the graph's nodes satisfy [`npu_backend_compute`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_backend_replay(
    backend: *const NpuBackend,
    uid: u64,
    status: *mut u32,
) -> bool {
    // SAFETY: guaranteed by the caller.
    let Some(backend) = (unsafe { backend.as_ref() }) else {
        return false;
    };
    tell((backend.coverage).begin_graph(backend.stream.device_name(), backend.context));
    let mut known = true;
    let code = backend.guarded("npu_backend_replay", || match backend.stream.replay(uid) {
        Some(Ok(())) => {
            backend.count(uid, &[]);
            NPU_STATUS_OK
        }
        Some(Err(GraphError { node, error })) => {
            let node = node.map_or_else(String::new, |index| format!(" node {index}:"));
            failed_with(&*backend.stream, &node, &error)
        }
        None => {
            known = false;
            NPU_STATUS_FAILED
        }
    });
    if !known {
        return false;
    }
    // SAFETY: guaranteed by the caller.
    unsafe { status.write(code) };
    true
}

/// Logs an error of a graph and returns its `NPU_STATUS_*`.
fn failed_with(stream: &dyn Stream, what: &str, error: &Error) -> u32 {
    match error {
        // The error's text begins with the device's name.
        Error::DeviceLost { .. } => ::log::error!("{error}"),
        _ => ::log::error!("{}:{what} {error}", stream.device_name()),
    }
    if error.is_shortage() {
        NPU_STATUS_ALLOC_FAILED
    } else {
        NPU_STATUS_FAILED
    }
}

/// Computes nodes in order and returns an `NPU_STATUS_*`.
///
/// - `uid`: ggml's number of the graph: the same for the same nodes with the same operands; 0 if it
///   has none
///
/// # Safety
/// - `backend` is alive, `nodes` is valid for `n_nodes`, and so is everything that they point to,
/// - nothing else reads or writes results, or writes sources, during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_backend_compute(
    backend: *const NpuBackend,
    uid: u64,
    nodes: *const NpuNode,
    n_nodes: usize,
) -> u32 {
    // SAFETY: guaranteed by the caller.
    let Some(backend) = (unsafe { backend.as_ref() }) else {
        return NPU_STATUS_FAILED;
    };
    if n_nodes == 0 {
        return NPU_STATUS_OK;
    }
    // SAFETY: guaranteed by the caller.
    let nodes = unsafe { std::slice::from_raw_parts(nodes, n_nodes) };
    let failed = |GraphError { node: index, error }: GraphError| {
        let node = index.and_then(|index| nodes.get(index));
        let what = node.map_or_else(String::new, |node| {
            let ([n, m, ..], [k, ..]) = (node.dst.ne, node.src[0].ne);
            let op = op(node).map_or("?", Op::name);
            let index = index.unwrap_or(0);
            format!(
                " {op} {} (M={m} K={k} N={n}, node {index} of {n_nodes})",
                name(&node.dst)
            )
        });
        failed_with(&*backend.stream, &what, &error)
    };
    backend.guarded("npu_backend_compute", || {
        let mut graph = Vec::with_capacity(n_nodes);
        for (index, node) in nodes.iter().enumerate() {
            // SAFETY: the caller promises it of every node.
            match unsafe { with_memory(node) } {
                Ok(node) => graph.push(node),
                Err(error) => {
                    let node = Some(index);
                    return failed(GraphError { node, error });
                }
            }
        }
        match backend.stream.submit(uid, &mut graph) {
            Ok(()) => {
                backend.count(uid, &graph);
                NPU_STATUS_OK
            }
            Err(error) => failed(error),
        }
    })
}

/// Returns a node with its operands' memory, and the buffers that contain them.
///
/// # Safety
/// As for [`npu_backend_compute`], for one node and as long as the result is used.
unsafe fn with_memory<'a>(node: &'a NpuNode) -> Result<Node<'a>> {
    let refuse = |reason: &str| Error::Graph {
        reason: reason.into(),
    };
    let mut operation = operation(node).ok_or_else(|| refuse("operation is not supported"))?;
    let span = |tensor: &Tensor| tensor.shape.span_bytes(tensor.dtype).unwrap_or(0);
    let mut sources: [Option<&dyn Buffer>; MAX_SOURCES] = [None; MAX_SOURCES];
    for (index, (from, src)) in node.src.iter().zip(&mut operation.src).enumerate() {
        let Some(src) = src else { continue };
        // SAFETY: the caller promises that the pointer is NULL or to a live object.
        let handle = unsafe { from.buffer.cast_const().as_ref() };
        if let Some(handle) = handle {
            handle.check(from, span(src))?;
            src.packed_offset = offset_in(handle, from);
            sources[index] = Some(&*handle.buffer);
        }
        if handle.is_none_or(|handle| handle.buffer.is_host_memory()) {
            // SAFETY: sources are valid and not written during the call by the caller's promise.
            src.memory = Some(unsafe { Region::new(from.data.cast(), span(src)) });
        }
    }
    // SAFETY: the caller promises that the pointer is NULL or to a live object.
    let handle = unsafe { node.dst.buffer.cast_const().as_ref() };
    if let Some(handle) = handle {
        handle.check(&node.dst, span(&operation.dst))?;
        operation.dst.packed_offset = offset_in(handle, &node.dst);
    }
    // SAFETY: results are valid and nothing else uses them during the call by the caller's promise.
    let out = unsafe { RegionMut::new(node.dst.data.cast(), span(&operation.dst)) };
    Ok(Node {
        operation,
        out,
        feeds_next: node.feeds_next,
        dst: handle.map(|handle| &*handle.buffer),
        src: sources,
    })
}

fn offset_in(buffer: &NpuBuffer, tensor: &NpuTensor) -> usize {
    tensor.data.addr().wrapping_sub(buffer.buffer.base())
}

#[cfg(test)]
mod tests;
