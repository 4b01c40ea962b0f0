//! Buffers of the host that are mapped on the DSP, and slices of them. Only this module turns
//! mapped memory into `&[T]`.
//!
//! A buffer has two views. Load and store instructions use the *cached* view; the DMA engine, which
//! bypasses the cache, uses the *direct* view. On the DSP both have the same address; the stand-in
//! can keep them apart.
//!
//! ```text
//! Table ──lend──> LentBuffers ──bind──> Bound     an operand: its buffer and bytes, resolved once
//!                         ──operands──> Operands ──slices──> &mut [u8], &[u8]
//! ```
//!
//! [`LentBuffers`] checks the operands that a command names: number and bounds, and that the result
//! shares no byte with a source. It borrows the whole table, so no buffer is unmapped or handed out
//! twice while a command runs.

use core::ops::Range;
use core::sync::atomic::{AtomicU32, Ordering};

use crate::layout::LINE_BYTES;
use crate::wire::MAX_BUFFERS;

mod operands;
pub use operands::{CheckedOperands, Operands};

/// A mapped buffer.
#[derive(Debug)]
pub struct Mapped {
    cached: *mut u8,
    direct: *const u8,
    bytes: usize,
}

// SAFETY: memory shared with another processor belongs to no thread.
unsafe impl Send for Mapped {}

impl Mapped {
    /// Describes `bytes` bytes that are at `cached` for the processor and at `direct` for its DMA
    /// engine. Returns `None` if one address is null or is not a multiple of 128.
    ///
    /// # Safety
    /// - Both are mapped, initialized and at most `isize::MAX` bytes, until the platform that made
    ///   the value unmaps it.
    /// - While a slice of the bytes lives, nothing else writes them, or reads them if the slice is
    ///   mutable: the host does not touch a command's operands until the command's fence is
    ///   answered.
    #[must_use]
    pub unsafe fn new(cached: *mut u8, direct: *const u8, bytes: usize) -> Option<Self> {
        let fits = |address: usize| address != 0 && address.is_multiple_of(LINE_BYTES);
        (fits(cached.addr()) && fits(direct.addr())).then_some(Self {
            cached,
            direct,
            bytes,
        })
    }

    /// Returns the start of the cached view, for cache operations and for unmapping.
    #[must_use]
    pub fn start(&self) -> *mut u8 {
        self.cached
    }

    /// Returns the bytes of the buffer.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the addresses that a range of this buffer has in both views.
    fn addresses(&self, range: &Range<usize>) -> [Addresses; 2] {
        [self.cached.addr(), self.direct.addr()].map(|base| Addresses {
            start: base + range.start,
            end: base + range.end,
        })
    }
}

/// Reason why a command cannot have the memory that it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BindError {
    /// The number is too large.
    Number,
    /// No buffer has the number.
    Unmapped,
    /// A buffer already has the number.
    Taken,
    /// Part of it is outside the buffer.
    Bounds,
    /// Results share bytes with an operand.
    Overlap,
}

/// Bytes of a buffer, named by its number, so that the server can remember them between commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    buffer: usize,
    start: usize,
    end: usize,
}

impl Span {
    /// Returns the buffer's number.
    #[must_use]
    pub fn buffer(self) -> usize {
        self.buffer
    }
}

/// Addresses of the bytes of an operand, so that the server can remember them between commands. The
/// same memory may have two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    start: usize,
    end: usize,
}

impl Addresses {
    /// Returns `true` if two operands have bytes in common.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        let [this, that] = [self, other].map(|it| it.start..it.end);
        this.start < that.end && that.start < this.end && !this.is_empty() && !that.is_empty()
    }
}

/// Identity of the contents of a [`Table`]. It differs between tables with buffers, and between the
/// states of one table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Generation(u32);

impl Generation {
    /// Generation of a table that never had a buffer.
    const EMPTY: Self = Self(0);

    /// Returns a new generation. The last number never equals itself ([`Self::is`]), so that after
    /// it no generation is mistaken for an earlier one.
    fn next() -> Self {
        static LAST: AtomicU32 = AtomicU32::new(0);
        let mut last = LAST.load(Ordering::Relaxed);
        loop {
            let next = last.saturating_add(1);
            match LAST.compare_exchange_weak(last, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Self(next),
                Err(changed) => last = changed,
            }
        }
    }

    /// Returns `true` if both are the same state of the same table.
    fn is(self, other: Self) -> bool {
        self == other && self.0 != u32::MAX
    }
}

/// The mapped buffers, by number.
#[derive(Debug)]
pub struct Table {
    buffers: [Option<Mapped>; MAX_BUFFERS as usize],
    generation: Generation,
}

impl Default for Table {
    fn default() -> Self {
        Self::new()
    }
}

impl Table {
    /// Returns a table without buffers.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            buffers: [const { None }; MAX_BUFFERS as usize],
            generation: Generation::EMPTY,
        }
    }

    /// Returns the entry of a number.
    fn entry(&mut self, buffer: u32) -> Result<&mut Option<Mapped>, BindError> {
        let entry = usize::try_from(buffer)
            .ok()
            .and_then(|i| self.buffers.get_mut(i));
        entry.ok_or(BindError::Number)
    }

    /// Checks that a buffer can get this number.
    ///
    /// # Errors
    /// `Number` or `Taken` if not.
    pub fn vacant(&mut self, buffer: u32) -> Result<(), BindError> {
        match self.entry(buffer)? {
            None => Ok(()),
            Some(_) => Err(BindError::Taken),
        }
    }

    /// Gives a number to a buffer, and returns the buffer that had it before.
    ///
    /// # Errors
    /// `Number` if it is too large.
    pub fn insert(&mut self, buffer: u32, mapped: Mapped) -> Result<Option<Mapped>, BindError> {
        let earlier = self.entry(buffer)?.replace(mapped);
        self.generation = Generation::next();
        Ok(earlier)
    }

    /// Removes a buffer from the table.
    ///
    /// # Errors
    /// `Number` or `Unmapped` if there is none.
    pub fn remove(&mut self, buffer: u32) -> Result<Mapped, BindError> {
        let mapped = self.entry(buffer)?.take().ok_or(BindError::Unmapped)?;
        self.generation = Generation::next();
        Ok(mapped)
    }

    /// Removes all buffers, one by one.
    pub fn drain(&mut self) -> impl Iterator<Item = Mapped> {
        self.generation = Generation::next();
        self.buffers.iter_mut().filter_map(Option::take)
    }

    /// Returns the buffers by number, for cache operations.
    #[must_use]
    pub fn mappings(&self) -> Mappings<'_> {
        Mappings(&self.buffers)
    }

    /// Lends all buffers to one command.
    pub fn lend(&mut self) -> LentBuffers<'_> {
        LentBuffers {
            buffers: &self.buffers,
            generation: self.generation,
        }
    }
}

/// The mapped buffers by number, for cache operations: no bytes of them can be reached.
#[derive(Clone, Copy, Debug)]
pub struct Mappings<'a>(&'a [Option<Mapped>]);

impl<'a> Mappings<'a> {
    /// Returns the buffer with this number.
    #[must_use]
    pub fn get(&self, buffer: usize) -> Option<&'a Mapped> {
        self.0.get(buffer)?.as_ref()
    }
}

/// The buffers as one command may use them. A [`Table`] lends them to one command at a time. This
/// value and the [`Operands`] that it becomes cannot be copied, so each byte is handed out once.
#[derive(Debug)]
pub struct LentBuffers<'a> {
    buffers: &'a [Option<Mapped>],
    generation: Generation,
}

impl<'a> LentBuffers<'a> {
    /// Returns the buffers by number, for cache operations.
    #[must_use]
    pub fn mappings(&self) -> Mappings<'a> {
        Mappings(self.buffers)
    }

    /// Resolves `bytes` bytes at `offset` of a buffer.
    ///
    /// # Errors
    /// `Number`, `Unmapped` or `Bounds`.
    pub fn bind(&self, buffer: u32, offset: u64, bytes: u64) -> Result<Bound<'a>, BindError> {
        let buffer = usize::try_from(buffer).map_err(|_| BindError::Number)?;
        let entry = self.buffers.get(buffer).ok_or(BindError::Number)?;
        let mapped = entry.as_ref().ok_or(BindError::Unmapped)?;
        let end = offset.checked_add(bytes).ok_or(BindError::Bounds)?;
        let end = usize::try_from(end).map_err(|_| BindError::Bounds)?;
        if end > mapped.bytes {
            return Err(BindError::Bounds);
        }
        // The offset is at most the end, which fits into usize.
        let start = usize::try_from(offset).map_err(|_| BindError::Bounds)?;
        let span = Span { buffer, start, end };
        Ok(Bound {
            mapped,
            span,
            is_direct: false,
        })
    }

    /// Returns `true` if `bound` was resolved in these buffers, not in another table's.
    fn owns(&self, bound: &Bound<'_>) -> bool {
        let entry = self.buffers.get(bound.span.buffer);
        let mapped = entry.and_then(Option::as_ref);
        mapped.is_some_and(|mapped| core::ptr::eq(mapped, bound.mapped))
    }

    /// Returns the bytes of an operand of a command that has no [`Operands`] yet.
    ///
    /// # Errors
    /// `Unmapped` if the operand is another table's.
    pub fn bytes(&self, bound: &Bound<'a>) -> Result<&[u8], BindError> {
        if !self.owns(bound) {
            return Err(BindError::Unmapped);
        }
        // SAFETY: in bounds by `bind`. By the contract of `Mapped::new` it is mapped and others do
        // not write it. This command does not write it either: only `Operands` gives out mutable
        // slices, and it consumes `self`, which this slice borrows.
        Ok(unsafe { core::slice::from_raw_parts(bound.start(), bound.range().len()) })
    }
}

/// An operand: a buffer and the bytes of it that a command names.
#[derive(Clone, Copy, Debug)]
pub struct Bound<'a> {
    mapped: &'a Mapped,
    span: Span,
    is_direct: bool,
}

impl<'a> Bound<'a> {
    /// Returns the same bytes as the DMA engine sees them.
    #[must_use]
    pub fn direct(self) -> Self {
        Self {
            is_direct: true,
            ..self
        }
    }

    /// Returns the buffer, for cache operations.
    #[must_use]
    pub fn mapped(&self) -> &'a Mapped {
        self.mapped
    }

    /// Returns the byte offsets in the buffer.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        self.span.start..self.span.end
    }

    /// Returns the bytes by the buffer's number.
    #[must_use]
    pub fn span(&self) -> Span {
        self.span
    }

    /// Returns the addresses of the bytes for load and store instructions.
    #[must_use]
    pub fn addresses(&self) -> Addresses {
        let [cached, _] = self.mapped.addresses(&self.range());
        cached
    }

    /// Returns the address of the first byte.
    fn start(&self) -> *const u8 {
        let base = if self.is_direct {
            self.mapped.direct
        } else {
            self.mapped.cached.cast_const()
        };
        // SAFETY: in bounds by `bind`.
        unsafe { base.add(self.span.start) }
    }

    /// Returns `true` if two operands have bytes in common. The same memory may have two numbers.
    fn overlaps(&self, other: &Self) -> bool {
        let places = self.mapped.addresses(&self.range());
        let others = other.mapped.addresses(&other.range());
        places.iter().any(|a| others.iter().any(|b| a.overlaps(*b)))
    }
}

impl PartialEq for Bound<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.span == other.span
    }
}
