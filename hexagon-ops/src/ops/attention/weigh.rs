//! Turns scores of the matrix unit into weights: maximum, exponentials by table, sums.
//!
//! ```text
//! for each four pairs of rows                       a line of each tile: 32 positions of both
//!   for each tile: maximum
//!   maximum of all positions
//!   for each tile: less the maximum; twice its bits index the table; gather; weights to f32, summed
//! ```
//!
//! Hidden positions have the lowest f16. As long as a row has seen only hidden positions, they get
//! weights of 1; the first visible score scales those to zero.

use crate::hvx::{self, Accumulator, Vector, add_f32, max_f16, mul_f32, splat_h, splat_w, sub_f16};
use crate::layout::{F16_TILE_LINES, Line, Tile};
use crate::ops::attention::table::TABLE_LINES;

/// Tiles of scores whose exponentials are looked up together.
pub const STRIPS: usize = 4;
/// Score of a hidden position, the lowest f16, and its bits.
pub(super) const HIDDEN_F16: f32 = -65504.0;
pub(super) const HIDDEN_BITS: u16 = 0xfbff;
/// f16 1.
const ONE: u16 = 0x3c00;

/// Turns the scores of a tile of rows into weights.
pub(super) struct Weigh<'a> {
    /// Pairs of rows.
    pub(super) n_pairs: usize,
    /// These are the first positions that the rows see: maxima and sums have no content yet.
    pub(super) is_first: bool,
    pub(super) table: &'a [Line; TABLE_LINES],
    /// Scores, which become weights: a tile for each 32 positions.
    pub(super) scores: &'a mut [Tile],
    /// For each pair of rows: the interleaved f16 maxima of the two rows.
    pub(super) maxima: &'a mut [Line],
    /// For each row: f32 sums in lanes.
    pub(super) sums: &'a mut [Line],
    /// For each pair of rows: the interleaved f16 factors of the earlier sums of both; not written
    /// for the first positions.
    pub(super) scales: &'a mut [Line],
}

impl hvx::Kernel for Weigh<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let whole = self.n_pairs / 4;
        for four in 0..whole {
            self.pairs::<4>(4 * four);
        }
        let rest = 4 * whole;
        match self.n_pairs - rest {
            0 => {}
            1 => self.pairs::<1>(rest),
            2 => self.pairs::<2>(rest),
            // There is memory for lines after the last pair, and their results are not used.
            _ => self.pairs::<4>(rest),
        }
    }
}

impl Weigh<'_> {
    /// Turns the scores of N pairs of rows, starting with pair `first`, into weights, and adds them
    /// to the scaled earlier sums.
    #[inline(always)]
    fn pairs<const N: usize>(&mut self, first: usize) {
        let at = first / N % (F16_TILE_LINES / N);
        let first = N * at;
        let mut largest = [splat_h(HIDDEN_BITS); N];
        let mut before = largest;
        if !self.is_first {
            for (before, line) in before.iter_mut().zip(&self.maxima[first..first + N]) {
                *before = hvx::load(line);
            }
            largest = before;
        }
        for tile in &*self.scores {
            let lines = &tile.0.as_chunks::<N>().0[at];
            for (largest, line) in largest.iter_mut().zip(lines) {
                *largest = max_f16(*largest, hvx::load(line));
            }
        }
        let largest = largest_of_pairs(largest);
        for (line, largest) in self.maxima[first..first + N].iter_mut().zip(largest) {
            hvx::store(line, largest);
        }
        if !self.is_first {
            let scales = &mut self.scales[first..first + N];
            for ((line, before), largest) in scales.iter_mut().zip(before).zip(largest) {
                gather(self.table, sub_f16(before, largest), line);
            }
        }
        self.sum::<N>(first, at, largest);
    }

    /// Turns scores into weights and sums them: two pairs at a time, because more would not fit in
    /// registers.
    #[inline(always)]
    fn sum<const N: usize>(&mut self, first: usize, at: usize, largest: [Vector; N]) {
        let twos = largest.as_chunks::<2>().0;
        for (i, two) in twos.iter().enumerate() {
            let sums = exponentials(self.table, self.scores, N / 2 * at + i, *two);
            self.add(first + 2 * i, sums);
        }
        if N == 1 {
            let sums = exponentials(self.table, self.scores, at, [largest[0]]);
            self.add(first, sums);
        }
    }

    /// Adds sums of weights to the scaled earlier ones.
    #[inline(always)]
    fn add<const N: usize>(&mut self, first: usize, sums: [(Vector, Vector); N]) {
        let pairs = self.sums.as_chunks_mut::<2>().0;
        let pairs = pairs[first..first + N].iter_mut();
        let scales = &self.scales[first..first + N];
        for (([even, odd], (mut even_sum, mut odd_sum)), scale) in pairs.zip(sums).zip(scales) {
            if !self.is_first {
                let (even_scale, odd_scale) = hvx::widen_mul_f16(hvx::load(scale), splat_h(ONE));
                even_sum = add_f32(mul_f32(hvx::load(even), even_scale), even_sum);
                odd_sum = add_f32(mul_f32(hvx::load(odd), odd_scale), odd_sum);
            }
            hvx::store(even, even_sum);
            hvx::store(odd, odd_sum);
        }
    }
}

/// Returns the maximum of all words in all words, for each half separately.
#[inline(always)]
fn largest_of_pairs<const N: usize>(v: [Vector; N]) -> [Vector; N] {
    let join = |(a, b): (Vector, Vector)| max_f16(a, b);
    let mut out = v;
    match &mut out[..] {
        [a, b, c, d] => {
            // Joins halves of two vectors in one, then quarters of four.
            let ab = join(hvx::swap_blocks::<16>(*a, *b));
            let cd = join(hvx::swap_blocks::<16>(*c, *d));
            let all = join(hvx::swap_blocks::<8>(ab, cd));
            let all = largest_of_eight(all);
            let (ab, cd) = hvx::swap_blocks::<8>(all, all);
            (*a, *b) = hvx::swap_blocks::<16>(ab, ab);
            (*c, *d) = hvx::swap_blocks::<16>(cd, cd);
        }
        [a, b] => {
            let ab = join(hvx::swap_blocks::<16>(*a, *b));
            let ab = join(hvx::swap_blocks::<8>(ab, ab));
            let ab = largest_of_eight(ab);
            (*a, *b) = hvx::swap_blocks::<16>(ab, ab);
        }
        others => {
            for v in others {
                let all = join(hvx::swap_blocks::<16>(*v, *v));
                let all = join(hvx::swap_blocks::<8>(all, all));
                *v = largest_of_eight(all);
            }
        }
    }
    out
}

/// Returns the maximum of each eight words in all eight, for each half separately.
#[inline(always)]
fn largest_of_eight(v: Vector) -> Vector {
    let (a, b) = hvx::swap_blocks::<4>(v, v);
    let v = max_f16(a, b);
    let (a, b) = hvx::swap_blocks::<2>(v, v);
    let v = max_f16(a, b);
    let (a, b) = hvx::swap_blocks::<1>(v, v);
    max_f16(a, b)
}

/// Looks up the exponentials of f16 that are zero or negative.
#[inline(always)]
fn gather(table: &[Line; TABLE_LINES], x: Vector, out: &mut Line) {
    // Doubling drops the sign bit and leaves twice the magnitude's bits, which is the byte offset
    // in the table.
    hvx::gather_h(table, hvx::add_h(x, x), out);
}

/// Turns scores of N pairs of rows into weights, and returns the sums of these weights in lanes
/// (even row, odd row).
///
/// - `table`: in VTCM
/// - `scores`: a tile for each 32 positions, in VTCM
/// - `at`: which N lines of each tile, below 16 / N
/// - `largest`: for each pair, the interleaved maxima of the two rows, not smaller than any score
#[inline(always)]
#[must_use]
pub fn exponentials<const N: usize>(
    table: &[Line; TABLE_LINES],
    scores: &mut [Tile],
    at: usize,
    largest: [Vector; N],
) -> [(Vector, Vector); N] {
    let at = at % (F16_TILE_LINES / N);
    let mut sums = [(); N].map(|()| (Accumulator::zero(), Accumulator::zero()));
    let (fours, rest) = scores.as_chunks_mut::<STRIPS>();
    // Four tiles at a time without a loop, so that gathers and sums share packets.
    for tiles in fours {
        look_up(table, tiles, at, &largest, &mut sums);
    }
    let (twos, rest) = rest.as_chunks_mut::<2>();
    for tiles in twos {
        look_up(table, tiles, at, &largest, &mut sums);
    }
    for tiles in rest.as_chunks_mut::<1>().0 {
        look_up(table, tiles, at, &largest, &mut sums);
    }
    sums.map(|(even, odd)| (even.to_f32(), odd.to_f32()))
}

/// Sums of the two rows of a pair.
type PairSums = (Accumulator, Accumulator);

/// Turns N lines of each tile into weights, and adds them to `sums`.
#[inline(always)]
fn look_up<const N: usize, const TILES: usize>(
    table: &[Line; TABLE_LINES],
    tiles: &mut [Tile; TILES],
    at: usize,
    largest: &[Vector; N],
    sums: &mut [PairSums; N],
) {
    let mut x = [[splat_w(0); N]; TILES];
    for (x, tile) in x.iter_mut().zip(&*tiles) {
        let lines = &tile.0.as_chunks::<N>().0[at];
        for ((x, line), largest) in x.iter_mut().zip(lines).zip(largest) {
            *x = sub_f16(hvx::load(line), *largest);
        }
    }
    for (x, tile) in x.into_iter().zip(&mut *tiles) {
        let lines = &mut tile.0.as_chunks_mut::<N>().0[at];
        for (x, line) in x.into_iter().zip(lines) {
            gather(table, x, line);
        }
    }
    for tile in tiles {
        let lines = &tile.0.as_chunks::<N>().0[at];
        for (sums, line) in sums.iter_mut().zip(lines) {
            *sums = Accumulator::add_f16(*sums, hvx::load(line));
        }
    }
}
