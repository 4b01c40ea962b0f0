//! Activation-aware scaling: the columns of weights that have large inputs are made larger, and the
//! tensor that produces these inputs smaller, so that quantization has smaller errors where they
//! matter. The product stays the same.
//!
//! A **group** is the weights that read the same inputs, and the tensor that produces them:
//!
//! | produced by | read by | channels |
//! |---|---|---|
//! | `attn_norm` | `attn_q`, `attn_k`, `attn_v` | one for each column |
//! | `attn_v` (rows) | `attn_output` | one for each row of `attn_v`: query heads that share it share the scale |
//! | `ffn_norm` | `ffn_gate`, `ffn_up` | one for each column |
//! | `ffn_up` (rows) | `ffn_down` | one for each column |
//! | `ffn_norm` | `ffn_gate_inp`, `ffn_gate_exps`, `ffn_up_exps` | one for each column, the same for all experts |
//! | `ffn_up_exps` (rows) | `ffn_down_exps` | one for each column of an expert; a group for each expert |
//!
//! For each group the scales are `s = a^r`, with `a` the root mean square of the channel and the
//! exponent `r` out of 20 that has the smallest `sum(E[x^2] * (W' - W)^2)`, where `W' = Q(W * s) /
//! s`. The losses of experts count by the share of the tokens that each got, and `ffn_down_exps` of
//! an expert that got few is left unchanged.
// SOURCE: AWQ, Lin et al. 2023, and the search of mit-han-lab/llm-awq; the loss needs
// llama-imatrix's data alone.

use ggml_rust_npu::gguf::{File, Header, TensorInfo};

use self::loss::losses_of;
use super::block::Format;
use super::imatrix::Imatrix;
use super::model::{self, HeadSizes};
use super::transform::Transforms;
use crate::ToolError;

mod loss;

/// The option, for messages.
const OPTION: &str = "--awq";

/// Exponents that are tried: 0, 0.05, ... 0.95.
const EXPONENTS: usize = 20;

/// An expert that got fewer rows of activations is not scaled: its statistics are of these rows,
/// not of others. With one row the error of other rows is five times that without scaling, with 64
/// it is the same (numpy, synthetic experts with 768 inputs, Q4_0).
pub const LEAST_ROWS: f32 = 64.0;

/// Weights that read the same inputs.
#[derive(Debug)]
pub struct ScaleGroup {
    /// The names of these weights.
    readers: Vec<String>,
    /// The norm whose elements are divided, or the weight whose rows are, each with its bias if
    /// there is one.
    producer: String,
    producer_is_norm: bool,
    /// The scale's channel for each input of the readers; empty if it is the input's own number.
    channels: Vec<usize>,
    /// The one expert whose matrices these are.
    expert: Option<usize>,
}

/// Returns the groups of a model.
///
/// # Errors
/// Text that names a tensor that the model has and the table above does not.
pub fn groups(header: &Header) -> Result<Vec<ScaleGroup>, ToolError> {
    let heads = model::heads(header)?;
    let blocks = model::number(header, "block_count")?;
    let mut groups = Vec::new();
    for block in 0..blocks {
        groups.extend(block_groups(header, block, heads)?);
    }
    Ok(groups)
}

fn block_groups(
    header: &Header,
    block: usize,
    heads: HeadSizes,
) -> Result<Vec<ScaleGroup>, ToolError> {
    let name = |part: &str| format!("blk.{block}.{part}.weight");
    for part in ["attn_norm", "ffn_norm"] {
        let bias = format!("blk.{block}.{part}.bias");
        if header.tensor(&bias).is_some() {
            return Err(format!("{bias}: norms with a bias are not supported with --awq").into());
        }
    }
    let tensor = |part: &str| model::matrix(header, &name(part), OPTION);
    let (v, output) = (tensor("attn_v")?, tensor("attn_output")?);
    let channels: Vec<usize> = (0..output.ne[0])
        .map(|k| k / heads.size / heads.sharing * heads.size + k % heads.size)
        .collect();
    let fits = |heads: HeadSizes| {
        output.ne[0] == heads.count * heads.size
            && v.ne[1] == heads.count / heads.sharing * heads.size
    };
    if !fits(heads) {
        let ([_, rows, ..], [inputs, ..]) = (v.ne, output.ne);
        let HeadSizes {
            count,
            sharing,
            size,
        } = heads;
        return Err(format!(
            "blk.{block}: attn_v has {rows} rows and attn_output {inputs} inputs, which do not fit {count} heads \
             of {size}, {sharing} of which share one of V"
        )
        .into());
    }
    let group = |producer: &str, readers: &[&str], channels: Vec<usize>| -> Result<_, ToolError> {
        let producer_is_norm = producer.ends_with("_norm");
        let from = name(producer);
        let n_channels = match producer_is_norm {
            true => {
                let inputs = tensor(readers[0])?.ne[0];
                model::vector(header, &from, inputs, OPTION)?.ne[0]
            }
            false => tensor(producer)?.ne[1],
        };
        for reader in readers {
            let inputs = tensor(reader)?.ne[0];
            if channels.is_empty() && inputs != n_channels {
                let reader = name(reader);
                return Err(
                    format!("{reader} has {inputs} inputs, {from} gives {n_channels}").into(),
                );
            }
        }
        let bias = format!("blk.{block}.{producer}.bias");
        if header.tensor(&bias).is_some() {
            model::vector(header, &bias, n_channels, OPTION)?;
        }
        Ok(ScaleGroup {
            readers: readers.iter().map(|reader| name(reader)).collect(),
            producer: from,
            producer_is_norm,
            channels,
            expert: None,
        })
    };
    let mut groups = vec![
        group("attn_norm", &["attn_q", "attn_k", "attn_v"], Vec::new())?,
        group("attn_v", &["attn_output"], channels)?,
    ];
    if header.tensor(&name("ffn_gate_inp")).is_some() {
        groups.extend(expert_groups(header, block)?);
    } else {
        groups.push(group("ffn_norm", &["ffn_gate", "ffn_up"], Vec::new())?);
        groups.push(group("ffn_up", &["ffn_down"], Vec::new())?);
    }
    Ok(groups)
}

/// Tensors of a feed-forward part with experts.
const EXPERT_PARTS: [&str; 5] = [
    "ffn_norm",
    "ffn_gate_inp",
    "ffn_gate_exps",
    "ffn_up_exps",
    "ffn_down_exps",
];

/// Returns the groups of a feed-forward part with experts.
fn expert_groups(header: &Header, block: usize) -> Result<Vec<ScaleGroup>, ToolError> {
    let name = |part: &str| format!("blk.{block}.{part}.weight");
    let known = EXPERT_PARTS.map(name);
    // Other tensors, such as shared experts, biases or merged matrices, also read the norm or
    // depend on its scale, so the block is refused.
    let prefixes = [format!("blk.{block}.ffn_"), format!("blk.{block}.exp_")];
    let unknown = (header.tensors.iter()).find(|tensor| {
        prefixes
            .iter()
            .any(|prefix| tensor.name.starts_with(prefix))
            && !known.contains(&tensor.name)
    });
    if let Some(tensor) = unknown {
        let name = &tensor.name;
        return Err(format!("{name}: experts with it are not supported with {OPTION}").into());
    }
    let [norm, router, gate, up, down] = known;
    let router_shape = model::matrix(header, &router, OPTION)?.ne;
    let [inputs, count, ..] = router_shape;
    model::vector(header, &norm, inputs, OPTION)?;
    let of = |name: &str| model::experts(header, name, OPTION);
    let [_, hidden, ..] = of(&up)?.ne;
    for (name, want) in [
        (&gate, [inputs, hidden, count, 1]),
        (&up, [inputs, hidden, count, 1]),
        (&down, [hidden, inputs, count, 1]),
    ] {
        let have = of(name)?.ne;
        if have != want {
            let fits = format!("which does not fit {router} and {up}");
            return Err(format!("{name} has the shape {have:?}, {fits}: {want:?}").into());
        }
    }
    let by_expert = |expert| ScaleGroup {
        readers: vec![down.clone()],
        producer: up.clone(),
        producer_is_norm: false,
        channels: Vec::new(),
        expert: Some(expert),
    };
    let mut groups: Vec<_> = (0..count).map(by_expert).collect();
    groups.push(ScaleGroup {
        // The first reader's statistics are used for all; the router may have none.
        readers: vec![gate, up, router],
        producer: norm,
        producer_is_norm: true,
        channels: Vec::new(),
        expert: None,
    });
    Ok(groups)
}

/// Result of the search for a group.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    /// The exponent.
    pub exponent: f32,
    /// The loss with this exponent, divided by the loss without scaling.
    pub relative_loss: f64,
}

/// Finds the scales of a group and adds them to `transforms`.
///
/// - `format_of`: the type that a reader gets; `None` for a lossless one
///
/// Returns `None` for an expert that got too few rows of activations, which is left unchanged.
///
/// # Errors
/// Text, if the imatrix does not fit the model.
pub fn scale(
    file: &File,
    imatrix: &Imatrix,
    format_of: &dyn Fn(&TensorInfo) -> Option<Format>,
    group: &ScaleGroup,
    transforms: &mut Transforms,
) -> Result<Option<Found>, ToolError> {
    let readers: Vec<&TensorInfo> = (group.readers.iter())
        .filter_map(|name| file.header().tensor(name))
        .collect();
    let mut losses = [0.0; EXPONENTS];
    let inputs = readers[0].ne[0];
    if let Some(expert) = group.expert
        && imatrix.count(readers[0], expert)? < LEAST_ROWS
    {
        return Ok(None);
    }
    let squares = match group.expert {
        Some(expert) => imatrix.of(readers[0])?[expert * inputs..][..inputs].to_vec(),
        None => imatrix.of_all_experts(readers[0])?,
    };
    let candidates = group.candidates(&squares);
    for reader in &readers {
        let Some(format) = format_of(reader) else {
            continue;
        };
        let matrices = match group.expert {
            Some(expert) => vec![(expert, 1.0)],
            None => imatrix.shares(reader)?.into_iter().enumerate().collect(),
        };
        let squares = imatrix.of(reader)?;
        for (matrix, share) in matrices {
            let squares = &squares[matrix * inputs..][..inputs];
            let more = losses_of(file, reader, matrix, squares, &candidates, format);
            losses
                .iter_mut()
                .zip(more)
                .for_each(|(sum, loss)| *sum += f64::from(share) * loss);
        }
    }
    let smaller = |best: usize, r: usize| if losses[r] < losses[best] { r } else { best };
    let best = (0..EXPONENTS).fold(0, smaller);
    let found = Found {
        exponent: exponent(best),
        relative_loss: if losses[0] > 0.0 {
            losses[best] / losses[0]
        } else {
            1.0
        },
    };
    // Exponent 0 means no scaling.
    if best > 0 {
        group.fold(&candidates[best], file.header(), transforms);
    }
    Ok(Some(found))
}

fn exponent(index: usize) -> f32 {
    // CAST: at most 20.
    index as f32 / EXPONENTS as f32
}

impl ScaleGroup {
    /// Returns the scales of each exponent, one for each input of the readers.
    fn candidates(&self, squares: &[f32]) -> Vec<Vec<f32>> {
        let n_channels = self
            .channels
            .iter()
            .max()
            .map_or(squares.len(), |max| max + 1);
        let channel = |k: usize| self.channels.get(k).copied().unwrap_or(k);
        let (mut sums, mut counts) = (vec![0.0f32; n_channels], vec![0.0f32; n_channels]);
        for (k, square) in squares.iter().enumerate() {
            sums[channel(k)] += square;
            counts[channel(k)] += 1.0;
        }
        let size = |c: usize| (sums[c] / counts[c]).sqrt();
        let of_exponent = |index: usize| {
            let powers = (0..n_channels).map(|c| size(c).powf(exponent(index)).max(SMALLEST));
            let powers: Vec<f32> = powers.collect();
            let low = powers.iter().copied().fold(f32::INFINITY, f32::min);
            let high = powers.iter().copied().fold(0.0, f32::max);
            let middle = (low * high).sqrt();
            (0..squares.len())
                .map(|k| powers[channel(k)] / middle)
                .collect()
        };
        (0..EXPONENTS).map(of_exponent).collect()
    }

    /// Multiplies the readers' columns, and divides the tensors that produce their inputs.
    fn fold(&self, scales: &[f32], header: &Header, transforms: &mut Transforms) {
        if let Some(expert) = self.expert {
            return self.fold_expert(expert, scales, header, transforms);
        }
        for reader in &self.readers {
            transforms.entry(reader.clone()).or_default().columns = scales.to_vec();
        }
        let n_channels = self
            .channels
            .iter()
            .max()
            .map_or(scales.len(), |max| max + 1);
        let mut by_channel = vec![1.0; n_channels];
        for (k, scale) in scales.iter().enumerate() {
            by_channel[self.channels.get(k).copied().unwrap_or(k)] = *scale;
        }
        let inverse = || by_channel.iter().map(|scale| 1.0 / scale).collect();
        if self.producer_is_norm {
            transforms.entry(self.producer.clone()).or_default().columns = inverse();
            return;
        }
        let bias = self.producer.replace(".weight", ".bias");
        if header.tensor(&bias).is_some() {
            transforms.entry(bias).or_default().columns = inverse();
        }
        transforms.entry(self.producer.clone()).or_default().rows = by_channel;
    }
}

impl ScaleGroup {
    /// Multiplies the columns of one expert's matrix, and divides the rows of the same expert's
    /// that gives it its inputs.
    fn fold_expert(
        &self,
        expert: usize,
        scales: &[f32],
        header: &Header,
        transforms: &mut Transforms,
    ) {
        let [_, rows, count, _] = (header.tensor(&self.readers[0])).map_or([0; 4], |w| w.ne);
        let of_expert = |all: &mut Vec<f32>| {
            all.resize(count * scales.len(), 1.0);
            all[expert * scales.len()..][..scales.len()].copy_from_slice(scales);
        };
        let reader = transforms.entry(self.readers[0].clone()).or_default();
        reader.expert_rows = rows;
        of_expert(&mut reader.columns);
        of_expert(&mut transforms.entry(self.producer.clone()).or_default().rows);
    }
}

/// A channel that is never used is scaled as if it were this large.
// SOURCE: mit-han-lab/llm-awq, auto_scale.py.
const SMALLEST: f32 = 1e-4;
