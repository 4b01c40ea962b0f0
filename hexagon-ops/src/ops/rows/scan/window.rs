//! SSM_CONV by vectors of channels: a short window that moves over tokens.
//!
//! ```text
//! for each 32 channels                     a task has some of the channels
//!   transpose their weights                a vector for each tap
//!   transpose the first taps - 1 inputs
//!   for each 32 tokens
//!     transpose their inputs               32 rows of 32 tokens to vectors of 32 channels
//!       for each 8 tokens: sum of taps, written as 32 channels of a row of the result
//! ```
//!
//! Inputs of a channel follow each other, and so do the channels of a result, so that either side
//! must be transposed. An input is transposed once and used for all taps.

use core::ops::Range;

use crate::hvx::{self, Accumulator, Vector};
use crate::layout::{Line, TILE_DIM};
use crate::ops::square::{FirstColumns, GROUP, GatherRows, Gathered, columns};
use crate::ops::tensor::{TASK_PACKETS, View, ViewMut};
use crate::rt::{Engine, SharedColumns};

/// Most tasks of a step.
const MAX_TASKS: usize = 8;
/// Packets for 32 channels without their tokens, and for a token of them.
const CHANNELS_PACKETS: usize = 250;
const TOKEN_PACKETS: usize = 10;

/// The operands: the inputs' rows are `[sequence][channel]`, the weights' `[channel]`.
struct Operands<'a> {
    input: &'a [f32],
    /// Elements from a channel to the next, and from a sequence to the next.
    strides: [usize; 2],
    weights: &'a [f32],
    weight_stride: usize,
    taps: usize,
    tokens: usize,
    sequences: usize,
}

/// Some channels of all tokens.
struct Channels<'a> {
    first: usize,
    count: usize,
    /// A row for each token of each sequence.
    out: SharedColumns<'a>,
}

impl Channels<'_> {
    fn run(&mut self, all: &Operands<'_>) {
        let [mut weights, mut past]: [[Line; GROUP]; 2] = [hvx::zeros(), hvx::zeros()];
        let mut gathered: Gathered = hvx::zeros();
        for start in (0..self.count).step_by(TILE_DIM) {
            let (first, count) = (self.first + start, TILE_DIM.min(self.count - start));
            let gather = |elems, at, stride, to: &mut Gathered| {
                hvx::widest(GatherRows {
                    elems,
                    at,
                    stride,
                    count,
                    to,
                });
            };
            let at = first * all.weight_stride;
            gather(all.weights, at, all.weight_stride, &mut gathered);
            let (gathered, to) = (&mut gathered, &mut weights);
            hvx::widest(FirstColumns { gathered, to });
            for sequence in 0..all.sequences {
                let at = first * all.strides[0] + sequence * all.strides[1];
                gather(all.input, at, all.strides[0], gathered);
                let to = &mut past;
                hvx::widest(FirstColumns { gathered, to });
                for token in (0..all.tokens).step_by(TILE_DIM) {
                    let at = at + all.taps - 1 + token;
                    gather(all.input, at, all.strides[0], gathered);
                    let windows = Windows {
                        gathered,
                        weights: &weights,
                        past: &mut past,
                        channels: start..start + count,
                        row: sequence * all.tokens + token,
                        tokens: TILE_DIM.min(all.tokens - token),
                        out: &mut self.out,
                    };
                    match all.taps {
                        3 => hvx::widest(windows.of::<3>()),
                        _ => hvx::widest(windows.of::<4>()),
                    }
                }
            }
        }
    }
}

/// The windows over up to 32 channels that end with up to 32 tokens.
struct Windows<'a, 'b> {
    gathered: &'a Gathered,
    /// A line for each tap.
    weights: &'a [Line; GROUP],
    /// The inputs before these tokens.
    past: &'a mut [Line; GROUP],
    /// Channels among those of the task.
    channels: Range<usize>,
    /// The row of the first token.
    row: usize,
    tokens: usize,
    out: &'a mut SharedColumns<'b>,
}

impl<'a, 'b> Windows<'a, 'b> {
    fn of<const TAPS: usize>(self) -> WindowsOf<'a, 'b, TAPS> {
        WindowsOf(self)
    }
}

/// Windows of `TAPS` elements.
struct WindowsOf<'a, 'b, const TAPS: usize>(Windows<'a, 'b>);

impl<const TAPS: usize> hvx::Kernel for WindowsOf<'_, '_, TAPS> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let all = self.0;
        let start = all.channels.start;
        let is_whole = all.channels.len() == TILE_DIM;
        for (group, token) in (0..all.tokens).step_by(GROUP).enumerate() {
            let row = all.row + token;
            let mut apart = [[0.0; TILE_DIM]; GROUP];
            let squares = match all.tokens - token >= GROUP && is_whole {
                true => all.out.squares::<TILE_DIM, GROUP>(row, start),
                false => None,
            };
            let is_apart = squares.is_none();
            let out = squares.unwrap_or_else(|| apart.each_mut());
            write_sums::<TAPS>(all.past, &columns(all.gathered, group), all.weights, out);
            if is_apart {
                for (i, lanes) in apart.iter().enumerate().take(all.tokens - token) {
                    let out = all.out.row(row + i).get_mut(all.channels.clone());
                    hvx::copy_f32(out.unwrap_or_default(), lanes);
                }
            }
        }
    }
}

/// Returns the sum of a window that ends with the last of four inputs.
#[inline(always)]
fn sum<const TAPS: usize>([a, b, c, d]: [Vector; 4], weights: [Vector; 4]) -> Vector {
    let sum = match TAPS {
        3 => Accumulator::product(b, weights[1]),
        _ => Accumulator::product(a, weights[0]).mul_add(b, weights[1]),
    };
    sum.mul_add(c, weights[2]).mul_add(d, weights[3]).to_f32()
}

/// Returns three lines after a vector that does not count, or four lines.
#[inline(always)]
fn last_of<const TAPS: usize>(lines: &[Line; GROUP]) -> [Vector; 4] {
    let [a, b, c, d, ..] = lines;
    match TAPS {
        3 => [a, a, b, c],
        _ => [a, b, c, d],
    }
    .map(hvx::load)
}

/// Writes the sums of the windows that end with each of the new inputs. `past` are the `TAPS` - 1
/// inputs before them, and then those before the next ones.
#[inline(always)]
fn write_sums<const TAPS: usize>(
    past: &mut [Line; GROUP],
    [d, e, f, g, h, i, j, k]: &[Vector; GROUP],
    weights: &[Line; GROUP],
    out: [&mut [f32; TILE_DIM]; GROUP],
) {
    let weights = last_of::<TAPS>(weights);
    // The fourth line is not part of the window.
    let [a, b, c] = match (TAPS, last_of::<TAPS>(past)) {
        (3, [_, a, b, _]) => [a, a, b],
        (_, [a, b, c, _]) => [a, b, c],
    };
    let (d, e, f, g, h, i, j, k) = (*d, *e, *f, *g, *h, *i, *j, *k);
    let [first, second, third, ..] = past;
    let last = match TAPS {
        3 => [j, k, k],
        _ => [i, j, k],
    };
    hvx::store(first, last[0]);
    hvx::store(second, last[1]);
    hvx::store(third, last[2]);
    let [o0, o1, o2, o3, o4, o5, o6, o7] = out;
    hvx::store_f32(o0, sum::<TAPS>([a, b, c, d], weights));
    hvx::store_f32(o1, sum::<TAPS>([b, c, d, e], weights));
    hvx::store_f32(o2, sum::<TAPS>([c, d, e, f], weights));
    hvx::store_f32(o3, sum::<TAPS>([d, e, f, g], weights));
    hvx::store_f32(o4, sum::<TAPS>([e, f, g, h], weights));
    hvx::store_f32(o5, sum::<TAPS>([f, g, h, i], weights));
    hvx::store_f32(o6, sum::<TAPS>([g, h, i, j], weights));
    hvx::store_f32(o7, sum::<TAPS>([h, i, j, k], weights));
}

/// Computes the windows of all channels, as described in [`super::convolve`]. Gives the result back
/// and writes nothing if another code path is as fast, or if operands have another layout.
pub(super) fn convolve<'a>(
    engine: &Engine,
    dst: ViewMut<'a>,
    [input, weights]: [&View<'_>; 2],
) -> Option<ViewMut<'a>> {
    let [n_channels, tokens, sequences, _] = dst.shape.ne;
    let taps = weights.shape.ne[0];
    let is_single = tokens == 1 && taps == super::TAPS;
    let is_dense = [input, weights].map(|view| view.shape.is_gapless()) == [true; 2];
    if !(3..=4).contains(&taps)
        || is_single && is_dense
        || !dst.shape.is_gapless()
        || dst.is_empty()
    {
        return Some(dst);
    }
    let (Some((inputs, strides)), Some((all_weights, [weight_stride, _]))) =
        (input.all_floats(), weights.all_floats())
    else {
        return Some(dst);
    };
    let all = &Operands {
        input: inputs,
        strides,
        weights: all_weights,
        weight_stride,
        taps,
        tokens,
        sequences,
    };
    let elems = dst.into_floats()?;
    let mut out = SharedColumns::new(elems, n_channels);
    let groups = n_channels.div_ceil(TILE_DIM);
    let packets = CHANNELS_PACKETS + tokens.saturating_mul(sequences) * TOKEN_PACKETS;
    let enough = (groups.saturating_mul(packets) / TASK_PACKETS).max(1);
    let n_tasks = engine.threads().min(MAX_TASKS).min(groups).min(enough);
    let mut tasks: [Option<Channels<'_>>; MAX_TASKS] = [const { None }; MAX_TASKS];
    let mut first = 0;
    for (i, task) in tasks.iter_mut().take(n_tasks).enumerate() {
        let groups = (groups - first / TILE_DIM).div_ceil(n_tasks - i);
        let count = (groups * TILE_DIM).min(n_channels - first);
        *task = Some(Channels {
            first,
            count,
            out: out.split_off(count),
        });
        first += count;
    }
    engine.step(None, &mut tasks[..n_tasks], |task| {
        task.iter_mut().for_each(|channels| channels.run(all));
    });
    None
}
