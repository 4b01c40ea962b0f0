//! Drives the dot products of many rows, where no matrix unit computes them. Each panel is in VTCM
//! while all rows of a chunk meet it; activations have 16 bits, so that results are as exact as the
//! unit's. Kernels take weights with one scale for each block in fixed point, four rows at a time
//! ([`fixed`]), and others one row at a time ([`super::gemv`]).
//!
//! ```text
//! for each chunk of rows whose activations fit in VTCM
//!   quantize each row to two digits of 8 bits             tasks of rows
//!   for each step t in 0 ..= n_groups
//!     fix scales of group t - 1                           in fixed point only: tasks of strips
//!     copy       group t       DDR -> panels              at the same time as the tasks
//!     multiply   group t - 1   panels x rows -> results   tasks of neighbouring (strip, row)
//!     write      group t - 1   results -> f32 rows, with the epilogue
//!     swap the two buffers of panels
//! ```

use core::ops::Range;

use super::MAX_TASKS;
use super::driver::{Machine, MatMul, RowStarts};
use super::fixed;
use super::gemv::{act_form, gemv_two_digits};
use super::panel::PanelPlanes;
use super::quantize::{ActRow, act_lines, quantize_row_twice};
use crate::error::{Error, Result};
use crate::layout::{F16_TILE_BYTES, F16_TILE_LINES, LINE_BYTES, Line, MatrixLayout, TILE_DIM};
use crate::rt::{Arena, Copy, Engine};

/// Digits of a row of activations.
const DIGITS: usize = 2;
/// Most strips of a group. More strips would only leave less room for rows.
const MAX_GROUP: usize = 8;

/// The kernels of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernels {
    /// One row at a time, of two quantizations.
    Digits,
    /// Four rows at a time in fixed point, for weights to which this power of two was added.
    Fixed { zero_bits: u32 },
}

impl Kernels {
    /// Returns those of a type of weights.
    const fn of(layout: MatrixLayout) -> Self {
        match fixed::zero_bits(layout.panel().weight()) {
            Some(zero_bits) => Self::Fixed { zero_bits },
            None => Self::Digits,
        }
    }

    /// Returns the rows whose activations are stored together.
    const fn rows(self) -> usize {
        match self {
            Self::Digits => 1,
            Self::Fixed { .. } => fixed::ROWS,
        }
    }

    /// Returns the lines of their activations.
    const fn lines(self, k: usize) -> usize {
        match self {
            Self::Digits => DIGITS * act_lines(k),
            Self::Fixed { .. } => fixed::rows_lines(k),
        }
    }
}

/// Sizes into which a product is cut so that it fits in VTCM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RowsPlan {
    /// Rows whose activations are in VTCM at once.
    rows: usize,
    /// Strips of a group.
    group: usize,
}

impl RowsPlan {
    /// Returns the tiles of VTCM that the plan needs; each kind of lines is rounded up to tiles.
    fn vtcm_tiles(self, layout: MatrixLayout) -> usize {
        let panel = layout.panel();
        let kernels = Kernels::of(layout);
        let fours = self.rows.div_ceil(kernels.rows());
        let acts = fours * kernels.lines(panel.k());
        let results = fours * kernels.rows() * self.group;
        acts.div_ceil(F16_TILE_LINES)
            + results.div_ceil(F16_TILE_LINES)
            + self.group.div_ceil(F16_TILE_LINES)
            + 2 * (self.group * panel.panel_bytes()).div_ceil(F16_TILE_BYTES)
    }

    /// Plans a product of `m` rows: the largest group that leaves room for a row, then as many rows
    /// as fit, in chunks of equal size.
    fn new(layout: MatrixLayout, m: usize, vtcm_tiles: usize) -> Result<Self> {
        let fits = |rows, group| Self { rows, group }.vtcm_tiles(layout) <= vtcm_tiles;
        if !fits(1, 1) {
            return Err(Error::VtcmFull {
                what: "a row and one panel, twice",
                need_bytes: Self { rows: 1, group: 1 }.vtcm_tiles(layout) * F16_TILE_BYTES,
                have_bytes: vtcm_tiles * F16_TILE_BYTES,
            });
        }
        // Rows are given memory first, because each chunk of rows copies all weights again; but a
        // group needs at least one strip.
        let most = |group| {
            let (mut low, mut high) = (1, m);
            while low < high {
                let middle = usize::midpoint(low, high + 1);
                if fits(middle, group) {
                    low = middle;
                } else {
                    high = middle - 1;
                }
            }
            low
        };
        let chunks = m.div_ceil(most(1));
        // Rows that are stored together take as much as all of them.
        let rows = m.div_ceil(chunks);
        let rows = rows.next_multiple_of(Kernels::of(layout).rows());
        let mut group = 1;
        while group < MAX_GROUP.min(layout.n_strips()) && fits(rows, group + 1) {
            group += 1;
        }
        Ok(Self { rows, group })
    }
}

/// Some rows to quantize, those that are stored together.
struct QuantizeTask<'a> {
    first: usize,
    out: &'a mut [Line],
    result: Result<()>,
}

/// Some neighbouring products of a group: (strip, row), rows first.
struct ProductTask<'a> {
    first: usize,
    out: &'a mut [Line],
    result: Result<()>,
}

/// Computes any number of rows; the arguments have been checked.
pub(super) fn run(mut job: MatMul<'_>, mut machine: Machine<'_>) -> Result<()> {
    let plan = RowsPlan::new(job.layout, job.m, machine.vtcm.len())?;
    let mut first = 0;
    while first < job.m {
        let n_rows = plan.rows.min(job.m - first);
        chunk(&mut job, machine.reborrow(), plan, first, n_rows)?;
        first += n_rows;
    }
    Ok(())
}

/// Computes `n_rows` rows that begin with row `first`.
fn chunk(
    job: &mut MatMul<'_>,
    machine: Machine<'_>,
    plan: RowsPlan,
    first: usize,
    n_rows: usize,
) -> Result<()> {
    let engine = machine.engine;
    let planes = PanelPlanes::new(job.layout.panel());
    let kernels = Kernels::of(job.layout);
    let mut arena = Arena::new(machine.vtcm);
    let unit_lines = kernels.lines(job.layout.panel().k());
    let n_units = n_rows.div_ceil(kernels.rows());
    let rows = first..first + n_rows;
    let acts = arena.lines("quantized activations", n_units * unit_lines)?;
    quantize(job, engine, kernels, &rows, acts)?;
    let results = arena.lines("results", plan.group * n_units * kernels.rows())?;
    let columns = arena.lines("factors of columns", plan.group)?;
    let step_lines = plan.group * planes.lines;
    let mut ready = arena.lines("panels", step_lines)?;
    let mut next = arena.lines("panels", step_lines)?;
    let weights = job.weights;
    let mut steps = weights.chunks(step_lines);
    let (mut copied, mut n0) = (0, 0);
    loop {
        let coming = steps.next().unwrap_or_default();
        if coming.is_empty() && copied == 0 {
            return Ok(());
        }
        let n_strips = copied / planes.lines;
        let columns = &mut columns[..n_strips];
        if let Kernels::Fixed { zero_bits } = kernels {
            let bits = fixed::Bits::new(job.layout.panel().k(), zero_bits);
            fix_scales(engine, &planes, &mut ready[..copied], bits, columns);
        }
        let copy = Copy {
            from: coming,
            to: &mut next[..coming.len()],
        };
        let group = Group {
            planes: &planes,
            panels: &ready[..copied],
            columns,
            acts,
            kernels,
            n_rows,
        };
        let results = &mut results[..n_strips * n_units * kernels.rows()];
        multiply(engine, &group, copy, results)?;
        write(job, engine, n0, rows.clone(), results);
        n0 += n_strips * TILE_DIM;
        copied = coming.len();
        core::mem::swap(&mut ready, &mut next);
    }
}

/// Quantizes rows.
fn quantize(
    job: &MatMul<'_>,
    engine: &Engine,
    kernels: Kernels,
    rows: &Range<usize>,
    acts: &mut [Line],
) -> Result<()> {
    let k = job.layout.panel().k();
    let form = act_form(job.layout.panel().weight());
    let unit_lines = kernels.lines(k);
    let per_task = (acts.len() / unit_lines).div_ceil(MAX_TASKS);
    let mut parts = acts.chunks_mut(per_task * unit_lines).enumerate();
    let mut tasks: [Option<QuantizeTask<'_>>; MAX_TASKS] = core::array::from_fn(|_| {
        parts.next().map(|(part, out)| QuantizeTask {
            first: rows.start + part * per_task * kernels.rows(),
            out,
            result: Ok(()),
        })
    });
    let row = |m: usize| &job.act[job.act_rows.start(m)..][..k];
    let n_tasks = tasks.iter().flatten().count();
    engine.step(None, &mut tasks[..n_tasks], |task| {
        let Some(QuantizeTask { first, out, result }) = task else {
            return;
        };
        for (i, lines) in out.chunks_mut(unit_lines).enumerate() {
            let first = *first + i * kernels.rows();
            let done = match kernels {
                Kernels::Digits => {
                    let (high, low) = lines.split_at_mut(unit_lines / DIGITS);
                    quantize_row_twice(row(first), form, [high, low])
                }
                Kernels::Fixed { zero_bits } => {
                    let row = |i: usize| (first + i < rows.end).then(|| row(first + i));
                    fixed::quantize_rows(row, k, zero_bits, lines)
                }
            };
            *result = core::mem::replace(result, Ok(())).and(done);
        }
    });
    (tasks.into_iter().flatten()).try_for_each(|task| task.result)
}

/// Brings the scales of a group's panels into fixed point, and writes the factors of their columns.
fn fix_scales(
    engine: &Engine,
    planes: &PanelPlanes,
    panels: &mut [Line],
    bits: fixed::Bits,
    columns: &mut [Line],
) {
    let strips = panels.chunks_mut(planes.lines).zip(columns);
    let mut strips = strips.map(|(panel, column)| (planes.scales_mut(panel), column));
    let mut tasks: [Option<(&mut [Line], &mut Line)>; MAX_GROUP] =
        core::array::from_fn(|_| strips.next());
    let n_tasks = tasks.iter().flatten().count();
    engine.step(None, &mut tasks[..n_tasks], |task| {
        if let Some((scales, column)) = task {
            fixed::fix_scales(scales, bits, column);
        }
    });
}

/// Operands of the products of a group.
struct Group<'a> {
    planes: &'a PanelPlanes,
    panels: &'a [Line],
    /// The factors of columns, for kernels in fixed point.
    columns: &'a [Line],
    acts: &'a [Line],
    kernels: Kernels,
    n_rows: usize,
}

impl Group<'_> {
    /// Computes neighbouring results, whose first is the one with this number; those of rows that
    /// are stored together are together.
    fn multiply(&self, first: usize, out: &mut [Line]) -> Result<()> {
        let step = self.kernels.rows();
        let n_units = self.n_rows.div_ceil(step);
        let unit_lines = self.acts.len() / n_units;
        let (mut strip, mut unit) = (first / step / n_units, first / step % n_units);
        let mut rest = out;
        while !rest.is_empty() {
            let (here, later) = rest.split_at_mut(((n_units - unit) * step).min(rest.len()));
            let panel = &self.panels[strip * self.planes.lines..][..self.planes.lines];
            let panel = self.planes.panel(panel)?;
            let units = self.acts[unit * unit_lines..].chunks(unit_lines);
            for (i, (out, lines)) in here.chunks_mut(step).zip(units).enumerate() {
                if matches!(self.kernels, Kernels::Fixed { .. }) {
                    let rows = step.min(self.n_rows - (unit + i) * step);
                    fixed::multiply(&panel, &self.columns[strip], lines, &mut out[..rows]);
                } else if let [out] = out {
                    let (high, low) = lines.split_at(unit_lines / DIGITS);
                    let digits = [ActRow::new(high)?, ActRow::new(low)?];
                    gemv_two_digits(&panel, digits, bytemuck::cast_mut(out))?;
                }
            }
            (strip, unit, rest) = (strip + 1, 0, later);
        }
        Ok(())
    }
}

/// Copies the panels of the next step, and multiplies those of this one by all rows of the chunk.
fn multiply(
    engine: &Engine,
    group: &Group<'_>,
    copy: Copy<'_>,
    results: &mut [Line],
) -> Result<()> {
    // Twice as many as threads, because a thread may begin late.
    let most = (2 * engine.threads()).min(MAX_TASKS);
    let step = group.kernels.rows();
    let per_task = (results.len() / step).div_ceil(most).max(1) * step;
    let mut parts = results.chunks_mut(per_task).enumerate();
    let mut tasks: [Option<ProductTask<'_>>; MAX_TASKS] = core::array::from_fn(|_| {
        parts.next().map(|(part, out)| ProductTask {
            first: part * per_task,
            out,
            result: Ok(()),
        })
    });
    let n_tasks = tasks.iter().flatten().count();
    engine.step(Some(copy), &mut tasks[..n_tasks], |task| {
        if let Some(ProductTask { first, out, result }) = task {
            *result = group.multiply(*first, out);
        }
    });
    (tasks.into_iter().flatten()).try_for_each(|task| task.result)
}

/// Writes the results of a group, whose columns begin with `n0`: rows of a stride in parts, listed
/// ones one after the other.
fn write(job: &mut MatMul<'_>, engine: &Engine, n0: usize, rows: Range<usize>, results: &[Line]) {
    let n = job.layout.n();
    let (first, n_rows) = (rows.start, rows.len());
    let stored_rows = n_rows.next_multiple_of(Kernels::of(job.layout).rows());
    let n_strips = results.len() / stored_rows;
    if n_strips == 0 {
        return;
    }
    let columns = n0..n.min(n0 + n_strips * TILE_DIM);
    let (epilogue, rows) = (job.epilogue, job.dst_rows);
    // `out` begins at the first column of row `row` of the chunk.
    let put = |row: usize, out: &mut [f32]| {
        let finish = epilogue.map_or(super::epilogue::Finish::WRITE, |epilogue| {
            epilogue.of_row(first + row, columns.start, columns.end)
        });
        let mut finish = finish;
        for (strip, out) in out[..columns.len()].chunks_mut(TILE_DIM).enumerate() {
            let [here, rest] = finish.split_at(TILE_DIM);
            finish = rest;
            here.put(bytemuck::cast_ref(&results[strip * stored_rows + row]), out);
        }
    };
    let RowStarts::Strided(stride) = rows else {
        for row in 0..n_rows {
            put(row, &mut job.dst[rows.start(first + row) + columns.start..]);
        }
        return;
    };
    let start = first * stride + columns.start;
    let end = start + (n_rows - 1) * stride + columns.len();
    let per_task = n_rows.div_ceil(engine.threads().min(MAX_TASKS));
    let mut rest = &mut job.dst[start..end];
    let mut tasks: [Option<(usize, &mut [f32])>; MAX_TASKS] = [const { None }; MAX_TASKS];
    let mut n_tasks = 0;
    for (task, row) in tasks.iter_mut().zip((0..n_rows).step_by(per_task)) {
        let whole = core::mem::take(&mut rest);
        let (now, later) = whole.split_at_mut((per_task * stride).min(whole.len()));
        rest = later;
        *task = Some((row, now));
        n_tasks += 1;
    }
    engine.step(None, &mut tasks[..n_tasks], |task| {
        let Some((first_row, rows)) = task else {
            return;
        };
        let count = per_task.min(n_rows - *first_row);
        for row in 0..count {
            put(*first_row + row, &mut rows[row * stride..]);
        }
    });
}

const _: () = assert!(size_of::<[f32; TILE_DIM]>() == LINE_BYTES);
