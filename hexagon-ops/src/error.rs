//! Errors of this crate: what a caller could not know before asking.

use crate::hmx::Fault;
use crate::layout::WeightType;

/// Why a layout, a plan or a kernel refused its arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// `k` does not consist of whole blocks of 32.
    #[error("{weight:?} weights need k to be a positive multiple of 32, have {k}")]
    BadShape {
        /// Type of the weights.
        weight: WeightType,
        /// Elements along K.
        k: usize,
    },
    /// A tile or column index lies outside the matrix.
    #[error("{what} {index} is out of range, limit {limit}")]
    Index {
        /// What the index counts.
        what: &'static str,
        /// The index asked for.
        index: usize,
        /// One more than the largest allowed index.
        limit: usize,
    },
    /// A byte or element slice is shorter or longer than the layout says.
    #[error("{what} has length {have}, want {want}")]
    Length {
        /// Which argument.
        what: &'static str,
        /// Its length.
        have: usize,
        /// The length it must have.
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
        /// What was being placed.
        what: &'static str,
        /// Bytes asked for.
        need_bytes: usize,
        /// Bytes left in the arena.
        have_bytes: usize,
    },
    /// The matrix unit's stand-in saw what hardware would have let pass.
    #[error("matrix unit: {0:?}")]
    Fault(Fault),
    /// An operand of a kernel on tensors is missing, or has a type, shape or strides that the kernel does not take.
    #[error("an operand is missing, or its type, shape or strides are not those of a kernel")]
    Operand,
    /// A data type has no kernel of the kind asked for.
    #[error("{weight:?} weights have no {kernel} kernel")]
    NoKernel {
        /// Type of the weights.
        weight: WeightType,
        /// Kind of kernel.
        kernel: &'static str,
    },
}

/// Result of this crate's fallible functions.
pub type Result<T> = core::result::Result<T, Error>;
