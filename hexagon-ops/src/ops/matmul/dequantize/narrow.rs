//! Dequantizers of 2- and 3-bit quants with a scale for each 16 rows of K.
//!
//! A byte holds two to four quants. The lookup sees the four lower bits of a byte, and its table
//! has every entry as often as there are bits that belong to other quants: a quant of two bits
//! needs no shift in bits 3..2, and none needs a mask.
//!
//! A line of scales belongs to one tile: the scales of rows 0..16 in lower halves of words, those
//! of rows 16..32 in upper ones.

use super::{Dequantizer, Numbers, ahead, f16_bits, times, times_plus};
use crate::hvx::{self, Vector};
use crate::layout::{LINE_BYTES, Line};

/// Returns two tables of [`hvx::lookup16_of`], 0 and 1: the entries are the given numbers less
/// `zero`.
const fn two_tables(numbers: [[i8; 16]; 2], zero: i8) -> Line {
    let mut line = [0; LINE_BYTES];
    let mut entry = 0;
    while entry < 32 {
        let [low, high] = f16_bits(numbers[entry / 16][entry % 16] - zero).to_le_bytes();
        line[4 * entry] = low;
        line[4 * entry + 1] = high;
        entry += 1;
    }
    Line(line)
}

/// Quants in bits 2..0, and quants whose bits 2..1 are bits 1..0 and whose bit 0 is bit 3.
static THREE_BITS: Line = two_tables(
    [
        [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7],
        [0, 2, 4, 6, 0, 2, 4, 6, 1, 3, 5, 7, 1, 3, 5, 7],
    ],
    4,
);

/// Quants in bits 1..0, and quants in bits 3..2.
static TWO_BITS: Line = two_tables(
    [
        [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3],
        [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3],
    ],
    0,
);

/// The dequantizer of 3-bit quants less 4.
#[derive(Clone, Copy)]
pub(super) struct ThreeBits(Vector);

impl ThreeBits {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self(hvx::load(&THREE_BITS))
    }
}

impl Dequantizer<3, 1> for ThreeBits {
    const AHEAD: usize = ahead(1, 3);
    type Scales = [Vector; 2];

    #[inline(always)]
    fn scales(self, scales: Vector, _: Vector, _: usize) -> [Vector; 2] {
        [
            hvx::interleave_even_h(scales, scales),
            hvx::interleave_odd_h(scales, scales),
        ]
    }

    #[inline(always)]
    fn numbers(self, quants: &[Line; 3], part: usize) -> Numbers {
        let [a, b, c] = quants.each_ref().map(hvx::load);
        // Values 6 and 7: their bits 2..1 are the upper bits of the first lines, and bit 0 comes
        // from the third line, moved to bit 3.
        let bit = hvx::splat_b(8);
        match part {
            6 => {
                let index = hvx::or(hvx::shr_b(a, 6), hvx::and(c, bit));
                hvx::lookup16_of::<1>(index, self.0)
            }
            7 => {
                let index = hvx::or(hvx::shr_b(b, 6), hvx::and(hvx::shr_b(c, 1), bit));
                hvx::lookup16_of::<1>(index, self.0)
            }
            _ => {
                let line = hvx::load(&quants[part / 2]);
                let index = match part {
                    1 | 3 => hvx::shr_b(line, 3),
                    5 => hvx::shr_b(line, 5),
                    _ => line,
                };
                hvx::lookup16_of::<0>(index, self.0)
            }
        }
    }

    #[inline(always)]
    fn scaled(self, numbers: Numbers, scales: [Vector; 2], part: usize) -> [Vector; 2] {
        times(numbers, scales[part / 4])
    }
}

/// The dequantizer of 2-bit quants with minima. Its lines are those of
/// [`HalfScalesAndMins`](super::HalfScalesAndMins).
#[derive(Clone, Copy)]
pub(super) struct TwoBits(Vector);

impl TwoBits {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self(hvx::load(&TWO_BITS))
    }
}

impl Dequantizer<2, 1> for TwoBits {
    const AHEAD: usize = ahead(1, 2);
    type Scales = [[Vector; 2]; 2];

    #[inline(always)]
    fn scales(self, scale: Vector, min: Vector, _: usize) -> [[Vector; 2]; 2] {
        [
            [
                hvx::interleave_even_h(scale, scale),
                hvx::interleave_even_h(min, min),
            ],
            [
                hvx::interleave_odd_h(min, min),
                hvx::interleave_odd_h(scale, scale),
            ],
        ]
    }

    #[inline(always)]
    fn numbers(self, quants: &[Line; 2], part: usize) -> Numbers {
        let line = hvx::load(&quants[part / 2 % 2]);
        let index = if part < 4 { line } else { hvx::shr_b(line, 4) };
        if part.is_multiple_of(2) {
            hvx::lookup16_of::<0>(index, self.0)
        } else {
            hvx::lookup16_of::<1>(index, self.0)
        }
    }

    #[inline(always)]
    fn scaled(self, numbers: Numbers, scales: [[Vector; 2]; 2], part: usize) -> [Vector; 2] {
        times_plus(numbers, scales[part / 4])
    }
}
