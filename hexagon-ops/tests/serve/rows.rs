//! Norms, sums, softmax and rotations against ggml's definitions in f64.

use hexagon_ops::wire::*;
use test_kit::nmse;

use crate::common::Numbers;
use crate::driver::Host;
use crate::tensor::{Bench, DENSE, GAPS, PERMUTED, Params, Tensor as Case, floats, indices, limit};

const F: u32 = TYPE_F32;
const H: u32 = TYPE_F16;
const SHAPES: [[usize; 4]; 8] = [
    [1, 1, 1, 1],
    [33, 5, 1, 1],
    [576, 3, 2, 1],
    [257, 2, 3, 2],
    [64, 9, 4, 1],
    // The heads of queries and keys: 11 rows are processed several at a time, with a remainder.
    [128, 11, 2, 1],
    [256, 3, 5, 1],
    [96, 17, 1, 1],
];

/// Rows of `n` values changed by `f`.
fn by_row(values: &[f64], n: usize, f: impl Fn(&[f64]) -> Vec<f64>) -> Vec<f64> {
    values.chunks(n).flat_map(f).collect()
}

#[test]
fn norms_divide_rows_by_their_measure() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    type Norm = fn(&[f64], f64) -> Vec<f64>;
    let norms: [(u32, Norm); 3] = [
        (KERNEL_RMS_NORM, |row, eps| {
            let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
            row.iter().map(|x| x / (mean + eps).sqrt()).collect()
        }),
        (KERNEL_NORM, |row, eps| {
            let mean = row.iter().sum::<f64>() / row.len() as f64;
            let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / row.len() as f64;
            row.iter()
                .map(|x| (x - mean) / (variance + eps).sqrt())
                .collect()
        }),
        (KERNEL_L2_NORM, |row, eps| {
            let length = row.iter().map(|x| x * x).sum::<f64>().sqrt();
            row.iter().map(|x| x / length.max(eps)).collect()
        }),
    ];
    let mut others = Numbers::default();
    for (kernel, f) in norms {
        for ne in SHAPES {
            for (dtype, place, eps) in [
                (F, DENSE, 1e-6),
                (F, GAPS, 1e-5),
                (F, PERMUTED, 0.1),
                (H, DENSE, 10.0),
            ] {
                let src = Case::random(dtype, ne, place, 3.0, &mut numbers);
                let mut dst = Case::zeros(dtype, ne, DENSE);
                let eps64 = f64::from(eps);
                dst.values = by_row(&src.values, ne[0], |row| f(row, eps64));
                let op = (kernel, floats(&[eps]));
                bench.check(op, &dst, std::slice::from_ref(&src), false, limit(dtype));
                bench.check(op, &dst, std::slice::from_ref(&src), true, limit(dtype));
                // A factor for each column, an addend for each element, and both.
                let columns = [ne[0], 1, 1, 1];
                let times = Case::random(F, columns, DENSE, 2.0, &mut numbers);
                let each = Case::random(H, ne, PERMUTED, 2.0, &mut numbers);
                // As in models: an addend for each column.
                let column = Case::random(F, columns, DENSE, 2.0, &mut numbers);
                // A residual.
                let rows = Case::random(F, ne, GAPS, 2.0, &mut others);
                let normed = dst.values.clone();
                for (has_times, plus) in [
                    (true, None),
                    (false, Some(&each)),
                    (true, Some(&each)),
                    (false, Some(&column)),
                    (true, Some(&column)),
                    (true, Some(&rows)),
                    (false, Some(&rows)),
                ] {
                    // A single element and its addend may cancel.
                    if ne == [1; 4] && plus.is_some_and(|plus| std::ptr::eq(plus, &rows)) {
                        continue;
                    }
                    dst.values = indices(ne)
                        .zip(&normed)
                        .map(|(at, x)| {
                            let factor = times.value([at[0], 0, 0, 0]);
                            let x = if has_times { x * factor } else { *x };
                            let value = |plus: &Case| {
                                plus.value([0, 1, 2, 3].map(|i| at[i].min(plus.ne[i] - 1)))
                            };
                            x + plus.map_or(0.0, value)
                        })
                        .collect();
                    let part = |part: Option<&Case>| part.cloned().unwrap_or_else(Case::none);
                    let times = has_times.then_some(&times);
                    let operands = [src.clone(), part(times), part(plus)];
                    // A single element's error may be twice the mean of the squares.
                    bench.check(op, &dst, &operands, false, 2.0 * limit(dtype));
                    bench.check(op, &dst, &operands, true, 2.0 * limit(dtype));
                }
            }
        }
    }
}

#[test]
fn rows_are_summed() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for ne in SHAPES {
        for place in [DENSE, GAPS, PERMUTED] {
            // Positive numbers, so that sums do not cancel.
            let src = Case::of(F, ne, place, || numbers.float() + 1.0);
            let mut dst = Case::zeros(F, [1, ne[1], ne[2], ne[3]], DENSE);
            dst.values = by_row(&src.values, ne[0], |row| vec![row.iter().sum()]);
            bench.check((KERNEL_SUM_ROWS, [0; 16]), &dst, &[src], false, limit(F));
        }
    }
}

/// ggml's slope of an attention head.
pub fn slope(head: usize, n_heads: usize, max_bias: f64) -> f64 {
    if max_bias <= 0.0 {
        return 1.0;
    }
    let power = 1 << n_heads.ilog2();
    let base = |bias: f64| 2_f64.powf(-bias / f64::from(power));
    let low = usize::try_from(power).unwrap();
    if head < low {
        base(max_bias).powf((head + 1) as f64)
    } else {
        base(max_bias / 2.0).powf((2 * (head - low) + 1) as f64)
    }
}

#[test]
fn softmax_takes_masks_slopes_and_sinks() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for ne in [
        [1, 1, 1, 1],
        [33, 5, 3, 1],
        [128, 7, 1, 1],
        [300, 4, 6, 2],
        [1024, 1, 9, 1],
    ] {
        for (mask_type, max_bias, has_sinks, scale) in [
            (0, 0.0, false, 1.0),
            (F, 0.0, false, 0.1),
            (H, 8.0, false, 0.5),
            (F, 8.0, true, 1.0),
            (0, 0.0, true, 0.125),
        ] {
            let src = Case::random(
                F,
                ne,
                if ne[1] == 5 { GAPS } else { DENSE },
                10.0,
                &mut numbers,
            );
            let none = Case::none();
            let mask = match mask_type {
                0 => none.clone(),
                dtype => {
                    let mut count = 0;
                    // Masks a third of the positions, but never a whole row.
                    Case::of(dtype, [ne[0], ne[1] + 3, 1, ne[3]], DENSE, || {
                        count += 1;
                        if count % 3 == 2 {
                            f32::NEG_INFINITY
                        } else {
                            numbers.float()
                        }
                    })
                }
            };
            let sinks = if has_sinks {
                Case::random(F, [ne[2], 1, 1, 1], DENSE, 5.0, &mut numbers)
            } else {
                none
            };
            let mut dst = Case::zeros(F, ne, DENSE);
            dst.values = indices([1, ne[1], ne[2], ne[3]])
                .flat_map(|[_, i1, i2, i3]| {
                    let slope = slope(i2, ne[2], f64::from(max_bias));
                    let x: Vec<f64> = (0..ne[0])
                        .map(|i| {
                            let mask = if mask.values.is_empty() {
                                0.0
                            } else {
                                slope * mask.value([i, i1, i2, i3])
                            };
                            src.value([i, i1, i2, i3]) * f64::from(scale) + mask
                        })
                        .collect();
                    let sink = has_sinks.then(|| sinks.value([i2, 0, 0, 0]));
                    let most = x.iter().copied().chain(sink).fold(f64::MIN, f64::max);
                    let exp: Vec<f64> = x.iter().map(|x| (x - most).exp()).collect();
                    let sink = sink.map_or(0.0, |sink| (sink - most).exp());
                    let sum = exp.iter().sum::<f64>() + sink;
                    exp.into_iter().map(move |e| e / sum).collect::<Vec<_>>()
                })
                .collect();
            let op = (KERNEL_SOFT_MAX, floats(&[scale, max_bias]));
            let src = [src, mask, sinks];
            // Arguments up to 20 are rounded with a relative error of 2^-24 before the exponential.
            bench.check(op, &dst, &src, false, 5e-12);
            bench.check(op, &dst, &src, true, 5e-12);
        }
    }
}

/// NaN anywhere in a row, its mask or its sink, at whole vectors and past them.
#[test]
fn softmax_of_a_row_with_nan_is_nan() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for n in [4, 33, 64, 200, 1024] {
        let ne = [n, 3, 2, 1];
        for place in [DENSE, GAPS] {
            for nan in [f32::NAN, -f32::NAN] {
                for at in [0, n / 2, n - 1] {
                    for which in 0..3 {
                        let mut src = [
                            Case::random(F, ne, place, 3.0, &mut numbers),
                            Case::random(F, ne, DENSE, 3.0, &mut numbers),
                            Case::random(F, [2, 1, 1, 1], DENSE, 3.0, &mut numbers),
                        ];
                        // Poisons row 1 of the second plane; a sink concerns all rows of its plane.
                        match which {
                            2 => src[2].poison([1, 0, 0, 0], nan),
                            _ => src[which].poison([at, 1, 1, 0], nan),
                        }
                        let dst = Case::zeros(F, ne, place);
                        let op = (KERNEL_SOFT_MAX, floats(&[0.5]));
                        let have = bench.run(op, &dst, &src, false);
                        for (row, have) in have.chunks(n).enumerate() {
                            let is_nan = row == 4 || which == 2 && row >= 3;
                            let what = format!("row {row} of {n}: {nan} at {at} of {which}");
                            assert!(have.iter().all(|x| x.is_nan() == is_nan), "{what}");
                        }
                    }
                }
            }
        }
    }
}

/// The allocator of ggml reuses a mask that is no longer needed.
#[test]
fn softmax_may_take_the_place_of_its_mask() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    let ne = [300, 5, 2, 1];
    let src = Case::random(F, ne, DENSE, 3.0, &mut numbers);
    let mask = Case::random(F, ne, DENSE, 3.0, &mut numbers);
    let mut dst = Case::zeros(F, ne, DENSE);
    let op = (KERNEL_SOFT_MAX, floats(&[1.0]));
    let src = [src, mask];
    dst.values = bench
        .run(op, &dst, &src, false)
        .into_iter()
        .map(f64::from)
        .collect();
    let mut body = bench.place(op, &dst, &src, false);
    body.dst = body.src[1];
    let completion = bench.host.run(&[Command::new(0, &body)]);
    assert_eq!((completion.status, completion.detail), (0, 0));
    let at = usize::try_from(body.dst.offset).unwrap();
    let have: Vec<f32> = bench.memory.get(at, dst.values.len());
    assert!(nmse(&have, &dst.values) == 0.0);
}

/// A rotation.
#[derive(Clone, Copy)]
struct Rope {
    n_dims: usize,
    mode: u32,
    first: usize,
    base: f32,
    scale: f32,
    ext: f32,
    attn: f32,
    n_ctx: u32,
}

impl Rope {
    fn params(&self) -> Params {
        let mut params = [0; 16];
        params[1] = u32::try_from(self.n_dims).unwrap();
        params[2] = self.mode;
        params[4] = self.n_ctx;
        for (param, size) in params[11..15].iter_mut().zip(self.sections()) {
            *param = u32::try_from(size).unwrap();
        }
        let values = [self.base, self.scale, self.ext, self.attn, 32.0, 1.0];
        for (param, value) in params[5..].iter_mut().zip(values) {
            *param = value.to_bits();
        }
        params[15] = u32::try_from(self.first).unwrap();
        params
    }

    /// Elements of each position's section, for the modes that have them.
    fn sections(&self) -> [usize; 4] {
        let n = self.n_dims;
        [n / 8, 3 * n / 16, 3 * n / 16, n / 32]
    }

    fn n_pairs(&self) -> usize {
        if self.mode == 24 {
            self.n_dims
        } else {
            self.n_dims / 2
        }
    }

    /// The position that determines the angle of pair `j`, and how many times its angle has fallen.
    fn place(&self, j: usize) -> (usize, usize) {
        let sizes = self.sections();
        let sector = j % sizes.iter().sum::<usize>();
        match self.mode {
            8 | 24 => {
                let (mut section, mut start) = (0, 0);
                while sector >= start + sizes[section] {
                    start += sizes[section];
                    section += 1;
                }
                // Vision: angles start again with each section.
                (section, if self.mode == 24 { sector - start } else { j })
            }
            40 if sector < 3 * sizes[sector % 3] => (sector % 3, j),
            40 => (3, j),
            _ => (0, j),
        }
    }

    /// Returns (cosine, sine) of an angle that has decreased `j` times from a position, of pair
    /// `pair`. The angle is a product of f32 numbers, as in ggml.
    fn turn(&self, position: f32, j: usize, pair: usize, factor: f32) -> (f64, f64) {
        let n_dims = self.n_dims as f64;
        // Rounded to f32, as ggml rounds the exponent.
        #[expect(clippy::cast_possible_truncation, reason = "as ggml rounds them")]
        let step = f64::from(self.base).powf(f64::from((-2.0 / n_dims) as f32)) as f32;
        let theta = (0..j).fold(position, |theta, _| theta * step) / factor;
        let (theta, scale) = (f64::from(theta), f64::from(self.scale));
        let (mut angle, mut magnitude) = (theta * scale, f64::from(self.attn));
        if self.ext != 0.0 {
            let dim = |turns: f64| {
                let ratio = (f64::from(self.n_ctx) / (turns * std::f64::consts::TAU)).ln();
                n_dims * ratio / (2.0 * f64::from(self.base).ln())
            };
            let low = dim(32.0).floor().max(0.0);
            let high = dim(1.0).ceil().min(n_dims - 1.0);
            let ramp = ((pair as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
            let mix = (1.0 - ramp) * f64::from(self.ext);
            angle = angle * (1.0 - mix) + theta * mix;
            magnitude *= 1.0 + 0.1 * (1.0 / scale).ln();
        }
        (angle.cos() * magnitude, angle.sin() * magnitude)
    }
}

/// Heads of 64, without YaRN.
const PLAIN: Rope = Rope {
    n_dims: 64,
    mode: 0,
    first: 0,
    base: 10000.0,
    scale: 1.0,
    ext: 0.0,
    attn: 1.0,
    n_ctx: 4096,
};

#[test]
fn rope_turns_pairs_by_their_positions() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    let yarn = Rope {
        scale: 0.25,
        ext: 1.0,
        attn: 1.2,
        ..PLAIN
    };
    for rope in [
        PLAIN,
        Rope {
            n_dims: 34,
            ..PLAIN
        },
        Rope {
            n_dims: 20,
            first: 6,
            base: 1e6,
            ..PLAIN
        },
        yarn,
        Rope { ext: 0.5, ..yarn },
        // As in ggml's tests, which set no original context length.
        Rope {
            scale: 1.4,
            n_ctx: 0,
            ..yarn
        },
    ] {
        for (kernel, mode) in [
            (KERNEL_ROPE, 0),
            (KERNEL_ROPE, 2),
            (KERNEL_ROPE, 8),
            (KERNEL_ROPE, 24),
            (KERNEL_ROPE, 40),
            (KERNEL_ROPE_BACK, 2),
        ] {
            for (ne, place, dtype, has_factors) in [
                ([64, 3, 2, 1], DENSE, F, false),
                ([64, 9, 5, 2], GAPS, F, true),
                ([80, 4, 7, 1], PERMUTED, F, false),
                ([96, 5, 3, 1], GAPS, F, false),
                ([64, 2, 3, 1], DENSE, H, true),
            ] {
                let mut rope = Rope { mode, ..rope };
                if mode == 24 {
                    (rope.n_dims, rope.first) = (ne[0] / 2, 0);
                }
                let src = Case::random(dtype, ne, place, 2.0, &mut numbers);
                let mut next = 0.0;
                let positions = Case::of(TYPE_I32, [4 * ne[2], 1, 1, 1], DENSE, || {
                    next += 1.0 + 700.0 * (numbers.float() + 1.0).floor();
                    next
                });
                let half = rope.n_pairs();
                let factors = if has_factors {
                    Case::of(F, [half, 1, 1, 1], DENSE, || numbers.float() + 2.0)
                } else {
                    Case::none()
                };
                let mut dst = Case::zeros(dtype, ne, DENSE);
                dst.values = indices(ne)
                    .map(|[i, i1, i2, i3]| {
                        let x = |i: usize| src.value([i, i1, i2, i3]);
                        if i < rope.first || i >= rope.first + 2 * half {
                            return x(i);
                        }
                        let k = i - rope.first;
                        let (j, partner, second) = if mode == 0 {
                            (k / 2, (k ^ 1) + rope.first, k % 2 == 1)
                        } else {
                            (k % half, (k + half) % (2 * half) + rope.first, k >= half)
                        };
                        let (section, falls) = rope.place(j);
                        #[expect(clippy::cast_possible_truncation, reason = "they are f32")]
                        let (position, factor) = (
                            positions.value([i2 + section * ne[2], 0, 0, 0]) as f32,
                            if has_factors {
                                factors.value([j, 0, 0, 0]) as f32
                            } else {
                                1.0
                            },
                        );
                        let (c, s) = rope.turn(position, falls, j, factor);
                        let s = if kernel == KERNEL_ROPE { s } else { -s };
                        let other = x(partner);
                        if second {
                            other * s + x(i) * c
                        } else {
                            x(i) * c - other * s
                        }
                    })
                    .collect();
                let op = (kernel, rope.params());
                let src = [src, positions, factors];
                // YaRN mixes angles of up to 5000 in f32; the error is 2^-24 of them, squared.
                let limit = if rope.ext == 0.0 && rope.scale == 1.0 {
                    limit(dtype)
                } else {
                    1.3e-7
                };
                bench.check(op, &dst, &src, false, limit);
                bench.check(op, &dst, &src, true, limit);
            }
        }
    }
}

/// llama.cpp makes this request to find a place for a model's frequency factors, before it knows
/// the rotation.
#[test]
fn a_rotation_of_no_dimensions_copies_its_rows() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    let ne = [64, 2, 3, 1];
    let src = Case::random(F, ne, GAPS, 2.0, &mut numbers);
    let positions = Case::of(TYPE_I32, [ne[2], 1, 1, 1], DENSE, || 7.0);
    let factors = Case::of(F, [32, 1, 1, 1], DENSE, || numbers.float() + 2.0);
    let mut dst = Case::zeros(F, ne, DENSE);
    dst.values = indices(ne).map(|at| src.value(at)).collect();
    let op = (KERNEL_ROPE, [0; 16]);
    bench.check(op, &dst, &[src, positions, factors], false, 0.0);
}

/// A tensor without gaps.
fn dense(buffer: u32, dtype: u32, step: u64, ne: [u32; 4]) -> Tensor {
    let [n0, n1, n2, _] = ne.map(u64::from);
    Tensor {
        buffer,
        dtype,
        offset: 0,
        ne,
        nb: [step, n0 * step, n0 * n1 * step, n0 * n1 * n2 * step],
    }
}

#[test]
fn turned_rows_go_where_rows_that_are_set_go() {
    const HEAD: u32 = 64;
    const HEADS: u32 = 3;
    const TOKENS: u32 = 5;
    const CELLS: u32 = 11;
    let row = HEAD * HEADS;
    let mut numbers = Numbers::default();
    for (dtype, step) in [(TYPE_F32, 4), (TYPE_F16, 2), (TYPE_BF16, 2)] {
        for mode in [0, 2, 8] {
            let mut host = Host::new();
            let bytes = |elems: u32, step: u64| usize::try_from(u64::from(elems) * step).unwrap();
            let (x, x_memory) = host.buffer(bytes(row * TOKENS, 4));
            let (turned, _) = host.buffer(bytes(row * TOKENS, 4));
            let (positions, positions_memory) = host.buffer(4 * 4 * TOKENS as usize);
            let (cells, cells_memory) = host.buffer(8 * TOKENS as usize);
            let caches = [0, 1].map(|_| host.buffer(bytes(row * CELLS, step)));
            let values: Vec<f32> = (0..row * TOKENS).map(|_| numbers.float()).collect();
            x_memory.put(0, &values);
            positions_memory.put(
                0,
                &[
                    7, 8, 9, 4000, 0, 1, 1, 1, 1, 1, 2, 3, 4, 5, 6, 0, 0, 0, 0, 0,
                ],
            );
            // Cell 3 is named twice: the later row is stored.
            cells_memory.put(0, &[3_i64, 10, 0, 3, 7]);
            let mut op = TensorOp {
                kernel: KERNEL_ROPE,
                dst: dense(turned, TYPE_F32, 4, [HEAD, HEADS, TOKENS, 1]),
                ..bytemuck::Zeroable::zeroed()
            };
            op.params = Rope { mode, ..PLAIN }.params();
            op.src[0] = dense(x, TYPE_F32, 4, [HEAD, HEADS, TOKENS, 1]);
            op.src[1] = dense(positions, TYPE_I32, 4, [4 * TOKENS, 1, 1, 1]);
            let numbers = dense(cells, TYPE_I64, 8, [TOKENS, 1, 1, 1]);
            let mut set = TensorOp {
                kernel: KERNEL_SET_ROWS,
                dst: dense(caches[0].0, dtype, step, [row, CELLS, 1, 1]),
                ..bytemuck::Zeroable::zeroed()
            };
            set.src[0] = dense(turned, TYPE_F32, 4, [row, TOKENS, 1, 1]);
            set.src[1] = numbers;
            let mut both = op;
            both.kernel = KERNEL_ROPE_SET_ROWS;
            both.dst = dense(caches[1].0, dtype, step, [HEAD, HEADS, CELLS, 1]);
            both.src[2] = numbers;
            for (_, memory) in caches {
                memory.put(0, &vec![0x3c_u8; bytes(row * CELLS, step)]);
            }
            let commands = [
                Command::new(0, &op),
                Command::new(0, &set),
                Command::new(0, &both),
            ];
            let completion = host.run(&commands);
            assert_eq!(
                (completion.status, completion.done),
                (STATUS_OK, 3),
                "mode {mode}"
            );
            let [apart, together] =
                caches.map(|(_, memory)| memory.get::<u8>(0, bytes(row * CELLS, step)));
            assert!(apart == together, "type {dtype}, mode {mode}");
            let cell = bytes(row, step);
            assert!(
                apart[cell..2 * cell].iter().all(|byte| *byte == 0x3c),
                "not named"
            );
            assert!(apart[3 * cell..4 * cell].iter().any(|byte| *byte != 0x3c));
            // First a cell that does not exist, then too few numbers.
            cells_memory.put(32, &[i64::from(CELLS)]);
            let refused = host.run(&[Command::new(0, &both)]);
            assert_eq!(refused.detail, hexagon_ops::serve::ROW);
            both.src[2].ne[0] -= 1;
            let refused = host.run(&[Command::new(0, &both)]);
            assert_eq!(refused.detail, hexagon_ops::serve::OPERAND);
            assert!(together == caches[1].1.get::<u8>(0, bytes(row * CELLS, step)));
        }
    }
}
