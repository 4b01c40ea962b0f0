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
//!   for each block of up to 1024 positions, while the next one is copied to VTCM (`copies`)
//!     look at the mask                            for each tile of rows: the strips of positions that it sees
//!     pack keys and values                        once for all rows; NaN and infinity become zero
//!     for each group of up to 8 tiles of 32 rows  those that see a position of the block; groups overlap (`group`)
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
//!    its stores multiply by 2^-5, and scores are completed in f32 ([`super::scores`]), which caps,
//!    and masks that do more than hide, always require.
//! 5. **Exponentials by table** ([`super::table`]). Differences to the maximum are never positive,
//!    so an f16's magnitude indexes 32,768 entries in VTCM, and one gather instruction reads 64 of
//!    them.
//! 6. **Hidden positions cost nothing where they can be seen early.** A tile of rows leaves out the
//!    positions before the first and after the last that the mask shows to any of its rows.

mod copies;
mod finish;
mod group;
mod operands;
mod product;
mod queries;
mod sight;
mod sum;
mod vtcm;

use core::ops::Range;

use copies::{Ahead, BlockOperands};
use group::Block;
use operands::Magnitudes;
use queries::QueryTile;
use sight::{Look, Sight, can_look_at};
pub(super) use vtcm::TilePlan;
use vtcm::{Copied, GROUP, MAX_ROW_TILES, TileMemory};

use super::scores::BlockMask;
use super::{Job, TABLE_LINES};
use crate::error::{Error, Result};
use crate::hmx::{Form, Hmx};
use crate::hvx;
use crate::layout::{Line, TILE_DIM};
use crate::ops::matmul::Machine;
use crate::ops::tensor::ViewMut;
use crate::rt::Engine;

/// Computes an attention; the operands have been checked. Returns `false` if FP16 does not hold a
/// key or a value, or not enough of a score, and `dst` is to be computed by dot products then.
pub(super) fn run(
    job: &Job<'_>,
    plan: &TilePlan,
    machine: Machine<'_>,
    table: &[Line; TABLE_LINES],
    dst: &mut ViewMut<'_>,
) -> Result<bool> {
    let Machine { engine, vtcm, hmx } = machine;
    hmx.take_fault();
    let (mut memory, copies) = TileMemory::new(plan, vtcm, table, hmx.form())?;
    let mut ahead = Ahead::new(job, plan, engine, copies);
    let mut tiles = Tiles::NEW;
    let [_, queries, _, streams] = job.src.q.shape.ne;
    for stream in 0..streams {
        for first in (0..queries).step_by(plan.queries) {
            if let Some(mask) = job.src.mask.filter(|_| plan.copied != Copied::CacheAndMask) {
                mask.fetch([first, 0, stream], plan.queries.min(queries - first));
            }
            for kv_head in 0..job.kv_heads {
                let head = Head {
                    job,
                    plan,
                    engine,
                    stream,
                    kv_head,
                    first,
                    form: hmx.form(),
                    rows: job.group * plan.queries.min(queries - first),
                };
                if !head.run(&mut tiles, &mut memory, &mut ahead, hmx, dst) {
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
    /// The unit that computes the products.
    form: Form,
}

/// A block of positions that is to be attended to.
struct NextBlock {
    positions: Range<usize>,
    /// The part that any tile of rows sees; `None` if the mask has not been looked at.
    used: Option<Sight>,
}

/// The tiles of rows of a head. All heads use the same memory, which is not cleared in between,
/// because clearing would cost half as much as a block of a token.
struct Tiles {
    queries: [QueryTile; MAX_ROW_TILES],
    /// Sights of the tiles for the current block, and for the next one if it was looked at.
    sights: [Sight; MAX_ROW_TILES],
    next_sights: [Sight; MAX_ROW_TILES],
    /// A bit for each tile that has seen a position.
    seen: u64,
}

impl Tiles {
    const NEW: Self = Self {
        queries: [QueryTile::EMPTY; MAX_ROW_TILES],
        sights: [Sight::EMPTY; MAX_ROW_TILES],
        next_sights: [Sight::EMPTY; MAX_ROW_TILES],
        seen: 0,
    };
}

impl Head<'_> {
    /// Computes the rows; `false` as [`run`].
    fn run(
        &self,
        tiles: &mut Tiles,
        memory: &mut TileMemory<'_>,
        ahead: &mut Ahead<'_, '_>,
        hmx: &mut Hmx,
        dst: &mut ViewMut<'_>,
    ) -> bool {
        tiles.seen = 0;
        let mut next = self.next_block(0, tiles);
        let first = next.as_ref().map_or(0, |block| block.positions.start);
        match &next {
            None => self.begin(memory, tiles),
            Some(_) => ahead.bring(self.place(first), || self.begin(memory, tiles)),
        }
        while let Some(block) = next {
            let n_tiles = self.n_tiles();
            tiles.sights[..n_tiles].copy_from_slice(&tiles.next_sights[..n_tiles]);
            next = self.next_block(block.positions.end, tiles);
            let coming = match &next {
                Some(next) => Some(self.place(next.positions.start)),
                None => self.after(first),
            };
            let place = self.place(block.positions.start);
            ahead.bring(place, || ());
            let is_done = ahead.work(place, coming, |operands| {
                self.block(&block, operands, tiles, memory, hmx)
            });
            if !is_done {
                return false;
            }
        }
        if self.has_large_scores(memory.state, tiles) {
            return false;
        }
        self.write(memory, tiles, dst);
        true
    }

    /// Returns the first block starting with position `start` or later that any tile of rows sees,
    /// as far as that is known before it is copied. Looks at it if loads read the mask.
    fn next_block(&self, start: usize, tiles: &mut Tiles) -> Option<NextBlock> {
        let length = self.plan.strips * TILE_DIM;
        let mut start = start;
        while start < self.job.positions {
            let positions = start..self.job.positions.min(start + length);
            if self.plan.copied == Copied::CacheAndMask {
                return Some(NextBlock {
                    positions,
                    used: None,
                });
            }
            start = positions.end;
            let mask = self.mask_in_place();
            let used = self.look(mask.as_ref(), &positions, &mut tiles.next_sights);
            if !used.is_none() {
                return Some(NextBlock {
                    positions,
                    used: Some(used),
                });
            }
        }
        None
    }

    /// Adds the contribution of a block; `false` as [`run`].
    #[inline(never)]
    fn block(
        &self,
        block: &NextBlock,
        operands: &BlockOperands<'_>,
        tiles: &mut Tiles,
        memory: &mut TileMemory<'_>,
        hmx: &mut Hmx,
    ) -> bool {
        let NextBlock { positions, used } = block;
        let mask = operands.mask.as_ref();
        let used = match used {
            Some(used) => *used,
            None => self.look(mask, positions, &mut tiles.sights),
        };
        if used.is_none() {
            return true;
        }
        let strips = used.strips();
        let packed = match self.pack(positions, &strips, operands, memory) {
            Some(packed) => packed,
            None if !self.job.is_f16() => return false,
            None => {
                let exceptions = self.clear(&strips, memory);
                self.spoil(positions, mask, &exceptions, tiles);
                // The exact magnitudes of the other values are unknown, so assume the largest.
                Magnitudes {
                    key: f32::INFINITY,
                    value: f32::INFINITY,
                }
            }
        };
        let block = Block {
            positions: positions.clone(),
            operands,
            packed,
        };
        let Some(scale) = block.scale(self.form) else {
            return false;
        };
        self.attend(&block, scale, tiles, memory, hmx);
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

    /// Examines the mask of a block for each tile of rows. Returns the positions that any tile
    /// sees.
    fn look(
        &self,
        mask: Option<&BlockMask<'_>>,
        positions: &Range<usize>,
        sights: &mut [Sight; MAX_ROW_TILES],
    ) -> Sight {
        let sights = &mut sights[..self.n_tiles()];
        match (mask, mask.filter(|mask| can_look_at(&mask.view.shape))) {
            (None, _) => sights.fill(Sight::all(positions.len())),
            (Some(_), None) => sights.fill(Sight::unknown(positions.len())),
            (_, Some(mask)) => self.look_at(mask, positions, sights),
        }
        sights.iter().fold(Sight::NONE, |all, sight| all.or(*sight))
    }

    /// Looks at an f16 mask.
    fn look_at(&self, mask: &BlockMask<'_>, positions: &Range<usize>, sights: &mut [Sight]) {
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
}
