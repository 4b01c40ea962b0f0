//! Nodes to jobs: finds the weights, names the operands, submits a graph as one.

use std::ops::Range;
use std::sync::Arc;

use half::f16;
use hexagon_ops::wire::{self, Command as Wire, Plain, Weights};

use super::{Device, HexBuffer, pack};
use crate::device::hexagon::{Buffer, Failed, Job};
use crate::error::{Error, Result};
use crate::graph::{Node, Tensor};
use crate::plan::hexagon::cost::{self, Cost};
use crate::plan::hexagon::{self as plan, Command, WeightLayout};
use crate::tensor::DType;

/// A stream of graphs on one device: collects the jobs of a graph, then submits them together.
#[derive(Debug)]
pub struct Stream {
    device: Arc<Device>,
    jobs: Vec<Job>,
    /// Memory for weights that are packed at use, and how many of these the graph at hand has taken.
    scratch: Vec<Buffer>,
    taken: usize,
    /// What the graph at hand costs, as modelled.
    cost: Cost,
    /// Results in memory that the CPU uses as its own: what it must read anew.
    results: Vec<(Arc<Buffer>, Range<usize>)>,
}

/// An operand's buffer.
pub type Home<'a> = Option<&'a HexBuffer>;

impl Stream {
    /// A stream without jobs.
    #[must_use]
    pub fn new(device: Arc<Device>) -> Self {
        Self {
            device,
            jobs: Vec::new(),
            scratch: Vec::new(),
            taken: 0,
            cost: Cost::default(),
            results: Vec::new(),
        }
    }

    /// Name of the device.
    #[must_use]
    pub fn device_name(&self) -> &str {
        self.device.name()
    }

    /// Forgets the jobs of a graph that will not be computed.
    pub fn reset(&mut self) {
        self.jobs.clear();
        self.results.clear();
        self.cost = Cost::default();
        self.taken = 0;
    }

    /// Adds a node to the graph.
    ///
    /// - `homes`: buffers of the result and of the sources
    ///
    /// # Errors
    /// `Graph` if the node is not one that [`Device::supports`] said yes to; `OutOfMemory` if weights are to be packed
    /// and there is no room.
    pub fn push(&mut self, node: &Node, dst: Home, src: [Home; 3]) -> Result<()> {
        let vtcm_bytes = self.device.npu.info().vtcm_bytes as usize;
        let command = plan::command(vtcm_bytes, node.op, &node.dst, node.sources());
        let command = command.map_err(refused)?;
        if node.dst.shape.ne.contains(&0) {
            return Ok(());
        }
        let weights = self.weights(command.weights(), &node.src[0], src[0])?;
        if let Some(home) = dst.filter(|home| home.shared) {
            let result = span(&node.dst);
            self.results.push((Arc::clone(&home.memory), result));
        }
        let dst = plain(&node.dst, dst)?;
        let act = match node.src[1].dtype {
            DType::F16 => self.convert(&node.src[1], src[1])?,
            _ => input(&node.src[1], src[1])?,
        };
        let job = match command {
            Command::MulMat(command) => {
                let body = wire::MatMul {
                    weights,
                    act,
                    dst,
                    m: word(command.m),
                    planes: command.planes.map(word),
                    reserved: 0,
                };
                let buffers = [weights.buffer, act.buffer, dst.buffer, dst.buffer];
                Job {
                    command: Wire::new(0, &body),
                    buffers,
                }
            }
            Command::MulMatId(command) => {
                let ids = input(&node.src[2], src[2])?;
                let body = wire::MatMulId {
                    weights,
                    act,
                    dst,
                    ids,
                    slots: word(command.slots),
                    act_slots: word(command.act_slots),
                    tokens: word(command.tokens),
                    reserved: 0,
                };
                let buffers = [weights.buffer, act.buffer, dst.buffer, ids.buffer];
                Job {
                    command: Wire::new(0, &body),
                    buffers,
                }
            }
        };
        self.jobs.push(job);
        let arch = self.device.npu.caps().arch;
        self.cost += cost::of(arch, vtcm_bytes, &command);
        Ok(())
    }

    /// Has the device compute what was added, and waits for it.
    ///
    /// # Errors
    /// The device's error, with the number of the job that it was about if there is one.
    pub fn finish(&mut self) -> std::result::Result<(), Failed> {
        if !self.jobs.is_empty() {
            log::debug!(
                "{}: {} commands, modelled: {:.0} packets for weights, {} bytes of weights, {} tile products",
                self.device.name(),
                self.jobs.len(),
                self.cost.weight_packets,
                self.cost.weight_bytes,
                self.cost.tile_products
            );
        }
        let result = match self.jobs.as_mut_slice() {
            [] => Ok(()),
            jobs => self.device.npu.submit(jobs),
        };
        for (memory, range) in &self.results {
            memory.invalidate(range.clone());
        }
        self.reset();
        result
    }

    /// Where the weights are: packed when they were written, or packed now.
    fn weights(&mut self, layout: &WeightLayout, src0: &Tensor, home: Home) -> Result<Weights> {
        let home = home.ok_or_else(|| refused("weights are not in memory of the device"))?;
        let (buffer, offset) = match home.find(src0) {
            Some(_) => (home.memory.number(), src0.packed_offset),
            None => (self.pack_at_use(layout, src0, home)?, 0),
        };
        Ok(Weights {
            buffer,
            layout: layout.weight().layout_id().0,
            offset: offset as u64,
            k: word(layout.matrix.panel().k()),
            n: word(layout.matrix.n()),
            slices: layout.slices.map(word),
        })
    }

    /// Packs weights into memory of the stream; returns the buffer's number.
    fn pack_at_use(
        &mut self,
        layout: &WeightLayout,
        src0: &Tensor,
        home: &HexBuffer,
    ) -> Result<u32> {
        let rows = gather(src0, home, pack::row_bytes(layout, src0.dtype));
        let scratch = self.scratch(layout.bytes())?;
        scratch.write(0..layout.bytes(), |out| {
            out.fill(0);
            let touched = 0..src0.shape.rows();
            pack::pack_rows(layout, out, touched, &rows, src0.dequantize);
        });
        Ok(scratch.number())
    }

    /// Activations in F16 become F32 in memory of the stream.
    fn convert(&mut self, act: &Tensor, home: Home) -> Result<Plain> {
        let home = home.ok_or_else(|| refused("an operand is not in memory of the device"))?;
        let [k, m, p2, p3] = act.shape.ne;
        let halves = gather(act, home, k * 2);
        let scratch = self.scratch(k * m * p2 * p3 * 4)?;
        scratch.write(0..halves.len() * 2, |out| {
            for (out, half) in out
                .as_chunks_mut::<4>()
                .0
                .iter_mut()
                .zip(halves.as_chunks().0)
            {
                *out = f16::from_le_bytes(*half).to_f32().to_le_bytes();
            }
        });
        Ok(Plain {
            buffer: scratch.number(),
            reserved: 0,
            offset: 0,
            strides: [k * 4, k * m * 4, k * m * p2 * 4].map(|stride| stride as u64),
        })
    }

    /// Memory for one operand of the graph at hand.
    fn scratch(&mut self, bytes: usize) -> Result<&Buffer> {
        let index = self.taken;
        if index == self.scratch.len() {
            self.scratch.push(self.device.npu.allocate(bytes)?);
        } else if self.scratch[index].bytes() < bytes {
            self.scratch[index] = self.device.npu.allocate(bytes)?;
        }
        self.taken += 1;
        Ok(&self.scratch[index])
    }
}

/// Sizes fit, says the plan.
fn word(size: usize) -> u32 {
    u32::try_from(size).unwrap_or(u32::MAX)
}

fn refused(reason: &str) -> Error {
    Error::Graph {
        reason: reason.into(),
    }
}

/// The rows of a tensor, one after another.
fn gather(tensor: &Tensor, home: &HexBuffer, row_bytes: usize) -> Vec<u8> {
    let mut rows = vec![0; tensor.shape.rows() * row_bytes];
    let ([_, n1, n2, _], nb) = (tensor.shape.ne, tensor.shape.nb);
    let read = |at: usize, out: &mut [u8]| match &tensor.memory {
        Some(memory) => out.copy_from_slice(memory.bytes(at, out.len())),
        None => home.read(tensor, at, out),
    };
    if tensor.shape.is_contiguous(tensor.dtype) {
        read(0, &mut rows);
        return rows;
    }
    for (index, row) in rows.chunks_exact_mut(row_bytes.max(1)).enumerate() {
        let (i1, i2, i3) = (index % n1, index / n1 % n2, index / n1 / n2);
        read(i1 * nb[1] + i2 * nb[2] + i3 * nb[3], row);
    }
    rows
}

/// Bytes of a buffer that a tensor spans.
fn span(tensor: &Tensor) -> Range<usize> {
    let bytes = tensor.shape.span_bytes(tensor.dtype).unwrap_or(0);
    tensor.packed_offset..tensor.packed_offset + bytes
}

/// An operand that the CPU may just have written.
fn input(tensor: &Tensor, home: Home) -> Result<Plain> {
    if let Some(home) = home.filter(|home| home.shared) {
        home.memory.clean(span(tensor));
    }
    plain(tensor, home)
}

fn plain(tensor: &Tensor, home: Home) -> Result<Plain> {
    let home = home.ok_or_else(|| refused("an operand is not in memory of the device"))?;
    let [_, nb1, nb2, nb3] = tensor.shape.nb.map(|nb| nb as u64);
    Ok(Plain {
        buffer: home.memory.number(),
        reserved: 0,
        offset: tensor.packed_offset as u64,
        strides: [nb1, nb2, nb3],
    })
}
