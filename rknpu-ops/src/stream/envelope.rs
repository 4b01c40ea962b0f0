//! The tasks that are known to run on boards. The registers can describe more tasks, which an
//! emulator computes, but boards return garbage for such a job or never end it.
//!
//! | | [`Family::Column`] | [`Family::Line`], [`Family::Part`] | [`Family::RowMajor`] |
//! |---|---|---|---|
//! | arithmetic | all | INT8 to INT32 | INT8 to INT32 |
//! | rows | ≤ 256, a multiple of 4, and all that A and C have | ≤ 128 | ≤ 128; K > 4096: ≤ 32; 3072 < K < 4096: ≤ 4 |
//! | columns | ≤ 256 | ≤ 3072 | ≤ 3072 |
//! | K | FP16 ≤ 4096, INT8 ≤ 8192, INT4 ≤ 640 | ≤ 8192 | ≤ 6144 |
//! | banks of features | - | ≤ 4 | ≤ 8 |
//! | banks of all | operands fit whole | weights pass through | weights pass through |
//!
//! SOURCE: columns, gregordinary's notes (language models of 3 to 27 billion weights on the
//! vendor's and on Linux's driver). Lines and row-major, happyme531's notes (a language model on
//! the vendor's driver): with 3072 < K < 4096 and more rows a job was refused. INT4 sums saturate
//! in INT16 beyond K = 640 with operands in [-7, 7].

use std::fmt;

use super::task::{BANK_BYTES, BANKS};
use super::{ATOM_BYTES, Family, Task};
use crate::layout::Elem;

/// A rule of the envelope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// The family has run with this arithmetic on a board.
    Arithmetic,
    /// Rows.
    Rows,
    /// Rows of a column are a multiple of 4.
    RowsOfFour,
    /// Rows in memory are those of the task or, for a part, at least as many.
    RowsInMemory,
    /// Columns of B.
    Columns,
    /// Columns of B are whole groups of kernels.
    ColumnsOfGroups,
    /// Columns of C in memory, row by row.
    ColumnsInMemory,
    /// Elements of K.
    K,
    /// Elements of K are a multiple of 32.
    KOfLines,
    /// Banks for features.
    FeatureBanks,
    /// Banks for features and weights.
    Banks,
    /// Addresses are multiples of an atom.
    Address,
}

/// A task, or a product, that is outside of the envelope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outside {
    /// The rule.
    pub rule: Rule,
    /// The requested number.
    pub have: usize,
    /// The largest number that the rule allows, or the number of which `have` must be a multiple.
    pub limit: usize,
}

impl fmt::Display for Outside {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Self { rule, have, limit } = self;
        let what = match rule {
            Rule::Arithmetic => return write!(f, "no board ran this arithmetic in this family"),
            Rule::RowsOfFour => return write!(f, "{have} rows are no multiple of {limit}"),
            Rule::ColumnsOfGroups => return write!(f, "{have} columns are no multiple of {limit}"),
            Rule::KOfLines => return write!(f, "K = {have} is no multiple of {limit}"),
            Rule::Address => return write!(f, "{have:#x} is no multiple of {limit}"),
            Rule::Rows => "rows",
            Rule::RowsInMemory => "rows in memory",
            Rule::Columns => "columns",
            Rule::ColumnsInMemory => "columns in memory",
            Rule::K => "elements of K",
            Rule::FeatureBanks => "banks of features",
            Rule::Banks => "banks",
        };
        write!(
            f,
            "{have} {what} are outside of what ran on boards: {limit}"
        )
    }
}

impl std::error::Error for Outside {}

/// Refuses more than `limit`.
fn at_most(rule: Rule, have: usize, limit: usize) -> Result<(), Outside> {
    if (1..=limit).contains(&have) {
        return Ok(());
    }
    Err(Outside { rule, have, limit })
}

/// Refuses a number that is not a multiple of `step`.
fn multiple(rule: Rule, have: usize, step: usize) -> Result<(), Outside> {
    if have.is_multiple_of(step) {
        return Ok(());
    }
    Err(Outside {
        rule,
        have,
        limit: step,
    })
}

/// Returns the largest K of a column.
pub(super) fn k_max_of_column(operand: Elem) -> usize {
    match operand {
        Elem::I4 => 640,
        Elem::F16 => 4096,
        _ => 8192,
    }
}

/// Largest K of a line.
pub(super) const K_MAX_OF_LINE: usize = 8192;
/// Most banks for the features of a task of the family `Line`.
pub(super) const FEATURE_BANKS_OF_LINE: usize = 4;
/// Most rows of a line.
pub(super) const ROWS_OF_LINE: usize = 128;
/// Most columns of a line.
pub(super) const COLUMNS_OF_LINE: usize = 3072;
/// Most rows of a column.
pub(super) const ROWS_OF_COLUMN: usize = 256;
/// Most columns of B of a task of the family `Column`.
pub(super) const COLUMNS_OF_COLUMN: usize = 256;

impl Task {
    /// Checks that tasks like this one have run on boards.
    ///
    /// # Errors
    /// The first rule that it breaks.
    pub fn check(&self) -> Result<(), Outside> {
        let layout = self.arithmetic.layout;
        multiple(Rule::KOfLines, self.k, layout.k_align)?;
        multiple(Rule::ColumnsOfGroups, self.columns, layout.b.gn)?;
        for address in [self.a, self.b, self.c] {
            // CAST: usize has at least 32 bits.
            multiple(Rule::Address, address as usize, ATOM_BYTES)?;
        }
        match self.family {
            Family::Column => self.check_column(),
            Family::Line | Family::Part => self.check_line(),
            Family::RowMajor => self.check_row_major(),
        }
    }

    fn check_column(&self) -> Result<(), Outside> {
        at_most(Rule::Rows, self.rows, ROWS_OF_COLUMN)?;
        multiple(Rule::RowsOfFour, self.rows, 4)?;
        self.check_rows_in_memory()?;
        at_most(Rule::Columns, self.columns, COLUMNS_OF_COLUMN)?;
        at_most(
            Rule::K,
            self.k,
            k_max_of_column(self.arithmetic.layout.a.elem),
        )?;
        let weights = (self.columns * self.kernel_bytes()).div_ceil(BANK_BYTES);
        at_most(Rule::Banks, self.banks().features + weights, BANKS)
    }

    fn check_line(&self) -> Result<(), Outside> {
        self.check_int8()?;
        at_most(Rule::Rows, self.rows, ROWS_OF_LINE)?;
        if self.family == Family::Line {
            self.check_rows_in_memory()?;
        } else {
            at_most(Rule::RowsInMemory, self.rows, self.all_rows)?;
        }
        at_most(Rule::Columns, self.columns, COLUMNS_OF_LINE)?;
        at_most(Rule::K, self.k, K_MAX_OF_LINE)?;
        at_most(
            Rule::FeatureBanks,
            self.banks().features,
            FEATURE_BANKS_OF_LINE,
        )
    }

    fn check_row_major(&self) -> Result<(), Outside> {
        self.check_int8()?;
        at_most(Rule::K, self.k, 6144)?;
        let rows = match self.k {
            3073..=4095 => 4,
            4097.. => 32,
            _ => 128,
        };
        at_most(Rule::Rows, self.rows, rows)?;
        at_most(Rule::Columns, self.columns, 3072)?;
        // A field of 13 bits holds the number of atoms of a row of C, minus one.
        let atoms = 1 << 13;
        at_most(
            Rule::ColumnsInMemory,
            self.all_columns,
            atoms * self.arithmetic.layout.c.t,
        )?;
        multiple(
            Rule::ColumnsOfGroups,
            self.all_columns,
            self.arithmetic.layout.c.t,
        )?;
        at_most(Rule::FeatureBanks, self.banks().features, 8)
    }

    fn check_int8(&self) -> Result<(), Outside> {
        let layout = self.arithmetic.layout;
        if (layout.a.elem, layout.c.elem) == (Elem::I8, Elem::I32) {
            return Ok(());
        }
        Err(Outside {
            rule: Rule::Arithmetic,
            have: 0,
            limit: 0,
        })
    }

    fn check_rows_in_memory(&self) -> Result<(), Outside> {
        if self.rows == self.all_rows {
            return Ok(());
        }
        Err(Outside {
            rule: Rule::RowsInMemory,
            have: self.all_rows,
            limit: self.rows,
        })
    }
}
