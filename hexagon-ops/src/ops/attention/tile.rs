//! Attention on the matrix unit: `softmax(q · kᵀ · scale + mask) · v` for 32 query rows at a time.
//!
//! Both products are matrix multiplications whose operands are not weights: queries, keys and
//! values are FP16 tiles that are packed here, and the softmax between the products runs on the
//! vector units. Rows of a tile are (query, head) pairs that share a head of keys and values, so
//! grouped-query attention fills a tile even while decoding a single token.
//!
//! ```text
//! for each stream, each batch of queries that fits, each head of keys and values
//!   pack queries                                  times the factor of the scores; a tile divided by a power of two
//!   for each block of up to 1024 positions
//!     look at the mask                            for each tile of rows: the strips of positions that it sees
//!     pack keys and values                        once for all rows; what is not finite becomes zero
//!     for each group of up to 8 tiles of 32 rows  those that see a position of the block
//!       matrix unit    scores[strips] = queries · keys
//!       vector units   mask; new maximum; weight = exp(score - maximum)
//!                      scale = exp(old maximum - new maximum); sum = sum · scale + Σ weight
//!       matrix unit    products = weights · values         a tile for each 32 elements
//!       vector units   values = values · scale + products
//!   values / sum -> f32 rows
//! ```
//!
//! 1. **One pass, running maximum.** A block's weights are relative to the largest score so far;
//!    when the maximum grows, earlier sums are multiplied by `scale`. A block is as long as the
//!    longest product of the unit, so that this is rare, and most sums are made in its accumulator.
//! 2. **In place.** The exponentials overwrite the scores, and the tiles of scores are the
//!    activations of the second product without being moved: the unit reads and writes the same
//!    tile format.
//! 3. **FP16 where the unit needs it, FP32 where errors add up.** Scores, weights and the products
//!    of one block are FP16; sums and values are FP32. Maxima are FP16 as well, so that each is
//!    exactly one of the scores and its weight is exactly 1.
//! 4. **Range.** Where queries and keys are so small that no score can leave FP16's range, the unit
//!    stores scores with their factor, and they need no further work (`Head::is_exact`). Otherwise
//!    its stores multiply by 2^-5, and scores are completed in f32 ([`super::scores`]), as they are
//!    with caps and with masks that do more than hide.
//! 5. **Exponentials by table** ([`super::table`]). Differences to the maximum are never positive,
//!    so an f16's magnitude indexes 32,768 entries in VTCM, and one gather instruction reads 64 of
//!    them.
//! 6. **Hidden positions cost nothing where they can be seen early.** A tile of rows leaves out the
//!    positions before the first and after the last that the mask shows to any of its rows.

mod finish;
mod operands;
mod queries;
mod sight;
mod sum;
mod vtcm;

use core::ops::Range;

use operands::Magnitudes;
use queries::QueryTile;
use sight::{Look, Sight};
use sum::Add;
pub(super) use vtcm::TilePlan;
use vtcm::{GROUP, MAX_ROW_TILES, MAXIMA, RESTORES, SUMS, TileMemory};

use super::scores::{Adjust, Hide, RowTile};
use super::weigh::Weigh;
use super::{Job, TABLE_LINES};
use crate::error::{Error, Result};
use crate::hmx::{Hmx, MAX_DEEP};
use crate::hvx;
use crate::layout::{F16_TILE_LINES, Line, TILE_DIM, Tile};
use crate::ops::matmul::Machine;
use crate::ops::tensor::{Type, View, ViewMut};
use crate::rt::Engine;

/// Largest magnitude of scores that need no work in f32. Rounding cannot bring larger ones out of FP16's range.
const SAFE: f32 = 60_000.0;
/// Largest magnitude of sums of values with the first of the scales of stores, and its inverse.
const SAFE_SUM: f32 = 60_000.0 * 32.0;

/// Computes an attention; the operands have been checked. Returns `false` if FP16 does not hold a
/// key or a value, and `dst` is to be computed by dot products then.
pub(super) fn run(
    job: &Job<'_>,
    plan: &TilePlan,
    machine: Machine<'_>,
    table: &[Line; TABLE_LINES],
    dst: &mut ViewMut<'_>,
) -> Result<bool> {
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
                if !head.run(&mut memory, hmx, dst) {
                    hmx.take_fault();
                    return Ok(false);
                }
            }
        }
    }
    match hmx.take_fault() {
        Some(fault) => Err(Error::Fault(fault)),
        None => Ok(true),
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

/// A group's tile of rows, and its part of the memory.
struct GroupTile<'m> {
    /// Number of the tile.
    tile: usize,
    sight: Sight,
    /// No earlier block was visible.
    is_first: bool,
    /// Scores are completed in f32.
    is_exact: bool,
    state: &'m mut [Line],
    scores: &'m mut [Tile],
    scales: &'m mut [Line],
    products: &'m mut [Tile],
}

/// The tiles of rows of a head.
struct Tiles {
    queries: [QueryTile; MAX_ROW_TILES],
    /// Sights of the tiles for the block.
    sights: [Sight; MAX_ROW_TILES],
    /// A bit for each tile that has seen a position.
    seen: u64,
}

impl Head<'_> {
    /// Computes the rows; `false` as [`run`].
    fn run(&self, memory: &mut TileMemory<'_>, hmx: &mut Hmx, dst: &mut ViewMut<'_>) -> bool {
        let mut tiles = Tiles {
            queries: [QueryTile::EMPTY; MAX_ROW_TILES],
            sights: [Sight::NONE; MAX_ROW_TILES],
            seen: 0,
        };
        self.begin(memory, &mut tiles);
        let block = self.plan.strips * TILE_DIM;
        let mut start = 0;
        while start < self.job.positions {
            let positions = start..self.job.positions.min(start + block);
            start = positions.end;
            let used = self.look(&positions, &mut tiles.sights);
            if used.is_none() {
                continue;
            }
            let strips = used.strips();
            let packed = match self.pack(&positions, &strips, memory) {
                Some(packed) => packed,
                None if !self.job.is_f16() => return false,
                None => {
                    let exceptions = self.clear(&strips, memory);
                    self.spoil(&positions, &exceptions, &mut tiles);
                    // The magnitudes of the others are not known.
                    Magnitudes {
                        key: f32::INFINITY,
                        value: f32::INFINITY,
                    }
                }
            };
            let mut first = 0;
            while first < self.n_tiles() {
                first = self.group(first, &positions, packed, &mut tiles, memory, hmx);
            }
        }
        self.write(memory, &tiles, dst);
        true
    }

    /// Returns the number of tiles of rows.
    fn n_tiles(&self) -> usize {
        self.rows.div_ceil(TILE_DIM)
    }

    /// Returns the rows of a tile.
    fn tile_rows(&self, tile: usize) -> Range<usize> {
        tile * TILE_DIM..self.rows.min((tile + 1) * TILE_DIM)
    }

    /// Looks at the mask of a block for each tile of rows. Returns what any tile sees.
    fn look(&self, positions: &Range<usize>, sights: &mut [Sight; MAX_ROW_TILES]) -> Sight {
        let sights = &mut sights[..self.n_tiles()];
        let plain = |mask: &&View<'_>| {
            let shape = &mask.shape;
            shape.ne[2] == 1 && shape.dtype == Type::F16 && shape.has_dense_rows()
        };
        match (&self.job.src.mask, self.job.src.mask.as_ref().filter(plain)) {
            (None, _) => sights.fill(Sight::all(positions.len())),
            (Some(_), None) => sights.fill(Sight::unknown(positions.len())),
            (_, Some(mask)) => self.look_at(mask, positions, sights),
        }
        sights.iter().fold(Sight::NONE, |all, sight| all.or(*sight))
    }

    /// Looks at an f16 mask.
    fn look_at(&self, mask: &View<'_>, positions: &Range<usize>, sights: &mut [Sight]) {
        let query = |row: usize| self.job.head(self.first, self.kv_head, row)[0];
        let look = |tile: usize, sight: &mut Sight| {
            let rows = self.tile_rows(tile);
            *sight = hvx::widest(Look {
                mask,
                queries: query(rows.start)..query(rows.end - 1) + 1,
                stream: self.stream,
                positions: positions.clone(),
            });
        };
        if self.engine.threads() == 1 {
            return sights
                .iter_mut()
                .enumerate()
                .for_each(|(tile, sight)| look(tile, sight));
        }
        let per_task = sights.len().div_ceil(GROUP);
        let mut all = sights.chunks_mut(per_task).enumerate();
        let mut tasks: [_; GROUP] = core::array::from_fn(|_| all.next());
        let n_tasks = tasks.iter().flatten().count();
        self.engine.step(None, &mut tasks[..n_tasks], |task| {
            if let Some((part, sights)) = task {
                let first = *part * per_task;
                (sights.iter_mut().enumerate()).for_each(|(i, sight)| look(first + i, sight));
            }
        });
    }

    /// Returns `true` if a tile's scores must be completed in f32.
    fn is_exact(&self, queries: &QueryTile, sight: Sight, key: f32) -> bool {
        let is_safe = queries.factor_f16.is_some() && queries.reach * key < SAFE;
        let is_simple = self.job.softcap == 0.0 && sight.is_plain && !self.job.slopes.is_used();
        !(is_safe && is_simple)
    }

    /// Adds the contribution of a block of positions to a group of tiles of rows, the first of which is not before
    /// `first`. Returns the tile after the last one.
    fn group(
        &self,
        first: usize,
        positions: &Range<usize>,
        packed: Magnitudes,
        tiles: &mut Tiles,
        memory: &mut TileMemory<'_>,
        hmx: &mut Hmx,
    ) -> usize {
        let TilePlan {
            k_tiles,
            v_strips,
            strips: most,
            ..
        } = *self.plan;
        let mut states = memory
            .state
            .chunks_mut(self.plan.state_lines())
            .enumerate()
            .skip(first);
        let mut scores = memory.scores.chunks_mut(most);
        let mut scales = memory.scales.chunks_mut(F16_TILE_LINES);
        let mut products = memory.products.chunks_mut(v_strips);
        let mut next = first;
        let mut n_slots = 0;
        let mut slots: [Option<GroupTile<'_>>; GROUP] = core::array::from_fn(|i| {
            if i >= self.plan.group {
                return None;
            }
            let (tile, state) = (states.by_ref().take(self.n_tiles() - next))
                .find(|(tile, _)| !tiles.sights[*tile].is_none())
                .or_else(|| {
                    next = self.n_tiles();
                    None
                })?;
            next = tile + 1;
            n_slots += 1;
            let is_first = tiles.seen >> tile & 1 == 0;
            tiles.seen |= 1 << tile;
            let sight = tiles.sights[tile];
            Some(GroupTile {
                tile,
                sight,
                is_first,
                is_exact: self.is_exact(&tiles.queries[tile], sight, packed.key),
                state,
                scores: &mut scores.next()?[sight.strips()],
                scales: scales.next()?,
                products: products.next()?,
            })
        });
        let slots = &mut slots[..n_slots];
        for slot in slots.iter_mut().flatten() {
            let queries = &memory.queries[slot.tile * k_tiles..][..k_tiles];
            hmx.load_scale(match slot.is_exact {
                true => &memory.stores[0],
                false => &memory.factors[slot.tile],
            });
            let mut keys = &memory.keys[slot.sight.strips().start * k_tiles..];
            for score in &mut *slot.scores {
                let (strip, rest) = keys.split_at(k_tiles);
                keys = rest;
                // Most keys are one product: a loop over products would take longer than it.
                match k_tiles <= MAX_DEEP {
                    true => hmx.multiply(queries, strip),
                    false => (queries.chunks(MAX_DEEP).zip(strip.chunks(MAX_DEEP)))
                        .for_each(|(queries, keys)| hmx.multiply(queries, keys)),
                }
                hmx.store(score);
            }
        }
        let (queries, table) = (&tiles.queries, memory.table);
        self.engine.step(None, slots, |slot| {
            if let Some(slot) = slot {
                self.weigh(slot, positions, queries[slot.tile].factor, table);
            }
        });
        // CAST: at most 1024 positions.
        #[expect(clippy::cast_precision_loss, reason = "at most 1024")]
        let largest = positions.len() as f32 * packed.value;
        // The second scale also takes infinity and NaN.
        let is_safe = largest < SAFE_SUM;
        let which = usize::from(!is_safe);
        hmx.load_scale(&memory.stores[which]);
        for slot in slots.iter_mut().flatten() {
            let strips = slot.sight.strips();
            for (product, values) in slot
                .products
                .iter_mut()
                .zip(memory.values.chunks_exact(most))
            {
                hmx.multiply(slot.scores, &values[strips.clone()]);
                hmx.store(product);
            }
        }
        self.engine.step(None, slots, |slot| {
            if let Some(slot) = slot {
                hvx::widest(Add {
                    n_pairs: self.tile_rows(slot.tile).len().div_ceil(2),
                    is_first: slot.is_first,
                    restore: RESTORES[which],
                    products: slot.products,
                    scales: slot.scales,
                    sums: &mut slot.state[MAXIMA + SUMS..],
                });
            }
        });
        next
    }

    /// Turns the scores of a tile of rows into weights.
    fn weigh(
        &self,
        slot: &mut GroupTile<'_>,
        positions: &Range<usize>,
        factor: f32,
        table: &[Line; TABLE_LINES],
    ) {
        let rows = self.tile_rows(slot.tile);
        let tile = RowTile {
            first_row: rows.start,
            n_rows: rows.len(),
            first_query: self.first,
            kv_head: self.kv_head,
            stream: self.stream,
        };
        let strips = slot.sight.strips();
        let start = positions.start + strips.start * TILE_DIM;
        let positions = start..positions.end.min(positions.start + strips.end * TILE_DIM);
        if slot.is_exact {
            hvx::widest(Adjust {
                job: self.job,
                rows: tile,
                factor,
                positions,
                scores: slot.scores,
            });
        } else if slot.sight.mixed() != 0 {
            hvx::widest(Hide {
                job: self.job,
                rows: tile,
                mask: self.job.src.mask.as_ref(),
                positions,
                mixed: slot.sight.mixed(),
                scores: slot.scores,
            });
        }
        let (maxima, sums) = slot.state.split_at_mut(MAXIMA);
        hvx::widest(Weigh {
            n_pairs: rows.len().div_ceil(2),
            is_first: slot.is_first,
            table,
            scores: slot.scores,
            maxima,
            sums: &mut sums[..SUMS],
            scales: slot.scales,
        });
    }
}
