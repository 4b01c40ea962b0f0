//! ADD_ID: rows of a table, named by numbers, added to the rows of a source.

use super::copy::{check_indices, checked, is_dense_f32};
use super::elementwise::{Binary, Function, load, map_row, same_shape};
use super::tensor::{ARITHMETIC, Run, Source, View, ViewMut, row_packets};
use crate::error::{Error, Result};
use crate::hvx::{self, add_f32};
use crate::rt::Engine;

/// Adds two rows of equal length.
struct AddRow<'a> {
    a: &'a [f32],
    b: &'a [f32],
    out: &'a mut [f32],
}

impl hvx::Kernel for AddRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let ((a, a_rest), (b, b_rest)) = (self.a.as_chunks(), self.b.as_chunks());
        let (out, out_rest) = self.out.as_chunks_mut();
        for ((a, b), out) in a.iter().zip(b).zip(out) {
            hvx::store_f32(out, add_f32(hvx::load_f32(a), hvx::load_f32(b)));
        }
        if !out_rest.is_empty() {
            let mut lanes = [0.0; 32];
            let sum = add_f32(load(a_rest, 0), load(b_rest, 0));
            hvx::store_f32(&mut lanes, sum);
            hvx::copy_f32(out_rest, &lanes);
        }
    }
}

/// Adds rows of a table, elements from its first row and from one to the next, to the rows of a
/// run. All are f32 without gaps inside, and the numbers were checked.
fn add_rows(mut run: Run<'_>, view: &View<'_>, (table, step): (&[f32], usize), ids: &View<'_>) {
    let ([first, token, _], count, n) = (run.at, run.count, run.len());
    let (Some((mut a, stride)), Some((mut out, out_stride))) =
        (view.float_rows(run.at, count), run.floats())
    else {
        return;
    };
    for i in first..first + count {
        let id = checked(ids.index(i, [token, 0, 0]));
        let b = table.get(id * step..).and_then(|row| row.get(..n));
        if let (Some(a), Some(b), Some(out)) = (a.get(..n), b, out.get_mut(..n)) {
            hvx::widest(AddRow { a, b, out });
        }
        a = a.get(stride..).unwrap_or_default();
        out = out.get_mut(out_stride..).unwrap_or_default();
    }
}

/// Computes `dst[i2][i1] = src0[i2][i1] + src1[ids[i2][i1]]`.
///
/// # Errors
/// `Operand` unless source and result are floats of one shape, src1 is a matrix of floats with rows
/// of their length, and there is a number for each index of dimensions 1 and 2; `Index` as
/// [`check_indices`].
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
    let rows = table.float_rows([0; 3], t[1]);
    if let (Source::Apart(view), Some(rows)) = (&src[0], rows)
        && [&dst.shape, &view.shape].map(is_dense_f32) == [true; 2]
        && n[1] > 1
    {
        dst.for_parts(engine, packets, |part| {
            part.for_each_run(|run| add_rows(run, view, rows, &ids));
        });
        return Ok(());
    }
    dst.for_row_parts_with_chunks(engine, packets, |row, chunks| {
        let id = checked(ids.index(row.at[0], [row.at[1], 0, 0]));
        let addend = Source::Apart(table.row([id, 0, 0]));
        let f = Function::Binary(Binary::Add);
        map_row(f, row, [&src[0], &addend], [0, 0], chunks);
    });
    Ok(())
}
