//! One token of a recurrence: which vectors decay, change and read the state.

use core::ops::Range;

use super::state::{HeadState, RowForm, dot, exp, fill, gate, multiply, splat, splat_exp};
use super::{Inputs, Recurrence};
use crate::ops::tensor::View;

impl<'a> Inputs<'a> {
    /// Takes the state in `scratch`, of all of `heads`, from one token to the next, and writes the
    /// token's output.
    pub(super) fn step(
        &self,
        scratch: &mut HeadState<'_>,
        [token, sequence]: [usize; 2],
        heads: Range<usize>,
        out: &mut [f32],
    ) {
        let head = heads.start;
        match self.kind {
            Recurrence::SsmScan(_) => self.ssm_scan(scratch, [token, sequence], heads, out),
            Recurrence::GatedDelta(_) => self.gated_delta(scratch, [head, token, sequence], out),
            Recurrence::GatedLinear(_) | Recurrence::Wkv6 | Recurrence::Wkv7 => {
                let at = [head, sequence * self.sizes.tokens + token, 0];
                match self.kind {
                    Recurrence::GatedLinear(scale) => self.gated_linear(scratch, scale, at, out),
                    Recurrence::Wkv6 => self.wkv6(scratch, at, out),
                    _ => self.wkv7(scratch, at, out),
                }
            }
        }
    }

    /// Returns a row of a source.
    fn row(&self, source: usize, at: [usize; 3]) -> &'a [f32] {
        self.src[source].floats(at).unwrap_or_default()
    }

    /// Computes `M' = M · exp(dt A) + B · dt x` and `y = M' · C`, where dt is `ln(1 + e^x)` of the
    /// source.
    fn ssm_scan(
        &self,
        scratch: &mut HeadState<'_>,
        at: [usize; 2],
        heads: Range<usize>,
        out: &mut [f32],
    ) {
        let form = self.scan_vectors(scratch, at, heads);
        scratch.step_rows(&form, out);
    }

    /// Reads the vectors of a token of a scan. A state whose rows have different decays is decayed
    /// here.
    fn scan_vectors(
        &self,
        scratch: &mut HeadState<'_>,
        [token, sequence]: [usize; 2],
        heads: Range<usize>,
    ) -> RowForm {
        let [_, _, dt, a, b, ..] = &self.src;
        let (rows, head) = (self.sizes.rows, heads.start);
        let group = head / (self.sizes.heads / b.shape.ne[1]);
        let at = [group, token, sequence];
        if a.shape.ne[0] == 1 {
            splat(scratch.beta, dt.element(head, [token, sequence, 0]));
            splat(scratch.ones, a.element(0, [head, 0, 0]));
            gate(scratch.beta, Some(&scratch.ones[0]), scratch.decay);
            splat(scratch.ones, 1.0);
        } else {
            let mut times = [0.0; 32];
            for (row, time) in times.iter_mut().enumerate().take(heads.len() * rows) {
                *time = dt.element(head + row / rows, [token, sequence, 0]);
            }
            fill(scratch.beta, &times);
            gate(scratch.beta, None, scratch.decay);
            splat(scratch.decay, 1.0);
            for row in 0..heads.len() * rows {
                scratch.decay_row(row, self.row(3, [head + row / rows, 0, 0]));
            }
        }
        fill(scratch.add, self.row(4, at));
        let (_, read) = scratch.probes.split_at_mut(scratch.decay.len());
        fill(read, self.row(5, at));
        let own = dot(scratch.add, read);
        multiply(read, scratch.decay);
        for (i, head) in heads.enumerate() {
            scratch.set_values(i * rows, self.row(1, [head, token, sequence]));
        }
        RowForm {
            own,
            ..RowForm::default()
        }
    }

    /// Computes a token with `32 · L` columns, from one memory of the state to another:
    /// [`HeadState::step_square`].
    pub(super) fn step_square<const L: usize>(
        &self,
        scratch: &mut HeadState<'_>,
        at: [usize; 3],
        (from, to): (Option<&[f32]>, Option<&mut [f32]>),
        out: &mut [f32],
    ) {
        let [head, token, sequence] = at;
        let form = match self.kind {
            Recurrence::SsmScan(_) => self.scan_vectors(scratch, [token, sequence], head..head + 1),
            Recurrence::Wkv7 => {
                let at = [head, sequence * self.sizes.tokens + token, 0];
                self.wkv7_vectors(scratch, at)
            }
            _ => self.delta_vectors(scratch, at),
        };
        scratch.step_square::<L>(&form, from, to, out);
    }

    /// Computes `M' = M · exp(g)`, then `M'' = M' + k · beta (v - M' · k)` and `y = M'' · q / √S`.
    fn gated_delta(&self, scratch: &mut HeadState<'_>, at: [usize; 3], out: &mut [f32]) {
        let form = self.delta_vectors(scratch, at);
        scratch.step_rows(&form, out);
    }

    /// Reads the vectors of a token of the gated delta rule.
    fn delta_vectors(
        &self,
        scratch: &mut HeadState<'_>,
        [head, token, sequence]: [usize; 3],
    ) -> RowForm {
        let [q, k, _, g, beta, ..] = &self.src;
        let at = [head, token, sequence];
        let is_single = g.shape.ne[0] == 1;
        let decay = if is_single {
            splat_exp(scratch.decay, g.element(0, at))
        } else {
            fill(scratch.decay, self.row(3, at));
            exp(scratch.decay);
            1.0
        };
        let (keys, queries) = scratch.probes.split_at_mut(scratch.decay.len());
        fill(scratch.add, self.row(1, shared(self, k, at)));
        fill(keys, self.row(1, shared(self, k, at)));
        fill(queries, self.row(0, shared(self, q, at)));
        let own = dot(keys, queries);
        if !is_single {
            multiply(keys, scratch.decay);
            multiply(queries, scratch.decay);
        }
        splat(scratch.beta, beta.element(0, at));
        scratch.set_values(0, self.row(2, at));
        RowForm {
            own,
            scale: 1.0 / square_root(self.sizes.columns),
            decay,
            takes_old: true,
            ..RowForm::default()
        }
    }

    /// Computes `M' = M · w + k · v + b · (M · a)` and `y = M' · r`.
    fn wkv7(&self, scratch: &mut HeadState<'_>, at: [usize; 3], out: &mut [f32]) {
        let form = self.wkv7_vectors(scratch, at);
        scratch.step_rows(&form, out);
    }

    /// Reads the vectors of a token of RWKV7.
    fn wkv7_vectors(&self, scratch: &mut HeadState<'_>, at: [usize; 3]) -> RowForm {
        fill(scratch.decay, self.row(1, at));
        let (old, read) = scratch.probes.split_at_mut(scratch.decay.len());
        fill(old, self.row(4, at));
        fill(read, self.row(0, at));
        fill(scratch.add, self.row(2, at));
        fill(scratch.second, self.row(5, at));
        let (own, second) = (dot(scratch.add, read), dot(scratch.second, read));
        multiply(read, scratch.decay);
        splat(scratch.beta, 1.0);
        splat(scratch.ones, 1.0);
        scratch.set_values(0, self.row(3, at));
        RowForm {
            own,
            second: Some(second),
            ..RowForm::default()
        }
    }

    /// Computes `M' = g · M + k · v` by rows of the state, and `y = Σ scale q · M'`.
    fn gated_linear(
        &self,
        scratch: &mut HeadState<'_>,
        scale: f32,
        at: [usize; 3],
        out: &mut [f32],
    ) {
        let (weights, read) = scratch.probes.split_at_mut(scratch.decay.len());
        fill(scratch.decay, self.row(3, at));
        fill(scratch.add, self.row(0, at));
        fill(read, self.row(2, at));
        splat(scratch.ones, scale);
        multiply(read, scratch.ones);
        weights.copy_from_slice(read);
        multiply(weights, scratch.decay);
        let own = dot(scratch.add, read);
        scratch.set_values(0, self.row(1, at));
        scratch.step_columns(own, out);
    }

    /// Computes `y = Σ r · (tf · k · v + M)` by rows of the state, and `M' = td · M + k · v`.
    fn wkv6(&self, scratch: &mut HeadState<'_>, at: [usize; 3], out: &mut [f32]) {
        let (weights, read) = scratch.probes.split_at_mut(scratch.decay.len());
        fill(scratch.decay, self.row(4, at));
        fill(scratch.add, self.row(0, at));
        fill(weights, self.row(2, at));
        fill(read, self.row(3, [at[0], 0, 0]));
        multiply(read, weights);
        let own = dot(scratch.add, read);
        scratch.set_values(0, self.row(1, at));
        scratch.step_columns(own, out);
    }
}

/// Returns the place, in the queries or keys, that belongs to `[head, token, sequence]` in the
/// values.
///
/// SOURCE: ggml ops.cpp, gated_delta_net: heads repeat, sequences are repeated each.
pub(super) fn shared(
    inputs: &Inputs<'_>,
    view: &View<'_>,
    [head, token, sequence]: [usize; 3],
) -> [usize; 3] {
    let [_, heads, _, sequences] = view.shape.ne;
    let each = inputs.sizes.sequences / sequences;
    [head % heads, token, sequence / each]
}

/// Returns the square root of a small number.
#[expect(clippy::cast_possible_truncation, reason = "a factor in f32")]
pub(super) fn square_root(n: usize) -> f32 {
    // CAST: rows are shorter than 2^17.
    crate::ops::math::scalar::power(n as f64, 0.5) as f32
}
