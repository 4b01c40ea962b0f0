//! A tensor that is being converted from the source to the output.

use ggml_rust_npu::gguf::{File, GgmlType, TensorInfo};
use hexagon_ops::layout::WeightType;
use rayon::prelude::*;

use super::block::{ErrorWeights, Format, to_f32};
use super::lpbq;
use super::transform::Transform;
use crate::ToolError;

/// Rows that are quantized between two writes.
const BATCH_ROWS: usize = 1024;

/// A tensor on its way.
#[derive(Debug)]
pub struct TensorJob<'a> {
    /// Name in the new file.
    pub name: String,
    pub source: &'a TensorInfo,
    pub dtype: GgmlType,
    /// The new type; `None` for unchanged bytes.
    pub format: Option<Format>,
    pub transform: Transform,
    /// Mean square of each input, expert by expert.
    pub importance: Option<Vec<f32>>,
    /// Elements of a low-power block.
    pub lpbq: Option<usize>,
    /// The type of groups in which the pack gets the tensor.
    pub tile_group: Option<WeightType>,
}

/// The rows of a tensor after its transform.
#[derive(Debug)]
pub struct RowReader<'a> {
    job: &'a TensorJob<'a>,
    data: &'a [u8],
    /// All rows, if the transform needs all of them to make one.
    whole: Option<Vec<f32>>,
}

impl RowReader<'_> {
    /// Writes row `n`, counted over all matrices, to `out`.
    pub fn read(&self, n: usize, out: &mut [f32]) {
        if let Some(whole) = &self.whole {
            return out.copy_from_slice(&whole[n * out.len()..][..out.len()]);
        }
        let row_bytes = self.data.len() / self.job.source.rows();
        let bytes = &self.data[n * row_bytes..][..row_bytes];
        to_f32(self.job.source.dtype, bytes, out);
        self.job.transform.apply(n, out);
    }
}

impl TensorJob<'_> {
    /// Appends row `n`, quantized.
    ///
    /// # Errors
    /// Text that names the row, if it is out of the format's range.
    fn quantize_row(
        &self,
        format: Format,
        n: usize,
        row: &[f32],
        out: &mut Vec<u8>,
    ) -> Result<(), ToolError> {
        let range = self.lpbq.map_or_else(|| format.range(), |_| lpbq::RANGE);
        if let Some(k) = row.iter().position(|x| x.abs() > range || x.is_nan()) {
            let (name, x) = (&self.name, row[k]);
            let what = match (x.is_finite(), format.dtype().name()) {
                (true, dtype) => format!("at most {range} is in the range of {dtype}"),
                (false, _) => "no finite number".to_owned(),
            };
            return Err(format!("row {n} of {name}: weight {k} is {x:e}, {what}").into());
        }
        let Some(length) = self.lpbq else {
            format.quantize_row(row, self.importance_of(n), out);
            return Ok(());
        };
        let weights = self.importance_of(n);
        let weights = weights.map(|importance| ErrorWeights::new(row, importance).row());
        let row = lpbq::GridRow::quantize(row, length, weights.as_deref());
        match format {
            Format::Q4_0 => row.push_q4_0(out),
            _ => row.push_q8_0(out),
        }
        Ok(())
    }

    /// Returns the mean square of each input of row `n`, counted over all matrices, if it is known.
    pub fn importance_of(&self, n: usize) -> Option<&[f32]> {
        let [k, rows, ..] = self.source.ne;
        let importance = self.importance.as_deref()?;
        importance.get(n / rows * k..)?.get(..k)
    }

    /// Returns the tensor's rows.
    pub fn rows<'a>(&'a self, file: &'a File) -> RowReader<'a> {
        RowReader {
            job: self,
            data: file.data(self.source),
            whole: self.transform.whole(file, self.source),
        }
    }

    /// Returns the tensor's new bytes, some rows at a time.
    pub fn batches<'a>(
        &'a self,
        file: &'a File,
        format: Format,
    ) -> impl Iterator<Item = Result<Vec<u8>, ToolError>> + 'a {
        let (k, count) = (self.source.ne[0], self.source.rows());
        let rows = self.rows(file);
        (0..count).step_by(BATCH_ROWS).map(move |first| {
            let batch: Vec<usize> = (first..(first + BATCH_ROWS).min(count)).collect();
            let of_rows = |part: &[usize]| {
                let (mut row, mut out) = (vec![0.0; k], Vec::new());
                for n in part {
                    rows.read(*n, &mut row);
                    self.quantize_row(format, *n, &row, &mut out)?;
                }
                Ok(out)
            };
            let parts = batch.par_chunks(16).map(of_rows);
            let parts: Result<Vec<Vec<u8>>, ToolError> = parts.collect();
            Ok(parts?.concat())
        })
    }
}
