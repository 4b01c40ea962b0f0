//! Memory of the library: allocations that CPU and NPU both reach, and views of them.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rknpu_ops::ffi::{MemSync, TensorMem};

use super::{Context, Leftover, check};
use crate::error::{Error, Result};
use crate::rockchip::driver::process;

/// Identities of memory: never reused, unlike addresses.
static NEXT_IDENTITY: AtomicU64 = AtomicU64::new(1);

/// An `rknn_tensor_mem` of the library, released on drop.
#[derive(Debug)]
pub(super) struct TensorMemory {
    context: Arc<Context>,
    pub(super) raw: *mut TensorMem,
    pub(super) identity: u64,
    bytes: usize,
}

// SAFETY: a memory object is bound to no thread of the library; except for runs, one thread at a
// time calls the library (`Rknn::alone`).
unsafe impl Send for TensorMemory {}
// SAFETY: as for Send; the mapped bytes are only reached through `Memory`.
unsafe impl Sync for TensorMemory {}

impl TensorMemory {
    fn adopt(
        context: &Arc<Context>,
        raw: *mut TensorMem,
        call: &'static str,
        bytes: usize,
    ) -> Result<Self> {
        if raw.is_null() {
            return Err(match process::file_limit_reached(1) {
                Some(limit) => Error::OutOfDescriptors {
                    call,
                    what: format!("memory for {bytes} bytes"),
                    limit,
                },
                None => Error::OutOfMemory { call, bytes },
            });
        }
        let identity = NEXT_IDENTITY.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            context: Arc::clone(context),
            raw,
            identity,
            bytes,
        })
    }

    fn fields(&self) -> TensorMem {
        // SAFETY: the library gave this pointer (`adopt`), and it stays valid until `drop`.
        unsafe { *self.raw }
    }
}

impl Drop for TensorMemory {
    fn drop(&mut self) {
        let object = Leftover::Memory(self.context.handle, self.raw, self.bytes);
        self.context.rknn.free(object);
    }
}

/// Memory that the NPU and the CPU both access. The CPU accesses the bytes only through its owner.
#[derive(Debug)]
pub struct Memory(pub(super) Arc<TensorMemory>);

impl Memory {
    /// Allocates `bytes` in the address space of `context`.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let call = "rknn_create_mem";
        let size = u32::try_from(bytes).map_err(|_| Error::OutOfMemory { call, bytes })?;
        // SAFETY: the handle is that of a live context.
        let raw = (context.rknn).alone(|api| unsafe { (api.create_mem)(context.handle, size) })?;
        Ok(Self(Arc::new(TensorMemory::adopt(
            context, raw, call, bytes,
        )?)))
    }

    /// As [`Memory::new`], for results. The CPU's cache may have lines with the kernel's zeros,
    /// which would be written back over the results. So these lines are cleaned once.
    ///
    /// # Errors
    /// `OutOfMemory`, or `Vendor` for the cache operation.
    pub fn for_results(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let memory = Self::new(context, bytes)?;
        memory.sync_to_device()?;
        Ok(memory)
    }

    /// Returns a view of `bytes` bytes at `offset`, for the device to read.
    ///
    /// # Errors
    /// `OutOfMemory`.
    ///
    /// # Panics
    /// If the range is not inside.
    pub fn view(&self, offset: usize, bytes: usize) -> Result<MemoryView> {
        assert!(
            offset + bytes <= self.0.bytes,
            "view behind the end of device memory"
        );
        let call = "rknn_create_mem_from_fd";
        let (Ok(start), Ok(size)) = (i32::try_from(offset), u32::try_from(bytes)) else {
            return Err(Error::OutOfMemory { call, bytes });
        };
        let (context, parent) = (&self.0.context, self.0.fields());
        let (fd, address) = (parent.fd, parent.virt_addr);
        let raw = context.rknn.alone(|api| {
            // SAFETY: descriptor and mapping are those of a live allocation, and the range is
            // inside it.
            unsafe { (api.create_mem_from_fd)(context.handle, fd, address, size, start) }
        })?;
        let memory = TensorMemory::adopt(context, raw, call, bytes)?;
        Ok(MemoryView {
            memory,
            offset,
            _parent: Arc::clone(&self.0),
        })
    }

    /// Returns the bytes that were last synced from the device.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        let start = self.0.fields().virt_addr.cast::<u8>();
        // SAFETY: the mapping has this many bytes, all initialized by the kernel; the device writes
        // them only in `Context::run`, which needs `&mut Memory`.
        unsafe { std::slice::from_raw_parts(start, self.0.bytes) }
    }

    /// Returns the bytes, to fill them for the device.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let start = self.0.fields().virt_addr.cast::<u8>();
        // SAFETY: as in `bytes`; views give the CPU no access to the bytes, so `&mut self` is
        // exclusive.
        unsafe { std::slice::from_raw_parts_mut(start, self.0.bytes) }
    }

    /// Makes the CPU's writes, through this memory and through its views, visible to the device.
    ///
    /// # Errors
    /// `Vendor`.
    pub fn sync_to_device(&self) -> Result<()> {
        self.sync(MemSync::TO_DEVICE)
    }

    /// Makes the device's writes visible to the CPU.
    ///
    /// # Errors
    /// `Vendor`.
    pub fn sync_from_device(&mut self) -> Result<()> {
        self.sync(MemSync::FROM_DEVICE)
    }

    fn sync(&self, mode: MemSync) -> Result<()> {
        let context = &self.0.context;
        let code = context.rknn.alone(|api| {
            // SAFETY: a live context and the library's own rknn_tensor_mem.
            unsafe { (api.mem_sync)(context.handle, self.0.raw, mode) }
        })?;
        check("rknn_mem_sync", code, || format!("{} bytes", self.0.bytes))
    }
}

/// A part of a [`Memory`], for the device only. The CPU writes and syncs the whole: a sync through
/// a view does not flush (SOURCE: measurements in unimatrix099's fork of rk-llama.cpp).
#[derive(Debug)]
pub struct MemoryView {
    pub(super) memory: TensorMemory,
    offset: usize,
    _parent: Arc<TensorMemory>,
}

impl MemoryView {
    /// Returns the view's bytes, as a range of the memory that it is a part of.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.memory.bytes
    }
}
