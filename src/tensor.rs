//! Element types, shapes, and the meaning of M, K and N.
//!
//! A matrix multiplication is `dst[M,N] = act[M,K] · w[K,N]`:
//!
//! - **M** tokens in the ubatch (1 in decode): `ne[1]` of src1 and of dst;
//! - **K** the shared dimension: `ne[0]` of both sources;
//! - **N** weight rows: `ne[1]` of src0, `ne[0]` of dst.
//!
//! ggml stores a weight as N rows of K, so "row" of a weight always means one n, with K contiguous
//! elements.

/// Turns stored blocks into `f32`; ggml provides it for every quantized type.
pub trait Dequantize: Sync {
    /// Writes the values of `blocks` to `out`.
    ///
    /// - `blocks`: whole blocks of the type that this was made for
    /// - `out`: exactly as many elements as the blocks hold
    fn dequantize(&self, blocks: &[u8], out: &mut [f32]);
}

/// A quantized type of ggml for which devices have layouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// Blocks of 32: FP16 scale, signed 4-bit values.
    Q4_0,
    /// Blocks of 32: FP16 scale and minimum, unsigned 4-bit values.
    Q4_1,
    /// Blocks of 32: FP16 scale, signed 8-bit values.
    Q8_0,
    /// Blocks of 32: FP16 scale, 4-bit indices of a fixed table.
    Iq4Nl,
    /// Blocks of 32: E8M0 scale, 4-bit floating point.
    Mxfp4,
    /// Super-blocks of 256: two FP16 factors, 6-bit scales and minima for each 32, 4-bit values.
    Q4K,
    /// Blocks of 32: FP16 scale, signed 5-bit values.
    Q5_0,
    /// Super-blocks of 256: an FP16 factor, signed 8-bit scales for each 16, signed 6-bit values.
    Q6K,
    /// Blocks of 32: FP16 scale and minimum, unsigned 5-bit values.
    Q5_1,
    /// As [`Self::Q4K`], with 5-bit values.
    Q5K,
    /// Super-blocks of 256: an FP16 factor, signed 6-bit scales for each 32, 4-bit indices of a
    /// fixed table.
    Iq4Xs,
    /// Super-blocks of 256: an FP16 factor, signed 6-bit scales for each 16, signed 3-bit values.
    Q3K,
    /// Super-blocks of 256: two FP16 factors, 4-bit scales and minima for each 16, 2-bit values.
    Q2K,
}

/// Storage type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of IEEE single precision.
    Bf16,
    /// 8-bit integers.
    I8,
    /// 16-bit integers.
    I16,
    /// 32-bit integers (indices).
    I32,
    /// 64-bit integers (indices).
    I64,
    /// Blocks of a quantized ggml type.
    Quantized {
        /// Elements in a block.
        block_elems: usize,
        /// Bytes in a block.
        block_bytes: usize,
    },
    /// Anything this backend never reads.
    Other,
}

impl DType {
    /// Returns the bytes of `k` elements stored one after another, or `None` if `k` is not whole
    /// blocks, no address could reach the last, or the type is unknown.
    #[must_use]
    pub fn row_bytes(self, k: usize) -> Option<usize> {
        let block_elems = match self {
            Self::Quantized { block_elems, .. } => block_elems,
            _ => 1,
        };
        let blocks = k.is_multiple_of(block_elems).then(|| k / block_elems)?;
        blocks.checked_mul(self.step_bytes()?)
    }

    /// Returns the bytes from one element (or block) to the next when they are contiguous.
    #[must_use]
    pub fn step_bytes(self) -> Option<usize> {
        match self {
            Self::F32 | Self::I32 => Some(4),
            Self::F16 | Self::Bf16 | Self::I16 => Some(2),
            Self::I8 => Some(1),
            Self::I64 => Some(8),
            Self::Quantized { block_bytes, .. } => Some(block_bytes),
            Self::Other => None,
        }
    }
}

/// Upper bound of the bytes of one element in a device's layout. The worst case is a matrix of one
/// element, which is padded to 8 KiB; the rest of the factor keeps sizes in bits from overflowing.
const MOST_BYTES_OF_AN_ELEMENT: usize = 1 << 20;

/// ggml's dimensions and byte strides, innermost first.
///
/// ```
/// use ggml_rust_npu::tensor::{DType, Shape};
///
/// // Two rows of three floats, which begin 16 bytes apart.
/// let padded = Shape { ne: [3, 2, 1, 1], nb: [4, 16, 32, 32] };
/// assert_eq!(padded.rows(), 2);
/// assert_eq!(padded.span_bytes(DType::F32), Some(16 + 12));
/// assert!(!padded.is_contiguous(DType::F32));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Elements in each dimension.
    pub ne: [usize; 4],
    /// Bytes from one index to the next in each dimension.
    pub nb: [usize; 4],
}

impl Shape {
    /// Returns `true` if rows, planes and volumes follow each other without a gap.
    #[must_use]
    pub fn is_contiguous(&self, dtype: DType) -> bool {
        let (Some(step), Some(row)) = (dtype.step_bytes(), dtype.row_bytes(self.ne[0])) else {
            return false;
        };
        self.nb[0] == step
            && self.nb[1] == row
            && self.nb[2] == row * self.ne[1]
            && self.nb[3] == row * self.ne[1] * self.ne[2]
    }

    /// Returns `true` if sums and products of its sizes do not overflow: the size of each part,
    /// also in a device's layout, and the distance to the last element fit into an address.
    #[must_use]
    pub fn is_addressable(&self, dtype: DType) -> bool {
        let most = isize::MAX.unsigned_abs();
        let elements = (self.ne.iter()).try_fold(MOST_BYTES_OF_AN_ELEMENT, |all, n| {
            all.checked_mul((*n).max(1))
        });
        let step = dtype.step_bytes().unwrap_or(16).max(16);
        let reach = self.ne.iter().zip(&self.nb).try_fold(step, |all, (n, nb)| {
            all.checked_add((*n).max(1).checked_mul(*nb)?)
        });
        elements.is_some_and(|all| all <= most) && reach.is_some_and(|all| all <= most)
    }

    /// Returns the number of rows in all dimensions together.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.ne[1] * self.ne[2] * self.ne[3]
    }

    /// Returns the bytes from the first element to the end of the last one.
    #[must_use]
    pub fn span_bytes(&self, dtype: DType) -> Option<usize> {
        let row = dtype.row_bytes(self.ne[0])?;
        if self.ne.contains(&0) {
            return Some(0);
        }
        let outer: usize = (1..4).map(|i| (self.ne[i] - 1) * self.nb[i]).sum();
        // Transposed rows span more memory than dense ones.
        let step = dtype.step_bytes()?;
        let steps = row / step - 1;
        Some(outer + steps * self.nb[0] + step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file may contain such a row if another dimension is 0.
    #[test]
    fn a_row_that_no_address_reaches_has_no_bytes() {
        let blocks = DType::Quantized {
            block_elems: 32,
            block_bytes: 34,
        };
        for (dtype, k) in [
            (DType::F16, 1 << 63),
            (DType::F32, 1 << 62),
            (DType::I64, 1 << 61),
        ] {
            assert_eq!(dtype.row_bytes(k), None);
        }
        assert_eq!(blocks.row_bytes(64), Some(68));
        assert_eq!(blocks.row_bytes(65), None);
    }
}
