//! What the command loop asks of the system around it.

use core::ops::Range;

use crate::rt::memory::Mapped;
use crate::rt::shared::Shared;
use crate::wire::{Completion, VOTES};

/// What the command loop needs from the system that it runs on.
pub trait Platform {
    /// Maps shared memory by its descriptor in the host's process.
    ///
    /// # Errors
    /// One of the `MAP_*` details.
    fn map(&mut self, fd: i32, bytes: usize) -> Result<Mapped, u32>;

    /// Takes back what [`Self::map`] returned.
    fn unmap(&mut self, mapped: Mapped);

    /// Maps the region of the ring; `None` if that fails. It stays mapped for as long as the value lives.
    fn map_ring(&mut self, fd: i32, bytes: usize) -> Option<Shared>;

    /// Makes later loads from a range of a buffer see what is in memory.
    fn invalidate(&mut self, mapped: &Mapped, range: Range<usize>);

    /// Writes what was stored to a range of a buffer to memory.
    fn clean(&mut self, mapped: &Mapped, range: Range<usize>);

    /// A clock, microseconds.
    fn time_us(&mut self) -> u64;

    /// Packets executed so far by the serving thread; 0 where they cannot be counted.
    fn packets(&mut self) -> u64;

    /// Lets others run; `polls` counts the calls since there was something to do.
    ///
    /// # Errors
    /// What the call of METHOD_SERVE shall return at once: the handle is being closed.
    fn relax(&mut self, polls: u32) -> Result<(), i32>;

    /// Called before each command that computes; `false` if it is only to be answered. A stand-in may take its time here, or
    /// compute nothing, to show what everything else costs.
    fn begin(&mut self) -> bool {
        true
    }

    /// The system's answers to the votes for power: see [`crate::wire::VOTES`].
    fn votes(&self) -> [i32; VOTES.len()] {
        [0; VOTES.len()]
    }

    /// Called with each completion before it is written. The stand-in's faults live here; a DSP does nothing.
    ///
    /// # Errors
    /// What the call of METHOD_SERVE shall return at once.
    fn answer(&mut self, completion: &mut Completion) -> Result<(), i32> {
        let _ = completion;
        Ok(())
    }
}
