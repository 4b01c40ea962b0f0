//! Parameters of a rotation, and the angles of each position.

use core::ops::Range;

use super::RopePairs;
use crate::hvx;
use crate::ops::math::{self, scalar};
use crate::ops::tensor::{Chunk, Source, View};

/// Most pairs of a row: heads of 512 elements.
pub const MAX_PAIRS: usize = 256;

/// Positions that determine the angles of pairs: time, height, width, and a fourth one. The angles
/// of all four decrease from pair to pair.
///
/// Source: ggml `ggml_mrope_cache_init`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sections {
    /// Pairs of each position. After the sum of all four, the sequence starts again with the first.
    pub sizes: [usize; 4],
    /// Order of the sections.
    pub order: SectionOrder,
}

/// Order of the sections of [`Sections`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SectionOrder {
    /// One after another (ggml's mrope mode).
    Blocks,
    /// Time, height and width alternate (ggml's imrope mode).
    Turns,
    /// One after another, and each section's angles start again; twice as many pairs (ggml's vision
    /// mode).
    Apart,
}

impl Sections {
    /// Returns the position that determines the angle of pair `j`, and the position whose angles
    /// start again at this pair.
    #[inline(always)]
    fn of(&self, j: usize) -> (usize, Option<usize>) {
        let [time, height, width, rest] = self.sizes;
        let sector = j % (time + height + width + rest);
        let starts = [0, time, time + height, time + height + width];
        if self.order == SectionOrder::Turns {
            let place = sector % 3;
            let inside = sector < 3 * self.sizes[place];
            return (if inside { place } else { 3 }, None);
        }
        let section = starts[1..].iter().filter(|start| sector >= **start).count();
        let start = match self.order {
            SectionOrder::Apart => starts.iter().position(|start| sector == *start),
            _ => None,
        };
        (section, start)
    }

    /// Returns `true` if the first three sections have pairs, and few enough for a row.
    pub(super) fn fits(&self) -> bool {
        let small = self.sizes.iter().all(|size| *size <= 2 * MAX_PAIRS);
        small && self.sizes[..3].iter().any(|size| *size > 0)
    }
}

/// Parameters of a rotation.
///
/// Source: ggml `ggml_compute_forward_rope_flt`, `rope_yarn`, `ggml_rope_yarn_corr_dims`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Elements that form a pair.
    pub pairs: RopePairs,
    /// Positions of pairs, for rows with four positions.
    pub sections: Option<Sections>,
    /// `true` if pairs are rotated in the opposite direction.
    pub is_inverse: bool,
    /// Elements that are rotated (apart sections: half of them): even, at most `2 · MAX_PAIRS`; 0
    /// copies rows.
    pub n_dims: usize,
    /// First element that is rotated: even.
    pub first: usize,
    /// Context that the model was trained on, tokens; 0 if unknown.
    pub n_ctx_orig: i32,
    /// Base of the frequencies.
    pub freq_base: f32,
    /// Factor of interpolated angles.
    pub freq_scale: f32,
    /// Share of the angles that YaRN extrapolates instead of interpolating; 0 disables YaRN.
    pub ext_factor: f32,
    /// Factor of the results.
    pub attn_factor: f32,
    /// Turns over the original context above which YaRN leaves angles unchanged.
    pub beta_fast: f32,
    /// Turns over the original context below which YaRN interpolates.
    pub beta_slow: f32,
}

impl Rope {
    /// Returns the number of pairs that are rotated.
    pub(crate) fn n_pairs(&self) -> usize {
        match self.sections {
            Some(sections) if sections.order == SectionOrder::Apart => self.n_dims,
            _ => self.n_dims / 2,
        }
    }
}

/// Values that are the same for all positions.
pub(super) struct Constants {
    theta_scale: f32,
    ramp: [f32; 2],
    magnitude: f32,
}

impl Constants {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        reason = "rounded to f32, as ggml has them"
    )]
    pub(super) fn new(rope: &Rope) -> Self {
        let n_dims = f64::from(u32::try_from(rope.n_dims).unwrap_or(u32::MAX));
        let base = f64::from(rope.freq_base);
        // Computed in f32, because ggml rounds the exponent to f32.
        let exponent = -2.0 / rope.n_dims as f32;
        let theta_scale = scalar::power(base, f64::from(exponent)) as f32;
        let turn = |beta: f32| {
            if rope.n_ctx_orig == 0 {
                return f64::NEG_INFINITY;
            }
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

/// Sines and cosines for the positions of one token.
pub(super) struct AngleTable<'a> {
    pub(super) token: Option<usize>,
    pub(super) cosine: &'a mut [f32; MAX_PAIRS],
    pub(super) sine: &'a mut [f32; MAX_PAIRS],
    /// `1 / x` for each frequency factor x, or 1 for those that angles are divided by one by one.
    /// Most factors of a model are powers of two, whose inverses are exact.
    pub(super) inverses: &'a mut [f32; MAX_PAIRS],
    /// Pairs that include all with another factor.
    pub(super) inexact: Range<usize>,
    /// Scratch chunks of the row that is being rotated.
    pub(super) chunks: [&'a mut Chunk; 4],
}

/// The arguments of [`AngleTable::fill`].
struct FillAngles<'a, 't> {
    table: &'a mut AngleTable<'t>,
    /// Positions of time, height, width and the fourth one; without sections only the first is
    /// used.
    start: [f32; 4],
    rope: &'a Rope,
    constants: &'a Constants,
    factors: &'a Source<'a>,
}

impl AngleTable<'_> {
    /// Prepares the frequency factors.
    pub(super) fn invert(&mut self, factors: &Source<'_>, n_pairs: usize) {
        let Source::Apart(view) = factors else {
            return;
        };
        let factors = view.read([0; 3], 0..n_pairs, self.chunks[0]);
        let is_power = |factor: &f32| factor.is_normal() && factor.to_bits() << 9 == 0;
        let first = factors.iter().position(|factor| !is_power(factor));
        let last = factors.iter().rposition(|factor| !is_power(factor));
        self.inexact = first
            .zip(last)
            .map_or(0..0, |(first, last)| first..last + 1);
        for (j, (inverse, factor)) in self.inverses.iter_mut().zip(factors).enumerate() {
            *inverse = match self.inexact.contains(&j) {
                true => 1.0,
                false => 1.0 / factor,
            };
        }
    }

    /// Fills the table for the positions of `token` of `n_tokens`: one, with sections four.
    #[expect(
        clippy::cast_precision_loss,
        reason = "ggml's positions are rounded to f32 as well"
    )]
    pub(super) fn fill(
        &mut self,
        (token, n_tokens): (usize, usize),
        positions: &View<'_>,
        rope: &Rope,
        constants: &Constants,
        factors: &Source<'_>,
    ) {
        if self.token == Some(token) {
            return;
        }
        self.token = Some(token);
        let mut start = [0.0; 4];
        let n_positions = if rope.sections.is_some() { 4 } else { 1 };
        for (i, start) in start.iter_mut().enumerate().take(n_positions) {
            *start = positions.index(token + i * n_tokens, [0; 3]) as f32;
        }
        hvx::widest(FillAngles {
            table: self,
            start,
            rope,
            constants,
            factors,
        });
    }
}

impl FillAngles<'_, '_> {
    /// Returns `true` if each angle is the one before times a constant, but for its frequency
    /// factor.
    #[inline(always)]
    fn is_geometric(&self) -> bool {
        self.rope.sections.is_none() && self.rope.ext_factor == 0.0
    }

    /// Writes the angles of all pairs to the place of their sines; returns a factor that they all
    /// still lack.
    #[inline(always)]
    #[expect(clippy::cast_precision_loss, reason = "pairs are few")]
    fn angles(&mut self, n_pairs: usize) -> f32 {
        let (rope, constants, start) = (self.rope, self.constants, self.start);
        let mut theta = start;
        let is_geometric = self.is_geometric();
        let factors = match self.factors {
            Source::Apart(view) => view.read([0; 3], 0..n_pairs, self.table.chunks[0]),
            _ => &[],
        };
        if is_geometric {
            let angles = &mut self.table.sine[..n_pairs];
            powers(angles, theta[0], constants.theta_scale);
            let inexact = self.table.inexact.clone();
            if let (Some(angles), Some(factors)) =
                (angles.get_mut(inexact.clone()), factors.get(inexact))
            {
                for (angle, factor) in angles.iter_mut().zip(factors) {
                    *angle /= *factor;
                }
            }
            return rope.freq_scale;
        }
        let angles = self.table.sine.iter_mut().take(n_pairs);
        let [low, high] = constants.ramp;
        for (j, angle) in angles.enumerate() {
            let mut extrapolated = theta[0];
            if let Some(sections) = rope.sections {
                let (section, restart) = sections.of(j);
                if let Some(section) = restart {
                    theta[section] = start[section];
                }
                extrapolated = theta[section];
                theta = theta.map(|theta| theta * constants.theta_scale);
            } else {
                theta[0] *= constants.theta_scale;
            }
            if let Some(factor) = factors.get(j) {
                extrapolated /= *factor;
            }
            *angle = rope.freq_scale * extrapolated;
            if rope.ext_factor != 0.0 {
                let y = (j as f32 - low) / (high - low).max(0.001);
                let mix = (1.0 - y.clamp(0.0, 1.0)) * rope.ext_factor;
                *angle = *angle * (1.0 - mix) + extrapolated * mix;
            }
        }
        1.0
    }
}

/// Writes `first`, and for each element after it the one before times `scale`.
#[inline(always)]
fn powers(out: &mut [f32], first: f32, scale: f32) {
    // Each product waits for the one before it, so the stores are placed into the packets in
    // between.
    let (groups, rest) = out.as_chunks_mut::<8>();
    let mut power = first;
    for group in groups {
        for elem in group {
            *elem = power;
            power *= scale;
        }
    }
    for elem in rest {
        *elem = power;
        power *= scale;
    }
}

impl hvx::Kernel for FillAngles<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let n_pairs = self.rope.n_pairs();
        let is_geometric = self.is_geometric();
        let factor = hvx::splat_f32(self.angles(n_pairs));
        let magnitude = hvx::splat_f32(self.constants.magnitude);
        let sign = if self.rope.is_inverse { -1.0 } else { 1.0 };
        let sine_magnitude = hvx::splat_f32(self.constants.magnitude * sign);
        let cosines = self.table.cosine.as_chunks_mut::<32>().0;
        let sines = self.table.sine.as_chunks_mut::<32>().0;
        let is_divided = is_geometric && matches!(self.factors, Source::Apart(_));
        let inverses = self.table.inverses.as_chunks::<32>().0;
        let groups = cosines.iter_mut().zip(sines).zip(inverses);
        for ((cosine, sine), inverse) in groups.take(n_pairs.div_ceil(32)) {
            let mut angle = hvx::load_f32(sine);
            if is_divided {
                angle = hvx::mul_f32(angle, hvx::load_f32(inverse));
            }
            let (s, c) = math::sin_cos(hvx::mul_f32(angle, factor));
            hvx::store_f32(sine, hvx::mul_f32(s, sine_magnitude));
            hvx::store_f32(cosine, hvx::mul_f32(c, magnitude));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_of_angles_is_ggmls_to_the_bit() {
        for (freq_base, n_dims) in [
            (1e4, 64_u16),
            (1e4, 128),
            (1e6, 112),
            (1e6, 192),
            (5e6, 112),
            (5e6, 120),
            (1e7, 20),
        ] {
            let rope = Rope {
                pairs: RopePairs::Halves,
                sections: None,
                is_inverse: false,
                n_dims: usize::from(n_dims),
                first: 0,
                n_ctx_orig: 0,
                freq_base,
                freq_scale: 1.0,
                ext_factor: 0.0,
                attn_factor: 1.0,
                beta_fast: 32.0,
                beta_slow: 1.0,
            };
            let want = freq_base.powf(-2.0 / f32::from(n_dims));
            let have = Constants::new(&rope).theta_scale;
            assert_eq!(have.to_bits(), want.to_bits(), "{freq_base}, {n_dims}");
        }
    }
}
