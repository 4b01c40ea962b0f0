//! Command streams for the NPU of an RK3588: the words that the vendor's library generates
//! internally, generated here.
//!
//! ```text
//! C[M,N] = A[M,K] * B[K,N]
//!    |
//! [tile]      cuts it into tasks, each within the limits that are known to run on boards
//! [cube]      copies operands and results that tasks cannot reach where they are
//! [envelope]  has these limits, and refuses other tasks with the rule that they break
//! [task]      one task: a convolution with a kernel of 1 x 1, as the values of all registers
//! [register]  the registers; a word writes one of them: target << 48 | value << 16 | offset
//! ```
//!
//! A task's features are A, its kernels are the columns of B, its results are C, all in the layouts
//! of [`crate::layout`]. The rows of A are positions of a picture of W x H:
//!
//! | family | W x H | A and C | used for |
//! |---|---|---|---|
//! | [`Family::Column`] | 1 x m | native, of m rows | all arithmetics |
//! | [`Family::Line`] | m x 1 | native, of m rows | INT8 |
//! | [`Family::Part`] | m x 1 | native, m of more rows | INT8 |
//! | [`Family::RowMajor`] | 1 x m | rows of K, rows of N | INT8; [`Plan`] makes none |
//!
//! Registers keep their values from job to job, also those of other processes, so a stream writes
//! all of them.
//!
//! Nothing here has run on a board. The streams run on the emulated NPU of `tests/vendor/rockchip`,
//! which also executes the streams of the vendor's library for FP16 and INT8.
//!
//! SOURCE: for the meaning of registers, src/gallium/drivers/rocket/registers.xml of Mesa 25.3
//! (MIT). For values, the public notes of gregordinary (rockchip-npu-notes, CC-BY-4.0), mtx512 and
//! happyme531, whose programs compute right products on boards; where they leave a choice, all of
//! them agree with the values here.

mod cube;
mod envelope;
mod register;
mod task;
mod tile;

use crate::ffi::MatmulType;
use crate::layout::{Elem, MatmulLayout, Soc};

pub use envelope::{Outside, Rule};
pub use task::{BODY_WORDS, Banks, Family, STREAM_WORDS, Task};
pub use tile::{Plan, RowTile};

/// Bytes of an atom: the data of one position in one surface of features or results.
// SOURCE: FEATURE_ATOMIC_SIZE, rkt_task.c of Mesa 25.3.
pub const ATOM_BYTES: usize = 16;

/// The kinds of numbers that a product has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arithmetic {
    /// Layouts of operands and results.
    pub layout: MatmulLayout,
}

impl Arithmetic {
    /// Returns the arithmetic of a matmul type; `None` where no stream is known to compute it.
    #[must_use]
    pub fn of(matmul_type: MatmulType) -> Option<Self> {
        let known = matches!(
            matmul_type,
            MatmulType::F16_F16_F32
                | MatmulType::F16_F16_F16
                | MatmulType::I8_I8_I32
                | MatmulType::I8_I8_F32
                | MatmulType::I4_I4_I16
        );
        let layout = MatmulLayout::of(Soc::Rk3588, matmul_type).filter(|_| known)?;
        Some(Self { layout })
    }

    /// Returns the hardware's code of the operands.
    fn operand_code(self) -> u32 {
        precision_code(self.layout.a.elem)
    }

    /// Returns the hardware's code of the results.
    fn result_code(self) -> u32 {
        precision_code(self.layout.c.elem)
    }

    /// Returns the bytes of `k` elements of an operand.
    fn operand_bytes(self, k: usize) -> usize {
        self.layout.a.elem.bytes(k)
    }

    /// Returns the surfaces of results that a group of kernels fills.
    fn surfaces(self) -> usize {
        self.layout.b.gn / self.layout.c.t
    }
}

/// Returns the code of a kind of numbers in IN_PRECISION, PROC_PRECISION and OUT_PRECISION.
// SOURCE: gregordinary's notes on the encodings: int8 0, int16 1, fp16 2, int32 4, fp32 5, int4 6.
const fn precision_code(elem: Elem) -> u32 {
    match elem {
        Elem::I8 => 0,
        Elem::I16 => 1,
        Elem::F16 => 2,
        Elem::I32 => 4,
        Elem::F32 => 5,
        Elem::I4 => 6,
    }
}
