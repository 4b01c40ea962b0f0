//! Writes a pack file: tensors one after another, each in pieces.

use std::io;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3Default;

use super::{
    ALIGN_BYTES, ChunkHash, Entry, Error, HASHED_HEAD_BYTES, HEAD_BYTES, MAGIC, MAX_TEXT_BYTES,
    Result, VERSION, field,
};
use crate::files::OutputFile;

/// A pack file that is being written: nothing has its name until [`PackWriter::finish`].
///
/// Tensors are streamed: the writer holds the table and a buffer of 1 MiB.
#[derive(Debug)]
pub struct PackWriter {
    out: OutputFile,
    chip: String,
    options: String,
    entries: Vec<Entry>,
    at: u64,
    /// Bytes that are reserved for head and table.
    reserved: u64,
    payload: ChunkHash,
    written: u64,
}

impl PackWriter {
    /// Begins a file.
    ///
    /// - `chip`, `options`: for whom it is, and how it was made, in words
    /// - `names`: those of all tensors, in the order in which they will be written
    ///
    /// # Errors
    /// `Io`; `Field` for a text that is too long.
    pub fn create<'a>(
        path: &Path,
        chip: &str,
        options: &str,
        names: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self> {
        for (what, text) in [("chip", chip), ("options", options)] {
            if text.len() > MAX_TEXT_BYTES {
                let reason = format!("at most {MAX_TEXT_BYTES} bytes are allowed");
                return Err(field(format!("length of {what}"), text.len(), reason));
            }
        }
        let texts = chip.len() + options.len() + 8;
        let tensors = names
            .into_iter()
            .map(|name| name.len() + ENTRY_BYTES)
            .sum::<usize>();
        let table = (HEAD_BYTES + texts + tensors) as u64;
        let mut writer = Self {
            out: OutputFile::create(path).map_err(io)?,
            chip: chip.into(),
            options: options.into(),
            entries: Vec::new(),
            at: 0,
            reserved: table,
            payload: ChunkHash::default(),
            written: 0,
        };
        writer.zeros(table)?;
        writer.align()?;
        Ok(writer)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.at += bytes.len() as u64;
        self.out.put(bytes).map_err(io)
    }

    fn zeros(&mut self, mut count: u64) -> Result<()> {
        const ZEROS: [u8; ALIGN_BYTES] = [0; ALIGN_BYTES];
        while count > 0 {
            let part = usize::try_from(count)
                .unwrap_or(usize::MAX)
                .min(ALIGN_BYTES);
            self.put(&ZEROS[..part])?;
            count -= part as u64;
        }
        Ok(())
    }

    fn align(&mut self) -> Result<()> {
        self.zeros(self.at.next_multiple_of(ALIGN_BYTES as u64) - self.at)
    }

    /// Writes some more packed bytes of the tensor that is next.
    ///
    /// # Errors
    /// `Io`.
    pub fn bytes(&mut self, bytes: &[u8]) -> Result<()> {
        self.payload.update(bytes);
        self.written += bytes.len() as u64;
        self.put(bytes)
    }

    /// Ends the next tensor: writes its scales, and adds it to the table.
    ///
    /// - `entry`: its offset and the payload's hash are filled in
    ///
    /// # Errors
    /// `Io`; `Field` if `entry` has another number of bytes or scales than were written.
    pub fn end(&mut self, mut entry: Entry, scales: &[f32]) -> Result<()> {
        let name = &entry.source.name;
        for (what, want, have) in [
            ("packed bytes", entry.bytes, self.written),
            ("scales", entry.scales, scales.len() as u64),
        ] {
            if want != have {
                let reason = format!("{have} were written");
                return Err(field(format!("number of {what} of {name:?}"), want, reason));
            }
        }
        if let Some(row) = scales.iter().position(|scale| !scale.is_finite()) {
            let reason = "its weights are no finite numbers, or too large";
            return Err(field(
                format!("scale {row} of {name:?}"),
                scales[row],
                reason,
            ));
        }
        if !entry.error.is_finite() {
            let reason = "some of its weights are no finite numbers, or too large";
            return Err(field(format!("error of {name:?}"), entry.error, reason));
        }
        entry.offset = self.at - self.written;
        let scales: Vec<u8> = scales.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.payload.end_chunk();
        self.payload.update(&scales);
        self.put(&scales)?;
        self.align()?;
        entry.payload = std::mem::take(&mut self.payload).digest();
        self.written = 0;
        self.entries.push(entry);
        Ok(())
    }

    /// Writes the table, and moves the file to its place, where it replaces an existing one.
    ///
    /// # Errors
    /// `Io`; `Field` if the table is not as large as the names that were promised.
    pub fn finish(self) -> Result<()> {
        let mut table = Vec::new();
        push_text(&mut table, &self.chip);
        push_text(&mut table, &self.options);
        self.entries
            .iter()
            .for_each(|entry| push_entry(&mut table, entry));
        let mut head = MAGIC.to_vec();
        head.extend(VERSION.to_le_bytes());
        head.extend([0; 4]);
        for number in [self.entries.len() as u64, table.len() as u64, self.at] {
            head.extend(number.to_le_bytes());
        }
        assert_eq!(head.len(), HASHED_HEAD_BYTES, "numbers of the head");
        head.extend(hash_of_head(&head, &table).to_le_bytes());
        head.extend(table);
        if head.len() as u64 != self.reserved {
            let reason = format!("{} were promised", self.reserved);
            return Err(field("bytes of the table", head.len(), reason));
        }
        self.out.finish(Some(&head)).map_err(io)
    }
}

/// Returns the hash of the bytes before it in the head, and of the table.
pub(super) fn hash_of_head(head: &[u8], table: &[u8]) -> u128 {
    let mut hash = Xxh3Default::new();
    hash.update(&head[..HASHED_HEAD_BYTES]);
    hash.update(table);
    hash.digest128()
}

fn io((path, source): (PathBuf, io::Error)) -> Error {
    Error::Io { path, source }
}

/// Bytes of a tensor in the table, without its name.
pub(super) const ENTRY_BYTES: usize =
    4 + 4 + 4 + 4 * 8 + super::LAYOUT_WORDS * 8 + 2 * 16 + 3 * 8 + 16 + 8;

fn push_text(out: &mut Vec<u8>, text: &str) {
    // CAST: names have at most 63 bytes, and the lengths of other texts were checked.
    let bytes = u32::try_from(text.len()).unwrap_or(u32::MAX);
    out.extend(bytes.to_le_bytes());
    out.extend(text.as_bytes());
}

fn push_entry(out: &mut Vec<u8>, entry: &Entry) {
    let source = &entry.source;
    push_text(out, &source.name);
    out.extend(source.dtype.to_le_bytes());
    out.extend(entry.layout.id.to_le_bytes());
    for number in source.ne.iter().chain(&entry.layout.words) {
        out.extend(number.to_le_bytes());
    }
    for hash in [source.sampled, source.full] {
        out.extend(hash.to_le_bytes());
    }
    for number in [entry.offset, entry.bytes, entry.scales] {
        out.extend(number.to_le_bytes());
    }
    out.extend(entry.payload.to_le_bytes());
    out.extend(entry.error.to_le_bytes());
}
