//! Attention on the matrix unit: `softmax(q · kᵀ · scale + mask) · v` for 32 query rows at a time.
//!
//! Both products are matrix multiplications whose operands are not weights: queries, keys and
//! values are FP16 tiles that are packed here, and the softmax between the products runs on the
//! vector units. Rows of a tile are (query, head) pairs that share a head of keys and values, so
//! grouped-query attention fills a tile even while decoding a single token.
//!
//! ```text
//! for each stream, each batch of queries that fits, each head of keys and values
//!   pack queries                                  each row divided by a power of two
//!   maximum[row] = lowest, sum[row] = 0, values[row] = 0
//!   for each block of 128 positions               skipped if the mask hides it from all rows
//!     pack keys (4 strips) and values             once for all rows; what is not finite becomes zero
//!     for each group of up to 8 tiles of 32 rows  those that see a position of the block
//!       matrix unit    scores[4 tiles] = queries · keys
//!       vector units   factor, cap, mask; new maximum; weight = exp(score - maximum)
//!                      scale = exp(old maximum - new maximum); sum = sum · scale + Σ weight
//!       matrix unit    products = weights · values         a tile for each 32 elements
//!       vector units   values = values · scale + products
//!   values / sum -> f32 rows
//! ```
//!
//! 1. **One pass, running maximum.** A block's weights are relative to the largest score so far;
//!    when the maximum grows, earlier sums are multiplied by `scale`. Scores of only 128 positions
//!    exist at a time, whatever the length of the cache.
//! 2. **In place.** The exponentials overwrite the scores, and the tiles of scores are the
//!    activations of the second product without being moved: the unit reads and writes the same
//!    tile format.
//! 3. **FP16 where the unit needs it, FP32 where errors add up.** Scores, weights and the products
//!    of one block are FP16; sums and values are FP32. Maxima are FP16 as well, so that each is
//!    exactly one of the scores and its weight is exactly 1.
//! 4. **Range.** Queries are divided by a power of two for each row, and the unit's stores multiply
//!    by 2^-5, so that a product leaves FP16's range only beyond 2^21. Both factors are restored
//!    when a score becomes f32.
//! 5. **Exponentials by table** ([`super::table`]). Differences to the maximum are never positive,
//!    so an f16's magnitude indexes 32,768 entries in VTCM, and one gather instruction reads 64 of
//!    them.
//! 6. **Hidden positions cost nothing where they can be seen early.** A tile of rows skips a block
//!    that the mask hides from all its rows, and with it all four stages.

mod vtcm;

use core::ops::Range;

pub(super) use vtcm::TilePlan;
use vtcm::{GROUP, MAX_ROW_TILES, MAX_VALUE_LINES, MAXIMA, RESTORE, SUMS, TileMemory};

use super::exception::{FiniteF16, clear_tile, sees, spoil};
use super::kv::{PackKeys, PackValues};
use super::weigh::{BLOCK, Lowest, RowTile, STRIPS, Visible, Weigh};
use super::{HIDDEN, Job, TABLE_LINES, merge};
use crate::error::{Error, Result};
use crate::hmx::{Hmx, MAX_DEEP};
use crate::hvx::{self, Vector, add_f32, mul_f32, splat_f32, splat_h};
use crate::layout::{F16_TILE_LINES, Line, TILE_DIM, Tile};
use crate::ops::matmul::Machine;
use crate::ops::matmul::act::{RowFactor, pack_rows};
use crate::ops::tensor::{CHUNK, Type, View, ViewMut};
use crate::rt::Engine;

/// Computes an attention; the operands have been checked.
pub(super) fn run(
    job: &Job<'_>,
    plan: &TilePlan,
    machine: Machine<'_>,
    table: &[Line; TABLE_LINES],
    dst: &mut ViewMut<'_>,
) -> Result<()> {
    let Machine { engine, vtcm, hmx } = machine;
    hmx.take_fault();
    let mut memory = TileMemory::new(plan, vtcm, hmx, table)?;
    let [_, queries, _, streams] = job.src.q.shape.ne;
    for stream in 0..streams {
        for first in (0..queries).step_by(plan.queries) {
            for kv_head in 0..job.kv_heads {
                let head = Head {
                    job,
                    plan,
                    engine,
                    stream,
                    kv_head,
                    first,
                    rows: job.group * plan.queries.min(queries - first),
                };
                head.run(&mut memory, hmx, dst);
            }
        }
    }
    match hmx.take_fault() {
        Some(fault) => Err(Error::Fault(fault)),
        None => Ok(()),
    }
}

/// The query rows of a batch that share a head of keys and values.
struct Head<'a> {
    job: &'a Job<'a>,
    plan: &'a TilePlan,
    engine: &'a Engine,
    stream: usize,
    kv_head: usize,
    /// Number of the batch's first query.
    first: usize,
    rows: usize,
}

impl Head<'_> {
    fn run(&self, memory: &mut TileMemory<'_>, hmx: &mut Hmx, dst: &mut ViewMut<'_>) {
        self.begin(memory);
        let mut spoiled = [0; MAX_ROW_TILES];
        for start in (0..self.job.positions).step_by(BLOCK) {
            let positions = start..self.job.positions.min(start + BLOCK);
            let mut active = self.active(&positions);
            if active == 0 {
                continue;
            }
            if !self.pack(&positions, memory) {
                let exceptions = self.clear(&positions, memory);
                self.spoil(active, &positions, &exceptions, &mut spoiled);
            }
            while active != 0 {
                let mut tiles = [0; GROUP];
                let mut count = 0;
                while active != 0 && count < GROUP {
                    tiles[count] = active.trailing_zeros() as usize;
                    active &= active - 1;
                    count += 1;
                }
                self.block(&tiles[..count], &positions, memory, hmx);
            }
        }
        self.write(memory, &spoiled, dst);
    }

    /// Returns the rows of a tile.
    fn tile_rows(&self, tile: usize) -> Range<usize> {
        tile * TILE_DIM..self.rows.min((tile + 1) * TILE_DIM)
    }

    /// Packs the queries, and clears the state.
    fn begin(&self, memory: &mut TileMemory<'_>) {
        let (k_tiles, job) = (self.plan.k_tiles, self.job);
        let state = memory.state.chunks_mut(self.plan.state_lines());
        let all = memory
            .queries
            .chunks_mut(k_tiles)
            .zip(&mut *memory.factors)
            .zip(state);
        let mut all = all.enumerate().take(self.rows.div_ceil(TILE_DIM));
        loop {
            let mut tasks: [_; GROUP] = core::array::from_fn(|_| all.next());
            if tasks[0].is_none() {
                return;
            }
            let n_tasks = tasks.iter().flatten().count();
            self.engine.step(None, &mut tasks[..n_tasks], |task| {
                let Some((tile, ((queries, factors), state))) = task else {
                    return;
                };
                let rows = self.tile_rows(*tile);
                let row = |i: usize| {
                    let row = rows.start + i;
                    let [query, head] = job.head(self.first, self.kv_head, row);
                    let at = [query, head, self.stream];
                    (row < rows.end).then(|| job.src.q.floats(at)).flatten()
                };
                pack_rows(row, queries, factors);
                let (maxima, sums) = state.split_at_mut(MAXIMA);
                hvx::widest(Lowest(maxima));
                hvx::clear(sums);
            });
        }
    }

    /// Returns a bit for each tile of rows, set unless the mask hides all of `positions` from the
    /// tile.
    fn active(&self, positions: &Range<usize>) -> u64 {
        let tiles = self.rows.div_ceil(TILE_DIM);
        let all = u64::MAX >> (MAX_ROW_TILES - tiles);
        let Some(mask) = &self.job.src.mask else {
            return all;
        };
        // With a separate mask for each head, looking at its rows would cost more than skipping
        // saves.
        if mask.shape.ne[2] > 1 || mask.shape.dtype != Type::F16 || !mask.shape.has_dense_rows() {
            return all;
        }
        (0..tiles).fold(0, |active, tile| {
            let rows = self.tile_rows(tile);
            let query = |row: usize| self.job.head(self.first, self.kv_head, row)[0];
            let is_visible = hvx::widest(Visible {
                mask,
                queries: query(rows.start)..query(rows.end - 1) + 1,
                stream: self.stream,
                positions: positions.clone(),
            });
            active | u64::from(is_visible) << tile
        })
    }

    /// Packs keys and values. Returns `true` if all are finite.
    fn pack(&self, positions: &Range<usize>, memory: &mut TileMemory<'_>) -> bool {
        let strips = positions.len().div_ceil(TILE_DIM);
        let (of_values, of_keys) = memory.largest.split_at_mut(STRIPS * self.plan.slabs());
        let keys = memory.keys.chunks_mut(self.plan.k_tiles).zip(of_keys);
        let mut keys: [_; STRIPS] = {
            let mut all = keys.enumerate().take(strips);
            core::array::from_fn(|_| all.next())
        };
        let keys = &mut keys[..strips];
        let slabs = memory.values.chunks_mut(2 * STRIPS).enumerate();
        let mut all = slabs.flat_map(|(slab, tiles)| {
            let (even, odd) = tiles.split_at_mut(STRIPS);
            let strips = even.iter_mut().zip(odd).enumerate();
            strips.map(move |(strip, tiles)| (slab, strip, tiles))
        });
        let mut all = (&mut all).zip(of_values);
        if self.engine.threads() == 1 {
            for (strip, (tiles, largest)) in keys.iter_mut().flatten() {
                self.pack_keys(positions, *strip, tiles, largest);
            }
            for ((slab, strip, (even, odd)), largest) in all {
                self.pack_values(positions, [slab, strip], [even, odd], largest);
            }
        } else {
            self.engine.step(None, keys, |task| {
                if let Some((strip, (tiles, largest))) = task {
                    self.pack_keys(positions, *strip, tiles, largest);
                }
            });
            let mut values: [_; MAX_VALUE_LINES / 2 * STRIPS] =
                core::array::from_fn(|_| all.next());
            let n_tasks = values.iter().flatten().count();
            self.engine.step(None, &mut values[..n_tasks], |task| {
                if let Some(((slab, strip, (even, odd)), largest)) = task {
                    self.pack_values(positions, [*slab, *strip], [even, odd], largest);
                }
            });
        }
        let largest = &memory.largest[..STRIPS * self.plan.slabs() + strips];
        hvx::widest(FiniteF16(largest))
    }

    /// Packs the keys of a strip of positions.
    #[inline(always)]
    fn pack_keys(
        &self,
        positions: &Range<usize>,
        strip: usize,
        tiles: &mut [Tile],
        largest: &mut Line,
    ) {
        let start = positions.start + strip * TILE_DIM;
        hvx::widest(PackKeys {
            view: &self.job.src.k,
            head: [self.kv_head, self.stream],
            positions: start..positions.end.min(start + TILE_DIM),
            tiles,
            largest,
        });
    }

    /// Packs a slab of the values of a strip of positions.
    #[inline(always)]
    fn pack_values(
        &self,
        positions: &Range<usize>,
        [slab, strip]: [usize; 2],
        [even, odd]: [&mut Tile; 2],
        largest: &mut Line,
    ) {
        let start = (positions.start + strip * TILE_DIM).min(positions.end);
        hvx::widest(PackValues {
            view: &self.job.src.v,
            head: [self.kv_head, self.stream],
            positions: start..positions.end.min(start + TILE_DIM),
            slab,
            even,
            odd,
            largest,
        });
    }

    /// Replaces keys and values that are not finite by zeros. Returns, for each 32 positions, a bit
    /// for each position that had any.
    fn clear(&self, positions: &Range<usize>, memory: &mut TileMemory<'_>) -> [u32; STRIPS] {
        let mut found = [0; STRIPS];
        let strips = positions.len().div_ceil(TILE_DIM);
        let keys = memory.keys.chunks_mut(self.plan.k_tiles).take(strips);
        for (found, tiles) in found.iter_mut().zip(keys) {
            for tile in tiles {
                *found |= clear_tile(tile, |_, column| column);
            }
        }
        for tiles in memory.values.chunks_mut(STRIPS) {
            for (found, tile) in found.iter_mut().zip(tiles) {
                *found |= clear_tile(tile, |row, _| row);
            }
        }
        found
    }

    /// Sets the bits of rows that see a position whose key or value was not finite.
    ///
    /// - `active`: tiles of rows that see any of `positions`
    /// - `exceptions`: as [`Self::clear`] returns them
    /// - `spoiled`: for each tile, a bit for each row
    fn spoil(
        &self,
        active: u64,
        positions: &Range<usize>,
        exceptions: &[u32; STRIPS],
        spoiled: &mut [u32; MAX_ROW_TILES],
    ) {
        let tiles = spoiled.iter_mut().enumerate();
        for (tile, spoiled) in tiles.filter(|(tile, _)| active >> tile & 1 == 1) {
            let rows = self.tile_rows(tile);
            let places = self.job.heads(self.first, self.kv_head, rows);
            for (row, [query, head]) in places.enumerate() {
                let sees = |mask: &View<'_>| {
                    let mut chunk = [0.0; CHUNK];
                    let at = [query, head, self.stream];
                    sees(mask.read(at, positions.clone(), &mut chunk), exceptions)
                };
                if *spoiled >> row & 1 == 0 && self.job.src.mask.as_ref().is_none_or(sees) {
                    *spoiled |= 1 << row;
                }
            }
        }
    }

    /// Adds the contribution of a block of positions to some tiles of rows.
    fn block(
        &self,
        tiles: &[usize],
        positions: &Range<usize>,
        memory: &mut TileMemory<'_>,
        hmx: &mut Hmx,
    ) {
        let TilePlan {
            k_tiles, v_strips, ..
        } = *self.plan;
        let strips = positions.len().div_ceil(TILE_DIM);
        for (tile, scores) in tiles.iter().zip(memory.scores.chunks_mut(STRIPS)) {
            let queries = &memory.queries[tile * k_tiles..][..k_tiles];
            for (score, keys) in scores[..strips].iter_mut().zip(memory.keys.chunks(k_tiles)) {
                for (queries, keys) in queries.chunks(MAX_DEEP).zip(keys.chunks(MAX_DEEP)) {
                    hmx.multiply(queries, keys);
                }
                hmx.store(score);
            }
        }
        self.weigh(tiles, positions, memory);
        for (_, (scores, products)) in tiles.iter().zip(
            memory
                .scores
                .chunks(STRIPS)
                .zip(memory.products.chunks_mut(v_strips)),
        ) {
            for (product, values) in products.iter_mut().zip(memory.values.chunks(STRIPS)) {
                hmx.multiply(&scores[..strips], &values[..strips]);
                hmx.store(product);
            }
        }
        self.add(tiles, memory);
    }

    /// Turns scores into weights.
    fn weigh(&self, tiles: &[usize], positions: &Range<usize>, memory: &mut TileMemory<'_>) {
        let TileMemory {
            table,
            factors,
            state,
            scores,
            scales,
            ..
        } = memory;
        let mut slots = scores
            .chunks_mut(STRIPS)
            .zip(scales.chunks_mut(F16_TILE_LINES));
        let mut states = state.chunks_mut(self.plan.state_lines()).enumerate();
        let mut tasks: [_; GROUP] = core::array::from_fn(|i| {
            let tile = *tiles.get(i)?;
            let state = states.find(|(number, _)| *number == tile)?.1;
            Some((tile, state, slots.next()?))
        });
        let (table, factors) = (*table, &**factors);
        // One thread needs no closure, which the compiler would not join with this function.
        let tasks = &mut tasks[..tiles.len()];
        if self.engine.threads() == 1 {
            for (tile, state, (scores, scales)) in tasks.iter_mut().flatten() {
                let rows = (*tile, &factors[*tile]);
                self.weigh_tile(rows, positions, table, [state, scales], scores);
            }
            return;
        }
        self.engine.step(None, tasks, |task| {
            if let Some((tile, state, (scores, scales))) = task {
                let rows = (*tile, &factors[*tile]);
                self.weigh_tile(rows, positions, table, [state, scales], scores);
            }
        });
    }

    /// Turns the scores of a tile of rows into weights.
    ///
    /// - `tile`: its number, and its factors
    /// - `lines`: its state, and where the scales of its sums go
    #[inline(always)]
    fn weigh_tile(
        &self,
        tile: (usize, &[RowFactor; TILE_DIM]),
        positions: &Range<usize>,
        table: &[Line; TABLE_LINES],
        [state, scales]: [&mut [Line]; 2],
        scores: &mut [Tile],
    ) {
        let (maxima, sums) = state.split_at_mut(MAXIMA);
        let head = [self.first, self.kv_head];
        let rows = RowTile::new(self.job, tile.1, self.tile_rows(tile.0), head);
        let strips = positions.len().div_ceil(TILE_DIM);
        hvx::widest(Weigh {
            job: self.job,
            stream: self.stream,
            rows: &rows,
            positions: positions.clone(),
            table,
            scores: &mut scores[..strips],
            maxima,
            sums: &mut sums[..SUMS],
            scales,
        });
    }

    /// Adds the products of this block to the sums over all blocks.
    fn add(&self, tiles: &[usize], memory: &mut TileMemory<'_>) {
        let v_strips = self.plan.v_strips;
        let mut slots = memory
            .products
            .chunks(v_strips)
            .zip(memory.scales.chunks(F16_TILE_LINES));
        let mut states = memory.state.chunks_mut(self.plan.state_lines()).enumerate();
        let mut tasks: [_; GROUP] = core::array::from_fn(|i| {
            let tile = *tiles.get(i)?;
            let state = states.find(|(number, _)| *number == tile)?.1;
            Some((tile, state, slots.next()?))
        });
        self.engine.step(None, &mut tasks[..tiles.len()], |task| {
            if let Some((tile, state, (products, scales))) = task {
                hvx::widest(Add {
                    line_pairs: self.tile_rows(*tile).len().div_ceil(2),
                    products,
                    scales,
                    sums: &mut state[MAXIMA + SUMS..],
                });
            }
        });
    }

    /// Divides the rows by their sums, and writes them.
    fn write(
        &self,
        memory: &TileMemory<'_>,
        spoiled: &[u32; MAX_ROW_TILES],
        dst: &mut ViewMut<'_>,
    ) {
        for row in 0..self.rows {
            let [query, head] = self.job.head(self.first, self.kv_head, row);
            let state = &memory.state[row / TILE_DIM * self.plan.state_lines()..];
            let (tile, at) = (row / TILE_DIM, row % TILE_DIM);
            let mut lines = hvx::zeros::<{ MAX_VALUE_LINES + 2 }>();
            let result = &mut lines[..self.job.result_lines()];
            if memory.factors[tile][at].factor().is_nan() || spoiled[tile] >> at & 1 == 1 {
                spoil(super::parts(result).2);
            } else {
                hvx::widest(FinishRow {
                    state,
                    row: at,
                    lines: result,
                });
            }
            let parts = merge::Parts {
                lines: &lines,
                stride: 0,
                count: 1,
            };
            if let Some(row) = dst.row([head, query, self.stream]) {
                merge::write(self.job, &parts, head, row);
            }
        }
    }
}

/// Adds products to sums that are first scaled to the new maximum.
struct Add<'a> {
    /// Pairs of rows.
    line_pairs: usize,
    /// A tile for each strip.
    products: &'a [Tile],
    scales: &'a [Line],
    /// For each strip and pair of rows: f32 of the even row, then of the odd one.
    sums: &'a mut [Line],
}

impl hvx::Kernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (product, sums) in self
            .products
            .iter()
            .zip(self.sums.chunks_exact_mut(TILE_DIM))
        {
            let pairs = sums.as_chunks_mut::<2>().0;
            let lines = product.0.iter().zip(self.scales);
            for (pair, (line, scale)) in pairs.iter_mut().zip(lines).take(self.line_pairs) {
                let (even, odd) = hvx::widen_mul_f16(hvx::load(line), splat_h(RESTORE));
                let (even_scale, odd_scale) = hvx::widen_mul_f16(hvx::load(scale), splat_h(0x3c00));
                let [even_sum, odd_sum] = pair;
                let scaled = mul_f32(hvx::load(even_sum), even_scale);
                hvx::store(even_sum, add_f32(scaled, even));
                let scaled = mul_f32(hvx::load(odd_sum), odd_scale);
                hvx::store(odd_sum, add_f32(scaled, odd));
            }
        }
    }
}

/// Collects a row's values in order, with its maximum and sum, in the form of [`merge`].
struct FinishRow<'a> {
    state: &'a [Line],
    row: usize,
    lines: &'a mut [Line],
}

impl hvx::Kernel for FinishRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let (values, largest, sum) = super::parts(self.lines);
        let (maxima, rest) = self.state.split_at(MAXIMA);
        let (sums, elems) = rest.split_at(SUMS);
        for (slab, out) in values.chunks_mut(2).enumerate() {
            let strip =
                |parity: usize| hvx::load(&elems[(2 * slab + parity) * TILE_DIM + self.row]);
            let (low, high) = hvx::interleave_w(strip(0), strip(1));
            for (out, v) in out.iter_mut().zip([low, high]) {
                hvx::store(out, v);
            }
        }
        let (even, odd) = hvx::widen_mul_f16(hvx::load(&maxima[self.row / 2]), splat_h(0x3c00));
        let maximum: Vector = if self.row.is_multiple_of(2) {
            even
        } else {
            odd
        };
        // The lowest f16 stands for hidden positions.
        let lowest = splat_f32(super::weigh::HIDDEN_F16 + 1.0);
        let hidden = splat_f32(HIDDEN);
        hvx::store(
            largest,
            hvx::select_gt_f32(maximum, lowest, maximum, hidden),
        );
        hvx::store(sum, hvx::load(&sums[self.row]));
    }
}
