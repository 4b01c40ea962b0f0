//! Tile layouts of weights and activations, in bytes. No other module computes an address inside a
//! tile.
//!
//! Words: `dst[M,N] = act[M,K] · w[K,N]`; a *tile* covers 32 (K) by 32 (N) elements, a *strip* is
//! 32 columns of N, a *panel* holds all tiles of one strip. Indices: `k`, `n` are elements inside a
//! tile, `kt`, `nt` are tiles.
//!
//! # FP16 tile: the operands and results of the matrix unit (HMX), 2048 bytes
//!
//! `byte(i, j) = 128·(i/2) + 4·j + 2·(i%2)`, with i = k, j = n for weights, i = row, j = k for
//! activations, and i = row, j = n for results:
//!
//! ```text
//!            word 0        word 1              word 31
//! line 0   | i0 j0  i1 j0 | i0 j1  i1 j1 | … | i0 j31  i1 j31 |   128 bytes
//! line 1   | i2 j0  i3 j0 | i2 j1  i3 j1 | … | i2 j31  i3 j31 |
//!   …
//! line 15  | i30 j0 i31 j0| …                  i30 j31 i31 j31|
//! ```
//!
//! # Quantized tile: ggml's own bytes, permuted
//!
//! Each of the 32 columns of a tile is one ggml block of 32. Word n of a line belongs to column n
//! and holds four bytes of that block, in the order 0 2 1 3:
//!
//! ```text
//! 4-bit types, 4 lines (512 bytes)           | low nibbles k   | high nibbles k  |
//! line 0, word n: qs[0]  qs[2]  qs[1]  qs[3]   |  0  2  1  3     | 16 18 17 19     |
//! line 1, word n: qs[4]  qs[6]  qs[5]  qs[7]   |  4  6  5  7     | 20 22 21 23     |
//! line 2, word n: qs[8]  qs[10] qs[9]  qs[11]  |  8 10  9 11     | 24 26 25 27     |
//! line 3, word n: qs[12] qs[14] qs[13] qs[15]  | 12 14 13 15     | 28 30 29 31     |
//!
//! Q5_0, Q5_1, 5 lines (640 bytes); value g is the 5-bit quants of k = 4g + 0 2 1 3, as in Q8_0's line g
//!                        bits of each byte | 4..0    | 7       | 6       | 5       |
//! line 0, 1, 2, word n                      | value 0, 1, 2 | bits 4..2 of value 5, 6, 7  |
//! line 3, word n                            | value 3 | bit 1 of 7 | bits 1..0 of 5   |
//! line 4, word n                            | value 4 | bits 1..0 of 6    | bit 0 of 7 |
//!
//! Q8_0, 8 lines (1024 bytes): line g, word n: qs[4g] qs[4g+2] qs[4g+1] qs[4g+3], each XOR 0x80
//! ```
//!
//! One order serves both kernels. A widening table lookup sends even bytes to one vector and odd
//! bytes to another: with the order 0 2 1 3 these become the row pairs (k, k+1) and (k+2, k+3), two
//! finished lines of an FP16 tile. The dot product multiplies the four bytes of a word by four
//! activations and adds them; it only needs the activations in the same order. That instruction
//! needs unsigned weights, and XOR 0x80 turns a signed byte into the unsigned one that is 128
//! larger.
//!
//! # Tile of groups of 2 × 16: one scale for neighbours in an FP16 tile
//!
//! A *group* is 2 (K) by 16 (N) weights with one FP16 scale: half a line of the FP16 tile. Group g
//! of a tile is half g % 2 of line g / 2, that is k = 2·(g/2) + {0, 1} and n = 16·(g%2) + 0..16.
//! Eight groups fill a line of quants, and become four consecutive lines of the FP16 tile:
//!
//! ```text
//! Q4Tile, 4 lines (512 bytes)                       FP16 tile after the lookup          scales
//! line v, word n:  low nibbles  k = 8v + 0 2 1 3    line 4v   | k 8v+0, 8v+1 of n 0..16 | of n 16..32 |   d8v   d8v+1
//!                  high nibbles k = 8v + 4 6 5 7    line 4v+1 | k 8v+2, 8v+3            |             |   d8v+2 d8v+3
//!                                                   line 4v+2 | k 8v+4, 8v+5            |             |   d8v+4 d8v+5
//!                                                   line 4v+3 | k 8v+6, 8v+7            |             |   d8v+6 d8v+7
//! ```
//!
//! Q8Tile has the lines of Q8_0: line g is k = 4g + 0 2 1 3, which are FP16 lines 2g and 2g + 1,
//! and their four halves have the scales d4g to d4g + 3.
//!
//! A tile has 32 groups as it has 32 columns, so the plane of scales is the one below, with the
//! group in place of the column. A column has no scale, so the integer dot product does not apply:
//! every product goes through FP16 tiles. A row of blocks, as other types have it, is here a row of
//! groups: row g holds group g of each tile of a strip. A group is a block of the scale, then its
//! quants: 16 bytes `qs[c]` with the low nibble for the even k and the high nibble for the odd k of
//! column c, or (Q8Tile) 32 bytes of the even k, then the odd k.
//!
//! # Super-block: 8 tiles, with scales at two levels
//!
//! A super-block has 256 weights of one column, and a block of 32 is one of its eight parts. Its
//! quants are tiles, and its scales are lines whose word n belongs to column n; `super_block.rs`
//! has the picture of each type.
//!
//! # Panel: planes, each starting on a line
//!
//! ```text
//! | quants of tile 0 | tile 1 | … | tile KT-1 | scales of tiles 0..KT | minima (Q4_1, Q5_1) |
//! | quants of tile 0 | tile 1 | … | tile KT-1 | scales of super-block 0 | super-block 1 | … | d (Q6_K, Q3_K) |
//!
//! FP16 scales (and minima), 2 tiles a line:  byte(kt, n) = 128·(kt/2) + 4·n + 2·(kt%2)
//! E8M0 scales (MXFP4), 4 tiles a line:       byte(kt, n) = 128·(kt/4) + 4·n + kt%4
//! ```
//!
//! So a word of the scale plane belongs to one column, and a widening FP16 multiply of one line
//! gives the scales of two tiles. Bytes that no block covers (columns past N, the last line's
//! unused tiles) are zero and dequantize to 0.
//!
//! Source: FP16 element order, Hexagon V81 HMX Programmer's Reference Manual 80-N2040-62 as quoted
//! by public emulators of the unit, and llama.cpp ggml-hexagon/htp/hmx-utils.h; ggml `block_q4_0`
//! and its relatives, ggml-common.h.

mod block;
mod five_bits;
mod group;
mod panel;
mod super_block;
mod weight;

pub use group::{GROUP_DIMS, group_elem};
pub use weight::{LayoutId, WeightType};

use crate::error::{Error, Result};

/// Elements along each side of a tile, and elements of a block.
pub const TILE_DIM: usize = 32;
/// Elements of a super-block, and of a column of its tiles.
pub const SUPER_BLOCK: usize = 256;
/// Tiles of a super-block.
pub const SUPER_TILES: usize = SUPER_BLOCK / TILE_DIM;
/// Bytes of a vector register, and of a line of a tile.
pub const LINE_BYTES: usize = 128;
/// Bytes of an FP16 tile.
pub const F16_TILE_BYTES: usize = TILE_DIM * TILE_DIM * 2;
/// Lines of an FP16 tile.
pub const F16_TILE_LINES: usize = F16_TILE_BYTES / LINE_BYTES;
/// The byte of a group of four that stands at each position of a word. The permutation is its own
/// inverse.
pub const WORD_ORDER: [usize; 4] = [0, 2, 1, 3];
/// The mask that a stored Q8_0 byte is XORed with.
pub const Q8_FLIP: u8 = 0x80;

/// Memory of one vector, aligned as vector loads and stores require.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(128))]
pub struct Line(pub [u8; LINE_BYTES]);

impl Line {
    /// A line of zero bytes.
    pub const ZERO: Self = Self([0; LINE_BYTES]);
}

/// An FP16 tile, aligned as the matrix unit requires.
///
/// SOURCE: activation and output addresses are masked with 2047 and their low bits are fields;
/// 80-N2040-62 as quoted by public emulators of the unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(2048))]
pub struct Tile(pub [Line; F16_TILE_LINES]);

impl Tile {
    /// A tile of zeros.
    pub const ZERO: Self = Self([Line::ZERO; F16_TILE_LINES]);
}

/// Returns the byte offset of element (i, j) in an FP16 tile; see the picture of this module.
///
/// ```
/// use hexagon_ops::layout::f16_tile_offset;
///
/// // Elements (0, 0) and (1, 0) are the halves of the first word; (2, 0) begins the second line.
/// assert_eq!(f16_tile_offset(1, 0), 2);
/// assert_eq!(f16_tile_offset(2, 0), 128);
/// assert_eq!(f16_tile_offset(31, 31), 2046);
/// ```
#[must_use]
pub const fn f16_tile_offset(i: usize, j: usize) -> usize {
    LINE_BYTES * (i / 2) + 4 * j + 2 * (i % 2)
}

/// Layout of one panel: 32 columns of N by all of K. All units are bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PanelLayout {
    weight: WeightType,
    k: usize,
}

impl PanelLayout {
    /// Returns the layout of a panel with `k` elements along K.
    ///
    /// # Errors
    /// `BadShape` if `k` is 0, or not whole blocks for a type with blocks.
    pub const fn new(weight: WeightType, k: usize) -> Result<Self> {
        let whole = matches!(weight, WeightType::F16) || k.is_multiple_of(weight.block_elems());
        if k == 0 || !whole {
            return Err(Error::BadShape { weight, k });
        }
        Ok(Self { weight, k })
    }

    /// Returns the layout of `blocks` super-blocks of this panel whose scales have become those of
    /// a plain type; at least one.
    #[must_use]
    pub(crate) const fn expanded(self, blocks: usize) -> Self {
        Self {
            weight: self.weight.expanded(),
            k: blocks * SUPER_BLOCK,
        }
    }

    /// Returns the type of the weights.
    #[must_use]
    pub const fn weight(self) -> WeightType {
        self.weight
    }

    /// Returns the elements along K.
    #[must_use]
    pub const fn k(self) -> usize {
        self.k
    }

    /// Returns the tiles along K.
    #[must_use]
    pub const fn k_tiles(self) -> usize {
        self.k.div_ceil(TILE_DIM)
    }

    /// Returns the offset of the quants of tile `kt`.
    #[must_use]
    pub const fn quant_offset(self, kt: usize) -> usize {
        kt * self.weight.quant_tile_bytes()
    }

    /// Returns the offset of the scale plane.
    #[must_use]
    pub const fn scale_plane_offset(self) -> usize {
        self.quant_offset(self.k_tiles())
    }

    /// Returns the bytes of the scale plane, whole lines.
    #[must_use]
    pub const fn scale_plane_bytes(self) -> usize {
        let (tiles, lines) = self.weight.scale_lines();
        self.k_tiles().div_ceil(tiles) * lines * LINE_BYTES
    }

    /// Returns the offset of the scale of column (groups: group) `n` of tile `kt`: 2 bytes FP16, or
    /// 1 byte E8M0 for MXFP4; for super-blocks the offset of word `n` of their first line.
    #[must_use]
    pub const fn scale_offset(self, kt: usize, n: usize) -> usize {
        self.scale_plane_offset()
            + match self.weight.scale_lines() {
                (SUPER_TILES, lines) => LINE_BYTES * lines * (kt / SUPER_TILES) + 4 * n,
                (4, _) => LINE_BYTES * (kt / 4) + 4 * n + kt % 4,
                _ => f16_tile_offset(kt, n),
            }
    }

    /// Returns the offset of the plane of minima (Q4_1, Q5_1) or of d (Q6_K, Q3_K), which is also
    /// the end of the scale plane.
    #[must_use]
    pub const fn min_plane_offset(self) -> usize {
        self.scale_plane_offset() + self.scale_plane_bytes()
    }

    /// Returns the offset of the FP16 minimum of column `n` of tile `kt` (Q4_1, Q5_1), or of d of
    /// its super-block (Q6_K, Q3_K).
    #[must_use]
    pub const fn min_offset(self, kt: usize, n: usize) -> usize {
        let index = if self.weight.has_d_plane() {
            kt / SUPER_TILES
        } else {
            kt
        };
        self.min_plane_offset() + f16_tile_offset(index, n)
    }

    /// Returns the bytes of the panel, whole lines.
    #[must_use]
    pub const fn panel_bytes(self) -> usize {
        let mins = match self.weight {
            WeightType::Q4_1 | WeightType::Q5_1 => self.scale_plane_bytes(),
            weight if weight.has_d_plane() => (self.k / SUPER_BLOCK).div_ceil(2) * LINE_BYTES,
            _ => 0,
        };
        self.min_plane_offset() + mins
    }

    /// Returns the lines of the panel.
    #[must_use]
    pub const fn panel_lines(self) -> usize {
        self.panel_bytes() / LINE_BYTES
    }

    /// Returns the place of element (k, n) of tile `kt`: its byte offset in the panel, and for
    /// 4-bit types the shift to its nibble. Types of 2, 3, 5 and 6 bits have no such place.
    #[must_use]
    pub const fn elem(self, kt: usize, k: usize, n: usize) -> (usize, u32) {
        let base = self.quant_offset(kt);
        match self.weight {
            WeightType::F16 => (base + f16_tile_offset(k, n), 0),
            WeightType::Q8_0 | WeightType::Q8Tile => (base + word_offset(k, n), 0),
            WeightType::Q4Tile => {
                let byte = LINE_BYTES * (k / 8) + 4 * n + WORD_ORDER[k % 4];
                (base + byte, if k % 8 < 4 { 0 } else { 4 })
            }
            _ => (base + word_offset(k % 16, n), if k < 16 { 0 } else { 4 }),
        }
    }
}

/// Returns the offset of byte `j` of a block in column `n`: line j/4, word n, position by
/// [`WORD_ORDER`].
const fn word_offset(j: usize, n: usize) -> usize {
    LINE_BYTES * (j / 4) + 4 * n + WORD_ORDER[j % 4]
}

/// Layout of a whole weight matrix: panels of strips 0, 1, …, each 128-byte aligned.
///
/// ```
/// use hexagon_ops::layout::{MatrixLayout, WeightType};
///
/// // 64 rows of 576 weights in Q4_0 are two strips of 18 tiles, and take their own size.
/// let layout = MatrixLayout::new(WeightType::Q4_0, 64, 576)?;
/// assert_eq!((layout.n_strips(), layout.k_tiles()), (2, 18));
/// assert_eq!(layout.matrix_bytes(), 64 * layout.ggml_row_bytes());
/// # Ok::<(), hexagon_ops::error::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixLayout {
    panel: PanelLayout,
    n: usize,
}

impl MatrixLayout {
    /// Returns the layout of a matrix of `n` ggml rows (columns of the product) by `k` elements.
    ///
    /// # Errors
    /// As [`PanelLayout::new`].
    pub const fn new(weight: WeightType, n: usize, k: usize) -> Result<Self> {
        match PanelLayout::new(weight, k) {
            Ok(panel) => Ok(Self { panel, n }),
            Err(e) => Err(e),
        }
    }

    /// Returns the layout of each panel.
    #[must_use]
    pub const fn panel(self) -> PanelLayout {
        self.panel
    }

    /// Returns the columns of the product.
    #[must_use]
    pub const fn n(self) -> usize {
        self.n
    }

    /// Returns the rows of blocks: one for each column, or, for groups, one for each column of the
    /// padded strips.
    #[must_use]
    pub const fn block_rows(self) -> usize {
        if self.panel.weight.is_grouped() {
            self.n_strips() * TILE_DIM
        } else {
            self.n
        }
    }

    /// Returns the strips of 32 columns, the last one possibly padded.
    #[must_use]
    pub const fn n_strips(self) -> usize {
        self.n.div_ceil(TILE_DIM)
    }

    /// Returns the offset of the panel of strip `nt`.
    #[must_use]
    pub const fn panel_offset(self, nt: usize) -> usize {
        nt * self.panel.panel_bytes()
    }

    /// Returns the bytes of the matrix.
    #[must_use]
    pub const fn matrix_bytes(self) -> usize {
        self.n_strips() * self.panel.panel_bytes()
    }

    /// Returns the bytes of one row in ggml's layout (for F16 also when `k` is not a multiple of
    /// 32).
    #[must_use]
    pub const fn ggml_row_bytes(self) -> usize {
        self.panel.ggml_row_bytes()
    }

    /// Returns the FP16 tiles that one panel dequantizes to.
    #[must_use]
    pub const fn k_tiles(self) -> usize {
        self.panel.k_tiles()
    }
}
