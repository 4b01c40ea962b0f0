//! Rows of equal length, one after another, of which each task writes its own columns.

use core::marker::PhantomData;
use core::ops::Range;

/// The same range of columns of every row.
///
/// A slice can only be cut between rows. A task that computes some heads of all tokens writes a
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

// SAFETY: as `&mut [f32]`: the elements belong to this value alone, because `new` borrows all of
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

    /// Splits the first `count` columns off, or as many as there are.
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
        // SAFETY: `index` is a row of the borrowed slice, and the columns lie inside a row.
        let first = unsafe { self.base.add(start) };
        // SAFETY: in bounds as above; no other value has these columns, and `self` is borrowed
        // mutably for as long as the slice lives.
        unsafe { core::slice::from_raw_parts_mut(first, self.columns.len()) }
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
}
