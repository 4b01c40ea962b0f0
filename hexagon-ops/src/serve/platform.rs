//! The interface between the command loop and the system that it runs on.

use core::ops::Range;

use crate::rt::cache::Access;
use crate::rt::memory::Mapped;
use crate::rt::shared::Shared;
use crate::wire::{Completion, VOTES};

/// Idle time after which VTCM is released on a system that never requests it back, because a
/// holder's priority cannot be lowered there. It is longer than the pauses between submissions of a
/// token.
pub const UNASKED_IDLE_US: u32 = 2000;

/// The system that the command loop runs on.
pub trait Platform {
    /// Maps shared memory by its descriptor in the host's process.
    ///
    /// # Errors
    /// One of the `MAP_*` details.
    fn map(&mut self, fd: i32, bytes: usize) -> Result<Mapped, u32>;

    /// Unmaps memory that [`Self::map`] returned.
    fn unmap(&mut self, mapped: Mapped);

    /// Maps the region of the ring, or returns `None` if that fails. The region stays mapped as
    /// long as the value lives.
    fn map_ring(&mut self, fd: i32, bytes: usize) -> Option<Shared>;

    /// Makes later loads from a range of a buffer, by the instructions that `access` names, read
    /// memory instead of old cache lines. No slice of the range is in use.
    fn invalidate(&mut self, mapped: &Mapped, range: Range<usize>, access: Access);

    /// Writes the cache lines of a range of a buffer, which `access` has written, to memory.
    fn clean(&mut self, mapped: &Mapped, range: Range<usize>, access: Access);

    /// Returns the time of a clock, microseconds.
    fn time_us(&mut self) -> u64;

    /// Returns the number of packets that the serving thread has executed; 0 if it cannot be
    /// counted.
    fn packets(&mut self) -> u64;

    /// Lets other threads run; `polls` counts the calls since the last command.
    ///
    /// # Errors
    /// A code that the call of METHOD_SERVE returns at once, because the handle is being closed.
    fn relax(&mut self, polls: u32) -> Result<(), i32>;

    /// Returns `true` if another session or program waits for VTCM and the matrix unit. A call of
    /// METHOD_SERVE has them, and returns after the current submission if this is `true`.
    fn is_vtcm_wanted(&self) -> bool {
        false
    }

    /// Returns the longest time without a command after which a call of METHOD_SERVE returns,
    /// microseconds: a system that cannot request VTCM back gets it after [`UNASKED_IDLE_US`].
    fn longest_idle_us(&self) -> u32 {
        u32::MAX
    }

    /// Called before each command that computes. If it returns `false`, the command is answered but
    /// not executed: a stand-in can wait here, or skip all computation to measure the other costs.
    fn begin(&mut self) -> bool {
        true
    }

    /// Returns the system's answers to the votes for power, [`crate::wire::VOTES`].
    fn votes(&self) -> [i32; VOTES.len()] {
        [0; VOTES.len()]
    }

    /// Called with each completion before it is written. The stand-in injects faults here; a DSP
    /// does nothing.
    ///
    /// # Errors
    /// A code that the call of METHOD_SERVE returns at once.
    fn answer(&mut self, completion: &mut Completion) -> Result<(), i32> {
        let _ = completion;
        Ok(())
    }
}
