//! Whole products through the stand-in: INT4, INT8 and FP16 activations with INT4 weights.

use half::f16;
use rknpu_ops::calibrate::Method;
use rknpu_ops::ffi::{MatmulInfo, MatmulType};
use rknpu_ops::int4::{
    Digits, Product, SAFE_K_I4, ScaledOutput, SumElem, convert_rows_f16, factors, factors_i4,
    interleave_a_i4, pack_group_i4, quantize_group_i4, quantize_rows_i4, quantize_rows_i8,
    unpack_scaled,
};
use rknpu_ops::layout::{Elem, MatmulLayout, Soc};
use rknpu_ops::pack::{Rows, StridedRows, interleave_a};
use rknpu_ops::rotation::Rotation;

use super::common::{Npu, Problem};
use super::{digits_of, dot, gaussian, norm, rotated};

/// A problem, and the arithmetic for it.
#[derive(Clone, Copy, Debug)]
struct Case {
    soc: Soc,
    matmul_type: MatmulType,
    digits: Digits,
    m: usize,
    k: usize,
    n: usize,
    segment_k: usize,
    method: Method,
}

/// Operands after quantization: rows of numbers in FP64.
struct Quantized {
    act: Vec<f64>,
    weights: Vec<f64>,
}

/// The product on the stand-in, and the operands that it was made of.
fn product(case: Case, act: &[f32], weights: &[f32]) -> (Vec<f32>, Quantized) {
    let Case { m, k, n, .. } = case;
    let npu = Npu::new(case.soc);
    let layout = MatmulLayout::of(case.soc, case.matmul_type).unwrap();
    let rotation = Rotation::new(k);
    let segments = k.div_ceil(case.segment_k);

    let mut rows: Vec<f32> = weights
        .chunks(k)
        .flat_map(|w| rotated(&rotation, w))
        .collect();
    rows.resize(n * k, 0.0);
    let mut nibbles = vec![0; n * k / 2];
    let mut w_scales = vec![vec![0.0; n]; segments];
    for (group, out) in nibbles.chunks_mut(layout.b.gn * k / 2).enumerate() {
        let first = group * layout.b.gn;
        let range = first..n.min(first + layout.b.gn);
        let mut scales: Vec<_> = w_scales.iter_mut().map(|s| &mut s[range.clone()]).collect();
        let rows = Rows::new(&rows, n, k, k).rows(range);
        quantize_group_i4(rows, case.segment_k, case.method, &[], out, &mut scales);
    }

    let (mut work, src) = (vec![0.0; k], Rows::new(act, m, k, k));
    let a_rows = m * case.digits.rows();
    let mut a_nibbles = vec![0; a_rows * k / 2];
    let (mut a_int8, mut a_half) = (vec![0; m * k], vec![f16::ZERO; m * k]);
    let (scales, per_row) = if layout.a.elem == Elem::I4 {
        (segments, factors_i4(segments))
    } else {
        (1, factors(segments))
    };
    let mut a_factors = vec![0.0; m * per_row];
    let act: Vec<f64> = match layout.a.elem {
        Elem::I4 => {
            quantize_rows_i4(
                src,
                &rotation,
                case.segment_k,
                case.digits,
                &mut work,
                &mut a_nibbles,
                &mut a_factors,
            );
            let digits = digits_of(&a_nibbles);
            digits
                .chunks(case.digits.rows() * k)
                .flat_map(|row| {
                    let two = row.len() > k;
                    (0..k).map(move |i| {
                        let high = f64::from(row[i]);
                        if two {
                            15.0 * high + f64::from(row[k + i])
                        } else {
                            high
                        }
                    })
                })
                .collect()
        }
        Elem::I8 => {
            let (out, factors) = (&mut a_int8, &mut a_factors);
            quantize_rows_i8(src, &rotation, case.segment_k, &mut work, out, factors);
            a_int8.iter().map(|q| f64::from(*q)).collect()
        }
        _ => {
            let (out, factors) = (&mut a_half, &mut a_factors);
            convert_rows_f16(src, &rotation, case.segment_k, &mut work, out, factors);
            a_half.iter().map(|h| h.to_f64()).collect()
        }
    };
    let a_scale = |i: usize| a_factors[i / k * per_row + (i % k / case.segment_k).min(scales - 1)];
    let w_scale = |i: usize| w_scales[i % k / case.segment_k][i / k];
    let weights: Vec<i8> = digits_of(&nibbles);
    let quantized = Quantized {
        act: act
            .iter()
            .enumerate()
            .map(|(i, q)| q * f64::from(a_scale(i)))
            .collect(),
        weights: weights
            .iter()
            .enumerate()
            .map(|(i, q)| (f64::from(*q) + 0.5) * f64::from(w_scale(i)))
            .collect(),
    };

    let mut results = Vec::new();
    for k0 in (0..k).step_by(case.segment_k) {
        let k1 = k.min(k0 + case.segment_k);
        let mut a = vec![0xff; layout.a.bytes(a_rows, k1 - k0)];
        match layout.a.elem {
            Elem::I4 => {
                let rows = Rows::new(&a_nibbles, a_rows, k / 2, k / 2).columns(k0 / 2..k1 / 2);
                interleave_a_i4(rows, layout.a, a_rows, &mut a);
            }
            Elem::I8 => {
                let mut native = vec![0i8; a.len()];
                interleave_a(
                    Rows::new(&a_int8, m, k, k).columns(k0..k1),
                    layout.a,
                    m,
                    &mut native,
                );
                a = native.iter().map(|q| q.cast_unsigned()).collect();
            }
            _ => {
                let mut native = vec![f16::ZERO; a.len() / 2];
                interleave_a(
                    Rows::new(&a_half, m, k, k).columns(k0..k1),
                    layout.a,
                    m,
                    &mut native,
                );
                a = native.iter().flat_map(|h| h.to_le_bytes()).collect();
            }
        }
        let mut b = vec![0xff; layout.b.bytes(k1 - k0, n)];
        for (group, out) in b.chunks_mut(layout.b.strip_len(k1 - k0) / 2).enumerate() {
            let first = group * layout.b.gn;
            let rows = Rows::new(&nibbles, n, k / 2, k / 2).columns(k0 / 2..k1 / 2);
            pack_group_i4(rows.rows(first..n.min(first + layout.b.gn)), layout.b, out);
        }
        let [rows, k, n] = [a_rows, k1 - k0, n].map(|size| i32::try_from(size).unwrap());
        results.push(
            npu.multiply(MatmulInfo::native(case.matmul_type, rows, k, n), &a, &b)
                .unwrap(),
        );
    }
    let a_factors = Rows::new(&a_factors, m, per_row, per_row);
    let dst = match layout.c.elem {
        Elem::I16 => unpack(case, &results, &w_scales, a_factors, i16::from_le_bytes),
        Elem::I32 => unpack(case, &results, &w_scales, a_factors, i32::from_le_bytes),
        _ => unpack(case, &results, &w_scales, a_factors, f32::from_le_bytes),
    };
    (dst, quantized)
}

fn unpack<T: SumElem, const BYTES: usize>(
    case: Case,
    results: &[Vec<u8>],
    w_scales: &[Vec<f32>],
    a_factors: Rows<'_, f32>,
    read: impl Fn([u8; BYTES]) -> T,
) -> Vec<f32> {
    let layout = MatmulLayout::of(case.soc, case.matmul_type).unwrap().c;
    let c: Vec<Vec<T>> = results
        .iter()
        .map(|bytes| {
            bytes
                .as_chunks()
                .0
                .iter()
                .map(|bytes| read(*bytes))
                .collect()
        })
        .collect();
    let segments: Vec<_> = c
        .iter()
        .zip(w_scales)
        .map(|(c, w_scales)| ScaledOutput {
            c: c.as_slice(),
            w_scales,
        })
        .collect();
    let mut dst = vec![f32::NAN; case.m * case.n];
    let mut out = StridedRows::new(&mut dst, case.n, case.n);
    let rows = case.m * case.digits.rows();
    let product = Product::new(&segments, layout, rows, case.digits, a_factors);
    unpack_scaled(product, 0..case.m, &mut out);
    dst
}

#[test]
fn products_are_those_of_the_quantized_operands() {
    let rk3588 = (Soc::Rk3588, MatmulType::I4_I4_I16);
    let mixed = [MatmulType::I8_I4_I32, MatmulType::F16_I4_F32].map(|t| (Soc::Rk3576, t));
    let types = [
        (rk3588, Digits::One),
        (rk3588, Digits::Two),
        (mixed[0], Digits::One),
        (mixed[1], Digits::One),
    ];
    for ((soc, matmul_type), digits) in types {
        for (m, k, n, segment_k) in [
            (1, 576, 64, SAFE_K_I4),
            (5, 1536, 128, 512),
            (3, 2016, 64, SAFE_K_I4),
        ] {
            for method in [Method::AbsMax, Method::Mse, Method::KlDivergence] {
                let case = Case {
                    soc,
                    matmul_type,
                    digits,
                    m,
                    k,
                    n,
                    segment_k,
                    method,
                };
                let (act, weights) = (gaussian(m * k, 1), gaussian(n * k, 2));
                let (dst, quantized) = product(case, &act, &weights);
                check(case, &act, &weights, &dst, &quantized);
            }
        }
    }
}

/// Compares a product with the product of the quantized operands, and with that of the original
/// ones.
fn check(case: Case, act: &[f32], weights: &[f32], dst: &[f32], quantized: &Quantized) {
    let Case { m, k, n, .. } = case;
    let segments = k.div_ceil(case.segment_k) as f64;
    let rotation = Rotation::new(k);
    for row in 0..m {
        let (x, qx) = (&act[row * k..][..k], &quantized.act[row * k..][..k]);
        for col in 0..n {
            let (w, qw) = (&weights[col * k..][..k], &quantized.weights[col * k..][..k]);
            let got = f64::from(dst[row * n + col]);
            let exact: f64 = qx.iter().zip(qw).map(|(x, w)| x * w).sum();
            let size: f64 = qx.iter().zip(qw).map(|(x, w)| (x * w).abs()).sum();
            // For each segment there are a conversion, two products and an addition. With FP16 the
            // device also adds groups of 32, at most as many as a segment has. Each step is off by
            // 2^-24 of a sum that `size` bounds.
            let groups = if case.matmul_type == MatmulType::F16_I4_F32 {
                case.segment_k as f64 / 32.0
            } else {
                0.0
            };
            let bound = size * (3.0 + segments + groups) * 2f64.powi(-24);
            assert!(
                (got - exact).abs() <= bound,
                "{case:?} [{row}][{col}]: {got} {exact}"
            );
            // The quantization errors of both operands bound that of the product (Cauchy-Schwarz).
            let lost = |x: &[f32], q: &[f64]| -> f64 {
                let x = rotated(&rotation, x);
                x.iter()
                    .zip(q)
                    .map(|(x, q)| (f64::from(*x) - q).powi(2))
                    .sum::<f64>()
                    .sqrt()
            };
            let (dx, dw) = (lost(x, qx), lost(w, qw));
            let bound = bound + (norm(x) * dw + norm(w) * dx + dx * dw) * 1.0001;
            assert!((got - dot(x, w)).abs() <= bound, "{case:?} [{row}][{col}]");
            // The best 16 levels leave 1.16 % of the square of normal values, and up to 2 % if a
            // few hundred values decide. Clipping at the largest magnitude, if that is at most 5
            // standard deviations, leaves (5 / 7.5)^2 / 12. The divergence method ignores the
            // error, but clips no more than this method.
            let limit = match case.method {
                Method::Mse => 0.02,
                _ => 0.0371,
            };
            assert!(
                (dw / norm(w)).powi(2) <= limit,
                "{case:?}: weights {}",
                (dw / norm(w)).powi(2)
            );
            assert!((dx / norm(x)).powi(2) <= 0.022, "{case:?}: activations");
        }
    }
}

#[test]
fn rows_depend_on_no_other_row() {
    let case = Case {
        soc: Soc::Rk3588,
        matmul_type: MatmulType::I4_I4_I16,
        digits: Digits::Two,
        m: 3,
        k: 704,
        n: 64,
        segment_k: 352,
        method: Method::Mse,
    };
    let (act, weights) = (gaussian(3 * case.k, 3), gaussian(case.n * case.k, 4));
    let all = product(case, &act, &weights).0;
    for row in 0..3 {
        let alone = product(
            Case { m: 1, ..case },
            &act[row * case.k..][..case.k],
            &weights,
        )
        .0;
        assert_eq!(
            super::bits(&all[row * case.n..][..case.n]),
            super::bits(&alone)
        );
    }
}

/// The largest sums there are, with one sign and the other.
#[test]
fn no_sum_saturates_up_to_the_safe_length_and_longer_ones_do() {
    let npu = Npu::new(Soc::Rk3588);
    assert_eq!(SAFE_K_I4, 576);
    for (k, a, saturates) in [
        (576, 7, false),
        (576, -7, false),
        (608, 7, true),
        (608, -7, true),
    ] {
        let mut problem = Problem::random(Soc::Rk3588, MatmulType::I4_I4_I16, [2, k, 64], 1);
        problem.a.data.fill(f64::from(a));
        problem.b.data.fill(-8.0);
        let c = npu
            .multiply(problem.info, &problem.a_bytes(), &problem.b_bytes())
            .unwrap();
        let exact = a * -8 * i32::try_from(k).unwrap();
        for c in c.as_chunks::<2>().0 {
            let got = i32::from(i16::from_le_bytes(*c));
            assert_eq!(got != exact, saturates, "K = {k}: {got} {exact}");
        }
    }
}
