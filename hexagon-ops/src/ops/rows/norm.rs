//! RMS_NORM, NORM, L2_NORM, SUM_ROWS, MEAN and SUM: one or two passes that sum, and one that
//! writes.

use super::{all_lanes, count_f32, load};
use crate::error::{Error, Result};
use crate::hvx::{self, Vector, splat_f32, splat_w};
use crate::ops::elementwise::{dense, divides, each_group, put, same_shape};
use crate::ops::math;
use crate::ops::tensor::{
    ARITHMETIC, CHUNK, Chunk, Chunks, Row, Source, View, ViewMut, fetch_after, fetch_first,
    row_packets,
};
use crate::rt::Engine;

/// Divisor of a row; the number is ggml's epsilon.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Norm {
    /// `sqrt(mean(x²) + eps)`.
    Rms(f32),
    /// `sqrt(mean((x - mean x)²) + eps)`, which divides `x - mean x`.
    Mean(f32),
    /// `max(sqrt(sum(x²)), eps)`.
    L2(f32),
}

/// Returns `x - shift`, or its square.
#[inline(always)]
fn term(x: Vector, shift: Option<Vector>, squared: bool) -> Vector {
    let x = match shift {
        Some(shift) => hvx::sub_f32(x, shift),
        None => x,
    };
    if squared { hvx::mul_f32(x, x) } else { x }
}

/// Adds `x - shift`, or its square, of each element to the lanes of four sums.
#[inline(always)]
fn add_terms(elems: &[f32], shift: Option<Vector>, squared: bool, sums: &mut [Vector; 4]) {
    let [mut a, mut b, mut c, mut d] = *sums;
    let (whole, rest) = elems.as_chunks::<32>();
    let (fours, last) = whole.as_chunks::<4>();
    for four in fours {
        // All are loaded before the first is added, so that the steps of one fill the pauses between those of another.
        let [w, x, y, z] = four;
        let (w, x) = (hvx::load_f32(w), hvx::load_f32(x));
        let (y, z) = (hvx::load_f32(y), hvx::load_f32(z));
        a = hvx::add_f32(a, term(w, shift, squared));
        b = hvx::add_f32(b, term(x, shift, squared));
        c = hvx::add_f32(c, term(y, shift, squared));
        d = hvx::add_f32(d, term(z, shift, squared));
    }
    for elems in last {
        a = hvx::add_f32(a, term(hvx::load_f32(elems), shift, squared));
    }
    if !rest.is_empty() {
        // Lanes after the end hold the shift.
        let mut lanes = [0.0; 32];
        hvx::store_f32(&mut lanes, term(load(rest, 0), shift, squared));
        lanes[rest.len()..].fill(0.0);
        b = hvx::add_f32(b, hvx::load_f32(&lanes));
    }
    *sums = [a, b, c, d];
}

/// Returns the `n` elements of a source that a row needs, if they are f32 without gaps and apart from the result.
#[inline(always)]
fn whole<'a>(row: &Row<'_>, src: &Source<'a>, n: usize) -> Option<&'a [f32]> {
    match src {
        Source::Apart(view) => view.floats(row.at).and_then(|elems| elems.get(..n)),
        _ => None,
    }
}

/// Returns the sum over a row of `x - shift`, or of its square; in all lanes.
///
/// - `whole`: as [`whole`] returns them; a caller that has a product calls it before, because vectors do not survive a call
#[inline(always)]
fn sum(
    (row, chunk): (&Row<'_>, &mut Chunk),
    src: &Source<'_>,
    (whole, n): (Option<&[f32]>, usize),
    shift: Option<Vector>,
    squared: bool,
) -> Vector {
    let mut sums = [splat_w(0); 4];
    let step = if whole.is_some() { n } else { CHUNK };
    let mut start = 0;
    while start < n {
        let end = n.min(start + step);
        let elems = whole.unwrap_or_else(|| src.read(row, start..end, chunk));
        add_terms(elems, shift, squared, &mut sums);
        start = end;
    }
    let [a, b, c, d] = sums;
    let total = hvx::add_f32(hvx::add_f32(a, b), hvx::add_f32(c, d));
    all_lanes(total, hvx::add_f32)
}

/// The last step of a norm: what each element becomes.
struct Scaling {
    shift: Option<Vector>,
    factor: Vector,
}

impl Scaling {
    /// Computes `out = (x - shift) · factor · times + plus`. `times` and `plus` are empty or as long as `x`.
    #[inline(always)]
    fn apply(&self, x: &[f32], times: &[f32], plus: &[f32], out: &mut [f32]) {
        let factor = self.factor;
        match self.shift {
            None if !times.is_empty() => {
                each_group!(4; out; x in x, t in times => hvx::mul_f32(hvx::mul_f32(x, factor), t));
            }
            shift => {
                let shift = shift.unwrap_or(splat_w(0));
                each_group!(4; out; a in x, _b in x => hvx::mul_f32(hvx::sub_f32(a, shift), factor));
                for (out, times) in out.chunks_mut(32).zip(times.chunks(32)) {
                    put(hvx::mul_f32(load(out, 0), load(times, 0)), out, out.len());
                }
            }
        }
        for (out, plus) in out.chunks_mut(32).zip(plus.chunks(32)) {
            put(hvx::add_f32(load(out, 0), load(plus, 0)), out, out.len());
        }
    }
}

/// The arguments of [`norm`] for one row.
struct NormRow<'a> {
    norm: Norm,
    row: Row<'a>,
    /// The source, the factor of the result, and the addend.
    src: &'a [Source<'a>; 3],
    chunks: &'a mut Chunks,
}

impl hvx::Kernel for NormRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let [src, times, plus] = self.src;
        let [chunk, times_chunk, plus_chunk, out] = self.chunks;
        let n = self.row.len();
        let inverse = splat_f32(1.0 / count_f32(n));
        let elems = (whole(&self.row, src, n), n);
        let (shift, squares) = if let Norm::Mean(_) = self.norm {
            let total = sum((&self.row, chunk), src, elems, None, false);
            let mean = Some(hvx::mul_f32(total, inverse));
            let squares = sum((&self.row, chunk), src, elems, mean, true);
            (mean, squares)
        } else {
            let squares = sum((&self.row, chunk), src, elems, None, true);
            (None, squares)
        };
        let factor = match self.norm {
            Norm::Rms(eps) | Norm::Mean(eps) => {
                let mean = hvx::mul_f32(squares, inverse);
                inverse_root(hvx::add_f32(mean, splat_f32(eps)))
            }
            Norm::L2(eps) => {
                let length = math::sqrt(squares);
                math::reciprocal(hvx::max_f32(length, splat_f32(eps)))
            }
        };
        let scaling = Scaling { shift, factor };
        let dense = match [0, 1, 2].map(|i| dense(&self.src[i], &self.row, 0)) {
            [Some(x), Some(times), Some(plus)] if self.row.floats().is_some() => {
                Some((x, times, plus))
            }
            _ => None,
        };
        let step = if dense.is_some() { n } else { CHUNK };
        let mut start = 0;
        while start < n {
            let len = step.min(n - start);
            let range = start..start + len;
            let (x, times, plus) = dense.unwrap_or_else(|| {
                (
                    src.read(&self.row, range.clone(), chunk),
                    times.read(&self.row, range.clone(), times_chunk),
                    plus.read(&self.row, range.clone(), plus_chunk),
                )
            });
            let place = self.row.floats().map(|row| &mut row[range]);
            let is_written = place.is_some();
            scaling.apply(x, times, plus, place.unwrap_or(&mut out[..len.min(CHUNK)]));
            if !is_written {
                self.row.write(start, &out[..len]);
            }
            start += len;
        }
    }
}

/// Returns `1 / sqrt(x)`; infinity for zero, which a row of zeros gives without epsilon.
#[inline(always)]
fn inverse_root(x: Vector) -> Vector {
    let smallest = splat_f32(f32::MIN_POSITIVE);
    hvx::select_gt_f32(smallest, x, splat_f32(f32::INFINITY), math::rsqrt(x))
}

/// Divides each row of the first source by its norm, then multiplies by the second source and adds
/// the third, if they exist.
///
/// # Errors
/// `Operand` unless all are floats, the first has the result's shape, and the others' dimensions
/// divide it.
pub fn norm(engine: &Engine, norm: Norm, dst: ViewMut<'_>, src: &[Source<'_>; 3]) -> Result<()> {
    same_shape(&dst.shape, &src[0])?;
    for repeated in src[1..].iter().filter(|src| !matches!(src, Source::None)) {
        divides(&dst.shape, repeated)?;
    }
    // A row is not cut: its sum would take a further step.
    let n = dst.shape.ne[0];
    let packets = || row_packets(n, 2 * ARITHMETIC);
    // The weights are read after the sum of the first row.
    fetch_first(&src[1]);
    dst.for_rows_with_chunks(engine, packets, |row, chunks| {
        fetch_after(&row, &src.each_ref());
        hvx::widest(NormRow {
            norm,
            row,
            src,
            chunks,
        });
    });
    Ok(())
}

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
        let total = super::first_lane(total);
        let divisor = if self.is_mean { count_f32(self.n) } else { 1.0 };
        self.row.write(0, &[total / divisor]);
    }
}

/// Sums each row of `src` to one element, or takes its mean.
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
            total += f64::from(super::first_lane(row));
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
