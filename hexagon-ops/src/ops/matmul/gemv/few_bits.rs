//! Dot products of super-blocks with two or three bits a weight and a scale for each 16: Q2_K and
//! Q3_K.
//!
//! ```text
//! for each group of 1024 along K, each strip, each super-block
//!   sum[n] = 0
//!   for each tile
//!     dot[h][n]  = Σ quants · act over half a block              u8 · i8
//!     x[n]       = s[0][n] · dot[0][n] + s[1][n] · dot[1][n]
//!                  Q3_K: - 4 · (s[0][n] · half[0] + s[1][n] · half[1])
//!     sum[n]    += f32(x[n]) · activation scale[tile]
//!   total[n] += sum[n] · d[n]
//!   Q2_K: total[n] -= Σ over halves of tiles (m[n] · fixed) · dmin[n]
//! ```
//!
//! `half` is the sum of the 16 activations of half a block, `fixed` the same times their scale.
//!
//! 1. **Quants are not shifted.** A mask selects the quants at one position of the bytes. The sums
//!    of the positions are shifted instead, which is a few shifts for a tile.
//! 2. **One multiplication for both halves.** A sum of 16 products of Q3_K fits in 16 bits, so one
//!    instruction multiplies both halves' sums in a word with both scales. For Q2_K the sums of the
//!    second half are 16 times too large, and so are the scales of the first half as they are
//!    stored. The products of both halves then agree, and neither needs a shift.
//! 3. **Minima are integers, too.** `fixed` is a fixed-point number of three bytes. Each byte
//!    multiplies the minima of two tiles at a time, in their stored form. The lower bytes are
//!    signed, so the sum of the three products is exact.

mod three_bits;
mod two_bits;

use core::ops::Range;

pub(super) use self::three_bits::ThreeBitDots;
pub(super) use self::two_bits::TwoBitDots;
use super::super::Panel;
use super::super::quantize::{ActGroup, ActRow};
use super::super::super_block::GROUP_BLOCKS;
use super::{first_of, times_factors};
use crate::hvx::{self, Accumulator, Vector};
use crate::layout::{Line, SUPER_TILES};

/// A type of this module: its dot products over super-blocks of one strip.
pub(super) trait FewBits {
    /// Terms of a group of activations, in which no weight has a part.
    type Row: Copy;

    /// Returns the terms of a group.
    fn row(group: ActGroup<'_>) -> Self::Row;

    /// Writes the start values of a row's sums over the super-blocks `blocks` of panels, f32 before
    /// the row's factor.
    #[inline(always)]
    fn starts<const S: usize>(
        _panels: [&Panel<'_>; S],
        _blocks: Range<usize>,
        _row: &Self::Row,
        out: &mut [Line; S],
    ) {
        hvx::clear(out);
    }

    /// Returns `starts` plus the sums over the super-blocks `blocks` of a panel.
    fn sums<const R: usize>(
        panel: &Panel<'_>,
        blocks: Range<usize>,
        group: [ActGroup<'_>; R],
        rows: &[Self::Row; R],
        starts: [Vector; R],
    ) -> [Vector; R];
}

/// Computes the products of `S` strips with `R` rows.
#[cfg_attr(target_arch = "hexagon", inline(never))]
#[cfg_attr(not(target_arch = "hexagon"), inline(always))]
pub(super) fn dot_few_bits<F: FewBits, const S: usize, const R: usize>(
    _: F,
    panels: [&Panel<'_>; S],
    acts: [ActRow<'_>; R],
) -> [[Vector; R]; S] {
    let mut totals = [[hvx::splat_w(0); R]; S];
    let blocks = panels[0].layout.k_tiles() / SUPER_TILES;
    let groups = acts[0].each_group().zip(acts[R - 1].each_group());
    for (g, (group0, group1)) in groups.enumerate() {
        let here = g * GROUP_BLOCKS..((g + 1) * GROUP_BLOCKS).min(blocks);
        let group = first_of::<_, R>([group0, group1]);
        let rows = group.map(F::row);
        let mut starts = [hvx::zeros::<S>(); R];
        for (starts, row) in starts.iter_mut().zip(&rows) {
            F::starts(panels, here.clone(), row, starts);
        }
        for s in 0..S {
            let starts = starts.each_ref().map(|lines| hvx::load(&lines[s]));
            let sums = F::sums(panels[s], here.clone(), group, &rows, starts);
            for r in 0..R {
                totals[s][r] = hvx::add_f32(totals[s][r], sums[r]);
            }
        }
    }
    times_factors(totals, acts)
}

/// Returns the f32 scales of a group's activations.
#[inline(always)]
fn scales_of(group: ActGroup<'_>) -> Line {
    let mut out = Line::ZERO;
    hvx::store(&mut out, group.block_scales());
    out
}

/// The sum of a super-block, which adds each tile while the next one is multiplied, as
/// [`LateSum`](super::LateSum) does.
#[derive(Clone, Copy)]
struct BlockSum {
    sum: Accumulator,
    dot: Vector,
    scale: Vector,
}

impl BlockSum {
    /// Returns the sum of the first tile.
    ///
    /// The sum starts with a product of that tile by 0: a constant would be one qfloat value for
    /// several sums, copied and stored.
    #[inline(always)]
    fn new(dot: Vector, scale: i32) -> Self {
        Self {
            sum: Accumulator::product(hvx::f32_from_small_w(dot), hvx::splat_w(0)),
            dot,
            scale: hvx::splat_w(scale),
        }
    }

    /// Adds a tile.
    #[inline(always)]
    fn push(&mut self, dot: Vector, scale: i32) {
        self.sum = self
            .sum
            .mul_add(hvx::f32_from_small_w(self.dot), self.scale);
        (self.dot, self.scale) = (dot, hvx::splat_w(scale));
    }

    /// Returns the sum of all tiles, f32.
    #[inline(always)]
    fn finish(self) -> Vector {
        let sum = self
            .sum
            .mul_add(hvx::f32_from_small_w(self.dot), self.scale);
        sum.to_f32()
    }
}
