//! Activation-aware scaling, and rounding with statistics.

use crate::common::{folder, quantize};
use crate::decoder::{BLOCKS, difference, logits, values, written};

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
        // Two norms and seven weights in each block, and a bias with qwen2.
        let want = BLOCKS * if architecture == "qwen2" { 10 } else { 9 };
        assert_eq!(changed, want, "{architecture}");
        let off = difference(&logits(&after), &logits(&before));
        // Each of the two blocks rounds to FP32's 24 bits.
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
    for format in ["q4_0", "q4_1", "q5_0", "iq4_nl"] {
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

#[test]
fn rescaled_statistics_are_those_of_the_scaled_model() {
    let folder = folder("tool_rescaled");
    let (from, statistics) = written(&folder, "llama");
    let statistics = statistics.to_str().unwrap();
    let (scaled, rescaled) = (folder.join("scaled.gguf"), folder.join("rescaled.gguf"));
    let both = ["--imatrix", statistics, "--awq"];
    let out = ["--imatrix-out", rescaled.to_str().unwrap()];
    quantize(
        &from,
        &scaled,
        &[&["--type", "f32"], &both[..], &out].concat(),
    );
    // An input times s has a square times s^2, and its column was divided by s.
    let (before, after) = (values(&from), values(&scaled));
    let (old, new) = (values(statistics.as_ref()), values(&rescaled));
    assert_eq!(old.len(), new.len());
    let mut changed = 0;
    for (name, want) in &old {
        if let Some(weight) = name.strip_suffix(".in_sum") {
            // Sums of inputs are divided by the scale once, sums of squares twice.
            let squares = format!("{weight}.in_sum2");
            for (column, sum) in want.iter().enumerate() {
                let once = sum / new[name][column];
                let twice = old[&squares][column] / new[&squares][column];
                assert!((once * once / twice - 1.0).abs() < 1e-4, "{name} {column}");
            }
            continue;
        }
        let Some(weight) = name.strip_suffix(".in_sum2") else {
            assert_eq!(&new[name], want, "{name}");
            continue;
        };
        changed += usize::from(&new[name] != want);
        let k = want.len();
        // Rows of these two are divided as well, so only the ratio between columns shows the scale.
        let divided = weight.contains("attn_v") || weight.contains("ffn_up");
        for column in 1..k {
            let ratio = |column: usize| after[weight][column] / before[weight][column];
            let moved = |column: usize| (want[column] / new[name][column]).sqrt();
            let (have, want) = if divided {
                (ratio(column) / ratio(0), moved(column) / moved(0))
            } else {
                (ratio(column), moved(column))
            };
            assert!(
                (have / want - 1.0).abs() < 1e-4,
                "{name} {column}: {have} {want}"
            );
        }
    }
    // There are seven weights in each block; an exponent of 0 would leave some unchanged.
    assert!(changed > BLOCKS * 3, "{changed}");
    // Quantizing the scaled model with the scaled statistics must equal --awq in one step.
    let (once, twice) = (folder.join("once.gguf"), folder.join("twice.gguf"));
    quantize(&from, &once, &[&["--type", "q4_0"], &both[..]].concat());
    let once = values(&once);
    let part_off = |statistics: &str| {
        let again = ["--type", "q4_0", "--imatrix", statistics];
        quantize(&scaled, &twice, &again);
        let twice = values(&twice);
        let (mut off, mut all) = (0, 0);
        for (name, want) in once.iter().filter(|(name, _)| name.starts_with("blk.")) {
            let pairs = want.iter().zip(&twice[name]);
            off += pairs
                .filter(|(a, b)| (*a - *b).abs() > 1e-6 * a.abs())
                .count();
            all += want.len();
        }
        off as f64 / all as f64
    };
    // Not exactly 0: in some blocks two scales are equally good, and the last bit decides.
    let off = part_off(rescaled.to_str().unwrap());
    assert!(off < 0.01, "{off}");
    let off = part_off(statistics);
    assert!(
        off > 0.05,
        "statistics of the other model are as good: {off}"
    );
}
