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

use crate::hvx::{self, Vector, max_h, splat_w};
use crate::layout::{Line, TILE_DIM, Tile};
use crate::ops::tensor::View;

/// Elements of a row that are packed at a time.
pub(super) const SLAB: usize = 64;

/// Packs up to 32 keys.
pub(super) struct PackKeys<'a> {
    pub(super) view: &'a View<'a>,
    /// Head and stream.
    pub(super) head: [usize; 2],
    /// The positions; columns past the last one become zero.
    pub(super) positions: Range<usize>,
    /// `ceil(Dk / 32)` tiles.
    pub(super) tiles: &'a mut [Tile],
    /// Receives the largest magnitudes.
    pub(super) largest: &'a mut Line,
}

impl hvx::Kernel for PackKeys<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let n0 = self.view.shape.ne[0];
        let mut largest = splat_w(0);
        for (slab, tiles) in self.tiles.chunks_mut(2).enumerate() {
            let range = slab * SLAB..n0.min((slab + 1) * SLAB);
            let mut square = hvx::zeros();
            let elems =
                (self.view).read_halves(self.positions.clone(), self.head, range, &mut square);
            largest = max_h(largest, elems);
            transpose(&mut square, tiles);
        }
        hvx::store(self.largest, largest);
    }
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
        let mut v = [splat_w(0); 8];
        for (v, line) in v.iter_mut().zip(lines) {
            *v = hvx::load(line);
        }
        exchange::<4, 4>(&mut v);
        exchange::<2, 2>(&mut v);
        exchange::<1, 1>(&mut v);
        for (line, v) in out.iter_mut().zip(v) {
            hvx::store(line, v);
        }
    }
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

/// Packs 64 elements of up to 32 values.
pub(super) struct PackValues<'a> {
    pub(super) view: &'a View<'a>,
    /// Head and stream.
    pub(super) head: [usize; 2],
    /// The positions; rows past the last one become zero.
    pub(super) positions: Range<usize>,
    /// Number of the 64 elements within the row.
    pub(super) slab: usize,
    /// Tile of the even elements.
    pub(super) even: &'a mut Tile,
    /// Tile of the odd ones.
    pub(super) odd: &'a mut Tile,
    /// Receives the largest magnitudes.
    pub(super) largest: &'a mut Line,
}

impl hvx::Kernel for PackValues<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let first = self.slab * SLAB;
        let range = first..self.view.shape.ne[0].min(first + SLAB);
        let mut rows = hvx::zeros::<TILE_DIM>();
        let largest = (self.view).read_halves(self.positions, self.head, range, &mut rows);
        hvx::store(self.largest, largest);
        let lines = self.even.0.iter_mut().zip(&mut self.odd.0);
        for ([a, b], (even, odd)) in rows.as_chunks().0.iter().zip(lines) {
            let (a, b) = (hvx::load(a), hvx::load(b));
            hvx::store(even, hvx::interleave_even_h(a, b));
            hvx::store(odd, hvx::interleave_odd_h(a, b));
        }
    }
}
