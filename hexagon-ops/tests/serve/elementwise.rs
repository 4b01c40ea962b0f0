//! Element by element: every function against its f64 definition, with strides, repetition, odd
//! sizes, in place.

use hexagon_ops::wire::*;

use crate::common::Numbers;
use crate::tensor::{
    Bench, DENSE, GAPS, PERMUTED, Params, TRANSPOSED, Tensor as Case, floats, indices, limit,
};

const F: u32 = TYPE_F32;
const H: u32 = TYPE_F16;
const B: u32 = TYPE_BF16;

/// erf by its series and continued fraction, f64.
fn erf(x: f64) -> f64 {
    let t = x.abs();
    if t < 3.0 {
        let (mut term, mut sum) = (t, t);
        for n in 1..80 {
            term *= -t * t / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        return (sum * 2.0 / std::f64::consts::PI.sqrt()).copysign(x);
    }
    let tail = (1..60).rev().fold(t, |f, k| t + f64::from(k) / 2.0 / f);
    (1.0 - (-t * t).exp() / tail / std::f64::consts::PI.sqrt()).copysign(x)
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn gelu(x: f64) -> f64 {
    let root = (2.0 / std::f64::consts::PI).sqrt();
    0.5 * x * (1.0 + (root * x * (1.0 + 0.044715 * x * x)).tanh())
}

fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

fn hard(x: f64) -> f64 {
    ((x + 3.0) / 6.0).clamp(0.0, 1.0)
}

type Function = fn(f64) -> f64;

/// Returns the most error of a function. Those by the sigmoid's polynomial are off by up to 5e-6,
/// and ggml's tests accept 1e-7 squared.
fn limit_of(kernel: u32, dtype: u32) -> f64 {
    match kernel {
        KERNEL_SILU | KERNEL_GELU | KERNEL_GELU_QUICK | KERNEL_SIGMOID | KERNEL_TANH
        | KERNEL_SWIGLU | KERNEL_GEGLU | KERNEL_GEGLU_QUICK | KERNEL_SWIGLU_OAI
        | KERNEL_SWIGLU_CLAMP => limit(dtype).max(3e-11),
        _ => limit(dtype),
    }
}

/// Functions of one element: kernel, parameters, definition, lowest argument.
fn unary() -> Vec<(u32, Params, Function, f32)> {
    vec![
        (KERNEL_SCALE, floats(&[1.5, 0.25]), |x| x * 1.5 + 0.25, -9.0),
        (KERNEL_SCALE, floats(&[-2.0]), |x| x * -2.0, -9.0),
        (
            KERNEL_CLAMP,
            floats(&[-0.5, 2.0]),
            |x| x.clamp(-0.5, 2.0),
            -9.0,
        ),
        (KERNEL_SQR, [0; 16], |x| x * x, -9.0),
        (KERNEL_SQRT, [0; 16], f64::sqrt, 0.0),
        (KERNEL_SILU, [0; 16], |x| x * sigmoid(x), -9.0),
        (KERNEL_GELU, [0; 16], gelu, -9.0),
        (KERNEL_GELU_QUICK, [0; 16], |x| x * sigmoid(1.702 * x), -9.0),
        (
            KERNEL_GELU_ERF,
            [0; 16],
            |x| 0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2)),
            // For smaller arguments 1 + erf cancels in f32, here and in ggml.
            -1.0,
        ),
        (KERNEL_RELU, [0; 16], |x| x.max(0.0), -9.0),
        (KERNEL_SIGMOID, [0; 16], sigmoid, -9.0),
        (KERNEL_TANH, [0; 16], f64::tanh, -9.0),
        (KERNEL_EXP, [0; 16], f64::exp, -9.0),
        (KERNEL_NEG, [0; 16], |x| -x, -9.0),
        (KERNEL_ABS, [0; 16], f64::abs, -9.0),
        (KERNEL_SOFTPLUS, [0; 16], softplus, -9.0),
        (KERNEL_HARDSWISH, [0; 16], |x| x * hard(x), -9.0),
        (KERNEL_HARDSIGMOID, [0; 16], hard, -9.0),
        (KERNEL_ELU, [0; 16], |x| x.max(x.min(0.0).exp_m1()), -9.0),
        (KERNEL_STEP, [0; 16], |x| f64::from(u8::from(x > 0.0)), -9.0),
        (
            KERNEL_SGN,
            [0; 16],
            |x| if x == 0.0 { 0.0 } else { x.signum() },
            -9.0,
        ),
        (KERNEL_EXPM1, [0; 16], f64::exp_m1, -9.0),
        (KERNEL_FLOOR, [0; 16], f64::floor, -9.0),
        (KERNEL_CEIL, [0; 16], f64::ceil, -9.0),
        (KERNEL_ROUND, [0; 16], f64::round, -9.0),
        (KERNEL_TRUNC, [0; 16], f64::trunc, -9.0),
        (
            KERNEL_XIELU,
            floats(&[0.0, 4.0, 20.0, 0.5, 1e-7]),
            |x| {
                if x > 0.0 {
                    20.0 * x * x + 0.5 * x
                } else {
                    (x.min(1e-7).exp_m1() - x) * 4.0 + 0.5 * x
                }
            },
            -9.0,
        ),
        (KERNEL_LOG, [0; 16], f64::ln, 0.001),
        (KERNEL_SIN, [0; 16], f64::sin, -9.0),
        (KERNEL_COS, [0; 16], f64::cos, -9.0),
        (
            KERNEL_LEAKY_RELU,
            floats(&[0.125]),
            |x| x.max(0.125 * x),
            -9.0,
        ),
    ]
}

#[test]
fn functions_of_one_element_are_their_definitions() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (kernel, params, f, low) in unary() {
        for ne in [[1, 1, 1, 1], [31, 3, 1, 1], [257, 2, 3, 2], [64, 5, 4, 1]] {
            for (dtype, place) in [
                (F, DENSE),
                (F, GAPS),
                (F, PERMUTED),
                (F, TRANSPOSED),
                (H, GAPS),
                (B, DENSE),
            ] {
                let range = 9.0 - low;
                let src = Case::of(dtype, ne, place, || {
                    (numbers.float() + 1.0) / 2.0 * range + low
                });
                let mut dst = Case::zeros(dtype, ne, if ne[1] == 3 { GAPS } else { DENSE });
                dst.values = src.values.iter().map(|x| f(*x)).collect();
                let op = (kernel, params);
                bench.check(
                    op,
                    &dst,
                    std::slice::from_ref(&src),
                    false,
                    limit_of(kernel, dtype),
                );
                if place.order[0] == 0 {
                    bench.check(op, &dst, &[src], true, limit_of(kernel, dtype));
                }
            }
        }
    }
}

/// Relative accuracy over the whole range, where a mean over many values would hide the small ones.
#[test]
fn functions_are_accurate_to_f32_for_each_argument() {
    let mut bench = Bench::new();
    let n = 20_001;
    let line = |low: f32, high: f32| {
        let step = (high - low) / 20_000.0;
        let mut x = low - step;
        Case::of(F, [n, 1, 1, 1], DENSE, || {
            x += step;
            x
        })
    };
    let cases: [(u32, Function, f32, f32, f64); 16] = [
        (KERNEL_LOG, f64::ln, 1e-30, 1e30, 3e-7),
        (KERNEL_LOG, f64::ln, 0.5, 2.0, 3e-7),
        (KERNEL_EXPM1, f64::exp_m1, -9.0, 88.0, 6e-7),
        (KERNEL_EXPM1, f64::exp_m1, -0.4, 0.4, 6e-7),
        (KERNEL_SOFTPLUS, softplus, -80.0, 80.0, 6e-7),
        (KERNEL_SOFTPLUS, softplus, -2.0, 2.0, 6e-7),
        (KERNEL_EXP, f64::exp, -87.0, 88.7, 3e-7),
        (KERNEL_TANH, f64::tanh, -12.0, 12.0, 4e-6),
        (KERNEL_TANH, f64::tanh, -0.7, 0.7, 4e-6),
        (KERNEL_SIGMOID, sigmoid, -60.0, 60.0, 1e-5),
        (KERNEL_SILU, |x| x * sigmoid(x), -60.0, 60.0, 1e-5),
        (KERNEL_SQRT, f64::sqrt, 1e-30, 1e30, 6e-7),
        (KERNEL_SQRT, f64::sqrt, 0.0, 3.0, 6e-7),
        (KERNEL_GELU, gelu, -3.0, 9.0, 1e-5),
        (
            KERNEL_GELU_QUICK,
            |x| x * sigmoid(1.702 * x),
            -9.0,
            9.0,
            1e-5,
        ),
        (
            KERNEL_GELU_ERF,
            |x| 0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2)),
            -1.5,
            9.0,
            3e-6,
        ),
    ];
    for (kernel, f, low, high, limit) in cases {
        let src = line(low, high);
        let dst = Case::zeros(F, src.ne, DENSE);
        let have = bench.run((kernel, [0; 16]), &dst, std::slice::from_ref(&src), false);
        let mut worst = (0.0, 0.0);
        for (x, have) in src.values.iter().zip(have) {
            let want = f(*x);
            let error = (f64::from(have) - want).abs() / want.abs().max(1e-37);
            if want != 0.0 && error > worst.0 {
                worst = (error, *x);
            }
        }
        println!(
            "kernel {kernel} in [{low}, {high}]: {:.1e} at {}",
            worst.0, worst.1
        );
        assert!(worst.0 < limit, "kernel {kernel}: {worst:?}");
    }
}

/// Positions of a million tokens are such angles.
#[test]
fn sines_and_cosines_of_large_angles_are_accurate() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (kernel, f) in [(KERNEL_SIN, f64::sin as Function), (KERNEL_COS, f64::cos)] {
        for largest in [10.0, 1e3, 131_072.0, 1_048_576.0] {
            let src = Case::random(F, [20_000, 1, 1, 1], DENSE, largest, &mut numbers);
            let dst = Case::zeros(F, src.ne, DENSE);
            let have = bench.run((kernel, [0; 16]), &dst, std::slice::from_ref(&src), false);
            let errors = src.values.iter().zip(have);
            let worst = errors.fold(0.0, |worst: f64, (x, have)| {
                worst.max((f64::from(have) - f(*x)).abs())
            });
            assert!(worst < 3e-7, "kernel {kernel} up to {largest}: {worst:e}");
        }
    }
}

#[test]
fn edges_of_the_range_are_ggmls() {
    let mut bench = Bench::new();
    let inputs = [f32::NEG_INFINITY, -1e4, -100.0, 0.0, 100.0, f32::INFINITY];
    let inf = f32::INFINITY;
    for (kernel, want) in [
        (KERNEL_EXP, [0.0, 0.0, 0.0, 1.0, inf, inf]),
        (KERNEL_SIGMOID, [0.0, 0.0, 0.0, 0.5, 1.0, 1.0]),
        (KERNEL_TANH, [-1.0, -1.0, -1.0, 0.0, 1.0, 1.0]),
        (KERNEL_RELU, [0.0, 0.0, 0.0, 0.0, 100.0, inf]),
        (KERNEL_EXPM1, [-1.0, -1.0, -1.0, 0.0, inf, inf]),
        (KERNEL_ELU, [-1.0, -1.0, -1.0, 0.0, 100.0, inf]),
        (
            KERNEL_SOFTPLUS,
            [0.0, 0.0, 0.0, std::f32::consts::LN_2, 100.0, inf],
        ),
        (KERNEL_SGN, [-1.0, -1.0, -1.0, 0.0, 1.0, 1.0]),
        (KERNEL_STEP, [0.0, 0.0, 0.0, 0.0, 1.0, 1.0]),
        (KERNEL_FLOOR, [-inf, -1e4, -100.0, 0.0, 100.0, inf]),
        (KERNEL_ROUND, [-inf, -1e4, -100.0, 0.0, 100.0, inf]),
    ] {
        let mut next = inputs.iter();
        let src = Case::of(F, [6, 1, 1, 1], DENSE, || *next.next().unwrap());
        let dst = Case::zeros(F, [6, 1, 1, 1], DENSE);
        let have = bench.run((kernel, [0; 16]), &dst, &[src], false);
        for (have, want) in have.iter().zip(want) {
            let close = *have == want || (have - want).abs() < 1e-6;
            assert!(close, "kernel {kernel}: {have} for {want}");
        }
    }
}

/// Vector units' maxima and comparisons lose NaN.
#[test]
fn functions_of_nan_are_those_of_the_cpu() {
    let mut bench = Bench::new();
    for (kernel, params, ..) in unary() {
        // As in ggml, where comparisons with NaN are false.
        let want = match kernel {
            KERNEL_RELU | KERNEL_LEAKY_RELU | KERNEL_STEP | KERNEL_SGN | KERNEL_HARDSIGMOID => 0.0,
            // NaN becomes one of the limits.
            KERNEL_CLAMP => continue,
            _ => f32::NAN,
        };
        for n in [3, 40, 64] {
            for nan in [f32::NAN, -f32::NAN] {
                let mut index = 0;
                let src = Case::of(F, [n, 1, 1, 1], DENSE, || {
                    index += 1;
                    if index % 3 == 2 { nan } else { 0.25 }
                });
                let dst = Case::zeros(F, src.ne, DENSE);
                let have = bench.run((kernel, params), &dst, &[src], false);
                for (i, have) in have.iter().enumerate() {
                    let what = format!("kernel {kernel}, {n} elements of {nan}: {i} is {have}");
                    if i % 3 != 1 {
                        assert!(have.is_finite(), "{what}");
                    } else if want.is_nan() {
                        assert!(have.is_nan(), "{what}");
                    } else {
                        assert_eq!(*have, want, "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn gated_units_of_nan_are_nan() {
    let mut bench = Bench::new();
    for kernel in [
        KERNEL_SWIGLU,
        KERNEL_GEGLU,
        KERNEL_GEGLU_ERF,
        KERNEL_GEGLU_QUICK,
        KERNEL_SWIGLU_OAI,
        KERNEL_SWIGLU_CLAMP,
    ] {
        for n in [3, 40, 300] {
            for which in 0..2 {
                let mut index = 0;
                let with_nan = Case::of(F, [n, 1, 1, 1], DENSE, || {
                    index += 1;
                    if index % 3 == 2 { f32::NAN } else { 0.25 }
                });
                let other = Case::of(F, [n, 1, 1, 1], DENSE, || 0.5);
                let dst = Case::zeros(F, other.ne, DENSE);
                let src = if which == 0 {
                    [with_nan, other]
                } else {
                    [other, with_nan]
                };
                let params = floats(&[0.0, 0.0, 1.25, 2.5]);
                let have = bench.run((kernel, params), &dst, &src, false);
                for (i, have) in have.iter().enumerate() {
                    assert_eq!(
                        have.is_nan(),
                        i % 3 == 1,
                        "kernel {kernel}, {n}, source {which}: {i} is {have}"
                    );
                }
            }
        }
    }
}

#[test]
fn logarithms_have_limits_and_no_values_below_zero() {
    let mut bench = Bench::new();
    let mut next = [0.0, 1.0, f32::INFINITY, -1.0].into_iter();
    let src = Case::of(F, [4, 1, 1, 1], DENSE, || next.next().unwrap());
    let dst = Case::zeros(F, [4, 1, 1, 1], DENSE);
    let have = bench.run((KERNEL_LOG, [0; 16]), &dst, &[src], false);
    assert_eq!(have[..3], [f32::NEG_INFINITY, 0.0, f32::INFINITY]);
    assert!(have[3].is_nan());
}

/// Every half and its neighbours, and numbers so large that all are whole.
#[test]
fn roundings_are_those_of_the_standard_library() {
    let mut bench = Bench::new();
    let mut inputs: Vec<f32> = (-40..=40).map(|i| i as f32 * 0.25).collect();
    inputs.extend(
        inputs
            .clone()
            .iter()
            .flat_map(|x| [x.next_up(), x.next_down()]),
    );
    for power in [20, 21, 22, 23, 24, 30] {
        let x = f32::powi(2.0, power);
        inputs.extend([x + 0.5, x - 0.5, -x - 0.5, x.next_down(), x.next_up(), -x]);
    }
    let n = inputs.len();
    for (kernel, f) in [
        (KERNEL_FLOOR, f32::floor as fn(f32) -> f32),
        (KERNEL_CEIL, f32::ceil),
        (KERNEL_ROUND, f32::round),
        (KERNEL_TRUNC, f32::trunc),
    ] {
        let mut next = inputs.iter();
        let src = Case::of(F, [n, 1, 1, 1], DENSE, || *next.next().unwrap());
        let dst = Case::zeros(F, [n, 1, 1, 1], DENSE);
        let have = bench.run((kernel, [0; 16]), &dst, &[src], false);
        for (x, have) in inputs.iter().zip(have) {
            assert_eq!(have, f(*x), "kernel {kernel} of {x}");
        }
    }
}

#[test]
fn sums_and_products_repeat_the_second_source() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    type Pair = fn(f64, f64) -> f64;
    let functions: [(u32, Pair); 4] = [
        (KERNEL_ADD, |a, b| a + b),
        (KERNEL_SUB, |a, b| a - b),
        (KERNEL_MUL, |a, b| a * b),
        (KERNEL_DIV, |a, b| a / b),
    ];
    for (kernel, f) in functions {
        for (ne, repeats) in [
            ([33, 3, 1, 1], [1, 1, 1, 1]),
            ([576, 4, 2, 1], [1, 4, 2, 1]),
            ([30, 4, 2, 2], [30, 2, 1, 2]),
            ([36, 4, 2, 2], [3, 1, 2, 1]),
            ([300, 2, 1, 1], [1, 1, 1, 1]),
            // Rows that need no set-up for each row (an element or a row as the second operand),
            // and long operands.
            ([40, 6, 2, 1], [40, 1, 1, 1]),
            ([128, 19, 1, 1], [1, 19, 1, 1]),
            ([2100, 5, 1, 1], [1, 1, 1, 1]),
            // A head's rows: by an element of each, and planes that are repeated as a whole.
            ([64, 37, 2, 1], [64, 1, 2, 1]),
            ([64, 6, 5, 2], [1, 1, 5, 2]),
        ] {
            for (dtype, dtype_b, place) in [
                (F, F, DENSE),
                (F, F, GAPS),
                (F, F, PERMUTED),
                (H, H, GAPS),
                (B, F, DENSE),
                (H, F, TRANSPOSED),
                (F, H, PERMUTED),
            ] {
                let ne_b = [0, 1, 2, 3].map(|i| ne[i] / repeats[i]);
                let a = Case::random(dtype, ne, place, 4.0, &mut numbers);
                let b = Case::of(dtype_b, ne_b, place, || numbers.float() + 2.0);
                let values: Vec<_> = indices(ne).map(|at| f(a.value(at), b.value(at))).collect();
                let src = [a, b];
                let op = (kernel, [0; 16]);
                let mut dst = Case::zeros(dtype, ne, DENSE);
                dst.values = values.clone();
                bench.check(op, &dst, &src, false, limit(dtype));
                dst = Case::zeros(dtype, ne, GAPS);
                dst.values = values;
                bench.check(op, &dst, &src, false, limit(dtype));
                if place.order[0] == 0 {
                    bench.check(op, &dst, &src, true, limit(dtype));
                }
            }
        }
    }
}

#[test]
fn quotients_keep_signs_zeros_and_infinities() {
    let mut bench = Bench::new();
    let inf = f32::INFINITY;
    let a = [
        1.0,
        -1.0,
        1.0,
        -1.0,
        3.0,
        5.0,
        1e30,
        1e-30,
        inf,
        -inf,
        0.0,
        -0.0,
        1e30,
        inf,
        0.0,
        f32::NAN,
        1.0,
    ];
    let b = [
        0.0,
        0.0,
        -0.0,
        inf,
        -2.0,
        1e-37,
        1e30,
        1e-30,
        2.0,
        0.5,
        -2.0,
        2.0,
        -1e-30,
        inf,
        0.0,
        1.0,
        f32::NAN,
    ];
    let ne = [a.len(), 1, 1, 1];
    let case = |values: [f32; 17]| {
        let mut next = values.into_iter();
        Case::of(F, ne, DENSE, || next.next().unwrap())
    };
    let dst = Case::zeros(F, ne, DENSE);
    let have = bench.run((KERNEL_DIV, [0; 16]), &dst, &[case(a), case(b)], false);
    for ((a, b), have) in a.iter().zip(b).zip(have) {
        let want = a / b;
        let same = have.to_bits() == want.to_bits() || have.is_nan() && want.is_nan();
        assert!(same, "{a} / {b} is {want}, have {have}");
    }
}

#[test]
fn quotients_of_multiples_are_whole() {
    let mut bench = Bench::new();
    let n = 4096;
    for divisor in [
        1.0_f32, 2.0, 4.0, 8.0, 1024.0, 0.125, 3.0, 7.0, 10.0, 129.0, 4095.0,
    ] {
        let mut whole = 0.0;
        let a = Case::of(F, [n, 1, 1, 1], DENSE, || {
            whole += 1.0;
            whole * divisor
        });
        let b = Case::of(F, [1, 1, 1, 1], DENSE, || divisor);
        let dst = Case::zeros(F, [n, 1, 1, 1], DENSE);
        let have = bench.run((KERNEL_DIV, [0; 16]), &dst, &[a, b], false);
        let wrong = (1..).zip(&have).filter(|(i, have)| **have != *i as f32);
        assert_eq!(wrong.count(), 0, "by {divisor}");
    }
}

/// Quotients of any numbers are the nearest f32.
#[test]
fn quotients_are_rounded_once() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    let ne = [4096, 1, 1, 1];
    for scale in [1.0, 1e-15, 1e15] {
        let a = Case::random(F, ne, DENSE, scale, &mut numbers);
        let b = Case::of(F, ne, DENSE, || (numbers.float() + 1.1) * scale);
        let dst = Case::zeros(F, ne, DENSE);
        let [x, y] = [&a, &b].map(|case| case.values.clone());
        let have = bench.run((KERNEL_DIV, [0; 16]), &dst, &[a, b], false);
        for ((x, y), have) in x.iter().zip(y).zip(have) {
            #[expect(
                clippy::cast_possible_truncation,
                reason = "rounded, as f32 quotients are"
            )]
            let want = (x / y) as f32;
            assert_eq!(have, want, "{x} / {y}");
        }
    }
}

#[test]
fn gated_units_take_two_sources_or_the_halves_of_one() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    type Gate = fn(f64, f64) -> f64;
    let functions: [(u32, Gate); 7] = [
        (KERNEL_SWIGLU, |a, b| a * sigmoid(a) * b),
        (KERNEL_GEGLU, |a, b| gelu(a) * b),
        (KERNEL_REGLU, |a, b| a.max(0.0) * b),
        (KERNEL_GEGLU_ERF, |a, b| {
            0.5 * a * (1.0 + erf(a / std::f64::consts::SQRT_2)) * b
        }),
        (KERNEL_GEGLU_QUICK, |a, b| a * sigmoid(1.702 * a) * b),
        (KERNEL_SWIGLU_OAI, |a, b| {
            let a = a.min(2.5);
            a * sigmoid(1.25 * a) * (b.clamp(-2.5, 2.5) + 1.0)
        }),
        (KERNEL_SWIGLU_CLAMP, |a, b| {
            let a = a.min(2.5);
            a * sigmoid(a) * b.clamp(-2.5, 2.5)
        }),
    ];
    let gate_params = floats(&[0.0, 0.0, 1.25, 2.5]);
    for (kernel, f) in functions {
        for ne in [[5, 7, 1, 1], [300, 2, 3, 2], [1536, 1, 1, 1]] {
            for (dtype, place) in [(F, DENSE), (F, GAPS), (H, DENSE), (B, GAPS)] {
                let mut dst = Case::zeros(dtype, ne, DENSE);
                let a = Case::random(dtype, ne, place, 6.0, &mut numbers);
                let b = Case::random(dtype, ne, place, 6.0, &mut numbers);
                dst.values = a
                    .values
                    .iter()
                    .zip(&b.values)
                    .map(|(a, b)| f(*a, *b))
                    .collect();
                let src = [a, b];
                bench.check(
                    (kernel, gate_params),
                    &dst,
                    &src,
                    false,
                    limit_of(kernel, dtype),
                );
                bench.check(
                    (kernel, gate_params),
                    &dst,
                    &src,
                    true,
                    limit_of(kernel, dtype),
                );
                // An odd row has a last element that no pair includes.
                for (swapped, left_out) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
                    let wide = [2 * ne[0] + left_out, ne[1], ne[2], ne[3]];
                    let both = Case::random(dtype, wide, place, 6.0, &mut numbers);
                    let mut params = gate_params;
                    params[1] = swapped;
                    let [first, second] = if swapped == 1 { [ne[0], 0] } else { [0, ne[0]] };
                    let half = |at: [usize; 4], shift: usize| {
                        both.value([at[0] + shift, at[1], at[2], at[3]])
                    };
                    dst.values = indices(ne)
                        .map(|at| f(half(at, first), half(at, second)))
                        .collect();
                    let src = std::slice::from_ref(&both);
                    bench.check((kernel, params), &dst, src, false, limit_of(kernel, dtype));
                }
            }
        }
    }
}
