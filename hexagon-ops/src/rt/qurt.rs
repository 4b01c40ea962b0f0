//! Steps on the DSP: the copy runs on the DMA engine of the calling hardware thread while that
//! thread and its workers run the tasks.

mod dma;
mod threads;

use core::sync::atomic::{AtomicBool, Ordering};

use self::dma::{Descriptor, Waited};
use self::threads::Team;
use super::workers::TaskList;
use super::{Copy, MatrixPart, cache};
use crate::hvx;

/// The calling hardware thread, its DMA engine, and the workers beside it.
#[derive(Debug)]
pub struct Engine {
    is_stuck: AtomicBool,
    team: Team,
}

impl Engine {
    /// Returns an engine of `threads` threads, the caller's among them; of fewer if the system
    /// starts fewer, and of one while another engine has workers. An engine of several has one more,
    /// for the matrix unit, if the system starts it.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        Self {
            is_stuck: AtomicBool::new(false),
            team: Team::start(threads.saturating_sub(1)),
        }
    }

    /// Returns `true` if a copy did not finish in time. What was computed since is not to be trusted,
    /// and the DMA engine is not started again.
    #[must_use]
    pub fn is_stuck(&self) -> bool {
        self.is_stuck.load(Ordering::Relaxed)
    }

    /// Returns the number of threads that run tasks.
    #[must_use]
    pub fn threads(&self) -> usize {
        1 + self.team.len()
    }

    /// Returns `true` if a thread beside [`Self::threads`] computes the parts for the matrix unit.
    #[must_use]
    pub fn has_matrix_thread(&self) -> bool {
        self.team.has_matrix_thread()
    }

    /// Runs the copy and `run` on every task, and returns when all are done.
    pub fn step<T: Send>(
        &self,
        copy: Option<Copy<'_>>,
        tasks: &mut [T],
        run: impl Fn(&mut T) + Sync,
    ) {
        self.step_with_matrix(copy, (), tasks, run);
    }

    /// Does the same, and computes `part` beside the tasks: on the matrix unit's thread, or first of
    /// all on the calling thread, while the workers begin with the tasks.
    pub fn step_with_matrix<T: Send>(
        &self,
        copy: Option<Copy<'_>>,
        mut part: impl MatrixPart,
        tasks: &mut [T],
        run: impl Fn(&mut T) + Sync,
    ) {
        let mut descriptor = Descriptor::new();
        let mut copy = copy;
        let started = match &mut copy {
            // SAFETY:
            // - `descriptor` lives on this stack until `wait` below, which every path reaches:
            //   nothing here unwinds.
            // - `copy` borrows both sides until then, and steps of one thread do not nest.
            // - A descriptor that did not finish was stopped, and no other was started since.
            Some(copy) if !self.is_stuck() => unsafe { descriptor.start(copy) }.is_some(),
            _ => false,
        };
        // One thread makes no list, so that the compiler can join a task with what is around it.
        if self.team.is_empty() || part.is_empty() && tasks.len() < 2 {
            part.run();
            tasks.iter_mut().for_each(run);
        } else {
            TaskList::new(tasks, run).with_step(|step| self.team.run(step, &mut part));
        }
        let waited = if started {
            descriptor.wait()
        } else {
            Waited::Failed
        };
        if waited == Waited::Stuck {
            self.is_stuck.store(true, Ordering::Relaxed);
        }
        if let (Some(copy), true) = (copy, waited != Waited::Done) {
            // The loads below go through the cache, which may hold older bytes than the other
            // processor wrote.
            cache::invalidate(copy.from.as_ptr().cast(), size_of_val(copy.from));
            hvx::copy(copy.to, copy.from);
        }
    }
}
