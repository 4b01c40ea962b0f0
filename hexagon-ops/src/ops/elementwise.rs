//! Operations on each element, in FP32 arithmetic, with results rounded to the result's type.
//!
//! ```text
//! for each row of the result                 each thread has a part of the rows, or of the columns of few rows
//!   for each chunk of 256 elements
//!     read the sources as f32                without a copy if they are f32 without gaps
//!     for each 32: one vector function
//!     write
//! ```

mod function;

use super::copy::{check_indices, checked};
use super::tensor::{
    self, ARITHMETIC, CHUNK, Chunks, Row, Shape, Source, ViewMut, fetch_after, row_packets,
};
use crate::error::{Error, Result};
use crate::hvx::{self, Vector};
use crate::rt::Engine;

pub use function::{Binary, Function, Glu, Unary};
pub(super) use function::{each_group, put};

/// Writes `f(a, b)` for one row. Element i of the result uses element i + `shift` of `a` and `b`.
struct MapRow<'a> {
    f: Function,
    row: Row<'a>,
    src: [&'a Source<'a>; 2],
    shift: [usize; 2],
    chunks: &'a mut Chunks,
}

impl hvx::Kernel for MapRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let [a_chunk, b_chunk, out_chunk, _] = self.chunks;
        let n = self.row.len();
        // Without gaps, the whole row is one chunk, and nothing is copied.
        let dense = match [0, 1].map(|i| dense(self.src[i], &self.row, self.shift[i])) {
            [Some(a), Some(b)] if self.row.floats().is_some() => Some((a, b)),
            _ => None,
        };
        let step = if dense.is_some() { n } else { CHUNK };
        // A counted step would be divided by.
        let mut start = 0;
        while start < n {
            let len = step.min(n - start);
            let range = |shift: usize| start + shift..start + shift + len;
            let (a, b) = dense.unwrap_or_else(|| {
                (
                    self.src[0].read(&self.row, range(self.shift[0]), a_chunk),
                    self.src[1].read(&self.row, range(self.shift[1]), b_chunk),
                )
            });
            // Sources in place have been copied.
            let place = self.row.floats().map(|row| &mut row[start..start + len]);
            let is_written = place.is_some();
            // One call, because the code of all functions is inlined here.
            self.f.map(a, b, place.unwrap_or(&mut out_chunk[..]));
            if !is_written {
                self.row.write(start, &out_chunk[..len]);
            }
            start += len;
        }
    }
}

/// Returns the elements of a source that a row needs, if they are f32 without gaps and apart from the
/// result; none of a source that does not exist.
#[inline(always)]
pub(super) fn dense<'a>(source: &Source<'a>, row: &Row<'_>, shift: usize) -> Option<&'a [f32]> {
    match source {
        Source::Apart(view) => {
            let start = row.first + shift;
            view.floats(row.at)?.get(start..start + row.len())
        }
        Source::InPlace => None,
        Source::None => Some(&[]),
    }
}

/// Loads 32 elements starting at `k`; zeros after the end.
#[inline(always)]
pub(super) fn load(elems: &[f32], k: usize) -> Vector {
    match elems.get(k..).and_then(<[f32]>::first_chunk::<32>) {
        Some(whole) => hvx::load_f32(whole),
        None => {
            let mut padded = [0.0; 32];
            let rest = elems.get(k..).unwrap_or_default();
            padded[..rest.len()].copy_from_slice(rest);
            hvx::load_f32(&padded)
        }
    }
}

/// Runs `f` on every row.
fn map_rows(
    engine: &Engine,
    f: Function,
    dst: ViewMut<'_>,
    src: [&Source<'_>; 2],
    shift: [usize; 2],
) {
    let n = dst.shape.ne[0];
    let packets = || row_packets(n, f.packets());
    dst.for_row_parts_with_chunks(engine, packets, |row, chunks| {
        fetch_after(&row, &src);
        hvx::widest(MapRow {
            f,
            row,
            src,
            shift,
            chunks,
        });
    });
}

/// Refuses a source that is not floats, or whose shape is not the result's.
pub(super) fn same_shape(dst: &Shape, src: &Source<'_>) -> Result<()> {
    match src {
        Source::Apart(view) if view.shape.ne != dst.ne || !view.shape.dtype.is_float() => {
            Err(Error::Operand)
        }
        Source::None => Err(Error::Operand),
        _ if !dst.dtype.is_float() => Err(Error::Operand),
        _ => Ok(()),
    }
}

/// Refuses a source that is not floats, shares memory with the result, or cannot be repeated to the
/// shape `dst`.
pub(super) fn divides(dst: &Shape, src: &Source<'_>) -> Result<()> {
    let view = src.apart()?;
    let repeats = (0..4).all(|i| tensor::divides(view.shape.ne[i], dst.ne[i]));
    if repeats && view.shape.dtype.is_float() {
        Ok(())
    } else {
        Err(Error::Operand)
    }
}

/// Computes `dst = f(src0, src1)`; src1 is repeated.
///
/// # Errors
/// `Operand` unless all are floats, src0 has the result's shape, and src1's dimensions divide it.
pub fn binary(engine: &Engine, f: Binary, dst: ViewMut<'_>, src: [&Source<'_>; 2]) -> Result<()> {
    same_shape(&dst.shape, src[0])?;
    if !matches!(src[1], Source::InPlace) {
        divides(&dst.shape, src[1])?;
    }
    map_rows(engine, Function::Binary(f), dst, src, [0, 0]);
    Ok(())
}

/// Computes `dst = f(src)`.
///
/// # Errors
/// `Operand` unless both are floats of one shape.
pub fn unary(engine: &Engine, f: Unary, dst: ViewMut<'_>, src: &Source<'_>) -> Result<()> {
    same_shape(&dst.shape, src)?;
    let f = Function::Unary(f);
    map_rows(engine, f, dst, [src, &Source::None], [0, 0]);
    Ok(())
}

/// Computes `dst = f(a, b)`; a and b are the two sources, or the first and second half of each row of
/// one source, which `swapped` exchanges. The last element of an odd row belongs to neither.
///
/// # Errors
/// `Operand` unless all are floats, and the sources have the result's shape, or a single source has
/// rows of twice the length, or one element more.
pub fn glu(
    engine: &Engine,
    f: Glu,
    swapped: bool,
    dst: ViewMut<'_>,
    src: [&Source<'_>; 2],
) -> Result<()> {
    let (src, shift) = match src[1] {
        Source::None => {
            let view = src[0].apart()?;
            let n = dst.shape.ne[0];
            let ne = view.shape.ne;
            let shapes = ne[0] / 2 == n && ne[1..] == dst.shape.ne[1..];
            let floats = view.shape.dtype.is_float() && dst.shape.dtype.is_float();
            if !shapes || !floats {
                return Err(Error::Operand);
            }
            let shift = if swapped { [n, 0] } else { [0, n] };
            ([src[0], src[0]], shift)
        }
        _ => {
            same_shape(&dst.shape, src[0])?;
            same_shape(&dst.shape, src[1])?;
            (src, [0, 0])
        }
    };
    map_rows(engine, Function::Glu(f), dst, src, shift);
    Ok(())
}

/// Computes `dst[i2][i1] = src0[i2][i1] + src1[ids[i2][i1]]`.
///
/// # Errors
/// `Operand` unless source and result are floats of one shape, src1 is a matrix of floats with rows of their length, and
/// there is a number for each index of dimensions 1 and 2; `Index` as [`check_indices`].
pub fn add_id(engine: &Engine, dst: ViewMut<'_>, src: &[Source<'_>; 3]) -> Result<()> {
    same_shape(&dst.shape, &src[0])?;
    let (table, ids) = (src[1].apart()?, src[2].apart()?);
    let (n, t, i) = (dst.shape.ne, table.shape.ne, ids.shape.ne);
    let table_fits = t == [n[0], t[1], 1, 1] && table.shape.dtype.is_float();
    if !table_fits || i != [n[1], n[2], 1, 1] {
        return Err(Error::Operand);
    }
    check_indices(&ids, t[1])?;
    let packets = || row_packets(n[0], ARITHMETIC);
    dst.for_row_parts_with_chunks(engine, packets, |row, chunks| {
        let id = checked(ids.index(row.at[0], [row.at[1], 0, 0]));
        let addend = Source::Apart(table.row([id, 0, 0]));
        hvx::widest(MapRow {
            f: Function::Binary(Binary::Add),
            row,
            src: [&src[0], &addend],
            shift: [0, 0],
            chunks,
        });
    });
    Ok(())
}
