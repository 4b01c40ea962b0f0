//! Types of weights, and the size of each in bytes.

use core::fmt;

use super::{F16_TILE_BYTES, SUPER_BLOCK, SUPER_TILES, TILE_DIM};

/// Types of weights that can be packed into tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum WeightType {
    /// IEEE half precision, no blocks.
    F16 = 1,
    /// `d · (q - 8)`, 4-bit q.
    Q4_0 = 2,
    /// `d · q + m`, 4-bit q.
    Q4_1 = 3,
    /// `d · q`, signed 8-bit q.
    Q8_0 = 4,
    /// `d · table[q]`, 4-bit q.
    Iq4Nl = 5,
    /// `2^(e-127) · table[q]`, 4-bit q (E2M1), 8-bit exponent.
    Mxfp4 = 6,
    /// `d · (q - 8)`, 4-bit q, one d for a group of 2 (K) × 16 (N) weights; not a ggml type.
    Q4Tile = 7,
    /// `d · s · q - dmin · m`, 4-bit q, 6-bit s and m for each 32 of a super-block.
    Q4K = 8,
    /// `d · (q - 16)`, 5-bit q.
    Q5_0 = 9,
    /// `d · s · (q - 32)`, 6-bit q, signed 8-bit s for each 16 of a super-block.
    Q6K = 10,
    /// `d · q + m`, 5-bit q.
    Q5_1 = 11,
    /// `d · s · q - dmin · m`, 5-bit q, 6-bit s and m for each 32 of a super-block.
    Q5K = 12,
    /// `d · (s - 32) · table[q]`, 4-bit q, 6-bit s for each 32 of a super-block.
    Iq4Xs = 13,
    /// `d · (s - 32) · (q - 4)`, 3-bit q, 6-bit s for each 16 of a super-block.
    Q3K = 14,
    /// `d · s · q - dmin · m`, 2-bit q, 4-bit s and m for each 16 of a super-block.
    Q2K = 15,
    /// `d · q`, signed 8-bit q, one d for a group of 2 (K) × 16 (N) weights; not a ggml type.
    Q8Tile = 16,
}

/// Identifier of a packed format, stored with packed bytes so that stale ones are rejected and not
/// multiplied.
///
/// Bits 31..16 are `0x4858` ("HX"), 15..8 the weight type, 7..0 the version of this module's
/// layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayoutId(pub u32);

/// Version of the layouts of this module: raised when any byte moves.
const LAYOUT_VERSION: u32 = 1;

impl fmt::Display for WeightType {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(self.name())
    }
}

impl WeightType {
    /// All types, in order of their numbers.
    pub const ALL: [Self; 16] = [
        Self::F16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q8_0,
        Self::Iq4Nl,
        Self::Mxfp4,
        Self::Q4Tile,
        Self::Q4K,
        Self::Q5_0,
        Self::Q6K,
        Self::Q5_1,
        Self::Q5K,
        Self::Iq4Xs,
        Self::Q3K,
        Self::Q2K,
        Self::Q8Tile,
    ];

    /// Returns the identifier of this type's packed form.
    #[must_use]
    pub const fn layout_id(self) -> LayoutId {
        LayoutId(0x4858_0000 | (self as u32) << 8 | LAYOUT_VERSION)
    }

    /// Returns `true` if each column of a tile has its own scale, which the integer dot product
    /// needs.
    #[must_use]
    pub const fn has_dot_product(self) -> bool {
        !matches!(self, Self::F16) && !self.is_grouped()
    }

    /// Returns `true` if a scale belongs to a group of 2 × 16 weights.
    #[must_use]
    pub const fn is_grouped(self) -> bool {
        matches!(self, Self::Q4Tile | Self::Q8Tile)
    }

    /// Returns the plain type whose tiles super-blocks of this type have, if they have a scale for
    /// each block of 32; otherwise the type itself.
    pub(super) const fn expanded(self) -> Self {
        match self {
            Self::Q4K => Self::Q4_1,
            Self::Q5K => Self::Q5_1,
            Self::Iq4Xs => Self::Iq4Nl,
            _ => self,
        }
    }

    /// Returns `true` if d of super-blocks has its own plane.
    pub(super) const fn has_d_plane(self) -> bool {
        matches!(self, Self::Q6K | Self::Q3K)
    }

    /// Returns its name in ggml; that of groups is ours.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "F16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q8_0 => "Q8_0",
            Self::Iq4Nl => "IQ4_NL",
            Self::Mxfp4 => "MXFP4",
            Self::Q4Tile => "Q4_TILE",
            Self::Q4K => "Q4_K",
            Self::Q5_0 => "Q5_0",
            Self::Q6K => "Q6_K",
            Self::Q5_1 => "Q5_1",
            Self::Q5K => "Q5_K",
            Self::Iq4Xs => "IQ4_XS",
            Self::Q3K => "Q3_K",
            Self::Q2K => "Q2_K",
            Self::Q8Tile => "Q8_TILE",
        }
    }

    /// Returns the elements of one ggml block (of a row's part in a tile for F16), or of a group.
    #[must_use]
    pub const fn block_elems(self) -> usize {
        match self {
            Self::Q4K | Self::Q5K | Self::Q6K | Self::Iq4Xs | Self::Q3K | Self::Q2K => SUPER_BLOCK,
            _ => TILE_DIM,
        }
    }

    /// Returns the bytes of one ggml block (of 32 elements for F16), or of a group.
    #[must_use]
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F16 => 64,
            Self::Q4_0 | Self::Iq4Nl | Self::Q4Tile => 18,
            Self::Q4_1 => 20,
            Self::Q8_0 | Self::Q8Tile => 34,
            Self::Mxfp4 => 17,
            Self::Q4K => 144,
            Self::Q5_0 => 22,
            Self::Q6K => 210,
            Self::Q5_1 => 24,
            Self::Q5K => 176,
            Self::Iq4Xs => 136,
            Self::Q3K => 110,
            Self::Q2K => 84,
        }
    }

    /// Returns the bytes of the quants of one tile.
    #[must_use]
    pub const fn quant_tile_bytes(self) -> usize {
        match self {
            Self::F16 => F16_TILE_BYTES,
            Self::Q8_0 | Self::Q8Tile => 1024,
            Self::Q4_0
            | Self::Q4_1
            | Self::Iq4Nl
            | Self::Mxfp4
            | Self::Q4Tile
            | Self::Q4K
            | Self::Iq4Xs => 512,
            Self::Q5_0 | Self::Q5_1 | Self::Q5K => 640,
            Self::Q6K => 768,
            Self::Q3K => 384,
            Self::Q2K => 256,
        }
    }

    /// Returns the bytes of all planes per tile, which is a tile's memory traffic.
    #[must_use]
    pub const fn tile_bytes(self) -> usize {
        self.block_bytes() * TILE_DIM * TILE_DIM / self.block_elems()
    }

    /// Returns the tiles that have lines of scales in common, and the number of these lines.
    pub(super) const fn scale_lines(self) -> (usize, usize) {
        match self {
            Self::F16 => (1, 0),
            Self::Mxfp4 => (4, 1),
            Self::Q4_0
            | Self::Q4_1
            | Self::Q5_0
            | Self::Q5_1
            | Self::Q8_0
            | Self::Iq4Nl
            | Self::Q4Tile
            | Self::Q8Tile => (2, 1),
            Self::Q4K | Self::Q5K | Self::Q6K => (SUPER_TILES, 4),
            Self::Iq4Xs => (SUPER_TILES, 2),
            Self::Q3K => (SUPER_TILES, 3),
            Self::Q2K => (SUPER_TILES, 5),
        }
    }
}
