//! CONCAT: two tensors, one after the other along a dimension.

use super::copy::{CopyRow, converts, turned};
use super::tensor::{Columns, MOVE, Run, Shape, Source, View, ViewMut, row_packets};
use crate::error::{Error, Result};
use crate::hvx::{self, Vector, and, load_f32, move_bytes, or};
use crate::layout::{LINE_BYTES, Line};
use crate::rt::Engine;

/// Writes `src[0]`, followed by `src[1]`, along dimension `dim`.
///
/// # Errors
/// `Operand` unless all have types that convert and rows of whole blocks, dimensions other than
/// `dim` are equal, and those of `dim` add up.
pub fn concat(engine: &Engine, dim: usize, dst: ViewMut<'_>, src: [&Source<'_>; 2]) -> Result<()> {
    let views = [src[0].apart()?, src[1].apart()?];
    let ne = dst.shape.ne;
    let fits = (0..4).all(|i| {
        let [a, b] = [views[0].shape.ne[i], views[1].shape.ne[i]];
        if i == dim {
            a.checked_add(b) == Some(ne[i])
        } else {
            a == ne[i] && b == ne[i]
        }
    });
    let block = dst.shape.dtype.block();
    let convert = views
        .iter()
        .all(|v| converts(&v.shape, &dst.shape) && v.shape.ne[0].is_multiple_of(block));
    if dim >= 4 || !fits || !convert {
        return Err(Error::Operand);
    }
    let (dim, dst, views) = joined(dim, dst, views);
    let ne = dst.shape.ne;
    let first = views[0].shape.ne[dim];
    let packets = || row_packets(ne[0], MOVE);
    // A convolution joins its latest inputs with those of a prompt, whose channels follow each
    // other in memory.
    let is_turned = dim == 0 && turned::is_turned(&dst.shape, &views[1].shape);
    dst.for_parts(engine, packets, |part| {
        part.for_each_run(|mut run| {
            if dim == 0 && join_windows(&mut run, &views) {
                return;
            }
            if is_turned && run.takes(&views[0]) {
                let past = Columns {
                    to: 0,
                    from: 0,
                    count: first,
                };
                run.take(0..run.count, &views[0], run.at, past);
                return turned::copy_run(&mut run, &views[1], first);
            }
            if views.iter().all(|view| run.takes(view)) {
                return join_rows(&mut run, dim, &views);
            }
            run.for_each_row(|mut row| {
                let at = row.at;
                let mut part = |view: &View<'_>, to: usize, at: [usize; 3]| {
                    hvx::widest(CopyRow {
                        row: &mut row,
                        to,
                        n: view.shape.ne[0],
                        view,
                        at,
                        from: 0,
                    });
                };
                match dim.checked_sub(1) {
                    None => {
                        part(&views[0], 0, at);
                        part(&views[1], first, at);
                    }
                    Some(i) if at[i] < first => part(&views[0], 0, at),
                    Some(i) => {
                        let mut at = at;
                        at[i] -= first;
                        part(&views[1], 0, at);
                    }
                }
            });
        });
    });
    Ok(())
}

/// Returns the same operation along dimension 1, with the dimensions up to `dim` as one, where
/// dimension 2 or 3 of tensors without gaps is joined: their rows follow each other, and can be
/// moved together.
fn joined<'d, 's>(
    dim: usize,
    dst: ViewMut<'d>,
    views: [View<'s>; 2],
) -> (usize, ViewMut<'d>, [View<'s>; 2]) {
    let is_gapless = dst.shape.is_gapless() && views.iter().all(|view| view.shape.is_gapless());
    if dim < 2 || !is_gapless {
        return (dim, dst, views);
    }
    let shape = |shape: &Shape| {
        let [n0, n1, n2, n3] = shape.ne;
        let (rows, planes) = if dim == 2 {
            (n1 * n2, n3)
        } else {
            (n1 * n2 * n3, 1)
        };
        let mut joined = shape.with_rows(n0);
        (joined.ne[1], joined.ne[2]) = (rows, planes);
        joined.nb[2] = if planes == 1 { 0 } else { rows * joined.nb[1] };
        joined
    };
    let of_dst = shape(&dst.shape);
    let views = views.map(|view| view.reshaped(shape(&view.shape)));
    (1, dst.reshaped(of_dst), views)
}

/// Writes rows of views that the run [accepts](Run::takes).
fn join_rows(run: &mut Run<'_>, dim: usize, views: &[View<'_>; 2]) {
    let (at, count) = (run.at, run.count);
    let [first, second] = views.each_ref().map(|view| view.shape.ne[dim]);
    let columns = |to, count| Columns { to, from: 0, count };
    if dim == 0 {
        // Lines are written whole: the second part overwrites the elements that the first part
        // writes after its end.
        run.take_lines(&views[0], at, first);
        return run.take(0..count, &views[1], at, columns(first, second));
    }
    let whole = columns(0, run.len());
    let mut later = at;
    later[dim - 1] = at[dim - 1].saturating_sub(first);
    match dim {
        1 => {
            let split = first.saturating_sub(at[0]).min(count);
            run.take(0..split, &views[0], at, whole);
            run.take(split..count, &views[1], later, whole);
        }
        _ if at[dim - 1] < first => run.take(0..count, &views[0], at, whole),
        _ => run.take(0..count, &views[1], later, whole),
    }
}

/// Appends one element to each of several rows of two or three elements, all f32 without gaps: this
/// is how the latest inputs of a convolution are joined with those of a token. The rows are so
/// short that copying each separately would cost more than its elements. Returns `false` and writes
/// nothing if the rows do not have this form.
fn join_windows(run: &mut Run<'_>, views: &[View<'_>; 2]) -> bool {
    let [past, new] = views
        .each_ref()
        .map(|view| view.float_rows(run.at, run.count));
    let (Some((past, n_past)), Some((new, 1))) = (past, new) else {
        return false;
    };
    let widths = views.each_ref().map(|view| view.shape.ne[0]);
    match (run.floats(), widths) {
        (Some((out, 4)), [3, 1]) if n_past == 3 => {
            let done = hvx::widest(JoinFours {
                out: out.as_chunks_mut().0,
                past,
                new,
            });
            let (out, past) = (out.as_chunks_mut::<4>().0, past.as_chunks::<3>().0);
            let (out, past) = (out.iter_mut().skip(done), past.iter().skip(done));
            let new = new.iter().skip(done);
            for ((out, [a, b, c]), new) in out.zip(past).zip(new) {
                *out = [*a, *b, *c, *new];
            }
            true
        }
        (Some((out, 3)), [2, 1]) if n_past == 2 => {
            let (out, past) = (out.as_chunks_mut::<3>().0, past.as_chunks::<2>().0);
            for ((out, [a, b]), new) in out.iter_mut().zip(past).zip(new) {
                *out = [*a, *b, *new];
            }
            true
        }
        _ => false,
    }
}

/// Words of a vector.
const WORDS: usize = LINE_BYTES / 4;
/// Rows of four elements that a vector holds.
const FOURS: usize = WORDS / 4;

/// Returns the route with which [`move_bytes`] moves rows of `count` elements without gaps to rows
/// of four elements, where they start at element `at`.
///
/// Elements only move to larger places, and keep their order. Then no two meet: at a level of
/// distance d, elements that are at one place have equal bits below d of where they come from, and
/// equal other bits of where they go, so that they were less than d apart, and were one.
const fn route(count: usize, at: usize) -> Line {
    let mut bytes = [0; LINE_BYTES];
    let mut i = 0;
    while i < FOURS * count * 4 {
        let (row, byte) = (i / (4 * count), i % (4 * count));
        let to = 16 * row + 4 * at + byte;
        let mut bit: u8 = 64;
        while bit > 0 {
            let distance = bit as usize;
            if (i ^ to) & distance != 0 {
                let place = to & !(distance - 1) | i & (distance - 1);
                bytes[place] |= bit;
            }
            bit /= 2;
        }
        i += 1;
    }
    Line(bytes)
}

/// Returns all bits in the elements of rows of four that [`route`] fills, and none in the others.
const fn filled(count: usize, at: usize) -> Line {
    let mut bytes = [0; LINE_BYTES];
    let mut i = 0;
    while i < LINE_BYTES {
        let element = i % 16 / 4;
        if at <= element && element < at + count {
            bytes[i] = 0xff;
        }
        i += 1;
    }
    Line(bytes)
}

/// Writes rows of four elements: three of `past` and one of `new`, which have no gaps. Returns the
/// number of rows, which is less than all: memory is read by whole vectors.
struct JoinFours<'a> {
    out: &'a mut [[f32; WORDS]],
    past: &'a [f32],
    new: &'a [f32],
}

impl hvx::Kernel for JoinFours<'_> {
    type Output = usize;

    #[inline(always)]
    fn run(self) -> usize {
        static ROUTES: [Line; 2] = [route(3, 0), route(1, 3)];
        static FILLED: [Line; 2] = [filled(3, 0), filled(1, 3)];
        let [past_route, new_route] = ROUTES.each_ref().map(hvx::load);
        let [of_past, of_new] = FILLED.each_ref().map(hvx::load);
        let spread = |past: Vector, new: Vector| {
            let past = and(move_bytes(past, past_route), of_past);
            or(past, and(move_bytes(new, new_route), of_new))
        };
        let (mut past, mut new, mut done) = (self.past, self.new, 0);
        for out in self.out {
            let (Some(old), Some(added)) = (past.first_chunk(), new.first_chunk()) else {
                break;
            };
            hvx::store_f32(out, spread(load_f32(old), load_f32(added)));
            (past, new) = (&past[3 * FOURS..], &new[FOURS..]);
            done += FOURS;
        }
        done
    }
}
