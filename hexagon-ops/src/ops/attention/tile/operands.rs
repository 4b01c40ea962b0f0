//! Tasks that pack queries, keys and values, and find values that are not finite.

use core::ops::Range;

use super::copies::{BlockOperands, CacheBlock};
use super::queries::PackQueries;
use super::vtcm::{GROUP, MAX_PARTS, MAX_STRIPS, MAX_VALUE_LINES, PART, TileMemory, TilePlan};
use super::{Head, Tiles};
use crate::hmx::Form;
use crate::hvx;
use crate::layout::{Line, TILE_DIM, Tile};
use crate::ops::attention::exception::{LargestF16, clear_tile, sees};
use crate::ops::attention::kv::{CacheRows, PackKeys, PackValues};
use crate::ops::attention::scores::{BlockMask, RESTORE};
use crate::ops::tensor::CHUNK;

/// Exponent of the divisor of queries whose scores are completed in f32; it replaces the scale of
/// the unit's stores.
const UNSCALED_SHIFT: u32 = RESTORE.to_bits().wrapping_sub(1_f32.to_bits()) >> 23;

/// Largest magnitudes of a block's keys and values.
#[derive(Clone, Copy)]
pub(super) struct Magnitudes {
    pub(super) key: f32,
    pub(super) value: f32,
}

impl Head<'_> {
    /// Packs the queries.
    pub(super) fn begin(&self, memory: &mut TileMemory<'_>, tiles: &mut Tiles) {
        let (k_tiles, job) = (self.plan.k_tiles, self.job);
        let outputs = memory.factors.iter_mut().zip(&mut tiles.queries);
        let mut all = outputs
            .zip(memory.queries.chunks_mut(k_tiles))
            .enumerate()
            .take(self.n_tiles());
        loop {
            let mut tasks: [_; GROUP] = core::array::from_fn(|_| all.next());
            if tasks[0].is_none() {
                return;
            }
            let n_tasks = tasks.iter().flatten().count();
            self.engine.step(None, &mut tasks[..n_tasks], |task| {
                let Some((tile, ((factor, numbers), tiles))) = task else {
                    return;
                };
                let mut rows: [&[f32]; TILE_DIM] = [&[]; TILE_DIM];
                let numbers_of_rows = self.tile_rows(*tile);
                let n_rows = numbers_of_rows.len();
                let places = job.heads(self.first, self.kv_head, numbers_of_rows);
                for (row, [query, head]) in rows.iter_mut().zip(places) {
                    let offset = job.src.q.offset([query, head, self.stream]);
                    *row = job.src.q.floats_at(offset).unwrap_or_default();
                }
                **numbers = hvx::widest(PackQueries {
                    rows: &mut rows[..n_rows],
                    factor: job.factor,
                    lower: if self.form == Form::RoundOnly {
                        UNSCALED_SHIFT
                    } else {
                        0
                    },
                    tiles,
                });
                if let Some(scale) = numbers.factor_f16 {
                    // A unit of the older form reads no scales.
                    factor.set(if self.form == Form::RoundOnly {
                        0
                    } else {
                        scale
                    });
                }
            });
        }
    }

    /// Packs keys and values of some strips. Returns their magnitudes if all are finite.
    pub(super) fn pack(
        &self,
        positions: &Range<usize>,
        strips: &Range<usize>,
        operands: &BlockOperands<'_>,
        memory: &mut TileMemory<'_>,
    ) -> Option<Magnitudes> {
        let TilePlan {
            k_tiles,
            strips: most,
            ..
        } = *self.plan;
        let parts = strips.len().div_ceil(PART);
        let (of_keys, of_values) = memory.largest.split_at_mut(parts);
        let keys = &mut memory.keys[strips.start * k_tiles..strips.end * k_tiles];
        let keys = keys.chunks_mut(PART * k_tiles).zip(&mut *of_keys);
        let mut keys = keys.enumerate();
        let slabs = memory.values.chunks_mut(2 * most).enumerate();
        let values = slabs.flat_map(|(slab, tiles)| {
            let (even, odd) = tiles.split_at_mut(most);
            let (even, odd) = (&mut even[strips.clone()], &mut odd[strips.clone()]);
            let parts = even.chunks_mut(PART).zip(odd.chunks_mut(PART)).enumerate();
            parts.map(move |(part, tiles)| (slab, part, tiles))
        });
        let mut values = values.zip(&mut *of_values);
        if self.engine.threads() == 1 {
            for (part, (tiles, largest)) in keys {
                let rows = rows_from(&operands.keys, positions, strips.start + PART * part);
                self.pack_keys(rows, tiles, largest);
            }
            for ((slab, part, (even, odd)), largest) in values {
                let rows = rows_from(&operands.values, positions, strips.start + PART * part);
                pack_values(rows, slab, [even, odd], largest);
            }
        } else {
            let mut keys: [_; MAX_PARTS] = core::array::from_fn(|_| keys.next());
            self.engine.step(None, &mut keys[..parts], |task| {
                if let Some((part, (tiles, largest))) = task {
                    let strip = strips.start + PART * *part;
                    let rows = rows_from(&operands.keys, positions, strip);
                    self.pack_keys(rows, tiles, largest);
                }
            });
            let mut values: [_; MAX_VALUE_LINES / 2 * MAX_PARTS] =
                core::array::from_fn(|_| values.next());
            let n_tasks = parts * self.plan.slabs();
            self.engine.step(None, &mut values[..n_tasks], |task| {
                if let Some(((slab, part, (even, odd)), largest)) = task {
                    let strip = strips.start + PART * *part;
                    let rows = rows_from(&operands.values, positions, strip);
                    pack_values(rows, *slab, [even, odd], largest);
                }
            });
        }
        Some(Magnitudes {
            key: hvx::widest(LargestF16(of_keys))?,
            value: hvx::widest(LargestF16(&of_values[..parts * self.plan.slabs()]))?,
        })
    }

    /// Packs keys.
    #[inline(always)]
    fn pack_keys(&self, rows: CacheRows<'_>, tiles: &mut [Tile], largest: &mut Line) {
        hvx::widest(PackKeys {
            rows,
            tiles,
            per_strip: self.plan.k_tiles,
            largest,
        });
    }

    /// Replaces keys and values that are not finite by zeros. Returns, for each strip of the block,
    /// a bit for each position that had any.
    pub(super) fn clear(
        &self,
        strips: &Range<usize>,
        memory: &mut TileMemory<'_>,
    ) -> [u32; MAX_STRIPS] {
        let mut found = [0; MAX_STRIPS];
        let keys = memory.keys.chunks_mut(self.plan.k_tiles).zip(&mut found);
        for (tiles, found) in keys.take(strips.end).skip(strips.start) {
            for tile in tiles {
                *found |= clear_tile(tile, |_, column| column);
            }
        }
        for tiles in memory.values.chunks_mut(self.plan.strips) {
            let tiles = tiles.iter_mut().zip(&mut found);
            for (tile, found) in tiles.take(strips.end).skip(strips.start) {
                *found |= clear_tile(tile, |row, _| row);
            }
        }
        found
    }

    /// Sets the bits of rows that see a position whose key or value was not finite.
    ///
    /// - `exceptions`: as [`Self::clear`] returns them
    pub(super) fn spoil(
        &self,
        positions: &Range<usize>,
        mask: Option<&BlockMask<'_>>,
        exceptions: &[u32; MAX_STRIPS],
        tiles: &mut Tiles,
    ) {
        for tile in (0..self.n_tiles()).filter(|tile| !tiles.sights[*tile].is_none()) {
            let spoiled = &mut tiles.queries[tile].spoiled;
            let places = self
                .job
                .heads(self.first, self.kv_head, self.tile_rows(tile));
            for (row, [query, head]) in places.enumerate() {
                let sees = |mask: &BlockMask<'_>| {
                    let parts = positions.clone().step_by(CHUNK);
                    parts
                        .zip(exceptions.chunks(CHUNK / TILE_DIM))
                        .any(|(start, exceptions)| {
                            let mut chunk = [0.0; CHUNK];
                            let part = start..positions.end.min(start + CHUNK);
                            let mask = mask.read([query, head], self.stream, &part, &mut chunk);
                            sees(mask, exceptions)
                        })
                };
                if *spoiled >> row & 1 == 0 && mask.is_none_or(sees) {
                    *spoiled |= 1 << row;
                }
            }
        }
    }
}

/// Returns the positions of a block starting with a strip.
#[inline(always)]
fn rows_from<'v>(
    cache: &'v CacheBlock<'v>,
    positions: &Range<usize>,
    strip: usize,
) -> CacheRows<'v> {
    let start = positions.start + strip * TILE_DIM;
    CacheRows {
        view: &cache.view,
        head: cache.head,
        positions: start.min(positions.end) - cache.first..positions.end - cache.first,
    }
}

/// Packs a slab of values.
#[inline(always)]
fn pack_values(
    rows: CacheRows<'_>,
    slab: usize,
    [even, odd]: [&mut [Tile]; 2],
    largest: &mut Line,
) {
    hvx::widest(PackValues {
        rows,
        slab,
        even,
        odd,
        largest,
    });
}
