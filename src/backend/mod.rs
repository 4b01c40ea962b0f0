//! A device, its buffers and its streams of graphs, as the C interface and the tool see them. Each
//! family of NPUs implements the three traits in its own folder. Only [`find_devices`], [`offline`]
//! and the C interface know both families.

use std::any::Any;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::graph::{MAX_SOURCES, Op, Operation, Refusal, Tensor};
use crate::host_memory::RegionMut;
use crate::packfile::Packs;

pub use self::discovery::{Absence, Absent, Discovery};
pub use self::find::find_devices;
pub use self::limit::Limit;
pub use self::share::{Share, shares};

mod discovery;
mod find;
mod limit;
pub mod offline;
mod share;

/// The kinds of memory for a device's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buffers {
    /// Computed tensors in any host memory, weights packed.
    HostAndPacked,
    /// Computed tensors in memory that the device shares with the CPU, weights packed.
    SharedAndPacked,
    /// All tensors in memory that the device shares with the CPU.
    Shared,
    /// All tensors in memory that the CPU reaches by set and get only.
    One,
}

/// An NPU.
pub trait Device: Debug + Send + Sync {
    /// Returns the device's name in ggml.
    fn name(&self) -> &str;

    /// Returns the chip, library, and whether it is simulated, in one line.
    fn description(&self) -> String;

    /// Returns the chip's name, as in `GGML_RUST_NPU_SIM`.
    fn chip(&self) -> &'static str;

    /// Returns `true` if the vendor's library is the stand-in.
    fn is_simulated(&self) -> bool;

    /// Returns the free and total bytes that weights can use, given the free and total bytes that
    /// the device may use of the machine's memory.
    fn memory(&self, share: Share) -> Share;

    /// Returns the memory that its tensors live in.
    fn buffers(&self) -> Buffers;

    /// Returns the bytes of memory that it holds in addition to its buffers: packed forms of
    /// weights that are in ggml's layout.
    fn bytes_beside(&self) -> usize;

    /// Frees the memory that it holds for weights at addresses of host memory that is about to be
    /// freed.
    fn invalidate(&self, _memory: Range<usize>) {}

    /// Returns the alignment of tensors in a buffer, in bytes.
    fn alignment(&self) -> usize;

    /// Returns the bytes of the largest buffer.
    fn max_buffer_bytes(&self) -> usize;

    /// Returns the size of a tensor in a buffer for weights, in bytes: that of ggml's layout or of
    /// the packed form, whichever is larger.
    fn packed_bytes(&self, tensor: &Tensor) -> usize;

    /// Returns why the device does not compute an operation; `None` if it does. Reads metadata
    /// only.
    fn refusal(&self, operation: &Operation) -> Option<Refusal>;

    /// Returns `true` if the device computes an operation. Reads metadata only.
    fn supports(&self, operation: &Operation) -> bool {
        self.refusal(operation).is_none()
    }

    /// Returns `false` if the device computes no node of an operation, whatever its operands are.
    fn computes(&self, op: Op) -> bool;

    /// Returns `true` if the CPU is to compute a node that ggml gave to the device, and can read
    /// its operands: the device does not compute it, or the CPU is faster with so few rows. Reads
    /// metadata only.
    fn prefers_cpu(&self, operation: &Operation) -> bool;

    /// Takes weights that are written later from pack files, if these contain them. The first call
    /// decides.
    fn use_packs(&self, packs: Arc<Packs>);

    /// Runs the self-test.
    ///
    /// # Errors
    /// `SelfTest` if a result is wrong, or the error of the call that failed.
    fn self_test(&self) -> Result<()>;

    /// Returns the limit of multiplications with these weights; `None` if the device does not pack
    /// them.
    fn limit(&self, weights: &Tensor) -> Option<Limit>;

    /// Allocates a buffer of `bytes`, in memory that the CPU uses, too, if `shared`.
    ///
    /// # Errors
    /// `OutOfMemory`, or the vendor's error.
    fn allocate(self: Arc<Self>, bytes: usize, shared: bool) -> Result<Box<dyn Buffer>>;

    /// Makes a stream of graphs.
    fn stream(self: Arc<Self>) -> Box<dyn Stream>;
}

/// The bytes that a write puts into a tensor.
#[derive(Clone, Copy, Debug)]
pub enum Content<'a> {
    /// The bytes of a slice.
    Bytes(&'a [u8]),
    /// All bytes are this one.
    Fill(u8),
}

impl Content<'_> {
    /// Writes the part of it that begins at `from` to `out`.
    pub(crate) fn put(&self, from: usize, out: &mut [u8]) {
        match self {
            Self::Bytes(bytes) => out.copy_from_slice(&bytes[from..from + out.len()]),
            Self::Fill(value) => out.fill(*value),
        }
    }
}

/// A buffer of a device.
pub trait Buffer: Any + Debug + Send + Sync {
    /// Returns the address of the first byte; ggml computes tensor addresses from it.
    fn base(&self) -> usize;

    /// Returns `true` if the CPU may read the bytes of its tensors in place, and not only through
    /// [`Self::read`].
    fn is_host_memory(&self) -> bool;

    /// Returns `true` if a tensor of `bytes` at `offset` is inside, as far as the buffer can know.
    fn holds(&self, offset: usize, bytes: usize) -> bool;

    /// Returns the bytes at an address, if they are in memory of this buffer's device that the CPU
    /// must not read unasked.
    fn shared_bytes(&self, address: usize, bytes: usize) -> Option<Vec<u8>>;

    /// Allocates everything that writing a tensor needs, so that a lack of memory fails the load of
    /// a model.
    ///
    /// # Errors
    /// `OutOfMemory` or `OutOfDescriptors` without room for a packed form.
    fn prepare(&self, _tensor: &Tensor) -> Result<()> {
        Ok(())
    }

    /// Writes the bytes `[offset, offset + size)` of a tensor, and packs them if it is a weight.
    ///
    /// # Errors
    /// `OutOfMemory` without room for a packed form; `Released` for a part of a tensor whose other
    /// bytes were released.
    ///
    /// # Panics
    /// If the range is not inside the buffer.
    fn write(&self, tensor: &Tensor, offset: usize, size: usize, content: Content) -> Result<()>;

    /// Copies the bytes of a tensor starting at `offset`, exactly as they were written.
    ///
    /// # Errors
    /// `Released` if they were released.
    ///
    /// # Panics
    /// If the range is not inside the buffer.
    fn read(&self, tensor: &Tensor, offset: usize, out: &mut [u8]) -> Result<()>;

    /// Returns `true` if the bytes of a tensor are there, and were not released when it was packed.
    fn has_bytes(&self, _tensor: &Tensor) -> bool {
        true
    }

    /// Fills the whole buffer; nothing in it is packed any more.
    fn clear(&self, value: u8);

    /// Makes the device compute no graph again without its nodes, because recorded commands may be
    /// wrong.
    fn forget_graphs(&self);

    /// Notes that the CPU computes with a cache in this buffer, which it reads and writes in place.
    fn mark_cpu_reader(&self);

    /// Makes the device's writes to a tensor visible to the CPU, which is about to read or write it
    /// in place. All of the CPU's earlier writes were [taken][Self::take_from_cpu].
    ///
    /// # Panics
    /// If the tensor is not inside the buffer.
    fn show_to_cpu(&self, tensor: &Tensor);

    /// Makes the CPU's writes in place to a tensor visible to the device.
    ///
    /// # Panics
    /// If the tensor is not inside the buffer.
    fn take_from_cpu(&self, tensor: &Tensor);
}

/// An operation that is to be computed.
pub struct Node<'a> {
    /// The operation; operands in memory of the host come with it.
    pub operation: Operation<'a>,
    /// The result's bytes.
    pub out: RegionMut<'a>,
    /// `true` if only the next node reads the result, perhaps in another shape, so that the two can
    /// be computed as one.
    pub feeds_next: bool,
    /// Buffer of the result, if it is one of this backend's.
    pub dst: Option<&'a dyn Buffer>,
    /// Buffers of the sources, likewise.
    pub src: [Option<&'a dyn Buffer>; MAX_SOURCES],
}

/// The failure of a graph.
#[derive(Debug)]
pub struct GraphError {
    /// Index of the node that it is about, if it is known.
    pub node: Option<usize>,
    /// The device's error.
    pub error: Error,
}

impl From<Error> for GraphError {
    fn from(error: Error) -> Self {
        Self { node: None, error }
    }
}

/// A stream of graphs on one device.
pub trait Stream: Debug + Send + Sync {
    /// Returns the name of the device.
    fn device_name(&self) -> &str;

    /// Computes a graph and waits for it.
    ///
    /// - `uid`: ggml's number of the graph: the same for the same nodes with the same operands; 0
    ///   if it has none
    ///
    /// # Errors
    /// An error of the device; some results may have been written.
    fn submit(&self, uid: u64, nodes: &mut [Node]) -> std::result::Result<(), GraphError>;

    /// Computes again a graph that [`Self::submit`] has computed under the number `uid`. Returns
    /// `None` if that is impossible without its nodes.
    ///
    /// # Errors
    /// As [`Self::submit`].
    fn replay(&self, uid: u64) -> Option<std::result::Result<(), GraphError>>;
}
