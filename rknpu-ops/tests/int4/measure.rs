//! Errors and speeds to look at; run with `--release --ignored --nocapture`.

use std::hint::black_box;
use std::time::Instant;

use rknpu_ops::calibrate::Method;
use rknpu_ops::int4::{
    Digits, Product, ScaledOutput, factors_i4, quantize_group_i4, quantize_rows_i4, unpack_scaled,
};
use rknpu_ops::layout::{Elem, NativeC};
use rknpu_ops::pack::{Rows, StridedRows};
use rknpu_ops::rotation::Rotation;

use super::{digits_of, gaussian};

/// Rows whose elements are normal.
fn normal(count: usize, k: usize, seed: u64) -> Vec<f32> {
    gaussian(count * k, seed)
}

/// Rows whose elements are normal, with every 97th column 30 times as large and every 50th element
/// cubed.
fn heavy(count: usize, k: usize, seed: u64) -> Vec<f32> {
    let mut rows = gaussian(count * k, seed);
    for (i, x) in rows.iter_mut().enumerate() {
        if i % 50 == 0 {
            *x = x.powi(3);
        }
        if i % k % 97 == 11 {
            *x *= 30.0;
        }
    }
    rows
}

fn rotate(rows: &mut [f32], rotation: &Rotation, k: usize) {
    rows.chunks_mut(k).for_each(|row| rotation.apply(row));
}

/// Weights after quantization.
fn weights(rows: &[f32], k: usize, segment_k: usize, method: Method) -> Vec<f32> {
    let count = rows.len() / k;
    let mut out = vec![0; rows.len() / 2];
    let mut scales = vec![vec![0.0; count]; k.div_ceil(segment_k)];
    let mut views: Vec<_> = scales.iter_mut().map(Vec::as_mut_slice).collect();
    quantize_group_i4(
        Rows::new(rows, count, k, k),
        segment_k,
        method,
        &[],
        &mut out,
        &mut views,
    );
    let q = digits_of(&out);
    let value = |(i, q): (usize, &i8)| (f32::from(*q) + 0.5) * scales[i % k / segment_k][i / k];
    q.iter().enumerate().map(value).collect()
}

/// Activations after quantization.
fn activations(rows: &[f32], k: usize, segment_k: usize, digits: Digits) -> Vec<f32> {
    let (count, segments) = (rows.len() / k, k.div_ceil(segment_k));
    let mut out = vec![0; digits.rows() * rows.len() / 2];
    let mut factors = vec![0.0; count * factors_i4(segments)];
    let (rotation, mut work) = (Rotation::identity(k), vec![0.0; k]);
    let src = Rows::new(rows, count, k, k);
    quantize_rows_i4(
        src,
        &rotation,
        segment_k,
        digits,
        &mut work,
        &mut out,
        &mut factors,
    );
    let q = digits_of(&out);
    let per_row = digits.rows() * k;
    (0..rows.len())
        .map(|i| {
            let (m, k0) = (i / k, i % k);
            let high = f32::from(q[m * per_row + k0]);
            let q = match digits {
                Digits::One => high,
                Digits::Two | Digits::TwoBytes => 15.0 * high + f32::from(q[m * per_row + k + k0]),
            };
            q * factors[m * factors_i4(segments) + k0 / segment_k]
        })
        .collect()
}

/// Squared error of `a . w` for all rows, relative to the square of the exact products.
fn product_error(a: &[f32], w: &[f32], qa: &[f32], qw: &[f32], k: usize) -> f64 {
    let (mut error, mut total) = (0.0, 0.0);
    for (a, qa) in a.chunks(k).zip(qa.chunks(k)) {
        for (w, qw) in w.chunks(k).zip(qw.chunks(k)) {
            let exact = super::dot(a, w);
            error += (super::dot(qa, qw) - exact).powi(2);
            total += exact * exact;
        }
    }
    error / total
}

#[test]
#[ignore = "a measurement"]
fn errors() {
    let methods = [
        Method::AbsMax,
        Method::Percentile(0.99),
        Method::Percentile(0.995),
        Method::KlDivergence,
        Method::Mse,
    ];
    for (k, segment_k) in [(576, 576), (1536, 512), (2048, 576)] {
        for (name, make) in [
            ("normal", normal as fn(usize, usize, u64) -> Vec<f32>),
            ("heavy", heavy),
        ] {
            for (turned, rotation) in [
                ("as is", Rotation::identity(k)),
                ("rotated", Rotation::new(k)),
            ] {
                let (mut a, mut w) = (make(32, k, 1), make(64, k, 2));
                rotate(&mut a, &rotation, k);
                rotate(&mut w, &rotation, k);
                let [one, two] =
                    [Digits::One, Digits::Two].map(|digits| activations(&a, k, segment_k, digits));
                for method in methods {
                    let qw = weights(&w, k, segment_k, method);
                    println!(
                        "K {k}, segments of {segment_k}, {name}, {turned}, {method:?}: \
                         weights alone {:.5}, one digit {:.5}, two digits {:.5}",
                        product_error(&a, &w, &a, &qw, k),
                        product_error(&a, &w, &one, &qw, k),
                        product_error(&a, &w, &two, &qw, k),
                    );
                }
            }
        }
    }
}

/// Median duration of `work` for each of `count` elements, in nanoseconds.
fn ns(count: usize, mut work: impl FnMut()) -> f64 {
    let mut runs: Vec<f64> = (0..101)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed().as_secs_f64()
        })
        .collect();
    runs.sort_by(f64::total_cmp);
    runs[50] * 1e9 / count as f64
}

#[test]
#[ignore = "a measurement"]
fn speed() {
    for k in [576, 1536, 2048] {
        let (m, n, segments) = (64, 1024, k / 512 + 1);
        let rotation = Rotation::new(k);
        let rows = gaussian(m * k, 3);
        let mut work = vec![0.0; k];
        let spin = ns(m * k, || {
            for row in rows.chunks(k) {
                work.copy_from_slice(row);
                rotation.apply(black_box(&mut work));
            }
        });
        let mut print = format!("K {k}: rotate {spin:.2}");
        for digits in [Digits::One, Digits::Two] {
            let mut out = vec![0; digits.rows() * m * k / 2];
            let mut factors = vec![0.0; m * factors_i4(k.div_ceil(512))];
            let src = Rows::new(&rows, m, k, k);
            let t = ns(m * k, || {
                quantize_rows_i4(
                    src,
                    &rotation,
                    512,
                    digits,
                    &mut work,
                    &mut out,
                    &mut factors,
                );
            });
            print += &format!(", rotate and quantize {digits:?} {t:.2}");
            let c: Vec<i16> = vec![5; m * digits.rows() * n];
            let (w_scales, per_row) = (vec![0.5; n], factors_i4(segments));
            let factors = vec![0.25; m * per_row];
            let views = vec![
                ScaledOutput {
                    c: &c[..],
                    w_scales: &w_scales[..]
                };
                segments
            ];
            let mut dst = vec![0.0; m * n];
            let layout = NativeC {
                t: 8,
                elem: Elem::I16,
            };
            let t = ns(m * n * segments, || {
                let factors = Rows::new(&factors, m, per_row, per_row);
                let mut out = StridedRows::new(&mut dst, n, n);
                let rows = m * digits.rows();
                let product = Product::new(&views, layout, rows, digits, factors);
                unpack_scaled(product, 0..m, &mut out);
            });
            print += &format!(", unpack per segment {t:.2}");
        }
        for method in [
            Method::AbsMax,
            Method::Mse,
            Method::Percentile(0.995),
            Method::KlDivergence,
        ] {
            let t = ns(m * k, || {
                black_box(weights_packed(&rows, k, method));
            });
            print += &format!(", weights {method:?} {t:.2}");
        }
        println!("{print} (ns per element)");
    }
}

fn weights_packed(rows: &[f32], k: usize, method: Method) -> Vec<u8> {
    let count = rows.len() / k;
    let mut out = vec![0; rows.len() / 2];
    let mut scales = vec![vec![0.0; count]; k.div_ceil(512)];
    let mut views: Vec<_> = scales.iter_mut().map(Vec::as_mut_slice).collect();
    quantize_group_i4(
        Rows::new(rows, count, k, k),
        512,
        method,
        &[],
        &mut out,
        &mut views,
    );
    out
}
