//! ROPE: pairs of a row's elements rotated by angles that depend on the row's position.
//!
//! ```text
//! for each row at position p (index of dimension 2)
//!   for each chunk of 128 pairs
//!     angle  = p · base^(-2 j / n_dims) / factor[j], mixed with its interpolation (YaRN)     when p changes
//!     c, s   = magnitude · cos, sin
//!     y0, y1 = x0 c - x1 s, x0 s + x1 c
//! ```
//!
//! The angles are products of FP32 numbers in ggml's order, so that they equal ggml's to the bit;
//! sine and cosine of each angle up to 2^20 are off by 3e-7 at most. Rows of one position are
//! consecutive (heads are dimension 1), and a task keeps the table of its latest position.

mod angles;
mod rotate;

use angles::{AngleTable, Constants};
pub use angles::{MAX_PAIRS, Rope, SectionOrder, Sections};
use rotate::{RotateAdjacent, RotateHalves, RotateNarrow, RotateRows, rotate};

use super::load;
use crate::error::{Error, Result};
use crate::hvx::{self, Vector};
use crate::ops::copy::{check_indices, checked};
use crate::ops::elementwise::same_shape;
use crate::ops::tensor::{CHUNK, Chunk, Row, Run, Source, Type, View, ViewMut};
use crate::rt::Engine;

/// Elements that form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairs {
    /// Neighbours (ggml's normal mode).
    Adjacent,
    /// Element i and i + n_dims / 2 (ggml's neox mode).
    Halves,
}

/// Most elements of an f32 row that [`rope_set_rows`] rotates in a buffer and writes as a whole.
pub const WHOLE_ROW: usize = 2 * CHUNK;

/// Packets for 32 elements that are rotated.
const ROTATION_PACKETS: usize = 12;
/// Packets for the angles of a token, in heads of 64 elements or more.
const ANGLE_PACKETS: usize = 500;

/// The common part of all rows of a rotation.
struct Turning<'a> {
    src: &'a Source<'a>,
    rope: &'a Rope,
    constants: &'a Constants,
    positions: &'a View<'a>,
    n_tokens: usize,
    factors: &'a Source<'a>,
}

/// A row of any type.
struct RotateRow<'a, 't> {
    turning: &'a Turning<'a>,
    table: &'a mut AngleTable<'t>,
    row: Row<'a>,
}

impl hvx::Kernel for RotateRow<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        self.turning.by_chunks(self.row, self.table);
    }
}

impl Turning<'_> {
    /// Fills the table for a token.
    fn fill(&self, token: usize, table: &mut AngleTable<'_>) {
        table.fill(
            (token, self.n_tokens),
            self.positions,
            self.rope,
            self.constants,
            self.factors,
        );
    }

    /// Prefetches the heads of a token, if there is a token of this number.
    fn fetch(&self, token: usize, plane: usize) {
        if let Source::Apart(view) = self.src
            && token < self.n_tokens
        {
            view.fetch([0, token, plane], view.shape.ne[1]);
        }
    }

    /// Rotates rows of the result in order.
    fn rotate_run(&self, mut run: Run<'_>, table: &mut AngleTable<'_>) {
        self.fill(run.at[1], table);
        let (at, count, n) = (run.at, run.count, run.len());
        self.fetch(at[1] + 1, at[2]);
        let source = match self.src {
            Source::Apart(view) => view.float_rows(at, count),
            _ => Some((&[][..], 0)),
        };
        if let (Some(to), Some(from)) = (run.floats(), source) {
            return if matches!(self.src, Source::InPlace) {
                self.rotate_rows::<true>(table, from, to, [n, count]);
            } else {
                self.rotate_rows::<false>(table, from, to, [n, count]);
            };
        }
        run.for_each_row(|row| self.rotate_row(row, table));
    }

    /// Rotates `count` rows of `n` f32.
    fn rotate_rows<const IN_PLACE: bool>(
        &self,
        table: &AngleTable<'_>,
        from: (&[f32], usize),
        to: (&mut [f32], usize),
        [n, count]: [usize; 2],
    ) {
        let rows = RotateRows::<IN_PLACE> {
            turning: self,
            table,
            from,
            to,
            n,
            count,
        };
        let is_turned = n == 2 * self.rope.n_pairs();
        let is_whole = is_turned && n.is_multiple_of(64);
        match self.rope.pairs {
            RopePairs::Halves if is_whole || is_turned && n > 64 && !IN_PLACE => {
                hvx::widest(RotateHalves(rows));
            }
            RopePairs::Adjacent if is_whole => hvx::widest(RotateAdjacent(rows)),
            _ => hvx::widest(rows),
        }
    }

    /// Rotates the heads of a token, which are f32 without gaps, into the rows of `cell` that
    /// belong to `part`. `scratch` holds one row or more, [`WHOLE_ROW`] elements.
    fn rotate_cell(
        &self,
        cell: usize,
        part: &mut ViewMut<'_>,
        (elems, step): (&[f32], usize),
        (table, scratch): (&AngleTable<'_>, &mut [f32]),
    ) {
        let [n, heads, ..] = part.shape.ne;
        let pairs = self.rope.pairs;
        let is_turned = n == 2 * self.rope.n_pairs();
        if part.shape.dtype == Type::F16
            && is_turned
            && RotateNarrow::takes(pairs, n)
            && let Some(to) = part.rows_mut([0, cell, 0], heads * n)
        {
            let from = (elems, step);
            return hvx::widest(RotateNarrow {
                pairs,
                table,
                from,
                to,
                n,
            });
        }
        let per_turn = scratch.len() / n;
        for first in (0..heads).step_by(per_turn) {
            let count = per_turn.min(heads - first);
            let from = (&elems[first * step..], step);
            self.rotate_rows::<false>(table, from, (&mut *scratch, n), [n, count]);
            let rotated = &scratch[..count * n];
            if part.write_rows([first, cell, 0], rotated) {
                continue;
            }
            for (i, row) in scratch.chunks_exact(n).take(count).enumerate() {
                if let Some(mut out) = part.row([first + i, cell, 0]) {
                    out.write(0, row);
                }
            }
        }
    }

    /// Rotates a row of any type, whose index is that of the source's row and whose token the table
    /// is for.
    fn rotate_row(&self, row: Row<'_>, table: &mut AngleTable<'_>) {
        hvx::widest(RotateRow {
            turning: self,
            table,
            row,
        });
    }
}

impl Turning<'_> {
    /// Rotates a row of any type and length.
    #[inline(always)]
    fn by_chunks(&self, mut row: Row<'_>, table: &mut AngleTable<'_>) {
        let (rope, src) = (self.rope, self.src);
        let AngleTable {
            cosine,
            sine,
            chunks: [a, b, y0, y1],
            ..
        } = table;
        let (cosine, sine) = (&cosine[..], &sine[..]);
        let half = rope.n_pairs();
        for pair in (0..half).step_by(CHUNK / 2) {
            let len = (half - pair).min(CHUNK / 2);
            // The second element is read before the first is written, because rows may be rotated
            // in place.
            match rope.pairs {
                RopePairs::Halves => {
                    let at = rope.first + pair;
                    let x0 = src.read(&row, at..at + len, a);
                    let x1 = src.read(&row, at + half..at + half + len, b);
                    for i in (0..len).step_by(32) {
                        let turn = (load(cosine, pair + i), load(sine, pair + i));
                        let (v0, v1) = rotate(turn, load(x0, i), load(x1, i));
                        set(y0, i, v0);
                        set(y1, i, v1);
                    }
                    row.write(at, &y0[..len]);
                    row.write(at + half, &y1[..len]);
                }
                RopePairs::Adjacent => {
                    let at = rope.first + 2 * pair;
                    let x = src.read(&row, at..at + 2 * len, a);
                    for i in (0..len).step_by(32) {
                        let (x0, x1) = hvx::deal_w(load(x, 2 * i), load(x, 2 * i + 32));
                        let turn = (load(cosine, pair + i), load(sine, pair + i));
                        let (v0, v1) = rotate(turn, x0, x1);
                        let (low, high) = hvx::interleave_w(v0, v1);
                        set(b, 2 * i, low);
                        set(b, 2 * i + 32, high);
                    }
                    row.write(at, &b[..2 * len]);
                }
            }
        }
        if matches!(src, Source::InPlace) {
            return;
        }
        // Elements outside the rotated range are copied.
        for range in [0..rope.first, rope.first + 2 * half..row.len()] {
            for start in range.clone().step_by(CHUNK) {
                let end = range.end.min(start + CHUNK);
                let x = src.read(&row, start..end, a);
                row.write(start, x);
            }
        }
    }
}

/// Writes 32 elements, starting at element `i`.
#[inline(always)]
fn set(chunk: &mut Chunk, i: usize, v: Vector) {
    if let Some(out) = chunk[i..].first_chunk_mut::<32>() {
        hvx::store_f32(out, v);
    }
}

/// Refuses parameters that do not fit the row.
fn check(rope: &Rope, row: usize, positions: &View<'_>, n_positions: usize) -> Result<()> {
    let n_pairs = rope.n_pairs();
    let end = n_pairs
        .checked_mul(2)
        .and_then(|n| n.checked_add(rope.first));
    let fits = end.is_some_and(|end| end <= row) && n_pairs <= MAX_PAIRS;
    let sections = match rope.sections {
        None => true,
        Some(sections) => sections.fits() && rope.pairs == RopePairs::Halves,
    };
    let n_positions = if rope.sections.is_some() {
        n_positions.saturating_mul(4)
    } else {
        n_positions
    };
    let even = rope.n_dims.is_multiple_of(2) && rope.first.is_multiple_of(2);
    // llama.cpp tests support for frequency factors with a rotation of no pairs and a base of 0.
    let base = n_pairs == 0 || rope.freq_base.is_normal() && rope.freq_base > 0.0;
    let yarn = rope.ext_factor == 0.0
        || [rope.freq_scale, rope.beta_fast, rope.beta_slow]
            .iter()
            .all(|x| x.is_normal() && *x > 0.0)
            && rope.n_ctx_orig >= 0
            && rope.freq_base != 1.0;
    let positions = positions.shape.dtype.is_index() && positions.shape.ne[0] >= n_positions;
    if fits && sections && even && base && yarn && positions {
        Ok(())
    } else {
        Err(Error::Operand)
    }
}

/// Rotates the pairs of each row.
///
/// - `src`: the source; positions, i32, one for each index of dimension 2 (with sections: followed
///   by as many for height, for width and for the rest); frequency factors, f32, one for each pair,
///   or nothing
///
/// # Errors
/// `Operand` unless source and result are floats of one shape, and parameters, positions and
/// factors fit it.
pub fn rope(
    engine: &Engine,
    rope: Rope,
    dst: ViewMut<'_>,
    [src, positions, factors]: &[Source<'_>; 3],
) -> Result<()> {
    same_shape(&dst.shape, src)?;
    let positions = positions.apart()?;
    check(&rope, dst.shape.ne[0], &positions, dst.shape.ne[2])?;
    match factors {
        Source::None => {}
        Source::Apart(view)
            if view.shape.dtype.is_float() && view.shape.ne[0] >= rope.n_pairs() => {}
        _ => return Err(Error::Operand),
    }
    turn(engine, &rope, dst, src, &positions, factors, None);
    Ok(())
}

/// Rotates the pairs of each row, and stores it in the cell whose number its token has.
///
/// - `dst`: rows of heads (dimension 1) and cells (dimension 2)
/// - `src`: f32, heads in dimension 1, tokens in dimension 2; positions; numbers of cells, one for
///   each token
///
/// # Errors
/// `Operand` unless source and result are floats with equally long rows and as many heads,
/// parameters and positions fit, and there is a number for each token; `Index` as
/// [`check_indices`].
pub fn rope_set_rows(
    engine: &Engine,
    rope: Rope,
    dst: ViewMut<'_>,
    [src, positions, ids]: &[Source<'_>; 3],
) -> Result<()> {
    let (view, positions, ids) = (src.apart()?, positions.apart()?, ids.apart()?);
    let (n, s) = (dst.shape.ne, view.shape.ne);
    let shapes = n[..2] == s[..2] && n[3] == 1 && s[3] == 1 && ids.shape.ne == [s[2], 1, 1, 1];
    if !shapes || !dst.shape.dtype.is_float() || !view.shape.dtype.is_float() {
        return Err(Error::Operand);
    }
    check(&rope, n[0], &positions, s[2])?;
    check_indices(&ids, n[2])?;
    turn(
        engine,
        &rope,
        dst,
        src,
        &positions,
        &Source::None,
        Some(&ids),
    );
    Ok(())
}

impl Turning<'_> {
    /// Rotates the rows of a part of the result, or those of its cells that tokens have.
    #[inline(never)]
    fn turn(&self, part: &mut ViewMut<'_>, cells: Option<&View<'_>>) {
        const CHUNKS: usize = 7 + WHOLE_ROW / CHUNK;
        let mut memory = hvx::zeros::<{ CHUNKS * CHUNK / 32 }>();
        let [cosine, sine, inverses, a, b, y0, y1, scratch @ ..]: &mut [Chunk; CHUNKS] =
            bytemuck::cast_mut(&mut memory);
        let table = &mut AngleTable {
            token: None,
            cosine,
            sine,
            inverses,
            inexact: 0..0,
            chunks: [a, b, y0, y1],
        };
        table.invert(self.factors, self.rope.n_pairs());
        let Some(cells) = cells else {
            return part.for_each_run(|run| self.rotate_run(run, table));
        };
        for token in 0..self.n_tokens {
            let cell = checked(cells.index(token, [0; 3]));
            // With a single token, the cell cannot belong to another part.
            if self.n_tokens > 1 && !part.may_have([0, cell, 0]) {
                continue;
            }
            self.fill(token, table);
            if token + 1 < self.n_tokens {
                self.fetch(token + 1, 0);
            }
            let heads = match self.src {
                Source::Apart(view) => view.float_rows([0, token, 0], part.shape.ne[1]),
                _ => None,
            };
            let scratch = scratch.as_flattened_mut();
            if let Some(heads) = heads.filter(|_| part.shape.ne[0] <= scratch.len()) {
                self.rotate_cell(cell, part, heads, (table, scratch));
                continue;
            }
            for head in 0..part.shape.ne[1] {
                if let Some(mut row) = part.row([head, cell, 0]) {
                    // The row is read from the token's place, and written to the cell's.
                    row.at = [head, token, 0];
                    self.rotate_row(row, table);
                }
            }
        }
    }
}

/// Rotates the rows of `src` into their places in `dst`, or into those that `cells` names. Operands
/// have been checked.
fn turn(
    engine: &Engine,
    rope: &Rope,
    dst: ViewMut<'_>,
    src: &Source<'_>,
    positions: &View<'_>,
    factors: &Source<'_>,
    cells: Option<&View<'_>>,
) {
    let constants = &Constants::new(rope);
    let n_tokens = match src {
        Source::Apart(view) => view.shape.ne[2],
        _ => dst.shape.ne[2],
    };
    let turning = &Turning {
        src,
        rope,
        constants,
        positions,
        n_tokens,
        factors,
    };
    let [n, heads, ..] = dst.shape.ne;
    let packets = || n.div_ceil(32) * ROTATION_PACKETS;
    match cells {
        None => dst.for_parts(engine, packets, |part| turning.turn(part, None)),
        Some(cells) => {
            let work = || {
                let token = packets().saturating_mul(heads);
                let token = token.saturating_add(ANGLE_PACKETS);
                (token.saturating_mul(n_tokens), n_tokens)
            };
            let place = |token| [0, checked(cells.index(token, [0; 3])), 0];
            dst.for_named_parts(engine, work, place, |part| {
                turning.turn(part, Some(cells));
            });
        }
    }
}
