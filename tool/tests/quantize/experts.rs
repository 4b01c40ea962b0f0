//! Models with experts.

use std::path::{Path, PathBuf};

use ggml_rust_npu::gguf::File;

use crate::common::{Model, folder, numbers, quantize, run};
use crate::decoder::{
    BLOCKS, EMBED, EXPERTS, FFN, difference, imatrix, logits, model, values, with_experts,
};
use crate::fails;

const NAME: &str = "blk.0.ffn_up.weight";

/// Writes a model with `values` as a weight, and statistics with one set of `squares` for each
/// count; returns the weight's bytes in Q4_0.
fn quantized(
    folder: &Path,
    ne: &[usize],
    values: &[f32],
    squares: &[f32],
    counts: &[f32],
) -> Vec<u8> {
    let (from, statistics, to) = (
        folder.join("from.gguf"),
        folder.join("imatrix.gguf"),
        folder.join("to.gguf"),
    );
    let mut model = model("llama");
    let mut imatrix = imatrix(&model);
    model.tensors.retain(|(name, ..)| name != NAME);
    imatrix.tensors.retain(|(name, ..)| !name.starts_with(NAME));
    model.tensor(NAME, ne, values.to_vec());
    let sums = squares.chunks(EMBED).zip(counts);
    let sums = sums.flat_map(|(squares, count)| squares.iter().map(move |square| square * count));
    imatrix.tensor(
        &format!("{NAME}.in_sum2"),
        &[EMBED, counts.len()],
        sums.collect(),
    );
    imatrix.tensor(
        &format!("{NAME}.counts"),
        &[1, counts.len()],
        counts.to_vec(),
    );
    model.write(&from);
    imatrix.write(&statistics);
    quantize(
        &from,
        &to,
        &["-t", "q4_0", "--imatrix", statistics.to_str().unwrap()],
    );
    let file = File::open(&to).unwrap();
    file.data(file.header().tensor(NAME).unwrap()).to_vec()
}

#[test]
fn each_expert_has_the_statistics_of_its_own_inputs() {
    let folder = folder("tool_experts");
    let values = numbers(5, 3 * EMBED * FFN);
    let squares: Vec<f32> = numbers(6, 3 * EMBED)
        .iter()
        .map(|x| 10f32.powf(2.0 * x))
        .collect();
    let experts = quantized(
        &folder,
        &[EMBED, FFN, 3],
        &values,
        &squares,
        &[8.0, 0.0, 2.0],
    );
    let size = experts.len() / 3;
    for expert in 0..3 {
        // An expert that no token reached is quantized as if all inputs were alike.
        let of_expert = &squares[expert * EMBED..][..EMBED];
        let own = if expert == 1 {
            &[1.0; EMBED]
        } else {
            of_expert
        };
        let values = &values[expert * EMBED * FFN..][..EMBED * FFN];
        let dense = quantized(&folder, &[EMBED, FFN], values, own, &[4.0]);
        assert!(experts[expert * size..][..size] == dense, "expert {expert}");
        let other = quantized(
            &folder,
            &[EMBED, FFN],
            values,
            &squares[(expert + 2) % 3 * EMBED..][..EMBED],
            &[4.0],
        );
        assert!(
            dense != other,
            "expert {expert}: the statistics change nothing"
        );
    }
}

#[test]
fn statistics_of_another_number_of_experts_are_refused() {
    let folder = folder("tool_experts_refused");
    let (from, statistics, to) = (
        folder.join("from.gguf"),
        folder.join("imatrix.gguf"),
        folder.join("to.gguf"),
    );
    let mut model = model("llama");
    let mut imatrix = imatrix(&model);
    model.random("blk.0.ffn_up_exps.weight", &[EMBED, FFN, 2], 0.0);
    let args = ["-t", "q4_0", "--imatrix", statistics.to_str().unwrap()];
    model.write(&from);
    imatrix.write(&statistics);
    fails(
        &from,
        &to,
        &args,
        1,
        &["says nothing of blk.0.ffn_up_exps.weight"],
    );
    imatrix.tensor(
        "blk.0.ffn_up_exps.weight.in_sum2",
        &[EMBED, 3],
        vec![1.0; 3 * EMBED],
    );
    imatrix.tensor("blk.0.ffn_up_exps.weight.counts", &[1, 2], vec![1.0; 2]);
    imatrix.write(&statistics);
    fails(
        &from,
        &to,
        &args,
        1,
        &["blk.0.ffn_up_exps.weight", "2 counts for 3 matrices"],
    );
    imatrix.tensors.pop();
    imatrix.tensor("blk.0.ffn_up_exps.weight.counts", &[1, 3], vec![1.0; 3]);
    imatrix.write(&statistics);
    fails(
        &from,
        &to,
        &args,
        1,
        &["blk.0.ffn_up_exps.weight has 128 inputs, and 192 in the imatrix"],
    );
    assert!(!to.exists());
}

/// Writes a model with experts and its statistics, and scales it; returns the paths of the model
/// and the result.
fn scaled(name: &str, architecture: &str, kind: &str, model: &Model) -> (PathBuf, PathBuf) {
    let folder = folder(&format!("tool_experts_{name}_{architecture}"));
    let [from, statistics, to] =
        ["from", "imatrix", "to"].map(|name| folder.join(format!("{name}.gguf")));
    model.write(&from);
    imatrix(model).write(&statistics);
    let rescaled = folder.join("rescaled.gguf");
    let [statistics, rescaled] = [&statistics, &rescaled].map(|path| path.to_str().unwrap());
    let args = ["--type", kind, "--imatrix", statistics, "--awq"];
    quantize(
        &from,
        &to,
        &[&args[..], &["--imatrix-out", rescaled]].concat(),
    );
    (from, to)
}

#[test]
fn scaling_experts_alone_changes_the_weights_and_no_logit() {
    for architecture in ["llama", "qwen3moe"] {
        let model = with_experts(model(architecture));
        let (from, to) = scaled("fold", architecture, "f32", &model);
        let (before, after) = (values(&from), values(&to));
        let changed = (before.iter()).filter(|(name, old)| after[*name] != **old);
        // In each block two norms, four weights of attention, the router, and three expert weights
        // change.
        assert_eq!(changed.count(), BLOCKS * 10, "{architecture}");
        let off = difference(&logits(&after), &logits(&before));
        assert!(off < 1e-5, "{architecture}: {off}");
        // Each expert is scaled in its columns, and all experts in those of the norm.
        let (down, old) = (
            &after["blk.0.ffn_down_exps.weight"],
            &before["blk.0.ffn_down_exps.weight"],
        );
        let of = |expert: usize| -> Vec<f32> {
            let first = expert * FFN * EMBED;
            (first..first + FFN).map(|i| down[i] / old[i]).collect()
        };
        for expert in 1..EXPERTS {
            assert!(of(0) != of(expert), "expert {expert}");
        }
        // This fails if a router or an expert was left unscaled.
        for part in ["gate_inp", "gate_exps", "up_exps", "down_exps"] {
            let mut wrong = after.clone();
            let name = format!("blk.0.ffn_{part}.weight");
            wrong.insert(name.clone(), before[&name].clone());
            let off = difference(&logits(&wrong), &logits(&before));
            assert!(off > 1e-3, "{part}: {off}");
        }
    }
}

/// Scales a model whose experts got `counts` rows of activations, or one number for all of them;
/// returns the second matrices of the first block's experts, before and after, and the tool's
/// messages.
fn scaled_with(name: &str, counts: &[f32]) -> (Vec<f32>, Vec<f32>, String) {
    let folder = folder(&format!("tool_experts_{name}"));
    let [from, statistics, to] =
        ["from", "imatrix", "to"].map(|name| folder.join(format!("{name}.gguf")));
    let model = with_experts(model("llama"));
    let mut imatrix = imatrix(&model);
    for (name, ne, _) in model.tensors.iter().filter(|(_, ne, _)| ne.len() == 3) {
        let [sums, rows] = ["in_sum2", "counts"].map(|part| format!("{name}.{part}"));
        (imatrix.tensors).retain(|(known, ..)| *known != sums && *known != rows);
        let count = |i: usize| counts[i / ne[0] % counts.len()];
        let random = numbers(11, ne[0] * EXPERTS).into_iter().enumerate();
        let random = random.map(|(i, x)| count(i) * 10f32.powf(1.5 * x));
        let inputs = ne[0] * EXPERTS / counts.len();
        imatrix.tensor(&sums, &[inputs, counts.len()], random.collect());
        imatrix.tensor(&rows, &[1, counts.len()], counts.to_vec());
    }
    model.write(&from);
    imatrix.write(&statistics);
    let statistics = statistics.to_str().unwrap();
    let args = ["-t", "q4_0", "--awq", "--imatrix", statistics];
    quantize(&from, &to, &args);
    let scaled = args.map(|arg| if arg == "q4_0" { "f32" } else { arg });
    let output = run(&from, &to, &scaled);
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    let down = |path: &Path| values(path)["blk.0.ffn_down_exps.weight"].clone();
    (down(&from), down(&to), said)
}

#[test]
fn an_expert_that_got_few_tokens_is_not_scaled() {
    let (before, after, said) = scaled_with("few", &[600.0, 63.0, 64.0]);
    // One group in each of two blocks.
    let few = "2 groups of experts are as they were, because fewer than 64 rows";
    assert!(said.contains(few), "{said}");
    let size = before.len() / EXPERTS;
    for expert in 0..EXPERTS {
        let part = expert * size..(expert + 1) * size;
        let is_same = before[part.clone()] == after[part];
        assert_eq!(is_same, expert == 1, "expert {expert}");
    }
}

#[test]
fn statistics_with_one_count_for_all_experts_scale_each() {
    // As llama-imatrix does for its older files, all experts get the count of the one with the most
    // rows.
    let (before, after, said) = scaled_with("one_count", &[65.0]);
    assert!(!said.contains("as they were"), "{said}");
    let size = before.len() / EXPERTS;
    for expert in 0..EXPERTS {
        let part = expert * size..(expert + 1) * size;
        assert!(before[part.clone()] != after[part], "expert {expert}");
    }
}

#[test]
fn scaling_brings_quantized_experts_nearer() {
    let model = with_experts(model("llama"));
    let (from, to) = scaled("nearer", "llama", "q4_0", &model);
    let plain = to.with_file_name("plain.gguf");
    let statistics = values(&to.with_file_name("imatrix.gguf"));
    quantize(&from, &plain, &["--type", "q4_0"]);
    let folded = scaled("nearer_fold", "llama", "f32", &model).1;
    let (from, to, plain, folded) = (values(&from), values(&to), values(&plain), values(&folded));
    // The error of each product, summed over the squares of its inputs, by which scaling divides.
    let error = |have: &[f32], want: &[f32], original: &[f32], squares: &[f32], k: usize| -> f64 {
        let experts = want.len() / EXPERTS;
        let term = |i: usize| {
            let scale = if original[i] == 0.0 {
                1.0
            } else {
                want[i] / original[i]
            };
            let square = squares[i / experts * k + i % k] / (scale * scale);
            f64::from(square * (have[i] - want[i]) * (have[i] - want[i]))
        };
        (0..want.len()).map(term).sum()
    };
    for (part, k) in [("gate", EMBED), ("down", FFN)] {
        let name = format!("blk.0.ffn_{part}_exps.weight");
        let squares = &statistics[&format!("{name}.in_sum2")];
        let before = error(&plain[&name], &from[&name], &from[&name], squares, k);
        let after = error(&to[&name], &folded[&name], &from[&name], squares, k);
        assert!(after < 0.8 * before, "{part}: {after} {before}");
    }
}

#[test]
fn experts_with_other_tensors_are_refused_by_name_with_awq() {
    let folder = folder("tool_experts_unknown");
    let [from, statistics, to] =
        ["from", "imatrix", "to"].map(|name| folder.join(format!("{name}.gguf")));
    for (part, words) in [
        ("ffn_up_shexp.weight", "experts with it are not supported"),
        ("ffn_gate_inp.bias", "experts with it are not supported"),
        ("exp_probs_b.bias", "experts with it are not supported"),
    ] {
        let mut model = with_experts(model("llama"));
        model.random(&format!("blk.1.{part}"), &[EMBED, FFN], 0.0);
        model.write(&from);
        imatrix(&model).write(&statistics);
        let args = [
            "-t",
            "q4_0",
            "--awq",
            "--imatrix",
            statistics.to_str().unwrap(),
        ];
        fails(&from, &to, &args, 1, &[&format!("blk.1.{part}"), words]);
    }
    let mut model = with_experts(model("llama"));
    model
        .tensors
        .retain(|(name, ..)| name != "blk.0.ffn_down_exps.weight");
    model.random(
        "blk.0.ffn_down_exps.weight",
        &[FFN, EMBED, EXPERTS + 1],
        0.0,
    );
    model.write(&from);
    imatrix(&model).write(&statistics);
    let args = [
        "-t",
        "q4_0",
        "--awq",
        "--imatrix",
        statistics.to_str().unwrap(),
    ];
    fails(
        &from,
        &to,
        &args,
        1,
        &["blk.0.ffn_down_exps.weight has the shape"],
    );
    assert!(!to.exists());
}
