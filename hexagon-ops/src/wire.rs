//! What the two processors say to each other: the ring in shared memory, commands, completions, and the few calls
//! that go through FastRPC. Little-endian words of fixed size; nothing here is a pointer.
//!
//! # The ring, one region of shared memory
//!
//! ```text
//! byte 0      header            written by the host before START, then by nobody
//!      128    published         host: commands written so far
//!      256    taken             DSP:  commands read so far
//!      384    completed         DSP:  completions written so far
//!      512    collected         host: completions read so far
//!      640    state             DSP:  PARKED, SERVING or CLOSED
//!      768    wish              host: SERVE or CLOSE
//!      896    progress          DSP:  changes while a list is worked on
//!      1024   slots commands of 512 bytes, then slots completions of 128 bytes
//! ```
//!
//! Counters run freely modulo 2³² and stand in the first word of their 128-byte line; slot i mod `slots` holds command i. The
//! writer of a slot publishes it by a release store of its counter, the reader acquires. Each side checks what the
//! other wrote before it uses it: a counter may not run ahead of its slots, and what a command names must exist. Both
//! count on from what the counters say at START: zeroed memory starts at 0.
//!
//! # A submission
//!
//! One graph split is one submission: commands with the same sequence number, larger than any before, the last one flagged
//! [`FENCE`]; or a [`List`] of them, and a fence. The DSP works on them in order and answers the fence with one [`Completion`]. After a command that failed,
//! the rest of its submission is skipped.
//!
//! # Going idle
//!
//! The host keeps a thread inside [`METHOD_SERVE`]. When the ring has been empty for the time that was agreed on, the DSP
//! stores PARKED, looks once more, and returns; the host, having published, looks at the state and calls again. Both
//! put a full fence between their store and their load, so that one of them sees the other.

mod call;
mod operation;
mod tensor;

use bytemuck::{Pod, Zeroable};

pub use call::*;
pub(crate) use operation::operations;
pub use operation::*;
pub use tensor::*;

/// First word of the header: "NPU1".
pub const MAGIC: u32 = 0x3155_504e;
/// Version of everything in this module.
pub const VERSION: u32 = 7;

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
/// Byte offset of what the host wishes.
pub const WISH: usize = 768;
/// Byte offset of a word that the DSP changes from time to time while it works on a [`List`].
pub const PROGRESS: usize = 896;
/// Byte offset of the first command.
const SLOTS: usize = 1024;

/// [`STATE`]: nobody reads the ring.
pub const STATE_PARKED: u32 = 0;
/// [`STATE`]: a call of [`METHOD_SERVE`] reads the ring.
pub const STATE_SERVING: u32 = 1;
/// [`STATE`]: the DSP found the ring corrupt, or was asked to close, and will not read it again.
pub const STATE_CLOSED: u32 = 2;

/// [`WISH`]: go on.
pub const WISH_SERVE: u32 = 0;
/// [`WISH`]: return from [`METHOD_SERVE`] after the command at hand.
pub const WISH_CLOSE: u32 = 1;

/// Most slots of a ring.
pub const MAX_SLOTS: u32 = 1 << 16;

/// First line of the ring.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: u32,
    /// [`VERSION`].
    pub version: u32,
    /// Slots for commands, and for completions: a power of two.
    pub slots: u32,
    /// 0.
    pub reserved: u32,
}

/// Where the slots of a ring are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLayout {
    slots: u32,
}

impl RingLayout {
    /// A ring of `slots` slots: a power of two, at most [`MAX_SLOTS`]; `None` otherwise.
    #[must_use]
    pub const fn new(slots: u32) -> Option<Self> {
        if slots.is_power_of_two() && slots <= MAX_SLOTS {
            Some(Self { slots })
        } else {
            None
        }
    }

    /// Slots for commands, and for completions.
    #[must_use]
    pub const fn slots(self) -> u32 {
        self.slots
    }

    /// Byte offset of command `index`.
    #[must_use]
    pub const fn command(self, index: u32) -> usize {
        SLOTS + (index & (self.slots - 1)) as usize * size_of::<Command>()
    }

    /// Byte offset of completion `index`.
    #[must_use]
    pub const fn completion(self, index: u32) -> usize {
        SLOTS
            + self.slots as usize * size_of::<Command>()
            + (index & (self.slots - 1)) as usize * size_of::<Completion>()
    }

    /// Bytes of the region.
    #[must_use]
    pub const fn bytes(self) -> usize {
        SLOTS + self.slots as usize * (size_of::<Command>() + size_of::<Completion>())
    }
}

/// [`Command::flags`]: answer with a completion when everything up to here is done.
pub const FENCE: u32 = 1;

/// [`Command::op`]: nothing; carries a fence.
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

/// Most bytes of what an operation needs.
pub const BODY_BYTES: usize = 496;

/// One command.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Command {
    /// `OP_*`.
    pub op: u32,
    /// [`FENCE`] or 0.
    pub flags: u32,
    /// Number of the submission.
    pub sequence: u64,
    /// What the operation needs, from the first byte on; zeros behind it.
    pub body: [u8; BODY_BYTES],
}

/// What can stand in the body of a command.
pub trait Body: Pod {
    /// The operation that it belongs to.
    const OP: u32;
}

impl Command {
    /// A command without flags.
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

    /// The body as what [`Command::op`] says it is; nothing in it has been checked.
    #[must_use]
    pub fn body<B: Body>(&self) -> B {
        bytemuck::pod_read_unaligned(&self.body[..size_of::<B>()])
    }
}

/// Most buffers that are mapped at a time; their numbers are below it.
pub const MAX_BUFFERS: u32 = 1024;

/// Makes shared memory visible to the DSP.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Map {
    /// Number that later commands name it by; must be free.
    pub buffer: u32,
    /// File descriptor of the memory in the host's process.
    pub fd: i32,
    /// Its size.
    pub bytes: u64,
}

/// Takes shared memory out of the DSP's address space.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Unmap {
    /// Its number.
    pub buffer: u32,
    /// 0.
    pub reserved: u32,
}

/// Commands that lie in a buffer, so that a graph that comes again is written once. Their sequence numbers and flags are
/// 0, they compute (none is an [`OP_MAP`], [`OP_UNMAP`], [`OP_NOP`] or [`OP_LIST`]), and each counts in
/// [`Completion::command`] as if it stood in the ring in place of this one.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct List {
    /// Buffer that they are in.
    pub buffer: u32,
    /// How many there are.
    pub count: u32,
    /// Byte offset of the first one; the next follows 512 bytes later.
    pub offset: u64,
}

/// Packed weights: `slices[0] · slices[1]` matrices, one after another.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Weights {
    /// Buffer that they are in.
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

/// Elements of 4 bytes in rows: f32, or i32 for the choice of experts. Elements of a row follow one another.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Plain {
    /// Buffer that they are in.
    pub buffer: u32,
    /// 0.
    pub reserved: u32,
    /// Byte offset of the first element, a multiple of 4.
    pub offset: u64,
    /// Bytes from one index to the next in ggml's dimensions 1, 2 and 3; multiples of 4.
    pub strides: [u64; 3],
}

/// What is done with the results of a product before they are written.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Epilogue {
    /// `KERNEL_ADD`, `_SWIGLU`, `_GEGLU`, `_REGLU`, `_GEGLU_ERF` or `_GEGLU_QUICK` of the product and `other`; 0: nothing, and
    /// zeros below.
    pub kernel: u32,
    /// 1 if `other` is the first operand, which gates the product; else 0.
    pub swapped: u32,
    /// The other operand: rows of N, or the memory of the results itself.
    pub other: Plain,
}

/// `dst[M,N] = act[M,K] · w[K,N]` for each plane of the activations.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct MatMul {
    /// The weights.
    pub weights: Weights,
    /// Activations: rows of K.
    pub act: Plain,
    /// Results: rows of N.
    pub dst: Plain,
    /// Rows of a plane.
    pub m: u32,
    /// Planes in ggml's dimensions 2 and 3: multiples of the weights' slices. Plane i uses slice i / (planes / slices).
    pub planes: [u32; 2],
    /// Most rows that go through dot products with quantized activations, not more than `DOT_ROWS`; more rows go through
    /// the matrix unit, and so do all of weights that have no dot product.
    pub dot_rows: u32,
    /// Only with one plane and one slice.
    pub epilogue: Epilogue,
}

/// `dst[token][slot] = act[token][slot mod act_slots] · w[ids[token][slot]]`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct MatMulId {
    /// The experts' weights, one slice each; `slices[1]` is 1.
    pub weights: Weights,
    /// Activations: dimension 1 counts slots, dimension 2 tokens.
    pub act: Plain,
    /// Results: dimension 1 counts slots, dimension 2 tokens.
    pub dst: Plain,
    /// Chosen experts, i32: dimension 0 counts slots, dimension 1 tokens.
    pub ids: Plain,
    /// Experts that a token chooses.
    pub slots: u32,
    /// Slots that the activations have: `slots`, or a divisor of it whose activations are used again.
    pub act_slots: u32,
    /// Tokens.
    pub tokens: u32,
    /// As in [`MatMul`], of the rows of each expert.
    pub dot_rows: u32,
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
    Attention = OP_ATTENTION, List = OP_LIST
}

/// [`Completion::status`]: all commands were carried out.
pub const STATUS_OK: u32 = 0;
/// [`Completion::status`]: a command contradicts itself, or names what does not exist.
pub const STATUS_BAD_COMMAND: u32 = 1;
/// [`Completion::status`]: shared memory could not be mapped.
pub const STATUS_MAP_FAILED: u32 = 2;
/// [`Completion::status`]: VTCM is too small or taken by somebody else.
pub const STATUS_NO_VTCM: u32 = 3;
/// [`Completion::status`]: the matrix unit's stand-in saw what hardware would let pass in silence.
pub const STATUS_FAULT: u32 = 4;

/// The answer to a fence.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Completion {
    /// Sequence number of the submission.
    pub sequence: u64,
    /// `STATUS_*` of the first command that failed.
    pub status: u32,
    /// Its place in the submission; 0 if all is well.
    pub command: u32,
    /// What is wrong with it, a number whose meaning is the status's: see [`crate::serve`].
    pub detail: u32,
    /// Commands that were carried out.
    pub done: u32,
    /// Time from the first command to the fence, microseconds.
    pub microseconds: u64,
    /// Packets executed by the serving thread in that time; 0 where they cannot be counted.
    pub packets: u64,
    /// Zeros: a completion is a line of its own, since the two processors' caches meet at lines.
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
