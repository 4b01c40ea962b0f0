//! OUT_PROD against exact sums, for every type of src0.

use hexagon_ops::serve;
use hexagon_ops::wire::*;

use crate::common::Numbers;
use crate::tensor::{Bench, DENSE, GAPS, PERMUTED, TRANSPOSED, Tensor as Case, indices};

const F: u32 = TYPE_F32;
const H: u32 = TYPE_F16;
const OP: (u32, [u32; 16]) = (KERNEL_OUT_PROD, [0; 16]);

/// Exact results: `dst[m][n] = Σ src0[k][n] · src1[k][m]`.
fn expected(dst: &mut Case, src: &[Case; 2]) {
    let [a, b] = src;
    let ratio = [b.ne[2] / a.ne[2], b.ne[3] / a.ne[3]];
    for (index, [n, m, i2, i3]) in indices(dst.ne).enumerate() {
        let [j2, j3] = [i2 / ratio[0], i3 / ratio[1]];
        dst.values[index] = (0..a.ne[1])
            .map(|k| a.value([n, k, j2, j3]) * b.value([m, k, i2, i3]))
            .sum();
    }
}

fn check(src: [Case; 2], bench: &mut Bench) {
    let ([n, ..], [m, _, b2, b3]) = (src[0].ne, src[1].ne);
    for place in [DENSE, GAPS] {
        let mut dst = Case::zeros(F, [n, m, b2, b3], place);
        expected(&mut dst, &src);
        // The error of f32 sums: 2^-24 for each of a few steps, squared. Terms cancel to about a
        // tenth.
        bench.check(OP, &dst, &src, false, 1e-11);
    }
}

#[test]
fn sums_of_products_of_columns_and_rows_of_floats() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (a, b, types, places) in [
        ([256, 16, 3, 2], [16, 16, 6, 4], [F, F], [DENSE, DENSE]),
        ([256, 16, 1, 1], [16, 16, 2, 1], [F, H], [DENSE, TRANSPOSED]),
        ([300, 37, 2, 1], [9, 37, 2, 1], [H, F], [GAPS, GAPS]),
        (
            [64, 100, 2, 2],
            [70, 100, 2, 2],
            [TYPE_BF16, F],
            [PERMUTED, PERMUTED],
        ),
        ([33, 5, 1, 1], [17, 5, 1, 3], [F, F], [TRANSPOSED, DENSE]),
        ([1, 1, 1, 1], [1, 1, 1, 1], [F, F], [DENSE, DENSE]),
    ] {
        let src = [
            Case::random(types[0], a, places[0], 1.0, &mut numbers),
            Case::random(types[1], b, places[1], 1.0, &mut numbers),
        ];
        check(src, &mut bench);
    }
}

#[test]
fn sums_of_products_of_every_type_of_blocks() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for dtype in TYPE_Q8_0..=TYPE_IQ4_XS {
        if [TYPE_BF16, TYPE_I16, TYPE_I8].contains(&dtype) {
            continue;
        }
        let n = if dtype >= TYPE_Q2_K { 512 } else { 288 };
        for (place, k) in [(DENSE, 20), (GAPS, 1)] {
            let src = [
                Case::random(dtype, [n, k, 2, 1], place, 1.0, &mut numbers),
                Case::random(F, [11, k, 4, 1], DENSE, 1.0, &mut numbers),
            ];
            check(src, &mut bench);
        }
    }
}

#[test]
fn wrong_operands_of_an_outer_product_are_refused() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    let src = [
        Case::random(H, [64, 10, 2, 1], DENSE, 1.0, &mut numbers),
        Case::random(F, [7, 10, 4, 1], DENSE, 1.0, &mut numbers),
    ];
    let mut dst = Case::zeros(F, [64, 7, 4, 1], DENSE);
    expected(&mut dst, &src);
    let good = bench.place(OP, &dst, &src, false);
    type Change = fn(&mut TensorOp);
    for (what, change) in [
        ("no src1", (|b| b.src[1] = b.src[2]) as Change),
        ("terms", |b| b.src[1].ne[1] = 9),
        ("columns", |b| b.src[0].ne[0] = 32),
        ("rows", |b| b.src[1].ne[0] = 6),
        ("planes", |b| b.src[1].ne[2] = 3),
        ("numbers", |b| b.src[0].dtype = TYPE_I16),
        ("blocks", |b| {
            b.src[1].dtype = TYPE_Q8_0;
            b.src[1].ne[0] = 32;
        }),
        ("result in f16", |b| b.dst.dtype = TYPE_F16),
    ] {
        let mut wrong = good;
        change(&mut wrong);
        bench.refused_body(&wrong, serve::OPERAND, what);
    }
    bench.check(OP, &dst, &src, false, 1e-11);
}
