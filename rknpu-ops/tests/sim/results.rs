//! Results: every type of every chip against the reference, in every layout.

use std::ffi::{c_char, c_void};

use rknpu_ops::ffi::{Layout, MatmulShape, MatmulType, QuantParams, QuantType, TensorAttr};
use rknpu_ops::layout::{Elem, Soc};
use test_kit::Numbers;

use crate::common::{Matrix, Npu, Problem, info, types};

#[test]
fn every_type_of_every_chip_agrees_with_the_reference() {
    for soc in Soc::ALL {
        let npu = Npu::new(soc);
        for matmul_type in types(soc) {
            for (i, m) in [1, 2, 3, 4, 5, 6, 7, 8, 9, 33].into_iter().enumerate() {
                let k = [32, 64, 96, 288, 544][i % 5];
                let align = Problem::random(soc, matmul_type, [1, 32, 64], 0)
                    .layout
                    .n_align;
                let problem = Problem::random(soc, matmul_type, [m, k, align * (1 + i % 3)], 1);
                let c = npu
                    .multiply(problem.info, &problem.a_bytes(), &problem.b_bytes())
                    .unwrap();
                problem.check(&c, soc.name());
            }
        }
    }
}

#[test]
fn k_above_the_split_agrees_with_the_reference() {
    let cases = [
        (Soc::Rk3588, MatmulType::I8_I8_I32, 8192 + 64),
        (Soc::Rk3588, MatmulType::F16_F16_F32, 8192 + 32),
        (Soc::Rk3588, MatmulType::I4_I4_I16, 8192 + 32),
        (Soc::Rk3576, MatmulType::I8_I8_I32, 2 * 4096 + 32),
        (Soc::Rk3576, MatmulType::I8_I4_I32, 4096 + 32),
        (Soc::Rk3566, MatmulType::I8_I8_I32, 10240),
    ];
    for (soc, matmul_type, k) in cases {
        let npu = Npu::new(soc);
        for m in [1, 9] {
            let problem = Problem::random(soc, matmul_type, [m, k, 64], 2);
            let c = npu
                .multiply(problem.info, &problem.a_bytes(), &problem.b_bytes())
                .unwrap();
            problem.check(&c, soc.name());
        }
    }
}

#[test]
fn largest_sums_are_exact() {
    let npu = Npu::new(Soc::Rk3588);
    for m in [1, 16] {
        let mut problem = Problem::random(Soc::Rk3588, MatmulType::I8_I8_I32, [m, 8192, 32], 3);
        problem.a.data.fill(-128.0);
        problem.b.data.fill(-128.0);
        let c = npu
            .multiply(problem.info, &problem.a_bytes(), &problem.b_bytes())
            .unwrap();
        problem.check(&c, "largest");
    }
}

#[test]
fn layouts_give_the_same() {
    for soc in Soc::ALL {
        let npu = Npu::new(soc);
        for matmul_type in types(soc) {
            for ac in [Layout::NORM, Layout::NATIVE] {
                for b in [Layout::NORM, Layout::NATIVE, Layout::TP_NORM] {
                    let mut problem = Problem::random(soc, matmul_type, [5, 64, 128], 4);
                    problem.info.ac_layout = ac;
                    problem.info.b_layout = b;
                    let refused = problem.layout.b.elem == Elem::I4 && b != Layout::NATIVE
                        || b == Layout::TP_NORM
                            && (matches!(soc, Soc::Rk3562 | Soc::Rk3566)
                                || !matches!(matmul_type.0, 1 | 2 | 4));
                    match npu.multiply(problem.info, &problem.a_bytes(), &problem.b_bytes()) {
                        Ok(c) if !refused => problem.check(&c, &format!("{soc:?} {ac:?} {b:?}")),
                        result => assert!(
                            refused && result == Err(-5),
                            "{result:?} {problem:?}",
                            problem = problem.info
                        ),
                    }
                }
            }
        }
    }
}

/// Values over so many binades that an FP64 sum of a group is not always exact: only the same order
/// gives the same bits.
#[test]
fn a_row_does_not_depend_on_the_other_rows() {
    let npu = Npu::new(Soc::Rk3588);
    let (k, n) = (320, 64);
    for matmul_type in [
        MatmulType::F16_F16_F32,
        MatmulType::F16_F16_F16,
        MatmulType::I8_I8_I32,
    ] {
        let mut whole = Problem::random(Soc::Rk3588, matmul_type, [25, k, n], 5);
        if matmul_type != MatmulType::I8_I8_I32 {
            let mut numbers = Numbers::fixed(6);
            for value in whole.a.data.iter_mut().chain(&mut whole.b.data) {
                *value =
                    half::f16::from_f64(crate::common::value(&mut numbers, Elem::F16, 14)).to_f64();
            }
        }
        let all = npu
            .multiply(whole.info, &whole.a_bytes(), &whole.b_bytes())
            .unwrap();
        for m in [1, 2, 3, 4, 5, 8, 12] {
            let first = 25 - m;
            let part = Problem {
                info: info(matmul_type, [m, k, n]),
                shape: [m, k, n],
                a: Matrix {
                    columns: k,
                    data: whole.a.data[first * k..].to_vec(),
                },
                b: whole.b.clone(),
                layout: whole.layout,
            };
            let c = npu
                .multiply(part.info, &part.a_bytes(), &part.b_bytes())
                .unwrap();
            for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
                let (have, want) = (
                    part.have(&c, row, column),
                    whole.have(&all, first + row, column),
                );
                assert_eq!(have, want, "{matmul_type:?} M={m} ({row}, {column})");
            }
        }
    }
}

#[test]
fn narrow_integer_results_saturate() {
    let npu = Npu::new(Soc::Rk3588);
    for (matmul_type, value, low, high) in [
        (MatmulType::I4_I4_I16, -8.0, 0x8000, 0x7fff),
        (MatmulType::I8_I8_I8, -100.0, 0x80, 0x7f),
    ] {
        let mut problem = Problem::random(Soc::Rk3588, matmul_type, [2, 1024, 64], 7);
        problem.b.data.fill(value);
        problem.a.data.fill(-value - 1.0);
        problem.a.data[..1024].fill(value);
        let c = npu
            .multiply(problem.info, &problem.a_bytes(), &problem.b_bytes())
            .unwrap();
        assert_eq!(problem.have(&c, 0, 63), high);
        assert_eq!(problem.have(&c, 1, 0), low);
    }
}

#[test]
fn a_scale_brings_i8_results_into_range() {
    let npu = Npu::new(Soc::Rk3588);
    let problem = Problem::random(Soc::Rk3588, MatmulType::I8_I8_I8, [3, 32, 32], 8);
    let (ctx, attr) = npu.create(problem.info).unwrap();
    let mems = [attr.a, attr.b, attr.c].map(|attr| npu.mem(ctx, attr.size).unwrap());
    mems[0].write(&problem.a_bytes());
    mems[1].write(&problem.b_bytes());
    for (mem, attr) in mems.iter().zip([attr.a, attr.b, attr.c]) {
        assert_eq!(npu.set(ctx, *mem, attr), 0);
    }
    npu.clean(ctx, mems[2]);
    let (mut scale, mut zp) = (4096f32, 0);
    let mut params = QuantParams {
        name: attr.c.name,
        scale: &mut scale,
        scale_len: 1,
        zp: &mut zp,
        zp_len: 1,
    };
    // SAFETY: the arrays have one element each.
    let code = unsafe { (npu.api.matmul_set_quant_params)(ctx, &mut params) };
    assert_eq!(code, 0);
    assert_eq!(npu.run(ctx), 0);
    let c = mems[2].read();
    let sum: f64 = (0..32)
        .map(|k| problem.a.at(2, k) * problem.b.at(k, 31))
        .sum();
    let want = (sum / 4096.0).round_ties_even() as i8;
    assert_eq!(problem.have(&c, 2, 31), u32::from(want.cast_unsigned()));
}

#[test]
fn types_that_the_library_gets_wrong_give_zeros() {
    let npu = Npu::new(Soc::Rk3588);
    let problem = Problem::random(Soc::Rk3588, MatmulType::I8_I8_I32, [2, 64, 32], 9);
    let (a, b) = (problem.a_bytes(), problem.b_bytes());
    let mut float_out = problem.info;
    float_out.matmul_type = MatmulType::I8_I8_F32;
    let mut per_group = float_out;
    per_group.b_quant_type = QuantType::PER_GROUP_SYM;
    per_group.group_size = 32;
    let mut per_channel = problem.info;
    per_channel.b_quant_type = QuantType::PER_CHANNEL_SYM;
    for info in [float_out, per_group, per_channel] {
        let c = npu.multiply(info, &a, &b).unwrap();
        assert!(c.iter().all(|byte| *byte == 0), "{info:?}");
    }
}

#[test]
fn the_library_converts_b_as_the_formula_says() {
    for soc in Soc::ALL {
        let npu = Npu::new(soc);
        for matmul_type in types(soc) {
            let mut problem = Problem::random(soc, matmul_type, [1, 96, 128], 10);
            let [_, k, n] = problem.shape;
            let b = problem.layout.b;
            // Elements of 4 bits are passed in as a byte each.
            let loose = if b.elem == Elem::I4 { Elem::I8 } else { b.elem };
            let mut norm = problem.b.encode(loose, k * n, |ki, ni| ki * n + ni);
            let mut native = vec![0u8; b.bytes(k, n)];
            let convert = npu.api.b_normal_layout_to_native_layout;
            let [input, output] = [&mut norm, &mut native].map(|v| v.as_mut_ptr().cast::<c_void>());
            // SAFETY: the buffers hold K * N elements and the native B.
            let code = unsafe { convert(input, output, 96, 128, &mut problem.info) };
            assert_eq!(code, 0);
            assert_eq!(native, problem.b_bytes(), "{soc:?} {matmul_type:?}");
        }
    }
}

#[test]
fn a_dynamic_context_runs_each_of_its_shapes() {
    let npu = Npu::new(Soc::Rk3588);
    let ms = [1, 4, 32];
    let mut shapes = ms.map(|m| MatmulShape { m, k: 64, n: 32 });
    let zero = info(MatmulType::F16_F16_F32, [0, 0, 0]);
    let (ctx, attrs) = npu.create_dynamic(zero, &mut shapes).unwrap();
    let largest = attrs[2];
    let mems = [largest.a, largest.b, largest.c].map(|attr| npu.mem(ctx, attr.size).unwrap());
    npu.clean(ctx, mems[2]);
    for (shape, attr) in shapes.into_iter().zip(attrs) {
        let m = usize::try_from(shape.m).unwrap();
        let problem = Problem::random(Soc::Rk3588, MatmulType::F16_F16_F32, [m, 64, 32], 11);
        mems[0].write(&problem.a_bytes());
        mems[1].write(&problem.b_bytes());
        assert_eq!(npu.set_dynamic_shape(ctx, shape), 0);
        for (mem, attr) in mems.iter().zip([attr.a, attr.b, attr.c]) {
            assert_eq!(npu.set(ctx, *mem, attr), 0);
        }
        assert_eq!(npu.run(ctx), 0);
        problem.check(&mems[2].read(), "dynamic");
    }
    assert_eq!(
        npu.set_dynamic_shape(ctx, MatmulShape { m: 2, k: 64, n: 32 }),
        -5
    );
}

#[test]
fn attributes_describe_both_kinds_of_layout() {
    let npu = Npu::new(Soc::Rk3588);
    let native = info(MatmulType::I8_I8_I32, [3, 64, 96]);
    let mut norm = native;
    norm.ac_layout = Layout::NORM;
    norm.b_layout = Layout::NORM;
    let dims = |attr: TensorAttr| attr.dims[..usize::try_from(attr.n_dims).unwrap()].to_vec();
    for (info, a, b, c) in [
        (native, vec![4, 3, 16], vec![3, 2, 32, 32], vec![24, 3, 4]),
        (norm, vec![3, 64], vec![64, 96], vec![3, 96]),
    ] {
        let (_, attr) = npu.create(info).unwrap();
        assert_eq!([dims(attr.a), dims(attr.b), dims(attr.c)], [a, b, c]);
        assert_eq!([attr.a.size, attr.b.size, attr.c.size], [192, 6144, 1152]);
        assert_eq!(
            [
                attr.a.tensor_type.0,
                attr.b.tensor_type.0,
                attr.c.tensor_type.0
            ],
            [2, 2, 6]
        );
        assert_eq!(attr.b.name[..2], [c_char::from_ne_bytes(*b"B"), 0]);
    }
}
