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

use crate::calibrate::{Clip, LEVEL_MAX};
use crate::quant::{self, I8_MAX};
use crate::round::{MAGIC, low_byte, shifted};

/// The levels of a type of weights: whole numbers plus `shift` between `-limit` and `limit`.
#[derive(Clone, Copy)]
struct Levels {
    limit: f32,
    shift: f32,
    /// Clips that are tried, as multiples of the clip for rounding without feedback: compensation
    /// makes some weights larger.
    clips: [f32; 4],
}

const I4: Levels = Levels {
    limit: LEVEL_MAX,
    shift: 0.5,
    clips: [0.9, 1.0, 1.1, 1.25],
};

/// A step of INT8 is so small that compensation moves weights by few percent of the largest one.
const I8: Levels = Levels {
    limit: I8_MAX,
    shift: 0.0,
    clips: [0.95, 1.0, 1.03, 1.1],
};

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

    /// Rounds a row of a segment to nibbles, each in a byte of `best` in `work`. Returns the scale.
    ///
    /// - `clip`: the clip for rounding without feedback, of a row with finite values
    ///
    /// # Panics
    /// If a length is not that of the segment.
    pub(crate) fn round_i4(&self, values: &[f32], clip: Clip, work: &mut RoundingScratch) -> f32 {
        round(
            std::slice::from_ref(self),
            values,
            clip.magnitude(),
            I4,
            work,
        )
    }
}

/// Quantizes a row to INT8 with feedback, and returns its scale; `out[k] * scale` is about
/// `values[k]`.
///
/// - `feedback`: one for each K segment, in their order
/// - rows without a scale are as [`quant::quantize_row_i8`] has them
///
/// # Panics
/// If the elements of `values`, of `out` and of all segments are not equally many.
pub fn quantize_row_i8(
    feedback: &[Feedback],
    values: &[f32],
    work: &mut RoundingScratch,
    out: &mut [i8],
) -> f32 {
    assert_eq!(values.len(), out.len(), "row and output differ in length");
    let scale = quant::row_scale_i8(values);
    if scale.is_nan() || scale == 0.0 {
        return quant::quantize_row_i8(values, out);
    }
    let scale = round(feedback, values, scale * I8_MAX, I8, work);
    out.copy_from_slice(&work.best[..values.len()]);
    scale
}

/// Rounds a row with the best of the clips that are tried; the levels are in `best` of `work`,
/// without the shift. Returns the scale.
///
/// - `largest`: the clip for rounding without feedback, of a row with finite values
fn round(
    feedback: &[Feedback],
    values: &[f32],
    largest: f32,
    kind: Levels,
    work: &mut RoundingScratch,
) -> f32 {
    let k: usize = feedback.iter().map(|part| part.worth.len()).sum();
    assert_eq!(values.len(), k, "weights of all segments");
    let RoundingScratch {
        pending,
        levels,
        best,
    } = work;
    pending.resize(k, 0.0);
    levels.resize(k.next_multiple_of(CHUNK), 0);
    best.resize(k.next_multiple_of(CHUNK), 0);
    let (mut least, mut scale) = (f32::INFINITY, 0.0);
    for part in kind.clips {
        let step = part * largest / kind.limit;
        let (mut error, mut first) = (0.0, 0);
        for Feedback { worth, upper } in feedback {
            let part = first..first + worth.len();
            let (pending, levels) = (&mut pending[part.clone()], &mut levels[part.clone()]);
            first = part.end;
            error += round_row(&values[part], worth, upper, step, kind, pending, levels);
        }
        if error < least {
            (least, scale) = (error, step);
            std::mem::swap(best, levels);
        }
    }
    scale
}

/// Levels that are joined to nibbles at a time.
const CHUNK: usize = 64;

/// Scratch for one row.
#[derive(Debug, Default)]
pub struct RoundingScratch {
    pending: Vec<f32>,
    levels: Vec<i8>,
    /// The levels of the row; zeros up to a multiple of [`CHUNK`] after them.
    pub(crate) best: Vec<i8>,
}

/// Rounds a row with one step. Returns the cost of the errors.
#[multiversion(targets("x86_64+avx2+fma"))]
fn round_row(
    values: &[f32],
    worth: &[f32],
    mut upper: &[f32],
    step: f32,
    kind: Levels,
    pending: &mut [f32],
    levels: &mut [i8],
) -> f32 {
    pending.copy_from_slice(values);
    let inverse = 1.0 / step;
    let mut total = 0.0;
    for (k, ((value, worth), level)) in values.iter().zip(worth).zip(levels).enumerate() {
        let wanted = pending[k];
        let q = shifted(wanted * inverse, kind.limit, kind.shift);
        *level = low_byte(q);
        let rounded = (q - MAGIC + kind.shift) * step;
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
