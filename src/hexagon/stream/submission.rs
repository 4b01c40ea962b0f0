//! A graph in the device's form: commands, and the cache operations for the two processors.
//!
//! The CPU may have written weights, and caches that it uses itself
//! ([`HexBuffer::is_used_by_cpu`]): these are cleaned before the commands, and so are results,
//! because ggml may have let the CPU compute a node in the same memory. All other writes of the CPU
//! go through [`HexBuffer::write`], which cleans at once. Results are invalidated after the
//! commands; of caches that the CPU does not use, as far as is known, only the rows that were
//! [stored by number](rows), and the results of operations that rotate or copy keys when a context
//! is shifted. If the CPU has computed a state, the CPU uses its buffer.

use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Instant;

use hexagon_ops::wire::{Command, MAX_BUFFERS};

use super::super::buffer::{Beside, Found, PlaceBeside, Ranges, Used};
use super::super::layout::WeightLayout;
use super::super::{HexBuffer, HexDevice};
use super::record::{CommandFile, Nodes};
use super::rows::{self, Layout};
use super::trace::Trace;
use crate::backend::Buffer;
use crate::error::{Error, Result};
use crate::graph::{Op, Operation, Role, Tensor};
use crate::hexagon::device::{Batch, DeviceBuffer, Failed, HexNpu};
use crate::hexagon::plan::cost::Cost;
use crate::tensor::DType;

/// A buffer that the commands name.
#[derive(Debug)]
struct NamedBuffer {
    number: u32,
    /// Weak, so that a graph that may never come again keeps no memory.
    buffer: Weak<DeviceBuffer>,
    /// To be cleaned before.
    inputs: Ranges,
    /// To be invalidated afterwards.
    results: Ranges,
}

impl NamedBuffer {
    fn get(&self) -> std::result::Result<Arc<DeviceBuffer>, Failed> {
        self.buffer.upgrade().ok_or_else(|| Failed {
            entry: None,
            error: Error::Graph {
                reason: "a buffer was freed while its graph was computed".into(),
            },
        })
    }
}

/// Rows of caches that are stored by one tensor of numbers.
#[derive(Debug)]
struct StoredRows {
    /// Index of the numbers' buffer in [`Submission::named`].
    named: usize,
    numbers: Layout,
    /// The caches, and the indices of their buffers.
    caches: Vec<(usize, Layout)>,
}

/// A packed copy of a weight, which may be forgotten.
#[derive(Debug)]
struct UsedForm {
    beside: Weak<Beside>,
    used: Used,
}

/// Bytes of rows, and their buffer.
type BufferRows = (Arc<DeviceBuffer>, Vec<Range<usize>>);

/// Description of a command, for traces.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    /// Number of its node, the last one of several.
    pub(super) node: usize,
    /// The nodes' operations, in order.
    pub(super) ops: [Option<Op>; MAX_FUSED],
    /// Dimensions of the result.
    pub(super) ne: [usize; 4],
    /// The modelled cost of the command.
    pub(super) cost: Cost,
}

impl Step {
    /// Combines this step and the next into one command, with the cost of both.
    fn then(mut self, next: Self) -> Self {
        let free = self.ops.iter_mut().filter(|op| op.is_none());
        for (op, more) in free.zip(next.ops.into_iter().flatten()) {
            *op = Some(more);
        }
        let mut cost = self.cost;
        cost += next.cost;
        Self {
            ops: self.ops,
            cost,
            ..next
        }
    }
}

/// Number of bytes for which a buffer's number counts in [`Submission::held_bytes`].
const NUMBER_BYTES: usize = 128 << 10;

/// Most nodes of a command.
pub(super) const MAX_FUSED: usize = 3;

/// A graph in the form that the device executes.
#[derive(Debug, Default)]
pub(super) struct Submission {
    batch: Batch,
    /// Description of each command.
    steps: Vec<Step>,
    /// The nodes, if graphs are recorded.
    pub(super) nodes: Nodes,
    named: Vec<NamedBuffer>,
    stored: Vec<StoredRows>,
    /// Packed copies of weights that the commands read.
    forms: Vec<UsedForm>,
    /// Scratch buffers for operands that are converted or packed, and the number of those in use.
    scratch: Vec<DeviceBuffer>,
    taken: usize,
    /// The number of the scratch buffer that all products with exchanged factors use, one after
    /// another.
    turning: Option<u32>,
    /// Memory for the commands, if they come again.
    list: Option<DeviceBuffer>,
    /// The commands have no such memory, because numbers for buffers are few.
    in_ring: bool,
    /// The graph is to be planned again: the commands are not all, because the host has packed
    /// weights for this one time, or weights will be packed later.
    pub(super) once: bool,
    /// [`super::super::HexDevice::changes`] when it was made.
    changes: u64,
}

impl Submission {
    /// Forgets all commands; memory is kept for the next ones.
    pub(super) fn clear(&mut self, changes: u64) {
        self.batch.clear();
        self.steps.clear();
        self.nodes = Nodes::default();
        self.named.clear();
        self.stored.clear();
        self.forms.clear();
        self.taken = 0;
        self.turning = None;
        self.once = false;
        self.in_ring = false;
        self.changes = changes;
    }

    /// Drops memory that an earlier graph needed.
    pub(super) fn drop_unused(&mut self) {
        self.scratch.truncate(self.taken);
        self.scratch.shrink_to_fit();
        self.batch.shrink();
        self.steps.shrink_to_fit();
        self.named.shrink_to_fit();
        self.stored.shrink_to_fit();
        self.forms.shrink_to_fit();
        for rows in &mut self.stored {
            rows.caches.shrink_to_fit();
        }
    }

    /// Returns the bytes that it keeps while it is cached. A buffer of the device counts as more
    /// than it has, because there are few numbers for buffers ([`MAX_BUFFERS`]).
    pub(super) fn held_bytes(&self) -> usize {
        let buffers = self.scratch.iter().chain(&self.list);
        let of_device: usize = buffers.map(|buffer| buffer.bytes() + NUMBER_BYTES).sum();
        self.heap_bytes() + of_device
    }

    /// Returns the bytes of the process's memory that it holds, and its own.
    pub(super) fn heap_bytes(&self) -> usize {
        let ranges = |named: &NamedBuffer| named.inputs.heap_bytes() + named.results.heap_bytes();
        let caches = |stored: &StoredRows| stored.caches.capacity() * size_of::<(usize, Layout)>();
        size_of::<Self>()
            + self.batch.heap_bytes()
            + self.steps.capacity() * size_of::<Step>()
            + self.named.capacity() * size_of::<NamedBuffer>()
            + self.named.iter().map(ranges).sum::<usize>()
            + self.stored.capacity() * size_of::<StoredRows>()
            + self.stored.iter().map(caches).sum::<usize>()
            + self.forms.capacity() * size_of::<UsedForm>()
            + self.scratch.capacity() * size_of::<DeviceBuffer>()
    }

    /// Adds a command.
    pub(super) fn push(&mut self, step: Step, command: Command, buffers: &[u32]) {
        self.batch.push(command, buffers);
        self.steps.push(step);
    }

    /// Removes the last command, which will be combined with the next; returns the step of both.
    pub(super) fn pop_into(&mut self, next: Step) -> Step {
        self.batch.pop();
        (self.steps.pop()).map_or(next, |first| first.then(next))
    }

    /// Returns the modelled cost of all commands.
    fn cost(&self) -> Cost {
        let mut cost = Cost::default();
        (self.steps.iter()).for_each(|step| cost += step.cost);
        cost
    }

    /// Names an operand of the next command. Returns its buffer's number.
    pub(super) fn input(&mut self, tensor: &Tensor, buffer: &HexBuffer) -> u32 {
        let by_cpu = buffer.shared
            && match tensor.role {
                Role::Weights => true,
                Role::State => buffer.is_used_by_cpu(),
                Role::Result => false,
            };
        let named = self.name(&buffer.memory);
        if by_cpu {
            named.inputs.insert(tensor.span());
        }
        named.number
    }

    /// Finds or makes the packed copy of a weight, for the next command.
    pub(super) fn beside(
        &mut self,
        device: &HexDevice,
        beside: &Arc<Beside>,
        weights: &Tensor,
        layout: &WeightLayout,
    ) -> Option<PlaceBeside> {
        let of_buffer = Arc::downgrade(beside);
        let same = self.forms.iter().filter(|it| it.beside.ptr_eq(&of_buffer));
        let known: Vec<Used> = same.map(|it| it.used).collect();
        match beside.find(device, weights, layout, &known) {
            Found::Packed(place, used) => {
                if !known.contains(&used) {
                    self.forms.push(UsedForm {
                        beside: of_buffer,
                        used,
                    });
                }
                Some(place)
            }
            Found::Later => {
                self.once = true;
                None
            }
            Found::Unpacked => None,
        }
    }

    /// Names a packed copy of a weight as an operand of the next command. Returns its buffer's
    /// number.
    pub(super) fn packed_beside(&mut self, place: &PlaceBeside) -> u32 {
        self.name(&place.memory).number
    }

    /// Returns `true` if the weights have the bytes that their packed forms were made of.
    pub(super) fn has_current_forms(&self) -> bool {
        self.forms
            .iter()
            .all(|form| (form.beside.upgrade()).is_some_and(|beside| beside.is_current(&form.used)))
    }

    /// Names the result of the next command. Returns its buffer's number.
    pub(super) fn result(&mut self, tensor: &Tensor, buffer: &HexBuffer) -> u32 {
        let seen_by_cpu = buffer.shared && (tensor.role != Role::State || buffer.is_used_by_cpu());
        let named = self.name(&buffer.memory);
        if seen_by_cpu {
            // The CPU may still hold modified cache lines of a cache tensor, or of memory that ggml
            // reuses for the CPU's next node. They must be written back before, not over the result
            // later.
            named.inputs.insert(tensor.span());
            named.results.insert(tensor.span());
        }
        named.number
    }

    /// Records the next command's writes to a cache that the CPU does not use, as far as is known.
    ///
    /// - `buffer`, `numbers`: the buffers of its result and of its second source
    /// - `is_part`: its graph has no number, because a program looks at nodes and computes parts of
    ///   a graph
    pub(super) fn shows_cache(
        &mut self,
        operation: &Operation,
        buffer: &HexBuffer,
        numbers: Option<&HexBuffer>,
        is_part: bool,
    ) {
        let cache = &operation.dst;
        if !buffer.shared || cache.role != Role::State || buffer.is_used_by_cpu() {
            return;
        }
        let index = self.index(&buffer.memory);
        match (operation.op, &operation.src[1], numbers) {
            // Row numbers that the graph itself computes are not known before it runs.
            (Op::SetRows, Some(tensor), Some(numbers)) if tensor.role != Role::Result => {
                let layout = Layout::of(tensor);
                let named = self.index(&numbers.memory);
                self.stores_rows((index, Layout::of(cache)), (named, layout));
            }
            // Recurrent states are copied as F32. If the source is a result of this graph, the DSP
            // computed it and the CPU never reads it. If it is an input, the CPU computes SSM_SCAN,
            // because one of its weights is the CPU's. It then reads every state of this buffer in
            // place, also those that earlier commands copied.
            (Op::Cpy, ..) if cache.dtype == DType::F32 => {
                let from = operation.src[0].as_ref();
                if from.is_some_and(|from| from.role != Role::Result) {
                    buffer.mark_cpu_reader();
                    self.named[index].inputs.insert(cache.span());
                    self.named[index].results.insert(0..buffer.memory.bytes());
                } else if is_part {
                    // llama-eval-callback reads the result of each node in place.
                    self.named[index].results.insert(cache.span());
                }
            }
            // Everything is invalidated: shifting a context rotates all keys, and a new sequence
            // clears its whole state.
            _ => self.named[index].results.insert(cache.span()),
        }
    }

    /// Notes rows of a cache that are stored by numbers, both with the index of their buffer.
    fn stores_rows(&mut self, cache: (usize, Layout), (named, numbers): (usize, Layout)) {
        // All layers store rows of the same tokens, so the numbers are kept once.
        let known = (self.stored.iter_mut()).find(|it| (it.named, it.numbers) == (named, numbers));
        match known {
            Some(stored) => stored.caches.push(cache),
            None => self.stored.push(StoredRows {
                named,
                numbers,
                caches: vec![cache],
            }),
        }
    }

    fn name(&mut self, buffer: &Arc<DeviceBuffer>) -> &mut NamedBuffer {
        let index = self.index(buffer);
        &mut self.named[index]
    }

    /// Returns the index of a buffer among those that the commands name.
    fn index(&mut self, buffer: &Arc<DeviceBuffer>) -> usize {
        let number = buffer.number();
        let known = self.named.iter().position(|named| named.number == number);
        known.unwrap_or_else(|| {
            self.named.push(NamedBuffer {
                number,
                buffer: Arc::downgrade(buffer),
                inputs: Ranges::default(),
                results: Ranges::default(),
            });
            self.named.len() - 1
        })
    }

    /// Returns memory for one operand.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub(super) fn scratch(&mut self, npu: &HexNpu, bytes: usize) -> Result<&DeviceBuffer> {
        let index = self.taken;
        if index == self.scratch.len() {
            self.scratch.push(npu.allocate(bytes)?);
        } else if self.scratch[index].bytes() < bytes {
            self.scratch[index] = npu.allocate(bytes)?;
        }
        self.taken += 1;
        Ok(&self.scratch[index])
    }

    /// Returns the number of the scratch buffer that all products with exchanged factors use.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub(super) fn turning(&mut self, npu: &HexNpu, bytes: usize) -> Result<u32> {
        if let Some(number) = self.turning {
            return Ok(number);
        }
        let number = self.scratch(npu, bytes)?.number();
        self.turning = Some(number);
        Ok(number)
    }

    /// Makes the DSP read the commands from memory at later submissions, while there are enough
    /// numbers for buffers.
    ///
    /// # Errors
    /// `OutOfMemory`; nothing has changed then.
    pub(super) fn record(&mut self, npu: &HexNpu) -> Result<()> {
        if self.in_ring || self.batch.is_recorded() || self.batch.is_empty() {
            return Ok(());
        }
        let bytes = self.batch.list_bytes();
        let list = match self.list.take() {
            Some(list) if list.bytes() >= bytes => list,
            _ => npu.allocate(bytes)?,
        };
        // `allocate` returns the lowest free number. If even that is high, few are left. They are
        // kept for weights, caches and other streams, and the commands stay in the ring.
        if list.number() >= MAX_BUFFERS / 2 {
            self.in_ring = true;
            return Ok(());
        }
        self.batch.record(self.list.insert(list));
        Ok(())
    }

    /// Returns `true` if the submission still computes its graph: all buffers exist, and are
    /// unchanged.
    pub(super) fn is_valid(&self, changes: u64) -> bool {
        !self.once
            && self.changes == changes
            && (self.named.iter()).all(|named| named.buffer.strong_count() > 0)
    }

    /// Runs the commands on the DSP, and waits for them. With a trace, each command is a separate
    /// submission, so that its time is known.
    ///
    /// # Errors
    /// An error of the device, with the number of the node that it was about if there is one.
    pub(super) fn run(&self, device: &HexDevice) -> std::result::Result<(), Failed> {
        let npu = &device.npu;
        if log::log_enabled!(log::Level::Debug) {
            let cost = self.cost();
            log::debug!(
                "{}: {} commands, modelled: {:.0} packets for weights, {} bytes of weights, {} tile products, {:.0} us in all",
                device.name,
                self.batch.len(),
                cost.weight_packets,
                cost.weight_bytes,
                cost.tile_products,
                cost.microseconds(&npu.caps().rates, npu.info().threads)
            );
        }
        if self.batch.is_empty() {
            return Ok(());
        }
        if let Some(file) = device.trace.as_ref().and_then(Trace::commands) {
            return self.write_to(file);
        }
        self.each(|named, buffer| named.inputs.iter().for_each(|range| buffer.clean(range)))?;
        // Read the row numbers now: their memory may hold another node's result later in the graph.
        let stored = self.stored()?;
        let result = match &device.trace {
            None => npu.submit(&self.batch).map(drop),
            Some(trace) => self.run_traced(npu, trace),
        };
        self.each(|named, buffer| {
            (named.results.iter()).for_each(|range| buffer.invalidate(range))
        })?;
        for (buffer, rows) in stored {
            buffer.invalidate_all(rows.into_iter());
        }
        result.map_err(|failed| Failed {
            entry: (failed.entry.and_then(|entry| self.steps.get(entry))).map(|step| step.node),
            ..failed
        })
    }

    /// Records the graph instead of computing it.
    fn write_to(&self, file: &CommandFile) -> std::result::Result<(), Failed> {
        let named = self.named.iter().map(NamedBuffer::get);
        let named = named.collect::<std::result::Result<Vec<_>, _>>()?;
        let mut buffers: Vec<&DeviceBuffer> = named.iter().map(|buffer| &**buffer).collect();
        buffers.extend(&self.scratch[..self.taken]);
        file.graph(
            &self.nodes,
            self.steps.iter().zip(self.batch.commands()),
            &buffers,
        );
        Ok(())
    }

    fn run_traced(&self, npu: &HexNpu, trace: &Trace) -> std::result::Result<(), Failed> {
        let mut graph = trace.graph();
        for (entry, step) in self.steps.iter().enumerate() {
            let begun = Instant::now();
            let taken = npu
                .submit(&self.batch.only(entry))
                .map_err(|failed| Failed {
                    entry: failed.entry.map(|_| entry),
                    ..failed
                })?;
            if let Some(graph) = &mut graph {
                graph.step(step, begun, taken);
            }
        }
        Ok(())
    }

    /// Returns the bytes of all rows that are stored by number, with their buffers.
    fn stored(&self) -> std::result::Result<Vec<BufferRows>, Failed> {
        let mut stored = Vec::new();
        for StoredRows {
            named,
            numbers,
            caches,
        } in &self.stored
        {
            let bytes = self.named[*named]
                .get()?
                .read(numbers.span(), <[u8]>::to_vec);
            for (named, cache) in caches {
                let rows = rows::stored(cache, numbers, &bytes);
                stored.push((self.named[*named].get()?, rows));
            }
        }
        Ok(stored)
    }

    fn each(&self, touch: impl Fn(&NamedBuffer, &DeviceBuffer)) -> std::result::Result<(), Failed> {
        for named in &self.named {
            touch(named, &*named.get()?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
