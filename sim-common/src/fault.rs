//! Calls that fail on request: the grammar of `GGML_RUST_NPU_SIM_FAULTS`, and the counters that
//! decide when.
//!
//! ```text
//! faults = fault , { "," , fault }
//! fault  = function ":" nth [ "+" ] "=" code       rknn_matmul_run:3=-1   rpcmem_alloc:10+=2
//!        | added by a stand-in                    dsp:3=hang   rknn_matmul_run:M2=0
//! ```
//!
//! `function` is a vendor symbol, `nth` counts from 1 in each machine, and `+` means that call and
//! all later ones. A stand-in's [`Grammar`] parses codes, and adds events other than return codes.

use std::ffi::c_int;
use std::fmt::{Debug, Display};
use std::sync::atomic::{AtomicU64, Ordering};

/// The part of the grammar that belongs to one stand-in; the type itself is the events that it
/// adds.
pub trait Grammar: Copy + Debug + Display + PartialEq + 'static {
    /// The vendor's names of the functions that can fail.
    const SYMBOLS: &'static [&'static str];
    /// Further names before the colon.
    const NAMES: &'static [&'static str] = &[];
    /// Log target, the vendor library's name.
    const TARGET: &'static str;

    /// Returns the allowed forms, for error texts.
    fn syntax() -> String;

    /// Parses the code of a function.
    ///
    /// # Errors
    /// The reason why the text is not a code.
    fn code(text: &str) -> Result<c_int, &'static str>;

    /// Parses the parts of `name:nth=what` as an event; `None` if they are a function and a code.
    ///
    /// # Errors
    /// The reason why they cannot be read.
    fn event(name: &str, nth: &str, what: &str) -> Option<Result<FaultOf<Self>, &'static str>>;
}

/// Consequence of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect<G> {
    /// A function of the vendor's returns a code.
    Code(&'static str, c_int),
    /// An event of the stand-in's.
    Event(G),
}

/// One kind of call or event that goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultOf<G> {
    /// Consequence for the call or event.
    pub effect: Effect<G>,
    /// Affected calls or events.
    pub when: When,
}

/// Numbers of the affected calls or events, starting with 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum When {
    /// Only this call or event.
    Nth(u64),
    /// This call or event and all later ones.
    From(u64),
}

impl When {
    /// Parses `nth [ "+" ]`.
    ///
    /// # Errors
    /// The reason why the text cannot be read.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        let (nth, when): (_, fn(u64) -> Self) = match text.strip_suffix('+') {
            Some(nth) => (nth, Self::From),
            None => (text, Self::Nth),
        };
        match nth.parse() {
            Err(_) => Err("the count is not an integer"),
            Ok(0) => Err("the count starts at 1"),
            Ok(nth) => Ok(when(nth)),
        }
    }

    fn includes(self, call: u64) -> bool {
        match self {
            Self::Nth(n) => call == n,
            Self::From(n) => call >= n,
        }
    }
}

/// An item of a fault list that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FaultError {
    /// The item does not follow the syntax.
    #[error("bad fault \"{piece}\": {reason}; want {syntax}")]
    Syntax {
        /// The text between commas.
        piece: String,
        /// Reason why it cannot be read.
        reason: &'static str,
        /// The allowed forms.
        syntax: String,
    },
    /// The item names a function that this stand-in does not have, though another stand-in may have
    /// it.
    #[error("fault \"{piece}\": unknown function \"{function}\", want one of {known}")]
    UnknownFunction {
        /// The text between commas.
        piece: String,
        /// The name before the colon.
        function: String,
        /// The names that the stand-in knows.
        known: String,
    },
}

/// Returns `true` if a fault of `function` belongs to this stand-in.
#[must_use]
pub fn knows<G: Grammar>(function: &str) -> bool {
    G::NAMES.contains(&function) || G::SYMBOLS.contains(&function)
}

/// Parses a comma-separated fault list; an empty text has no faults.
///
/// # Errors
/// The first item that is malformed, names an unknown function, counts from 0 or has a code that
/// the stand-in does not allow.
pub fn parse<G: Grammar>(text: &str) -> Result<Vec<FaultOf<G>>, FaultError> {
    text.split(',')
        .map(str::trim)
        .filter(|piece| !piece.is_empty())
        .map(parse_item)
        .collect()
}

fn parse_item<G: Grammar>(piece: &str) -> Result<FaultOf<G>, FaultError> {
    let syntax = |reason| FaultError::Syntax {
        piece: piece.to_owned(),
        reason,
        syntax: G::syntax(),
    };
    let (name, rest) = piece.split_once(':').ok_or(syntax("no colon"))?;
    if !knows::<G>(name) {
        return Err(FaultError::UnknownFunction {
            piece: piece.to_owned(),
            function: name.to_owned(),
            known: [G::NAMES, G::SYMBOLS].concat().join(", "),
        });
    }
    let (nth, what) = rest.split_once('=').ok_or(syntax("no equals sign"))?;
    let symbol = G::SYMBOLS.iter().find(|symbol| **symbol == name);
    match (G::event(name, nth, what), symbol) {
        (Some(event), _) => event,
        (None, Some(symbol)) => G::code(what).and_then(|code| {
            Ok(FaultOf {
                effect: Effect::Code(symbol, code),
                when: When::parse(nth)?,
            })
        }),
        (None, None) => Err("it has no code"),
    }
    .map_err(syntax)
}

/// Counts the calls and events of a machine, and decides which go wrong.
#[derive(Debug)]
pub struct Injector<G> {
    faults: Vec<FaultOf<G>>,
    calls: Vec<AtomicU64>,
    refusals: Vec<AtomicU64>,
    events: AtomicU64,
}

impl<G: Grammar> Injector<G> {
    /// Starts counting.
    #[must_use]
    pub fn new(faults: Vec<FaultOf<G>>) -> Self {
        let counters = || G::SYMBOLS.iter().map(|_| AtomicU64::new(0)).collect();
        Self {
            faults,
            calls: counters(),
            refusals: counters(),
            events: AtomicU64::new(0),
        }
    }

    /// Counts a call of `symbol`.
    ///
    /// # Errors
    /// Returns the code as an error, if this call must fail.
    pub fn call(&self, symbol: &str) -> Result<(), c_int> {
        let Some(counter) = counter::<G>(&self.calls, symbol) else {
            return Ok(());
        };
        let call = counter.fetch_add(1, Ordering::Relaxed) + 1;
        let code = self.faults.iter().find_map(|fault| match fault.effect {
            Effect::Code(name, code) if name == symbol && fault.when.includes(call) => Some(code),
            _ => None,
        });
        let Some(code) = code else { return Ok(()) };
        log::error!(target: G::TARGET, "{symbol}: call {call} fails with {code} ({code:#x}) on request");
        Err(code)
    }

    /// Counts an event, and returns its fault, if it has one.
    pub fn event(&self) -> Option<G> {
        let nth = self.events.fetch_add(1, Ordering::Relaxed) + 1;
        let fate = self.faults.iter().find_map(|fault| match fault.effect {
            Effect::Event(fate) if fault.when.includes(nth) => Some(fate),
            _ => None,
        });
        if let Some(fate) = fate {
            log::error!(target: G::TARGET, "number {nth}: {fate} on request");
        }
        fate
    }

    /// Returns `true` if the fault `fate` is requested for the next event.
    #[must_use]
    pub fn expects(&self, fate: G) -> bool {
        let nth = self.events() + 1;
        let effect = Effect::Event(fate);
        (self.faults.iter()).any(|fault| fault.effect == effect && fault.when.includes(nth))
    }

    /// Returns the number of events.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.events.load(Ordering::Relaxed)
    }

    /// Returns the number of calls of `symbol`; 0 for an unknown name.
    #[must_use]
    pub fn calls(&self, symbol: &str) -> u64 {
        counter::<G>(&self.calls, symbol).map_or(0, |counter| counter.load(Ordering::Relaxed))
    }

    /// Counts a call that broke a rule.
    pub fn refuse(&self, symbol: &str) {
        if let Some(counter) = counter::<G>(&self.refusals, symbol) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the number of calls of `symbol` that broke a rule.
    #[must_use]
    pub fn refusals(&self, symbol: &str) -> u64 {
        counter::<G>(&self.refusals, symbol).map_or(0, |counter| counter.load(Ordering::Relaxed))
    }
}

/// Returns the counter of a function.
fn counter<'a, G: Grammar>(counters: &'a [AtomicU64], symbol: &str) -> Option<&'a AtomicU64> {
    let index = G::SYMBOLS.iter().position(|known| *known == symbol)?;
    counters.get(index)
}
