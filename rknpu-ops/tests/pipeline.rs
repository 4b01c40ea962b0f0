//! Proves that the stages around a matmul keep its value: transform, quantize, pack, multiply in
//! native layout, unpack.

use half::f16;
use proptest::prelude::*;
use rknpu_ops::layout::{Elem, NativeA, NativeB, NativeC};
use rknpu_ops::pack::{
    NativeOutput, Rows, StridedRows, convert_rows_f16, interleave_a, pack_group, quantize_rows_i8,
    unpack_f32, unpack_group, unpack_i32,
};
use rknpu_ops::quant::convert_row_f16;
use rknpu_ops::rotation::Rotation;

#[path = "pipeline/quant.rs"]
mod quant;
mod vector;

use vector::{bits, dot, norm};

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
    let (la, rotation) = (layout_a(16), Rotation::new(k));
    let (mut work, mut scratch, mut a_scales) = (vec![0.0; k], vec![0; m * k], vec![0.0; m]);
    quantize_rows_i8(
        Rows::new(act, m, k, k),
        &rotation,
        &mut work,
        &mut scratch,
        &mut a_scales,
    );
    let (mut rows, mut w_scales) = (vec![0i8; n * k], vec![0.0; n]);
    let weights = Rows::new(weights, n, k, k);
    quantize_rows_i8(weights, &rotation, &mut work, &mut rows, &mut w_scales);
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
        &mut StridedRows::new(&mut dst, n, n),
    );
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
                // Each operand is off by at most half a scale per element, and a scale is at most
                // norm / 127 because the transform keeps the norm: |x| |dw| + |w| |dx| + |dx| |dw|
                // with |dx| <= sqrt(K) |x| / 254. The FP32 steps (transform, reciprocal, three
                // roundings) add far less than the 1 % on top.
                let step = (k as f64).sqrt() / 254.0;
                let bound = norm(x) * norm(w) * (2.0 * step + step * step) * 1.01;
                let got = f64::from(dst[row * n + col]);
                assert!(
                    (got - want).abs() <= bound,
                    "{m}x{k}x{n} [{row}][{col}]: {got} {want}"
                );
            }
        }
        // The bound above is a worst case; rounding errors of random elements cancel. An error that
        // is uniform in one step has a standard deviation of step / sqrt(12), a step is max / 127,
        // and max is here at most 4.5 standard deviations of a row (4 are expected once in 16,000
        // normal values). So each operand adds 4.5 / 127 / sqrt(12) / sqrt(K), relative to the
        // product of the norms, and two independent operands add sqrt(2) times that.
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
fn f16_rows_convert_one_by_one_and_unpack_with_their_factor() {
    let (m, k) = (3, 20);
    let mut src = values(m * k, 14);
    src[k..2 * k].iter_mut().for_each(|x| *x *= 1e20);
    let (mut out, mut factors) = (vec![f16::ZERO; m * k], vec![0.0; m]);
    let none = Rotation::identity(k);
    convert_rows_f16(
        Rows::new(&src, m, k, k),
        &none,
        &mut [],
        &mut out,
        &mut factors,
    );
    for row in 0..m {
        let mut alone = vec![f16::ZERO; k];
        let factor = convert_row_f16(&src[row * k..][..k], &mut alone);
        assert_eq!((factor, &alone[..]), (factors[row], &out[row * k..][..k]));
    }
    // A product with an identity matrix must return the activations.
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
    unpack_f32(c, 0..m, &factors, k, &mut StridedRows::new(&mut dst, k, k));
    for (row, (dst, factor)) in dst.chunks(k).zip(factors).enumerate() {
        let want = out[row * k..][..k].iter().map(|h| h.to_f32() * factor);
        assert!(want.eq(dst.iter().copied()), "row {row}");
    }
}

#[test]
#[should_panic(expected = "have 64")]
fn rows_whose_extent_wraps_around_are_refused() {
    let _ = Rows::new(&[0u8; 64], 3, 16, 1 << (usize::BITS - 1));
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

        // The same packing in parts, as threads do it.
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
        let mut out = StridedRows::new(&mut dst, columns, columns + gap);
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
}
