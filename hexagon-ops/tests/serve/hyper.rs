//! Operations of DeepSeek V4 against ggml's loops in f64: hyper-connections, and the indexer of
//! sparse attention.

use hexagon_ops::serve;
use hexagon_ops::wire::*;
use test_kit::nmse;

use crate::common::Numbers;
use crate::tensor::{
    Bench, DENSE, GAPS, PERMUTED, Params, TRANSPOSED, Tensor as Case, floats, indices,
};

const F: u32 = TYPE_F32;
/// A few roundings, squared.
const LIMIT: f64 = 1e-11;

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Runs an operation with more sources, and compares with `dst`.
fn check_wide(bench: &mut Bench, kernel: u32, dst: &Case, src: &[Case]) {
    let body = bench.place_wide((kernel, [0; 16]), dst, src);
    let have = bench.run_command(&Command::new(0, &body), dst, body.dst.offset);
    let error = nmse(&have, &dst.values);
    assert!(
        error <= LIMIT,
        "kernel {kernel} of {:?}: {error:e}",
        dst.wire
    );
}

#[test]
fn streams_become_one_row_by_weights_and_gates() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for [n, streams, tokens] in [
        [1, 1, 1],
        [31, 4, 17],
        [256, 3, 2],
        [300, 4, 5],
        [64, 70, 1],
    ] {
        for (place, to) in [(DENSE, GAPS), (GAPS, DENSE), (TRANSPOSED, DENSE)] {
            let x = Case::random(F, [n, streams, tokens, 1], place, 1.0, &mut numbers);
            let mut dst = Case::zeros(F, [n, tokens, 1, 1], to);
            let places: Vec<_> = indices(dst.ne).collect();

            let weights = Case::random(F, [streams, tokens, 1, 1], place, 1.0, &mut numbers);
            for (want, [i, t, ..]) in dst.values.iter_mut().zip(&places) {
                let terms =
                    (0..streams).map(|h| x.value([*i, h, *t, 0]) * weights.value([h, *t, 0, 0]));
                *want = terms.sum();
            }
            let src = [x.clone(), weights];
            let op = (KERNEL_DSV4_HC_PRE, floats(&[1.0]));
            bench.check(op, &dst, &src, false, LIMIT);

            let gates = Case::random(F, x.ne, PERMUTED, 4.0, &mut numbers);
            for (want, [i, t, ..]) in dst.values.iter_mut().zip(&places) {
                let terms = (0..streams).map(|h| {
                    let at = [*i, h, *t, 0];
                    x.value(at) * sigmoid(gates.value(at))
                });
                *want = 0.25 * terms.sum::<f64>();
            }
            let mut params = floats(&[0.25]);
            params[1] = 1;
            bench.check(
                (KERNEL_DSV4_HC_PRE, params),
                &dst,
                &[x, gates],
                false,
                LIMIT,
            );
        }
    }
}

#[test]
fn streams_get_a_result_and_a_mixture_of_all() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for [n, streams, tokens] in [[1, 1, 1], [31, 4, 17], [300, 4, 5], [256, 5, 2]] {
        for place in [DENSE, GAPS, PERMUTED] {
            for has_matrix in [true, false] {
                let mut case = |ne| Case::random(F, ne, place, 1.0, &mut numbers);
                let x = case([n, tokens, 1, 1]);
                let residual = case([n, streams, tokens, 1]);
                let post = case([streams, tokens, 1, 1]);
                let comb = case([streams, streams, tokens, 1]);
                let mut dst = Case::zeros(F, [n, streams, tokens, 1], place);
                for (index, [i, h, t, _]) in indices(dst.ne).enumerate() {
                    let mixed: f64 = match has_matrix {
                        true => (0..streams)
                            .map(|g| residual.value([i, g, t, 0]) * comb.value([h, g, t, 0]))
                            .sum(),
                        false => residual.value([i, h, t, 0]),
                    };
                    dst.values[index] = x.value([i, t, 0, 0]) * post.value([h, t, 0, 0]) + mixed;
                }
                let mut src = vec![x, residual, post];
                src.extend(has_matrix.then_some(comb));
                check_wide(&mut bench, KERNEL_DSV4_HC_POST, &dst, &src);
            }
        }
    }
}

fn rounds(eps: f32, rounds: u32) -> Params {
    let mut params = floats(&[eps]);
    params[1] = rounds;
    params
}

/// The matrices of all tokens, as ggml computes them.
fn balanced(mixes: &Case, scale: f64, base: &Case, eps: f64, rounds: u32) -> Vec<f64> {
    let token = |t| {
        let mut m: Vec<f64> = (8..24)
            .map(|i| mixes.value([i, t, 0, 0]) * scale + base.value([i, 0, 0, 0]))
            .collect();
        for row in m.chunks_exact_mut(4) {
            let sum: f64 = row.iter().map(|x| x.exp()).sum();
            row.iter_mut().for_each(|x| *x = x.exp() / sum + eps);
        }
        for round in 0..rounds {
            if round > 0 {
                for row in m.chunks_exact_mut(4) {
                    let sum = eps + row.iter().sum::<f64>();
                    row.iter_mut().for_each(|x| *x /= sum);
                }
            }
            for column in 0..4 {
                let sum = eps + m.iter().skip(column).step_by(4).sum::<f64>();
                m.iter_mut().skip(column).step_by(4).for_each(|x| *x /= sum);
            }
        }
        m
    };
    (0..mixes.ne[1]).flat_map(token).collect()
}

#[test]
fn matrices_of_tokens_are_balanced() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (tokens, count) in [(1, 1), (17, 4), (32, 2), (33, 20), (257, 8)] {
        let mixes = Case::random(F, [24, tokens, 1, 1], GAPS, 2.0, &mut numbers);
        let scale = Case::random(F, [3, 1, 1, 1], DENSE, 0.5, &mut numbers);
        let base = Case::random(F, [24, 1, 1, 1], DENSE, 0.25, &mut numbers);
        let mut dst = Case::zeros(F, [4, 4, tokens, 1], DENSE);
        let factor = scale.value([2, 0, 0, 0]);
        dst.values = balanced(&mixes, factor, &base, f64::from(1e-3_f32), count);
        let op = (KERNEL_DSV4_HC_COMB, rounds(1e-3, count));
        bench.check(op, &dst, &[mixes, scale, base], false, LIMIT);
    }
}

#[test]
fn wrong_matrices_are_refused() {
    let mut bench = Bench::new();
    let zeros = |ne| Case::zeros(F, ne, DENSE);
    let good = [[24, 3, 1, 1], [3, 1, 1, 1], [24, 1, 1, 1]].map(zeros);
    let dst = zeros([4, 4, 3, 1]);
    for (count, what) in [(0, "no round"), (1001, "too many rounds")] {
        let body = bench.place(
            (KERNEL_DSV4_HC_COMB, rounds(0.0, count)),
            &dst,
            &good,
            false,
        );
        bench.refused_body(&body, serve::OPERAND, what);
    }
    for (i, ne) in [[23, 3, 1, 1], [2, 1, 1, 1], [16, 1, 1, 1]]
        .into_iter()
        .enumerate()
    {
        let mut src = good.clone();
        src[i] = zeros(ne);
        bench.refused(
            (KERNEL_DSV4_HC_COMB, rounds(0.0, 1)),
            &dst,
            &src,
            serve::OPERAND,
        );
    }
    let tokens = zeros([4, 4, 2, 1]);
    bench.refused(
        (KERNEL_DSV4_HC_COMB, rounds(0.0, 1)),
        &tokens,
        &good,
        serve::OPERAND,
    );
}

#[test]
fn positions_are_weighted_for_every_type_of_keys() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    // Elements, heads, positions, tokens, streams, streams of the mask, keys.
    for (n, heads, positions, tokens, streams, masks, dtype) in [
        (128, 64, 65, 3, 2, 1, TYPE_F16),
        (128, 9, 256, 1, 1, 1, F),
        (64, 8, 7, 2, 3, 3, TYPE_BF16),
        (96, 5, 33, 2, 1, 1, TYPE_Q8_0),
        (32, 3, 64, 5, 2, 1, TYPE_Q4_0),
        (128, 17, 31, 2, 1, 1, TYPE_IQ4_NL),
        (40, 1, 1, 1, 1, 1, F),
    ] {
        let q = Case::random(F, [n, heads, tokens, streams], PERMUTED, 1.0, &mut numbers);
        let k = Case::random(dtype, [n, 1, positions, streams], GAPS, 1.0, &mut numbers);
        let w = Case::random(F, [heads, tokens, 1, streams], GAPS, 1.0, &mut numbers);
        let m = Case::random(
            TYPE_F16,
            [positions, tokens, 1, masks],
            DENSE,
            1.0,
            &mut numbers,
        );
        let mut dst = Case::zeros(F, [positions, tokens, 1, streams], DENSE);
        for (index, [p, t, _, s]) in indices(dst.ne).enumerate() {
            let head = |h| {
                let product: f64 = (0..n)
                    .map(|i| q.value([i, h, t, s]) * k.value([i, 0, p, s]))
                    .sum();
                product.max(0.0) * w.value([h, t, 0, s])
            };
            dst.values[index] = (0..heads).map(head).sum::<f64>() + m.value([p, t, 0, s]);
        }
        check_wide(&mut bench, KERNEL_LIGHTNING_INDEXER, &dst, &[q, k, w, m]);
    }
}

#[test]
fn wrong_sources_of_the_indexer_are_refused() {
    let mut bench = Bench::new();
    let src = [
        Case::zeros(F, [32, 4, 2, 2], DENSE),
        Case::zeros(TYPE_F16, [32, 1, 9, 2], DENSE),
        Case::zeros(F, [4, 2, 1, 2], DENSE),
        Case::zeros(TYPE_F16, [9, 2, 1, 1], DENSE),
    ];
    let dst = Case::zeros(F, [9, 2, 1, 2], DENSE);
    let good = bench.place_wide((KERNEL_LIGHTNING_INDEXER, [0; 16]), &dst, &src);
    type Change = fn(&mut WideOp);
    let changes: &[(&str, Change)] = &[
        ("length of keys", |b| b.src[1].ne[0] = 31),
        ("heads of keys", |b| b.src[1].ne[1] = 2),
        ("keys of whole numbers", |b| b.src[1].dtype = TYPE_I16),
        ("heads of weights", |b| b.src[2].ne[0] = 3),
        ("a mask of whole numbers", |b| b.src[3].dtype = TYPE_I16),
        ("positions of the mask", |b| b.src[3].ne[0] = 8),
        ("streams", |b| b.src[0].ne[3] = 1),
        ("no mask", |b| b.src[3] = bytemuck::Zeroable::zeroed()),
        ("a source too many", |b| b.src[4] = b.src[2]),
        ("result with gaps", |b| b.dst.nb[1] += 4),
    ];
    for (what, change) in changes {
        let mut body = good;
        change(&mut body);
        bench.refused_body(&body, serve::OPERAND, what);
    }
}
