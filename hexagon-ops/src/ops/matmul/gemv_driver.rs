//! Drives the dot products over all strips. The panels of the next group are copied to VTCM while
//! those of this group are multiplied.
//!
//! ```text
//! quantize the rows of activations; one row of 16 bits is two of 8 bits, whose products are added
//! for each group of strips                     raw panels: two buffers that swap
//!   copy group g + 1   |   tasks: products of group g, each its own strips and columns
//! ```

use super::MAX_TASKS;
use super::driver::{Machine, MatMul};
use super::epilogue::Finish;
use super::gemv::{act_form, gemv_strip, gemv_two_digits, gemv_two_rows, gemv_two_strips};
use super::panel::PanelPlanes;
use super::quantize::{ActRow, act_lines, quantize_row, quantize_row_twice};
use crate::error::{Error, Result};
use crate::hvx;
use crate::layout::{F16_TILE_BYTES, Line, TILE_DIM};
use crate::rt::{Arena, Copy, Engine};

/// Most bytes of weights that one step copies, unless [`min_strips`] are larger.
///
/// Large enough to make a step's synchronization negligible, small enough to give small matrices
/// several steps.
const STEP_BYTES: usize = 256 * 1024;

/// Returns the fewest strips of a step before each thread has as many: a pair for each thread, but
/// at least eight, because a step also costs some 190 packets that do not depend on its strips.
fn min_strips(threads: usize) -> usize {
    (2 * threads).max(8)
}

/// Quantizes one row.
struct QuantizeTask<'a> {
    row: &'a [f32],
    out: &'a mut [Line],
    result: Result<()>,
}

/// Multiplies some strips by one or two rows. With one row, `out[1]` is empty.
struct StripTask<'a> {
    panels: &'a [Line],
    /// The rows, or one row and the remainder of its quantization.
    acts: [ActRow<'a>; 2],
    finish: [Finish<'a>; 2],
    out: [&'a mut [f32]; 2],
    has_two_digits: bool,
    result: Result<()>,
}

impl StripTask<'_> {
    fn run(&mut self, planes: &PanelPlanes) {
        let two_rows = !self.out[1].is_empty();
        let [first, second] = &mut self.out;
        self.result = if self.has_two_digits {
            two_digit_strips(planes, self.panels, self.acts, self.finish[0], first)
        } else if two_rows {
            two_row_strips(planes, self.panels, self.acts, self.finish, [first, second])
        } else {
            strips(planes, self.panels, self.acts[0], self.finish[0], first)
        };
    }
}

/// Takes the function for the first columns off the function for all.
#[inline(always)]
fn take_finish<'a>(finish: &mut Finish<'a>, columns: usize) -> Finish<'a> {
    let [here, rest] = finish.split_at(columns);
    *finish = rest;
    here
}

/// Takes the first columns off a row.
#[inline(always)]
fn take_columns<'a>(row: &mut &'a mut [f32], columns: usize) -> &'a mut [f32] {
    let whole = core::mem::take(row);
    let (here, rest) = whole.split_at_mut(columns.min(whole.len()));
    *row = rest;
    here
}

/// Multiplies one row by some strips, two strips at a time.
fn strips(
    planes: &PanelPlanes,
    panels: &[Line],
    act: ActRow<'_>,
    mut finish: Finish<'_>,
    out: &mut [f32],
) -> Result<()> {
    let (mut panels, mut out) = (panels, out);
    if finish.writes_unchanged() {
        let pair_lines = 2 * planes.lines;
        let n_pairs = (panels.len() / pair_lines).min(out.len() / (2 * TILE_DIM));
        let (whole, rest) = panels.split_at(n_pairs * pair_lines);
        let columns = take_columns(&mut out, n_pairs * 2 * TILE_DIM);
        let columns = columns.as_chunks_mut::<TILE_DIM>().0.as_chunks_mut().0;
        for (pair, [left, right]) in whole.chunks_exact(pair_lines).zip(columns) {
            gemv_two_strips(planes.pair(pair)?.each_ref(), act, [left, right])?;
        }
        panels = rest;
    }
    for (pair, out) in panels
        .chunks(2 * planes.lines)
        .zip(out.chunks_mut(2 * TILE_DIM))
    {
        let [mut a, mut b] = hvx::zeros();
        let [a, b]: [&mut [f32; TILE_DIM]; 2] = [&mut a, &mut b].map(bytemuck::cast_mut);
        let (left, right) = out.split_at_mut(TILE_DIM.min(out.len()));
        if pair.len() > planes.lines {
            gemv_two_strips(planes.pair(pair)?.each_ref(), act, [&mut *a, &mut *b])?;
        } else {
            gemv_strip(&planes.panel(pair)?, act, a)?;
        }
        take_finish(&mut finish, TILE_DIM).put(a, left);
        take_finish(&mut finish, TILE_DIM).put(b, right);
    }
    Ok(())
}

/// Multiplies two rows by some strips, one strip at a time.
fn two_row_strips(
    planes: &PanelPlanes,
    panels: &[Line],
    acts: [ActRow<'_>; 2],
    mut finish: [Finish<'_>; 2],
    out: [&mut [f32]; 2],
) -> Result<()> {
    let [first, second] = out.map(|out| out.chunks_mut(TILE_DIM));
    for ((panel, first), second) in panels.chunks(planes.lines).zip(first).zip(second) {
        let [mut a, mut b] = hvx::zeros();
        let [a, b]: [&mut [f32; TILE_DIM]; 2] = [&mut a, &mut b].map(bytemuck::cast_mut);
        gemv_two_rows(&planes.panel(panel)?, acts, [&mut *a, &mut *b])?;
        for (finish, (columns, out)) in finish.iter_mut().zip([(&*a, first), (&*b, second)]) {
            take_finish(finish, TILE_DIM).put(columns, out);
        }
    }
    Ok(())
}

/// Multiplies one row of two digits by some strips, one strip at a time.
fn two_digit_strips(
    planes: &PanelPlanes,
    panels: &[Line],
    digits: [ActRow<'_>; 2],
    mut finish: Finish<'_>,
    out: &mut [f32],
) -> Result<()> {
    for (panel, out) in panels.chunks(planes.lines).zip(out.chunks_mut(TILE_DIM)) {
        let [mut columns] = hvx::zeros();
        let columns: &mut [f32; TILE_DIM] = bytemuck::cast_mut(&mut columns);
        gemv_two_digits(&planes.panel(panel)?, digits, columns)?;
        take_finish(&mut finish, TILE_DIM).put(columns, out);
    }
    Ok(())
}

/// Quantizes the one or two rows, or the one row twice.
fn quantize(job: &MatMul<'_>, engine: &Engine, acts: &mut [Line]) -> Result<()> {
    let (m, k) = (job.m, job.layout.panel().k());
    let (first, second) = acts.split_at_mut(act_lines(k));
    let row = |m: usize| &job.act[job.act_rows.start(m)..][..k];
    let form = act_form(job.layout.panel().weight());
    if job.dots.digits() == 2 {
        return quantize_row_twice(row(0), form, [first, second]);
    }
    let mut tasks = [
        QuantizeTask {
            row: row(0),
            out: first,
            result: Ok(()),
        },
        QuantizeTask {
            row: row(m - 1),
            out: second,
            result: Ok(()),
        },
    ];
    engine.step(None, &mut tasks[..m], |task| {
        task.result = quantize_row(task.row, form, task.out);
    });
    let [
        QuantizeTask { result: first, .. },
        QuantizeTask { result: second, .. },
    ] = tasks;
    first.and(second)
}

/// Computes one or two rows; the arguments have been checked.
///
/// - `is_prepared`: the previous product left these activations at the start of VTCM
pub(super) fn run(job: MatMul<'_>, is_prepared: bool, machine: Machine<'_>) -> Result<()> {
    let (layout, m) = (job.layout, job.m);
    let has_two_digits = job.dots.digits() == 2;
    let n_acts = if has_two_digits { 2 } else { m };
    let (panel, k, n) = (layout.panel(), layout.panel().k(), layout.n());
    let mut arena = Arena::new(machine.vtcm);
    let acts = arena.lines("quantized activations", n_acts * act_lines(k))?;

    if !is_prepared {
        quantize(&job, machine.engine, acts)?;
    }
    let (first, second) = (&acts[..act_lines(k)], &acts[(n_acts - 1) * act_lines(k)..]);
    let acts = [ActRow::new(first)?, ActRow::new(second)?];

    // Each buffer begins with a tile.
    let free = arena.free_tiles() / 2 * F16_TILE_BYTES;
    let threads = machine.engine.threads();
    let per_step = (STEP_BYTES / panel.panel_bytes())
        .max(min_strips(threads))
        .min(free / panel.panel_bytes());
    // Kernels process strips in pairs, and each thread should get as many pairs as the others.
    let pairs = if per_step < 2 * threads {
        2
    } else {
        2 * threads
    };
    let per_step = (per_step - per_step % pairs)
        .max(per_step.min(1))
        .min(layout.n_strips());
    if per_step == 0 {
        return Err(Error::VtcmFull {
            what: "one panel, twice",
            need_bytes: 2 * panel.panel_bytes(),
            have_bytes: 2 * free,
        });
    }
    let planes = PanelPlanes::new(panel);
    let step_lines = per_step * planes.lines;
    let mut ready = arena.lines("panels", step_lines)?;
    let mut next = arena.lines("panels", step_lines)?;

    let mut finish = [job.finish(0), job.finish(m - 1)];
    let MatMul {
        weights,
        dst,
        dst_rows,
        ..
    } = job;
    let mut rest: [&mut [f32]; 2] = if m == 2 {
        let [first, second] = [dst_rows.start(0), dst_rows.start(1)];
        dst.get_disjoint_mut([first..first + n, second..second + n])
            .map_err(|_| Error::Overlap {
                first,
                second,
                row: n,
            })?
    } else {
        [&mut dst[dst_rows.start(0)..][..n], &mut []]
    };
    let mut steps = weights.chunks(step_lines);
    let (mut uncopied, mut copied): (usize, &[Line]) = (layout.n_strips(), &[]);
    let mut n_strips = 0;
    loop {
        let coming = steps.next().unwrap_or_default();
        if coming.is_empty() && copied.is_empty() {
            return Ok(());
        }
        let columns = n_strips * TILE_DIM;
        let task = StripTask {
            panels: &ready[..copied.len()],
            acts,
            finish: finish.each_mut().map(|finish| take_finish(finish, columns)),
            out: rest.each_mut().map(|rest| take_columns(rest, columns)),
            has_two_digits,
            result: Ok(()),
        };
        let copy = Copy {
            from: coming,
            to: &mut next[..coming.len()],
        };
        step(machine.engine, &planes, copy, task, n_strips)?;
        (copied, n_strips) = (coming, per_step.min(uncopied));
        uncopied -= n_strips;
        core::mem::swap(&mut ready, &mut next);
    }
}

/// Copies the panels of the next step, and multiplies the `n_strips` strips of this one on all
/// threads.
fn step(
    engine: &Engine,
    planes: &PanelPlanes,
    copy: Copy<'_>,
    mut task: StripTask<'_>,
    n_strips: usize,
) -> Result<()> {
    if engine.threads() > 1 && n_strips > 2 {
        return step_together(engine, planes, copy, task, n_strips);
    }
    engine.step(Some(copy), core::slice::from_mut(&mut task), |task| {
        if !task.panels.is_empty() {
            task.run(planes);
        }
    });
    task.result
}

/// Does the same as [`step`], with a task for each thread.
#[inline(never)]
fn step_together(
    engine: &Engine,
    planes: &PanelPlanes,
    copy: Copy<'_>,
    mut whole: StripTask<'_>,
    n_strips: usize,
) -> Result<()> {
    // Each task gets an even number of strips, because kernels process them in pairs.
    let threads = engine.threads().min(MAX_TASKS);
    let per_task = n_strips.div_ceil(threads).next_multiple_of(2);
    let mut tasks: [Option<StripTask<'_>>; MAX_TASKS] = [const { None }; MAX_TASKS];
    let mut n_tasks = 0;
    let panels = whole.panels;
    for (task, panels) in tasks.iter_mut().zip(panels.chunks(per_task * planes.lines)) {
        let columns = panels.len() / planes.lines * TILE_DIM;
        *task = Some(StripTask {
            panels,
            acts: whole.acts,
            finish: (whole.finish.each_mut()).map(|finish| take_finish(finish, columns)),
            out: whole.out.each_mut().map(|out| take_columns(out, columns)),
            has_two_digits: whole.has_two_digits,
            result: Ok(()),
        });
        n_tasks += 1;
    }
    engine.step(Some(copy), &mut tasks[..n_tasks], |task| {
        if let Some(task) = task {
            task.run(planes);
        }
    });
    tasks.into_iter().flatten().try_for_each(|task| task.result)
}
