//! The system's allocator, counted for each thread.
#![expect(unsafe_code, reason = "an allocator is an unsafe trait")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    // Initialized at compile time and without a destructor, so that it can be used at any time of a
    // thread's life.
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
    /// Bytes that were allocated and not freed, which is negative for a thread that frees another
    /// thread's memory.
    static LIVE_BYTES: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: usize, freed: usize) {
    ALLOCATIONS.with(|allocations| allocations.set(allocations.get() + usize::from(bytes > 0)));
    let change = bytes.cast_signed() - freed.cast_signed();
    LIVE_BYTES.with(|live| live.set(live.get() + change));
}

// SAFETY: passes every call on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(0, layout.size());
        // SAFETY: guaranteed by the caller.
        unsafe { System.dealloc(memory, layout) };
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size, layout.size());
        // SAFETY: guaranteed by the caller.
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of this thread in `f`.
pub fn allocations(f: impl FnOnce()) -> usize {
    let before = ALLOCATIONS.get();
    f();
    ALLOCATIONS.get() - before
}

/// Bytes that `f` allocated on this thread and did not free.
pub fn live_bytes(f: impl FnOnce()) -> isize {
    let before = LIVE_BYTES.get();
    f();
    LIVE_BYTES.get() - before
}
