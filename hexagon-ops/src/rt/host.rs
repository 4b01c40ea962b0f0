//! Steps on the host: a pool of threads, of which the first to run a task also does the copy. Or only
//! a record of the steps that would run.

use std::sync::{Mutex, PoisonError};

use task_pool::{Pool, chunks};

use super::{Copy, MatrixPart};

/// A pool of threads in place of the DSP's hardware threads and its DMA engine.
#[derive(Debug)]
pub struct Engine {
    pool: Option<Pool>,
    /// Steps in place of their execution, and the number of threads that they are cut for.
    recorder: Option<(usize, Mutex<Vec<StepRecord>>)>,
}

/// The work of a step, which the units would do side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRecord {
    /// Bytes that the DMA engine copies.
    pub copied_bytes: usize,
    /// Tasks of the vector threads.
    pub tasks: usize,
    /// Products of the matrix unit.
    pub tile_products: usize,
}

impl Engine {
    /// Returns an engine that records steps for `threads` threads, and executes none of them: the
    /// schedule of a large operation in no time.
    #[must_use]
    pub fn recording(threads: usize) -> Self {
        Self {
            pool: None,
            recorder: Some((threads, Mutex::default())),
        }
    }

    /// Returns the recorded steps, and forgets them.
    #[must_use]
    pub fn take_record(&self) -> Vec<StepRecord> {
        let record = self.recorder.as_ref().map(|(_, record)| {
            core::mem::take(&mut *record.lock().unwrap_or_else(PoisonError::into_inner))
        });
        record.unwrap_or_default()
    }

    /// Returns an engine of `threads` threads (at least 1), the caller's among them; one if the
    /// system refuses more.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        let pool = (threads > 1).then(|| Pool::new(threads, "hvx", &[]).ok());
        Self {
            pool: pool.flatten(),
            recorder: None,
        }
    }

    /// Returns the number of threads that run tasks.
    #[must_use]
    pub fn threads(&self) -> usize {
        match &self.recorder {
            Some((threads, _)) => *threads,
            None => self.pool.as_ref().map_or(1, Pool::threads),
        }
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
        if let Some((_, record)) = &self.recorder {
            let step = StepRecord {
                copied_bytes: copy.map_or(0, |copy| size_of_val(copy.from)),
                tasks: tasks.len(),
                tile_products: part.tile_products(),
            };
            return record
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(step);
        }
        let (Some(pool), false) = (&self.pool, tasks.is_empty()) else {
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
