//! Measures the cost of the ring and of the stand-in without the products themselves.

use std::thread;
use std::time::Instant;

use hexagon_ops::sim::Options;
use hexagon_ops::wire::{Command, Nop, WISH, WISH_CLOSE};

use crate::host::{Session, serve, start};

/// `cargo test --release -p hexagon-ops --test sim -- --ignored --nocapture`.
#[test]
#[ignore = "a benchmark"]
fn an_empty_submission_with_a_thread_that_serves() {
    const TURNS: usize = 20_000;
    let machine = start(Options::new(75));
    let mut session = Session::new(&machine, 75);
    session.start().unwrap();
    let (api, handle) = (session.api, session.handle);
    let server = thread::spawn(move || serve(&api, handle, 1_000_000));
    let nop = Command::new(0, &Nop { reserved: 0 });
    let mut times: Vec<f64> = (0..TURNS)
        .map(|_| {
            let start = Instant::now();
            session.submit(&[nop]);
            while session.collect().is_none() {
                std::hint::spin_loop();
            }
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    session.shared.store(WISH, WISH_CLOSE);
    assert_eq!(server.join().unwrap(), 0);
    times.sort_by(f64::total_cmp);
    println!(
        "empty submission, both sides polling: median {:.2} us, 99 of 100 within {:.1} us",
        times[TURNS / 2],
        times[TURNS * 99 / 100]
    );
}
