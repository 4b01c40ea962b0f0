//! Super-blocks with a scale for each 32 weights: Q4_K, Q5_K, IQ4_XS.

use super::super::five_bits::{self, word_at};
use super::super::panel::in_word_order;
use super::super::{SUPER_TILES, TILE_DIM};
use super::{Code, FieldWords, UPPER_SIGN, add_bits, each, signed_six};

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
type ScaleBytes = [u8; 12];

/// Returns the scales and the minima of ggml's 12 bytes.
///
/// Source: `get_scale_min_k4`, ggml-quants.c.
#[inline(always)]
fn scales_and_mins(bytes: &ScaleBytes) -> [[u32; SUPER_TILES]; 2] {
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
fn six_bits([scales, mins]: [[u32; SUPER_TILES]; 2]) -> ScaleBytes {
    let mut bytes = [0; 12];
    // CAST: fields of six bits, put together to eight bits.
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
fn scale_words(header: u32, bytes: &ScaleBytes) -> [u32; 4] {
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

/// Returns the argument of [`scale_words`].
#[inline(always)]
fn scale_bytes(words: &[u32; 4]) -> (u32, ScaleBytes) {
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
fn six_bits_of(block: &[u8]) -> ScaleBytes {
    let mut bytes = [0; 12];
    bytes.copy_from_slice(&block[4..16]);
    bytes
}

/// Q4_K: 2 bytes d, 2 bytes dmin, 12 bytes of scales and minima, 128 bytes of nibbles.
pub(in crate::layout) struct Q4K;

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
pub(in crate::layout) struct Q5K;

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
/// IQ4_XS: 2 bytes d, 2 bytes of upper bits of scales, 4 bytes of their lower bits, 128 bytes of
/// nibbles.
///
/// Source: `dequantize_row_iq4_xs`, ggml-quants.c.
pub(in crate::layout) struct Iq4Xs;

impl Code<136, 4, 2> for Iq4Xs {
    #[inline(always)]
    fn encode(block: &[u8; 136]) -> FieldWords<4, 2> {
        let mut words = FieldWords::ZERO;
        for (t, quants) in words.quants.iter_mut().enumerate() {
            for (v, word) in quants.iter_mut().enumerate() {
                *word = in_word_order(word_at(block, 8 + 16 * t + 4 * v));
            }
        }
        let (header, low) = (word_at(block, 0), word_at(block, 4));
        let c =
            |tile: usize| signed_six(low >> (4 * tile) & 15 | (header >> (16 + 2 * tile) & 3) << 4);
        for h in 0..2 {
            let d = header >> (8 * h) & 0xff;
            let first = c(6 + h) << 10 | (c(4 + h) >> 4) << 8 | d;
            let second = c(h) << 10 | c(2 + h) << 4 | c(4 + h) & 15;
            words.scales[0] |= first << (16 * h);
            words.scales[1] |= second << (16 * h);
        }
        words
    }

    #[inline(always)]
    fn decode(words: &FieldWords<4, 2>) -> [u8; 136] {
        let mut block = [0; 136];
        for (t, quants) in words.quants.iter().enumerate() {
            for (v, word) in quants.iter().enumerate() {
                add_bits(&mut block, 8 + 16 * t + 4 * v, in_word_order(*word));
            }
        }
        let (mut header, mut low) = (0, 0);
        for h in 0..2 {
            let [first, second] = words.scales.map(|word| word >> (16 * h) & 0xffff);
            header |= (first & 0xff) << (8 * h);
            for (tile, c) in [
                (h, second >> 10),
                (2 + h, second >> 4 & 63),
                (4 + h, second & 15 | (first >> 8 & 3) << 4),
                (6 + h, first >> 10),
            ] {
                let s = signed_six(c);
                low |= (s & 15) << (4 * tile);
                header |= (s >> 4) << (16 + 2 * tile);
            }
        }
        add_bits(&mut block, 0, header);
        add_bits(&mut block, 4, low);
        block
    }
}
