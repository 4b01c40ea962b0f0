//! Attention by dot products: keys and values of any type, read as f32, a few query rows at a time.
//!
//! ```text
//! for each 32 positions                       a pass of at most 8 query rows
//!   for g in 0..8                             keys g, g + 8, g + 16, g + 24 to f32
//!     for each row: 4 products in lanes, folded into one vector
//!   for each row: 8 vectors folded into 32 scores; cap, mask, maximum, exp
//!   for each 4 positions: values to f32
//!     for each row: values weighted and added
//! ```
//!
//! Folding adds the halves of two vectors, so that one vector holds both; five folds of 32 vectors give their 32 sums in
//! lanes without a sum across lanes.

use core::ops::Range;

use super::{HIDDEN, Job, LANES, NOTHING, merge, parts};
use crate::error::{Error, Result};
use crate::hvx::{
    self, Accumulator, Vector, add_f32, fold_f32, max_f32, mul_f32, splat_f32, splat_w, sub_f32,
};
use crate::layout::{LINE_BYTES, Line};
use crate::ops::math;
use crate::ops::matmul::Machine;
use crate::ops::rows::{all_lanes, first_lane};
use crate::ops::tensor::ViewMut;
use crate::rt::Arena;

/// Most query rows of a pass: what a key costs to read is shared by them.
const MAX_ROWS: usize = 8;
/// Keys or values that are read at a time.
const AT_ONCE: usize = 4;
/// Vectors of a row before the last folds.
const FOLDED: usize = LANES / AT_ONCE;
/// Fewest positions for which a part of them is worth a pass.
const MIN_POSITIONS: usize = 128;
/// Most tasks of a step, and parts of the positions.
pub(super) const MAX_TASKS: usize = 8;

/// How an attention is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// Queries of a batch.
    pub(super) queries: usize,
    /// Query rows of a pass.
    rows: usize,
    /// Parts of the positions.
    splits: usize,
    /// Tasks of a step.
    tasks: usize,
}

impl Plan {
    /// All queries at once, or as many as results of fit in VTCM; enough passes for all threads.
    pub(super) fn new(job: &Job<'_>, queries: usize, machine: &Machine<'_>) -> Result<Self> {
        let threads = machine.engine.threads();
        let rows = MAX_ROWS.min(job.group * queries);
        let passes = job.kv_heads * (job.group * queries).div_ceil(rows);
        let most = job.positions.div_ceil(MIN_POSITIONS);
        // Twice as many passes as threads even out what masks leave to each.
        let tasks = if threads == 1 {
            1
        } else {
            MAX_TASKS.min(2 * threads)
        };
        let mut plan = Self {
            queries,
            rows,
            splits: tasks.div_ceil(passes).min(most),
            tasks,
        };
        let have_bytes = size_of_val(machine.vtcm);
        while plan.lines(job) * LINE_BYTES > have_bytes {
            if plan.queries == 1 {
                return Err(Error::VtcmFull {
                    what: "attention of one query",
                    need_bytes: plan.lines(job) * LINE_BYTES,
                    have_bytes,
                });
            }
            plan.queries = plan.queries.div_ceil(2);
        }
        Ok(plan)
    }

    /// Passes of a head of keys and values over a part of the positions, for `queries` queries.
    fn blocks(&self, job: &Job<'_>, queries: usize) -> usize {
        (job.group * queries).div_ceil(self.rows)
    }

    /// Lines of the results of a pass.
    fn pass_lines(&self, job: &Job<'_>) -> usize {
        self.rows * job.result_lines()
    }

    /// Lines that a task works with.
    fn scratch_lines(&self, job: &Job<'_>) -> usize {
        self.rows * (job.dk + FOLDED + 2) + AT_ONCE * job.dk.max(job.dv)
    }

    /// Lines that a batch needs, with room for what [`Arena`] rounds up.
    fn lines(&self, job: &Job<'_>) -> usize {
        let passes = self.splits * job.kv_heads * self.blocks(job, self.queries);
        let lines = passes * self.pass_lines(job) + self.tasks * self.scratch_lines(job);
        lines + 2 * crate::layout::F16_TILE_LINES
    }
}

/// One task: passes that follow one another, with memory of its own.
struct Task<'t> {
    passes: Range<usize>,
    results: &'t mut [Line],
    scratch: &'t mut [Line],
}

/// Computes the results of `count` queries from `first` on, and writes them.
pub(super) fn batch(
    job: &Job<'_>,
    plan: &Plan,
    machine: Machine<'_>,
    [stream, first, count]: [usize; 3],
    dst: &mut ViewMut<'_>,
) -> Result<()> {
    let blocks = plan.blocks(job, count);
    let n_passes = plan.splits * job.kv_heads * blocks;
    let pass_lines = plan.pass_lines(job);
    let mut arena = Arena::new(machine.vtcm);
    let results = arena.lines("results of attention", n_passes * pass_lines)?;
    let scratch_lines = plan.scratch_lines(job);
    let scratch = arena.lines("rows of attention", plan.tasks * scratch_lines)?;
    // Whole blocks, so that no block belongs to two parts.
    let part = job.positions.div_ceil(plan.splits).next_multiple_of(LANES);

    let per_task = n_passes.div_ceil(plan.tasks);
    let mut tasks: [Option<Task<'_>>; MAX_TASKS] = [const { None }; MAX_TASKS];
    for (i, ((task, results), scratch)) in tasks
        .iter_mut()
        .zip(results.chunks_mut(per_task * pass_lines))
        .zip(scratch.chunks_mut(scratch_lines))
        .enumerate()
    {
        let passes = i * per_task..i * per_task + results.len() / pass_lines;
        *task = Some(Task {
            passes,
            results,
            scratch,
        });
    }
    machine.engine.step(None, &mut tasks, |task| {
        let Some(task) = task else { return };
        let results = task.results.chunks_mut(pass_lines);
        for (pass, results) in task.passes.clone().zip(results) {
            let (split, rest) = (pass % plan.splits, pass / plan.splits);
            let (block, kv_head) = (rest % blocks, rest / blocks);
            let rows = block * plan.rows..(job.group * count).min((block + 1) * plan.rows);
            hvx::widest(Pass {
                job,
                stream,
                first,
                kv_head,
                rows,
                positions: split * part..job.positions.min((split + 1) * part),
                results,
                scratch: &mut *task.scratch,
            });
        }
    });
    let results = &*results;
    for kv_head in 0..job.kv_heads {
        for row in 0..job.group * count {
            let [query, head] = job.head(first, kv_head, row);
            let pass = (kv_head * blocks + row / plan.rows) * plan.splits;
            let at = pass * pass_lines + row % plan.rows * job.result_lines();
            let parts = merge::Parts {
                lines: &results[at..],
                stride: pass_lines,
                count: plan.splits,
            };
            if let Some(row) = dst.row([head, query, stream]) {
                merge::write(job, &parts, head, row);
            }
        }
    }
    Ok(())
}

/// Some query rows of a head over some positions.
struct Pass<'a> {
    job: &'a Job<'a>,
    stream: usize,
    first: usize,
    kv_head: usize,
    rows: Range<usize>,
    positions: Range<usize>,
    results: &'a mut [Line],
    scratch: &'a mut [Line],
}

impl hvx::Kernel for Pass<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let job = self.job;
        let n_rows = self.rows.len();
        let (q, rest) = self.scratch.split_at_mut(n_rows * job.dk);
        let (masks, rest) = rest.split_at_mut(n_rows);
        let (scores, rest) = rest.split_at_mut(n_rows);
        let (folded, elems) = rest.split_at_mut(n_rows * FOLDED);
        let results = &mut self.results[..n_rows * job.result_lines()];

        let mut slopes = [0.0; MAX_ROWS];
        for (row, slope) in self.rows.clone().zip(&mut slopes) {
            let [_, head] = job.head(self.first, self.kv_head, row);
            *slope = job.slopes.of(head);
        }
        let factor = splat_f32(job.factor);
        for (row, q) in self.rows.clone().zip(q.chunks_mut(job.dk)) {
            let [query, head] = job.head(self.first, self.kv_head, row);
            let at = [query, head, self.stream];
            job.src.q.read_lines(at, 0..job.src.q.shape.ne[0], q);
            for q in q {
                hvx::store(q, mul_f32(hvx::load(q), factor));
            }
        }
        for result in results.chunks_mut(job.result_lines()) {
            let (values, largest, sum) = parts(result);
            values.fill(Line::ZERO);
            hvx::store(largest, splat_f32(HIDDEN));
            hvx::store(sum, splat_w(0));
        }
        for start in self.positions.clone().step_by(LANES) {
            let block = Block {
                job,
                kv: [self.kv_head, self.stream],
                positions: start..self.positions.end.min(start + LANES),
            };
            let rows = self.rows.clone();
            if !block.masks([self.stream, self.first], rows, &slopes, masks) {
                continue;
            }
            block.products(q, elems, folded);
            for (folded, score) in folded.as_chunks::<FOLDED>().0.iter().zip(&mut *scores) {
                hvx::store(score, last_folds(folded));
            }
            exponentials(job, masks, scores, results);
            block.values(scores, elems, results);
        }
    }
}

/// Up to 32 positions of a head.
struct Block<'a> {
    job: &'a Job<'a>,
    /// Head of keys and values, and stream.
    kv: [usize; 2],
    positions: Range<usize>,
}

impl Block<'_> {
    /// What is added to the scores of each row; false if that hides all of them.
    #[inline(always)]
    fn masks(
        &self,
        [stream, first]: [usize; 2],
        rows: Range<usize>,
        slopes: &[f32; MAX_ROWS],
        masks: &mut [Line],
    ) -> bool {
        // Zeros, then what hides lanes past the last position.
        const ENDS: [f32; 2 * LANES] = {
            let mut ends = [0.0; 2 * LANES];
            let mut i = LANES;
            while i < 2 * LANES {
                ends[i] = HIDDEN;
                i += 1;
            }
            ends
        };
        let tail = ENDS[LANES - self.positions.len()..].first_chunk();
        let tail = tail.map_or(splat_w(0), hvx::load_f32);
        let Some(mask) = &self.job.src.mask else {
            for mask in masks {
                hvx::store(mask, tail);
            }
            return true;
        };
        let hidden = splat_f32(HIDDEN);
        let mut largest = hidden;
        for ((row, slope), line) in rows.zip(slopes).zip(masks) {
            let [query, head] = self.job.head(first, self.kv[0], row);
            let at = [query, head, stream];
            mask.read_lines(at, self.positions.clone(), core::slice::from_mut(line));
            let finite = max_f32(hvx::load(line), hidden);
            let term = add_f32(mul_f32(finite, splat_f32(*slope)), tail);
            // A small slope must not bring a hidden position back.
            let term = hvx::select_gt_f32(finite, splat_f32(NOTHING), term, hidden);
            let term = max_f32(term, hidden);
            hvx::store(line, term);
            largest = max_f32(largest, term);
        }
        first_lane(all_lanes(largest, max_f32)) > NOTHING
    }

    /// Reads every `step`-th of the positions from `from` on; past the last one, that again.
    #[inline(always)]
    fn read(
        &self,
        what: &crate::ops::tensor::View<'_>,
        from: usize,
        step: usize,
        elems: &mut [Line],
    ) {
        let n0 = what.shape.ne[0];
        for (i, elems) in elems
            .chunks_mut(n0.div_ceil(LANES))
            .take(AT_ONCE)
            .enumerate()
        {
            let position = (self.positions.start + from + step * i).min(self.positions.end - 1);
            what.read_lines([position, self.kv[0], self.kv[1]], 0..n0, elems);
        }
    }

    /// Products of each row with all keys, folded twice.
    #[inline(always)]
    fn products(&self, q: &[Line], elems: &mut [Line], folded: &mut [Line]) {
        let dk = self.job.dk;
        for g in 0..FOLDED {
            self.read(&self.job.src.k, g, FOLDED, elems);
            let [k0, k1, k2, k3] = four_rows(elems, dk);
            for (q, folded) in q.chunks_exact(dk).zip(folded.chunks_exact_mut(FOLDED)) {
                let low = fold_f32::<16>(dot(q, k0), dot(q, k2));
                let high = fold_f32::<16>(dot(q, k1), dot(q, k3));
                hvx::store(&mut folded[g], fold_f32::<8>(low, high));
            }
        }
    }

    /// Adds the values, weighted with the exponentials in `weights`.
    #[inline(always)]
    fn values(&self, weights: &[Line], elems: &mut [Line], results: &mut [Line]) {
        let dv = self.job.dv;
        for from in (0..self.positions.len()).step_by(AT_ONCE) {
            self.read(&self.job.src.v, from, 1, elems);
            let [v0, v1, v2, v3] = four_rows(elems, dv);
            let rows = results.chunks_exact_mut(self.job.result_lines());
            for (weights, result) in weights.iter().zip(rows) {
                let weights: &[f32; LANES] = bytemuck::cast_ref(weights);
                let w0 = splat_f32(weights[from]);
                let w1 = splat_f32(weights[from + 1]);
                let w2 = splat_f32(weights[from + 2]);
                let w3 = splat_f32(weights[from + 3]);
                let values = v0.iter().zip(v1).zip(v2.iter().zip(v3));
                for (sum, ((v0, v1), (v2, v3))) in result.iter_mut().zip(values) {
                    let added = Accumulator::from_f32(hvx::load(sum))
                        .mul_add(w0, hvx::load(v0))
                        .mul_add(w1, hvx::load(v1))
                        .mul_add(w2, hvx::load(v2))
                        .mul_add(w3, hvx::load(v3));
                    hvx::store(sum, added.to_f32());
                }
            }
        }
    }
}

/// The first four rows of `n` lines.
#[inline(always)]
fn four_rows(lines: &[Line], n: usize) -> [&[Line]; AT_ONCE] {
    let (a, rest) = lines.split_at(n);
    let (b, rest) = rest.split_at(n);
    let (c, rest) = rest.split_at(n);
    [a, b, c, &rest[..n]]
}

/// Products of a query and a key in 32 lanes, whose sum is the score.
#[inline(always)]
fn dot(q: &[Line], key: &[Line]) -> Vector {
    let mut sum = Accumulator::from_f32(splat_w(0));
    for (q, key) in q.iter().zip(key) {
        sum = sum.mul_add(hvx::load(q), hvx::load(key));
    }
    sum.to_f32()
}

/// The three folds that leave 32 sums.
#[inline(always)]
fn last_folds(v: &[Line; FOLDED]) -> Vector {
    let [a, b, c, d, e, f, g, h] = v;
    let ae = fold_f32::<4>(hvx::load(a), hvx::load(e));
    let bf = fold_f32::<4>(hvx::load(b), hvx::load(f));
    let cg = fold_f32::<4>(hvx::load(c), hvx::load(g));
    let dh = fold_f32::<4>(hvx::load(d), hvx::load(h));
    fold_f32::<1>(fold_f32::<2>(ae, cg), fold_f32::<2>(bf, dh))
}

/// Scores to weights: capped, masked, less the new maximum, exponentiated; what has been added before is scaled to that
/// maximum.
#[inline(always)]
fn exponentials(job: &Job<'_>, masks: &[Line], scores: &mut [Line], results: &mut [Line]) {
    let rows = results.chunks_exact_mut(job.result_lines());
    for ((mask, score), result) in masks.iter().zip(scores).zip(rows) {
        let mut x = hvx::load(score);
        if job.softcap != 0.0 {
            x = mul_f32(math::tanh(x), splat_f32(job.softcap));
        }
        let x = add_f32(x, hvx::load(mask));
        let (values, largest, sum) = parts(result);
        let before = hvx::load(largest);
        let now = all_lanes(max_f32(x, before), max_f32);
        let weights = math::exp(sub_f32(x, now));
        let scale = math::exp(sub_f32(before, now));
        hvx::store(score, weights);
        hvx::store(largest, now);
        hvx::store(sum, add_f32(mul_f32(hvx::load(sum), scale), weights));
        for value in values {
            hvx::store(value, mul_f32(hvx::load(value), scale));
        }
    }
}
