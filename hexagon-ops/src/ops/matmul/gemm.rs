//! GEMM: `dst[M,N] = act[M,K] · w[K,N]` on the matrix unit, for any M and every weight type.
//!
//! The matrix unit (HMX) multiplies FP16 tiles of 32 × 32 that are in VTCM. Neither operand is in
//! that form: activations are f32 rows in DDR, weights are packed panels in DDR, and VTCM is far
//! smaller than a weight matrix. The driver therefore walks along N in *groups* of a few strips (a
//! strip is 32 columns of N), and brings each group through four stages. In one *step*, each stage
//! works on a different group, so that the copy engine, the vector units and the matrix unit are
//! busy at the same time:
//!
//! ```text
//! for each chunk of M that fits in VTCM               GemmPlan: all of M if possible
//!   pack the chunk: f32 rows -> act tiles             tasks of 32 rows
//!   for each step t in 0 .. n_groups + 3
//!     copy        group t       DDR -> raw panels     one DMA transfer during the tasks
//!     dequantize  group t - 1   raw -> weight tiles   tasks of whole or partial panels
//!     multiply    group t - 2   on the matrix unit's thread:
//!       for each strip of the group, for each tile of 32 rows of the chunk
//!         acc = Σ over K of act tile · weight tile    up to 32 tiles of K in one call
//!         store acc as a result tile                  rounded to FP16 here, once
//!     write       group t - 3   result tiles -> f32 rows, with the epilogue
//!     swap the two raw, the two weight-tile and the two result buffers
//! ```
//!
//! 1. There is no synchronization but the end of a step: every kind of buffer exists twice, one
//!    stage fills one of the two while the next stage reads the other, and they swap after the
//!    step. The borrows of a step prove that no task writes memory that another task reads.
//! 2. All weights pass through VTCM once per chunk, and dequantizing them costs the same for 1 row
//!    as for a full chunk. So the plan prefers a chunk that covers all of M over a longer group,
//!    and cuts M into chunks of equal size if it has to.
//! 3. Only one thread at a time may hold the matrix unit. Multiplying is therefore not a task but
//!    the step's part for the unit ([`MatrixPart`]); the tasks occupy the other threads. Without a
//!    unit, the products are a separate step before this one, whose tasks each compute some of the
//!    result tiles.
//! 4. The scale block, the row factors and the activations come first in VTCM. Their addresses
//!    depend only on M and K, so a following product with the same activations (Q, K and V, or gate
//!    and up) finds them there and skips packing: see `is_prepared`.
//! 5. Each row of activations is divided by a power of two when it is packed, and its results are
//!    multiplied by it when they are written, so that magnitudes stay within FP16
//!    ([`super::act`]).
//! 6. F16 weights are FP16 tiles already. They have no raw panels: their copy goes into the weight
//!    tiles, one step later than the copy of other types, and multiply and write keep their places.
//! 7. With fewer panels in a group than threads, a panel is cut along K. Pieces are multiples of 4
//!    tiles, because up to four tiles share a line of scales.

use core::ops::Range;

use super::act::{RowFactors, pack_rows};
use super::dequantize::dequantize;
use super::driver::{Machine, MatMul};
use super::output::{MAX_WRITE, Output};
use super::plan::GemmPlan;
use super::{MAX_TASKS, Panel};
use crate::error::{Error, Result};
use crate::hmx::{Form, Hmx, MAX_DEEP, ScaleBlock, vectors};
use crate::layout::{LINE_BYTES, Line, MatrixLayout, TILE_DIM, Tile, WeightType};
use crate::rt::{Arena, Copy, Engine, MatrixPart};

/// Most tasks that dequantize in one step: the slots that writing does not use.
const MAX_DEQUANTIZE: usize = MAX_TASKS - MAX_WRITE;

/// The product of a chunk and a group.
struct Multiply<'t> {
    hmx: &'t mut Hmx,
    scale: &'t ScaleBlock,
    act: &'t [Tile],
    weights: &'t [Tile],
    out: &'t mut [Tile],
    k_tiles: usize,
}

impl MatrixPart for Multiply<'_> {
    fn is_empty(&self) -> bool {
        self.weights.is_empty()
    }

    fn tile_products(&self) -> usize {
        self.act.len() / self.k_tiles * self.weights.len()
    }

    fn run(&mut self) {
        if self.weights.is_empty() {
            return;
        }
        self.hmx.clear();
        self.hmx.load_scale(self.scale);
        let m_tiles = self.act.len() / self.k_tiles;
        let strips = self.weights.chunks(self.k_tiles);
        for (weights, out) in strips.zip(self.out.chunks_mut(m_tiles)) {
            for (act, out) in self.act.chunks(self.k_tiles).zip(out) {
                for (act, weights) in act.chunks(MAX_DEEP).zip(weights.chunks(MAX_DEEP)) {
                    self.hmx.multiply(act, weights);
                }
                self.hmx.store(out);
            }
        }
    }
}

impl Multiply<'_> {
    /// Computes the part on the vector units of all threads.
    ///
    /// - `n_rows`: rows of the chunk, which may end within a tile
    fn by_vectors(self, engine: &Engine, n_rows: usize) {
        if self.is_empty() {
            return;
        }
        let (scale, act, weights, k_tiles) = (self.scale, self.act, self.weights, self.k_tiles);
        let m_tiles = act.len() / k_tiles;
        let tasks = (engine.threads() * 2).min(MAX_TASKS);
        let per_task = self.out.len().div_ceil(tasks);
        let mut parts = self.out.chunks_mut(per_task).enumerate();
        let mut tasks: [Option<(usize, &mut [Tile])>; MAX_TASKS] =
            core::array::from_fn(|_| parts.next());
        let n_tasks = tasks.iter().flatten().count();
        engine.step(None, &mut tasks[..n_tasks], |task| {
            let Some((part, tiles)) = task else { return };
            for (i, out) in tiles.iter_mut().enumerate() {
                let index = *part * per_task + i;
                let (strip, mt) = (index / m_tiles, index % m_tiles);
                let act = &act[mt * k_tiles..][..k_tiles];
                let weights = &weights[strip * k_tiles..][..k_tiles];
                let n_rows = TILE_DIM.min(n_rows - mt * TILE_DIM);
                vectors::multiply(act, weights, scale, n_rows, out);
            }
        });
    }
}

/// One task of a step.
enum StepTask<'t, 'o> {
    Write {
        tiles: &'t [Tile],
        m_tiles: usize,
        n0: usize,
        out: &'t mut Output<'o>,
    },
    Dequantize {
        panel: Panel<'t>,
        tiles: Range<usize>,
        out: &'t mut [Tile],
        result: Result<()>,
    },
}

impl StepTask<'_, '_> {
    fn run(&mut self) {
        match self {
            Self::Write {
                tiles,
                m_tiles,
                n0,
                out,
            } => out.write(tiles, *m_tiles, *n0),
            Self::Dequantize {
                panel,
                tiles,
                out,
                result,
            } => {
                *result = dequantize(panel, tiles.clone(), out);
            }
        }
    }
}

/// Packs 32 rows of a chunk into tiles.
struct PackTask<'a> {
    m0: usize,
    tiles: &'a mut [Tile],
    factors: &'a mut RowFactors,
}

/// Computes any number of rows; the arguments have been checked. Returns `true` if the activations
/// of all rows remain in VTCM.
///
/// - `is_prepared`: the previous product left these activations in VTCM, after the scale block and
///   the row factors
pub(super) fn run(
    mut job: MatMul<'_>,
    is_prepared: bool,
    mut machine: Machine<'_>,
) -> Result<bool> {
    let plan = GemmPlan::new(job.layout, job.m, machine.vtcm.len())?;
    let is_one_chunk = job.m <= plan.m_tiles * TILE_DIM;
    machine.hmx.take_fault();
    let mut m0 = 0;
    while m0 < job.m {
        let n_rows = (plan.m_tiles * TILE_DIM).min(job.m - m0);
        let is_prepared = is_prepared && is_one_chunk;
        chunk(
            &mut job,
            is_prepared,
            machine.reborrow(),
            plan,
            m0..m0 + n_rows,
        )?;
        m0 += n_rows;
    }
    match machine.hmx.take_fault() {
        Some(fault) => Err(Error::Fault(fault)),
        None => Ok(is_one_chunk),
    }
}

/// Computes the rows `rows`, at most 32 · `plan.m_tiles` of them.
fn chunk(
    job: &mut MatMul<'_>,
    is_prepared: bool,
    machine: Machine<'_>,
    plan: GemmPlan,
    rows: Range<usize>,
) -> Result<()> {
    let Machine { engine, vtcm, hmx } = machine;
    let (layout, k_tiles, m_tiles) = (
        job.layout,
        job.layout.k_tiles(),
        rows.len().div_ceil(TILE_DIM),
    );
    let (panel, weight) = (layout.panel(), layout.panel().weight());
    let mut arena = Arena::new(vtcm);
    let scale: &mut [ScaleBlock] = bytemuck::cast_slice_mut(arena.tiles("scale block", 1)?);
    scale[0] = hmx.form().unchanged();
    let factor_lines = m_tiles * size_of::<RowFactors>() / LINE_BYTES;
    let factors: &mut [RowFactors] =
        bytemuck::cast_slice_mut(arena.lines("row factors", factor_lines)?);
    let act = arena.tiles("activations", m_tiles * k_tiles)?;
    if !is_prepared {
        pack(job, engine, &rows, act, factors);
    }

    let raw_lines = if weight == WeightType::F16 {
        0
    } else {
        plan.group * panel.panel_lines()
    };
    let mut raw = [
        arena.lines("raw panels", raw_lines)?,
        arena.lines("raw panels", raw_lines)?,
    ];
    let strip_tiles = plan.group * k_tiles;
    let mut tiles = [
        arena.tiles("weight tiles", strip_tiles)?,
        arena.tiles("weight tiles", strip_tiles)?,
    ];
    let out_tiles = plan.group * m_tiles;
    let mut out = [
        arena.tiles("result tiles", out_tiles)?,
        arena.tiles("result tiles", out_tiles)?,
    ];
    let weights = job.weights;
    let n_rows = rows.len();
    let mut outputs = Output::parts(job, rows, factors, engine.threads());

    let is_by_vectors = hmx.form() == Form::Vectors;
    let n_groups = layout.n_strips().div_ceil(plan.group);
    // Returns the strips on which a stage that runs `late` steps after the copy works in step `t`;
    // none before the first group and after the last one.
    let strips = |t: usize, late: usize| match t.checked_sub(late) {
        Some(g) if g < n_groups => g * plan.group..layout.n_strips().min((g + 1) * plan.group),
        _ => 0..0,
    };
    let panels = |strips: Range<usize>| {
        &weights[strips.start * panel.panel_lines()..strips.end * panel.panel_lines()]
    };
    for t in 0..n_groups + 3 {
        let [raw_next, raw_ready] = &mut raw;
        let [tiles_next, tiles_ready] = &mut tiles;
        let [out_next, out_ready] = &mut out;
        let mut tasks: [Option<StepTask<'_, '_>>; MAX_TASKS] = [const { None }; MAX_TASKS];
        let mut n_tasks = 0;
        let (multiplied, written) = (strips(t, 2), strips(t, 3));
        let multiply = Multiply {
            hmx: &mut *hmx,
            scale: &scale[0],
            act,
            weights: &tiles_ready[..multiplied.len() * k_tiles],
            out: &mut out_next[..multiplied.len() * m_tiles],
            k_tiles,
        };
        if !written.is_empty() {
            let tiles = &out_ready[..written.len() * m_tiles];
            for (task, out) in tasks.iter_mut().zip(outputs.iter_mut().flatten()) {
                *task = Some(StepTask::Write {
                    tiles,
                    m_tiles,
                    n0: written.start * TILE_DIM,
                    out,
                });
                n_tasks += 1;
            }
        }
        let copy = if weight == WeightType::F16 {
            let from = panels(strips(t, 1));
            Copy {
                from,
                to: &mut bytemuck::cast_slice_mut(tiles_next)[..from.len()],
            }
        } else {
            let dequantized = strips(t, 1).len();
            let ready = &raw_ready[..dequantized * panel.panel_lines()];
            n_tasks += share_out(
                layout,
                ready,
                tiles_next,
                engine.threads(),
                &mut tasks[n_tasks..],
            )?;
            let from = panels(strips(t, 0));
            Copy {
                from,
                to: &mut raw_next[..from.len()],
            }
        };
        let tasks = &mut tasks[..n_tasks];
        let run = |task: &mut Option<StepTask<'_, '_>>| {
            if let Some(task) = task {
                task.run();
            }
        };
        if is_by_vectors {
            multiply.by_vectors(engine, n_rows);
            engine.step(Some(copy), tasks, run);
        } else {
            engine.step_with_matrix(Some(copy), multiply, tasks, run);
        }
        for task in tasks.iter_mut().filter_map(Option::take) {
            if let StepTask::Dequantize { result, .. } = task {
                result?;
            }
        }
        raw.swap(0, 1);
        tiles.swap(0, 1);
        out.swap(0, 1);
    }
    Ok(())
}

/// Packs the rows of a chunk.
fn pack(
    job: &MatMul<'_>,
    engine: &Engine,
    rows: &Range<usize>,
    act: &mut [Tile],
    factors: &mut [RowFactors],
) {
    let k = job.layout.panel().k();
    let tiles = act.chunks_mut(job.layout.k_tiles());
    let mut all = tiles
        .zip(factors)
        .enumerate()
        .map(|(mt, (tiles, factors))| PackTask {
            m0: rows.start + mt * TILE_DIM,
            tiles,
            factors,
        });
    loop {
        let mut tasks: [Option<PackTask<'_>>; MAX_TASKS] = core::array::from_fn(|_| all.next());
        let n_tasks = tasks.iter().flatten().count();
        if n_tasks == 0 {
            return;
        }
        engine.step(None, &mut tasks[..n_tasks], |task| {
            if let Some(PackTask { m0, tiles, factors }) = task {
                let row = |i: usize| {
                    let m = *m0 + i;
                    (m < rows.end).then(|| &job.act[job.act_rows.start(m)..][..k])
                };
                pack_rows(row, tiles, factors);
            }
        });
    }
}

/// Fills the start of `tasks` with the dequantization of whole panels, and returns the number of
/// tasks. Cuts each panel along K if there are more threads than panels.
fn share_out<'t>(
    layout: MatrixLayout,
    panels: &'t [Line],
    tiles: &'t mut [Tile],
    threads: usize,
    tasks: &mut [Option<StepTask<'t, '_>>],
) -> Result<usize> {
    let panel = layout.panel();
    let k_tiles = panel.k_tiles();
    let n_panels = panels.len() / panel.panel_lines();
    if n_panels == 0 {
        return Ok(0);
    }
    let pieces = (threads.min(MAX_DEQUANTIZE) / n_panels).max(1);
    let piece = k_tiles.div_ceil(pieces).next_multiple_of(4);
    let mut slots = tasks.iter_mut();
    let most = slots.len();
    for (lines, tiles) in panels
        .chunks(panel.panel_lines())
        .zip(tiles.chunks_mut(k_tiles))
    {
        let panel = Panel::new(panel, lines)?;
        for (i, out) in tiles.chunks_mut(piece).enumerate() {
            let tiles = i * piece..i * piece + out.len();
            // PANIC: there are as many slots as pieces, at most max(MAX_DEQUANTIZE, MAX_GROUP).
            let Some(slot) = slots.next() else {
                unreachable!("more pieces than tasks")
            };
            *slot = Some(StepTask::Dequantize {
                panel,
                tiles,
                out,
                result: Ok(()),
            });
        }
    }
    Ok(most - slots.len())
}
