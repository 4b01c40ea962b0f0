//! The details of a status, and their meanings in English.

use core::fmt;

use crate::error::Error;
use crate::hmx::Fault;
use crate::rt::memory::BindError;
use crate::wire::{STATUS_BAD_COMMAND, STATUS_FAULT, STATUS_MAP_FAILED, STATUS_NO_VTCM, STATUS_OK};

/// The reason why a command was not executed: `wire::STATUS_*` and the detail of that status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// `wire::STATUS_*`.
    pub status: u32,
    /// One of the constants of this module, or a size for `STATUS_NO_VTCM`.
    pub detail: u32,
}

/// Declares the details of [`STATUS_BAD_COMMAND`] and the table of their texts.
macro_rules! bad_commands {
    ($($name:ident = $value:literal, $text:literal;)*) => {
        $(#[doc = concat!("[`STATUS_BAD_COMMAND`]: ", $text, ".")]
        pub const $name: u32 = $value;)*
        const BAD_COMMANDS: &[(u32, &str)] = &[$(($value, $text)),*];
    };
}

bad_commands! {
    OPERATION = 1, "unknown operation";
    FLAGS = 2, "unknown flags";
    RESERVED = 3, "a reserved field is not zero";
    SEQUENCE = 4, "the sequence number is not that of the submission, or not larger than the last one's";
    NUMBER = 5, "a buffer's number is too large";
    UNMAPPED = 6, "no buffer has this number";
    TAKEN = 7, "another buffer has this number";
    LAYOUT = 8, "unknown weight layout: host and DSP library do not match";
    SHAPE = 9, "a dimension is zero, too large, or not made of whole blocks";
    PLANES = 10, "the planes are not a multiple of the weights' slices";
    ALIGNMENT = 11, "an offset, stride or size is not aligned";
    BOUNDS = 12, "an operand or result does not lie in its buffer";
    OVERLAP = 13, "results overlap an operand";
    ROWS = 14, "rows of results overlap each other";
    SLOTS = 15, "the activations' slots do not divide the experts of a token, or these are too many";
    EXPERT = 16, "a chosen expert does not exist";
    KERNEL = 17, "a kernel refused its arguments";
    KERNEL_NUMBER = 18, "unknown kernel on tensors";
    TYPE = 19, "unknown type of a tensor";
    OPERAND = 20, "an operand is missing, or its type, shape, strides or parameters are not those of the kernel";
    ROW = 21, "a row that is named does not exist";
    DOTS = 22, "unknown choice of products for dot products";
}

/// [`STATUS_MAP_FAILED`]: the size is zero or larger than the DSP can address.
pub const MAP_SIZE: u32 = 1;
/// [`STATUS_MAP_FAILED`]: the DSP's address space is full.
pub const MAP_FULL: u32 = 2;
/// [`STATUS_MAP_FAILED`]: the operating system of the DSP refused.
pub const MAP_REFUSED: u32 = 3;

/// [`STATUS_FAULT`]: an operand of the matrix unit is outside VTCM.
pub const FAULT_OUTSIDE_VTCM: u32 = 1;
/// [`STATUS_FAULT`]: a multiply has no or too many tiles.
pub const FAULT_DEEP: u32 = 2;
/// [`STATUS_FAULT`]: a result left FP16's range.
pub const FAULT_OVERFLOW: u32 = 3;
/// [`STATUS_FAULT`]: the DMA engine did not finish a copy.
pub const FAULT_DMA: u32 = 4;
/// [`STATUS_FAULT`]: a store of a matrix unit without scales has one.
pub const FAULT_CONTROL: u32 = 5;
/// [`STATUS_FAULT`]: the chip has no matrix unit.
pub const FAULT_MISSING: u32 = 6;

impl Failure {
    /// Returns the failure of a command that contradicts itself, or names something that does not
    /// exist.
    pub(super) const fn bad(detail: u32) -> Self {
        Self {
            status: STATUS_BAD_COMMAND,
            detail,
        }
    }

    /// Returns the failure of a hardware unit.
    pub(super) const fn fault(detail: u32) -> Self {
        Self {
            status: STATUS_FAULT,
            detail,
        }
    }

    /// Returns the failure of a mapping.
    pub(super) const fn map(detail: u32) -> Self {
        Self {
            status: STATUS_MAP_FAILED,
            detail,
        }
    }
}

impl From<BindError> for Failure {
    fn from(error: BindError) -> Self {
        Self::bad(match error {
            BindError::Number => NUMBER,
            BindError::Unmapped => UNMAPPED,
            BindError::Taken => TAKEN,
            BindError::Bounds => BOUNDS,
            BindError::Overlap => OVERLAP,
        })
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::VtcmFull { need_bytes, .. } => Self {
                status: STATUS_NO_VTCM,
                detail: u32::try_from(need_bytes.div_ceil(1024)).unwrap_or(u32::MAX),
            },
            Error::Fault(fault) => Self::fault(match fault {
                Fault::OutsideVtcm => FAULT_OUTSIDE_VTCM,
                Fault::Deep { .. } => FAULT_DEEP,
                Fault::Overflow => FAULT_OVERFLOW,
                Fault::Control => FAULT_CONTROL,
                Fault::Missing => FAULT_MISSING,
            }),
            Error::Index { what: "expert", .. } => Self::bad(EXPERT),
            Error::Index { what: "row", .. } => Self::bad(ROW),
            Error::Operand => Self::bad(OPERAND),
            _ => Self::bad(KERNEL),
        }
    }
}

/// Returns `true` if a failure concerns only the values of one submission, or a lack of memory. The
/// session and its mapped buffers are unchanged then. Other failures mean that host and DSP
/// disagree about the protocol.
#[must_use]
pub const fn is_passing(status: u32, detail: u32) -> bool {
    match status {
        STATUS_MAP_FAILED | STATUS_NO_VTCM => true,
        STATUS_BAD_COMMAND => matches!(detail, EXPERT | ROW),
        STATUS_FAULT => detail == FAULT_OVERFLOW,
        _ => false,
    }
}

/// The status of a completion as a text for users.
#[derive(Clone, Copy, Debug)]
pub struct Described(Failure);

/// Returns the meaning of `status` and `detail` of a completion.
#[must_use]
pub const fn describe(status: u32, detail: u32) -> Described {
    Described(Failure { status, detail })
}

impl fmt::Display for Described {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure { status, detail } = self.0;
        let known = |text: Option<&'static str>| text.unwrap_or("unknown detail");
        match status {
            STATUS_OK => f.write_str("carried out"),
            STATUS_BAD_COMMAND => {
                let text = BAD_COMMANDS.iter().find(|entry| entry.0 == detail);
                write!(f, "bad command ({detail}): {}", known(text.map(|t| t.1)))
            }
            STATUS_MAP_FAILED => {
                let text = match detail {
                    MAP_SIZE => Some("the size is zero or larger than the DSP can address"),
                    MAP_FULL => Some("the DSP's address space is full"),
                    MAP_REFUSED => Some("the DSP's operating system refused"),
                    _ => None,
                };
                write!(f, "memory was not mapped ({detail}): {}", known(text))
            }
            STATUS_NO_VTCM => write!(f, "{detail} KiB of VTCM are needed, and there is less"),
            STATUS_FAULT => {
                let (unit, text) = match detail {
                    FAULT_OUTSIDE_VTCM => ("matrix unit", "an operand lies outside VTCM"),
                    FAULT_DEEP => ("matrix unit", "a multiply has no or too many tiles"),
                    FAULT_OVERFLOW => ("matrix unit", "a result left FP16's range"),
                    FAULT_CONTROL => ("matrix unit", "a store of a unit without scales has one"),
                    FAULT_MISSING => ("matrix unit", "the chip has none"),
                    FAULT_DMA => ("DMA engine", "a copy did not finish"),
                    _ => ("hardware unit", "unknown detail"),
                };
                write!(f, "{unit} ({detail}): {text}")
            }
            _ => write!(f, "unknown status {status} ({detail})"),
        }
    }
}
