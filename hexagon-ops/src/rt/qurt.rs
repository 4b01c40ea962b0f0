//! Steps on the DSP: copies run on the DMA engine of the calling hardware thread while that
//! thread and its workers run the tasks.

mod dma;
mod threads;

use core::sync::atomic::{AtomicBool, Ordering};

use self::dma::{Chain, Waited};
use self::threads::Team;
pub use self::threads::thread_priority;
use super::cache::{self, Access};
use super::workers::TaskList;
use super::{Copy, CopyRows, MatrixPart};

/// The calling hardware thread, its DMA engine, and the workers beside it.
#[derive(Debug)]
pub struct Engine {
    is_stuck: AtomicBool,
    /// A chain of copies is running.
    is_copying: AtomicBool,
    team: Team,
}

impl Engine {
    /// Returns an engine of `threads` threads, the caller's among them; of fewer if the system
    /// starts fewer, and of one while another engine has workers. An engine of several has one
    /// more, for the matrix unit, if the system starts it.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        Self {
            is_stuck: AtomicBool::new(false),
            is_copying: AtomicBool::new(false),
            team: Team::start(threads.saturating_sub(1)),
        }
    }

    /// Returns `true` if a copy did not finish in time. What was computed since is not to be
    /// trusted, and the DMA engine is not started again.
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

    /// Does the same, and computes `part` beside the tasks: on the matrix unit's thread, or first
    /// of all on the calling thread, while the workers begin with the tasks.
    pub fn step_with_matrix<T: Send>(
        &self,
        copy: Option<Copy<'_>>,
        mut part: impl MatrixPart,
        tasks: &mut [T],
        run: impl Fn(&mut T) + Sync,
    ) {
        let tasks = || {
            // One thread makes no list, so that the compiler can join a task with what is around
            // it.
            if self.team.is_empty() || part.is_empty() && tasks.len() < 2 {
                part.run();
                tasks.iter_mut().for_each(run);
            } else {
                TaskList::new(tasks, run).with_step(|step| self.team.run(step, &mut part));
            }
        };
        match copy {
            None => tasks(),
            Some(copy) => self.beside(&mut [CopyRows::from(copy)], tasks),
        }
    }

    /// Makes the copies while `run` runs, and returns when both are done. Steps in `run` have no
    /// copies for the DMA engine: theirs are made by loads and stores.
    #[inline(always)]
    pub fn beside<R>(&self, copies: &mut [CopyRows<'_>], run: impl FnOnce() -> R) -> R {
        let is_free = !self.is_stuck() && !self.is_copying.swap(true, Ordering::Relaxed);
        let mut chain = Chain::new();
        if is_free {
            // SAFETY:
            // - `chain` lives on this stack until `wait` below, which every path reaches: nothing
            //   here unwinds.
            // - `copies` borrows both sides until then, and no other chain of this thread is
            //   running, as `is_copying` says.
            // - A descriptor that did not finish was stopped, and no other was started since.
            unsafe { chain.start(copies) };
        } else {
            chain.leave_out_all();
        }
        let result = run();
        let waited = chain.wait();
        if is_free {
            self.is_copying.store(false, Ordering::Relaxed);
        }
        if waited == Waited::Stuck {
            self.is_stuck.store(true, Ordering::Relaxed);
        }
        if waited != Waited::Done || !chain.is_complete() {
            by_loads(&chain, waited, copies);
        }
        result
    }
}

/// Copies by loads and stores what the engine did not.
#[cold]
fn by_loads(chain: &Chain, waited: Waited, copies: &mut [CopyRows<'_>]) {
    for (number, copy) in copies.iter_mut().enumerate() {
        if waited != Waited::Done || chain.leaves_out(number) {
            // The loads go through the cache, which may hold older bytes than the other processor
            // wrote. Short rows are copied by scalar loads.
            copy.by_loads(|row| cache::invalidate(row.as_ptr(), row.len(), Access::Scalar));
        }
    }
}
