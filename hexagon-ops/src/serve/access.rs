//! The instructions that access each operand of a command, on which the step of cache operations
//! depends: [`Access`].
//!
//! Operands count as accessed by scalar instructions, which is always correct, so a new operation
//! needs no entry. Large operands of common operations are listed here as accessed by vectors only,
//! which saves cache operations. Their code was checked:
//!
//! 1. elements are f32, f16 or bf16 that follow each other in a row, and are read and written by
//!    vectors, the last ones of a row too if it is whole lines;
//! 2. each piece of a row that a kernel accesses is whole lines: chunks and the columns of tasks
//!    are, and other pieces are checked here;
//! 3. `memcpy` uses vectors for 128 bytes or more (rt/bytes.s).
//!
//! Numbers of rows, positions, chosen experts, sinks, factors of frequencies and blocks of
//! quantized elements are read one by one.

use super::region::Strided;
use crate::layout::{LINE_BYTES, TILE_DIM};
use crate::ops::Op;
use crate::ops::recurrence::Recurrence;
use crate::ops::rows::{Rope, WHOLE_ROW};
use crate::ops::tensor::{Shape, Type};
use crate::rt::cache::Access;
use crate::wire::{SOURCES, WIDE_SOURCES};

/// Returns the access of an operand: vectors if `is_known`, that is, if all of its accesses are
/// known to be vectors.
fn vectors_if(is_known: bool) -> Access {
    if is_known {
        Access::Vector
    } else {
        Access::Scalar
    }
}

/// Returns `true` if elements are floats that follow each other in rows, and a row and a piece of
/// each of these numbers of elements consist of whole lines.
fn is_whole(shape: &Shape, pieces: &[usize]) -> bool {
    let size = shape.dtype.block_bytes();
    // Pieces are parameters and may be any number. A product that wraps around has the same
    // remainder, because a line is a power of two.
    let lines = |elems: &usize| elems.wrapping_mul(size).is_multiple_of(LINE_BYTES);
    let is_dense = shape.dtype.is_float() && shape.has_dense_rows();
    is_dense && lines(&shape.ne[0]) && pieces.iter().all(lines)
}

/// Returns the access of the rows of a product: activations, results, or the other operand of its
/// epilogue. Kernels process 32 columns at a time.
pub(super) fn of_product(rows: &Strided) -> Access {
    vectors_if(rows.row.is_multiple_of(TILE_DIM))
}

/// Returns the access of the queries or the results of an attention.
pub(super) fn of_attention(shape: &Shape) -> Access {
    vectors_if(is_whole(shape, &[]))
}

/// Returns the access of the result and of each source of an operation on tensors.
pub(super) fn of_tensors(
    op: &Op,
    dst: &Shape,
    src: [Option<&Shape>; SOURCES],
) -> (Access, [Access; SOURCES]) {
    let n = dst.ne[0];
    // For operands that are accessed a chunk or a row of the result at a time: the access of each.
    let each = |count: usize, pieces: &[usize]| {
        let of = |shape: &Shape| vectors_if(is_whole(shape, &[n]) && is_whole(shape, pieces));
        let mut access = [Access::Scalar; SOURCES];
        for (access, src) in access.iter_mut().zip(src).take(count) {
            *access = src.map_or(Access::Scalar, of);
        }
        (of(dst), access)
    };
    match op {
        Op::Binary(_) | Op::Unary(_) | Op::Glu(..) | Op::Norm(_) => each(SOURCES, &[]),
        Op::SoftMax(_) => each(2, &[]),
        Op::Rope(rope) => each(1, &pieces(rope)),
        Op::RopeSetRows(rope) => {
            let (of_dst, of_src) = each(1, &pieces(rope));
            match src[0] {
                // Rotated rows are written as whole rows.
                Some(src) if src.dtype == Type::F32 && src.has_dense_rows() && n <= WHOLE_ROW => {
                    (vectors_if(is_whole(dst, &[])), of_src)
                }
                _ => (of_dst, of_src),
            }
        }
        Op::GetRows | Op::SetRows => moved(dst, src, 1),
        Op::Copy => moved(dst, src, 1),
        Op::SsmConv => windows(dst, src),
        // Rows are read 128 elements at a time, and results are written 32 at a time.
        Op::UnpackedMatMul => {
            let of = |shape: &Shape| vectors_if(is_whole(shape, &[]));
            (of(dst), src.map(|src| src.map_or(Access::Scalar, of)))
        }
        _ => (Access::Scalar, [Access::Scalar; SOURCES]),
    }
}

/// Returns the access of the result and of each source of an operation with more sources. For a
/// recurrence only the states are large. It moves them between memory and VTCM, a row at a time.
pub(super) fn of_wide(
    op: &Op,
    dst: &Shape,
    src: [Option<&Shape>; WIDE_SOURCES],
) -> (Access, [Access; WIDE_SOURCES]) {
    let mut access = [Access::Scalar; WIDE_SOURCES];
    let Op::Recurrence(kind) = op else {
        return (Access::Scalar, access);
    };
    // The source with the first state, and the (source, dimension) that holds the columns and the
    // rows of a state.
    let (state, columns, rows) = match kind {
        Recurrence::SsmScan(_) => (0, (0, 0), (0, 1)),
        Recurrence::GatedDelta(_) => (5, (2, 0), (2, 0)),
        Recurrence::GatedLinear(_) => (4, (0, 0), (0, 0)),
        Recurrence::Wkv6 => (5, (0, 0), (0, 0)),
        Recurrence::Wkv7 => (6, (0, 0), (0, 0)),
    };
    let size = |(source, dim): (usize, usize)| src[source].map(|shape: &Shape| shape.ne[dim]);
    let (Some(columns), Some(rows), Some(shape)) = (size(columns), size(rows), src[state]) else {
        return (Access::Scalar, access);
    };
    access[state] = vectors_if(is_whole(shape, &[columns]));
    if matches!(kind, Recurrence::GatedDelta(_)) {
        // Queries, keys and values have one row for each head and token.
        for (access, src) in access.iter_mut().zip(src).take(3) {
            *access = vectors_if(src.is_some_and(|shape| is_whole(shape, &[])));
        }
    }
    (vectors_if(is_whole(dst, &[columns, rows])), access)
}

/// Returns the numbers of elements at which a rotation divides a row: those before the rotated
/// elements, and half of the rotated ones.
fn pieces(rope: &Rope) -> [usize; 2] {
    [rope.first, rope.n_pairs()]
}

/// Returns the access of the result and of the sources of a convolution along tokens: windows of
/// three or four elements are transposed by vectors, 32 channels at a time.
fn windows(dst: &Shape, src: [Option<&Shape>; SOURCES]) -> (Access, [Access; SOURCES]) {
    let is_dense = |src: &Shape| src.dtype == Type::F32 && src.has_dense_rows();
    let is_known = dst.is_gapless()
        && is_whole(dst, &[])
        && src[..2].iter().all(|src| src.is_some_and(is_dense))
        && src[1].is_some_and(|weights| (3..=4).contains(&weights.ne[0]));
    let mut access = [Access::Scalar; SOURCES];
    access[..2].fill(vectors_if(is_known));
    (access[0], access)
}

/// Returns the access of the result and of the first `count` sources of an operation that moves
/// elements between rows: a piece ends where a row of either ends, and is read and written by the
/// same instructions.
fn moved(dst: &Shape, src: [Option<&Shape>; SOURCES], count: usize) -> (Access, [Access; SOURCES]) {
    let all = || src.iter().take(count).flatten().copied().chain([dst]);
    let is_known = all().all(|shape| all().all(|other| is_whole(shape, &[other.ne[0]])));
    let mut access = [Access::Scalar; SOURCES];
    access[..count].fill(vectors_if(is_known));
    (access[0], access)
}
