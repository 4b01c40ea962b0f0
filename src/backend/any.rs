//! A device of either family, as the C border sees it.

use std::sync::{Arc, Mutex, PoisonError};

use super::hexagon::{self, Content, HexBuffer, Stream};
use super::{Device, PACKED_ALIGN_BYTES, WeightBuffer, system_memory};
use crate::caps;
use crate::config::Repack;
use crate::device::rknpu;
use crate::error::{Error, Result};
use crate::graph::{MAX_SOURCES, Node, Operation, Tensor};

/// Where a device's tensors live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buffers {
    /// Computed ones in any host memory, weights packed.
    HostAndPacked,
    /// Computed ones in memory that the device shares with the CPU, weights packed.
    SharedAndPacked,
    /// All in memory that the device shares with the CPU.
    Shared,
    /// All in memory that the CPU reaches by set and get only.
    One,
}

/// A device.
#[derive(Clone, Debug)]
pub enum AnyDevice {
    /// A Rockchip NPU: weights in packed buffers, everything else in host memory.
    Rockchip(Arc<Device>),
    /// A Hexagon NPU: everything in its own buffers.
    Hexagon(Arc<hexagon::Device>),
}

/// A buffer of a device.
#[derive(Debug)]
pub enum AnyBuffer {
    /// Packed weights of a Rockchip NPU.
    Rockchip(WeightBuffer),
    /// Memory of a Hexagon NPU.
    Hexagon(HexBuffer),
}

/// A stream of graphs on a device.
#[derive(Debug)]
pub enum AnyStream {
    /// Computes each node as it comes.
    Rockchip(Arc<Device>),
    /// Collects a graph and submits it as one.
    Hexagon(Box<Mutex<Stream>>),
}

impl AnyDevice {
    /// Name in ggml.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Rockchip(_) => rknpu::NAME,
            Self::Hexagon(device) => device.name(),
        }
    }

    /// Chip, library, and whether it is simulated.
    #[must_use]
    pub fn description(&self) -> String {
        match self {
            Self::Rockchip(device) => device.description(),
            Self::Hexagon(device) => device.description(),
        }
    }

    /// Free and total memory that weights can use.
    #[must_use]
    pub fn memory(&self) -> (usize, usize) {
        match self {
            Self::Rockchip(device) => device.memory(),
            // Buffers beyond the address space take turns in it.
            Self::Hexagon(_) => system_memory(),
        }
    }

    /// Whether the vendor's library is the stand-in.
    #[must_use]
    pub fn is_simulated(&self) -> bool {
        match self {
            Self::Rockchip(device) => device.npu().is_simulated(),
            Self::Hexagon(device) => device.npu().is_simulated(),
        }
    }

    /// The chip's name, as in `GGML_RUST_NPU_SIM`.
    #[must_use]
    pub fn chip(&self) -> &'static str {
        match self {
            Self::Rockchip(device) => device.npu().caps().soc.name(),
            Self::Hexagon(device) => device.npu().caps().name,
        }
    }

    /// Where its tensors live.
    #[must_use]
    pub fn buffers(&self) -> Buffers {
        match self {
            Self::Rockchip(_) => Buffers::HostAndPacked,
            Self::Hexagon(device) => match device.repack() {
                Repack::Weights => Buffers::SharedAndPacked,
                Repack::Always => Buffers::One,
                Repack::Off => Buffers::Shared,
            },
        }
    }

    /// Whether the device computes an operation. Metadata only.
    #[must_use]
    pub fn supports(&self, operation: &Operation) -> bool {
        match self {
            Self::Rockchip(device) => device.supports(operation),
            Self::Hexagon(device) => device.supports(operation),
        }
    }

    /// Whether a node that the device could compute has so few rows that the CPU shall do it. Metadata only.
    #[must_use]
    pub fn leaves_to_cpu(&self, operation: &Operation) -> bool {
        match self {
            Self::Rockchip(device) => device.leaves_to_cpu(operation),
            Self::Hexagon(_) => false,
        }
    }

    /// Alignment of tensors in a buffer, in bytes.
    #[must_use]
    pub fn alignment(&self) -> usize {
        match self {
            Self::Rockchip(_) => PACKED_ALIGN_BYTES,
            Self::Hexagon(_) => hexagon::ALIGN_BYTES,
        }
    }

    /// Largest buffer, in bytes.
    #[must_use]
    pub fn max_buffer_bytes(&self) -> usize {
        match self {
            Self::Rockchip(_) => caps::DOMAIN_WEIGHT_BYTES,
            Self::Hexagon(_) => hexagon::MAX_BUFFER_BYTES,
        }
    }

    /// Bytes that a tensor takes in a buffer.
    #[must_use]
    pub fn packed_bytes(&self, tensor: &Tensor) -> usize {
        match self {
            Self::Rockchip(device) => device.packed_bytes(tensor),
            Self::Hexagon(device) => device.packed_bytes(tensor),
        }
    }

    /// Allocates a buffer, in memory that the CPU uses, too, if `shared`.
    ///
    /// # Errors
    /// `OutOfMemory`, or the vendor's error.
    pub fn allocate(&self, bytes: usize, shared: bool) -> Result<AnyBuffer> {
        match self {
            Self::Rockchip(device) => {
                WeightBuffer::new(Arc::clone(device), bytes).map(AnyBuffer::Rockchip)
            }
            Self::Hexagon(device) => HexBuffer::new(device, bytes, shared).map(AnyBuffer::Hexagon),
        }
    }

    /// Makes a stream of graphs.
    #[must_use]
    pub fn stream(&self) -> AnyStream {
        match self {
            Self::Rockchip(device) => AnyStream::Rockchip(Arc::clone(device)),
            Self::Hexagon(device) => {
                AnyStream::Hexagon(Box::new(Mutex::new(Stream::new(Arc::clone(device)))))
            }
        }
    }
}

impl AnyBuffer {
    /// Address of the first byte; ggml reckons tensor addresses from it.
    #[must_use]
    pub fn base(&self) -> usize {
        match self {
            Self::Rockchip(buffer) => buffer.base(),
            Self::Hexagon(buffer) => buffer.base(),
        }
    }

    /// Whether the CPU may look at the bytes of tensors in it, beside what [`Self::read`] gives.
    #[must_use]
    pub fn is_host_memory(&self) -> bool {
        match self {
            Self::Rockchip(_) => true,
            Self::Hexagon(buffer) => buffer.is_shared(),
        }
    }

    /// The bytes at an address, if they lie in memory of this buffer's device that the CPU must not read unasked.
    #[must_use]
    pub fn shared_bytes(&self, address: usize, bytes: usize) -> Option<Vec<u8>> {
        self.hexagon()?.shared_bytes(address, bytes)
    }

    /// Writes the bytes `[offset, offset + size)` of a tensor.
    ///
    /// # Errors
    /// `OutOfMemory` if there is no room for a packed form.
    ///
    /// # Panics
    /// If the range is not inside the buffer.
    pub fn write(
        &self,
        tensor: &Tensor,
        offset: usize,
        size: usize,
        content: Content,
    ) -> Result<()> {
        match self {
            Self::Rockchip(buffer) => buffer.write(tensor, offset, size, |out| content.put(0, out)),
            Self::Hexagon(buffer) => {
                buffer.write(tensor, offset, size, content);
                Ok(())
            }
        }
    }

    /// Copies the bytes of a tensor from `offset` on: exactly what was written.
    ///
    /// # Errors
    /// `Released` if they are gone.
    ///
    /// # Panics
    /// If the range is not inside the buffer.
    pub fn read(&self, tensor: &Tensor, offset: usize, out: &mut [u8]) -> Result<()> {
        match self {
            Self::Rockchip(buffer) => buffer.read(tensor, offset, out),
            Self::Hexagon(buffer) => {
                buffer.read(tensor, offset, out);
                Ok(())
            }
        }
    }

    /// Returns `true` if a tensor of `bytes` at `offset` is inside, as far as the device can know.
    #[must_use]
    pub fn holds(&self, offset: usize, bytes: usize) -> bool {
        match self {
            // Its plain bytes are checked where they are used.
            Self::Rockchip(_) => true,
            Self::Hexagon(buffer) => {
                let end = offset.checked_add(bytes);
                bytes == 0 || end.is_some_and(|end| end <= buffer.bytes())
            }
        }
    }

    /// Has no graph of the device computed again without its nodes.
    pub fn forget_graphs(&self) {
        if let Self::Hexagon(buffer) = self {
            buffer.forget_graphs();
        }
    }

    /// Notes that an operation on a cache in this buffer is left to the CPU, which reads and writes it in place.
    pub fn leave_to_cpu(&self) {
        if let Self::Hexagon(buffer) = self {
            buffer.leave_to_cpu();
        }
    }

    /// Fills the whole buffer.
    pub fn clear(&self, value: u8) {
        match self {
            Self::Rockchip(buffer) => buffer.clear(value),
            Self::Hexagon(buffer) => buffer.clear(value),
        }
    }

    fn hexagon(&self) -> Option<&HexBuffer> {
        match self {
            Self::Rockchip(_) => None,
            Self::Hexagon(buffer) => Some(buffer),
        }
    }
}

/// Where the operands of a node are.
#[derive(Clone, Copy, Debug)]
pub struct Homes<'a> {
    /// Buffer of the result.
    pub dst: Option<&'a AnyBuffer>,
    /// Buffers of the sources.
    pub src: [Option<&'a AnyBuffer>; MAX_SOURCES],
}

impl AnyStream {
    /// Name of the device.
    #[must_use]
    pub fn device_name(&self) -> String {
        match self {
            Self::Rockchip(_) => rknpu::NAME.into(),
            Self::Hexagon(stream) => lock(stream).device_name().into(),
        }
    }

    /// Begins a graph: forgets the nodes of one that was not finished.
    pub fn begin(&self) {
        if let Self::Hexagon(stream) = self {
            lock(stream).reset();
        }
    }

    /// Computes a node, or adds it to the graph that [`Self::finish`] computes.
    ///
    /// - `graph`: number of the graph, another one for each submission
    ///
    /// # Errors
    /// The device's; the graph is not to be finished then.
    pub fn push(&self, node: &mut Node, homes: Homes, graph: u64) -> Result<()> {
        match self {
            Self::Rockchip(device) => {
                let buffer = match homes.src[0] {
                    Some(AnyBuffer::Rockchip(buffer)) => Some(buffer),
                    _ => None,
                };
                device.compute(node, buffer, graph)
            }
            Self::Hexagon(stream) => {
                let src = homes.src.map(|home| home.and_then(AnyBuffer::hexagon));
                let dst = homes.dst.and_then(AnyBuffer::hexagon);
                lock(stream).push(node, dst, src)
            }
        }
    }

    /// Computes what is left of the graph.
    ///
    /// - `graph`: ggml's number of the graph; 0 if it has none
    /// - `nodes`: of the graph
    ///
    /// # Errors
    /// The device's, with the index of the node that it is about if it is known; `Graph` if other nodes were added since
    /// [`Self::begin`].
    pub fn finish(
        &self,
        graph: u64,
        nodes: usize,
    ) -> std::result::Result<(), (Option<usize>, Error)> {
        match self {
            Self::Rockchip(_) => Ok(()),
            Self::Hexagon(stream) => {
                let mut stream = lock(stream);
                if stream.nodes() != nodes {
                    let reason = format!("{} of {nodes} nodes are there", stream.nodes());
                    return Err((None, Error::Graph { reason }));
                }
                (stream.finish(graph)).map_err(|failed| (failed.job, failed.error))
            }
        }
    }

    /// Computes a graph once more that [`Self::finish`] has computed under the number `graph`; `None` if it cannot be
    /// computed without its nodes.
    ///
    /// # Errors
    /// As [`Self::finish`].
    pub fn replay(&self, graph: u64) -> Option<std::result::Result<(), (Option<usize>, Error)>> {
        match self {
            Self::Rockchip(_) => None,
            Self::Hexagon(stream) => {
                let result = lock(stream).replay(graph)?;
                Some(result.map_err(|failed| (failed.job, failed.error)))
            }
        }
    }
}

fn lock(stream: &Mutex<Stream>) -> std::sync::MutexGuard<'_, Stream> {
    // After a panic the C border asks nothing more of a stream, but for its name.
    stream.lock().unwrap_or_else(PoisonError::into_inner)
}
