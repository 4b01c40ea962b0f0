//! Steps on the DSP: in order, on the calling thread, copies by vector loads and stores.
//!
//! The signatures are those of the host; threads and the DMA engine change only what is in this file.

use super::Copy;
use crate::hvx;

/// The calling hardware thread.
#[derive(Debug)]
pub struct Engine(());

impl Engine {
    /// An engine of one thread, whatever is asked for.
    #[must_use]
    pub fn new(_threads: usize) -> Self {
        Self(())
    }

    /// Threads that run tasks.
    #[must_use]
    pub fn threads(&self) -> usize {
        1
    }

    /// Runs all copies and `run` on every task.
    pub fn step<T: Send>(
        &self,
        copies: &mut [Copy<'_>],
        tasks: &mut [T],
        run: impl Fn(&mut T) + Sync,
    ) {
        for copy in copies {
            for (to, from) in copy.to.iter_mut().zip(copy.from) {
                hvx::store(to, hvx::load(from));
            }
        }
        tasks.iter_mut().for_each(run);
    }
}
