//! Packs activations for the device: quantized row by row, then interleaved into native A.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use half::f16;
use rknpu_ops::int4;
use rknpu_ops::layout::NativeA;
use rknpu_ops::pack::{self, Rows};
use rknpu_ops::rotation::Rotation;
use task_pool::{Pool, chunks};

use super::scratch::StageScratch;
use crate::error::Result;
use crate::rockchip::caps::{DIGITS, Precision};
use crate::rockchip::driver::Context;
use crate::rockchip::layout::WeightLayout;

/// Fewest rows for which threads divide the host stages: for fewer, waking them costs more than the
/// work.
const PARALLEL_ROWS: usize = 16;

/// Tasks of a host stage for each thread; a thread that starts late leaves part of its share to the
/// others.
const TASKS_PER_THREAD: usize = 4;

/// Activations of one call, quantized and packed.
#[derive(Debug, Default)]
pub(super) struct Activations {
    int8: Vec<i8>,
    fp16: Vec<f16>,
    nibbles: Vec<u8>,
    /// One row of F32 for each task.
    work: Vec<f32>,
    /// Factors of the rows: the INT8 scale, or the power of two that an FP16 row was divided by;
    /// for INT4 weights the factors for `int4::unpack_scaled`.
    pub(super) scales: Vec<f32>,
    pub(super) native: StageScratch,
    /// Description of `native` and `scales`, if they may be used again.
    held: Option<Held>,
    /// The rotation of operands, by its presence and K.
    rotations: HashMap<(bool, usize), Rotation>,
}

/// Activations that several weights read: Q, K and V, or gate and up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SharedActivations {
    /// Number of the graph: the same memory may hold something else in the next one.
    pub(super) graph: u64,
    /// Addresses of the rows.
    pub(super) addresses: Range<usize>,
}

/// Form in which activations were packed.
#[derive(Debug, PartialEq, Eq)]
struct Held {
    shared: SharedActivations,
    domain: i32,
    precision: Precision,
    rows: usize,
    k: usize,
    segment_k: usize,
    bucket: usize,
}

/// Parameters of steps 1 and 2.
#[derive(Clone, Copy)]
struct Packing<'a> {
    anchor: &'a Arc<Context>,
    threads: &'a Pool,
    layout: &'a WeightLayout,
    /// M of the contexts.
    bucket: usize,
}

/// Sizes of the row-major scratch between steps 1 and 2.
#[derive(Clone, Copy)]
struct RowSizes {
    /// Rows of activations.
    count: usize,
    /// Elements of each row, with all its digits.
    len: usize,
    /// Scales of each.
    scales: usize,
}

impl Activations {
    /// Drops the memory that the NPU reads.
    pub(super) fn drop_caches(&mut self) {
        self.native.clear();
        self.held = None;
    }

    /// Returns the factors of each row.
    pub(super) fn scales_per_row(layout: &WeightLayout) -> usize {
        match layout.precision {
            Precision::Int4 => int4::factors_i4(layout.segments),
            Precision::Int8Wide | Precision::Int4Int8 | Precision::Int4Fp16 => {
                int4::factors(layout.segments)
            }
            Precision::Int8 | Precision::Int8Unrotated | Precision::Fp16 => 1,
        }
    }

    /// Forgets activations that were packed from addresses that are about to be written.
    pub(super) fn written(&mut self, addresses: &Range<usize>) {
        let overlaps = |held: &Held| {
            let read = &held.shared.addresses;
            read.start < addresses.end && addresses.start < read.end
        };
        if self.held.as_ref().is_some_and(overlaps) {
            self.held = None;
        }
    }

    /// Steps 1 and 2 of the module's picture, unless the last call has done the same.
    pub(super) fn pack(
        &mut self,
        anchor: &Arc<Context>,
        threads: &Pool,
        layout: &WeightLayout,
        act: Rows<f32>,
        bucket: usize,
        shared: Option<SharedActivations>,
    ) -> Result<()> {
        let wanted = shared.map(|shared| Held {
            shared,
            domain: anchor.domain(),
            precision: layout.precision,
            rows: act.count(),
            k: layout.k,
            segment_k: layout.segment_k,
            bucket,
        });
        if wanted.is_some() && wanted == self.held {
            return Ok(());
        }
        // Cleared first, so that a failure half-way does not leave rows that look complete.
        self.held = None;
        self.native.begin();
        self.pack_anew(anchor, threads, layout, act, bucket)?;
        self.held = wanted;
        Ok(())
    }

    fn pack_anew(
        &mut self,
        anchor: &Arc<Context>,
        threads: &Pool,
        layout: &WeightLayout,
        act: Rows<f32>,
        bucket: usize,
    ) -> Result<()> {
        let packing = Packing {
            anchor,
            threads,
            layout,
            bucket,
        };
        let k = layout.k;
        let sizes = RowSizes {
            count: act.count(),
            len: k,
            scales: Self::scales_per_row(layout),
        };
        let Self {
            int8,
            fp16,
            nibbles,
            work,
            scales,
            native,
            rotations,
            held: _,
        } = self;
        let row = |m: usize| act.rows(m..m + 1);
        let is_unrotated = matches!(layout.precision, Precision::Fp16 | Precision::Int8Unrotated);
        let rotation = rotations.entry((is_unrotated, k));
        let rotation = rotation.or_insert_with(|| layout.rotation());
        let segment_k = layout.segment_k;
        match layout.precision {
            Precision::Fp16 | Precision::Int4Fp16 => {
                let alone = layout.precision == Precision::Fp16;
                let fill = |m: usize, work: &mut [f32], out: &mut [f16], scales: &mut [f32]| {
                    if alone {
                        pack::convert_rows_f16(row(m), rotation, work, out, scales);
                    } else {
                        int4::convert_rows_f16(row(m), rotation, segment_k, work, out, scales);
                    }
                };
                packing.rows(sizes, fp16, scales, work, fill);
                packing.interleave(native, Rows::new(fp16, sizes.count, k, k), 1)
            }
            Precision::Int8 | Precision::Int8Unrotated | Precision::Int4Int8 => {
                let alone = layout.precision != Precision::Int4Int8;
                let fill = |m: usize, work: &mut [f32], out: &mut [i8], scales: &mut [f32]| {
                    if alone {
                        pack::quantize_rows_i8(row(m), rotation, work, out, scales);
                    } else {
                        int4::quantize_rows_i8(row(m), rotation, segment_k, work, out, scales);
                    }
                };
                packing.rows(sizes, int8, scales, work, fill);
                packing.interleave(native, Rows::new(int8, sizes.count, k, k), 1)
            }
            Precision::Int8Wide => {
                let fill = |m: usize, work: &mut [f32], out: &mut [i8], scales: &mut [f32]| {
                    let (scale, halves) = scales.split_at_mut(1);
                    pack::quantize_rows_wide(row(m), rotation, work, out, scale);
                    // INT8 weights have no half-level offset.
                    halves.fill(0.0);
                };
                let rows = layout.precision.rows();
                let len = rows * k;
                packing.rows(RowSizes { len, ..sizes }, int8, scales, work, fill);
                packing.interleave(native, Rows::new(int8, sizes.count * rows, k, k), 1)
            }
            Precision::Int4 => {
                let fill = |m: usize, work: &mut [f32], out: &mut [u8], scales: &mut [f32]| {
                    int4::quantize_rows_i4(row(m), rotation, segment_k, DIGITS, work, out, scales);
                };
                let len = DIGITS.rows() * k / 2;
                packing.rows(RowSizes { len, ..sizes }, nibbles, scales, work, fill);
                let digits = Rows::new(nibbles, sizes.count * DIGITS.rows(), k / 2, k / 2);
                packing.interleave(native, digits, 2)
            }
        }
    }
}

/// Returns how many of `parts` one task processes: all of them if there are few rows.
fn per_task(parts: usize, rows: usize, threads: usize) -> usize {
    if rows < PARALLEL_ROWS {
        parts
    } else {
        parts.div_ceil(TASKS_PER_THREAD * threads)
    }
}

impl Packing<'_> {
    /// Step 1: fills `out` row by row with `fill(m, scratch, row, scales)`, on several threads if
    /// there are many rows.
    fn rows<T: Copy + Default + Send>(
        &self,
        sizes: RowSizes,
        out: &mut Vec<T>,
        scales: &mut Vec<f32>,
        work: &mut Vec<f32>,
        fill: impl Fn(usize, &mut [f32], &mut [T], &mut [f32]) + Sync,
    ) {
        let k = self.layout.k;
        out.resize(sizes.count * sizes.len, T::default());
        scales.resize(sizes.count * sizes.scales, 0.0);
        let per_task = per_task(sizes.count, sizes.count, self.threads.threads());
        work.resize(sizes.count.div_ceil(per_task) * k, 0.0);
        let parts = (
            chunks(out, per_task * sizes.len),
            (chunks(scales, per_task * sizes.scales), chunks(work, k)),
        );
        self.threads.for_each(parts, |task, (out, (scales, work))| {
            let rows = out.chunks_exact_mut(sizes.len);
            for (m, (row, scales)) in rows.zip(scales.chunks_exact_mut(sizes.scales)).enumerate() {
                fill(task * per_task + m, work, row, scales);
            }
        });
    }

    /// Step 2: row-major rows into the native A of each segment of K. `packed` elements of K share
    /// a `T`.
    fn interleave<T: Copy + Default + Send + Sync + bytemuck::Pod>(
        &self,
        native: &mut StageScratch,
        rows: Rows<T>,
        packed: usize,
    ) -> Result<()> {
        let layout = self.layout;
        let m = self.bucket * layout.precision.rows();
        let a = NativeA {
            s: layout.native.a.s / packed,
            ..layout.native.a
        };
        for segment in 0..layout.segments {
            let bytes = layout.native.a.bytes(m, layout.segment_k);
            let memory = native.reserve(self.anchor, segment, bytes)?;
            let out: &mut [T] = bytemuck::cast_slice_mut(&mut memory.bytes_mut()[..bytes]);
            let columns = layout.segment_columns(segment);
            let columns = rows.columns(columns.start / packed..columns.end / packed);
            let slices = layout.segment_k / layout.native.a.s;
            let step = per_task(slices, m, self.threads.threads()) * a.s;
            let end = columns.row_len();
            (self.threads).for_each(chunks(out, step * m), |task, out| {
                let range = (task * step).min(end)..((task + 1) * step).min(end);
                pack::interleave_a(columns.columns(range), a, m, out);
            });
            memory.sync_to_device()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_rows_are_one_task_and_many_are_some_for_each_thread() {
        assert_eq!(per_task(100, PARALLEL_ROWS - 1, 3), 100);
        assert_eq!(
            per_task(100, PARALLEL_ROWS, 3),
            100usize.div_ceil(TASKS_PER_THREAD * 3)
        );
        assert_eq!(per_task(1, 512, 3), 1);
    }

    #[test]
    fn what_was_packed_is_forgotten_when_its_source_is_written() {
        let held = || {
            Some(Held {
                shared: SharedActivations {
                    graph: 1,
                    addresses: 1000..2000,
                },
                domain: 0,
                precision: Precision::Int8,
                rows: 1,
                k: 250,
                segment_k: 256,
                bucket: 1,
            })
        };
        for (written, kept) in [
            (0..1000, true),
            (2000..3000, true),
            (0..1001, false),
            (1999..2100, false),
            (1200..1300, false),
            (0..9000, false),
        ] {
            let mut activations = Activations {
                held: held(),
                ..Activations::default()
            };
            activations.written(&written);
            assert_eq!(activations.held.is_some(), kept, "{written:?}");
        }
    }
}
