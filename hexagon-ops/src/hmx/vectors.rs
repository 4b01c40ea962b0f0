//! Products of FP16 tiles on the vector units, for chips whose matrix unit is missing or wrong.
//!
//! ```text
//! for each four pairs of rows                        eight sums of 32 columns stay in registers
//!   for each tile of K, each line of its weights     a line is k and k + 1 of 32 columns, in turns
//!     split it into two lines, of k alone and of k + 1 alone
//!     for each pair of rows, both k                  a word of activations is one k of both rows
//!       sums += line · word                          even lanes: the first row; odd lanes: the second
//! round the sums to f16, times the scale of stores
//! ```

#[cfg(doc)]
use super::Hmx;
use super::ScaleBlock;
use crate::hvx::{self, Accumulator, Vector};
use crate::layout::{Line, TILE_DIM, Tile};

/// Pairs of rows whose sums stay in registers, and those of a tile.
const PAIRS: usize = 4;
const ALL_PAIRS: usize = TILE_DIM / 2;

/// Computes up to 32 rows of one strip, as [`Hmx`] would with any number of calls of `multiply` and
/// one of `store`.
///
/// - `act`: 32 rows, tiles of K one after the other
/// - `weights`: as many tiles of one strip
/// - `scale`: that of the store; one for all columns, as [`ScaleBlock::splat`] has it
/// - `n_rows`: number of rows to compute; in `out`, pairs of other rows are unchanged
pub fn multiply(act: &[Tile], weights: &[Tile], scale: &ScaleBlock, n_rows: usize, out: &mut Tile) {
    hvx::widest(Product {
        act,
        weights,
        scale: scale.0[0],
        n_pairs: n_rows.div_ceil(2).min(ALL_PAIRS),
        out,
    });
}

struct Product<'a> {
    act: &'a [Tile],
    weights: &'a [Tile],
    scale: u32,
    n_pairs: usize,
    out: &'a mut Tile,
}

impl hvx::Kernel for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        // A word of the block has the scale in its lower half. It is copied to both halves, because
        // each word of a product has two f16.
        let halves = (self.scale & 0xffff) as u16;
        let (scale, _) = hvx::widen_mul_f16(hvx::splat_h(halves), hvx::splat_h(0x3c00));
        let (act, weights) = (self.act, self.weights);
        let mut first = 0;
        while first + PAIRS <= self.n_pairs {
            let sums = sums::<PAIRS>(act, weights, first);
            for (line, sums) in self.out.0[first..].iter_mut().zip(sums) {
                put(line, sums, scale);
            }
            first += PAIRS;
        }
        for pair in first..self.n_pairs {
            let [sums] = sums::<1>(act, weights, pair);
            put(&mut self.out.0[pair], sums, scale);
        }
    }
}

/// Stores the sums of a pair of rows.
#[inline(always)]
fn put(line: &mut Line, [even, odd]: [Vector; 2], scale: Vector) {
    hvx::store(line, hvx::mul_narrow_f32([even, odd], [scale; 2]));
}

/// Returns the sums of `P` pairs of rows, f32: (first row, second row) of each.
#[inline(always)]
fn sums<const P: usize>(act: &[Tile], weights: &[Tile], first: usize) -> [[Vector; 2]; P] {
    let mut sums = [(); P].map(|()| (Accumulator::zero(), Accumulator::zero()));
    for (act, weights) in act.iter().zip(weights) {
        let rows: Option<&[Line; P]> = act.0.get(first..).and_then(<[Line]>::first_chunk);
        let Some(rows) = rows else { continue };
        for (k, line) in weights.0.iter().enumerate() {
            let line = hvx::load(line);
            let columns = [
                hvx::interleave_even_h(line, line),
                hvx::interleave_odd_h(line, line),
            ];
            for (sums, row) in sums.iter_mut().zip(rows) {
                let words: &[[i32; 2]; ALL_PAIRS] = bytemuck::cast_ref(row);
                for (columns, word) in columns.iter().zip(words[k]) {
                    *sums = Accumulator::widen_mul_add(*sums, *columns, hvx::splat_w(word));
                }
            }
        }
    }
    sums.map(|(even, odd)| [even.to_f32(), odd.to_f32()])
}
