//! Blocks of 32 quants of 5 bits: ggml's 20 bytes as the five words of a column, and back.
//!
//! ggml stores the upper bits in one word, then 16 bytes of nibbles. Here five words hold eight
//! values of four quants each: five values are in the lower bits of the bytes, and the other three
//! share the remaining bits of all bytes. The picture of [`super`] shows the places.

use super::panel::in_word_order;

/// A bit pattern in each byte of a word.
const fn each(byte: u32) -> u32 {
    byte * 0x0101_0101
}

/// Returns four bytes as a word.
#[inline(always)]
pub(super) fn word_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

/// Returns the five words that hold eight values.
#[inline(always)]
pub(super) fn join(v: [u32; 8]) -> [u32; 5] {
    [
        v[0] | (v[5] & each(0x1c)) << 3,
        v[1] | (v[6] & each(0x1c)) << 3,
        v[2] | (v[7] & each(0x1c)) << 3,
        v[3] | (v[5] & each(3)) << 5 | (v[7] & each(2)) << 6,
        v[4] | (v[6] & each(3)) << 6 | (v[7] & each(1)) << 5,
    ]
}

/// Returns the eight values of five words.
#[inline(always)]
pub(super) fn split(w: [u32; 5]) -> [u32; 8] {
    let [a, b, c, d, e] = w.map(|word| word & each(0x1f));
    let upper = [w[0], w[1], w[2]].map(|word| word >> 3 & each(0x1c));
    [
        a,
        b,
        c,
        d,
        e,
        upper[0] | w[3] >> 5 & each(3),
        upper[1] | w[4] >> 6 & each(3),
        upper[2] | w[3] >> 6 & each(2) | w[4] >> 5 & each(1),
    ]
}

/// Returns the words of a block: `bytes` are ggml's upper bits and nibbles.
#[inline(always)]
pub(super) fn encode(bytes: &[u8]) -> [u32; 5] {
    let upper = word_at(bytes, 0);
    let mut values = [0; 8];
    for (g, value) in values.iter_mut().enumerate() {
        let nibbles = word_at(bytes, 4 + 4 * (g % 4)) >> (4 * (g / 4)) & each(0x0f);
        // The multiplication spreads four bits: each becomes the lowest bit of a byte.
        let fifth = ((upper >> (4 * g) & 15) * 0x0020_4081) & each(1);
        *value = in_word_order(nibbles | fifth << 4);
    }
    join(values)
}

/// Writes the bytes that [`encode`] was given.
#[inline(always)]
pub(super) fn decode(words: [u32; 5], bytes: &mut [u8]) {
    let (mut upper, mut nibbles) = (0_u32, [0_u32; 4]);
    for (g, value) in split(words).into_iter().enumerate() {
        let value = in_word_order(value);
        nibbles[g % 4] |= (value & each(0x0f)) << (4 * (g / 4));
        let fifth = (value >> 4 & each(1)).wrapping_mul(0x0102_0408) >> 24 & 15;
        upper |= fifth << (4 * g);
    }
    bytes[..4].copy_from_slice(&upper.to_le_bytes());
    for (bytes, word) in bytes[4..].chunks_exact_mut(4).zip(nibbles) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
}
