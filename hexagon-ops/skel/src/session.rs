//! The one session of this process, and the lock that admits one thread to it.

use core::cell::UnsafeCell;
use core::ffi::{c_int, c_uint, c_void};
use core::sync::atomic::Ordering;

use hexagon_ops::hmx::{Form, Hmx};
use hexagon_ops::layout::{F16_TILE_BYTES, Tile};
use hexagon_ops::rt::invoke::Call;
use hexagon_ops::rt::{Admission, Stage, thread_priority};
use hexagon_ops::serve::{Server, State, Units};
use hexagon_ops::wire::{
    ERROR_CALL, ERROR_LATER, ERROR_STACK, ERROR_UNITS, METHOD_SERVE, METHOD_START, Start,
};

use crate::code::{INVALID_HANDLE, OUT_OF_HANDLES};
use crate::hap::{self, Attributes};
use crate::platform::{CLOSING, Dsp, VTCM_WANTED};
use crate::{log, power, stack};

/// Architecture that this library is built for.
pub const ARCH: u32 = match env!("SKEL_ARCH").as_bytes() {
    [b'v', tens @ b'0'..=b'9', ones @ b'0'..=b'9'] => {
        (*tens - b'0') as u32 * 10 + (*ones - b'0') as u32
    }
    _ => panic!("SKEL_ARCH is not a v and two digits"),
};

/// The only handle.
const HANDLE: u64 = 1;
/// Length of one wait for VTCM, and the number of waits of START: other programs release VTCM when
/// they are idle, or on request.
const ACQUIRE_US: u32 = 100_000;
const ACQUIRE_TURNS: u32 = 100;
/// Difference between the priority of the calling thread and that with which VTCM is held. Larger
/// numbers are lower priorities. The resource manager requests a release only if a client of higher
/// priority waits, so a low priority also lets sessions of equal priority request it,
/// ggml-hexagon's among them.
///
/// SOURCE: llama.cpp ggml-hexagon htp/main.c (`vtcm_acquire`), with the same difference.
const HOLDING_PRIORITY: u16 = 10;
/// The lowest priority of a QuRT thread.
const LOWEST_PRIORITY: u16 = 254;

/// Stage of the session.
static STAGE: Stage = Stage::new();

type Loop = Server<Dsp, &'static mut [Tile], &'static mut State>;

/// A value that one thread at a time uses.
struct SingleThread<T>(UnsafeCell<T>);

// SAFETY: `STAGE` admits one thread at a time to the content.
unsafe impl<T> Sync for SingleThread<T> {}

static SERVER: SingleThread<Option<Loop>> = SingleThread(UnsafeCell::new(None));
static STATE: SingleThread<State> = SingleThread(UnsafeCell::new(State::new()));

/// Returns the number of vector contexts; one thread computes on each.
fn vector_units() -> usize {
    // SOURCE: llama.cpp ggml-hexagon htp/main.c uses at most 10 threads, and says that chips
    // typically have 4 units.
    const MOST: usize = 10;
    const USUAL: usize = 4;
    let [_, contexts, ..] = hap::qurt_hvx_get_units().to_le_bytes();
    match usize::from(contexts) {
        0 => USUAL,
        contexts => contexts.min(MOST),
    }
}

/// Opens the handle.
pub fn open() -> Result<u64, i32> {
    if !STAGE.open() {
        return Err(OUT_OF_HANDLES);
    }
    CLOSING.store(false, Ordering::Release);
    // SAFETY: this thread has just taken the free session. The last server, which had the state, is
    // gone.
    let state = unsafe { &mut *STATE.0.get() };
    state.reset();
    // SAFETY: only `Server` uses the unit, inside `serve`, while `Lent` holds the lock; there is
    // one server.
    let hmx = unsafe { Hmx::assume_held(Form::of_arch(ARCH)) };
    let units = Units {
        vtcm: Default::default(),
        hmx,
        threads: vector_units(),
        arch: ARCH,
    };
    // SAFETY: as above.
    let place = unsafe { &mut *SERVER.0.get() };
    *place = Some(Server::new(Dsp::default(), units, state));
    STAGE.leave();
    Ok(HANDLE)
}

/// Closes the handle; a call that is running returns first.
pub fn close() -> Result<(), i32> {
    CLOSING.store(true, Ordering::Release);
    loop {
        match STAGE.enter() {
            Admission::Admitted => break,
            Admission::Busy => core::hint::spin_loop(),
            Admission::Absent => return Err(INVALID_HANDLE),
        }
    }
    // SAFETY: this thread has just taken the idle session.
    let place = unsafe { &mut *SERVER.0.get() };
    if let Some(mut server) = place.take() {
        // The host may already have unmapped the ring, so the server must not touch it again.
        server.close();
        server.platform().unmap_ring();
    }
    power::withdraw();
    STAGE.free();
    Ok(())
}

/// Executes a call.
pub fn call(call: Call<'_>) -> Result<(), i32> {
    if call.method == METHOD_START && stack::is_too_small() {
        return Err(ERROR_STACK);
    }
    match STAGE.enter() {
        Admission::Admitted => {}
        // A signal on the host interrupts only the host's side of a call. The host then repeats the
        // call, while the first one still reads the ring. If the first one ends now, the host sees
        // that in the ring.
        Admission::Busy if call.method == METHOD_SERVE => return Ok(()),
        Admission::Busy | Admission::Absent => return Err(ERROR_CALL),
    }
    // SAFETY: this thread has just taken the idle session.
    let place = unsafe { &mut *SERVER.0.get() };
    let result = match place {
        None => Err(INVALID_HANDLE),
        Some(server) => {
            // Power is requested before the matrix unit, which needs it.
            if call.method == METHOD_START {
                let matrix = Start::uses_matrix(call.input);
                server.platform().vote(Start::power_of(call.input), matrix);
            }
            with_units(server, call)
        }
    };
    STAGE.leave();
    if let Err(code) = result
        && code != ERROR_LATER
    {
        log::line(c"call failed", c"code", code);
    }
    result
}

/// Gives the units to the server during a call.
#[inline(never)]
fn with_units(server: &mut Loop, call: Call<'_>) -> Result<(), i32> {
    let call_starts = call.method == METHOD_START;
    let mut lent = if call_starts && Start::uses_matrix(call.input) {
        // A system without a matrix unit fails at one of the steps that acquire it.
        let lent = Lent::new(call.method, true);
        let has_matrix = (lent.as_ref()).is_ok_and(|lent| lock_matrix(server, lent.resource));
        match lent {
            Ok(lent) if has_matrix => {
                unlock_matrix(server, lent.resource);
                lent
            }
            // These chips always have the unit, so another program has VTCM.
            Err(code) if ARCH >= 73 => return Err(code),
            refused => {
                drop(refused);
                server.units().hmx.leave_alone();
                Lent::new(call.method, false)?
            }
        }
    } else {
        let has_matrix = !call_starts && server.units().hmx.form() != Form::Vectors;
        Lent::new(call.method, has_matrix)?
    };
    let locked = call.method == METHOD_SERVE && server.units().hmx.form() != Form::Vectors;
    if locked && !lock_matrix(server, lent.resource) {
        return Err(ERROR_UNITS);
    }
    // SAFETY: `lent` holds the memory until the end of this function, where the server gives it
    // back.
    server.units().vtcm = unsafe { lent.tiles() };
    let result = server.invoke(call);
    server.units().vtcm = Default::default();
    if locked {
        unlock_matrix(server, lent.resource);
    }
    if call_starts && result.is_ok() && !server.has_matrix_thread() {
        log::line(c"no thread for the matrix unit", c"threads", 0);
    }
    result
}

/// Locks the matrix unit for the thread that computes with it, because a lock belongs to one
/// thread. Returns `false` if the lock is refused.
fn lock_matrix(server: &Loop, resource: c_uint) -> bool {
    let mut refused = 0;
    server.on_matrix_thread(|| refused = hap::compute_resource_hmx_lock(resource));
    if refused != 0 {
        log::line(c"no matrix unit", c"compute_resource_hmx_lock", refused);
    }
    refused == 0
}

/// Gives it back.
fn unlock_matrix(server: &Loop, resource: c_uint) {
    server.on_matrix_thread(|| {
        hap::compute_resource_hmx_unlock(resource);
    });
}

/// Returns `true` if the resource manager requests VTCM back when a client with this thread's
/// priority waits for it. The shells of some chips (V68) lack the function that lowers a holder's
/// priority.
pub fn is_asked_for_vtcm() -> bool {
    // SAFETY: the loader has set the symbol, and nothing writes it later.
    let update = unsafe { hap::compute_resource_update_priority };
    // SAFETY: as above.
    let set = unsafe { hap::compute_resource_attr_set_release_callback };
    update.is_some() && set.is_some()
}

/// Lowers a holder's priority, so that the resource manager requests a resource back when a client
/// with the priority of this thread waits.
fn hold_with_low_priority(resource: c_uint) {
    // SAFETY: the loader has set the symbol, and nothing writes it later.
    let Some(update) = (unsafe { hap::compute_resource_update_priority }) else {
        return;
    };
    let own = u16::try_from(thread_priority()).unwrap_or(0);
    if (1..=LOWEST_PRIORITY).contains(&own) {
        let priority = LOWEST_PRIORITY.min(own + HOLDING_PRIORITY);
        // SAFETY: the function takes no address.
        unsafe { update(resource, priority) };
    }
}

/// Records that another program waits for VTCM.
extern "C" fn on_vtcm_wanted(_resource: c_uint, _context: *mut c_void) -> c_int {
    VTCM_WANTED.store(true, Ordering::Relaxed);
    0
}

/// VTCM, and the right to lock the matrix unit, until dropped.
struct Lent {
    resource: u32,
    start: *mut Tile,
    bytes: usize,
}

impl Lent {
    /// Waits for all of the VTCM, and the right to lock the matrix unit if `has_matrix`. A call
    /// that serves and does not get it can be made again.
    fn new(method: u32, has_matrix: bool) -> Result<Self, i32> {
        let turns = match (method, has_matrix && ARCH < 73) {
            (METHOD_SERVE, _) => 1,
            // Chips of these versions may have no matrix unit, so the wait for it may be in vain
            // and is short.
            (_, true) => ACQUIRE_TURNS / 10,
            (_, false) => ACQUIRE_TURNS,
        };
        let mut bytes = 0;
        let (layout, free) = (core::ptr::null_mut(), core::ptr::null_mut());
        // SAFETY: the call writes the size; layout and free size are not requested.
        let asked =
            unsafe { hap::compute_resource_query_VTCM(0, &raw mut bytes, layout, free, layout) };
        if asked != 0 || bytes == 0 {
            return Err(ERROR_UNITS);
        }
        let mut attributes = Attributes([0; 256]);
        let attributes = &raw mut attributes;
        // SAFETY: there is room for the attributes.
        let mut failed = unsafe { hap::compute_resource_attr_init(attributes) };
        // SAFETY: initialized above.
        failed |= unsafe { hap::compute_resource_attr_set_serialize(attributes, 0) };
        // VTCM of a single page, which the matrix unit needs for its operands.
        // SAFETY: as above.
        failed |= unsafe { hap::compute_resource_attr_set_vtcm_param(attributes, bytes, 1) };
        VTCM_WANTED.store(false, Ordering::Relaxed);
        // On a system that fails here, no other program can ask for VTCM; that is no reason to
        // refuse the call.
        // SAFETY: the loader has set the symbol, and nothing writes it later.
        if let Some(set) = unsafe { hap::compute_resource_attr_set_release_callback } {
            // SAFETY: as above; the callback needs no context.
            unsafe { set(attributes, on_vtcm_wanted, core::ptr::null_mut()) };
        }
        if has_matrix {
            // SAFETY: as above.
            failed |= unsafe { hap::compute_resource_attr_set_hmx_param(attributes, 1) };
        }
        if failed != 0 {
            return Err(ERROR_UNITS);
        }
        for _ in 0..turns {
            // SAFETY: as above.
            let resource = unsafe { hap::compute_resource_acquire(attributes, ACQUIRE_US) };
            if resource != 0 {
                hold_with_low_priority(resource);
                // SAFETY: the resource was acquired above.
                let start = unsafe { hap::compute_resource_attr_get_vtcm_ptr(attributes) };
                let lent = Self {
                    resource,
                    start: start.cast(),
                    bytes: bytes as usize,
                };
                let fits = !start.is_null() && start.addr().is_multiple_of(F16_TILE_BYTES);
                return if fits { Ok(lent) } else { Err(ERROR_UNITS) };
            }
            if CLOSING.load(Ordering::Acquire) {
                break;
            }
        }
        Err(if method == METHOD_SERVE {
            ERROR_LATER
        } else {
            ERROR_UNITS
        })
    }

    /// Returns the request for VTCM.
    ///
    /// # Safety
    /// - The result is not used when `self` is dropped, and only one of it exists.
    unsafe fn tiles(&mut self) -> &'static mut [Tile] {
        // SAFETY: the memory is acquired, `new` has checked its alignment, and any bytes are valid
        // tiles.
        unsafe { core::slice::from_raw_parts_mut(self.start, self.bytes / F16_TILE_BYTES) }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        hap::compute_resource_release(self.resource);
    }
}
