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
//! sine and cosine are exact to FP32 for each angle. Rows of one position are consecutive (heads
//! are dimension 1), and a task keeps the table of its latest position.

mod angles;

use angles::{AngleTable, Constants, Positions};
pub use angles::{MAX_PAIRS, Rope, SectionOrder, Sections};

use super::load;
use crate::error::{Error, Result};
use crate::hvx::{self, Vector};
use crate::ops::copy::{check_indices, checked};
use crate::ops::elementwise::same_shape;
use crate::ops::tensor::{CHUNK, Chunk, Row, Source, View, ViewMut};
use crate::rt::Engine;

/// Elements that form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairs {
    /// Neighbours (ggml's normal mode).
    Adjacent,
    /// Element i and i + n_dims / 2 (ggml's neox mode).
    Halves,
}

/// The arguments of [`rope`] for one row.
struct RopeRow<'a, 't> {
    row: Row<'a>,
    src: &'a Source<'a>,
    rope: &'a Rope,
    constants: &'a Constants,
    table: &'a mut AngleTable<'t>,
    position: Positions,
    factors: &'a Source<'a>,
}

impl hvx::Kernel for RopeRow<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<const FUSED: bool>(mut self) {
        let rope = self.rope;
        self.table.fill(
            self.row.at[1],
            self.position,
            rope,
            self.constants,
            self.factors,
        );
        let AngleTable {
            cosine,
            sine,
            chunks: [a, b, y0, y1],
            ..
        } = self.table;
        let (cosine, sine) = (&cosine[..], &sine[..]);
        let half = rope.n_pairs();
        for pair in (0..half).step_by(CHUNK / 2) {
            let len = (half - pair).min(CHUNK / 2);
            // The second read happens before the first write, because rows are rotated in place.
            match rope.pairs {
                RopePairs::Halves => {
                    let at = rope.first + pair;
                    let x0 = self.src.read(&self.row, at..at + len, a);
                    let x1 = self.src.read(&self.row, at + half..at + half + len, b);
                    for i in (0..len).step_by(32) {
                        let turn = (load(cosine, pair + i), load(sine, pair + i));
                        let (v0, v1) = rotate(turn, load(x0, i), load(x1, i));
                        set(y0, i, v0);
                        set(y1, i, v1);
                    }
                    self.row.write(at, &y0[..len]);
                    self.row.write(at + half, &y1[..len]);
                }
                RopePairs::Adjacent => {
                    let at = rope.first + 2 * pair;
                    let x = self.src.read(&self.row, at..at + 2 * len, a);
                    for i in (0..len).step_by(32) {
                        let (x0, x1) = hvx::deal_w(load(x, 2 * i), load(x, 2 * i + 32));
                        let turn = (load(cosine, pair + i), load(sine, pair + i));
                        let (v0, v1) = rotate(turn, x0, x1);
                        let (low, high) = hvx::interleave_w(v0, v1);
                        set(b, 2 * i, low);
                        set(b, 2 * i + 32, high);
                    }
                    self.row.write(at, &b[..2 * len]);
                }
            }
        }
        if matches!(self.src, Source::InPlace) {
            return;
        }
        // Elements outside the rotated range are copied.
        for range in [0..rope.first, rope.first + 2 * half..self.row.len()] {
            for start in range.clone().step_by(CHUNK) {
                let end = range.end.min(start + CHUNK);
                let x = self.src.read(&self.row, start..end, a);
                self.row.write(start, x);
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

/// Returns the pairs turned by angles with cosines `c` and sines `s`.
#[inline(always)]
fn rotate((c, s): (Vector, Vector), x0: Vector, x1: Vector) -> (Vector, Vector) {
    (
        hvx::sub_f32(hvx::mul_f32(x0, c), hvx::mul_f32(x1, s)),
        hvx::add_f32(hvx::mul_f32(x0, s), hvx::mul_f32(x1, c)),
    )
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
    // llama.cpp asks about frequency factors with a rotation of no pairs, and a base of 0.
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

/// Runs a row: one copy of the code for rows in order and rows by number.
#[inline(never)]
fn run_row(kernel: RopeRow<'_, '_>) {
    hvx::widest(kernel);
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
    dst.for_parts(engine, |part| {
        let mut memory = hvx::zeros::<{ 6 * CHUNK / 32 }>();
        let [cosine, sine, a, b, y0, y1]: &mut [Chunk; 6] = bytemuck::cast_mut(&mut memory);
        let table = &mut AngleTable {
            token: None,
            cosine,
            sine,
            chunks: [a, b, y0, y1],
        };
        let mut turn_row = |row: Row<'_>| {
            let mut position = [0; 4];
            let n_positions = if rope.sections.is_some() { 4 } else { 1 };
            for (i, position) in position.iter_mut().enumerate().take(n_positions) {
                *position = positions.index(row.at[1] + i * n_tokens, [0; 3]);
            }
            run_row(RopeRow {
                position,
                row,
                src,
                rope,
                constants,
                table,
                factors,
            });
        };
        let Some(cells) = cells else {
            return part.for_each_row(turn_row);
        };
        for token in 0..n_tokens {
            let cell = checked(cells.index(token, [0; 3]));
            for head in 0..part.shape.ne[1] {
                if let Some(mut row) = part.row([head, cell, 0]) {
                    // The place from which the row is read.
                    row.at = [head, token, 0];
                    turn_row(row);
                }
            }
        }
    });
}
