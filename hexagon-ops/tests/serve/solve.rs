//! Triangular equations, and the largest element of a row.

use hexagon_ops::serve;
use hexagon_ops::wire::*;

use crate::common::Numbers;
use crate::tensor::{Bench, DENSE, GAPS, Tensor as Case, indices};

const F: u32 = TYPE_F32;

#[test]
fn triangular_equations_are_solved() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (n, k, d2, d3) in [
        (1, 1, 1, 1),
        (11, 5, 2, 3),
        (30, 33, 1, 2),
        (64, 81, 2, 1),
        (37, 200, 1, 1),
    ] {
        // Elements above the diagonal are not read.
        let a = Case::of(F, [n, n, d2, d3], GAPS, || numbers.float() / 8.0);
        let mut matrix = a.clone();
        for (index, [j, i, i2, i3]) in indices(a.ne).enumerate() {
            if i == j {
                matrix.values[index] = 1.5;
                matrix.poison([j, i, i2, i3], 1.5);
            } else if j > i {
                matrix.poison([j, i, i2, i3], f32::NAN);
            }
        }
        let right = Case::random(F, [k, n, d2, d3], GAPS, 1.0, &mut numbers);
        let mut dst = Case::zeros(F, [k, n, d2, d3], DENSE);
        for (index, [c, i, i2, i3]) in indices(dst.ne).enumerate() {
            let mut rest = right.value([c, i, i2, i3]);
            for t in 0..i {
                rest -= matrix.value([t, i, i2, i3]) * dst.value([c, t, i2, i3]);
            }
            dst.values[index] = rest / matrix.value([i, i, i2, i3]);
        }
        let op = (KERNEL_SOLVE_TRI, [0; 16]);
        bench.check(op, &dst, &[matrix, right], false, 1e-11);
    }
    let zeros = |ne| Case::zeros(F, ne, DENSE);
    for [a, b, x] in [
        [[4, 3, 1, 1], [2, 4, 1, 1], [2, 4, 1, 1]],
        [[4, 4, 1, 1], [2, 3, 1, 1], [2, 4, 1, 1]],
        [[4, 4, 2, 1], [2, 4, 1, 1], [2, 4, 1, 1]],
    ] {
        let src = [a, b].map(zeros);
        bench.refused((KERNEL_SOLVE_TRI, [0; 16]), &zeros(x), &src, serve::OPERAND);
    }
}

#[test]
fn the_last_of_the_largest_elements_is_named() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (n, m) in [(1, 1), (32, 10), (300, 3), (1000, 2), (31, 5), (10_000, 2)] {
        // Few distinct values, so that the largest occurs several times.
        let src = Case::of(F, [n, m, 1, 1], GAPS, || (8.0 * numbers.float()).floor());
        let mut dst = Case::zeros(TYPE_I32, [m, 1, 1, 1], DENSE);
        for row in 0..m {
            let value = |k: &usize| src.value([*k, row, 0, 0]);
            let last = (0..n).max_by(|a, b| value(a).total_cmp(&value(b)));
            dst.values[row] = f64::from(u32::try_from(last.unwrap()).unwrap());
        }
        bench.check((KERNEL_ARGMAX, [0; 16]), &dst, &[src], false, 0.0);
    }
    let zeros = |dtype, ne| Case::zeros(dtype, ne, DENSE);
    for (dtype, ne) in [(F, [3, 1, 1, 1]), (TYPE_I32, [2, 1, 1, 1])] {
        let src = [zeros(F, [8, 3, 1, 1])];
        let op = (KERNEL_ARGMAX, [0; 16]);
        bench.refused(op, &zeros(dtype, ne), &src, serve::OPERAND);
    }
}
