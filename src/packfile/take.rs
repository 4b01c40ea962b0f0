//! Loads weights from packs that have exactly the wanted ones.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use os::files::read_exact_at;

use super::{
    CHUNK_BYTES, ChunkHash, Entry, Error, Fingerprint, LayoutTag, PackTable, Result, SourceHash,
    sampled,
};
use crate::files::open_input;
use crate::gguf::GgmlType;
use crate::tensor::{DType, Format};

/// A pack file, open and checked. Payloads are read, not mapped: a file that is shortened or
/// overwritten at the same time gives an error or another hash, where a map would end the process.
#[derive(Debug)]
pub struct Pack {
    path: PathBuf,
    file: File,
    table: PackTable,
    index: HashMap<String, usize>,
    /// The pack has some weights in groups, and need not have all weights.
    has_groups: bool,
    /// Two flags: it was logged that a weight came from the pack, and that one did not.
    told_taken: AtomicBool,
    told_missed: AtomicBool,
}

impl Pack {
    /// Opens a file and checks its head and table. Payloads are not read.
    ///
    /// # Errors
    /// `Io`, also if it is not a regular file; or the mistake in the file.
    pub fn open(path: &Path) -> Result<Self> {
        let failed = |source| Error::Io {
            path: path.into(),
            source,
        };
        let file = open_input(path).map_err(failed)?;
        let table = PackTable::read(&file).map_err(failed)??;
        let names = table.entries.iter().enumerate();
        let index = names
            .map(|(at, entry)| (entry.source.name.clone(), at))
            .collect();
        let has_groups = table.entries.iter().any(|entry| entry.layout.is_groups());
        Ok(Self {
            path: path.into(),
            file,
            table,
            index,
            has_groups,
            told_taken: AtomicBool::new(false),
            told_missed: AtomicBool::new(false),
        })
    }

    /// Returns the pack's head and table.
    #[must_use]
    pub fn table(&self) -> &PackTable {
        &self.table
    }

    /// Returns the tensor with a name.
    #[must_use]
    pub fn entry(&self, name: &str) -> Option<&Entry> {
        self.index.get(name).map(|at| &self.table.entries[*at])
    }

    /// Reads the packed bytes of a tensor of this pack, and the bytes of its scales.
    ///
    /// # Errors
    /// As [`Pack::copy`].
    pub fn payload(&self, entry: &Entry) -> Result<(Vec<u8>, Vec<u8>)> {
        let zeros = |bytes: u64| usize::try_from(bytes).map(|bytes| vec![0; bytes]);
        let (Ok(mut bytes), Ok(mut scales)) = (zeros(entry.bytes), zeros(entry.scales * 4)) else {
            let source = io::ErrorKind::OutOfMemory.into();
            let path = self.path.clone();
            return Err(Error::Io { path, source });
        };
        self.read(entry, &mut bytes, &mut scales)?;
        Ok((bytes, scales))
    }

    /// Copies a tensor's packed bytes and scales.
    ///
    /// # Errors
    /// `Corrupted` if the copied bytes are not the written ones, `Truncated` if the file has become
    /// shorter, `Io`; then neither may be used.
    ///
    /// # Panics
    /// If a length is not that of the entry.
    pub fn copy(&self, entry: &Entry, out: &mut [u8], scales: &mut [f32]) -> Result<()> {
        self.read(entry, out, bytemuck::cast_slice_mut(scales))
    }

    fn read(&self, entry: &Entry, out: &mut [u8], scales: &mut [u8]) -> Result<()> {
        let lengths = (out.len() as u64, scales.len() as u64);
        assert_eq!(
            lengths,
            (entry.bytes, entry.scales * 4),
            "bytes of a payload"
        );
        let mut hash = ChunkHash::default();
        for (start, part) in [(entry.offset, out), (entry.offset + entry.bytes, scales)] {
            let read =
                |at: usize, chunk: &mut [u8]| read_exact_at(&self.file, chunk, start + at as u64);
            (hash.read_part(part, read)).map_err(|error| self.failed(entry, error))?;
        }
        compare(entry, hash)
    }

    /// Hands a tensor's packed bytes over in pieces.
    fn copy_pieces(&self, entry: &Entry, put: &mut impl FnMut(usize, &[u8])) -> Result<()> {
        let mut hash = ChunkHash::default();
        let mut piece = Vec::new();
        let mut done = 0;
        while (done as u64) < entry.bytes {
            // Whole chunks, because each chunk has a hash.
            let left = usize::try_from(entry.bytes - done as u64).unwrap_or(usize::MAX);
            piece.resize(left.min(PIECE_CHUNKS * CHUNK_BYTES), 0);
            let start = entry.offset + done as u64;
            let read =
                |at: usize, chunk: &mut [u8]| read_exact_at(&self.file, chunk, start + at as u64);
            (hash.read_part(&mut piece, read)).map_err(|error| self.failed(entry, error))?;
            put(done, &piece);
            done += piece.len();
        }
        compare(entry, hash)
    }

    /// Reads a tensor's packed bytes and scales.
    ///
    /// # Errors
    /// As [`Pack::copy`].
    pub fn check(&self, entry: &Entry) -> Result<()> {
        let mut hash = ChunkHash::default();
        let mut chunk = vec![0; CHUNK_BYTES];
        let end = entry.offset + entry.bytes;
        for (mut start, end) in [(entry.offset, end), (end, end + entry.scales * 4)] {
            while start < end {
                let count =
                    usize::try_from(end - start).map_or(CHUNK_BYTES, |left| left.min(CHUNK_BYTES));
                let read = read_exact_at(&self.file, &mut chunk[..count], start);
                read.map_err(|error| self.failed(entry, error))?;
                hash.update(&chunk[..count]);
                start += count as u64;
            }
            hash.end_chunk();
        }
        compare(entry, hash)
    }

    /// Returns the error of reading a tensor's payload.
    fn failed(&self, entry: &Entry, source: io::Error) -> Error {
        if source.kind() == io::ErrorKind::UnexpectedEof {
            return Error::Truncated {
                field: format!("payload of tensor {:?}", entry.source.name),
                offset: entry.offset,
                need: entry.payload_bytes(),
                have: self.file.metadata().map_or(0, |file| file.len()),
            };
        }
        let path = self.path.clone();
        Error::Io { path, source }
    }
}

/// Chunks that are read at a time where a weight is handed over in pieces.
const PIECE_CHUNKS: usize = 16;

fn compare(entry: &Entry, hash: ChunkHash) -> Result<()> {
    let (want, have) = (entry.payload, hash.digest());
    if have != want {
        let field = format!("payload of tensor {:?}", entry.source.name);
        return Err(Error::Corrupted { field, want, have });
    }
    Ok(())
}

/// A weight that a device wants packed.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// The weight's name.
    pub name: &'a str,
    /// The weight's type.
    pub dtype: DType,
    /// The quantized type, if devices have a layout for it.
    pub format: Option<Format>,
    /// Elements in each dimension.
    pub ne: [usize; 4],
    /// All of its bytes.
    pub source: &'a [u8],
    /// The layout to pack it in.
    pub layout: LayoutTag,
}

/// The reason why a weight was not loaded from a pack; later variants are more specific.
#[derive(Debug)]
enum Miss {
    Absent,
    /// The fingerprint is another one.
    Source(&'static str),
    Layout(LayoutTag),
    Broken(Error),
}

impl Miss {
    fn rank(&self) -> u8 {
        match self {
            Self::Absent => 0,
            Self::Source(_) => 1,
            Self::Layout(_) => 2,
            Self::Broken(_) => 3,
        }
    }
}

impl fmt::Display for Miss {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Absent => write!(f, "it is not in there"),
            Self::Source(what) => write!(
                f,
                "its {what} is another one, the pack was made from another model"
            ),
            Self::Layout(have) => write!(f, "the pack has it as {have}"),
            Self::Broken(error) => write!(f, "{error}"),
        }
    }
}

impl Fingerprint {
    /// Compares the weight with the entry; `full`: by the hash of all of its bytes.
    ///
    /// # Errors
    /// The word for the first difference.
    pub fn compare(&self, wanted: &Wanted, full: bool) -> std::result::Result<(), &'static str> {
        let dtype = GgmlType::from_number(self.dtype).map(GgmlType::tensor_type);
        if dtype != Some((wanted.dtype, wanted.format)) {
            return Err("type");
        }
        if self.ne != wanted.ne.map(|size| size as u64) {
            return Err("shape");
        }
        if self.sampled != sampled(wanted.source) {
            return Err("sampled hash");
        }
        if full && self.full != SourceHash::of(wanted.source) {
            return Err("hash");
        }
        Ok(())
    }
}

/// The packs that the user named.
#[derive(Debug, Default)]
pub struct Packs {
    packs: Vec<Pack>,
    full: bool,
}

impl Packs {
    /// Opens a pack, or all packs of a folder (files named `*.npu`). Returns the errors of those
    /// that are left out.
    ///
    /// - `full`: weights are compared by a hash of all of their bytes, not of samples
    #[must_use]
    pub fn open(path: &Path, full: bool) -> (Self, Vec<(PathBuf, Error)>) {
        let mut failed = Vec::new();
        let mut paths = vec![path.to_path_buf()];
        if path.is_dir() {
            let found = std::fs::read_dir(path).map(|entries| {
                let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
                let mut packs: Vec<_> = paths.filter(|path| is_pack(path)).collect();
                packs.sort();
                packs
            });
            paths = found.unwrap_or_else(|source| {
                let path = path.to_path_buf();
                failed.push((path.clone(), Error::Io { path, source }));
                Vec::new()
            });
        }
        let mut packs = Vec::new();
        for path in paths {
            match Pack::open(&path) {
                Ok(pack) => packs.push(pack),
                Err(error) => failed.push((path, error)),
            }
        }
        (Self { packs, full }, failed)
    }

    /// Returns the files that are open.
    #[must_use]
    pub fn len(&self) -> usize {
        self.packs.len()
    }

    /// Returns `true` if there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.packs.is_empty()
    }

    /// Returns `true` if a pack has a tensor of this name in this layout, of any model.
    #[must_use]
    pub fn has(&self, name: &str, layout: &LayoutTag) -> bool {
        let entries = self.packs.iter().filter_map(|pack| pack.entry(name));
        entries.into_iter().any(|entry| entry.layout == *layout)
    }

    /// Copies a weight from the first pack that has it in the wanted form. Returns `true` if there
    /// was one. If not, the content of `out` and `scales` is undefined, and a warning gives the
    /// reason for the first weight that each pack lacks.
    ///
    /// - `out`, `scales`: as many as the layout has
    pub fn take(&self, wanted: &Wanted, out: &mut [u8], scales: &mut [f32]) -> bool {
        let sizes = (out.len(), scales.len());
        self.take_with(wanted, sizes, |pack, entry| pack.copy(entry, out, scales))
    }

    /// As [`Self::take`], for a weight without scales: hands its packed bytes over in pieces, in
    /// order. If it returns `false`, some may have been handed over, and they are not to be used.
    ///
    /// - `bytes`: that the layout has
    /// - `put(at, piece)`: stores the bytes that begin at `at`
    pub fn take_pieces(
        &self,
        wanted: &Wanted,
        bytes: usize,
        mut put: impl FnMut(usize, &[u8]),
    ) -> bool {
        self.take_with(wanted, (bytes, 0), |pack, entry| {
            pack.copy_pieces(entry, &mut put)
        })
    }

    fn take_with(
        &self,
        wanted: &Wanted,
        sizes: (usize, usize),
        mut copy: impl FnMut(&Pack, &Entry) -> Result<()>,
    ) -> bool {
        let mut missed: Option<(&Pack, Miss)> = None;
        for pack in &self.packs {
            match self.take_from(pack, wanted, sizes, &mut copy) {
                Ok(()) => {
                    let path = pack.path.display();
                    if !pack.told_taken.swap(true, Ordering::Relaxed) {
                        log::info!("weights are loaded packed from {path}");
                    }
                    log::debug!("{} comes packed from {path}", wanted.name);
                    return true;
                }
                Err(miss) => {
                    let before = missed.as_ref().map(|(_, miss)| miss.rank());
                    if before.is_none_or(|rank| rank < miss.rank()) {
                        missed = Some((pack, miss));
                    }
                }
            }
        }
        if let Some((pack, miss)) = missed {
            let expected = pack.has_groups && matches!(miss, Miss::Absent);
            let first = !expected && !pack.told_missed.swap(true, Ordering::Relaxed);
            let level = if first {
                log::Level::Warn
            } else {
                log::Level::Debug
            };
            log::log!(
                level,
                "{}: {} is not taken from this pack, but packed now: {miss}; the device wants {}",
                pack.path.display(),
                wanted.name,
                wanted.layout
            );
        }
        false
    }

    fn take_from(
        &self,
        pack: &Pack,
        wanted: &Wanted,
        (bytes, scales): (usize, usize),
        copy: impl FnOnce(&Pack, &Entry) -> Result<()>,
    ) -> std::result::Result<(), Miss> {
        let entry = pack.entry(wanted.name).ok_or(Miss::Absent)?;
        if entry.layout != wanted.layout {
            return Err(Miss::Layout(entry.layout));
        }
        // Equal layouts have equal sizes, unless the file is damaged.
        if (entry.bytes, entry.scales) != (bytes as u64, scales as u64) {
            return Err(Miss::Layout(entry.layout));
        }
        (entry.source.compare(wanted, self.full)).map_err(Miss::Source)?;
        copy(pack, entry).map_err(Miss::Broken)
    }
}

fn is_pack(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "npu")
}
