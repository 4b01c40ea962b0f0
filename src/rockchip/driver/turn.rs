//! The turn within this process: one thread at a time has it, and may acquire it several times if
//! it releases it as often.
//!
//! A destructor must not wait for ever. If another process does not end its turn, the object is
//! freed with the next turn.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rknpu_ops::ffi::{MatmulCtx, MatmulInfo, TensorMem};

use super::lock::{Nodes, Seat};
use super::{Rknn, check, describe};
use crate::error::Result;

/// Everything about the turn of this process.
#[derive(Debug)]
pub(super) struct Turns {
    nodes: Nodes,
    /// The thread that has the turn, by [`this_thread`], or 0. A thread that reads its own number
    /// has the turn; all others must lock `state`.
    thread: AtomicUsize,
    /// Number of turns that the thread has begun and not ended; only that thread reads it.
    depth: AtomicUsize,
    state: Mutex<Holder>,
    /// Notified when the thread has ended its turn.
    given_back: Condvar,
}

#[derive(Debug, Default)]
struct Holder {
    /// The seat; there is none while nothing of the NPU is open.
    seat: Option<Arc<Seat>>,
    /// A thread has the turn, or waits for other processes.
    is_taken: bool,
    /// Other threads that wait for the turn.
    waiting: usize,
    /// The seat is released with the turn.
    leaves: bool,
    /// The last wait for other processes has reached its limit.
    refused: bool,
}

/// Returns a number that no other thread has at the same time.
fn this_thread() -> usize {
    thread_local!(static OWN: u8 = const { 0 });
    OWN.with(|own| std::ptr::from_ref(own).addr())
}

impl Turns {
    pub(super) fn new(nodes: Nodes) -> Self {
        Self {
            nodes,
            thread: AtomicUsize::new(0),
            depth: AtomicUsize::new(0),
            state: Mutex::default(),
            given_back: Condvar::new(),
        }
    }

    /// Takes the turn for this thread, and a seat if there is none. Returns `true` if the thread
    /// did not have it.
    ///
    /// # Errors
    /// `Busy` if other processes did not end their turns within `patience`.
    pub(super) fn begin(&self, patience: Duration) -> Result<bool> {
        let this = this_thread();
        if self.thread.load(Ordering::Relaxed) == this {
            self.depth.fetch_add(1, Ordering::Relaxed);
            return Ok(false);
        }
        let mut state = self.lock();
        if state.is_taken {
            state.waiting += 1;
            let waited = self.given_back.wait_while(state, |it| it.is_taken);
            state = waited.unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
        state.is_taken = true;
        let seat = state.seat.clone();
        drop(state);
        let seat = seat.map_or_else(|| Seat::take(&self.nodes).map(Arc::new), Ok);
        let begun = seat.and_then(|seat| seat.begin_turn(patience).map(|()| seat));
        let mut state = self.lock();
        state.refused = begun.is_err();
        match begun {
            Ok(seat) => {
                state.seat = Some(seat);
                self.depth.store(1, Ordering::Relaxed);
                self.thread.store(this, Ordering::Relaxed);
                Ok(true)
            }
            Err(error) => {
                self.release(state);
                Err(error)
            }
        }
    }

    /// Ends one [`Self::begin`].
    fn end(&self) {
        if self.depth.fetch_sub(1, Ordering::Relaxed) > 1 {
            return;
        }
        self.thread.store(0, Ordering::Relaxed);
        let mut state = self.lock();
        if std::mem::take(&mut state.leaves) {
            state.seat = None;
        } else if let Some(seat) = &state.seat {
            seat.end_turn();
        }
        self.release(state);
    }

    fn release(&self, mut state: MutexGuard<Holder>) {
        state.is_taken = false;
        let waiting = state.waiting;
        drop(state);
        // Notifying is a system call, so it is skipped if no thread waits.
        if waiting > 0 {
            self.given_back.notify_one();
        }
    }

    /// Releases the seat together with the turn.
    pub(super) fn leave(&self) {
        self.lock().leaves = true;
    }

    /// Returns the seat, if there is one.
    pub(super) fn seat(&self) -> Option<Arc<Seat>> {
        self.lock().seat.clone()
    }

    /// Returns `true` if the last wait for other processes has reached its limit.
    pub(super) fn was_refused(&self) -> bool {
        self.lock().refused
    }

    fn lock(&self) -> MutexGuard<'_, Holder> {
        // No code under this lock can panic half-way through a change, so a poisoned lock is still
        // consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Time in which no other process and no other thread makes, binds, runs or frees anything of the
/// NPU.
#[derive(Debug)]
pub struct Turn<'a> {
    rknn: &'a Rknn,
    /// A turn must stay in the thread that began it.
    _not_send: PhantomData<MutexGuard<'static, ()>>,
}

impl<'a> Turn<'a> {
    /// The turn that this thread has begun.
    pub(super) fn of(rknn: &'a Rknn) -> Self {
        Self {
            rknn,
            _not_send: PhantomData,
        }
    }

    /// Releases the place at the NPU with the turn. Nothing of the NPU may be open.
    pub fn leave(&self) {
        self.rknn.turns.leave();
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.rknn.turns.end();
    }
}

/// An object of the library.
#[derive(Debug)]
pub(super) enum Leftover {
    /// A context, with its shape.
    Context(MatmulCtx, MatmulInfo),
    /// Memory, with its number of bytes.
    Memory(MatmulCtx, *mut TensorMem, usize),
}

// SAFETY: the object is bound to no thread of the library; one thread at a time calls the library
// (`Rknn::alone`).
unsafe impl Send for Leftover {}

impl Rknn {
    /// Acquires the turn for this thread, which keeps other processes and other threads out of the
    /// library. Each wait for other processes has a limit. A thread that has the turn may acquire
    /// it again.
    ///
    /// A thread that waits for the turn must not hold a lock that the thread with the turn may wait
    /// for.
    ///
    /// # Errors
    /// `Busy` if another process did not end its turn in time, or if no node of the NPU can be
    /// opened.
    pub fn turn(&self) -> Result<Turn<'_>> {
        self.turn_within(self.patience)
    }

    /// Begins a turn to free something. After a wait that reached its limit, further calls do not
    /// wait.
    #[must_use]
    pub fn turn_to_free(&self) -> Option<Turn<'_>> {
        let was_refused = self.turns.was_refused();
        let patience = if was_refused {
            Duration::ZERO
        } else {
            self.patience
        };
        match self.turn_within(patience) {
            Ok(turn) => Some(turn),
            Err(error) => {
                if !was_refused {
                    log::warn!("memory is freed later: {error}");
                }
                None
            }
        }
    }

    fn turn_within(&self, patience: Duration) -> Result<Turn<'_>> {
        let is_first = self.turns.begin(patience)?;
        let turn = Turn::of(self);
        if is_first {
            let leftovers = std::mem::take(&mut *self.leftovers());
            leftovers.into_iter().for_each(|it| self.destroy(it));
        }
        Ok(turn)
    }

    fn leftovers(&self) -> MutexGuard<'_, Vec<Leftover>> {
        // No code under this lock can panic half-way through a change, so a poisoned lock is still
        // consistent.
        (self.leftovers.lock()).unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns `true` while this process has something of the NPU open.
    #[must_use]
    pub fn is_seated(&self) -> bool {
        self.turns.seat().is_some()
    }

    /// Returns `true` if other processes have something of the NPU open.
    #[must_use]
    pub fn has_company(&self) -> bool {
        self.turns.seat().is_some_and(|seat| seat.has_company())
    }

    /// Returns the names of the other processes that have something of the NPU open, as far as this
    /// user may see them.
    #[must_use]
    pub fn company(&self) -> Option<String> {
        self.turns.seat()?.company()
    }

    /// Frees an object of the library, now or with the next turn.
    pub(super) fn free(&self, object: Leftover) {
        match self.turn_to_free() {
            Some(_turn) => self.destroy(object),
            None => self.leftovers().push(object),
        }
    }

    /// Frees an object, in a turn of this thread.
    fn destroy(&self, object: Leftover) {
        let done = match object {
            Leftover::Context(handle, info) => {
                // SAFETY: the handle is that of a live context, and nothing uses it after this.
                let code = unsafe { (self.api.matmul_destroy)(handle) };
                check("rknn_matmul_destroy", code, || describe(&info))
            }
            Leftover::Memory(handle, raw, bytes) => {
                // SAFETY: the library returned this pointer, and nothing uses it after this.
                let code = unsafe { (self.api.destroy_mem)(handle, raw) };
                check("rknn_destroy_mem", code, || format!("{bytes} bytes"))
            }
        };
        if let Err(error) = done {
            log::warn!("{error}");
        }
    }
}
