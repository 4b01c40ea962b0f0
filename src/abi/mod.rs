//! The functions of `include/npu.h`, called by `ggml-glue/`: check what came in, catch panics, call `backend`. No logic.
//!
//! A panic never crosses into C: it becomes a log line and the failure value of the function. cbindgen makes
//! `include/npu.h` from this file; a test fails when the two differ.
#![expect(unsafe_code, reason = "everything here is called from C")]

use std::ffi::{CString, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::backend::{self, Device, WeightBuffer};
use crate::config::{self, Config};
use crate::device::rknpu;
use crate::error::{Error, Result};
use crate::graph::{Node, Op, Tensor};
use crate::shm::{Region, RegionMut};

pub use self::types::*;
use self::types::{metadata, name, operands, operation};

mod log;
mod types;

/// A buffer of packed weights.
pub struct NpuBuffer(WeightBuffer);

/// A stream of graphs on one device.
pub struct NpuBackend {
    device: Arc<Device>,
}

/// A device with its texts as C strings.
struct Entry {
    device: Arc<Device>,
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
            name: CString::new(rknpu::NAME).unwrap_or_default(),
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
/// `node` is valid, and so are the names in it.
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
        let (Some(op), Some(dst), Some(src)) =
            (operation(node), metadata(&node.dst), operands(node))
        else {
            return false;
        };
        entry.device.supports(op, &dst, &src[..op.sources()])
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
        let (Some(entry), Some(op), Some(src)) = (entry(device), operation(node), operands(node))
        else {
            return false;
        };
        entry.device.leaves_to_cpu(op, &src[..op.sources()])
    })
}

/// Alignment of tensors in a packed buffer, in bytes.
#[unsafe(no_mangle)]
pub extern "C" fn npu_packed_alignment(_device: usize) -> usize {
    backend::PACKED_ALIGN_BYTES
}

/// Largest packed buffer, in bytes.
#[unsafe(no_mangle)]
pub extern "C" fn npu_packed_max_size(_device: usize) -> usize {
    crate::caps::DOMAIN_WEIGHT_BYTES
}

/// Bytes that a tensor takes in a packed buffer. Reads metadata only.
///
/// # Safety
/// `tensor` is valid, and so is its name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_packed_alloc_size(device: usize, tensor: *const NpuTensor) -> usize {
    // SAFETY: the caller promises it.
    let Some(tensor) = (unsafe { tensor.as_ref() }) else {
        return 0;
    };
    guard("npu_packed_alloc_size", 0, || {
        let (Some(entry), Some(tensor)) = (entry(device), metadata(tensor)) else {
            return 0;
        };
        entry.device.packed_bytes(&tensor)
    })
}

/// Allocates a packed buffer; NULL and a log line on failure.
#[unsafe(no_mangle)]
pub extern "C" fn npu_buffer_new(device: usize, size: usize) -> *mut NpuBuffer {
    guard("npu_buffer_new", std::ptr::null_mut(), || {
        let Some(entry) = entry(device) else {
            return std::ptr::null_mut();
        };
        match WeightBuffer::new(Arc::clone(&entry.device), size) {
            Ok(buffer) => Box::into_raw(Box::new(NpuBuffer(buffer))),
            Err(error) => {
                ::log::error!(
                    "{}: no buffer of {size} bytes for weights: {error}",
                    rknpu::NAME
                );
                std::ptr::null_mut()
            }
        }
    })
}

/// Frees a packed buffer.
///
/// # Safety
/// `buffer` came from `npu_buffer_new` and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_buffer_free(buffer: *mut NpuBuffer) {
    if buffer.is_null() {
        return;
    }
    // SAFETY: the caller promises it.
    let buffer = unsafe { Box::from_raw(buffer) };
    guard("npu_buffer_free", (), || drop(buffer));
}

/// First byte of a packed buffer, as ggml reckons addresses.
///
/// # Safety
/// `buffer` is alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_buffer_base(buffer: *const NpuBuffer) -> *mut c_void {
    // SAFETY: the caller promises it.
    let buffer = unsafe { buffer.as_ref() };
    buffer.map_or(std::ptr::null_mut(), |buffer| {
        std::ptr::with_exposed_provenance_mut(buffer.0.base())
    })
}

/// Writes bytes `[offset, offset + size)` of a tensor and packs what that touches.
///
/// # Safety
/// `buffer` is alive, `tensor` is valid and lies in it, `data` is valid for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_buffer_set(
    buffer: *const NpuBuffer,
    tensor: *const NpuTensor,
    data: *const c_void,
    offset: usize,
    size: usize,
) {
    // SAFETY: the caller promises it.
    let data = unsafe { Region::new(data.cast(), size) };
    // SAFETY: the caller promises it.
    unsafe {
        write(buffer, tensor, offset, size, |out| {
            out.copy_from_slice(data.bytes(0, size))
        })
    };
}

/// Fills bytes `[offset, offset + size)` of a tensor and packs what that touches.
///
/// # Safety
/// `buffer` is alive, `tensor` is valid and lies in it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_buffer_fill(
    buffer: *const NpuBuffer,
    tensor: *const NpuTensor,
    value: u8,
    offset: usize,
    size: usize,
) {
    // SAFETY: the caller promises it.
    unsafe { write(buffer, tensor, offset, size, |out| out.fill(value)) };
}

/// # Safety
/// `buffer` is alive, `tensor` is valid and lies in it.
unsafe fn write(
    buffer: *const NpuBuffer,
    tensor: *const NpuTensor,
    offset: usize,
    size: usize,
    fill: impl FnOnce(&mut [u8]),
) {
    // SAFETY: the caller promises it.
    let buffer = unsafe { buffer.as_ref() };
    // SAFETY: the caller promises it.
    let tensor = unsafe { tensor.as_ref() };
    guard("npu_buffer_set", (), || {
        let (Some(buffer), Some(mut described)) = (buffer, tensor.and_then(metadata)) else {
            return;
        };
        described.packed_offset = offset_in(buffer, tensor);
        if let Err(error) = buffer.0.write(&described, offset, size, fill) {
            ::log::error!("{}: cannot pack {}: {error}", rknpu::NAME, described.name);
        }
    });
}

/// Copies bytes `[offset, offset + size)` of a tensor to `data`: exactly what was written.
///
/// # Safety
/// `buffer` is alive, `tensor` is valid and lies in it, `data` is valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_buffer_get(
    buffer: *const NpuBuffer,
    tensor: *const NpuTensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
) {
    if size == 0 {
        return;
    }
    // SAFETY: the caller promises it.
    let buffer = unsafe { buffer.as_ref() };
    // SAFETY: the caller promises it.
    let tensor = unsafe { tensor.as_ref() };
    // SAFETY: valid for writes, says the caller; ggml's buffers are initialized memory.
    let out = unsafe { std::slice::from_raw_parts_mut(data.cast::<u8>(), size) };
    guard("npu_buffer_get", (), || {
        let (Some(buffer), Some(mut described)) = (buffer, tensor.and_then(metadata)) else {
            return;
        };
        described.packed_offset = offset_in(buffer, tensor);
        buffer.0.read(&described, offset, out);
    });
}

/// Fills a packed buffer.
///
/// # Safety
/// `buffer` is alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_buffer_clear(buffer: *const NpuBuffer, value: u8) {
    // SAFETY: the caller promises it.
    let Some(buffer) = (unsafe { buffer.as_ref() }) else {
        return;
    };
    guard("npu_buffer_clear", (), || buffer.0.clear(value));
}

/// Makes a stream of graphs for a device; NULL if there is no such device.
#[unsafe(no_mangle)]
pub extern "C" fn npu_backend_new(device: usize) -> *mut NpuBackend {
    entry(device).map_or(std::ptr::null_mut(), |entry| {
        Box::into_raw(Box::new(NpuBackend {
            device: Arc::clone(&entry.device),
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
        // SAFETY: the caller promises it.
        drop(unsafe { Box::from_raw(backend) });
    }
}

/// Computes nodes in order and returns an `NPU_STATUS_*`.
///
/// # Safety
/// - `backend` is alive, `nodes` is valid for `n_nodes`, and so is everything that they point to,
/// - nobody else reads or writes results, or writes sources, during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_backend_compute(
    backend: *const NpuBackend,
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
    let device = rknpu::NAME;
    let graph = GRAPHS.fetch_add(1, Ordering::Relaxed);
    guard("npu_backend_compute", NPU_STATUS_FAILED, || {
        for (index, node) in nodes.iter().enumerate() {
            // SAFETY: the caller promises it of every node.
            let result = unsafe { compute(&backend.device, node, graph) };
            let Err(error) = result else { continue };
            let ([n, m, ..], [k, ..]) = (node.dst.ne, node.src[0].ne);
            ::log::error!(
                "{device}: {} {} (M={m} K={k} N={n}, node {index} of {n_nodes}): {error}",
                operation(node).map_or("?", Op::name),
                name(&node.dst)
            );
            return match error {
                Error::OutOfMemory { .. } => NPU_STATUS_ALLOC_FAILED,
                _ => NPU_STATUS_FAILED,
            };
        }
        NPU_STATUS_OK
    })
}

/// # Safety
/// As for [`npu_backend_compute`], of one node.
unsafe fn compute(device: &Device, node: &NpuNode, graph: u64) -> Result<()> {
    let refuse = |reason: &str| Error::Graph {
        reason: reason.into(),
    };
    let op = operation(node).ok_or_else(|| refuse("operation is not supported"))?;
    let described = metadata(&node.dst).zip(operands(node));
    let (dst, mut src) = described.ok_or_else(|| refuse("a dimension is negative"))?;
    let span = |tensor: &Tensor| tensor.shape.span_bytes(tensor.dtype).unwrap_or(0);
    for (tensor, from) in src.iter_mut().zip(&node.src).take(op.sources()) {
        // SAFETY: sources are valid and not written during the call, says the caller.
        tensor.memory = Some(unsafe { Region::new(from.data.cast(), span(tensor)) });
    }
    // SAFETY: results are valid and nobody else's during the call, says the caller.
    let out = unsafe { RegionMut::new(node.dst.data.cast(), span(&dst)) };
    // SAFETY: NULL or alive, says the caller.
    let buffer = unsafe { node.src[0].buffer.cast_const().as_ref() };
    if let Some(buffer) = buffer {
        src[0].packed_offset = offset_in(buffer, Some(&node.src[0]));
    }
    let mut node = Node { op, dst, out, src };
    device.compute(&mut node, buffer.map(|buffer| &buffer.0), graph)
}

fn offset_in(buffer: &NpuBuffer, tensor: Option<&NpuTensor>) -> usize {
    tensor.map_or(0, |tensor| tensor.data.addr().wrapping_sub(buffer.0.base()))
}
