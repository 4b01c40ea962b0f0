//! Where elements go: padding, rolling, triangles, diagonals, ramps; all exact.

use hexagon_ops::serve;
use hexagon_ops::wire::*;

use crate::common::Rng;
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
    let mut rng = Rng::new();
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
                let src = Case::random(dtype, ne, place, 50.0, &mut rng);
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
    let src = Case::random(F, ne, DENSE, 1.0, &mut rng);
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
    let mut rng = Rng::new();
    let mut bench = Bench::new();
    let ne = [10, 5, 4, 3];
    for place in [DENSE, GAPS, PERMUTED] {
        for moves in [
            [3, -2, 1, -1],
            [0, 0, 0, 0],
            [-1, 7, 400, -3],
            [10, 1, 0, 0],
            [i32::MIN, i32::MAX, 0, 0],
        ] {
            let src = Case::random(F, ne, place, 1.0, &mut rng);
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
    let mut rng = Rng::new();
    let mut bench = Bench::new();
    for ne in [
        [10, 10, 4, 3],
        [300, 300, 1, 2],
        [1, 1, 1, 1],
        [7, 20, 2, 1],
        [600, 3, 1, 1],
    ] {
        for (dtype, place) in [(F, DENSE), (F, GAPS), (H, PERMUTED)] {
            let src = Case::random(dtype, ne, place, 1.0, &mut rng);
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
    let mut rng = Rng::new();
    let mut bench = Bench::new();
    for n in [1, 79, 270] {
        let src = Case::random(F, [n, 1, 2, 3], GAPS, 1.0, &mut rng);
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
