//! The elements of a source that the taps of a window read.

use core::ops::Range;

use crate::hvx;
use crate::ops::tensor::View;

/// Positions that are computed at a time.
const LANES: usize = 32;

/// A window that moves over a source; arrays are for width, height and depth.
pub(super) struct Window {
    pub(super) size: [usize; 3],
    /// Size of the source.
    pub(super) source: [usize; 3],
    pub(super) stride: [u32; 3],
    pub(super) pad: [i32; 3],
    pub(super) dilation: [u32; 3],
    /// `true` if the window moves over the result, one element of the source at a time.
    pub(super) is_transposed: bool,
}

/// Consecutive positions in a row of the result.
#[derive(Clone, Copy, Default)]
pub(super) struct PlaceRun {
    /// Lane of the first one.
    lane: usize,
    count: usize,
    /// The first one's indices.
    at: [usize; 3],
}

/// Returns the rows that positions `range` of a plane belong to.
///
/// - `size`: width, height and depth of the plane
pub(super) fn runs(
    range: Range<usize>,
    size: [usize; 3],
    memory: &mut [PlaceRun; LANES],
) -> &[PlaceRun] {
    let [width, height, _] = size;
    let (mut used, mut position) = (0, range.start);
    while position < range.end && used < LANES {
        let (x, row) = (position % width, position / width);
        let count = (width - x).min(range.end - position);
        memory[used] = PlaceRun {
            lane: position - range.start,
            count,
            at: [x, row % height, row / height],
        };
        used += 1;
        position += count;
    }
    &memory[..used]
}

impl Window {
    /// Returns the number of taps in a channel.
    pub(super) fn taps(&self) -> usize {
        self.size.iter().product()
    }

    /// Returns the index in the source, along one dimension, that a tap reads at a position; `None`
    /// outside.
    #[inline(always)]
    fn index(&self, dim: usize, position: usize, tap: usize) -> Option<usize> {
        // CAST: dimensions are below 2^32, strides and dilations below 2^24.
        let (position, tap) = (position as i64, tap as i64);
        let (stride, pad) = (i64::from(self.stride[dim]), i64::from(self.pad[dim]));
        let tap = tap * i64::from(self.dilation[dim]);
        let at = if self.is_transposed {
            let at = position + pad - tap;
            if at % stride != 0 {
                return None;
            }
            at / stride
        } else {
            position * stride - pad + tap
        };
        usize::try_from(at).ok().filter(|at| *at < self.source[dim])
    }

    /// Writes the elements that a tap reads at the positions of `run`; lanes outside the source are
    /// unchanged.
    ///
    /// - `row`: from indices in height and depth to the source's row
    #[inline(always)]
    pub(super) fn read(
        &self,
        source: &View<'_>,
        row: impl Fn([usize; 2]) -> [usize; 3],
        run: &PlaceRun,
        tap: [usize; 3],
        lanes: &mut [f32; LANES],
    ) {
        let [x, y, z] = run.at;
        let [Some(y), Some(z)] = [self.index(1, y, tap[1]), self.index(2, z, tap[2])] else {
            return;
        };
        let at = row([y, z]);
        let lanes = &mut lanes[run.lane..run.lane + run.count];
        let steps_by_one = self.stride[0] == 1;
        if let (true, Some(elems)) = (steps_by_one, source.floats(at)) {
            // The first position that is inside the source, and how many others follow.
            let inside = (0..lanes.len()).find_map(|i| Some((i, self.index(0, x + i, tap[0])?)));
            if let Some((first, index)) = inside {
                let from = elems.get(index..).unwrap_or_default();
                hvx::copy_f32(&mut lanes[first..], from);
            }
            return;
        }
        for (i, lane) in lanes.iter_mut().enumerate() {
            if let Some(index) = self.index(0, x + i, tap[0]) {
                *lane = source.element(index, at);
            }
        }
    }
}
