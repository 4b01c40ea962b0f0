//! A GGUF file mapped into memory.

use std::ops::Range;
use std::path::{Path, PathBuf};

use super::parse::{Header, TensorInfo};
use super::{Error, Result};
use crate::files::MappedFile;

/// A file that was checked: its header, and the bytes of its tensors.
#[derive(Debug)]
pub struct File {
    path: PathBuf,
    map: MappedFile,
    header: Header,
}

impl File {
    /// Maps and checks a file. Only the header is read.
    ///
    /// # Errors
    /// `Io`, or the mistake in the header.
    pub fn open(path: &Path) -> Result<Self> {
        let map = MappedFile::open(path).map_err(|source| Error::Io {
            path: path.into(),
            source,
        })?;
        Ok(Self {
            path: path.into(),
            header: Header::parse(map.bytes())?,
            map,
        })
    }

    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the metadata and tensor table.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Returns the whole file.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.map.bytes()
    }

    /// Returns the bytes of a tensor of this file.
    #[must_use]
    pub fn data(&self, tensor: &TensorInfo) -> &[u8] {
        // PANIC: the header's ranges were checked against the file's length.
        &self.map.bytes()[tensor.range.clone()]
    }

    /// Frees the memory of a part of a tensor's bytes; they can still be read.
    pub fn release(&self, tensor: &TensorInfo, part: Range<usize>) {
        let start = tensor.range.start;
        self.map.release(start + part.start..start + part.end);
    }
}
