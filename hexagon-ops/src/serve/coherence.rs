//! Cache operations of a submission: each range of bytes is made visible once, and results are
//! written to memory when the fence is answered.
//!
//! The host touches no operand of a submission until its fence is answered, so within a submission
//! only the DSP writes. Lines that were invalidated or written once are up to date until then, and
//! lines that were written stay in the cache. They reach memory at the fence, and earlier if the
//! DMA engine reads them, or if their buffer is unmapped.
//!
//! ```text
//! read      known range? nothing : written lines among them -> clean · invalidate · remember
//! written   remember as written; another written range in the same slot -> clean
//! fence     clean all that was written · forget everything
//! ```
//!
//! A slot of the table is found by the range's address, because commands name the same tensors
//! again and again. A range that starts elsewhere inside a known one is looked for only among
//! written ranges. A range that was read is not remembered in the slot of a much
//! longer written one.
//!
//! Each operation is for the instructions that access the range, [`Access`]. A range that was read
//! for vectors is read again for scalar loads. A written range is up to date for all instructions:
//! the processor keeps its caches consistent for its own stores, and [`Cache::read_edges`] has made
//! the other bytes of its lines visible to scalar loads. An operation in place, which may leave
//! bytes of its result as they were, reads them for scalar loads.

use core::ops::Range;

use super::Platform;
use crate::layout::LINE_BYTES;
use crate::rt::cache::Access;
use crate::rt::memory::{Bound, Mappings};

/// A written range that is this many times as long as one that was read keeps its slot.
const MUCH_LONGER: usize = 4;

/// Ranges that are remembered.
const SLOTS: usize = 64;

/// Whole lines of a buffer whose content in the cache is as new as memory, or newer.
#[derive(Clone, Copy, Debug)]
struct Slot {
    /// Address of the buffer's first byte, and the buffer's number.
    base: usize,
    buffer: usize,
    /// Bytes of the buffer.
    start: usize,
    end: usize,
    is_written: bool,
    /// Instructions that wrote the range; of a range that is not written, those for which it is up
    /// to date.
    access: Access,
}

impl Slot {
    const EMPTY: Self = Self {
        base: 0,
        buffer: 0,
        start: 0,
        end: 0,
        is_written: false,
        access: Access::Scalar,
    };

    /// Returns the lines that hold `range` of an operand's buffer, and are not written.
    fn lines(bound: &Bound<'_>, range: &Range<usize>, access: Access) -> Self {
        let mapped = bound.mapped();
        Self {
            base: mapped.start().addr(),
            buffer: bound.span().buffer(),
            start: range.start / LINE_BYTES * LINE_BYTES,
            end: range.end.next_multiple_of(LINE_BYTES).min(mapped.bytes()),
            is_written: false,
            access,
        }
    }

    /// Returns the instructions for which the range is up to date.
    fn fresh_for(&self) -> Access {
        if self.is_written {
            Access::Scalar
        } else {
            self.access
        }
    }

    /// Returns `true` if `other` is in this range, which is up to date for the instructions that
    /// access `other`.
    fn provides(&self, other: &Self) -> bool {
        self.contains(other) && self.fresh_for().covers(other.access)
    }

    /// Writes a written range to memory; the caches keep it.
    fn clean(&mut self, mappings: Mappings<'_>, platform: &mut impl Platform) {
        if let Some(mapped) = mappings.get(self.buffer) {
            platform.clean(mapped, self.start..self.end, self.access);
        }
        self.access = self.fresh_for();
        self.is_written = false;
    }

    fn address(&self) -> usize {
        self.base + self.start
    }

    fn end_address(&self) -> usize {
        self.base + self.end
    }

    /// Returns the slot of this range in the table. Successive lines have different slots, and so
    /// have multiples of large powers of two, because buffers start at such addresses.
    fn index(&self) -> usize {
        let line = self.address() / LINE_BYTES;
        let mixed = line ^ (line / (SLOTS * SLOTS));
        (mixed ^ (mixed / SLOTS)) % SLOTS
    }

    fn contains(&self, other: &Self) -> bool {
        self.address() <= other.address() && other.end_address() <= self.end_address()
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.address() < other.end_address() && other.address() < self.end_address()
    }
}

/// The ranges that the current submission has read and written.
#[derive(Debug)]
pub(super) struct CachedRanges {
    slots: [Slot; SLOTS],
    /// Address range that contains all written ranges.
    written: Option<Range<usize>>,
}

impl CachedRanges {
    pub(super) const fn new() -> Self {
        Self {
            slots: [Slot::EMPTY; SLOTS],
            written: None,
        }
    }

    /// Forgets everything, before a submission: the host has written its buffers since.
    pub(super) fn clear(&mut self) {
        *self = Self::new();
    }

    /// Writes all results to memory; they stay known.
    pub(super) fn clean(&mut self, mappings: Mappings<'_>, platform: &mut impl Platform) {
        if self.written.take().is_none() {
            return;
        }
        for slot in self.slots.iter_mut().filter(|slot| slot.is_written) {
            slot.clean(mappings, platform);
        }
    }
}

/// The data cache as a command uses it.
pub(super) struct Cache<'a, P> {
    pub(super) platform: &'a mut P,
    pub(super) ranges: &'a mut CachedRanges,
    pub(super) mappings: Mappings<'a>,
}

impl<P: Platform> Cache<'_, P> {
    /// Makes `range` of the operand's buffer visible to the instructions that `access` names.
    pub(super) fn read(&mut self, bound: &Bound<'_>, range: Range<usize>, access: Access) {
        let lines = Slot::lines(bound, &range, access);
        let index = lines.index();
        if self.ranges.slots[index].provides(&lines) || self.clean_within(&lines) {
            return;
        }
        self.platform
            .invalidate(bound.mapped(), lines.start..lines.end, access);
        self.record(index, lines);
    }

    /// Returns `true` if all bytes of the operand are known to be visible to the instructions that
    /// `access` names.
    pub(super) fn holds(&self, bound: &Bound<'_>, access: Access) -> bool {
        let lines = Slot::lines(bound, &bound.range(), access);
        self.ranges.slots[lines.index()].provides(&lines)
    }

    /// Makes the lines that a result shares with other data at both ends of `range` visible to all
    /// instructions. Otherwise, cleaning the result would write old bytes over data of the host in
    /// the same lines, and a scalar load of that data, which is in a written range then, would read
    /// old bytes.
    pub(super) fn read_edges(&mut self, bound: &Bound<'_>, range: &Range<usize>) {
        let lines = Slot::lines(bound, range, Access::Scalar);
        if self.ranges.slots[lines.index()].provides(&lines) {
            return;
        }
        if lines.start != range.start {
            self.read(bound, lines.start..range.start, Access::Scalar);
        }
        if lines.end != range.end {
            self.read(bound, range.end..lines.end, Access::Scalar);
        }
    }

    /// Remembers that the instructions that `access` names wrote `range` of the operand's buffer.
    pub(super) fn written(&mut self, bound: &Bound<'_>, range: &Range<usize>, access: Access) {
        let mut lines = Slot::lines(bound, range, access);
        lines.is_written = true;
        let (start, end) = (lines.address(), lines.end_address());
        self.ranges.written = Some(match &self.ranges.written {
            Some(all) => all.start.min(start)..all.end.max(end),
            None => start..end,
        });
        self.record(lines.index(), lines);
    }

    /// Writes those results of earlier commands to memory that the DMA engine will read there.
    pub(super) fn before_dma(&mut self, bound: &Bound<'_>) {
        let lines = Slot::lines(bound, &bound.range(), Access::Vector);
        if self.clean_within(&lines) {
            self.ranges.clean(self.mappings, self.platform);
        }
    }

    /// Returns `true` if a written range contains `lines`; otherwise cleans the written ranges that
    /// overlap them.
    fn clean_within(&mut self, lines: &Slot) -> bool {
        match &self.ranges.written {
            Some(all) if lines.address() < all.end && all.start < lines.end_address() => {}
            _ => return false,
        }
        let overlapping = |slot: &&mut Slot| slot.is_written && slot.overlaps(lines);
        for slot in self.ranges.slots.iter_mut().filter(overlapping) {
            if slot.contains(lines) {
                return true;
            }
            slot.clean(self.mappings, self.platform);
        }
        false
    }

    /// Stores `lines` in the slot `index`.
    fn record(&mut self, index: usize, mut lines: Slot) {
        let slot = &mut self.ranges.slots[index];
        if (slot.buffer, slot.address()) == (lines.buffer, lines.address()) {
            // The longer range may keep its end only if the rest of it is at least as fresh as the
            // new lines.
            if slot.fresh_for().covers(lines.fresh_for()) {
                lines.end = lines.end.max(slot.end);
            } else if !lines.is_written && slot.end > lines.end {
                // Keep the old entry: ranges that scalar loads read are short, and cheap to
                // invalidate again.
                return;
            }
            if slot.is_written {
                lines.access = match lines.is_written {
                    true => lines.access.or(slot.access),
                    false => slot.access,
                };
                lines.is_written = true;
            }
        } else if slot.is_written {
            let [new, old] = [lines.end - lines.start, slot.end - slot.start];
            if !lines.is_written && new < old / MUCH_LONGER {
                // Making it visible again takes less than writing the longer one.
                return;
            }
            slot.clean(self.mappings, self.platform);
        }
        *slot = lines;
    }
}
