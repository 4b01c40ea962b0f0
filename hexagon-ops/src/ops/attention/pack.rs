//! Keys and values to FP16 tiles.
//!
//! Keys are the columns of the first product: word n of line i of a tile holds elements 2i and 2i + 1 of key n, which are
//! word i of that key's row. So 32 rows of 64 elements become two tiles by transposing a square of 32 × 32 words, in five
//! rounds of exchanged blocks.
//!
//! Values are the rows of the second product: word n of line i holds element n of values 2i and 2i + 1. Two rows of 64
//! elements become a line for the even elements and one for the odd ones by one instruction each; strips of values
//! therefore hold the even, then the odd elements of 64.

use core::ops::Range;

use crate::hvx::{self, Vector, splat_w};
use crate::layout::{F16_TILE_LINES, Line, TILE_DIM, Tile};
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
}

impl hvx::Kernel for PackKeys<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let n0 = self.view.shape.ne[0];
        let [i2, i3] = self.head;
        for (slab, tiles) in self.tiles.chunks_mut(2).enumerate() {
            let range = slab * SLAB..n0.min((slab + 1) * SLAB);
            let mut square = [Line::ZERO; TILE_DIM];
            for (line, position) in square.iter_mut().zip(self.positions.clone()) {
                let row = self.view.read_halves([position, i2, i3], range.clone());
                hvx::store(line, row);
            }
            transpose(&mut square);
            for (tile, lines) in tiles.iter_mut().zip(square.chunks(F16_TILE_LINES)) {
                for (to, from) in tile.0.iter_mut().zip(lines) {
                    hvx::store(to, hvx::load(from));
                }
            }
        }
    }
}

/// Exchanges rows and columns of 32 × 32 words.
#[inline(always)]
fn transpose(square: &mut [Line; TILE_DIM]) {
    round::<16>(square);
    round::<8>(square);
    round::<4>(square);
    round::<2>(square);
    round::<1>(square);
}

/// Exchanges words at (i, j + W) and (i + W, j) for blocks of W.
#[inline(always)]
fn round<const W: usize>(square: &mut [Line; TILE_DIM]) {
    for rows in square.chunks_exact_mut(2 * W) {
        let (upper, lower) = rows.split_at_mut(W);
        for (a, b) in upper.iter_mut().zip(lower) {
            let (even, odd) = hvx::swap_blocks::<W>(hvx::load(a), hvx::load(b));
            hvx::store(a, even);
            hvx::store(b, odd);
        }
    }
}

/// Packs 64 elements of the values of some positions.
pub(super) struct PackValues<'a> {
    pub(super) view: &'a View<'a>,
    /// Head and stream.
    pub(super) head: [usize; 2],
    /// The positions; rows past the last one become zero.
    pub(super) positions: Range<usize>,
    /// Which 64 elements.
    pub(super) slab: usize,
    /// Tiles of the even elements, then as many of the odd ones: one for each 32 positions.
    pub(super) tiles: &'a mut [Tile],
}

impl PackValues<'_> {
    /// The elements of a position; zeros past the last one.
    #[inline(always)]
    fn row(&self, position: usize) -> Vector {
        if position >= self.positions.end {
            return splat_w(0);
        }
        let [i2, i3] = self.head;
        let first = self.slab * SLAB;
        let end = self.view.shape.ne[0].min(first + SLAB);
        self.view.read_halves([position, i2, i3], first..end)
    }
}

impl hvx::Kernel for PackValues<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(mut self) {
        let tiles = core::mem::take(&mut self.tiles);
        let (even, odd) = tiles.split_at_mut(tiles.len() / 2);
        for (kt, (even, odd)) in even.iter_mut().zip(odd).enumerate() {
            let first = self.positions.start + kt * TILE_DIM;
            for (i, (even, odd)) in even.0.iter_mut().zip(&mut odd.0).enumerate() {
                let a = self.row(first + 2 * i);
                let b = self.row(first + 2 * i + 1);
                hvx::store(even, hvx::interleave_even_h(a, b));
                hvx::store(odd, hvx::interleave_odd_h(a, b));
            }
        }
    }
}
