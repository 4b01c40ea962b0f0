//! Packing of activations into FP16 tiles, and unpacking of results into f32 rows.
//!
//! Each row is divided by a power of two that brings its largest magnitude to [1, 2), and its
//! results are multiplied by it. Both are exact, and neither large nor tiny activations leave
//! FP16's range in the matrix unit.
//!
//! The matrix unit computes only with finite numbers, so a row with NaN or infinity passes through
//! it as zeros. Its factor is NaN, which makes its results NaN and leaves other rows alone.

use crate::hvx::{self, Vector};
use crate::layout::{Line, TILE_DIM, Tile};
use crate::ops::rows::all_lanes;
use crate::rt::cache;

/// Fewest bytes of a row that are worth an instruction to fetch the next one.
const FETCH_BYTES: usize = 2048;

/// Difference between the exponent biases of f32 and f16.
const BIAS_DIFFERENCE: u32 = 127 - 15;

/// The powers of two that results of the rows of a tile are multiplied by.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct RowFactors {
    /// NaN for a row with an element that is not finite.
    wide: [f32; TILE_DIM],
    /// For each line, the f16 of its two rows, the first in the lower half.
    halves: [u32; TILE_DIM / 2],
    /// 1 if all factors are normal f16, otherwise 0.
    are_halves: u32,
    reserved: [u32; 15],
}

impl RowFactors {
    /// Returns the factors, two for each line.
    pub(super) fn wide(&self) -> &[[f32; 2]] {
        self.wide.as_chunks().0
    }

    /// Returns the f16 of the factors, two for each line, if all are normal f16.
    pub(super) fn halves(&self) -> Option<&[u32; TILE_DIM / 2]> {
        (self.are_halves != 0).then_some(&self.halves)
    }

    /// Sets the factors of a line.
    fn set(&mut self, line: usize, factors: [f32; 2]) {
        let [first, second] = factors.map(f16_bits);
        self.wide.as_chunks_mut().0[line] = factors;
        self.halves[line] = first | second << 16;
        self.are_halves &= u32::from(first.min(second) != 0);
    }
}

/// Returns the f16 bits of a power of two, 0 if it is not a normal f16.
fn f16_bits(factor: f32) -> u32 {
    let exponent = (factor.to_bits() >> 23).wrapping_sub(BIAS_DIFFERENCE);
    if (1..=30).contains(&exponent) {
        exponent << 10
    } else {
        0
    }
}

/// Returns the power of two at or below the largest magnitude in `row`, NaN if an element is not
/// finite; and its inverse, with which the row is multiplied.
#[inline(always)]
fn factor_of(row: &[f32]) -> [f32; 2] {
    let magnitude_bits = hvx::splat_w(0x7fff_ffff);
    let (whole, rest) = row.as_chunks::<TILE_DIM>();
    let (fours, last) = whole.as_chunks::<4>();
    let mut largest = [hvx::splat_w(0); 4];
    for four in fours {
        // Magnitudes compare like their bits, so the integer maximum is theirs.
        for (largest, elems) in largest.iter_mut().zip(four) {
            let magnitude = hvx::and(hvx::load_f32(elems), magnitude_bits);
            *largest = hvx::max_w(*largest, magnitude);
        }
    }
    let [a, b, c, d] = largest;
    let mut largest = hvx::max_w(hvx::max_w(a, b), hvx::max_w(c, d));
    for elems in last {
        largest = hvx::max_w(largest, hvx::and(hvx::load_f32(elems), magnitude_bits));
    }
    let mut lanes = [0.0; TILE_DIM];
    hvx::store_f32(&mut lanes, all_lanes(largest, hvx::max_w));
    let mut bits = lanes[0].to_bits();
    for x in rest {
        bits = bits.max(x.to_bits() & 0x7fff_ffff);
    }
    let exponent = bits >> 23;
    if exponent == 0xff {
        return [f32::NAN, 1.0];
    }
    if bits == 0 {
        return [1.0; 2];
    }
    // Only the exponent field, limited so that the factor and its inverse are normal numbers.
    let exponent = exponent.clamp(1, 253);
    [exponent << 23, (254 - exponent) << 23].map(f32::from_bits)
}

/// Loads the 32 elements of a row that start at `k`, times `inverse`; zeros past the row's end.
#[inline(always)]
fn scaled(row: &[f32], k: usize, inverse: Vector) -> Vector {
    let rest = row.get(k..).unwrap_or_default();
    if rest.is_empty() {
        return hvx::splat_w(0);
    }
    let [mut padded] = hvx::zeros();
    let elems = rest.first_chunk::<TILE_DIM>().unwrap_or_else(|| {
        let padded: &mut [f32; TILE_DIM] = bytemuck::cast_mut(&mut padded);
        hvx::copy_f32(padded, rest);
        padded
    });
    hvx::mul_f32(hvx::load_f32(elems), inverse)
}

/// Returns the interleaved f16 of 32 elements of two rows, times the rows' inverses.
#[inline(always)]
fn narrow_scaled(even: &[f32; TILE_DIM], odd: &[f32; TILE_DIM], inverses: [Vector; 2]) -> Vector {
    hvx::mul_narrow_f32([hvx::load_f32(even), hvx::load_f32(odd)], inverses)
}

/// Packs up to 32 rows into tiles. Prefetches each pair of rows while it packs the pair before.
///
/// - `row(i)`: row i of these, `None` past the last one
/// - `tiles`: `ceil(K / 32)` tiles, all written; missing rows become zero
/// - `factors`: written, for [`unpack_tile`]
pub fn pack_rows<'a>(
    row: impl Fn(usize) -> Option<&'a [f32]>,
    tiles: &mut [Tile],
    factors: &mut RowFactors,
) {
    factors.are_halves = 1;
    let pair = |line: usize| [row(2 * line), row(2 * line + 1)].map(Option::unwrap_or_default);
    let mut next = pair(0);
    for line in 0..TILE_DIM / 2 {
        let rows = next;
        next = pair(line + 1);
        fetch_pair(next);
        factors.set(line, hvx::widest(PackTwo { rows, tiles, line }));
    }
}

/// Prefetches two rows, or only the first one if the distance of the second does not fit in a fetch
/// of both, because a second fetch would end the first.
fn fetch_pair([first, second]: [&[f32]; 2]) {
    let bytes = size_of_val(first);
    if bytes < FETCH_BYTES {
        return;
    }
    let distance = second.as_ptr().addr().wrapping_sub(first.as_ptr().addr());
    let are_near = size_of_val(second) == bytes && distance <= u16::MAX.into();
    let count = if are_near { 2 } else { 1 };
    cache::fetch_rows(first.as_ptr().cast(), count, bytes, distance);
}

/// Packs two rows into line `line` of each tile.
struct PackTwo<'a> {
    rows: [&'a [f32]; 2],
    tiles: &'a mut [Tile],
    line: usize,
}

impl hvx::Kernel for PackTwo<'_> {
    type Output = [f32; 2];

    #[inline(always)]
    fn run(self) -> [f32; 2] {
        let [[even_factor, even_inverse], [odd_factor, odd_inverse]] = self.rows.map(factor_of);
        let factors = [even_factor, odd_factor];
        let [even, odd] = [0, 1].map(|i| {
            let is_finite = !factors[i].is_nan();
            if is_finite { self.rows[i] } else { &[] }
        });
        let inverses = [even_inverse, odd_inverse].map(hvx::splat_f32);
        let line = self.line;
        let (whole_even, whole_odd) = (even.as_chunks().0, odd.as_chunks().0);
        let both = whole_even.len().min(whole_odd.len());
        let both = both.min(self.tiles.len());
        let (first, rest) = self.tiles.split_at_mut(both);
        let (fours, last) = first.as_chunks_mut::<4>();
        let (evens, last_even) = whole_even[..both].as_chunks::<4>();
        let (odds, last_odd) = whole_odd[..both].as_chunks::<4>();
        for ((tiles, even), odd) in fours.iter_mut().zip(evens).zip(odds) {
            // Loads come before the first store, because the compiler must assume that a store
            // changes the memory that is loaded next.
            let mut halves = [hvx::splat_w(0); 4];
            for i in 0..4 {
                halves[i] = narrow_scaled(&even[i], &odd[i], inverses);
            }
            for i in 0..4 {
                hvx::store(&mut tiles[i].0[line], halves[i]);
            }
        }
        for ((tile, even), odd) in last.iter_mut().zip(last_even).zip(last_odd) {
            hvx::store(&mut tile.0[line], narrow_scaled(even, odd, inverses));
        }
        // The last columns, and rows whose neighbour is missing.
        for (kt, tile) in rest.iter_mut().enumerate() {
            let k = (both + kt) * TILE_DIM;
            let line = &mut tile.0[line];
            if k >= even.len().max(odd.len()) {
                hvx::store(line, hvx::splat_w(0));
                continue;
            }
            let even = scaled(even, k, inverses[0]);
            let odd = scaled(odd, k, inverses[1]);
            hvx::store(line, hvx::narrow_f32(even, odd));
        }
        factors
    }
}

/// Returns the two rows of a line times their factors.
#[inline(always)]
pub(super) fn widen_scaled(line: &Line, factors: [f32; 2]) -> [Vector; 2] {
    let (even, odd) = hvx::widen_mul_f16(hvx::load(line), hvx::splat_h(0x3c00));
    [
        hvx::mul_by_power(even, hvx::splat_f32(factors[0])),
        hvx::mul_by_power(odd, hvx::splat_f32(factors[1])),
    ]
}

/// Converts a tile of results to f32: row i is 32 columns.
pub fn unpack_tile(tile: &Tile, factors: &RowFactors, out: &mut [[f32; TILE_DIM]; TILE_DIM]) {
    hvx::widest(Unpack { tile, factors, out });
}

/// The arguments of [`unpack_tile`].
struct Unpack<'a> {
    tile: &'a Tile,
    factors: &'a RowFactors,
    out: &'a mut [[f32; TILE_DIM]; TILE_DIM],
}

impl hvx::Kernel for Unpack<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let rows = self.out.as_chunks_mut::<2>().0;
        for ((line, rows), factors) in self.tile.0.iter().zip(rows).zip(self.factors.wide()) {
            let [even, odd] = widen_scaled(line, *factors);
            hvx::store_f32(&mut rows[0], even);
            hvx::store_f32(&mut rows[1], odd);
        }
    }
}
