//! Products of rows with 32 columns, without sums across lanes.
//!
//! Folding adds the halves of two vectors, so that one vector holds both results; five folds of 32
//! vectors give their 32 sums in lanes.

use crate::hvx::{self, Accumulator, Vector, add_f32, fold_f32, splat_w};
use crate::layout::Line;

/// Number of columns.
const COLUMNS: usize = 32;
/// Groups of four columns, whose products become one vector before the last three folds.
pub(super) const GROUPS: usize = COLUMNS / 4;

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
    fn run(mut self) {
        let lines = self.columns.len() / COLUMNS;
        let sums = core::mem::take(&mut self.sums);
        let mut folded = hvx::zeros();
        for (row, sum) in self.rows.chunks_exact(lines).zip(sums) {
            for (g, folded) in folded.iter_mut().enumerate() {
                // The columns are paired so that the folds leave the sums in order: a fold puts the
                // sums of its second vector after, or between, those of the first.
                let column = |i: usize| &self.columns[(g + GROUPS * i) * lines..][..lines];
                let low = fold_two(row, column(0), column(2));
                let high = fold_two(row, column(1), column(3));
                hvx::store(folded, fold_f32::<8>(low, high));
            }
            hvx::store(sum, add_f32(hvx::load(sum), last_folds(&folded)));
        }
    }
}

/// Returns the products of a row and two columns in lanes, folded once.
#[inline(always)]
fn fold_two(row: &[Line], first: &[Line], second: &[Line]) -> Vector {
    let mut lines = row.iter().zip(first).zip(second);
    let Some(((x, first), second)) = lines.next() else {
        return splat_w(0);
    };
    let mut a = Accumulator::product(hvx::load(x), hvx::load(first));
    let mut b = Accumulator::product(hvx::load(x), hvx::load(second));
    for ((x, first), second) in lines {
        let x = hvx::load(x);
        a = a.mul_add(x, hvx::load(first));
        b = b.mul_add(x, hvx::load(second));
    }
    fold_f32::<16>(a.to_f32(), b.to_f32())
}

/// Computes the three folds that leave 32 sums.
#[inline(always)]
pub(super) fn last_folds(v: &[Line; GROUPS]) -> Vector {
    let [a, b, c, d, e, f, g, h] = v;
    let ae = fold_f32::<4>(hvx::load(a), hvx::load(e));
    let bf = fold_f32::<4>(hvx::load(b), hvx::load(f));
    let cg = fold_f32::<4>(hvx::load(c), hvx::load(g));
    let dh = fold_f32::<4>(hvx::load(d), hvx::load(h));
    fold_f32::<1>(fold_f32::<2>(ae, cg), fold_f32::<2>(bf, dh))
}
