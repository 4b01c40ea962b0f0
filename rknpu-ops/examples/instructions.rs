//! Runs one host stage a number of times, so that scripts/aarch64.py can count instructions per element under qemu.
//!
//! `instructions` lists the stages and their rows; `instructions STAGE VERSION K TIMES` runs one, VERSION being `scalar`
//! or, on aarch64, `neon`.

use std::hint::black_box;

use half::f16;
use rknpu_ops::layout::{Elem, NativeC};
#[cfg(target_arch = "aarch64")]
use rknpu_ops::neon;
use rknpu_ops::pack::{NativeOutput, Rows, RowsMut};
use rknpu_ops::quant::hadamard_block;
use rknpu_ops::scalar;

/// Stages and their rows.
const STAGES: [(&str, usize); 11] = [
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
    ("unpack_f32_two_segments", 32),
];

/// Runs `stage` of one version `times` times on rows of `k` elements.
macro_rules! run {
    ($version:ident, $stage:expr, $k:expr, $times:expr) => {{
        let (k, rows) = ($k, 32);
        let values = vec![0.75f32; rows * k];
        let (mut row, mut out) = (values[..k].to_vec(), values.clone());
        let (bytes, mut native) = (vec![3i8; rows * k], vec![0i8; rows * k]);
        let (halves, mut native_f16) = (vec![f16::ONE; rows * k], vec![f16::ZERO; rows * k]);
        let sums = vec![5i32; rows * k];
        let layout = NativeC {
            t: 4,
            elem: Elem::I32,
        };
        for _ in 0..$times {
            match $stage {
                "hadamard" => $version::hadamard(black_box(&mut row), hadamard_block(k), 0.25),
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
                    let mut dst = RowsMut::new(&mut out, k, k);
                    $version::unpack_i32(c, 0..1, |_| 0.5, &values[..k], &mut dst);
                }
                "unpack_i32" => {
                    let segments = [sums.as_slice()];
                    let c = NativeOutput::new(&segments, layout, rows);
                    let mut dst = RowsMut::new(&mut out, k, k);
                    $version::unpack_i32(c, 0..rows, |_| 0.5, &values[..k], &mut dst);
                }
                "unpack_f32_two_segments" => {
                    let segments = [values.as_slice(), values.as_slice()];
                    let c = NativeOutput::new(&segments, layout, rows);
                    let mut dst = RowsMut::new(&mut out, k, k);
                    $version::unpack_f32(c, 0..rows, |_| 0.5, k, &mut dst);
                }
                other => return Err(format!("no stage {other}")),
            }
        }
        black_box((&row, &out, &native, &native_f16));
    }};
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
