//! Attention of one head on the CPU, in FP32: used when the NPU fails to compute it.

use task_pool::chunks;

use super::{Cache, HeadOperands, HeadSizes, ROWS_PER_TASK};
use crate::rockchip::device::RkNpu;
use rknpu_ops::attention::Merger;

impl RkNpu {
    /// Computes the same as [`Self::attend`], without the NPU. It is slow: ggml's CPU backend
    /// computes the nodes that follow.
    ///
    /// - `cells`: the number of cells
    /// - `out`: `sizes.rows` rows of `sizes.dv` elements
    pub fn attend_on_cpu(
        &self,
        sizes: HeadSizes,
        cells: usize,
        operands: &dyn HeadOperands,
        out: &mut [f32],
    ) {
        let HeadSizes {
            dk, dv, scaling, ..
        } = sizes;
        let rows = chunks(out, ROWS_PER_TASK * dv);
        self.threads.for_each(rows, |task, out| {
            out.fill(0.0);
            let first = task * ROWS_PER_TASK;
            let count = out.len() / dv;
            let mut queries = vec![0.0; count * dk];
            for (nth, query) in queries.chunks_exact_mut(dk).enumerate() {
                operands.query(first + nth, query);
            }
            let mut mergers = vec![Merger::default(); count];
            let (mut key, mut value) = (vec![0.0; dk], vec![0.0; dv]);
            for cell in (0..cells).filter(|cell| operands.is_seen(*cell)) {
                operands.floats(Cache::Keys, cell, &mut key);
                operands.floats(Cache::Values, cell, &mut value);
                let each =
                    (queries.chunks_exact(dk).zip(out.chunks_exact_mut(dv))).zip(&mut mergers);
                for (nth, ((query, out), merger)) in each.enumerate() {
                    let (mask, slope) = operands.mask(first + nth, &(cell..cell + 1));
                    let bias = mask.map_or(0.0, |mask| mask[0].to_f32());
                    if bias == f32::NEG_INFINITY {
                        continue;
                    }
                    let score = query.iter().zip(&key).map(|(q, k)| q * k).sum();
                    let x = scaling.of(score) + slope * bias;
                    merger.add((x, 1.0), &value, 1.0, out);
                }
            }
            for (nth, (out, merger)) in out.chunks_exact_mut(dv).zip(mergers).enumerate() {
                merger.finish(operands.sink(first + nth), out);
            }
        });
    }
}
