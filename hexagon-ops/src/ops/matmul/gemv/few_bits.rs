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
//! 1. **Bits stay where they are.** A mask picks the quants of one place in the bytes; sums of
//!    places are weighed afterwards, a few shifts for a tile.
//! 2. **One multiplication for both halves.** A sum of 16 products of Q3_K fits in 16 bits, so that
//!    both halves' sums in one word meet both scales. Those of Q2_K's second half weigh 16 times as
//!    much, as do the first half's scales where they are stored, so that neither is shifted.
//! 3. **Minima are integers, too.** `fixed` is a fixed-point number of three bytes, which multiply
//!    the minima of two tiles at a time where these are stored. The lower bytes are signed, so the
//!    sum of the three products is exact.

use core::ops::Range;

use super::super::Panel;
use super::super::dequantize::wide::block_factor;
use super::super::quantize::{ActGroup, GROUP_TILES};
use super::super::super_block::{GROUP_BLOCKS, half_fields};
use super::LateSum;
use super::half_scaled::HalfSums;
use crate::hvx::{self, Accumulator, LinePlanes, Vector};
use crate::layout::{Line, SUPER_TILES};

/// f16 1.
const ONE: u16 = 0x3c00;
/// Pairs of tiles of a super-block.
const PAIRS: usize = SUPER_TILES / 2;
/// Lines of scales of a super-block of Q2_K.
const Q2_K_LINES: usize = 1 + PAIRS;

/// A type of this module: its dot products over super-blocks of one strip.
pub(super) trait FewBits {
    /// What a group of activations contributes without weights.
    type Row: Copy;

    /// Returns the terms of a group.
    fn row(group: &ActGroup) -> Self::Row;

    /// Returns the sums over the super-blocks `blocks` of a panel, before the group's factor.
    fn sums<const R: usize>(
        panel: &Panel<'_>,
        blocks: Range<usize>,
        group: [&ActGroup; R],
        rows: &[Self::Row; R],
    ) -> [Vector; R];
}

/// Computes the products of `S` strips with `R` rows.
#[cfg_attr(target_arch = "hexagon", inline(never))]
#[cfg_attr(not(target_arch = "hexagon"), inline(always))]
pub(super) fn dot_few_bits<F: FewBits, const S: usize, const R: usize>(
    _: F,
    panels: [&Panel<'_>; S],
    acts: [&[ActGroup]; R],
) -> [[Vector; R]; S] {
    let mut totals = [[hvx::splat_w(0); R]; S];
    let blocks = panels[0].layout.k_tiles() / SUPER_TILES;
    for (g, first) in (0..blocks).step_by(GROUP_BLOCKS).enumerate() {
        let here = first..(first + GROUP_BLOCKS).min(blocks);
        let group = acts.each_ref().map(|act| &act[g]);
        let rows = group.map(F::row);
        for s in 0..S {
            let sums = F::sums(panels[s], here.clone(), group, &rows);
            for r in 0..R {
                let sum = Accumulator::product(sums[r], group[r].factor());
                totals[s][r] = sum.plus_f32(totals[s][r]).to_f32();
            }
        }
    }
    totals
}

/// Returns the f32 scales of a group's activations.
#[inline(always)]
fn scales_of(group: &ActGroup) -> Line {
    let mut out = Line::ZERO;
    let (scales, _) = hvx::widen_in_order_f16(hvx::load(group.scale_line()));
    hvx::store(&mut out, scales);
    out
}

/// Returns sums of 0, one for each row: a zero each, because one for both would be copied, and a
/// qfloat value is never.
#[inline(always)]
fn no_sums<const R: usize>() -> [LateSum; R] {
    let mut sums = [LateSum::new(); R];
    if R > 1 {
        sums[R - 1] = LateSum::new();
    }
    sums
}

/// Q3_K.
pub(super) struct ThreeBits;

/// Terms of a group of activations for Q3_K.
#[derive(Clone, Copy)]
pub(super) struct ZeroTerms {
    /// -4 times the sums of both halves of each tile's activations, a word of two halves each.
    zeros: Line,
    /// f32 scales.
    scales: Line,
}

impl ZeroTerms {
    #[inline(always)]
    fn of_blocks(&self) -> [&[[i32; SUPER_TILES]; GROUP_BLOCKS]; 2] {
        [
            bytemuck::cast_ref(&self.zeros),
            bytemuck::cast_ref(&self.scales),
        ]
    }
}

/// The bytes of a tile of 3-bit quants: those of the lines' lower bits, and the rest.
#[derive(Clone, Copy)]
struct ThreeBitTile {
    /// Values 0, 2 and 4; values 1 and 3, eight times too large.
    low: [Vector; 3],
    middle: [Vector; 2],
    /// Bits 2..1 of values 6 and 7, and value 5, all 32 times too large.
    upper: [Vector; 3],
    /// Bit 0 of values 6 and 7: 8 and 16 times too large.
    last: [Vector; 2],
}

impl ThreeBitTile {
    #[inline(always)]
    fn new(quants: &[Line; 3]) -> Self {
        let [a, b, c] = quants.each_ref().map(hvx::load);
        let masked = |line: Vector, mask: u8| hvx::and(line, hvx::splat_b(mask));
        Self {
            low: [masked(a, 0x07), masked(b, 0x07), masked(c, 0x07)],
            middle: [masked(a, 0x38), masked(b, 0x38)],
            upper: [masked(a, 0xc0), masked(b, 0xc0), masked(c, 0xe0)],
            last: [masked(c, 0x08), masked(c, 0x10)],
        }
    }

    /// Returns the dot products of both halves.
    #[inline(always)]
    fn dot(self, act: &[i32; 8]) -> [Vector; 2] {
        let Self {
            low,
            middle,
            upper,
            last,
        } = self;
        let ones = hvx::dot4_acc(hvx::dot4_word(low[0], act[0]), low[1], act[2]);
        let eights = hvx::dot4_acc(hvx::dot4_word(middle[0], act[1]), middle[1], act[3]);
        let first = hvx::shr_add_w(ones, eights, 3);
        let mut rest = hvx::dot4_word(upper[0], act[6]);
        rest = hvx::dot4_acc(rest, upper[1], act[7]);
        rest = hvx::dot4_acc(rest, upper[2], act[5]);
        let sixteens = hvx::shr_add_w(hvx::dot4_word(last[1], act[7]), rest, 1);
        let eights = hvx::shr_add_w(hvx::dot4_word(last[0], act[6]), sixteens, 1);
        [
            first,
            hvx::shr_add_w(hvx::dot4_word(low[2], act[4]), eights, 3),
        ]
    }
}

impl FewBits for ThreeBits {
    type Row = ZeroTerms;

    #[inline(always)]
    fn row(group: &ActGroup) -> ZeroTerms {
        let [first, second] = HalfSums::new(group).vectors();
        let minus_four = |sums: Vector| hvx::sub_w(hvx::splat_w(0), hvx::shl_w(sums, 2));
        let mut zeros = Line::ZERO;
        hvx::store(
            &mut zeros,
            hvx::pack_low_h(minus_four(first), minus_four(second)),
        );
        ZeroTerms {
            zeros,
            scales: scales_of(group),
        }
    }

    #[inline(always)]
    fn sums<const R: usize>(
        panel: &Panel<'_>,
        blocks: Range<usize>,
        group: [&ActGroup; R],
        rows: &[ZeroTerms; R],
    ) -> [Vector; R] {
        let mut totals = [hvx::splat_w(0); R];
        let mut planes = LinePlanes::<GROUP_TILES>::unfilled();
        fill_fields(&panel.scales.as_chunks().0[blocks.clone()], &mut planes);
        let fields = planes.lines()[0].as_chunks::<SUPER_TILES>().0;
        let quants = panel.quants.as_chunks::<3>().0;
        let quants = quants.as_chunks::<SUPER_TILES>().0[blocks.clone()].iter();
        for (i, ((quants, fields), b)) in quants.zip(fields).zip(blocks).enumerate() {
            let words = group.map(|group| &group.words().as_chunks::<SUPER_TILES>().0[i]);
            let terms = rows.each_ref().map(|row| row.of_blocks().map(|of| &of[i]));
            let mut sums = no_sums::<R>();
            for (t, (quants, fields)) in quants.iter().zip(fields).enumerate() {
                let tile = ThreeBitTile::new(quants);
                let fields = hvx::load(fields);
                for r in 0..R {
                    let [zeros, scales] = terms[r];
                    let [first, second] = tile.dot(&words[r][t]);
                    let dot = hvx::dot2_each(hvx::interleave_even_h(first, second), fields);
                    let dot = hvx::dot2_acc(dot, fields, zeros[t]);
                    sums[r].push(dot, hvx::splat_w(scales[t]), true);
                }
            }
            let (d, _) = hvx::widen_mul_f16(block_factor(panel.mins, b), hvx::splat_h(ONE));
            for r in 0..R {
                let sum = Accumulator::product(sums[r].finish(true), d);
                totals[r] = sum.plus_f32(totals[r]).to_f32();
            }
        }
        totals
    }
}

/// Computes the scales of super-blocks of Q3_K: a line of signed halfwords for each tile.
#[cfg_attr(target_arch = "hexagon", inline(never))]
#[cfg_attr(not(target_arch = "hexagon"), inline(always))]
fn fill_fields(blocks: &[[Line; 3]], planes: &mut LinePlanes<GROUP_TILES>) {
    planes.fill_first(blocks.iter().map(half_fields));
}

/// Q2_K.
pub(super) struct TwoBits;

/// Terms of a group of activations for Q2_K.
#[derive(Clone, Copy)]
pub(super) struct MinTerms {
    /// Signed bytes of fixed-point numbers, the highest first: a word for each two tiles, with its
    /// bytes in the order of the minima. The other words are not used.
    digits: [Line; 3],
    /// f32 scales.
    scales: Line,
}

impl MinTerms {
    /// Returns the words of a group's super-blocks.
    #[inline(always)]
    fn digits(&self) -> [&[[i32; PAIRS]; 2 * GROUP_BLOCKS]; 3] {
        self.digits.each_ref().map(|line| bytemuck::cast_ref(line))
    }

    #[inline(always)]
    fn scales(&self) -> &[[i32; SUPER_TILES]; GROUP_BLOCKS] {
        bytemuck::cast_ref(&self.scales)
    }
}

/// Fixed-point units of the sums of first halves. The minima of second halves weigh 16 times as
/// much, so their units are 16 times as large.
const UNITS: [f32; 2] = [128.0, 8.0];
/// f16 1 / 16 for d, which is multiplied by sums 16 times too large, and 1 / 128 for dmin.
const FACTORS: i32 = 0x2000_2c00;
/// Added to a number of less than 2^22, it leaves that number, rounded half to even, above its own
/// bits.
const ROUND: f32 = 12_582_912.0;

/// Returns the bytes at `place` (0 or 1) of the lower halves of 64 words, four of each two tiles in
/// a word.
#[inline(always)]
fn digit([first, second]: [Vector; 2], place: usize) -> Vector {
    let halves = hvx::pack_low_h(first, second);
    let (even, odd) = hvx::deal_w(halves, halves);
    if place == 0 {
        hvx::interleave_even_b(even, odd)
    } else {
        hvx::interleave_odd_b(even, odd)
    }
}

/// The bytes of a tile of 2-bit quants, by their places: values 0 and 2, 1 and 3, 4 and 6, 5 and 7.
#[derive(Clone, Copy)]
struct TwoBitTile([[Vector; 2]; 4]);

impl TwoBitTile {
    #[inline(always)]
    fn new(quants: &[Line; 2]) -> Self {
        let lines = quants.each_ref().map(hvx::load);
        Self(
            [0x03, 0x0c, 0x30, 0xc0]
                .map(|mask| lines.map(|line| hvx::and(line, hvx::splat_b(mask)))),
        )
    }

    /// Returns the dot products of both halves, that of the second one times 16.
    #[inline(always)]
    fn dot(self, act: &[i32; 8]) -> [Vector; 2] {
        let place = |place: usize, g: usize| {
            let [a, b] = self.0[place];
            hvx::dot4_acc(hvx::dot4_word(a, act[g]), b, act[g + 2])
        };
        [
            hvx::shr_add_w(place(0, 0), place(1, 1), 2),
            hvx::shr_add_w(place(2, 4), place(3, 5), 2),
        ]
    }
}

impl FewBits for TwoBits {
    type Row = MinTerms;

    #[inline(always)]
    fn row(group: &ActGroup) -> MinTerms {
        let scales = scales_of(group);
        let each = hvx::load(&scales);
        let (first, second) = hvx::interleave_w(each, each);
        let (units, _) = hvx::interleave_w(hvx::splat_f32(UNITS[0]), hvx::splat_f32(UNITS[1]));
        let [low, high] = HalfSums::new(group).vectors();
        let fixed = |sums: Vector, scales: Vector| {
            let numbers = hvx::mul_f32(hvx::f32_from_w(sums), hvx::mul_f32(scales, units));
            let rounded = hvx::add_f32(numbers, hvx::splat_f32(ROUND));
            hvx::sub_w(rounded, hvx::splat_f32(ROUND))
        };
        let fixed = [fixed(low, first), fixed(high, second)];
        // A lower byte of 128 and more is negative, and carries into the next one.
        let carried = |carry: i32| fixed.map(|v| hvx::add_w(v, hvx::splat_w(carry)));
        let highest = carried(0x8080).map(|v| hvx::shr_w(v, 16));
        let mut digits = [Line::ZERO; 3];
        for (line, v) in
            digits
                .iter_mut()
                .zip([digit(highest, 0), digit(carried(0x80), 1), digit(fixed, 0)])
        {
            hvx::store(line, v);
        }
        MinTerms { digits, scales }
    }

    #[inline(always)]
    fn sums<const R: usize>(
        panel: &Panel<'_>,
        blocks: Range<usize>,
        group: [&ActGroup; R],
        rows: &[MinTerms; R],
    ) -> [Vector; R] {
        let mut totals = [hvx::splat_w(0); R];
        let quants = panel.quants.as_chunks::<2>().0.as_chunks::<2>().0;
        let quants = quants.as_chunks::<PAIRS>().0[blocks.clone()].iter();
        let scales = panel.scales.as_chunks::<Q2_K_LINES>().0[blocks].iter();
        for (i, (quants, [header, pairs @ ..])) in quants.zip(scales).enumerate() {
            let words = group.map(|group| &group.words().as_chunks::<SUPER_TILES>().0[i]);
            let scales = rows.each_ref().map(|row| &row.scales()[i]);
            let mut sums = no_sums::<R>();
            for (p, (quants, line)) in quants.iter().zip(pairs).enumerate() {
                let line = hvx::load(line);
                let mask = hvx::splat_w(0x000f_00f0);
                let fields = [hvx::and(line, mask), hvx::and(hvx::shr_h(line, 8), mask)];
                for (j, quants) in quants.iter().enumerate() {
                    let (tile, t) = (TwoBitTile::new(quants), 2 * p + j);
                    for r in 0..R {
                        let [first, second] = tile.dot(&words[r][t]);
                        let dot = hvx::mul_odd(second, fields[j]);
                        let dot = hvx::mul_even_acc(dot, first, fields[j]);
                        sums[r].push(dot, hvx::splat_w(scales[r][t]), true);
                    }
                }
            }
            let mins = pairs
                .each_ref()
                .map(|line| hvx::and(hvx::load(line), hvx::splat_w(0xf0f0_0f0f_u32.cast_signed())));
            let (d, minus_dmin) = hvx::widen_mul_f16(hvx::load(header), hvx::splat_w(FACTORS));
            for r in 0..R {
                let fixed = min_sum(mins, rows[r].digits().map(|digits| &digits[i]));
                let sum = Accumulator::product(sums[r].finish(true), d)
                    .mul_add(hvx::f32_from_w(fixed), minus_dmin);
                totals[r] = sum.plus_f32(totals[r]).to_f32();
            }
        }
        totals
    }
}

/// Returns the sum of minima times fixed-point numbers. It is below 2^29: 16 minima of at most 15
/// times numbers of at most 2^21.
#[inline(always)]
fn min_sum(mins: [Vector; PAIRS], digits: [&[i32; PAIRS]; 3]) -> Vector {
    let [highest, middle, lowest] = digits;
    let add = |sum: Vector, digits: &[i32; PAIRS]| {
        let mut sum = sum;
        for p in 0..PAIRS {
            sum = hvx::dot4_acc(sum, mins[p], digits[p]);
        }
        sum
    };
    let mut sum = hvx::dot4_word(mins[0], highest[0]);
    for p in 1..PAIRS {
        sum = hvx::dot4_acc(sum, mins[p], highest[p]);
    }
    let sum = add(hvx::shl_w(sum, 8), middle);
    add(hvx::shl_w(sum, 8), lowest)
}
