//! Unpacks native C into FP32 rows: sums the K segments, scales, and writes pieces of rows.
//!
//! ```text
//! for 64 columns at a time
//!   for 4 rows at a time
//!     for each native slice           4 rows x 4 columns of 32 bits: one line of the cache, four registers;
//!                                     8 or 16 columns are two or four of these
//!       sum the segments, scale, into tile[4][64]
//!     copy the four rows of the tile out
//! ```
//!
//! Results go through a tile for the reason given in [`scalar`](crate::scalar), and because rows of
//! the output are lent one at a time. A single row in a bucket of one needs neither.

use std::arch::aarch64::{
    float32x4_t, int32x4_t, vaddq_f32, vaddq_s32, vcvtq_f32_s32, vdupq_n_f32, vld1q_s32, vmulq_f32,
};
use std::array::from_fn;
use std::ops::Range;

use super::{load, quads, store};
use crate::pack::{NativeOutput, OutputRows};

/// Columns of a tile.
const COLUMNS: usize = 64;

/// Rows of a tile.
const ROWS: usize = 4;

/// Rows of a tile, four elements to a register.
type QuadTile<const R: usize> = [[[f32; 4]; COLUMNS / 4]; R];

/// Computes the same as [`scalar::unpack_i32`](crate::scalar::unpack_i32).
///
/// # Panics
/// As that function.
pub fn unpack_i32(
    c: NativeOutput<'_, i32>,
    rows: Range<usize>,
    a_scale: impl Fn(usize) -> f32,
    w_scales: &[f32],
    dst: &mut impl OutputRows,
) {
    let columns = w_scales.len();
    c.check(&rows, columns);
    if c.m == 1 && rows == (0..1) && columns > 0 {
        let row = dst.row(0);
        assert_eq!(row.len(), columns, "columns of output row 0");
        // SAFETY: NEON belongs to the base instruction set of this target.
        unsafe { single_i32(c.segments, a_scale(0), w_scales, row) };
    } else {
        let four = |m: usize, range: &Range<usize>, tile: &mut QuadTile<ROWS>| {
            let (a, w) = (from_fn(|r| a_scale(m + r)), &w_scales[range.clone()]);
            // SAFETY: NEON belongs to the base instruction set of this target.
            unsafe { tile_i32(c, m, range, &a, w, tile) }
        };
        let one = |m: usize, range: &Range<usize>, tile: &mut QuadTile<1>| {
            let w = &w_scales[range.clone()];
            // SAFETY: NEON belongs to the base instruction set of this target.
            unsafe { tile_i32(c, m, range, &[a_scale(m)], w, tile) }
        };
        tiles(rows, columns, dst, four, one);
    }
}

/// Computes the same as [`scalar::unpack_f32`](crate::scalar::unpack_f32).
///
/// # Panics
/// As that function.
pub fn unpack_f32(
    c: NativeOutput<'_, f32>,
    rows: Range<usize>,
    factor: impl Fn(usize) -> f32,
    columns: usize,
    dst: &mut impl OutputRows,
) {
    c.check(&rows, columns);
    if c.m == 1 && rows == (0..1) && columns > 0 {
        let row = dst.row(0);
        assert_eq!(row.len(), columns, "columns of output row 0");
        // SAFETY: NEON belongs to the base instruction set of this target.
        unsafe { single_f32(c.segments, factor(0), row) };
    } else {
        let four = |m: usize, range: &Range<usize>, tile: &mut QuadTile<ROWS>| {
            let factors = from_fn(|r| factor(m + r));
            // SAFETY: NEON belongs to the base instruction set of this target.
            unsafe { tile_f32(c, m, range, &factors, tile) }
        };
        let one = |m: usize, range: &Range<usize>, tile: &mut QuadTile<1>| {
            // SAFETY: NEON belongs to the base instruction set of this target.
            unsafe { tile_f32(c, m, range, &[factor(m)], tile) }
        };
        tiles(rows, columns, dst, four, one);
    }
}

/// Loads four elements of INT32.
#[inline]
#[target_feature(enable = "neon")]
fn load_i32(from: &[i32; 4]) -> int32x4_t {
    // SAFETY: a reference to four numbers is readable for as many, and the load needs no alignment
    // beyond theirs.
    unsafe { vld1q_s32(from.as_ptr()) }
}

/// Runs `four` or `one` for each tile of rows `m…` and columns `range`, and copies the tile to its
/// place.
#[inline]
fn tiles(
    rows: Range<usize>,
    columns: usize,
    dst: &mut impl OutputRows,
    four: impl Fn(usize, &Range<usize>, &mut QuadTile<ROWS>),
    one: impl Fn(usize, &Range<usize>, &mut QuadTile<1>),
) {
    let (mut tile, mut single) = ([[[0.0; 4]; COLUMNS / 4]; ROWS], [[[0.0; 4]; COLUMNS / 4]]);
    for n0 in (0..columns).step_by(COLUMNS) {
        let range = n0..columns.min(n0 + COLUMNS);
        let mut m = rows.start;
        while m + ROWS <= rows.end {
            four(m, &range, &mut tile);
            write(&tile, m, &range, columns, dst);
            m += ROWS;
        }
        for m in m..rows.end {
            one(m, &range, &mut single);
            write(&single, m, &range, columns, dst);
        }
    }
}

/// Fills one tile with scaled INT32 sums; `w`: weight scales of columns `range`.
#[target_feature(enable = "neon")]
fn tile_i32<const R: usize>(
    c: NativeOutput<'_, i32>,
    m: usize,
    range: &Range<usize>,
    a: &[f32; R],
    w: &[f32],
    tile: &mut QuadTile<R>,
) {
    let mut last = [[0.0; 4]; COLUMNS / 4];
    let w = w.as_chunks().0.first_chunk().unwrap_or_else(|| {
        last.as_flattened_mut()[..w.len()].copy_from_slice(w);
        &last
    });
    let add = |a, b| vaddq_s32(a, b);
    let scaled = |sum: int32x4_t, j: usize, a: float32x4_t| {
        vmulq_f32(vmulq_f32(vcvtq_f32_s32(sum), load(&w[j])), a)
    };
    gather(c, m, range, a, |x| load_i32(x), add, scaled, tile);
}

/// Fills one tile with FP32 sums times the rows' factors.
#[target_feature(enable = "neon")]
fn tile_f32<const R: usize>(
    c: NativeOutput<'_, f32>,
    m: usize,
    range: &Range<usize>,
    factors: &[f32; R],
    tile: &mut QuadTile<R>,
) {
    let add = |a, b| vaddq_f32(a, b);
    let scaled = |sum: float32x4_t, _: usize, factor: float32x4_t| vmulq_f32(sum, factor);
    gather(c, m, range, factors, |x| load(x), add, scaled, tile);
}

/// Fills the rows of a tile with columns `range` of rows `m0…`:
/// `scaled(sum, column / 4, factor of the row)`.
///
/// A last native slice that is only partly in `range` is unpacked whole.
#[inline]
#[target_feature(enable = "neon")]
#[expect(
    clippy::too_many_arguments,
    reason = "three of them are the operations of one element type"
)]
fn gather<T, V: Copy, const R: usize>(
    c: NativeOutput<'_, T>,
    m0: usize,
    range: &Range<usize>,
    factors: &[f32; R],
    load: impl Fn(&[T; 4]) -> V,
    add: impl Fn(V, V) -> V,
    scaled: impl Fn(V, usize, float32x4_t) -> float32x4_t,
    tile: &mut QuadTile<R>,
) {
    match c.t {
        4 => gather_by::<T, V, R, 1>(c, m0, range, factors, load, add, scaled, tile),
        8 => gather_by::<T, V, R, 2>(c, m0, range, factors, load, add, scaled, tile),
        16 => gather_by::<T, V, R, 4>(c, m0, range, factors, load, add, scaled, tile),
        t => unreachable!("NativeOutput::new admits no native slices of {t}"),
    }
}

/// Implements [`gather`] for native slices of `Q` times four columns.
#[inline]
#[target_feature(enable = "neon")]
#[expect(clippy::too_many_arguments, reason = "as gather")]
fn gather_by<T, V: Copy, const R: usize, const Q: usize>(
    c: NativeOutput<'_, T>,
    m0: usize,
    range: &Range<usize>,
    factors: &[f32; R],
    load: impl Fn(&[T; 4]) -> V,
    add: impl Fn(V, V) -> V,
    scaled: impl Fn(V, usize, float32x4_t) -> float32x4_t,
    tile: &mut QuadTile<R>,
) {
    let (pitch, n_slices) = (4 * Q * c.m, range.len().div_ceil(4 * Q));
    let first = range.start * c.m + 4 * Q * m0;
    for segment in c.segments {
        assert!(first + (n_slices - 1) * pitch + 4 * Q * R <= segment.len());
    }
    let factors = factors.map(|factor| vdupq_n_f32(factor));
    let lines = |segment: &[T], j: usize, q: usize| -> [V; R] {
        let at = segment.as_ptr().wrapping_add(first + j * pitch);
        // SAFETY: j is below n_slices, and the last native slice was found to be in each segment
        // with all R rows.
        let pieces = unsafe { &*at.cast::<[[[T; 4]; Q]; R]>() };
        from_fn(|r| load(&pieces[r][q]))
    };
    let (segment, more) = (c.segments[0], &c.segments[1..]);
    for j in 0..n_slices.min(COLUMNS / 4 / Q) {
        for q in 0..Q {
            let mut sums = lines(segment, j, q);
            for segment in more {
                let terms = lines(segment, j, q);
                for r in 0..R {
                    sums[r] = add(sums[r], terms[r]);
                }
            }
            for r in 0..R {
                store(
                    &mut tile[r][j * Q + q],
                    scaled(sums[r], j * Q + q, factors[r]),
                );
            }
        }
    }
}

/// Copies columns `range` of rows `m0…` from a tile to their place.
#[inline]
fn write<const R: usize>(
    tile: &QuadTile<R>,
    m0: usize,
    range: &Range<usize>,
    columns: usize,
    dst: &mut impl OutputRows,
) {
    for (m, values) in (m0..).zip(tile) {
        let row = dst.row(m);
        assert_eq!(row.len(), columns, "columns of output row {m}");
        let out = &mut row[range.clone()];
        match <&mut [f32; COLUMNS]>::try_from(&mut *out) {
            Ok(out) => out.copy_from_slice(values.as_flattened()),
            Err(_) => out.copy_from_slice(&values.as_flattened()[..out.len()]),
        }
    }
}

/// Unpacks the only row of a bucket of one, where native C is row-major.
#[target_feature(enable = "neon")]
fn single_i32(segments: &[&[i32]], a_scale: f32, w_scales: &[f32], out: &mut [f32]) {
    let a = vdupq_n_f32(a_scale);
    let done = single(
        segments,
        w_scales,
        out,
        |x| load_i32(x),
        |a, b| vaddq_s32(a, b),
        |sum, w| vmulq_f32(vmulq_f32(vcvtq_f32_s32(sum), w), a),
    );
    for n in done..out.len() {
        let sum = segments[1..]
            .iter()
            .fold(segments[0][n], |sum, s| sum + s[n]);
        // CAST: rounds to 24 bits, as pack::unpack_i32 documents.
        out[n] = sum as f32 * w_scales[n] * a_scale;
    }
}

/// Unpacks the only row of a bucket of one, where native C is row-major.
#[target_feature(enable = "neon")]
fn single_f32(segments: &[&[f32]], factor: f32, out: &mut [f32]) {
    let by = vdupq_n_f32(factor);
    let done = single(
        segments,
        // There are no weight scales: these numbers are not loaded.
        segments[0],
        out,
        |x| load(x),
        |a, b| vaddq_f32(a, b),
        |sum, _| vmulq_f32(sum, by),
    );
    for n in done..out.len() {
        let sum = segments[1..]
            .iter()
            .fold(segments[0][n], |sum, s| sum + s[n]);
        out[n] = sum * factor;
    }
}

/// Computes `out[n] = scaled(sum, w[n])` for all whole sixteens. Returns the number of elements
/// that they cover.
#[inline]
#[target_feature(enable = "neon")]
fn single<T, V: Copy>(
    segments: &[&[T]],
    w: &[f32],
    out: &mut [f32],
    load_t: impl Fn(&[T; 4]) -> V,
    add: impl Fn(V, V) -> V,
    scaled: impl Fn(V, float32x4_t) -> float32x4_t,
) -> usize {
    let (first, more) = (segments[0].as_chunks::<16>().0, &segments[1..]);
    let (outs, _) = out.as_chunks_mut::<16>();
    let columns = first.iter().zip(w.as_chunks::<16>().0).zip(&mut *outs);
    for (j, ((first, w), out)) in columns.enumerate() {
        let mut sums = quads(first).each_ref().map(&load_t);
        for segment in more {
            let (terms, _) = segment[16 * j..][..16].as_chunks();
            for (sum, quad) in sums.iter_mut().zip(terms) {
                *sum = add(*sum, load_t(quad));
            }
        }
        let (outs, _) = out.as_chunks_mut();
        for ((out, sum), w) in outs.iter_mut().zip(sums).zip(quads(w)) {
            store(out, scaled(sum, load(w)));
        }
    }
    16 * outs.len()
}
