//! Slots for the machines of a process.
//!
//! The vendors' C functions have no machine argument. So each machine occupies a slot, and gets
//! copies of the functions that know the slot's number.

use std::sync::{Arc, Mutex};

use crate::{StartError, lock};

/// Machines that can exist at once in a process.
pub const SLOTS: usize = 32;

/// The machines of a process, by slot.
#[derive(Debug)]
pub struct Slots<T>([Mutex<Option<Arc<T>>>; SLOTS]);

impl<T> Slots<T> {
    /// Returns free slots.
    #[must_use]
    #[expect(
        clippy::new_without_default,
        reason = "a static needs a const function"
    )]
    pub const fn new() -> Self {
        Self([const { Mutex::new(None) }; SLOTS])
    }

    /// Puts a machine into the first free slot, and returns its number.
    ///
    /// # Errors
    /// [`StartError::NoSlot`] if no slot is free.
    pub fn take(&self, machine: &Arc<T>) -> Result<usize, StartError> {
        for (slot, place) in self.0.iter().enumerate() {
            let mut place = lock(place);
            if place.is_none() {
                *place = Some(Arc::clone(machine));
                return Ok(slot);
            }
        }
        Err(StartError::NoSlot)
    }

    /// Returns the machine in `slot`, if it has not been dropped.
    ///
    /// # Panics
    /// If the slot does not exist.
    #[must_use]
    pub fn get(&self, slot: usize) -> Option<Arc<T>> {
        lock(&self.0[slot]).clone()
    }

    /// Frees `slot`.
    ///
    /// # Panics
    /// If the slot does not exist.
    pub fn free(&self, slot: usize) {
        *lock(&self.0[slot]) = None;
    }
}

/// Calls the function of a slot that is known at run time: `$of::<SLOT>()`, which returns
/// `$result`.
///
/// # Panics
/// If there is no such slot.
#[macro_export]
macro_rules! of_slot {
    ($of:ident, $result:ty, $slot:expr) => {
        $crate::of_slot!(@each $of, $result, $slot,
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31)
    };
    (@each $of:ident, $result:ty, $slot:expr, $($number:literal)*) => {{
        const OF: [fn() -> $result; $crate::slot::SLOTS] = [$($of::<$number>),*];
        OF[$slot]()
    }};
}
