//! Small random models, their statistics, and the oracle that computes them in `f64`.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use ggml_rust_npu::gguf::{File, GgmlType};
use half::f16;

use crate::common::{self, Model};

pub const EMBED: usize = 64;
pub const HEADS: usize = 4;
pub const KV_HEADS: usize = 2;
pub const HEAD: usize = 32;
pub const FFN: usize = 96;
pub const BLOCKS: usize = 2;
pub const TOKENS: usize = 5;

/// A random model. Norms are near 1, so that scaling has something to divide.
pub fn model(architecture: &str) -> Model {
    let mut model = Model::new("general.architecture", architecture);
    for (key, value) in [
        ("embedding_length", EMBED),
        ("block_count", BLOCKS),
        ("attention.head_count", HEADS),
        ("attention.head_count_kv", KV_HEADS),
        ("attention.key_length", HEAD),
        ("attention.value_length", HEAD),
    ] {
        model.number(&format!("{architecture}.{key}"), value);
    }
    model.random("token_embd.weight", &[EMBED, TOKENS], 0.0);
    model.random("output_norm.weight", &[EMBED], 1.0);
    for block in 0..BLOCKS {
        let mut add = |part: &str, ne: &[usize], middle| {
            model.random(&format!("blk.{block}.{part}"), ne, middle);
        };
        add("attn_norm.weight", &[EMBED], 1.0);
        add("attn_q.weight", &[EMBED, HEADS * HEAD], 0.0);
        add("attn_k.weight", &[EMBED, KV_HEADS * HEAD], 0.0);
        add("attn_v.weight", &[EMBED, KV_HEADS * HEAD], 0.0);
        add("attn_output.weight", &[HEADS * HEAD, EMBED], 0.0);
        add("ffn_norm.weight", &[EMBED], 1.0);
        add("ffn_gate.weight", &[EMBED, FFN], 0.0);
        add("ffn_up.weight", &[EMBED, FFN], 0.0);
        add("ffn_down.weight", &[FFN, EMBED], 0.0);
        match architecture {
            "qwen2" => {
                add("attn_q.bias", &[HEADS * HEAD], 0.0);
                add("attn_k.bias", &[KV_HEADS * HEAD], 0.0);
                add("attn_v.bias", &[KV_HEADS * HEAD], 0.0);
            }
            "qwen3" | "qwen3moe" | "gemma3" => {
                add("attn_q_norm.weight", &[HEAD], 1.0);
                add("attn_k_norm.weight", &[HEAD], 1.0);
            }
            _ => {}
        }
        if architecture == "gemma3" {
            add("post_attention_norm.weight", &[EMBED], 1.0);
            add("post_ffw_norm.weight", &[EMBED], 1.0);
        }
    }
    model
}

/// Number of experts of [`with_experts`], two of which each token uses.
pub const EXPERTS: usize = 3;

/// Puts experts in place of the feed-forward part of each block.
pub fn with_experts(mut model: Model) -> Model {
    for block in 0..BLOCKS {
        for part in ["gate", "up", "down"] {
            let dense = format!("blk.{block}.ffn_{part}.weight");
            model.tensors.retain(|(name, ..)| *name != dense);
        }
        let mut add = |part: &str, ne: &[usize]| {
            model.random(&format!("blk.{block}.{part}.weight"), ne, 0.0);
        };
        add("ffn_gate_inp", &[EMBED, EXPERTS]);
        add("ffn_gate_exps", &[EMBED, FFN, EXPERTS]);
        add("ffn_up_exps", &[EMBED, FFN, EXPERTS]);
        add("ffn_down_exps", &[FFN, EMBED, EXPERTS]);
    }
    model
}

/// Statistics of every weight of the blocks: one set for all that read the same inputs, over three
/// decades.
pub fn imatrix(model: &Model) -> Model {
    let mut imatrix = Model::new("general.type", "imatrix");
    for (name, ne, _) in &model.tensors {
        let seed = match name.as_str() {
            name if ["attn_q", "attn_k", "attn_v"]
                .iter()
                .any(|part| name.contains(part)) =>
            {
                1
            }
            name if name.contains("ffn_gate") || name.contains("ffn_up") => 2,
            _ => 3,
        };
        if name.starts_with("blk.") && ne.len() == 2 {
            let random = common::numbers(seed + name.as_bytes()[4] as u64, ne[0]);
            let sums = random.iter().map(|x| 10.0 * 10f32.powf(1.5 * x));
            imatrix.tensor(&format!("{name}.in_sum2"), &[ne[0], 1], sums.collect());
            imatrix.tensor(&format!("{name}.in_sum"), &[ne[0], 1], random.clone());
            imatrix.tensor(&format!("{name}.counts"), &[1, 1], vec![10.0]);
        }
        // Each expert gets different inputs, and a different number of them.
        if name.starts_with("blk.") && ne.len() == 3 {
            let random = common::numbers(seed + name.as_bytes()[4] as u64, ne[0] * ne[2]);
            let counts: Vec<f32> = (0..ne[2])
                .map(|expert| 1000.0 / (expert + 1) as f32)
                .collect();
            let sums = random.iter().enumerate();
            let sums = sums.map(|(i, x)| counts[i / ne[0]] * 10f32.powf(1.5 * x));
            imatrix.tensor(&format!("{name}.in_sum2"), &[ne[0], ne[2]], sums.collect());
            imatrix.tensor(&format!("{name}.counts"), &[1, ne[2]], counts);
        }
    }
    imatrix
}

/// All tensors of a file, in `f32`.
pub fn values(path: &Path) -> HashMap<String, Vec<f32>> {
    let file = File::open(path).unwrap();
    let tensors = file.header().tensors.iter();
    tensors
        .map(|tensor| {
            (
                tensor.name.clone(),
                dequantize(tensor.dtype, file.data(tensor)),
            )
        })
        .collect()
}

pub fn dequantize(dtype: GgmlType, bytes: &[u8]) -> Vec<f32> {
    // SOURCE: kvalues_iq4nl, ggml-common.h of ggml 0.25.3.
    let uneven = [
        -127i8, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
    ];
    let even: [i8; 16] = std::array::from_fn(|code| i8::try_from(code).unwrap() - 8);
    let table = match dtype {
        GgmlType::F32 => {
            let words = bytes.as_chunks::<4>().0.iter();
            return words.map(|word| f32::from_le_bytes(*word)).collect();
        }
        GgmlType::F16 => {
            let halves = bytes.as_chunks::<2>().0.iter();
            return halves
                .map(|half| f16::from_le_bytes(*half).to_f32())
                .collect();
        }
        GgmlType::Q4_1 => {
            let half = |bytes: &[u8]| f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
            let block = |block: &[u8]| -> Vec<f32> {
                let code = |i: usize| f32::from(block[4 + i % 16] >> (i / 16 * 4) & 15);
                let value = |i: usize| half(block) * code(i) + half(&block[2..]);
                (0..32).map(value).collect()
            };
            return bytes.chunks(20).flat_map(block).collect();
        }
        GgmlType::Q4_0 => Some(even),
        GgmlType::IQ4_NL => Some(uneven),
        GgmlType::Q8_0 => None,
        // tests/dequantize.rs compares this with ggml's code.
        other => {
            let mut values =
                vec![f32::NAN; bytes.len() / dtype.block_bytes() * dtype.block_elems()];
            let known = ggml_rust_npu::dequantize::of(other);
            known.unwrap().dequantize(bytes, &mut values);
            return values;
        }
    };
    let block = |block: &[u8]| -> Vec<f32> {
        let d = f16::from_le_bytes([block[0], block[1]]).to_f32();
        let level = |i: usize| match table {
            Some(table) => table[usize::from(block[2 + i % 16] >> (i / 16 * 4) & 15)],
            None => block[2 + i].cast_signed(),
        };
        (0..32).map(|i| d * f32::from(level(i))).collect()
    };
    bytes.chunks(dtype.block_bytes()).flat_map(block).collect()
}

pub type Weights = HashMap<String, Vec<f32>>;

/// `rms_norm(x) * weight`, over the whole of x.
fn norm(x: &[f64], weight: Option<&Vec<f32>>) -> Vec<f64> {
    let Some(weight) = weight else {
        return x.to_vec();
    };
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + 1e-6).sqrt();
    x.iter()
        .zip(weight)
        .map(|(x, w)| x * scale * f64::from(*w))
        .collect()
}

fn product(weights: &Weights, name: &str, x: &[f64]) -> Vec<f64> {
    let bias = weights.get(&format!("{name}.bias"));
    let rows = weights[&format!("{name}.weight")]
        .chunks(x.len())
        .enumerate();
    rows.map(|(n, row)| {
        let sum: f64 = row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
        sum + bias.map_or(0.0, |bias| f64::from(bias[n]))
    })
    .collect()
}

fn softmax(x: &[f64]) -> Vec<f64> {
    let sum: f64 = x.iter().map(|x| x.exp()).sum();
    x.iter().map(|x| x.exp() / sum).collect()
}

fn gated(gate: &[f64], up: &[f64]) -> Vec<f64> {
    let pairs = gate.iter().zip(up);
    pairs
        .map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up)
        .collect()
}

/// The two experts that the router prefers, by its shares.
fn routed(weights: &Weights, part: &str, x: &[f64]) -> Vec<f64> {
    let shares = softmax(&product(weights, &format!("{part}_gate_inp"), x));
    let mut order: Vec<usize> = (0..shares.len()).collect();
    order.sort_by(|a, b| shares[*b].total_cmp(&shares[*a]));
    let mut sum = vec![0.0; EMBED];
    for expert in &order[..2] {
        let of = |which: &str, x: &[f64]| -> Vec<f64> {
            let all = &weights[&format!("{part}_{which}_exps.weight")];
            let size = all.len() / shares.len();
            let rows = all[expert * size..][..size].chunks(x.len());
            let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
            rows.map(dot).collect()
        };
        let down = of("down", &gated(&of("gate", x), &of("up", x)));
        (sum.iter_mut().zip(down)).for_each(|(sum, x)| *sum += shares[*expert] * x);
    }
    sum
}

/// The logits of the last token. Positions are left out, because scaling does not change their
/// effect.
pub fn logits(weights: &Weights) -> Vec<f64> {
    let embed = &weights["token_embd.weight"];
    let widen = |row: &[f32]| row.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    let mut stream: Vec<Vec<f64>> = embed.chunks(EMBED).map(widen).collect();
    let add = |x: &mut Vec<f64>, y: Vec<f64>| x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
    for block in 0..BLOCKS {
        let name = |part: &str| format!("blk.{block}.{part}");
        let at = |part: &str| weights.get(&name(part));
        let heads = |x: Vec<f64>, part: &str| -> Vec<Vec<f64>> {
            x.chunks(HEAD).map(|head| norm(head, at(part))).collect()
        };
        let (mut k, mut v) = (Vec::new(), Vec::new());
        for (t, x) in stream.iter_mut().enumerate() {
            let inner = norm(x, at("attn_norm.weight"));
            let q = heads(
                product(weights, &name("attn_q"), &inner),
                "attn_q_norm.weight",
            );
            k.push(heads(
                product(weights, &name("attn_k"), &inner),
                "attn_k_norm.weight",
            ));
            v.push(heads(product(weights, &name("attn_v"), &inner), "no norm"));
            let mut mixed = Vec::new();
            for (head, q) in q.iter().enumerate() {
                let shared = head / (HEADS / KV_HEADS);
                let dot = |k: &Vec<f64>| q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>();
                let scores: Vec<f64> = (0..=t).map(|at| dot(&k[at][shared]) / 6.0).collect();
                let shares = softmax(&scores);
                let mix = |d| (0..=t).map(|at| shares[at] * v[at][shared][d]).sum::<f64>();
                mixed.extend((0..HEAD).map(mix));
            }
            let output = product(weights, &name("attn_output"), &mixed);
            add(x, norm(&output, at("post_attention_norm.weight")));
            let inner = norm(x, at("ffn_norm.weight"));
            let down = if at("ffn_gate_inp.weight").is_some() {
                routed(weights, &name("ffn"), &inner)
            } else {
                let gate = product(weights, &name("ffn_gate"), &inner);
                let up = product(weights, &name("ffn_up"), &inner);
                product(weights, &name("ffn_down"), &gated(&gate, &up))
            };
            add(x, norm(&down, at("post_ffw_norm.weight")));
        }
    }
    let last = norm(stream.last().unwrap(), weights.get("output_norm.weight"));
    let is_tied = !weights.contains_key("output.weight");
    product(
        weights,
        if is_tied { "token_embd" } else { "output" },
        &last,
    )
}

/// Largest difference, in relation to the largest logit.
pub fn difference(have: &[f64], want: &[f64]) -> f64 {
    let largest = want.iter().fold(0.0f64, |max, x| max.max(x.abs()));
    let differences = have
        .iter()
        .zip(want)
        .map(|(have, want)| (have - want).abs());
    differences.fold(0.0, f64::max) / largest
}

/// A model and its statistics, as files.
pub fn written(folder: &Path, architecture: &str) -> (PathBuf, PathBuf) {
    let model = model(architecture);
    let (from, statistics) = (folder.join("model.gguf"), folder.join("imatrix.gguf"));
    model.write(&from);
    imatrix(&model).write(&statistics);
    (from, statistics)
}
