//! POOL_1D and POOL_2D: the largest or the mean of a window that moves over a plane.
//!
//! ```text
//! for each row of the result, for each chunk of 256 elements
//!   for each element (kx, ky) of the window
//!     gather the elements under it, with a stride; elements outside the plane are neutral
//!     for each 32: sum or maximum
//!   divide by the size of the window (POOL_2D), or of its part inside the plane (POOL_1D)
//! ```

use super::tensor::{CHUNK, Chunk, Row, SCALAR, Source, Type, View, ViewMut, row_packets};
use crate::error::{Error, Result};
use crate::hvx::{self, add_f32, max_f32};
use crate::ops::elementwise::load;
use crate::rt::Engine;
use crate::wire::WINDOW_TAPS;

/// Limit of sizes and strides, with which positions are far from overflow.
const LARGEST: u32 = 1 << 24;

/// Parameters of [`pool`]; arrays are for width and height.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pooling {
    /// `true` for the mean, `false` for the largest.
    pub is_mean: bool,
    /// `true` if a mean counts only elements inside the plane.
    pub counts_inside: bool,
    /// Size of the window.
    pub size: [u32; 2],
    /// Elements from one position to the next.
    pub stride: [u32; 2],
    /// Positions before the plane.
    pub pad: [i32; 2],
}

impl Pooling {
    /// Returns the coordinate of element `k` of the window at position `o`; `None` unless it is
    /// below `count`.
    #[inline(always)]
    fn coordinate(&self, dim: usize, o: usize, k: u32, count: usize) -> Option<usize> {
        // CAST: dimensions are below 2^32, strides below 2^24.
        let at = o as i64 * i64::from(self.stride[dim]) + i64::from(k);
        let at = usize::try_from(at - i64::from(self.pad[dim])).ok()?;
        (at < count).then_some(at)
    }
}

/// Writes one row of [`pool`].
struct PoolRow<'a> {
    params: Pooling,
    row: Row<'a>,
    view: &'a View<'a>,
}

impl hvx::Kernel for PoolRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let (params, [y, plane, batch]) = (self.params, self.row.at);
        let [width, height, ..] = self.view.shape.ne;
        let neutral = if params.is_mean { 0.0 } else { f32::MIN };
        let n = self.row.len();
        for start in (0..n).step_by(CHUNK) {
            let len = CHUNK.min(n - start);
            let mut out: Chunk = [neutral; CHUNK];
            let mut counts: Chunk = [0.0; CHUNK];
            for ky in 0..params.size[1] {
                let Some(y) = params.coordinate(1, y, ky, height) else {
                    continue;
                };
                for kx in 0..params.size[0] {
                    let mut elems: Chunk = [neutral; CHUNK];
                    for (i, elem) in elems.iter_mut().enumerate().take(len) {
                        if let Some(x) = params.coordinate(0, start + i, kx, width) {
                            *elem = self.view.element(x, [y, plane, batch]);
                            counts[i] += 1.0;
                        }
                    }
                    for (k, lanes) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                        let (sum, elems) = (hvx::load_f32(lanes), load(&elems, 32 * k));
                        let joined = if params.is_mean {
                            add_f32(sum, elems)
                        } else {
                            max_f32(sum, elems)
                        };
                        hvx::store_f32(lanes, joined);
                    }
                }
            }
            if params.is_mean {
                let [kx, ky] = params.size.map(|size| size as f32);
                for (out, count) in out.iter_mut().zip(counts) {
                    *out /= if params.counts_inside {
                        count.max(1.0)
                    } else {
                        kx * ky
                    };
                }
            }
            self.row.write(start, &out[..len]);
        }
    }
}

/// Returns `true` if a window is at most as large as a plane with its padding, and has at most as
/// many elements as the plane, or [`WINDOW_TAPS`]: otherwise a few bytes of padding could require
/// hours of work.
fn is_bounded(params: &Pooling, plane: [usize; 2]) -> bool {
    let fits = (0..2).all(|i| {
        let pad = usize::try_from(params.pad[i]).ok();
        let reach = pad.and_then(|pad| pad.checked_mul(2)?.checked_add(plane[i]));
        let size = usize::try_from(params.size[i]).ok();
        size.zip(reach).is_some_and(|(size, reach)| size <= reach)
    });
    let [width, height] = params.size.map(u64::from);
    // CAST: usize has at most 64 bits.
    let [plane_width, plane_height] = plane.map(|n| n as u64);
    let most = plane_width
        .saturating_mul(plane_height)
        .max(WINDOW_TAPS as u64);
    fits && width * height <= most
}

/// Moves a window over each plane of `src`.
///
/// # Errors
/// `Operand` unless the source is f32 and repeats no element, the result is a float with its
/// dimensions 2 and 3, and parameters are in range.
pub fn pool(engine: &Engine, params: Pooling, dst: ViewMut<'_>, src: &Source<'_>) -> Result<()> {
    let view = &src.apart()?;
    let types = view.shape.dtype == Type::F32 && dst.shape.dtype.is_float();
    let small = |values: [u32; 2]| values.iter().all(|value| (1..LARGEST).contains(value));
    let in_range = small(params.size) && small(params.stride);
    let [width, height, ..] = view.shape.ne;
    // The source must be real memory without repeated rows, so that its size bounds the work.
    let bounded = is_bounded(&params, [width, height]) && !view.shape.repeats();
    let shapes = view.shape.ne[2..] == dst.shape.ne[2..];
    if !types || !in_range || !bounded || !shapes {
        return Err(Error::Operand);
    }
    let n = dst.shape.ne[0];
    let packets = || row_packets(n, SCALAR);
    dst.for_rows(engine, packets, |row| {
        hvx::widest(PoolRow { params, row, view });
    });
    Ok(())
}
