//! The DSP's end of the ring. It checks all values of the host before it uses them.

use crate::rt::shared::Shared;
use crate::wire::{
    COLLECTED, COMPLETED, Command, Completion, MAGIC, PROGRESS, PUBLISHED, RingHeader, RingLayout,
    STATE, TAKEN, VERSION, WISH, WISH_CLOSE, WISH_SERVE,
};

/// Time between two changes of [`PROGRESS`], microseconds: far below the shortest time-out of a
/// host, 1 s, and long compared with a command.
const PROGRESS_US: u64 = 20_000;

/// An impossible counter, header or wish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Corrupt;

/// The ring, and the DSP's counters.
#[derive(Debug)]
pub(super) struct Ring {
    shared: Shared,
    layout: RingLayout,
    taken: u32,
    completed: u32,
    /// The value of [`PROGRESS`], and the time of its last change.
    progress: u32,
    progress_us: u64,
}

impl Ring {
    /// Returns the ring in a region. Counting continues from the values of its counters.
    pub(super) fn new(shared: Shared) -> Result<Self, Corrupt> {
        if shared.bytes() < RingLayout::new(1).map_or(0, RingLayout::bytes) {
            return Err(Corrupt);
        }
        let header: RingHeader = shared.read(0);
        let layout = RingLayout::new(header.slots).ok_or(Corrupt)?;
        let known = header.magic == MAGIC && header.version == VERSION && header.reserved == 0;
        if !known || shared.bytes() < layout.bytes() {
            return Err(Corrupt);
        }
        let ring = Self {
            taken: shared.load(TAKEN),
            completed: shared.load(COMPLETED),
            progress: shared.load(PROGRESS),
            progress_us: 0,
            shared,
            layout,
        };
        ring.pending()?;
        ring.uncollected()?;
        Ok(ring)
    }

    /// Returns the number of commands that the host has published and the DSP has not consumed.
    pub(super) fn pending(&self) -> Result<u32, Corrupt> {
        let pending = self.shared.load(PUBLISHED).wrapping_sub(self.taken);
        (pending <= self.layout.slots())
            .then_some(pending)
            .ok_or(Corrupt)
    }

    /// Returns the number of completions that the host has not collected.
    fn uncollected(&self) -> Result<u32, Corrupt> {
        let uncollected = self.completed.wrapping_sub(self.shared.load(COLLECTED));
        (uncollected <= self.layout.slots())
            .then_some(uncollected)
            .ok_or(Corrupt)
    }

    /// Takes the next command; [`Self::pending`] must have returned more than 0.
    pub(super) fn take(&mut self) -> Command {
        let command = self.shared.read(self.layout.command(self.taken));
        self.taken = self.taken.wrapping_add(1);
        self.shared.store(TAKEN, self.taken);
        command
    }

    /// Changes [`PROGRESS`] if [`PROGRESS_US`] have passed, so that the host sees that the DSP is
    /// working.
    pub(super) fn advance(&mut self, time_us: u64) {
        if time_us.saturating_sub(self.progress_us) >= PROGRESS_US {
            self.progress_us = time_us;
            self.progress = self.progress.wrapping_add(1);
            self.shared.store(PROGRESS, self.progress);
        }
    }

    /// Returns `true` if a completion can be written.
    pub(super) fn has_room(&self) -> Result<bool, Corrupt> {
        Ok(self.uncollected()? < self.layout.slots())
    }

    /// Writes a completion; [`Self::has_room`] must have returned `true`.
    pub(super) fn answer(&mut self, completion: &Completion) {
        self.shared
            .write(self.layout.completion(self.completed), completion);
        self.completed = self.completed.wrapping_add(1);
        self.shared.store(COMPLETED, self.completed);
    }

    /// Returns `true` if the host has requested the end of the session.
    pub(super) fn wants_close(&self) -> Result<bool, Corrupt> {
        match self.shared.load(WISH) {
            WISH_SERVE => Ok(false),
            WISH_CLOSE => Ok(true),
            _ => Err(Corrupt),
        }
    }

    /// Publishes the DSP's state. Later loads do not move before this store.
    pub(super) fn announce(&self, state: u32) {
        self.shared.store(STATE, state);
        self.shared.fence();
    }
}
