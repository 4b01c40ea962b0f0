//! The block Hadamard transform, with three stages in one pass over memory.

use multiversion::multiversion;

use crate::quant::HADAMARD_BLOCK_MAX;

/// Multiplies by `norm`, then runs the stages of distance 1, 2, 4, … `block / 2` on each block of a
/// row.
///
/// - `row`: any multiple of `block` elements; `block`: a power of two from 2 to
///   [`HADAMARD_BLOCK_MAX`]
pub fn hadamard(row: &mut [f32], block: usize, norm: f32) {
    // A pass processes all small blocks of a part. The part stays in the first-level cache between
    // passes.
    for part in row.chunks_mut(HADAMARD_BLOCK_MAX) {
        match block {
            2 => stage_1(part, norm),
            _ => stages_1_2(part, norm),
        }
        if block > 4 {
            stages_from_4(part, block);
        }
    }
}

/// Scales by `norm` and runs the stage of distance 1.
fn stage_1(part: &mut [f32], norm: f32) {
    let (pairs, _) = part.as_chunks_mut();
    for pair in pairs {
        let [a, b] = pair.map(|x| x * norm);
        *pair = [a + b, a - b];
    }
}

/// Scales by `norm` and runs the stages of distance 1 and 2.
///
/// AVX-512 has the shuffles that these stages consist of, which more than halves their time.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2"))]
fn stages_1_2(part: &mut [f32], norm: f32) {
    let (quads, _) = part.as_chunks_mut();
    for quad in quads {
        let [a, b, c, d] = *quad;
        let (a, b, c, d) = (a * norm, b * norm, c * norm, d * norm);
        let (a, b, c, d) = (a + b, a - b, c + d, c - d);
        *quad = [a + c, b + d, a - c, b - d];
    }
}

/// Runs the stages of distance 4 … `block / 2`, three at a time for distances of 16 and more.
#[multiversion(targets("x86_64+avx2"))]
fn stages_from_4(part: &mut [f32], block: usize) {
    match block {
        8 => pass::<2, 4>(part),
        _ => pass::<4, 4>(part),
    }
    passes_from::<16>(part, block);
    passes_from::<128>(part, block);
    passes_from::<1024>(part, block);
}

/// Runs the stages of distance `H`, `2 H` and `4 H`, as far as they are shorter than `block`, in
/// one pass over memory.
#[inline(always)]
fn passes_from<const H: usize>(part: &mut [f32], block: usize) {
    match block / H {
        0 | 1 => {}
        2 => pass::<2, H>(part),
        4 => pass::<4, H>(part),
        _ => pass::<8, H>(part),
    }
}

/// Runs the stages of distance `H`, `2 H`, … `R H / 2`: `R` rows of `H` elements are combined
/// column by column, each column loaded and stored once.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "i is a column of all R rows")]
fn pass<const R: usize, const H: usize>(block: &mut [f32]) {
    let (rows, _) = block.as_chunks_mut::<H>();
    let (groups, _) = rows.as_chunks_mut::<R>();
    for group in groups {
        for i in 0..H {
            let mut v = [0.0; R];
            for r in 0..R {
                v[r] = group[r][i];
            }
            let mut d = 1;
            while d < R {
                let u = v;
                for r in 0..R {
                    let (a, b) = (u[r & !d], u[r | d]);
                    v[r] = if r & d == 0 { a + b } else { a - b };
                }
                d *= 2;
            }
            for r in 0..R {
                group[r][i] = v[r];
            }
        }
    }
}
