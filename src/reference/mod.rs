//! The oracle: slow, obvious, in `f64`. Kernels, stand-ins and self-tests are compared with it; it
//! knows no layout.

mod recurrence;
mod rows;

pub use recurrence::{RecurrenceSizes, gated_delta, gated_linear};
pub use rows::{Heads, attention, gelu, l2_norm, norm, rope, silu, soft_max};

/// Returns `dst[m][n] = sum over k of act[m][k] * w[n][k]`.
///
/// - `act`: `m * k` elements; `w`: `n * k` elements, rows of K as ggml stores them
/// - returns `m * n` elements, row-major
///
/// ```
/// use ggml_rust_npu::reference::{mul_mat, nmse};
///
/// // One row of activations, two rows of weights.
/// let exact = mul_mat(&[1.0, 2.0], &[3.0, 4.0, 5.0, 6.0], 2);
/// assert_eq!(exact, [11.0, 17.0]);
/// assert!(nmse(&[11.0, 17.1], &exact) < 1e-4);
/// ```
#[must_use]
pub fn mul_mat(act: &[f32], w: &[f32], k: usize) -> Vec<f64> {
    let dot = |a: &[f32], b: &[f32]| {
        a.iter()
            .zip(b)
            .map(|(x, y)| f64::from(*x) * f64::from(*y))
            .sum()
    };
    act.chunks_exact(k)
        .flat_map(|row| w.chunks_exact(k).map(move |column| dot(row, column)))
        .collect()
}

/// Returns the normalized mean square error of `have` against `want`: sum of squared differences
/// over sum of squares, the metric of llama.cpp's test-backend-ops. Any element that is not finite
/// makes it infinite.
#[must_use]
pub fn nmse(have: &[f32], want: &[f64]) -> f64 {
    if have.len() != want.len() || have.iter().any(|x| !x.is_finite()) {
        return f64::INFINITY;
    }
    let error: f64 = have
        .iter()
        .zip(want)
        .map(|(x, y)| (f64::from(*x) - y).powi(2))
        .sum();
    let power: f64 = want.iter().map(|y| y * y).sum();
    if error == 0.0 { 0.0 } else { error / power }
}

/// Uniform numbers in [-1, 1) in steps of 1/256, the same each time: high bits of a linear
/// congruential generator.
// SOURCE: multiplier and increment of Knuth's MMIX.
#[must_use = "iterators are lazy"]
pub fn uniform() -> impl Iterator<Item = f32> {
    let mut state = 42u64;
    std::iter::from_fn(move || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        let high = u16::try_from(state >> 55).unwrap_or(0);
        Some(f32::from(high) / 256.0 - 1.0)
    })
}
