//! Masks, factors and caps of scores before they become weights.
//!
//! If scores are certain to be in FP16's range, the matrix unit stores them with their factor. A
//! mask that only hides positions then leaves most scores unchanged, and [`Hide`] changes the
//! others. All other scores are computed in f32 by [`Adjust`].
//!
//! Hidden positions have the lowest f16, and visible ones at least the next f16.

use core::ops::Range;

use super::weigh::{HIDDEN_BITS, HIDDEN_F16};
use super::{HIDDEN, Job, hide, tail};
use crate::hvx::{
    self, Vector, add_f32, and, interleave_w, max_f32, min_f32, mul_f32, or, splat_f32, splat_h,
    splat_w, sub_w,
};
use crate::layout::{LINE_BYTES, Line, TILE_DIM, Tile};
use crate::ops::math;
use crate::ops::tensor::{Chunk, View};

/// Inverse of the scale with which the unit stores scores that may leave FP16's range.
pub(super) const RESTORE: f32 = 32.0;
/// f16 1.
const ONE: u16 = 0x3c00;
/// Lowest score of a visible position, the f16 above that of hidden ones.
const LOWEST: f32 = -65472.0;
/// Tiles whose addends are computed together.
const STRIPS: usize = 4;
/// Halves of a line.
const HALVES: usize = LINE_BYTES / 2;

/// The rows of a tile.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowTile {
    /// Number of the first row within its head of keys and values, and of rows.
    pub(super) first_row: usize,
    pub(super) n_rows: usize,
    /// Number of the first query, and the head of keys and values.
    pub(super) first_query: usize,
    pub(super) kv_head: usize,
    pub(super) stream: usize,
}

/// The mask of a block, where the block's tasks read it.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockMask<'a> {
    pub(super) view: View<'a>,
    /// Query and position of the view's first element.
    pub(super) first_query: usize,
    pub(super) first_position: usize,
}

impl BlockMask<'_> {
    /// Returns the byte of the view with an element of an f16 mask for all heads.
    #[inline(always)]
    pub(super) fn offset(&self, query: usize, stream: usize, position: usize) -> usize {
        let row = [query - self.first_query, 0, stream];
        self.view.shape.row(row) + 2 * (position - self.first_position)
    }

    /// Returns the row of the view for a query and a query head.
    fn row(&self, [query, head]: [usize; 2], stream: usize) -> [usize; 3] {
        [query - self.first_query, head, stream]
    }

    /// Returns the columns of the view for positions.
    fn columns(&self, positions: &Range<usize>) -> Range<usize> {
        positions.start - self.first_position..positions.end - self.first_position
    }

    /// Reads up to a chunk of positions of a query and a query head.
    pub(super) fn read<'b>(
        &'b self,
        place: [usize; 2],
        stream: usize,
        positions: &Range<usize>,
        chunk: &'b mut Chunk,
    ) -> &'b [f32] {
        (self.view).read(self.row(place, stream), self.columns(positions), chunk)
    }
}

/// Hides positions that a mask hides, and positions after the last one. The mask does nothing else.
pub(super) struct Hide<'a> {
    pub(super) job: &'a Job<'a>,
    pub(super) rows: RowTile,
    /// A mask that only hides, if there is one.
    pub(super) mask: Option<&'a BlockMask<'a>>,
    pub(super) positions: Range<usize>,
    /// A bit for each 64 positions that are not all visible.
    pub(super) mixed: u16,
    /// A tile for each 32 positions.
    pub(super) scores: &'a mut [Tile],
}

impl hvx::Kernel for Hide<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let scores = core::mem::take(&mut self.scores);
        for (chunk, tiles) in scores.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            if self.mixed >> chunk & 1 == 1 {
                self.chunk(chunk, tiles);
            }
        }
    }
}

impl Hide<'_> {
    /// Hides positions of a chunk.
    #[inline(always)]
    fn chunk(&self, chunk: usize, [first, second]: &mut [Tile; 2]) {
        let start = self.positions.start + chunk * HALVES;
        let past = past_end(self.positions.end.saturating_sub(start));
        let (group, rows) = (self.job.group, self.rows);
        // All bits of a position are set if the query does not see it.
        let hidden = |query: usize| {
            let Some(mask) = self.mask else { return past };
            let offset = mask.offset(query, rows.stream, start);
            let row = (mask.view.strided::<1>(offset, 1)).and_then(|mut row| row.next());
            or(past, hvx::asr_h(row.map_or(past, |[row]| row), 15))
        };
        // Rows of the same query follow each other; `left` of them are still to come.
        let mut query = rows.first_query + rows.first_row / group;
        let mut left = group - rows.first_row % group;
        let mut known = [usize::MAX; 2];
        let mut terms = Term::of_rows(past, past);
        let lines = first.0.iter_mut().zip(&mut second.0);
        for (pair, (low, high)) in lines.take(rows.n_rows.div_ceil(2)).enumerate() {
            let mut queries = [query; 2];
            for (i, place) in queries.iter_mut().enumerate() {
                // A missing row of the last pair uses the query of the row before it.
                if 2 * pair + i < rows.n_rows {
                    *place = query;
                }
                left -= 1;
                if left == 0 {
                    (query, left) = (query + 1, group);
                }
            }
            if queries != known {
                let even = hidden(queries[0]);
                let odd = match queries[0] == queries[1] {
                    true => even,
                    false => hidden(queries[1]),
                };
                terms = Term::of_rows(even, odd);
                known = queries;
            }
            for (line, term) in [low, high].into_iter().zip(&terms) {
                hvx::store(line, term.apply(hvx::load(line)));
            }
        }
    }
}

/// Bits with which positions of two rows are hidden.
#[derive(Clone, Copy)]
struct Term {
    /// Bits that visible positions keep, and those that hidden ones get.
    kept: Vector,
    hidden: Vector,
}

impl Term {
    /// Returns the terms of 64 positions. Positions with bits in `even` and `odd` are hidden.
    #[inline(always)]
    fn of_rows(even: Vector, odd: Vector) -> [Self; 2] {
        let (low, high) = interleave_w(
            hvx::interleave_even_h(even, odd),
            hvx::interleave_odd_h(even, odd),
        );
        [low, high].map(|bits| Self {
            kept: sub_w(splat_w(-1), bits),
            hidden: and(bits, splat_h(HIDDEN_BITS)),
        })
    }

    #[inline(always)]
    fn apply(&self, scores: Vector) -> Vector {
        or(and(scores, self.kept), self.hidden)
    }
}

/// Returns bits in the halves starting with number `count`.
#[inline(always)]
fn past_end(count: usize) -> Vector {
    const ENDS: [u8; 2 * LINE_BYTES] = {
        let mut ends = [0; 2 * LINE_BYTES];
        let mut i = LINE_BYTES;
        while i < 2 * LINE_BYTES {
            ends[i] = 0xff;
            i += 1;
        }
        ends
    };
    let start = 2 * (HALVES - count.min(HALVES));
    ENDS[start..]
        .first_chunk()
        .map_or(splat_w(0), hvx::load_bytes)
}

/// Addends of the scores of two rows at a time. Rows of the same query and slope share them.
struct Terms {
    lines: [[Line; STRIPS]; 2],
    /// Query, head of the mask and bits of the slope.
    keys: [Option<(usize, usize, u32)>; 2],
    /// Index of the entry that was used last.
    last: usize,
}

/// Computes scores in f32: factor, cap, any mask.
pub(super) struct Adjust<'a> {
    pub(super) job: &'a Job<'a>,
    pub(super) rows: RowTile,
    pub(super) mask: Option<&'a BlockMask<'a>>,
    /// Factor of the stored scores, in addition to the factor of the unit's stores.
    pub(super) factor: f32,
    pub(super) positions: Range<usize>,
    /// A tile for each 32 positions.
    pub(super) scores: &'a mut [Tile],
}

impl hvx::Kernel for Adjust<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let scores = core::mem::take(&mut self.scores);
        let mut start = self.positions.start;
        for tiles in scores.chunks_mut(STRIPS) {
            let end = self.positions.end.min(start + STRIPS * TILE_DIM);
            self.strips(start..end, tiles);
            start = end;
        }
    }
}

impl Adjust<'_> {
    /// Adjusts the scores of up to 128 positions.
    #[inline(always)]
    fn strips(&self, positions: Range<usize>, tiles: &mut [Tile]) {
        let mut terms = Terms {
            lines: [hvx::zeros(), hvx::zeros()],
            keys: [None; 2],
            last: 0,
        };
        let RowTile {
            first_row,
            n_rows,
            first_query,
            kv_head,
            ..
        } = self.rows;
        let mut places = self
            .job
            .heads(first_query, kv_head, first_row..first_row + n_rows);
        let factor = splat_f32(self.factor * RESTORE);
        let mut lines = [[Line::ZERO; 2]; STRIPS];
        for pair in 0..n_rows.div_ceil(2) {
            let Some(place) = places.next() else { return };
            let even = self.terms(place, &positions, &mut terms);
            let odd = match places.next() {
                Some(place) => self.terms(place, &positions, &mut terms),
                None => even,
            };
            let scaled = &mut lines[..tiles.len()];
            for (tile, scaled) in tiles.iter().zip(&mut *scaled) {
                let (a, b) = hvx::widen_mul_f16(hvx::load(&tile.0[pair]), splat_h(ONE));
                hvx::store(&mut scaled[0], mul_f32(a, factor));
                hvx::store(&mut scaled[1], mul_f32(b, factor));
            }
            if self.job.softcap != 0.0 {
                hvx::widest(Cap {
                    lines: scaled.as_flattened_mut(),
                    softcap: self.job.softcap,
                });
            }
            for (strip, (tile, scaled)) in tiles.iter_mut().zip(&*scaled).enumerate() {
                let a = limited_sum(&scaled[0], &terms.lines[even][strip]);
                let b = limited_sum(&scaled[1], &terms.lines[odd][strip]);
                hvx::store(&mut tile.0[pair], hvx::narrow_f32(a, b));
            }
        }
    }

    /// Returns which of the two `terms` is the addend of a row, after computing it if necessary.
    #[inline(always)]
    fn terms(
        &self,
        [query, head]: [usize; 2],
        positions: &Range<usize>,
        terms: &mut Terms,
    ) -> usize {
        let slope = self.job.slopes.of(head);
        let mask_head = match self.mask.map(|mask| mask.view.shape.ne[2]) {
            Some(heads) if heads > 1 => head % heads,
            _ => 0,
        };
        let key = Some((query, mask_head, slope.to_bits()));
        if let Some(which) = terms.keys.iter().position(|have| *have == key) {
            terms.last = which;
            return which;
        }
        let which = 1 - terms.last;
        let lines = &mut terms.lines[which];
        if let Some(mask) = self.mask {
            let at = mask.row([query, head], self.rows.stream);
            (mask.view).read_lines(at, mask.columns(positions), lines);
        }
        for (strip, line) in lines.iter_mut().enumerate() {
            let count = positions.len().saturating_sub(strip * TILE_DIM);
            let term = match self.mask {
                Some(_) => hide(hvx::load(line), slope, count),
                None => tail(count),
            };
            hvx::store(line, term);
        }
        terms.keys[which] = key;
        terms.last = which;
        which
    }
}

/// Caps f32: a separate function, because its constants fill the registers.
struct Cap<'a> {
    lines: &'a mut [Line],
    softcap: f32,
}

impl hvx::Kernel for Cap<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for line in self.lines {
            let capped = mul_f32(math::tanh(hvx::load(line)), splat_f32(self.softcap));
            hvx::store(line, capped);
        }
    }
}

/// Returns the sum of scores and their addends, limited to FP16's range. A visible position does
/// not get the score of a hidden one.
#[inline(always)]
fn limited_sum(scores: &Line, term: &Line) -> Vector {
    let term = hvx::load(term);
    let x = add_f32(hvx::load(scores), term);
    // The addend of a visible position is above a tenth of `HIDDEN`, so its scaled value stays
    // above the score of a hidden position.
    let scaled = mul_f32(term, splat_f32(HIDDEN_F16 / HIDDEN));
    let lowest = min_f32(scaled, splat_f32(LOWEST));
    min_f32(max_f32(x, lowest), splat_f32(-HIDDEN_F16))
}
