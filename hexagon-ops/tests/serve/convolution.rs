//! Convolutions against the sums that define them, in f64.

use hexagon_ops::serve;
use hexagon_ops::wire::*;
use test_kit::nmse;

use crate::common::Numbers;
use crate::tensor::{Bench, DENSE, GAPS, Place, Tensor as Case, indices};

const F: u32 = TYPE_F32;
const H: u32 = TYPE_F16;
/// A few hundred roundings, squared.
const LIMIT: f64 = 1e-11;
/// Channels first, as vision models have them.
const CHANNELS: Place = Place {
    order: [2, 0, 1, 3],
    gap: 0,
};

/// Runs a convolution, and compares with `dst`.
fn check(bench: &mut Bench, kernel: u32, params: &[i32], dst: &Case, src: &[Case]) {
    let mut words = [0; 16];
    for (word, param) in words.iter_mut().zip(params) {
        *word = param.cast_unsigned();
    }
    let body = bench.place_wide((kernel, words), dst, src);
    let have = bench.run_command(&Command::new(0, &body), dst, body.dst.offset);
    let error = nmse(&have, &dst.values);
    assert!(
        error <= LIMIT,
        "kernel {kernel} with {params:?} of {:?}: {error:e}",
        src.iter().map(|src| src.ne).collect::<Vec<_>>()
    );
}

/// Length of a result along one dimension.
fn length(source: usize, window: usize, [stride, pad, dilation]: [i32; 3]) -> usize {
    let [source, window] = [source, window].map(|n| i32::try_from(n).unwrap());
    usize::try_from((source + 2 * pad - dilation * (window - 1) - 1) / stride + 1).unwrap()
}

/// Index that tap `k` reads at position `o`.
fn index(o: usize, k: usize, [stride, pad, dilation]: [i32; 3], size: usize) -> Option<usize> {
    let [o, k] = [o, k].map(|n| i32::try_from(n).unwrap());
    let at = usize::try_from(o * stride - pad + k * dilation).ok()?;
    (at < size).then_some(at)
}

#[test]
fn planes_with_strides_padding_and_dilation() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    // Source, window, number of filters, type, and [stride, padding, dilation] along width and
    // height.
    for (ne, window, filters, dtype, along) in [
        ([19, 17, 8, 2], [3, 3], 5, F, [[1, 1, 1], [1, 1, 1]]),
        ([19, 17, 3, 3], [2, 3], 9, H, [[2, 4, 2], [3, 2, 1]]),
        ([13, 11, 16, 1], [1, 1], 4, H, [[1, 0, 1], [1, 0, 1]]),
        ([70, 2, 1, 1], [5, 1], 1, TYPE_BF16, [[1, 2, 1], [1, 0, 1]]),
        ([14, 14, 3, 2], [7, 7], 6, F, [[7, 0, 1], [7, 0, 1]]),
        ([1, 1, 1, 1], [1, 1], 1, F, [[1, 0, 1], [1, 0, 1]]),
    ] {
        for place in [DENSE, GAPS, CHANNELS] {
            let [w, h, channels, batch] = ne;
            let x = Case::random(F, ne, place, 1.0, &mut numbers);
            let k = Case::random(
                dtype,
                [window[0], window[1], channels, filters],
                DENSE,
                1.0,
                &mut numbers,
            );
            let out = [0, 1].map(|i| length(ne[i], window[i], along[i]));
            let mut dst = Case::zeros(F, [out[0], out[1], filters, batch], DENSE);
            let mut each = Case::zeros(F, [out[0], out[1], channels, batch], DENSE);
            let one = Case::random(
                dtype,
                [window[0], window[1], 1, channels],
                GAPS,
                1.0,
                &mut numbers,
            );
            let sum = |[ox, oy]: [usize; 2], c: usize, n, weight: &dyn Fn(usize, usize) -> f64| {
                let mut sum = 0.0;
                for ky in 0..window[1] {
                    for kx in 0..window[0] {
                        let at = (index(ox, kx, along[0], w), index(oy, ky, along[1], h));
                        if let (Some(ix), Some(iy)) = at {
                            sum += x.value([ix, iy, c, n]) * weight(kx, ky);
                        }
                    }
                }
                sum
            };
            for (i, [ox, oy, f, n]) in indices(dst.ne).enumerate() {
                dst.values[i] = (0..channels)
                    .map(|c| sum([ox, oy], c, n, &|kx, ky| k.value([kx, ky, c, f])))
                    .sum();
            }
            for (i, [ox, oy, c, n]) in indices(each.ne).enumerate() {
                each.values[i] = sum([ox, oy], c, n, &|kx, ky| one.value([kx, ky, 0, c]));
            }
            let [[s0, p0, d0], [s1, p1, d1]] = along;
            let params = [s0, s1, p0, p1, d0, d1];
            check(&mut bench, KERNEL_CONV_2D, &params, &dst, &[k, x.clone()]);
            check(&mut bench, KERNEL_CONV_2D_DW, &params, &each, &[one, x]);
        }
    }
}

#[test]
fn volumes_of_several_channels_and_batches() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    let same = [[1, 1, 1]; 3];
    for (channels, filters, batch, size, window, dtype, along) in [
        (8, 5, 2, [5, 11, 9], [3, 3, 3], F, same),
        (
            5,
            9,
            2,
            [7, 9, 6],
            [2, 3, 4],
            H,
            [[2, 3, 2], [1, 2, 1], [3, 2, 2]],
        ),
        (3, 4, 3, [3, 7, 9], [1, 1, 1], H, [[1, 0, 1]; 3]),
    ] {
        let [w, h, d] = size;
        let x = Case::random(F, [w, h, d, channels * batch], GAPS, 1.0, &mut numbers);
        let [kw, kh, kd] = window;
        let k = Case::random(
            dtype,
            [kw, kh, kd, channels * filters],
            DENSE,
            1.0,
            &mut numbers,
        );
        let [ow, oh, od] = [0, 1, 2].map(|i| length(size[i], window[i], along[i]));
        let mut dst = Case::zeros(F, [ow, oh, od, filters * batch], DENSE);
        for (i, [ox, oy, oz, plane]) in indices(dst.ne).enumerate() {
            let (n, f) = (plane / filters, plane % filters);
            for [kx, ky, kz, c] in indices([kw, kh, kd, channels]) {
                let at = (
                    index(ox, kx, along[0], w),
                    index(oy, ky, along[1], h),
                    index(oz, kz, along[2], d),
                );
                if let (Some(ix), Some(iy), Some(iz)) = at {
                    dst.values[i] += x.value([ix, iy, iz, n * channels + c])
                        * k.value([kx, ky, kz, f * channels + c]);
                }
            }
        }
        let [[s0, p0, d0], [s1, p1, d1], [s2, p2, d2]] = along;
        let c = i32::try_from(channels).unwrap();
        let params = [s0, s1, s2, p0, p1, p2, d0, d1, d2, c];
        check(&mut bench, KERNEL_CONV_3D, &params, &dst, &[k, x]);
    }
}

#[test]
fn transposed_ones_add_a_kernel_for_each_element() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (length, channels, filters, window, stride) in [
        (197, 8, 5, 16, 8),
        (3, 2, 3, 2, 3),
        (3, 2, 2, 3, 1),
        (40, 1, 1, 3, 2),
    ] {
        let x = Case::random(F, [length, channels, 1, 1], GAPS, 1.0, &mut numbers);
        let k = Case::random(F, [window, filters, channels, 1], DENSE, 1.0, &mut numbers);
        let n = (length - 1) * stride + window;
        let mut dst = Case::zeros(F, [n, filters, 1, 1], DENSE);
        for [i, kx, f, c] in indices([length, window, filters, channels]) {
            dst.values[f * n + i * stride + kx] += x.value([i, c, 0, 0]) * k.value([kx, f, c, 0]);
        }
        let params = [i32::try_from(stride).unwrap(), 0, 1];
        check(&mut bench, KERNEL_CONV_TRANSPOSE_1D, &params, &dst, &[k, x]);
    }
    for (ne, filters, window, stride, dtype) in [
        ([3, 4, 5, 2], 3, [2, 3], 2, H),
        ([10, 7, 1, 1], 2, [3, 3], 1, F),
        ([9, 5, 4, 3], 6, [2, 2], 3, H),
    ] {
        let [w, h, channels, batch] = ne;
        let x = Case::random(F, ne, GAPS, 1.0, &mut numbers);
        let [kw, kh] = window;
        let k = Case::random(dtype, [kw, kh, filters, channels], DENSE, 1.0, &mut numbers);
        let out = [(w - 1) * stride + kw, (h - 1) * stride + kh];
        let mut dst = Case::zeros(F, [out[0], out[1], filters, batch], DENSE);
        for [ix, iy, c, n] in indices(ne) {
            for [kx, ky, f, _] in indices([kw, kh, filters, 1]) {
                let [ox, oy] = [ix * stride + kx, iy * stride + ky];
                dst.values[((n * filters + f) * out[1] + oy) * out[0] + ox] +=
                    x.value([ix, iy, c, n]) * k.value([kx, ky, f, c]);
            }
        }
        let params = [i32::try_from(stride).unwrap()];
        check(&mut bench, KERNEL_CONV_TRANSPOSE_2D, &params, &dst, &[k, x]);
    }
}

#[test]
fn wrong_operands_of_convolutions_are_refused() {
    let mut bench = Bench::new();
    let src = [[3, 3, 4, 5], [9, 9, 4, 2]].map(|ne| Case::zeros(F, ne, DENSE));
    let dst = Case::zeros(F, [7, 7, 5, 2], DENSE);
    let mut params = [0; 16];
    params[..6].copy_from_slice(&[1, 1, 0, 0, 1, 1]);
    let good = bench.place_wide((KERNEL_CONV_2D, params), &dst, &src);
    type Change = fn(&mut WideOp);
    let changes: &[(&str, Change)] = &[
        ("channels", |b| b.src[0].ne[2] = 3),
        ("filters", |b| b.src[0].ne[3] = 4),
        ("batch", |b| b.src[1].ne[3] = 1),
        ("a kernel of whole numbers", |b| b.src[0].dtype = TYPE_I32),
        ("a stride of 0", |b| b.params[1] = 0),
        ("a stride of 2^24", |b| b.params[0] = 1 << 24),
        ("a dilation of 0", |b| b.params[5] = 0),
        ("a result with gaps", |b| b.dst.ne[0] = 6),
        ("a source too many", |b| b.src[2] = b.src[0]),
        ("no source", |b| b.src[1] = bytemuck::Zeroable::zeroed()),
        ("a volume without channels", |b| b.kernel = KERNEL_CONV_3D),
        ("a padded transposed line", |b| {
            b.kernel = KERNEL_CONV_TRANSPOSE_1D;
        }),
    ];
    for (what, change) in changes {
        let mut body = good;
        change(&mut body);
        bench.refused_body(&body, serve::OPERAND, what);
    }
    // More taps than VTCM is guaranteed to hold.
    let large = u32::try_from(WINDOW_TAPS / 2 + 1).unwrap();
    let mut body = good;
    let shaped = |tensor: NarrowTensor, ne: [u32; 4]| NarrowTensor {
        ne,
        nb: [4, 4 * ne[0], 4 * ne[0], 8 * ne[0]],
        ..tensor
    };
    body.src[0] = shaped(body.src[0], [large, 1, 2, 1]);
    body.src[1] = shaped(body.src[1], [large, 1, 2, 1]);
    body.dst = shaped(body.dst, [1; 4]);
    body.dst.offset = 1 << 20;
    body.src[1].offset = 1 << 19;
    bench.refused_body(&body, serve::OPERAND, "taps");
}
