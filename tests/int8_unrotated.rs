//! Proves that the rule `int8-plain` represents rows exactly if they are integers times one scale,
//! as `ggml-npu quantize --lpbq` makes them, so that only activations contribute to a product's
//! error.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod common;

use std::sync::Arc;

use common::{Numbers, Q4_0, Q8_0, Weight, functions, mul_mat, packed};
use ggml_rust_npu::config::rules::Rules;
use ggml_rust_npu::dequantize;
use ggml_rust_npu::gguf::GgmlType;
use ggml_rust_npu::reference;
use ggml_rust_npu::rockchip::RkDevice;
use ggml_rust_npu::rockchip::caps::{self, RkCaps};
use ggml_rust_npu::rockchip::plan::Target;
use ggml_rust_npu::tensor::DType;
use half::f16;
use rknpu_ops::sim;

fn device(caps: &'static RkCaps, rules: &str) -> Arc<RkDevice> {
    let rknn = functions(sim::Options::new(caps.soc));
    let target = Target {
        rules: Rules::parse(rules).unwrap(),
        ..Target::from(caps)
    };
    Arc::new(RkDevice::start(rknn, target).unwrap())
}

/// Returns the weight of these blocks, with its values.
fn weight(dtype: DType, ggml: GgmlType, ne: [usize; 4], bytes: Vec<u8>) -> Weight {
    let mut values = vec![0.0; ne.iter().product()];
    let dequantize = dequantize::of(ggml).unwrap();
    dequantize.dequantize(&bytes, &mut values);
    Weight {
        dtype,
        ne,
        bytes,
        values,
    }
}

fn below(numbers: &mut Numbers, n: usize) -> i8 {
    numbers.below(n).try_into().unwrap()
}

/// Rows of low-power blocks of 32 (docs/internals/quantization.md): a scale S of 7 significant bits
/// for each row, a multiplier m of 1 to 16 for each block, levels q from -7 to 7. In Q8_0 `d = S`
/// and `m * q`, in Q4_0 `d = S * m` and `q`.
fn low_power(numbers: &mut Numbers, k: usize, n: usize) -> [Weight; 2] {
    let (mut bytes, mut nibbles) = (Vec::new(), Vec::new());
    for _ in 0..n {
        // Half precision represents the products with a multiplier exactly, down to 2^-14.
        let power = 2f32.powi(-8 - i32::try_from(numbers.below(6)).unwrap());
        let scale = (64.0 + numbers.below(64) as f32) / 64.0 * power;
        for _ in 0..k / 32 {
            let multiplier = 1 + below(numbers, 16);
            let levels: [i8; 32] = std::array::from_fn(|_| below(numbers, 15) - 7);
            bytes.extend(f16::from_f32(scale).to_le_bytes());
            bytes.extend(levels.map(|level| (multiplier * level).cast_unsigned()));
            nibbles.extend(f16::from_f32(scale * f32::from(multiplier)).to_le_bytes());
            let code = |i: usize| (levels[i] + 8).cast_unsigned();
            nibbles.extend((0..16).map(|i| code(i) | code(i + 16) << 4));
        }
    }
    let ne = [k, n, 1, 1];
    let both = [
        weight(Q8_0, GgmlType::Q8_0, ne, bytes),
        weight(Q4_0, GgmlType::Q4_0, ne, nibbles),
    ];
    assert_eq!(both[0].values, both[1].values);
    both
}

/// Rows with 127 at one place each. INT8 represents them exactly, and their products are the
/// weights times 127.
fn unit_rows(k: usize) -> Vec<f32> {
    let mut rows = vec![0.0; k * k];
    (0..k).for_each(|i| rows[i * k + i] = 127.0);
    rows
}

#[test]
fn low_power_rows_have_exactly_their_values_on_the_device() {
    let mut numbers = Numbers::new(1);
    for caps in caps::ALL {
        let plain = device(caps, "weight=int8-plain");
        for (k, n) in [(32, 1), (96, 70), (320, 33)] {
            let both = low_power(&mut numbers, k, n);
            // Products with 127 are exact: sums of 14 bits times a scale of 7 bits.
            let times = |w: &Weight, row: usize| -> Vec<f32> {
                let column = w.values.iter().skip(row).step_by(k);
                column.map(|value| 127.0 * value).collect()
            };
            for w in &both {
                let buffer = packed(&plain, w, 0);
                let rows = unit_rows(k);
                let have = mul_mat(&plain, w, Some((&buffer, 0)), &rows, [k, k, 1, 1]).unwrap();
                for (row, have) in have.chunks_exact(n).enumerate() {
                    assert_eq!(have, times(w, row), "{} K={k} row {row}", caps.soc.name());
                }
            }
            // The rule with rotation moves the weights off their grid.
            let rotated = device(caps, "weight=int8");
            let have = mul_mat(&rotated, &both[0], None, &unit_rows(k), [k, k, 1, 1]).unwrap();
            assert_ne!(&have[..n], times(&both[0], 0));
        }
    }
}

/// Activations as INT8 represents them: each row has one scale, its largest magnitude over 127.
fn rounded(act: &[f32], k: usize) -> Vec<f32> {
    let row = |row: &[f32]| {
        let scale = row.iter().fold(0.0f32, |max, x| max.max(x.abs())) / 127.0;
        let value = move |x: &f32| (x * (1.0 / scale)).round_ties_even() * scale;
        row.iter().map(value).collect::<Vec<_>>()
    };
    act.chunks_exact(k).flat_map(row).collect()
}

#[test]
fn a_product_with_low_power_rows_has_the_error_of_its_activations_alone() {
    let mut numbers = Numbers::new(2);
    let plain = device(&caps::RK3588, "weight=int8-plain");
    for (m, k, n) in [(1, 64, 40), (5, 576, 96), (33, 8224, 24)] {
        for w in low_power(&mut numbers, k, n) {
            let act = numbers.floats(m * k);
            let have = mul_mat(&plain, &w, None, &act, [k, m, 1, 1]).unwrap();
            let error =
                |act: &[f32]| reference::nmse(&have, &reference::mul_mat(act, &w.values, k));
            // Sums are integers. The only errors are three roundings to FP32, of the product of the
            // scales and of the results.
            let left = error(&rounded(&act, k));
            assert!(left < 1e-13, "M={m} K={k} N={n}: {left:.2e}");
            // For uniform numbers the error is (1 / 127)^2 / 12, divided by a variance of 1/3:
            // 1.6e-5 on average over many rows. With weights of a single row it may be much larger
            // or smaller.
            let all = error(&act);
            assert!((5e-7..1e-4).contains(&all), "M={m} K={k} N={n}: {all:.2e}");
        }
    }
}

#[test]
fn other_rows_are_rounded_to_one_scale_each() {
    let mut numbers = Numbers::new(3);
    let (m, k, n) = (5, 576, 96);
    let plain = device(&caps::RK3588, "weight=int8-plain");
    let mut bytes = Vec::new();
    for _ in 0..n * k / 32 {
        // The blocks of a row have different scales, whose ratios are not integers.
        bytes.extend(f16::from_f32(0.01 + 0.01 * numbers.float().abs()).to_le_bytes());
        bytes.extend(
            (0..32)
                .map(|_| below(&mut numbers, 127) - 63)
                .map(i8::cast_unsigned),
        );
    }
    let w = weight(Q8_0, GgmlType::Q8_0, [k, n, 1, 1], bytes);
    let act = numbers.floats(m * k);
    let have = mul_mat(&plain, &w, None, &act, [k, m, 1, 1]).unwrap();
    let want = reference::mul_mat(&rounded(&act, k), &w.values, k);
    // The row's step is its largest weight, up to 63 * 0.02, divided by 127: about 1.3e-5.
    let error = reference::nmse(&have, &want);
    assert!((1e-6..5e-5).contains(&error), "{error:.2e}");
}
