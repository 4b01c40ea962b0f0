//! Transformations of a tensor before it is quantized, after which the model computes the same.

use std::collections::HashMap;
use std::sync::Arc;

use ggml_rust_npu::gguf::{File, TensorInfo};
use rayon::prelude::*;

use super::block::to_f32;
use super::rotate::FoldedRotation;

/// Transforms by tensor name.
pub type Transforms = HashMap<String, Transform>;

/// Columns are scaled, rows are divided, then both sides are rotated:
/// `rotate(w[n][k] * columns[k] / rows[n])`. Empty is all ones.
#[derive(Clone, Debug, Default)]
pub struct Transform {
    /// Factor of each column: the same for all experts, or those of each expert.
    pub columns: Vec<f32>,
    /// Rows of each expert, if each has its own columns.
    pub expert_rows: usize,
    /// Divisor of each row.
    pub rows: Vec<f32>,
    /// Rotates each row.
    pub input: Option<Arc<FoldedRotation>>,
    /// Rotates each column.
    pub output: Option<Arc<FoldedRotation>>,
    /// All elements become 1, whatever they are.
    pub ones: bool,
}

impl Transform {
    /// Transforms row `n` in place, but for the rotation of columns.
    pub fn apply(&self, n: usize, row: &mut [f32]) {
        if self.ones {
            return row.fill(1.0);
        }
        let divisor = self.rows.get(n).copied().unwrap_or(1.0);
        if self.columns.is_empty() {
            row.iter_mut().for_each(|w| *w /= divisor);
        } else {
            let first = match self.columns.len() == row.len() {
                true => 0,
                false => n / self.expert_rows * row.len(),
            };
            let columns = row.iter_mut().zip(&self.columns[first..]);
            columns.for_each(|(w, s)| *w = *w * s / divisor);
        }
        if let Some(rotation) = &self.input {
            rotation.apply(row);
        }
    }

    /// Returns the mean squares of the inputs after the transform, from those before it, expert by
    /// expert.
    pub fn importance(&self, mean_squares: &[f32]) -> Vec<f32> {
        self.inputs(&self.inputs(mean_squares))
    }

    /// Returns the inputs after the transform, or sums of them, from those before it, expert by
    /// expert.
    pub fn inputs(&self, inputs: &[f32]) -> Vec<f32> {
        debug_assert!(self.input.is_none(), "rotated inputs have other statistics");
        if self.columns.is_empty() {
            return inputs.to_vec();
        }
        let columns = inputs.iter().zip(self.columns.iter().cycle());
        columns.map(|(input, s)| input / s).collect()
    }

    /// Returns all transformed rows of a tensor, as `f32`, one after another, if columns are
    /// rotated, which needs all rows.
    pub fn whole(&self, file: &File, tensor: &TensorInfo) -> Option<Vec<f32>> {
        let rotation = self.output.as_ref()?;
        let (k, n) = (tensor.ne[0], tensor.rows());
        let data = file.data(tensor);
        let row_bytes = data.len() / n.max(1);
        let mut rows = vec![0.0; k * n];
        (rows.par_chunks_exact_mut(k).enumerate()).for_each(|(index, row)| {
            to_f32(tensor.dtype, &data[index * row_bytes..][..row_bytes], row);
            self.apply(index, row);
        });
        let mut columns = transposed(&rows, k);
        columns
            .par_chunks_exact_mut(n)
            .for_each(|column| rotation.apply(column));
        Some(transposed(&columns, n))
    }
}

/// Returns the matrix with rows of `width`, with rows and columns exchanged.
fn transposed(matrix: &[f32], width: usize) -> Vec<f32> {
    let height = matrix.len() / width;
    let mut out = vec![0.0; matrix.len()];
    (out.par_chunks_exact_mut(height).enumerate()).for_each(|(column, out)| {
        for (value, row) in out.iter_mut().zip(matrix.chunks_exact(width)) {
            *value = row[column];
        }
    });
    out
}
