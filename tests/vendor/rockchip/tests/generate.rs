//! Generates text with SmolLM2-135M in Q8_0, its weights multiplied above the vendor's own library,
//! and again by the stand-in: both give the same text.
//!
//! llama.cpp is not used: simple loops in this file compute everything except products with
//! weights.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

#[path = "../../../common/mod.rs"]
mod common;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::{Q8_0, Weight, mul_mat, packed};
use ggml_rust_npu::dequantize;
use ggml_rust_npu::gguf::{File, GgmlType, Value};
use ggml_rust_npu::rockchip::caps;
use ggml_rust_npu::rockchip::driver::Rknn;
use ggml_rust_npu::rockchip::{RkBuffer, RkDevice};
use half::f16;
use rknpu_ops::sim;

/// Tokens of the prompt, each with the mark of a space before it, as the file has them.
const PROMPT: [&str; 4] = ["Once", "Ġupon", "Ġa", "Ġtime"];
const TOKENS: usize = 8;

/// A model of the architecture `llama`, whose weights are in device memory.
struct Model {
    device: Arc<RkDevice>,
    file: File,
    weights: HashMap<String, (Weight, RkBuffer)>,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head: usize,
    rope_base: f32,
    epsilon: f32,
    /// Keys and values of each layer, token by token.
    cache: Vec<[Vec<f32>; 2]>,
}

/// Returns the values of a tensor.
fn values(file: &File, name: &str) -> Vec<f32> {
    let info = file
        .header()
        .tensor(name)
        .unwrap_or_else(|| panic!("the model has no {name}"));
    let (bytes, elements) = (file.data(info), info.ne.iter().product());
    let mut values = vec![0.0; elements];
    match dequantize::of(info.dtype) {
        Some(blocks) => blocks.dequantize(bytes, &mut values),
        None => {
            assert_eq!(info.dtype, GgmlType::F32, "{name}");
            bytemuck::cast_slice_mut::<f32, u8>(&mut values).copy_from_slice(bytes);
        }
    }
    values
}

/// The blocks of Q8_0 that hold `values`.
// SOURCE: quantize_row_q8_0_ref, ggml-quants.c of ggml 0.25.3.
fn to_q8_0(values: &[f32]) -> Vec<u8> {
    let block = |values: &[f32; 32]| {
        let largest = values
            .iter()
            .fold(0.0f32, |largest, value| largest.max(value.abs()));
        let scale = largest / 127.0;
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        #[expect(
            clippy::cast_possible_truncation,
            reason = "at most 127 by the choice of the scale"
        )]
        let levels = values.map(|value| ((value * inverse).round() as i8).to_ne_bytes()[0]);
        [&f16::from_f32(scale).to_le_bytes()[..], &levels].concat()
    };
    values.as_chunks::<32>().0.iter().flat_map(block).collect()
}

impl Model {
    fn load(path: &Path, device: Arc<RkDevice>) -> Self {
        let file = File::open(path).unwrap();
        let number = |key: &str| match file.header().get(&format!("llama.{key}")) {
            Some(Value::Float(value)) => *value,
            Some(value) => value.as_usize().unwrap() as f64,
            None => panic!("the model has no llama.{key}"),
        };
        let size = |key| {
            file.header()
                .get(&format!("llama.{key}"))
                .and_then(Value::as_usize)
                .unwrap()
        };
        let (layers, heads) = (size("block_count"), size("attention.head_count"));
        let (kv_heads, head) = (
            size("attention.head_count_kv"),
            size("embedding_length") / heads,
        );
        #[expect(clippy::cast_possible_truncation, reason = "stored as FP32")]
        let [rope_base, epsilon] =
            ["rope.freq_base", "attention.layer_norm_rms_epsilon"].map(|key| number(key) as f32);
        let mut weights = HashMap::new();
        for info in file.header().tensors.iter().filter(|info| info.dims == 2) {
            let bytes = to_q8_0(&values(&file, &info.name));
            let weight = Weight {
                dtype: Q8_0,
                ne: info.ne,
                bytes,
                values: Vec::new(),
            };
            let buffer = packed(&device, &weight, 0);
            weights.insert(info.name.clone(), (weight, buffer));
        }
        let cache = vec![[Vec::new(), Vec::new()]; layers];
        Self {
            device,
            file,
            weights,
            layers,
            heads,
            kv_heads,
            head,
            rope_base,
            epsilon,
            cache,
        }
    }

    /// Returns `rows` of activations times a weight.
    fn product(&self, name: &str, act: &[f32], rows: usize) -> Vec<f32> {
        let (weight, buffer) = &self.weights[name];
        mul_mat(
            &self.device,
            weight,
            Some((buffer, 0)),
            act,
            [weight.ne[0], rows, 1, 1],
        )
        .unwrap()
    }

    fn norm(&self, name: &str, rows: &[f32]) -> Vec<f32> {
        let scales = values(&self.file, name);
        let row = |row: &[f32]| -> Vec<f32> {
            let mean = row.iter().map(|x| x * x).sum::<f32>() / row.len() as f32;
            let factor = 1.0 / (mean + self.epsilon).sqrt();
            row.iter()
                .zip(&scales)
                .map(|(x, scale)| x * factor * scale)
                .collect()
        };
        rows.chunks(scales.len()).flat_map(row).collect()
    }

    /// Rotates neighbouring pairs of each head by an angle that grows with the position.
    fn rope(&self, rows: &mut [f32], heads: usize, first: usize) {
        for (index, head) in rows.chunks_mut(self.head).enumerate() {
            let position = (first + index / heads) as f32;
            for (i, pair) in head.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                let angle = position * self.rope_base.powf(-2.0 * i as f32 / self.head as f32);
                let [x, y] = *pair;
                *pair = [
                    x * angle.cos() - y * angle.sin(),
                    x * angle.sin() + y * angle.cos(),
                ];
            }
        }
    }

    /// Returns the attention of one layer; `first` is the position of the first row.
    fn attention(&mut self, layer: usize, act: &[f32], rows: usize, first: usize) -> Vec<f32> {
        let part = |name: &str| format!("blk.{layer}.attn_{name}.weight");
        let [mut q, mut k, v] = ["q", "k", "v"].map(|name| self.product(&part(name), act, rows));
        self.rope(&mut q, self.heads, first);
        self.rope(&mut k, self.kv_heads, first);
        self.cache[layer][0].extend(k);
        self.cache[layer][1].extend(v);
        let (head, width) = (self.head, self.kv_heads * self.head);
        let [keys, values] = &self.cache[layer];
        let mut out = vec![0.0; q.len()];
        for (index, (q, out)) in q.chunks(head).zip(out.chunks_mut(head)).enumerate() {
            let (row, query) = (index / self.heads, index % self.heads);
            let start = query / (self.heads / self.kv_heads) * head;
            let seen = first + row + 1;
            let scores = keys.chunks(width).take(seen).map(|key| {
                let dot: f32 = q.iter().zip(&key[start..]).map(|(a, b)| a * b).sum();
                dot / (head as f32).sqrt()
            });
            let scores: Vec<f32> = scores.collect();
            let largest = scores.iter().copied().fold(f32::MIN, f32::max);
            let weights: Vec<f32> = scores.iter().map(|score| (score - largest).exp()).collect();
            let sum: f32 = weights.iter().sum();
            for (weight, value) in weights.iter().zip(values.chunks(width)) {
                out.iter_mut()
                    .zip(&value[start..])
                    .for_each(|(out, value)| *out += weight / sum * value);
            }
        }
        self.product(&part("output"), &out, rows)
    }

    fn feed_forward(&self, layer: usize, act: &[f32], rows: usize) -> Vec<f32> {
        let part = |name: &str| format!("blk.{layer}.ffn_{name}.weight");
        let (gate, up) = (
            self.product(&part("gate"), act, rows),
            self.product(&part("up"), act, rows),
        );
        let inner = gate
            .iter()
            .zip(up)
            .map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up);
        self.product(&part("down"), &inner.collect::<Vec<_>>(), rows)
    }

    /// Returns the scores of all tokens after `tokens`, which stand at position `first` and later.
    fn scores(&mut self, tokens: &[usize], first: usize) -> Vec<f32> {
        let (rows, width) = (tokens.len(), self.heads * self.head);
        let q8_0 = dequantize::of(GgmlType::Q8_0).unwrap();
        let mut act = vec![0.0; rows * width];
        for (token, row) in tokens.iter().zip(act.chunks_mut(width)) {
            let (embedding, _) = &self.weights["token_embd.weight"];
            let bytes = embedding.row_bytes();
            q8_0.dequantize(&embedding.bytes[token * bytes..][..bytes], row);
        }
        for layer in 0..self.layers {
            let normed = self.norm(&format!("blk.{layer}.attn_norm.weight"), &act);
            let added = self.attention(layer, &normed, rows, first);
            act.iter_mut().zip(added).for_each(|(x, y)| *x += y);
            let normed = self.norm(&format!("blk.{layer}.ffn_norm.weight"), &act);
            let added = self.feed_forward(layer, &normed, rows);
            act.iter_mut().zip(added).for_each(|(x, y)| *x += y);
        }
        let last = self.norm("output_norm.weight", &act[(rows - 1) * width..]);
        // The embeddings also serve as the head.
        self.product("token_embd.weight", &last, 1)
    }
}

/// Returns the texts of all tokens.
fn vocabulary(file: &File) -> Vec<String> {
    let mut entries = file.header().entries.iter();
    let entry = entries
        .find(|entry| entry.key == "tokenizer.ggml.tokens")
        .unwrap();
    let Value::Array { len, .. } = entry.value else {
        panic!("tokens are no array")
    };
    // First the length and text of the key, two type numbers and the number of elements; then each
    // text after its length.
    let header = 8 + entry.key.len() + 4 + 4 + 8;
    let mut rest = &file.bytes()[entry.range.clone()][header..];
    let mut tokens = Vec::new();
    for _ in 0..len {
        let (size, after) = rest.split_first_chunk::<8>().unwrap();
        let (text, after) = after.split_at(usize::try_from(u64::from_le_bytes(*size)).unwrap());
        tokens.push(String::from_utf8_lossy(text).into_owned());
        rest = after;
    }
    tokens
}

/// Generates greedily; returns the tokens, and all scores that they were chosen by.
fn generate(path: &Path, rknn: Arc<Rknn>) -> (String, Vec<Vec<f32>>) {
    let device = Arc::new(RkDevice::start(rknn, &caps::RK3588).unwrap());
    let mut model = Model::load(path, device);
    let vocabulary = vocabulary(&model.file);
    let find = |text: &str| vocabulary.iter().position(|token| token == text).unwrap();
    let (mut tokens, mut first) = (PROMPT.map(find).to_vec(), 0);
    let (mut text, mut all) = (String::new(), Vec::new());
    for _ in 0..TOKENS {
        let scores = model.scores(&tokens, first);
        first += tokens.len();
        let best = (0..scores.len())
            .max_by(|a, b| scores[*a].total_cmp(&scores[*b]))
            .unwrap();
        text += &vocabulary[best].replace('Ġ', " ").replace('Ċ', "\n");
        tokens = vec![best];
        all.push(scores);
    }
    (text, all)
}

#[test]
#[ignore = "needs librknnrt 1.5.2 under qemu, and SmolLM2: VENDOR=rknn make vendor"]
fn a_model_generates_above_the_library_what_it_generates_on_the_stand_in() {
    let path =
        |name| PathBuf::from(std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set")));
    let model = path("NPU_TEST_MODEL");
    let (text, scores) = generate(
        &model,
        Rknn::load(Some(&path("GGML_RUST_NPU_RKNN_LIB"))).unwrap(),
    );
    println!("\ntext above librknnrt: {text:?}");
    let (want, want_scores) = generate(
        &model,
        Rknn::simulate(sim::Options::new(caps::RK3588.soc)).unwrap(),
    );
    println!("text of the stand-in: {want:?}");
    assert_eq!(text, want);
    // INT8 sums are integers, so there must be no difference.
    assert!(scores == want_scores, "the same text, but other scores");
}
