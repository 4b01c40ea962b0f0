//! Contexts of a core. If there are too many, the least recently used one is dropped.

use std::hash::Hash;

use rustc_hash::FxHashMap;

use crate::error::Result;
use crate::rockchip::driver::process::DESCRIPTORS_PER_CONTEXT;

/// Returns the contexts that a core may keep: as many as half of the process's file descriptors
/// allow.
pub(super) fn contexts_per_core(file_limit: u64, cores: usize) -> usize {
    let contexts = file_limit / 2 / DESCRIPTORS_PER_CONTEXT;
    let per_core = usize::try_from(contexts).unwrap_or(usize::MAX) / cores.max(1);
    // A model of 8 billion weights in five address spaces uses 150 to 250 contexts, a small one
    // about 50.
    per_core.clamp(16, 512)
}

/// At most `limit` values by key. A new value replaces the least recently used one.
#[derive(Debug)]
pub(super) struct Recent<K, V> {
    limit: usize,
    uses: u64,
    /// The values, each with the number of its last use.
    values: FxHashMap<K, (u64, V)>,
}

impl<K: Copy + Eq + Hash, V> Recent<K, V> {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit,
            uses: 0,
            values: FxHashMap::default(),
        }
    }

    /// Returns the most values that are kept.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Returns the value of `key`, if there is one. This does not count as a use.
    pub(super) fn get_mut(&mut self, key: K) -> Option<&mut V> {
        self.values.get_mut(&key).map(|(_, value)| value)
    }

    /// Drops all values.
    pub(super) fn clear(&mut self) {
        self.values.clear();
    }

    /// Returns the value of `key`, made if need be.
    pub(super) fn get_or_make(
        &mut self,
        key: K,
        make: impl FnOnce() -> Result<V>,
    ) -> Result<&mut V> {
        self.uses += 1;
        if !self.values.contains_key(&key) {
            if self.values.len() >= self.limit {
                let oldest = self.values.iter().min_by_key(|(_, (used, _))| *used);
                let oldest = oldest.map(|(key, _)| *key);
                oldest.map(|key| self.values.remove(&key));
            }
            self.values.insert(key, (0, make()?));
        }
        let Some((used, value)) = self.values.get_mut(&key) else {
            unreachable!("it was there, or was just made");
        };
        *used = self.uses;
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_value_used_longest_ago_makes_room() {
        let mut recent = Recent::new(3);
        let mut made = Vec::new();
        for key in [1, 2, 3, 1, 2, 4, 1, 2, 4, 3, 1] {
            let make = || {
                made.push(key);
                Ok(key * 10)
            };
            assert_eq!(*recent.get_or_make(key, make).unwrap(), key * 10);
        }
        // 4 replaces 3, and later 3 replaces 1.
        assert_eq!(made, [1, 2, 3, 4, 3, 1]);
    }

    #[test]
    fn contexts_leave_half_of_the_file_descriptors_to_others() {
        assert_eq!(contexts_per_core(65536, 3), 512);
        assert_eq!(contexts_per_core(4096, 3), 170);
        assert_eq!(contexts_per_core(1024, 1), 128);
        assert_eq!(contexts_per_core(64, 3), 16);
    }
}
