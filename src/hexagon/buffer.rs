//! Buffers of a Hexagon device as ggml sees them: bytes that can be written and read at any offset.
//! Weights in them are packed; if the packed form does not keep every bit, their own bytes are kept
//! as well.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};

use hexagon_ops::layout::LINE_BYTES;

use super::device::DeviceBuffer as Memory;
use super::layout::{Conversion, WeightLayout};
use super::{HexDevice, SharedBuffers, pack};
use crate::backend::{Buffer, Content};
use crate::config::Repack;
use crate::error::Result;
use crate::graph::{Place, Role, Tensor};
use crate::packfile::{Packs, Wanted};
use crate::tensor::{DType, Dequantize, Format};

pub(super) use self::beside::{Beside, Found, Place as PlaceBeside, Used};
pub(super) use self::ranges::Ranges;

mod beside;
mod ranges;

/// Alignment of tensors: packed weights are lines, and the DSP moves lines.
pub const ALIGN_BYTES: usize = LINE_BYTES;

/// A ggml buffer.
#[derive(Debug)]
pub struct HexBuffer {
    pub(super) memory: Arc<Memory>,
    /// The CPU may read results in it, and weights and caches, in place; otherwise only by
    /// [`Self::read`] and [`Self::write`].
    pub(super) shared: bool,
    /// Packed tensors by offset.
    packed: RwLock<BTreeMap<usize, Arc<Packed>>>,
    /// Offsets of tensors that were put back into ggml's layout: a write of a part leaves them so.
    unpacked: Mutex<BTreeSet<usize>>,
    /// Bytes that the program or the device wrote; recorded with [`Repack::Always`] only. There a
    /// program on another machine places tensors by their size in ggml's layout, and the next
    /// tensor may begin inside a larger packed form.
    written: Option<Mutex<Ranges>>,
    /// The CPU computes with caches in this buffer.
    used_by_cpu: AtomicBool,
    /// The device's count of changes that submissions depend on.
    changes: Arc<AtomicU64>,
    /// Pack files that may contain the weights.
    packs: Arc<Packs>,
    /// Locked by a write, because two writes may change parts of one panel.
    writing: Mutex<()>,
    /// All memory of the device that the CPU reads in place.
    all_shared: SharedBuffers,
    /// Packed forms of weights that the CPU reads in place.
    beside: Option<Arc<Beside>>,
    /// The device's lock of the forms that tensors are in.
    layouts: Arc<RwLock<()>>,
}

/// One packed tensor.
#[derive(Debug)]
struct Packed {
    layout: WeightLayout,
    dtype: DType,
    format: Option<Format>,
    /// Bytes in ggml's layout, and of a row.
    bytes: usize,
    row_bytes: usize,
    /// The bytes themselves, if the packed form does not keep them.
    ggml_bytes: Option<Mutex<Vec<u8>>>,
}

impl Packed {
    /// Returns `true` if a tensor has the type of these rows.
    fn is_type_of(&self, tensor: &Tensor) -> bool {
        (self.dtype, self.format) == (tensor.dtype, tensor.format)
    }

    /// Returns `true` if a tensor's bytes can be written into this packed form, where they end at
    /// `end`: all of them have to be inside, and must not need the conversion of another type.
    fn takes(&self, tensor: &Tensor, end: usize) -> bool {
        end <= self.bytes && (self.is_type_of(tensor) || self.ggml_bytes.is_none())
    }

    /// Returns `true` if the packed form, which begins at `start`, overlaps a range.
    fn overlaps(&self, start: usize, range: &Range<usize>) -> bool {
        start < range.end && range.start < start + self.bytes.max(self.layout.bytes())
    }

    /// Copies bytes in ggml's layout, starting at `at` of the tensor that starts at `start`.
    fn read(&self, memory: &Memory, start: usize, at: usize, out: &mut [u8]) {
        if let Some(ggml_bytes) = &self.ggml_bytes {
            let ggml_bytes = ggml_bytes.lock().unwrap_or_else(PoisonError::into_inner);
            return out.copy_from_slice(&ggml_bytes[at..at + out.len()]);
        }
        if out.is_empty() {
            return;
        }
        let rows = at / self.row_bytes..(at + out.len()).div_ceil(self.row_bytes);
        let end = at + out.len();
        let mut packed = Vec::new();
        for rows in pack::pieces(&self.layout, rows) {
            let area = pack::bytes_of(&self.layout, &rows);
            packed.resize(area.len(), 0);
            copy_out(memory, start + area.start, &mut packed);
            let from = at.max(rows.start * self.row_bytes);
            let to = end.min(rows.end * self.row_bytes);
            pack::unpack(&self.layout, &packed, from, &mut out[from - at..to - at]);
        }
    }
}

/// Bytes that are copied at a time. Other accesses, and the device, never wait longer than one such
/// copy.
const COPY_BYTES: usize = 4 << 20;

/// Copies bytes of a buffer, starting at `start`, with pauses for others.
fn copy_out(memory: &Memory, start: usize, out: &mut [u8]) {
    for (index, piece) in out.chunks_mut(COPY_BYTES).enumerate() {
        let first = start + index * COPY_BYTES;
        memory.read(first..first + piece.len(), |bytes| {
            piece.copy_from_slice(bytes)
        });
    }
}

/// Calls `put(at, out)` to write `count` bytes starting at `start` in pieces, with pauses for
/// others.
fn copy_in(memory: &Memory, start: usize, count: usize, put: impl Fn(usize, &mut [u8])) {
    for at in (0..count).step_by(COPY_BYTES) {
        let piece = start + at..start + (at + COPY_BYTES).min(count);
        memory.write(piece, |out| put(at, out));
    }
}

/// Writes bytes from `start` on, in pieces.
pub(super) fn put(memory: &Memory, start: usize, bytes: &[u8]) {
    copy_in(memory, start, bytes.len(), |at, out| {
        out.copy_from_slice(&bytes[at..at + out.len()]);
    });
}

/// Packs all rows of a weight to `start` in memory, piece by piece: others wait for no more than
/// the copy of one. Panels are made from nothing, padding too.
pub(super) fn pack_all(
    memory: &Memory,
    layout: &WeightLayout,
    start: usize,
    rows: &[u8],
    dequantize: Option<&dyn Dequantize>,
) {
    let mut packed = Vec::new();
    for touched in pack::pieces(layout, 0..layout.count() * layout.matrix.n()) {
        let area = pack::bytes_of(layout, &touched);
        packed.clear();
        packed.resize(area.len(), 0);
        pack::pack_rows(layout, &mut packed, touched, rows, dequantize);
        put(memory, start + area.start, &packed);
    }
}

/// Returns the packed tensor that the byte at an offset belongs to, and where it starts.
fn around(packed: &BTreeMap<usize, Arc<Packed>>, at: usize) -> Option<(usize, &Arc<Packed>)> {
    let (start, found) = packed.range(..=at).next_back()?;
    (at < start + found.bytes).then_some((*start, found))
}

impl HexBuffer {
    /// Allocates a buffer of `bytes`.
    ///
    /// - `shared`: the CPU uses it as its own, and nothing in it is packed
    ///
    /// # Errors
    /// `OutOfMemory`, or `FastRpc` if it cannot be shared.
    pub fn new(device: &HexDevice, bytes: usize, shared: bool) -> Result<Self> {
        let memory = Arc::new(device.allocate_buffer(bytes)?);
        if shared {
            let mut all = (device.shared.lock()).unwrap_or_else(PoisonError::into_inner);
            all.retain(|buffer| buffer.strong_count() > 0);
            all.push(Arc::downgrade(&memory));
        }
        let packs_beside = shared && device.packs_beside();
        let beside = packs_beside.then(|| device.with_forms(Beside::new(device, &memory)));
        Ok(Self {
            memory,
            shared,
            packed: RwLock::default(),
            unpacked: Mutex::default(),
            written: (device.repack == Repack::Always).then(Mutex::default),
            used_by_cpu: AtomicBool::new(false),
            changes: Arc::clone(&device.changes),
            packs: device.packs(),
            writing: Mutex::default(),
            all_shared: Arc::clone(&device.shared),
            beside,
            layouts: Arc::clone(&device.layouts),
        })
    }

    /// Returns `true` if [`Buffer::mark_cpu_reader`] was called.
    pub(super) fn is_used_by_cpu(&self) -> bool {
        self.used_by_cpu.load(Ordering::Relaxed)
    }

    /// Returns the packed copies of its weights, if the device keeps such copies for this buffer.
    pub(super) fn beside(&self) -> Option<&Arc<Beside>> {
        self.beside.as_ref()
    }

    /// Notes that a graph is about to write a range.
    pub(super) fn note_computed(&self, range: Range<usize>) {
        if let Some(beside) = &self.beside {
            beside.computed(&range);
        }
        self.note(range);
    }

    /// Notes that the program writes a range.
    fn note_written(&self, range: Range<usize>) {
        if let Some(beside) = &self.beside {
            beside.written(&range);
        }
        self.note(range);
    }

    /// Records that the packed form of a tensor at lower addresses must not use bytes of a range.
    fn note(&self, range: Range<usize>) {
        if let Some(written) = &self.written {
            let mut written = written.lock().unwrap_or_else(PoisonError::into_inner);
            written.insert(range);
        }
    }

    /// Returns `true` if a packed form may use the bytes of a range after its tensor, because
    /// nothing was written there. Buffers for weights alone always have this room, because tensors
    /// in them are allocated with their packed size.
    fn has_room(&self, behind: &Range<usize>) -> bool {
        let Some(written) = self.written.as_ref().filter(|_| !behind.is_empty()) else {
            return true;
        };
        let written = written.lock().unwrap_or_else(PoisonError::into_inner);
        !written.overlaps(behind) && !self.holds_packed(behind)
    }

    /// Returns `true` if a tensor is packed, or part of a packed one.
    pub(super) fn is_packed(&self, tensor: &Tensor) -> bool {
        self.around(tensor.packed_offset).is_some()
    }

    /// Returns the packed form of a tensor, if all of it was packed as such: its type's, or the
    /// groups of a pack. The same matrices may be counted in other dimensions.
    pub(super) fn find(&self, tensor: &Tensor) -> Option<WeightLayout> {
        let packed = self.packed.read().unwrap_or_else(PoisonError::into_inner);
        let found = packed.get(&tensor.packed_offset)?;
        let own = WeightLayout::new(tensor)?;
        let slices = own.slices;
        let layout = WeightLayout {
            slices,
            ..found.layout
        };
        let same = own == layout || own.groups() == Some(layout);
        let same = same && layout.count() == found.layout.count() && found.is_type_of(tensor);
        (same && tensor.shape.is_contiguous(tensor.dtype)).then_some(layout)
    }

    /// Returns the packed tensor that the byte at an offset belongs to, and where it starts.
    fn around(&self, at: usize) -> Option<(usize, Arc<Packed>)> {
        let packed = self.packed.read().unwrap_or_else(PoisonError::into_inner);
        let (start, found) = around(&packed, at)?;
        Some((start, Arc::clone(found)))
    }

    /// Writes the bytes `[offset, offset + size)` of a tensor. A weight is packed from its first
    /// write on.
    ///
    /// # Panics
    /// If the range is not inside the buffer.
    fn set(&self, tensor: &Tensor, offset: usize, size: usize, content: Content) {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let first = tensor.packed_offset + offset;
        self.note_written(first..first + size);
        let Some((start, mut packed)) = self.place(tensor, &(first..first + size)) else {
            return copy_in(&self.memory, first, size, |at, out| content.put(at, out));
        };
        if size == 0 {
            return;
        }
        if packed.layout.form == Conversion::Groups {
            packed = self.without_groups(start, &packed);
        }
        let range = first - start..first - start + size;
        let is_whole = range == (0..packed.bytes);
        if let (Content::Bytes(bytes), true) = (content, is_whole) {
            return self.write_whole(tensor, start, &packed, bytes);
        }
        let row_bytes = packed.row_bytes;
        let touched = range.start / row_bytes..range.end.div_ceil(row_bytes);
        let layout = &packed.layout;
        if let Some(ggml_bytes) = &packed.ggml_bytes {
            let mut ggml_bytes = ggml_bytes.lock().unwrap_or_else(PoisonError::into_inner);
            content.put(0, &mut ggml_bytes[range]);
            let rows = &ggml_bytes[touched.start * row_bytes..touched.end * row_bytes];
            if let Some(value) = pack::beyond_f16(layout, tensor.dtype, rows) {
                drop(ggml_bytes);
                return self.leave_unpacked(tensor, start, value);
            }
            return self.change(layout, start, touched, is_whole, |rows, out| {
                pack::pack_rows(layout, out, rows, &ggml_bytes, tensor.dequantize);
            });
        }
        let part = |number: usize| {
            let (from, to) = (number * row_bytes, (number + 1) * row_bytes);
            range.start.max(from)..range.end.min(to)
        };
        let whole = |number: usize| part(number).len() == row_bytes;
        self.change(layout, start, touched, is_whole, |rows, out| {
            pack::pack(layout, out, rows, whole, |number, row| {
                let part = part(number);
                let within = part.start - number * row_bytes..part.end - number * row_bytes;
                content.put(part.start - range.start, &mut row[within]);
            });
        });
    }

    /// Lets `pack(rows, out)` change the panels of the rows in `touched`, piece by piece. Packing
    /// may be slow, so only copying waits for the device and makes the device wait.
    ///
    /// - `is_whole`: all rows are written, to panels that are zero before; otherwise the panels
    ///   begin with their old content, also in the padding
    fn change(
        &self,
        layout: &WeightLayout,
        start: usize,
        touched: Range<usize>,
        is_whole: bool,
        pack: impl Fn(Range<usize>, &mut [u8]),
    ) {
        let mut out = Vec::new();
        for rows in pack::pieces(layout, touched) {
            let area = pack::bytes_of(layout, &rows);
            out.clear();
            out.resize(area.len(), 0);
            if !is_whole {
                copy_out(&self.memory, start + area.start, &mut out);
            }
            pack(rows, &mut out);
            put(&self.memory, start + area.start, &out);
        }
    }

    /// Writes a whole packed tensor, as the loading of a model does.
    fn write_whole(&self, tensor: &Tensor, start: usize, packed: &Packed, bytes: &[u8]) {
        let layout = &packed.layout;
        if let Some(ggml_bytes) = &packed.ggml_bytes {
            let mut ggml_bytes = ggml_bytes.lock().unwrap_or_else(PoisonError::into_inner);
            ggml_bytes.copy_from_slice(bytes);
        }
        if let Some(value) = pack::beyond_f16(layout, tensor.dtype, bytes) {
            return self.leave_unpacked(tensor, start, value);
        }
        let take = |layout: &WeightLayout| {
            let wanted = Wanted {
                name: tensor.name,
                dtype: tensor.dtype,
                format: tensor.format,
                ne: tensor.shape.ne,
                source: bytes,
                layout: pack::tag(layout),
            };
            let put = |at: usize, piece: &[u8]| put(&self.memory, start + at, piece);
            self.packs.take_pieces(&wanted, layout.bytes(), put)
        };
        let is_in_pack = |groups: &WeightLayout| self.packs.has(tensor.name, &pack::tag(groups));
        let groups = layout.groups().filter(is_in_pack);
        if let Some(layout) = groups.filter(take) {
            self.replace(
                start,
                Packed {
                    layout,
                    ggml_bytes: Some(Mutex::new(bytes.to_vec())),
                    ..*packed
                },
            );
        } else if !take(layout) {
            pack_all(&self.memory, layout, start, bytes, tensor.dequantize);
        }
    }

    /// Puts a tensor that cannot become F16 back into ggml's layout, in which it is multiplied in
    /// FP32.
    fn leave_unpacked(&self, tensor: &Tensor, start: usize, value: f32) {
        log::warn!(
            "{} has the value {value}, beyond F16's range: it is multiplied in FP32, which is slower, and fails as experts",
            tensor.name
        );
        self.unpack(&(start..start + 1));
    }

    /// Packs a tensor from its own bytes that were loaded from a pack in groups: a write is about
    /// to change them.
    fn without_groups(&self, start: usize, packed: &Packed) -> Arc<Packed> {
        // PANIC: groups have the same shapes as blocks.
        let layout = packed.layout.without_groups().expect("groups");
        if let Some(ggml_bytes) = &packed.ggml_bytes {
            let ggml_bytes = ggml_bytes.lock().unwrap_or_else(PoisonError::into_inner);
            pack_all(&self.memory, &layout, start, &ggml_bytes, None);
        }
        self.replace(
            start,
            Packed {
                layout,
                ggml_bytes: None,
                ..*packed
            },
        )
    }

    /// Puts another packed form in the place of the one at `start`.
    fn replace(&self, start: usize, packed: Packed) -> Arc<Packed> {
        let packed = Arc::new(packed);
        let mut all = self.packed.write().unwrap_or_else(PoisonError::into_inner);
        all.insert(start, Arc::clone(&packed));
        self.changes.fetch_add(1, Ordering::Relaxed);
        packed
    }

    /// Returns the packed tensor that contains the bytes `touched`, which are about to be written.
    /// A weight that is seen for the first time becomes a packed tensor; one that cannot hold the
    /// new content is no longer packed.
    fn place(&self, tensor: &Tensor, touched: &Range<usize>) -> Option<(usize, Arc<Packed>)> {
        let start = tensor.packed_offset;
        if let Some((start, packed)) = self.around(start)
            && packed.takes(tensor, touched.end - start)
        {
            return Some((start, packed));
        }
        self.make_way(touched);
        // When all tensors share one buffer type, an F32 tensor is usually an activation: it counts
        // as a weight only if ggml marked it so.
        let is_weight = tensor.dtype != DType::F32 || tensor.role == Role::Weights;
        let wanted =
            tensor.place == Place::Packed && is_weight && tensor.shape.is_contiguous(tensor.dtype);
        let layout = wanted.then(|| WeightLayout::new(tensor)).flatten()?;
        let bytes = tensor.shape.span_bytes(tensor.dtype)?;
        // The DSP reads packed weights in whole cache lines.
        let is_aligned = start.is_multiple_of(ALIGN_BYTES);
        let end = start + layout.bytes();
        // F32 weights shrink when packed. If only a part is written, packing reads the rest from
        // memory, so the unpacked tensor has to fit into the buffer as well.
        let is_inside = end.max(start.saturating_add(bytes)) <= self.memory.bytes();
        if !is_aligned || !is_inside || !self.has_room(&(start + bytes..end)) {
            return None;
        }
        let is_part = touched.len() < bytes;
        let mut unpacked = (self.unpacked.lock()).unwrap_or_else(PoisonError::into_inner);
        if is_part && unpacked.contains(&start) {
            return None;
        }
        unpacked.remove(&start);
        drop(unpacked);
        let lossless = layout.form == Conversion::Lossless;
        let mut ggml_bytes = vec![0; if is_part || !lossless { bytes } else { 0 }];
        if is_part {
            // Unpack first, so that rows that this write does not touch keep their values.
            self.unpack(&(start..end));
            copy_out(&self.memory, start, &mut ggml_bytes);
            pack_all(&self.memory, &layout, start, &ggml_bytes, tensor.dequantize);
        }
        let packed = Packed {
            layout,
            dtype: tensor.dtype,
            format: tensor.format,
            bytes,
            row_bytes: pack::row_bytes(&layout, tensor.dtype),
            ggml_bytes: (!lossless).then(|| Mutex::new(ggml_bytes)),
        };
        Some((start, self.replace(start, packed)))
    }

    /// Copies the bytes of a tensor, starting at `offset`.
    ///
    /// # Panics
    /// If the range is not inside the buffer.
    pub(super) fn get(&self, tensor: &Tensor, offset: usize, out: &mut [u8]) {
        let first = tensor.packed_offset + offset;
        let end = first + out.len();
        let mut at = first;
        // Locked until the loop ends. Otherwise another thread could unpack a tensor in between,
        // and its bytes would be read as packed.
        let all = self.packed.read().unwrap_or_else(PoisonError::into_inner);
        while at < end {
            let held = around(&all, at);
            let to = match held {
                Some((start, packed)) => start + packed.bytes,
                None => (all.range(at + 1..).next()).map_or(end, |(start, _)| *start),
            };
            let to = to.min(end);
            let part = &mut out[at - first..to - first];
            match held {
                Some((start, packed)) => packed.read(&self.memory, start, at - start, part),
                None => copy_out(&self.memory, at, part),
            }
            at = to;
        }
    }

    /// Returns `true` if a packed tensor overlaps a range.
    pub(super) fn holds_packed(&self, range: &Range<usize>) -> bool {
        let packed = self.packed.read().unwrap_or_else(PoisonError::into_inner);
        let below = packed.range(..range.end).next_back();
        below.is_some_and(|(start, found)| found.overlaps(*start, range))
    }

    /// Removes the packed tensors that a write of a range replaces. Packed tensors of which it
    /// changes a part are put back into ggml's layout.
    fn make_way(&self, range: &Range<usize>) {
        if !self.holds_packed(range) {
            return;
        }
        let mut packed = self.packed.write().unwrap_or_else(PoisonError::into_inner);
        packed.retain(|start, held| *start < range.start || range.end < start + held.bytes);
        drop(packed);
        self.changes.fetch_add(1, Ordering::Relaxed);
        self.unpack(range);
    }

    /// Puts the packed tensors of a range back into ggml's layout, for operations other than
    /// multiplications.
    pub(super) fn unpack(&self, range: &Range<usize>) {
        let mut packed = self.packed.write().unwrap_or_else(PoisonError::into_inner);
        packed.retain(|start, held| {
            if !held.overlaps(*start, range) {
                return true;
            }
            let mut ggml_bytes = vec![0; held.bytes];
            held.read(&self.memory, *start, 0, &mut ggml_bytes);
            put(&self.memory, *start, &ggml_bytes);
            (self.unpacked.lock())
                .unwrap_or_else(PoisonError::into_inner)
                .insert(*start);
            self.changes.fetch_add(1, Ordering::Relaxed);
            false
        });
    }
}

impl Buffer for HexBuffer {
    fn base(&self) -> usize {
        self.memory.base()
    }

    fn is_host_memory(&self) -> bool {
        self.shared
    }

    fn holds(&self, offset: usize, bytes: usize) -> bool {
        let end = offset.checked_add(bytes);
        bytes == 0 || end.is_some_and(|end| end <= self.memory.bytes())
    }

    /// Returns bytes of a cache as the DSP left them. ggml copies from memory that the device
    /// shares with the CPU by writing the bytes that it finds there, without asking for them.
    /// Caches are not shown to the CPU when they change, so the CPU would find old bytes.
    fn shared_bytes(&self, address: usize, bytes: usize) -> Option<Vec<u8>> {
        let all = (self.all_shared.lock()).unwrap_or_else(PoisonError::into_inner);
        all.iter().filter_map(Weak::upgrade).find_map(|memory| {
            let start = address.checked_sub(memory.base())?;
            let end = start.checked_add(bytes)?;
            (end <= memory.bytes()).then(|| {
                let mut out = vec![0; bytes];
                copy_out(&memory, start, &mut out);
                out
            })
        })
    }

    fn write(&self, tensor: &Tensor, offset: usize, size: usize, content: Content) -> Result<()> {
        self.set(tensor, offset, size, content);
        Ok(())
    }

    fn read(&self, tensor: &Tensor, offset: usize, out: &mut [u8]) -> Result<()> {
        self.get(tensor, offset, out);
        Ok(())
    }

    fn clear(&self, value: u8) {
        (self.packed.write().unwrap_or_else(PoisonError::into_inner)).clear();
        (self.unpacked.lock().unwrap_or_else(PoisonError::into_inner)).clear();
        self.changes.fetch_add(1, Ordering::Relaxed);
        self.note_written(0..self.memory.bytes());
        copy_in(&self.memory, 0, self.memory.bytes(), |_, out| {
            out.fill(value)
        });
    }

    fn forget_graphs(&self) {
        self.changes.fetch_add(1, Ordering::Relaxed);
    }

    fn mark_cpu_reader(&self) {
        if self.shared && !self.used_by_cpu.swap(true, Ordering::Relaxed) {
            self.changes.fetch_add(1, Ordering::Relaxed);
            // Later results are invalidated as they are computed. This call covers everything that
            // the DSP wrote before.
            self.memory.invalidate(0..self.memory.bytes());
        }
    }

    fn show_to_cpu(&self, tensor: &Tensor) {
        if !self.shared {
            // The lock ensures that no stream is computing with the packed form.
            let _alone = self.layouts.write().unwrap_or_else(PoisonError::into_inner);
            self.unpack(&tensor.span());
            return self.memory.invalidate(tensor.span());
        }
        // A weight that the DSP writes has the role of a result, and is invalidated as one. Other
        // weights must not be: the CPU may still hold cache lines that it wrote when it loaded
        // them.
        if tensor.role != Role::Weights {
            self.memory.invalidate(tensor.span());
        }
    }

    fn take_from_cpu(&self, tensor: &Tensor) {
        if let Some(beside) = &self.beside {
            beside.computed(&tensor.span());
        }
        self.memory.clean(tensor.span());
    }
}

#[cfg(test)]
mod tests;
