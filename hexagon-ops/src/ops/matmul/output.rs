//! Writing of results: tiles of the matrix unit to rows of f32, with the epilogue.
//!
//! A tile holds rows 2i and 2i + 1 of 32 columns in its line i, with their elements alternating.
//! One widening multiplication by the rows' f16 factors gives the two rows, scaled, as two vectors,
//! which are stored to the rows. Rows of a tile whose factor is not a normal f16, and rows left
//! over from groups of 8, go through memory one by one.
//!
//! A gate needs about thirty instructions for a vector, and more registers than a group of 8
//! leaves. So the rows of a tile go to memory on the stack, and from there in smaller groups
//! through the gate.

use core::ops::Range;

use super::act::{RowFactors, unpack_tile, widen_scaled};
use super::driver::{MatMul, RowStarts};
use super::epilogue::{Combine, Epilogue, Finish, GATE_ROWS};
use crate::hvx::{self, RowGroups, Vector};
use crate::layout::{Line, TILE_DIM, Tile};

/// Most tasks that write results in one step.
pub(super) const MAX_WRITE: usize = 4;

/// The results of some rows of a chunk of M; all tiles of 32 rows but the last are whole.
pub(super) struct Output<'o> {
    /// The results, starting with the first of the rows; all results if rows are listed.
    dst: &'o mut [f32],
    rows: RowStarts<'o>,
    epilogue: Option<Epilogue<'o>>,
    /// Number of the first row, counted from the start of `dst` and from the first row of the
    /// product.
    first: [usize; 2],
    /// Number of rows.
    n_rows: usize,
    /// Columns of the product.
    n: usize,
    /// First of the chunk's tiles that belongs to these rows.
    first_tile: usize,
    factors: &'o [RowFactors],
}

impl<'o> Output<'o> {
    /// Divides the rows `rows` into parts of about the same size: one for each thread, or a single
    /// part if rows are listed and may be anywhere in memory.
    pub(super) fn parts(
        job: &'o mut MatMul<'_>,
        rows: Range<usize>,
        factors: &'o [RowFactors],
        threads: usize,
    ) -> [Option<Self>; MAX_WRITE] {
        let n = job.layout.n();
        let (stride, parts) = match job.dst_rows {
            RowStarts::Strided(stride) => (stride, threads.clamp(1, MAX_WRITE)),
            RowStarts::Listed(_) => (0, 1),
        };
        let per_part = factors.len().div_ceil(parts);
        let mut rest = &mut job.dst[rows.start * stride..];
        let mut parts = factors.chunks(per_part).enumerate();
        core::array::from_fn(|_| {
            let (index, factors) = parts.next()?;
            let first_tile = index * per_part;
            let start = rows.start + first_tile * TILE_DIM;
            let n_rows = (factors.len() * TILE_DIM).min(rows.end - start);
            let whole = core::mem::take(&mut rest);
            // The last part gets the whole rest of the slice, which is shorter than a full stride:
            // the last row ends with its last column.
            let dst = if start + n_rows < rows.end {
                let (now, later) = whole.split_at_mut(n_rows * stride);
                rest = later;
                now
            } else {
                whole
            };
            Some(Self {
                dst,
                rows: job.dst_rows,
                epilogue: job.epilogue,
                first: [if stride == 0 { start } else { 0 }, start],
                n_rows,
                n,
                first_tile,
                factors,
            })
        })
    }

    /// Writes the tiles of the strips that begin at column `n0`. A strip has `m_tiles` tiles, one
    /// for every 32 rows of the chunk.
    pub(super) fn write(&mut self, tiles: &[Tile], m_tiles: usize, n0: usize) {
        for (s, strip) in tiles.chunks(m_tiles).enumerate() {
            let n0 = n0 + s * TILE_DIM;
            let columns = n0..self.n.min(n0 + TILE_DIM);
            let strip = &strip[self.first_tile..];
            let (factors, n_rows) = (self.factors, self.n_rows);
            let epilogue = self.epilogue;
            if let Some((rows, other)) = self.whole(&columns) {
                let strip = WriteStrip {
                    tiles: &strip[..factors.len()],
                    factors,
                    rows,
                    n_rows,
                    other,
                };
                match epilogue {
                    Some(gate) if gate.f != Combine::Add => hvx::widest(GateStrip { strip, gate }),
                    _ => hvx::widest(strip),
                }
                continue;
            }
            for (mt, (tile, factors)) in strip.iter().zip(factors).enumerate() {
                let n_rows = TILE_DIM.min(self.n_rows - mt * TILE_DIM);
                let first = self.first.map(|first| first + mt * TILE_DIM);
                self.write_row_by_row(tile, factors, first, n_rows, &columns);
            }
        }
    }

    /// Returns the places of a strip's results and of the epilogue's other operand, if there are 32
    /// columns and all rows have the same distance.
    fn whole(&mut self, columns: &Range<usize>) -> Option<(Strip<&mut [f32]>, Option<Other<'_>>)> {
        let RowStarts::Strided(stride) = self.rows else {
            return None;
        };
        if columns.len() < TILE_DIM || stride < TILE_DIM {
            return None;
        }
        let [at, m] = self.first;
        let other = match self.epilogue.map(|epilogue| epilogue.other) {
            None => None,
            Some(None) => Some(Other::InPlace),
            // All rows use the same bias, so the stride is 0.
            Some(Some((elems, RowStarts::Strided(stride))))
                if stride == 0 || stride >= TILE_DIM =>
            {
                let elems = &elems[m * stride + columns.start..];
                Some(Other::Apart(Strip { elems, stride }))
            }
            Some(Some(_)) => return None,
        };
        let start = at * stride + columns.start;
        let elems = &mut self.dst[start..start + (self.n_rows - 1) * stride + TILE_DIM];
        Some((Strip { elems, stride }, other))
    }

    /// Writes a tile whose rows are shorter than 32 columns or may be anywhere.
    fn write_row_by_row(
        &mut self,
        tile: &Tile,
        factors: &RowFactors,
        first: [usize; 2],
        n_rows: usize,
        columns: &Range<usize>,
    ) {
        let mut rows = hvx::zeros::<TILE_DIM>();
        let rows: &mut [[f32; TILE_DIM]; TILE_DIM] = bytemuck::cast_mut(&mut rows);
        unpack_tile(tile, factors, rows);
        for (i, row) in rows[..n_rows].iter().enumerate() {
            let [at, m] = first.map(|first| first + i);
            let finish = self.epilogue.map_or(Finish::WRITE, |epilogue| {
                epilogue.of_row(m, columns.start, columns.end)
            });
            let start = self.rows.start(at) + columns.start;
            finish.put(row, &mut self.dst[start..start + columns.len()]);
        }
    }
}

/// Columns of consecutive rows: the first row's begin with the first of `elems`.
struct Strip<E> {
    elems: E,
    /// Elements from one row to the next.
    stride: usize,
}

/// The other operand of an epilogue.
enum Other<'a> {
    /// The values that the memory of the results has before.
    InPlace,
    /// Separate rows, as many as the results have.
    Apart(Strip<&'a [f32]>),
}

/// Writes `n_rows` rows of a strip's tiles, 32 columns each.
struct WriteStrip<'a> {
    tiles: &'a [Tile],
    factors: &'a [RowFactors],
    rows: Strip<&'a mut [f32]>,
    n_rows: usize,
    other: Option<Other<'a>>,
}

/// Lines whose rows are written together, and these rows.
const LINES: usize = 4;
const ROWS: usize = 2 * LINES;

/// Returns the rows of some lines, times f16 factors. The products are exact.
#[inline(always)]
fn results(lines: &[Line; LINES], halves: &[u32; LINES]) -> [Vector; ROWS] {
    let mut rows = [hvx::splat_w(0); ROWS];
    for (i, (line, halves)) in lines.iter().zip(halves).enumerate() {
        let factors = hvx::splat_w(halves.cast_signed());
        let (even, odd) = hvx::widen_mul_f16(hvx::load(line), factors);
        rows[2 * i] = even;
        rows[2 * i + 1] = odd;
    }
    rows
}

/// Numbers that [`WriteStrip::write`] adds: none, the values that the memory of the results has
/// before, or those of other rows.
const NOTHING: u8 = 0;
const IN_PLACE: u8 = 1;
const APART: u8 = 2;

impl WriteStrip<'_> {
    /// Writes the rows; `other` are the rows that are added, if they are elsewhere.
    #[inline(always)]
    fn write<const ADDEND: u8>(self, other: Strip<&[f32]>) {
        let Strip { elems, stride } = self.rows;
        // Rows can be addressed by vectors if their length is a whole number of vectors.
        let whole = stride.is_multiple_of(TILE_DIM) && other.stride.is_multiple_of(TILE_DIM);
        let (step, other_step) = (stride / TILE_DIM, other.stride / TILE_DIM);
        let mut n_rows = self.n_rows;
        for (t, (tile, factors)) in self.tiles.iter().zip(self.factors).enumerate() {
            let first = t * TILE_DIM;
            let rest = elems.get_mut(first * stride..).unwrap_or_default();
            let others = other.elems.get(first * other.stride..).unwrap_or_default();
            let lines = tile.0.as_chunks::<LINES>().0;
            let groups = n_rows.min(TILE_DIM) / ROWS;
            let added = RowGroups::<ROWS>::new(others.as_chunks().0, other_step, groups);
            let halves = factors
                .halves()
                .filter(|_| whole && (ADDEND != APART || added.is_some()));
            let is_written = halves.is_some_and(|halves| {
                let halves = halves.as_chunks().0;
                let vectors = rest.as_chunks_mut().0;
                hvx::update_rows::<ROWS>(vectors, step, groups, |group, before| {
                    let rows = results(&lines[group], &halves[group]);
                    match (ADDEND, added) {
                        (IN_PLACE, _) => sums(rows, before),
                        (APART, Some(added)) => sums(rows, added.load(group)),
                        _ => rows,
                    }
                })
            });
            let done = if is_written { groups } else { 0 };
            for (group, lines) in lines.iter().enumerate().skip(done) {
                let first = group * ROWS;
                let rest = rest.get_mut(first * stride..).unwrap_or_default();
                if rest.is_empty() {
                    return;
                }
                let others = others.get(first * other.stride..).unwrap_or_default();
                let factors = &factors.wide().as_chunks().0[group];
                last_rows::<ADDEND>(lines, factors, (rest, stride), (others, other.stride));
            }
            n_rows = n_rows.saturating_sub(TILE_DIM);
        }
    }
}

/// Returns the sums of rows.
#[inline(always)]
fn sums(mut rows: [Vector; ROWS], added: [Vector; ROWS]) -> [Vector; ROWS] {
    for (row, added) in rows.iter_mut().zip(added) {
        *row = hvx::add_f32(*row, added);
    }
    rows
}

/// Writes rows one by one, as many as there are places: the last of a product, rows that are not
/// whole vectors, and those of tiles whose factors are not f16.
#[inline(always)]
fn last_rows<const ADDEND: u8>(
    lines: &[Line; LINES],
    factors: &[[f32; 2]; LINES],
    (rest, stride): (&mut [f32], usize),
    (others, other_stride): (&[f32], usize),
) {
    let mut memory = hvx::zeros::<ROWS>();
    let rows: &mut [[f32; TILE_DIM]; ROWS] = bytemuck::cast_mut(&mut memory);
    for ((pair, line), factors) in rows
        .as_chunks_mut::<2>()
        .0
        .iter_mut()
        .zip(lines)
        .zip(factors)
    {
        for (row, vector) in pair.iter_mut().zip(widen_scaled(line, *factors)) {
            hvx::store_f32(row, vector);
        }
    }
    for (i, (row, out)) in rows.iter().zip(rest.chunks_mut(stride)).enumerate() {
        let Some(out) = out.first_chunk_mut() else {
            return;
        };
        let result = hvx::load_f32(row);
        let other = match ADDEND {
            IN_PLACE => Some(hvx::load_f32(out)),
            // The driver has checked that both have this number of rows.
            APART => {
                let other = others.get(i * other_stride..).unwrap_or_default();
                other.first_chunk().map(hvx::load_f32)
            }
            _ => None,
        };
        match other {
            Some(other) => hvx::store_f32(out, hvx::add_f32(result, other)),
            None => hvx::store_f32(out, result),
        }
    }
}

impl hvx::Kernel for WriteStrip<'_> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        let none = Strip {
            elems: &[][..],
            stride: 0,
        };
        match self.other.take() {
            None => self.write::<NOTHING>(none),
            Some(Other::InPlace) => self.write::<IN_PLACE>(none),
            Some(Other::Apart(other)) => self.write::<APART>(other),
        }
    }
}

/// Writes the rows of a strip's tiles through a gate.
struct GateStrip<'a> {
    strip: WriteStrip<'a>,
    gate: Epilogue<'a>,
}

impl hvx::Kernel for GateStrip<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let WriteStrip {
            tiles,
            factors,
            rows: Strip { elems, stride },
            n_rows,
            other,
        } = self.strip;
        let (apart, other_stride) = match other {
            Some(Other::Apart(Strip { elems, stride })) => (Some(elems), stride),
            _ => (None, 0),
        };
        let mut memory = hvx::zeros::<TILE_DIM>();
        let results: &mut [[f32; TILE_DIM]; TILE_DIM] = bytemuck::cast_mut(&mut memory);
        for (t, (tile, factors)) in tiles.iter().zip(factors).enumerate() {
            let first = t * TILE_DIM;
            let Some(n_rows) = n_rows.checked_sub(first).filter(|rows| *rows > 0) else {
                return;
            };
            let n_rows = n_rows.min(TILE_DIM);
            unpack_tile(tile, factors, results);
            let rest = elems.get_mut(first * stride..).unwrap_or_default();
            let others = apart.map(|apart| apart.get(first * other_stride..).unwrap_or_default());
            let is_whole = stride.is_multiple_of(TILE_DIM) && other_stride.is_multiple_of(TILE_DIM);
            let groups = if is_whole { n_rows / GATE_ROWS } else { 0 };
            let step = stride / TILE_DIM;
            let is_written = (self.gate).put_groups(
                results,
                (rest.as_chunks_mut().0, step),
                others.map(|others| (others.as_chunks().0, other_stride / TILE_DIM)),
                groups,
            );
            let done = if is_written { groups * GATE_ROWS } else { 0 };
            for (i, row) in results[..n_rows].iter().enumerate().skip(done) {
                let out = rest.get_mut(i * stride..).unwrap_or_default();
                let Some(out) = out.first_chunk_mut::<TILE_DIM>() else {
                    return;
                };
                let other =
                    others.and_then(|others| others.get(i * other_stride..)?.get(..TILE_DIM));
                self.gate.finish(other).put(row, out);
            }
        }
    }
}
