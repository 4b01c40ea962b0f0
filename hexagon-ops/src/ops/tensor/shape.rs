//! Types, dimensions and strides.

use crate::layout::SUPER_BLOCK;

/// Type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of an f32.
    Bf16,
    /// Signed 8-bit numbers.
    I8,
    /// Signed 16-bit numbers.
    I16,
    /// Signed 32-bit numbers.
    I32,
    /// Signed 64-bit numbers.
    I64,
    /// Blocks of 32 signed bytes with an f16 scale.
    Q8_0,
    /// Blocks of 32 nibbles with an f16 scale.
    Q4_0,
    /// Blocks of 32 nibbles with an f16 scale and minimum.
    Q4_1,
    /// Blocks of 32 five-bit numbers with an f16 scale.
    Q5_0,
    /// Blocks of 32 five-bit numbers with an f16 scale and minimum.
    Q5_1,
    /// Blocks of 32 nibbles that index 16 values, with an f16 scale.
    Iq4Nl,
    /// Blocks of 32 nibbles that index 16 values, with a power of two.
    Mxfp4,
    /// Super-blocks of two-bit numbers, with scales and minima of two levels for each 16.
    Q2K,
    /// Super-blocks of three-bit numbers, with scales of two levels for each 16.
    Q3K,
    /// Super-blocks of nibbles, with scales and minima of two levels for each 32.
    Q4K,
    /// Super-blocks of five-bit numbers, with scales and minima of two levels for each 32.
    Q5K,
    /// Super-blocks of six-bit numbers, with scales of two levels for each 16.
    Q6K,
    /// Super-blocks of nibbles that index 16 values, with scales of two levels for each 32.
    Iq4Xs,
}

impl Type {
    /// Returns the number of elements of a block; 1 for types without blocks.
    #[must_use]
    pub const fn block(self) -> usize {
        if self.is_super_block() {
            SUPER_BLOCK
        } else if self.is_block() {
            32
        } else {
            1
        }
    }

    /// Returns `true` if elements are blocks or super-blocks.
    #[must_use]
    pub const fn is_block(self) -> bool {
        !self.is_float() && !self.is_whole()
    }

    /// Returns `true` if elements are super-blocks, from which copies convert. No other kernel
    /// reads them.
    #[must_use]
    pub const fn is_super_block(self) -> bool {
        matches!(
            self,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K | Self::Iq4Xs
        )
    }

    /// Returns `true` if kernels compute with the type, converting it as they read: floats, and
    /// blocks of 32.
    #[must_use]
    pub const fn is_computed(self) -> bool {
        self.is_float() || self.is_block() && !self.is_super_block()
    }

    /// Returns the bytes of a block.
    ///
    /// Source: ggml `block_q8_0`, `block_q4_0`, `block_q4_1`, `block_q5_0`, `block_q5_1`,
    /// `block_iq4_nl`, `block_mxfp4`, `block_q2_K` to `block_q6_K`, `block_iq4_xs`, ggml-common.h.
    #[must_use]
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::I8 => 1,
            Self::F16 | Self::Bf16 | Self::I16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::I64 => 8,
            Self::Mxfp4 => 17,
            Self::Q4_0 | Self::Iq4Nl => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2K => 84,
            Self::Q3K => 110,
            Self::Iq4Xs => 136,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    /// Returns the divisor of all offsets and strides of the type, in bytes.
    #[must_use]
    pub const fn align(self) -> usize {
        match self {
            Self::Mxfp4 => 1,
            _ if self.is_block() => 2,
            _ => self.block_bytes(),
        }
    }

    /// Returns `true` if kernels compute with the type without conversion.
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::Bf16)
    }

    /// Returns `true` if elements are whole numbers.
    const fn is_whole(self) -> bool {
        matches!(self, Self::I8 | Self::I16 | Self::I32 | Self::I64)
    }

    /// Returns `true` for types that can be row numbers.
    #[must_use]
    pub const fn is_index(self) -> bool {
        matches!(self, Self::I32 | Self::I64)
    }

    /// Returns `true` if copies convert from the type.
    #[must_use]
    pub const fn is_readable(self) -> bool {
        !self.is_whole() || matches!(self, Self::I32)
    }

    /// Returns `true` if copies convert to the type.
    #[must_use]
    pub const fn is_writable(self) -> bool {
        self.is_readable() && !self.is_super_block()
    }
}

/// Returns `true` if `count`, which is not 0, divides `total`: without a division, which is a
/// function call on the DSP, in the usual cases.
#[must_use]
pub const fn divides(count: usize, total: usize) -> bool {
    count == total || count == 1 || total.is_multiple_of(count)
}

/// Returns `total / count`, without a division in the usual cases.
const fn quotient(total: usize, count: usize) -> usize {
    match count {
        1 => total,
        _ if count == total => 1,
        _ => total / count,
    }
}

/// Type, dimensions (1 or more) and strides of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Type of its elements.
    pub dtype: Type,
    /// Elements in dimensions 0 to 3, each below 2^31; dimension 0 is made of whole blocks.
    pub ne: [usize; 4],
    /// Bytes from one index (dimension 0: block) to the next; 0 in a dimension with one index.
    pub nb: [usize; 4],
}

impl Shape {
    /// Returns the number of blocks of a row.
    #[must_use]
    pub fn blocks(&self) -> usize {
        // Block sizes are powers of two, so a shift replaces a division, which is a function call
        // on the DSP.
        self.ne[0] >> self.dtype.block().trailing_zeros()
    }

    /// Returns the number of bytes from a row's first to its last.
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        (self.blocks() - 1) * self.nb[0] + self.dtype.block_bytes()
    }

    /// Returns the number of bytes from the tensor's first to its last; `None` if that overflows.
    #[must_use]
    #[inline(always)]
    pub fn bytes(&self) -> Option<usize> {
        let [_, n1, n2, n3] = self.ne;
        let [b0, b1, b2, b3] = self.nb;
        let reach = |count: usize, stride: usize| (count - 1).checked_mul(stride);
        let row = reach(self.blocks(), b0)?.checked_add(self.dtype.block_bytes())?;
        let planes = reach(n2, b2)?.checked_add(reach(n3, b3)?)?;
        reach(n1, b1)?.checked_add(planes)?.checked_add(row)
    }

    /// Returns the byte offset of row `at`; indices modulo the dimensions.
    #[must_use]
    #[inline(always)]
    pub fn row(&self, at: [usize; 3]) -> usize {
        let mut byte = 0;
        for (i, at) in at.into_iter().enumerate() {
            let count = self.ne[i + 1];
            // Divisions are avoided because they are function calls on the DSP.
            let at = match count {
                _ if at < count => at,
                1 => 0,
                _ => at % count,
            };
            byte += at * self.nb[i + 1];
        }
        byte
    }

    /// Returns the index of an element of a row, modulo the row's length.
    #[inline(always)]
    pub(super) fn column(&self, k: usize) -> usize {
        if k < self.ne[0] { k } else { k % self.ne[0] }
    }

    /// Returns `true` if no byte from the tensor's first to its last is outside an element, and
    /// elements follow each other in the order of their indices.
    #[must_use]
    pub fn is_gapless(&self) -> bool {
        let counts = [self.blocks(), self.ne[1], self.ne[2], self.ne[3]];
        let mut bytes = self.dtype.block_bytes();
        for (count, stride) in counts.into_iter().zip(self.nb) {
            if count > 1 && stride != bytes {
                return false;
            }
            bytes *= count;
        }
        true
    }

    /// Returns the shape of the same elements in rows of `n`, which divides their number and is
    /// made of whole blocks. The tensor is gapless.
    #[must_use]
    pub fn with_rows(&self, n: usize) -> Self {
        let row = (n >> self.dtype.block().trailing_zeros()) * self.dtype.block_bytes();
        Self {
            dtype: self.dtype,
            ne: [n, quotient(self.elems(), n), 1, 1],
            nb: [self.dtype.block_bytes(), row, 0, 0],
        }
    }

    /// Returns the shape with all rows in dimension 1; `None` unless each is as far from the one
    /// before it.
    #[must_use]
    pub fn merged(&self) -> Option<Self> {
        let [_, n1, n2, n3] = self.ne;
        let [b0, b1, b2, b3] = self.nb;
        // Dimensions of a single row have a stride of 0.
        let stride = match (n1, n2) {
            (1, 1) => b3,
            (1, _) => b2,
            _ => b1,
        };
        let follows = |count: usize, have: usize, rows: usize| count == 1 || have == rows * stride;
        let is_even = follows(n2, b2, n1) && follows(n3, b3, n1 * n2);
        is_even.then_some(Self {
            dtype: self.dtype,
            ne: [self.ne[0], n1 * n2 * n3, 1, 1],
            nb: [b0, stride, 0, 0],
        })
    }

    /// Returns `true` if elements (blocks) of a row are consecutive.
    #[must_use]
    pub fn has_dense_rows(&self) -> bool {
        self.blocks() == 1 || self.nb[0] == self.dtype.block_bytes()
    }

    /// Returns the dimensions 1 to 3 (less one) ordered by stride; `None` if rows overlap or
    /// interleave.
    #[must_use]
    pub fn row_order(&self) -> Option<[usize; 3]> {
        if self.blocks() > 1 && self.nb[0] < self.dtype.block_bytes() {
            return None;
        }
        let mut order = [0, 1, 2];
        // Dimensions of one index come last, so that rows of dimension 1 are usually numbered in
        // order.
        order.sort_unstable_by_key(|i| (self.ne[i + 1] == 1, self.nb[i + 1]));
        let mut extent = self.row_bytes();
        for i in order.into_iter().filter(|i| self.ne[i + 1] > 1) {
            if self.nb[i + 1] < extent {
                return None;
            }
            extent += self.nb[i + 1] * (self.ne[i + 1] - 1);
        }
        Some(order)
    }

    /// Returns `true` if several indices refer to one element.
    #[must_use]
    pub fn repeats(&self) -> bool {
        let counts = [self.blocks(), self.ne[1], self.ne[2], self.ne[3]];
        let mut dims = counts.iter().zip(self.nb);
        dims.any(|(count, stride)| *count > 1 && stride == 0)
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn elems(&self) -> usize {
        self.ne.iter().product()
    }
}
