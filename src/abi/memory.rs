//! The memory that each device reports, and the part that its buffers use.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::DeviceEntry;
use crate::backend::{Share, shares};
use crate::host_memory::system_memory;

/// Bytes of the machine that simulated devices are in, if the user sets them.
static SIMULATED: OnceLock<usize> = OnceLock::new();

/// Bytes that a buffer holds of its device's memory, until it is dropped.
pub(super) struct Held {
    bytes: usize,
    sum: &'static AtomicUsize,
}

impl Held {
    /// Adds `bytes` to the sum of a device's buffers.
    pub(super) fn new(sum: &'static AtomicUsize, bytes: usize) -> Self {
        sum.fetch_add(bytes, Ordering::Relaxed);
        Self { bytes, sum }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.sum.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Sets the memory of the machine of simulated devices, in which only the devices' buffers use
/// memory.
pub(super) fn simulate(bytes: usize) {
    // Only the first call has an effect.
    let _ = SIMULATED.set(bytes);
}

/// Returns the memory of the machine.
///
/// - `held`: bytes that each device's buffers hold
pub(super) fn of_machine(held: impl IntoIterator<Item = usize>) -> Share {
    match SIMULATED.get() {
        Some(&total) => (held.into_iter().fold(total, usize::saturating_sub), total),
        None => system_memory(),
    }
}

/// Returns the memory that a device reports: its part of the memory that all devices share.
pub(super) fn of_device(devices: &[DeviceEntry], device: usize) -> Share {
    let held: Vec<usize> = devices.iter().map(DeviceEntry::held_bytes).collect();
    let shares = shares(of_machine(held.iter().copied()), &held);
    (devices.get(device).zip(shares.get(device)))
        .map_or((0, 0), |(entry, share)| entry.device.memory(*share))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_holds_its_bytes_until_it_is_dropped() {
        static SUM: AtomicUsize = AtomicUsize::new(0);
        let first = Held::new(&SUM, 5);
        let second = Held::new(&SUM, 7);
        assert_eq!(SUM.load(Ordering::Relaxed), 12);
        drop(first);
        assert_eq!(SUM.load(Ordering::Relaxed), 7);
        drop(second);
        assert_eq!(SUM.load(Ordering::Relaxed), 0);
    }
}
