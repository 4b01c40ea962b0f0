//! Memory that CPU and device share: allocations with a real file descriptor, views of them, the
//! device's own copy.
//!
//! - An allocation is a separate memfd, mapped once; its descriptor counts against `RLIMIT_NOFILE`
//!   as a DMA buffer's does. A view refers to an allocation by descriptor and keeps it alive, also
//!   after `destroy_mem` of the allocation (its descriptor included).
//! - `virt_addr` of a view is the start of the mapping and `offset` its place in it, as the caller
//!   passed them.
//! - With strict coherence the device works on a shadow of the allocation. Runs hold its lock
//!   shared, `mem_sync` holds it exclusively: on hardware, too, the driver orders a cache operation
//!   with respect to a running job.
//! - `phys_addr` is 0: nothing on the CPU side may use it.
#![expect(
    unsafe_code,
    reason = "device memory is reached by address from both sides of the C ABI"
)]

use std::collections::HashMap;
use std::ffi::c_void;
use std::fs::File;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};

use memmap2::MmapRaw;
use sim_common::poison::{poisoned, with_descriptor};

use super::shared::SharedNode;
use super::{Coherence, Options, POISON, lock, vendor_error};
use crate::ffi::{MemSync, TensorMem, mem_flags};

/// I/O domains of a chip.
///
/// SOURCE: vendor kernel driver 0.9.8, rknpu_iommu.c (`RKNPU_MAX_IOMMU_DOMAIN_NUM`).
pub(super) const DOMAINS: usize = 16;

/// Bytes of one I/O domain that allocations can have.
///
/// I/O addresses are 32 bits (vendor kernel driver 0.9.8), but rk-llama.cpp uses half of them.
/// SOURCE: rk-llama.cpp caps each I/O domain at INT32_MAX - 65536.
const DOMAIN_BYTES: u64 = i32::MAX as u64;

/// Granularity of I/O mappings.
const PAGE_BYTES: u64 = 4096;

/// Alignment of a view's start in bytes.
///
/// SOURCE: feature data is addressed in atoms of 16 bytes (register descriptions of the CNA and DPU
/// units); that the library refuses other offsets is a guess.
const OFFSET_ALIGN: usize = 16;

/// Bytes in use in each I/O domain.
#[derive(Debug)]
struct Usage {
    own: [AtomicU64; DOMAINS],
    /// Those of memory that is freed stay in use.
    are_lost: bool,
    /// The node of machines that share the domains.
    node: Option<Arc<SharedNode>>,
}

impl Usage {
    /// Returns the bytes in use, also by machines of other processes.
    fn of(&self, domain: usize) -> u64 {
        let others = self.node.as_ref().map(|node| node.used_by_others(domain));
        self.own[domain].load(Ordering::Relaxed) + others.unwrap_or(0)
    }

    fn add(&self, domain: usize, bytes: u64) {
        self.own[domain].fetch_add(bytes, Ordering::Relaxed);
        if let Some(node) = &self.node {
            node.charge(domain, |used| used + bytes);
        }
    }

    fn give_back(&self, domain: usize, bytes: u64) {
        if self.are_lost {
            return;
        }
        self.own[domain].fetch_sub(bytes, Ordering::Relaxed);
        if let Some(node) = &self.node {
            node.charge(domain, |used| used - bytes);
        }
    }
}

/// An allocation.
#[derive(Debug)]
pub(super) struct DeviceAllocation {
    file: File,
    map: MmapRaw,
    shadow: Option<RwLock<MmapRaw>>,
    /// No sync has cleaned the cache lines that have the kernel's zeros.
    // SOURCE: rknpu_iommu.c, driver 0.9.8: objects with LIMIT_IOVA_ALIGNMENT skip the mapping that
    // cleans the caches. Whether librknnrt 2.3.2 sets this flag is unknown.
    is_fresh: AtomicBool,
    domain: usize,
    charged: u64,
    usage: Arc<Usage>,
}

impl DeviceAllocation {
    fn new(
        size: u32,
        domain: usize,
        usage: &Arc<Usage>,
        coherence: Coherence,
    ) -> std::io::Result<Self> {
        let charged = u64::from(size).next_multiple_of(PAGE_BYTES);
        let poison = (coherence == Coherence::Strict).then_some(POISON);
        let (file, map) = with_descriptor(c"rknpu", charged, poison)?;
        let shadow = match coherence {
            Coherence::Relaxed => None,
            Coherence::Strict => Some(RwLock::new(poisoned(map.len(), POISON)?)),
        };
        usage.add(domain, charged);
        Ok(Self {
            file,
            map,
            shadow,
            is_fresh: AtomicBool::new(true),
            domain,
            charged,
            usage: Arc::clone(usage),
        })
    }

    /// Returns the device's side of the memory, held for as long as a run needs it.
    pub(super) fn device(&self) -> DeviceSide<'_> {
        match &self.shadow {
            None => DeviceSide {
                base: self.map.as_mut_ptr(),
                len: self.map.len(),
                _shadow: None,
            },
            Some(shadow) => {
                let shadow = shadow.read().unwrap_or_else(PoisonError::into_inner);
                DeviceSide {
                    base: shadow.as_mut_ptr(),
                    len: shadow.len(),
                    _shadow: Some(shadow),
                }
            }
        }
    }

    /// Copies between CPU and device in the direction of `mode`; does nothing if they share the
    /// memory.
    fn sync(&self, mode: MemSync) {
        if mode.0 & MemSync::TO_DEVICE.0 != 0 {
            self.is_fresh.store(false, Ordering::Relaxed);
        }
        let Some(shadow) = &self.shadow else { return };
        let shadow = shadow.write().unwrap_or_else(PoisonError::into_inner);
        let (cpu, device, len) = (self.map.as_mut_ptr(), shadow.as_mut_ptr(), shadow.len());
        if mode.0 & MemSync::TO_DEVICE.0 != 0 {
            // SAFETY: two mappings of `len` bytes each. The caller of mem_sync does not write the
            // CPU side meanwhile, and the lock keeps runs from using the device side.
            unsafe { cpu.copy_to_nonoverlapping(device, len) };
        }
        if mode.0 & MemSync::FROM_DEVICE.0 != 0 {
            // SAFETY: as above; the caller does not use the CPU side meanwhile.
            unsafe { device.copy_to_nonoverlapping(cpu, len) };
        }
    }
}

impl Drop for DeviceAllocation {
    fn drop(&mut self) {
        self.usage.give_back(self.domain, self.charged);
    }
}

/// The device's view of an allocation.
pub(super) struct DeviceSide<'a> {
    base: *mut u8,
    len: usize,
    _shadow: Option<RwLockReadGuard<'a, MmapRaw>>,
}

impl DeviceSide<'_> {
    /// Returns the bytes that a job reads.
    ///
    /// # Safety
    /// - Nothing writes the range while the slice lives: not the CPU, and no other job.
    pub(super) unsafe fn read(&self, range: Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: in bounds by the assertion.
        let start = unsafe { self.base.add(range.start) };
        // SAFETY: in bounds, initialized by the kernel or by poison, and not written by the
        // caller's promise.
        unsafe { std::slice::from_raw_parts(start, range.len()) }
    }

    /// Returns the bytes that a job writes.
    ///
    /// # Safety
    /// - Nothing else uses the range while the slice lives: not the CPU, no other job, and no other
    ///   slice of this job.
    #[expect(
        clippy::mut_from_ref,
        reason = "jobs write disjoint ranges of one allocation"
    )]
    pub(super) unsafe fn write(&self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: in bounds by the assertion.
        let start = unsafe { self.base.add(range.start) };
        // SAFETY: in bounds, initialized, and not used by others by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(start, range.len()) }
    }
}

/// A range of an allocation.
#[derive(Clone, Debug)]
pub(super) struct MemoryRange {
    pub(super) allocation: Arc<DeviceAllocation>,
    offset: usize,
    len: usize,
}

impl MemoryRange {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Returns the first `len` bytes, as a range of the allocation; `None` if there are fewer.
    pub(super) fn first(&self, len: usize) -> Option<Range<usize>> {
        (len <= self.len).then(|| self.offset..self.offset + len)
    }

    /// Returns `true` if the first `len` bytes and the first `other_len` bytes of `other` have
    /// bytes in common.
    pub(super) fn overlaps(&self, len: usize, other: &Self, other_len: usize) -> bool {
        Arc::ptr_eq(&self.allocation, &other.allocation)
            && self.offset < other.offset + other_len
            && other.offset < self.offset + len
    }

    /// Returns a range of the same length that begins at the start of the allocation.
    pub(super) fn without_offset(&self) -> Self {
        Self {
            offset: 0,
            ..self.clone()
        }
    }

    /// Returns `true` if the CPU's cache has no lines of the first `len` bytes that it would write
    /// back over results: they were cleaned once, and, as far as can be seen, not written since.
    ///
    /// With separate copies, bytes that the CPU has not written are those of the last sync, or
    /// poison since a run.
    ///
    /// # Safety
    /// - Nothing writes the range meanwhile.
    pub(super) unsafe fn is_clean(&self, len: usize) -> bool {
        if self.allocation.is_fresh.load(Ordering::Relaxed) {
            return false;
        }
        let (Some(_), Some(range)) = (&self.allocation.shadow, self.first(len)) else {
            return true;
        };
        // SAFETY: guaranteed by the caller.
        let Some(cpu) = (unsafe { self.cpu_copy(len) }) else {
            return true;
        };
        let device = self.allocation.device();
        // SAFETY: guaranteed by the caller.
        let device = unsafe { device.read(range) };
        (cpu.iter().zip(device)).all(|(cpu, device)| cpu == device || *cpu == POISON)
    }

    pub(super) fn domain(&self) -> usize {
        self.allocation.domain
    }

    /// Copies the CPU's view of the first `len` bytes.
    ///
    /// # Safety
    /// - The CPU does not write the range meanwhile.
    pub(super) unsafe fn cpu_copy(&self, len: usize) -> Option<Vec<u8>> {
        let range = self.first(len)?;
        // SAFETY: a region is inside its allocation's mapping.
        let start = unsafe { self.allocation.map.as_ptr().add(range.start) };
        // SAFETY: in bounds; the caller promises that nothing writes these bytes.
        Some(unsafe { std::slice::from_raw_parts(start, len) }.to_vec())
    }

    /// Makes the CPU see poison in the first `len` bytes until the next sync, if CPU and device are
    /// separate: the CPU's copy of a result is stale as soon as a run starts.
    ///
    /// # Safety
    /// - The CPU does not use the range meanwhile.
    pub(super) unsafe fn make_stale(&self, len: usize) {
        if self.allocation.shadow.is_none() {
            return;
        }
        let Some(range) = self.first(len) else { return };
        // SAFETY: a region is inside its allocation's mapping.
        let start = unsafe { self.allocation.map.as_mut_ptr().add(range.start) };
        // SAFETY: in bounds; the caller promises that nothing uses these bytes.
        unsafe { start.write_bytes(POISON, len) };
    }
}

#[derive(Debug)]
struct MemoryEntry {
    region: MemoryRange,
    is_view: bool,
}

/// The tensor memories of a machine, by the address that the caller holds.
#[derive(Debug)]
pub(super) struct MemoryTable {
    coherence: Coherence,
    one_address_space: bool,
    usage: Arc<Usage>,
    entries: Mutex<HashMap<usize, MemoryEntry>>,
}

impl MemoryTable {
    pub(super) fn new(options: &Options, node: Option<Arc<SharedNode>>) -> Self {
        Self {
            coherence: options.coherence,
            one_address_space: options.one_address_space,
            usage: Arc::new(Usage {
                own: [const { AtomicU64::new(0) }; DOMAINS],
                are_lost: options.loses_addresses,
                node,
            }),
            entries: Mutex::new(HashMap::new()),
        }
    }

    pub(super) fn len(&self) -> usize {
        lock(&self.entries).len()
    }

    /// Implements `rknn_create_mem`. Returns null if the domain or the process has no room for
    /// `size` bytes more.
    pub(super) fn create(&self, domain: usize, size: u32) -> *mut TensorMem {
        if size == 0 {
            vendor_error!("invalid size: 0");
            return std::ptr::null_mut();
        }
        let mut entries = lock(&self.entries);
        let (used, most) = if self.one_address_space {
            let used = (0..DOMAINS).map(|domain| self.usage.of(domain));
            (used.sum(), u64::from(u32::MAX))
        } else {
            (self.usage.of(domain), DOMAIN_BYTES)
        };
        if used + u64::from(size).next_multiple_of(PAGE_BYTES) > most {
            vendor_error!("failed to allocate handle, ret -1, errno 12");
            return std::ptr::null_mut();
        }
        match DeviceAllocation::new(size, domain, &self.usage, self.coherence) {
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(0);
                vendor_error!("failed to allocate handle, ret -1, errno {errno}");
                std::ptr::null_mut()
            }
            Ok(allocation) => {
                let mem = TensorMem {
                    virt_addr: allocation.map.as_mut_ptr().cast(),
                    phys_addr: 0,
                    fd: os::memory::number(&allocation.file),
                    offset: 0,
                    size,
                    flags: mem_flags::ALLOC_INSIDE,
                    priv_data: std::ptr::null_mut(),
                };
                // CAST: `create` is only compiled where usize has at least 32 bits.
                let region = MemoryRange {
                    allocation: Arc::new(allocation),
                    offset: 0,
                    len: size as usize,
                };
                insert(&mut entries, mem, region, false)
            }
        }
    }

    /// Implements `rknn_create_mem_from_fd`. Returns null if the descriptor is not this machine's,
    /// or the view does not fit.
    pub(super) fn view(
        &self,
        domain: usize,
        fd: i32,
        virt: *mut c_void,
        size: u32,
        offset: i32,
    ) -> *mut TensorMem {
        let mut entries = lock(&self.entries);
        let parent = entries
            .values()
            .map(|entry| &entry.region.allocation)
            .find(|allocation| {
                os::memory::number(&allocation.file) == fd && allocation.domain == domain
            });
        let Some(parent) = parent else {
            vendor_error!("failed to convert fd({fd}) to handle, errno 12");
            return std::ptr::null_mut();
        };
        let base = parent.map.as_ptr() as usize;
        let inside = (base + 1..base + parent.map.len()).contains(&(virt as usize));
        // CAST: usize has at least 32 bits.
        let len = size as usize;
        let place = usize::try_from(offset)
            .ok()
            .filter(|at| at % OFFSET_ALIGN == 0 && at + len <= parent.map.len());
        let Some(at) = place.filter(|_| !virt.is_null() && !inside && len > 0) else {
            vendor_error!(
                "invalid view: fd {fd}, virt {virt:p}, size {size}, offset {offset} of {} bytes at {base:#x}",
                parent.map.len()
            );
            return std::ptr::null_mut();
        };
        let mem = TensorMem {
            virt_addr: virt,
            phys_addr: 0,
            fd,
            offset,
            size,
            flags: mem_flags::FROM_FD,
            priv_data: std::ptr::null_mut(),
        };
        let region = MemoryRange {
            allocation: Arc::clone(parent),
            offset: at,
            len,
        };
        insert(&mut entries, mem, region, true)
    }

    /// Implements `rknn_destroy_mem`. Returns `false` if `mem` is not this machine's.
    pub(super) fn destroy(&self, mem: *mut TensorMem) -> bool {
        let entry = lock(&self.entries).remove(&(mem as usize));
        if entry.is_none() {
            return false;
        }
        // SAFETY: `insert` made the pointer from a box. The entry that was just removed proves that
        // it has not been freed.
        drop(unsafe { Box::from_raw(mem) });
        true
    }

    /// Implements `rknn_mem_sync`. Returns `false` if `mem` is not this machine's. A view is
    /// accepted and does nothing, as in the real library.
    pub(super) fn sync(&self, mem: *mut TensorMem, mode: MemSync) -> bool {
        let allocation = match lock(&self.entries).get(&(mem as usize)) {
            None => return false,
            Some(entry) if entry.is_view => return true,
            Some(entry) => Arc::clone(&entry.region.allocation),
        };
        allocation.sync(mode);
        true
    }

    pub(super) fn region(&self, mem: *mut TensorMem) -> Option<MemoryRange> {
        Some(lock(&self.entries).get(&(mem as usize))?.region.clone())
    }
}

impl Drop for MemoryTable {
    /// Leaks the memories that the caller did not destroy, because it may still hold their
    /// addresses.
    fn drop(&mut self) {
        let entries = std::mem::take(&mut *lock(&self.entries));
        if !entries.is_empty() {
            log::warn!(target: "librknnrt", "{} tensor memories were never destroyed", entries.len());
            std::mem::forget(entries);
        }
    }
}

fn insert(
    entries: &mut HashMap<usize, MemoryEntry>,
    mem: TensorMem,
    region: MemoryRange,
    is_view: bool,
) -> *mut TensorMem {
    let raw = Box::into_raw(Box::new(mem));
    entries.insert(raw as usize, MemoryEntry { region, is_view });
    raw
}
