//! Super-blocks as blocks of 32: their scales of both levels become one plane of f16 scales and one
//! of minima, after which the tiles are those of a plain type.
//!
//! ```text
//! for each group of up to 4 super-blocks along K
//!   for each super-block
//!     scale[tile][n] = f16(d[n] · s[tile][n])      2 tiles a line, as the plain type has them
//!     min[tile][n]   = f16(-dmin[n] · m[tile][n])
//!   the plain type's kernel over the group's tiles
//! ```
//!
//! 1. **The kernels are those of the plain types.** With such scales, Q4_K's tiles are tiles of
//!    Q4_1, and Q5_K's are tiles of Q5_1, so nothing is compiled twice.
//! 2. **Scales are made group by group**, as many as the dot product takes at a time, and stay in
//!    the cache.
//! 3. **A scale is rounded once more than ggml's**, to FP16, which the tile is rounded to anyway.
//!    d is often subnormal in FP16. The emulator computes with subnormal numbers as with others; no
//!    public source says that the vector unit does.

use core::ops::Range;

use super::Panel;
use super::quantize::GROUP_TILES;
use crate::hvx::{self, LinePlanes, Vector};
use crate::layout::{Line, SUPER_TILES};

/// Lines of scales, or of minima, of a group.
const LINES: usize = GROUP_TILES / 2;
/// Super-blocks of a group.
pub(super) const GROUP_BLOCKS: usize = GROUP_TILES / SUPER_TILES;
/// Lines of scales of a super-block of Q4_K or Q5_K.
const Q4K_LINES: usize = 4;

/// f16 scales and minima of a group, as the planes of a panel.
pub(super) struct GroupPlanes(LinePlanes<LINES>);

impl GroupPlanes {
    /// Returns planes without lines.
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self(LinePlanes::unfilled())
    }

    /// Computes the planes of the super-blocks `blocks` of a panel, at most [`GROUP_BLOCKS`].
    /// Returns these super-blocks as a panel of the plain type.
    #[inline(always)]
    pub(super) fn expand<'a>(&'a mut self, panel: &Panel<'a>, blocks: Range<usize>) -> Panel<'a> {
        let tile_lines = panel.layout.weight().quant_tile_bytes() / size_of::<Line>();
        let block_lines = SUPER_TILES * tile_lines;
        scales_and_mins(&panel.scales.as_chunks().0[blocks.clone()], &mut self.0);
        let [scales, mins] = self.0.lines();
        Panel {
            layout: panel.layout.expanded(blocks.len()),
            quants: &panel.quants[blocks.start * block_lines..blocks.end * block_lines],
            scales,
            mins,
        }
    }
}

/// Computes the scales and minima of super-blocks with 6-bit fields.
#[cfg_attr(target_arch = "hexagon", inline(never))]
#[cfg_attr(not(target_arch = "hexagon"), inline(always))]
fn scales_and_mins(blocks: &[[Line; Q4K_LINES]], planes: &mut LinePlanes<LINES>) {
    planes.fill(blocks.iter().map(|[factors, first, second, third]| {
        let factors = hvx::load(factors);
        let d = hvx::interleave_even_h(factors, factors);
        let minus_dmin = hvx::interleave_odd_h(factors, factors);
        let [first, second, third] = [first, second, third].map(hvx::load);
        let lowest = hvx::splat_h(0x3f);
        let middle = hvx::splat_h(0x0f);
        let upper = hvx::splat_h(0x30);
        // Bits 9..6 of `low`, and above them the two bits of the third line that come out at 5..4.
        let last = |low: Vector, shift: i32| {
            hvx::or(
                hvx::and(hvx::shr_h(low, 6), middle),
                hvx::and(hvx::shr_h(third, shift), upper),
            )
        };
        let s = [
            hvx::and(first, lowest),
            hvx::shr_h(first, 10),
            hvx::and(third, lowest),
            last(first, 2),
        ];
        let m = [
            hvx::and(second, lowest),
            hvx::shr_h(second, 10),
            hvx::shr_h(third, 10),
            last(second, 4),
        ];
        [(s, d), (m, minus_dmin)].map(|(fields, factor)| {
            fields.map(|field| hvx::mul_f16(hvx::f16_from_h(field), factor))
        })
    }));
}
