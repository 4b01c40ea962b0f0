//! Impossible requests, and the words of their errors.

use ggml_rust_npu::gguf::GgmlType;

use crate::common::{Model, folder};
use crate::decoder::{EMBED, FFN, model, written};
use crate::fails;

#[test]
fn what_cannot_be_done_is_refused_by_name() {
    let folder = folder("tool_refused");
    let (from, statistics) = written(&folder, "llama");
    let to = folder.join("out.gguf");
    let refused = |model: &Model, words: &[&str]| {
        let path = folder.join("other.gguf");
        model.write(&path);
        let statistics = statistics.to_str().unwrap();
        fails(
            &path,
            &to,
            &["--type", "q4_0", "--imatrix", statistics, "--awq"],
            1,
            words,
        );
        assert!(!to.exists(), "{words:?}: a file was left");
    };
    refused(
        &model("mamba"),
        &["mamba", "llama, qwen2, qwen3, qwen3moe, gemma3"],
    );
    let mut experts = model("llama");
    experts.random("blk.0.ffn_gate_inp.weight", &[EMBED, 8], 0.0);
    refused(&experts, &["blk.0", "experts"]);
    let mut missing = model("llama");
    missing
        .tensors
        .retain(|(name, ..)| name != "blk.1.attn_k.weight");
    refused(&missing, &["blk.1.attn_k.weight", "missing"]);
    let mut adapter = Model::new("general.architecture", "llama");
    adapter.text("general.type", "adapter");
    adapter.random("blk.0.attn_q.weight.lora_a", &[EMBED, 32], 0.0);
    refused(
        &adapter,
        &[
            "no tensor",
            "general.type is adapter",
            "nothing to quantize",
        ],
    );
    let mut quantized = model("llama");
    quantized.tensors[2].2 = GgmlType::I32;
    let name = quantized.tensors[2].0.clone();
    quantized.tensors[2].1 = vec![EMBED, 1, 2];
    refused(&quantized, &[&name, "I32"]);
    let mut other = model("llama");
    other.number("llama.attention.value_length", 16);
    refused(&other, &["attn_v", "heads"]);

    let model_path = from.to_str().unwrap();
    fails(&from, &from, &["--type", "q4_0"], 1, &["overwrite"]);
    fails(
        &from,
        &to,
        &["--type", "q4_0", "--imatrix", model_path],
        1,
        &["general.type", "imatrix"],
    );
    fails(&from, &to, &["--type", "q4_0", "--awq"], 2, &["--imatrix"]);
    fails(
        &folder.join("nothing.gguf"),
        &to,
        &["--type", "q4_0"],
        1,
        &["nothing.gguf"],
    );
}

#[test]
fn a_model_that_a_rotation_does_not_pass_through_is_refused_by_the_tensor() {
    let folder = folder("tool_rotate_refused");
    let to = folder.join("out.gguf");
    let refused = |model: &Model, which: &str, words: &[&str]| {
        let path = folder.join("other.gguf");
        model.write(&path);
        fails(&path, &to, &["--type", "f32", "--rotate", which], 1, words);
        assert!(!to.exists(), "{words:?}: a file was left");
    };
    let gemma = model("gemma3");
    refused(
        &gemma,
        "r1",
        &["blk.0.post_attention_norm", "channel by channel"],
    );
    let with = |name: &str, ne: &[usize]| {
        let mut model = model("llama");
        model.random(name, ne, 1.0);
        model
    };
    let experts = with("blk.1.ffn_gate_inp.weight", &[EMBED, 8]);
    refused(&experts, "r1", &["blk.1.ffn_gate_inp", "experts"]);
    let mean = with("blk.1.attn_norm.bias", &[EMBED]);
    refused(&mean, "r1,r2", &["blk.1.attn_norm.bias", "mean"]);
    refused(
        &with("blk.1.ssm_in.weight", &[EMBED, 8]),
        "r1",
        &["blk.1.ssm_in.weight", "not known"],
    );
    refused(
        &with("position_embd.weight", &[EMBED, 8]),
        "r1",
        &["position_embd.weight", "not known"],
    );
    let mut missing = model("llama");
    missing
        .tensors
        .retain(|(name, ..)| name != "output_norm.weight");
    refused(&missing, "r1", &["output_norm.weight", "missing"]);
    let mut embeddings = model("llama");
    embeddings.number("llama.pooling_type", 3);
    refused(
        &embeddings,
        "r1",
        &["llama.pooling_type is 3", "embeddings"],
    );
    let mut heads = model("llama");
    heads.number("llama.attention.value_length", 48);
    refused(&heads, "r2", &["attn_v", "heads of 48"]);
}

#[test]
fn what_does_not_go_together_is_a_wrong_argument() {
    let folder = folder("tool_conflicts");
    let (from, statistics) = written(&folder, "llama");
    let (to, statistics) = (folder.join("out.gguf"), statistics.to_str().unwrap());
    let wrong = |args: &[&str], words: &[&str]| fails(&from, &to, args, 2, words);
    wrong(
        &["-t", "q4_0", "--lpbq", "16"],
        &["--lpbq 16", "q8_0", "32 weights"],
    );
    wrong(
        &["-t", "f16", "--lpbq", "32"],
        &["--lpbq 32", "q8_0", "rounded once more"],
    );
    wrong(&["-t", "iq4_nl", "--lpbq", "64"], &["--lpbq 64", "q8_0"]);
    wrong(&["-t", "q8_0", "--lpbq", "48"], &["48", "16, 32, 64"]);
    wrong(&["-t", "q8_0", "--rotate", "r3"], &["r3", "r1, r2"]);
    wrong(
        &["-t", "q8_0", "--rotate", "r1", "--imatrix", statistics],
        &["--rotate", "--imatrix"],
    );
    assert!(!to.exists());
}

/// A model in which another tensor, of 4-byte elements, replaces one.
fn with(architecture: &str, name: &str, ne: &[usize], dtype: GgmlType) -> Model {
    let mut model = model(architecture);
    model.tensors.retain(|(known, ..)| known != name);
    model.random(name, ne, 0.5);
    let last = model.tensors.len() - 1;
    model.tensors[last].2 = dtype;
    model
}

#[test]
fn numbers_that_become_sizes_are_refused_by_the_name_of_the_field() {
    let folder = folder("tool_sizes_refused");
    let (path, to) = (folder.join("other.gguf"), folder.join("out.gguf"));
    let (_, statistics) = written(&folder, "llama");
    let awq = [
        "-t",
        "q4_0",
        "--imatrix",
        statistics.to_str().unwrap(),
        "--awq",
    ];
    let [r1, r2] = ["r1", "r2"].map(|which| ["-t", "f32", "--rotate", which]);
    let refused = |model: &Model, args: &[&str], words: &[&str]| {
        model.write(&path);
        fails(&path, &to, args, 1, words);
        assert!(!to.exists(), "{words:?}: a file was left");
    };
    let number = |key: &str, number: usize| {
        let mut model = model("llama");
        model.number(key, number);
        model
    };
    for length in [61, 4_294_967_291, 1 << 31] {
        let number = number("llama.embedding_length", length);
        refused(&number, &r1, &["embedding_length", &length.to_string()]);
    }
    let mut prime = model("llama");
    prime.number("llama.embedding_length", 4099);
    prime
        .tensors
        .retain(|(name, ..)| name != "token_embd.weight");
    prime.random("token_embd.weight", &[4099, 2], 0.0);
    refused(&prime, &r1, &["embedding_length", "4099", "1023"]);
    let mut few = number("llama.attention.value_length", 0);
    refused(&few, &r2, &["value_length", "0"]);
    few.number("llama.attention.value_length", 1 << 58);
    refused(&few, &awq, &["value_length", "288230376151711744"]);
    let heads = number("llama.attention.head_count_kv", 0);
    refused(&heads, &awq, &["head_count_kv", "0"]);
    // Without this key, a head's length is its share of the channels.
    let mut heads = number("llama.attention.head_count", 65);
    heads.number("llama.attention.head_count_kv", 65);
    heads.forget("llama.attention.value_length");
    refused(&heads, &awq, &["embedding_length is 64", "65 heads"]);
    refused(&heads, &r2, &["embedding_length is 64", "65 heads"]);
}

#[test]
fn norms_biases_and_weights_of_another_type_or_shape_are_refused_by_name() {
    let folder = folder("tool_shapes_refused");
    let (path, to) = (folder.join("other.gguf"), folder.join("out.gguf"));
    let (_, statistics) = written(&folder, "llama");
    let awq = [
        "-t",
        "q4_0",
        "--imatrix",
        statistics.to_str().unwrap(),
        "--awq",
    ];
    let rotate = ["-t", "f32", "--rotate", "r1,r2"];
    let refused = |name: &str, ne: &[usize], dtype: GgmlType, args: &[&str], word: &str| {
        with("llama", name, ne, dtype).write(&path);
        fails(&path, &to, args, 1, &[name, word]);
        assert!(!to.exists(), "{name} {ne:?}: a file was left");
    };
    let (f32, i32) = (GgmlType::F32, GgmlType::I32);
    for args in [&awq[..], &rotate] {
        refused("blk.0.attn_norm.weight", &[EMBED], i32, args, "I32");
        refused("blk.0.attn_norm.weight", &[EMBED - 1], f32, args, "[63]");
        refused("blk.1.ffn_norm.weight", &[EMBED, 2], f32, args, "[64, 2]");
        refused("blk.0.attn_v.bias", &[64], i32, args, "I32");
        refused("blk.0.attn_v.bias", &[32], f32, args, "[32]");
        refused("blk.0.attn_v.weight", &[EMBED], f32, args, "1 dimensions");
        refused(
            "blk.0.attn_output.weight",
            &[128, 32, 2],
            f32,
            args,
            "3 dimensions",
        );
    }
    // Before this check half of the rows would have been scaled, with exit code 0.
    refused("blk.0.ffn_up.bias", &[FFN / 2], f32, &awq, "[48]");
    refused("blk.1.ffn_down.bias", &[EMBED / 2], f32, &rotate, "[32]");
    refused("output_norm.weight", &[EMBED], i32, &rotate, "I32");
    refused(
        "blk.0.other.weight",
        &[EMBED, 0],
        f32,
        &["-t", "q8_0"],
        "dimension 1",
    );
}

#[test]
fn weights_out_of_a_format_s_range_are_refused_by_tensor_and_row() {
    let folder = folder("tool_values_refused");
    let (path, to) = (folder.join("other.gguf"), folder.join("out.gguf"));
    let name = "blk.1.attn_k.weight";
    let formats: [&[&str]; 7] = [
        &["-t", "q4_0"],
        &["-t", "q4_k"],
        &["-t", "q8_0"],
        &["-t", "iq4_nl"],
        &["-t", "f16"],
        &["-t", "q8_0", "--lpbq", "16"],
        &["-t", "f32"],
    ];
    for args in formats {
        for (value, word) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (-1e38, "-1e38")] {
            if args[1] == "f32" && value.is_finite() {
                continue;
            }
            let mut model = model("llama");
            let mut values = vec![0.5; EMBED * 64];
            values[5 * EMBED + 3] = value;
            model.tensors.retain(|(known, ..)| known != name);
            model.tensor(name, &[EMBED, 64], values);
            model.write(&path);
            fails(&path, &to, args, 1, &[name, "row 5", "weight 3", word]);
            assert!(!to.exists(), "{args:?} {word}: a file was left");
        }
    }
}
