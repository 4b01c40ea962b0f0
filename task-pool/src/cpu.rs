//! CPU affinity of threads.
#![expect(unsafe_code, reason = "sets of CPUs are a matter of system calls")]

/// The CPUs to which a thread is bound.
pub(super) struct Cpus(libc::cpu_set_t);

/// Bytes of a set of CPUs.
const BYTES: usize = size_of::<libc::cpu_set_t>();

fn none() -> libc::cpu_set_t {
    // SAFETY: an all-zero set is a valid, empty one.
    unsafe { std::mem::zeroed() }
}

fn contains(set: &libc::cpu_set_t, cpu: usize) -> bool {
    // SAFETY: the number is below that of the set's bits.
    cpu < BYTES * 8 && unsafe { libc::CPU_ISSET(cpu, set) }
}

impl Cpus {
    /// Binds the calling thread to those of `cpus` that it may use, or to all that it may use if
    /// `cpus` contains none of them.
    pub(super) fn of_thread(cpus: &[usize]) -> Self {
        let mut allowed = none();
        // SAFETY: the set is valid for writes of its size; 0 is the calling thread.
        if unsafe { libc::sched_getaffinity(0, BYTES, &raw mut allowed) } != 0 {
            return Self(none());
        }
        let mut wanted = none();
        for &cpu in cpus.iter().filter(|cpu| contains(&allowed, **cpu)) {
            // SAFETY: the number is one of the set's (`contains`).
            unsafe { libc::CPU_SET(cpu, &mut wanted) };
        }
        keep_to(&wanted);
        // SAFETY: reads the set only.
        let some = unsafe { libc::CPU_COUNT(&wanted) } > 0;
        Self(if some { wanted } else { allowed })
    }

    /// Binds the calling thread to its CPUs without `cpu`, if another one remains.
    pub(super) fn leave(&self, cpu: usize) {
        let mut others = self.0;
        if contains(&others, cpu) {
            // SAFETY: the number is one of the set's (`contains`).
            unsafe { libc::CPU_CLR(cpu, &mut others) };
            keep_to(&others);
        }
    }
}

/// Binds the calling thread to a set of CPUs, unless the set is empty. The system may refuse, for a
/// CPU that is offline: then the thread's CPUs stay as they are.
fn keep_to(cpus: &libc::cpu_set_t) {
    // SAFETY: reads the set only.
    if unsafe { libc::CPU_COUNT(cpus) } > 0 {
        // SAFETY: the set is valid for reads of its size; 0 is the calling thread.
        unsafe { libc::sched_setaffinity(0, BYTES, cpus) };
    }
}

/// Returns the CPU on which the calling thread runs, if the system reports it.
pub(super) fn current_cpu() -> Option<usize> {
    // Miri has no CPU numbers.
    if cfg!(miri) {
        return None;
    }
    // SAFETY: has no requirements.
    let cpu = unsafe { libc::sched_getcpu() };
    usize::try_from(cpu).ok()
}
