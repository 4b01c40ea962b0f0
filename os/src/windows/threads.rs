//! The CPUs of a thread: all of them.

/// The CPUs to which a thread is bound.
pub struct Cpus;

impl Cpus {
    /// Leaves the calling thread on all CPUs.
    #[must_use]
    pub fn of_thread(_cpus: &[usize]) -> Self {
        Self
    }

    /// Leaves the calling thread on all CPUs.
    pub fn leave(&self, _cpu: usize) {}
}

/// Returns the CPU on which the calling thread runs: not known.
#[must_use]
pub fn current_cpu() -> Option<usize> {
    None
}
