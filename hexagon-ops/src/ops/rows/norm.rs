//! RMS_NORM, NORM, L2_NORM, SUM_ROWS, MEAN and SUM: one or two passes that sum, one that writes.

use super::{all_lanes, count_f32, load};
use crate::error::{Error, Result};
use crate::hvx::{self, Vector, splat_f32, splat_w};
use crate::ops::elementwise::same_shape;
use crate::ops::math;
use crate::ops::tensor::{CHUNK, Chunk, Row, Source, View, ViewMut};
use crate::rt::Engine;

/// What a row is divided by; the number is ggml's epsilon.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Norm {
    /// `sqrt(mean(x²) + eps)`.
    Rms(f32),
    /// `sqrt(mean((x - mean x)²) + eps)`, of `x - mean x`.
    Mean(f32),
    /// `max(sqrt(sum(x²)), eps)`.
    L2(f32),
}

/// Sum over a row of `x - shift`, or of its square; in all lanes.
#[inline(always)]
fn sum(row: &Row<'_>, src: &Source<'_>, n: usize, shift: Vector, squared: bool) -> Vector {
    let mut chunk: Chunk = [0.0; CHUNK];
    let mut sums = [splat_w(0); 2];
    for start in (0..n).step_by(CHUNK) {
        let elems = src.read(row, start..n.min(start + CHUNK), &mut chunk);
        for (i, elems) in elems.chunks(32).enumerate() {
            let x = hvx::sub_f32(load(elems, 0), shift);
            let x = if squared { hvx::mul_f32(x, x) } else { x };
            let x = if elems.len() < 32 {
                // Lanes behind the end hold the shift.
                let mut lanes = [0.0; 32];
                hvx::store_f32(&mut lanes, x);
                lanes[elems.len()..].fill(0.0);
                hvx::load_f32(&lanes)
            } else {
                x
            };
            sums[i % 2] = hvx::add_f32(sums[i % 2], x);
        }
    }
    all_lanes(hvx::add_f32(sums[0], sums[1]), hvx::add_f32)
}

/// [`norm`] of one row.
struct NormRow<'a> {
    norm: Norm,
    row: Row<'a>,
    src: &'a Source<'a>,
}

impl hvx::Kernel for NormRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(mut self) {
        let n = self.row.len();
        let inverse = splat_f32(1.0 / count_f32(n));
        let mut shift = splat_w(0);
        if let Norm::Mean(_) = self.norm {
            let total = sum(&self.row, self.src, n, shift, false);
            shift = hvx::mul_f32(total, inverse);
        }
        let squares = sum(&self.row, self.src, n, shift, true);
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
        let mut chunk: Chunk = [0.0; CHUNK];
        let mut out: Chunk = [0.0; CHUNK];
        for start in (0..n).step_by(CHUNK) {
            let len = CHUNK.min(n - start);
            let elems = self.src.read(&self.row, start..start + len, &mut chunk);
            for (out, elems) in out.as_chunks_mut::<32>().0.iter_mut().zip(elems.chunks(32)) {
                let x = hvx::sub_f32(load(elems, 0), shift);
                hvx::store_f32(out, hvx::mul_f32(x, factor));
            }
            self.row.write(start, &out[..len]);
        }
    }
}

/// `1 / sqrt(x)`; infinity for zero, as a row of zeros without epsilon has it.
#[inline(always)]
fn inverse_root(x: Vector) -> Vector {
    let smallest = splat_f32(f32::MIN_POSITIVE);
    hvx::select_gt_f32(smallest, x, splat_f32(f32::INFINITY), math::rsqrt(x))
}

/// Divides each row of `src` by a measure of its own.
///
/// # Errors
/// `Operand` unless both are floats of one shape.
pub fn norm(engine: &Engine, norm: Norm, dst: ViewMut<'_>, src: &Source<'_>) -> Result<()> {
    same_shape(&dst.shape, src)?;
    dst.for_rows(engine, |row| hvx::widest(NormRow { norm, row, src }));
    Ok(())
}

/// [`sum_rows`] of one row.
struct SumRow<'a> {
    row: Row<'a>,
    src: &'a Source<'a>,
    n: usize,
    is_mean: bool,
}

impl hvx::Kernel for SumRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(mut self) {
        let total = sum(&self.row, self.src, self.n, splat_w(0), false);
        let total = super::first_lane(total);
        let divisor = if self.is_mean { count_f32(self.n) } else { 1.0 };
        self.row.write(0, &[total / divisor]);
    }
}

/// Sums each row of `src` to one element, or takes its mean.
///
/// # Errors
/// `Operand` unless both are floats, and the result has rows of one element and the source's other dimensions.
pub fn sum_rows(engine: &Engine, is_mean: bool, dst: ViewMut<'_>, src: &Source<'_>) -> Result<()> {
    let view = src.apart()?;
    let mut want = view.shape.ne;
    want[0] = 1;
    if dst.shape.ne != want || !dst.shape.dtype.is_float() || !view.shape.dtype.is_float() {
        return Err(Error::Operand);
    }
    let n = view.shape.ne[0];
    dst.for_rows(engine, |row| {
        hvx::widest(SumRow {
            row,
            src,
            n,
            is_mean,
        });
    });
    Ok(())
}

/// [`sum_all`]: rows in f32, their sums in f64, as rows of different signs may cancel.
struct SumAll<'a> {
    row: Row<'a>,
    view: &'a View<'a>,
}

impl hvx::Kernel for SumAll<'_> {
    type Output = ();

    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "rounded to f32")]
    fn run<const FUSED: bool>(mut self) {
        let [n0, n1, n2, n3] = self.view.shape.ne;
        let mut total = 0.0_f64;
        for i in 0..n1 * n2 * n3 {
            let planes = i / n1;
            let source = Source::Apart(self.view.row([i % n1, planes % n2, planes / n2]));
            let row = sum(&self.row, &source, n0, splat_w(0), false);
            total += f64::from(super::first_lane(row));
        }
        self.row.write(0, &[total as f32]);
    }
}

/// Sums all elements of `src` to one.
///
/// # Errors
/// `Operand` unless both are floats and the result has one element.
pub fn sum_all(engine: &Engine, dst: ViewMut<'_>, src: &Source<'_>) -> Result<()> {
    let view = &src.apart()?;
    let floats = dst.shape.dtype.is_float() && view.shape.dtype.is_float();
    if dst.shape.ne != [1; 4] || !floats {
        return Err(Error::Operand);
    }
    dst.for_rows(engine, |row| hvx::widest(SumAll { row, view }));
    Ok(())
}
