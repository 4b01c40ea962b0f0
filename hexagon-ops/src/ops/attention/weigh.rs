//! Turns scores of the matrix unit into weights: factor, cap and mask, maximum, exponentials by
//! table, sums.
//!
//! ```text
//! for each pair of rows                             a line of each tile: 32 positions of both
//!   for each tile: to f32, scaled, capped, masked; back to f16; maximum
//!   for each tile: less the maximum; twice its bits index the table; gather
//!   for each tile: weights to f32, summed
//! ```
//!
//! Hidden positions have the lowest f16. As long as a row has seen only hidden positions, they get
//! weights of 1; the first visible score scales those to zero.

use core::ops::Range;

use super::{Job, hide, tail};
use crate::hvx::{
    self, Accumulator, Vector, add_f32, max_f16, max_f32, min_f32, mul_f32, or, splat_f32, splat_h,
    splat_w, sub_f16, sub_w,
};
use crate::layout::{F16_TILE_LINES, LINE_BYTES, Line, TILE_DIM, Tile};
use crate::ops::attention::table::TABLE_LINES;
use crate::ops::math;
use crate::ops::matmul::act::RowFactor;
use crate::ops::rows::{all_lanes, first_lane};
use crate::ops::tensor::View;

/// Positions of a block.
pub(super) const BLOCK: usize = STRIPS * TILE_DIM;
/// Tiles of scores of a block.
pub const STRIPS: usize = 4;
/// Score of a hidden position, the lowest f16, and its bits.
pub(super) const HIDDEN_F16: f32 = -65504.0;
const HIDDEN_BITS: u16 = 0xfbff;
/// Inverse of the scale of the unit's stores.
const RESTORE: f32 = 32.0;
/// f16 1, and minus infinity.
const ONE: u16 = 0x3c00;
const MINUS_INFINITY: u16 = 0xfc00;

/// Fills lines with the lowest maximum.
pub(super) struct Lowest<'a>(pub(super) &'a mut [Line]);

impl hvx::Kernel for Lowest<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for line in self.0 {
            hvx::store(line, splat_h(HIDDEN_BITS));
        }
    }
}

/// A test for f16 masks that leave any of some positions visible to any of some queries.
pub(super) struct Visible<'a> {
    pub(super) mask: &'a View<'a>,
    pub(super) queries: Range<usize>,
    pub(super) stream: usize,
    pub(super) positions: Range<usize>,
}

impl hvx::Kernel for Visible<'_> {
    type Output = bool;

    #[inline(always)]
    fn run(self) -> bool {
        let Range { start, end } = self.queries;
        // The last query of a prompt sees most positions.
        self.any(end - 1..end) || self.any(start..end - 1)
    }
}

impl Visible<'_> {
    /// Returns `true` if any of the queries sees a position.
    #[inline(always)]
    fn any(&self, queries: Range<usize>) -> bool {
        let hidden = splat_h(MINUS_INFINITY);
        let mut others = splat_w(0);
        for start in self.positions.clone().step_by(LINE_BYTES / 2) {
            let end = self.positions.end.min(start + LINE_BYTES / 2);
            if end - start < LINE_BYTES / 2 {
                // Zeros after the last position would look visible.
                return true;
            }
            let mut rows = hvx::zeros::<TILE_DIM>();
            let rows = &mut rows[..queries.len()];
            let plane = [0, self.stream];
            self.mask
                .read_halves(queries.clone(), plane, start..end, rows);
            for row in rows {
                others = or(others, sub_w(hvx::load(row), hidden));
            }
        }
        first_lane(all_lanes(others, or)).to_bits() != 0
    }
}

/// Position and factors of each row of a tile.
pub(super) struct RowTile {
    /// Number of rows that exist.
    n_rows: usize,
    /// Query and head.
    places: [[usize; 2]; TILE_DIM],
    /// Factor of the values that the unit stored.
    factors: [f32; TILE_DIM],
    slopes: [f32; TILE_DIM],
}

impl RowTile {
    /// Describes the rows `rows` of a head of keys and values; queries count from `first`.
    pub(super) fn new(
        job: &Job<'_>,
        factors: &[RowFactor; TILE_DIM],
        rows: Range<usize>,
        [first, kv_head]: [usize; 2],
    ) -> Self {
        let mut tile = Self {
            n_rows: rows.len(),
            places: [[0; 2]; TILE_DIM],
            factors: [0.0; TILE_DIM],
            slopes: [1.0; TILE_DIM],
        };
        for (i, place) in job.heads(first, kv_head, rows).enumerate() {
            tile.places[i] = place;
            tile.factors[i] = factors[i].factor() * job.factor * RESTORE;
            tile.slopes[i] = job.slopes.of(tile.places[i][1]);
        }
        tile
    }
}

/// Addends of the scores of two rows at a time. Rows of the same query and slope share them.
struct Terms {
    lines: [[Line; STRIPS]; 2],
    /// Query, head of the mask and bits of the slope.
    keys: [Option<(usize, usize, u32)>; 2],
    /// Index of the entry that was used last.
    last: usize,
}

/// Turns the scores of a tile of rows into weights.
pub(super) struct Weigh<'a> {
    pub(super) job: &'a Job<'a>,
    pub(super) stream: usize,
    pub(super) rows: &'a RowTile,
    pub(super) positions: Range<usize>,
    pub(super) table: &'a [Line; TABLE_LINES],
    /// Scores, which become weights: a tile for each 32 positions.
    pub(super) scores: &'a mut [Tile],
    /// For each pair of rows: f16 maxima, those of the two rows in turns.
    pub(super) maxima: &'a mut [Line],
    /// For each row: f32 sums in lanes.
    pub(super) sums: &'a mut [Line],
    /// For each pair of rows, in turns: f16 factors of the earlier sums.
    pub(super) scales: &'a mut [Line],
}

impl Weigh<'_> {
    /// Returns which of the two `terms` is the addend of row `row`, after computing it if
    /// necessary.
    #[inline(always)]
    fn terms(&self, row: usize, terms: &mut Terms) -> usize {
        let [query, head] = self.rows.places[row];
        let slope = self.rows.slopes[row];
        let mask_head = match &self.job.src.mask {
            Some(mask) if mask.shape.ne[2] > 1 => head % mask.shape.ne[2],
            _ => 0,
        };
        let key = Some((query, mask_head, slope.to_bits()));
        if let Some(which) = terms.keys.iter().position(|have| *have == key) {
            terms.last = which;
            return which;
        }
        let which = 1 - terms.last;
        let lines = &mut terms.lines[which];
        if let Some(mask) = &self.job.src.mask {
            let at = [query, head, self.stream];
            mask.read_lines(at, self.positions.clone(), lines);
        }
        for (strip, line) in lines.iter_mut().enumerate() {
            let count = self.positions.len().saturating_sub(strip * TILE_DIM);
            let term = match &self.job.src.mask {
                Some(_) => hide(hvx::load(line), slope, count),
                None => tail(count),
            };
            hvx::store(line, term);
        }
        terms.keys[which] = key;
        terms.last = which;
        which
    }

    /// Returns the scores of 32 positions, limited to FP16's range.
    #[inline(always)]
    fn score(&self, stored: Vector, factor: Vector, term: &Line) -> Vector {
        let mut x = mul_f32(stored, factor);
        if self.job.softcap != 0.0 {
            x = mul_f32(math::tanh(x), splat_f32(self.job.softcap));
        }
        let x = add_f32(x, hvx::load(term));
        min_f32(max_f32(x, splat_f32(HIDDEN_F16)), splat_f32(-HIDDEN_F16))
    }
}

impl hvx::Kernel for Weigh<'_> {
    type Output = ();
    const INLINED: bool = true;

    #[inline(always)]
    fn run(mut self) {
        let mut terms = Terms {
            lines: [hvx::zeros(), hvx::zeros()],
            keys: [None; 2],
            last: 0,
        };
        let scores = core::mem::take(&mut self.scores);
        for pair in 0..self.rows.n_rows.div_ceil(2) {
            let even = self.terms(2 * pair, &mut terms);
            let odd = match 2 * pair + 1 < self.rows.n_rows {
                true => self.terms(2 * pair + 1, &mut terms),
                false => even,
            };
            let factors = [0, 1].map(|i| self.rows.factors[2 * pair + i]);
            let before = hvx::load(&self.maxima[pair]);
            let mut largest = before;
            for (strip, tile) in scores.iter_mut().enumerate() {
                let line = &mut tile.0[pair];
                let (a, b) = hvx::widen_mul_f16(hvx::load(line), splat_h(ONE));
                let a = self.score(a, splat_f32(factors[0]), &terms.lines[even][strip]);
                let b = self.score(b, splat_f32(factors[1]), &terms.lines[odd][strip]);
                let both = hvx::narrow_f32(a, b);
                largest = max_f16(largest, both);
                hvx::store(line, both);
            }
            let largest = largest_of_pair(largest);
            hvx::store(&mut self.maxima[pair], largest);
            gather(self.table, sub_f16(before, largest), &mut self.scales[pair]);
        }
        let n_pairs = self.rows.n_rows.div_ceil(2);
        for two in 0..n_pairs / 2 {
            self.sum::<2>(scores, two);
        }
        if !n_pairs.is_multiple_of(2) {
            self.sum::<1>(scores, n_pairs - 1);
        }
    }
}

impl Weigh<'_> {
    /// Turns the scores of N pairs of rows, starting with pair N · `at`, into weights, and adds
    /// them to the scaled earlier sums.
    #[inline(always)]
    fn sum<const N: usize>(&mut self, scores: &mut [Tile], at: usize) {
        let mut largest = [splat_w(0); N];
        for (largest, maxima) in largest.iter_mut().zip(&self.maxima[N * at..]) {
            *largest = hvx::load(maxima);
        }
        let sums = exponentials(self.table, scores, at, largest);
        for (pair, (even_sum, odd_sum)) in (N * at..).zip(sums) {
            let scale = hvx::load(&self.scales[pair]);
            let (even_scale, odd_scale) = hvx::widen_mul_f16(scale, splat_h(ONE));
            let [even, odd] = &mut self.sums.as_chunks_mut::<2>().0[pair];
            hvx::store(
                even,
                add_f32(mul_f32(hvx::load(even), even_scale), even_sum),
            );
            hvx::store(odd, add_f32(mul_f32(hvx::load(odd), odd_scale), odd_sum));
        }
    }
}

/// Returns the maximum of all words in all words, for each half separately.
#[inline(always)]
fn largest_of_pair(v: Vector) -> Vector {
    let mut v = v;
    let (a, b) = hvx::swap_blocks::<16>(v, v);
    v = max_f16(a, b);
    let (a, b) = hvx::swap_blocks::<8>(v, v);
    v = max_f16(a, b);
    let (a, b) = hvx::swap_blocks::<4>(v, v);
    v = max_f16(a, b);
    let (a, b) = hvx::swap_blocks::<2>(v, v);
    v = max_f16(a, b);
    let (a, b) = hvx::swap_blocks::<1>(v, v);
    max_f16(a, b)
}

/// Looks up the exponentials of f16 that are zero or negative.
#[inline(always)]
fn gather(table: &[Line; TABLE_LINES], x: Vector, out: &mut Line) {
    // The sign leaves the halfword, and twice the magnitude's bits remain.
    hvx::gather_h(table, hvx::add_h(x, x), out);
}

/// Turns a line of scores into weights.
#[inline(always)]
fn exponential<'a>(table: &[Line; TABLE_LINES], line: &'a mut Line, largest: Vector) -> &'a Line {
    gather(table, sub_f16(hvx::load(line), largest), line);
    line
}

/// Turns scores of N pairs of rows into weights, and returns the sums of these weights in lanes
/// (even row, odd row).
///
/// - `table`: in VTCM
/// - `scores`: a tile for each 32 positions, in VTCM
/// - `at`: which N lines of each tile, below 16 / N
/// - `largest`: for each pair, maxima of the two rows in turns, not smaller than any score
#[inline(always)]
#[must_use]
pub fn exponentials<const N: usize>(
    table: &[Line; TABLE_LINES],
    scores: &mut [Tile],
    at: usize,
    largest: [Vector; N],
) -> [(Vector, Vector); N] {
    let at = at % (F16_TILE_LINES / N);
    let mut results = [(splat_w(0), splat_w(0)); N];
    // A whole block is straight-line code, in which gathers and sums fill each other's packets.
    if let [a, b, c, d] = scores {
        let [a, b, c, d] = [a, b, c, d].map(|tile| &mut tile.0.as_chunks_mut::<N>().0[at]);
        let mut x = [[splat_w(0); STRIPS]; N];
        for (n, x) in x.iter_mut().enumerate() {
            *x = [
                sub_f16(hvx::load(&a[n]), largest[n]),
                sub_f16(hvx::load(&b[n]), largest[n]),
                sub_f16(hvx::load(&c[n]), largest[n]),
                sub_f16(hvx::load(&d[n]), largest[n]),
            ];
        }
        for (n, x) in x.into_iter().enumerate() {
            gather(table, x[0], &mut a[n]);
            gather(table, x[1], &mut b[n]);
            gather(table, x[2], &mut c[n]);
            gather(table, x[3], &mut d[n]);
        }
        for (n, result) in results.iter_mut().enumerate() {
            let ab = add_line(first(&a[n]), &b[n]);
            let cd = add_line(first(&c[n]), &d[n]);
            *result = (ab.0.plus(cd.0).to_f32(), ab.1.plus(cd.1).to_f32());
        }
        return results;
    }
    for (n, (result, largest)) in results.iter_mut().zip(largest).enumerate() {
        let Some((tile, others)) = scores.split_first_mut() else {
            break;
        };
        let mut sums = first(exponential(table, &mut tile.0[N * at + n], largest));
        for tile in others {
            sums = add_line(sums, exponential(table, &mut tile.0[N * at + n], largest));
        }
        *result = (sums.0.to_f32(), sums.1.to_f32());
    }
    results
}

/// Sums of the two rows of a pair.
type Sums = (Accumulator, Accumulator);

/// Starts sums with the weights of a line.
#[inline(always)]
fn first(line: &Line) -> Sums {
    Accumulator::widen_mul(hvx::load(line), splat_h(ONE))
}

/// Adds the weights of a line.
#[inline(always)]
fn add_line(sums: Sums, line: &Line) -> Sums {
    Accumulator::widen_mul_add(sums, hvx::load(line), splat_h(ONE))
}
