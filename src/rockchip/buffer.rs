//! Buffers of packed weights as ggml sees them: bytes that can be written and read at any offset.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

pub(super) use self::beside::{Beside, Form};
use super::device::{PackedWeights, WeightMemory};
use super::pack::RowSource;
use super::{RkDevice, plan};
use crate::backend::{Buffer, Content};
use crate::error::{Error, Result};
use crate::graph::Tensor;
use crate::host_memory::Pages;
use crate::packfile::Wanted;
use crate::tensor::{DType, Format};

mod beside;
mod kept;

/// A ggml buffer of packed weights: their packed form in device memory and, at the same offsets,
/// their own bytes in host memory until all of them were written and packed. Then these are
/// released, because two copies of a model would not fit in memory: the weight can be written again
/// as a whole, and reading it is an error.
///
/// Bytes that the CPU multiplies with stay, and all bytes with `GGML_RUST_NPU_KEEP=on`: reading
/// returns exactly the written bytes, and any part can be written again.
#[derive(Debug)]
pub struct RkBuffer {
    device: Arc<RkDevice>,
    pub(super) memory: WeightMemory,
    base: usize,
    contents: RwLock<Contents>,
    /// Dropped last.
    _end: End,
}

impl Drop for RkBuffer {
    /// Frees all memory in it within one turn.
    fn drop(&mut self) {
        let _turn = self.device.npu.turn_to_free();
        self.contents_mut().packed.clear();
    }
}

/// The end of a buffer. Its memory is freed, but contexts of calls may be bound to it.
#[derive(Debug)]
struct End(Arc<RkDevice>);

impl Drop for End {
    fn drop(&mut self) {
        self.0.npu.release_idle();
    }
}

/// State of a [`RkBuffer`].
#[derive(Debug)]
pub(super) struct Contents {
    ggml_bytes: Pages,
    /// Packed weights by offset.
    packed: BTreeMap<usize, Packed>,
}

/// One packed tensor.
#[derive(Debug)]
struct Packed {
    dtype: DType,
    format: Option<Format>,
    ne: [usize; 4],
    bytes: usize,
    weights: PackedWeights,
    /// The ranges written since the bytes were released, or since the beginning; they do not touch
    /// each other.
    written: Vec<Range<usize>>,
    released: bool,
}

impl Packed {
    /// Returns `true` if a tensor has the type of these rows, so that its dequantizer reads them.
    fn is_type_of(&self, tensor: &Tensor) -> bool {
        (self.dtype, self.format) == (tensor.dtype, tensor.format)
    }

    /// Adds a range to the written bytes. Returns `true` if all are written.
    fn write(&mut self, range: Range<usize>) -> bool {
        let mut whole = range;
        self.written.retain(|other| {
            let apart = other.end < whole.start || whole.end < other.start;
            if !apart {
                whole = whole.start.min(other.start)..whole.end.max(other.end);
            }
            apart
        });
        self.written.push(whole);
        matches!(&self.written[..], [all] if *all == (0..self.bytes))
    }
}

impl Contents {
    /// Returns the packed form of a tensor, if it was written and packed as such.
    pub(super) fn find(&self, tensor: &Tensor) -> Option<&PackedWeights> {
        let packed = self.packed.get(&tensor.packed_offset)?;
        let matrices = |[k, n, s2, s3]: [usize; 4]| [k, n, s2 * s3];
        let same = packed.is_type_of(tensor) && matrices(packed.ne) == matrices(tensor.shape.ne);
        let is_written = packed.released || !packed.written.is_empty();
        (same && is_written && tensor.shape.is_contiguous(tensor.dtype)).then_some(&packed.weights)
    }

    /// Checks that bytes of a tensor have not been released.
    ///
    /// # Errors
    /// `Released`, unless all bytes in `range` exist, or `anew` is set and the range is the whole
    /// tensor.
    pub(super) fn check(
        &self,
        tensor: &Tensor,
        range: &Range<usize>,
        anew: bool,
        action: &'static str,
    ) -> Result<()> {
        let hit = self.packed.range(..range.end).any(|(&start, packed)| {
            let end = start + packed.bytes;
            let covered = range.start <= start && end <= range.end;
            packed.released && range.start < end && !(anew && covered)
        });
        if hit {
            return Err(Error::Released {
                tensor: tensor.name.into(),
                action,
            });
        }
        Ok(())
    }
}

impl RkBuffer {
    /// Allocates a buffer of `bytes`, on the device and in host memory (the latter occupies space
    /// as it is written).
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn new(device: Arc<RkDevice>, bytes: usize) -> Result<Self> {
        // Created first, so that it is dropped after the memory if allocating the pages fails.
        let end = End(Arc::clone(&device));
        let memory = device.npu.allocate(bytes)?;
        let ggml_bytes = Pages::new(bytes).map_err(|_| Error::OutOfMemory {
            call: "mmap",
            bytes,
        })?;
        let base = ggml_bytes.bytes().as_ptr().addr();
        Ok(Self {
            _end: end,
            device,
            memory,
            base,
            contents: RwLock::new(Contents {
                ggml_bytes,
                packed: BTreeMap::new(),
            }),
        })
    }

    pub(super) fn contents(&self) -> RwLockReadGuard<'_, Contents> {
        // After a panic a tensor may be half written at worst, which the writing call has reported.
        self.contents.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn contents_mut(&self) -> RwLockWriteGuard<'_, Contents> {
        self.contents
            .write()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes part of a tensor: `fill` gets the bytes `[offset, offset + size)` of it. The touched
    /// rows are packed again.
    ///
    /// # Errors
    /// `OutOfMemory` if the library has no more views; `NoRoom` if the packed form ends after the
    /// buffer; `Released` for a part of a tensor whose other bytes were released.
    ///
    /// # Panics
    /// If the range is not inside the buffer.
    fn set(
        &self,
        tensor: &Tensor,
        offset: usize,
        size: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<()> {
        let mut contents = self.contents_mut();
        let touched = tensor.packed_offset + offset..tensor.packed_offset + offset + size;
        if size < tensor.shape.span_bytes(tensor.dtype).unwrap_or(0) {
            // Checked before `place`, because that forgets released bytes when a whole new tensor
            // is about to be written.
            contents.check(tensor, &touched, true, "written in part")?;
        }
        let placed = self.place(&mut contents, tensor);
        contents.check(tensor, &touched, true, "written in part")?;
        fill(&mut contents.ggml_bytes.bytes_mut()[touched.clone()]);
        placed?;
        let Contents { ggml_bytes, packed } = &mut *contents;
        // Rows that were written as another type are no longer packed here; they are packed on use,
        // with that type.
        packed.retain(|&start, packed| {
            let is_apart = start + packed.bytes <= touched.start || touched.end <= start;
            is_apart || packed.is_type_of(tensor)
        });
        for (&start, packed) in packed.range_mut(..touched.end) {
            if start + packed.bytes <= touched.start {
                continue;
            }
            let all_rows = packed.ne[1] * packed.ne[2] * packed.ne[3];
            let row_bytes = packed.bytes / all_rows;
            let first = touched.start.saturating_sub(start) / row_bytes;
            let last = (touched.end.min(start + packed.bytes) - start).div_ceil(row_bytes);
            // A new tensor has no packed rows yet, and rows outside this write may have been
            // written earlier.
            let is_new = packed.written.is_empty() && !packed.released;
            let changed = if is_new { 0..all_rows } else { first..last };
            let rows = &ggml_bytes.bytes()[start..start + packed.bytes];
            let source = RowSource {
                dtype: packed.dtype,
                rows,
                dequantize: tensor.dequantize,
                calibration: self.device.target.calibration,
                feedback: &[],
            };
            let whole = touched.start <= start && start + packed.bytes <= touched.end;
            let of_this = start == tensor.packed_offset && packed.ne == tensor.shape.ne;
            let taken = whole && of_this && self.take(tensor, &mut packed.weights, start, rows);
            if !taken {
                self.memory
                    .pack(&mut packed.weights, start, source, changed);
            }
            let end = touched.end.min(start + packed.bytes);
            packed.released = false;
            let all = packed.write(touched.start.saturating_sub(start)..end - start);
            if all && !self.device.keeps(tensor) {
                packed.written.clear();
                // The advice can fail only if the system refuses to take the memory back.
                packed.released = ggml_bytes.release(start..start + packed.bytes).is_ok();
            }
        }
        Ok(())
    }

    /// Loads a whole weight from a pack file. Returns whether a pack has it.
    fn take(
        &self,
        tensor: &Tensor,
        weights: &mut PackedWeights,
        start: usize,
        rows: &[u8],
    ) -> bool {
        let Some(packs) = self.device.packs.get() else {
            return false;
        };
        let wanted = Wanted {
            name: tensor.name,
            dtype: tensor.dtype,
            format: tensor.format,
            ne: tensor.shape.ne,
            source: rows,
            layout: weights.layout().tag(),
        };
        let take = |out: &mut [u8], scales: &mut [f32]| packs.take(&wanted, out, scales);
        self.memory.fill(weights, start, take)
    }

    /// Makes room for the packed form of a tensor that is seen for the first time. A view of a
    /// tensor that is already there is part of that one.
    fn place(&self, contents: &mut Contents, tensor: &Tensor) -> Result<()> {
        let start = tensor.packed_offset;
        let Some(layout) = plan::weight_layout(&self.device.target, tensor) else {
            return Ok(());
        };
        let bytes = tensor.shape.span_bytes(tensor.dtype).unwrap_or(0);
        let around = contents.packed.range(..=start).next_back();
        if around.is_some_and(|(&other, packed)| {
            start + bytes <= other + packed.bytes && packed.is_type_of(tensor)
        }) {
            return Ok(());
        }
        contents
            .packed
            .retain(|&other, packed| other + packed.bytes <= start || start + bytes <= other);
        let have = contents.ggml_bytes.bytes().len().saturating_sub(start);
        if have < layout.bytes() {
            return Err(Error::NoRoom {
                tensor: tensor.name.into(),
                need: layout.bytes(),
                have,
            });
        }
        let weights = self.device.npu.place(&self.memory, layout, start)?;
        contents.packed.insert(
            start,
            Packed {
                dtype: tensor.dtype,
                format: tensor.format,
                ne: tensor.shape.ne,
                bytes,
                weights,
                written: Vec::new(),
                released: false,
            },
        );
        Ok(())
    }
}

impl Buffer for RkBuffer {
    fn base(&self) -> usize {
        self.base
    }

    fn is_host_memory(&self) -> bool {
        true
    }

    fn holds(&self, _offset: usize, _bytes: usize) -> bool {
        // Released bytes are checked where a tensor is used.
        true
    }

    fn shared_bytes(&self, _address: usize, _bytes: usize) -> Option<Vec<u8>> {
        None
    }

    fn prepare(&self, tensor: &Tensor) -> Result<()> {
        let mut contents = self.contents_mut();
        let span = tensor.span();
        let is_free = (contents.packed.range(..span.end))
            .all(|(&start, packed)| start + packed.bytes <= span.start);
        if !is_free {
            return Ok(());
        }
        match self.place(&mut contents, tensor) {
            Err(shortage) if shortage.is_shortage() => {
                let placed = contents.packed.values();
                Err(Error::WeightsLost {
                    placed: placed.len(),
                    bytes: placed.map(|packed| packed.weights.layout().bytes()).sum(),
                    shortage: Box::new(shortage),
                })
            }
            // The tensor may be written although it has no packed memory; it is then packed on use.
            _ => Ok(()),
        }
    }

    fn write(&self, tensor: &Tensor, offset: usize, size: usize, content: Content) -> Result<()> {
        self.set(tensor, offset, size, |out| content.put(0, out))
    }

    fn read(&self, tensor: &Tensor, offset: usize, out: &mut [u8]) -> Result<()> {
        let start = tensor.packed_offset + offset;
        let range = start..start + out.len();
        let contents = self.contents();
        contents.check(tensor, &range, false, "read")?;
        out.copy_from_slice(&contents.ggml_bytes.bytes()[range]);
        Ok(())
    }

    fn has_bytes(&self, tensor: &Tensor) -> bool {
        (self.contents())
            .check(tensor, &tensor.span(), false, "read")
            .is_ok()
    }

    /// After this, nothing in it is packed.
    fn clear(&self, value: u8) {
        let mut contents = self.contents_mut();
        contents.packed.clear();
        contents.ggml_bytes.bytes_mut().fill(value);
    }

    fn forget_graphs(&self) {}

    fn mark_cpu_reader(&self) {}

    fn show_to_cpu(&self, _tensor: &Tensor) {}

    fn take_from_cpu(&self, _tensor: &Tensor) {}
}
