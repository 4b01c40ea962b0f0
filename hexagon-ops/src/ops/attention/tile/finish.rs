//! Results of a tile of rows: sums of weights, sinks, division, and rows of f32.

use super::sum::Sums;
use super::vtcm::{GROUP, MAX_VALUE_LINES, TileMemory};
use super::{Head, Tiles};
use crate::hvx::{
    self, Vector, add_f32, fold_f32, interleave_w, max_f32, mul_f32, splat_f32, splat_w, sub_f32,
};
use crate::layout::{LINE_BYTES, Line, TILE_DIM};
use crate::ops::attention::weigh::HIDDEN_BITS;
use crate::ops::math;
use crate::ops::tensor::{Row, ViewMut};

/// f32 elements of a line.
const LANES: usize = LINE_BYTES / 4;

/// Largest score of a row that f16 resolves well enough: 128. Above it a score is off by up to
/// 1/16, and its weight by a sixteenth.
const LARGEST_SCORE: u32 = 0x5800;
const INFINITY: u32 = 0x7c00;
/// A mask for the magnitudes of two f16 in a word, and an addend that sets the sign bit of those
/// above [`LARGEST_SCORE`].
const MAGNITUDES: u32 = 0x7fff_7fff;
const FROM_LARGEST: u32 = (0x7fff - LARGEST_SCORE) * 0x1_0001;

impl Head<'_> {
    /// Returns `true` if a row's largest score is too large, or too far below zero, for f16: those
    /// near it, which decide on the row, are rounded. Keys with a large common part make such
    /// scores.
    pub(super) fn has_large_scores(&self, state: &[Line], tiles: &Tiles) -> bool {
        let states = state.chunks(self.plan.state_lines()).take(self.n_tiles());
        states.enumerate().any(|(tile, state)| {
            let rows = self.tile_rows(tile).len();
            let pairs: &[[u32; LANES]] = bytemuck::cast_slice(&state[..rows.div_ceil(2)]);
            let added = pairs.iter().fold(0, |all, [pair, ..]| {
                all | ((pair & MAGNITUDES) + FROM_LARGEST)
            });
            if added & !MAGNITUDES == 0 || tiles.seen >> tile & 1 == 0 {
                return false;
            }
            // A row that sees nothing has the lowest f16 as its score, and a spoiled row may have
            // any score; both are skipped.
            let spoiled = tiles.queries[tile].spoiled;
            (0..rows).any(|row| {
                let score = pairs[row / 2][0] >> (16 * (row % 2)) & 0xffff;
                let is_seen = score != u32::from(HIDDEN_BITS) && spoiled >> row & 1 == 0;
                is_seen && (LARGEST_SCORE + 1..=INFINITY).contains(&(score & 0x7fff))
            })
        })
    }

    /// Divides the rows by their sums, and writes them.
    pub(super) fn write(&self, memory: &TileMemory<'_>, tiles: &Tiles, dst: &mut ViewMut<'_>) {
        let elems = dst.shape.ne[0];
        let is_written = self.write_by_tasks(memory.state, tiles, dst);
        for tile in 0..self.n_tiles() {
            let places = || {
                self.job
                    .heads(self.first, self.kv_head, self.tile_rows(tile))
            };
            let is_seen = tiles.seen >> tile & 1 == 1;
            if is_seen && !is_written {
                if let Some((out, [s1, s2, s3])) = dst.floats() {
                    let start =
                        |[query, head]: [usize; 2]| head * s1 + query * s2 + self.stream * s3;
                    self.write_tile(memory.state, tile, start, elems, out);
                } else {
                    let (sums, factors) = self.sums(memory.state, tile);
                    for (row, (factor, [query, head])) in
                        factors.into_iter().zip(places()).enumerate()
                    {
                        if let Some(to) = dst.row([head, query, self.stream]) {
                            write_row(sums, row, factor, to);
                        }
                    }
                }
            }
            let spoiled = tiles.queries[tile].spoiled;
            if is_seen && spoiled == 0 {
                continue;
            }
            for (row, [query, head]) in places().enumerate() {
                let value = if spoiled >> row & 1 == 1 {
                    f32::NAN
                } else {
                    0.0
                };
                if !is_seen || value.is_nan() {
                    self.fill([head, query, self.stream], value, dst);
                }
            }
        }
    }

    /// Writes the tiles of rows that saw a position by tasks, each with its own queries. Returns
    /// `false` if it does not: there is one tile or one thread, or results of queries are between
    /// each other.
    fn write_by_tasks(&self, state: &[Line], tiles: &Tiles, dst: &mut ViewMut<'_>) -> bool {
        let (n_tiles, group) = (self.n_tiles(), self.job.group);
        if n_tiles == 1 || self.engine.threads() == 1 {
            return false;
        }
        let elems = dst.shape.ne[0];
        let last_head = group * self.job.kv_heads - 1;
        let Some((out, [s1, s2, s3])) = dst.floats() else {
            return false;
        };
        if last_head * s1 + elems > s2 {
            return false;
        }
        // The smallest number of tiles that end with a whole query.
        let unit = group >> group.trailing_zeros().min(TILE_DIM.trailing_zeros());
        let per_task = n_tiles.div_ceil(GROUP).next_multiple_of(unit);
        let queries = per_task * TILE_DIM / group;
        let Some(out) = out.get_mut(self.stream * s3 + self.first * s2..) else {
            return false;
        };
        // The last part gets the rest of the result, but writes only its rows.
        let mut parts = out.chunks_mut(queries.saturating_mul(s2)).enumerate();
        let n_tasks = n_tiles.div_ceil(per_task);
        let mut tasks: [_; GROUP] = core::array::from_fn(|_| parts.next());
        self.engine.step(None, &mut tasks[..n_tasks], |task| {
            let Some((part, out)) = task else { return };
            let first = self.first + *part * queries;
            let start = |[query, head]: [usize; 2]| head * s1 + (query - first) * s2;
            for tile in (*part * per_task..n_tiles).take(per_task) {
                if tiles.seen >> tile & 1 == 1 {
                    self.write_tile(state, tile, start, elems, out);
                }
            }
        });
        true
    }

    /// Writes the rows of a tile that saw a position to the places that `start` returns.
    fn write_tile(
        &self,
        state: &[Line],
        tile: usize,
        start: impl Fn([usize; 2]) -> usize,
        elems: usize,
        out: &mut [f32],
    ) {
        let (sums, factors) = self.sums(state, tile);
        let places = self
            .job
            .heads(self.first, self.kv_head, self.tile_rows(tile));
        hvx::widest(WriteRows {
            sums,
            factors: &factors,
            starts: places.map(start),
            elems,
            out,
        });
    }

    /// Returns the sums of a tile and their factors.
    fn sums<'m>(&self, state: &'m [Line], tile: usize) -> (Sums<'m>, [f32; TILE_DIM]) {
        let state_lines = self.plan.state_lines();
        let sums = Sums::new(&state[tile * state_lines..][..state_lines]);
        let sinks = self.job.src.sinks.map(|sinks| {
            let rows = self.tile_rows(tile);
            let mut scores = [0.0; TILE_DIM];
            let places = self.job.heads(self.first, self.kv_head, rows);
            for (score, [_, head]) in scores.iter_mut().zip(places) {
                *score = sinks.element(head, [0; 3]);
            }
            scores
        });
        (sums, hvx::widest(Factors { sums, sinks }))
    }

    /// Fills a row.
    fn fill(&self, at: [usize; 3], value: f32, dst: &mut ViewMut<'_>) {
        if let Some(mut row) = dst.row(at) {
            for start in (0..row.len()).step_by(TILE_DIM) {
                let count = TILE_DIM.min(row.len() - start);
                row.write(start, &[value; TILE_DIM][..count]);
            }
        }
    }
}

/// Computes the factors of the sums of 32 rows: 0 for a row that sees no position.
struct Factors<'a> {
    sums: Sums<'a>,
    /// Additional scores of the rows.
    sinks: Option<[f32; TILE_DIM]>,
}

impl hvx::Kernel for Factors<'_> {
    type Output = [f32; TILE_DIM];

    #[inline(always)]
    fn run(self) -> [f32; TILE_DIM] {
        let mut halves = [0_u16; LINE_BYTES / 2];
        for (halves, line) in halves
            .as_chunks_mut::<2>()
            .0
            .iter_mut()
            .zip(self.sums.maxima)
        {
            let all: &[[u16; 2]; LANES] = bytemuck::cast_ref(line);
            *halves = all[0];
        }
        let mut total = self.total();
        let mut factor = splat_f32(1.0);
        if let Some(sinks) = &self.sinks {
            let [mut line] = hvx::zeros::<1>();
            line.0 = bytemuck::cast(halves);
            let (maxima, _) = hvx::widen_in_order_f16(hvx::load(&line));
            let sinks = hvx::load_f32(sinks);
            let largest = max_f32(maxima, sinks);
            factor = math::exp(sub_f32(maxima, largest));
            total = add_f32(mul_f32(total, factor), math::exp(sub_f32(sinks, largest)));
        }
        let mut factors = [0.0; TILE_DIM];
        hvx::store_f32(&mut factors, mul_f32(factor, math::reciprocal(total)));
        for (factor, half) in factors.iter_mut().zip(halves) {
            if half == HIDDEN_BITS {
                *factor = 0.0;
            }
        }
        factors
    }
}

impl Factors<'_> {
    /// Returns the sum of each row's lanes in the row's lane.
    #[inline(always)]
    fn total(&self) -> Vector {
        let mut v = [splat_w(0); TILE_DIM / 2];
        for (i, v) in v.iter_mut().enumerate() {
            let [first, second] =
                [i, i + TILE_DIM / 2].map(|row| hvx::load(&self.sums.weights[row]));
            *v = fold_f32::<16>(first, second);
        }
        for i in 0..8 {
            v[i] = fold_f32::<8>(v[i], v[i + 8]);
        }
        for i in 0..4 {
            v[i] = fold_f32::<4>(v[i], v[i + 4]);
        }
        for i in 0..2 {
            v[i] = fold_f32::<2>(v[i], v[i + 2]);
        }
        fold_f32::<1>(v[0], v[1])
    }
}

/// Writes a row of f32.
struct WriteRow<'a> {
    sums: Sums<'a>,
    row: usize,
    factor: f32,
    out: &'a mut [f32],
}

impl hvx::Kernel for WriteRow<'_> {
    type Output = ();
    const INLINED: bool = true;

    #[inline(always)]
    fn run(self) {
        let factor = splat_f32(self.factor);
        let (slabs, rest) = self.out.as_chunks_mut::<{ 2 * LANES }>();
        let whole = slabs.len();
        for (slab, out) in slabs.iter_mut().enumerate() {
            let (low, high) = self.sums.slab(slab, self.row);
            let [first, second] = out.as_chunks_mut().0 else {
                continue;
            };
            hvx::store_f32(first, mul_f32(low, factor));
            hvx::store_f32(second, mul_f32(high, factor));
        }
        if !rest.is_empty() {
            let (low, high) = self.sums.slab(whole, self.row);
            let mut lines = hvx::zeros::<2>();
            hvx::store(&mut lines[0], mul_f32(low, factor));
            hvx::store(&mut lines[1], mul_f32(high, factor));
            let elems: &[f32; 2 * LANES] = bytemuck::cast_ref(&lines);
            hvx::copy_f32(rest, elems);
        }
    }
}

/// Writes rows of a tile whose places are numbers of elements.
struct WriteRows<'a, I> {
    sums: Sums<'a>,
    factors: &'a [f32; TILE_DIM],
    /// First element of each row.
    starts: I,
    /// Elements of a row.
    elems: usize,
    out: &'a mut [f32],
}

impl<I: Iterator<Item = usize>> hvx::Kernel for WriteRows<'_, I> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (row, (start, factor)) in self.starts.zip(self.factors).enumerate() {
            if let Some(out) = self.out.get_mut(start..start + self.elems) {
                let sums = self.sums;
                let factor = *factor;
                hvx::Kernel::run(WriteRow {
                    sums,
                    row,
                    factor,
                    out,
                });
            }
        }
    }
}

/// Writes a row of any layout.
fn write_row(sums: Sums<'_>, row: usize, factor: f32, mut to: Row<'_>) {
    let mut lines = hvx::zeros::<MAX_VALUE_LINES>();
    let elems: &mut [f32; MAX_VALUE_LINES * LANES] = bytemuck::cast_mut(&mut lines);
    let elems = &mut elems[..to.len()];
    hvx::widest(WriteRow {
        sums,
        row,
        factor,
        out: elems,
    });
    to.write(0, elems);
}

/// Returns the lines in which `even` and `odd` elements follow each other.
#[inline(always)]
pub(super) fn in_order(even: &Line, odd: &Line) -> (Vector, Vector) {
    interleave_w(hvx::load(even), hvx::load(odd))
}
