//! Planes of another size, reflected rows, and added windows against ggml's definitions in f64.

use hexagon_ops::serve;
use hexagon_ops::wire::*;

use crate::common::Numbers;
use crate::tensor::{Bench, DENSE, GAPS, PERMUTED, Params, Tensor as Case, indices, limit};

const F: u32 = TYPE_F32;
const ALIGNS: u32 = 1 << 8;
const ANTIALIASED: u32 = 1 << 9;

fn params(words: &[u32]) -> Params {
    let mut params = [0; 16];
    params[..words.len()].copy_from_slice(words);
    params
}

/// Elements of the source and their weights for element `i` of `to`, of `from` elements.
fn taps(mode: u32, i: usize, from: usize, to: usize) -> Vec<(usize, f64)> {
    let real = |n: usize| f64::from(u32::try_from(n).unwrap());
    let aligns = mode & ALIGNS != 0;
    let scale = match aligns && from > 1 && to > 1 {
        true => real(to - 1) / real(from - 1),
        false => real(to) / real(from),
    };
    let offset = if aligns { 0.0 } else { 0.5 };
    let last = real(from - 1);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "clamped"
    )]
    let clamp = |x: f64| x.clamp(0.0, last) as usize;
    let x = (real(i) + offset) / scale - offset;
    match mode & !ALIGNS {
        0 => vec![(clamp((real(i) / scale).floor()), 1.0)],
        1 => {
            let place = x.floor().clamp(0.0, last);
            let rest = (x - place).clamp(0.0, 1.0);
            vec![(clamp(place), 1.0 - rest), (clamp(x.floor() + 1.0), rest)]
        }
        2 => {
            let weight = |distance: f64| {
                let (a, d) = (-0.75, distance.abs());
                if d <= 1.0 {
                    (a + 2.0) * d.powi(3) - (a + 3.0) * d.powi(2) + 1.0
                } else {
                    a * d.powi(3) - 5.0 * a * d.powi(2) + 8.0 * a * d - 4.0 * a
                }
            };
            let at = |step: f64| (clamp(x.floor() + step), weight(x - x.floor() - step));
            [-1.0, 0.0, 1.0, 2.0].map(at).to_vec()
        }
        _ => {
            let reach = (1.0 / scale).max(1.0);
            let all = (0..from).map(|k| (k, (1.0 - (real(k) - x).abs() / reach).max(0.0)));
            let all: Vec<_> = all.collect();
            let sum: f64 = all.iter().map(|(_, weight)| weight).sum();
            all.into_iter()
                .map(|(k, weight)| (k, weight / sum))
                .collect()
        }
    }
}

#[test]
fn planes_grow_and_shrink_in_all_modes() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (from, to) in [
        ([12, 8, 3, 2], [24, 16, 3, 2]),
        ([2, 5, 7, 11], [5, 7, 11, 13]),
        ([5, 7, 11, 4], [2, 5, 7, 2]),
        ([1, 4, 3, 2], [2, 8, 3, 2]),
        ([4, 1, 3, 2], [1, 1, 3, 2]),
        ([300, 3, 1, 1], [290, 2, 1, 1]),
    ] {
        for mode in [0, 1, 2, 1 | ALIGNS, 2 | ALIGNS, 1 | ANTIALIASED] {
            let src = Case::random(F, from, PERMUTED, 1.0, &mut numbers);
            let mut dst = Case::zeros(F, to, GAPS);
            let near = |dim: usize, i| taps(0, i, from[dim], to[dim])[0].0;
            for (index, [x, y, z, n]) in indices(to).enumerate() {
                let (z, n) = (near(2, z), near(3, n));
                for (sy, wy) in taps(mode, y, from[1], to[1]) {
                    for (sx, wx) in taps(mode, x, from[0], to[0]) {
                        dst.values[index] += src.value([sx, sy, z, n]) * wx * wy;
                    }
                }
            }
            // Positions are computed in f32, as in ggml.
            bench.check((KERNEL_UPSCALE, params(&[mode])), &dst, &[src], false, 1e-9);
        }
    }
    let src = Case::zeros(F, [4, 4, 1, 1], DENSE);
    for mode in [3, ANTIALIASED, 2 | ANTIALIASED, 1 << 10] {
        let dst = Case::zeros(F, [8, 8, 1, 1], DENSE);
        bench.refused(
            (KERNEL_UPSCALE, params(&[mode])),
            &dst,
            std::slice::from_ref(&src),
            serve::OPERAND,
        );
    }
}

#[test]
fn rows_are_reflected_at_both_ends() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (n, front, back) in [(1, 0, 0), (5, 4, 4), (70, 3, 40), (33, 0, 7), (300, 299, 1)] {
        let src = Case::random(F, [n, 3, 2, 1], GAPS, 1.0, &mut numbers);
        let mut dst = Case::zeros(F, [front + n + back, 3, 2, 1], GAPS);
        for (index, [i, y, z, _]) in indices(dst.ne).enumerate() {
            let k = i.abs_diff(front);
            let k = if k < n { k } else { 2 * (n - 1) - k };
            dst.values[index] = src.value([k, y, z, 0]);
        }
        let op = (
            KERNEL_PAD_REFLECT_1D,
            params(&[u32::try_from(front).unwrap()]),
        );
        bench.check(op, &dst, &[src], false, 0.0);
    }
    let src = Case::zeros(F, [4, 2, 1, 1], DENSE);
    for (long, front) in [(8, 4), (8, 0), (3, 0), (9, 10)] {
        let dst = Case::zeros(F, [long, 2, 1, 1], DENSE);
        let op = (KERNEL_PAD_REFLECT_1D, params(&[front]));
        bench.refused(op, &dst, std::slice::from_ref(&src), serve::OPERAND);
    }
}

#[test]
fn windows_are_added_where_they_overlap() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for dtype in [F, TYPE_F16, TYPE_BF16] {
        for (window, channels, columns, stride, pad) in [
            (16, 3, 40, 8, 0),
            (4, 5, 7, 2, 1),
            (3, 2, 9, 5, 0),
            (1, 1, 1, 1, 0),
            (7, 4, 300, 1, 3),
        ] {
            let src = Case::random(
                dtype,
                [window * channels, columns, 1, 1],
                DENSE,
                1.0,
                &mut numbers,
            );
            let length = (columns - 1) * stride + window - 2 * pad;
            let mut dst = Case::zeros(dtype, [length, channels, 1, 1], DENSE);
            for [k, c, i, _] in indices([window, channels, columns, 1]) {
                if let Some(t) = (i * stride + k).checked_sub(pad).filter(|t| *t < length) {
                    dst.values[c * length + t] += src.value([c * window + k, i, 0, 0]);
                }
            }
            let words = [stride, channels, pad].map(|n| u32::try_from(n).unwrap());
            let op = (KERNEL_COL2IM_1D, params(&words));
            bench.check(op, &dst, &[src], false, limit(dtype));
        }
    }
    let (src, dst) = (
        Case::zeros(F, [12, 3, 1, 1], DENSE),
        Case::zeros(F, [8, 4, 1, 1], DENSE),
    );
    for words in [
        [0, 4, 0],
        [1, 0, 0],
        [1, 5, 0],
        [1, 3, 0],
        [1 << 24, 4, 0],
        [1, 4, 1 << 24],
    ] {
        let op = (KERNEL_COL2IM_1D, params(&words));
        bench.refused(op, &dst, std::slice::from_ref(&src), serve::OPERAND);
    }
}
