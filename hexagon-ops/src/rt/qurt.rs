//! Steps on the DSP: the copy runs on the DMA engine of the calling hardware thread while that
//! thread runs the tasks.
//!
//! One linear descriptor per step, as the engine reads it (four words, 16-byte aligned at least):
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

use super::{Copy, cache};
use crate::hvx;

/// Most bytes of one descriptor.
const MAX_BYTES: usize = (1 << 24) - 1;
/// Control bits with which neither side goes through the cache: weights were written by the other
/// processor, and VTCM is not cached.
const BYPASS: u32 = 1 << 28 | 1 << 29;
/// Control bit that the engine sets.
const DONE: u32 = 1 << 31;

/// A linear descriptor, alone in its cache line.
#[repr(C, align(64))]
struct Descriptor([u32; 4]);

impl Descriptor {
    /// Starts copying and returns; `None` if the copy is empty or too long for a descriptor.
    ///
    /// # Safety
    /// - Until [`Self::wait`] has returned, this value does not move and nothing else uses the two
    ///   sides of `copy`.
    /// - No other descriptor of this hardware thread is running.
    unsafe fn start(&mut self, copy: &mut Copy<'_>) -> Option<()> {
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

    /// Waits for the engine. Returns `true` if it reports the copy done.
    fn wait(&mut self) -> bool {
        // SAFETY: waits for this thread's engine; the status it returns is also in the descriptor.
        unsafe { asm!("{0} = dmwait", out(reg) _, options(nostack)) };
        // SAFETY: the pointer comes from a reference; volatile, since the engine wrote the control
        // word.
        let words = unsafe { core::ptr::from_mut(self).read_volatile() };
        words.0[1] & DONE != 0
    }
}

/// The calling hardware thread and its DMA engine.
#[derive(Debug)]
pub struct Engine(());

impl Engine {
    /// Returns an engine of one thread, whatever number is requested.
    #[must_use]
    pub fn new(_threads: usize) -> Self {
        Self(())
    }

    /// Returns the number of threads that run tasks.
    #[must_use]
    pub fn threads(&self) -> usize {
        1
    }

    /// Runs the copy and `run` on every task, and returns when all are done. Task 0 runs on the
    /// calling thread.
    pub fn step<T: Send>(
        &self,
        copy: Option<Copy<'_>>,
        tasks: &mut [T],
        run: impl Fn(&mut T) + Sync,
    ) {
        let mut descriptor = Descriptor([0; 4]);
        let mut copy = copy;
        let started = match &mut copy {
            // SAFETY:
            // - `descriptor` lives on this stack until `wait` below, which every path reaches:
            //   nothing here unwinds.
            // - `copy` borrows both sides until then, and steps of one thread do not nest.
            Some(copy) => unsafe { descriptor.start(copy) }.is_some(),
            None => false,
        };
        tasks.iter_mut().for_each(run);
        let done = started && descriptor.wait();
        if let (Some(copy), false) = (copy, done) {
            // The loads below go through the cache, which may hold older bytes than the other
            // processor wrote.
            cache::invalidate(copy.from.as_ptr().cast(), size_of_val(copy.from));
            hvx::copy(copy.to, copy.from);
        }
    }
}
