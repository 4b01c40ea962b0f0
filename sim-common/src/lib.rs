//! The common parts of the stand-ins for the vendors' libraries.
//!
//! | module | holds |
//! |---|---|
//! | [`fault`] | the grammar of `GGML_RUST_NPU_SIM_FAULTS`, and the counters that decide which call fails |
//! | [`poison`] | memory with a file descriptor, and copies filled with poison |
//! | [`slot`] | slots for the machines of a process |
//!
//! A stand-in adds its vendor's functions, rules and arithmetic.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

pub mod fault;
#[expect(
    unsafe_code,
    reason = "memory with a descriptor is made by system calls"
)]
pub mod poison;
pub mod slot;

/// Visibility of writes between the CPU and the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Coherence {
    /// One memory: a forgotten cache operation goes unnoticed.
    #[default]
    Relaxed,
    /// Separate memories, all poisoned at first: only cache operations copy between them.
    Strict,
}

impl Coherence {
    /// Reads `GGML_RUST_NPU_SIM_COHERENCE`: `relaxed` (also if it is not set) or `strict`.
    ///
    /// # Errors
    /// [`StartError::Coherence`] for any other value.
    pub fn from_env() -> Result<Self, StartError> {
        match std::env::var("GGML_RUST_NPU_SIM_COHERENCE").as_deref() {
            Err(_) | Ok("" | "relaxed") => Ok(Self::Relaxed),
            Ok("strict") => Ok(Self::Strict),
            Ok(other) => Err(StartError::Coherence(other.to_owned())),
        }
    }
}

/// Reason why a machine did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Every slot is in use by a machine that has not been dropped.
    #[error("all {} slots for simulated machines are taken", slot::SLOTS)]
    NoSlot,
    /// No such chip exists.
    #[error("there is no architecture {arch}, want one of {known:?}")]
    Arch {
        /// The requested architecture.
        arch: u32,
        /// The architectures that can be simulated.
        known: &'static [u32],
    },
    /// The simulation needs instructions that this CPU does not have.
    #[error("it needs a CPU with {0}")]
    Cpu(&'static str),
    /// The file that processes with the same simulated NPU share cannot be opened or locked.
    #[error("{path}, which stands for the NPU's node: {error}")]
    Node {
        /// The file.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// `GGML_RUST_NPU_SIM_FAULTS` is malformed.
    #[error("GGML_RUST_NPU_SIM_FAULTS: {0}")]
    Faults(#[from] fault::FaultError),
    /// `GGML_RUST_NPU_SIM_COHERENCE` is malformed.
    #[error("GGML_RUST_NPU_SIM_COHERENCE: \"{0}\" is not one of relaxed, strict")]
    Coherence(String),
}

/// Starts a machine for the first chip in `GGML_RUST_NPU_SIM` that `chip` knows, for a stand-in
/// that is loaded as the vendor's library. Returns `None`, after an error in the log, if none does
/// or if the machine does not start.
///
/// - `target`: log target, the vendor library's name; `family`: of the chips, for the log
pub fn from_env<C, M>(
    target: &str,
    family: &str,
    chip: impl FnMut(&str) -> Option<C>,
    start: impl FnOnce(C) -> Result<M, StartError>,
) -> Option<M> {
    let names = std::env::var("GGML_RUST_NPU_SIM").unwrap_or_default();
    let Some(chip) = names.split(',').map(str::trim).find_map(chip) else {
        log::error!(target: target, "GGML_RUST_NPU_SIM=\"{names}\" names no {family} chip");
        return None;
    };
    start(chip)
        .inspect_err(|error| log::error!(target: target, "{error}"))
        .ok()
}

/// Locks, also after a panic elsewhere, because a C caller cannot handle poisoned locks.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
