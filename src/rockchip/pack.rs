//! Packs the rows of a weight into the NPU's native layout, group by group, on all threads. For
//! INT8 and INT4 this quantizes, too: see [`super::layout`].

use std::ops::Range;

use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use rayon::prelude::*;
use rknpu_ops::calibrate::Method;
use rknpu_ops::feedback::{self, Feedback, RoundingScratch};
use rknpu_ops::int4;
use rknpu_ops::layout::NativeB;
use rknpu_ops::pack::{self, Rows};
use rknpu_ops::quant;
use rknpu_ops::rotation::Rotation;

use super::caps::Precision;
use super::layout::WeightLayout;
use crate::tensor::{DType, Dequantize};

mod loss;

/// ggml's rows of one weight: contiguous in memory.
#[derive(Clone, Copy)]
pub struct RowSource<'a> {
    /// Type of the elements.
    pub dtype: DType,
    /// The rows of all slices, one after another.
    pub rows: &'a [u8],
    /// ggml's dequantizer; needed for quantized types.
    pub dequantize: Option<&'a dyn Dequantize>,
    /// Method that clips INT4 weights.
    pub calibration: Method,
    /// Feedback for each K segment of rotated integer weights, to compensate rounding errors; empty
    /// for none.
    pub feedback: &'a [Feedback],
}

impl RowSource<'_> {
    /// The values of one row.
    fn row(&self, bytes: &[u8], out: &mut [f32]) {
        match (self.dtype, self.dequantize) {
            (DType::F16, _) => {
                for (value, pair) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *value = f16::from_le_bytes([pair[0], pair[1]]).to_f32();
                }
            }
            (_, Some(dequantize)) => dequantize.dequantize(bytes, out),
            // The planner admits a quantized tensor only together with its dequantizer.
            (_, None) => unreachable!("a quantized type without a dequantizer"),
        }
    }
}

/// One group of rows that is being packed: its place in each segment of its chunk.
struct Group<'a> {
    /// First row, counted over all slices without padding.
    first_row: usize,
    /// Rows that exist.
    rows: usize,
    /// Destination in each segment.
    segments: Vec<&'a mut [u8]>,
    /// Scales of the group's rows, in each set.
    scales: Vec<&'a mut [f32]>,
}

/// Packs the rows `rows` (counted over all slices) and, as groups are packed whole, their
/// neighbours in the group.
///
/// - `source.rows`: all rows of the tensor
/// - `scales`: [`WeightLayout::scales`] elements; `out`: [`WeightLayout::bytes`] bytes
///
/// # Panics
/// If a length is wrong, or a quantized type comes without `dequantize`; the planner accepts
/// neither.
pub fn pack_rows(
    layout: &WeightLayout,
    source: RowSource,
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
    let rotation = layout.rotation();
    let packer = Packer {
        layout,
        source,
        rotation,
    };
    groups
        .into_par_iter()
        .for_each_init(Work::default, |work, group| {
            let bytes = &source.rows[group.first_row * row_bytes..][..group.rows * row_bytes];
            match layout.precision {
                Precision::Int8 | Precision::Int8Unrotated | Precision::Int8Wide => {
                    packer.int8(bytes, group, work)
                }
                Precision::Fp16 => packer.fp16(bytes, group, work),
                Precision::Int4 | Precision::Int4Int8 | Precision::Int4Fp16 => {
                    packer.int4(bytes, group, work)
                }
            }
        });
}

/// Scratch of one thread: the rows of a group.
#[derive(Default)]
struct Work {
    values: Vec<f32>,
    int8: Vec<i8>,
    bits: Vec<u16>,
    nibbles: Vec<u8>,
    rounding: RoundingScratch,
}

/// Divides the destination into groups of `gn` rows. Groups in which no row exists are left out.
fn groups<'a>(layout: &WeightLayout, scales: &'a mut [f32], out: &'a mut [u8]) -> Vec<Group<'a>> {
    let NativeB { gn, .. } = layout.native.b;
    let group_bytes = layout.native.b.bytes(layout.segment_k, gn);
    let groups_per_chunk = layout.chunk_n / gn;
    let sets = layout.scale_sets();
    let mut scales = scales.chunks_exact_mut((sets * layout.chunk_n).max(1));
    let mut all = Vec::with_capacity(layout.slices * layout.chunks * groups_per_chunk);
    let chunks = out.chunks_exact_mut(layout.block_stride() * layout.segments);
    for (index, chunk) in chunks.enumerate() {
        let (slice, chunk_index) = (index / layout.chunks, index % layout.chunks);
        let mut segments: Vec<_> = chunk
            .chunks_exact_mut(layout.block_stride())
            .map(|block| block[..layout.block_bytes()].chunks_exact_mut(group_bytes))
            .collect();
        let mut scales: Vec<_> = (scales.next().unwrap_or_default())
            .chunks_exact_mut(layout.chunk_n)
            .map(|set| set.chunks_exact_mut(gn))
            .collect();
        for group in 0..groups_per_chunk {
            let first = chunk_index * layout.chunk_n + group * gn;
            let rows = first.min(layout.n)..(first + gn).min(layout.n);
            let segments: Vec<_> = segments.iter_mut().filter_map(Iterator::next).collect();
            let scales: Vec<_> = scales.iter_mut().filter_map(Iterator::next).collect();
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

/// Parameters that all groups of a weight share.
struct Packer<'a> {
    layout: &'a WeightLayout,
    source: RowSource<'a>,
    rotation: Rotation,
}

impl Packer<'_> {
    fn int8(&self, bytes: &[u8], mut group: Group, work: &mut Work) {
        let k = self.layout.k;
        work.values.resize(k, 0.0);
        work.int8.resize(group.rows * k, 0);
        let rows = bytes.chunks_exact(bytes.len() / group.rows);
        let scales = group.scales.iter_mut().flat_map(|set| set.iter_mut());
        for ((bytes, int8), scale) in rows.zip(work.int8.chunks_exact_mut(k)).zip(scales) {
            self.source.row(bytes, &mut work.values);
            self.rotation.apply(&mut work.values);
            let exact = match self.layout.precision {
                Precision::Int8Unrotated => quant::exact_row_i8(&work.values, int8),
                _ => None,
            };
            *scale = exact.unwrap_or_else(|| match self.source.feedback {
                [] => quant::quantize_row_i8(&work.values, int8),
                feedback => {
                    feedback::quantize_row_i8(feedback, &work.values, &mut work.rounding, int8)
                }
            });
        }
        self.pack(Rows::new(&work.int8, group.rows, k, k), &mut group.segments);
    }

    fn fp16(&self, bytes: &[u8], mut group: Group, work: &mut Work) {
        let k = self.layout.k;
        work.bits.resize(group.rows * k, 0);
        if self.source.dtype == DType::F16 {
            for (bits, pair) in work.bits.iter_mut().zip(bytes.chunks_exact(2)) {
                *bits = u16::from_le_bytes([pair[0], pair[1]]);
            }
        } else {
            work.values.resize(k, 0.0);
            let rows = bytes.chunks_exact(bytes.len() / group.rows);
            let scales = group.scales.iter_mut().flat_map(|set| set.iter_mut());
            for ((bytes, bits), scale) in rows.zip(work.bits.chunks_exact_mut(k)).zip(scales) {
                self.source.row(bytes, &mut work.values);
                let halves = bits.reinterpret_cast_mut::<f16>();
                let in_range = |x: &f32| x.abs() <= f16::MAX.to_f32();
                *scale = if work.values.iter().all(in_range) {
                    halves.convert_from_f32_slice(&work.values);
                    1.0
                } else {
                    quant::convert_row_f16(&work.values, halves)
                };
            }
        }
        self.pack(Rows::new(&work.bits, group.rows, k, k), &mut group.segments);
    }

    fn int4(&self, bytes: &[u8], mut group: Group, work: &mut Work) {
        let (k, layout) = (self.layout.k, self.layout);
        work.values.resize(group.rows * k, 0.0);
        work.nibbles.resize(group.rows * k / 2, 0);
        let rows = bytes.chunks_exact(bytes.len() / group.rows);
        for (bytes, values) in rows.zip(work.values.chunks_exact_mut(k)) {
            self.source.row(bytes, values);
            self.rotation.apply(values);
        }
        let values = Rows::new(&work.values, group.rows, k, k);
        let method = self.source.calibration;
        int4::quantize_group_i4(
            values,
            layout.segment_k,
            method,
            self.source.feedback,
            &mut work.nibbles,
            &mut group.scales,
        );
        let rows = Rows::new(&work.nibbles, group.rows, k / 2, k / 2);
        for (segment, out) in group.segments.iter_mut().enumerate() {
            let columns = layout.segment_columns(segment);
            let part = rows.columns(columns.start / 2..columns.end / 2);
            let (used, padding) = out.split_at_mut(layout.native.b.strip_len(columns.len()) / 2);
            int4::pack_group_i4(part, layout.native.b, used);
            padding.fill(0);
        }
    }

    /// Packs one group of rows into its place in each segment. Padding after K is whole tiles at
    /// the end of the group.
    fn pack<T: Copy + Default + bytemuck::Pod>(&self, rows: Rows<T>, segments: &mut [&mut [u8]]) {
        let layout = self.layout;
        for (segment, out) in segments.iter_mut().enumerate() {
            let columns = rows.columns(layout.segment_columns(segment));
            let out: &mut [T] = bytemuck::cast_slice_mut(out);
            let (used, padding) = out.split_at_mut(layout.native.b.strip_len(columns.row_len()));
            pack::pack_group(columns, layout.native.b, used);
            padding.fill(T::default());
        }
    }
}
