//! The protocol between the two processors: the ring in shared memory, commands, completions, and
//! the few calls that go through FastRPC. All fields are little-endian words of fixed size, and
//! none is a pointer.
//!
//! # The ring, one region of shared memory
//!
//! ```text
//! byte 0      header            host: written before START, constant afterwards
//!      128    published         host: commands written so far
//!      256    taken             DSP:  commands read so far
//!      384    completed         DSP:  completions written so far
//!      512    collected         host: completions read so far
//!      640    state             DSP:  PARKED, SERVING or CLOSED
//!      768    wish              host: SERVE or CLOSE
//!      896    progress          DSP:  changes while the DSP executes a list
//!      1024   slots commands of 512 bytes, then slots completions of 128 bytes
//! ```
//!
//! Each counter is the first word of its 128-byte line and wraps at 2³²; slot i mod `slots` holds
//! command i. The writer of a slot publishes it by a release store of its counter, and the reader
//! acquires the counter. Each side checks the other side's values before it uses them: a counter
//! must not be ahead by more than the number of slots, and the buffers that a command names must
//! exist. Both sides continue from the values that the counters have at START, which are 0 in
//! zeroed memory.
//!
//! # A submission
//!
//! One graph split is one submission: commands with the same sequence number, which is larger than
//! all earlier ones. The last command has the flag [`FENCE`]. A [`List`] may replace the commands
//! before the fence. The DSP executes the commands in order and answers the fence with one
//! [`Completion`]. When a command fails, the DSP skips the rest of its submission.
//!
//! # Going idle
//!
//! The host keeps a thread inside [`METHOD_SERVE`]. When the ring has been empty for
//! [`Serve::idle_us`], the DSP stores PARKED, looks at the ring a last time, and returns. The host
//! looks at the state after it has published commands, and calls again if it is PARKED. Both put a
//! full fence between their store and their load, so that at least one of them sees the other's
//! store.
//!
//! When another session or program waits for VTCM, the DSP does the same after the current
//! submission. If the last look finds commands, it returns [`ERROR_LATER`], and the host calls
//! again. If the DSP's system cannot report this, the call returns after 2 ms without a command.

mod call;
mod operation;
mod tensor_op;
mod wide;

use bytemuck::{Pod, Zeroable};

pub use call::*;
pub(crate) use operation::operations;
pub use operation::*;
pub use tensor_op::*;
pub use wide::*;

/// First word of the header: the characters `NPU1`.
pub const MAGIC: u32 = 0x3155_504e;
/// Version of everything in this module.
pub const VERSION: u32 = 14;

/// Byte offset of the host's count of commands written.
pub const PUBLISHED: usize = 128;
/// Byte offset of the DSP's count of commands read.
pub const TAKEN: usize = 256;
/// Byte offset of the DSP's count of completions written.
pub const COMPLETED: usize = 384;
/// Byte offset of the host's count of completions read.
pub const COLLECTED: usize = 512;
/// Byte offset of the DSP's state.
pub const STATE: usize = 640;
/// Byte offset of the word in which the host tells the DSP to serve or to close.
pub const WISH: usize = 768;
/// Byte offset of a word that the DSP changes from time to time while it executes a [`List`].
pub const PROGRESS: usize = 896;
/// Byte offset of the first command.
const SLOTS: usize = 1024;

/// [`STATE`]: the DSP does not read the ring.
pub const STATE_PARKED: u32 = 0;
/// [`STATE`]: a call of [`METHOD_SERVE`] reads the ring.
pub const STATE_SERVING: u32 = 1;
/// [`STATE`]: the session has ended, because the ring was corrupt or the host wished to close.
pub const STATE_CLOSED: u32 = 2;

/// [`WISH`]: read the ring.
pub const WISH_SERVE: u32 = 0;
/// [`WISH`]: return from [`METHOD_SERVE`] after the current command.
pub const WISH_CLOSE: u32 = 1;

/// Maximum number of slots of a ring.
pub const MAX_SLOTS: u32 = 1 << 16;

/// First line of the ring.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct RingHeader {
    /// [`MAGIC`].
    pub magic: u32,
    /// [`VERSION`].
    pub version: u32,
    /// Number of slots for commands, and for completions: a power of two.
    pub slots: u32,
    /// 0.
    pub reserved: u32,
}

/// The byte offsets of a ring's slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLayout {
    slots: u32,
}

impl RingLayout {
    /// Returns the layout of a ring with `slots` slots, or `None` unless that is a power of two of
    /// at most [`MAX_SLOTS`].
    #[must_use]
    pub const fn new(slots: u32) -> Option<Self> {
        if slots.is_power_of_two() && slots <= MAX_SLOTS {
            Some(Self { slots })
        } else {
            None
        }
    }

    /// Returns the number of slots for commands, and for completions.
    #[must_use]
    pub const fn slots(self) -> u32 {
        self.slots
    }

    /// Returns the byte offset of command `index`.
    #[must_use]
    pub const fn command(self, index: u32) -> usize {
        SLOTS + (index & (self.slots - 1)) as usize * size_of::<Command>()
    }

    /// Returns the byte offset of completion `index`.
    #[must_use]
    pub const fn completion(self, index: u32) -> usize {
        SLOTS
            + self.slots as usize * size_of::<Command>()
            + (index & (self.slots - 1)) as usize * size_of::<Completion>()
    }

    /// Returns the size of the region in bytes.
    #[must_use]
    pub const fn bytes(self) -> usize {
        SLOTS + self.slots as usize * (size_of::<Command>() + size_of::<Completion>())
    }
}

/// [`Command::flags`]: answer with a completion when the submission is done.
pub const FENCE: u32 = 1;

/// [`Command::op`]: does nothing but carry a fence; a [`Nop`] body.
pub const OP_NOP: u32 = 0;
/// [`Command::op`]: a [`Map`] body.
pub const OP_MAP: u32 = 1;
/// [`Command::op`]: an [`Unmap`] body.
pub const OP_UNMAP: u32 = 2;
/// [`Command::op`]: a [`MatMul`] body.
pub const OP_MUL_MAT: u32 = 3;
/// [`Command::op`]: a [`MatMulId`] body.
pub const OP_MUL_MAT_ID: u32 = 4;
/// [`Command::op`]: a [`TensorOp`] body.
pub const OP_TENSOR: u32 = 5;
/// [`Command::op`]: an [`Attention`] body.
pub const OP_ATTENTION: u32 = 6;
/// [`Command::op`]: a [`List`] body.
pub const OP_LIST: u32 = 7;
/// [`Command::op`]: a [`WideOp`] body.
pub const OP_WIDE: u32 = 8;

/// Maximum size of a body, bytes.
pub const BODY_BYTES: usize = 496;

/// One command.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Command {
    /// `OP_*`.
    pub op: u32,
    /// [`FENCE`] or 0.
    pub flags: u32,
    /// Number of the submission that the command belongs to.
    pub sequence: u64,
    /// A [`Body`] at the first byte, then zeros.
    pub body: [u8; BODY_BYTES],
}

/// A type that a command has as its body.
pub trait Body: Pod {
    /// The operation whose body it is.
    const OP: u32;
}

impl Command {
    /// Returns a command without flags.
    #[must_use]
    pub fn new<B: Body>(sequence: u64, body: &B) -> Self {
        const { assert!(size_of::<B>() <= BODY_BYTES) };
        let mut command = Self {
            op: B::OP,
            flags: 0,
            sequence,
            body: [0; BODY_BYTES],
        };
        command.body[..size_of::<B>()].copy_from_slice(bytemuck::bytes_of(body));
        command
    }

    /// Returns the body, unchecked; the caller has looked at [`Command::op`].
    #[must_use]
    pub fn body<B: Body>(&self) -> B {
        bytemuck::pod_read_unaligned(&self.body[..size_of::<B>()])
    }
}

/// Maximum number of buffers that are mapped at the same time; their numbers are smaller.
pub const MAX_BUFFERS: u32 = 1024;

/// Makes shared memory visible to the DSP.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Map {
    /// Number by which later commands name the buffer; it must be free.
    pub buffer: u32,
    /// File descriptor of the memory in the host's process.
    pub fd: i32,
    /// Size of the memory.
    pub bytes: u64,
}

/// Unmaps shared memory from the DSP's address space.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Unmap {
    /// Number of the buffer.
    pub buffer: u32,
    /// 0.
    pub reserved: u32,
}

/// Commands in a buffer, so that the host writes a repeated graph only once. Their sequence numbers
/// and flags are 0, and all of them compute: none is an [`OP_MAP`], [`OP_UNMAP`], [`OP_NOP`] or
/// [`OP_LIST`]. [`Completion::command`] counts each of them as if it were in the ring.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct List {
    /// Buffer that holds the commands.
    pub buffer: u32,
    /// Number of commands.
    pub count: u32,
    /// Byte offset of the first command; the next one follows after 512 bytes.
    pub offset: u64,
}

/// Packed weights: `slices[0] · slices[1]` matrices in a row.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Weights {
    /// Buffer that holds the weights.
    pub buffer: u32,
    /// [`crate::layout::LayoutId`].
    pub layout: u32,
    /// Byte offset of the first matrix, a multiple of 128.
    pub offset: u64,
    /// Elements along K.
    pub k: u32,
    /// Columns of the product.
    pub n: u32,
    /// Matrices in ggml's dimensions 2 and 3.
    pub slices: [u32; 2],
}

/// Rows of 4-byte elements: f32, or i32 for the choice of experts. A row has no gaps.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct RowsF32 {
    /// Buffer that holds the rows.
    pub buffer: u32,
    /// 0.
    pub reserved: u32,
    /// Byte offset of the first element, a multiple of 4.
    pub offset: u64,
    /// Bytes from one index to the next in ggml's dimensions 1, 2 and 3; multiples of 4.
    pub strides: [u64; 3],
}

/// An operation on the results of a product before they are written.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Epilogue {
    /// `KERNEL_ADD`, `_SWIGLU`, `_GEGLU`, `_REGLU`, `_GEGLU_ERF` or `_GEGLU_QUICK` of the product
    /// and `other`; 0 for no operation, with zeros in the other fields.
    pub kernel: u32,
    /// 1 if `other` is the first operand, which gates the product; otherwise 0.
    pub swapped: u32,
    /// The other operand: rows of N. It may be the memory of the results.
    pub other: RowsF32,
}

/// `dst[M,N] = act[M,K] · w[K,N]` for each plane of the activations.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct MatMul {
    /// The weights.
    pub weights: Weights,
    /// Activations: rows of K.
    pub act: RowsF32,
    /// Results: rows of N.
    pub dst: RowsF32,
    /// Number of rows of a plane.
    pub m: u32,
    /// Planes in ggml's dimensions 2 and 3: multiples of the weights' slices. Plane i uses slice
    /// i / (planes / slices).
    pub planes: [u32; 2],
    /// The products that dot products compute: a number of [`Dots`](crate::ops::matmul::Dots).
    pub dots: u32,
    /// Allowed only with one plane and one slice.
    pub epilogue: Epilogue,
}

/// `dst[token][slot] = act[token][slot mod act_slots] · w[ids[token][slot]]`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct MatMulId {
    /// The experts' weights, one slice each; `slices[1]` is 1.
    pub weights: Weights,
    /// Activations: dimension 1 counts slots, dimension 2 tokens.
    pub act: RowsF32,
    /// Results: dimension 1 counts slots, dimension 2 tokens.
    pub dst: RowsF32,
    /// Chosen experts, i32: dimension 0 counts slots, dimension 1 tokens.
    pub ids: RowsF32,
    /// Number of experts that a token chooses.
    pub slots: u32,
    /// Slots of the activations: `slots`, or a divisor of it, in which case activations repeat.
    pub act_slots: u32,
    /// Number of tokens.
    pub tokens: u32,
    /// As [`MatMul::dots`], for the rows of each expert.
    pub dots: u32,
}

/// The body of [`OP_NOP`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Nop {
    /// 0.
    pub reserved: u32,
}

macro_rules! bodies {
    ($($body:ident = $op:ident),*) => {
        $(impl Body for $body {
            const OP: u32 = $op;
        })*
    };
}
bodies! {
    Nop = OP_NOP, Map = OP_MAP, Unmap = OP_UNMAP, MatMul = OP_MUL_MAT, MatMulId = OP_MUL_MAT_ID, TensorOp = OP_TENSOR,
    Attention = OP_ATTENTION, List = OP_LIST, WideOp = OP_WIDE
}

/// [`Completion::status`]: all commands were executed.
pub const STATUS_OK: u32 = 0;
/// [`Completion::status`]: a command contradicts itself, or names something that does not exist.
pub const STATUS_BAD_COMMAND: u32 = 1;
/// [`Completion::status`]: shared memory could not be mapped.
pub const STATUS_MAP_FAILED: u32 = 2;
/// [`Completion::status`]: VTCM is too small, or another program holds it.
pub const STATUS_NO_VTCM: u32 = 3;
/// [`Completion::status`]: the stand-in of the matrix unit saw an error that hardware ignores.
pub const STATUS_FAULT: u32 = 4;

/// The answer to a fence.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Completion {
    /// Sequence number of the submission.
    pub sequence: u64,
    /// `STATUS_*` of the first command that failed.
    pub status: u32,
    /// Index of that command in the submission; 0 if none failed.
    pub command: u32,
    /// The number of the command's fault; [`crate::serve`] lists them by status.
    pub detail: u32,
    /// Number of commands that were executed.
    pub done: u32,
    /// Time from the first command to the fence, microseconds.
    pub microseconds: u64,
    /// Packets executed by the serving thread in that time; 0 where they cannot be counted.
    pub packets: u64,
    /// Zeros, so that no other data shares the completion's cache line.
    pub reserved: [u64; 11],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_whole_lines_and_do_not_overlap() {
        assert_eq!((size_of::<Command>(), size_of::<Completion>()), (512, 128));
        let ring = RingLayout::new(4).unwrap();
        assert_eq!(ring.command(0), ring.command(4));
        assert_eq!(ring.command(3) + 512, ring.completion(0));
        assert_eq!(ring.completion(7) + 128, ring.bytes());
        for slots in [0, 3, 2 * MAX_SLOTS] {
            assert_eq!(RingLayout::new(slots), None);
        }
    }

    #[test]
    fn a_body_comes_out_as_it_went_in() {
        let map = Map {
            buffer: 7,
            fd: -1,
            bytes: 1 << 33,
        };
        let command = Command::new(5, &map);
        assert_eq!((command.op, command.sequence), (OP_MAP, 5));
        assert_eq!(command.body::<Map>(), map);
    }
}
