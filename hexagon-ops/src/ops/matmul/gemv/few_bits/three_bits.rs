//! Dot products of Q3_K.

use core::ops::Range;

use super::super::KEEPS_F32;
use super::super::half_scaled::HalfSums;
use super::{BlockSum, FewBits, scales_of};
use crate::hvx::{self, Accumulator, LinePlanes, Vector};
use crate::layout::{Line, SUPER_TILES};
use crate::ops::matmul::Panel;
use crate::ops::matmul::dequantize::wide::block_factor;
use crate::ops::matmul::quantize::{ActGroup, GROUP_TILES};
use crate::ops::matmul::super_block::{GROUP_BLOCKS, half_fields};

/// f16 1.
const ONE: u16 = 0x3c00;

/// Q3_K.
pub(in crate::ops::matmul::gemv) struct ThreeBitDots;

/// Terms of a group of activations for Q3_K.
#[derive(Clone, Copy)]
pub(in crate::ops::matmul::gemv) struct ZeroTerms {
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

impl FewBits for ThreeBitDots {
    type Row = ZeroTerms;

    #[inline(always)]
    fn row(group: ActGroup<'_>) -> ZeroTerms {
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
        group: [ActGroup<'_>; R],
        rows: &[ZeroTerms; R],
        starts: [Vector; R],
    ) -> [Vector; R] {
        let scales = &panel.scales.as_chunks::<3>().0[blocks.clone()];
        if KEEPS_F32 {
            return add_blocks(panel, blocks, scales.iter(), (group, rows), starts);
        }
        // The fields go to memory, because sums in qfloat leave no registers for them.
        let mut planes = LinePlanes::<GROUP_TILES>::unfilled();
        fill_fields(scales, &mut planes);
        let lines = planes.lines()[0].as_chunks::<SUPER_TILES>().0;
        add_blocks(panel, blocks, lines.iter(), (group, rows), starts)
    }
}

/// The scales of the tiles of a super-block: a vector of signed halfwords each.
trait Fields: Copy {
    /// The form in which a kernel reads all scales.
    type Ready: Copy;

    /// Prepares the scales.
    fn ready(self) -> Self::Ready;

    /// Returns the scales of tile `t`.
    fn of(ready: &Self::Ready, t: usize) -> Vector;
}

impl Fields for &[Line; 3] {
    type Ready = [Vector; SUPER_TILES];

    #[inline(always)]
    fn ready(self) -> [Vector; SUPER_TILES] {
        half_fields(self)
    }

    #[inline(always)]
    fn of(ready: &[Vector; SUPER_TILES], t: usize) -> Vector {
        ready[t]
    }
}

impl Fields for &[Line; SUPER_TILES] {
    type Ready = Self;

    #[inline(always)]
    fn ready(self) -> Self {
        self
    }

    #[inline(always)]
    fn of(ready: &Self, t: usize) -> Vector {
        hvx::load(&ready[t])
    }
}

/// Returns `totals` plus the sums over the super-blocks `blocks` of a panel, whose scales are
/// `fields`.
#[inline(always)]
fn add_blocks<F: Fields, const R: usize>(
    panel: &Panel<'_>,
    blocks: Range<usize>,
    fields: impl Iterator<Item = F>,
    (group, rows): ([ActGroup<'_>; R], &[ZeroTerms; R]),
    mut totals: [Vector; R],
) -> [Vector; R] {
    let quants = panel.quants.as_chunks::<3>().0;
    let quants = quants.as_chunks::<SUPER_TILES>().0[blocks.clone()].iter();
    for (i, ((quants, fields), b)) in quants.zip(fields).zip(blocks).enumerate() {
        let fields = fields.ready();
        let words = group.map(|group| &group.words().as_chunks::<SUPER_TILES>().0[i]);
        let terms = rows.each_ref().map(|row| row.of_blocks().map(|of| &of[i]));
        let dots = three_bit_dots(&quants[0], F::of(&fields, 0), words, terms, 0);
        let mut sums = [BlockSum::new(dots[0], terms[0][1][0]); R];
        if R > 1 {
            sums[R - 1] = BlockSum::new(dots[R - 1], terms[R - 1][1][0]);
        }
        for t in 1..SUPER_TILES {
            let dots = three_bit_dots(&quants[t], F::of(&fields, t), words, terms, t);
            for r in 0..R {
                sums[r].push(dots[r], terms[r][1][t]);
            }
        }
        let (d, _) = hvx::widen_mul_f16(block_factor(panel.mins, b), hvx::splat_h(ONE));
        for r in 0..R {
            let sum = Accumulator::product(sums[r].finish(), d);
            totals[r] = sum.plus_f32(totals[r]).to_f32();
        }
    }
    totals
}

/// Returns the sums of tile `t` with each row: `s · (quants - 4) · act` over both halves.
#[inline(always)]
fn three_bit_dots<const R: usize>(
    quants: &[Line; 3],
    fields: Vector,
    words: [&[[i32; 8]; SUPER_TILES]; R],
    terms: [[&[i32; SUPER_TILES]; 2]; R],
    t: usize,
) -> [Vector; R] {
    let tile = ThreeBitTile::new(quants);
    let mut dots = [fields; R];
    for r in 0..R {
        let [first, second] = tile.dot(&words[r][t]);
        let dot = hvx::dot2_each(hvx::interleave_even_h(first, second), fields);
        dots[r] = hvx::dot2_acc(dot, fields, terms[r][0][t]);
    }
    dots
}

/// Computes the scales of super-blocks of Q3_K: a line of signed halfwords for each tile.
#[cfg_attr(target_arch = "hexagon", inline(never))]
#[cfg_attr(not(target_arch = "hexagon"), inline(always))]
fn fill_fields(blocks: &[[Line; 3]], planes: &mut LinePlanes<GROUP_TILES>) {
    planes.fill_first(blocks.iter().map(half_fields));
}
