//! The DSP's address space as a budget: which buffers are mapped, and which are unmapped to make
//! room for others.
//!
//! A DSP with 32-bit addresses sees about 3 GB at a time. Buffers are mapped when a submission
//! names them and unmapped, longest unused first, when another submission needs the room.
//!
//! The DSP can only map memory that is announced to the system. Buffers are announced when they are
//! allocated. They occupy a window of addresses whose size cannot be queried: 4 GiB on mainline
//! Linux. When it is full, the longest unused buffers leave it until a submission names them. This
//! module only keeps account; the session makes the changes.

use hexagon_ops::wire::MAX_BUFFERS;

use crate::error::{Error, Result};

/// Name of the address space in errors.
const SPACE: &str = "the DSP's address space";

/// Number of a buffer on the wire.
pub(super) type Number = u32;

/// State of one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AddressEntry {
    bytes: u64,
    fd: i32,
    mapped: bool,
    announced: bool,
    /// Submission that named it last.
    used: u64,
}

/// A step towards the mappings of a submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// Give the buffer an address.
    Map { number: Number, fd: i32, bytes: u64 },
    /// Take its address away.
    Unmap { number: Number },
}

/// All buffers of a session.
#[derive(Debug)]
pub(super) struct AddressSpace {
    budget_bytes: u64,
    /// The entries of the buffers by number; a free number has none.
    entries: Vec<Option<AddressEntry>>,
}

impl AddressSpace {
    /// Returns an empty address space of `budget_bytes`.
    pub(super) fn new(budget_bytes: u64) -> Self {
        Self {
            budget_bytes,
            entries: Vec::new(),
        }
    }

    /// Returns the bytes that can be mapped at a time.
    pub(super) fn budget_bytes(&self) -> u64 {
        self.budget_bytes
    }

    /// Gives a buffer a number; nothing is mapped yet.
    ///
    /// # Errors
    /// `AddressSpace` if it is larger than the budget, or no number is free.
    pub(super) fn add(&mut self, fd: i32, bytes: usize) -> Result<Number> {
        let free = self.entries.iter().position(Option::is_none);
        let index = free.unwrap_or(self.entries.len());
        let number = u32::try_from(index).unwrap_or(MAX_BUFFERS);
        let wide = bytes as u64;
        if wide > self.budget_bytes || number >= MAX_BUFFERS {
            return Err(Error::AddressSpace {
                space: SPACE,
                bytes: wide,
            });
        }
        if index == self.entries.len() {
            self.entries.push(None);
        }
        self.entries[index] = Some(AddressEntry {
            bytes: wide,
            fd,
            mapped: false,
            announced: false,
            used: 0,
        });
        Ok(number)
    }

    /// Forgets a buffer. Returns `true` if it is mapped and has to be unmapped first.
    pub(super) fn remove(&mut self, number: Number) -> bool {
        let entry = self.entries.get_mut(number as usize).and_then(Option::take);
        entry.is_some_and(|entry| entry.mapped)
    }

    /// Returns the bytes that are mapped.
    fn mapped_bytes(&self) -> u64 {
        let mapped = (self.entries.iter().flatten()).filter(|entry| entry.mapped);
        mapped.map(|entry| entry.bytes).sum()
    }

    /// Returns the bytes that the numbers need together; each is counted once.
    pub(super) fn bytes(&self, numbers: &[Number]) -> u64 {
        let distinct = numbers
            .iter()
            .enumerate()
            .filter(|(i, number)| !numbers[..*i].contains(number));
        distinct
            .filter_map(|(_, number)| self.entry(*number))
            .map(|entry| entry.bytes)
            .sum()
    }

    /// Returns `true` if a buffer is announced.
    pub(super) fn is_announced(&self, number: Number) -> bool {
        self.entry(number).is_some_and(|entry| entry.announced)
    }

    /// Notes that a buffer is announced by a descriptor.
    pub(super) fn mark_announced(&mut self, number: Number, fd: i32) {
        if let Some(Some(entry)) = self.entries.get_mut(number as usize) {
            entry.announced = true;
            entry.fd = fd;
        }
    }

    /// Records that a buffer has to be announced before it is mapped next. Returns `false`, and
    /// changes nothing, if it is mapped.
    pub(super) fn mark_retracted(&mut self, number: Number) -> bool {
        let entry = (self.entries.get_mut(number as usize)).and_then(Option::as_mut);
        let Some(entry) = entry.filter(|entry| !entry.mapped) else {
            return false;
        };
        entry.announced = false;
        true
    }

    /// Chooses announced buffers that leave the window: the longest unused ones that have at least
    /// `bytes` together, or all but `numbers` if they have less. Those that the DSP has mapped are
    /// unmapped by `changes`. The account assumes that the changes are made.
    pub(super) fn retract(
        &mut self,
        bytes: u64,
        numbers: &[Number],
        changes: &mut Vec<Change>,
    ) -> Vec<Number> {
        let mut announced: Vec<(u64, Number)> = (0..MAX_BUFFERS)
            .zip(&self.entries)
            .filter(|(number, _)| !numbers.contains(number))
            .filter_map(|(number, entry)| {
                Some((entry.filter(|entry| entry.announced)?.used, number))
            })
            .collect();
        announced.sort_unstable();
        let mut chosen = Vec::new();
        let mut room = 0;
        for (_, number) in announced {
            if room >= bytes {
                break;
            }
            let Some(Some(entry)) = self.entries.get_mut(number as usize) else {
                continue;
            };
            entry.announced = false;
            room += entry.bytes;
            if entry.mapped {
                entry.mapped = false;
                changes.push(Change::Unmap { number });
            }
            chosen.push(number);
        }
        chosen
    }

    fn entry(&self, number: Number) -> Option<&AddressEntry> {
        self.entries.get(number as usize)?.as_ref()
    }

    /// Returns the changes after which submission `used` finds all `numbers` mapped, in order, and
    /// assumes that they are executed.
    ///
    /// # Errors
    /// `AddressSpace` if the buffers together exceed the budget; nothing is changed then.
    pub(super) fn admit(
        &mut self,
        numbers: &[Number],
        used: u64,
        changes: &mut Vec<Change>,
    ) -> Result<()> {
        let need = self.bytes(numbers);
        if need > self.budget_bytes {
            return Err(Error::AddressSpace {
                space: SPACE,
                bytes: need,
            });
        }
        let mut coming = 0;
        for number in numbers {
            if let Some(Some(entry)) = self.entries.get_mut(*number as usize) {
                if !entry.mapped && entry.used != used {
                    coming += entry.bytes;
                }
                entry.used = used;
            }
        }
        while self.mapped_bytes() + coming > self.budget_bytes {
            let oldest = (self.entries.iter_mut().enumerate())
                .filter_map(|(index, entry)| Some((index, entry.as_mut()?)))
                .filter(|(_, entry)| entry.mapped && entry.used != used)
                .min_by_key(|(_, entry)| entry.used);
            let Some((index, entry)) = oldest else { break };
            entry.mapped = false;
            changes.push(Change::Unmap {
                number: u32::try_from(index).unwrap_or(MAX_BUFFERS),
            });
        }
        for number in numbers {
            if let Some(Some(entry)) = self.entries.get_mut(*number as usize)
                && !entry.mapped
            {
                entry.mapped = true;
                changes.push(Change::Map {
                    number: *number,
                    fd: entry.fd,
                    bytes: entry.bytes,
                });
            }
        }
        Ok(())
    }

    /// Unmaps everything but `numbers`, and assumes that the changes are executed.
    pub(super) fn evict_others(&mut self, numbers: &[Number], changes: &mut Vec<Change>) {
        for (number, entry) in (0..MAX_BUFFERS).zip(&mut self.entries) {
            if let Some(entry) = entry
                && entry.mapped
                && !numbers.contains(&number)
            {
                entry.mapped = false;
                changes.push(Change::Unmap { number });
            }
        }
    }

    /// Takes back a change that failed.
    pub(super) fn undo(&mut self, change: Change) {
        let (Change::Map { number, .. } | Change::Unmap { number }) = change;
        if let Some(Some(entry)) = self.entries.get_mut(number as usize) {
            entry.mapped = matches!(change, Change::Unmap { .. });
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_longest_unused_buffer_goes_first() {
        let mut space = AddressSpace::new(100);
        let [a, b, c] = [40, 40, 50].map(|bytes| space.add(9, bytes).unwrap());
        let mut changes = Vec::new();
        space.admit(&[a, b, a], 1, &mut changes).unwrap();
        assert_eq!(changes.len(), 2);
        space.admit(&[b], 2, &mut changes).unwrap();
        assert_eq!(changes.len(), 2);
        space.admit(&[c], 3, &mut changes).unwrap();
        assert_eq!(changes[2], Change::Unmap { number: a });
        assert!(!space.remove(a) && space.remove(c));
        assert!(space.add(9, 101).is_err());
        let error = space.admit(&[b, c], 4, &mut Vec::new());
        assert!(error.is_ok(), "c is gone and needs nothing");
    }

    /// A product whose operands are in one buffer names that buffer several times.
    #[test]
    fn a_buffer_that_is_named_twice_counts_once() {
        let mut space = AddressSpace::new(100);
        let [a, b] = [60, 40].map(|bytes| space.add(9, bytes).unwrap());
        assert_eq!(space.bytes(&[a, b, a, a]), 100);
        let mut changes = Vec::new();
        space.admit(&[a, b, a, b], 1, &mut changes).unwrap();
        assert_eq!((changes.len(), space.mapped_bytes()), (2, 100));
        // Buffers that are already mapped need no room, and a new buffer that is named twice needs
        // room once.
        let c = space.add(9, 40).unwrap();
        changes.clear();
        space.admit(&[c, a, c, a], 2, &mut changes).unwrap();
        let map = Change::Map {
            number: c,
            fd: 9,
            bytes: 40,
        };
        assert_eq!(changes, [Change::Unmap { number: b }, map]);
        let mut space = AddressSpace::new(100);
        let [a, b, c] = [40, 30, 30].map(|bytes| space.add(9, bytes).unwrap());
        changes.clear();
        space.admit(&[a, b], 1, &mut changes).unwrap();
        space.admit(&[c, c], 2, &mut changes).unwrap();
        assert_eq!((changes.len(), space.mapped_bytes()), (3, 100));
    }

    #[test]
    fn the_longest_unused_buffers_leave_the_window_and_the_dsp_unmaps_them() {
        let mut space = AddressSpace::new(200);
        let [a, b, c, d] = [40, 40, 50, 60].map(|bytes| space.add(9, bytes).unwrap());
        for number in [a, b, c, d] {
            assert!(!space.is_announced(number));
            space.mark_announced(number, 9);
        }
        space.admit(&[b, d], 1, &mut Vec::new()).unwrap();
        space.admit(&[a], 2, &mut Vec::new()).unwrap();
        let mut changes = Vec::new();
        // Buffer c was never named by a submission, and d must stay.
        assert_eq!(space.retract(60, &[d], &mut changes), [c, b]);
        assert_eq!(changes, [Change::Unmap { number: b }]);
        assert_eq!(space.mapped_bytes(), 100);
        assert_eq!(
            [a, b, c, d].map(|number| space.is_announced(number)),
            [true, false, false, true]
        );
        assert_eq!(space.retract(1000, &[d], &mut changes), [a]);
        assert!(space.retract(1000, &[d], &mut changes).is_empty());
    }

    proptest! {
        /// Compared with a simple set: the account is never over budget, every requested buffer is
        /// mapped, and each change is possible.
        #[test]
        fn what_is_asked_for_is_mapped_and_the_budget_holds(
            sizes in prop::collection::vec(1usize..60, 1..12),
            asks in prop::collection::vec(prop::collection::vec(0usize..12, 1..4), 1..40),
        ) {
            let mut space = AddressSpace::new(100);
            let numbers: Vec<_> = sizes.iter().map(|bytes| space.add(3, *bytes).unwrap()).collect();
            let mut mapped = std::collections::BTreeSet::new();
            for (sequence, ask) in (1u64..).zip(asks) {
                let ask: Vec<_> = ask.iter().map(|i| numbers[i % numbers.len()]).collect();
                let mut changes = Vec::new();
                if space.admit(&ask, sequence, &mut changes).is_err() {
                    prop_assert!(changes.is_empty() && space.bytes(&ask) > 100);
                    continue;
                }
                for change in changes {
                    match change {
                        Change::Map { number, bytes, .. } => {
                            prop_assert!(mapped.insert(number));
                            prop_assert_eq!(bytes, sizes[number as usize] as u64);
                        }
                        Change::Unmap { number } => prop_assert!(mapped.remove(&number) && !ask.contains(&number)),
                    }
                    let total: usize = mapped.iter().map(|number| sizes[*number as usize]).sum();
                    prop_assert!(total <= 100);
                }
                prop_assert!(ask.iter().all(|number| mapped.contains(number)));
            }
        }
    }
}
