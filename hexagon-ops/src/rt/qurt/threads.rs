//! The DSP's threads: started with an engine, joined when it is dropped.
//!
//! One of them holds the matrix unit and computes the parts of steps for it, so that the calling
//! thread begins with tasks at once. It uses no vectors, and is started after the others.
//!
//! Each worker has the priority of the thread that starts it, and its own vector context and DMA
//! engine, which belong to the hardware thread that runs it.
//!
//! SOURCE: llama.cpp ggml-hexagon htp/work-queue.c and htp/hmx-queue.c import these functions, too,
//! and pass the same attributes; prototypes and attributes, public copies of Qualcomm's
//! qurt_thread.h of 2018 to 2023 and Halide src/runtime/mini_qurt.h. Not run on a device.

use core::arch::global_asm;
use core::cell::UnsafeCell;
use core::ffi::{c_int, c_uint, c_void};
use core::ops::RangeInclusive;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::rt::MatrixPart;
use crate::rt::workers::{RunningStep, TaskList, ThreadSystem, Workers};

/// Most threads that run tasks, not counting the caller's.
///
/// SOURCE: llama.cpp ggml-hexagon htp/main.c limits its threads to 10.
const MAX_WORKERS: usize = 9;

/// Stack of a worker in bytes: tools/check.py computes the deepest one and fails above this number.
const STACK_BYTES: usize = 64 << 10;

/// `qurt_thread_t`.
type ThreadId = c_uint;
/// The function that a thread runs. The thread ends when it returns.
type ThreadEntry = unsafe extern "C" fn(*mut c_void);

/// `qurt_thread_attr_t`, which the vendor's header fills by inline functions.
///
/// SOURCE: fields up to `detach_state`, in all public copies of qurt_thread.h since 2018; an older
/// one ends before it. The rest is room for fields of later ones.
#[repr(C)]
struct ThreadAttributes {
    name: [u8; 16],
    tcb_partition: u8,
    stid: u8,
    priority: u16,
    /// Bits for autostack and a group.
    flags: u8,
    bus_priority: u8,
    timetest_id: u16,
    stack_bytes: c_uint,
    /// The lowest address of the stack.
    stack: *mut c_void,
    detach_state: u16,
    reserved: [u16; 15],
}

const _: () = assert!(core::mem::offset_of!(ThreadAttributes, stack) == 28);
const _: () = assert!(core::mem::size_of::<ThreadAttributes>() == 64);

impl ThreadAttributes {
    /// `QURT_THREAD_ATTR_BUS_PRIO_DEFAULT`.
    const BUS_PRIORITY: u8 = 255;
    /// `QURT_THREAD_ATTR_TIMETEST_ID_DEFAULT`, -2.
    const TIMETEST_ID: u16 = 0xfffe;
    /// `QURT_THREAD_ATTR_CREATE_JOINABLE`: the thread's number stays its own until it is joined.
    const JOINABLE: u16 = 1;

    /// Returns the default attributes, with a priority and a stack.
    const fn new(priority: u16, stack: *mut c_void) -> Self {
        Self {
            name: *b"ggml-rust-npu\0\0\0",
            tcb_partition: 0,
            stid: 0,
            priority,
            flags: 0,
            bus_priority: Self::BUS_PRIORITY,
            timetest_id: Self::TIMETEST_ID,
            // CAST: 64 KiB.
            stack_bytes: STACK_BYTES as c_uint,
            stack,
            detach_state: Self::JOINABLE,
            reserved: [0; 15],
        }
    }
}

/// A worker's stack.
#[repr(C, align(128))]
struct Stack(UnsafeCell<[u8; STACK_BYTES]>);

// SAFETY: Rust code only uses its address; one thread at a time runs on it (`Team`).
unsafe impl Sync for Stack {}

static STACKS: [Stack; MAX_WORKERS + 1] =
    [const { Stack(UnsafeCell::new([0; STACK_BYTES])) }; MAX_WORKERS + 1];

unsafe extern "C" {
    fn qurt_thread_create(
        id: *mut ThreadId,
        attributes: *const ThreadAttributes,
        entry: ThreadEntry,
        argument: *mut c_void,
    ) -> c_int;
    fn qurt_thread_join(id: ThreadId, status: *mut c_int) -> c_int;
    fn qurt_futex_wait(word: *mut c_void, value: c_int) -> c_int;
    fn qurt_futex_wake(word: *mut c_void, count: c_int) -> c_int;
    safe fn qurt_thread_get_id() -> c_uint;
    safe fn qurt_thread_get_priority(id: c_uint) -> c_int;

    /// Aligns the stack and calls [`work`].
    fn ggml_rust_npu_worker(argument: *mut c_void);
}

// Stacks of threads are aligned to 8 bytes, but spilled vectors need 128.
global_asm!(
    ".globl ggml_rust_npu_worker",
    ".type ggml_rust_npu_worker, @function",
    "ggml_rust_npu_worker:",
    "{{ allocframe(#0) }}",
    "{{ r29 = and(r29, #-128) }}",
    "{{ call {work} }}",
    "{{ dealloc_return }}",
    ".size ggml_rust_npu_worker, . - ggml_rust_npu_worker",
    work = sym work,
);

/// The state of all workers of this process.
static WORKERS: Workers = Workers::new();
/// The state of the thread that holds the matrix unit, the only worker there.
static MATRIX: Workers = Workers::new();
/// `true` while [`MATRIX`] has no thread: the next thread that starts becomes it.
static WANTS_MATRIX_THREAD: AtomicBool = AtomicBool::new(false);
/// `true` while a team has it.
static IS_TAKEN: AtomicBool = AtomicBool::new(false);

/// QuRT.
struct Qurt;

impl ThreadSystem for Qurt {
    fn wait(word: &AtomicU32, value: u32) {
        // SAFETY: the call reads the word, which lives as long as the process.
        unsafe { qurt_futex_wait(word.as_ptr().cast(), value.cast_signed()) };
    }

    fn wake(word: &AtomicU32, count: u32) {
        // SAFETY: the call only compares the address.
        unsafe { qurt_futex_wake(word.as_ptr().cast(), count.cast_signed()) };
    }

    fn pause() {
        // SAFETY: gives the issue slots of this hardware thread to the others for a few cycles.
        unsafe { core::arch::asm!("pause(#64)", options(nomem, nostack)) };
    }
}

/// The body of a worker.
unsafe extern "C" fn work() {
    if WANTS_MATRIX_THREAD.swap(false, Ordering::Relaxed) {
        MATRIX.work::<Qurt>();
    } else {
        WORKERS.work::<Qurt>();
    }
}

/// Returns the calling thread's priority.
#[must_use]
pub fn thread_priority() -> c_int {
    qurt_thread_get_priority(qurt_thread_get_id())
}

/// Starts a thread with the priority of the calling one, on an unused stack; `None` if the system
/// refuses it.
fn start_one(stack: &Stack) -> Option<ThreadId> {
    // SOURCE: qurt_thread.h: 1 to 254; the larger number is the lower priority.
    const PRIORITIES: RangeInclusive<u16> = 1..=254;
    let priority = u16::try_from(thread_priority()).unwrap_or(*PRIORITIES.end());
    let priority = priority.clamp(*PRIORITIES.start(), *PRIORITIES.end());
    let attributes = ThreadAttributes::new(priority, stack.0.get().cast());
    let mut id = 0;
    let argument = core::ptr::null_mut();
    // SAFETY: the attributes are complete, the stack has this size and lives as long as the
    // process, and the function does not use its argument.
    let refused = unsafe {
        qurt_thread_create(
            &raw mut id,
            &raw const attributes,
            ggml_rust_npu_worker,
            argument,
        )
    };
    (refused == 0).then_some(id)
}

/// The workers of an engine.
#[derive(Debug)]
pub struct Team {
    /// The threads that were started.
    ids: [ThreadId; MAX_WORKERS + 1],
    started: usize,
    /// `true` if one of these threads uses the matrix unit.
    has_matrix_thread: bool,
}

impl Team {
    /// Starts at most `wanted` workers, and the matrix unit's thread after them: fewer if the
    /// system refuses some, none while another team has workers.
    pub fn start(wanted: usize) -> Self {
        let mut team = Self {
            ids: [0; MAX_WORKERS + 1],
            started: 0,
            has_matrix_thread: false,
        };
        let wanted = wanted.min(MAX_WORKERS);
        if wanted == 0 || IS_TAKEN.swap(true, Ordering::Acquire) {
            return team;
        }
        WORKERS.restart();
        MATRIX.restart();
        while team.started < wanted && team.start_next() {}
        if team.started == wanted {
            WANTS_MATRIX_THREAD.store(true, Ordering::Relaxed);
            // If the thread does not start, an earlier one may have taken the matrix unit
            // meanwhile.
            let is_started = team.start_next();
            let is_wanted = !is_started && WANTS_MATRIX_THREAD.swap(false, Ordering::Relaxed);
            team.has_matrix_thread = !is_wanted;
        }
        if team.is_empty() {
            IS_TAKEN.store(false, Ordering::Release);
        }
        team
    }

    /// Starts one more thread; returns `false` if the system refuses it.
    fn start_next(&mut self) -> bool {
        let id = start_one(&STACKS[self.started]);
        if let Some(id) = id {
            self.ids[self.started] = id;
            self.started += 1;
        }
        id.is_some()
    }

    /// Returns `true` without any thread.
    pub const fn is_empty(&self) -> bool {
        self.started == 0
    }

    /// Returns the number of workers that run tasks.
    pub const fn len(&self) -> usize {
        self.started - self.has_matrix_thread as usize
    }

    /// Returns `true` if one more thread has the matrix unit.
    pub const fn has_matrix_thread(&self) -> bool {
        self.has_matrix_thread
    }

    /// Runs the tasks of a step, and `part` at the same time.
    pub fn run(&self, step: &RunningStep<'_>, part: &mut impl MatrixPart) {
        if part.is_empty() || !self.has_matrix_thread {
            return WORKERS.run::<Qurt>(step, || part.run());
        }
        TaskList::new(&mut [part], |part| part.run()).with_step(|matrix| {
            MATRIX.run_on_workers::<Qurt>(matrix, || WORKERS.run::<Qurt>(step, || ()));
        });
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        if self.is_empty() {
            return;
        }
        WORKERS.stop::<Qurt>();
        MATRIX.stop::<Qurt>();
        let mut is_one_left = false;
        for id in &self.ids[..self.started] {
            let mut status = 0;
            // SAFETY: the thread was started and has not been joined.
            is_one_left |= unsafe { qurt_thread_join(*id, &raw mut status) } != 0;
        }
        // If a thread could not be joined, its stack may still be in use.
        IS_TAKEN.store(is_one_left, Ordering::Release);
    }
}
