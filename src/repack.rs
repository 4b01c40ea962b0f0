//! Weights between ggml's rows and the NPU's native layout. For INT8 this quantizes too: block Hadamard, then one
//! scale for each row.
//!
//! A weight of N rows of K is cut into **chunks** of N (so that the cores share them and no call exceeds the chip's
//! N) and **segments** of K (no call exceeds the chip's K). Every (slice, chunk, segment) is one **block**: a native
//! B of the same shape, so that one context serves them all. Excess rows and columns are zero.
//!
//! ```text
//!            K: segment 0   segment 1
//!          +-------------+-------------+
//!  N chunk0|  block 0    |  block 1    |   core 0      memory: block 0 | block 1 | block 2 | block 3 | ...
//!  N chunk1|  block 2    |  block 3    |   core 1      each padded to a page, so that it can be a view of its own
//!  N chunk2|  block 4    |  block 5    |   core 2
//!          +-------------+-------------+               then slice 1 (ne[2], ne[3] of src0), and so on
//! ```

use std::ops::Range;

use rayon::prelude::*;
use rknpu_ops::ffi::MatmulType;
use rknpu_ops::layout::{MatmulLayout, NativeB};
use rknpu_ops::pack::{self, Rows};
use rknpu_ops::quant;

use crate::caps::RkCaps;
use crate::tensor::{DType, Dequantize};

/// In which arithmetic the device multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    /// INT8 weights with a scale for each row, INT8 activations with a scale for each token, exact INT32 sums.
    Int8,
    /// FP16 weights as they are, FP16 activations, FP32 sums.
    Fp16,
}

impl Precision {
    /// The vendor's number for it.
    #[must_use]
    pub const fn matmul_type(self) -> MatmulType {
        match self {
            Self::Int8 => MatmulType::I8_I8_I32,
            Self::Fp16 => MatmulType::F16_F16_F32,
        }
    }

    /// Bytes of an element of A and B.
    #[must_use]
    pub const fn elem_bytes(self) -> usize {
        match self {
            Self::Int8 => 1,
            Self::Fp16 => 2,
        }
    }
}

/// Bytes that blocks are aligned to: views of an allocation start at a page.
// SOURCE: rknpu's buffers are mapped by pages of 4 KiB (driver 0.9.8, rknpu_gem.c).
pub const BLOCK_ALIGN_BYTES: usize = 4096;

/// Most segments of K: K up to 131,072 in INT8, where the INT32 sum of all segments is still exact.
pub const MAX_SEGMENTS: usize = 16;

/// Where the weights of one tensor lie in device memory. Only its methods compute offsets.
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
    /// Lays out a weight of type `dtype` and dimensions `ne`; `None` for types that the device does not take.
    #[must_use]
    pub fn new(caps: &RkCaps, dtype: DType, ne: [usize; 4]) -> Option<Self> {
        let (precision, k_max) = match dtype {
            DType::F16 => (Precision::Fp16, caps.k_max_fp16),
            DType::Quantized { .. } => (Precision::Int8, caps.k_max_int8),
            DType::F32 | DType::I32 | DType::Other => return None,
        };
        dtype.row_bytes(ne[0])?;
        if ne.contains(&0) {
            return None;
        }
        let native = MatmulLayout::of(caps.soc, precision.matmul_type())?;
        let [k, n, ..] = ne;
        let segments = k.div_ceil(k_max);
        if segments > MAX_SEGMENTS {
            return None;
        }
        let segment_k = k.div_ceil(segments).next_multiple_of(native.k_align);
        let n_align = native.n_align;
        let per_core = n.div_ceil(n_align).div_ceil(caps.soc.cores()) * n_align;
        let chunks_per_core = per_core.div_ceil(caps.n_max);
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

    /// Bytes of one block, without the padding behind it.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.native.b.bytes(self.segment_k, self.chunk_n)
    }

    /// Bytes from one block to the next.
    fn block_stride(&self) -> usize {
        self.block_bytes().next_multiple_of(BLOCK_ALIGN_BYTES)
    }

    /// Blocks in a slice.
    #[must_use]
    pub fn blocks_per_slice(&self) -> usize {
        self.chunks * self.segments
    }

    /// Number of a block among all of the tensor.
    #[must_use]
    pub fn block(&self, slice: usize, chunk: usize, segment: usize) -> usize {
        (slice * self.chunks + chunk) * self.segments + segment
    }

    /// Offset of a block in bytes.
    #[must_use]
    pub fn block_offset(&self, block: usize) -> usize {
        block * self.block_stride()
    }

    /// Bytes of the whole tensor.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.slices * self.blocks_per_slice() * self.block_stride()
    }

    /// Number of weight scales: one for each row, padding rows included.
    #[must_use]
    pub fn scales(&self) -> usize {
        match self.precision {
            Precision::Int8 => self.slices * self.chunks * self.chunk_n,
            Precision::Fp16 => 0,
        }
    }

    /// The scales of the rows of a chunk, in [`WeightLayout::scales`].
    #[must_use]
    pub fn chunk_scales(&self, slice: usize, chunk: usize) -> Range<usize> {
        let start = (slice * self.chunks + chunk) * self.chunk_n;
        start..start + self.chunk_n
    }

    /// The rows of a chunk that exist.
    #[must_use]
    pub fn chunk_rows(&self, chunk: usize) -> Range<usize> {
        (chunk * self.chunk_n).min(self.n)..((chunk + 1) * self.chunk_n).min(self.n)
    }

    /// Elements of K with the padding of the last segment.
    #[must_use]
    pub fn k_padded(&self) -> usize {
        self.segments * self.segment_k
    }

    /// Length of the Hadamard blocks that weights and activations go through.
    #[must_use]
    pub fn hadamard_block(&self) -> usize {
        quant::hadamard_block(self.k)
    }
}

/// ggml's rows of one weight: contiguous in memory.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    /// Type of the elements.
    pub dtype: DType,
    /// The rows of all slices, one after another.
    pub rows: &'a [u8],
    /// ggml's way to `f32`; needed for quantized types.
    pub dequantize: Option<&'a dyn Dequantize>,
}

/// One group of rows on its way into the layout: its place in each segment of its chunk.
struct Group<'a> {
    /// First row, counted over all slices without padding.
    first_row: usize,
    /// Rows that exist.
    rows: usize,
    /// Destination in each segment.
    segments: Vec<&'a mut [u8]>,
    /// Scales of the group's rows; empty for FP16.
    scales: &'a mut [f32],
}

/// Packs the rows `rows` (counted over all slices) and, as groups are packed whole, their neighbours in the group.
///
/// - `source.rows`: all rows of the tensor
/// - `scales`: [`WeightLayout::scales`] elements; `out`: [`WeightLayout::bytes`] bytes
///
/// # Panics
/// If a length disagrees, or a quantized type comes without `dequantize`: the planner admits neither.
pub fn pack_rows(
    layout: &WeightLayout,
    source: Source,
    rows: Range<usize>,
    scales: &mut [f32],
    out: &mut [u8],
) {
    assert_eq!(out.len(), layout.bytes(), "bytes of the packed weight");
    assert_eq!(scales.len(), layout.scales(), "scales of the packed weight");
    let row_bytes = source.dtype.row_bytes(layout.k).unwrap_or(0);
    assert_eq!(
        source.rows.len(),
        row_bytes * layout.n * layout.slices,
        "rows of the weight"
    );

    let touched =
        |group: &Group| group.first_row < rows.end && group.first_row + group.rows > rows.start;
    let groups: Vec<Group> = groups(layout, scales, out)
        .into_iter()
        .filter(touched)
        .collect();
    let work = || Work::new(layout);
    groups.into_par_iter().for_each_init(work, |work, group| {
        let bytes = &source.rows[group.first_row * row_bytes..][..group.rows * row_bytes];
        match layout.precision {
            Precision::Int8 => pack_int8(layout, bytes, source, group, work),
            Precision::Fp16 => pack_fp16(layout, bytes, group, work),
        }
    });
}

/// Scratch of one thread.
struct Work {
    row: Vec<f32>,
    int8: Vec<i8>,
    bits: Vec<u16>,
}

impl Work {
    fn new(layout: &WeightLayout) -> Self {
        let group = layout.native.b.gn * layout.k;
        match layout.precision {
            Precision::Int8 => Self {
                row: vec![0.0; layout.k],
                int8: vec![0; group],
                bits: Vec::new(),
            },
            Precision::Fp16 => Self {
                row: Vec::new(),
                int8: Vec::new(),
                bits: vec![0; group],
            },
        }
    }
}

/// Cuts the destination into groups of `gn` rows, those without any row that exists left out.
fn groups<'a>(layout: &WeightLayout, scales: &'a mut [f32], out: &'a mut [u8]) -> Vec<Group<'a>> {
    let NativeB { gn, .. } = layout.native.b;
    let group_bytes = layout.native.b.bytes(layout.segment_k, gn);
    let groups_per_chunk = layout.chunk_n / gn;
    let mut scales = scales.chunks_exact_mut(gn);
    let mut all = Vec::with_capacity(layout.slices * layout.chunks * groups_per_chunk);
    let chunks = out.chunks_exact_mut(layout.block_stride() * layout.segments);
    for (index, chunk) in chunks.enumerate() {
        let (slice, chunk_index) = (index / layout.chunks, index % layout.chunks);
        let mut segments: Vec<_> = chunk
            .chunks_exact_mut(layout.block_stride())
            .map(|block| block[..layout.block_bytes()].chunks_exact_mut(group_bytes))
            .collect();
        for group in 0..groups_per_chunk {
            let first = chunk_index * layout.chunk_n + group * gn;
            let rows = first.min(layout.n)..(first + gn).min(layout.n);
            let segments: Vec<_> = segments.iter_mut().filter_map(Iterator::next).collect();
            let scales = scales.next().unwrap_or_default();
            if !rows.is_empty() {
                all.push(Group {
                    first_row: slice * layout.n + rows.start,
                    rows: rows.len(),
                    segments,
                    scales,
                });
            }
        }
    }
    all
}

fn pack_int8(
    layout: &WeightLayout,
    bytes: &[u8],
    source: Source,
    mut group: Group,
    work: &mut Work,
) {
    let k = layout.k;
    // PANIC: the planner admits a quantized tensor only together with its dequantizer.
    let dequantize = source
        .dequantize
        .expect("a quantized type has a dequantizer");
    let rows = bytes
        .chunks_exact(bytes.len() / group.rows)
        .zip(work.int8.chunks_exact_mut(k));
    for ((bytes, int8), scale) in rows.zip(group.scales.iter_mut()) {
        dequantize.dequantize(bytes, &mut work.row);
        *scale = quant::quantize_weight_row_i8(&mut work.row, layout.hadamard_block(), int8);
    }
    pack_segments(
        layout,
        Rows::new(&work.int8, group.rows, k, k),
        &mut group.segments,
    );
}

fn pack_fp16(layout: &WeightLayout, bytes: &[u8], mut group: Group, work: &mut Work) {
    let k = layout.k;
    for (bits, pair) in work.bits.iter_mut().zip(bytes.chunks_exact(2)) {
        *bits = u16::from_le_bytes([pair[0], pair[1]]);
    }
    pack_segments(
        layout,
        Rows::new(&work.bits, group.rows, k, k),
        &mut group.segments,
    );
}

/// Packs one group of rows into its place in each segment. Padding behind K is whole tiles at the end of the group.
fn pack_segments<T: Copy + Default + bytemuck::Pod>(
    layout: &WeightLayout,
    rows: Rows<T>,
    segments: &mut [&mut [u8]],
) {
    for (segment, out) in segments.iter_mut().enumerate() {
        let end = ((segment + 1) * layout.segment_k).min(layout.k);
        let columns = rows.columns((segment * layout.segment_k).min(end)..end);
        let out: &mut [T] = bytemuck::cast_slice_mut(out);
        let (used, padding) = out.split_at_mut(layout.native.b.strip_len(columns.row_len()));
        pack::pack_group(columns, layout.native.b, used);
        padding.fill(T::default());
    }
}
