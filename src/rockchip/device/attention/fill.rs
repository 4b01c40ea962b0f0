//! Rows of a cache as FP16, in the range of its numbers.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use half::f16;
use half::slice::HalfFloatSliceExt;
use task_pool::{Pool, chunks};

use super::{Cache, HeadOperands, ROWS_PER_TASK};

/// Exponent of a power of two. Magnitudes beyond FP16's range are scaled to below it.
const TARGET_EXPONENT: i32 = 15;

/// Rows of one range of cells.
#[derive(Debug, Default)]
pub(super) struct CacheRows {
    /// The rows, padded; those of hidden cells, and of `odd` ones, are zeros.
    pub(super) halves: Vec<f16>,
    floats: Vec<f32>,
    /// Cells with an element that is not finite.
    pub(super) odd: Vec<usize>,
}

impl CacheRows {
    /// Reads the rows of `cells`. Returns the factor that scales all of them into FP16's range.
    ///
    /// Cells that no query sees have whatever was in memory, so nothing of them is read.
    ///
    /// - `width`, `padded`: elements of a row, and with the zeros after them
    pub(super) fn read(
        &mut self,
        threads: &Pool,
        operands: &dyn HeadOperands,
        cache: Cache,
        cells: &Range<usize>,
        [width, padded]: [usize; 2],
    ) -> f32 {
        let largest = self.convert(threads, operands, cache, cells, [width, padded], 1.0);
        if largest <= f16::MAX.to_f32() {
            return 1.0;
        }
        // CAST: a finite float's exponent has 8 bits.
        let exponent = (largest.to_bits() >> 23).cast_signed() - 127;
        let factor = f32::from_bits((TARGET_EXPONENT - 1 - exponent + 127).cast_unsigned() << 23);
        self.convert(threads, operands, cache, cells, [width, padded], factor);
        factor
    }

    /// Reads the rows times `factor`. Returns their largest finite magnitude without it.
    fn convert(
        &mut self,
        threads: &Pool,
        operands: &dyn HeadOperands,
        cache: Cache,
        cells: &Range<usize>,
        [width, padded]: [usize; 2],
        factor: f32,
    ) -> f32 {
        let Self {
            halves,
            floats,
            odd,
        } = self;
        halves.clear();
        halves.resize(cells.len() * padded, f16::ZERO);
        let tasks = cells.len().div_ceil(ROWS_PER_TASK);
        floats.resize((tasks * width).max(floats.len()), 0.0);
        let found = Mutex::new(Vec::new());
        let largest = AtomicU32::new(0);
        let parts = (
            chunks(&mut halves[..], ROWS_PER_TASK * padded),
            chunks(&mut floats[..tasks * width], width),
        );
        threads.for_each(parts, |task, (rows, floats)| {
            for (nth, row) in rows.chunks_exact_mut(padded).enumerate() {
                let cell = cells.start + task * ROWS_PER_TASK + nth;
                if !operands.is_seen(cell) {
                    continue;
                }
                let row = &mut row[..width];
                let is_finite = if let Some(stored) = operands.halves(cache, cell) {
                    row.copy_from_slice(stored);
                    stored.iter().all(|value| value.is_finite())
                } else {
                    operands.floats(cache, cell, floats);
                    let bits = floats
                        .iter()
                        .fold(0, |bits, value| value.abs().to_bits().max(bits));
                    let is_finite = f32::from_bits(bits).is_finite();
                    if is_finite {
                        largest.fetch_max(bits, Ordering::Relaxed);
                        floats.iter_mut().for_each(|value| *value *= factor);
                        row.convert_from_f32_slice(floats);
                    }
                    is_finite
                };
                if !is_finite {
                    row.fill(f16::ZERO);
                    (found.lock().unwrap_or_else(PoisonError::into_inner)).push(cell);
                }
            }
        });
        *odd = found.into_inner().unwrap_or_else(PoisonError::into_inner);
        f32::from_bits(largest.into_inner())
    }
}
