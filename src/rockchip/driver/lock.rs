//! Locks on the NPU's own nodes, which every user and every container that can use the NPU shares:
//! they let several processes compute on it, one at a time.
//!
//! - A process has a *seat* while anything of the NPU is open in it. Seats tell processes that they
//!   are not alone.
//! - A process has the *turn* while it is inside the library. Nothing of another process is made,
//!   bound, run or freed meanwhile.
//! - The next one waits in the *queue*, so that a process which ends its turn does not get the next
//!   one before the waiting process. A process that is alone does not use the queue, which halves
//!   the system calls of a turn.
//!
//! SOURCE: two processes that use I/O address spaces of the NPU at once corrupt each other or panic
//! the kernel (rk-llama.cpp's README, igou-kubernetes#869).

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use os::files::{at_once, at_once_without_links};
use rknpu_ops::node::{self, QUEUE, SEAT, TURN};

use super::neighbour;
use crate::error::{Error, Result};

/// The file that is locked where the driver shows no node.
const FILE: &str = "ggml-rust-npu.lock";

/// The longest wait for the turn.
// SOURCE: a run takes milliseconds; one that hangs ends with the driver's time-out after 6 s
// (librknnrt's in rknpu_job.c, 0.9.8).
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Pauses between two looks at a lock that another process has: the first, and the longest.
const PAUSES: [Duration; 2] = [Duration::from_micros(50), Duration::from_micros(500)];

/// Interval at which a process checks for others. Within it, a process may get the turn before one
/// that has just begun to wait.
const LOOK: Duration = Duration::from_millis(5);

/// The nodes that an NPU has.
#[derive(Clone, Debug)]
pub enum Nodes {
    /// The nodes that the kernel shows.
    Machine,
    /// A file in place of a node, for stand-ins of several processes.
    File(PathBuf),
    /// No node: only this process uses the NPU.
    Private,
}

/// The place of a process at the NPU: its open nodes. Dropping it releases all locks.
#[derive(Debug)]
pub struct Seat {
    nodes: Vec<(PathBuf, File)>,
    /// The time of the last look for other processes, if there were none.
    alone: Mutex<Option<Instant>>,
}

impl Seat {
    /// Opens the nodes.
    ///
    /// # Errors
    /// `Busy` if no node can be opened or locked.
    pub fn take(nodes: &Nodes) -> Result<Self> {
        match nodes {
            Nodes::Machine => take(&Places::system()),
            Nodes::File(path) => {
                let file = open(path, at_once).map_err(|error| busy(path, error.to_string()))?;
                Self::of(vec![(path.clone(), file)])
            }
            Nodes::Private => Self::of(Vec::new()),
        }
    }

    fn of(nodes: Vec<(PathBuf, File)>) -> Result<Self> {
        let seat = Self {
            nodes,
            alone: Mutex::default(),
        };
        for (path, file) in &seat.nodes {
            // This byte is only ever locked shared.
            node::share(file, SEAT).map_err(|error| busy(path, error.to_string()))?;
        }
        Ok(seat)
    }

    /// Returns `true` if another process has a seat.
    #[must_use]
    pub fn has_company(&self) -> bool {
        (self.nodes.iter()).any(|(_, file)| node::is_locked(file, SEAT).unwrap_or(true))
    }

    /// Returns the names of the other processes that have a seat, as far as this user may see them.
    #[must_use]
    pub fn company(&self) -> Option<String> {
        let paths: Vec<PathBuf> = self.nodes.iter().map(|(path, _)| path.clone()).collect();
        let names = neighbour::with_lock(&paths, SEAT);
        (!names.is_empty()).then(|| names.join(", "))
    }

    /// Takes the turn, and waits for at most `patience` while other processes have it.
    ///
    /// # Errors
    /// `Busy` with the name of the process that has it, if this user may see it.
    pub fn begin_turn(&self, patience: Duration) -> Result<()> {
        if self.nodes.is_empty() {
            return Ok(());
        }
        if self.was_alone() && self.lock(&[TURN], Duration::ZERO).is_ok() {
            return Ok(());
        }
        self.lock(&[QUEUE, TURN], patience)?;
        self.unlock(&[QUEUE]);
        Ok(())
    }

    /// Returns `true` if no other process had a seat at the last look, a short time ago.
    fn was_alone(&self) -> bool {
        let mut alone = self.alone.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if alone.is_none_or(|at| now - at > LOOK) {
            *alone = (!self.has_company()).then_some(now);
        }
        alone.is_some()
    }

    /// Locks bytes of all nodes, or none.
    fn lock(&self, bytes: &[u16], patience: Duration) -> Result<()> {
        let mut wait = Wait::new(patience);
        let taken = bytes.iter().try_for_each(|&byte| {
            // Locked in the order of their names, so that two processes never wait for each other.
            (self.nodes.iter()).try_for_each(|(path, file)| wait.take(path, file, byte))
        });
        taken.inspect_err(|_| self.unlock(bytes))
    }

    /// Ends the turn.
    pub fn end_turn(&self) {
        self.unlock(&[TURN]);
    }

    fn unlock(&self, bytes: &[u16]) {
        for (path, file) in &self.nodes {
            for &byte in bytes {
                if let Err(error) = node::unlock(file, byte) {
                    log::debug!("the lock on {}: {error}", path.display());
                }
            }
        }
    }
}

impl Drop for Seat {
    /// Closing the files alone would release nothing while a forked process has them, too.
    fn drop(&mut self) {
        self.unlock(&[TURN, QUEUE, SEAT]);
    }
}

/// A wait for locks, with a limit for all of them together.
struct Wait {
    patience: Duration,
    begun: Option<Instant>,
    pause: Duration,
}

impl Wait {
    fn new(patience: Duration) -> Self {
        Self {
            patience,
            begun: None,
            pause: PAUSES[0],
        }
    }

    /// Locks a byte.
    ///
    /// # Errors
    /// `Busy`.
    fn take(&mut self, path: &Path, file: &File, byte: u16) -> Result<()> {
        loop {
            match node::lock(file, byte) {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) => return Err(busy(path, error.to_string())),
            }
            // The kernel's lock call waits without a limit, so the wait is a loop with a deadline.
            let begun = *self.begun.get_or_insert_with(Instant::now);
            if begun.elapsed() >= self.patience {
                return Err(busy(path, self.holder(path)));
            }
            std::thread::sleep(self.pause);
            self.pause = (self.pause * 2).min(PAUSES[1]);
        }
    }

    fn holder(&self, path: &Path) -> String {
        if self.patience.is_zero() {
            return "another process uses it".into();
        }
        let paths = [path.to_path_buf()];
        let mut names = [TURN, QUEUE]
            .into_iter()
            .flat_map(|byte| neighbour::with_lock(&paths, byte));
        let name = names.next();
        let name = name.as_deref().unwrap_or("another process");
        let seconds = self.patience.as_secs_f64();
        format!("{name} has used it for {seconds} s without a pause")
    }
}

/// Places where the kernel shows devices.
struct Places<'a> {
    /// Folder with a folder for each DRM node.
    drm_class: &'a Path,
    /// Folder of device nodes.
    dev: &'a Path,
    mountinfo: &'a Path,
    /// Folders for the lock file of a system without a node; the first that accepts it is used.
    run: Vec<PathBuf>,
}

impl Places<'_> {
    /// Returns the places of this machine.
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

fn take(places: &Places) -> Result<Seat> {
    let nodes = nodes(places);
    if nodes.is_empty() {
        return Seat::of(vec![lock_file(&places.run)?]);
    }
    // A user may have access to some of the nodes only, so every node that can be opened is locked.
    let mut opened = Vec::new();
    let mut refused = None;
    for node in &nodes {
        match open(node, at_once) {
            Ok(file) => opened.push((node.clone(), file)),
            Err(error) => refused = Some((node, error)),
        }
    }
    if let (Some((node, error)), true) = (refused, opened.is_empty()) {
        let hint = match error.kind() {
            ErrorKind::PermissionDenied => " (groups video and render have access)",
            _ => "",
        };
        return Err(busy(node, format!("{error}{hint}")));
    }
    let mounts = fs::read_to_string(places.mountinfo).unwrap_or_default();
    if let Some(kind) = mounted_as(&mounts, &nodes[0]).filter(|kind| *kind != "devtmpfs") {
        static SAID: Once = Once::new();
        SAID.call_once(|| {
            log::warn!(
                "{} is this container's own copy (on {kind}): the lock on it does not keep out other containers; share \
                 the host's folder instead (docker run -v /dev/dri:/dev/dri)",
                nodes[0].display()
            );
        });
    }
    Seat::of(opened)
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

/// Opens a file that may be locked. It is neither created nor written to, and a FIFO does not
/// block.
fn open(path: &Path, how: fn(&mut OpenOptions) -> &mut OpenOptions) -> io::Result<File> {
    how(File::options().read(true).write(true)).open(path)
}

/// Opens the lock file in the first of `folders` that has one or accepts a new one.
///
/// A file of another user is opened without `O_CREAT`, which the kernel refuses in a folder such as
/// this (`fs.protected_regular`).
fn lock_file(folders: &[PathBuf]) -> Result<(PathBuf, File)> {
    let mut refused = busy(Path::new(FILE), "there is no folder for it".into());
    for folder in folders {
        let path = folder.join(FILE);
        let created = || {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create_new(true)
                .open(&path)?;
            // Whatever the user's umask is: others lock it, too, and a lock needs write access.
            os::files::open_to_all(&file)?;
            Ok(file)
        };
        // Everyone may write to such a folder, so a link there leads anywhere.
        let existing = || open(&path, at_once_without_links);
        let file = existing().or_else(|error| match error.kind() {
            ErrorKind::NotFound => created(),
            _ => Err(error),
        });
        // Another process may have created the file in between.
        let file = file.or_else(|error| match error.kind() {
            ErrorKind::AlreadyExists => existing(),
            _ => Err(error),
        });
        match file {
            Ok(file) => return Ok((path, file)),
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
    // If one mount covers another, the last one is visible.
    mounts.max_by_key(|(depth, _)| *depth).map(|(_, kind)| kind)
}

#[cfg(test)]
mod tests;
