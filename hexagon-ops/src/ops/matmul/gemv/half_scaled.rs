//! Dot products of super-blocks with a scale for each 16 weights: Q6_K.
//!
//! ```text
//! for each group of 1024 along K, each row of activations
//!   half[tile][h] = sum of the 16 activations of half a block
//!   for each tile
//!     joint[n]   = d[n] · activation scale[tile]
//!     dot[h][n]  = -32 · half[tile][h] + Σ quants · act          u8 · i8
//!     sum[n]    += f32(s[0][n] · dot[0][n] + s[1][n] · dot[1][n]) · joint[n]
//! ```
//!
//! The scales of 16 weights are integers and stay so: a half is at most 16 · 32 · 127 < 2^17, a
//! scale at most 128, so that both products fit in a word with room to spare. Bits of a value that
//! are in several lines are multiplied where they are, and the sums are shifted to their weights.

use super::super::dequantize::wide::half_scales;
use super::super::quantize::{ActGroup, ActRow, GROUP_TILES};
use super::super::super_block::GROUP_BLOCKS;
use super::{LateSum, first_of, times_factors};
use crate::hvx::{self, LinePlanes, Vector};
use crate::layout::{Line, SUPER_TILES};
use crate::ops::matmul::Panel;

/// Lines of quants of a tile.
const LINES: usize = 6;
/// The number that was added to each weight.
const ZERO: i32 = 32;
/// d of a group's tiles, f16: a line for each two.
type BlockFactors = LinePlanes<{ GROUP_TILES / 2 }>;

/// Sums of the halves of each block of a group.
#[derive(Clone, Copy)]
pub(super) struct HalfSums([Line; 2]);

impl HalfSums {
    #[inline(always)]
    pub(super) fn new(group: ActGroup<'_>) -> Self {
        let ones = hvx::splat_b(1);
        // Adds up single words, then pairs of words, then groups of four.
        let words = group
            .lines()
            .each_ref()
            .map(|line| hvx::dot4_each(ones, hvx::load(line)));
        let add = |a, b| {
            let (even, odd) = hvx::deal_w(a, b);
            hvx::add_w(even, odd)
        };
        let mut out = [Line::ZERO; 2];
        for (out, [a, b, c, d]) in out.iter_mut().zip([
            [words[0], words[1], words[2], words[3]],
            [words[4], words[5], words[6], words[7]],
        ]) {
            hvx::store(out, add(add(a, b), add(c, d)));
        }
        Self(out)
    }

    /// Returns the sums of tiles 0 to 15, the two halves of each next to each other, and of the
    /// others.
    #[inline(always)]
    pub(super) fn vectors(&self) -> [Vector; 2] {
        self.0.each_ref().map(hvx::load)
    }

    /// Returns the sums of each tile's halves.
    #[inline(always)]
    fn tiles(&self) -> &[[i32; 2]; GROUP_TILES] {
        bytemuck::cast_ref(&self.0)
    }
}

/// The bytes of a tile: the lower six bits of its lines, and the upper two.
#[derive(Clone, Copy)]
struct SixBitTiles {
    low: [Vector; LINES],
    rest: [Vector; LINES],
}

impl SixBitTiles {
    #[inline(always)]
    fn new(quants: &[Line; LINES]) -> Self {
        let lines = quants.each_ref().map(hvx::load);
        Self {
            low: lines.map(|line| hvx::and(line, hvx::splat_b(0x3f))),
            rest: lines.map(|line| hvx::and(line, hvx::splat_b(0xc0))),
        }
    }

    /// Returns the dot products of both halves.
    #[inline(always)]
    fn dot(self, sums: [i32; 2], act: &[i32; 8]) -> [Vector; 2] {
        let Self { low, rest } = self;
        let [mut first, mut second] = sums.map(|sum| hvx::splat_w(-ZERO * sum));
        for g in 0..4 {
            first = hvx::dot4_acc(first, low[g], act[g]);
        }
        for g in 4..6 {
            second = hvx::dot4_acc(second, low[g], act[g]);
        }
        // The upper bits are 64 times their value. Values 6 and 7 have them as bits 5..4, 3..2 and
        // 1..0, so these are 4, 16 and 64 times too large.
        let pieces =
            [0, 1, 2].map(|i| hvx::dot4_acc(hvx::dot4_word(rest[i], act[6]), rest[3 + i], act[7]));
        let pieces = hvx::shr_add_w(pieces[0], hvx::shr_add_w(pieces[1], pieces[2], 2), 2);
        [first, hvx::shr_add_w(second, pieces, 2)]
    }
}

/// Computes the d of each two tiles of a group. An odd number of super-blocks has a further one
/// without tiles.
#[cfg_attr(target_arch = "hexagon", inline(never))]
#[cfg_attr(not(target_arch = "hexagon"), inline(always))]
fn fill_factors(plane: &[Line], n_blocks: usize, out: &mut BlockFactors) {
    let lines = plane.iter().take(n_blocks.div_ceil(2));
    out.fill_first(lines.map(|line| {
        let line = hvx::load(line);
        let first = hvx::interleave_even_h(line, line);
        let second = hvx::interleave_odd_h(line, line);
        [first, first, first, first, second, second, second, second]
    }));
}

/// Computes the products of `S` strips with `R` rows.
#[cfg_attr(target_arch = "hexagon", inline(never))]
#[cfg_attr(not(target_arch = "hexagon"), inline(always))]
pub(super) fn dot_half_scaled<const S: usize, const R: usize>(
    panels: [&Panel<'_>; S],
    acts: [ActRow<'_>; R],
) -> [[Vector; R]; S] {
    let mut totals = [[hvx::splat_w(0); R]; S];
    let (mut factors0, mut factors1) = (BlockFactors::unfilled(), BlockFactors::unfilled());
    let blocks = panels[0].layout.k_tiles() / SUPER_TILES;
    let groups = acts[0].each_group().zip(acts[R - 1].each_group());
    for (first, (group0, group1)) in (0..blocks).step_by(GROUP_BLOCKS).zip(groups) {
        let n_blocks = GROUP_BLOCKS.min(blocks - first);
        let group = first_of::<_, R>([group0, group1]);
        fill_factors(&panels[0].mins[first / 2..], n_blocks, &mut factors0);
        if S > 1 {
            let plane = &panels[S - 1].mins[first / 2..];
            fill_factors(plane, n_blocks, &mut factors1);
        }
        let half_sums = group.map(HalfSums::new);
        let [factors0, _] = factors0.lines();
        let factors = match S {
            1 => [factors0; 2],
            _ => [factors0, factors1.lines()[0]],
        };
        let added = group_sums(panels, first, group, factors, &half_sums);
        for s in 0..S {
            for r in 0..R {
                totals[s][r] = hvx::add_f32(totals[s][r], added[s][r]);
            }
        }
    }
    times_factors(totals, acts)
}

/// Returns the sums of a group's tiles, before the rows' factors.
#[inline(always)]
fn group_sums<const S: usize, const R: usize>(
    panels: [&Panel<'_>; S],
    first: usize,
    group: [ActGroup<'_>; R],
    factors: [&[Line]; 2],
    half_sums: &[HalfSums; R],
) -> [[Vector; R]; S] {
    let mut sums = [[LateSum::new(); R]; S];
    if S * R > 1 {
        // Each sum gets its own zero: a shared one would be copied, which qfloat values must not
        // be.
        sums[S - 1][R - 1] = LateSum::new();
    }
    let pair = first * SUPER_TILES / 2;
    let strip = |s: usize| {
        let quants = &panels[s].quants.as_chunks::<LINES>().0.as_chunks::<2>().0[pair..];
        quants.iter().zip(&panels[s].scales[pair..])
    };
    let row = |r: usize| {
        let words = group[r].word_pairs().as_chunks::<2>().0.iter();
        let halves = half_sums[r].tiles().as_chunks::<2>().0;
        words.zip(halves).zip(group[r].terms())
    };
    let strips = strip(0).zip(strip(S - 1));
    let rows = row(0).zip(row(R - 1));
    let factors = factors[0].iter().zip(factors[1]);
    for (((strip0, strip1), (row0, row1)), (factor0, factor1)) in strips.zip(rows).zip(factors) {
        let strips = first_of::<_, S>([strip0, strip1]);
        let rows = first_of::<_, R>([row0, row1]);
        for (s, ((quants, line), d)) in strips.into_iter().zip([factor0, factor1]).enumerate() {
            let (d, line) = (hvx::load(d), hvx::load(line));
            let joints = rows.map(|(_, terms)| {
                let (even, odd) = hvx::widen_mul_f16(d, hvx::splat_w(terms.scales));
                [even, odd]
            });
            for (i, quants) in quants.iter().enumerate() {
                let bytes = SixBitTiles::new(quants);
                let scales = half_scales(line, i);
                for (r, ((words, half_sums), _)) in rows.into_iter().enumerate() {
                    let [low, high] = bytes.dot(half_sums[i], &words[i].words());
                    let dot = hvx::mul_even_acc(hvx::mul_odd(high, scales), low, scales);
                    sums[s][r].push(dot, joints[r][i], true);
                }
            }
        }
    }
    sums.map(|sums| sums.map(|sum| sum.finish(true)))
}
