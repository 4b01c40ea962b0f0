//! Packed weights in device memory.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::domain::Share;
use crate::error::Result;
use crate::rockchip::driver::{Context, Memory, MemoryView};
use crate::rockchip::layout::WeightLayout;
use crate::rockchip::pack::{self, RowSource};

/// Device memory for packed weights: a ggml buffer, or the weights of one call.
#[derive(Debug)]
pub struct WeightMemory {
    memory: Mutex<Memory>,
    share: Share,
    /// The CPU wrote to it since the last sync.
    dirty: AtomicBool,
}

/// One packed weight.
#[derive(Debug)]
pub struct PackedWeights {
    pub(super) layout: WeightLayout,
    pub(super) blocks: Vec<MemoryView>,
    pub(super) scales: Vec<f32>,
    /// Every scale is 1: FP16 rows without a conversion.
    pub(super) unscaled: bool,
}

/// One slice of a weight, to multiply with.
#[derive(Clone, Copy, Debug)]
pub struct WeightSlice<'a> {
    /// The memory that the weight was placed in.
    pub memory: &'a WeightMemory,
    /// The weight.
    pub weights: &'a PackedWeights,
    /// Number of the slice.
    pub slice: usize,
}

impl WeightMemory {
    pub(super) fn new(memory: Memory, share: Share) -> Self {
        Self {
            memory: Mutex::new(memory),
            share,
            dirty: AtomicBool::new(false),
        }
    }

    /// Returns the context that owns the address space.
    pub(super) fn anchor(&self) -> &Arc<Context> {
        &self.share.anchor
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Memory> {
        // After a panic while packing, one tensor's bytes are unfinished, which the packing call
        // reports. The memory itself is valid.
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes views of the blocks of a weight at `offset`, in a turn of this thread; nothing is
    /// packed yet.
    ///
    /// # Errors
    /// `OutOfMemory` from the library.
    pub(super) fn place(&self, layout: WeightLayout, offset: usize) -> Result<PackedWeights> {
        let memory = self.lock();
        let blocks = (0..layout.slices * layout.blocks_per_slice())
            .map(|block| memory.view(offset + layout.block_offset(block), layout.block_bytes()))
            .collect::<Result<_>>()?;
        Ok(PackedWeights {
            layout,
            blocks,
            scales: vec![layout.empty_scale(); layout.scales()],
            unscaled: false,
        })
    }

    /// Packs rows of a weight that was placed at `offset`; see [`pack::pack_rows`].
    pub fn pack(
        &self,
        weights: &mut PackedWeights,
        offset: usize,
        source: RowSource,
        rows: Range<usize>,
    ) {
        let layout = weights.layout;
        self.fill(weights, offset, |out, scales| {
            pack::pack_rows(&layout, source, rows, scales, out);
            true
        });
    }

    /// Calls `fill` to write the packed bytes and the scales of a weight that was placed at
    /// `offset`, and returns its result: `true` if it did. If not, the scales are again those of an
    /// unwritten weight.
    pub fn fill(
        &self,
        weights: &mut PackedWeights,
        offset: usize,
        fill: impl FnOnce(&mut [u8], &mut [f32]) -> bool,
    ) -> bool {
        let mut memory = self.lock();
        let out = &mut memory.bytes_mut()[offset..][..weights.layout.bytes()];
        let filled = fill(out, &mut weights.scales);
        if !filled {
            weights.scales.fill(weights.layout.empty_scale());
        }
        weights.unscaled = weights.scales.iter().all(|scale| *scale == 1.0);
        self.dirty.store(true, Ordering::Release);
        filled
    }

    /// Makes the packed bytes visible to the device.
    pub(super) fn flush(&self) -> Result<()> {
        if self.dirty.load(Ordering::Acquire) {
            let memory = self.lock();
            memory.sync_to_device()?;
            self.dirty.store(false, Ordering::Release);
        }
        Ok(())
    }
}

impl PackedWeights {
    /// Returns the layout of the weights.
    #[must_use]
    pub fn layout(&self) -> &WeightLayout {
        &self.layout
    }
}
