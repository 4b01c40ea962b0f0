//! Cuts a product into tasks inside of the [envelope](super::envelope).
//!
//! ```text
//! INT8 to INT32: lines, in place               the others: columns, each tile a separate cube
//!
//!        n0      n1                                   cube of A       columns      cube of C
//!      +-------+-------+                            +-----------+   n0   n1       +-----------+
//!   r0 |  Part |  Part |  of native A and C      r0 | 4 x rows  |                 | 4 x rows  |
//!      +-------+-------+                            +-----------+                 +-----------+
//!   r1 |  Part |  Part |                         r1 | 4 x rows  |  the last one   | 4 x rows  |
//!      +-------+-------+                            +-----------+  is filled up   +-----------+
//! ```
//!
//! If rows are a multiple of 4 and fit into one tile, native A is the only cube, and nothing is
//! copied ([`super::cube`] has the copies). Row-major A and C are copied into and out of cubes.
//!
//! A longer K than a task may have is cut into passes. Each pass writes separate cubes of C, which
//! are added up when they are copied. Native B is linear along K only within a group of columns, so
//! a task of such a pass has one group.

use std::ops::Range;

use super::envelope::{
    self, COLUMNS_OF_COLUMN, COLUMNS_OF_LINE, FEATURE_BANKS_OF_LINE, K_MAX_OF_LINE, Outside,
    ROWS_OF_COLUMN, ROWS_OF_LINE, Rule,
};
use super::task::{BANK_BYTES, BANKS};
use super::{ATOM_BYTES, Arithmetic, Family, Task};
use crate::layout::Elem;

/// A product, cut into tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    pub(super) arithmetic: Arithmetic,
    pub(super) m: usize,
    pub(super) k: usize,
    pub(super) n: usize,
    /// Tasks are parts of native A and C, not cubes.
    in_lines: bool,
    /// A and C of the caller are row-major.
    pub(super) is_row_major: bool,
    row_step: usize,
    column_step: usize,
    /// Elements of K of a task at most.
    pass_step: usize,
}

/// Rows that tasks compute together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowTile {
    /// The first row.
    pub first: usize,
    /// The number of rows.
    pub rows: usize,
    /// Rows of A and C in the memory that the tasks use.
    pub all_rows: usize,
    /// Bytes of A before the first row of the tile.
    pub a: usize,
    /// Bytes of C before the first row of the tile.
    pub c: usize,
}

impl Plan {
    /// Cuts a product of `[m, k, n]` with native operands.
    ///
    /// # Errors
    /// The rule that no cut can keep: K or N is not a multiple of the layout's unit, or K is too
    /// long for results in FP16, which are not added up.
    pub fn new(arithmetic: Arithmetic, [m, k, n]: [usize; 3]) -> Result<Self, Outside> {
        let layout = arithmetic.layout;
        let in_lines = (layout.a.elem, layout.c.elem) == (Elem::I8, Elem::I32);
        let refuse = |rule, have, limit| Err(Outside { rule, have, limit });
        let k_max = if in_lines {
            K_MAX_OF_LINE
        } else {
            envelope::k_max_of_column(layout.a.elem)
        };
        if k == 0 || k > k_max && layout.c.elem == Elem::F16 {
            return refuse(Rule::K, k, k_max);
        }
        if !k.is_multiple_of(layout.k_align) {
            return refuse(Rule::KOfLines, k, layout.k_align);
        }
        if n == 0 || !n.is_multiple_of(layout.b.gn) {
            return refuse(Rule::ColumnsOfGroups, n, layout.b.gn);
        }
        if m == 0 {
            return refuse(Rule::Rows, m, usize::MAX);
        }
        let piece = k.min(layout.b.split_k);
        let pass_step = k_max.min(piece);
        let columns = if pass_step == piece { n } else { layout.b.gn };
        let (row_step, column_step) = if in_lines {
            steps_of_lines(m, pass_step, columns)
        } else {
            steps_of_columns(arithmetic, [m, pass_step, columns])
        };
        Ok(Self {
            arithmetic,
            m,
            k,
            n,
            in_lines,
            is_row_major: false,
            row_step,
            column_step,
            pass_step,
        })
    }

    /// Returns the same product with row-major A and C, which are copied.
    #[must_use]
    pub fn with_row_major(self) -> Self {
        Self {
            is_row_major: true,
            ..self
        }
    }

    /// Returns the ranges of K that tasks add up.
    fn passes(self) -> impl Iterator<Item = Range<usize>> {
        let piece = self.arithmetic.layout.b.split_k;
        (0..self.k).step_by(piece).flat_map(move |start| {
            let end = self.k.min(start + piece);
            let firsts = (start..end).step_by(self.pass_step);
            firsts.map(move |first| first..end.min(first + self.pass_step))
        })
    }

    pub(super) fn pass_count(&self) -> usize {
        self.passes().count()
    }

    /// Returns `true` if tasks read native A and write native C where they are; else
    /// [`Self::row_tiles`] are cubes, which the caller fills and empties.
    #[must_use]
    pub fn is_in_place(&self) -> bool {
        let is_one_cube = self.in_lines || self.row_step == self.m;
        is_one_cube && !self.is_row_major && self.pass_count() == 1
    }

    /// Returns the tiles of rows, from the first row to the last.
    pub fn row_tiles(self) -> impl Iterator<Item = RowTile> {
        let layout = self.arithmetic.layout;
        (0..self.m).step_by(self.row_step).map(move |first| {
            let rows = self.row_step.min(self.m - first);
            if self.in_lines {
                return RowTile {
                    first,
                    rows,
                    all_rows: self.m,
                    a: first * ATOM_BYTES,
                    c: first * ATOM_BYTES,
                };
            }
            // All tiles before this one are whole.
            RowTile {
                first,
                rows,
                all_rows: rows.next_multiple_of(4),
                a: layout.a.bytes(first, self.k),
                c: layout.c.bytes(first, self.n),
            }
        })
    }

    /// Returns the bytes of A, B and C; row-major operands have as many as native ones.
    #[must_use]
    pub fn native_bytes(&self) -> [usize; 3] {
        let layout = self.arithmetic.layout;
        [
            layout.a.bytes(self.m, self.k),
            layout.b.bytes(self.k, self.n),
            layout.c.bytes(self.m, self.n),
        ]
    }

    /// Returns the bytes that the cubes of A and those of C have.
    #[must_use]
    pub fn cube_bytes(&self) -> [usize; 2] {
        let rows = self.m.next_multiple_of(4);
        let layout = self.arithmetic.layout;
        let pass = self.c_bytes_of_pass();
        [layout.a.bytes(rows, self.k), self.pass_count() * pass]
    }

    /// Returns the bytes that the cubes of C of a pass have.
    pub(super) fn c_bytes_of_pass(&self) -> usize {
        let rows = self.m.next_multiple_of(4);
        self.arithmetic.layout.c.bytes(rows, self.n)
    }

    /// Returns the number of tasks.
    #[must_use]
    pub fn task_count(&self) -> usize {
        self.pass_count() * self.m.div_ceil(self.row_step) * self.n.div_ceil(self.column_step)
    }

    /// Returns the tasks, for operands at these device addresses: A and C native, or their cubes.
    ///
    /// The addresses of the operands' ends fit into 32 bits.
    pub fn tasks(self, addresses: [u32; 3]) -> impl Iterator<Item = Task> {
        self.passes().enumerate().flat_map(move |(pass, range)| {
            let c = pass * self.c_bytes_of_pass();
            self.row_tiles().flat_map(move |tile| {
                let range = range.clone();
                (0..self.n)
                    .step_by(self.column_step)
                    .map(move |first| self.task(addresses, c, range.clone(), tile, first))
            })
        })
    }

    /// Returns the task of a tile that starts at column `first`.
    fn task(
        self,
        [a, b, c]: [u32; 3],
        c_of_pass: usize,
        range: Range<usize>,
        tile: RowTile,
        first: usize,
    ) -> Task {
        let layout = self.arithmetic.layout;
        let rows = if self.in_lines {
            tile.rows
        } else {
            tile.all_rows
        };
        let surfaces = range.start / layout.a.s;
        let element_of_b = layout.b.index(range.start, first, self.k, self.n);
        Task {
            arithmetic: self.arithmetic,
            family: match (self.in_lines, rows == tile.all_rows) {
                (false, _) => Family::Column,
                (true, true) => Family::Line,
                (true, false) => Family::Part,
            },
            rows,
            all_rows: tile.all_rows,
            k: range.len(),
            columns: self.column_step.min(self.n - first),
            all_columns: self.n,
            a: at(a, tile.a + surfaces * tile.all_rows * ATOM_BYTES),
            b: at(b, layout.b.elem.bytes(element_of_b)),
            c: at(
                c,
                c_of_pass + tile.c + first / layout.c.t * ATOM_BYTES * tile.all_rows,
            ),
        }
    }
}

/// Returns the address of a byte.
fn at(start: u32, offset: usize) -> u32 {
    // The caller has checked that this does not wrap.
    start.wrapping_add(u32::try_from(offset).unwrap_or(u32::MAX))
}

/// Returns the rows and columns of INT8 lines.
fn steps_of_lines(m: usize, k: usize, n: usize) -> (usize, usize) {
    let rows = (FEATURE_BANKS_OF_LINE * BANK_BYTES / k).min(ROWS_OF_LINE);
    // A multiple of 4, because boards have run more of those.
    let rows = if m <= rows { m } else { rows / 4 * 4 };
    (rows, COLUMNS_OF_LINE.min(n))
}

/// Returns the rows and columns of a column's tasks: those with the fewest tasks, and of these the
/// ones with the most rows, because weights are read once for each tile of rows.
fn steps_of_columns(arithmetic: Arithmetic, [m, k, n]: [usize; 3]) -> (usize, usize) {
    let group = arithmetic.layout.b.gn;
    let kernel = arithmetic.operand_bytes(k);
    let all_rows = m.next_multiple_of(4);
    let mut best = (usize::MAX, 0, 0);
    for columns in (group..=COLUMNS_OF_COLUMN.min(n)).step_by(group) {
        // INT8 features need one more bank (`Task::banks`).
        let beyond = usize::from(arithmetic.layout.a.elem == Elem::I8);
        let taken = (columns * kernel).div_ceil(BANK_BYTES) + beyond;
        let rows = BANKS.saturating_sub(taken) * BANK_BYTES / kernel;
        let rows = rows.min(ROWS_OF_COLUMN).min(all_rows) / 4 * 4;
        if rows == 0 {
            break;
        }
        let tasks = all_rows.div_ceil(rows) * n.div_ceil(columns);
        if (tasks, usize::MAX - rows) < (best.0, usize::MAX - best.1) {
            best = (tasks, rows, columns);
        }
    }
    (best.1, best.2)
}
