//! Epilogues of a product against ggml's definitions in f64.

use hexagon_ops::layout::WeightType;
use hexagon_ops::serve;
use hexagon_ops::wire::{self, Command, Epilogue, MatMul, RowsF32};

use crate::common::Numbers;
use crate::driver::Host;
use crate::matmul::load_weights;

fn number(value: usize) -> u32 {
    u32::try_from(value).unwrap()
}

/// Rows of f32 from byte `offset` on, `stride` elements apart.
fn rows(buffer: u32, offset: usize, stride: usize) -> RowsF32 {
    RowsF32 {
        buffer,
        reserved: 0,
        offset: offset as u64,
        strides: [4 * stride as u64, 0, 0],
    }
}

/// Computes ggml's definitions: `f(product, other)`.
///
/// SOURCE: ggml-cpu/vec.h, `ggml_vec_silu_f32`, `_gelu_f32`, `_gelu_erf_f32`, `_gelu_quick_f32`,
/// `_relu_f32`; the error function is the series of Abramowitz and Stegun 7.1.5.
fn definition(kernel: u32, x: f64, y: f64) -> f64 {
    use std::f64::consts::{FRAC_1_SQRT_2, PI};
    let erf = |x: f64| {
        let mut term = x;
        let mut sum = x;
        for n in 1..200 {
            let n = f64::from(n);
            term *= -x * x / n;
            sum += term / (2.0 * n + 1.0);
        }
        sum * 2.0 / PI.sqrt()
    };
    match kernel {
        wire::KERNEL_ADD => x + y,
        wire::KERNEL_SWIGLU => x / (1.0 + (-x).exp()) * y,
        wire::KERNEL_GEGLU => {
            let inner = (2.0 / PI).sqrt() * x * (1.0 + 0.044_715 * x * x);
            0.5 * x * (1.0 + inner.tanh()) * y
        }
        wire::KERNEL_REGLU => x.max(0.0) * y,
        wire::KERNEL_GEGLU_ERF => 0.5 * x * (1.0 + erf(x * FRAC_1_SQRT_2)) * y,
        wire::KERNEL_GEGLU_QUICK => x / (1.0 + (-1.702 * x).exp()) * y,
        _ => unreachable!("no epilogue"),
    }
}

const KERNELS: [u32; 6] = [
    wire::KERNEL_ADD,
    wire::KERNEL_SWIGLU,
    wire::KERNEL_GEGLU,
    wire::KERNEL_REGLU,
    wire::KERNEL_GEGLU_ERF,
    wire::KERNEL_GEGLU_QUICK,
];

/// Place of the second operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Other {
    Apart,
    InPlace,
    OneRow,
}

/// The command of a test.
#[derive(Clone, Copy, Debug)]
struct Case {
    weight: WeightType,
    kernel: u32,
    swapped: bool,
    other: Other,
    m: usize,
    n: usize,
}

/// Computes a product with and without an epilogue, and compares.
fn check(case: Case, numbers: &mut Numbers) {
    let Case {
        weight,
        kernel,
        swapped,
        other,
        m,
        n,
    } = case;
    let mut host = Host::new();
    let k = 96_usize.next_multiple_of(weight.block_elems());
    let (weights, _) = load_weights(&mut host, weight, (n, k), [1, 1], numbers);
    // Rows whose stride is whole vectors are written together, other rows one by one, so both are
    // tested.
    let stride = if n.is_multiple_of(32) { n + 32 } else { n + 3 };
    let act: Vec<f32> = (0..m * k).map(|_| 4.0 * numbers.float()).collect();
    let side: Vec<f32> = (0..m * stride).map(|_| numbers.float()).collect();
    let [
        (act_at, act_memory),
        (plain_at, plain_memory),
        (dst_at, dst_memory),
        (side_at, side_memory),
    ] = [4 * m * k, 4 * m * stride, 4 * m * stride, 4 * m * stride].map(|bytes| host.buffer(bytes));
    act_memory.put(0, &act);
    side_memory.put(0, &side);
    dst_memory.put(0, &side);
    let product = MatMul {
        weights,
        act: rows(act_at, 0, k),
        dst: rows(plain_at, 0, stride),
        m: number(m),
        planes: [1, 1],
        dots: 2,
        epilogue: bytemuck::Zeroable::zeroed(),
    };
    let combined = MatMul {
        dst: rows(dst_at, 0, stride),
        epilogue: Epilogue {
            kernel,
            swapped: u32::from(swapped),
            other: match other {
                Other::Apart => rows(side_at, 0, stride),
                Other::InPlace => rows(dst_at, 0, stride),
                Other::OneRow => rows(side_at, 0, 0),
            },
        },
        ..product
    };
    let what = format!("{case:?}");
    let completion = host.run(&[Command::new(0, &product), Command::new(0, &combined)]);
    assert_eq!((completion.status, completion.done), (0, 2), "{what}");
    let results: Vec<f32> = plain_memory.get(0, m * stride);
    let have: Vec<f32> = dst_memory.get(0, m * stride);
    for i in 0..m {
        for j in 0..stride {
            let at = i * stride + j;
            let y = side[if other == Other::OneRow { j } else { at }];
            if j >= n {
                assert_eq!(have[at], side[at], "{what}: wrote past row {i}");
                continue;
            }
            let (x, y) = (f64::from(results[at]), f64::from(y));
            let want = if swapped {
                definition(kernel, y, x)
            } else {
                definition(kernel, x, y)
            };
            // The kernels' functions are exact to a few units in the last place, and so is x.
            let error = (f64::from(have[at]) - want).abs();
            let bound = 2e-6 * (x.abs() + 1.0) * (y.abs() + 1.0);
            assert!(error <= bound, "{what}: row {i} column {j}: {error:e}");
        }
    }
}

/// Rows for both code paths and for several tiles and parts of them; columns with and without a
/// partial last strip.
#[test]
fn every_epilogue_gives_what_ggml_defines() {
    let mut numbers = Numbers::default();
    for kernel in KERNELS {
        for other in [Other::Apart, Other::InPlace, Other::OneRow] {
            for (m, n) in [
                (1, 70),
                (1, 192),
                (2, 33),
                (3, 64),
                (40, 70),
                (44, 64),
                (200, 40),
            ] {
                for swapped in [false, true] {
                    let case = Case {
                        weight: WeightType::Q4_0,
                        kernel,
                        swapped,
                        other,
                        m,
                        n,
                    };
                    check(case, &mut numbers);
                }
            }
        }
    }
    for weight in WeightType::ALL {
        for m in [1, 2, 70] {
            let case = Case {
                weight,
                kernel: wire::KERNEL_SWIGLU,
                swapped: true,
                other: Other::Apart,
                m,
                n: 100,
            };
            check(case, &mut numbers);
        }
    }
}

/// A change that makes a command wrong.
type Change = fn(&mut MatMul);

#[test]
fn wrong_epilogues_are_refused() {
    let mut numbers = Numbers::default();
    let mut host = Host::new();
    let (weights, _) = load_weights(&mut host, WeightType::Q8_0, (64, 64), [1, 1], &mut numbers);
    let [(act, _), (dst, memory), (side, _)] = [0; 3].map(|_| host.buffer(8192));
    let good = MatMul {
        weights,
        act: rows(act, 0, 64),
        dst: rows(dst, 256, 64),
        m: 5,
        planes: [1, 1],
        dots: 2,
        epilogue: Epilogue {
            kernel: wire::KERNEL_ADD,
            swapped: 0,
            other: rows(side, 0, 64),
        },
    };
    assert_eq!(host.run(&[Command::new(0, &good)]).status, 0);
    let untouched: Vec<f32> = memory.get(0, 2048);
    let changes: [(u32, &str, Change); 11] = [
        (serve::RESERVED, "swapped", |b| b.epilogue.swapped = 2),
        (serve::RESERVED, "other reserved", |b| {
            b.epilogue.other.reserved = 1;
        }),
        (serve::RESERVED, "no kernel", |b| b.epilogue.kernel = 0),
        (serve::KERNEL_NUMBER, "another kernel", |b| {
            b.epilogue.kernel = wire::KERNEL_SUB;
        }),
        (serve::KERNEL_NUMBER, "unknown", |b| {
            b.epilogue.kernel = u32::MAX
        }),
        (serve::PLANES, "planes", |b| {
            b.planes = [2, 1];
            b.dst.strides[1] = 1280;
        }),
        (serve::UNMAPPED, "buffer", |b| b.epilogue.other.buffer = 99),
        (serve::ALIGNMENT, "offset", |b| b.epilogue.other.offset = 2),
        (serve::BOUNDS, "end", |b| b.epilogue.other.offset = 7172),
        (serve::BOUNDS, "stride", |b| {
            b.epilogue.other.strides[0] = u64::MAX - 3;
        }),
        (serve::OVERLAP, "a row further", |b| {
            b.epilogue.other = rows(b.dst.buffer, 512, 64);
        }),
    ];
    for (detail, what, change) in changes {
        let mut wrong = good;
        change(&mut wrong);
        let completion = host.run(&[Command::new(0, &wrong)]);
        assert_eq!((completion.detail, completion.done), (detail, 0), "{what}");
    }
    assert_eq!(memory.get::<f32>(0, 2048), untouched);
}

/// A product whose rows need two parts: the rows of the second part must be combined with their
/// rows of the other operand.
#[test]
fn rows_of_the_second_part_meet_their_own_rows() {
    let (k, n, m) = (32, 2, (1 << 16) + 4);
    let mut numbers = Numbers::default();
    let mut host = Host::new();
    let (weights, _) = load_weights(&mut host, WeightType::F16, (n, k), [1, 1], &mut numbers);
    // Products with zeros are zero, so the results must equal the other operand.
    let (act, _) = host.buffer(4 * k);
    let (dst, dst_memory) = host.buffer(4 * m * n);
    let (side, side_memory) = host.buffer(4 * m * (n + 1));
    let values: Vec<f32> = (0..m * (n + 1)).map(|_| numbers.float()).collect();
    side_memory.put(0, &values);
    let body = MatMul {
        weights,
        act: rows(act, 0, 0),
        dst: rows(dst, 0, n),
        m: number(m),
        planes: [1, 1],
        dots: 2,
        epilogue: Epilogue {
            kernel: wire::KERNEL_ADD,
            swapped: 0,
            other: rows(side, 0, n + 1),
        },
    };
    assert_eq!(host.run(&[Command::new(0, &body)]).status, 0);
    let have: Vec<f32> = dst_memory.get(0, m * n);
    for (row, (have, want)) in have.chunks(n).zip(values.chunks(n + 1)).enumerate() {
        assert_eq!(have, &want[..n], "row {row}");
    }
}
