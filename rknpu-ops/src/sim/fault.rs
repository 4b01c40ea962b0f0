//! Calls that fail on request: this stand-in's part of `GGML_RUST_NPU_SIM_FAULTS`.
//!
//! ```text
//! fault = function ":" nth [ "+" ] "=" code        rknn_matmul_run:3=-1   rknn_create_mem:10+=-4
//!       | "rknn_matmul_run:M" rows [ "K" k ] "=0"  rknn_matmul_run:M2=0   rknn_matmul_run:M64K576=0
//! ```
//!
//! `code` is a negative return code; functions that return a pointer return null for every code.
//! The second form is a silent fault: each run with this M (and this K, if there is one) returns 0
//! and leaves wrong numbers in C. The rest of the grammar is in [`sim_common::fault`].

use std::ffi::c_int;
use std::fmt;

use sim_common::fault::{Effect, FaultError, FaultOf, Grammar, When};

use crate::ffi::SYMBOLS;

/// The only function with a silent fault.
const RUN: &str = "rknn_matmul_run";

/// One kind of call that fails.
pub type Fault = FaultOf<WrongRows>;

/// Each run with this M, and this K if there is one, returns 0, and its result is wrong.
// SOURCE: librknnrt 1.5.2 computes M = 2 wrong in every call, FP16 and INT8 (observed under
// qemu-aarch64, 2026-11-22).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrongRows {
    /// M of the runs.
    pub m: usize,
    /// K of the runs; all if there is none.
    pub k: Option<usize>,
}

impl fmt::Display for WrongRows {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "wrong results with M={}", self.m)?;
        (self.k).map_or(Ok(()), |k| write!(f, " K={k}"))
    }
}

impl Grammar for WrongRows {
    const SYMBOLS: &'static [&'static str] = SYMBOLS;
    const TARGET: &'static str = "librknnrt";

    fn syntax() -> String {
        let functions = SYMBOLS.join(", ");
        format!(
            "function:nth=code or function:nth+=code with function one of {functions}, or {RUN}:M<rows>=0, {RUN}:M<rows>K<k>=0"
        )
    }

    fn code(text: &str) -> Result<c_int, &'static str> {
        match text.parse() {
            Err(_) => Err("the code is not an integer"),
            Ok(0..) => Err("the code is not negative"),
            Ok(code) => Ok(code),
        }
    }

    fn event(name: &str, nth: &str, what: &str) -> Option<Result<Fault, &'static str>> {
        let rows = nth.strip_prefix('M')?;
        (name == RUN && what == "0").then(|| {
            let (rows, k) = match rows.split_once('K') {
                Some((rows, k)) => (rows, Some(k.parse().map_err(|_| "K is not an integer")?)),
                None => (rows, None),
            };
            let m = rows.parse().map_err(|_| "M is not an integer")?;
            Ok(Fault {
                effect: Effect::Event(Self { m, k }),
                when: When::From(1),
            })
        })
    }
}

/// Parses a comma-separated fault list; an empty text has no faults.
///
/// # Errors
/// As [`sim_common::fault::parse`].
pub fn parse_faults(text: &str) -> Result<Vec<Fault>, FaultError> {
    sim_common::fault::parse(text)
}
