//! One task: the values of all registers.
//!
//! ```text
//! stream   = body, tail
//! body     = a word for each register, and one without effect where their number is odd
//! tail     = next stream's address, next stream's amount (0 ends), order, start
//! ```

use super::envelope::Outside;
use super::register::{self, *};
use super::{ATOM_BYTES, Arithmetic};
use crate::layout::Elem;

/// Banks of a core's buffer for operands, and bytes of a bank.
// SOURCE: CBUF_BANK_SIZE and CBUF_BANKS, rkt_ml.h of Mesa 25.3.
pub(super) const BANKS: usize = 12;
pub(super) const BANK_BYTES: usize = 32 * 1024;

/// Registers whose value depends on the task.
const VALUES: usize = 52;

/// Words of a stream without its tail.
pub const BODY_WORDS: usize = (VALUES + register::ZEROS).next_multiple_of(2);

/// Words of the tail.
// SOURCE: RKNPU_PC_DATA_EXTRA_AMOUNT, drivers/rknpu/include/rknpu_ioctl.h of Rockchip's kernel.
const TAIL_WORDS: usize = 4;

/// Words of a stream; all streams have the same number.
pub const STREAM_WORDS: usize = BODY_WORDS + TAIL_WORDS;

/// The amount that the tail of a stream names for the next stream.
// SOURCE: the formula of both kernels for the first stream: (body + tail + 1) / 2 - 1 pairs of
// words (rknpu_job.c of Rockchip's kernel, rocket_job.c of Linux).
#[expect(
    clippy::cast_possible_truncation,
    reason = "a body has some hundred words"
)]
const AMOUNT: u32 = (BODY_WORDS / 2 + 1) as u32;

/// GROUP_LINE_OFF of CNA_CONV_CON1: lines are fetched one by one, not in groups of four packed
/// ones.
const GROUP_LINE_OFF: u32 = 1 << 29;

/// Shape of the rows of A and C to a task. The [module](super) has the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Positions in a column; A and C native.
    Column,
    /// Positions in a line; A and C native.
    Line,
    /// Positions in a line; some rows of native A and C.
    Part,
    /// Positions in a column; A and C row by row.
    RowMajor,
}

/// Banks of a core's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Banks {
    /// For features.
    pub features: usize,
    /// For weights.
    pub weights: usize,
}

/// A product, or a part of one, as the NPU computes it at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Task {
    /// Kinds of numbers.
    pub arithmetic: Arithmetic,
    /// Shape of A and C.
    pub family: Family,
    /// Rows of A and C that it computes.
    pub rows: usize,
    /// Rows that A and C have in memory.
    pub all_rows: usize,
    /// Elements of K.
    pub k: usize,
    /// Columns of B and C that it computes.
    pub columns: usize,
    /// Columns that C has in memory.
    pub all_columns: usize,
    /// Device address of the first of its rows of A.
    pub a: u32,
    /// Device address of the first of its columns of B.
    pub b: u32,
    /// Device address of the first of its results.
    pub c: u32,
}

impl Task {
    /// Returns the numbers of banks for its operands.
    ///
    /// For INT8 in a column, one more bank than the features need, because the reader reads beyond
    /// the last one.
    // SOURCE: gregordinary's notes: INT8 products such as M = 144, K = 672 have garbage in their
    // last rows, unless features get one more bank. FP16, and pictures of more than one column, do
    // not need it.
    #[must_use]
    pub fn banks(&self) -> Banks {
        let reads_beyond = self.family == Family::Column && self.arithmetic.operand_bytes(2) == 2;
        let features = self.feature_bytes().div_ceil(BANK_BYTES) + usize::from(reads_beyond);
        Banks {
            features,
            weights: BANKS.saturating_sub(features),
        }
    }

    /// Returns the bytes of the features.
    pub(super) fn feature_bytes(&self) -> usize {
        self.rows * self.kernel_bytes()
    }

    /// Returns the bytes of one kernel.
    pub(super) fn kernel_bytes(&self) -> usize {
        self.arithmetic.operand_bytes(self.k)
    }

    /// Appends the task's stream, which has [`STREAM_WORDS`] words, to `words`.
    ///
    /// - `next`: the device address of the stream after it, which is a multiple of 16
    ///
    /// # Errors
    /// The rule that the task breaks; then `words` is unchanged.
    pub fn stream(&self, next: Option<u32>, words: &mut Vec<u64>) -> Result<(), Outside> {
        self.check()?;
        self.unproven_stream(next, words);
        Ok(())
    }

    /// Appends its stream to `words`, as [`Self::stream`] does, without a check: for questions to a
    /// board.
    ///
    /// # Panics
    /// If a size does not fit into its register.
    pub(crate) fn unproven_stream(&self, next: Option<u32>, words: &mut Vec<u64>) {
        let start = words.len();
        words.extend(self.values().map(|(register, value)| register.word(value)));
        words.extend(register::zeros().map(|register| register.word(0)));
        words.resize(start + BODY_WORDS, 0);
        let (address, amount) = match next {
            Some(address) => (PC_BASE_ADDRESS.word(address & !0xf), AMOUNT),
            None => (0, 0),
        };
        words.extend([address, PC_REGISTER_AMOUNTS.word(amount), ORDER, START]);
    }

    /// Returns width and height of the picture.
    fn picture(&self) -> [usize; 2] {
        match self.family {
            Family::Column | Family::RowMajor => [1, self.rows],
            Family::Line | Family::Part => [self.rows, 1],
        }
    }

    /// Returns the lines of features that are fetched before the first product.
    // SOURCE: gregordinary's notes for a column (m + 1). happyme531's for a line (2) and for
    // row-major features (as many lines as 64 KiB hold, made even).
    fn grains(&self) -> usize {
        match self.family {
            Family::Column => self.rows + 1,
            Family::Line | Family::Part => 2,
            Family::RowMajor => {
                let lines = (2 * BANK_BYTES).div_ceil(self.k).next_multiple_of(2);
                lines.min(self.rows + 1)
            }
        }
    }

    /// Returns the atoms from line to line of the features, and from the end of a surface's first
    /// group of lines to the next surface. Without GROUP_LINE_OFF a group has four lines, with it
    /// one.
    fn feature_strides(&self) -> [i64; 2] {
        let [rows, all_rows] = [self.rows, self.all_rows].map(|rows| rows as i64);
        match self.family {
            Family::Column => [4, rows - 4],
            // A single line has no next one, so any value would do; boards have run this one.
            Family::Line => [0x200, -3 * rows],
            Family::Part => [all_rows, all_rows - rows],
            Family::RowMajor => [(self.kernel_bytes() / ATOM_BYTES) as i64, 0],
        }
    }

    /// Returns the bytes from surface to surface of the results, and the atoms that are skipped
    /// after each line.
    fn result_strides(&self) -> [usize; 2] {
        match self.family {
            Family::Column | Family::Line | Family::Part => [ATOM_BYTES * self.all_rows, 0],
            Family::RowMajor => {
                let atoms = self.all_columns / self.arithmetic.layout.c.t;
                [ATOM_BYTES, atoms - 1]
            }
        }
    }

    fn values(&self) -> [(Register, u32); VALUES] {
        let [width, height] = self.picture().map(number);
        let [line, surface] = self.feature_strides().map(stride);
        let [result_surface, notch] = self.result_strides().map(number);
        let (k, n) = (number(self.k), number(self.columns));
        let kernel = number(self.kernel_bytes());
        let banks = self.banks();
        let operand = self.arithmetic.operand_code();
        let result = self.arithmetic.result_code();
        let surfaces = number(self.arithmetic.surfaces());
        let to_half = self.arithmetic.layout.c.elem == Elem::F16;
        let lines = match self.family {
            Family::Column | Family::Line => 0,
            Family::Part | Family::RowMajor => GROUP_LINE_OFF,
        };
        let size = width << 16 | height;
        let size_less_one = (height - 1) << 16 | (width - 1);
        let size_e = surfaces - 1;
        [
            (CNA_CONV_CON1, lines | operand << 7 | operand << 4),
            (CNA_CONV_CON2, number(self.grains()) << 4),
            (CNA_CONV_CON3, 1 << 3 | 1),
            (CNA_DATA_SIZE0, size),
            (CNA_DATA_SIZE1, (k - 1) << 16 | k),
            (CNA_DATA_SIZE2, width),
            (CNA_DATA_SIZE3, width * height),
            (CNA_WEIGHT_SIZE0, n * kernel),
            (CNA_WEIGHT_SIZE1, kernel),
            (CNA_WEIGHT_SIZE2, 1 << 24 | 1 << 16 | n),
            (
                CNA_CBUF_CON0,
                number(banks.weights) << 4 | number(banks.features),
            ),
            // SOURCE: rkt_task.c of Mesa 25.3: an entry is 64 bytes of a line.
            (CNA_CBUF_CON1, (width * kernel).div_ceil(64)),
            (CNA_CVT_CON0, 0xb),
            (CNA_CVT_CON1, 1 << 16),
            (CNA_CVT_CON2, 1 << 16),
            (CNA_CVT_CON3, 1 << 16),
            (CNA_CVT_CON4, 1 << 16),
            (CNA_FEATURE_DATA_ADDR, self.a),
            (CNA_DMA_CON0, 15 << 16 | 15),
            (CNA_DMA_CON1, line),
            (CNA_DMA_CON2, surface),
            (CNA_FC_DATA_SIZE0, size),
            (CNA_FC_DATA_SIZE1, k),
            (CNA_DCOMP_ADDR0, self.b),
            (CORE_MISC_CFG, operand << 8),
            (CORE_DATAOUT_SIZE_0, size_less_one),
            (CORE_DATAOUT_SIZE_1, n - 1),
            (DPU_S_POINTER, 0xe),
            (DPU_FEATURE_MODE_CFG, 15 << 5 | 2 << 1),
            (DPU_DATA_FORMAT, result << 29 | operand << 26 | operand),
            (DPU_DST_BASE_ADDR, self.c),
            (DPU_DST_SURF_STRIDE, result_surface),
            (DPU_DATA_CUBE_WIDTH, width - 1),
            (DPU_DATA_CUBE_HEIGHT, height - 1),
            (DPU_DATA_CUBE_NOTCH_ADDR, notch << 16 | notch),
            (DPU_DATA_CUBE_CHANNEL, (n - 1) << 16 | (n - 1)),
            (DPU_BS_CFG, 0x53),
            (
                DPU_BS_OW_CFG,
                size_e << 8 | size_e << 5 | size_e << 2 | 1 << 1,
            ),
            (DPU_WDMA_SIZE_0, n - 1),
            (DPU_WDMA_SIZE_1, size_less_one),
            (DPU_BN_CFG, 0x53),
            (DPU_EW_CFG, 0x383),
            (DPU_EW_CVT_SCALE_VALUE, 1),
            (DPU_OUT_CVT_SCALE, if to_half { 1 << 16 | 1 } else { 1 }),
            (DPU_SURFACE_ADD, result_surface * surfaces),
            (RDMA_S_POINTER, 0xe),
            (RDMA_DATA_CUBE_WIDTH, width - 1),
            (RDMA_DATA_CUBE_HEIGHT, height - 1),
            (RDMA_DATA_CUBE_CHANNEL, n - 1),
            (RDMA_ERDMA_CFG, 1),
            // Bit 4 disables the reader. SOURCE: gregordinary's notes: if it is not set, the job
            // never ends.
            (RDMA_FEATURE_MODE_CFG, if to_half { 0x7818 } else { 0x7810 }),
            (RDMA_WEIGHT, 0x0101_0101),
        ]
    }
}

/// Returns a size as a register's value.
fn number(size: usize) -> u32 {
    // PANIC: `check` has refused sizes that do not fit.
    u32::try_from(size).expect("a size inside of the envelope")
}

/// Returns a stride as a register's 28 bits.
fn stride(atoms: i64) -> u32 {
    let [b0, b1, b2, b3, ..] = atoms.to_le_bytes();
    u32::from_le_bytes([b0, b1, b2, b3]) & 0xfff_ffff
}
