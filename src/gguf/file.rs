//! A GGUF file mapped into memory.
#![expect(unsafe_code, reason = "maps a file")]

use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::parse::{Header, TensorInfo};
use super::{Error, Result};

/// A file that was checked: its header, and the bytes of its tensors.
#[derive(Debug)]
pub struct File {
    path: PathBuf,
    map: Mmap,
    header: Header,
}

impl File {
    /// Maps and checks a file. Nothing is read but the header.
    ///
    /// # Errors
    /// `Io`, or what is wrong with the header.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |source| Error::Io {
            path: path.into(),
            source,
        };
        let file = std::fs::File::open(path).map_err(io)?;
        if file.metadata().map_err(io)?.len() == 0 {
            return Header::parse(&[]).map(|_| unreachable!("an empty file has no header"));
        }
        // SAFETY: the map is only ever read. A process that changes the file meanwhile changes values, which any bytes
        // are valid for; one that shortens it ends this process with SIGBUS, as with any program that maps files.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(Self {
            path: path.into(),
            header: Header::parse(&map)?,
            map,
        })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Metadata and tensor table.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The whole file.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// The bytes of a tensor of this file.
    #[must_use]
    pub fn data(&self, tensor: &TensorInfo) -> &[u8] {
        // PANIC: the header's ranges were checked against the file's length.
        &self.map[tensor.range.clone()]
    }
}
