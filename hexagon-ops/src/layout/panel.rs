//! Repacking of whole panels, which is most of the time of loading a model.
//!
//! A tile is a transposition of words: column n of it is one ggml block, whose word j goes to word
//! n of line j.
//!
//! ```text
//! for each tile
//!   for each four columns n:  their blocks' words, in word order, flipped
//!                             for each line j:  line[j][n] = words[n][j]    4 × 4 words: in registers
//!   the columns' scales (and minima) collect in words, which become a line of the plane when full
//! ```
//!
//! The 32 rows that are read at the same time follow each other in memory, and the tiles are
//! written in order. Each byte of the panel is written, padding too, so that the memory need not be
//! cleared before.

use super::five_bits;
use super::group::write_group;
use super::super_block::{Iq4Xs, Q2K, Q3K, Q4K, Q5K, Q6K, SuperColumns};
use super::{LINE_BYTES, PanelLayout, Q8_FLIP, TILE_DIM, WeightType};
use crate::error::{Error, Result};
use crate::hvx;

/// Columns that are transposed at a time: their words fill a vector register of any host.
pub(super) const AT_ONCE: usize = 4;

/// [`Q8_FLIP`] in each byte of a word.
const FLIP_WORD: u32 = u32::from_ne_bytes([Q8_FLIP; 4]);

impl PanelLayout {
    /// Returns the bytes of one row in ggml's layout.
    #[must_use]
    pub const fn ggml_row_bytes(self) -> usize {
        match self.weight {
            WeightType::F16 => self.k * 2,
            weight => self.k / weight.block_elems() * weight.block_bytes(),
        }
    }

    /// Repacks up to 32 ggml rows into a panel; columns without a row become zero.
    ///
    /// - `rows`: 1 to 32 rows of [`Self::ggml_row_bytes`] bytes, one after another; for groups, all
    ///   32
    /// - `panel`: [`Self::panel_bytes`] bytes; all are written
    ///
    /// # Errors
    /// `Length` if a slice has another size.
    pub fn pack_panel(self, panel: &mut [u8], rows: &[u8]) -> Result<()> {
        let row_bytes = self.ggml_row_bytes();
        let count = rows.len() / row_bytes;
        let least = if self.weight.is_grouped() {
            TILE_DIM
        } else {
            1
        };
        if !rows.len().is_multiple_of(row_bytes) || !(least..=TILE_DIM).contains(&count) {
            return Err(Error::Length {
                what: "ggml rows of a panel",
                have: rows.len(),
                want: row_bytes * TILE_DIM,
            });
        }
        if panel.len() != self.panel_bytes() {
            return Err(Error::Length {
                what: "panel",
                have: panel.len(),
                want: self.panel_bytes(),
            });
        }
        let mut columns = [&[][..]; TILE_DIM];
        for (column, row) in columns.iter_mut().zip(rows.chunks_exact(row_bytes)) {
            *column = row;
        }
        let (quants, planes) = panel.split_at_mut(self.scale_plane_offset());
        match self.weight {
            WeightType::F16 => {
                hvx::widest(HalfColumns {
                    columns: &columns,
                    quants,
                });
            }
            WeightType::Q4_0 | WeightType::Iq4Nl => {
                hvx::widest(BlockColumns::<18, 2, 4, AS_IS> {
                    columns: &columns,
                    quants,
                    planes,
                });
            }
            WeightType::Q4_1 => {
                hvx::widest(BlockColumns::<20, 4, 4, AS_IS> {
                    columns: &columns,
                    quants,
                    planes,
                });
            }
            WeightType::Q8_0 => {
                hvx::widest(BlockColumns::<34, 2, 8, SIGNED> {
                    columns: &columns,
                    quants,
                    planes,
                });
            }
            WeightType::Q4Tile | WeightType::Q8Tile => {
                planes.fill(0);
                for (g, row) in columns.iter().enumerate() {
                    for (kt, block) in row.chunks(self.weight.block_bytes()).enumerate() {
                        write_group(self, panel, kt, g, block);
                    }
                }
            }
            WeightType::Mxfp4 => {
                hvx::widest(BlockColumns::<17, 1, 4, AS_IS> {
                    columns: &columns,
                    quants,
                    planes,
                });
            }
            WeightType::Q5_0 => {
                hvx::widest(BlockColumns::<22, 2, 5, FIVE_BITS> {
                    columns: &columns,
                    quants,
                    planes,
                });
            }
            WeightType::Q5_1 => {
                hvx::widest(BlockColumns::<24, 4, 5, FIVE_BITS> {
                    columns: &columns,
                    quants,
                    planes,
                });
            }
            WeightType::Q4K => {
                hvx::widest(SuperColumns::<Q4K, _, _, _>::new(&columns, quants, planes));
            }
            WeightType::Q5K => {
                hvx::widest(SuperColumns::<Q5K, _, _, _>::new(&columns, quants, planes));
            }
            WeightType::Q6K => {
                hvx::widest(SuperColumns::<Q6K, _, _, _>::new(&columns, quants, planes));
            }
            WeightType::Iq4Xs => {
                hvx::widest(SuperColumns::<Iq4Xs, _, _, _>::new(
                    &columns, quants, planes,
                ));
            }
            WeightType::Q3K => {
                hvx::widest(SuperColumns::<Q3K, _, _, _>::new(&columns, quants, planes));
            }
            WeightType::Q2K => {
                hvx::widest(SuperColumns::<Q2K, _, _, _>::new(&columns, quants, planes));
            }
        }
        Ok(())
    }
}

/// Codes of quants: unchanged, flipped, and 5 bits, of which ggml stores one separately.
const AS_IS: u8 = 0;
const SIGNED: u8 = 1;
const FIVE_BITS: u8 = 2;

/// Columns of blocks with `BLOCK` bytes: `HEAD` bytes of scale and minimum, then `WORDS` words of
/// quants in a code.
struct BlockColumns<'a, const BLOCK: usize, const HEAD: usize, const WORDS: usize, const CODE: u8> {
    columns: &'a [&'a [u8]; TILE_DIM],
    quants: &'a mut [u8],
    planes: &'a mut [u8],
}

impl<const BLOCK: usize, const HEAD: usize, const WORDS: usize, const CODE: u8> hvx::Kernel
    for BlockColumns<'_, BLOCK, HEAD, WORDS, CODE>
{
    type Output = ();
    const ANY_CPU: bool = true;

    #[inline(always)]
    fn run(self) {
        // The bytes of a scale, and how many tiles share a line of scales. Minima follow in a plane
        // after the scales.
        let scale_bytes = HEAD.min(2);
        let per_line = 4 / scale_bytes;
        let columns = self.columns.map(|row| row.as_chunks::<BLOCK>().0);
        let tiles = (self.quants.as_chunks_mut::<LINE_BYTES>().0)
            .as_chunks_mut::<WORDS>()
            .0;
        let count = tiles.len();
        let planes = self.planes.as_chunks_mut::<LINE_BYTES>().0;
        let mins = planes.len() / 2;
        let mut heads = [[0u32; TILE_DIM]; 2];
        for (kt, lines) in tiles.iter_mut().enumerate() {
            let shift = kt % per_line * 8 * scale_bytes;
            for (group, columns) in columns.as_chunks::<AT_ONCE>().0.iter().enumerate() {
                let mut words = [[0u32; WORDS]; AT_ONCE];
                for (n, (words, column)) in words.iter_mut().zip(columns).enumerate() {
                    let Some(block) = column.get(kt) else {
                        continue;
                    };
                    let (head, quants) = block.split_at(HEAD);
                    let mut scale = [0; 4];
                    scale[..scale_bytes].copy_from_slice(&head[..scale_bytes]);
                    heads[0][AT_ONCE * group + n] |= u32::from_le_bytes(scale) << shift;
                    if HEAD == 4 {
                        scale[..2].copy_from_slice(&head[2..]);
                        heads[1][AT_ONCE * group + n] |= u32::from_le_bytes(scale) << shift;
                    }
                    if CODE == FIVE_BITS {
                        for (word, five) in words.iter_mut().zip(five_bits::encode(quants)) {
                            *word = five;
                        }
                        continue;
                    }
                    for (word, bytes) in words.iter_mut().zip(quants.as_chunks::<4>().0) {
                        let flip = if CODE == SIGNED { FLIP_WORD } else { 0 };
                        *word = in_word_order(u32::from_le_bytes(*bytes)) ^ flip;
                    }
                }
                transpose(&words, lines, AT_ONCE * group);
            }
            if kt % per_line == per_line - 1 || kt + 1 == count {
                let line = kt / per_line;
                planes[line] = line_of(&heads[0]);
                if HEAD == 4 {
                    planes[mins + line] = line_of(&heads[1]);
                }
                heads = [[0; TILE_DIM]; 2];
            }
        }
    }
}

/// Returns words as the bytes of a line.
#[inline(always)]
fn line_of(words: &[u32; TILE_DIM]) -> [u8; LINE_BYTES] {
    let mut line = [0; LINE_BYTES];
    line.copy_from_slice(words.map(u32::to_le_bytes).as_flattened());
    line
}

/// Columns of F16: word j of a block is elements 2j and 2j + 1, and a line of the tile holds them
/// in the same order.
struct HalfColumns<'a> {
    columns: &'a [&'a [u8]; TILE_DIM],
    quants: &'a mut [u8],
}

impl hvx::Kernel for HalfColumns<'_> {
    type Output = ();
    const ANY_CPU: bool = true;

    #[inline(always)]
    fn run(self) {
        const WORDS: usize = TILE_DIM / 2;
        const BLOCK: usize = 4 * WORDS;
        let tiles = (self.quants.as_chunks_mut::<LINE_BYTES>().0)
            .as_chunks_mut::<WORDS>()
            .0;
        for (kt, lines) in tiles.iter_mut().enumerate() {
            for (group, columns) in self.columns.as_chunks::<AT_ONCE>().0.iter().enumerate() {
                let mut words = [[0u32; WORDS]; AT_ONCE];
                for (words, row) in words.iter_mut().zip(columns) {
                    let rest = row.get(kt * BLOCK..).unwrap_or_default();
                    let mut padded = [0; BLOCK];
                    let block = rest.first_chunk().unwrap_or_else(|| {
                        padded[..rest.len()].copy_from_slice(rest);
                        &padded
                    });
                    for (word, pair) in words.iter_mut().zip(block.as_chunks::<4>().0) {
                        *word = u32::from_le_bytes(*pair);
                    }
                }
                transpose(&words, lines, AT_ONCE * group);
            }
        }
    }
}

/// Returns the bytes of a group in word order: the two in the middle are exchanged.
#[inline(always)]
pub(super) const fn in_word_order(group: u32) -> u32 {
    group & 0xff00_00ff | (group & 0x0000_ff00) << 8 | (group & 0x00ff_0000) >> 8
}

/// Writes word j of each column to line j, starting at word `n`.
#[inline(always)]
pub(super) fn transpose<const WORDS: usize>(
    columns: &[[u32; WORDS]; AT_ONCE],
    lines: &mut [[u8; LINE_BYTES]; WORDS],
    n: usize,
) {
    for (j, line) in lines.iter_mut().enumerate() {
        let words = columns.map(|column| column[j].to_le_bytes());
        line[4 * n..4 * (n + AT_ONCE)].copy_from_slice(words.as_flattened());
    }
}
