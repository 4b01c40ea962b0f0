//! The Hexagon NPU: executes commands on tensors in shared memory.
//!
//! ```text
//! backend -- jobs: commands that name buffers by number --> session --> ring --> DSP
//!    '------ set, get --> Buffer: shared memory, touched only while the DSP has nothing to do
//! ```

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use hexagon_ops::ffi::describe;
use hexagon_ops::wire::{Info, Power, VOTES};

pub use self::batch::{Batch, MAX_OPERANDS};
pub use self::serving::Serving;
pub use self::session::Failed;
use self::session::Session;
use crate::error::{Error, Result};
use crate::hexagon::caps::HexCaps;
use crate::hexagon::driver::{Connection, FastRpc, SharedMemory};
pub use crate::hexagon::driver::{Domain, Floats};

mod address;
mod batch;
mod serving;
mod session;

/// A session on an NPU.
#[derive(Debug)]
pub struct HexNpu {
    caps: &'static HexCaps,
    session: Arc<Session>,
}

/// Options of a session.
#[derive(Clone, Copy, Debug)]
pub struct SessionOptions {
    /// The compute DSP.
    pub dsp: Domain,
    /// Number of the session, from 0.
    pub session: u32,
    /// Longest silence of the DSP.
    pub timeout: Duration,
    /// Bytes that can be mapped at a time; less than the chip's for tests.
    pub address_bytes: u64,
    /// Most threads that compute; `None` for one on each vector unit.
    pub threads: Option<u32>,
    /// The power that the DSP's library votes for.
    pub power: Power,
    /// The thread that calls the DSP.
    pub serving: Serving,
    /// The library to load, of V73's two.
    pub floats: Floats,
    /// `false` to leave the matrix unit alone.
    pub matrix: bool,
}

impl HexNpu {
    /// Opens a session.
    ///
    /// - `name`: for log lines
    ///
    /// # Errors
    /// `FastRpc` if the DSP's library cannot be loaded or started; `Version` if it is not the one
    /// of this program.
    pub fn open(
        name: &Arc<str>,
        rpc: &Arc<FastRpc>,
        caps: &'static HexCaps,
        settings: SessionOptions,
    ) -> Result<Self> {
        let SessionOptions {
            dsp,
            session,
            floats,
            ..
        } = settings;
        let (connection, quiet) = Connection::open(rpc, caps.arch, dsp, session, floats)?;
        let session = Session::open(name, connection, quiet, &settings)?;
        let have = session.info().arch;
        if have != caps.arch {
            return Err(Error::Architecture {
                what: "the DSP's library",
                have: format!("V{have}"),
                want: format!("V{}", caps.arch),
            });
        }
        for (vote, of) in session.info().votes.iter().zip(VOTES) {
            if *vote != 0 {
                log::warn!(
                    "{name}: the DSP refused the vote for its {of}: {}",
                    describe(*vote)
                );
            }
        }
        let info = session.info();
        let wanted = settings.threads.unwrap_or(info.units).min(info.units);
        if info.threads < wanted {
            log::warn!(
                "{name}: computing on {} of {wanted} threads, because the DSP did not start more",
                info.threads
            );
        }
        Ok(Self {
            caps,
            session: Arc::new(session),
        })
    }

    /// Returns the chip.
    #[must_use]
    pub fn caps(&self) -> &'static HexCaps {
        self.caps
    }

    /// Returns the report of the DSP's library about itself.
    #[must_use]
    pub fn info(&self) -> &Info {
        self.session.info()
    }

    /// Returns the vendor's library.
    #[must_use]
    pub fn rpc(&self) -> &Arc<FastRpc> {
        self.session.connection().rpc()
    }

    /// Returns `true` if a stand-in computes in place of silicon.
    #[must_use]
    pub fn is_simulated(&self) -> bool {
        self.rpc().stand_in().is_some()
    }

    /// Returns `true` if an error put the session out of use.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.session.is_lost()
    }

    /// Allocates shared memory.
    ///
    /// # Errors
    /// `OutOfMemory`, or `NotMapped` if the system has no addresses for it.
    pub fn allocate(&self, bytes: usize) -> Result<DeviceBuffer> {
        let memory = SharedMemory::new(self.session.connection(), bytes.max(1))?;
        let memory = Arc::new(memory);
        let number = self.session.add(&memory)?;
        Ok(DeviceBuffer {
            number,
            memory,
            session: Arc::clone(&self.session),
        })
    }

    /// Runs the commands of `batch` on the DSP, in order, and waits for them. Returns the time by
    /// the DSP's own clock.
    ///
    /// # Errors
    /// `DeviceLost` after an earlier error; `OutOfMemory` if buffers cannot be mapped; else the
    /// DSP's error, or its silence.
    pub fn submit(&self, batch: &Batch) -> std::result::Result<Duration, Failed> {
        self.session.submit(batch)
    }
}

/// Shared memory with a number that jobs name it by.
#[derive(Debug)]
pub struct DeviceBuffer {
    number: u32,
    memory: Arc<SharedMemory>,
    /// Dropped last, since it may be the last owner of the connection that the memory is mapped
    /// for.
    session: Arc<Session>,
}

impl DeviceBuffer {
    /// Returns the number of the buffer.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns the address of the buffer's first byte, from which ggml computes tensor addresses.
    #[must_use]
    pub fn base(&self) -> usize {
        self.memory.base()
    }

    /// Returns the size of the buffer in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.memory.len()
    }

    /// Calls `read` with some of its bytes when the DSP has nothing to do.
    ///
    /// # Panics
    /// If `range` is not inside the buffer.
    pub fn read<T>(&self, range: Range<usize>, read: impl FnOnce(&[u8]) -> T) -> T {
        self.check(&range);
        (self.session).quietly(|quiet| read(self.memory.read(quiet, range)))
    }

    /// Makes the CPU's writes visible to the DSP, in memory that the CPU uses as its own.
    ///
    /// # Panics
    /// If `range` is not inside the buffer.
    pub fn clean(&self, range: Range<usize>) {
        self.memory.clean(range);
    }

    /// Makes the DSP's writes visible to the CPU.
    ///
    /// # Panics
    /// If `range` is not inside the buffer.
    pub fn invalidate(&self, range: Range<usize>) {
        self.memory.invalidate(range);
    }

    /// As [`Self::invalidate`], for many ranges at once.
    ///
    /// # Panics
    /// If one of `ranges` is not inside.
    pub fn invalidate_all(&self, ranges: impl Iterator<Item = Range<usize>>) {
        self.memory.invalidate_all(ranges);
    }

    /// Calls `write`, which changes some of its bytes, when the DSP has nothing to do.
    ///
    /// # Panics
    /// If `range` is not inside the buffer.
    pub fn write<T>(&self, range: Range<usize>, write: impl FnOnce(&mut [u8]) -> T) -> T {
        self.check(&range);
        (self.session).quietly(|quiet| self.memory.write(quiet, range, write))
    }

    /// Refuses a range before the session is locked: a panic with the lock held loses the device.
    fn check(&self, range: &Range<usize>) {
        assert!(
            range.start <= range.end && range.end <= self.bytes(),
            "bytes {range:?} of a buffer of {}",
            self.bytes()
        );
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        self.session.remove(self.number);
    }
}
