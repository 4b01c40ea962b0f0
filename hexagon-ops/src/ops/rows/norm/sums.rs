//! SUM_ROWS, MEAN and SUM: the sums of rows without a norm.

use super::{GROUP, Norm, NormRows, is_rows, sum, whole};
use crate::error::{Error, Result};
use crate::hvx;
use crate::ops::rows::{count_f32, first_lane};
use crate::ops::tensor::{
    ARITHMETIC, Chunks, Row, Shape, Source, Type, View, ViewMut, fetch_after, row_packets,
};
use crate::rt::Engine;

/// The arguments of [`sum_rows`] for one row.
struct SumRow<'a> {
    row: Row<'a>,
    src: &'a Source<'a>,
    n: usize,
    is_mean: bool,
    chunks: &'a mut Chunks,
}

impl hvx::Kernel for SumRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let from = (&self.row, &mut self.chunks[0]);
        let elems = (whole(from.0, self.src, self.n), self.n);
        let total = sum(from, self.src, elems, None, false);
        let total = first_lane(total);
        let divisor = if self.is_mean { count_f32(self.n) } else { 1.0 };
        self.row.write(0, &[total / divisor]);
    }
}

/// The arguments of [`sum_rows`] for up to [`GROUP`] rows of f32 without gaps inside, of whole
/// vectors.
struct SumGroup<'a> {
    /// Elements starting with the first row, and the number of elements from one row to the next.
    src: (&'a [f32], usize),
    n: usize,
    is_mean: bool,
    /// An element for each row, this far from each other.
    out: (&'a mut [f32], usize),
    count: usize,
}

impl hvx::Kernel for SumGroup<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let rows = NormRows {
            norm: Norm::Rms(0.0),
            src: Some(self.src),
            times: &[],
            plus: (&[], 0),
            out: (&mut [], 0),
            n: self.n,
            count: self.count,
        };
        let [mut sums] = hvx::zeros::<1>();
        hvx::store(&mut sums, rows.sums(None, false));
        let sums: &[f32; 32] = bytemuck::cast_ref(&sums);
        let (out, step) = self.out;
        for (i, sum) in sums.iter().enumerate().take(self.count) {
            if let Some(out) = out.get_mut(i * step) {
                *out = match self.is_mean {
                    true => sum / count_f32(self.n),
                    false => *sum,
                };
            }
        }
    }
}

/// Computes [`sum_rows`] of rows of f32 without gaps inside, several rows at a time; the result has
/// `shape`.
#[inline(never)]
fn sum_groups(engine: &Engine, is_mean: bool, (dst, shape): (ViewMut<'_>, Shape), view: &View<'_>) {
    let n = view.shape.ne[0];
    let packets = || row_packets(n, ARITHMETIC);
    dst.reshaped(shape).for_parts(engine, packets, |part| {
        part.for_each_run(|mut run| {
            let (at, count) = (run.at, run.count);
            let (Some((elems, step)), Some((out, out_step))) =
                (view.float_rows(at, count), run.floats())
            else {
                return;
            };
            for start in (0..count).step_by(GROUP) {
                let next = at[0] + start + GROUP;
                view.fetch(
                    [next, 0, 0],
                    GROUP.min(view.shape.ne[1].saturating_sub(next)),
                );
                hvx::widest(SumGroup {
                    src: (elems.get(start * step..).unwrap_or_default(), step),
                    n,
                    is_mean,
                    out: (
                        out.get_mut(start * out_step..).unwrap_or_default(),
                        out_step,
                    ),
                    count: GROUP.min(count - start),
                });
            }
        });
    });
}

/// Computes the sum or the mean of each row of `src`.
///
/// # Errors
/// `Operand` unless both are floats, and the result has rows of one element and the source's other
/// dimensions.
pub fn sum_rows(engine: &Engine, is_mean: bool, dst: ViewMut<'_>, src: &Source<'_>) -> Result<()> {
    let view = src.apart()?;
    let mut want = view.shape.ne;
    want[0] = 1;
    if dst.shape.ne != want || !dst.shape.dtype.is_float() || !view.shape.dtype.is_float() {
        return Err(Error::Operand);
    }
    if dst.shape.ne[1..] != [1; 3]
        && is_rows(&view.shape)
        && dst.shape.dtype == Type::F32
        && view.shape.ne[0].is_multiple_of(32)
        && let (Some(shape), Some(view)) = (dst.shape.merged(), view.merged())
    {
        sum_groups(engine, is_mean, (dst, shape), &view);
        return Ok(());
    }
    let n = view.shape.ne[0];
    let packets = || row_packets(n, ARITHMETIC);
    dst.for_rows_with_chunks(engine, packets, |row, chunks| {
        fetch_after(&row, &[src]);
        hvx::widest(SumRow {
            row,
            src,
            n,
            is_mean,
            chunks,
        });
    });
    Ok(())
}

/// The arguments of [`sum_all`]. Rows are summed in f32, their sums in f64, since rows of different
/// signs may cancel.
struct SumAll<'a> {
    row: Row<'a>,
    view: &'a View<'a>,
    chunks: &'a mut Chunks,
}

impl hvx::Kernel for SumAll<'_> {
    type Output = ();

    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "rounded to f32")]
    fn run(mut self) {
        let [n0, n1, n2, n3] = self.view.shape.ne;
        let mut total = 0.0_f64;
        for i in 0..n1 * n2 * n3 {
            let planes = i / n1;
            let source = Source::Apart(self.view.row([i % n1, planes % n2, planes / n2]));
            let from = (&self.row, &mut self.chunks[0]);
            let elems = (whole(from.0, &source, n0), n0);
            let row = sum(from, &source, elems, None, false);
            total += f64::from(first_lane(row));
        }
        self.row.write(0, &[total as f32]);
    }
}

/// Sums all elements of `src` to one.
///
/// # Errors
/// `Operand` unless both are floats, the result has one element, and the source repeats nothing:
/// otherwise a small buffer could describe endless reading.
pub fn sum_all(engine: &Engine, dst: ViewMut<'_>, src: &Source<'_>) -> Result<()> {
    let view = &src.apart()?;
    let floats = dst.shape.dtype.is_float() && view.shape.dtype.is_float();
    if dst.shape.ne != [1; 4] || !floats || view.shape.repeats() {
        return Err(Error::Operand);
    }
    // A single row.
    let packets = || 0;
    dst.for_rows_with_chunks(engine, packets, |row, chunks| {
        hvx::widest(SumAll { row, view, chunks })
    });
    Ok(())
}
