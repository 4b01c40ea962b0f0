//! Attention of one head of keys and values: two products of the NPU, with the softmax on the CPU between them.
//!
//! ```text
//! for each range of at most 2,048 cells:
//!     keys, values --(1) to FP16, pack--> native B, shared by all cores
//!     for as many blocks of rows as there are cores:
//!         queries --(2) to FP16, interleave--> native A
//!         (3) S = Q · Kᵀ on each core
//!         (4) softmax of each row; interleave--> native A
//!         (5) O = P · V on each core
//!         (6) add O up over the ranges
//! ```
//!
//! Everything that runs need is made and bound before, as for multiplications (`wave`).

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use half::f16;
use rknpu_ops::attention::{self, Merger, NativeRows, RowMask, Scaling};
use rknpu_ops::ffi::{CoreMask, MatmulInfo};
use rknpu_ops::layout::MatmulLayout;
use rknpu_ops::pack::{self, Rows};
use rknpu_ops::proof::Run;
use rknpu_ops::quant;
use task_pool::{Pool, chunks};

use super::recent::Recent;
use super::{MAX_CORES, RkNpu};
use crate::error::{Error, Result};
use crate::rockchip::caps::Precision;
use crate::rockchip::driver::{Context, Memory, MemoryView, Rknn, RunOperands, Turn};

/// Sets of contexts and memory that are kept: those of whole ranges of cells, of what is left of the cells, and of a
/// second size of head or number of rows of both. A set takes at most 7 MiB a core and 4 MiB for all.
const SETS: usize = 4;

/// Rows that a thread takes at once.
const ROWS_PER_TASK: usize = 16;

/// Values beyond FP16's range are multiplied by this; what they are in then is taken back.
const SMALLER: f32 = 1.0 / 65536.0;

/// Sizes of the attention of one head of keys and values.
#[derive(Clone, Copy, Debug)]
pub struct HeadSizes {
    /// Elements of a key.
    pub dk: usize,
    /// Elements of a value.
    pub dv: usize,
    /// Rows of queries.
    pub rows: usize,
    /// M of the products: each takes as many rows, the last one maybe fewer.
    pub bucket: usize,
    /// The function between the products.
    pub scaling: Scaling,
}

/// Operands of the attention of one head of keys and values.
pub trait HeadOperands: Sync {
    /// Writes a row of queries.
    fn query(&self, row: usize, out: &mut [f32]);

    /// Writes a cell's key, times `factor`. `work` is scratch of as many elements.
    fn key(&self, cell: usize, factor: f32, work: &mut [f32], out: &mut [f16]);

    /// Writes a cell's value, likewise.
    fn value(&self, cell: usize, factor: f32, work: &mut [f32], out: &mut [f16]);

    /// Returns the mask of a row for `cells`, with its slope.
    fn mask(&self, row: usize, cells: &Range<usize>) -> (Option<&[f16]>, f32);

    /// Returns the sink of a row.
    fn sink(&self, row: usize) -> Option<f32>;
}

/// Shape of a set: M, the padded elements of keys and of values, and the padded cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct SetShape {
    m: usize,
    dk: usize,
    dv: usize,
    cells: usize,
}

/// The two products of one core.
#[derive(Debug)]
struct CoreSet {
    scores: Context,
    sums: Context,
    q: Memory,
    s: Memory,
    p: Memory,
    o: Memory,
}

/// Contexts and memory for one shape.
#[derive(Debug)]
struct Set {
    keys: (Memory, MemoryView),
    values: (Memory, MemoryView),
    cores: Vec<CoreSet>,
}

/// Rows of FP16 and what they become, kept from call to call.
#[derive(Debug, Default)]
struct Scratch {
    halves: Vec<f16>,
    floats: Vec<f32>,
    factors: Vec<f32>,
    /// For each row of a block, largest score and sum of its probabilities.
    parts: Vec<(f32, f32)>,
}

/// State of attention that changes from call to call.
#[derive(Debug)]
pub(super) struct AttentionState {
    sets: Recent<SetShape, Set>,
    scratch: Scratch,
    mergers: Vec<Merger>,
    /// Shapes of products whose first results agreed with the CPU's.
    proven: HashSet<[usize; 3]>,
}

impl Default for AttentionState {
    fn default() -> Self {
        Self {
            sets: Recent::new(SETS),
            scratch: Scratch::default(),
            mergers: Vec::new(),
            proven: HashSet::new(),
        }
    }
}

impl AttentionState {
    /// Drops what calls can make again.
    pub(super) fn let_go(&mut self) {
        self.sets.clear();
    }
}

/// Everything that a call uses.
struct Call<'a> {
    rknn: &'a Arc<Rknn>,
    anchor: &'a Arc<Context>,
    masks: &'a [Option<CoreMask>],
    native: MatmulLayout,
    threads: &'a Pool,
    turn: &'a Turn<'a>,
    proves: bool,
    sizes: HeadSizes,
}

impl RkNpu {
    /// Computes the attention of one head of keys and values. Returns the time in the vendor's calls.
    ///
    /// - `ranges`: the cells, as ranges of which each is computed on its own, with the cells of its products
    /// - `out`: `sizes.rows` rows of `sizes.dv` elements
    ///
    /// # Errors
    /// As for [`Self::mul_mat`].
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
        self.with_call(sizes, |call, state| call.run(state, ranges, operands, out))
    }

    /// Makes what [`Self::attend`] needs for ranges of as many cells, so that it is known whether there is room and the library
    /// takes the shapes.
    ///
    /// # Errors
    /// As for [`Self::attend`].
    pub fn prepare_attention(
        &self,
        sizes: HeadSizes,
        padded: impl Iterator<Item = usize> + Clone,
    ) -> Result<()> {
        self.with_call(sizes, |call, state| {
            for cells in padded.clone() {
                let shape = call.shape(cells);
                state.sets.get_or_make(shape, || call.make(shape))?;
            }
            Ok(())
        })
    }

    fn with_call<T>(
        &self,
        sizes: HeadSizes,
        mut run: impl FnMut(&Call, &mut AttentionState) -> Result<T>,
    ) -> Result<T> {
        self.guarded(|turn, state| {
            let anchor = self.domains.anchor()?;
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
                rknn: &self.rknn,
                anchor: &anchor,
                masks: &masks,
                native,
                threads: &self.threads,
                turn,
                proves: self.proves.load(Ordering::Relaxed),
                sizes,
            };
            run(&call, &mut state.attention)
        })
    }
}

impl Call<'_> {
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
            scratch,
            mergers,
            proven,
        } = state;
        out.fill(0.0);
        mergers.clear();
        mergers.resize(rows, Merger::default());
        let mut ran = Duration::ZERO;
        for (cells, padded) in ranges {
            let shape = self.shape(*padded);
            let set = sets.get_or_make(shape, || self.make(shape))?;
            let key_factor = self.fill_keys(set, shape, cells, operands, scratch)?;
            let value_factor = self.fill_values(set, shape, cells, operands, scratch)?;
            let blocks: Vec<_> = (0..rows)
                .step_by(bucket)
                .map(|first| first..(first + bucket).min(rows))
                .collect();
            for wave in blocks.chunks(set.cores.len()) {
                let mut runner = Wave {
                    call: self,
                    shape,
                    cells,
                    set,
                    scratch,
                    proven,
                    ran: &mut ran,
                };
                let factors = (1.0 / key_factor, 1.0 / value_factor);
                runner.run(wave, factors, operands, mergers, out)?;
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
        let (k_align, n_align) = (self.native.k_align, self.native.n_align);
        SetShape {
            m: self.sizes.bucket,
            dk: self.sizes.dk.next_multiple_of(k_align),
            dv: self.sizes.dv.next_multiple_of(n_align),
            cells,
        }
    }

    fn make(&self, shape: SetShape) -> Result<Set> {
        let SetShape { m, dk, dv, cells } = shape;
        let MatmulLayout { a, b, c, .. } = self.native;
        let operand = |bytes| {
            let memory = Memory::new(self.anchor, bytes)?;
            let view = memory.view(0, bytes)?;
            Ok::<_, Error>((memory, view))
        };
        let keys = operand(b.bytes(dk, cells))?;
        let values = operand(b.bytes(cells, dv))?;
        let context = |mask, [m, k, n]: [usize; 3]| {
            let [m, k, n] = [m, k, n].map(|size| i32::try_from(size).unwrap_or(i32::MAX));
            let mut info = MatmulInfo::native(Precision::Fp16.matmul_type(), m, k, n);
            info.iommu_domain_id = self.anchor.domain();
            let context = Context::new(self.rknn, info, mask)?;
            context.expect(&self.native)?;
            Ok::<_, Error>(context)
        };
        let cores = self.masks.iter().map(|mask| {
            let mut core = CoreSet {
                scores: context(*mask, [m, dk, cells])?,
                sums: context(*mask, [m, cells, dv])?,
                q: Memory::new(self.anchor, a.bytes(m, dk))?,
                s: Memory::for_results(self.anchor, c.bytes(m, cells))?,
                p: Memory::new(self.anchor, a.bytes(m, cells))?,
                o: Memory::for_results(self.anchor, c.bytes(m, dv))?,
            };
            core.scores.bind(&RunOperands {
                a: &core.q,
                b: &keys.1,
                c: &mut core.s,
            })?;
            core.sums.bind(&RunOperands {
                a: &core.p,
                b: &values.1,
                c: &mut core.o,
            })?;
            Ok::<_, Error>(core)
        });
        let cores = cores.collect::<Result<_>>()?;
        Ok(Set {
            keys,
            values,
            cores,
        })
    }

    /// Step 1 for keys. Returns the factor that they were multiplied by.
    fn fill_keys(
        &self,
        set: &mut Set,
        shape: SetShape,
        cells: &Range<usize>,
        operands: &dyn HeadOperands,
        scratch: &mut Scratch,
    ) -> Result<f32> {
        let get = |cell, factor, work: &mut [f32], out: &mut [f16]| {
            operands.key(cell, factor, work, out);
        };
        let factor = self.halves(scratch, cells, [self.sizes.dk, shape.dk], get);
        let rows = Rows::new(&scratch.halves, cells.len(), shape.dk, shape.dk);
        let b = self.native.b;
        let memory = &mut set.keys.0;
        let out = &mut memory.bytes_mut()[..b.bytes(shape.dk, shape.cells)];
        let out: &mut [f16] = bytemuck::cast_slice_mut(out);
        let strips = chunks(out, b.strip_len(shape.dk));
        self.threads.for_each(strips, |strip, out| {
            let first = (strip * b.gn).min(rows.count());
            let end = (first + b.gn).min(rows.count());
            pack::pack_group(rows.rows(first..end), b, out);
        });
        memory.sync_to_device()?;
        Ok(factor)
    }

    /// Step 1 for values.
    fn fill_values(
        &self,
        set: &mut Set,
        shape: SetShape,
        cells: &Range<usize>,
        operands: &dyn HeadOperands,
        scratch: &mut Scratch,
    ) -> Result<f32> {
        let get = |cell, factor, work: &mut [f32], out: &mut [f16]| {
            operands.value(cell, factor, work, out);
        };
        let dv = self.sizes.dv;
        let factor = self.halves(scratch, cells, [dv, dv], get);
        let rows = Rows::new(&scratch.halves, cells.len(), dv, dv);
        let b = self.native.b;
        let memory = &mut set.values.0;
        let out = &mut memory.bytes_mut()[..b.bytes(shape.cells, shape.dv)];
        let out: &mut [f16] = bytemuck::cast_slice_mut(out);
        let strips = chunks(out, b.strip_len(shape.cells));
        self.threads.for_each(strips, |strip, out| {
            let channels = (strip * b.gn).min(dv)..((strip + 1) * b.gn).min(dv);
            attention::pack_values(rows, channels, b, shape.cells, out);
        });
        memory.sync_to_device()?;
        Ok(factor)
    }

    /// Converts the rows of `cells` to FP16, each padded with zeros. Returns the factor that brings all of them into its
    /// range, by which they are multiplied.
    fn halves(
        &self,
        scratch: &mut Scratch,
        cells: &Range<usize>,
        [width, padded]: [usize; 2],
        get: impl Fn(usize, f32, &mut [f32], &mut [f16]) + Sync,
    ) -> f32 {
        let Scratch { halves, floats, .. } = scratch;
        halves.clear();
        halves.resize(cells.len() * padded, f16::ZERO);
        let tasks = cells.len().div_ceil(ROWS_PER_TASK);
        floats.resize((tasks * padded).max(floats.len()), 0.0);
        let overflows = AtomicBool::new(false);
        let mut convert = |factor| {
            let parts = (
                chunks(&mut halves[..], ROWS_PER_TASK * padded),
                chunks(&mut floats[..tasks * padded], padded),
            );
            self.threads.for_each(parts, |task, (rows, work)| {
                for (nth, row) in rows.chunks_exact_mut(padded).enumerate() {
                    let cell = cells.start + task * ROWS_PER_TASK + nth;
                    let row = &mut row[..width];
                    get(cell, factor, &mut work[..width], row);
                    if row.iter().any(|value| !value.is_finite()) {
                        overflows.store(true, Ordering::Relaxed);
                    }
                }
            });
        };
        convert(1.0);
        if !overflows.load(Ordering::Relaxed) {
            return 1.0;
        }
        convert(SMALLER);
        SMALLER
    }
}

/// Blocks of rows that all cores compute at the same time.
struct Wave<'a, 'c> {
    call: &'a Call<'c>,
    shape: SetShape,
    cells: &'a Range<usize>,
    set: &'a mut Set,
    scratch: &'a mut Scratch,
    proven: &'a mut HashSet<[usize; 3]>,
    ran: &'a mut Duration,
}

/// The two products.
#[derive(Clone, Copy)]
enum Product {
    Scores,
    Sums,
}

impl Wave<'_, '_> {
    /// Steps 2 to 6.
    ///
    /// - `factors`: those that scores and sums are multiplied by
    /// - `mergers`, `out`: of all rows
    fn run(
        &mut self,
        blocks: &[Range<usize>],
        (key_factor, value_factor): (f32, f32),
        operands: &dyn HeadOperands,
        mergers: &mut [Merger],
        out: &mut [f32],
    ) -> Result<()> {
        let (m, dv) = (self.shape.m, self.call.sizes.dv);
        self.scratch.factors.clear();
        self.scratch.factors.resize(blocks.len() * m, 1.0);
        self.scratch.parts.clear();
        self.scratch.parts.resize(blocks.len() * m, (0.0, 0.0));
        for (core, rows) in blocks.iter().enumerate() {
            self.fill_queries(core, rows, operands)?;
        }
        self.multiply(Product::Scores, blocks.len())?;
        for (core, rows) in blocks.iter().enumerate() {
            self.soften(core, rows, key_factor, operands)?;
        }
        self.multiply(Product::Sums, blocks.len())?;
        let c = self.call.native.c;
        for (core, rows) in blocks.iter().enumerate() {
            let o = &self.set.cores[core].o.bytes()[..c.bytes(m, self.shape.dv)];
            let o = NativeRows {
                c: bytemuck::cast_slice(o),
                layout: c,
                m,
            };
            let parts = &self.scratch.parts[core * m..];
            let tasks = (
                chunks(&mut out[rows.start * dv..rows.end * dv], ROWS_PER_TASK * dv),
                chunks(&mut mergers[rows.clone()], ROWS_PER_TASK),
            );
            self.call.threads.for_each(tasks, |task, (out, mergers)| {
                let mut sums = vec![0.0; dv];
                for (nth, (out, merger)) in out.chunks_exact_mut(dv).zip(mergers).enumerate() {
                    let row = task * ROWS_PER_TASK + nth;
                    o.copy_row(row, &mut sums);
                    merger.add(parts[row], &sums, value_factor, out);
                }
            });
        }
        Ok(())
    }

    /// Step 2.
    fn fill_queries(
        &mut self,
        core: usize,
        rows: &Range<usize>,
        operands: &dyn HeadOperands,
    ) -> Result<()> {
        let (dk, padded, m) = (self.call.sizes.dk, self.shape.dk, self.shape.m);
        let Scratch {
            halves, factors, ..
        } = &mut *self.scratch;
        halves.clear();
        halves.resize(rows.len() * padded, f16::ZERO);
        let parts = (
            chunks(&mut halves[..], ROWS_PER_TASK * padded),
            chunks(&mut factors[core * m..][..rows.len()], ROWS_PER_TASK),
        );
        self.call
            .threads
            .for_each(parts, |task, (halves, factors)| {
                let mut query = vec![0.0; dk];
                for (nth, (row, factor)) in halves.chunks_exact_mut(padded).zip(factors).enumerate()
                {
                    operands.query(rows.start + task * ROWS_PER_TASK + nth, &mut query);
                    *factor = quant::convert_row_f16(&query, &mut row[..dk]);
                }
            });
        let rows = Rows::new(&halves[..], rows.len(), padded, padded);
        self.call.interleave(rows, m, &mut self.set.cores[core].q)
    }

    /// Step 4.
    fn soften(
        &mut self,
        core: usize,
        rows: &Range<usize>,
        key_factor: f32,
        operands: &dyn HeadOperands,
    ) -> Result<()> {
        let (m, padded, cells) = (self.shape.m, self.shape.cells, self.cells);
        let (c, scaling) = (self.call.native.c, self.call.sizes.scaling);
        let Scratch {
            halves,
            factors,
            parts,
            ..
        } = &mut *self.scratch;
        let set = &mut self.set.cores[core];
        let scores = NativeRows {
            c: bytemuck::cast_slice(&set.s.bytes()[..c.bytes(m, padded)]),
            layout: c,
            m,
        };
        halves.clear();
        halves.resize(rows.len() * padded, f16::ZERO);
        let tasks = (
            chunks(&mut halves[..], ROWS_PER_TASK * padded),
            chunks(&mut parts[core * m..][..rows.len()], ROWS_PER_TASK),
        );
        let factors = &factors[core * m..];
        self.call.threads.for_each(tasks, |task, (halves, parts)| {
            let mut work = vec![0.0; cells.len()];
            for (nth, (out, part)) in halves.chunks_exact_mut(padded).zip(parts).enumerate() {
                let row = task * ROWS_PER_TASK + nth;
                let (mask, slope) = operands.mask(rows.start + row, cells);
                let mask = RowMask {
                    mask,
                    slope,
                    factor: factors[row] * key_factor,
                };
                let out = &mut out[..cells.len()];
                *part = attention::probabilities(scores, row, mask, scaling, &mut work, out);
            }
        });
        let rows = Rows::new(&halves[..], rows.len(), padded, padded);
        self.call.interleave(rows, m, &mut set.p)
    }

    /// Steps 3 and 5: runs a product on the first `used` cores, and makes the results visible.
    fn multiply(&mut self, product: Product, used: usize) -> Result<()> {
        let turn = self.call.turn;
        let Set {
            keys,
            values,
            cores,
        } = &mut *self.set;
        let mut results: [Result<()>; MAX_CORES] = [const { Ok(()) }; MAX_CORES];
        let begun = Instant::now();
        let parts = (
            chunks(&mut cores[..used], 1),
            chunks(&mut results[..used], 1),
        );
        self.call.threads.for_each(parts, |_, (cores, results)| {
            for (core, result) in cores.iter_mut().zip(results) {
                *result = core.run(product, &keys.1, &values.1, turn);
            }
        });
        for result in results {
            result?;
        }
        for core in &mut cores[..used] {
            match product {
                Product::Scores => core.s.sync_from_device()?,
                Product::Sums => core.o.sync_from_device()?,
            }
        }
        *self.ran += begun.elapsed();
        if self.call.proves {
            self.prove(product)?;
        }
        Ok(())
    }

    /// Compares the first core's results of a shape with the CPU's, once.
    ///
    /// # Errors
    /// `WrongSums` if any is wrong.
    fn prove(&mut self, product: Product) -> Result<()> {
        let SetShape { m, dk, dv, cells } = self.shape;
        let core = &self.set.cores[0];
        let (shape, a, b, c) = match product {
            Product::Scores => ([m, dk, cells], &core.q, &self.set.keys.0, &core.s),
            Product::Sums => ([m, cells, dv], &core.p, &self.set.values.0, &core.o),
        };
        if self.proven.contains(&shape) {
            return Ok(());
        }
        let run = Run {
            layout: &self.call.native,
            shape,
            a: a.bytes(),
            b: b.bytes(),
            c: c.bytes(),
        };
        let have = run.compare();
        if have.wrong > 0 {
            let [m, k, n] = shape;
            return Err(Error::WrongSums {
                what: format!("{} M={m} K={k} N={n}", Precision::Fp16),
                wrong: have.wrong,
                sums: have.sums,
            });
        }
        self.proven.insert(shape);
        Ok(())
    }
}

impl Call<'_> {
    /// Moves row-major FP16 into native A, and makes it visible to the device.
    fn interleave(&self, rows: Rows<f16>, m: usize, memory: &mut Memory) -> Result<()> {
        let a = self.native.a;
        let out = &mut memory.bytes_mut()[..a.bytes(m, rows.row_len())];
        let out: &mut [f16] = bytemuck::cast_slice_mut(out);
        let slices = rows.row_len() / a.s;
        let step = slices.div_ceil(self.threads.threads()).max(1) * a.s;
        let end = rows.row_len();
        self.threads.for_each(chunks(out, step * m), |task, out| {
            let range = (task * step).min(end)..((task + 1) * step).min(end);
            pack::interleave_a(rows.columns(range), a, m, out);
        });
        memory.sync_to_device()
    }
}

impl CoreSet {
    fn run(
        &mut self,
        product: Product,
        keys: &MemoryView,
        values: &MemoryView,
        turn: &Turn,
    ) -> Result<()> {
        match product {
            Product::Scores => self.scores.run(
                turn,
                &mut RunOperands {
                    a: &self.q,
                    b: keys,
                    c: &mut self.s,
                },
            ),
            Product::Sums => self.sums.run(
                turn,
                &mut RunOperands {
                    a: &self.p,
                    b: values,
                    c: &mut self.o,
                },
            ),
        }
    }
}
