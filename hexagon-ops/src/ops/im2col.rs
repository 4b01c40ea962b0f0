//! IM2COL: the window of each output position of a convolution as a row, so that a matrix product
//! is the convolution.
//!
//! ```text
//! row (ow, oh, od, n) = for each channel, kd, kh, kw
//!     image[n][channel][od · s + kd · d - p][oh · s + kh · d - p][ow · s + kw · d - p], zero outside
//! ```

use super::tensor::{CHUNK, Chunk, Row, SCALAR, Source, Type, View, ViewMut, row_packets};
use crate::error::{Error, Result};
use crate::hvx;
use crate::rt::Engine;

/// Limit of strides and dilations, with which positions are far from overflow.
const LARGEST: u32 = 1 << 24;

/// Meaning of the image's dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Image {
    /// Width, channels, batch.
    Line,
    /// Width, height, channels, batch.
    Plane,
    /// Width, height, depth, and batch times channels; the number is the channels.
    Volume(usize),
}

/// Parameters of [`im2col`]; arrays are for width, height and depth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Im2col {
    /// Dimensions of the image.
    pub image: Image,
    /// Elements from one output position to the next.
    pub stride: [u32; 3],
    /// Positions before the image.
    pub pad: [i32; 3],
    /// Elements from one element of the window to the next.
    pub dilation: [u32; 3],
    /// Elements of the window.
    pub window: [usize; 3],
}

impl Im2col {
    /// Returns the number of channels of an image.
    fn channels(&self, ne: [usize; 4]) -> usize {
        match self.image {
            Image::Line => ne[1],
            Image::Plane => ne[2],
            Image::Volume(channels) => channels,
        }
    }

    /// Returns the image coordinate of window element `k` at output position `o` of a dimension;
    /// `None` unless it is below `count`.
    #[inline(always)]
    fn coordinate(&self, dim: usize, o: usize, k: usize, count: usize) -> Option<usize> {
        // CAST: dimensions are below 2^32, strides and dilations below 2^24.
        let at = o as i64 * i64::from(self.stride[dim]) + k as i64 * i64::from(self.dilation[dim]);
        let at = usize::try_from(at - i64::from(self.pad[dim])).ok()?;
        (at < count).then_some(at)
    }
}

/// Writes one row of [`im2col`].
struct WindowRow<'a> {
    params: Im2col,
    row: Row<'a>,
    view: &'a View<'a>,
    depths: usize,
}

impl WindowRow<'_> {
    /// Returns the row of the image that holds a line of the window; `None` outside.
    #[inline(always)]
    fn line(&self, channel: usize, kd: usize, kh: usize) -> Option<[usize; 3]> {
        let [_, i2, i3] = self.row.at;
        let ne = self.view.shape.ne;
        match self.params.image {
            Image::Line => Some([channel, i2, 0]),
            Image::Plane => {
                let y = self.params.coordinate(1, i2, kh, ne[1])?;
                Some([y, channel, i3])
            }
            Image::Volume(channels) => {
                let y = self.params.coordinate(1, i2, kh, ne[1])?;
                let z = self.params.coordinate(2, i3 % self.depths, kd, ne[2])?;
                Some([y, z, i3 / self.depths * channels + channel])
            }
        }
    }
}

impl hvx::Kernel for WindowRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let [kw, kh, kd] = self.params.window;
        let width = self.view.shape.ne[0];
        let mut chunk: Chunk = [0.0; CHUNK];
        let (mut start, mut filled) = (0, 0);
        for line in 0..self.row.len() / kw {
            let at = self.line(line / (kh * kd), line / kh % kd, line % kh);
            for k in 0..kw {
                let x = self.params.coordinate(0, self.row.at[0], k, width);
                chunk[filled] = match (at, x) {
                    (Some(at), Some(x)) => self.view.element(x, at),
                    _ => 0.0,
                };
                filled += 1;
                if filled == CHUNK {
                    self.row.write(start, &chunk);
                    (start, filled) = (start + CHUNK, 0);
                }
            }
        }
        self.row.write(start, &chunk[..filled]);
    }
}

/// Writes the windows of an image as rows.
///
/// # Errors
/// `Operand` unless the image is f32, the result is a float with rows of channels times window, and
/// parameters are in range.
pub fn im2col(engine: &Engine, params: Im2col, dst: ViewMut<'_>, src: &Source<'_>) -> Result<()> {
    let view = &src.apart()?;
    let (d, s) = (dst.shape.ne, view.shape.ne);
    let types = view.shape.dtype == Type::F32 && dst.shape.dtype.is_float();
    let small = |values: [u32; 3]| values.iter().all(|value| *value < LARGEST);
    let in_range = small(params.stride) && small(params.dilation);
    let channels = params.channels(s);
    let elems = params
        .window
        .iter()
        .try_fold(channels, |product, n| product.checked_mul(*n));
    let (batches, depths) = match params.image {
        Image::Line => (d[3] == 1 && d[2] == s[2] && s[3] == 1, 1),
        Image::Plane => (d[3] == s[3], 1),
        Image::Volume(channels) => {
            let batch = s[3].checked_div(channels).filter(|batch| *batch > 0);
            let depths = batch.map_or(0, |batch| d[3] / batch);
            let whole = batch.is_some_and(|batch| batch * depths == d[3]);
            (whole && s[3].is_multiple_of(channels), depths)
        }
    };
    if !types || !in_range || elems != Some(d[0]) || !batches {
        return Err(Error::Operand);
    }
    let n = dst.shape.ne[0];
    let packets = || row_packets(n, SCALAR);
    dst.for_rows(engine, packets, |row| {
        hvx::widest(WindowRow {
            params,
            row,
            view,
            depths,
        });
    });
    Ok(())
}

/// Parameters of [`col2im`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Col2im {
    /// Elements of the result from one column to the next.
    pub stride: u32,
    /// Channels of the result.
    pub channels: usize,
    /// Elements that are left out at the start.
    pub pad: u32,
}

/// Adds columns of windows where they overlap: `y[t, c]` is the sum over columns i and elements k of
/// a window with `i · stride + k = t + pad`.
///
/// - `src`: floats `[k · channels, columns]`
/// - `dst`: floats `[length, channels]`
///
/// # Errors
/// `Operand` unless the operands are as above and parameters are in range.
pub fn col2im(engine: &Engine, params: Col2im, dst: ViewMut<'_>, src: &Source<'_>) -> Result<()> {
    let view = &src.apart()?;
    let [elems, columns, ..] = view.shape.ne;
    let channels = params.channels;
    let window = elems.checked_div(channels).ok_or(Error::Operand)?;
    let fits = view.shape.dtype.is_float()
        && dst.shape.dtype.is_float()
        && view.shape.ne == [window * channels, columns, 1, 1]
        && dst.shape.ne[1..] == [channels, 1, 1]
        && (1..LARGEST).contains(&params.stride)
        && params.pad < LARGEST;
    let sizes = (usize::try_from(params.stride), usize::try_from(params.pad));
    let (true, (Ok(stride), Ok(pad))) = (fits, sizes) else {
        return Err(Error::Operand);
    };
    let n = dst.shape.ne[0];
    let packets = || row_packets(n, SCALAR);
    dst.for_rows(engine, packets, |mut row| {
        let mut elem: Chunk = [0.0; CHUNK];
        let channel = row.at[0];
        for t in 0..row.len() {
            let at = t + pad;
            let first = (at + 1).saturating_sub(window).div_ceil(stride);
            let mut sum = 0.0;
            for column in first..columns.min(at / stride + 1) {
                let k = channel * window + (at - column * stride);
                let elems = view.read([column, 0, 0], k..k + 1, &mut elem);
                sum += elems.first().copied().unwrap_or(0.0);
            }
            row.write(t, &[sum]);
        }
    });
    Ok(())
}
