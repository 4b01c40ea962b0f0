//! Products of matrices in two halves on the matrix unit.
//!
//! FP16 alone would leave errors of 2^-11. So a matrix is two tiles of each 32 × 32 elements: the
//! rounded elements (high) and their rounding errors (low). A product is the sum of three: high ·
//! high, high · low and low · high. The unit's accumulator is wider than FP32. For the low half of
//! a product, the unit computes the product a second time, and subtracts the high half times the
//! unit matrix.

use crate::hmx::Hmx;
use crate::hvx::{self, Accumulator, Vector, sub_f32};
use crate::layout::{Line, TILE_DIM, Tile, f16_tile_offset};
use crate::ops::rows::{all_lanes, first_lane};

/// f16 1.0.
const ONE: u16 = 0x3c00;
/// Lines of a tile, each of which has two rows.
pub(super) const PAIRS: usize = TILE_DIM / 2;
/// Least largest magnitude of an operand that is not zero: the low half of a number of this size is
/// rounded to 2^-17 of the number.
const LEAST: f32 = 1.0 / 256.0;
/// Most of an operand: a quarter of the range of f16, because products by decays and factors are
/// not checked.
pub(super) const MOST: f32 = 16384.0;
/// Its bits as an f16.
pub(super) const MOST_F16: i32 = 0x7400;

/// Returns `true` if two halves hold operands of which this is the largest magnitude.
pub(super) fn holds(largest: f32) -> bool {
    largest == 0.0 || (LEAST..=MOST).contains(&largest)
}

/// Returns two rows as f16 (high), and the rounding errors of this conversion as f16 (low).
#[inline(always)]
pub(super) fn split(a: Vector, b: Vector) -> (Vector, Vector) {
    let high = hvx::narrow_f32(a, b);
    let (x, y) = hvx::widen_mul_f16(high, hvx::splat_h(ONE));
    (high, hvx::narrow_f32(sub_f32(a, x), sub_f32(b, y)))
}

/// Returns the two rows of a line.
#[inline(always)]
pub(super) fn join(high: Vector, low: &Line) -> (Vector, Vector) {
    let sums = Accumulator::widen_mul(high, hvx::splat_h(ONE));
    let (a, b) = Accumulator::add_f16(sums, hvx::load(low));
    (a.to_f32(), b.to_f32())
}

/// Writes f16 bits on the diagonal of a tile of zeros.
pub(super) fn on_diagonal(tile: &mut Tile, bits: u16) {
    *tile = Tile::ZERO;
    let bytes: &mut [u8] = bytemuck::bytes_of_mut(tile);
    for i in 0..TILE_DIM {
        let at = f16_tile_offset(i, i);
        bytes[at..at + 2].copy_from_slice(&bits.to_le_bytes());
    }
}

/// The largest lane of magnitudes of f32.
pub(super) struct LargestLane<'a>(pub(super) &'a Line);

impl hvx::Kernel for LargestLane<'_> {
    type Output = f32;

    #[inline(always)]
    fn run(self) -> f32 {
        first_lane(all_lanes(hvx::load(self.0), hvx::max_w))
    }
}

/// The largest lane of magnitudes of f16, as the bits of the result.
pub(super) struct LargestHalf<'a>(pub(super) &'a Line);

impl hvx::Kernel for LargestHalf<'_> {
    type Output = f32;

    #[inline(always)]
    fn run(self) -> f32 {
        let halves = hvx::load(self.0);
        let words = hvx::max_h(halves, hvx::shr_w(halves, 16));
        let words = hvx::and(words, hvx::splat_w(0xffff));
        first_lane(all_lanes(words, hvx::max_w))
    }
}

/// A matrix for the unit.
#[derive(Clone, Copy)]
pub(super) struct Halves<'a> {
    pub(super) high: &'a [Tile],
    pub(super) low: &'a [Tile],
}

impl<'a> Halves<'a> {
    /// Returns the tiles from number `first` on.
    pub(super) fn from(self, first: usize) -> Self {
        Self {
            high: &self.high[first..],
            low: &self.low[first..],
        }
    }

    /// Returns the first `count` tiles.
    pub(super) fn first(self, count: usize) -> Self {
        Self {
            high: &self.high[..count],
            low: &self.low[..count],
        }
    }

    /// Returns the product with `weights` of `depth` tiles along K, which follow each other.
    ///
    /// - `act_step`: tiles from one strip of rows to the next
    /// - `steps`: tiles of the weights from one strip of rows of the result to the next, and from
    ///   one strip of its columns to the next
    pub(super) fn times(
        self,
        act_step: usize,
        weights: Halves<'a>,
        steps: [usize; 2],
        depth: usize,
    ) -> Term<'a> {
        Term {
            act: self,
            act_step,
            weights,
            steps,
            depth,
        }
    }

    /// Returns `depth` tiles from number `first` on; `None` if there are fewer.
    #[inline(always)]
    fn part(self, first: usize, depth: usize) -> Option<Self> {
        let end = first + depth;
        Some(Self {
            high: self.high.get(first..end)?,
            low: self.low.get(first..end)?,
        })
    }
}

/// A matrix that is written.
pub(super) struct HalvesMut<'a> {
    pub(super) high: &'a mut [Tile],
    pub(super) low: &'a mut [Tile],
}

impl HalvesMut<'_> {
    pub(super) fn get(&self) -> Halves<'_> {
        Halves {
            high: self.high,
            low: self.low,
        }
    }

    pub(super) fn lend(&mut self) -> HalvesMut<'_> {
        self.lend_from(0)
    }

    /// Lends the tiles from number `first` on.
    pub(super) fn lend_from(&mut self, first: usize) -> HalvesMut<'_> {
        HalvesMut {
            high: &mut self.high[first..],
            low: &mut self.low[first..],
        }
    }
}

/// One of the products whose sum is computed: [`Halves::times`].
#[derive(Clone, Copy)]
pub(super) struct Term<'a> {
    act: Halves<'a>,
    act_step: usize,
    weights: Halves<'a>,
    steps: [usize; 2],
    depth: usize,
}

/// The unit, and a tile of constant operands.
pub(super) struct Unit<'a> {
    pub(super) hmx: &'a mut Hmx,
    /// The unit matrix, negated.
    pub(super) negated: &'a Tile,
}

impl Unit<'_> {
    /// Computes a sum of products of `[rows, columns]` tiles.
    ///
    /// - `to_steps`: tiles of the result from one strip of rows to the next, and from one strip of
    ///   columns to the next
    #[inline(never)]
    pub(super) fn multiply(
        &mut self,
        terms: &[Term<'_>],
        [rows, columns]: [usize; 2],
        to: HalvesMut<'_>,
        to_steps: [usize; 2],
    ) {
        for row in 0..rows {
            for column in 0..columns {
                let at = row * to_steps[0] + column * to_steps[1];
                let (high, low) = (&mut to.high[at], &mut to.low[at]);
                self.add(terms, row, column);
                self.hmx.store(high);
                self.add(terms, row, column);
                let high = core::slice::from_ref(&*high);
                self.hmx.multiply(high, core::slice::from_ref(self.negated));
                self.hmx.store(low);
            }
        }
    }

    /// Adds a tile of products.
    #[inline(always)]
    fn add(&mut self, terms: &[Term<'_>], row: usize, column: usize) {
        for term in terms {
            let at = row * term.steps[0] + column * term.steps[1];
            let act = term.act.part(row * term.act_step, term.depth);
            let weights = term.weights.part(at, term.depth);
            if let (Some(act), Some(weights)) = (act, weights) {
                self.hmx.multiply(act.high, weights.low);
                self.hmx.multiply(act.low, weights.high);
                self.hmx.multiply(act.high, weights.high);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_hold_zero_and_numbers_of_a_range() {
        for largest in [0.0, LEAST, 1.0, MOST] {
            assert!(holds(largest), "{largest}");
        }
        for largest in [LEAST / 2.0, 2.0 * MOST, f32::INFINITY, f32::NAN] {
            assert!(!holds(largest), "{largest}");
        }
    }
}
