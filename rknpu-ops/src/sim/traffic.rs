//! The calls that are under way in a machine: runs of several contexts side by side, or one call of
//! another kind.
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
use std::sync::{Arc, Mutex};

use super::shared::SharedNode;
use super::{ChipState, lock, vendor_error};
use crate::ffi::code;

/// The calls that are under way.
#[derive(Debug)]
pub(super) struct Traffic {
    calls: Mutex<Calls>,
    /// The node that other processes share.
    node: Option<Arc<SharedNode>>,
}

#[derive(Debug, Default)]
struct Calls {
    runs: usize,
    /// A thread is in a function that is not `rknn_matmul_run`.
    entered: bool,
    /// Reason why the machine answers no more.
    locked_up: Option<String>,
}

impl Traffic {
    pub(super) fn new(node: Option<Arc<SharedNode>>) -> Self {
        Self {
            calls: Mutex::default(),
            node,
        }
    }

    /// Notes a call of `symbol`, if `change` lets it begin.
    fn begin(
        &self,
        symbol: &str,
        change: impl FnOnce(&mut Calls) -> Result<(), c_int>,
    ) -> Result<(), c_int> {
        let mut calls = lock(&self.calls);
        calls.check(symbol)?;
        let was_empty = calls.is_empty();
        change(&mut calls)?;
        let entered = match &self.node {
            Some(node) if was_empty => node.enter(),
            _ => Ok(()),
        };
        entered.map_err(|rule| {
            (calls.runs, calls.entered) = (0, false);
            calls.lock_up(format!("{symbol} was called while {rule}"))
        })
    }

    /// Notes the end of a call.
    fn end(&self, change: impl FnOnce(&mut Calls)) {
        let mut calls = lock(&self.calls);
        change(&mut calls);
        if let (Some(node), true) = (&self.node, calls.is_empty()) {
            node.leave();
        }
    }

    /// Returns the reason why the machine answers no more.
    pub(super) fn locked_up(&self) -> Option<String> {
        lock(&self.calls).locked_up.clone()
    }

    /// Ends the machine's answers.
    pub(super) fn lock_up(&self, reason: &str) {
        lock(&self.calls).lock_up(reason.to_owned());
    }
}

impl Calls {
    fn is_empty(&self) -> bool {
        self.runs == 0 && !self.entered
    }

    fn lock_up(&mut self, reason: String) -> c_int {
        vendor_error!("the NPU is locked up: {reason}");
        self.locked_up.get_or_insert(reason);
        code::FAIL
    }

    /// Fails after a lockup.
    fn check(&self, symbol: &str) -> Result<(), c_int> {
        match &self.locked_up {
            None => Ok(()),
            Some(reason) => {
                vendor_error!("{symbol}: the NPU is locked up: {reason}");
                Err(code::FAIL)
            }
        }
    }
}

/// A machine whose functions no other thread may call.
pub(super) struct Alone(Arc<ChipState>);

impl Alone {
    pub(super) fn enter(state: &Arc<ChipState>, symbol: &str) -> Result<Self, c_int> {
        state.traffic.begin(symbol, |calls| {
            if calls.entered {
                vendor_error!("{symbol}: another thread is in the library");
                return Err(code::FAIL);
            }
            if calls.runs > 0 {
                return Err(calls.lock_up(format!("{symbol} was called during a run")));
            }
            calls.entered = true;
            Ok(())
        })?;
        Ok(Self(Arc::clone(state)))
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        self.0.traffic.end(|calls| calls.entered = false);
    }
}

/// A run that is under way.
pub(super) struct UnderWay<'a>(&'a Traffic);

impl<'a> UnderWay<'a> {
    pub(super) fn begin(traffic: &'a Traffic) -> Result<Self, c_int> {
        let symbol = "rknn_matmul_run";
        traffic.begin(symbol, |calls| {
            if calls.entered {
                return Err(calls.lock_up(format!("{symbol} was called during another call")));
            }
            calls.runs += 1;
            Ok(())
        })?;
        Ok(Self(traffic))
    }

    /// Returns `true` if another run is under way.
    pub(super) fn has_company(&self) -> bool {
        lock(&self.0.calls).runs > 1
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.end(|calls| calls.runs -= 1);
    }
}
