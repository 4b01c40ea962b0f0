//! Device memory that is used again from call to call.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::error::Result;
use crate::rockchip::caps;
use crate::rockchip::driver::{Context, Memory};
use crate::rockchip::layout::BLOCK_ALIGN_BYTES;

/// Memory by address space, segment and size. A sync covers a whole allocation, so a call gets one
/// of its size. The least recently used memory is freed for room.
#[derive(Debug)]
pub(super) struct StageScratch {
    /// Bytes that are kept in an address space, unless one call needs more.
    limit: usize,
    /// `true` if the device writes to this memory.
    for_results: bool,
    /// Number of the call, from [`StageScratch::begin`].
    call: u64,
    /// The memory, each with the number of the last call that used it.
    memory: FxHashMap<Key, (u64, Memory)>,
}

/// Address space, segment and bytes.
type Key = (i32, usize, usize);

impl Default for StageScratch {
    /// For activations.
    fn default() -> Self {
        Self::new(caps::ACTIVATION_BYTES)
    }
}

impl StageScratch {
    /// Memory that the device reads.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit,
            for_results: false,
            call: 0,
            memory: FxHashMap::default(),
        }
    }

    /// Memory that the device writes to.
    pub(super) fn for_results(limit: usize) -> Self {
        Self {
            for_results: true,
            ..Self::new(limit)
        }
    }

    /// Returns the bytes that are kept in an address space.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    fn key(anchor: &Context, segment: usize, bytes: usize) -> Key {
        (
            anchor.domain(),
            segment,
            bytes.next_multiple_of(BLOCK_ALIGN_BYTES),
        )
    }

    /// Begins a call: memory that earlier calls reserved may be freed for room.
    pub(super) fn begin(&mut self) {
        self.call += 1;
    }

    /// Drops all memory.
    pub(super) fn clear(&mut self) {
        self.memory.clear();
    }

    pub(super) fn reserve(
        &mut self,
        anchor: &Arc<Context>,
        segment: usize,
        bytes: usize,
    ) -> Result<&mut Memory> {
        let key = Self::key(anchor, segment, bytes);
        if !self.memory.contains_key(&key) {
            self.make_room(key.0, key.2);
            let memory = if self.for_results {
                Memory::for_results(anchor, key.2)?
            } else {
                Memory::new(anchor, key.2)?
            };
            self.memory.insert(key, (0, memory));
        }
        let Some((used, memory)) = self.memory.get_mut(&key) else {
            unreachable!("it was there, or was just made");
        };
        *used = self.call;
        Ok(memory)
    }

    /// Frees the least recently used memory of earlier calls, until `bytes` more fit into the
    /// address space.
    fn make_room(&mut self, domain: i32, bytes: usize) {
        let of_domain = |(key, _): &(&Key, &(u64, Memory))| key.0 == domain;
        loop {
            let kept: usize = (self.memory.iter().filter(of_domain))
                .map(|(key, _)| key.2)
                .sum();
            let earlier = |(_, (used, _)): &(&Key, &(u64, Memory))| *used < self.call;
            let oldest = (self.memory.iter().filter(of_domain).filter(earlier))
                .min_by_key(|(_, (used, _))| *used)
                .map(|(key, _)| *key);
            match oldest {
                Some(key) if kept + bytes > self.limit => self.memory.remove(&key),
                _ => return,
            };
        }
    }

    /// PANIC: `reserve` was called for the same segment and size in this call, or in one since
    /// which [`begin`](Self::begin) was not.
    pub(super) fn get_mut(
        &mut self,
        anchor: &Context,
        segment: usize,
        bytes: usize,
    ) -> &mut Memory {
        let key = Self::key(anchor, segment, bytes);
        let Some((_, memory)) = self.memory.get_mut(&key) else {
            unreachable!("it was reserved in this call");
        };
        memory
    }

    /// PANIC: as for [`Self::get_mut`].
    pub(super) fn get(&self, anchor: &Context, segment: usize, bytes: usize) -> &Memory {
        &self.memory[&Self::key(anchor, segment, bytes)].1
    }
}

#[cfg(test)]
mod tests {
    use rknpu_ops::ffi::{MatmulInfo, MatmulType};
    use rknpu_ops::layout::Soc;
    use rknpu_ops::sim;

    use super::*;
    use crate::rockchip::driver::Rknn;

    #[test]
    fn what_was_used_longest_ago_makes_room_but_nothing_of_the_same_call() {
        let rknn = Rknn::simulate(sim::Options::new(Soc::Rk3588)).unwrap();
        let info = MatmulInfo::native(MatmulType::F16_F16_F32, 32, 32, 32);
        let anchor = Arc::new(Context::new(&rknn, info, None).unwrap());
        let memories = || rknn.stand_in().unwrap().live().mems;
        let mut scratch = StageScratch::new(4 * BLOCK_ALIGN_BYTES);
        scratch.begin();
        for segment in 0..3 {
            scratch.reserve(&anchor, segment, 1).unwrap();
        }
        scratch.begin();
        scratch.reserve(&anchor, 0, 1).unwrap();
        scratch.reserve(&anchor, 3, 1).unwrap();
        assert_eq!(memories(), 4);
        // Two blocks of the first call are freed for room; the blocks of this call stay.
        scratch.reserve(&anchor, 4, 2 * BLOCK_ALIGN_BYTES).unwrap();
        assert_eq!(memories(), 3);
        scratch.get(&anchor, 0, 1);
        scratch.get(&anchor, 3, 1);
        // A call that needs more than the limit for kept blocks still gets it.
        scratch.reserve(&anchor, 5, 3 * BLOCK_ALIGN_BYTES).unwrap();
        assert_eq!(memories(), 4);
    }
}
