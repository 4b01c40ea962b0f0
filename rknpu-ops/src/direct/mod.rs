//! Rockchip's kernel driver without Rockchip's library: the table of functions ([`Api`]) that librknnrt fills, over our
//! own command streams.
//!
//! ```text
//! host code --- ffi::Api ---> api.rs        C functions: look up, check pointers, catch panics
//!                              +-> context.rs   a shape, its plan of tasks, and what is bound to it
//!                              +-> memory.rs    allocations and views, by the pointers that the caller has
//!                              +-> core.rs      the streams of a run, and the cubes that it copies
//!                              |    +-> crate::stream
//!                              +-> rknpu.rs     the driver's calls: memory objects, syncs, jobs
//!                                   +-> node.rs     ioctl and mmap on its node
//! ```
//!
//! Differences from the library that callers may rely on:
//! - operands are native; other layouts, dynamic shapes and scales are refused with a log line;
//! - any M and any N that is a multiple of a group of kernels, but K only as far as one pass goes ([`crate::stream`]);
//! - `mem_sync` of a view syncs the view;
//! - there is one address space of 4 GiB, domain 0;
//! - memory that a run needs is allocated when its operands are bound, never during a run;
//! - contexts have no objects in the kernel.
//!
//! Which kernels: RK3588, the driver `rknpu` 0.9.6 or newer as a DRM node. Linux's own driver `rocket` is not one of them.
//!
//! No board has run this. It runs over the emulated driver and NPU of `tests/vendor/rockchip`, which also serve the
//! vendor's library.

use std::io;
use std::sync::{Arc, Mutex};

use sim_common::StartError;
pub use sim_common::slot::SLOTS;
use sim_common::slot::Slots;

use crate::ffi::Api;

mod api;
mod context;
mod core;
mod memory;
pub mod node;
mod rknpu;

use self::core::Core;
use self::memory::Memories;
use self::node::Node;
use self::rknpu::Rknpu;

/// The library's version in the answer to [`ffi::QUERY_SDK_VERSION`](crate::ffi::QUERY_SDK_VERSION).
pub const VERSION: &str = concat!("streams-", env!("CARGO_PKG_VERSION"));

/// Cores of an RK3588.
const CORES: usize = 3;

/// An NPU that is driven directly. Dropping it frees its slot. Contexts that exist by then work until they are
/// destroyed.
#[derive(Debug)]
pub struct Machine {
    slot: usize,
}

/// State that contexts and functions of one machine share.
#[derive(Debug)]
struct Shared {
    rknpu: Arc<Rknpu>,
    memories: Memories,
    cores: [Mutex<Core>; CORES],
}

static MACHINES: Slots<Shared> = Slots::new();

/// Opens the driver behind a node.
///
/// # Errors
/// The driver's, `Unsupported` with what it lacks, or that [`SLOTS`] machines exist.
pub fn start(node: Box<dyn Node>) -> io::Result<Machine> {
    let rknpu = Arc::new(Rknpu::open(node)?);
    let shared = Arc::new(Shared {
        memories: Memories::default(),
        cores: std::array::from_fn(|core| Mutex::new(Core::new(core))),
        rknpu,
    });
    let slot = (MACHINES.take(&shared))
        .map_err(|error: StartError| io::Error::other(error.to_string()))?;
    Ok(Machine { slot })
}

impl Machine {
    /// Returns the functions of this machine. Those that take a context accept the contexts of every machine.
    #[must_use]
    pub fn api(&self) -> Api {
        api::of_slot(self.slot)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        MACHINES.free(self.slot);
    }
}
