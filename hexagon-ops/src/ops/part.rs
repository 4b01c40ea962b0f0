//! ACC and SET: copy a tensor, and add to a part of the copy, or replace it.

use super::copy::copy;
use super::elementwise::{Binary, binary};
use super::tensor::{Shape, Source, Type, ViewMut};
use crate::error::{Error, Result};
use crate::rt::Engine;

/// The part of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangedPart {
    /// Bytes from one index of the part's dimensions 1, 2 and 3 to the next.
    pub strides: [usize; 3],
    /// Byte of the result at which the part starts.
    pub offset: usize,
    /// `true` if elements of the second source are added, `false` if they replace the others.
    pub is_sum: bool,
}

/// Computes `dst = src[0]`, then adds or writes `src[1]` to the part of the result that has
/// `src[1]`'s dimensions.
///
/// # Errors
/// `Operand` unless all are f32, or i32 that are not added; `src[0]` has the result's shape, and
/// both are without gaps; the part is in the result, and its rows are disjoint.
pub fn change_part(
    engine: &Engine,
    part: ChangedPart,
    mut dst: ViewMut<'_>,
    src: [&Source<'_>; 2],
) -> Result<()> {
    let second = src[1].apart()?.shape;
    let whole = dst.shape;
    let dtype = whole.dtype;
    let types = dtype == Type::F32 || dtype == Type::I32 && !part.is_sum;
    let same = |shape: &Shape| shape.dtype == dtype && shape.ne == whole.ne && shape.is_gapless();
    let first = match src[0] {
        Source::InPlace => true,
        first => same(&first.apart()?.shape),
    };
    let aligned = part
        .strides
        .iter()
        .chain([&part.offset])
        .all(|bytes| bytes.is_multiple_of(dtype.align()));
    if !types || !first || !same(&whole) || second.dtype != dtype || !aligned {
        return Err(Error::Operand);
    }
    let mut shape = Shape {
        dtype,
        ne: second.ne,
        nb: [dtype.block_bytes(), 0, 0, 0],
    };
    for i in 1..4 {
        // A dimension of one index uses no stride, so its stride is normalized.
        shape.nb[i] = if shape.ne[i] == 1 {
            0
        } else {
            part.strides[i - 1]
        };
    }
    // The part is checked here, before the first copy writes anything.
    dst.part(part.offset, shape)?;
    copy(engine, dst.part(0, whole)?, src[0])?;
    let target = dst.part(part.offset, shape)?;
    if part.is_sum {
        binary(engine, Binary::Add, target, [&Source::InPlace, src[1]])
    } else {
        copy(engine, target, src[1])
    }
}
