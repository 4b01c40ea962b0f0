//! Q4_K and Q3_K: rows of whole super-blocks, and how other rows are quantized.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use ggml_rust_npu::gguf::{File, GgmlType};

use crate::common::{self, Model, folder, quantize, run};
use crate::decoder::values;

/// Elements of the residual stream: one super-block.
const EMBED: usize = 256;
/// Elements between `ffn_up` and `ffn_down`: rows of no whole super-blocks.
const FFN: usize = 320;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;

/// A model of one block, and statistics over three decades.
fn written(folder: &Path) -> (PathBuf, PathBuf) {
    let mut model = Model::new("general.architecture", "llama");
    for (key, value) in [
        ("embedding_length", EMBED),
        ("block_count", 1),
        ("attention.head_count", HEADS),
        ("attention.head_count_kv", KV_HEADS),
    ] {
        model.number(&format!("llama.{key}"), value);
    }
    model.random("token_embd.weight", &[EMBED, 7], 0.0);
    model.random("output_norm.weight", &[EMBED], 1.0);
    model.random("blk.0.attn_norm.weight", &[EMBED], 1.0);
    model.random("blk.0.ffn_norm.weight", &[EMBED], 1.0);
    let (kv, heads) = (EMBED / HEADS * KV_HEADS, EMBED);
    let mut imatrix = Model::new("general.type", "imatrix");
    for (part, k, n, seed) in [
        ("attn_q", EMBED, heads, 1),
        ("attn_k", EMBED, kv, 1),
        ("attn_v", EMBED, kv, 1),
        ("attn_output", heads, EMBED, 2),
        ("ffn_gate", EMBED, FFN, 3),
        ("ffn_up", EMBED, FFN, 3),
        ("ffn_down", FFN, EMBED, 4),
    ] {
        let name = format!("blk.0.{part}.weight");
        model.random(&name, &[k, n], 0.0);
        let sums = common::numbers(seed, k);
        let sums = sums.iter().map(|x| 10.0 * 10f32.powf(1.5 * x)).collect();
        imatrix.tensor(&format!("{name}.in_sum2"), &[k, 1], sums);
        imatrix.tensor(&format!("{name}.counts"), &[1, 1], vec![10.0]);
    }
    let (from, statistics) = (folder.join("model.gguf"), folder.join("imatrix.gguf"));
    model.write(&from);
    imatrix.write(&statistics);
    (from, statistics)
}

fn types(path: &Path) -> HashMap<String, GgmlType> {
    let file = File::open(path).unwrap();
    let tensors = file.header().tensors.iter();
    tensors
        .map(|tensor| (tensor.name.clone(), tensor.dtype))
        .collect()
}

#[test]
fn rows_that_are_not_whole_super_blocks_take_the_type_of_llama_quantize() {
    let folder = folder("tool_super_fallback");
    let (from, _) = written(&folder);
    let to = folder.join("out.gguf");
    for (word, wide, narrow, file_type) in [
        ("Q4_K", GgmlType::Q4_K, GgmlType::Q5_0, 14),
        ("q3_k", GgmlType::Q3_K, GgmlType::Q4_0, 11),
    ] {
        let output = run(&from, &to, &["--type", word]);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{errors}");
        let said: Vec<&str> = errors
            .lines()
            .filter(|line| line.contains("become"))
            .collect();
        assert_eq!(said.len(), 1, "{errors}");
        for part in [
            "1 weights",
            narrow.name(),
            wide.name(),
            "blk.0.ffn_down.weight",
        ] {
            assert!(said[0].contains(part), "{part} is not in {}", said[0]);
        }
        let types = types(&to);
        for (name, dtype) in &types {
            let want = match name.as_str() {
                "blk.0.ffn_down.weight" => narrow,
                "token_embd.weight" => GgmlType::Q8_0,
                name if name.contains("norm") => GgmlType::F32,
                _ => wide,
            };
            assert_eq!(*dtype, want, "{name}");
        }
        let file = File::open(&to).unwrap();
        let kind = file.header().get("general.file_type");
        assert_eq!(kind.and_then(|kind| kind.as_usize()), Some(file_type));
    }
    // Both as a rule and for embeddings. No note is printed if all rows fit.
    let rules = [
        "--type",
        "q8_0",
        "--tensor-type",
        "attn_q=Q4_K",
        "--embeddings",
        "q3_k",
    ];
    let output = run(&from, &to, &rules);
    assert!(output.status.success());
    assert!(!String::from_utf8_lossy(&output.stderr).contains("become"));
    let types = types(&to);
    assert_eq!(types["blk.0.attn_q.weight"], GgmlType::Q4_K);
    assert_eq!(types["blk.0.attn_k.weight"], GgmlType::Q8_0);
    assert_eq!(types["token_embd.weight"], GgmlType::Q3_K);
}

/// The error of the products with a weight, for inputs with the mean squares of `statistics`. The
/// inputs of a scaled model are those of the norm's new weights.
fn error(
    name: &str,
    norm: &str,
    model: [&HashMap<String, Vec<f32>>; 2],
    statistics: &HashMap<String, Vec<f32>>,
) -> f64 {
    let squares = &statistics[&format!("{name}.in_sum2")];
    let k = squares.len();
    let [want, have] = model.map(|model| (&model[name], &model[norm]));
    let mut sum = 0.0;
    for (i, (old, new)) in want.0.iter().zip(have.0).enumerate() {
        let scale = f64::from(have.1[i % k]) / f64::from(want.1[i % k]);
        let error = f64::from(*new) * scale - f64::from(*old);
        sum += f64::from(squares[i % k]) * error * error;
    }
    sum
}

#[test]
fn statistics_and_scales_bring_super_blocks_nearer() {
    let folder = folder("tool_super_nearer");
    let (from, statistics) = written(&folder);
    let to = folder.join("out.gguf");
    let (source, means) = (values(&from), values(&statistics));
    let statistics = statistics.to_str().unwrap();
    for format in ["q4_k", "q3_k"] {
        let errors = [
            &[][..],
            &["--imatrix", statistics],
            &["--imatrix", statistics, "--awq"],
        ]
        .map(|more| {
            quantize(&from, &to, &[&["--type", format], more].concat());
            let quantized = values(&to);
            let of = |(part, norm): (&str, &str)| {
                let [name, norm] = [part, norm].map(|part| format!("blk.0.{part}.weight"));
                error(&name, &norm, [&source, &quantized], &means)
            };
            let pairs = [
                ("attn_q", "attn_norm"),
                ("attn_k", "attn_norm"),
                ("ffn_gate", "ffn_norm"),
            ];
            pairs.map(of).iter().sum::<f64>()
        });
        assert!(errors[1] < 0.95 * errors[0], "{format}: {errors:?}");
        // Weights of equal size gain little.
        assert!(errors[2] < 0.98 * errors[1], "{format}: {errors:?}");
        assert!(errors[2] > 0.0);
    }
}

#[test]
fn rotated_weights_become_super_blocks_too() {
    let folder = folder("tool_super_rotated");
    let (from, _) = written(&folder);
    let [plain, to] = ["f32.gguf", "out.gguf"].map(|name| folder.join(name));
    quantize(&from, &plain, &["--type", "f32", "--rotate", "r1,r2"]);
    let (source, want) = (values(&from), values(&plain));
    for (format, limit) in [("q4_k", 1e-2), ("q3_k", 4e-2)] {
        quantize(&from, &to, &["--type", format, "--rotate", "r1,r2"]);
        let have = values(&to);
        for part in ["attn_q", "attn_v", "attn_output", "ffn_gate"] {
            let name = format!("blk.0.{part}.weight");
            assert_ne!(source[&name], want[&name], "{name} is not rotated");
            let square = |error: bool| -> f64 {
                let pairs = want[&name].iter().zip(&have[&name]);
                pairs
                    .map(|(w, h)| f64::from(if error { w - h } else { *w }).powi(2))
                    .sum()
            };
            // Numbers close to normal ones lose 5e-3 in 4 bits and 2e-2 in 3.
            let lost = square(true) / square(false);
            assert!((limit / 10.0..limit).contains(&lost), "{name}: {lost}");
        }
    }
}
