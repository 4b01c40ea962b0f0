//! Ends the tool on a signal, without leaving unfinished outputs or a server that it started.

use std::ffi::c_int;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ggml_rust_npu::files;
use test_time_scaling::local;

use crate::ToolError;
use crate::text::say;

/// Exit code of a program that a signal ended.
const INTERRUPTED: c_int = 130;

/// Locked by the thread that reports why the tool ends.
static LAST_WORDS: Mutex<()> = Mutex::new(());

/// Keeps a signal from ending the tool while the result lives. If a signal is already ending the
/// tool, this waits for the end, so that no failure caused by it is reported.
pub fn hold_off() -> MutexGuard<'static, ()> {
    LAST_WORDS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Begins to wait for signals that end a program.
///
/// # Errors
/// An error of the system.
pub fn watch() -> Result<(), ToolError> {
    Ok(os::process::before_end(|| {
        let _last_words = hold_off();
        let _names = files::remove_unfinished();
        local::kill_all();
        say("ggml-npu: interrupted; unfinished files were removed");
        // Runs no destructors, because other threads may still use values that they would free.
        os::process::exit_at_once(INTERRUPTED);
    })?)
}
