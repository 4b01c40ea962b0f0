//! Shared parts of this crate's tests: random ggml rows, their exact values, comparison, and the
//! device build.
#![allow(dead_code, reason = "each test uses its own part")]
#![expect(
    clippy::cast_possible_truncation,
    clippy::unwrap_used,
    reason = "random bytes are cut on purpose; a panic is a failure"
)]

pub mod matrix;

use std::path::{Path, PathBuf};
use std::process::Command;

use half::f16;
use hexagon_ops::layout::{LINE_BYTES, Line, MatrixLayout, TILE_DIM, WeightType};
pub use test_kit::Numbers;

const IQ4_NL: [f64; 16] = [
    -127., -104., -83., -65., -49., -35., -22., -10., 1., 13., 25., 38., 53., 69., 89., 113.,
];
const MXFP4: [f64; 16] = [
    0., 1., 2., 3., 4., 6., 8., 12., 0., -1., -2., -3., -4., -6., -8., -12.,
];

/// A random block, bytes as ggml stores them, with scales of ordinary models.
pub fn random_block(weight: WeightType, numbers: &mut Numbers) -> Vec<u8> {
    let mut block: Vec<u8> = (0..weight.block_bytes())
        .map(|_| numbers.bits() as u8)
        .collect();
    let scale = |numbers: &mut Numbers| f16::from_f32(numbers.float() * 0.02).to_le_bytes();
    match weight {
        WeightType::F16 => {
            block = (0..TILE_DIM)
                .flat_map(|_| f16::from_f32(numbers.float()).to_le_bytes())
                .collect()
        }
        WeightType::Mxfp4 => block[0] = 118 + numbers.below(8) as u8,
        WeightType::Q4_1 | WeightType::Q5_1 => {
            block[..2].copy_from_slice(&scale(numbers));
            block[2..4].copy_from_slice(&scale(numbers));
        }
        // The upper level's scales, many of which are subnormal.
        weight if weight.block_elems() != TILE_DIM => {
            let halves: &[usize] = match weight {
                WeightType::Q6K => &[208],
                WeightType::Q3K => &[108],
                WeightType::Iq4Xs => &[0],
                WeightType::Q2K => &[80, 82],
                _ => &[0, 2],
            };
            for at in halves {
                let d = f16::from_f32(numbers.float() * 0.0004);
                block[*at..at + 2].copy_from_slice(&d.to_le_bytes());
            }
        }
        _ => block[..2].copy_from_slice(&scale(numbers)),
    }
    block
}

/// The 32 values of a ggml block of 32, exactly.
pub fn block_values(weight: WeightType, block: &[u8]) -> [f64; TILE_DIM] {
    let f16_at = |i: usize| f16::from_le_bytes([block[i], block[i + 1]]).to_f64();
    let nibble =
        |qs: &[u8], k: usize| usize::from(if k < 16 { qs[k] & 15 } else { qs[k - 16] >> 4 });
    let five_bits = |bytes: &[u8], k: usize| {
        let fifth = bytes[k / 8] >> (k % 8) & 1;
        nibble(&bytes[4..], k) as f64 + 16.0 * f64::from(fifth)
    };
    std::array::from_fn(|k| match weight {
        WeightType::F16 => f16_at(2 * k),
        WeightType::Q4_0 | WeightType::Q4Tile => f16_at(0) * (nibble(&block[2..], k) as f64 - 8.0),
        WeightType::Q4_1 => f16_at(0) * nibble(&block[4..], k) as f64 + f16_at(2),
        WeightType::Q8_0 | WeightType::Q8Tile => f16_at(0) * f64::from(block[2 + k].cast_signed()),
        WeightType::Iq4Nl => f16_at(0) * IQ4_NL[nibble(&block[2..], k)],
        WeightType::Mxfp4 => 2_f64.powi(i32::from(block[0]) - 128) * MXFP4[nibble(&block[1..], k)],
        WeightType::Q5_0 => f16_at(0) * (five_bits(&block[2..], k) - 16.0),
        WeightType::Q5_1 => f16_at(0) * five_bits(&block[4..], k) + f16_at(2),
        _ => unreachable!("a super-block"),
    })
}

/// The exact values of a super-block. Each is a sum of terms, whose magnitudes are returned as
/// well.
///
/// SOURCE: dequantize_row_q4_K, dequantize_row_q5_K, dequantize_row_q6_K and get_scale_min_k4,
/// ggml-quants.c.
fn super_block_values(weight: WeightType, block: &[u8]) -> Vec<(f64, f64)> {
    match weight {
        WeightType::Q6K => return six_bit_values(block),
        WeightType::Iq4Xs => return looked_up_values(block),
        WeightType::Q3K | WeightType::Q2K => return few_bit_values(weight, block),
        _ => {}
    }
    // First the fifth bits, then the nibbles.
    let quants = if weight == WeightType::Q5K { 48 } else { 16 };
    let f16_at = |i: usize| f16::from_le_bytes([block[i], block[i + 1]]).to_f64();
    let (d, dmin, scales) = (f16_at(0), f16_at(2), &block[4..16]);
    let value = |i: usize| {
        let (sub, l) = (i / 32, i % 32);
        let (s, m) = if sub < 4 {
            (scales[sub] & 63, scales[sub + 4] & 63)
        } else {
            (
                scales[sub + 4] & 15 | scales[sub - 4] >> 6 << 4,
                scales[sub + 4] >> 4 | scales[sub] >> 6 << 4,
            )
        };
        let byte = block[quants + 32 * (sub / 2) + l];
        let nibble = if sub % 2 == 0 { byte & 15 } else { byte >> 4 };
        let q = match weight {
            WeightType::Q5K => nibble | (block[16 + l] >> sub & 1) << 4,
            _ => nibble,
        };
        let (product, min) = (d * f64::from(s) * f64::from(q), dmin * f64::from(m));
        (product - min, product.abs() + min.abs())
    };
    (0..256).map(value).collect()
}

/// The values of a super-block of Q6_K; see [`super_block_values`].
fn six_bit_values(block: &[u8]) -> Vec<(f64, f64)> {
    let d = f16::from_le_bytes([block[208], block[209]]).to_f64();
    let mut out = vec![(0.0, 0.0); 256];
    for half in 0..2 {
        let (ql, qh) = (&block[64 * half..], &block[128 + 32 * half..]);
        let scales = &block[192 + 8 * half..];
        for l in 0..32 {
            let quants = [
                ql[l] & 15 | (qh[l] & 3) << 4,
                ql[l + 32] & 15 | (qh[l] >> 2 & 3) << 4,
                ql[l] >> 4 | (qh[l] >> 4 & 3) << 4,
                ql[l + 32] >> 4 | (qh[l] >> 6) << 4,
            ];
            for (part, q) in quants.into_iter().enumerate() {
                let scale = f64::from(scales[l / 16 + 2 * part].cast_signed());
                let value = d * scale * (f64::from(q) - 32.0);
                out[128 * half + 32 * part + l] = (value, value.abs());
            }
        }
    }
    out
}

/// The values of a super-block of IQ4_XS; see [`super_block_values`].
///
/// SOURCE: dequantize_row_iq4_xs, ggml-quants.c.
fn looked_up_values(block: &[u8]) -> Vec<(f64, f64)> {
    let d = f16::from_le_bytes([block[0], block[1]]).to_f64();
    let high = u16::from_le_bytes([block[2], block[3]]);
    let value = |i: usize| {
        let (group, l) = (i / 32, i % 32);
        let low = u16::from(block[4 + group / 2] >> (4 * (group % 2)) & 15);
        let scale = f64::from(low | (high >> (2 * group) & 3) << 4) - 32.0;
        let byte = block[8 + 16 * group + l % 16];
        let nibble = if l < 16 { byte & 15 } else { byte >> 4 };
        let value = d * scale * IQ4_NL[usize::from(nibble)];
        (value, value.abs())
    };
    (0..256).map(value).collect()
}

/// The values of a super-block of Q3_K or Q2_K; see [`super_block_values`].
///
/// SOURCE: dequantize_row_q3_K, dequantize_row_q2_K, ggml-quants.c.
fn few_bit_values(weight: WeightType, block: &[u8]) -> Vec<(f64, f64)> {
    let f16_at = |i: usize| f16::from_le_bytes([block[i], block[i + 1]]).to_f64();
    // Each 128 elements have 32 bytes: bit pair i of a byte belongs to the i-th 32 elements.
    let pair = |at: usize, i: usize| {
        f64::from(block[at + 32 * (i / 128) + i % 32] >> (2 * (i % 128 / 32)) & 3)
    };
    let value = |i: usize| {
        let sub = i / 16;
        if weight == WeightType::Q2K {
            let both = block[sub];
            let product = f16_at(80) * f64::from(both & 15) * pair(16, i);
            let min = f16_at(82) * f64::from(both >> 4);
            return (product - min, product.abs() + min.abs());
        }
        let low = block[96 + sub % 8] >> (4 * (sub / 8)) & 15;
        let high = block[104 + sub % 4] >> (2 * (sub / 4)) & 3;
        let scale = f64::from(low | high << 4) - 32.0;
        let third = f64::from(block[i % 32] >> (i / 32) & 1);
        let value = f16_at(108) * scale * (pair(32, i) + 4.0 * third - 4.0);
        (value, value.abs())
    };
    (0..256).map(value).collect()
}

/// The exact values of a block of any type. Each is a sum of terms, whose magnitudes are returned
/// as well: several terms where kernels round each of them.
pub fn terms(weight: WeightType, block: &[u8]) -> Vec<(f64, f64)> {
    match weight.block_elems() {
        TILE_DIM => (block_values(weight, block).into_iter())
            .map(|value| (value, 0.0))
            .collect(),
        _ => super_block_values(weight, block),
    }
}

/// Returns the byte of quants that are zero, for groups.
fn weight_zero(weight: WeightType) -> u8 {
    match weight {
        WeightType::Q4Tile => 0x88,
        _ => 0,
    }
}

/// A random packed matrix and its exact values.
pub struct Weights {
    pub layout: MatrixLayout,
    pub lines: Vec<Line>,
    /// `values[n][k]`.
    pub values: Vec<Vec<f64>>,
    /// `terms[n][k]`: magnitudes of the terms that are rounded before they become a value; 0 where
    /// the value is one rounded product.
    pub terms: Vec<Vec<f64>>,
}

impl Weights {
    /// `k` must be whole blocks.
    pub fn random(weight: WeightType, n: usize, k: usize, numbers: &mut Numbers) -> Self {
        let layout = MatrixLayout::new(weight, n, k).unwrap();
        let mut lines = vec![Line::ZERO; layout.matrix_bytes() / LINE_BYTES];
        let mut values = vec![vec![0.0; k]; n];
        let mut magnitudes = vec![vec![0.0; k]; n];
        for row in 0..layout.block_rows() {
            let mut blocks: Vec<Vec<u8>> = (0..k / weight.block_elems())
                .map(|_| random_block(weight, numbers))
                .collect();
            if weight.is_grouped() {
                // Columns that do not exist are zeros.
                let first = row / TILE_DIM * TILE_DIM + row % 2 * 16;
                let (present, zero) = (n.saturating_sub(first).min(16), weight_zero(weight));
                for quants in blocks
                    .iter_mut()
                    .flat_map(|block| block[2..].chunks_mut(16))
                {
                    quants[present..].fill(zero);
                }
            }
            layout
                .pack_row(bytemuck::cast_slice_mut(&mut lines), row, &blocks.concat())
                .unwrap();
            for (kt, block) in blocks.iter().enumerate() {
                for (i, (value, magnitude)) in terms(weight, block).into_iter().enumerate() {
                    let (at, column) = match weight {
                        // Group g has rows 2(g/2) and the next one, and 16 columns starting at
                        // 16(g%2); the first row comes first.
                        WeightType::Q4Tile | WeightType::Q8Tile => {
                            let (strip, g) = (row / TILE_DIM * TILE_DIM, row % TILE_DIM);
                            (g / 2 * 2 + i / 16, strip + g % 2 * 16 + i % 16)
                        }
                        _ => (i, row),
                    };
                    let at = kt * weight.block_elems() + at;
                    if let Some(values) = values.get_mut(column) {
                        (values[at], magnitudes[column][at]) = (value, magnitude);
                    }
                }
            }
        }
        Self {
            layout,
            lines,
            values,
            terms: magnitudes,
        }
    }

    pub fn panel_lines(&self, nt: usize) -> &[Line] {
        let lines = self.layout.panel().panel_lines();
        &self.lines[nt * lines..(nt + 1) * lines]
    }
}

/// The exact product of a row of activations and a row of weights.
pub fn dot(act: &[f32], weights: &[f64]) -> f64 {
    act.iter()
        .zip(weights)
        .map(|(a, w)| f64::from(*a) * w)
        .sum()
}

/// Why a test cannot run here.
pub type Skip = String;

/// The libraries that FastRPC loads: V73 has a second one, with qfloat.
pub const LIBRARIES: [&str; 7] = ["v68", "v69", "v73", "v73q", "v75", "v79", "v81"];

/// Builds the guest program with the flags of a library.
pub fn guest(library: &str) -> Result<PathBuf, Skip> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("guest");
    device_build("guest.sh", &[library], &target)
}

/// Builds a library that FastRPC loads.
pub fn skel(library: &str) -> Result<PathBuf, Skip> {
    // The library is in target/skel, next to the temporary folder, where a user also looks for it.
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("skel");
    device_build("skel.sh", &[library], &target)
}

/// Runs one of the scripts that build for the DSP, and returns the path that it prints.
fn device_build(script: &str, args: &[&str], target_dir: &Path) -> Result<PathBuf, Skip> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tools")
        .join(script);
    let output = Command::new(path)
        .args(args)
        .env("TARGET_DIR", target_dir)
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("RUSTUP_TOOLCHAIN")
        .output()
        .map_err(|e| format!("cannot run {script}: {e}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().into());
    }
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    // SOURCE: tools/library.sh, `need_toolchain`.
    let is_missing = output.status.code() == Some(3);
    assert!(is_missing, "{script} {args:?} fails:\n{error}");
    Err(error.lines().next().unwrap_or_default().into())
}
