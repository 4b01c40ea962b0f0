//! The fastest possible time of a multiplication on a chip.

/// The work of a multiplication, and the fastest that a chip could do it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limit {
    /// Bytes of the packed weights, which are read once.
    pub weight_bytes: usize,
    /// Bytes read in a nanosecond, by all cores.
    pub bytes_per_ns: f64,
    /// Operations in a nanosecond, by all cores, a multiplication and an addition being two.
    pub ops_per_ns: f64,
}

impl Limit {
    /// Returns a lower bound for the time of `ops` operations in nanoseconds: the time to read the
    /// weights or the time of the arithmetic, whichever is longer.
    #[must_use]
    pub fn least_ns(&self, ops: f64) -> f64 {
        self.memory_ns().max(ops / self.ops_per_ns)
    }

    /// Returns the time to read the weights, in nanoseconds.
    #[must_use]
    pub fn memory_ns(&self) -> f64 {
        self.weight_bytes as f64 / self.bytes_per_ns
    }
}
