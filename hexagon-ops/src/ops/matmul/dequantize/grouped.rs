//! Groups of 2 × 16 weights to FP16 tiles: one scale serves half a line of a tile.

use super::nibbles::{NibbleTable, Q4_0_VALUES, Q4_0_VALUES_TWICE};
use super::{Dequantizer, FLIPPED_ZERO, Numbers, ahead, from_flipped};
use crate::hvx::{self, Vector};
use crate::layout::{LINE_BYTES, Line};

/// Returns the indices that look up the scales of two lines of an FP16 tile at once: entries 4v to
/// 4v + 3 of 16. The even bytes belong to the first line, where the first 16 columns have one entry
/// and the others the next; the odd bytes belong to the second line in the same way.
const fn scale_indices(v: usize) -> Line {
    let mut line = [0; LINE_BYTES];
    let mut byte = 0;
    while byte < LINE_BYTES {
        // CAST: at most 15.
        #[expect(clippy::cast_possible_truncation, reason = "at most 15")]
        let entry = (4 * v + 2 * (byte % 2) + byte / (LINE_BYTES / 2)) as u8;
        line[byte] = entry;
        byte += 1;
    }
    Line(line)
}

static SCALE_INDICES: [Line; 4] = [
    scale_indices(0),
    scale_indices(1),
    scale_indices(2),
    scale_indices(3),
];

/// The indices of the scales of groups of 2 × 16. A scale serves half a line, so that one lookup
/// spreads four of them over two lines.
#[derive(Clone, Copy)]
struct GroupScales([Vector; 4]);

impl GroupScales {
    #[inline(always)]
    fn new() -> Self {
        let [a, b, c, d] = &SCALE_INDICES;
        Self([hvx::load(a), hvx::load(b), hvx::load(c), hvx::load(d)])
    }

    /// Returns the scales of the lines `2 * pair` and `2 * pair + 1` of tile `i` of those that
    /// share the line `scales`.
    #[inline(always)]
    fn of_lines(self, scales: Vector, i: usize, pair: usize) -> (Vector, Vector) {
        let index = self.0[pair % 4];
        // A scale is half of a word: of tile i, and of the tile's first or second 16 groups.
        match (i, pair / 4) {
            (0, 0) => hvx::lookup16_of::<0>(index, scales),
            (0, _) => hvx::lookup16_of::<1>(index, scales),
            (_, 0) => hvx::lookup16_of::<2>(index, scales),
            (_, _) => hvx::lookup16_of::<3>(index, scales),
        }
    }
}

/// The lookup table and the scales of groups of 4-bit quants.
#[derive(Clone, Copy)]
pub(super) struct GroupedNibbles {
    table: NibbleTable,
    scales: GroupScales,
}

impl GroupedNibbles {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self {
            table: NibbleTable::new(&Q4_0_VALUES, &Q4_0_VALUES_TWICE),
            scales: GroupScales::new(),
        }
    }
}

impl Dequantizer<4, 2> for GroupedNibbles {
    const AHEAD: usize = ahead(1, 4);
    /// The line of scales, and the tile's place among those that share it.
    type Scales = (Vector, usize);

    #[inline(always)]
    fn scales(self, scales: Vector, _: Vector, i: usize) -> (Vector, usize) {
        (scales, i)
    }

    #[inline(always)]
    fn numbers(self, quants: &[Line; 4], part: usize) -> Numbers {
        self.table.numbers(quants, part)
    }

    #[inline(always)]
    fn scaled(self, (a, b): Numbers, (scales, i): Self::Scales, part: usize) -> [Vector; 2] {
        let (first, second) = self.scales.of_lines(scales, i, part);
        [hvx::mul_f16(a, first), hvx::mul_f16(b, second)]
    }
}

/// The scales of groups of flipped bytes.
#[derive(Clone, Copy)]
pub(super) struct GroupedBytes(GroupScales);

impl GroupedBytes {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self(GroupScales::new())
    }
}

impl Dequantizer<8, 2> for GroupedBytes {
    // With three parts ahead, the compiler stores qfloat products on v73q.
    const AHEAD: usize = ahead(6, 2);
    /// The line of scales, and the tile's place among those that share it.
    type Scales = (Vector, usize);

    #[inline(always)]
    fn scales(self, scales: Vector, _: Vector, i: usize) -> (Vector, usize) {
        (scales, i)
    }

    #[inline(always)]
    fn numbers(self, quants: &[Line; 8], part: usize) -> Numbers {
        let bytes = hvx::load(&quants[part]);
        if !hvx::HAS_IEEE {
            return hvx::spread_b(bytes, FLIPPED_ZERO);
        }
        // The same as `spread_b`, but two instructions with one result each need fewer packets here
        // than one with two results.
        let exponent = hvx::splat_b(hvx::SPREAD_EXPONENT);
        (
            hvx::interleave_even_b(bytes, exponent),
            hvx::interleave_odd_b(bytes, exponent),
        )
    }

    #[inline(always)]
    fn scaled(self, spread: Numbers, (scales, i): Self::Scales, part: usize) -> [Vector; 2] {
        let (first, second) = self.0.of_lines(scales, i, part);
        let (a, b) = from_flipped(spread);
        [hvx::mul_f16(a, first), hvx::mul_f16(b, second)]
    }
}
