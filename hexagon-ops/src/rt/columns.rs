//! Rows of equal length, one after another; each task writes different columns of all rows.

use core::marker::PhantomData;
use core::ops::Range;

/// A range of columns, the same in every row.
///
/// A slice can only be divided between rows. A task that computes some heads of all tokens writes a
/// part of each row, and no other task writes that part.
#[derive(Debug)]
pub struct SharedColumns<'a> {
    /// Element 0 of row 0.
    base: *mut f32,
    rows: usize,
    /// Elements of a whole row.
    row_elems: usize,
    /// The columns of this value.
    columns: Range<usize>,
    life: PhantomData<&'a mut [f32]>,
}

// SAFETY: as `&mut [f32]`. The elements belong to this value alone, because `new` borrows all of
// them and `split_off` gives each column to one value.
unsafe impl Send for SharedColumns<'_> {}

impl<'a> SharedColumns<'a> {
    /// Returns all columns of the whole rows that `elems` has.
    #[must_use]
    pub fn new(elems: &'a mut [f32], row_elems: usize) -> Self {
        Self {
            rows: elems.len().checked_div(row_elems).unwrap_or(0),
            base: elems.as_mut_ptr(),
            row_elems,
            columns: 0..row_elems,
            life: PhantomData,
        }
    }

    /// Splits off the first `count` columns, or all if there are fewer.
    #[must_use]
    pub fn split_off(&mut self, count: usize) -> Self {
        let middle = self.columns.end.min(self.columns.start + count);
        let columns = self.columns.start..middle;
        self.columns.start = middle;
        Self { columns, ..*self }
    }

    /// Returns these columns of row `index`; none past the last row.
    pub fn row(&mut self, index: usize) -> &mut [f32] {
        if index >= self.rows {
            return &mut [];
        }
        let start = index * self.row_elems + self.columns.start;
        // SAFETY: `index` is a row of the borrowed slice, and the columns are inside the row.
        let first = unsafe { self.base.add(start) };
        // SAFETY: in bounds as above; no other value has these columns, and `self` is borrowed
        // mutably for as long as the slice lives.
        unsafe { core::slice::from_raw_parts_mut(first, self.columns.len()) }
    }

    /// Returns `N` elements of each of `ROWS` rows, starting at column `column` of this value and
    /// at row `first`; `None` if there are fewer.
    #[inline(always)]
    pub fn squares<const N: usize, const ROWS: usize>(
        &mut self,
        first: usize,
        column: usize,
    ) -> Option<[&mut [f32; N]; ROWS]> {
        let end = column.checked_add(N)?;
        if end > self.columns.len() || first.checked_add(ROWS)? > self.rows {
            return None;
        }
        let start = first * self.row_elems + self.columns.start + column;
        Some(core::array::from_fn(|row| {
            let at = self.base.wrapping_add(start + row * self.row_elems);
            // SAFETY: in bounds by the check above, which also covers the last row. No other value
            // has these columns, `self` is borrowed mutably for as long as the elements are, and
            // columns of different rows are disjoint.
            unsafe { &mut *at.cast::<[f32; N]>() }
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_disjoint_and_cover_all_rows() {
        let mut elems = vec![0.0; 3 * 10 + 4];
        let mut rest = SharedColumns::new(&mut elems, 10);
        let mut parts: Vec<SharedColumns<'_>> = [3, 0, 5, 9].map(|n| rest.split_off(n)).into();
        parts.push(rest);
        std::thread::scope(|scope| {
            for (value, part) in (1..).map(f32::from as fn(u8) -> f32).zip(&mut parts) {
                scope.spawn(move || (0..4).for_each(|row| part.row(row).fill(value)));
            }
        });
        let row = [1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0, 3.0, 4.0, 4.0];
        let want = [row, row, row].concat();
        assert_eq!(elems[..30], want);
        assert_eq!(elems[30..], [0.0; 4], "rows that are not whole stay");
        assert!(SharedColumns::new(&mut [], 0).row(0).is_empty());
    }

    #[test]
    fn squares_are_columns_of_rows_that_follow_each_other() {
        let mut elems: Vec<f32> = (0_u8..40).map(f32::from).collect();
        let mut rest = SharedColumns::new(&mut elems, 10);
        let _ = rest.split_off(3);
        let mut part = rest.split_off(5);
        assert_eq!(
            part.squares::<2, 3>(1, 3),
            Some([&mut [16.0, 17.0], &mut [26.0, 27.0], &mut [36.0, 37.0]])
        );
        for (first, column) in [(2, 3), (1, 4), (usize::MAX, 0), (0, usize::MAX)] {
            assert_eq!(part.squares::<2, 3>(first, column), None);
        }
    }
}
