//! Steps on the host: a pool of threads, of which the first to run a task also does the copy.

use std::sync::{Mutex, PoisonError};

use task_pool::{Pool, chunks};

use super::Copy;

/// A pool of threads in place of the DSP's hardware threads and its DMA engine.
#[derive(Debug)]
pub struct Engine(Option<Pool>);

impl Engine {
    /// Returns an engine of `threads` threads (at least 1), the caller's among them; one if the
    /// system refuses more.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        Self(
            (threads > 1)
                .then(|| Pool::new(threads, "hvx", &[]).ok())
                .flatten(),
        )
    }

    /// Returns the number of threads that run tasks.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.0.as_ref().map_or(1, Pool::threads)
    }

    /// Returns `true` if a copy did not finish in time: never on the host, which has no DMA engine.
    #[must_use]
    pub const fn is_stuck(&self) -> bool {
        false
    }

    /// Runs the copy and `run` on every task, and returns when all are done.
    ///
    /// # Panics
    /// If the two sides of the copy differ in length, or when `run` does.
    pub fn step<T: Send>(
        &self,
        copy: Option<Copy<'_>>,
        tasks: &mut [T],
        run: impl Fn(&mut T) + Sync,
    ) {
        let (Some(pool), false) = (&self.0, tasks.is_empty()) else {
            copy.into_iter().for_each(Copy::run);
            return tasks.iter_mut().for_each(run);
        };
        let copy = Mutex::new(copy);
        pool.for_each(chunks(tasks, 1), |_, task| {
            let first = copy.lock().unwrap_or_else(PoisonError::into_inner).take();
            first.into_iter().for_each(Copy::run);
            task.iter_mut().for_each(&run);
        });
    }
}

impl Copy<'_> {
    /// Copies the lines immediately.
    fn run(self) {
        self.to.copy_from_slice(self.from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Line;

    #[test]
    fn steps_finish_every_task_and_copy() {
        for threads in [1, 2, 5] {
            let engine = Engine::new(threads);
            let from = vec![Line([7; 128]); 9];
            for count in [23, 0] {
                let mut to = vec![Line::ZERO; 9];
                let mut tasks: Vec<usize> = (0..count).collect();
                let copy = Copy {
                    from: &from,
                    to: &mut to,
                };
                engine.step(Some(copy), &mut tasks, |task| *task *= 2);
                assert_eq!(tasks, (0..count).map(|i| 2 * i).collect::<Vec<_>>());
                assert_eq!(to, from);
            }
        }
    }
}
