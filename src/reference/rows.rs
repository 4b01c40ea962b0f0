//! Operations on rows and heads.

/// Divides each row of `n` by the root of its mean square plus `eps`; if `centered`, its mean is
/// subtracted first.
#[must_use]
pub fn norm(x: &[f32], n: usize, eps: f64, centered: bool) -> Vec<f64> {
    let mut out = Vec::with_capacity(x.len());
    for row in x.chunks_exact(n) {
        let count = row.len().max(1) as f64;
        let sum: f64 = row.iter().map(|x| f64::from(*x)).sum();
        let mean = if centered { sum / count } else { 0.0 };
        let squares: f64 = row.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum();
        let root = (squares / count + eps).sqrt();
        out.extend(row.iter().map(|x| (f64::from(*x) - mean) / root));
    }
    out
}

/// Divides each row of `n` by its length, or by `eps` if that is larger.
#[must_use]
pub fn l2_norm(x: &[f32], n: usize, eps: f64) -> Vec<f64> {
    x.chunks_exact(n)
        .flat_map(|row| {
            let squares: f64 = row.iter().map(|x| f64::from(*x).powi(2)).sum();
            let length = squares.sqrt().max(eps);
            row.iter().map(move |x| f64::from(*x) / length)
        })
        .collect()
}

/// Rotates pairs of elements by `position · base^(-2 i / d)`: ggml's ROPE without scaling.
///
/// - `x`: tokens of `heads` heads of `d` elements; `positions`: one for each token
/// - `halves`: the pair i is (i, i + d / 2), as in ggml's NEOX mode, else (2 i, 2 i + 1)
#[must_use]
pub fn rope(
    x: &[f32],
    d: usize,
    heads: usize,
    positions: &[i32],
    base: f64,
    halves: bool,
) -> Vec<f64> {
    let mut out: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
    for (token, position) in out.chunks_exact_mut(d * heads).zip(positions) {
        for head in token.chunks_exact_mut(d) {
            for i in 0..d / 2 {
                let (a, b) = if halves {
                    (i, i + d / 2)
                } else {
                    (2 * i, 2 * i + 1)
                };
                let angle = f64::from(*position) * base.powf(-2.0 * i as f64 / d as f64);
                let (sin, cos) = angle.sin_cos();
                (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[a] * sin + head[b] * cos);
            }
        }
    }
    out
}

/// Returns the softmax of each row of `n`, times `scale` and plus the mask.
///
/// - `mask`: as long as `x`
#[must_use]
pub fn soft_max(x: &[f32], mask: &[f32], n: usize, scale: f64) -> Vec<f64> {
    let mut out = Vec::with_capacity(x.len());
    for (row, mask) in x.chunks_exact(n).zip(mask.chunks_exact(n)) {
        let scores: Vec<f64> = (row.iter().zip(mask))
            .map(|(x, mask)| f64::from(*x) * scale + f64::from(*mask))
            .collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|x| (x - largest).exp()).collect();
        let sum: f64 = weights.iter().sum();
        out.extend(weights.iter().map(|x| x / sum));
    }
    out
}

/// Sizes of [`attention`].
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Elements of a head.
    pub d: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of queries that share a head of keys and values.
    pub shared: usize,
    /// Queries of a head.
    pub queries: usize,
    /// Keys of a head.
    pub positions: usize,
}

/// Returns `softmax(q · k / sqrt(d) + mask) · v` for each head, as ggml's FLASH_ATTN_EXT.
///
/// - `q`: `[heads][queries][d]`; `k` and `v`: `[heads / shared][positions][d]`; `mask`:
///   `[queries][positions]`
/// - returns `[queries][heads][d]`
#[must_use]
pub fn attention(q: &[f32], k: &[f32], v: &[f32], mask: &[f32], sizes: Heads) -> Vec<f64> {
    let (d, positions) = (sizes.d, sizes.positions);
    let mut out = Vec::with_capacity(q.len());
    for query in 0..sizes.queries {
        for head in 0..sizes.heads {
            let q = &q[(head * sizes.queries + query) * d..][..d];
            let keys = head / sizes.shared * positions * d..;
            let (k, v) = (&k[keys.clone()], &v[keys]);
            let dot = |j: usize| q.iter().zip(&k[j * d..]).map(|(q, k)| q * k).sum::<f32>();
            let scores: Vec<f32> = (0..positions).map(dot).collect();
            let mask = &mask[query * positions..][..positions];
            let weights = soft_max(&scores, mask, positions, 1.0 / (d as f64).sqrt());
            out.extend((0..d).map(|i| {
                let value = |(j, weight): (usize, &f64)| weight * f64::from(v[j * d + i]);
                weights.iter().enumerate().map(value).sum::<f64>()
            }));
        }
    }
    out
}

/// Returns `x / (1 + exp(-x))`.
#[must_use]
pub fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// Returns the GELU by tanh.
#[must_use]
pub fn gelu(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
    x / 2.0 * (1.0 + inner.tanh())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_have_their_textbook_values() {
        let near = |have: &[f64], want: &[f64]| {
            assert_eq!(have.len(), want.len());
            for (have, want) in have.iter().zip(want) {
                assert!((have - want).abs() < 1e-6, "{have} instead of {want}");
            }
        };
        near(
            &norm(&[3.0, 4.0], 2, 0.0, false),
            &[0.848_528_1, 1.131_370_8],
        );
        near(&norm(&[3.0, 5.0], 2, 0.0, true), &[-1.0, 1.0]);
        near(&l2_norm(&[3.0, 4.0], 2, 0.0), &[0.6, 0.8]);
        near(&soft_max(&[0.0, 2.0], &[0.0, -1.0], 2, 0.5), &[0.5, 0.5]);
        // The second pair rotates by a hundredth of the position.
        let turned = rope(&[1.0, 0.0, 1.0, 0.0], 4, 1, &[1], 1e4, false);
        near(&turned, &[0.540_302_3, 0.841_471, 0.999_95, 0.009_999_8]);
        let turned = rope(&[1.0, 1.0, 0.0, 0.0], 4, 1, &[1], 1e4, true);
        near(&turned, &[0.540_302_3, 0.999_95, 0.841_471, 0.009_999_8]);
        near(&[silu(1.0), gelu(1.0)], &[0.731_058_6, 0.841_191_9]);
    }

    #[test]
    fn attention_takes_the_values_of_the_head_it_shares() {
        let sizes = Heads {
            d: 1,
            heads: 2,
            shared: 2,
            queries: 1,
            positions: 2,
        };
        let have = attention(&[0.0, 0.0], &[1.0, 2.0], &[4.0, 8.0], &[0.0, 0.0], sizes);
        assert_eq!(have, [6.0, 6.0]);
        let hidden = [0.0, f32::NEG_INFINITY];
        let have = attention(&[0.0, 0.0], &[1.0, 2.0], &[4.0, 8.0], &hidden, sizes);
        assert_eq!(have, [4.0, 4.0]);
    }
}
