//! Pack files (`.npu`): the weights of one model in the form of a chip's device memory, made before
//! the model is loaded.
//!
//! ```text
//! head         magic 89 "NPUPACK" | version u32 | 0 u32 | tensors u64 | table bytes u64 | file bytes u64 | hash u128
//! table        chip: string | options: string | tensors, one after another:
//!   tensor     name: string | ggml type u32 | layout id u32 | ne u64 × 4 | layout words u64 × 10
//!              sampled hash u128 | full hash u128                                         of the source's bytes
//!              offset u64 | payload bytes u64 | scales u64 | payload hash u128 | error f64
//! zeros        up to a multiple of 4096
//! payloads     each at its offset, a multiple of 4096: packed bytes, then the scales, f32 each; zeros after them
//! ```
//!
//! All numbers are little-endian; a string is its length in bytes (u32) and UTF-8. Tensors are in
//! the order of their offsets, and only zeros are between them. Hashes are XXH3 with 128 bits: they
//! find accidents, not attacks. The head's hash covers the bytes before it and the table. A
//! payload's is [`ChunkHash`], of bytes and scales.
//!
//! **Version.** Another version is refused: packs are made again from the model in seconds. The
//! bytes of each layout have a separate version in the layout id.
//!
//! **Groups.** `ggml-npu quantize --tile-group` writes a pack whose tensors are in Hexagon's groups
//! of 2 × 16 weights (layout ids of `Q4Tile` and `Q8Tile`; the picture is in
//! `hexagon_ops::layout`). Their numbers are not the source's in another order: the source is the
//! Q4_0 or Q8_0 tensor that other devices compute with, and both were quantized from the same
//! model. A device uses such a tensor instead of tiles in the device's layout, and keeps the
//! source's bytes for readers of the tensor. The pack has no other weights.
//!
//! **Identity of a tensor.** A tensor is loaded from a pack only if its [`Fingerprint`] (name,
//! shape, type and sampled hash of its bytes) and the [`LayoutTag`] that the device wants match the
//! pack, and if the copied bytes have the payload's hash. Every value of a file is checked before
//! it is used; an error names the field.

use std::io;
use std::path::PathBuf;

use crate::files::quote;

pub use self::hash::{CHUNK_BYTES, ChunkHash, SourceHash, sampled};
pub use self::read::PackTable;
pub use self::take::{Pack, Packs, Wanted};
pub use self::write::PackWriter;

mod hash;
mod layout;
mod read;
mod take;
mod write;

/// The first bytes of a file. The first byte shows that the file is not text.
pub const MAGIC: [u8; 8] = *b"\x89NPUPACK";

/// The version that is read and written.
pub const VERSION: u32 = 1;

/// Alignment of payloads, in bytes: a page, so that each can be mapped and read on its own.
pub const ALIGN_BYTES: usize = 4096;

/// Bytes of the head.
const HEAD_BYTES: usize = 56;

/// Bytes of the head that its hash covers.
const HASHED_HEAD_BYTES: usize = 40;

/// Longest string, in bytes: names of tensors have 63 at most, options are rules on names.
const MAX_TEXT_BYTES: usize = 1 << 16;

/// Number of words that describe how a weight is divided.
pub const LAYOUT_WORDS: usize = 10;

/// Identifier of packed bytes: with equal tags, each byte has the same place and meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayoutTag {
    /// Family, type and version of the layout.
    pub id: u32,
    /// Division of the weight, from the family's layout.
    pub words: [u64; LAYOUT_WORDS],
}

/// Identifier of a tensor of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    /// The name.
    pub name: String,
    /// ggml's number of the type.
    pub dtype: u32,
    /// Elements in each dimension, innermost first.
    pub ne: [u64; 4],
    /// [`sampled`] hash of the source's bytes.
    pub sampled: u128,
    /// Hash of all of the source's bytes.
    pub full: u128,
}

/// One tensor of the table.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The source.
    pub source: Fingerprint,
    /// Layout of the bytes.
    pub layout: LayoutTag,
    /// Offset of the packed bytes in the file.
    pub offset: u64,
    /// Packed bytes.
    pub bytes: u64,
    /// Number of scales after them, `f32` each.
    pub scales: u64,
    /// Hash of both.
    pub payload: u128,
    /// Square error of the packed weights over the square of the weights: the loss of packing; 0 if
    /// it is lossless.
    pub error: f64,
}

impl Entry {
    /// Returns the packed bytes and scales, in bytes.
    #[must_use]
    pub fn payload_bytes(&self) -> u64 {
        self.bytes + self.scales * 4
    }
}

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
        "the pack is truncated: {field} needs {need} bytes at offset {offset}, the file has {have}"
    )]
    Truncated {
        /// The field that was being read.
        field: String,
        /// Offset of the field.
        offset: u64,
        /// Size of the field in bytes.
        need: u64,
        /// Bytes of the file.
        have: u64,
    },
    /// A field has a value that it cannot have.
    #[error("{field} of the pack is {value}: {reason}")]
    Field {
        /// The invalid field.
        field: String,
        /// The value of the field.
        value: String,
        /// Why that is wrong.
        reason: String,
    },
    /// A tensor is there twice.
    #[error("tensor {name:?} is in the pack twice")]
    Duplicate {
        /// The tensor's name.
        name: String,
    },
    /// A hash is not that of the bytes.
    #[error("the pack is corrupted: hash of {field} is {want:032x}, its bytes have {have:032x}")]
    Corrupted {
        /// Name of the part that was hashed.
        field: String,
        /// The hash of the file.
        want: u128,
        /// The hash of the bytes.
        have: u128,
    },
}

/// Result of reading and writing packs.
pub type Result<T> = std::result::Result<T, Error>;

fn field(field: impl Into<String>, value: impl ToString, reason: impl Into<String>) -> Error {
    Error::Field {
        field: quote(&field.into()),
        value: quote(&value.to_string()),
        reason: reason.into(),
    }
}
