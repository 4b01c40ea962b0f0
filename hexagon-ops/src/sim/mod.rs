//! The stand-in for libcdsprpc and its DSP: the same C ABI ([`Api`]), FastRPC's rules, and the
//! DSP's own command loop ([`crate::serve`]) on the thread that calls.
//!
//! ```text
//! host code --- ffi::Api ---> api.rs       C functions: look up, catch panics, inject faults
//!                              +-> control.rs  requests about sessions and the DSP
//!                              +-> session.rs  processes on the DSP, handles
//!                              +-> dsp.rs      the Server's Platform: mappings, caches, clock
//!                              +-> vtcm.rs     the VTCM that calls share
//!                              +-> rpcmem.rs   allocations; copies for host, DSP and main memory (strict coherence)
//!                              +-> fault.rs    injected faults
//! ```
//!
//! [`start`] makes a [`Machine`]: one simulated chip. The C functions have no machine argument, so
//! each machine occupies a slot and gets a separate copy of them. Up to [`SLOTS`] machines live in
//! one process.
//!
//! It keeps these rules of the real library (the code comments on each rule and its doubts where it
//! is enforced):
//! - a session is a process on the DSP with a separate address space; unsigned modules must be
//!   allowed before its first handle is opened, and only this project's library for the chip's
//!   architecture can be loaded;
//! - a call blocks its thread until the DSP returns; its thread on the DSP has 16 KiB of stack
//!   unless more is requested, which is too little for this project's library;
//! - allocations and mappings are whole pages, below 2 GiB;
//! - the DSP can map only memory that `fastrpc_mmap` has announced to its session, and only until
//!   its address space is full; `fastrpc_mmap` fails when the kernel's window is full;
//! - with [`Coherence::Strict`], host and DSP have separate caches, and only cache operations copy
//!   between them and memory. [`Machine::host_cache`] provides the host's operations, which are
//!   instructions on hardware.
//!
//! It does not model time. Each handle has all of the VTCM, unless [`Options::shared_vtcm`] makes
//! them share it in turn.
//!
//! Diagnostics go to the `log` target `libcdsprpc`.

use std::sync::Arc;

use sim_common::fault::Injector;
use sim_common::lock;
pub use sim_common::slot::SLOTS;
use sim_common::slot::Slots;
pub use sim_common::{Coherence, StartError};

use crate::ffi::{Api, Domain};

mod api;
mod control;
mod dsp;
#[cfg(feature = "cdsprpc")]
mod export;
mod fault;
mod rpcmem;
mod session;
mod vtcm;

pub use fault::{Fault, Trouble, knows, parse_faults};
pub use sim_common::fault::{Effect, FaultError, When};

/// Byte that fills memory which its reader must not rely on: four of them are a NaN.
pub const POISON: u8 = 0xff;

/// Architectures that can be simulated.
pub const ARCHS: [u32; 6] = [68, 69, 73, 75, 79, 81];

/// The matrix unit that a DSP's system gives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MatrixUnit {
    /// A unit that works.
    #[default]
    Works,
    /// No unit: its lock is refused.
    Refused,
    /// A unit whose stores clip results to less than 2.
    Wrong,
}

/// Properties of the simulated chip.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Architecture: one of [`ARCHS`].
    pub arch: u32,
    /// Compute DSPs: 1 to 4 that are alike.
    pub dsps: usize,
    /// VTCM for the DSP's library, bytes.
    pub vtcm_bytes: usize,
    /// The matrix unit.
    pub matrix: MatrixUnit,
    /// Vector units.
    pub hvx_threads: usize,
    /// Bytes that the DSP can have mapped in one session.
    pub address_bytes: u64,
    /// Bytes that the host can have announced to one session.
    pub window_bytes: u64,
    /// Cache behaviour.
    pub coherence: Coherence,
    /// Calls and submissions that fail.
    pub faults: Vec<Fault>,
    /// `true` if the firmware accepts unsigned modules.
    pub unsigned_modules: bool,
    /// `true` if the vector units have IEEE instructions for floats, which the library for V73 uses
    /// and V73's qfloat library does not. Without them, the process ends at the first command that
    /// computes.
    pub ieee_float: bool,
    /// The answers to the votes for power; see [`crate::wire::VOTES`].
    pub votes: [i32; crate::wire::VOTES.len()],
    /// First calls of METHOD_SERVE that find VTCM in use by another program.
    pub vtcm_taken: u64,
    /// `true` if only one call of all handles has VTCM at a time, and learns when another one waits
    /// for it.
    pub shared_vtcm: bool,
    /// `true` if holders of VTCM can lower their priority: without it they never learn that others
    /// wait.
    pub has_priorities: bool,
    /// `true` if nothing can be allocated before `rpcmem_init` was called.
    pub needs_rpcmem_init: bool,
    /// `true` if a mapping goes at the end of a call in which the DSP has unmapped it; the library
    /// still lists it.
    pub vanishing_maps: bool,
    /// `true` if unmapped memory occupies the window until a call of METHOD_SERVE ends.
    pub late_unmaps: bool,
    /// Shortest duration of a computing command.
    pub command_time: std::time::Duration,
    /// `true` if commands are executed; if not, they are only answered, to time everything else.
    pub compute: bool,
}

impl Options {
    /// Returns the compute DSPs.
    fn domains(&self) -> &'static [Domain] {
        &Domain::ALL[..self.dsps.clamp(1, Domain::ALL.len())]
    }

    /// Returns a faultless chip with relaxed coherence.
    #[must_use]
    pub fn new(arch: u32) -> Self {
        // SOURCE: llama.cpp ggml-hexagon.cpp: 3000 MiB on v73, `HTP_OP_MAX_VMEM_DEFAULT` on v75 and
        // later; code, stacks and heap need the rest of the 32-bit address space.
        let address_bytes = if arch <= 73 {
            3000 << 20
        } else {
            3_355_443_200
        };
        // These threads compute, so more threads than processors would only slow each other down.
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            arch,
            dsps: 1,
            // SOURCE: llama.cpp ggml-hexagon.cpp assumes 8 MiB and 8 vector threads if it cannot
            // ask the DSP. SM8350 (V68) has 4 MiB, as programs that ran there report.
            vtcm_bytes: if arch < 73 { 4 << 20 } else { 8 << 20 },
            matrix: MatrixUnit::Works,
            hvx_threads: 8.min(cores),
            address_bytes,
            // SOURCE: Linux drivers/misc/fastrpc.c: each session has a DMA mask of 32 bits.
            window_bytes: 1 << 32,
            coherence: Coherence::Relaxed,
            faults: Vec::new(),
            unsigned_modules: true,
            ieee_float: true,
            votes: [0; crate::wire::VOTES.len()],
            vtcm_taken: 0,
            shared_vtcm: false,
            has_priorities: true,
            needs_rpcmem_init: false,
            vanishing_maps: false,
            late_unmaps: false,
            command_time: std::time::Duration::ZERO,
            compute: true,
        }
    }

    /// As [`Options::new`], with `GGML_RUST_NPU_SIM_COHERENCE` (`relaxed`, `strict`) and the items
    /// of `GGML_RUST_NPU_SIM_FAULTS` that [`knows`] accepts from the environment.
    ///
    /// # Errors
    /// [`StartError::Faults`] or [`StartError::Coherence`] if a variable has an unknown value.
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
        options.coherence = Coherence::from_env()?;
        Ok(options)
    }
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

/// A simulated chip. Dropping it ends its calls and frees its slot; memory that the host has not
/// freed stays.
#[derive(Debug)]
pub struct Machine {
    slot: usize,
    state: Arc<MachineState>,
}

impl Machine {
    /// Returns the functions of this machine. After the machine is dropped they fail, or reach the
    /// next machine in the slot.
    #[must_use]
    pub fn api(&self) -> Api {
        api::of_slot(self.slot)
    }

    /// Returns the host's cache operations.
    #[must_use]
    pub fn host_cache(&self) -> HostCache {
        HostCache(Arc::clone(&self.state))
    }

    /// Counts the objects that exist now, for leak tests.
    #[must_use]
    pub fn live(&self) -> Live {
        let (handles, mappings) = self.state.sessions.count();
        Live {
            handles,
            allocations: self.state.memory.len(),
            mappings,
        }
    }

    /// Returns the number of calls of the function with the vendor's name `symbol`; 0 for an
    /// unknown name.
    #[must_use]
    pub fn calls(&self, symbol: &str) -> u64 {
        self.state.injector.calls(symbol)
    }

    /// Returns the number of calls that the function refused although they were not meant to fail.
    #[must_use]
    pub fn refusals(&self, symbol: &str) -> u64 {
        self.state.injector.refusals(symbol)
    }

    /// Returns the number of submissions that were worked on.
    #[must_use]
    pub fn submissions(&self) -> u64 {
        self.state.injector.events()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        MACHINES.free(self.slot);
        self.state.sessions.close_all();
    }
}

/// The host's cache operations over memory of one machine, in place of `dc cvac` and `dc civac` on
/// hardware. With relaxed coherence they do nothing.
///
/// Callers hold the memory by address, and have no reference to the bytes while
/// [`Self::invalidate`] runs.
#[derive(Clone, Debug)]
pub struct HostCache(Arc<MachineState>);

impl HostCache {
    /// Writes `bytes` bytes that the host wrote at `address` to memory. Other addresses are logged
    /// and ignored.
    pub fn clean(&self, address: *const u8, bytes: usize) {
        self.0.memory.host_clean(address, bytes);
    }

    /// Makes the host see the content of memory. Other addresses are logged and ignored.
    pub fn invalidate(&self, address: *const u8, bytes: usize) {
        self.0.memory.host_invalidate(address, bytes);
    }
}

/// State that the functions of one machine share.
#[derive(Debug)]
struct MachineState {
    options: Options,
    injector: Arc<Injector<Trouble>>,
    memory: rpcmem::AllocationTable,
    sessions: session::Sessions,
    vtcm: Arc<vtcm::Vtcm>,
}

static MACHINES: Slots<MachineState> = Slots::new();

/// Starts a simulated chip.
///
/// # Errors
/// [`StartError::NoSlot`] if [`SLOTS`] machines exist, [`StartError::Arch`] if the chip is unknown,
/// [`StartError::Cpu`] on an x86-64 CPU without AVX2.
pub fn start(options: Options) -> Result<Machine, StartError> {
    if let Some(instructions) = crate::hvx::missing_instructions() {
        return Err(StartError::Cpu(instructions));
    }
    if !ARCHS.contains(&options.arch) {
        return Err(StartError::Arch {
            arch: options.arch,
            known: &ARCHS,
        });
    }
    let state = Arc::new(MachineState {
        injector: Arc::new(Injector::new(options.faults.clone())),
        memory: rpcmem::AllocationTable::default(),
        sessions: session::Sessions::new(options.domains()),
        vtcm: Arc::default(),
        options,
    });
    let slot = MACHINES.take(&state)?;
    Ok(Machine { slot, state })
}

/// Logs as the vendor's library does.
macro_rules! vendor_error {
    ($($arg:tt)*) => { log::error!(target: "libcdsprpc", $($arg)*) };
}
use vendor_error;
