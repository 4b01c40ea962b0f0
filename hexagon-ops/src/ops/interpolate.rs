//! UPSCALE: planes of another size, by the nearest element or by weighted neighbours.
//!
//! ```text
//! for each row (y, ·, ·) of the result, for each x
//!   sum over the taps of y and of x: source[x_tap, y_tap] · weight · weight
//! ```
//!
//! Weights of height and width are independent, and so are sums of weights. In dimensions 2 and 3
//! the nearest element is used. Positions are computed as ggml does, in f32 and in its order,
//! because the rounding of a position decides which element is nearest.
//!
//! SOURCE: ggml, `ggml_compute_forward_upscale_f32`.

use super::tensor::{CHUNK, Chunk, Row, SCALAR, Source, Type, View, ViewMut, row_packets};
use crate::error::{Error, Result};
use crate::rt::Engine;

/// Neighbours of a position that make an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Neighbours {
    /// The one before the position.
    Nearest,
    /// Two, by distance.
    Bilinear,
    /// All elements that an element of the result covers, by distance.
    Antialiased,
    /// Four, by a cubic function of the distance.
    Bicubic,
}

/// Parameters of [`interpolate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interpolation {
    /// Neighbours that are used.
    pub neighbours: Neighbours,
    /// `true` if the first and the last elements of both planes coincide, `false` if their outer
    /// edges do.
    pub aligns_corners: bool,
}

/// The distance of positions along a dimension.
#[derive(Clone, Copy)]
struct PlaneAxis {
    /// Elements of the result for one of the source.
    scale: f32,
    /// Place of an element in its cell.
    offset: f32,
    /// Elements of the source.
    count: usize,
}

/// CAST: dimensions are below 2^24 where f32 has every whole number; ggml rounds larger ones, too.
#[expect(clippy::cast_precision_loss, reason = "see above")]
fn float(n: usize) -> f32 {
    n as f32
}

/// Returns the largest whole number that is not larger than `x`, and `i32::MAX` for `x` of 2^31,
/// the most.
#[expect(clippy::cast_possible_truncation, reason = "see above")]
fn floor(x: f32) -> i32 {
    let whole = x as i32;
    if float_of(whole) > x {
        whole - 1
    } else {
        whole
    }
}

/// CAST: positions are below 2^24.
#[expect(clippy::cast_precision_loss, reason = "see above")]
fn float_of(n: i32) -> f32 {
    n as f32
}

impl PlaneAxis {
    fn new(params: Interpolation, from: usize, to: usize) -> Self {
        let ends = params.aligns_corners && from > 1 && to > 1;
        Self {
            scale: match ends {
                true => float(to - 1) / float(from - 1),
                false => float(to) / float(from),
            },
            offset: if params.aligns_corners { 0.0 } else { 0.5 },
            count: from,
        }
    }

    /// Returns the element at or before the position of `index`.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "positions are not negative and below 2^24"
    )]
    fn nearest(&self, index: usize) -> usize {
        ((float(index) / self.scale) as usize).min(self.count - 1)
    }

    /// Returns an element of the source for any index: those outside become the outermost.
    fn clamp(&self, index: i32) -> usize {
        usize::try_from(index).unwrap_or(0).min(self.count - 1)
    }

    /// Calls `f` with the elements and weights that make element `index` of the result.
    fn taps(&self, neighbours: Neighbours, index: usize, mut f: impl FnMut(usize, f32)) {
        match neighbours {
            Neighbours::Nearest => f(self.nearest(index), 1.0),
            Neighbours::Bilinear => {
                let x = (float(index) + self.offset) / self.scale - self.offset;
                let first = floor(x);
                let place = self.clamp(first);
                let rest = (x - float(place)).clamp(0.0, 1.0);
                f(place, 1.0 - rest);
                f(self.clamp(first.saturating_add(1)), rest);
            }
            Neighbours::Bicubic => {
                let x = (float(index) + self.offset) / self.scale - self.offset;
                let first = floor(x);
                let rest = x - float_of(first);
                f(self.clamp(first - 1), far(rest + 1.0));
                f(self.clamp(first), near(rest));
                f(self.clamp(first.saturating_add(1)), near(1.0 - rest));
                f(self.clamp(first.saturating_add(2)), far(2.0 - rest));
            }
            Neighbours::Antialiased => self.covered(index, f),
        }
    }

    /// Calls `f` with the elements that element `index` of the result covers; their weights add up
    /// to 1.
    fn covered(&self, index: usize, mut f: impl FnMut(usize, f32)) {
        let reach = (1.0 / self.scale).max(1.0);
        let x = (float(index) + self.offset) / self.scale;
        let first = self.clamp_end(x - reach + self.offset);
        let end = self.clamp_end(x + reach + self.offset);
        let weight = |at: usize| {
            let distance = (float(at) - x + self.offset) * (1.0 / reach);
            (1.0 - distance.abs()).max(0.0)
        };
        let total: f32 = (first..end).map(weight).sum();
        if total > 0.0 {
            (first..end).for_each(|at| f(at, weight(at) / total));
        }
    }

    /// Returns a limit of elements, from 0 to their number.
    fn clamp_end(&self, x: f32) -> usize {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "negative positions become 0"
        )]
        let end = x as usize;
        end.min(self.count)
    }
}

/// Factor of the cubic functions.
///
/// SOURCE: ggml, `ggml_compute_forward_upscale_f32`: that of `PyTorch`.
const CUBIC: f32 = -0.75;

/// Returns the weight of an element at a distance of up to 1.
fn near(x: f32) -> f32 {
    ((CUBIC + 2.0) * x - (CUBIC + 3.0)) * x * x + 1.0
}

/// Returns the weight of an element at a distance of 1 to 2.
fn far(x: f32) -> f32 {
    ((CUBIC * x - 5.0 * CUBIC) * x + 8.0 * CUBIC) * x - 4.0 * CUBIC
}

/// Changes the size of planes.
///
/// # Errors
/// `Operand` unless both are f32.
pub fn interpolate(
    engine: &Engine,
    params: Interpolation,
    dst: ViewMut<'_>,
    src: &Source<'_>,
) -> Result<()> {
    let view = &src.apart()?;
    if view.shape.dtype != Type::F32 || dst.shape.dtype != Type::F32 {
        return Err(Error::Operand);
    }
    let to = dst.shape.ne;
    let plane = [0, 1].map(|dim| PlaneAxis::new(params, view.shape.ne[dim], to[dim]));
    let others = [2, 3].map(|dim| {
        let unsmoothed = Interpolation {
            aligns_corners: false,
            ..params
        };
        PlaneAxis::new(unsmoothed, view.shape.ne[dim], to[dim])
    });
    let packets = || row_packets(to[0], SCALAR);
    dst.for_rows(engine, packets, |row| {
        let at = [others[0].nearest(row.at[1]), others[1].nearest(row.at[2])];
        fill(params.neighbours, plane, view, at, row);
    });
    Ok(())
}

/// Writes a row of the result.
fn fill(
    neighbours: Neighbours,
    [width, height]: [PlaneAxis; 2],
    view: &View<'_>,
    plane: [usize; 2],
    mut row: Row<'_>,
) {
    let (n, y) = (row.len(), row.at[0]);
    let mut chunk: Chunk = [0.0; CHUNK];
    for start in (0..n).step_by(CHUNK) {
        let len = CHUNK.min(n - start);
        for (i, out) in chunk[..len].iter_mut().enumerate() {
            let mut sum = 0.0;
            height.taps(neighbours, y, |y, by_height| {
                let mut line = 0.0;
                width.taps(neighbours, start + i, |x, by_width| {
                    line += view.element(x, [y, plane[0], plane[1]]) * by_width;
                });
                sum += line * by_height;
            });
            *out = sum;
        }
        row.write(start, &chunk[..len]);
    }
}
