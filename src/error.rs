//! The one error type. Variants carry the values that the reader needs; messages start lower-case
//! and end without a period.

use std::io;
use std::path::PathBuf;

use hexagon_ops::serve;

/// Result of everything that can fail in this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Errors that the caller could not know in advance.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An environment variable has a value that is not understood.
    #[error("{variable}={value:?} is not understood: {reason}; allowed: {allowed}")]
    Config {
        /// The variable's name.
        variable: &'static str,
        /// The variable's value.
        value: String,
        /// Reason why the value is invalid.
        reason: String,
        /// The values that are allowed.
        allowed: String,
    },
    /// The vendor's library, or a function of it, is not there.
    #[error("cannot load {library}: {reason}")]
    Library {
        /// Name or path of the library.
        library: PathBuf,
        /// The loader's message.
        reason: String,
    },
    /// An NPU cannot be driven without the vendor's library.
    #[error("cannot drive the NPU without librknnrt: {reason}")]
    Direct {
        /// The text about the missing part.
        reason: String,
    },
    /// A stand-in for a vendor's library cannot start.
    #[error("cannot start the stand-in of {library}: {reason}")]
    StandIn {
        /// The vendor's library.
        library: &'static str,
        /// The stand-in's words.
        reason: String,
    },
    /// A device's threads cannot start.
    #[error("cannot start the threads of {device}: {source}")]
    Thread {
        /// The device's name.
        device: String,
        /// The system's message.
        source: io::Error,
    },
    /// The file of `GGML_RUST_NPU_TRACE` cannot be written.
    #[error("GGML_RUST_NPU_TRACE: cannot write {path}: {source}")]
    TraceFile {
        /// The file.
        path: PathBuf,
        /// The system's message.
        source: io::Error,
    },
    /// The NPU, or the code that runs on it, is of a generation that does not fit.
    #[error("{what} is {have}; needed: {want}")]
    Architecture {
        /// The NPU, or the library that it runs.
        what: &'static str,
        /// The actual generation.
        have: String,
        /// The generations that fit.
        want: String,
    },
    /// The vendor's library is older than the oldest one whose structures are known.
    #[error("{library} has version {have:?}, at least {want} is needed")]
    Version {
        /// The library's name.
        library: &'static str,
        /// The version string that it gave.
        have: String,
        /// The oldest one that works.
        want: String,
    },
    /// Another process has not given its turn back, or no node of the NPU can be opened.
    #[error("the NPU cannot be used now: {path}: {reason}")]
    Busy {
        /// The node that is locked.
        path: PathBuf,
        /// The process that has it, or the system's message.
        reason: String,
    },
    /// A call into the vendor's library failed.
    #[error("{call} returned {code} ({name}) for {what}")]
    Vendor {
        /// The function.
        call: &'static str,
        /// The function's return value.
        code: i32,
        /// The vendor's name for that value.
        name: &'static str,
        /// Shape, type and core of the call.
        what: String,
    },
    /// A call into the vendor's library failed before anything ran, with a code that may mean a
    /// lack of memory.
    #[error("{call} returned {code} ({name}) for {what}, maybe for lack of memory")]
    MaybeShortage {
        /// The function.
        call: &'static str,
        /// The function's return value.
        code: i32,
        /// The vendor's name for that value.
        name: &'static str,
        /// Shape and type of the call.
        what: String,
    },
    /// The vendor's library lays out operands in a way that is not known.
    #[error("{call} lays out {what} as {have}, not as {want}")]
    Geometry {
        /// The function.
        call: &'static str,
        /// The operand, with its shape and type.
        what: String,
        /// The library's dimensions and bytes.
        have: String,
        /// The expected ones.
        want: String,
    },
    /// A call into FastRPC failed.
    #[error("{call} failed for {what}: {reason}")]
    FastRpc {
        /// The function.
        call: &'static str,
        /// Name and meaning of the return value.
        reason: String,
        /// Purpose of the call.
        what: String,
    },
    /// The DSP refused a command, or its answer is impossible.
    #[error("the DSP failed: {reason}")]
    Dsp {
        /// The DSP's reason, or the mistake in its answer.
        reason: String,
    },
    /// There was no room for a buffer in the DSP's address space, or the system had none for
    /// mapping it.
    #[error("a buffer cannot be mapped: {reason}")]
    NotMapped {
        /// The answer of the DSP or of the call.
        reason: String,
    },
    /// The DSP executed a command and reports a failure.
    #[error("the DSP failed: {}", serve::describe(.0.status, .0.detail))]
    Command(serve::Failure),
    /// The DSP did not answer.
    #[error("the DSP has not answered for {seconds} s")]
    Timeout {
        /// Longest time for a command.
        seconds: f64,
    },
    /// Device memory could not be had.
    #[error("{call} gave no memory for {bytes} bytes")]
    OutOfMemory {
        /// The function that returned NULL.
        call: &'static str,
        /// The requested size.
        bytes: usize,
    },
    /// An address space of the NPU is full, or too small.
    #[error("{space} has no room for {bytes} bytes")]
    AddressSpace {
        /// The address space.
        space: &'static str,
        /// The requested size.
        bytes: u64,
    },
    /// Device memory ran out while the weights of a model were placed in a buffer.
    #[error(
        "no room for it after {placed} weights with {bytes} bytes in its buffer: {shortage}; fewer layers on the device \
         (-ngl) or a smaller model take less"
    )]
    WeightsLost {
        /// Weights in the buffer that have room.
        placed: usize,
        /// The packed bytes of these weights.
        bytes: usize,
        /// The error of the call.
        shortage: Box<Error>,
    },
    /// The packed form of a weight ends after its buffer.
    #[error("{tensor} takes {need} bytes packed, and its buffer has {have} for it")]
    NoRoom {
        /// Name of the tensor.
        tensor: String,
        /// Bytes of its packed form.
        need: usize,
        /// Bytes from its start to the buffer's end.
        have: usize,
    },
    /// The bytes that a weight was written with are not there any more.
    #[error(
        "{tensor} cannot be {action}: its bytes were released when it was packed, GGML_RUST_NPU_KEEP=on keeps them"
    )]
    Released {
        /// Name of the requested tensor.
        tensor: String,
        /// Attempted action.
        action: &'static str,
    },
    /// Allocating device memory or a context failed, and too few file descriptors are left, of
    /// which each needs some.
    #[error(
        "{call} gave no {what}: too few of the {limit} file descriptors that the process may have are left, see ulimit -n"
    )]
    OutOfDescriptors {
        /// The function that failed.
        call: &'static str,
        /// The requested memory or context, with its size.
        what: String,
        /// Descriptors that the process may have.
        limit: u64,
    },
    /// The device computed something else than the reference in the test at its start.
    #[error("self-test {test}: error {have:.3e} is over {limit:.3e} (normalized mean square)")]
    SelfTest {
        /// Type and shape of the failed multiplication.
        test: String,
        /// The error measured.
        have: f64,
        /// The error allowed.
        limit: f64,
    },
    /// The device computed a shape of the model wrong at its first use.
    #[error("{wrong} of {sums} sums of {what} are not the CPU's, at the first use of this shape")]
    WrongSums {
        /// The shape and its type.
        what: String,
        /// Sums that were wrong.
        wrong: usize,
        /// Sums that were compared.
        sums: usize,
    },
    /// An earlier error put the device out of use.
    #[error("{device} is out of use since an earlier error: {cause}")]
    DeviceLost {
        /// The device's name.
        device: String,
        /// Text of that error.
        cause: String,
    },
    /// ggml passed a node that the planner never accepted, or that contradicts itself.
    #[error("cannot be computed: {reason}")]
    Graph {
        /// The contradiction.
        reason: String,
    },
}

impl Error {
    /// Returns `true` if a resource ran out that may be free again later.
    #[must_use]
    pub fn is_shortage(&self) -> bool {
        match self {
            Self::OutOfMemory { .. }
            | Self::OutOfDescriptors { .. }
            | Self::AddressSpace { .. }
            | Self::MaybeShortage { .. } => true,
            // librknnrt returns this code if it has no room to bind memory or to create a context.
            Self::Vendor { code, .. } => *code == rknpu_ops::ffi::code::MALLOC_FAIL,
            _ => false,
        }
    }

    /// Returns `true` if the device computed something, but not the requested result.
    #[must_use]
    pub fn is_wrong_sum(&self) -> bool {
        matches!(self, Self::WrongSums { .. })
    }

    /// Returns `true` if the library has no multiplication of this shape: it may have those of
    /// others.
    // SOURCE: librknnrt 2.3.2 has the text "need kernel tile for M…, but not support kernel tile
    // currently!".
    #[must_use]
    pub fn is_of_shape(&self) -> bool {
        match self {
            Self::Geometry { .. } => true,
            Self::Vendor { call, code, .. } => {
                *call == "rknn_matmul_create" && *code == rknpu_ops::ffi::code::PARAM_INVALID
            }
            _ => false,
        }
    }
}
