//! The part of a block of positions that a tile of rows sees.
//!
//! A mask of f16 that is either 0 or minus infinity is *plain*: it hides positions, and adds nothing. The positions of a
//! block are looked at in chunks of 64, a line of the mask. Chunks before the first and after the last one that any row
//! of the tile sees are left out of both products. Chunks that all rows see wholly need no mask at all.

use core::ops::Range;

use super::vtcm::MAX_STRIPS;
use crate::hvx::{self, Vector, and, or, splat_h, splat_w, sub_w};
use crate::layout::{LINE_BYTES, Line, TILE_DIM};
use crate::ops::tensor::View;

/// Positions of a chunk, and its strips of 32.
pub(super) const CHUNK: usize = 64;
pub(super) const CHUNK_STRIPS: usize = CHUNK / TILE_DIM;
/// Most chunks of a block.
pub(super) const MAX_CHUNKS: usize = MAX_STRIPS / CHUNK_STRIPS;
/// Minus infinity as f16.
const MINUS_INFINITY: u16 = 0xfc00;

/// The positions of a block that a tile of rows sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sight {
    /// A bit for each chunk of which some row sees a position.
    visible: u16,
    /// A bit for each chunk of which some row does not see all positions.
    mixed: u16,
    /// The mask is plain.
    pub(super) is_plain: bool,
}

impl Sight {
    /// Nothing is visible.
    pub(super) const NONE: Self = Self {
        visible: 0,
        mixed: 0,
        is_plain: true,
    };

    /// All of `positions` positions are visible.
    pub(super) fn all(positions: usize) -> Self {
        let chunks = positions.div_ceil(CHUNK);
        Self {
            // CAST: a block has at most 16 chunks.
            visible: (u32::MAX >> (32 - chunks)) as u16,
            // Positions past the last one are hidden.
            mixed: u16::from(!positions.is_multiple_of(CHUNK)) << (chunks - 1),
            is_plain: true,
        }
    }

    /// All of `positions` positions may be visible, and the mask may be any.
    pub(super) fn unknown(positions: usize) -> Self {
        Self {
            is_plain: false,
            ..Self::all(positions)
        }
    }

    /// Returns `true` if no position is visible.
    pub(super) fn is_none(self) -> bool {
        self.visible == 0
    }

    /// Returns what this tile or another one sees.
    pub(super) fn or(self, other: Self) -> Self {
        Self {
            visible: self.visible | other.visible,
            ..self
        }
    }

    /// Returns a bit for each chunk, starting with the first visible one, of which some row does not see all positions.
    pub(super) fn mixed(self) -> u16 {
        let unused = self.visible.leading_zeros().min(u16::BITS - 1);
        let first = self.visible.trailing_zeros().min(u16::BITS - 1);
        (self.mixed & u16::MAX >> unused) >> first
    }

    /// Returns the strips from the first to the last one that is visible.
    pub(super) fn strips(self) -> Range<usize> {
        let first = self.visible.trailing_zeros() as usize;
        let end = (u16::BITS - self.visible.leading_zeros()) as usize;
        CHUNK_STRIPS * first.min(end)..CHUNK_STRIPS * end
    }
}

/// Looks at the mask of some queries.
pub(super) struct Look<'a> {
    /// An f16 mask for all heads, with dense rows.
    pub(super) mask: &'a View<'a>,
    pub(super) queries: Range<usize>,
    pub(super) stream: usize,
    /// Positions of the block, which starts with a whole chunk.
    pub(super) positions: Range<usize>,
}

impl hvx::Kernel for Look<'_> {
    type Output = Sight;

    #[inline(always)]
    fn run(self) -> Sight {
        let Range { start, end } = self.positions;
        let all = Sight::all(end - start);
        let base =
            self.mask.shape.row([0, 0, self.stream]) + self.queries.start * self.mask.shape.nb[1];
        // Lines of bits that are set if a chunk is visible, mixed, and not plain.
        let mut found = hvx::zeros::<{ 3 * MAX_CHUNKS }>();
        let found: &mut [[Line; MAX_CHUNKS]; 3] = bytemuck::cast_mut(&mut found);
        let chunks = (end - start).div_ceil(CHUNK);
        for chunk in 0..chunks {
            let offset = base + 2 * (start + chunk * CHUNK);
            let Some(rows) = self.mask.strided(offset, self.queries.len()) else {
                return Sight::unknown(end - start);
            };
            let mut bits = [splat_w(0); 3];
            for row in rows {
                let hidden = and(hvx::asr_h(row, 15), splat_h(MINUS_INFINITY));
                bits = [
                    or(bits[0], sub_w(row, splat_h(MINUS_INFINITY))),
                    or(bits[1], row),
                    or(bits[2], sub_w(row, hidden)),
                ];
            }
            for (found, bits) in found.iter_mut().zip(bits) {
                hvx::store(&mut found[chunk], bits);
            }
        }
        let [visible, mixed, other] = found.each_ref().map(flags);
        Sight {
            visible: visible & all.visible,
            mixed: mixed & all.visible | all.mixed,
            is_plain: other & all.visible == 0,
        }
    }
}

/// Returns a bit for each line that is not zero.
#[inline(always)]
fn flags(lines: &[Line; MAX_CHUNKS]) -> u16 {
    // Halves of two lines in one vector, then quarters of four, until words of 16 lines are in one.
    let mut v = [splat_w(0); MAX_CHUNKS];
    for (v, line) in v.iter_mut().zip(lines) {
        *v = hvx::load(line);
    }
    let join = |(a, b): (Vector, Vector)| or(a, b);
    for i in 0..8 {
        v[i] = join(hvx::swap_blocks::<16>(v[i], v[i + 8]));
    }
    for i in 0..4 {
        v[i] = join(hvx::swap_blocks::<8>(v[i], v[i + 4]));
    }
    for i in 0..2 {
        v[i] = join(hvx::swap_blocks::<4>(v[i], v[i + 2]));
    }
    let v = join(hvx::swap_blocks::<2>(v[0], v[1]));
    let v = join(hvx::swap_blocks::<1>(v, v));
    let mut words = Line::ZERO;
    hvx::store(&mut words, v);
    let words: [u32; LINE_BYTES / 4] = bytemuck::cast(words);
    let mut flags = 0;
    for (n, [word, _]) in words.as_chunks::<2>().0.iter().enumerate() {
        flags |= u16::from(*word != 0) << n;
    }
    flags
}
