//! A table of exponentials of f16 numbers that are zero or negative.

use crate::hvx::{self, splat_w, sub_f32};
use crate::layout::{F16_TILE_BYTES, LINE_BYTES, Line, Tile};
use crate::ops::math;

/// Lines of the table: an f16 for each magnitude.
pub const TABLE_LINES: usize = (1 << 15) * 2 / LINE_BYTES;

/// Size of the table in tiles of VTCM.
pub const TABLE_TILES: usize = TABLE_LINES * LINE_BYTES / F16_TILE_BYTES;

/// `e^-x` for every f16 magnitude x, at the byte that is twice its bits: 64 KiB. Infinity and NaN
/// have 0.
#[derive(Debug)]
pub struct ExpTable {
    lines: [Line; TABLE_LINES],
    is_filled: bool,
    /// VTCM has a copy.
    is_resident: bool,
}

impl Default for ExpTable {
    fn default() -> Self {
        Self::new()
    }
}

impl ExpTable {
    /// Returns a table that is filled at its first use.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            lines: [Line::ZERO; TABLE_LINES],
            is_filled: false,
            is_resident: false,
        }
    }

    /// Returns the copy at `place`, a part of VTCM that nothing else uses, and makes it if
    /// [`Self::evict`] was called since the last time. Returns `None` if the place is too small.
    pub fn resident<'v>(&mut self, place: &'v mut [Tile]) -> Option<&'v [Line; TABLE_LINES]> {
        let lines: &mut [Line] = bytemuck::cast_slice_mut(place);
        let copy: &mut [Line; TABLE_LINES] = lines.first_chunk_mut()?;
        if !self.is_resident {
            hvx::copy(copy, self.lines());
            self.is_resident = true;
        }
        Some(copy)
    }

    /// Forgets the copy in VTCM, because other programs may use its place.
    pub const fn evict(&mut self) {
        self.is_resident = false;
    }

    /// Returns the table's lines.
    #[must_use]
    pub fn lines(&mut self) -> &[Line; TABLE_LINES] {
        if !self.is_filled {
            hvx::widest(Fill(&mut self.lines));
            self.is_filled = true;
        }
        &self.lines
    }
}

/// Fills the table.
struct Fill<'a>(&'a mut [Line; TABLE_LINES]);

impl hvx::Kernel for Fill<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut bits = 0_u16;
        // All entries from infinity on stay 0.
        for line in self.0.iter_mut().take(0x7c00 * 2 / LINE_BYTES) {
            let mut magnitudes = Line::ZERO;
            for half in magnitudes.0.as_chunks_mut::<2>().0 {
                *half = bits.to_le_bytes();
                bits += 1;
            }
            let one = hvx::splat_h(0x3c00);
            let (even, odd) = hvx::widen_mul_f16(hvx::load(&magnitudes), one);
            let even = math::exp(sub_f32(splat_w(0), even));
            let odd = math::exp(sub_f32(splat_w(0), odd));
            hvx::store(line, hvx::narrow_f32(even, odd));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_made_after_each_eviction_and_only_then() {
        let mut table = ExpTable::new();
        let mut place = vec![Tile::ZERO; TABLE_TILES];
        let other = Tile([Line([7; LINE_BYTES]); 16]);
        for _ in 0..2 {
            let copy = *table.resident(&mut place).unwrap();
            assert_eq!(&copy, table.lines());
            // While the copy is resident it is not made again, so this change must survive.
            place[0] = other;
            assert_eq!(table.resident(&mut place).unwrap()[0], other.0[0]);
            table.evict();
        }
        assert!(table.resident(&mut place[1..]).is_none());
    }

    #[test]
    fn every_entry_is_the_nearest_f16() {
        let mut table = ExpTable::new();
        let halves: &[u16] = bytemuck::cast_slice(table.lines());
        for (bits, have) in (0_u16..).zip(halves) {
            let x = half::f16::from_bits(bits);
            let have = half::f16::from_bits(*have).to_f64();
            if !x.is_finite() {
                assert_eq!(have, 0.0, "{bits:#x}");
                continue;
            }
            let want = (-x.to_f64()).exp();
            // Half a unit in the last place, and the error of f32 arithmetic near a tie.
            let unit = (want / 1024.0).max(2_f64.powi(-24));
            assert!(
                (have - want).abs() <= 0.501 * unit,
                "{x}: {have} for {want}"
            );
        }
    }
}
