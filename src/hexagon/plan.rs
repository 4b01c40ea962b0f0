//! Plans the commands of the Hexagon NPU from a node's metadata alone. Knows no device.

use hexagon_ops::layout::{F16_TILE_BYTES, MatrixLayout, TILE_DIM, WeightType};
use hexagon_ops::ops::matmul::GemmPlan;
use hexagon_ops::serve::MAX_CHOICES;
use hexagon_ops::wire;

use super::layout::{WeightLayout, is_column, is_left_unpacked};
use crate::graph::{Op, Operation, Place, Refusal, Role, Tensor};
use crate::tensor::DType;

pub mod cost;
pub mod fuse;
mod operation;
mod reshape;

/// A node as a command for the DSP. The places of its operands are unknown here: in the buffer
/// fields are numbers of operands, 0 for the result, and offsets are 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// For [`Op::MulMat`], with the layout of its weights.
    MulMat(Box<wire::MatMul>, WeightLayout),
    /// For [`Op::MulMatId`], with the layout of its weights.
    MulMatId(Box<wire::MatMulId>, WeightLayout),
    /// For everything else.
    Tensor(Box<wire::TensorOp>),
    /// For operations with more sources.
    Wide(Box<wire::WideOp>),
    /// For [`Op::FlashAttnExt`].
    Attention(Box<wire::Attention>),
}

impl Command {
    /// Returns the weights' layout, if the command multiplies with packed weights.
    #[must_use]
    pub fn weights(&self) -> Option<&WeightLayout> {
        match self {
            Self::MulMat(_, weights) | Self::MulMatId(_, weights) => Some(weights),
            Self::Tensor(_) | Self::Wide(_) | Self::Attention(_) => None,
        }
    }

    /// Sets that the device multiplies with weights which a pack has in another layout than that of
    /// their type.
    pub fn set_weights(&mut self, layout: WeightLayout) {
        let (body, weights) = match self {
            Self::MulMat(body, weights) => (&mut body.weights, weights),
            Self::MulMatId(body, weights) => (&mut body.weights, weights),
            Self::Tensor(_) | Self::Wide(_) | Self::Attention(_) => return,
        };
        (*body, *weights) = (weights_of(&layout), layout);
    }
}

/// Plans a node for a question of ggml's. It also refuses nodes that the device could compute, but
/// should not.
///
/// - `packs_beside`: whether weights in memory that the CPU also uses get packed copies
///
/// # Errors
/// The reason why the node is not for this device.
pub fn question(
    vtcm_bytes: usize,
    operation: &Operation,
    packs_beside: bool,
) -> Result<Command, Refusal> {
    let Some(weights) = &operation.src[0] else {
        return command(vtcm_bytes, operation, false);
    };
    let may_be_packed = may_be_packed(weights) || packs_beside && is_packed_beside(weights);
    let packed = match operation.op {
        Op::MulMat => may_be_packed && !is_column(weights),
        Op::MulMatId if may_be_packed => true,
        // Packing all experts for every use is slower than leaving the product to the CPU.
        Op::MulMatId => return Err("weights are not in packed memory"),
        _ => false,
    };
    // The loader asks for plain memory, too; weights that can be packed are to come into memory
    // where they are.
    let stays_unpacked = weights.place == Place::Device
        || is_left_unpacked(weights)
        || is_column(weights) && weights.place != Place::Packed;
    if operation.op == Op::MulMat && !packed && !stays_unpacked {
        return Err("weights are not in packed memory");
    }
    match command(vtcm_bytes, operation, packed) {
        // If the operands cannot be packed, a product with unpacked weights may still be possible.
        Err(reason) if packed => command(vtcm_bytes, operation, false).map_err(|_| reason),
        planned => planned,
    }
}

/// Returns `true` if weights in memory that the CPU also uses will get a packed copy.
fn is_packed_beside(weights: &Tensor) -> bool {
    weights.role == Role::Weights && beside_layout(weights).is_some()
}

/// Returns `true` if weights will be packed. Where no memory is known yet, the answer is about the
/// operation as such, which packs at use.
fn may_be_packed(weights: &Tensor) -> bool {
    matches!(weights.place, Place::Packed | Place::Unknown) && WeightLayout::new(weights).is_some()
}

/// Returns the layout of the packed copy of weights in memory that the CPU also uses; `None` if
/// they have none. A tensor without the role of weights may be one if it has a type of weights,
/// because ggml's RPC server marks none.
#[must_use]
pub fn beside_layout(weights: &Tensor) -> Option<WeightLayout> {
    let may_be_weights = match weights.role {
        Role::Weights => true,
        Role::State => matches!(weights.dtype, DType::F16 | DType::Quantized { .. }),
        Role::Result => false,
    };
    let has_form = may_be_weights
        && weights.place == Place::Device
        && weights.shape.is_contiguous(weights.dtype)
        && !is_column(weights);
    has_form.then(|| WeightLayout::new(weights)).flatten()
}

/// Plans a node.
///
/// - `packed`: whether a multiplication finds its weights packed, or is to pack them
///
/// # Errors
/// The reason why the device cannot compute it.
pub fn command(vtcm_bytes: usize, operation: &Operation, packed: bool) -> Result<Command, Refusal> {
    let dst = &operation.dst;
    match (operation.op, &operation.src) {
        (Op::MulMat, [Some(src0), Some(src1), ..]) if packed => {
            mul_mat(vtcm_bytes, dst, src0, src1)
        }
        (Op::MulMatId, [Some(src0), Some(src1), Some(ids), ..]) => {
            mul_mat_id(vtcm_bytes, dst, src0, src1, ids)
        }
        (Op::FlashAttnExt, _) => {
            operation::attention(operation).map(|body| Command::Attention(Box::new(body)))
        }
        (op, _)
            if op
                .kernel()
                .is_some_and(|(kernel, reads)| wire::is_wide(kernel, &reads)) =>
        {
            operation::wide(operation).map(|body| Command::Wide(Box::new(body)))
        }
        _ => operation::command(operation).map(|body| Command::Tensor(Box::new(body))),
    }
}

fn mul_mat(
    vtcm_bytes: usize,
    dst: &Tensor,
    src0: &Tensor,
    src1: &Tensor,
) -> Result<Command, Refusal> {
    let ([k, n, s2, s3], [k1, m, p2, p3]) = (src0.shape.ne, src1.shape.ne);
    if k != k1 || dst.shape.ne != [n, m, p2, p3] || s2 == 0 || s3 == 0 {
        return Err("shapes do not fit");
    }
    if p2 % s2 != 0 || p3 % s3 != 0 {
        return Err("shapes do not fit");
    }
    let layout = operands(vtcm_bytes, dst, src0, src1)?;
    let body = wire::MatMul {
        weights: weights_of(&layout),
        act: rows_of(src1, 2),
        dst: rows_of(dst, 0),
        m: word(m),
        planes: [p2, p3].map(word),
        ..bytemuck::Zeroable::zeroed()
    };
    Ok(Command::MulMat(Box::new(body), layout))
}

fn mul_mat_id(
    vtcm_bytes: usize,
    dst: &Tensor,
    src0: &Tensor,
    src1: &Tensor,
    ids: &Tensor,
) -> Result<Command, Refusal> {
    let ([k, n, _, s3], [k1, act_slots, tokens, p3]) = (src0.shape.ne, src1.shape.ne);
    let slots = ids.shape.ne[0];
    if ids.dtype != DType::I32 || ids.shape.nb[0] != 4 || !rows_of_words(ids) {
        return Err("choice of experts is not rows of I32");
    }
    let fits = k == k1
        && dst.shape.ne == [n, slots, tokens, 1]
        && ids.shape.ne == [slots, tokens, 1, 1]
        && [s3, p3] == [1, 1]
        && act_slots > 0
        && slots.is_multiple_of(act_slots);
    if !fits {
        return Err("shapes do not fit");
    }
    if slots > MAX_CHOICES {
        return Err("more choices of experts than fit");
    }
    let layout = operands(vtcm_bytes, dst, src0, src1)?;
    let body = wire::MatMulId {
        weights: weights_of(&layout),
        act: rows_of(src1, 2),
        dst: rows_of(dst, 0),
        ids: rows_of(ids, 3),
        slots: word(slots),
        act_slots: word(act_slots),
        tokens: word(tokens),
        ..bytemuck::Zeroable::zeroed()
    };
    Ok(Command::MulMatId(Box::new(body), layout))
}

/// Packed weights, which are operand 1.
fn weights_of(layout: &WeightLayout) -> wire::Weights {
    wire::Weights {
        buffer: 1,
        layout: layout.weight().layout_id().0,
        offset: 0,
        k: word(layout.matrix.panel().k()),
        n: word(layout.matrix.n()),
        slices: layout.slices.map(word),
    }
}

/// The rows of a tensor that is operand `number`.
fn rows_of(tensor: &Tensor, number: u32) -> wire::RowsF32 {
    let [_, nb1, nb2, nb3] = tensor.shape.nb.map(|nb| nb as u64);
    wire::RowsF32 {
        buffer: number,
        reserved: 0,
        offset: 0,
        strides: [nb1, nb2, nb3],
    }
}

/// A size in 32 bits: [`operands`] has checked that it fits.
fn word(size: usize) -> u32 {
    u32::try_from(size).unwrap_or(u32::MAX)
}

/// Returns `true` if the rows' distances are whole words.
fn rows_of_words(tensor: &Tensor) -> bool {
    tensor.shape.nb[1..].iter().all(|nb| nb % 4 == 0)
}

/// Checks the operands of any multiplication. Returns the layout of the packed weights.
fn operands(
    vtcm_bytes: usize,
    dst: &Tensor,
    src0: &Tensor,
    src1: &Tensor,
) -> Result<WeightLayout, Refusal> {
    if src0.shape.nb[0] != src0.dtype.step_bytes().unwrap_or(0) {
        return Err("weights are transposed");
    }
    if dst.dtype != DType::F32 || dst.shape.nb[0] != 4 || !rows_of_words(dst) {
        return Err("results are not rows of F32");
    }
    let act_step = src1.shape.nb[0];
    let act_fits = match src1.dtype {
        DType::F32 => act_step == 4 && rows_of_words(src1),
        // An extra command in front of the product converts F16 activations to F32.
        DType::F16 => act_step == 2,
        _ => false,
    };
    if !act_fits {
        return Err("activations are not rows of F32 or F16");
    }
    let layout = WeightLayout::new(src0).ok_or("weights of this type or size stay on the CPU")?;
    let fits_word = |size: usize| u32::try_from(size).is_ok();
    let sizes = [src0.shape.ne, src1.shape.ne, dst.shape.ne];
    if !sizes.iter().flatten().all(|size| fits_word(*size)) {
        return Err("a dimension needs more than 32 bits");
    }
    // One row is enough to check: the product processes as many rows at a time as fit.
    GemmPlan::new(layout.matrix, 1, vtcm_bytes / F16_TILE_BYTES)
        .map_err(|_| "rows are too long for the VTCM")?;
    Ok(layout)
}

/// Returns the longest row, in elements, of a product with weights of 8 bits; a multiple of 32.
/// Longer rows do not fit in the VTCM.
#[must_use]
pub fn longest_row(vtcm_bytes: usize) -> usize {
    let fits = |k_tiles: usize| {
        MatrixLayout::new(WeightType::Q8_0, TILE_DIM, k_tiles * TILE_DIM)
            .is_ok_and(|layout| GemmPlan::new(layout, 1, vtcm_bytes / F16_TILE_BYTES).is_ok())
    };
    // A tile along K needs at least one tile of activations, so this is an upper bound.
    let (mut fitting, mut over) = (0, vtcm_bytes / F16_TILE_BYTES + 1);
    while over - fitting > 1 {
        let middle = usize::midpoint(fitting, over);
        if fits(middle) {
            fitting = middle;
        } else {
            over = middle;
        }
    }
    fitting * TILE_DIM
}

#[cfg(test)]
mod tests;
