//! GGUF files with wrong numbers: models and statistics.

use std::path::Path;

use ggml_rust_npu::gguf::GgmlType;

use crate::{Files, HOSTILE_TEXT, NUMBERS, common};

/// A GGUF in which every number can be made wrong.
#[derive(Clone)]
pub struct Raw {
    entries: Files,
    tensors: Vec<RawTensor>,
    alignment: usize,
}

#[derive(Clone)]
struct RawTensor {
    name: Vec<u8>,
    ne: Vec<u64>,
    dtype: u32,
    data: Vec<u8>,
}

fn text(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

fn u64_value(number: u64) -> Vec<u8> {
    [&10u32.to_le_bytes()[..], &number.to_le_bytes()].concat()
}

fn text_value(value: &[u8]) -> Vec<u8> {
    [8u32.to_le_bytes().to_vec(), text(value)].concat()
}

impl Raw {
    /// A good model, or the statistics of one.
    pub fn of(model: &common::Model, path: &Path) -> Self {
        model.write(path);
        Self::read(path)
    }

    /// Reads a good file.
    pub fn read(path: &Path) -> Self {
        let file = ggml_rust_npu::gguf::File::open(path).unwrap();
        let header = file.header();
        let value = |range: std::ops::Range<usize>, key: &str| {
            file.bytes()[range.start + 8 + key.len()..range.end].to_vec()
        };
        Self {
            entries: (header.entries.iter())
                .map(|entry| (entry.key.clone(), value(entry.range.clone(), &entry.key)))
                .collect(),
            tensors: (header.tensors.iter())
                .map(|tensor| RawTensor {
                    name: tensor.name.clone().into_bytes(),
                    ne: (tensor.ne[..tensor.dims].iter())
                        .map(|n| *n as u64)
                        .collect(),
                    dtype: tensor.dtype.number(),
                    data: file.data(tensor).to_vec(),
                })
                .collect(),
            alignment: 32,
        }
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend((self.tensors.len() as u64).to_le_bytes());
        bytes.extend((self.entries.len() as u64).to_le_bytes());
        for (key, value) in &self.entries {
            bytes.extend(text(key.as_bytes()));
            bytes.extend(value);
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            bytes.extend(text(&tensor.name));
            bytes.extend(u32::try_from(tensor.ne.len()).unwrap().to_le_bytes());
            (tensor.ne.iter()).for_each(|size| bytes.extend(size.to_le_bytes()));
            bytes.extend(tensor.dtype.to_le_bytes());
            bytes.extend((offset as u64).to_le_bytes());
            offset += tensor.data.len().next_multiple_of(self.alignment);
        }
        for tensor in &self.tensors {
            bytes.resize(bytes.len().next_multiple_of(self.alignment), 0);
            bytes.extend(&tensor.data);
        }
        bytes.resize(bytes.len().next_multiple_of(self.alignment), 0);
        bytes
    }

    fn entry(&self, key: &str, value: Vec<u8>) -> Self {
        let mut other = self.clone();
        other.entries.retain(|(known, _)| known != key);
        other.entries.push((key.into(), value));
        other
    }

    /// Replaces a tensor by another one of the same name, with as many data as it needs where that
    /// is possible.
    fn tensor(&self, name: &str, ne: &[u64], dtype: u32) -> Self {
        let mut other = self.clone();
        // Tensors that do not fit into a small file get no data.
        let bytes = || {
            let sizes: Option<Vec<usize>> = ne.iter().map(|n| usize::try_from(*n).ok()).collect();
            let (k, rows) = sizes.as_ref()?.split_first()?;
            let row = GgmlType::from_number(dtype)?.row_bytes(*k)?;
            let all = (rows.iter()).try_fold(row, |all, n| all.checked_mul(*n))?;
            (all <= 1 << 20).then_some(all)
        };
        let data = vec![0x11; bytes().unwrap_or(0)];
        let tensor = RawTensor {
            name: name.into(),
            ne: ne.to_vec(),
            dtype,
            data,
        };
        let known = (other.tensors.iter()).position(|tensor| tensor.name == name.as_bytes());
        match known {
            Some(index) => other.tensors[index] = tensor,
            None => other.tensors.push(tensor),
        }
        other
    }

    /// Replaces one number of a tensor.
    fn value(&self, name: &str, value: f32) -> Self {
        let mut other = self.clone();
        let tensor = (other.tensors.iter_mut()).find(|tensor| tensor.name == name.as_bytes());
        tensor.unwrap().data[40..44].copy_from_slice(&value.to_le_bytes());
        other
    }
}

pub fn models(model: &Raw) -> Files {
    let mut cases: Files = Vec::new();
    let mut add = |name: String, raw: &Raw| cases.push((name, raw.bytes()));
    for number in NUMBERS {
        for key in [
            "general.alignment",
            "llama.embedding_length",
            "llama.attention.head_count",
            "llama.attention.head_count_kv",
            "llama.attention.value_length",
            "llama.block_count",
        ] {
            add(
                format!("{key} {number}"),
                &model.entry(key, u64_value(number)),
            );
        }
    }
    let mut no_value_length = model.entry("llama.attention.head_count", u64_value(65));
    (no_value_length.entries).retain(|(key, _)| key != "llama.attention.value_length");
    add("65 heads of 64 channels".into(), &no_value_length);
    let aligned = |alignment: usize| Raw {
        alignment,
        ..model.entry("general.alignment", u64_value(alignment as u64))
    };
    add("alignment 1".into(), &aligned(1));
    add("alignment 64 KiB".into(), &aligned(1 << 16));
    for (key, value) in [
        ("general.architecture", HOSTILE_TEXT),
        ("general.name", HOSTILE_TEXT),
        ("llama.block_count", HOSTILE_TEXT),
        ("general.architecture", b"\xff\xfe"),
    ] {
        add(
            format!("text in {key}"),
            &model.entry(key, text_value(value)),
        );
    }
    for name in [
        "blk.0.attn_norm.weight",
        "blk.0.attn_v.weight",
        "blk.1.ffn_up.bias",
        "output_norm.weight",
        "blk.0.attn_v.bias",
        "blk.1.attn_output.bias",
        "token_embd.weight",
        "output.weight",
    ] {
        let ne: &[u64] = if name.contains("norm") || name.contains("bias") {
            &[64]
        } else {
            &[64, 64]
        };
        for (what, dtype) in [
            ("I8", 24),
            ("I32", 26),
            ("F64", 28),
            ("Q8_0", 8),
            ("F16", 1),
        ] {
            add(format!("{name} {what}"), &model.tensor(name, ne, dtype));
        }
        for ne in [
            &[][..],
            &[0],
            &[1],
            &[32],
            &[63],
            &[64, 0],
            &[0, 64],
            &[64, 1],
            &[1, 64],
            &[64, 32, 2],
            &[1 << 58],
            &[1 << 40, 0],
            &[0, 1 << 62],
            &[1 << 40, 1 << 40, 0],
        ] {
            add(format!("{name} {ne:?}"), &model.tensor(name, ne, 0));
        }
    }
    for value in [f32::NAN, f32::INFINITY, -1e38, 1e-45] {
        for name in [
            "blk.0.attn_q.weight",
            "blk.0.attn_norm.weight",
            "token_embd.weight",
        ] {
            add(format!("{value:e} in {name}"), &model.value(name, value));
        }
    }
    let mut named = model.clone();
    named.tensors[3].name = [b"blk.0.", HOSTILE_TEXT, b".weight"].concat();
    add("a name with controls".into(), &named);
    named.tensors[3].name = b"blk.0.\x1b[31m.weight".to_vec();
    add("a name with colours".into(), &named);
    named.tensors[3].name = vec![b'x'; 300];
    add("a long name".into(), &named);
    named.tensors[3].name = b"token_embd.weight".to_vec();
    add("a name twice".into(), &named);
    cases
}

/// Blocks of a quantized model whose scales are NaN.
pub fn quantized(model: &Raw) -> Files {
    let mut cases = Files::new();
    for name in ["blk.0.attn_q.weight", "token_embd.weight"] {
        for (what, scale) in [
            ("NaN", 0x7e00_u16),
            ("infinity", 0xfc00),
            ("65504", 0x7bff),
            ("2^-24", 1),
        ] {
            let mut other = model.clone();
            let tensor = (other.tensors.iter_mut()).find(|tensor| tensor.name == name.as_bytes());
            tensor.unwrap().data[..2].copy_from_slice(&scale.to_le_bytes());
            cases.push((format!("{what} as a scale of {name}"), other.bytes()));
        }
    }
    cases
}

/// Experts whose numbers do not fit together.
pub fn experts(model: &Raw) -> Files {
    let mut cases = Files::new();
    for number in NUMBERS {
        for key in ["llama.expert_count", "llama.expert_used_count"] {
            let other = model.entry(key, u64_value(number));
            cases.push((format!("{key} {number}"), other.bytes()));
        }
    }
    for name in [
        "blk.0.ffn_up_exps.weight",
        "blk.0.ffn_down_exps.weight",
        "blk.1.ffn_gate_inp.weight",
    ] {
        for ne in [
            &[64, 64, 0][..],
            &[64, 64],
            &[64, 64, 1],
            &[64, 64, 1 << 40],
            &[1, 1, 3],
            &[64, 64, 3, 2],
        ] {
            cases.push((format!("{name} {ne:?}"), model.tensor(name, ne, 0).bytes()));
        }
        for value in [f32::NAN, f32::INFINITY] {
            cases.push((
                format!("{value} in {name}"),
                model.value(name, value).bytes(),
            ));
        }
    }
    cases
}

pub fn statistics(statistics: &Raw) -> Files {
    let mut cases: Files = Vec::new();
    let mut add = |name: String, raw: &Raw| cases.push((name, raw.bytes()));
    for part in ["in_sum2", "counts"] {
        let name = format!("blk.0.attn_v.weight.{part}");
        for (ne, dtype) in [
            (&[64, 1][..], 24),
            (&[64, 1], 28),
            (&[0, 1], 0),
            (&[1, 1], 0),
            (&[64, 2], 0),
            (&[32, 1], 0),
            (&[1 << 40, 0], 0),
            (&[64], 0),
            (&[], 0),
        ] {
            add(
                format!("{name} {ne:?} of {dtype}"),
                &statistics.tensor(&name, ne, dtype),
            );
        }
    }
    for value in [f32::NAN, f32::INFINITY, -1.0, 3e38, 1e-45, 0.0] {
        let mut other = statistics.clone();
        let of_part = |part: &str| {
            other
                .tensors
                .iter()
                .position(|tensor| tensor.name.ends_with(part.as_bytes()))
        };
        let index = of_part("attn_output.weight.in_sum2").unwrap();
        other.tensors[index].data[..4].copy_from_slice(&value.to_le_bytes());
        add(format!("{value:e} in a sum"), &other);
        let mut other = statistics.clone();
        let index = other
            .tensors
            .iter()
            .position(|tensor| tensor.name.ends_with(b"counts"))
            .unwrap();
        other.tensors[index].data[..4].copy_from_slice(&value.to_le_bytes());
        add(format!("{value:e} as a count"), &other);
    }
    add(
        "text as type".into(),
        &statistics.entry("general.type", text_value(HOSTILE_TEXT)),
    );
    cases
}
