//! The machine as a kernel's driver uses it: threads and copies in steps, and a share of VTCM.
//!
//! A driver runs in *steps*. In one step, a copy from DDR to VTCM and a list of tasks run at the
//! same time; the step ends when all are done. Two buffers that swap between steps therefore
//! overlap copying, dequantizing and multiplying without any other synchronization, and safe
//! borrows prove that no task writes memory that another one reads:
//!
//! ```text
//! step      0        1           2           3
//! copy      group 0  group 1     group 2     …
//! prepare            group 0     group 1     group 2
//! multiply                       group 0     group 1
//! ```
//!
//! Copies that last longer than one step overlap all steps of a closure ([`Engine::beside`]): a
//! chain of descriptors, started once and awaited once.

mod arena;
pub use arena::{Arena, tiles_of_lines};

mod copy;
pub use copy::{Copy, CopyRows, CopyShape};

mod descriptor;
use descriptor::RowFields;

mod stage;
pub use stage::{Admission, Stage};

#[expect(unsafe_code, reason = "tasks write parts of the same rows")]
mod columns;
pub use columns::SharedColumns;

#[cfg_attr(
    target_arch = "hexagon",
    expect(unsafe_code, reason = "cache operations are instructions")
)]
pub mod cache;
#[expect(unsafe_code, reason = "arguments of remote calls are addresses")]
pub mod invoke;
#[expect(unsafe_code, reason = "mapped memory becomes slices here")]
pub mod memory;
#[expect(unsafe_code, reason = "the ring is memory that two processors write")]
pub mod shared;

#[cfg(any(target_arch = "hexagon", test))]
#[expect(unsafe_code, reason = "tasks are lent to threads by address")]
mod workers;

#[cfg(not(target_arch = "hexagon"))]
mod host;
#[cfg(not(target_arch = "hexagon"))]
pub use host::{Engine, StepRecord};

#[cfg(target_arch = "hexagon")]
#[expect(unsafe_code, reason = "functions in assembly")]
mod bytes;
#[cfg(target_arch = "hexagon")]
#[expect(unsafe_code, reason = "the DMA engine and threads work on addresses")]
mod qurt;
#[cfg(target_arch = "hexagon")]
pub use qurt::{Engine, thread_priority};

/// The part of a step that the matrix unit computes while the step's tasks run.
pub trait MatrixPart: Send {
    /// Returns `true` if there is nothing to compute.
    fn is_empty(&self) -> bool;

    /// Returns the number of products of two tiles.
    fn tile_products(&self) -> usize {
        0
    }

    /// Computes the part, on the thread that holds the unit.
    fn run(&mut self);
}

/// Code for the thread that holds the matrix unit.
struct OnUnit<F>(F);

impl<F: FnMut() + Send> MatrixPart for OnUnit<F> {
    fn is_empty(&self) -> bool {
        false
    }

    fn run(&mut self) {
        (self.0)();
    }
}

/// Returns `true` if one descriptor of the DMA engine describes such a copy. Loads and stores make
/// the other copies.
#[must_use]
pub fn has_descriptor(shape: &CopyShape) -> bool {
    RowFields::NATIVE.fit(shape)
}

impl Engine {
    /// Computes a part without any task at the same time.
    pub fn compute(&self, part: impl MatrixPart) {
        self.step_with_matrix(None, part, &mut [(); 0], |()| ());
    }

    /// Runs code on the thread that computes the matrix unit's parts of steps. For instance, a lock
    /// on the unit belongs to the thread that locks it.
    pub fn on_matrix_thread(&self, run: impl FnMut() + Send) {
        self.compute(OnUnit(run));
    }
}

/// No part.
impl MatrixPart for () {
    fn is_empty(&self) -> bool {
        true
    }

    fn run(&mut self) {}
}
