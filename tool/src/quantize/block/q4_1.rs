//! Blocks of Q4_1: codes from 0 to 15, a scale, and the value of code 0.

use half::f16;

use super::BLOCK;
use super::symmetric::push_codes;

/// A block.
pub struct Block {
    scale: f16,
    least: f16,
    codes: [u8; BLOCK],
}

impl Block {
    /// Appends its bytes.
    pub fn push(&self, out: &mut Vec<u8>) {
        out.extend(self.scale.to_le_bytes());
        out.extend(self.least.to_le_bytes());
        push_codes(&self.codes, out);
    }

    /// Returns the block's values.
    pub fn values(&self) -> [f32; BLOCK] {
        let (scale, least) = (self.scale.to_f32(), self.least.to_f32());
        self.codes.map(|code| f32::from(code) * scale + least)
    }
}

/// Largest code.
const LARGEST: f32 = 15.0;

/// Candidates for the number of steps between the least and the largest element, in tenths above or
/// below 15: 14.1 to 15.9.
const STEPS: std::ops::RangeInclusive<i8> = -9..=9;

/// Quantizes a block: from the least to the largest element, or by least squares over the
/// candidates if there are weights.
pub fn quantize(x: &[f32; BLOCK], weights: Option<&[f32; BLOCK]>) -> Block {
    let least = x.iter().copied().fold(f32::INFINITY, f32::min);
    let largest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let range = largest - least;
    let plain = || of(x, range / LARGEST, least);
    let Some(weights) = weights.filter(|_| range > 0.0) else {
        return plain();
    };
    let mut best = (plain(), f32::INFINITY);
    best.1 = error(x, weights, &best.0);
    for step in STEPS {
        let inverse = (LARGEST + 0.1 * f32::from(step)) / range;
        let levels = x.map(|x| ((x - least) * inverse).round().clamp(0.0, LARGEST));
        let Some((scale, least)) = fit(x, weights, &levels) else {
            continue;
        };
        let (scale, least) = (f16::from_f32(scale), f16::from_f32(least));
        // After the scales are rounded, other codes may be the nearest ones.
        let candidate = rounded(x, scale, least);
        let loss = error(x, weights, &candidate);
        if loss < best.1 {
            best = (candidate, loss);
        }
    }
    best.0
}

/// Returns the block of ggml's reference: codes are of the scale before it is rounded.
fn of(x: &[f32; BLOCK], scale: f32, least: f32) -> Block {
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    Block {
        scale: f16::from_f32(scale),
        least: f16::from_f32(least),
        codes: x.map(|x| code((x - least) * inverse)),
    }
}

/// Returns the block for a stored scale and least value.
fn rounded(x: &[f32; BLOCK], scale: f16, least: f16) -> Block {
    let inverse = if scale == f16::ZERO {
        0.0
    } else {
        scale.to_f32().recip()
    };
    let codes = x.map(|x| code((x - least.to_f32()) * inverse));
    Block {
        scale,
        least,
        codes,
    }
}

/// Returns the code whose value is nearest to `x`.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "`as` saturates, which is the clamp below"
)]
fn code(x: f32) -> u8 {
    ((x + 0.5) as u8).min(15)
}

fn error(x: &[f32; BLOCK], weights: &[f32; BLOCK], block: &Block) -> f32 {
    let values = block.values();
    let terms = x.iter().zip(values).zip(weights);
    terms.map(|((x, y), w)| w * (x - y) * (x - y)).sum()
}

/// Returns the scale and the least value with the smallest `sum(w * (x - scale * level -
/// least)^2)`; `None` if the levels that count are all the same.
fn fit(x: &[f32; BLOCK], weights: &[f32; BLOCK], levels: &[f32; BLOCK]) -> Option<(f32, f32)> {
    let [mut sw, mut sx, mut sl, mut sxl, mut sll] = [0.0f32; 5];
    for ((x, w), l) in x.iter().zip(weights).zip(levels) {
        sw += w;
        sx += w * x;
        sl += w * l;
        sxl += w * x * l;
        sll += w * l * l;
    }
    let determinant = sw * sll - sl * sl;
    (determinant > 0.0).then(|| {
        let scale = (sw * sxl - sx * sl) / determinant;
        (scale, (sx - scale * sl) / sw)
    })
}
