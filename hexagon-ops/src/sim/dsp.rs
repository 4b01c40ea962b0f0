//! The DSP around a command loop: mappings in its address space, caches, the clock, and faults.

use std::ffi::c_int;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use sim_common::fault::Injector;

use super::fault::Trouble;
use super::rpcmem::{Allocation, is_whole_pages};
use super::session::Process;
use super::vtcm::Vtcm;
use super::{MachineState, lock, vendor_error};
use crate::ffi::code;
use crate::rt::cache::Access;
use crate::rt::memory::Mapped;
use crate::rt::shared::Shared;
use crate::serve::{MAP_FULL, MAP_REFUSED, Platform, UNASKED_IDLE_US};
use crate::wire::{COMPLETED, Completion, TAKEN, VOTES};

/// Code that a running call returns when its session is lost.
///
/// SOURCE: qualcomm/fastrpc src/dspqueue/dspqueue_cpu.c regards 0x8000040d as the end of the
/// process on the DSP.
const LOST: c_int = code::dsp(code::EBADSTATE);

/// `true` if a handle is about to be closed.
#[derive(Debug, Default)]
pub(super) struct Closing {
    flag: AtomicBool,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Closing {
    pub(super) fn set(&self) {
        let _guard = lock(&self.lock);
        self.flag.store(true, Ordering::Release);
        self.changed.notify_all();
    }

    pub(super) fn is_set(&self) -> bool {
        self.flag.load(Ordering::Acquire)
    }

    /// Blocks until the handle is being closed.
    pub(super) fn wait(&self) {
        let mut guard = lock(&self.lock);
        while !self.is_set() {
            guard = self
                .changed
                .wait(guard)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A buffer that is mapped on the DSP.
#[derive(Debug)]
struct Kept {
    allocation: Arc<Allocation>,
    /// Number by which the host announced it.
    fd: c_int,
    bytes: usize,
    charged: bool,
}

/// The DSP around a command loop.
#[derive(Debug)]
pub(super) struct Dsp {
    process: Arc<Process>,
    injector: Arc<Injector<Trouble>>,
    closing: Arc<Closing>,
    address_bytes: u64,
    compute: bool,
    /// `true` if the library has instructions that the chip lacks.
    is_illegal: bool,
    votes: [i32; VOTES.len()],
    /// VTCM that the running call has.
    vtcm: Arc<Vtcm>,
    has_priorities: bool,
    command_time: Duration,
    /// Results of [`Platform::map`], by address; an address can occur more than once.
    kept: Vec<(usize, Kept)>,
    /// The ring's memory, its bytes and its number, and a second view of it for faults.
    ring: Option<(Arc<Allocation>, usize, c_int)>,
    start: Instant,
}

impl Dsp {
    /// - `is_qfloat`: `true` if the library is the one without IEEE instructions
    pub(super) fn new(
        state: &MachineState,
        process: &Arc<Process>,
        closing: &Arc<Closing>,
        is_qfloat: bool,
    ) -> Self {
        Self {
            process: Arc::clone(process),
            injector: Arc::clone(&state.injector),
            closing: Arc::clone(closing),
            address_bytes: state.options.address_bytes,
            compute: state.options.compute,
            is_illegal: !state.options.ieee_float && !is_qfloat,
            votes: state.options.votes,
            vtcm: Arc::clone(&state.vtcm),
            has_priorities: state.options.has_priorities,
            command_time: state.options.command_time,
            kept: Vec::new(),
            ring: None,
            start: Instant::now(),
        }
    }

    /// Returns the allocation of a mapped buffer.
    fn allocation(&self, mapped: &Mapped) -> Option<&Allocation> {
        let address = mapped.start().addr();
        let kept = self.kept.iter().find(|(start, _)| *start == address);
        kept.map(|(_, kept)| &*kept.allocation)
    }

    /// Returns the ring if the host has unmapped it, so that an access would end a process on
    /// hardware.
    pub(super) fn unmapped_ring(&self) -> Option<Shared> {
        let (allocation, bytes, fd) = self.ring.as_ref()?;
        let inside = self.process.inside();
        let announced = inside.announced.get(fd);
        let is_mapped = announced.is_some_and(|it| Arc::ptr_eq(&it.allocation, allocation));
        if is_mapped {
            return None;
        }
        allocation.ring(*bytes)
    }

    /// Writes impossible values to the DSP's counters.
    fn spoil_ring(&self) {
        let ring = self.ring.as_ref();
        if let Some(ring) = ring.and_then(|(allocation, bytes, _)| allocation.ring(*bytes)) {
            for counter in [TAKEN, COMPLETED] {
                ring.store(counter, ring.load(counter).wrapping_add(0x4000_0000));
            }
        }
    }
}

impl Platform for Dsp {
    fn begin(&mut self) -> bool {
        if !self.command_time.is_zero() {
            std::thread::sleep(self.command_time);
        }
        if self.is_illegal {
            vendor_error!("illegal instruction");
            self.process.inside().lost = true;
        }
        self.compute && !self.is_illegal
    }

    fn votes(&self) -> [i32; VOTES.len()] {
        self.votes
    }

    fn is_vtcm_wanted(&self) -> bool {
        self.has_priorities && self.vtcm.is_wanted()
    }

    fn longest_idle_us(&self) -> u32 {
        if self.has_priorities {
            u32::MAX
        } else {
            UNASKED_IDLE_US
        }
    }

    fn map(&mut self, fd: i32, bytes: usize) -> Result<Mapped, u32> {
        let mut inside = self.process.inside();
        let Some(announced) = inside.announced.get(&fd) else {
            vendor_error!("HAP_mmap: fd {fd} was not announced by fastrpc_mmap");
            return Err(MAP_REFUSED);
        };
        if !is_whole_pages(bytes) || bytes > announced.bytes {
            vendor_error!(
                "HAP_mmap: {bytes} bytes of fd {fd}, which has {}",
                announced.bytes
            );
            return Err(MAP_REFUSED);
        }
        let charged = !announced.pinned;
        let allocation = Arc::clone(&announced.allocation);
        let mapped = allocation.mapped(bytes).ok_or(MAP_REFUSED)?;
        if charged && !inside.charge(bytes, self.address_bytes) {
            return Err(MAP_FULL);
        }
        if let Some(announced) = inside.announced.get_mut(&fd) {
            announced.mapped += 1;
        }
        let kept = Kept {
            allocation,
            fd,
            bytes,
            charged,
        };
        self.kept.push((mapped.start().addr(), kept));
        Ok(mapped)
    }

    fn unmap(&mut self, mapped: Mapped) {
        let address = mapped.start().addr();
        let bytes = mapped.bytes();
        let found = self
            .kept
            .iter()
            .position(|(start, kept)| *start == address && kept.bytes == bytes);
        let Some(index) = found else { return };
        let (_, kept) = self.kept.swap_remove(index);
        let mut inside = self.process.inside();
        if kept.charged {
            inside.discharge(kept.bytes);
        }
        if let Some(announced) = inside.announced.get_mut(&kept.fd) {
            announced.mapped = announced.mapped.saturating_sub(1);
            announced.was_unmapped = true;
        }
    }

    fn map_ring(&mut self, fd: i32, bytes: usize) -> Option<Shared> {
        let inside = self.process.inside();
        let announced = inside.announced.get(&fd);
        let Some(announced) = announced.filter(|it| is_whole_pages(bytes) && bytes <= it.bytes)
        else {
            vendor_error!("HAP_mmap: {bytes} bytes of fd {fd} were not announced by fastrpc_mmap");
            return None;
        };
        let ring = announced.allocation.ring(bytes)?;
        self.ring = Some((Arc::clone(&announced.allocation), bytes, fd));
        Some(ring)
    }

    fn invalidate(&mut self, mapped: &Mapped, range: Range<usize>, _access: Access) {
        if let Some(allocation) = self.allocation(mapped) {
            allocation.dsp_invalidate(&range);
        }
    }

    fn clean(&mut self, mapped: &Mapped, range: Range<usize>, _access: Access) {
        if let Some(allocation) = self.allocation(mapped) {
            if self.injector.expects(Trouble::Wrong) {
                allocation.spoil(range.start);
            }
            allocation.dsp_clean(&range);
        }
    }

    fn time_us(&mut self) -> u64 {
        u64::try_from(self.start.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    fn packets(&mut self) -> u64 {
        0
    }

    fn relax(&mut self, polls: u32) -> Result<(), i32> {
        // Polls quickly at first, for a quick answer, and less often later, to leave the processor
        // to others.
        match polls {
            0..200 => std::hint::spin_loop(),
            200..1000 => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(30)),
        }
        if self.closing.is_set() {
            return Err(LOST);
        }
        Ok(())
    }

    fn answer(&mut self, completion: &mut Completion) -> Result<(), i32> {
        if self.process.inside().lost {
            return Err(LOST);
        }
        match self.injector.event() {
            None | Some(Trouble::Wrong) => Ok(()),
            Some(Trouble::Corrupt) => {
                completion.sequence = !completion.sequence;
                completion.status = 0xdead_beef;
                completion.done = u32::MAX;
                completion.reserved = [u64::MAX; 11];
                Ok(())
            }
            Some(Trouble::Lost) => {
                self.process.inside().lost = true;
                Err(LOST)
            }
            Some(trouble) => {
                if trouble == Trouble::BadRing {
                    self.spoil_ring();
                }
                self.closing.wait();
                Err(LOST)
            }
        }
    }
}
