//! Proves that INT4 clips have the properties that their methods promise, for ordinary and for
//! unusual values; measures their speed.
#![expect(
    clippy::cast_possible_truncation,
    clippy::unwrap_used,
    reason = "random values are rounded to FP32; an endless iterator has a next element"
)]

use std::time::Instant;

use proptest::prelude::*;
use rknpu_ops::calibrate::{BINS, Clip, Method, clip, clip_rows};
use rknpu_ops::pack::Rows;
use test_kit::Numbers;

const METHODS: [Method; 5] = [
    Method::AbsMax,
    Method::Percentile(0.995),
    Method::Percentile(0.9),
    Method::Mse,
    Method::KlDivergence,
];

/// Values in (0, 1], the same for the same seed.
fn uniform(seed: u64) -> impl Iterator<Item = f64> {
    let mut numbers = Numbers::fixed(seed);
    std::iter::repeat_with(move || ((numbers.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64)
}

/// Normal values of standard deviation 1.
fn gaussian(count: usize, seed: u64) -> Vec<f32> {
    let mut uniform = uniform(seed);
    let mut next = || uniform.next().unwrap();
    let value = || ((-2.0 * next().ln()).sqrt() * (std::f64::consts::TAU * next()).cos()) as f32;
    std::iter::repeat_with(value).take(count).collect()
}

/// Values of a Laplace distribution of standard deviation 1.
fn laplace(count: usize, seed: u64) -> Vec<f32> {
    let value = |u: f64| {
        let v = u - 0.5;
        -v.signum() * (1.0 - 2.0 * v.abs()).max(1e-300).ln() / 2f64.sqrt()
    };
    uniform(seed).map(|u| value(u) as f32).take(count).collect()
}

/// Squared error of `values` as INT4 with a clip, relative to their square.
fn error(values: &[f32], clip: Clip, method: Method) -> f64 {
    let scale = f64::from(clip.scale_i4(values, method));
    let step = f64::from(clip.magnitude()) / 7.5;
    let level = |x: f64| ((x / step).clamp(-7.5, 7.5) - 0.5).round_ties_even() + 0.5;
    let (mut error, mut total) = (0.0, 0.0);
    for x in values.iter().map(|x| f64::from(*x)) {
        error += (x - scale * level(x)).powi(2);
        total += x * x;
    }
    error / total
}

fn absmax(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |max, x| max.max(x.abs()))
}

#[test]
fn normal_values_are_clipped_where_the_error_is_least() {
    let values = gaussian(100_000, 1);
    let found = clip(&values, Method::Mse);
    // The candidates are 4 % apart here. Near its minimum the error is flat, so the distance costs
    // far less than 1 %.
    let best = (150..=450)
        .map(|c| {
            let values = &values[..10_000];
            let scaled: Vec<f32> = values.iter().map(|x| x * 100.0 / c as f32).collect();
            let step = |x: f32| {
                ((f64::from(x) * 7.5).clamp(-7.5, 7.5) - 0.5).round_ties_even() / 7.5 + 0.5 / 7.5
            };
            let error: f64 = scaled
                .iter()
                .map(|x| (f64::from(*x) - step(*x)).powi(2))
                .sum();
            error * (f64::from(c) / 100.0).powi(2)
        })
        .fold(f64::INFINITY, f64::min)
        / 10_000.0;
    assert!(error(&values, found, Method::Mse) <= best * 1.05);
    assert!((2.2..2.8).contains(&found.magnitude()), "{found:?}");
}

#[test]
fn heavier_tails_get_wider_clips_that_still_clip() {
    for method in [Method::Mse, Method::KlDivergence, Method::Percentile(0.999)] {
        let [normal, heavy] = [gaussian(65_536, 2), laplace(65_536, 3)];
        let [a, b] = [&normal, &heavy].map(|values| clip(values, method).magnitude());
        assert!(a < b, "{method:?}: {a} {b}");
        assert!(a < absmax(&normal) && b < absmax(&heavy), "{method:?}");
        assert!(a > 1.5 && b < 12.0, "{method:?}: {a} {b}");
    }
}

#[test]
fn an_outlier_does_not_set_the_clip() {
    let mut values = gaussian(8192, 4);
    values[77] = -60.0;
    for method in [Method::Mse, Method::KlDivergence, Method::Percentile(0.999)] {
        let clip = clip(&values, method).magnitude();
        assert!((1.0..30.0).contains(&clip), "{method:?}: {clip}");
    }
    assert_eq!(clip(&values, Method::AbsMax).magnitude(), 60.0);
}

#[test]
fn pooled_rows_share_a_clip_in_units_of_their_rms() {
    let shape = gaussian(16 * 512, 5);
    let sizes = [1e-20f32, 3.0, 1e15, 0.25];
    let rows: Vec<f32> = shape
        .iter()
        .enumerate()
        .map(|(i, x)| x * sizes[i / 512 % 4])
        .collect();
    for method in [Method::Percentile(0.98), Method::KlDivergence] {
        clip_rows(Rows::new(&rows, 16, 512, 512), method, |m, clip| {
            let row = &rows[m * 512..][..512];
            let rms = sizes[m % 4];
            let ratio = clip.magnitude() / rms;
            assert!((2.0..4.0).contains(&ratio), "{method:?} row {m}: {ratio}");
            assert!(clip.magnitude() <= absmax(row));
        });
    }
}

#[test]
fn zeros_and_tiny_values_have_scale_zero_and_non_finite_ones_nan() {
    for method in METHODS {
        for values in [vec![], vec![0.0; 40], vec![-0.0; 3], vec![1e-42; 33]] {
            let clip = clip(&values, method);
            assert_eq!(clip.scale_i4(&values, method), 0.0, "{method:?} {values:?}");
        }
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 15, 16, 40] {
                let mut values = gaussian(41, 6);
                values[at] = bad;
                let clip = clip(&values, method);
                assert!(clip.magnitude().is_nan(), "{method:?} {bad} at {at}");
                assert!(clip.scale_i4(&values, method).is_nan());
            }
        }
    }
}

#[test]
fn a_bad_row_spoils_no_other_of_its_pool() {
    let mut rows = gaussian(4 * 256, 7);
    rows[256] = f32::NAN;
    rows[2 * 256..3 * 256].fill(0.0);
    for method in METHODS {
        let mut clips = Vec::new();
        clip_rows(Rows::new(&rows, 4, 256, 256), method, |_, clip| {
            clips.push(clip.magnitude())
        });
        assert!(clips[1].is_nan() && clips[2] == 0.0, "{method:?}");
        assert!(clips[0] > 1.0 && clips[3] > 1.0, "{method:?}: {clips:?}");
    }
}

/// The largest value is on the upper end of the histogram, where a bin number must not run past
/// the last one.
#[test]
fn the_largest_value_falls_into_the_last_bin() {
    for values in [
        vec![1.0],
        vec![-1.0],
        vec![0.3, -0.3],
        vec![f32::MAX, -f32::MAX, 1.0],
        vec![f32::MIN_POSITIVE; 5],
        (0..4 * BINS).map(|i| i as f32 - 4096.0).collect(),
    ] {
        for method in METHODS {
            let clip = clip(&values, method).magnitude();
            assert!(
                clip > 0.0 && clip <= absmax(&values),
                "{method:?} {clip} of {}",
                absmax(&values)
            );
        }
    }
}

#[test]
fn few_distinct_values_leave_bins_empty_and_no_nan() {
    for levels in [1, 2, 3, 15] {
        let values: Vec<f32> = (0..6000).map(|i| (i % levels) as f32 - 0.5).collect();
        for method in METHODS {
            let clip = clip(&values, method).magnitude();
            assert!(clip > 0.0 && clip <= absmax(&values), "{method:?} {levels}");
        }
    }
}

#[test]
fn percentiles_leave_out_what_they_say() {
    let values = gaussian(50_000, 8);
    for fraction in [0.9f32, 0.99, 0.999, 1.0] {
        let clip = clip(&values, Method::Percentile(fraction)).magnitude();
        let beyond = values.iter().filter(|x| x.abs() > clip).count() as f64 / 50_000.0;
        let want = 1.0 - f64::from(fraction);
        // The clip is rounded up to one of a thousand bins, each of which has less than 1 % of the
        // values.
        assert!(
            beyond <= want + 1e-9 && beyond >= want - 0.01,
            "{fraction}: {beyond}"
        );
    }
}

proptest! {
    #[test]
    fn clips_are_within_the_values_and_do_not_depend_on_size(
        values in prop::collection::vec(-1f32..1.0, 1..300),
        exponent in -60i32..60,
    ) {
        for method in METHODS {
            let found = clip(&values, method);
            prop_assert!(found.magnitude() <= absmax(&values));
            prop_assert!(found.magnitude() > 0.0 || absmax(&values) == 0.0);
            prop_assert_eq!(found, clip(&values, method));
            // Multiplying by a power of two changes no mantissa.
            let factor = 2f32.powi(exponent);
            let scaled: Vec<f32> = values.iter().map(|x| x * factor).collect();
            if absmax(&values) > 1e-6 {
                let again = clip(&scaled, method).magnitude();
                let off = (again / factor / found.magnitude() - 1.0).abs();
                prop_assert!(off < 1e-5, "{:?}: {} {}", method, again / factor, found.magnitude());
            }
        }
    }

    #[test]
    fn least_error_is_not_above_that_of_the_largest_magnitude(
        values in prop::collection::vec(-1f32..1.0, 1..300),
        outlier in 0f32..100.0,
    ) {
        let mut values = values;
        values[0] += outlier;
        prop_assume!(absmax(&values) > 0.0);
        let plain = error(&values, clip(&values, Method::AbsMax), Method::AbsMax);
        let best = error(&values, clip(&values, Method::Mse), Method::Mse);
        // `clip` compares sums of several hundred terms in FP32, this test in FP64.
        prop_assert!(best <= plain * (1.0 + 1e-4) + 1e-6, "{} {}", best, plain);
    }
}

#[test]
#[ignore = "a measurement"]
fn speed() {
    for (count, k) in [(64, 576), (64, 512), (64, 128)] {
        let rows = gaussian(count * k, 9);
        for method in METHODS {
            let mut runs: Vec<f64> = (0..200)
                .map(|_| {
                    let start = Instant::now();
                    let mut sum = 0.0;
                    let view = Rows::new(&rows, count, k, k);
                    clip_rows(view, method, |m, clip| {
                        sum += clip.scale_i4(view.row(m), method);
                    });
                    assert!(std::hint::black_box(sum) > 0.0);
                    start.elapsed().as_secs_f64()
                })
                .collect();
            runs.sort_by(f64::total_cmp);
            let ns = runs[runs.len() / 2] * 1e9 / (count * k) as f64;
            println!("{count} x {k} {method:?}: {ns:.2} ns per weight");
        }
    }
}
