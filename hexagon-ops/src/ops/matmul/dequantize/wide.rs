//! Dequantizers of 5- and 6-bit quants.
//!
//! A tile has eight values of four quants a word, as Q8_0 has; five (six) of them are in the lower
//! bits of the lines' bytes, the others are put together from the upper bits of all lines
//! ([`crate::layout`]).
//!
//! Five bits are looked up. A byte of six bits becomes FP16 as one of Q8_0 does
//! ([`hvx::f16_from_b`]).

use core::ops::Range;

use super::{Dequantizer, Numbers, ahead, f16_bits, times, times_plus, twice};
use crate::hvx::{self, Vector};
use crate::layout::{LINE_BYTES, Line, SUPER_TILES, Tile};
use crate::ops::matmul::Panel;

/// Returns the bits of `mask` of `line` moved right by `count`.
#[inline(always)]
fn bits(line: Vector, count: i32, mask: u8) -> Vector {
    let moved = if count == 0 {
        line
    } else {
        hvx::shr_b(line, count)
    };
    hvx::and(moved, hvx::splat_b(mask))
}

/// Returns a table of [`hvx::lookup32_of`]: f16 of 0 to `count - 1` less `zero`, repeated.
pub(super) const fn table32(zero: i8, count: i8) -> Line {
    let mut line = [0; LINE_BYTES];
    let mut entry = 0;
    let mut value = 0;
    while entry < 32 {
        let [low, high] = f16_bits(value - zero).to_le_bytes();
        line[2 * entry] = low;
        line[2 * entry + 1] = high;
        entry += 1;
        value = (value + 1) % count;
    }
    Line(line)
}

static UNSIGNED: Line = table32(0, 32);
static SIGNED: Line = table32(16, 32);

/// The dequantizer of 5-bit quants with an f16 scale for each column: less 16, or with a minimum if
/// `ADD`. Its lookup sees the five lower bits of a byte, so that no value needs a mask in the end.
#[derive(Clone, Copy)]
pub(super) struct FiveBits<const ADD: bool>(Vector);

impl<const ADD: bool> FiveBits<ADD> {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self(hvx::load(if ADD { &UNSIGNED } else { &SIGNED }))
    }
}

/// Returns the bits of `mask`.
#[inline(always)]
fn masked(line: Vector, mask: u8) -> Vector {
    hvx::and(line, hvx::splat_b(mask))
}

impl<const ADD: bool> Dequantizer<5, 2> for FiveBits<ADD> {
    const AHEAD: usize = if ADD { ahead(2, 4) } else { ahead(2, 3) };
    type Scales = [Vector; 2];

    #[inline(always)]
    fn scales(self, scale: Vector, min: Vector, i: usize) -> [Vector; 2] {
        [twice(scale, i), twice(min, i)]
    }

    #[inline(always)]
    fn numbers(self, quants: &[Line; 5], part: usize) -> Numbers {
        let line = |i: usize| hvx::load(&quants[i]);
        // The upper three bits of parts 5 to 7 are in lines 0 to 2.
        let lower = match part {
            5 => masked(hvx::shr_by_mul_h::<2>(line(3)), 0x18),
            6 => masked(hvx::shr_by_mul_h::<3>(line(4)), 0x18),
            7 => hvx::or(
                masked(hvx::shr_by_mul_h::<3>(line(3)), 0x10),
                masked(hvx::shr_by_mul_h::<2>(line(4)), 0x08),
            ),
            _ => return hvx::lookup32_of::<0>(line(part), self.0),
        };
        let value = hvx::or(masked(line(part - 5), 0xe0), lower);
        hvx::lookup32_of::<0>(hvx::shr_by_mul_h::<3>(value), self.0)
    }

    #[inline(always)]
    fn scaled(self, numbers: Numbers, scales: [Vector; 2], _: usize) -> [Vector; 2] {
        if ADD {
            times_plus(numbers, scales)
        } else {
            times(numbers, scales[0])
        }
    }
}

/// Returns the signed halfwords of tile `i` of a line of signed bytes for two tiles: those of the
/// tile's first 16 rows of K in lower halves, those of the others in upper halves.
#[inline(always)]
pub(in crate::ops::matmul) fn half_scales(line: Vector, i: usize) -> Vector {
    let upper = if i == 0 { hvx::shl_h(line, 8) } else { line };
    hvx::asr_h(upper, 8)
}

/// Returns the d of super-block `b`, twice, from the plane of d.
#[inline(always)]
pub(in crate::ops::matmul) fn block_factor(plane: &[Line], b: usize) -> Vector {
    let line = hvx::load(&plane[b / 2]);
    if b.is_multiple_of(2) {
        hvx::interleave_even_h(line, line)
    } else {
        hvx::interleave_odd_h(line, line)
    }
}

/// The 6-bit quant that is 0.
const SIX_BIT_ZERO: u8 = 32;

/// Dequantizes one tile of 6-bit quants less 32, whose halves have the f16 scales in the halves of
/// `scales`.
#[inline(always)]
fn six_bit_tile(quants: &[Line; 6], scales: Vector, out: &mut Tile) {
    let first = hvx::interleave_even_h(scales, scales);
    let second = hvx::interleave_odd_h(scales, scales);
    let lines = quants.each_ref().map(hvx::load);
    let mut put = |g: usize, quants: Vector, scale: Vector| {
        let [even, odd] = times(hvx::f16_from_b(quants, SIX_BIT_ZERO), scale);
        hvx::store(&mut out.0[2 * g], even);
        hvx::store(&mut out.0[2 * g + 1], odd);
    };
    for (g, line) in lines.into_iter().enumerate() {
        put(g, bits(line, 0, 0x3f), if g < 4 { first } else { second });
    }
    for (g, [a, b, c]) in [
        (6, [lines[0], lines[1], lines[2]]),
        (7, [lines[3], lines[4], lines[5]]),
    ] {
        let lower = hvx::or(bits(b, 4, 0x0c), bits(c, 6, 0x03));
        let upper = masked(hvx::shr_by_mul_h::<2>(a), 0x30);
        put(g, hvx::or(upper, lower), second);
    }
}

/// Dequantizes the tiles `tiles` of a panel of Q6_K; the first one is even.
///
/// On the device this is not inlined, so that `panel` and `out` are known not to overlap.
#[cfg_attr(target_arch = "hexagon", inline(never))]
#[cfg_attr(not(target_arch = "hexagon"), inline(always))]
pub(super) fn six_bit_tiles(panel: &Panel<'_>, tiles: Range<usize>, out: &mut [Tile]) {
    let first = tiles.start / 2;
    let pairs = panel.quants.as_chunks::<6>().0[tiles].chunks(2);
    let lines = &panel.scales[first..];
    for (p, ((quants, line), out)) in pairs.zip(lines).zip(out.chunks_mut(2)).enumerate() {
        let d = block_factor(panel.mins, 2 * (first + p) / SUPER_TILES);
        let line = hvx::load(line);
        for (i, (quants, out)) in quants.iter().zip(out).enumerate() {
            let scales = hvx::mul_f16(hvx::f16_from_h(half_scales(line, i)), d);
            six_bit_tile(quants, scales, out);
        }
    }
}
