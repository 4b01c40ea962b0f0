//! Recurrences over tokens against ggml's loops in f64.

use hexagon_ops::serve;
use hexagon_ops::wire::*;

use crate::common::Numbers;
use crate::tensor::{Bench, DENSE, GAPS, PERMUTED, Params, Tensor as Case};

const F: u32 = TYPE_F32;
/// States are rounded a few times for each token; the error is squared.
const LIMIT: f64 = 1e-11;

fn params(word: u32) -> Params {
    let mut params = [0; 16];
    params[0] = word;
    params
}

fn case(ne: [usize; 4], scale: f32, numbers: &mut Numbers) -> Case {
    Case::random(F, ne, DENSE, scale, numbers)
}

/// Numbers between 0.5 and 1, which keep a state finite.
fn decays(ne: [usize; 4], numbers: &mut Numbers) -> Case {
    Case::of(F, ne, DENSE, || 0.75 + 0.25 * numbers.float())
}

/// Parts for which ggml defines no value: states of earlier tokens, if there are more tokens than
/// states are kept.
const UNDEFINED: f64 = f64::INFINITY;

/// Runs a kernel and compares; elements that nothing writes are NaN in `want`.
fn check(bench: &mut Bench, op: (u32, Params), ne: [usize; 4], want: &[f64], src: &[Case]) {
    let dst = Case::zeros(F, ne, DENSE);
    let body = bench.place_wide(op, &dst, src);
    let have = bench.run_command(&Command::new(0, &body), &dst, body.dst.offset);
    let untouched = bench.untouched(&dst);
    let (mut error, mut power) = (0.0, 0.0);
    for (i, (have, want)) in have.iter().zip(want).enumerate() {
        if want.is_nan() {
            assert_eq!(have.to_bits(), untouched[i].to_bits(), "element {i}");
            continue;
        }
        if *want == UNDEFINED {
            continue;
        }
        error += (f64::from(*have) - want).powi(2);
        power += want * want;
    }
    assert_eq!(have.len(), want.len());
    assert!(
        error <= LIMIT * power,
        "kernel {}: {:e} of {ne:?}",
        op.0,
        error / power
    );
}

#[test]
fn a_state_space_scans_heads_groups_and_chosen_states() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    // Columns, rows, heads, groups, tokens, sequences, whether a head has one decay, states
    // returned.
    for (n, dim, heads, groups, tokens, sequences, scalar, kept) in [
        (128, 64, 4, 2, 3, 2, true, 1),
        (96, 40, 3, 1, 2, 1, true, 1),
        (16, 1, 70, 1, 5, 2, false, 1),
        (16, 5, 12, 2, 3, 1, false, 1),
        (20, 33, 3, 3, 4, 2, true, 3),
        (32, 8, 2, 1, 2, 2, true, 4),
        (16, 4, 2, 1, 1, 1, false, 1),
        (16, 40, 3, 1, 3, 1, false, 1),
        (64, 32, 2, 1, 3, 2, true, 2),
    ] {
        let s = case([n, dim, heads, sequences + 2], 1.0, &mut numbers);
        let x = Case::random(F, [dim, heads, tokens, sequences], GAPS, 1.0, &mut numbers);
        let dt = case([heads, tokens, sequences, 1], 2.0, &mut numbers);
        let a = Case::of(F, [if scalar { 1 } else { n }, heads, 1, 1], DENSE, || {
            -0.6 - 0.5 * numbers.float()
        });
        let b = Case::random(F, [n, groups, tokens, sequences], GAPS, 1.0, &mut numbers);
        let c = Case::random(F, [n, groups, tokens, sequences], DENSE, 1.0, &mut numbers);
        let mut next = 0.0;
        let ids = Case::of(TYPE_I32, [sequences, 1, 1, 1], DENSE, || {
            next += 1.0;
            next
        });
        let outputs = dim * heads * tokens * sequences;
        let plane = n * dim * heads;
        let mut want = vec![f64::NAN; outputs + plane * sequences * kept];
        for i3 in 0..sequences {
            let mut state: Vec<f64> = s.values[(i3 + 1) * plane..][..plane].to_vec();
            for t in 0..tokens {
                for h in 0..heads {
                    let g = h / (heads / groups);
                    let time = dt.value([h, t, i3, 0]).exp().ln_1p();
                    for r in 0..dim {
                        let mut y = 0.0;
                        for i in 0..n {
                            let m = &mut state[(h * dim + r) * n + i];
                            *m = *m * (time * a.value([i, h, 0, 0])).exp()
                                + b.value([i, g, t, i3]) * x.value([r, h, t, i3]) * time;
                            y += *m * c.value([i, g, t, i3]);
                        }
                        want[((i3 * tokens + t) * heads + h) * dim + r] = y;
                    }
                }
                let age = tokens - 1 - t;
                if age < kept {
                    let at = outputs + (age * sequences + i3) * plane;
                    want[at..at + plane].copy_from_slice(&state);
                }
            }
        }
        let src = [s, x, dt, a, b, c, ids];
        let op = (KERNEL_SSM_SCAN, params(u32::try_from(kept).unwrap()));
        check(&mut bench, op, [want.len(), 1, 1, 1], &want, &src);
    }
}

#[test]
fn a_delta_rule_corrects_what_a_key_reads() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    // Size, heads, heads of queries and of keys, tokens, sequences, a gate for each column, kept.
    for (n, heads, hq, hk, tokens, sequences, wide, kept) in [
        (128, 3, 3, 3, 2, 1, false, 1),
        (64, 4, 2, 1, 3, 2, true, 1),
        (16, 5, 5, 5, 4, 2, false, 3),
        (16, 5, 5, 5, 3, 2, false, 3),
        (33, 2, 1, 2, 2, 1, true, 4),
        (1, 3, 3, 1, 2, 1, false, 1),
        (128, 2, 1, 2, 1, 1, false, 1),
        (64, 2, 2, 2, 1, 2, true, 2),
        (64, 3, 1, 1, 9, 2, false, 3),
        (128, 1, 1, 1, 70, 1, false, 1),
        (64, 3, 3, 1, 130, 2, false, 1),
        (128, 2, 1, 2, 64, 1, false, 1),
        (64, 2, 2, 2, 12, 2, false, 1),
    ] {
        let unit = 1.0 / (n as f32).sqrt();
        let q = Case::random(F, [n, hq, tokens, sequences], PERMUTED, 1.0, &mut numbers);
        let k = case([n, hk, tokens, 1], unit, &mut numbers);
        let v = Case::random(F, [n, heads, tokens, sequences], GAPS, 1.0, &mut numbers);
        let g = Case::of(
            F,
            [if wide { n } else { 1 }, heads, tokens, sequences],
            DENSE,
            || -0.6 - 0.5 * numbers.float(),
        );
        let beta = decays([1, heads, tokens, sequences], &mut numbers);
        let state = case([n, n, heads, sequences], 1.0, &mut numbers);
        let outputs = n * heads * tokens * sequences;
        let plane = n * n * heads;
        let mut want = vec![f64::NAN; outputs + plane * sequences * kept];
        for i3 in 0..sequences {
            for h in 0..heads {
                let mut m: Vec<f64> = state.values[(i3 * heads + h) * n * n..][..n * n].to_vec();
                for t in 0..tokens {
                    for j in 0..n {
                        let row = &mut m[j * n..][..n];
                        let mut read = 0.0;
                        for (i, m) in row.iter_mut().enumerate() {
                            *m *= g.value([i, h, t, i3]).exp();
                            read += *m * k.value([i, h, t, 0]);
                        }
                        let delta = (v.value([j, h, t, i3]) - read) * beta.value([0, h, t, i3]);
                        let mut y = 0.0;
                        for (i, m) in row.iter_mut().enumerate() {
                            *m += k.value([i, h, t, 0]) * delta;
                            y += *m * q.value([i, h, t, i3]);
                        }
                        want[((i3 * tokens + t) * heads + h) * n + j] = y / (n as f64).sqrt();
                    }
                    let age = tokens - 1 - t;
                    if age < kept {
                        let at = outputs + ((age * sequences + i3) * heads + h) * n * n;
                        let slot = &mut want[at..at + n * n];
                        if age > 0 && tokens > kept {
                            slot.fill(UNDEFINED);
                        } else {
                            slot.copy_from_slice(&m);
                        }
                    }
                }
            }
        }
        let src = [q, k, v, g, beta, state];
        let op = (KERNEL_GATED_DELTA_NET, params(u32::try_from(kept).unwrap()));
        let rows = tokens * sequences + kept * n * sequences;
        check(&mut bench, op, [n * heads, rows, 1, 1], &want, &src);
    }
}

/// The work of a token on the state of a head: (state, head, token) to outputs.
type Step<'a> = &'a dyn Fn(&mut [f64], usize, usize, &mut [f64]);

/// Returns outputs of all tokens, then the states.
fn linear([n, heads, tokens, sequences]: [usize; 4], state: &Case, step: Step<'_>) -> Vec<f64> {
    let (outputs, plane) = (n * heads * tokens * sequences, n * n);
    let mut want = vec![0.0; outputs];
    want.extend_from_slice(&state.values);
    for token in 0..tokens * sequences {
        for h in 0..heads {
            let (out, states) = want.split_at_mut(outputs);
            let state = &mut states[(token / tokens * heads + h) * plane..][..plane];
            step(state, h, token, &mut out[(token * heads + h) * n..][..n]);
        }
    }
    want
}

#[test]
fn gated_attention_and_rwkv_keep_a_state_for_each_head() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for [n, heads, tokens, sequences] in
        [[64, 3, 1, 1], [64, 2, 3, 2], [128, 3, 2, 2], [20, 5, 2, 1]]
    {
        let ne = [n, heads, tokens * sequences, 1];
        let unit = 1.0 / (n as f32).sqrt();
        let [k, v, q, b] = [unit, 1.0, 1.0, unit].map(|scale| case(ne, scale, &mut numbers));
        let a = case(ne, unit, &mut numbers);
        let first = case([n, heads, 1, 1], 1.0, &mut numbers);
        let decay = decays(ne, &mut numbers);
        let state = case([n * n * heads, sequences, 1, 1], 1.0, &mut numbers);
        let result = [n * heads, tokens * sequences + n * sequences, 1, 1];
        let sizes = [n, heads, tokens, sequences];

        let scale = 0.37_f32;
        let want = linear(sizes, &state, &|state, h, t, out| {
            for i in 0..n {
                for j in 0..n {
                    let m = &mut state[i * n + j];
                    *m = *m * decay.value([i, h, t, 0])
                        + v.value([j, h, t, 0]) * k.value([i, h, t, 0]);
                    out[j] += *m * q.value([i, h, t, 0]) * f64::from(scale);
                }
            }
        });
        let src = [&k, &v, &q, &decay, &state].map(Case::clone);
        let op = (KERNEL_GATED_LINEAR_ATTN, params(scale.to_bits()));
        check(&mut bench, op, result, &want, &src);

        let want = linear(sizes, &state, &|state, h, t, out| {
            for i in 0..n {
                for j in 0..n {
                    let m = &mut state[i * n + j];
                    let own = v.value([j, h, t, 0]) * k.value([i, h, t, 0]);
                    out[j] += (own * first.value([i, h, 0, 0]) + *m) * q.value([i, h, t, 0]);
                    *m = *m * decay.value([i, h, t, 0]) + own;
                }
            }
        });
        let src = [&k, &v, &q, &first, &decay, &state].map(Case::clone);
        check(&mut bench, (KERNEL_RWKV_WKV6, [0; 16]), result, &want, &src);

        let want = linear(sizes, &state, &|state, h, t, out| {
            for i in 0..n {
                let row = &mut state[i * n..][..n];
                let at = |j| [j, h, t, 0];
                let old: f64 = (0..n).map(|j| a.value(at(j)) * row[j]).sum();
                for (j, m) in row.iter_mut().enumerate() {
                    *m = *m * decay.value(at(j))
                        + v.value(at(i)) * k.value(at(j))
                        + old * b.value(at(j));
                    out[i] += *m * q.value(at(j));
                }
            }
        });
        let src = [&q, &decay, &k, &v, &a, &b, &state].map(Case::clone);
        check(&mut bench, (KERNEL_RWKV_WKV7, [0; 16]), result, &want, &src);
    }
}

/// Gates and steps of time are exponents: NaN in one of them ignored the token or wiped the state.
#[test]
fn a_gate_that_is_not_a_number_gives_nan_to_its_head_from_its_token_on() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    let [n, dim, heads, tokens] = [32, 32, 3, 4];
    let mut gates = |ne: [usize; 4], scale: f32| {
        let mut index = 0;
        Case::of(F, ne, DENSE, || {
            index += 1;
            // The number belongs to token 2 of head 1.
            if index == 2 * heads + 2 {
                f32::NAN
            } else {
                scale * numbers.float()
            }
        })
    };
    let (time, gate) = (
        gates([heads, tokens, 1, 1], 2.0),
        gates([1, heads, tokens, 1], 0.5),
    );
    let vectors = [n, heads, tokens, 1];
    let mut random = |ne| case(ne, 0.5, &mut numbers);
    let rates = |n| Case::of(F, [n, heads, 1, 1], DENSE, || -0.75);
    let numbers_of_states = Case::of(TYPE_I32, [1, 1, 1, 1], DENSE, || 0.0);
    let mut scan = |rates: Case, time: &Case| {
        let src = [
            random([n, dim, heads, 1]),
            random([dim, heads, tokens, 1]),
            time.clone(),
            rates,
            random([n, 1, tokens, 1]),
            random([n, 1, tokens, 1]),
            numbers_of_states.clone(),
        ];
        (KERNEL_SSM_SCAN, src.to_vec())
    };
    let scans = [scan(rates(1), &time), scan(rates(n), &time)];
    let delta = [
        random(vectors),
        random(vectors),
        random(vectors),
        gate,
        random([1, heads, tokens, 1]),
        random([n, n, heads, 1]),
    ];
    for (kernel, src) in [
        scans[0].clone(),
        scans[1].clone(),
        (KERNEL_GATED_DELTA_NET, delta.to_vec()),
    ] {
        let outputs = dim * heads * tokens;
        let dst = Case::zeros(F, [outputs + n * dim * heads, 1, 1, 1], DENSE);
        let (dst, op) = match kernel {
            KERNEL_SSM_SCAN => (dst, (kernel, params(1))),
            _ => (
                Case::zeros(F, [dim * heads, tokens + n, 1, 1], DENSE),
                (kernel, params(1)),
            ),
        };
        let body = bench.place_wide(op, &dst, &src);
        let have = bench.run_command(&Command::new(0, &body), &dst, body.dst.offset);
        for (i, value) in have.iter().enumerate() {
            let (head, token) = match i.checked_sub(outputs) {
                None => (i / dim % heads, i / dim / heads),
                Some(i) => (i / (n * dim), tokens),
            };
            assert_eq!(
                value.is_nan(),
                head == 1 && token >= 2,
                "kernel {kernel}: element {i}"
            );
        }
    }
}

#[test]
fn wrong_operands_of_a_recurrence_are_refused() {
    type Change = fn(&mut WideOp);
    let mut bench = Bench::new();
    let mut numbers = Numbers::default();
    let src = [
        case([16, 8, 4, 3], 1.0, &mut numbers),
        case([8, 4, 3, 2], 1.0, &mut numbers),
        case([4, 3, 2, 1], 1.0, &mut numbers),
        case([1, 4, 1, 1], 1.0, &mut numbers),
        case([16, 2, 3, 2], 1.0, &mut numbers),
        case([16, 2, 3, 2], 1.0, &mut numbers),
        Case::of(TYPE_I32, [2, 1, 1, 1], DENSE, || 1.0),
    ];
    let elems = 8 * 4 * 3 * 2 + 16 * 8 * 4 * 2;
    let dst = Case::zeros(F, [elems, 1, 1, 1], DENSE);
    let good = bench.place_wide((KERNEL_SSM_SCAN, params(1)), &dst, &src);
    let changes: &[(u32, &str, Change)] = &[
        (serve::OPERAND, "no states", |b| b.params[0] = 0),
        (serve::OPERAND, "more states than room", |b| b.params[0] = 2),
        (serve::OPERAND, "states beyond all numbers", |b| {
            b.params[0] = u32::MAX
        }),
        (serve::OPERAND, "elements", |b| b.dst.ne[0] -= 1),
        (serve::OPERAND, "groups", |b| {
            for source in &mut b.src[4..6] {
                (source.ne[1], source.nb[1]) = (3, 0);
            }
        }),
        (serve::OPERAND, "tokens", |b| b.src[1].ne[2] = 2),
        (serve::OPERAND, "states in f16", |b| {
            b.src[0].dtype = TYPE_F16
        }),
        (serve::OPERAND, "rows with gaps", |b| b.src[4].nb[0] = 8),
        (serve::OPERAND, "result with gaps", |b| {
            (b.dst.ne, b.dst.nb) = ([8, 152, 1, 1], [4, 64, 0, 0]);
        }),
        (serve::OPERAND, "a source is missing", |b| {
            b.src[6] = bytemuck::Zeroable::zeroed();
        }),
        (serve::OPERAND, "a source too many", |b| {
            b.kernel = KERNEL_RWKV_WKV6
        }),
        (serve::OPERAND, "not a wide operation", |b| {
            b.kernel = KERNEL_ADD
        }),
        (serve::KERNEL_NUMBER, "kernel", |b| b.kernel = 1000),
        (serve::RESERVED, "reserved", |b| b.reserved = 1),
        (serve::OVERLAP, "a source is the result", |b| {
            b.src[3].offset = b.dst.offset
        }),
    ];
    for (detail, what, change) in changes {
        let mut body = good;
        change(&mut body);
        bench.refused_body(&body, *detail, what);
    }
    let mut wrong = src.clone();
    wrong[6] = Case::of(TYPE_I32, [2, 1, 1, 1], DENSE, || 3.0);
    let body = bench.place_wide((KERNEL_SSM_SCAN, params(1)), &dst, &wrong);
    bench.refused_body(&body, serve::ROW, "a state that does not exist");
    let narrow = TensorOp {
        kernel: KERNEL_SSM_SCAN,
        params: params(1),
        dst: good.dst.widen(),
        ..bytemuck::Zeroable::zeroed()
    };
    bench.refused_body(&narrow, serve::OPERAND, "a narrow command");
}
