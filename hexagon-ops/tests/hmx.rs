//! Proves the host's matrix unit: products against exact sums, accumulator protocol, and each check
//! it makes.

mod common;

use common::Numbers;
use half::f16;
use hexagon_ops::hmx::{Fault, Form, Hmx, MAX_DEEP, ScaleBlock, vectors};
use hexagon_ops::layout::{TILE_DIM, Tile, f16_tile_offset};

/// A tile with element (i, j) = `f(i, j)`.
fn tile(mut f: impl FnMut(usize, usize) -> f32) -> Tile {
    let mut tile = Tile::ZERO;
    let bytes: &mut [u8] = bytemuck::bytes_of_mut(&mut tile);
    for i in 0..TILE_DIM {
        for j in 0..TILE_DIM {
            bytes[f16_tile_offset(i, j)..][..2]
                .copy_from_slice(&f16::from_f32(f(i, j)).to_le_bytes());
        }
    }
    tile
}

fn elem(tile: &Tile, i: usize, j: usize) -> f64 {
    let bytes: &[u8] = bytemuck::bytes_of(tile);
    let at = f16_tile_offset(i, j);
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f64()
}

#[test]
fn deep_products_are_within_one_ulp_of_exact() {
    let mut numbers = Numbers::default();
    for deep in [1, 2, 31, MAX_DEEP] {
        let mut vtcm: Vec<Tile> = (0..2 * deep + 1)
            .map(|_| tile(|_, _| numbers.float()))
            .collect();
        let mut hmx = Hmx::new(&vtcm);
        let (operands, out) = vtcm.split_at_mut(2 * deep);
        let (act, weights) = operands.split_at(deep);
        hmx.clear();
        hmx.multiply(act, weights);
        hmx.store(&mut out[0]);
        assert_eq!(hmx.take_fault(), None);
        for i in 0..TILE_DIM {
            for n in 0..TILE_DIM {
                let want: f64 = (0..deep * TILE_DIM)
                    .map(|k| {
                        elem(&act[k / TILE_DIM], i, k % TILE_DIM)
                            * elem(&weights[k / TILE_DIM], k % TILE_DIM, n)
                    })
                    .sum();
                let error = (elem(&out[0], i, n) - want).abs();
                // The error is half a unit of the f16 result, plus f32 rounding of partial sums
                // below 32. Each rounding is 2^-20, and their signs vary.
                assert!(
                    error <= want.abs() * 2_f64.powi(-11) + 3e-5,
                    "deep {deep} ({i},{n}): {error:e} of {want}"
                );
            }
        }
    }
}

#[test]
fn store_clears_and_swaps() {
    let mut vtcm = vec![
        tile(|i, j| f32::from(u8::from(i == j))),
        tile(|i, j| (i * 32 + j) as f32),
        Tile::ZERO,
    ];
    let mut hmx = Hmx::new(&vtcm);
    let (operands, out) = vtcm.split_at_mut(2);
    hmx.clear();
    for turn in 0..3 {
        hmx.multiply(&operands[..1], &operands[1..]);
        if turn == 1 {
            hmx.multiply(&operands[..1], &operands[1..]);
        }
        hmx.store(&mut out[0]);
        let factor = if turn == 1 { 2.0 } else { 1.0 };
        assert_eq!(elem(&out[0], 3, 5), factor * 101.0, "turn {turn}");
    }
}

#[test]
fn hardware_traps_become_faults() {
    let outside = [Tile::ZERO; 2];
    let big = tile(|_, _| 300.0);
    let mut vtcm = vec![big; 3];
    let mut hmx = Hmx::new(&vtcm);
    hmx.multiply(&outside[..1], &vtcm[..1]);
    assert_eq!(hmx.take_fault(), Some(Fault::OutsideVtcm));
    hmx.multiply(&vtcm[..2], &vtcm[..1]);
    assert_eq!(hmx.take_fault(), Some(Fault::Deep { act: 2, weights: 1 }));
    hmx.multiply(&[], &[]);
    assert_eq!(hmx.take_fault(), Some(Fault::Deep { act: 0, weights: 0 }));
    hmx.load_scale(&ScaleBlock::ONE);
    assert_eq!(hmx.take_fault(), Some(Fault::OutsideVtcm));
    let (operands, out) = vtcm.split_at_mut(2);
    hmx.clear();
    hmx.multiply(&operands[..1], &operands[1..]);
    hmx.store(&mut out[0]);
    assert_eq!(hmx.take_fault(), Some(Fault::Overflow));
    assert_eq!(hmx.take_fault(), None);
}

#[test]
fn a_unit_without_scales_rounds_and_takes_a_zero_block_only() {
    let mut vtcm = vec![
        tile(|i, j| f32::from(u8::from(i == j))),
        tile(|i, j| (i * 32 + j) as f32),
        Tile::ZERO,
        // Room for two scale blocks.
        Tile::ZERO,
    ];
    let mut hmx = Hmx::of_form(Form::RoundOnly, &vtcm);
    let (operands, out) = vtcm.split_at_mut(2);
    let (out, blocks) = out.split_at_mut(1);
    let blocks: &mut [ScaleBlock] = bytemuck::cast_slice_mut(blocks);
    hmx.clear();
    hmx.load_scale(&blocks[0]);
    hmx.multiply(&operands[..1], &operands[1..]);
    hmx.store(&mut out[0]);
    assert_eq!(elem(&out[0], 3, 5), 101.0);
    assert_eq!(hmx.take_fault(), None);
    blocks[1] = ScaleBlock::ONE;
    hmx.load_scale(&blocks[1]);
    assert_eq!(hmx.take_fault(), Some(Fault::Control));
}

#[test]
fn a_missing_unit_is_not_used() {
    let mut vtcm = vec![Tile::ZERO; 2];
    let mut hmx = Hmx::new(&vtcm);
    hmx.leave_alone();
    assert_eq!(hmx.form(), Form::Vectors);
    let (act, weights) = vtcm.split_at_mut(1);
    hmx.multiply(act, weights);
    assert_eq!(hmx.take_fault(), Some(Fault::Missing));
}

#[test]
fn vectors_give_the_units_results() {
    let mut numbers = Numbers::default();
    for (deep, n_rows, scale) in [(1, 32, 0x3c00), (3, 1, 0x2800), (40, 17, 0x6400), (2, 8, 0)] {
        let act: Vec<Tile> = (0..deep).map(|_| tile(|_, _| numbers.float())).collect();
        let weights: Vec<Tile> = (0..deep).map(|_| tile(|_, _| numbers.float())).collect();
        let untouched = tile(|_, _| 77.0);
        let mut out = untouched;
        let block = ScaleBlock::splat(scale);
        vectors::multiply(&act, &weights, &block, n_rows, &mut out);
        let scale = f16::from_bits(scale).to_f64();
        for i in 0..TILE_DIM {
            for n in 0..TILE_DIM {
                if i >= n_rows.next_multiple_of(2) {
                    assert_eq!(elem(&out, i, n), 77.0, "{n_rows} rows ({i},{n})");
                    continue;
                }
                let products = (0..deep * TILE_DIM).map(|k| {
                    let (kt, k) = (k / TILE_DIM, k % TILE_DIM);
                    elem(&act[kt], i, k) * elem(&weights[kt], k, n)
                });
                let want = scale * products.sum::<f64>();
                let error = (elem(&out, i, n) - want).abs();
                assert!(
                    error <= want.abs() * 2_f64.powi(-11) + scale * 3e-5,
                    "{deep} tiles, {n_rows} rows ({i},{n}): {error:e} of {want}"
                );
            }
        }
    }
}
