//! The lock that keeps the NPU to one process: on the device's own nodes, which every user and
//! every container that can use the NPU shares.
//!
//! SOURCE: two processes that use I/O address spaces of the NPU at once corrupt each other or panic
//! the kernel (rk-llama.cpp's README, igou-kubernetes#869).

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// The file that is locked where the driver shows no node.
const FILE: &str = "ggml-rust-npu.lock";

/// The words about a lock that another process has.
const HELD: &str = "another process holds it";

/// Pause before the lock is tried again.
const PAUSE: Duration = Duration::from_millis(20);

/// The NPU, for as long as this lives. The default has no lock: a stand-in is its process's alone.
#[derive(Debug, Default)]
pub struct Taken {
    files: Vec<File>,
}

impl Taken {
    /// Lets other processes take the NPU. Closing the files alone would not while a process that was forked has them, too.
    pub(super) fn give_back(self) {
        for file in self.files {
            if let Err(error) = file.unlock() {
                log::debug!("the lock on the NPU: {error}");
            }
        }
    }
}

/// Places where the kernel shows devices.
struct Places<'a> {
    /// Folder with a folder for each DRM node.
    drm_class: &'a Path,
    /// Folder of device nodes.
    dev: &'a Path,
    mountinfo: &'a Path,
    /// Folders for the file of a system without a node, the first that takes it.
    run: Vec<PathBuf>,
}

impl Places<'_> {
    /// Those of this machine.
    fn system() -> Self {
        let mut run = vec![PathBuf::from("/run/lock")];
        run.extend(std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from));
        Places {
            drm_class: Path::new("/sys/class/drm"),
            dev: Path::new("/dev"),
            mountinfo: Path::new("/proc/self/mountinfo"),
            run,
        }
    }
}

/// Takes the NPU for this process.
///
/// # Errors
/// `Busy` if another process has it, or if no node of it can be opened.
pub fn take_npu() -> Result<Taken> {
    take(&Places::system())
}

/// Calls `attempt` until it does not fail because another process has the NPU, but for no longer than `patience`.
///
/// # Errors
/// Those of the last call.
pub fn within<T>(patience: Duration, attempt: impl Fn() -> Result<T>) -> Result<T> {
    let begun = Instant::now();
    loop {
        match attempt() {
            Err(Error::Busy { reason, .. }) if reason == HELD && begun.elapsed() < patience => {
                std::thread::sleep(PAUSE);
            }
            answer => return answer,
        }
    }
}

/// Returns a node of the NPU, if the kernel shows one.
#[must_use]
pub fn npu_node() -> Option<PathBuf> {
    nodes(&Places::system()).into_iter().next()
}

/// Returns all nodes of the NPU that the kernel shows.
pub(super) fn npu_nodes() -> Vec<PathBuf> {
    nodes(&Places::system())
}

/// Returns the kernel's description of the NPU's device.
#[must_use]
pub fn npu_uevent() -> Option<String> {
    let places = Places::system();
    let name = PathBuf::from(nodes(&places).first()?.file_name()?);
    fs::read_to_string(places.drm_class.join(name).join("device/uevent")).ok()
}

fn take(places: &Places) -> Result<Taken> {
    let nodes = nodes(places);
    if nodes.is_empty() {
        let file = lock_file(&places.run)?;
        return Ok(Taken { files: vec![file] });
    }
    // A user may be in one of the groups of the nodes only, so each node that opens is locked.
    let mut files = Vec::new();
    let mut refused = None;
    for node in &nodes {
        match open(node, 0) {
            Ok(file) => files.push(lock(file, node)?),
            Err(error) => refused = Some((node, error)),
        }
    }
    if let (Some((node, error)), true) = (refused, files.is_empty()) {
        let hint = match error.kind() {
            ErrorKind::PermissionDenied => " (groups video and render have access)",
            _ => "",
        };
        return Err(busy(node, format!("{error}{hint}")));
    }
    let mounts = fs::read_to_string(places.mountinfo).unwrap_or_default();
    if let Some(kind) = mounted_as(&mounts, &nodes[0]).filter(|kind| *kind != "devtmpfs") {
        log::warn!(
            "{} is this container's own copy (on {kind}): the lock on it does not keep out other containers; share \
             the host's folder instead (docker run -v /dev/dri:/dev/dri)",
            nodes[0].display()
        );
    }
    Ok(Taken { files })
}

/// Returns the nodes of the NPU: those of DRM whose driver is rknpu, or the one of a driver that
/// was built without DRM.
fn nodes(places: &Places) -> Vec<PathBuf> {
    let names = fs::read_dir(places.drm_class).into_iter().flatten();
    let mut nodes: Vec<PathBuf> = names
        .flatten()
        .filter(|entry| {
            let driver = fs::read_link(entry.path().join("device/driver"));
            let name = driver
                .ok()
                .and_then(|path| path.file_name().map(Into::into));
            // SOURCE: the platform driver is "RKNPU" (vendor driver 0.9.8, rknpu_drv.c), its DRM
            // driver "rknpu".
            name.is_some_and(|name: PathBuf| name.as_os_str().eq_ignore_ascii_case("rknpu"))
        })
        .map(|entry| places.dev.join("dri").join(entry.file_name()))
        .chain([places.dev.join("rknpu")])
        .filter(|node| node.exists())
        .collect();
    nodes.sort();
    nodes
}

/// Opens what may be locked. It is neither created nor written to, and a FIFO does not block.
fn open(path: &Path, flags: i32) -> io::Result<File> {
    File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | flags)
        .open(path)
}

fn lock(file: File, path: &Path) -> Result<File> {
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(busy(path, HELD.into())),
        Err(TryLockError::Error(error)) => Err(busy(path, error.to_string())),
    }
}

/// Locks a file in the first of `folders` that has one or takes one.
///
/// A file of another user is opened to read, which is all that a lock needs: the kernel refuses
/// `O_CREAT` on it in a folder such as this (`fs.protected_regular`).
fn lock_file(folders: &[PathBuf]) -> Result<File> {
    let mut refused = busy(Path::new(FILE), "there is no folder for it".into());
    for folder in folders {
        let path = folder.join(FILE);
        let created = || {
            let file = OpenOptions::new()
                .write(true)
                .create_new(true)
                .open(&path)?;
            // Whatever the user's umask is: others lock it, too.
            file.set_permissions(fs::Permissions::from_mode(0o644))?;
            Ok(file)
        };
        // Everyone may write to such a folder, so a link there leads anywhere.
        let existing = || open(&path, libc::O_NOFOLLOW);
        let file = existing().or_else(|error| match error.kind() {
            ErrorKind::NotFound => created(),
            _ => Err(error),
        });
        // Another process may have created it in between.
        let file = file.or_else(|error| match error.kind() {
            ErrorKind::AlreadyExists => existing(),
            _ => Err(error),
        });
        match file {
            Ok(file) => return lock(file, &path),
            Err(error) => refused = busy(&path, error.to_string()),
        }
    }
    Err(refused)
}

fn busy(path: &Path, reason: String) -> Error {
    Error::Busy {
        path: path.into(),
        reason,
    }
}

/// The type of the file system that `path` is on, from the lines of a `mountinfo`.
// SOURCE: proc(5): field 5 is the mount point; the type is the first field after " - ".
fn mounted_as<'a>(mountinfo: &'a str, path: &Path) -> Option<&'a str> {
    let mounts = mountinfo.lines().filter_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let point = Path::new(left.split(' ').nth(4)?);
        let kind = right.split(' ').next()?;
        (path.starts_with(point)).then(|| (point.components().count(), kind))
    });
    // If mounts cover each other, the last one is visible.
    mounts.max_by_key(|(depth, _)| *depth).map(|(_, kind)| kind)
}

#[cfg(test)]
mod tests;
