//! The stage of a session, and the lock that admits one thread to it.

use core::sync::atomic::{AtomicU32, Ordering};

/// No handle is open.
const FREE: u32 = 0;
/// A handle is open, no call runs.
const IDLE: u32 = 1;
/// A thread has the session.
const BUSY: u32 = 2;

/// Stage of a session. The admitted thread may use the session until it releases it.
#[derive(Debug)]
pub struct Stage(AtomicU32);

/// The answer to a thread that wants to enter the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// The thread has the session.
    Admitted,
    /// Another thread has it.
    Busy,
    /// The session is not open.
    Absent,
}

impl Stage {
    /// Returns the stage of a session without a handle.
    #[must_use]
    pub const fn new() -> Self {
        Self(AtomicU32::new(FREE))
    }

    /// Admits the thread to a session without a handle. Returns `true` on success.
    #[must_use]
    pub fn open(&self) -> bool {
        self.take(FREE).is_ok()
    }

    /// Asks for an open session.
    #[must_use]
    pub fn enter(&self) -> Admission {
        // Decides by the stage that the exchange returned, because it may have changed since.
        match self.take(IDLE) {
            Ok(()) => Admission::Admitted,
            Err(BUSY) => Admission::Busy,
            Err(_) => Admission::Absent,
        }
    }

    /// Gives an open session back.
    pub fn leave(&self) {
        self.0.store(IDLE, Ordering::Release);
    }

    /// Releases a session whose handle is closed.
    pub fn free(&self) {
        self.0.store(FREE, Ordering::Release);
    }

    /// Takes the session if it is in `stage`; otherwise returns the stage that it is in.
    fn take(&self, stage: u32) -> Result<(), u32> {
        self.0
            .compare_exchange(stage, BUSY, Ordering::Acquire, Ordering::Relaxed)
            .map(drop)
    }
}

impl Default for Stage {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn one_thread_at_a_time_has_an_open_session() {
        let stage = Stage::new();
        assert_eq!(stage.enter(), Admission::Absent);
        assert!(stage.open());
        assert!(!stage.open());
        assert_eq!(stage.enter(), Admission::Busy);
        stage.leave();
        assert_eq!(stage.enter(), Admission::Admitted);
        assert_eq!(stage.enter(), Admission::Busy);
        stage.free();
        assert_eq!(stage.enter(), Admission::Absent);
    }

    /// The host repeats a call that a signal interrupted, and it may arrive when the first one
    /// ends.
    #[test]
    fn a_call_that_meets_the_end_of_another_finds_the_session() {
        const TURNS: u32 = if cfg!(miri) { 100 } else { 20_000_000 };
        let stage = &Stage::new();
        assert!(stage.open());
        stage.leave();
        // The threads run at the same time.
        let start = &Barrier::new(2);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(move || {
                    start.wait();
                    for _ in 0..TURNS {
                        match stage.enter() {
                            Admission::Admitted => stage.leave(),
                            Admission::Busy => {}
                            Admission::Absent => panic!("the session is open"),
                        }
                    }
                });
            }
        });
    }
}
