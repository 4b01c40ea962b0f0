//! The operands of a command: the result, and the sources that it reads.

use super::{BindError, Bound, Generation, LentBuffers, Mappings, Span};

impl<'a> LentBuffers<'a> {
    /// Joins the result of a command and the sources that it reads.
    ///
    /// # Errors
    /// `Overlap` if a source shares bytes with the result; `Unmapped` if an operand is another
    /// table's.
    pub fn operands<const N: usize>(
        self,
        dst: Bound<'a>,
        src: [Option<Bound<'a>>; N],
    ) -> Result<Operands<'a, N>, BindError> {
        for bound in src.iter().flatten().chain([&dst]) {
            if !self.owns(bound) {
                return Err(BindError::Unmapped);
            }
        }
        if src.iter().flatten().any(|bound| bound.overlaps(&dst)) {
            return Err(BindError::Overlap);
        }
        Ok(Operands {
            buffers: self,
            dst,
            src,
        })
    }

    /// Returns operands that [`Operands::to_checked`] has checked; `None` if a buffer was mapped or
    /// unmapped since.
    pub fn rebind<const N: usize>(self, earlier: &CheckedOperands<N>) -> Option<Operands<'a, N>> {
        if !self.generation.is(earlier.generation) {
            return None;
        }
        let bound = |place: &KeptBytes| {
            Some(Bound {
                mapped: self.buffers.get(place.span.buffer)?.as_ref()?,
                span: place.span,
                is_direct: place.is_direct,
            })
        };
        let dst = bound(&earlier.dst)?;
        let mut src = [None; N];
        for (src, place) in src.iter_mut().zip(&earlier.src) {
            if place.is_present {
                *src = Some(bound(place)?);
            }
        }
        Some(Operands {
            buffers: self,
            dst,
            src,
        })
    }
}

/// An operand without its buffer.
#[derive(Clone, Copy, Debug)]
struct KeptBytes {
    span: Span,
    is_direct: bool,
    is_present: bool,
}

impl KeptBytes {
    const ABSENT: Self = Self {
        span: Span {
            buffer: 0,
            start: 0,
            end: 0,
        },
        is_direct: false,
        is_present: false,
    };

    fn of(bound: &Bound<'_>) -> Self {
        Self {
            span: bound.span,
            is_direct: bound.is_direct,
            is_present: true,
        }
    }
}

/// Operands that are inside their buffers, and whose sources share no byte with the result. This
/// holds as long as no buffer is mapped or unmapped.
#[derive(Clone, Copy, Debug)]
pub struct CheckedOperands<const N: usize> {
    generation: Generation,
    dst: KeptBytes,
    src: [KeptBytes; N],
}

/// The result of a command, and sources that share no byte with it.
#[derive(Debug)]
pub struct Operands<'a, const N: usize> {
    buffers: LentBuffers<'a>,
    dst: Bound<'a>,
    src: [Option<Bound<'a>>; N],
}

impl<'a, const N: usize> Operands<'a, N> {
    /// Returns a value from which [`LentBuffers::rebind`] restores these operands without checks.
    #[must_use]
    pub fn to_checked(&self) -> CheckedOperands<N> {
        let mut src = [KeptBytes::ABSENT; N];
        for (place, bound) in src.iter_mut().zip(&self.src) {
            if let Some(bound) = bound {
                *place = KeptBytes::of(bound);
            }
        }
        CheckedOperands {
            generation: self.buffers.generation,
            dst: KeptBytes::of(&self.dst),
            src,
        }
    }

    /// Returns the place of the result.
    #[must_use]
    pub fn dst(&self) -> Bound<'a> {
        self.dst
    }

    /// Returns the buffers by number, for cache operations.
    #[must_use]
    pub fn mappings(&self) -> Mappings<'a> {
        self.buffers.mappings()
    }

    /// Returns the place of source `index`.
    #[must_use]
    pub fn bound(&self, index: usize) -> Option<Bound<'a>> {
        *self.src.get(index)?
    }

    /// Lets [`Self::slices`] return source `index` as the DMA engine sees it, or as loads do.
    pub fn read_directly(&mut self, index: usize, is_direct: bool) {
        if let Some(Some(bound)) = self.src.get_mut(index) {
            bound.is_direct = is_direct;
        }
    }

    /// Returns the bytes of source `index`.
    #[must_use]
    pub fn source(&self, index: usize) -> Option<&[u8]> {
        self.buffers.bytes(self.src.get(index)?.as_ref()?).ok()
    }

    /// Returns the bytes of the result and of the sources. Callers run cache operations on them
    /// before or after they use these slices, not meanwhile.
    pub fn slices(&mut self) -> (&mut [u8], [Option<&[u8]>; N]) {
        let mut sources = [None; N];
        for (source, bound) in sources.iter_mut().zip(&self.src) {
            let Some(bound) = bound else { continue };
            // SAFETY: in bounds by `bind`. The contract of `Mapped::new` guarantees that these
            // bytes are mapped and that nobody else writes them. The result does not overlap them.
            *source =
                Some(unsafe { core::slice::from_raw_parts(bound.start(), bound.range().len()) });
        }
        // SAFETY: in bounds by `bind`.
        let dst = unsafe { self.dst.mapped.cached.add(self.dst.span.start) };
        // SAFETY: in bounds. By the contract of `Mapped::new` it is mapped and nothing else uses
        // it. No other slice covers it: the sources are elsewhere, and `self`, the only value that
        // hands out bytes of the table, is borrowed for as long as this slice lives.
        let dst = unsafe { core::slice::from_raw_parts_mut(dst, self.dst.range().len()) };
        (dst, sources)
    }
}
