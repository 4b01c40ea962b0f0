//! `ggml-npu model` against arithmetic by hand, on models written by hand.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

#[expect(dead_code, reason = "the tests of quantize use the rest")]
mod common;

use std::path::Path;
use std::process::{Command, Output};

use common::Model;
use ggml_rust_npu::gguf::GgmlType;
use serde_json::Value;

/// A rate at which only memory needs time.
const NO_PACKETS: [&str; 2] = ["--packets-per-us", "1e15"];

/// Every kind of Hexagon chip.
const CHIPS: [&str; 7] = [
    "hexagon-v68",
    "hexagon-v68-hvx",
    "hexagon-v69",
    "hexagon-v73",
    "hexagon-v75",
    "hexagon-v79",
    "hexagon-v81",
];

const EMBED: usize = 256;
const FEED: usize = 512;
const KV_HEADS: usize = 2;

fn tool(model: &Path, args: &[&str]) -> Output {
    let mut command = test_kit::command(env!("CARGO_BIN_EXE_ggml-npu"));
    command.arg("model").arg(model).args(args).output().unwrap()
}

fn report(model: &Path, args: &[&str]) -> Value {
    let output = tool(model, &[args, &["--json"]].concat());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

/// Two layers with heads of `head` elements, and `experts` experts, two of them for each token.
fn llama(head: usize, experts: usize) -> Model {
    let mut model = Model::new("general.architecture", "llama");
    model.number("llama.block_count", 2);
    model.number("llama.embedding_length", EMBED);
    model.number("llama.attention.head_count", 4);
    model.number("llama.attention.head_count_kv", KV_HEADS);
    model.number("llama.attention.key_length", head);
    model.number("llama.expert_used_count", 2);
    model.tensor("token_embd.weight", &[EMBED, 1024], vec![0.5]);
    for layer in 0..2 {
        let mut weight = |name: &str, ne: &[usize]| {
            model.tensor(&format!("blk.{layer}.{name}.weight"), ne, vec![0.5]);
        };
        weight("attn_norm", &[EMBED]);
        weight("attn_q", &[EMBED, 4 * head]);
        weight("attn_k", &[EMBED, KV_HEADS * head]);
        weight("attn_v", &[EMBED, KV_HEADS * head]);
        weight("attn_output", &[4 * head, EMBED]);
        weight("ffn_gate_exps", &[EMBED, FEED, experts]);
        weight("ffn_up_exps", &[EMBED, FEED, experts]);
        weight("ffn_down_exps", &[FEED, EMBED, experts]);
    }
    model
}

/// Bytes of the weights that a token reads if `experts` are touched: matrices of few elements stay
/// in F32, experts are held in F16.
fn bytes_of_a_token(head: usize, experts: usize) -> usize {
    let attention = EMBED * (4 + 2 * KV_HEADS + 4) * head;
    4 * (2 * attention + EMBED * 1024) + 2 * (2 * 3 * EMBED * FEED * experts)
}

#[test]
fn memory_takes_the_bytes_of_weights_and_cache_at_its_rate() {
    let path = common::folder("model-memory").join("model.gguf");
    llama(64, 8).write(&path);
    let rate = [
        "--memory-gb-per-s",
        "10",
        "--batch",
        "1",
        "--context",
        "1000",
    ];
    let found = report(&path, &[&rate[..], &NO_PACKETS].concat());
    let step = &found["generation"][0];
    // Keys and values (2), of two bytes (2), in two layers (2).
    let cache = 2 * 2 * 2 * KV_HEADS * 64 * 1000;
    assert_eq!(found["cache_bytes_per_token"], cache / 1000);
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    let expected = (bytes_of_a_token(64, 2) + cache) as f64 / 10e3;
    let us = number(&step["step_us"]);
    assert!(
        (us / expected - 1.0).abs() < 1e-3,
        "{us} µs, not {expected}"
    );
    assert!((number(&step["tokens_per_s"]) * us / 1e6 - 1.0).abs() < 1e-9);
}

/// Regression: F32 and BF16 counted with four bytes and almost no packets.
#[test]
fn weights_take_the_bytes_and_packets_of_the_type_that_the_npu_holds() {
    const ROWS: usize = 4160;
    let folder = common::folder("model-types");
    let step = |dtype: GgmlType, rows: usize| {
        let mut model = llama(64, 1);
        model.tensor("output.weight", &[EMBED, rows], vec![0.5]);
        model.tensors.last_mut().unwrap().2 = dtype;
        let path = folder.join(format!("{}-{rows}.gguf", dtype.name()));
        model.write(&path);
        let found = report(&path, &["--batch", "1,8", "--context", "512"]);
        [0, 1].map(|i| {
            let step = &found["generation"][i];
            ["weight_bytes", "packets"].map(|key| number(&step[key]))
        })
    };
    let of_f16 = step(GgmlType::F16, ROWS);
    // More than 2^20 elements, so F32 is converted to F16.
    for dtype in [GgmlType::BF16, GgmlType::F32] {
        assert_eq!(step(dtype, ROWS), of_f16, "{}", dtype.name());
    }
    // Small weights stay in F32. Converting them would not save packets.
    let (plain, halved) = (step(GgmlType::F32, 1024), step(GgmlType::F16, 1024));
    for (plain, halved) in plain.iter().zip(halved) {
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
        let more = (2 * EMBED * 1024) as f64;
        assert!((plain[0] - halved[0] - more).abs() < 1.0, "{plain:?}");
        assert!(plain[1] >= halved[1], "{plain:?}, {halved:?}");
    }
}

/// One row of factors normalizes each head of a token, which is as much work as a row for each
/// head.
#[test]
fn a_norm_of_heads_is_reckoned_for_each_of_them() {
    let folder = common::folder("model-norms");
    let packets = |name: &str, norms: &[(&str, usize)]| {
        let mut model = llama(64, 1);
        for layer in 0..2 {
            for (norm, elems) in norms {
                let name = format!("blk.{layer}.{norm}.weight");
                model.tensor(&name, &[*elems], vec![0.5]);
            }
        }
        let path = folder.join(name);
        model.write(&path);
        let found = report(&path, &["--batch", "8", "--context", "512"]);
        number(&found["generation"][0]["packets"])
    };
    let heads = packets("heads", &[("attn_q_norm", 64), ("attn_k_norm", 64)]);
    let whole = packets(
        "whole",
        &[("attn_q_norm", 4 * 64), ("attn_k_norm", KV_HEADS * 64)],
    );
    assert!((heads / whole - 1.0).abs() < 1e-9, "{heads}, not {whole}");
    assert!(heads > packets("without", &[]));
}

#[test]
fn more_sequences_read_weights_once_and_caches_of_their_own() {
    let path = common::folder("model-sequences").join("model.gguf");
    llama(64, 2).write(&path);
    let args = ["--batch", "1,8", "--context", "4096"];
    let own = report(&path, &[&args[..], &NO_PACKETS].concat());
    let shared = report(&path, &[&args[..], &NO_PACKETS, &["--shared"]].concat());
    let bytes = |found: &Value, i: usize| number(&found["generation"][i]["weight_bytes"]);
    // Both experts are used for every token, so the bytes are equal.
    assert!((bytes(&own, 0) - bytes(&own, 1)).abs() < 1.0);
    let us = |found: &Value, i: usize| number(&found["generation"][i]["step_us"]);
    let cache_us = us(&own, 1) - us(&own, 0);
    let one_cache = number(&own["cache_bytes_per_token"]) * 4096.0 / 60e3;
    assert!(
        (cache_us / (7.0 * one_cache) - 1.0).abs() < 0.01,
        "{cache_us} µs"
    );
    assert!((us(&shared, 1) / us(&shared, 0) - 1.0).abs() < 0.01);
}

#[test]
fn tokens_touch_more_experts_than_one_does_and_fewer_than_each_its_own() {
    let path = common::folder("model-experts").join("model.gguf");
    llama(64, 16).write(&path);
    let found = report(&path, &["--batch", "1,4,256", "--context", "16"]);
    let bytes: Vec<f64> = (0..3)
        .map(|i| number(&found["generation"][i]["weight_bytes"]))
        .collect();
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    let of = |experts| bytes_of_a_token(64, experts) as f64;
    assert!((bytes[0] / of(2) - 1.0).abs() < 1e-9);
    assert!(bytes[1] > of(4) && bytes[1] < of(8), "{bytes:?}");
    assert!((bytes[2] / of(16) - 1.0).abs() < 1e-9);
}

#[test]
fn every_chip_has_counts_for_every_size_of_head() {
    let folder = common::folder("model-chips");
    for head in [32, 64, 80, 128, 256] {
        let path = folder.join(format!("{head}.gguf"));
        llama(head, 4).write(&path);
        for chip in CHIPS {
            let found = report(&path, &["--chip", chip]);
            for (i, step) in found["generation"].as_array().unwrap().iter().enumerate() {
                assert!(number(&step["tokens_per_s"]) > 0.0, "{chip}: {i}");
                let alone = ["memory_us", "vector_us", "matrix_us"].map(|part| number(&step[part]));
                let us = number(&step["step_us"]);
                assert!(alone.iter().all(|part| *part <= us + 1e-6) && us <= alone.iter().sum());
            }
        }
    }
}

/// On the chip without a matrix unit, vector units compute the products. On the other chip the
/// matrix unit does, at the same time as the work of the vector units.
#[test]
fn a_prompt_takes_longer_without_a_matrix_unit() {
    let path = common::folder("model-vectors").join("model.gguf");
    llama(64, 4).write(&path);
    let [with, without] = ["hexagon-v68", "hexagon-v68-hvx"].map(|chip| {
        let found = report(&path, &["--chip", chip, "--context", "512"]);
        number(&found["prompts"][0]["tokens_per_s"])
    });
    assert!(without * 2.0 < with, "{without} of {with} tokens/s");
}

#[test]
fn text_says_what_is_assumed_and_has_a_row_for_each_context() {
    let path = common::folder("model-text").join("model.gguf");
    llama(64, 4).write(&path);
    let output = tool(&path, &["--context", "512,777", "--batch", "1,3"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        text.contains("reckoned, not measured") && text.contains("assumed"),
        "{text}"
    );
    let rows: Vec<Vec<&str>> = text
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert!(
        rows.iter()
            .any(|row| row.first() == Some(&"777") && row.len() == 4),
        "{text}"
    );
}

#[test]
fn a_rockchip_s_report_has_a_row_for_each_context_and_refuses_a_hexagon_s_rates() {
    let path = common::folder("model-rockchip").join("model.gguf");
    llama(64, 4).write(&path);
    let wanted = [
        "--chip",
        "rk3576",
        "--context",
        "512,4096",
        "--batch",
        "1,8",
    ];
    let found = report(&path, &wanted);
    let rows = |name: &str| found[name].as_array().unwrap().clone();
    assert_eq!([rows("prompts").len(), rows("generation").len()], [2, 4]);
    let prompts = rows("prompts");
    let prompts: Vec<f64> = prompts
        .iter()
        .map(|row| number(&row["tokens_per_s"]))
        .collect();
    assert!(prompts[0] > prompts[1] && prompts[1] > 0.0);
    let text = String::from_utf8(tool(&path, &wanted).stdout).unwrap();
    assert!(
        text.contains("No rates of this chip are published"),
        "{text}"
    );
    let last = text.lines().last().unwrap();
    assert!(
        last.trim_start().starts_with("4096 ") && last.contains(" to "),
        "{text}"
    );
    for option in ["--threads", "--packets-per-us", "--memory-gb-per-s"] {
        let output = tool(&path, &[&wanted[..], &[option, "2"]].concat());
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(error.contains("are for Hexagon chips"), "{error}");
    }
}

/// A model of the shape of Qwen3-4B, for which others published speeds; one layer has all of its
/// bytes.
#[test]
fn published_speeds_stand_beside_the_band_that_fits_them() {
    let path = common::folder("model-published").join("model.gguf");
    let mut model = Model::new("general.architecture", "qwen3");
    model.number("qwen3.block_count", 36);
    model.number("qwen3.embedding_length", 2560);
    model.number("qwen3.attention.head_count", 32);
    model.number("qwen3.attention.head_count_kv", 8);
    model.number("qwen3.attention.key_length", 128);
    model.tensor("token_embd.weight", &[2560, 32], vec![0.5]);
    for layer in 0..36 {
        let name = format!("blk.{layer}.attn_q.weight");
        model.tensor(&name, &[2560, 32], vec![0.5]);
    }
    model.write(&path);
    let args = [
        "--chip",
        "hexagon-v73",
        "--context",
        "512,4096",
        "--batch",
        "1,4",
    ];
    let found = report(&path, &args);
    for row in found["generation"]
        .as_array()
        .unwrap()
        .iter()
        .chain(found["prompts"].as_array().unwrap())
    {
        let [low, high] = [0, 1].map(|i| number(&row["fitted_tokens_per_s"][i]));
        assert!(low < high && high < number(&row["tokens_per_s"]), "{row}");
    }
    assert_eq!(found["published"].as_array().unwrap().len(), 1);
    assert_eq!(found["published"][0]["prompt"], "520");
    let text = String::from_utf8(tool(&path, &args).stdout).unwrap();
    assert!(
        text.contains("240 to 325") && text.contains("31 to 60 GB/s"),
        "{text}"
    );
    assert!(
        text.contains("   520    9.2  Q4_0, ggml-hexagon, X Elite"),
        "{text}"
    );
    // There is no published figure for this model on this chip.
    let found = report(&path, &["--chip", "hexagon-v79"]);
    assert!(found["published"].as_array().unwrap().is_empty());
}

#[test]
fn models_that_it_does_not_know_are_refused_by_name() {
    let folder = common::folder("model-refused");
    let refused = |name: &str, model: &Model, words: &str| {
        let path = folder.join(name);
        model.write(&path);
        let output = tool(&path, &[]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1));
        assert!(error.contains(words) && error.contains(name), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    };
    let mut recurrent = llama(64, 1);
    recurrent.tensor("blk.0.ssm_in.weight", &[EMBED, 64], vec![0.0]);
    refused(
        "recurrent.gguf",
        &recurrent,
        "blk.0.ssm_in.weight: the model of costs knows attention and products only",
    );
    let mut convolution = llama(64, 1);
    convolution.tensor("blk.1.shortconv.conv.weight", &[3, EMBED], vec![0.0]);
    refused(
        "convolution.gguf",
        &convolution,
        "blk.1.shortconv.conv.weight: the model of costs knows attention and products only",
    );
    let mut large = llama(64, 1);
    large.number("llama.attention.head_count", 1 << 40);
    refused(
        "large.gguf",
        &large,
        "llama.attention.head_count is 1099511627776, no number up to 1048576",
    );
    let mut short = llama(64, 1);
    short.number("llama.block_count", 1);
    refused("short.gguf", &short, "llama.block_count is 1");
    let mut bare = llama(64, 1);
    bare.forget("llama.attention.head_count");
    refused("bare.gguf", &bare, "llama.attention.head_count");
    let mut none = llama(64, 1);
    none.forget("llama.block_count");
    none.number("llama.block_count", 0);
    refused("none.gguf", &none, "llama.block_count");
}

/// Writes a model whose heads of keys and values are an array of a number for each layer.
fn write_with_array(model: &mut Model, path: &Path, kv_heads: &[u32]) {
    const KEY: &str = "llama.attention.head_count_kv";
    // This entry has the same length as the array's, so that everything after it keeps its place.
    let long = "x".repeat(KEY.len() + 8 + 4 * kv_heads.len());
    model.forget(KEY);
    model.number(&long, 0);
    model.write(path);
    model.forget(&long);
    let mut bytes = std::fs::read(path).unwrap();
    let entry = [
        &(KEY.len() as u64).to_le_bytes()[..],
        KEY.as_bytes(),
        // An array of 32-bit integers.
        &9u32.to_le_bytes(),
        &5u32.to_le_bytes(),
        &(kv_heads.len() as u64).to_le_bytes(),
        &kv_heads
            .iter()
            .copied()
            .flat_map(u32::to_le_bytes)
            .collect::<Vec<u8>>(),
    ]
    .concat();
    let header = ggml_rust_npu::gguf::Header::parse(&bytes).unwrap();
    let old = header.entries.iter().find(|old| old.key == long).unwrap();
    bytes[old.range.clone()].copy_from_slice(&entry);
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn heads_of_keys_and_values_are_those_of_each_layer() {
    let folder = common::folder("model-arrays");
    let (number, array) = (folder.join("number.gguf"), folder.join("array.gguf"));
    llama(64, 1).write(&number);
    write_with_array(&mut llama(64, 1), &array, &[2, 2]);
    assert_eq!(report(&number, &[]), report(&array, &[]));
    // One layer has fewer KV heads, and one has no attention.
    let bytes = |kv_heads: &[u32]| {
        write_with_array(&mut llama(64, 1), &array, kv_heads);
        report(&array, &[])["cache_bytes_per_token"]
            .as_u64()
            .unwrap()
    };
    assert_eq!(bytes(&[2, 1]), 2 * 2 * 64 * 3);
    assert_eq!(bytes(&[0, 2]), 2 * 2 * 64 * 2);
    let step = &report(&array, &["--batch", "1", "--context", "512"])["generation"][0];
    let all = &report(&number, &["--batch", "1", "--context", "512"])["generation"][0];
    assert_eq!(
        step["commands"].as_u64().unwrap() + 4,
        all["commands"].as_u64().unwrap()
    );
    for (kv_heads, words) in [
        (
            &[2, 2, 2][..],
            "has 3 elements of kind 5, not 2 integers of 32 bits",
        ),
        (
            &[2, u32::MAX],
            "4 heads cannot share 4294967295 of keys and values",
        ),
    ] {
        write_with_array(&mut llama(64, 1), &array, kv_heads);
        let output = tool(&array, &[]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains(words), "{error}");
        assert!(error.contains("llama.attention.head_count_kv"), "{error}");
    }
}

/// Regression: the first allocated 343 GB of memory, and the last panicked.
#[test]
fn more_layers_than_there_are_tensors_of_are_refused_by_the_number() {
    let path = common::folder("model-layers").join("model.gguf");
    for count in [u32::MAX as usize, 1 << 40, 1 << 60, 3] {
        let mut model = llama(64, 1);
        model.number("llama.block_count", count);
        model.write(&path);
        let output = tool(&path, &[]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{count}: {error}");
        assert!(error.contains("llama.block_count is"), "{error}");
        assert!(error.contains(&count.to_string()), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
}

#[test]
fn a_report_reckons_with_the_sequences_that_have_not_ended() {
    let folder = common::folder("model-report");
    let (model, journal) = (folder.join("model.gguf"), folder.join("journal.jsonl"));
    llama(64, 2).write(&model);
    let solution = |tokens: usize| serde_json::json!({"text": "1", "answer": "1", "correct": true, "tokens": tokens, "logprob": -0.1, "scores": [], "cut": false});
    let lines = [
        serde_json::json!({"settings": {"method": "majority", "n": 2, "model": "model.gguf"}}),
        serde_json::json!({"id": "a", "expected": "1", "chosen": "1", "correct": true, "tokens": 3,
            "solutions": [solution(1), solution(2)]}),
    ];
    std::fs::write(&journal, lines.map(|line| line.to_string() + "\n").concat()).unwrap();
    let scale = |args: &[&str]| {
        let mut command = test_kit::command(env!("CARGO_BIN_EXE_ggml-npu"));
        let output = command
            .args(["scale", "report"])
            .arg(&journal)
            .args(args)
            .arg("--json")
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{error}");
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    let rows = scale(&["--model", model.to_str().unwrap(), "--prompt-tokens", "200"]);
    let seconds = |rows: &Value, i: usize| rows[i]["seconds"].as_f64();

    let found = report(&model, &["--shared", "--batch", "1,2", "--context", "256"]);
    let step = |i: usize| number(&found["generation"][i]["step_us"]) / 1e6;
    let prompt = report(&model, &["--context", "200", "--batch", "1"]);
    let prompt = 200.0 / number(&prompt["prompts"][0]["tokens_per_s"]);
    let [one, two] = [prompt + step(0), prompt + step(1) + step(0)];
    assert!((seconds(&rows, 0).unwrap() / one - 1.0).abs() < 1e-9);
    assert!((seconds(&rows, 1).unwrap() / two - 1.0).abs() < 1e-9);
    assert_eq!(seconds(&scale(&[]), 0), None);
}

#[test]
fn the_page_of_speed_has_what_the_tool_reckons() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/results.py");
    let mut command = Command::new("python3");
    command.env("RESULTS_TOOL", env!("CARGO_BIN_EXE_ggml-npu"));
    let done = match command.args([script, "--check", "speed"]).output() {
        Ok(done) => done,
        Err(error) => return println!("SKIPPED: python3 does not start: {error}"),
    };
    let error = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{error}");
}
