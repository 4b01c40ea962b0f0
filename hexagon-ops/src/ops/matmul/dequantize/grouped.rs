//! Groups of 2 × 16 weights to FP16 tiles: one scale serves half a line of a tile.

use super::{Dequantizer, Q4_0_VALUES, byte_tile};
use crate::hvx::{self, Vector};
use crate::layout::{LINE_BYTES, Line, Tile};

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

    /// Returns the scales of the lines `2 * pair` and `2 * pair + 1` of tile `i` of those that share
    /// the line `scales`.
    #[inline(always)]
    fn of_lines(self, scales: Vector, i: usize, pair: usize) -> (Vector, Vector) {
        let index = self.0[pair % 4];
        // Scales are the halves of words: those of tile i, and of the tile's first or second 16
        // groups.
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
    table: Vector,
    scales: GroupScales,
}

impl GroupedNibbles {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self {
            table: hvx::load(&Q4_0_VALUES),
            scales: GroupScales::new(),
        }
    }
}

impl Dequantizer<4, 2> for GroupedNibbles {
    #[inline(always)]
    fn tile(self, quants: &[Line; 4], scales: Vector, _: Vector, i: usize, out: &mut Tile) {
        for (v, line) in quants.iter().enumerate() {
            let both = hvx::load(line);
            for (nibbles, pair) in [(both, 2 * v), (hvx::shr_b(both, 4), 2 * v + 1)] {
                let values = hvx::lookup16(nibbles, self.table);
                let scales = self.scales.of_lines(scales, i, pair);
                hvx::store(&mut out.0[2 * pair], hvx::mul_f16(values.0, scales.0));
                hvx::store(&mut out.0[2 * pair + 1], hvx::mul_f16(values.1, scales.1));
            }
        }
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
    #[inline(always)]
    fn tile(self, quants: &[Line; 8], scales: Vector, _: Vector, i: usize, out: &mut Tile) {
        byte_tile(quants, |g| self.0.of_lines(scales, i, g), out);
    }
}
