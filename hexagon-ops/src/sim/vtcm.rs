//! The chip's VTCM. With [`super::Options::shared_vtcm`] one call has it at a time.
//!
//! Calls get it in the order of their requests. While a call waits, the holder's callback is
//! called, as a DSP's resource manager does.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::lock;

/// Who has it, and who waits.
#[derive(Debug, Default)]
struct Queue {
    is_held: bool,
    /// Numbers of the calls that wait, the oldest first.
    waiting: VecDeque<u64>,
    next: u64,
}

/// The VTCM of a chip.
#[derive(Debug, Default)]
pub(super) struct Vtcm {
    queue: Mutex<Queue>,
    changed: Condvar,
    is_wanted: AtomicBool,
}

/// The VTCM, until dropped.
#[derive(Debug)]
pub(super) struct HeldVtcm<'a>(&'a Vtcm);

impl Vtcm {
    /// Returns `true` if a call waits for VTCM.
    pub(super) fn is_wanted(&self) -> bool {
        self.is_wanted.load(Ordering::Acquire)
    }

    /// Waits for VTCM, at most for `patience`.
    pub(super) fn acquire(&self, patience: Duration) -> Option<HeldVtcm<'_>> {
        let end = Instant::now() + patience;
        let mut queue = lock(&self.queue);
        let number = queue.next;
        queue.next += 1;
        queue.waiting.push_back(number);
        loop {
            if !queue.is_held && queue.waiting.front() == Some(&number) {
                queue.waiting.pop_front();
                queue.is_held = true;
                self.show(&queue);
                return Some(HeldVtcm(self));
            }
            self.show(&queue);
            let rest = end.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                queue.waiting.retain(|waiting| *waiting != number);
                self.show(&queue);
                self.changed.notify_all();
                return None;
            }
            let waited = self.changed.wait_timeout(queue, rest);
            (queue, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn show(&self, queue: &Queue) {
        let is_wanted = queue.is_held && !queue.waiting.is_empty();
        self.is_wanted.store(is_wanted, Ordering::Release);
    }
}

impl Drop for HeldVtcm<'_> {
    fn drop(&mut self) {
        let mut queue = lock(&self.0.queue);
        queue.is_held = false;
        self.0.show(&queue);
        self.0.changed.notify_all();
    }
}
