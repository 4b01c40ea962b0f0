//! Rows of 4-byte elements with three strides, in their buffer.

use core::ops::Range;

use super::Platform;
use super::coherence::Cache;
use super::detail::{ALIGNMENT, BOUNDS, Failure, RESERVED, ROWS};
use crate::rt::cache::Access;
use crate::rt::memory::{BindError, Bound, LentBuffers};
use crate::wire::RowsF32;

/// Bytes of an element.
const ELEMENT: usize = 4;

/// Rows with three strides. Counts are 1 or more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Strided {
    /// Elements of a row.
    pub(super) row: usize,
    /// Indices in dimensions 1, 2 and 3.
    counts: [usize; 3],
    /// Elements from one index to the next.
    pub(super) strides: [usize; 3],
}

/// Rows that are in their buffer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct BoundRows<'a> {
    /// The bytes from the first element to the last.
    pub(super) bound: Bound<'a>,
    pub(super) rows: Strided,
}

impl<'a> BoundRows<'a> {
    /// Resolves `described`, whose rows have `row` elements and whose dimensions have `counts`
    /// indices, none of them 0.
    pub(super) fn new(
        described: &RowsF32,
        row: u32,
        counts: [u32; 3],
        buffers: &LentBuffers<'a>,
    ) -> Result<Self, Failure> {
        let bytes = rows_bytes(described, row, counts)?;
        let bound = buffers.bind(described.buffer, described.offset, bytes)?;
        let rows = Strided::new(described, row, counts)?;
        Ok(Self { bound, rows })
    }

    /// Calls `f` with each range of bytes of the buffer that holds rows without a gap.
    fn runs(&self, f: impl FnMut(Range<usize>)) {
        self.rows.runs(self.bound.range().start, f);
    }

    /// Makes bytes that the host or an earlier command wrote visible to the instructions that
    /// `access` names.
    pub(super) fn read(&self, access: Access, cache: &mut Cache<'_, impl Platform>) {
        self.runs(|range| cache.read(&self.bound, range, access));
    }

    /// Makes the cache lines that results share with other data visible.
    pub(super) fn read_edges(&self, cache: &mut Cache<'_, impl Platform>) {
        self.runs(|range| cache.read_edges(&self.bound, &range));
    }

    /// Remembers that the results were written, for the host and for the DMA copies of later
    /// commands.
    pub(super) fn written(&self, access: Access, cache: &mut Cache<'_, impl Platform>) {
        self.runs(|range| cache.written(&self.bound, &range, access));
    }
}

/// Checks the alignment of rows of `row` elements, and returns the number of bytes from the first
/// to the last.
fn rows_bytes(described: &RowsF32, row: u32, counts: [u32; 3]) -> Result<u64, Failure> {
    if described.reserved != 0 {
        return Err(Failure::bad(RESERVED));
    }
    let aligned = |bytes: u64| bytes.is_multiple_of(ELEMENT as u64);
    if !aligned(described.offset) || !described.strides.iter().all(|stride| aligned(*stride)) {
        return Err(Failure::bad(ALIGNMENT));
    }
    let bounds = Failure::bad(BOUNDS);
    let mut bytes = u64::from(row) * ELEMENT as u64;
    for (stride, count) in described.strides.iter().zip(counts) {
        let last = u64::from(count.saturating_sub(1));
        let reach = stride.checked_mul(last).ok_or(bounds)?;
        bytes = bytes.checked_add(reach).ok_or(bounds)?;
    }
    Ok(bytes)
}

/// Rows that a command names: their place, elements of a row, and the numbers of indices in the
/// outer dimensions, which are not 0.
pub(super) type NamedRows<'a> = (&'a RowsF32, u32, [u32; 3]);

/// Checks that results and sources are aligned, that rows of results share nothing, and that
/// sources share nothing with them. Buffers are identified by their numbers.
pub(super) fn accepts_rows<const N: usize>(
    dst: NamedRows<'_>,
    sources: [NamedRows<'_>; N],
) -> Result<(), Failure> {
    let span = |(described, row, counts): NamedRows<'_>| {
        let bytes = rows_bytes(described, row, counts)?;
        let end = described.offset.checked_add(bytes);
        Ok::<_, Failure>(described.offset..end.ok_or(Failure::bad(BOUNDS))?)
    };
    let results = span(dst)?;
    let (described, row, counts) = dst;
    Strided::new(described, row, counts)?.disjoint()?;
    for source in sources {
        let operand = span(source)?;
        let apart = operand.end <= results.start || results.end <= operand.start;
        if source.0.buffer == described.buffer && !apart {
            return Err(BindError::Overlap.into());
        }
    }
    Ok(())
}

impl Strided {
    fn new(described: &RowsF32, row: u32, counts: [u32; 3]) -> Result<Self, Failure> {
        let bounds = Failure::bad(BOUNDS);
        let mut rows = Self {
            row: usize::try_from(row).map_err(|_| bounds)?,
            counts: [1; 3],
            strides: [0; 3],
        };
        for (i, (stride, count)) in described.strides.into_iter().zip(counts).enumerate() {
            rows.counts[i] = usize::try_from(count).map_err(|_| bounds)?;
            // A dimension of one index uses no stride, and its stride may be too large for a word.
            if count > 1 {
                let stride = stride / ELEMENT as u64;
                rows.strides[i] = usize::try_from(stride).map_err(|_| bounds)?;
            }
        }
        Ok(rows)
    }

    /// Refuses rows that share elements. With the dimensions sorted by stride, the stride of each
    /// dimension must be at least the extent of all smaller ones together.
    pub(super) fn disjoint(&self) -> Result<(), Failure> {
        let mut order = [0, 1, 2];
        order.sort_unstable_by_key(|i| self.strides[*i]);
        let mut extent = self.row;
        for i in order.into_iter().filter(|i| self.counts[*i] > 1) {
            if self.strides[i] < extent {
                return Err(Failure::bad(ROWS));
            }
            // This cannot overflow: the bytes of all rows were counted before.
            extent += self.strides[i] * (self.counts[i] - 1);
        }
        Ok(())
    }

    /// Returns `true` if dimension `outer` continues where `count` rows, `step` elements apart,
    /// end.
    pub(super) fn continues(&self, outer: usize, count: usize, step: usize) -> bool {
        self.counts[outer] == 1 || Some(self.strides[outer]) == step.checked_mul(count)
    }

    /// Calls `f` with each range of bytes that holds rows without a gap, if the first element is at
    /// byte `first`.
    fn runs(&self, first: usize, mut f: impl FnMut(Range<usize>)) {
        // A stride of 0 only repeats the same rows.
        let count = |i: usize| {
            if self.strides[i] == 0 {
                1
            } else {
                self.counts[i]
            }
        };
        let gapless = count(0) == 1 || self.strides[0] == self.row;
        let (rows, steps) = if gapless {
            (count(0), 1)
        } else {
            (1, count(0))
        };
        let bytes = ((rows - 1) * self.strides[0] + self.row) * ELEMENT;
        for i3 in 0..count(2) {
            for i2 in 0..count(1) {
                for i1 in 0..steps {
                    let at = i3 * self.strides[2] + i2 * self.strides[1] + i1 * self.strides[0];
                    let start = first + at * ELEMENT;
                    f(start..start + bytes);
                }
            }
        }
    }
}
