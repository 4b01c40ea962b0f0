//! The command loop's system: FastRPC's mappings, the cache, the clock.

use core::ffi::c_int;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, Ordering};

use hexagon_ops::rt::cache::{self, Access};
use hexagon_ops::rt::memory::Mapped;
use hexagon_ops::rt::shared::Shared;
use hexagon_ops::serve::{MAP_REFUSED, MAP_SIZE, Platform, UNASKED_IDLE_US};
use hexagon_ops::wire::{Power, VOTES};

use crate::code::BAD_STATE;
use crate::{hap, log, power};

/// Set when the handle is being closed: the call that serves returns.
pub static CLOSING: AtomicBool = AtomicBool::new(false);
/// Set when another program waits for the VTCM that a call holds: a call that serves returns after
/// the current submission.
pub static VTCM_WANTED: AtomicBool = AtomicBool::new(false);

/// The DSP around the loop.
#[derive(Debug, Default)]
pub struct Dsp {
    /// Address of the mapped ring, and its bytes.
    ring: Option<(*mut u8, c_int)>,
    /// Answers to the votes for power.
    votes: [i32; VOTES.len()],
}

impl Dsp {
    /// Votes for power, of the matrix unit if `has_matrix`.
    pub fn vote(&mut self, power: Power, has_matrix: bool) {
        self.votes = power::vote(power, has_matrix);
        let names = [c"client", c"clocks", c"vector units", c"matrix unit"];
        for (vote, name) in self.votes.iter().zip(names) {
            if *vote != 0 {
                log::line(c"vote refused", name, *vote);
            }
        }
    }

    /// Unmaps the ring, which must not be read any more.
    pub fn unmap_ring(&mut self) {
        if let Some((address, bytes)) = self.ring.take() {
            // SAFETY: `map_ring` mapped this memory, and the server no longer uses it.
            unsafe { hap::HAP_munmap(address.cast(), bytes) };
        }
    }
}

/// Maps all of a descriptor's memory.
fn map(fd: c_int, bytes: c_int) -> Option<*mut u8> {
    // SAFETY: maps memory at an unused address; the kernel checks the descriptor.
    let address =
        unsafe { hap::HAP_mmap(core::ptr::null_mut(), bytes, hap::PROT_READ_WRITE, 0, fd, 0) };
    let failed = address.is_null() || address.addr() == usize::MAX;
    (!failed).then_some(address.cast())
}

impl Platform for Dsp {
    fn map(&mut self, fd: i32, bytes: usize) -> Result<Mapped, u32> {
        let len = c_int::try_from(bytes).map_err(|_| MAP_SIZE)?;
        let address = map(fd, len).ok_or(MAP_REFUSED)?;
        // SAFETY: mapped above with this length; the host does not touch a command's operands while
        // it runs (the host's part of the protocol).
        unsafe { Mapped::new(address, address, bytes) }.ok_or(MAP_REFUSED)
    }

    fn unmap(&mut self, mapped: Mapped) {
        if let Ok(bytes) = c_int::try_from(mapped.bytes()) {
            // SAFETY: `map` mapped this memory, and it is no longer in the table.
            unsafe { hap::HAP_munmap(mapped.start().cast(), bytes) };
        }
    }

    fn map_ring(&mut self, fd: i32, bytes: usize) -> Option<Shared> {
        self.unmap_ring();
        let len = c_int::try_from(bytes).ok()?;
        let address = map(fd, len)?;
        self.ring = Some((address, len));
        // SAFETY: mapped above with this length, and unmapped only after the server is gone; the
        // host accesses it by words only.
        unsafe { Shared::new(address, bytes) }
    }

    fn invalidate(&mut self, mapped: &Mapped, range: Range<usize>, access: Access) {
        cache::invalidate(mapped.start().wrapping_add(range.start), range.len(), access);
    }

    fn clean(&mut self, mapped: &Mapped, range: Range<usize>, access: Access) {
        cache::clean(mapped.start().wrapping_add(range.start), range.len(), access);
    }

    fn time_us(&mut self) -> u64 {
        hap::HAP_perf_get_time_us()
    }

    fn packets(&mut self) -> u64 {
        0
    }

    fn votes(&self) -> [i32; VOTES.len()] {
        self.votes
    }

    fn is_vtcm_wanted(&self) -> bool {
        VTCM_WANTED.load(Ordering::Relaxed)
    }

    fn longest_idle_us(&self) -> u32 {
        if crate::session::is_asked_for_vtcm() {
            u32::MAX
        } else {
            UNASKED_IDLE_US
        }
    }

    fn relax(&mut self, _polls: u32) -> Result<(), i32> {
        // SAFETY: gives the issue slots of this hardware thread to the others for up to 255 cycles.
        unsafe { core::arch::asm!("pause(#255)", options(nomem, nostack)) };
        if CLOSING.load(Ordering::Acquire) {
            return Err(BAD_STATE);
        }
        Ok(())
    }
}
