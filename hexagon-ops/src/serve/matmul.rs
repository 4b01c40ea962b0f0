//! The commands for products with packed weights: checks the fields, makes the operands visible to
//! the DSP, and cuts the command into products of [`crate::ops::matmul`].

use bytemuck::{Pod, Zeroable};

use super::Platform;
use super::access::of_product;
use super::coherence::{Cache, CachedRanges};
use super::detail::{
    self, ALIGNMENT, BOUNDS, Failure, KERNEL_NUMBER, LAYOUT, PLANES, RESERVED, SHAPE,
};
use super::region::{BoundRows, Strided, accepts_rows};
use crate::layout::{LINE_BYTES, Line, MatrixLayout, WeightType};
use crate::ops::matmul::{Combine, Dots, Epilogue, Machine, MatMul, Prepared, RowStarts};
use crate::rt::memory::{Addresses, Bound, CheckedOperands, LentBuffers, Operands, Table};
use crate::wire::{self, RowsF32};

/// Maximum number of elements along K. With more, a row of tiles fits in no VTCM, and sizes could
/// exceed 32 bits.
const MAX_K: u32 = 1 << 20;
/// Maximum number of rows of one product, so that the planner's sizes fit in 32 bits. More rows are
/// several products.
const MAX_ROWS: usize = 1 << 16;
/// Activations of the last product that are resident in VTCM. The next product may multiply the
/// same ones: Q, K and V do, and so do gate and up.
#[derive(Clone, Copy, Debug)]
pub(super) struct ResidentActs {
    addresses: Addresses,
    rows: Strided,
    form: Prepared,
}

/// Activations that are resident in VTCM, if any. `None` has the number 0, so that a new
/// [`super::State`] is all zeros, which need no space in the library's file.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
pub(super) enum Resident {
    None = 0,
    Acts(ResidentActs),
}

impl Resident {
    /// Returns the activations, and forgets them.
    pub(super) fn take(&mut self) -> Option<ResidentActs> {
        match core::mem::replace(self, Self::None) {
            Self::None => None,
            Self::Acts(acts) => Some(acts),
        }
    }

    /// Forgets the activations if `is_changed` returns `true` for them.
    pub(super) fn forget_if(&mut self, is_changed: impl FnOnce(&ResidentActs) -> bool) {
        if let Self::Acts(acts) = self
            && is_changed(acts)
        {
            *self = Self::None;
        }
    }
}

impl ResidentActs {
    /// Returns `true` if a command that writes to `written` changes the activations.
    pub(super) fn is_changed_by(&self, written: Addresses) -> bool {
        self.addresses.overlaps(written)
    }

    /// Returns `true` if `act` are the activations.
    fn is(&self, act: &BoundRows<'_>) -> bool {
        self.addresses == act.bound.addresses() && self.rows == act.rows
    }
}

/// Weights whose fields are right, and the bytes that hold them.
pub(super) struct BoundWeights<'a> {
    pub(super) layout: MatrixLayout,
    pub(super) bound: Bound<'a>,
    slices: [usize; 2],
}

/// Checks the weights of a command and resolves their buffer.
pub(super) fn weights<'a>(
    weights: &wire::Weights,
    buffers: &LentBuffers<'a>,
) -> Result<BoundWeights<'a>, Failure> {
    let weight = WeightType::ALL
        .into_iter()
        .find(|weight| weight.layout_id().0 == weights.layout)
        .ok_or(Failure::bad(LAYOUT))?;
    let [s2, s3] = weights.slices;
    if weights.k == 0 || weights.k > MAX_K || weights.n == 0 || s2 == 0 || s3 == 0 {
        return Err(Failure::bad(SHAPE));
    }
    if !weights.offset.is_multiple_of(LINE_BYTES as u64) {
        return Err(Failure::bad(ALIGNMENT));
    }
    let bounds = Failure::bad(BOUNDS);
    let size = |value: u32| usize::try_from(value).map_err(|_| bounds);
    // Checked by panel first, because the size of the whole matrix might not fit in a word.
    let panel = MatrixLayout::new(weight, 1, size(weights.k)?)
        .map_err(|_| Failure::bad(SHAPE))?
        .panel()
        .panel_bytes();
    let bytes = [
        u64::from(weights.n.div_ceil(32)),
        u64::from(s2),
        u64::from(s3),
    ]
    .into_iter()
    .try_fold(panel as u64, u64::checked_mul)
    .ok_or(bounds)?;
    let bound = buffers.bind(weights.buffer, weights.offset, bytes)?;
    let layout = MatrixLayout::new(weight, size(weights.n)?, size(weights.k)?)
        .map_err(|_| Failure::bad(SHAPE))?;
    Ok(BoundWeights {
        layout,
        bound: bound.direct(),
        slices: [size(s2)?, size(s3)?],
    })
}

/// The epilogue of a product, checked.
#[derive(Clone, Copy, Debug)]
struct Combined {
    f: Combine,
    is_swapped: bool,
    /// The rows of the other operand; `None` if it is the memory of the results.
    other: Option<Strided>,
}

/// Checks the epilogue of a command whose results are at `dst`, and returns it and the place of the
/// other operand.
fn epilogue<'a>(
    body: &wire::MatMul,
    dst: &BoundRows<'a>,
    buffers: &LentBuffers<'a>,
) -> Result<(Option<Combined>, Option<Bound<'a>>), Failure> {
    let wire::Epilogue {
        kernel,
        swapped,
        other,
    } = &body.epilogue;
    if *swapped > 1 {
        return Err(Failure::bad(RESERVED));
    }
    let f = match *kernel {
        0 if *other == RowsF32::zeroed() && *swapped == 0 => return Ok((None, None)),
        0 => return Err(Failure::bad(RESERVED)),
        wire::KERNEL_ADD => Combine::Add,
        wire::KERNEL_SWIGLU => Combine::Swiglu,
        wire::KERNEL_GEGLU => Combine::Geglu,
        wire::KERNEL_GEGLU_ERF => Combine::GegluErf,
        wire::KERNEL_GEGLU_QUICK => Combine::GegluQuick,
        wire::KERNEL_REGLU => Combine::Reglu,
        _ => return Err(Failure::bad(KERNEL_NUMBER)),
    };
    if (body.planes, body.weights.slices) != ([1, 1], [1, 1]) {
        return Err(Failure::bad(PLANES));
    }
    let other = BoundRows::new(other, body.weights.n, [body.m, 1, 1], buffers)?;
    let other = Some(other).filter(|other| other != dst);
    let combined = Combined {
        f,
        is_swapped: *swapped == 1,
        other: other.map(|other| other.rows),
    };
    Ok((Some(combined), other.map(|other| other.bound)))
}

/// Checks the number that selects the products for dot products.
pub(super) fn dots(number: u32) -> Result<Dots, Failure> {
    Dots::from_number(number).ok_or(Failure::bad(detail::DOTS))
}

/// A product whose fields were checked, in decoded form.
#[derive(Clone, Copy, Debug)]
pub(super) struct CheckedProduct {
    layout: MatrixLayout,
    slices: [usize; 2],
    act: Strided,
    dst: Strided,
    combined: Option<Combined>,
    m: usize,
    /// Planes of the activations for each slice of the weights.
    ratio: [usize; 2],
    dots: Dots,
    /// Results; weights, activations, the other operand of the epilogue.
    pub(super) operands: CheckedOperands<3>,
}

/// Checks that [`wire::OP_MUL_MAT`] without an epilogue accepts the places of activations and
/// results.
///
/// # Errors
/// The failure with which the DSP would answer the command.
pub fn accepts_product(body: &wire::MatMul) -> Result<(), Failure> {
    let counts = [body.m, body.planes[0], body.planes[1]];
    if counts.contains(&0) {
        return Ok(());
    }
    let dst = (&body.dst, body.weights.n, counts);
    accepts_rows(dst, [(&body.act, body.weights.k, counts)])
}

/// Checks the fields of [`wire::OP_MUL_MAT`], and returns them decoded, with the operands; `None`
/// if there are no rows.
pub(super) fn check<'a>(
    body: &wire::MatMul,
    memory: &'a mut Table,
) -> Result<Option<(CheckedProduct, Operands<'a, 3>)>, Failure> {
    let dots = dots(body.dots)?;
    let buffers = memory.lend();
    let w = weights(&body.weights, &buffers)?;
    let mut ratio = [0; 2];
    for (ratio, (planes, slices)) in ratio
        .iter_mut()
        .zip(body.planes.into_iter().zip(body.weights.slices))
    {
        if planes == 0 || planes % slices != 0 {
            return Err(Failure::bad(PLANES));
        }
        *ratio = usize::try_from(planes / slices).map_err(|_| Failure::bad(BOUNDS))?;
    }
    if body.m == 0 {
        return Ok(None);
    }
    let counts = [body.m, body.planes[0], body.planes[1]];
    let dst = BoundRows::new(&body.dst, body.weights.n, counts, &buffers)?;
    dst.rows.disjoint()?;
    let act = BoundRows::new(&body.act, body.weights.k, counts, &buffers)?;
    let (combined, other) = epilogue(body, &dst, &buffers)?;
    let sources = [Some(w.bound), Some(act.bound), other];
    // Overlapping operands are refused before any cache line is changed.
    let operands = buffers.operands(dst.bound, sources)?;
    let product = CheckedProduct {
        layout: w.layout,
        slices: w.slices,
        act: act.rows,
        dst: dst.rows,
        combined,
        m: usize::try_from(body.m).map_err(|_| Failure::bad(BOUNDS))?,
        ratio,
        dots,
        operands: operands.to_checked(),
    };
    Ok(Some((product, operands)))
}

impl CheckedProduct {
    /// Executes the product on its operands, and returns the activations that are resident in VTCM
    /// afterwards.
    ///
    /// - `resident`: the activations that are resident before
    pub(super) fn run(
        &self,
        mut operands: Operands<'_, 3>,
        resident: Option<ResidentActs>,
        (platform, ranges): (&mut impl Platform, &mut CachedRanges),
        machine: Machine<'_>,
    ) -> Result<Resident, Failure> {
        let [weights, act, other] = [0, 1, 2].map(|i| operands.bound(i));
        let missing = Failure::bad(BOUNDS);
        let with = |rows: Strided, bound| BoundRows { bound, rows };
        let dst = with(self.dst, operands.dst());
        let act = with(self.act, act.ok_or(missing)?);
        let mut cache = Cache {
            mappings: operands.mappings(),
            platform,
            ranges,
        };
        cache.before_dma(&weights.ok_or(missing)?);
        act.read(of_product(&act.rows), &mut cache);
        dst.read_edges(&mut cache);
        match (&self.combined, other) {
            (
                Some(Combined {
                    other: Some(rows), ..
                }),
                Some(bound),
            ) => {
                with(*rows, bound).read(of_product(rows), &mut cache);
            }
            (Some(_), _) => dst.read(of_product(&dst.rows), &mut cache),
            (None, _) => {}
        }
        let (dst_bytes, [weight_bytes, act_bytes, other_bytes]) = operands.slices();
        let slices = Slices {
            weights: cast(weight_bytes)?,
            act: cast(act_bytes)?,
            other: other_bytes.map(|bytes| cast(Some(bytes))).transpose()?,
            dst: bytemuck::try_cast_slice_mut(dst_bytes).map_err(|_| Failure::bad(ALIGNMENT))?,
        };
        let prepared = resident.filter(|acts| acts.is(&act)).map(|acts| acts.form);
        let done = self.planes(prepared, slices, machine);
        dst.written(of_product(&dst.rows), &mut cache);
        Ok(match done? {
            None => Resident::None,
            Some(form) => Resident::Acts(ResidentActs {
                addresses: act.bound.addresses(),
                rows: act.rows,
                form,
            }),
        })
    }
}

/// Returns the elements of an operand that must exist.
pub(super) fn cast<T: Pod>(bytes: Option<&[u8]>) -> Result<&[T], Failure> {
    let bytes = bytes.ok_or(Failure::bad(BOUNDS))?;
    bytemuck::try_cast_slice(bytes).map_err(|_| Failure::bad(ALIGNMENT))
}

/// The elements that a product works on.
struct Slices<'a> {
    /// Packed weights, as the DMA engine sees them.
    weights: &'a [Line],
    act: &'a [f32],
    /// The other operand of the epilogue.
    other: Option<&'a [f32]>,
    dst: &'a mut [f32],
}

impl CheckedProduct {
    /// Multiplies plane by plane; planes that share a slice and follow one another are one product.
    /// Returns the form of the activations that are resident in VTCM if there was only one product.
    fn planes(
        &self,
        prepared: Option<Prepared>,
        operands: Slices<'_>,
        mut machine: Machine<'_>,
    ) -> Result<Option<Prepared>, Failure> {
        let (act, dst) = (&self.act, &self.dst);
        let (mut m, mut ratio) = (self.m, self.ratio);
        let mut steps = [act.strides[0], dst.strides[0]];
        if m == 1 {
            steps = [act.strides[1], dst.strides[1]];
            m = ratio[0];
            ratio[0] = 1;
        } else if act.continues(1, m, steps[0]) && dst.continues(1, m, steps[1]) {
            m *= ratio[0];
            ratio[0] = 1;
        }
        if ratio[0] == 1 && act.continues(2, m, steps[0]) && dst.continues(2, m, steps[1]) {
            m *= ratio[1];
            ratio[1] = 1;
        }
        let is_single = ratio == [1, 1] && self.slices == [1, 1] && m <= MAX_ROWS;
        let mut resident = prepared.filter(|_| is_single);
        let matrix = self.layout.matrix_bytes() / LINE_BYTES;
        let mut rest = operands.weights;
        // Counted without divisions, which are function calls on the DSP.
        for s3 in 0..self.slices[1] {
            for s2 in 0..self.slices[0] {
                let (weights, others) = rest.split_at(matrix.min(rest.len()));
                rest = others;
                for i3 in s3 * self.ratio[1]..s3 * self.ratio[1] + ratio[1] {
                    for i2 in s2 * self.ratio[0]..s2 * self.ratio[0] + ratio[0] {
                        for m0 in (0..m).step_by(MAX_ROWS) {
                            let start = |r: &Strided, step: usize| {
                                i2 * r.strides[1] + i3 * r.strides[2] + m0 * step
                            };
                            let (act_at, dst_at) = (start(act, steps[0]), start(dst, steps[1]));
                            let product = MatMul {
                                layout: self.layout,
                                weights,
                                m: MAX_ROWS.min(m - m0),
                                dots: self.dots,
                                act: operands.act.get(act_at..).unwrap_or_default(),
                                act_rows: RowStarts::Strided(steps[0]),
                                dst: operands.dst.get_mut(dst_at..).unwrap_or_default(),
                                dst_rows: RowStarts::Strided(steps[1]),
                                epilogue: self.epilogue(m0, operands.other),
                            };
                            resident = product.run_after(resident, machine.reborrow())?;
                            resident = resident.filter(|_| is_single);
                        }
                    }
                }
            }
        }
        Ok(resident)
    }

    /// Returns the epilogue for the rows starting with `m0`. Only a product of one plane has an
    /// epilogue.
    fn epilogue<'a>(&self, m0: usize, other: Option<&'a [f32]>) -> Option<Epilogue<'a>> {
        let combined = self.combined?;
        Some(Epilogue {
            f: combined.f,
            is_swapped: combined.is_swapped,
            other: other.zip(combined.other).map(|(elems, rows)| {
                let stride = rows.strides[0];
                let elems = elems.get(m0 * stride..).unwrap_or_default();
                (elems, RowStarts::Strided(stride))
            }),
        })
    }
}
