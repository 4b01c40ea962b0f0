//! Moves rows into and out of the NPU's native layouts, around `dst[M,N] = act[M,K] . w[K,N]`.
//!
//! The three native layouts have the same form: a dimension is cut into native slices of `s`
//! elements, and a native slice holds its piece of every row (`layout.rs` owns the formulas and the
//! constants). "Native slice" never means a Rust slice here.
//!
//! ```text
//! row-major [rows][len]               native: slice 0, slice 1, …, each [rows][s]
//! row 0  aaaa bbbb cccc               aaaa dddd  bbbb eeee  cccc ffff
//! row 1  dddd eeee ffff
//!
//!               rows              len   s
//! A             M of the bucket   K     s
//! B, one group  gn                K     gk     groups (strips of gn weight rows) follow each other
//! C             M of the bucket   N     t
//! ```
//!
//! So any range of native slices of a buffer is contiguous, and threads divide a buffer by native
//! slices, never by rows. Activations are packed in two steps for that reason: rows to a row-major
//! scratch ([`quantize_rows_i8`], [`convert_rows_f16`]; threads split the rows), then scratch to
//! native ([`interleave_a`]; threads split the native slices with `chunks_mut`). With M = 1 both
//! orders are the same.
//!
//! Nothing here allocates, and no result depends on M, on another row or on the division of the
//! work.

use std::ops::Range;

use half::f16;

use crate::kernel;
use crate::layout::{NativeA, NativeB};
use crate::quant;
use crate::rotation::Rotation;

mod unpack;

pub use unpack::{NativeOutput, OutputRows, StridedRows, unpack_f32, unpack_i32};

/// A row-major matrix whose rows are contiguous and `stride` elements apart.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a, T> {
    data: &'a [T],
    count: usize,
    len: usize,
    stride: usize,
}

impl<'a, T> Rows<'a, T> {
    /// Describes a matrix of `count` rows of `len` elements, row `m` at `data[m * stride]`; all
    /// units are elements.
    ///
    /// # Panics
    /// If `data` is too short, or `stride < len` with more than one row.
    #[must_use]
    pub fn new(data: &'a [T], count: usize, len: usize, stride: usize) -> Self {
        assert!(
            count <= 1 || stride >= len,
            "rows of {len} overlap at a stride of {stride}"
        );
        // Saturates instead of wrapping, because neon/interleave.rs computes pointers from these
        // sizes.
        let needed = match count.checked_sub(1) {
            None => 0,
            Some(last) => last.saturating_mul(stride).saturating_add(len),
        };
        assert!(
            data.len() >= needed,
            "{count} rows need {needed} elements, have {}",
            data.len()
        );
        Self {
            data,
            count,
            len,
            stride,
        }
    }

    /// Returns the number of rows.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.count
    }

    /// Returns the number of elements of a row.
    #[must_use]
    pub const fn row_len(&self) -> usize {
        self.len
    }

    /// Returns the addresses from the first element to the end of the last one.
    #[must_use]
    pub fn addresses(&self) -> Range<usize> {
        let elements = match self.count {
            0 => 0,
            count => (count - 1) * self.stride + self.len,
        };
        let start = self.data.as_ptr().addr();
        start..start + elements * size_of::<T>()
    }

    /// Returns row `m`.
    ///
    /// # Panics
    /// If row `m` does not exist.
    #[inline]
    #[must_use]
    pub fn row(&self, m: usize) -> &'a [T] {
        assert!(m < self.count, "row {m} of {}", self.count);
        &self.data[m * self.stride..][..self.len]
    }

    /// Returns the elements starting with the first row, and the distance between rows.
    #[cfg(target_arch = "aarch64")]
    pub(crate) const fn parts(&self) -> (&'a [T], usize) {
        (self.data, self.stride)
    }

    /// Returns the same rows, restricted to elements `range` of each: a K segment, or the native
    /// slices of one thread.
    ///
    /// # Panics
    /// If `range` leaves the rows.
    #[must_use]
    pub fn columns(&self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "columns {range:?} of {}",
            self.len
        );
        let data = if self.count == 0 {
            self.data
        } else {
            &self.data[range.start..]
        };
        Self {
            data,
            len: range.len(),
            ..*self
        }
    }

    /// Returns only the rows `range`.
    ///
    /// # Panics
    /// If `range` leaves the matrix.
    #[must_use]
    pub fn rows(&self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.count,
            "rows {range:?} of {}",
            self.count
        );
        let data = if range.is_empty() {
            &[][..]
        } else {
            &self.data[range.start * self.stride..]
        };
        Self {
            data,
            count: range.len(),
            ..*self
        }
    }
}

/// Computes step 1 for INT8: rotates and quantizes rows into a row-major scratch.
///
/// - `src`: any rows, K elements each; `work`: at least K elements of scratch
/// - `out`: `src.count() * K` elements, row-major without gaps; `scales`: `src.count()` elements,
///   see [`quant::row_scale_i8`] (a row with a non-finite element gets NaN)
///
/// # Panics
/// If a length disagrees.
pub fn quantize_rows_i8(
    src: Rows<'_, f32>,
    rotation: &Rotation,
    work: &mut [f32],
    out: &mut [i8],
    scales: &mut [f32],
) {
    let k = src.row_len();
    assert_eq!(out.len(), src.count() * k, "scratch does not hold the rows");
    assert_eq!(scales.len(), src.count(), "one scale per row");
    for (m, scale) in scales.iter_mut().enumerate() {
        let row = rotation.of(src.row(m), work);
        *scale = quant::quantize_row_i8(row, &mut out[m * k..][..k]);
    }
}

/// Computes step 1 for INT8 with two digits: rotates and quantizes rows into a row-major scratch.
///
/// - `src`: any rows, K elements each; `work`: at least K elements of scratch
/// - `out`: `src.count() * 2 K` elements, row-major without gaps; the digits of a row follow each
///   other, the high one first
/// - `scales`: `src.count()` elements, see [`quant::quantize_row_wide`]
///
/// # Panics
/// If a length disagrees.
pub fn quantize_rows_wide(
    src: Rows<'_, f32>,
    rotation: &Rotation,
    work: &mut [f32],
    out: &mut [i8],
    scales: &mut [f32],
) {
    let k = src.row_len();
    assert_eq!(
        out.len(),
        src.count() * 2 * k,
        "scratch does not hold the digits"
    );
    assert_eq!(scales.len(), src.count(), "one scale per row");
    for (m, scale) in scales.iter_mut().enumerate() {
        let row = rotation.of(src.row(m), work);
        let (high, low) = out[m * 2 * k..][..2 * k].split_at_mut(k);
        *scale = quant::quantize_row_wide(row, high, low);
    }
}

/// Computes step 1 for FP16: rotates rows and converts them into a row-major scratch, each
/// multiplied by its own power of two.
///
/// - `src`: any rows, K elements each; `work`: at least K elements of scratch, none without
///   rotation
/// - `out`: `src.count() * K` elements, row-major without gaps; `factors`: `src.count()` elements,
///   to multiply output rows by, see [`quant::convert_row_f16`]
///
/// # Panics
/// If a length disagrees.
pub fn convert_rows_f16(
    src: Rows<'_, f32>,
    rotation: &Rotation,
    work: &mut [f32],
    out: &mut [f16],
    factors: &mut [f32],
) {
    let k = src.row_len();
    assert_eq!(out.len(), src.count() * k, "scratch does not hold the rows");
    assert_eq!(factors.len(), src.count(), "one factor per row");
    for (m, factor) in factors.iter_mut().enumerate() {
        let row = rotation.of(src.row(m), work);
        *factor = quant::convert_row_f16(row, &mut out[m * k..][..k]);
    }
}

/// Computes step 2: moves rows of a row-major scratch into native slices of native A.
///
/// - `src`: the real rows, at most `m`, of the K range that `dst` covers ([`Rows::columns`]): whole
///   native slices, only the last of a segment may be short
/// - `m`: rows of the bucket, at least 1; those beyond `src` are zeroed
/// - `dst`: any number of whole native slices of `m * s` elements, at least as many as `src`
///   covers; elements beyond K are zeroed
///
/// # Panics
/// If `dst` is not a number of whole native slices or `src` does not fit.
pub fn interleave_a<T: Copy + Default>(src: Rows<'_, T>, layout: NativeA, m: usize, dst: &mut [T]) {
    kernel::interleave(src, layout.s, m, dst);
}

/// Packs one group of weight rows into native B.
///
/// - `src`: at most `gn` rows of K elements; rows beyond N are zeroed
/// - `dst`: the group, `gn * ceil(K / gk) * gk` elements; elements beyond K are zeroed
///
/// # Panics
/// If `dst` has another length or `src` more rows.
pub fn pack_group<T: Copy + Default>(src: Rows<'_, T>, layout: NativeB, dst: &mut [T]) {
    assert_eq!(
        dst.len(),
        layout.strip_len(src.row_len()),
        "length of a group"
    );
    kernel::interleave(src, layout.gk, layout.gn, dst);
}

/// Undoes [`pack_group`] exactly for the first `rows` rows: native B back to row-major rows of `k`
/// elements.
///
/// - `src`: the group, `gn * ceil(k / gk) * gk` elements; `dst`: `rows * k` elements, `rows <= gn`
///
/// # Panics
/// If a length disagrees.
pub fn unpack_group<T: Copy>(src: &[T], layout: NativeB, rows: usize, k: usize, dst: &mut [T]) {
    assert!(rows <= layout.gn, "{rows} rows in a group of {}", layout.gn);
    assert_eq!(src.len(), layout.strip_len(k), "length of a group");
    assert_eq!(dst.len(), rows * k, "length of the rows");
    if k == 0 {
        return;
    }
    for (n, row) in dst.chunks_exact_mut(k).enumerate() {
        let slices = src.chunks_exact(layout.gn * layout.gk);
        for (piece, slice) in row.chunks_mut(layout.gk).zip(slices) {
            piece.copy_from_slice(&slice[n * layout.gk..][..piece.len()]);
        }
    }
}
