//! OUT_PROD of tensors in ggml's own layouts, in FP32: a sum of products of a column and a row.
//!
//! ```text
//! for each group of up to 8 rows m of the result that share a plane of src0
//!   for each 256 elements n, for each 16 terms k
//!     read 16 rows of src0, 256 elements each, as f32
//!     read the 16 factors of each row m
//!     for each row m, for each 32 of the elements: add 16 products of a factor and 32 elements
//! ```
//!
//! Rows of src0 are read in place, so blocks are dequantized once for 8 rows of the result.

use core::ops::Range;

use super::tensor::{ARITHMETIC, CHUNK, Source, Type, View, ViewMut, row_packets};
use super::unpacked_matmul::{for_groups, repeated_plane};
use crate::error::{Error, Result};
use crate::hvx::{self, Accumulator, splat_f32};
use crate::layout::Line;
use crate::rt::Engine;

/// Number of f32 in a line.
const LANES: usize = 32;
/// Lines of a row of the result that are computed at a time.
const LINES: usize = CHUNK / LANES;
/// Number of rows of the result for which rows of src0 are read once.
const ROWS: usize = 8;
/// Number of rows of src0 that are read at a time.
const DEPTH: usize = 16;

/// Reads elements `range` of rows `terms` of src0, [`LINES`] lines each.
fn read_terms(
    a: &View<'_>,
    plane: [usize; 2],
    terms: Range<usize>,
    range: &Range<usize>,
    rows: &mut [Line],
) {
    let lines = range.len().div_ceil(LANES);
    if lines == LINES {
        let rows = &mut rows[..terms.len() * LINES];
        a.read_rows(terms, plane, range.clone(), rows);
        return;
    }
    for (k, row) in terms.zip(rows.chunks_exact_mut(LINES)) {
        a.read_rows(k..k + 1, plane, range.clone(), &mut row[..lines]);
    }
}

/// Adds products of factors and rows to sums.
struct AddTerms<'a> {
    /// [`LINES`] lines for each term.
    rows: &'a [Line],
    /// For each row of the result, a factor for each term.
    factors: &'a [Line],
    /// [`LINES`] lines for each row of the result.
    sums: &'a mut [Line],
    /// Lines that are used.
    lines: usize,
}

impl hvx::Kernel for AddTerms<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (factors, sums) in self.factors.iter().zip(self.sums.chunks_exact_mut(LINES)) {
            let factors: &[f32; LANES] = bytemuck::cast_ref(factors);
            for (line, sum) in sums[..self.lines].iter_mut().enumerate() {
                let mut total = Accumulator::from_f32(hvx::load(sum));
                for (row, factor) in self.rows.chunks_exact(LINES).zip(factors) {
                    total = total.mul_add(hvx::load(&row[line]), splat_f32(*factor));
                }
                hvx::store(sum, total.to_f32());
            }
        }
    }
}

/// Computes `dst[m][n] = Σ src0[k][n] · src1[k][m]`, where n, m and k are the fastest index of src0
/// and of src1, and the second of both; planes of src0 are repeated.
///
/// - `src`: `[N, K, n2, n3]` of floats or any type of blocks; `[M, K, m2, m3]` of floats, with n2
///   and n3 dividing m2 and m3
/// - `dst`: f32 `[N, M, m2, m3]`
///
/// # Errors
/// `Operand` unless the operands are as above.
pub fn out_prod(engine: &Engine, dst: ViewMut<'_>, src: [&Source<'_>; 2]) -> Result<()> {
    let (a, mut b) = (src[0].apart()?, src[1].apart()?);
    let [n, k, a2, a3] = a.shape.ne;
    let [m, depth, b2, b3] = b.shape.ne;
    let fits = (a.shape.dtype.is_float() || a.shape.dtype.is_block())
        && b.shape.dtype.is_float()
        && dst.shape.dtype == Type::F32
        && depth == k
        && dst.shape.ne == [n, m, b2, b3]
        && b2.is_multiple_of(a2)
        && b3.is_multiple_of(a3);
    if !fits {
        return Err(Error::Operand);
    }
    b.shape.ne.swap(0, 1);
    b.shape.nb.swap(0, 1);
    let plane = |place| repeated_plane(place, &a.shape, &b.shape);
    let packets = || row_packets(n, k.saturating_mul(ARITHMETIC));
    dst.for_parts(engine, packets, |part| {
        for_groups::<ROWS>(part, plane, |plane, places, part| {
            rows(&a, plane, &b, places, part);
        });
    });
    Ok(())
}

/// Computes the rows at `places`, which share a plane of `a`.
fn rows(
    a: &View<'_>,
    plane: [usize; 2],
    b: &View<'_>,
    places: &[[usize; 3]],
    part: &mut ViewMut<'_>,
) {
    let [n, depth, ..] = a.shape.ne;
    let mut rows = hvx::zeros::<{ DEPTH * LINES }>();
    let mut factors = hvx::zeros::<ROWS>();
    for n0 in (0..n).step_by(CHUNK) {
        let range = n0..n.min(n0 + CHUNK);
        let mut sums = hvx::zeros::<{ ROWS * LINES }>();
        for k0 in (0..depth).step_by(DEPTH) {
            let terms = k0..k0 + DEPTH.min(depth - k0);
            let count = terms.len();
            read_terms(a, plane, terms.clone(), &range, &mut rows);
            // Rows and columns of src1 are exchanged.
            for ([row, i2, i3], factors) in places.iter().zip(factors.chunks_exact_mut(1)) {
                b.read_rows(*row..row + 1, [*i2, *i3], terms.clone(), factors);
            }
            hvx::widest(AddTerms {
                rows: &rows[..count * LINES],
                factors: &factors[..places.len()],
                sums: &mut sums,
                lines: range.len().div_ceil(LANES),
            });
        }
        let sums: &[[f32; CHUNK]] = bytemuck::cast_slice(&sums);
        for (place, sums) in places.iter().zip(sums) {
            if let Some(mut row) = part.row(*place) {
                row.write(n0, &sums[..range.len()]);
            }
        }
    }
}
