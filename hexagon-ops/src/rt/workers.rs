//! Threads that run the tasks of a step together with the thread that makes the step.
//!
//! ```text
//! caller                                        worker
//! untaken = unfinished = n, steps += 1          polls `steps`, later sleeps on it
//! wakes sleeping workers                        takes tasks while `untaken` > 0
//! own work, then tasks while `untaken` > 0      unfinished -= 1 after each
//! polls `unfinished`, later sleeps on it        the last one wakes the caller
//! ```
//!
//! The matrix unit belongs to one thread. Where it is a thread beside the others, that thread is
//! the only worker of a second [`Workers`], and takes the parts of steps for the unit from there
//! ([`Workers::run_on_workers`]).
//!
//! This file knows no operating system: [`ThreadSystem`] has the three functions that it needs. The
//! DSP's threads are in `qurt`; the tests below use the host's.

use core::marker::PhantomData;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering, fence};

/// Functions of an operating system.
pub trait ThreadSystem {
    /// Returns when another thread calls [`Self::wake`] with `word`, immediately if `word` does not
    /// have `value`. It may return earlier.
    fn wait(word: &AtomicU32, value: u32);

    /// Wakes at most `count` threads that wait for `word`.
    fn wake(word: &AtomicU32, count: u32);

    /// Lets other threads of the core run for a few cycles.
    fn pause();
}

/// Polls of a worker before it sleeps: with a pause of 64 cycles in each, about 50 µs at 1.5 GHz.
/// Steps of one submission follow each other within that time.
///
/// SOURCE: a guess to be measured on a device; ggml-hexagon's workers poll as long as a batch runs.
const POLLS: u32 = 1 << 10;

/// A word in a cache line that holds nothing else.
#[derive(Debug)]
#[repr(align(128))]
struct Alone(AtomicU32);

/// The state that the caller and its workers share.
#[derive(Debug)]
pub struct Workers {
    /// Number of steps so far; it also changes at the end. Workers without a task wait for it.
    steps: Alone,
    /// Tasks of the step that no thread has taken.
    untaken: Alone,
    /// Tasks of the step that are not done. The caller waits for it.
    unfinished: Alone,
    /// Workers that sleep, or are about to.
    asleep: AtomicU32,
    is_caller_asleep: AtomicBool,
    is_stopping: AtomicBool,
    is_busy: AtomicBool,
    /// Address of the [`RunningStep`].
    step: AtomicPtr<()>,
}

impl Workers {
    /// Returns the state without any worker.
    pub const fn new() -> Self {
        Self {
            steps: Alone(AtomicU32::new(0)),
            untaken: Alone(AtomicU32::new(0)),
            unfinished: Alone(AtomicU32::new(0)),
            asleep: AtomicU32::new(0),
            is_caller_asleep: AtomicBool::new(false),
            is_stopping: AtomicBool::new(false),
            is_busy: AtomicBool::new(false),
            step: AtomicPtr::new(core::ptr::null_mut()),
        }
    }

    /// Runs the tasks of a step, and returns when all are done. The calling thread runs `beside`
    /// first, while the workers begin with the tasks. It also runs all tasks of a step that another
    /// thread or a task makes meanwhile.
    ///
    /// The list behind `step` is in use here only, and for the first time.
    pub fn run<S: ThreadSystem>(&self, step: &RunningStep<'_>, beside: impl FnOnce()) {
        let count = step.count;
        if count == 0 {
            return beside();
        }
        if self.is_busy.swap(true, Ordering::Acquire) {
            beside();
            // SAFETY: each number once.
            return (0..count).for_each(|number| unsafe { call(step, number) });
        }
        self.publish::<S>(step);
        beside();
        while let Some(left) = self.take() {
            // SAFETY: a number is taken once.
            unsafe { call(step, count - left) };
            self.unfinished.0.fetch_sub(1, Ordering::AcqRel);
        }
        self.wait_for_workers::<S>();
        self.is_busy.store(false, Ordering::Release);
    }

    /// Runs the tasks of a step on workers only, of which there is at least one, and `beside` on
    /// the calling thread meanwhile. Returns when all are done. One thread at a time calls this,
    /// and not from within a task.
    pub fn run_on_workers<S: ThreadSystem>(&self, step: &RunningStep<'_>, beside: impl FnOnce()) {
        self.publish::<S>(step);
        beside();
        self.wait_for_workers::<S>();
    }

    /// Runs tasks until [`Self::stop`]: the body of a worker.
    pub fn work<S: ThreadSystem>(&self) {
        loop {
            let seen = self.steps.0.load(Ordering::Acquire);
            self.take_all::<S>();
            if self.is_stopping.load(Ordering::Acquire) {
                return;
            }
            self.wait_for_step::<S>(seen);
        }
    }

    /// Ends all workers. No step runs.
    pub fn stop<S: ThreadSystem>(&self) {
        self.is_stopping.store(true, Ordering::Release);
        self.steps.0.fetch_add(1, Ordering::SeqCst);
        S::wake(&self.steps.0, u32::MAX >> 1);
    }

    /// Allows workers again, after all have ended.
    pub fn restart(&self) {
        self.is_stopping.store(false, Ordering::Release);
    }

    /// Offers the tasks of a step to the workers. Not inlined, as the waiting below, because every
    /// kind of step would have a copy.
    #[inline(never)]
    fn publish<S: ThreadSystem>(&self, step: &RunningStep<'_>) {
        let count = step.count;
        self.unfinished.0.store(count, Ordering::Relaxed);
        let step = core::ptr::from_ref(step).cast_mut().cast::<()>();
        self.step.store(step, Ordering::Relaxed);
        // Releases the stores above to every thread that takes a task.
        self.untaken.0.store(count, Ordering::Release);
        self.steps.0.fetch_add(1, Ordering::SeqCst);
        // Stands between the step's number and the look at `asleep`, as `wait_for_step` has a fence
        // between its count there and its look at the number: one of the two sees the other.
        fence(Ordering::SeqCst);
        let asleep = self.asleep.load(Ordering::Relaxed);
        if asleep > 0 {
            S::wake(&self.steps.0, asleep.min(count));
        }
    }

    /// Takes a task; returns how many there were, or `None` if there was none.
    fn take(&self) -> Option<u32> {
        let mut untaken = self.untaken.0.load(Ordering::Relaxed);
        while let Some(rest) = untaken.checked_sub(1) {
            // Acquires what `publish` released; all later values carry it on.
            let exchanged = self.untaken.0.compare_exchange_weak(
                untaken,
                rest,
                Ordering::Acquire,
                Ordering::Relaxed,
            );
            match exchanged {
                Ok(_) => return Some(untaken),
                Err(changed) => untaken = changed,
            }
        }
        None
    }

    /// Takes and runs tasks until none is left.
    fn take_all<S: ThreadSystem>(&self) {
        while let Some(left) = self.take() {
            let step = self.step.load(Ordering::Relaxed).cast::<RunningStep<'_>>();
            // SAFETY: `publish` wrote it before `untaken`. A task was taken and is not done, so its
            // step waits, and this address is that step's.
            let step = unsafe { &*step };
            // SAFETY: the step's own list, and a number is taken once.
            unsafe { call(step, step.count - left) };
            // Releases what the task wrote to the caller, which acquires it.
            let was_last = self.unfinished.0.fetch_sub(1, Ordering::AcqRel) == 1;
            // Stands between the count and the look at the flag, as `wait_for_workers` has a fence
            // between the flag and its look at the count.
            fence(Ordering::SeqCst);
            if was_last && self.is_caller_asleep.load(Ordering::Relaxed) {
                S::wake(&self.unfinished.0, 1);
            }
        }
    }

    /// Waits until there is a step after `seen`: polls, and then sleeps.
    fn wait_for_step<S: ThreadSystem>(&self, seen: u32) {
        for _ in 0..POLLS {
            if self.steps.0.load(Ordering::Relaxed) != seen {
                return;
            }
            S::pause();
        }
        self.asleep.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if self.steps.0.load(Ordering::Relaxed) == seen {
            S::wait(&self.steps.0, seen);
        }
        self.asleep.fetch_sub(1, Ordering::SeqCst);
    }

    /// Waits until the workers have done their tasks: polls, and then sleeps.
    #[inline(never)]
    fn wait_for_workers<S: ThreadSystem>(&self) {
        for _ in 0..POLLS {
            if self.unfinished.0.load(Ordering::Acquire) == 0 {
                return;
            }
            S::pause();
        }
        self.is_caller_asleep.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        loop {
            let left = self.unfinished.0.load(Ordering::Acquire);
            if left == 0 {
                break;
            }
            S::wait(&self.unfinished.0, left);
        }
        self.is_caller_asleep.store(false, Ordering::Relaxed);
    }
}

/// The tasks of a step, and the function that runs one of them.
#[derive(Debug)]
pub struct TaskList<'a, T, F> {
    first: *mut T,
    count: u32,
    run: F,
    owner: PhantomData<&'a mut [T]>,
}

impl<'a, T: Send, F: Fn(&mut T) + Sync> TaskList<'a, T, F> {
    /// Returns a list. Tasks after the first 2^32 - 1 are left out.
    pub fn new(tasks: &'a mut [T], run: F) -> Self {
        Self {
            first: tasks.as_mut_ptr(),
            count: u32::try_from(tasks.len()).unwrap_or(u32::MAX),
            run,
            owner: PhantomData,
        }
    }

    /// Calls `run_step` with the list as a step.
    #[inline(never)]
    pub fn with_step(self, run_step: impl FnOnce(&RunningStep<'_>)) {
        run_step(&RunningStep {
            run: run_task::<T, F>,
            tasks: (&raw const self).cast(),
            count: self.count,
            owner: PhantomData,
        });
    }
}

/// A step that is being executed. It is on the caller's stack.
#[derive(Debug)]
pub struct RunningStep<'a> {
    /// [`run_task`] for this list.
    run: unsafe fn(*const (), u32),
    /// The [`TaskList`].
    tasks: *const (),
    count: u32,
    owner: PhantomData<&'a ()>,
}

/// Runs the task of a number. `tools/check.py` takes every function of this name for a target of
/// [`call`].
///
/// # Safety
/// - `tasks` points at a `TaskList<T, F>` of more than `number` tasks, which lives until this
///   returns.
/// - No other thread uses the task.
#[inline(never)]
unsafe fn run_task<T: Send, F: Fn(&mut T) + Sync>(tasks: *const (), number: u32) {
    // SAFETY: by the caller's promise.
    let tasks = unsafe { &*tasks.cast::<TaskList<'_, T, F>>() };
    // SAFETY: inside the list.
    let task = unsafe { tasks.first.add(number as usize) };
    // SAFETY: inside the list, and in use here only.
    (tasks.run)(unsafe { &mut *task });
}

/// Runs a task of a step through its pointer: the only such call in the DSP's library.
///
/// # Safety
/// The number is taken, and used once.
#[inline(never)]
unsafe fn call(step: &RunningStep<'_>, number: u32) {
    // SAFETY: the step's own function and list.
    unsafe { (step.run)(step.tasks, number) };
}

#[cfg(test)]
mod tests;
