//! Super-blocks of Q3_K: sixteen sub-blocks of 16 with levels from -4 to 3. The scale of each
//! sub-block has 6 bits and a sign.
//!
//! ```text
//! bytes  0..32  third bits of q + 4: bit e / 32 of byte e % 32 for element e
//!       32..96  lower two bits: element e has bits 2 (e % 128 / 32) of byte 32 (e / 128) + e % 32
//!       96..108 16 scales s + 32: four lower bits of each, then two upper ones
//!      108..110 d            FP16
//! value = d * s * q
//! ```
// SOURCE: block_q3_K, ggml-common.h of ggml 0.25.3.

use half::f16;

use super::super_block::{Grid, SUPER_BLOCK, in_subs, least_half, nearest, refined};
use super::symmetric::extreme;

/// Elements of a sub-block.
const SUB: usize = 16;

/// Sub-blocks of a super-block.
const SUBS: usize = SUPER_BLOCK / SUB;

/// Candidates for a sub-block's scale, in tenths of a level around the one that puts its extreme on
/// level -4, and the same with the other sign.
const STEPS: std::ops::RangeInclusive<i8> = -9..=9;

/// Returns the level nearest to each element.
fn levels(x: &[f32; SUB], scale: f32) -> [f32; SUB] {
    let inverse = if scale == 0.0 { 0.0 } else { scale.recip() };
    x.map(|x| nearest(x * inverse, -4.0, 3.0))
}

/// Returns the weighted square error of the levels nearest to the elements.
fn loss(x: &[f32; SUB], weights: &[f32; SUB], scale: f32) -> f32 {
    let levels = levels(x, scale);
    let mut sums = [0.0f32; SUB];
    for (i, sum) in sums.iter_mut().enumerate() {
        let error = scale * levels[i] - x[i];
        *sum = weights[i] * error * error;
    }
    sums.iter().sum()
}

/// Returns the scale that puts the extreme on level -4.
fn plain(x: &[f32; SUB]) -> f32 {
    extreme(x) / -4.0
}

/// Returns the scale with the least error among the candidates of [`STEPS`], each fitted to its
/// levels by least squares.
fn searched(x: &[f32; SUB], weights: &[f32; SUB]) -> f32 {
    let plain = plain(x);
    let mut best = (plain, loss(x, weights, plain));
    if plain == 0.0 {
        return plain;
    }
    for sign in [1.0, -1.0] {
        for step in STEPS {
            let candidate = sign * plain * 4.0 / (4.0 + 0.1 * f32::from(step));
            let levels = levels(x, candidate);
            let (mut xl, mut ll) = (0.0, 0.0);
            for ((x, w), l) in x.iter().zip(weights).zip(levels) {
                xl += w * x * l;
                ll += w * l * l;
            }
            if ll > 0.0 {
                let scale = xl / ll;
                let loss = loss(x, weights, scale);
                if loss < best.1 {
                    best = (scale, loss);
                }
            }
        }
    }
    best.0
}

/// Scales of a super-block, in stored form.
#[derive(Clone, Copy)]
struct Q3Grid {
    d: f16,
    scales: [i8; SUBS],
}

impl Q3Grid {
    /// Returns the grid on which the scale of the largest magnitude is -32.
    fn of(scales: &[f32; SUBS]) -> Self {
        let largest = extreme(scales) / -32.0;
        let d = least_half(largest.abs());
        let d = if largest < 0.0 { -d } else { d };
        // CAST: a whole number between -32 and 31.
        #[expect(clippy::cast_possible_truncation, reason = "see above")]
        let code = |scale: f32| match d == f16::ZERO {
            true => 0,
            false => nearest(scale / d.to_f32(), -32.0, 31.0) as i8,
        };
        Self {
            d,
            scales: scales.map(code),
        }
    }

    fn scale(&self, sub: usize) -> f32 {
        self.d.to_f32() * f32::from(self.scales[sub])
    }

    fn push(&self, x: &[[f32; SUB]; SUBS], out: &mut Vec<u8>) {
        let (mut third, mut quants, mut packed) = ([0u8; 32], [0u8; 64], [0u8; 12]);
        for (sub, scale) in self.scales.iter().enumerate() {
            let scale = (scale + 32).cast_unsigned();
            packed[sub % 8] |= (scale & 15) << (4 * (sub / 8));
            packed[8 + sub % 4] |= scale >> 4 << (2 * (sub / 4));
            for (i, level) in levels(&x[sub], self.scale(sub)).iter().enumerate() {
                // CAST: a whole number between 0 and 7.
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "see above"
                )]
                let code = (level + 4.0) as u8;
                let e = sub * SUB + i;
                third[e % 32] |= code >> 2 << (e / 32);
                quants[32 * (e / 128) + e % 32] |= (code & 3) << (2 * (e % 128 / 32));
            }
        }
        out.extend(third);
        out.extend(quants);
        out.extend(packed);
        out.extend(self.d.to_le_bytes());
    }
}

impl Grid for Q3Grid {
    type Subs = [[f32; SUB]; SUBS];

    fn settle(&mut self, x: &Self::Subs, weights: &Self::Subs) -> f64 {
        let mut total = 0.0;
        for sub in 0..SUBS {
            let (x, weights) = (&x[sub], &weights[sub]);
            let at = self.scales[sub];
            let mut least = loss(x, weights, self.scale(sub));
            for scale in [at - 1, at + 1] {
                if (-32..=31).contains(&scale) {
                    let loss = loss(x, weights, self.d.to_f32() * f32::from(scale));
                    if loss < least {
                        (least, self.scales[sub]) = (loss, scale);
                    }
                }
            }
            total += f64::from(least);
        }
        total
    }

    fn refitted(&self, x: &Self::Subs, weights: &Self::Subs) -> Option<Self> {
        let (mut aa, mut ax) = (0.0f64, 0.0f64);
        for sub in 0..SUBS {
            let levels = levels(&x[sub], self.scale(sub));
            for ((x, w), level) in x[sub].iter().zip(&weights[sub]).zip(levels) {
                let a = f64::from(level) * f64::from(self.scales[sub]);
                aa += f64::from(*w) * a * a;
                ax += f64::from(*w) * a * f64::from(*x);
            }
        }
        let d = f16::from_f64(ax / aa);
        (d.is_finite() && d != f16::ZERO).then_some(Self { d, ..*self })
    }
}

/// Appends a super-block with a small weighted error, searched as one of Q4_K.
pub fn push(x: &[f32; SUPER_BLOCK], weights: &[f32; SUPER_BLOCK], out: &mut Vec<u8>) {
    let (x, weights) = (in_subs(x), in_subs(weights));
    let plain = Q3Grid::of(&x.map(|x| plain(&x)));
    let mut scales = [0.0; SUBS];
    for (scale, (x, weights)) in scales.iter_mut().zip(x.iter().zip(&weights)) {
        *scale = searched(x, weights);
    }
    refined(plain, Q3Grid::of(&scales), &x, &weights).push(&x, out);
}
