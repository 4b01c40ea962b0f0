//! MUL_MAT of tensors in ggml's layouts against exact sums: the products of attention without
//! FLASH_ATTN_EXT, and Hadamard matrices.

use hexagon_ops::serve;
use hexagon_ops::wire::*;

use crate::common::Numbers;
use crate::tensor::{Bench, DENSE, GAPS, PERMUTED, Place, TRANSPOSED, Tensor as Case, indices};

const F: u32 = TYPE_F32;
const H: u32 = TYPE_F16;

/// Exact results: `dst[n][m] = Σ src0[k][n] · src1[k][m]`.
fn expected(dst: &mut Case, src: &[Case; 2]) {
    let [a, b] = src;
    let ratio = [b.ne[2] / a.ne[2], b.ne[3] / a.ne[3]];
    for (index, [n, m, i2, i3]) in indices(dst.ne).enumerate() {
        let [j2, j3] = [i2 / ratio[0], i3 / ratio[1]];
        dst.values[index] = (0..a.ne[0])
            .map(|k| a.value([k, n, j2, j3]) * b.value([k, m, i2, i3]))
            .sum();
    }
}

#[test]
fn products_of_every_type_form_and_repetition() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (a, b, types, places) in [
        // A cache of keys with one query and with several; values that are stored position by
        // position.
        ([64, 256, 3, 1], [64, 1, 9, 1], [H, F], [PERMUTED, PERMUTED]),
        ([64, 70, 2, 2], [64, 33, 6, 2], [H, F], [PERMUTED, PERMUTED]),
        ([300, 64, 3, 1], [300, 5, 9, 1], [H, F], [DENSE, DENSE]),
        ([256, 40, 2, 1], [256, 1, 8, 1], [H, H], [GAPS, DENSE]),
        ([37, 9, 2, 1], [37, 4, 4, 3], [F, F], [TRANSPOSED, GAPS]),
        ([128, 128, 1, 1], [128, 50, 1, 1], [F, F], [DENSE, DENSE]),
        ([1, 1, 1, 1], [1, 1, 1, 1], [F, F], [DENSE, DENSE]),
        // On the matrix unit: rows that are read where they are, and parts of tiles.
        ([160, 70, 1, 1], [160, 64, 2, 1], [F, F], [DENSE, DENSE]),
        ([96, 64, 2, 1], [96, 37, 2, 1], [F, F], [GAPS, GAPS]),
        ([1056, 33, 1, 1], [1056, 4, 1, 1], [F, F], [DENSE, DENSE]),
        ([1024, 70, 1, 1], [1024, 1, 1, 1], [F, F], [DENSE, DENSE]),
        (
            [129, 31, 1, 1],
            [129, 2, 3, 2],
            [TYPE_BF16, F],
            [DENSE, DENSE],
        ),
        (
            [96, 33, 2, 1],
            [96, 9, 4, 1],
            [TYPE_Q8_0, F],
            [PERMUTED, DENSE],
        ),
        (
            [160, 65, 1, 1],
            [160, 3, 2, 1],
            [TYPE_Q4_0, F],
            [GAPS, DENSE],
        ),
        (
            [64, 12, 1, 1],
            [64, 3, 2, 1],
            [TYPE_Q4_1, H],
            [DENSE, DENSE],
        ),
    ] {
        let places: [Place; 2] = places;
        let src = [
            Case::random(types[0], a, places[0], 1.0, &mut numbers),
            Case::random(types[1], b, places[1], 1.0, &mut numbers),
        ];
        for place in [DENSE, GAPS] {
            let mut dst = Case::zeros(F, [a[1], b[1], b[2], b[3]], place);
            expected(&mut dst, &src);
            // The error of f32 sums: 2^-24 for each of a few steps, squared. Terms cancel to about
            // a tenth.
            bench.check((KERNEL_MUL_MAT_UNPACKED, [0; 16]), &dst, &src, false, 1e-11);
        }
    }
}

/// Halves in FP16 hold neither operands nor products of these sizes.
#[test]
fn products_beyond_the_range_of_halves_are_those_of_f32() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (of_a, of_b) in [(1e6, 1.0), (1.0, 1e6), (1e-4, 1.0), (1.0, 1e-4), (9e3, 9e3)] {
        let src = [
            Case::random(F, [96, 40, 1, 1], DENSE, of_a, &mut numbers),
            Case::random(F, [96, 35, 1, 1], DENSE, of_b, &mut numbers),
        ];
        let mut dst = Case::zeros(F, [40, 35, 1, 1], DENSE);
        expected(&mut dst, &src);
        bench.check((KERNEL_MUL_MAT_UNPACKED, [0; 16]), &dst, &src, false, 1e-11);
    }
}

#[test]
fn wrong_operands_of_a_product_are_refused() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    let src = [
        Case::random(H, [64, 10, 2, 1], DENSE, 1.0, &mut numbers),
        Case::random(F, [64, 3, 4, 1], DENSE, 1.0, &mut numbers),
    ];
    let mut dst = Case::zeros(F, [10, 3, 4, 1], DENSE);
    expected(&mut dst, &src);
    let op = (KERNEL_MUL_MAT_UNPACKED, [0; 16]);
    let good = bench.place(op, &dst, &src, false);
    type Change = fn(&mut TensorOp);
    for (what, change) in [
        ("no src1", (|b| b.src[1] = b.src[2]) as Change),
        ("depth", |b| b.src[1].ne[0] = 32),
        ("columns", |b| b.src[0].ne[1] = 9),
        ("rows", |b| b.src[1].ne[1] = 2),
        ("planes", |b| b.src[1].ne[2] = 3),
        ("numbers", |b| b.src[0].dtype = TYPE_I16),
        ("result in f16", |b| b.dst.dtype = TYPE_F16),
    ] {
        let mut wrong = good;
        change(&mut wrong);
        bench.refused_body(&wrong, serve::OPERAND, what);
    }
    bench.check(op, &dst, &src, false, 1e-11);
}
