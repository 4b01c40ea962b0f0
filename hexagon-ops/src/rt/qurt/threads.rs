//! The DSP's threads: started with an engine, joined when it is dropped.
//!
//! Each worker has the priority of the thread that starts it, and its own vector context and DMA
//! engine, which belong to the hardware thread that runs it. The system gives it a stack.
//!
//! The functions are weak imports: where the loader finds one of them missing, it leaves the address
//! null, and no thread is started.
//!
//! SOURCE: names, exported by the unsigned FastRPC shells for V73, V79 and V81 in Debian's packages
//! hexagon-dsp-binaries-* of 2026-10-19 (`scripts/shell_imports.py`); prototypes of pthreads, crate
//! libc 0.2.191 src/new/qurt; of `qurt_*`, public code that calls them (llama.cpp ggml-hexagon
//! htp/hmx-queue.c, htp/work-queue.c). Not run on a device.

use core::arch::global_asm;
use core::ffi::{c_int, c_uint, c_void};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};

use crate::rt::workers::{RunningStep, ThreadSystem, Workers};

/// Most threads besides the caller's.
///
/// SOURCE: llama.cpp ggml-hexagon htp/main.c limits its threads to 10.
const MAX_WORKERS: usize = 9;

/// Stack of a worker in bytes: tools/check.py computes the deepest one and fails above this number.
const STACK_BYTES: usize = 64 << 10;

/// `pthread_attr_t`, opaque.
///
/// SOURCE: 72 bytes in crate libc 0.2.191, src/new/qurt/mod.rs; room for three times that.
#[repr(C, align(8))]
struct ThreadAttributes([u8; 256]);

/// `pthread_t`.
type ThreadId = c_uint;
/// The function that a thread runs.
type ThreadEntry = unsafe extern "C" fn(*mut c_void) -> *mut c_void;

unsafe extern "C" {
    #[linkage = "extern_weak"]
    static pthread_attr_init: Option<unsafe extern "C" fn(*mut ThreadAttributes) -> c_int>;
    #[linkage = "extern_weak"]
    static pthread_attr_setstacksize:
        Option<unsafe extern "C" fn(*mut ThreadAttributes, usize) -> c_int>;
    #[linkage = "extern_weak"]
    static pthread_create: Option<
        unsafe extern "C" fn(
            *mut ThreadId,
            *const ThreadAttributes,
            ThreadEntry,
            *mut c_void,
        ) -> c_int,
    >;
    #[linkage = "extern_weak"]
    static pthread_join: Option<unsafe extern "C" fn(ThreadId, *mut *mut c_void) -> c_int>;
    #[linkage = "extern_weak"]
    static qurt_futex_wait: Option<unsafe extern "C" fn(*mut c_void, c_int) -> c_int>;
    #[linkage = "extern_weak"]
    static qurt_futex_wake: Option<unsafe extern "C" fn(*mut c_void, c_int) -> c_int>;
    #[linkage = "extern_weak"]
    static qurt_thread_get_id: Option<unsafe extern "C" fn() -> c_uint>;
    #[linkage = "extern_weak"]
    static qurt_thread_get_priority: Option<unsafe extern "C" fn(c_uint) -> c_int>;
    #[linkage = "extern_weak"]
    static qurt_thread_set_priority: Option<unsafe extern "C" fn(c_uint, u16) -> c_int>;

    /// Aligns the stack and calls [`work`].
    fn ggml_rust_npu_worker(argument: *mut c_void) -> *mut c_void;
}

// The stack of a thread is aligned to 8 bytes, vectors spill to 128.
global_asm!(
    ".globl ggml_rust_npu_worker",
    ".type ggml_rust_npu_worker, @function",
    "ggml_rust_npu_worker:",
    "{{ allocframe(#0) }}",
    "{{ r29 = and(r29, #-128) }}",
    "{{ call {work} }}",
    "{{ r0 = #0 }}",
    "{{ dealloc_return }}",
    ".size ggml_rust_npu_worker, . - ggml_rust_npu_worker",
    work = sym work,
);

/// The state of all workers of this process.
static WORKERS: Workers = Workers::new();
/// `true` while a team has it.
static IS_TAKEN: AtomicBool = AtomicBool::new(false);
/// Priority of the thread that starts the workers, 0 if it is not known.
static PRIORITY: AtomicI32 = AtomicI32::new(0);

/// QuRT.
struct Qurt;

impl ThreadSystem for Qurt {
    fn wait(word: &AtomicU32, value: u32) {
        // SAFETY: the loader has set it, and nothing writes it.
        if let Some(wait) = unsafe { qurt_futex_wait } {
            // SAFETY: reads the word, which lives as long as the process.
            unsafe { wait(word.as_ptr().cast(), value.cast_signed()) };
        }
    }

    fn wake(word: &AtomicU32, count: u32) {
        // SAFETY: as above.
        if let Some(wake) = unsafe { qurt_futex_wake } {
            // SAFETY: the address is only compared.
            unsafe { wake(word.as_ptr().cast(), count.cast_signed()) };
        }
    }

    fn pause() {
        // SAFETY: gives the issue slots of this hardware thread to the others for a few cycles.
        unsafe { core::arch::asm!("pause(#64)", options(nomem, nostack)) };
    }
}

/// The body of a worker.
unsafe extern "C" fn work() {
    set_priority(PRIORITY.load(Ordering::Relaxed));
    WORKERS.work::<Qurt>();
}

/// Returns the calling thread's priority, 0 if it cannot be asked.
fn priority() -> c_int {
    // SAFETY: the loader has set it, and nothing writes it.
    let Some(id) = (unsafe { qurt_thread_get_id }) else {
        return 0;
    };
    // SAFETY: as above.
    let Some(priority) = (unsafe { qurt_thread_get_priority }) else {
        return 0;
    };
    // SAFETY: takes no arguments.
    let id = unsafe { id() };
    // SAFETY: the calling thread's own number.
    unsafe { priority(id) }
}

/// Sets the calling thread's priority, if it is one: QuRT has 1 to 254.
fn set_priority(priority: c_int) {
    let Some(priority) = u16::try_from(priority)
        .ok()
        .filter(|it| (1..255).contains(it))
    else {
        return;
    };
    // SAFETY: the loader has set it, and nothing writes it.
    let Some(id) = (unsafe { qurt_thread_get_id }) else {
        return;
    };
    // SAFETY: as above.
    if let Some(set) = unsafe { qurt_thread_set_priority } {
        // SAFETY: takes no arguments.
        let id = unsafe { id() };
        // SAFETY: the calling thread's own number.
        unsafe { set(id, priority) };
    }
}

/// Returns `true` if threads can wait, be woken and be joined.
fn has_all() -> bool {
    // SAFETY: the loader has set it, and nothing writes it.
    let wait = unsafe { qurt_futex_wait };
    // SAFETY: as above.
    let wake = unsafe { qurt_futex_wake };
    // SAFETY: as above.
    let join = unsafe { pthread_join };
    wait.is_some() && wake.is_some() && join.is_some()
}

/// Starts a thread; `None` if the system refuses it.
fn start_one() -> Option<ThreadId> {
    let mut attributes = ThreadAttributes([0; 256]);
    let mut id = 0;
    // SAFETY: the loader has set it, and nothing writes it.
    let init = unsafe { pthread_attr_init }?;
    // SAFETY: as above.
    let set_stack = unsafe { pthread_attr_setstacksize }?;
    // SAFETY: as above.
    let create = unsafe { pthread_create }?;
    // SAFETY: there is room for the attributes.
    let mut refused = unsafe { init(&raw mut attributes) };
    // SAFETY: initialized above.
    refused |= unsafe { set_stack(&raw mut attributes, STACK_BYTES) };
    if refused != 0 {
        return None;
    }
    // SAFETY: attributes that are initialized, and a function that uses its argument for nothing.
    let refused = unsafe {
        create(
            &raw mut id,
            &raw const attributes,
            ggml_rust_npu_worker,
            core::ptr::null_mut(),
        )
    };
    (refused == 0).then_some(id)
}

/// The workers of an engine.
#[derive(Debug)]
pub struct Team {
    ids: [ThreadId; MAX_WORKERS],
    len: usize,
}

impl Team {
    /// Starts at most `wanted` workers: fewer if the system refuses some, none while another team
    /// has workers.
    pub fn start(wanted: usize) -> Self {
        let mut team = Self {
            ids: [0; MAX_WORKERS],
            len: 0,
        };
        if wanted == 0 || !has_all() || IS_TAKEN.swap(true, Ordering::Acquire) {
            return team;
        }
        PRIORITY.store(priority(), Ordering::Relaxed);
        WORKERS.restart();
        for place in team.ids.iter_mut().take(wanted) {
            let Some(id) = start_one() else { break };
            *place = id;
            team.len += 1;
        }
        if team.len == 0 {
            IS_TAKEN.store(false, Ordering::Release);
        }
        team
    }

    /// Returns the number of workers.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Runs the tasks of a step, and `beside` on the calling thread before it takes any.
    pub fn run(&self, step: &RunningStep<'_>, beside: impl FnOnce()) {
        WORKERS.run::<Qurt>(step, beside);
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        if self.len == 0 {
            return;
        }
        WORKERS.stop::<Qurt>();
        for id in &self.ids[..self.len] {
            // SAFETY: the loader has set it, and nothing writes it.
            if let Some(join) = unsafe { pthread_join } {
                // SAFETY: a thread that was started and not joined; its result is not wanted.
                unsafe { join(*id, core::ptr::null_mut()) };
            }
        }
        IS_TAKEN.store(false, Ordering::Release);
    }
}
