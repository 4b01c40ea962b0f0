use std::sync::atomic::AtomicU32;

use super::*;

fn pool(threads: usize) -> Pool {
    Pool::new(threads, "test", &[]).unwrap()
}

#[test]
fn each_task_is_called_once_whatever_the_threads() {
    for threads in [1, 2, 3, 7] {
        let pool = pool(threads);
        assert_eq!(pool.threads(), threads);
        let large = if cfg!(miri) { 50 } else { 1000 };
        for n in (0..40).chain([large]) {
            let calls: Vec<_> = (0..n).map(|_| AtomicU32::new(0)).collect();
            pool.run(n, &|i| {
                calls[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(
                calls.iter().all(|calls| calls.load(Ordering::Relaxed) == 1),
                "{threads} threads, {n} tasks"
            );
        }
    }
}

/// Pauses last about as long as threads spin, so that some runs find the workers awake, some
/// asleep, and some in between.
#[test]
fn runs_follow_each_other_in_any_rhythm() {
    let pool = pool(3);
    let mut sum = [0u64; 3];
    let rounds = if cfg!(miri) { 20 } else { 20_000 };
    for round in 0..rounds {
        pool.for_each(chunks(&mut sum, 1), |i, part| part[0] += round + i as u64);
        if round % 64 == 0 {
            std::thread::sleep(Duration::from_micros(round % 60));
        }
    }
    let base = rounds * (rounds - 1) / 2;
    assert_eq!(sum, [base, base + rounds, base + 2 * rounds]);
}

#[test]
fn tasks_run_at_the_same_time_where_there_are_threads() {
    let pool = pool(3);
    let met = std::sync::Barrier::new(3);
    // This would hang if one thread ran two of the tasks: the first would wait for the second.
    pool.run(3, &|_| {
        met.wait();
    });
}

#[test]
fn a_panic_in_a_task_reaches_the_caller_after_all_tasks_are_done() {
    let pool = pool(3);
    for panicking in 0..5 {
        let done = AtomicUsize::new(0);
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.run(5, &|i| {
                assert!(i != panicking, "task {i}");
                done.fetch_add(1, Ordering::Relaxed);
            });
        }));
        let text = result.unwrap_err();
        let text = text.downcast_ref::<String>().unwrap();
        assert!(text.contains(&format!("task {panicking}")), "{text}");
        assert_eq!(done.load(Ordering::Relaxed), 4);
        // The pool still works afterwards.
        pool.run(5, &|_| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.load(Ordering::Relaxed), 9);
    }
}

const ROUNDS: usize = if cfg!(miri) { 5 } else { 100 };

#[test]
fn a_run_within_a_run_and_two_callers_at_once_come_to_an_end() {
    let pool = pool(2);
    let calls = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..ROUNDS {
                    pool.run(4, &|_| {
                        pool.run(3, &|_| {
                            calls.fetch_add(1, Ordering::Relaxed);
                        });
                    });
                }
            });
        }
    });
    assert_eq!(calls.load(Ordering::Relaxed), 3 * ROUNDS * 4 * 3);
}

#[test]
fn parts_cover_a_slice_and_do_not_overlap() {
    let pool = pool(3);
    for (len, size) in [(0, 3), (1, 3), (9, 3), (10, 3), (2, 5)] {
        let (mut data, mut other) = (vec![0usize; len], vec![0usize; len]);
        pool.for_each(
            (chunks(&mut data, size), chunks(&mut other, size)),
            |i, (a, b)| {
                a.iter_mut().for_each(|x| *x += i + 1);
                b.copy_from_slice(a);
            },
        );
        let want: Vec<_> = (0..len).map(|at| at / size + 1).collect();
        assert_eq!([&data, &other], [&want, &want]);
    }
}

#[test]
#[cfg_attr(miri, ignore = "Miri has no CPU sets")]
fn threads_keep_to_the_cpus_that_they_are_given() {
    let first_allowed = |text: String| -> usize {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))
            .unwrap();
        let digits = |c: char| !c.is_ascii_digit();
        line.trim().split(digits).next().unwrap().parse().unwrap()
    };
    let cpu = first_allowed(std::fs::read_to_string("/proc/thread-self/status").unwrap());
    let pool = Pool::new(2, "test", &[cpu, 1 << 20]).unwrap();
    let here = std::thread::current().id();
    let met = std::sync::Barrier::new(2);
    pool.run(2, &|_| {
        met.wait();
        if std::thread::current().id() != here {
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            assert!(status.contains(&format!("Cpus_allowed_list:\t{cpu}\n")));
        }
    });
}
