//! MUL_MAT of tensors in ggml's own layouts: both sides are read as f32 and multiplied in FP32.
//!
//! ```text
//! for each group of up to 32 rows of the result that share a plane of src0
//!   for each 32 columns, for each 128 elements along K
//!     convert 32 rows of src0 and the rows of src1 to f32
//!     few rows    for each row: multiply 32 pairs of lanes, fold the products into one vector, add
//!     many rows   transpose the 32 rows; for each k, for each 8 rows: add a vector times an element
//! ```
//!
//! The folds of a row are a fourth of the work on it, and a transposition costs as much as the work
//! on five rows. The number of rows of src1 decides between them, so that results do not depend on
//! the division into tasks.
//!
//! The matrix unit, if the chip has one, multiplies several rows (`unit`).
//!
//! Packed weights have other kernels ([`super::matmul`]). This one multiplies two computed tensors,
//! as in attention without FLASH_ATTN_EXT, or a tensor with a Hadamard matrix.

mod unit;

use core::ops::Range;

use super::fold::Products;
use super::matmul::Machine;
use super::square::{GROUP, GatherRows, Gathered, columns};
use super::tensor::{MOVE, Shape, Source, Type, View, ViewMut, row_packets};
use crate::error::{Error, Result};
use crate::hvx::{self, Accumulator, splat_f32};
use crate::layout::Line;
use crate::rt::Engine;

/// Number of f32 in a line, and of columns that are computed at a time.
const LANES: usize = 32;
/// Number of rows of the result for which rows of src0 are read once.
const ROWS: usize = 32;
/// Number of rows of the result whose sums are in registers together.
const BLOCK: usize = 8;
/// Fewest rows of src1 for which rows of src0 are transposed.
const MANY: usize = 16;
/// Number of elements along K that are read at a time.
const DEPTH: usize = 128;

/// Reads a part of the rows of src1.
struct ReadParts<'a> {
    view: &'a View<'a>,
    places: &'a [[usize; 3]],
    range: Range<usize>,
    out: &'a mut [Line],
}

impl hvx::Kernel for ReadParts<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let lines = self.range.len().div_ceil(LANES);
        for (place, out) in self.places.iter().zip(self.out.chunks_exact_mut(lines)) {
            self.view.read_lines(*place, self.range.clone(), out);
        }
    }
}

/// Does the same as [`mul_mat`], and has the matrix unit multiply if it may.
///
/// # Errors
/// As [`mul_mat`].
pub fn mul_mat_in(machine: Machine<'_>, mut dst: ViewMut<'_>, src: [&Source<'_>; 2]) -> Result<()> {
    let engine = machine.engine;
    let (a, b) = check(&dst.shape, src)?;
    let shape = dst.shape;
    if shape.is_gapless()
        && let Some(outputs) = dst.part(0, shape)?.into_floats()
        && unit::multiply(machine, outputs, [&a, &b])
    {
        return Ok(());
    }
    mul_mat(engine, dst, src)
}

/// Returns the views of sources that fit a result.
fn check<'a>(dst: &Shape, src: [&Source<'a>; 2]) -> Result<(View<'a>, View<'a>)> {
    let (a, b) = (src[0].apart()?, src[1].apart()?);
    let [k, n, a2, a3] = a.shape.ne;
    let [depth, m, b2, b3] = b.shape.ne;
    let fits = a.shape.dtype.is_computed()
        && b.shape.dtype.is_float()
        && dst.dtype == Type::F32
        && depth == k
        && dst.ne == [n, m, b2, b3]
        && b2.is_multiple_of(a2)
        && b3.is_multiple_of(a3);
    fits.then_some((a, b)).ok_or(Error::Operand)
}

/// Computes `dst[n][m] = Σ src0[k][n] · src1[k][m]`; planes of src0 are repeated.
///
/// - `src`: `[K, N, n2, n3]` of any type that can be read; `[K, M, m2, m3]` of floats, with n2 and
///   n3 dividing m2 and m3
/// - `dst`: f32 `[N, M, m2, m3]`
///
/// # Errors
/// `Operand` unless the operands are as above.
pub fn mul_mat(engine: &Engine, dst: ViewMut<'_>, src: [&Source<'_>; 2]) -> Result<()> {
    let (a, b) = check(&dst.shape, src)?;
    let [k, n, ..] = a.shape.ne;
    let plane = |place| repeated_plane(place, &a.shape, &b.shape);
    // 32 rows of src0 are converted and multiplied to get 32 columns.
    let packets = || row_packets(n, k.saturating_mul(MOVE));
    dst.for_column_parts(engine, packets, |part| {
        for_groups::<ROWS>(part, plane, |plane, places, part| {
            rows(&a, plane, &b, places, part);
        });
    });
    Ok(())
}

/// Returns the indices in dimensions 2 and 3 of the plane of `a` that belongs to the row at `place`
/// of `b`.
pub(super) fn repeated_plane([_, i2, i3]: [usize; 3], a: &Shape, b: &Shape) -> [usize; 2] {
    [i2 / (b.ne[2] / a.ne[2]), i3 / (b.ne[3] / a.ne[3])]
}

/// Calls `f` with groups of up to `ROWS` rows of `part` that share a plane.
pub(super) fn for_groups<const ROWS: usize>(
    part: &mut ViewMut<'_>,
    plane: impl Fn([usize; 3]) -> [usize; 2],
    f: impl Fn([usize; 2], &[[usize; 3]], &mut ViewMut<'_>),
) {
    let mut first = 0;
    while first < part.len() {
        let mut places = [[0; 3]; ROWS];
        let mut count = 0;
        while count < ROWS && first + count < part.len() {
            places[count] = part.place_of(first + count);
            if plane(places[count]) != plane(places[0]) {
                break;
            }
            count += 1;
        }
        f(plane(places[0]), &places[..count], part);
        first += count;
    }
}

/// Computes the rows at `places`, which share a plane of `a`.
fn rows(
    a: &View<'_>,
    plane: [usize; 2],
    b: &View<'_>,
    places: &[[usize; 3]],
    part: &mut ViewMut<'_>,
) {
    let (k, n, first) = (a.shape.ne[0], part.shape.ne[0], part.first());
    let is_many = b.shape.ne[1] >= MANY;
    // Constants instead of `hvx::zeros`, which would build such large arrays elsewhere and copy
    // them.
    let mut columns = [Line::ZERO; LANES * DEPTH / LANES];
    let mut parts = [Line::ZERO; ROWS * DEPTH / LANES];
    for n0 in (0..n).step_by(LANES) {
        let end = n.min(n0 + LANES);
        let mut sums = hvx::zeros::<ROWS>();
        for k0 in (0..k).step_by(DEPTH) {
            let range = k0..k0 + DEPTH.min(k - k0);
            let lines = range.len().div_ceil(LANES);
            let columns = &mut columns[..LANES * lines];
            a.read_rows(first + n0..first + end, plane, range.clone(), columns);
            // The rows of src1 stay in `parts` for all columns if they fit.
            if n0 == 0 || k > DEPTH {
                hvx::widest(ReadParts {
                    view: b,
                    places,
                    range,
                    out: &mut parts,
                });
            }
            if is_many {
                // Rows after the last one are computed as well, but not used.
                let count = places.len().next_multiple_of(BLOCK);
                hvx::widest(Transpose { columns });
                hvx::widest(Multiply {
                    columns,
                    rows: &parts[..count * lines],
                    sums: &mut sums[..count],
                });
            } else {
                hvx::widest(Products {
                    rows: &parts[..places.len() * lines],
                    columns,
                    sums: &mut sums,
                });
            }
        }
        for (place, sum) in places.iter().zip(&sums) {
            let elems: &[f32; LANES] = bytemuck::cast_ref(sum);
            if let Some(mut row) = part.row(*place) {
                row.write(n0, &elems[..end - n0]);
            }
        }
    }
}

/// Transposes each square of 32 rows: line l of row i becomes the elements 32 l + i of all rows.
struct Transpose<'a> {
    /// 32 rows, one after another.
    columns: &'a mut [Line],
}

impl hvx::Kernel for Transpose<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let lines = self.columns.len() / LANES;
        let mut gathered: Gathered = hvx::zeros();
        for line in 0..lines {
            hvx::widest(GatherRows {
                elems: bytemuck::cast_slice(self.columns),
                at: LANES * line,
                stride: LANES * lines,
                count: LANES,
                to: &mut gathered,
            });
            let rows = self.columns.get_mut(line..).unwrap_or_default();
            let mut rows = rows.iter_mut().step_by(lines);
            for group in 0..LANES / GROUP {
                for (column, row) in columns(&gathered, group).into_iter().zip(rows.by_ref()) {
                    hvx::store(row, column);
                }
            }
        }
    }
}

/// Adds to each lane the product of a row and a column.
struct Multiply<'a> {
    /// 32 columns as [`Transpose`] leaves them.
    columns: &'a [Line],
    /// Rows of as many lines, one after another: a multiple of [`BLOCK`].
    rows: &'a [Line],
    /// For each row: 32 sums.
    sums: &'a mut [Line],
}

impl hvx::Kernel for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let lines = self.columns.len() / LANES;
        let blocks = self.rows.chunks_exact(BLOCK * lines);
        for (rows, sums) in blocks.zip(self.sums.as_chunks_mut::<BLOCK>().0) {
            // Each total gets its own number: a shared one would be copied, which a qfloat value
            // must not be.
            let mut totals = (sums.each_ref()).map(|sum| Accumulator::from_f32(hvx::load(sum)));
            for line in 0..lines {
                let elems: [&[f32; LANES]; BLOCK] =
                    core::array::from_fn(|i| bytemuck::cast_ref(&rows[i * lines + line]));
                let columns = self.columns.get(line..).unwrap_or_default();
                for (k, column) in columns.iter().step_by(lines).enumerate().take(LANES) {
                    let column = hvx::load(column);
                    for (total, elems) in totals.iter_mut().zip(elems) {
                        *total = total.mul_add(column, splat_f32(elems[k]));
                    }
                }
            }
            for (sum, total) in sums.iter_mut().zip(totals) {
                hvx::store(sum, total.to_f32());
            }
        }
    }
}
