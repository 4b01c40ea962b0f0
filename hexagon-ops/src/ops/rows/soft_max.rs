//! SOFT_MAX: `exp(x · scale + slope · mask - max) / sum`, three passes over a row.
//!
//! ```text
//! x = src · scale + slope · mask     written to the result's row; max in lanes
//! e = exp(x - max)                   written back; sum in lanes
//! y = e / sum
//! ```
//!
//! A result in f32 serves as memory between the passes. A sink takes part in maximum and sum, and
//! has no result. Completely masked rows are outside ggml's contract.

use super::{all_lanes, load};
use crate::error::{Error, Result};
use crate::hvx::{self, Vector, splat_f32, splat_w};
use crate::ops::elementwise::same_shape;
use crate::ops::math::{self, scalar};
use crate::ops::tensor::{CHUNK, Chunks, Row, Source, Type, ViewMut};
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
        // Without a bias the bases are not used; powers are slow on the DSP.
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

/// Writes the lanes of up to 32 elements.
#[inline(always)]
fn store(out: &mut [f32], v: Vector) {
    match out.first_chunk_mut::<32>() {
        Some(whole) => hvx::store_f32(whole, v),
        None => {
            let mut lanes = [0.0; 32];
            hvx::store_f32(&mut lanes, v);
            out.copy_from_slice(&lanes[..out.len()]);
        }
    }
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

impl hvx::Kernel for SoftMaxRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(mut self) {
        let n = self.row.len();
        let (scale, slope) = (splat_f32(self.scale), splat_f32(self.slope));
        let mut largest = splat_f32(self.sink.unwrap_or(f32::NEG_INFINITY));
        let [chunk, mask_chunk, out, _] = self.chunks;
        for start in (0..n).step_by(CHUNK) {
            let range = start..n.min(start + CHUNK);
            let x = self.src.read(&self.row, range.clone(), chunk);
            let mask = self.mask.read(&self.row, range.clone(), mask_chunk);
            for (i, out) in out[..range.len()].chunks_mut(32).enumerate() {
                let x = load(x, 32 * i);
                // The mask is loaded before the first product: a load may be a call, which vector registers do not survive.
                let x = if mask.is_empty() {
                    hvx::mul_f32(x, scale)
                } else {
                    let mask = load(mask, 32 * i);
                    hvx::add_f32(hvx::mul_f32(x, scale), hvx::mul_f32(mask, slope))
                };
                store(out, x);
                largest = hvx::max_f32(largest, load_filled(out, f32::NEG_INFINITY));
            }
            self.row.write(start, &out[..range.len()]);
        }
        let largest = all_lanes(largest, hvx::max_f32);
        let mut total = splat_w(0);
        for start in (0..n).step_by(CHUNK) {
            let out = &mut out[..CHUNK.min(n - start)];
            self.row.read_back(start, out);
            for out in out.chunks_mut(32) {
                let x = load_filled(out, f32::NEG_INFINITY);
                let e = math::exp(hvx::sub_f32(x, largest));
                total = hvx::add_f32(total, e);
                store(out, e);
            }
            self.row.write(start, out);
        }
        let mut total = all_lanes(total, hvx::add_f32);
        if let Some(sink) = self.sink {
            let e = math::exp(hvx::sub_f32(splat_f32(sink), largest));
            total = hvx::add_f32(total, e);
        }
        let factor = math::reciprocal(total);
        for start in (0..n).step_by(CHUNK) {
            let out = &mut out[..CHUNK.min(n - start)];
            self.row.read_back(start, out);
            for out in out.chunks_mut(32) {
                store(out, hvx::mul_f32(load(out, 0), factor));
            }
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
            let repeats = ne[2].is_multiple_of(m[2]) && ne[3].is_multiple_of(m[3]);
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
    let slopes = Slopes::new(ne[2], params.max_bias);
    dst.for_rows_with_chunks(engine, |row, chunks| {
        let head = row.at[1];
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
