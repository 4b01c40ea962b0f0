//! The stand-in for libcdsprpc and the DSP behind it: the same C ABI ([`Api`]), FastRPC's rules, and the DSP's own command
//! loop ([`crate::serve`]) on the thread that calls.
//!
//! ```text
//! host code --- ffi::Api ---> api.rs       C functions: look up, catch panics, inject faults
//!                              +-> control.rs  requests about sessions and the DSP
//!                              +-> session.rs  processes on the DSP, handles
//!                              +-> dsp.rs      the Server's Platform: mappings, caches, clock
//!                              +-> memory.rs   rpcmem; copies for host, DSP and main memory (strict coherence)
//!                              +-> fault.rs    what shall go wrong
//! ```
//!
//! [`start`] makes a [`Machine`]: one simulated chip. The C functions take no machine argument, so each machine occupies a
//! slot and gets its own copy of them. Up to [`SLOTS`] machines live in one process.
//!
//! What it keeps of the real library (rules and their doubts are commented where they are enforced):
//! - a session is a process on the DSP with an address space of its own; unsigned modules must be allowed before its
//!   first handle is opened, and only this project's library for the chip's architecture can be loaded;
//! - a call blocks its thread until the DSP returns; its thread on the DSP has 16 KiB of stack unless asked for more, which
//!   is too little for this project's library;
//! - allocations and mappings are whole pages, below 2 GiB;
//! - the DSP can map only what `fastrpc_mmap` has announced to its session, and only until its address space is full;
//! - with [`Coherence::Strict`] host and DSP have caches of their own, which only cache operations bring up to date.
//!   [`Machine::host_cache`] has the host's, which are instructions on hardware.
//!
//! What it does not keep: each handle has all of the VTCM, and time.
//!
//! Diagnostics go to the `log` target `libcdsprpc`.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::ffi::Api;

mod api;
mod control;
mod dsp;
#[cfg(feature = "cdsprpc")]
mod export;
mod fault;
mod memory;
mod session;

pub use fault::{Effect, Fault, FaultError, Trouble, When, knows, parse_faults};

/// Machines that can exist at once in a process.
pub const SLOTS: usize = 32;

/// Byte that fills memory whose content the reader has no right to: four of them are a NaN.
pub const POISON: u8 = 0xff;

/// Architectures that can be simulated.
pub const ARCHS: [u32; 4] = [73, 75, 79, 81];

/// What host and DSP see of each other's writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Coherence {
    /// One memory: a forgotten cache operation goes unnoticed.
    #[default]
    Relaxed,
    /// Three memories, all poisoned at first: only cache operations copy between them.
    Strict,
}

/// What to simulate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Architecture: one of [`ARCHS`].
    pub arch: u32,
    /// VTCM that the DSP's library gets, bytes.
    pub vtcm_bytes: usize,
    /// Vector units.
    pub hvx_threads: usize,
    /// Bytes that one session can have mapped.
    pub address_bytes: u64,
    /// Cache behaviour.
    pub coherence: Coherence,
    /// What shall go wrong.
    pub faults: Vec<Fault>,
    /// Whether the firmware lets unsigned modules run.
    pub unsigned_modules: bool,
    /// `true` if the vector units have IEEE instructions for floats, which the library for V73 uses and the one for V73 in
    /// qfloat does not: without them, the process ends at the first command that computes.
    pub ieee_float: bool,
    /// The answers to the votes for power; see [`crate::wire::VOTES`].
    pub votes: [i32; crate::wire::VOTES.len()],
    /// First calls of METHOD_SERVE that find VTCM taken by another program.
    pub vtcm_taken: u64,
    /// The least time that each command takes that computes.
    pub command_time: std::time::Duration,
    /// Whether commands are carried out; if not they are only answered, to time everything else.
    pub compute: bool,
}

impl Options {
    /// A faultless chip with relaxed coherence.
    #[must_use]
    pub fn new(arch: u32) -> Self {
        // SOURCE: llama.cpp ggml-hexagon.cpp: 3000 MiB on v73, `HTP_OP_MAX_VMEM_DEFAULT` from v75 on; what a 32-bit
        // address space leaves beside code, stacks and heap.
        let address_bytes = if arch <= 73 {
            3000 << 20
        } else {
            3_355_443_200
        };
        // Threads compute here: more than there are processors would only get in each other's way.
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            arch,
            // SOURCE: llama.cpp ggml-hexagon.cpp assumes 8 MiB and 8 vector threads where the DSP cannot be asked.
            vtcm_bytes: 8 << 20,
            hvx_threads: 8.min(cores),
            address_bytes,
            coherence: Coherence::Relaxed,
            faults: Vec::new(),
            unsigned_modules: true,
            ieee_float: true,
            votes: [0; crate::wire::VOTES.len()],
            vtcm_taken: 0,
            command_time: std::time::Duration::ZERO,
            compute: true,
        }
    }

    /// As [`Options::new`], with `GGML_RUST_NPU_SIM_COHERENCE` (`relaxed`, `strict`) and those items of
    /// `GGML_RUST_NPU_SIM_FAULTS` that [`knows`] taken from the environment.
    ///
    /// # Errors
    /// [`StartError::Faults`] or [`StartError::Coherence`] if a variable's value is not understood.
    pub fn from_env(arch: u32) -> Result<Self, StartError> {
        let mut options = Self::new(arch);
        if let Ok(text) = std::env::var("GGML_RUST_NPU_SIM_FAULTS") {
            let ours = |item: &&str| {
                let name = item.trim().split(':').next().unwrap_or_default();
                name.is_empty() || knows(name)
            };
            for item in text.split(',').filter(ours) {
                options.faults.extend(parse_faults(item)?);
            }
        }
        if let Ok(text) = std::env::var("GGML_RUST_NPU_SIM_COHERENCE") {
            options.coherence = match text.as_str() {
                "" | "relaxed" => Coherence::Relaxed,
                "strict" => Coherence::Strict,
                _ => return Err(StartError::Coherence(text)),
            };
        }
        Ok(options)
    }
}

/// Why a machine did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Every slot is taken by a machine that has not been dropped.
    #[error("all {SLOTS} slots for simulated machines are taken")]
    NoSlot,
    /// No such chip.
    #[error("there is no architecture {0}, want one of {ARCHS:?}")]
    Arch(u32),
    /// `GGML_RUST_NPU_SIM_FAULTS` is malformed.
    #[error("GGML_RUST_NPU_SIM_FAULTS: {0}")]
    Faults(#[from] FaultError),
    /// `GGML_RUST_NPU_SIM_COHERENCE` is malformed.
    #[error("GGML_RUST_NPU_SIM_COHERENCE: \"{0}\" is not one of relaxed, strict")]
    Coherence(String),
}

/// Objects that the caller has created and not destroyed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Live {
    /// Handles.
    pub handles: usize,
    /// Allocations.
    pub allocations: usize,
    /// Announced mappings.
    pub mappings: usize,
}

/// A simulated chip. Dropping it ends its calls and frees its slot; memory that the host has not freed stays.
#[derive(Debug)]
pub struct Machine {
    slot: usize,
    state: Arc<State>,
}

impl Machine {
    /// The functions of this machine. After the machine is dropped they fail, or reach the next machine in the slot.
    #[must_use]
    pub fn api(&self) -> Api {
        api::of_slot(self.slot)
    }

    /// The host's cache operations.
    #[must_use]
    pub fn host_cache(&self) -> HostCache {
        HostCache(Arc::clone(&self.state))
    }

    /// What exists now, for leak tests.
    #[must_use]
    pub fn live(&self) -> Live {
        let (handles, mappings) = self.state.sessions.count();
        Live {
            handles,
            allocations: self.state.memory.len(),
            mappings,
        }
    }

    /// How often the function with the vendor's name `symbol` was called; 0 for an unknown name.
    #[must_use]
    pub fn calls(&self, symbol: &str) -> u64 {
        self.state.injector.calls(symbol)
    }

    /// The number of calls that the function refused although they were not meant to fail.
    #[must_use]
    pub fn refusals(&self, symbol: &str) -> u64 {
        self.state.injector.refusals(symbol)
    }

    /// Submissions that were worked on.
    #[must_use]
    pub fn submissions(&self) -> u64 {
        self.state.injector.submissions()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        *lock(&MACHINES[self.slot]) = None;
        self.state.sessions.close_all();
    }
}

/// The host's cache operations over memory of one machine: what `dc cvac` and `dc civac` do on hardware. With relaxed
/// coherence they do nothing.
///
/// Whoever calls them has the memory by address, and no reference to the bytes while [`Self::invalidate`] runs.
#[derive(Clone, Debug)]
pub struct HostCache(Arc<State>);

impl HostCache {
    /// Writes `bytes` bytes that the host wrote at `address` to memory. Other addresses are logged and left alone.
    pub fn clean(&self, address: *const u8, bytes: usize) {
        self.0.memory.host_clean(address, bytes);
    }

    /// Makes the host see what is in memory. Other addresses are logged and left alone.
    pub fn invalidate(&self, address: *const u8, bytes: usize) {
        self.0.memory.host_invalidate(address, bytes);
    }
}

/// What the functions of one machine share.
#[derive(Debug)]
struct State {
    options: Options,
    injector: Arc<fault::Injector>,
    memory: memory::Table,
    sessions: session::Sessions,
}

static MACHINES: [Mutex<Option<Arc<State>>>; SLOTS] = [const { Mutex::new(None) }; SLOTS];

/// Starts a simulated chip.
///
/// # Errors
/// [`StartError::NoSlot`] if [`SLOTS`] machines exist, [`StartError::Arch`] if there is no such chip.
pub fn start(options: Options) -> Result<Machine, StartError> {
    if !ARCHS.contains(&options.arch) {
        return Err(StartError::Arch(options.arch));
    }
    for (slot, place) in MACHINES.iter().enumerate() {
        let mut place = lock(place);
        if place.is_none() {
            let state = Arc::new(State {
                injector: Arc::new(fault::Injector::new(options.faults.clone())),
                memory: memory::Table::default(),
                sessions: session::Sessions::default(),
                options,
            });
            *place = Some(Arc::clone(&state));
            return Ok(Machine { slot, state });
        }
    }
    Err(StartError::NoSlot)
}

/// The machine in `slot`, if it has not been dropped.
fn machine_in(slot: usize) -> Option<Arc<State>> {
    lock(&MACHINES[slot]).clone()
}

/// Locks, also after a panic elsewhere: a C caller cannot be told about poisoning.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Logs as the vendor's library does.
macro_rules! vendor_error {
    ($($arg:tt)*) => { log::error!(target: "libcdsprpc", $($arg)*) };
}
use vendor_error;
