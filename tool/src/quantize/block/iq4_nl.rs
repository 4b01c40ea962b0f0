//! Blocks of IQ4_NL: 4-bit codes of values that are closer together near zero.

use half::f16;

use super::BLOCK;
use super::symmetric::{Codes, Fit, extreme};

/// Values of the codes of IQ4_NL.
// SOURCE: kvalues_iq4nl, ggml-common.h of ggml 0.25.3.
pub const VALUES: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

/// Returns the values nearest to `x * inverse`, and their codes.
///
/// The code of an element is the number of values below it. Counting this for all elements at once
/// is several times faster than a search for each.
pub fn levels(x: &[f32; BLOCK], inverse: f32) -> ([f32; BLOCK], [u8; BLOCK]) {
    let mut values = [f32::from(VALUES[0]); BLOCK];
    let mut codes = [0; BLOCK];
    let scaled = x.map(|x| x * inverse);
    for pair in VALUES.windows(2) {
        let [low, high] = [pair[0], pair[1]].map(f32::from);
        let (middle, step) = ((low + high) / 2.0, high - low);
        for i in 0..BLOCK {
            let passed = scaled[i] > middle;
            values[i] += if passed { step } else { 0.0 };
            codes[i] += u8::from(passed);
        }
    }
    (values, codes)
}

/// Returns the candidate with the least sum of squared errors, each times its element's weight.
/// If no weights are given, an element's weight is its square.
pub fn quantize(x: &[f32; BLOCK], weights: Option<&[f32; BLOCK]>) -> Codes {
    let extreme = extreme(x);
    if extreme == 0.0 {
        return (f16::ZERO, [8; BLOCK]);
    }
    let squares = x.map(|x| x * x);
    let weights = weights.unwrap_or(&squares);
    let first = f32::from(VALUES[0]);
    let mut best = Fit::default();
    for step in -7i8..=7 {
        for end in [first, -first] {
            let inverse = (end + f32::from(step)) / extreme;
            let fit = Fit::of(x, weights, &levels(x, inverse).0);
            if fit.gain() > best.gain() {
                best = fit;
            }
        }
    }
    // All weights of the block's errors are 0.
    let scale = if best.gain() == 0.0 {
        extreme / first
    } else {
        best.scale()
    };
    let d = f16::from_f32(scale);
    let inverse = if d == f16::ZERO {
        0.0
    } else {
        d.to_f32().recip()
    };
    (d, levels(x, inverse).1)
}
