//! Every field of an operation on tensors, made wrong alone, is refused with its own detail, and
//! nothing is written.

use hexagon_ops::serve;
use hexagon_ops::wire::*;

use crate::common::Numbers;
use crate::tensor::{Bench, DENSE, GAPS, TRANSPOSED, Tensor as Case};

type Change = fn(&mut TensorOp);

/// Runs every change of a right operation.
fn check(bench: &mut Bench, good: &TensorOp, changes: &[(u32, &str, Change)]) {
    for (detail, what, change) in changes {
        let mut wrong = *good;
        change(&mut wrong);
        bench.refused_body(&wrong, *detail, what);
    }
}

#[test]
fn wrong_fields_of_tensors_are_refused() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    let ne = [40, 3, 2, 1];
    let a = Case::random(TYPE_F32, ne, GAPS, 1.0, &mut numbers);
    let b = Case::random(TYPE_F32, [20, 3, 1, 1], GAPS, 1.0, &mut numbers);
    let dst = Case::zeros(TYPE_F32, ne, DENSE);
    let good = bench.place((KERNEL_ADD, [0; 16]), &dst, &[a, b], false);
    check(
        &mut bench,
        &good,
        &[
            (serve::KERNEL_NUMBER, "no kernel", |b| b.kernel = 0),
            (serve::KERNEL_NUMBER, "kernel", |b| b.kernel = 99),
            (serve::RESERVED, "reserved", |b| b.reserved = 1),
            (serve::OPERAND, "no result", |b| b.dst = b.src[2]),
            (serve::OPERAND, "no source", |b| b.src[0] = b.src[2]),
            (serve::OPERAND, "no second source", |b| b.src[1] = b.src[2]),
            (serve::RESERVED, "fields of no tensor", |b| {
                b.src[2].nb[3] = 4
            }),
            (serve::RESERVED, "equal fields of no tensor", |b| {
                b.src[2].nb[2..].fill(4)
            }),
            (serve::TYPE, "type", |b| b.src[0].dtype = 99),
            (serve::OPERAND, "type for this kernel", |b| {
                b.src[1].dtype = TYPE_I32
            }),
            (serve::NUMBER, "number", |b| b.src[1].buffer = MAX_BUFFERS),
            (serve::UNMAPPED, "unmapped", |b| b.dst.buffer = 99),
            (serve::ALIGNMENT, "offset", |b| b.src[0].offset += 2),
            (serve::ALIGNMENT, "stride", |b| b.dst.nb[1] += 2),
            (serve::SHAPE, "no elements", |b| b.src[0].ne[2] = 0),
            (serve::SHAPE, "half a block", |b| b.src[1].dtype = TYPE_Q8_0),
            (serve::BOUNDS, "far offset", |b| b.src[0].offset = 1 << 40),
            (serve::BOUNDS, "wrapping offset", |b| b.src[0].offset = !3),
            (serve::BOUNDS, "wrapping stride", |b| b.src[0].nb = [!3; 4]),
            (serve::BOUNDS, "dimensions", |b| b.src[0].ne = [u32::MAX; 4]),
            (serve::BOUNDS, "huge dimensions", |b| {
                b.dst.ne = [u32::MAX; 4]
            }),
            (serve::OPERAND, "rows of results overlap", |b| {
                b.dst.nb[1] = 156
            }),
            (serve::OPERAND, "planes of results overlap", |b| {
                b.dst.nb[2] = 160
            }),
            (serve::OPERAND, "elements of results overlap", |b| {
                b.dst.nb[0] = 0
            }),
            (serve::OPERAND, "shape", |b| b.src[0].ne[1] = 2),
            (serve::OPERAND, "no divisor", |b| b.src[1].ne[0] = 19),
            (serve::OVERLAP, "partial overlap", |b| {
                b.dst = b.src[0];
                b.dst.offset += 4;
            }),
            (serve::OVERLAP, "in place with other strides", |b| {
                b.dst.offset = b.src[0].offset;
            }),
            (serve::OVERLAP, "second source", |b| {
                b.src[1].offset = b.dst.offset;
            }),
        ],
    );
    bench.host.run(&[Command::new(0, &good)]);
}

#[test]
fn wrong_parameters_and_operands_of_rope_are_refused() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    let ne = [64, 2, 3, 1];
    let src = Case::random(TYPE_F32, ne, DENSE, 1.0, &mut numbers);
    // Longer than needed, so that more positions stay inside the buffer.
    let positions = Case::of(TYPE_I32, [12, 1, 1, 1], DENSE, || 1.0);
    let mut params = [0; 16];
    params[1] = 64;
    params[5] = 10000_f32.to_bits();
    params[6] = 1_f32.to_bits();
    params[8] = 1_f32.to_bits();
    let dst = Case::zeros(TYPE_F32, ne, DENSE);
    let good = bench.place((KERNEL_ROPE, params), &dst, &[src, positions], false);
    check(
        &mut bench,
        &good,
        &[
            (serve::OPERAND, "mode", |b| b.params[2] = 4),
            (serve::OPERAND, "no sections", |b| b.params[2] = 8),
            (serve::OPERAND, "positions of sections", |b| {
                (b.params[2], b.params[11]) = (8, 32);
                b.src[1].ne[0] = 11;
            }),
            (serve::OPERAND, "huge sections", |b| {
                (b.params[2], b.params[11]) = (8, u32::MAX);
            }),
            (serve::OPERAND, "vision beyond the row", |b| {
                (b.params[2], b.params[11]) = (24, 16);
            }),
            (serve::OPERAND, "dimensions", |b| b.params[1] = 66),
            (serve::OPERAND, "odd dimensions", |b| b.params[1] = 33),
            (serve::OPERAND, "negative dimensions", |b| {
                b.params[1] = u32::MAX
            }),
            (serve::OPERAND, "first", |b| b.params[15] = 2),
            (serve::OPERAND, "base", |b| b.params[5] = 0),
            (serve::OPERAND, "YaRN with a negative context", |b| {
                b.params[4] = u32::MAX;
                b.params[7] = 1_f32.to_bits();
            }),
            (serve::OPERAND, "positions", |b| b.src[1].ne[0] = 2),
            (serve::OPERAND, "positions in f32", |b| {
                b.src[1].dtype = TYPE_F32
            }),
        ],
    );
}

#[test]
fn results_that_only_a_copy_can_have_are_refused() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    let ne = [9, 4, 1, 1];
    let src = Case::random(TYPE_F32, ne, DENSE, 1.0, &mut numbers);
    let dst = Case::zeros(TYPE_F32, ne, TRANSPOSED);
    bench.refused(
        (KERNEL_SQR, [0; 16]),
        &dst,
        std::slice::from_ref(&src),
        serve::OPERAND,
    );
    let blocks = Case::random(TYPE_Q4_0, [32, 4, 1, 1], DENSE, 1.0, &mut numbers);
    let shape = Case::zeros(TYPE_F32, [32, 4, 1, 1], DENSE);
    bench.refused((KERNEL_SQR, [0; 16]), &shape, &[blocks], serve::OPERAND);
    let concat = Case::zeros(TYPE_F32, [18, 4, 1, 1], DENSE);
    let mut params = [0; 16];
    params[0] = 4;
    bench.refused(
        (KERNEL_CONCAT, params),
        &concat,
        &[src.clone(), src],
        serve::OPERAND,
    );
}

/// A block may not start in one source and end in the other.
#[test]
fn parts_of_blocks_are_not_joined() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    let parts = [20, 44].map(|n| Case::random(TYPE_F32, [n, 2, 1, 1], DENSE, 1.0, &mut numbers));
    for dtype in [TYPE_Q8_0, TYPE_Q4_1] {
        let dst = Case::zeros(dtype, [64, 2, 1, 1], DENSE);
        bench.refused((KERNEL_CONCAT, [0; 16]), &dst, &parts, serve::OPERAND);
    }
    let ne = [48, 2, 1, 1];
    let src = Case::random(TYPE_F32, ne, DENSE, 1.0, &mut numbers);
    let dst = Case::zeros(TYPE_Q4_0, [96, 1, 1, 1], DENSE);
    bench.refused((KERNEL_COPY, [0; 16]), &dst, &[src], serve::OPERAND);
}

#[test]
fn empty_results_are_no_work() {
    let mut bench = Bench::new();
    let src = Case::zeros(TYPE_F32, [8, 1, 1, 1], DENSE);
    let dst = Case::zeros(TYPE_F32, [8, 1, 1, 1], DENSE);
    let mut body = bench.place((KERNEL_SQR, [0; 16]), &dst, &[src], false);
    body.dst.ne[1] = 0;
    let completion = bench.host.run(&[Command::new(0, &body)]);
    assert_eq!((completion.status, completion.done), (0, 1));
}
