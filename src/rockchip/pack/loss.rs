//! The loss of packing.

use half::f16;
use half::slice::HalfBitsSliceExt;
use rayon::prelude::*;
use rknpu_ops::{int4, pack};

use super::super::caps::Precision;
use super::super::layout::WeightLayout;
use super::RowSource;
use crate::loss::SquaredLoss;

impl WeightLayout {
    /// Measures the loss of packing a weight of one slice and one chunk. Rotated weights are
    /// compared: that changes no sum of squares.
    ///
    /// - `source.rows`: all rows; `scales`, `packed`: as [`super::pack_rows`] left them
    ///
    /// # Panics
    /// If a length disagrees.
    #[must_use]
    pub fn squared_loss(&self, source: RowSource, scales: &[f32], packed: &[u8]) -> SquaredLoss {
        assert_eq!((self.slices, self.chunks), (1, 1), "one chunk");
        let row_bytes = source.dtype.row_bytes(self.k).unwrap_or(0);
        let gn = self.native.b.gn;
        let rotation = self.rotation();
        let groups = source.rows.par_chunks(gn * row_bytes).enumerate();
        let sums = groups.map(|(group, rows)| {
            let count = rows.len() / row_bytes;
            let mut have = vec![0.0; count * self.k];
            self.unpack_group(group, count, scales, packed, &mut have);
            let (mut want, mut sum) = (vec![0.0; self.k], SquaredLoss::default());
            for (bytes, have) in rows.chunks_exact(row_bytes).zip(have.chunks_exact(self.k)) {
                source.row(bytes, &mut want);
                rotation.apply(&mut want);
                sum.add_row(&want, have);
            }
            sum
        });
        sums.reduce(SquaredLoss::default, |a, b| a + b)
    }

    /// The (rotated) values of `count` rows of a group.
    fn unpack_group(
        &self,
        group: usize,
        count: usize,
        scales: &[f32],
        packed: &[u8],
        out: &mut [f32],
    ) {
        let b = self.native.b;
        let group_bytes = b.bytes(self.segment_k, b.gn);
        for segment in 0..self.segments {
            let columns = self.segment_columns(segment);
            let k = columns.len();
            let at = self.block_offset(segment) + group * group_bytes;
            let set = if self.scale_sets() == 1 { 0 } else { segment };
            let scales = &scales[self.chunk_scales(0, 0, set)][group * b.gn..];
            // The end of the group is padding of K, which consists of whole tiles.
            let bytes = &packed[at..][..group_bytes];
            let values: Vec<f32> = match self.precision {
                Precision::Int8 | Precision::Int8Unrotated | Precision::Int8Wide => {
                    let mut rows = vec![0i8; count * k];
                    let bytes = bytemuck::cast_slice(&bytes[..b.strip_len(k)]);
                    pack::unpack_group(bytes, b, count, k, &mut rows);
                    rows.iter().map(|q| f32::from(*q)).collect()
                }
                Precision::Fp16 => {
                    let mut rows = vec![0u16; count * k];
                    let used = bytes[..b.strip_len(k) * 2].as_chunks::<2>().0;
                    let bits: Vec<u16> =
                        used.iter().map(|bits| u16::from_le_bytes(*bits)).collect();
                    pack::unpack_group(&bits, b, count, k, &mut rows);
                    let halves = rows[..].reinterpret_cast::<f16>();
                    halves.iter().map(|x| x.to_f32()).collect()
                }
                Precision::Int4 | Precision::Int4Int8 | Precision::Int4Fp16 => {
                    let mut rows = vec![0u8; count * k / 2];
                    int4::unpack_group_i4(&bytes[..b.strip_len(k) / 2], b, count, k, &mut rows);
                    // A nibble is a signed level; its value is the level plus 0.5.
                    let value = |nibble: u8| f32::from((nibble << 4).cast_signed() >> 4) + 0.5;
                    let pairs = rows.iter().flat_map(|byte| [byte & 15, byte >> 4]);
                    pairs.map(value).collect()
                }
            };
            let rows = values.chunks_exact(k).zip(out.chunks_exact_mut(self.k));
            for ((values, row), scale) in rows.zip(scales) {
                for (out, value) in row[columns.clone()].iter_mut().zip(values) {
                    *out = value * scale;
                }
            }
        }
    }
}
