//! Random weights of each type: blocks as ggml has them, and their values.

use half::f16;
use hexagon_ops::layout::{TILE_DIM, WeightType, group_elem};

use crate::dequantize;
use crate::gguf::GgmlType;

/// A matrix.
pub(super) struct Matrix {
    /// Rows of ggml's blocks. If weights are in groups, 32 rows hold a panel: row g of them has the
    /// groups g of the panel's tiles.
    pub(super) bytes: Vec<u8>,
    /// N × K.
    pub(super) values: Vec<f32>,
}

/// Returns an N × K matrix.
pub(super) fn random(
    weight: WeightType,
    n: usize,
    k: usize,
    numbers: &mut impl Iterator<Item = f32>,
) -> Matrix {
    let blocks = n * k / weight.block_elems();
    let mut bytes = Vec::with_capacity(blocks * weight.block_bytes());
    for _ in 0..blocks {
        let begin = bytes.len();
        bytes.extend(numbers.by_ref().take(weight.block_bytes()).map(byte));
        set_scales(weight, &mut bytes[begin..], numbers);
    }
    let values = match weight {
        WeightType::F16 => bytes
            .as_chunks::<2>()
            .0
            .iter()
            .map(|bytes| f16::from_le_bytes(*bytes).to_f32())
            .collect(),
        WeightType::Q4Tile | WeightType::Q8Tile => values_of_groups(weight, &bytes, k),
        _ => {
            let mut values = vec![0.0; n * k];
            // PANIC: every type with ggml's blocks has a dequantizer.
            let way = ggml(weight)
                .and_then(dequantize::of)
                .expect("a dequantizer of the type");
            way.dequantize(&bytes, &mut values);
            values
        }
    };
    Matrix { bytes, values }
}

/// Returns a number in [-1, 1) as a byte.
fn byte(number: f32) -> u8 {
    // CAST: between 0 and 255.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "see above"
    )]
    let byte = ((number + 1.0) * 128.0) as u8;
    byte
}

fn ggml(weight: WeightType) -> Option<GgmlType> {
    Some(match weight {
        WeightType::F16 | WeightType::Q4Tile | WeightType::Q8Tile => return None,
        WeightType::Q4_0 => GgmlType::Q4_0,
        WeightType::Q4_1 => GgmlType::Q4_1,
        WeightType::Q5_0 => GgmlType::Q5_0,
        WeightType::Q5_1 => GgmlType::Q5_1,
        WeightType::Q8_0 => GgmlType::Q8_0,
        WeightType::Iq4Nl => GgmlType::IQ4_NL,
        WeightType::Mxfp4 => GgmlType::MXFP4,
        WeightType::Q2K => GgmlType::Q2_K,
        WeightType::Q3K => GgmlType::Q3_K,
        WeightType::Q4K => GgmlType::Q4_K,
        WeightType::Q5K => GgmlType::Q5_K,
        WeightType::Q6K => GgmlType::Q6_K,
        WeightType::Iq4Xs => GgmlType::IQ4_XS,
    })
}

/// Sets the scales of a block of random bytes to about the same size in all blocks, and its minima
/// so that the values are spread evenly around 0.
// SOURCE: block structures of ggml-common.h, llama.cpp 0.5.0.
fn set_scales(weight: WeightType, block: &mut [u8], numbers: &mut impl Iterator<Item = f32>) {
    // A super-block multiplies this scale by further scales of 4 to 8 bits, so it has to be smaller
    // than that of a block.
    const OF_BLOCK: f32 = 1.0 / 64.0;
    const OF_SUPER_BLOCK: f32 = 1.0 / 2048.0;
    let scales: &[(usize, f32)] = match weight {
        WeightType::F16 => {
            for value in block.as_chunks_mut::<2>().0 {
                let number = numbers.next().unwrap_or(0.0);
                *value = f16::from_f32(number).to_le_bytes();
            }
            return;
        }
        WeightType::Mxfp4 => {
            // 2^-7 to 1.
            block[0] = 120 + block[0] % 8;
            return;
        }
        WeightType::Q4_0
        | WeightType::Q5_0
        | WeightType::Q8_0
        | WeightType::Iq4Nl
        | WeightType::Q4Tile
        | WeightType::Q8Tile => &[(0, OF_BLOCK)],
        WeightType::Q4_1 => &[(0, OF_BLOCK), (2, -8.0 * OF_BLOCK)],
        WeightType::Q5_1 => &[(0, OF_BLOCK), (2, -16.0 * OF_BLOCK)],
        WeightType::Q4K => &[(0, OF_SUPER_BLOCK), (2, 8.0 * OF_SUPER_BLOCK)],
        WeightType::Q5K => &[(0, OF_SUPER_BLOCK), (2, 16.0 * OF_SUPER_BLOCK)],
        WeightType::Q2K => &[(80, OF_SUPER_BLOCK), (82, 1.5 * OF_SUPER_BLOCK)],
        WeightType::Iq4Xs => &[(0, OF_SUPER_BLOCK)],
        WeightType::Q3K => &[(108, OF_SUPER_BLOCK)],
        WeightType::Q6K => &[(208, OF_SUPER_BLOCK)],
    };
    for (at, unit) in scales {
        // The scale is exact in FP16, and so are its products with 8-bit integers.
        let scale = (numbers.next().unwrap_or(0.0) * 4.0).round() + 8.0;
        block[*at..][..2].copy_from_slice(&f16::from_f32(scale * unit).to_le_bytes());
    }
}

/// Returns the values of groups of 2 × 16, a scale and 32 levels each.
fn values_of_groups(weight: WeightType, bytes: &[u8], k: usize) -> Vec<f32> {
    let mut values = vec![0.0; bytes.len() / weight.block_bytes() * TILE_DIM];
    let tiles = k / TILE_DIM;
    for (index, block) in bytes.chunks_exact(weight.block_bytes()).enumerate() {
        let (row, tile) = (index / tiles, index % tiles);
        let (panel, group) = (row / TILE_DIM, row % TILE_DIM);
        let scale = f16::from_le_bytes([block[0], block[1]]).to_f32();
        for i in 0..TILE_DIM {
            let level = match weight {
                WeightType::Q8Tile => f32::from(block[2 + i].cast_signed()),
                _ => f32::from(block[2 + i % 16] >> (i / 16 * 4) & 15) - 8.0,
            };
            let (in_k, in_n) = group_elem(group, i);
            let (n, k_at) = (panel * TILE_DIM + in_n, tile * TILE_DIM + in_k);
            values[n * k + k_at] = level * scale;
        }
    }
    values
}
