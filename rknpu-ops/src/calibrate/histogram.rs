//! The methods that use the distribution of many values.
//!
//! ```text
//! P   histogram between -clip and clip, with the values beyond added to the outermost bins
//! Q   the same bins without those values, each of the 16 levels spread evenly over its bins
//!     that are not empty
//!
//!      -clip                             0                             clip
//! levels |-7.5|-6.5| … |-2.5|-1.5|-0.5|0.5|1.5|2.5| … |6.5|7.5|     the outermost are half as wide
//! ```
//!
//! A narrow clip makes P and Q differ in the outermost bins, a wide one inside the levels: KL(P ||
//! Q) measures both.

use super::{LEVEL_MAX, Size};
use crate::pack::Rows;

/// Bins of a histogram over `[-max, max]`.
// SOURCE: this number, KL_CANDIDATES and KL_FLOOR are taken from the calibration in Antonyants,
// Kashtanov, Voloshin, "Development of a computing backend for Llama.cpp based on Rockchip NPU",
// INJOIT, and its implementation.
pub const BINS: usize = 2048;

/// Clips that [`KlDivergence`](super::Method::KlDivergence) tries, evenly spaced.
pub const KL_CANDIDATES: usize = 128;

/// Fraction of the values that the smallest of these clips leaves whole.
pub const KL_FLOOR: f32 = 0.995;

/// Values of some rows, each row divided by its RMS.
pub(super) struct Histogram {
    bins: Box<[u32; BINS]>,
    /// Largest magnitude; 0 without values.
    max: f32,
    total: u64,
}

/// Sums over all bins before bin `i`.
#[derive(Clone, Copy, Default)]
struct Before {
    count: u64,
    /// Bins that are not empty.
    filled: u32,
    /// `sum(n ln n)` of their counts `n`.
    n_ln_n: f64,
}

impl Histogram {
    /// Counts the values of `rows`. Rows of zeros and rows with a value that is not
    /// finite are left out.
    pub(super) fn of(rows: Rows<'_, f32>) -> Self {
        let rows = (0..rows.count()).map(|m| rows.row(m));
        let mut bins = Box::new([0; BINS]);
        let usable = rows.filter_map(|row| {
            let size = Size::of(row);
            let inverse = 1.0 / size.rms;
            (size.rms > 0.0 && inverse.is_finite()).then_some((row, size.max * inverse, inverse))
        });
        let max = usable.clone().map(|(_, max, _)| max).fold(0.0, f32::max);
        let mut total = 0;
        // CAST: a small constant.
        let (half, per_bin) = (BINS as f32 / 2.0, BINS as f32 / 2.0 / max);
        for (row, _, inverse) in usable {
            for x in row {
                bins[bin(x * inverse * per_bin + half)] += 1;
            }
            // CAST: a length.
            total += row.len() as u64;
        }
        Self { bins, max, total }
    }

    /// Returns the magnitude that `fraction` of the values do not exceed, rounded up to a bin.
    pub(super) fn percentile(&self, fraction: f32) -> f32 {
        // CAST: counts far below 2^53.
        let beyond = (1.0 - f64::from(fraction)) * self.total as f64;
        let mut outside = 0;
        // Pairs of bins at equal distances from 0, starting with the outermost.
        for i in 0..BINS / 2 {
            outside += u64::from(self.bins[i]) + u64::from(self.bins[BINS - 1 - i]);
            // CAST: as above.
            if outside as f64 > beyond {
                return self.edge(BINS / 2 - i);
            }
        }
        self.edge(1)
    }

    /// Returns the clip with the least divergence; of equal ones the largest.
    pub(super) fn kl_clip(&self) -> f32 {
        if self.total == 0 {
            return self.max;
        }
        let before = self.sums();
        let floor = self.percentile(KL_FLOOR);
        let mut best = (f64::INFINITY, self.max);
        for i in 0..KL_CANDIDATES {
            // CAST: small counts.
            let clip = self.max - (self.max - floor) * (i as f32 / (KL_CANDIDATES - 1) as f32);
            let divergence = self.divergence(&before, clip);
            if divergence < best.0 {
                best = (divergence, clip);
            }
        }
        best.1
    }

    /// Returns KL(P || Q) of a clip; infinite if Q is 0 where P is not.
    ///
    /// With `N` values, `N'` of them within the clip, and a level's bins `n_b` (P) and its sum `s`
    /// spread over `f` bins (Q), a level adds `sum(n_b / N * ln((n_b / N) / (s / f / N')))`. All
    /// sums over bins are differences of `before`.
    fn divergence(&self, before: &[Before], clip: f32) -> f64 {
        // CAST: a small constant.
        let half = BINS as f32 / 2.0;
        let per_step = half / self.max * clip / LEVEL_MAX;
        // A bin belongs to the level that contains its middle. The outermost levels end with the
        // clip, half a step out.
        let bound = |halves: i16| bin(f32::from(halves) * (per_step / 2.0) + half + 0.5);
        let (first, last) = (bound(-15), bound(15).max(bound(-15) + 1));
        let (outside_below, end) = (before[first].count, before[BINS]);
        let outside_above = end.count - before[last].count;
        let inside = before[last].count - outside_below;
        // CAST: counts far below 2^53.
        let (total, ln_inside) = (self.total as f64, (inside as f64).ln());
        let mut sum = -total * total.ln();
        let mut from = first;
        // Level `level + 1/2` reaches from `level` to `level + 1` steps.
        for level in -8i16..=7 {
            let to = if level == 7 {
                last
            } else {
                bound(level * 2 + 2)
            }
            .clamp(from, last);
            let (low, high) = (before[from], before[to]);
            let q = high.count - low.count;
            let (mut p, mut filled) = (q, high.filled - low.filled);
            let mut n_ln_n = high.n_ln_n - low.n_ln_n;
            for (at, edge, outside) in [(-8, first, outside_below), (7, last - 1, outside_above)] {
                if at == level && outside > 0 {
                    let n = u64::from(self.bins[edge]);
                    n_ln_n += x_ln_x(n + outside) - x_ln_x(n);
                    p += outside;
                    filled += u32::from(n == 0);
                }
            }
            if p > 0 {
                // CAST: as above; without a value in Q the logarithm is -infinity and the sum
                // +infinity.
                let ln_q = (q as f64).ln() - f64::from(filled).ln() - ln_inside;
                sum += n_ln_n - p as f64 * ln_q;
            }
            from = to;
        }
        sum / total
    }

    /// Returns the sums before each bin, and before the end.
    fn sums(&self) -> Vec<Before> {
        let mut before = Vec::with_capacity(BINS + 1);
        let mut sum = Before::default();
        before.push(sum);
        for n in self.bins.iter().copied() {
            sum.count += u64::from(n);
            sum.filled += u32::from(n > 0);
            sum.n_ln_n += x_ln_x(u64::from(n));
            before.push(sum);
        }
        before
    }

    /// Returns the upper edge of bin `i` of those from 0 to the largest magnitude, counted from 1.
    fn edge(&self, i: usize) -> f32 {
        // CAST: small numbers.
        self.max * (i as f32 / (BINS / 2) as f32)
    }
}

/// Returns `n ln n`, 0 for 0.
fn x_ln_x(n: u64) -> f64 {
    // CAST: counts far below 2^53.
    let n = n as f64;
    if n > 0.0 { n * n.ln() } else { 0.0 }
}

/// Returns the bin of a position on the scale of bins. The largest value is at [`BINS`] and belongs
/// to the last bin.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the cast saturates, which is what the ends of the scale need"
)]
fn bin(position: f32) -> usize {
    (position as usize).min(BINS - 1)
}
