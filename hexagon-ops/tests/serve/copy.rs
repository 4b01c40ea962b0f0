//! Rows by number, copies, concatenation and repetition: exact, or rounded to the result's type.

use hexagon_ops::serve;
use hexagon_ops::wire::*;

use crate::common::Rng;
use crate::tensor::{
    Bench, DENSE, GAPS, PERMUTED, Place, TRANSPOSED, Tensor as Case, indices, limit,
};

const F: u32 = TYPE_F32;
const H: u32 = TYPE_F16;

/// Rounding to 255 steps between the largest magnitudes of a block: 1 / 127 / sqrt(12), squared, over a mean of 1 / 3.
const LIMIT_Q8_0: f64 = 2.5e-5;

fn type_limit(dtype: u32) -> f64 {
    if dtype == TYPE_Q8_0 {
        LIMIT_Q8_0
    } else {
        limit(dtype)
    }
}

#[test]
fn rows_are_fetched_by_number() {
    let mut rng = Rng::new();
    let mut bench = Bench::new();
    for dtype in [F, H, TYPE_Q8_0, TYPE_Q4_0] {
        for (n, ids_type) in [(64, TYPE_I32), (288, TYPE_I64)] {
            for place in [DENSE, GAPS] {
                let table = Case::random(dtype, [n, 11, 2, 3], place, 2.0, &mut rng);
                let ids = Case::of(ids_type, [7, 2, 3, 1], GAPS, || {
                    f32::from(u8::try_from(rng.below(11)).unwrap())
                });
                let mut dst = Case::zeros(F, [n, 7, 2, 3], DENSE);
                dst.values = indices(dst.ne)
                    .map(|[i, i1, i2, i3]| table.value([i, row(&ids, [i1, i2, i3]), i2, i3]))
                    .collect();
                bench.check(
                    (KERNEL_GET_ROWS, [0; 16]),
                    &dst,
                    &[table, ids],
                    false,
                    1e-14,
                );
            }
        }
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "small numbers"
)]
fn row(ids: &Case, [i0, i1, i2]: [usize; 3]) -> usize {
    ids.value([i0, i1, i2, 0]) as usize
}

#[test]
fn rows_are_stored_by_number_and_the_others_stay() {
    let mut rng = Rng::new();
    let mut bench = Bench::new();
    for dtype in [F, H, TYPE_Q8_0] {
        for (ne, ids_type) in [
            ([64, 40, 2, 3], TYPE_I64),
            ([576, 13, 4, 3], TYPE_I32),
            ([1, 900, 1, 1], TYPE_I64),
        ] {
            if dtype == TYPE_Q8_0 && ne[0] == 1 {
                continue;
            }
            let n_rows = ne[1] / 2;
            let src = Case::random(F, [ne[0], n_rows, ne[2], ne[3]], GAPS, 2.0, &mut rng);
            // Different rows: 7 times the index modulo a number of rows that 7 does not divide.
            let mut index = 0;
            let ids = Case::of(ids_type, [n_rows, ne[2], 1, 1], DENSE, || {
                let row = 7 * index % ne[1];
                index += 1;
                f32::from(u16::try_from(row).unwrap())
            });
            let shape = Case::zeros(dtype, ne, GAPS);
            let have = bench.run(
                (KERNEL_SET_ROWS, [0; 16]),
                &shape,
                &[src.clone(), ids.clone()],
                false,
            );
            let mut want: Vec<Option<f64>> = vec![None; shape.values.len()];
            for [i, i1, i2, i3] in indices(src.ne) {
                let to = row(&ids, [i1, i2, 0]);
                want[((i3 * ne[2] + i2) * ne[1] + to) * ne[0] + i] =
                    Some(src.value([i, i1, i2, i3]));
            }
            let (mut error, mut power, mut stayed) = (0.0, 0.0, true);
            // What memory holds before, decoded as this type.
            let untouched = bench.untouched(&shape);
            for ((have, want), before) in have.iter().zip(want).zip(untouched) {
                match want {
                    Some(want) => {
                        error += (f64::from(*have) - want).powi(2);
                        power += want * want;
                    }
                    None => stayed &= have.to_bits() == before.to_bits(),
                }
            }
            assert!(
                stayed,
                "type {dtype} {ne:?}: a row changed that was not named"
            );
            assert!(
                error / power <= type_limit(dtype),
                "type {dtype} {ne:?}: {}",
                error / power
            );
        }
    }
}

#[test]
fn numbers_of_rows_that_do_not_exist_are_refused() {
    let mut rng = Rng::new();
    let mut bench = Bench::new();
    for wrong in [4.0, -1.0, 1e9] {
        let mut values = [0.0, 3.0, wrong].into_iter();
        let ids = Case::of(TYPE_I64, [3, 1, 1, 1], DENSE, || values.next().unwrap());
        let few = Case::random(F, [32, 3, 1, 1], DENSE, 1.0, &mut rng);
        let many = Case::random(F, [32, 4, 1, 1], DENSE, 1.0, &mut rng);
        for (kernel, dst, src) in [
            (KERNEL_GET_ROWS, &few, &many),
            (KERNEL_SET_ROWS, &many, &few),
        ] {
            bench.refused(
                (kernel, [0; 16]),
                dst,
                &[src.clone(), ids.clone()],
                serve::ROW,
            );
        }
    }
}

#[test]
fn copies_convert_between_all_strides() {
    let mut rng = Rng::new();
    let mut bench = Bench::new();
    let places: [Place; 4] = [DENSE, GAPS, PERMUTED, TRANSPOSED];
    for ne in [[1, 1, 1, 1], [33, 5, 3, 2], [288, 4, 1, 3]] {
        for (from, to) in [(F, F), (F, H), (H, F), (H, H)] {
            for src_place in places {
                for dst_place in places {
                    let src = Case::random(from, ne, src_place, 2.0, &mut rng);
                    let mut dst = Case::zeros(to, ne, dst_place);
                    dst.values.clone_from(&src.values);
                    bench.check((KERNEL_COPY, [0; 16]), &dst, &[src], false, limit(to));
                }
            }
            // Another shape: the elements keep ggml's order.
            let src = Case::random(from, ne, PERMUTED, 2.0, &mut rng);
            let mut dst = Case::zeros(to, [ne[1] * ne[2], ne[0], ne[3], 1], GAPS);
            dst.values.clone_from(&src.values);
            bench.check((KERNEL_COPY, [0; 16]), &dst, &[src], false, limit(to));
        }
    }
}

#[test]
fn tensors_are_joined_and_repeated() {
    let mut rng = Rng::new();
    let mut bench = Bench::new();
    for place in [DENSE, GAPS, PERMUTED, TRANSPOSED] {
        for dim in 0..4 {
            let mut ne = [33, 4, 3, 2];
            let a = Case::random(F, ne, place, 2.0, &mut rng);
            ne[dim] += 5;
            let b = Case::random(F, ne, place, 2.0, &mut rng);
            let first = a.ne[dim];
            ne[dim] += first;
            let mut dst = Case::zeros(F, ne, DENSE);
            dst.values = indices(ne)
                .map(|mut at| {
                    if at[dim] < first {
                        return a.value(at);
                    }
                    at[dim] -= first;
                    b.value(at)
                })
                .collect();
            let mut params = [0; 16];
            params[0] = u32::try_from(dim).unwrap();
            bench.check((KERNEL_CONCAT, params), &dst, &[a, b], false, 0.0);
        }
        for repeats in [[1, 1, 1, 1], [9, 1, 1, 1], [1, 4, 1, 3], [2, 2, 2, 2]] {
            for dtype in [F, H] {
                let src = Case::random(dtype, [33, 2, 3, 1], place, 2.0, &mut rng);
                let ne = [0, 1, 2, 3].map(|i| src.ne[i] * repeats[i]);
                let mut dst = Case::zeros(dtype, ne, DENSE);
                dst.values = indices(ne).map(|at| src.value(at)).collect();
                bench.check((KERNEL_REPEAT, [0; 16]), &dst, &[src], false, 0.0);
            }
        }
    }
}
