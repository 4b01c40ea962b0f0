//! Files: opened only if they are regular ones, read or mapped into memory, and written so that they are at their place
//! when they are whole, not before.
#![expect(unsafe_code, reason = "maps files")]

use std::fs;
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use memmap2::{Mmap, UncheckedAdvice};

/// Opens a file that is read.
///
/// # Errors
/// The system's; `InvalidInput` if it is not a regular file: opening or reading a FIFO or a device may never return.
pub fn open_input(path: &Path) -> io::Result<fs::File> {
    let mut options = fs::OpenOptions::new();
    // Without O_NONBLOCK, opening a FIFO waits for its writer. It changes nothing for regular files.
    let file = (options.read(true).custom_flags(libc::O_NONBLOCK)).open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    let kind = io::ErrorKind::InvalidInput;
    Err(io::Error::new(kind, "not a regular file"))
}

/// A file mapped into memory.
#[derive(Debug)]
pub struct MappedFile(Option<Mmap>);

/// Parts that are given back begin and end at multiples of this many bytes: the largest page of a Linux on aarch64.
const RELEASE_ALIGN: usize = 65536;

impl MappedFile {
    /// Maps a file; nothing of it is read.
    ///
    /// # Errors
    /// The system's.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = open_input(path)?;
        if file.metadata()?.len() == 0 {
            return Ok(Self(None));
        }
        // SAFETY: the map is only ever read. A process that changes the file meanwhile changes values, which any bytes
        // are valid for; one that shortens it ends this process with SIGBUS, as with any program that maps files.
        let map = unsafe { Mmap::map(&file) }?;
        Ok(Self(Some(map)))
    }

    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }

    /// Takes the whole pages of a range out of this process's memory; who reads them again gets them from the file again.
    pub fn release(&self, range: Range<usize>) {
        let start = range.start.next_multiple_of(RELEASE_ALIGN);
        let end = range.end.min(self.bytes().len()) / RELEASE_ALIGN * RELEASE_ALIGN;
        if let (Some(map), true) = (&self.0, start < end) {
            let advice = UncheckedAdvice::DontNeed;
            // SAFETY: pages of a file's map that nobody writes are read from the file again after this. A map starts at a
            // page, so the range covers whole pages of any size that divides its alignment.
            let done = unsafe { map.unchecked_advise_range(advice, start, end - start) };
            // Without it, the process only looks larger than it is.
            done.unwrap_or_default();
        }
    }
}

/// Bytes collected before they go to the system.
const BUFFER_BYTES: usize = 1 << 20;

/// A file on its way, under another name beside its place; removed unless it is finished.
#[derive(Debug)]
pub struct OutputFile {
    out: BufWriter<fs::File>,
    path: PathBuf,
    temporary: PathBuf,
    finished: bool,
}

impl OutputFile {
    /// Begins the file that will be at `path`.
    ///
    /// # Errors
    /// The system's, with the path that it is about.
    pub fn create(path: &Path) -> Result<Self, (PathBuf, io::Error)> {
        let mut name = path.file_name().unwrap_or_default().to_os_string();
        name.push(format!(".{}.part", std::process::id()));
        let temporary = path.with_file_name(name);
        match fs::File::create(&temporary) {
            Ok(file) => Ok(Self {
                out: BufWriter::with_capacity(BUFFER_BYTES, file),
                path: path.into(),
                temporary,
                finished: false,
            }),
            Err(error) => Err((temporary, error)),
        }
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// The system's, with the path that it is about.
    pub fn put(&mut self, bytes: &[u8]) -> Result<(), (PathBuf, io::Error)> {
        (self.out.write_all(bytes)).map_err(|error| (self.temporary.clone(), error))
    }

    /// Puts the file at its place, over one that is there.
    ///
    /// - `head`: if there is any, the bytes that the first ones are replaced with before
    ///
    /// # Errors
    /// The system's, with the path that it is about.
    pub fn finish(mut self, head: Option<&[u8]>) -> Result<(), (PathBuf, io::Error)> {
        let done = self.out.flush().and_then(|()| match head {
            Some(head) => io::Seek::rewind(&mut self.out).and_then(|()| {
                self.out.write_all(head)?;
                self.out.flush()
            }),
            None => Ok(()),
        });
        let done = done.and_then(|()| fs::rename(&self.temporary, &self.path));
        self.finished = done.is_ok();
        done.map_err(|error| (self.path.clone(), error))
    }
}

impl Drop for OutputFile {
    fn drop(&mut self) {
        if !self.finished {
            // Nobody is left to hear that a file that is of no use could not be removed.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}
