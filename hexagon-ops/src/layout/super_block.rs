//! Super-blocks of 256 weights: their words in a column of a panel, and their moves there and back.
//!
//! A super-block becomes a sequence of words, and each word goes to word n of one line: first the
//! quants of its eight tiles, then its scales. [`Code`] is this change and its inverse for one
//! type.
//!
//! # Picture
//!
//! A super-block has 256 weights of one column, and a block of 32 is one of its eight parts. Its
//! quants are the tiles of [`super`]. Its scales are lines whose word n belongs to column n:
//!
//! ```text
//! Q4_K, quants as Q4_0's, 4 lines of scales  | low half                 | high half                |
//! line 0, word n                             | d                        | dmin XOR 0x8000          |
//!                          bits of each half | 15..10  | 9..6    | 5..0 |
//! line 1, word n: tiles 0..8 (low: even)     | s 2, 3  | s 6, 7 of bits 3..0                | s 0, 1 |
//! line 2, word n                             | m 2, 3  | m 6, 7 of bits 3..0                | m 0, 1 |
//! line 3, word n                             | m 4, 5  | bits 5..4 of m 6, 7, of s 6, 7     | s 4, 5 |
//!
//! Q5_K: quants as Q5_1's, scales as Q4_K's
//!
//! Q6_K, 6 lines a tile (768 bytes); value g as in Q5_0, with 6 bits
//!                        bits of each byte | 5..0             | 7..6                            |
//! line 0, 1, 2, word n                      | value 0, 1, 2    | bits 5..4, 3..2, 1..0 of value 6 |
//! line 3, 4, 5, word n                      | value 3, 4, 5    | bits 5..4, 3..2, 1..0 of value 7 |
//! line p of 4 of scales, word n: signed bytes of k 0..16 of tiles 2p, 2p + 1, then of k 16..32
//! d has its own plane, two super-blocks a line, as FP16 scales of two tiles have.
//!
//! IQ4_XS, quants as IQ4_NL's, 2 lines of scales; c is s XOR 32: s - 32, six bits with a sign
//!                          bits of each half | 15..10  | 9..8            | 7..0              |
//! line 0, word n: tiles 0..8 (low: even)     | c 6, 7  | bits 5..4 of c 4, 5 | byte 0, 1 of d |
//!                          bits of each half | 15..10  | 9..4            | 3..0              |
//! line 1, word n                             | c 0, 1  | c 2, 3          | bits 3..0 of c 4, 5 |
//!
//! Q3_K, 3 lines a tile (384 bytes); value g as in Q5_0, with 3 bits
//!                        bits of each byte | 7..6                    | 5..3       | 2..0        |
//! line 0, 1, word n                         | bits 2..1 of value 6, 7 | value 1, 3 | value 0, 2  |
//!                        bits of each byte | 7..5    | 4     | 3                  | 2..0        |
//! line 2, word n                            | value 5 | bit 0 of value 7, 6       | value 4     |
//! 3 lines of scales; low halves: c of k 0..16 of tiles 0..8, high halves: of k 16..32
//!                          bits of each half | 15..10  | 9..4    | 3..0                        |
//! line 0, 1, word n                          | c 0, 1  | c 3, 4  | bits 3..0 of c 6, 7         |
//! line 2, word n                             | c 2     | c 5     | bits 5..4 of c 7, then of c 6 |
//! d as in Q6_K
//!
//! Q2_K, 2 lines a tile (256 bytes); value g as in Q5_0, with 2 bits
//!                        bits of each byte | 7..6       | 5..4       | 3..2       | 1..0       |
//! line 0, 1, word n                         | value 5, 7 | value 4, 6 | value 1, 3 | value 0, 2 |
//! line 0 of 5 of scales, word n: as in Q4_K
//! line 1 + p, word n: bytes of k 0..16 of tiles 2p, 2p + 1: s in high nibbles, m in low ones;
//!                     then of k 16..32: m in high nibbles, s in low ones
//! ```
//!
//! In Q4_K and Q5_K each half has the 6-bit scales s and minima m of the even or the odd tiles. So
//! one mask or one shift of a line extracts the values of two tiles, as words of two halves.

mod by_16;
mod by_32;

use core::marker::PhantomData;

pub(super) use self::by_16::{Q2K, Q3K, Q6K};
pub(super) use self::by_32::{Iq4Xs, Q4K, Q5K};
use super::five_bits::word_at;
use super::panel::{AT_ONCE, transpose};
use super::{LINE_BYTES, PanelLayout, SUPER_TILES, TILE_DIM, WeightType, f16_tile_offset};
use crate::hvx;

/// Words of a super-block: `QUANTS` for each tile, and `SCALES`; and d, if it has a separate plane.
pub(super) struct FieldWords<const QUANTS: usize, const SCALES: usize> {
    quants: [[u32; QUANTS]; SUPER_TILES],
    scales: [u32; SCALES],
    d: [u8; 2],
}

impl<const QUANTS: usize, const SCALES: usize> FieldWords<QUANTS, SCALES> {
    const ZERO: Self = Self {
        quants: [[0; QUANTS]; SUPER_TILES],
        scales: [0; SCALES],
        d: [0; 2],
    };
}

/// A type of super-blocks with `BYTES` bytes.
pub(super) trait Code<const BYTES: usize, const QUANTS: usize, const SCALES: usize> {
    /// `true` if d has a separate plane.
    const HAS_D: bool = false;

    /// Returns the words of a super-block.
    fn encode(block: &[u8; BYTES]) -> FieldWords<QUANTS, SCALES>;

    /// Returns the super-block that [`Self::encode`] was given.
    fn decode(words: &FieldWords<QUANTS, SCALES>) -> [u8; BYTES];
}
/// The sign of the halfword in the upper half of a word.
const UPPER_SIGN: u32 = 0x8000_0000;
/// Sets the bits of a word in four bytes.
#[inline(always)]
fn add_bits(block: &mut [u8], at: usize, word: u32) {
    for (byte, bits) in block[at..at + 4].iter_mut().zip(word.to_le_bytes()) {
        *byte |= bits;
    }
}

/// A bit pattern in each byte of a word.
const fn each(byte: u32) -> u32 {
    byte * 0x0101_0101
}
/// Returns the value of a scale's six bits, s - 32, as six bits with a sign; also the inverse.
#[inline(always)]
const fn signed_six(s: u32) -> u32 {
    s ^ 32
}
/// Columns of super-blocks that become the planes of a panel.
pub(super) struct SuperColumns<'a, C, const BYTES: usize, const QUANTS: usize, const SCALES: usize>
{
    columns: &'a [&'a [u8]; TILE_DIM],
    quants: &'a mut [u8],
    planes: &'a mut [u8],
    code: PhantomData<C>,
}

impl<'a, C, const BYTES: usize, const QUANTS: usize, const SCALES: usize>
    SuperColumns<'a, C, BYTES, QUANTS, SCALES>
{
    /// - `columns`: a row of super-blocks each; none for a column that does not exist
    /// - `quants`, `planes`: the panel up to its scale plane, and the rest
    pub(super) fn new(
        columns: &'a [&'a [u8]; TILE_DIM],
        quants: &'a mut [u8],
        planes: &'a mut [u8],
    ) -> Self {
        Self {
            columns,
            quants,
            planes,
            code: PhantomData,
        }
    }
}

impl<C: Code<BYTES, QUANTS, SCALES>, const BYTES: usize, const QUANTS: usize, const SCALES: usize>
    hvx::Kernel for SuperColumns<'_, C, BYTES, QUANTS, SCALES>
{
    type Output = ();
    const ANY_CPU: bool = true;

    #[inline(always)]
    fn run(self) {
        let columns = self.columns.map(|row| row.as_chunks::<BYTES>().0);
        let tiles = (self.quants.as_chunks_mut::<LINE_BYTES>().0)
            .as_chunks_mut::<QUANTS>()
            .0;
        let blocks = tiles.as_chunks_mut::<SUPER_TILES>().0;
        let (scales, ds) =
            (self.planes.as_chunks_mut::<LINE_BYTES>().0).split_at_mut(blocks.len() * SCALES);
        let scales = scales.as_chunks_mut::<SCALES>().0;
        ds.as_flattened_mut().fill(0);
        for (b, (tiles, scales)) in blocks.iter_mut().zip(scales).enumerate() {
            for (group, columns) in columns.as_chunks::<AT_ONCE>().0.iter().enumerate() {
                let words = columns.map(|column| match column.get(b) {
                    Some(block) => C::encode(block),
                    // All zeros, which differs from an encoded block of zeros: encoding inverts the
                    // sign of dmin.
                    None => FieldWords::ZERO,
                });
                for (t, lines) in tiles.iter_mut().enumerate() {
                    let words = words.each_ref().map(|words| words.quants[t]);
                    transpose(&words, lines, AT_ONCE * group);
                }
                if C::HAS_D {
                    for (n, words) in words.iter().enumerate() {
                        let at = f16_tile_offset(b % 2, AT_ONCE * group + n);
                        ds[b / 2][at..at + 2].copy_from_slice(&words.d);
                    }
                }
                let words = words.each_ref().map(|words| words.scales);
                transpose(&words, scales, AT_ONCE * group);
            }
        }
    }
}

/// Returns the panel offsets of the words of super-block `b` of column `n`: of the quants, of the
/// scales, and of d.
fn places(layout: PanelLayout, b: usize, n: usize) -> [usize; 3] {
    let tile = b * SUPER_TILES;
    [
        layout.quant_offset(tile) + 4 * n,
        layout.scale_offset(tile, n),
        layout.min_offset(tile, n),
    ]
}

/// Writes the words of a super-block of one type.
fn write_as<
    C: Code<BYTES, QUANTS, SCALES>,
    const BYTES: usize,
    const QUANTS: usize,
    const SCALES: usize,
>(
    panel: &mut [u8],
    [quants_at, scales_at, d_at]: [usize; 3],
    block: &[u8],
) {
    let Some(block) = block.first_chunk() else {
        return;
    };
    let words = C::encode(block);
    for (i, word) in words.quants.as_flattened().iter().enumerate() {
        panel[quants_at + LINE_BYTES * i..][..4].copy_from_slice(&word.to_le_bytes());
    }
    for (i, word) in words.scales.iter().enumerate() {
        panel[scales_at + LINE_BYTES * i..][..4].copy_from_slice(&word.to_le_bytes());
    }
    if C::HAS_D {
        panel[d_at..d_at + 2].copy_from_slice(&words.d);
    }
}

/// Reads a super-block of one type as [`write_as`] wrote it.
fn read_as<
    C: Code<BYTES, QUANTS, SCALES>,
    const BYTES: usize,
    const QUANTS: usize,
    const SCALES: usize,
>(
    panel: &[u8],
    [quants_at, scales_at, d_at]: [usize; 3],
    block: &mut [u8],
) {
    let mut words = FieldWords::ZERO;
    if C::HAS_D {
        words.d = [panel[d_at], panel[d_at + 1]];
    }
    for (i, word) in words.quants.as_flattened_mut().iter_mut().enumerate() {
        *word = word_at(panel, quants_at + LINE_BYTES * i);
    }
    for (i, word) in words.scales.iter_mut().enumerate() {
        *word = word_at(panel, scales_at + LINE_BYTES * i);
    }
    block.copy_from_slice(&C::decode(&words));
}

/// Writes super-block `b` of column `n`.
pub(super) fn write_super_block(
    layout: PanelLayout,
    panel: &mut [u8],
    b: usize,
    n: usize,
    block: &[u8],
) {
    let at = places(layout, b, n);
    match layout.weight() {
        WeightType::Q4K => write_as::<Q4K, _, _, _>(panel, at, block),
        WeightType::Q5K => write_as::<Q5K, _, _, _>(panel, at, block),
        WeightType::Q6K => write_as::<Q6K, _, _, _>(panel, at, block),
        WeightType::Iq4Xs => write_as::<Iq4Xs, _, _, _>(panel, at, block),
        WeightType::Q3K => write_as::<Q3K, _, _, _>(panel, at, block),
        WeightType::Q2K => write_as::<Q2K, _, _, _>(panel, at, block),
        weight => unreachable!("{weight:?} has no super-blocks"),
    }
}

/// Reads super-block `b` of column `n` as [`write_super_block`] wrote it.
pub(super) fn read_super_block(
    layout: PanelLayout,
    panel: &[u8],
    b: usize,
    n: usize,
    block: &mut [u8],
) {
    let at = places(layout, b, n);
    match layout.weight() {
        WeightType::Q4K => read_as::<Q4K, _, _, _>(panel, at, block),
        WeightType::Q5K => read_as::<Q5K, _, _, _>(panel, at, block),
        WeightType::Q6K => read_as::<Q6K, _, _, _>(panel, at, block),
        WeightType::Iq4Xs => read_as::<Iq4Xs, _, _, _>(panel, at, block),
        WeightType::Q3K => read_as::<Q3K, _, _, _>(panel, at, block),
        WeightType::Q2K => read_as::<Q2K, _, _, _>(panel, at, block),
        weight => unreachable!("{weight:?} has no super-blocks"),
    }
}
