//! Rows of results, as kernels write them.

use super::convert;
use super::shape::{Shape, Type};
use crate::error::{Error, Result};
use crate::hvx;

/// A row of a result, or a part of its columns.
#[derive(Debug)]
pub struct Row<'a> {
    /// The row's bytes, from its first to its last.
    pub(super) bytes: &'a mut [u8],
    pub(super) shape: &'a Shape,
    /// Index of the row in dimensions 1, 2 and 3.
    pub at: [usize; 3],
    /// Column of the tensor's row at which this part of it starts; 0 unless the kernel processes
    /// parts of rows.
    pub first: usize,
}

impl Row<'_> {
    /// Returns the number of elements of the row.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shape.ne[0]
    }

    /// Returns `true` if there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the result's type.
    #[must_use]
    pub fn dtype(&self) -> Type {
        self.shape.dtype
    }

    /// Writes elements starting at `k`, rounded to the result's type.
    #[inline(always)]
    pub fn write(&mut self, k: usize, elems: &[f32]) {
        convert::write(self.shape, self.bytes, k, elems);
    }

    /// Returns the elements, if they are f32 without gaps.
    pub fn floats(&mut self) -> Option<&mut [f32]> {
        if self.shape.dtype != Type::F32 || !self.shape.has_dense_rows() {
            return None;
        }
        bytemuck::try_cast_slice_mut(self.bytes).ok()
    }

    /// Returns the elements of a row of i32 without gaps.
    ///
    /// # Errors
    /// `Operand` if the row has another type or gaps.
    pub fn words(&mut self) -> Result<&mut [i32]> {
        if self.shape.dtype != Type::I32 || !self.shape.has_dense_rows() {
            return Err(Error::Operand);
        }
        bytemuck::try_cast_slice_mut(self.bytes).map_err(|_| Error::Operand)
    }

    /// Writes the first element of a row of i64.
    pub fn write_number(&mut self, number: i64) {
        if let (Type::I64, Some(bytes)) = (self.shape.dtype, self.bytes.first_chunk_mut()) {
            *bytes = number.to_le_bytes();
        }
    }

    /// Reads elements starting at `k` that have been written before.
    #[inline(always)]
    pub fn read_back(&self, k: usize, elems: &mut [f32]) {
        convert::read(self.shape, self.bytes, k, elems);
    }
}

/// Rows of a result whose indices differ only in dimension 1.
#[derive(Debug)]
pub struct Run<'a> {
    /// The bytes from the first row's first to the last row's last.
    pub(super) bytes: &'a mut [u8],
    pub(super) shape: &'a Shape,
    /// Indices of the first row in dimensions 1, 2 and 3.
    pub at: [usize; 3],
    /// Number of rows.
    pub count: usize,
}

impl Run<'_> {
    /// Returns the number of elements of a row.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "rows have elements")]
    pub fn len(&self) -> usize {
        self.shape.ne[0]
    }

    /// Returns the elements and the number of elements from one row to the next, if rows are f32
    /// without gaps inside.
    pub fn floats(&mut self) -> Option<(&mut [f32], usize)> {
        let stride = float_stride(self.shape)?;
        Some((bytemuck::try_cast_slice_mut(self.bytes).ok()?, stride))
    }

    /// Writes `count` rows starting with row `first`, rounded, of elements that are `step` apart;
    /// returns `false` and writes nothing unless rows are f16 without gaps inside, of a multiple of
    /// 64 elements, or rows of 32 elements without gaps between them.
    pub fn narrow(&mut self, first: usize, count: usize, (elems, step): (&[f32], usize)) -> bool {
        let (shape, stride) = (self.shape, self.shape.nb[1]);
        let n = shape.ne[0];
        let are_pairs = n == 32 && stride == 64;
        let fits = are_pairs || n.is_multiple_of(64);
        if shape.dtype != Type::F16 || !shape.has_dense_rows() || !fits {
            return false;
        }
        if are_pairs {
            let range = first * stride..(first + count) * stride;
            let bytes = self.bytes.get_mut(range).unwrap_or_default();
            let (out, last) = bytes.as_chunks_mut();
            hvx::widest(convert::NarrowPairs {
                elems: (elems, step),
                out,
            });
            if !last.is_empty() {
                let row = elems.get((count - 1) * step..).unwrap_or_default();
                convert::write(shape, last, 0, row.get(..n).unwrap_or_default());
            }
            return true;
        }
        let out = self.bytes.get_mut(first * stride..).unwrap_or_default();
        hvx::widest(convert::NarrowRows {
            elems: (elems, step),
            out: (out, stride),
            n,
            count,
        });
        true
    }

    /// Calls `f` with each row.
    pub fn for_each_row(&mut self, mut f: impl FnMut(Row<'_>)) {
        let length = self.shape.row_bytes();
        for i in 0..self.count {
            let start = i * self.shape.nb[1];
            if let Some(bytes) = self.bytes.get_mut(start..start + length) {
                let [i1, i2, i3] = self.at;
                f(Row {
                    bytes,
                    shape: self.shape,
                    at: [i1 + i, i2, i3],
                    first: 0,
                });
            }
        }
    }
}

/// Returns the elements from one row to the next of a tensor of f32 without gaps inside rows.
pub(super) fn float_stride(shape: &Shape) -> Option<usize> {
    let stride = shape.nb[1];
    let fits = shape.dtype == Type::F32 && shape.has_dense_rows() && stride.is_multiple_of(4);
    fits.then_some(stride / 4)
}
