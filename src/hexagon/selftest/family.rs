//! Everything but products with packed weights: operations on tensors in ggml's own layouts.

use half::f16;
use hexagon_ops::wire::{self, TYPE_F16, TYPE_F32, TYPE_Q8_0};

use super::Outcome;
use super::sheet::Sheet;
use crate::error::Result;
use crate::hexagon::device::HexNpu;
use crate::reference::uniform;
use crate::reference::{self, Heads, RecurrenceSizes};

/// Largest normalized mean square error of results in f32.
///
/// Kernels promise a relative error of 1e-6 at most (`hexagon_ops::ops::math`), which is 1e-12
/// squared. The vector unit's own format may lose three more bits, which is a factor of 64.
const F32: f64 = 1e-10;
/// As above, for f16: half a unit of 2^-11, squared.
const F16: f64 = 1.2e-7;
/// As above, for Q8_0 blocks of uniform numbers: twice (1/127)^2 / 12 / (1/3), which is the error
/// of a step of 1/127 of the largest.
const Q8_0: f64 = 3e-5;
/// As above, for attention with f16 keys and values: scores, weights and products are rounded to
/// f16; an absolute error of 2^-8 of a score is a relative one of its weight, squared and evenly
/// spread: 5e-6.
const ATTENTION: f64 = 5e-6;

/// Elements of a row: several vectors and a part of one.
const ROW: usize = 200;
const ROWS: usize = 3;

/// Returns the parameters of an operation: their places, and f32 values.
fn floats<const N: usize>(values: [(usize, f32); N]) -> [u32; 16] {
    let mut params = [0; 16];
    for (place, value) in values {
        params[place] = value.to_bits();
    }
    params
}

fn random(count: usize, skip: usize) -> Vec<f32> {
    // Multiplying by 1.1 makes the numbers inexact in f16, so rounding to f16 changes them.
    uniform().skip(skip).take(count).map(|x| x * 1.1).collect()
}

fn each(x: &[f32], f: impl Fn(f64) -> f64) -> Vec<f64> {
    x.iter().map(|x| f(f64::from(*x))).collect()
}

fn both(a: &[f32], b: &[f32], f: impl Fn(f64, f64) -> f64) -> Vec<f64> {
    // The shorter operand is repeated.
    let pairs = a.iter().zip(b.iter().cycle());
    pairs
        .map(|(a, b)| f(f64::from(*a), f64::from(*b)))
        .collect()
}

pub(super) fn elementwise(npu: &HexNpu) -> Result<Vec<Outcome>> {
    let mut sheet = Sheet::new(npu)?;
    let (shape, row) = ([ROW, ROWS], [ROW]);
    let (x, y) = (random(ROW * ROWS, 0), random(ROW, 1000));
    let (a, b) = (sheet.floats(&shape, &x), sheet.floats(&row, &y));
    let dst = (TYPE_F32, &shape[..]);
    let add = both(&x, &y, |x, y| x + y);
    sheet.op("ADD", (wire::KERNEL_ADD, [0; 16]), dst, &[a, b], (add, F32));
    let mul = both(&x, &y, |x, y| x * y);
    sheet.op("MUL", (wire::KERNEL_MUL, [0; 16]), dst, &[a, b], (mul, F32));
    let params = floats([(0, 0.75), (1, 0.5)]);
    let scaled = each(&x, |x| x * 0.75 + 0.5);
    sheet.op(
        "SCALE",
        (wire::KERNEL_SCALE, params),
        dst,
        &[a],
        (scaled, F32),
    );
    let silu = each(&x, reference::silu);
    sheet.op("SILU", (wire::KERNEL_SILU, [0; 16]), dst, &[a], (silu, F32));
    let gelu = each(&x, reference::gelu);
    sheet.op("GELU", (wire::KERNEL_GELU, [0; 16]), dst, &[a], (gelu, F32));
    sheet.run(npu)
}

pub(super) fn copies(npu: &HexNpu) -> Result<Vec<Outcome>> {
    const D: usize = 64;
    const CACHE: usize = 5;
    let mut sheet = Sheet::new(npu)?;
    let x = random(D * ROWS, 0);
    let a = sheet.floats(&[D, ROWS], &x);
    let unchanged = each(&x, |x| x);
    let dst = (TYPE_F16, &[D, ROWS][..]);
    sheet.op(
        "COPY to F16",
        (wire::KERNEL_COPY, [0; 16]),
        dst,
        &[a],
        (unchanged, F16),
    );
    let places = [3, 0, 4];
    let named = sheet.numbers(&places);
    let mut want = vec![0.0; D * CACHE];
    for (row, place) in x.chunks_exact(D).zip([3, 0, 4]) {
        want[place * D..][..D].copy_from_slice(&each(row, |x| x));
    }
    for (test, dtype, limit) in [
        ("SET_ROWS to F32", TYPE_F32, 0.0),
        ("SET_ROWS to F16", TYPE_F16, F16),
        ("SET_ROWS to Q8_0", TYPE_Q8_0, Q8_0),
    ] {
        let (op, dst) = ((wire::KERNEL_SET_ROWS, [0; 16]), (dtype, &[D, CACHE][..]));
        sheet.op(test, op, dst, &[a, named], (want.clone(), limit));
    }
    let rounded: Vec<f32> = x.iter().map(|x| f16::from_f32(*x).to_f32()).collect();
    let halves = sheet.halves(&[D, ROWS], &rounded);
    let named = sheet.numbers(&[2, 0]);
    let want = [&rounded[2 * D..], &rounded[..D]].concat();
    let (op, dst) = ((wire::KERNEL_GET_ROWS, [0; 16]), (TYPE_F32, &[D, 2][..]));
    let want = (each(&want, |x| x), 0.0);
    sheet.op("GET_ROWS from F16", op, dst, &[halves, named], want);
    sheet.run(npu)
}

pub(super) fn norms(npu: &HexNpu) -> Result<Vec<Outcome>> {
    const EPS: f32 = 1e-5;
    let mut sheet = Sheet::new(npu)?;
    let shape = [ROW, ROWS];
    let (x, w) = (random(ROW * ROWS, 0), random(ROW, 1000));
    let (a, b) = (sheet.floats(&shape, &x), sheet.floats(&[ROW], &w));
    let (params, dst) = (floats([(0, EPS)]), (TYPE_F32, &shape[..]));
    let rms = reference::norm(&x, ROW, f64::from(EPS), false);
    let weighted = rms.iter().zip(w.iter().cycle());
    let weighted = weighted.map(|(x, w)| x * f64::from(*w)).collect();
    let op = (wire::KERNEL_RMS_NORM, params);
    sheet.op("RMS_NORM, MUL", op, dst, &[a, b], (weighted, F32));
    let want = reference::norm(&x, ROW, f64::from(EPS), true);
    sheet.op("NORM", (wire::KERNEL_NORM, params), dst, &[a], (want, F32));
    let want = reference::l2_norm(&x, ROW, f64::from(EPS));
    sheet.op(
        "L2_NORM",
        (wire::KERNEL_L2_NORM, params),
        dst,
        &[a],
        (want, F32),
    );
    sheet.run(npu)
}

pub(super) fn gated(npu: &HexNpu) -> Result<Vec<Outcome>> {
    let mut sheet = Sheet::new(npu)?;
    let shape = [ROW, ROWS];
    let (x, y) = (random(ROW * ROWS, 0), random(ROW * ROWS, 1000));
    let (a, b) = (sheet.floats(&shape, &x), sheet.floats(&shape, &y));
    let dst = (TYPE_F32, &shape[..]);
    for (test, kernel, f) in [
        (
            "SWIGLU",
            wire::KERNEL_SWIGLU,
            reference::silu as fn(f64) -> f64,
        ),
        ("GEGLU", wire::KERNEL_GEGLU, reference::gelu),
    ] {
        let want = both(&x, &y, |x, y| f(x) * y);
        sheet.op(test, (kernel, [0; 16]), dst, &[a, b], (want, F32));
    }
    sheet.run(npu)
}

pub(super) fn rope(npu: &HexNpu) -> Result<Vec<Outcome>> {
    const D: usize = 64;
    const HEADS: usize = 2;
    const BASE: f32 = 10_000.0;
    // An f32 angle of 37 is off by at most 2^-19; its square is 1e-12, the same limit as for other
    // errors.
    let positions = [0, 5, 37];
    let mut sheet = Sheet::new(npu)?;
    let shape = [D, HEADS, positions.len()];
    let x = random(D * HEADS * positions.len(), 0);
    let (a, b) = (sheet.floats(&shape, &x), sheet.numbers(&positions));
    for (test, mode) in [("ROPE", 0), ("ROPE of halves", 2)] {
        // Parameters 5, 6 and 8: base of the frequencies, their scale, and the magnitude.
        let mut params = floats([(5, BASE), (6, 1.0), (8, 1.0)]);
        (params[1], params[2]) = (64, mode);
        let want = reference::rope(&x, D, HEADS, &positions, f64::from(BASE), mode == 2);
        let (op, dst) = ((wire::KERNEL_ROPE, params), (TYPE_F32, &shape[..]));
        sheet.op(test, op, dst, &[a, b], (want, F32));
    }
    sheet.run(npu)
}

/// Returns a mask that hides from each query but the last the positions after its own.
fn causal(positions: usize, queries: usize) -> Vec<f32> {
    let visible = |query: usize, position: usize| position + queries <= positions + query;
    (0..queries * positions)
        .map(|i| match visible(i / positions, i % positions) {
            true => 0.0,
            false => f32::NEG_INFINITY,
        })
        .collect()
}

pub(super) fn soft_max(npu: &HexNpu) -> Result<Vec<Outcome>> {
    let mut sheet = Sheet::new(npu)?;
    let shape = [ROW, ROWS];
    let x: Vec<f32> = random(ROW * ROWS, 0).iter().map(|x| x * 8.0).collect();
    let mask = causal(ROW, ROWS);
    let (a, b) = (sheet.floats(&shape, &x), sheet.halves(&shape, &mask));
    let want = reference::soft_max(&x, &mask, ROW, 0.5);
    let op = (wire::KERNEL_SOFT_MAX, floats([(0, 0.5)]));
    sheet.op("SOFT_MAX", op, (TYPE_F32, &shape), &[a, b], (want, F32));
    sheet.run(npu)
}

pub(super) fn attention(npu: &HexNpu) -> Result<Vec<Outcome>> {
    let mut sheet = Sheet::new(npu)?;
    for queries in [1, 5] {
        let sizes = Heads {
            d: 64,
            heads: 4,
            shared: 2,
            queries,
            positions: 40,
        };
        let Heads {
            d,
            heads,
            shared,
            positions,
            ..
        } = sizes;
        // Exact in f16.
        let numbers = |count, skip| uniform().skip(skip).take(count).collect::<Vec<f32>>();
        let q = numbers(d * queries * heads, 0);
        let [k, v] = [1000, 9000].map(|skip| numbers(d * positions * heads / shared, skip));
        let mask = causal(positions, queries);
        let want = reference::attention(&q, &k, &v, &mask, sizes);
        let cache = [d, positions, heads / shared];
        let operands = [
            sheet.floats(&[d, queries, heads], &q),
            sheet.halves(&cache, &k),
            sheet.halves(&cache, &v),
            sheet.halves(&[positions, queries], &mask),
        ];
        let test = format!("FLASH_ATTN_EXT of {queries} queries");
        sheet.attention(
            &test,
            &[d, heads, queries],
            operands,
            0.125,
            (want, ATTENTION),
        );
    }
    sheet.run(npu)
}

pub(super) fn recurrences(npu: &HexNpu) -> Result<Vec<Outcome>> {
    let mut sheet = Sheet::new(npu)?;
    // Sizes at which rows end inside a vector.
    let sizes = RecurrenceSizes {
        n: 36,
        heads: 2,
        tokens: 2,
    };
    let RecurrenceSizes { n, heads, tokens } = sizes;
    let small = |count, skip| -> Vec<f32> {
        let all = random(count, skip).into_iter();
        all.map(|x| x / 4.0).collect()
    };
    let [q, k, v] = [0, 1000, 2000].map(|skip| small(n * heads * tokens, skip));
    let [gates, factors] = [3000, 4000].map(|skip| small(heads * tokens, skip));
    let state = small(n * n * heads, 5000);
    let ne = [n, heads, tokens];
    let result = [n * heads, tokens + n];
    let want = reference::gated_delta(sizes, [&q, &k, &v], [&gates, &factors], &state);
    let [qs, ks, vs] = [&q, &k, &v].map(|x| sheet.floats(&ne, x));
    let [gs, betas] = [&gates, &factors].map(|x| sheet.floats(&[1, heads, tokens], x));
    let states = sheet.floats(&[n, n, heads], &state);
    let op = (wire::KERNEL_GATED_DELTA_NET, 1);
    let src = [qs, ks, vs, gs, betas, states];
    sheet.wide("GATED_DELTA_NET", op, &result, &src, (want, F32));

    let decays = small(n * heads * tokens, 9000);
    let want = reference::gated_linear(sizes, [&k, &v, &q, &decays], &state, 0.5);
    let decays = sheet.floats(&ne, &decays);
    let states = sheet.floats(&[n * n * heads], &state);
    let op = (wire::KERNEL_GATED_LINEAR_ATTN, 0.5_f32.to_bits());
    let src = [ks, vs, qs, decays, states];
    sheet.wide("GATED_LINEAR_ATTN", op, &result, &src, (want, F32));
    sheet.run(npu)
}
