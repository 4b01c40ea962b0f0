//! The inner loop of the tile product for CPUs with AVX-512: the same sums in the same order, twice
//! as many at a time.

use core::arch::x86_64::{
    __m256i, __m512, _mm512_cvtph_ps, _mm512_fmadd_ps, _mm512_permutex2var_ps, _mm512_set1_ps,
    _mm512_setr_epi32, _mm512_setzero_ps,
};

use bytemuck::{cast, cast_ref};

use super::Matrix;
use crate::layout::Tile;

/// Rows whose sums stay in registers: 16 vectors of 16 f32.
const ROWS: usize = 8;

/// Computes `sums += act · weights`. Returns `false`, with nothing done, on a CPU without AVX-512.
#[inline(always)]
pub(super) fn multiply(act: &[Tile], weights: &[Tile], sums: &mut Matrix) -> bool {
    if !is_x86_feature_detected!("avx512f") {
        return false;
    }
    for (act, weights) in act.iter().zip(weights) {
        // SAFETY: AVX-512F was detected on this CPU.
        unsafe { multiply_tile(act, weights, sums) };
    }
    true
}

#[target_feature(enable = "avx512f")]
fn multiply_tile(act: &Tile, weights: &Tile, sums: &mut Matrix) {
    let act: Matrix = cast(unpack(act));
    let weights = unpack(weights);
    let rows = act.as_chunks::<ROWS>().0;
    for (act, sums) in rows.iter().zip(sums.as_chunks_mut::<ROWS>().0) {
        if super::is_zero(act) {
            continue;
        }
        let mut block: [[__m512; 2]; ROWS] = cast(*sums);
        for (k, [left, right]) in weights.iter().enumerate() {
            for (act, block) in act.iter().zip(&mut block) {
                let factor = _mm512_set1_ps(act[k]);
                block[0] = _mm512_fmadd_ps(factor, *left, block[0]);
                block[1] = _mm512_fmadd_ps(factor, *right, block[1]);
            }
        }
        *sums = cast(block);
    }
}

/// Returns the tile's rows as f32.
#[target_feature(enable = "avx512f")]
#[inline]
fn unpack(tile: &Tile) -> [[__m512; 2]; 32] {
    let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    let odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    let mut rows = [[_mm512_setzero_ps(); 2]; 32];
    // Plain loops, because closures would not be compiled with this CPU feature.
    for (line, rows) in tile.0.iter().zip(rows.as_chunks_mut::<2>().0) {
        let halves: &[[__m256i; 2]; 2] = cast_ref(line);
        for (i, [low, high]) in halves.iter().enumerate() {
            let (low, high) = (_mm512_cvtph_ps(*low), _mm512_cvtph_ps(*high));
            rows[0][i] = _mm512_permutex2var_ps(low, even, high);
            rows[1][i] = _mm512_permutex2var_ps(low, odd, high);
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::super::Multiply;
    use super::*;
    use crate::hvx::Kernel;
    use crate::layout::Line;

    #[test]
    fn sums_are_those_of_the_portable_form_to_the_bit() {
        let mut state = 1_u32;
        let mut tile = |rows: usize| {
            let mut tile = Tile::ZERO;
            for line in &mut tile.0[..rows / 2] {
                let halves: &mut [u16; 64] = bytemuck::cast_mut::<Line, _>(line);
                for half in halves {
                    state = state.wrapping_mul(0x0019_660d).wrapping_add(0x3c6e_f35f);
                    // Exponents from -11 to 0, and both signs.
                    *half = (state >> 16) as u16 & 0xafff | 0x1000;
                }
            }
            tile
        };
        for rows in [2, 10, 32] {
            let act = [tile(rows), tile(rows)];
            let weights = [tile(32), tile(32)];
            let mut sums = [[0.5; 32]; 32];
            let mut portable = sums;
            if !multiply(&act, &weights, &mut sums) {
                return eprintln!("skipped: this CPU has no AVX-512");
            }
            Multiply {
                act: &act,
                weights: &weights,
                accumulator: &mut portable,
            }
            .run();
            assert_ne!(sums[0], [0.5; 32]);
            assert_eq!(sums, portable, "{rows} rows");
        }
    }
}
