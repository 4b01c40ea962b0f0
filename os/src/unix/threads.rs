//! The CPUs of a thread.

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// The CPUs to which a thread is bound.
pub struct Cpus(CpuSet);

fn contains(set: &CpuSet, cpu: usize) -> bool {
    cpu < CpuSet::MAX_CPU && set.is_set(cpu)
}

impl Cpus {
    /// Binds the calling thread to those of `cpus` that it may use, or to all that it may use if
    /// `cpus` contains none of them.
    #[must_use]
    pub fn of_thread(cpus: &[usize]) -> Self {
        let Ok(allowed) = sched_getaffinity(None) else {
            return Self(CpuSet::new());
        };
        let mut wanted = CpuSet::new();
        for &cpu in cpus.iter().filter(|cpu| contains(&allowed, **cpu)) {
            wanted.set(cpu);
        }
        keep_to(&wanted);
        let some = wanted.count() > 0;
        Self(if some { wanted } else { allowed })
    }

    /// Binds the calling thread to its CPUs without `cpu`, if another one remains.
    pub fn leave(&self, cpu: usize) {
        let mut others = self.0;
        if contains(&others, cpu) {
            others.unset(cpu);
            keep_to(&others);
        }
    }
}

/// Binds the calling thread to a set of CPUs, unless the set is empty. The system may refuse, for a
/// CPU that is offline: then the thread's CPUs are unchanged.
fn keep_to(cpus: &CpuSet) {
    if cpus.count() > 0 {
        let _ = sched_setaffinity(None, cpus);
    }
}

/// Returns the CPU on which the calling thread runs.
#[must_use]
pub fn current_cpu() -> Option<usize> {
    // Miri has no CPU numbers.
    (!cfg!(miri)).then(sched_getcpu)
}
