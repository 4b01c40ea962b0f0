//! Device memory that is used again from call to call.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use crate::error::Result;
use crate::rockchip::driver::{Context, Memory};
use crate::rockchip::layout::BLOCK_ALIGN_BYTES;

/// Memory by address space, segment and size. A sync covers a whole allocation, so a call gets one of its size.
#[derive(Debug, Default)]
pub(super) struct StageScratch(HashMap<(i32, usize, usize), Memory>);

impl StageScratch {
    fn key(anchor: &Context, segment: usize, bytes: usize) -> (i32, usize, usize) {
        (
            anchor.domain(),
            segment,
            bytes.next_multiple_of(BLOCK_ALIGN_BYTES),
        )
    }

    pub(super) fn reserve(
        &mut self,
        anchor: &Arc<Context>,
        segment: usize,
        bytes: usize,
    ) -> Result<&mut Memory> {
        let key = Self::key(anchor, segment, bytes);
        match self.0.entry(key) {
            Entry::Occupied(entry) => Ok(entry.into_mut()),
            Entry::Vacant(entry) => Ok(entry.insert(Memory::new(anchor, key.2)?)),
        }
    }

    /// PANIC: `reserve` was called for the same segment and size before.
    pub(super) fn get(&self, anchor: &Context, segment: usize, bytes: usize) -> &Memory {
        &self.0[&Self::key(anchor, segment, bytes)]
    }
}
