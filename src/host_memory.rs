//! Memory that ggml owns: its tensors. Only this module turns their addresses into slices.
//!
//! A [`Region`] or [`RegionMut`] is a promise made at the C interface (`abi`): for the lifetime
//! `'a` of one call, these bytes stay valid, and nothing else writes them, or reads those of a
//! `RegionMut`. The modules above work with bounds-checked slices and with [`RowsMut`], whose
//! pieces are disjoint by construction.
#![expect(unsafe_code, reason = "addresses from C become slices here")]

use std::marker::PhantomData;
use std::ops::Range;

use half::f16;
use memmap2::MmapMut;
use rknpu_ops::pack::{OutputRows, Rows};

use crate::tensor::DType;

/// Zeroed memory that occupies space as it is written, and that can be freed in parts.
#[derive(Debug)]
pub struct Pages(MmapMut);

/// Parts that are given back begin and end at multiples of this many bytes: the largest page of a
/// Linux on aarch64.
const RELEASE_ALIGN: usize = 65536;

impl Pages {
    /// Reserves `bytes`.
    ///
    /// # Errors
    /// The system's error.
    pub fn new(bytes: usize) -> std::io::Result<Self> {
        MmapMut::map_anon(bytes).map(Self)
    }

    /// Returns the bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns the bytes, to write.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }

    /// Returns the whole pages of a range to the system; their bytes become zeros.
    ///
    /// # Errors
    /// The system's error.
    pub fn release(&mut self, range: Range<usize>) -> std::io::Result<()> {
        let start = range.start.next_multiple_of(RELEASE_ALIGN);
        let end = range.end.min(self.0.len()) / RELEASE_ALIGN * RELEASE_ALIGN;
        if start >= end {
            return Ok(());
        }
        // A mapping starts at a page, so the range covers whole pages of any size that divides its
        // alignment.
        os::memory::release(&mut self.0, start, end - start)
    }
}

/// Bytes of an operand, from its first element to the end of its last.
#[derive(Clone, Copy, Debug)]
pub struct Region<'a>(&'a [u8]);

impl<'a> From<&'a [u8]> for Region<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }
}

impl<'a> Region<'a> {
    /// Describes `len` bytes at `base`.
    ///
    /// # Safety
    /// For all of `'a`, `len` bytes at `base` are initialized and valid for reads, and nothing
    /// writes them.
    #[must_use]
    pub unsafe fn new(base: *const u8, len: usize) -> Self {
        if base.is_null() || len == 0 {
            return Self(&[]);
        }
        // SAFETY: guaranteed by the caller.
        Self(unsafe { std::slice::from_raw_parts(base, len) })
    }

    /// Returns the bytes `[offset, offset + len)`.
    ///
    /// # Panics
    /// If the range is not inside: the planner checked the shape against the region.
    #[must_use]
    pub fn bytes(&self, offset: usize, len: usize) -> &'a [u8] {
        &self.0[offset..][..len]
    }

    /// Returns `count` rows of `k` elements as F32, and whether they are in place; they start at
    /// `offset` and are `stride_bytes` apart. Rows of aligned floats that do not overlap are in
    /// place, others are converted into `scratch`.
    ///
    /// # Panics
    /// If a row is not inside, or if `dtype` is not F32 or F16, the only types that the planner
    /// admits.
    #[must_use]
    pub fn rows<'s>(
        &self,
        offset: usize,
        dtype: DType,
        size: [usize; 2],
        stride_bytes: usize,
        scratch: &'s mut Vec<f32>,
    ) -> (Rows<'s, f32>, bool)
    where
        'a: 's,
    {
        if dtype == DType::F32
            && let Some(rows) = self.rows_in_place(offset, size, stride_bytes)
        {
            return (rows, true);
        }
        let [count, k] = size;
        scratch.resize(count * k, 0.0);
        for (m, row) in scratch.chunks_exact_mut(k).enumerate() {
            let start = offset + m * stride_bytes;
            match dtype {
                DType::F32 => {
                    bytemuck::cast_slice_mut(row).copy_from_slice(self.bytes(start, k * 4))
                }
                DType::F16 => {
                    for (value, pair) in
                        row.iter_mut().zip(self.bytes(start, k * 2).chunks_exact(2))
                    {
                        *value = f16::from_le_bytes([pair[0], pair[1]]).to_f32();
                    }
                }
                other => unreachable!("activations of type {other:?} are refused by the planner"),
            }
        }
        (Rows::new(scratch, count, k, k), false)
    }

    fn rows_in_place(
        &self,
        offset: usize,
        [count, k]: [usize; 2],
        stride_bytes: usize,
    ) -> Option<Rows<'a, f32>> {
        let apart = count <= 1 || stride_bytes >= k * 4;
        if !apart || !stride_bytes.is_multiple_of(4) {
            return None;
        }
        let bytes = &self.0[offset..];
        let floats = bytemuck::try_cast_slice(&bytes[..bytes.len() / 4 * 4]).ok()?;
        Some(Rows::new(floats, count, k, stride_bytes / 4))
    }
}

/// Bytes of a result, from its first element to the end of its last. Nothing else accesses them
/// during its life.
#[derive(Debug)]
pub struct RegionMut<'a> {
    base: *mut u8,
    len: usize,
    owner: PhantomData<&'a mut [u8]>,
}

impl<'a> From<&'a mut [f32]> for RegionMut<'a> {
    fn from(floats: &'a mut [f32]) -> Self {
        Self {
            base: floats.as_mut_ptr().cast(),
            len: size_of_val(floats),
            owner: PhantomData,
        }
    }
}

impl RegionMut<'_> {
    /// Describes `len` bytes at `base`.
    ///
    /// # Safety
    /// For all of `'a`, `len` bytes at `base` are valid for writes, and nothing else reads or
    /// writes them.
    #[must_use]
    pub unsafe fn new(base: *mut u8, len: usize) -> Self {
        Self {
            base,
            len,
            owner: PhantomData,
        }
    }

    /// Returns `true` if the first byte has the alignment of a float.
    #[must_use]
    pub fn is_aligned(&self) -> bool {
        self.base.cast::<f32>().is_aligned()
    }

    /// Returns the addresses of all bytes.
    #[must_use]
    pub fn addresses(&self) -> Range<usize> {
        let start = self.base.addr();
        start..start + self.len
    }

    /// Returns `count` rows of `width` floats to write; they start at `offset` and are
    /// `stride_bytes` apart.
    ///
    /// # Panics
    /// If the rows are not inside, overlap, or are not aligned to 4 bytes. The planner checks the
    /// shape, and the caller calls [`Self::is_aligned`].
    #[must_use]
    pub fn rows(
        &mut self,
        offset: usize,
        [count, width]: [usize; 2],
        stride_bytes: usize,
    ) -> RowsMut<'_> {
        let end = count
            .checked_sub(1)
            .map_or(0, |last| offset + last * stride_bytes + width * 4);
        assert!(end <= self.len, "write behind the end of a tensor");
        assert!(
            count <= 1 || stride_bytes >= width * 4,
            "rows of a result overlap"
        );
        let base = self.base.wrapping_add(offset).cast::<f32>();
        assert!(
            base.is_aligned() && stride_bytes.is_multiple_of(4),
            "result is not aligned to its element"
        );
        RowsMut {
            base,
            rows: count,
            width,
            stride: stride_bytes / 4,
            owner: PhantomData,
        }
    }

    /// Writes one row at `offset`.
    ///
    /// # Panics
    /// As [`RegionMut::rows`].
    pub fn write_row(&mut self, offset: usize, row: &[f32]) {
        self.rows(offset, [1, row.len()], 0)
            .row(0)
            .copy_from_slice(row);
    }
}

/// Rows of a result, or a range of their columns. Can be split into disjoint column ranges, one for
/// each core.
#[derive(Debug)]
pub struct RowsMut<'a> {
    base: *mut f32,
    rows: usize,
    width: usize,
    stride: usize,
    owner: PhantomData<&'a mut [f32]>,
}

// SAFETY: a RegionMut is the only access to its bytes (`RegionMut::new`), like a `&mut [u8]`.
unsafe impl Send for RegionMut<'_> {}

// SAFETY: a RowsMut is the only access to its elements (`RegionMut::rows`, `split_columns`), like a
// `&mut [f32]`.
unsafe impl Send for RowsMut<'_> {}

impl RowsMut<'_> {
    /// Returns the bytes from the first element to the end of the last one.
    #[must_use]
    pub fn addresses(&self) -> Range<usize> {
        let elements = self
            .rows
            .checked_sub(1)
            .map_or(0, |last| last * self.stride + self.width);
        let start = self.base.addr();
        start..start + elements * size_of::<f32>()
    }

    /// Lends all columns.
    #[must_use]
    pub fn reborrow(&mut self) -> RowsMut<'_> {
        RowsMut { ..*self }
    }

    /// Splits off the first `width` columns; the rest stays in `self`.
    ///
    /// # Panics
    /// If there are fewer columns than that.
    #[must_use]
    pub fn split_columns(&mut self, width: usize) -> Self {
        assert!(width <= self.width, "split behind the last column");
        let first = Self {
            base: self.base,
            rows: self.rows,
            width,
            stride: self.stride,
            owner: PhantomData,
        };
        self.base = self.base.wrapping_add(width);
        self.width -= width;
        first
    }
}

impl OutputRows for RowsMut<'_> {
    fn row(&mut self, m: usize) -> &mut [f32] {
        assert!(m < self.rows, "row {m} of {}", self.rows);
        let start = self.base.wrapping_add(m * self.stride);
        // SAFETY: the row is inside the region (`RegionMut::rows`), aligned, and only reachable
        // through this `&mut self`, because column ranges of different RowsMut are disjoint.
        unsafe { std::slice::from_raw_parts_mut(start, self.width) }
    }
}

/// Returns the free and total bytes of the system's memory; 0 if the kernel does not report them.
#[must_use]
pub fn system_memory() -> (usize, usize) {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace()
            .next()?
            .parse::<usize>()
            .ok()
            .map(|kib| kib * 1024)
    };
    (
        field("MemAvailable:").unwrap_or(0),
        field("MemTotal:").unwrap_or(0),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn column_ranges_write_their_own_columns_and_nothing_between_rows() {
        let mut memory = [0.0f32; 3 * 8];
        let mut region = RegionMut::from(&mut memory[..]);
        let mut rest = region.rows(4, [3, 6], 32);
        let mut first = rest.split_columns(2);
        for m in 0..3 {
            first.row(m).fill(1.0);
            rest.row(m).fill(2.0);
        }
        for row in memory.chunks(8) {
            assert_eq!(row, [0.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 0.0]);
        }
    }

    #[test]
    fn pages_that_are_released_are_zeros_and_their_neighbours_stay() {
        let page = RELEASE_ALIGN;
        let mut pages = Pages::new(4 * page).unwrap();
        pages.bytes_mut().fill(7);
        pages.release(page - 1..3 * page + 5).unwrap();
        pages.release(10..page - 10).unwrap();
        let (zeros, sevens): (Vec<usize>, Vec<usize>) =
            (0..4 * page).partition(|at| pages.bytes()[*at] == 0);
        assert_eq!(zeros, (page..3 * page).collect::<Vec<_>>());
        assert!(sevens.iter().all(|at| pages.bytes()[*at] == 7));
        pages.bytes_mut()[page] = 9;
        assert_eq!(pages.bytes()[page], 9);
    }

    #[test]
    #[should_panic(expected = "write behind the end")]
    fn rows_behind_the_end_are_refused() {
        let mut memory = [0.0f32; 8];
        let mut region = RegionMut::from(&mut memory[..]);
        let _ = region.rows(0, [2, 5], 20);
    }

    #[test]
    fn rows_that_are_not_aligned_floats_or_overlap_are_converted() {
        let bytes: Vec<u8> = [1.5f32, -2.0, 3.0, 4.0]
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect();
        let mut shifted = vec![0u8];
        shifted.extend(&bytes);
        let [aligned, unaligned] = [&bytes, &shifted].map(|bytes| Region(bytes));
        let scratch = &mut Vec::new();
        for (region, offset, stride, expected) in [
            (aligned, 0, 8, ([1.5, -2.0, 3.0, 4.0], true)),
            (unaligned, 1, 8, ([1.5, -2.0, 3.0, 4.0], false)),
            // A window that moves on by one element.
            (aligned, 0, 4, ([1.5, -2.0, -2.0, 3.0], false)),
        ] {
            let (rows, in_place) = region.rows(offset, DType::F32, [2, 2], stride, scratch);
            let values = [rows.row(0), rows.row(1)].concat();
            assert_eq!((&values[..], in_place), (&expected.0[..], expected.1));
        }
        let half: Vec<u8> = [0.5f32, 65504.0]
            .iter()
            .flat_map(|x| f16::from_f32(*x).to_le_bytes())
            .collect();
        let (row, in_place) = Region(&half).rows(0, DType::F16, [1, 2], 4, scratch);
        assert_eq!((row.row(0), in_place), (&[0.5, 65504.0][..], false));
    }
}
