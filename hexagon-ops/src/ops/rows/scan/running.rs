//! CUMSUM of rows of f32: 32 rows at a time, whose columns are vectors, so that each row has its
//! one sum in ggml's order.
//!
//! ```text
//! for each 32 rows
//!   for each 32 columns
//!     transpose              a vector for each column
//!     sum = sum + column     32 times, each a column of the result
//!     transpose              a vector for each row
//! ```

use crate::hvx;
use crate::layout::{Line, TILE_DIM};
use crate::ops::square::{GROUP, GatherRows, Gathered, WriteColumns, columns};
use crate::ops::tensor::{Run, Shape, Type, View};

/// Returns `true` if [`sum_run`] sums rows of these tensors.
pub(super) fn is_summed(dst: &Shape, src: &Shape) -> bool {
    let are_floats = |shape: &Shape| {
        shape.dtype == Type::F32 && shape.has_dense_rows() && shape.nb[1].is_multiple_of(4)
    };
    are_floats(dst) && are_floats(src)
}

/// Adds columns, one after the other, to the sum.
struct AddColumns<'a> {
    gathered: &'a Gathered,
    sum: &'a mut Line,
    /// The sums after each column.
    sums: &'a mut Gathered,
}

impl hvx::Kernel for AddColumns<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut sum = hvx::load(self.sum);
        for (group, sums) in self.sums.as_chunks_mut::<GROUP>().0.iter_mut().enumerate() {
            for (column, to) in columns(self.gathered, group).into_iter().zip(sums) {
                sum = hvx::add_f32(sum, column);
                hvx::store(to, sum);
            }
        }
        hvx::store(self.sum, sum);
    }
}

/// Sums the rows of a run, of tensors that [`is_summed`] accepts.
pub(super) fn sum_run(mut run: Run<'_>, view: &View<'_>) {
    let (at, count, n) = (run.at, run.count, run.len());
    let (Some((elems, stride)), Some((out, out_stride))) =
        (view.float_rows(at, count), run.floats())
    else {
        return;
    };
    let (mut gathered, mut sums): (Gathered, Gathered) = (hvx::zeros(), hvx::zeros());
    for row in (0..count).step_by(TILE_DIM) {
        let rows = TILE_DIM.min(count - row);
        let [mut sum] = hvx::zeros::<1>();
        for column in (0..n).step_by(TILE_DIM) {
            hvx::widest(GatherRows {
                elems,
                at: row * stride + column,
                stride,
                count: rows,
                to: &mut gathered,
            });
            hvx::widest(AddColumns {
                gathered: &gathered,
                sum: &mut sum,
                sums: &mut sums,
            });
            hvx::widest(GatherRows {
                elems: bytemuck::cast_slice(&sums),
                at: 0,
                stride: TILE_DIM,
                count: TILE_DIM,
                to: &mut gathered,
            });
            hvx::widest(WriteColumns {
                gathered: &gathered,
                out: out.get_mut(row * out_stride + column..).unwrap_or_default(),
                stride: out_stride,
                rows,
                columns: TILE_DIM.min(n - column),
            });
        }
    }
}
