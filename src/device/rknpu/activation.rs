//! Activations on their way to the device: quantized row by row, then interleaved into native A.

use std::sync::Arc;

use half::f16;
use rayon::prelude::*;
use rknpu_ops::pack::{self, Rows};

use super::scratch::Scratch;
use crate::error::Result;
use crate::repack::{Precision, WeightLayout};
use crate::vendor::rknn::Context;

/// Rows from which on the host stages are shared among threads: below, waking them costs more than the work.
const PARALLEL_ROWS: usize = 16;

/// Activations of one call, quantized and packed.
#[derive(Debug, Default)]
pub(super) struct Activations {
    int8: Vec<i8>,
    fp16: Vec<f16>,
    /// One row of F32.
    work: Vec<f32>,
    /// One factor for each row: the INT8 scale, or the power of two that FP16 rows were divided by.
    pub(super) scales: Vec<f32>,
    pub(super) native: Scratch,
}

impl Activations {
    /// Steps 1 and 2 of the module's picture.
    pub(super) fn pack(
        &mut self,
        anchor: &Arc<Context>,
        threads: &rayon::ThreadPool,
        layout: &WeightLayout,
        act: Rows<f32>,
        bucket: usize,
    ) -> Result<()> {
        let Self {
            int8,
            fp16,
            work,
            scales,
            native,
        } = self;
        scales.clear();
        scales.resize(act.count(), 0.0);
        match layout.precision {
            Precision::Int8 => {
                let block = layout.hadamard_block();
                let quantize = |m: usize, work: &mut Vec<f32>, out: &mut [i8], scale: &mut f32| {
                    work.resize(layout.k, 0.0);
                    pack::quantize_rows_i8(
                        act.rows(m..m + 1),
                        block,
                        work,
                        out,
                        std::slice::from_mut(scale),
                    );
                };
                let rows = each_row(threads, layout.k, int8, scales, work, quantize);
                interleave(native, anchor, threads, layout, rows, bucket)
            }
            Precision::Fp16 => {
                let convert = |m: usize, _: &mut Vec<f32>, out: &mut [f16], factor: &mut f32| {
                    pack::convert_rows_f16(act.rows(m..m + 1), out, std::slice::from_mut(factor));
                };
                let rows = each_row(threads, layout.k, fp16, scales, work, convert);
                interleave(native, anchor, threads, layout, rows, bucket)
            }
        }
    }
}

/// Step 1: fills `out` row by row with `fill(m, scratch, row, scale)`, on several threads if there are many rows.
fn each_row<'a, T: Copy + Default + Send>(
    threads: &rayon::ThreadPool,
    k: usize,
    out: &'a mut Vec<T>,
    scales: &mut [f32],
    work: &mut Vec<f32>,
    fill: impl Fn(usize, &mut Vec<f32>, &mut [T], &mut f32) + Sync,
) -> Rows<'a, T> {
    let count = scales.len();
    out.resize(count * k, T::default());
    if count < PARALLEL_ROWS {
        for (m, (row, scale)) in out.chunks_exact_mut(k).zip(scales).enumerate() {
            fill(m, work, row, scale);
        }
    } else {
        let rows = out
            .par_chunks_exact_mut(k)
            .zip(scales.par_iter_mut())
            .enumerate();
        threads.install(|| {
            rows.for_each_init(Vec::new, |work, (m, (row, scale))| {
                fill(m, work, row, scale)
            })
        });
    }
    Rows::new(out, count, k, k)
}

/// Surfaces of native A that one thread fills at a time.
const SURFACES_PER_TASK: usize = 8;

/// Step 2: row-major rows into the native A of each segment of K.
fn interleave<T: Copy + Default + Send + Sync + bytemuck::Pod>(
    native: &mut Scratch,
    anchor: &Arc<Context>,
    threads: &rayon::ThreadPool,
    layout: &WeightLayout,
    rows: Rows<T>,
    bucket: usize,
) -> Result<()> {
    let a = layout.native.a;
    for segment in 0..layout.segments {
        let bytes = a.bytes(bucket, layout.segment_k);
        let memory = native.reserve(anchor, segment, bytes)?;
        let out: &mut [T] = bytemuck::cast_slice_mut(&mut memory.bytes_mut()[..bytes]);
        let start = (segment * layout.segment_k).min(layout.k);
        let columns = rows.columns(start..(start + layout.segment_k).min(layout.k));
        if bucket < PARALLEL_ROWS {
            pack::interleave_a(columns, a, bucket, out);
        } else {
            let step = SURFACES_PER_TASK * a.s;
            let tasks = out.par_chunks_mut(step * bucket).enumerate();
            threads.install(|| {
                tasks.for_each(|(task, out)| {
                    let range = (task * step).min(columns.row_len())
                        ..((task + 1) * step).min(columns.row_len());
                    pack::interleave_a(columns.columns(range), a, bucket, out);
                });
            });
        }
        memory.sync_to_device()?;
    }
    Ok(())
}
