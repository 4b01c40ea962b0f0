//! Copies of f32 from columns to rows: squares of 32 rows and 32 columns are transposed in
//! registers.

use crate::hvx;
use crate::layout::TILE_DIM;
use crate::ops::square::{GatherRows, Gathered, WriteColumns};
use crate::ops::tensor::{Run, Shape, Type, View};

/// Returns `true` if [`copy_run`] copies a tensor of the result's shape: elements of dimension 1
/// follow each other instead of those of dimension 0.
pub(in crate::ops) fn is_turned(dst: &Shape, src: &Shape) -> bool {
    let elems = [dst.dtype, src.dtype] == [Type::F32; 2];
    elems && dst.has_dense_rows() && src.nb[1] == 4 && src.nb[0].is_multiple_of(4)
}

/// Copies the rows of a run from a view that [`is_turned`] accepts, to the columns that start with
/// `to`.
pub(in crate::ops) fn copy_run(run: &mut Run<'_>, view: &View<'_>, to: usize) {
    let (at, count) = (run.at, run.count);
    let n = view.shape.ne[0].min(run.len().saturating_sub(to));
    let stride = view.shape.nb[0] / 4;
    let bytes = view.tail(view.shape.row(at));
    let elems: &[f32] = bytemuck::try_cast_slice(&bytes[..bytes.len() / 4 * 4]).unwrap_or_default();
    let Some((out, out_stride)) = run.floats() else {
        return;
    };
    let mut gathered: Gathered = hvx::zeros();
    for row in (0..count).step_by(TILE_DIM) {
        for column in (0..n).step_by(TILE_DIM) {
            let columns = TILE_DIM.min(n - column);
            hvx::widest(GatherRows {
                elems,
                at: column * stride + row,
                stride,
                count: columns,
                to: &mut gathered,
            });
            hvx::widest(WriteColumns {
                gathered: &gathered,
                out: out
                    .get_mut(row * out_stride + to + column..)
                    .unwrap_or_default(),
                stride: out_stride,
                rows: TILE_DIM.min(count - row),
                columns,
            });
        }
    }
}
