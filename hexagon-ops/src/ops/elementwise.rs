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

use super::tensor::{
    self, CHUNK, Chunks, Row, Shape, Source, Type, View, ViewMut, fetch_after, row_packets,
};
use crate::error::{Error, Result};
use crate::hvx::{self, Streams, Vector, splat_f32};
use crate::rt::{Engine, cache};

pub(super) use function::{BESIDE, each, each_group, each_line, lines, lines_mut, put};
pub use function::{Binary, Function, Glu, Unary};

/// Elements that are computed between two fetches, in operations without rows.
const BLOCK: usize = 4096;
/// Rows of fewer elements are computed several at a time, and fetched together.
const SHORT_ROW: usize = 1024;
/// Short rows that are computed at a time.
const SHORT_ROWS: usize = 8;
/// More of them are if they have no more elements than this: a head's.
const SHORTEST_ROW: usize = 128;
/// Elements of two vectors.
const PAIR: usize = 64;

/// Writes `f(a, b)` for as many elements as all have; a source that is `None` is in the result's
/// place. A row at a time: in a loop over rows, the constants of all functions would be computed
/// before it, and stored.
struct MapFloats<'a> {
    f: Function,
    src: [Option<&'a [f32]>; 2],
    out: &'a mut [f32],
}

impl hvx::Kernel for MapFloats<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        // One call, because the code of all functions is inlined here.
        self.f.map(self.src, self.out);
    }
}

/// Writes `f(a, b)` for as many elements as all have.
// On the host, code of all functions in each of its callers takes minutes to compile.
#[cfg_attr(target_arch = "hexagon", inline(always))]
#[cfg_attr(not(target_arch = "hexagon"), inline(never))]
fn map_floats(f: Function, src: [Option<&[f32]>; 2], out: &mut [f32]) {
    hvx::widest(MapFloats { f, src, out });
}

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
        // A `while` loop, because `step_by` compiles to a division, which is a function call on the
        // DSP.
        let mut start = 0;
        while start < n {
            let len = CHUNK.min(n - start);
            let range = |shift: usize| start + shift..start + shift + len;
            let a = self.src[0].read(&self.row, range(self.shift[0]), a_chunk);
            let b = self.src[1].read(&self.row, range(self.shift[1]), b_chunk);
            // A source in the result's memory has been copied to its chunk before.
            if let Some(row) = self.row.floats() {
                map_floats(self.f, [Some(a), Some(b)], &mut row[start..start + len]);
            } else {
                map_floats(self.f, [Some(a), Some(b)], &mut out_chunk[..len]);
                self.row.write(start, &out_chunk[..len]);
            }
            start += len;
        }
    }
}

/// Computes a row of any types.
#[inline(always)]
pub(super) fn map_row(
    f: Function,
    mut row: Row<'_>,
    src: [&Source<'_>; 2],
    shift: [usize; 2],
    chunks: &mut Chunks,
) {
    // Without gaps, the whole row is one piece, and nothing is copied.
    let operands = [0, 1].map(|i| match src[i] {
        Source::InPlace => Some(None),
        _ => dense(src[i], &row, shift[i]).map(Some),
    });
    if let [Some(a), Some(b)] = operands
        && let Some(out) = row.floats()
    {
        return map_floats(f, [a, b], out);
    }
    hvx::widest(MapRow {
        f,
        row,
        src,
        shift,
        chunks,
    });
}

/// Returns the elements of a source that a row needs, if they are f32 without gaps and apart from
/// the result; none of a source that does not exist.
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
    // A single row, which is the usual shape for one token, is not divided.
    if dst.shape.ne[1..] != [1; 3] {
        if is_flat(&dst.shape, &src) {
            return map_flat(engine, f, dst, src);
        }
        if shift == [0, 0]
            && let Some((shape, src)) = joined(&dst.shape, src)
        {
            return map_rows(engine, f, dst.reshaped(shape), src.each_ref(), shift);
        }
        if dst.len() >= 2 * engine.threads()
            && let Some(second) = Other::of(&dst.shape, &src, f)
        {
            match src[0] {
                Source::Apart(first) if shift[0] + n <= first.shape.ne[0] => {
                    return map_runs(engine, f, dst, Some(*first), second, shift);
                }
                Source::InPlace => return map_runs(engine, f, dst, None, second, shift),
                _ => {}
            }
        }
    }
    let packets = || row_packets(n, f.packets());
    dst.for_row_parts_with_chunks(engine, packets, |row, chunks| {
        fetch_after(&row, &src);
        map_row(f, row, src, shift, chunks);
    });
}

/// Returns result and sources with dimensions 0 and 1 as one, if all have the same ones and are f32
/// without gaps: planes of short rows are long rows.
fn joined<'a>(dst: &Shape, src: [&Source<'a>; 2]) -> Option<(Shape, [Source<'a>; 2])> {
    let join = |shape: &Shape| {
        let [n0, n1, n2, n3] = shape.ne;
        let fits = shape.dtype == Type::F32 && shape.is_gapless() && shape.ne[..2] == dst.ne[..2];
        let nb = [shape.nb[0], shape.nb[2], shape.nb[3], 0];
        let joined = Shape {
            ne: [n0 * n1, n2, n3, 1],
            nb,
            ..*shape
        };
        fits.then_some(joined)
    };
    if dst.ne[1] == 1 || dst.ne[2..] == [1; 2] {
        return None;
    }
    let mut sources = [Source::None; 2];
    for (to, src) in sources.iter_mut().zip(src) {
        *to = match src {
            Source::Apart(view) => Source::Apart(view.reshaped(join(&view.shape)?)),
            _ => *src,
        };
    }
    Some((join(dst)?, sources))
}

/// Returns `true` if result and sources are f32 of one shape without any gap, so that rows do not
/// matter.
fn is_flat(dst: &Shape, src: &[&Source<'_>; 2]) -> bool {
    let fits = |shape: &Shape| shape.dtype == Type::F32 && shape.is_gapless();
    let is_same = |src: &&Source<'_>| match src {
        Source::Apart(view) => view.shape.ne == dst.ne && fits(&view.shape),
        // A source in place is the result's memory, which was checked already.
        Source::InPlace | Source::None => true,
    };
    fits(dst) && src.iter().all(is_same)
}

/// Returns the elements of a gapless source as a row of `shape`, starting with `first`; none of a
/// source that does not exist, and `None` of one in the result's place.
fn flat<'a>(src: &Source<'a>, shape: Shape, first: usize) -> Option<&'a [f32]> {
    match src {
        Source::Apart(view) => {
            let elems = view.reshaped(shape).floats([0; 3]).unwrap_or_default();
            Some(elems.get(first..).unwrap_or_default())
        }
        Source::InPlace => None,
        Source::None => Some(&[]),
    }
}

/// Runs `f` on all elements of operands that [`is_flat`] accepts, as on one row.
fn map_flat(engine: &Engine, f: Function, dst: ViewMut<'_>, src: [&Source<'_>; 2]) {
    let n = dst.shape.elems();
    let shape = dst.shape.with_rows(n);
    let packets = || row_packets(n, f.packets());
    dst.reshaped(shape)
        .for_row_parts(engine, packets, |mut row| {
            let src = src.map(|src| flat(src, shape, row.first));
            let out = row.floats().unwrap_or_default();
            let own = out.as_ptr_range();
            for (i, out) in out.chunks_mut(BLOCK).enumerate() {
                let at = i * BLOCK;
                // Sources take turns, because a fetch ends the one before it.
                let next = match src[i % 2] {
                    Some([]) => src[0],
                    next => next,
                };
                let all = next.map_or(own.clone(), |next| next.as_ptr_range());
                let next = all.start.wrapping_add(at + BLOCK);
                if next < all.end {
                    let left = all.end.addr() - next.addr();
                    cache::fetch(next.cast(), left.min(2 * BLOCK * size_of::<f32>()));
                }
                let src = src.map(|src| src.map(|src| src.get(at..).unwrap_or_default()));
                map_floats(f, src, out);
            }
        });
}

/// The second operand of a function of rows that are f32 without gaps inside.
#[derive(Clone, Copy)]
enum Other<'a> {
    /// There is none.
    None,
    /// Rows of as many elements.
    Rows(View<'a>),
    /// A row that is repeated.
    Row(View<'a>),
    /// Rows of one element that is repeated.
    Elements(View<'a>),
}

impl<'a> Other<'a> {
    /// Returns the second source, if result and sources are such rows and apart.
    fn of(dst: &Shape, src: &[&Source<'a>; 2], f: Function) -> Option<Self> {
        let is_rows = |shape: &Shape| shape.dtype == Type::F32 && shape.has_dense_rows();
        let first = match src[0] {
            Source::Apart(view) => &view.shape,
            Source::InPlace => dst,
            Source::None => return None,
        };
        if !is_rows(dst) || !is_rows(first) || first.ne[1..] != dst.ne[1..] {
            return None;
        }
        let view = match src[1] {
            Source::None => return Some(Self::None),
            Source::Apart(view) if is_rows(&view.shape) => *view,
            _ => return None,
        };
        let (n, ne) = (dst.ne[0], view.shape.ne);
        if ne[0] >= n && ne[1] == dst.ne[1] {
            Some(Self::Rows(view))
        } else if ne[0] == n && ne[1] == 1 {
            Some(Self::Row(view))
        } else if ne[0] == 1 && ne[1] == dst.ne[1] && matches!(f, Function::Binary(_)) {
            Some(Self::Elements(view))
        } else {
            None
        }
    }

    /// Returns the operand with the rows of all dimensions in dimension 1, if they have equal
    /// distances. A row that is repeated in all dimensions is unchanged.
    fn merged(&self, rows: usize) -> Option<Self> {
        let merge = |view: &View<'a>| view.merged().filter(|view| view.shape.ne[1] == rows);
        Some(match self {
            Self::None => Self::None,
            Self::Rows(view) => Self::Rows(merge(view)?),
            Self::Elements(view) => Self::Elements(merge(view)?),
            Self::Row(view) if view.shape.ne[1..] == [1; 3] => *self,
            Self::Row(_) => return None,
        })
    }
}

/// Runs `f` on rows of f32 without gaps, without a set-up for each row. Without a view, the first
/// operand is the result's memory.
fn map_runs(
    engine: &Engine,
    f: Function,
    mut dst: ViewMut<'_>,
    mut first: Option<View<'_>>,
    mut second: Other<'_>,
    shift: [usize; 2],
) {
    let [n, rest @ ..] = dst.shape.ne;
    let merged = match first {
        Some(view) => view.merged().map(Some),
        None => Some(None),
    };
    if let (Some(shape), Some(merged), Some(other)) = (
        dst.shape.merged(),
        merged,
        second.merged(rest.iter().product()),
    ) {
        (dst, first, second) = (dst.reshaped(shape), merged, other);
    }
    let packets = || row_packets(n, f.packets());
    dst.for_parts(engine, packets, |part| {
        part.for_each_run(|mut run| {
            let ([i1, i2, i3], count) = (run.at, run.count);
            let (a, a_step) = match &first {
                Some(view) => match view.float_rows([i1, i2, i3], count) {
                    Some((a, step)) => (Some(a), step),
                    None => return,
                },
                None => (None, 0),
            };
            let (b, b_step) = match &second {
                Other::None => Some((&[][..], 0)),
                Other::Rows(view) | Other::Elements(view) => view.float_rows([i1, i2, i3], count),
                Other::Row(view) => view.float_rows([0, i2, i3], 1).map(|(row, _)| (row, 0)),
            }
            .unwrap_or_default();
            let Some((out, step)) = run.floats() else {
                return;
            };
            let per_turn = match n {
                _ if n <= SHORTEST_ROW => 4 * SHORT_ROWS,
                _ if n < SHORT_ROW => SHORT_ROWS,
                _ => 1,
            };
            for (turn, start) in (0..count).step_by(per_turn).enumerate() {
                let next = i1 + start + per_turn;
                // Fetch for the two sources alternately, each time for two turns.
                match (&first, &second) {
                    (_, Other::Rows(view)) if turn % 2 == 1 => {
                        view.fetch([next, i2, i3], 2 * per_turn);
                    }
                    (Some(view), _) if turn % 2 == 0 => view.fetch([next, i2, i3], 2 * per_turn),
                    _ => {}
                }
                let rows = per_turn.min(count - start);
                let from =
                    |elems: &'_ [f32], step: usize, shift: usize| start * step + shift..elems.len();
                let a = a.map(|a| a.get(from(a, a_step, shift[0])).unwrap_or_default());
                let b = b.get(from(b, b_step, shift[1])).unwrap_or_default();
                let out = out.get_mut(start * step..).unwrap_or_default();
                if let (Other::Elements(_), Function::Binary(f)) = (&second, f) {
                    let (b, out) = ((b, b_step), (out, step));
                    map_by(f, (a, a_step), b, out, [n, rows]);
                    continue;
                }
                for i in 0..rows {
                    let a = a.map(|a| a.get(i * a_step..).unwrap_or_default());
                    let b = b.get(i * b_step..).unwrap_or_default();
                    let out = out.get_mut(i * step..i * step + n).unwrap_or_default();
                    map_floats(f, [a, Some(b)], out);
                }
            }
        });
    });
}

/// Rows times a number for each of them, plus a number for each.
struct ScaleRows<'a> {
    f: Binary,
    /// Elements starting with the first row, and elements from one row to the next; no elements if
    /// they are in the result's place.
    a: (Option<&'a [f32]>, usize),
    b: (&'a [f32], usize),
    out: (&'a mut [f32], usize),
    n: usize,
    count: usize,
}

impl ScaleRows<'_> {
    /// Returns the factor and the addend of a row in all lanes.
    #[inline(always)]
    fn numbers(&self, row: usize) -> [Vector; 2] {
        let (b, step) = self.b;
        let b = b.get(row * step).copied().unwrap_or_default();
        // The sum with -0 is the number itself.
        [
            splat_f32(if self.f == Binary::Mul { b } else { 1.0 }),
            splat_f32(match self.f {
                Binary::Mul => -0.0,
                Binary::Sub => -b,
                _ => b,
            }),
        ]
    }
}

impl hvx::Kernel for ScaleRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let (a, a_step) = self.a;
        let (out, step) = (core::mem::take(&mut self.out.0), self.out.1);
        let follow = step == self.n && (a.is_none() || a_step == self.n);
        if follow && self.n.is_multiple_of(PAIR) {
            // Without gaps, the vectors of all rows are checked together.
            let mut s = Streams::new([a], out);
            let mut groups = s.groups::<2, false>();
            for i in 0..self.count {
                let [factor, addend] = self.numbers(i);
                for mut group in groups.by_ref().take(self.n / PAIR) {
                    let [x] = group.load(0);
                    let [y] = group.load(1);
                    group.store(0, hvx::add_f32(hvx::mul_f32(x, factor), addend));
                    group.store(1, hvx::add_f32(hvx::mul_f32(y, factor), addend));
                }
            }
            return;
        }
        for i in 0..self.count {
            let [factor, addend] = self.numbers(i);
            let a = a.map(|a| a.get(i * a_step..).unwrap_or_default());
            let out = out.get_mut(i * step..i * step + self.n).unwrap_or_default();
            let mut s = Streams::new([a], out);
            each_group!(2; s; x => hvx::add_f32(hvx::mul_f32(x, factor), addend));
        }
    }
}

/// Writes `f(a, b)` for rows of `n` elements and one number `b` for each.
fn map_by(
    f: Binary,
    a: (Option<&[f32]>, usize),
    b: (&[f32], usize),
    out: (&mut [f32], usize),
    [n, count]: [usize; 2],
) {
    if f != Binary::Div {
        return hvx::widest(ScaleRows {
            f,
            a,
            b,
            out,
            n,
            count,
        });
    }
    for i in 0..count {
        let chunk = [b.0.get(i * b.1).copied().unwrap_or_default(); CHUNK];
        let out = out.0.get_mut(i * out.1..i * out.1 + n).unwrap_or_default();
        for (k, out) in out.chunks_mut(CHUNK).enumerate() {
            let a =
                a.0.map(|elems| elems.get(i * a.1 + k * CHUNK..).unwrap_or_default());
            map_floats(Function::Binary(f), [a, Some(&chunk[..])], out);
        }
    }
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
pub(super) fn check_broadcast(dst: &Shape, src: &Source<'_>) -> Result<()> {
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
        check_broadcast(&dst.shape, src[1])?;
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

/// Computes `dst = f(a, b)`; a and b are the two sources, or the first and second half of each row
/// of one source, which `swapped` exchanges. The last element of an odd row belongs to neither.
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
