//! Types with super-blocks of 256.

use super::{IQ4_LEVELS, half_at};

/// Elements that share a scale in Q2_K, Q3_K and Q6_K.
const GROUP: usize = 16;

/// `d · scale · q - dmin · min` with four bits of each; q has two bits.
pub(super) fn q2(block: &[u8; 84], out: &mut [f32; 256]) {
    let (d, min) = (half_at(block, 80), half_at(block, 82));
    for (group, out) in out.chunks_exact_mut(GROUP).enumerate() {
        let scale = block[group];
        let (dl, ml) = (d * f32::from(scale & 15), min * f32::from(scale >> 4));
        let (quants, shift) = two_bits(&block[16..80], group);
        for (out, byte) in out.iter_mut().zip(quants) {
            *out = dl * f32::from(byte >> shift & 3) - ml;
        }
    }
}

/// Returns the bytes that hold two bits of each element of a group, and where in them: each half of
/// the super-block has 32 bytes, whose four pairs of bits are 32 elements each.
fn two_bits(quants: &[u8], group: usize) -> (&[u8], usize) {
    let (half, within) = (group / 8, group % 8);
    (
        &quants[32 * half + GROUP * (within % 2)..][..GROUP],
        2 * (within / 2),
    )
}

/// Dequantizes `d · (scale - 32) · (q - 4)` with six bits of scale; the third bit of q is in a
/// separate mask.
pub(super) fn q3(block: &[u8; 110], out: &mut [f32; 256]) {
    let d = half_at(block, 108);
    let (mask, scales) = (&block[..32], &block[96..108]);
    for (group, out) in out.chunks_exact_mut(GROUP).enumerate() {
        let low = scales[group % 8] >> (4 * (group / 8)) & 15;
        let high = scales[8 + group % 4] >> (2 * (group / 4)) & 3;
        let dl = d * (f32::from(low | high << 4) - 32.0);
        let (quants, shift) = two_bits(&block[32..96], group);
        let mask = &mask[GROUP * (group % 2)..][..GROUP];
        for ((out, byte), mask) in out.iter_mut().zip(quants).zip(mask) {
            let third = mask >> (group / 2) & 1;
            *out = dl * (f32::from((byte >> shift & 3) | third << 2) - 4.0);
        }
    }
}

/// Returns the scale and minimum of group `j` of 32 in Q4_K and Q5_K: six bits each, in 12 bytes.
fn scale_and_min(scales: &[u8], j: usize) -> (f32, f32) {
    let (scale, min) = if j < 4 {
        (scales[j] & 63, scales[j + 4] & 63)
    } else {
        let (low, upper) = (scales[j + 4], 4);
        (
            (low & 15) | scales[j - 4] >> 6 << upper,
            (low >> 4) | scales[j] >> 6 << upper,
        )
    };
    (scale.into(), min.into())
}

/// `d · scale · q - dmin · min`; q has four bits.
pub(super) fn q4(block: &[u8; 144], out: &mut [f32; 256]) {
    four_bits(block, &block[16..], out, |_, _, q| q);
}

/// As [`q4`], with a fifth bit.
pub(super) fn q5(block: &[u8; 176], out: &mut [f32; 256]) {
    let bits = &block[16..48];
    let fifth = |group: usize, l: usize, q| q | (bits[l] >> group & 1) << 4;
    four_bits(block, &block[48..], out, fifth);
}

/// Groups of 32; two groups share 32 bytes of nibbles. `level(group, index, nibble)` is q.
fn four_bits(
    block: &[u8],
    quants: &[u8],
    out: &mut [f32; 256],
    level: impl Fn(usize, usize, u8) -> u8,
) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_and_min(&block[4..16], group);
        let (dl, ml) = (d * scale, dmin * min);
        let bytes = &quants[32 * (group / 2)..][..32];
        for (l, (out, byte)) in out.iter_mut().zip(bytes).enumerate() {
            let q = level(group, l, byte >> (4 * (group % 2)) & 15);
            *out = dl * f32::from(q) - ml;
        }
    }
}

/// `d · scale · (q - 32)` with eight bits of scale; q has four bits in one place and two in
/// another.
pub(super) fn q6(block: &[u8; 210], out: &mut [f32; 256]) {
    let d = half_at(block, 208);
    for (quarter, out) in out.chunks_exact_mut(32).enumerate() {
        // Each half of the super-block has 64 bytes of nibbles and 32 bytes of upper bits, for four
        // groups of 32 elements.
        let (half, part) = (quarter / 4, quarter % 4);
        let low = &block[64 * half + 32 * (part % 2)..][..32];
        let high = &block[128 + 32 * half..][..32];
        for (l, out) in out.iter_mut().enumerate() {
            let nibble = low[l] >> (4 * (part / 2)) & 15;
            let q = nibble | (high[l] >> (2 * part) & 3) << 4;
            let scale = block[192 + 2 * quarter + l / GROUP].cast_signed();
            *out = d * f32::from(scale) * (f32::from(q) - 32.0);
        }
    }
}

/// `d · (scale - 32) · table[q]` with six bits of scale.
pub(super) fn iq4_xs(block: &[u8; 136], out: &mut [f32; 256]) {
    let d = half_at(block, 0);
    let high = u16::from_le_bytes([block[2], block[3]]);
    let groups = out.chunks_exact_mut(32).zip(block[8..].chunks_exact(16));
    for (group, (out, quants)) in groups.enumerate() {
        let low = block[4 + group / 2] >> (4 * (group % 2)) & 15;
        let scale = u16::from(low) | (high >> (2 * group) & 3) << 4;
        let dl = d * (f32::from(scale) - 32.0);
        let value = |_, q: u8| dl * f32::from(IQ4_LEVELS[usize::from(q)]);
        super::nibbles(quants, out, value);
    }
}
