//! Rounding of weights whose inputs are not alike: what rounding loses of one weight, the next ones make up for.
//!
//! `H = E[x xᵀ]` are the second moments of the inputs of a K segment. The mean square error of a result is `e H eᵀ`, where
//! `e` is what rounding took from the weights. With `H = U D Uᵀ`, U upper triangular with ones on its diagonal, that is
//! `Σ_k D_k (e_k + Σ_{j<k} e_j U_jk)²`: if weight k is rounded from `w_k + Σ_{j<k} e_j U_jk`, each bracket is a plain
//! rounding error. Rounded one by one, weights have the arithmetic mean of H's eigenvalues in that error; like this, about their
//! geometric mean.
//!
//! Inputs differ in size, so H is far from a multiple of the identity even after a rotation. The rotation makes it dense: without
//! one, a diagonal H would leave nothing to make up for.
//!
//! SOURCE: LDLQ, Chee et al., "QuIP: 2-bit quantization of large language models with guarantees", 2023, which shows that
//! it is the order of GPTQ (Frantar et al., 2022).

use multiversion::multiversion;

use super::CHUNK;
use crate::calibrate::{Clip, LEVEL_MAX};
use crate::round::{MAGIC, halfway, low_byte};

/// Clips that are tried, as parts of the one that was chosen for rounding one by one: what is made up for makes
/// some weights larger.
const CLIPS: [f32; 4] = [0.9, 1.0, 1.1, 1.25];

/// What a K segment's rounding errors are worth, and how they are passed on.
#[derive(Clone, Debug)]
pub struct Feedback {
    /// D: what the square of each error is worth.
    worth: Vec<f32>,
    /// U without its diagonal, row after row: row j has `K - 1 - j` elements.
    upper: Vec<f32>,
}

impl Feedback {
    /// - `worth`: D; `upper`: the rows of U behind the diagonal, one after another
    ///
    /// # Panics
    /// If K weights do not have `K (K - 1) / 2` elements in `upper`.
    #[must_use]
    pub fn new(worth: Vec<f32>, upper: Vec<f32>) -> Self {
        let k = worth.len();
        assert_eq!(
            upper.len(),
            k * k.saturating_sub(1) / 2,
            "elements behind the diagonal"
        );
        Self { worth, upper }
    }

    /// What [`Self::new`] was given.
    #[must_use]
    pub fn parts(&self) -> (&[f32], &[f32]) {
        (&self.worth, &self.upper)
    }

    /// Rounds a row to nibbles, each in a byte of `levels`; returns the scale.
    ///
    /// - `clip`: the one for rounding without feedback, of a row with finite values
    ///
    /// # Panics
    /// If a length is not that of the segment.
    pub(super) fn round(&self, values: &[f32], clip: Clip, work: &mut Work) -> f32 {
        let k = self.worth.len();
        assert_eq!(values.len(), k, "weights of a segment");
        let Work {
            pending,
            levels,
            best,
        } = work;
        pending.resize(k, 0.0);
        levels.resize(k.next_multiple_of(CHUNK), 0);
        best.resize(k.next_multiple_of(CHUNK), 0);
        let (mut least, mut scale) = (f32::INFINITY, 0.0);
        for part in CLIPS {
            let step = part * clip.magnitude() / LEVEL_MAX;
            let error = round_row(values, &self.worth, &self.upper, step, pending, levels);
            if error < least {
                (least, scale) = (error, step);
                std::mem::swap(best, levels);
            }
        }
        scale
    }
}

/// Scratch for one row.
#[derive(Debug, Default)]
pub(super) struct Work {
    pending: Vec<f32>,
    levels: Vec<i8>,
    /// The nibbles of the row; zeros behind them.
    pub(super) best: Vec<i8>,
}

/// Rounds a row with one step; returns what the errors are worth.
#[multiversion(targets("x86_64+avx2+fma"))]
fn round_row(
    values: &[f32],
    worth: &[f32],
    mut upper: &[f32],
    step: f32,
    pending: &mut [f32],
    levels: &mut [i8],
) -> f32 {
    pending.copy_from_slice(values);
    let inverse = 1.0 / step;
    let mut total = 0.0;
    for (k, ((value, worth), level)) in values.iter().zip(worth).zip(levels).enumerate() {
        let wanted = pending[k];
        let q = halfway(wanted * inverse, LEVEL_MAX);
        *level = low_byte(q);
        let rounded = (q - MAGIC + 0.5) * step;
        total += worth * (wanted - rounded) * (wanted - rounded);
        let error = value - rounded;
        let rest = &mut pending[k + 1..];
        let (row, later) = upper.split_at(rest.len());
        for (pending, u) in rest.iter_mut().zip(row) {
            *pending += error * u;
        }
        upper = later;
    }
    total
}
