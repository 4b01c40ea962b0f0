//! Packing of keys and values into FP16 tiles.
//!
//! Keys are the columns of the first product: word n of line i of a tile holds elements 2i and
//! 2i + 1 of key n, which are word i of that key's row. So 32 rows of 64 elements become two tiles
//! by transposing a square of 32 × 32 words, in five rounds of exchanged blocks.
//!
//! Values are the rows of the second product: word n of line i holds element n of values 2i and
//! 2i + 1. One instruction each turns two rows of 64 elements into a line of the even elements and
//! a line of the odd ones, so strips of values hold first the even, then the odd elements of 64.

use core::ops::Range;

use crate::hvx::{self, Square, Vector, larger_f16, max_h, splat_w};
use crate::layout::{LINE_BYTES, Line, TILE_DIM, Tile};
use crate::ops::tensor::{Type, View};

/// Elements of a row that are packed at a time.
pub(super) const SLAB: usize = 64;

/// Rows of keys or values that are packed.
pub(super) struct Rows<'a> {
    pub(super) view: &'a View<'a>,
    /// Head and stream.
    pub(super) head: [usize; 2],
    /// The positions; what is past the last one becomes zero.
    pub(super) positions: Range<usize>,
}

impl Rows<'_> {
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

    /// Returns the bytes from the first position on, if strips of 32 rows can be loaded as they are: as f16, without
    /// rows of blocks.
    #[inline(always)]
    fn halves(&self) -> Option<Halves<'_>> {
        let Self { view, head, .. } = self;
        let [head, stream] = *head;
        let is_f16 = view.shape.dtype == Type::F16 && view.shape.has_dense_rows();
        is_f16.then(|| Halves {
            view,
            offset: view.shape.row([self.positions.start, head, stream]),
            elems: view.shape.ne[0],
            count: self.positions.len(),
        })
    }

    /// Reads a slab of the rows of a strip as f16, with zeros after them. Returns the bits of their largest magnitudes.
    #[inline(always)]
    fn read(&self, strip: usize, slab: usize, out: &mut [Line; TILE_DIM]) -> Vector {
        self.view
            .read_halves(self.strip(strip), self.head, self.slab(slab), out)
    }
}

/// Rows of f16.
struct Halves<'a> {
    view: &'a View<'a>,
    /// Byte of the first row.
    offset: usize,
    /// Elements of a row.
    elems: usize,
    /// Number of rows.
    count: usize,
}

impl Halves<'_> {
    /// Returns the 32 rows of a strip and 64 of their elements, if there are as many.
    #[inline(always)]
    fn square<const ALIGNED: bool>(
        &self,
        strip: usize,
        slab: usize,
    ) -> Option<Square<'_, ALIGNED>> {
        if (strip + 1) * TILE_DIM > self.count || (slab + 1) * SLAB > self.elems {
            return None;
        }
        let rows = strip * TILE_DIM * self.view.shape.nb[1];
        let offset = self.offset + rows + slab * LINE_BYTES;
        self.view.strided(offset, TILE_DIM)?.square()
    }
}

/// Packs keys.
pub(super) struct PackKeys<'a> {
    pub(super) rows: Rows<'a>,
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
        let halves = self.rows.halves();
        for (strip, tiles) in tiles.chunks_mut(self.per_strip).enumerate() {
            for (slab, tiles) in tiles.chunks_mut(2).enumerate() {
                if let (Some(halves), [low, high]) = (&halves, &mut *tiles) {
                    if let Some(square) = halves.square::<true>(strip, slab) {
                        largest = max_h(largest, transpose_rows(square, low, high));
                        continue;
                    }
                    if let Some(square) = halves.square::<false>(strip, slab) {
                        largest = max_h(largest, transpose_rows(square, low, high));
                        continue;
                    }
                }
                let mut square = hvx::zeros();
                largest = max_h(largest, self.rows.read(strip, slab, &mut square));
                transpose(&mut square, tiles);
            }
        }
        hvx::store(self.largest, largest);
    }
}

/// Transposes 32 rows of 32 words each, as [`transpose`] does. Returns the largest magnitudes of their f16.
#[inline(always)]
fn transpose_rows<const ALIGNED: bool>(
    rows: Square<'_, ALIGNED>,
    low: &mut Tile,
    high: &mut Tile,
) -> Vector {
    let mut largest = splat_w(0);
    for i in 0..8 {
        let mut v = [0, 8, 16, 24].map(|row| rows.load(i + row));
        for v in v {
            largest = larger_f16(largest, v);
        }
        exchange::<16, 2>(&mut v);
        exchange::<8, 1>(&mut v);
        // The lines that the other rounds exchange are next to each other.
        hvx::store(&mut low.0[i], v[0]);
        hvx::store(&mut low.0[i + 8], v[1]);
        hvx::store(&mut high.0[i], v[2]);
        hvx::store(&mut high.0[i + 8], v[3]);
    }
    for tile in [low, high] {
        for lines in tile.0.as_chunks_mut::<8>().0 {
            let v = last_rounds(lines);
            for (line, v) in lines.iter_mut().zip(v) {
                hvx::store(line, v);
            }
        }
    }
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
    pub(super) rows: Rows<'a>,
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
        let Self { rows, slab, .. } = self;
        let mut largest = splat_w(0);
        let halves = rows.halves();
        for (strip, (even, odd)) in self.even.iter_mut().zip(self.odd).enumerate() {
            if let Some(halves) = &halves {
                if let Some(square) = halves.square::<true>(strip, slab) {
                    largest = max_h(largest, interleave_rows(square, even, odd));
                    continue;
                }
                if let Some(square) = halves.square::<false>(strip, slab) {
                    largest = max_h(largest, interleave_rows(square, even, odd));
                    continue;
                }
            }
            let mut lines = hvx::zeros::<TILE_DIM>();
            largest = max_h(largest, rows.read(strip, slab, &mut lines));
            let out = even.0.iter_mut().zip(&mut odd.0);
            for ([a, b], (even, odd)) in lines.as_chunks().0.iter().zip(out) {
                interleave(hvx::load(a), hvx::load(b), even, odd);
            }
        }
        hvx::store(self.largest, largest);
    }
}

/// Packs 32 rows. Returns the largest magnitudes of their f16.
#[inline(always)]
fn interleave_rows<const ALIGNED: bool>(
    rows: Square<'_, ALIGNED>,
    even: &mut Tile,
    odd: &mut Tile,
) -> Vector {
    let mut largest = splat_w(0);
    for (i, (even, odd)) in even.0.iter_mut().zip(&mut odd.0).enumerate() {
        let (a, b) = (rows.load(2 * i), rows.load(2 * i + 1));
        largest = larger_f16(larger_f16(largest, a), b);
        interleave(a, b, even, odd);
    }
    largest
}

/// Stores the even and the odd elements of two rows.
#[inline(always)]
fn interleave(a: Vector, b: Vector, even: &mut Line, odd: &mut Line) {
    hvx::store(even, hvx::interleave_even_h(a, b));
    hvx::store(odd, hvx::interleave_odd_h(a, b));
}
