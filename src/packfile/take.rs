//! Takes weights from packs, if they are the ones that are wanted.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use super::{ChunkHash, Entry, Error, Fingerprint, LayoutTag, Result, SourceHash, Table, sampled};
use crate::files::MappedFile;
use crate::gguf::GgmlType;
use crate::tensor::{DType, Format};

/// A pack file, mapped and checked.
#[derive(Debug)]
pub struct Pack {
    path: PathBuf,
    map: MappedFile,
    table: Table,
    index: HashMap<String, usize>,
    /// It has some weights in groups, and is not meant to have all.
    has_groups: bool,
    /// A log line said that something was taken, and that something was not.
    told_taken: AtomicBool,
    told_missed: AtomicBool,
}

impl Pack {
    /// Maps a file and checks its head and table. Payloads are not read.
    ///
    /// # Errors
    /// `Io`, or what is wrong with the file.
    pub fn open(path: &Path) -> Result<Self> {
        let map = MappedFile::open(path).map_err(|source| Error::Io {
            path: path.into(),
            source,
        })?;
        let table = Table::parse(map.bytes())?;
        let names = table.entries.iter().enumerate();
        let index = names
            .map(|(at, entry)| (entry.source.name.clone(), at))
            .collect();
        let has_groups = table.entries.iter().any(|entry| entry.layout.is_groups());
        Ok(Self {
            path: path.into(),
            map,
            table,
            index,
            has_groups,
            told_taken: AtomicBool::new(false),
            told_missed: AtomicBool::new(false),
        })
    }

    /// What it says of itself and of its tensors.
    #[must_use]
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// The tensor of a name.
    #[must_use]
    pub fn entry(&self, name: &str) -> Option<&Entry> {
        self.index.get(name).map(|at| &self.table.entries[*at])
    }

    /// Packed bytes of a tensor of this pack, and the bytes of its scales. They may be corrupted: see [`Pack::copy`].
    #[must_use]
    pub fn payload(&self, entry: &Entry) -> (&[u8], &[u8]) {
        // PANIC: the table was checked against the length of the file, which is in memory.
        let size = |bytes: u64| usize::try_from(bytes).expect("bytes of a file in memory");
        let range = |from: u64, bytes: u64| &self.map.bytes()[size(from)..][..size(bytes)];
        let bytes = range(entry.offset, entry.bytes);
        (bytes, range(entry.offset + entry.bytes, entry.scales * 4))
    }

    /// Copies a tensor's packed bytes and scales.
    ///
    /// # Errors
    /// `Corrupted` if what was copied is not what was written; then neither may be used.
    ///
    /// # Panics
    /// If a length is not that of the entry.
    pub fn copy(&self, entry: &Entry, out: &mut [u8], scales: &mut [f32]) -> Result<()> {
        let (bytes, scale_bytes) = self.payload(entry);
        let mut hash = ChunkHash::default();
        hash.copy_part(bytes, out);
        hash.copy_part(scale_bytes, bytemuck::cast_slice_mut(scales));
        compare(entry, hash)
    }

    /// Reads a tensor's packed bytes and scales.
    ///
    /// # Errors
    /// `Corrupted` if they are not what was written.
    pub fn check(&self, entry: &Entry) -> Result<()> {
        let (bytes, scale_bytes) = self.payload(entry);
        let mut hash = ChunkHash::default();
        hash.update(bytes);
        hash.end_chunk();
        hash.update(scale_bytes);
        compare(entry, hash)
    }
}

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
    /// Its name.
    pub name: &'a str,
    /// Its type.
    pub dtype: DType,
    /// Which quantized type, if devices know it.
    pub format: Option<Format>,
    /// Elements in each dimension.
    pub ne: [usize; 4],
    /// All of its bytes.
    pub source: &'a [u8],
    /// How it shall be packed.
    pub layout: LayoutTag,
}

/// Why a weight was not taken from a pack; the later ones say more.
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
    /// What of the weight is another; `full`: compares the hash of all of its bytes.
    ///
    /// # Errors
    /// The word for it.
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
    /// Opens a pack, or all packs of a folder (files named `*.npu`).
    ///
    /// - `full`: weights are compared by a hash of all of their bytes, not of samples
    /// - returns what is wrong with those that are left out
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

    /// Files that are open.
    #[must_use]
    pub fn len(&self) -> usize {
        self.packs.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.packs.is_empty()
    }

    /// Whether a pack has a tensor of this name in this layout; of which model is not looked at.
    #[must_use]
    pub fn has(&self, name: &str, layout: &LayoutTag) -> bool {
        let entries = self.packs.iter().filter_map(|pack| pack.entry(name));
        entries.into_iter().any(|entry| entry.layout == *layout)
    }

    /// Copies a weight from the first pack that has it as it is wanted; whether there was one. If not, `out` and `scales`
    /// hold anything, and a line at level warn says why for the first weight of each pack that is not taken.
    ///
    /// - `out`, `scales`: as many as the layout has
    pub fn take(&self, wanted: &Wanted, out: &mut [u8], scales: &mut [f32]) -> bool {
        let mut missed: Option<(&Pack, Miss)> = None;
        for pack in &self.packs {
            match self.take_from(pack, wanted, out, scales) {
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
        out: &mut [u8],
        scales: &mut [f32],
    ) -> std::result::Result<(), Miss> {
        let entry = pack.entry(wanted.name).ok_or(Miss::Absent)?;
        if entry.layout != wanted.layout {
            return Err(Miss::Layout(entry.layout));
        }
        // The same layout has the same size, if the file is what it seems to be.
        if (entry.bytes, entry.scales) != (out.len() as u64, scales.len() as u64) {
            return Err(Miss::Layout(entry.layout));
        }
        (entry.source.compare(wanted, self.full)).map_err(Miss::Source)?;
        pack.copy(entry, out, scales).map_err(Miss::Broken)
    }
}

fn is_pack(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "npu")
}
