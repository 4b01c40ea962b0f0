//! Operations that move elements: rows by number, copies that convert, repetition.

pub(super) mod turned;

use super::tensor::{
    CHUNK, Chunk, Columns, MOVE, Row, Run, Shape, Source, Type, View, ViewMut, divides, row_packets,
};
use crate::error::{Error, Result};
use crate::hvx;
use crate::rt::Engine;

/// Most elements of a row that is made of several shorter rows. Longer rows would leave too few for
/// the threads.
const LONG_ROW: usize = 4096;

/// Short rows that are converted at a time.
const TOGETHER: usize = 8;

/// Writes elements `to..to + n` of a row: the elements of row `at` of a source that start at
/// `from`.
pub(super) struct CopyRow<'a, 'b> {
    pub(super) row: &'a mut Row<'b>,
    pub(super) to: usize,
    pub(super) n: usize,
    pub(super) view: &'a View<'a>,
    pub(super) at: [usize; 3],
    pub(super) from: usize,
}

impl hvx::Kernel for CopyRow<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        if self.row.dtype() == self.view.shape.dtype {
            self.row
                .take(self.to, self.n, self.view, self.at, self.from);
            return;
        }
        let from = self.from..self.from + self.n;
        if let Some(out) = self.row.floats().and_then(|row| row.get_mut(self.to..))
            && from.end <= self.view.shape.ne[0]
        {
            return self.view.read_row(self.at, self.from, &mut out[..self.n]);
        }
        if let Some(elems) = self.view.floats(self.at).and_then(|row| row.get(from)) {
            return self.row.write(self.to, elems);
        }
        let mut memory = hvx::zeros::<{ CHUNK / 32 }>();
        let chunk: &mut Chunk = bytemuck::cast_mut(&mut memory);
        for k in (0..self.n).step_by(CHUNK) {
            let len = CHUNK.min(self.n - k);
            let from = self.from + k;
            let elems = self.view.read(self.at, from..from + len, chunk);
            self.row.write(self.to + k, elems);
        }
    }
}

/// Returns `true` if rows of `src` can be written as rows of `dst`: equal types are moved, others
/// go through f32.
pub(super) fn converts(src: &Shape, dst: &Shape) -> bool {
    src.dtype == dst.dtype || src.dtype.is_readable() && dst.dtype.is_writable()
}

/// Checks that the rows that an index tensor names are below `limit`.
///
/// # Errors
/// `Index` if a number is negative or too large; `Operand` if the elements are not of an index
/// type.
pub fn check_indices(ids: &View<'_>, limit: usize) -> Result<()> {
    if !ids.shape.dtype.is_index() {
        return Err(Error::Operand);
    }
    let [n0, n1, n2, n3] = ids.shape.ne;
    for i3 in 0..n3 {
        for i2 in 0..n2 {
            for i1 in 0..n1 {
                for i0 in 0..n0 {
                    let id = ids.index(i0, [i1, i2, i3]);
                    let index = usize::try_from(id).unwrap_or(usize::MAX);
                    if index >= limit {
                        return Err(Error::Index {
                            what: "row",
                            index,
                            limit,
                        });
                    }
                }
            }
        }
    }
    Ok(())
}

/// Converts an index that [`check_indices`] accepted.
pub(super) fn checked(id: i64) -> usize {
    usize::try_from(id).unwrap_or(0)
}

/// Computes `dst[i3][i2][i1] = src[i3][i2][ids[i3][i2][i1]]`.
///
/// # Errors
/// `Operand` unless types convert, rows have one length, and the tensor of numbers has the result's
/// rows; `Index` as [`check_indices`].
pub fn get_rows(
    engine: &Engine,
    dst: ViewMut<'_>,
    src: &Source<'_>,
    ids: &Source<'_>,
) -> Result<()> {
    let (view, ids) = (src.apart()?, ids.apart()?);
    let (n, i) = (dst.shape.ne, ids.shape.ne);
    let s = view.shape.ne;
    let shapes = n == [s[0], i[0], i[1], i[2]] && i[3] == 1 && s[2] == n[2] && s[3] == n[3];
    if !shapes || !converts(&view.shape, &dst.shape) {
        return Err(Error::Operand);
    }
    check_indices(&ids, s[1])?;
    let packets = || row_packets(n[0], MOVE);
    let dense = [&dst.shape, &view.shape].map(Shape::has_dense_rows) == [true; 2];
    // With few rows, columns are divided among the threads instead.
    let has_many = n[1] * n[2] * n[3] > engine.threads();
    if dst.shape.dtype == view.shape.dtype && dense && has_many {
        dst.for_parts(engine, packets, |part| {
            part.for_each_run(|run| take_named(run, &view, &ids));
        });
        return Ok(());
    }
    dst.for_row_parts(engine, packets, |mut row| {
        let [i1, i2, i3] = row.at;
        let at = [checked(ids.index(i1, [i2, i3, 0])), i2, i3];
        if i1 + 1 < i[0] {
            let next = checked(ids.index(i1 + 1, [i2, i3, 0]));
            view.fetch([next, i2, i3], 1);
        }
        let (n, from) = (row.len(), row.first);
        hvx::widest(CopyRow {
            row: &mut row,
            to: 0,
            n,
            view: &view,
            at,
            from,
        });
    });
    Ok(())
}

/// Writes the rows of a run that numbers name, from a view that the run [accepts](Run::takes). The
/// numbers were checked.
fn take_named(mut run: Run<'_>, view: &View<'_>, ids: &View<'_>) {
    let [first, i2, i3] = run.at;
    let plane = view.row([0, i2, i3]);
    let stride = view.shape.nb[1];
    let number = |i: usize| checked(ids.index(first + i, [i2, i3, 0]));
    let mut next = number(0);
    let count = run.count;
    run.take_each(&plane, |row| {
        let offset = next * stride;
        if row + 1 < count {
            next = number(row + 1);
            view.fetch([next, i2, i3], 1);
        }
        offset
    });
}

/// Computes `dst[i3][i2][ids[i3][i2][i1]] = src[i3][i2][i1]`; the numbers are repeated in
/// dimensions 2 and 3.
///
/// Each task writes the rows that are in its part of the result, in the source's order, so a row
/// that is named twice has the later value.
///
/// # Errors
/// `Operand` unless shapes fit, the source is f32, f16 or bf16, and the result's type can be
/// written; `Index` as [`check_indices`].
pub fn set_rows(
    engine: &Engine,
    dst: ViewMut<'_>,
    src: &Source<'_>,
    ids: &Source<'_>,
) -> Result<()> {
    let (view, ids) = (src.apart()?, ids.apart()?);
    let (n, s, i) = (dst.shape.ne, view.shape.ne, ids.shape.ne);
    let rows = n[0] == s[0] && n[2] == s[2] && n[3] == s[3] && i[0] == s[1] && i[3] == 1;
    let repeats = divides(i[1], s[2]) && divides(i[2], s[3]);
    if !rows || !repeats || !view.shape.dtype.is_float() || !converts(&view.shape, &dst.shape) {
        return Err(Error::Operand);
    }
    check_indices(&ids, n[1])?;
    let work = || {
        let count = s[1] * s[2] * s[3];
        (row_packets(n[0], MOVE).saturating_mul(count), count)
    };
    let place = |k: usize| {
        let (i1, planes) = (k % s[1], k / s[1]);
        let (i2, i3) = (planes % s[2], planes / s[2]);
        [checked(ids.index(i1, [i2, i3, 0])), i2, i3]
    };
    dst.for_named_parts(engine, work, place, |part| {
        for i3 in 0..s[3] {
            for i2 in 0..s[2] {
                let are_floats =
                    s[1] > 0 && is_dense_f32(&view.shape) && part.shape.dtype.is_float();
                if !are_floats || !put_floats(part, &view, &ids, [i2, i3]) {
                    put_rows(part, &view, &ids, [i2, i3]);
                }
            }
        }
    });
    Ok(())
}

/// Writes those rows of a plane that belong to a part of the result. The numbers were checked.
fn put_rows(part: &mut ViewMut<'_>, view: &View<'_>, ids: &View<'_>, [i2, i3]: [usize; 2]) {
    let count = view.shape.ne[1];
    for i1 in 0..count {
        let to = checked(ids.index(i1, [i2, i3, 0]));
        if let Some(mut row) = part.row([to, i2, i3]) {
            if i1 + 1 < count {
                view.fetch([i1 + 1, i2, i3], 1);
            }
            hvx::widest(CopyRow {
                n: row.len(),
                row: &mut row,
                to: 0,
                view,
                at: [i1, i2, i3],
                from: 0,
            });
        }
    }
}

/// Does the same for rows that are [dense f32](is_dense_f32), and a result of floats. Rows that
/// follow each other on both sides, as those of a prompt do, are written together. Returns `false`,
/// with nothing written, if the rows do not have the form of [`View::float_rows`].
fn put_floats(
    part: &mut ViewMut<'_>,
    view: &View<'_>,
    ids: &View<'_>,
    [i2, i3]: [usize; 2],
) -> bool {
    let [n, count, ..] = view.shape.ne;
    let Some((mut elems, stride)) = view.float_rows([0, i2, i3], count) else {
        return false;
    };
    let number = |i: usize| checked(ids.index(i, [i2, i3, 0]));
    let (mut end, mut next) = (0, number(0));
    while end < count {
        let (to, first) = (next, end);
        while end < count && next == to + (end - first) && (end == first || stride == n) {
            end += 1;
            if end < count {
                next = number(end);
            }
        }
        view.fetch([end, i2, i3], 1);
        let rows = end - first;
        let together = elems.get(..rows * n).unwrap_or_default();
        if !part.write_rows([to, i2, i3], together) {
            // Rows are written one by one. A single row has a stride of 0.
            for i in 0..rows {
                if let Some(mut to) = part.row([to + i, i2, i3]) {
                    let row = elems.get(i * stride..i * stride + n);
                    to.write(0, row.unwrap_or_default());
                }
            }
        }
        elems = elems.get(rows * stride..).unwrap_or_default();
    }
    true
}

/// Returns `true` if rows are f32 without gaps, and whole elements from one to the next.
pub(super) fn is_dense_f32(shape: &Shape) -> bool {
    shape.dtype == Type::F32 && shape.has_dense_rows() && shape.nb[1].is_multiple_of(4)
}

/// Converts the rows of a run from a view that [is dense f32](is_dense_f32).
fn write_floats(mut run: Run<'_>, view: &View<'_>) {
    let (at, n) = (run.at, run.len());
    let Some((mut elems, stride)) = view.float_rows(at, run.count) else {
        return;
    };
    if n < LONG_ROW / 4 {
        let mut first = 0;
        while first < run.count {
            let rows = TOGETHER.min(run.count - first);
            let left = view.shape.ne[1].saturating_sub(at[0] + first + rows);
            view.fetch([at[0] + first + rows, at[1], at[2]], TOGETHER.min(left));
            if !run.narrow(first, rows, (elems, stride)) {
                break;
            }
            elems = elems.get(rows * stride..).unwrap_or_default();
            first += rows;
        }
        if first == run.count {
            return;
        }
    }
    run.for_each_row(|mut row| {
        view.fetch([row.at[0] + 1, at[1], at[2]], 1);
        row.write(0, elems.get(..n).unwrap_or_default());
        elems = elems.get(stride..).unwrap_or_default();
    });
}

/// Copies element by element, in ggml's order if the shapes differ.
///
/// # Errors
/// `Operand` unless both have as many elements, of types that convert, and rows are made of whole
/// blocks.
pub fn copy(engine: &Engine, dst: ViewMut<'_>, src: &Source<'_>) -> Result<()> {
    if matches!(src, Source::InPlace) {
        return Ok(());
    }
    let mut view = src.apart()?;
    let (d, s) = (dst.shape, view.shape);
    let block = d.dtype.block().max(s.dtype.block());
    // Both block sizes are powers of two, so a mask finds the remainder.
    let blocks = (d.ne[0] | s.ne[0]) & (block - 1) == 0;
    if d.elems() != s.elems() || !converts(&s, &d) || !blocks {
        return Err(Error::Operand);
    }
    let mut dst = dst;
    if d.is_gapless() && s.is_gapless() {
        // Without gaps, both tensors are the same sequence of elements, so short rows can be joined
        // to longer ones.
        let mut n = d.ne[0];
        for count in &d.ne[1..] {
            n = Some(n * count).filter(|n| *n <= LONG_ROW).unwrap_or(n);
        }
        dst = dst.reshaped(d.with_rows(n));
        view.shape = s.with_rows(n);
    } else if d.is_gapless() && d.ne != s.ne && block == 1 {
        // States of a convolution: short rows become one row.
        let mut shape = Shape { ne: s.ne, ..d };
        for i in 1..4 {
            shape.nb[i] = shape.nb[i - 1] * shape.ne[i - 1];
        }
        shape.nb[0] = d.dtype.block_bytes();
        dst = dst.reshaped(shape);
    }
    let (d, s) = (dst.shape, view.shape);
    let packets = || row_packets(d.ne[0], MOVE);
    // With few rows, columns are divided among the threads instead.
    if d.ne == s.ne && d.ne[1] * d.ne[2] * d.ne[3] > engine.threads() {
        let columns = Columns {
            to: 0,
            from: 0,
            count: d.ne[0],
        };
        if d.dtype == s.dtype && d.has_dense_rows() && s.has_dense_rows() {
            dst.for_parts(engine, packets, |part| {
                part.for_each_run(|mut run| run.take(0..run.count, &view, run.at, columns));
            });
            return Ok(());
        }
        if d.dtype == Type::F16 && is_dense_f32(&s) {
            dst.for_parts(engine, packets, |part| {
                part.for_each_run(|run| write_floats(run, &view));
            });
            return Ok(());
        }
        if turned::is_turned(&d, &s) {
            dst.for_parts(engine, packets, |part| {
                part.for_each_run(|mut run| turned::copy_run(&mut run, &view, 0));
            });
            return Ok(());
        }
    }
    dst.for_row_parts(engine, packets, |mut row| {
        let [i1, i2, i3] = row.at;
        if i1 + 1 < s.ne[1] {
            view.fetch([i1 + 1, i2, i3], 1);
        }
        let mut k = 0;
        while k < row.len() {
            // The place in the source of this element: both tensors number their elements in ggml's
            // order, dimension 0 first.
            let (from, at) = if d.ne == s.ne {
                (row.first + k, row.at)
            } else {
                let flat = ((i3 * d.ne[2] + i2) * d.ne[1] + i1) * d.ne[0] + row.first + k;
                let (from, rows) = (flat % s.ne[0], flat / s.ne[0]);
                let planes = rows / s.ne[1];
                (from, [rows % s.ne[1], planes % s.ne[2], planes / s.ne[2]])
            };
            let n = (row.len() - k).min(s.ne[0] - from);
            hvx::widest(CopyRow {
                row: &mut row,
                to: k,
                n,
                view: &view,
                at,
                from,
            });
            k += n;
        }
    });
    Ok(())
}

/// Repeats the source in all dimensions.
///
/// # Errors
/// `Operand` unless types convert and the source's dimensions divide the result's.
pub fn repeat(engine: &Engine, dst: ViewMut<'_>, src: &Source<'_>) -> Result<()> {
    if matches!(src, Source::InPlace) {
        return Ok(());
    }
    let view = src.apart()?;
    let ne = dst.shape.ne;
    let divides = ne.iter().zip(view.shape.ne).all(|(n, m)| divides(m, *n));
    // Rows are converted in chunks, and each chunk must start at a whole block.
    let block = dst.shape.dtype.block().max(view.shape.dtype.block());
    let blocks = ne[0].is_multiple_of(block) && view.shape.ne[0].is_multiple_of(block);
    if !divides || !blocks || !converts(&view.shape, &dst.shape) {
        return Err(Error::Operand);
    }
    let packets = || row_packets(ne[0], MOVE);
    dst.for_row_parts(engine, packets, |mut row| {
        let (n, at, from) = (row.len(), row.at, row.first);
        hvx::widest(CopyRow {
            row: &mut row,
            to: 0,
            n,
            view: &view,
            at,
            from,
        });
    });
    Ok(())
}
