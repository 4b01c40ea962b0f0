//! Nodes to commands: finds the weights, names the operands, submits a graph as one, and remembers
//! the submission.

use std::any::Any;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytemuck::Zeroable;
use hexagon_ops::serve;
use hexagon_ops::wire::{self, Command as Wire, TensorOp, WIDE_SOURCES};

use self::submission::{Step, Submission};
use super::buffer::PlaceBeside;
use super::device::Failed;
use super::plan::fuse::{fuse, fuse_product};
use super::plan::{self, Command, cost};
use super::{HexBuffer, HexDevice, factors};
use crate::backend::{Buffer, GraphError, Node, Stream};
use crate::error::Error;
use crate::graph::{MAX_SOURCES, Op, Operation, Tensor};
use crate::tensor::DType;

mod operands;
mod record;
mod rows;
mod submission;
pub(super) mod trace;
mod turned;

/// A failure has the number of its node once it is known.
type Result<T> = std::result::Result<T, GraphError>;

/// Number of graphs that a stream remembers whatever their size.
const FEW: usize = 8;
/// Number of graphs that are cached if they use little memory. If the CPU computes some layers, a
/// token has a graph for each group of other layers, and all of these graphs come again in the same
/// order.
const MAX_REMEMBERED: usize = 256;
/// Bytes that more than [`FEW`] graphs of a stream may hold, by [`Submission::held_bytes`].
const MAX_HELD_BYTES: usize = 64 << 20;

/// A stream of graphs on one Hexagon NPU: a graph is one submission, which is cached.
#[derive(Debug)]
pub struct HexStream {
    device: Arc<HexDevice>,
    graphs: Mutex<Graphs>,
}

/// The graphs of a stream.
#[derive(Debug)]
struct Graphs {
    device: Arc<HexDevice>,
    /// The current graph.
    current: Submission,
    /// The last command, if nothing but the next node reads its result.
    last: Option<Last>,
    /// The current graph has no number, so it is a part of one.
    is_part: bool,
    /// Submissions by the number that ggml gives graphs, and when they were used last.
    cached: HashMap<u64, (u64, Submission)>,
    clock: u64,
}

/// A command that the next one may become part of.
#[derive(Debug)]
enum Last {
    Tensor(TensorOp),
    Product(wire::MatMul),
}

/// An operand's buffer.
type OperandBuffer<'a> = Option<&'a HexBuffer>;

impl HexStream {
    /// Makes a stream without graphs.
    #[must_use]
    pub fn new(device: Arc<HexDevice>) -> Self {
        let graphs = Graphs {
            device: Arc::clone(&device),
            current: Submission::default(),
            last: None,
            is_part: false,
            cached: HashMap::new(),
            clock: 0,
        };
        Self {
            device,
            graphs: Mutex::new(graphs),
        }
    }

    /// Returns the bytes of the process's memory that cached graphs hold, without memory of the
    /// device.
    #[must_use]
    pub fn heap_bytes(&self) -> usize {
        let graphs = self.graphs();
        let submissions = graphs.cached.values();
        submissions
            .map(|(_, submission)| submission.heap_bytes())
            .sum()
    }

    fn graphs(&self) -> MutexGuard<'_, Graphs> {
        // After a panic, the C side uses this stream for nothing else.
        self.graphs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Stream for HexStream {
    fn device_name(&self) -> &str {
        &self.device.name
    }

    fn submit(&self, uid: u64, nodes: &mut [Node]) -> Result<()> {
        let mut graphs = self.graphs();
        let mut layouts = self.device.layouts();
        graphs.reset();
        graphs.is_part = uid == 0;
        for (number, node) in nodes.iter().enumerate() {
            let node_of = |failed: GraphError| GraphError {
                // If an earlier node failed because this one needed its result, the error keeps the
                // earlier node's number.
                node: failed.node.or(Some(number)),
                ..failed
            };
            let packed = graphs.packed_but_read_unpacked(node);
            if !packed.is_empty() {
                // Pending commands may read the operand as it is, or compute its content, so they
                // run first. With no planned command left, other streams may unpack tensors as
                // well.
                graphs.run_pending().map_err(node_of)?;
                drop(layouts);
                self.device.put_back(&packed);
                layouts = self.device.layouts();
            }
            graphs.push(number, node).map_err(node_of)?;
        }
        graphs.current.run(&self.device)?;
        if uid != 0 && !graphs.current.once {
            graphs.cache(uid);
        }
        Ok(())
    }

    fn replay(&self, uid: u64) -> Option<Result<()>> {
        let mut graphs = self.graphs();
        let _layouts = self.device.layouts();
        let result = graphs.replay(uid)?;
        Some(result.map_err(GraphError::from))
    }
}

impl From<Failed> for GraphError {
    fn from(failed: Failed) -> Self {
        Self {
            node: failed.entry,
            error: failed.error,
        }
    }
}

/// Returns the buffer, if it is a Hexagon NPU's.
fn hex_buffer(buffer: Option<&dyn Buffer>) -> OperandBuffer<'_> {
    (buffer? as &dyn Any).downcast_ref()
}

impl Graphs {
    /// Forgets the commands of a graph that will not be computed.
    fn reset(&mut self) {
        self.last = None;
        self.current.clear(self.device.changes());
    }

    /// Adds a node to the graph.
    ///
    /// - `number`: its index in the graph
    ///
    /// # Errors
    /// `Graph` if the device does not support the node; `OutOfMemory` without room for weights that
    /// have to be packed.
    fn push(&mut self, number: usize, node: &Node) -> Result<()> {
        if node.operation.computes_nothing() {
            self.last = None;
            return Ok(());
        }
        let (dst, src) = (hex_buffer(node.dst), node.src.map(hex_buffer));
        let operation = &self.device.with_places(&node.operation);
        if let Some(buffer) = dst {
            buffer.note_computed(operation.dst.span());
        }
        if (self.device.trace.as_ref()).is_some_and(|trace| trace.commands().is_some()) {
            self.current.nodes.push(operation, dst, &src);
        }
        let vtcm_bytes = self.device.npu.info().vtcm_bytes as usize;
        let last = self.last.take();
        if let Some(turned) = operation.turned()
            && self.push_turned(number, operation, &turned, dst, [src[0], src[1]])?
        {
            return Ok(());
        }
        let (mut command, beside) = self.plan(vtcm_bytes, operation, src[0])?;
        self.choose_kernels(&mut command);
        let arch = self.device.npu.caps().arch;
        let step = Step {
            node: number,
            ops: [Some(operation.op), None, None],
            ne: operation.dst.shape.ne,
            cost: cost::of(arch, vtcm_bytes, &command),
        };
        match &command {
            Command::Tensor(body) => {
                let mut body = **body;
                let [a, b, c] = &mut body.src;
                let operands = [&mut body.dst, a, b, c];
                self.operands(operands, operation, dst, src)?;
                if let Some(buffer) = dst {
                    self.current
                        .shows_cache(operation, buffer, src[1], self.is_part);
                }
                // The planner did not know the memory of the operands, so the check is repeated
                // with it.
                accepted(serve::accepts(&body))?;
                let (body, step) = match last {
                    Some(Last::Product(product)) => match fuse_product(&product, &body) {
                        Some(fused) => return self.push_combined(step, &fused),
                        None => (body, step),
                    },
                    Some(Last::Tensor(first)) => match fuse(&first, &body) {
                        Some(fused) => {
                            let mut step = self.current.pop_into(step);
                            step.cost =
                                cost::of(arch, vtcm_bytes, &Command::Tensor(Box::new(fused)));
                            (fused, step)
                        }
                        None => (body, step),
                    },
                    None => (body, step),
                };
                let buffers = named(&body);
                self.current.push(step, Wire::new(0, &body), &buffers);
                self.last = node.feeds_next.then_some(Last::Tensor(body));
            }
            Command::Wide(body) => {
                let mut body = **body;
                let mut tensors = [wire::Tensor::zeroed(); 1 + WIDE_SOURCES];
                let narrow = [body.dst].into_iter().chain(body.src);
                for (tensor, narrow) in tensors.iter_mut().zip(narrow) {
                    *tensor = narrow.widen();
                }
                let buffers = self.operands(tensors.each_mut(), operation, dst, src)?;
                let narrow = [&mut body.dst].into_iter().chain(&mut body.src);
                for (narrow, tensor) in narrow.zip(tensors) {
                    (narrow.buffer, narrow.offset) = (tensor.buffer, tensor.offset);
                }
                accepted(serve::accepts_wide(&body))?;
                self.current.push(step, Wire::new(0, &body), &buffers);
            }
            Command::Attention(body) => {
                let mut body = **body;
                let wire::Attention {
                    dst: result,
                    q,
                    k,
                    v,
                    mask,
                    sinks,
                    ..
                } = &mut body;
                let operands = [result, q, k, v, mask, sinks];
                let buffers = self.operands(operands, operation, dst, src)?;
                accepted(serve::accepts_attention(&body))?;
                self.current.push(step, Wire::new(0, &body), &buffers);
            }
            Command::MulMat(body, layout) => {
                let mut body = **body;
                self.place_weights(&mut body.weights, layout, operation, src[0], beside)?;
                self.place_activations(&mut body.act, step, operation, src[1])?;
                self.place_result(&mut body.dst, &operation.dst, dst)?;
                accepted(serve::accepts_product(&body))?;
                let buffers = [body.weights.buffer, body.act.buffer, body.dst.buffer];
                self.current.push(step, Wire::new(0, &body), &buffers);
                self.last = node.feeds_next.then_some(Last::Product(body));
            }
            Command::MulMatId(body, layout) => {
                let mut body = **body;
                self.place_weights(&mut body.weights, layout, operation, src[0], beside)?;
                self.place_activations(&mut body.act, step, operation, src[1])?;
                self.place_result(&mut body.dst, &operation.dst, dst)?;
                self.place_rows(&mut body.ids, &operand(operation, 2)?, src[2])?;
                accepted(serve::accepts_experts(&body))?;
                let buffers = [
                    body.weights.buffer,
                    body.act.buffer,
                    body.dst.buffer,
                    body.ids.buffer,
                ];
                self.current.push(step, Wire::new(0, &body), &buffers);
            }
        }
        Ok(())
    }

    /// Chooses the kernels of products.
    fn choose_kernels(&self, command: &mut Command) {
        let (dots, weight) = match command {
            Command::MulMat(body, layout) => (&mut body.dots, layout.weight()),
            Command::MulMatId(body, layout) => (&mut body.dots, layout.weight()),
            Command::Tensor(_) | Command::Wide(_) | Command::Attention(_) => return,
        };
        let device = &self.device;
        let (arch, threads) = (device.npu.caps().arch, device.vector_threads());
        *dots = cost::dots(arch, &device.rates, threads, weight, device.activations) as u32;
    }

    /// Replaces a product by its combination with the operation that follows.
    fn push_combined(&mut self, step: Step, body: &wire::MatMul) -> Result<()> {
        let mut step = self.current.pop_into(step);
        step.cost.other_bytes = (step.cost.other_bytes).saturating_sub(cost::passed_on(body));
        let other = body.epilogue.other.buffer;
        let buffers = [body.weights.buffer, body.act.buffer, body.dst.buffer, other];
        self.current.push(step, Wire::new(0, body), &buffers);
        Ok(())
    }

    /// Returns the operands, and their buffers, that are packed and must not be when the node is
    /// computed.
    ///
    /// Operations other than multiplications were accepted before their buffers were known: with
    /// everything packed that can be (`GGML_RUST_NPU_REPACK=always`), and of weights in floats,
    /// which other operations read as well. A graph may also write over weights.
    fn packed_but_read_unpacked<'a>(&self, node: &Node<'a>) -> Vec<(&'a HexBuffer, Range<usize>)> {
        if node.operation.computes_nothing() {
            return Vec::new();
        }
        let (dst, src) = (hex_buffer(node.dst), node.src.map(hex_buffer));
        let operation = &self.device.with_places(&node.operation);
        let others = operation.src.iter().zip(src).skip(factors(operation));
        let others = others.filter_map(|(tensor, buffer)| Some((buffer?, tensor.as_ref()?.span())));
        let others = others.chain(dst.map(|buffer| (buffer, operation.dst.span())));
        let mut packed: Vec<_> = others
            .filter(|(buffer, range)| buffer.holds_packed(range))
            .collect();
        let vtcm_bytes = self.device.npu.info().vtcm_bytes as usize;
        if let (Op::MulMat | Op::MulMatId, Some(src0), Some(buffer)) =
            (operation.op, &operation.src[0], src[0])
            && matches!(src0.dtype, DType::F32 | DType::Bf16)
            && buffer.is_packed(src0)
            && (buffer.find(src0).is_none() || plan::command(vtcm_bytes, operation, true).is_err())
        {
            // Reads the weight unpacked: it is only a part of a packed tensor, or its operands do
            // not suit the matrix unit, and F32 and BF16 can also be multiplied unpacked.
            packed.push((buffer, src0.span()));
        }
        packed
    }

    /// Runs the commands that were collected so far, because the host is about to read or change
    /// their results. This once, the rest of the graph is a separate submission.
    fn run_pending(&mut self) -> Result<()> {
        self.current.run(&self.device)?;
        self.current.clear(self.device.changes());
        self.last = None;
        self.current.once = true;
        Ok(())
    }

    /// Plans a node: with packed weights in their current layout, or otherwise in their type's.
    /// Returns the place of a packed copy of weights.
    fn plan(
        &mut self,
        vtcm_bytes: usize,
        operation: &Operation,
        weights: OperandBuffer,
    ) -> Result<(Command, Option<PlaceBeside>)> {
        let plan = |packed| plan::command(vtcm_bytes, operation, packed).map_err(refused);
        let (Op::MulMat | Op::MulMatId, Some(src0), Some(buffer)) =
            (operation.op, &operation.src[0], weights)
        else {
            return Ok((plan(false)?, None));
        };
        let found = buffer.find(src0);
        if let Some(layout) = plan::beside_layout(src0)
            && let Some(beside) = buffer.beside()
            && layout.bytes() <= self.device.max_tensor_bytes
            && let Ok(command) = plan(true)
            && let Some(place) = self.current.beside(&self.device, beside, src0, &layout)
        {
            return Ok((command, Some(place)));
        }
        // Unpacked weights first try the kernel that reads ggml's layout; if it refuses, they are
        // packed for this graph.
        let mut command = plan(found.is_some()).or_else(|_| plan(true))?;
        // A pack file may have stored the weight in another layout than its type's usual one.
        if let (Some(found), Some(layout)) = (found, command.weights())
            && found != *layout
        {
            command.set_weights(found);
        }
        Ok((command, None))
    }

    /// Keeps the current graph under a number.
    fn cache(&mut self, graph: u64) {
        self.current.drop_unused();
        let held = |(_, submission): &(u64, Submission)| submission.held_bytes();
        let mut held_bytes =
            self.current.held_bytes() + self.cached.values().map(held).sum::<usize>();
        let mut next = Submission::default();
        while self.cached.len() >= MAX_REMEMBERED
            || (self.cached.len() >= FEW && held_bytes > MAX_HELD_BYTES)
        {
            let oldest = self.cached.iter().min_by_key(|(_, (used, _))| *used);
            let oldest = oldest.map_or(0, |(graph, _)| *graph);
            if let Some(forgotten) = self.cached.remove(&oldest) {
                held_bytes -= held(&forgotten);
                next = forgotten.1;
            }
        }
        let current = std::mem::replace(&mut self.current, next);
        self.clock += 1;
        self.cached.insert(graph, (self.clock, current));
    }

    /// Computes again a graph that was computed under a number, with the current content of its
    /// operands. The first time, it allocates memory for the commands, and nothing else.
    ///
    /// Returns `None` if the graph is unknown, or if it cannot be repeated.
    fn replay(&mut self, graph: u64) -> Option<std::result::Result<(), Failed>> {
        let (used, submission) = self.cached.get_mut(&graph)?;
        if !submission.is_valid(self.device.changes()) || !submission.has_current_forms() {
            self.cached.remove(&graph);
            return None;
        }
        self.clock += 1;
        *used = self.clock;
        if let Err(error) = submission.record(&self.device.npu) {
            log::debug!("{}: a graph stays in the ring: {error}", self.device.name);
        }
        Some(submission.run(&self.device))
    }

    /// Fills in the places of the operands, the result first; returns the buffers.
    fn operands<const N: usize>(
        &mut self,
        operands: [&mut wire::Tensor; N],
        operation: &Operation,
        dst: OperandBuffer,
        src: [OperandBuffer; MAX_SOURCES],
    ) -> Result<[u32; N]> {
        let buffer = dst.ok_or_else(|| no_memory(&operation.dst))?;
        let number = self.current.result(&operation.dst, buffer);
        // Missing operands get the result's buffer number.
        let mut buffers = [number; N];
        let mut result = None;
        for (index, operand) in operands.into_iter().enumerate() {
            if operand.dtype == wire::TYPE_NONE {
                continue;
            }
            let Some(source) = (operand.buffer as usize).checked_sub(1) else {
                (operand.buffer, operand.offset) = (number, offset(&operation.dst));
                result = Some(*operand);
                continue;
            };
            let tensor = self::operand(operation, source)?;
            let buffer = src[source].ok_or_else(|| no_memory(&tensor))?;
            if buffer.is_packed(&tensor) {
                return Err(refused("an operand is packed"));
            }
            (operand.buffer, operand.offset) =
                (self.current.input(&tensor, buffer), offset(&tensor));
            buffers[index] = operand.buffer;
            let apart = operand.buffer != number || Some(*operand) == result;
            if !apart && overlap(&tensor, &operation.dst) {
                return Err(refused("the result overlaps an operand"));
            }
        }
        Ok(buffers)
    }
}

/// Returns the buffers of a command: the result's, which also replaces absent operands, and the
/// sources'.
fn named(body: &TensorOp) -> [u32; 4] {
    let [a, b, c] = body.src.map(|src| match src.dtype {
        wire::TYPE_NONE => body.dst.buffer,
        _ => src.buffer,
    });
    [body.dst.buffer, a, b, c]
}

/// Converts a size, which the plan has found to fit.
fn word(size: usize) -> u32 {
    u32::try_from(size).unwrap_or(u32::MAX)
}

fn offset(tensor: &Tensor) -> u64 {
    tensor.packed_offset as u64
}

fn refused(reason: &str) -> GraphError {
    let reason = reason.into();
    Error::Graph { reason }.into()
}

/// Returns `true` if two tensors of one buffer have bytes between the first and the last in common.
fn overlap(a: &Tensor, b: &Tensor) -> bool {
    let (a, b) = (a.span(), b.span());
    a.start < b.end && b.start < a.end
}

/// Converts the DSP's answer to a command into an error.
fn accepted(answer: std::result::Result<(), serve::Failure>) -> Result<()> {
    answer.map_err(|failure| refused(&serve::describe(failure.status, failure.detail).to_string()))
}

fn no_memory(operand: &Tensor) -> GraphError {
    let name = operand.name;
    refused(&format!("operand {name} is not in memory of the device"))
}

fn operand<'a>(operation: &Operation<'a>, index: usize) -> Result<Tensor<'a>> {
    operation.src[index].ok_or_else(|| refused("an operand is missing"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Place, Role};
    use crate::tensor::{DType, Shape};

    #[test]
    fn one_byte_in_common_is_an_overlap() {
        let at = |packed_offset| Tensor {
            name: "t",
            dtype: DType::F32,
            format: None,
            shape: Shape {
                ne: [4, 1, 1, 1],
                nb: [4, 16, 16, 16],
            },
            place: Place::Device,
            role: Role::State,
            memory: None,
            packed_offset,
            dequantize: None,
        };
        for (first, second, expected) in [
            (100, 116, false),
            (100, 115, true),
            (100, 84, false),
            (100, 85, true),
            (100, 100, true),
        ] {
            assert_eq!(
                overlap(&at(first), &at(second)),
                expected,
                "{first} and {second}"
            );
        }
    }
}
