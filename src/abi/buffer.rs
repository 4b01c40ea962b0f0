//! Buffers of a device: the functions that `ggml-glue/buffer.c` calls.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::memory::{self, Held};
use super::types::{NPU_STATUS_FAILED, NPU_STATUS_OK, NpuTensor, metadata, name};
use super::{DEVICES, DeviceEntry, NpuBuffer, entry, guard, is_forked, offset_in, release};
use crate::backend::Content;
use crate::error::{Error, Result};
use crate::host_memory::Region;

/// Returns the alignment of tensors in a buffer, in bytes.
#[unsafe(no_mangle)]
pub extern "C" fn npu_packed_alignment(device: usize) -> usize {
    entry(device).map_or(1, |entry| entry.device.alignment())
}

/// Returns the largest buffer, in bytes.
#[unsafe(no_mangle)]
pub extern "C" fn npu_packed_max_size(device: usize) -> usize {
    entry(device).map_or(0, |entry| entry.device.max_buffer_bytes())
}

/// Returns the size of a tensor in a packed buffer, in bytes. Reads metadata only.
///
/// # Safety
/// `tensor` is valid, and so is its name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_packed_alloc_size(device: usize, tensor: *const NpuTensor) -> usize {
    // SAFETY: guaranteed by the caller.
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

/// Allocates a buffer, in memory that the CPU uses, too, if `shared`; NULL and a log line on
/// failure.
#[unsafe(no_mangle)]
pub extern "C" fn npu_buffer_new(device: usize, size: usize, shared: bool) -> *mut NpuBuffer {
    guard("npu_buffer_new", std::ptr::null_mut(), || {
        let Some(entry) = entry(device).filter(|_| !is_forked()) else {
            return std::ptr::null_mut();
        };
        // Warns before allocating, because the system may kill the process for it: llama.cpp never
        // shortens a context whose length the user gave.
        let devices = DEVICES.get().into_iter().flatten();
        let (left, _) = memory::of_machine(devices.map(DeviceEntry::held_bytes));
        if size > left && left > 0 {
            ::log::warn!(
                "{}: a buffer of {size} bytes is asked for, {left} bytes of memory are left: caches of a smaller context (-c) \
                 take less",
                entry.device.name()
            );
        }
        match Arc::clone(&entry.device).allocate(size, shared) {
            Ok(buffer) => Box::into_raw(Box::new(NpuBuffer {
                buffer,
                _held: Held::new(&entry.held_bytes, size),
                failed: AtomicBool::new(false),
            })),
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
    // SAFETY: guaranteed by the caller.
    release("npu_buffer_free", unsafe { Box::from_raw(buffer) });
}

/// Called before host memory of the device's own buffer type is freed, so that the device drops
/// packed forms for it. Reads none of the memory.
#[unsafe(no_mangle)]
pub extern "C" fn npu_host_memory_freed(device: usize, base: *const c_void, size: usize) {
    guard("npu_host_memory_freed", (), || {
        if let Some(entry) = entry(device).filter(|_| !is_forked()) {
            let start = base.addr();
            entry.device.invalidate(start..start.saturating_add(size));
        }
    });
}

/// Returns the first byte of a packed buffer, as an address in ggml's numbering.
///
/// # Safety
/// `buffer` is alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_buffer_base(buffer: *const NpuBuffer) -> *mut c_void {
    // SAFETY: guaranteed by the caller.
    let buffer = unsafe { buffer.as_ref() };
    buffer.map_or(std::ptr::null_mut(), |buffer| {
        std::ptr::with_exposed_provenance_mut(buffer.buffer.base())
    })
}

impl NpuBuffer {
    /// Runs `access`, which returns an `NPU_STATUS_*`. After a panic in it, or where bytes are
    /// needed that were released, graphs that use the buffer fail, until all of it is written by
    /// [`npu_buffer_clear`].
    fn guarded(&self, what: &str, access: impl FnOnce() -> u32) -> u32 {
        if is_forked() {
            return NPU_STATUS_FAILED;
        }
        guard(what, None, || Some(access())).unwrap_or_else(|| self.fail())
    }

    /// Makes graphs that use the buffer fail.
    fn fail(&self) -> u32 {
        self.failed.store(true, Ordering::Relaxed);
        // A repeated graph is computed without looking at its nodes. Forgetting it makes the next
        // run look, and find that this buffer failed.
        self.buffer.forget_graphs();
        NPU_STATUS_FAILED
    }

    /// Returns `true` after an error that left it unfinished.
    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// Refuses a tensor of `bytes` in the buffer that must not be used in a computation.
    pub(super) fn check(&self, tensor: &NpuTensor, bytes: usize) -> Result<()> {
        let refuse = |reason: &str| Error::Graph {
            reason: format!("{} {reason}", name(tensor)),
        };
        if self.has_failed() {
            return Err(refuse(
                "is in a buffer that an earlier error left unfinished",
            ));
        }
        if !self.buffer.holds(offset_in(self, tensor), bytes) {
            return Err(refuse("is not inside its buffer"));
        }
        Ok(())
    }
}

/// Allocates everything that writing a tensor needs, and returns an `NPU_STATUS_*`. A log line
/// gives the reason of a failure, which leaves the buffer as it was.
///
/// # Safety
/// `buffer` is alive, `tensor` is valid and is in it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_buffer_prepare(
    buffer: *const NpuBuffer,
    tensor: *const NpuTensor,
) -> u32 {
    // SAFETY: guaranteed by the caller.
    let (Some(buffer), Some(tensor)) = (unsafe { buffer.as_ref() }, unsafe { tensor.as_ref() })
    else {
        return NPU_STATUS_FAILED;
    };
    buffer.guarded("npu_buffer_prepare", || {
        let Some(mut described) = metadata(tensor) else {
            return negative("place", tensor);
        };
        described.packed_offset = offset_in(buffer, tensor);
        match buffer.buffer.prepare(&described) {
            Ok(()) => NPU_STATUS_OK,
            Err(error) => {
                ::log::error!("cannot load {}: {error}", described.name);
                NPU_STATUS_FAILED
            }
        }
    })
}

/// Writes bytes `[offset, offset + size)` of a tensor, packs the rows that they belong to, and
/// returns an `NPU_STATUS_*`. A log line gives the reason of a failure, such as other bytes of the
/// tensor that are needed and were released; after `NPU_STATUS_FAILED`, graphs that use the buffer
/// fail.
///
/// # Safety
/// `buffer` is alive, `tensor` is valid and is in it, `data` is valid for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_buffer_set(
    buffer: *const NpuBuffer,
    tensor: *const NpuTensor,
    data: *const c_void,
    offset: usize,
    size: usize,
) -> u32 {
    // SAFETY: guaranteed by the caller.
    let (Some(buffer), Some(tensor)) = (unsafe { buffer.as_ref() }, unsafe { tensor.as_ref() })
    else {
        return NPU_STATUS_FAILED;
    };
    buffer.guarded("npu_buffer_set", || {
        if let Some(bytes) = buffer.buffer.shared_bytes(data.addr(), size) {
            return write(buffer, tensor, offset, size, Content::Bytes(&bytes));
        }
        // SAFETY: guaranteed by the caller.
        let data = unsafe { Region::new(data.cast(), size) };
        let content = Content::Bytes(data.bytes(0, size));
        write(buffer, tensor, offset, size, content)
    })
}

/// Fills bytes `[offset, offset + size)` of a tensor and packs the affected rows; returns as
/// `npu_buffer_set`.
///
/// # Safety
/// `buffer` is alive, `tensor` is valid and is in it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_buffer_fill(
    buffer: *const NpuBuffer,
    tensor: *const NpuTensor,
    value: u8,
    offset: usize,
    size: usize,
) -> u32 {
    // SAFETY: guaranteed by the caller.
    let (Some(buffer), Some(tensor)) = (unsafe { buffer.as_ref() }, unsafe { tensor.as_ref() })
    else {
        return NPU_STATUS_FAILED;
    };
    buffer.guarded("npu_buffer_fill", || {
        write(buffer, tensor, offset, size, Content::Fill(value))
    })
}

fn write(
    buffer: &NpuBuffer,
    tensor: &NpuTensor,
    offset: usize,
    size: usize,
    content: Content,
) -> u32 {
    let Some(mut described) = metadata(tensor) else {
        return negative("write", tensor);
    };
    described.packed_offset = offset_in(buffer, tensor);
    let Err(error) = buffer.buffer.write(&described, offset, size, content) else {
        return NPU_STATUS_OK;
    };
    ::log::error!("cannot write {}: {error}", described.name);
    match error {
        Error::Released { .. } => buffer.fail(),
        // The bytes are stored; only packing failed, so each use packs them again.
        _ => NPU_STATUS_OK,
    }
}

fn negative(what: &str, tensor: &NpuTensor) -> u32 {
    ::log::error!(
        "cannot {what} {}: a dimension is negative, or no memory could hold it",
        name(tensor)
    );
    NPU_STATUS_FAILED
}

/// Copies bytes `[offset, offset + size)` of a tensor to `data`, exactly as they were written, and
/// returns an `NPU_STATUS_*`. A log line gives the reason of a failure, such as bytes that were
/// released when they were packed; after `NPU_STATUS_FAILED`, all bytes at `data` are 255, which is
/// NaN in floating-point types, and graphs that use the buffer fail.
///
/// # Safety
/// `buffer` is alive, `tensor` is valid and is in it, `data` is valid for writes of `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_buffer_get(
    buffer: *const NpuBuffer,
    tensor: *const NpuTensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
) -> u32 {
    if size == 0 {
        return NPU_STATUS_OK;
    }
    // SAFETY: valid for writes by the caller's promise; ggml's buffers are initialized memory.
    let out = unsafe { std::slice::from_raw_parts_mut(data.cast::<u8>(), size) };
    // SAFETY: guaranteed by the caller.
    let (buffer, tensor) = (unsafe { buffer.as_ref() }, unsafe { tensor.as_ref() });
    let status = match (buffer, tensor) {
        (Some(buffer), Some(tensor)) => buffer.guarded("npu_buffer_get", || {
            let Some(mut described) = metadata(tensor) else {
                return negative("read", tensor);
            };
            described.packed_offset = offset_in(buffer, tensor);
            match buffer.buffer.read(&described, offset, out) {
                Ok(()) => NPU_STATUS_OK,
                Err(error) => {
                    ::log::error!("cannot read {}: {error}", described.name);
                    buffer.fail()
                }
            }
        }),
        _ => NPU_STATUS_FAILED,
    };
    if status == NPU_STATUS_FAILED {
        out.fill(0xff);
    }
    status
}

/// Fills a whole buffer.
///
/// # Safety
/// `buffer` is alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn npu_buffer_clear(buffer: *const NpuBuffer, value: u8) {
    // SAFETY: guaranteed by the caller.
    let Some(buffer) = (unsafe { buffer.as_ref() }) else {
        return;
    };
    buffer.guarded("npu_buffer_clear", || {
        buffer.buffer.clear(value);
        buffer.failed.store(false, Ordering::Relaxed);
        NPU_STATUS_OK
    });
}
