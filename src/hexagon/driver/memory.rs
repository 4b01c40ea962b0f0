//! Memory that both processors use.
//!
//! An allocation has two sizes. Its *bytes* are the size that the caller requested and may touch.
//! Its *mapped bytes* are the size that rpcmem allocates and the DSP maps: whole pages, and a guard
//! page, because vector loads, prefetches and DMA may read past the last row.
//!
//! SOURCE: qualcomm/fastrpc inc/remote.h (`fastrpc_mmap`: the length "must be page aligned (4KB)");
//! llama.cpp ggml-hexagon.cpp adds a guard page of 4 KiB to each buffer.
#![expect(
    unsafe_code,
    reason = "addresses from the vendor's library become slices here"
)]

use std::ffi::c_int;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hexagon_ops::ffi::{self, code};
use os::memory::Descriptor;

use super::{Connection, FastRpc, Quiet, check};
use crate::error::{Error, Result};
use crate::hexagon::driver::ring::SharedWords;

/// Granularity of mappings, and bytes of the guard.
const PAGE_BYTES: usize = 4096;

/// Memory of rpcmem, released on drop.
///
/// It is *announced* while the system has it mapped for the session's process on the DSP, which can
/// map it then.
#[derive(Debug)]
struct Rpcmem {
    rpc: Arc<FastRpc>,
    domain: c_int,
    base: NonNull<u8>,
    bytes: usize,
    mapped_bytes: usize,
    fd: c_int,
    announcement: Mutex<Announcement>,
    /// `true` while the connection is open.
    is_open: Arc<AtomicBool>,
}

/// State of a mapping that the system has, or had.
#[derive(Debug, Default)]
struct Announcement {
    is_there: bool,
    /// The descriptor by whose number the memory is announced, if it is not the memory's own.
    duplicate: Option<Descriptor>,
}

/// Numbers of descriptors under which memory is announced, one after another: the library may list
/// a number whose mapping the system has dropped, and refuses it for as long as the session lives.
///
/// SOURCE: qualcomm/fastrpc src/fastrpc_mem.c (`fastrpc_munmap` keeps its entry when the kernel
/// answers EINVAL).
const MOST_NUMBERS: usize = 256;

/// State of a library's allocator.
#[derive(Debug, Default)]
pub(super) struct Heap {
    /// An allocation has worked, or `rpcmem_init` was called.
    is_ready: bool,
}

impl FastRpc {
    /// Allocates shared memory. If the very first allocation fails, the allocator is initialized,
    /// as programs for old Android libraries do, and the allocation repeated. That is done once,
    /// while nothing is allocated, because newer libraries initialize themselves, and would forget
    /// their allocations.
    fn allocate(&self, bytes: c_int) -> Option<NonNull<u8>> {
        let mut heap = self.heap.lock().unwrap_or_else(PoisonError::into_inner);
        if heap.is_ready {
            drop(heap);
            return self.allocate_once(bytes);
        }
        let mut base = self.allocate_once(bytes);
        if base.is_none()
            && let Some(init) = self.api.rpcmem_init
        {
            log::debug!("rpcmem_alloc gave no memory; calling rpcmem_init");
            heap.is_ready = true;
            // SAFETY: nothing has been allocated yet, and the lock keeps other threads from
            // allocating.
            unsafe { init() };
            base = self.allocate_once(bytes);
        }
        heap.is_ready |= base.is_some();
        base
    }

    fn allocate_once(&self, bytes: c_int) -> Option<NonNull<u8>> {
        let (heap, flags) = (ffi::RPCMEM_HEAP_ID_SYSTEM, ffi::RPCMEM_DEFAULT_FLAGS);
        let base = match self.api.rpcmem_alloc2 {
            // SAFETY: the allocation has this size.
            // CAST: the caller gives no negative sizes.
            Some(alloc2) => unsafe { alloc2(heap, flags, bytes.unsigned_abs() as usize) },
            // SAFETY: the allocation has this size.
            None => unsafe { (self.api.rpcmem_alloc)(heap, flags, bytes) },
        };
        // The library checks the result of its mmap for null only, so a failure returns MAP_FAILED
        // as the address.
        let base = Some(base.cast::<u8>()).filter(|base| base.addr() != usize::MAX);
        base.and_then(NonNull::new)
    }
}

/// Returns the bytes to allocate and map for `bytes` bytes; `None` for 2 GiB or more, because
/// libcdsprpc keeps sizes as 32-bit integers, and never frees larger allocations.
///
/// SOURCE: qualcomm/fastrpc src/rpcmem_linux.c (`struct rpc_info`).
fn mapped_bytes(bytes: usize) -> Option<c_int> {
    let whole = bytes.checked_next_multiple_of(PAGE_BYTES)?;
    c_int::try_from(whole.checked_add(PAGE_BYTES)?).ok()
}

// SAFETY: plain memory, which the owners below guard; the library's functions may be called from
// any thread.
unsafe impl Send for Rpcmem {}
// SAFETY: as for Send.
unsafe impl Sync for Rpcmem {}

impl Rpcmem {
    fn new(connection: &Connection, bytes: usize) -> Result<Self> {
        let rpc = &connection.rpc;
        let failed = |call| Error::OutOfMemory { call, bytes };
        let size = mapped_bytes(bytes).ok_or_else(|| failed("rpcmem_alloc"))?;
        // CAST: `mapped_bytes` returns no negative sizes.
        let mapped_bytes = size.unsigned_abs() as usize;
        let base = rpc.allocate(size).ok_or_else(|| failed("rpcmem_alloc"))?;
        // SAFETY: rpcmem gave this address.
        let fd = unsafe { (rpc.api.rpcmem_to_fd)(base.as_ptr().cast()) };
        let memory = Self {
            rpc: Arc::clone(rpc),
            domain: connection.domain,
            base,
            bytes,
            mapped_bytes,
            fd,
            announcement: Mutex::default(),
            is_open: Arc::clone(&connection.is_open),
        };
        if fd < 0 {
            return Err(failed("rpcmem_to_fd"));
        }
        Ok(memory)
    }

    fn announcement(&self) -> MutexGuard<'_, Announcement> {
        (self.announcement.lock()).unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number by which the DSP maps it.
    fn number(&self) -> c_int {
        let announcement = self.announcement();
        (announcement.duplicate.as_ref()).map_or(self.fd, Descriptor::number)
    }

    /// Lets the DSP map it; does nothing if the DSP already may.
    fn announce(&self) -> Result<()> {
        let mut announcement = self.announcement();
        if announcement.is_there {
            return Ok(());
        }
        let mut code = self.announce_as(self.fd);
        // Refused numbers stay in use until a number is accepted, so that none is offered twice.
        let mut refused = Vec::new();
        while [code::EALREADY, code::EMAPALREADYPRESENT].contains(&code)
            && refused.len() < MOST_NUMBERS
        {
            // SAFETY: rpcmem keeps the descriptor open as long as the memory.
            let Ok(duplicate) = (unsafe { Descriptor::duplicate(self.fd) }) else {
                break;
            };
            code = self.announce_as(duplicate.number());
            refused.extend(announcement.duplicate.replace(duplicate));
        }
        check("fastrpc_mmap", code, || self.size())?;
        announcement.is_there = true;
        Ok(())
    }

    fn announce_as(&self, number: c_int) -> c_int {
        // SAFETY: the allocation is live and has this descriptor and size.
        unsafe {
            (self.rpc.api.fastrpc_mmap)(
                self.domain,
                number,
                self.base.as_ptr().cast(),
                0,
                self.mapped_bytes,
                ffi::FASTRPC_MAP_FD_DELAYED,
            )
        }
    }

    /// Takes back [`Self::announce`]. The DSP must not have it mapped.
    ///
    /// The system may have dropped the mapping when a call ended in which the DSP has unmapped it.
    ///
    /// SOURCE: Linux drivers/misc/fastrpc.c, `fastrpc_put_args`; qualcomm/fastrpc
    /// src/fastrpc_mem.c, `fastrpc_munmap`: AEE_ENOSUCHMAP for memory that is not in its list,
    /// AEE_EUNSUPPORTED for memory that is not in the kernel's.
    fn retract(&self) {
        const GONE: [c_int; 3] = [code::SUCCESS, code::ENOSUCHMAP, code::EUNSUPPORTED];
        let number = self.number();
        let mut announcement = self.announcement();
        if !announcement.is_there {
            return;
        }
        // SAFETY: a live allocation that was mapped with these values.
        let code = unsafe {
            (self.rpc.api.fastrpc_munmap)(
                self.domain,
                number,
                self.base.as_ptr().cast(),
                self.mapped_bytes,
            )
        };
        if GONE.contains(&code) {
            *announcement = Announcement::default();
        } else if let Err(error) = check("fastrpc_munmap", code, || self.size()) {
            // The error is only logged: `drop` then keeps the memory allocated.
            log::debug!("{error}");
        }
    }

    fn size(&self) -> String {
        format!("{} bytes", self.mapped_bytes)
    }

    fn maintain(&self, range: Range<usize>, clean: bool) {
        self.maintain_all(std::iter::once(range), clean);
    }

    fn maintain_all(&self, ranges: impl Iterator<Item = Range<usize>>, clean: bool) {
        let checked = ranges.inspect(|range| {
            assert!(
                range.start <= range.end && range.end <= self.bytes,
                "cache operation outside shared memory"
            );
        });
        self.rpc.maintain(self.base.as_ptr(), checked, clean);
    }
}

impl Drop for Rpcmem {
    fn drop(&mut self) {
        self.retract();
        let announcement = (self.announcement.get_mut()).unwrap_or_else(PoisonError::into_inner);
        if announcement.is_there && self.is_open.load(Ordering::Acquire) {
            std::mem::forget(announcement.duplicate.take());
            // Linux looks a mapping up by its file descriptor's number. If the descriptor were
            // closed, the next buffer with this number would refer to the old memory on the DSP.
            // SOURCE: drivers/misc/fastrpc.c, `fastrpc_map_lookup`.
            log::debug!(
                "{} stay allocated: the system has them mapped for the DSP",
                self.size()
            );
            return;
        }
        // SAFETY: rpcmem returned this address, and nothing uses it after this.
        unsafe { (self.rpc.api.rpcmem_free)(self.base.as_ptr().cast()) };
    }
}

/// Memory for a ring.
#[derive(Debug)]
pub struct RingMemory(Rpcmem);

impl RingMemory {
    /// Allocates `bytes` and lets the DSP map them.
    ///
    /// # Errors
    /// `OutOfMemory`, or `FastRpc` if it cannot be shared.
    pub fn new(connection: &Connection, bytes: usize) -> Result<Self> {
        let memory = Rpcmem::new(connection, bytes)?;
        memory.announce()?;
        Ok(Self(memory))
    }

    /// Returns the number of the descriptor by which the DSP maps it.
    #[must_use]
    pub fn fd(&self) -> c_int {
        self.0.number()
    }

    /// Returns the bytes that the DSP maps.
    #[must_use]
    pub fn mapped_bytes(&self) -> usize {
        self.0.mapped_bytes
    }
}

impl RingMemory {
    /// The stand-in has no caches in front of a ring.
    fn maintain(&self, bytes: Range<usize>, clean: bool) {
        if self.0.rpc.stand_in().is_none() {
            self.0.maintain(bytes, clean);
        }
    }
}

impl SharedWords for RingMemory {
    fn words(&self) -> &[AtomicU32] {
        // SAFETY: the memory is page-aligned, has this size, and lives as long as `self`. This
        // process accesses it only through these atomics, which tolerate writes of the other side.
        unsafe { std::slice::from_raw_parts(self.0.base.as_ptr().cast(), self.0.bytes / 4) }
    }

    fn clean(&self, bytes: Range<usize>) {
        self.maintain(bytes, true);
    }

    fn invalidate(&self, bytes: Range<usize>) {
        self.maintain(bytes, false);
    }
}

/// Memory for tensors.
#[derive(Debug)]
pub struct SharedMemory {
    memory: Rpcmem,
    identity: u64,
}

impl SharedMemory {
    /// Allocates `bytes`, which the DSP cannot map yet.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn new(connection: &Connection, bytes: usize) -> Result<Self> {
        Ok(Self {
            memory: Rpcmem::new(connection, bytes)?,
            identity: connection.identity,
        })
    }

    /// Lets the DSP map it; does nothing if the DSP already may.
    ///
    /// # Errors
    /// `FastRpc` if the system cannot map it for the DSP, most likely because the window of
    /// addresses is full.
    pub fn announce(&self) -> Result<()> {
        self.memory.announce()
    }

    /// Makes room for other memory in the window of addresses. The DSP must not have this memory
    /// mapped.
    pub fn retract(&self) {
        self.memory.retract();
    }

    /// Returns the number of the descriptor by which the DSP maps the memory; announcing the memory
    /// may change it.
    #[must_use]
    pub fn fd(&self) -> c_int {
        self.memory.number()
    }

    /// Returns the number of bytes that the caller may touch.
    #[must_use]
    pub fn len(&self) -> usize {
        self.memory.bytes
    }

    /// Returns the bytes that the DSP maps.
    #[must_use]
    pub fn mapped_bytes(&self) -> usize {
        self.memory.mapped_bytes
    }

    /// Returns `true` if the memory has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.memory.bytes == 0
    }

    /// Returns the address of the memory's first byte.
    #[must_use]
    pub fn base(&self) -> usize {
        self.memory.base.as_ptr().expose_provenance()
    }

    /// Makes the CPU's writes to `range` visible to the DSP.
    ///
    /// # Panics
    /// If `range` is not inside the memory.
    pub fn clean(&self, range: Range<usize>) {
        self.memory.maintain(range, true);
    }

    /// Makes the DSP's writes to `range` visible to the CPU.
    ///
    /// # Panics
    /// If `range` is not inside the memory.
    pub fn invalidate(&self, range: Range<usize>) {
        self.memory.maintain(range, false);
    }

    /// As [`Self::invalidate`], for many ranges: the CPU waits once for all of them.
    ///
    /// # Panics
    /// If one of `ranges` is not inside the memory.
    pub fn invalidate_all(&self, ranges: impl Iterator<Item = Range<usize>>) {
        self.memory.maintain_all(ranges, false);
    }

    /// Returns some of its bytes, as the DSP left them.
    ///
    /// # Panics
    /// If `range` is not inside, or `quiet` is another connection's.
    pub fn read<'a>(&'a self, quiet: &'a mut Quiet, range: Range<usize>) -> &'a [u8] {
        self.memory.maintain(range.clone(), false);
        self.slice(quiet, range)
    }

    /// Calls `write`, which fills some of its bytes, and makes these visible to the DSP. Before,
    /// the bytes have their earlier content.
    ///
    /// # Panics
    /// As [`Self::read`].
    pub fn write<T>(
        &self,
        quiet: &mut Quiet,
        range: Range<usize>,
        write: impl FnOnce(&mut [u8]) -> T,
    ) -> T {
        self.memory.maintain(range.clone(), false);
        let result = write(self.slice(quiet, range.clone()));
        self.memory.maintain(range, true);
        result
    }

    fn slice<'a>(&'a self, quiet: &'a mut Quiet, range: Range<usize>) -> &'a mut [u8] {
        assert_eq!(quiet.identity, self.identity, "memory of another session");
        assert!(
            range.start <= range.end && range.end <= self.memory.bytes,
            "access outside shared memory"
        );
        let start = self.memory.base.as_ptr().wrapping_add(range.start);
        // SAFETY: the range is inside an allocation that rpcmem zeroed and that lives as long as
        // `self`. The connection has one `Quiet`, which is borrowed for as long as the slice: no
        // other slice exists, and the DSP is idle.
        unsafe { std::slice::from_raw_parts_mut(start, range.len()) }
    }
}

/// Cache operations on the lines of places, each a start and its bytes, on processors that have
/// them for programs. All are carried out when it returns.
#[cfg(target_arch = "aarch64")]
pub(super) fn maintain_cache(places: impl Iterator<Item = (*const u8, usize)>, clean: bool) {
    /// Smallest cache line of any AArch64 processor on a chip with a Hexagon.
    // SOURCE: Arm Cortex-A and Qualcomm Oryon: 64 bytes.
    const LINE: usize = 64;
    for (start, bytes) in places {
        let first = start.addr() / LINE * LINE;
        for line in (first..start.addr() + bytes).step_by(LINE) {
            if clean {
                // SAFETY: writing a cache line back does not change memory as the CPU sees it.
                // Linux allows user programs this instruction.
                unsafe { std::arch::asm!("dc cvac, {0}", in(reg) line, options(nostack)) };
            } else {
                // SAFETY: writes a cache line back and drops it; the caller's memory is shared, and
                // no Rust reference to it exists.
                unsafe { std::arch::asm!("dc civac, {0}", in(reg) line, options(nostack)) };
            }
        }
    }
    // SAFETY: a barrier only orders accesses.
    unsafe { std::arch::asm!("dsb sy", options(nostack)) };
}

/// No other processor shares a chip with a Hexagon. The places are still looked at, which checks
/// them.
#[cfg(not(target_arch = "aarch64"))]
pub(super) fn maintain_cache(places: impl Iterator<Item = (*const u8, usize)>, _clean: bool) {
    places.for_each(drop);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_are_whole_pages_with_a_guard_page_and_stay_below_2_gib() {
        for (bytes, want) in [(0, 4096), (1, 8192), (4096, 8192), (4097, 12288)] {
            assert_eq!(mapped_bytes(bytes), Some(want), "{bytes}");
        }
        let most = (1 << 31) - 2 * PAGE_BYTES;
        assert!(mapped_bytes(most).is_some());
        assert_eq!(mapped_bytes(most + 1), None);
        assert_eq!(mapped_bytes(usize::MAX), None);
    }
}
