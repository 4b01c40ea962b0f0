//! A record of the calls into the vendors' libraries, for reports from devices that the developers
//! do not have.
//!
//! It is off until [`start`], which must come before a library is opened: the tables of libraries
//! opened before are not changed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The value that a function returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Returned {
    /// A code.
    Code(i32),
    /// A pointer or descriptor: whether it is one.
    Valid(bool),
    /// Nothing.
    Nothing,
}

/// Calls of one function with the same arguments and the same result.
#[derive(Clone, Debug)]
pub struct Calls {
    /// The function's name in the vendor's header.
    pub function: &'static str,
    /// The arguments that matter.
    pub arguments: String,
    /// The result.
    pub returned: Returned,
    /// The number of calls.
    pub count: u32,
    /// Time in all calls.
    pub total: Duration,
    /// Time in the longest call.
    pub longest: Duration,
}

/// A value that a vendor's function can return.
pub(crate) trait Result {
    /// Returns the part of it that is recorded.
    fn returned(&self) -> Returned;
}

impl Result for i32 {
    fn returned(&self) -> Returned {
        Returned::Code(*self)
    }
}

impl<T> Result for *mut T {
    fn returned(&self) -> Returned {
        Returned::Valid(!self.is_null())
    }
}

impl Result for () {
    fn returned(&self) -> Returned {
        Returned::Nothing
    }
}

static IS_ON: AtomicBool = AtomicBool::new(false);
static RECORD: Mutex<Vec<Calls>> = Mutex::new(Vec::new());

/// Records the calls into libraries that are opened later.
pub fn start() {
    IS_ON.store(true, Ordering::Relaxed);
}

pub(crate) fn is_on() -> bool {
    IS_ON.load(Ordering::Relaxed)
}

/// Returns the calls since the last time, in the order of their first ones.
pub fn take() -> Vec<Calls> {
    std::mem::take(&mut *RECORD.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Returns the calls since the last [`take`], and keeps them.
pub fn so_far() -> Vec<Calls> {
    RECORD
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone()
}

/// Makes a call and records it.
pub(crate) fn record<R: Result>(
    function: &'static str,
    arguments: String,
    call: impl FnOnce() -> R,
) -> R {
    let began = Instant::now();
    let result = call();
    let (time, returned) = (began.elapsed(), result.returned());
    let mut record = RECORD.lock().unwrap_or_else(PoisonError::into_inner);
    let same = record.iter_mut().find(|calls| {
        calls.function == function && calls.returned == returned && calls.arguments == arguments
    });
    match same {
        Some(calls) => {
            calls.count += 1;
            calls.total += time;
            calls.longest = calls.longest.max(time);
        }
        None => record.push(Calls {
            function,
            arguments,
            returned,
            count: 1,
            total: time,
            longest: time,
        }),
    }
    result
}

/// Declares `traced`, which wraps each function of a table with one that records the call.
///
/// A process that records opens libraries at most `SLOTS` times: one for each chip that it
/// simulates, or one. C functions have no argument that names their table, so each opening has its
/// own copies of them.
macro_rules! traced {
    (
        $api:ident { $($field:ident = $symbol:literal($($arg:ident: $ty:ty),*) -> $ret:ty, $text:expr;)* }
        optional { $($ofield:ident = $osymbol:literal($($oarg:ident: $oty:ty),*) -> $oret:ty, $otext:expr;)* }
    ) => {
        const SLOTS: usize = 8;
        static TABLES: [std::sync::OnceLock<$api>; SLOTS] = [const { std::sync::OnceLock::new() }; SLOTS];

        /// Returns the table; if calls are recorded, its functions record each call before they
        /// make it.
        pub(super) fn traced(api: $api) -> $api {
            if !$crate::driver::trace::is_on() {
                return api;
            }
            let free = TABLES.iter().position(|table| table.set(api).is_ok());
            match free {
                Some(0) => table::<0>(api),
                Some(1) => table::<1>(api),
                Some(2) => table::<2>(api),
                Some(3) => table::<3>(api),
                Some(4) => table::<4>(api),
                Some(5) => table::<5>(api),
                Some(6) => table::<6>(api),
                Some(7) => table::<7>(api),
                _ => api,
            }
        }

        fn table<const SLOT: usize>(api: $api) -> $api {
            $api {
                $($field: $field::<SLOT>,)*
                $($ofield: api.$ofield.and(Some($ofield::<SLOT>)),)*
                ..api
            }
        }

        $(unsafe extern "C" fn $field<const SLOT: usize>($($arg: $ty),*) -> $ret {
            // PANIC: `traced` hands this function out after it has filled the slot.
            let api = TABLES[SLOT].get().expect("a filled slot");
            // SAFETY: the arguments are the caller's, who satisfies the function's requirements.
            $crate::driver::trace::record($symbol, $text, || unsafe { (api.$field)($($arg),*) })
        })*

        $(unsafe extern "C" fn $ofield<const SLOT: usize>($($oarg: $oty),*) -> $oret {
            // PANIC: `traced` hands this function out after it has filled the slot, and only if the
            // table has it.
            let function = TABLES[SLOT].get().and_then(|api| api.$ofield).expect("a filled slot");
            // SAFETY: as above.
            $crate::driver::trace::record($osymbol, $otext, || unsafe { function($($oarg),*) })
        })*
    };
}
pub(crate) use traced;
