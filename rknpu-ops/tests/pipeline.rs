//! Proves that the stages around a matmul keep its value: transform, quantize, pack, multiply in native layout, unpack.

use half::f16;
use proptest::prelude::*;
use rknpu_ops::layout::{Elem, NativeA, NativeB, NativeC};
use rknpu_ops::pack::{
    NativeOutput, Rows, RowsMut, convert_rows_f16, interleave_a, pack_group, pack_row_i8,
    quantize_rows_i8, unpack_f32, unpack_group, unpack_i32, unpack_row_f32, unpack_row_i32,
};
use rknpu_ops::quant::{
    HADAMARD_BLOCK_MAX, convert_row_f16, hadamard, hadamard_block, quantize_row_i8,
    quantize_weight_row_i8, row_scale_i8,
};

const B: NativeB = NativeB {
    gn: 32,
    gk: 32,
    split_k: 8192,
    elem: Elem::I8,
};
const C: NativeC = NativeC {
    t: 4,
    elem: Elem::I32,
};

const fn layout_a(s: usize) -> NativeA {
    NativeA { s, elem: Elem::I8 }
}

/// Values in [-1, 1), the same for the same seed.
fn values(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8_388_608.0 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter()
        .zip(b)
        .map(|(a, b)| f64::from(*a) * f64::from(*b))
        .sum()
}

fn norm(a: &[f32]) -> f64 {
    dot(a, a).sqrt()
}

/// Relative error of a transform of `block` elements: one rounding per stage and two for the scale, each 2^-24 of the
/// vector's norm at most, since every stage is orthogonal up to a factor.
fn hadamard_error(block: usize) -> f64 {
    f64::from(block.ilog2() + 2) * f64::from(f32::EPSILON) / 2.0
}

#[test]
fn hadamard_block_is_the_largest_power_of_two_in_k() {
    let cases = [
        (0, 1),
        (1, 1),
        (7, 1),
        (6, 2),
        (576, 64),
        (1536, 512),
        (4096, 4096),
        (8192, HADAMARD_BLOCK_MAX),
    ];
    for (k, block) in cases {
        assert_eq!(hadamard_block(k), block, "K = {k}");
    }
}

#[test]
fn hadamard_equals_the_naive_matrix() {
    for log in 0..=12 {
        let block = 1usize << log;
        let x = values(3 * block, log);
        let mut y = x.clone();
        hadamard(&mut y, block);
        // A few rows of the matrix are enough for long blocks: every row sees every element.
        for i in (0..block).step_by(1 + block / 64) {
            for (x, y) in x.chunks(block).zip(y.chunks(block)) {
                let sign = |j: usize| {
                    if (i & j).count_ones() % 2 == 0 {
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
        let block = hadamard_block(k);
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
    quantize_row_i8(&row, 1.0, &mut out);
    assert_eq!(out, [0, 2, 2, 0, -2, 126, 127, 127, -127, 0]);
}

#[test]
fn zero_and_tiny_rows_quantize_to_zero_with_scale_zero() {
    for row in [vec![], vec![0.0; 40], vec![-0.0; 3], vec![1e-37; 33]] {
        let scale = row_scale_i8(&row);
        assert_eq!(scale, 0.0);
        let mut out = vec![1; row.len()];
        quantize_row_i8(&row, scale, &mut out);
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
            quantize_row_i8(&row, scale, &mut out);
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
    assert!(quantize_weight_row_i8(&mut row, 64, &mut [0; 64]).is_nan());
}

#[test]
fn f16_scaling_keeps_huge_and_tiny_rows() {
    // 2^-11 is FP16's rounding of elements that stay normal, and these do: none but 0 is below 2^-23 of the largest.
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
    // The exponent is clamped, nothing becomes infinite or NaN.
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

/// Multiplies native A by native B into native C, element by element through the index formulas.
fn native_matmul(a: &[i8], la: NativeA, b: &[i8], m: usize, k: usize, n: usize) -> Vec<i32> {
    let mut c = vec![0; C.len(m, n)];
    for row in 0..m {
        for col in 0..n {
            c[C.index(row, col, m)] = (0..k)
                .map(|i| i32::from(a[la.index(row, i, m)]) * i32::from(b[B.index(i, col, k, n)]))
                .sum();
        }
    }
    c
}

/// Everything around a W8A8 matmul of `m` rows in a bucket of `bucket`, K cut at `cut`.
fn product(
    act: &[f32],
    weights: &[f32],
    m: usize,
    bucket: usize,
    k: usize,
    n: usize,
    cut: usize,
) -> Vec<f32> {
    let (la, block) = (layout_a(16), hadamard_block(k));
    let (mut work, mut scratch, mut a_scales) = (vec![0.0; k], vec![0; m * k], vec![0.0; m]);
    quantize_rows_i8(
        Rows::new(act, m, k, k),
        block,
        &mut work,
        &mut scratch,
        &mut a_scales,
    );
    let (mut rows, mut w_scales) = (vec![0i8; n * k], vec![0.0; n]);
    for (col, scale) in w_scales.iter_mut().enumerate() {
        work.copy_from_slice(&weights[col * k..][..k]);
        *scale = quantize_weight_row_i8(&mut work, block, &mut rows[col * k..][..k]);
    }
    let mut outputs = Vec::new();
    for k0 in (0..k).step_by(cut) {
        let k1 = k.min(k0 + cut);
        let mut a = vec![-1; la.len(bucket, k1 - k0)];
        interleave_a(
            Rows::new(&scratch, m, k, k).columns(k0..k1),
            la,
            bucket,
            &mut a,
        );
        let weights = Rows::new(&rows, n, k, k).columns(k0..k1);
        let mut b = vec![-1; B.len(k1 - k0, n)];
        for (g, group) in b.chunks_mut(B.strip_len(k1 - k0)).enumerate() {
            let range = g * B.gn..n.min((g + 1) * B.gn);
            pack_group(weights.rows(range), B, group);
        }
        outputs.push(native_matmul(&a, la, &b, bucket, k1 - k0, n));
    }
    let segments: Vec<&[i32]> = outputs.iter().map(Vec::as_slice).collect();
    let c = NativeOutput::new(&segments, C, bucket);
    let mut dst = vec![f32::NAN; m * n];
    unpack_i32(
        c,
        0..m,
        &a_scales,
        &w_scales,
        &mut RowsMut::new(&mut dst, n, n),
    );
    for (row, dst) in dst.chunks(n).enumerate() {
        let mut again = vec![0.0; n];
        unpack_row_i32(c, row, a_scales[row], &w_scales, &mut again);
        assert_eq!(bits(dst), bits(&again), "row {row} alone");
    }
    dst
}

#[test]
fn pipeline_agrees_with_an_exact_matmul() {
    for (m, bucket, k, n, cut) in [
        (1, 1, 64, 32, 64),
        (1, 4, 576, 33, 256),
        (5, 8, 96, 7, 64),
        (9, 9, 37, 70, 32),
        (16, 16, 512, 64, 512),
    ] {
        let (act, weights) = (values(m * k, 7), values(n * k, 8));
        let dst = product(&act, &weights, m, bucket, k, n, cut);
        for row in 0..m {
            for col in 0..n {
                let (x, w) = (&act[row * k..][..k], &weights[col * k..][..k]);
                let want = dot(x, w);
                // Each operand is off by at most half a scale per element, and a scale is at most norm / 127 because
                // the transform keeps the norm: |x| |dw| + |w| |dx| + |dx| |dw| with |dx| <= sqrt(K) |x| / 254.
                // The FP32 steps (transform, reciprocal, three roundings) add far less than the 1 % on top.
                let step = (k as f64).sqrt() / 254.0;
                let bound = norm(x) * norm(w) * (2.0 * step + step * step) * 1.01;
                let got = f64::from(dst[row * n + col]);
                assert!(
                    (got - want).abs() <= bound,
                    "{m}x{k}x{n} [{row}][{col}]: {got} {want}"
                );
            }
        }
        // That is a worst case; rounding errors of random elements cancel. An error uniform in one step has a standard
        // deviation of step / sqrt(12), a step is max / 127, and max is at most 4.5 standard deviations of a row here
        // (4 are expected once in 16,000 normal values). So an operand adds 4.5 / 127 / sqrt(12) / sqrt(K), relative to
        // the product of the norms, and two independent ones sqrt(2) times that.
        let (mut error, mut total) = (0.0, 0.0);
        for row in 0..m {
            for col in 0..n {
                let (x, w) = (&act[row * k..][..k], &weights[col * k..][..k]);
                error += (f64::from(dst[row * n + col]) - dot(x, w)).powi(2);
                total += (norm(x) * norm(w)).powi(2);
            }
        }
        let limit = 4.5 / 127.0 / 12f64.sqrt() * 2f64.sqrt() / (k as f64).sqrt();
        assert!(
            (error / total).sqrt() <= limit,
            "{m}x{k}x{n}: {}",
            (error / total).sqrt()
        );
    }
}

#[test]
fn rows_do_not_depend_on_the_bucket_or_on_other_rows() {
    let (k, n) = (192, 40);
    let (act, weights) = (values(7 * k, 9), values(n * k, 10));
    let all = product(&act, &weights, 7, 7, k, n, 64);
    for row in 0..7 {
        let alone = product(&act[row * k..][..k], &weights, 1, 1, k, n, 64);
        assert_eq!(bits(&all[row * n..][..n]), bits(&alone), "row {row}");
    }
    let padded = product(&act, &weights, 7, 16, k, n, 64);
    assert_eq!(bits(&all), bits(&padded));
    let uncut = product(&act, &weights, 7, 7, k, n, k);
    assert_eq!(bits(&all), bits(&uncut), "K segments are summed exactly");
}

#[test]
fn a_nan_activation_spoils_its_row_and_no_other() {
    let (k, n) = (64, 8);
    let (mut act, weights) = (values(3 * k, 11), values(n * k, 12));
    let clean = product(&act, &weights, 3, 4, k, n, k);
    act[k + 5] = f32::INFINITY;
    let dst = product(&act, &weights, 3, 4, k, n, k);
    assert!(dst[n..2 * n].iter().all(|x| x.is_nan()));
    assert_eq!(bits(&dst[..n]), bits(&clean[..n]));
    assert_eq!(bits(&dst[2 * n..]), bits(&clean[2 * n..]));
}

#[test]
fn one_row_packs_directly_into_its_segments() {
    let (k, block) = (96, 32);
    let src = values(k, 13);
    let (mut work, mut scratch, mut scale) = (vec![0.0; k], vec![0; k], [0.0]);
    quantize_rows_i8(
        Rows::new(&src, 1, k, k),
        block,
        &mut work,
        &mut scratch,
        &mut scale,
    );
    let (mut first, mut second) = ([1i8; 64], [1i8; 48]);
    let got = pack_row_i8(&src, block, &mut work, [&mut first[..], &mut second[..]]);
    assert_eq!(got.to_bits(), scale[0].to_bits());
    assert_eq!(first, scratch[..64]);
    assert_eq!(second[..32], scratch[64..]);
    assert_eq!(second[32..], [0; 16]);
}

#[test]
fn f16_rows_convert_one_by_one_and_unpack_with_their_factor() {
    let (m, k) = (3, 20);
    let mut src = values(m * k, 14);
    src[k..2 * k].iter_mut().for_each(|x| *x *= 1e20);
    let (mut out, mut factors) = (vec![f16::ZERO; m * k], vec![0.0; m]);
    convert_rows_f16(Rows::new(&src, m, k, k), &mut out, &mut factors);
    for row in 0..m {
        let mut alone = vec![f16::ZERO; k];
        let factor = convert_row_f16(&src[row * k..][..k], &mut alone);
        assert_eq!((factor, &alone[..]), (factors[row], &out[row * k..][..k]));
    }
    // Columns of the product with an identity: the activations come back.
    let lc = NativeC {
        elem: Elem::F32,
        ..C
    };
    let mut c = vec![0.0; lc.len(m, k)];
    for row in 0..m {
        for col in 0..k {
            c[lc.index(row, col, m)] = out[row * k + col].to_f32() / 2.0;
        }
    }
    let segments = [c.as_slice(), c.as_slice()];
    let c = NativeOutput::new(&segments, lc, m);
    let mut dst = vec![0.0; m * k];
    unpack_f32(c, 0..m, &factors, k, &mut RowsMut::new(&mut dst, k, k));
    for row in 0..m {
        let mut alone = vec![0.0; k];
        unpack_row_f32(c, row, factors[row], &mut alone);
        for col in 0..k {
            let i = row * k + col;
            assert_eq!(dst[i], out[i].to_f32() * factors[row]);
            assert_eq!(dst[i].to_bits(), alone[col].to_bits());
        }
    }
}

proptest! {
    #[test]
    fn native_a_follows_its_formula_for_every_element(
        (m, real) in (1usize..40).prop_flat_map(|m| (Just(m), 0..=m)),
        k in 1usize..200,
        extra in 0usize..3,
        s in prop::sample::select(vec![4usize, 8, 16, 32, 5]),
        gap in 0usize..5,
    ) {
        let la = layout_a(s);
        let stride = k + gap;
        let src: Vec<u32> = (1..).take(real * stride).collect();
        let mut dst = vec![u32::MAX; la.len(m, k) + extra * m * s];
        interleave_a(Rows::new(&src, real, k, stride), la, m, &mut dst);
        let mut want = vec![0; dst.len()];
        for row in 0..real {
            for col in 0..k {
                want[la.index(row, col, m)] = src[row * stride + col];
            }
        }
        prop_assert_eq!(&dst, &want);

        // The same in parts, as threads do it.
        let mut parts = vec![u32::MAX; la.len(m, k)];
        for (i, part) in parts.chunks_mut(3 * m * s).enumerate() {
            let range = (i * 3 * s).min(k)..((i + 1) * 3 * s).min(k);
            interleave_a(Rows::new(&src, real, k, stride).columns(range), la, m, part);
        }
        prop_assert_eq!(&parts[..], &want[..parts.len()]);
    }

    #[test]
    fn native_b_follows_its_formula_and_unpacks(
        n in 1usize..80,
        k in 1usize..150,
        gn in prop::sample::select(vec![8usize, 16, 32, 64]),
        gk in prop::sample::select(vec![16usize, 32]),
    ) {
        let lb = NativeB { gn, gk, ..B };
        let src: Vec<u16> = (1..).take(n * k).collect();
        let mut dst = vec![u16::MAX; lb.len(k, n)];
        let mut back = vec![0; n * k];
        for (g, group) in dst.chunks_mut(lb.strip_len(k)).enumerate() {
            let range = g * gn..n.min((g + 1) * gn);
            pack_group(Rows::new(&src, n, k, k).rows(range.clone()), lb, group);
            unpack_group(group, lb, range.len(), k, &mut back[range.start * k..range.end * k]);
        }
        let mut want = vec![0; dst.len()];
        for row in 0..n {
            for col in 0..k {
                want[lb.index(col, row, k, n)] = src[row * k + col];
            }
        }
        prop_assert_eq!(dst, want);
        prop_assert_eq!(back, src);
    }

    #[test]
    fn native_c_unpacks_any_range_of_rows_and_columns(
        (m, first, last) in (1usize..20).prop_flat_map(|m| (Just(m), 0..=m, 0..=m)),
        n in 1usize..150,
        skip in 0usize..3,
        t in prop::sample::select(vec![4usize, 8, 16]),
        segments in 1usize..4,
        gap in 0usize..4,
    ) {
        let lc = NativeC { t, ..C };
        let (rows, n0) = (first.min(last)..first.max(last), (skip * t).min(n / t * t));
        let buffers: Vec<Vec<i32>> = (0..segments).map(|i| {
            (0..).step_by(i + 1).take(lc.len(m, n)).collect()
        }).collect();
        let slices: Vec<&[i32]> = buffers.iter().map(|b| &b[n0 * m..]).collect();
        let (columns, factor) = (n - n0, (segments * (segments + 1) / 2) as f32);
        let mut dst = vec![-1.0; m * (columns + gap)];
        let mut out = RowsMut::new(&mut dst, columns, columns + gap);
        let scales = vec![2.0; m];
        let w_scales = vec![0.5; columns];
        unpack_i32(NativeOutput::new(&slices, lc, m), rows.clone(), &scales, &w_scales, &mut out);
        for row in 0..m {
            for col in 0..columns + gap {
                let written = rows.contains(&row) && col < columns;
                let value = lc.index(row, (col + n0).min(n - 1), m) as f32 * factor;
                let want = if written { value } else { -1.0 };
                prop_assert_eq!(dst[row * (columns + gap) + col], want);
            }
        }
    }

    #[test]
    fn quantization_error_is_at_most_half_a_step(
        row in prop::collection::vec(-1e4f32..1e4, 1..200),
        exponent in -90i32..90,
    ) {
        let row: Vec<f32> = row.iter().map(|x| x * 2f32.powi(exponent)).collect();
        let scale = row_scale_i8(&row);
        let mut out = vec![0; row.len()];
        quantize_row_i8(&row, scale, &mut out);
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
