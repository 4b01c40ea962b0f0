//! Super-blocks of Q4_K: eight sub-blocks of 32 with codes from 0 to 15. The scale and the minimum
//! of each sub-block have 6 bits.
//!
//! ```text
//! bytes  0..2   d            FP16
//!        2..4   dmin         FP16
//!        4..16  8 scales s and 8 minima m, 6 bits each
//!       16..144 codes q: byte 32 p + i has element i of sub-block 2 p (low) and 2 p + 1 (high)
//! value = d * s * q - dmin * m
//! ```
// SOURCE: block_q4_K, ggml-common.h of ggml 0.25.3.

use half::f16;

use super::super_block::{Grid, SUPER_BLOCK, in_subs, least_half, nearest, refined, six_bits};

/// Elements of a sub-block.
const SUB: usize = 32;

/// Sub-blocks of a super-block.
const SUBS: usize = SUPER_BLOCK / SUB;

/// The largest code.
const LARGEST: f32 = 15.0;

/// The largest scale and minimum of a sub-block.
const SIX_BITS: f32 = 63.0;

/// Candidates for a sub-block's scale, in tenths of a level around the one at which the codes reach
/// from its least to its largest element.
const STEPS: std::ops::RangeInclusive<i8> = -9..=9;

/// A scale and a minimum: the value of a code is `scale * code - minimum`.
#[derive(Clone, Copy, Default)]
struct ScaleAndMin {
    scale: f32,
    minimum: f32,
}

impl ScaleAndMin {
    /// Returns the code nearest to each element, as a number.
    fn codes(self, x: &[f32; SUB]) -> [f32; SUB] {
        let inverse = if self.scale > 0.0 {
            self.scale.recip()
        } else {
            0.0
        };
        x.map(|x| nearest((x + self.minimum) * inverse, 0.0, LARGEST))
    }

    /// Returns the weighted square error of the codes nearest to the elements.
    fn loss(self, x: &[f32; SUB], weights: &[f32; SUB]) -> f32 {
        let codes = self.codes(x);
        let mut sums = [0.0f32; SUB / 2];
        for (i, sum) in sums.iter_mut().enumerate() {
            for i in [i, i + SUB / 2] {
                let error = self.scale * codes[i] - self.minimum - x[i];
                *sum += weights[i] * error * error;
            }
        }
        sums.iter().sum()
    }

    /// Returns the line from the least element, or from zero if that is less, to the largest
    /// element.
    fn plain(x: &[f32; SUB]) -> Self {
        let least = x.iter().copied().fold(0.0, f32::min);
        let largest = x.iter().copied().fold(0.0, f32::max);
        Self {
            scale: (largest - least) / LARGEST,
            minimum: -least,
        }
    }

    /// Returns the line with the least error among the candidates of [`STEPS`], each fitted to its
    /// codes by least squares.
    fn searched(x: &[f32; SUB], weights: &[f32; SUB]) -> Self {
        let plain = Self::plain(x);
        let mut best = (plain, plain.loss(x, weights));
        if plain.scale == 0.0 {
            return plain;
        }
        for step in STEPS {
            let scale = plain.scale * LARGEST / (LARGEST + 0.1 * f32::from(step));
            let codes = Self { scale, ..plain }.codes(x);
            let Some(fit) = Self::fit(x, weights, &codes) else {
                continue;
            };
            let loss = fit.loss(x, weights);
            if loss < best.1 {
                best = (fit, loss);
            }
        }
        best.0
    }

    /// Returns the line with the least error for given codes; `None` if those that count are the
    /// same. The minimum is not negative.
    fn fit(x: &[f32; SUB], weights: &[f32; SUB], codes: &[f32; SUB]) -> Option<Self> {
        let [mut sw, mut sx, mut sq, mut sxq, mut sqq] = [0.0f32; 5];
        for ((x, w), q) in x.iter().zip(weights).zip(codes) {
            sw += w;
            sx += w * x;
            sq += w * q;
            sxq += w * x * q;
            sqq += w * q * q;
        }
        let determinant = sw * sqq - sq * sq;
        if determinant <= 0.0 || determinant.is_nan() {
            return None;
        }
        let scale = (sw * sxq - sx * sq) / determinant;
        let minimum = (scale * sq - sx) / sw;
        let line = if minimum >= 0.0 {
            Self { scale, minimum }
        } else {
            Self {
                scale: sxq / sqq,
                minimum: 0.0,
            }
        };
        (line.scale > 0.0).then_some(line)
    }
}

/// Scales and minima of a super-block, in stored form.
#[derive(Clone, Copy, Default)]
struct Q4Grid {
    d: f16,
    dmin: f16,
    scales: [u8; SUBS],
    minima: [u8; SUBS],
}

impl Q4Grid {
    fn line(&self, sub: usize) -> ScaleAndMin {
        ScaleAndMin {
            scale: self.d.to_f32() * f32::from(self.scales[sub]),
            minimum: self.dmin.to_f32() * f32::from(self.minima[sub]),
        }
    }

    /// Returns the scales and minima that are nearest to those of `lines`.
    fn next_to(d: f16, dmin: f16, lines: &[ScaleAndMin; SUBS]) -> Self {
        Self {
            d,
            dmin,
            scales: lines.map(|line| six_bits(line.scale, d)),
            minima: lines.map(|line| six_bits(line.minimum, dmin)),
        }
    }

    /// Returns the grid whose largest steps are the largest scale and the largest minimum.
    fn of(lines: &[ScaleAndMin; SUBS]) -> Self {
        let largest = |part: fn(&ScaleAndMin) -> f32| lines.iter().map(part).fold(0.0, f32::max);
        let d = least_half(largest(|line| line.scale) / SIX_BITS);
        let dmin = least_half(largest(|line| line.minimum) / SIX_BITS);
        Self::next_to(d, dmin, lines)
    }

    fn push(&self, x: &[[f32; SUB]; SUBS], out: &mut Vec<u8>) {
        out.extend(self.d.to_le_bytes());
        out.extend(self.dmin.to_le_bytes());
        let mut packed = [0; 12];
        for (sub, (scale, minimum)) in self.scales.iter().zip(self.minima).enumerate() {
            if sub < 4 {
                packed[sub] |= scale;
                packed[sub + 4] |= minimum;
            } else {
                packed[sub + 4] = scale & 15 | (minimum & 15) << 4;
                packed[sub - 4] |= scale >> 4 << 6;
                packed[sub] |= minimum >> 4 << 6;
            }
        }
        out.extend(packed);
        for pair in 0..SUBS / 2 {
            // CAST: whole numbers between 0 and 15.
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "see above"
            )]
            let [low, high] = [2 * pair, 2 * pair + 1]
                .map(|sub| self.line(sub).codes(&x[sub]).map(|code| code as u8));
            out.extend(low.iter().zip(high).map(|(low, high)| low | high << 4));
        }
    }
}

impl Grid for Q4Grid {
    type Subs = [[f32; SUB]; SUBS];

    fn settle(&mut self, x: &Self::Subs, weights: &Self::Subs) -> f64 {
        let around = |at: u8| at.saturating_sub(1)..=(at + 1).min(63);
        let mut total = 0.0;
        for sub in 0..SUBS {
            let (x, weights) = (&x[sub], &weights[sub]);
            let mut best = (self.scales[sub], self.minima[sub]);
            let mut least = self.line(sub).loss(x, weights);
            for scale in around(best.0) {
                for minimum in around(self.minima[sub]) {
                    let mut grid = *self;
                    (grid.scales[sub], grid.minima[sub]) = (scale, minimum);
                    let loss = grid.line(sub).loss(x, weights);
                    if loss < least {
                        (least, best) = (loss, (scale, minimum));
                    }
                }
            }
            (self.scales[sub], self.minima[sub]) = best;
            total += f64::from(least);
        }
        total
    }

    fn refitted(&self, x: &Self::Subs, weights: &Self::Subs) -> Option<Self> {
        // Sums for the least squares fit, where the value is d * a - dmin * b.
        let [mut aa, mut ab, mut bb, mut ax, mut bx] = [0.0f64; 5];
        for sub in 0..SUBS {
            let line = self.line(sub);
            let codes = line.codes(&x[sub]);
            let b = f64::from(self.minima[sub]);
            for ((x, w), q) in x[sub].iter().zip(&weights[sub]).zip(codes) {
                let (x, w) = (f64::from(*x), f64::from(*w));
                let a = f64::from(q) * f64::from(self.scales[sub]);
                aa += w * a * a;
                ab += w * a * b;
                bb += w * b * b;
                ax += w * a * x;
                bx += w * b * x;
            }
        }
        let determinant = aa * bb - ab * ab;
        let (mut d, mut dmin) = (ax / aa, 0.0);
        if determinant > 1e-9 * aa * bb {
            (d, dmin) = (
                (ax * bb - ab * bx) / determinant,
                (ab * ax - aa * bx) / determinant,
            );
        }
        if dmin < 0.0 {
            (d, dmin) = (ax / aa, 0.0);
        }
        let (d, dmin) = (f16::from_f64(d), f16::from_f64(dmin));
        let usable = d.is_finite() && d > f16::ZERO && dmin.is_finite();
        usable.then_some(Self { d, dmin, ..*self })
    }
}

/// Appends a super-block with a small weighted error.
///
/// The search starts with the grid from least to largest elements and with the one of the best line
/// of each sub-block. Scales and minima then move to better neighbours, and `d` and `dmin` to
/// those that fit the codes best, as long as the error becomes smaller.
pub fn push(x: &[f32; SUPER_BLOCK], weights: &[f32; SUPER_BLOCK], out: &mut Vec<u8>) {
    let (x, weights) = (in_subs(x), in_subs(weights));
    let plain = Q4Grid::of(&x.map(|x| ScaleAndMin::plain(&x)));
    let mut lines = [ScaleAndMin::default(); SUBS];
    for (line, (x, weights)) in lines.iter_mut().zip(x.iter().zip(&weights)) {
        *line = ScaleAndMin::searched(x, weights);
    }
    refined(plain, Q4Grid::of(&lines), &x, &weights).push(&x, out);
}
