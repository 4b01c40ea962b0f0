//! Packed copies of weights in memory that the CPU uses, too.
//!
//! Programs that know nothing of packing put weights there, and may read and write them in place at
//! any time. The packed form of such a weight is in other memory, and is used as long as the weight
//! still has the bytes that were packed:
//!
//! - writes that the buffer or a graph makes end the form;
//! - writes in place are found by a hash of all bytes, before each graph that uses the form. The
//!   graph would clean the same bytes from the CPU's caches if it read them.

use std::collections::BTreeMap;
use std::ops::{Bound, Range};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::super::device::HexNpu;
use super::super::layout::WeightLayout;
use super::super::{HexDevice, pack};
use super::{ALIGN_BYTES, COPY_BYTES, Memory, copy_out, pack_all};
use crate::beside::{hash_piece, leaves_enough};
use crate::graph::{Role, Tensor};
use crate::tensor::{DType, Format};

/// Bytes of one allocation, which holds several forms, because there are few buffer numbers.
const AREA_BYTES: usize = 64 << 20;
/// Number of graphs in which a weight is multiplied unpacked. It counts after a graph has written
/// the weight, because a weight in training is written by each graph. It also counts for a tensor
/// that may be a weight, because one that holds activations is written before each graph.
const REST: u32 = 2;

/// Most tensors of a buffer that are tracked as possible weights.
const MOST_FORMS: usize = 4096;

/// The packed copies of the tensors of one buffer.
#[derive(Debug)]
pub(in crate::hexagon) struct Beside {
    unpacked: Arc<Memory>,
    /// Bytes of the device's memory for all of its forms.
    sum: Arc<AtomicUsize>,
    contents: Mutex<Contents>,
}

#[derive(Debug, Default)]
struct Contents {
    forms: BTreeMap<Key, Form>,
    areas: Vec<Area>,
    /// The stamp of the latest form.
    stamp: u64,
}

/// The matrices of a form. Tensors with the same bytes may have others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    /// Offset of the weight in its buffer.
    start: usize,
    /// K, N, and the number of matrices.
    matrices: [usize; 3],
    /// Number of the packed layout.
    layout: u32,
}

/// A weight that was multiplied with.
#[derive(Debug)]
struct Form {
    /// End of the weight in its buffer.
    end: usize,
    dtype: DType,
    format: Option<Format>,
    /// The weight's buffer is marked as one of weights. ggml's RPC server marks none.
    is_weight: bool,
    /// Memory for the packed form, once there is one.
    place: Option<Place>,
    state: State,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// There is no packed copy.
    Unpacked,
    /// The form of bytes with this hash.
    Packed { hash: u64, stamp: u64 },
    /// Number of further graphs that multiply it unpacked.
    Resting(u32),
    /// The values of the weight cannot be packed, or the tensor is not a weight.
    Refused,
}

/// Memory for forms.
#[derive(Debug)]
struct Area {
    memory: Arc<Memory>,
    used_bytes: usize,
    sum: Arc<AtomicUsize>,
}

impl Drop for Area {
    fn drop(&mut self) {
        self.sum.fetch_sub(self.memory.bytes(), Ordering::Relaxed);
    }
}

/// The place of a form.
#[derive(Clone, Debug)]
pub(in crate::hexagon) struct Place {
    pub(in crate::hexagon) memory: Arc<Memory>,
    pub(in crate::hexagon) offset: usize,
}

/// A form as a graph uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::hexagon) struct Used {
    key: Key,
    stamp: u64,
}

/// The answer to a graph that is about to multiply with a weight.
#[derive(Debug)]
pub(in crate::hexagon) enum Found {
    /// The weight has a packed copy.
    Packed(Place, Used),
    /// This graph multiplies it unpacked; a later one may pack it.
    Later,
    /// The weight is multiplied without a packed copy.
    Unpacked,
}

impl Beside {
    /// Makes an empty set for the tensors in `unpacked`.
    pub(super) fn new(device: &HexDevice, unpacked: &Arc<Memory>) -> Self {
        Self {
            unpacked: Arc::clone(unpacked),
            sum: Arc::clone(&device.beside_bytes),
            contents: Mutex::default(),
        }
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        // After a panic, a form may lack its state at worst, and is then packed again.
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Finds the packed form of a weight, or packs it.
    ///
    /// - `used`: forms that the graph uses already, whose bytes were compared
    pub(in crate::hexagon) fn find(
        &self,
        device: &HexDevice,
        weights: &Tensor,
        layout: &WeightLayout,
        used: &[Used],
    ) -> Found {
        let span = weights.span();
        if span.is_empty() || span.end > self.unpacked.bytes() {
            return Found::Unpacked;
        }
        let key = Key {
            start: span.start,
            matrices: [layout.matrix.panel().k(), layout.matrix.n(), layout.count()],
            layout: layout.weight().layout_id().0,
        };
        let is_weight = weights.role == Role::Weights;
        let mut contents = self.contents();
        let Contents {
            forms,
            areas,
            stamp,
        } = &mut *contents;
        if !is_weight && forms.len() >= MOST_FORMS && !forms.contains_key(&key) {
            return Found::Unpacked;
        }
        let form = forms.entry(key).or_insert_with(|| Form {
            end: span.end,
            dtype: weights.dtype,
            format: weights.format,
            is_weight,
            place: None,
            state: if is_weight {
                State::Unpacked
            } else {
                State::Resting(REST)
            },
        });
        if (form.dtype, form.format) != (weights.dtype, weights.format) {
            return Found::Unpacked;
        }
        match form.state {
            State::Unpacked => {}
            State::Packed { hash, stamp } => {
                let known = Used { key, stamp };
                if let Some(place) = &form.place
                    && (used.contains(&known) || hash == self.hash(&span, is_weight))
                {
                    return Found::Packed(place.clone(), known);
                }
                if !is_weight {
                    form.state = State::Resting(REST);
                    return Found::Later;
                }
            }
            State::Resting(graphs) => {
                form.state = match graphs {
                    0 | 1 => State::Unpacked,
                    more => State::Resting(more - 1),
                };
                return Found::Later;
            }
            State::Refused => return Found::Unpacked,
        }
        form.state = State::Unpacked;
        let place = match &form.place {
            Some(place) => place.clone(),
            None => match self.room(areas, device, layout.bytes()) {
                Some(place) => place,
                None => return Found::Unpacked,
            },
        };
        form.place = Some(place.clone());
        self.clean(&span, is_weight);
        let mut rows = vec![0; span.len()];
        copy_out(&self.unpacked, span.start, &mut rows);
        if let Some(value) = pack::beyond_f16(layout, weights.dtype, &rows) {
            log::warn!(
                "{} has the value {value}, beyond F16's range: it is multiplied in FP32, which is slower",
                weights.name
            );
            form.state = State::Refused;
            return Found::Unpacked;
        }
        pack_all(
            &place.memory,
            layout,
            place.offset,
            &rows,
            weights.dequantize,
        );
        *stamp += 1;
        let used = Used { key, stamp: *stamp };
        form.state = State::Packed {
            hash: hash_piece(0, &rows),
            stamp: *stamp,
        };
        log::debug!("{}: {} is packed beside it", device.name, weights.name);
        Found::Packed(place, used)
    }

    /// Returns memory for a form of `bytes`, unless too little is free.
    fn room(&self, areas: &mut Vec<Area>, device: &HexDevice, bytes: usize) -> Option<Place> {
        let bytes = bytes.next_multiple_of(ALIGN_BYTES);
        let has_room = |area: &&mut Area| area.used_bytes + bytes <= area.memory.bytes();
        if let Some(area) = areas.iter_mut().find(has_room) {
            let offset = area.used_bytes;
            area.used_bytes += bytes;
            let memory = Arc::clone(&area.memory);
            return Some(Place { memory, offset });
        }
        let taken: usize = areas.iter().map(|area| area.memory.bytes()).sum();
        let ggml_size = self.unpacked.bytes();
        // Packed forms are about as large as their weights, so an area of this size wastes little.
        let left = ggml_size.saturating_sub(taken).max(ggml_size / 32);
        let machine = (device.machine)();
        let sizes = [bytes.max(left.min(AREA_BYTES)), bytes];
        let size = sizes
            .into_iter()
            .find(|size| leaves_enough(*size, machine))?;
        let memory = Arc::new(allocate(&device.npu, size)?);
        self.sum.fetch_add(memory.bytes(), Ordering::Relaxed);
        areas.push(Area {
            memory: Arc::clone(&memory),
            used_bytes: bytes,
            sum: Arc::clone(&self.sum),
        });
        Some(Place { memory, offset: 0 })
    }

    /// Returns `true` if a form that a graph has used is still that of its weight's bytes.
    pub(in crate::hexagon) fn is_current(&self, used: &Used) -> bool {
        let contents = self.contents();
        contents.forms.get(&used.key).is_some_and(|form| {
            matches!(form.state, State::Packed { hash, stamp }
                if stamp == used.stamp
                    && hash == self.hash(&(used.key.start..form.end), form.is_weight))
        })
    }

    /// Ends the forms of weights that the program writes.
    pub(super) fn written(&self, range: &Range<usize>) {
        self.touch(range, |is_weight| match is_weight {
            true => State::Unpacked,
            false => State::Resting(REST),
        });
    }

    /// Ends the forms of weights that a graph writes. A tensor without the role of a weight, such
    /// as a cache, no longer counts as one.
    pub(super) fn computed(&self, range: &Range<usize>) {
        self.touch(range, |is_weight| match is_weight {
            true => State::Resting(REST),
            false => State::Refused,
        });
    }

    fn touch(&self, range: &Range<usize>, state: impl Fn(bool) -> State) {
        let mut contents = self.contents();
        let end = Key {
            start: range.end,
            matrices: [0; 3],
            layout: 0,
        };
        let below = (Bound::Unbounded, Bound::Excluded(end));
        for (_, form) in contents.forms.range_mut(below) {
            if range.start < form.end {
                form.state = state(form.is_weight);
            }
        }
    }

    /// Gives the memory of all forms back. No stream may be about to use one.
    pub(in crate::hexagon) fn release(&self) {
        let mut contents = self.contents();
        // The stamp counter is not reset, so a graph never mistakes a later form for the one that
        // it used.
        contents.forms.clear();
        contents.areas.clear();
    }

    /// Makes the CPU's possible writes in place to a weight visible; the CPU writes nothing else in
    /// this way.
    fn clean(&self, span: &Range<usize>, is_weight: bool) {
        if is_weight {
            self.unpacked.clean(span.clone());
        }
    }

    /// Returns a hash of the bytes of a weight.
    fn hash(&self, span: &Range<usize>, is_weight: bool) -> u64 {
        self.clean(span, is_weight);
        (span.clone().step_by(COPY_BYTES)).fold(0, |sum, start| {
            let piece = start..span.end.min(start + COPY_BYTES);
            let first = start - span.start;
            sum ^ self.unpacked.read(piece, |bytes| hash_piece(first, bytes))
        })
    }
}

fn allocate(npu: &HexNpu, bytes: usize) -> Option<Memory> {
    let allocated = npu.allocate(bytes);
    allocated
        .inspect_err(|error| log::debug!("no memory for packed forms: {error}"))
        .ok()
}
