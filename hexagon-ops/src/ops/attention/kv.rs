//! Packing of keys and values into FP16 tiles.
//!
//! Keys are the columns of the first product: word n of line i of a tile holds elements 2i and
//! 2i + 1 of key n, which are word i of that key's row. So 32 rows of 64 elements become two tiles
//! by transposing a square of 32 × 32 words, in five rounds of exchanged blocks.
//!
//! Values are the rows of the second product: word n of line i holds element n of values 2i and
//! 2i + 1. One instruction each turns two rows of 64 elements into a line of the even elements and
//! a line of the odd ones, so strips of values hold first the even, then the odd elements of 64.

mod q8_0;

use core::hint::black_box;
use core::ops::Range;

use q8_0::ReadTwoBlocks;

use crate::hvx::{self, FOURS, Square, StridedVectors, Vector, larger_f16, max_h, splat_w};
use crate::layout::{LINE_BYTES, Line, TILE_DIM, Tile};
use crate::ops::tensor::{Type, View, first_halves};

/// Elements of a row that are packed at a time.
pub(super) const SLAB: usize = 64;

/// Rows of a cache of keys or values that are packed.
pub(super) struct CacheRows<'a> {
    pub(super) view: &'a View<'a>,
    /// Head and stream.
    pub(super) head: [usize; 2],
    /// The positions; elements after the last one become zero.
    pub(super) positions: Range<usize>,
}

impl CacheRows<'_> {
    /// Returns the positions of a strip.
    #[inline(always)]
    fn strip(&self, strip: usize) -> Range<usize> {
        let start = self.positions.start + strip * TILE_DIM;
        start.min(self.positions.end)..self.positions.end.min(start + TILE_DIM)
    }

    /// Returns the elements of a slab.
    #[inline(always)]
    fn slab(&self, slab: usize) -> Range<usize> {
        slab * SLAB..self.view.shape.ne[0].min((slab + 1) * SLAB)
    }

    /// Returns 64 elements of each row, if they can be loaded directly, as whole lines of f16.
    #[inline(always)]
    fn lines(&self, slab: usize) -> Option<StridedVectors<'_>> {
        (self.slab(slab).len() == SLAB).then(|| self.vectors(slab))?
    }

    /// Returns a vector that starts with the elements of a slab for each row, if they can be loaded
    /// directly, with memory of the tensor after them.
    #[inline(always)]
    fn vectors(&self, slab: usize) -> Option<StridedVectors<'_>> {
        let (view, [head, stream]) = (self.view, self.head);
        let is_f16 = view.shape.dtype == Type::F16 && view.shape.has_dense_rows();
        if !is_f16 || self.positions.is_empty() {
            return None;
        }
        let first = view.shape.row([self.positions.start, head, stream]);
        view.strided(first + slab * LINE_BYTES, self.positions.len())
    }

    /// Reads a slab of the rows of a strip as f16, with zeros after them. Returns the bits of their
    /// largest magnitudes.
    #[inline(always)]
    fn read(&self, strip: usize, slab: usize, out: &mut [Line; TILE_DIM]) -> Vector {
        let (strip, elems) = (self.strip(strip), self.slab(slab));
        if let Some(blocks) = self.two_blocks(&strip, &elems)
            && let Some(largest) = blocks.read(out)
        {
            return largest;
        }
        let [mut largest] = hvx::zeros::<1>();
        hvx::widest(ReadHalves {
            rows: self,
            strip,
            elems,
            out,
            largest: &mut largest,
        });
        hvx::load(&largest)
    }

    /// Returns two blocks of each of 32 rows, or `None` if the rows are not Q8_0 or there are fewer
    /// rows or blocks.
    #[inline(always)]
    fn two_blocks(&self, strip: &Range<usize>, elems: &Range<usize>) -> Option<ReadTwoBlocks<'_>> {
        let (view, [head, stream]) = (self.view, self.head);
        let is_q8_0 = view.shape.dtype == Type::Q8_0 && view.shape.has_dense_rows();
        if !is_q8_0 || strip.len() < TILE_DIM || elems.len() < SLAB {
            return None;
        }
        let skipped = elems.start / 32 * Type::Q8_0.block_bytes();
        Some(ReadTwoBlocks {
            bytes: view.tail(view.shape.row([strip.start, head, stream]) + skipped),
            stride_bytes: view.shape.nb[1],
        })
    }
}

/// Reads elements of the rows of a strip as f16, with zeros after them: a separate kernel, because
/// rows have many types.
struct ReadHalves<'a> {
    rows: &'a CacheRows<'a>,
    strip: Range<usize>,
    elems: Range<usize>,
    out: &'a mut [Line; TILE_DIM],
    /// Receives the bits of their largest magnitudes.
    largest: &'a mut Line,
}

impl hvx::Kernel for ReadHalves<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let CacheRows { view, head, .. } = self.rows;
        let largest = view.read_halves(self.strip, *head, self.elems, self.out);
        hvx::store(self.largest, largest);
    }
}

/// Packs keys.
pub(super) struct PackKeys<'a> {
    pub(super) rows: CacheRows<'a>,
    /// For each 32 positions, `ceil(Dk / 32)` tiles, `per_strip` in number.
    pub(super) tiles: &'a mut [Tile],
    pub(super) per_strip: usize,
    /// Receives the largest magnitudes.
    pub(super) largest: &'a mut Line,
}

impl hvx::Kernel for PackKeys<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let mut largest = splat_w(0);
        let tiles = core::mem::take(&mut self.tiles);
        let mut square = hvx::zeros();
        for slab in 0..self.per_strip.div_ceil(2) {
            let lines = self.rows.lines(slab);
            let (found, strips) = match lines.and_then(StridedVectors::aligned) {
                Some(lines) => self.transpose_lines(Some(lines), slab, tiles),
                None if self.rows.slab(slab).len() <= SLAB / 2 => {
                    self.transpose_halves(slab, tiles)
                }
                None => self.transpose_lines(lines, slab, tiles),
            };
            largest = max_h(largest, found);
            // The other strips: those with fewer than 32 positions, or all strips if the rows have
            // another type.
            let rest = tiles.chunks_exact_mut(self.per_strip).enumerate();
            for (strip, tiles) in rest.skip(strips) {
                largest = max_h(largest, self.rows.read(strip, slab, &mut square));
                let end = tiles.len().min(2 * slab + 2);
                transpose(&mut square, &mut tiles[2 * slab..end]);
            }
        }
        hvx::store(self.largest, largest);
    }
}

impl PackKeys<'_> {
    /// Packs a slab of at most 32 elements, of all strips that have 32 rows. Returns the largest
    /// magnitudes, and the number of strips, which is 0 if the rows cannot be loaded directly.
    #[inline(always)]
    fn transpose_halves(&self, slab: usize, tiles: &mut [Tile]) -> (Vector, usize) {
        let mut largest = splat_w(0);
        let mut strips = 0;
        let kept = first_halves(self.rows.slab(slab).len());
        let kept = hvx::swap_blocks::<16>(kept, kept).0;
        if let Some(mut lines) = self.rows.vectors(slab) {
            for tiles in tiles.chunks_exact_mut(self.per_strip) {
                let (Some(tile), Some(square)) = (tiles.get_mut(2 * slab), lines.next_square())
                else {
                    break;
                };
                largest = transpose_half_square(square, tile, largest, kept);
                strips += 1;
            }
        }
        (largest, strips)
    }

    /// Packs a slab of the strips that have 32 lines. Returns their largest magnitudes, and their
    /// number.
    #[inline(always)]
    fn transpose_lines<const ALIGNED: bool>(
        &self,
        lines: Option<StridedVectors<'_, 1, ALIGNED>>,
        slab: usize,
        tiles: &mut [Tile],
    ) -> (Vector, usize) {
        let mut largest = splat_w(0);
        let mut strips = 0;
        let fours = black_box(FOURS);
        if let Some(mut lines) = lines {
            for tiles in tiles.chunks_exact_mut(self.per_strip) {
                let two = tiles
                    .get_mut(2 * slab..)
                    .and_then(<[Tile]>::first_chunk_mut);
                let (Some(two), Some(square)) = (two, lines.next_square()) else {
                    break;
                };
                let out = bytemuck::cast_mut::<[Tile; 2], _>(two);
                largest = transpose_square(square, out, largest, fours);
                strips += 1;
            }
        }
        (largest, strips)
    }
}

/// Transposes 32 rows of 16 words each, as [`transpose`] does with the first half of its square.
/// Returns the larger ones of `largest` and the magnitudes of their f16.
///
/// - `kept`: ones where a vector that has the words of two rows has elements
#[inline(always)]
fn transpose_half_square<const ALIGNED: bool>(
    rows: Square<'_, ALIGNED>,
    out: &mut Tile,
    largest: Vector,
    kept: Vector,
) -> Vector {
    let mut largest = largest;
    let mut v = [splat_w(0); TILE_DIM / 2];
    let mut rows = rows.spaced();
    let (low, high) = v.split_at_mut(FOURS);
    for (low, high) in low.iter_mut().zip(high) {
        let [a, b] = [
            hvx::swap_blocks::<16>(rows.load::<0>(), rows.load::<2>()).0,
            hvx::swap_blocks::<16>(rows.load::<1>(), rows.load::<3>()).0,
        ];
        (*low, *high) = (hvx::and(a, kept), hvx::and(b, kept));
        largest = larger_f16(larger_f16(largest, *low), *high);
        rows.advance();
    }
    exchange::<8, 8>(&mut v);
    exchange::<4, 4>(&mut v);
    exchange::<2, 2>(&mut v);
    exchange::<1, 1>(&mut v);
    for (line, v) in out.0.iter_mut().zip(v) {
        hvx::store(line, v);
    }
    largest
}

/// Transposes 32 rows of 32 words each, as [`transpose`] does. Returns the larger ones of `largest`
/// and the magnitudes of their f16.
///
/// - `fours`: [`FOURS`], which the compiler does not know. It would unroll the loop, and be short
///   of registers.
#[inline(always)]
fn transpose_square<const ALIGNED: bool>(
    rows: Square<'_, ALIGNED>,
    out: &mut [Line; TILE_DIM],
    largest: Vector,
    fours: usize,
) -> Vector {
    let mut largest = largest;
    let mut rows = rows.spaced();
    let mut v = [
        rows.load::<0>(),
        rows.load::<1>(),
        rows.load::<2>(),
        rows.load::<3>(),
    ];
    let (first, rest) = out.split_at_mut(fours);
    let (second, rest) = rest.split_at_mut(fours);
    let (third, fourth) = rest.split_at_mut(fours);
    let lines = first.iter_mut().zip(second);
    for ((first, second), (third, fourth)) in lines.zip(third.iter_mut().zip(fourth)) {
        rows.advance();
        for v in v {
            largest = larger_f16(largest, v);
        }
        exchange::<16, 2>(&mut v);
        exchange::<8, 1>(&mut v);
        // Loads of the next rows alternate with stores of these; `Fours::load` has the reason.
        let [a, b, c, d] = v;
        v[0] = rows.load::<0>();
        hvx::store(first, a);
        v[1] = rows.load::<1>();
        hvx::store(second, b);
        v[2] = rows.load::<2>();
        hvx::store(third, c);
        v[3] = rows.load::<3>();
        hvx::store(fourth, d);
    }
    last_rounds_in_place(out);
    largest
}

/// Transposes 32 × 32 words: exchanges words at (i, j + W) and (i + W, j) for blocks of W = 16, 8,
/// 4, 2, 1. Several rounds run in registers: on four lines at first, then on eight.
///
/// - `tiles`: receive the result; a single tile receives its first half
#[inline(always)]
fn transpose(square: &mut [Line; TILE_DIM], tiles: &mut [Tile]) {
    for i in 0..8 {
        let mut v = [0, 8, 16, 24].map(|line| hvx::load(&square[i + line]));
        exchange::<16, 2>(&mut v);
        exchange::<8, 1>(&mut v);
        for (line, v) in v.into_iter().enumerate() {
            hvx::store(&mut square[i + 8 * line], v);
        }
    }
    let out = tiles
        .iter_mut()
        .flat_map(|tile| tile.0.as_chunks_mut::<8>().0);
    for (lines, out) in square.as_chunks::<8>().0.iter().zip(out) {
        for (line, v) in out.iter_mut().zip(last_rounds(lines)) {
            hvx::store(line, v);
        }
    }
}

/// Runs the rounds of blocks of 4, 2 and 1 words on each eight lines. The next eight are loaded
/// while these are stored.
#[inline(always)]
fn last_rounds_in_place(lines: &mut [Line; TILE_DIM]) {
    let mut v = [splat_w(0); 8];
    for (v, line) in v.iter_mut().zip(&*lines) {
        *v = hvx::load(line);
    }
    for first in [0, 8, 16, 24] {
        exchange::<4, 4>(&mut v);
        exchange::<2, 2>(&mut v);
        exchange::<1, 1>(&mut v);
        for (i, v) in v.iter_mut().enumerate() {
            let done = *v;
            if let Some(next) = lines.get(first + 8 + i) {
                *v = hvx::load(next);
            }
            hvx::store(&mut lines[first + i], done);
        }
    }
}

/// Returns eight lines after the rounds of blocks of 4, 2 and 1 words.
#[inline(always)]
fn last_rounds(lines: &[Line; 8]) -> [Vector; 8] {
    let mut v = [splat_w(0); 8];
    for (v, line) in v.iter_mut().zip(lines) {
        *v = hvx::load(line);
    }
    exchange::<4, 4>(&mut v);
    exchange::<2, 2>(&mut v);
    exchange::<1, 1>(&mut v);
    v
}

/// Exchanges blocks of W words between vectors that are `APART` from one another.
#[inline(always)]
fn exchange<const W: usize, const APART: usize>(v: &mut [Vector]) {
    for v in v.chunks_exact_mut(2 * APART) {
        for i in 0..APART {
            (v[i], v[i + APART]) = hvx::swap_blocks::<W>(v[i], v[i + APART]);
        }
    }
}

/// Packs 64 elements of values.
pub(super) struct PackValues<'a> {
    pub(super) rows: CacheRows<'a>,
    /// Number of the 64 elements within the row.
    pub(super) slab: usize,
    /// Tiles of the even elements, one for each 32 positions.
    pub(super) even: &'a mut [Tile],
    /// Tiles of the odd ones.
    pub(super) odd: &'a mut [Tile],
    /// Receives the largest magnitudes.
    pub(super) largest: &'a mut Line,
}

impl hvx::Kernel for PackValues<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self {
            rows,
            slab,
            even,
            odd,
            ..
        } = self;
        let lines = rows.lines(slab);
        let (mut largest, strips) = match lines.and_then(StridedVectors::aligned) {
            Some(lines) => interleave_lines(Some(lines), even, odd),
            None => interleave_lines(lines, even, odd),
        };
        // The other strips: those with fewer than 32 positions, or all strips if the rows have
        // another type.
        let rest = even.iter_mut().zip(odd).enumerate();
        let mut lines = hvx::zeros::<TILE_DIM>();
        for (strip, (even, odd)) in rest.skip(strips) {
            largest = max_h(largest, rows.read(strip, slab, &mut lines));
            let out = even.0.iter_mut().zip(&mut odd.0);
            for ([a, b], (even, odd)) in lines.as_chunks().0.iter().zip(out) {
                interleave(hvx::load(a), hvx::load(b), even, odd);
            }
        }
        hvx::store(self.largest, largest);
    }
}

/// Packs the strips that have 32 lines. Returns their largest magnitudes, and their number.
#[inline(always)]
fn interleave_lines<const ALIGNED: bool>(
    lines: Option<StridedVectors<'_, 1, ALIGNED>>,
    even: &mut [Tile],
    odd: &mut [Tile],
) -> (Vector, usize) {
    let mut largest = splat_w(0);
    let mut strips = 0;
    if let Some(mut lines) = lines {
        for (even, odd) in even.iter_mut().zip(odd) {
            let Some(square) = lines.next_square() else {
                break;
            };
            largest = interleave_square(square, even, odd, largest);
            strips += 1;
        }
    }
    (largest, strips)
}

/// Packs 32 rows. Returns the larger ones of `largest` and the magnitudes of their f16.
#[inline(always)]
fn interleave_square<const ALIGNED: bool>(
    rows: Square<'_, ALIGNED>,
    even: &mut Tile,
    odd: &mut Tile,
    largest: Vector,
) -> Vector {
    let mut largest = largest;
    let mut rows = rows.successive();
    let mut v = [
        rows.load::<0>(),
        rows.load::<1>(),
        rows.load::<2>(),
        rows.load::<3>(),
    ];
    let even = even.0.as_chunks_mut::<2>().0.iter_mut();
    for (even, odd) in even.zip(odd.0.as_chunks_mut::<2>().0) {
        rows.advance();
        let [a, b, c, d] = v;
        // Loads and stores alternate as in `transpose_square`.
        v[0] = rows.load::<0>();
        hvx::store(&mut even[0], hvx::interleave_even_h(a, b));
        v[1] = rows.load::<1>();
        hvx::store(&mut odd[0], hvx::interleave_odd_h(a, b));
        v[2] = rows.load::<2>();
        hvx::store(&mut even[1], hvx::interleave_even_h(c, d));
        v[3] = rows.load::<3>();
        hvx::store(&mut odd[1], hvx::interleave_odd_h(c, d));
        for v in [a, b, c, d] {
            largest = larger_f16(largest, v);
        }
    }
    largest
}

/// Stores the even and the odd elements of two rows.
#[inline(always)]
fn interleave(a: Vector, b: Vector, even: &mut Line, odd: &mut Line) {
    hvx::store(even, hvx::interleave_even_h(a, b));
    hvx::store(odd, hvx::interleave_odd_h(a, b));
}
