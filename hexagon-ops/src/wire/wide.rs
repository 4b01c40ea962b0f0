//! Operations on more tensors than [`TensorOp`](super::TensorOp) has room for.
//!
//! Operands are F32 where no other type is named, results without gaps except that of DSV4_HC_POST;
//! names as in `ggml.h`.
//!
//! | kernel | result, one part after the other | sources | parameters |
//! |---|---|---|---|
//! | SSM_SCAN | outputs (dim, heads, tokens, sequences), then i0 states of all sequences, the last first | s (state, dim, heads, \*), x (dim, heads, tokens, sequences), dt (heads, tokens, sequences), A (state or 1, heads), B and C (state, groups, tokens, sequences), ids: I32 (sequences) | i0 states |
//! | GATED_DELTA_NET | outputs (S, heads, tokens, sequences), then i0 states | q and k (S, \*, tokens, \*), v (S, heads, tokens, sequences), g (1 or S, heads, tokens, sequences), beta (1, heads, tokens, sequences), state (S, S, heads, sequences) | i0 states |
//! | GATED_LINEAR_ATTN | outputs (S, heads, all tokens), then the state | k, v, q, g (S, heads, all tokens), state (S S heads, sequences) | f0 scale |
//! | RWKV_WKV6 | the same | k, v, r (S, heads, all tokens), tf (S, heads), td (S, heads, all tokens), state | |
//! | RWKV_WKV7 | the same | r, w, k, v, a, b (S, heads, all tokens), state | |
//! | DSV4_HC_POST | n, streams, tokens | x (n, tokens), residual (n, streams, tokens), post (streams, tokens), comb (streams, streams, tokens) or none | |
//! | LIGHTNING_INDEXER | positions, tokens, 1, sequences | q (n, heads, tokens, sequences), k of any type (n, 1, positions, sequences), weights (heads, tokens, 1, sequences), mask: F16 (positions, tokens, 1, \*) | |
//!
//! | CONV_2D, CONV_2D_DW, CONV_3D, CONV_TRANSPOSE_1D, CONV_TRANSPOSE_2D | as ggml's | kernel: F32, F16 or BF16, source | as ggml's |
//!
//! A kernel has at most [`WINDOW_TAPS`] elements for a filter. A head's state has at most
//! [`STATE_BYTES`]. Rows of sources have no gaps.

use core::ops::Range;

use bytemuck::{Pod, Zeroable};

use super::{KERNEL_CONV_2D, KERNEL_CONV_TRANSPOSE_2D, SOURCES, Tensor};

/// Most sources of a [`WideOp`].
pub const WIDE_SOURCES: usize = 7;

/// Largest state of one head, when each of its rows fills whole lines of 128 bytes.
pub const STATE_BYTES: usize = 1 << 19;

/// Most elements of a filter of a convolution's kernel: their lines and weights need 2 MB of VTCM.
pub const WINDOW_TAPS: usize = 14_000;

/// Returns `true` if a kernel's command is a [`WideOp`]: it reads more sources than a
/// [`TensorOp`](super::TensorOp) has, or works in VTCM.
#[must_use]
pub fn is_wide(kernel: u32, sources: &Range<usize>) -> bool {
    let in_vtcm = KERNEL_CONV_2D..=KERNEL_CONV_TRANSPOSE_2D;
    sources.end > SOURCES || in_vtcm.contains(&kernel)
}

/// A [`Tensor`] with strides of 32 bits.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct NarrowTensor {
    /// As [`Tensor::buffer`].
    pub buffer: u32,
    /// As [`Tensor::dtype`].
    pub dtype: u32,
    /// As [`Tensor::offset`].
    pub offset: u64,
    /// As [`Tensor::ne`].
    pub ne: [u32; 4],
    /// As [`Tensor::nb`].
    pub nb: [u32; 4],
}

impl NarrowTensor {
    /// Returns `tensor`, or `None` if a stride does not fit. The stride of a single index has no
    /// meaning, and becomes 0.
    #[must_use]
    pub fn new(tensor: &Tensor) -> Option<Self> {
        let mut nb = [0; 4];
        for (i, nb) in nb.iter_mut().enumerate() {
            if i == 0 || tensor.ne[i] > 1 {
                *nb = u32::try_from(tensor.nb[i]).ok()?;
            }
        }
        Some(Self {
            buffer: tensor.buffer,
            dtype: tensor.dtype,
            offset: tensor.offset,
            ne: tensor.ne,
            nb,
        })
    }

    /// Returns the tensor with strides of 64 bits.
    #[must_use]
    pub fn widen(&self) -> Tensor {
        Tensor {
            buffer: self.buffer,
            dtype: self.dtype,
            offset: self.offset,
            ne: self.ne,
            nb: self.nb.map(u64::from),
        }
    }
}

/// `dst = kernel(src, params)`. No source shares memory with the result.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct WideOp {
    /// `KERNEL_*` of an operation that [`is_wide`].
    pub kernel: u32,
    /// 0.
    pub reserved: u32,
    /// ggml's own parameters of the operation (`op_params`).
    pub params: [u32; 16],
    /// The result.
    pub dst: NarrowTensor,
    /// The sources, in ggml's order.
    pub src: [NarrowTensor; WIDE_SOURCES],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stride_that_fits_stays_and_one_that_does_not_is_refused() {
        let mut tensor = Tensor {
            buffer: 3,
            dtype: super::super::TYPE_F32,
            offset: 1 << 40,
            ne: [5, 2, 1, 1],
            nb: [4, u64::from(u32::MAX), 1 << 33, 1 << 34],
        };
        let narrow = NarrowTensor::new(&tensor).unwrap();
        assert_eq!(
            narrow.widen(),
            Tensor {
                nb: [4, u64::from(u32::MAX), 0, 0],
                ..tensor
            }
        );
        tensor.nb[1] += 1;
        assert_eq!(NarrowTensor::new(&tensor), None);
    }
}
