//! The operations on tensors, and the kernel of each.

use super::add_id::add_id;
use super::concat::concat;
use super::convolution::{Convolution, convolution};
use super::count::count_equal;
use super::elementwise::{Binary, Glu, Unary};
use super::im2col::{Col2im, Im2col, col2im, im2col};
use super::indexer::lightning_indexer;
use super::interpolate::{Interpolation, interpolate};
use super::matmul::Machine;
use super::outer::out_prod;
use super::pad::{Pad, pad};
use super::part::{ChangedPart, change_part};
use super::place::Band;
use super::pool::{Pooling, pool};
use super::recurrence::{Recurrence, recurrence};
use super::rows::{Norm, Order, Rope, SoftMax};
use super::solve::solve;
use super::tensor::{Source, ViewMut};
use super::timestep::embed_times;
use super::{copy, elementwise, hyper, place, rows, unpacked_matmul};
use crate::error::{Error, Result};
use crate::hmx::Hmx;
use crate::layout::Tile;
use crate::rt::Engine;
use crate::wire::WIDE_SOURCES;

/// An operation on tensors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Op {
    /// Two sources, element by element.
    Binary(Binary),
    /// One source, element by element.
    Unary(Unary),
    /// A gated unit; `true` if the halves of a single source are exchanged.
    Glu(Glu, bool),
    /// Normalized rows, then times and plus two further sources.
    Norm(Norm),
    /// Sums of rows; `true` for their means.
    SumRows(bool),
    /// The sum of all elements.
    Sum,
    /// Running sums along rows.
    CumSum,
    /// A convolution along rows.
    SsmConv,
    /// Numbers of the elements in sorted order.
    Sort(Order),
    /// Softmax of rows.
    SoftMax(SoftMax),
    /// Rotary position embedding.
    Rope(Rope),
    /// Rotary position embedding, written to rows by number.
    RopeSetRows(Rope),
    /// Rows by number.
    GetRows,
    /// Rows written to rows by number.
    SetRows,
    /// A copy with conversion of types.
    Copy,
    /// Two sources, joined along a dimension.
    Concat(usize),
    /// The source, repeated.
    Repeat,
    /// The source with padding around it.
    Pad(Pad),
    /// A part of each matrix.
    Band(Band),
    /// A sequence: its first element, and the step to the next one.
    Ramp(f32, f32),
    /// The largest or the mean of windows.
    Pool(Pooling),
    /// Windows of an image as rows.
    Im2col(Im2col),
    /// Windows of a line, added where they overlap.
    Col2im(Col2im),
    /// Planes of another size.
    Interpolate(Interpolation),
    /// Rows with their own elements before and after them, reflected; the number before them.
    Reflect(usize),
    /// The number of the largest element of each row.
    ArgMax,
    /// The solution of triangular equations.
    Solve,
    /// The source plus rows by number.
    AddId,
    /// The product of two matrices in ggml's layouts.
    UnpackedMatMul,
    /// The sum of products of columns and rows.
    OutProd,
    /// Cosines and sines of times; the longest period.
    Timestep(i32),
    /// A copy of the first source, changed in a part.
    Part(ChangedPart),
    /// The number of equal elements.
    CountEqual,
    /// The streams of a token, added with weights: the sum's factor, and `true` for gates.
    HyperPre(f32, bool),
    /// A balanced matrix for each token: the addend of the sums, and the number of rounds.
    HyperComb(f32, u32),
    /// The streams of a token, mixed by a matrix, which only [`run_wide`] computes.
    HyperPost,
    /// Weights of cached positions, which only [`run_wide`] computes.
    LightningIndexer,
    /// Sums of weighted windows, which only [`run_wide`] computes.
    Convolution(Convolution),
    /// A recurrence over tokens, which only [`run_wide`] computes.
    Recurrence(Recurrence),
}

impl Op {
    /// Returns `true` if [`run_in`] uses VTCM.
    #[must_use]
    pub fn uses_vtcm(&self) -> bool {
        matches!(self, Self::UnpackedMatMul)
    }

    /// Returns `true` if parts of the result may stay as they are: states that are older than the
    /// first token.
    #[must_use]
    pub fn may_skip_parts(&self) -> bool {
        match self {
            Self::Recurrence(Recurrence::SsmScan(kept) | Recurrence::GatedDelta(kept)) => *kept > 1,
            _ => false,
        }
    }
}

/// Does the same as [`run`], in VTCM and on the matrix unit where an operation uses them.
///
/// # Errors
/// As [`run`].
pub fn run_in(
    machine: Machine<'_>,
    op: &Op,
    dst: ViewMut<'_>,
    src: &[Source<'_>; 3],
) -> Result<()> {
    if op.uses_vtcm() {
        return unpacked_matmul::mul_mat_in(machine, dst, [&src[0], &src[1]]);
    }
    run(machine.engine, op, dst, src)
}

/// Computes `dst = op(src)` on the engine's threads.
///
/// # Errors
/// `Operand` if an operand is missing or does not fit the others; `Index` if a named row does not
/// exist. Nothing has been written then.
pub fn run(engine: &Engine, op: &Op, dst: ViewMut<'_>, src: &[Source<'_>; 3]) -> Result<()> {
    match *op {
        Op::Binary(binary) => elementwise::binary(engine, binary, dst, [&src[0], &src[1]]),
        Op::Unary(unary) => elementwise::unary(engine, unary, dst, &src[0]),
        Op::Glu(glu, swapped) => elementwise::glu(engine, glu, swapped, dst, [&src[0], &src[1]]),
        Op::Norm(norm) => rows::norm(engine, norm, dst, src),
        Op::SumRows(is_mean) => rows::sum_rows(engine, is_mean, dst, &src[0]),
        Op::Sum => rows::sum_all(engine, dst, &src[0]),
        Op::CumSum => rows::cumulate(engine, dst, &src[0]),
        Op::SsmConv => rows::convolve(engine, dst, [&src[0], &src[1]]),
        Op::Sort(order) => rows::sort(engine, order, dst, &src[0]),
        Op::SoftMax(soft_max) => rows::soft_max(engine, soft_max, dst, src),
        Op::Rope(rope) => rows::rope(engine, rope, dst, src),
        Op::RopeSetRows(rope) => rows::rope_set_rows(engine, rope, dst, src),
        Op::GetRows => copy::get_rows(engine, dst, &src[0], &src[1]),
        Op::SetRows => copy::set_rows(engine, dst, &src[0], &src[1]),
        Op::Copy => copy::copy(engine, dst, &src[0]),
        Op::Concat(dim) => concat(engine, dim, dst, [&src[0], &src[1]]),
        Op::Repeat => copy::repeat(engine, dst, &src[0]),
        Op::Pad(params) => pad(engine, params, dst, &src[0]),
        Op::Band(band) => place::band(engine, band, dst, &src[0]),
        Op::Ramp(start, step) => place::ramp(engine, start, step, dst),
        Op::Pool(params) => pool(engine, params, dst, &src[0]),
        Op::Im2col(params) => im2col(engine, params, dst, &src[0]),
        Op::Col2im(params) => col2im(engine, params, dst, &src[0]),
        Op::Interpolate(params) => interpolate(engine, params, dst, &src[0]),
        Op::Reflect(front) => place::reflect(engine, front, dst, &src[0]),
        Op::ArgMax => rows::arg_max(engine, dst, &src[0]),
        Op::Solve => solve(engine, dst, [&src[0], &src[1]]),
        Op::UnpackedMatMul => unpacked_matmul::mul_mat(engine, dst, [&src[0], &src[1]]),
        Op::OutProd => out_prod(engine, dst, [&src[0], &src[1]]),
        Op::Timestep(period) => embed_times(engine, period, dst, &src[0]),
        Op::Part(part) => change_part(engine, part, dst, [&src[0], &src[1]]),
        Op::CountEqual => count_equal(engine, dst, [&src[0], &src[1]]),
        Op::AddId => add_id(engine, dst, src),
        Op::HyperPre(scale, is_gated) => {
            hyper::pre(engine, (scale, is_gated), dst, [&src[0], &src[1]])
        }
        Op::HyperComb(eps, rounds) => hyper::comb(engine, (eps, rounds), dst, src),
        Op::HyperPost | Op::LightningIndexer | Op::Convolution(_) | Op::Recurrence(_) => {
            Err(Error::Operand)
        }
    }
}

/// Computes `dst = op(src)` for an operation with more sources, on the engine's threads, in VTCM
/// and, if it is given, on the matrix unit.
///
/// # Errors
/// As [`run`]; `VtcmFull` if the VTCM is too small.
pub fn run_wide(
    engine: &Engine,
    vtcm: &mut [Tile],
    hmx: Option<&mut Hmx>,
    op: &Op,
    dst: ViewMut<'_>,
    src: &[Source<'_>; WIDE_SOURCES],
) -> Result<()> {
    match *op {
        Op::Recurrence(kind) => recurrence(engine, vtcm, hmx, kind, dst, src),
        Op::LightningIndexer => lightning_indexer(engine, vtcm, dst, src),
        Op::Convolution(params) => convolution(engine, vtcm, params, dst, src),
        Op::HyperPost => hyper::post(engine, dst, src),
        _ => Err(Error::Operand),
    }
}
