//! Packing of activations into FP16 tiles, and unpacking of results into f32 rows.
//!
//! Each row is divided by a power of two that brings its largest magnitude to [1, 2), and its
//! results are multiplied by it. Both are exact, and neither large nor tiny activations leave
//! FP16's range in the matrix unit.
//!
//! The matrix unit takes only finite numbers, so a row with NaN or infinity passes through it as
//! zeros. Its factor is NaN, which makes its results NaN and leaves other rows alone.

use crate::hvx::{self, Vector};
use crate::layout::{TILE_DIM, Tile};

/// A power of two and its inverse, for one row.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct RowFactor {
    factor: f32,
    inverse: f32,
}

impl RowFactor {
    /// The factor of a row whose magnitudes are unknown: 1.
    pub const ONE: Self = Self {
        factor: 1.0,
        inverse: 1.0,
    };

    /// Returns the factor that results of the row are multiplied by.
    #[must_use]
    pub fn factor(self) -> f32 {
        self.factor
    }

    /// Returns the power of two at or below the largest magnitude in `row`, with a NaN factor if an
    /// element is not finite.
    #[inline(always)]
    fn of(row: &[f32]) -> Self {
        let magnitude_bits = hvx::splat_w(0x7fff_ffff);
        let mut largest = hvx::splat_w(0);
        let (whole, rest) = row.as_chunks::<TILE_DIM>();
        for elems in whole {
            // The bits of magnitudes are ordered as the magnitudes are.
            largest = hvx::max_w(largest, hvx::and(hvx::load_f32(elems), magnitude_bits));
        }
        let mut lanes = [0.0; TILE_DIM];
        hvx::store_f32(&mut lanes, largest);
        let bits = lanes
            .iter()
            .chain(rest)
            .map(|x| x.to_bits() & 0x7fff_ffff)
            .max()
            .unwrap_or(0);
        let exponent = bits >> 23;
        if exponent == 0xff {
            return Self {
                factor: f32::NAN,
                inverse: 1.0,
            };
        }
        // The exponent field alone, limited so that both the factor and its inverse are normal
        // numbers.
        let exponent = exponent.clamp(1, 253);
        Self {
            factor: f32::from_bits(exponent << 23),
            inverse: f32::from_bits((254 - exponent) << 23),
        }
    }
}

/// Loads the 32 elements of a row that start at `k`, times `inverse`; zeros past the row's end.
#[inline(always)]
fn scaled(row: &[f32], k: usize, inverse: Vector) -> Vector {
    match row[k..].first_chunk::<TILE_DIM>() {
        Some(elems) => hvx::mul_f32(hvx::load_f32(elems), inverse),
        None => {
            let mut padded = [0.0; TILE_DIM];
            padded[..row.len() - k].copy_from_slice(&row[k..]);
            hvx::mul_f32(hvx::load_f32(&padded), inverse)
        }
    }
}

/// Packs up to 32 rows into tiles.
///
/// - `row(i)`: row i of these, `None` past the last one
/// - `tiles`: `ceil(K / 32)` tiles, all written; missing rows become zero
/// - `factors`: written for each row, for [`unpack_tile`]
pub fn pack_rows<'a>(
    row: impl Fn(usize) -> Option<&'a [f32]>,
    tiles: &mut [Tile],
    factors: &mut [RowFactor; TILE_DIM],
) {
    for (line, factors) in factors.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let rows = [row(2 * line), row(2 * line + 1)].map(Option::unwrap_or_default);
        *factors = hvx::widest(PackTwo { rows, tiles, line });
    }
}

/// Packs two rows into line `line` of each tile.
struct PackTwo<'a> {
    rows: [&'a [f32]; 2],
    tiles: &'a mut [Tile],
    line: usize,
}

impl hvx::Kernel for PackTwo<'_> {
    type Output = [RowFactor; 2];

    #[inline(always)]
    fn run<const FUSED: bool>(self) -> [RowFactor; 2] {
        let [even, odd] = self.rows;
        let factors = [RowFactor::of(even), RowFactor::of(odd)];
        let [even, odd] = [(even, factors[0]), (odd, factors[1])]
            .map(|(row, factor)| if factor.factor.is_nan() { &[] } else { row });
        let even_inverse = hvx::splat_f32(factors[0].inverse);
        let odd_inverse = hvx::splat_f32(factors[1].inverse);
        for (kt, tile) in self.tiles.iter_mut().enumerate() {
            let k = kt * TILE_DIM;
            let even = scaled(even, k.min(even.len()), even_inverse);
            let odd = scaled(odd, k.min(odd.len()), odd_inverse);
            hvx::store(&mut tile.0[self.line], hvx::narrow_f32(even, odd));
        }
        factors
    }
}

/// Converts a tile of results to f32: row i is 32 columns.
pub fn unpack_tile(
    tile: &Tile,
    factors: &[RowFactor; TILE_DIM],
    out: &mut [[f32; TILE_DIM]; TILE_DIM],
) {
    hvx::widest(Unpack { tile, factors, out });
}

/// The arguments of [`unpack_tile`].
struct Unpack<'a> {
    tile: &'a Tile,
    factors: &'a [RowFactor; TILE_DIM],
    out: &'a mut [[f32; TILE_DIM]; TILE_DIM],
}

impl hvx::Kernel for Unpack<'_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(self) {
        let one = hvx::splat_h(0x3c00);
        let rows = self.out.as_chunks_mut::<2>().0;
        let factors = self.factors.as_chunks::<2>().0;
        for ((line, rows), factors) in self.tile.0.iter().zip(rows).zip(factors) {
            let (even, odd) = hvx::widen_mul_f16(hvx::load(line), one);
            hvx::store_f32(
                &mut rows[0],
                hvx::mul_f32(even, hvx::splat_f32(factors[0].factor)),
            );
            hvx::store_f32(
                &mut rows[1],
                hvx::mul_f32(odd, hvx::splat_f32(factors[1].factor)),
            );
        }
    }
}
