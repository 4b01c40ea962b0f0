//! Operations that place elements: padding, rolling, triangles, diagonals, ramps, windows; all
//! exact.

use hexagon_ops::serve;
use hexagon_ops::wire::*;

use crate::common::Numbers;
use crate::tensor::{
    Bench, DENSE, GAPS, PERMUTED, Params, TRANSPOSED, Tensor as Case, floats, indices,
};

const F: u32 = TYPE_F32;
const H: u32 = TYPE_F16;

/// Signed parameters.
fn ints(values: &[i32]) -> Params {
    let mut params = [0; 16];
    for (param, value) in params.iter_mut().zip(values) {
        *param = value.cast_unsigned();
    }
    params
}

#[expect(clippy::cast_possible_truncation, reason = "small numbers")]
fn around(index: usize, front: i32, count: usize) -> usize {
    (index as i32 - front).rem_euclid(count as i32) as usize
}

#[test]
fn padding_is_zero_or_repeats() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    let ne = [33, 4, 3, 2];
    for dtype in [F, H, TYPE_BF16, TYPE_I32] {
        for place in [DENSE, GAPS, PERMUTED, TRANSPOSED] {
            for (front, back) in [
                ([0, 0, 0, 0], [1, 2, 3, 4]),
                ([3, 1, 2, 1], [4, 0, 1, 2]),
                ([1, 0, 0, 0], [0, 0, 0, 0]),
                ([300, 0, 1, 0], [70, 1, 0, 0]),
            ] {
                let src = Case::random(dtype, ne, place, 50.0, &mut numbers);
                let dst_ne = [0, 1, 2, 3].map(|i| ne[i] + front[i] + back[i]);
                let mut dst = Case::zeros(dtype, dst_ne, GAPS);
                let mut params = [0; 16];
                for i in 0..4 {
                    params[2 * i] = u32::try_from(front[i]).unwrap();
                    params[2 * i + 1] = u32::try_from(back[i]).unwrap();
                }
                let src = std::slice::from_ref(&src);
                for circular in [0, 1] {
                    params[8] = circular;
                    dst.values = indices(dst_ne)
                        .map(|at| {
                            let inside =
                                (0..4).all(|i| (front[i]..front[i] + ne[i]).contains(&at[i]));
                            if circular == 1 || inside {
                                let front = front.map(|n| i32::try_from(n).unwrap());
                                src[0].value([0, 1, 2, 3].map(|i| around(at[i], front[i], ne[i])))
                            } else {
                                0.0
                            }
                        })
                        .collect();
                    bench.check((KERNEL_PAD, params), &dst, src, false, 0.0);
                }
            }
        }
    }
    let src = Case::random(F, ne, DENSE, 1.0, &mut numbers);
    let dst = Case::zeros(F, ne, DENSE);
    for params in [
        ints(&[1]),
        ints(&[-1]),
        ints(&[i32::MIN]),
        ints(&[i32::MAX]),
    ] {
        let src = std::slice::from_ref(&src);
        bench.refused((KERNEL_PAD, params), &dst, src, serve::OPERAND);
    }
}

#[test]
fn rolling_goes_round() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    let lines =
        [[10, 5, 4, 3], [200, 5, 2, 3]].map(|ne| [DENSE, GAPS, PERMUTED].map(|place| (ne, place)));
    for (ne, place) in lines.into_iter().flatten() {
        for moves in [
            [3, -2, 1, -1],
            [0, 0, 0, 0],
            [-1, 7, 400, -3],
            [10, 1, 0, 0],
            [i32::MIN, i32::MAX, 0, 0],
        ] {
            let src = Case::random(F, ne, place, 1.0, &mut numbers);
            let mut dst = Case::zeros(F, ne, DENSE);
            let moved = [0, 1, 2, 3].map(|i: usize| moves[i] % i32::try_from(ne[i]).unwrap());
            dst.values = indices(ne)
                .map(|at| src.value([0, 1, 2, 3].map(|i| around(at[i], moved[i], ne[i]))))
                .collect();
            bench.check((KERNEL_ROLL, ints(&moves)), &dst, &[src], false, 0.0);
        }
    }
}

#[test]
fn triangles_and_masks_keep_one_side_of_the_diagonal() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for ne in [
        [10, 10, 4, 3],
        [300, 300, 1, 2],
        [1, 1, 1, 1],
        [7, 20, 2, 1],
        [600, 3, 1, 1],
    ] {
        for (dtype, place) in [(F, DENSE), (F, GAPS), (H, PERMUTED)] {
            let src = Case::random(dtype, ne, place, 1.0, &mut numbers);
            let mut dst = Case::zeros(dtype, ne, DENSE);
            let sides: [fn(usize, usize) -> bool; 4] =
                [|i, r| i >= r, |i, r| i > r, |i, r| i <= r, |i, r| i < r];
            let src = std::slice::from_ref(&src);
            for (side, stays) in (0..).zip(sides) {
                dst.values = indices(ne)
                    .map(|at| {
                        if stays(at[0], at[1]) {
                            src[0].value(at)
                        } else {
                            0.0
                        }
                    })
                    .collect();
                bench.check((KERNEL_TRI, ints(&[side])), &dst, src, false, 0.0);
                bench.check((KERNEL_TRI, ints(&[side])), &dst, src, true, 0.0);
            }
            for past in [0, 5, 290] {
                let have = bench.run((KERNEL_DIAG_MASK_INF, ints(&[past])), &dst, src, false);
                let past = usize::try_from(past).unwrap();
                for (at, have) in indices(ne).zip(have) {
                    let want = if at[0] > past + at[1] {
                        f64::NEG_INFINITY
                    } else {
                        src[0].value(at)
                    };
                    assert!(f64::from(have) == want, "{at:?} after {past}: {have}");
                }
            }
            bench.refused((KERNEL_TRI, ints(&[4])), &dst, src, serve::OPERAND);
        }
    }
}

#[test]
fn rows_become_diagonals() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for n in [1, 79, 270] {
        let src = Case::random(F, [n, 1, 2, 3], GAPS, 1.0, &mut numbers);
        let mut dst = Case::zeros(F, [n, n, 2, 3], DENSE);
        dst.values = indices(dst.ne)
            .map(|at| if at[0] == at[1] { src.value(at) } else { 0.0 })
            .collect();
        bench.check((KERNEL_DIAG, [0; 16]), &dst, &[src], false, 0.0);
    }
}

#[test]
fn ramps_start_and_step() {
    let mut bench = Bench::new();
    for (ne, start, step) in [
        ([303, 7, 2, 1], -152.0, 0.0),
        ([10_000, 1, 1, 1], 0.0, 1.0),
        ([33, 1, 1, 1], 2.5, -0.125),
    ] {
        for dtype in [F, H] {
            if dtype == H && ne[0] > 2048 {
                continue;
            }
            let mut dst = Case::zeros(dtype, ne, GAPS);
            dst.values = indices(ne)
                .map(|at| f64::from(start) + at[0] as f64 * f64::from(step))
                .collect();
            bench.check(
                (KERNEL_FILL, floats(&[start, 99.0, step])),
                &dst,
                &[],
                false,
                0.0,
            );
        }
    }
}

/// A window over an image: ggml's parameters, and the image's coordinates of an element by its
/// formula.
struct Window {
    /// Strides, padding and dilations of width, height and depth.
    stride: [usize; 3],
    pad: [usize; 3],
    dilation: [usize; 3],
    /// Width, height and depth.
    size: [usize; 3],
}

impl Window {
    /// Output positions along a dimension.
    fn positions(&self, dim: usize, count: usize) -> usize {
        let reach = self.dilation[dim] * (self.size[dim] - 1) + 1;
        (count + 2 * self.pad[dim] - reach) / self.stride[dim] + 1
    }

    /// Returns the coordinate of element `k` of the window at output position `o`, if it is in
    /// the image.
    fn inside(&self, dim: usize, o: usize, k: usize, count: usize) -> Option<usize> {
        let at = o * self.stride[dim] + k * self.dilation[dim];
        at.checked_sub(self.pad[dim]).filter(|at| *at < count)
    }
}

/// Lines of windows that are copied as vectors: of many channels, of as many elements as a patch
/// has, and at the end of memory.
#[test]
fn windows_of_wide_images_become_rows() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    let u = |n: usize| u32::try_from(n).unwrap();
    for (channels, width, size, stride, pad) in [
        (100, 70, 3, 1, 1),
        (90, 41, 3, 2, 1),
        (3, 96, 16, 16, 0),
        (9, 64, 32, 16, 0),
        (5, 90, 40, 7, 2),
    ] {
        for dtype in [F, H] {
            let window = Window {
                stride: [stride; 3],
                pad: [pad; 3],
                dilation: [1; 3],
                size: [size, 1, 1],
            };
            let count = window.positions(0, width);
            let mut params = [0; 16];
            params[..7].copy_from_slice(&[u(stride), 1, u(pad), 0, 1, 1, 0]);
            params[13..].copy_from_slice(&[u(size), 1, 1]);
            let src = Case::of(F, [width, channels, 1, 1], DENSE, || {
                (numbers.float() * 99.0).round()
            });
            let mut dst = Case::zeros(dtype, [channels * size, count, 1, 1], DENSE);
            dst.values = indices(dst.ne)
                .map(|[i, x, ..]| {
                    let x = window.inside(0, x, i % size, width);
                    x.map_or(0.0, |x| src.value([x, i / size, 0, 0]))
                })
                .collect();
            let op = (KERNEL_IM2COL, params);
            bench.check(op, &dst, std::slice::from_ref(&src), false, 0.0);

            // A plane of square patches.
            let height = 2 * size;
            let rows = (height + 2 * pad - size) / stride + 1;
            let planes = channels.min(3);
            params[..7].copy_from_slice(&[u(stride), u(stride), u(pad), u(pad), 1, 1, 1]);
            params[14] = u(size);
            let src = Case::of(F, [width, height, planes, 1], DENSE, || {
                (numbers.float() * 99.0).round()
            });
            let mut dst = Case::zeros(dtype, [planes * size * size, count, rows, 1], DENSE);
            dst.values = indices(dst.ne)
                .map(|[i, x, y, _]| {
                    let x = window.inside(0, x, i % size, width);
                    let y = window.inside(1, y, i / size % size, height);
                    let value = |x, y| src.value([x, y, i / (size * size), 0]);
                    x.zip(y).map_or(0.0, |(x, y)| value(x, y))
                })
                .collect();
            bench.check((KERNEL_IM2COL, params), &dst, &[src], false, 0.0);
        }
    }
}

#[test]
fn windows_of_images_become_rows() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (stride, pad, dilation) in [(1, 0, 1), (3, 3, 1), (1, 1, 3), (2, 3, 2)] {
        for (channels, batch, place) in [(2, 2, DENSE), (30, 1, GAPS)] {
            let window = Window {
                stride: [stride, 1, stride],
                pad: [pad, pad, 1],
                dilation: [dilation, 2, 1],
                size: [3, 2, 2],
            };
            let [kw, kh, kd] = window.size;
            let [w, h, d] = [11, 9, 5];
            let [ow, oh, od] = [0, 1, 2].map(|i| window.positions(i, [w, h, d][i]));
            let u = |n: usize| u32::try_from(n).unwrap();
            let mut params = [0; 16];
            params[13..].copy_from_slice(&[u(kw), u(kh), 1]);

            // Planes, to f32 and to f16.
            let (s, p, l) = (window.stride, window.pad, window.dilation);
            params[..7].copy_from_slice(&[u(s[0]), u(s[1]), u(p[0]), u(p[1]), u(l[0]), u(l[1]), 1]);
            for dtype in [F, H] {
                let src = Case::of(F, [w, h, channels, batch], place, || {
                    (numbers.float() * 99.0).round()
                });
                let mut dst = Case::zeros(dtype, [channels * kh * kw, ow, oh, batch], DENSE);
                dst.values = indices(dst.ne)
                    .map(|[i, x, y, n]| {
                        let x = window.inside(0, x, i % kw, w);
                        let y = window.inside(1, y, i / kw % kh, h);
                        let value = |x, y| src.value([x, y, i / (kw * kh), n]);
                        x.zip(y).map_or(0.0, |(x, y)| value(x, y))
                    })
                    .collect();
                bench.check((KERNEL_IM2COL, params), &dst, &[src], false, 0.0);
            }

            // Lines.
            (params[6], params[14]) = (0, 1);
            let src = Case::random(F, [w, channels, batch, 1], place, 1.0, &mut numbers);
            let mut dst = Case::zeros(F, [channels * kw, ow, batch, 1], DENSE);
            dst.values = indices(dst.ne)
                .map(|[i, x, n, _]| {
                    let x = window.inside(0, x, i % kw, w);
                    x.map_or(0.0, |x| src.value([x, i / kw, n, 0]))
                })
                .collect();
            bench.check((KERNEL_IM2COL, params), &dst, &[src], false, 0.0);

            // Volumes.
            let channels = channels.min(3);
            for i in 0..3 {
                (params[i], params[3 + i], params[6 + i]) = (u(s[i]), u(p[i]), u(l[i]));
            }
            params[9] = u(channels);
            params[13..].copy_from_slice(&[u(kw), u(kh), u(kd)]);
            let src = Case::random(F, [w, h, d, channels * batch], place, 1.0, &mut numbers);
            let mut dst = Case::zeros(F, [channels * kd * kh * kw, ow, oh, od * batch], DENSE);
            dst.values = indices(dst.ne)
                .map(|[i, x, y, n]| -> Option<f64> {
                    let x = window.inside(0, x, i % kw, w)?;
                    let y = window.inside(1, y, i / kw % kh, h)?;
                    let z = window.inside(2, n % od, i / (kw * kh) % kd, d)?;
                    let channel = i / (kw * kh * kd);
                    Some(src.value([x, y, z, n / od * channels + channel]))
                })
                .map(|value| value.unwrap_or(0.0))
                .collect();
            let src = [src];
            bench.check((KERNEL_IM2COL_3D, params), &dst, &src, false, 0.0);
            params[9] = 0;
            bench.refused((KERNEL_IM2COL_3D, params), &dst, &src, serve::OPERAND);
        }
    }
}
