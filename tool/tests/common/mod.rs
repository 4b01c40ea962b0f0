//! Shared by the tests of the tool: models written by hand, the tool's runs, and the contents of
//! the files that it writes.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Output;

use ggml_rust_npu::gguf::{GgmlType, Header, TensorPlan, Value, Writer};
use half::{bf16, f16};
use test_kit::Numbers;

/// `n` numbers in [-1, 1) from a seed.
pub fn numbers(seed: u64, n: usize) -> Vec<f32> {
    Numbers::fixed(seed).floats(n)
}

/// A model that a test writes to a file.
pub struct Model {
    entries: Vec<(String, Value)>,
    /// Name, shape and type of each tensor: F32, F16, BF16, or another one of four bytes.
    pub tensors: Vec<(String, Vec<usize>, GgmlType)>,
    values: HashMap<String, Vec<f32>>,
}

impl Model {
    /// A file with one entry, and its kind.
    pub fn new(key: &str, value: &str) -> Self {
        let mut model = Self {
            entries: Vec::new(),
            tensors: Vec::new(),
            values: HashMap::new(),
        };
        model.text(key, value);
        model
    }

    pub fn number(&mut self, key: &str, number: usize) {
        self.forget(key);
        self.entries
            .push((key.into(), Value::Unsigned(number as u64)));
    }

    pub fn text(&mut self, key: &str, text: &str) {
        self.forget(key);
        self.entries.push((key.into(), Value::String(text.into())));
    }

    pub fn forget(&mut self, key: &str) {
        self.entries.retain(|(known, _)| known != key);
    }

    pub fn tensor(&mut self, name: &str, ne: &[usize], values: Vec<f32>) {
        self.tensors.push((name.into(), ne.to_vec(), GgmlType::F32));
        self.values.insert(name.into(), values);
    }

    /// Random numbers around `middle`.
    pub fn random(&mut self, name: &str, ne: &[usize], middle: f32) {
        let seed = name
            .bytes()
            .fold(7u64, |seed, byte| seed.wrapping_mul(31) + u64::from(byte));
        let values = numbers(seed, ne.iter().product());
        self.tensor(name, ne, values.iter().map(|x| middle + 0.3 * x).collect());
    }

    pub fn write(&self, path: &Path) {
        let mut empty = b"GGUF\x03\0\0\0".to_vec();
        empty.extend([0; 16]);
        let header = Header::parse(&empty).unwrap();
        let updates: Vec<(&str, Value)> = (self.entries.iter())
            .map(|(key, value)| (key.as_str(), value.clone()))
            .collect();
        let plans: Vec<TensorPlan> = (self.tensors.iter().cloned())
            .map(|(name, ne, dtype)| TensorPlan { name, dtype, ne })
            .collect();
        let mut writer = Writer::create(path, &header, &empty, &updates, &plans).unwrap();
        for (name, ne, dtype) in &self.tensors {
            let n = ne.iter().product();
            let values = self.values[name].iter().copied().cycle().take(n);
            let bytes: Vec<u8> = match *dtype {
                GgmlType::F16 => values
                    .flat_map(|value| f16::from_f32(value).to_le_bytes())
                    .collect(),
                GgmlType::BF16 => values
                    .flat_map(|value| bf16::from_f32(value).to_le_bytes())
                    .collect(),
                _ => values.flat_map(f32::to_le_bytes).collect(),
            };
            writer.tensor([bytes]).unwrap();
        }
        writer.finish().unwrap();
    }
}

/// An empty folder for one test.
pub fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

/// Runs `ggml-npu quantize`.
pub fn run(from: &Path, to: &Path, args: &[&str]) -> Output {
    let mut command = test_kit::command(env!("CARGO_BIN_EXE_ggml-npu"));
    let command = command
        .arg("quantize")
        .arg(from)
        .arg("-o")
        .arg(to)
        .args(args);
    command.output().unwrap()
}

/// Runs `ggml-npu quantize`, which must succeed.
pub fn quantize(from: &Path, to: &Path, args: &[&str]) {
    let output = run(from, to, args);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {errors}");
    assert!(
        !errors.contains('\u{1b}') && !errors.contains('\r'),
        "a progress bar: {errors}"
    );
}
