//! Calls and submissions that fail on request: the list in `GGML_RUST_NPU_SIM_FAULTS`, and the
//! counters that decide when.
//!
//! ```text
//! faults = fault , { "," , fault }
//! fault  = function ":" nth [ "+" ] "=" code       remote_handle64_open:1=0x80000406   rpcmem_alloc:10+=2
//!        | "dsp" ":" nth [ "+" ] "=" trouble       dsp:3=hang
//! trouble = "hang" | "lost" | "corrupt" | "badring" | "wrong"
//! ```
//!
//! `function` is a vendor symbol, `nth` counts from 1 in each machine, `+` means that call and all
//! later ones. `code` is a return code, decimal or hexadecimal, not 0; functions that return a
//! pointer return `MAP_FAILED` for -1, else null. `dsp` counts submissions; see [`Trouble`].

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::ffi::SYMBOLS;

/// The name of the DSP in a fault list.
const DSP: &str = "dsp";

/// Failure of a submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// It is never answered: the call that serves the ring blocks until its handle is closed or the
    /// machine is dropped.
    Hang,
    /// It is not answered: the process on the DSP is gone, the serving call fails, and so does
    /// every later one.
    Lost,
    /// It is answered with an impossible completion.
    Corrupt,
    /// The counters of the ring become nonsense; the rest is as with [`Self::Hang`].
    BadRing,
    /// It is answered normally, but the first element of each of its results is wrong.
    Wrong,
}

/// Consequence of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// A function of [`SYMBOLS`] returns a code.
    Code(&'static str, c_int),
    /// A submission goes wrong.
    Dsp(Trouble),
}

/// One kind of call or submission that goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Consequence for the call or submission.
    pub effect: Effect,
    /// Affected calls or submissions.
    pub when: When,
}

/// Numbers of the affected calls or submissions, starting with 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum When {
    /// Only this one.
    Nth(u64),
    /// This one and all later ones.
    From(u64),
}

impl When {
    fn includes(self, call: u64) -> bool {
        match self {
            Self::Nth(n) => call == n,
            Self::From(n) => call >= n,
        }
    }
}

/// A piece of a fault list that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FaultError {
    /// It does not follow the syntax.
    #[error(
        "bad fault \"{piece}\": {reason}; want function:nth=code, function:nth+=code or dsp:nth=hang|lost|corrupt|badring|wrong"
    )]
    Syntax {
        /// The piece between commas.
        piece: String,
        /// Reason why it cannot be read.
        reason: &'static str,
    },
    /// It names a function that this stand-in does not have, though another stand-in may have it.
    #[error("fault \"{piece}\": unknown function \"{function}\", want dsp or one of {}", SYMBOLS.join(", "))]
    UnknownFunction {
        /// The piece between commas.
        piece: String,
        /// The name before the colon.
        function: String,
    },
}

/// Returns `true` if a fault of `function` belongs to this stand-in.
#[must_use]
pub fn knows(function: &str) -> bool {
    function == DSP || SYMBOLS.contains(&function)
}

/// Reads a comma-separated fault list; an empty text is no faults.
///
/// # Errors
/// The first piece that is malformed, names an unknown function, counts from 0 or has the code 0.
pub fn parse_faults(text: &str) -> Result<Vec<Fault>, FaultError> {
    text.split(',')
        .map(str::trim)
        .filter(|piece| !piece.is_empty())
        .map(parse_fault)
        .collect()
}

fn parse_fault(piece: &str) -> Result<Fault, FaultError> {
    let syntax = |reason| FaultError::Syntax {
        piece: piece.to_owned(),
        reason,
    };
    let (name, rest) = piece.split_once(':').ok_or(syntax("no colon"))?;
    if !knows(name) {
        return Err(FaultError::UnknownFunction {
            piece: piece.to_owned(),
            function: name.to_owned(),
        });
    }
    let (nth, what) = rest.split_once('=').ok_or(syntax("no equals sign"))?;
    let effect = match SYMBOLS.iter().find(|symbol| **symbol == name) {
        Some(symbol) => Effect::Code(symbol, parse_code(what).map_err(syntax)?),
        None => Effect::Dsp(match what {
            "hang" => Trouble::Hang,
            "lost" => Trouble::Lost,
            "corrupt" => Trouble::Corrupt,
            "badring" => Trouble::BadRing,
            "wrong" => Trouble::Wrong,
            _ => return Err(syntax("not one of hang, lost, corrupt, badring, wrong")),
        }),
    };
    let (nth, open) = match nth.strip_suffix('+') {
        Some(nth) => (nth, true),
        None => (nth, false),
    };
    let nth: u64 = nth
        .parse()
        .map_err(|_| syntax("the count is not an integer"))?;
    if nth == 0 {
        return Err(syntax("the count starts at 1"));
    }
    let when = if open {
        When::From(nth)
    } else {
        When::Nth(nth)
    };
    Ok(Fault { effect, when })
}

/// Parses a return code: `0x80000406`, `-1`, `2`.
fn parse_code(text: &str) -> Result<c_int, &'static str> {
    let code = match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok().map(u32::cast_signed),
        None => text.parse().ok(),
    };
    match code {
        None => Err("the code is not an integer of 32 bits"),
        Some(0) => Err("the code is 0, which is success"),
        Some(code) => Ok(code),
    }
}

/// Counts the calls and submissions of a machine, and decides which fail.
#[derive(Debug)]
pub(super) struct Injector {
    faults: Vec<Fault>,
    calls: [AtomicU64; SYMBOLS.len()],
    refusals: [AtomicU64; SYMBOLS.len()],
    submissions: AtomicU64,
}

impl Injector {
    pub(super) fn new(faults: Vec<Fault>) -> Self {
        Self {
            faults,
            calls: [const { AtomicU64::new(0) }; SYMBOLS.len()],
            refusals: [const { AtomicU64::new(0) }; SYMBOLS.len()],
            submissions: AtomicU64::new(0),
        }
    }

    /// Counts a call of `symbol`.
    ///
    /// # Errors
    /// The code to return, if this call must fail.
    pub(super) fn call(&self, symbol: &str) -> Result<(), c_int> {
        let Some(counter) = counter(&self.calls, symbol) else {
            return Ok(());
        };
        let call = counter.fetch_add(1, Ordering::Relaxed) + 1;
        let code = self.faults.iter().find_map(|fault| match fault.effect {
            Effect::Code(name, code) if name == symbol && fault.when.includes(call) => Some(code),
            _ => None,
        });
        match code {
            None => Ok(()),
            Some(code) => {
                super::vendor_error!("{symbol}: call {call} fails with {code:#x} on request");
                Err(code)
            }
        }
    }

    /// Counts a submission and returns its fate.
    pub(super) fn submission(&self) -> Option<Trouble> {
        let nth = self.submissions.fetch_add(1, Ordering::Relaxed) + 1;
        let trouble = self.faults.iter().find_map(|fault| match fault.effect {
            Effect::Dsp(trouble) if fault.when.includes(nth) => Some(trouble),
            _ => None,
        });
        if let Some(trouble) = trouble {
            super::vendor_error!("submission {nth}: {trouble:?} on request");
        }
        trouble
    }

    /// Returns `true` if the results of the current submission must be wrong.
    pub(super) fn spoils(&self) -> bool {
        let nth = self.submissions() + 1;
        let wrong = Effect::Dsp(Trouble::Wrong);
        (self.faults.iter()).any(|fault| fault.effect == wrong && fault.when.includes(nth))
    }

    pub(super) fn submissions(&self) -> u64 {
        self.submissions.load(Ordering::Relaxed)
    }

    pub(super) fn calls(&self, symbol: &str) -> u64 {
        counter(&self.calls, symbol).map_or(0, |counter| counter.load(Ordering::Relaxed))
    }

    /// Counts a call that broke a rule.
    pub(super) fn refuse(&self, symbol: &str) {
        if let Some(counter) = counter(&self.refusals, symbol) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn refusals(&self, symbol: &str) -> u64 {
        counter(&self.refusals, symbol).map_or(0, |counter| counter.load(Ordering::Relaxed))
    }
}

/// Returns the counter of a function.
fn counter<'a>(counters: &'a [AtomicU64], symbol: &str) -> Option<&'a AtomicU64> {
    let index = SYMBOLS.iter().position(|known| *known == symbol)?;
    counters.get(index)
}
