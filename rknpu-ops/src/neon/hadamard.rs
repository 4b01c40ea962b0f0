//! The block Hadamard transform with up to six stages to a pass over memory.
//!
//! ```text
//! for each block
//!   for each 64 elements            16 registers, or the whole block if it is shorter
//!     * norm                        the only multiplication
//!     stages 1, 2                   inside of registers: shuffled so that whole registers are added
//!     stages 4, 8, 16, 32           between registers
//!   stages 64, 128, 256, …          4 rows of 4 or 8, or 16, columns of 4 elements each, one or two columns at a time
//! ```
//!
//! 1. Six stages at once because a load and a store per stage cost as much as the stage itself.
//! 2. One block after the other: at most 16 KiB, which stay in the first-level cache from pass to
//!    pass.
//! 3. Two columns at a time where registers allow, so that loads and stores go in pairs.

use std::arch::aarch64::{
    float32x4_t, vaddq_f32, vdupq_n_f32, vmulq_f32, vreinterpretq_f32_f64, vreinterpretq_f64_f32,
    vsubq_f32, vtrn1q_f32, vtrn2q_f32, vuzp1q_f32, vuzp2q_f32, vzip1q_f64, vzip2q_f64,
};

use super::{load, store};
use crate::scalar;

/// Computes the same as [`scalar::hadamard`].
pub fn hadamard(row: &mut [f32], block: usize, norm: f32) {
    // SAFETY: NEON belongs to the base instruction set of this target.
    unsafe { transform(row, block, norm) }
}

#[target_feature(enable = "neon")]
fn transform(row: &mut [f32], block: usize, norm: f32) {
    match block {
        2 => stage_1(row, norm),
        4 => stages_1_2(row, norm),
        8 => first_pass::<2>(row, norm),
        16 => first_pass::<4>(row, norm),
        32 => first_pass::<8>(row, norm),
        64 => first_pass::<16>(row, norm),
        _ => {
            for block in row.chunks_mut(block) {
                first_pass::<16>(block, norm);
                later_passes(block);
            }
        }
    }
}

/// Runs the stages of distance 64 … `block / 2` of one block.
#[target_feature(enable = "neon")]
fn later_passes(block: &mut [f32]) {
    // The second parameter is the distance between partners in the pass's first stage, in registers
    // of 4 elements.
    match block.len() / 64 {
        2 => pass_of_two::<2, 16>(block),
        4 => pass_of_two::<4, 16>(block),
        8 => pass_of_two::<8, 16>(block),
        16 => pass_of_one::<16, 16>(block),
        32 => {
            pass_of_two::<8, 16>(block);
            pass_of_two::<4, 128>(block);
        }
        64 => {
            pass_of_two::<8, 16>(block);
            pass_of_two::<8, 128>(block);
        }
        _ => {}
    }
}

/// Transforms blocks of 2.
#[target_feature(enable = "neon")]
fn stage_1(row: &mut [f32], norm: f32) {
    let factor = vdupq_n_f32(norm);
    let (pairs, rest) = row.as_chunks_mut::<8>();
    for pair in pairs {
        let [a, b] = quads(pair);
        let (x, y) = (vmulq_f32(load(a), factor), vmulq_f32(load(b), factor));
        let (even, odd) = (vtrn1q_f32(x, y), vtrn2q_f32(x, y));
        let (sum, difference) = (vaddq_f32(even, odd), vsubq_f32(even, odd));
        store(a, vtrn1q_f32(sum, difference));
        store(b, vtrn2q_f32(sum, difference));
    }
    scalar::hadamard(rest, 2, norm);
}

/// Transforms blocks of 4.
#[target_feature(enable = "neon")]
fn stages_1_2(row: &mut [f32], norm: f32) {
    let factor = vdupq_n_f32(norm);
    let (pairs, rest) = row.as_chunks_mut::<8>();
    for pair in pairs {
        let [a, b] = quads(pair);
        let (x, y) = (vmulq_f32(load(a), factor), vmulq_f32(load(b), factor));
        let (x, y) = inside(x, y);
        store(a, x);
        store(b, y);
    }
    scalar::hadamard(rest, 4, norm);
}

/// Returns eight elements as two times four.
fn quads(pair: &mut [f32; 8]) -> [&mut [f32; 4]; 2] {
    let (quads, _) = pair.as_chunks_mut::<4>();
    // PANIC: eight elements are two times four.
    let [a, b] = quads else { unreachable!() };
    [a, b]
}

/// Runs stages 1 and 2 of two registers, each four elements of one block.
#[inline]
#[target_feature(enable = "neon")]
fn inside(x: float32x4_t, y: float32x4_t) -> (float32x4_t, float32x4_t) {
    // x = x0 x1 x2 x3, and y likewise. Stage 1 computes x0 + x1 (written x01+) and x0 - x1 (x01-)
    // for each pair of elements.
    let (even, odd) = (vtrn1q_f32(x, y), vtrn2q_f32(x, y));
    let sum = vreinterpretq_f64_f32(vaddq_f32(even, odd)); //        x01+ y01+ x23+ y23+
    let difference = vreinterpretq_f64_f32(vsubq_f32(even, odd)); // x01- y01- x23- y23-
    let low = vreinterpretq_f32_f64(vzip1q_f64(sum, difference)); //  x01+ y01+ x01- y01-
    let high = vreinterpretq_f32_f64(vzip2q_f64(sum, difference)); // x23+ y23+ x23- y23-
    let (first, last) = (vaddq_f32(low, high), vsubq_f32(low, high)); // x0' y0' x1' y1' and x2' y2' x3' y3'
    (vuzp1q_f32(first, last), vuzp2q_f32(first, last))
}

/// Scales by `norm` and runs the stages of distance 1 … `2 V` in groups of `V` registers.
#[inline]
#[target_feature(enable = "neon")]
fn first_pass<const V: usize>(row: &mut [f32], norm: f32) {
    let factor = vdupq_n_f32(norm);
    let (quads, _) = row.as_chunks_mut::<4>();
    let (groups, _) = quads.as_chunks_mut::<V>();
    for group in groups {
        let mut v = [factor; V];
        for i in 0..V {
            v[i] = vmulq_f32(load(&group[i]), factor);
        }
        for i in (0..V).step_by(2) {
            (v[i], v[i + 1]) = inside(v[i], v[i + 1]);
        }
        between(&mut v);
        for i in 0..V {
            store(&mut group[i], v[i]);
        }
    }
}

/// Runs `log2(R)` stages between `R` registers.
#[inline]
#[target_feature(enable = "neon")]
fn between<const R: usize>(v: &mut [float32x4_t; R]) {
    stage::<R, 1>(v);
    stage::<R, 2>(v);
    stage::<R, 4>(v);
    stage::<R, 8>(v);
}

/// Runs the stage of distance `D` registers, if there is one among `R`.
#[inline]
#[target_feature(enable = "neon")]
fn stage<const R: usize, const D: usize>(v: &mut [float32x4_t; R]) {
    if D >= R {
        return;
    }
    for i in 0..R / 2 {
        let low = i / D * 2 * D + i % D;
        let (a, b) = (v[low], v[low + D]);
        v[low] = vaddq_f32(a, b);
        v[low + D] = vsubq_f32(a, b);
    }
}

/// Runs the stages of distance `H`, `2 H`, … `R H / 2` registers, one column of registers at a
/// time.
#[inline]
#[target_feature(enable = "neon")]
#[expect(clippy::needless_range_loop, reason = "i is a column of all R rows")]
fn pass_of_one<const R: usize, const H: usize>(block: &mut [f32]) {
    let (quads, _) = block.as_chunks_mut::<4>();
    let (rows, _) = quads.as_chunks_mut::<H>();
    let (groups, _) = rows.as_chunks_mut::<R>();
    for group in groups {
        for i in 0..H {
            let mut v = [vdupq_n_f32(0.0); R];
            for r in 0..R {
                v[r] = load(&group[r][i]);
            }
            between(&mut v);
            for r in 0..R {
                store(&mut group[r][i], v[r]);
            }
        }
    }
}

/// Runs the stages of [`pass_of_one`], two neighbouring columns at a time.
#[inline]
#[target_feature(enable = "neon")]
fn pass_of_two<const R: usize, const H: usize>(block: &mut [f32]) {
    let (quads, _) = block.as_chunks_mut::<4>();
    let (rows, _) = quads.as_chunks_mut::<H>();
    let (groups, _) = rows.as_chunks_mut::<R>();
    for group in groups {
        for i in (0..H).step_by(2) {
            let (mut v, mut w) = ([vdupq_n_f32(0.0); R], [vdupq_n_f32(0.0); R]);
            for r in 0..R {
                v[r] = load(&group[r][i]);
                w[r] = load(&group[r][i + 1]);
            }
            between(&mut v);
            between(&mut w);
            for r in 0..R {
                store(&mut group[r][i], v[r]);
                store(&mut group[r][i + 1], w[r]);
            }
        }
    }
}
