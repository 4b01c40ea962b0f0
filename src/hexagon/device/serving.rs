//! The thread that serves the ring, and the host's wait for it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::hexagon::driver::{Connection, Interruption, Served};

/// Time for which the DSP polls an empty ring before its call returns: an idle NPU draws no power,
/// a busy one needs no further calls.
///
/// Between two splits of a decode step there are tens of microseconds of CPU work, between two
/// tokens a few milliseconds for the choice of the next one. A new call, which also acquires VTCM
/// again, costs several hundred microseconds.
pub(super) const IDLE: Duration = Duration::from_millis(15);

/// Pause before a call that was interrupted, or that found VTCM in use, is repeated.
const LATER: Duration = Duration::from_millis(10);
/// Interrupted calls after which a session ends. Each keeps one of the DSP's 255 contexts until the
/// session is closed, and all programs of the machine share these.
///
/// SOURCE: Linux drivers/misc/fastrpc.c (`FASTRPC_CTX_MAX`; `fastrpc_internal_invoke` keeps the
/// context of a call that ends with -ERESTARTSYS).
const MOST_INTERRUPTIONS: u32 = 16;

/// The thread that calls the DSP to serve the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Serving {
    /// A thread of the session, which stays in the call while there is work.
    Thread,
    /// The thread that waits for a completion. This is for a stand-in, which computes on the
    /// calling thread: a second thread would only have to be woken. A DSP that hangs would block
    /// the caller.
    Caller,
}

/// Wakes the serving thread, and receives the reason of its end.
#[derive(Debug, Default)]
pub(super) struct Bell {
    state: Mutex<BellState>,
    rung: Condvar,
    pub(super) failed: AtomicBool,
    /// Another program holds VTCM.
    pub(super) waits_for_vtcm: AtomicBool,
}

#[derive(Debug, Default)]
struct BellState {
    work: bool,
    stop: bool,
    error: Option<Error>,
}

impl Bell {
    fn lock(&self) -> MutexGuard<'_, BellState> {
        // No code under this lock can panic half-way through a change, so a poisoned lock is still
        // consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn ring(&self) {
        self.lock().work = true;
        self.rung.notify_one();
    }

    pub(super) fn stop(&self) {
        self.lock().stop = true;
        self.rung.notify_one();
    }

    /// Waits for work; `false` when it is time to stop.
    fn wait(&self) -> bool {
        let mut state = self.lock();
        while !state.work && !state.stop {
            state = (self.rung.wait(state)).unwrap_or_else(PoisonError::into_inner);
        }
        state.work = false;
        !state.stop
    }

    fn fail(&self, error: Error) {
        let mut state = self.lock();
        state.error = Some(error);
        self.failed.store(true, Ordering::Release);
        drop(state);
        self.rung.notify_all();
    }

    /// Returns the reason why the serving call ended, once. It comes from the thread, which is
    /// waited for at most `patience`.
    pub(super) fn failure(&self, patience: Duration) -> Option<Error> {
        let unknown = |_: &mut BellState| !self.failed.load(Ordering::Acquire);
        let waited = self.rung.wait_timeout_while(self.lock(), patience, unknown);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.error.take()
    }
}

/// Starts the thread of [`Serving::Thread`].
pub(super) fn serve_on_thread(
    device: &str,
    connection: &Arc<Connection>,
    bell: &Arc<Bell>,
) -> Result<JoinHandle<()>> {
    let (connection, bell) = (Arc::clone(connection), Arc::clone(bell));
    let life = move || {
        let mut interruptions = 0;
        while bell.wait() {
            if let Err(error) = serve_once(&connection, &bell, &mut interruptions) {
                return bell.fail(error);
            }
        }
    };
    let builder = std::thread::Builder::new().name(format!("{device}-serve"));
    os::process::without_signals(|| builder.spawn(life)).map_err(|source| Error::Thread {
        device: device.into(),
        source,
    })
}

/// Calls the DSP until it has parked.
///
/// An interrupted call continues on the DSP, which answers the next call at once: the ring's state
/// then shows if it has parked.
///
/// - `interruptions`: calls of the session that were interrupted so far
fn serve_once(connection: &Connection, bell: &Bell, interruptions: &mut u32) -> Result<()> {
    loop {
        match connection.serve(IDLE) {
            Ok(Served::Parked) => {
                bell.waits_for_vtcm.store(false, Ordering::Relaxed);
                return Ok(());
            }
            Ok(Served::Later) => {
                bell.waits_for_vtcm.store(true, Ordering::Relaxed);
                if bell.lock().stop {
                    return Ok(());
                }
                std::thread::sleep(LATER);
            }
            Err(Interruption { error, is_signal }) if is_signal => {
                *interruptions += 1;
                if *interruptions == MOST_INTERRUPTIONS {
                    log::warn!("{MOST_INTERRUPTIONS} calls were interrupted by signals");
                    return Err(error);
                }
                std::thread::sleep(LATER);
            }
            Err(Interruption { error, .. }) => return Err(error),
        }
    }
}

/// The time to go on waiting: while the other side reads commands or shows progress, and for a time
/// after.
pub(super) struct Patience {
    timeout: Duration,
    /// Time without progress. A single pause counts for at most [`Self::longest_pause`].
    silent: Duration,
    looked: Instant,
    /// Commands that were waiting, and the DSP's sign of progress, when they changed last.
    seen: Option<(u32, u32)>,
    pauses: u32,
}

/// Looks at the ring without a pause in between: a DSP answers a small submission within
/// microseconds.
const SPINS: u32 = 100;
/// Looks at the ring before pauses become naps. Other threads may run after the first [`SPINS`].
const LOOKS: u32 = 2100;
/// Length of the later pauses.
const NAP: Duration = Duration::from_micros(50);

impl Patience {
    pub(super) fn new(timeout: Duration) -> Self {
        Self {
            timeout,
            silent: Duration::ZERO,
            looked: Instant::now(),
            seen: None,
            pauses: 0,
        }
    }

    /// Pauses. Returns `false` if there was no progress for too long.
    ///
    /// - `waiting`, `progress`: number of commands that are not read yet, and the word that the DSP
    ///   changes while it works on one
    pub(super) fn pause(&mut self, waiting: u32, progress: u32) -> bool {
        if self.seen != Some((waiting, progress)) {
            self.seen = Some((waiting, progress));
            self.silent = Duration::ZERO;
        }
        self.pauses = self.pauses.saturating_add(1);
        match self.pauses {
            ..SPINS => std::hint::spin_loop(),
            SPINS..LOOKS => std::thread::yield_now(),
            _ => std::thread::sleep(NAP),
        }
        if self.pauses > SPINS {
            let paused = self.looked.elapsed().min(self.longest_pause());
            self.looked = Instant::now();
            self.silent += paused;
        }
        self.silent < self.timeout
    }

    /// Returns how much one pause can add to the silence. In a longer pause this process was
    /// stopped (Ctrl-Z, a debugger, Android's freezer), and could not see the DSP's progress.
    fn longest_pause(&self) -> Duration {
        (self.timeout / 8).min(Duration::from_secs(1))
    }

    /// Returns `true` from time to time, at intervals much longer than a call, when the DSP should
    /// have answered by now.
    pub(super) fn is_long(&self) -> bool {
        self.pauses > LOOKS && self.pauses.is_multiple_of(1024)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bell_ends_the_thread_that_waits_and_gives_its_error_once() {
        let bell = Bell::default();
        bell.ring();
        assert!(bell.wait());
        bell.ring();
        bell.stop();
        assert!(!bell.wait());

        let patience = Duration::from_millis(50);
        let began = Instant::now();
        assert!(bell.failure(patience).is_none());
        assert!(began.elapsed() >= patience, "not waited for");
        let reason = "the thread's".into();
        bell.fail(Error::Graph { reason });
        let began = Instant::now();
        let error = bell.failure(200 * patience).unwrap();
        assert!(error.to_string().contains("the thread's"), "{error}");
        assert!(
            began.elapsed() < 100 * patience,
            "waited for what was there"
        );
        assert!(bell.failure(patience).is_none());
    }

    #[test]
    fn a_wait_is_long_now_and_then_once_it_sleeps() {
        let is_long = |pauses: u32| {
            let patience = Patience::new(Duration::from_secs(1));
            Patience { pauses, ..patience }.is_long()
        };
        let long: Vec<u32> = (0..8 * 1024).filter(|pauses| is_long(*pauses)).collect();
        assert_eq!(long, [3072, 4096, 5120, 6144, 7168]);
    }

    #[test]
    fn the_time_that_this_process_is_stopped_is_not_the_dsp_s_silence() {
        let timeout = Duration::from_millis(80);
        let mut patience = Patience::new(timeout);
        for _ in 0..=SPINS {
            assert!(patience.pause(1, 7));
        }
        std::thread::sleep(2 * timeout);
        assert!(patience.pause(1, 7), "stopped for longer than the time-out");
        let began = Instant::now();
        while patience.pause(1, 7) {}
        assert!(began.elapsed() < 100 * timeout, "waited for ever");
    }
}
