//! Cuts a product into tasks inside of the [envelope](super::envelope).
//!
//! ```text
//! INT8 to INT32: lines, in place               the others: columns, each tile a cube of its own
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
//! copied.

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
    arithmetic: Arithmetic,
    m: usize,
    k: usize,
    n: usize,
    /// Tasks are parts of native A and C, not cubes.
    in_lines: bool,
    row_step: usize,
    column_step: usize,
}

/// Rows that tasks compute together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowTile {
    /// The first of them.
    pub first: usize,
    /// Their number.
    pub rows: usize,
    /// Rows that A and C have where the tasks find them.
    pub all_rows: usize,
    /// Bytes of A before their first one.
    pub a: usize,
    /// Bytes of C before their first one.
    pub c: usize,
}

impl Plan {
    /// Cuts a product of `[m, k, n]` with native operands.
    ///
    /// # Errors
    /// The rule that no cut can keep: K too long, or K or N no multiple of what a tile has.
    pub fn new(arithmetic: Arithmetic, [m, k, n]: [usize; 3]) -> Result<Self, Outside> {
        let layout = arithmetic.layout;
        let in_lines = (layout.a.elem, layout.c.elem) == (Elem::I8, Elem::I32);
        let refuse = |rule, have, limit| Err(Outside { rule, have, limit });
        let k_max = if in_lines {
            K_MAX_OF_LINE
        } else {
            envelope::k_max_of_column(layout.a.elem)
        };
        if !(1..=k_max).contains(&k) {
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
        let (row_step, column_step) = if in_lines {
            steps_of_lines(m, k, n)
        } else {
            steps_of_columns(arithmetic, [m, k, n])
        };
        Ok(Self {
            arithmetic,
            m,
            k,
            n,
            in_lines,
            row_step,
            column_step,
        })
    }

    /// Returns `true` if tasks read native A and write native C where they are; else
    /// [`Self::row_tiles`] are cubes, which the caller fills and empties.
    #[must_use]
    pub fn is_in_place(&self) -> bool {
        self.in_lines || self.row_step == self.m
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
            // Cubes before this one are whole.
            RowTile {
                first,
                rows,
                all_rows: rows.next_multiple_of(4),
                a: layout.a.bytes(first, self.k),
                c: layout.c.bytes(first, self.n),
            }
        })
    }

    /// Returns the bytes of native A, B and C.
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
        [layout.a.bytes(rows, self.k), layout.c.bytes(rows, self.n)]
    }

    /// Copies the rows of native A into its cubes. Rows that fill a cube up keep what they have.
    ///
    /// # Panics
    /// If a length is not that of the layout or of [`Self::cube_bytes`].
    pub fn fill_cubes(&self, native: &[u8], cubes: &mut [u8]) {
        let bytes = self.arithmetic.layout.a.bytes(self.m, self.k);
        assert_eq!(native.len(), bytes, "native A");
        assert_eq!(cubes.len(), self.cube_bytes()[0], "cubes of A");
        let surfaces = bytes / (ATOM_BYTES * self.m);
        for tile in self.row_tiles() {
            for surface in 0..surfaces {
                let from = ATOM_BYTES * (surface * self.m + tile.first);
                let to = tile.a + ATOM_BYTES * surface * tile.all_rows;
                let bytes = ATOM_BYTES * tile.rows;
                cubes[to..][..bytes].copy_from_slice(&native[from..][..bytes]);
            }
        }
    }

    /// Copies the rows of the cubes of C into native C.
    ///
    /// # Panics
    /// If a length is not that of the layout or of [`Self::cube_bytes`].
    pub fn empty_cubes(&self, cubes: &[u8], native: &mut [u8]) {
        let bytes = self.arithmetic.layout.c.bytes(self.m, self.n);
        assert_eq!(native.len(), bytes, "native C");
        assert_eq!(cubes.len(), self.cube_bytes()[1], "cubes of C");
        let surfaces = bytes / (ATOM_BYTES * self.m);
        for tile in self.row_tiles() {
            for surface in 0..surfaces {
                let from = tile.c + ATOM_BYTES * surface * tile.all_rows;
                let to = ATOM_BYTES * (surface * self.m + tile.first);
                let bytes = ATOM_BYTES * tile.rows;
                native[to..][..bytes].copy_from_slice(&cubes[from..][..bytes]);
            }
        }
    }

    /// Returns the number of tasks.
    #[must_use]
    pub fn task_count(&self) -> usize {
        self.m.div_ceil(self.row_step) * self.n.div_ceil(self.column_step)
    }

    /// Returns the tasks, for operands at these device addresses: A and C native, or their cubes.
    ///
    /// The addresses of the operands' ends fit into 32 bits.
    pub fn tasks(self, [a, b, c]: [u32; 3]) -> impl Iterator<Item = Task> {
        let layout = self.arithmetic.layout;
        self.row_tiles().flat_map(move |tile| {
            (0..self.n).step_by(self.column_step).map(move |first| {
                let rows = if self.in_lines {
                    tile.rows
                } else {
                    tile.all_rows
                };
                Task {
                    arithmetic: self.arithmetic,
                    family: match (self.in_lines, rows == tile.all_rows) {
                        (false, _) => Family::Column,
                        (true, true) => Family::Line,
                        (true, false) => Family::Part,
                    },
                    rows,
                    all_rows: tile.all_rows,
                    k: self.k,
                    columns: self.column_step.min(self.n - first),
                    all_columns: self.n,
                    a: at(a, tile.a),
                    b: at(b, layout.b.bytes(self.k, first)),
                    c: at(c, tile.c + first / layout.c.t * ATOM_BYTES * tile.all_rows),
                }
            })
        })
    }
}

/// Returns the address of a byte.
fn at(start: u32, offset: usize) -> u32 {
    // The caller has made sure that this does not wrap.
    start.wrapping_add(u32::try_from(offset).unwrap_or(u32::MAX))
}

/// Returns the rows and columns of INT8 lines.
fn steps_of_lines(m: usize, k: usize, n: usize) -> (usize, usize) {
    let rows = (FEATURE_BANKS_OF_LINE * BANK_BYTES / k).min(ROWS_OF_LINE);
    // Boards have seen multiples of 4 more often.
    let rows = if m <= rows { m } else { rows / 4 * 4 };
    (rows, COLUMNS_OF_LINE.min(n))
}

/// Returns the rows and columns of a column's tasks: those that make the fewest, and of these the
/// ones with most rows, because weights are read once for each tile of rows.
fn steps_of_columns(arithmetic: Arithmetic, [m, k, n]: [usize; 3]) -> (usize, usize) {
    let group = arithmetic.layout.b.gn;
    let kernel = arithmetic.operand_bytes(k);
    let all_rows = m.next_multiple_of(4);
    let mut best = (usize::MAX, 0, 0);
    for columns in (group..=COLUMNS_OF_COLUMN.min(n)).step_by(group) {
        // INT8 features get one bank more (`Task::banks`).
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
