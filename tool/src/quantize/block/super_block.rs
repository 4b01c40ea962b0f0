//! Shared by the types with super-blocks: scales of 6 bits under one in half precision, and the
//! search for those with a small error.

use half::f16;

/// Elements of a super-block.
pub const SUPER_BLOCK: usize = 256;

/// Returns the whole number nearest to `x`, ties to the even one, between `least` and `largest`.
pub fn nearest(x: f32, least: f32, largest: f32) -> f32 {
    // Adding and subtracting this number rounds to an integer, in the CPU's rounding mode, many
    // times faster than a function call for each element.
    const NO_FRACTION: f32 = 12_582_912.0;
    x.clamp(least, largest) + NO_FRACTION - NO_FRACTION
}

/// Returns the least number in half precision that is not below `x`, or the largest finite one.
pub fn least_half(x: f32) -> f16 {
    let half = f16::from_f32(x);
    if half.to_f32() >= x {
        return half.min(f16::MAX);
    }
    f16::from_bits(half.to_bits() + 1).min(f16::MAX)
}

/// Returns the number of 6 bits whose product with `d` is nearest to `x`.
pub fn six_bits(x: f32, d: f16) -> u8 {
    if d == f16::ZERO {
        return 0;
    }
    // CAST: a whole number between 0 and 63.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "see above"
    )]
    let code = nearest(x / d.to_f32(), 0.0, 63.0) as u8;
    code
}

/// Rounds of refinement. The loop ends earlier if a round gains nothing.
const ROUNDS: usize = 3;

/// Scales of a super-block, in stored form.
pub trait Grid: Copy {
    /// The elements of each sub-block, or their weights.
    type Subs;

    /// Replaces the scales of each sub-block by the best of them and their neighbours, and returns
    /// the weighted square error of all.
    fn settle(&mut self, x: &Self::Subs, weights: &Self::Subs) -> f64;

    /// Returns the grid whose numbers in half precision have the least error with the codes of this
    /// one; `None` if no element determines them.
    fn refitted(&self, x: &Self::Subs, weights: &Self::Subs) -> Option<Self>;
}

/// Returns a grid with a small error: `plain`, or the one that `searched` becomes. Scales move to
/// better neighbours, and the numbers in half precision to those that fit the codes best, as long
/// as the error becomes smaller.
pub fn refined<G: Grid>(plain: G, searched: G, x: &G::Subs, weights: &G::Subs) -> G {
    let mut best = plain;
    let mut least = best.settle(x, weights);
    let mut grid = searched;
    for _ in 0..ROUNDS {
        let loss = grid.settle(x, weights);
        if loss >= least || loss.is_nan() {
            break;
        }
        (best, least) = (grid, loss);
        match best.refitted(x, weights) {
            Some(next) => grid = next,
            None => break,
        }
    }
    best
}

/// Splits a super-block into its sub-blocks.
pub fn in_subs<const SUB: usize, const SUBS: usize>(x: &[f32; SUPER_BLOCK]) -> [[f32; SUB]; SUBS] {
    std::array::from_fn(|sub| std::array::from_fn(|i| x[sub * SUB + i]))
}

#[cfg(test)]
mod tests {
    use ggml_rust_npu::dequantize;
    use proptest::prelude::*;

    use super::*;
    use crate::quantize::block::{ErrorWeights, Format, search_weights};

    const FORMATS: [Format; 2] = [Format::Q3K, Format::Q4K];

    fn values(format: Format, bytes: &[u8]) -> Vec<f32> {
        let mut out = vec![f32::NAN; bytes.len() / format.dtype().block_bytes() * SUPER_BLOCK];
        let dequantize = dequantize::of(format.dtype()).unwrap();
        dequantize.dequantize(bytes, &mut out);
        out
    }

    fn quantized(format: Format, x: &[f32], importance: Option<&[f32]>) -> Vec<f32> {
        let mut bytes = Vec::new();
        format.quantize_row(x, importance, &mut bytes);
        assert_eq!(
            bytes.len(),
            x.len() / SUPER_BLOCK * format.dtype().block_bytes()
        );
        values(format, &bytes)
    }

    fn loss(x: &[f32], have: &[f32], weights: &[f32]) -> f64 {
        let terms = x.iter().zip(have).zip(weights);
        terms
            .map(|((x, y), w)| f64::from(*w) * (f64::from(*x) - f64::from(*y)).powi(2))
            .sum()
    }

    /// Returns a bound for the error of each weight of a sub-block on the grid from its least to
    /// its largest element: half a step, plus how far rounding the scale and the minimum to six
    /// bits moves the farthest code.
    fn bound(format: Format, x: &[f32]) -> Vec<f64> {
        // SOURCE: IEEE 754: the smallest FP16 is 2^-24, and rounding is to 11 bits.
        let (smallest, rounding) = (2.0f64.powi(-24), 1.0 + 2.0f64.powi(-10));
        let largest = |x: &[f32], sign: f32| x.iter().fold(0.0f32, |max, x| max.max(sign * x));
        let (size, farthest, steps) = match format {
            Format::Q4K => (32, 15.0, 63.0),
            _ => (16, 4.0, 32.0),
        };
        let parts = |x: &[f32]| -> (f64, f64) {
            let (up, down) = (f64::from(largest(x, 1.0)), f64::from(largest(x, -1.0)));
            match format {
                Format::Q4K => ((up + down) / farthest, down),
                _ => (up.max(down) / farthest, 0.0),
            }
        };
        let subs: Vec<(f64, f64)> = x.chunks(size).map(parts).collect();
        let most = |part: fn(&(f64, f64)) -> f64| subs.iter().map(part).fold(0.0, f64::max);
        let d = (most(|sub| sub.0) / steps * rounding).max(smallest);
        let dmin = match format {
            Format::Q4K => (most(|sub| sub.1) / steps * rounding).max(smallest),
            _ => 0.0,
        };
        // Q3_K has one level less on one side, so the extreme value may be off by a whole step.
        let outer = if format == Format::Q4K { 0.5 } else { 1.0 };
        let of_sub = |(scale, _): &(f64, f64)| {
            vec![outer * (scale + d / 2.0) + d / 2.0 * farthest + dmin / 2.0; size]
        };
        subs.iter().flat_map(of_sub).collect()
    }

    fn is_bounded(format: Format, x: &[f32], importance: Option<&[f32]>) -> Result<(), String> {
        let have = quantized(format, x, importance);
        if let Some(at) = have.iter().position(|x| !x.is_finite()) {
            return Err(format!("{format:?} {at}: {}", have[at]));
        }
        let weights = search_weights(x, importance);
        for (block, bounds) in bound(format, x).chunks(SUPER_BLOCK).enumerate() {
            let range = block * SUPER_BLOCK..(block + 1) * SUPER_BLOCK;
            let weights = &weights[range.clone()];
            let have = loss(&x[range.clone()], &have[range], weights);
            let most: f64 = (bounds.iter().zip(weights))
                .map(|(bound, w)| bound * bound * f64::from(*w))
                .sum();
            // Errors are compared in FP32.
            if have > most * (1.0 + 1e-4) {
                return Err(format!("{format:?} {block}: {have:e} is over {most:e}"));
            }
        }
        Ok(())
    }

    /// Numbers of any sign and of sizes that differ by up to `spread` powers of two.
    fn row(spread: i32) -> impl Strategy<Value = Vec<f32>> {
        let number = (-1.0f32..1.0, -spread..=0).prop_map(|(x, size)| x * 2.0f32.powi(size));
        prop::collection::vec(number, 2 * SUPER_BLOCK)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn any_row_in_range_gives_finite_values_with_a_bounded_error(
            x in prop_oneof![row(1), row(8), row(30)],
            size in prop_oneof![Just(0.03f32), Just(1e-4), Just(1e-7), Just(1e-30), Just(60_000.0), Just(3e6)],
            sign in prop_oneof![Just(0.0f32), Just(-1.0), Just(1.0)],
            importance in prop::option::of(row(20)),
        ) {
            let one_sided = |x: &f32| size * if sign == 0.0 { *x } else { sign * x.abs() };
            let x: Vec<f32> = x.iter().map(one_sided).collect();
            let importance = importance.map(|row| row.iter().map(|x| x.abs()).collect::<Vec<_>>());
            for format in FORMATS {
                prop_assert!(x.iter().all(|x| x.abs() <= format.range()));
                if let Err(message) = is_bounded(format, &x, importance.as_deref()) {
                    prop_assert!(false, "{}", message);
                }
            }
        }
    }

    #[test]
    fn rows_at_the_ends_of_the_range_are_finite() {
        for format in FORMATS {
            let range = format.range();
            for x in [
                [range; SUPER_BLOCK],
                [-range; SUPER_BLOCK],
                std::array::from_fn(|i| if i % 2 == 0 { range } else { -range }),
                std::array::from_fn(|i| if i == 7 { -range } else { range / 1e6 }),
                [f32::MIN_POSITIVE; SUPER_BLOCK],
                [0.0; SUPER_BLOCK],
            ] {
                for importance in [
                    None,
                    Some(&[0.0; SUPER_BLOCK][..]),
                    Some(&[1e6; SUPER_BLOCK]),
                ] {
                    let have = quantized(format, &x, importance);
                    for (have, want) in have.iter().zip(&x) {
                        // No value is off by more than the largest magnitude.
                        assert!((have - want).abs() <= range, "{format:?} {have} {want}");
                    }
                }
            }
            assert_eq!(
                quantized(format, &[0.0; SUPER_BLOCK], None),
                [0.0; SUPER_BLOCK]
            );
        }
    }

    #[test]
    fn values_on_a_grid_come_back_exactly() {
        // d and dmin are powers of two, and each sub-block uses all codes, so no other grid fits as
        // well.
        let half = |x: i32| 2.0f32.powi(x);
        let q4: Vec<f32> = (0..SUPER_BLOCK)
            .map(|i| half(-10) * (63 - i / 32 % 3) as f32 * (i % 16) as f32 - half(-9) * 63.0)
            .collect();
        assert_eq!(quantized(Format::Q4K, &q4, None), q4);
        let q3: Vec<f32> = (0..SUPER_BLOCK)
            .map(|i| half(-10) * (32.0 - (i / 16) as f32) * ((i % 8) as f32 - 4.0))
            .collect();
        assert_eq!(quantized(Format::Q3K, &q3, None), q3);
    }

    #[test]
    fn statistics_lose_less_where_it_counts() {
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        let x: Vec<f32> = (0..64 * SUPER_BLOCK).map(|_| next() * next()).collect();
        let importance: Vec<f32> = x.iter().map(|_| (4.0 * next()).exp2()).collect();
        let weights = ErrorWeights::new(&x, &importance).row();
        for format in FORMATS {
            let [with, without] = [Some(&importance[..]), None]
                .map(|importance| loss(&x, &quantized(format, &x, importance), &weights));
            assert!(with < 0.9 * without, "{format:?} {with} {without}");
            let mut rounded = vec![0.0; x.len()];
            format.round_row(&x, &importance, &mut rounded);
            assert_eq!(rounded, quantized(format, &x, Some(&importance)));
        }
    }
}
