//! Plans the commands of the Hexagon NPU from a node's metadata alone. Knows no device.

use hexagon_ops::layout::F16_TILE_BYTES;
use hexagon_ops::ops::matmul::GemmPlan;
use hexagon_ops::wire;

use super::layout::WeightLayout;
use crate::graph::{Op, Operation, Place, Refusal, Tensor};
use crate::tensor::DType;

pub mod cost;
pub mod fuse;
mod operation;

/// A multiplication: `dst[M,N] = act[M,K] · w[K,N]` for each plane of the activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MulMat {
    /// The weights.
    pub weights: WeightLayout,
    /// Rows of activations in each plane.
    pub m: usize,
    /// `ne[2]` and `ne[3]` of src1 and dst.
    pub planes: [usize; 2],
}

/// A multiplication in which each row of activations goes to the expert that was chosen for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MulMatId {
    /// The weights, one matrix for each expert.
    pub weights: WeightLayout,
    /// Experts that a token uses.
    pub slots: usize,
    /// Slots that the activations have.
    pub act_slots: usize,
    /// Tokens.
    pub tokens: usize,
}

/// The device's command for a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// For [`Op::MulMat`].
    MulMat(MulMat),
    /// For [`Op::MulMatId`].
    MulMatId(MulMatId),
    /// For everything else. Buffers are numbers of operands, 0 that of the result; offsets are 0.
    Tensor(Box<wire::TensorOp>),
    /// For [`Op::FlashAttnExt`], with buffers and offsets as above.
    Attention(Box<wire::Attention>),
}

impl Command {
    /// Returns the weights, if it multiplies with such.
    #[must_use]
    pub fn weights(&self) -> Option<&WeightLayout> {
        match self {
            Self::MulMat(command) => Some(&command.weights),
            Self::MulMatId(command) => Some(&command.weights),
            Self::Tensor(_) | Self::Attention(_) => None,
        }
    }

    /// As [`Self::weights`], to be changed.
    pub fn weights_mut(&mut self) -> Option<&mut WeightLayout> {
        match self {
            Self::MulMat(command) => Some(&mut command.weights),
            Self::MulMatId(command) => Some(&mut command.weights),
            Self::Tensor(_) | Self::Attention(_) => None,
        }
    }
}

/// Plans a node for a question of ggml's. It also refuses nodes that the device could compute, but
/// should not.
///
/// # Errors
/// The reason why the node is not for this device.
pub fn question(vtcm_bytes: usize, operation: &Operation) -> Result<Command, Refusal> {
    let Some(weights) = &operation.src[0] else {
        return command(vtcm_bytes, operation, false);
    };
    let packed = match operation.op {
        Op::MulMat => may_be_packed(weights),
        Op::MulMatId if may_be_packed(weights) => true,
        // Packing the experts at each use is slower than the CPU.
        Op::MulMatId => return Err("weights are not in packed memory"),
        _ => false,
    };
    // The loader asks for plain memory, too; weights that can be packed are to come into memory
    // where they are.
    let small =
        weights.dtype == DType::F32 && weights.shape.ne[0] * weights.shape.ne[1] <= PLAIN_ELEMS;
    let plain = weights.place == Place::Device || small;
    if operation.op == Op::MulMat && !packed && !plain {
        return Err("weights are not in packed memory");
    }
    match command(vtcm_bytes, operation, packed) {
        // Operands that cannot be packed may still be a product of plain tensors.
        Err(_) if packed && weights.place == Place::Unknown => {
            command(vtcm_bytes, operation, false)
        }
        planned => planned,
    }
}

/// Most elements of F32 weights for the product of plain tensors: a router of experts, but no
/// layer. The CPU is faster with more, having no weights to bring to the DSP in 32 bits.
const PLAIN_ELEMS: usize = 1 << 20;

/// Returns `true` if weights will be packed. Where no memory is known yet, the answer is about the
/// operation as such, which packs at use.
fn may_be_packed(weights: &Tensor) -> bool {
    matches!(weights.place, Place::Packed | Place::Unknown) && WeightLayout::new(weights).is_some()
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
            mul_mat(vtcm_bytes, dst, src0, src1).map(Command::MulMat)
        }
        (Op::MulMatId, [Some(src0), Some(src1), Some(ids), ..]) => {
            mul_mat_id(vtcm_bytes, dst, src0, src1, ids).map(Command::MulMatId)
        }
        (Op::MulMatId, _) => Err("an operand is missing"),
        (Op::FlashAttnExt, _) => {
            operation::attention(operation).map(|body| Command::Attention(Box::new(body)))
        }
        _ => operation::command(operation).map(|body| Command::Tensor(Box::new(body))),
    }
}

fn mul_mat(
    vtcm_bytes: usize,
    dst: &Tensor,
    src0: &Tensor,
    src1: &Tensor,
) -> Result<MulMat, Refusal> {
    let ([k, n, s2, s3], [k1, m, p2, p3]) = (src0.shape.ne, src1.shape.ne);
    if k != k1 || dst.shape.ne != [n, m, p2, p3] || s2 == 0 || s3 == 0 {
        return Err("shapes do not fit");
    }
    if p2 % s2 != 0 || p3 % s3 != 0 {
        return Err("shapes do not fit");
    }
    Ok(MulMat {
        weights: operands(vtcm_bytes, dst, src0, src1, m)?,
        m,
        planes: [p2, p3],
    })
}

fn mul_mat_id(
    vtcm_bytes: usize,
    dst: &Tensor,
    src0: &Tensor,
    src1: &Tensor,
    ids: &Tensor,
) -> Result<MulMatId, Refusal> {
    let ([k, n, _, s3], [k1, act_slots, tokens, p3]) = (src0.shape.ne, src1.shape.ne);
    let [slots, ids_tokens, ..] = ids.shape.ne;
    if ids.dtype != DType::I32 || ids.shape.nb[0] != 4 || !rows_of_words(ids) {
        return Err("choice of experts is not rows of I32");
    }
    let fits = k == k1
        && dst.shape.ne == [n, slots, tokens, 1]
        && ids.shape.ne == [slots, tokens, 1, 1]
        && ids_tokens == tokens
        && [s3, p3] == [1, 1]
        && act_slots > 0
        && slots % act_slots == 0;
    if !fits {
        return Err("shapes do not fit");
    }
    Ok(MulMatId {
        weights: operands(vtcm_bytes, dst, src0, src1, tokens * slots)?,
        slots,
        act_slots,
        tokens,
    })
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
    m: usize,
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
        // Converted at use.
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
    GemmPlan::new(layout.matrix, m, vtcm_bytes / F16_TILE_BYTES)
        .map_err(|_| "rows are too long for the VTCM")?;
    Ok(layout)
}
