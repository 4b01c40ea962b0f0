//! The vector work between the products of a chunk. Every kernel reads and writes whole lines.
//!
//! A matrix for the unit is two FP16 tiles of each 32 × 32 elements: the rounded elements, and the
//! remainders. Line p of a tile has rows 2p and 2p + 1, so that kernels process two tokens at a
//! time.

use super::TOKENS;
use crate::hvx::{
    self, Accumulator, StridedVectors, Vector, interleave_even_h, interleave_odd_h, larger_f16,
    larger_f32, mul_f32, splat_f32, swap_blocks,
};
use crate::layout::{Line, TILE_DIM, Tile};
use crate::ops::halves::{Halves, HalvesMut, PAIRS, join, split};
use crate::rt::SharedColumns;

/// Blocks of 32 tokens. A matrix of tokens by tokens has no tiles above the diagonal: the one of
/// row r and column c is tile r + c.
pub(super) const BLOCKS: usize = TOKENS / TILE_DIM;
/// A row of both blocks, with a column for each token of the block.
pub(super) type BlockRows = [[Line; BLOCKS]; TILE_DIM];
/// A number for each token.
pub(super) type PerToken = [f32; TOKENS];

/// Returns `largest` after two more rows.
#[inline(always)]
fn larger(largest: Vector, a: Vector, b: Vector) -> Vector {
    larger_f32(larger_f32(largest, a), b)
}

/// Updates the largest magnitudes with those of lines of f32.
pub(super) struct Largest<'a> {
    pub(super) lines: &'a [Line],
    pub(super) largest: &'a mut Line,
}

impl hvx::Kernel for Largest<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut largest = hvx::load(self.largest);
        for line in self.lines {
            largest = larger_f32(largest, hvx::load(line));
        }
        hvx::store(self.largest, largest);
    }
}

/// Updates the largest magnitudes with those of tiles, as f16.
pub(super) struct LargestProduct<'a> {
    pub(super) tiles: &'a [Tile],
    pub(super) largest: &'a mut Line,
}

impl hvx::Kernel for LargestProduct<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut largest = hvx::load(self.largest);
        for tile in self.tiles {
            for line in &tile.0 {
                largest = larger_f16(largest, hvx::load(line));
            }
        }
        hvx::store(self.largest, largest);
    }
}

/// Splits rows of `L` lines into halves: a tile for each 32 rows and each line. The `L` tiles of
/// the same 32 rows follow each other.
pub(in crate::ops) struct SplitRows<'a, const L: usize> {
    pub(in crate::ops) rows: StridedVectors<'a, L>,
    pub(in crate::ops) to: HalvesMut<'a>,
    /// Holds the largest magnitude of each lane so far, which those of `rows` may raise.
    pub(in crate::ops) largest: &'a mut Line,
}

impl<const L: usize> hvx::Kernel for SplitRows<'_, L> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut rows = self.rows;
        let mut largest = hvx::load(self.largest);
        let high = self.to.high.as_chunks_mut::<L>().0.iter_mut();
        for (high, low) in high.zip(self.to.low.as_chunks_mut::<L>().0) {
            for line in 0..PAIRS {
                let (Some(even), Some(odd)) = (rows.next(), rows.next()) else {
                    break;
                };
                for column in 0..L {
                    let (a, b) = (even[column], odd[column]);
                    largest = larger(largest, a, b);
                    let (x, y) = split(a, b);
                    hvx::store(&mut high[column].0[line], x);
                    hvx::store(&mut low[column].0[line], y);
                }
            }
        }
        hvx::store(self.largest, largest);
    }
}

/// Transposes a tile.
///
/// Bits 1 to 4 of a row's number are those of the line, and bit 0 is that of the half of a word;
/// the bits of a column's number are those of the word. A step exchanges a bit of lines with a bit
/// of words, or with that of halves.
pub(super) struct TurnTile<'a> {
    pub(super) from: &'a Tile,
    pub(super) to: &'a mut Tile,
}

impl hvx::Kernel for TurnTile<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut v = self.from.0.each_ref().map(hvx::load);
        for [a, b] in v.as_chunks_mut::<2>().0 {
            let (x, y) = (interleave_even_h(*a, *b), interleave_odd_h(*a, *b));
            let (x, y) = swap_blocks::<1>(x, y);
            let (x, y) = (interleave_even_h(x, y), interleave_odd_h(x, y));
            (*a, *b) = swap_blocks::<2>(x, y);
        }
        for [a, b, c, d] in v.as_chunks_mut::<4>().0 {
            (*a, *c) = swap_blocks::<4>(*a, *c);
            (*b, *d) = swap_blocks::<4>(*b, *d);
        }
        for eight in v.as_chunks_mut::<8>().0 {
            let (first, last) = eight.split_at_mut(4);
            for (a, b) in first.iter_mut().zip(last) {
                (*a, *b) = swap_blocks::<8>(*a, *b);
            }
        }
        let (first, last) = v.split_at_mut(8);
        for (a, b) in first.iter_mut().zip(last) {
            (*a, *b) = swap_blocks::<16>(*a, *b);
        }
        for (to, v) in self.to.0.iter_mut().zip(v) {
            hvx::store(to, v);
        }
    }
}

/// Writes `-a · b`.
pub(super) struct NegatedProducts<'a> {
    pub(super) a: &'a [Line; BLOCKS],
    pub(super) b: &'a [Line; BLOCKS],
    pub(super) to: &'a mut [Line; BLOCKS],
}

impl hvx::Kernel for NegatedProducts<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for ((a, b), to) in self.a.iter().zip(self.b).zip(self.to) {
            let product = mul_f32(hvx::load(a), hvx::load(b));
            hvx::store(to, hvx::xor(product, hvx::splat_w(i32::MIN)));
        }
    }
}

/// Writes diagonal matrices of a tile for each line of numbers.
pub(super) struct Diagonal<'a> {
    /// One bits where the unit matrix has ones, as f16.
    pub(super) ones: &'a Tile,
    pub(super) numbers: &'a [Line],
    pub(super) to: HalvesMut<'a>,
}

impl hvx::Kernel for Diagonal<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let tiles = self.to.high.iter_mut().zip(self.to.low);
        for (numbers, (high, low)) in self.numbers.iter().zip(tiles) {
            let numbers = hvx::load(numbers);
            let (x, y) = split(numbers, numbers);
            let lines = high.0.iter_mut().zip(&mut low.0);
            for (ones, (high, low)) in self.ones.0.iter().zip(lines) {
                let ones = hvx::load(ones);
                hvx::store(high, hvx::and(ones, x));
                hvx::store(low, hvx::and(ones, y));
            }
        }
    }
}

/// Computes, from the products of keys and queries with keys, the weight that each token's change
/// of the state has for later tokens.
pub(super) struct Weigh<'a> {
    pub(super) key_products: Halves<'a>,
    pub(super) query_products: Halves<'a>,
    /// The decay of each token, and the factor of its change.
    pub(super) decays: &'a PerToken,
    pub(super) betas: &'a PerToken,
    /// The unit matrix.
    pub(super) unit: &'a [Line; TILE_DIM],
    /// Receives the keys' reads of a token, negated, from the changes of earlier tokens of its
    /// block.
    pub(super) reads: &'a mut BlockRows,
    /// Receives the same of the second block's tokens and the first block's changes.
    pub(super) early: HalvesMut<'a>,
    /// Receives the queries' reads of a token from the changes of tokens up to this one.
    pub(super) weights: HalvesMut<'a>,
    /// Receives the decay from each token to the last one.
    pub(super) late: &'a mut [Line; BLOCKS],
    /// Largest products so far; updated.
    pub(super) largest: &'a mut Line,
}

/// Numbers of two tokens in all lanes: their decays, and the negated factors of their changes.
#[derive(Clone, Copy)]
struct Pair {
    decays: [Vector; 2],
    betas: [Vector; 2],
}

/// The products by which two tokens read the changes of a block's tokens.
struct Reads {
    keys: [Vector; 2],
    queries: [Vector; 2],
    /// The decay from the block's tokens to the second one of the two.
    decay: Vector,
}

impl Pair {
    /// Returns the reads of both tokens' keys.
    ///
    /// - `decay`: from the block's tokens to the one before them
    /// - `own`: a one for each of the two tokens, if they are of the block
    #[inline(always)]
    fn read(
        self,
        decay: Vector,
        own: [Vector; 2],
        [k0, k1]: [Vector; 2],
        [q0, q1]: [Vector; 2],
    ) -> Reads {
        let before = mul_f32(decay, self.decays[0]);
        let first = mul_f32(mul_f32(before, k0), self.betas[0]);
        let with = hvx::or(before, own[0]);
        let before = mul_f32(with, self.decays[1]);
        let second = mul_f32(mul_f32(before, k1), self.betas[1]);
        let decay = hvx::or(before, own[1]);
        Reads {
            keys: [first, second],
            queries: [mul_f32(with, q0), mul_f32(decay, q1)],
            decay,
        }
    }
}

impl Weigh<'_> {
    /// Returns a line of the products of keys and of queries, and adds them to the largest ones.
    #[inline(always)]
    fn products(&self, tile: usize, line: usize, largest: &mut Vector) -> [[Vector; 2]; 2] {
        let [keys, queries] = [&self.key_products, &self.query_products];
        let (key, query) = (
            hvx::load(&keys.high[tile].0[line]),
            hvx::load(&queries.high[tile].0[line]),
        );
        *largest = larger_f16(larger_f16(*largest, key), query);
        [
            join(key, &keys.low[tile].0[line]).into(),
            join(query, &queries.low[tile].0[line]).into(),
        ]
    }

    /// Returns the numbers of tokens `2 · pair` and the one after it.
    #[inline(always)]
    fn pair(&self, pair: usize) -> Pair {
        let [decays, betas] = [self.decays, self.betas].map(|all| all.as_chunks::<2>().0[pair]);
        Pair {
            decays: decays.map(splat_f32),
            betas: betas.map(|beta| splat_f32(-beta)),
        }
    }
}

/// Writes a line of a matrix.
#[inline(always)]
fn put(to: &mut HalvesMut<'_>, tile: usize, line: usize, [a, b]: [Vector; 2]) {
    let (x, y) = split(a, b);
    hvx::store(&mut to.high[tile].0[line], x);
    hvx::store(&mut to.low[tile].0[line], y);
}

impl hvx::Kernel for Weigh<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let zero = hvx::splat_w(0);
        let mut largest = hvx::load(self.largest);
        let mut early = zero;
        for line in 0..PAIRS {
            let own = self.unit.as_chunks::<2>().0[line].each_ref().map(hvx::load);
            let [keys, queries] = self.products(0, line, &mut largest);
            let reads = self.pair(line).read(early, own, keys, queries);
            early = reads.decay;
            for (to, keys) in self.reads.as_chunks_mut::<2>().0[line]
                .iter_mut()
                .zip(reads.keys)
            {
                hvx::store(&mut to[0], keys);
            }
            put(&mut self.weights, 0, line, reads.queries);
        }
        let mut late = zero;
        for line in 0..PAIRS {
            let pair = self.pair(PAIRS + line);
            let [keys, queries] = self.products(1, line, &mut largest);
            let reads = pair.read(early, [zero; 2], keys, queries);
            early = reads.decay;
            put(&mut self.early, 0, line, reads.keys);
            put(&mut self.weights, 1, line, reads.queries);
            let own = self.unit.as_chunks::<2>().0[line].each_ref().map(hvx::load);
            let [keys, queries] = self.products(2, line, &mut largest);
            let reads = pair.read(late, own, keys, queries);
            late = reads.decay;
            for (to, keys) in self.reads.as_chunks_mut::<2>().0[line]
                .iter_mut()
                .zip(reads.keys)
            {
                hvx::store(&mut to[1], keys);
            }
            put(&mut self.weights, 2, line, reads.queries);
        }
        hvx::store(&mut self.late[0], early);
        hvx::store(&mut self.late[1], late);
        hvx::store(self.largest, largest);
    }
}

/// Inverts the unit matrix less strictly lower triangular rows, of both blocks, row by row.
pub(super) struct Invert<'a> {
    pub(super) rows: &'a BlockRows,
    pub(super) unit: &'a [Line; TILE_DIM],
    pub(super) inverse: &'a mut BlockRows,
    /// Receives the inverses, too: a tile for each block.
    pub(super) to: HalvesMut<'a>,
    pub(super) largest: &'a mut Line,
}

impl hvx::Kernel for Invert<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        for (t, row) in self.rows.iter().enumerate() {
            let (done, rest) = self.inverse.split_at_mut(t);
            let Some([first_out, second_out]) = rest.first_mut() else {
                return;
            };
            let [first, second]: &[[f32; TILE_DIM]; BLOCKS] = bytemuck::cast_ref(row);
            let unit = hvx::load(&self.unit[t]);
            // Each sum has a name and a zero. If they were exchanged or shared, they would be
            // copied, which qfloat values must not be.
            let (mut a_even, mut a_odd) = (Accumulator::zero(), Accumulator::zero());
            let (mut b_even, mut b_odd) = (Accumulator::zero(), Accumulator::zero());
            let (pairs, last) = done.as_chunks::<2>();
            let numbers = first
                .as_chunks::<2>()
                .0
                .iter()
                .zip(second.as_chunks::<2>().0);
            for ([even, odd], ([a0, a1], [b0, b1])) in pairs.iter().zip(numbers) {
                a_even = a_even.mul_add(hvx::load(&even[0]), splat_f32(*a0));
                b_even = b_even.mul_add(hvx::load(&even[1]), splat_f32(*b0));
                a_odd = a_odd.mul_add(hvx::load(&odd[0]), splat_f32(*a1));
                b_odd = b_odd.mul_add(hvx::load(&odd[1]), splat_f32(*b1));
            }
            if let ([done], Some(at)) = (last, t.checked_sub(1)) {
                a_even = a_even.mul_add(hvx::load(&done[0]), splat_f32(first[at]));
                b_even = b_even.mul_add(hvx::load(&done[1]), splat_f32(second[at]));
            }
            hvx::store(first_out, a_even.plus(a_odd).plus_f32(unit).to_f32());
            hvx::store(second_out, b_even.plus(b_odd).plus_f32(unit).to_f32());
        }
        let mut largest = hvx::load(self.largest);
        for block in 0..BLOCKS {
            for (line, rows) in self.inverse.as_chunks::<2>().0.iter().enumerate() {
                let [a, b] = rows.each_ref().map(|row| hvx::load(&row[block]));
                largest = larger(largest, a, b);
                put(&mut self.to, block, line, [a, b]);
            }
        }
        hvx::store(self.largest, largest);
    }
}

/// Writes rows of `L` lines (`E` elements) from their halves in tiles, times a factor.
pub(super) struct WriteRows<'a, 'r, const L: usize, const E: usize> {
    /// A tile for each 32 rows and each line, with tiles of the same rows adjacent.
    pub(super) from: Halves<'a>,
    pub(super) scale: f32,
    pub(super) rows: &'a mut SharedColumns<'r>,
    /// The first row that is written, and the number of rows.
    pub(super) first: usize,
    pub(super) count: usize,
    /// Largest magnitudes of `from` so far; updated.
    pub(super) largest: &'a mut Line,
}

impl<const L: usize, const E: usize> hvx::Kernel for WriteRows<'_, '_, L, E> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let scale = splat_f32(self.scale);
        let mut largest = hvx::load(self.largest);
        let mut none = [0.0; E];
        let blocks = self.from.high.as_chunks::<L>().0.iter();
        let blocks = blocks.zip(self.from.low.as_chunks::<L>().0);
        let pairs = blocks.flat_map(|tiles| (0..PAIRS).map(move |line| (tiles, line)));
        for (pair, ((high, low), line)) in pairs.take(self.count.div_ceil(2)).enumerate() {
            let row = self.first + 2 * pair;
            // The row after the last one belongs to another head.
            let rows = match self.count - 2 * pair {
                1 => (self.rows.squares::<E, 1>(row, 0)).map(|[even]| [even, &mut none]),
                _ => self.rows.squares::<E, 2>(row, 0),
            };
            let Some([even, odd]) = rows else { break };
            let rows = even.as_chunks_mut().0.iter_mut().zip(odd.as_chunks_mut().0);
            for ((even, odd), (high, low)) in rows.zip(high.iter().zip(low)) {
                let high = hvx::load(&high.0[line]);
                largest = larger_f16(largest, high);
                let (a, b) = join(high, &low.0[line]);
                hvx::store_f32(even, mul_f32(a, scale));
                hvx::store_f32(odd, mul_f32(b, scale));
            }
        }
        hvx::store(self.largest, largest);
    }
}
