//! The DMA engine of the calling hardware thread. One linear descriptor per step, as the engine reads
//! it (four words, 16-byte aligned at least):
//!
//! ```text
//! word 0   address of the next descriptor, 0: none
//! word 1   23..0 bytes · 25..24 type, 0: linear · 26, 27 compression · 28 destination, 29 source bypass the cache
//!          30 ordered · 31 done, set by the engine
//! word 2   source     word 3   destination
//! ```
//!
//! SOURCE: Qualcomm Hexagon User DMA Specification 80-V9418-29 as quoted by three public users of
//! the engine; not yet run on a device.

use core::arch::asm;

use crate::rt::Copy;

/// Most bytes of one descriptor.
const MAX_BYTES: usize = (1 << 24) - 1;
/// Control bits with which neither side goes through the cache: weights were written by the other
/// processor, and VTCM is not cached.
const BYPASS: u32 = 1 << 28 | 1 << 29;
/// Control bit that the engine sets.
const DONE: u32 = 1 << 31;
/// Bits of the engine's status that say what it does, and their value while it copies.
const STATUS: u32 = 3;
const RUNNING: u32 = 1;
/// Polls of an engine until it counts as stuck. With the pause after it a poll takes 20 to 80 cycles:
/// 56 to 220 ms in all at 1.5 GHz. The longest copy, 16 MiB, takes 16 ms at 1 GB/s.
const MAX_POLLS: u32 = 1 << 22;

/// A linear descriptor, alone in its cache line.
#[repr(C, align(64))]
pub struct Descriptor([u32; 4]);

impl Descriptor {
    /// Returns a descriptor that has not been started.
    pub const fn new() -> Self {
        Self([0; 4])
    }

    /// Starts copying and returns; `None` if the copy is empty or too long for a descriptor.
    ///
    /// # Safety
    /// - Until [`Self::wait`] has returned, this value does not move and nothing else uses the two
    ///   sides of `copy`.
    /// - No other descriptor of this hardware thread is running.
    pub unsafe fn start(&mut self, copy: &mut Copy<'_>) -> Option<()> {
        let bytes = size_of_val(copy.from);
        if !(1..=MAX_BYTES).contains(&bytes) || copy.to.len() != copy.from.len() {
            return None;
        }
        let control = u32::try_from(bytes).ok()? | BYPASS;
        let [from, to] =
            [copy.from.as_ptr().addr(), copy.to.as_mut_ptr().addr()].map(u32::try_from);
        let descriptor = core::ptr::from_mut(self);
        // SAFETY: the pointer comes from a reference; volatile, since the engine reads what is
        // written here.
        unsafe { descriptor.write_volatile(Self([0, control, from.ok()?, to.ok()?])) };
        // SAFETY: orders the descriptor's words before the engine's reads; touches nothing else.
        unsafe { asm!("release({0}):at", in(reg) descriptor, options(nostack)) };
        // The nightly's own intrinsics for the engine have wrong signatures, hence assembly.
        // SAFETY: the descriptor is complete, and the caller keeps it and both sides untouched.
        unsafe { asm!("dmstart({0})", in(reg) descriptor, options(nostack)) };
        Some(())
    }

    /// Waits until the engine has finished or is stuck; neither side of the copy is in use then.
    pub fn wait(&mut self) -> Waited {
        // `dmwait` would sleep for as long as the engine needs, forever if it never finishes.
        for _ in 0..MAX_POLLS {
            let status: u32;
            // SAFETY: reads the status of this thread's engine.
            unsafe { asm!("{0} = dmpoll", out(reg) status, options(nostack)) };
            // The status is older than the descriptor's bit: an engine that is idle has set it.
            if self.is_done() {
                return Waited::Done;
            }
            if status & STATUS != RUNNING {
                return Waited::Failed;
            }
            // SAFETY: gives the issue slots of this hardware thread to the others for a few cycles.
            unsafe { asm!("pause(#64)", options(nomem, nostack)) };
        }
        // SAFETY: stops this thread's engine, so that it no longer writes to memory.
        unsafe { asm!("{0} = dmpause", out(reg) _, options(nostack)) };
        Waited::Stuck
    }

    /// Returns `true` if the engine has reported the copy done.
    fn is_done(&mut self) -> bool {
        // SAFETY: the pointer comes from a reference; volatile, since the engine wrote the control
        // word.
        let words = unsafe { core::ptr::from_mut(self).read_volatile() };
        words.0[1] & DONE != 0
    }
}

/// The end of a wait for the engine.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Waited {
    /// The copy is done.
    Done,
    /// The engine refused or gave up the copy.
    Failed,
    /// The engine was still copying after [`MAX_POLLS`], and was stopped.
    Stuck,
}
