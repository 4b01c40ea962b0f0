//! Feedback for the rounding errors of integer weights, from the mean squares of their inputs.

use ggml_rust_npu::rockchip::layout::WeightLayout;
use nalgebra::{Cholesky, DMatrix};
use rayon::prelude::*;
use rknpu_ops::feedback::Feedback;

use crate::ToolError;

/// Part of the mean of the second moments that is added to each: inputs that were never seen are
/// not worth nothing.
///
/// SOURCE: 1 %, as GPTQ has it (Frantar et al., 2022, section 3.3).
const DAMPING: f64 = 0.01;

/// Most inputs of a weight: the square of their number is kept, 16 GiB of it.
const MAX_INPUTS: usize = 1 << 16;

/// Returns the feedback of each K segment.
///
/// The inputs are assumed to be uncorrelated, because statistics have only their squares. `H` of a
/// segment is then `Σ_c m_c r_c r_cᵀ`, where `m_c` is the mean square of input c and `r_c` its
/// rotation in the segment.
///
/// - `name`: the weight's
/// - `means`: the mean square of each of the K inputs
///
/// # Errors
/// Text, if there are too many inputs, or their squares are out of range.
pub fn of(layout: &WeightLayout, name: &str, means: &[f32]) -> Result<Vec<Feedback>, ToolError> {
    let k = means.len();
    if k > MAX_INPUTS {
        return Err(format!(
            "--imatrix: {name} has {k} inputs, at most {MAX_INPUTS} are supported"
        )
        .into());
    }
    let rotation = layout.rotation();
    let mut rotated = vec![0.0_f32; k * k];
    rotated
        .par_chunks_exact_mut(k)
        .enumerate()
        .for_each(|(c, row)| {
            row[c] = means[c].sqrt();
            rotation.apply(row);
        });
    // Each column of the matrix is the rotated form of one input.
    let rotated = DMatrix::from_vec(k, k, rotated);
    let segments = (0..layout.segments).into_par_iter();
    let feedback = segments.map(|segment| {
        let columns = layout.segment_columns(segment);
        let part = rotated.rows_range(columns).into_owned();
        factors(&part * part.transpose())
    });
    let feedback: Option<Vec<Feedback>> = feedback.collect();
    feedback.ok_or_else(|| format!("--imatrix: the mean squares of {name} are out of range").into())
}

/// Returns `H = U D Uᵀ`; `None` if `H` has numbers that are not finite.
fn factors(moments: DMatrix<f32>) -> Option<Feedback> {
    let k = moments.nrows();
    // The order is reversed, because Cholesky's factor has zeros above its diagonal, and they are
    // needed below it.
    let mut backwards = DMatrix::from_fn(k, k, |i, j| f64::from(moments[(k - 1 - i, k - 1 - j)]));
    let mean = backwards.trace() / k as f64;
    let damping = if mean > 0.0 { DAMPING * mean } else { 1.0 };
    for i in 0..k {
        backwards[(i, i)] += damping;
    }
    // The matrix is a sum of squares plus a positive diagonal, so Cholesky fails only if it is not
    // finite.
    let lower = Cholesky::new(backwards)?.unpack();
    let diagonal = |i: usize| lower[(k - 1 - i, k - 1 - i)];
    let worth = (0..k).map(|i| narrow(diagonal(i) * diagonal(i))).collect();
    let mut upper = Vec::with_capacity(k * (k - 1) / 2);
    for j in 0..k {
        upper.extend((j + 1..k).map(|i| narrow(lower[(k - 1 - j, k - 1 - i)] / diagonal(i))));
    }
    Some(Feedback::new(worth, upper))
}

#[expect(clippy::cast_possible_truncation, reason = "rounded to f32")]
fn narrow(x: f64) -> f32 {
    x as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// D and U of a matrix with known factors: U is `j - i` over 10 above the diagonal, D counts
    /// from 1.
    #[test]
    fn factors_give_the_matrix_again() {
        let k = 5;
        let upper = DMatrix::from_fn(k, k, |i, j| match j.cmp(&i) {
            std::cmp::Ordering::Less => 0.0,
            std::cmp::Ordering::Equal => 1.0,
            std::cmp::Ordering::Greater => (j - i) as f32 / 10.0,
        });
        let worth = DMatrix::from_diagonal(&nalgebra::DVector::from_fn(k, |i, _| (i + 1) as f32));
        let moments = &upper * worth * upper.transpose();
        let damping = moments.trace() / k as f32 * narrow(DAMPING);
        let damped = &moments + DMatrix::identity(k, k) * damping;
        let feedback = factors(moments).unwrap();
        let (worth, behind) = feedback.parts();
        let mut behind = behind.iter();
        let have_upper = DMatrix::from_row_iterator(
            k,
            k,
            (0..k * k).map(|at| match (at % k).cmp(&(at / k)) {
                std::cmp::Ordering::Less => 0.0,
                std::cmp::Ordering::Equal => 1.0,
                std::cmp::Ordering::Greater => *behind.next().unwrap(),
            }),
        );
        let have_worth = DMatrix::from_diagonal(&nalgebra::DVector::from_row_slice(worth));
        let again = &have_upper * have_worth * have_upper.transpose();
        assert!((again - damped).amax() < 1e-5);
    }
}
