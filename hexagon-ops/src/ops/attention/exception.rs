//! Infinity and NaN among queries, keys and values.
//!
//! The vector units' maximum does not propagate NaN, the matrix unit treats infinity and NaN as
//! numbers, and a hidden position would spoil sums by 0 · NaN. So kernels that read keys and values
//! only collect the largest magnitude. If that is not finite, infinite and NaN elements are
//! replaced by zeros. A row that sees one of their positions is *spoiled*: its result is NaN.

use crate::hvx::{self, Vector, max_f32, max_h, splat_f32, splat_h, splat_w};
use crate::layout::{Line, TILE_DIM, Tile, f16_tile_offset};
use crate::ops::attention::{LANES, NOTHING};
use crate::ops::rows::{all_lanes, first_lane};

/// All bits of an f16 but the sign, and infinity.
const MAGNITUDE_F16: u16 = 0x7fff;
const INFINITY_F16: u16 = 0x7c00;
/// f16 1.
const ONE_F16: u16 = 0x3c00;

/// Finds the largest of f16 magnitudes.
pub(super) struct LargestF16<'a>(pub(super) &'a [Line]);

impl hvx::Kernel for LargestF16<'_> {
    type Output = Option<f32>;

    /// Returns the largest magnitude, or `None` if that is not finite.
    #[inline(always)]
    fn run(self) -> Option<f32> {
        let mut largest = splat_w(0);
        for line in self.0 {
            largest = max_h(largest, hvx::load(line));
        }
        let largest = all_lanes(largest, max_h);
        let word = first_lane(largest).to_bits();
        let infinity = u32::from(INFINITY_F16);
        if word & 0xffff >= infinity || word >> 16 >= infinity {
            return None;
        }
        let (even, odd) = hvx::widen_mul_f16(largest, splat_h(ONE_F16));
        Some(first_lane(max_f32(even, odd)))
    }
}

/// Returns `true` if f32 magnitudes are all finite.
pub(super) fn is_finite(largest: Vector) -> bool {
    let mut lanes = [0.0; LANES];
    hvx::store_f32(&mut lanes, largest);
    lanes.iter().all(|x| x.is_finite())
}

/// Replaces elements of a tile that are not finite by zeros. Returns a bit for each position that
/// had any; `position` turns row and column into a position.
pub(super) fn clear_tile(tile: &mut Tile, position: fn(usize, usize) -> usize) -> u32 {
    let halves: &mut [u16] = bytemuck::cast_slice_mut(&mut tile.0);
    let mut found = 0;
    for row in 0..TILE_DIM {
        for column in 0..TILE_DIM {
            let half = &mut halves[f16_tile_offset(row, column) / 2];
            if *half & MAGNITUDE_F16 >= INFINITY_F16 {
                *half = 0;
                found |= 1 << position(row, column);
            }
        }
    }
    found
}

/// Replaces f32 that are not finite by zeros. Returns a bit for each position that had any.
///
/// - `lines`: up to 32 positions of `per_position` lines
pub(super) fn clear_lines(lines: &mut [Line], per_position: usize) -> u32 {
    let mut found = 0;
    for (position, lines) in lines.chunks_mut(per_position).enumerate() {
        for x in lines
            .iter_mut()
            .flat_map(bytemuck::cast_mut::<_, [f32; LANES]>)
        {
            if !x.is_finite() {
                *x = 0.0;
                found |= 1 << position;
            }
        }
    }
    found
}

/// Returns `true` if a mask leaves any of some positions visible.
///
/// - `exceptions`: for each 32 positions, a bit for each
pub(super) fn sees(mask: &[f32], exceptions: &[u32]) -> bool {
    mask.chunks(TILE_DIM).zip(exceptions).any(|(mask, bits)| {
        let mut positions = mask.iter().enumerate();
        *bits != 0 && positions.any(|(i, x)| *x > NOTHING && bits >> i & 1 == 1)
    })
}

/// Marks the result of a row as spoiled.
///
/// - `sum`: the result's line of sums, which is never NaN otherwise
pub(super) fn spoil(sum: &mut Line) {
    hvx::store(sum, splat_f32(f32::NAN));
}

/// Returns `true` if the row with this line of sums is spoiled.
pub(super) fn is_spoiled(sum: &Line) -> bool {
    let lanes: &[f32; LANES] = bytemuck::cast_ref(sum);
    lanes[0].is_nan()
}
