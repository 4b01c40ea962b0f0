//! Hyper-connections: a token has several streams instead of one residual, and three operations mix
//! them. With h a stream, t a token, and i an element:
//!
//! ```text
//! DSV4_HC_PRE   y[i, t]    = s · Σ_h x[i, h, t] · w[h, t]     w of a gated one: sigmoid(gate[i, h, t])
//! DSV4_HC_POST  y[i, h, t] = x[i, t] · post[h, t] + Σ_g residual[i, g, t] · comb[h, g, t]
//! DSV4_HC_COMB  the 4 × 4 matrix comb of a token: softmax of its rows, then columns and rows divided
//!               by their sums in turn, so that both come close to 1
//! ```
//!
//! PRE and POST are sums of weighted rows, in chunks of a row. COMB has a token in each lane: sums
//! over the matrix need no exchange between lanes.
//!
//! SOURCE: ggml, `ggml_compute_forward_dsv4_hc_comb_f32`, `_pre_f32` and `_post_f32`.

use super::elementwise::load;
use super::math;
use super::tensor::{
    ARITHMETIC, CHUNK, Chunk, Row, Run, Source, TASK_PACKETS, Type, View, ViewMut, row_packets,
};
use crate::error::{Error, Result};
use crate::hvx::{self, add_f32, max_f32, mul_f32, splat_f32, sub_f32};
use crate::layout::Line;
use crate::rt::Engine;
use crate::wire::WIDE_SOURCES;

/// Elements of a vector.
const LANES: usize = 32;
/// Streams of a matrix of COMB.
const STREAMS: usize = 4;
/// Elements of a matrix of COMB.
const MATRIX: usize = STREAMS * STREAMS;
/// Most rounds of COMB, so that a command ends soon; models have 20.
const MAX_ROUNDS: u32 = 1000;

/// Factors of the streams of a token.
#[derive(Clone, Copy)]
enum StreamWeights<'a> {
    /// Element h of row t.
    Rows(&'a View<'a>),
    /// Sigmoids of row (h, t), element by element.
    Gates(&'a View<'a>),
    /// Element of a fixed stream in row (h, t).
    Matrix(&'a View<'a>, usize),
    /// 1 for a stream, and 0 for the others.
    Only(usize),
}

/// Writes a weighted sum of the streams of a token.
struct MixRow<'a> {
    row: Row<'a>,
    token: usize,
    /// A row that is added, with its factor.
    own: Option<(&'a View<'a>, f32)>,
    /// Streams in dimension 1, tokens in dimension 2.
    streams: &'a View<'a>,
    weights: StreamWeights<'a>,
    scale: f32,
}

impl hvx::Kernel for MixRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let (n, token, first) = (self.row.len(), self.token, self.row.first);
        let mut memory: [Chunk; 3] = [[0.0; CHUNK]; 3];
        let [sum, chunk, gates] = &mut memory;
        for start in (0..n).step_by(CHUNK) {
            let len = CHUNK.min(n - start);
            let range = first + start..first + start + len;
            sum.fill(0.0);
            if let Some((own, factor)) = self.own {
                let elems = own.read([token, 0, 0], range.clone(), chunk);
                add_weighted(sum, elems, factor);
            }
            for h in 0..self.streams.shape.ne[1] {
                let factor = match self.weights {
                    StreamWeights::Rows(view) => view.element(h, [token, 0, 0]),
                    StreamWeights::Matrix(view, stream) => view.element(stream, [h, token, 0]),
                    StreamWeights::Only(stream) if stream == h => 1.0,
                    StreamWeights::Only(_) => continue,
                    StreamWeights::Gates(view) => {
                        let elems = self.streams.read([h, token, 0], range.clone(), chunk);
                        let gates = view.read([h, token, 0], range.clone(), gates);
                        add_gated(sum, elems, gates);
                        continue;
                    }
                };
                let elems = self.streams.read([h, token, 0], range.clone(), chunk);
                add_weighted(sum, elems, factor);
            }
            for lanes in sum.as_chunks_mut::<LANES>().0 {
                let scaled = mul_f32(hvx::load_f32(lanes), splat_f32(self.scale));
                hvx::store_f32(lanes, scaled);
            }
            self.row.write(start, &sum[..len]);
        }
    }
}

/// Adds `elems · factor` to `sum`.
#[inline(always)]
fn add_weighted(sum: &mut Chunk, elems: &[f32], factor: f32) {
    let count = elems.len().div_ceil(LANES);
    let lanes = sum.as_chunks_mut::<LANES>().0.iter_mut().take(count);
    for (i, sum) in lanes.enumerate() {
        let elems = load(elems, LANES * i);
        let product = mul_f32(elems, splat_f32(factor));
        hvx::store_f32(sum, add_f32(hvx::load_f32(sum), product));
    }
}

/// Adds `elems · sigmoid(gates)` to `sum`.
#[inline(always)]
fn add_gated(sum: &mut Chunk, elems: &[f32], gates: &[f32]) {
    let count = elems.len().div_ceil(LANES);
    let lanes = sum.as_chunks_mut::<LANES>().0.iter_mut().take(count);
    for (i, sum) in lanes.enumerate() {
        let (elems, gates) = (load(elems, LANES * i), load(gates, LANES * i));
        let product = mul_f32(elems, math::sigmoid(gates));
        hvx::store_f32(sum, add_f32(hvx::load_f32(sum), product));
    }
}

/// Returns a source that is f32 and has these dimensions.
fn floats<'a>(source: &Source<'a>, ne: [usize; 4]) -> Result<View<'a>> {
    let view = source.apart()?;
    if view.shape.dtype == Type::F32 && view.shape.ne == ne {
        Ok(view)
    } else {
        Err(Error::Operand)
    }
}

/// Computes DSV4_HC_PRE: the streams of each token become one row.
///
/// - `src`: x, f32 `[n, streams, tokens]`; weights, f32 `[streams, tokens]`, gates as x
/// - `dst`: f32 `[n, tokens]`
///
/// # Errors
/// `Operand` unless the operands are as above.
pub fn pre(
    engine: &Engine,
    (scale, is_gated): (f32, bool),
    dst: ViewMut<'_>,
    src: [&Source<'_>; 2],
) -> Result<()> {
    let [n, tokens, ..] = dst.shape.ne;
    let streams = src[0].apart()?.shape.ne[1];
    let ne = [n, streams, tokens, 1];
    let x = &floats(src[0], ne)?;
    let weights = if is_gated {
        floats(src[1], ne)
    } else {
        floats(src[1], [streams, tokens, 1, 1])
    };
    let weights = &weights?;
    if dst.shape.dtype != Type::F32 || dst.shape.ne[2..] != [1, 1] {
        return Err(Error::Operand);
    }
    let packets = || row_packets(n, (1 + streams).saturating_mul(2 * ARITHMETIC));
    dst.for_row_parts(engine, packets, |row| {
        hvx::widest(MixRow {
            token: row.at[0],
            row,
            own: None,
            streams: x,
            weights: match is_gated {
                true => StreamWeights::Gates(weights),
                false => StreamWeights::Rows(weights),
            },
            scale,
        });
    });
    Ok(())
}

/// Computes DSV4_HC_POST: each stream of a token becomes its part of the result of a block, and a
/// mixture of all streams; without `comb`, the stream itself.
///
/// - `src`: x, f32 `[n, tokens]`; residual, f32 `[n, streams, tokens]`; post, f32
///   `[streams, tokens]`; comb, f32 `[streams, streams, tokens]` or none
/// - `dst`: f32 `[n, streams, tokens]`
///
/// # Errors
/// `Operand` unless the operands are as above.
pub fn post(engine: &Engine, dst: ViewMut<'_>, src: &[Source<'_>; WIDE_SOURCES]) -> Result<()> {
    let [n, streams, tokens, last] = dst.shape.ne;
    let x = &floats(&src[0], [n, tokens, 1, 1])?;
    let residual = &floats(&src[1], [n, streams, tokens, 1])?;
    let post = &floats(&src[2], [streams, tokens, 1, 1])?;
    let comb = match &src[3] {
        Source::None => None,
        comb => Some(floats(comb, [streams, streams, tokens, 1])?),
    };
    let others = src[4..].iter().any(|src| !matches!(src, Source::None));
    if dst.shape.dtype != Type::F32 || last != 1 || others {
        return Err(Error::Operand);
    }
    let packets = || row_packets(n, (2 + streams).saturating_mul(2 * ARITHMETIC));
    dst.for_row_parts(engine, packets, |row| {
        let [stream, token, _] = row.at;
        hvx::widest(MixRow {
            row,
            token,
            own: Some((x, post.element(stream, [token, 0, 0]))),
            streams: residual,
            weights: match &comb {
                Some(comb) => StreamWeights::Matrix(comb, stream),
                None => StreamWeights::Only(stream),
            },
            scale: 1.0,
        });
    });
    Ok(())
}

/// Subtracts the largest element of a row from each of its elements, in 32 matrices.
struct LessLargest<'a>(&'a mut [Line; STREAMS]);

impl hvx::Kernel for LessLargest<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut largest = hvx::load(&self.0[0]);
        for elem in &self.0[1..] {
            largest = max_f32(largest, hvx::load(elem));
        }
        for elem in self.0 {
            hvx::store(elem, sub_f32(hvx::load(elem), largest));
        }
    }
}

/// Replaces the elements of 32 matrices by their exponentials: all of them in one loop, because
/// four at once have more constants than registers hold.
struct Exponentials<'a>(&'a mut [Line; MATRIX]);

impl hvx::Kernel for Exponentials<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for elem in self.0 {
            hvx::store(elem, math::exp(hvx::load(elem)));
        }
    }
}

/// Divides four elements of 32 matrices by their sum: a row or a column.
struct DivideBySum<'a> {
    matrices: &'a mut [Line; MATRIX],
    first: usize,
    step: usize,
    /// Added to the sum.
    before: f32,
    /// Added to the results.
    after: f32,
}

impl hvx::Kernel for DivideBySum<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let place = |i: usize| (self.first + self.step * i) % MATRIX;
        let [a, b, c, d] = [0, 1, 2, 3].map(|i| hvx::load(&self.matrices[place(i)]));
        let sum = add_f32(add_f32(a, b), add_f32(c, d));
        let factor = math::reciprocal(add_f32(sum, splat_f32(self.before)));
        for (i, elem) in [a, b, c, d].into_iter().enumerate() {
            let share = mul_f32(elem, factor);
            hvx::store(
                &mut self.matrices[place(i)],
                add_f32(share, splat_f32(self.after)),
            );
        }
    }
}

/// Makes the matrices of 32 tokens, line i having element i of each: softmax of rows plus `eps`,
/// then columns and rows divided by their sums plus `eps` in turn.
fn balance(matrices: &mut [Line; MATRIX], eps: f32, rounds: u32) {
    for row in matrices.as_chunks_mut::<STREAMS>().0 {
        hvx::widest(LessLargest(row));
    }
    hvx::widest(Exponentials(matrices));
    for round in 0..rounds {
        // The first round's division of rows is the softmax, which adds `eps` after dividing.
        let (before, after) = if round == 0 { (0.0, eps) } else { (eps, 0.0) };
        for row in 0..STREAMS {
            hvx::widest(DivideBySum {
                matrices,
                first: STREAMS * row,
                step: 1,
                before,
                after,
            });
        }
        for column in 0..STREAMS {
            hvx::widest(DivideBySum {
                matrices,
                first: column,
                step: STREAMS,
                before: eps,
                after: 0.0,
            });
        }
    }
}

/// The sources of COMB.
struct Mixes<'a> {
    /// 24 numbers for each token; the last 16 make the matrix.
    mixes: View<'a>,
    /// Factor of these.
    scale: f32,
    base: View<'a>,
}

impl Mixes<'_> {
    /// Returns element `i` of a token's matrix.
    fn element(&self, i: usize, token: usize) -> f32 {
        let i = 2 * STREAMS + i;
        self.mixes.element(i, [token, 0, 0]) * self.scale + self.base.element(i, [0; 3])
    }

    /// Writes the matrices of consecutive tokens.
    fn balance(&self, eps: f32, rounds: u32, mut run: Run<'_>) {
        let (first, count) = (run.at[0], run.count);
        let Some((out, stride)) = run.floats() else {
            return;
        };
        let mut lines = hvx::zeros::<MATRIX>();
        for start in (0..count).step_by(LANES) {
            let some = LANES.min(count - start);
            let lanes: &mut [[f32; LANES]; MATRIX] = bytemuck::cast_mut(&mut lines);
            for (i, lanes) in lanes.iter_mut().enumerate() {
                for (token, lane) in lanes.iter_mut().take(some).enumerate() {
                    *lane = self.element(i, first + start + token);
                }
            }
            balance(&mut lines, eps, rounds);
            let lanes: &[[f32; LANES]; MATRIX] = bytemuck::cast_ref(&lines);
            for token in 0..some {
                let to = out.get_mut(stride * (start + token)..).unwrap_or_default();
                for (to, lanes) in to.iter_mut().zip(lanes) {
                    *to = lanes[token];
                }
            }
        }
    }
}

/// Computes DSV4_HC_COMB: the matrix with which POST mixes the streams of each token.
///
/// - `rounds`: how often columns are divided by their sums, 1 to 1000
/// - `src`: mixes, f32 `[24, tokens]`; scale, f32 with at least 3 elements; base, f32 `[24]`
/// - `dst`: f32 `[4, 4, tokens]` without gaps
///
/// # Errors
/// `Operand` unless the operands are as above.
pub fn comb(
    engine: &Engine,
    (eps, rounds): (f32, u32),
    dst: ViewMut<'_>,
    src: &[Source<'_>; 3],
) -> Result<()> {
    let tokens = dst.shape.ne[2];
    let mix = 2 * STREAMS + MATRIX;
    let scale = src[1].apart()?.shape.ne;
    let fits = dst.shape.dtype == Type::F32
        && dst.shape.is_gapless()
        && dst.shape.ne == [STREAMS, STREAMS, tokens, 1]
        && scale[0] > 2
        && (1..=MAX_ROUNDS).contains(&rounds);
    if !fits {
        return Err(Error::Operand);
    }
    let sources = Mixes {
        mixes: floats(&src[0], [mix, tokens, 1, 1])?,
        scale: floats(&src[1], scale)?.element(2, [0; 3]),
        base: floats(&src[2], [mix, 1, 1, 1])?,
    };
    let shape = dst.shape.with_rows(MATRIX);
    // 32 tokens are computed together, so they cost as much as one.
    let packets = || TASK_PACKETS.div_ceil(LANES);
    dst.reshaped(shape).for_parts(engine, packets, |part| {
        part.for_each_run(|run| sources.balance(eps, rounds, run));
    });
    Ok(())
}
