//! Packed copies of weights in host memory, which programs read and write in place.
//!
//! A form is in memory of the device, and is used as long as the weight still has the bytes that
//! were packed: their hash is compared in each graph. The glue notifies the device when host memory
//! of its buffer type is freed.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::super::RkDevice;
use super::super::device::{NAME, PackedWeights, RkNpu, WeightMemory, WeightSlice};
use super::super::layout::WeightLayout;
use super::super::pack::RowSource;
use crate::beside::{hash_piece, leaves_enough};
use crate::error::Result;
use crate::graph::{Role, Tensor};
use crate::host_memory::system_memory;
use crate::tensor::{DType, Format};

/// The packed forms of a device.
#[derive(Debug, Default)]
pub(in crate::rockchip) struct Beside {
    forms: Mutex<BTreeMap<Key, Arc<Form>>>,
    /// Total size of the forms in bytes.
    bytes: AtomicUsize,
    /// `true` if there was no room for a form: the CPU multiplies until memory is freed.
    is_full: AtomicBool,
}

/// The matrices of a form. Tensors with the same bytes may have others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    /// Address of the weight, and its bytes.
    start: usize,
    bytes: usize,
    ne: [usize; 4],
}

/// A packed form.
#[derive(Debug)]
pub(in crate::rockchip) struct Form {
    memory: WeightMemory,
    weights: PackedWeights,
    dtype: DType,
    format: Option<Format>,
    /// Hash of the bytes that were packed.
    hash: u64,
    /// The latest graph in which the weight had this hash.
    graph: AtomicU64,
}

impl Form {
    /// Returns one matrix of the packed copy.
    pub(in crate::rockchip) fn slice(&self, slice: usize) -> WeightSlice<'_> {
        WeightSlice {
            memory: &self.memory,
            weights: &self.weights,
            slice,
        }
    }

    /// Returns `true` if this is the packed copy of a weight in a graph, with these bytes.
    fn is_of(&self, weights: &Tensor, bytes: &[u8], layout: &WeightLayout, graph: u64) -> bool {
        let same_type = (self.dtype, self.format) == (weights.dtype, weights.format);
        same_type
            && self.weights.layout() == layout
            && (self.graph.load(Ordering::Relaxed) == graph || self.hash == hash_piece(0, bytes))
    }
}

impl Beside {
    fn forms(&self) -> MutexGuard<'_, BTreeMap<Key, Arc<Form>>> {
        // Forms are inserted and removed as a whole, so a panic cannot leave half a form.
        self.forms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the total size of the forms in bytes.
    pub(in crate::rockchip) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Returns `true` if there was no room for a form, and no memory was freed since.
    pub(in crate::rockchip) fn is_full(&self) -> bool {
        self.is_full.load(Ordering::Relaxed)
    }

    /// Frees the copies of weights in host memory that is about to be freed.
    pub(in crate::rockchip) fn invalidate(&self, npu: &RkNpu, memory: &Range<usize>) {
        self.is_full.store(false, Ordering::Relaxed);
        self.give_back(npu, |key| {
            memory.start < key.start + key.bytes && key.start < memory.end
        });
    }

    fn give_back(&self, npu: &RkNpu, is_over: impl Fn(&Key) -> bool) {
        let mut gone = 0;
        let turn = npu.turn_to_free();
        self.forms().retain(|key, form| {
            let is_over = is_over(key);
            if is_over {
                gone += form.weights.layout().bytes();
            }
            !is_over
        });
        drop(turn);
        if gone > 0 {
            self.bytes.fetch_sub(gone, Ordering::Relaxed);
            npu.release_idle();
        }
    }
}

impl RkDevice {
    /// Returns the packed form of a weight, packed now if none has these bytes; `None` after a log
    /// line without room for it.
    ///
    /// - `graph`: as for [`RkDevice::compute`]
    pub(in crate::rockchip) fn form_beside(
        &self,
        layout: &WeightLayout,
        weights: &Tensor,
        graph: u64,
    ) -> Option<Arc<Form>> {
        let bytes = weights.shape.span_bytes(weights.dtype)?;
        let bytes = weights.memory?.bytes(0, bytes);
        let key = Key {
            start: bytes.as_ptr().addr(),
            bytes: bytes.len(),
            ne: weights.shape.ne,
        };
        let known = self.beside.forms().get(&key).map(Arc::clone);
        if let Some(form) = known {
            if form.is_of(weights, bytes, layout, graph) {
                form.graph.store(graph, Ordering::Relaxed);
                return Some(form);
            }
            drop(form);
            self.beside.give_back(&self.npu, |other| *other == key);
        } else if weights.role != Role::Weights {
            // When more rows of a cache are read, it is a new tensor, so the forms of the old one
            // are dropped.
            self.beside
                .give_back(&self.npu, |other| other.start == key.start);
        }
        let form = match self.pack_beside(layout, weights, bytes, graph) {
            Ok(Some(form)) => Arc::new(form),
            shortage => {
                let reason = shortage.err().map_or_else(
                    || "too little memory of the machine is free".to_owned(),
                    |error| error.to_string(),
                );
                log::warn!(
                    "{NAME}: {} and other weights that the program loaded into plain memory are multiplied by the CPU: {reason}",
                    weights.name
                );
                self.beside.is_full.store(true, Ordering::Relaxed);
                self.beside.give_back(&self.npu, |_| true);
                return None;
            }
        };
        self.beside
            .bytes
            .fetch_add(layout.bytes(), Ordering::Relaxed);
        let other = self.beside.forms().insert(key, Arc::clone(&form));
        if let Some(other) = other {
            // Another thread packed the same tensor at the same time, so its form is replaced.
            let bytes = other.weights.layout().bytes();
            self.beside.bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
        Some(form)
    }

    /// Makes a packed copy of a weight; `None` if too little of the machine's memory is free.
    fn pack_beside(
        &self,
        layout: &WeightLayout,
        weights: &Tensor,
        bytes: &[u8],
        graph: u64,
    ) -> Result<Option<Form>> {
        if !leaves_enough(layout.bytes(), system_memory()) {
            return Ok(None);
        }
        let memory = self.npu.allocate(layout.bytes())?;
        let mut packed = self.npu.place(&memory, *layout, 0)?;
        let source = RowSource {
            dtype: weights.dtype,
            rows: bytes,
            dequantize: weights.dequantize,
            calibration: self.target.calibration,
            feedback: &[],
        };
        let [_, n, s2, s3] = weights.shape.ne;
        memory.pack(&mut packed, 0, source, 0..n * s2 * s3);
        log::debug!("{NAME}: {} is packed beside it", weights.name);
        Ok(Some(Form {
            memory,
            weights: packed,
            dtype: weights.dtype,
            format: weights.format,
            hash: hash_piece(0, bytes),
            graph: AtomicU64::new(graph),
        }))
    }
}
