//! Access by byte or element offsets, for kernels that compute the places of many rows themselves:
//! indices are below the dimensions, and no division is needed.

use super::{Type, View, ViewMut};
use crate::hvx::StridedVectors;

impl<'a> View<'a> {
    /// Returns the byte at which row `at` starts; indices are below the dimensions.
    #[must_use]
    #[inline(always)]
    pub fn offset(&self, [i1, i2, i3]: [usize; 3]) -> usize {
        let [_, nb1, nb2, nb3] = self.shape.nb;
        i1 * nb1 + i2 * nb2 + i3 * nb3
    }

    /// Returns vectors at `count` places, starting `offset` bytes after the first element, each a
    /// row of dimension 1 after the one before; `None` if one would end after the tensor's memory.
    #[must_use]
    #[inline(always)]
    pub fn strided<const WIDTH: usize>(
        &self,
        offset: usize,
        count: usize,
    ) -> Option<StridedVectors<'a, WIDTH>> {
        StridedVectors::new(self.tail(offset), self.shape.nb[1], count)
    }

    /// Returns all elements, with those between rows, and the distances of rows in dimensions 1 and
    /// 2 as numbers of elements, if they are f32 without gaps inside rows.
    #[must_use]
    pub fn all_floats(&self) -> Option<(&'a [f32], [usize; 2])> {
        let shape = &self.shape;
        let strides = [shape.nb[1], shape.nb[2]];
        let fits = shape.dtype == Type::F32 && shape.has_dense_rows();
        if !fits || strides.iter().any(|nb| !nb.is_multiple_of(4)) {
            return None;
        }
        let bytes = self.tail(0).get(..shape.bytes()?)?;
        Some((
            bytemuck::try_cast_slice(bytes).ok()?,
            strides.map(|nb| nb / 4),
        ))
    }

    /// Returns the row that starts at byte `offset`, if it is f32 without gaps.
    #[must_use]
    #[inline(always)]
    pub fn floats_at(&self, offset: usize) -> Option<&'a [f32]> {
        if self.shape.dtype != Type::F32 || !self.shape.has_dense_rows() {
            return None;
        }
        let bytes = self.tail(offset).get(..4 * self.shape.ne[0])?;
        bytemuck::try_cast_slice(bytes).ok()
    }
}

impl ViewMut<'_> {
    /// Returns all elements, and their distances in dimensions 1 to 3 as numbers of elements, if
    /// they are f32 without gaps inside rows and this is the whole tensor.
    pub fn floats(&mut self) -> Option<(&mut [f32], [usize; 3])> {
        let shape = &self.shape;
        let [_, strides @ ..] = shape.nb;
        let is_whole = self.base == 0 && self.rows.len() == shape.ne[1] * shape.ne[2] * shape.ne[3];
        let fits = shape.dtype == Type::F32 && shape.has_dense_rows();
        if !(fits && is_whole && strides.iter().all(|nb| nb.is_multiple_of(4))) {
            return None;
        }
        let elems = bytemuck::try_cast_slice_mut(self.bytes).ok()?;
        Some((elems, strides.map(|nb| nb / 4)))
    }
}
