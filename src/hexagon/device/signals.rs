//! Keeps signals away from threads that wait inside a vendor's library.
#![expect(unsafe_code, reason = "the signal mask is set by C functions")]

use std::mem::MaybeUninit;

/// Runs `spawn` with all signals blocked in this thread: threads that it starts never get any.
///
/// A driver that waits interruptibly gives a call up when its thread gets a signal, also one that
/// stops and continues the process.
pub(crate) fn blocked<T>(spawn: impl FnOnce() -> T) -> T {
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
