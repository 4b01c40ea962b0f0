//! The time of a step on a Rockchip NPU, by the costs with which the backend's planner decides.
//!
//! Products, the CPU's work between them and attention follow each other.

use std::fmt::Write as _;

use ggml_rust_npu::config::Config;
use ggml_rust_npu::rockchip::caps::{CPU_OPS_PER_NS, RkCaps};
use ggml_rust_npu::rockchip::discovery;
use ggml_rust_npu::rockchip::plan::{Attention, Bucketing, Buckets, Target};
use rknpu_ops::attention::Scaling;
use serde::Serialize;

use super::counts::as_f64;
use super::shape::{ModelShape, WeightProduct};
use super::{CELLS, ModelArgs, Published};
use crate::ToolError;
use crate::chip::rockchip_layout;
use crate::text::{Column, table};

/// Nanoseconds of the CPU for each element that goes into a product on the NPU or comes out of it:
/// rotation, quantization and sums, and the norms and gates between products.
// SOURCE: fitted to RK3588 and Qwen2.5-1.5B Q8_0, with 281 tokens/s for a prompt of 512
// (unimatrix099's fork of rk-llama.cpp; attention is assumed to be on the NPU). Other chips have no
// published figures, so they get the same.
const ELEMENT_NS: f64 = 2.35;

/// Operations of the CPU's products in a nanosecond, for one token and for many.
// SOURCE: RK3588 with four A76, rk-llama.cpp's README. One token at a time: 28.3 tokens/s of Gemma3
// 1B Q4_0, 8.3 of Ministral3 3B Q4_0. A prompt of 512: 17.5 and 15.1 tokens/s of Ministral3 3B Q8_0
// and Q4_0. Other chips have no published figures, so they get the same.
const CPU_TOKEN_OPS_PER_NS: f64 = 60.0;
const CPU_BATCH_OPS_PER_NS: f64 = 100.0;

/// Bytes that the CPU reads from memory in a nanosecond.
// SOURCE: four A76 of RK3588, 25 GB/s (unimatrix099's fork of rk-llama.cpp). Other chips have no
// published figures, so they get the same.
const CPU_BYTES_PER_NS: f64 = 25.0;

/// Bytes of an element of a cache in F16.
const CACHE_BYTES: usize = 2;

/// Tokens and caches of a step.
#[derive(Clone, Copy)]
struct Step {
    /// Tokens of each sequence.
    queries: usize,
    /// Sequences, each with its own cache.
    sequences: usize,
    /// Cells of a cache.
    cells: usize,
    /// Tokens whose logits are wanted.
    logits: usize,
}

/// The time of a step in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
struct StepNs {
    products: f64,
    host: f64,
    /// On the CPU or the NPU, as the planner chooses.
    attention: f64,
    /// Attention on the CPU, at its lowest and its highest rate.
    cpu_attention: [f64; 2],
}

impl StepNs {
    fn add(&mut self, other: Self) {
        self.products += other.products;
        self.host += other.host;
        self.attention += other.attention;
        for (own, other) in self.cpu_attention.iter_mut().zip(other.cpu_attention) {
            *own += other;
        }
    }

    /// Returns the tokens each second with attention on the unit that the planner chooses.
    fn tokens_per_s(&self, tokens: usize) -> f64 {
        as_f64(tokens) * 1e9 / (self.products + self.host + self.attention)
    }

    /// Returns the tokens each second with attention on the CPU, at its lowest and its highest
    /// rate.
    fn cpu_attention_tokens_per_s(&self, tokens: usize) -> [f64; 2] {
        let rest = self.products + self.host;
        (self.cpu_attention).map(|attention| as_f64(tokens) * 1e9 / (rest + attention))
    }

    /// Adds a product of `rows` tokens.
    fn add_product(&mut self, target: &Target, product: &WeightProduct, rows: usize) {
        let (experts, of_expert) = product.touched(rows);
        if let Some(layout) = rockchip_layout(target, &product.tensor, rows) {
            let costs = Bucketing::new(&target.caps.cost, &layout, Buckets::ALL);
            let pieces = costs.pieces(of_expert);
            let ns: f64 = pieces
                .map(|piece| f64::from(costs.cost(piece.bucket)))
                .sum();
            self.products += experts * ns * as_f64(layout.chunks_per_core * layout.segments);
            let sums = layout.segments * layout.precision.rows();
            let elements = product.inputs + product.outputs * sums;
            self.host += experts * as_f64(of_expert * elements) * ELEMENT_NS;
        } else {
            let bytes = as_f64(product.tensor.range.len()) / as_f64(product.tensor.ne[2].max(1));
            let token = 2.0 * as_f64(product.inputs * product.outputs);
            let computing = token / CPU_TOKEN_OPS_PER_NS;
            let computing = computing.max(token * as_f64(of_expert) / CPU_BATCH_OPS_PER_NS);
            self.products += experts * computing.max(bytes / CPU_BYTES_PER_NS);
        }
    }

    /// Adds the attention of a layer.
    fn add_attention(&mut self, caps: &RkCaps, shape: &ModelShape, kv_heads: usize, step: Step) {
        if kv_heads == 0 {
            return;
        }
        let attention = Attention {
            head: [shape.head; 2],
            heads: [shape.heads, kv_heads],
            sequences: [step.sequences; 2],
            queries: step.queries,
            cells: step.cells,
            scaling: Scaling {
                scale: 1.0,
                softcap: 0.0,
            },
            max_bias: 0.0,
        };
        let bytes = 2 * step.sequences * step.cells * kv_heads * shape.head * CACHE_BYTES;
        let reading = as_f64(bytes) / CPU_BYTES_PER_NS;
        let planned = f64::from(caps.attention.cpu_ops_per_ns);
        let computing = f64::from(attention.cpu_ns(caps)) * planned;
        let [slow, fast] = CPU_OPS_PER_NS.map(|rate| (computing / f64::from(rate)).max(reading));
        self.cpu_attention[0] += slow;
        self.cpu_attention[1] += fast;
        self.attention += if attention.pays(caps) {
            f64::from(attention.npu_ns(caps))
        } else {
            fast
        };
    }

    fn of(target: &Target, shape: &ModelShape, step: Step) -> Self {
        let mut ns = Self::default();
        let rows = step.queries * step.sequences;
        for layer in &shape.layers {
            for product in &layer.products {
                ns.add_product(target, product, rows);
            }
            ns.add_attention(target.caps, shape, layer.kv_heads, step);
        }
        ns.add_product(target, &shape.output, step.logits);
        ns
    }

    /// Returns the time of a prompt, computed in parts.
    fn of_prompt(target: &Target, shape: &ModelShape, tokens: usize, part: usize) -> Self {
        let mut ns = Self::default();
        for begin in (0..tokens).step_by(part) {
            let queries = part.min(tokens - begin);
            let step = Step {
                queries,
                sequences: 1,
                cells: (begin + queries).next_multiple_of(CELLS),
                logits: 1,
            };
            ns.add(Self::of(target, shape, step));
        }
        ns
    }
}

/// The speed of a prompt, or of generation by some sequences, in tokens each second.
#[derive(Debug, Serialize)]
struct Row {
    context: u32,
    /// Sequences that generate; `None` for a prompt.
    batch: Option<u32>,
    tokens_per_s: f64,
    cpu_attention_tokens_per_s: [f64; 2],
    products_us: f64,
    host_us: f64,
    attention_us: f64,
    cpu_attention_us: [f64; 2],
}

impl Row {
    fn new(context: u32, batch: Option<u32>, ns: StepNs) -> Self {
        let tokens = batch.unwrap_or(context) as usize;
        Self {
            context,
            batch,
            tokens_per_s: ns.tokens_per_s(tokens),
            cpu_attention_tokens_per_s: ns.cpu_attention_tokens_per_s(tokens),
            products_us: ns.products / 1e3,
            host_us: ns.host / 1e3,
            attention_us: ns.attention / 1e3,
            cpu_attention_us: ns.cpu_attention.map(|ns| ns / 1e3),
        }
    }
}

/// Everything that the command prints of a Rockchip chip.
#[derive(Debug, Serialize)]
pub struct Report {
    chip: String,
    prompts: Vec<Row>,
    generation: Vec<Row>,
    published: Vec<Published>,
}

impl Report {
    /// Computes prompts and generation for the requested lengths and sequences.
    ///
    /// # Errors
    /// An error text if the environment's rules contain an arithmetic that the chip lacks.
    pub fn new(
        args: &ModelArgs,
        caps: &'static RkCaps,
        shape: &ModelShape,
    ) -> Result<Self, ToolError> {
        let target = discovery::target(caps, &Config::from_env()?)?;
        let prompts = args.context.iter().map(|&context| {
            let ns = StepNs::of_prompt(&target, shape, context as usize, args.ubatch as usize);
            Row::new(context, None, ns)
        });
        let of = |context: u32, batch: u32| {
            let (queries, sequences) = if args.shared { (batch, 1) } else { (1, batch) };
            let step = Step {
                queries: queries as usize,
                sequences: sequences as usize,
                cells: (context as usize).next_multiple_of(CELLS),
                logits: batch as usize,
            };
            Row::new(context, Some(batch), StepNs::of(&target, shape, step))
        };
        let each = |&context| args.batch.iter().map(move |&batch| of(context, batch));
        let known = (shape.arch.as_str(), shape.layers.len(), shape.embed);
        Ok(Self {
            chip: args.chip.clone(),
            prompts: prompts.collect(),
            generation: args.context.iter().flat_map(each).collect(),
            published: super::published(known, &args.chip),
        })
    }

    /// Returns the report as tables.
    pub fn text(&self, args: &ModelArgs) -> String {
        let mut columns = vec![Column::Number("context")];
        let names = args.batch.iter().map(|batch| format!("{batch} at once"));
        columns.extend(names.map(|name| Column::Number(name.leak())));
        columns.extend(["prompt", "prompt, CPU attention"].map(Column::Number));
        let rows = self.generation.chunks(args.batch.len()).zip(&self.prompts);
        let rows = rows.map(|(row, prompt)| {
            let generated = row.iter().map(|row| row.tokens_per_s);
            let mut cells = vec![prompt.context.to_string()];
            let read = std::iter::once(prompt.tokens_per_s);
            cells.extend(generated.chain(read).map(|speed| format!("{speed:.1}")));
            cells.push(super::band(prompt.cpu_attention_tokens_per_s));
            cells
        });
        let mut text = format!(
            "Tokens each second on {}, reckoned, not measured.",
            self.chip
        );
        if self.chip != "rk3588" {
            text +=
                " No rates of this chip are published: they are those of RK3588's cores and CPUs.";
        }
        let _ = writeln!(text, "\n");
        text += &table(&columns, rows.collect::<Vec<_>>());
        text + &super::published_text(&self.published)
    }
}

#[cfg(test)]
mod tests;
