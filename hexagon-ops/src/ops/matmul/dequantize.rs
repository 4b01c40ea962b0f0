//! Dequantization: quantized tiles to FP16 tiles in the matrix unit's order, without a single
//! shuffle.
//!
//! Input is a [`Panel`]: lines of quants, and lines of scales (Q4_1: also of minima). Output is one
//! FP16 tile of 32 (K) × 32 (N) for each tile of quants. A line of an FP16 tile holds two rows of
//! K: halfwords 2n and 2n + 1 are rows k and k + 1 of column n. The quants were packed so that this
//! order results without a shuffle ([`crate::layout`]):
//!
//! ```text
//! for each run: the 2 (MXFP4: 4) tiles that share a line of scales
//!   for each tile of the run
//!     s[n], s[n] = the tile's 32 scales, each twice: both rows of a halfword pair need it
//!     for each of 8 parts of the tile                   4-bit types: low or high nibbles of line v
//!       low nibbles   -> lookup -> rows 4v, 4v+1 and 4v+2, 4v+3           · s (+ m) -> 2 lines
//!       high nibbles  -> lookup -> rows 4v+16, 4v+17 and 4v+18, 4v+19     · s (+ m) -> 2 lines
//! ```
//!
//! 1. **One lookup converts and widens.** `vlut16` replaces a nibble by the 16-bit entry of a
//!    table, here the exact FP16 value of the quant, and sends even bytes to one vector and odd
//!    bytes to another. That is conversion, subtraction of the zero point and reordering in one
//!    instruction. Nibbles need no mask, since the lookup ignores the upper half of a byte.
//!    IQ4_NL and MXFP4 differ from Q4_0 by the table alone.
//! 2. **Scales come in place.** A word of the scale plane holds the f16 scales of two tiles for one
//!    column. An interleave of the line with itself doubles the halves of one tile, which then
//!    match the halfword pairs of all its FP16 lines.
//! 3. **Bytes become FP16 by their exponent**, with IEEE arithmetic. A Q8_0 byte is stored as u =
//!    q + 128. With 0x64 above it, it reads as the FP16 number 1024 + u; 1152 is subtracted
//!    exactly, which leaves q. A qfloat difference would keep the exponent of 1152, so that a
//!    product with it has few bits: with qfloat, 128 is subtracted from integers, and the
//!    conversion is the unit's own ([`hvx::f16_from_spread`]).
//! 4. **Each element is rounded once** (twice for Q4_1 with qfloat), by the multiplication with its
//!    scale.
//! 5. **Super-blocks have scales of two levels**, which become one level first
//!    (`matmul/super_block.rs`).
//! 6. **The shift unit is scarce.** `vlut16` needs it, as do qfloat's sums and conversions. So high
//!    nibbles are moved by a multiplication, and with qfloat Q4_1 and Q4Tile use two lookups of
//!    bytes ([`hvx::lookup32_of`]), which do without that unit.
//! 7. **Some parts are looked up ahead** of the one that is scaled, across tiles. Otherwise a tile
//!    would begin with lookups and end with stores, with nothing else in their packets.
//! 8. **Groups of 2 × 16 look up their scales too** (`grouped`): one scale serves half an FP16
//!    line, and a lookup spreads four scales over two lines.
//!
//! Values beyond FP16 (a scale times the largest quant over 65504) become infinite.

mod grouped;
mod narrow;
pub(super) mod nibbles;
pub(super) mod wide;

use core::ops::Range;

use self::nibbles::{PowerOfTwo, Scaled, ScaledAndShifted};
use super::Panel;
use super::super_block::{
    Expansion, GROUP_BLOCKS, GroupPlanes, HalfScales, HalfScalesAndMins, SignedSixBits,
    UnsignedSixBits,
};
use crate::error::{Error, Result};
use crate::hvx::{self, Vector};
use crate::layout::{Line, SUPER_TILES, Tile, WeightType};

/// Returns the FP16 bits of a small integer.
const fn f16_bits(value: i8) -> u16 {
    let magnitude = value.unsigned_abs() as u16;
    if magnitude == 0 {
        return 0;
    }
    // CAST: the logarithm of a u16 is at most 15.
    #[expect(clippy::cast_possible_truncation, reason = "at most 15")]
    let exponent = magnitude.ilog2() as u16;
    let sign = if value < 0 { 0x8000 } else { 0 };
    sign | (exponent + 15) << 10 | (magnitude << (10 - exponent)) & 0x3ff
}

/// Parts of a tile: two lines of an FP16 tile each.
const PARTS: usize = 8;
/// Most parts that a dequantizer looks up ahead.
const MOST_AHEAD: usize = 6;

/// Returns the parts to look up ahead, for IEEE arithmetic and for qfloat: those with the fewest
/// packets. The host gains nothing by it.
const fn ahead(ieee: usize, qfloat: usize) -> usize {
    if cfg!(not(target_arch = "hexagon")) {
        0
    } else if hvx::HAS_IEEE {
        ieee
    } else {
        qfloat
    }
}

/// The f16 numbers of a part, before its scale; or the values from which they are computed.
type Numbers = (Vector, Vector);

/// The dequantizer of one weight type, with `L` lines of quants a tile and `T` tiles a line of
/// scales.
trait Dequantizer<const L: usize, const T: usize>: Copy {
    /// Parts that are looked up ahead.
    const AHEAD: usize;
    /// The scales of a tile.
    type Scales: Copy;

    /// Returns the scales of tile `i` of those that share the lines `scale` and `min`.
    fn scales(self, scale: Vector, min: Vector, i: usize) -> Self::Scales;

    /// Returns the numbers of a part.
    fn numbers(self, quants: &[Line; L], part: usize) -> Numbers;

    /// Returns the numbers of a part, scaled.
    fn scaled(self, numbers: Numbers, scales: Self::Scales, part: usize) -> [Vector; 2];

    /// Dequantizes the tiles of a group of super-blocks.
    #[inline(always)]
    fn group(self, quants: &[[Line; L]], scales: &[Line], mins: &[Line], out: &mut [Tile]) {
        dequantize_tiles(self, quants, scales, mins, out);
    }

    /// Returns the first line of a part in the FP16 tile.
    #[inline(always)]
    fn line(part: usize) -> usize {
        2 * part
    }
}

/// Returns numbers times `scale`.
#[inline(always)]
fn times((a, b): Numbers, scale: Vector) -> [Vector; 2] {
    [hvx::mul_f16(a, scale), hvx::mul_f16(b, scale)]
}

/// Returns numbers times `scale` plus `min`.
#[inline(always)]
fn times_plus((a, b): Numbers, [scale, min]: [Vector; 2]) -> [Vector; 2] {
    [
        hvx::mul_add_f16(a, scale, min),
        hvx::mul_add_f16(b, scale, min),
    ]
}

/// The byte of a Q8_0 quant that is 0.
const FLIPPED_ZERO: u8 = 128;

/// Returns the f16 of quants from [`hvx::spread_b`].
#[inline(always)]
fn from_flipped((even, odd): Numbers) -> Numbers {
    let quants = |halves: Vector| hvx::f16_from_spread(halves, FLIPPED_ZERO);
    (quants(even), quants(odd))
}

/// The dequantizer of flipped bytes with an f16 scale.
#[derive(Clone, Copy)]
struct FlippedTiles;

impl Dequantizer<8, 2> for FlippedTiles {
    const AHEAD: usize = ahead(5, 4);
    type Scales = Vector;

    #[inline(always)]
    fn scales(self, scale: Vector, _: Vector, i: usize) -> Vector {
        twice(scale, i)
    }

    #[inline(always)]
    fn numbers(self, quants: &[Line; 8], part: usize) -> Numbers {
        hvx::spread_b(hvx::load(&quants[part]), FLIPPED_ZERO)
    }

    #[inline(always)]
    fn scaled(self, spread: Numbers, scale: Vector, _: usize) -> [Vector; 2] {
        times(from_flipped(spread), scale)
    }
}

/// Dequantizes the tiles `tiles` of a panel.
#[inline(always)]
fn for_each_tile<D: Dequantizer<L, T>, const L: usize, const T: usize>(
    dequantizer: D,
    panel: &Panel<'_>,
    tiles: Range<usize>,
    out: &mut [Tile],
) {
    let quants = &panel.quants.as_chunks::<L>().0[tiles.clone()];
    let scales = &panel.scales[tiles.start / T..];
    let mins = panel.mins.get(tiles.start / T..);
    let mins = mins.filter(|mins| !mins.is_empty()).unwrap_or(scales);
    dequantize_tiles(dequantizer, quants, scales, mins, out);
}

/// Dequantizes tiles, with as many lines of scales and of minima as they need.
///
/// On the device this is not inlined: only as arguments of a function are the slices known not to
/// overlap. Without that, every load would wait for the stores before it.
#[cfg_attr(target_arch = "hexagon", inline(never))]
#[cfg_attr(not(target_arch = "hexagon"), inline(always))]
fn dequantize_tiles<D: Dequantizer<L, T>, const L: usize, const T: usize>(
    dequantizer: D,
    quants: &[[Line; L]],
    scales: &[Line],
    mins: &[Line],
    out: &mut [Tile],
) {
    let Some(first) = quants.first() else {
        return;
    };
    let (groups, tail) = quants.as_chunks::<T>();
    let (out_groups, out_tail) = out.as_chunks_mut::<T>();
    let mut parts = PartsAhead::new(dequantizer, first);
    let all = groups.iter().zip(scales).zip(mins).zip(out_groups);
    for (g, (((group, scale), min), out)) in all.enumerate() {
        // Parts are loaded ahead; after the last group these loads are not used.
        let after = groups.get(g + 1).unwrap_or(group);
        let (scale, min) = (hvx::load(scale), hvx::load(min));
        for i in 0..T {
            let scales = dequantizer.scales(scale, min, i);
            let next = if i + 1 < T { &group[i + 1] } else { &after[0] };
            parts.finish_tile::<_, _, _, false>(
                dequantizer,
                scales,
                [&group[i], next],
                &mut out[i],
            );
        }
    }
    if let (Some(scale), Some(min)) = (scales.get(groups.len()), mins.get(groups.len())) {
        let (scale, min) = (hvx::load(scale), hvx::load(min));
        for (i, (quants, out)) in tail.iter().zip(out_tail).enumerate() {
            let scales = dequantizer.scales(scale, min, i);
            let mut parts = PartsAhead::new(dequantizer, quants);
            parts.finish_tile::<_, _, _, false>(dequantizer, scales, [quants, quants], out);
        }
    }
}

/// Dequantizes tiles, as many as a multiple of 4, whose lines of scales have two tiles each. Not
/// inlined on the device, as [`dequantize_tiles`].
///
/// Lines are loaded, and stored, in the order that needs the fewest packets.
#[cfg_attr(target_arch = "hexagon", inline(never))]
#[cfg_attr(not(target_arch = "hexagon"), inline(always))]
fn dequantize_fours<D: Dequantizer<L, 2>, const L: usize>(
    dequantizer: D,
    quants: &[[Line; L]],
    scales: &[Line],
    mins: &[Line],
    out: &mut [Tile],
) {
    let Some(first) = quants.first() else {
        return;
    };
    let groups = quants.as_chunks::<4>().0;
    let lines = scales
        .as_chunks::<2>()
        .0
        .iter()
        .zip(mins.as_chunks::<2>().0);
    let all = groups.iter().zip(lines).zip(out.as_chunks_mut::<4>().0);
    let mut parts = PartsAhead::new(dequantizer, first);
    for (g, ((group, (scales, mins)), out)) in all.enumerate() {
        // Parts are loaded ahead; after the last group these loads are not used.
        let after = groups.get((g + 1).min(groups.len() - 1)).unwrap_or(group);
        let lines = [
            (hvx::load(&scales[0]), hvx::load(&mins[0])),
            (hvx::load(&scales[1]), hvx::load(&mins[1])),
        ];
        let mut two_tiles = |line: usize| {
            let (scale, min) = lines[line];
            for place in 0..2 {
                let i = 2 * line + place;
                let scales = dequantizer.scales(scale, min, place);
                let tiles = [&group[i], if i == 3 { &after[0] } else { &group[i + 1] }];
                parts.finish_tile::<_, _, _, true>(dequantizer, scales, tiles, &mut out[i]);
            }
        };
        // Written out, because the compiler would not unroll a loop.
        two_tiles(0);
        two_tiles(1);
    }
}

/// The numbers of the next parts, as many as the dequantizer looks up ahead.
///
/// Lines are not kept, but loaded again: LLVM 23's vector combiner for Hexagon leaves out a load if
/// only the next iteration of the loop uses the line.
struct PartsAhead([Numbers; MOST_AHEAD]);

impl PartsAhead {
    /// Looks up the first parts of a tile.
    #[inline(always)]
    fn new<D: Dequantizer<L, T>, const L: usize, const T: usize>(
        dequantizer: D,
        quants: &[Line; L],
    ) -> Self {
        let zero = hvx::splat_w(0);
        let mut parts = [(zero, zero); MOST_AHEAD];
        for (part, numbers) in parts.iter_mut().enumerate().take(D::AHEAD) {
            *numbers = dequantizer.numbers(quants, part);
        }
        Self(parts)
    }

    /// Appends the numbers that were just looked up, and returns the oldest ones, which belong to
    /// the next part.
    #[inline(always)]
    fn exchange<D: Dequantizer<L, T>, const L: usize, const T: usize>(
        &mut self,
        numbers: Numbers,
    ) -> Numbers {
        if D::AHEAD == 0 {
            return numbers;
        }
        let first = self.0[0];
        for i in 1..D::AHEAD {
            self.0[i - 1] = self.0[i];
        }
        self.0[D::AHEAD - 1] = numbers;
        first
    }

    /// Dequantizes the tile `quants`, and looks up the first parts of the tile `next`. The order of
    /// stores, `SECOND_FIRST`, changes the compiler's schedule.
    #[inline(always)]
    fn finish_tile<
        D: Dequantizer<L, T>,
        const L: usize,
        const T: usize,
        const SECOND_FIRST: bool,
    >(
        &mut self,
        dequantizer: D,
        scales: D::Scales,
        [quants, next]: [&[Line; L]; 2],
        out: &mut Tile,
    ) {
        for part in 0..PARTS {
            let later = part + D::AHEAD;
            let ahead = if later < PARTS {
                dequantizer.numbers(quants, later)
            } else {
                dequantizer.numbers(next, later - PARTS)
            };
            let numbers = self.exchange::<D, L, T>(ahead);
            let [first, second] = dequantizer.scaled(numbers, scales, part);
            if SECOND_FIRST {
                hvx::store(&mut out.0[D::line(part) + 1], second);
                hvx::store(&mut out.0[D::line(part)], first);
            } else {
                hvx::store(&mut out.0[D::line(part)], first);
                hvx::store(&mut out.0[D::line(part) + 1], second);
            }
        }
    }
}

/// Dequantizes tiles of super-blocks, as tiles of a plain type.
///
/// On the device this is not inlined, so that only super-blocks pay for its stack.
#[cfg_attr(target_arch = "hexagon", inline(never))]
#[cfg_attr(not(target_arch = "hexagon"), inline(always))]
fn for_each_super_block<
    E: Expansion<LINES>,
    D: Dequantizer<L, T>,
    const LINES: usize,
    const L: usize,
    const T: usize,
>(
    _: E,
    dequantizer: D,
    panel: &Panel<'_>,
    tiles: Range<usize>,
    mut out: &mut [Tile],
) {
    let mut quants = &panel.quants.as_chunks::<L>().0[tiles.clone()];
    let mut planes = GroupPlanes::<LINES>::new();
    let last = tiles.end.div_ceil(SUPER_TILES);
    let mut first = tiles.start / SUPER_TILES;
    let mut skipped = tiles.start % SUPER_TILES;
    while !out.is_empty() {
        let [scales, mins] =
            planes.scales_and_mins::<E>(panel, first..(first + GROUP_BLOCKS).min(last));
        let lines = skipped / T;
        let count = (GROUP_BLOCKS * SUPER_TILES - skipped).min(out.len());
        let (now, later) = core::mem::take(&mut out).split_at_mut(count);
        let (group, others) = quants.split_at(count);
        dequantizer.group(group, &scales[lines..], &mins[lines..], now);
        out = later;
        quants = others;
        first += GROUP_BLOCKS;
        skipped = 0;
    }
}

/// Returns the halfwords of tile `i` of a line for two tiles, each twice.
#[inline(always)]
fn twice(pair: Vector, i: usize) -> Vector {
    if i == 0 {
        hvx::interleave_even_h(pair, pair)
    } else {
        hvx::interleave_odd_h(pair, pair)
    }
}

/// Dequantizes tiles `tiles` of a panel into `out`.
///
/// - `tiles`: a range of tiles along K that starts at a multiple of 4
/// - `out`: as many FP16 tiles
///
/// # Errors
/// `Index` if the range starts elsewhere or ends past the panel; `Length` if `out` has another
/// length; `NoKernel` for F16 weights, whose panel already consists of FP16 tiles.
pub fn dequantize(panel: &Panel<'_>, tiles: Range<usize>, out: &mut [Tile]) -> Result<()> {
    let limit = panel.layout.k_tiles();
    if !tiles.start.is_multiple_of(4) || tiles.end > limit || tiles.start > tiles.end {
        return Err(Error::Index {
            what: "tile range",
            index: tiles.end.max(tiles.start),
            limit,
        });
    }
    if out.len() != tiles.len() {
        return Err(Error::Length {
            what: "dequantized tiles",
            have: out.len(),
            want: tiles.len(),
        });
    }
    hvx::widest(DequantizeTiles { panel, tiles, out })
}

/// The arguments of [`dequantize`] after its checks.
struct DequantizeTiles<'a> {
    panel: &'a Panel<'a>,
    tiles: Range<usize>,
    out: &'a mut [Tile],
}

impl hvx::Kernel for DequantizeTiles<'_> {
    type Output = Result<()>;
    const INLINED: bool = true;

    #[inline(always)]
    fn run(self) -> Result<()> {
        let Self { panel, tiles, out } = self;
        match panel.layout.weight() {
            weight @ WeightType::F16 => {
                return Err(Error::NoKernel {
                    weight,
                    kernel: "dequantize",
                });
            }
            WeightType::Q4_0 => for_each_tile(Scaled::q4_0(), panel, tiles, out),
            WeightType::Q4Tile => for_each_tile(grouped::GroupedNibbles::new(), panel, tiles, out),
            WeightType::Q8Tile => for_each_tile(grouped::GroupedBytes::new(), panel, tiles, out),
            WeightType::Q4_1 => {
                let table = ScaledAndShifted::new();
                for_each_tile(table, panel, tiles, out);
            }
            WeightType::Q8_0 => for_each_tile(FlippedTiles, panel, tiles, out),
            WeightType::Q5_0 => for_each_tile(wide::FiveBits::<false>::new(), panel, tiles, out),
            WeightType::Q5_1 => for_each_tile(wide::FiveBits::<true>::new(), panel, tiles, out),
            WeightType::Q5K => {
                for_each_super_block(
                    UnsignedSixBits,
                    wide::FiveBits::<true>::new(),
                    panel,
                    tiles,
                    out,
                );
            }
            WeightType::Q6K => wide::six_bit_tiles(panel, tiles, out),
            WeightType::Iq4Nl => {
                for_each_tile(Scaled::iq4_nl(), panel, tiles, out);
            }
            WeightType::Mxfp4 => {
                for_each_tile(PowerOfTwo::new(), panel, tiles, out);
            }
            WeightType::Q4K => {
                let table = ScaledAndShifted::new();
                for_each_super_block(UnsignedSixBits, table, panel, tiles, out);
            }
            WeightType::Iq4Xs => {
                let table = Scaled::iq4_nl();
                for_each_super_block(SignedSixBits, table, panel, tiles, out);
            }
            WeightType::Q3K => {
                for_each_super_block(HalfScales, narrow::ThreeBits::new(), panel, tiles, out);
            }
            WeightType::Q2K => {
                let tables = narrow::TwoBits::new();
                for_each_super_block(HalfScalesAndMins, tables, panel, tiles, out);
            }
        }
        Ok(())
    }
}
