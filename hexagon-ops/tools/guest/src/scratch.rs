//! Statics that the guest's single thread changes.

use core::cell::UnsafeCell;

/// A static that can be changed.
pub struct Scratch<T>(UnsafeCell<T>);

// SAFETY: the guest has one thread.
unsafe impl<T> Sync for Scratch<T> {}

impl<T> Scratch<T> {
    /// Holds `value`.
    pub const fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    /// Returns the value.
    ///
    /// # Safety
    /// No other reference to it is alive.
    #[expect(
        clippy::mut_from_ref,
        reason = "the caller promises to hold one at a time"
    )]
    pub unsafe fn get(&self) -> &mut T {
        // SAFETY: the caller holds no other reference, and there is one thread.
        unsafe { &mut *self.0.get() }
    }
}
