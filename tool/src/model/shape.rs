//! The products, norms and caches of a model, as its file says.

use ggml_rust_npu::gguf::{GgmlType, Header, TensorInfo};

use crate::ToolError;

/// Weights that activations are multiplied by.
pub struct WeightProduct {
    /// Their type.
    pub weight: GgmlType,
    /// Elements of a row of weights.
    pub inputs: usize,
    /// Rows of weights.
    pub outputs: usize,
    /// Experts, and of them those that a token takes; one of one without experts.
    pub experts: (usize, usize),
}

/// Rows of a token that are normalized: the elements of each.
pub struct NormSize(pub usize);

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
}

/// A model whose layers are attention to a cache, and products.
pub struct ModelShape {
    /// Its layers.
    pub layers: Vec<Layer>,
    /// Elements of a token between layers.
    pub embed: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
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
    pub fn of(header: &Header) -> Result<Self, ToolError> {
        let arch = header
            .get("general.architecture")
            .and_then(|value| value.as_str());
        let arch = arch.ok_or("the file has no general.architecture")?;
        let find = |key: &str| {
            header
                .get(&format!("{arch}.{key}"))
                .and_then(|value| value.as_usize())
        };
        let number =
            |key: &str| find(key).ok_or_else(|| format!("the file has no number {arch}.{key}"));
        let (count, embed) = (number("block_count")?, number("embedding_length")?);
        let heads = number("attention.head_count")?.max(1);
        let kv_heads = find("attention.head_count_kv").unwrap_or(heads).max(1);
        let head = find("attention.key_length").unwrap_or(embed / heads);
        let used = find("expert_used_count").unwrap_or(1);
        let output = header
            .tensor("output.weight")
            .or_else(|| header.tensor("token_embd.weight"));
        let output = output.ok_or("the file has neither output.weight nor token_embd.weight")?;

        let mut layers = Vec::new();
        layers.resize_with(count, Layer::default);
        for tensor in &header.tensors {
            let Some(rest) = tensor.name.strip_prefix("blk.") else {
                continue;
            };
            let (layer, name) = rest.split_once('.').unwrap_or((rest, ""));
            let layer = layer
                .parse()
                .ok()
                .and_then(|layer: usize| layers.get_mut(layer));
            let layer =
                layer.ok_or_else(|| format!("{}: {arch}.block_count is {count}", tensor.name))?;
            layer
                .add(name, tensor, used)
                .map_err(|reason| format!("{}: {reason}", tensor.name))?;
        }
        Ok(Self {
            layers,
            embed,
            heads,
            kv_heads,
            head,
            output: WeightProduct::of(output, 1),
            bytes: header.tensors.iter().map(|tensor| tensor.range.len()).sum(),
        })
    }
}

impl WeightProduct {
    fn of(tensor: &TensorInfo, used: usize) -> Self {
        let [inputs, outputs, experts, _] = tensor.ne;
        let (_, format) = tensor.dtype.tensor_type();
        // Types without tiles of their own are held as Q8_0.
        let is_requantized = tensor.dtype.is_quantized() && format.is_none();
        Self {
            weight: if is_requantized {
                GgmlType::Q8_0
            } else {
                tensor.dtype
            },
            inputs,
            outputs,
            experts: (experts, used.min(experts)),
        }
    }

    /// Returns the experts whose weights `rows` tokens read, if each takes its own at random, and
    /// the rows of each.
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
    fn add(&mut self, name: &str, tensor: &TensorInfo, used: usize) -> Result<(), &'static str> {
        if name.starts_with("ssm_") || name.starts_with("time_mix") || name.contains("_kv_a") {
            return Err("the model of costs knows attention and products only");
        }
        match (name.ends_with("norm.weight"), tensor.dims) {
            (true, _) => self.norms.push(NormSize(tensor.ne[0] * tensor.rows())),
            (false, 1) if name.ends_with(".bias") => self.biases.push(tensor.ne[0]),
            (false, 2 | 3) if name.ends_with(".weight") => {
                if name.starts_with("ffn_gate") && !name.starts_with("ffn_gate_inp") {
                    self.gated += tensor.ne[1] * used.min(tensor.ne[2]);
                }
                self.products.push(WeightProduct::of(tensor, used));
            }
            // Scales, sinks and tables of factors are read with other operands.
            _ => {}
        }
        Ok(())
    }
}
