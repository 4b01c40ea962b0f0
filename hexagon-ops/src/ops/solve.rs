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
use crate::hvx::{self, Vector, mul_f32, splat_f32, sub_f32};
use crate::rt::{Engine, SharedColumns};

/// Columns that are computed at a time.
const LANES: usize = 32;
/// Rows that are solved at a time.
const BLOCK: usize = 4;
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

impl SolvePlane<'_, '_> {
    /// Solves rows `first` to `first + BLOCK - 1`, which are there and have 32 columns: each known row is read once for all.
    ///
    /// - `matrix`, `right`: elements of the plane, and the number of elements from one row to the next
    #[inline(always)]
    fn solve_block(
        &mut self,
        first: usize,
        (matrix, matrix_stride): (&[f32], usize),
        (right, right_stride): (&[f32], usize),
    ) {
        let row = |i: usize| {
            matrix
                .get((first + i) * matrix_stride..)
                .unwrap_or_default()
        };
        let factors: [&[f32]; BLOCK] = core::array::from_fn(row);
        let at = self.task.first + self.column;
        let mut rest: [Vector; BLOCK] = [splat_f32(0.0); BLOCK];
        for (i, rest) in rest.iter_mut().enumerate() {
            *rest = load(right, (first + i) * right_stride + at);
        }
        let solution = &mut self.task.solution;
        for t in (0..first).step_by(BLOCK) {
            let known = solution.squares::<LANES, BLOCK>(self.row + t, self.column);
            let Some(known) = known.map(|rows| rows.map(|row| hvx::load_f32(row))) else {
                return;
            };
            for (rest, factors) in rest.iter_mut().zip(factors) {
                let factors = factors.get(t..).and_then(<[f32]>::first_chunk::<BLOCK>);
                for (known, factor) in known.iter().zip(factors.unwrap_or(&[0.0; BLOCK])) {
                    *rest = sub_f32(*rest, mul_f32(splat_f32(*factor), *known));
                }
            }
        }
        let out = solution.squares::<LANES, BLOCK>(self.row + first, self.column);
        let Some(out) = out else { return };
        for i in 0..BLOCK {
            let factor = |t: usize| factors[i].get(first + t).copied().unwrap_or_default();
            for t in 0..i {
                rest[i] = sub_f32(rest[i], mul_f32(splat_f32(factor(t)), rest[t]));
            }
            rest[i] = mul_f32(rest[i], splat_f32(1.0 / factor(i)));
        }
        for (out, rest) in out.into_iter().zip(rest) {
            hvx::store_f32(out, rest);
        }
    }
}

impl hvx::Kernel for SolvePlane<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let [i2, i3] = self.plane;
        let len = LANES.min(self.task.count - self.column);
        let n = self.matrix.shape.ne[0];
        let rows = [self.matrix, self.right].map(|view| view.float_rows([0, i2, i3], n));
        let by_blocks = match rows {
            [Some(matrix), Some(right)] if len == LANES => {
                let n_blocks = n / BLOCK;
                for block in 0..n_blocks {
                    self.solve_block(BLOCK * block, matrix, right);
                }
                n_blocks
            }
            _ => 0,
        };
        for i in BLOCK * by_blocks..n {
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
