//! The header of a GGUF file, checked.

use std::collections::HashMap;
use std::ops::Range;

use super::cursor::Cursor;
use super::types::{GgmlType, Value};
use super::{
    ALIGNMENT_KEY, DEFAULT_ALIGNMENT, Error, MAGIC, MAX_ALIGNMENT, MAX_NAME_BYTES, Result,
    VERSIONS, field,
};
use crate::files::quote;

/// Most dimensions of a tensor.
// SOURCE: GGML_MAX_DIMS, ggml.h.
const MAX_DIMS: u32 = 4;

/// One metadata entry.
#[derive(Clone, Debug)]
pub struct MetadataEntry {
    /// The key.
    pub key: String,
    /// The value.
    pub value: Value,
    /// Bytes of key, kind and value in the file.
    pub range: Range<usize>,
}

/// One tensor of the table.
#[derive(Clone, Debug)]
pub struct TensorInfo {
    /// The name.
    pub name: String,
    /// Element type.
    pub dtype: GgmlType,
    /// Elements in each dimension, innermost first; 1 where the file has no dimension.
    pub ne: [usize; 4],
    /// Dimensions that the file has.
    pub dims: usize,
    /// Bytes of the data, from the beginning of the file.
    pub range: Range<usize>,
}

impl TensorInfo {
    /// Returns the number of rows in all dimensions together.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.ne[1] * self.ne[2] * self.ne[3]
    }
}

/// Metadata and tensor table of a file.
///
/// ```
/// use ggml_rust_npu::gguf::{Header, MAGIC};
///
/// // Magic, version 3, no tensors, no entries.
/// let bytes = [&MAGIC[..], &3u32.to_le_bytes(), &[0; 16]].concat();
/// let header = Header::parse(&bytes)?;
/// assert_eq!((header.version, header.tensors.len()), (3, 0));
///
/// let error = Header::parse(&bytes[..8]).expect_err("it is cut off");
/// assert!(error.to_string().contains("truncated"));
/// # Ok::<(), ggml_rust_npu::gguf::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Header {
    /// Version of the format.
    pub version: u32,
    /// Alignment of tensors, in bytes.
    pub alignment: usize,
    /// Metadata, in the file's order.
    pub entries: Vec<MetadataEntry>,
    /// Tensors, in the file's order.
    pub tensors: Vec<TensorInfo>,
    keys: HashMap<String, usize>,
    names: HashMap<String, usize>,
}

impl Header {
    /// Reads and checks the header of a file.
    ///
    /// - `bytes`: the whole file
    ///
    /// # Errors
    /// `Truncated`, `Field` or `Duplicate` for the first thing that is wrong.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let mut cursor = Cursor::new(bytes);
        let magic = cursor.take(4, || "magic".into())?;
        if magic != MAGIC {
            return Err(field("magic", format!("{magic:02x?}"), "not a GGUF file"));
        }
        let version = cursor.u32(|| "version".into())?;
        if version.swap_bytes() <= *VERSIONS.end() && version != 0 {
            return Err(field("version", version, "the file is big-endian"));
        }
        if !VERSIONS.contains(&version) {
            let reason = format!(
                "versions {} to {} are read",
                VERSIONS.start(),
                VERSIONS.end()
            );
            return Err(field("version", version, reason));
        }
        let n_tensors = cursor.u64(|| "number of tensors".into())?;
        let n_entries = cursor.u64(|| "number of metadata entries".into())?;
        // The smallest metadata entry is an empty key, a type number and one byte. The smallest
        // tensor has an empty name and no dimensions.
        cursor.check_count("number of metadata entries", n_entries, 8 + 4 + 1)?;
        cursor.check_count("number of tensors", n_tensors, 8 + 4 + 4 + 8)?;

        let mut header = Self {
            version,
            alignment: DEFAULT_ALIGNMENT,
            entries: Vec::new(),
            tensors: Vec::new(),
            keys: HashMap::new(),
            names: HashMap::new(),
        };
        for index in 0..n_entries {
            let entry = cursor.entry(index)?;
            let position = header.entries.len();
            if header.keys.insert(entry.key.clone(), position).is_some() {
                return Err(Error::Duplicate {
                    what: "metadata key",
                    name: quote(&entry.key),
                });
            }
            header.entries.push(entry);
        }
        header.alignment = header.read_alignment()?;
        header.read_tensors(&mut cursor, n_tensors)?;
        Ok(header)
    }

    fn read_alignment(&self) -> Result<usize> {
        let Some(value) = self.get(ALIGNMENT_KEY) else {
            return Ok(DEFAULT_ALIGNMENT);
        };
        let fits = |bytes: &usize| bytes.is_power_of_two() && *bytes <= MAX_ALIGNMENT;
        value.as_usize().filter(fits).ok_or_else(|| {
            let reason = format!("it must be a power of two, at most {MAX_ALIGNMENT}");
            field(ALIGNMENT_KEY, value.to_string(), reason)
        })
    }

    fn read_tensors(&mut self, cursor: &mut Cursor, n_tensors: u64) -> Result<()> {
        let mut offsets = Vec::new();
        for index in 0..n_tensors {
            let (tensor, offset) = cursor.tensor(index)?;
            let position = self.tensors.len();
            if self.names.insert(tensor.name.clone(), position).is_some() {
                return Err(Error::Duplicate {
                    what: "tensor",
                    name: quote(&tensor.name),
                });
            }
            self.tensors.push(tensor);
            offsets.push(offset);
        }
        let file_bytes = cursor.file_bytes();
        let data = cursor.at().checked_next_multiple_of(self.alignment);
        for (tensor, offset) in self.tensors.iter_mut().zip(offsets) {
            let name = || format!("offset of tensor {:?}", tensor.name);
            if !offset.is_multiple_of(self.alignment as u64) {
                let reason = format!("not a multiple of the alignment, {}", self.alignment);
                return Err(field(name(), offset, reason));
            }
            let bytes = tensor.range.len();
            let start = usize::try_from(offset).ok();
            let start = data.and_then(|data| start?.checked_add(data));
            let range = start.and_then(|start| Some(start..start.checked_add(bytes)?));
            let range = range.filter(|range| range.end <= file_bytes || bytes == 0);
            tensor.range = range.ok_or_else(|| {
                let reason = format!(
                    "its {bytes} bytes are not inside the file, which has {file_bytes} and data from {} on",
                    data.unwrap_or(usize::MAX)
                );
                field(name(), offset, reason)
            })?;
            if bytes == 0 {
                tensor.range = 0..0;
            }
        }
        self.check_overlap()
    }

    fn check_overlap(&self) -> Result<()> {
        let mut sorted: Vec<_> = (self.tensors.iter())
            .filter(|tensor| !tensor.range.is_empty())
            .collect();
        sorted.sort_by_key(|tensor| tensor.range.start);
        for pair in sorted.windows(2) {
            if pair[1].range.start < pair[0].range.end {
                return Err(field(
                    format!("offset of tensor {:?}", pair[1].name),
                    pair[1].range.start,
                    format!("it overlaps tensor {:?}", quote(&pair[0].name)),
                ));
            }
        }
        Ok(())
    }

    /// Returns the value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        let index = self.keys.get(key)?;
        Some(&self.entries[*index].value)
    }

    /// Returns the tensor with a name.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        let index = self.names.get(name)?;
        Some(&self.tensors[*index])
    }
}

/// Returns the bytes of a value of a kind that has a fixed size.
fn scalar_bytes(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

const KIND_STRING: u32 = 8;
const KIND_ARRAY: u32 = 9;

impl Cursor<'_> {
    fn entry(&mut self, index: u64) -> Result<MetadataEntry> {
        let start = self.at();
        let key = self.name(|| format!("key of metadata entry {index}"))?;
        if key.is_empty() {
            return Err(field(
                format!("key of metadata entry {index}"),
                "empty",
                "it needs a name",
            ));
        }
        let kind = self.u32(|| format!("kind of {key}"))?;
        let value = self.value(&key, kind)?;
        Ok(MetadataEntry {
            key,
            value,
            range: start..self.at(),
        })
    }

    fn value(&mut self, key: &str, kind: u32) -> Result<Value> {
        let what = || format!("value of {key}");
        Ok(match kind {
            0 => Value::Unsigned(u8::from_le_bytes(self.array(what)?).into()),
            1 => Value::Signed(i8::from_le_bytes(self.array(what)?).into()),
            2 => Value::Unsigned(u16::from_le_bytes(self.array(what)?).into()),
            3 => Value::Signed(i16::from_le_bytes(self.array(what)?).into()),
            4 => Value::Unsigned(self.u32(what)?.into()),
            5 => Value::Signed(i32::from_le_bytes(self.array(what)?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array(what)?).into()),
            7 => Value::Bool(self.array::<1>(what)? != [0]),
            KIND_STRING => Value::String(String::from_utf8_lossy(self.text(what)?).into_owned()),
            KIND_ARRAY => self.array_value(key)?,
            10 => Value::Unsigned(self.u64(what)?),
            11 => Value::Signed(i64::from_le_bytes(self.array(what)?)),
            12 => Value::Float(f64::from_le_bytes(self.array(what)?)),
            _ => return Err(field(format!("kind of {key}"), kind, "no such kind")),
        })
    }

    fn array_value(&mut self, key: &str) -> Result<Value> {
        let what = || format!("array {key}");
        let kind = self.u32(|| format!("kind of the elements of {key}"))?;
        let len = self.u64(|| format!("number of elements of {key}"))?;
        if let Some(bytes) = scalar_bytes(kind) {
            let total = len.checked_mul(bytes).ok_or_else(|| {
                field(
                    format!("number of elements of {key}"),
                    len,
                    "too many for 64 bits",
                )
            })?;
            self.take(total, what)?;
        } else if kind == KIND_STRING {
            self.check_count(&format!("number of elements of {key}"), len, 8)?;
            for index in 0..len {
                self.text(|| format!("element {index} of {key}"))?;
            }
        } else {
            return Err(field(
                format!("kind of the elements of {key}"),
                kind,
                "no such kind of element",
            ));
        }
        Ok(Value::Array { kind, len })
    }

    /// Returns a tensor with a range that has only its length, and its offset in the data.
    fn tensor(&mut self, index: u64) -> Result<(TensorInfo, u64)> {
        let name = self.name(|| format!("name of tensor {index}"))?;
        if name.is_empty() {
            return Err(field(
                format!("name of tensor {index}"),
                "empty",
                "it needs a name",
            ));
        }
        if name.len() > MAX_NAME_BYTES {
            let reason = format!("{} bytes, at most {MAX_NAME_BYTES} are allowed", name.len());
            return Err(field(format!("name of tensor {index}"), name, reason));
        }
        let dims = self.u32(|| format!("number of dimensions of tensor {name:?}"))?;
        if dims > MAX_DIMS {
            return Err(field(
                format!("number of dimensions of tensor {name:?}"),
                dims,
                format!("at most {MAX_DIMS} are allowed"),
            ));
        }
        let mut ne = [1usize; 4];
        for (dim, size) in ne.iter_mut().take(dims as usize).enumerate() {
            let what = || format!("dimension {dim} of tensor {name:?}");
            let value = self.u64(what)?;
            let small = i64::try_from(value).ok().and(usize::try_from(value).ok());
            *size = small.ok_or_else(|| field(what(), value, "too large"))?;
        }
        let number = self.u32(|| format!("type of tensor {name:?}"))?;
        let dtype = GgmlType::from_number(number)
            .ok_or_else(|| field(format!("type of tensor {name:?}"), number, "no such type"))?;
        let offset = self.u64(|| format!("offset of tensor {name:?}"))?;
        let row = dtype.row_bytes(ne[0]).ok_or_else(|| {
            let blocks = dtype.block_elems();
            let reason = format!("{} has blocks of {blocks}", dtype.name());
            field(format!("dimension 0 of tensor {name:?}"), ne[0], reason)
        })?;
        // The product of the dimensions must not overflow either. Checking from each start catches
        // an overflow that a dimension of 0 would hide.
        let fits = |start: usize| {
            ne[1..]
                .iter()
                .try_fold(start, |total, size| total.checked_mul(*size))
        };
        let bytes = fits(row).filter(|bytes| *bytes <= isize::MAX as usize);
        let bytes = bytes.filter(|_| fits(ne[0].max(1)).is_some());
        let bytes = bytes.ok_or_else(|| {
            let reason = "its size does not fit into 63 bits";
            field(
                format!("shape of tensor {name:?}"),
                format!("{ne:?}"),
                reason,
            )
        })?;
        let tensor = TensorInfo {
            name,
            dtype,
            ne,
            dims: dims as usize,
            range: 0..bytes,
        };
        Ok((tensor, offset))
    }
}
