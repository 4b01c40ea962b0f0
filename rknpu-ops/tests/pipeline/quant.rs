//! The number formats alone: transform, scales, rounding, special values.

use half::f16;
use proptest::prelude::*;
use rknpu_ops::quant::{
    HADAMARD_BLOCK_MAX, convert_row_f16, exact_row_i8, hadamard, quantize_row_by, quantize_row_i8,
    quantize_row_wide, row_scale_i8,
};

use super::{bits, dot, norm, values};

/// Relative error of a transform of `block` elements: one rounding per stage and two for the scale,
/// each 2^-24 of the vector's norm at most, since every stage is orthogonal up to a factor.
fn hadamard_error(block: usize) -> f64 {
    f64::from(block.ilog2() + 2) * f64::from(f32::EPSILON) / 2.0
}

/// Largest power of two that divides `k`, as far as there are blocks of it.
fn block_of(k: usize) -> usize {
    (k & k.wrapping_neg()).min(HADAMARD_BLOCK_MAX)
}

#[test]
fn hadamard_equals_the_naive_matrix() {
    for log in 0..=12 {
        let block = 1usize << log;
        let x = values(3 * block, log);
        let mut y = x.clone();
        hadamard(&mut y, block);
        // For long blocks a few rows of the matrix are enough, because every row depends on every
        // element.
        for i in (0..block).step_by(1 + block / 64) {
            for (x, y) in x.chunks(block).zip(y.chunks(block)) {
                let sign = |j: usize| {
                    if (i & j).count_ones().is_multiple_of(2) {
                        1.0
                    } else {
                        -1.0
                    }
                };
                let sum: f64 = (0..block).map(|j| sign(j) * f64::from(x[j])).sum();
                let want = sum / (block as f64).sqrt();
                let bound = hadamard_error(block) * norm(x);
                assert!(
                    (f64::from(y[i]) - want).abs() <= bound,
                    "block {block}, row {i}"
                );
            }
        }
    }
}

#[test]
fn hadamard_is_its_own_inverse_and_keeps_dot_products() {
    for k in [2, 12, 576, 1536, 4096, 8192] {
        let block = block_of(k);
        let (x, w) = (values(k, 1), values(k, 2));
        let (mut hx, mut hw) = (x.clone(), w.clone());
        hadamard(&mut hx, block);
        hadamard(&mut hw, block);
        let bound = 2.0 * hadamard_error(block) * norm(&x);
        assert!((norm(&hx) - norm(&x)).abs() <= bound, "K = {k}: norm");
        assert!(
            (dot(&hx, &hw) - dot(&x, &w)).abs() <= bound * 1.01 * norm(&w),
            "K = {k}: dot product"
        );
        hadamard(&mut hx, block);
        let error: Vec<f32> = hx.iter().zip(&x).map(|(a, b)| a - b).collect();
        assert!(norm(&error) <= bound * 1.01, "K = {k}: inverse");
    }
}

#[test]
fn blocks_of_a_row_do_not_mix() {
    for block in [2, 4, 8, 64, 1024] {
        let x = values(5 * block, 3);
        let mut whole = x.clone();
        hadamard(&mut whole, block);
        let mut alone = x;
        alone
            .chunks_mut(block)
            .for_each(|part| hadamard(part, block));
        assert_eq!(bits(&whole), bits(&alone), "block {block}");
    }
}

#[test]
#[should_panic(expected = "hadamard block 8 does not fit a row of 12")]
fn hadamard_rejects_a_block_that_does_not_divide_the_row() {
    hadamard(&mut [0.0; 12], 8);
}

#[test]
fn ties_round_to_even_and_values_clamp() {
    let row = [
        0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.0, 300.0, -1e30, 0.4999,
    ];
    let mut out = [0; 10];
    quantize_row_by(&row, 1.0, &mut out);
    assert_eq!(out, [0, 2, 2, 0, -2, 126, 127, 127, -127, 0]);
}

#[test]
fn zero_and_tiny_rows_quantize_to_zero_with_scale_zero() {
    for row in [vec![], vec![0.0; 40], vec![-0.0; 3], vec![1e-37; 33]] {
        let scale = row_scale_i8(&row);
        assert_eq!(scale, 0.0);
        let mut out = vec![1; row.len()];
        quantize_row_by(&row, scale, &mut out);
        assert!(out.iter().all(|q| *q == 0));
    }
}

#[test]
fn non_finite_elements_make_the_scale_nan_wherever_they_are() {
    for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in 0..67 {
            let mut row = values(67, 4);
            row[at] = bad;
            let mut out = vec![1; 67];
            let scale = row_scale_i8(&row);
            quantize_row_by(&row, scale, &mut out);
            assert!(
                scale.is_nan() && out.iter().all(|q| *q == 0),
                "{bad} at {at}"
            );
            let mut half = vec![f16::ONE; 67];
            let factor = convert_row_f16(&row, &mut half);
            assert!(
                factor.is_nan() && half.iter().all(|h| *h == f16::ZERO),
                "{bad} at {at}"
            );
        }
    }
    let mut row = values(64, 5);
    row[9] = f32::NAN;
    assert!(quantize_row_i8(&row, &mut [0; 64]).is_nan());
    let (mut high, mut low) = ([1; 64], [1; 64]);
    assert!(quantize_row_wide(&row, &mut high, &mut low).is_nan());
    assert_eq!((high, low), ([0; 64], [0; 64]));
}

#[test]
fn two_digits_are_nearest_to_each_element() {
    for magnitude in [1.0, 3e-30, 2e38] {
        let row: Vec<f32> = values(333, 7).iter().map(|x| x * magnitude).collect();
        let (mut high, mut low) = (vec![0; 333], vec![0; 333]);
        let scale = quantize_row_wide(&row, &mut high, &mut low);
        for ((x, high), low) in row.iter().zip(&high).zip(&low) {
            assert!(high.unsigned_abs() <= 127 && low.unsigned_abs() <= 127);
            let level = f64::from(*high) * 255.0 + f64::from(*low);
            let steps = (level - f64::from(*x) / f64::from(scale)).abs();
            assert!(steps <= 0.51, "{x}: off by {steps} steps");
        }
        let largest = high.iter().map(|digit| digit.unsigned_abs()).max();
        assert_eq!(largest, Some(127), "all levels are used");
    }
    let (mut high, mut low) = ([1; 3], [1; 3]);
    assert_eq!(
        quantize_row_wide(&[0.0, -0.0, 1e-37], &mut high, &mut low),
        0.0
    );
    assert_eq!((high, low), ([0; 3], [0; 3]));
}

#[test]
fn f16_scaling_keeps_huge_and_tiny_rows() {
    // FP16 rounds normal elements by 2^-11. All elements stay normal, because none but 0 is below
    // 2^-23 of the largest.
    for magnitude in [1e6f32, 1e-30, 3e38, 65504.0, 1.0, 20000.0, 1e-33] {
        let row: Vec<f32> = values(300, 6).iter().map(|x| x * magnitude).collect();
        let mut half = vec![f16::ZERO; 300];
        let factor = convert_row_f16(&row, &mut half);
        let max = half.iter().map(|h| h.to_f32().abs()).fold(0.0, f32::max);
        assert!((16384.0..=32768.0).contains(&max), "{magnitude}: {max}");
        assert_eq!(factor.to_bits() << 9, 0, "{factor} is not a power of two");
        for (h, x) in half.iter().zip(&row) {
            let back = f64::from(h.to_f32()) * f64::from(factor);
            let error = (back - f64::from(*x)).abs();
            assert!(
                error <= f64::from(x.abs()) * 2f64.powi(-11),
                "{magnitude}: {x} -> {back}"
            );
        }
    }
    let mut half = [f16::ONE; 4];
    assert_eq!(convert_row_f16(&[0.0; 4], &mut half), 1.0);
    assert_eq!(half, [f16::ZERO; 4]);
    // The exponent is clamped, so nothing becomes infinite or NaN.
    let factor = convert_row_f16(&[1e-45, -1e-40, 0.0, 1e-38], &mut half);
    assert_eq!(factor, f32::MIN_POSITIVE);
    assert!(half.iter().all(|h| h.is_finite()));
}

#[test]
fn f16_scaling_is_exact_for_values_of_eleven_bits() {
    let row: Vec<f32> = (-1023i16..1024).map(|i| f32::from(i) * 1024.0).collect();
    let mut half = vec![f16::ZERO; row.len()];
    let factor = convert_row_f16(&row, &mut half);
    let back: Vec<f32> = half.iter().map(|h| h.to_f32() * factor).collect();
    assert_eq!(back, row);
}

proptest! {
    #[test]
    fn quantization_error_is_at_most_half_a_step(
        row in prop::collection::vec(-1e4f32..1e4, 1..200),
        exponent in -90i32..90,
    ) {
        let row: Vec<f32> = row.iter().map(|x| x * 2f32.powi(exponent)).collect();
        let scale = row_scale_i8(&row);
        let mut out = vec![0; row.len()];
        quantize_row_by(&row, scale, &mut out);
        let largest = out.iter().map(|q| q.unsigned_abs()).max();
        if scale > 0.0 {
            prop_assert_eq!(largest, Some(127));
        }
        for (q, x) in out.iter().zip(&row) {
            let error = (f64::from(*q) * f64::from(scale) - f64::from(*x)).abs();
            prop_assert!(error <= f64::from(scale) / 2.0 * (1.0 + 2f64.powi(-15)));
        }
    }
}

proptest! {
    #[test]
    fn multiples_of_a_number_are_taken_without_rounding(
        mantissa in 1u32..1 << 16,
        exponent in -100i32..80,
        levels in prop::collection::vec(-127i8..=127, 1..200),
        off in any::<prop::sample::Index>(),
    ) {
        let unit = mantissa as f32 * 2f32.powi(exponent);
        // Products of numbers of 16 and 7 bits are exact.
        let mut row: Vec<f32> = levels.iter().map(|level| f32::from(*level) * unit).collect();
        let mut have = vec![0; row.len()];
        let scale = exact_row_i8(&row, &mut have);
        prop_assert_eq!(scale.is_some(), levels.iter().any(|level| *level != 0));
        if let Some(scale) = scale {
            for (x, level) in row.iter().zip(&have) {
                prop_assert_eq!(scale * f32::from(*level), *x);
            }
        }
        // A number between two levels, and one that is too large.
        for other in [64.015625, 2048.0] {
            let at = off.index(row.len());
            let before = std::mem::replace(&mut row[at], other * unit);
            if row.iter().any(|x| *x != 0.0 && x.abs() < unit * 8.0) {
                prop_assert_eq!(exact_row_i8(&row, &mut have), None);
            }
            row[at] = before;
        }
    }
}

#[test]
fn rows_without_a_scale_are_not_taken_exactly() {
    let mut out = [7; 2];
    for row in [
        [0.0, -0.0],
        [1.0, f32::NAN],
        [f32::INFINITY, 1.0],
        [f32::MIN_POSITIVE / 2.0, 0.0],
        [1.0, 128.0],
    ] {
        assert_eq!(exact_row_i8(&row, &mut out), None, "{row:?}");
        assert_eq!(out, [7; 2]);
    }
    assert_eq!(exact_row_i8(&[], &mut []), None);
    assert_eq!(exact_row_i8(&[-0.375, 0.0], &mut out), Some(0.375));
    assert_eq!(out, [-1, 0]);
}
