//! Sums, windows and orders of rows, and sums with rows by number.

use hexagon_ops::serve;
use hexagon_ops::wire::*;

use crate::common::Numbers;
use crate::tensor::{Bench, DENSE, GAPS, PERMUTED, Tensor as Case, indices, limit};

const F: u32 = TYPE_F32;
const H: u32 = TYPE_F16;

#[test]
fn means_and_totals_are_exact_to_f32() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for ne in [[33, 1, 1, 1], [11, 5, 6, 3], [1000, 40, 1, 1]] {
        for (dtype, place) in [(F, DENSE), (F, GAPS), (F, PERMUTED), (H, DENSE)] {
            let src = Case::of(dtype, ne, place, || numbers.float() + 0.1);
            let mut means = Case::zeros(F, [1, ne[1], ne[2], ne[3]], DENSE);
            means.values = src
                .values
                .chunks(ne[0])
                .map(|row| row.iter().sum::<f64>() / ne[0] as f64)
                .collect();
            let mut total = Case::zeros(F, [1; 4], DENSE);
            total.values = vec![src.values.iter().sum()];
            let src = [src];
            // A row's sum may cancel to a tenth of the size of its terms.
            bench.check((KERNEL_MEAN, [0; 16]), &means, &src, false, 1e-10);
            bench.check((KERNEL_SUM, [0; 16]), &total, &src, false, 1e-10);
            if ne[1] > 1 {
                let mut body = bench.place((KERNEL_SUM, [0; 16]), &total, &src, false);
                body.src[0].nb[1] = 0;
                bench.refused_body(&body, serve::OPERAND, "repeated rows");
            }
        }
    }
}

#[test]
fn sums_run_along_rows() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for ne in [
        [10, 5, 4, 3],
        [1, 3, 1, 1],
        [40, 70, 1, 1],
        [2048, 3, 1, 1],
        [20_481, 2, 1, 1],
    ] {
        for place in [DENSE, GAPS] {
            let src = Case::random(F, ne, place, 1.0, &mut numbers);
            let mut dst = Case::zeros(F, ne, DENSE);
            dst.values = src
                .values
                .chunks(ne[0])
                .flat_map(|row| {
                    row.iter().scan(0.0, |sum, x| {
                        *sum += x;
                        Some(*sum)
                    })
                })
                .collect();
            let src = [src];
            // Rounding errors of n additions: a random walk of n steps of 2^-25 of the sums.
            bench.check((KERNEL_CUMSUM, [0; 16]), &dst, &src, false, 2e-10);
            bench.check((KERNEL_CUMSUM, [0; 16]), &dst, &src, true, 2e-10);
        }
    }
}

#[test]
fn windows_move_over_rows() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (taps, channels, tokens, sequences, place) in [
        (4, 300, 1, 1, GAPS),
        (4, 300, 1, 2, DENSE),
        (4, 17, 1, 1, DENSE),
        (4, 70, 2, 1, DENSE),
        (4, 64, 64, 2, DENSE),
        (4, 96, 29, 1, DENSE),
        (4, 33, 130, 1, GAPS),
        (3, 96, 1, 2, DENSE),
        (3, 40, 39, 2, GAPS),
        (4, 32, 1, 3, PERMUTED),
        (4, 64, 8, 1, PERMUTED),
        (3, 33, 7, 4, GAPS),
        (9, 5, 64, 2, GAPS),
        (1, 1, 1, 1, GAPS),
    ] {
        let input = Case::random(
            F,
            [taps - 1 + tokens, channels, sequences, 1],
            place,
            1.0,
            &mut numbers,
        );
        let weights = Case::random(F, [taps, channels, 1, 1], DENSE, 1.0, &mut numbers);
        let mut dst = Case::zeros(F, [channels, tokens, sequences, 1], DENSE);
        dst.values = indices(dst.ne)
            .map(|[c, t, s, _]| {
                let term = |k| input.value([t + k, c, s, 0]) * weights.value([k, c, 0, 0]);
                (0..taps).map(term).sum()
            })
            .collect();
        let src = [input, weights];
        bench.check((KERNEL_SSM_CONV, [0; 16]), &dst, &src, false, limit(F));
        let wrong = Case::zeros(F, [channels, tokens + 1, sequences, 1], DENSE);
        bench.refused((KERNEL_SSM_CONV, [0; 16]), &wrong, &src, serve::OPERAND);
    }
}

#[test]
fn rows_by_number_are_added() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (n, experts, used, tokens) in [(33, 5, 2, 7), (300, 16, 8, 1)] {
        let a = Case::random(F, [n, used, tokens, 1], GAPS, 1.0, &mut numbers);
        let b = Case::random(F, [n, experts, 1, 1], DENSE, 1.0, &mut numbers);
        let mut ids = Case::of(TYPE_I32, [used, tokens, 1, 1], GAPS, || {
            f32::from(u8::try_from(numbers.below(experts)).unwrap())
        });
        let mut dst = Case::zeros(F, a.ne, DENSE);
        dst.values = indices(a.ne)
            .map(|at| {
                #[expect(clippy::cast_possible_truncation, reason = "small numbers")]
                let id = ids.value([at[1], at[2], 0, 0]) as usize;
                a.value(at) + b.value([at[0], id, 0, 0])
            })
            .collect();
        let src = [a.clone(), b.clone(), ids.clone()];
        bench.check((KERNEL_ADD_ID, [0; 16]), &dst, &src, false, limit(F));
        bench.check((KERNEL_ADD_ID, [0; 16]), &dst, &src, true, limit(F));
        let wrong = f32::from(u8::try_from(experts).unwrap());
        ids = Case::of(TYPE_I32, ids.ne, DENSE, || wrong);
        bench.refused((KERNEL_ADD_ID, [0; 16]), &dst, &[a, b, ids], serve::ROW);
    }
}

#[test]
fn elements_are_put_in_order() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (n, k) in [
        (1, 1),
        (2, 1),
        (16, 16),
        (32, 32),
        (33, 33),
        (100, 37),
        (128, 8),
        (128, 128),
        (256, 256),
        (1025, 1025),
        (5000, 1),
        (5000, 7),
        (3000, 600),
        (300, 299),
        (257, 256),
        (4096, 4096),
    ] {
        for place in [DENSE, GAPS] {
            for has_ties in [false, true] {
                let src = Case::of(F, [n, 3, 2, 1], place, || {
                    let x = numbers.float() * 100.0;
                    if has_ties {
                        (x / 20.0).round() + 0.5
                    } else {
                        x
                    }
                });
                for order in [0, 1] {
                    let mut params = [0; 16];
                    params[0] = order;
                    let mut dst = Case::zeros(TYPE_I32, [k, 3, 2, 1], GAPS);
                    dst.values = src
                        .values
                        .chunks(n)
                        .flat_map(|row| {
                            // A stable sort: equal elements are ordered by their index.
                            let mut numbers: Vec<usize> = (0..n).collect();
                            numbers.sort_by(|a, b| {
                                let order_up = row[*a].total_cmp(&row[*b]);
                                if order == 0 {
                                    order_up
                                } else {
                                    order_up.reverse()
                                }
                            });
                            numbers.into_iter().take(k).map(|i| i as f64)
                        })
                        .collect();
                    let src = std::slice::from_ref(&src);
                    bench.check((KERNEL_ARGSORT, params), &dst, src, false, 0.0);
                }
            }
        }
    }
    // Numbers for which a vector's comparison is not enough: NaN, and zeros of both signs.
    let mut next = [
        f32::NAN,
        0.0,
        -f32::NAN,
        f32::INFINITY,
        -0.0,
        f32::MAX,
        f32::MIN,
        1e-45,
        -1e-45,
        f32::NEG_INFINITY,
    ]
    .into_iter()
    .cycle();
    for n in [40, 300] {
        let src = Case::of(F, [n, 1, 1, 1], DENSE, || next.next().unwrap());
        for order in [0, 1] {
            let mut sorted: Vec<usize> = (0..n).collect();
            sorted.sort_by(|a, b| {
                let up = src.values[*a].total_cmp(&src.values[*b]);
                if order == 0 { up } else { up.reverse() }
            });
            let mut dst = Case::zeros(TYPE_I32, [n, 1, 1, 1], DENSE);
            dst.values = sorted.into_iter().map(|i| i as f64).collect();
            let mut params = [0; 16];
            params[0] = order;
            let src = std::slice::from_ref(&src);
            bench.check((KERNEL_ARGSORT, params), &dst, src, false, 0.0);
        }
    }
    let src = Case::random(F, [5, 3, 1, 1], DENSE, 1.0, &mut numbers);
    for (dtype, k, order) in [
        (TYPE_I32, 6, 0),
        (F, 5, 0),
        (TYPE_I64, 5, 0),
        (TYPE_I32, 5, 2),
    ] {
        let dst = Case::zeros(dtype, [k, 3, 1, 1], DENSE);
        let mut params = [0; 16];
        params[0] = order;
        let src = std::slice::from_ref(&src);
        bench.refused((KERNEL_ARGSORT, params), &dst, src, serve::OPERAND);
    }
}
