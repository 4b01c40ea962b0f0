//! Packs weights without a device, as a buffer does when a model is loaded, some rows at a time.

use std::fmt;
use std::ops::Range;

use half::f16;
use hexagon_ops::layout::{MatrixLayout, TILE_DIM, WeightType};
use rayon::prelude::*;
use rknpu_ops::calibrate::Method;
use rknpu_ops::feedback::Feedback;

use crate::dequantize;
use crate::gguf::GgmlType;
use crate::hexagon;
use crate::loss::SquaredLoss;
use crate::packfile::{self, Entry, Fingerprint, LayoutTag, PackWriter, SourceHash, sampled};
use crate::rockchip::{self, pack::RowSource};
use crate::tensor::Dequantize;

/// A weight as a model file has it.
#[derive(Clone, Copy, Debug)]
pub struct Weight<'a> {
    /// The name of the weight.
    pub name: &'a str,
    /// The type of the weight.
    pub dtype: GgmlType,
    /// Elements in each dimension, innermost first.
    pub ne: [usize; 4],
    /// The bytes of the weight, in ggml's layout.
    pub data: &'a [u8],
    /// The result of [`RowSource::feedback`].
    pub feedback: &'a [Feedback],
}

/// The packed form of a weight.
#[derive(Clone, Copy, Debug)]
pub enum Form {
    /// Native rows for Rockchip, and the method that clips INT4 rows.
    Rockchip(rockchip::layout::WeightLayout, Method),
    /// Tiles for Hexagon.
    Hexagon(hexagon::layout::WeightLayout),
}

/// Packed bytes of tiles that are made at a time, for Hexagon; for Rockchip it is a chunk of N.
const PIECE_BYTES: usize = 4 << 20;

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Rockchip(layout, _) => {
                let (chunks, segments) = (layout.chunks, layout.segments);
                write!(f, "{}, {chunks} x {segments} blocks", layout.precision)
            }
            Self::Hexagon(layout) => {
                let how = match layout.form {
                    hexagon::layout::Conversion::Lossless => "lossless tiles",
                    hexagon::layout::Conversion::Requantized => "quantized again, tiles",
                    hexagon::layout::Conversion::Halved => "converted, tiles",
                    hexagon::layout::Conversion::Groups => "groups of 2 x 16",
                };
                write!(f, "{}, {how}", layout.weight())
            }
        }
    }
}

impl Form {
    /// Returns the tag of bytes that are packed in this form.
    #[must_use]
    pub fn tag(&self) -> LayoutTag {
        match self {
            Self::Rockchip(layout, _) => layout.tag(),
            Self::Hexagon(layout) => hexagon::pack::tag(layout),
        }
    }

    /// Returns the packed bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self {
            Self::Rockchip(layout, _) => layout.bytes(),
            Self::Hexagon(layout) => layout.bytes(),
        }
    }

    /// Returns the number of scales that belong to the packed bytes.
    #[must_use]
    pub fn scales(&self) -> usize {
        match self {
            Self::Rockchip(layout, _) => layout.scales(),
            Self::Hexagon(_) => 0,
        }
    }

    /// Returns the method that clips INT4 weights.
    #[must_use]
    pub fn calibration(&self) -> Method {
        match self {
            Self::Rockchip(_, method) => *method,
            Self::Hexagon(_) => Method::default(),
        }
    }

    /// Returns `true` if weights of a type can be packed here: their values are known, or not
    /// needed.
    #[must_use]
    pub fn can_pack(&self, dtype: GgmlType) -> bool {
        let needs_values = match self {
            Self::Rockchip(..) => dtype != GgmlType::F16,
            Self::Hexagon(layout) => layout.form.needs_values(),
        };
        !needs_values || dequantize::of(dtype).is_some()
    }

    /// Returns `true` if weights in floats become F16, whose values beyond its range a device
    /// multiplies in FP32.
    #[must_use]
    pub fn rounds_to_f16(&self) -> bool {
        matches!(self, Self::Hexagon(layout) if layout.form == hexagon::layout::Conversion::Halved)
    }

    /// Returns a finite value of such weights that F16 has no finite value for.
    #[must_use]
    pub fn beyond_f16(&self, dtype: GgmlType, bytes: &[u8]) -> Option<f32> {
        match self {
            Self::Hexagon(layout) => {
                hexagon::pack::beyond_f16(layout, dtype.tensor_type().0, bytes)
            }
            Self::Rockchip(..) => None,
        }
    }

    /// Packs a weight into a pack file.
    ///
    /// - `done(range)` is called after each piece, with the bytes of the weight that were read for
    ///   it; false stops
    /// - returns false if it was stopped; then the file is of no use
    ///
    /// # Errors
    /// Errors of the writer.
    ///
    /// # Panics
    /// If the weight's type and shape are others than those of this form, or [`Self::can_pack`] is
    /// false for its type.
    pub fn write(
        &self,
        weight: &Weight,
        writer: &mut PackWriter,
        mut done: impl FnMut(Range<usize>) -> bool,
    ) -> packfile::Result<bool> {
        let [_, n, s2, s3] = weight.ne;
        let row_bytes = weight.data.len() / (n * s2 * s3);
        let (dtype, way) = (weight.dtype.tensor_type().0, dequantize::of(weight.dtype));
        let sampled = sampled(weight.data);
        let (mut full, mut error) = (SourceHash::default(), SquaredLoss::default());
        let (mut out, mut scales) = (Vec::new(), Vec::new());
        for (piece, rows) in self.pieces().into_iter().enumerate() {
            let range = rows.start * row_bytes..rows.end * row_bytes;
            let bytes = &weight.data[range.clone()];
            full.update(bytes);
            let source = RowSource {
                dtype,
                rows: bytes,
                dequantize: way,
                calibration: self.calibration(),
                feedback: weight.feedback,
            };
            error = error + self.pack(piece, source, &mut out, &mut scales);
            writer.bytes(&out)?;
            if !done(range) {
                return Ok(false);
            }
        }
        let entry = self.entry(weight, [sampled, full.digest()], error);
        writer.end(entry, &scales).map(|()| true)
    }

    /// Returns the line of a pack's table for a weight.
    ///
    /// - `hashes`: the sampled and the full hash of the weight's bytes
    /// - `error`: the loss
    #[must_use]
    pub fn entry(&self, weight: &Weight, [sampled, full]: [u128; 2], error: SquaredLoss) -> Entry {
        Entry {
            source: Fingerprint {
                name: weight.name.into(),
                dtype: weight.dtype.number(),
                ne: weight.ne.map(|size| size as u64),
                sampled,
                full,
            },
            layout: self.tag(),
            offset: 0,
            bytes: self.bytes() as u64,
            scales: self.scales() as u64,
            payload: 0,
            error: error.relative(),
        }
    }

    /// Returns the rows, counted over all slices, that are packed at a time: their packed bytes
    /// follow each other.
    #[must_use]
    pub fn pieces(&self) -> Vec<Range<usize>> {
        match self {
            Self::Rockchip(layout, _) => {
                let chunks = |slice| {
                    (0..layout.chunks).map(move |chunk| {
                        let rows = layout.chunk_rows(chunk);
                        slice * layout.n + rows.start..slice * layout.n + rows.end
                    })
                };
                (0..layout.slices).flat_map(chunks).collect()
            }
            Self::Hexagon(layout) => {
                let panel_bytes = layout.matrix.panel().panel_bytes();
                let step = (PIECE_BYTES / panel_bytes).max(1) * TILE_DIM;
                let n = layout.matrix.n();
                let pieces = |slice| {
                    let part = move |row: usize| slice * n + row..slice * n + (row + step).min(n);
                    (0..n).step_by(step).map(part)
                };
                (0..layout.count()).flat_map(pieces).collect()
            }
        }
    }

    /// Packs a piece and returns its loss.
    ///
    /// - `piece`: its number in [`Self::pieces`]; `source`: its rows
    /// - `out`: receives its packed bytes; `scales`: its scales are appended
    ///
    /// # Panics
    /// If the rows are not those of the piece, or if values are needed and no dequantizer is given.
    pub fn pack(
        &self,
        piece: usize,
        source: RowSource<'_>,
        out: &mut Vec<u8>,
        scales: &mut Vec<f32>,
    ) -> SquaredLoss {
        out.clear();
        match self {
            Self::Rockchip(layout, _) => {
                let layout = layout.of_chunk(piece % layout.chunks);
                out.resize(layout.bytes(), 0);
                let first = scales.len();
                scales.resize(first + layout.scales(), layout.empty_scale());
                let scales = &mut scales[first..];
                rockchip::pack::pack_rows(&layout, source, 0..layout.n, scales, out);
                layout.squared_loss(source, scales, out)
            }
            Self::Hexagon(layout) => {
                let (weight, k) = (layout.weight(), layout.matrix.panel().k());
                let RowSource {
                    dtype,
                    rows,
                    dequantize,
                    ..
                } = source;
                let row_bytes = dtype.row_bytes(k).unwrap_or(1);
                let n = rows.len() / row_bytes;
                let layout = hexagon::layout::WeightLayout {
                    // PANIC: the type and K are those of a layout that exists.
                    matrix: MatrixLayout::new(weight, n, k).expect("a part of a layout"),
                    slices: [1, 1],
                    form: layout.form,
                };
                out.resize(layout.bytes(), 0);
                hexagon::pack::pack_rows(&layout, out, 0..n, rows, dequantize);
                match dequantize {
                    Some(source) if layout.form.needs_values() => {
                        conversion_error(layout.matrix, rows, source, out)
                    }
                    _ => SquaredLoss::default(),
                }
            }
        }
    }
}

/// Returns the loss in tiles of Q8_0 or F16.
fn conversion_error(
    matrix: MatrixLayout,
    rows: &[u8],
    source: &dyn Dequantize,
    packed: &[u8],
) -> SquaredLoss {
    let k = matrix.panel().k();
    let rows = rows.par_chunks_exact(rows.len() / matrix.n()).enumerate();
    let sums = rows.map(|(n, row)| {
        let (mut want, mut have) = (vec![0.0; k], vec![0.0; k]);
        let mut bytes = vec![0; matrix.ggml_row_bytes()];
        source.dequantize(row, &mut want);
        // PANIC: sizes and numbers are the layout's own.
        (matrix.unpack_row(packed, n, &mut bytes)).expect("a row of the layout");
        match matrix.panel().weight() {
            WeightType::F16 => {
                for (value, half) in have.iter_mut().zip(bytes.as_chunks().0) {
                    *value = f16::from_le_bytes(*half).to_f32();
                }
            }
            _ => {
                // PANIC: the table has an entry for Q8_0.
                let q8_0 = dequantize::of(GgmlType::Q8_0).expect("a way from Q8_0");
                q8_0.dequantize(&bytes, &mut have);
            }
        }
        let mut sum = SquaredLoss::default();
        sum.add_row(&want, &have);
        sum
    });
    sums.reduce(SquaredLoss::default, |a, b| a + b)
}
