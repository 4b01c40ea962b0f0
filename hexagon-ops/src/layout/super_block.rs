//! Super-blocks of 256 weights: their words in a column of a panel, and their moves there and back.
//!
//! A super-block becomes words, each of which goes to word n of one line: the quants of its eight
//! tiles, then its scales. [`Code`] is that change and its inverse for one type; the picture of
//! [`super`] shows the words.

use core::marker::PhantomData;

use super::five_bits::{self, word_at};
use super::panel::{AT_ONCE, in_word_order, transpose};
use super::{LINE_BYTES, PanelLayout, SUPER_TILES, TILE_DIM, WeightType, f16_tile_offset};
use crate::hvx;

/// Words of a super-block: `QUANTS` for each tile, and `SCALES`; and d, if it is in a plane of its
/// own.
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
    /// `true` if d is in a plane of its own.
    const HAS_D: bool = false;

    /// Returns the words of a super-block.
    fn encode(block: &[u8; BYTES]) -> FieldWords<QUANTS, SCALES>;

    /// Returns the super-block that [`Self::encode`] was given.
    fn decode(words: &FieldWords<QUANTS, SCALES>) -> [u8; BYTES];
}

/// The sign of the halfword in the upper half of a word.
const UPPER_SIGN: u32 = 0x8000_0000;

/// Low nibbles of a word.
const LOW: u32 = 0x0f0f_0f0f;

/// Returns the nibbles of ggml's 128 bytes as tiles of nibbles: 32 bytes hold tile 2j in their low
/// nibbles and tile 2j + 1 in their high ones; a tile's bytes hold elements l and l + 16.
#[inline(always)]
fn nibble_tiles(bytes: &[u8]) -> [[u32; 4]; SUPER_TILES] {
    let mut tiles = [[0; 4]; SUPER_TILES];
    for (pair, bytes) in tiles
        .as_chunks_mut::<2>()
        .0
        .iter_mut()
        .zip(bytes.chunks_exact(TILE_DIM))
    {
        let [even, odd] = pair;
        for (v, (even, odd)) in even.iter_mut().zip(odd).enumerate() {
            let first = in_word_order(word_at(bytes, 4 * v));
            let second = in_word_order(word_at(bytes, 16 + 4 * v));
            *even = first & LOW | (second & LOW) << 4;
            *odd = first >> 4 & LOW | second & !LOW;
        }
    }
    tiles
}

/// Writes the bytes that [`nibble_tiles`] was given.
#[inline(always)]
fn nibble_bytes(tiles: &[[u32; 4]; SUPER_TILES], bytes: &mut [u8]) {
    for (pair, bytes) in tiles
        .as_chunks::<2>()
        .0
        .iter()
        .zip(bytes.chunks_exact_mut(TILE_DIM))
    {
        let [even, odd] = pair;
        for (v, (even, odd)) in even.iter().zip(odd).enumerate() {
            let first = in_word_order(even & LOW | (odd & LOW) << 4);
            let second = in_word_order(even >> 4 & LOW | odd & !LOW);
            bytes[4 * v..][..4].copy_from_slice(&first.to_le_bytes());
            bytes[16 + 4 * v..][..4].copy_from_slice(&second.to_le_bytes());
        }
    }
}

/// Bytes of the 6-bit scales and minima of eight tiles.
type SixBits = [u8; 12];

/// Returns the scales and the minima of ggml's 12 bytes.
///
/// Source: `get_scale_min_k4`, ggml-quants.c.
#[inline(always)]
fn scales_and_mins(bytes: &SixBits) -> [[u32; SUPER_TILES]; 2] {
    let mut out = [[0; SUPER_TILES]; 2];
    for j in 0..4 {
        let [scale, min, last] = [bytes[j], bytes[4 + j], bytes[8 + j]].map(u32::from);
        out[0][j] = scale & 63;
        out[1][j] = min & 63;
        out[0][4 + j] = last & 15 | (scale >> 6) << 4;
        out[1][4 + j] = last >> 4 | (min >> 6) << 4;
    }
    out
}

/// Returns ggml's 12 bytes of scales and minima.
#[inline(always)]
fn six_bits([scales, mins]: [[u32; SUPER_TILES]; 2]) -> SixBits {
    let mut bytes = [0; 12];
    // CAST: fields of six bits, put together to eight.
    let byte = |value: u32| value.to_le_bytes()[0];
    for j in 0..4 {
        bytes[j] = byte(scales[j] | (scales[4 + j] >> 4) << 6);
        bytes[4 + j] = byte(mins[j] | (mins[4 + j] >> 4) << 6);
        bytes[8 + j] = byte(scales[4 + j] & 15 | (mins[4 + j] & 15) << 4);
    }
    bytes
}

/// Returns the four words of scales: d and -dmin, then the fields of 6 bits.
#[inline(always)]
fn scale_words(header: u32, bytes: &SixBits) -> [u32; 4] {
    let [s, m] = scales_and_mins(bytes);
    let mut words = [header ^ UPPER_SIGN, 0, 0, 0];
    for h in 0..2 {
        let halves = [
            s[2 + h] << 10 | (s[6 + h] & 15) << 6 | s[h],
            m[2 + h] << 10 | (m[6 + h] & 15) << 6 | m[h],
            m[4 + h] << 10 | (m[6 + h] >> 4) << 8 | (s[6 + h] >> 4) << 6 | s[4 + h],
        ];
        for (word, half) in words[1..].iter_mut().zip(halves) {
            *word |= half << (16 * h);
        }
    }
    words
}

/// Returns what [`scale_words`] was given.
#[inline(always)]
fn scale_bytes(words: &[u32; 4]) -> (u32, SixBits) {
    let (mut s, mut m) = ([0; SUPER_TILES], [0; SUPER_TILES]);
    for h in 0..2 {
        let [a, b, c] = [words[1], words[2], words[3]].map(|word| word >> (16 * h) & 0xffff);
        (s[h], s[2 + h], s[4 + h]) = (a & 63, a >> 10, c & 63);
        (m[h], m[2 + h], m[4 + h]) = (b & 63, b >> 10, c >> 10);
        s[6 + h] = a >> 6 & 15 | (c >> 6 & 3) << 4;
        m[6 + h] = b >> 6 & 15 | (c >> 8 & 3) << 4;
    }
    (words[0] ^ UPPER_SIGN, six_bits([s, m]))
}

/// Returns the 12 bytes of scales that follow the header.
#[inline(always)]
fn six_bits_of(block: &[u8]) -> SixBits {
    let mut bytes = [0; 12];
    bytes.copy_from_slice(&block[4..16]);
    bytes
}

/// Q4_K: 2 bytes d, 2 bytes dmin, 12 bytes of scales and minima, 128 bytes of nibbles.
pub(super) struct Q4K;

impl Code<144, 4, 4> for Q4K {
    #[inline(always)]
    fn encode(block: &[u8; 144]) -> FieldWords<4, 4> {
        FieldWords {
            quants: nibble_tiles(&block[16..]),
            scales: scale_words(word_at(block, 0), &six_bits_of(block)),
            d: [0; 2],
        }
    }

    #[inline(always)]
    fn decode(words: &FieldWords<4, 4>) -> [u8; 144] {
        let mut block = [0; 144];
        let (header, scales) = scale_bytes(&words.scales);
        block[..4].copy_from_slice(&header.to_le_bytes());
        block[4..16].copy_from_slice(&scales);
        nibble_bytes(&words.quants, &mut block[16..]);
        block
    }
}

/// Q5_K: as Q4_K, with 32 bytes of fifth bits before the nibbles.
///
/// Source: `dequantize_row_q5_K`, ggml-quants.c.
pub(super) struct Q5K;

impl Q5K {
    /// Returns the places of word `g` of a tile: byte and shift of its nibbles, and of its fifth
    /// bits.
    const fn places(tile: usize, g: usize) -> [(usize, usize); 2] {
        [
            (48 + 32 * (tile / 2) + 4 * g, 4 * (tile % 2)),
            (16 + 4 * g, tile),
        ]
    }
}

impl Code<176, 5, 4> for Q5K {
    #[inline(always)]
    fn encode(block: &[u8; 176]) -> FieldWords<5, 4> {
        let mut words = FieldWords {
            scales: scale_words(word_at(block, 0), &six_bits_of(block)),
            ..FieldWords::ZERO
        };
        for (t, quants) in words.quants.iter_mut().enumerate() {
            let mut values = [0; 8];
            for (g, value) in values.iter_mut().enumerate() {
                let [(low, by), (high, high_by)] = Self::places(t, g);
                let nibbles = word_at(block, low) >> by & LOW;
                let fifth = word_at(block, high) >> high_by & each(1);
                *value = in_word_order(nibbles | fifth << 4);
            }
            *quants = five_bits::join(values);
        }
        words
    }

    #[inline(always)]
    fn decode(words: &FieldWords<5, 4>) -> [u8; 176] {
        let mut block = [0; 176];
        let (header, scales) = scale_bytes(&words.scales);
        block[..4].copy_from_slice(&header.to_le_bytes());
        block[4..16].copy_from_slice(&scales);
        for (t, quants) in words.quants.iter().enumerate() {
            for (g, value) in five_bits::split(*quants).into_iter().enumerate() {
                let [(low, by), (high, high_by)] = Self::places(t, g);
                let value = in_word_order(value);
                add_bits(&mut block, low, (value & LOW) << by);
                add_bits(&mut block, high, (value >> 4 & each(1)) << high_by);
            }
        }
        block
    }
}

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

/// Returns the six words that hold eight values of 6 bits.
#[inline(always)]
fn join_six(v: [u32; 8]) -> [u32; 6] {
    let mut words = [v[0], v[1], v[2], v[3], v[4], v[5]];
    for (words, rest) in words.chunks_exact_mut(3).zip([v[6], v[7]]) {
        words[0] |= (rest & each(0x30)) << 2;
        words[1] |= (rest & each(0x0c)) << 4;
        words[2] |= (rest & each(0x03)) << 6;
    }
    words
}

/// Returns the eight values of six words.
#[inline(always)]
fn split_six(w: &[u32; 6]) -> [u32; 8] {
    let [a, b, c, d, e, f] = w.map(|word| word & each(0x3f));
    let rest = |w: &[u32]| w[0] >> 2 & each(0x30) | w[1] >> 4 & each(0x0c) | w[2] >> 6 & each(3);
    [a, b, c, d, e, f, rest(&w[..3]), rest(&w[3..])]
}

/// Q6_K: 128 bytes of lower nibbles, 64 bytes of pairs of upper bits, 16 signed bytes of scales, d.
///
/// Source: `dequantize_row_q6_K`, ggml-quants.c.
pub(super) struct Q6K;

impl Q6K {
    /// Returns the places of word `g` of a tile: byte and shift of its nibbles, and of its upper
    /// bits. Half a super-block has 64 bytes of nibbles and 32 of upper bits for its four tiles.
    const fn places(tile: usize, g: usize) -> [(usize, usize); 2] {
        let (half, part) = (tile / 4, tile % 4);
        [
            (64 * half + 32 * (part % 2) + 4 * g, 4 * (part / 2)),
            (128 + 32 * half + 4 * g, 2 * part),
        ]
    }
}

impl Code<210, 6, 4> for Q6K {
    const HAS_D: bool = true;

    #[inline(always)]
    fn encode(block: &[u8; 210]) -> FieldWords<6, 4> {
        let mut words = FieldWords {
            d: [block[208], block[209]],
            ..FieldWords::ZERO
        };
        for (t, quants) in words.quants.iter_mut().enumerate() {
            let mut values = [0; 8];
            for (g, value) in values.iter_mut().enumerate() {
                let [(low, by), (high, high_by)] = Self::places(t, g);
                let nibbles = word_at(block, low) >> by & each(0x0f);
                let upper = word_at(block, high) >> high_by & each(3);
                *value = in_word_order(nibbles | upper << 4);
            }
            *quants = join_six(values);
        }
        for (p, word) in words.scales.iter_mut().enumerate() {
            *word = in_word_order(word_at(block, 192 + 4 * p));
        }
        words
    }

    #[inline(always)]
    fn decode(words: &FieldWords<6, 4>) -> [u8; 210] {
        let mut block = [0; 210];
        for (t, quants) in words.quants.iter().enumerate() {
            for (g, value) in split_six(quants).into_iter().enumerate() {
                let [(low, by), (high, high_by)] = Self::places(t, g);
                let value = in_word_order(value);
                add_bits(&mut block, low, (value & each(0x0f)) << by);
                add_bits(&mut block, high, (value >> 4 & each(3)) << high_by);
            }
        }
        for (p, word) in words.scales.iter().enumerate() {
            add_bits(&mut block, 192 + 4 * p, in_word_order(*word));
        }
        block[208..].copy_from_slice(&words.d);
        block
    }
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
                    // Zeros, not the words of a block of zeros: dmin's sign is inverted in those.
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
        weight => unreachable!("{weight:?} has no super-blocks"),
    }
}
