//! The calls that are under way in a machine: runs of several contexts at the same time, or one
//! call of another kind.
//!
//! A call that makes, binds, syncs or drops something while a run is under way locks the machine
//! up: that call and all later ones fail.
//!
//! SOURCE: airockchip/rknn-toolkit2 issue 533 (librknnrt 2.3.2, driver 0.9.6): memory that one
//! thread makes or frees with one context while another one runs ends in failed submissions, a
//! lockup and a kernel panic. unimatrix099's fork of rk-llama.cpp moved the creation of contexts
//! out of the threads that run them.
//!
//! Machines that share a node keep the same rule between their processes (`shared`).

use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use super::shared::SharedNode;
use super::{ChipState, lock, vendor_error};
use crate::ffi::code;

/// A thread is in a function that is not `rknn_matmul_run`.
const ENTERED: usize = 1 << 31;
/// The machine answers no more.
const LOCKED_UP: usize = 1 << 30;

/// The calls that are under way.
#[derive(Debug)]
pub(super) struct Traffic {
    /// The number of runs, with [`ENTERED`] and [`LOCKED_UP`].
    calls: AtomicUsize,
    /// Reason why the machine answers no more.
    reason: OnceLock<String>,
    /// The node that other processes share, and the turn of a thread that enters or leaves it.
    node: Option<(Arc<SharedNode>, Mutex<()>)>,
}

impl Traffic {
    pub(super) fn new(node: Option<Arc<SharedNode>>) -> Self {
        Self {
            calls: AtomicUsize::new(0),
            reason: OnceLock::new(),
            node: node.map(|node| (node, Mutex::default())),
        }
    }

    /// Notes a call of `symbol`: `after` has the calls that are under way with it, if it may begin.
    fn begin(
        &self,
        symbol: &str,
        after: impl Fn(usize) -> Result<usize, c_int>,
    ) -> Result<(), c_int> {
        let node = self.node.as_ref().map(|(node, turn)| (node, lock(turn)));
        let mut before = self.calls.load(Ordering::Acquire);
        loop {
            if before & LOCKED_UP != 0 {
                let reason = self.locked_up().unwrap_or_default();
                vendor_error!("{symbol}: the NPU is locked up: {reason}");
                return Err(code::FAIL);
            }
            let (done, failed) = (Ordering::AcqRel, Ordering::Acquire);
            match (self.calls).compare_exchange_weak(before, after(before)?, done, failed) {
                Ok(_) => break,
                Err(now) => before = now,
            }
        }
        let Some((node, _turn)) = node.filter(|_| before == 0) else {
            return Ok(());
        };
        node.enter().map_err(|rule| {
            self.calls.store(0, Ordering::Release);
            self.lock_up(&format!("{symbol} was called while {rule}"))
        })
    }

    /// Notes the end of a call: `end` subtracts it from `calls`, and returns the remaining number.
    fn end(&self, end: impl FnOnce(&AtomicUsize) -> usize) {
        let node = self.node.as_ref().map(|(node, turn)| (node, lock(turn)));
        let left = end(&self.calls);
        if let (Some((node, _turn)), 0) = (node, left & !LOCKED_UP) {
            node.leave();
        }
    }

    /// Returns the reason why the machine does not answer any more.
    pub(super) fn locked_up(&self) -> Option<String> {
        self.reason.get().cloned()
    }

    /// Ends the machine's answers. Returns the code of the call that did it.
    pub(super) fn lock_up(&self, reason: &str) -> c_int {
        vendor_error!("the NPU is locked up: {reason}");
        self.reason.get_or_init(|| reason.to_owned());
        self.calls.fetch_or(LOCKED_UP, Ordering::AcqRel);
        code::FAIL
    }
}

/// A machine whose functions no other thread may call.
pub(super) struct Alone(Arc<ChipState>);

impl Alone {
    pub(super) fn enter(state: &Arc<ChipState>, symbol: &str) -> Result<Self, c_int> {
        let traffic = &state.traffic;
        traffic.begin(symbol, |calls| match calls {
            0 => Ok(ENTERED),
            ENTERED => {
                vendor_error!("{symbol}: another thread is in the library");
                Err(code::FAIL)
            }
            _ => Err(traffic.lock_up(&format!("{symbol} was called during a run"))),
        })?;
        Ok(Self(Arc::clone(state)))
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        let end = |calls: &AtomicUsize| calls.fetch_and(!ENTERED, Ordering::AcqRel) & !ENTERED;
        self.0.traffic.end(end);
    }
}

/// A run that is under way.
pub(super) struct UnderWay<'a>(&'a Traffic);

impl<'a> UnderWay<'a> {
    pub(super) fn begin(traffic: &'a Traffic) -> Result<Self, c_int> {
        let symbol = "rknn_matmul_run";
        traffic.begin(symbol, |calls| {
            if calls & ENTERED != 0 {
                let reason = format!("{symbol} was called during another call");
                return Err(traffic.lock_up(&reason));
            }
            Ok(calls + 1)
        })?;
        Ok(Self(traffic))
    }

    /// Returns `true` if another run is under way.
    pub(super) fn has_company(&self) -> bool {
        self.0.calls.load(Ordering::Acquire) & !(ENTERED | LOCKED_UP) > 1
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let end = |calls: &AtomicUsize| calls.fetch_sub(1, Ordering::AcqRel) - 1;
        self.0.end(end);
    }
}
