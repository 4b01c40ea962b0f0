//! Ends the tool on a signal, without leaving unfinished outputs or a server that it started.

use std::ffi::c_int;
use std::fs;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use ggml_rust_npu::files;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level;
use test_time_scaling::local;

use crate::ToolError;
use crate::text::say;

/// Exit code of a program that a signal ended.
const INTERRUPTED: c_int = 130;

/// Held by whoever tells why the tool ends.
static LAST_WORDS: Mutex<()> = Mutex::new(());

/// Keeps a signal from ending the tool while the result lives. If one is doing so, this waits for
/// the end: what fails then fails because of it.
pub fn hold_off() -> MutexGuard<'static, ()> {
    LAST_WORDS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Begins to wait for signals that end a program, on a thread.
///
/// # Errors
/// The system's.
pub fn watch() -> Result<(), ToolError> {
    let ignored = ignored();
    let wanted = [SIGINT, SIGTERM, SIGHUP];
    let mut signals = Signals::new(
        wanted
            .iter()
            .filter(|signal| ignored >> (*signal - 1) & 1 == 0),
    )?;
    thread::Builder::new().spawn(move || {
        if signals.forever().next().is_some() {
            let _last_words = hold_off();
            let _names = files::remove_unfinished();
            local::kill_all();
            say("ggml-npu: interrupted; unfinished files were removed");
            // Runs no destructors, because other threads may still use what they would free.
            low_level::exit(INTERRUPTED);
        }
    })?;
    Ok(())
}

/// Returns the signals that the starter of the tool wants it to survive, such as SIGHUP under
/// nohup: bit 0 is signal 1.
fn ignored() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}
