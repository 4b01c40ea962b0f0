//! Reads the head and the table of a pack file, and never past the end.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read, Seek};

use super::write::{ENTRY_BYTES, hash_of_head};
use super::{
    ALIGN_BYTES, Entry, Error, Fingerprint, HASHED_HEAD_BYTES, HEAD_BYTES, LAYOUT_WORDS, LayoutTag,
    MAGIC, MAX_TEXT_BYTES, Result, VERSION, field,
};
use crate::gguf::{GgmlType, MAX_NAME_BYTES};

/// Largest table that is read, in bytes: of a hundred thousand tensors.
const MAX_TABLE_BYTES: u64 = 1 << 25;
/// Offset of the bytes of the table in the head.
const TABLE_BYTES_AT: usize = 24;

/// Head and table of a pack file, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct PackTable {
    /// The chip that it was made for.
    pub chip: String,
    /// Options with which it was made.
    pub options: String,
    /// The tensors, in the order of their offsets.
    pub entries: Vec<Entry>,
}

impl PackTable {
    /// Reads and checks head and table. Payloads are only known to be inside the file.
    ///
    /// - `bytes`: the whole file
    ///
    /// # Errors
    /// `Truncated`, `Field`, `Duplicate` or `Corrupted` for the first thing that is wrong.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        Self::parse_front(bytes, bytes.len() as u64)
    }

    /// Reads and checks head and table of an open file. Nothing else of it is read.
    ///
    /// # Errors
    /// As [`Self::parse`], or the system's.
    pub(super) fn read(file: &File) -> io::Result<Result<Self>> {
        let have = file.metadata()?.len();
        let front = |bytes: u64| {
            let mut front = Vec::new();
            let mut from_start = file;
            from_start.rewind()?;
            from_start.take(bytes).read_to_end(&mut front)?;
            io::Result::Ok(front)
        };
        let head = front(HEAD_BYTES as u64)?;
        let table_bytes = head.get(TABLE_BYTES_AT..).and_then(<[u8]>::first_chunk);
        let table_bytes = table_bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let bytes = HEAD_BYTES as u64 + table_bytes.min(MAX_TABLE_BYTES);
        Ok(Self::parse_front(&front(bytes)?, have))
    }

    /// Reads and checks head and table.
    ///
    /// - `bytes`: the begin of a file, to the end of the table at least if that is inside the file
    ///   and not too large
    /// - `have`: bytes of the file
    fn parse_front(bytes: &[u8], have: u64) -> Result<Self> {
        let mut head = TableCursor::new(bytes, have);
        let magic = head.array::<8>("magic")?;
        if magic != MAGIC {
            return Err(field("magic", format!("{magic:02x?}"), "not a pack file"));
        }
        let version = head.u32("version")?;
        if version != VERSION {
            let reason = format!("version {VERSION} is read; make the pack again from the model");
            return Err(field("version", version, reason));
        }
        let zero = head.u32("reserved number")?;
        if zero != 0 {
            return Err(field("reserved number", zero, "it must be 0"));
        }
        let tensors = head.u64("number of tensors")?;
        let table_bytes = head.u64("bytes of the table")?;
        let file_bytes = head.u64("bytes of the file")?;
        if file_bytes > have {
            return Err(Error::Truncated {
                field: "the file".into(),
                offset: 0,
                need: file_bytes,
                have,
            });
        }
        if file_bytes < have {
            let reason = format!("the file has {have}");
            return Err(field("bytes of the file", file_bytes, reason));
        }
        let want = head.u128("hash of the head")?;
        if table_bytes > MAX_TABLE_BYTES && table_bytes <= have {
            let reason = format!("at most {MAX_TABLE_BYTES} are allowed");
            return Err(field("bytes of the table", table_bytes, reason));
        }
        let table = head.take(table_bytes, "the table")?;
        if tensors > (table.len() / ENTRY_BYTES) as u64 {
            let reason = format!("a table of {table_bytes} bytes cannot hold as many");
            return Err(field("number of tensors", tensors, reason));
        }
        let have = hash_of_head(&bytes[..HASHED_HEAD_BYTES], table);
        if have != want {
            let field = "head and table".into();
            return Err(Error::Corrupted { field, want, have });
        }

        let mut cursor = TableCursor::new(table, file_bytes);
        let chip = cursor.text("chip", MAX_TEXT_BYTES)?;
        let options = cursor.text("options", MAX_TEXT_BYTES)?;
        let (mut entries, mut names) = (Vec::new(), HashSet::new());
        let mut end = (HEAD_BYTES + table.len()) as u64;
        for index in 0..tensors {
            let entry = cursor.entry(index, end)?;
            end = entry.offset + entry.payload_bytes();
            if !names.insert(entry.source.name.clone()) {
                let name = entry.source.name;
                return Err(Error::Duplicate { name });
            }
            entries.push(entry);
        }
        if cursor.at != table.len() {
            let reason = format!("its tensors end at {}", cursor.at);
            return Err(field("bytes of the table", table_bytes, reason));
        }
        Ok(Self {
            chip,
            options,
            entries,
        })
    }
}

/// A place in the head or the table.
struct TableCursor<'a> {
    bytes: &'a [u8],
    at: usize,
    file_bytes: u64,
}

impl<'a> TableCursor<'a> {
    fn new(bytes: &'a [u8], file_bytes: u64) -> Self {
        Self {
            bytes,
            at: 0,
            file_bytes,
        }
    }

    fn take(&mut self, bytes: u64, what: &str) -> Result<&'a [u8]> {
        let left = &self.bytes[self.at..];
        let taken = usize::try_from(bytes).ok().and_then(|n| left.get(..n));
        let taken = taken.ok_or_else(|| Error::Truncated {
            field: what.into(),
            offset: self.at as u64,
            need: bytes,
            have: (self.bytes.len() as u64).min(self.file_bytes),
        })?;
        self.at += taken.len();
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        let bytes = self.take(N as u64, what)?;
        Ok(std::array::from_fn(|index| bytes[index]))
    }

    fn u32(&mut self, what: &str) -> Result<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    fn u128(&mut self, what: &str) -> Result<u128> {
        self.array(what).map(u128::from_le_bytes)
    }

    fn text(&mut self, what: &str, most: usize) -> Result<String> {
        let len = self.u32(&format!("length of {what}"))?;
        if len as usize > most {
            let reason = format!("at most {most} bytes are allowed");
            return Err(field(format!("length of {what}"), len, reason));
        }
        let bytes = self.take(len.into(), what)?;
        let text = std::str::from_utf8(bytes);
        text.map(String::from).map_err(|error| {
            let reason = format!("not UTF-8: {error}");
            field(what, String::from_utf8_lossy(bytes), reason)
        })
    }

    /// Returns a tensor whose payload begins at `end` or later.
    fn entry(&mut self, index: u64, end: u64) -> Result<Entry> {
        let name = self.text(&format!("name of tensor {index}"), MAX_NAME_BYTES)?;
        let of = |what: &str| format!("{what} of tensor {name:?}");
        if name.is_empty() {
            let what = format!("name of tensor {index}");
            return Err(field(what, "empty", "it needs a name"));
        }
        let dtype = self.u32(&of("type"))?;
        if GgmlType::from_number(dtype).is_none() {
            return Err(field(of("type"), dtype, "no such type"));
        }
        let id = self.u32(&of("layout"))?;
        let mut ne = [0; 4];
        for (dim, size) in ne.iter_mut().enumerate() {
            *size = self.u64(&of(&format!("dimension {dim}")))?;
        }
        let elements = ne.iter().try_fold(1u64, |all, size| all.checked_mul(*size));
        if elements.is_none_or(|all| all == 0 || i64::try_from(all).is_err()) {
            let reason = "its size is 0, or does not fit into 63 bits";
            return Err(field(of("shape"), format!("{ne:?}"), reason));
        }
        let mut words = [0; LAYOUT_WORDS];
        for word in &mut words {
            *word = self.u64(&of("layout"))?;
        }
        let sampled = self.u128(&of("sampled hash"))?;
        let full = self.u128(&of("full hash"))?;
        let offset = self.u64(&of("offset"))?;
        let bytes = self.u64(&of("packed bytes"))?;
        let scales = self.u64(&of("number of scales"))?;
        let payload = self.u128(&of("payload hash"))?;
        let error = f64::from_le_bytes(self.array(&of("error"))?);
        if !offset.is_multiple_of(ALIGN_BYTES as u64) {
            let reason = format!("not a multiple of {ALIGN_BYTES}");
            return Err(field(of("offset"), offset, reason));
        }
        if offset < end {
            let reason = format!("what is in front of it ends at {end}");
            return Err(field(of("offset"), offset, reason));
        }
        let scale_bytes = scales.checked_mul(4);
        let payload_end = scale_bytes.and_then(|more| offset.checked_add(bytes)?.checked_add(more));
        if payload_end.is_none_or(|end| end > self.file_bytes) {
            let reason = format!(
                "with {bytes} bytes and {scales} scales it is not inside the file, which has {}",
                self.file_bytes
            );
            return Err(field(of("offset"), offset, reason));
        }
        if !(error >= 0.0 && error.is_finite()) {
            return Err(field(of("error"), error, "it must be a number from 0 on"));
        }
        let source = Fingerprint {
            name,
            dtype,
            ne,
            sampled,
            full,
        };
        Ok(Entry {
            source,
            layout: LayoutTag { id, words },
            offset,
            bytes,
            scales,
            payload,
            error,
        })
    }
}
