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

/// The calling hardware thread, its DMA engine, and the worker threads.
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

    /// Returns `true` if a copy did not finish in time. Everything computed since may be wrong, and
    /// the DMA engine is not started again.
    #[must_use]
    pub fn is_stuck(&self) -> bool {
        self.is_stuck.load(Ordering::Relaxed)
    }

    /// Returns the number of threads that run tasks.
    #[must_use]
    pub fn threads(&self) -> usize {
        1 + self.team.len()
    }

    /// Returns `true` if a thread in addition to [`Self::threads`] computes the parts for the
    /// matrix unit.
    #[must_use]
    pub fn has_matrix_thread(&self) -> bool {
        self.team.has_matrix_thread()
    }

    /// Runs the copy, and `run` for every task; returns when all are done.
    pub fn step<T: Send>(
        &self,
        copy: Option<Copy<'_>>,
        tasks: &mut [T],
        run: impl Fn(&mut T) + Sync,
    ) {
        self.step_with_matrix(copy, (), tasks, run);
    }

    /// Does the same, and computes `part` at the same time as the tasks: on the matrix unit's
    /// thread, or on the calling thread before its tasks, while the workers begin with theirs.
    pub fn step_with_matrix<T: Send>(
        &self,
        copy: Option<Copy<'_>>,
        mut part: impl MatrixPart,
        tasks: &mut [T],
        run: impl Fn(&mut T) + Sync,
    ) {
        let tasks = || {
            // With one thread there is no task list, so that the compiler can inline the task.
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

    /// Makes the copies while `run` runs, and returns when both are done. The DMA engine is then
    /// not available for copies of steps in `run`, which are made by loads and stores.
    #[inline(always)]
    pub fn beside<R>(&self, copies: &mut [CopyRows<'_>], run: impl FnOnce() -> R) -> R {
        let is_free = !self.is_stuck() && !self.is_copying.swap(true, Ordering::Relaxed);
        let mut chain = Chain::new();
        if is_free {
            // SAFETY:
            // - `chain` lives on this stack until `wait` below, which every path reaches: nothing
            //   here unwinds.
            // - `copies` borrows both sides until then. No other chain of this thread is running,
            //   which `is_copying` tracks.
            // - A descriptor that did not finish was stopped, and no other one was started since.
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

/// Does the copies that the engine has not done, by loads and stores.
#[cold]
fn by_loads(chain: &Chain, waited: Waited, copies: &mut [CopyRows<'_>]) {
    for (number, copy) in copies.iter_mut().enumerate() {
        if waited != Waited::Done || chain.leaves_out(number) {
            // These loads go through the cache, which may hold older bytes than the other processor
            // wrote. Short rows are copied by scalar loads.
            copy.by_loads(|row| cache::invalidate(row.as_ptr(), row.len(), Access::Scalar));
        }
    }
}
