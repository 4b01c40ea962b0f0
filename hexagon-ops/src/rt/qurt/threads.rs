//! The DSP's threads: started with an engine, joined when it is dropped.
//!
//! One of them holds the matrix unit and computes the parts of steps for it, so that the calling
//! thread begins with tasks at once. It uses no vectors, and is started after the others.
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

use crate::rt::MatrixPart;
use crate::rt::workers::{RunningStep, TaskList, ThreadSystem, Workers};

/// Most threads besides the caller's that run tasks.
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
/// The state of the thread that holds the matrix unit, the only worker there.
static MATRIX: Workers = Workers::new();
/// `true` while [`MATRIX`] wants its thread: the next one that starts is it.
static WANTS_MATRIX_THREAD: AtomicBool = AtomicBool::new(false);
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
    if WANTS_MATRIX_THREAD.swap(false, Ordering::Relaxed) {
        MATRIX.work::<Qurt>();
    } else {
        WORKERS.work::<Qurt>();
    }
}

/// Returns the calling thread's priority, 0 if it cannot be asked.
#[must_use]
pub fn thread_priority() -> c_int {
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
    /// The threads that were started.
    ids: [ThreadId; MAX_WORKERS + 1],
    started: usize,
    /// One of them is the matrix unit's.
    has_matrix_thread: bool,
}

impl Team {
    /// Starts at most `wanted` workers, and the matrix unit's thread after them: fewer if the system
    /// refuses some, none while another team has workers.
    pub fn start(wanted: usize) -> Self {
        let mut team = Self {
            ids: [0; MAX_WORKERS + 1],
            started: 0,
            has_matrix_thread: false,
        };
        let wanted = wanted.min(MAX_WORKERS);
        if wanted == 0 || !has_all() || IS_TAKEN.swap(true, Ordering::Acquire) {
            return team;
        }
        PRIORITY.store(thread_priority(), Ordering::Relaxed);
        WORKERS.restart();
        MATRIX.restart();
        while team.started < wanted && team.start_next() {}
        if team.started == wanted {
            WANTS_MATRIX_THREAD.store(true, Ordering::Relaxed);
            // If this fails, a thread that was started before may have become the matrix unit's.
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
        let id = start_one();
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

    /// Runs the tasks of a step, and `part` beside them.
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
        for id in &self.ids[..self.started] {
            // SAFETY: the loader has set it, and nothing writes it.
            if let Some(join) = unsafe { pthread_join } {
                // SAFETY: a thread that was started and not joined; its result is not wanted.
                unsafe { join(*id, core::ptr::null_mut()) };
            }
        }
        IS_TAKEN.store(false, Ordering::Release);
    }
}
