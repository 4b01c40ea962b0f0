//! The plan of a GEMM: which part of M and N is in VTCM at once. The host's planner calls the same
//! functions.

use super::act::RowFactors;
use crate::error::{Error, Result};
use crate::layout::{F16_TILE_BYTES, MatrixLayout, TILE_DIM, WeightType};

/// Most strips of a group. More strips would only leave less room for M, because a step is long
/// enough already.
pub(super) const MAX_GROUP: usize = 8;
/// Sizes into which a product is cut so that it fits in VTCM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmPlan {
    /// Tiles of 32 rows that are in VTCM at once.
    pub m_tiles: usize,
    /// Strips of a group.
    pub group: usize,
}

impl GemmPlan {
    /// Returns the tiles of VTCM that the plan needs.
    #[must_use]
    pub const fn vtcm_tiles(self, layout: MatrixLayout) -> usize {
        let k_tiles = layout.k_tiles();
        let raw = match layout.panel().weight() {
            WeightType::F16 => 0,
            _ => (self.group * layout.panel().panel_bytes()).div_ceil(F16_TILE_BYTES),
        };
        let factors = (self.m_tiles * size_of::<RowFactors>()).div_ceil(F16_TILE_BYTES);
        let scale = 1;
        scale
            + factors
            + self.m_tiles * k_tiles
            + 2 * (raw + self.group * k_tiles + self.group * self.m_tiles)
    }

    /// Plans a product of `m` rows: all of M if it fits together with one strip, else the largest
    /// chunk; then the largest group.
    ///
    /// # Errors
    /// `VtcmFull` if not even 32 rows and one strip fit.
    pub fn new(layout: MatrixLayout, m: usize, vtcm_tiles: usize) -> Result<Self> {
        let fits = |plan: &Self| plan.vtcm_tiles(layout) <= vtcm_tiles;
        let smallest = Self {
            m_tiles: 1,
            group: 1,
        };
        if !fits(&smallest) {
            return Err(Error::VtcmFull {
                what: "32 rows and one strip",
                need_bytes: smallest.vtcm_tiles(layout) * F16_TILE_BYTES,
                have_bytes: vtcm_tiles * F16_TILE_BYTES,
            });
        }
        let mut plan = Self {
            m_tiles: m.div_ceil(TILE_DIM).max(1),
            group: 1,
        };
        if !fits(&plan) {
            let per_m_tile = layout.k_tiles() + 2;
            let over = plan.vtcm_tiles(layout) - vtcm_tiles;
            plan.m_tiles = plan
                .m_tiles
                .saturating_sub(over.div_ceil(per_m_tile))
                .max(1);
            // All chunks get about the same size, so that the last one is not a small remainder.
            let chunks = m.div_ceil(plan.m_tiles * TILE_DIM);
            plan.m_tiles = m.div_ceil(TILE_DIM).div_ceil(chunks);
        }
        while plan.group < MAX_GROUP.min(layout.n_strips())
            && fits(&Self {
                group: plan.group + 1,
                ..plan
            })
        {
            plan.group += 1;
        }
        Ok(plan)
    }
}
