//! Lossless moves of single ggml blocks into panels and back. Scalar code: it runs on the host when
//! weights are loaded.

use super::five_bits;
use super::group::{read_group, write_group};
use super::super_block::{read_super_block, write_super_block};
use super::{
    LINE_BYTES, MatrixLayout, PanelLayout, Q8_FLIP, SUPER_BLOCK, TILE_DIM, WORD_ORDER, WeightType,
    f16_tile_offset,
};
use crate::error::{Error, Result};

/// Exchanges the middle bytes of a group, then flips all four. Packing and unpacking are the same
/// exchange.
fn exchange(group: [u8; 4], flip: u8) -> [u8; 4] {
    WORD_ORDER.map(|i| group[i] ^ flip)
}

/// Places of the parts of one block, shared by both directions.
struct BlockPlan {
    /// Each byte range before the quants (scale, then minimum), as (start in the block, panel
    /// offset, bytes).
    header: [(usize, usize, usize); 2],
    /// Offset of the block's first quant byte in the block.
    quants_at: usize,
    /// Panel offset of word `n` of the tile's first line.
    words_at: usize,
    /// The mask that each quant byte is XORed with.
    flip: u8,
}

impl BlockPlan {
    fn new(layout: PanelLayout, kt: usize, n: usize) -> Self {
        let weight = layout.weight();
        let (scale_bytes, min_bytes) = match weight {
            WeightType::F16
            | WeightType::Q4K
            | WeightType::Q5K
            | WeightType::Q6K
            | WeightType::Iq4Xs
            | WeightType::Q3K
            | WeightType::Q2K => (0, 0),
            WeightType::Mxfp4 => (1, 0),
            WeightType::Q4_1 | WeightType::Q5_1 => (2, 2),
            WeightType::Q4_0
            | WeightType::Q5_0
            | WeightType::Q8_0
            | WeightType::Iq4Nl
            | WeightType::Q4Tile
            | WeightType::Q8Tile => (2, 0),
        };
        Self {
            header: [
                (0, layout.scale_offset(kt, n), scale_bytes),
                // Types without minima have no such plane, so an empty range at the panel's start
                // is returned.
                (
                    scale_bytes,
                    if min_bytes == 0 {
                        0
                    } else {
                        layout.min_offset(kt, n)
                    },
                    min_bytes,
                ),
            ],
            quants_at: scale_bytes + min_bytes,
            words_at: layout.quant_offset(kt) + 4 * n,
            flip: if weight == WeightType::Q8_0 {
                Q8_FLIP
            } else {
                0
            },
        }
    }
}

fn write_block(layout: PanelLayout, panel: &mut [u8], kt: usize, n: usize, block: &[u8]) {
    if layout.weight() == WeightType::F16 {
        let base = layout.quant_offset(kt);
        for (k, elem) in block.chunks_exact(2).enumerate() {
            panel[base + f16_tile_offset(k, n)..][..2].copy_from_slice(elem);
        }
        return;
    }
    if layout.weight().is_grouped() {
        return write_group(layout, panel, kt, n, block);
    }
    if layout.weight().block_elems() == SUPER_BLOCK {
        return write_super_block(layout, panel, kt, n, block);
    }
    let plan = BlockPlan::new(layout, kt, n);
    for (from, to, bytes) in plan.header {
        panel[to..to + bytes].copy_from_slice(&block[from..from + bytes]);
    }
    if matches!(layout.weight(), WeightType::Q5_0 | WeightType::Q5_1) {
        for (j, word) in five_bits::encode(&block[plan.quants_at..])
            .iter()
            .enumerate()
        {
            panel[plan.words_at + LINE_BYTES * j..][..4].copy_from_slice(&word.to_le_bytes());
        }
        return;
    }
    for (j, group) in block[plan.quants_at..]
        .as_chunks::<4>()
        .0
        .iter()
        .enumerate()
    {
        panel[plan.words_at + LINE_BYTES * j..][..4].copy_from_slice(&exchange(*group, plan.flip));
    }
}

fn read_block(layout: PanelLayout, panel: &[u8], kt: usize, n: usize, block: &mut [u8]) {
    if layout.weight() == WeightType::F16 {
        let base = layout.quant_offset(kt);
        for (k, elem) in block.chunks_exact_mut(2).enumerate() {
            elem.copy_from_slice(&panel[base + f16_tile_offset(k, n)..][..2]);
        }
        return;
    }
    if layout.weight().is_grouped() {
        return read_group(layout, panel, kt, n, block);
    }
    if layout.weight().block_elems() == SUPER_BLOCK {
        return read_super_block(layout, panel, kt, n, block);
    }
    let plan = BlockPlan::new(layout, kt, n);
    for (from, to, bytes) in plan.header {
        block[from..from + bytes].copy_from_slice(&panel[to..to + bytes]);
    }
    if matches!(layout.weight(), WeightType::Q5_0 | WeightType::Q5_1) {
        let words = core::array::from_fn(|j| {
            let at = plan.words_at + LINE_BYTES * j;
            u32::from_le_bytes([panel[at], panel[at + 1], panel[at + 2], panel[at + 3]])
        });
        five_bits::decode(words, &mut block[plan.quants_at..]);
        return;
    }
    for (j, group) in block[plan.quants_at..]
        .as_chunks_mut::<4>()
        .0
        .iter_mut()
        .enumerate()
    {
        let word = &panel[plan.words_at + LINE_BYTES * j..][..4];
        *group = exchange([word[0], word[1], word[2], word[3]], plan.flip);
    }
}

impl MatrixLayout {
    /// Checks that row `n` exists and that both slices have their sizes.
    fn check_row(self, packed_bytes: usize, n: usize, row_bytes: usize) -> Result<()> {
        if n >= self.block_rows() {
            return Err(Error::Index {
                what: "row",
                index: n,
                limit: self.block_rows(),
            });
        }
        if packed_bytes != self.matrix_bytes() {
            return Err(Error::Length {
                what: "packed matrix",
                have: packed_bytes,
                want: self.matrix_bytes(),
            });
        }
        if row_bytes != self.ggml_row_bytes() {
            return Err(Error::Length {
                what: "ggml row",
                have: row_bytes,
                want: self.ggml_row_bytes(),
            });
        }
        Ok(())
    }

    /// Repacks ggml row `n` (for groups: one of [`MatrixLayout::block_rows`]) into the packed
    /// matrix; other rows and the padding keep their bytes.
    ///
    /// - `packed`: [`Self::matrix_bytes`] bytes, zeroed before the first row
    /// - `row`: [`Self::ggml_row_bytes`] bytes, blocks in ggml's order
    ///
    /// # Errors
    /// `Index` if row `n` does not exist; `Length` if a slice has another size.
    pub fn pack_row(self, packed: &mut [u8], n: usize, row: &[u8]) -> Result<()> {
        self.check_row(packed.len(), n, row.len())?;
        let panel = &mut packed[self.panel_offset(n / TILE_DIM)..][..self.panel().panel_bytes()];
        for (kt, block) in row.chunks(self.panel().weight().block_bytes()).enumerate() {
            write_block(self.panel(), panel, kt, n % TILE_DIM, block);
        }
        Ok(())
    }

    /// Restores ggml row `n` from the packed matrix, bit for bit as it was passed to
    /// [`Self::pack_row`].
    ///
    /// - `packed`: [`Self::matrix_bytes`] bytes
    /// - `row`: [`Self::ggml_row_bytes`] bytes
    ///
    /// # Errors
    /// As [`Self::pack_row`].
    pub fn unpack_row(self, packed: &[u8], n: usize, row: &mut [u8]) -> Result<()> {
        self.check_row(packed.len(), n, row.len())?;
        let panel = &packed[self.panel_offset(n / TILE_DIM)..][..self.panel().panel_bytes()];
        for (kt, block) in row
            .chunks_mut(self.panel().weight().block_bytes())
            .enumerate()
        {
            read_block(self.panel(), panel, kt, n % TILE_DIM, block);
        }
        Ok(())
    }
}
