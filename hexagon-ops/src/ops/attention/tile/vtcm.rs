//! Sizes of an attention on the matrix unit, and the places of its parts in VTCM.

use super::sight::{CHUNK, can_look_at};
use crate::error::Result;
use crate::hmx::{Form, MAX_DEEP, ScaleBlock};
use crate::layout::{F16_TILE_LINES, LINE_BYTES, Line, TILE_DIM, Tile};
use crate::ops::attention::kv::SLAB;
use crate::ops::attention::{Job, TABLE_LINES};
use crate::ops::tensor::{Shape, Type};
use crate::rt::{Arena, CopyShape, has_descriptor};

/// Most tiles of rows of a group.
pub(super) const GROUP: usize = 8;
/// Groups that a head should have, so that most of its steps use all units.
const GROUPS: usize = 4;
/// Most tiles of rows of a batch: they are bits of a word.
pub(super) const MAX_ROW_TILES: usize = 64;
/// Most lines of a value.
pub(super) const MAX_VALUE_LINES: usize = 16;
/// Most strips of a block of positions: all of them are one product with values.
pub(super) const MAX_STRIPS: usize = MAX_DEEP;
/// Fewest strips of a block.
const MIN_STRIPS: usize = 4;
/// Strips of positions that a task packs.
pub(super) const PART: usize = 8;
/// Most parts of a block.
pub(super) const MAX_PARTS: usize = MAX_STRIPS / PART;
/// Scales of the unit's stores, 2^-5 and 2^-10 for results that may leave FP16's range, 2^10 for
/// products with small values, and 1 for a unit without scales; and their inverses, as f16.
const STORES: [u16; 4] = [0x2800, 0x1400, 0x6400, 0x3c00];
pub(super) const RESTORES: [u16; STORES.len()] = [0x5000, 0x6400, 0x1400, 0x3c00];
/// Number of the scale 1.
pub(super) const UNSCALED: usize = 3;
/// Buffers of scores and of products: each stage of a step has its own ([`super::group`]).
const SCORES: usize = 3;
const PRODUCTS: usize = 2;
/// Number of buffers for copies: one is read while the other is filled.
pub(super) const COPIES: usize = 2;
/// Lines after the last row of a buffer, which a row's vectors may reach.
const SPARE: usize = 1;
/// Lines of f16 maxima and of f32 sums of a tile of rows.
pub(super) const MAXIMA: usize = F16_TILE_LINES;
pub(super) const SUMS: usize = TILE_DIM;

/// The operands of blocks that the DMA engine copies to VTCM; loads read the others in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Copied {
    Nothing,
    /// Keys and values.
    Cache,
    /// Keys, values and the mask.
    CacheAndMask,
}

/// Returns the bytes from one row of keys or values to the next in VTCM: whole lines, so that a
/// row's vectors are aligned.
pub(super) fn stride(shape: &Shape) -> usize {
    shape.row_bytes().next_multiple_of(LINE_BYTES)
}

/// Sizes of an attention in tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::ops::attention) struct TilePlan {
    /// Queries of a batch.
    pub(super) queries: usize,
    /// Tiles of rows of a batch.
    pub(super) row_tiles: usize,
    /// Tiles of a query or key.
    pub(super) k_tiles: usize,
    /// Strips of values: 64 elements are two.
    pub(super) v_strips: usize,
    /// Most strips of positions of a block, an even number.
    pub(super) strips: usize,
    /// Most tiles of rows of a group.
    pub(super) group: usize,
    /// The operands that are copied, and the lines of a row of keys and of values there.
    pub(super) copied: Copied,
    row_lines: [usize; 2],
}

/// Returns the tiles of a group: as many for each thread, and all if that leaves only one group.
fn group_of(row_tiles: usize, threads: usize) -> usize {
    let threads = threads.clamp(1, GROUP);
    if threads == 1 || row_tiles <= threads {
        return GROUP.min(row_tiles);
    }
    let group = (row_tiles / GROUPS).clamp(threads, GROUP);
    group - group % threads
}

impl TilePlan {
    /// Plans all queries at once, or as many as fit; `None` if this code path cannot compute the
    /// attention. Smaller groups are tried before shorter blocks, because they change no result.
    pub(in crate::ops::attention) fn new(
        job: &Job<'_>,
        queries: usize,
        vtcm_tiles: usize,
        threads: usize,
    ) -> Option<Self> {
        let (q, k, v) = (&job.src.q.shape, &job.src.k.shape, &job.src.v.shape);
        // All types but F32 fit into FP16's precision; `run` finds values beyond FP16's range.
        let fits = |dtype| dtype != Type::F32;
        let dense = q.has_dense_rows() && k.has_dense_rows() && v.has_dense_rows();
        if job.dv > MAX_VALUE_LINES || !fits(k.dtype) || !fits(v.dtype) || !dense {
            return None;
        }
        let most = job.positions.max(1).div_ceil(TILE_DIM).next_multiple_of(2);
        let mut plan = Self {
            queries,
            row_tiles: 0,
            k_tiles: job.dk,
            v_strips: v.ne[0].div_ceil(SLAB) * 2,
            strips: 0,
            group: 0,
            copied: Copied::Nothing,
            row_lines: [k, v].map(|shape| stride(shape) / LINE_BYTES),
        };
        loop {
            plan.row_tiles = (job.group * plan.queries).div_ceil(TILE_DIM);
            plan.strips = MAX_STRIPS;
            while plan.row_tiles <= MAX_ROW_TILES && plan.strips >= MIN_STRIPS {
                plan.strips = plan.strips.min(most);
                plan.group = group_of(plan.row_tiles, threads);
                while plan.tiles() > vtcm_tiles && plan.group > 1 {
                    plan.group /= 2;
                }
                if plan.tiles() <= vtcm_tiles {
                    return Some(plan.with_copies(job, vtcm_tiles));
                }
                plan.strips = (plan.strips / 2).next_multiple_of(2).min(plan.strips - 1);
            }
            if plan.queries == 1 {
                return None;
            }
            plan.queries = plan.queries.div_ceil(2);
        }
    }

    /// Returns `true` if the DMA engine reads keys and values.
    pub(in crate::ops::attention) fn copies_cache(&self) -> bool {
        self.copied != Copied::Nothing
    }

    /// Returns `true` if the mask is copied, too.
    pub(in crate::ops::attention) fn copies_mask(&self) -> bool {
        self.copied == Copied::CacheAndMask
    }

    /// Adds as many copies as have room. They change no result.
    fn with_copies(self, job: &Job<'_>, vtcm_tiles: usize) -> Self {
        let src = &job.src;
        let most = [Copied::CacheAndMask, Copied::Cache].map(|copied| Self { copied, ..self });
        let is_copied = |plan: &Self| {
            let mask = src.mask.as_ref().map(|mask| &mask.shape);
            (plan.copied == Copied::Cache || mask.is_some_and(|mask| plan.takes_mask(job, mask)))
                && [&src.k.shape, &src.v.shape]
                    .iter()
                    .all(|cache| has_descriptor(&plan.cache_copy(cache, job.positions)))
                && plan.tiles() <= vtcm_tiles
        };
        most.into_iter().find(is_copied).unwrap_or(self)
    }

    /// Returns `true` if the mask is copied to VTCM: its type and shape are supported, its rows
    /// have whole chunks of positions, and so many queries read it that the processor would wait
    /// for it.
    fn takes_mask(&self, job: &Job<'_>, mask: &Shape) -> bool {
        can_look_at(mask)
            && self.queries > TILE_DIM
            && job.positions.next_multiple_of(CHUNK) <= mask.ne[0]
            && has_descriptor(&self.mask_copy(mask, self.queries, job.positions))
    }

    /// Returns the copy of up to a block of keys or values.
    pub(super) fn cache_copy(&self, cache: &Shape, positions: usize) -> CopyShape {
        CopyShape {
            rows: positions.min(self.strips * TILE_DIM),
            row_bytes: cache.row_bytes(),
            from_stride: cache.nb[1],
            to_stride: stride(cache),
        }
    }

    /// Returns the copy of up to a block of the rows of a mask: whole chunks, which all are looked
    /// at.
    pub(super) fn mask_copy(&self, mask: &Shape, queries: usize, positions: usize) -> CopyShape {
        let positions = positions.min(self.strips * TILE_DIM);
        CopyShape {
            rows: queries,
            row_bytes: 2 * positions.next_multiple_of(CHUNK),
            from_stride: mask.nb[1],
            to_stride: self.mask_stride(),
        }
    }

    /// Returns the bytes from one row of a copied mask to the next: whole lines, since the number
    /// of strips is even.
    pub(super) fn mask_stride(&self) -> usize {
        2 * self.strips * TILE_DIM
    }

    /// Returns the lines of each buffer of keys, of values and of the mask.
    fn copied_lines(&self) -> [usize; 3] {
        if self.copied == Copied::Nothing {
            return [0; 3];
        }
        // This cannot overflow: a plan without copies fits in VTCM, so rows are short.
        let of_rows = |lines| lines * self.strips * TILE_DIM + SPARE;
        let [of_keys, of_values] = self.row_lines.map(of_rows);
        let of_mask = match self.copied {
            Copied::CacheAndMask => self.queries * self.mask_stride() / LINE_BYTES,
            Copied::Cache | Copied::Nothing => 0,
        };
        [of_keys, of_values, of_mask]
    }

    /// Returns the lines of the state of a tile of rows: maxima, sums, values.
    pub(super) fn state_lines(&self) -> usize {
        MAXIMA + SUMS + self.v_strips * TILE_DIM
    }

    /// Returns the number of 64 elements of a value.
    pub(super) fn slabs(&self) -> usize {
        self.v_strips / 2
    }

    /// Returns the number of parts of a block's positions.
    pub(super) fn parts(&self) -> usize {
        self.strips.div_ceil(PART)
    }

    /// Returns the number of buffers of scores and of scales, and of products.
    fn buffers(&self) -> [usize; 2] {
        // With a single group, its stages run one after another and share the first buffer of each
        // kind.
        if self.row_tiles <= self.group {
            [1, 1]
        } else {
            [SCORES, PRODUCTS]
        }
    }

    /// Returns the lines of largest magnitudes, one for each task that packs.
    fn largest_lines(&self) -> usize {
        self.parts() * (self.slabs() + 1)
    }

    /// Returns the tiles of VTCM that are needed.
    fn tiles(&self) -> usize {
        let scales = STORES.len() + self.row_tiles;
        let lines = scales * size_of::<ScaleBlock>() / LINE_BYTES
            + self.row_tiles * self.state_lines()
            + self.largest_lines();
        // There are three kinds of lines, and each is rounded up to whole tiles.
        let kinds = 3;
        let [scores, products] = self.buffers();
        let copied = self.copied_lines();
        let copied = copied.map(|lines| COPIES * lines.div_ceil(F16_TILE_LINES));
        kinds
            + copied.iter().sum::<usize>()
            + lines / F16_TILE_LINES
            + self.strips * (self.k_tiles + self.v_strips)
            + self.row_tiles * self.k_tiles
            // Each tile of scores has an extra tile of scales.
            + self.group * (scores * (self.strips + 1) + products * self.v_strips)
    }
}

/// The parts of VTCM that an attention uses.
pub(super) struct TileMemory<'v> {
    pub(super) table: &'v [Line; TABLE_LINES],
    /// Scales of stores, in the order of [`RESTORES`].
    pub(super) stores: &'v [ScaleBlock],
    /// For each tile of rows, the scale of its scores.
    pub(super) factors: &'v mut [ScaleBlock],
    /// Tiles of keys, for each 32 positions.
    pub(super) keys: &'v mut [Tile],
    /// For each strip, a tile for each 32 positions.
    pub(super) values: &'v mut [Tile],
    /// Largest magnitudes: for each part of the positions, those of its keys, then those of values,
    /// for each 64 elements.
    pub(super) largest: &'v mut [Line],
    pub(super) queries: &'v mut [Tile],
    pub(super) state: &'v mut [Line],
    /// Scores of three groups, which become weights; all but the first are empty for a single
    /// group.
    pub(super) scores: [&'v mut [Tile]; SCORES],
    /// For each tile whose scores became weights, the scales of its sums.
    pub(super) scales: [&'v mut [Line]; SCORES],
    /// Products of weights and values of two groups.
    pub(super) products: [&'v mut [Tile]; PRODUCTS],
}

/// The parts of VTCM that copies fill; empty if nothing is copied.
pub(super) struct CopyMemory<'v> {
    pub(super) keys: [&'v mut [Line]; COPIES],
    pub(super) values: [&'v mut [Line]; COPIES],
    pub(super) masks: [&'v mut [Line]; COPIES],
}

impl<'v> TileMemory<'v> {
    /// Allocates its parts in `vtcm`, and those of copies. `table` is in VTCM, too.
    pub(super) fn new(
        plan: &TilePlan,
        vtcm: &'v mut [Tile],
        table: &'v [Line; TABLE_LINES],
        form: Form,
    ) -> Result<(Self, CopyMemory<'v>)> {
        let mut arena = Arena::new(vtcm);
        let block_lines = size_of::<ScaleBlock>() / LINE_BYTES;
        let blocks = arena.lines(
            "scales of stores",
            (STORES.len() + plan.row_tiles) * block_lines,
        )?;
        let blocks: &mut [ScaleBlock] = bytemuck::cast_slice_mut(blocks);
        let (stores, factors) = blocks.split_at_mut(STORES.len());
        for (block, scale) in stores.iter_mut().zip(STORES) {
            block.set(scale);
            if form == Form::RoundOnly {
                // The control block of the older form is zero.
                block.set(0);
            }
        }
        let [n_scores, n_products] = plan.buffers();
        // If there is a single group, the other buffers are empty.
        let of = |buffer: usize, buffers: usize| if buffer < buffers { plan.group } else { 0 };
        let copied = plan.copied_lines();
        let mut copies = [(); 3].map(|()| [&mut [][..], &mut [][..]]);
        for (buffers, lines) in copies.iter_mut().zip(copied) {
            for buffer in buffers.iter_mut().filter(|_| lines > 0) {
                *buffer = arena.lines("copies", lines)?;
            }
        }
        let [keys, values, masks] = copies;
        let copies = CopyMemory {
            keys,
            values,
            masks,
        };
        let memory = Self {
            table,
            stores,
            factors,
            keys: arena.tiles("keys", plan.strips * plan.k_tiles)?,
            values: arena.tiles("values", plan.strips * plan.v_strips)?,
            largest: arena.lines("magnitudes", plan.largest_lines())?,
            queries: arena.tiles("queries", plan.row_tiles * plan.k_tiles)?,
            state: arena.lines("sums", plan.row_tiles * plan.state_lines())?,
            scores: [
                arena.tiles("scores", of(0, n_scores) * plan.strips)?,
                arena.tiles("scores", of(1, n_scores) * plan.strips)?,
                arena.tiles("scores", of(2, n_scores) * plan.strips)?,
            ],
            scales: [
                arena.lines("scales", of(0, n_scores) * F16_TILE_LINES)?,
                arena.lines("scales", of(1, n_scores) * F16_TILE_LINES)?,
                arena.lines("scales", of(2, n_scores) * F16_TILE_LINES)?,
            ],
            products: [
                arena.tiles("products", of(0, n_products) * plan.v_strips)?,
                arena.tiles("products", of(1, n_products) * plan.v_strips)?,
            ],
        };
        Ok((memory, copies))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_keep_all_threads_busy_and_are_several() {
        // For a number of row tiles and threads: the tiles of a group.
        for (given, want) in [
            ([1, 1], 1),
            ([64, 1], 8),
            ([1, 4], 1),
            ([4, 4], 4),
            ([5, 4], 4),
            ([16, 4], 4),
            ([64, 4], 8),
            ([8, 2], 2),
            ([64, 6], 6),
            ([64, 9], 8),
        ] {
            assert_eq!(group_of(given[0], given[1]), want, "{given:?}");
        }
    }
}
