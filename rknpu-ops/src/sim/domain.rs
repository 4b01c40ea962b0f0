//! Which I/O domain the NPU is attached to: one at a time, for all cores together.
//!
//! Creating, syncing and freeing memory and running all need their domain attached. A switch waits until nobody uses the
//! old one, so work in two domains takes turns, and a call that waits too long fails.
//!
//! SOURCE: vendor kernel driver 0.9.8, rknpu_iommu.c, rknpu_gem.c and rknpu_job.c: a switch polls until the reference count
//! of the attached domain is zero, and gives up with EINVAL.

use std::ffi::c_int;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::{lock, vendor_error};
use crate::ffi::code;

/// The NPU's end of the domains.
#[derive(Debug)]
pub(super) struct Attachment {
    state: Mutex<State>,
    idle: Condvar,
    patience: Duration,
}

#[derive(Debug, Default)]
struct State {
    domain: usize,
    users: usize,
    switches: u64,
}

impl Attachment {
    /// Nobody uses domain 0, which is attached; switches wait for at most `patience`.
    pub(super) fn new(patience: Duration) -> Self {
        Self {
            state: Mutex::default(),
            idle: Condvar::new(),
            patience,
        }
    }

    /// Attaches `domain` for as long as the result lives.
    ///
    /// # Errors
    /// `FAIL` if another domain was in use for all the time that a switch waits.
    pub(super) fn attach(&self, domain: usize) -> Result<Attached<'_>, c_int> {
        let in_use = |state: &mut State| state.domain != domain && state.users > 0;
        let waited = self
            .idle
            .wait_timeout_while(lock(&self.state), self.patience, in_use);
        let (mut state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        if timeout.timed_out() {
            vendor_error!(
                "switch iommu domain from {} to {domain} failed, errno 22",
                state.domain
            );
            return Err(code::FAIL);
        }
        if state.domain != domain {
            state.domain = domain;
            state.switches += 1;
        }
        state.users += 1;
        Ok(Attached(self))
    }

    /// Switches so far.
    pub(super) fn switches(&self) -> u64 {
        lock(&self.state).switches
    }
}

/// A use of the attached domain.
pub(super) struct Attached<'a>(&'a Attachment);

impl Drop for Attached<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.users -= 1;
        if state.users == 0 {
            self.0.idle.notify_all();
        }
    }
}
