//! Calls that fail on request: the list in `GGML_RUST_NPU_SIM_FAULTS`, and the counters that decide
//! when.
//!
//! ```text
//! faults = fault , { "," , fault }
//! fault  = function ":" nth [ "+" ] "=" code        rknn_matmul_run:3=-1   rknn_create_mem:10+=-4
//!        | "rknn_matmul_run:M" rows "=0"            rknn_matmul_run:M2=0
//! ```
//!
//! `function` is a vendor symbol, `nth` counts from 1 in each machine, `+` means that call and all
//! later ones, `code` is a negative return code; functions that return a pointer return null for
//! every code. The second form is a silent fault: each run with this M returns 0 and leaves wrong
//! numbers in C.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::ffi::SYMBOLS;

/// The only function with a silent fault.
const RUN: &str = "rknn_matmul_run";

/// One kind of call that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// One of [`SYMBOLS`].
    pub function: &'static str,
    /// Affected calls.
    pub when: When,
    /// Their return code.
    pub code: c_int,
}

/// Numbers of the calls of a function that fail, starting with 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum When {
    /// Only this call.
    Nth(u64),
    /// This call and all later ones.
    From(u64),
    /// Each run with this M: it returns 0 and its result is wrong.
    // SOURCE: librknnrt 1.5.2 computes M = 2 wrong in every call, FP16 and INT8 (observed under
    // qemu-aarch64, 2026-11-22).
    Rows(usize),
}

impl When {
    fn includes(self, call: u64) -> bool {
        match self {
            Self::Nth(n) => call == n,
            Self::From(n) => call >= n,
            Self::Rows(_) => false,
        }
    }
}

/// A piece of a fault list that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "bad fault \"{piece}\": {reason}; want function:nth=code or function:nth+=code with function one of {}, or {RUN}:M<rows>=0",
    SYMBOLS.join(", ")
)]
pub struct FaultSyntax {
    /// The piece between commas.
    pub piece: String,
    /// Reason why it cannot be read.
    pub reason: &'static str,
}

/// Reads a comma-separated fault list; an empty text is no faults.
///
/// # Errors
/// The first piece that is malformed, names an unknown function, counts from 0 or has a code that
/// is not negative.
pub fn parse_faults(text: &str) -> Result<Vec<Fault>, FaultSyntax> {
    text.split(',')
        .map(str::trim)
        .filter(|piece| !piece.is_empty())
        .map(|piece| {
            parse_fault(piece).map_err(|reason| FaultSyntax {
                piece: piece.to_owned(),
                reason,
            })
        })
        .collect()
}

fn parse_fault(piece: &str) -> Result<Fault, &'static str> {
    let (name, rest) = piece.split_once(':').ok_or("no colon")?;
    let function = SYMBOLS
        .iter()
        .find(|symbol| **symbol == name)
        .ok_or("unknown function")?;
    let (nth, code) = rest.split_once('=').ok_or("no equals sign")?;
    let code: c_int = code.parse().map_err(|_| "the code is not an integer")?;
    if let (&RUN, Some(rows), 0) = (function, nth.strip_prefix('M'), code) {
        let rows = rows.parse().map_err(|_| "M is not an integer")?;
        let when = When::Rows(rows);
        return Ok(Fault {
            function,
            when,
            code,
        });
    }
    if code >= 0 {
        return Err("the code is not negative");
    }
    let (nth, open) = match nth.strip_suffix('+') {
        Some(nth) => (nth, true),
        None => (nth, false),
    };
    let nth: u64 = nth.parse().map_err(|_| "the count is not an integer")?;
    if nth == 0 {
        return Err("the count starts at 1");
    }
    Ok(Fault {
        function,
        when: if open {
            When::From(nth)
        } else {
            When::Nth(nth)
        },
        code,
    })
}

/// Counts the calls of a machine, and decides which fail.
#[derive(Debug)]
pub(super) struct Injector {
    faults: Vec<Fault>,
    calls: [AtomicU64; SYMBOLS.len()],
}

impl Injector {
    pub(super) fn new(faults: Vec<Fault>) -> Self {
        Self {
            faults,
            calls: [const { AtomicU64::new(0) }; SYMBOLS.len()],
        }
    }

    /// Counts a call of `symbol`.
    ///
    /// # Errors
    /// The code to return, if this call must fail.
    pub(super) fn call(&self, symbol: &str) -> Result<(), c_int> {
        let Some(counter) = self.counter(symbol) else {
            return Ok(());
        };
        let call = counter.fetch_add(1, Ordering::Relaxed) + 1;
        let fault = self
            .faults
            .iter()
            .find(|fault| fault.function == symbol && fault.when.includes(call));
        match fault {
            Some(fault) => {
                super::vendor_error!("{symbol}: call {call} fails with {} on request", fault.code);
                Err(fault.code)
            }
            None => Ok(()),
        }
    }

    /// Returns `true` if runs with M = `rows` must leave wrong numbers.
    pub(super) fn spoils(&self, rows: usize) -> bool {
        self.faults
            .iter()
            .any(|fault| fault.when == When::Rows(rows))
    }

    pub(super) fn calls(&self, symbol: &str) -> u64 {
        self.counter(symbol)
            .map_or(0, |counter| counter.load(Ordering::Relaxed))
    }

    fn counter(&self, symbol: &str) -> Option<&AtomicU64> {
        let index = SYMBOLS.iter().position(|known| *known == symbol)?;
        self.calls.get(index)
    }
}
