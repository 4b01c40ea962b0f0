//! Operations that depend on the place of an element: reflections, triangles and diagonals, ramps.

use super::elementwise::{load, put, same_shape};
use super::rows::lane_numbers;
use super::tensor::{
    ARITHMETIC, CHUNK, Chunk, FUNCTION, MOVE, Row, Run, Source, Type, ViewMut, row_packets,
};
use crate::error::{Error, Result};
use crate::hvx::{
    self, Vector, add_f32, add_w, and, mul_f32, or, shr_add_w, splat_f32, splat_w, sub_w,
};
use crate::rt::Engine;

/// The elements of row i of a matrix that stay, and the value of the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Band {
    /// Up to column i + n; minus infinity after it.
    Past(usize),
    /// Column i and after; zero before it.
    UpperDiagonal,
    /// Column i + 1 and after.
    Upper,
    /// Up to column i.
    LowerDiagonal,
    /// Up to column i - 1.
    Lower,
    /// Column i, of a source that has one row.
    Diagonal,
}

impl Band {
    /// Returns the columns that stay in row `i` of `n` columns.
    #[inline(always)]
    fn columns(self, i: usize, n: usize) -> (usize, usize) {
        let (start, end) = match self {
            Self::Past(past) => (0, i.saturating_add(past).saturating_add(1)),
            Self::UpperDiagonal => (i, n),
            Self::Upper => (i + 1, n),
            Self::LowerDiagonal => (0, i + 1),
            Self::Lower => (0, i),
            Self::Diagonal => (i, i + 1),
        };
        (start.min(n), end.min(n))
    }

    /// Returns the value of the other columns.
    fn outside(self) -> f32 {
        match self {
            Self::Past(_) => f32::NEG_INFINITY,
            _ => 0.0,
        }
    }
}

/// Writes one row of [`band`].
struct BandRow<'a> {
    band: Band,
    row: Row<'a>,
    src: &'a Source<'a>,
}

impl hvx::Kernel for BandRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let n = self.row.len();
        let (first, end) = self.band.columns(self.row.at[0], n);
        let rest = self.band.outside();
        let mut chunk: Chunk = [0.0; CHUNK];
        let mut out: Chunk = [0.0; CHUNK];
        for start in (0..n).step_by(CHUNK) {
            let len = CHUNK.min(n - start);
            let elems = self.src.read(&self.row, start..start + len, &mut chunk);
            out[..len].copy_from_slice(elems);
            let stay = |column: usize| column.clamp(start, start + len) - start;
            let (from, to) = (stay(first), stay(end));
            out[..from].fill(rest);
            out[to.max(from)..len].fill(rest);
            self.row.write(start, &out[..len]);
        }
    }
}

/// Writes rows of [`band`] that are f32 without gaps on both sides.
struct BandRows<'a> {
    band: Band,
    /// Number of the first row of the matrix, and of rows.
    first: usize,
    count: usize,
    n: usize,
    /// The source's elements from its first row on, and the number of elements from one row to the
    /// next.
    src: (&'a [f32], usize),
    out: (&'a mut [f32], usize),
}

impl hvx::Kernel for BandRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let rest = splat_f32(self.band.outside());
        let ((mut elems, step), (mut out, out_step)) = (self.src, self.out);
        for row in self.first..self.first + self.count {
            let (first, end) = self.band.columns(row, self.n);
            if let (Some(elems), Some(out)) = (elems.get(..self.n), out.get_mut(..self.n)) {
                keep_columns(elems, [first, end], rest, out);
            }
            elems = elems.get(step..).unwrap_or_default();
            out = out.get_mut(out_step..).unwrap_or_default();
        }
    }
}

/// Writes the rows of a run; returns `false` and writes nothing unless both sides are f32 without
/// gaps in rows.
fn band_run(band: Band, run: &mut Run<'_>, src: &Source<'_>) -> bool {
    let (at, count, n) = (run.at, run.count, run.len());
    let Source::Apart(view) = src else {
        return false;
    };
    let rows = match band {
        // The source has one row, which is used for all rows.
        Band::Diagonal => view
            .float_rows([0, at[1], at[2]], 1)
            .map(|(row, _)| (row, 0)),
        _ => view.float_rows(at, count),
    };
    let (Some(src), Some(out)) = (rows, run.floats()) else {
        return false;
    };
    hvx::widest(BandRows {
        band,
        first: at[0],
        count,
        n,
        src,
        out,
    });
    true
}

/// Returns -1 where a number below 2^31 is less than another one, else 0.
#[inline(always)]
fn is_below(a: Vector, b: Vector) -> Vector {
    shr_add_w(splat_w(0), sub_w(a, b), 31)
}

/// Copies the columns from `first` to before `end`, and sets the others to `rest`; both rows have
/// as many.
#[inline(always)]
fn keep_columns(elems: &[f32], [first, end]: [usize; 2], rest: Vector, out: &mut [f32]) {
    // Columns are below 2^31, so they fit into i32.
    let [first, end] =
        [first, end].map(|column| splat_w(i32::try_from(column).unwrap_or(i32::MAX)));
    let mut column = lane_numbers();
    let mut kept = |elems| {
        let is_kept = sub_w(is_below(column, end), is_below(column, first));
        column = add_w(column, splat_w(32));
        or(and(elems, is_kept), and(rest, sub_w(splat_w(-1), is_kept)))
    };
    let (vectors, elems_rest) = elems.as_chunks();
    let (out, out_rest) = out.as_chunks_mut();
    for (elems, out) in vectors.iter().zip(out) {
        hvx::store_f32(out, kept(hvx::load_f32(elems)));
    }
    if !out_rest.is_empty() {
        put(kept(load(elems_rest, 0)), out_rest, out_rest.len());
    }
}

/// Keeps a part of each matrix; the rest becomes zero, or minus infinity.
///
/// # Errors
/// `Operand` unless source and result are floats of one shape. For a diagonal, the source has one
/// row, and the result as many rows as columns.
pub fn band(engine: &Engine, band: Band, dst: ViewMut<'_>, src: &Source<'_>) -> Result<()> {
    if band == Band::Diagonal {
        let (view, [n0, n1, n2, n3]) = (src.apart()?, dst.shape.ne);
        let floats = view.shape.dtype.is_float() && dst.shape.dtype.is_float();
        if !floats || n1 != n0 || view.shape.ne != [n0, 1, n2, n3] {
            return Err(Error::Operand);
        }
    } else {
        same_shape(&dst.shape, src)?;
    }
    let n = dst.shape.ne[0];
    let packets = || row_packets(n, 2 * ARITHMETIC);
    dst.for_parts(engine, packets, |part| {
        part.for_each_run(|mut run| {
            if !band_run(band, &mut run, src) {
                run.for_each_row(|row| hvx::widest(BandRow { band, row, src }));
            }
        });
    });
    Ok(())
}

/// Writes one row of [`ramp`].
struct RampRow<'a> {
    row: Row<'a>,
    start: f32,
    step: f32,
}

impl hvx::Kernel for RampRow<'_> {
    type Output = ();

    #[inline(always)]
    #[expect(
        clippy::cast_precision_loss,
        reason = "ggml rounds the index to f32 as well"
    )]
    fn run(mut self) {
        let n = self.row.len();
        let (start, step) = (splat_f32(self.start), splat_f32(self.step));
        let mut out: Chunk = [0.0; CHUNK];
        for first in (0..n).step_by(CHUNK) {
            for (i, index) in out.iter_mut().enumerate() {
                *index = (first + i) as f32;
            }
            for lanes in out.as_chunks_mut::<32>().0 {
                let offset = mul_f32(hvx::load_f32(lanes), step);
                hvx::store_f32(lanes, add_f32(start, offset));
            }
            self.row.write(first, &out[..CHUNK.min(n - first)]);
        }
    }
}

/// Sets elements to a number.
struct FillRow<'a>(&'a mut [f32], f32);

impl hvx::Kernel for FillRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self(elems, number) = self;
        let (vectors, rest) = elems.as_chunks_mut();
        for vector in vectors {
            hvx::store_f32(vector, splat_f32(number));
        }
        for elem in rest {
            *elem = number;
        }
    }
}

/// Sets element i of each row to `start + i · step`.
///
/// # Errors
/// `Operand` unless the result is a float.
pub fn ramp(engine: &Engine, start: f32, step: f32, dst: ViewMut<'_>) -> Result<()> {
    if !dst.shape.dtype.is_float() {
        return Err(Error::Operand);
    }
    let n = dst.shape.ne[0];
    if step == 0.0 && dst.shape.dtype == Type::F32 && dst.shape.is_gapless() {
        let shape = dst.shape.with_rows(dst.shape.elems());
        let packets = || row_packets(shape.ne[0], MOVE);
        dst.reshaped(shape)
            .for_row_parts(engine, packets, |mut row| {
                if let Some(elems) = row.floats() {
                    hvx::widest(FillRow(elems, start));
                }
            });
        return Ok(());
    }
    let packets = || row_packets(n, FUNCTION);
    dst.for_rows(engine, packets, |row| {
        hvx::widest(RampRow { row, start, step });
    });
    Ok(())
}

/// Puts each row of the source after `front` elements of a longer row; the elements before and
/// after are the row's own, reflected at its first and last element.
///
/// # Errors
/// `Operand` unless both are f32 without gaps in rows, and at most as many elements are reflected
/// as there are others than the outermost.
pub fn reflect(engine: &Engine, front: usize, dst: ViewMut<'_>, src: &Source<'_>) -> Result<()> {
    let view = &src.apart()?;
    let (n, long) = (view.shape.ne[0], dst.shape.ne[0]);
    let back = long.checked_sub(n).and_then(|n| n.checked_sub(front));
    let fits =
        [&view.shape, &dst.shape].map(|shape| shape.dtype == Type::F32 && shape.has_dense_rows());
    if fits != [true; 2]
        || front >= n
        || back.is_none_or(|back| back >= n)
        || view.shape.ne[1..] != dst.shape.ne[1..]
    {
        return Err(Error::Operand);
    }
    let packets = || row_packets(long, MOVE);
    dst.for_rows(engine, packets, |mut row| {
        let from = view.floats(row.at).unwrap_or_default();
        let Some((before, rest)) = row.floats().and_then(|row| row.split_at_mut_checked(front))
        else {
            return;
        };
        let Some((middle, after)) = rest.split_at_mut_checked(from.len()) else {
            return;
        };
        hvx::copy_f32(middle, from);
        for (to, elem) in before.iter_mut().rev().zip(&from[1..]) {
            *to = *elem;
        }
        for (to, elem) in after.iter_mut().zip(from.iter().rev().skip(1)) {
            *to = *elem;
        }
    });
    Ok(())
}
