//! f16 <-> f32 without branches or tables, so that loops over lanes vectorize without any target
//! feature. The crate `half` branches; tests compare these functions with it for all bit patterns.

/// Returns the f32 of f16 bits; exact.
#[inline(always)]
pub(super) fn to_f32(h: u16) -> f32 {
    word_to_f32(u32::from(h))
}

/// Returns the f32 of the f16 bits in the low half of a word; the upper half must be zero.
#[inline(always)]
pub(super) fn word_to_f32(h: u32) -> f32 {
    let magnitude = h & 0x7fff;
    // Moving the f16 exponent and fraction into f32's fields gives a number that is 2^112 too
    // small. The multiplication corrects that and normalizes subnormals.
    let finite = (f32::from_bits(magnitude << 13) * f32::from_bits(0x7780_0000)).to_bits();
    let bits = if magnitude >= 0x7c00 {
        (magnitude << 13) | 0x7f80_0000
    } else {
        finite
    };
    f32::from_bits(bits | (h & 0x8000) << 16)
}

/// Returns the f16 bits nearest to `x`, ties to even; overflow becomes infinity, NaN a quiet NaN.
#[inline(always)]
pub(super) fn from_f32(x: f32) -> u16 {
    let bits = x.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let sign = (bits >> 16) & 0x8000;
    // Normal results: round off the lowest 13 bits, then adjust the exponent's bias. Smaller
    // magnitudes wrap here, and the next step replaces them.
    let half_less = 0xfff + ((magnitude >> 13) & 1);
    let normal = magnitude.wrapping_sub(0x3800_0000).wrapping_add(half_less) >> 13;
    // Subnormal results: adding 0.5 puts the last bit of f16 at the last bit of the sum, so the
    // addition rounds correctly.
    let subnormal = (f32::from_bits(magnitude) + 0.5)
        .to_bits()
        .wrapping_sub(0x3f00_0000);
    let finite = if magnitude < 0x3880_0000 {
        subnormal
    } else {
        normal
    };
    let special = if magnitude > 0x7f80_0000 {
        0x7e00
    } else {
        0x7c00
    };
    let result = if magnitude >= 0x4780_0000 {
        special
    } else {
        finite
    };
    low_half(sign | result)
}

/// Returns the low 16 bits of a word.
#[inline(always)]
fn low_half(word: u32) -> u16 {
    let [a, b, ..] = word.to_le_bytes();
    u16::from_le_bytes([a, b])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversions_agree_with_half() {
        for bits in 0..=u16::MAX {
            let (have, want) = (to_f32(bits), half::f16::from_bits(bits).to_f32());
            assert!(
                have.to_bits() == want.to_bits() || (have.is_nan() && want.is_nan()),
                "{bits:#06x}"
            );
            // The value itself, the middle between it and the next value, and one step below and
            // above that middle.
            for offset in [0, 0x0fff, 0x1000, 0x1001] {
                let x = f32::from_bits(want.to_bits().wrapping_add(offset));
                let (have, want) = (from_f32(x), half::f16::from_f32(x));
                let is_nan = have & 0x7fff > 0x7c00;
                assert!(have == want.to_bits() || (is_nan && want.is_nan()), "{x:e}");
            }
        }
        for x in [
            f32::MAX,
            65504.0,
            65519.9,
            65520.0,
            2e-8,
            2.9e-8,
            3.1e-8,
            f32::MIN_POSITIVE,
            1e-45,
            // Just below 2^-15, where the bits of normal results wrap.
            f32::from_bits(0x37ff_f001),
            f32::from_bits(0x37ff_ffff),
        ] {
            assert_eq!(from_f32(x), half::f16::from_f32(x).to_bits(), "{x:e}");
        }
    }
}
