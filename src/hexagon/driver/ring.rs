//! The host's end of the command ring: writes commands, reads completions, believes nothing that
//! the other side wrote.
//!
//! The layout and the protocol are in [`hexagon_ops::wire`]. Everything here is safe code over
//! atomic words; a peer that writes nonsense gives [`RingError`], never an access outside the ring.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use hexagon_ops::wire::{self, Command, Completion, RingHeader, RingLayout};

/// Words of memory that another processor reads and writes too.
pub trait SharedWords {
    /// Returns the words.
    fn words(&self) -> &[AtomicU32];

    /// Makes bytes that the CPU wrote visible to the other processor.
    fn clean(&self, bytes: Range<usize>);

    /// Makes the CPU read again bytes that the other processor may have written.
    fn invalidate(&self, bytes: Range<usize>);
}

/// The other side broke the protocol; the ring is of no use any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// A counter is larger than the number of written commands, or smaller by more than the ring's
    /// length.
    #[error("counter {counter} is {value}, possible is {low} to {high} (modulo 2^32)")]
    Counter {
        /// Whose counter.
        counter: &'static str,
        /// The value of the counter.
        value: u32,
        /// Smallest possible value.
        low: u32,
        /// Largest possible value.
        high: u32,
    },
    /// A completion for a command that was not sent, or that is not yet due.
    #[error("completion of submission {have}, {}", due(*.want))]
    Sequence {
        /// The number of the completion.
        have: u64,
        /// The oldest number that is not complete.
        want: Option<u64>,
    },
}

/// Returns the expected completion, as a text for a message.
fn due(want: Option<u64>) -> String {
    match want {
        Some(number) => format!("while {number} is due"),
        None => "while none is due".into(),
    }
}

/// The host's end of a ring in the memory `W`.
#[derive(Debug)]
pub struct Ring<W> {
    memory: W,
    layout: RingLayout,
    /// Commands written; the other side can see `published` of them.
    written: u32,
    published: u32,
    /// Commands that the other side had read when it was last looked at.
    taken: u32,
    collected: u32,
    next_sequence: u64,
    /// Sequence numbers of published fences without completion, oldest first.
    due: VecDeque<u64>,
}

impl<W: SharedWords> Ring<W> {
    /// Prepares a ring of `slots` slots. Returns `None` if that is not a power of two or the memory
    /// is too small for it.
    #[must_use]
    pub fn new(memory: W, slots: u32) -> Option<Self> {
        let layout = RingLayout::new(slots)?;
        if memory.words().len() * 4 < layout.bytes() {
            return None;
        }
        for word in memory.words() {
            word.store(0, Ordering::Relaxed);
        }
        let header = RingHeader {
            magic: wire::MAGIC,
            version: wire::VERSION,
            slots,
            reserved: 0,
        };
        write(&memory, 0, bytemuck::bytes_of(&header));
        memory.clean(0..layout.bytes());
        Some(Self {
            memory,
            layout,
            written: 0,
            published: 0,
            taken: 0,
            collected: 0,
            next_sequence: 1,
            due: VecDeque::with_capacity(slots as usize),
        })
    }

    /// Returns the memory that the ring is in.
    #[must_use]
    pub fn memory(&self) -> &W {
        &self.memory
    }

    /// Returns a new number for a submission.
    pub fn next_sequence(&mut self) -> u64 {
        self.next_sequence += 1;
        self.next_sequence - 1
    }

    /// Writes a command into the next free slot. Returns `false` if there is none. The other side
    /// does not see it before [`Self::publish`].
    ///
    /// # Errors
    /// `Counter` if the other side claims to have read commands that were not written.
    pub fn push(&mut self, command: &Command) -> Result<bool, RingError> {
        let fence = command.flags & wire::FENCE != 0;
        let slots = self.layout.slots();
        // A completion needs a slot as well, so a command with a fence waits until a slot is free.
        if fence && self.due.len() >= slots as usize {
            return Ok(false);
        }
        self.waiting()?;
        if self.written.wrapping_sub(self.taken) >= slots {
            return Ok(false);
        }
        let at = self.layout.command(self.written);
        write(&self.memory, at, bytemuck::bytes_of(command));
        self.memory.clean(at..at + size_of::<Command>());
        self.written = self.written.wrapping_add(1);
        if fence {
            self.due.push_back(command.sequence);
        }
        Ok(true)
    }

    /// Shows all commands written so far to the other side.
    pub fn publish(&mut self) {
        self.published = self.written;
        self.store(wire::PUBLISHED, self.published, Ordering::Release);
    }

    /// Returns `true` if the other side has stopped reading the ring, so that it has to be called.
    /// Call it after [`Self::publish`].
    #[must_use]
    pub fn is_parked(&self) -> bool {
        // The other side stores PARKED, fences, and looks at the counter; this side does so in the
        // opposite order.
        fence(Ordering::SeqCst);
        self.load(wire::STATE) != wire::STATE_SERVING
    }

    /// Returns `true` if the other side has given up the ring.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.load(wire::STATE) == wire::STATE_CLOSED
    }

    /// Asks the other side to leave the ring.
    pub fn close(&self) {
        self.store(wire::WISH, wire::WISH_CLOSE, Ordering::Release);
    }

    /// Returns the number of commands that were published and not read yet.
    ///
    /// # Errors
    /// `Counter` if the other side's counter is impossible.
    pub fn waiting(&mut self) -> Result<u32, RingError> {
        self.taken = self.read("taken", wire::TAKEN, self.taken, self.published)?;
        Ok(self.published.wrapping_sub(self.taken))
    }

    /// Returns a word that the other side changes while it works on a list. Its value has no
    /// meaning.
    #[must_use]
    pub fn progress(&self) -> u32 {
        self.load(wire::PROGRESS)
    }

    /// Returns the next completion, if there is one.
    ///
    /// # Errors
    /// `Counter` if the other side's counter is impossible, `Sequence` if the completion is not the
    /// expected one.
    pub fn collect(&mut self) -> Result<Option<Completion>, RingError> {
        // At most `slots` completions are due, so the number fits.
        let due = u32::try_from(self.due.len()).unwrap_or(u32::MAX);
        let newest = self.collected.wrapping_add(due);
        let completed = self.read("completed", wire::COMPLETED, self.collected, newest)?;
        if completed == self.collected {
            return Ok(None);
        }
        let at = self.layout.completion(self.collected);
        self.memory.invalidate(at..at + size_of::<Completion>());
        let mut completion: Completion = bytemuck::Zeroable::zeroed();
        read(&self.memory, at, bytemuck::bytes_of_mut(&mut completion));
        let want = self.due.front().copied();
        if want != Some(completion.sequence) {
            return Err(RingError::Sequence {
                have: completion.sequence,
                want,
            });
        }
        self.due.pop_front();
        self.collected = self.collected.wrapping_add(1);
        self.store(wire::COLLECTED, self.collected, Ordering::Release);
        Ok(Some(completion))
    }

    /// Returns a counter of the other side, checked to be in `low..=high` modulo 2³².
    fn read(
        &self,
        counter: &'static str,
        at: usize,
        low: u32,
        high: u32,
    ) -> Result<u32, RingError> {
        let value = self.load(at);
        if value.wrapping_sub(low) <= high.wrapping_sub(low) {
            Ok(value)
        } else {
            Err(RingError::Counter {
                counter,
                value,
                low,
                high,
            })
        }
    }

    fn load(&self, at: usize) -> u32 {
        self.memory.invalidate(at..at + 4);
        self.memory.words()[at / 4].load(Ordering::Acquire)
    }

    fn store(&self, at: usize, value: u32, order: Ordering) {
        self.memory.words()[at / 4].store(value, order);
        self.memory.clean(at..at + 4);
    }
}

/// Writes bytes word by word; whole words.
fn write(memory: &impl SharedWords, at: usize, bytes: &[u8]) {
    let words = memory.words()[at / 4..].iter();
    for (word, bytes) in words.zip(bytes.as_chunks::<4>().0) {
        word.store(u32::from_le_bytes(*bytes), Ordering::Relaxed);
    }
}

/// Reads bytes word by word; whole words.
fn read(memory: &impl SharedWords, at: usize, bytes: &mut [u8]) {
    let words = memory.words()[at / 4..].iter();
    for (word, bytes) in words.zip(bytes.as_chunks_mut::<4>().0) {
        *bytes = word.load(Ordering::Relaxed).to_le_bytes();
    }
}
