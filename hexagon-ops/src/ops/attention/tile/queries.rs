//! Packing of queries into FP16 tiles.
//!
//! Queries are multiplied by the factor of the scores before they are rounded to FP16. A tile of
//! rows is divided by one power of two, so that large queries stay in FP16's range; the matrix unit
//! multiplies scores by it as it stores them. Division leaves the error of a score alone: a row
//! becomes subnormal only if another row of its tile is 2^10 times as large.
//!
//! The matrix unit computes only with finite numbers, so a row with NaN or infinity passes through
//! it as zeros, and is marked as spoiled.

use crate::hvx::{self, Vector, add_f32, and, max_w, mul_f32, splat_f32, splat_w};
use crate::layout::{F16_TILE_LINES, TILE_DIM, Tile};
use crate::ops::rows::{all_lanes, first_lane};

/// Exponent field of an f32, as the bits of 1 have it, and of infinity.
const ONE_FIELD: u32 = 127;
const INFINITY_FIELD: u32 = 255;
/// Largest binary exponent of an f16, and its exponent's bias.
const LARGEST_F16: u32 = 15;
const BIAS_F16: u32 = 15;
/// Smallest binary exponent by which queries are divided: smaller ones keep their precision
/// undivided.
const SMALLEST: u32 = ONE_FIELD - 4;

/// Numbers of a tile of packed queries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct QueryTile {
    /// Power of two by which the queries were divided.
    pub(super) factor: f32,
    /// The factor as f16, if an f16 can represent it.
    pub(super) factor_f16: Option<u16>,
    /// Not smaller than the sum of magnitudes of any row, before the division.
    pub(super) reach: f32,
    /// A bit for each row that had an infinity or NaN.
    pub(super) spoiled: u32,
}

impl QueryTile {
    /// Zeros, which are quick to store: numbers of a tile that has not been packed.
    pub(super) const EMPTY: Self = Self {
        factor: 0.0,
        factor_f16: None,
        reach: 0.0,
        spoiled: 0,
    };
}

/// Packs up to 32 rows.
pub(super) struct PackQueries<'a> {
    /// Rows of Dk elements.
    pub(super) rows: &'a mut [&'a [f32]],
    /// Factor of the scores.
    pub(super) factor: f32,
    /// Exponent of a power of two by which the queries are divided, too, and which
    /// [`QueryTile::factor`] lacks.
    pub(super) lower: u32,
    /// `ceil(Dk / 32)` tiles, all written; missing rows become zero.
    pub(super) tiles: &'a mut [Tile],
}

impl hvx::Kernel for PackQueries<'_> {
    type Output = QueryTile;

    #[inline(always)]
    fn run(self) -> QueryTile {
        let Self {
            rows, tiles, lower, ..
        } = self;
        let factor = splat_f32(self.factor);
        let mut spoiled = 0;
        let (largest, mut reach) = measure(rows, factor);
        if !is_finite(largest) {
            for (i, row) in rows.iter_mut().enumerate() {
                if !is_finite(measure(core::slice::from_ref(row), factor).0) {
                    *row = &[];
                    spoiled |= 1 << i;
                }
            }
            reach = measure(rows, factor).1;
        }
        let largest = first_lane(all_lanes(reach, max_w)).to_bits();
        // At most 253, so that the inverse is a normal number, too.
        let divisor = ((largest >> 23).max(SMALLEST) + lower).min(INFINITY_FIELD - 2);
        let inverse = f32::from_bits((2 * ONE_FIELD - divisor) << 23);
        let exponent = divisor - lower;
        let divided = mul_f32(factor, splat_f32(inverse));
        let n_lines = rows.len().div_ceil(2).min(F16_TILE_LINES);
        for (line, rows) in rows.chunks(2).enumerate().take(n_lines) {
            // If the last row of a pair is missing, the row before it times zero takes its place.
            let (odd, odd_factor) = match rows {
                [_, odd] => (*odd, divided),
                _ => (rows[0], splat_w(0)),
            };
            pack_two([rows[0], odd], [divided, odd_factor], tiles, line);
        }
        for tile in tiles {
            hvx::clear(&mut tile.0[n_lines..]);
        }
        let binary = exponent.wrapping_sub(ONE_FIELD).wrapping_add(BIAS_F16);
        QueryTile {
            factor: f32::from_bits(exponent << 23),
            // Above the largest f16, the exponent field becomes that of infinity or overflows.
            factor_f16: u16::try_from(binary << 10)
                .ok()
                .filter(|_| binary <= LARGEST_F16 + BIAS_F16),
            reach: first_lane(all_lanes(reach, add_f32)),
            spoiled,
        }
    }
}

/// Returns `true` if the largest magnitudes, as bits, are all finite.
#[inline(always)]
fn is_finite(largest: Vector) -> bool {
    first_lane(all_lanes(largest, max_w)).to_bits() >> 23 < INFINITY_FIELD
}

/// Returns the largest magnitudes as bits, and the reach of rows times `factor`: for each lane, the
/// largest sum of magnitudes that a row has there. The sum of all lanes is not smaller than that of
/// any row, and no element is larger than the largest lane.
#[inline(always)]
fn measure(rows: &[&[f32]], factor: Vector) -> (Vector, Vector) {
    let magnitude = splat_w(0x7fff_ffff);
    let (mut largest, mut reach) = (splat_w(0), splat_w(0));
    for row in rows {
        let (whole, rest) = row.as_chunks::<TILE_DIM>();
        let mut sums = splat_w(0);
        for elems in whole {
            let elems = and(hvx::load_f32(elems), magnitude);
            largest = max_w(largest, elems);
            sums = add_f32(sums, mul_f32(elems, factor));
        }
        if !rest.is_empty() {
            let elems = and(padded(rest), magnitude);
            largest = max_w(largest, elems);
            sums = add_f32(sums, mul_f32(elems, factor));
        }
        // Positive floats compare like their bits. The mask clears the sign that a negative factor
        // has added.
        reach = max_w(reach, and(sums, magnitude));
    }
    (largest, reach)
}

/// Loads up to 32 elements, with zeros after them.
#[inline(always)]
fn padded(elems: &[f32]) -> Vector {
    let [mut line] = hvx::zeros();
    let all: &mut [f32; TILE_DIM] = bytemuck::cast_mut(&mut line);
    hvx::copy_f32(all, elems);
    hvx::load(&line)
}

/// Packs two rows into line `line` of each tile.
#[inline(always)]
fn pack_two(rows: [&[f32]; 2], factors: [Vector; 2], tiles: &mut [Tile], line: usize) {
    let [even, odd] = rows;
    let [even_factor, odd_factor] = factors;
    let (whole_even, whole_odd) = (even.as_chunks().0, odd.as_chunks().0);
    let both = whole_even.len().min(whole_odd.len()).min(tiles.len());
    let (first, rest) = tiles.split_at_mut(both);
    for ((tile, even), odd) in first.iter_mut().zip(whole_even).zip(whole_odd) {
        let even = mul_f32(hvx::load_f32(even), even_factor);
        let odd = mul_f32(hvx::load_f32(odd), odd_factor);
        hvx::store(&mut tile.0[line], hvx::narrow_f32(even, odd));
    }
    // The last columns, and rows whose neighbour is spoiled.
    for (kt, tile) in rest.iter_mut().enumerate() {
        let start = (both + kt) * TILE_DIM;
        let even = mul_f32(padded(even.get(start..).unwrap_or_default()), even_factor);
        let odd = mul_f32(padded(odd.get(start..).unwrap_or_default()), odd_factor);
        hvx::store(&mut tile.0[line], hvx::narrow_f32(even, odd));
    }
}
