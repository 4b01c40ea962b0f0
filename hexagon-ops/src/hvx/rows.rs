//! Vectors of rows that have the same distance from each other, checked together.
//!
//! With a check for each row, the compiler would compute each row after the store of the one
//! before.

use super::{Vector, load_f32, store_f32};

/// Returns `true` if rows 0 to `count - 1`, `step` elements apart, are among `len` elements.
#[inline(always)]
fn fits(count: usize, step: usize, len: usize) -> bool {
    let last = step.checked_mul(count.saturating_sub(1));
    last.is_some_and(|last| last < len)
}

/// Groups of `N` rows that are inside of a slice.
#[derive(Clone, Copy)]
pub struct RowGroups<'a, const N: usize> {
    elems: &'a [[f32; 32]],
    step: usize,
    groups: usize,
}

impl<'a, const N: usize> RowGroups<'a, N> {
    /// Takes elements 0, `step`, 2 · `step` and so on as rows; `None` if there are fewer than
    /// `groups` groups, or no group.
    #[must_use]
    #[inline(always)]
    pub fn new(elems: &'a [[f32; 32]], step: usize, groups: usize) -> Option<Self> {
        let is_there = groups > 0 && fits(groups.checked_mul(N)?, step, elems.len());
        is_there.then_some(Self {
            elems,
            step,
            groups,
        })
    }

    /// Returns the rows of a group, as `vmemu` loads; those of the last one for any group after it.
    #[must_use]
    #[inline(always)]
    pub fn load(self, group: usize) -> [Vector; N] {
        let first = group.min(self.groups - 1) * N;
        let mut rows = [super::splat_w(0); N];
        for (i, row) in rows.iter_mut().enumerate() {
            // SAFETY: row `first + i` is one of the `groups · N` rows, and `fits` has checked the
            // last of them.
            *row = load_f32(unsafe { self.elems.get_unchecked((first + i) * self.step) });
        }
        rows
    }
}

/// Replaces `groups` groups of `N` rows, elements 0, `step`, 2 · `step` and so on, by `f` of a
/// group's number and its rows, as `vmemu` loads and stores. Returns `false` and changes nothing if
/// there are fewer.
#[must_use]
#[inline(always)]
pub fn update_rows<const N: usize>(
    elems: &mut [[f32; 32]],
    step: usize,
    groups: usize,
    mut f: impl FnMut(usize, [Vector; N]) -> [Vector; N],
) -> bool {
    let is_there = |count| fits(count, step, elems.len());
    if !groups.checked_mul(N).is_some_and(is_there) {
        return false;
    }
    let mut first = 0;
    for group in 0..groups {
        let mut rows = [super::splat_w(0); N];
        for (i, row) in rows.iter_mut().enumerate() {
            // SAFETY: this row is one of the `groups · N` rows, and `fits` has checked the last of
            // them.
            *row = load_f32(unsafe { elems.get_unchecked(first + i * step) });
        }
        for (i, row) in f(group, rows).into_iter().enumerate() {
            // SAFETY: as above.
            store_f32(unsafe { elems.get_unchecked_mut(first + i * step) }, row);
        }
        first += N * step;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hvx::{add_f32, splat_f32};

    #[test]
    fn rows_that_fit_are_read_and_written_and_no_others() {
        for (len, step, groups) in (0_usize..12)
            .flat_map(|len| (0..5).map(move |step| (len, step)))
            .flat_map(|(len, step)| (0..4).map(move |groups| (len, step, groups)))
        {
            let what = format!("{groups} groups, {len} by {step}");
            let before: Vec<_> = (0..len).map(|i| [i as f32; 32]).collect();
            let last = (2 * groups).max(1) - 1;
            let fits = last * step < len;
            let read = RowGroups::<2>::new(&before, step, groups);
            assert_eq!(read.is_some(), fits && groups > 0, "{what}");
            let mut to = before.clone();
            let is_written = update_rows::<2>(&mut to, step, groups, |group, rows| {
                let read = read.map_or(rows, |read| read.load(group));
                assert!(step == 0 || read == rows, "{what}");
                rows.map(|row| add_f32(row, splat_f32(100.0)))
            });
            assert_eq!(is_written, fits, "{what}");
            for (i, (row, before)) in to.iter().zip(&before).enumerate() {
                let is_row = fits && step > 0 && i % step == 0 && i / step < 2 * groups;
                if step > 0 {
                    let want = before[0] + if is_row { 100.0 } else { 0.0 };
                    assert_eq!(*row, [want; 32], "{what}, element {i}");
                }
            }
        }
        let mut row = [[0.0; 32]; 2];
        assert!(!update_rows::<3>(&mut row, usize::MAX, 1, |_, rows| rows));
        assert!(!update_rows::<3>(&mut row, 1, usize::MAX, |_, rows| rows));
        assert!(RowGroups::<3>::new(&row, 1, usize::MAX).is_none());
    }
}
