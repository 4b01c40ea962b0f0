//! Whole panels at once: what loading a model spends its time on.
//!
//! A tile is a transposition of words: column n of it is one ggml block, whose word j goes to word n of line j.
//!
//! ```text
//! for each tile
//!   for each column n:  copy its block's words, in word order, flipped         32 streams, one for each ggml row
//!   for each line j:    for each column n:  line[j][n] = words[n][j]           stays in registers and first-level cache
//!   for each column n:  put its scale (and minimum) into the plane
//! ```
//!
//! Each byte of the panel is written once, padding too, so that the memory need not be cleared before.

use super::{LINE_BYTES, PanelLayout, Q8_FLIP, TILE_DIM, WeightType};
use crate::error::{Error, Result};

/// Words of a line: one for each column.
type Line = [[u8; 4]; LINE_BYTES / 4];

/// [`Q8_FLIP`] in each byte of a word.
const FLIP_WORD: u32 = u32::from_ne_bytes([Q8_FLIP; 4]);

impl PanelLayout {
    /// Bytes of one row in ggml's layout.
    #[must_use]
    pub const fn ggml_row_bytes(self) -> usize {
        match self.weight {
            WeightType::F16 => self.k * 2,
            weight => self.k_tiles() * weight.block_bytes(),
        }
    }

    /// Repacks up to 32 ggml rows into a panel; columns that have no row become zero.
    ///
    /// - `rows`: 1 to 32 rows of [`Self::ggml_row_bytes`] bytes, one after another
    /// - `panel`: [`Self::panel_bytes`] bytes, all of which are written
    ///
    /// # Errors
    /// `Length` if a slice has another size.
    pub fn pack_panel(self, panel: &mut [u8], rows: &[u8]) -> Result<()> {
        let row_bytes = self.ggml_row_bytes();
        let count = rows.len() / row_bytes;
        if !rows.len().is_multiple_of(row_bytes) || !(1..=TILE_DIM).contains(&count) {
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
            WeightType::F16 => halves(&columns, quants),
            WeightType::Q4_0 | WeightType::Iq4Nl => {
                blocks::<18, 2, 4, false>(&columns, quants, planes);
            }
            WeightType::Q4_1 => blocks::<20, 4, 4, false>(&columns, quants, planes),
            WeightType::Q8_0 => blocks::<34, 2, 8, true>(&columns, quants, planes),
            WeightType::Mxfp4 => blocks::<17, 1, 4, false>(&columns, quants, planes),
        }
        Ok(())
    }
}

/// Packs types with blocks of `BLOCK` bytes: `HEAD` bytes of scale and minimum, then `WORDS` words of quants.
fn blocks<const BLOCK: usize, const HEAD: usize, const WORDS: usize, const SIGNED: bool>(
    columns: &[&[u8]; TILE_DIM],
    quants: &mut [u8],
    planes: &mut [u8],
) {
    // Bytes of a scale, and tiles whose scales share a line.
    let scale_bytes = HEAD.min(2);
    let per_line = 4 / scale_bytes;
    let (scales, mins) = match HEAD {
        4 => planes.split_at_mut(planes.len() / 2),
        _ => planes.split_at_mut(planes.len()),
    };
    let lines = quants.as_chunks_mut::<LINE_BYTES>().0;
    for (kt, lines) in lines.as_chunks_mut::<WORDS>().0.iter_mut().enumerate() {
        let mut words = [[0u32; WORDS]; TILE_DIM];
        let mut heads = [[0u8; HEAD]; TILE_DIM];
        for ((words, head), row) in words.iter_mut().zip(&mut heads).zip(columns) {
            let Some(block) = row.get(kt * BLOCK..).and_then(<[u8]>::first_chunk::<BLOCK>) else {
                break;
            };
            let (from, groups) = block.split_at(HEAD);
            head.copy_from_slice(from);
            for (word, group) in words.iter_mut().zip(groups.as_chunks::<4>().0) {
                let flip = if SIGNED { FLIP_WORD } else { 0 };
                *word = in_word_order(u32::from_le_bytes(*group)) ^ flip;
            }
        }
        transpose(&words, lines);
        let (line, part) = (kt / per_line, kt % per_line * scale_bytes);
        for (plane, from) in [(&mut *scales, 0), (&mut *mins, 2)] {
            let Some(line) = plane.as_chunks_mut::<LINE_BYTES>().0.get_mut(line) else {
                continue;
            };
            for (word, head) in line.as_chunks_mut::<4>().0.iter_mut().zip(&heads) {
                let bytes = &head[from..from + scale_bytes];
                if part == 0 {
                    // What no later tile writes is zero.
                    *word = [0; 4];
                }
                word[part..part + scale_bytes].copy_from_slice(bytes);
            }
        }
    }
}

/// Packs F16: word j of a block is elements 2j and 2j + 1, which is also how a line of the tile holds them.
fn halves(columns: &[&[u8]; TILE_DIM], quants: &mut [u8]) {
    const WORDS: usize = TILE_DIM / 2;
    const BLOCK: usize = 4 * WORDS;
    let lines = quants.as_chunks_mut::<LINE_BYTES>().0;
    for (kt, lines) in lines.as_chunks_mut::<WORDS>().0.iter_mut().enumerate() {
        let mut words = [[0u32; WORDS]; TILE_DIM];
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
        transpose(&words, lines);
    }
}

/// The bytes of a group in word order: the two in the middle change places.
#[inline(always)]
const fn in_word_order(group: u32) -> u32 {
    group & 0xff00_00ff | (group & 0x0000_ff00) << 8 | (group & 0x00ff_0000) >> 8
}

/// Word j of column n to word n of line j.
#[inline(always)]
fn transpose<const WORDS: usize>(
    words: &[[u32; WORDS]; TILE_DIM],
    lines: &mut [[u8; LINE_BYTES]; WORDS],
) {
    for (j, line) in lines.iter_mut().enumerate() {
        // PANIC: 128 bytes are 32 words.
        let line: &mut Line = line.as_chunks_mut::<4>().0.try_into().expect("32 words");
        for (word, column) in line.iter_mut().zip(words) {
            *word = column[j].to_le_bytes();
        }
    }
}
