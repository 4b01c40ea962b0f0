//! The process: signals, forks, open files.
#![expect(unsafe_code, reason = "signals and forks are handled by C functions")]

use std::ffi::c_int;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::thread;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// The number of the error of a call that a signal ended.
pub const INTERRUPTED: i32 = libc::EINTR;

/// Runs `spawn` with all signals blocked in this thread: threads that it starts never get any.
///
/// A driver that waits interruptibly gives a call up when its thread gets a signal, also one that
/// stops and continues the process.
pub fn without_signals<T>(spawn: impl FnOnce() -> T) -> T {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: there is room for a set.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    // SAFETY: the first set was filled above, and there is room for the second.
    let failed =
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) };
    let result = spawn();
    if failed == 0 {
        // SAFETY: the call above has filled the set.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    }
    result
}

/// Calls `mark` in each process that is forked from this one.
///
/// # Safety
/// `mark` only does operations that are allowed between fork and exec, such as storing into an
/// atomic.
///
/// # Errors
/// The system's.
pub unsafe fn on_fork(mark: extern "C" fn()) -> io::Result<()> {
    // SAFETY: passed on to the caller; the C library forgets the handlers of a library that is
    // unloaded.
    match unsafe { libc::pthread_atfork(None, None, Some(mark)) } {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

/// Raises the limit of open files as far as the system allows, but not above `most`; returns it.
///
/// # Errors
/// The system's.
pub fn raise_file_limit(most: u64) -> io::Result<u64> {
    rlimit::increase_nofile_limit(most)
}

/// Returns the limit of open files.
///
/// # Errors
/// The system's.
pub fn file_limit() -> io::Result<u64> {
    rlimit::getrlimit(rlimit::Resource::NOFILE).map(|(soft, _)| soft)
}

/// Calls `call` on a thread when a signal is about to end the program, unless its starter wants it
/// to survive that signal.
///
/// # Errors
/// The system's.
pub fn before_end(call: fn()) -> io::Result<()> {
    let ignored = ignored();
    let wanted = [SIGINT, SIGTERM, SIGHUP];
    let mut signals = Signals::new(
        wanted
            .iter()
            .filter(|signal| ignored >> (*signal - 1) & 1 == 0),
    )?;
    thread::Builder::new().spawn(move || {
        if signals.forever().next().is_some() {
            call();
        }
    })?;
    Ok(())
}

/// Returns the signals that the starter of the program wants it to survive, such as SIGHUP under
/// nohup: bit 0 is signal 1.
fn ignored() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}

/// Ends the process without destructors.
pub fn exit_at_once(code: c_int) -> ! {
    signal_hook::low_level::exit(code)
}
