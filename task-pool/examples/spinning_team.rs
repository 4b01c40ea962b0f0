//! Measures the cost of the pool's runs while a team of threads exists that spins between its
//! regions, as OpenMP's do by default.
//!
//! `cargo run --release -p task-pool --example spinning_team -- THREADS OTHERS`: a pool of THREADS,
//! and a team of the caller and OTHERS. For 6 s, a region of the team (20 us of work each) and
//! three runs of the pool (a task of 60 us for each thread) alternate, as graph splits of ggml's
//! CPU backend and multiplications of an NPU do.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const REGION: Duration = Duration::from_micros(20);
const TASK: Duration = Duration::from_micros(60);
const RUNS: u32 = 3;

fn work(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

fn main() {
    let arguments: Vec<usize> = std::env::args()
        .skip(1)
        .flat_map(|arg| arg.parse())
        .collect();
    let [threads, others] = arguments[..] else {
        eprintln!("usage: spinning_team THREADS OTHERS");
        return;
    };
    let pool = match task_pool::Pool::new(threads, "bench", &[]) {
        Ok(pool) => pool,
        Err(error) => {
            eprintln!("no threads: {error}");
            return;
        }
    };
    let (stop, region, done) = (
        AtomicBool::new(false),
        AtomicUsize::new(0),
        AtomicUsize::new(0),
    );
    std::thread::scope(|scope| {
        for _ in 0..others {
            scope.spawn(|| {
                let mut last = 0;
                while !stop.load(Ordering::Relaxed) {
                    let now = region.load(Ordering::Acquire);
                    if now != last {
                        last = now;
                        work(REGION);
                        done.fetch_add(1, Ordering::Release);
                    }
                    std::hint::spin_loop();
                }
            });
        }
        let (mut in_regions, mut in_runs) = (Duration::ZERO, Duration::ZERO);
        let (begin, mut regions) = (Instant::now(), 0);
        while begin.elapsed() < Duration::from_secs(6) {
            let start = Instant::now();
            done.store(0, Ordering::Relaxed);
            region.fetch_add(1, Ordering::Release);
            work(REGION);
            while done.load(Ordering::Acquire) < others {
                std::hint::spin_loop();
            }
            in_regions += start.elapsed();
            let start = Instant::now();
            (0..RUNS).for_each(|_| pool.run(threads, &|_| work(TASK)));
            in_runs += start.elapsed();
            regions += 1;
        }
        stop.store(true, Ordering::Relaxed);
        println!(
            "pool of {threads} beside a team of {}: a run takes {:?}, a region {:?}",
            1 + others,
            in_runs / (RUNS * regions),
            in_regions / regions
        );
    });
}
