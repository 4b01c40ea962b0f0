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
//! The matrix unit belongs to one thread. If it is a separate thread, that thread is the only
//! worker of a second [`Workers`], and gets the parts of steps for the unit from there
//! ([`Workers::run_on_workers`]).
//!
//! This file has no calls to an operating system: [`ThreadSystem`] has the three functions that it
//! needs. The DSP's threads are in `qurt`; the tests below use the host's.

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
    /// Number of steps so far; it also changes when the workers are to end. Workers without a task
    /// wait for a change.
    steps: Alone,
    /// Tasks of the step that no thread has started.
    untaken: Alone,
    /// Number of the step's tasks that are not done. The caller waits for 0.
    unfinished: Alone,
    /// Number of workers that sleep, or are about to.
    asleep: AtomicU32,
    is_caller_asleep: AtomicBool,
    is_stopping: AtomicBool,
    is_busy: AtomicBool,
    /// Address of the [`RunningStep`].
    step: AtomicPtr<()>,
}

impl Workers {
    /// Returns the state of a process without workers.
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
    /// first, while the workers begin with the tasks. If another thread or a task makes a step
    /// meanwhile, that thread runs all tasks of its step itself.
    ///
    /// The list in `step` is used only here, and for the first time.
    pub fn run<S: ThreadSystem>(&self, step: &RunningStep<'_>, beside: impl FnOnce()) {
        let count = step.count;
        if count == 0 {
            return beside();
        }
        if self.is_busy.swap(true, Ordering::Acquire) {
            beside();
            // SAFETY: every number is used once.
            return (0..count).for_each(|number| unsafe { call(step, number) });
        }
        self.publish::<S>(step);
        beside();
        while let Some(left) = self.take() {
            // SAFETY: `take` returns each number once.
            unsafe { call(step, count - left) };
            self.unfinished.0.fetch_sub(1, Ordering::AcqRel);
        }
        self.wait_for_workers::<S>();
        self.is_busy.store(false, Ordering::Release);
    }

    /// Runs the tasks of a step on workers only, and `beside` on the calling thread meanwhile.
    /// There must be at least one worker. Returns when all are done. One thread at a time calls
    /// this, and not from within a task.
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

    /// Ends all workers. It must be called while no step runs.
    pub fn stop<S: ThreadSystem>(&self) {
        self.is_stopping.store(true, Ordering::Release);
        self.steps.0.fetch_add(1, Ordering::SeqCst);
        S::wake(&self.steps.0, u32::MAX >> 1);
    }

    /// Allows workers again, after all have ended.
    pub fn restart(&self) {
        self.is_stopping.store(false, Ordering::Release);
    }

    /// Offers the tasks of a step to the workers. This function and those that wait are not
    /// inlined, because every kind of step would have a copy of them.
    #[inline(never)]
    fn publish<S: ThreadSystem>(&self, step: &RunningStep<'_>) {
        let count = step.count;
        self.unfinished.0.store(count, Ordering::Relaxed);
        let step = core::ptr::from_ref(step).cast_mut().cast::<()>();
        self.step.store(step, Ordering::Relaxed);
        // The release makes the stores above visible to every thread that takes a task.
        self.untaken.0.store(count, Ordering::Release);
        self.steps.0.fetch_add(1, Ordering::SeqCst);
        // Pairs with the fence in `wait_for_step`. This side writes the step's number and then
        // reads `asleep`; the other side writes `asleep` and then reads the number. With both
        // fences at least one side sees the other's write.
        fence(Ordering::SeqCst);
        let asleep = self.asleep.load(Ordering::Relaxed);
        if asleep > 0 {
            S::wake(&self.steps.0, asleep.min(count));
        }
    }

    /// Takes a task. Returns how many tasks were left before, or `None` if there was none.
    fn take(&self) -> Option<u32> {
        let mut untaken = self.untaken.0.load(Ordering::Relaxed);
        while let Some(rest) = untaken.checked_sub(1) {
            // Acquires the stores that `publish` released. Later exchanges continue the same
            // release sequence.
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
            // SAFETY: `publish` wrote the address before `untaken`. A task was taken and is not
            // done, so its step is still waiting, and the address is that step's.
            let step = unsafe { &*step };
            // SAFETY: the number belongs to this step's list, and is taken once.
            unsafe { call(step, step.count - left) };
            // Releases the task's writes to the caller, which acquires them.
            let was_last = self.unfinished.0.fetch_sub(1, Ordering::AcqRel) == 1;
            // Pairs with the fence in `wait_for_workers`: this side writes the count and then reads
            // the flag, the other side writes the flag and then reads the count.
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
    /// Returns a list. At most the first 2^32 - 1 tasks are in it.
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

/// Runs the task of a number. `tools/check.py` assumes that [`call`] may call every function of
/// this name.
///
/// # Safety
/// - `tasks` points at a `TaskList<T, F>` of more than `number` tasks, which lives until this
///   returns.
/// - No other thread uses the task.
#[inline(never)]
unsafe fn run_task<T: Send, F: Fn(&mut T) + Sync>(tasks: *const (), number: u32) {
    // SAFETY: guaranteed by the caller.
    let tasks = unsafe { &*tasks.cast::<TaskList<'_, T, F>>() };
    // SAFETY: inside the list.
    let task = unsafe { tasks.first.add(number as usize) };
    // SAFETY: inside the list, and used only here.
    (tasks.run)(unsafe { &mut *task });
}

/// Runs a task of a step through its pointer: the only such call in the DSP's library.
///
/// # Safety
/// The number was claimed by this thread, and is used once.
#[inline(never)]
unsafe fn call(step: &RunningStep<'_>, number: u32) {
    // SAFETY: function and list belong to the same step.
    unsafe { (step.run)(step.tasks, number) };
}

#[cfg(test)]
mod tests;
