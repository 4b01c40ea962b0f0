//! Products of many rows in fixed point, for chips without a matrix unit, of weights with one scale
//! for each block of 32: Q4_0 and Q8_0.
//!
//! A dot product of a tile is an integer. As a float it would be converted, multiplied and added
//! with a dozen instructions, since V68 has none for the conversion. Here all of a strip stays an
//! integer until its end: activations have 16 bits and one factor for each row ([`act`]), weight
//! scales 16 bits and one factor for each column ([`scales`]).
//!
//! ```text
//! sum[n] = 0
//! for each tile of the strip, each of up to four rows
//!   high[n] = Σ over 8 words g of  quants[g][n] · high digits[g]             u8 · i8
//!   low[n]  = -ZERO · sum of the block's activations + Σ quants[g][n] · low digits[g]
//!   sum[n] += (256 · high[n] + low[n]) · scale[tile][n] / 2^15               rounded
//! result[n] = sum[n] · factor of the row · factor of the column
//! ```
//!
//! 1. A dot product of a tile is at most 32 · 128 · 2^15 = 2^27, and one of 8 bits and its
//!    multiplication are exact.
//! 2. No sum of a strip leaves 32 bits: `Bits` makes scales smaller for a longer K, by up to four
//!    bits, and then activations. Scales have eleven significant bits before.
//! 3. Four rows share the loads and the unpacking of weights. Rows of activations are stored in
//!    fours for them, so that one address leads to all their words.

mod act;
mod scales;

pub(super) use self::act::{quantize_rows, rows_lines};
pub(super) use self::scales::fix_scales;

use self::act::{BLOCK_LINES, Block, FACTOR_LINES, Starts};
use super::Panel;
use super::quantize::WordPairs;
use crate::hvx::{self, Vector};
use crate::layout::{Line, TILE_DIM, WeightType};

/// Rows that are stored together.
pub(super) const ROWS: usize = 4;

/// `true` in libraries for chips that may have no matrix unit, and on the host. Others have no room
/// for these kernels.
pub(super) const IS_BUILT: bool = cfg!(any(
    not(target_arch = "hexagon"),
    not(target_feature = "hvxv73")
));

/// Returns the power of two that was added to each weight of a type, `None` if these kernels do not
/// multiply it.
pub(super) const fn zero_bits(weight: WeightType) -> Option<u32> {
    match weight {
        WeightType::Q4_0 if IS_BUILT => Some(3),
        WeightType::Q8_0 if IS_BUILT => Some(7),
        _ => None,
    }
}

/// The bits that scales and activations have less, so that no sum leaves 32 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bits {
    scales: u16,
    act: u16,
}

impl Bits {
    /// Most bits that scales lose: then eleven are left, all that an f16 has.
    const MOST: u32 = 4;

    /// Returns those of rows of `k` elements, for weights of magnitudes up to 2^`zero_bits`.
    ///
    /// With activations and scales of 15 bits, of which a product loses 15, a sum has 15 bits more
    /// than `k` such weights.
    pub(super) const fn new(k: usize, zero_bits: u32) -> Self {
        let too_many = (k.next_power_of_two().ilog2() + zero_bits + 15).saturating_sub(31);
        let scales = if too_many < Self::MOST {
            too_many
        } else {
            Self::MOST
        };
        // CAST: at most 64 bits.
        #[expect(clippy::cast_possible_truncation, reason = "numbers of bits")]
        Self {
            scales: scales as u16,
            act: (too_many - scales) as u16,
        }
    }
}

/// A way to make bytes of the quants of a tile.
trait Bytes<const L: usize>: Copy {
    /// Returns the bytes of elements `4g` to `4g + 3` in vector `g`.
    fn of(lines: &[Line; L]) -> [Vector; 8];
}

#[derive(Clone, Copy)]
struct Nibbles;

impl Bytes<4> for Nibbles {
    #[inline(always)]
    fn of(lines: &[Line; 4]) -> [Vector; 8] {
        let [a, b, c, d] = lines.each_ref().map(hvx::load);
        let low = |bytes| hvx::and(bytes, hvx::splat_b(0x0f));
        let high = |bytes| hvx::shr_b(bytes, 4);
        [
            low(a),
            low(b),
            low(c),
            low(d),
            high(a),
            high(b),
            high(c),
            high(d),
        ]
    }
}

#[derive(Clone, Copy)]
struct Whole;

impl Bytes<8> for Whole {
    #[inline(always)]
    fn of(lines: &[Line; 8]) -> [Vector; 8] {
        lines.each_ref().map(hvx::load)
    }
}

/// Multiplies one strip by up to four rows.
///
/// - `panel`: its scales are those of [`fix_scales`], which gave `column` as well
/// - `acts`: [`rows_lines`] of four rows
/// - `out`: the results of the first rows; as many are computed
pub(super) fn multiply(panel: &Panel<'_>, column: &Line, acts: &[Line], out: &mut [Line]) {
    hvx::widest(Multiply {
        panel,
        column,
        acts,
        out,
    });
}

struct Multiply<'a> {
    panel: &'a Panel<'a>,
    column: &'a Line,
    acts: &'a [Line],
    out: &'a mut [Line],
}

impl hvx::Kernel for Multiply<'_> {
    type Output = ();
    const INLINED: bool = true;

    #[inline(always)]
    fn run(self) {
        match self.panel.layout.weight() {
            WeightType::Q4_0 => self.of_rows::<Nibbles, 4>(),
            _ => self.of_rows::<Whole, 8>(),
        }
    }
}

impl Multiply<'_> {
    #[inline(always)]
    fn of_rows<B: Bytes<L>, const L: usize>(self) {
        match self.out.len() {
            1 => put(sums::<B, L, 1>(self.panel, self.acts), self),
            2 => put(sums::<B, L, 2>(self.panel, self.acts), self),
            _ => put(sums::<B, L, ROWS>(self.panel, self.acts), self),
        }
    }
}

/// Stores the results of the first rows.
#[inline(always)]
fn put<const R: usize>(sums: [Vector; R], to: Multiply<'_>) {
    let column = hvx::load(to.column);
    let factors = to.acts.as_chunks::<FACTOR_LINES>().0;
    for ((out, sum), [factor, nan]) in to.out.iter_mut().zip(sums).zip(factors) {
        let result = hvx::mul_f32(hvx::f32_from_w(sum), hvx::load(factor));
        let result = hvx::mul_by_power(result, column);
        hvx::store(out, hvx::or(result, hvx::load(nan)));
    }
}

/// Returns the sums of the first `R` rows.
#[cfg_attr(target_arch = "hexagon", inline(never))]
#[cfg_attr(not(target_arch = "hexagon"), inline(always))]
fn sums<B: Bytes<L>, const L: usize, const R: usize>(
    panel: &Panel<'_>,
    acts: &[Line],
) -> [Vector; R] {
    let mut sums = [hvx::splat_w(0); R];
    let (blocks, starts) = planes(panel.layout.k_tiles(), acts);
    let quants: &[[Line; L]] = panel.quants.as_chunks().0;
    let (fours, rest) = quants.as_chunks::<4>();
    let scales = panel.scales.as_chunks::<2>().0;
    let acts = || blocks.iter().zip(starts);
    for ((quants, scales), (block, starts)) in fours.iter().zip(scales).zip(acts()) {
        for pair in 0..2 {
            let scale = hvx::load(&scales[pair]);
            let first = hvx::shl_w(scale, 16);
            add_tile::<B, L, R>(&quants[2 * pair], block, starts, 2 * pair, first, &mut sums);
            let second = 2 * pair + 1;
            add_tile::<B, L, R>(&quants[second], block, starts, second, scale, &mut sums);
        }
    }
    let Some((block, starts)) = acts().nth(fours.len()) else {
        return sums;
    };
    for (tile, quants) in rest.iter().enumerate() {
        let scale = hvx::load(&panel.scales[2 * fours.len() + tile / 2]);
        let scale = if tile % 2 == 0 {
            hvx::shl_w(scale, 16)
        } else {
            scale
        };
        add_tile::<B, L, R>(quants, block, starts, tile, scale, &mut sums);
    }
    sums
}

/// Adds the products of a tile, the `tile`-th of a block.
#[inline(always)]
fn add_tile<B: Bytes<L>, const L: usize, const R: usize>(
    quants: &[Line; L],
    block: &Block,
    starts: &Starts,
    tile: usize,
    scale: Vector,
    sums: &mut [Vector; R],
) {
    let bytes = B::of(quants);
    for (r, sum) in sums.iter_mut().enumerate() {
        let [high_words, low_words] = [0, 1].map(|digit| block[r][digit][tile].words());
        let mut high = hvx::dot4_word(bytes[0], high_words[0]);
        let mut low = hvx::dot4_acc(hvx::splat_w(starts[r][tile]), bytes[0], low_words[0]);
        for g in 1..8 {
            high = hvx::dot4_acc(high, bytes[g], high_words[g]);
            low = hvx::dot4_acc(low, bytes[g], low_words[g]);
        }
        let dot = hvx::shl_add_w(low, high, 8);
        *sum = hvx::add_w(*sum, hvx::mul_odd_parts(dot, scale));
    }
}

/// Returns the digits and the starts of sums of four rows, a block of four tiles each.
#[inline(always)]
fn planes(k_tiles: usize, acts: &[Line]) -> (&[Block], &[Starts]) {
    let rest = acts.get(ROWS * FACTOR_LINES..).unwrap_or_default();
    let lines = k_tiles.div_ceil(4) * BLOCK_LINES;
    let (blocks, starts) = rest.split_at(lines.min(rest.len()));
    (bytemuck::cast_slice(blocks), bytemuck::cast_slice(starts))
}

const _: () = assert!(size_of::<[WordPairs; 4]>() == size_of::<Line>() && TILE_DIM == 32);
