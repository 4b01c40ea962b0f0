//! Tensors with ggml's dimensions and strides: reading any type as f32, and rows of results that
//! tasks write at the same time.
//!
//! Kernels process a row in chunks of [`CHUNK`] elements. A source is either separate from the
//! result, possibly shared with other sources, or it is the result itself (in place). In place, a
//! chunk is read before it is written, and a task reads only the row that it writes.
//!
//! Rows of a result are disjoint. In the order of their strides they are therefore consecutive in
//! memory, and a range of rows is a slice: this is how the tasks of a step share one result.

use core::ops::Range;

use crate::error::{Error, Result};
use crate::rt::cache;

mod block;
mod convert;
mod dense;
mod lines;
mod raw;
mod row;
mod shape;
mod super_block;
mod tasks;

pub(in crate::ops) use lines::first_halves;
pub use raw::Columns;
use row::float_stride;
pub use row::{Row, Run};
pub use shape::{Shape, Type, divides};
pub use tasks::{ARITHMETIC, FUNCTION, MOVE, SCALAR, TASK_PACKETS, row_packets};

/// Elements of a chunk, the unit in which a kernel reads and writes a row.
pub const CHUNK: usize = 256;
/// Fewest bytes that are worth a prefetch: with the computation of its address it costs as much as
/// reading a kilobyte from the cache.
const FETCH_BYTES: usize = 2048;
/// Memory of a chunk.
pub type Chunk = [f32; CHUNK];
/// Chunks of a task, shared by all of its rows, because clearing them costs as much as processing a
/// short row.
pub type Chunks = [Chunk; 4];

/// A tensor that is only read: `bytes` covers it from its first byte to its last.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    bytes: &'a [u8],
    /// Type, dimensions and strides.
    pub shape: Shape,
}

impl<'a> View<'a> {
    /// Returns a tensor whose first element is the first of `bytes`.
    ///
    /// # Errors
    /// `Length` if the tensor ends after `bytes`.
    pub fn new(bytes: &'a [u8], shape: Shape) -> Result<Self> {
        check_length(bytes.len(), &shape)?;
        Ok(Self { bytes, shape })
    }

    /// Returns a tensor without bytes, for kernels that only check their operands.
    #[must_use]
    pub const fn described(shape: Shape) -> Self {
        Self { bytes: &[], shape }
    }

    /// Returns a tensor that ends with `bytes`, which the caller has checked.
    #[must_use]
    #[inline(always)]
    pub(crate) const fn bound(bytes: &'a [u8], shape: Shape) -> Self {
        Self { bytes, shape }
    }

    /// Returns the bytes starting at an offset; none past the end.
    pub(in crate::ops) fn tail(&self, at: usize) -> &'a [u8] {
        self.bytes.get(at..).unwrap_or_default()
    }

    /// Returns the tensor with its rows as [`Shape::merged`] has them.
    #[must_use]
    pub fn merged(&self) -> Option<Self> {
        let shape = self.shape.merged()?;
        Some(Self { shape, ..*self })
    }

    /// Returns the tensor with the shape of a gapless tensor of the same bytes.
    #[must_use]
    pub fn reshaped(&self, shape: Shape) -> Self {
        Self { shape, ..*self }
    }

    /// Returns row `at` as a tensor.
    #[must_use]
    pub fn row(&self, at: [usize; 3]) -> Self {
        let mut shape = self.shape;
        shape.ne[1..].fill(1);
        shape.nb[1..].fill(0);
        Self {
            bytes: self.tail(self.shape.row(at)),
            shape,
        }
    }

    /// Returns the elements `range` (at most [`CHUNK`]) of row `at` as f32. Indices wrap around at
    /// the dimensions, which is how ggml repeats a tensor.
    #[inline(always)]
    pub fn read<'b>(&self, at: [usize; 3], range: Range<usize>, chunk: &'b mut Chunk) -> &'b [f32]
    where
        'a: 'b,
    {
        let n0 = self.shape.ne[0];
        let row = self.tail(self.shape.row(at));
        let start = if range.start < n0 {
            range.start
        } else {
            range.start % n0
        };
        let len = range.len().min(CHUNK);
        if self.shape.dtype == Type::F32 && self.shape.nb[0] == 4 && start + len <= n0 {
            let bytes = row.get(4 * start..4 * (start + len)).unwrap_or_default();
            if let Ok(elems) = bytemuck::try_cast_slice(bytes) {
                return elems;
            }
        }
        let (mut done, mut k) = (0, start);
        while done < len {
            let count = (len - done).min(n0 - k);
            convert::read(&self.shape, row, k, &mut chunk[done..done + count]);
            (done, k) = (done + count, 0);
        }
        &chunk[..len]
    }

    /// Returns the elements starting with row `at`, and the number of elements from one row to the
    /// next in dimension 1, if rows are f32 without gaps inside and `count` of them follow in
    /// dimension 1.
    pub fn float_rows(&self, at: [usize; 3], count: usize) -> Option<(&'a [f32], usize)> {
        let stride = float_stride(&self.shape).filter(|_| at[0] + count <= self.shape.ne[1])?;
        let bytes = (count - 1) * self.shape.nb[1] + self.shape.row_bytes();
        let elems = self.tail(self.shape.row(at)).get(..bytes)?;
        Some((bytemuck::try_cast_slice(elems).ok()?, stride))
    }

    /// Reads elements of row `at` as f32, starting with `first`. Indices of rows wrap around at the
    /// dimensions.
    #[inline(always)]
    pub fn read_row(&self, at: [usize; 3], first: usize, out: &mut [f32]) {
        convert::read(&self.shape, self.tail(self.shape.row(at)), first, out);
    }

    /// Prefetches `count` rows of dimension 1, starting with row `at`, if they exist and are so
    /// long that the processor would wait for them.
    #[inline(always)]
    pub fn fetch(&self, at: [usize; 3], count: usize) {
        if at[0] + count > self.shape.ne[1] {
            return;
        }
        let bytes = count * self.shape.row_bytes();
        if bytes >= FETCH_BYTES {
            let rows = self.tail(self.shape.row(at));
            cache::fetch(rows.as_ptr(), bytes.min(rows.len()));
        }
    }

    /// Returns an element of an f32 tensor; indices as in [`Self::read`].
    #[must_use]
    #[inline(always)]
    pub fn element(&self, k: usize, at: [usize; 3]) -> f32 {
        let offset = self.shape.row(at) + self.shape.column(k) * self.shape.nb[0];
        let bytes = self.tail(offset).first_chunk();
        bytes.map_or(0.0, |bytes| f32::from_le_bytes(*bytes))
    }

    /// Returns an element of an index tensor (i32 or i64); indices as in [`Self::read`]. Negative
    /// elements are not indices.
    #[must_use]
    pub fn index(&self, k: usize, at: [usize; 3]) -> i64 {
        // Most index tensors are lists, for which the row's address needs no computation.
        let row = if at[0] | at[1] | at[2] == 0 {
            0
        } else {
            self.shape.row(at)
        };
        let bytes = self.tail(row + self.shape.column(k) * self.shape.nb[0]);
        // An aligned index is loaded at once.
        match self.shape.dtype {
            Type::I64 => bytes.first_chunk::<8>().map_or(-1, |b| {
                let aligned = bytemuck::try_from_bytes(b).copied();
                aligned.unwrap_or_else(|_| i64::from_le_bytes(*b))
            }),
            Type::I32 => bytes.first_chunk::<4>().map_or(-1, |b| {
                let aligned = bytemuck::try_from_bytes(b).copied();
                i64::from(aligned.unwrap_or_else(|_| i32::from_le_bytes(*b)))
            }),
            _ => -1,
        }
    }
}

/// Memory from which a kernel reads a source.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// The operation has no such source.
    None,
    /// The result's own memory, type and strides.
    InPlace,
    /// Memory that shares no byte with the result.
    Apart(View<'a>),
}

impl<'a> Source<'a> {
    /// Returns the view, if the source is a separate tensor.
    ///
    /// # Errors
    /// `Operand` if it is absent or in place.
    pub fn apart(&self) -> Result<View<'a>> {
        match self {
            Self::Apart(view) => Ok(*view),
            _ => Err(Error::Operand),
        }
    }

    /// Returns the elements `range` of the part of a row as f32: of the row with the same indices,
    /// or of `row` itself if the source is in place. An absent source is empty.
    #[inline(always)]
    pub fn read<'b>(
        &'b self,
        row: &Row<'_>,
        range: Range<usize>,
        chunk: &'b mut Chunk,
    ) -> &'b [f32] {
        match self {
            Self::Apart(view) => {
                let (start, end) = (row.first + range.start, row.first + range.end);
                view.read(row.at, start..end, chunk)
            }
            Self::InPlace => {
                let len = range.len().min(CHUNK);
                convert::read(row.shape, row.bytes, range.start, &mut chunk[..len]);
                &chunk[..len]
            }
            Self::None => &[],
        }
    }
}

/// Prefetches the first row of a source while the processor reads another one. If there is a row
/// after that one, the fetch of that row ends this one.
#[inline(always)]
pub fn fetch_first(source: &Source<'_>) {
    if let Source::Apart(view) = source {
        view.fetch([0; 3], 1);
    }
}

/// Prefetches the rows of the sources after `row`, which the processor will read next.
#[inline(always)]
pub fn fetch_after(row: &Row<'_>, sources: &[&Source<'_>]) {
    if row.at[0] + 1 < row.shape.ne[1] {
        fetch_next(row.at, sources);
    }
}

/// Prefetches rows after the one at `at`. A fetch cancels the one before it, so up to three sources
/// alternate, each fetching as many rows as there are sources.
#[inline(never)]
fn fetch_next([i1, i2, i3]: [usize; 3], sources: &[&Source<'_>]) {
    let next = i1 + 1;
    let has_next =
        |view: &&View<'_>| next < view.shape.ne[1] && view.shape.row_bytes() >= FETCH_BYTES;
    let views = || {
        let views = sources.iter().filter_map(|source| match source {
            Source::Apart(view) => Some(view),
            _ => None,
        });
        views.filter(has_next)
    };
    let turns = views().count();
    // Only remainders by constants: other divisions are function calls on the DSP.
    let turn = match turns {
        0 | 1 => 0,
        2 => i1 % 2,
        _ => i1 % 3,
    };
    if let Some(view) = views().nth(turn) {
        view.fetch([next, i2, i3], turns.min(view.shape.ne[1] - next));
    }
}

/// A tensor that is written; its rows are disjoint.
#[derive(Debug)]
pub struct ViewMut<'a> {
    bytes: &'a mut [u8],
    /// Type, dimensions and strides.
    pub shape: Shape,
    /// Byte of the tensor at which `bytes` starts.
    base: usize,
    /// Dimensions less one, ordered by stride.
    order: [usize; 3],
    /// Rows that `bytes` holds, numbered in that order.
    rows: Range<usize>,
    /// Column of the whole tensor at which this part starts.
    first: usize,
}

impl<'a> ViewMut<'a> {
    /// Returns a tensor whose first element is the first of `bytes`.
    ///
    /// # Errors
    /// `Length` if the tensor ends after `bytes`; `Operand` if its elements overlap or rows are
    /// interleaved.
    pub fn new(bytes: &'a mut [u8], shape: Shape) -> Result<Self> {
        check_length(bytes.len(), &shape)?;
        let order = shape.row_order().ok_or(Error::Operand)?;
        Ok(Self {
            rows: 0..shape.ne[1] * shape.ne[2] * shape.ne[3],
            bytes,
            shape,
            base: 0,
            order,
            first: 0,
        })
    }

    /// Returns a tensor that ends with `bytes`, which the caller has checked, and has this
    /// [`Shape::row_order`].
    #[must_use]
    #[inline(always)]
    pub(crate) fn bound(bytes: &'a mut [u8], shape: Shape, order: [usize; 3]) -> Self {
        Self {
            rows: 0..shape.ne[1] * shape.ne[2] * shape.ne[3],
            bytes,
            shape,
            base: 0,
            order,
            first: 0,
        }
    }

    /// Returns all elements in ggml's order, if they are f32 without gaps.
    #[must_use]
    pub fn into_floats(self) -> Option<&'a mut [f32]> {
        if self.shape.dtype != Type::F32 || !self.shape.is_gapless() {
            return None;
        }
        bytemuck::try_cast_slice_mut(self.bytes).ok()
    }

    /// Returns the whole tensor with another shape of the same bytes: both are gapless, or it is
    /// [`Shape::merged`].
    #[must_use]
    pub fn reshaped(self, shape: Shape) -> Self {
        let n_rows = shape.ne[1] * shape.ne[2] * shape.ne[3];
        Self {
            shape,
            order: [0, 1, 2],
            rows: if self.rows.is_empty() {
                0..0
            } else {
                0..n_rows
            },
            ..self
        }
    }

    /// Returns the tensor of `shape` that starts at byte `offset` of this one, which is whole.
    ///
    /// # Errors
    /// `Operand` unless it ends where this tensor does, or before, and as [`Self::new`].
    pub fn part(&mut self, offset: usize, shape: Shape) -> Result<ViewMut<'_>> {
        let end = shape.bytes().and_then(|bytes| bytes.checked_add(offset));
        if end.is_none_or(|end| Some(end) > self.shape.bytes()) {
            return Err(Error::Operand);
        }
        if self.is_empty() {
            return ViewMut::described(shape);
        }
        let bytes = self.bytes.get_mut(offset..).unwrap_or_default();
        ViewMut::new(bytes, shape)
    }

    /// Returns the number of rows of this part.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Returns `true` if this part has no rows.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the column of the whole tensor at which this part starts.
    #[must_use]
    pub fn first(&self) -> usize {
        self.first
    }

    /// Returns `false` if this part has no row whose indices differ from `at` only in dimension 1;
    /// `true` also if that is not known.
    pub fn may_have(&self, at: [usize; 3]) -> bool {
        if self.order[0] != 0 {
            return true;
        }
        let first = self.number([0, at[1], at[2]]);
        first < self.rows.end && self.rows.start < first + self.shape.ne[1]
    }

    /// Returns the indices of row `index` of this part in dimensions 1, 2 and 3.
    #[must_use]
    pub fn place_of(&self, index: usize) -> [usize; 3] {
        self.place(self.rows.start + index)
    }

    /// Returns a tensor without bytes: kernels check their operands, and find no rows to write.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn described(shape: Shape) -> Result<Self> {
        Ok(Self {
            bytes: &mut [],
            shape,
            base: 0,
            order: shape.row_order().ok_or(Error::Operand)?,
            rows: 0..0,
            first: 0,
        })
    }

    /// Returns the indices of row `index` in dimensions 1, 2 and 3.
    fn place(&self, index: usize) -> [usize; 3] {
        let mut at = [0; 3];
        if index == 0 {
            return at;
        }
        let mut index = index;
        for dim in self.order {
            let count = self.shape.ne[dim + 1];
            if index < count {
                at[dim] = index;
                break;
            }
            at[dim] = index % count;
            index /= count;
        }
        at
    }

    /// Returns the number of the row with these indices.
    fn number(&self, at: [usize; 3]) -> usize {
        let [d0, d1, d2] = self.order;
        let ne = |dim: usize| self.shape.ne[dim + 1];
        (at[d2] * ne(d1) + at[d1]) * ne(d0) + at[d0]
    }

    /// Returns the row with these indices, if it belongs to this part.
    pub fn row(&mut self, at: [usize; 3]) -> Option<Row<'_>> {
        let inside = at.iter().zip(&self.shape.ne[1..]).all(|(i, n)| i < n);
        if !inside || !self.rows.contains(&self.number(at)) {
            return None;
        }
        let start = self.shape.row(at).checked_sub(self.base)?;
        let bytes = self.bytes.get_mut(start..start + self.shape.row_bytes())?;
        Some(Row {
            bytes,
            shape: &self.shape,
            at,
            first: self.first,
        })
    }

    /// Writes rows that differ only in dimension 1, starting with `at`; returns `false` and writes
    /// nothing unless they all belong to this part and have no gaps inside and between.
    pub fn write_rows(&mut self, at: [usize; 3], elems: &[f32]) -> bool {
        let range = self.dense_range(at, elems.len());
        let Some(bytes) = range.and_then(|range| self.bytes.get_mut(range)) else {
            return false;
        };
        // Type and element stride are those of a single row, so all rows are written as one.
        convert::write(&self.shape, bytes, 0, elems);
        true
    }

    /// Returns the bytes of `count` elements of floats in rows that differ only in dimension 1,
    /// starting with `at`; `None` unless they all belong to this part and have no gaps inside and
    /// between.
    pub fn rows_mut(&mut self, at: [usize; 3], count: usize) -> Option<&mut [u8]> {
        let range = self.dense_range(at, count)?;
        self.bytes.get_mut(range)
    }

    /// Returns the bytes of this part that [`Self::rows_mut`] returns.
    fn dense_range(&self, at: [usize; 3], count: usize) -> Option<Range<usize>> {
        let shape = &self.shape;
        let n = shape.ne[0];
        let is_dense =
            shape.dtype.is_float() && shape.has_dense_rows() && shape.nb[1] == shape.row_bytes();
        let inside = at.iter().zip(&shape.ne[1..]).all(|(i, n)| i < n);
        if !is_dense || !inside || self.order[0] != 0 {
            return None;
        }
        let first = self.number(at);
        // Rows follow each other in the order of their numbers, and a row has `n` elements.
        let fits = count <= (shape.ne[1] - at[0]) * n
            && self.rows.start <= first
            && count <= (self.rows.end - first.min(self.rows.end)) * n;
        let start = shape.row(at).wrapping_sub(self.base);
        let bytes = count * shape.dtype.block_bytes();
        fits.then_some(start..start.wrapping_add(bytes))
    }

    /// Calls `f` with each row of this part.
    pub fn for_each_row(&mut self, mut f: impl FnMut(Row<'_>)) {
        let mut at = self.place(self.rows.start);
        let length = self.shape.row_bytes();
        for _ in self.rows.clone() {
            let start = (at.iter().zip(&self.shape.nb[1..])).fold(0, |sum, (i, nb)| sum + i * nb);
            let start = start.wrapping_sub(self.base);
            if let Some(bytes) = self.bytes.get_mut(start..start.wrapping_add(length)) {
                f(Row {
                    bytes,
                    shape: &self.shape,
                    at,
                    first: self.first,
                });
            }
            // Advances to the next row without divisions, which are function calls on the DSP.
            for dim in self.order {
                at[dim] += 1;
                if at[dim] < self.shape.ne[dim + 1] {
                    break;
                }
                at[dim] = 0;
            }
        }
    }

    /// Calls `f` with the rows of this part, those together whose indices differ only in dimension
    /// 1 and that are consecutive.
    pub fn for_each_run(&mut self, mut f: impl FnMut(Run<'_>)) {
        let mut at = self.place(self.rows.start);
        let mut left = self.rows.len();
        let [fastest, ..] = self.order;
        while left > 0 {
            let count = match fastest {
                0 => (self.shape.ne[1] - at[0]).min(left),
                _ => 1,
            };
            let start = (at.iter().zip(&self.shape.nb[1..])).fold(0, |sum, (i, nb)| sum + i * nb);
            let bytes = (count - 1) * self.shape.nb[1] + self.shape.row_bytes();
            let start = start.wrapping_sub(self.base);
            if let Some(bytes) = self.bytes.get_mut(start..start.wrapping_add(bytes)) {
                f(Run {
                    bytes,
                    shape: &self.shape,
                    at,
                    count,
                });
            }
            left -= count;
            // Advances to the next run without divisions, which are function calls on the DSP.
            let mut step = count;
            for dim in self.order {
                at[dim] += step;
                if at[dim] < self.shape.ne[dim + 1] {
                    break;
                }
                at[dim] = 0;
                step = 1;
            }
        }
    }
}

/// Refuses bytes that end before the tensor does.
fn check_length(have: usize, shape: &Shape) -> Result<()> {
    let want = shape.bytes().ok_or(Error::Operand)?;
    if have < want {
        return Err(Error::Length {
            what: "tensor",
            have,
            want,
        });
    }
    Ok(())
}
