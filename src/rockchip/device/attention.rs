//! Attention of one head of keys and values: two products of the NPU, with the softmax on the CPU
//! between them.
//!
//! ```text
//! for each range of at most 2,048 cells:
//!     keys, values --(1) to FP16, pack--> native B, shared by all cores     fill
//!     for as many blocks of rows as there are cores:                        wave
//!         queries --(2) to FP16, interleave--> native A
//!         (3) S = Q · Kᵀ on each core
//!         (4) softmax of each row; interleave--> native A
//!         (5) O = P · V on each core
//!         (6) add O up over the ranges
//! ```
//!
//! Everything that runs need is created and bound before (`set`), as for multiplications. An error
//! until then, or a wrong sum, concerns attention only: the device continues with products, and the
//! CPU computes attention.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;

use half::f16;
use rknpu_ops::attention::{self, Merger, Scaling};
use rknpu_ops::layout::MatmulLayout;
use rknpu_ops::pack::{self, Rows};
use rustc_hash::FxHashMap;
use task_pool::{Pool, chunks};

use self::fill::CacheRows;
use self::set::{Maker, Set, SetShape, SharedOperand};
use self::wave::{BlockScratch, Wave};
use super::RkNpu;
use super::recent::Recent;
use crate::error::Result;
use crate::rockchip::caps::Precision;
use crate::rockchip::driver::Turn;

mod cpu;
mod fill;
mod set;
mod wave;

/// Sets of contexts and memory that are kept: for whole ranges of cells, for the rest of the cells,
/// and both again for a second size of head or number of rows. A set needs at most 7 MiB a core and
/// 4 MiB for all cores.
const SETS: usize = 4;

/// Rows that a thread processes at once.
const ROWS_PER_TASK: usize = 16;

/// Sizes of the attention of one head of keys and values.
#[derive(Clone, Copy, Debug)]
pub struct HeadSizes {
    /// Elements of a key.
    pub dk: usize,
    /// Elements of a value.
    pub dv: usize,
    /// Rows of queries.
    pub rows: usize,
    /// M of the products: each has this many rows, the last one maybe fewer.
    pub bucket: usize,
    /// The function between the products.
    pub scaling: Scaling,
}

/// One of the two caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cache {
    /// A cell has `dk` elements.
    Keys,
    /// A cell has `dv` elements.
    Values,
}

/// Operands of the attention of one head of keys and values.
pub trait HeadOperands: Sync {
    /// Writes a row of queries.
    fn query(&self, row: usize, out: &mut [f32]);

    /// Returns a cell's row of a cache if it is stored in FP16.
    fn halves(&self, cache: Cache, cell: usize) -> Option<&[f16]>;

    /// Writes a cell's row of a cache.
    fn floats(&self, cache: Cache, cell: usize, out: &mut [f32]);

    /// Returns the mask of a row for `cells`, with its slope.
    fn mask(&self, row: usize, cells: &Range<usize>) -> (Option<&[f16]>, f32);

    /// Returns the sink of a row.
    fn sink(&self, row: usize) -> Option<f32>;

    /// Returns `true` if any row sees a cell. Others are not read.
    fn is_seen(&self, cell: usize) -> bool;
}

/// State of attention that changes from call to call.
#[derive(Debug)]
pub(super) struct AttentionState {
    sets: Recent<SetShape, Set>,
    rows: CacheRows,
    blocks: BlockScratch,
    mergers: Vec<Merger>,
    /// Shapes of products whose results agreed with the CPU's, with the most rows for which they
    /// did.
    proven: FxHashMap<[usize; 3], usize>,
}

impl Default for AttentionState {
    fn default() -> Self {
        Self {
            sets: Recent::new(SETS),
            rows: CacheRows::default(),
            blocks: BlockScratch::default(),
            mergers: Vec::new(),
            proven: FxHashMap::default(),
        }
    }
}

impl AttentionState {
    /// Drops everything that calls can create again.
    pub(super) fn drop_caches(&mut self) {
        self.sets.clear();
    }
}

/// Everything that a call uses.
struct Call<'a> {
    maker: Maker<'a>,
    threads: &'a Pool,
    turn: &'a Turn<'a>,
    proves: bool,
    sizes: HeadSizes,
}

impl RkNpu {
    /// Computes the attention of one head of keys and values. Returns the time in the vendor's
    /// calls.
    ///
    /// - `ranges`: the cells, as ranges that are computed separately, with the cells of their
    ///   products
    /// - `out`: `sizes.rows` rows of `sizes.dv` elements; a row that sees a key or value which is
    ///   not finite is NaN
    ///
    /// # Errors
    /// As for [`Self::mul_mat`]. Only a failed run puts the device out of use.
    ///
    /// # Panics
    /// If the chip has no products in FP16, or `out` has another length.
    pub fn attend(
        &self,
        sizes: HeadSizes,
        ranges: &[(Range<usize>, usize)],
        operands: &dyn HeadOperands,
        out: &mut [f32],
    ) -> Result<Duration> {
        assert_eq!(out.len(), sizes.rows * sizes.dv, "rows of the result");
        self.with_call(sizes, |call, state| {
            if let Err(error) = call.prepare(state, ranges) {
                return Ok(Err(error));
            }
            match call.run(state, ranges, operands, out) {
                Err(error) if error.is_wrong_sum() => Ok(Err(error)),
                other => other.map(Ok),
            }
        })?
    }

    /// Drops the caches of attention.
    pub fn rest_attention(&self) {
        // Nothing can be freed while another process has the turn.
        let Some(_turn) = self.rknn.turn_to_free() else {
            return;
        };
        if let Ok(mut state) = self.state.lock() {
            state.attention.drop_caches();
        }
    }

    /// Creates everything that [`Self::attend`] needs for the same ranges, to find out whether
    /// there is room and the library accepts the shapes.
    ///
    /// # Errors
    /// As for [`Self::attend`].
    pub fn prepare_attention(
        &self,
        sizes: HeadSizes,
        ranges: &[(Range<usize>, usize)],
    ) -> Result<()> {
        self.with_call(sizes, |call, state| Ok(call.prepare(state, ranges)))?
    }

    /// Calls `run`. Its error puts the device out of use, unless it is a lack of memory or
    /// descriptors; an error inside of its result does not.
    fn with_call<T>(
        &self,
        sizes: HeadSizes,
        mut run: impl FnMut(&Call, &mut AttentionState) -> Result<Result<T>>,
    ) -> Result<Result<T>> {
        self.guarded(|turn, state| {
            let anchor = match self.domains.anchor() {
                Err(error) if !error.is_shortage() => return Ok(Err(error)),
                other => other?,
            };
            let cores = if self.one_core.load(Ordering::Relaxed) {
                1
            } else {
                state.cores.len()
            };
            let masks: Vec<_> = (state.cores.iter().take(cores))
                .map(|core| core.mask())
                .collect();
            let Some(native) = self.caps.native(Precision::Fp16) else {
                unreachable!("every chip multiplies in FP16");
            };
            let call = Call {
                maker: Maker {
                    rknn: &self.rknn,
                    anchor: &anchor,
                    masks: &masks,
                    native,
                },
                threads: &self.threads,
                turn,
                proves: self.proves.load(Ordering::Relaxed),
                sizes,
            };
            match run(&call, &mut state.attention)? {
                // `guarded` frees memory and runs this closure again.
                Err(error) if error.is_shortage() => Err(error),
                other => Ok(other),
            }
        })
    }
}

impl Call<'_> {
    fn native(&self) -> &MatmulLayout {
        &self.maker.native
    }

    /// Makes the sets of all ranges.
    fn prepare(&self, state: &mut AttentionState, ranges: &[(Range<usize>, usize)]) -> Result<()> {
        for (_, padded) in ranges {
            let shape = self.shape(*padded);
            (state.sets).get_or_make(shape, || self.maker.make(shape))?;
        }
        Ok(())
    }

    /// Computes with the sets of [`Self::prepare`].
    fn run(
        &self,
        state: &mut AttentionState,
        ranges: &[(Range<usize>, usize)],
        operands: &dyn HeadOperands,
        out: &mut [f32],
    ) -> Result<Duration> {
        let HeadSizes {
            rows, bucket, dv, ..
        } = self.sizes;
        let AttentionState {
            sets,
            rows: cache_rows,
            blocks: scratch,
            mergers,
            proven,
        } = state;
        out.fill(0.0);
        mergers.clear();
        mergers.resize(rows, Merger::default());
        let mut ran = Duration::ZERO;
        for (cells, padded) in ranges {
            if !cells.clone().any(|cell| operands.is_seen(cell)) {
                continue;
            }
            let shape = self.shape(*padded);
            let Some(set) = sets.get_mut(shape) else {
                unreachable!("`prepare` makes no more sets than are kept");
            };
            let key_factor = self.fill_keys(&mut set.keys, shape, cells, operands, cache_rows)?;
            spoil_rows(mergers, &cache_rows.odd, operands);
            let value_factor =
                self.fill_values(&mut set.values, shape, cells, operands, cache_rows)?;
            spoil_rows(mergers, &cache_rows.odd, operands);
            let blocks: Vec<_> = (0..rows)
                .step_by(bucket)
                .map(|first| first..(first + bucket).min(rows))
                .collect();
            for blocks in blocks.chunks(set.cores.len()) {
                let mut wave = Wave {
                    call: self,
                    shape,
                    cells,
                    blocks,
                    operands,
                    set,
                    scratch,
                    proven,
                    ran: &mut ran,
                };
                wave.run(1.0 / key_factor, 1.0 / value_factor, mergers, out)?;
            }
        }
        let tasks = (
            chunks(out, ROWS_PER_TASK * dv),
            chunks(mergers, ROWS_PER_TASK),
        );
        self.threads.for_each(tasks, |task, (out, mergers)| {
            for (nth, (row, merger)) in out.chunks_exact_mut(dv).zip(mergers).enumerate() {
                merger.finish(operands.sink(task * ROWS_PER_TASK + nth), row);
            }
        });
        Ok(ran)
    }

    fn shape(&self, cells: usize) -> SetShape {
        let (k_align, n_align) = (self.native().k_align, self.native().n_align);
        SetShape {
            m: self.sizes.bucket,
            dk: self.sizes.dk.next_multiple_of(k_align),
            dv: self.sizes.dv.next_multiple_of(n_align),
            cells,
        }
    }

    /// Step 1 for keys. Returns the factor that they were multiplied by.
    fn fill_keys(
        &self,
        keys: &mut SharedOperand,
        shape: SetShape,
        cells: &Range<usize>,
        operands: &dyn HeadOperands,
        rows: &mut CacheRows,
    ) -> Result<f32> {
        let widths = [self.sizes.dk, shape.dk];
        let factor = rows.read(self.threads, operands, Cache::Keys, cells, widths);
        let rows = Rows::new(&rows.halves, cells.len(), shape.dk, shape.dk);
        let b = self.native().b;
        let out = &mut keys.memory.bytes_mut()[..b.bytes(shape.dk, shape.cells)];
        let out: &mut [f16] = bytemuck::cast_slice_mut(out);
        let strips = chunks(out, b.strip_len(shape.dk));
        self.threads.for_each(strips, |strip, out| {
            let first = (strip * b.gn).min(rows.count());
            let end = (first + b.gn).min(rows.count());
            pack::pack_group(rows.rows(first..end), b, out);
        });
        keys.memory.sync_to_device()?;
        Ok(factor)
    }

    /// Step 1 for values.
    fn fill_values(
        &self,
        values: &mut SharedOperand,
        shape: SetShape,
        cells: &Range<usize>,
        operands: &dyn HeadOperands,
        rows: &mut CacheRows,
    ) -> Result<f32> {
        let dv = self.sizes.dv;
        let factor = rows.read(self.threads, operands, Cache::Values, cells, [dv, dv]);
        let rows = Rows::new(&rows.halves, cells.len(), dv, dv);
        let b = self.native().b;
        let out = &mut values.memory.bytes_mut()[..b.bytes(shape.cells, shape.dv)];
        let out: &mut [f16] = bytemuck::cast_slice_mut(out);
        let strips = chunks(out, b.strip_len(shape.cells));
        self.threads.for_each(strips, |strip, out| {
            let channels = (strip * b.gn).min(dv)..((strip + 1) * b.gn).min(dv);
            attention::pack_values(rows, channels, b, shape.cells, out);
        });
        values.memory.sync_to_device()?;
        Ok(factor)
    }
}

/// Makes rows NaN that see any of some cells.
fn spoil_rows(mergers: &mut [Merger], cells: &[usize], operands: &dyn HeadOperands) {
    for cell in cells {
        for (row, merger) in mergers.iter_mut().enumerate() {
            let (mask, _) = operands.mask(row, &(*cell..cell + 1));
            if mask.is_none_or(|mask| mask[0] != f16::NEG_INFINITY) {
                merger.spoil();
            }
        }
    }
}
