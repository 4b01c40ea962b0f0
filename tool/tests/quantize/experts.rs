//! Models with experts.

use std::path::Path;

use ggml_rust_npu::gguf::File;

use crate::common::{folder, numbers, quantize};
use crate::decoder::{EMBED, FFN, imatrix, model};
use crate::fails;

const NAME: &str = "blk.0.ffn_up.weight";

/// Writes a model with `values` as a weight, and statistics with one set of `squares` for each count; returns the
/// weight's bytes in Q4_0.
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
        // One that no token reached is quantized as if all inputs were alike.
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
    model.random("blk.0.ffn_up_exps.weight", &[EMBED, FFN, 2], 0.0);
    let mut imatrix = imatrix(&model);
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
