//! CONV_2D, CONV_2D_DW, CONV_3D, CONV_TRANSPOSE_1D and CONV_TRANSPOSE_2D, without windows in memory
//! as IM2COL would write them.
//!
//! ```text
//! for each 32 positions of a result's plane     a task has some of the positions
//!   for each tap (an element of the window in a channel)
//!     a line: the source at each position of the tap, else 0      to VTCM
//!   for each 4 filters
//!     read their weights as f32                                   to VTCM
//!     for each tap: 4 sums += line · weight
//!     write 32 elements of 4 planes
//! ```
//!
//! A lane is a position, so that with a stride of 1 a line is copied from consecutive elements, and
//! no sum crosses lanes. The gathered lines serve all filters.
//!
//! SOURCE: ggml, `ggml_compute_forward_conv_2d_impl`, `_conv_2d_dw_whcn`, `_conv_3d_impl`,
//! `_conv_transpose_1d_f32` and `_conv_transpose_2d_impl`.

mod window;

use core::ops::Range;

use self::window::{PlaceRun, Window};
use super::tensor::{Source, Type, View, ViewMut};
use crate::error::{Error, Result};
use crate::hvx::{self, Accumulator, splat_f32};
use crate::layout::{Line, Tile};
use crate::rt::{Arena, Engine, SharedColumns, tiles_of_lines};
use crate::wire::{WIDE_SOURCES, WINDOW_TAPS};

/// Positions that are computed at a time.
const LANES: usize = 32;
/// Filters that are computed at a time.
const FILTERS: usize = 4;
/// Most tasks of a step.
const MAX_TASKS: usize = 8;
/// Limit of strides and dilations, with which positions are far from overflow.
const LARGEST: u32 = 1 << 24;

/// Meaning of the operands' dimensions. w is the kernel, x the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConvolutionForm {
    /// CONV_2D: w (width, height, channels, filters), x (width, height, channels, batch).
    Plane,
    /// CONV_2D_DW: w (width, height, 1, channels), x as above; a filter for each channel.
    EachChannel,
    /// CONV_3D of this many channels: w (width, height, depth, channels · filters), x (width,
    /// height, depth, channels · batch).
    Volume(usize),
    /// CONV_TRANSPOSE_1D: w (width, filters, channels), x (width, channels).
    TransposedLine,
    /// CONV_TRANSPOSE_2D: w (width, height, filters, channels), x (width, height, channels, batch).
    TransposedPlane,
}

/// Parameters of a convolution; arrays are for width, height and depth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Convolution {
    /// Meaning of dimensions.
    pub form: ConvolutionForm,
    /// Elements of the source from one position to the next; in a transposed form, elements of the
    /// result from one element of the source to the next.
    pub stride: [u32; 3],
    /// Positions before the source.
    pub pad: [i32; 3],
    /// Elements from one tap to the next.
    pub dilation: [u32; 3],
}

/// A convolution with checked operands.
struct Checked<'a> {
    params: Convolution,
    weights: View<'a>,
    source: View<'a>,
    window: Window,
    /// Channels that a filter reads.
    channels: usize,
    /// Filters of a result.
    filters: usize,
    /// Results in a row.
    batch: usize,
    /// Width, height and depth of a result.
    result: [usize; 3],
}

impl<'a> Checked<'a> {
    fn new(
        params: Convolution,
        dst: &ViewMut<'_>,
        src: &[Source<'a>; WIDE_SOURCES],
    ) -> Result<Self> {
        let (weights, source) = (src[0].apart()?, src[1].apart()?);
        let ([w0, w1, w2, w3], [x0, x1, x2, x3]) = (weights.shape.ne, source.shape.ne);
        let [y0, y1, y2, y3] = dst.shape.ne;
        // Four facts for each kind: sizes of window and source; channels of a filter, filters and
        // batch; and the sizes that must agree.
        let (window, size, result, [channels, filters, batch], agree) = match params.form {
            ConvolutionForm::Plane => (
                [w0, w1, 1],
                [x0, x1, 1],
                [y0, y1, 1],
                [w2, w3, x3],
                w2 == x2 && [y2, y3] == [w3, x3],
            ),
            ConvolutionForm::EachChannel => (
                [w0, w1, 1],
                [x0, x1, 1],
                [y0, y1, 1],
                [1, w3, x3],
                w2 == 1 && [y2, y3] == [w3, x3] && x2 == w3,
            ),
            ConvolutionForm::Volume(channels) => {
                let filters = w3.checked_div(channels).ok_or(Error::Operand)?;
                let batch = x3 / channels;
                (
                    [w0, w1, w2],
                    [x0, x1, x2],
                    [y0, y1, y2],
                    [channels, filters, batch],
                    w3 == channels * filters
                        && x3 == channels * batch
                        && filters.checked_mul(batch) == Some(y3),
                )
            }
            ConvolutionForm::TransposedLine => (
                [w0, 1, 1],
                [x0, 1, 1],
                [y0, 1, 1],
                [w2, w1, 1],
                w3 == 1 && [x1, x2, x3] == [w2, 1, 1] && [y1, y2, y3] == [w1, 1, 1],
            ),
            ConvolutionForm::TransposedPlane => (
                [w0, w1, 1],
                [x0, x1, 1],
                [y0, y1, 1],
                [w3, w2, x3],
                x2 == w3 && [y2, y3] == [w2, x3],
            ),
        };
        let taps = (window.iter()).try_fold(channels, |taps, size| taps.checked_mul(*size));
        let in_range = |values: [u32; 3]| values.iter().all(|value| (1..LARGEST).contains(value));
        let fits = agree
            && weights.shape.dtype.is_float()
            && source.shape.dtype == Type::F32
            && dst.shape.dtype == Type::F32
            && dst.shape.is_gapless()
            && in_range(params.stride)
            && in_range(params.dilation)
            && taps.is_some_and(|taps| taps <= WINDOW_TAPS)
            && src[2..].iter().all(|src| matches!(src, Source::None));
        if !fits {
            return Err(Error::Operand);
        }
        Ok(Self {
            params,
            weights,
            source,
            window: Window {
                size: window,
                source: size,
                stride: params.stride,
                pad: params.pad,
                dilation: params.dilation,
                is_transposed: matches!(
                    params.form,
                    ConvolutionForm::TransposedLine | ConvolutionForm::TransposedPlane
                ),
            },
            channels,
            filters,
            batch,
            result,
        })
    }

    /// Returns the number of taps of a filter.
    fn taps(&self) -> usize {
        self.channels * self.window.taps()
    }

    /// Returns the number of positions of a result's plane.
    fn positions(&self) -> usize {
        self.result.iter().product()
    }

    /// Returns the indices of a row of the source.
    fn source_row(&self, channel: usize, batch: usize, [y, z]: [usize; 2]) -> [usize; 3] {
        match self.params.form {
            ConvolutionForm::Volume(channels) => [y, z, batch * channels + channel],
            ConvolutionForm::TransposedLine => [channel, 0, 0],
            _ => [y, channel, batch],
        }
    }

    /// Returns the indices of a row of the weights.
    fn weight_row(&self, filter: usize, channel: usize, [y, z]: [usize; 2]) -> [usize; 3] {
        match self.params.form {
            ConvolutionForm::Volume(channels) => [y, z, filter * channels + channel],
            ConvolutionForm::TransposedLine => [filter, channel, 0],
            ConvolutionForm::TransposedPlane => [y, filter, channel],
            _ => [y, channel, filter],
        }
    }
}

/// Reads the weights of a filter: all taps of the first channel, then of the next.
struct ReadFilter<'a> {
    convolution: &'a Checked<'a>,
    filter: usize,
    out: &'a mut [f32],
}

impl hvx::Kernel for ReadFilter<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let all = self.convolution;
        let [width, height, depth] = all.window.size;
        let mut rows = self.out.chunks_exact_mut(width);
        for channel in 0..all.channels {
            for z in 0..depth {
                for (y, out) in (0..height).zip(&mut rows) {
                    let at = all.weight_row(self.filter, channel, [y, z]);
                    all.weights.read_row(at, 0, out);
                }
            }
        }
    }
}

/// Adds the lines of all taps, times the weights of each filter.
struct WeighTaps<'a> {
    lines: &'a [Line],
    /// The weights of each filter, one for each line.
    weights: &'a [f32],
    sums: &'a mut [Line; FILTERS],
}

impl hvx::Kernel for WeighTaps<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let count = self.lines.len();
        let (w0, rest) = self.weights.split_at(count);
        let (w1, rest) = rest.split_at(count);
        let (w2, w3) = rest.split_at(count);
        let weights = w0.iter().zip(w1).zip(w2.iter().zip(w3));
        let mut taps = self.lines.iter().zip(weights);
        let Some((line, ((w0, w1), (w2, w3)))) = taps.next() else {
            return;
        };
        // Sums start with products, because a single zero for all would be copied, which qfloat
        // values must not be.
        let x = hvx::load(line);
        let mut sums = [w0, w1, w2, w3].map(|w| Accumulator::product(x, splat_f32(*w)));
        for (line, ((w0, w1), (w2, w3))) in taps {
            let x = hvx::load(line);
            let [s0, s1, s2, s3] = sums;
            sums = [
                s0.mul_add(x, splat_f32(*w0)),
                s1.mul_add(x, splat_f32(*w1)),
                s2.mul_add(x, splat_f32(*w2)),
                s3.mul_add(x, splat_f32(*w3)),
            ];
        }
        for (to, sum) in self.sums.iter_mut().zip(sums) {
            hvx::store(to, sum.to_f32());
        }
    }
}

/// Some positions of all planes of the result.
struct PlanesTask<'a> {
    positions: Range<usize>,
    /// The positions in the result, a row for each plane.
    planes: SharedColumns<'a>,
    /// A line for each tap.
    lines: &'a mut [Line],
    /// Weights of [`FILTERS`] filters.
    weights: &'a mut [f32],
}

impl PlanesTask<'_> {
    fn run(&mut self, all: &Checked<'_>) {
        let groups = match all.params.form {
            ConvolutionForm::EachChannel => all.filters,
            _ => 1,
        };
        let filters = all.filters / groups;
        for start in self.positions.clone().step_by(LANES) {
            let range = start..self.positions.end.min(start + LANES);
            let mut runs = [PlaceRun::default(); LANES];
            let runs = window::runs(range.clone(), all.result, &mut runs);
            for batch in 0..all.batch {
                for group in 0..groups {
                    let channels = group * all.channels..(group + 1) * all.channels;
                    self.gather(all, batch, channels, runs);
                    self.filters(all, batch, group * filters..(group + 1) * filters, &range);
                }
            }
        }
    }

    /// Reads the elements of each tap.
    fn gather(
        &mut self,
        all: &Checked<'_>,
        batch: usize,
        channels: Range<usize>,
        runs: &[PlaceRun],
    ) {
        let [width, height, depth] = all.window.size;
        hvx::clear(self.lines);
        let mut lines = self.lines.iter_mut();
        for channel in channels {
            for z in 0..depth {
                for y in 0..height {
                    let row = |place| all.source_row(channel, batch, place);
                    for (x, line) in (0..width).zip(&mut lines) {
                        let lanes: &mut [f32; LANES] = bytemuck::cast_mut(line);
                        for run in runs {
                            all.window.read(&all.source, row, run, [x, y, z], lanes);
                        }
                    }
                }
            }
        }
    }

    /// Computes filters from the gathered lines.
    fn filters(
        &mut self,
        all: &Checked<'_>,
        batch: usize,
        filters: Range<usize>,
        range: &Range<usize>,
    ) {
        let taps = all.taps();
        for first in filters.clone().step_by(FILTERS) {
            let some = first..filters.end.min(first + FILTERS);
            for (filter, out) in some.clone().zip(self.weights.chunks_exact_mut(taps)) {
                hvx::widest(ReadFilter {
                    convolution: all,
                    filter,
                    out,
                });
            }
            let mut sums = hvx::zeros::<FILTERS>();
            hvx::widest(WeighTaps {
                lines: self.lines,
                weights: self.weights,
                sums: &mut sums,
            });
            for (filter, sum) in some.zip(&sums) {
                let elems: &[f32; LANES] = bytemuck::cast_ref(sum);
                let start = range.start - self.positions.start;
                let plane = self.planes.row(batch * all.filters + filter);
                let to = plane.get_mut(start..start + range.len());
                hvx::copy_f32(to.unwrap_or_default(), elems);
            }
        }
    }
}

/// Computes a convolution.
///
/// - `src`: the kernel, floats; the source, f32; dimensions as in [`ConvolutionForm`]
/// - `dst`: f32 without gaps
///
/// # Errors
/// `Operand` unless the operands are as above, or with more than [`WINDOW_TAPS`] taps; `VtcmFull`
/// if the VTCM does not hold the lines of a filter.
pub fn convolution(
    engine: &Engine,
    vtcm: &mut [Tile],
    params: Convolution,
    dst: ViewMut<'_>,
    src: &[Source<'_>; WIDE_SOURCES],
) -> Result<()> {
    let all = Checked::new(params, &dst, src)?;
    if dst.is_empty() {
        return Ok(());
    }
    let elems = dst.into_floats().ok_or(Error::Operand)?;
    let positions = all.positions();
    let mut planes = SharedColumns::new(elems, positions);
    let taps = all.taps();
    let weight_lines = (FILTERS * taps).div_ceil(LANES);
    let tiles = tiles_of_lines(taps) + tiles_of_lines(weight_lines);
    let groups = positions.div_ceil(LANES);
    let n_tasks = (engine.threads().min(MAX_TASKS))
        .min(groups)
        .min(vtcm.len() / tiles)
        .max(1);
    let mut arena = Arena::new(vtcm);
    let mut tasks: [Option<PlanesTask<'_>>; MAX_TASKS] = [const { None }; MAX_TASKS];
    let mut start = 0;
    for (i, task) in tasks.iter_mut().take(n_tasks).enumerate() {
        let count = (groups - start / LANES).div_ceil(n_tasks - i) * LANES;
        let end = positions.min(start + count);
        let weights: &mut [f32] =
            bytemuck::cast_slice_mut(arena.lines("weights of filters", weight_lines)?);
        *task = Some(PlanesTask {
            positions: start..end,
            planes: planes.split_off(end - start),
            lines: arena.lines("lines of taps", taps)?,
            weights: &mut weights[..FILTERS * taps],
        });
        start = end;
    }
    engine.step(None, &mut tasks[..n_tasks], |task| {
        task.iter_mut().for_each(|task| task.run(&all));
    });
    Ok(())
}
