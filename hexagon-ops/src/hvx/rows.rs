//! Vectors of rows that have the same distance from each other, checked together.
//!
//! With a check for each row, the compiler would compute each row after the store of the one before.

use super::{Vector, load_f32, store_f32};

/// Returns `true` if rows 0 to `count - 1`, `step` elements apart, are among `len` elements.
#[inline(always)]
fn fits(count: usize, step: usize, len: usize) -> bool {
    let last = step.checked_mul(count.saturating_sub(1));
    last.is_some_and(|last| last < len)
}

/// Returns elements 0, `step`, 2 · `step` and so on, as `vmemu` loads; `None` if there are fewer than `N`.
#[must_use]
#[inline(always)]
pub fn load_rows<const N: usize>(from: &[[f32; 32]], step: usize) -> Option<[Vector; N]> {
    if !fits(N, step, from.len()) {
        return None;
    }
    let mut rows = [super::splat_w(0); N];
    for (i, row) in rows.iter_mut().enumerate() {
        // SAFETY: `i` is less than `N`, of which `fits` has checked the last.
        *row = load_f32(unsafe { from.get_unchecked(i * step) });
    }
    Some(rows)
}

/// Writes elements 0, `step`, 2 · `step` and so on, as `vmemu` stores. Returns `false` and writes nothing if there are fewer
/// than `N`.
#[must_use]
#[inline(always)]
pub fn store_rows<const N: usize>(to: &mut [[f32; 32]], step: usize, rows: &[Vector; N]) -> bool {
    if !fits(N, step, to.len()) {
        return false;
    }
    for (i, row) in rows.iter().enumerate() {
        // SAFETY: as in `load_rows`.
        store_f32(unsafe { to.get_unchecked_mut(i * step) }, *row);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_fit_are_read_and_written_and_no_others() {
        for len in 0..12 {
            for step in 0..5 {
                let mut to = vec![[1.0_f32; 32]; len];
                let rows = [2.0, 3.0, 4.0].map(crate::hvx::splat_f32);
                let fits = 2 * step < len;
                assert_eq!(store_rows(&mut to, step, &rows), fits, "{len} by {step}");
                let mut want = vec![[1.0_f32; 32]; len];
                if fits {
                    for (i, value) in [2.0, 3.0, 4.0].into_iter().enumerate() {
                        want[i * step] = [value; 32];
                    }
                }
                assert_eq!(to, want, "{len} by {step}");
                let read = load_rows::<3>(&to, step);
                assert_eq!(read.is_some(), fits, "{len} by {step}");
                for (i, row) in read.iter().flatten().enumerate() {
                    let mut elems = [0.0; 32];
                    store_f32(&mut elems, *row);
                    assert_eq!(elems, want[i * step], "{len} by {step}");
                }
            }
        }
        assert!(!store_rows(
            &mut [[0.0; 32]; 2],
            usize::MAX,
            &[crate::hvx::splat_w(0); 3]
        ));
    }
}
