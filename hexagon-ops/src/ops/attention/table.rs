//! A table of exponentials of f16 numbers that are zero or negative.

use crate::hvx::{self, splat_w, sub_f32};
use crate::layout::{LINE_BYTES, Line};
use crate::ops::math;

/// Lines of the table: an f16 for each magnitude.
pub const TABLE_LINES: usize = (1 << 15) * 2 / LINE_BYTES;

/// `e^-x` for every f16 magnitude x, at the byte that is twice its bits: 64 KiB. Infinity and NaN
/// have 0.
#[derive(Debug)]
pub struct ExpTable {
    lines: [Line; TABLE_LINES],
    is_filled: bool,
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
        }
    }

    /// Returns the table's lines, for copying to VTCM.
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
        // Infinity is the first entry that stays 0.
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
            // Half a unit in the last place, plus the error of f32 arithmetic near a tie.
            let unit = (want / 1024.0).max(2_f64.powi(-24));
            assert!(
                (have - want).abs() <= 0.501 * unit,
                "{x}: {have} for {want}"
            );
        }
    }
}
