//! The I/O domain to which the NPU is attached: one at a time, for all cores together.
//!
//! To create, sync and free memory and to run, the domain must be attached. A switch waits until
//! the old domain is unused, so work in two domains alternates, and a call that waits too long
//! fails.
//!
//! SOURCE: vendor kernel driver 0.9.8, rknpu_iommu.c, rknpu_gem.c and rknpu_job.c: a switch polls
//! until the reference count of the attached domain is zero, and gives up with EINVAL.

use std::ffi::c_int;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::{lock, vendor_error};
use crate::ffi::code;

/// The domain that is attached, and its users.
#[derive(Debug)]
pub(super) struct Attachment {
    state: Mutex<AttachedDomain>,
    idle: Condvar,
    patience: Duration,
}

#[derive(Debug, Default)]
struct AttachedDomain {
    domain: usize,
    users: usize,
    /// Calls that wait for another domain.
    waiting: usize,
    switches: u64,
}

impl Attachment {
    /// Attaches domain 0 without users; switches wait for at most `patience`.
    pub(super) fn new(patience: Duration) -> Self {
        Self {
            state: Mutex::default(),
            idle: Condvar::new(),
            patience,
        }
    }

    /// Attaches `domain` for the lifetime of the result.
    ///
    /// # Errors
    /// `FAIL` if another domain was in use for as long as a switch waits.
    pub(super) fn attach(&self, domain: usize) -> Result<Attached<'_>, c_int> {
        let in_use = |state: &mut AttachedDomain| state.domain != domain && state.users > 0;
        let mut state = lock(&self.state);
        if in_use(&mut state) {
            state.waiting += 1;
            let waited = self.idle.wait_timeout_while(state, self.patience, in_use);
            let timeout;
            (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
            if timeout.timed_out() {
                vendor_error!(
                    "switch iommu domain from {} to {domain} failed, errno 22",
                    state.domain
                );
                return Err(code::FAIL);
            }
        }
        if state.domain != domain {
            state.domain = domain;
            state.switches += 1;
        }
        state.users += 1;
        Ok(Attached(self))
    }

    /// Returns the number of switches.
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
        // A system call, also if nobody waits.
        if state.users == 0 && state.waiting > 0 {
            self.0.idle.notify_all();
        }
    }
}
