//! RMS_NORM, NORM and L2_NORM: one or two passes that sum, and one that writes. The passes that sum
//! are those of SUM_ROWS, MEAN and SUM (`sums`), too.

mod sums;

use super::{all_lanes, count_f32, load};
use crate::error::Result;
use crate::hvx::{self, Streams, Vector, splat_f32, splat_w};
use crate::layout::Line;
use crate::ops::elementwise::{
    check_broadcast, dense, each, each_group, each_line, lines, lines_mut, same_shape,
};
use crate::ops::math;
use crate::ops::tensor::{
    ARITHMETIC, CHUNK, Chunk, Chunks, Row, Shape, Source, Type, View, ViewMut, fetch_after,
    fetch_first, row_packets,
};
use crate::rt::Engine;

pub use sums::{sum_all, sum_rows};

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
        // All are loaded before the first is added, so that the steps of one fill the waiting times
        // of another.
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
        // Lanes after the end are filled with the shift, so that they add nothing to the sum.
        let mut lanes = [0.0; 32];
        hvx::store_f32(&mut lanes, term(load(rest, 0), shift, squared));
        lanes[rest.len()..].fill(0.0);
        b = hvx::add_f32(b, hvx::load_f32(&lanes));
    }
    *sums = [a, b, c, d];
}

/// Returns the `n` elements of a source that a row needs, if they are f32 without gaps and apart
/// from the result.
#[inline(always)]
fn whole<'a>(row: &Row<'_>, src: &Source<'a>, n: usize) -> Option<&'a [f32]> {
    match src {
        Source::Apart(view) => view.floats(row.at).and_then(|elems| elems.get(..n)),
        _ => None,
    }
}

/// Returns the sum over a row of `x - shift`, or of its square; in all lanes.
///
/// - `whole`: as [`whole`] returns them; a caller that has a product calls it before, because
///   vectors do not survive a call
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

/// The last step of a norm, which computes each element's result.
struct Scaling {
    shift: Option<Vector>,
    factor: Vector,
}

impl Scaling {
    /// Does the same as [`Self::apply`], in up to three passes: for a kernel that has no registers
    /// for more loops.
    #[inline(always)]
    fn apply_in_passes(&self, x: &[f32], times: &[f32], plus: &[f32], out: &mut [f32]) {
        let factor = self.factor;
        match self.shift {
            None if !times.is_empty() => {
                let mut s = Streams::new([Some(x), Some(times)], out);
                each_line!(s; x, t => hvx::mul_f32(hvx::mul_f32(x, factor), t));
            }
            shift => {
                let shift = shift.unwrap_or(splat_w(0));
                let mut s = Streams::new([Some(x)], out);
                each_line!(s; x => hvx::mul_f32(hvx::sub_f32(x, shift), factor));
                let mut s = Streams::new([None, Some(times)], out);
                each!(s; x, t => hvx::mul_f32(x, t));
            }
        }
        let mut s = Streams::new([None, Some(plus)], out);
        each!(s; x, p => hvx::add_f32(x, p));
    }

    /// Computes `out = (x - shift) · factor · times + plus`; `x` is in the result's place if it is
    /// `None`. `times` and `plus` are empty or as long as `x`.
    #[inline(always)]
    fn apply(&self, x: Option<&[f32]>, times: &[f32], plus: &[f32], out: &mut [f32]) {
        let factor = self.factor;
        let shift = self.shift.unwrap_or(splat_w(0));
        match (self.shift, !times.is_empty(), !plus.is_empty()) {
            (None, true, false) => {
                let mut s = Streams::new([x, Some(times)], out);
                each_line!(s; x, t => hvx::mul_f32(hvx::mul_f32(x, factor), t));
            }
            (_, true, true) => {
                let mut s = Streams::new([x, Some(times), Some(plus)], out);
                each_line!(s; x, t, p => {
                    let x = hvx::mul_f32(hvx::sub_f32(x, shift), factor);
                    hvx::add_f32(hvx::mul_f32(x, t), p)
                });
            }
            (_, true, false) => {
                let mut s = Streams::new([x, Some(times)], out);
                each_line!(s; x, t => {
                    hvx::mul_f32(hvx::mul_f32(hvx::sub_f32(x, shift), factor), t)
                });
            }
            (_, false, true) => {
                let mut s = Streams::new([x, Some(plus)], out);
                each_line!(s; x, p => {
                    hvx::add_f32(hvx::mul_f32(hvx::sub_f32(x, shift), factor), p)
                });
            }
            (_, false, false) => {
                let mut s = Streams::new([x], out);
                each_line!(s; x => hvx::mul_f32(hvx::sub_f32(x, shift), factor));
            }
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
        let factor = self.norm.factor(squares, inverse);
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
            let place = place.unwrap_or(&mut out[..len.min(CHUNK)]);
            scaling.apply_in_passes(x, times, plus, place);
            if !is_written {
                self.row.write(start, &out[..len]);
            }
            start += len;
        }
    }
}

/// Rows whose sums are added across lanes together.
const GROUP: usize = 8;

/// The arguments of [`norm`] for rows of f32 without gaps inside, of whole vectors.
struct NormRows<'a> {
    norm: Norm,
    /// Elements starting with the first row, and the number of elements from one row to the next;
    /// `None` if they are in the result's place.
    src: Option<(&'a [f32], usize)>,
    /// The factors of a row; none if they do not exist.
    times: &'a [f32],
    /// Addends starting with those of the first row, and the number of elements from one row's to
    /// the next; none if they do not exist.
    plus: (&'a [f32], usize),
    out: (&'a mut [f32], usize),
    n: usize,
    /// Number of rows, up to [`GROUP`].
    count: usize,
}

impl NormRows<'_> {
    /// Returns the sum of `x - shift`, or of its square, of each row in a lane of its number.
    ///
    /// - `shifts`: of rows
    #[inline(always)]
    fn sums(&self, shifts: Option<&[f32; 32]>, squared: bool) -> Vector {
        let mut lines = hvx::zeros::<GROUP>();
        let (elems, step) = self.src.unwrap_or((&*self.out.0, self.out.1));
        for (i, line) in lines.iter_mut().take(self.count).enumerate() {
            let row = elems.get(i * step..i * step + self.n).unwrap_or_default();
            let shift = shifts.map(|shifts| splat_f32(shifts[i]));
            let mut sums = [splat_w(0); 4];
            add_terms(row, shift, squared, &mut sums);
            let [a, b, c, d] = sums;
            hvx::store(line, hvx::add_f32(hvx::add_f32(a, b), hvx::add_f32(c, d)));
        }
        group_sums(&lines)
    }
}

/// Returns the sum of each line in the lane of its number, and again in the lanes 8, 16 and 24
/// after it.
#[inline(always)]
fn group_sums(lines: &[Line; GROUP]) -> Vector {
    let line = |i: usize| hvx::load(&lines[i]);
    // The rows are paired so that the folds leave the sums in order: a fold puts the sums of its
    // second vector after those of the first.
    let four = |i: usize| {
        let even = hvx::fold_f32::<1>(line(i), line(i + 1));
        let odd = hvx::fold_f32::<1>(line(i + 2), line(i + 3));
        hvx::fold_f32::<2>(even, odd)
    };
    let eight = hvx::fold_f32::<4>(four(0), four(4));
    let sixteen = hvx::fold_f32::<8>(eight, eight);
    hvx::fold_f32::<16>(sixteen, sixteen)
}

impl hvx::Kernel for NormRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let inverse = splat_f32(1.0 / count_f32(self.n));
        let [mut shifts] = hvx::zeros::<1>();
        let shifts: &mut [f32; 32] = bytemuck::cast_mut(&mut shifts);
        let is_shifted = matches!(self.norm, Norm::Mean(_));
        let squares = if is_shifted {
            let total = self.sums(None, false);
            hvx::store_f32(shifts, hvx::mul_f32(total, inverse));
            self.sums(Some(shifts), true)
        } else {
            self.sums(None, true)
        };
        let [mut factors] = hvx::zeros::<1>();
        hvx::store(&mut factors, self.norm.factor(squares, inverse));
        let factors: &[f32; 32] = bytemuck::cast_ref(&factors);
        let (src, (out, out_step)) = (self.src, self.out);
        for i in 0..self.count {
            let row = src.map(|(elems, step)| elems.get(i * step..).unwrap_or_default());
            let Some(out) = out.get_mut(i * out_step..i * out_step + self.n) else {
                return;
            };
            let scaling = Scaling {
                shift: is_shifted.then_some(splat_f32(shifts[i])),
                factor: splat_f32(factors[i]),
            };
            let (plus, plus_step) = self.plus;
            let plus = plus.get(i * plus_step..).unwrap_or_default();
            scaling.apply(row, self.times, plus, out);
        }
    }
}

/// [`NormRows`] of any number of rows of `LINES` lines that start with a line, of which there are
/// no addends. Without loops over elements, a short row takes few instructions. `MEANS` is for
/// [`Norm::Mean`].
struct ShortRows<'a, const LINES: usize, const MEANS: bool> {
    norm: Norm,
    /// Lines starting with the first row, and the number of lines from one row to the next; `None`
    /// if they are in the result's place.
    src: Option<(&'a [Line], usize)>,
    times: Option<&'a [Line; LINES]>,
    out: (&'a mut [Line], usize),
    count: usize,
}

impl<const LINES: usize, const MEANS: bool> ShortRows<'_, LINES, MEANS> {
    /// Returns a row's lines.
    #[inline(always)]
    fn row(&self, number: usize) -> Option<[Vector; LINES]> {
        let (elems, step) = self.src.unwrap_or((&*self.out.0, self.out.1));
        let lines: &[Line; LINES] = elems.get(number * step..)?.first_chunk()?;
        Some(lines.each_ref().map(hvx::load))
    }
}

impl<const LINES: usize, const MEANS: bool> hvx::Kernel for ShortRows<'_, LINES, MEANS> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let inverse = splat_f32(1.0 / count_f32(32 * LINES));
        let one = splat_f32(1.0);
        let mut times = [one; LINES];
        if let Some(lines) = self.times {
            times = lines.each_ref().map(hvx::load);
        }
        let mut sums = hvx::zeros::<GROUP>();
        let [mut shifts, mut factors] = hvx::zeros::<2>();
        for first in (0..self.count).step_by(GROUP) {
            let rows = GROUP.min(self.count - first);
            let mut is_last = !MEANS;
            hvx::store(&mut shifts, splat_w(0));
            // The first of two passes sums the elements, the last one the squares.
            loop {
                let shifts_of: &[f32; 32] = bytemuck::cast_ref(&shifts);
                for ((i, sum), shift) in sums.iter_mut().enumerate().take(rows).zip(shifts_of) {
                    let Some(mut parts) = self.row(first + i) else {
                        return;
                    };
                    let shift = splat_f32(*shift);
                    for part in &mut parts {
                        let x = match MEANS {
                            true => hvx::sub_f32(*part, shift),
                            false => *part,
                        };
                        *part = hvx::mul_f32(x, if is_last { x } else { one });
                    }
                    let mut width = LINES / 2;
                    while width > 0 {
                        for i in 0..width {
                            parts[i] = hvx::add_f32(parts[i], parts[i + width]);
                        }
                        width /= 2;
                    }
                    hvx::store(sum, parts[0]);
                }
                if is_last {
                    break;
                }
                hvx::store(&mut shifts, hvx::mul_f32(group_sums(&sums), inverse));
                is_last = true;
            }
            hvx::store(&mut factors, self.norm.factor(group_sums(&sums), inverse));
            let (factors, shifts): (&[f32; 32], &[f32; 32]) =
                (bytemuck::cast_ref(&factors), bytemuck::cast_ref(&shifts));
            for (i, (factor, shift)) in factors.iter().zip(shifts).take(rows).enumerate() {
                let Some(mut lanes) = self.row(first + i) else {
                    return;
                };
                let (factor, shift) = (splat_f32(*factor), splat_f32(*shift));
                for (lane, times) in lanes.iter_mut().zip(&times) {
                    let x = match MEANS {
                        true => hvx::sub_f32(*lane, shift),
                        false => *lane,
                    };
                    *lane = hvx::mul_f32(hvx::mul_f32(x, factor), *times);
                }
                let out = self.out.0.get_mut((first + i) * self.out.1..);
                let Some(to) = out.and_then(<[Line]>::first_chunk_mut::<LINES>) else {
                    return;
                };
                for (to, lane) in to.iter_mut().zip(lanes) {
                    hvx::store(to, lane);
                }
            }
        }
    }
}

/// Computes short rows that start with a line; returns `false` and writes nothing if they are
/// others.
fn short_rows<const LINES: usize, const MEANS: bool>(
    norm: Norm,
    src: Option<(&[f32], usize)>,
    times: &[f32],
    out: (&mut [f32], usize),
    count: usize,
) -> bool {
    // Factors that do not exist start anywhere.
    let factors = match times {
        [] => Some(None),
        _ => lines(times).map(<[Line]>::first_chunk),
    };
    let src = match src {
        Some((elems, step)) if step.is_multiple_of(32) => {
            lines(elems).map(|elems| Some((elems, step / 32)))
        }
        Some(_) => None,
        None => Some(None),
    };
    let (Some(src), Some(to), Some(times)) = (src, lines_mut(out.0), factors) else {
        return false;
    };
    if !out.1.is_multiple_of(32) {
        return false;
    }
    hvx::widest(ShortRows::<LINES, MEANS> {
        norm,
        src,
        times,
        out: (to, out.1 / 32),
        count,
    });
    true
}

impl Norm {
    /// Returns the factors of rows from the sums of their squares.
    #[inline(always)]
    fn factor(self, squares: Vector, inverse: Vector) -> Vector {
        match self {
            Self::Rms(eps) | Self::Mean(eps) => {
                let mean = hvx::mul_f32(squares, inverse);
                inverse_root(hvx::add_f32(mean, splat_f32(eps)))
            }
            Self::L2(eps) => {
                let length = math::sqrt(squares);
                math::reciprocal(hvx::max_f32(length, splat_f32(eps)))
            }
        }
    }
}

/// Returns `true` if rows of a shape are f32 without gaps inside.
fn is_rows(shape: &Shape) -> bool {
    shape.dtype == Type::F32 && shape.has_dense_rows()
}

/// Returns the row of an operand that all rows share, or an empty row if the operand does not
/// exist; `None` unless it is f32 without gaps.
fn shared_row<'a>(src: &Source<'a>, n: usize) -> Option<&'a [f32]> {
    match src {
        Source::Apart(view) if view.shape.ne == [n, 1, 1, 1] => view.floats([0; 3]),
        Source::None => Some(&[]),
        _ => None,
    }
}

/// The operands of a norm of several rows of f32 without gaps inside, of whole vectors.
struct RowOperands<'a> {
    /// `None` if the source is in the result's place.
    view: Option<View<'a>>,
    times: &'a [f32],
    plus: Addend<'a>,
}

/// The addend of rows.
#[derive(Clone, Copy)]
enum Addend<'a> {
    /// A row that all share, or none.
    Row(&'a [f32]),
    /// A row for each.
    Rows(View<'a>),
}

impl<'a> Addend<'a> {
    /// Returns the addend of rows of a shape, if it is one of f32 without gaps inside rows.
    fn of(dst: &Shape, src: &Source<'a>) -> Option<Self> {
        match (shared_row(src, dst.ne[0]), src) {
            (Some(row), _) => Some(Self::Row(row)),
            (_, Source::Apart(view)) => {
                let fits = is_rows(&view.shape) && view.shape.ne == dst.ne;
                fits.then_some(Self::Rows(*view))
            }
            _ => None,
        }
    }

    /// Returns the addend with the rows of all dimensions in dimension 1.
    fn merged(self) -> Option<Self> {
        match self {
            Self::Row(_) => Some(self),
            Self::Rows(view) => view.merged().map(Self::Rows),
        }
    }
}

impl<'a> RowOperands<'a> {
    /// Returns the operands, if result and source are such rows, and the factor is a row that all
    /// share.
    fn of(dst: &Shape, src: &[Source<'a>; 3]) -> Option<Self> {
        let n = dst.ne[0];
        let view = match src[0] {
            Source::Apart(view) => Some(view),
            Source::InPlace => None,
            Source::None => return None,
        };
        let are_rows = view.is_none_or(|view| is_rows(&view.shape));
        let fits = is_rows(dst) && are_rows && n.is_multiple_of(32);
        fits.then_some(Self {
            view,
            times: shared_row(&src[1], n)?,
            plus: Addend::of(dst, &src[2])?,
        })
    }
}

/// Computes [`norm`] of several rows at a time.
#[inline(never)]
fn norm_rows(engine: &Engine, norm: Norm, dst: ViewMut<'_>, operands: &RowOperands<'_>) {
    let RowOperands { view, times, plus } = operands;
    let (times, n) = (*times, dst.shape.ne[0]);
    let (mut dst, mut view, mut plus) = (dst, *view, *plus);
    let merged = match view {
        Some(view) => view.merged().map(Some),
        None => Some(None),
    };
    if let (Some(shape), Some(merged), Some(addend)) = (dst.shape.merged(), merged, plus.merged()) {
        (dst, view, plus) = (dst.reshaped(shape), merged, addend);
    }
    let packets = || row_packets(n, 2 * ARITHMETIC);
    dst.for_parts(engine, packets, |part| {
        part.for_each_run(|mut run| {
            let ([i1, i2, i3], count) = (run.at, run.count);
            let src = view.map(|view| view.float_rows([i1, i2, i3], count));
            if src == Some(None) {
                return;
            }
            let src = src.flatten();
            let (plus, plus_step) = match &plus {
                Addend::Row(row) => (*row, 0),
                Addend::Rows(view) => match view.float_rows([i1, i2, i3], count) {
                    Some(rows) => rows,
                    None => return,
                },
            };
            let Some((out, out_step)) = run.floats() else {
                return;
            };
            let short = match n {
                _ if !plus.is_empty() => None,
                // The norm of RWKV's heads.
                64 if matches!(norm, Norm::Mean(_)) => Some(short_rows::<2, true>(
                    norm,
                    src,
                    times,
                    (&mut *out, out_step),
                    count,
                )),
                _ if matches!(norm, Norm::Mean(_)) => None,
                64 => Some(short_rows::<2, false>(
                    norm,
                    src,
                    times,
                    (&mut *out, out_step),
                    count,
                )),
                128 => Some(short_rows::<4, false>(
                    norm,
                    src,
                    times,
                    (&mut *out, out_step),
                    count,
                )),
                256 => Some(short_rows::<8, false>(
                    norm,
                    src,
                    times,
                    (&mut *out, out_step),
                    count,
                )),
                _ => None,
            };
            if short == Some(true) {
                return;
            }
            for start in (0..count).step_by(GROUP) {
                let rows = GROUP.min(count - start);
                // Fetch the next rows, as many as one instruction can fetch.
                let next = i1 + start + rows;
                if let Some(view) = &view {
                    view.fetch(
                        [next, i2, i3],
                        GROUP.min(view.shape.ne[1].saturating_sub(next)),
                    );
                }
                hvx::widest(NormRows {
                    norm,
                    src: src
                        .map(|(elems, step)| (elems.get(start * step..).unwrap_or_default(), step)),
                    times,
                    plus: (plus.get(start * plus_step..).unwrap_or_default(), plus_step),
                    out: (
                        out.get_mut(start * out_step..).unwrap_or_default(),
                        out_step,
                    ),
                    n,
                    count: rows,
                });
            }
        });
    });
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
        check_broadcast(&dst.shape, repeated)?;
    }
    if dst.shape.ne[1..] != [1; 3]
        && let Some(operands) = RowOperands::of(&dst.shape, src)
    {
        norm_rows(engine, norm, dst, &operands);
        return Ok(());
    }
    // Rows are not divided: joining partial sums would need another step.
    let n = dst.shape.ne[0];
    let packets = || row_packets(n, 2 * ARITHMETIC);
    // Fetch the weights only now; they are read after the sum of the first row.
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
