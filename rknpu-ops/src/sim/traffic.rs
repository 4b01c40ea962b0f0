//! The calls that are under way in a machine: runs of several contexts side by side, or one call of another kind.
//!
//! A call that makes, binds, syncs or drops something while a run is under way locks the machine up: that call
//! and all later ones fail.
//!
//! SOURCE: airockchip/rknn-toolkit2 issue 533 (librknnrt 2.3.2, driver 0.9.6): memory that one thread makes or frees with
//! one context while another one runs ends in failed submissions, a lockup and a kernel panic. unimatrix099's fork of
//! rk-llama.cpp moved the creation of contexts out of the threads that run them.

use std::ffi::c_int;
use std::sync::{Arc, Mutex};

use super::{ChipState, lock, vendor_error};
use crate::ffi::code;

/// The calls that are under way.
#[derive(Debug, Default)]
pub(super) struct Traffic(Mutex<Calls>);

#[derive(Debug, Default)]
struct Calls {
    runs: usize,
    /// A thread is in a function that is not `rknn_matmul_run`.
    entered: bool,
    /// Reason why the machine answers no more.
    locked_up: Option<String>,
}

impl Traffic {
    /// Returns the reason why the machine answers no more.
    pub(super) fn locked_up(&self) -> Option<String> {
        lock(&self.0).locked_up.clone()
    }

    /// Ends the machine's answers.
    pub(super) fn lock_up(&self, reason: &str) {
        lock(&self.0).lock_up(reason.to_owned());
    }
}

impl Calls {
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
        let mut calls = lock(&state.traffic.0);
        calls.check(symbol)?;
        if calls.entered {
            vendor_error!("{symbol}: another thread is in the library");
            return Err(code::FAIL);
        }
        if calls.runs > 0 {
            return Err(calls.lock_up(format!("{symbol} was called during a run")));
        }
        calls.entered = true;
        Ok(Self(Arc::clone(state)))
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        lock(&self.0.traffic.0).entered = false;
    }
}

/// A run that is under way.
pub(super) struct UnderWay<'a>(&'a Traffic);

impl<'a> UnderWay<'a> {
    pub(super) fn begin(traffic: &'a Traffic) -> Result<Self, c_int> {
        let symbol = "rknn_matmul_run";
        let mut calls = lock(&traffic.0);
        calls.check(symbol)?;
        if calls.entered {
            return Err(calls.lock_up(format!("{symbol} was called during another call")));
        }
        calls.runs += 1;
        Ok(Self(traffic))
    }

    /// Returns `true` if another run is under way.
    pub(super) fn has_company(&self) -> bool {
        lock(&self.0.0).runs > 1
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        lock(&self.0.0).runs -= 1;
    }
}
