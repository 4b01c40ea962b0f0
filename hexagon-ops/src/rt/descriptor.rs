//! Descriptors of the DMA engine: the words that describe a copy.
//!
//! A linear copy has four words, rows have eight, which start at a multiple of 32 bytes. V75 and
//! later have wider fields for rows:
//!
//! ```text
//! word 0   address of the next descriptor, 0: none
//! word 1   25..24 size, 0: four words, 1: eight · 26, 27 compression · 28 destination, 29 source bypass the cache
//!          30 ordered · 31 done, set by the engine
//!          23..0 linear: bytes · narrow rows: 0 · wide rows: stride of the destination
//! word 2   source     word 3   destination
//!
//!          narrow rows                                     wide rows, V75 and later
//! word 4   7..0 kind: 0                                    7..0 kind: 9
//! word 5   15..0 bytes of a row · 31..16 rows              23..0 bytes of a row · 31..24 rows, low bits
//! word 6   15..0 stride of the source · 31..16 of the      7..0 rows, high bits · 31..8 stride of the source
//!          destination
//! word 7   0: offsets within rows                          0
//! ```
//!
//! Some versions of the engine treat a stride of 0 as the largest one, others as 1. So rows whose
//! strides do not fit have no descriptor.
//!
//! SOURCE: linear: Qualcomm Hexagon User DMA Specification 80-V9418-29 as quoted by three public
//! users of the engine; rows: llama.cpp ggml-hexagon htp/dma-queue.h `dma_descriptor_2d` at ggml
//! 0.26.0 for both forms, hexagon-mlir UserDMADescriptors.h for the wide one, QEMU
//! target/hexagon/dma.c for both. Not run on a device.

use super::CopyShape;

/// Words of a descriptor of rows, and of a linear copy.
#[cfg(any(target_arch = "hexagon", test))]
pub(super) const WORDS: usize = 8;
#[cfg(any(target_arch = "hexagon", test))]
pub(super) const LINEAR_WORDS: usize = 4;

/// Control bits for access without the cache, on both sides. Memory was written by the other
/// processor or cleaned, and VTCM is not cached.
#[cfg(any(target_arch = "hexagon", test))]
const BYPASS: u32 = 1 << 28 | 1 << 29;
/// Control bit of eight words.
#[cfg(any(target_arch = "hexagon", test))]
const EIGHT_WORDS: u32 = 1 << 24;
/// Kind of wide rows.
#[cfg(any(target_arch = "hexagon", test))]
const WIDE_KIND: u32 = 9;
/// Largest numbers of fields of 16 and of 24 bits.
const MAX_16: usize = (1 << 16) - 1;
const MAX_24: usize = (1 << 24) - 1;

/// Fields of the rows of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowFields {
    /// 16 bits.
    Narrow,
    /// 24 bits.
    Wide,
}

impl RowFields {
    /// The fields of the architecture that this is compiled for.
    pub(super) const NATIVE: Self = if cfg!(target_feature = "hvxv75") {
        Self::Wide
    } else {
        Self::Narrow
    };

    /// Returns `true` if one descriptor can describe the copy, which is not empty.
    pub(super) fn fit(self, shape: &CopyShape) -> bool {
        let CopyShape {
            rows,
            row_bytes,
            from_stride,
            to_stride,
        } = *shape;
        let most = match self {
            Self::Narrow => MAX_16,
            Self::Wide => MAX_24,
        };
        let in_range = [row_bytes, from_stride, to_stride]
            .iter()
            .all(|bytes| (1..=most).contains(bytes));
        is_linear(shape) || (2..=MAX_16).contains(&rows) && in_range
    }

    /// Returns the words for rows between two addresses; `None` unless they [fit](Self::fit).
    #[cfg(any(target_arch = "hexagon", test))]
    pub(super) fn words(self, shape: &CopyShape, [from, to]: [u32; 2]) -> Option<[u32; WORDS]> {
        if !self.fit(shape) || shape.rows == 1 {
            return None;
        }
        let number = |bytes: usize| u32::try_from(bytes).ok();
        let (row, rows) = (number(shape.row_bytes)?, number(shape.rows)?);
        let [from_stride, to_stride] = [number(shape.from_stride)?, number(shape.to_stride)?];
        let control = EIGHT_WORDS | BYPASS;
        Some(match self {
            Self::Narrow => {
                let strides = from_stride | to_stride << 16;
                [0, control, from, to, 0, row | rows << 16, strides, 0]
            }
            Self::Wide => {
                let (low, high) = (row | rows << 24, rows >> 8 | from_stride << 8);
                [0, control | to_stride, from, to, WIDE_KIND, low, high, 0]
            }
        })
    }
}

/// Returns the words for one row between two addresses; `None` unless a linear descriptor describes
/// it.
#[cfg(any(target_arch = "hexagon", test))]
#[inline(always)]
pub(super) fn linear_words(shape: &CopyShape, [from, to]: [u32; 2]) -> Option<[u32; LINEAR_WORDS]> {
    let bytes = u32::try_from(shape.row_bytes).ok()?;
    is_linear(shape).then_some([0, bytes | BYPASS, from, to])
}

/// Returns `true` if the copy is one row that a linear descriptor describes.
#[inline(always)]
fn is_linear(shape: &CopyShape) -> bool {
    shape.rows == 1 && (1..=MAX_24).contains(&shape.row_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a shape.
    fn shape(rows: usize, row_bytes: usize, from_stride: usize, to_stride: usize) -> CopyShape {
        CopyShape {
            rows,
            row_bytes,
            from_stride,
            to_stride,
        }
    }

    #[test]
    fn words_are_those_of_the_source() {
        let at = [0x8123_4567, 0xff00_0080];
        // SOURCE: the bit fields of `dma_descriptor_1d` and of the two `dma_descriptor_2d` in
        // ggml-hexagon's htp/dma-queue.h, filled in by hand.
        assert_eq!(
            linear_words(&shape(1, 0x12_3456, 0x12_3456, 0x12_3456), at),
            Some([0, 0x3012_3456, 0x8123_4567, 0xff00_0080])
        );
        // 0x301 rows of 0x44 bytes. Their strides are 0x1100 bytes in the source and 0x80 in the
        // destination.
        let rows = shape(0x301, 0x44, 0x1100, 0x80);
        assert_eq!(
            RowFields::Narrow.words(&rows, at),
            Some([
                0,
                0x3100_0000,
                0x8123_4567,
                0xff00_0080,
                0,
                0x0301_0044,
                0x0080_1100,
                0
            ])
        );
        assert_eq!(
            RowFields::Wide.words(&rows, at),
            Some([
                0,
                0x3100_0080,
                0x8123_4567,
                0xff00_0080,
                9,
                0x0100_0044,
                0x0011_0003,
                0
            ])
        );
        // A stride that needs more than 16 bits.
        assert_eq!(
            RowFields::Wide.words(&shape(2, 0x100, 0x1_0040, 0x100), at),
            Some([
                0,
                0x3100_0100,
                0x8123_4567,
                0xff00_0080,
                9,
                0x0200_0100,
                0x0100_4000,
                0
            ])
        );
    }

    #[test]
    fn what_does_not_fit_in_the_fields_has_no_descriptor() {
        use RowFields::{Narrow, Wide};
        for (form, given, want) in [
            (Narrow, shape(1, 0, 0, 0), false),
            (Narrow, shape(1, MAX_24, MAX_24, MAX_24), true),
            (Wide, shape(1, MAX_24 + 1, MAX_24 + 1, MAX_24 + 1), false),
            (Narrow, shape(2, 0, 128, 128), false),
            (Narrow, shape(2, 64, 0, 64), false),
            (Narrow, shape(MAX_16, 64, MAX_16, 64), true),
            (Narrow, shape(MAX_16 + 1, 64, 128, 64), false),
            (Wide, shape(MAX_16 + 1, 64, 128, 64), false),
            (Narrow, shape(2, 64, MAX_16 + 1, 64), false),
            (Narrow, shape(2, 64, 64, MAX_16 + 1), false),
            (Narrow, shape(2, MAX_16 + 1, MAX_16 + 1, 64), false),
            (Wide, shape(2, MAX_24, MAX_24, MAX_24), true),
            (Wide, shape(2, 64, MAX_24 + 1, 64), false),
        ] {
            assert_eq!(form.fit(&given), want, "{form:?} {given:?}");
            let words = form.words(&given, [1, 2]).is_some();
            assert_eq!(words, want && given.rows > 1, "{form:?} {given:?}");
            let linear = linear_words(&given, [1, 2]).is_some();
            assert_eq!(linear, want && given.rows == 1, "{form:?} {given:?}");
        }
    }
}
