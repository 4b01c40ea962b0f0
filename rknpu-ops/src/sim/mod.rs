//! The stand-in for librknnrt: the same C ABI ([`Api`]), the vendor library's rules, and results
//! computed on the CPU.
//!
//! ```text
//! host code --- ffi::Api ---> api.rs        C functions: look up, catch panics, inject faults
//!                              +-> profile.rs   limits of a chip: types, alignments, sizes, layouts
//!                              +-> context.rs   contexts: creation, binding;  run.rs  one run
//!                              +-> tensor_mem.rs  allocations, views, the device's own copy (strict coherence)
//!                              +-> domain.rs    which I/O domain is attached;  traffic.rs  which calls are under way
//!                              +-> shared.rs    machines of several processes that are one NPU
//!                              +-> compute.rs   C = A * B over native layouts;  kernel.rs  its inner loops
//! ```
//!
//! [`start`] makes a [`Machine`]: one simulated chip with its own memory, faults and counters. The
//! C functions have no machine argument, so each machine occupies a slot and gets a separate copy
//! of the functions that create contexts; a context remembers its machine. Up to [`SLOTS`] machines
//! live in one process.
//!
//! It keeps these rules of the real library (the code comments on each rule and its doubts where it
//! is enforced):
//! - `set_io_mem` copies A and B that are not native at call time, and binds native ones;
//! - with [`Coherence::Strict`] the device has its own copy of memory, which only `mem_sync` on the
//!   allocation itself (not on a view) updates: a missing sync shows as poison;
//! - runs of several contexts at the same time, or one call of another kind: a call that makes,
//!   binds, syncs or drops something during a run locks the machine up;
//! - processes with the same [`Options::node`] share one NPU: its address spaces, and one process
//!   is in a function at a time;
//! - one run at a time in a context, no splitting of a matmul over cores;
//! - results are wrong in memory that was not cleaned (`mem_sync` to the device) after it was made,
//!   and, with strict coherence, in memory that the CPU wrote since;
//! - 2 GiB for each of 16 I/O domains (the cap of rk-llama.cpp), one of which is attached at a
//!   time; one file descriptor for each allocation;
//! - types that the chip has but the library gets wrong give zeros.
//!
//! The threads that call `run` are the NPU cores: the stand-in starts none. Diagnostics go to the
//! `log` target `librknnrt`, with the vendor's texts where they are known.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use sim_common::fault::Injector;
use sim_common::lock;
pub use sim_common::slot::SLOTS;
use sim_common::slot::Slots;
pub use sim_common::{Coherence, StartError};

use crate::ffi::{Api, MatmulType};
use crate::layout::Soc;

mod api;
mod compute;
mod context;
mod domain;
#[cfg(feature = "librknnrt")]
mod export;
mod fault;
mod kernel;
mod profile;
mod run;
mod shared;
mod tensor_mem;
mod traffic;

pub use fault::{Fault, WrongRows, parse_faults};
pub use sim_common::fault::{Effect, FaultError, When};

/// Byte that fills memory which its reader must not rely on.
pub const POISON: u8 = 0xa5;

/// Properties of the simulated chip.
#[derive(Clone, Debug)]
pub struct Options {
    /// Chip family.
    pub soc: Soc,
    /// Calls that fail.
    pub faults: Vec<Fault>,
    /// Cache behaviour.
    pub coherence: Coherence,
    /// `true` to enforce the limits on N that are documented but that the library does not check.
    pub documented_limits: bool,
    /// Text that `rknn_query` returns as library version.
    pub api_version: String,
    /// Text that `rknn_query` returns as driver version.
    pub driver_version: String,
    /// Longest time that a call waits for its I/O domain while another one is in use.
    pub domain_patience: Duration,
    /// Tiles of B (columns, elements of K) in place of the chip's, by matmul type, to simulate
    /// another version of the library.
    pub tiles: Vec<(MatmulType, (usize, usize))>,
    /// `false` if a run returns at once and leaves C unchanged, to measure everything but the
    /// device.
    pub compute: bool,
    /// Shortest duration of a run.
    pub run_time: Duration,
    /// `true` if all I/O domains share the addresses of one, as in a kernel whose switch does
    /// nothing and succeeds.
    // SOURCE: rknpu_iommu.c of the vendor's driver: kernels built without CONFIG_NO_GKI have stubs
    // for switching spaces.
    pub one_address_space: bool,
    /// `true` if the addresses of memory that is freed are lost.
    // SOURCE: README of rknpu-submit: the driver's general path for addresses loses those of freed
    // memory until the machine is started again.
    pub loses_addresses: bool,
    /// `true` if weights in a view with an offset are read without it while another run is under
    /// way.
    // SOURCE: pty819/rk-llama.cpp reports wrong results of such views with two driver threads; the
    // cause is not known.
    pub mixed_views: bool,
    /// The file in place of the NPU's node, for processes that share the NPU. Without a file, the
    /// machine belongs to its process alone.
    pub node: Option<PathBuf>,
}

impl Options {
    /// Returns the options of a faultless chip with relaxed coherence, library 2.3.2 and driver
    /// 0.9.8.
    ///
    /// A call waits for its domain ten times as long as on silicon, because runs are slower here,
    /// too.
    ///
    /// SOURCE: version strings as printed by librknnrt 2.3.2 and by the vendor's kernel driver,
    /// which waits for 6 s (0.9.8, rknpu_iommu.c).
    #[must_use]
    pub fn new(soc: Soc) -> Self {
        Self {
            soc,
            faults: Vec::new(),
            coherence: Coherence::Relaxed,
            documented_limits: false,
            api_version: "2.3.2 (429f97ae6b@2025-04-09T09:09:27)".to_owned(),
            driver_version: "0.9.8".to_owned(),
            domain_patience: Duration::from_secs(60),
            tiles: Vec::new(),
            compute: true,
            run_time: Duration::ZERO,
            one_address_space: false,
            loses_addresses: false,
            mixed_views: false,
            node: None,
        }
    }

    /// As [`Options::new`], with `GGML_RUST_NPU_SIM_FAULTS`, `GGML_RUST_NPU_SIM_COHERENCE`
    /// (`relaxed`, `strict`) and `GGML_RUST_NPU_SIM_API_VERSION` read from the environment.
    ///
    /// # Errors
    /// [`StartError::Faults`] or [`StartError::Coherence`] if a variable has an unknown value.
    pub fn from_env(soc: Soc) -> Result<Self, StartError> {
        let mut options = Self::new(soc);
        if let Ok(text) = std::env::var("GGML_RUST_NPU_SIM_FAULTS") {
            options.faults = parse_faults(&text)?;
        }
        options.coherence = Coherence::from_env()?;
        if let Ok(text) = std::env::var("GGML_RUST_NPU_SIM_API_VERSION") {
            options.api_version = text;
        }
        Ok(options)
    }
}

/// Objects that the caller has created and not destroyed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LiveObjects {
    /// Contexts.
    pub contexts: usize,
    /// Allocations and views.
    pub mems: usize,
}

/// A simulated chip. Dropping it frees its slot. Contexts that exist by then work until they are
/// destroyed.
#[derive(Debug)]
pub struct Machine {
    slot: usize,
    state: Arc<ChipState>,
}

impl Machine {
    /// Returns the functions of this machine. Functions on a context accept the contexts of every
    /// machine. After the machine is dropped, creating a context fails, or reaches the next machine
    /// in the slot.
    #[must_use]
    pub fn api(&self) -> Api {
        api::of_slot(self.slot)
    }

    /// Counts the objects that exist now, for leak tests.
    #[must_use]
    pub fn live(&self) -> LiveObjects {
        LiveObjects {
            contexts: self.state.contexts.load(Ordering::Relaxed),
            mems: self.state.mems.len(),
        }
    }

    /// Returns the number of times that the NPU was switched from one I/O domain to another.
    #[must_use]
    pub fn domain_switches(&self) -> u64 {
        self.state.attachment.switches()
    }

    /// Returns the reason why the machine does not answer any more, if a call broke a rule that
    /// locks up real machines.
    #[must_use]
    pub fn locked_up(&self) -> Option<String> {
        self.state.traffic.locked_up()
    }

    /// Returns the number of calls of the function with the vendor's name `symbol`; 0 for an
    /// unknown name.
    #[must_use]
    pub fn calls(&self, symbol: &str) -> u64 {
        self.state.injector.calls(symbol)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        MACHINES.free(self.slot);
    }
}

/// The state of the chip, which contexts and functions of one machine share.
#[derive(Debug)]
struct ChipState {
    options: Options,
    injector: Injector<WrongRows>,
    mems: tensor_mem::MemoryTable,
    attachment: domain::Attachment,
    contexts: AtomicUsize,
    traffic: traffic::Traffic,
    /// `true` after the warning about multi-core masks.
    mask_warned: AtomicBool,
}

static MACHINES: Slots<ChipState> = Slots::new();

/// Starts a simulated chip.
///
/// # Errors
/// [`StartError::NoSlot`] if [`SLOTS`] machines exist, [`StartError::Node`] if the file that stands
/// for the node cannot be used.
pub fn start(options: Options) -> Result<Machine, StartError> {
    let node = (options.node.as_deref())
        .map(|path| {
            let opened = shared::SharedNode::open(path);
            opened.map(Arc::new).map_err(|error| StartError::Node {
                path: path.into(),
                error,
            })
        })
        .transpose()?;
    let state = Arc::new(ChipState {
        injector: Injector::new(options.faults.clone()),
        mems: tensor_mem::MemoryTable::new(&options, node.clone()),
        attachment: domain::Attachment::new(options.domain_patience),
        contexts: AtomicUsize::new(0),
        traffic: traffic::Traffic::new(node),
        mask_warned: AtomicBool::new(false),
        options,
    });
    let slot = MACHINES.take(&state)?;
    Ok(Machine { slot, state })
}

/// Logs as the vendor's library does.
macro_rules! vendor_error {
    ($($arg:tt)*) => { log::error!(target: "librknnrt", $($arg)*) };
}
use vendor_error;
