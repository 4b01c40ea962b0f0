//! The workers on the host's threads.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::*;

/// The host: every word shares one lock.
struct Host;

static LOCK: Mutex<()> = Mutex::new(());
static CHANGED: Condvar = Condvar::new();

impl ThreadSystem for Host {
    fn wait(word: &AtomicU32, value: u32) {
        let guard = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        if word.load(Ordering::SeqCst) == value {
            drop(CHANGED.wait(guard));
        }
    }

    fn wake(_word: &AtomicU32, _count: u32) {
        drop(LOCK.lock().unwrap_or_else(PoisonError::into_inner));
        CHANGED.notify_all();
    }

    fn pause() {
        std::hint::spin_loop();
    }
}

/// Runs a step.
fn step<T: Send>(state: &Workers, tasks: &mut [T], run: impl Fn(&mut T) + Sync) {
    TaskList::new(tasks, run).with_step(|step| state.run::<Host>(step, || ()));
}

/// Calls `body` while worker threads run.
fn with_workers(workers: usize, body: impl FnOnce(&Workers)) {
    let state = Workers::new();
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| state.work::<Host>());
        }
        body(&state);
        state.stop::<Host>();
    });
}

#[test]
fn each_task_runs_once_whatever_the_workers() {
    for workers in [0, 1, 3, 7] {
        with_workers(workers, |state| {
            let rounds = if cfg!(miri) { 5 } else { 200 };
            for count in (0..20).chain([1000]).cycle().take(rounds) {
                let mut tasks = vec![0_u32; count];
                step(state, &mut tasks, |task| *task += 1);
                assert!(tasks.iter().all(|task| *task == 1), "{workers}, {count}");
            }
        });
    }
}

#[test]
fn workers_run_tasks_while_the_caller_does_its_own_work() {
    with_workers(1, |state| {
        for count in [1, 5] {
            let (mut tasks, left) = (vec![0_u32; count], AtomicU32::new(1));
            let list = TaskList::new(&mut tasks, |task| {
                *task += 1;
                left.store(0, Ordering::Release);
            });
            // This would hang if the tasks waited for the caller's own work.
            list.with_step(|step| {
                state.run::<Host>(step, || {
                    while left.load(Ordering::Acquire) > 0 {
                        std::thread::yield_now();
                    }
                });
            });
            assert_eq!(tasks, vec![1; count]);
        }
    });
}

/// The matrix unit's thread has a separate queue from that of the vector threads.
#[test]
fn one_thread_runs_all_parts_while_the_others_run_tasks() {
    let unit = &Workers::new();
    with_workers(2, |state| {
        std::thread::scope(|scope| {
            let owner = scope.spawn(|| unit.work::<Host>()).thread().id();
            let rounds = if cfg!(miri) { 3 } else { 500 };
            for round in 0..rounds {
                let (mut tasks, mut by) = (vec![0_u32; round % 5], [None]);
                let left = AtomicU32::new(1);
                TaskList::new(&mut by, |by| {
                    *by = Some(std::thread::current().id());
                    left.store(0, Ordering::Release);
                })
                .with_step(|part| {
                    unit.run_on_workers::<Host>(part, || {
                        step(state, &mut tasks, |task| *task += 1);
                        // This would hang if the part waited for the caller.
                        while left.load(Ordering::Acquire) > 0 {
                            std::thread::yield_now();
                        }
                    });
                });
                assert_eq!((by, tasks), ([Some(owner)], vec![1; round % 5]));
                if round % 20 == 0 {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            unit.stop::<Host>();
        });
    });
}

#[test]
fn the_caller_does_its_own_work_once_even_within_a_step() {
    with_workers(2, |state| {
        let done = AtomicU32::new(0);
        step(state, &mut [(); 3], |()| {
            TaskList::new(&mut [(); 2], |()| ()).with_step(|step| {
                state.run::<Host>(step, || {
                    done.fetch_add(1, Ordering::Relaxed);
                });
            });
        });
        assert_eq!(done.into_inner(), 3);
    });
}

#[test]
fn tasks_run_at_the_same_time() {
    with_workers(2, |state| {
        let met = std::sync::Barrier::new(3);
        // This would hang if one thread ran two of the tasks: the first would wait for the second.
        step(state, &mut [(); 3], |()| {
            met.wait();
        });
    });
}

/// Some steps find the workers polling, some asleep, and some in between; so does the caller, which
/// waits for long tasks.
#[test]
fn steps_follow_each_other_in_any_rhythm() {
    with_workers(2, |state| {
        let mut sum = [0_u64; 3];
        let rounds = if cfg!(miri) { 10 } else { 10_000 };
        for round in 0..rounds {
            step(state, &mut sum, |sum| {
                *sum += round;
                if round % 512 == 1 {
                    std::thread::sleep(Duration::from_micros(500));
                }
            });
            if round % 64 == 0 {
                std::thread::sleep(Duration::from_micros(round % 60));
            }
        }
        assert_eq!(sum, [rounds * (rounds - 1) / 2; 3]);
    });
}

#[test]
fn a_step_within_a_step_and_of_another_thread_end() {
    with_workers(2, |state| {
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..if cfg!(miri) { 2 } else { 100 } {
                        let mut tasks = [[0; 3]; 4];
                        step(state, &mut tasks, |inner| {
                            step(state, inner, |task| *task += 1);
                        });
                        assert_eq!(tasks, [[1; 3]; 4]);
                    }
                });
            }
        });
    });
}

#[test]
fn workers_end_and_start_again() {
    let state = &Workers::new();
    for _ in 0..if cfg!(miri) { 2 } else { 50 } {
        state.restart();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| state.work::<Host>());
            }
            let mut tasks = [0; 9];
            step(state, &mut tasks, |task| *task += 1);
            assert_eq!(tasks, [1; 9]);
            state.stop::<Host>();
        });
    }
}
