//! Graphs: each node is computed at once. Finds its weights, and goes through planes, experts and
//! buckets of M.

use std::any::Any;
use std::borrow::Cow;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rknpu_ops::calibrate::Method;
use rknpu_ops::pack::Rows;

use super::buffer::Form;
use super::device::{NAME, PackedWeights, WeightMemory, WeightSlice};
use super::layout::WeightLayout;
use super::pack::RowSource;
use super::plan::{self, Bucketing, Command, MulMat, MulMatId};
use super::{RkBuffer, RkDevice};
use crate::backend::{GraphError, Node, Stream};
use crate::error::{Error, Result};
use crate::graph::{MAX_SOURCES, Op, Operation, Tensor};
use crate::host_memory::{Region, RegionMut};
use crate::timeline::{GraphEvents, OperationTimes, Part, Track};

mod attention;

/// A stream of graphs on the Rockchip NPU. Each node is computed at once.
#[derive(Debug)]
pub struct RkStream {
    device: Arc<RkDevice>,
}

impl RkStream {
    /// Makes a stream.
    #[must_use]
    pub fn new(device: Arc<RkDevice>) -> Self {
        Self { device }
    }
}

impl Drop for RkStream {
    /// In a program without weights on the NPU, attention keeps contexts that the freeing of
    /// weights would not end.
    fn drop(&mut self) {
        self.device.npu.release_idle();
    }
}

impl Stream for RkStream {
    fn device_name(&self) -> &str {
        NAME
    }

    fn submit(&self, _uid: u64, nodes: &mut [Node]) -> std::result::Result<(), GraphError> {
        let graph = self.device.submissions.fetch_add(1, Ordering::Relaxed);
        let mut events = self.device.tracks.as_ref().map(|tracks| tracks.graph());
        for (number, node) in nodes.iter_mut().enumerate() {
            let begun = Instant::now();
            let computed = self.device.compute(node, graph);
            let times = computed.map_err(|error| GraphError {
                node: Some(number),
                error,
            })?;
            if let Some(events) = &mut events {
                times.note(events, number, &node.operation, begun);
            }
        }
        Ok(())
    }

    fn replay(&self, _uid: u64) -> Option<std::result::Result<(), GraphError>> {
        None
    }
}

/// The packed weights of a node.
enum PackedOperand<'a> {
    /// Packed when they were written.
    Ready(&'a WeightMemory, &'a PackedWeights),
    /// In a packed copy.
    Beside(Arc<Form>),
    /// Packed on use, for this node only.
    AtUse(Box<AtUse<'a>>),
}

/// Weights that are packed at use, slice by slice.
struct AtUse<'a> {
    src0: Tensor<'a>,
    region: Region<'a>,
    calibration: Method,
    memory: WeightMemory,
    weights: PackedWeights,
    /// The slice that `weights` holds.
    slice: Option<usize>,
}

/// Expert, token and slot.
type Chosen = (usize, usize, usize);

/// Scratch rows between ggml and the device, kept from node to node so that they are not allocated
/// again.
#[derive(Debug, Default)]
pub(super) struct RowScratch {
    /// Activations that are not rows of F32 in memory.
    converted: Vec<f32>,
    chosen: Vec<Chosen>,
    /// Activations of one expert, and its results.
    gathered: Vec<f32>,
    result: Vec<f32>,
    /// Results with exchanged factors: their columns are the rows of the node.
    turned: Vec<f32>,
}

/// Time of a node's calls on the slowest core.
#[derive(Clone, Copy, Debug, Default)]
pub struct CallTimes {
    /// The measured time in the vendor's calls that run the cores.
    pub device: Duration,
    /// Modelled nanoseconds for calling, for reading weights, and for computing rows.
    parts_ns: [f32; 3],
    /// Modelled nanoseconds for all of these.
    modelled_ns: f32,
}

impl CallTimes {
    /// Adds `calls` alike.
    fn add(&mut self, device: Duration, parts_ns: [f32; 3], calls: usize) {
        let [call, weights, rows] = parts_ns;
        self.device += device;
        // CAST: small numbers.
        let times = calls as f32;
        self.modelled_ns += (call + weights.max(rows)) * times;
        for (sum, part) in self.parts_ns.iter_mut().zip(parts_ns) {
            *sum += part * times;
        }
    }

    /// Puts a node that has just been computed on the timeline.
    fn note(&self, events: &mut GraphEvents, node: usize, operation: &Operation, begun: Instant) {
        let host = begun.elapsed();
        let [call_us, weights_us, rows_us] = self.parts_ns.map(|ns| f64::from(ns) / 1e3);
        let stages = host.saturating_sub(self.device).as_secs_f64() * 1e6;
        let part = |track, us, measured| Part {
            track,
            us,
            measured,
        };
        events.operation(&OperationTimes {
            node,
            ops: &[Some(operation.op)],
            ne: operation.dst.shape.ne,
            begun,
            host,
            device: self.device,
            modelled_us: f64::from(self.modelled_ns) / 1e3,
            parts: &[
                part(Track::Queue, call_us, false),
                part(Track::Dma, weights_us, false),
                part(Track::Vectors, stages, true),
                part(Track::Matrix, rows_us, false),
            ],
        });
    }
}

impl PackedOperand<'_> {
    /// Makes a slice available.
    fn slice(&mut self, slice: usize) -> WeightSlice<'_> {
        match self {
            Self::Ready(memory, weights) => WeightSlice {
                memory,
                weights,
                slice,
            },
            Self::Beside(form) => form.slice(slice),
            Self::AtUse(at_use) => {
                at_use.pack(slice);
                WeightSlice {
                    memory: &at_use.memory,
                    weights: &at_use.weights,
                    slice: 0,
                }
            }
        }
    }
}

impl AtUse<'_> {
    fn pack(&mut self, slice: usize) {
        if self.slice == Some(slice) {
            return;
        }
        let n = self.src0.shape.ne[1];
        let source = RowSource {
            dtype: self.src0.dtype,
            rows: &rows_of_slice(&self.src0, self.region, slice),
            dequantize: self.src0.dequantize,
            calibration: self.calibration,
            feedback: &[],
        };
        self.memory.pack(&mut self.weights, 0, source, 0..n);
        self.slice = Some(slice);
    }
}

impl RkDevice {
    /// Computes one node. Returns the time of its calls.
    ///
    /// - `graph`: number of the graph, another one for each submission
    ///
    /// # Errors
    /// `Graph` if the device does not support the node, or if the node names an expert that does
    /// not exist, or has a result that is not aligned to 4 bytes; else the device's error.
    pub fn compute(&self, node: &mut Node, graph: u64) -> Result<CallTimes> {
        if node.operation.computes_nothing() {
            return Ok(CallTimes::default());
        }
        if !node.out.is_aligned() {
            return Err(refused("the result's address is not a multiple of 4"));
        }
        match plan::turned(&self.target, &node.operation) {
            Some(turned) => self.turned(node, turned, graph),
            None => self.product_or_attention(node, graph),
        }
    }

    /// Computes a product whose factors are in the other order, and writes the columns of the
    /// product as rows.
    fn turned(&self, node: &mut Node, turned: Operation, graph: u64) -> Result<CallTimes> {
        let [m, n, ..] = turned.dst.shape.ne;
        let mut result = std::mem::take(&mut self.lock_rows().turned);
        result.resize(m * n, 0.0);
        let mut product = Node {
            operation: turned,
            out: RegionMut::from(&mut result[..]),
            feeds_next: false,
            dst: None,
            src: [None; MAX_SOURCES],
        };
        let times = self.product_or_attention(&mut product, graph)?;
        let mut row = vec![0.0; n];
        for channel in 0..m {
            for (value, values) in row.iter_mut().zip(result.chunks_exact(m)) {
                *value = values[channel];
            }
            (node.out).write_row(channel * node.operation.dst.shape.nb[1], &row);
        }
        self.npu.written(&node.out.addresses());
        self.lock_rows().turned = result;
        Ok(times)
    }

    fn product_or_attention(&self, node: &mut Node, graph: u64) -> Result<CallTimes> {
        let buffer = node.src[0].and_then(|buffer| (buffer as &dyn Any).downcast_ref());
        let contents = buffer.map(RkBuffer::contents);
        let operation = &node.operation;
        if operation.op == Op::FlashAttnExt {
            return self.attention(node);
        }
        let src0 = operand(operation, 0)?;
        let found = contents.as_ref().and_then(|contents| contents.find(&src0));
        let (command, mut packed) = match (buffer, found) {
            (Some(buffer), Some(weights)) => {
                let command = plan::command_for(*weights.layout(), operation);
                let packed = PackedOperand::Ready(&buffer.memory, weights);
                (command.map_err(refused)?, packed)
            }
            _ => {
                let command = plan::command(&self.target, operation).map_err(refused)?;
                if let Some(contents) = &contents {
                    let bytes = src0.shape.span_bytes(src0.dtype).unwrap_or(0);
                    let range = src0.packed_offset..src0.packed_offset + bytes;
                    contents.check(&src0, &range, false, "packed in another shape")?;
                }
                let beside = plan::is_packed_beside(&self.target, &src0);
                let form = beside.then(|| self.form_beside(command.weights(), &src0, graph));
                let packed = match form.flatten() {
                    Some(form) => PackedOperand::Beside(form),
                    None => self.pack_at_use(command.weights(), src0)?,
                };
                (command, packed)
            }
        };
        // `take` leaves an empty scratch buffer for another thread that computes at the same time.
        let mut rows = std::mem::take(&mut *self.lock_rows());
        let result = match command {
            Command::MulMat(command) => {
                self.mul_mat(&command, &mut packed, node, graph, &mut rows.converted)
            }
            Command::MulMatId(command) => self.mul_mat_id(&command, &mut packed, node, &mut rows),
        };
        *self.lock_rows() = rows;
        result
    }

    fn lock_rows(&self) -> MutexGuard<'_, RowScratch> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pack_at_use<'a>(
        &self,
        layout: &WeightLayout,
        src0: Tensor<'a>,
    ) -> Result<PackedOperand<'a>> {
        let region = src0
            .memory
            .ok_or_else(|| refused("weights have no memory"))?;
        let one = WeightLayout {
            slices: 1,
            ..*layout
        };
        let memory = self.npu.allocate(one.bytes())?;
        let weights = self.npu.place(&memory, one, 0)?;
        Ok(PackedOperand::AtUse(Box::new(AtUse {
            src0,
            region,
            calibration: self.target.calibration,
            memory,
            weights,
            slice: None,
        })))
    }

    fn mul_mat(
        &self,
        command: &MulMat,
        packed: &mut PackedOperand,
        node: &mut Node,
        graph: u64,
        converted: &mut Vec<f32>,
    ) -> Result<CallTimes> {
        let mut times = CallTimes::default();
        let Node { operation, out, .. } = node;
        let (src0, src1) = (operand(operation, 0)?, operand(operation, 1)?);
        let (act, dst) = (memory(&src1)?, operation.dst);
        let ([k, ..], nb) = (src1.shape.ne, src1.shape.nb);
        for i3 in 0..command.planes[1] {
            for i2 in 0..command.planes[0] {
                let slice = command.slice(src0.shape.ne[2], i2, i3);
                let from = i2 * nb[2] + i3 * nb[3];
                let to = i2 * dst.shape.nb[2] + i3 * dst.shape.nb[3];
                let (rows, in_place) = act.rows(from, src1.dtype, [command.m, k], nb[1], converted);
                // Converted rows all use the same scratch buffer, so their address does not
                // identify them: no graph number is passed.
                let graph = in_place.then_some(graph);
                let to = (to, dst.shape.nb[1]);
                self.rows(packed, slice, rows, graph, out, to, &mut times)?;
            }
        }
        Ok(times)
    }

    /// Each expert multiplies the rows that chose it, gathered into one matrix.
    fn mul_mat_id(
        &self,
        command: &MulMatId,
        packed: &mut PackedOperand,
        node: &mut Node,
        scratch: &mut RowScratch,
    ) -> Result<CallTimes> {
        let mut times = CallTimes::default();
        let Node { operation, out, .. } = node;
        let (src1, ids) = (operand(operation, 1)?, operand(operation, 2)?);
        let act = memory(&src1)?;
        let RowScratch {
            converted,
            chosen,
            gathered,
            result,
            ..
        } = scratch;
        chosen_experts(command, &ids, memory(&ids)?, chosen);
        if let Some(&(expert, ..)) = chosen
            .iter()
            .find(|(expert, ..)| *expert >= command.experts)
        {
            let reason = format!("expert {expert} of {}", command.experts);
            return Err(refused(&reason));
        }
        let dst = operation.dst;
        let [n, ..] = dst.shape.ne;
        let ([k, rows_of_act, ..], nb) = (src1.shape.ne, src1.shape.nb);
        for group in chosen.chunk_by(|a, b| a.0 == b.0) {
            gathered.clear();
            for &(_, token, slot) in group {
                let from = slot % rows_of_act * nb[1] + token * nb[2];
                let (row, _) = act.rows(from, src1.dtype, [1, k], nb[1], converted);
                gathered.extend_from_slice(row.row(0));
            }
            result.resize(group.len() * n, 0.0);
            let rows = Rows::new(gathered, group.len(), k, k);
            let mut region = RegionMut::from(&mut result[..]);
            let to = (0, n * 4);
            self.rows(packed, group[0].0, rows, None, &mut region, to, &mut times)?;
            for (&(_, token, slot), row) in group.iter().zip(result.chunks_exact(n)) {
                let to = slot * dst.shape.nb[1] + token * dst.shape.nb[2];
                out.write_row(to, row);
            }
        }
        self.npu.written(&out.addresses());
        Ok(times)
    }

    /// Multiplies rows with one slice of the weights, bucket by bucket, and adds the time to the
    /// node's.
    #[expect(
        clippy::too_many_arguments,
        reason = "operands, places and the sum of their times"
    )]
    fn rows(
        &self,
        packed: &mut PackedOperand,
        slice: usize,
        act: Rows<f32>,
        graph: Option<u64>,
        out: &mut RegionMut,
        (offset, stride_bytes): (usize, usize),
        times: &mut CallTimes,
    ) -> Result<()> {
        let w = packed.slice(slice);
        let layout = w.weights.layout();
        let (n, buckets) = (layout.n, self.passed.buckets(layout.precision));
        let costs = Bucketing::new(&self.target.caps.cost, layout, buckets);
        let calls = layout.chunks_per_core * layout.segments;
        for piece in costs.pieces(act.count()) {
            let to = offset + piece.first * stride_bytes;
            let columns = out.rows(to, [piece.rows, n], stride_bytes);
            let rows = act.rows(piece.first..piece.first + piece.rows);
            let ran = (self.npu).mul_mat(w, rows, piece.bucket, graph, columns)?;
            times.add(ran, costs.parts(piece.bucket), calls);
        }
        Ok(())
    }
}

/// Collects the experts that each token chose in each slot, sorted by expert. A negative index is
/// replaced by one that is too large.
fn chosen_experts(command: &MulMatId, ids: &Tensor, memory: Region, chosen: &mut Vec<Chosen>) {
    chosen.clear();
    for token in 0..command.tokens {
        for slot in 0..command.used {
            let at = slot * ids.shape.nb[0] + token * ids.shape.nb[1];
            let id: i32 = bytemuck::pod_read_unaligned(memory.bytes(at, 4));
            chosen.push((usize::try_from(id).unwrap_or(usize::MAX), token, slot));
        }
    }
    chosen.sort_unstable();
}

fn refused(reason: &str) -> Error {
    Error::Graph {
        reason: reason.into(),
    }
}

fn operand<'a>(operation: &Operation<'a>, index: usize) -> Result<Tensor<'a>> {
    operation.src[index].ok_or_else(|| refused("an operand is missing"))
}

/// Returns the bytes of an operand.
fn memory<'a>(tensor: &Tensor<'a>) -> Result<Region<'a>> {
    let memory = tensor.memory;
    memory.ok_or_else(|| refused("an operand has no memory"))
}

/// Returns the rows of a slice of weights, one after another: in place if they are, else copied.
fn rows_of_slice<'a>(weights: &Tensor, region: Region<'a>, slice: usize) -> Cow<'a, [u8]> {
    let ([k, n, s2, _], nb) = (weights.shape.ne, weights.shape.nb);
    // The planner accepted whole blocks only, so this cannot fail.
    let row_bytes = weights.dtype.row_bytes(k).unwrap_or(0);
    let start = slice % s2 * nb[2] + slice / s2 * nb[3];
    if nb[1] == row_bytes {
        return Cow::Borrowed(region.bytes(start, n * row_bytes));
    }
    let rows = (0..n).map(|row| region.bytes(start + row * nb[1], row_bytes));
    Cow::Owned(rows.collect::<Vec<_>>().concat())
}
