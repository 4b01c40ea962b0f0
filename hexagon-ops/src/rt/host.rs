//! Steps on the host: a pool of threads; a copy is a task like the others.

use rayon::{ThreadPool, ThreadPoolBuilder};

use super::Copy;

/// Threads that stand for the DSP's hardware threads and its DMA engine.
#[derive(Debug)]
pub struct Engine {
    /// None with a single thread.
    pool: Option<ThreadPool>,
    threads: usize,
}

impl Engine {
    /// An engine of `threads` threads (at least 1), the caller's among them; fewer if the system refuses more.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        let pool = (threads > 1)
            .then(|| {
                ThreadPoolBuilder::new()
                    .num_threads(threads - 1)
                    .thread_name(|i| format!("hvx-{i}"))
                    .build()
                    .ok()
            })
            .flatten();
        Self {
            threads: if pool.is_some() { threads } else { 1 },
            pool,
        }
    }

    /// Threads that run tasks.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Runs the copy and `run` on every task, and returns when all are done. Task 0 runs on the calling thread.
    ///
    /// # Panics
    /// If the two sides of the copy differ in length, or when `run` does.
    pub fn step<T: Send>(
        &self,
        copy: Option<Copy<'_>>,
        tasks: &mut [T],
        run: impl Fn(&mut T) + Sync,
    ) {
        let Some(pool) = &self.pool else {
            copy.into_iter().for_each(Copy::run);
            return tasks.iter_mut().for_each(run);
        };
        let run = &run;
        pool.in_place_scope(|scope| {
            if let Some(copy) = copy {
                scope.spawn(move |_| copy.run());
            }
            let mut tasks = tasks.iter_mut();
            let first = tasks.next();
            for task in tasks {
                scope.spawn(move |_| run(task));
            }
            first.into_iter().for_each(run);
        });
    }
}

impl Copy<'_> {
    /// Copies now.
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
            let mut to = vec![Line::ZERO; 9];
            let mut tasks: Vec<usize> = (0..23).collect();
            engine.step(
                Some(Copy {
                    from: &from,
                    to: &mut to,
                }),
                &mut tasks,
                |task| *task *= 2,
            );
            assert_eq!(tasks, (0..23).map(|i| 2 * i).collect::<Vec<_>>());
            assert_eq!(to, from);
        }
    }
}
