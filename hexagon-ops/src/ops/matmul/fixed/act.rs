//! Quantization of activations to two signed digits of 8 bits, with one factor for each row.
//!
//! ```text
//! lines of four rows:
//!   4 · 2        for each row its factor, f32 in all lanes, and all bits if it has infinity or NaN
//!   8 · blocks   for each four tiles of K, each row: high digits, then low digits
//!   starts       for each four tiles of K, each row: a word for each tile, -ZERO · sum of its elements
//!
//! factor = largest magnitude / 32600, or less for a long K
//! q      = round(x / factor) = 256 · high + low, both from -128 to 127; bytes of each 4 in the order 0 2 1 3
//! ```
//!
//! A step is 2^15 times less than the largest element of a row, and an element's error at most half
//! of it: less than the rounding to f16 of the elements that contribute most.

use super::super::quantize::{ROUNDER, WordPairs, exponent, lower, reciprocal, reduce};
use super::{Bits, ROWS};
use crate::error::{Error, Result};
use crate::hvx::{self, Vector};
use crate::layout::{Line, TILE_DIM};
use crate::ops::rows::all_lanes;

/// Elements and tiles of a block, which fill a line of digits.
const BLOCK: usize = 128;
pub(super) const BLOCK_TILES: usize = BLOCK / TILE_DIM;
/// Lines of the factor of a row.
pub(super) const FACTOR_LINES: usize = 2;
/// Lines of the digits of a block of four rows.
pub(super) const BLOCK_LINES: usize = 2 * ROWS;
/// Blocks whose sums are in one vector.
const BLOCKS_OF_SUMS: usize = 8;

/// The largest digit pair, less a little so that rounding cannot exceed it: 127 · 256 + 127 is the
/// limit.
const MOST: f32 = 32600.0;

/// The part of a power of two that is multiplied apart, and its exponent.
const PARTS: f32 = 512.0;
const PART_BITS: i32 = 9;

/// Words of four rows: of each row both digits, each of four tiles.
pub(super) type Block = [[[WordPairs; BLOCK_TILES]; 2]; ROWS];
/// The words that the sums of four rows begin with, for each of four tiles.
pub(super) type Starts = [[i32; BLOCK_TILES]; ROWS];

/// Returns the lines of four rows of `k` elements.
pub(in super::super) const fn rows_lines(k: usize) -> usize {
    let blocks = k.div_ceil(BLOCK);
    ROWS * FACTOR_LINES + blocks * BLOCK_LINES + blocks.div_ceil(2)
}

/// Quantizes up to four rows; others become zeros.
///
/// - `row`: returns the row with a number, K elements, `None` past the last one
/// - `zero_bits`: the power of two that was added to each weight
/// - `out`: [`rows_lines`] of K
///
/// # Errors
/// `Length` if a row is not whole tiles, or if `out` has another length.
pub(in super::super) fn quantize_rows<'a>(
    row: impl Fn(usize) -> Option<&'a [f32]>,
    k: usize,
    zero_bits: u32,
    out: &mut [Line],
) -> Result<()> {
    let whole = k / TILE_DIM * TILE_DIM;
    for (what, have, want) in [
        ("activation row", k, whole),
        (
            "lines of activations in fixed point",
            out.len(),
            rows_lines(k),
        ),
    ] {
        if have != want {
            return Err(Error::Length { what, have, want });
        }
    }
    let bits = Bits::new(k, zero_bits);
    let (factors, rest) = out.split_at_mut(ROWS * FACTOR_LINES);
    let (digits, starts) = rest.split_at_mut(k.div_ceil(BLOCK) * BLOCK_LINES);
    for (i, factor) in factors.as_chunks_mut().0.iter_mut().enumerate() {
        hvx::widest(QuantizeRow {
            row: row(i).unwrap_or_default(),
            index: i,
            bits,
            zero_bits,
            factor,
            digits: digits.as_chunks_mut::<2>().0.as_chunks_mut().0,
            starts: bytemuck::cast_slice_mut(starts),
        });
    }
    Ok(())
}

/// The arguments of [`quantize_rows`] for one of its rows.
struct QuantizeRow<'a> {
    row: &'a [f32],
    index: usize,
    bits: Bits,
    zero_bits: u32,
    factor: &'a mut [Line; FACTOR_LINES],
    digits: &'a mut [[[Line; 2]; ROWS]],
    starts: &'a mut [Starts],
}

impl hvx::Kernel for QuantizeRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { row, index, .. } = self;
        let most = MOST / f32::from(1_u16 << self.bits.act);
        let [factor, nan, multiplier] = factors(row, most);
        hvx::store(&mut self.factor[0], factor);
        hvx::store(&mut self.factor[1], nan);
        let (whole, rest) = row.as_chunks::<BLOCK>();
        let mut padded = hvx::zeros::<BLOCK_TILES>();
        let padded: &mut [f32; BLOCK] = bytemuck::cast_mut(&mut padded);
        hvx::copy_f32(padded, rest);
        let mut elems = whole.iter().chain(core::iter::repeat(&*padded));
        let sum_groups = self.digits.chunks_mut(BLOCKS_OF_SUMS);
        for (digits, starts) in sum_groups.zip(self.starts.chunks_mut(BLOCKS_OF_SUMS)) {
            let mut sums = [hvx::splat_w(0); BLOCKS_OF_SUMS];
            for (digits, sum) in digits.iter_mut().zip(&mut sums) {
                // PANIC: the iterator has no end. A missing row has zeros only.
                let Some(elems) = elems.next() else {
                    unreachable!("zeros end")
                };
                *sum = quantize_block(elems, multiplier, &mut digits[index]);
            }
            let sums = reduce(sums, hvx::add_w);
            let mut line = Line::ZERO;
            let zeros = hvx::shl_w(sums, self.zero_bits.cast_signed());
            hvx::store(&mut line, hvx::sub_w(hvx::splat_w(0), zeros));
            let words: &[[i32; BLOCK_TILES]; BLOCKS_OF_SUMS] = bytemuck::cast_ref(&line);
            for (starts, words) in starts.iter_mut().zip(words) {
                starts[index] = *words;
            }
        }
    }
}

/// Returns the factor of a row, a mask of all bits if an element is not finite, and the
/// multiplier of the row's elements: the inverse of the factor.
#[inline(always)]
fn factors(row: &[f32], most: f32) -> [Vector; 3] {
    let (fours, rest) = row.as_chunks::<TILE_DIM>().0.as_chunks::<4>();
    let mut largest = [hvx::splat_w(0); 4];
    for four in fours {
        for (largest, elems) in largest.iter_mut().zip(four) {
            *largest = hvx::larger_f32(*largest, hvx::load_f32(elems));
        }
    }
    for (largest, elems) in largest.iter_mut().zip(rest) {
        *largest = hvx::larger_f32(*largest, hvx::load_f32(elems));
    }
    let [a, b, c, d] = largest;
    let largest = all_lanes(hvx::max_w(hvx::max_w(a, b), hvx::max_w(c, d)), hvx::max_w);
    // A lower limit keeps the factor and its inverse normal.
    let power = hvx::max_w(exponent(largest), hvx::splat_w(36 << 23));
    let mantissa = hvx::and(largest, hvx::splat_w(0x007f_ffff));
    // The exponent field of infinity and NaN, 255, plus one is the sign bit.
    let sign = hvx::shr_w(hvx::add_w(power, hvx::splat_w(1 << 23)), 31);
    let nan = hvx::sub_w(hvx::splat_w(0), sign);
    let factor = hvx::mul_f32(hvx::or(power, mantissa), hvx::splat_f32(1.0 / most));
    // The inverse of the power is too small for f32 without a part of it.
    let part = hvx::sub_w(hvx::splat_w(254 << 23), lower(power, PART_BITS));
    let one_to_two = hvx::or(mantissa, hvx::splat_f32(1.0));
    let parts = hvx::splat_f32(most / PARTS);
    let multiplier = hvx::mul_f32(hvx::mul_f32(reciprocal(one_to_two), parts), part);
    [factor, nan, multiplier]
}

/// Quantizes four tiles of a row, and returns the sums of each four elements.
#[inline(always)]
fn quantize_block(elems: &[f32; BLOCK], multiplier: Vector, out: &mut [Line; 2]) -> Vector {
    let rounded = elems.as_chunks::<TILE_DIM>().0.iter().map(|elems| {
        let scaled = hvx::mul_f32(hvx::load_f32(elems), multiplier);
        hvx::add_f32(scaled, hvx::splat_f32(ROUNDER))
    });
    let mut words = [multiplier; BLOCK_TILES];
    for (word, rounded) in words.iter_mut().zip(rounded) {
        *word = rounded;
    }
    // The low halves of the words are q.
    let [a, b, c, d] = words;
    let (k01, k23) = hvx::deal_w(hvx::pack_low_h(a, b), hvx::pack_low_h(c, d));
    let low = hvx::interleave_even_b(k01, k23);
    // What the signed low digit is less than the low byte, the high digit is more.
    let half = hvx::splat_h(0x80);
    let high = hvx::interleave_odd_b(hvx::add_h(k01, half), hvx::add_h(k23, half));
    hvx::store(&mut out[0], high);
    hvx::store(&mut out[1], low);
    let ones = hvx::splat_b(1);
    hvx::shl_add_w(hvx::dot4_each(ones, low), hvx::dot4_each(ones, high), 8)
}
