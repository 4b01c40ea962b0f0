//! Weights between ggml's rows and the NPU's native layout. For INT8 this quantizes too: a rotation
//! along K (unless a rule excludes it), then one scale for each row. For INT4: the same rotation,
//! then a calibrated scale for each row and segment of K.
//!
//! A weight of N rows of K is cut into **chunks** of N (so that the cores share them and no call
//! exceeds the chip's N) and **segments** of K (no call exceeds the chip's K). Every (slice, chunk,
//! segment) is one **block**: a native B of the same shape, so that one context serves them all.
//! Excess rows and columns are zero.
//!
//! ```text
//!            K: segment 0   segment 1
//!          +-------------+-------------+
//!  N chunk0|  block 0    |  block 1    |   core 0      memory: block 0 | block 1 | block 2 | block 3 | ...
//!  N chunk1|  block 2    |  block 3    |   core 1      each padded to a page, so that it can be a separate view
//!  N chunk2|  block 4    |  block 5    |   core 2
//!          +-------------+-------------+               then slice 1 (ne[2], ne[3] of src0), and so on
//! ```

use std::ops::Range;

use rknpu_ops::int4;
use rknpu_ops::layout::MatmulLayout;
use rknpu_ops::rotation::Rotation;

use super::caps::{Precision, RkCaps};
use crate::config::rules::Choice;
use crate::packfile::LayoutTag;
use crate::tensor::DType;

/// Bytes that blocks are aligned to: views of an allocation start at a page.
// SOURCE: rknpu's buffers are mapped by pages of 4 KiB (driver 0.9.8, rknpu_gem.c).
pub const BLOCK_ALIGN_BYTES: usize = 4096;

/// Most segments of K.
pub const MAX_SEGMENTS: usize = 64;

/// Most rows of quantized weights that are multiplied in FP16 by default. Weights of so few rows
/// are routers, gates and the like, each of whose results matters, and one tile of N costs the same
/// time in any arithmetic. With as few results the error of INT8 does not average out either: with
/// 16 rows of K = 4096, 2 of 208 random tokens missed upstream's limit of 5e-4 (test-backend-ops,
/// 2026-11-20, simulated). A row with values beyond FP16's range is divided by a power of two,
/// which becomes the scale of its results.
pub const FEW_ROWS: usize = 32;

/// Longest row: the INT32 sum of all INT8 segments is exact up to `2^31 / 127^2` = 133,144.
const MAX_K: usize = 131_072;

/// Layout of one tensor's weights in device memory. Only its methods compute offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightLayout {
    /// Arithmetic.
    pub precision: Precision,
    /// Native layouts of A, B and C.
    pub native: MatmulLayout,
    /// Elements of a row.
    pub k: usize,
    /// Rows of a slice.
    pub n: usize,
    /// Slices: `ne[2] * ne[3]`.
    pub slices: usize,
    /// Segments of K, and the elements of each (the last one may have padding).
    pub segments: usize,
    /// Elements of K in a segment.
    pub segment_k: usize,
    /// Chunks of N in a slice.
    pub chunks: usize,
    /// Rows of a chunk (the last one may have padding).
    pub chunk_n: usize,
    /// Chunks that follow each other on one core.
    pub chunks_per_core: usize,
}

impl WeightLayout {
    /// Returns the layout of a weight of type `dtype` and dimensions `ne`, in the arithmetic that a
    /// rule chose for it, or otherwise in the one for its type; `None` for weights that the device
    /// does not accept.
    #[must_use]
    pub fn new(
        caps: &RkCaps,
        choice: Option<Choice>,
        dtype: DType,
        ne: [usize; 4],
    ) -> Option<Self> {
        let precision = match (dtype, choice) {
            (DType::F16 | DType::Bf16 | DType::Quantized { .. }, Some(Choice::Cpu)) => return None,
            (DType::F32 | DType::I8 | DType::I16 | DType::I32 | DType::I64 | DType::Other, _) => {
                return None;
            }
            (_, Some(Choice::Fp16)) | (DType::F16 | DType::Bf16, None) => Precision::Fp16,
            (DType::Quantized { .. }, None) if ne[1] <= FEW_ROWS => Precision::Fp16,
            (_, Some(Choice::Int8)) | (DType::Quantized { .. }, None) => Precision::Int8,
            (_, Some(Choice::Int8Unrotated)) => Precision::Int8Unrotated,
            (_, Some(Choice::Int8Wide)) => Precision::Int8Wide,
            (_, Some(Choice::Int4)) => caps.int4?,
            (_, Some(Choice::Int4Fp16)) => caps.int4_fp16?,
        };
        let k_max = match precision {
            Precision::Int8 | Precision::Int8Unrotated | Precision::Int8Wide => caps.k_max_int8,
            Precision::Fp16 => caps.k_max_fp16,
            Precision::Int4 | Precision::Int4Int8 | Precision::Int4Fp16 => int4::SAFE_K_I4,
        };
        dtype.row_bytes(ne[0])?;
        // A row of one value (K = 1) is a convolution kernel, for example WavTokenizer's. Other
        // operations read it, and padding K would make it 32 times as large.
        if ne.contains(&0)
            || ne[0] == 1
            || ne[0] > MAX_K
            || (precision.is_int4() && !ne[0].is_multiple_of(2))
        {
            return None;
        }
        let native = caps.native(precision)?;
        let [k, n, ..] = ne;
        let segments = k.div_ceil(k_max);
        if segments > MAX_SEGMENTS {
            return None;
        }
        let segment_k = k.div_ceil(segments).next_multiple_of(native.k_align);
        let n_align = native.n_align;
        let per_core = n.div_ceil(n_align).div_ceil(caps.cores.count()) * n_align;
        let n_max = if precision.is_int4() {
            caps.n_max
        } else {
            caps.n_wide
        };
        let chunks_per_core = per_core.div_ceil(n_max);
        let chunk_n = per_core.div_ceil(chunks_per_core).next_multiple_of(n_align);
        Some(Self {
            precision,
            native,
            k,
            n,
            slices: ne[2] * ne[3],
            segments,
            segment_k,
            chunks: n.div_ceil(chunk_n),
            chunk_n,
            chunks_per_core,
        })
    }

    /// Returns the bytes of one block, without the padding after it.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.native.b.bytes(self.segment_k, self.chunk_n)
    }

    /// Returns the bytes from one block to the next.
    pub(super) fn block_stride(&self) -> usize {
        self.block_bytes().next_multiple_of(BLOCK_ALIGN_BYTES)
    }

    /// Returns the blocks in a slice.
    #[must_use]
    pub fn blocks_per_slice(&self) -> usize {
        self.chunks * self.segments
    }

    /// Returns the number of a block among all of the tensor.
    #[must_use]
    pub fn block(&self, slice: usize, chunk: usize, segment: usize) -> usize {
        (slice * self.chunks + chunk) * self.segments + segment
    }

    /// Returns the offset of a block in bytes.
    #[must_use]
    pub fn block_offset(&self, block: usize) -> usize {
        block * self.block_stride()
    }

    /// Returns the bytes of the whole tensor.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.slices * self.blocks_per_slice() * self.block_stride()
    }

    /// Sets of scales of a chunk, each with one scale for each row: one set, or one for each
    /// segment of K.
    pub(super) fn scale_sets(&self) -> usize {
        match self.precision {
            Precision::Int8 | Precision::Int8Unrotated | Precision::Int8Wide | Precision::Fp16 => 1,
            Precision::Int4 | Precision::Int4Int8 | Precision::Int4Fp16 => self.segments,
        }
    }

    /// Returns the number of weight scales, including those of padding rows.
    #[must_use]
    pub fn scales(&self) -> usize {
        self.slices * self.chunks * self.scale_sets() * self.chunk_n
    }

    /// Returns the scale of a row that is not packed, or padding: that of a row of zeros.
    #[must_use]
    pub fn empty_scale(&self) -> f32 {
        if self.precision == Precision::Fp16 {
            1.0
        } else {
            0.0
        }
    }

    /// Returns the scales of the rows of a chunk, in [`WeightLayout::scales`]; `set` is the segment
    /// if each has its own.
    #[must_use]
    pub fn chunk_scales(&self, slice: usize, chunk: usize, set: usize) -> Range<usize> {
        let start = ((slice * self.chunks + chunk) * self.scale_sets() + set) * self.chunk_n;
        start..start + self.chunk_n
    }

    /// Returns the rows of a chunk that exist.
    #[must_use]
    pub fn chunk_rows(&self, chunk: usize) -> Range<usize> {
        (chunk * self.chunk_n).min(self.n)..((chunk + 1) * self.chunk_n).min(self.n)
    }

    /// Returns the elements of K that a segment covers.
    #[must_use]
    pub fn segment_columns(&self, segment: usize) -> Range<usize> {
        (segment * self.segment_k).min(self.k)..((segment + 1) * self.segment_k).min(self.k)
    }

    /// Returns the tag of bytes that are packed in this layout.
    #[must_use]
    pub fn tag(&self) -> LayoutTag {
        let b = self.native.b;
        LayoutTag::rockchip(
            self.precision,
            [
                self.k,
                self.n,
                self.slices,
                self.segments,
                self.segment_k,
                self.chunks,
                self.chunk_n,
                self.chunks_per_core,
                b.gn,
                b.gk,
            ],
        )
    }

    /// Returns the layout of one chunk as a separate weight, with the rows [`Self::chunk_rows`].
    /// Chunks follow each other in memory, and so do their scales.
    #[must_use]
    pub fn of_chunk(&self, chunk: usize) -> Self {
        Self {
            n: self.chunk_rows(chunk).len(),
            slices: 1,
            chunks: 1,
            ..*self
        }
    }

    /// Returns the rotation along K that integer weights and their activations go through; FP16
    /// needs none, and a rule can leave it out.
    #[must_use]
    pub fn rotation(&self) -> Rotation {
        match self.precision {
            Precision::Fp16 | Precision::Int8Unrotated => Rotation::identity(self.k),
            Precision::Int8
            | Precision::Int8Wide
            | Precision::Int4
            | Precision::Int4Int8
            | Precision::Int4Fp16 => Rotation::new(self.k),
        }
    }
}
