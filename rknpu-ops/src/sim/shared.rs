//! The file in place of the NPU's node: machines with the same file, of any processes, are one NPU.
//!
//! - Only one process is in a function at a time, and only while a process has the turn
//!   (`node::TURN`). A call that breaks this locks the machine up, as runs and other calls of
//!   several threads do.
//! - Memory of all machines uses the addresses of the same I/O domains. The file records how many
//!   bytes each machine uses of each domain. The record of a machine whose process died no longer
//!   counts, because its lock is gone.
//!
//! SOURCE: vendor kernel driver 0.9.8, rknpu_iommu.c: the domains are the device's, not an open
//! file's.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;
use std::sync::Mutex;

use super::lock;
use super::tensor_mem::DOMAINS;
use crate::node::{self, CALL, MACHINES, TURN};

/// Machines of all processes that can share a file.
const MOST: u16 = 64;

/// Bytes of a machine's numbers in the file.
const RECORD_BYTES: u64 = (DOMAINS * size_of::<u64>()) as u64;

/// A machine's part of the file.
#[derive(Debug)]
pub(super) struct SharedNode {
    file: File,
    number: u16,
    /// Bytes that this machine uses of each domain.
    used: Mutex<[u64; DOMAINS]>,
}

impl SharedNode {
    /// Opens the file, which is created if it is not there, for this and for other users.
    ///
    /// # Errors
    /// The system's error, or `ResourceBusy` if too many machines share it.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        let file = match options.open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let file = options.create(true).truncate(false).open(path)?;
                // Other users' processes open it, too, so the umask may not restrict it.
                os::files::open_to_all(&file)?;
                file
            }
            other => other?,
        };
        for number in 0..MOST {
            if node::lock(&file, MACHINES + number)? {
                let shared = Self {
                    file,
                    number,
                    used: Mutex::default(),
                };
                // An earlier machine may have had the same number.
                shared.write([0; DOMAINS])?;
                return Ok(shared);
            }
        }
        Err(io::ErrorKind::ResourceBusy.into())
    }

    /// Begins a call of this process.
    ///
    /// # Errors
    /// The rule that the call breaks.
    pub(super) fn enter(&self) -> Result<(), String> {
        let answer = |result: io::Result<bool>| result.map_err(|error| error.to_string());
        if !answer(node::is_locked(&self.file, TURN))? {
            return Err("no process has the turn".into());
        }
        if !answer(node::lock(&self.file, CALL))? {
            return Err("another process is in the library".into());
        }
        Ok(())
    }

    /// Ends the last call of this process that is under way.
    pub(super) fn leave(&self) {
        if let Err(error) = node::unlock(&self.file, CALL) {
            log::error!(target: "librknnrt", "the file of the simulated NPU: {error}");
        }
    }

    /// Changes the bytes that this machine uses of a domain.
    pub(super) fn charge(&self, domain: usize, change: impl FnOnce(u64) -> u64) {
        let mut used = lock(&self.used);
        used[domain] = change(used[domain]);
        if let Err(error) = self.write(*used) {
            log::error!(target: "librknnrt", "the file of the simulated NPU: {error}");
        }
    }

    /// Returns the bytes that the machines of others use of a domain.
    pub(super) fn used_by_others(&self, domain: usize) -> u64 {
        let others = (0..MOST).filter(|number| *number != self.number);
        let alive =
            others.filter(|number| node::is_locked(&self.file, MACHINES + number).unwrap_or(false));
        alive.map(|number| self.read(number)[domain]).sum()
    }

    fn write(&self, used: [u64; DOMAINS]) -> io::Result<()> {
        let bytes: Vec<u8> = used.iter().flat_map(|bytes| bytes.to_ne_bytes()).collect();
        let place = u64::from(self.number) * RECORD_BYTES;
        os::files::write_all_at(&self.file, &bytes, place)
    }

    /// Returns the numbers of a machine; zeros if it has written none.
    fn read(&self, number: u16) -> [u64; DOMAINS] {
        let mut bytes = [0; DOMAINS * size_of::<u64>()];
        let place = u64::from(number) * RECORD_BYTES;
        let mut used = [0; DOMAINS];
        if os::files::read_exact_at(&self.file, &mut bytes, place).is_ok() {
            for (used, bytes) in used.iter_mut().zip(bytes.as_chunks().0) {
                *used = u64::from_ne_bytes(*bytes);
            }
        }
        used
    }
}
