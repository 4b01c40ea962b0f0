//! Pooling against ggml's definition in f64.

use hexagon_ops::serve;
use hexagon_ops::wire::*;

use crate::common::Numbers;
use crate::tensor::{Bench, DENSE, GAPS, PERMUTED, Tensor as Case, indices, limit};

/// Coordinates inside of a window of `size` at position `o`.
fn window(o: usize, size: usize, stride: usize, pad: usize, count: usize) -> Vec<usize> {
    let positions = o * stride..o * stride + size;
    positions
        .filter_map(|at| at.checked_sub(pad))
        .filter(|at| *at < count)
        .collect()
}

#[test]
fn windows_give_their_largest_or_their_mean() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (ne, place) in [
        ([10, 9, 3, 2], DENSE),
        ([600, 4, 1, 1], GAPS),
        ([33, 8, 2, 1], PERMUTED),
    ] {
        for (k, s, p) in [
            ([1, 1], [1, 1], [0, 0]),
            ([3, 2], [2, 1], [1, 1]),
            ([2, 3], [3, 2], [3, 0]),
        ] {
            let src = [Case::random(TYPE_F32, ne, place, 2.0, &mut numbers)];
            let out = |i: usize| (ne[i] + 2 * p[i] - k[i]) / s[i] + 1;
            for (mean, is_line) in [(0, false), (1, false), (0, true), (1, true)] {
                let height = if is_line { ne[1] } else { out(1) };
                let mut dst = Case::zeros(TYPE_F32, [out(0), height, ne[2], ne[3]], DENSE);
                dst.values = indices(dst.ne)
                    .map(|[x, y, i2, i3]| {
                        let xs = window(x, k[0], s[0], p[0], ne[0]);
                        let ys = if is_line {
                            vec![y]
                        } else {
                            window(y, k[1], s[1], p[1], ne[1])
                        };
                        let pairs = ys.iter().flat_map(|y| xs.iter().map(move |x| (*x, *y)));
                        let covered: Vec<f64> =
                            pairs.map(|(x, y)| src[0].value([x, y, i2, i3])).collect();
                        let size = if is_line {
                            covered.len().max(1)
                        } else {
                            k[0] * k[1]
                        };
                        if mean == 1 {
                            covered.iter().sum::<f64>() / size as f64
                        } else {
                            covered.into_iter().fold(f64::from(f32::MIN), f64::max)
                        }
                    })
                    .collect();
                let list = if is_line {
                    vec![mean, k[0], s[0], p[0]]
                } else {
                    vec![mean, k[0], k[1], s[0], s[1], p[0], p[1]]
                };
                let mut params = [0; 16];
                for (param, value) in params.iter_mut().zip(list) {
                    *param = u32::try_from(value).unwrap();
                }
                let kernel = if is_line {
                    KERNEL_POOL_1D
                } else {
                    KERNEL_POOL_2D
                };
                bench.check((kernel, params), &dst, &src, false, limit(TYPE_F32));
                for (word, value) in [(0, 2), (1, 0), (1, 5000), (2, 0)] {
                    let mut wrong = params;
                    wrong[word] = value;
                    bench.refused((kernel, wrong), &dst, &src, serve::OPERAND);
                }
            }
        }
    }
}
