//! The functions of `include/npu.h`, called by `ggml-glue/`: check what came in, catch panics, call `backend`. No logic.
//!
//! A panic never crosses into C: it becomes a log line and the failure value of the function. cbindgen makes
//! `include/npu.h` from this file; a test fails when the two differ.
#![expect(unsafe_code, reason = "everything here is called from C")]

use std::ffi::{CStr, CString, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use crate::backend::{self, Device, WeightBuffer};
use crate::config::{self, Config};
use crate::device::rknpu;
use crate::error::{Error, Result};
use crate::graph::{Node, Op, Place, Tensor};
use crate::shm::{Region, RegionMut};
use crate::tensor::{DType, Dequantize, Shape};

/// Sources of a node that are passed on.
pub const NPU_MAX_SRC: usize = 3;
/// 32-bit words of op parameters.
pub const NPU_OP_PARAMS: usize = 16;

/// `npu_tensor.dtype`: F32.
pub const NPU_DTYPE_F32: u32 = 0;
/// `npu_tensor.dtype`: F16.
pub const NPU_DTYPE_F16: u32 = 1;
/// `npu_tensor.dtype`: I32.
pub const NPU_DTYPE_I32: u32 = 2;
/// `npu_tensor.dtype`: any quantized type, with `to_float`.
pub const NPU_DTYPE_QUANTIZED: u32 = 3;
/// `npu_tensor.dtype`: anything else.
pub const NPU_DTYPE_OTHER: u32 = 4;

/// `npu_node.op`: a view, or nothing to compute.
pub const NPU_OP_NONE: u32 = 0;
/// `npu_node.op`: MUL_MAT.
pub const NPU_OP_MUL_MAT: u32 = 1;
/// `npu_node.op`: anything else.
pub const NPU_OP_OTHER: u32 = 2;

/// `npu_tensor.place`: no buffer yet, and not the result of an operation either.
pub const NPU_PLACE_NONE: u32 = 0;
/// `npu_tensor.place`: memory that the CPU reads and writes, in ggml's layout; also a result without a buffer yet.
pub const NPU_PLACE_HOST: u32 = 1;
/// `npu_tensor.place`: a buffer for packed weights of this device.
pub const NPU_PLACE_PACKED: u32 = 2;
/// `npu_tensor.place`: memory of another device.
pub const NPU_PLACE_OTHER: u32 = 3;

/// The graph was computed.
pub const NPU_STATUS_OK: u32 = 0;
/// The graph was not computed, or not all of it; a log line says why.
pub const NPU_STATUS_FAILED: u32 = 1;
/// No memory to compute the graph with.
pub const NPU_STATUS_ALLOC_FAILED: u32 = 2;

/// Log level: an error.
pub const NPU_LOG_ERROR: u32 = 1;
/// Log level: a warning.
pub const NPU_LOG_WARN: u32 = 2;
/// Log level: information.
pub const NPU_LOG_INFO: u32 = 3;
/// Log level: debugging, tracing.
pub const NPU_LOG_DEBUG: u32 = 4;

/// Writes the `n` values of the blocks at `src` to `dst`.
///
/// Only C makes one (the field is private), and with it comes the promise that it is the function of the tensor's type.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct NpuToFloatFn(unsafe extern "C" fn(src: *const c_void, dst: *mut f32, n: i64));

/// A tensor's metadata, and where its bytes are.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct NpuTensor {
    /// `NPU_DTYPE_*`.
    pub dtype: u32,
    /// `NPU_PLACE_*`, of the tensor that this one is a view of if it is one.
    pub place: u32,
    /// Elements in a block, 1 for plain types.
    pub block_elems: u32,
    /// Bytes in a block.
    pub block_bytes: u32,
    /// Elements in each dimension, innermost first.
    pub ne: [i64; 4],
    /// Bytes from one index to the next.
    pub nb: [u64; 4],
    /// First byte; NULL in questions about operations.
    pub data: *mut c_void,
    /// The packed buffer that it is in; NULL unless `place` is `NPU_PLACE_PACKED`, and for ggml's dummy buffers.
    pub buffer: *mut WeightBuffer,
    /// ggml's way to F32; NULL unless `dtype` is `NPU_DTYPE_QUANTIZED`.
    pub to_float: Option<NpuToFloatFn>,
    /// Name for log lines; may be NULL.
    pub name: *const c_char,
}

/// One node of a graph.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct NpuNode {
    /// `NPU_OP_*`.
    pub op: u32,
    /// Sources in `src`.
    pub n_src: u32,
    /// ggml's op parameters.
    pub op_params: [i32; NPU_OP_PARAMS],
    /// Result.
    pub dst: NpuTensor,
    /// Sources.
    pub src: [NpuTensor; NPU_MAX_SRC],
}

/// What the host program offers.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct NpuHost {
    /// Takes one log line, without newline. May be called from any thread.
    pub log: Option<unsafe extern "C" fn(level: u32, text: *const c_char)>,
}

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

static DEVICES: OnceLock<Vec<Entry>> = OnceLock::new();
static HOST: OnceLock<NpuHost> = OnceLock::new();

/// Passes log lines to the host program.
struct HostLog;

impl log::Log for HostLog {
    fn enabled(&self, metadata: &log::Metadata) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &log::Record) {
        let Some(log) = HOST.get().and_then(|host| host.log) else {
            return;
        };
        // What the vendor's library says goes with the debug lines: the error that follows from it is ours to report.
        let vendor = record.target() == "librknnrt";
        let level = if vendor {
            log::Level::Debug
        } else {
            record.level()
        };
        if level > log::max_level() {
            return;
        }
        let source = if vendor { "librknnrt" } else { "ggml-rust-npu" };
        let text = format!("{source}: {}", record.args()).replace('\0', " ");
        let Ok(text) = CString::new(text) else { return };
        let level = match level {
            log::Level::Error => NPU_LOG_ERROR,
            log::Level::Warn => NPU_LOG_WARN,
            log::Level::Info => NPU_LOG_INFO,
            log::Level::Debug | log::Level::Trace => NPU_LOG_DEBUG,
        };
        // SAFETY: the host's function takes a level and a string that is alive during the call.
        unsafe { log(level, text.as_ptr()) };
    }

    fn flush(&self) {}
}

/// Runs `f`; a panic in it becomes a log line and `fallback`.
fn guard<T>(what: &str, fallback: T, f: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("no message");
        log::error!("internal error in {what}: {text}");
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
    guard("npu_start", 0, || {
        if let Some(host) = host {
            HOST.get_or_init(|| *host);
        }
        DEVICES.get_or_init(start).len()
    })
}

fn start() -> Vec<Entry> {
    // A Rust program that links this crate may have a logger of its own; then the lines go there.
    let _ = log::set_logger(&HostLog);
    log::set_max_level(log::LevelFilter::Info);
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    for name in config::unknown_variables(names) {
        log::warn!(
            "{name} is set, but there is no such variable; known are {}",
            config::known_variables()
        );
    }
    let config = match Config::from_env() {
        Ok(config) => config,
        Err(error) => {
            log::error!("no devices: {error}");
            return Vec::new();
        }
    };
    log::set_max_level(config.log);
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

/// Memory that the device can use: the system's, which it shares.
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
        entry(device).map_or((0, 0), |_| backend::system_memory())
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
        match node.op {
            NPU_OP_NONE => true,
            NPU_OP_MUL_MAT if node.n_src == 2 => {
                let tensors = [&node.dst, &node.src[0], &node.src[1]].map(metadata);
                let [Some(dst), Some(src0), Some(src1)] = tensors else {
                    return false;
                };
                entry.device.supports(Op::MulMat, &dst, &src0, &src1)
            }
            _ => false,
        }
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
    crate::caps::MAX_ALLOCATION_BYTES
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
pub extern "C" fn npu_buffer_new(device: usize, size: usize) -> *mut WeightBuffer {
    guard("npu_buffer_new", std::ptr::null_mut(), || {
        let Some(entry) = entry(device) else {
            return std::ptr::null_mut();
        };
        match WeightBuffer::new(Arc::clone(&entry.device), size) {
            Ok(buffer) => Box::into_raw(Box::new(buffer)),
            Err(error) => {
                log::error!(
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
pub unsafe extern "C" fn npu_buffer_free(buffer: *mut WeightBuffer) {
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
pub unsafe extern "C" fn npu_buffer_base(buffer: *const WeightBuffer) -> *mut c_void {
    // SAFETY: the caller promises it.
    let buffer = unsafe { buffer.as_ref() };
    buffer.map_or(std::ptr::null_mut(), |buffer| {
        std::ptr::with_exposed_provenance_mut(buffer.base())
    })
}

/// Writes bytes `[offset, offset + size)` of a tensor and packs what that touches.
///
/// # Safety
/// `buffer` is alive, `tensor` is valid and lies in it, `data` is valid for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_buffer_set(
    buffer: *const WeightBuffer,
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
    buffer: *const WeightBuffer,
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
    buffer: *const WeightBuffer,
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
        if let Err(error) = buffer.write(&described, offset, size, fill) {
            log::error!("{}: cannot pack {}: {error}", rknpu::NAME, described.name);
        }
    });
}

/// Copies bytes `[offset, offset + size)` of a tensor to `data`: exactly what was written.
///
/// # Safety
/// `buffer` is alive, `tensor` is valid and lies in it, `data` is valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_buffer_get(
    buffer: *const WeightBuffer,
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
        buffer.read(&described, offset, out);
    });
}

/// Fills a packed buffer.
///
/// # Safety
/// `buffer` is alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_buffer_clear(buffer: *const WeightBuffer, value: u8) {
    // SAFETY: the caller promises it.
    let Some(buffer) = (unsafe { buffer.as_ref() }) else {
        return;
    };
    guard("npu_buffer_clear", (), || buffer.clear(value));
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
    _uid: u64,
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
    guard("npu_backend_compute", NPU_STATUS_FAILED, || {
        for (index, node) in nodes.iter().enumerate() {
            // SAFETY: the caller promises it of every node.
            let result = unsafe { compute(&backend.device, index, node) };
            let Err(error) = result else { continue };
            let ([n, m, ..], [k, ..]) = (node.dst.ne, node.src[0].ne);
            log::error!(
                "{device}: MUL_MAT {} (M={m} K={k} N={n}, node {index} of {n_nodes}): {error}",
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
unsafe fn compute(device: &Device, index: usize, node: &NpuNode) -> Result<()> {
    let refuse = |reason: &str| Error::Graph {
        node: index,
        name: name(&node.dst).into(),
        reason: reason.into(),
    };
    let op = match node.op {
        NPU_OP_NONE => return Ok(()),
        NPU_OP_MUL_MAT if node.n_src == 2 => Op::MulMat,
        _ => return Err(refuse("operation is not supported")),
    };
    let described = [&node.dst, &node.src[0], &node.src[1]].map(metadata);
    let [Some(dst), Some(mut src0), Some(mut src1)] = described else {
        return Err(refuse("a dimension is negative"));
    };
    let span = |tensor: &Tensor| tensor.shape.span_bytes(tensor.dtype).unwrap_or(0);
    // SAFETY: sources are valid and not written during the call, says the caller.
    src0.memory = Some(unsafe { Region::new(node.src[0].data.cast(), span(&src0)) });
    // SAFETY: as above.
    src1.memory = Some(unsafe { Region::new(node.src[1].data.cast(), span(&src1)) });
    // SAFETY: results are valid and nobody else's during the call, says the caller.
    let out = unsafe { RegionMut::new(node.dst.data.cast(), span(&dst)) };
    // SAFETY: NULL or alive, says the caller.
    let buffer = unsafe { node.src[0].buffer.cast_const().as_ref() };
    if let Some(buffer) = buffer {
        src0.packed_offset = offset_in(buffer, Some(&node.src[0]));
    }
    device.compute(
        &mut Node {
            index,
            op,
            dst,
            out,
            src0,
            src1,
        },
        buffer,
    )
}

fn offset_in(buffer: &WeightBuffer, tensor: Option<&NpuTensor>) -> usize {
    tensor.map_or(0, |tensor| tensor.data.addr().wrapping_sub(buffer.base()))
}

impl Dequantize for NpuToFloatFn {
    fn dequantize(&self, blocks: &[u8], out: &mut [f32]) {
        let n = i64::try_from(out.len()).unwrap_or(0);
        // SAFETY: this is ggml's own function for the type of these blocks (`metadata` takes both from one tensor), and
        // `out` has as many elements as the blocks hold (`repack` cuts both by whole rows).
        unsafe { (self.0)(blocks.as_ptr().cast(), out.as_mut_ptr(), n) };
    }
}

/// The tensor's metadata, without memory; `None` if a dimension is negative.
fn metadata(tensor: &NpuTensor) -> Option<Tensor<'_>> {
    let dtype = match tensor.dtype {
        NPU_DTYPE_F32 => DType::F32,
        NPU_DTYPE_F16 => DType::F16,
        NPU_DTYPE_I32 => DType::I32,
        NPU_DTYPE_QUANTIZED if tensor.to_float.is_some() && tensor.block_elems > 0 => {
            DType::Quantized {
                block_elems: tensor.block_elems as usize,
                block_bytes: tensor.block_bytes as usize,
            }
        }
        _ => DType::Other,
    };
    let mut shape = Shape {
        ne: [0; 4],
        nb: [0; 4],
    };
    for i in 0..4 {
        shape.ne[i] = usize::try_from(tensor.ne[i]).ok()?;
        shape.nb[i] = usize::try_from(tensor.nb[i]).ok()?;
    }
    Some(Tensor {
        name: name(tensor),
        dtype,
        shape,
        place: match tensor.place {
            NPU_PLACE_NONE => Place::Unknown,
            NPU_PLACE_HOST => Place::Host,
            NPU_PLACE_PACKED => Place::Packed,
            _ => Place::Foreign,
        },
        memory: None,
        packed_offset: 0,
        dequantize: tensor
            .to_float
            .as_ref()
            .map(|to_float| to_float as &dyn Dequantize),
    })
}

fn name(tensor: &NpuTensor) -> &str {
    if tensor.name.is_null() {
        return "?";
    }
    // SAFETY: ggml's names end in NUL and live as long as the tensor.
    unsafe { CStr::from_ptr(tensor.name) }
        .to_str()
        .unwrap_or("?")
}
