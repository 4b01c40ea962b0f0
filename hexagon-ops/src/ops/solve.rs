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

/// Columns of a vector.
const LANES: usize = 32;
/// Columns that are computed at a time where there are as many.
const WIDE: usize = 2 * LANES;
/// Rows that are solved at a time.
const BLOCK: usize = 4;
/// Most tasks of a step.
const MAX_TASKS: usize = 8;

/// Some columns of the solution.
struct ColumnsTask<'a> {
    first: usize,
    count: usize,
    /// The columns of the solution, a row for each row of each plane.
    solution: SharedColumns<'a>,
}

/// Solves a plane for 64 columns, or for up to 32.
struct SolvePlane<'a, 'b> {
    matrix: &'a View<'a>,
    right: &'a View<'a>,
    plane: [usize; 2],
    /// Row of the solution where the plane starts.
    row: usize,
    task: &'a mut ColumnsTask<'b>,
    /// First of the columns, counted from the task's, and their number.
    column: usize,
    count: usize,
}

impl SolvePlane<'_, '_> {
    /// Solves rows `first` to `first + BLOCK - 1`, which exist and have `32 · W = N` columns: each
    /// known row is read once for all, and a factor is put into all lanes once for `W` vectors.
    ///
    /// - `matrix`, `right`: elements of the plane, and the number of elements from one row to the
    ///   next
    #[inline(always)]
    fn solve_block<const W: usize, const N: usize>(
        &mut self,
        first: usize,
        (matrix, matrix_stride): (&[f32], usize),
        (right, right_stride): (&[f32], usize),
    ) {
        const { assert!(N == W * LANES) };
        let row = |i: usize| {
            matrix
                .get((first + i) * matrix_stride..)
                .unwrap_or_default()
        };
        let factors: [&[f32]; BLOCK] = core::array::from_fn(row);
        let at = self.task.first + self.column;
        let mut rest: [[Vector; W]; BLOCK] = [[splat_f32(0.0); W]; BLOCK];
        for (i, rest) in rest.iter_mut().enumerate() {
            for (w, rest) in rest.iter_mut().enumerate() {
                *rest = load(right, (first + i) * right_stride + at + w * LANES);
            }
        }
        let solution = &mut self.task.solution;
        let [a, b, c, d] = factors.map(|row| {
            let known = row.get(..first).unwrap_or_default();
            known.as_chunks::<BLOCK>().0
        });
        let blocks = a.iter().zip(b).zip(c.iter().zip(d));
        for (block, ((a, b), (c, d))) in blocks.enumerate() {
            let row = self.row + BLOCK * block;
            let Some(known) = solution.squares::<N, BLOCK>(row, self.column) else {
                return;
            };
            let known = known.map(|row| vectors::<W, N>(row));
            for (rest, factors) in rest.iter_mut().zip([a, b, c, d]) {
                for (known, factor) in known.iter().zip(factors) {
                    subtract(rest, *factor, known);
                }
            }
        }
        let out = solution.squares::<N, BLOCK>(self.row + first, self.column);
        let Some(out) = out else { return };
        // Written out instead of loops, so that the rows stay in registers.
        let [a, b, c, d] = factors.map(|row| {
            let row = row.get(first..).and_then(<[f32]>::first_chunk::<BLOCK>);
            *row.unwrap_or(&[1.0; BLOCK])
        });
        let [mut first, mut second, mut third, mut last] = rest;
        divide(&mut first, a[0]);
        subtract(&mut second, b[0], &first);
        divide(&mut second, b[1]);
        subtract(&mut third, c[0], &first);
        subtract(&mut third, c[1], &second);
        divide(&mut third, c[2]);
        subtract(&mut last, d[0], &first);
        subtract(&mut last, d[1], &second);
        subtract(&mut last, d[2], &third);
        divide(&mut last, d[3]);
        let rest = [first, second, third, last];
        for (out, rest) in out.into_iter().zip(rest) {
            for (out, rest) in out.as_chunks_mut().0.iter_mut().zip(rest) {
                hvx::store_f32(out, rest);
            }
        }
    }

    /// Solves row `i` for the columns up to 32 that start with `column`.
    #[inline(always)]
    fn solve_row(&mut self, i: usize, column: usize) {
        let [i2, i3] = self.plane;
        let at = [i, i2, i3];
        let len = LANES.min(self.task.count - column);
        let right = self.right.floats(at).unwrap_or_default();
        let mut rest = load(right, self.task.first + column);
        for t in 0..i {
            let known = self.task.solution.row(self.row + t);
            let known = load(known, column);
            let factor = splat_f32(self.matrix.element(t, at));
            rest = sub_f32(rest, mul_f32(factor, known));
        }
        let factor = splat_f32(1.0 / self.matrix.element(i, at));
        let mut lanes = [0.0; LANES];
        hvx::store_f32(&mut lanes, mul_f32(rest, factor));
        let row = self.task.solution.row(self.row + i);
        let to = row.get_mut(column..column + len);
        hvx::copy_f32(to.unwrap_or_default(), &lanes);
    }

    /// Solves all whole blocks of the plane for `32 · W = N` columns, and returns their number.
    #[inline(always)]
    fn solve_blocks<const W: usize, const N: usize>(
        &mut self,
        matrix: (&[f32], usize),
        right: (&[f32], usize),
    ) -> usize {
        let n_blocks = self.matrix.shape.ne[0] / BLOCK;
        for block in 0..n_blocks {
            self.solve_block::<W, N>(BLOCK * block, matrix, right);
        }
        n_blocks
    }
}

/// Returns the vectors of a part of a row.
#[inline(always)]
fn vectors<const W: usize, const N: usize>(row: &[f32; N]) -> [Vector; W] {
    let (chunks, _) = row.as_chunks::<LANES>();
    core::array::from_fn(|w| chunks.get(w).map_or(splat_f32(0.0), hvx::load_f32))
}

/// Divides by a number.
#[inline(always)]
fn divide<const W: usize>(rest: &mut [Vector; W], by: f32) {
    let inverse = splat_f32(1.0 / by);
    for rest in rest {
        *rest = mul_f32(*rest, inverse);
    }
}

/// Subtracts `factor · known`.
#[inline(always)]
fn subtract<const W: usize>(rest: &mut [Vector; W], factor: f32, known: &[Vector; W]) {
    let factor = splat_f32(factor);
    for (rest, known) in rest.iter_mut().zip(known) {
        *rest = sub_f32(*rest, mul_f32(factor, *known));
    }
}

impl hvx::Kernel for SolvePlane<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let [i2, i3] = self.plane;
        let n = self.matrix.shape.ne[0];
        let rows = [self.matrix, self.right].map(|view| view.float_rows([0, i2, i3], n));
        let by_blocks = match rows {
            [Some(matrix), Some(right)] if self.count == WIDE => {
                self.solve_blocks::<2, WIDE>(matrix, right)
            }
            [Some(matrix), Some(right)] if self.count == LANES => {
                self.solve_blocks::<1, LANES>(matrix, right)
            }
            _ => 0,
        };
        for column in (self.column..self.column + self.count).step_by(LANES) {
            for i in BLOCK * by_blocks..n {
                self.solve_row(i, column);
            }
        }
    }
}

/// Solves systems of equations, one for each plane.
///
/// - `src`: A, f32 `[n, n, d2, d3]`, only its lower triangle is read; B, f32 `[k, n, d2, d3]`
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
                let mut column = 0;
                while column < task.count {
                    let count = match task.count - column {
                        WIDE.. => WIDE,
                        rest => rest.min(LANES),
                    };
                    hvx::widest(SolvePlane {
                        matrix,
                        right,
                        plane: [i2, i3],
                        row: (i3 * d2 + i2) * n,
                        task,
                        column,
                        count,
                    });
                    column += count;
                }
            }
        }
    });
    Ok(())
}
