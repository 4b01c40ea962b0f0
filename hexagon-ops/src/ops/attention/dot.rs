//! Attention by dot products: keys and values of any type, read as f32, a few query rows at a time.
//!
//! ```text
//! for each 32 positions                       a pass of at most 8 query rows
//!   masks; nothing more if they hide all
//!   keys to f32
//!   for each row: 32 products folded into one vector of scores ([`fold`](crate::ops::fold))
//!   for each row: cap, mask, maximum, exp
//!   values to f32
//!   for each row, for each 32 elements: values weighted and added
//! a second time if a query, key or value was not finite, with zeros for those
//! ```
//!
//! Each line is a separate kernel: they share little, and compilers do badly on one long function.

use core::ops::Range;

use super::exception::{clear_lines, is_finite, sees, spoil};
use super::{HIDDEN, Job, LANES, NOTHING, hide, merge, parts, tail};
use crate::error::{Error, Result};
use crate::hvx::{
    self, Accumulator, Vector, add_f32, larger_f32, max_f32, max_w, mul_f32, splat_f32, splat_w,
    sub_f32,
};
use crate::layout::{LINE_BYTES, Line};
use crate::ops::fold::Products;
use crate::ops::math;
use crate::ops::matmul::Machine;
use crate::ops::rows::{all_lanes, first_lane};
use crate::ops::tensor::ViewMut;
use crate::rt::Arena;

/// Most query rows of a pass. They share the cost of reading a key.
const MAX_ROWS: usize = 8;
/// Fewest positions that are worth a pass.
const MIN_POSITIONS: usize = 128;
/// Most tasks of a step, and most parts of the positions.
pub(super) const MAX_TASKS: usize = 8;

/// Sizes into which an attention is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// Queries of a batch.
    pub(super) queries: usize,
    /// Query rows of a pass.
    rows: usize,
    /// Number of parts of the positions.
    splits: usize,
    /// Number of tasks of a step.
    tasks: usize,
}

impl Plan {
    /// Plans all queries at once, or as many as have room for their results in VTCM, with enough
    /// passes for all threads.
    pub(super) fn new(job: &Job<'_>, queries: usize, machine: &Machine<'_>) -> Result<Self> {
        let threads = machine.engine.threads();
        let rows = MAX_ROWS.min(job.group * queries);
        let passes = job.kv_heads * (job.group * queries).div_ceil(rows);
        let most = job.positions.div_ceil(MIN_POSITIONS);
        // Masks make passes differ in length; twice as many passes as threads balances that.
        let tasks = if threads == 1 {
            1
        } else {
            MAX_TASKS.min(2 * threads)
        };
        let mut plan = Self {
            queries,
            rows,
            splits: match tasks {
                1 => 1,
                tasks => tasks.div_ceil(passes).min(most),
            },
            tasks,
        };
        let have_bytes = size_of_val(machine.vtcm);
        loop {
            let need_bytes = plan.lines(job).saturating_mul(LINE_BYTES);
            if need_bytes <= have_bytes {
                break;
            }
            if plan.queries == 1 {
                return Err(Error::VtcmFull {
                    what: "attention of one query",
                    need_bytes,
                    have_bytes,
                });
            }
            plan.queries = plan.queries.div_ceil(2);
        }
        Ok(plan)
    }

    /// Returns the number of passes over a part of the positions for one head of keys and values
    /// and `queries` queries.
    fn blocks(&self, job: &Job<'_>, queries: usize) -> usize {
        (job.group * queries).div_ceil(self.rows)
    }

    /// Returns the lines of the results of a pass.
    fn pass_lines(&self, job: &Job<'_>) -> usize {
        self.rows * job.result_lines()
    }

    /// Returns the lines of a task's scratch memory.
    fn scratch_lines(&self, job: &Job<'_>) -> usize {
        self.rows * (job.dk + 2) + LANES * job.dk.max(job.dv)
    }

    /// Returns the lines that a batch needs, with room for the rounding of [`Arena`], or the
    /// largest number: they may be more than a word of the DSP can count.
    fn lines(&self, job: &Job<'_>) -> usize {
        let passes = (self.splits * job.kv_heads).saturating_mul(self.blocks(job, self.queries));
        let results = passes.saturating_mul(self.pass_lines(job));
        let scratch = self.tasks.saturating_mul(self.scratch_lines(job));
        let rounding = 2 * crate::layout::F16_TILE_LINES;
        (results.saturating_add(scratch)).saturating_add(rounding)
    }
}

/// One task: successive passes, with its scratch memory.
struct Task<'t> {
    passes: Range<usize>,
    results: &'t mut [Line],
    scratch: &'t mut [Line],
}

/// Computes the results of `count` queries that start at `first`, and writes them.
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
    // Parts consist of whole blocks, so no block is divided between two parts.
    let part = match plan.splits {
        1 => job.positions,
        splits => job.positions.div_ceil(splits),
    };
    let part = part.next_multiple_of(LANES);

    let per_task = match plan.tasks {
        1 => n_passes,
        tasks => n_passes.div_ceil(tasks),
    };
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
    let n_tasks = tasks.iter().flatten().count();
    machine.engine.step(None, &mut tasks[..n_tasks], |task| {
        let Some(task) = task else { return };
        let results = task.results.chunks_mut(pass_lines);
        for (pass, results) in task.passes.clone().zip(results) {
            let (split, rest) = match plan.splits {
                1 => (0, pass),
                splits => (pass % splits, pass / splits),
            };
            let (block, kv_head) = (rest % blocks, rest / blocks);
            let rows = block * plan.rows..(job.group * count).min((block + 1) * plan.rows);
            let mut pass = Pass {
                job,
                stream,
                first,
                kv_head,
                rows,
                positions: split * part..job.positions.min((split + 1) * part),
                results,
                scratch: &mut *task.scratch,
            };
            if !pass.run(false) {
                pass.run(true);
            }
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

impl Pass<'_> {
    /// Computes the results. Returns `false` if they are wrong because a query, key or value is not
    /// finite.
    ///
    /// - `clear`: replaces those by zeros, so that the results are right
    fn run(&mut self, clear: bool) -> bool {
        let job = self.job;
        let n_rows = self.rows.len();
        let (q, rest) = self.scratch.split_at_mut(n_rows * job.dk);
        let (masks, rest) = rest.split_at_mut(n_rows);
        let (scores, elems) = rest.split_at_mut(n_rows);
        let results = &mut self.results[..n_rows * job.result_lines()];
        let mut places = [[0; 2]; MAX_ROWS];
        let mut slopes = [0.0; MAX_ROWS];
        for ((row, place), slope) in self.rows.clone().zip(&mut places).zip(&mut slopes) {
            *place = job.head(self.first, self.kv_head, row);
            *slope = job.slopes.of(place[1]);
        }
        let places = &places[..n_rows];
        let (mut spoiled, mut largest) = hvx::widest(Begin {
            job,
            stream: self.stream,
            places,
            clear,
            q,
            results,
        });
        let planes = [self.kv_head, self.stream];
        for start in self.positions.clone().step_by(LANES) {
            let positions = start..self.positions.end.min(start + LANES);
            let is_visible = hvx::widest(Masks {
                job,
                stream: self.stream,
                places,
                slopes: &slopes,
                positions: positions.clone(),
                masks,
            });
            if !is_visible {
                continue;
            }
            // Bit i is set if position i has a value that needs the exact path.
            let mut exceptions = 0;
            let keys = &mut elems[..LANES * job.dk];
            let n0 = job.src.k.shape.ne[0];
            let elems_k = (job.src.k).read_rows(positions.clone(), planes, 0..n0, keys);
            if clear {
                exceptions |= clear_lines(keys, job.dk);
            }
            hvx::clear(scores);
            hvx::widest(Products {
                rows: q,
                columns: keys,
                sums: scores,
            });
            hvx::widest(Weights {
                job,
                masks,
                scores,
                results,
            });
            let values = &mut elems[..positions.len() * job.dv];
            let n0 = job.src.v.shape.ne[0];
            let elems_v = (job.src.v).read_rows(positions, planes, 0..n0, values);
            if clear {
                exceptions |= clear_lines(values, job.dv);
            }
            largest = max_w(largest, max_w(elems_k, elems_v));
            hvx::widest(Values {
                dv: job.dv,
                weights: scores,
                values,
                results,
            });
            if exceptions != 0 {
                for (row, mask) in masks.iter().enumerate() {
                    let mask: &[f32; LANES] = bytemuck::cast_ref(mask);
                    spoiled |= u32::from(sees(mask, &[exceptions])) << row;
                }
            }
        }
        let results = results.chunks_mut(job.result_lines()).enumerate();
        for (_, result) in results.filter(|(row, _)| spoiled >> row & 1 == 1) {
            spoil(parts(result).2);
        }
        clear || is_finite(largest)
    }
}

/// Reads the queries, and clears the results. The output has a bit for each row whose query
/// became zeros, and the bits of the largest magnitudes of queries.
struct Begin<'a> {
    job: &'a Job<'a>,
    stream: usize,
    /// Query and head of each row.
    places: &'a [[usize; 2]],
    /// `true` if values that are not finite are replaced by zeros.
    clear: bool,
    q: &'a mut [Line],
    results: &'a mut [Line],
}

impl hvx::Kernel for Begin<'_> {
    type Output = (u32, Vector);

    #[inline(always)]
    fn run(self) -> Self::Output {
        let view = &self.job.src.q;
        let dk = self.job.dk;
        let factor = splat_f32(self.job.factor);
        let mut largest = splat_w(0);
        let mut spoiled = 0;
        let rows = self.places.iter().zip(self.q.chunks_mut(dk));
        for (row, ([query, head], q)) in rows.enumerate() {
            view.read_lines([*query, *head, self.stream], 0..view.shape.ne[0], q);
            if self.clear {
                spoiled |= clear_lines(q, dk) << row;
            }
            for q in q {
                let elems = hvx::load(q);
                largest = larger_f32(largest, elems);
                hvx::store(q, mul_f32(elems, factor));
            }
        }
        for result in self.results.chunks_mut(self.job.result_lines()) {
            let (values, largest, sum) = parts(result);
            hvx::clear(values);
            hvx::store(largest, splat_f32(HIDDEN));
            hvx::store(sum, splat_w(0));
        }
        (spoiled, largest)
    }
}

/// Computes the addend of the scores of each row. The output is `false` if all are hidden.
struct Masks<'a> {
    job: &'a Job<'a>,
    stream: usize,
    places: &'a [[usize; 2]],
    slopes: &'a [f32; MAX_ROWS],
    positions: Range<usize>,
    masks: &'a mut [Line],
}

impl hvx::Kernel for Masks<'_> {
    type Output = bool;

    #[inline(always)]
    fn run(self) -> bool {
        let count = self.positions.len();
        let Some(mask) = &self.job.src.mask else {
            for mask in self.masks {
                hvx::store(mask, tail(count));
            }
            return true;
        };
        let mut largest = splat_f32(HIDDEN);
        for (([query, head], slope), line) in self.places.iter().zip(self.slopes).zip(self.masks) {
            let at = [*query, *head, self.stream];
            mask.read_lines(at, self.positions.clone(), core::slice::from_mut(line));
            let term = hide(hvx::load(line), *slope, count);
            hvx::store(line, term);
            largest = max_f32(largest, term);
        }
        first_lane(all_lanes(largest, max_f32)) > NOTHING
    }
}

/// Turns scores into weights: capped, masked, less the new maximum, exponentiated. Earlier sums are
/// scaled to that maximum.
struct Weights<'a> {
    job: &'a Job<'a>,
    masks: &'a [Line],
    scores: &'a mut [Line],
    results: &'a mut [Line],
}

impl hvx::Kernel for Weights<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let rows = self.results.chunks_exact_mut(self.job.result_lines());
        for ((mask, score), result) in self.masks.iter().zip(self.scores).zip(rows) {
            let mut x = hvx::load(score);
            if self.job.softcap != 0.0 {
                x = mul_f32(math::tanh(x), splat_f32(self.job.softcap));
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
}

/// Adds up to 32 values, each times its weight.
struct Values<'a> {
    dv: usize,
    weights: &'a [Line],
    values: &'a [Line],
    results: &'a mut [Line],
}

impl hvx::Kernel for Values<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let dv = self.dv;
        for (weights, result) in self
            .weights
            .iter()
            .zip(self.results.chunks_exact_mut(dv + 2))
        {
            let weights: &[f32; LANES] = bytemuck::cast_ref(weights);
            for (i, sums) in result[..dv].chunks_mut(2).enumerate() {
                // The iterator is created before the sums: its division is a function call, which
                // would force sums to be stored.
                let values = weights.iter().zip(self.values.chunks_exact(dv));
                match sums {
                    [first, second] => {
                        let mut a = Accumulator::from_f32(hvx::load(first));
                        let mut b = Accumulator::from_f32(hvx::load(second));
                        for (weight, value) in values {
                            let weight = splat_f32(*weight);
                            a = a.mul_add(weight, hvx::load(&value[2 * i]));
                            b = b.mul_add(weight, hvx::load(&value[2 * i + 1]));
                        }
                        hvx::store(first, a.to_f32());
                        hvx::store(second, b.to_f32());
                    }
                    [last] => {
                        let mut a = Accumulator::from_f32(hvx::load(last));
                        for (weight, value) in values {
                            a = a.mul_add(splat_f32(*weight), hvx::load(&value[2 * i]));
                        }
                        hvx::store(last, a.to_f32());
                    }
                    _ => {}
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hmx::Hmx;
    use crate::layout::Tile;
    use crate::ops::attention::{Attention, Sources};
    use crate::ops::tensor::{Shape, Type, View};
    use crate::rt::Engine;

    /// All rows of results together have more than 4 GiB, which a word of the DSP cannot count, so
    /// the plan processes fewer queries at a time.
    #[test]
    fn a_batch_fits_in_vtcm_however_many_rows_there_are() {
        let shape = |ne: [usize; 4]| Shape {
            dtype: Type::F32,
            ne,
            nb: [4, 0, 0, 0],
        };
        let params = Attention {
            scale: 1.0,
            max_bias: 0.0,
            softcap: 0.0,
        };
        let mut vtcm = vec![Tile::ZERO; 64];
        let mut hmx = Hmx::new(&vtcm);
        let have_lines = vtcm.len() * crate::layout::F16_TILE_LINES;
        let machine = Machine {
            engine: &Engine::new(1),
            vtcm: &mut vtcm,
            hmx: &mut hmx,
        };
        // A row needs three lines.
        for queries in [(1 << 25) / 3, (1 << 25) / 3 + 64, 1 << 28] {
            let src = Sources {
                q: View::described(shape([1, queries, 1, 1])),
                k: View::described(shape([1; 4])),
                v: View::described(shape([1; 4])),
                mask: None,
                sinks: None,
            };
            let job = Job::new(&params, &src, &shape([1, 1, queries, 1])).unwrap();
            let plan = Plan::new(&job, queries, &machine).unwrap();
            let passes = plan.queries.div_ceil(MAX_ROWS);
            assert!(passes * MAX_ROWS * 3 <= have_lines, "{queries}: {plan:?}");
        }
    }
}
