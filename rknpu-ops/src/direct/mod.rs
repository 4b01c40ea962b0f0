//! An RK3588's NPU without Rockchip's library: the table of functions ([`Api`]) that librknnrt
//! fills, over our own command streams and a kernel's driver.
//!
//! ```text
//! host code --- ffi::Api ---> api.rs        C functions: look up, check pointers, catch panics
//!                              +-> context.rs   a shape, its plan of tasks, and its bound memory
//!                              +-> memory.rs    allocations and views, by the pointers that the caller has
//!                              +-> core.rs      the streams of a run, and the cubes that it copies
//!                              |    +-> crate::stream
//!                              +-> driver.rs    the interface of both drivers: memory objects, syncs, jobs
//!                                   +-> rknpu.rs    Rockchip's
//!                                   +-> rocket.rs   Linux's
//!                                        +-> node.rs   ioctl and mmap on a node
//! ```
//!
//! Differences from the library that callers may rely on:
//! - B is native; other layouts of it, dynamic shapes and scales are refused with a log line.
//!   Row-major A is read by a run, not when it is bound;
//! - any M and any N that is a multiple of a group of kernels. Sums over a longer K than a task may
//!   have ([`crate::stream`]) are added up by the CPU, except for results in FP16, which are
//!   refused;
//! - `mem_sync` of a view syncs the view;
//! - an address space has 4 GiB. `rknpu` has one, domain 0; with `rocket` each domain is a separate
//!   file;
//! - memory that a run needs is allocated when its operands are bound, never during a run;
//! - contexts have no objects in the kernel;
//! - with `rocket` a core mask is not followed: the jobs of an address space run one after another,
//!   on cores that the driver picks.
//!
//! Which kernels: RK3588, the driver `rknpu` 0.9.6 or newer as a DRM node, or `rocket` of Linux
//! 6.18 or newer.
//!
//! No board has run this. It runs over the emulated drivers and NPU of `tests/vendor/rockchip`,
//! which also serve the vendor's library.

use std::io;
use std::sync::{Arc, Mutex};

pub use sim_common::slot::SLOTS;
use sim_common::slot::Slots;
use sim_common::{StartError, lock};

use crate::ffi::Api;

mod api;
mod argument;
mod context;
mod core;
mod driver;
mod memory;
pub mod node;
pub mod question;
mod rknpu;
mod rocket;

use self::core::Core;
use self::driver::Driver;
use self::memory::Memories;
use self::node::{Kernel, Node};
use self::rknpu::Rknpu;
use self::rocket::Rocket;

/// The library's version in the answer to
/// [`ffi::QUERY_SDK_VERSION`](crate::ffi::QUERY_SDK_VERSION).
pub const VERSION: &str = concat!("streams-", env!("CARGO_PKG_VERSION"));

/// Cores of an RK3588.
const CORES: usize = 3;

/// Address spaces that are opened at most where each is a file.
// SOURCE: an RK3588 has up to 32 GB of memory, and a space has 4 GiB.
const SPACES: usize = 8;

/// An NPU that is driven directly. Dropping it frees its slot. Contexts that exist by then work
/// until they are destroyed.
#[derive(Debug)]
pub struct Machine {
    slot: usize,
    spaces: usize,
}

/// State that contexts and functions of one machine share.
#[derive(Debug)]
struct Shared {
    memories: Memories,
    /// The address spaces that are open, in order from the first.
    spaces: Mutex<Vec<Arc<Space>>>,
    /// The largest number of address spaces.
    limit: usize,
}

/// An address space of the device, with the objects of its runs on each core.
#[derive(Debug)]
struct Space {
    driver: Arc<dyn Driver>,
    cores: [Mutex<Core>; CORES],
}

impl Space {
    fn new(driver: Arc<dyn Driver>) -> Arc<Self> {
        Arc::new(Self {
            driver,
            cores: std::array::from_fn(|core| Mutex::new(Core::new(core))),
        })
    }
}

impl Shared {
    /// Returns an address space, opened with those before it if it is not open.
    ///
    /// # Errors
    /// `NotFound` for one beyond the last, or the driver's.
    fn space(&self, index: i32) -> io::Result<Arc<Space>> {
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        if index >= self.limit {
            let text = format!("there are {}", self.limit);
            return Err(io::Error::new(io::ErrorKind::NotFound, text));
        }
        let mut spaces = lock(&self.spaces);
        while spaces.len() <= index {
            let driver = spaces[0].driver.reopen()?;
            spaces.push(Space::new(driver));
        }
        Ok(Arc::clone(&spaces[index]))
    }
}

static MACHINES: Slots<Shared> = Slots::new();

/// Opens the driver of a node.
///
/// # Errors
/// The driver's error, `Unsupported` with the missing feature, or an error if [`SLOTS`] machines
/// exist.
pub fn start(node: Box<dyn Node>) -> io::Result<Machine> {
    let (driver, spaces): (Arc<dyn Driver>, usize) = match node.kernel() {
        Kernel::Rknpu => (Arc::new(Rknpu::open(node)?), 1),
        Kernel::Rocket => (Arc::new(Rocket::new(node)), SPACES),
    };
    let shared = Arc::new(Shared {
        memories: Memories::default(),
        spaces: Mutex::new(vec![Space::new(driver)]),
        limit: spaces,
    });
    let slot = (MACHINES.take(&shared))
        .map_err(|error: StartError| io::Error::other(error.to_string()))?;
    Ok(Machine { slot, spaces })
}

impl Machine {
    /// Returns the functions of this machine. Functions on a context accept the contexts of every
    /// machine.
    #[must_use]
    pub fn api(&self) -> Api {
        api::of_slot(self.slot)
    }

    /// Asks the device the questions that public sources leave open ([`question`]). Jobs that a
    /// board does not end take the driver's time-out each, and reset its cores.
    ///
    /// # Errors
    /// The driver's, if it has no memory.
    pub fn answers(&self) -> io::Result<Vec<question::Answer>> {
        // PANIC: dropping the machine frees its slot, and this one is not dropped.
        let shared = MACHINES.get(self.slot).expect("this machine's slot");
        let space = shared.space(0)?;
        let _core = lock(&space.cores[0]);
        question::ask(&space.driver)
    }

    /// Returns the number of its address spaces.
    #[must_use]
    pub fn spaces(&self) -> usize {
        self.spaces
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        MACHINES.free(self.slot);
    }
}
