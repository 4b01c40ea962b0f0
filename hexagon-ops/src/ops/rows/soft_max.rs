//! SOFT_MAX: `exp(x · scale + slope · mask - max) / sum`, three passes over a row.
//!
//! ```text
//! x = src · scale + slope · mask     written to the result's row; max in lanes, and whether any is NaN
//! e = exp(x - max)                   written back; sum in lanes
//! y = e / sum
//! ```
//!
//! A result in f32 serves as memory between the passes. A sink counts for maximum and sum, but has
//! no result. Completely masked rows are outside ggml's contract.

use super::{all_lanes, load};
use crate::error::{Error, Result};
use crate::hvx::{self, Vector, splat_f32, splat_w};
use crate::ops::elementwise::{BESIDE, dense, put, same_shape};
use crate::ops::math::{self, scalar};
use crate::ops::tensor::{
    CHUNK, Chunks, FUNCTION, Row, Shape, Source, Type, View, ViewMut, divides, fetch_after,
    fetch_first, row_packets,
};
use crate::rt::Engine;

/// Parameters of a softmax.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SoftMax {
    /// Factor of the source.
    pub scale: f32,
    /// Largest ALiBi bias; 0 if the mask's factor is 1 for all heads.
    pub max_bias: f32,
}

/// Bases of the slopes of attention heads.
///
/// Source: ggml `ggml_compute_forward_soft_max_f32`.
#[derive(Clone, Copy, Debug)]
pub(in crate::ops) struct Slopes {
    /// Heads below this power of two use powers of the first base, the others of the second.
    n_heads_log2: usize,
    bases: [f64; 2],
    used: bool,
}

impl Slopes {
    /// Returns the slopes of `n_heads` heads.
    pub(in crate::ops) fn new(n_heads: usize, max_bias: f32) -> Self {
        let n_heads_log2 = 1_usize << n_heads.max(1).ilog2();
        let count = f64::from(u32::try_from(n_heads_log2).unwrap_or(u32::MAX));
        // Without a bias the bases are not used, and powers are slow on the DSP.
        let base = |bias: f32| match bias > 0.0 {
            true => scalar::power(2.0, -f64::from(bias) / count),
            false => 1.0,
        };
        Self {
            n_heads_log2,
            bases: [base(max_bias), base(max_bias / 2.0)],
            used: max_bias > 0.0,
        }
    }

    /// Returns `true` unless the slopes of all heads are 1.
    pub(in crate::ops) fn is_used(&self) -> bool {
        self.used
    }

    /// Returns the slope of a head.
    #[expect(clippy::cast_possible_truncation, reason = "rounded to f32")]
    pub(in crate::ops) fn of(&self, head: usize) -> f32 {
        if !self.used {
            return 1.0;
        }
        let (base, exponent) = match head.checked_sub(self.n_heads_log2) {
            None => (self.bases[0], head + 1),
            Some(rest) => (self.bases[1], 2 * rest + 1),
        };
        let exponent = f64::from(u32::try_from(exponent).unwrap_or(u32::MAX));
        scalar::power(base, exponent) as f32
    }
}

/// The arguments of [`soft_max`] for one row.
struct SoftMaxRow<'a> {
    row: Row<'a>,
    src: &'a Source<'a>,
    mask: &'a Source<'a>,
    scale: f32,
    slope: f32,
    sink: Option<f32>,
    chunks: &'a mut Chunks,
}

/// Loads 32 elements, with `fill` past the end.
#[inline(always)]
fn load_filled(elems: &[f32], fill: f32) -> Vector {
    match elems.first_chunk::<32>() {
        Some(whole) => hvx::load_f32(whole),
        None => {
            let mut padded = [fill; 32];
            padded[..elems.len()].copy_from_slice(elems);
            hvx::load_f32(&padded)
        }
    }
}

/// The largest scores, and the largest magnitudes as bits: those of NaN are the largest, and maxima
/// lose NaN.
#[derive(Clone, Copy)]
struct Largest {
    score: Vector,
    magnitude: Vector,
}

impl Largest {
    /// Adds scores.
    #[inline(always)]
    fn with(self, scores: Vector) -> Self {
        Self {
            score: hvx::max_f32(self.score, scores),
            magnitude: hvx::larger_f32(self.magnitude, scores),
        }
    }
}

/// Writes `x · scale + slope · mask` to `out`, without the mask if it is empty; returns `largest`
/// with these added.
#[inline(always)]
fn scores(
    (x, mask): (&[f32], &[f32]),
    [scale, slope]: [Vector; 2],
    out: &mut [f32],
    mut largest: Largest,
) -> Largest {
    let (whole, rest) = x.as_chunks::<32>();
    let lanes = out.as_chunks_mut::<32>().0.iter_mut();
    if mask.is_empty() {
        for (out, x) in lanes.zip(whole) {
            let score = hvx::mul_f32(hvx::load_f32(x), scale);
            largest = largest.with(score);
            hvx::store_f32(out, score);
        }
    } else {
        for ((out, x), mask) in lanes.zip(whole).zip(mask.as_chunks::<32>().0) {
            let (x, mask) = (hvx::load_f32(x), hvx::load_f32(mask));
            let score = hvx::add_f32(hvx::mul_f32(x, scale), hvx::mul_f32(mask, slope));
            largest = largest.with(score);
            hvx::store_f32(out, score);
        }
    }
    if !rest.is_empty() {
        let k = 32 * whole.len();
        // Load the mask before the first product: a load may be a function call, across which
        // vector registers are not kept.
        let (x, mask) = (load(x, k), load(mask, k));
        let score = hvx::add_f32(hvx::mul_f32(x, scale), hvx::mul_f32(mask, slope));
        put(score, &mut out[k..], rest.len());
        largest = largest.with(load_filled(&out[k..], f32::NEG_INFINITY));
    }
    largest
}

/// Replaces elements by `exp(x - largest)`, and returns `total` with them added.
#[inline(always)]
fn exponentials(out: &mut [f32], largest: Vector, mut total: Vector) -> Vector {
    // Several vectors at a time, so that the steps of one fill the waiting times of the others.
    let (groups, rest) = out.as_chunks_mut::<{ 32 * BESIDE }>();
    for group in groups {
        let group: &mut [[f32; 32]; BESIDE] = bytemuck::cast_mut(group);
        let mut lanes = group.each_ref().map(hvx::load_f32);
        for lane in &mut lanes {
            *lane = math::exp_below_one(hvx::sub_f32(*lane, largest));
        }
        for (out, lane) in group.iter_mut().zip(lanes) {
            total = hvx::add_f32(total, lane);
            hvx::store_f32(out, lane);
        }
    }
    for out in rest.chunks_mut(32) {
        let x = load_filled(out, f32::NEG_INFINITY);
        let e = math::exp_below_one(hvx::sub_f32(x, largest));
        total = hvx::add_f32(total, e);
        put(e, out, out.len());
    }
    total
}

/// Multiplies elements by a factor.
#[inline(always)]
fn multiply(out: &mut [f32], factor: Vector) {
    let (whole, rest) = out.as_chunks_mut::<32>();
    for out in whole {
        hvx::store_f32(out, hvx::mul_f32(hvx::load_f32(out), factor));
    }
    if !rest.is_empty() {
        put(hvx::mul_f32(load(rest, 0), factor), rest, rest.len());
    }
}

/// The arguments of [`soft_max`] for rows of f32 without gaps inside, which have no mask and no
/// sink.
struct SoftMaxRows<'a> {
    /// Elements starting with the first row, and the number of elements from one row to the next.
    src: (&'a [f32], usize),
    out: (&'a mut [f32], usize),
    n: usize,
    count: usize,
    scale: f32,
}

impl hvx::Kernel for SoftMaxRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let ((src, step), (out, out_step), n) = (self.src, self.out, self.n);
        let factors = [splat_f32(self.scale), splat_w(0)];
        let first = splat_f32(f32::NEG_INFINITY);
        for i in 0..self.count {
            let row = src.get(i * step..i * step + n);
            let out = out.get_mut(i * out_step..i * out_step + n);
            let (Some(row), Some(out)) = (row, out) else {
                return;
            };
            let largest = Largest {
                score: first,
                magnitude: math::abs(first),
            };
            let largest = scores((row, &[]), factors, out, largest);
            let magnitude = all_lanes(largest.magnitude, hvx::max_w);
            let largest = all_lanes(largest.score, hvx::max_f32);
            let total = all_lanes(exponentials(out, largest, splat_w(0)), hvx::add_f32);
            multiply(out, math::or_nan(magnitude, math::reciprocal(total)));
        }
    }
}

/// Returns `true` if rows of a shape are f32 without gaps inside.
fn is_rows(shape: &Shape) -> bool {
    shape.dtype == Type::F32 && shape.has_dense_rows()
}

/// Computes [`soft_max`] of rows of f32 without gaps inside, mask and sinks, several rows at a
/// time.
#[inline(never)]
fn soft_max_rows(engine: &Engine, scale: f32, dst: ViewMut<'_>, view: &View<'_>) {
    let (mut dst, mut view) = (dst, *view);
    if let (Some(shape), Some(merged)) = (dst.shape.merged(), view.merged()) {
        (dst, view) = (dst.reshaped(shape), merged);
    }
    let n = dst.shape.ne[0];
    let packets = || row_packets(n, FUNCTION);
    dst.for_parts(engine, packets, |part| {
        part.for_each_run(|mut run| {
            let ([i1, i2, i3], count) = (run.at, run.count);
            let (Some(src), Some(out)) = (view.float_rows([i1, i2, i3], count), run.floats())
            else {
                return;
            };
            hvx::widest(SoftMaxRows {
                src,
                out,
                n,
                count,
                scale,
            });
        });
    });
}

impl hvx::Kernel for SoftMaxRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let n = self.row.len();
        let factors = [splat_f32(self.scale), splat_f32(self.slope)];
        let first = splat_f32(self.sink.unwrap_or(f32::NEG_INFINITY));
        let mut largest = Largest {
            score: first,
            magnitude: math::abs(first),
        };
        let [chunk, mask_chunk, copy, _] = self.chunks;
        let is_dense = self.row.floats().is_some();
        let dense = match [self.src, self.mask].map(|src| dense(src, &self.row, 0)) {
            [Some(x), Some(mask)] if is_dense => Some((x, mask)),
            _ => None,
        };
        let step = if dense.is_some() { n } else { CHUNK };
        let mut start = 0;
        while start < n {
            let range = start..n.min(start + step);
            let sources = dense.unwrap_or_else(|| {
                (
                    self.src.read(&self.row, range.clone(), chunk),
                    self.mask.read(&self.row, range.clone(), mask_chunk),
                )
            });
            let len = range.len();
            let place = self.row.floats().map(|row| &mut row[range]);
            let out = place.unwrap_or(&mut copy[..len.min(CHUNK)]);
            largest = scores(sources, factors, out, largest);
            if !is_dense {
                self.row.write(start, &copy[..len]);
            }
            start += len;
        }
        let magnitude = all_lanes(largest.magnitude, hvx::max_w);
        let largest = all_lanes(largest.score, hvx::max_f32);
        let mut total = splat_w(0);
        let step = if is_dense { n } else { CHUNK };
        let mut start = 0;
        while start < n {
            let range = start..n.min(start + step);
            if !is_dense {
                self.row.read_back(start, &mut copy[..range.len()]);
            }
            let len = range.len();
            let place = self.row.floats().map(|row| &mut row[range]);
            let out = place.unwrap_or(&mut copy[..len.min(CHUNK)]);
            total = exponentials(out, largest, total);
            if !is_dense {
                self.row.write(start, &copy[..len]);
            }
            start += len;
        }
        let mut total = all_lanes(total, hvx::add_f32);
        if let Some(sink) = self.sink {
            let e = math::exp(hvx::sub_f32(splat_f32(sink), largest));
            total = hvx::add_f32(total, e);
        }
        let factor = math::or_nan(magnitude, math::reciprocal(total));
        if let Some(out) = self.row.floats() {
            return multiply(out, factor);
        }
        for start in (0..n).step_by(CHUNK) {
            let out = &mut copy[..CHUNK.min(n - start)];
            self.row.read_back(start, out);
            multiply(out, factor);
            self.row.write(start, out);
        }
    }
}

/// Returns the f32 of a sink for each head.
fn sink(sinks: &Source<'_>, head: usize) -> Option<f32> {
    let Source::Apart(view) = sinks else {
        return None;
    };
    Some(view.element(head, [0; 3]))
}

/// Computes the softmax of each row.
///
/// - `src`: the source; the mask (f32 or f16, dimension 1 at least as long, dimensions 2 and 3
///   repeated) or nothing; the sinks (one f32 for each index of dimension 2) or nothing
///
/// # Errors
/// `Operand` unless source and result are of one shape, the result is f32, and mask and sinks are
/// as above.
pub fn soft_max(
    engine: &Engine,
    params: SoftMax,
    dst: ViewMut<'_>,
    [src, mask, sinks]: &[Source<'_>; 3],
) -> Result<()> {
    same_shape(&dst.shape, src)?;
    let ne = dst.shape.ne;
    let mask_fits = match mask {
        // ggml's allocator may put the result over a mask of the same shape.
        Source::None | Source::InPlace => true,
        Source::Apart(view) => {
            let m = view.shape.ne;
            let repeats = divides(m[2], ne[2]) && divides(m[3], ne[3]);
            view.shape.dtype.is_float() && m[0] == ne[0] && m[1] >= ne[1] && repeats
        }
    };
    let sinks_fit = match sinks {
        Source::None => true,
        Source::InPlace => false,
        Source::Apart(view) => view.shape.ne[0] == ne[2] && view.shape.dtype == Type::F32,
    };
    if dst.shape.dtype != Type::F32 || !mask_fits || !sinks_fit {
        return Err(Error::Operand);
    }
    if ne[1..] != [1; 3]
        && let (Source::Apart(view), Source::None, Source::None) = (src, mask, sinks)
        && is_rows(&dst.shape)
        && is_rows(&view.shape)
    {
        soft_max_rows(engine, params.scale, dst, view);
        return Ok(());
    }
    let slopes = Slopes::new(ne[2], params.max_bias);
    let packets = || row_packets(ne[0], FUNCTION);
    fetch_first(mask);
    dst.for_rows_with_chunks(engine, packets, |row, chunks| {
        let head = row.at[1];
        fetch_after(&row, &[src, mask]);
        hvx::widest(SoftMaxRow {
            src,
            mask,
            scale: params.scale,
            slope: slopes.of(head),
            sink: sink(sinks, head),
            row,
            chunks,
        });
    });
    Ok(())
}
