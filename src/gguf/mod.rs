//! GGUF files: a reader that maps them into memory, and a writer that replaces tensors and keeps
//! the rest.
//!
//! ```text
//! magic "GGUF" | version u32 | tensors u64 | entries u64        all numbers little-endian
//! metadata     | key: string, kind u32, value                   string: length u64, bytes
//! tensor table | name: string, dimensions u32, ne u64 each, type u32, offset u64
//! padding      | up to a multiple of general.alignment (32 if it is not set)
//! data         | each tensor at its offset from here, a multiple of the alignment
//! ```
//!
//! Every value of a file is checked before it is used. An error names the field, and its invalid
//! number.
// SOURCE: gguf.h and gguf.cpp of ggml 0.25.3.

use std::io;
use std::path::PathBuf;

use crate::files::quote;

pub use self::file::File;
pub use self::parse::{Header, MetadataEntry, TensorInfo};
pub use self::types::{GgmlType, Value};
pub use self::write::{TensorPlan, Writer};

mod cursor;
mod file;
mod parse;
mod types;
mod write;

/// The first bytes of a file.
pub const MAGIC: [u8; 4] = *b"GGUF";

/// Versions that are read. Version 1 has 32-bit lengths.
pub const VERSIONS: std::ops::RangeInclusive<u32> = 2..=3;

/// Default alignment of tensors.
pub const DEFAULT_ALIGNMENT: usize = 32;

/// Largest alignment that is read: pages of 64 KiB and huge pages of 2 MiB are smaller or as large.
/// A file that is written gets up to this many bytes of padding for each tensor.
pub const MAX_ALIGNMENT: usize = 2 << 20;

/// The entry that holds the alignment.
pub const ALIGNMENT_KEY: &str = "general.alignment";

/// Longest name of a tensor, in bytes: ggml keeps 64 with the final NUL.
pub const MAX_NAME_BYTES: usize = 63;

/// Reason why a file is refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system refused.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's message.
        source: io::Error,
    },
    /// The file ends too early.
    #[error(
        "the file is truncated: {field} needs {need} bytes at offset {offset}, the file has {have}"
    )]
    Truncated {
        /// The field that was being read.
        field: String,
        /// Offset of the field.
        offset: usize,
        /// Size of the field in bytes.
        need: u64,
        /// Bytes of the file.
        have: usize,
    },
    /// A field has a value that it cannot have.
    #[error("{field} is {value}: {reason}")]
    Field {
        /// The invalid field.
        field: String,
        /// The value of the field.
        value: String,
        /// Why that is wrong.
        reason: String,
    },
    /// A name is there twice.
    #[error("{what} {name:?} is there twice")]
    Duplicate {
        /// `metadata key` or `tensor`.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// A tensor was handed to the writer with another number of bytes than its type and shape have.
    #[error("tensor {name:?} was written with {have} bytes, its type and shape have {want}")]
    TensorBytes {
        /// The tensor.
        name: String,
        /// Bytes written.
        have: u64,
        /// Bytes expected.
        want: u64,
    },
    /// The writer got another number of tensors than it was promised.
    #[error("{have} tensors were written, the table has {want}")]
    TensorCount {
        /// Tensors written.
        have: usize,
        /// Tensors of the table.
        want: usize,
    },
}

/// Result of reading and writing files.
pub type Result<T> = std::result::Result<T, Error>;

fn field(field: impl Into<String>, value: impl ToString, reason: impl Into<String>) -> Error {
    Error::Field {
        field: quote(&field.into()),
        value: quote(&value.to_string()),
        reason: reason.into(),
    }
}
