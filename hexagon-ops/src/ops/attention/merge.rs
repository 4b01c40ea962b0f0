//! Joins the results of parts of the positions into rows of the result.

use super::dot::MAX_TASKS;
use super::exception::is_spoiled;
use super::{Job, LANES, NOTHING};
use crate::hvx::{self, Vector, add_f32, max_f32, mul_f32, splat_f32, splat_w, sub_f32};
use crate::layout::Line;
use crate::ops::math;
use crate::ops::rows::{all_lanes, first_lane};
use crate::ops::tensor::{CHUNK, Chunk, Row};

/// Results of one row: values, maximum and sum of each part.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parts<'a> {
    /// Lines of all parts, starting with the first part's first.
    pub(super) lines: &'a [Line],
    /// Lines from one part to the next.
    pub(super) stride: usize,
    /// Number of parts, at most [`MAX_TASKS`].
    pub(super) count: usize,
}

/// Writes a row of the result.
pub(super) fn write(job: &Job<'_>, parts: &Parts<'_>, head: usize, mut row: Row<'_>) {
    let mut sums = (0..parts.count).map(|part| &parts.lines[part * parts.stride + job.dv + 1]);
    if sums.any(is_spoiled) {
        for start in (0..row.len()).step_by(LANES) {
            let count = LANES.min(row.len() - start);
            row.write(start, &[f32::NAN; LANES][..count]);
        }
        return;
    }
    let sink = job.src.sinks.map(|sinks| {
        let mut chunk: Chunk = [0.0; CHUNK];
        let elems = sinks.read([0; 3], head..head + 1, &mut chunk);
        elems.first().copied().unwrap_or(0.0)
    });
    hvx::widest(Write {
        parts,
        dv: job.dv,
        sink,
        row,
    });
}

/// The arguments of [`write()`].
struct Write<'a> {
    parts: &'a Parts<'a>,
    dv: usize,
    sink: Option<f32>,
    row: Row<'a>,
}

impl hvx::Kernel for Write<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let Parts {
            lines,
            stride,
            count,
        } = *self.parts;
        let line = |part: usize, line: usize| hvx::load(&lines[part * stride + line]);
        let mut largest = line(0, self.dv);
        let mut weights = [splat_f32(1.0); MAX_TASKS];
        let mut sums = line(0, self.dv + 1);
        let mut sink = splat_w(0);
        for part in 1..count {
            largest = max_f32(largest, line(part, self.dv));
        }
        let is_empty = first_lane(largest) <= NOTHING;
        if count > 1 || self.sink.is_some() {
            if let Some(score) = self.sink {
                largest = max_f32(largest, splat_f32(score));
                sink = math::exp(sub_f32(splat_f32(score), largest));
            }
            sums = splat_w(0);
            for (part, weight) in weights.iter_mut().take(count).enumerate() {
                *weight = math::exp(sub_f32(line(part, self.dv), largest));
                sums = add_f32(sums, mul_f32(line(part, self.dv + 1), *weight));
            }
        }
        let total = add_f32(sink, all_lanes(sums, add_f32));
        // The result of a row without any visible position is zero, even if there is a sink.
        let factor = if is_empty {
            splat_w(0)
        } else {
            math::reciprocal(total)
        };
        let n = self.row.len();
        for d in 0..self.dv {
            let mut sum: Vector = splat_w(0);
            for (part, weight) in weights.iter().take(count).enumerate() {
                sum = add_f32(sum, mul_f32(line(part, d), *weight));
            }
            let mut elems = [0.0; LANES];
            hvx::store_f32(&mut elems, mul_f32(sum, factor));
            let start = d * LANES;
            self.row.write(start, &elems[..LANES.min(n - start)]);
        }
    }
}
