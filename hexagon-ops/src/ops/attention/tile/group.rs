//! The stages of a block's tiles of rows, and the steps in which groups of tiles go through them.
//!
//! A tile goes through four stages, alternately on the matrix unit and on the vector units. In one
//! *step*, each stage works on a different group, so that both kinds of units are busy:
//!
//! ```text
//! for each step t in 0 .. n_groups + 3
//!   matrix unit    scores      group t        scores = queries · keys
//!                  products    group t - 2    products = weights · values
//!   vector units   weigh       group t - 1    scores become weights, a task for each tile
//!                  add         group t - 3    values = values · scale + products, a task for each tile
//!   rotate the three buffers of scores and of scales, swap the two of products
//! ```
//!
//! 1. There is no synchronization but the end of a step, and the borrows of a step prove that no
//!    task writes memory that another task reads, as in [`crate::ops::matmul`].
//! 2. A tile belongs to one group of a block, and the steps of a block end before those of the next
//!    one begin. Maxima and sums of a tile are therefore updated block after block, and the results
//!    do not depend on the size of groups.
//! 3. A group has at least one tile for each thread (`TilePlan`): softmax is slower than the
//!    products, so an idle thread costs more than an idle matrix unit.
//! 4. A block with a single group has nothing to overlap. Its stages follow each other, in the
//!    first buffer of each kind.

use core::ops::Range;

use super::copies::BlockOperands;
use super::operands::Magnitudes;
use super::product::{Fixed, Products};
use super::sight::Sight;
use super::sum::Add;
use super::vtcm::{GROUP, MAXIMA, RESTORES, SUMS, TileMemory, UNSCALED};
use super::{Head, QueryTile, Tiles};
use crate::hmx::{Form, Hmx};
use crate::hvx;
use crate::layout::{F16_TILE_LINES, Line, TILE_DIM, Tile};
use crate::ops::attention::TABLE_LINES;
use crate::ops::attention::scores::{Adjust, Hide, RowTile};
use crate::ops::attention::weigh::Weigh;
use crate::rt::MatrixPart;

/// Largest magnitude of scores that need no work in f32. Below this magnitude, rounding errors
/// cannot make scores leave FP16's range.
const SAFE: f32 = 60_000.0;
/// Largest magnitude of sums of values with the first of the scales of stores, and with the last
/// one. With the first, FP16 has too few bits for small sums.
const SAFE_SUM: f32 = 60_000.0 * 32.0;
const SMALL_SUM: f32 = 60_000.0 / 1024.0;
/// Stages that a group goes through.
const STAGES: usize = 4;

/// A block of positions whose keys and values are packed.
pub(super) struct Block<'a> {
    pub(super) positions: Range<usize>,
    pub(super) operands: &'a BlockOperands<'a>,
    /// Magnitudes of its keys and values.
    pub(super) packed: Magnitudes,
}

impl Block<'_> {
    /// Returns the number of the scale of stores of products with values; `None` if they may leave
    /// FP16's range without one.
    pub(super) fn scale(&self, form: Form) -> Option<usize> {
        // CAST: at most 1024 positions.
        #[expect(clippy::cast_precision_loss, reason = "at most 1024")]
        let largest = self.positions.len() as f32 * self.packed.value;
        if form == Form::RoundOnly {
            return (largest < SAFE).then_some(UNSCALED);
        }
        if largest < SMALL_SUM {
            return Some(2);
        }
        // The comparison is also false for infinity and NaN.
        let is_safe = largest < SAFE_SUM;
        Some(usize::from(!is_safe))
    }
}

/// A tile of rows that sees positions of the block.
#[derive(Clone, Copy)]
pub(super) struct GroupTile {
    /// Number of the tile.
    pub(super) tile: usize,
    pub(super) sight: Sight,
    /// No earlier block was visible.
    is_first: bool,
    /// Scores are completed in f32.
    pub(super) is_exact: bool,
}

/// Tiles that go through the stages together.
#[derive(Clone, Copy)]
struct Group {
    tiles: [GroupTile; GROUP],
    len: usize,
}

impl Group {
    const EMPTY: Self = Self {
        tiles: [GroupTile {
            tile: 0,
            sight: Sight::NONE,
            is_first: false,
            is_exact: false,
        }; GROUP],
        len: 0,
    };

    fn tiles(&self) -> &[GroupTile] {
        &self.tiles[..self.len]
    }
}

/// The part of a step that the vector units compute for a tile.
enum VectorTask<'t> {
    Weigh {
        it: GroupTile,
        scores: &'t mut [Tile],
        /// Maxima and sums of weights.
        state: &'t mut [Line],
        scales: &'t mut [Line],
    },
    Add {
        it: GroupTile,
        products: &'t [Tile],
        scales: &'t [Line],
        sums: &'t mut [Line],
    },
}

/// The groups of the vector units' stages in a step.
struct Vectors<'t> {
    weighed: &'t [GroupTile],
    scores: &'t mut [Tile],
    /// Scales that are written.
    new_scales: &'t mut [Line],
    added: &'t [GroupTile],
    products: &'t [Tile],
    /// Scales that were written with the weights of these products.
    scales: &'t [Line],
    state: &'t mut [Line],
}

/// The operands that all tasks of a block read.
#[derive(Clone, Copy)]
struct Shared<'t> {
    block: &'t Block<'t>,
    queries: &'t [QueryTile],
    table: &'t [Line; TABLE_LINES],
    scale: usize,
}

impl Head<'_> {
    /// Adds the contribution of a block of positions to all tiles of rows that see one of them.
    pub(super) fn attend(
        &self,
        block: &Block<'_>,
        scale: usize,
        tiles: &mut Tiles,
        memory: &mut TileMemory<'_>,
        hmx: &mut Hmx,
    ) {
        let sights = &tiles.sights[..self.n_tiles()];
        let n_visible = sights.iter().filter(|sight| !sight.is_none()).count();
        if n_visible <= self.plan.group {
            self.attend_in_order(block, scale, tiles, memory, hmx);
        } else {
            self.attend_by_steps(block, scale, tiles, memory, hmx);
        }
    }

    /// Sends a single group through the stages.
    fn attend_in_order(
        &self,
        block: &Block<'_>,
        scale: usize,
        tiles: &mut Tiles,
        memory: &mut TileMemory<'_>,
        hmx: &mut Hmx,
    ) {
        let group = self.next_group(&mut 0, block, tiles);
        let group = group.tiles();
        let TileMemory { state, table, .. } = memory;
        let fixed = Fixed {
            queries: memory.queries,
            keys: memory.keys,
            values: memory.values,
            stores: memory.stores,
            factors: memory.factors,
            k_tiles: self.plan.k_tiles,
            v_strips: self.plan.v_strips,
            strips: self.plan.strips,
            scale,
        };
        let shared = Shared {
            block,
            queries: &tiles.queries,
            table,
            scale,
        };
        let (scores, products) = (&mut *memory.scores[0], &mut *memory.products[0]);
        let scales = &mut *memory.scales[0];
        self.multiply(Products {
            hmx: &mut *hmx,
            fixed,
            scored: group,
            scores,
            multiplied: &[],
            weights: &[],
            products: &mut [],
        });
        if let [it] = group {
            // A single tile is computed directly, without a list of tasks.
            let all = self.plan.state_lines();
            let (state, sums) = state[it.tile * all..][..all].split_at_mut(MAXIMA + SUMS);
            self.weigh(shared, it, &mut scores[it.sight.strips()], state, scales);
            self.multiply(Products {
                hmx,
                fixed,
                scored: &[],
                scores: &mut [],
                multiplied: group,
                weights: scores,
                products,
            });
            self.add(shared, it, products, scales, sums);
            return;
        }
        let weighing = Vectors {
            weighed: group,
            scores,
            new_scales: scales,
            added: &[],
            products: &[],
            scales: &[],
            state,
        };
        self.step(shared, weighing, ());
        self.multiply(Products {
            hmx,
            fixed,
            scored: &[],
            scores: &mut [],
            multiplied: group,
            weights: scores,
            products,
        });
        let adding = Vectors {
            weighed: &[],
            scores: &mut [],
            new_scales: &mut [],
            added: group,
            products,
            scales,
            state,
        };
        self.step(shared, adding, ());
    }

    /// Sends several groups through the stages, each in a different one.
    fn attend_by_steps(
        &self,
        block: &Block<'_>,
        scale: usize,
        tiles: &mut Tiles,
        memory: &mut TileMemory<'_>,
        hmx: &mut Hmx,
    ) {
        let mut groups = [Group::EMPTY; STAGES];
        let mut next = 0;
        for t in 0.. {
            groups[t % STAGES] = self.next_group(&mut next, block, tiles);
            let [scored, weighed, multiplied, added] =
                [0, 1, 2, 3].map(|late| groups[(t + STAGES - late) % STAGES].tiles());
            if [scored, weighed, multiplied, added]
                .iter()
                .all(|group| group.is_empty())
            {
                return;
            }
            let [scores, weights, old_weights] = &mut memory.scores;
            let [new_scales, _, scales] = &mut memory.scales;
            let [products, ready] = &mut memory.products;
            let part = Products {
                hmx: &mut *hmx,
                fixed: Fixed {
                    queries: memory.queries,
                    keys: memory.keys,
                    values: memory.values,
                    stores: memory.stores,
                    factors: memory.factors,
                    k_tiles: self.plan.k_tiles,
                    v_strips: self.plan.v_strips,
                    strips: self.plan.strips,
                    scale,
                },
                scored,
                scores,
                multiplied,
                weights: old_weights,
                products,
            };
            let shared = Shared {
                block,
                queries: &tiles.queries,
                table: memory.table,
                scale,
            };
            let vectors = Vectors {
                weighed,
                scores: weights,
                new_scales,
                added,
                products: ready,
                scales,
                state: memory.state,
            };
            if self.form == Form::Vectors {
                part.by_vectors(self.engine);
                self.step(shared, vectors, ());
            } else {
                self.step(shared, vectors, part);
            }
            memory.scores.rotate_right(1);
            memory.scales.rotate_right(1);
            memory.products.swap(0, 1);
        }
    }

    /// Computes products without any vector task at the same time.
    fn multiply(&self, products: Products<'_>) {
        if self.form == Form::Vectors {
            products.by_vectors(self.engine);
        } else {
            self.engine.compute(products);
        }
    }

    /// Returns the next tiles that see a position of the block: none after the last one.
    fn next_group(&self, next: &mut usize, block: &Block<'_>, tiles: &mut Tiles) -> Group {
        let mut group = Group::EMPTY;
        while group.len < self.plan.group && *next < self.n_tiles() {
            let tile = *next;
            *next += 1;
            let sight = tiles.sights[tile];
            if sight.is_none() {
                continue;
            }
            group.tiles[group.len] = GroupTile {
                tile,
                sight,
                is_first: tiles.seen >> tile & 1 == 0,
                is_exact: self.is_exact(&tiles.queries[tile], sight, block.packed.key),
            };
            group.len += 1;
            tiles.seen |= 1 << tile;
        }
        group
    }

    /// Returns `true` if a tile's scores must be completed in f32.
    fn is_exact(&self, queries: &QueryTile, sight: Sight, key: f32) -> bool {
        let is_safe = queries.factor_f16.is_some() && queries.reach * key < SAFE;
        // If the unit cannot scale when it stores, the vector units apply the factor.
        let is_simple = self.form != Form::RoundOnly
            && self.job.softcap == 0.0
            && sight.only_hides
            && !self.job.slopes.is_used();
        !(is_safe && is_simple)
    }

    /// Runs a step: a task for each tile of the two groups, while the matrix unit does its part.
    fn step(&self, shared: Shared<'_>, vectors: Vectors<'_>, part: impl MatrixPart) {
        let Vectors { weighed, added, .. } = vectors;
        let mut tasks: [Option<VectorTask<'_>>; 2 * GROUP] = [const { None }; 2 * GROUP];
        // Tiles to add come first in memory, but the tiles to weigh take longer and are started
        // first.
        let (first, second) = tasks.split_at_mut(weighed.len());
        let mut states = vectors.state.chunks_mut(self.plan.state_lines());
        let mut passed = 0;
        let mut state_of = |it: &GroupTile| {
            let state = states.nth(it.tile - passed)?;
            passed = it.tile + 1;
            Some(state.split_at_mut(MAXIMA + SUMS))
        };
        let products = vectors.products.chunks(self.plan.v_strips.max(1));
        let products = products.zip(vectors.scales.chunks(F16_TILE_LINES));
        for (task, (it, (products, scales))) in second.iter_mut().zip(added.iter().zip(products)) {
            *task = state_of(it).map(|(_, sums)| VectorTask::Add {
                it: *it,
                products,
                scales,
                sums,
            });
        }
        let scores = vectors.scores.chunks_mut(self.plan.strips);
        let scores = scores.zip(vectors.new_scales.chunks_mut(F16_TILE_LINES));
        for (task, (it, (scores, scales))) in first.iter_mut().zip(weighed.iter().zip(scores)) {
            *task = state_of(it).map(|(state, _)| VectorTask::Weigh {
                it: *it,
                scores: &mut scores[it.sight.strips()],
                state,
                scales,
            });
        }
        let tasks = &mut tasks[..weighed.len() + added.len()];
        self.engine
            .step_with_matrix(None, part, tasks, |task| match task {
                Some(VectorTask::Weigh {
                    it,
                    scores,
                    state,
                    scales,
                }) => self.weigh(shared, it, scores, state, scales),
                Some(VectorTask::Add {
                    it,
                    products,
                    scales,
                    sums,
                }) => self.add(shared, it, products, scales, sums),
                None => {}
            });
    }

    /// Adds the products of a tile of rows to its sums.
    fn add(
        &self,
        shared: Shared<'_>,
        it: &GroupTile,
        products: &[Tile],
        scales: &[Line],
        sums: &mut [Line],
    ) {
        hvx::widest(Add {
            n_pairs: self.tile_rows(it.tile).len().div_ceil(2),
            is_first: it.is_first,
            restore: RESTORES[shared.scale],
            products,
            scales,
            sums,
        });
    }

    /// Turns the scores of a tile of rows into weights.
    fn weigh(
        &self,
        Shared {
            block,
            queries,
            table,
            ..
        }: Shared<'_>,
        it: &GroupTile,
        scores: &mut [Tile],
        state: &mut [Line],
        scales: &mut [Line],
    ) {
        let rows = self.tile_rows(it.tile);
        let tile = RowTile {
            first_row: rows.start,
            n_rows: rows.len(),
            first_query: self.first,
            kv_head: self.kv_head,
            stream: self.stream,
        };
        let (strips, all) = (it.sight.strips(), &block.positions);
        let start = all.start + strips.start * TILE_DIM;
        let positions = start..all.end.min(all.start + strips.end * TILE_DIM);
        if it.is_exact {
            hvx::widest(Adjust {
                job: self.job,
                rows: tile,
                mask: block.operands.mask.as_ref(),
                factor: queries[it.tile].factor,
                positions,
                scores,
            });
        } else if it.sight.mixed() != 0 {
            hvx::widest(Hide {
                job: self.job,
                rows: tile,
                mask: block.operands.mask.as_ref(),
                positions,
                mixed: it.sight.mixed(),
                scores,
            });
        }
        let (maxima, sums) = state.split_at_mut(MAXIMA);
        hvx::widest(Weigh {
            n_pairs: rows.len().div_ceil(2),
            is_first: it.is_first,
            table,
            scores,
            maxima,
            sums,
            scales,
        });
    }
}
