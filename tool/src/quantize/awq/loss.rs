//! The loss of quantizing a weight with each candidate of its scales.

use ggml_rust_npu::gguf::{File, TensorInfo};
use rayon::prelude::*;

use super::super::block::{BLOCK, Format, to_f32};
use super::EXPONENTS;

/// Smallest number of rows from which the loss of super-blocks is estimated, if a matrix has as
/// many.
const SAMPLED_ROWS: usize = 64;

/// Most rows between two rows that are quantized.
const LONGEST_STEP: usize = 8;

/// Returns the loss of one matrix of a weight for each candidate.
pub fn losses_of(
    file: &File,
    tensor: &TensorInfo,
    matrix: usize,
    squares: &[f32],
    candidates: &[Vec<f32>],
    format: Format,
) -> [f64; EXPONENTS] {
    let k = tensor.ne[0];
    let weights: Vec<Vec<f32>> = (candidates.iter())
        .map(|scales| {
            squares
                .iter()
                .zip(scales)
                .map(|(x, s)| x / (s * s))
                .collect()
        })
        .collect();
    let data = file.data(tensor);
    let row_bytes = data.len() / tensor.rows();
    let matrix_bytes = tensor.ne[1] * row_bytes;
    let rows = data[matrix * matrix_bytes..][..matrix_bytes].par_chunks_exact(row_bytes);
    let loss_of_row = |[row, scaled, rounded]: &mut [Vec<f32>; 3], bytes: &[u8]| {
        to_f32(tensor.dtype, bytes, row);
        let mut losses = [0.0; EXPONENTS];
        for (loss, (scales, weights)) in losses.iter_mut().zip(candidates.iter().zip(&weights)) {
            for ((scaled, w), s) in scaled.iter_mut().zip(row.iter()).zip(scales) {
                *scaled = w * s;
            }
            format.round_row(scaled, weights, rounded);
            let pairs = scaled.chunks(BLOCK).zip(rounded.chunks(BLOCK));
            for ((scaled, rounded), weights) in pairs.zip(weights.chunks(BLOCK)) {
                let errors = scaled.iter().zip(rounded).map(|(x, y)| y - x);
                let squares = errors.zip(weights).map(|(error, w)| error * error * w);
                *loss += f64::from(squares.sum::<f32>());
            }
        }
        losses
    };
    // Super-blocks are fully quantized for each candidate, which is slow, so only some rows are
    // used.
    let step = match format.has_super_blocks() {
        true => (tensor.ne[1] / SAMPLED_ROWS).clamp(1, LONGEST_STEP),
        false => 1,
    };
    let add = |mut left: [f64; EXPONENTS], right: [f64; EXPONENTS]| {
        left.iter_mut()
            .zip(right)
            .for_each(|(sum, loss)| *sum += loss);
        left
    };
    let buffers = || [(); 3].map(|()| vec![0.0; k]);
    let losses = rows.step_by(step).map_init(buffers, loss_of_row);
    // CAST: at most 8.
    losses
        .reduce(|| [0.0; EXPONENTS], add)
        .map(|loss| loss * step as f64)
}
