//! Buffers of the host that are mapped on the DSP, and slices of them. Only this module turns
//! mapped memory into `&[T]`.
//!
//! A buffer has two views. Load and store instructions use the *cached* view; the DMA engine, which
//! bypasses the cache, uses the *direct* view. On the DSP both have the same address; the stand-in
//! can keep them apart.
//!
//! The table checks the operands that a command names: number, bounds and alignment, and that
//! results share no byte with operands. Each slice that it returns borrows the table, so no buffer
//! is unmapped or handed out twice while the slice lives.

use core::ops::Range;

use crate::layout::{LINE_BYTES, Line};
use crate::wire::MAX_BUFFERS;

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
    /// - While a slice of them lives, nothing else writes what it covers, or reads it if it is a
    ///   mutable slice: the host does not touch a command's operands until the command's fence is
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
    fn addresses(&self, range: &Range<usize>) -> [Range<usize>; 2] {
        [self.cached.addr(), self.direct.addr()].map(|base| base + range.start..base + range.end)
    }
}

/// Reason why a command cannot have the memory that it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The number is too large.
    Number,
    /// No buffer has the number.
    Unmapped,
    /// A buffer already has the number.
    Taken,
    /// Part of it lies outside the buffer.
    Bounds,
    /// The memory is not aligned.
    Alignment,
    /// Results share bytes with an operand.
    Overlap,
}

/// Bytes of a buffer that passed the check of bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    buffer: usize,
    start: usize,
    end: usize,
}

impl Span {
    /// Returns the number of the buffer.
    #[must_use]
    pub fn buffer(self) -> usize {
        self.buffer
    }

    /// Returns the byte offset in the buffer.
    #[must_use]
    pub fn start(self) -> usize {
        self.start
    }

    /// Returns `true` if two spans have bytes in common.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.buffer == other.buffer && self.start < other.end && other.start < self.end
    }
}

/// Operands and results of a product.
#[derive(Debug)]
pub struct Operands<'a> {
    /// Packed weights, for the DMA engine.
    pub weights: &'a [Line],
    /// Activations.
    pub act: &'a [f32],
    /// Rows that an epilogue combines with the results.
    pub other: Option<&'a [f32]>,
    /// Results.
    pub dst: &'a mut [f32],
}

/// The mapped buffers, by number.
#[derive(Debug)]
pub struct Table {
    buffers: [Option<Mapped>; MAX_BUFFERS as usize],
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
        }
    }

    /// Returns the slot of a number.
    fn place(&mut self, buffer: u32) -> Result<&mut Option<Mapped>, Refusal> {
        let place = usize::try_from(buffer)
            .ok()
            .and_then(|i| self.buffers.get_mut(i));
        place.ok_or(Refusal::Number)
    }

    /// Checks that a number can be given to a buffer.
    ///
    /// # Errors
    /// `Number` or `Taken` if not.
    pub fn vacant(&mut self, buffer: u32) -> Result<(), Refusal> {
        match self.place(buffer)? {
            None => Ok(()),
            Some(_) => Err(Refusal::Taken),
        }
    }

    /// Gives a number to a buffer, and returns the buffer that had it before.
    ///
    /// # Errors
    /// `Number` if it is too large.
    pub fn insert(&mut self, buffer: u32, mapped: Mapped) -> Result<Option<Mapped>, Refusal> {
        Ok(self.place(buffer)?.replace(mapped))
    }

    /// Removes a buffer from the table.
    ///
    /// # Errors
    /// `Number` or `Unmapped` if there is none.
    pub fn remove(&mut self, buffer: u32) -> Result<Mapped, Refusal> {
        self.place(buffer)?.take().ok_or(Refusal::Unmapped)
    }

    /// Removes all buffers, one by one.
    pub fn drain(&mut self) -> impl Iterator<Item = Mapped> {
        self.buffers.iter_mut().filter_map(Option::take)
    }

    /// Returns the buffer of a span.
    #[must_use]
    pub fn buffer(&self, span: Span) -> Option<&Mapped> {
        self.buffers.get(span.buffer)?.as_ref()
    }

    /// Returns `bytes` bytes at `offset` of a buffer.
    ///
    /// # Errors
    /// `Number`, `Unmapped` or `Bounds`.
    pub fn span(&self, buffer: u32, offset: u64, bytes: u64) -> Result<Span, Refusal> {
        let place = usize::try_from(buffer).ok();
        let place = place.filter(|place| *place < self.buffers.len());
        let place = place.ok_or(Refusal::Number)?;
        let mapped = self.buffers[place].as_ref().ok_or(Refusal::Unmapped)?;
        let end = offset.checked_add(bytes).ok_or(Refusal::Bounds)?;
        let end = usize::try_from(end).map_err(|_| Refusal::Bounds)?;
        if end > mapped.bytes {
            return Err(Refusal::Bounds);
        }
        // The offset is not larger than the end.
        let start = usize::try_from(offset).map_err(|_| Refusal::Bounds)?;
        Ok(Span {
            buffer: place,
            start,
            end,
        })
    }

    /// Returns the buffer and the range of a span. Both are checked again, because the number may
    /// belong to a different buffer by now.
    fn find(&self, span: Span) -> Result<(&Mapped, Range<usize>), Refusal> {
        let mapped = self.buffer(span).ok_or(Refusal::Unmapped)?;
        if span.start > span.end || span.end > mapped.bytes {
            return Err(Refusal::Bounds);
        }
        Ok((mapped, span.start..span.end))
    }

    /// Returns the words of a buffer, as the processor sees them.
    ///
    /// # Errors
    /// `Unmapped`, `Bounds`, or `Alignment` to 4 bytes.
    pub fn words(&self, span: Span) -> Result<&[i32], Refusal> {
        bytemuck::try_cast_slice(self.bytes(span)?).map_err(|_| Refusal::Alignment)
    }

    /// Refuses a span that shares bytes with `dst`.
    fn apart(&self, span: Span, dst: Span) -> Result<(), Refusal> {
        let (dst_buffer, dst_range) = self.find(dst)?;
        let (buffer, range) = self.find(span)?;
        let same = span.buffer == dst.buffer && overlap(&range, &dst_range);
        // The same memory may have two numbers.
        let places = buffer.addresses(&range);
        let dst_places = dst_buffer.addresses(&dst_range);
        let aliased = places
            .iter()
            .any(|a| dst_places.iter().any(|b| overlap(a, b)));
        if same || aliased {
            Err(Refusal::Overlap)
        } else {
            Ok(())
        }
    }

    /// Returns the bytes of a buffer, as the processor sees them.
    ///
    /// # Errors
    /// `Unmapped` or `Bounds`.
    pub fn bytes(&self, span: Span) -> Result<&[u8], Refusal> {
        let (mapped, range) = self.find(span)?;
        // SAFETY: in bounds by `find`.
        let start = unsafe { mapped.cached.add(range.start) };
        // SAFETY: in bounds, mapped and not written meanwhile by the contract of `Mapped::new`.
        Ok(unsafe { core::slice::from_raw_parts(start.cast_const(), range.len()) })
    }

    /// Returns the result of an operation on tensors, and those sources that are not the result
    /// itself.
    ///
    /// # Errors
    /// `Unmapped`, `Bounds`, or `Overlap` if a source shares bytes with the result.
    #[expect(clippy::type_complexity, reason = "a result beside its sources")]
    pub fn tensors<const N: usize>(
        &mut self,
        dst: Span,
        src: [Option<Span>; N],
    ) -> Result<(&mut [u8], [Option<&[u8]>; N]), Refusal> {
        let mut sources = [None; N];
        for (source, span) in sources.iter_mut().zip(src) {
            if let Some(span) = span {
                self.apart(span, dst)?;
                *source = Some(self.bytes(span)?);
            }
        }
        let (buffer, range) = self.find(dst)?;
        // SAFETY: in bounds by `find`.
        let start = unsafe { buffer.cached.add(range.start) };
        // SAFETY: in bounds, mapped, used by nothing else by the contract of `Mapped::new`, and by
        // no other slice: the sources lie elsewhere by `apart`, and `self` is borrowed for as long
        // as this one lives.
        let bytes = unsafe { core::slice::from_raw_parts_mut(start, range.len()) };
        Ok((bytes, sources))
    }

    /// Returns the operands and results of a product.
    ///
    /// # Errors
    /// `Unmapped`, `Bounds`, `Alignment` to 128 bytes (weights) or 4 bytes, or `Overlap`.
    pub fn operands(
        &mut self,
        weights: Span,
        act: Span,
        other: Option<Span>,
        dst: Span,
    ) -> Result<Operands<'_>, Refusal> {
        for span in [weights, act].into_iter().chain(other) {
            self.apart(span, dst)?;
        }
        let act = self.floats(act)?;
        let other = other.map(|span| self.floats(span)).transpose()?;
        let (weight_buffer, weight_range) = self.find(weights)?;
        let (dst_buffer, dst_range) = self.find(dst)?;
        // SAFETY: in bounds by `find`.
        let weight_start = unsafe { weight_buffer.direct.add(weight_range.start) };
        // SAFETY: in bounds, mapped and not written meanwhile by the contract of `Mapped::new`, nor
        // through the results, which lie elsewhere.
        let weights = unsafe { core::slice::from_raw_parts(weight_start, weight_range.len()) };
        // SAFETY: in bounds by `find`.
        let dst_start = unsafe { dst_buffer.cached.add(dst_range.start) };
        // SAFETY: in bounds, mapped, used by nothing else by the contract of `Mapped::new`, and by
        // no other slice: the others lie elsewhere, and `self` is borrowed for as long as this one
        // lives.
        let dst = unsafe { core::slice::from_raw_parts_mut(dst_start, dst_range.len()) };
        Ok(Operands {
            weights: bytemuck::try_cast_slice(weights).map_err(|_| Refusal::Alignment)?,
            act,
            other,
            dst: bytemuck::try_cast_slice_mut(dst).map_err(|_| Refusal::Alignment)?,
        })
    }

    /// Returns the floats of a buffer, as the processor sees them.
    fn floats(&self, span: Span) -> Result<&[f32], Refusal> {
        bytemuck::try_cast_slice(self.bytes(span)?).map_err(|_| Refusal::Alignment)
    }
}

/// Returns `true` if two ranges have an element in common.
fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end && !a.is_empty() && !b.is_empty()
}
