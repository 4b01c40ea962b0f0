//! Steps on the host: a pool of threads, where the first thread to run a task also does the copy.
//! An engine can also only record the steps that would run.

use std::sync::{Mutex, MutexGuard, PoisonError};

use task_pool::{Pool, chunks};

use super::{Copy, CopyRows, MatrixPart};

/// A pool of threads in place of the DSP's hardware threads and its DMA engine.
#[derive(Debug)]
pub struct Engine {
    pool: Option<Pool>,
    /// Records steps instead of executing them, for this number of threads.
    recorder: Option<(usize, Mutex<Vec<StepRecord>>)>,
}

/// The work of a step, which the units of a device do at the same time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepRecord {
    /// Bytes that the DMA engine copies.
    pub copied_bytes: usize,
    /// Tasks of the vector threads.
    pub tasks: usize,
    /// Products of the matrix unit.
    pub tile_products: usize,
    /// Number of steps that copies of [`Engine::beside`] overlap; these steps follow this record.
    pub steps_beside: usize,
}

impl Engine {
    /// Returns an engine that records steps for `threads` threads and executes none of them. So it
    /// gives the schedule of a large operation at once.
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
        let record = self.recorder.as_ref();
        let record = record.map(|(_, record)| core::mem::take(&mut *locked(record)));
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

    /// Returns `false`: in the stand-in any thread of the pool computes the matrix unit's part of a
    /// step.
    #[must_use]
    pub const fn has_matrix_thread(&self) -> bool {
        false
    }

    /// Runs the copy, and `run` for every task; returns when all are done.
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

    /// Does the same, and computes `part` at the same time as the tasks.
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
                steps_beside: 0,
            };
            return locked(record).push(step);
        }
        let (Some(pool), false) = (&self.pool, tasks.is_empty()) else {
            copy.into_iter().for_each(run_copy);
            part.run();
            return tasks.iter_mut().for_each(run);
        };
        // The first thread copies and does the matrix unit's part; the other threads run tasks.
        let first = Mutex::new(Some((copy, part)));
        pool.for_each(chunks(tasks, 1), |_, task| {
            let first = locked(&first).take();
            if let Some((copy, mut part)) = first {
                copy.into_iter().for_each(run_copy);
                part.run();
            }
            task.iter_mut().for_each(&run);
        });
    }

    /// Makes the copies and calls `run`; returns when both are done. On the host the copies come
    /// first.
    pub fn beside<R>(&self, copies: &mut [CopyRows<'_>], run: impl FnOnce() -> R) -> R {
        let Some((_, record)) = &self.recorder else {
            copies.iter_mut().for_each(|copy| copy.by_loads(|_| ()));
            return run();
        };
        let index = locked(record).len();
        locked(record).push(StepRecord {
            copied_bytes: copies.iter().map(CopyRows::bytes).sum(),
            ..StepRecord::default()
        });
        let result = run();
        let mut steps = locked(record);
        let steps_beside = steps.len() - index - 1;
        if let Some(step) = steps.get_mut(index) {
            step.steps_beside = steps_beside;
        }
        result
    }
}

/// Locks a value, also after a panic elsewhere, which leaves the value complete.
fn locked<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Copies the lines immediately.
fn run_copy(Copy { from, to }: Copy<'_>) {
    to.copy_from_slice(from);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Line;
    use crate::rt::CopyShape;

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
    #[test]
    fn copies_beside_steps_are_made_and_recorded() {
        for threads in [1, 2, 5] {
            let from: Vec<u8> = (0..200).collect();
            let (mut first, mut second) = ([0; 64], [0; 30]);
            let shapes = [[3, 7, 50, 16], [1, 30, 30, 30]];
            let [rows, linear] =
                shapes.map(|[rows, row_bytes, from_stride, to_stride]| CopyShape {
                    rows,
                    row_bytes,
                    from_stride,
                    to_stride,
                });
            let mut tasks = vec![0; 9];
            let run = |engine: &Engine, tasks: &mut [usize], to: [&mut [u8]; 2]| {
                let [first, second] = to;
                let mut copies = [
                    CopyRows::new(&from, first, rows).unwrap(),
                    CopyRows::new(&from[100..], second, linear).unwrap(),
                ];
                engine.beside(&mut copies, || {
                    engine.step(None, tasks, |task| *task += 1);
                    engine.step(None, &mut [0; 4], |task| *task += 1);
                    "done"
                })
            };
            let engine = Engine::new(threads);
            assert_eq!(run(&engine, &mut tasks, [&mut first, &mut second]), "done");
            assert_eq!(tasks, [1; 9]);
            for row in 0..3 {
                assert_eq!(first[16 * row..][..7], from[50 * row..][..7]);
            }
            assert_eq!(second, from[100..130]);
            let engine = Engine::recording(threads);
            assert_eq!(run(&engine, &mut tasks, [&mut first, &mut second]), "done");
            let record = engine.take_record();
            let counts = record
                .iter()
                .map(|step| (step.copied_bytes, step.tasks, step.steps_beside));
            let want = [(51, 0, 2), (0, 9, 0), (0, 4, 0)];
            assert_eq!(counts.collect::<Vec<_>>(), want);
        }
    }
}
