//! Super-blocks with a scale for each 16 weights: Q6_K, Q3_K, Q2_K.

use super::super::five_bits::word_at;
use super::super::panel::in_word_order;
use super::{Code, FieldWords, UPPER_SIGN, add_bits, each, signed_six};

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
pub(in crate::layout) struct Q6K;

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
/// Returns the three words that hold eight values of 3 bits.
#[inline(always)]
fn join_three(v: [u32; 8]) -> [u32; 3] {
    [
        v[0] | v[1] << 3 | (v[6] & each(6)) << 5,
        v[2] | v[3] << 3 | (v[7] & each(6)) << 5,
        v[4] | (v[6] & each(1)) << 3 | (v[7] & each(1)) << 4 | v[5] << 5,
    ]
}

/// Returns the eight values of three words.
#[inline(always)]
fn split_three([a, b, c]: [u32; 3]) -> [u32; 8] {
    let at = |word: u32, shift: u32| word >> shift & each(7);
    let last = |word: u32, shift: u32| word >> 5 & each(6) | c >> shift & each(1);
    [
        at(a, 0),
        at(a, 3),
        at(b, 0),
        at(b, 3),
        at(c, 0),
        at(c, 5),
        last(a, 3),
        last(b, 4),
    ]
}

/// Q3_K: 32 bytes of upper bits, 64 bytes of pairs of lower bits, 12 bytes of scales, d.
///
/// Source: `dequantize_row_q3_K`, ggml-quants.c.
pub(in crate::layout) struct Q3K;

impl Q3K {
    /// Returns the places of word `g` of a tile: byte and shift of its lower bits, and of its upper
    /// ones.
    const fn places(tile: usize, g: usize) -> [(usize, usize); 2] {
        [
            (32 + 32 * (tile / 4) + 4 * g, 2 * (tile % 4)),
            (4 * g, tile),
        ]
    }

    /// Returns the places of the scale of half `h` of a tile: byte and shift of its lower four
    /// bits, and of its upper two.
    const fn scale_places(tile: usize, h: usize) -> [(usize, usize); 2] {
        let j = 2 * tile + h;
        [(96 + j % 8, 4 * (j / 8)), (104 + j % 4, 2 * (j / 4))]
    }
}

impl Code<110, 3, 3> for Q3K {
    const HAS_D: bool = true;

    #[inline(always)]
    fn encode(block: &[u8; 110]) -> FieldWords<3, 3> {
        let mut words = FieldWords {
            d: [block[108], block[109]],
            ..FieldWords::ZERO
        };
        for (t, quants) in words.quants.iter_mut().enumerate() {
            let mut values = [0; 8];
            for (g, value) in values.iter_mut().enumerate() {
                let [(low, by), (high, high_by)] = Self::places(t, g);
                let pairs = word_at(block, low) >> by & each(3);
                let third = word_at(block, high) >> high_by & each(1);
                *value = in_word_order(pairs | third << 2);
            }
            *quants = join_three(values);
        }
        for h in 0..2 {
            let c = |tile: usize| {
                let [(low, by), (high, high_by)] = Self::scale_places(tile, h);
                let s = block[low] >> by & 15 | (block[high] >> high_by & 3) << 4;
                signed_six(s.into())
            };
            let halves = [
                c(0) << 10 | c(3) << 4 | c(6) & 15,
                c(1) << 10 | c(4) << 4 | c(7) & 15,
                c(2) << 10 | c(5) << 4 | (c(7) >> 4) << 2 | c(6) >> 4,
            ];
            for (word, half) in words.scales.iter_mut().zip(halves) {
                *word |= half << (16 * h);
            }
        }
        words
    }

    #[inline(always)]
    fn decode(words: &FieldWords<3, 3>) -> [u8; 110] {
        let mut block = [0; 110];
        for (t, quants) in words.quants.iter().enumerate() {
            for (g, value) in split_three(*quants).into_iter().enumerate() {
                let [(low, by), (high, high_by)] = Self::places(t, g);
                let value = in_word_order(value);
                add_bits(&mut block, low, (value & each(3)) << by);
                add_bits(&mut block, high, (value >> 2 & each(1)) << high_by);
            }
        }
        for h in 0..2 {
            let [a, b, c] = words.scales.map(|word| word >> (16 * h) & 0xffff);
            for (tile, c) in [
                a >> 10,
                b >> 10,
                c >> 10,
                a >> 4 & 63,
                b >> 4 & 63,
                c >> 4 & 63,
                a & 15 | (c & 3) << 4,
                b & 15 | (c >> 2 & 3) << 4,
            ]
            .into_iter()
            .enumerate()
            {
                let [(low, by), (high, high_by)] = Self::scale_places(tile, h);
                // CAST: six bits.
                let s = signed_six(c).to_le_bytes()[0];
                block[low] |= (s & 15) << by;
                block[high] |= (s >> 4) << high_by;
            }
        }
        block[108..].copy_from_slice(&words.d);
        block
    }
}

/// Returns a word of four bytes with the nibbles of the lower two exchanged.
const fn exchange_low_nibbles(word: u32) -> u32 {
    word & 0xffff_0000 | (word & 0x0f0f) << 4 | word >> 4 & 0x0f0f
}

/// Q2_K: 16 bytes of scales and minima, 64 bytes of pairs of bits, d, dmin.
///
/// Source: `dequantize_row_q2_K`, ggml-quants.c.
pub(in crate::layout) struct Q2K;

impl Q2K {
    /// Shifts of values 0 to 7 in the words of a tile: the first word has values 0, 1, 4 and 5.
    const SHIFTS: [(usize, u32); 8] = [
        (0, 0),
        (0, 2),
        (1, 0),
        (1, 2),
        (0, 4),
        (0, 6),
        (1, 4),
        (1, 6),
    ];

    /// Returns the byte of word `g` of a tile, and the shift to its bits.
    const fn place(tile: usize, g: usize) -> (usize, usize) {
        (16 + 32 * (tile / 4) + 4 * g, 2 * (tile % 4))
    }
}

impl Code<84, 2, 5> for Q2K {
    #[inline(always)]
    fn encode(block: &[u8; 84]) -> FieldWords<2, 5> {
        let mut words = FieldWords::<2, 5>::ZERO;
        for (t, quants) in words.quants.iter_mut().enumerate() {
            for (g, (word, to)) in Self::SHIFTS.into_iter().enumerate() {
                let (at, by) = Self::place(t, g);
                quants[word] |= in_word_order(word_at(block, at) >> by & each(3)) << to;
            }
        }
        let [header, pairs @ ..] = &mut words.scales;
        *header = word_at(block, 80) ^ UPPER_SIGN;
        for (p, word) in pairs.iter_mut().enumerate() {
            *word = exchange_low_nibbles(in_word_order(word_at(block, 4 * p)));
        }
        words
    }

    #[inline(always)]
    fn decode(words: &FieldWords<2, 5>) -> [u8; 84] {
        let mut block = [0; 84];
        for (t, quants) in words.quants.iter().enumerate() {
            for (g, (word, to)) in Self::SHIFTS.into_iter().enumerate() {
                let (at, by) = Self::place(t, g);
                add_bits(
                    &mut block,
                    at,
                    in_word_order(quants[word] >> to & each(3)) << by,
                );
            }
        }
        let [header, pairs @ ..] = &words.scales;
        add_bits(&mut block, 80, header ^ UPPER_SIGN);
        for (p, word) in pairs.iter().enumerate() {
            add_bits(
                &mut block,
                4 * p,
                in_word_order(exchange_low_nibbles(*word)),
            );
        }
        block
    }
}
