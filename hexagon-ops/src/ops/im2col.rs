//! IM2COL: the window of each output position of a convolution as a row, so that a matrix product
//! is the convolution.
//!
//! ```text
//! row (ow, oh, od, n) = for each channel, kd, kh, kw
//!     image[n][channel][od · s + kd · d - p][oh · s + kh · d - p][ow · s + kw · d - p], zero outside
//! ```

use core::ops::Range;

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

/// Elements that are collected before they are written, and room for a vector after them.
type Collected = [f32; CHUNK + 32];

/// Copies `count` elements, `step` apart, to `to[at..]`; writes others after them if there is room.
#[inline(always)]
fn copy_line(to: &mut Collected, at: usize, from: &[f32], step: usize, count: usize) {
    let room = to.get_mut(at..).unwrap_or_default();
    if let (1, 0..=32, Some(from), Some(room)) = (
        step,
        count,
        from.first_chunk::<32>(),
        room.first_chunk_mut::<32>(),
    ) {
        return hvx::store_f32(room, hvx::load_f32(from));
    }
    for (to, elem) in room.iter_mut().zip(from.iter().step_by(step)).take(count) {
        *to = *elem;
    }
}

/// Copies lines of `count` consecutive elements from places `stride` apart. They are appended to
/// `to`, from `at` to at most `end`, as many as can be copied as vectors. Returns the rest of
/// `from`, and the end of the copied elements.
#[inline(always)]
fn copy_lines<'a>(
    to: &mut Collected,
    Range { start: mut at, end }: Range<usize>,
    mut from: &'a [f32],
    stride: usize,
    count: usize,
) -> (&'a [f32], usize) {
    let mut room = to.get_mut(at..).unwrap_or_default();
    while let (Some(line), Some(vector)) = (from.first_chunk(), room.first_chunk_mut())
        && at + count <= end
    {
        hvx::store_f32(vector, hvx::load_f32(line));
        from = from.get(stride..).unwrap_or_default();
        room = room.get_mut(count..).unwrap_or_default();
        at += count;
    }
    (from, at)
}

/// The elements of a window that has one line in each channel.
struct Lines<'a> {
    /// Elements starting with the first window's first.
    elems: &'a [f32],
    /// Elements from a channel to the next, and from an element of the window to the next.
    stride: usize,
    step: usize,
}

impl<'a> WindowRow<'a> {
    /// Returns the lines of a window that is inside the image; `first` is its first column.
    fn lines(&self, first: usize) -> Option<Lines<'a>> {
        let view = self.view;
        let [_, kh, kd] = self.params.window;
        let (elems, strides) = view.all_floats()?;
        let stride = match self.params.image {
            Image::Line => strides[0],
            Image::Plane => strides[1],
            Image::Volume(_) => return None,
        };
        let start = view.shape.row(self.line(0, 0, 0)?) / 4 + first;
        let elems = elems.get(start..).filter(|_| (kh, kd) == (1, 1))?;
        let step = usize::try_from(self.params.dilation[0]).ok()?;
        (stride > 0 && step > 0).then_some(Lines {
            elems,
            stride,
            step,
        })
    }

    /// Writes the row of such a window.
    #[inline(always)]
    fn write_lines(&mut self, lines: &Lines<'_>) {
        let kw = self.params.window[0];
        let mut chunk: Collected = [0.0; CHUNK + 32];
        let (mut start, mut filled, mut rest) = (0, 0, lines.elems);
        let n = self.row.len();
        while start + filled < n {
            if filled + kw > CHUNK {
                self.row.write(start, &chunk[..filled]);
                (start, filled) = (start + filled, 0);
            }
            if lines.step == 1 && kw <= 32 {
                let end = CHUNK.min(n - start);
                (rest, filled) = copy_lines(&mut chunk, filled..end, rest, lines.stride, kw);
                if filled + kw > end {
                    continue;
                }
            }
            copy_line(&mut chunk, filled, rest, lines.step, kw);
            filled += kw;
            rest = rest.get(lines.stride..).unwrap_or_default();
        }
        self.row.write(start, &chunk[..filled]);
    }
}

impl hvx::Kernel for WindowRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let [kw, kh, kd] = self.params.window;
        let params = self.params;
        let width = self.view.shape.ne[0];
        let mut chunk: Collected = [0.0; CHUNK + 32];
        let (mut start, mut filled) = (0, 0);
        // All lines have the same columns, so these are computed once.
        let first = params.coordinate(0, self.row.at[0], 0, width);
        let last = params.coordinate(0, self.row.at[0], kw - 1, width);
        let step = usize::try_from(params.dilation[0]).unwrap_or(0);
        if let (Some(first), Some(_)) = (first, last)
            && kw <= CHUNK
            && let Some(lines) = self.lines(first)
        {
            return self.write_lines(&lines);
        }
        let all = self.view.all_floats();
        // Counters instead of divisions, which are function calls on the DSP.
        let [mut channel, mut z, mut y] = [0; 3];
        for _ in 0..self.row.len() / kw {
            let at = self.line(channel, z, y);
            y += 1;
            if y == kh {
                (y, z) = (0, z + 1);
            }
            if z == kd {
                (z, channel) = (0, channel + 1);
            }
            if filled + kw > CHUNK {
                self.row.write(start, &chunk[..filled]);
                (start, filled) = (start + filled, 0);
            }
            if let (Some((elems, _)), Some(at), Some(first), Some(_)) = (all, at, first, last)
                && step > 0
                && kw <= CHUNK
            {
                // All lines are inside the image.
                let line = self.view.shape.row(at) / 4 + first;
                copy_line(
                    &mut chunk,
                    filled,
                    elems.get(line..).unwrap_or_default(),
                    step,
                    kw,
                );
                filled += kw;
                continue;
            }
            for k in 0..kw {
                let x = params.coordinate(0, self.row.at[0], k, width);
                chunk[filled] = match (at, x) {
                    (Some(at), Some(x)) => self.view.element(x, at),
                    _ => 0.0,
                };
                filled += 1;
                if filled == CHUNK {
                    self.row.write(start, &chunk[..CHUNK]);
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

/// Adds columns of windows where they overlap: `y[t, c]` is the sum over columns i and elements k
/// of a window with `i · stride + k = t + pad`.
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
