//! Steps on the host: a pool of threads, of which the first to run a task also does the copy.

use std::sync::{Mutex, PoisonError};

use task_pool::{Pool, chunks};

use super::{Copy, MatrixPart};

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

    /// Returns `false`: the stand-in's unit belongs to no thread, and any thread of the pool computes
    /// the part of a step.
    #[must_use]
    pub const fn has_matrix_thread(&self) -> bool {
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
        self.step_with_matrix(copy, (), tasks, run);
    }

    /// Does the same, and computes `part` beside the tasks.
    ///
    /// # Panics
    /// As [`Self::step`].
    pub fn step_with_matrix<T: Send>(
        &self,
        copy: Option<Copy<'_>>,
        mut part: impl MatrixPart,
        tasks: &mut [T],
        run: impl Fn(&mut T) + Sync,
    ) {
        let (Some(pool), false) = (&self.0, tasks.is_empty()) else {
            copy.into_iter().for_each(Copy::run);
            part.run();
            return tasks.iter_mut().for_each(run);
        };
        // The first thread copies, and computes the matrix unit's part; the next ones take tasks.
        let first = Mutex::new(Some((copy, part)));
        pool.for_each(chunks(tasks, 1), |_, task| {
            let first = first.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some((copy, mut part)) = first {
                copy.into_iter().for_each(Copy::run);
                part.run();
            }
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

    /// A part that counts its runs.
    struct Count<'a>(&'a mut usize);

    impl MatrixPart for Count<'_> {
        fn is_empty(&self) -> bool {
            false
        }

        fn run(&mut self) {
            *self.0 += 1;
        }
    }

    #[test]
    fn steps_compute_the_matrix_part_once() {
        for threads in [1, 2, 5] {
            for count in [0, 1, 9] {
                let mut runs = 0;
                let mut tasks = vec![0; count];
                let part = Count(&mut runs);
                Engine::new(threads).step_with_matrix(None, part, &mut tasks, |task| *task += 1);
                assert_eq!((runs, tasks), (1, vec![1; count]));
            }
        }
    }

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
