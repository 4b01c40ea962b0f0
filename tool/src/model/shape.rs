//! The products, norms and caches of a model, from its file.

use std::collections::HashSet;

use ggml_rust_npu::gguf::{File, GgmlType, Header, TensorInfo, Value};
use ggml_rust_npu::hexagon::layout::{Conversion, WeightLayout};
use hexagon_ops::layout::WeightType;

use crate::ToolError;
use crate::chip::weights;

/// Weights that activations are multiplied by.
pub struct WeightProduct {
    /// The type that the NPU holds them in.
    pub weight: GgmlType,
    /// The packed type; `None` if the weights are not packed.
    pub packed: Option<WeightType>,
    /// The weights in the file.
    pub tensor: TensorInfo,
    /// Elements of a row of weights.
    pub inputs: usize,
    /// Rows of weights.
    pub outputs: usize,
    /// Number of experts, and how many a token uses; (1, 1) without experts.
    pub experts: (usize, usize),
}

/// Rows of a token that are normalized.
pub struct NormSize {
    /// Elements of a row.
    pub elems: usize,
    /// Rows: one, or a head each.
    pub rows: usize,
}

/// One layer.
#[derive(Default)]
pub struct Layer {
    /// Multiplications by weights.
    pub products: Vec<WeightProduct>,
    /// Normalizations.
    pub norms: Vec<NormSize>,
    /// Elements of each bias.
    pub biases: Vec<usize>,
    /// Elements of a token that the gated unit makes; 0 without one.
    pub gated: usize,
    /// Heads of keys and values; 0 without attention.
    pub kv_heads: usize,
}

/// A model whose layers are attention to a cache, and products.
pub struct ModelShape {
    /// The model's architecture, as the file names it.
    pub arch: String,
    /// The model's layers.
    pub layers: Vec<Layer>,
    /// Elements of a token between layers.
    pub embed: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Elements of a head.
    pub head: usize,
    /// The output head.
    pub output: WeightProduct,
    /// Bytes of all tensors in the file.
    pub bytes: usize,
}

impl ModelShape {
    /// Reads the shape of a model.
    ///
    /// # Errors
    /// Text, if the file has no such model: other layers than attention and products, or a number
    /// that is missing.
    pub fn of(file: &File) -> Result<Self, ToolError> {
        let header = file.header();
        let arch = header
            .get("general.architecture")
            .and_then(|value| value.as_str());
        let arch = arch.ok_or("the file has no general.architecture")?;
        let find = |key: &str| number(header, &format!("{arch}.{key}"));
        let needed = |key: &str| -> Result<usize, ToolError> {
            find(key)?.ok_or_else(|| format!("the file has no number {arch}.{key}").into())
        };
        let count = needed("block_count")?;
        check_layers(header, arch, count)?;
        let embed = needed("embedding_length")?;
        let heads = needed("attention.head_count")?.max(1);
        let head = find("attention.key_length")?.unwrap_or(embed / heads);
        let used = find("expert_used_count")?.unwrap_or(1);
        let output = header
            .tensor("output.weight")
            .or_else(|| header.tensor("token_embd.weight"));
        let output = output.ok_or("the file has neither output.weight nor token_embd.weight")?;

        let kv_heads = kv_heads(
            file,
            &format!("{arch}.attention.head_count_kv"),
            count,
            heads,
        )?;
        let layers = kv_heads.into_iter().map(|kv_heads| Layer {
            kv_heads,
            ..Layer::default()
        });
        let mut layers: Vec<Layer> = layers.collect();
        for tensor in &header.tensors {
            let Some((layer, name)) = place(tensor) else {
                continue;
            };
            let layer = layer.and_then(|layer| layers.get_mut(layer));
            let layer =
                layer.ok_or_else(|| format!("{}: {arch}.block_count is {count}", tensor.name))?;
            layer
                .add(name, tensor, used, [heads, head])
                .map_err(|reason| format!("{}: {reason}", tensor.name))?;
        }
        Ok(Self {
            arch: arch.to_owned(),
            layers,
            embed,
            heads,
            head,
            output: WeightProduct::of(output, 1),
            bytes: header.tensors.iter().map(|tensor| tensor.range.len()).sum(),
        })
    }
}

/// Returns the layer of a tensor, if that is a number, and its name there; `None` if it is outside
/// of layers.
fn place(tensor: &TensorInfo) -> Option<(Option<usize>, &str)> {
    let rest = tensor.name.strip_prefix("blk.")?;
    let (layer, name) = rest.split_once('.').unwrap_or((rest, ""));
    Some((layer.parse().ok(), name))
}

/// Refuses a number of layers if one of them has no tensors, so that memory is allocated only for
/// existing layers.
fn check_layers(header: &Header, arch: &str, count: usize) -> Result<(), ToolError> {
    let tensors = header.tensors.iter();
    let known: HashSet<usize> = tensors.filter_map(|tensor| place(tensor)?.0).collect();
    match (0..count).find(|layer| !known.contains(layer)) {
        Some(layer) => {
            Err(format!("{arch}.block_count is {count}, and blk.{layer} has no tensors").into())
        }
        None => Ok(()),
    }
}

/// Largest accepted size, so that products of sizes fit into 64 bits.
const LARGEST: usize = 1 << 20;

/// Returns a number of the file's; `None` if it is not set.
///
/// # Errors
/// An error text with the key and its value if that is not a number, or above [`LARGEST`].
fn number(header: &Header, key: &str) -> Result<Option<usize>, ToolError> {
    let Some(value) = header.get(key) else {
        return Ok(None);
    };
    let number = value.as_usize().filter(|number| *number <= LARGEST);
    let number = number.ok_or_else(|| format!("{key} is {value}, no number up to {LARGEST}"))?;
    Ok(Some(number))
}

/// Returns the heads of keys and values of each layer. The file has a number for all layers, or an
/// array with one for each, in which 0 is a layer without attention.
///
/// - `heads`: heads of queries, which is the number if the file has none
///
/// # Errors
/// Text that names the key, if its value is something else.
fn kv_heads(file: &File, key: &str, count: usize, heads: usize) -> Result<Vec<usize>, ToolError> {
    // GGUF's type numbers for 32-bit integers.
    const INTEGERS: [u32; 2] = [4, 5];
    let header = file.header();
    let array = header.entries.iter().find_map(|entry| match entry.value {
        Value::Array { kind, len } if entry.key == key => Some((kind, len, entry.range.end)),
        _ => None,
    });
    let found = match array {
        Some((kind, len, end)) if INTEGERS.contains(&kind) && len == count as u64 => {
            // PANIC: the elements are the end of the entry, whose range in the file was checked.
            let words = file.bytes()[end - 4 * count..end].as_chunks().0;
            let words = words.iter().map(|word| u32::from_le_bytes(*word));
            words.map(|word| word as usize).collect()
        }
        Some((kind, len, _)) => {
            return Err(format!(
                "{key} has {len} elements of kind {kind}, not {count} integers of 32 bits"
            )
            .into());
        }
        None => vec![number(header, key)?.unwrap_or(heads).max(1); count],
    };
    match found.iter().find(|number| **number > heads) {
        Some(number) => {
            Err(format!("{key}: {heads} heads cannot share {number} of keys and values").into())
        }
        None => Ok(found),
    }
}

impl WeightProduct {
    /// Reads the size of a product with a tensor, with `used` experts for a token.
    pub fn of(tensor: &TensorInfo, used: usize) -> Self {
        let [inputs, outputs, experts, _] = tensor.ne;
        let layout = WeightLayout::new(&weights(tensor));
        Self {
            packed: layout.map(|layout| layout.weight()),
            weight: match layout.map(|layout| layout.form) {
                Some(Conversion::Halved) => GgmlType::F16,
                Some(Conversion::Requantized) => GgmlType::Q8_0,
                Some(Conversion::Lossless | Conversion::Groups) | None => tensor.dtype,
            },
            tensor: tensor.clone(),
            inputs,
            outputs,
            experts: (experts, used.min(experts)),
        }
    }

    /// Returns the experts whose weights `rows` tokens read, if each row chooses its experts at
    /// random, and the rows of each.
    pub fn touched(&self, rows: usize) -> (f64, usize) {
        let (experts, used) = self.experts;
        if experts == 1 {
            return (1.0, rows);
        }
        let [all, each, tokens] = [experts, used, rows].map(super::counts::as_f64);
        let touched = all * (1.0 - (1.0 - each / all).powf(tokens));
        // CAST: positive, and at most `rows`.
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "see above"
        )]
        let rows = (tokens * each / touched).round().max(1.0) as usize;
        (touched, rows)
    }
}

impl Layer {
    /// Adds a tensor of the layer by its name there.
    ///
    /// - `used`: number of experts for a token
    /// - `heads`, `head`: heads of queries, and elements of a head
    ///
    /// # Errors
    /// Text, if the layer consists of other parts than attention and products.
    fn add(
        &mut self,
        name: &str,
        tensor: &TensorInfo,
        used: usize,
        [heads, head]: [usize; 2],
    ) -> Result<(), &'static str> {
        if name.starts_with("ssm_")
            || name.starts_with("time_mix")
            || name.starts_with("shortconv")
            || name.contains("_kv_a")
        {
            return Err("the model of costs knows attention and products only");
        }
        match (name.ends_with("norm.weight"), tensor.dims) {
            (true, _) => {
                // One row of factors may serve all heads of a token.
                let (elems, rows) = match name {
                    "attn_q_norm.weight" if tensor.ne[0] == head => (head, heads),
                    "attn_k_norm.weight" if tensor.ne[0] == head => (head, self.kv_heads),
                    _ => (tensor.ne[0], tensor.rows()),
                };
                self.norms.push(NormSize { elems, rows });
            }
            (false, 1) if name.ends_with(".bias") => self.biases.push(tensor.ne[0]),
            (false, 2 | 3) if name.ends_with(".weight") => {
                if name.starts_with("ffn_gate") && !name.starts_with("ffn_gate_inp") {
                    self.gated += tensor.ne[1] * used.min(tensor.ne[2]);
                }
                self.products.push(WeightProduct::of(tensor, used));
            }
            // Scales, sinks and tables of factors are counted with the operations that read them.
            _ => {}
        }
        Ok(())
    }
}
