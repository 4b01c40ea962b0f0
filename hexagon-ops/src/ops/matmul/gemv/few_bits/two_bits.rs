//! Dot products of Q2_K.

use core::hint::black_box;
use core::ops::Range;

use super::super::half_scaled::HalfSums;
use super::super::{KEEPS_F32, LateSum, first_of};
use super::{BlockSum, FewBits};
use crate::hvx::{self, Accumulator, Vector};
use crate::layout::{Line, SUPER_TILES};
use crate::ops::matmul::Panel;
use crate::ops::matmul::quantize::{ActGroup, WordPairs};
use crate::ops::matmul::super_block::GROUP_BLOCKS;

/// Pairs of tiles of a super-block.
const PAIRS: usize = SUPER_TILES / 2;
/// Lines of scales of a super-block.
const LINES: usize = 1 + PAIRS;

/// Q2_K.
pub(in crate::ops::matmul::gemv) struct TwoBitDots;

/// Terms of a group of activations for Q2_K.
#[derive(Clone, Copy)]
pub(in crate::ops::matmul::gemv) struct MinTerms {
    /// Signed bytes of fixed-point numbers, the highest first: a word for each two tiles, with its
    /// bytes in the order of the minima. The other words are not used.
    digits: [Line; 3],
    /// f32 scales.
    scales: Line,
    /// [`FACTORS`] of each super-block. The others are not used: with the right count the compiler
    /// unrolls a loop that takes twice the packets.
    factors: [i32; 2 * GROUP_BLOCKS],
}

impl MinTerms {
    /// Returns the words of a group's super-blocks.
    #[inline(always)]
    fn digits(&self) -> [&[[i32; PAIRS]; 2 * GROUP_BLOCKS]; 3] {
        self.digits.each_ref().map(bytemuck::cast_ref)
    }

    /// Returns the scales of each two tiles.
    #[inline(always)]
    fn scales(&self) -> &[[i32; 2]; GROUP_BLOCKS * PAIRS] {
        bytemuck::cast_ref(&self.scales)
    }
}

/// Fixed-point units of the sums of first halves. The minima of second halves are 16 times too
/// large as they are stored, so their units are 16 times as large.
const UNITS: [f32; 2] = [128.0, 8.0];
/// f16 1 / 16 for d, which is multiplied by sums 16 times too large, and 1 / 128 for dmin; the
/// latter is divided by the power of the super-block.
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

impl FewBits for TwoBitDots {
    type Row = MinTerms;

    #[inline(always)]
    fn row(group: ActGroup<'_>) -> MinTerms {
        let [each, powers] = group.block_terms();
        let mut scales = Line::ZERO;
        hvx::store(&mut scales, each);
        let shifted = hvx::mul_f32(each, powers);
        let (first, second) = hvx::interleave_w(shifted, shifted);
        let mut factors = [FACTORS; 2 * GROUP_BLOCKS];
        for (factors, pairs) in factors.iter_mut().zip(group.terms().as_chunks::<PAIRS>().0) {
            // Divides each factor by a power of two: subtracts the exponent of the f16 in the upper
            // half, less the exponent of 1.
            *factors -= (pairs[0].products & !0xffff) - (0x3c00 << 16);
        }
        let (units, _) = hvx::interleave_w(hvx::splat_f32(UNITS[0]), hvx::splat_f32(UNITS[1]));
        let [low, high] = HalfSums::new(group).vectors();
        let fixed = |sums: Vector, scales: Vector| {
            let numbers = hvx::mul_f32(hvx::f32_from_w(sums), hvx::mul_f32(scales, units));
            let rounded = hvx::add_f32(numbers, hvx::splat_f32(ROUND));
            hvx::sub_w(rounded, hvx::splat_f32(ROUND))
        };
        let fixed = [fixed(low, first), fixed(high, second)];
        // A lower byte of 128 or more is negative, so it carries into the next byte.
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
        MinTerms {
            digits,
            scales,
            factors,
        }
    }

    #[inline(always)]
    fn starts<const S: usize>(
        panels: [&Panel<'_>; S],
        blocks: Range<usize>,
        row: &MinTerms,
        out: &mut [Line; S],
    ) {
        let scales = panels.map(|panel| &panel.scales.as_chunks().0[blocks.clone()]);
        min_sums(scales, row, out);
    }

    #[inline(always)]
    fn sums<const R: usize>(
        panel: &Panel<'_>,
        blocks: Range<usize>,
        group: [ActGroup<'_>; R],
        rows: &[MinTerms; R],
        starts: [Vector; R],
    ) -> [Vector; R] {
        if KEEPS_F32 {
            unrolled(panel, blocks, group, rows, starts)
        } else {
            in_a_loop(panel, blocks, group, rows, starts)
        }
    }
}

/// Implements [`TwoBitDots::sums`] with all tiles of a super-block in one piece.
#[inline(always)]
fn unrolled<const R: usize>(
    panel: &Panel<'_>,
    blocks: Range<usize>,
    group: [ActGroup<'_>; R],
    rows: &[MinTerms; R],
    starts: [Vector; R],
) -> [Vector; R] {
    let mut totals = starts;
    let scales = &panel.scales.as_chunks::<LINES>().0[blocks.clone()];
    let quants = panel.quants.as_chunks::<2>().0.as_chunks::<2>().0;
    let quants = quants.as_chunks::<PAIRS>().0[blocks].iter();
    for (i, (quants, [header, pairs @ ..])) in quants.zip(scales).enumerate() {
        let words = group.map(|group| {
            let (words, pairs) = (
                group.words().as_chunks::<2>(),
                group.word_pairs().as_chunks(),
            );
            let words = &words.0.as_chunks::<PAIRS>().0[i];
            let pairs: &[[WordPairs; 2]; PAIRS] = &pairs.0.as_chunks().0[i];
            // With two rows, loads fill the packets, and loading pairs saves some. With one row
            // there is room for single loads.
            move |p: usize| {
                if R > 1 {
                    pairs[p].map(WordPairs::words)
                } else {
                    words[p]
                }
            }
        });
        let scales = rows
            .each_ref()
            .map(|row| &row.scales().as_chunks::<PAIRS>().0[i]);
        let [even, odd] = two_bit_dots(&quants[0], &pairs[0], words.map(|words| words(0)));
        let mut sums = [BlockSum::new(even[0], scales[0][0][0]); R];
        if R > 1 {
            sums[R - 1] = BlockSum::new(even[R - 1], scales[R - 1][0][0]);
        }
        for r in 0..R {
            sums[r].push(odd[r], scales[r][0][1]);
        }
        for p in 1..PAIRS {
            let [even, odd] = two_bit_dots(&quants[p], &pairs[p], words.map(|words| words(p)));
            for r in 0..R {
                let [first, second] = scales[r][p];
                sums[r].push(even[r], first);
                sums[r].push(odd[r], second);
            }
        }
        let (d, _) = hvx::widen_mul_f16(hvx::load(header), hvx::splat_w(FACTORS));
        for r in 0..R {
            let sum = Accumulator::product(sums[r].finish(), d);
            totals[r] = sum.plus_f32(totals[r]).to_f32();
        }
    }
    totals
}

/// As [`unrolled`], two tiles at a time: needs more packets, but stores no qfloat values.
#[inline(always)]
fn in_a_loop<const R: usize>(
    panel: &Panel<'_>,
    blocks: Range<usize>,
    group: [ActGroup<'_>; R],
    rows: &[MinTerms; R],
    starts: [Vector; R],
) -> [Vector; R] {
    let mut totals = starts;
    let pairs = panel.quants.as_chunks::<2>().0.as_chunks::<2>().0;
    // `black_box` hides the count, which keeps the compiler from unrolling the loop.
    let n_pairs = black_box(PAIRS);
    for (i, b) in blocks.enumerate() {
        let (quants, lines) = (&pairs[PAIRS * b..], &panel.scales[LINES * b..]);
        let words = group.map(|group| &group.word_pairs().as_chunks::<2>().0[PAIRS * i..]);
        let scales = rows.each_ref().map(|row| &row.scales()[PAIRS * i..]);
        let acts = words[0].iter().zip(words[R - 1]);
        let scales = scales[0].iter().zip(scales[R - 1]);
        let mut sums = [LateSum::new(); R];
        if R > 1 {
            // Each sum gets its own zero: a shared one would be copied, which qfloat values must
            // not be.
            sums[R - 1] = LateSum::new();
        }
        let strip = quants.iter().zip(&lines[1..]);
        let all = strip.zip(acts).zip(scales).take(n_pairs);
        for (((quants, line), (words0, words1)), (scales0, scales1)) in all {
            let words = first_of::<_, R>([words0, words1]).map(|pairs| pairs.map(WordPairs::words));
            let dots = two_bit_dots(quants, line, words);
            let scales = first_of::<_, R>([scales0, scales1]);
            for (j, dots) in dots.iter().enumerate() {
                for r in 0..R {
                    sums[r].push(dots[r], hvx::splat_w(scales[r][j]), true);
                }
            }
        }
        let (d, _) = hvx::widen_mul_f16(hvx::load(&lines[0]), hvx::splat_w(FACTORS));
        for r in 0..R {
            let sum = Accumulator::product(sums[r].finish(true), d);
            totals[r] = sum.plus_f32(totals[r]).to_f32();
        }
    }
    totals
}

/// Computes the sums of the minima of super-blocks of `S` strips with a row, f32, before the row's
/// factor.
///
/// On the device this is not inlined: together with the dot products, qfloat values would be
/// stored.
#[cfg_attr(target_arch = "hexagon", inline(never))]
#[cfg_attr(not(target_arch = "hexagon"), inline(always))]
fn min_sums<const S: usize>(strips: [&[[Line; LINES]]; S], row: &MinTerms, out: &mut [Line; S]) {
    let mut totals = [hvx::splat_w(0); S];
    let [highest, middle, lowest] = row.digits();
    let digits = highest.iter().zip(middle).zip(lowest);
    let blocks = strips[0].iter().zip(strips[S - 1]).zip(&row.factors);
    for (((first, last), factors), ((highest, middle), lowest)) in blocks.zip(digits) {
        let digits = [highest, middle, lowest];
        for (total, block) in totals.iter_mut().zip(first_of::<_, S>([first, last])) {
            let [header, pairs @ ..] = block;
            let (_, minus_dmin) = hvx::widen_mul_f16(hvx::load(header), hvx::splat_w(*factors));
            let fixed = hvx::f32_from_w(min_sum(pairs, digits));
            let sum = Accumulator::product(fixed, minus_dmin);
            *total = sum.plus_f32(*total).to_f32();
        }
    }
    for (out, total) in out.iter_mut().zip(totals) {
        hvx::store(out, total);
    }
}

/// Returns the sums of two tiles with each row: `16 · s · quants · act` over both halves.
#[inline(always)]
fn two_bit_dots<const R: usize>(
    quants: &[[Line; 2]; 2],
    scales: &Line,
    words: [[[i32; 8]; 2]; R],
) -> [[Vector; R]; 2] {
    let line = hvx::load(scales);
    // The low nibble of the second half's byte, and the high nibble of the first half's byte.
    let mask = hvx::splat_w(0x000f_00f0);
    let fields = [hvx::and(line, mask), hvx::and(hvx::shr_h(line, 8), mask)];
    let mut dots = [[line; R]; 2];
    for (i, quants) in quants.iter().enumerate() {
        let tile = TwoBitTile::new(quants);
        for r in 0..R {
            let [first, second] = tile.dot(&words[r][i]);
            let dot = hvx::mul_odd(second, fields[i]);
            dots[i][r] = hvx::mul_even_acc(dot, first, fields[i]);
        }
    }
    dots
}

/// Returns the sum of a super-block's minima times fixed-point numbers. It is below 2^29: 16 minima
/// of at most 15 times numbers of at most 2^21.
#[inline(always)]
fn min_sum(pairs: &[Line; PAIRS], digits: [&[i32; PAIRS]; 3]) -> Vector {
    // The low nibbles of first halves, and the high nibbles of second halves.
    let mask = hvx::splat_w(0xf0f0_0f0f_u32.cast_signed());
    let mins = pairs.each_ref().map(|line| hvx::and(hvx::load(line), mask));
    let [highest, middle, lowest] = digits.map(|digits| {
        let mut sum = hvx::dot4_word(mins[0], digits[0]);
        for p in 1..PAIRS {
            sum = hvx::dot4_acc(sum, mins[p], digits[p]);
        }
        sum
    });
    let sum = hvx::add_w(hvx::shl_w(highest, 8), middle);
    hvx::add_w(hvx::shl_w(sum, 8), lowest)
}
