//! The element types of a GGUF file, and the kinds of its metadata values.

use std::fmt;

use crate::tensor::{DType, Format};

/// A type of tensor elements, by ggml's number.
///
/// ```
/// use ggml_rust_npu::gguf::GgmlType;
///
/// let q4_0 = GgmlType::from_number(2).expect("ggml has this type");
/// assert_eq!(q4_0.name(), "Q4_0");
/// assert_eq!(q4_0.row_bytes(64), Some(2 * 18));
/// assert_eq!(q4_0.row_bytes(65), None, "no whole number of blocks");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GgmlType(u32);

/// Number, name, elements in a block, bytes of a block.
// SOURCE: enum ggml_type in ggml.h and the block structures of ggml-common.h, llama.cpp 0.5.0 (ggml
// 0.25.3).
const TYPES: [(u32, &str, usize, usize); 35] = [
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 36),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
    (42, "Q2_0", 64, 18),
];

impl GgmlType {
    /// IEEE single precision.
    pub const F32: Self = Self(0);
    /// IEEE half precision.
    pub const F16: Self = Self(1);
    /// Blocks of 32: FP16 scale, signed 4-bit values.
    pub const Q4_0: Self = Self(2);
    /// Blocks of 32: FP16 scale and minimum, unsigned 4-bit values.
    pub const Q4_1: Self = Self(3);
    /// Blocks of 32: FP16 scale, signed 5-bit values.
    pub const Q5_0: Self = Self(6);
    /// Blocks of 32: FP16 scale and minimum, unsigned 5-bit values.
    pub const Q5_1: Self = Self(7);
    /// Blocks of 32: FP16 scale, signed 8-bit values.
    pub const Q8_0: Self = Self(8);
    /// Super-blocks of 256: two FP16 factors, 4-bit scales and minima, 2-bit values.
    pub const Q2_K: Self = Self(10);
    /// Super-blocks of 256: an FP16 factor, signed 6-bit scales, signed 3-bit values.
    pub const Q3_K: Self = Self(11);
    /// Super-blocks of 256: two FP16 factors, 6-bit scales and minima, 4-bit values.
    pub const Q4_K: Self = Self(12);
    /// As [`Self::Q4_K`], with 5-bit values.
    pub const Q5_K: Self = Self(13);
    /// Super-blocks of 256: an FP16 factor, signed 8-bit scales, signed 6-bit values.
    pub const Q6_K: Self = Self(14);
    /// Blocks of 32: FP16 scale, 4-bit indices of a fixed table.
    pub const IQ4_NL: Self = Self(20);
    /// Super-blocks of 256: an FP16 factor, 6-bit scales, 4-bit indices of a fixed table.
    pub const IQ4_XS: Self = Self(23);
    /// 32-bit integers.
    pub const I32: Self = Self(26);
    /// The upper half of IEEE single precision.
    pub const BF16: Self = Self(30);
    /// Blocks of 32: E8M0 scale, 4-bit floating point.
    pub const MXFP4: Self = Self(39);

    /// Returns the type of a number; `None` if it is not known.
    #[must_use]
    pub fn from_number(number: u32) -> Option<Self> {
        let known = TYPES.iter().any(|(known, ..)| *known == number);
        known.then_some(Self(number))
    }

    /// Returns ggml's number.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0
    }

    fn entry(self) -> &'static (u32, &'static str, usize, usize) {
        let found = TYPES.iter().find(|(number, ..)| *number == self.0);
        found.unwrap_or_else(|| unreachable!("only numbers of the table become a type"))
    }

    /// Returns ggml's name, such as `Q4_0`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.entry().1
    }

    /// Returns the type for devices, and the format if they have a layout for it.
    #[must_use]
    pub fn tensor_type(self) -> (DType, Option<Format>) {
        let quantized = DType::Quantized {
            block_elems: self.block_elems(),
            block_bytes: self.block_bytes(),
        };
        match self {
            Self::F32 => (DType::F32, None),
            Self::F16 => (DType::F16, None),
            Self::BF16 => (DType::Bf16, None),
            Self::I32 => (DType::I32, None),
            Self::Q4_0 => (quantized, Some(Format::Q4_0)),
            Self::Q4_1 => (quantized, Some(Format::Q4_1)),
            Self::Q8_0 => (quantized, Some(Format::Q8_0)),
            Self::IQ4_NL => (quantized, Some(Format::Iq4Nl)),
            Self::MXFP4 => (quantized, Some(Format::Mxfp4)),
            Self::Q4_K => (quantized, Some(Format::Q4K)),
            Self::Q5_0 => (quantized, Some(Format::Q5_0)),
            Self::Q6_K => (quantized, Some(Format::Q6K)),
            Self::Q5_1 => (quantized, Some(Format::Q5_1)),
            Self::Q5_K => (quantized, Some(Format::Q5K)),
            Self::IQ4_XS => (quantized, Some(Format::Iq4Xs)),
            Self::Q3_K => (quantized, Some(Format::Q3K)),
            Self::Q2_K => (quantized, Some(Format::Q2K)),
            other if other.is_quantized() => (quantized, None),
            _ => (DType::Other, None),
        }
    }

    /// Returns the elements in a block.
    #[must_use]
    pub fn block_elems(self) -> usize {
        self.entry().2
    }

    /// Returns the bytes of a block.
    #[must_use]
    pub fn block_bytes(self) -> usize {
        self.entry().3
    }

    /// Returns `true` if blocks hold more than one element.
    #[must_use]
    pub fn is_quantized(self) -> bool {
        self.block_elems() > 1
    }

    /// Returns the bytes of `k` elements; `None` if they are not whole blocks, or too many.
    #[must_use]
    pub fn row_bytes(self, k: usize) -> Option<usize> {
        let (elems, bytes) = (self.block_elems(), self.block_bytes());
        (k.is_multiple_of(elems)).then(|| (k / elems).checked_mul(bytes))?
    }
}

/// A metadata value. Arrays stay in the file, and only their place is kept.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Any of the unsigned integers.
    Unsigned(u64),
    /// Any of the signed integers.
    Signed(i64),
    /// Either of the floating-point types.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// Text.
    String(String),
    /// Values of one kind.
    Array {
        /// GGUF's number of the elements' kind.
        kind: u32,
        /// Elements.
        len: u64,
    },
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Unsigned(number) => write!(f, "{number}"),
            Self::Signed(number) => write!(f, "{number}"),
            Self::Float(number) => write!(f, "{number}"),
            Self::Bool(truth) => write!(f, "{truth}"),
            Self::String(text) => write!(f, "\"{}\"", text.escape_debug()),
            Self::Array { len, .. } => write!(f, "an array of {len}"),
        }
    }
}

impl Value {
    /// Returns the value as a size, if it is a whole number that is not negative.
    #[must_use]
    pub fn as_usize(&self) -> Option<usize> {
        match self {
            Self::Unsigned(value) => usize::try_from(*value).ok(),
            Self::Signed(value) => usize::try_from(*value).ok(),
            _ => None,
        }
    }

    /// Returns the value as text.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }
}
