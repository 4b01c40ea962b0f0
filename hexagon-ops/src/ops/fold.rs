//! Products of rows with 32 columns, without sums across lanes.
//!
//! Folding adds the halves of two vectors, so that one vector holds both; five folds of 32 vectors give their 32 sums in
//! lanes.

use crate::hvx::{self, Accumulator, Vector, add_f32, fold_f32, splat_w};
use crate::layout::Line;

/// Columns.
const COLUMNS: usize = 32;

/// Adds to each lane the product of a row and a column.
pub(super) struct Products<'a> {
    /// Rows of f32, one after another, as long as columns.
    pub(super) rows: &'a [Line],
    /// 32 columns of f32, one after another.
    pub(super) columns: &'a [Line],
    /// For each row: 32 sums.
    pub(super) sums: &'a mut [Line],
}

impl hvx::Kernel for Products<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(mut self) {
        let lines = self.columns.len() / COLUMNS;
        let sums = core::mem::take(&mut self.sums);
        for (row, sum) in self.rows.chunks_exact(lines).zip(sums) {
            // Pairs whose numbers differ in bit 2, then 1, then 0: the order in which the last folds want them.
            let a = fold_f32::<4>(self.group(row, 0), self.group(row, 4));
            let b = fold_f32::<4>(self.group(row, 2), self.group(row, 6));
            let even = fold_f32::<2>(a, b);
            let a = fold_f32::<4>(self.group(row, 1), self.group(row, 5));
            let b = fold_f32::<4>(self.group(row, 3), self.group(row, 7));
            let folded = fold_f32::<1>(even, fold_f32::<2>(a, b));
            hvx::store(sum, add_f32(hvx::load(sum), folded));
        }
    }
}

impl Products<'_> {
    /// The products with columns g, g + 8, g + 16 and g + 24, folded twice: their sums are behind or between each other.
    #[inline(always)]
    fn group(&self, row: &[Line], g: usize) -> Vector {
        let lines = row.len();
        let stride = COLUMNS / 4 * lines;
        let columns = &self.columns[g * lines..];
        let low = fold_f32::<16>(dot(row, columns), dot(row, &columns[2 * stride..]));
        let high = fold_f32::<16>(
            dot(row, &columns[stride..]),
            dot(row, &columns[3 * stride..]),
        );
        fold_f32::<8>(low, high)
    }
}

/// Products of a row and the column that `column` starts with, in 32 lanes.
#[inline(always)]
fn dot(row: &[Line], column: &[Line]) -> Vector {
    let mut sum = Accumulator::from_f32(splat_w(0));
    for (row, column) in row.iter().zip(column) {
        sum = sum.mul_add(hvx::load(row), hvx::load(column));
    }
    sum.to_f32()
}
