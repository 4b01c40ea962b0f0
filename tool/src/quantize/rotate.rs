//! Rotations that are folded into the weights, so that nothing is left to do at run time.
//!
//! | rotation | of | goes into | and is taken back by |
//! |---|---|---|---|
//! | R1 | the residual stream | `token_embd`; rows of `attn_output`, `ffn_down` | columns of `attn_q`, `_k`, `_v`, `ffn_gate`, `_up`, `output` |
//! | R2 | each head of V | rows of `attn_v` | columns of `attn_output` |
//!
//! RMS norms have the same value for a rotated stream, but their weights do not: these are
//! multiplied into the columns of the tensors that read them, and become ones. A model whose
//! embeddings are also its head gets a separate head then.
//!
//! A rotation is `Q = diag(signs) · (H ⊗ C)`: random signs, a Hadamard matrix of the largest power
//! of two in the size, and an orthonormal cosine transform of the remaining factor.
// SOURCE: SpinQuant (Liu et al. 2024) for R1 and R2. The matrices are those of QuaRot, which are
// not learned.

use std::sync::Arc;

use clap::ValueEnum;
use ggml_rust_npu::gguf::{File, Header, TensorInfo};

use super::block::to_f32;
use super::model::{self, number};
use super::transform::{Transform, Transforms};
use crate::ToolError;

/// Parts of a model that can be rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Rotate {
    /// The residual stream
    R1,
    /// Each head of V
    R2,
}

/// An orthogonal matrix that is applied to each part of a vector.
#[derive(Debug)]
pub struct FoldedRotation {
    /// A sign for each element of a part.
    signs: Vec<f32>,
    /// The power of two in the size.
    power: usize,
    /// Rows of the cosine transform.
    cosines: Vec<f32>,
}

/// Largest odd factor of a size: the cosine transform needs its square, and models have at most 45.
const MAX_REST: usize = 1023;

impl FoldedRotation {
    /// Creates a rotation of parts of `size`, which is not 0; the same `seed` gives the same.
    ///
    /// - `what`: the size's name
    ///
    /// # Errors
    /// Text, if `size` has too large an odd factor.
    fn new(what: &str, size: usize, seed: u64) -> Result<Self, ToolError> {
        let power = 1 << size.trailing_zeros();
        let rest = size / power;
        if rest > MAX_REST {
            return Err(format!(
                "--rotate: {what} is {size}, whose odd factor {rest} is larger than {MAX_REST}"
            )
            .into());
        }
        let cosine = |i: usize| {
            let (row, column) = ((i / rest) as f64, (i % rest) as f64);
            let angle = std::f64::consts::PI * (2.0 * column + 1.0) * row / (2.0 * rest as f64);
            let norm = if row == 0.0 { 1.0 } else { 2.0 };
            // CAST: rounded to the precision of the weights.
            #[expect(clippy::cast_possible_truncation, reason = "see above")]
            let rounded = ((norm / rest as f64).sqrt() * angle.cos()) as f32;
            rounded
        };
        let mut state = seed;
        let sign = |_| {
            // SOURCE: splitmix64, Steele, Lea and Flood 2014.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let x = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            if x >> 63 == 0 { 1.0 } else { -1.0 }
        };
        Ok(Self {
            signs: (0..size).map(sign).collect(),
            power,
            cosines: (0..rest * rest).map(cosine).collect(),
        })
    }

    /// Multiplies each part of a row vector with the matrix.
    ///
    /// # Panics
    /// If the vector is not whole parts.
    pub fn apply(&self, vector: &mut [f32]) {
        let size = self.signs.len();
        assert!(vector.len().is_multiple_of(size), "whole parts");
        let rest = size / self.power;
        let mut mixed = vec![0.0; rest];
        for part in vector.chunks_exact_mut(size) {
            part.iter_mut()
                .zip(&self.signs)
                .for_each(|(x, sign)| *x *= sign);
            // For element (i, j) of H ⊗ C, the Hadamard matrix's index i is the slower one.
            let mut half = rest;
            while half < size {
                for pair in part.chunks_exact_mut(2 * half) {
                    let (left, right) = pair.split_at_mut(half);
                    for (x, y) in left.iter_mut().zip(right) {
                        (*x, *y) = (*x + *y, *x - *y);
                    }
                }
                half *= 2;
            }
            // CAST: exact up to 2^24.
            let norm = (self.power as f32).sqrt().recip();
            for group in part.chunks_exact_mut(rest) {
                mixed.fill(0.0);
                for (x, row) in group.iter().zip(self.cosines.chunks_exact(rest)) {
                    mixed.iter_mut().zip(row).for_each(|(sum, c)| *sum += x * c);
                }
                group
                    .iter_mut()
                    .zip(&mixed)
                    .for_each(|(x, sum)| *x = sum * norm);
            }
        }
    }
}

/// Parts of a block's names that a rotation of the stream knows, of weights and biases.
const KNOWN: [&str; 13] = [
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_q_norm",
    "attn_k_norm",
    "attn_output",
    "attn_rot_embd",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
    "attn_sinks",
];

/// Weights that read a norm of the stream.
const READERS: [(&str, &[&str]); 2] = [
    ("attn_norm", &["attn_q", "attn_k", "attn_v"]),
    ("ffn_norm", &["ffn_gate", "ffn_up"]),
];

/// Returns the transformation of each tensor.
///
/// # Errors
/// Text that names the tensor for which the rotation is impossible, and the reason.
pub fn transforms(file: &File, rotations: &[Rotate]) -> Result<Transforms, ToolError> {
    let mut transforms = Transforms::new();
    if rotations.contains(&Rotate::R1) {
        rotate_stream(file, &mut transforms)?;
    }
    if rotations.contains(&Rotate::R2) {
        rotate_values(file.header(), &mut transforms)?;
    }
    Ok(transforms)
}

fn rotate_stream(file: &File, transforms: &mut Transforms) -> Result<(), ToolError> {
    let header = file.header();
    let size = number(header, "embedding_length")?;
    check_stream(header)?;
    let embeddings = matrix(header, "token_embd.weight")?;
    if embeddings.ne[0] != size {
        let (name, inputs) = (&embeddings.name, embeddings.ne[0]);
        return Err(format!("{name} has rows of {inputs}, embedding_length is {size}").into());
    }
    let rotation = Arc::new(FoldedRotation::new("embedding_length", size, 1)?);
    transforms.insert(
        embeddings.name.clone(),
        Transform {
            input: Some(Arc::clone(&rotation)),
            ..Transform::default()
        },
    );
    let mut fold = |norm: &str, readers: &[String]| -> Result<(), ToolError> {
        let source = vector(header, norm, size)?;
        let mut weights = vec![0.0; source.ne[0]];
        to_f32(source.dtype, file.data(source), &mut weights);
        for reader in readers {
            // If the head shares the embeddings, it has their width.
            let is_tied = reader == "output.weight" && header.tensor(reader).is_none();
            let inputs = match is_tied {
                true => size,
                false => matrix(header, reader)?.ne[0],
            };
            if inputs != size {
                return Err(
                    format!("{reader} has {inputs} inputs, embedding_length is {size}").into(),
                );
            }
            let transform = transforms.entry(reader.clone()).or_default();
            (transform.columns, transform.input) = (weights.clone(), Some(Arc::clone(&rotation)));
        }
        transforms.entry(norm.to_owned()).or_default().ones = true;
        Ok(())
    };
    fold("output_norm.weight", &["output.weight".into()])?;
    let blocks = number(header, "block_count")?;
    for block in 0..blocks {
        for (norm, readers) in READERS {
            let name = |part: &str| format!("blk.{block}.{part}.weight");
            let readers: Vec<String> = readers.iter().map(|part| name(part)).collect();
            fold(&name(norm), &readers)?;
        }
    }
    for block in 0..blocks {
        for part in ["attn_output", "ffn_down"] {
            let name = format!("blk.{block}.{part}");
            let weight = matrix(header, &format!("{name}.weight"))?;
            if weight.ne[1] != size {
                return Err(format!(
                    "{}: {} rows for a stream of {size}",
                    weight.name, weight.ne[1]
                )
                .into());
            }
            transforms.entry(weight.name.clone()).or_default().output = Some(Arc::clone(&rotation));
            if header.tensor(&format!("{name}.bias")).is_some() {
                vector(header, &format!("{name}.bias"), size)?;
                transforms.entry(format!("{name}.bias")).or_default().input =
                    Some(Arc::clone(&rotation));
            }
        }
    }
    Ok(())
}

/// Refuses tensors that read or write the residual stream in a way that a rotation would change.
fn check_stream(header: &Header) -> Result<(), ToolError> {
    let pooling = format!("{}.pooling_type", model::architecture(header)?);
    if let Some(value) = header.get(&pooling)
        && value.as_usize() != Some(0)
    {
        let value = value.as_usize().unwrap_or_default();
        return Err(format!(
            "--rotate r1: {pooling} is {value}: embeddings are taken from the stream itself, which would be rotated"
        )
        .into());
    }
    for tensor in &header.tensors {
        let name = tensor.name.as_str();
        let refused = |reason: &str| Err(format!("--rotate r1: {name} {reason}").into());
        let Some((_, part)) = name
            .strip_prefix("blk.")
            .and_then(|rest| rest.split_once('.'))
        else {
            let known = [
                "token_embd.weight",
                "output_norm.weight",
                "output.weight",
                "rope_freqs.weight",
            ];
            if known.contains(&name) {
                continue;
            }
            return refused("is not known to pass a rotation of the stream through");
        };
        let (part, kind) = part.rsplit_once('.').unwrap_or((part, ""));
        match part {
            "post_attention_norm" | "post_ffw_norm" => {
                return refused(
                    "multiplies what is added to the stream, channel by channel: that cannot be rotated",
                );
            }
            "attn_norm" | "ffn_norm" if kind == "bias" => {
                return refused(
                    "belongs to a norm that subtracts the mean, which a rotation changes",
                );
            }
            "ffn_gate_inp" => return refused("chooses experts, which are not supported"),
            part if !KNOWN.contains(&part) => {
                return refused("is not known to pass a rotation of the stream through");
            }
            _ => {}
        }
    }
    Ok(())
}

fn rotate_values(header: &Header, transforms: &mut Transforms) -> Result<(), ToolError> {
    let size = model::heads(header)?.size;
    let mut rotation = None;
    for block in 0..number(header, "block_count")? {
        let v = matrix(header, &format!("blk.{block}.attn_v.weight"))?;
        let output = matrix(header, &format!("blk.{block}.attn_output.weight"))?;
        if !v.ne[1].is_multiple_of(size) || !output.ne[0].is_multiple_of(size) {
            let (rows, columns) = (v.ne[1], output.ne[0]);
            return Err(format!("--rotate r2: {rows} rows of {} and {columns} columns of {} are not whole heads of {size}", v.name, output.name).into());
        }
        // The first block shows that heads of this size exist; only then is the rotation computed.
        let rotation = match &rotation {
            Some(rotation) => rotation,
            None => rotation.insert(Arc::new(FoldedRotation::new(
                "the size of a head",
                size,
                2,
            )?)),
        };
        transforms.entry(v.name.clone()).or_default().output = Some(Arc::clone(rotation));
        transforms.entry(output.name.clone()).or_default().input = Some(Arc::clone(rotation));
        let bias = format!("blk.{block}.attn_v.bias");
        if header.tensor(&bias).is_some() {
            vector(header, &bias, v.ne[1])?;
            transforms.entry(bias).or_default().input = Some(Arc::clone(rotation));
        }
    }
    Ok(())
}

/// The option, for messages.
const OPTION: &str = "--rotate";

fn matrix<'a>(header: &'a Header, name: &str) -> Result<&'a TensorInfo, ToolError> {
    model::matrix(header, name, OPTION)
}

fn vector<'a>(header: &'a Header, name: &str, len: usize) -> Result<&'a TensorInfo, ToolError> {
    model::vector(header, name, len, OPTION)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the matrix by its definition, in `f64`.
    fn matrix(rotation: &FoldedRotation) -> Vec<Vec<f64>> {
        let size = rotation.signs.len();
        let rest = size / rotation.power;
        let hadamard = |i: usize, j: usize| {
            let sign = if (i & j).count_ones().is_multiple_of(2) {
                1.0
            } else {
                -1.0
            };
            sign / (rotation.power as f64).sqrt()
        };
        let cosine = |i: usize, j: usize| {
            let angle = std::f64::consts::PI / rest as f64 * (j as f64 + 0.5) * i as f64;
            angle.cos() * (if i == 0 { 1.0 } else { 2.0 } / rest as f64).sqrt()
        };
        let element = |i: usize, j: usize| {
            f64::from(rotation.signs[i]) * hadamard(i / rest, j / rest) * cosine(i % rest, j % rest)
        };
        (0..size)
            .map(|i| (0..size).map(|j| element(i, j)).collect())
            .collect()
    }

    #[test]
    fn a_rotation_is_the_product_of_its_matrices_and_orthogonal() {
        for size in [1, 3, 8, 24, 64, 72, 80] {
            let rotation = FoldedRotation::new("size", size, 7).unwrap();
            let matrix = matrix(&rotation);
            for i in 0..size {
                let mut row = vec![0.0; 2 * size];
                (row[i], row[size + i]) = (1.0, -2.0);
                rotation.apply(&mut row);
                for j in 0..size {
                    assert!(
                        (f64::from(row[j]) - matrix[i][j]).abs() < 1e-6,
                        "{size}: {i} {j}"
                    );
                    assert!((f64::from(row[size + j]) + 2.0 * matrix[i][j]).abs() < 1e-6);
                }
                for other in 0..size {
                    let product: f64 = (0..size).map(|j| matrix[i][j] * matrix[other][j]).sum();
                    let want = f64::from(u8::from(i == other));
                    assert!((product - want).abs() < 1e-9, "{size}: {i} {other}");
                }
            }
        }
    }

    #[test]
    fn signs_come_from_the_seed_and_are_mixed() {
        let [a, b, c] = [1, 1, 2].map(|seed| FoldedRotation::new("size", 256, seed).unwrap().signs);
        assert_eq!(a, b);
        assert_ne!(a, c);
        let positive = a.iter().filter(|sign| **sign > 0.0).count();
        assert!((90..166).contains(&positive), "{positive}");
    }
}
