//! Products of several rows on the matrix unit, of matrices in two halves ([`crate::ops::halves`]).
//!
//! ```text
//! for each plane, for as many strips of 32 rows of src1 as VTCM has room for
//!   vector units   read and split these rows
//!   for each strip of 32 rows of src0, as many at a time as there are tasks
//!     vector units   read, transpose and split it
//!     matrix unit    multiply all strips of src1 with it
//!     vector units   join and write the products
//! ```
//!
//! The caller computes all products in FP32 instead if an operand or a product is so large that
//! FP16 does not hold it, or so small that its low half is lost.

use super::{DEPTH, LANES, repeated_plane};
use crate::hmx::{Form, MAX_DEEP, ScaleBlock};
use crate::hvx::{self, StridedVectors, copy_f32, larger_f16, larger_f32};
use crate::layout::{LINE_BYTES, Line, TILE_DIM, Tile};
use crate::ops::halves::{
    self, Halves, HalvesMut, LargestHalf, LargestLane, MOST_F16, Term, Unit, holds, on_diagonal,
};
use crate::ops::matmul::Machine;
use crate::ops::recurrence::SplitRows;
use crate::ops::square::{GROUP, GatherRows, Gathered, columns};
use crate::ops::tensor::{Type, View};
use crate::rt::{Arena, SharedColumns, tiles_of_lines};

/// Fewest rows of src1, unless src0 is f32 and has [`LARGE`] tiles, which vectors take longer to
/// multiply with a single row than to split.
const FEWEST: usize = 4;
const LARGE: usize = 64;
/// Most tasks of a step.
const MAX_TASKS: usize = 8;
/// Most calls of the unit for a product: K is up to 16,384.
const MAX_TERMS: usize = 16;
/// Lines that are read at a time, 32 rows.
const READ_LINES: usize = TILE_DIM * DEPTH / LANES;

/// The largest magnitudes of a task.
struct Largest<'m> {
    acts: &'m mut Line,
    weights: &'m mut Line,
    products: &'m mut Line,
}

impl Largest<'_> {
    /// Returns `true` if halves held all operands and products.
    fn is_exact(&self) -> bool {
        let fits = |line: &Line| holds(hvx::widest(LargestLane(line)));
        let product = hvx::widest(LargestHalf(self.products));
        fits(self.acts) && fits(self.weights) && product.to_bits().cast_signed() <= MOST_F16
    }
}

/// The memory of a task.
struct Task<'m> {
    /// A strip of src0.
    weights: HalvesMut<'m>,
    /// Products of it, a tile for each strip of src1.
    products: HalvesMut<'m>,
    lines: &'m mut [Line],
    largest: Largest<'m>,
}

impl<'m> Task<'m> {
    /// Returns the tiles that [`Self::new`] takes, without products.
    fn tiles(depth: usize) -> usize {
        2 * depth + tiles_of_lines(READ_LINES) + 1
    }

    fn new(arena: &mut Arena<'m>, depth: usize, strips: usize) -> Option<Self> {
        let lines = arena.lines("rows", READ_LINES).ok()?;
        let [acts, weights, products, ..] = arena.lines("magnitudes", 3).ok()? else {
            return None;
        };
        for line in [&mut *acts, weights, products] {
            hvx::clear(core::slice::from_mut(line));
        }
        Some(Self {
            weights: take_halves(arena, depth)?,
            products: take_halves(arena, strips)?,
            lines,
            largest: Largest {
                acts,
                weights,
                products,
            },
        })
    }
}

/// Takes the memory of `count` tiles.
fn take_halves<'m>(arena: &mut Arena<'m>, count: usize) -> Option<HalvesMut<'m>> {
    let tiles = arena.tiles("halves of a matrix", 2 * count).ok()?;
    let (high, low) = tiles.split_at_mut(count);
    Some(HalvesMut { high, low })
}

/// Rows that a task reads and splits: strips of 32, with zeros after the last one.
struct Reading<'a> {
    view: &'a View<'a>,
    plane: [usize; 2],
    first: usize,
    /// `true` for src0, of which a tile has a column for each row.
    is_turned: bool,
    to: HalvesMut<'a>,
    lines: &'a mut [Line],
    largest: &'a mut Line,
}

impl Reading<'_> {
    #[inline(never)]
    fn run(&mut self) {
        let [k, rows, ..] = self.view.shape.ne;
        let depth = k.div_ceil(TILE_DIM);
        let [i2, i3] = self.plane;
        let mut gathered: Gathered = hvx::zeros();
        let high = self.to.high.chunks_exact_mut(depth);
        for (high, low) in high.zip(self.to.low.chunks_exact_mut(depth)) {
            let first = self.first;
            let count = TILE_DIM.min(rows - first.min(rows));
            self.first += TILE_DIM;
            // Rows of f32 are read where they are.
            let is_whole = k.is_multiple_of(TILE_DIM) && (self.is_turned || count == TILE_DIM);
            let found = self.view.float_rows([first, i2, i3], count);
            let found = found.filter(|_| is_whole);
            let (mut high, mut low) = (high, low);
            for k0 in (0..k).step_by(DEPTH) {
                let range = k0..k.min(k0 + DEPTH);
                let tiles = range.len().div_ceil(LANES);
                let (elems, stride, count) = match found {
                    Some((elems, stride)) => (elems.get(k0..).unwrap_or_default(), stride, count),
                    None => {
                        let lines = &mut self.lines[..TILE_DIM * tiles];
                        let rows = first..first + count;
                        self.view.read_rows(rows, self.plane, range, lines);
                        (bytemuck::cast_slice(&*lines), LANES * tiles, TILE_DIM)
                    }
                };
                let (high_part, high_rest) = high.split_at_mut(tiles);
                let (low_part, low_rest) = low.split_at_mut(tiles);
                (high, low) = (high_rest, low_rest);
                let to = HalvesMut {
                    high: high_part,
                    low: low_part,
                };
                if !self.is_turned {
                    split(bytemuck::cast_slice(elems), 4 * stride, to, self.largest);
                    continue;
                }
                let parts = to.high.iter_mut().zip(to.low);
                for (i, (high, low)) in parts.enumerate() {
                    hvx::widest(GatherRows {
                        elems,
                        at: TILE_DIM * i,
                        stride,
                        count,
                        to: &mut gathered,
                    });
                    hvx::widest(SplitColumns {
                        gathered: &gathered,
                        high,
                        low,
                        largest: self.largest,
                    });
                }
            }
        }
    }
}

/// Splits 32 rows, `stride` bytes apart, into tiles.
fn split(bytes: &[u8], stride: usize, to: HalvesMut<'_>, largest: &mut Line) {
    const WHOLE: usize = DEPTH / LANES;
    if to.high.len() == WHOLE {
        if let Some(rows) = StridedVectors::new(bytes, stride, TILE_DIM) {
            hvx::widest(SplitRows::<WHOLE> { rows, to, largest });
        }
        return;
    }
    for (i, (high, low)) in to.high.iter_mut().zip(to.low).enumerate() {
        let bytes = bytes.get(LINE_BYTES * i..).unwrap_or_default();
        let to = HalvesMut {
            high: core::slice::from_mut(high),
            low: core::slice::from_mut(low),
        };
        if let Some(rows) = StridedVectors::new(bytes, stride, TILE_DIM) {
            hvx::widest(SplitRows::<1> { rows, to, largest });
        }
    }
}

/// Splits the columns of gathered rows into the rows of a tile.
struct SplitColumns<'a> {
    gathered: &'a Gathered,
    high: &'a mut Tile,
    low: &'a mut Tile,
    largest: &'a mut Line,
}

impl hvx::Kernel for SplitColumns<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut largest = hvx::load(self.largest);
        let high = self.high.0.as_chunks_mut::<{ GROUP / 2 }>().0.iter_mut();
        let parts = high.zip(self.low.0.as_chunks_mut::<{ GROUP / 2 }>().0);
        for (group, (high, low)) in parts.enumerate() {
            let columns = columns(self.gathered, group);
            for ((high, low), pair) in high.iter_mut().zip(low).zip(columns.as_chunks().0) {
                let [a, b] = *pair;
                largest = larger_f32(larger_f32(largest, a), b);
                let (x, y) = halves::split(a, b);
                hvx::store(high, x);
                hvx::store(low, y);
            }
        }
        hvx::store(self.largest, largest);
    }
}

/// Writes the products of tiles to rows: 32 columns of 32 rows for each tile.
struct WriteTiles<'a, 'r> {
    from: Halves<'a>,
    rows: &'a mut SharedColumns<'r>,
    /// The first row.
    first: usize,
    /// Holds the largest magnitude of each lane so far, which those of `from` may raise.
    largest: &'a mut Line,
}

impl hvx::Kernel for WriteTiles<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut largest = hvx::load(self.largest);
        let mut first = self.first;
        for (high, low) in self.from.high.iter().zip(self.from.low) {
            let parts = high
                .0
                .as_chunks::<4>()
                .0
                .iter()
                .zip(low.0.as_chunks::<4>().0);
            for (high, low) in parts {
                let Some(rows) = self.rows.squares::<TILE_DIM, 8>(first, 0) else {
                    return;
                };
                first += 8;
                let [a, b, c, d, e, f, g, h] = rows;
                for ((high, low), [even, odd]) in
                    high.iter().zip(low).zip([[a, b], [c, d], [e, f], [g, h]])
                {
                    let high = hvx::load(high);
                    largest = larger_f16(largest, high);
                    let (a, b) = halves::join(high, low);
                    hvx::store_f32(even, a);
                    hvx::store_f32(odd, b);
                }
            }
        }
        hvx::store(self.largest, largest);
    }
}

/// Products of a strip of src0 that a task writes.
struct Writing<'a> {
    products: Halves<'a>,
    /// Columns of the result.
    columns: SharedColumns<'a>,
    n: usize,
    /// The first row of the result, and the number of rows.
    first: usize,
    count: usize,
    lines: &'a mut [Line],
    largest: &'a mut Line,
}

impl Writing<'_> {
    #[inline(never)]
    fn run(&mut self) {
        let mut strip = 0;
        if self.n == TILE_DIM {
            strip = self.count / TILE_DIM;
            hvx::widest(WriteTiles {
                from: self.products.first(strip),
                rows: &mut self.columns,
                first: self.first,
                largest: self.largest,
            });
        }
        // A tile that reaches beyond the result is written to `lines`; its part inside is copied.
        for strip in strip..self.count.div_ceil(TILE_DIM) {
            let start = strip * TILE_DIM;
            let elems: &mut [f32] = bytemuck::cast_slice_mut(&mut self.lines[..TILE_DIM]);
            hvx::widest(WriteTiles {
                from: self.products.from(strip).first(1),
                rows: &mut SharedColumns::new(elems, TILE_DIM),
                first: 0,
                largest: self.largest,
            });
            let rows = elems.as_chunks::<TILE_DIM>().0.iter();
            for (i, row) in rows.enumerate().take(self.count - start) {
                let to = self.columns.row(self.first + start + i);
                let n = self.n.min(to.len());
                copy_f32(&mut to[..n], row);
            }
        }
    }
}

/// Computes the product of two matrices that fit each other. Returns `false` if it is to be
/// computed otherwise: `outputs` may have been written.
///
/// - `outputs`: `[N, M, m2, m3]` without gaps
#[inline(never)]
pub(super) fn multiply(
    Machine { engine, vtcm, hmx }: Machine<'_>,
    outputs: &mut [f32],
    [a, b]: [&View<'_>; 2],
) -> bool {
    let ([k, n, ..], [_, m, b2, b3]) = (a.shape.ne, b.shape.ne);
    let [depth, strips, columns] = [k, m, n].map(|n| n.div_ceil(TILE_DIM));
    let is_large = a.shape.dtype == Type::F32 && depth * columns >= LARGE;
    let are_few = m < FEWEST && !is_large;
    if hmx.form() == Form::Vectors || are_few || depth > MAX_TERMS * MAX_DEEP {
        return false;
    }
    let mut arena = Arena::new(vtcm);
    let n_tasks = engine.threads().min(MAX_TASKS).min(columns.max(strips));
    let fixed = 2 + n_tasks * Task::tiles(depth);
    let free = arena.free_tiles().saturating_sub(fixed);
    let together = strips.min(free / (2 * (depth + n_tasks)));
    let Ok(&mut [ref mut negated, ref mut scale]) = arena.tiles("unit matrix", 2) else {
        return false;
    };
    on_diagonal(negated, 0xbc00);
    let scale: &mut [ScaleBlock] = bytemuck::cast_slice_mut(core::slice::from_mut(scale));
    scale[0] = hmx.form().unchanged();
    let mut tasks: [Option<Task<'_>>; MAX_TASKS] = [const { None }; MAX_TASKS];
    let tasks = &mut tasks[..n_tasks];
    for task in &mut *tasks {
        *task = Task::new(&mut arena, depth, together);
    }
    let Some(acts) = take_halves(&mut arena, together * depth).filter(|_| together > 0) else {
        return false;
    };
    hmx.take_fault();
    let mut unit = Unit { hmx, negated };
    engine.on_matrix_thread(|| {
        unit.hmx.clear();
        unit.hmx.load_scale(&scale[0]);
    });
    for row in (0..b2 * b3).flat_map(|plane| {
        (0..strips)
            .step_by(together)
            .map(move |strip| (plane, strip))
    }) {
        let (plane, strip) = row;
        let [i2, i3] = [plane % b2, plane / b2];
        let count = together.min(strips - strip);
        let first = strip * TILE_DIM;
        let mut readings = [const { None }; MAX_TASKS];
        let each = count.div_ceil(n_tasks) * depth;
        let high = acts.high[..count * depth].chunks_mut(each);
        let parts = high.zip(acts.low[..count * depth].chunks_mut(each));
        for (i, ((high, low), (task, reading))) in
            parts.zip(tasks.iter_mut().zip(&mut readings)).enumerate()
        {
            *reading = task.as_mut().map(|task| Reading {
                view: b,
                plane: [i2, i3],
                first: first + i * (each / depth) * TILE_DIM,
                is_turned: false,
                to: HalvesMut { high, low },
                lines: task.lines,
                largest: task.largest.acts,
            });
        }
        engine.step(None, &mut readings, |reading| {
            reading.iter_mut().for_each(Reading::run);
        });
        let acts = acts.get();
        let mut to = SharedColumns::new(&mut *outputs, n);
        for column in (0..columns).step_by(n_tasks) {
            let mut readings = [const { None }; MAX_TASKS];
            let used = n_tasks.min(columns - column);
            for (i, (task, reading)) in tasks[..used].iter_mut().zip(&mut readings).enumerate() {
                *reading = task.as_mut().map(|task| Reading {
                    view: a,
                    plane: repeated_plane([0, i2, i3], &a.shape, &b.shape),
                    first: (column + i) * TILE_DIM,
                    is_turned: true,
                    to: task.weights.lend(),
                    lines: task.lines,
                    largest: task.largest.weights,
                });
            }
            engine.step(None, &mut readings[..used], |reading| {
                reading.iter_mut().for_each(Reading::run);
            });
            engine.on_matrix_thread(|| {
                for task in tasks[..used].iter_mut().flatten() {
                    let weights = task.weights.get();
                    let mut terms: [Term<'_>; MAX_TERMS] =
                        [acts.times(depth, weights, [0; 2], 0); MAX_TERMS];
                    let mut n_terms = 0;
                    for (term, k) in terms.iter_mut().zip((0..depth).step_by(MAX_DEEP)) {
                        let (acts, weights) = (acts.from(k), weights.from(k));
                        *term = acts.times(depth, weights, [0; 2], MAX_DEEP.min(depth - k));
                        n_terms += 1;
                    }
                    let products = task.products.lend();
                    unit.multiply(&terms[..n_terms], [count, 1], products, [1, 0]);
                }
            });
            let mut writings = [const { None }; MAX_TASKS];
            for (i, (task, writing)) in tasks[..used].iter_mut().zip(&mut writings).enumerate() {
                *writing = task.as_mut().map(|task| Writing {
                    products: task.products.get(),
                    columns: to.split_off(TILE_DIM),
                    n: TILE_DIM.min(n - (column + i) * TILE_DIM),
                    first: plane * m + first,
                    count: (count * TILE_DIM).min(m - first),
                    lines: task.lines,
                    largest: task.largest.products,
                });
            }
            engine.step(None, &mut writings[..used], |writing| {
                writing.iter_mut().for_each(Writing::run);
            });
        }
    }
    let is_exact = tasks.iter().flatten().all(|task| task.largest.is_exact());
    is_exact && hmx.take_fault().is_none()
}
