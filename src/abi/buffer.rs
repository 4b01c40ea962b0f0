//! Buffers of a device: the functions that `ggml-glue/buffer.c` calls.

use std::ffi::c_void;

use super::types::{NpuTensor, metadata};
use super::{NpuBuffer, entry, guard, offset_in};
use crate::backend::hexagon::Content;
use crate::error::Error;
use crate::shm::Region;

/// Alignment of tensors in a buffer, in bytes.
#[unsafe(no_mangle)]
pub extern "C" fn npu_packed_alignment(device: usize) -> usize {
    entry(device).map_or(1, |entry| entry.device.alignment())
}

/// Largest buffer, in bytes.
#[unsafe(no_mangle)]
pub extern "C" fn npu_packed_max_size(device: usize) -> usize {
    entry(device).map_or(0, |entry| entry.device.max_buffer_bytes())
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

/// Allocates a buffer, in memory that the CPU uses, too, if `shared`; NULL and a log line on failure.
#[unsafe(no_mangle)]
pub extern "C" fn npu_buffer_new(device: usize, size: usize, shared: bool) -> *mut NpuBuffer {
    guard("npu_buffer_new", std::ptr::null_mut(), || {
        let Some(entry) = entry(device) else {
            return std::ptr::null_mut();
        };
        match entry.device.allocate(size, shared) {
            Ok(buffer) => Box::into_raw(Box::new(NpuBuffer(buffer))),
            Err(error) => {
                ::log::error!(
                    "{}: no buffer of {size} bytes: {error}",
                    entry.device.name()
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

/// Writes bytes `[offset, offset + size)` of a tensor and packs what that touches; false and a log line if it cannot be
/// written, because other bytes of it are gone (`GGML_RUST_NPU_KEEP=off`).
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
) -> bool {
    // SAFETY: the caller promises it.
    let to = unsafe { buffer.as_ref() };
    let shared = guard("npu_buffer_set", None, || {
        to?.0.shared_bytes(data.addr(), size)
    });
    if let Some(bytes) = shared {
        // SAFETY: the caller promises it.
        return unsafe { write(buffer, tensor, offset, size, Content::Bytes(&bytes)) };
    }
    // SAFETY: the caller promises it.
    let data = unsafe { Region::new(data.cast(), size) };
    let content = Content::Bytes(data.bytes(0, size));
    // SAFETY: the caller promises it.
    unsafe { write(buffer, tensor, offset, size, content) }
}

/// Fills bytes `[offset, offset + size)` of a tensor and packs what that touches; false as for `npu_buffer_set`.
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
) -> bool {
    // SAFETY: the caller promises it.
    unsafe { write(buffer, tensor, offset, size, Content::Fill(value)) }
}

/// # Safety
/// `buffer` is alive, `tensor` is valid and lies in it.
unsafe fn write(
    buffer: *const NpuBuffer,
    tensor: *const NpuTensor,
    offset: usize,
    size: usize,
    content: Content,
) -> bool {
    // SAFETY: the caller promises it.
    let buffer = unsafe { buffer.as_ref() };
    // SAFETY: the caller promises it.
    let tensor = unsafe { tensor.as_ref() };
    guard("npu_buffer_set", true, || {
        let (Some(buffer), Some(mut described)) = (buffer, tensor.and_then(metadata)) else {
            return true;
        };
        described.packed_offset = offset_in(buffer, tensor);
        match buffer.0.write(&described, offset, size, content) {
            Ok(()) => true,
            Err(error) => {
                ::log::error!("cannot write {}: {error}", described.name);
                !matches!(error, Error::Released { .. })
            }
        }
    })
}

/// Copies bytes `[offset, offset + size)` of a tensor to `data`: exactly what was written; false and a log line if they
/// are gone (`GGML_RUST_NPU_KEEP=off`).
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
) -> bool {
    if size == 0 {
        return true;
    }
    // SAFETY: the caller promises it.
    let buffer = unsafe { buffer.as_ref() };
    // SAFETY: the caller promises it.
    let tensor = unsafe { tensor.as_ref() };
    // SAFETY: valid for writes, says the caller; ggml's buffers are initialized memory.
    let out = unsafe { std::slice::from_raw_parts_mut(data.cast::<u8>(), size) };
    guard("npu_buffer_get", true, || {
        let (Some(buffer), Some(mut described)) = (buffer, tensor.and_then(metadata)) else {
            return true;
        };
        described.packed_offset = offset_in(buffer, tensor);
        let result = buffer.0.read(&described, offset, out);
        if let Err(error) = &result {
            ::log::error!("cannot read {}: {error}", described.name);
        }
        result.is_ok()
    })
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
