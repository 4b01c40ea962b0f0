//! ROPE: pairs of a row's elements rotated by angles that depend on the row's position.
//!
//! ```text
//! for each row at position p (index of dimension 2)
//!   for each chunk of 128 pairs
//!     angle  = p · base^(-2 j / n_dims) / factor[j], mixed with its interpolation (YaRN)     when p changes
//!     c, s   = magnitude · cos, sin
//!     y0, y1 = x0 c - x1 s, x0 s + x1 c
//! ```
//!
//! The angles are products of FP32 numbers in ggml's order, so that they are ggml's to the bit; sine and cosine are exact
//! to FP32 for each angle. Rows of one position follow one another (heads are dimension 1), and a task keeps the table
//! of its latest position.

use super::load;
use crate::error::{Error, Result};
use crate::hvx;
use crate::ops::elementwise::same_shape;
use crate::ops::math::{self, scalar};
use crate::ops::tensor::{CHUNK, Chunk, Row, Source, View, ViewMut};
use crate::rt::Engine;

/// Most pairs of a row: heads of 512 elements.
pub const MAX_PAIRS: usize = 256;

/// Which elements are a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairs {
    /// Neighbours (ggml's normal mode).
    Adjacent,
    /// Element i and i + n_dims / 2 (ggml's neox mode).
    Halves,
}

/// Parameters of a rotation.
///
/// Source: ggml `ggml_compute_forward_rope_flt`, `rope_yarn`, `ggml_rope_yarn_corr_dims`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Which elements are a pair.
    pub pairs: RopePairs,
    /// Elements that are rotated: even, at most `2 · MAX_PAIRS`.
    pub n_dims: usize,
    /// Element that they start at: even.
    pub first: usize,
    /// Context that the model was trained on, tokens.
    pub n_ctx_orig: i32,
    /// Base of the frequencies.
    pub freq_base: f32,
    /// Factor of interpolated angles.
    pub freq_scale: f32,
    /// How much of the angles YaRN leaves as they are; 0: no YaRN.
    pub ext_factor: f32,
    /// Factor of the results.
    pub attn_factor: f32,
    /// Turns over the original context from which on YaRN leaves angles as they are.
    pub beta_fast: f32,
    /// Turns below which it interpolates.
    pub beta_slow: f32,
}

/// What is the same for all positions.
struct Constants {
    theta_scale: f32,
    ramp: [f32; 2],
    magnitude: f32,
}

impl Constants {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "rounded to f32, as ggml has them"
    )]
    fn new(rope: &Rope) -> Self {
        let n_dims = f64::from(u32::try_from(rope.n_dims).unwrap_or(u32::MAX));
        let base = f64::from(rope.freq_base);
        let theta_scale = scalar::power(base, -2.0 / n_dims) as f32;
        let turn = |beta: f32| {
            let turns = f64::from(beta) * core::f64::consts::TAU;
            let ratio = f64::from(rope.n_ctx_orig) / turns;
            n_dims * scalar::ln(ratio) / (2.0 * scalar::ln(base))
        };
        let mut magnitude = rope.attn_factor;
        let mut ramp = [0.0; 2];
        if rope.ext_factor != 0.0 {
            let start = scalar::floor(turn(rope.beta_fast)).max(0.0);
            let end = (-scalar::floor(-turn(rope.beta_slow))).min(n_dims - 1.0);
            ramp = [start as f32, end as f32];
            magnitude *= 1.0 + 0.1 * scalar::ln(1.0 / f64::from(rope.freq_scale)) as f32;
        }
        Self {
            theta_scale,
            ramp,
            magnitude,
        }
    }
}

/// Sines and cosines of one position.
struct Table {
    position: Option<i64>,
    cosine: [f32; MAX_PAIRS],
    sine: [f32; MAX_PAIRS],
}

impl Table {
    const EMPTY: Self = Self {
        position: None,
        cosine: [0.0; MAX_PAIRS],
        sine: [0.0; MAX_PAIRS],
    };

    /// Makes the table one of `position`.
    #[inline(always)]
    #[expect(
        clippy::cast_precision_loss,
        reason = "ggml's positions are rounded to f32 as well; pairs are few"
    )]
    fn fill(&mut self, position: i64, rope: &Rope, constants: &Constants, factors: &Source<'_>) {
        if self.position == Some(position) {
            return;
        }
        self.position = Some(position);
        let n_pairs = rope.n_dims / 2;
        let mut chunk: Chunk = [1.0; CHUNK];
        let factors = match factors {
            Source::Apart(view) => view.read([0; 3], 0..n_pairs, &mut chunk),
            _ => &chunk,
        };
        let mut theta = position as f32;
        let [low, high] = constants.ramp;
        for (j, (angle, factor)) in self.sine.iter_mut().zip(factors).take(n_pairs).enumerate() {
            let extrapolated = theta / factor;
            *angle = rope.freq_scale * extrapolated;
            if rope.ext_factor != 0.0 {
                let y = (j as f32 - low) / (high - low).max(0.001);
                let mix = (1.0 - y.clamp(0.0, 1.0)) * rope.ext_factor;
                *angle = *angle * (1.0 - mix) + extrapolated * mix;
            }
            theta *= constants.theta_scale;
        }
        let magnitude = hvx::splat_f32(constants.magnitude);
        let cosines = self.cosine.as_chunks_mut::<32>().0;
        let sines = self.sine.as_chunks_mut::<32>().0;
        for (cosine, sine) in cosines.iter_mut().zip(sines).take(n_pairs.div_ceil(32)) {
            let (s, c) = math::sin_cos(hvx::load_f32(sine));
            hvx::store_f32(sine, hvx::mul_f32(s, magnitude));
            hvx::store_f32(cosine, hvx::mul_f32(c, magnitude));
        }
    }
}

/// [`rope`] of one row.
struct RopeRow<'a> {
    row: Row<'a>,
    src: &'a Source<'a>,
    rope: &'a Rope,
    constants: &'a Constants,
    table: &'a mut Table,
    position: i64,
    factors: &'a Source<'a>,
}

impl hvx::Kernel for RopeRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(mut self) {
        let rope = self.rope;
        self.table
            .fill(self.position, rope, self.constants, self.factors);
        let (mut a, mut b): (Chunk, Chunk) = ([0.0; CHUNK], [0.0; CHUNK]);
        let half = rope.n_dims / 2;
        for pair in (0..half).step_by(CHUNK / 2) {
            let len = (half - pair).min(CHUNK / 2);
            // The second read happens before the first write: rows are rotated in place.
            match rope.pairs {
                RopePairs::Halves => {
                    let at = rope.first + pair;
                    let (mut y0, mut y1): (Chunk, Chunk) = ([0.0; CHUNK], [0.0; CHUNK]);
                    let x0 = self.src.read(&self.row, at..at + len, &mut a);
                    let x1 = self.src.read(&self.row, at + half..at + half + len, &mut b);
                    for i in (0..len).step_by(32) {
                        let (v0, v1) = self.table.rotate(pair + i, load(x0, i), load(x1, i));
                        set(&mut y0, i, v0);
                        set(&mut y1, i, v1);
                    }
                    self.row.write(at, &y0[..len]);
                    self.row.write(at + half, &y1[..len]);
                }
                RopePairs::Adjacent => {
                    let at = rope.first + 2 * pair;
                    let x = self.src.read(&self.row, at..at + 2 * len, &mut a);
                    for i in (0..len).step_by(32) {
                        let (x0, x1) = hvx::deal_w(load(x, 2 * i), load(x, 2 * i + 32));
                        let (v0, v1) = self.table.rotate(pair + i, x0, x1);
                        let (low, high) = hvx::interleave_w(v0, v1);
                        set(&mut b, 2 * i, low);
                        set(&mut b, 2 * i + 32, high);
                    }
                    self.row.write(at, &b[..2 * len]);
                }
            }
        }
        if matches!(self.src, Source::InPlace) {
            return;
        }
        // What is not rotated is copied.
        for range in [0..rope.first, rope.first + rope.n_dims..self.row.len()] {
            for start in range.clone().step_by(CHUNK) {
                let end = range.end.min(start + CHUNK);
                let x = self.src.read(&self.row, start..end, &mut a);
                self.row.write(start, x);
            }
        }
    }
}

/// Writes 32 elements from `i` on.
#[inline(always)]
fn set(chunk: &mut Chunk, i: usize, v: hvx::Vector) {
    if let Some(out) = chunk[i..].first_chunk_mut::<32>() {
        hvx::store_f32(out, v);
    }
}

impl Table {
    /// Pairs from `pair` on, rotated.
    #[inline(always)]
    fn rotate(&self, pair: usize, x0: hvx::Vector, x1: hvx::Vector) -> (hvx::Vector, hvx::Vector) {
        let (c, s) = (load(&self.cosine, pair), load(&self.sine, pair));
        (
            hvx::sub_f32(hvx::mul_f32(x0, c), hvx::mul_f32(x1, s)),
            hvx::add_f32(hvx::mul_f32(x0, s), hvx::mul_f32(x1, c)),
        )
    }
}

/// Refuses parameters that do not fit the row.
fn check(rope: &Rope, row: usize, positions: &View<'_>, n_positions: usize) -> Result<()> {
    let end = rope.first.checked_add(rope.n_dims);
    let fits = end.is_some_and(|end| end <= row) && (2..=2 * MAX_PAIRS).contains(&rope.n_dims);
    let even = rope.n_dims.is_multiple_of(2) && rope.first.is_multiple_of(2);
    let base = rope.freq_base.is_normal() && rope.freq_base > 0.0;
    let yarn = rope.ext_factor == 0.0
        || [rope.freq_scale, rope.beta_fast, rope.beta_slow]
            .iter()
            .all(|x| x.is_normal() && *x > 0.0)
            && rope.n_ctx_orig > 0
            && rope.freq_base != 1.0;
    let positions = positions.shape.dtype.is_index() && positions.shape.ne[0] >= n_positions;
    if fits && even && base && yarn && positions {
        Ok(())
    } else {
        Err(Error::Operand)
    }
}

/// Rotates the pairs of each row.
///
/// - `src`: the source; positions, i32, one for each index of dimension 2; frequency factors, f32, one for each pair, or
///   nothing
///
/// # Errors
/// `Operand` unless source and result are floats of one shape, and parameters, positions and factors fit it.
pub fn rope(
    engine: &Engine,
    rope: Rope,
    dst: ViewMut<'_>,
    [src, positions, factors]: &[Source<'_>; 3],
) -> Result<()> {
    same_shape(&dst.shape, src)?;
    let positions = positions.apart()?;
    check(&rope, dst.shape.ne[0], &positions, dst.shape.ne[2])?;
    match factors {
        Source::None => {}
        Source::Apart(view)
            if view.shape.dtype.is_float() && view.shape.ne[0] >= rope.n_dims / 2 => {}
        _ => return Err(Error::Operand),
    }
    let constants = Constants::new(&rope);
    dst.for_parts(engine, |part| {
        let mut table = Table::EMPTY;
        part.for_each_row(|row| {
            hvx::widest(RopeRow {
                position: positions.index(row.at[1], [0; 3]),
                row,
                src,
                rope: &rope,
                constants: &constants,
                table: &mut table,
                factors,
            });
        });
    });
    Ok(())
}
