//! The stages one element at a time, as a first version of them would be.

use half::f16;
use rknpu_ops::layout::{NativeA, NativeC};
use rknpu_ops::quant::HADAMARD_BLOCK_MAX;

/// A block transform, a factor of two at a time.
fn hadamard(block: &mut [f32]) {
    let mut distance = 1;
    while distance < block.len() {
        for i in (0..block.len()).filter(|i| i & distance == 0) {
            let (a, b) = (block[i], block[i + distance]);
            block[i] = a + b;
            block[i + distance] = a - b;
        }
        distance *= 2;
    }
    let norm = 1.0 / (block.len() as f32).sqrt();
    block.iter_mut().for_each(|x| *x *= norm);
}

/// The steps of a rotation, with signs that alternate.
fn rotate(row: &mut [f32]) {
    let block = (1 << row.len().ilog2()).min(HADAMARD_BLOCK_MAX);
    let whole = row.len() / block * block;
    row.iter_mut().step_by(2).for_each(|x| *x = -*x);
    row[..whole].chunks_mut(block).for_each(hadamard);
    if whole < row.len() {
        let last = row.len() - block;
        let last = &mut row[last..];
        last.iter_mut().step_by(2).for_each(|x| *x = -*x);
        hadamard(last);
    }
}

fn absmax(row: &[f32]) -> f32 {
    row.iter().fold(0.0, |max, x| max.max(x.abs()))
}

pub fn pack_i8(
    src: &[f32],
    k: usize,
    layout: NativeA,
    work: &mut [f32],
    scales: &mut [f32],
    native: &mut [i8],
) {
    let m = scales.len();
    for (row, scale) in scales.iter_mut().enumerate() {
        work.copy_from_slice(&src[row * k..][..k]);
        rotate(work);
        *scale = absmax(work) / 127.0;
        for (i, x) in work.iter().enumerate() {
            // Adding 1.5 · 2^23 rounds to an integer, which is then in the low byte.
            let rounded = (x / *scale).clamp(-127.0, 127.0) + 12_582_912.0;
            let [low, ..] = rounded.to_bits().to_le_bytes();
            native[layout.index(row, i, m)] = low.cast_signed();
        }
    }
}

pub fn pack_f16(src: &[f32], k: usize, layout: NativeA, factors: &mut [f32], native: &mut [f16]) {
    let m = factors.len();
    for (row, factor) in factors.iter_mut().enumerate() {
        let values = &src[row * k..][..k];
        let exponent = absmax(values).to_bits() >> 23;
        let power = f32::from_bits((268 - exponent.clamp(15, 267)) << 23);
        *factor = 1.0 / power;
        for (i, x) in values.iter().enumerate() {
            native[layout.index(row, i, m)] = f16::from_f32(x * power);
        }
    }
}

pub fn unpack_i32(
    native: &[i32],
    layout: NativeC,
    a_scales: &[f32],
    w_scales: &[f32],
    dst: &mut [f32],
) {
    let (m, n) = (a_scales.len(), w_scales.len());
    for (row, a_scale) in a_scales.iter().enumerate() {
        for (col, w_scale) in w_scales.iter().enumerate() {
            // CAST: rounds to 24 bits.
            let sum = native[layout.index(row, col, m)] as f32;
            dst[row * n + col] = sum * w_scale * a_scale;
        }
    }
}

pub fn unpack_f32(native: &[f32], layout: NativeC, factors: &[f32], dst: &mut [f32]) {
    let (m, n) = (factors.len(), dst.len() / factors.len());
    for (row, factor) in factors.iter().enumerate() {
        for col in 0..n {
            dst[row * n + col] = native[layout.index(row, col, m)] * factor;
        }
    }
}
