//! The rotation of weights and activations along K.
//!
//! ```text
//! K = 576    signs |+-++-+--+...                                   |    one for each element
//!            H     |....... 512 .......|                                Hadamard blocks from the front
//!            signs       |-++-+-...                                |    one for each element of the last block
//!            H           |....... 512 .............................|    a block that ends with the row
//! ```
//!
//! Every step is orthonormal, so the rotation is orthonormal, and it leaves the dot product of two
//! rotated rows unchanged.
//!
//! The signs prevent a row of similar elements from being gathered in one element, and the second
//! signs prevent the last block from undoing the first where the two overlap. Where K is a multiple
//! of the block, the last block is absent. With blocks of the largest power of two that divides K
//! (64 for 576) instead, an outlier would stay in its block, and an integer type has too few levels
//! for the rest of the row to share a scale with it.
//!
//! The signs are a function of K and the position alone. So a weight and its activations agree on
//! them, and weights that read the same activations, such as Q, K and V, can share the rotated row.
//! That costs no accuracy: signs must be unrelated to the data, not to the signs of other tensors.

use crate::quant::{self, HADAMARD_BLOCK_MAX};

/// An orthonormal transform of rows of K elements, a function of K alone.
///
/// It changes no product of two rows, and spreads an outlier over the row, so that one scale fits
/// all elements:
///
/// ```
/// use rknpu_ops::rotation::Rotation;
///
/// let mut weights = vec![0.0; 64];
/// weights[5] = 8.0;
/// let mut activations: Vec<f32> = (0..64).map(|k| k as f32 / 64.0).collect();
/// let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
/// let before = dot(&weights, &activations);
///
/// let rotation = Rotation::new(64);
/// rotation.apply(&mut weights);
/// rotation.apply(&mut activations);
/// assert!((dot(&weights, &activations) - before).abs() < 1e-5);
/// assert!(weights.iter().all(|weight| weight.abs() < 1.01));
/// ```
#[derive(Clone, Debug)]
pub struct Rotation {
    k: usize,
    /// Length of the Hadamard blocks; 1 for none.
    block: usize,
    /// Sign bits to flip, one word for each element; empty for none.
    signs: Vec<u32>,
    /// Sign bits for the last block; empty without one.
    last_signs: Vec<u32>,
}

impl Rotation {
    /// Returns the rotation of rows of `k` elements.
    #[must_use]
    pub fn new(k: usize) -> Self {
        if k == 0 {
            return Self::identity(k);
        }
        let block = (1 << k.ilog2()).min(HADAMARD_BLOCK_MAX);
        let last = if k.is_multiple_of(block) { 0 } else { block };
        let mut signs = signs(k, k + last);
        let last_signs = signs.split_off(k);
        Self {
            k,
            block,
            signs,
            last_signs,
        }
    }

    /// Returns the rotation that leaves rows of `k` elements unchanged.
    #[must_use]
    pub const fn identity(k: usize) -> Self {
        Self {
            k,
            block: 1,
            signs: Vec::new(),
            last_signs: Vec::new(),
        }
    }

    /// Rotates a row in place.
    ///
    /// - a non-finite element makes every element of its blocks non-finite, and so at least one
    ///   element of every K segment that such a block reaches
    ///
    /// # Panics
    /// If `row` does not have K elements.
    pub fn apply(&self, row: &mut [f32]) {
        assert_eq!(row.len(), self.k, "rotation of rows of another length");
        flip(row, &self.signs);
        let whole = row.len() / self.block * self.block;
        quant::hadamard(&mut row[..whole], self.block);
        if !self.last_signs.is_empty() {
            let last = &mut row[self.k - self.block..];
            flip(last, &self.last_signs);
            quant::hadamard(last, self.block);
        }
    }

    /// Returns a row after its rotation: in `work`, or the row itself for the identity.
    pub(crate) fn of<'a>(&self, row: &'a [f32], work: &'a mut [f32]) -> &'a [f32] {
        if self.block == 1 && self.signs.is_empty() {
            return row;
        }
        let work = &mut work[..row.len()];
        work.copy_from_slice(row);
        self.apply(work);
        work
    }
}

/// Flips the signs of the elements whose word has the sign bit set.
fn flip(row: &mut [f32], signs: &[u32]) {
    for (x, sign) in row.iter_mut().zip(signs) {
        *x = f32::from_bits(x.to_bits() ^ sign);
    }
}

/// Returns `count` sign bits for rows of `k` elements: the bits, lowest first, of SplitMix64 with
/// the seed `k`.
///
/// SOURCE: SplitMix64, Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
/// OOPSLA 2014.
fn signs(k: usize, count: usize) -> Vec<u32> {
    // CAST: usize has at most 64 bits on every target.
    let mut state = k as u64;
    let mut signs = Vec::with_capacity(count.next_multiple_of(64));
    while signs.len() < count {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let word = z ^ (z >> 31);
        signs.extend((0..64).map(|bit| if word >> bit & 1 == 1 { 1 << 31 } else { 0u32 }));
    }
    signs.truncate(count);
    signs
}
