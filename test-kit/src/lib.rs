//! Code for the tests of several crates: numbers from a seed, the distance between results, the
//! constants and structures of C headers, and programs that do not depend on the surroundings of
//! the test.

use std::env;
use std::path::Path;

mod header;
mod surroundings;

pub use header::Header;
pub use surroundings::{command, foreign_variables};

/// Makes a FIFO without another process: under qemu-aarch64 a child of a process with several
/// threads may wait for ever.
///
/// # Panics
/// If the system makes none.
pub fn make_fifo(path: &Path) {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

/// Pseudo-random numbers: the same seed gives the same numbers.
// SOURCE: splitmix64, Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
// OOPSLA 2014.
#[derive(Clone, Debug)]
pub struct Numbers(u64);

impl Numbers {
    /// Starts with a seed, which a failed test's output shows. `NPU_TEST_SEED` replaces it.
    ///
    /// # Panics
    /// If `NPU_TEST_SEED` is not a number.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let seed = env::var("NPU_TEST_SEED").map_or(seed, |text| {
            text.parse()
                .unwrap_or_else(|_| panic!("NPU_TEST_SEED={text:?} is no number"))
        });
        println!("NPU_TEST_SEED={seed}");
        Self(seed)
    }

    /// Starts with a fixed seed, which no variable replaces and no failure prints: for data that a
    /// test makes many times, or compares with a record.
    #[must_use]
    pub const fn fixed(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns 64 random bits.
    pub const fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns an integer less than `end`.
    ///
    /// # Panics
    /// If `end` is 0.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the remainder is less than a usize"
    )]
    pub const fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }

    /// Returns a number in [-1, 1), a multiple of 2^-23.
    pub const fn float(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }

    /// Returns `count` numbers in [-1, 1).
    pub fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.float()).collect()
    }

    /// Returns the choices of `tokens` tokens, `used` of `experts` experts each. A token chooses an
    /// expert once: otherwise the result of MUL_MAT_ID is undefined.
    ///
    /// # Panics
    /// If there are fewer experts than a token uses, or more than an `i32` counts.
    pub fn choices(&mut self, tokens: usize, used: usize, experts: usize) -> Vec<i32> {
        assert!(used <= experts, "{used} of {experts} experts");
        let end = i32::try_from(experts).expect("few experts");
        let mut all: Vec<i32> = (0..end).collect();
        let mut chosen = Vec::with_capacity(tokens * used);
        for _ in 0..tokens {
            for slot in 0..used {
                all.swap(slot, slot + self.below(experts - slot));
            }
            chosen.extend_from_slice(&all[..used]);
        }
        chosen
    }
}

impl Default for Numbers {
    /// Starts with the seed of tests that need no particular one, as [`Self::new`] does.
    fn default() -> Self {
        Self::new(20_261_120)
    }
}

/// Returns the normalized mean squared error of `have` against `want`, by which llama.cpp's
/// test-backend-ops judges products: the sum of squared differences over the sum of squares. It is
/// infinite if the lengths differ or a value of `have` is not finite.
#[must_use]
pub fn nmse(have: &[f32], want: &[f64]) -> f64 {
    if have.len() != want.len() || have.iter().any(|x| !x.is_finite()) {
        return f64::INFINITY;
    }
    let error: f64 = have
        .iter()
        .zip(want)
        .map(|(x, y)| (f64::from(*x) - y).powi(2))
        .sum();
    let power: f64 = want.iter().map(|y| y * y).sum();
    if power == 0.0 { error } else { error / power }
}

#[cfg(test)]
mod tests {
    use super::*;

    // SOURCE: the first outputs of the authors' splitmix64.c with the state 1234567.
    #[test]
    fn bits_are_those_of_the_published_generator() {
        let mut numbers = Numbers::fixed(1_234_567);
        let have: Vec<u64> = (0..3).map(|_| numbers.bits()).collect();
        assert_eq!(
            have,
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423
            ]
        );
    }

    #[test]
    fn numbers_lie_in_their_ranges() {
        let mut numbers = Numbers::new(1);
        for x in numbers.floats(10_000) {
            assert!((-1.0..1.0).contains(&x), "{x}");
        }
        assert!((0..10_000).all(|_| numbers.below(7) < 7));
    }

    #[test]
    fn a_token_chooses_an_expert_once_and_all_are_chosen() {
        let mut numbers = Numbers::new(2);
        for used in [1, 3, 5] {
            let chosen = numbers.choices(100, used, 5);
            for token in chosen.chunks_exact(used) {
                let mut different = token.to_vec();
                different.sort_unstable();
                different.dedup();
                assert_eq!(different.len(), used, "{token:?}");
            }
            assert!((0..5).all(|expert| chosen.contains(&expert)));
            assert_eq!(chosen.len(), 100 * used);
        }
    }

    #[test]
    fn the_error_of_what_is_missing_or_not_finite_is_infinite() {
        assert_eq!(nmse(&[1.0, 3.0], &[1.0, 2.0]), 0.2);
        assert_eq!(nmse(&[1.0], &[1.0, 2.0]), f64::INFINITY);
        assert_eq!(nmse(&[f32::NAN], &[1.0]), f64::INFINITY);
        assert_eq!(nmse(&[0.5], &[0.0]), 0.25);
    }
}
