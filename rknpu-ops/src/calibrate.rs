//! Clips for INT4 weights: the magnitude of the outermost of the 16 levels.
//!
//! The levels are -7.5, -6.5, … 7.5 steps: 16 of them, reaching equally far to both sides of 0.
//! That no level is 0 does not matter to rotated weights, hardly any of which is 0. The half is
//! added after the multiplication.
//!
//! With 16 levels, giving up the few largest values makes every other value more precise. With the
//! 255 of INT8 it never does, so a [`Clip`] can become an INT4 scale only.
//!
//! | method | samples it needs | decides for |
//! |---|---|---|
//! | `AbsMax` | 1 | one row and K segment |
//! | `Mse` | a few dozen | one row and K segment |
//! | `Percentile`, `KlDivergence` | more than bins, some 10,000 | all rows of a group, in units of each row's RMS |
//!
//! A row and segment has some hundred values, too few for a histogram of [`BINS`] bins. After a
//! rotation the rows of a weight differ in size, hardly in shape. So the methods that look at a
//! distribution pool the rows of a group (16 to 64 of them), each divided by its root mean square,
//! choose one clip for the pool, and multiply it back. No clip is above the largest magnitude of
//! its row.

use multiversion::multiversion;

use crate::pack::Rows;
use crate::round::{self, halfway};

mod histogram;

use histogram::Histogram;
pub use histogram::{BINS, KL_CANDIDATES, KL_FLOOR};

/// Clips that [`Method::Mse`] tries: a geometric series from the RMS to the largest magnitude.
pub const MSE_CANDIDATES: usize = 32;

/// Partial sums of a row, a fixed number of them so that a sum is the same with vectors of any
/// width.
const LANES: usize = 16;

/// Largest level, in steps.
pub(crate) const LEVEL_MAX: f32 = 7.5;

/// Method that chooses the clip of INT4 weights.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Method {
    /// The largest magnitude: nothing is clipped, and the scale is that of the clip.
    AbsMax,
    /// The magnitude that this fraction (0 to 1) of the values does not exceed.
    Percentile(f32),
    /// The clip with the least squared error.
    #[default]
    Mse,
    /// The clip whose quantized distribution is closest to that of the values, by Kullback-Leibler
    /// divergence.
    KlDivergence,
}

/// Magnitude that INT4 values are clipped to: in (0, largest magnitude], 0 for zeros, NaN if a
/// value is not finite.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct Clip(f32);

impl Clip {
    /// Returns the largest magnitude that is not clipped.
    #[must_use]
    pub const fn magnitude(self) -> f32 {
        self.0
    }

    /// Returns `7.5 / magnitude`, the factor of values before rounding; `None` if that is not
    /// finite and nothing can be rounded.
    pub(crate) fn inverse_i4(self) -> Option<f32> {
        let inverse = LEVEL_MAX / self.0;
        inverse.is_finite().then_some(inverse)
    }

    /// Returns the INT4 scale of `values` rounded with this clip, as `method` requires.
    ///
    /// - `clip / 7.5` for [`Method::AbsMax`]; otherwise the scale that fits the levels `q` best,
    ///   `sum(x q) / sum(q^2)`
    /// - 0 for zeros, NaN if a value is not finite
    #[must_use]
    pub fn scale_i4(self, values: &[f32], method: Method) -> f32 {
        let Some(inverse) = self.inverse_i4() else {
            return self.0 * 0.0;
        };
        if method == Method::AbsMax {
            return self.0 / LEVEL_MAX;
        }
        let LevelFit { uq, qq } = fit(values, inverse);
        // The divisor is not 0, because no level is 0.
        uq / qq / inverse
    }
}

/// Chooses the clip of `values` alone.
#[must_use]
pub fn clip(values: &[f32], method: Method) -> Clip {
    let mut clip = Clip::default();
    clip_rows(
        Rows::new(values, 1, values.len(), values.len()),
        method,
        |_, found| clip = found,
    );
    clip
}

/// Chooses the clip of each row, of one K segment; `found(row, clip)` is called for every row, in
/// order.
///
/// The rows are one pool if the method needs one.
pub fn clip_rows(rows: Rows<'_, f32>, method: Method, mut found: impl FnMut(usize, Clip)) {
    let pooled = match method {
        Method::AbsMax | Method::Mse => f32::INFINITY,
        Method::Percentile(fraction) => Histogram::of(rows).percentile(fraction),
        Method::KlDivergence => Histogram::of(rows).kl_clip(),
    };
    for m in 0..rows.count() {
        let row = rows.row(m);
        let size = Size::of(row);
        let clip = match method {
            Method::AbsMax => size.max,
            Method::Mse => mse_clip(row, size),
            Method::Percentile(_) | Method::KlDivergence => size.max.min(size.rms * pooled),
        };
        // `min` does not propagate NaN.
        let clip = if size.max.is_finite() { clip } else { f32::NAN };
        found(m, Clip(clip));
    }
}

/// Returns the clip of values that are nearly normal: `factor` times their RMS, at most their
/// largest magnitude.
pub(crate) fn rms_clip(values: &[f32], factor: f32) -> Clip {
    let size = Size::of(values);
    if size.max.is_nan() {
        return Clip(f32::NAN);
    }
    Clip(size.max.min(size.rms * factor))
}

/// Magnitude of the values of a row.
#[derive(Clone, Copy, Debug)]
struct Size {
    /// Largest magnitude; NaN if a value is not finite.
    max: f32,
    /// Root of the mean square, in (0, max] for values that are not zeros.
    rms: f32,
}

impl Size {
    fn of(row: &[f32]) -> Self {
        let max = absmax(row);
        if max == 0.0 || !max.is_finite() {
            return Self {
                max: max * 0.0,
                rms: 0.0,
            };
        }
        // Squares are relative to the largest value, so that no significant one overflows or
        // vanishes.
        let inverse = 1.0 / max;
        if !inverse.is_finite() {
            return Self { max, rms: max };
        }
        // CAST: a length as FP32 is off by 2^-24 at most.
        let mean = square_sum(row, inverse) / row.len() as f32;
        Self {
            max,
            rms: max * mean.sqrt().min(1.0),
        }
    }
}

/// Returns the clip among [`MSE_CANDIDATES`] with the least error after its scale has been fitted.
///
/// With the best scale for given levels, the error is `sum(x^2) - sum(x q)^2 / sum(q^2)`: the least
/// error is the largest quotient.
fn mse_clip(row: &[f32], size: Size) -> f32 {
    let mut best = (f32::NEG_INFINITY, size.max);
    if size.rms == 0.0 {
        return size.max;
    }
    // CAST: a small constant.
    let step = (size.rms / size.max).powf(1.0 / (MSE_CANDIDATES - 1) as f32);
    let mut clip = size.max;
    for _ in 0..MSE_CANDIDATES {
        let Some(inverse) = Clip(clip).inverse_i4() else {
            break;
        };
        let LevelFit { uq, qq } = fit(row, inverse);
        // In units of the largest magnitude, so that no square overflows or vanishes.
        let xq = uq * (clip / size.max);
        let gain = xq * xq / qq;
        if gain > best.0 {
            best = (gain, clip);
        }
        clip *= step;
    }
    best.1
}

/// Sums over a row `x`, `u = x * inverse`, and its levels `q`.
#[derive(Clone, Copy, Debug)]
struct LevelFit {
    /// `sum(u q)`.
    uq: f32,
    /// `sum(q^2)`: exact.
    qq: f32,
}

/// Returns the [`LevelFit`] of a row, `q` being the level nearest to `u`.
#[multiversion(targets("x86_64+avx2"))]
fn fit(row: &[f32], inverse: f32) -> LevelFit {
    let (mut uq, mut qq) = ([0.0f32; LANES], [0.0f32; LANES]);
    let mut add = |part: &[f32; LANES]| {
        for (lane, x) in part.iter().enumerate() {
            let u = x * inverse;
            let q = halfway(u, LEVEL_MAX) - round::MAGIC + 0.5;
            uq[lane] += u * q;
            qq[lane] += q * q;
        }
    };
    let (parts, rest) = row.as_chunks();
    parts.iter().for_each(&mut add);
    let mut last = [0.0; LANES];
    last[..rest.len()].copy_from_slice(rest);
    add(&last);
    // CAST: at most 16.
    let padding = (LANES - rest.len()) as f32;
    LevelFit {
        uq: uq.iter().sum(),
        // Zeros that pad the row have the level 1/2, so their squares are subtracted.
        qq: qq.iter().sum::<f32>() - 0.25 * padding,
    }
}

/// Returns the largest magnitude; infinity or NaN if a value is.
#[multiversion(targets("x86_64+avx2"))]
fn absmax(row: &[f32]) -> f32 {
    // Without the sign, bits compare like magnitudes, with infinity and NaN as the largest.
    let bits = row
        .iter()
        .map(|x| (x.to_bits() & 0x7fff_ffff).cast_signed())
        .fold(0, i32::max);
    f32::from_bits(bits.cast_unsigned())
}

/// Returns `sum((x * factor)^2)`.
#[multiversion(targets("x86_64+avx2"))]
fn square_sum(row: &[f32], factor: f32) -> f32 {
    let mut sums = [0.0f32; LANES];
    let (parts, rest) = row.as_chunks::<LANES>();
    for part in parts {
        for (sum, x) in sums.iter_mut().zip(part) {
            *sum += (x * factor) * (x * factor);
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        *sum += (x * factor) * (x * factor);
    }
    sums.iter().sum()
}
