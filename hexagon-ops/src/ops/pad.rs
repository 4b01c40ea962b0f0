//! PAD and ROLL: a source inside of a larger result, or with its elements shifted cyclically.

use super::tensor::{Columns, MOVE, Row, Run, Source, View, ViewMut, row_packets};
use crate::error::{Error, Result};
use crate::hvx;
use crate::rt::Engine;

/// Place of a source in a larger result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pad {
    /// Elements before the source, by dimension; negative numbers only if it repeats.
    pub front: [i32; 4],
    /// `true` if the source repeats in all dimensions, `false` if zeros surround it.
    pub is_circular: bool,
}

impl Pad {
    /// Returns the index of dimension `dim` in the source; `None` outside.
    fn source(&self, dim: usize, index: usize, count: usize) -> Option<usize> {
        let front = i64::from(self.front[dim]);
        // CAST: dimensions are below 2^32.
        let (index, count) = (index as i64 - front, count as i64);
        let index = if self.is_circular {
            index.rem_euclid(count)
        } else {
            index
        };
        let inside = (0..count).contains(&index);
        usize::try_from(index).ok().filter(|_| inside)
    }

    /// Returns the indices of dimensions 2 and 3 of a run in the source; `None` outside.
    fn planes(&self, run: &Run<'_>, ne: [usize; 4]) -> Option<[usize; 2]> {
        let [_, i2, i3] = run.at;
        Some([self.source(2, i2, ne[2])?, self.source(3, i3, ne[3])?])
    }

    /// Writes rows of a source that is surrounded by zeros and that the run [accepts](Run::takes).
    /// Returns `false` and writes nothing if the source is not where [`pad`] has checked it.
    fn surround_run(&self, run: &mut Run<'_>, view: &View<'_>) -> bool {
        let (ne, count) = (view.shape.ne, run.count);
        let [Ok(column), Ok(row)] = [0, 1].map(|dim: usize| usize::try_from(self.front[dim]))
        else {
            return false;
        };
        let Some([i2, i3]) = self.planes(run, ne) else {
            run.clear(0..count);
            return true;
        };
        let inside = |row: usize| row.saturating_sub(run.at[0]).min(count);
        let rows = inside(row)..inside(row + ne[1]);
        if run.len() == ne[0] {
            run.clear(0..rows.start);
            run.clear(rows.end..count);
        } else {
            run.clear(0..count);
        }
        let columns = Columns {
            to: column,
            from: 0,
            count: ne[0],
        };
        let first = (run.at[0] + rows.start).saturating_sub(row);
        run.take(rows, view, [first, i2, i3], columns);
        true
    }

    /// Writes rows of a source that repeats, and that the run [accepts](Run::takes). Returns
    /// `false` and writes nothing if rows have other lengths.
    fn turn_run(&self, run: &mut Run<'_>, view: &View<'_>) -> bool {
        let ([n0, n1, ..], count) = (view.shape.ne, run.count);
        let (Some([i2, i3]), Some(column), Some(row)) = (
            self.planes(run, view.shape.ne),
            self.source(0, 0, n0),
            self.source(1, run.at[0], n1),
        ) else {
            return false;
        };
        if run.len() != n0 {
            return false;
        }
        let before = Columns {
            to: 0,
            from: column,
            count: n0 - column,
        };
        let after = Columns {
            to: n0 - column,
            from: 0,
            count: column,
        };
        let (mut first, mut row) = (0, row);
        while first < count {
            let end = count.min(first + n1 - row);
            run.take(first..end, view, [row, i2, i3], before);
            run.take(first..end, view, [row, i2, i3], after);
            (first, row) = (end, 0);
        }
        true
    }
}

/// Writes one row of [`pad`].
struct PadRow<'a> {
    pad: Pad,
    row: Row<'a>,
    view: &'a View<'a>,
}

impl hvx::Kernel for PadRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let (n, ne, pad) = (self.row.len(), self.view.shape.ne, self.pad);
        let mut at = [0; 3];
        for (i, at) in at.iter_mut().enumerate() {
            match pad.source(i + 1, self.row.at[i], ne[i + 1]) {
                Some(index) => *at = index,
                None => return self.row.clear(0..n),
            }
        }
        // Either the padding is circular or the source starts here; in both cases `take` repeats
        // the source.
        let (start, len, from) = match pad.source(0, 0, ne[0]) {
            Some(from) if pad.is_circular => (0, n, from),
            Some(from) => (0, ne[0], from),
            None => (usize::try_from(pad.front[0]).unwrap_or(0), ne[0], 0),
        };
        self.row.clear(0..start);
        self.row.take(start, len, self.view, at, from);
        self.row.clear(start + len..n);
    }
}

/// Surrounds the source with zeros, or repeats it.
///
/// # Errors
/// `Operand` unless both have one type without blocks, and the source is in the result at its
/// place (or repeats).
pub fn pad(engine: &Engine, pad: Pad, dst: ViewMut<'_>, src: &Source<'_>) -> Result<()> {
    let view = src.apart()?;
    let types = view.shape.dtype == dst.shape.dtype && !dst.shape.dtype.is_block();
    let lies_inside = (0..4).all(|i| {
        let front = usize::try_from(pad.front[i]).ok();
        let end = front.and_then(|front| front.checked_add(view.shape.ne[i]));
        end.is_some_and(|end| end <= dst.shape.ne[i])
    });
    if !types || !(pad.is_circular || lies_inside) {
        return Err(Error::Operand);
    }
    let view = &view;
    let n = dst.shape.ne[0];
    let packets = || row_packets(n, MOVE);
    dst.for_parts(engine, packets, |part| {
        part.for_each_run(|mut run| {
            let is_done = run.takes(view)
                && match pad.is_circular {
                    true => pad.turn_run(&mut run, view),
                    false => pad.surround_run(&mut run, view),
                };
            if !is_done {
                run.for_each_row(|row| {
                    hvx::widest(PadRow { pad, row, view });
                });
            }
        });
    });
    Ok(())
}
