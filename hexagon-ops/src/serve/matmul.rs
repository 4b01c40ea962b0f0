//! The commands for products with packed weights: checks the fields, makes the operands visible to the
//! DSP, and cuts the command into products of [`crate::ops::matmul`].

use bytemuck::{Pod, Zeroable};

use super::coherence::{Cache, CachedRanges};
use super::detail::{
    self, ALIGNMENT, BOUNDS, Failure, KERNEL_NUMBER, LAYOUT, PLANES, RESERVED, SHAPE, SLOTS,
};
use super::region::{BoundRows, Strided};
use super::{Platform, Scratch};
use crate::layout::{LINE_BYTES, Line, MatrixLayout, WeightType};
use crate::ops::matmul::{
    Combine, DOT_ROWS, Epilogue, ExpertMatMul, Machine, MatMul, Prepared, RowStarts,
};
use crate::rt::memory::{Bound, LentBuffers, Span, Table};
use crate::wire::{self, Plain};

/// Maximum number of elements along K. With more, a row of tiles fits in no VTCM, and sizes could
/// exceed 32 bits.
const MAX_K: u32 = 1 << 20;
/// Maximum number of rows of one product, so that the planner's sizes fit in 32 bits. More rows are
/// several products.
const MAX_ROWS: usize = 1 << 16;
/// Maximum number of choices of experts in one turn: tokens of a usual ubatch (512) times experts of a
/// token (8). More choices take several turns, and each turn reads the weights again.
pub(super) const MAX_CHOICES: usize = 4096;

/// Activations of the last product that are resident in VTCM. The next product may multiply the same ones: Q, K and V do,
/// and so do gate and up.
#[derive(Clone, Copy, Debug)]
pub(super) struct ResidentActs {
    span: Span,
    rows: Strided,
    form: Prepared,
}

impl ResidentActs {
    /// Returns `true` if a command that writes to `span` changes the activations.
    pub(super) fn is_changed_by(&self, span: Span) -> bool {
        self.span.overlaps(span)
    }

    /// Returns `true` if `act` are the activations.
    fn is(&self, act: &BoundRows<'_>) -> bool {
        self.span == act.bound.span() && self.rows == act.rows
    }
}

/// Weights whose fields are right, and the bytes that hold them.
struct BoundWeights<'a> {
    layout: MatrixLayout,
    bound: Bound<'a>,
    slices: [usize; 2],
}

/// Checks the weights of a command and resolves their buffer.
fn weights<'a>(
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
    // Panels first: the size of the matrix might not fit in a word.
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
#[derive(Clone, Copy)]
struct Combined<'a> {
    f: Combine,
    is_swapped: bool,
    /// The other operand; `None` if it is the memory of the results.
    other: Option<BoundRows<'a>>,
}

/// Checks the epilogue of a command whose results lie at `dst`.
fn epilogue<'a>(
    body: &wire::MatMul,
    dst: &BoundRows<'a>,
    buffers: &LentBuffers<'a>,
) -> Result<Option<Combined<'a>>, Failure> {
    let wire::Epilogue {
        kernel,
        swapped,
        other,
    } = &body.epilogue;
    if *swapped > 1 {
        return Err(Failure::bad(RESERVED));
    }
    let f = match *kernel {
        0 if *other == Plain::zeroed() && *swapped == 0 => return Ok(None),
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
    Ok(Some(Combined {
        f,
        is_swapped: *swapped == 1,
        other,
    }))
}

/// Checks the number of rows for dot products.
fn dot_rows(rows: u32) -> Result<usize, Failure> {
    let rows = usize::try_from(rows).ok().filter(|rows| *rows <= DOT_ROWS);
    rows.ok_or(Failure::bad(detail::DOT_ROWS))
}

/// Executes [`wire::OP_MUL_MAT`].
///
/// - `resident`: activations in VTCM; afterwards those of this command
pub(super) fn mul_mat(
    body: &wire::MatMul,
    memory: &mut Table,
    resident: &mut Option<ResidentActs>,
    (platform, ranges): (&mut impl Platform, &mut CachedRanges),
    machine: Machine<'_>,
) -> Result<(), Failure> {
    let earlier = resident.take();
    let dot_rows = dot_rows(body.dot_rows)?;
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
        return Ok(());
    }
    let counts = [body.m, body.planes[0], body.planes[1]];
    let dst = BoundRows::new(&body.dst, body.weights.n, counts, &buffers)?;
    dst.rows.disjoint()?;
    let act = BoundRows::new(&body.act, body.weights.k, counts, &buffers)?;
    let combined = epilogue(body, &dst, &buffers)?;
    let other = combined.and_then(|combined| combined.other);
    let sources = [
        Some(w.bound),
        Some(act.bound),
        other.map(|other| other.bound),
    ];
    // Overlapping operands are refused before any cache line changes.
    let mut cache = Cache {
        mappings: buffers.mappings(),
        platform,
        ranges,
    };
    let mut operands = buffers.operands(dst.bound, sources)?;
    cache.before_dma(&w.bound);
    act.read(&mut cache);
    dst.read_edges(&mut cache);
    if combined.is_some() {
        other.as_ref().unwrap_or(&dst).read(&mut cache);
    }
    let m = usize::try_from(body.m).map_err(|_| Failure::bad(BOUNDS))?;
    let (dst_bytes, [weight_bytes, act_bytes, other_bytes]) = operands.slices();
    let slices = Slices {
        weights: cast(weight_bytes)?,
        act: cast(act_bytes)?,
        other: other_bytes.map(|bytes| cast(Some(bytes))).transpose()?,
        dst: bytemuck::try_cast_slice_mut(dst_bytes).map_err(|_| Failure::bad(ALIGNMENT))?,
    };
    let prepared = earlier.filter(|acts| acts.is(&act)).map(|acts| acts.form);
    let regions = Regions {
        act: &act.rows,
        dst: &dst.rows,
        combined,
        dot_rows,
    };
    let done = planes(&w, &regions, m, ratio, prepared, slices, machine);
    dst.written(&mut cache);
    *resident = done?.map(|form| ResidentActs {
        span: act.bound.span(),
        rows: act.rows,
        form,
    });
    Ok(())
}

/// Returns the elements of an operand that is not missing.
fn cast<T: Pod>(bytes: Option<&[u8]>) -> Result<&[T], Failure> {
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

/// The rows of a product, and how they are multiplied.
struct Regions<'a> {
    act: &'a Strided,
    dst: &'a Strided,
    combined: Option<Combined<'a>>,
    dot_rows: usize,
}

/// Multiplies plane by plane; planes that share a slice and follow one another are one product. Returns the form of the
/// activations that are resident in VTCM if there was only one product.
fn planes(
    w: &BoundWeights<'_>,
    regions: &Regions<'_>,
    mut m: usize,
    mut ratio: [usize; 2],
    prepared: Option<Prepared>,
    operands: Slices<'_>,
    mut machine: Machine<'_>,
) -> Result<Option<Prepared>, Failure> {
    let Regions {
        act,
        dst,
        combined,
        dot_rows,
    } = *regions;
    let original = ratio;
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
    let is_single = ratio == [1, 1] && w.slices == [1, 1] && m <= MAX_ROWS;
    let mut resident = prepared.filter(|_| is_single);
    let matrix = w.layout.matrix_bytes() / LINE_BYTES;
    for (index, weights) in operands.weights.chunks_exact(matrix.max(1)).enumerate() {
        let [s2, s3] = [index % w.slices[0], index / w.slices[0]];
        for plane in 0..ratio[0] * ratio[1] {
            let i2 = s2 * original[0] + plane % ratio[0];
            let i3 = s3 * original[1] + plane / ratio[0];
            for m0 in (0..m).step_by(MAX_ROWS) {
                let start =
                    |r: &Strided, step: usize| i2 * r.strides[1] + i3 * r.strides[2] + m0 * step;
                let (act_at, dst_at) = (start(act, steps[0]), start(dst, steps[1]));
                // Only a product of one plane has an epilogue.
                let epilogue = combined.map(|combined| Epilogue {
                    f: combined.f,
                    is_swapped: combined.is_swapped,
                    other: operands.other.zip(combined.other).map(|(elems, other)| {
                        let stride = other.rows.strides[0];
                        let elems = elems.get(m0 * stride..).unwrap_or_default();
                        (elems, RowStarts::Strided(stride))
                    }),
                });
                let product = MatMul {
                    layout: w.layout,
                    weights,
                    m: MAX_ROWS.min(m - m0),
                    dot_rows,
                    act: operands.act.get(act_at..).unwrap_or_default(),
                    act_rows: RowStarts::Strided(steps[0]),
                    dst: operands.dst.get_mut(dst_at..).unwrap_or_default(),
                    dst_rows: RowStarts::Strided(steps[1]),
                    epilogue,
                };
                resident = product.run_after(resident, machine.reborrow())?;
                resident = resident.filter(|_| is_single);
            }
        }
    }
    Ok(resident)
}

/// Executes [`wire::OP_MUL_MAT_ID`].
pub(super) fn mul_mat_id(
    body: &wire::MatMulId,
    memory: &mut Table,
    (platform, ranges): (&mut impl Platform, &mut CachedRanges),
    scratch: &mut Scratch,
    mut machine: Machine<'_>,
) -> Result<(), Failure> {
    let dot_rows = dot_rows(body.dot_rows)?;
    let buffers = memory.lend();
    let w = weights(&body.weights, &buffers)?;
    if body.weights.slices[1] != 1 {
        return Err(Failure::bad(PLANES));
    }
    let bounds = Failure::bad(BOUNDS);
    let size = |value: u32| usize::try_from(value).map_err(|_| bounds);
    let (slots, act_slots) = (size(body.slots)?, size(body.act_slots)?);
    if slots == 0 || act_slots == 0 || slots % act_slots != 0 || slots > MAX_CHOICES {
        return Err(Failure::bad(SLOTS));
    }
    if body.tokens == 0 {
        return Ok(());
    }
    let tokens = size(body.tokens)?;
    let counts = [body.slots, body.tokens, 1];
    let dst = BoundRows::new(&body.dst, body.weights.n, counts, &buffers)?;
    dst.rows.disjoint()?;
    let counts = [body.act_slots, body.tokens, 1];
    let act = BoundRows::new(&body.act, body.weights.k, counts, &buffers)?;
    let ids = BoundRows::new(&body.ids, body.slots, [body.tokens, 1, 1], &buffers)?;
    // Choices share no memory with results either, although they are read before results are written.
    let sources = [w.bound, act.bound, ids.bound].map(Some);
    let mut cache = Cache {
        mappings: buffers.mappings(),
        platform,
        ranges,
    };
    let mut operands = buffers.operands(dst.bound, sources)?;
    cache.before_dma(&w.bound);
    act.read(&mut cache);
    ids.read(&mut cache);
    dst.read_edges(&mut cache);
    let (dst_bytes, [weight_bytes, act_bytes, id_bytes]) = operands.slices();
    let (weights, act_elems) = (cast::<Line>(weight_bytes)?, cast::<f32>(act_bytes)?);
    let chosen = cast::<i32>(id_bytes)?;
    let dst_elems: &mut [f32] =
        bytemuck::try_cast_slice_mut(dst_bytes).map_err(|_| Failure::bad(ALIGNMENT))?;

    // Activations that all slots of a token share have a stride of 0. Activations that repeat are multiplied one period
    // at a time.
    let period = if act_slots == 1 { slots } else { act_slots };
    let per_turn = MAX_CHOICES / period;
    let mut done = Ok(());
    'turns: for first_slot in (0..slots).step_by(period) {
        for first_token in (0..tokens).step_by(per_turn) {
            let n_tokens = per_turn.min(tokens - first_token);
            for t in 0..n_tokens {
                let at = (first_token + t) * ids.rows.strides[0] + first_slot;
                let choices = chosen.get(at..at + period).ok_or(bounds)?;
                scratch.ids[t * period..][..period].copy_from_slice(choices);
            }
            let act_start = first_token * act.rows.strides[1];
            let dst_start = first_token * dst.rows.strides[1] + first_slot * dst.rows.strides[0];
            let product = ExpertMatMul {
                layout: w.layout,
                weights,
                dot_rows,
                ids: &scratch.ids[..n_tokens * period],
                n_slots: period,
                act: act_elems.get(act_start..).unwrap_or_default(),
                act_strides: [act.rows.strides[1], act.rows.strides[0]],
                dst: dst_elems.get_mut(dst_start..).unwrap_or_default(),
                dst_strides: [dst.rows.strides[1], dst.rows.strides[0]],
            };
            let starts = &mut scratch.starts[..2 * n_tokens * period];
            done = product
                .run(machine.reborrow(), starts)
                .map_err(Failure::from);
            if done.is_err() {
                break 'turns;
            }
        }
    }
    dst.written(&mut cache);
    done
}
