//! Files: only regular ones are opened; they are read or mapped into memory. A written file gets
//! its name when it is complete, not before.
#![expect(unsafe_code, reason = "maps files")]

use std::fs;
use std::io;
use std::ops::Range;
use std::path::Path;

use memmap2::Mmap;

pub use self::output::{Destination, OutputFile, remove_unfinished, write};

mod output;

/// Opens a file that is read.
///
/// # Errors
/// An error of the system; `InvalidInput` if it is not a regular file: opening or reading a FIFO or
/// a device may never return.
pub fn open_input(path: &Path) -> io::Result<fs::File> {
    let mut options = fs::OpenOptions::new();
    regular(os::files::at_once(options.read(true)).open(path)?)
}

/// Returns a file that is a regular one.
///
/// # Errors
/// An error of the system; `InvalidInput` if it is not.
pub(crate) fn regular(file: fs::File) -> io::Result<fs::File> {
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    let kind = io::ErrorKind::InvalidInput;
    Err(io::Error::new(kind, "not a regular file"))
}

/// Characters of a text from a file that a message has.
const QUOTED: usize = 160;

/// Returns a text from a file as messages have it: short, and on one line.
#[must_use]
pub fn quote(text: &str) -> String {
    let printed = |c: char| if c.is_control() { '\u{fffd}' } else { c };
    let mut quoted: String = text.chars().take(QUOTED).map(printed).collect();
    if text.chars().nth(QUOTED).is_some() {
        quoted += &format!("… ({} bytes)", text.len());
    }
    quoted
}

/// A file mapped into memory.
#[derive(Debug)]
pub struct MappedFile(Option<Mmap>);

/// Parts that are given back begin and end at multiples of this many bytes: the largest page of a
/// Linux on aarch64.
const RELEASE_ALIGN: usize = 65536;

impl MappedFile {
    /// Maps a file; nothing of it is read.
    ///
    /// # Errors
    /// An error of the system.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = open_input(path)?;
        if file.metadata()?.len() == 0 {
            return Ok(Self(None));
        }
        // SAFETY: the map is only ever read. A process that changes the file at the same time
        // changes values, for which any bytes are valid; one that shortens it ends this process
        // with SIGBUS, as with any program that maps files.
        let map = unsafe { Mmap::map(&file) }?;
        Ok(Self(Some(map)))
    }

    /// Returns the bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }

    /// Frees the memory of the whole pages of a range; a later read gets them from the file again.
    pub fn release(&self, range: Range<usize>) {
        let start = range.start.next_multiple_of(RELEASE_ALIGN);
        let end = range.end.min(self.bytes().len()) / RELEASE_ALIGN * RELEASE_ALIGN;
        if let (Some(map), true) = (&self.0, start < end) {
            // A map starts at a page, so the range covers whole pages of any size that divides its
            // alignment.
            os::memory::release_read(map, start, end - start);
        }
    }
}
