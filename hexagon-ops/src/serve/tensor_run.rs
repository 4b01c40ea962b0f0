//! Execution of a command for operations on tensors that was checked: makes the operands visible to
//! the DSP, and runs [`crate::ops::run`].
//!
//! Cache operations of GET_ROWS and SET_ROWS touch only the rows that are named, because a table of
//! embeddings or a cache of keys is larger than the data cache. A table as long as the rows that
//! are named is read as a whole.

use core::ops::Range;

use super::Platform;
use super::coherence::{Cache, CachedRanges};
use super::detail::{Failure, OPERAND, ROW};
use super::tensor_op::BoundTensor;
use crate::ops::matmul::Machine;
use crate::ops::tensor::{Shape, Source, Type, View, ViewMut};
use crate::ops::{Op, run_in};
use crate::rt::cache::Access;
use crate::rt::memory::{Addresses, Bound, CheckedOperands, Operands};
use crate::wire::SOURCES;

/// A command whose fields were checked, in decoded form.
#[derive(Clone, Copy, Debug)]
pub(super) struct CheckedOp {
    pub(super) op: Op,
    pub(super) dst: CheckedTensor,
    /// Dimensions of the result as [`Shape::row_order`] returns them.
    pub(super) order: [usize; 3],
    pub(super) src: [CheckedTensor; SOURCES],
    pub(super) operands: CheckedOperands<SOURCES>,
}

/// A tensor without its bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct CheckedTensor {
    place: Presence,
    is_gapless: bool,
    /// Instructions that access the elements.
    access: Access,
    shape: Shape,
}

/// The memory of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Presence {
    /// There is no such tensor.
    None,
    /// The result's own.
    InPlace,
    /// Bytes that no other operand writes.
    Apart,
}

impl CheckedTensor {
    /// A source that the operation does not have.
    pub(super) const NONE: Self = Self {
        place: Presence::None,
        is_gapless: false,
        access: Access::Scalar,
        shape: Shape {
            dtype: Type::F32,
            ne: [1; 4],
            nb: [0; 4],
        },
    };

    /// Returns a tensor; `is_apart` is `false` for a source that is the result.
    pub(super) fn new(shape: Shape, is_apart: bool, access: Access) -> Self {
        Self {
            place: if is_apart {
                Presence::Apart
            } else {
                Presence::InPlace
            },
            is_gapless: shape.is_gapless(),
            access,
            shape,
        }
    }

    fn with_bytes<'a>(&self, bound: Bound<'a>) -> BoundTensor<'a> {
        BoundTensor {
            shape: self.shape,
            bound,
        }
    }

    /// Returns `true` if there is such a tensor.
    pub(super) fn is_present(&self) -> bool {
        self.place != Presence::None
    }

    pub(super) fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Makes the bytes visible to the processor.
    pub(super) fn read(&self, bound: &Bound<'_>, cache: &mut Cache<'_, impl Platform>) {
        if self.is_gapless {
            cache.read(bound, bound.range(), self.access);
        } else {
            self.with_bytes(*bound).read(self.access, cache);
        }
    }

    /// Makes bytes visible that share cache lines with the result.
    pub(super) fn prepare(&self, bound: &Bound<'_>, cache: &mut Cache<'_, impl Platform>) {
        if self.is_gapless {
            cache.read_edges(bound, &bound.range());
        } else {
            self.with_bytes(*bound).prepare(cache);
        }
    }

    /// Remembers that the result was written.
    pub(super) fn written(&self, bound: &Bound<'_>, cache: &mut Cache<'_, impl Platform>) {
        if self.is_gapless {
            cache.written(bound, &bound.range(), self.access);
        } else {
            self.with_bytes(*bound).written(self.access, cache);
        }
    }

    /// Calls `f` with the bytes of all rows that are named.
    fn named_rows(
        &self,
        bound: &Bound<'_>,
        named: &Named<'_>,
        operands: &Operands<'_, SOURCES>,
        mut f: impl FnMut(Range<usize>),
    ) -> Result<(), Failure> {
        let numbers = operands.source(named.source).ok_or(Failure::bad(OPERAND))?;
        let ids = View::bound(numbers, *named.shape);
        let shape = &self.shape;
        let first = bound.range().start;
        let bytes = shape.row_bytes();
        let n0 = ids.shape.ne[0];
        let index = |i: usize, at: [usize; 3], limit: usize| {
            let index = usize::try_from(ids.index(i, at)).unwrap_or(usize::MAX);
            (index < limit).then_some(index).ok_or(Failure::bad(ROW))
        };
        if !ids.shape.dtype.is_index() {
            return Err(Failure::bad(OPERAND));
        }
        if named.whole_planes {
            let n_rows = shape.ne[1];
            let is_dense = n_rows == 1 || shape.nb[1] == bytes;
            let (count, bytes) = match is_dense {
                true => (1, n_rows * bytes),
                false => (n_rows, bytes),
            };
            for i in 0..n0 {
                let plane = index(i, [0; 3], shape.ne[2])?;
                let start = first + plane * shape.nb[2];
                for row in 0..count {
                    let start = start + row * shape.nb[1];
                    f(start..start + bytes);
                }
            }
            return Ok(());
        }
        if named.shape.ne == [1; 4] && named.planes == [1; 2] {
            let start = first + index(0, [0; 3], shape.ne[1])? * shape.nb[1];
            f(start..start + bytes);
            return Ok(());
        }
        // Consecutive rows, such as those of a prompt in a cache, are joined to one range.
        let mut rows = 0..0;
        for i3 in 0..named.planes[1] {
            for i2 in 0..named.planes[0] {
                for i in 0..n0 {
                    let row = index(i, [i2, i3, 0], shape.ne[1])?;
                    let start = first + shape.row([row, i2, i3]);
                    if start != rows.end {
                        if !rows.is_empty() {
                            f(rows);
                        }
                        rows = start..start;
                    }
                    rows.end = start + bytes;
                }
            }
        }
        if !rows.is_empty() {
            f(rows);
        }
        Ok(())
    }
}

/// The rows of a tensor that a source names by their numbers.
#[derive(Clone, Copy)]
struct Named<'a> {
    /// Index of the source that holds the numbers.
    source: usize,
    /// Shape of the numbers.
    shape: &'a Shape,
    /// Planes in dimensions 2 and 3 that the numbers are repeated for.
    planes: [usize; 2],
    /// `true` if a number is an index of dimension 2 and names all rows of dimension 1.
    whole_planes: bool,
}

impl Named<'_> {
    /// Returns `true` if a table has more bytes than the rows that are named, or has gaps, so that
    /// it is not read as a whole.
    fn are_few(&self, table: &CheckedTensor) -> bool {
        let shape = table.shape();
        let named = self.shape.elems().saturating_mul(shape.row_bytes());
        !table.is_gapless || shape.bytes().is_none_or(|bytes| bytes > named)
    }
}

impl CheckedOp {
    /// Returns the rows that a source names, if this is an operation on such rows.
    fn named(&self) -> Option<Named<'_>> {
        let source = match &self.op {
            Op::GetRows | Op::SetRows => 1,
            Op::RopeSetRows(_) => 2,
            _ => return None,
        };
        let src = &self.src[source];
        (src.place != Presence::None).then_some(Named {
            source,
            shape: &src.shape,
            planes: [self.dst.shape.ne[2], self.dst.shape.ne[3]],
            whole_planes: matches!(self.op, Op::RopeSetRows(_)),
        })
    }

    /// Executes the command on its operands; returns the addresses that it wrote to.
    pub(super) fn run(
        &self,
        mut operands: Operands<'_, SOURCES>,
        (platform, ranges): (&mut impl Platform, &mut CachedRanges),
        machine: Machine<'_>,
    ) -> Result<Addresses, Failure> {
        let mut cache = Cache {
            mappings: operands.mappings(),
            platform,
            ranges,
        };
        let cache = &mut cache;
        let to = operands.dst();
        let named = self.named();
        let sets_rows = matches!(self.op, Op::SetRows | Op::RopeSetRows(_));
        if let Some(named) = &named
            && let Some(bound) = operands.bound(named.source)
        {
            self.src[named.source].read(&bound, cache);
        }
        for (i, src) in self.src.iter().enumerate() {
            let bound = match src.place {
                Presence::None => continue,
                Presence::InPlace => Some(to),
                Presence::Apart => operands.bound(i),
            };
            let Some(bound) = bound else { continue };
            match &named {
                Some(named) if i == 0 && matches!(self.op, Op::GetRows) => {
                    if named.shape.ne != [1; 4] {
                        if cache.holds(&bound, src.access) {
                            // The operand is a result of this submission.
                            continue;
                        }
                        if !named.are_few(src) {
                            src.read(&bound, cache);
                            continue;
                        }
                    }
                    src.named_rows(&bound, named, &operands, |range| {
                        cache.read(&bound, range, src.access);
                    })?;
                }
                Some(named) if i == named.source => {}
                _ => src.read(&bound, cache),
            }
        }
        match &named {
            Some(named) if sets_rows => self.dst.named_rows(&to, named, &operands, |range| {
                cache.read_edges(&to, &range);
            })?,
            _ => self.dst.prepare(&to, cache),
        }

        let (bytes, slices) = operands.slices();
        let mut views = [Source::None; SOURCES];
        for ((view, bytes), src) in views.iter_mut().zip(slices).zip(&self.src) {
            match (src.place, bytes) {
                (Presence::Apart, Some(bytes)) => {
                    *view = Source::Apart(View::bound(bytes, src.shape));
                }
                (Presence::InPlace, _) => *view = Source::InPlace,
                _ => {}
            }
        }
        let dst = ViewMut::bound(bytes, self.dst.shape, self.order);
        let done = run_in(machine, &self.op, dst, &views);
        match &named {
            Some(named) if sets_rows => {
                self.dst.named_rows(&to, named, &operands, |range| {
                    cache.written(&to, &range, self.dst.access);
                })?;
            }
            _ => self.dst.written(&to, cache),
        }
        done.map_err(Failure::from)?;
        Ok(to.addresses())
    }
}
