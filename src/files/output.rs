//! Outputs: written under a random name next to their destination, and renamed when they are
//! complete.

use std::fs::{self, Metadata};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tempfile::{Builder, NamedTempFile};

/// The place of an output.
///
/// A link is followed, so that the file that it names is replaced and the link stays. Anything else
/// that is not a regular file is refused: a device, a FIFO, a folder, a link to nothing.
#[derive(Debug)]
pub struct Destination {
    path: PathBuf,
    folder: PathBuf,
    old: Option<Metadata>,
}

impl Destination {
    /// Finds the place of an output at `path`.
    ///
    /// # Errors
    /// An error of the system; `InvalidInput` if a file cannot be put there.
    pub fn of(path: &Path) -> io::Result<Self> {
        let refused = |reason| Err(io::Error::new(ErrorKind::InvalidInput, reason));
        let old = match fs::metadata(path) {
            Ok(old) if old.is_file() => Some(old),
            Ok(_) => return refused("not a regular file, so nothing is written there"),
            Err(_) if is_folder_name(path) => {
                return refused("a path that ends in / names a folder, not a file");
            }
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            Err(_) if fs::symlink_metadata(path).is_ok() => {
                return refused("a link to a file that does not exist");
            }
            Err(_) => None,
        };
        let resolved = match old {
            Some(_) => fs::canonicalize(path)?,
            None => path.to_path_buf(),
        };
        let (Some(name), Some(folder)) = (resolved.file_name(), resolved.parent()) else {
            return refused("not the name of a file");
        };
        let is_here = folder.as_os_str().is_empty();
        let folder = fs::canonicalize(if is_here { Path::new(".") } else { folder })?;
        Ok(Self {
            path: folder.join(name),
            folder,
            old,
        })
    }

    /// Returns `true` if `file` is the file at the destination now, under whatever name.
    #[must_use]
    pub fn is(&self, file: &Metadata) -> bool {
        let own = self.old.as_ref().and_then(os::files::identity);
        own.is_some() && own == os::files::identity(file)
    }

    /// Returns `true` if both are the same place, or the same file under two names.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.path == other.path || other.old.as_ref().is_some_and(|old| self.is(old))
    }
}

/// Returns `true` if a path ends in `/` or `/.`, which [`Path::file_name`] ignores.
fn is_folder_name(path: &Path) -> bool {
    let bytes = path.as_os_str().as_encoded_bytes();
    bytes.ends_with(b"/") || bytes.ends_with(b"/.")
}

/// Bytes collected before they go to the system.
const BUFFER_BYTES: usize = 1 << 20;

/// Permissions of a new file, before the user's mask is applied.
const NEW_MODE: u32 = 0o666;

/// Temporary files of this process.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn unfinished() -> MutexGuard<'static, Vec<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes every unfinished output of this process, which is about to end.
///
/// While the result lives, no other output is begun or finished.
pub fn remove_unfinished() -> MutexGuard<'static, Vec<PathBuf>> {
    let mut paths = unfinished();
    for path in paths.drain(..) {
        // If the file cannot be removed, nothing more can be done.
        let _ = fs::remove_file(path);
    }
    paths
}

/// An unfinished output under a random name in the folder of its place; removed unless it is
/// finished.
#[derive(Debug)]
pub struct OutputFile {
    // The first field, because fields are dropped in this order: the file is removed while its name
    // is still known.
    out: Option<BufWriter<NamedTempFile>>,
    path: PathBuf,
    place: Destination,
    temporary: PathBuf,
}

impl OutputFile {
    /// Begins the file that will be at `path`. It gets the permissions of the file that it
    /// replaces.
    ///
    /// # Errors
    /// An error of the system, with the path that it is about.
    pub fn create(path: &Path) -> Result<Self, (PathBuf, io::Error)> {
        Self::begin(path).map_err(|error| (path.into(), error))
    }

    fn begin(path: &Path) -> io::Result<Self> {
        let place = Destination::of(path)?;
        let mode = place.old.as_ref().and_then(os::files::mode);
        let permissions = os::files::permissions(mode.unwrap_or(NEW_MODE) & 0o777);
        let mut names = unfinished();
        let mut builder = Builder::new();
        builder.prefix(".ggml-npu-").suffix(".part").rand_bytes(16);
        if let Some(permissions) = permissions {
            builder.permissions(permissions);
        }
        let file = builder.tempfile_in(&place.folder)?;
        let temporary = file.path().to_path_buf();
        names.push(temporary.clone());
        Ok(Self {
            out: Some(BufWriter::with_capacity(BUFFER_BYTES, file)),
            path: path.into(),
            place,
            temporary,
        })
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// An error of the system, with the path that it is about.
    pub fn put(&mut self, bytes: &[u8]) -> Result<(), (PathBuf, io::Error)> {
        let out = self.out.as_mut().ok_or(ErrorKind::BrokenPipe.into());
        let done = out.and_then(|out| out.write_all(bytes));
        done.map_err(|error| (self.path.clone(), error))
    }

    /// Moves the file to its place, and replaces an existing one. It is on the disk when this
    /// returns.
    ///
    /// - `head`: if there is any, the bytes that replace the first ones
    ///
    /// # Errors
    /// An error of the system, with the path that it is about.
    pub fn finish(mut self, head: Option<&[u8]>) -> Result<(), (PathBuf, io::Error)> {
        (self.put_in_place(head)).map_err(|error| (self.path.clone(), error))
    }

    fn put_in_place(&mut self, head: Option<&[u8]>) -> io::Result<()> {
        let out = self.out.take().ok_or(ErrorKind::BrokenPipe)?;
        let mut file = out.into_inner().map_err(io::IntoInnerError::into_error)?;
        if let Some(head) = head {
            io::Seek::rewind(&mut file)?;
            file.write_all(head)?;
        }
        if let Some(old) = &self.place.old {
            file.as_file().set_permissions(old.permissions())?;
        }
        file.as_file().sync_all()?;
        {
            let _names = unfinished();
            file.persist(&self.place.path)?;
        }
        match fs::File::open(&self.place.folder)?.sync_all() {
            // Some file systems cannot sync a folder.
            Err(error) if error.kind() == ErrorKind::InvalidInput => Ok(()),
            done => done,
        }
    }
}

impl Drop for OutputFile {
    fn drop(&mut self) {
        drop(self.out.take());
        unfinished().retain(|path| *path != self.temporary);
    }
}

/// Writes a whole file.
///
/// # Errors
/// An error of the system, with the path that it is about.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), (PathBuf, io::Error)> {
    let mut file = OutputFile::create(path)?;
    file.put(bytes)?;
    file.finish(None)
}
