//! Buffers of a Hexagon device as ggml sees them: bytes that can be written and read at any offset. Weights in them are
//! packed; packing is lossless, so that nothing else has to be kept.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};

use hexagon_ops::layout::{LINE_BYTES, MatrixLayout, TILE_DIM};
use rayon::prelude::*;

use super::Device;
use crate::device::hexagon::Buffer;
use crate::error::Result;
use crate::graph::{Place, Tensor};
use crate::plan::hexagon::WeightLayout;

/// Alignment of tensors: packed weights are lines, and the DSP moves lines.
pub const ALIGN_BYTES: usize = LINE_BYTES;

/// A ggml buffer.
#[derive(Debug)]
pub struct HexBuffer {
    pub(super) memory: Arc<Buffer>,
    /// The CPU uses it as its own; otherwise it goes through [`Self::read`] and [`Self::write`].
    pub(super) shared: bool,
    /// Packed tensors by offset.
    packed: RwLock<BTreeMap<usize, Packed>>,
}

/// One packed tensor.
#[derive(Clone, Copy, Debug)]
struct Packed {
    layout: WeightLayout,
    /// Bytes in ggml's layout.
    bytes: usize,
}

/// What a write puts into a tensor.
#[derive(Clone, Copy, Debug)]
pub enum Content<'a> {
    /// These bytes.
    Bytes(&'a [u8]),
    /// One byte everywhere.
    Fill(u8),
}

impl Content<'_> {
    /// Writes the part of it that begins at `from` to `out`.
    pub(in crate::backend) fn put(&self, from: usize, out: &mut [u8]) {
        match self {
            Self::Bytes(bytes) => out.copy_from_slice(&bytes[from..from + out.len()]),
            Self::Fill(value) => out.fill(*value),
        }
    }
}

impl HexBuffer {
    /// Allocates a buffer of `bytes`.
    ///
    /// - `shared`: the CPU uses it as its own, and nothing in it is packed
    ///
    /// # Errors
    /// `OutOfMemory`, or `FastRpc` if it cannot be shared.
    pub fn new(device: &Device, bytes: usize, shared: bool) -> Result<Self> {
        Ok(Self {
            memory: Arc::new(device.npu.allocate(bytes)?),
            shared,
            packed: RwLock::default(),
        })
    }

    /// Whether the CPU uses it as its own.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.shared
    }

    /// Address of the first byte.
    #[must_use]
    pub fn base(&self) -> usize {
        self.memory.base()
    }

    /// The packed form of a tensor, if all of it was packed as such.
    pub(super) fn find(&self, tensor: &Tensor) -> Option<WeightLayout> {
        let packed = self.packed.read().unwrap_or_else(PoisonError::into_inner);
        let found = packed.get(&tensor.packed_offset)?;
        let same = WeightLayout::new(tensor) == Some(found.layout);
        (same && tensor.shape.is_contiguous(tensor.dtype)).then_some(found.layout)
    }

    /// The packed tensor that a tensor is, or is a view of, and where it starts.
    fn around(&self, tensor: &Tensor) -> Option<(usize, Packed)> {
        let packed = self.packed.read().unwrap_or_else(PoisonError::into_inner);
        let (start, found) = packed.range(..=tensor.packed_offset).next_back()?;
        (tensor.packed_offset < start + found.bytes).then_some((*start, *found))
    }

    /// Writes part of a tensor: the bytes `[offset, offset + size)` of it. A weight is packed from its first write on.
    ///
    /// # Panics
    /// If the range is not inside the buffer.
    pub fn write(&self, tensor: &Tensor, offset: usize, size: usize, content: Content) {
        let first = tensor.packed_offset + offset;
        if let Some((start, packed)) = self.place(tensor) {
            let area = start..start + packed.layout.bytes();
            let range = first - start..first - start + size;
            self.memory.write(area, |out| {
                write_packed(&packed.layout, out, range, content)
            });
        } else {
            self.memory
                .write(first..first + size, |out| content.put(0, out));
        }
    }

    /// The packed tensor that a write goes to; a weight that is seen for the first time becomes one.
    fn place(&self, tensor: &Tensor) -> Option<(usize, Packed)> {
        if let Some(found) = self.around(tensor) {
            return Some(found);
        }
        let wanted = tensor.place == Place::Packed && tensor.shape.is_contiguous(tensor.dtype);
        let layout = wanted.then(|| WeightLayout::new(tensor)).flatten()?;
        let (start, bytes) = (tensor.packed_offset, tensor.shape.span_bytes(tensor.dtype)?);
        if start + layout.bytes() > self.memory.bytes() {
            return None;
        }
        // Padding reads as zero weights.
        let area = start..start + layout.bytes();
        self.memory.write(area, |out| out.fill(0));
        let packed = Packed { layout, bytes };
        let mut all = self.packed.write().unwrap_or_else(PoisonError::into_inner);
        all.retain(|other, held| other + held.bytes <= start || start + bytes <= *other);
        all.insert(start, packed);
        Some((start, packed))
    }

    /// Copies the bytes of a tensor from `offset` on.
    ///
    /// # Panics
    /// If the range is not inside the buffer.
    pub fn read(&self, tensor: &Tensor, offset: usize, out: &mut [u8]) {
        let first = tensor.packed_offset + offset;
        if let Some((start, packed)) = self.around(tensor) {
            let area = start..start + packed.layout.bytes();
            (self.memory).read(area, |bytes| {
                read_packed(&packed.layout, bytes, first - start, out);
            });
        } else {
            (self.memory).read(first..first + out.len(), |bytes| out.copy_from_slice(bytes));
        }
    }

    /// Fills the whole buffer; nothing in it is packed any more.
    pub fn clear(&self, value: u8) {
        (self.packed.write().unwrap_or_else(PoisonError::into_inner)).clear();
        self.memory
            .write(0..self.memory.bytes(), |out| out.fill(value));
    }
}

/// The layout of one panel as a matrix of its own.
fn panel_of(layout: MatrixLayout) -> MatrixLayout {
    let panel = layout.panel();
    // PANIC: the type and K are those of a layout that exists.
    MatrixLayout::new(panel.weight(), TILE_DIM, panel.k()).expect("a panel of an existing layout")
}

/// Packed panels of all matrices, each with the rows of ggml's tensor that it holds.
fn panel_rows(layout: &WeightLayout, panel: usize) -> Range<usize> {
    let (strips, n) = (layout.matrix.n_strips(), layout.matrix.n());
    let first = panel % strips * TILE_DIM;
    let matrix = panel / strips * n;
    matrix + first..matrix + (first + TILE_DIM).min(n)
}

/// Packs `range` of the bytes of a tensor; rows of which only a part is written keep the rest.
pub(super) fn write_packed(
    layout: &WeightLayout,
    packed: &mut [u8],
    range: Range<usize>,
    content: Content,
) {
    let row_bytes = layout.matrix.ggml_row_bytes();
    let panel_layout = panel_of(layout.matrix);
    let panels = packed.par_chunks_exact_mut(panel_layout.matrix_bytes());
    panels.enumerate().for_each_init(
        || vec![0; row_bytes],
        |row, (index, panel)| {
            for (n, number) in panel_rows(layout, index).enumerate() {
                let at = number * row_bytes..(number + 1) * row_bytes;
                let (from, to) = (at.start.max(range.start), at.end.min(range.end));
                if from >= to {
                    continue;
                }
                // PANIC: sizes and numbers are the layout's own.
                if to - from < row_bytes {
                    (panel_layout.unpack_row(panel, n, row)).expect("a row of the layout");
                }
                content.put(from - range.start, &mut row[from - at.start..to - at.start]);
                (panel_layout.pack_row(panel, n, row)).expect("a row of the layout");
            }
        },
    );
}

/// Restores the bytes of a tensor from `first` on.
fn read_packed(layout: &WeightLayout, packed: &[u8], first: usize, out: &mut [u8]) {
    let row_bytes = layout.matrix.ggml_row_bytes();
    let panel_layout = panel_of(layout.matrix);
    let (strips, n) = (layout.matrix.n_strips(), layout.matrix.n());
    let mut row = vec![0; row_bytes];
    let mut done = 0;
    while done < out.len() {
        let number = (first + done) / row_bytes;
        let within = (first + done) % row_bytes;
        let (matrix, in_matrix) = (number / n, number % n);
        let panel = matrix * strips + in_matrix / TILE_DIM;
        let bytes = &packed[panel * panel_layout.matrix_bytes()..][..panel_layout.matrix_bytes()];
        // PANIC: sizes and numbers are the layout's own.
        (panel_layout.unpack_row(bytes, in_matrix % TILE_DIM, &mut row))
            .expect("a row of the layout");
        let count = (row_bytes - within).min(out.len() - done);
        out[done..done + count].copy_from_slice(&row[within..within + count]);
        done += count;
    }
}
