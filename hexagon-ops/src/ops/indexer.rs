//! LIGHTNING_INDEXER: how much each cached position matters to a token, for sparse attention.
//!
//! ```text
//! y[p, t] = Σ_h max(q[h, t] · k[p], 0) · w[h, t] + mask[p, t]
//!
//! for each 32 positions                     a task has some of the positions, for all tokens
//!   read their keys as f32, a line for each 32 elements, to VTCM
//!   for each token, for each 8 heads
//!     read their queries; 8 × 32 dot products, then maximum, weight and sum
//!   add the mask
//! ```
//!
//! Products are FP32, which needs no check of the range. The result chooses positions, so an error
//! of FP16 would change which ones.

use core::ops::Range;

use super::fold::Products;
use super::tensor::{Source, Type, View, ViewMut};
use crate::error::{Error, Result};
use crate::hvx::{self, add_f32, max_f32, mul_f32, splat_f32};
use crate::layout::{Line, Tile};
use crate::rt::{Arena, Engine, SharedColumns, tiles_of_lines};
use crate::wire::WIDE_SOURCES;

/// Positions that are computed at a time.
const LANES: usize = 32;
/// Heads that are computed at a time.
const HEADS: usize = 8;
/// Most tasks of a step.
const MAX_TASKS: usize = 8;

/// The sources of the operation.
struct IndexerInputs<'a> {
    /// `[n, heads, tokens, streams]`
    queries: View<'a>,
    /// `[n, positions, 1, streams]`
    keys: View<'a>,
    /// `[heads, tokens, 1, streams]`
    weights: View<'a>,
    /// `[positions, tokens, 1, streams of masks]`
    mask: View<'a>,
}

impl<'a> IndexerInputs<'a> {
    /// Checks the sources, and that the result fits them.
    fn new(dst: &ViewMut<'_>, src: &[Source<'a>; WIDE_SOURCES]) -> Result<Self> {
        let [queries, mut keys, weights, mask] = [
            src[0].apart()?,
            src[1].apart()?,
            src[2].apart()?,
            src[3].apart()?,
        ];
        let [n, heads, tokens, streams] = queries.shape.ne;
        let positions = keys.shape.ne[2];
        let key_type = keys.shape.dtype;
        let fits = queries.shape.dtype == Type::F32
            && key_type.is_computed()
            && weights.shape.dtype == Type::F32
            && mask.shape.dtype == Type::F16
            && dst.shape.dtype == Type::F32
            && dst.shape.is_gapless()
            && keys.shape.ne == [n, 1, positions, streams]
            && weights.shape.ne == [heads, tokens, 1, streams]
            && mask.shape.ne[..3] == [positions, tokens, 1]
            && streams.is_multiple_of(mask.shape.ne[3])
            && dst.shape.ne == [positions, tokens, 1, streams]
            && src[4..].iter().all(|src| matches!(src, Source::None));
        if !fits {
            return Err(Error::Operand);
        }
        // Exchange dimensions so that positions become rows of one plane, which can be read
        // together.
        keys.shape.ne.swap(1, 2);
        keys.shape.nb.swap(1, 2);
        Ok(Self {
            queries,
            keys,
            weights,
            mask,
        })
    }

    /// Returns the lines of a query or a key.
    fn lines(&self) -> usize {
        self.keys.shape.ne[0].div_ceil(LANES)
    }
}

/// Adds the weighted positive ones of 32 products of each head to `total`.
struct AddHeads<'a> {
    products: &'a [Line],
    factors: &'a [f32; HEADS],
    total: &'a mut Line,
}

impl hvx::Kernel for AddHeads<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (products, factor) in self.products.iter().zip(self.factors) {
            let positive = max_f32(hvx::load(products), splat_f32(0.0));
            let weighted = mul_f32(positive, splat_f32(*factor));
            hvx::store(self.total, add_f32(hvx::load(self.total), weighted));
        }
    }
}

/// Adds a mask of 32 positions to `total`.
struct AddMask<'a> {
    mask: &'a Line,
    total: &'a mut Line,
}

impl hvx::Kernel for AddMask<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let sum = add_f32(hvx::load(self.total), hvx::load(self.mask));
        hvx::store(self.total, sum);
    }
}

/// Some positions of all tokens.
struct PositionsTask<'a> {
    positions: Range<usize>,
    /// These positions of the result, a row for each token of each stream.
    scores: SharedColumns<'a>,
    /// 32 keys.
    keys: &'a mut [Line],
    /// Queries of [`HEADS`] heads.
    queries: &'a mut [Line],
}

impl PositionsTask<'_> {
    fn run(&mut self, inputs: &IndexerInputs<'_>) {
        let [n, _, tokens, streams] = inputs.queries.shape.ne;
        for stream in 0..streams {
            for start in self.positions.clone().step_by(LANES) {
                let range = start..self.positions.end.min(start + LANES);
                let plane = [0, stream];
                inputs.keys.read_rows(range.clone(), plane, 0..n, self.keys);
                for token in 0..tokens {
                    self.token(inputs, [token, stream], range.clone());
                }
            }
        }
    }

    /// Computes 32 positions of a token.
    fn token(&mut self, inputs: &IndexerInputs<'_>, at: [usize; 2], range: Range<usize>) {
        let [token, stream] = at;
        let [_, heads, tokens, _] = inputs.queries.shape.ne;
        let lines = inputs.lines();
        let [mut total] = hvx::zeros::<1>();
        for first in (0..heads).step_by(HEADS) {
            let some = first..heads.min(first + HEADS);
            let count = some.len();
            let queries = &mut self.queries[..count * lines];
            (inputs.queries).read_rows(some.clone(), at, 0..inputs.queries.shape.ne[0], queries);
            let mut products = hvx::zeros::<HEADS>();
            hvx::widest(Products {
                rows: queries,
                columns: self.keys,
                sums: &mut products,
            });
            let mut factors = [0.0; HEADS];
            for (factor, head) in factors.iter_mut().zip(some) {
                *factor = inputs.weights.element(head, [token, 0, stream]);
            }
            hvx::widest(AddHeads {
                products: &products[..count],
                factors: &factors,
                total: &mut total,
            });
        }
        let mut mask = hvx::zeros::<1>();
        (inputs.mask).read_rows(token..token + 1, [0, stream], range.clone(), &mut mask);
        hvx::widest(AddMask {
            mask: &mask[0],
            total: &mut total,
        });
        let elems: &[f32; LANES] = bytemuck::cast_ref(&total);
        let first = range.start - self.positions.start;
        let row = self.scores.row(stream * tokens + token);
        let row = row.get_mut(first..first + range.len());
        hvx::copy_f32(row.unwrap_or_default(), elems);
    }
}

/// Computes LIGHTNING_INDEXER.
///
/// - `src`: queries, f32 `[n, heads, tokens, streams]`; keys of any type that can be read,
///   `[n, 1, positions, streams]`; weights, f32 `[heads, tokens, 1, streams]`; mask, f16
///   `[positions, tokens, 1, s]`, where s divides the streams
/// - `dst`: f32 `[positions, tokens, 1, streams]` without gaps
///
/// # Errors
/// `Operand` unless the operands are as above; `VtcmFull` if the VTCM does not hold 32 keys and the
/// queries of 8 heads.
pub fn lightning_indexer(
    engine: &Engine,
    vtcm: &mut [Tile],
    dst: ViewMut<'_>,
    src: &[Source<'_>; WIDE_SOURCES],
) -> Result<()> {
    let inputs = IndexerInputs::new(&dst, src)?;
    if dst.is_empty() {
        return Ok(());
    }
    let positions = dst.shape.ne[0];
    let elems = dst.into_floats().ok_or(Error::Operand)?;
    let mut scores = SharedColumns::new(elems, positions);
    let key_lines = LANES * inputs.lines();
    let query_lines = HEADS * inputs.lines();
    let tiles = tiles_of_lines(key_lines) + tiles_of_lines(query_lines);
    let groups = positions.div_ceil(LANES);
    let n_tasks = (engine.threads().min(MAX_TASKS))
        .min(groups)
        .min(vtcm.len() / tiles)
        .max(1);
    let mut arena = Arena::new(vtcm);
    let mut tasks: [Option<PositionsTask<'_>>; MAX_TASKS] = [const { None }; MAX_TASKS];
    let mut start = 0;
    for (i, task) in tasks.iter_mut().take(n_tasks).enumerate() {
        let count = (groups - start / LANES).div_ceil(n_tasks - i) * LANES;
        let end = positions.min(start + count);
        *task = Some(PositionsTask {
            positions: start..end,
            scores: scores.split_off(end - start),
            keys: arena.lines("keys", key_lines)?,
            queries: arena.lines("queries", query_lines)?,
        });
        start = end;
    }
    engine.step(None, &mut tasks[..n_tasks], |task| {
        task.iter_mut().for_each(|task| task.run(&inputs));
    });
    Ok(())
}
