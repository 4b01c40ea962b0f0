//! SOLVE_TRI: the solution of `A X = B` for a lower triangular A, row after row.
//!
//! ```text
//! X[i] = (B[i] - Σ_{t < i} A[i][t] · X[t]) / A[i][i]
//! ```
//!
//! Columns of X are independent: a task has some of them, in all planes.
//!
//! SOURCE: ggml, `ggml_compute_forward_solve_tri_f32`.

use super::elementwise::load;
use super::tensor::{Source, Type, View, ViewMut};
use crate::error::{Error, Result};
use crate::hvx::{self, mul_f32, splat_f32, sub_f32};
use crate::rt::{Engine, SharedColumns};

/// Columns that are computed at a time.
const LANES: usize = 32;
/// Most tasks of a step.
const MAX_TASKS: usize = 8;

/// Some columns of the solution.
struct ColumnsTask<'a> {
    first: usize,
    count: usize,
    /// These columns, a row for each row of each plane.
    solution: SharedColumns<'a>,
}

/// Solves a plane for 32 columns.
struct SolvePlane<'a, 'b> {
    matrix: &'a View<'a>,
    right: &'a View<'a>,
    plane: [usize; 2],
    /// Row of the solution where the plane starts.
    row: usize,
    task: &'a mut ColumnsTask<'b>,
    /// First of the columns, counted from the task's.
    column: usize,
}

impl hvx::Kernel for SolvePlane<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let [i2, i3] = self.plane;
        let len = LANES.min(self.task.count - self.column);
        for i in 0..self.matrix.shape.ne[0] {
            let at = [i, i2, i3];
            let right = self.right.floats(at).unwrap_or_default();
            let mut rest = load(right, self.task.first + self.column);
            for t in 0..i {
                let known = self.task.solution.row(self.row + t);
                let known = load(known, self.column);
                let factor = splat_f32(self.matrix.element(t, at));
                rest = sub_f32(rest, mul_f32(factor, known));
            }
            let factor = splat_f32(1.0 / self.matrix.element(i, at));
            let mut lanes = [0.0; LANES];
            hvx::store_f32(&mut lanes, mul_f32(rest, factor));
            let row = self.task.solution.row(self.row + i);
            let to = row.get_mut(self.column..self.column + len);
            hvx::copy_f32(to.unwrap_or_default(), &lanes);
        }
    }
}

/// Solves systems of equations, one for each plane.
///
/// - `src`: A, f32 `[n, n, d2, d3]`, of which the lower triangle is read; B, f32 `[k, n, d2, d3]`
/// - `dst`: f32 `[k, n, d2, d3]` without gaps
///
/// # Errors
/// `Operand` unless the operands are as above.
pub fn solve(engine: &Engine, dst: ViewMut<'_>, src: [&Source<'_>; 2]) -> Result<()> {
    let (matrix, right) = (&src[0].apart()?, &src[1].apart()?);
    let [k, n, d2, d3] = dst.shape.ne;
    let is_f32 = |view: &View<'_>| view.shape.dtype == Type::F32 && view.shape.has_dense_rows();
    let fits = matrix.shape.ne == [n, n, d2, d3]
        && right.shape.ne == dst.shape.ne
        && is_f32(matrix)
        && is_f32(right)
        && dst.shape.dtype == Type::F32
        && dst.shape.is_gapless();
    if !fits {
        return Err(Error::Operand);
    }
    if dst.is_empty() {
        return Ok(());
    }
    let mut solution = SharedColumns::new(dst.into_floats().ok_or(Error::Operand)?, k);
    let groups = k.div_ceil(LANES);
    let n_tasks = engine.threads().min(MAX_TASKS).min(groups);
    let mut tasks: [Option<ColumnsTask<'_>>; MAX_TASKS] = [const { None }; MAX_TASKS];
    let mut first = 0;
    for (i, task) in tasks.iter_mut().take(n_tasks).enumerate() {
        let lanes = (groups - first / LANES).div_ceil(n_tasks - i) * LANES;
        let count = lanes.min(k - first);
        *task = Some(ColumnsTask {
            first,
            count,
            solution: solution.split_off(count),
        });
        first += count;
    }
    engine.step(None, &mut tasks[..n_tasks], |task| {
        let Some(task) = task else { return };
        for i3 in 0..d3 {
            for i2 in 0..d2 {
                for column in (0..task.count).step_by(LANES) {
                    hvx::widest(SolvePlane {
                        matrix,
                        right,
                        plane: [i2, i3],
                        row: (i3 * d2 + i2) * n,
                        task,
                        column,
                    });
                }
            }
        }
    });
    Ok(())
}
