//! A pool of threads for short bursts of work, which spins briefly and then sleeps, and memory that
//! its tasks share. The host's part of an NPU call runs on it, and so do the kernels of the
//! stand-in for a DSP.
//!
//! ```text
//! caller   publish n tasks -> wake who sleeps -> take tasks -------------------> spin, then sleep until all are done
//! worker   spin, then sleep ------------------> take tasks -> report the last -> spin, then sleep
//! ```
//!
//! A run costs no system call while the workers still spin, and it allocates nothing. Each thread
//! takes the next task when it has finished one, so the other threads run the tasks of a thread
//! that is late.
#![expect(
    unsafe_code,
    reason = "a task of the caller's lifetime goes to threads that outlive it"
)]

use std::any::Any;
use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

mod part;

use os::threads::{Cpus, current_cpu};
pub use part::{Divisible, SliceChunks, chunks};

/// Time for which a thread spins before it sleeps, if there is a CPU for each thread of the pool.
///
/// Long enough for the time between two multiplications of one graph split, short enough to leave
/// the CPUs to the threads of ggml in the next split: a run of the vendor's library lasts 33 us.
///
/// SOURCE: `rknn_matmul_run` 32.9 us on RK3588, unimatrix099's fork of rk-llama.cpp.
const SPIN: Duration = Duration::from_micros(20);

/// Time for which the caller spins for the last tasks before it sleeps. The cores of an NPU finish
/// within a few microseconds of each other; a task that is slower waits for a CPU, which may be the
/// one that the caller spins on.
const SPIN_AT_END: Duration = Duration::from_micros(5);

/// Reads of the shared counter between two reads of the clock.
const SPINS_PER_LOOK: u32 = 16;

/// A pool of threads that wait for tasks. Dropping it ends the threads.
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
///
/// let pool = task_pool::Pool::new(2, "example", &[])?;
/// let sum = AtomicUsize::new(0);
/// pool.run(10, &|i| {
///     sum.fetch_add(i, Ordering::Relaxed);
/// });
/// assert_eq!(sum.into_inner(), 45);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Pool {
    shared: Arc<PoolState>,
    workers: Vec<JoinHandle<()>>,
    /// Held during a run.
    turn: Mutex<()>,
}

/// A counter alone in its cache lines: 64 bytes on Cortex-A, and pairs of lines are fetched
/// together on x86-64.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Counter(AtomicUsize);

/// State that the threads of a pool share.
#[derive(Debug)]
struct PoolState {
    /// Number of the run's tasks that no thread has started. The next thread takes the task with
    /// the number below.
    remaining: Counter,
    /// Number of the run's tasks that are not done.
    unfinished: Counter,
    /// Address of the run's task, a `&(dyn Fn(usize) + Sync)`, as long as `unfinished` is not 0.
    task: AtomicPtr<TaskRef<'static>>,
    /// Payload of the first task that panicked.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// The CPU of the caller at the start of the run, or [`NO_CPU`].
    caller_cpu: AtomicUsize,
    /// Number of workers that sleep, or are about to: `remaining` was 0 after they counted
    /// themselves.
    asleep: AtomicUsize,
    work: (Mutex<()>, Condvar),
    /// `true` if the caller sleeps, or is about to.
    caller_asleep: AtomicBool,
    done: (Mutex<()>, Condvar),
    stop: AtomicBool,
    /// `true` if there are fewer CPUs than threads.
    crowded: bool,
}

/// Marks an unknown CPU.
const NO_CPU: usize = usize::MAX;

/// The closure that [`Pool::run`] runs.
type TaskRef<'a> = &'a (dyn Fn(usize) + Sync);

impl Pool {
    /// Starts a pool of `threads` threads. The caller of [`Pool::run`] is one of them, so one less
    /// is started.
    ///
    /// - `name`: name of the threads, followed by a number
    /// - `cpus`: CPUs to which the started threads are bound, as far as the process may use them;
    ///   all for an empty list
    ///
    /// # Errors
    /// The system's error if it starts no more threads.
    pub fn new(threads: usize, name: &str, cpus: &[usize]) -> std::io::Result<Self> {
        // If threads share a CPU, a spinning thread takes time from one that has work.
        let crowded = std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() < threads);
        let shared = Arc::new(PoolState {
            remaining: Counter::default(),
            unfinished: Counter::default(),
            task: AtomicPtr::default(),
            panic: Mutex::default(),
            caller_cpu: AtomicUsize::new(NO_CPU),
            asleep: AtomicUsize::new(0),
            work: Default::default(),
            caller_asleep: AtomicBool::new(false),
            done: Default::default(),
            stop: AtomicBool::new(false),
            crowded,
        });
        // The pool is created before its threads, so that dropping it ends them if a later one does
        // not start.
        let mut pool = Self {
            shared,
            workers: Vec::new(),
            turn: Mutex::default(),
        };
        for index in 1..threads {
            let (shared, cpus) = (Arc::clone(&pool.shared), cpus.to_vec());
            let builder = std::thread::Builder::new().name(format!("{name}-{index}"));
            let life = move || shared.worker_loop(&Cpus::of_thread(&cpus));
            pool.workers.push(builder.spawn(life)?);
        }
        Ok(pool)
    }

    /// Returns the number of threads that run tasks, including the caller.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task(i)` once for each `i` below `n`, on any of the threads and in any order, and
    /// returns when all calls have returned. If the pool is in use, by another thread or by a task
    /// that makes this call, the caller runs all tasks itself.
    ///
    /// # Panics
    /// If a task panics: with the payload of the first one, after all tasks are done.
    pub fn run(&self, n: usize, task: TaskRef) {
        let turn = match self.turn.try_lock() {
            Ok(turn) => Some(turn),
            Err(TryLockError::Poisoned(turn)) => Some(turn.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        if n <= 1 || self.workers.is_empty() || turn.is_none() {
            (0..n).for_each(task);
            return;
        }
        let shared = &*self.shared;
        let cpu = current_cpu().unwrap_or(NO_CPU);
        shared.caller_cpu.store(cpu, Ordering::Relaxed);
        shared.unfinished.0.store(n, Ordering::Relaxed);
        let address = (&raw const task).cast_mut().cast::<TaskRef<'static>>();
        shared.task.store(address, Ordering::Relaxed);
        // The release makes the stores above visible to every thread that takes a task.
        shared.remaining.0.store(n, Ordering::Release);
        // Pairs with the fence in `sleep`. This side writes the tasks and then reads the number of
        // sleepers; a worker counts itself and then looks for tasks. So a worker that is not
        // counted here sees these tasks before it sleeps.
        fence(Ordering::SeqCst);
        shared.wake(n - 1, self.workers.len());
        shared.take_all();
        shared.wait();
        let panic = lock(&shared.panic).take();
        drop(turn);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Calls `task(i, part i)` once for each part, as [`Pool::run`] does.
    ///
    /// # Panics
    /// As [`Pool::run`].
    pub fn for_each<P: Divisible>(&self, parts: P, task: impl Fn(usize, P::Part) + Sync) {
        self.run(parts.count(), &|index| {
            // SAFETY: `run` calls this closure once for each index below the count, and `parts`
            // lives until it returns.
            let part = unsafe { parts.part(index) };
            task(index, part);
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        // A worker that read `stop` before it was set holds the lock until it waits. Locking here
        // ensures that it waits before it is notified.
        drop(lock(&self.shared.work.0));
        self.shared.work.1.notify_all();
        for worker in self.workers.drain(..) {
            // Panics of tasks are caught, so workers do not panic. If one did, there is no caller
            // to report it to.
            let _ = worker.join();
        }
    }
}

impl PoolState {
    /// Runs tasks until the pool stops: the body of a worker.
    fn worker_loop(&self, cpus: &Cpus) {
        while !self.stop.load(Ordering::SeqCst) {
            self.take_all();
            let found = || self.remaining.0.load(Ordering::Relaxed) > 0;
            let caller_cpu = || self.caller_cpu.load(Ordering::Relaxed);
            let in_the_way = || current_cpu().is_some_and(|cpu| cpu == caller_cpu());
            if !self.spin_until(SPIN, found, in_the_way) {
                // The system may wake a worker on the caller's CPU and run it there first. It would
                // then spin in the caller's time, and the two would not run at the same time.
                if in_the_way() {
                    cpus.leave(caller_cpu());
                }
                self.sleep();
            }
        }
    }

    /// Spins until `condition` is true. Returns `false` if it was time to sleep, or if `give_up`
    /// was true, before.
    fn spin_until(
        &self,
        time: Duration,
        condition: impl Fn() -> bool,
        give_up: impl Fn() -> bool,
    ) -> bool {
        if condition() {
            return true;
        }
        if self.crowded || give_up() {
            return false;
        }
        let start = Instant::now();
        loop {
            for _ in 0..SPINS_PER_LOOK {
                if condition() {
                    return true;
                }
                spin_loop();
            }
            if start.elapsed() >= time || give_up() {
                return false;
            }
        }
    }

    fn sleep(&self) {
        let mut guard = lock(&self.work.0);
        self.asleep.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        while self.remaining.0.load(Ordering::Relaxed) == 0 && !self.stop.load(Ordering::SeqCst) {
            guard = (self.work.1.wait(guard)).unwrap_or_else(PoisonError::into_inner);
        }
        self.asleep.fetch_sub(1, Ordering::Relaxed);
    }

    /// Wakes as many workers as are missing for `wanted` to be awake.
    fn wake(&self, wanted: usize, workers: usize) {
        let asleep = self.asleep.load(Ordering::Relaxed);
        let missing = wanted.saturating_sub(workers - asleep).min(asleep);
        if missing > 0 {
            // A worker that counted itself but has not seen the tasks holds the lock until it
            // waits. Locking here ensures that it waits before it is notified.
            drop(lock(&self.work.0));
            (0..missing).for_each(|_| self.work.1.notify_one());
        }
    }

    /// Takes and runs tasks until none remains.
    fn take_all(&self) {
        let take = |remaining: usize| remaining.checked_sub(1);
        // Acquires the stores that the run released with its number of tasks. Later changes of
        // `remaining` continue the same release sequence.
        while let Ok(remaining) =
            (self.remaining.0).fetch_update(Ordering::Acquire, Ordering::Relaxed, take)
        {
            // A task was taken and is not done, so its run is still waiting, and the address
            // belongs to that run.
            let address = self.task.load(Ordering::Relaxed);
            // SAFETY: the run wrote the address before `remaining`. Its stack frame, and the
            // function that the reference there points to, live until `unfinished` is 0, and this
            // task is counted until the end of this block.
            let task = unsafe { *address };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| task(remaining - 1))) {
                lock(&self.panic).get_or_insert(panic);
            }
            self.finish_one();
        }
    }

    fn finish_one(&self) {
        // Releases the task's writes to the caller, which acquires them when it sees 0.
        let last = self.unfinished.0.fetch_sub(1, Ordering::AcqRel) == 1;
        // Pairs with the fence in `wait`: this side changes the count and then looks for a sleeper,
        // the caller sets its flag and then reads the count.
        fence(Ordering::SeqCst);
        if last && self.caller_asleep.load(Ordering::Relaxed) {
            drop(lock(&self.done.0));
            self.done.1.notify_all();
        }
    }

    /// Returns when all tasks of the run are done.
    fn wait(&self) {
        let done = || self.unfinished.0.load(Ordering::Acquire) == 0;
        if self.spin_until(SPIN_AT_END, done, || false) {
            return;
        }
        let mut guard = lock(&self.done.0);
        self.caller_asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        while !done() {
            guard = (self.done.1.wait(guard)).unwrap_or_else(PoisonError::into_inner);
        }
        self.caller_asleep.store(false, Ordering::Relaxed);
    }
}

/// Locks a mutex, also after a panic elsewhere: the data under these locks is never half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
