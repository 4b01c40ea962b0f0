//! Blocks of rows that all cores compute at the same time.

use std::ops::Range;
use std::time::{Duration, Instant};

use half::f16;
use rknpu_ops::attention::{self, Merger, NativeRows, P_FACTOR, RowMask};
use rknpu_ops::pack::{self, Rows};
use rknpu_ops::proof::{Comparison, Run};
use rknpu_ops::quant;
use rustc_hash::FxHashMap;
use task_pool::chunks;

use super::super::MAX_CORES;
use super::set::{Product, Set, SetShape};
use super::{Call, HeadOperands, ROWS_PER_TASK};
use crate::error::{Error, Result};
use crate::rockchip::caps::Precision;
use crate::rockchip::driver::Memory;

/// Rows of FP16 and their converted forms, kept from call to call.
#[derive(Debug, Default)]
pub(super) struct BlockScratch {
    halves: Vec<f16>,
    /// Inverses of the factors of queries.
    factors: Vec<f32>,
    /// Largest score and sum of probabilities of each row.
    parts: Vec<(f32, f32)>,
}

/// Blocks of rows that all cores compute at the same time.
pub(super) struct Wave<'a, 'c> {
    pub(super) call: &'a Call<'c>,
    pub(super) shape: SetShape,
    pub(super) cells: &'a Range<usize>,
    /// At most one for each core.
    pub(super) blocks: &'a [Range<usize>],
    pub(super) operands: &'a dyn HeadOperands,
    pub(super) set: &'a mut Set,
    pub(super) scratch: &'a mut BlockScratch,
    pub(super) proven: &'a mut FxHashMap<[usize; 3], usize>,
    pub(super) ran: &'a mut Duration,
}

impl Wave<'_, '_> {
    /// Steps 2 to 6.
    ///
    /// - `key_factor`, `value_factor`: factors of scores and sums
    /// - `mergers`, `out`: of all rows
    pub(super) fn run(
        &mut self,
        key_factor: f32,
        value_factor: f32,
        mergers: &mut [Merger],
        out: &mut [f32],
    ) -> Result<()> {
        let (m, dv) = (self.shape.m, self.call.sizes.dv);
        self.scratch.factors.clear();
        self.scratch.factors.resize(self.blocks.len() * m, 1.0);
        self.scratch.parts.clear();
        self.scratch.parts.resize(self.blocks.len() * m, (0.0, 0.0));
        for core in 0..self.blocks.len() {
            self.fill_queries(core)?;
        }
        self.multiply(Product::Scores)?;
        for core in 0..self.blocks.len() {
            self.soften(core, key_factor)?;
        }
        self.multiply(Product::Sums)?;
        let c = self.call.native().c;
        for (core, rows) in self.blocks.iter().enumerate() {
            let o = &self.set.cores[core].sums.c.bytes()[..c.bytes(m, self.shape.dv)];
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
                    merger.add(parts[row], &sums, value_factor / P_FACTOR, out);
                }
            });
        }
        Ok(())
    }

    /// Step 2.
    fn fill_queries(&mut self, core: usize) -> Result<()> {
        let (dk, padded, m) = (self.call.sizes.dk, self.shape.dk, self.shape.m);
        let (rows, operands) = (&self.blocks[core], self.operands);
        let BlockScratch {
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
        (self.call).interleave(rows, m, &mut self.set.cores[core].scores.a)
    }

    /// Step 4.
    fn soften(&mut self, core: usize, key_factor: f32) -> Result<()> {
        let (m, padded, cells) = (self.shape.m, self.shape.cells, self.cells);
        let (c, scaling) = (self.call.native().c, self.call.sizes.scaling);
        let (rows, operands) = (&self.blocks[core], self.operands);
        let BlockScratch {
            halves,
            factors,
            parts,
        } = &mut *self.scratch;
        let set = &mut self.set.cores[core];
        let scores = NativeRows {
            c: bytemuck::cast_slice(&set.scores.c.bytes()[..c.bytes(m, padded)]),
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
        self.call.interleave(rows, m, &mut set.sums.a)
    }

    /// Steps 3 and 5.
    fn multiply(&mut self, product: Product) -> Result<()> {
        let begun = Instant::now();
        (self.set).run(
            product,
            self.blocks.len(),
            self.call.threads,
            self.call.turn,
        )?;
        *self.ran += begun.elapsed();
        // No block is longer than the first one.
        let (shape, rows) = (self.shape.product(product), self.blocks[0].len());
        let proven = self.proven.get(&shape);
        if !self.call.proves || proven.is_some_and(|proven| *proven >= rows) {
            return Ok(());
        }
        let all = self.compare(product);
        if all.wrong > 0 {
            let [m, k, n] = shape;
            return Err(Error::WrongSums {
                what: format!("{} M={m} K={k} N={n}", Precision::Fp16),
                wrong: all.wrong,
                sums: all.sums,
            });
        }
        if all.proves() {
            self.proven.insert(shape, rows);
        }
        Ok(())
    }

    /// Compares the results of all cores with the CPU's.
    fn compare(&self, product: Product) -> Comparison {
        let mut each = [Comparison::default(); MAX_CORES];
        let used = self.blocks.len();
        let b = &self.set.shared(product).memory;
        self.call
            .threads
            .for_each(chunks(&mut each[..used], 1), |core, outcome| {
                let half = self.set.cores[core].half(product);
                let run = Run {
                    layout: self.call.native(),
                    shape: self.shape.product(product),
                    a: half.a.bytes(),
                    b: b.bytes(),
                    c: half.c.bytes(),
                };
                outcome[0] = run.compare();
            });
        let mut all = Comparison::default();
        each.iter().for_each(|one| all.add(*one));
        all
    }
}

impl Call<'_> {
    /// Moves row-major FP16 into native A, and makes it visible to the device.
    fn interleave(&self, rows: Rows<f16>, m: usize, memory: &mut Memory) -> Result<()> {
        let a = self.native().a;
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
