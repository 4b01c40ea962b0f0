//! Identifiers of packed layouts, to compare the layout that a device wants with the one that a
//! pack has.

use std::fmt;

use hexagon_ops::layout::{LayoutId, WeightType};

use super::{LAYOUT_WORDS, LayoutTag};
use crate::rockchip::caps::Precision;

/// Upper half of the ids of Rockchip layouts: "RK". Below it are the arithmetic's number and
/// [`RK_VERSION`].
const RK_FAMILY: u32 = 0x524b;

/// Version of Rockchip's packed weights: raised when any byte moves or gets another value, that is
/// when the native layouts, the rotation, or the rounding change.
const RK_VERSION: u32 = 1;

/// Numbers of the arithmetics. Arithmetics that differ only in their activations share a number,
/// which means the first of them.
const PRECISIONS: [(Precision, u32); 7] = [
    (Precision::Int8, 1),
    (Precision::Fp16, 2),
    (Precision::Int4, 3),
    (Precision::Int4Int8, 4),
    (Precision::Int4Fp16, 5),
    (Precision::Int8Unrotated, 6),
    (Precision::Int8Wide, 1),
];

/// Word of [`LayoutTag::hexagon`] that is set if the weights are quantized again, or converted to
/// F16.
const REQUANTIZED_WORD: usize = 4;

impl LayoutTag {
    /// Describes tiles for Hexagon.
    ///
    /// - `shape`: K, N, and the matrices in dimensions 2 and 3
    /// - `requantized`: the packed bytes are not those of the source in another order
    #[must_use]
    pub fn hexagon(weight: WeightType, shape: [usize; 4], requantized: bool) -> Self {
        let LayoutId(id) = weight.layout_id();
        let mut words = [0; LAYOUT_WORDS];
        words[..4].copy_from_slice(&shape.map(|size| size as u64));
        words[REQUANTIZED_WORD] = requantized.into();
        Self { id, words }
    }

    /// Returns `true` if these are groups of 2 × 16 weights.
    #[must_use]
    pub fn is_groups(&self) -> bool {
        let groups = [WeightType::Q4Tile, WeightType::Q8Tile].map(WeightType::layout_id);
        groups.contains(&LayoutId(self.id))
    }

    /// Describes native rows for Rockchip.
    ///
    /// - `words`: K, N, slices, segments, K of a segment, chunks, N of a chunk, chunks of a core, N
    ///   and K of a native tile
    #[must_use]
    pub fn rockchip(precision: Precision, words: [usize; LAYOUT_WORDS]) -> Self {
        let found = PRECISIONS.iter().find(|(known, _)| *known == precision);
        let (_, number) = found.unwrap_or_else(|| unreachable!("the table has all of them"));
        Self {
            id: RK_FAMILY << 16 | number << 8 | RK_VERSION,
            words: words.map(|size| size as u64),
        }
    }
}

impl fmt::Display for LayoutTag {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (number, version) = (self.id >> 8 & 0xff, self.id & 0xff);
        let words = &self.words;
        let precision = PRECISIONS.iter().find(|(_, known)| *known == number);
        let weight = WeightType::ALL
            .into_iter()
            .find(|weight| weight.layout_id() == LayoutId(self.id));
        match (weight, precision) {
            (Some(weight), _) => {
                let again = match (weight, words[REQUANTIZED_WORD]) {
                    (weight, _) if weight.is_grouped() => "groups of 2 x 16",
                    (_, 0) => "lossless",
                    (WeightType::F16, _) => "converted",
                    _ => "quantized again",
                };
                write!(f, "Hexagon {weight} tiles v{version}, {again}")
            }
            (None, Some((precision, _))) if self.id >> 16 == RK_FAMILY => write!(
                f,
                "Rockchip {precision} v{version}, {} x {} blocks of {} x {}",
                words[5], words[3], words[6], words[4]
            ),
            _ => write!(f, "unknown layout {:#010x}", self.id),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Packs that were written before must be found again.
    #[test]
    fn identifiers_are_fixed() {
        let words = [64, 96, 1, 3, 32, 2, 48, 1, 16, 32];
        for (precision, id) in [
            (Precision::Int8, 0x524b_0101),
            (Precision::Fp16, 0x524b_0201),
            (Precision::Int4, 0x524b_0301),
            (Precision::Int4Int8, 0x524b_0401),
            (Precision::Int4Fp16, 0x524b_0501),
            (Precision::Int8Unrotated, 0x524b_0601),
        ] {
            let tag = LayoutTag::rockchip(precision, words);
            assert_eq!((tag.id, tag.words), (id, words.map(|size| size as u64)));
            let text = format!("Rockchip {precision} v1, 2 x 3 blocks of 48 x 32");
            assert_eq!(tag.to_string(), text);
            assert!(!tag.is_groups());
        }
        // Of no family.
        for id in [0x524c_0101, 0x524b_0701] {
            let tag = LayoutTag {
                id,
                ..LayoutTag::rockchip(Precision::Int8, words)
            };
            assert_eq!(tag.to_string(), format!("unknown layout {id:#010x}"));
        }
    }

    #[test]
    fn tiles_say_if_they_are_the_source_in_another_order() {
        let text = |weight, again| LayoutTag::hexagon(weight, [64, 32, 1, 1], again).to_string();
        for weight in WeightType::ALL {
            let LayoutId(id) = weight.layout_id();
            let (name, version) = (format!("Hexagon {weight} tiles"), id & 0xff);
            let is_groups = [WeightType::Q4Tile, WeightType::Q8Tile].contains(&weight);
            for (again, end) in [(false, "lossless"), (true, "quantized again")] {
                let end = match (weight, again) {
                    _ if is_groups => "groups of 2 x 16",
                    (WeightType::F16, true) => "converted",
                    _ => end,
                };
                assert_eq!(text(weight, again), format!("{name} v{version}, {end}"));
                let tag = LayoutTag::hexagon(weight, [64, 32, 1, 1], again);
                assert_eq!((tag.id, tag.is_groups()), (id, is_groups));
                assert_eq!(tag.words[..5], [64, 32, 1, 1, again.into()]);
            }
        }
    }
}
