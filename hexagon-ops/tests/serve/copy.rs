//! Rows by number, copies, concatenation and repetition: exact, or rounded to the result's type.

use hexagon_ops::serve;
use hexagon_ops::wire::*;

use crate::common::Numbers;
use crate::tensor::{
    Bench, DENSE, GAPS, PERMUTED, Place, TRANSPOSED, Tensor as Case, indices, limit,
};

const F: u32 = TYPE_F32;
const H: u32 = TYPE_F16;

const B: u32 = TYPE_BF16;
const BLOCKS: [u32; 7] = [
    TYPE_Q8_0,
    TYPE_Q4_0,
    TYPE_Q4_1,
    TYPE_Q5_0,
    TYPE_Q5_1,
    TYPE_IQ4_NL,
    TYPE_MXFP4,
];
const SUPER_BLOCKS: [u32; 6] = [
    TYPE_Q2_K,
    TYPE_Q3_K,
    TYPE_Q4_K,
    TYPE_Q5_K,
    TYPE_Q6_K,
    TYPE_IQ4_XS,
];

/// Largest NMSE of rounding uniform numbers to a type.
fn type_limit(dtype: u32) -> f64 {
    // The relative error of uniform numbers (mean square 1 / 3) that are rounded to `count` steps
    // on each side of 0.
    let steps = |count: f64| 3.0 / (12.0 * count * count);
    match dtype {
        TYPE_Q8_0 => steps(127.0),
        // One side has only 7 steps, where half a step more is lost.
        TYPE_Q4_0 => 1.5 * steps(8.0),
        TYPE_Q5_0 => 1.5 * steps(16.0),
        TYPE_Q4_1 => steps(7.5),
        TYPE_Q5_1 => steps(15.5),
        // The widest steps are 24 of 127.
        TYPE_IQ4_NL => steps(127.0 / 24.0),
        // The largest magnitude, up to 8, becomes 6. The quarters of 0 to 8 lose 1/48, 1/12, 1/3
        // and 4/3, relative to a mean square of 64 / 3.
        TYPE_MXFP4 => (1.0 / 48.0 + 1.0 / 12.0 + 5.0 / 3.0) / 4.0 * 3.0 / 64.0,
        _ => limit(dtype),
    }
}

#[test]
fn rows_are_fetched_by_number() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for dtype in [F, H, B].into_iter().chain(BLOCKS).chain(SUPER_BLOCKS) {
        let lengths = match SUPER_BLOCKS.contains(&dtype) {
            true => [256, 768],
            false => [64, 288],
        };
        for (n, ids_type) in lengths.into_iter().zip([TYPE_I32, TYPE_I64]) {
            for place in [DENSE, GAPS] {
                let table = Case::random(dtype, [n, 11, 2, 3], place, 2.0, &mut numbers);
                let ids = Case::of(ids_type, [7, 2, 3, 1], GAPS, || {
                    f32::from(u8::try_from(numbers.below(11)).unwrap())
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
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    let scattered = [
        ([64, 40, 2, 3], TYPE_I64, 7, GAPS),
        ([576, 13, 4, 3], TYPE_I32, 7, GAPS),
        ([1, 900, 1, 1], TYPE_I64, 7, GAPS),
    ];
    let successive = [
        ([64, 40, 2, 3], TYPE_I64, 1, DENSE),
        ([96, 17, 1, 1], TYPE_I64, 1, GAPS),
    ];
    let scattered = ([F, H, B].into_iter().chain(BLOCKS)).map(|dtype| (dtype, &scattered[..]));
    let successive = [F, H, B, TYPE_Q8_0].map(|dtype| (dtype, &successive[..]));
    for (dtype, cases) in scattered.chain(successive) {
        for (ne, ids_type, step, place) in cases.iter().copied() {
            if BLOCKS.contains(&dtype) && ne[0] == 1 {
                continue;
            }
            check_stored(
                &mut bench,
                &mut numbers,
                (dtype, ids_type),
                ne,
                (step, place),
            );
        }
    }
}

/// A view of a single row has a stride of 0. From it alone the kernel could not know that elements
/// after the row must keep their values.
#[test]
fn a_single_row_is_stored_among_rows_that_do_not_follow_each_other() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for dtype in [F, H, B, TYPE_Q8_0] {
        for place in [DENSE, GAPS, PERMUTED] {
            for ne in [[512, 2, 1, 1], [512, 3, 4, 2]] {
                let kinds = (dtype, TYPE_I64);
                check_stored(&mut bench, &mut numbers, kinds, ne, (1, place));
            }
        }
    }
}

/// Stores half as many rows as a tensor of `ne` has, each `step` rows after the one before, and
/// compares all rows.
fn check_stored(
    bench: &mut Bench,
    numbers: &mut Numbers,
    (dtype, ids_type): (u32, u32),
    ne: [usize; 4],
    (step, place): (usize, Place),
) {
    let n_rows = ne[1] / 2;
    let src = Case::random(F, [ne[0], n_rows, ne[2], ne[3]], place, 2.0, numbers);
    // The step has no common divisor with the number of rows, so all rows are different.
    let mut index = 0;
    let ids = Case::of(ids_type, [n_rows, ne[2], 1, 1], DENSE, || {
        let row = step * index % ne[1];
        index += 1;
        f32::from(u16::try_from(row).unwrap())
    });
    let shape = Case::zeros(dtype, ne, place);
    let have = bench.run(
        (KERNEL_SET_ROWS, [0; 16]),
        &shape,
        &[src.clone(), ids.clone()],
        false,
    );
    let mut want: Vec<Option<f64>> = vec![None; shape.values.len()];
    for [i, i1, i2, i3] in indices(src.ne) {
        let to = row(&ids, [i1, i2, 0]);
        want[((i3 * ne[2] + i2) * ne[1] + to) * ne[0] + i] = Some(src.value([i, i1, i2, i3]));
    }
    let (mut error, mut power, mut stayed) = (0.0, 0.0, true);
    // The values that untouched memory has when it is decoded as this type.
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

#[test]
fn numbers_of_rows_that_do_not_exist_are_refused() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for wrong in [4.0, -1.0, 1e9] {
        let mut values = [0.0, 3.0, wrong].into_iter();
        let ids = Case::of(TYPE_I64, [3, 1, 1, 1], DENSE, || values.next().unwrap());
        let few = Case::random(F, [32, 3, 1, 1], DENSE, 1.0, &mut numbers);
        let many = Case::random(F, [32, 4, 1, 1], DENSE, 1.0, &mut numbers);
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
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    let places: [Place; 4] = [DENSE, GAPS, PERMUTED, TRANSPOSED];
    for ne in [
        [1, 1, 1, 1],
        [33, 5, 3, 2],
        [288, 4, 1, 3],
        [40, 70, 2, 1],
        [32, 22, 3, 1],
    ] {
        for (from, to) in [
            (F, F),
            (F, H),
            (H, F),
            (H, H),
            (F, B),
            (B, F),
            (B, B),
            (TYPE_I64, TYPE_I64),
        ] {
            for src_place in places {
                for dst_place in places {
                    let src = Case::random(from, ne, src_place, 2.0, &mut numbers);
                    let mut dst = Case::zeros(to, ne, dst_place);
                    dst.values.clone_from(&src.values);
                    bench.check((KERNEL_COPY, [0; 16]), &dst, &[src], false, limit(to));
                }
            }
            // With another shape, elements keep ggml's order.
            let src = Case::random(from, ne, PERMUTED, 2.0, &mut numbers);
            let mut dst = Case::zeros(to, [ne[1] * ne[2], ne[0], ne[3], 1], GAPS);
            dst.values.clone_from(&src.values);
            bench.check((KERNEL_COPY, [0; 16]), &dst, &[src], false, limit(to));
        }
    }
}

/// Types, shapes and strides for which elements must come out bit by bit.
#[test]
fn copies_of_one_type_keep_every_bit() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    let plain = [F, H, B, TYPE_I8, TYPE_I16, TYPE_I32, TYPE_I64];
    for dtype in plain.into_iter().chain(BLOCKS).chain(SUPER_BLOCKS) {
        let unit = crate::block::block(dtype).0;
        let ne = [3 * unit, 2, 3, 4];
        for place in [DENSE, GAPS, PERMUTED] {
            let src = Case::random(dtype, ne, place, 100.0, &mut numbers);
            for (dst_ne, dst_place) in [
                (ne, DENSE),
                (ne, PERMUTED),
                (ne, GAPS),
                ([2 * unit, 6, 3, 2], DENSE),
                ([12 * unit, 1, 6, 1], GAPS),
            ] {
                let mut dst = Case::zeros(dtype, dst_ne, dst_place);
                dst.values.clone_from(&src.values);
                let src = std::slice::from_ref(&src);
                bench.check((KERNEL_COPY, [0; 16]), &dst, src, false, EXACT);
            }
        }
    }
}

/// Rounding of f64 values of a test to f32.
const EXACT: f64 = 1e-14;

#[test]
fn patterns_that_are_no_numbers_are_copied_as_well() {
    let mut bench = Bench::new();
    for dtype in [F, H, B] {
        let (ne, none) = ([70, 3, 1, 1], Case::none());
        let shape = Case::zeros(dtype, ne, DENSE);
        let src = Case::of(dtype, ne, TRANSPOSED, || 1.0);
        let body = bench.place((KERNEL_COPY, [0; 16]), &shape, &[src, none], false);
        let width = if dtype == F { 4 } else { 2 };
        // Signalling and quiet NaN, infinities, subnormals: all patterns of the upper bytes.
        let bytes: Vec<u8> = (0..210 * width)
            .map(|i: usize| {
                u8::try_from(i * 89 % 251).unwrap() | if i % width == width - 1 { 0x7f } else { 0 }
            })
            .collect();
        let from = usize::try_from(body.src[0].offset).unwrap();
        bench.memory.put(from, &bytes);
        let completion = bench.host.run(&[Command::new(0, &body)]);
        assert_eq!(completion.status, 0);
        let to = usize::try_from(body.dst.offset).unwrap();
        let have: Vec<u8> = bench.memory.get(to, bytes.len());
        for i in 0..70 {
            for j in 0..3 {
                let (a, b) = ((j * 70 + i) * width, (i * 3 + j) * width);
                assert_eq!(have[a..a + width], bytes[b..b + width], "type {dtype}");
            }
        }
    }
}

#[test]
fn copies_to_and_from_blocks_round_as_their_types_do() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for dtype in BLOCKS.into_iter().chain(SUPER_BLOCKS) {
        let only_read = SUPER_BLOCKS.contains(&dtype);
        let ne = [3 * crate::block::block(dtype).0, 5, 3, 2];
        for place in [DENSE, PERMUTED] {
            for plain in [F, H, B] {
                let src = Case::random(dtype, ne, place, 1.0, &mut numbers);
                let mut dst = Case::zeros(plain, ne, DENSE);
                dst.values.clone_from(&src.values);
                bench.check((KERNEL_COPY, [0; 16]), &dst, &[src], false, limit(plain));
                if only_read {
                    continue;
                }
                let src = Case::random(plain, ne, place, 3.0, &mut numbers);
                let mut dst = Case::zeros(dtype, ne, DENSE);
                dst.values.clone_from(&src.values);
                bench.check(
                    (KERNEL_COPY, [0; 16]),
                    &dst,
                    &[src],
                    false,
                    type_limit(dtype),
                );
            }
        }
        let zeros = Case::of(F, ne, DENSE, || 0.0);
        if !only_read {
            let dst = Case::zeros(dtype, ne, DENSE);
            bench.check((KERNEL_COPY, [0; 16]), &dst, &[zeros], false, 0.0);
        }
    }
}

#[test]
fn super_blocks_are_only_read() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for dtype in SUPER_BLOCKS {
        let table = Case::random(dtype, [256, 4, 1, 1], DENSE, 1.0, &mut numbers);
        let rows = Case::random(F, [256, 3, 1, 1], DENSE, 1.0, &mut numbers);
        let ids = Case::of(TYPE_I64, [3, 1, 1, 1], DENSE, || 1.0);
        let (rows, table) = (&rows, &table);
        for (kernel, dst, src) in [
            (KERNEL_SET_ROWS, table, vec![rows.clone(), ids]),
            (KERNEL_ADD, rows, vec![table.clone(), rows.clone()]),
            (KERNEL_SCALE, rows, vec![table.clone()]),
            (
                KERNEL_MUL_MAT_UNPACKED,
                &Case::zeros(F, [4, 3, 1, 1], DENSE),
                vec![table.clone(), rows.clone()],
            ),
        ] {
            bench.refused((kernel, [0; 16]), dst, &src, serve::OPERAND);
        }
    }
}

/// The rounding of ggml, computed by hand from `quantize_row_*_ref` for 32 numbers with ties and
/// both signs.
#[test]
fn blocks_are_quantized_as_ggml_does_it() {
    let mut bench = Bench::new();
    let ne = [32, 1, 1, 1];
    // The largest magnitude is the first number, which is negative; so the scale is positive and
    // exact.
    let mut next = -9.0;
    let src = Case::of(F, ne, DENSE, || {
        next += 1.0;
        if next > 7.0 { 0.5 } else { next }
    });
    for (dtype, scale, low, high) in [
        (TYPE_Q4_0, 1.0, -8.0, 7.0),
        (TYPE_Q5_0, 0.5, -8.0, 7.5),
        (TYPE_Q4_1, 1.0, -8.0, 7.0),
    ] {
        let mut dst = Case::zeros(dtype, ne, DENSE);
        // A value half-way between two levels is rounded up.
        dst.values = src
            .values
            .iter()
            .map(|x| ((x / scale + 0.5).floor() * scale).clamp(low, high))
            .collect();
        let src = std::slice::from_ref(&src);
        bench.check((KERNEL_COPY, [0; 16]), &dst, src, false, 0.0);
    }
    // The largest magnitude is 8, four units of 2. If two values are equally near, the smaller one
    // is chosen.
    let mut dst = Case::zeros(TYPE_MXFP4, ne, DENSE);
    let nearest = |x: f64| {
        let values = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0_f64];
        let distance = |value: &f64| (value - x.abs()).abs();
        let best = values.map(|value| distance(&value));
        let least = best.iter().fold(f64::MAX, |least, x| least.min(*x));
        let first = best.iter().position(|x| *x == least).unwrap();
        values[first] * x.signum()
    };
    dst.values = src.values.iter().map(|x| nearest(*x)).collect();
    bench.check((KERNEL_COPY, [0; 16]), &dst, &[src], false, 0.0);
}

#[test]
fn whole_numbers_are_cut_towards_zero() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    let ne = [77, 3, 2, 1];
    for place in [DENSE, GAPS, TRANSPOSED] {
        for plain in [F, H] {
            let src = Case::random(plain, ne, place, 150.0, &mut numbers);
            let mut dst = Case::zeros(TYPE_I32, ne, DENSE);
            dst.values = src.values.iter().map(|x| x.trunc()).collect();
            bench.check((KERNEL_COPY, [0; 16]), &dst, &[src], false, 0.0);
            let src = Case::random(TYPE_I32, ne, place, 2000.0, &mut numbers);
            let mut dst = Case::zeros(plain, ne, DENSE);
            dst.values.clone_from(&src.values);
            bench.check((KERNEL_COPY, [0; 16]), &dst, &[src], false, 0.0);
        }
    }
}

#[test]
fn latest_inputs_and_a_new_one_become_windows() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (past, new, place) in [
        (3, 1, DENSE),
        (2, 1, DENSE),
        (2, 2, DENSE),
        (3, 1, GAPS),
        (3, 64, DENSE),
        (3, 40, GAPS),
    ] {
        let a = Case::random(F, [past, 70, 2, 1], place, 2.0, &mut numbers);
        let b = Case::random(F, [new, 70, 2, 1], place, 2.0, &mut numbers);
        let mut dst = Case::zeros(F, [past + new, 70, 2, 1], DENSE);
        dst.values = indices(dst.ne)
            .map(|at| match at[0].checked_sub(past) {
                None => a.value(at),
                Some(k) => b.value([k, at[1], at[2], at[3]]),
            })
            .collect();
        bench.check((KERNEL_CONCAT, [0; 16]), &dst, &[a, b], false, 0.0);
    }
}

#[test]
fn tensors_are_joined_and_repeated() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for place in [DENSE, GAPS, PERMUTED, TRANSPOSED] {
        for (dim, dtype) in
            (0..4).flat_map(|dim| [F, H, B, TYPE_I8, TYPE_I64, TYPE_Q4_1].map(|t| (dim, t)))
        {
            let block = dtype == TYPE_Q4_1;
            if block && place.order[0] != 0 {
                continue;
            }
            let mut ne = [if block { 64 } else { 33 }, 4, 3, 2];
            let a = Case::random(dtype, ne, place, 2.0, &mut numbers);
            ne[dim] += if block && dim == 0 { 32 } else { 5 };
            let b = Case::random(dtype, ne, place, 2.0, &mut numbers);
            let first = a.ne[dim];
            ne[dim] += first;
            let mut dst = Case::zeros(dtype, ne, DENSE);
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
            bench.check((KERNEL_CONCAT, params), &dst, &[a, b], false, EXACT);
        }
        for repeats in [[1, 1, 1, 1], [9, 1, 1, 1], [1, 4, 1, 3], [2, 2, 2, 2]] {
            for dtype in [F, H, B, TYPE_I16, TYPE_I32] {
                let src = Case::random(dtype, [33, 2, 3, 1], place, 2.0, &mut numbers);
                let ne = [0, 1, 2, 3].map(|i| src.ne[i] * repeats[i]);
                let mut dst = Case::zeros(dtype, ne, DENSE);
                dst.values = indices(ne).map(|at| src.value(at)).collect();
                bench.check((KERNEL_REPEAT, [0; 16]), &dst, &[src], false, 0.0);
            }
        }
    }
}
