//! Sizes of an attention on the matrix unit, and the places of its parts in VTCM.

use crate::error::Result;
use crate::hmx::{Hmx, ScaleBlock};
use crate::hvx;
use crate::layout::{F16_TILE_LINES, LINE_BYTES, Line, TILE_DIM, Tile};
use crate::ops::attention::kv::SLAB;
use crate::ops::attention::weigh::STRIPS;
use crate::ops::attention::{Job, TABLE_LINES};
use crate::ops::matmul::act::RowFactor;
use crate::ops::tensor::Type;
use crate::rt::Arena;

/// Tiles of rows that are computed at a time.
pub(super) const GROUP: usize = 8;
/// Most tiles of rows of a batch: they are bits of a word.
pub(super) const MAX_ROW_TILES: usize = 64;
/// Most lines of a value.
pub(super) const MAX_VALUE_LINES: usize = 16;
/// Scale of the unit's stores, 2^-5, and its inverse, as f16.
const STORE: u16 = 0x2800;
pub(super) const RESTORE: u16 = 0x5000;
/// Lines of f16 maxima and of f32 sums of a tile of rows.
pub(super) const MAXIMA: usize = F16_TILE_LINES;
pub(super) const SUMS: usize = TILE_DIM;

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
}

impl TilePlan {
    /// Plans all queries at once, or as many as fit; `None` if this code path cannot compute the
    /// attention.
    pub(in crate::ops::attention) fn new(
        job: &Job<'_>,
        queries: usize,
        vtcm_tiles: usize,
    ) -> Option<Self> {
        let (q, k, v) = (&job.src.q.shape, &job.src.k.shape, &job.src.v.shape);
        // FP16 holds every value of these types; f32 may exceed it.
        let fits = |dtype| matches!(dtype, Type::F16 | Type::Q8_0 | Type::Q4_0);
        let dense = q.has_dense_rows() && k.has_dense_rows() && v.has_dense_rows();
        if job.dv > MAX_VALUE_LINES || !fits(k.dtype) || !fits(v.dtype) || !dense {
            return None;
        }
        let mut plan = Self {
            queries,
            row_tiles: 0,
            k_tiles: job.dk,
            v_strips: v.ne[0].div_ceil(SLAB) * 2,
        };
        loop {
            plan.row_tiles = (job.group * plan.queries).div_ceil(TILE_DIM);
            if plan.row_tiles <= MAX_ROW_TILES && plan.tiles() <= vtcm_tiles {
                return Some(plan);
            }
            if plan.queries == 1 {
                return None;
            }
            plan.queries = plan.queries.div_ceil(2);
        }
    }

    /// Returns the lines of the state of a tile of rows: maxima, sums, values.
    pub(super) fn state_lines(&self) -> usize {
        MAXIMA + SUMS + self.v_strips * TILE_DIM
    }

    /// Returns the number of 64 elements of a value.
    pub(super) fn slabs(&self) -> usize {
        self.v_strips / 2
    }

    /// Returns the lines of largest magnitudes, one for each task that packs.
    fn largest_lines(&self) -> usize {
        STRIPS * (self.slabs() + 1)
    }

    /// Returns the tiles of VTCM that are needed.
    fn tiles(&self) -> usize {
        let lines = TABLE_LINES
            + self.row_tiles
                * (self.state_lines() + size_of::<[RowFactor; TILE_DIM]>() / LINE_BYTES)
            + GROUP * F16_TILE_LINES
            + self.largest_lines();
        // Each kind of lines is rounded up to tiles.
        let kinds = 5;
        let scale = 1;
        scale
            + kinds
            + lines / F16_TILE_LINES
            + STRIPS * (self.k_tiles + self.v_strips)
            + self.row_tiles * self.k_tiles
            + GROUP * (STRIPS + self.v_strips)
    }
}

/// The parts of VTCM that an attention uses.
pub(super) struct TileMemory<'v> {
    pub(super) table: &'v [Line; TABLE_LINES],
    /// Tiles of keys, for each 32 positions.
    pub(super) keys: &'v mut [Tile],
    /// For each strip, a tile for each 32 positions.
    pub(super) values: &'v mut [Tile],
    /// Largest magnitudes: those of values, for each 64 elements and 32 positions, then those of
    /// keys.
    pub(super) largest: &'v mut [Line],
    pub(super) queries: &'v mut [Tile],
    pub(super) factors: &'v mut [[RowFactor; TILE_DIM]],
    pub(super) state: &'v mut [Line],
    pub(super) scores: &'v mut [Tile],
    pub(super) scales: &'v mut [Line],
    pub(super) products: &'v mut [Tile],
}

impl<'v> TileMemory<'v> {
    /// Allocates its parts in `vtcm`, and prepares the unit.
    pub(super) fn new(
        plan: &TilePlan,
        vtcm: &'v mut [Tile],
        hmx: &mut Hmx,
        table: &[Line; TABLE_LINES],
    ) -> Result<Self> {
        let mut arena = Arena::new(vtcm);
        let scale: &mut [ScaleBlock] = bytemuck::cast_slice_mut(arena.tiles("scale block", 1)?);
        scale[0] = ScaleBlock::splat(STORE);
        hmx.clear();
        hmx.load_scale(&scale[0]);
        let copy = arena.lines("exponentials", table.len())?;
        hvx::copy(copy, table);
        let Some(table) = copy.first_chunk() else {
            unreachable!("the arena gave fewer lines than it was asked for")
        };
        let factor_lines = plan.row_tiles * size_of::<[RowFactor; TILE_DIM]>() / LINE_BYTES;
        Ok(Self {
            table,
            keys: arena.tiles("keys", STRIPS * plan.k_tiles)?,
            values: arena.tiles("values", STRIPS * plan.v_strips)?,
            largest: arena.lines("magnitudes", plan.largest_lines())?,
            queries: arena.tiles("queries", plan.row_tiles * plan.k_tiles)?,
            factors: bytemuck::cast_slice_mut(arena.lines("row factors", factor_lines)?),
            state: arena.lines("sums", plan.row_tiles * plan.state_lines())?,
            scores: arena.tiles("scores", GROUP * STRIPS)?,
            scales: arena.lines("scales", GROUP * F16_TILE_LINES)?,
            products: arena.tiles("products", GROUP * plan.v_strips)?,
        })
    }
}
