//! Calls and submissions that fail on request: this stand-in's part of `GGML_RUST_NPU_SIM_FAULTS`.
//!
//! ```text
//! fault   = function ":" nth [ "+" ] "=" code      remote_handle64_open:1=0x80000406   rpcmem_alloc:10+=2
//!         | "dsp" ":" nth [ "+" ] "=" trouble      dsp:3=hang
//! trouble = "hang" | "lost" | "corrupt" | "badring" | "wrong"
//! ```
//!
//! `code` is a return code, decimal or hexadecimal, not 0; functions that return a pointer return
//! `MAP_FAILED` for -1, else null. `dsp` counts submissions; see [`Trouble`]. The rest of the
//! grammar is in [`sim_common::fault`].

use std::ffi::c_int;
use std::fmt;

use sim_common::fault::{Effect, FaultError, FaultOf, Grammar, When};

use crate::ffi::SYMBOLS;

/// The name of the DSP in a fault list.
const DSP: &str = "dsp";

/// One kind of call or submission that goes wrong.
pub type Fault = FaultOf<Trouble>;

/// Failure of a submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The submission is never answered: the call that serves the ring blocks until its handle is
    /// closed or the machine is dropped.
    Hang,
    /// The submission is not answered: the process on the DSP is gone, the serving call fails, and
    /// so does every later one.
    Lost,
    /// The submission is answered with an impossible completion.
    Corrupt,
    /// The counters of the ring become nonsense; the rest is as with [`Self::Hang`].
    BadRing,
    /// It is answered normally, but the first element of each of its results is wrong.
    Wrong,
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::Hang => "hang",
            Self::Lost => "lost",
            Self::Corrupt => "corrupt",
            Self::BadRing => "badring",
            Self::Wrong => "wrong",
        })
    }
}

impl Grammar for Trouble {
    const SYMBOLS: &'static [&'static str] = SYMBOLS;
    const NAMES: &'static [&'static str] = &[DSP];
    const TARGET: &'static str = "libcdsprpc";

    fn syntax() -> String {
        "function:nth=code, function:nth+=code or dsp:nth=hang|lost|corrupt|badring|wrong"
            .to_owned()
    }

    fn code(text: &str) -> Result<c_int, &'static str> {
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

    fn event(name: &str, nth: &str, what: &str) -> Option<Result<Fault, &'static str>> {
        let fault = |trouble| {
            Ok(Fault {
                effect: Effect::Event(trouble),
                when: When::parse(nth)?,
            })
        };
        (name == DSP).then(|| match what {
            "hang" => fault(Self::Hang),
            "lost" => fault(Self::Lost),
            "corrupt" => fault(Self::Corrupt),
            "badring" => fault(Self::BadRing),
            "wrong" => fault(Self::Wrong),
            _ => Err("not one of hang, lost, corrupt, badring, wrong"),
        })
    }
}

/// Returns `true` if a fault of `function` belongs to this stand-in.
#[must_use]
pub fn knows(function: &str) -> bool {
    sim_common::fault::knows::<Trouble>(function)
}

/// Parses a comma-separated fault list; an empty text has no faults.
///
/// # Errors
/// As [`sim_common::fault::parse`].
pub fn parse_faults(text: &str) -> Result<Vec<Fault>, FaultError> {
    sim_common::fault::parse(text)
}
