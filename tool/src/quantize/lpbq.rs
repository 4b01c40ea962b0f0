//! Low-power block quantization (LPBQ): a weight is the scale of its row times a multiplier of its
//! block times a level.
//!
//! ```text
//! row    | scale S       7 significant bits
//! block  | multiplier m  1 to 16, for 16, 32 or 64 weights
//! weight | level q       -8 to 7          w = S * m * q
//! ```
//!
//! `m * q` is an integer of 8 bits, so an engine that knows one scale for each row computes with
//! such weights without conversion. Two types of ggml hold them without any further rounding,
//! because `S * m` has at most 11 significant bits, which fit into FP16: Q8_0 with `d = S` and `m *
//! q` in its blocks, and Q4_0 with `d = S * m` and `q`, if no block is shorter than Q4_0's 32.
// SOURCE: BlockwiseExpansion of QNN and the grouped block quantization of AIMET, which derive the
// multiplier from the block's largest weight. Here a search chooses the multiplier, and the scale
// within a factor of two, with the least error.

use half::f16;

use super::block::{BLOCK, push_nibbles};

/// Supported block lengths.
pub const BLOCKS: [&str; 3] = ["16", "32", "64"];

/// The largest magnitude of a weight that the grid reaches.
pub const RANGE: f32 = LARGEST_SCALE * 16.0 * 7.0;

/// The largest scale.
// SOURCE: IEEE 754: the largest FP16 is 65504, which is over 127 * 2^9.
const LARGEST_SCALE: f32 = 65_024.0 / 16.0;

/// Blocks have a multiple of this number of elements. K is a whole number of ggml's blocks.
const HALF: usize = BLOCK / 2;

/// The largest multiplier.
const MULTIPLIER_MAX: u8 = 16;

/// Scales that are tried, as parts of the one at which the row's largest weight has level 7 and
/// multiplier 16.
const PARTS: [f32; 8] = [1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5];

/// A row on the grid.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GridRow {
    scale: f32,
    /// Number of elements of a block; the last block may be shorter.
    block: usize,
    /// The multiplier of each block.
    multipliers: Vec<u8>,
    /// The level of each weight.
    levels: Vec<i8>,
}

impl GridRow {
    /// Returns the row of the grid with the least error among those of each scale in [`PARTS`].
    ///
    /// - `row`: K weights; `block`: elements of a block
    /// - `weights`: weights of the square error of each of them, 1 if not given
    pub fn quantize(row: &[f32], block: usize, weights: Option<&[f32]>) -> Self {
        let ones = vec![1.0; if weights.is_none() { row.len() } else { 0 }];
        let weights = weights.unwrap_or(&ones);
        let largest_of = |x: &[f32]| x.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        let largest = largest_of(row);
        // Blocks without statistics must not be clipped in favour of the others.
        let unknown = row.chunks(block).zip(weights.chunks(block));
        let unknown = unknown.filter(|(_, weights)| is_unknown(weights));
        let least = unknown.fold(0.0f32, |max, (x, _)| max.max(largest_of(x)));
        let mut best: Option<(f64, f32, Vec<u8>)> = None;
        for part in PARTS {
            let of_all = largest / 7.0 / f32::from(MULTIPLIER_MAX) * part;
            let scale = representable(of_all.max(least / 7.0 / f32::from(MULTIPLIER_MAX)));
            let mut multipliers = Vec::with_capacity(row.len().div_ceil(block));
            let mut total = 0.0;
            for (x, w) in row.chunks(block).zip(weights.chunks(block)) {
                let (multiplier, error) = multiplier(x, w, scale);
                multipliers.push(multiplier);
                total += f64::from(error);
            }
            if best.as_ref().is_none_or(|(least, ..)| total < *least) {
                best = Some((total, scale, multipliers));
            }
        }
        let (_, scale, multipliers) = best.unwrap_or_default();
        // CAST: whole numbers between -8 and 7.
        #[expect(clippy::cast_possible_truncation, reason = "see above")]
        let levels = (row.chunks(block).zip(&multipliers))
            .flat_map(|(x, m)| x.iter().map(|x| level(*x, scale, *m) as i8))
            .collect();
        Self {
            scale,
            block,
            multipliers,
            levels,
        }
    }

    /// Appends blocks of Q8_0.
    pub fn push_q8_0(&self, out: &mut Vec<u8>) {
        let d = f16::from_f32(self.scale).to_le_bytes();
        for (index, levels) in self.levels.chunks(BLOCK).enumerate() {
            out.extend(d);
            let multiplier = |i: usize| self.multipliers[(index * BLOCK + i) / self.block];
            out.extend((levels.iter().enumerate()).map(|(i, level)| {
                // CAST: from -8 * 15 to 7 * 16.
                (level * multiplier(i).cast_signed()).cast_unsigned()
            }));
        }
    }

    /// Appends blocks of Q4_0.
    ///
    /// # Panics
    /// If the row's blocks are shorter than those of ggml.
    pub fn push_q4_0(&self, out: &mut Vec<u8>) {
        assert!(self.block >= BLOCK, "one scale for each block of Q4_0");
        for (index, levels) in self.levels.as_chunks::<BLOCK>().0.iter().enumerate() {
            let multiplier = self.multipliers[index * BLOCK / self.block];
            let d = f16::from_f32(self.scale * f32::from(multiplier));
            push_nibbles(d, &levels.map(|level| (level + 8).cast_unsigned()), out);
        }
    }
}

/// Returns the next larger number of 7 significant bits that FP16 has, times 16, too.
fn representable(x: f32) -> f32 {
    // The low 17 of an `f32`'s 23 fraction bits.
    const REST: u32 = (1 << 17) - 1;
    // SOURCE: IEEE 754: the smallest FP16 is 2^-24.
    const SMALLEST: f32 = 1.0 / 16_777_216.0;
    let short = f32::from_bits((x.to_bits() + REST) & !REST);
    ((short / SMALLEST).ceil() * SMALLEST).min(LARGEST_SCALE)
}

/// Returns the level nearest to `x`, ties to the even one.
fn level(x: f32, scale: f32, multiplier: u8) -> f32 {
    // Adding and subtracting this number rounds to an integer, in the CPU's rounding mode, many
    // times faster than a function call for each element.
    const NO_FRACTION: f32 = 12_582_912.0;
    let step = scale * f32::from(multiplier);
    let inverse = if step == 0.0 { 0.0 } else { 1.0 / step };
    // -8 times 16 is -128, which no Q8_0 quantizer produces, so kernels need not handle it.
    let lowest = if multiplier == MULTIPLIER_MAX {
        -7.0
    } else {
        -8.0
    };
    (x * inverse).clamp(lowest, 7.0) + NO_FRACTION - NO_FRACTION
}

/// Returns `true` for a block without statistics.
fn is_unknown(weights: &[f32]) -> bool {
    weights.iter().all(|weight| *weight == 0.0)
}

/// Returns the multiplier of a block with the least error, and that. If all weights of the error
/// are zero, the multiplier is the best for equal weights, because other text than that of the
/// statistics may use these columns.
fn multiplier(x: &[f32], weights: &[f32], scale: f32) -> (u8, f32) {
    if is_unknown(weights) {
        let (best, _) = multiplier(x, &vec![1.0; x.len()], scale);
        return (best, 0.0);
    }
    let error = |multiplier: u8| -> f32 {
        let step = scale * f32::from(multiplier);
        // As many sums as a vector register has lanes.
        let mut sums = [0.0; HALF];
        let (x, weights) = (x.as_chunks::<HALF>().0, weights.as_chunks::<HALF>().0);
        for (x, w) in x.iter().zip(weights) {
            for i in 0..HALF {
                let error = x[i] - level(x[i], scale, multiplier) * step;
                sums[i] += w[i] * error * error;
            }
        }
        sums.iter().sum()
    };
    let mut best = (1, error(1));
    for multiplier in 2..=MULTIPLIER_MAX {
        let error = error(multiplier);
        if error < best.1 {
            best = (multiplier, error);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the numbers whose size differs from block to block, by up to `spread` powers of two.
    #[expect(clippy::cast_possible_truncation, reason = "rounded to f32")]
    fn numbers(seed: u32, n: usize, spread: f64) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
        let mut uniform = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f64::from(state >> 8) / f64::from(1 << 23) - 1.0
        };
        let mut size = 1.0;
        let mut number = |i: usize| {
            if i.is_multiple_of(16) {
                size = (uniform() * spread).exp2();
            }
            (uniform() * uniform() * size) as f32
        };
        (0..n).map(&mut number).collect()
    }

    /// Returns the values of blocks of Q8_0 and Q4_0, as ggml defines them.
    fn values(bytes: &[u8], block_bytes: usize) -> Vec<f64> {
        let block = |block: &[u8]| -> Vec<f64> {
            let d = f16::from_le_bytes([block[0], block[1]]).to_f64();
            let level = |i: usize| match block_bytes {
                34 => f64::from(block[2 + i].cast_signed()),
                _ => f64::from(block[2 + i % 16] >> (i / 16 * 4) & 15) - 8.0,
            };
            (0..32).map(|i| d * level(i)).collect()
        };
        bytes.chunks_exact(block_bytes).flat_map(block).collect()
    }

    fn q8_0(row: &GridRow) -> Vec<f64> {
        let mut bytes = Vec::new();
        row.push_q8_0(&mut bytes);
        values(&bytes, 34)
    }

    fn q4_0(row: &GridRow) -> Vec<f64> {
        let mut bytes = Vec::new();
        row.push_q4_0(&mut bytes);
        values(&bytes, 18)
    }

    fn error(x: &[f32], have: &[f64], weights: &[f32]) -> f64 {
        let terms = x.iter().zip(have).zip(weights);
        terms
            .map(|((x, y), w)| f64::from(*w) * (f64::from(*x) - y).powi(2))
            .sum()
    }

    /// Returns the scheme by its definition, in `f64`: the multiplier follows from the block's
    /// largest weight, and weights are rounded on the final grid.
    fn by_definition(row: &[f32], block: usize) -> Vec<f64> {
        let largest = |x: &[f32]| x.iter().fold(0.0f64, |max, x| max.max(f64::from(x.abs())));
        let scale = largest(row) / 7.0 / 16.0;
        let rounded = |x: &[f32]| -> Vec<f64> {
            let multiplier = (largest(x) / 7.0 / scale).round().clamp(1.0, 16.0);
            let step = scale * multiplier;
            let value = |x: &f32| (f64::from(*x) / step).round_ties_even().clamp(-7.0, 7.0) * step;
            x.iter().map(value).collect()
        };
        row.chunks(block).flat_map(rounded).collect()
    }

    #[test]
    fn a_block_whose_inputs_the_statistics_do_not_know_keeps_its_range() {
        for seed in 1..20 {
            let mut row = numbers(seed, 128, 1.0);
            // This block has the row's largest weights. A scale that suits the others would clip
            // them.
            row[32..64].iter_mut().for_each(|x| *x *= 20.0);
            let mut weights = vec![1.0; 128];
            weights[32..64].fill(0.0);
            let plain = GridRow::quantize(&row, 32, None);
            let weighted = GridRow::quantize(&row, 32, Some(&weights));
            let error = |grid: &GridRow| -> f32 {
                let value = |i: usize| {
                    grid.scale * f32::from(grid.multipliers[i / 32]) * f32::from(grid.levels[i])
                };
                (32..64).map(|i| (row[i] - value(i)).powi(2)).sum()
            };
            let (have, want) = (error(&weighted), error(&plain));
            assert!(have < 1.5 * want, "{seed}: {have} {want}");
        }
    }

    #[test]
    fn both_types_hold_the_products_exactly() {
        for (seed, spread) in [(1, 0.0), (2, 2.0), (3, 8.0), (4, 20.0)] {
            for (block, k) in [(16, 96), (32, 96), (64, 96), (64, 256)] {
                let row = GridRow::quantize(&numbers(seed, k, spread), block, None);
                let scale = f64::from(row.scale);
                let exact: Vec<f64> = (row.levels.iter().enumerate())
                    .map(|(i, q)| scale * f64::from(row.multipliers[i / block]) * f64::from(*q))
                    .collect();
                assert_eq!(q8_0(&row), exact, "{seed} {block}");
                if block >= BLOCK {
                    assert_eq!(q4_0(&row), exact, "{seed} {block}");
                }
                assert!(row.multipliers.iter().all(|m| (1..=16).contains(m)));
                assert!(row.levels.iter().all(|q| (-8..=7).contains(q)));
            }
        }
    }

    #[test]
    fn no_other_multiplier_of_the_row_s_scale_is_better() {
        for seed in 0..30 {
            let x = numbers(seed, 128, 2.0);
            let weights: Vec<f32> = numbers(seed + 100, 128, 1.0)
                .iter()
                .map(|x| x * x)
                .collect();
            let row = GridRow::quantize(&x, 32, Some(&weights));
            let (scale, have) = (f64::from(row.scale), q8_0(&row));
            for block in 0..4 {
                let range = block * 32..block * 32 + 32;
                let (x, weights) = (&x[range.clone()], &weights[range.clone()]);
                let with = |m: u8| {
                    let step = scale * f64::from(m);
                    let lowest = if m == 16 { -7.0 } else { -8.0 };
                    let value = |x: &f32| (f64::from(*x) / step).round().clamp(lowest, 7.0) * step;
                    error(x, &x.iter().map(value).collect::<Vec<_>>(), weights)
                };
                let best = (1..=16).map(with).fold(f64::INFINITY, f64::min);
                let have = error(x, &have[range], weights);
                assert!(have <= best * (1.0 + 1e-4), "{seed} {block}: {have} {best}");
            }
        }
    }

    #[test]
    fn the_search_loses_less_than_the_definition() {
        for block in [16, 32, 64] {
            let (mut have, mut want) = (0.0, 0.0);
            for seed in 0..50 {
                let x = numbers(seed, 256, 1.0);
                let ones = [1.0; 256];
                have += error(&x, &q8_0(&GridRow::quantize(&x, block, None)), &ones);
                want += error(&x, &by_definition(&x, block), &ones);
            }
            // A search that only followed the definition would give a ratio of 1.
            assert!(
                have < 0.95 * want && have > 0.2 * want,
                "{block}: {}",
                have / want
            );
        }
    }

    #[test]
    fn shorter_blocks_and_statistics_lose_less_where_it_counts() {
        let x = numbers(7, 512, 2.0);
        let weights: Vec<f32> = numbers(8, 512, 3.0).iter().map(|x| x * x).collect();
        let of = |block, with: Option<&[f32]>| {
            error(&x, &q8_0(&GridRow::quantize(&x, block, with)), &weights)
        };
        assert!(of(32, Some(&weights)) < 0.95 * of(32, None));
        let [short, middle, long] = [16, 32, 64].map(|block| of(block, Some(&weights)));
        assert!(
            short < 0.95 * middle && middle < 0.95 * long,
            "{short} {middle} {long}"
        );
    }

    #[test]
    fn rows_at_the_ends_of_fp16_are_rows_like_any() {
        for size in [0.0, 1e-30, 1e-7, 1e-4, 60_000.0, 400_000.0] {
            let x: Vec<f32> = numbers(5, 64, 0.0).iter().map(|x| x * size).collect();
            let row = GridRow::quantize(&x, 32, None);
            let have = q8_0(&row);
            assert_eq!(have, q4_0(&row), "{size}");
            let largest = have.iter().fold(0.0f64, |max, y| max.max(y.abs()));
            let want = x.iter().fold(0.0f64, |max, x| max.max(f64::from(x.abs())));
            // The clipping may not exceed half of the largest step, or the smallest number.
            assert!(
                largest <= want * 1.08 + f64::from(f16::from_bits(1)),
                "{size}: {largest} {want}"
            );
            if size >= 1e-4 {
                assert!(largest > want * 0.8, "{size}: {largest} {want}");
            }
        }
    }
}
