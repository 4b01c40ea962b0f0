//! The functions of `include/npu.h`, called by `ggml-glue/`: check what came in, catch panics, call `backend`. No logic.
//!
//! A panic never crosses into C: it becomes a log line and the failure value of the function. cbindgen makes
//! `include/npu.h` from this file; a test fails when the two differ.
#![expect(unsafe_code, reason = "everything here is called from C")]

use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::backend::{self, AnyBuffer, AnyDevice, AnyStream, Buffers, Homes};
use crate::config::{self, Config};
use crate::error::{Error, Result};
use crate::graph::{MAX_SOURCES, Node, Op, Tensor};
use crate::shm::{Region, RegionMut};

pub use self::types::*;
use self::types::{name, op, operation};

mod buffer;
mod log;
mod types;

/// A buffer of a device.
pub struct NpuBuffer(AnyBuffer);

/// A stream of graphs on one device.
pub struct NpuBackend(AnyStream);

/// A device with its texts as C strings.
struct Entry {
    device: AnyDevice,
    name: CString,
    description: CString,
}

/// Number of the next graph.
static GRAPHS: AtomicU64 = AtomicU64::new(0);

static DEVICES: OnceLock<Vec<Entry>> = OnceLock::new();

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

fn entry(device: usize) -> Option<&'static Entry> {
    DEVICES.get()?.get(device)
}

/// Finds the devices and returns how many there are. The first call decides; later ones return the same.
///
/// # Safety
/// `host` is NULL or points to a struct whose function may be called from now on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_start(host: *const NpuHost) -> usize {
    // SAFETY: the caller promises that it is NULL or valid.
    let host = unsafe { host.as_ref() };
    guard("npu_start", 0, || DEVICES.get_or_init(|| start(host)).len())
}

fn start(host: Option<&NpuHost>) -> Vec<Entry> {
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
    ::log::set_max_level(config.log);
    let entries = backend::find_devices(&config)
        .into_iter()
        .map(|device| Entry {
            name: CString::new(device.name()).unwrap_or_default(),
            description: CString::new(device.description()).unwrap_or_default(),
            device,
        });
    entries.collect()
}

/// Name of a device, or "" if there is no such device.
#[unsafe(no_mangle)]
pub extern "C" fn npu_device_name(device: usize) -> *const c_char {
    entry(device).map_or(c"".as_ptr(), |entry| entry.name.as_ptr())
}

/// Chip, library, driver, and whether it is simulated.
#[unsafe(no_mangle)]
pub extern "C" fn npu_device_description(device: usize) -> *const c_char {
    entry(device).map_or(c"".as_ptr(), |entry| entry.description.as_ptr())
}

/// Memory that weights can use: the system's, as far as the device's address spaces reach.
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
        entry(device).map_or((0, 0), |entry| entry.device.memory())
    });
    // SAFETY: the caller promises it.
    unsafe { free_bytes.write(free) };
    // SAFETY: the caller promises it.
    unsafe { total_bytes.write(total) };
}

/// Whether the device computes a node. Reads metadata only.
///
/// # Safety
/// `node` is valid, and so are the names and buffers in it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_supports_op(device: usize, node: *const NpuNode) -> bool {
    // SAFETY: the caller promises it.
    let Some(node) = (unsafe { node.as_ref() }) else {
        return false;
    };
    guard("npu_supports_op", false, || {
        let Some(entry) = entry(device) else {
            return false;
        };
        let supported = operation(node).is_some_and(|operation| entry.device.supports(&operation));
        if !supported {
            let operands = node.src.iter().chain([&node.dst]);
            for tensor in operands.filter(|tensor| tensor.role == NPU_ROLE_STATE) {
                // SAFETY: NULL or alive, says the caller.
                if let Some(buffer) = unsafe { tensor.buffer.cast_const().as_ref() } {
                    buffer.0.leave_to_cpu();
                }
            }
        }
        supported
    })
}

/// Whether a node that the device could compute has so few rows that the CPU shall do it. Its weights can be read where
/// they are. Reads metadata only.
///
/// # Safety
/// `node` is valid, and so are the names in it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_leaves_to_cpu(device: usize, node: *const NpuNode) -> bool {
    // SAFETY: the caller promises it.
    let Some(node) = (unsafe { node.as_ref() }) else {
        return false;
    };
    guard("npu_leaves_to_cpu", false, || {
        let (Some(entry), Some(operation)) = (entry(device), operation(node)) else {
            return false;
        };
        entry.device.leaves_to_cpu(&operation)
    })
}

/// Which buffer types a device has: an `NPU_BUFFERS_*`.
#[unsafe(no_mangle)]
pub extern "C" fn npu_device_buffers(device: usize) -> u32 {
    match entry(device).map(|entry| entry.device.buffers()) {
        Some(Buffers::HostAndPacked) | None => NPU_BUFFERS_HOST_AND_PACKED,
        Some(Buffers::SharedAndPacked) => NPU_BUFFERS_SHARED_AND_PACKED,
        Some(Buffers::Shared) => NPU_BUFFERS_SHARED,
        Some(Buffers::One) => NPU_BUFFERS_ONE,
    }
}

/// Makes a stream of graphs for a device; NULL if there is no such device.
#[unsafe(no_mangle)]
pub extern "C" fn npu_backend_new(device: usize) -> *mut NpuBackend {
    entry(device).map_or(std::ptr::null_mut(), |entry| {
        Box::into_raw(Box::new(NpuBackend(entry.device.stream())))
    })
}

/// Frees a stream.
///
/// # Safety
/// `backend` came from `npu_backend_new` and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_backend_free(backend: *mut NpuBackend) {
    if !backend.is_null() {
        // SAFETY: the caller promises it.
        drop(unsafe { Box::from_raw(backend) });
    }
}

/// Computes a graph once more that [`npu_backend_compute`] has computed with the same number, and writes an `NPU_STATUS_*`.
/// False, and nothing done, if that is not possible: then the nodes are needed.
///
/// # Safety
/// - `backend` is alive, `status` is valid for writes,
/// - what the graph's nodes pointed to is as for [`npu_backend_compute`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_backend_replay(
    backend: *const NpuBackend,
    uid: u64,
    status: *mut u32,
) -> bool {
    // SAFETY: the caller promises it.
    let Some(backend) = (unsafe { backend.as_ref() }) else {
        return false;
    };
    if uid == 0 {
        return false;
    }
    let done = guard("npu_backend_replay", Some(NPU_STATUS_FAILED), || {
        Some(match backend.0.replay(uid)? {
            Ok(()) => NPU_STATUS_OK,
            Err((index, error)) => {
                let node = index.map_or_else(String::new, |index| format!(" node {index}:"));
                failed_with(&backend.0, &node, &error)
            }
        })
    });
    let Some(code) = done else { return false };
    // SAFETY: the caller promises it.
    unsafe { status.write(code) };
    true
}

/// Logs an error of a graph and returns its `NPU_STATUS_*`.
fn failed_with(stream: &AnyStream, what: &str, error: &Error) -> u32 {
    ::log::error!("{}:{what} {error}", stream.device_name());
    if error.is_shortage() {
        NPU_STATUS_ALLOC_FAILED
    } else {
        NPU_STATUS_FAILED
    }
}

/// Computes nodes in order and returns an `NPU_STATUS_*`.
///
/// - `uid`: ggml's number of the graph: the same for the same nodes with the same operands; 0 if it has none
///
/// # Safety
/// - `backend` is alive, `nodes` is valid for `n_nodes`, and so is everything that they point to,
/// - nobody else reads or writes results, or writes sources, during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_backend_compute(
    backend: *const NpuBackend,
    uid: u64,
    nodes: *const NpuNode,
    n_nodes: usize,
) -> u32 {
    // SAFETY: the caller promises it.
    let Some(backend) = (unsafe { backend.as_ref() }) else {
        return NPU_STATUS_FAILED;
    };
    if n_nodes == 0 {
        return NPU_STATUS_OK;
    }
    // SAFETY: the caller promises it.
    let nodes = unsafe { std::slice::from_raw_parts(nodes, n_nodes) };
    let graph = GRAPHS.fetch_add(1, Ordering::Relaxed);
    let failed = |index: Option<usize>, error: Error| {
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
        failed_with(&backend.0, &what, &error)
    };
    guard("npu_backend_compute", NPU_STATUS_FAILED, || {
        for (index, node) in nodes.iter().enumerate() {
            // SAFETY: the caller promises it of every node.
            if let Err(error) = unsafe { push(&backend.0, node, graph) } {
                return failed(Some(index), error);
            }
        }
        match backend.0.finish(uid) {
            Ok(()) => NPU_STATUS_OK,
            Err((index, error)) => failed(index, error),
        }
    })
}

/// # Safety
/// As for [`npu_backend_compute`], of one node.
unsafe fn push(stream: &AnyStream, node: &NpuNode, graph: u64) -> Result<()> {
    let refuse = |reason: &str| Error::Graph {
        reason: reason.into(),
    };
    let mut operation = operation(node).ok_or_else(|| refuse("operation is not supported"))?;
    let span = |tensor: &Tensor| tensor.shape.span_bytes(tensor.dtype).unwrap_or(0);
    let mut homes = Homes {
        dst: None,
        src: [None; MAX_SOURCES],
    };
    for (index, (from, src)) in node.src.iter().zip(&mut operation.src).enumerate() {
        let Some(src) = src else { continue };
        // SAFETY: NULL or alive, says the caller.
        let home = unsafe { from.buffer.cast_const().as_ref() };
        if let Some(home) = home {
            src.packed_offset = offset_in(home, Some(from));
            homes.src[index] = Some(&home.0);
        }
        if home.is_none_or(|home| home.0.is_host_memory()) {
            // SAFETY: sources are valid and not written during the call, says the caller.
            src.memory = Some(unsafe { Region::new(from.data.cast(), span(src)) });
        }
    }
    // SAFETY: NULL or alive, says the caller.
    let home = unsafe { node.dst.buffer.cast_const().as_ref() };
    if let Some(home) = home {
        operation.dst.packed_offset = offset_in(home, Some(&node.dst));
        homes.dst = Some(&home.0);
    }
    // SAFETY: results are valid and nobody else's during the call, says the caller.
    let out = unsafe { RegionMut::new(node.dst.data.cast(), span(&operation.dst)) };
    let mut node = Node {
        operation,
        out,
        feeds_next: node.feeds_next,
    };
    stream.push(&mut node, homes, graph)
}

fn offset_in(buffer: &NpuBuffer, tensor: Option<&NpuTensor>) -> usize {
    tensor.map_or(0, |tensor| tensor.data.addr().wrapping_sub(buffer.0.base()))
}
