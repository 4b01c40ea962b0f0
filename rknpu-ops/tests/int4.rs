//! Proves that INT4 operands keep their value: rotation, digits, native layouts, scaled results,
//! and a complete product in the stand-in without saturation.
#![expect(unsafe_code, reason = "the stand-in's functions are C functions")]
#![expect(
    clippy::cast_possible_truncation,
    clippy::unwrap_used,
    reason = "the shared wrappers narrow values that are in range; a failed unwrap fails the test"
)]

use proptest::prelude::*;
use rknpu_ops::calibrate::Method;
use rknpu_ops::ffi::MatmulType;
use rknpu_ops::int4::{
    Digits, Product, ScaledOutput, factors, factors_i4, interleave_a_i4, pack_group_i4,
    quantize_group_i4, quantize_rows_i4, unpack_group_i4, unpack_scaled,
};
use rknpu_ops::layout::{Elem, MatmulLayout, NativeC, Soc};
use rknpu_ops::pack::{Rows, StridedRows};
use rknpu_ops::rotation::Rotation;
use test_kit::Numbers;

#[path = "sim/common.rs"]
#[expect(dead_code, reason = "shared with tests/sim, which uses all of it")]
mod common;
#[path = "int4/feedback.rs"]
mod feedback;
#[path = "int4/measure.rs"]
mod measure;
#[path = "int4/product.rs"]
mod product;
mod vector;

use vector::{bits, dot, norm};

/// Normal values of standard deviation 1, the same for the same seed.
fn gaussian(count: usize, seed: u64) -> Vec<f32> {
    let mut numbers = Numbers::fixed(seed);
    let mut uniform = || ((numbers.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64;
    let mut value = || (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
    (0..count).map(|_| value() as f32).collect()
}

/// The two integers of a byte of nibbles, low one first.
fn nibbles(byte: u8) -> [i8; 2] {
    [(byte << 4).cast_signed() >> 4, byte.cast_signed() >> 4]
}

fn digits_of(bytes: &[u8]) -> Vec<i8> {
    bytes.iter().flat_map(|byte| nibbles(*byte)).collect()
}

fn rotated(rotation: &Rotation, row: &[f32]) -> Vec<f32> {
    let mut row = row.to_vec();
    rotation.apply(&mut row);
    row
}

/// Relative error of a rotation: one rounding for each of up to 13 stages and two for the scale, in
/// two blocks, each 2^-24 of the norm at most.
const ROTATION_ERROR: f64 = 2.0 * 15.0 / (1u64 << 24) as f64;

#[test]
fn rotation_keeps_norms_and_dot_products() {
    for k in [1, 2, 3, 32, 96, 576, 640, 1536, 2048, 5632, 8192, 11008] {
        let rotation = Rotation::new(k);
        let (x, w) = (gaussian(k, 1), gaussian(k, 2));
        let (rx, rw) = (rotated(&rotation, &x), rotated(&rotation, &w));
        let bound = 2.0 * ROTATION_ERROR;
        assert!((norm(&rx) / norm(&x) - 1.0).abs() <= bound, "K = {k}");
        let off = (dot(&rx, &rw) - dot(&x, &w)).abs();
        assert!(off <= bound * norm(&x) * norm(&w), "K = {k}: {off}");
        assert_eq!(bits(&rx), bits(&rotated(&Rotation::new(k), &x)), "K = {k}");
    }
    rotated(&Rotation::new(0), &[]);
}

/// Pinned: packed weights that were written to a file must be multiplied with activations of the
/// same rotation later.
#[test]
fn rotation_is_the_documented_one() {
    // Signs come from SplitMix64 with seed K. For K = 6 there is a block of 4 at the front and one
    // of 4 at the end.
    let got = rotated(&Rotation::new(6), &[1.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    let mut state = Numbers::fixed(6);
    let word = state.bits();
    let sign = |bit: usize| if word >> bit & 1 == 1 { -1.0f32 } else { 1.0 };
    let hadamard = |x: [f32; 4]| {
        let [a, b, c, d] = x.map(|x| x / 2.0);
        [a + b + c + d, a - b + c - d, a + b - c - d, a - b - c + d]
    };
    let front = hadamard([sign(0), 0.0, 0.0, 0.0]);
    let back = [front[2] * sign(6), front[3] * sign(7), 0.0, 0.0];
    let [c, d, e, f] = hadamard(back);
    assert_eq!(got, [front[0], front[1], c, d, e, f]);
}

#[test]
fn rotation_spreads_outliers_over_the_whole_row() {
    for k in [576, 640, 1536, 2048, 5632] {
        let rotation = Rotation::new(k);
        for at in [0, 63, k / 2, k - 1] {
            let mut row = vec![0.0; k];
            row[at] = 1.0;
            let max = rotated(&rotation, &row)
                .iter()
                .fold(0.0f32, |max, x| max.max(x.abs()));
            // A single block gives 1 / sqrt(block). Where both blocks overlap, results are sums of
            // many such values with random signs; 5 standard deviations are not expected.
            let limit = 5.0 / (k as f32 / 2.0).sqrt();
            assert!(max <= limit, "K = {k}, element {at}: {max}");
        }
        // Equal elements must not add up to a large one.
        let alike = rotated(&rotation, &vec![1.0; k]);
        assert!(alike.iter().all(|x| x.abs() < 5.0), "K = {k}");
    }
    let identity = Rotation::identity(576);
    let row = gaussian(576, 3);
    assert_eq!(bits(&rotated(&identity, &row)), bits(&row));
}

/// Quantizes rows without rotation; digits as `[row][digit][k]`.
fn quantize(
    src: &[f32],
    k: usize,
    segment_k: usize,
    digits: Digits,
) -> (Vec<Vec<Vec<i8>>>, Vec<f32>) {
    let m = src.len() / k;
    let mut out = vec![0x5a; m * digits.rows() * k / 2];
    let segments = k.div_ceil(segment_k);
    let mut factors = vec![0.0; m * factors_i4(segments)];
    let mut work = vec![0.0; k];
    quantize_rows_i4(
        Rows::new(src, m, k, k),
        &Rotation::identity(k),
        segment_k,
        digits,
        &mut work,
        &mut out,
        &mut factors,
    );
    let rows: Vec<Vec<Vec<i8>>> = out
        .chunks(digits.rows() * k / 2)
        .map(|row| row.chunks(k / 2).map(digits_of).collect())
        .collect();
    let mut scales = Vec::new();
    for (row, factors) in rows.iter().zip(factors.chunks(2 * segments)) {
        let (of_row, halves) = factors.split_at(segments);
        scales.extend_from_slice(of_row);
        for (segment, half) in halves.iter().enumerate() {
            let sum = |digit: &Vec<i8>| -> i32 {
                let end = k.min((segment + 1) * segment_k);
                let part = &digit[segment * segment_k..end];
                part.iter().map(|q| i32::from(*q)).sum()
            };
            let total = row.iter().fold(0, |total, digit| total * 15 + sum(digit));
            assert_eq!(*half, total as f32 / 2.0, "segment {segment}");
        }
    }
    (rows, scales)
}

#[test]
fn two_digits_are_an_integer_of_225_levels() {
    // With scale 1: every integer and every half-way point between -112 and 112. Half-way points
    // are rounded to even.
    let row: Vec<f32> = (-224i16..=224)
        .chain([0])
        .map(|i| f32::from(i) / 2.0)
        .collect();
    let (rows, scales) = quantize(&row, row.len(), row.len(), Digits::Two);
    assert_eq!(scales, [1.0]);
    for ((high, low), x) in rows[0][0].iter().zip(&rows[0][1]).zip(&row) {
        assert!(high.abs() <= 7 && low.abs() <= 7);
        let got = f32::from(*high) * 15.0 + f32::from(*low);
        assert_eq!(got, x.round_ties_even(), "{x}");
    }
}

#[test]
fn one_digit_clips_normal_rows_a_little_and_flat_ones_not_at_all() {
    let (k, segment_k) = (1280, 640);
    let mut row = gaussian(k, 4);
    row[640..].iter_mut().for_each(|x| *x = x.signum() * 3.0);
    let (rows, scales) = quantize(&row, k, segment_k, Digits::One);
    assert!((0.3..0.4).contains(&scales[0]), "{}", scales[0]);
    assert_eq!(scales[1], 3.0 / 7.0);
    for (q, (i, x)) in rows[0][0].iter().zip(row.iter().enumerate()) {
        let scale = scales[i / segment_k];
        let want = (x * (1.0 / scale)).round_ties_even().clamp(-7.0, 7.0);
        assert_eq!(f32::from(*q), want, "element {i}");
    }
}

#[test]
fn bad_and_empty_segments_are_zeros_and_no_others_change() {
    for digits in [Digits::One, Digits::Two] {
        let (k, segment_k) = (96, 32);
        let clean = gaussian(3 * k, 5);
        let (want, want_scales) = quantize(&clean, k, segment_k, digits);
        let mut row = clean;
        row[k + 33] = f32::NEG_INFINITY;
        row[64..96].fill(0.0);
        row[2 * k..][..32].fill(1e-42);
        let (rows, scales) = quantize(&row, k, segment_k, digits);
        for (i, scale) in scales.iter().enumerate() {
            let (m, k0) = (i / 3, i % 3 * 32);
            let spoiled = [4, 2, 6].contains(&i);
            for (row, want) in rows[m].iter().zip(&want[m]) {
                let zeros = row[k0..k0 + 32].iter().all(|q| *q == 0);
                assert!(zeros || !spoiled, "segment {i}");
                assert!(spoiled || row[k0..k0 + 32] == want[k0..k0 + 32]);
            }
            assert!(spoiled || *scale == want_scales[i]);
        }
        assert!(scales[4].is_nan() && scales[2] == 0.0 && scales[6] == 0.0);
    }
}

#[test]
fn weights_are_rounded_with_their_clip_and_scaled_by_the_best_fit() {
    let (count, k, segment_k) = (5, 160, 64);
    let mut rows = gaussian(count * k, 6);
    rows[k + 70] = f32::NAN;
    rows[2 * k..][..64].fill(0.0);
    for method in [Method::AbsMax, Method::Mse, Method::KlDivergence] {
        let mut out = vec![0x5a; count * k / 2];
        let mut scales = vec![vec![-1.0; 8]; 3];
        let mut views: Vec<&mut [f32]> = scales.iter_mut().map(Vec::as_mut_slice).collect();
        let src = Rows::new(&rows, count, k, k);
        quantize_group_i4(src, segment_k, method, &[], &mut out, &mut views);
        let q = digits_of(&out);
        for (segment, scales) in scales.iter().enumerate() {
            assert_eq!(scales[count..], [-1.0; 3]);
            for (m, scale) in scales[..count].iter().enumerate() {
                let range = m * k + segment * 64..m * k + 160.min(segment * 64 + 64);
                let (q, x) = (&q[range.clone()], &rows[range]);
                match (m, segment) {
                    (1, 1) => assert!(scale.is_nan() && q.iter().all(|q| *q == 0)),
                    (2, 0) => assert!(*scale == 0.0 && q.iter().all(|q| *q == 0)),
                    _ if method == Method::AbsMax => {
                        let max = x.iter().fold(0.0f32, |max, x| max.max(x.abs()));
                        assert_eq!(*scale, max / 7.5);
                    }
                    _ => {
                        let q: Vec<f32> = q.iter().map(|q| f32::from(*q) + 0.5).collect();
                        assert!(q.iter().any(|q| q.abs() == 7.5));
                        let best = dot(x, &q) / dot(&q, &q);
                        // FP32 sums of 64 terms.
                        assert!((f64::from(*scale) / best - 1.0).abs() < 1e-5);
                    }
                }
            }
        }
    }
}

/// Every type of matmul with 4-bit operands.
fn layouts() -> impl Iterator<Item = MatmulLayout> {
    Soc::ALL.into_iter().flat_map(|soc| {
        let types = (1..16).filter_map(move |number| MatmulLayout::of(soc, MatmulType(number)));
        types.filter(|layout| layout.b.elem == Elem::I4)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn nibbles_follow_the_formulas_of_the_native_layouts(
        n in 1usize..150,
        half_k in 1usize..100,
        (m, real) in (1usize..20).prop_flat_map(|m| (Just(m), 0..=m)),
        seed: u8,
    ) {
        let k = 2 * half_k;
        // Bytes count up, so a nibble identifies its place modulo 256 bytes; neither padding nor
        // tiles divide 256.
        let bytes = |rows: usize| -> Vec<u8> {
            (0..rows * half_k).map(|i| (i * 7 + i / 251) as u8 ^ seed).collect()
        };
        for layout in layouts() {
            let b = layout.b;
            let src = bytes(n);
            let strip = b.strip_len(k) / 2;
            let mut dst = vec![0xff; b.bytes(k, n)];
            let mut back = vec![0; src.len()];
            for (g, group) in dst.chunks_mut(strip).enumerate() {
                let range = g * b.gn..n.min((g + 1) * b.gn);
                pack_group_i4(Rows::new(&src, n, half_k, half_k).rows(range.clone()), b, group);
                let back = &mut back[range.start * half_k..range.end * half_k];
                unpack_group_i4(group, b, range.len(), k, back);
            }
            prop_assert_eq!(&back, &src);
            let (got, q) = (digits_of(&dst), digits_of(&src));
            let mut want = vec![0; got.len()];
            for row in 0..n {
                for col in 0..k {
                    want[b.index(col, row, k, n)] = q[row * k + col];
                }
            }
            prop_assert_eq!(got, want);

            let a = layout.a;
            if a.elem == Elem::I4 {
                let src = bytes(real);
                let mut dst = vec![0xff; a.bytes(m, k)];
                interleave_a_i4(Rows::new(&src, real, half_k, half_k), a, m, &mut dst);
                let (got, q) = (digits_of(&dst), digits_of(&src));
                let mut want = vec![0; got.len()];
                for row in 0..real {
                    for col in 0..k {
                        want[a.index(row, col, m)] = q[row * k + col];
                    }
                }
                prop_assert_eq!(got, want);
            }
        }
    }

    #[test]
    fn results_unpack_by_their_formula(
        (product_rows, first, last) in (1usize..12).prop_flat_map(|m| (Just(m), 0..=m, 0..=m)),
        n in 1usize..150,
        t in prop::sample::select(vec![4usize, 8, 16]),
        segments in 1usize..5,
        two: bool,
        one_scale: bool,
        spare in 0usize..3,
        gap in 0usize..4,
    ) {
        let digits = if two { Digits::Two } else { Digits::One };
        let (m, rows) = (product_rows * digits.rows() + spare, first.min(last)..first.max(last));
        let layout = NativeC { t, elem: Elem::I16 };
        let c: Vec<Vec<i16>> = (0..segments)
            .map(|s| (0..layout.len(m, n)).map(|i| ((i * 131 + s * 977) % 65_536) as u16 as i16).collect())
            .collect();
        let scales = if one_scale { 1 } else { segments };
        let per_row = if one_scale { factors(segments) } else { factors_i4(segments) };
        let w_scales: Vec<f32> = gaussian(segments * n, 7);
        let mut a_factors: Vec<f32> = gaussian(product_rows * per_row, 8);
        // Halves of integers with up to 16 bits.
        for row in a_factors.chunks_mut(per_row) {
            row[scales..].iter_mut().for_each(|half| *half = (*half * 1e4).round() / 2.0);
        }
        let a_rows = Rows::new(&a_factors, product_rows, per_row, per_row);
        let want = |row: usize, col: usize| {
            let term = |s: usize| {
                let at = |r: usize| f32::from(c[s][layout.index(r, col, m)]);
                let c = if two { at(2 * row) * 15.0 + at(2 * row + 1) } else { at(row) };
                let factors = &a_factors[row * per_row..][..per_row];
                (c + factors[scales + s]) * w_scales[s * n + col] * factors[s.min(scales - 1)]
            };
            (0..segments).map(term).fold(0.0, |sum, term| sum + term)
        };
        let mut dst = vec![-1.0; product_rows * (n + gap)];
        let mut out = StridedRows::new(&mut dst, n, n + gap);
        let views: Vec<_> = c.iter().zip(w_scales.chunks(n))
            .map(|(c, w_scales)| ScaledOutput { c: c.as_slice(), w_scales }).collect();
        unpack_scaled(Product::new(&views, layout, m, digits, a_rows), rows.clone(), &mut out);
        for row in 0..product_rows {
            for col in 0..n + gap {
                let written = rows.contains(&row) && col < n;
                let want = if written { want(row, col) } else { -1.0 };
                prop_assert_eq!(dst[row * (n + gap) + col].to_bits(), want.to_bits());
            }
        }
        // Another type of C with the same numbers must give the same bits.
        let wide: Vec<Vec<i32>> = c.iter().map(|c| c.iter().map(|c| i32::from(*c)).collect()).collect();
        let float: Vec<Vec<f32>> = c.iter().map(|c| c.iter().map(|c| f32::from(*c)).collect()).collect();
        let wide = again(&wide, &w_scales, layout, m, digits, a_rows);
        let float = again(&float, &w_scales, layout, m, digits, a_rows);
        for again in [wide, float] {
            for row in rows.clone() {
                prop_assert_eq!(bits(&dst[row * (n + gap)..][..n]), bits(&again[row * n..][..n]));
            }
        }
    }
}

/// All rows of a product without gaps.
fn again<T: rknpu_ops::int4::SumElem>(
    c: &[Vec<T>],
    w_scales: &[f32],
    layout: NativeC,
    m: usize,
    digits: Digits,
    a_factors: Rows<'_, f32>,
) -> Vec<f32> {
    let n = w_scales.len() / c.len();
    let segments: Vec<_> = c
        .iter()
        .zip(w_scales.chunks(n))
        .map(|(c, w_scales)| ScaledOutput {
            c: c.as_slice(),
            w_scales,
        })
        .collect();
    let rows = a_factors.count();
    let mut dst = vec![0.0; rows * n];
    let mut out = StridedRows::new(&mut dst, n, n);
    let product = Product::new(&segments, layout, m, digits, a_factors);
    unpack_scaled(product, 0..rows, &mut out);
    dst
}
