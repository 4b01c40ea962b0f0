//! Attention with scores that FP16 cannot resolve or hold, and with small values.

use hexagon_ops::wire::*;

use crate::attention::{LIMIT, LIMIT_F16, Mask, Operands, PLAIN, Setup};
use crate::common::Numbers;
use crate::tensor::{Bench, DENSE, PERMUTED, Tensor as Case};

const F: u32 = TYPE_F32;
const H: u32 = TYPE_F16;
const Q8: u32 = TYPE_Q8_0;

/// Returns operands whose scores are `common` plus those of small numbers, and the attention with
/// them.
fn with_common_score(setup: &Setup, common: f32, numbers: &mut Numbers) -> Operands {
    const QUERY: f32 = 64.0;
    let mut operands = Operands::new(setup, Mask::None, false, numbers);
    let key = common / (QUERY * setup.scale);
    for (tensor, dtype, part) in [(&mut operands.q, F, QUERY), (&mut operands.k, H, key)] {
        let mut all = tensor.values.clone().into_iter().enumerate();
        *tensor = Case::of(dtype, tensor.ne, PERMUTED, || {
            let (index, value) = all.next().unwrap();
            #[expect(clippy::cast_possible_truncation, reason = "they were f32")]
            let value = value as f32;
            if index % setup.d[0] == 0 { part } else { value }
        });
    }
    operands.compute(setup);
    operands
}

/// Scores of some hundreds: f16 rounds those above 256 to 1/4 and more.
#[test]
fn large_scores_are_told_from_each_other() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (queries, heads) in [(1, [9, 3]), (1, [4, 4]), (40, [4, 1])] {
        for (types, mask) in [([H, H], Mask::Random), ([Q8, Q8], Mask::Causal)] {
            let setup = Setup {
                queries,
                heads,
                types,
                scale: 25.0,
                ..PLAIN
            };
            let operands = Operands::new(&setup, mask, false, &mut numbers);
            let body = operands.place(&setup, &mut bench);
            // A score of 1,000 is off by 2^-14.
            operands.compare(&body, &mut bench, 1e-7, &format!("{setup:?} {mask:?}"));
        }
    }
}

/// Scores from 128 to 256, and as far below zero: f16 rounds them to 1/8.
#[test]
fn scores_above_128_are_told_from_each_other() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (queries, heads) in [(1, [4, 4]), (40, [4, 1])] {
        let setup = Setup {
            d: [128, 128],
            queries,
            heads,
            positions: 512,
            ..PLAIN
        };
        // The largest scores of a row are up to 10 above the common score.
        for common in [130.0, 190.0, 245.0, -197.0, -220.0, -240.0] {
            let operands = with_common_score(&setup, common, &mut numbers);
            let body = operands.place(&setup, &mut bench);
            // A score of 256 is off by 2^-16.
            operands.compare(&body, &mut bench, 1e-9, &format!("{setup:?} {common}"));
        }
    }
}

/// Hidden positions have the lowest f16, and rows that see nothing else become zeros. These rows do
/// see positions.
#[test]
fn rows_whose_scores_are_below_f16_see_their_positions() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (queries, heads, positions) in [(1, [8, 8], 512), (40, [4, 1], 70)] {
        let setup = Setup {
            queries,
            heads,
            positions,
            ..PLAIN
        };
        for common in [-65500.0, -66000.0, -70000.0, -200_000.0] {
            let operands = with_common_score(&setup, common, &mut numbers);
            let body = operands.place(&setup, &mut bench);
            // A score of 200,000 is a sum whose every step is off by up to 2^-7.
            operands.compare(&body, &mut bench, 1e-3, &format!("{setup:?} {common}"));
        }
    }
}

/// ggml hides minus infinity only.
#[test]
fn a_mask_of_the_lowest_f16_hides_no_row() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (queries, common) in [(2, -5.0), (2, 0.0), (2, 12.0), (40, -5.0)] {
        let setup = Setup {
            queries,
            positions: 70,
            ..PLAIN
        };
        let mut operands = with_common_score(&setup, common, &mut numbers);
        let ne = [setup.positions, queries, 1, 1];
        let mut index = 0;
        operands.mask = Case::of(H, ne, DENSE, || {
            let (row, column) = (index / setup.positions, index % setup.positions);
            index += 1;
            match (row % 2, column % 3) {
                // Hidden positions, in rows where all other addends are equal and in rows where
                // they differ.
                (_, 0) => f32::NEG_INFINITY,
                (1, 1) => 0.0,
                _ => -65504.0,
            }
        });
        operands.compute(&setup);
        let body = operands.place(&setup, &mut bench);
        // A score of 65,504 is off by 2^-9.
        operands.compare(&body, &mut bench, 1e-4, &format!("{queries} {common}"));
    }
}

#[test]
fn scores_beyond_f16_are_computed_in_f32() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    let setup = Setup {
        queries: 16,
        ..PLAIN
    };
    let mut operands = Operands::new(&setup, Mask::None, false, &mut numbers);
    // Queries become 0.95, and the unit divides by 32 when it stores: the sum of 64 products of
    // 60000 is then above 65504.
    operands.k = Case::of(H, operands.k.ne, PERMUTED, || 60000.0);
    operands.q = Case::of(F, operands.q.ne, PERMUTED, || 1.9);
    operands.compute(&setup);
    let body = operands.place(&setup, &mut bench);
    operands.compare(&body, &mut bench, LIMIT, "scores of 912,000");
}

/// Products are f16 as well, whose smallest numbers have few bits.
#[test]
fn small_values_keep_their_bits() {
    let mut numbers = Numbers::default();
    let mut bench = Bench::new();
    for (queries, types, size) in [
        (1, [H, H], 2e-5),
        (40, [H, H], 2e-5),
        (1, [H, H], 3e-3),
        (1, [H, H], 0.2),
        (7, [H, TYPE_BF16], 2e-5),
    ] {
        let setup = Setup {
            queries,
            types,
            ..PLAIN
        };
        let mut operands = Operands::new(&setup, Mask::Causal, false, &mut numbers);
        operands.v = Case::random(types[1], operands.v.ne, PERMUTED, size, &mut numbers);
        operands.compute(&setup);
        let body = operands.place(&setup, &mut bench);
        let what = format!("{queries} {types:?} {size}");
        operands.compare(&body, &mut bench, LIMIT_F16, &what);
    }
}
