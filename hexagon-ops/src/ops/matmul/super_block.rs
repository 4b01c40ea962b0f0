//! Super-blocks as blocks of 32: their scales of both levels become planes of f16 scales, after
//! which the tiles are those of a plain type.
//!
//! ```text
//! for each group of up to 4 super-blocks along K
//!   for each super-block
//!     scale[tile][n] = f16(d[n] · s[tile][n])      2 tiles a line, as the plain type has them
//!     min[tile][n]   = f16(-dmin[n] · m[tile][n])  (Q4_K, Q5_K)
//!   the plain type's kernel over the group's tiles
//! ```
//!
//! 1. **The kernels are those of the plain types.** With such scales, Q4_K's tiles are tiles of
//!    Q4_1, Q5_K's are tiles of Q5_1, and IQ4_XS's are tiles of IQ4_NL. They
//!    share dequantizers and formats.
//! 2. **Types with a scale for each 16** have one line of scales for a tile: those of its first 16
//!    rows of K in the lower halves of words, those of the others in the upper halves. Their tiles
//!    have dequantizers for that.
//! 3. **Scales are made group by group**, as many as the dot product uses at a time, and stay in
//!    the cache.
//! 4. **A scale is rounded once more than ggml's**, to FP16, which the tile is rounded to anyway.
//!    d is often subnormal in FP16. The emulator computes with subnormal numbers as with others; no
//!    public source says that the vector unit does.

use core::ops::Range;

use super::Panel;
use super::dequantize::nibbles::NIBBLES;
use super::dequantize::wide::block_factor;
use super::quantize::GROUP_TILES;
use crate::hvx::{self, LinePlanes, Vector};
use crate::layout::{Line, SUPER_TILES};

/// Super-blocks of a group.
pub(super) const GROUP_BLOCKS: usize = GROUP_TILES / SUPER_TILES;
/// Lines of scales of a group with one for two tiles.
pub(super) const PAIR_LINES: usize = GROUP_TILES / 2;
/// Lines of scales of a group with one for each tile.
pub(super) const TILE_LINES: usize = GROUP_TILES;

/// A type of super-blocks whose scales become planes of up to `LINES` lines.
pub(super) trait Expansion<const LINES: usize> {
    /// `true` if there are minima.
    const HAS_MINS: bool;

    /// Computes the planes of super-blocks of a panel.
    fn fill(panel: &Panel<'_>, blocks: Range<usize>, planes: &mut LinePlanes<LINES>);

    /// Computes the planes of the same super-blocks of two panels.
    ///
    /// Arrays of panels and planes would be passed in memory; single arguments fit in registers.
    #[inline(always)]
    fn fill_two(
        panel: &Panel<'_>,
        other: &Panel<'_>,
        blocks: Range<usize>,
        planes: &mut LinePlanes<LINES>,
        other_planes: &mut LinePlanes<LINES>,
    ) {
        Self::fill(panel, blocks.clone(), planes);
        Self::fill(other, blocks, other_planes);
    }
}

/// f16 scales and minima of a group, as the planes of a panel.
pub(super) struct GroupPlanes<const LINES: usize>(LinePlanes<LINES>);

impl<const LINES: usize> GroupPlanes<LINES> {
    /// Returns planes without lines.
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self(LinePlanes::unfilled())
    }

    /// Computes the planes of the super-blocks `blocks` of a panel, at most [`GROUP_BLOCKS`].
    /// Returns their scales and minima, the scales again for a type without minima.
    #[inline(always)]
    pub(super) fn scales_and_mins<E: Expansion<LINES>>(
        &mut self,
        panel: &Panel<'_>,
        blocks: Range<usize>,
    ) -> [&[Line]; 2] {
        E::fill(panel, blocks, &mut self.0);
        let [scales, mins] = self.0.lines();
        [scales, if E::HAS_MINS { mins } else { scales }]
    }

    /// Computes the planes of the super-blocks `blocks` of a panel, at most [`GROUP_BLOCKS`].
    /// Returns these super-blocks as a panel of the plain type, whose tiles have `tile_lines` lines
    /// of quants.
    #[inline(always)]
    pub(super) fn expand<'a, E: Expansion<LINES>>(
        &'a mut self,
        panel: &Panel<'a>,
        blocks: Range<usize>,
        tile_lines: usize,
    ) -> Panel<'a> {
        E::fill(panel, blocks.clone(), &mut self.0);
        self.expanded(panel, blocks, tile_lines)
    }

    /// As [`Self::expand`], for two panels with `first` and `second`.
    #[inline(always)]
    pub(super) fn expand_two<'a, E: Expansion<LINES>>(
        [first, second]: [&'a mut Self; 2],
        panels: [&Panel<'a>; 2],
        blocks: Range<usize>,
        tile_lines: usize,
    ) -> [Panel<'a>; 2] {
        E::fill_two(
            panels[0],
            panels[1],
            blocks.clone(),
            &mut first.0,
            &mut second.0,
        );
        [
            first.expanded(panels[0], blocks.clone(), tile_lines),
            second.expanded(panels[1], blocks, tile_lines),
        ]
    }

    /// Returns the super-blocks `blocks` of a panel, whose planes these are, as a panel of the
    /// plain type.
    #[inline(always)]
    fn expanded<'a>(
        &'a self,
        panel: &Panel<'a>,
        blocks: Range<usize>,
        tile_lines: usize,
    ) -> Panel<'a> {
        let block_lines = SUPER_TILES * tile_lines;
        let [scales, mins] = self.0.lines();
        Panel {
            layout: panel.layout.expanded(blocks.len()),
            quants: &panel.quants[blocks.start * block_lines..blocks.end * block_lines],
            scales,
            mins,
        }
    }
}

/// Q4_K and Q5_K.
pub(super) struct UnsignedSixBits;

impl Expansion<PAIR_LINES> for UnsignedSixBits {
    const HAS_MINS: bool = true;

    #[cfg_attr(target_arch = "hexagon", inline(never))]
    #[cfg_attr(not(target_arch = "hexagon"), inline(always))]
    fn fill(panel: &Panel<'_>, blocks: Range<usize>, planes: &mut LinePlanes<PAIR_LINES>) {
        let blocks = &panel.scales.as_chunks::<4>().0[blocks];
        match <&[_; GROUP_BLOCKS]>::try_from(blocks) {
            Ok(group) => {
                let mut next = SixBitFields::new(&group[0]);
                planes.fill((1..=GROUP_BLOCKS).map(|b| next.exchange(group.get(b)).scaled()));
            }
            Err(_) => planes.fill(blocks.iter().map(|block| SixBitFields::new(block).scaled())),
        }
    }

    // Two whole groups are processed as one: the second begins in the line where the first ends.
    #[cfg_attr(target_arch = "hexagon", inline(never))]
    #[cfg_attr(not(target_arch = "hexagon"), inline(always))]
    fn fill_two(
        panel: &Panel<'_>,
        other: &Panel<'_>,
        blocks: Range<usize>,
        planes: &mut LinePlanes<PAIR_LINES>,
        other_planes: &mut LinePlanes<PAIR_LINES>,
    ) {
        let groups = [panel, other].map(|panel| {
            let blocks = panel.scales.as_chunks::<4>().0.get(blocks.clone());
            blocks.and_then(|blocks| <&[_; GROUP_BLOCKS]>::try_from(blocks).ok())
        });
        let [Some(group), Some(after)] = groups else {
            Self::fill(panel, blocks.clone(), planes);
            return Self::fill(other, blocks, other_planes);
        };
        let mut next = SixBitFields::new(&group[0]);
        planes.fill((1..=GROUP_BLOCKS).map(|b| {
            let block = group.get(b).unwrap_or(&after[0]);
            next.exchange(Some(block)).scaled()
        }));
        other_planes.fill((1..=GROUP_BLOCKS).map(|b| next.exchange(after.get(b)).scaled()));
    }
}

/// The factors of a super-block of Q4_K or Q5_K, and the fields that they multiply.
///
/// Conversions and shifts need the same unit, so multiplications do the shifting.
#[derive(Clone, Copy)]
struct SixBitFields {
    factors: [Vector; 2],
    scales: [Vector; 4],
    mins: [Vector; 4],
}

impl SixBitFields {
    #[inline(always)]
    fn new([factors, first, second, third]: &[Line; 4]) -> Self {
        let factors = hvx::load(factors);
        let [first, second, third] = [first, second, third].map(hvx::load);
        let lowest = hvx::splat_h(0x3f);
        let middle = hvx::splat_h(0x0f);
        let upper = hvx::splat_h(0x30);
        // Bits 9..6 of `low`, and above them the two bits of the third line, which are then at bits
        // 5..4.
        let last = |low: Vector, moved: Vector| {
            let low = hvx::shr_by_mul_h::<6>(low);
            hvx::or(hvx::and(low, middle), hvx::and(moved, upper))
        };
        Self {
            // d and -dmin.
            factors: [
                hvx::interleave_even_h(factors, factors),
                hvx::interleave_odd_h(factors, factors),
            ],
            scales: [
                hvx::and(first, lowest),
                hvx::shr_by_mul_h::<10>(first),
                hvx::and(third, lowest),
                last(first, hvx::shr_by_mul_h::<2>(third)),
            ],
            mins: [
                hvx::and(second, lowest),
                hvx::shr_by_mul_h::<10>(second),
                hvx::shr_by_mul_h::<10>(third),
                last(second, hvx::shr_by_mul_h::<4>(third)),
            ],
        }
    }

    /// Returns these fields, and unpacks those of the next super-block, if there is one, so that
    /// both share packets.
    #[inline(always)]
    fn exchange(&mut self, block: Option<&[Line; 4]>) -> Self {
        let fields = *self;
        if let Some(block) = block {
            *self = Self::new(block);
        }
        fields
    }

    /// Returns the f16 scales and minima, two tiles a vector.
    #[inline(always)]
    fn scaled(self) -> [[Vector; 4]; 2] {
        let plane = |fields: [Vector; 4], factor: Vector| {
            fields.map(|field| hvx::mul_f16(hvx::f16_from_h(field), factor))
        };
        let [d, minus_dmin] = self.factors;
        [plane(self.scales, d), plane(self.mins, minus_dmin)]
    }
}

/// Returns the six bits at the top of each halfword, with their sign.
#[inline(always)]
fn top_six(halves: Vector) -> Vector {
    hvx::asr_h(halves, 10)
}

/// Returns the fields of six bits with a sign: bits 5..4 at the top of `upper`, bits 3..0 at the
/// bottom of `low`.
#[inline(always)]
fn split_six(upper: Vector, low: Vector) -> Vector {
    hvx::or(
        hvx::and(top_six(upper), hvx::splat_h(0xfff0)),
        hvx::and(low, hvx::splat_h(0x0f)),
    )
}

/// IQ4_XS.
pub(super) struct SignedSixBits;

impl Expansion<PAIR_LINES> for SignedSixBits {
    const HAS_MINS: bool = false;

    #[cfg_attr(target_arch = "hexagon", inline(never))]
    #[cfg_attr(not(target_arch = "hexagon"), inline(always))]
    fn fill(panel: &Panel<'_>, blocks: Range<usize>, planes: &mut LinePlanes<PAIR_LINES>) {
        let blocks = &panel.scales.as_chunks::<2>().0[blocks];
        planes.fill_first(blocks.iter().map(|[first, second]| {
            let (first, second) = (hvx::load(first), hvx::load(second));
            // The low byte of each half comes from d.
            let d = hvx::interleave_even_b(first, hvx::shr_w(first, 16));
            let d = hvx::interleave_even_h(d, d);
            let fields = [
                top_six(second),
                top_six(hvx::shl_h(second, 6)),
                split_six(hvx::shl_h(first, 6), second),
                top_six(first),
            ];
            fields.map(|field| hvx::mul_f16(hvx::f16_from_h(field), d))
        }));
    }
}

/// Returns the scales of a super-block of Q3_K as signed halfwords, a vector for each tile.
#[inline(always)]
pub(super) fn half_fields([first, second, third]: &[Line; 3]) -> [Vector; SUPER_TILES] {
    let [first, second, third] = [first, second, third].map(hvx::load);
    [
        top_six(first),
        top_six(second),
        top_six(third),
        top_six(hvx::shl_h(first, 6)),
        top_six(hvx::shl_h(second, 6)),
        top_six(hvx::shl_h(third, 6)),
        split_six(hvx::shl_h(third, 14), first),
        split_six(hvx::shl_h(third, 12), second),
    ]
}

/// Q3_K: a line of scales for each tile.
pub(super) struct HalfScales;

impl Expansion<TILE_LINES> for HalfScales {
    const HAS_MINS: bool = false;

    #[cfg_attr(target_arch = "hexagon", inline(never))]
    #[cfg_attr(not(target_arch = "hexagon"), inline(always))]
    fn fill(panel: &Panel<'_>, blocks: Range<usize>, planes: &mut LinePlanes<TILE_LINES>) {
        let lines = &panel.scales.as_chunks::<3>().0[blocks.clone()];
        planes.fill_first(blocks.zip(lines).map(|(b, lines)| {
            let d = block_factor(panel.mins, b);
            half_fields(lines).map(|field| hvx::mul_f16(hvx::f16_from_h(field), d))
        }));
    }
}

/// Q2_K: two lines for each tile. The first plane has the scales of the tile's first 16 rows of K
/// and the minima of the others, the second plane the rest.
pub(super) struct HalfScalesAndMins;

impl Expansion<TILE_LINES> for HalfScalesAndMins {
    const HAS_MINS: bool = true;

    #[cfg_attr(target_arch = "hexagon", inline(never))]
    #[cfg_attr(not(target_arch = "hexagon"), inline(always))]
    fn fill(panel: &Panel<'_>, blocks: Range<usize>, planes: &mut LinePlanes<TILE_LINES>) {
        let blocks = &panel.scales.as_chunks::<5>().0[blocks];
        let numbers = hvx::load(&NIBBLES);
        planes.fill(blocks.iter().map(|[header, pairs @ ..]| {
            // Words with d in the lower half and -dmin in the upper half, and words with both
            // exchanged.
            let factors = hvx::load(header);
            let exchanged = hvx::or(hvx::shr_w(factors, 16), hvx::shl_w(factors, 16));
            let mut planes = [[factors; SUPER_TILES]; 2];
            for (p, line) in pairs.iter().enumerate() {
                let line = hvx::load(line);
                let high = hvx::lookup16(hvx::shr_b(line, 4), numbers);
                let low = hvx::lookup16(line, numbers);
                planes[0][2 * p] = hvx::mul_f16(high.0, factors);
                planes[0][2 * p + 1] = hvx::mul_f16(high.1, factors);
                planes[1][2 * p] = hvx::mul_f16(low.0, exchanged);
                planes[1][2 * p + 1] = hvx::mul_f16(low.1, exchanged);
            }
            planes
        }));
    }
}
