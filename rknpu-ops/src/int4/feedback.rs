//! Rounding of weights with feedback: the rounding error of one weight is compensated by the next
//! ones.
//!
//! `H = E[x xᵀ]` are the second moments of the inputs of a K segment. The mean square error of a
//! result is `e H eᵀ`, where `e` are the rounding errors of the weights. With `H = U D Uᵀ`, U upper
//! triangular with ones on its diagonal, that is `Σ_k D_k (e_k + Σ_{j<k} e_j U_jk)²`: if
//! `w_k + Σ_{j<k} e_j U_jk` is rounded instead of weight k, each bracket is a plain rounding error.
//! Without feedback, that error contains the arithmetic mean of H's eigenvalues; with it, about
//! their geometric mean.
//!
//! Inputs differ in size, so H is far from a multiple of the identity even after a rotation. The
//! rotation makes H dense. Without it H would be nearly diagonal, and there would be nothing to
//! compensate.
//!
//! SOURCE: LDLQ, Chee et al., "QuIP: 2-bit quantization of large language models with guarantees",
//! 2023, which shows that it is the order of GPTQ (Frantar et al., 2022).

use multiversion::multiversion;

use super::CHUNK;
use crate::calibrate::{Clip, LEVEL_MAX};
use crate::round::{MAGIC, halfway, low_byte};

/// Clips that are tried, as multiples of the clip for rounding without feedback: compensation makes
/// some weights larger.
const CLIPS: [f32; 4] = [0.9, 1.0, 1.1, 1.25];

/// Costs of the rounding errors in a K segment, and their distribution to later weights.
#[derive(Clone, Debug)]
pub struct Feedback {
    /// D: the cost of the square of each error.
    worth: Vec<f32>,
    /// U without its diagonal, row after row: row j has `K - 1 - j` elements.
    upper: Vec<f32>,
}

impl Feedback {
    /// Makes a feedback of its factors: `worth` is D, `upper` the rows of U after the diagonal, one
    /// after another.
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

    /// Returns the arguments of [`Self::new`].
    #[must_use]
    pub fn parts(&self) -> (&[f32], &[f32]) {
        (&self.worth, &self.upper)
    }

    /// Rounds a row to nibbles, each in a byte of `best` in `work`. Returns the scale.
    ///
    /// - `clip`: the clip for rounding without feedback, of a row with finite values
    ///
    /// # Panics
    /// If a length is not that of the segment.
    pub(super) fn round(&self, values: &[f32], clip: Clip, work: &mut RoundingScratch) -> f32 {
        let k = self.worth.len();
        assert_eq!(values.len(), k, "weights of a segment");
        let RoundingScratch {
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
pub(super) struct RoundingScratch {
    pending: Vec<f32>,
    levels: Vec<i8>,
    /// The nibbles of the row; zeros after them.
    pub(super) best: Vec<i8>,
}

/// Rounds a row with one step. Returns the cost of the errors.
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
