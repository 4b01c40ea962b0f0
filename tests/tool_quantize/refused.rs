//! What cannot be done, and the words that say so.

use ggml_rust_npu::gguf::GgmlType;

use crate::decoder::{EMBED, FFN, model, written};
use crate::fails;
use crate::tool::{Model, folder};

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
    refused(&model("mamba"), &["mamba", "llama, qwen2, qwen3, gemma3"]);
    let mut experts = model("llama");
    experts.random("blk.0.ffn_gate_inp.weight", &[EMBED, 8], 0.0);
    refused(&experts, &["blk.0", "experts"]);
    let mut missing = model("llama");
    missing
        .tensors
        .retain(|(name, ..)| name != "blk.1.attn_k.weight");
    refused(&missing, &["blk.1.attn_k.weight", "missing"]);
    let mut quantized = model("llama");
    quantized.tensors[2].2 = GgmlType::I32;
    let name = quantized.tensors[2].0.clone();
    quantized.tensors[2].1 = vec![EMBED, 1, 2];
    refused(&quantized, &[&name, "I32"]);
    let mut other = model("llama");
    other.number("llama.attention.value_length", 16);
    refused(&other, &["attn_v", "heads"]);

    let mut experts = model("llama");
    experts.random("blk.0.ffn_up_exps.weight", &[EMBED, FFN, 2], 0.0);
    let path = folder.join("experts.gguf");
    experts.write(&path);
    let with_statistics = ["--type", "q4_0", "--imatrix", statistics.to_str().unwrap()];
    fails(
        &path,
        &to,
        &with_statistics,
        1,
        &["ffn_up_exps", "experts", "--imatrix"],
    );

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
