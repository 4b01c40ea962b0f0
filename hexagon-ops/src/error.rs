//! Errors of this crate: conditions that a caller could not know in advance.

use crate::hmx::Fault;
use crate::layout::WeightType;

/// Reason why a layout, a plan or a kernel refused its arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// `k` does not consist of whole blocks.
    #[error("{weight} weights need k to be a positive multiple of {}, have {k}", .weight.block_elems())]
    BadShape {
        /// Type of the weights.
        weight: WeightType,
        /// Elements along K.
        k: usize,
    },
    /// A tile or column index is outside the matrix.
    #[error("{what} {index} is out of range, limit {limit}")]
    Index {
        /// Name of the counted thing.
        what: &'static str,
        /// The requested index.
        index: usize,
        /// One more than the largest allowed index.
        limit: usize,
    },
    /// A byte or element slice is shorter or longer than the layout requires.
    #[error("{what} has length {have}, want {want}")]
    Length {
        /// Name of the argument.
        what: &'static str,
        /// The actual length.
        have: usize,
        /// The required length.
        want: usize,
    },
    /// Two rows of results share elements.
    #[error("rows of results overlap: they start at {first} and {second} and have {row} elements")]
    Overlap {
        /// Start of one row, in elements.
        first: usize,
        /// Start of the other.
        second: usize,
        /// Elements of a row.
        row: usize,
    },
    /// A plan does not fit in vector tightly coupled memory (VTCM).
    #[error("{what} needs {need_bytes} bytes of VTCM, {have_bytes} are left")]
    VtcmFull {
        /// Name of the part that was being placed.
        what: &'static str,
        /// Requested bytes.
        need_bytes: usize,
        /// Bytes that are still free.
        have_bytes: usize,
    },
    /// The matrix unit's stand-in saw a violation that hardware would not report.
    #[error("matrix unit: {0}")]
    Fault(Fault),
    /// An operand of a kernel on tensors is missing, or has a type, shape or strides that the
    /// kernel does not accept.
    #[error("an operand is missing, or its type, shape or strides are not those of a kernel")]
    Operand,
    /// A data type has no kernel of the requested kind.
    #[error("{weight} weights have no {kernel} kernel")]
    NoKernel {
        /// Type of the weights.
        weight: WeightType,
        /// Kind of kernel.
        kernel: &'static str,
    },
}

/// Result of this crate's fallible functions.
pub type Result<T> = core::result::Result<T, Error>;
