//! The CPU's stages of attention, between two products of the NPU.
//!
//! For one head of keys and values, M rows of queries (of all heads that share it) and N cells:
//!
//! ```text
//! S[M,N] = Q[M,d] . K[d,N]      B: a cell's key is a column     (pack_group of rows of keys)
//! P[M,N] = exp(x - max x) * 2^15,  x = S * factor, capped, plus the mask     (probabilities)
//! O[M,e] = P[M,N] . V[N,e]      B: a cell's value is a row      (pack_values)
//! ```
//!
//! P is not divided by its sum, so that its largest value is 2^15 in each row. Values down to 2^-29
//! of that are normal numbers of FP16: so thousands of cells that each count little are not lost.
//! [`Merger`] adds up the O of several ranges of cells.

use std::ops::Range;

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::layout::{NativeB, NativeC};
use crate::pack::Rows;

/// Factor of the probabilities in P, which the sums of values have, too: the largest power of two
/// of FP16.
pub const P_FACTOR: f32 = 32768.0;

/// Results of a product in the native layout of C, of `m` rows.
#[derive(Clone, Copy, Debug)]
pub struct NativeRows<'a> {
    /// The elements.
    pub c: &'a [f32],
    /// The layout of the elements.
    pub layout: NativeC,
    /// Rows of the product, padding included.
    pub m: usize,
}

impl NativeRows<'_> {
    /// Copies the first `out.len()` columns of a row.
    ///
    /// # Panics
    /// If the row or a column does not exist.
    pub fn copy_row(&self, row: usize, out: &mut [f32]) {
        let t = self.layout.t;
        assert!(row < self.m, "row {row} of {}", self.m);
        for (slice, out) in out.chunks_mut(t).enumerate() {
            let at = (slice * self.m + row) * t;
            out.copy_from_slice(&self.c[at..][..out.len()]);
        }
    }
}

/// Packs the values of cells, transposed, into one strip of native B.
///
/// - `values`: a row for each cell
/// - `channels`: the columns of `values` in the strip; at most `gn`, others are zeroed
/// - `cells`: K of the product, a multiple of `gk` of at most `split_k`; cells beyond `values` are
///   zeroed
/// - `strip`: `strip_len(cells)` elements
///
/// # Panics
/// If a length disagrees.
pub fn pack_values(
    values: Rows<f16>,
    channels: Range<usize>,
    layout: NativeB,
    cells: usize,
    strip: &mut [f16],
) {
    let (gn, gk) = (layout.gn, layout.gk);
    assert_eq!(strip.len(), layout.strip_len(cells), "length of a strip");
    assert!(channels.len() <= gn && values.count() <= cells);
    for (tile, out) in strip.chunks_exact_mut(gn * gk).enumerate() {
        out.fill(f16::ZERO);
        let first = tile * gk;
        for k in 0..gk.min(values.count().saturating_sub(first)) {
            let row = &values.row(first + k)[channels.clone()];
            for (n, value) in row.iter().enumerate() {
                out[n * gk + k] = *value;
            }
        }
    }
}

/// The function between scores and probabilities.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scaling {
    /// Factor of the scores.
    pub scale: f32,
    /// Limit of the scaled scores, which approach it by tanh; 0 for none.
    pub softcap: f32,
}

impl Scaling {
    /// Returns the scaled and capped score.
    #[must_use]
    pub fn of(self, score: f32) -> f32 {
        if self.softcap == 0.0 {
            score * self.scale
        } else {
            self.softcap * (score * self.scale / self.softcap).tanh()
        }
    }
}

/// The visible cells of a row of queries.
#[derive(Clone, Copy, Debug)]
pub struct RowMask<'a> {
    /// A summand of the scores for each cell, which is multiplied by `slope`; `None` for none.
    pub mask: Option<&'a [f16]>,
    /// Factor of the mask.
    pub slope: f32,
    /// Factor of the row's scores.
    pub factor: f32,
}

/// Turns the scores of a row into probabilities, and returns the largest x and the sum of all
/// `exp(x - max)`: negative infinity and 0 for a row without a visible cell, and a sum of NaN for a
/// row that sees a score of NaN. The probabilities of both are zeros.
///
/// - `work`: as many elements as `out`
/// - `out`: an element for each cell, times [`P_FACTOR`]; `row.mask` has as many
///
/// # Panics
/// If a length disagrees.
pub fn probabilities(
    scores: NativeRows,
    index: usize,
    row: RowMask,
    scaling: Scaling,
    work: &mut [f32],
    out: &mut [f16],
) -> (f32, f32) {
    scores.copy_row(index, work);
    let factor = scaling.scale * row.factor;
    if scaling.softcap == 0.0 {
        work.iter_mut().for_each(|x| *x *= factor);
    } else {
        let inner = factor / scaling.softcap;
        for x in work.iter_mut() {
            *x = scaling.softcap * (*x * inner).tanh();
        }
    }
    if let Some(mask) = row.mask {
        assert_eq!(mask.len(), work.len(), "a mask for each cell");
        let mut block = [0.0; 64];
        for (x, mask) in work.chunks_mut(block.len()).zip(mask.chunks(block.len())) {
            let block = &mut block[..mask.len()];
            mask.convert_to_f32_slice(block);
            for (x, mask) in x.iter_mut().zip(block) {
                // A hidden cell may hold anything, also NaN.
                let hidden = *mask == f32::NEG_INFINITY;
                *x = if hidden {
                    *mask
                } else {
                    *x + row.slope * *mask
                };
            }
        }
    }
    let max = work.iter().fold(f32::NEG_INFINITY, |max, x| max.max(*x));
    if max == f32::NEG_INFINITY && !work.iter().any(|x| x.is_nan()) {
        out.fill(f16::ZERO);
        return (max, 0.0);
    }
    let mut sum = 0.0;
    for x in work.iter_mut() {
        *x = exp(*x - max);
        sum += *x;
        *x *= P_FACTOR;
    }
    if sum.is_nan() {
        out.fill(f16::ZERO);
        return (max, sum);
    }
    out.convert_from_f32_slice(work);
    (max, sum)
}

/// Returns `e^x` for x of at most 0, to 3e-6 of it; not less than 1e-38.
fn exp(x: f32) -> f32 {
    // Adding this number rounds to an integer, which is then in the lowest bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    let t = x * std::f32::consts::LOG2_E;
    // A comparison instead of `max`, because NaN must stay NaN.
    let t = if t < -126.0 { -126.0 } else { t };
    let sum = t + ROUND;
    let f = t - (sum - ROUND);
    // SOURCE: Taylor's series of 2^f. For |f| up to 0.5, the next term is at most 2.4e-6.
    let p = 0.001_333_355_8_f32;
    let p = p * f + 0.009_618_129;
    let p = p * f + 0.055_504_11;
    let p = p * f + 0.240_226_5;
    let p = p * f + std::f32::consts::LN_2;
    let p = p * f + 1.0;
    // CAST: the exponent is between -126 and 0. If it is not, the factor is NaN, and so is the
    // product.
    let exponent = sum.to_bits().wrapping_sub(ROUND.to_bits());
    p * f32::from_bits(exponent.wrapping_add(127) << 23)
}

/// The sum over ranges of cells of one row.
#[derive(Clone, Copy, Debug)]
pub struct Merger {
    max: f32,
    sum: f32,
}

impl Default for Merger {
    /// Returns the state before the first cell.
    fn default() -> Self {
        Self {
            max: f32::NEG_INFINITY,
            sum: 0.0,
        }
    }
}

impl Merger {
    /// Adds a range of cells to a row.
    ///
    /// - `(max, sum)`: those of [`probabilities`]
    /// - `o`: the range's sum of values without `factor`; `total`: that of the row so far
    pub fn add(&mut self, (max, sum): (f32, f32), o: &[f32], factor: f32, total: &mut [f32]) {
        if sum == 0.0 {
            return;
        }
        let both = self.max.max(max);
        // In a row without a cell so far, the total is zeros and the maximum negative infinity,
        // whose `exp` is 0.
        let (old, new) = ((self.max - both).exp(), (max - both).exp());
        for (total, o) in total.iter_mut().zip(o) {
            *total = *total * old + *o * factor * new;
        }
        (self.max, self.sum) = (both, self.sum * old + sum * new);
    }

    /// Makes the row NaN.
    pub fn spoil(&mut self) {
        self.sum = f32::NAN;
    }

    /// Divides a row by its sum, to which a sink adds its share. A row without a visible cell is
    /// zeros.
    pub fn finish(self, sink: Option<f32>, total: &mut [f32]) {
        let (mut sum, mut factor) = (self.sum, 1.0);
        if let Some(sink) = sink {
            let both = self.max.max(sink);
            factor = (self.max - both).exp();
            sum = sum * factor + (sink - both).exp();
        }
        let scale = if sum == 0.0 { 0.0 } else { factor / sum };
        total.iter_mut().for_each(|value| *value *= scale);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Elem;

    #[test]
    fn exp_is_near_and_keeps_nan() {
        for i in 0..100_000 {
            let x = -87.0 * i as f32 / 100_000.0;
            let want = f64::from(x).exp();
            let error = (f64::from(exp(x)) - want).abs() / want;
            assert!(error < 1e-5, "{x}: {error}");
        }
        assert!((exp(0.0) - 1.0).abs() < 1e-6);
        assert!(exp(f32::NEG_INFINITY) < 2e-38);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn values_lie_where_the_layout_says() {
        let layout = NativeB {
            gn: 16,
            gk: 32,
            split_k: usize::MAX,
            elem: Elem::F16,
        };
        let (count, channels, cells, columns) = (45, 20, 64, 32);
        let data: Vec<_> = (0..count * channels)
            .map(|i| f16::from_f32((i + 1) as f32))
            .collect();
        let values = Rows::new(&data, count, channels, channels);
        let mut b = vec![f16::ONE; layout.len(cells, columns)];
        for (strip, out) in b.chunks_exact_mut(layout.strip_len(cells)).enumerate() {
            let range = (strip * 16).min(channels)..((strip + 1) * 16).min(channels);
            pack_values(values, range, layout, cells, out);
        }
        for k in 0..cells {
            for n in 0..columns {
                let inside = k < count && n < channels;
                let want = if inside { values.row(k)[n] } else { f16::ZERO };
                assert_eq!(b[layout.index(k, n, cells, columns)], want, "{k} {n}");
            }
        }
    }

    /// Scores of one row in native order.
    fn native(row: &[f32]) -> (Vec<f32>, NativeC) {
        let layout = NativeC {
            t: 4,
            elem: Elem::F32,
        };
        let mut c = vec![f32::NAN; layout.len(3, row.len())];
        for (n, value) in row.iter().enumerate() {
            c[layout.index(1, n, 3)] = *value;
        }
        (c, layout)
    }

    #[test]
    fn two_ranges_of_cells_give_the_softmax_of_both() {
        let scores = [0.5, -3.0, 2.0, 7.0, 1.0, 4.0, -2.0];
        let values = [1.0_f32, 2.0, -4.0, 0.5, 8.0, 3.0, -1.0];
        let mask = [0.0, -1.0, f32::NEG_INFINITY, 0.0, 0.0, -2.0, 0.0].map(f16::from_f32);
        for (softcap, sink) in [(0.0, None), (5.0, None), (0.0, Some(1.5))] {
            let scaling = Scaling {
                scale: 0.25,
                softcap,
            };
            let x: Vec<f64> = (scores.iter().zip(mask))
                .map(|(score, mask)| {
                    let x = f64::from(*score) * 0.5;
                    let cap = f64::from(softcap);
                    let x = if cap > 0.0 { cap * (x / cap).tanh() } else { x };
                    x + 0.5 * mask.to_f64()
                })
                .collect();
            let extra = sink.map_or(0.0, |sink| f64::from(sink).exp());
            let sum = x.iter().map(|x| x.exp()).sum::<f64>() + extra;
            let want: f64 = (x.iter().zip(values))
                .map(|(x, value)| x.exp() / sum * f64::from(value))
                .sum();

            let (mut merger, mut total) = (Merger::default(), [0.0]);
            for range in [0..3, 3..7] {
                let (c, layout) = native(&scores[range.clone()]);
                let rows = NativeRows {
                    c: &c,
                    layout,
                    m: 3,
                };
                let row = RowMask {
                    mask: Some(&mask[range.clone()]),
                    slope: 0.5,
                    factor: 2.0,
                };
                let mut work = vec![0.0; range.len()];
                let mut p = vec![f16::ZERO; range.len()];
                let parts = probabilities(rows, 1, row, scaling, &mut work, &mut p);
                let o = p
                    .iter()
                    .zip(&values[range])
                    .map(|(p, value)| p.to_f32() * value);
                merger.add(parts, &[o.sum()], 1.0 / P_FACTOR, &mut total);
            }
            merger.finish(sink, &mut total);
            assert!(
                (f64::from(total[0]) - want).abs() < 1e-3,
                "{total:?} {want}"
            );
        }
    }

    /// 2,000 cells of `e^-14` are more than one thousandth of their row.
    #[test]
    fn probabilities_below_normal_numbers_of_fp16_are_kept() {
        let mut scores = vec![-14.0; 2000];
        scores[7] = 0.0;
        let (c, layout) = native(&scores);
        let rows = NativeRows {
            c: &c,
            layout,
            m: 3,
        };
        let row = RowMask {
            mask: None,
            slope: 1.0,
            factor: 1.0,
        };
        let scaling = Scaling {
            scale: 1.0,
            softcap: 0.0,
        };
        let mut p = vec![f16::ZERO; scores.len()];
        let mut work = vec![0.0; scores.len()];
        probabilities(rows, 1, row, scaling, &mut work, &mut p);
        let want = (-14_f32).exp() * P_FACTOR;
        assert!(p[8] > f16::MIN_POSITIVE);
        assert!(
            (p[8].to_f32() - want).abs() < want / 1024.0,
            "{} {want}",
            p[8]
        );
        assert!(p.iter().all(|p| p.is_finite()));
    }

    #[test]
    fn a_row_that_sees_a_score_of_nan_is_nan() {
        let (c, layout) = native(&[1.0, f32::NAN]);
        let rows = NativeRows {
            c: &c,
            layout,
            m: 3,
        };
        let scaling = Scaling {
            scale: 1.0,
            softcap: 0.0,
        };
        for (mask, is_nan) in [(0.0, true), (f32::NEG_INFINITY, false)] {
            let mask = [0.0, mask].map(f16::from_f32);
            let row = RowMask {
                mask: Some(&mask),
                slope: 1.0,
                factor: 1.0,
            };
            let mut p = [f16::NAN; 2];
            let parts = probabilities(rows, 1, row, scaling, &mut [0.0; 2], &mut p);
            assert!(p.iter().all(|p| p.is_finite()), "{p:?}");
            let mut total = [0.0];
            let mut merger = Merger::default();
            merger.add(parts, &[3.0], 1.0, &mut total);
            merger.finish(None, &mut total);
            assert_eq!(total[0].is_nan(), is_nan, "{total:?}");
        }
    }

    #[test]
    fn a_row_without_a_visible_cell_is_zeros() {
        let (c, layout) = native(&[1.0, 2.0]);
        let rows = NativeRows {
            c: &c,
            layout,
            m: 3,
        };
        let row = RowMask {
            mask: Some(&[f16::NEG_INFINITY; 2]),
            slope: 1.0,
            factor: 1.0,
        };
        let scaling = Scaling {
            scale: 1.0,
            softcap: 0.0,
        };
        let mut p = [f16::ONE; 2];
        let parts = probabilities(rows, 1, row, scaling, &mut [0.0; 2], &mut p);
        assert_eq!((parts, p), ((f32::NEG_INFINITY, 0.0), [f16::ZERO; 2]));
        let mut total = [0.0; 2];
        let mut merger = Merger::default();
        merger.add(parts, &[3.0, 4.0], 1.0, &mut total);
        merger.finish(None, &mut total);
        assert_eq!(total, [0.0; 2]);
    }
}
