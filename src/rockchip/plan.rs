//! Plans multiplications from a node's metadata and a chip's capabilities: which are supported, and
//! how each is divided into a [`MulMat`]. Pure, cheap and thread-safe; knows no device.

use rknpu_ops::calibrate::Method;

use super::caps::{self, Precision, RkCaps};
use super::layout::{FEW_ROWS, WeightLayout};
use crate::config::Repack;
use crate::config::rules::{Choice, Rules};
use crate::graph::{Op, Operation, Place, Refusal, Role, Tensor};
use crate::tensor::DType;

pub use self::attention::Attention;
pub use self::bucket::{Bucketing, Buckets, M_BUCKET_MAX, MPiece};

mod attention;
mod bucket;

/// The weights that produce the logits, by llama.cpp's names; the second is for models whose head
/// is the embeddings.
const HEADS: [&str; 2] = ["output.weight", "token_embd.weight"];

/// The weights of a layer that produce keys and values.
const KEYS_AND_VALUES: [&str; 2] = ["attn_k.weight", "attn_v.weight"];

/// Number of first layers that are multiplied in FP16, because every later layer inherits their
/// errors.
const FIRST_LAYERS: usize = 2;

/// Fewest columns for each row at which such weights are multiplied in FP16. They are then 2 to 5 %
/// of a model, with at most a third of the rows of queries.
const SHARED_BY: usize = 3;

/// The chip and the user's choices for it.
#[derive(Debug)]
pub struct Target {
    /// The chip.
    pub caps: &'static RkCaps,
    /// Arithmetic of the weights.
    pub rules: Rules,
    /// Method that clips INT4 weights.
    pub calibration: Method,
    /// The CPU computes multiplications of fewer rows.
    pub min_m: usize,
    /// The same limit for weights that packing makes larger ([`caps::NARROW`]), if it is higher.
    pub min_m_narrow: usize,
    /// `true` keeps the bytes with which weights were written, `false` does not; `None` keeps those
    /// that the CPU multiplies with.
    pub keep: Option<bool>,
    /// The user's choice of when weights are packed. With [`Repack::Always`] the device computes
    /// whatever it can, also where the CPU is faster.
    pub repack: Repack,
}

impl From<&'static RkCaps> for Target {
    fn from(caps: &'static RkCaps) -> Self {
        Self {
            caps,
            rules: Rules::default(),
            calibration: Method::default(),
            min_m: caps::MIN_M,
            min_m_narrow: caps::MIN_M,
            keep: None,
            repack: Repack::default(),
        }
    }
}

impl Target {
    /// Returns the arithmetic that a rule chooses for weights, or that quantized ones have because
    /// results depend on them more than on others of their size.
    ///
    /// - The activations of a head have two digits: its errors are those of the logits, and it
    ///   multiplies so few rows that reading it is slower than computing.
    /// - Few rows of keys and values, which several heads of queries share, are multiplied in FP16.
    /// - So are the first layers. The activations of every third `ffn_down` have two digits,
    ///   because gates make outliers; with all of them, a prompt would be over 5 % slower. Experts
    ///   stay INT8 in both cases, to save memory.
    fn choice(&self, weights: &Tensor) -> Option<Choice> {
        let rule = self.rules.choice(weights.name);
        if rule.is_some() || !matches!(weights.dtype, DType::Quantized { .. }) {
            return rule;
        }
        let [k, n, slices, _] = weights.shape.ne;
        if HEADS.contains(&weights.name) {
            return (n > FEW_ROWS).then_some(Choice::Int8Wide);
        }
        let is_shared = n.saturating_mul(SHARED_BY) <= k;
        let (layer, part) = part_of_layer(weights.name)?;
        if is_shared && KEYS_AND_VALUES.contains(&part) {
            return Some(Choice::Fp16);
        }
        match (layer, part) {
            _ if slices > 1 || n <= FEW_ROWS => None,
            (..FIRST_LAYERS, _) => Some(Choice::Fp16),
            (_, "ffn_down.weight") if layer % 3 == 2 => Some(Choice::Int8Wide),
            _ => None,
        }
    }

    fn layout(&self, weights: &Tensor) -> Option<WeightLayout> {
        let choice = self.choice(weights);
        WeightLayout::new(self.caps, choice, weights.dtype, weights.shape.ne)
            .filter(|layout| buffer_bytes(layout, weights) <= caps::DOMAIN_WEIGHT_BYTES)
    }

    /// Returns the arithmetics that weights may have.
    #[must_use]
    pub fn precisions(&self) -> Vec<Precision> {
        let asked = |choice, arithmetic: Option<Precision>| {
            arithmetic.filter(|_| self.rules.ask_for(choice))
        };
        let mut all = vec![Precision::Fp16, Precision::Int8];
        all.extend(asked(Choice::Int4, self.caps.int4));
        all.extend(asked(Choice::Int4Fp16, self.caps.int4_fp16));
        all
    }

    /// Returns `true` if each weight's bytes are kept.
    #[must_use]
    pub fn keeps_all(&self) -> bool {
        self.keep.unwrap_or(self.min_m > 1)
    }

    /// Returns `true` if the packed form of a weight has clearly more bytes than the weight.
    fn is_narrow(&self, weights: &Tensor) -> bool {
        let (packed, stored) = caps::NARROW;
        let bytes = weights.shape.span_bytes(weights.dtype).unwrap_or(0);
        (self.layout(weights)).is_some_and(|layout| layout.bytes() * stored > bytes * packed)
    }

    /// Returns the fewest rows that the device multiplies with a weight. For a weight that packing
    /// enlarges, more rows are needed.
    fn min_m(&self, weights: &Tensor) -> usize {
        if self.min_m_narrow > self.min_m && self.is_narrow(weights) {
            return self.min_m_narrow;
        }
        self.min_m
    }
}

/// Returns the layer of a weight of a language model and the rest of its name: 3 and
/// "attn_q.weight" of "blk.3.attn_q.weight".
fn part_of_layer(name: &str) -> Option<(usize, &str)> {
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    Some((layer.parse().ok()?, part))
}

/// Returns the size of a weight in a buffer, in bytes: that of ggml's layout or of the packed form,
/// whichever is larger.
fn buffer_bytes(layout: &WeightLayout, weights: &Tensor) -> usize {
    let ggml_bytes = weights
        .shape
        .span_bytes(weights.dtype)
        .unwrap_or(usize::MAX);
    layout.bytes().max(ggml_bytes)
}

/// Returns the bytes of a multiplication's weights, if the device refuses them for their size
/// alone.
#[must_use]
pub fn too_large(target: &Target, operation: &Operation) -> Option<usize> {
    let weights = operation.src[0].as_ref()?;
    if !matches!(operation.op, Op::MulMat | Op::MulMatId) {
        return None;
    }
    let choice = target.choice(weights);
    let layout = WeightLayout::new(target.caps, choice, weights.dtype, weights.shape.ne)?;
    let bytes = buffer_bytes(&layout, weights);
    (bytes > caps::DOMAIN_WEIGHT_BYTES).then_some(bytes)
}

/// A multiplication that the device computes: `dst[M,N] = act[M,K] · w[K,N]` for each of `planes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MulMat {
    /// Layout of src0's weights in device memory.
    pub weights: WeightLayout,
    /// Rows of activations in each plane.
    pub m: usize,
    /// `ne[2]` and `ne[3]` of src1 and dst.
    pub planes: [usize; 2],
    /// Number of planes of src1 that share one of src0, in each outer dimension.
    pub broadcast: [usize; 2],
}

impl MulMat {
    /// Returns the slice of src0 that plane `(i2, i3)` of src1 is multiplied with.
    #[must_use]
    pub fn slice(&self, src0_ne2: usize, i2: usize, i3: usize) -> usize {
        i3 / self.broadcast[1] * src0_ne2 + i2 / self.broadcast[0]
    }
}

/// Returns the layout of a tensor if it can be held packed on the chip. Uses the name, the type and
/// the shape only, so the answer is the same when ggml asks about a weight with M = 512, when it is
/// allocated, and when it is used with M = 1.
#[must_use]
pub fn weight_layout(target: &Target, weights: &Tensor) -> Option<WeightLayout> {
    let contiguous = weights.shape.is_contiguous(weights.dtype);
    contiguous.then(|| target.layout(weights)).flatten()
}

/// A multiplication in which each row of activations goes to the expert that was chosen for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MulMatId {
    /// Layout of the weights of all experts in device memory, one slice each.
    pub weights: WeightLayout,
    /// Experts that there are.
    pub experts: usize,
    /// Experts that each token uses.
    pub used: usize,
    /// Tokens.
    pub tokens: usize,
}

/// The device's command for a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// For [`Op::MulMat`].
    MulMat(MulMat),
    /// For [`Op::MulMatId`].
    MulMatId(MulMatId),
}

impl Command {
    /// Returns the layout of the weights in device memory.
    #[must_use]
    pub fn weights(&self) -> &WeightLayout {
        match self {
            Self::MulMat(command) => &command.weights,
            Self::MulMatId(command) => &command.weights,
        }
    }
}

/// Answers a question of ggml about a node. Nodes that the device could compute, but should not,
/// are refused, too.
///
/// # Errors
/// The reason why the node is not for this device.
pub fn question(target: &Target, operation: &Operation) -> Result<(), Refusal> {
    let turned = turned(target, operation);
    let operation = turned.as_ref().unwrap_or(operation);
    if operation.op == Op::FlashAttnExt {
        if target.repack != Repack::Always {
            return Err("attention is the CPU's");
        }
        return Attention::new(operation).map(drop);
    }
    // Other weights would be quantized and packed for every use, which is slower than the CPU. If
    // the memory is unknown, the question is whether the operation is possible at all, and it is.
    let in_place = |weights: &Tensor| {
        matches!(weights.place, Place::Packed | Place::Unknown) || is_packed_beside(target, weights)
    };
    if !matches!(operation.op, Op::MulMat | Op::MulMatId) {
        return Err(NOT_OURS);
    }
    if !operation.src[0].as_ref().is_some_and(in_place) {
        return Err("weights are not in packed memory");
    }
    command(target, operation).map(drop)
}

/// Returns `true` if weights have a packed copy, because they are in host memory of the device's
/// buffer type. A tensor without the role of weights counts as one if it is quantized, because
/// ggml's RPC server marks none.
#[must_use]
pub fn is_packed_beside(target: &Target, weights: &Tensor) -> bool {
    let is_quantized = matches!(weights.dtype, DType::Quantized { .. });
    weights.place == Place::Device
        && (weights.role == Role::Weights || weights.role == Role::State && is_quantized)
        && target.repack != Repack::Off
        && weights.shape.is_contiguous(weights.dtype)
}

/// The decision about a weight's bytes after it is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// The bytes stay.
    Always,
    /// The bytes stay if there is memory for them, because the CPU is faster with few rows, though
    /// the device can compute those, too.
    IfThereIsRoom,
    /// The bytes are released.
    Never,
}

/// Returns the decision about a weight's bytes after it is packed.
#[must_use]
pub fn keep(target: &Target, weights: &Tensor) -> Keep {
    if target.keeps_all() {
        return Keep::Always;
    }
    match target.keep {
        None if target.min_m(weights) > 1 => Keep::IfThereIsRoom,
        _ => Keep::Never,
    }
}

/// Returns `true` if a node that ggml gave to the device is left to the CPU: the glue computes it
/// from the bytes that a packed buffer keeps, or from plain memory.
///
/// - Nodes with too few rows, which ggml cannot know, since it gives a node to the device that has
///   the weights. The rows of a [`Op::MulMatId`] are its tokens.
/// - Nodes that the device does not compute. The device claims those, too, so that ggml does not
///   split the graph at them.
/// - Products with operands that would have to be packed at each use, unless they may be weights.
///   Slices of weights ([`Place::Unknown`]) are. Weights in host memory of the device's own type
///   are packed once.
/// - Attention for which the CPU is faster by the cost table, unless the user makes the device
///   compute everything that it can.
#[must_use]
pub fn prefers_cpu(target: &Target, operation: &Operation) -> bool {
    let turned = turned(target, operation);
    let operation = turned.as_ref().unwrap_or(operation);
    let [Some(weights), Some(act), ..] = &operation.src else {
        return true;
    };
    let always = target.repack == Repack::Always;
    if operation.op == Op::FlashAttnExt {
        let plan = Attention::new(operation);
        return !plan.is_ok_and(|plan| always || plan.pays(target.caps));
    }
    let [_, rows, tokens, _] = act.shape.ne;
    let m = match operation.op {
        Op::MulMat => rows,
        Op::MulMatId => tokens,
        _ => return true,
    };
    // ggml's RPC server does not say which of its buffers hold weights, so a quantized contiguous
    // tensor may be one. A cache is not contiguous, because its heads are read separately.
    let may_be_weights = weights.role == Role::State
        && matches!(weights.dtype, DType::Quantized { .. })
        && weights.shape.is_contiguous(weights.dtype);
    let packs_at_use = match weights.place {
        Place::Host => always || may_be_weights,
        Place::Unknown => true,
        Place::Device => is_packed_beside(target, weights),
        Place::Packed | Place::Foreign => false,
    };
    if matches!(weights.place, Place::Host | Place::Device) && !packs_at_use
        || packs_at_use && command(target, operation).is_err()
    {
        return true;
    }
    m < target.min_m.max(target.min_m_narrow)
        && weights.place != Place::Foreign
        && m < target.min_m(weights)
}

/// Returns [`Operation::turned`] if its weights can be packed.
#[must_use]
pub fn turned<'a>(target: &Target, operation: &Operation<'a>) -> Option<Operation<'a>> {
    let is_packed = |kernel: &Tensor| is_packed_beside(target, kernel);
    (operation.turned()).filter(|turned| turned.src[0].as_ref().is_some_and(is_packed))
}

/// Plans a node.
///
/// # Errors
/// The reason why the device cannot compute the operation.
pub fn command(target: &Target, operation: &Operation) -> Result<Command, Refusal> {
    let weights = operation.src[0].as_ref().ok_or(NOT_OURS)?;
    let layout =
        (target.layout(weights)).ok_or("weights of this type, size or name stay on the CPU")?;
    command_for(layout, operation)
}

const NOT_OURS: Refusal = "not an operation of this NPU";

/// Plans a node whose weights have a layout already. Allocates nothing.
///
/// # Errors
/// The reason why the device cannot compute the operation.
pub fn command_for(weights: WeightLayout, operation: &Operation) -> Result<Command, Refusal> {
    let dst = &operation.dst;
    match (operation.op, &operation.src) {
        (Op::MulMat, [Some(src0), Some(src1), ..]) => {
            mul_mat(weights, dst, src0, src1).map(Command::MulMat)
        }
        (Op::MulMatId, [Some(src0), Some(src1), Some(ids), ..]) => {
            mul_mat_id(weights, dst, src0, src1, ids).map(Command::MulMatId)
        }
        _ => Err(NOT_OURS),
    }
}

fn mul_mat(
    weights: WeightLayout,
    dst: &Tensor,
    src0: &Tensor,
    src1: &Tensor,
) -> Result<MulMat, Refusal> {
    check_operands(dst, src0, src1)?;
    let ([k, n, s2, s3], [k1, m, p2, p3]) = (src0.shape.ne, src1.shape.ne);
    if k != k1 || dst.shape.ne != [n, m, p2, p3] || p2 % s2 != 0 || p3 % s3 != 0 {
        return Err("shapes do not fit");
    }
    Ok(MulMat {
        weights,
        m,
        planes: [p2, p3],
        broadcast: [p2 / s2, p3 / s3],
    })
}

fn mul_mat_id(
    weights: WeightLayout,
    dst: &Tensor,
    src0: &Tensor,
    src1: &Tensor,
    ids: &Tensor,
) -> Result<MulMatId, Refusal> {
    check_operands(dst, src0, src1)?;
    let ([k, n, experts, s3], [k1, rows, tokens, p3]) = (src0.shape.ne, src1.shape.ne);
    let used = ids.shape.ne[0];
    if ids.dtype != DType::I32 || !readable(ids) {
        return Err("choice of experts is not I32 in host memory");
    }
    let fits = k == k1
        && dst.shape.ne == [n, used, tokens, 1]
        && ids.shape.ne == [used, tokens, 1, 1]
        && [s3, p3] == [1, 1]
        && rows > 0
        && used.is_multiple_of(rows);
    if !fits {
        return Err("shapes do not fit");
    }
    Ok(MulMatId {
        weights,
        experts,
        used,
        tokens,
    })
}

fn readable(tensor: &Tensor) -> bool {
    matches!(tensor.place, Place::Host | Place::Device | Place::Unknown)
}

/// Checks the operands of any multiplication.
fn check_operands(dst: &Tensor, src0: &Tensor, src1: &Tensor) -> Result<(), Refusal> {
    if src0.place == Place::Foreign || !readable(src1) || !readable(dst) {
        return Err("operands are in memory of another device");
    }
    if src0.shape.nb[0] != src0.dtype.step_bytes().unwrap_or(0) {
        return Err("weights are transposed");
    }
    if !matches!(src1.dtype, DType::F32 | DType::F16)
        || Some(src1.shape.nb[0]) != src1.dtype.step_bytes()
    {
        return Err("activations are not rows of F32 or F16");
    }
    if dst.dtype != DType::F32 || dst.shape.nb[0] != 4 {
        return Err("result is not rows of F32");
    }
    let ([n, m, ..], [_, row, plane, cube]) = (dst.shape.ne, dst.shape.nb);
    if ![row, plane, cube].iter().all(|step| step.is_multiple_of(4)) {
        return Err("rows of the result are not aligned to 4 bytes");
    }
    if m > 1 && row / 4 < n {
        return Err("rows of the result overlap");
    }
    Ok(())
}

#[cfg(test)]
mod tests;
