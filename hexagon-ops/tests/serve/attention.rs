//! Attention against ggml's definition in f64: the shapes, types, views and masks that llama.cpp
//! makes.

use hexagon_ops::wire::*;
use test_kit::nmse;

use crate::common::Numbers;
use crate::driver::Host;
use crate::rows::slope;
use crate::tensor::{Bench, DENSE, GAPS, PERMUTED, Place, TRANSPOSED, Tensor as Case, indices};

const F: u32 = TYPE_F32;
const H: u32 = TYPE_F16;
const Q8: u32 = TYPE_Q8_0;
const Q4: u32 = TYPE_Q4_0;
const B: u32 = TYPE_BF16;
/// The other types that llama.cpp's caches may have.
const OTHER_CACHES: [u32; 5] = [B, TYPE_Q5_0, TYPE_Q5_1, TYPE_Q4_1, TYPE_IQ4_NL];

/// Largest NMSE of dot products: a weight is off by the f32 rounding of a score (2^-24 of a score
/// below 30), squared.
pub const LIMIT: f64 = 1e-11;
/// Largest NMSE on the matrix unit: scores below 8, weights and products are f16 (each 2^-11 of
/// itself at most, evenly spread: a third of that squared); a score's error is absolute, so that of
/// its weight is up to 2^-8.
pub const LIMIT_F16: f64 = 5e-6;

/// An attention: `d` are the lengths of keys and values, `heads` those of queries and of keys.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub d: [usize; 2],
    pub queries: usize,
    pub heads: [usize; 2],
    pub streams: usize,
    pub positions: usize,
    pub types: [u32; 2],
    pub places: [Place; 3],
    pub scale: f32,
    pub max_bias: f32,
    pub softcap: f32,
}

pub const PLAIN: Setup = Setup {
    d: [64, 64],
    queries: 1,
    heads: [9, 3],
    streams: 1,
    positions: 256,
    types: [H, H],
    // As in llama.cpp: queries and the cache are stored as [length, heads, position].
    places: [PERMUTED, PERMUTED, PERMUTED],
    scale: 0.125,
    max_bias: 0.0,
    softcap: 0.0,
};

/// Operands in addition to queries, keys and values: mask and sinks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mask {
    None,
    /// Numbers in [-1, 1).
    Random,
    /// Positions after that of the query are hidden.
    Causal,
    /// Every third query sees nothing, and runs of positions are hidden from the others.
    Holes,
}

/// Operands in the order of [`Attention`], the result first.
#[derive(Clone)]
pub struct Operands {
    dst: Case,
    pub q: Case,
    pub k: Case,
    pub v: Case,
    pub mask: Case,
    sinks: Case,
}

impl Operands {
    pub fn new(setup: &Setup, mask: Mask, has_sinks: bool, numbers: &mut Numbers) -> Self {
        let [dk, dv] = setup.d;
        let [heads, kv_heads] = setup.heads;
        let (n, s) = (setup.queries, setup.streams);
        let [qp, kp, vp] = setup.places;
        let q = Case::random(F, [dk, n, heads, s], qp, 2.0, numbers);
        let kv = [kv_heads, s];
        let k = Case::random(
            setup.types[0],
            [dk, setup.positions, kv[0], kv[1]],
            kp,
            2.0,
            numbers,
        );
        let v = Case::random(
            setup.types[1],
            [dv, setup.positions, kv[0], kv[1]],
            vp,
            1.0,
            numbers,
        );
        let ne = [setup.positions, n, 1, s];
        let mut index = 0;
        let mut next = |f: &dyn Fn(usize, usize) -> f32| {
            let (row, column) = (index / ne[0] % n, index % ne[0]);
            index += 1;
            f(row, column)
        };
        let hide = |hidden: bool| if hidden { f32::NEG_INFINITY } else { 0.0 };
        let mask = match mask {
            Mask::None => Case::none(),
            Mask::Random => Case::random(H, ne, DENSE, 1.0, numbers),
            Mask::Causal => {
                let past = setup.positions.saturating_sub(n);
                Case::of(H, ne, DENSE, || {
                    next(&|row, column| hide(column > past + row))
                })
            }
            Mask::Holes => Case::of(H, ne, DENSE, || {
                next(&|row, column| hide(row % 3 == 1 || column / 40 % 2 == row % 2))
            }),
        };
        let sinks = if has_sinks {
            Case::random(F, [heads, 1, 1, 1], DENSE, 6.0, numbers)
        } else {
            Case::none()
        };
        let dst = Case::zeros(F, [dv, heads, n, s], DENSE);
        let mut operands = Self {
            dst,
            q,
            k,
            v,
            mask,
            sinks,
        };
        operands.compute(setup);
        operands
    }

    /// The result by ggml's definition.
    pub fn compute(&mut self, setup: &Setup) {
        let [heads, kv_heads] = setup.heads;
        let group = heads / kv_heads;
        let [dv, _, n, s] = self.dst.ne;
        let mut rows = std::collections::HashMap::new();
        for [_, head, i, stream] in indices([1, heads, n, s]) {
            let slope = slope(head, heads, f64::from(setup.max_bias));
            let mut scores: Vec<f64> = (0..setup.positions)
                .map(|j| {
                    let at = [head, stream];
                    let product: f64 = (0..setup.d[0])
                        .map(|d| {
                            self.q.value([d, i, at[0], at[1]])
                                * self.k.value([d, j, head / group, stream])
                        })
                        .sum();
                    let mut score = product * f64::from(setup.scale);
                    if setup.softcap != 0.0 {
                        let cap = f64::from(setup.softcap);
                        score = cap * (score / cap).tanh();
                    }
                    if self.mask.values.is_empty() {
                        score
                    } else {
                        score + slope * self.mask.value([j, i, head, stream])
                    }
                })
                .collect();
            if !self.sinks.values.is_empty() {
                scores.push(self.sinks.value([head, 0, 0, 0]));
            }
            let most = scores.iter().fold(f64::NEG_INFINITY, |m, x| m.max(*x));
            let weights: Vec<f64> = scores
                .iter()
                .map(|x| {
                    if *x == f64::NEG_INFINITY {
                        0.0
                    } else {
                        (x - most).exp()
                    }
                })
                .collect();
            let total: f64 = weights.iter().sum();
            let row: Vec<f64> = (0..dv)
                .map(|d| {
                    let sum: f64 = (0..setup.positions)
                        .filter(|j| weights[*j] > 0.0)
                        .map(|j| weights[j] * self.v.value([d, j, head / group, stream]))
                        .sum();
                    if total == 0.0 { 0.0 } else { sum / total }
                })
                .collect();
            rows.insert([head, i, stream], row);
        }
        for (index, [d, head, i, stream]) in indices(self.dst.ne).enumerate() {
            self.dst.values[index] = rows[&[head, i, stream]][d];
        }
    }

    /// The command, with everything in the memory of `bench`.
    pub fn place(&self, setup: &Setup, bench: &mut Bench) -> Attention {
        let tensors = [
            &self.dst,
            &self.q,
            &self.k,
            &self.v,
            &self.mask,
            &self.sinks,
        ];
        let placed = bench.put(&tensors);
        Attention {
            scale: setup.scale.to_bits(),
            max_bias: setup.max_bias.to_bits(),
            softcap: setup.softcap.to_bits(),
            reserved: 0,
            dst: placed[0],
            q: placed[1],
            k: placed[2],
            v: placed[3],
            mask: placed[4],
            sinks: placed[5],
        }
    }

    pub fn compare(&self, body: &Attention, bench: &mut Bench, limit: f64, what: &str) {
        let have = bench.run_command(&Command::new(0, body), &self.dst, body.dst.offset);
        assert!(have.iter().all(|x| x.is_finite()), "{what}");
        let error = nmse(&have, &self.dst.values);
        assert!(error <= limit, "{what}: {error:e} above {limit:e}");
    }
}

/// Runs an attention and compares.
fn check(setup: &Setup, mask: Mask, has_sinks: bool, bench: &mut Bench, numbers: &mut Numbers) {
    let operands = Operands::new(setup, mask, has_sinks, numbers);
    let body = operands.place(setup, bench);
    let what = format!("{setup:?} {mask:?} sinks {has_sinks}");
    operands.compare(&body, bench, limit(setup), &what);
}

/// The limit for the code path of an attention: types that f16 holds are computed on the matrix
/// unit.
fn limit(setup: &Setup) -> f64 {
    let dense = setup.places.iter().all(|place| place.order[0] == 0);
    let halves = !setup.types.contains(&F);
    if dense && halves { LIMIT_F16 } else { LIMIT }
}

#[test]
fn every_length_of_head_and_number_of_rows() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for d in [8, 40, 64, 65, 72, 80, 128, 256] {
        for (queries, heads, positions) in [
            (1, [9, 3], 32),
            (1, [1, 1], 1),
            (2, [4, 4], 33),
            (5, [6, 2], 100),
            (35, [4, 1], 64),
        ] {
            for types in [[H, H], [F, F]] {
                let setup = Setup {
                    d: [d, d],
                    queries,
                    heads,
                    types,
                    positions,
                    ..PLAIN
                };
                check(&setup, Mask::Random, false, &mut bench, &mut numbers);
            }
        }
    }
}

#[test]
fn keys_and_values_of_every_type() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    let both = [F, Q8, Q4].into_iter().chain(OTHER_CACHES);
    let mixed = [[Q8, Q4], [Q4, H], [H, F], [H, Q8], [B, TYPE_Q5_1]];
    for types in both.map(|dtype| [dtype; 2]).chain(mixed) {
        for (queries, places, d) in [
            (1, PLAIN.places, [96, 64]),
            (7, [GAPS; 3], [64, 96]),
            (40, [DENSE; 3], [96, 64]),
            (2, [TRANSPOSED; 3], [32, 32]),
        ] {
            // Blocks of quantized elements cannot be transposed.
            let is_float = types.iter().all(|dtype| [F, H, B].contains(dtype));
            if places[0].order[0] != 0 && !is_float {
                continue;
            }
            let setup = Setup {
                d,
                queries,
                types,
                places,
                positions: 70,
                ..PLAIN
            };
            check(&setup, Mask::Causal, true, &mut bench, &mut numbers);
        }
    }
}

#[test]
fn slopes_caps_sinks_and_streams() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (max_bias, softcap) in [(0.0, 0.0), (8.0, 0.0), (0.0, 10.0), (8.0, 10.0)] {
        for has_sinks in [false, true] {
            for mask in [Mask::None, Mask::Random, Mask::Causal, Mask::Holes] {
                // ggml requires a mask if there are slopes.
                if mask == Mask::None && max_bias > 0.0 {
                    continue;
                }
                for queries in [1, 6] {
                    let setup = Setup {
                        d: [64, 32],
                        queries,
                        heads: [6, 2],
                        streams: 2,
                        positions: 90,
                        max_bias,
                        softcap,
                        ..PLAIN
                    };
                    check(&setup, mask, has_sinks, &mut bench, &mut numbers);
                }
            }
        }
    }
}

#[test]
fn a_small_slope_does_not_bring_hidden_positions_back() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for queries in [4, 40] {
        let setup = Setup {
            queries,
            heads: [8, 2],
            positions: 130,
            max_bias: 16.0,
            ..PLAIN
        };
        check(&setup, Mask::Holes, false, &mut bench, &mut numbers);
    }
}

#[test]
fn one_query_over_many_positions_and_many_queries_over_few() {
    let mut numbers = Numbers::default();
    for types in [[H, H], [F, F]] {
        for (queries, positions, mask) in [(1, 1500, Mask::None), (20, 500, Mask::Causal)] {
            let setup = Setup {
                queries,
                heads: [3, 1],
                positions,
                types,
                ..PLAIN
            };
            check(&setup, mask, true, &mut Bench::new(), &mut numbers);
            check(&setup, Mask::Random, false, &mut Bench::new(), &mut numbers);
        }
    }
    let mut bench = Bench::new();
    // More results than this host's VTCM can hold.
    let setup = Setup {
        d: [32, 128],
        queries: 300,
        heads: [8, 2],
        positions: 40,
        ..PLAIN
    };
    check(&setup, Mask::Random, false, &mut bench, &mut numbers);
}

#[test]
fn masks_of_several_blocks_hide_all_some_or_no_positions() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for positions in [64, 1000, 2112] {
        for (queries, heads) in [(1, [3, 3]), (7, [4, 2]), (50, [2, 1])] {
            for mask in [Mask::None, Mask::Causal, Mask::Holes] {
                let setup = Setup {
                    queries,
                    heads,
                    positions,
                    ..PLAIN
                };
                check(&setup, mask, false, &mut bench, &mut numbers);
            }
        }
    }
}

/// Scores of such keys might leave FP16's range, so that they are computed in f32.
#[test]
fn large_elements_that_meet_zeros_change_nothing() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (queries, mask) in [(1, Mask::None), (9, Mask::Causal), (40, Mask::Holes)] {
        let setup = Setup {
            d: [64, 64],
            queries,
            positions: 320,
            ..PLAIN
        };
        let mut operands = Operands::new(&setup, mask, false, &mut numbers);
        let [n0, ..] = operands.q.ne;
        for (tensor, dtype, first) in [(&mut operands.q, F, 0.0), (&mut operands.k, H, 60000.0)] {
            let mut index = 0;
            let values = tensor.values.clone();
            *tensor = Case::of(dtype, tensor.ne, PERMUTED, || {
                index += 1;
                #[expect(clippy::cast_possible_truncation, reason = "they were f32")]
                let value = values[index - 1] as f32;
                if (index - 1) % n0 == 5 { first } else { value }
            });
        }
        let want = operands.dst.values.clone();
        operands.compute(&setup);
        assert!(operands.dst.values != want);
        let body = operands.place(&setup, &mut bench);
        operands.compare(&body, &mut bench, limit(&setup), "large keys");
    }
}

/// One thread computes the 7 or 8 tiles of rows as one group, stage after stage, and writes them
/// one after another. Other numbers of threads and less VTCM make smaller groups, which overlap,
/// and tasks that write; queries of three heads share three tiles.
#[test]
fn groups_that_overlap_give_the_same_bits_as_one_group() {
    let mut numbers = Numbers::default();
    let units = [
        (1, 4096),
        (2, 4096),
        (3, 4096),
        (4, 4096),
        (1, 512),
        (4, 512),
    ];
    let mut benches = units.map(|(threads, tiles)| Bench::with(Host::with_units(threads, tiles)));
    for (mask, has_sinks, softcap) in [
        (Mask::Causal, true, 0.0),
        (Mask::Holes, false, 0.0),
        (Mask::Random, false, 10.0),
    ] {
        for (queries, heads, streams, positions) in [(30, [8, 1], 1, 1100), (70, [9, 3], 2, 300)] {
            let setup = Setup {
                queries,
                heads,
                streams,
                positions,
                softcap,
                ..PLAIN
            };
            let operands = Operands::new(&setup, mask, has_sinks, &mut numbers);
            let results = benches.each_mut().map(|bench| {
                let body = operands.place(&setup, bench);
                let command = Command::new(0, &body);
                let have = bench.run_command(&command, &operands.dst, body.dst.offset);
                let error = nmse(&have, &operands.dst.values);
                assert!(error <= LIMIT_F16, "{mask:?}: {error:e}");
                have
            });
            for (result, units) in results.iter().zip(units) {
                assert!(*result == results[0], "{mask:?} {heads:?} on {units:?}");
            }
        }
    }
}

#[test]
fn hidden_rows_become_zeros() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for has_sinks in [false, true] {
        let setup = Setup {
            queries: 4,
            ..PLAIN
        };
        let operands = Operands::new(&setup, Mask::Holes, has_sinks, &mut numbers);
        let body = operands.place(&setup, &mut bench);
        let command = Command::new(0, &body);
        let have = bench.run_command(&command, &operands.dst, body.dst.offset);
        let row = setup.d[1] * setup.heads[0];
        assert!(have[row..2 * row].iter().all(|x| *x == 0.0));
        assert!(have[..row].iter().all(|x| *x != 0.0));
    }
}

#[test]
fn values_may_be_the_first_part_of_the_keys() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (types, d) in [([H, H], [576, 512]), ([Q8, Q8], [64, 64])] {
        let setup = Setup {
            d,
            queries: 2,
            heads: [4, 1],
            positions: 48,
            types,
            ..PLAIN
        };
        let mut operands = Operands::new(&setup, Mask::Causal, false, &mut numbers);
        for (index, at) in indices(operands.v.ne).enumerate() {
            operands.v.values[index] = operands.k.value(at);
        }
        operands.compute(&setup);
        let mut body = operands.place(&setup, &mut bench);
        body.v = Tensor {
            ne: body.v.ne,
            ..body.k
        };
        operands.compare(&body, &mut bench, limit(&setup), "a view of the keys");
    }
}

#[test]
fn keys_and_values_may_be_transposed() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    let setup = Setup {
        queries: 3,
        positions: 50,
        places: [TRANSPOSED; 3],
        ..PLAIN
    };
    check(&setup, Mask::Random, false, &mut bench, &mut numbers);
}

#[test]
fn keys_and_values_beyond_f16_are_computed_in_f32() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (queries, dtype) in [(1, B), (9, B), (1, Q8), (40, TYPE_Q5_1)] {
        for is_key in [true, false] {
            let setup = Setup {
                queries,
                positions: 200,
                types: [dtype; 2],
                // Scores become a few units, whatever the size of a key.
                scale: if is_key { 1e-6 } else { 0.125 },
                ..PLAIN
            };
            let mut operands = Operands::new(&setup, Mask::Causal, false, &mut numbers);
            let cache = if is_key {
                &mut operands.k
            } else {
                &mut operands.v
            };
            *cache = match dtype {
                B => Case::random(B, cache.ne, PERMUTED, 3e5, &mut numbers),
                _ => cache.scaled(2e5),
            };
            let largest = cache.values.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
            assert!(largest > 65504.0, "type {dtype}: {largest}");
            operands.compute(&setup);
            let body = operands.place(&setup, &mut bench);
            let what = format!("{setup:?}, key {is_key}");
            operands.compare(&body, &mut bench, LIMIT, &what);
        }
    }
}

/// Regression: on the matrix unit, such a position failed the graphs of all rows, hidden or not.
#[test]
fn a_cached_row_that_is_not_finite_gives_nan_to_those_that_see_it() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (types, places) in [
        ([H, H], PLAIN.places),
        ([Q8, Q8], PLAIN.places),
        ([Q4, Q4], PLAIN.places),
        ([TYPE_Q5_1, H], PLAIN.places),
        ([F, F], PLAIN.places),
        ([H, H], [TRANSPOSED; 3]),
    ] {
        for (queries, positions, mask) in [
            (1, 40, Mask::None),
            (3, 300, Mask::Holes),
            (40, 200, Mask::Causal),
        ] {
            let setup = Setup {
                d: [96, 64],
                queries,
                positions,
                types,
                places,
                ..PLAIN
            };
            let operands = Operands::new(&setup, mask, true, &mut numbers);
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for (is_key, position) in [(true, positions - 1), (false, positions - 7)] {
                    let mut operands = operands.clone();
                    let cache = if is_key {
                        &mut operands.k
                    } else {
                        &mut operands.v
                    };
                    cache.poison([33, position, 1, 0], bad);
                    let body = operands.place(&setup, &mut bench);
                    let command = Command::new(0, &body);
                    let have = bench.run_command(&command, &operands.dst, body.dst.offset);
                    let what = format!("{setup:?} {mask:?} {bad}, key {is_key}");
                    let rows = have.chunks(64).zip(operands.dst.values.chunks(64));
                    for (row, (have, want)) in rows.enumerate() {
                        let (query, head) = (row / 9, row % 9);
                        let is_hidden = !operands.mask.values.is_empty()
                            && operands.mask.value([position, query, 0, 0]).is_infinite();
                        if head / 3 == 1 && !is_hidden {
                            assert!(have.iter().all(|x| x.is_nan()), "row {row} of {what}");
                        } else if want.iter().all(|x| *x == 0.0) {
                            assert!(have.iter().all(|x| *x == 0.0), "row {row} of {what}");
                        } else {
                            let error = nmse(have, want);
                            // Each row is compared separately, because a limit for all rows could
                            // hide a wrong row.
                            assert!(error <= 10.0 * LIMIT_F16, "row {row} of {what}: {error:e}");
                        }
                    }
                }
            }
            let body = operands.place(&setup, &mut bench);
            operands.compare(&body, &mut bench, limit(&setup), "after the exceptions");
        }
    }
}

/// Regression: on the matrix unit, such a row ended in an overflow that put the device out of use.
#[test]
fn a_query_that_is_not_finite_gives_nan_and_leaves_the_others_alone() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (queries, types) in [
        (1, [H, H]),
        (2, [H, H]),
        (3, [H, H]),
        (32, [H, H]),
        (1, [F, F]),
        (3, [F, F]),
    ] {
        for bad in [f32::NAN, f32::INFINITY] {
            let setup = Setup {
                queries,
                types,
                ..PLAIN
            };
            let mut operands = Operands::new(&setup, Mask::Random, false, &mut numbers);
            let mut values = operands.q.values.clone();
            // A position in the middle of the last query of the second head.
            let [d, n, ..] = operands.q.ne;
            values[(n + n - 1) * d + d / 2] = f64::from(bad);
            let mut values = values.into_iter();
            operands.q = Case::of(F, operands.q.ne, PERMUTED, || {
                #[expect(clippy::cast_possible_truncation, reason = "they were f32")]
                let value = values.next().unwrap() as f32;
                value
            });
            operands.compute(&setup);
            let body = operands.place(&setup, &mut bench);
            let command = Command::new(0, &body);
            let have = bench.run_command(&command, &operands.dst, body.dst.offset);
            let [dv, heads, ..] = operands.dst.ne;
            let rows = have.chunks(dv).zip(operands.dst.values.chunks(dv));
            for (row, (have, want)) in rows.enumerate() {
                if row == (queries - 1) * heads + 1 {
                    assert!(have.iter().all(|x| x.is_nan()), "{queries} {bad}: {have:?}");
                } else {
                    let error = nmse(have, want);
                    // Each row is compared separately, because a limit for all rows could hide a
                    // wrong row.
                    assert!(
                        error <= 10.0 * LIMIT_F16,
                        "{queries} {bad} row {row}: {error:e}"
                    );
                }
            }
        }
    }
}
