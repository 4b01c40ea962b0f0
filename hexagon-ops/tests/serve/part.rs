//! ACC and SET, COUNT_EQUAL and TIMESTEP_EMBEDDING against ggml's definitions.

use hexagon_ops::serve;
use hexagon_ops::wire::*;

use crate::common::Numbers;
use crate::tensor::{
    Bench, DENSE, GAPS, PERMUTED, Params, TRANSPOSED, Tensor as Case, indices, limit,
};

const F: u32 = TYPE_F32;
const NE: [usize; 4] = [70, 9, 4, 3];

/// Parameters of ACC and SET: strides and offset in elements.
fn part(elements: [u32; 4]) -> Params {
    let mut params = [0; 16];
    for (param, elements) in params.iter_mut().zip(elements) {
        *param = 4 * elements;
    }
    params
}

/// Parts of a tensor [`NE`]: their dimensions, strides and offset in elements.
const PARTS: [([usize; 4], [u32; 4]); 6] = [
    // A block inside of it.
    ([33, 4, 2, 2], [70, 630, 2520, 70 * 3 + 17]),
    ([70, 9, 4, 3], [70, 630, 2520, 0]),
    ([1, 1, 1, 1], [70, 630, 2520, 7559]),
    // Every second row, and rows in a different order.
    ([20, 4, 1, 1], [140, 5, 7, 70]),
    ([64, 3, 9, 1], [630, 70, 5, 0]),
    // Rows that are closer together than the tensor's rows.
    ([8, 50, 1, 1], [10, 0, 0, 3]),
];

#[test]
fn a_part_is_added_or_replaced_and_the_rest_is_copied() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (ne, elements) in PARTS {
        for (kernel, dtype) in [(KERNEL_ACC, F), (KERNEL_SET, F), (KERNEL_SET, TYPE_I32)] {
            for place in [DENSE, GAPS, TRANSPOSED] {
                let src = [
                    Case::random(dtype, NE, DENSE, 90.0, &mut numbers),
                    Case::random(dtype, ne, place, 90.0, &mut numbers),
                ];
                let mut dst = Case::zeros(dtype, NE, DENSE);
                dst.values.clone_from(&src[0].values);
                let [s1, s2, s3, first] = elements.map(|n| usize::try_from(n).unwrap());
                for (index, [i0, i1, i2, i3]) in indices(ne).enumerate() {
                    let at = first + i0 + i1 * s1 + i2 * s2 + i3 * s3;
                    let old = if kernel == KERNEL_ACC {
                        dst.values[at]
                    } else {
                        0.0
                    };
                    dst.values[at] = old + src[1].values[index];
                }
                let op = (kernel, part(elements));
                bench.check(op, &dst, &src, false, limit(F));
                bench.check(op, &dst, &src, true, limit(F));
            }
        }
    }
}

#[test]
fn parts_that_do_not_lie_in_the_result_are_refused() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    let whole = Case::random(F, NE, DENSE, 1.0, &mut numbers);
    let src = [
        whole.clone(),
        Case::random(F, [33, 4, 2, 2], DENSE, 1.0, &mut numbers),
    ];
    for kernel in [KERNEL_ACC, KERNEL_SET] {
        for elements in [
            // One element past the end; then offsets and strides that are not valid sizes.
            [70, 630, 2520, 4168],
            [70, 630, 2520, u32::MAX / 4],
            [70, u32::MAX / 4, 2520, 0],
            // Rows that overlap or interleave.
            [32, 630, 2520, 0],
            [70, 70, 2520, 0],
        ] {
            let body = bench.place((kernel, part(elements)), &whole, &src, false);
            bench.refused_body(&body, serve::OPERAND, "a part");
        }
        let good = bench.place((kernel, part([70, 630, 2520, 0])), &whole, &src, false);
        type Change = fn(&mut TensorOp);
        for (what, change) in [
            ("half an element", (|b| b.params[3] = 2) as Change),
            ("a stride of half an element", |b| b.params[0] += 2),
            ("no src1", |b| b.src[1] = b.src[2]),
            ("another shape", |b| b.src[0].ne[1] = 8),
            ("another type", |b| b.src[1].dtype = TYPE_I32),
        ] {
            let mut wrong = good;
            change(&mut wrong);
            bench.refused_body(&wrong, serve::OPERAND, what);
        }
        let op = (kernel, part([70, 630, 2520, 0]));
        bench.refused(op, &Case::zeros(F, NE, GAPS), &src, serve::OPERAND);
        let gaps = [Case::random(F, NE, GAPS, 1.0, &mut numbers), src[1].clone()];
        bench.refused(op, &whole, &gaps, serve::OPERAND);
    }
    let words = src.map(|src| Case::random(TYPE_I32, src.ne, DENSE, 1.0, &mut numbers));
    let dst = Case::zeros(TYPE_I32, NE, DENSE);
    let op = (KERNEL_ACC, part([70, 630, 2520, 0]));
    bench.refused(op, &dst, &words, serve::OPERAND);
}

#[test]
fn equal_elements_are_counted() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for ne in [[1, 1, 1, 1], [31, 3, 1, 1], [32, 1, 2, 2], [333, 7, 2, 3]] {
        for places in [[DENSE, DENSE], [GAPS, DENSE], [PERMUTED, TRANSPOSED]] {
            let src = places.map(|place| Case::random(TYPE_I32, ne, place, 4.0, &mut numbers));
            let mut dst = Case::zeros(TYPE_I64, [1; 4], DENSE);
            let pairs = src[0].values.iter().zip(&src[1].values);
            let equal = pairs.filter(|(a, b)| a == b).count();
            assert!(equal > 0 || src[0].values.len() < 100);
            dst.values = vec![f64::from(u32::try_from(equal).unwrap())];
            bench.check((KERNEL_COUNT_EQUAL, [0; 16]), &dst, &src, false, 0.0);
        }
    }
}

/// The differences of these overflow.
#[test]
fn numbers_at_the_ends_of_their_range_are_told_apart() {
    let mut bench = Bench::new();
    let ends = [i32::MIN, i32::MAX, 0, -1, 1, i32::MIN + 1];
    let mut dst = Case::zeros(TYPE_I64, [1; 4], DENSE);
    let shape = Case::zeros(TYPE_I32, [36, 1, 1, 1], DENSE);
    let body = bench.place(
        (KERNEL_COUNT_EQUAL, [0; 16]),
        &dst,
        &[shape.clone(), shape],
        false,
    );
    let at = |tensor: &Tensor| usize::try_from(tensor.offset).unwrap();
    let (firsts, seconds): (Vec<i32>, Vec<i32>) = ends
        .iter()
        .flat_map(|a| ends.iter().map(move |b| (*a, *b)))
        .unzip();
    bench.memory.put(at(&body.src[0]), &firsts);
    bench.memory.put(at(&body.src[1]), &seconds);
    dst.values = vec![6.0];
    let have = bench.run_command(&Command::new(0, &body), &dst, body.dst.offset);
    assert_eq!(have, [6.0]);
}

#[test]
fn wrong_operands_of_a_count_are_refused() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    let op = (KERNEL_COUNT_EQUAL, [0; 16]);
    let words = |ne, numbers: &mut Numbers| Case::random(TYPE_I32, ne, DENSE, 4.0, numbers);
    let src = [[8, 3, 1, 1], [8, 3, 1, 1]].map(|ne| words(ne, &mut numbers));
    let scalar = Case::zeros(TYPE_I64, [1; 4], DENSE);
    let other = [src[0].clone(), words([8, 2, 1, 1], &mut numbers)];
    bench.refused(op, &scalar, &other, serve::OPERAND);
    bench.refused(op, &scalar, &src[..1], serve::OPERAND);
    bench.refused(
        op,
        &Case::zeros(TYPE_I32, [1; 4], DENSE),
        &src,
        serve::OPERAND,
    );
    bench.refused(
        op,
        &Case::zeros(TYPE_I64, [2, 1, 1, 1], DENSE),
        &src,
        serve::OPERAND,
    );
    let floats = [[8, 3, 1, 1]; 2].map(|ne| Case::random(F, ne, DENSE, 4.0, &mut numbers));
    bench.refused(op, &scalar, &floats, serve::OPERAND);
}

/// `cos(t f[j])`, then `sin(t f[j])`, with `f[j] = period^(-j / half)`.
#[test]
fn times_become_cosines_and_sines_of_falling_frequencies() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (dim, count, period, largest) in [
        (320, 2, 10_000, 1.0),
        (320, 3, 10_000, 1000.0),
        (33, 5, 100, 50.0),
        (1200, 1, 10_000, 300.0),
        (2, 4, 7, 3.0),
        (64, 40, 1, 20.0),
    ] {
        let times = Case::random(F, [count, 1, 1, 1], DENSE, largest, &mut numbers);
        let mut params = [0; 16];
        (params[0], params[1]) = (u32::try_from(dim).unwrap(), u32::try_from(period).unwrap());
        for dtype in [F, TYPE_F16] {
            let mut dst = Case::zeros(dtype, [dim, count, 1, 1], GAPS);
            let half = dim / 2;
            dst.values = indices(dst.ne)
                .map(|[j, i, ..]| {
                    let power = |j: usize| {
                        #[expect(clippy::cast_precision_loss, reason = "small numbers")]
                        let exponent = j as f64 / half as f64;
                        times.values[i] * f64::from(period).powf(-exponent)
                    };
                    match j {
                        j if j < half => power(j).cos(),
                        j if j < 2 * half => power(j - half).sin(),
                        _ => 0.0,
                    }
                })
                .collect();
            // An angle is rounded twice, each time by up to 2^-24 of it.
            let angle = f64::from(largest) / f64::from(1 << 23);
            let bound = limit(dtype) + angle * angle;
            bench.check(
                (KERNEL_TIMESTEP_EMBEDDING, params),
                &dst,
                std::slice::from_ref(&times),
                false,
                bound,
            );
        }
    }
    let times = Case::random(F, [2, 1, 1, 1], DENSE, 1.0, &mut numbers);
    let dst = Case::zeros(F, [8, 2, 1, 1], DENSE);
    for period in [0, u32::MAX] {
        let mut params = [0; 16];
        params[1] = period;
        bench.refused(
            (KERNEL_TIMESTEP_EMBEDDING, params),
            &dst,
            std::slice::from_ref(&times),
            serve::OPERAND,
        );
    }
    let mut params = [0; 16];
    params[1] = 10_000;
    let op = (KERNEL_TIMESTEP_EMBEDDING, params);
    bench.refused(
        op,
        &Case::zeros(F, [8, 3, 1, 1], DENSE),
        std::slice::from_ref(&times),
        serve::OPERAND,
    );
    bench.refused(
        op,
        &Case::zeros(TYPE_I32, [8, 2, 1, 1], DENSE),
        &[times],
        serve::OPERAND,
    );
}
