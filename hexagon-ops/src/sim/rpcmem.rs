//! Memory that host and DSP share, as rpcmem allocates it: a separate memfd for each allocation.
//!
//! With [`Coherence::Strict`] an allocation exists three times, and every copy is poison at first:
//!
//! ```text
//!   host cache  --clean-->   main memory  <--clean--   DSP cache
//!   (the memfd) <-invalidate-      |      -invalidate->
//!                                  +--> DMA engine reads
//! ```
//!
//! Operations of the DSP cover whole lines of 128 bytes, as in its second-level cache: cleaning a
//! result also writes back the DSP's copy of the neighbouring bytes. Its first-level cache is not
//! simulated. Operations of the host cover whole lines of 64 bytes. Both `dc cvac` and `dc civac`
//! write back lines that the host has changed: if an old write is still in a line, invalidating the
//! line overwrites a result of the DSP.
//!
//! Both sides access the ring in the host's copy.
#![expect(
    unsafe_code,
    reason = "shared memory is reached by address from both sides of the C ABI"
)]

use std::ffi::c_void;
use std::fs::File;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use memmap2::MmapRaw;
use sim_common::poison::{poisoned, with_descriptor};

use super::{Coherence, Options, POISON, lock, vendor_error};
use crate::layout::LINE_BYTES;
use crate::rt::memory::Mapped;
use crate::rt::shared::Shared;

/// Granularity of mappings on the DSP.
pub(super) const PAGE_BYTES: usize = 4096;

/// Returns `true` if a mapping can have this length: whole pages, below 2 GiB.
///
/// SOURCE: qualcomm/fastrpc inc/remote.h: lengths must be "page aligned (4KB)"; 2 GiB, `int` in
/// src/rpcmem_linux.c and as the length of `HAP_mmap`.
pub(super) fn is_whole_pages(bytes: usize) -> bool {
    bytes > 0 && bytes.is_multiple_of(PAGE_BYTES) && i32::try_from(bytes).is_ok()
}

/// The copies that only strict coherence has.
#[derive(Debug)]
struct Apart {
    main: MmapRaw,
    dsp: MmapRaw,
    /// The host's lines when they were maintained last: a line with other bytes is dirty.
    seen: MmapRaw,
}

/// An allocation.
#[derive(Debug)]
pub(super) struct Allocation {
    /// Until it is freed: then its number can be that of another allocation.
    file: Mutex<Option<File>>,
    fd: i32,
    host: MmapRaw,
    apart: Option<Apart>,
}

/// Bytes of a cache line of the host.
// SOURCE: Arm Cortex-A and Qualcomm Oryon: 64 bytes.
const HOST_LINE_BYTES: usize = 64;

impl Allocation {
    fn new(bytes: usize, coherence: Coherence) -> std::io::Result<Self> {
        let poison = (coherence == Coherence::Strict).then_some(POISON);
        let (file, host) = with_descriptor(c"rpcmem", bytes as u64, poison)?;
        let apart = match coherence {
            Coherence::Relaxed => None,
            Coherence::Strict => Some(Apart {
                main: poisoned(bytes, POISON)?,
                dsp: poisoned(bytes, POISON)?,
                seen: poisoned(bytes, POISON)?,
            }),
        };
        Ok(Self {
            fd: os::memory::number(&file),
            file: Mutex::new(Some(file)),
            host,
            apart,
        })
    }

    pub(super) fn fd(&self) -> i32 {
        self.fd
    }

    /// Returns `true` if a descriptor refers to this memory: its own descriptor, or a duplicate.
    fn is_behind(&self, fd: i32) -> bool {
        let same = |file: &File| os::memory::is_behind(file, fd);
        self.fd == fd || lock(&self.file).as_ref().is_some_and(same)
    }

    /// Closes the file descriptor.
    fn close(&self) {
        *lock(&self.file) = None;
    }

    /// Returns the bytes, whole pages.
    pub(super) fn bytes(&self) -> usize {
        self.host.len()
    }

    /// Returns the addresses in the host's copy.
    fn addresses(&self) -> Range<usize> {
        let start = self.host.as_ptr().addr();
        start..start + self.bytes()
    }

    /// Returns the first `bytes` bytes as the DSP sees them; `None` if there are fewer. The caller
    /// keeps the allocation alive.
    pub(super) fn mapped(&self, bytes: usize) -> Option<Mapped> {
        if bytes > self.bytes() {
            return None;
        }
        let (cached, direct) = match &self.apart {
            None => (self.host.as_mut_ptr(), self.host.as_ptr()),
            Some(apart) => (apart.dsp.as_mut_ptr(), apart.main.as_ptr()),
        };
        // SAFETY: the mappings have this length, are initialized, and live as long as the
        // allocation, which the session keeps until it unmaps. As on hardware, the host does not
        // touch a command's operands while it runs.
        unsafe { Mapped::new(cached, direct, bytes) }
    }

    /// Returns the first `bytes` bytes as a ring. The caller keeps the allocation alive.
    pub(super) fn ring(&self, bytes: usize) -> Option<Shared> {
        if bytes > self.bytes() {
            return None;
        }
        // SAFETY: the mapping has this length and lives as long as the allocation, which the
        // session keeps; the host accesses a ring by words only.
        unsafe { Shared::new(self.host.as_mut_ptr(), bytes) }
    }

    /// Copies `range` from one copy to another.
    fn copy(&self, from: &MmapRaw, to: &MmapRaw, range: &Range<usize>) {
        let end = range.end.min(self.bytes());
        let start = range.start.min(end);
        // SAFETY: in bounds by the lines above; all copies have the same length.
        let from = unsafe { from.as_ptr().add(start) };
        // SAFETY: as above.
        let to = unsafe { to.as_mut_ptr().add(start) };
        // SAFETY: both mappings are in bounds. As on hardware, the caller of a cache operation
        // ensures that nothing uses the range meanwhile.
        unsafe { from.copy_to_nonoverlapping(to, end - start) };
    }

    pub(super) fn dsp_invalidate(&self, range: &Range<usize>) {
        if let Some(Apart { main, dsp, .. }) = &self.apart {
            self.copy(main, dsp, &lines(range, LINE_BYTES));
        }
    }

    pub(super) fn dsp_clean(&self, range: &Range<usize>) {
        if let Some(Apart { main, dsp, .. }) = &self.apart {
            self.copy(dsp, main, &lines(range, LINE_BYTES));
        }
    }

    /// Changes the exponent of the float at `offset`, as the DSP sees it.
    pub(super) fn spoil(&self, offset: usize) {
        let copy = self.apart.as_ref().map_or(&self.host, |apart| &apart.dsp);
        for at in (offset..self.bytes()).take(4) {
            // SAFETY: in bounds by the line above.
            let byte = unsafe { copy.as_mut_ptr().add(at) };
            // SAFETY: the byte is mapped and initialized, and the DSP's thread is the one that
            // calls this.
            let old = unsafe { byte.read() };
            // SAFETY: as above.
            unsafe { byte.write(old ^ 0x40) };
        }
    }

    fn host_invalidate(&self, range: &Range<usize>) {
        if let Some(Apart { main, seen, .. }) = &self.apart {
            self.host_clean(range);
            let lines = lines(range, HOST_LINE_BYTES);
            self.copy(main, &self.host, &lines);
            self.copy(main, seen, &lines);
        }
    }

    fn host_clean(&self, range: &Range<usize>) {
        let Some(Apart { main, seen, .. }) = &self.apart else {
            return;
        };
        let lines = lines(range, HOST_LINE_BYTES);
        let lines = lines.start..lines.end.min(self.bytes());
        for start in lines.step_by(HOST_LINE_BYTES) {
            let line = start..start + HOST_LINE_BYTES;
            if self.bytes_of(&self.host, &line) != self.bytes_of(seen, &line) {
                self.copy(&self.host, main, &line);
                self.copy(&self.host, seen, &line);
            }
        }
    }

    /// Returns a line of one copy; the allocation is whole lines.
    fn bytes_of<'a>(&self, copy: &'a MmapRaw, line: &Range<usize>) -> &'a [u8] {
        assert!(line.end <= self.bytes(), "a line behind the end");
        // SAFETY: in bounds by the line above; all copies have the same length.
        let start = unsafe { copy.as_ptr().add(line.start) };
        // SAFETY: mapped and initialized. As on hardware, the caller of a cache operation ensures
        // that nothing writes the range meanwhile.
        unsafe { std::slice::from_raw_parts(start, line.len()) }
    }
}

/// Returns the whole cache lines that a range touches; none for an empty range.
fn lines(range: &Range<usize>, line_bytes: usize) -> Range<usize> {
    if range.is_empty() {
        return range.clone();
    }
    range.start / line_bytes * line_bytes..range.end.next_multiple_of(line_bytes)
}

/// The allocations of a machine.
#[derive(Debug, Default)]
pub(super) struct AllocationTable {
    allocations: Mutex<Vec<Arc<Allocation>>>,
    /// `rpcmem_init` was called.
    is_ready: AtomicBool,
}

impl AllocationTable {
    /// Implements `rpcmem_alloc2`. Returns null without memory, and for sizes that are not whole
    /// pages: hardware allocates these too, but cannot map them.
    pub(super) fn alloc(&self, bytes: usize, options: &Options) -> *mut c_void {
        if options.needs_rpcmem_init && !self.is_ready.load(Ordering::Acquire) {
            vendor_error!("rpcmem_alloc: rpcmem_init was not called");
            return std::ptr::null_mut();
        }
        if !is_whole_pages(bytes) {
            vendor_error!("rpcmem_alloc: {bytes} bytes are not whole pages");
            return std::ptr::null_mut();
        }
        match Allocation::new(bytes, options.coherence) {
            Ok(allocation) => {
                let address = allocation.host.as_mut_ptr();
                lock(&self.allocations).push(Arc::new(allocation));
                address.cast()
            }
            Err(error) => {
                vendor_error!("rpcmem_alloc: {bytes} bytes: {error}");
                std::ptr::null_mut()
            }
        }
    }

    /// Implements `rpcmem_init`, which empties the list of allocations: their memory stays, and
    /// nothing finds it any more.
    pub(super) fn init(&self) {
        self.is_ready.store(true, Ordering::Release);
        let forgotten = std::mem::take(&mut *lock(&self.allocations));
        if !forgotten.is_empty() {
            vendor_error!("rpcmem_init: {} allocations are forgotten", forgotten.len());
            std::mem::forget(forgotten);
        }
    }

    /// Implements `rpcmem_free`. Sessions that have the memory mapped keep it, without its
    /// descriptor.
    pub(super) fn free(&self, address: *mut c_void) {
        let mut allocations = lock(&self.allocations);
        let is_meant = |it: &Arc<Allocation>| it.addresses().start == address.addr();
        match allocations.iter().position(is_meant) {
            Some(index) => allocations.swap_remove(index).close(),
            None if address.is_null() => {}
            None => vendor_error!("rpcmem_free: {address:p} is not allocated"),
        }
    }

    /// Implements `rpcmem_to_fd`. Returns -1 for an address that starts no allocation.
    pub(super) fn to_fd(&self, address: *mut c_void) -> i32 {
        let allocations = lock(&self.allocations);
        let found = allocations
            .iter()
            .find(|allocation| allocation.addresses().start == address.addr());
        found.map_or(-1, |allocation| allocation.fd())
    }

    /// Returns the allocation with a descriptor, which may be a duplicate.
    pub(super) fn find(&self, fd: i32) -> Option<Arc<Allocation>> {
        let allocations = lock(&self.allocations);
        let own = allocations.iter().find(|allocation| allocation.fd() == fd);
        let found = own.or_else(|| allocations.iter().find(|it| it.is_behind(fd)));
        found.map(Arc::clone)
    }

    pub(super) fn len(&self) -> usize {
        lock(&self.allocations).len()
    }

    /// Returns the allocation that all of a range of addresses is in, and the range as offsets.
    fn containing(
        &self,
        address: *const u8,
        bytes: usize,
    ) -> Option<(Arc<Allocation>, Range<usize>)> {
        let allocations = lock(&self.allocations);
        let end = address.addr().checked_add(bytes)?;
        let found = allocations.iter().find(|allocation| {
            let all = allocation.addresses();
            all.start <= address.addr() && end <= all.end
        })?;
        let start = address.addr() - found.addresses().start;
        Some((Arc::clone(found), start..start + bytes))
    }

    pub(super) fn host_clean(&self, address: *const u8, bytes: usize) {
        match self.containing(address, bytes) {
            Some((allocation, range)) => allocation.host_clean(&range),
            None => vendor_error!("cache clean: {bytes} bytes at {address:p} are not shared"),
        }
    }

    pub(super) fn host_invalidate(&self, address: *const u8, bytes: usize) {
        match self.containing(address, bytes) {
            Some((allocation, range)) => allocation.host_invalidate(&range),
            None => vendor_error!("cache invalidate: {bytes} bytes at {address:p} are not shared"),
        }
    }
}

impl Drop for AllocationTable {
    /// Leaks the allocations that the caller did not free, because it may still hold their
    /// addresses.
    fn drop(&mut self) {
        let allocations = std::mem::take(&mut *lock(&self.allocations));
        if !allocations.is_empty() {
            log::warn!(target: "libcdsprpc", "{} allocations were never freed", allocations.len());
            std::mem::forget(allocations);
        }
    }
}
