//! Activation-aware scaling, and rounding with statistics.

use crate::decoder::{BLOCKS, difference, logits, values, written};
use crate::tool::{folder, quantize};

#[test]
fn scaling_alone_changes_the_weights_and_no_logit() {
    for architecture in ["llama", "qwen2", "qwen3", "gemma3"] {
        let folder = folder(&format!("tool_fold_{architecture}"));
        let (from, statistics) = written(&folder, architecture);
        let to = folder.join("folded.gguf");
        let statistics = statistics.to_str().unwrap();
        quantize(
            &from,
            &to,
            &["--type", "f32", "--imatrix", statistics, "--awq"],
        );
        let (before, after) = (values(&from), values(&to));
        let changed = before
            .iter()
            .filter(|(name, old)| after[*name] != **old)
            .count();
        // In each block: two norms and seven weights; a bias with qwen2.
        let want = BLOCKS * if architecture == "qwen2" { 10 } else { 9 };
        assert_eq!(changed, want, "{architecture}");
        let off = difference(&logits(&after), &logits(&before));
        // 24 bits, through two blocks.
        assert!(off < 1e-5, "{architecture}: {off}");
    }
}

#[test]
fn a_scale_that_is_folded_wrongly_would_be_seen() {
    let folder = folder("tool_fold_wrong");
    let (from, _) = written(&folder, "llama");
    let before = values(&from);
    for part in [
        "attn_norm.weight",
        "attn_v.weight",
        "ffn_norm.weight",
        "ffn_up.weight",
    ] {
        let mut after = before.clone();
        after.get_mut(&format!("blk.0.{part}")).unwrap()[3] *= 1.5;
        let off = difference(&logits(&after), &logits(&before));
        assert!(off > 1e-4, "{part}: {off}");
    }
}

#[test]
fn statistics_bring_quantized_weights_nearer() {
    let folder = folder("tool_nearer");
    let (from, statistics) = written(&folder, "llama");
    let model = values(&from);
    let means = values(&statistics);
    let statistics = statistics.to_str().unwrap();
    for format in ["q4_0", "iq4_nl"] {
        let mut errors = Vec::new();
        for more in [&[][..], &["--imatrix", statistics]] {
            let to = folder.join("quantized.gguf");
            quantize(&from, &to, &[&["--type", format], more].concat());
            let quantized = values(&to);
            let mut error = 0.0;
            for (name, old) in model.iter().filter(|(name, _)| name.starts_with("blk.")) {
                let Some(squares) = means.get(&format!("{name}.in_sum2")) else {
                    assert_eq!(&quantized[name], old, "{name} is no matrix");
                    continue;
                };
                let pairs = old.iter().zip(&quantized[name]).zip(squares.iter().cycle());
                error += pairs
                    .map(|((old, new), square)| f64::from(square * (old - new) * (old - new)))
                    .sum::<f64>();
            }
            errors.push(error);
        }
        assert!(errors[1] < 0.9 * errors[0], "{format}: {errors:?}");
        assert!(errors[1] > 0.0);
    }
}
