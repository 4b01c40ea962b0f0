//! Runs one host stage a number of times, so that scripts/aarch64.py can count instructions per
//! element under qemu.
//!
//! `instructions` lists the stages and their rows; `instructions STAGE VERSION K TIMES` runs one,
//! VERSION being `scalar` or, on aarch64, `neon`.

use std::hint::black_box;
use std::ops::Range;

use half::f16;
use rknpu_ops::int4::{Digits, Product, ScaledOutput, SumTile, factors};
use rknpu_ops::layout::{Elem, NativeC};
#[cfg(target_arch = "aarch64")]
use rknpu_ops::neon;
use rknpu_ops::pack::{NativeOutput, Rows, StridedRows};
use rknpu_ops::quant::HADAMARD_BLOCK_MAX;
use rknpu_ops::scalar;

/// Stages and their rows.
const STAGES: [(&str, usize); 16] = [
    ("hadamard", 1),
    ("absmax", 1),
    ("quantize_i8", 1),
    ("scale_to_f16", 1),
    ("interleave_i8_by_16", 32),
    ("interleave_i8_by_8", 32),
    ("interleave_f16_by_8", 32),
    ("interleave_i8_by_32", 32),
    ("unpack_i32_one_row", 1),
    ("unpack_i32", 32),
    ("unpack_i32_by_8", 32),
    ("unpack_f32_two_segments", 32),
    ("scaled_i16_one_row", 1),
    ("scaled_i16_one_digit", 32),
    ("scaled_i16_two_digits", 32),
    ("scaled_i32", 32),
];

/// Runs `stage` of one version `times` times on rows of `k` elements.
macro_rules! run {
    ($version:ident, $stage:expr, $k:expr, $times:expr) => {{
        let (k, rows) = ($k, 32);
        // As in a rotation: whole blocks from the front; if they do not fill the row, one more
        // block that ends with it.
        let block = (1usize << k.ilog2()).min(HADAMARD_BLOCK_MAX);
        let whole = k / block * block;
        let values = vec![0.75f32; rows * k];
        let (mut row, mut out) = (values[..k].to_vec(), values.clone());
        let (bytes, mut native) = (vec![3i8; rows * k], vec![0i8; rows * k]);
        let (halves, mut native_f16) = (vec![f16::ONE; rows * k], vec![f16::ZERO; rows * k]);
        let (sums, narrow) = (vec![5i32; rows * k], vec![5i16; 2 * rows * k]);
        let layout = NativeC {
            t: 4,
            elem: Elem::I32,
        };
        for _ in 0..$times {
            match $stage {
                "hadamard" => {
                    $version::hadamard(black_box(&mut row[..whole]), block, 0.25);
                    if whole < k {
                        $version::hadamard(black_box(&mut row[k - block..]), block, 0.25);
                    }
                }
                "absmax" => {
                    black_box($version::absmax_bits(black_box(&row)));
                }
                "quantize_i8" => $version::quantize(black_box(&row), 3.0, &mut native[..k]),
                "scale_to_f16" => {
                    $version::scale_to_f16(black_box(&row), 2.0, &mut native_f16[..k]);
                }
                "interleave_i8_by_8" => {
                    $version::interleave(Rows::new(&bytes, rows, k, k), 8, rows, &mut native);
                }
                "interleave_i8_by_16" => {
                    $version::interleave(Rows::new(&bytes, rows, k, k), 16, rows, &mut native);
                }
                "interleave_i8_by_32" => {
                    $version::interleave(Rows::new(&bytes, rows, k, k), 32, rows, &mut native);
                }
                "interleave_f16_by_8" => {
                    $version::interleave(Rows::new(&halves, rows, k, k), 8, rows, &mut native_f16);
                }
                "unpack_i32_one_row" => {
                    let segments = [&sums[..k]];
                    let c = NativeOutput::new(&segments, layout, 1);
                    let mut dst = StridedRows::new(&mut out, k, k);
                    $version::unpack_i32(c, 0..1, |_| 0.5, &values[..k], &mut dst);
                }
                "unpack_i32" => {
                    let segments = [sums.as_slice()];
                    let c = NativeOutput::new(&segments, layout, rows);
                    let mut dst = StridedRows::new(&mut out, k, k);
                    $version::unpack_i32(c, 0..rows, |_| 0.5, &values[..k], &mut dst);
                }
                "unpack_f32_two_segments" => {
                    let segments = [values.as_slice(), values.as_slice()];
                    let c = NativeOutput::new(&segments, layout, rows);
                    let mut dst = StridedRows::new(&mut out, k, k);
                    $version::unpack_f32(c, 0..rows, |_| 0.5, k, &mut dst);
                }
                "unpack_i32_by_8" => {
                    let segments = [sums.as_slice()];
                    let c = NativeOutput::new(&segments, NativeC { t: 8, ..layout }, rows);
                    let mut dst = StridedRows::new(&mut out, k, k);
                    $version::unpack_i32(c, 0..rows, |_| 0.5, &values[..k], &mut dst);
                }
                "scaled_i16_one_row" => {
                    let (c, tile) = (&narrow[..2 * k], $version::scaled_tile);
                    scaled(c, &values, (8, 1, Digits::Two), tile, &mut out[..k]);
                }
                "scaled_i16_one_digit" => {
                    let (c, tile) = (&narrow[..rows * k], $version::scaled_tile);
                    scaled(c, &values, (8, rows, Digits::One), tile, &mut out);
                }
                "scaled_i16_two_digits" => {
                    let (c, tile) = (&narrow[..], $version::scaled_tile);
                    scaled(c, &values, (8, rows, Digits::Two), tile, &mut out);
                }
                "scaled_i32" => {
                    let (c, tile) = (&sums[..], $version::scaled_tile);
                    scaled(c, &values, (4, rows, Digits::One), tile, &mut out);
                }
                other => return Err(format!("no stage {other}")),
            }
        }
        black_box((&row, &out, &native, &native_f16));
    }};
}

/// One tile after the other, as `int4::unpack_scaled` does it.
///
/// - `(t, rows, digits)`: columns of a native slice, rows of the product, digits of the activations
fn scaled<T: Copy>(
    c: &[T],
    values: &[f32],
    (t, rows, digits): (usize, usize, Digits),
    tile: impl Fn(Product<'_, T>, Range<usize>, Range<usize>, &mut SumTile),
    out: &mut [f32],
) {
    let (k, per_row) = (out.len() / rows, factors(1));
    let segments = [ScaledOutput {
        c: black_box(c),
        w_scales: &values[..k],
    }];
    let layout = NativeC { t, elem: Elem::I32 };
    let factors = Rows::new(values, rows, per_row, per_row);
    let product = Product::new(&segments, layout, rows * digits.rows(), digits, factors);
    for n0 in (0..k).step_by(64) {
        for m0 in (0..rows).step_by(4) {
            let (m1, n1) = (rows.min(m0 + 4), k.min(n0 + 64));
            let mut results = [[0.0; 64]; 4];
            tile(product, m0..m1, n0..n1, &mut results);
            for (m, results) in (m0..m1).zip(&results) {
                out[m * k + n0..m * k + n1].copy_from_slice(&results[..n1 - n0]);
            }
        }
    }
}

fn main() -> Result<(), String> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [stage, version, k, times] = args.as_slice() else {
        for (name, rows) in STAGES {
            println!("{name} {rows}");
        }
        return Ok(());
    };
    let number = |text: &str| text.parse::<usize>().map_err(|e| format!("{text}: {e}"));
    let (k, times) = (number(k)?, number(times)?);
    match version.as_str() {
        "scalar" => run!(scalar, stage.as_str(), k, times),
        #[cfg(target_arch = "aarch64")]
        "neon" => run!(neon, stage.as_str(), k, times),
        other => return Err(format!("no version {other} on this machine")),
    }
    Ok(())
}
