//! Proves each kernel separately against exact arithmetic: dequantizers, activation quantizer,
//! integer dot products.

#![expect(clippy::unwrap_used, reason = "a panic is a failure")]
mod common;

use common::{Numbers, Weights, dot};
use half::f16;
use hexagon_ops::error::Error;
use hexagon_ops::layout::{Line, TILE_DIM, Tile, WeightType, f16_tile_offset};
use hexagon_ops::ops::matmul::Panel;
use hexagon_ops::ops::matmul::dequantize::dequantize;
use hexagon_ops::ops::matmul::gemv::{act_form, gemv_strip, gemv_two_rows, gemv_two_strips};
use hexagon_ops::ops::matmul::quantize::{ActForm, ActRow, act_lines, quantize_row};
use test_kit::nmse;

/// Types with an integer dot product.
const QUANTIZED: [WeightType; 13] = [
    WeightType::Q4_0,
    WeightType::Q4_1,
    WeightType::Q8_0,
    WeightType::Iq4Nl,
    WeightType::Mxfp4,
    WeightType::Q4K,
    WeightType::Q5_0,
    WeightType::Q6K,
    WeightType::Q5_1,
    WeightType::Q5K,
    WeightType::Iq4Xs,
    WeightType::Q3K,
    WeightType::Q2K,
];

/// Types that become FP16 tiles.
fn tiled() -> impl Iterator<Item = WeightType> {
    let all = WeightType::ALL.into_iter();
    all.filter(|weight| *weight != WeightType::F16)
}

fn quantized(weight: WeightType, row: &[f32]) -> Vec<Line> {
    let mut out = vec![Line::ZERO; act_lines(row.len())];
    quantize_row(row, act_form(weight), &mut out).unwrap();
    out
}

/// Returns the largest allowed difference of a dequantized element from the f16 nearest to its
/// value.
///
/// A computed scale or minimum is rounded by 2^-11 of itself, or by 2^-25, which the quant (at most
/// 31) multiplies; the sum is rounded, too, as the nearest f16 is.
fn dequantized_bound(want: f64, terms: f64) -> f64 {
    if terms == 0.0 {
        return 0.0;
    }
    1.001 * (terms + 2.0 * want.abs()) * 2_f64.powi(-11) + 33.0 * 2_f64.powi(-25)
}

#[test]
fn dequantized_elements_are_the_nearest_f16() {
    let mut numbers = Numbers::default();
    for weight in tiled() {
        for blocks in [1, 2, 3, 4, 5, 9] {
            let w = Weights::random(weight, 40, blocks * weight.block_elems(), &mut numbers);
            let k_tiles = w.layout.k_tiles();
            for nt in 0..2 {
                let panel = Panel::new(w.layout.panel(), w.panel_lines(nt)).unwrap();
                let mut tiles = vec![Tile::ZERO; k_tiles];
                dequantize(&panel, 0..k_tiles, &mut tiles).unwrap();
                for k in 0..k_tiles * TILE_DIM {
                    for n in 0..TILE_DIM {
                        let column = nt * TILE_DIM + n;
                        let want = w.values.get(column).map_or(0.0, |row| row[k]);
                        let terms = w.terms.get(column).map_or(0.0, |row| row[k]);
                        let bytes: &[u8] = bytemuck::bytes_of(&tiles[k / TILE_DIM]);
                        let at = f16_tile_offset(k % TILE_DIM, n);
                        let have = f16::from_le_bytes([bytes[at], bytes[at + 1]]);
                        let error = have.to_f64() - f16::from_f64(want).to_f64();
                        assert!(
                            error.abs() <= dequantized_bound(want, terms),
                            "{weight:?} k {k} n {n}: {have} for {want}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn part_of_a_panel_dequantizes_alone() {
    let mut numbers = Numbers::default();
    for weight in tiled() {
        let k = 40 * TILE_DIM;
        let w = Weights::random(weight, 32, k, &mut numbers);
        let panel = Panel::new(w.layout.panel(), w.panel_lines(0)).unwrap();
        let k_tiles = w.layout.k_tiles();
        let mut all = vec![Tile::ZERO; k_tiles];
        dequantize(&panel, 0..k_tiles, &mut all).unwrap();
        // A group of super-blocks has 32 tiles.
        for (start, end) in [(0, 4), (4, 8), (4, 7), (8, 11), (8, 8), (4, 40), (12, 39)] {
            let mut part = vec![Tile::ZERO; end - start];
            dequantize(&panel, start..end, &mut part).unwrap();
            assert!(part == all[start..end], "{weight:?} {start}..{end}");
        }
        assert_eq!(
            dequantize(&panel, 2..4, &mut [Tile::ZERO; 2]),
            Err(Error::Index {
                what: "tile range",
                index: 4,
                limit: k_tiles
            })
        );
    }
}

#[test]
fn mxfp4_scales_cover_all_of_f16() {
    // All exponents: their scales are subnormal, normal, or too large for f16. Index 1 of the table
    // is the value 1, so an element is the scale itself.
    let layout = hexagon_ops::layout::MatrixLayout::new(WeightType::Mxfp4, 256, 32).unwrap();
    let mut packed = vec![Line::ZERO; layout.matrix_bytes() / 128];
    for e in 0..=255_u8 {
        let mut block = [0x11; 17];
        block[0] = e;
        layout
            .pack_row(
                bytemuck::cast_slice_mut(&mut packed),
                usize::from(e),
                &block,
            )
            .unwrap();
    }
    for e in 0..=255_usize {
        let lines = layout.panel().panel_lines();
        let panel = Panel::new(layout.panel(), &packed[e / 32 * lines..][..lines]).unwrap();
        let mut tile = [Tile::ZERO];
        dequantize(&panel, 0..1, &mut tile).unwrap();
        let at = f16_tile_offset(0, e % 32);
        let bytes: &[u8] = bytemuck::bytes_of(&tile[0]);
        let have = f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f64();
        let exponent = i32::try_from(e).unwrap() - 128;
        let want = if exponent < -24 {
            0.0
        } else {
            2_f64.powi(exponent.min(15))
        };
        assert!(have == want, "e {e}: {have} for {want}");
    }
}

/// Returns the largest allowed error of a dot product. It comes from 8-bit activations only, at
/// most amax/254 for each element.
fn gemv_bound(weight: WeightType, act: &[f32], weights: &[f64]) -> f64 {
    let reach = match act_form(weight) {
        ActForm::Bytes | ActForm::Halves => 1.0,
        // The quant of a low element also makes up for a sixteenth of the high one, so it is up to
        // 17/16 as large.
        ActForm::Nibbles => 17.0 / 16.0,
    };
    act.chunks(TILE_DIM)
        .zip(weights.chunks(TILE_DIM))
        .map(|(a, w)| {
            let amax = reach * a.iter().fold(0.0_f64, |m, x| m.max(f64::from(x.abs())));
            // The error bound for each weight is half a quantization step, plus the f16 rounding of
            // the scale over 127 steps; f32 sums lose less than this.
            amax * (0.51 / 127.0 + 2_f64.powi(-20)) * w.iter().map(|w| w.abs()).sum::<f64>()
        })
        .sum::<f64>()
        + 1e-30
}

#[test]
fn gemv_is_exact_up_to_activation_rounding() {
    let mut numbers = Numbers::default();
    for weight in QUANTIZED {
        for k_tiles in [1_usize, 2, 3, 5, 18, 31, 32, 33, 35, 64, 67] {
            let k = (k_tiles * TILE_DIM).next_multiple_of(weight.block_elems());
            let w = Weights::random(weight, 64, k, &mut numbers);
            let rows: Vec<Vec<f32>> = (0..2)
                .map(|_| (0..k).map(|_| numbers.float() * 3.0).collect())
                .collect();
            let acts: Vec<_> = rows.iter().map(|row| quantized(weight, row)).collect();
            let acts: Vec<_> = acts
                .iter()
                .map(|lines| ActRow::new(lines).unwrap())
                .collect();
            let panels = [0, 1].map(|nt| Panel::new(w.layout.panel(), w.panel_lines(nt)).unwrap());
            let [mut a, mut b, mut c, mut d, mut e, mut f] = [[0.0; TILE_DIM]; 6];
            gemv_strip(&panels[0], acts[0], &mut a).unwrap();
            gemv_strip(&panels[1], acts[0], &mut b).unwrap();
            gemv_two_strips([&panels[0], &panels[1]], acts[0], [&mut c, &mut d]).unwrap();
            gemv_two_rows(&panels[1], [acts[0], acts[1]], [&mut e, &mut f]).unwrap();
            assert_eq!(
                (a, b, b),
                (c, d, e),
                "{weight:?} K {k}: the variants differ"
            );
            for (row, nt, out) in [(0, 0, &a), (0, 1, &b), (1, 1, &f)] {
                for (n, have) in out.iter().enumerate() {
                    let weights = &w.values[nt * TILE_DIM + n];
                    let error = (f64::from(*have) - dot(&rows[row], weights)).abs();
                    // A minimum is multiplied by an f16 product of scale and sum, which is rounded
                    // by 2^-11.
                    let min = if matches!(weight, WeightType::Q4_1 | WeightType::Q5_1) {
                        0.02 * 3.0 * k as f64 * 2_f64.powi(-11)
                    } else {
                        0.0
                    };
                    // Scales and minima of super-blocks are also rounded; activations are at
                    // most 3.
                    let terms = &w.terms[nt * TILE_DIM + n];
                    let expanded: f64 = (terms.iter().filter(|term| **term > 0.0))
                        .map(|term| 3.0 * (term * 2_f64.powi(-10) + 2_f64.powi(-20)))
                        .sum();
                    let bound = gemv_bound(weight, &rows[row], weights) + min + expanded;
                    assert!(
                        error <= bound,
                        "{weight:?} K {k} row {row} n {n}: error {error:e} over {bound:e}"
                    );
                }
            }
        }
    }
}

#[test]
fn gemv_of_activations_that_8_bits_hold_is_exact() {
    let mut numbers = Numbers::default();
    for weight in [
        WeightType::Q6K,
        WeightType::Q3K,
        WeightType::Q2K,
        WeightType::Q4_0,
    ] {
        for blocks in [1, 2, 4, 7] {
            let k = 256 * blocks;
            let w = Weights::random(weight, 32, k, &mut numbers);
            // Whole numbers, with a 127 in each block of 32, so that each scale is a power of two.
            let mut row = || -> Vec<f32> {
                let mut row: Vec<f32> = (0..k).map(|_| (numbers.float() * 127.0).round()).collect();
                row.iter_mut().step_by(32).for_each(|x| *x = 127.0);
                if act_form(weight) == ActForm::Nibbles {
                    for block in row.chunks_mut(TILE_DIM) {
                        let (low, high) = block.split_at_mut(TILE_DIM / 2);
                        high[0] = -127.0;
                        for (low, high) in low.iter_mut().zip(high) {
                            *low += *high / 16.0;
                        }
                    }
                }
                row
            };
            let rows = [row(), row()];
            let panel = Panel::new(w.layout.panel(), w.panel_lines(0)).unwrap();
            let lines = rows.each_ref().map(|row| quantized(weight, row));
            let acts = lines.each_ref().map(|lines| ActRow::new(lines).unwrap());
            let [mut a, mut b] = [[0.0; TILE_DIM]; 2];
            gemv_two_rows(&panel, acts, [&mut a, &mut b]).unwrap();
            for (row, out) in rows.iter().zip([a, b]) {
                for (n, have) in out.iter().enumerate() {
                    let magnitudes = w.terms[n].iter().zip(&w.values[n]);
                    let sum: f64 = (row.iter().zip(magnitudes))
                        .map(|(a, (term, value))| f64::from(a.abs()) * term.max(value.abs()))
                        .sum();
                    let error = (f64::from(*have) - dot(row, &w.values[n])).abs();
                    // Only the f32 sums are rounded.
                    assert!(
                        error <= 1e-6 * sum,
                        "{weight:?} K {k} n {n}: error {error:e} of {sum:e}"
                    );
                }
            }
        }
    }
}

#[test]
fn gemv_error_is_that_of_8_bits() {
    let mut numbers = Numbers::default();
    for weight in QUANTIZED {
        let w = Weights::random(weight, 32, 2048, &mut numbers);
        let row: Vec<f32> = (0..2048).map(|_| numbers.float()).collect();
        let panel = Panel::new(w.layout.panel(), w.panel_lines(0)).unwrap();
        let mut out = [0.0; TILE_DIM];
        gemv_strip(
            &panel,
            ActRow::new(&quantized(weight, &row)).unwrap(),
            &mut out,
        )
        .unwrap();
        let want: Vec<f64> = w.values.iter().map(|weights| dot(&row, weights)).collect();
        // For uniform activations and a step of 1/127, the error is step² / 12 divided by 1/3:
        // 1.6e-5. ggml accepts 5e-4.
        let have = nmse(&out, &want);
        assert!(have < 4e-5, "{weight:?}: {have:e}");
    }
}

/// One element of a row is up to 2^15 times larger than the others, as in real models. Eight bits
/// hold it exactly, so the error is that of the others.
#[test]
fn a_large_element_leaves_the_others_their_bits() {
    let mut numbers = Numbers::default();
    // In other super-blocks, the rounding of scales would be multiplied by the large element.
    for weight in QUANTIZED {
        if matches!(
            weight,
            WeightType::Q4K | WeightType::Q5K | WeightType::Iq4Xs
        ) {
            continue;
        }
        let k = 8192;
        let w = Weights::random(weight, 32, k, &mut numbers);
        let panel = Panel::new(w.layout.panel(), w.panel_lines(0)).unwrap();
        let mut row: Vec<f32> = (0..k).map(|_| numbers.float()).collect();
        row[..TILE_DIM].fill(0.0);
        let want: Vec<f64> = w.values.iter().map(|weights| dot(&row, weights)).collect();
        // For Q2_K, sums of 16 activations have 22 bits for a super-block.
        let exponents: &[i32] = match weight {
            WeightType::Q2K => &[0, 3, 6],
            _ => &[0, 3, 6, 8],
        };
        for &exponent in exponents {
            row[3] = 127.0 * 2_f32.powi(exponent);
            let mut out = [0.0; TILE_DIM];
            let lines = quantized(weight, &row);
            gemv_strip(&panel, ActRow::new(&lines).unwrap(), &mut out).unwrap();
            let large = w
                .values
                .iter()
                .map(|weights| f64::from(row[3]) * weights[3]);
            let exact = want.iter().zip(large).map(|(others, large)| others + large);
            let error: f64 = (out.iter().zip(exact))
                .map(|(have, want)| (f64::from(*have) - want).powi(2))
                .sum();
            let error = error / want.iter().map(|others| others.powi(2)).sum::<f64>();
            assert!(error < 4e-5, "{weight:?} 2^{exponent}: {error:e}");
        }
    }
}

#[test]
fn quantizer_keeps_any_magnitude() {
    let mut numbers = Numbers::default();
    for weight in [WeightType::Q8_0, WeightType::Q4_0] {
        let w = Weights::random(weight, 32, 96, &mut numbers);
        let panel = Panel::new(w.layout.panel(), w.panel_lines(0)).unwrap();
        for exponent in [-140, -120, -60, -20, 0, 15, 40, 90, 110] {
            let row: Vec<f32> = (0..96)
                .map(|_| numbers.float() * 2_f32.powi(exponent))
                .collect();
            let mut out = [0.0; TILE_DIM];
            gemv_strip(
                &panel,
                ActRow::new(&quantized(weight, &row)).unwrap(),
                &mut out,
            )
            .unwrap();
            for (have, weights) in out.iter().zip(&w.values) {
                let bound =
                    gemv_bound(weight, &row, weights) + if exponent < -100 { 1e-30 } else { 0.0 };
                let error = (f64::from(*have) - dot(&row, weights)).abs();
                assert!(
                    error <= bound,
                    "{weight:?} 2^{exponent}: error {error:e} over {bound:e}"
                );
            }
        }
        let zeros = quantized(weight, &[0.0; 96]);
        let mut out = [1.0; TILE_DIM];
        gemv_strip(&panel, ActRow::new(&zeros).unwrap(), &mut out).unwrap();
        assert_eq!(out, [0.0; TILE_DIM]);
    }
}

#[test]
fn quantizer_rejects_broken_blocks() {
    assert_eq!(
        quantize_row(&[0.0; 33], ActForm::Bytes, &mut [Line::ZERO; 11]),
        Err(Error::Length {
            what: "activation row",
            have: 33,
            want: 32
        })
    );
    assert_eq!(
        quantize_row(&[0.0; 32], ActForm::Nibbles, &mut [Line::ZERO; 21]),
        Err(Error::Length {
            what: "lines of quantized activations",
            have: 21,
            want: 11
        })
    );
}
