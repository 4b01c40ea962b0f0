//! The part of a block of positions that a tile of rows sees.
//!
//! A mask of f16 that is either 0 or minus infinity *only hides*: it hides positions, and adds
//! nothing. The mask of a block is examined in chunks of 64 positions, a line of the mask. Chunks
//! before the first and after the last visible one are left out of both products; a chunk is
//! visible if any row of the tile sees a position of it. Chunks that all rows see wholly need no
//! mask at all.

use core::ops::Range;

use super::vtcm::MAX_STRIPS;
use crate::hvx::{self, Vector, and, max_h, min_h, or, shr_w, splat_h, splat_w, sub_w};
use crate::layout::{LINE_BYTES, Line, TILE_DIM};
use crate::ops::attention::scores::BlockMask;
use crate::ops::rows::all_lanes;
use crate::ops::tensor::{Shape, Type};

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
    /// Bit i is set if some row sees a position of chunk i.
    visible: u16,
    /// Bit i is set if some row does not see all positions of chunk i.
    mixed: u16,
    /// The mask only hides positions.
    pub(super) only_hides: bool,
}

impl Sight {
    /// Zeros, which are quick to store: the sight of a tile whose mask has not been looked at.
    pub(super) const EMPTY: Self = Self {
        visible: 0,
        mixed: 0,
        only_hides: false,
    };

    /// Nothing is visible.
    pub(super) const NONE: Self = Self {
        visible: 0,
        mixed: 0,
        only_hides: true,
    };

    /// All of `positions` positions are visible.
    pub(super) fn all(positions: usize) -> Self {
        let chunks = positions.div_ceil(CHUNK);
        Self {
            // A block has at most 16 chunks, so 16 bits are enough.
            visible: u16::MAX >> (16 - chunks),
            // If positions end inside the last chunk, that chunk is partly hidden.
            mixed: u16::from(!positions.is_multiple_of(CHUNK)) << (chunks - 1),
            only_hides: true,
        }
    }

    /// All of `positions` positions may be visible, and the mask may be any.
    pub(super) fn unknown(positions: usize) -> Self {
        Self {
            only_hides: false,
            ..Self::all(positions)
        }
    }

    /// Returns `true` if no position is visible.
    pub(super) fn is_none(self) -> bool {
        self.visible == 0
    }

    /// Returns the union of two tiles' sights.
    pub(super) fn or(self, other: Self) -> Self {
        Self {
            visible: self.visible | other.visible,
            ..self
        }
    }

    /// Returns a bit for each chunk, starting with the first visible one: it is set if some row
    /// does not see all positions of the chunk.
    pub(super) fn mixed(self) -> u16 {
        let unused = self.visible.leading_zeros().min(u16::BITS - 1);
        let first = self.visible.trailing_zeros().min(u16::BITS - 1);
        (self.mixed & u16::MAX >> unused) >> first
    }

    /// Returns the range from the first to the last visible strip.
    pub(super) fn strips(self) -> Range<usize> {
        let first = self.visible.trailing_zeros() as usize;
        let end = (u16::BITS - self.visible.leading_zeros()) as usize;
        CHUNK_STRIPS * first.min(end)..CHUNK_STRIPS * end
    }
}

/// Returns `true` if a mask of this shape can be looked at: f16 for all heads, with dense rows.
pub(super) fn can_look_at(mask: &Shape) -> bool {
    mask.ne[2] == 1 && mask.dtype == Type::F16 && mask.has_dense_rows()
}

/// Looks at the mask of some queries.
pub(super) struct Look<'a> {
    /// A mask whose shape [is supported](can_look_at).
    pub(super) mask: &'a BlockMask<'a>,
    pub(super) queries: Range<usize>,
    pub(super) stream: usize,
    /// Positions of the block, which starts with a whole chunk.
    pub(super) positions: Range<usize>,
}

impl hvx::Kernel for Look<'_> {
    type Output = Sight;

    #[inline(always)]
    fn run(self) -> Sight {
        let positions = self.positions.len();
        let chunks = positions.div_ceil(CHUNK);
        let mut found = hvx::zeros::<{ 3 * MAX_CHUNKS }>();
        let found: &mut [[Line; MAX_CHUNKS]; 3] = bytemuck::cast_mut(&mut found);
        let mut chunk = 0;
        while chunk + 8 <= chunks {
            if self.look::<8>(chunk, found).is_none() {
                return Sight::unknown(positions);
            }
            chunk += 8;
        }
        while chunk < chunks {
            if self.look::<1>(chunk, found).is_none() {
                return Sight::unknown(positions);
            }
            chunk += 1;
        }
        let [visible, mixed, other] = flags(found);
        let all = Sight::all(positions);
        Sight {
            visible: visible & all.visible,
            mixed: mixed & all.visible | all.mixed,
            only_hides: other & all.visible == 0,
        }
    }
}

impl Look<'_> {
    /// Looks at N chunks. Lines of `found` get bits if the chunk is visible, mixed, and adds
    /// numbers. Returns `None` if the mask ends before them.
    #[inline(always)]
    fn look<const N: usize>(
        &self,
        chunk: usize,
        found: &mut [[Line; MAX_CHUNKS]; 3],
    ) -> Option<()> {
        let position = self.positions.start + chunk * CHUNK;
        let offset = (self.mask).offset(self.queries.start, self.stream, position);
        let rows = (self.mask.view).strided::<N>(offset, self.queries.len())?;
        // Compared as signed integers, 0 is just above minus infinity (-1024), so min and max tell
        // them from all other values.
        let minus_infinity = splat_h(MINUS_INFINITY);
        let mut least = [splat_w(0); N];
        let mut most = [minus_infinity; N];
        for row in rows {
            for i in 0..N {
                least[i] = min_h(least[i], row[i]);
                most[i] = max_h(most[i], row[i]);
            }
        }
        for i in 0..N {
            let at = (chunk + i) % MAX_CHUNKS;
            let below = sub_w(min_h(least[i], minus_infinity), minus_infinity);
            hvx::store(&mut found[0][at], or(below, sub_w(most[i], minus_infinity)));
            hvx::store(&mut found[1][at], least[i]);
            hvx::store(&mut found[2][at], or(below, max_h(most[i], splat_w(0))));
        }
        Some(())
    }
}

/// Returns, for each of three groups of lines, a bit for each line that is not zero.
#[inline(always)]
fn flags(lines: &[[Line; MAX_CHUNKS]; 3]) -> [u16; 3] {
    // Line i has bit i, in the words of two lanes.
    const BITS: [i32; LINE_BYTES / 4] = {
        let mut bits = [0; LINE_BYTES / 4];
        let mut i = 0;
        while i < bits.len() {
            bits[i] = 1 << (i / 2);
            i += 1;
        }
        bits
    };
    let bits = hvx::load_bytes(bytemuck::cast_ref(&BITS));
    let mut all = Line::ZERO;
    let mut flags = [0; 3];
    for (flags, lines) in flags.iter_mut().zip(lines) {
        let words = join(lines);
        // All bits are set where the word is not zero.
        let is_set = shr_w(or(words, sub_w(splat_w(0), words)), 31);
        let bits = and(bits, sub_w(splat_w(0), is_set));
        hvx::store(&mut all, all_lanes(bits, or));
        let [low, high, ..] = all.0;
        *flags = u16::from_le_bytes([low, high]);
    }
    flags
}

/// Returns words 2n and 2n + 1 with the bits that line n has in any word.
#[inline(always)]
fn join(lines: &[Line; MAX_CHUNKS]) -> Vector {
    // First joins halves of two lines in a vector, then quarters of four lines, and so on, until a
    // vector has words of 16 lines.
    let mut v = [splat_w(0); MAX_CHUNKS / 2];
    for (i, v) in v.iter_mut().enumerate() {
        let (a, b) = (hvx::load(&lines[i]), hvx::load(&lines[i + MAX_CHUNKS / 2]));
        *v = either(hvx::swap_blocks::<16>(a, b));
    }
    for i in 0..4 {
        v[i] = either(hvx::swap_blocks::<8>(v[i], v[i + 4]));
    }
    for i in 0..2 {
        v[i] = either(hvx::swap_blocks::<4>(v[i], v[i + 2]));
    }
    let v = either(hvx::swap_blocks::<2>(v[0], v[1]));
    either(hvx::swap_blocks::<1>(v, v))
}

/// Returns the bits of both.
#[inline(always)]
fn either((a, b): (Vector, Vector)) -> Vector {
    or(a, b)
}
