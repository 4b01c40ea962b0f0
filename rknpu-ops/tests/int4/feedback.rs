//! Proves that rounding with feedback costs results less than rounding weights one by one, by the
//! definition of the cost, in INT4 and in INT8.

use rknpu_ops::calibrate::Method;
use rknpu_ops::feedback::{self, Feedback, RoundingScratch};
use rknpu_ops::int4::quantize_group_i4;
use rknpu_ops::pack::Rows;
use rknpu_ops::quant::quantize_row_i8;
use rknpu_ops::rotation::Rotation;

use super::{digits_of, gaussian};

const K: usize = 160;
const SEGMENT_K: usize = 96;
const COUNT: usize = 24;

/// Second moments of each segment of the inputs: rotated, with the mean squares `means` before.
fn moments(means: &[f64]) -> Vec<Vec<Vec<f64>>> {
    let rotation = Rotation::new(K);
    let rotated: Vec<Vec<f32>> = (0..K)
        .map(|c| {
            let mut row = vec![0.0; K];
            row[c] = 1.0;
            rotation.apply(&mut row);
            row
        })
        .collect();
    let entry = |i: usize, j: usize| -> f64 {
        let terms = rotated.iter().zip(means);
        terms
            .map(|(r, mean)| mean * f64::from(r[i]) * f64::from(r[j]))
            .sum()
    };
    let segment = |range: std::ops::Range<usize>| {
        let row = |i: usize| range.clone().map(|j| entry(i, j)).collect();
        range.clone().map(row).collect()
    };
    vec![segment(0..SEGMENT_K), segment(SEGMENT_K..K)]
}

/// `H = U D Uᵀ`, column by column from the last.
fn feedback(moments: &[Vec<f64>]) -> Feedback {
    let k = moments.len();
    let mut rest = moments.to_vec();
    let mut upper = vec![vec![0.0; k]; k];
    let mut worth = vec![0.0; k];
    for c in (0..k).rev() {
        worth[c] = rest[c][c];
        for j in 0..c {
            upper[j][c] = rest[j][c] / worth[c];
        }
        for i in 0..c {
            for j in 0..c {
                rest[i][j] -= upper[i][c] * upper[j][c] * worth[c];
            }
        }
    }
    let worth = worth.iter().map(|d| *d as f32).collect();
    let rows = upper.iter().enumerate();
    let behind = rows.flat_map(|(j, row)| row[j + 1..].iter().map(|u| *u as f32));
    Feedback::new(worth, behind.collect())
}

/// Sum of `e H eᵀ` over all rows and segments.
fn cost(rows: &[f32], moments: &[Vec<Vec<f64>>], feedback: &[Feedback]) -> f64 {
    let mut out = vec![0; COUNT * K / 2];
    let mut scales = vec![vec![0.0; COUNT]; 2];
    let mut views: Vec<&mut [f32]> = scales.iter_mut().map(Vec::as_mut_slice).collect();
    let src = Rows::new(rows, COUNT, K, K);
    quantize_group_i4(src, SEGMENT_K, Method::Mse, feedback, &mut out, &mut views);
    let levels = digits_of(&out);
    let mut total = 0.0;
    for (segment, (moments, scales)) in moments.iter().zip(&scales).enumerate() {
        for (m, scale) in scales.iter().enumerate() {
            let first = m * K + segment * SEGMENT_K;
            let e: Vec<f64> = (first..first + moments.len())
                .map(|i| f64::from(rows[i]) - (f64::from(levels[i]) + 0.5) * f64::from(*scale))
                .collect();
            for (row, error) in moments.iter().zip(&e) {
                let with_row: f64 = row.iter().zip(&e).map(|(h, e)| h * e).sum();
                total += error * with_row;
            }
        }
    }
    total
}

/// Inputs whose sizes differ, as those of models do: `e` to the power of a normal value, times
/// `spread`.
fn means(spread: f64) -> Vec<f64> {
    let sizes = gaussian(K, 5).into_iter();
    sizes.map(|x| (2.0 * spread * f64::from(x)).exp()).collect()
}

#[test]
fn what_rounding_loses_is_made_up_for_where_inputs_differ() {
    let mut rows = gaussian(COUNT * K, 8);
    let rotation = Rotation::new(K);
    rows.chunks_exact_mut(K).for_each(|row| rotation.apply(row));
    for (spread, most) in [(0.5, 0.85), (1.0, 0.5), (2.0, 0.2)] {
        let moments = moments(&means(spread));
        let feedback: Vec<Feedback> = moments.iter().map(|part| self::feedback(part)).collect();
        let [with, without] = [&feedback[..], &[]].map(|feedback| cost(&rows, &moments, feedback));
        assert!(
            with < most * without,
            "spread {spread}: {:.3}",
            with / without
        );
    }
}

/// Sum of `e H eᵀ` over all rows in INT8, with one scale for all segments of a row.
fn cost_i8(rows: &[f32], moments: &[Vec<Vec<f64>>], feedback: &[Feedback]) -> f64 {
    let mut work = RoundingScratch::default();
    let mut total = 0.0;
    for row in rows.chunks_exact(K) {
        let mut levels = [0; K];
        let scale = match feedback {
            [] => quantize_row_i8(row, &mut levels),
            feedback => feedback::quantize_row_i8(feedback, row, &mut work, &mut levels),
        };
        let errors = row.iter().zip(levels);
        let errors = errors.map(|(x, q)| f64::from(*x) - f64::from(q) * f64::from(scale));
        let errors: Vec<f64> = errors.collect();
        for (moments, e) in moments.iter().zip(errors.chunks(SEGMENT_K)) {
            for (row, error) in moments.iter().zip(e) {
                let with_row: f64 = row.iter().zip(e).map(|(h, e)| h * e).sum();
                total += error * with_row;
            }
        }
    }
    total
}

#[test]
fn int8_loses_less_where_inputs_differ_and_nothing_where_they_are_alike() {
    let mut rows = gaussian(COUNT * K, 9);
    let rotation = Rotation::new(K);
    rows.chunks_exact_mut(K).for_each(|row| rotation.apply(row));
    for (spread, most) in [(0.0, 1.0), (0.5, 0.85), (1.0, 0.5), (2.0, 0.2)] {
        let moments = moments(&means(spread));
        let feedback: Vec<Feedback> = moments.iter().map(|part| self::feedback(part)).collect();
        let [with, without] = [&feedback[..], &[]].map(|part| cost_i8(&rows, &moments, part));
        assert!(
            with <= most * without,
            "spread {spread}: {:.3}",
            with / without
        );
    }
}

#[test]
fn rows_without_a_scale_are_as_without_feedback_in_int8() {
    let feedback: Vec<Feedback> = moments(&means(1.0))
        .iter()
        .map(|part| self::feedback(part))
        .collect();
    let mut work = RoundingScratch::default();
    let mut row = [0.0; K];
    let mut levels = [1; K];
    let scale = feedback::quantize_row_i8(&feedback, &row, &mut work, &mut levels);
    assert_eq!((scale, levels), (0.0, [0; K]));
    row[K - 1] = f32::NAN;
    let scale = feedback::quantize_row_i8(&feedback, &row, &mut work, &mut levels);
    assert!(scale.is_nan() && levels == [0; K]);
}

#[test]
fn rows_that_cannot_be_rounded_are_as_without() {
    let feedback: Vec<Feedback> = moments(&means(1.0))
        .iter()
        .map(|part| self::feedback(part))
        .collect();
    let mut rows = vec![0.0; 3 * K];
    rows[2 * K - 1] = f32::NAN;
    rows[2 * K..].fill(1.0);
    let mut out = vec![0x5a; 3 * K / 2];
    let mut scales = [[-1.0; 4], [-1.0; 4]];
    let mut views: Vec<&mut [f32]> = scales.iter_mut().map(|set| &mut set[..]).collect();
    let src = Rows::new(&rows, 3, K, K);
    quantize_group_i4(src, SEGMENT_K, Method::Mse, &feedback, &mut out, &mut views);
    let [first, second] = scales;
    assert_eq!([first[0], first[1], second[0]], [0.0; 3]);
    assert!(second[1].is_nan() && first[2] > 0.0 && second[2] > 0.0);
    assert_eq!([first[3], second[3]], [-1.0; 2]);
    assert_eq!(out[..K], [0; K], "zeros, and a segment that is not finite");
}

#[test]
#[should_panic(expected = "elements behind the diagonal")]
fn a_factor_of_another_size_is_refused() {
    let _ = Feedback::new(vec![1.0; 3], vec![0.0; 2]);
}
