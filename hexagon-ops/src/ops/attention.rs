//! Attention over keys and values in a cache: one pass over the positions with a running maximum.
//! The scores are never in memory as a whole.
//!
//! There are two code paths. Keys and values that FP16 can hold go through the matrix unit
//! (`tile`), all others through dot products in FP32 (`dot`): those of type F32, and those of other
//! types once a value beyond FP16's range is found. Even a single query row needs half the packets
//! on the matrix unit, because a key is moved to its tile once and the rest of a score's cost is
//! its exponential (`attention_*` in `tests/packets.txt`).
//!
//! ```text
//! for each stream, for each batch of queries whose results fit in VTCM
//!   passes, side by side: a head of keys and values × some of its query rows × a part of the positions
//!     for each 32 positions: scores, mask, maximum, exponentials, weighted sum of values
//!   for each query and head: the parts joined, the sink added, divided by the sum of exponentials
//! ```
//!
//! Query heads that share a head of keys and values are rows of one pass (`Job::head`), as are
//! successive queries. Scores of hidden positions are `HIDDEN`, a finite number, so that no
//! infinity is subtracted from another one: a row with only hidden positions becomes zeros, as in
//! ggml. The result of a row that is not finite, or that sees a key or a value that is not, is NaN
//! (`exception`).

mod dot;
mod exception;
mod kv;
mod merge;
mod scores;
mod table;
mod tile;
mod weigh;

pub use table::{ExpTable, TABLE_LINES, TABLE_TILES};
pub use weigh::{STRIPS, exponentials};

use crate::error::{Error, Result};
use crate::hvx::{self, Vector, add_f32, max_f32, mul_f32, splat_f32, splat_w};
use crate::layout::Line;
use crate::ops::matmul::Machine;
use crate::ops::rows::Slopes;
use crate::ops::tensor::{Shape, Type, View, ViewMut};

/// f32 elements of a line, and positions of a block.
const LANES: usize = 32;
/// Score of a hidden position.
const HIDDEN: f32 = -1e30;
/// Largest maximum of a row that has hidden positions only.
const NOTHING: f32 = -1e29;

/// Parameters of an attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Factor of the scores.
    pub scale: f32,
    /// Largest ALiBi bias; 0 if the mask's factor is 1 for all heads.
    pub max_bias: f32,
    /// Cap c of the scores, which become `c · tanh(x / c)`; 0 for no cap.
    pub softcap: f32,
}

/// Operands of an attention.
#[derive(Clone, Copy, Debug)]
pub struct Sources<'a> {
    /// Queries `[Dk, queries, heads, streams]`.
    pub q: View<'a>,
    /// Keys `[Dk, positions, heads / r, streams]`.
    pub k: View<'a>,
    /// Values `[Dv, positions, heads / r, streams]`.
    pub v: View<'a>,
    /// Addends of the scores, `[positions, queries, n, m]`.
    pub mask: Option<View<'a>>,
    /// One additional score for each head.
    pub sinks: Option<View<'a>>,
}

/// An attention with checked operands.
#[derive(Clone, Copy, Debug)]
struct Job<'a> {
    src: Sources<'a>,
    /// Factor of the scores before they are capped.
    factor: f32,
    softcap: f32,
    slopes: Slopes,
    /// Query heads that share a head of keys and values.
    group: usize,
    /// Heads of keys and values.
    kv_heads: usize,
    positions: usize,
    /// Lines of a query or key; `dv`: lines of a value.
    dk: usize,
    dv: usize,
}

impl<'a> Job<'a> {
    /// Checks the operands, and derives the sizes.
    fn new(params: &Attention, src: &Sources<'a>, dst: &Shape) -> Result<Self> {
        let (q, k, v) = (&src.q.shape, &src.k.shape, &src.v.shape);
        let [d, queries, heads, streams] = q.ne;
        let readable = |shape: &Shape| shape.dtype.is_computed();
        let shared = heads.is_multiple_of(k.ne[2]) && streams.is_multiple_of(k.ne[3]);
        let fits = q.dtype == Type::F32
            && dst.dtype == Type::F32
            && readable(k)
            && readable(v)
            && k.ne[0] == d
            && k.ne[1..] == v.ne[1..]
            && shared
            && dst.ne == [v.ne[0], heads, queries, streams];
        let mask_fits = src.mask.is_none_or(|mask| {
            let [n, rows, m2, m3] = mask.shape.ne;
            let repeats = heads.is_multiple_of(m2) && streams.is_multiple_of(m3);
            mask.shape.dtype.is_float() && n >= k.ne[1] && rows >= queries && repeats
        });
        let sinks_fit = src
            .sinks
            .is_none_or(|sinks| sinks.shape.dtype == Type::F32 && sinks.shape.ne[0] == heads);
        let finite = [params.scale, params.max_bias, params.softcap]
            .iter()
            .all(|x| x.is_finite());
        if !(fits && mask_fits && sinks_fit && finite) {
            return Err(Error::Operand);
        }
        let capped = params.softcap != 0.0;
        Ok(Self {
            src: *src,
            factor: params.scale / if capped { params.softcap } else { 1.0 },
            softcap: params.softcap,
            slopes: Slopes::new(heads, params.max_bias),
            group: heads / k.ne[2],
            kv_heads: k.ne[2],
            positions: k.ne[1],
            dk: d.div_ceil(LANES),
            dv: v.ne[0].div_ceil(LANES),
        })
    }

    /// Returns the attention with operands of the same types, dimensions and strides.
    fn on<'b>(&self, src: &Sources<'b>) -> Job<'b> {
        Job {
            src: *src,
            factor: self.factor,
            softcap: self.softcap,
            slopes: self.slopes,
            group: self.group,
            kv_heads: self.kv_heads,
            positions: self.positions,
            dk: self.dk,
            dv: self.dv,
        }
    }

    /// Returns `true` if keys and values are f16, so that FP16 holds whatever is finite.
    fn is_f16(&self) -> bool {
        [&self.src.k, &self.src.v]
            .iter()
            .all(|view| view.shape.dtype == Type::F16)
    }

    /// Returns the query and query head of row `row` of a head of keys and values; queries count
    /// from `first`.
    fn head(&self, first: usize, kv_head: usize, row: usize) -> [usize; 2] {
        [
            first + row / self.group,
            kv_head * self.group + row % self.group,
        ]
    }

    /// Returns [`Self::head`] of successive rows. Divisions are avoided because they are function
    /// calls on the DSP.
    fn heads(
        &self,
        first: usize,
        kv_head: usize,
        rows: core::ops::Range<usize>,
    ) -> impl Iterator<Item = [usize; 2]> {
        let [mut query, mut head] = self.head(first, kv_head, rows.start);
        let past = (kv_head + 1) * self.group;
        rows.map(move |_| {
            let place = [query, head];
            head += 1;
            if head == past {
                (query, head) = (query + 1, past - self.group);
            }
            place
        })
    }

    /// Returns the lines of a row's result: values, a line of maxima and a line of sums.
    fn result_lines(&self) -> usize {
        self.dv + 2
    }
}

/// Returns zeros in the first `count` lanes and [`HIDDEN`] in the others.
#[inline(always)]
fn tail(count: usize) -> Vector {
    const ENDS: [f32; 2 * LANES] = {
        let mut ends = [0.0; 2 * LANES];
        let mut i = LANES;
        while i < 2 * LANES {
            ends[i] = HIDDEN;
            i += 1;
        }
        ends
    };
    let start = LANES - count.min(LANES);
    ENDS[start..]
        .first_chunk()
        .map_or(splat_w(0), hvx::load_f32)
}

/// Returns the addend of the scores of `count` positions: the mask times the slope, or [`HIDDEN`].
#[inline(always)]
fn hide(mask: Vector, slope: f32, count: usize) -> Vector {
    let hidden = splat_f32(HIDDEN);
    let mut term = max_f32(mask, hidden);
    if slope != 1.0 {
        // Scaling by a small slope must not make a hidden position visible, so hidden scores are
        // not scaled.
        let seen = splat_f32(NOTHING);
        let scaled = mul_f32(term, splat_f32(slope));
        term = hvx::select_gt_f32(term, seen, scaled, hidden);
    }
    if count < LANES {
        term = max_f32(add_f32(term, tail(count)), hidden);
    }
    term
}

/// Splits a row's result into values, maxima and sums.
#[inline(always)]
fn parts(lines: &mut [Line]) -> (&mut [Line], &mut Line, &mut Line) {
    match lines {
        [values @ .., largest, sum] => (values, largest, sum),
        // PANIC: a result has two lines in addition to its values.
        _ => unreachable!("a result without maximum and sum"),
    }
}

/// Checks operands and parameters without computing anything.
///
/// # Errors
/// `Operand` as [`attention`].
pub fn check(params: &Attention, src: &Sources<'_>, dst: &Shape) -> Result<()> {
    Job::new(params, src, dst).map(drop)
}

/// An attention whose operands were checked, and how it is computed.
#[derive(Debug)]
pub struct AttentionPlan<'a> {
    job: Job<'a>,
    /// On the matrix unit, at first.
    tiles: Option<tile::TilePlan>,
}

impl<'a> AttentionPlan<'a> {
    /// Checks operands and parameters, and plans the attention. Bytes of operands are not read.
    ///
    /// # Errors
    /// `Operand` as [`attention`].
    pub fn new(
        params: &Attention,
        src: &Sources<'a>,
        dst: &Shape,
        machine: &Machine<'_>,
        has_table: bool,
    ) -> Result<Self> {
        let job = Job::new(params, src, dst)?;
        let queries = src.q.shape.ne[1];
        let (vtcm_tiles, threads) = (machine.vtcm.len(), machine.engine.threads());
        let plan = || tile::TilePlan::new(&job, queries, vtcm_tiles, threads);
        let tiles = if has_table { plan() } else { None };
        Ok(Self { job, tiles })
    }

    /// Returns `true` if [`Self::run_on_tiles`] reads keys and values by the DMA engine only.
    #[must_use]
    pub fn copies_cache(&self) -> bool {
        self.tiles
            .as_ref()
            .is_some_and(tile::TilePlan::copies_cache)
    }

    /// Returns `true` if the DMA engine copies the mask, so that nothing else reads it.
    #[must_use]
    pub fn copies_mask(&self) -> bool {
        self.tiles.as_ref().is_some_and(tile::TilePlan::copies_mask)
    }

    /// Computes the attention on the matrix unit. Returns `false` if that is not possible, and
    /// `dst` is to be computed by [`Self::run_by_dots`].
    ///
    /// - `src`: operands of the shapes that were planned
    ///
    /// # Errors
    /// `Fault` if the matrix unit reports one.
    pub fn run_on_tiles(
        &self,
        machine: Machine<'_>,
        dst: &mut ViewMut<'_>,
        src: &Sources<'_>,
        table: Option<&[Line; TABLE_LINES]>,
    ) -> Result<bool> {
        match (&self.tiles, table) {
            (Some(plan), Some(table)) => tile::run(&self.job.on(src), plan, machine, table, dst),
            _ => Ok(false),
        }
    }

    /// Computes the attention by dot products. Loads read all operands.
    ///
    /// # Errors
    /// `VtcmFull` as [`attention`].
    pub fn run_by_dots(
        &self,
        mut machine: Machine<'_>,
        dst: &mut ViewMut<'_>,
        src: &Sources<'_>,
    ) -> Result<()> {
        let job = self.job.on(src);
        let [_, queries, _, streams] = src.q.shape.ne;
        let plan = dot::Plan::new(&job, queries, &machine)?;
        for stream in 0..streams {
            for first in (0..queries).step_by(plan.queries) {
                let count = plan.queries.min(queries - first);
                let place = [stream, first, count];
                dot::batch(&job, &plan, machine.reborrow(), place, dst)?;
            }
        }
        Ok(())
    }
}

/// Computes `dst = softmax(scale · q · kᵀ + slope · mask) · v` for each head and stream.
///
/// - `dst`: f32 `[Dv, heads, queries, streams]`
/// - `table`: exponentials in VTCM, not in the machine's part; without them, the matrix unit is not
///   used
/// - VTCM: enough for a batch of queries; the batch is as large as fits
///
/// # Errors
/// `Operand` unless the operands are as in [`Sources`] and parameters are finite; `VtcmFull` if not
/// even one query fits.
pub fn attention(
    mut machine: Machine<'_>,
    params: &Attention,
    mut dst: ViewMut<'_>,
    src: &Sources<'_>,
    table: Option<&[Line; TABLE_LINES]>,
) -> Result<()> {
    let plan = AttentionPlan::new(params, src, &dst.shape, &machine, table.is_some())?;
    if plan.run_on_tiles(machine.reborrow(), &mut dst, src, table)? {
        return Ok(());
    }
    plan.run_by_dots(machine, &mut dst, src)
}
