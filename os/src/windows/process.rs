//! The process: signals, forks, open files. Windows has none of the first two, and no limit of
//! handles that a program meets.
#![expect(unsafe_code, reason = "the functions have the Unix half's contracts")]

use std::ffi::c_int;
use std::io;
use std::sync::OnceLock;

use windows_sys::Win32::System::Console::SetConsoleCtrlHandler;

/// The number of the error of a call that a signal ended.
// SOURCE: EINTR of Microsoft's errno.h.
pub const INTERRUPTED: i32 = 4;

/// Runs `spawn`; there are no signals.
pub fn without_signals<T>(spawn: impl FnOnce() -> T) -> T {
    spawn()
}

/// Calls `mark` in each process that is forked from this one: there are none.
///
/// # Safety
/// `mark` only does operations that are allowed between fork and exec, such as storing into an
/// atomic.
///
/// # Errors
/// None.
pub unsafe fn on_fork(_mark: extern "C" fn()) -> io::Result<()> {
    Ok(())
}

/// Returns the limit of open files, which need not be raised.
///
/// # Errors
/// None.
pub fn raise_file_limit(_most: u64) -> io::Result<u64> {
    file_limit()
}

/// Returns the limit of open files.
///
/// # Errors
/// None.
pub fn file_limit() -> io::Result<u64> {
    // SOURCE: Microsoft's documentation of kernel objects: 2^24 handles a process.
    Ok(1 << 24)
}

/// The argument of [`before_end`].
static BEFORE_END: OnceLock<fn()> = OnceLock::new();

extern "system" fn ending(_event: u32) -> i32 {
    if let Some(call) = BEFORE_END.get() {
        call();
    }
    // Whoever else handles the event comes next.
    0
}

/// Calls `call` on a thread when Ctrl+C or the end of the console is about to end the program. Only
/// the first call of this function has an effect.
///
/// # Errors
/// The system's.
pub fn before_end(call: fn()) -> io::Result<()> {
    if BEFORE_END.set(call).is_err() {
        return Ok(());
    }
    // SAFETY: the handler is a function of this program, with the signature that is asked for.
    if unsafe { SetConsoleCtrlHandler(Some(ending), 1) } == 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Ends the process without destructors of Rust.
pub fn exit_at_once(code: c_int) -> ! {
    std::process::exit(code)
}
