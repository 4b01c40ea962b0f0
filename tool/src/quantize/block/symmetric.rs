//! Blocks of 32 with one scale and levels on both sides of zero: Q4_0, Q5_0 and Q8_0. Q4_0 and Q5_0
//! differ by the number of levels alone.

use half::f16;

use super::BLOCK;

/// A block's scale and codes.
pub type Codes = (f16, [u8; BLOCK]);

/// Half the number of levels of Q4_0.
const HALF_Q4_0: u8 = 8;

/// Half the number of levels of Q5_0.
const HALF_Q5_0: u8 = 16;

/// Appends a block of Q4_0: a scale and 4-bit codes.
pub fn push_q4_0(x: &[f32; BLOCK], weights: Option<&[f32; BLOCK]>, out: &mut Vec<u8>) {
    let (d, codes) = quantize::<HALF_Q4_0>(x, weights);
    push_nibbles(d, &codes, out);
}

/// Appends a block of Q5_0: a scale, the fifth bits, and the lower four of each code.
pub fn push_q5_0(x: &[f32; BLOCK], weights: Option<&[f32; BLOCK]>, out: &mut Vec<u8>) {
    let (d, codes) = quantize::<HALF_Q5_0>(x, weights);
    let fifth = |bits: u32, (i, code): (usize, &u8)| bits | u32::from(code >> 4) << i;
    let bits = codes.iter().enumerate().fold(0, fifth);
    out.extend(d.to_le_bytes());
    out.extend(bits.to_le_bytes());
    push_codes(&codes.map(|code| code & 15), out);
}

/// Appends a block of 4-bit codes: first half of the block in the low nibbles, second half in the
/// high ones.
pub fn push_nibbles(d: f16, codes: &[u8; BLOCK], out: &mut Vec<u8>) {
    out.extend(d.to_le_bytes());
    push_codes(codes, out);
}

/// Appends the codes of [`push_nibbles`] alone.
pub fn push_codes(codes: &[u8; BLOCK], out: &mut Vec<u8>) {
    let (low, high) = codes.split_at(BLOCK / 2);
    out.extend(low.iter().zip(high).map(|(low, high)| low | high << 4));
}

/// Returns the values of a block of Q4_0 without weights.
pub fn rounded_q4_0(x: &[f32; BLOCK]) -> [f32; BLOCK] {
    values::<HALF_Q4_0>(plain::<HALF_Q4_0>(x))
}

/// Returns the values of a block of Q5_0 without weights.
pub fn rounded_q5_0(x: &[f32; BLOCK]) -> [f32; BLOCK] {
    values::<HALF_Q5_0>(plain::<HALF_Q5_0>(x))
}

fn values<const HALF: u8>((d, codes): Codes) -> [f32; BLOCK] {
    let d = d.to_f32();
    codes.map(|code| (f32::from(code) - f32::from(HALF)) * d)
}

/// Returns the element that is largest in magnitude, with its sign.
pub fn extreme<const N: usize>(x: &[f32; N]) -> f32 {
    let larger = |best: f32, x: &f32| if x.abs() > best.abs() { *x } else { best };
    x.iter().fold(0.0, larger)
}

fn quantize<const HALF: u8>(x: &[f32; BLOCK], weights: Option<&[f32; BLOCK]>) -> Codes {
    weights.map_or_else(|| plain::<HALF>(x), |weights| weighted::<HALF>(x, weights))
}

/// Returns the level nearest to `x`, as a code from 0 to `2 * HALF - 1`.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "`as` saturates, which is the clamp below"
)]
fn code<const HALF: u8>(x: f32) -> u8 {
    ((x + (f32::from(HALF) + 0.5)) as u8).min(2 * HALF - 1)
}

/// Quantizes without a search: the element with the largest magnitude gets the level `-HALF`.
fn plain<const HALF: u8>(x: &[f32; BLOCK]) -> Codes {
    let d = extreme(x) / -f32::from(HALF);
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    (f16::from_f32(d), x.map(|x| code::<HALF>(x * inverse)))
}

/// Sums from which the fit of levels follows: with `d = xl / ll`, the error is `sum(w x^2) - xl^2 /
/// ll`.
#[derive(Clone, Copy, Default)]
pub struct Fit {
    xl: f32,
    ll: f32,
}

impl Fit {
    pub fn of(x: &[f32; BLOCK], weights: &[f32; BLOCK], levels: &[f32; BLOCK]) -> Self {
        let mut fit = Self::default();
        for ((x, w), l) in x.iter().zip(weights).zip(levels) {
            fit.xl += w * x * l;
            fit.ll += w * l * l;
        }
        fit
    }

    pub fn gain(self) -> f32 {
        if self.ll > 0.0 {
            self.xl * self.xl / self.ll
        } else {
            0.0
        }
    }

    pub fn scale(self) -> f32 {
        if self.ll > 0.0 {
            self.xl / self.ll
        } else {
            0.0
        }
    }
}

/// Candidates around the scale that puts the extreme at an end of the levels, in steps of a tenth
/// of a level.
const STEPS: std::ops::RangeInclusive<i8> = -9..=9;

fn weighted<const HALF: u8>(x: &[f32; BLOCK], weights: &[f32; BLOCK]) -> Codes {
    let extreme = extreme(x);
    if extreme == 0.0 {
        return (f16::ZERO, [HALF; BLOCK]);
    }
    let half = f32::from(HALF);
    let mut best = (Fit::default(), 0.0);
    for step in STEPS {
        let inverse = -(half + 0.1 * f32::from(step)) / extreme;
        let levels = x.map(|x| f32::from(code::<HALF>(x * inverse)) - half);
        let fit = Fit::of(x, weights, &levels);
        if fit.gain() > best.0.gain() {
            best = (fit, inverse);
        }
    }
    // All weights of the block's errors are 0.
    if best.0.gain() == 0.0 {
        return plain::<HALF>(x);
    }
    (
        f16::from_f32(best.0.scale()),
        x.map(|x| code::<HALF>(x * best.1)),
    )
}

/// Appends a block of Q8_0: the absolute maximum has the level 127.
pub fn push_q8_0(x: &[f32; BLOCK], out: &mut Vec<u8>) {
    let d = extreme(x).abs() / 127.0;
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    out.extend(f16::from_f32(d).to_le_bytes());
    // CAST: between -127 and 127.
    #[expect(clippy::cast_possible_truncation, reason = "see above")]
    out.extend(x.map(|x| ((x * inverse).round() as i8).cast_unsigned()));
}

/// Returns the values of a block of Q8_0.
pub fn rounded_q8_0(x: &[f32; BLOCK]) -> [f32; BLOCK] {
    let d = extreme(x).abs() / 127.0;
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    let d = f16::from_f32(d).to_f32();
    x.map(|x| (x * inverse).round() * d)
}
