//! The functions of the DSP's system that start threads and wait, by Linux's clone and futex.

use core::arch::global_asm;
use core::ffi::{c_int, c_uint, c_void};
use core::sync::atomic::{AtomicU32, Ordering};

use crate::syscall;

/// Most threads in the life of the guest.
const MOST: usize = 4096;

/// Words that Linux clears at the end of each thread.
static RUNNING: [AtomicU32; MOST] = [const { AtomicU32::new(0) }; MOST];
/// Number of threads that were started.
static STARTED: AtomicU32 = AtomicU32::new(0);

/// The part of `qurt_thread_attr_t` that the guest uses.
#[repr(C)]
struct Attributes {
    name_and_priorities: [u32; 6],
    stack_bytes: usize,
    stack: *mut u8,
}

/// The only priority here.
const PRIORITY: c_int = 192;

unsafe extern "C" {
    /// Starts a thread that calls `entry` on a stack, and clears `running` when it ends. Returns
    /// its number.
    fn guest_clone(
        flags: usize,
        stack_end: *mut u8,
        entry: unsafe extern "C" fn(*mut c_void),
        running: *const AtomicU32,
    ) -> isize;
}

global_asm!(
    ".globl guest_clone",
    "guest_clone:",
    "{{ r7 = r2 ; r4 = r3 }}",
    "{{ r6 = #220 ; r2 = #0 }}",
    "{{ trap0(#1) }}",
    "{{ p0 = cmp.eq(r0, #0) ; if (!p0.new) jumpr:nt r31 }}",
    "{{ callr r7 }}",
    "{{ r6 = #93 ; r0 = #0 }}",
    "{{ trap0(#1) }}",
);

#[unsafe(no_mangle)]
extern "C" fn qurt_thread_create(
    id: &mut c_uint,
    attributes: &Attributes,
    entry: unsafe extern "C" fn(*mut c_void),
    _argument: *mut c_void,
) -> c_int {
    // VM FS FILES SIGHAND THREAD SYSVSEM CHILD_CLEARTID
    const FLAGS: usize = 0x25_0f00;
    const FAILED: c_int = -1;
    let number = STARTED.fetch_add(1, Ordering::Relaxed);
    let Some(running) = RUNNING.get(number as usize) else {
        return FAILED;
    };
    running.store(1, Ordering::Relaxed);
    // SAFETY: 8 bytes below the end of the stack that the caller gives.
    let end = unsafe { attributes.stack.add(attributes.stack_bytes - 8) };
    // SAFETY: no thread uses this stack, the function does not use its argument, and the word lives
    // as long as the process.
    let started = unsafe { guest_clone(FLAGS, end, entry, running) };
    // Numbers start at 1: 0 means that there is no thread.
    *id = number + 1;
    if started > 0 { 0 } else { FAILED }
}

#[unsafe(no_mangle)]
extern "C" fn qurt_thread_join(id: c_uint, status: &mut c_int) -> c_int {
    const WAIT: usize = 0;
    let running = &RUNNING[id as usize - 1];
    while running.load(Ordering::Acquire) != 0 {
        futex(running, WAIT, 1);
    }
    *status = 0;
    0
}

#[unsafe(no_mangle)]
extern "C" fn qurt_thread_get_id() -> c_uint {
    // The guest has one priority for all threads, and requests no other attribute.
    0
}

#[unsafe(no_mangle)]
extern "C" fn qurt_thread_get_priority(_id: c_uint) -> c_int {
    PRIORITY
}

#[unsafe(no_mangle)]
extern "C" fn qurt_futex_wait(word: &AtomicU32, value: c_int) -> c_int {
    const WAIT_PRIVATE: usize = 128;
    futex(word, WAIT_PRIVATE, value)
}

#[unsafe(no_mangle)]
extern "C" fn qurt_futex_wake(word: &AtomicU32, count: c_int) -> c_int {
    const WAKE_PRIVATE: usize = 129;
    futex(word, WAKE_PRIVATE, count)
}

/// Linux's futex, without a time limit.
fn futex(word: &AtomicU32, operation: usize, value: c_int) -> c_int {
    let address = word.as_ptr().addr();
    // SAFETY: reads the word.
    unsafe { syscall(98, address, operation, value.cast_unsigned() as usize) as c_int }
}
