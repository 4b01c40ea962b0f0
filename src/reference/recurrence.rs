//! Recurrences over the tokens of one sequence, as ggml defines them: outputs of all tokens, then
//! the states.

/// Sizes of a recurrence.
#[derive(Clone, Copy, Debug)]
pub struct RecurrenceSizes {
    /// Rows and columns of a state.
    pub n: usize,
    /// Heads, each with a state.
    pub heads: usize,
    /// Tokens.
    pub tokens: usize,
}

impl RecurrenceSizes {
    /// Runs `step` with the state, the head, the place of the head's vectors and its outputs.
    fn run(self, state: &[f32], step: impl Fn(&mut [f64], usize, usize, &mut [f64])) -> Vec<f64> {
        let Self { n, heads, tokens } = self;
        let mut outputs = vec![0.0; n * heads * tokens];
        let mut states: Vec<f64> = state.iter().map(|x| f64::from(*x)).collect();
        for (place, out) in outputs.chunks_exact_mut(n).enumerate() {
            let head = place % heads;
            step(&mut states[head * n * n..][..n * n], place, place * n, out);
        }
        outputs.extend(states);
        outputs
    }
}

/// `GATED_DELTA_NET` with one gate for a head: vectors q, k and v, a gate and a factor for each
/// head of each token.
#[must_use]
pub fn gated_delta(
    sizes: RecurrenceSizes,
    [q, k, v]: [&[f32]; 3],
    [gates, factors]: [&[f32]; 2],
    state: &[f32],
) -> Vec<f64> {
    let n = sizes.n;
    let at = |x: &[f32], i: usize| f64::from(x[i]);
    sizes.run(state, |state, head, first, out| {
        for (j, (row, out)) in state.chunks_exact_mut(n).zip(out).enumerate() {
            row.iter_mut().for_each(|m| *m *= at(gates, head).exp());
            let read: f64 = row
                .iter()
                .enumerate()
                .map(|(i, m)| m * at(k, first + i))
                .sum();
            let delta = (at(v, first + j) - read) * at(factors, head);
            for (i, m) in row.iter_mut().enumerate() {
                *m += at(k, first + i) * delta;
                *out += *m * at(q, first + i) / (n as f64).sqrt();
            }
        }
    })
}

/// `GATED_LINEAR_ATTN`: vectors k, v, q and gates for each head of each token.
#[must_use]
pub fn gated_linear(
    sizes: RecurrenceSizes,
    [k, v, q, gates]: [&[f32]; 4],
    state: &[f32],
    scale: f64,
) -> Vec<f64> {
    let n = sizes.n;
    let at = |x: &[f32], i: usize| f64::from(x[i]);
    sizes.run(state, |state, _, first, out| {
        for (i, row) in state.chunks_exact_mut(n).enumerate() {
            for (j, (m, out)) in row.iter_mut().zip(&mut *out).enumerate() {
                *m = *m * at(gates, first + i) + at(k, first + i) * at(v, first + j);
                *out += *m * at(q, first + i) * scale;
            }
        }
    })
}
