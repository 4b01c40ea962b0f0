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

/// Numbers of the arithmetics.
const PRECISIONS: [(Precision, u32); 6] = [
    (Precision::Int8, 1),
    (Precision::Fp16, 2),
    (Precision::Int4, 3),
    (Precision::Int4Int8, 4),
    (Precision::Int4Fp16, 5),
    (Precision::Int8Plain, 6),
];

/// Word of [`LayoutTag::hexagon`] that is set if the weights are quantized again.
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
                    _ => "quantized again",
                };
                write!(f, "Hexagon {weight:?} tiles v{version}, {again}")
            }
            (None, Some((precision, _))) if self.id >> 16 == RK_FAMILY => write!(
                f,
                "Rockchip {precision:?} v{version}, {} x {} blocks of {} x {}",
                words[5], words[3], words[6], words[4]
            ),
            _ => write!(f, "unknown layout {:#010x}", self.id),
        }
    }
}
