//! Rotations that are folded into the weights.

use ggml_rust_npu::gguf::{File, GgmlType};

use crate::common::{folder, quantize};
use crate::decoder::{BLOCKS, EMBED, difference, logits, values, written};
use crate::fails;

#[test]
fn rotations_alone_change_the_weights_and_no_logit() {
    // In each block R1 changes two norms and seven weights, and R2 two weights and, with qwen2, a
    // bias of V. In addition R1 changes the embeddings and the last norm.
    for (architecture, which, want) in [
        ("llama", "r1", 9 * BLOCKS + 2),
        ("llama", "r2", 2 * BLOCKS),
        ("llama", "r1,r2", 9 * BLOCKS + 2),
        ("qwen2", "r1,r2", 10 * BLOCKS + 2),
        ("qwen3", "r1,r2", 9 * BLOCKS + 2),
        ("gemma3", "r2", 2 * BLOCKS),
    ] {
        let folder = folder(&format!("tool_rotate_{architecture}_{which}"));
        let (from, _) = written(&folder, architecture);
        let to = folder.join("rotated.gguf");
        quantize(&from, &to, &["--type", "f32", "--rotate", which]);
        let (before, after) = (values(&from), values(&to));
        let changed = before.iter().filter(|(name, old)| after[*name] != **old);
        assert_eq!(changed.count(), want, "{architecture} {which}");
        let has_r1 = which.contains("r1");
        // The embeddings served as the head, too.
        assert_eq!(
            after.contains_key("output.weight"),
            has_r1,
            "{architecture} {which}"
        );
        assert_eq!(after["output_norm.weight"] == vec![1.0; EMBED], has_r1);
        let off = difference(&logits(&after), &logits(&before));
        // FP32 has 24 bits; the error grows through two blocks.
        assert!(off < 1e-5, "{architecture} {which}: {off}");
    }
}

#[test]
fn a_rule_gives_the_head_its_type_that_a_rotation_separates_from_the_embeddings() {
    let folder = folder("tool_rotate_head_rule");
    let (from, _) = written(&folder, "llama");
    let to = folder.join("rotated.gguf");
    let rule = ["--type", "q4_0", "--tensor-type", r"^output\.=f16"];
    quantize(&from, &to, &[&rule[..], &["--rotate", "r1"]].concat());
    let file = File::open(&to).unwrap();
    let dtype = |name: &str| file.header().tensor(name).unwrap().dtype;
    assert_eq!(dtype("output.weight"), GgmlType::F16);
    assert_eq!(dtype("token_embd.weight"), GgmlType::Q8_0);
    // The head still shares the embeddings.
    for more in [&[][..], &["--rotate", "r2"]] {
        let args = [&rule[..], more].concat();
        fails(
            &from,
            &to,
            &args,
            1,
            &["no weight of the model has such a name"],
        );
    }
}

#[test]
fn a_head_of_its_own_and_biases_are_rotated_as_well() {
    let folder = folder("tool_rotate_head");
    let path = folder.join("model.gguf");
    let mut model = crate::decoder::model("llama");
    model.random("output.weight", &[EMBED, crate::decoder::TOKENS], 0.0);
    model.random("blk.0.attn_output.bias", &[EMBED], 0.5);
    model.random("blk.1.ffn_down.bias", &[EMBED], 0.5);
    model.write(&path);
    let to = folder.join("rotated.gguf");
    quantize(&path, &to, &["--type", "f32", "--rotate", "r1,r2"]);
    let (before, after) = (values(&path), values(&to));
    assert_eq!(before.len(), after.len());
    let off = difference(&logits(&after), &logits(&before));
    assert!(off < 1e-5, "{off}");
    // This fails if one of them was left unrotated.
    for name in [
        "output.weight",
        "blk.0.attn_output.bias",
        "blk.1.ffn_down.bias",
        "blk.1.attn_v.weight",
    ] {
        let mut wrong = after.clone();
        wrong.insert(name.into(), before[name].clone());
        let off = difference(&logits(&wrong), &logits(&before));
        assert!(off > 1e-3, "{name}: {off}");
    }
}
