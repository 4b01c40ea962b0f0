//! Writes a GGUF file: the metadata of another one byte for byte, tensors one after another.

use std::io;
use std::path::{Path, PathBuf};

use super::parse::Header;
use super::types::{GgmlType, Value};
use super::{Error, MAGIC, Result, field};
use crate::files::OutputFile;

/// A tensor that will be written.
#[derive(Clone, Debug)]
pub struct TensorPlan {
    /// The name.
    pub name: String,
    /// Element type.
    pub dtype: GgmlType,
    /// Elements in each dimension, innermost first.
    pub ne: Vec<usize>,
}

impl TensorPlan {
    fn bytes(&self) -> Result<u64> {
        let (first, rest) = self.ne.split_first().unwrap_or((&1, &[]));
        let row = self.dtype.row_bytes(*first);
        let all = row.and_then(|row| {
            rest.iter()
                .try_fold(row, |total, size| total.checked_mul(*size))
        });
        all.map(|bytes| bytes as u64).ok_or_else(|| {
            let reason = format!("not whole blocks of {}, or too large", self.dtype.name());
            field(
                format!("shape of tensor {:?}", self.name),
                format!("{:?}", self.ne),
                reason,
            )
        })
    }
}

/// A file that is being written: nothing has its name until [`Writer::finish`].
///
/// Tensors are streamed: the writer holds one buffer of 1 MiB.
///
/// ```
/// use ggml_rust_npu::gguf::{File, GgmlType, Header, MAGIC, TensorPlan, Writer};
///
/// // Metadata is taken from another file, here one without any.
/// let source = [&MAGIC[..], &3u32.to_le_bytes(), &[0; 16]].concat();
/// let header = Header::parse(&source)?;
/// let f16 = GgmlType::from_number(1).expect("ggml has this type");
/// let plan = TensorPlan { name: "blk.0.attn_q.weight".into(), dtype: f16, ne: vec![64, 2] };
///
/// let path = std::env::temp_dir().join(format!("example-{}.gguf", std::process::id()));
/// let mut writer = Writer::create(&path, &header, &source, &[], &[plan])?;
/// writer.tensor([[0u8; 64 * 2 * 2]])?;
/// writer.finish()?;
///
/// let file = File::open(&path)?;
/// assert_eq!(file.data(&file.header().tensors[0]).len(), 256);
/// # std::fs::remove_file(&path).ok();
/// # Ok::<(), ggml_rust_npu::gguf::Error>(())
/// ```
#[derive(Debug)]
pub struct Writer {
    out: OutputFile,
    alignment: u64,
    tensors: Vec<(String, u64)>,
    written: usize,
}

impl Writer {
    /// Begins a file.
    ///
    /// - `source`, `source_bytes`: the file from which metadata and alignment are copied
    /// - `updates`: entries to replace, or to add after the others
    /// - `tensors`: the whole table, in the order in which they will be written
    ///
    /// # Errors
    /// `Io`; `Field` for a shape that its type cannot have, or an update that is an array.
    pub fn create(
        path: &Path,
        source: &Header,
        source_bytes: &[u8],
        updates: &[(&str, Value)],
        tensors: &[TensorPlan],
    ) -> Result<Self> {
        let mut head = Vec::new();
        head.extend(MAGIC);
        head.extend(source.version.to_le_bytes());
        head.extend((tensors.len() as u64).to_le_bytes());
        let is_new = |key: &str| source.get(key).is_none();
        let added = updates.iter().filter(|(key, _)| is_new(key)).count();
        head.extend(((source.entries.len() + added) as u64).to_le_bytes());
        for entry in &source.entries {
            match updates.iter().find(|(key, _)| *key == entry.key) {
                Some((key, value)) => push_entry(&mut head, key, value)?,
                None => head.extend(&source_bytes[entry.range.clone()]),
            }
        }
        for (key, value) in updates.iter().filter(|(key, _)| is_new(key)) {
            push_entry(&mut head, key, value)?;
        }
        let alignment = source.alignment as u64;
        let mut sizes = Vec::new();
        let mut offset = 0u64;
        for tensor in tensors {
            let bytes = tensor.bytes()?;
            push_text(&mut head, &tensor.name);
            // CAST: ggml has four dimensions.
            let dims = u32::try_from(tensor.ne.len()).unwrap_or(u32::MAX);
            head.extend(dims.to_le_bytes());
            for size in &tensor.ne {
                head.extend((*size as u64).to_le_bytes());
            }
            head.extend(tensor.dtype.number().to_le_bytes());
            head.extend(offset.to_le_bytes());
            offset += bytes.next_multiple_of(alignment);
            sizes.push((tensor.name.clone(), bytes));
        }
        head.resize(head.len().next_multiple_of(source.alignment), 0);

        let mut writer = Self {
            out: OutputFile::create(path).map_err(io)?,
            alignment,
            tensors: sizes,
            written: 0,
        };
        writer.put(&head)?;
        Ok(writer)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.put(bytes).map_err(io)
    }

    /// Writes the next tensor of the table, from pieces of its bytes.
    ///
    /// # Errors
    /// `Io`; `TensorBytes` if the pieces are not as many bytes as its type and shape have.
    pub fn tensor<Piece: AsRef<[u8]>>(
        &mut self,
        pieces: impl IntoIterator<Item = Piece>,
    ) -> Result<()> {
        let Some((name, want)) = self.tensors.get(self.written).cloned() else {
            return Err(self.wrong_count(self.written + 1));
        };
        let mut have = 0u64;
        for piece in pieces {
            have += piece.as_ref().len() as u64;
            self.put(piece.as_ref())?;
        }
        if have != want {
            return Err(Error::TensorBytes { name, have, want });
        }
        let padding = have.next_multiple_of(self.alignment) - have;
        for _ in 0..padding {
            self.put(&[0])?;
        }
        self.written += 1;
        Ok(())
    }

    fn wrong_count(&self, have: usize) -> Error {
        Error::TensorCount {
            have,
            want: self.tensors.len(),
        }
    }

    /// Moves the file to its place, and replaces an existing one.
    ///
    /// # Errors
    /// `Io`; `TensorCount` if tensors are missing.
    pub fn finish(self) -> Result<()> {
        if self.written != self.tensors.len() {
            return Err(self.wrong_count(self.written));
        }
        self.out.finish(None).map_err(io)
    }
}

fn io((path, source): (PathBuf, io::Error)) -> Error {
    Error::Io { path, source }
}

fn push_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// Integers are written with 32 bits if they fit, as ggml's own tools do and as its loader expects
/// for these keys.
fn push_entry(out: &mut Vec<u8>, key: &str, value: &Value) -> Result<()> {
    push_text(out, key);
    match value {
        Value::Unsigned(number) => match u32::try_from(*number) {
            Ok(number) => {
                out.extend(4u32.to_le_bytes());
                out.extend(number.to_le_bytes());
            }
            Err(_) => {
                out.extend(10u32.to_le_bytes());
                out.extend(number.to_le_bytes());
            }
        },
        Value::Signed(number) => {
            out.extend(11u32.to_le_bytes());
            out.extend(number.to_le_bytes());
        }
        Value::Float(number) => {
            out.extend(12u32.to_le_bytes());
            out.extend(number.to_le_bytes());
        }
        Value::Bool(truth) => {
            out.extend(7u32.to_le_bytes());
            out.push((*truth).into());
        }
        Value::String(text) => {
            out.extend(8u32.to_le_bytes());
            push_text(out, text);
        }
        Value::Array { .. } => {
            return Err(field(key, value.to_string(), "arrays are not written"));
        }
    }
    Ok(())
}
