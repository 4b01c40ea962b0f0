//! Divides a result among the threads of an engine: by rows, or by ranges of columns where rows are
//! few and long.
//!
//! ```text
//! one thread                    all rows in order, without a list of tasks
//! at least a row for each task  parts of rows that follow each other in memory
//! fewer rows than tasks         parts of the columns of each row, if the kernel allows it
//! rows that numbers name        parts that have as many of the named rows each
//! ```
//!
//! Starting a step costs packets, too, so a task gets at least [`TASK_PACKETS`]. Kernels compute
//! their packets from the counts of whole operations (tests/packets.txt), and only if there are
//! several threads.

use super::{CHUNK, Chunks, Row, ViewMut};
use crate::hvx;
use crate::rt::Engine;

/// Most tasks of a step.
const MAX_TASKS: usize = 8;

/// Fewest packets of a task. Work of less than twice as many stays on the calling thread: an
/// addition of fewer than 8,000 elements, an exponential of fewer than 1,000.
///
/// A step of n tasks takes the calling thread less than the n - 1 tasks that it hands over: the
/// list of tasks, the hand-over, and a pause of each side in which it does not look. tests/qemu
/// counts the packets (`a_step_takes_less_than_the_tasks_that_it_hands_over`).
pub const TASK_PACKETS: usize = 600;

/// Packets for a row, without its elements.
const ROW_PACKETS: usize = 200;

/// Packets for 32 elements that are moved or converted.
pub const MOVE: usize = 3;
/// Packets for 32 elements that are added, multiplied or compared.
pub const ARITHMETIC: usize = 4;
/// Packets for 32 elements of a function like the exponential.
pub const FUNCTION: usize = 32;
/// Packets for 32 elements that are computed one by one.
pub const SCALAR: usize = 640;

/// The number of columns of a task is a multiple of this: whole lines of f16 and f32, whole chunks,
/// blocks and super-blocks, and whole groups of three and four vectors. So each element is computed
/// by the same code as in a whole row.
const COLUMNS: usize = 3 * CHUNK;

/// Returns the packets of a row of `elems` elements, or the largest number.
///
/// - `packets`: for 32 elements
#[must_use]
pub fn row_packets(elems: usize, packets: usize) -> usize {
    (elems.div_ceil(32).saturating_mul(packets)).saturating_add(ROW_PACKETS)
}

/// The tasks of a step.
type Tasks<'a> = [Option<ViewMut<'a>>; MAX_TASKS];

/// Returns the number of tasks for some packets, at least 1.
fn n_tasks(engine: &Engine, packets: usize) -> usize {
    let most = engine.threads().min(MAX_TASKS);
    match packets / TASK_PACKETS {
        0 => 1,
        enough => enough.min(most),
    }
}

/// Returns the sizes of `n` parts of `count`, which differ by one at most.
fn parts(count: usize, n: usize) -> impl Iterator<Item = usize> {
    let (each, more) = (count / n, count % n);
    (0..n).map(move |i| each + usize::from(i < more))
}

impl<'a> ViewMut<'a> {
    /// Runs `run` on parts of the rows of this tensor, at most one for each thread of the engine.
    ///
    /// - `packets`: of a row
    #[inline(always)]
    pub fn for_parts(
        mut self,
        engine: &Engine,
        packets: impl FnOnce() -> usize,
        run: impl Fn(&mut ViewMut<'_>) + Sync,
    ) {
        if engine.threads() == 1 {
            return run(&mut self);
        }
        let n = n_tasks(engine, self.rows.len().saturating_mul(packets()));
        self.for_tasks(engine, |whole, tasks| whole.cut_rows(n, tasks), run);
    }

    /// Does the same as [`Self::for_parts`], and cuts the columns if there are few rows. The kernel
    /// computes elements that do not depend on others, and finds their columns by [`Row::first`].
    #[inline(always)]
    pub fn for_column_parts(
        mut self,
        engine: &Engine,
        packets: impl FnOnce() -> usize,
        run: impl Fn(&mut ViewMut<'_>) + Sync,
    ) {
        if engine.threads() == 1 {
            return run(&mut self);
        }
        let n = n_tasks(engine, self.rows.len().saturating_mul(packets()));
        self.for_tasks(engine, |whole, tasks| whole.cut_columns(n, tasks), run);
    }

    /// Runs `run` on parts of this tensor, for a kernel that writes some rows and leaves out those
    /// that are not in its part. If the places of the rows ascend, even with one jump back, each
    /// part has about equally many of them.
    ///
    /// - `work`: returns the packets of all written rows, and their number
    /// - `place`: returns the indices of a written row
    #[inline(always)]
    pub fn for_named_parts(
        mut self,
        engine: &Engine,
        work: impl FnOnce() -> (usize, usize),
        place: impl Fn(usize) -> [usize; 3],
        run: impl Fn(&mut ViewMut<'_>) + Sync,
    ) {
        if engine.threads() == 1 {
            return run(&mut self);
        }
        let (packets, count) = work();
        let n = n_tasks(engine, packets).min(count.max(1));
        let mut ends = [usize::MAX; MAX_TASKS];
        let mut first = 0;
        for (end, part) in ends.iter_mut().zip(parts(count, n)).take(n - 1) {
            first += part;
            *end = self.number(place(first));
        }
        let ends = &mut ends[..n];
        ends.sort_unstable();
        self.for_tasks(engine, |whole, tasks| whole.cut_at(ends, tasks), run);
    }

    /// Runs `run` on the tasks that `cut` makes; it returns their number.
    #[inline(never)]
    fn for_tasks(
        self,
        engine: &Engine,
        cut: impl FnOnce(Self, &mut Tasks<'a>) -> usize,
        run: impl Fn(&mut ViewMut<'_>) + Sync,
    ) {
        let mut tasks: Tasks<'a> = [const { None }; MAX_TASKS];
        let n = cut(self, &mut tasks);
        engine.step(None, &mut tasks[..n], |task| {
            task.iter_mut().for_each(&run);
        });
    }

    /// Cuts the rows into at most `n` parts, and returns their number.
    fn cut_rows(mut self, n: usize, tasks: &mut Tasks<'a>) -> usize {
        let count = self.rows.len();
        let n = n.min(count);
        if n <= 1 {
            tasks[0] = Some(self);
            return 1;
        }
        for (task, count) in tasks.iter_mut().zip(parts(count, n)) {
            *task = Some(self.split_off(count));
        }
        n
    }

    /// Cuts the rows into at most `n` parts, or the columns of each if there are fewer rows;
    /// returns the number of parts.
    #[inline(never)]
    fn cut_columns(mut self, n: usize, tasks: &mut Tasks<'a>) -> usize {
        let n_rows = self.rows.len();
        let units = self.shape.ne[0].div_ceil(COLUMNS);
        if n_rows == 0 || 2 * n_rows > n || units == 1 || !self.shape.has_dense_rows() {
            return self.cut_rows(n, tasks);
        }
        let per_row = units.min(n / n_rows);
        let mut rest = tasks.iter_mut();
        for _ in 0..n_rows {
            let mut row = self.split_off(1);
            // `parts` comes first, because `zip` takes one extra item from its first iterator.
            for (units, task) in parts(units, per_row).zip(rest.by_ref()) {
                *task = Some(row.split_columns(units * COLUMNS));
            }
        }
        n_rows * per_row
    }

    /// Cuts the rows before those with the numbers `ends`, which ascend; the last one is the end.
    /// Returns the number of parts.
    #[inline(never)]
    fn cut_at(mut self, ends: &[usize], tasks: &mut Tasks<'a>) -> usize {
        if ends.len() == 1 {
            tasks[0] = Some(self);
            return 1;
        }
        for (task, end) in tasks.iter_mut().zip(ends) {
            let count = end.saturating_sub(self.rows.start).min(self.rows.len());
            *task = Some(self.split_off(count));
        }
        ends.len()
    }

    /// Splits off the first `count` rows.
    fn split_off(&mut self, count: usize) -> Self {
        let middle = (self.rows.start + count).min(self.rows.end);
        let first = self.rows.start..middle;
        self.rows.start = middle;
        let at = if self.rows.is_empty() {
            self.base + self.bytes.len()
        } else {
            self.shape.row(self.place(middle))
        };
        let bytes = core::mem::take(&mut self.bytes);
        let (head, tail) = bytes.split_at_mut((at - self.base).min(bytes.len()));
        let base = self.base;
        (self.bytes, self.base) = (tail, at);
        Self {
            bytes: head,
            shape: self.shape,
            base,
            order: self.order,
            rows: first,
            first: self.first,
        }
    }

    /// Splits off the first `count` columns of a single row without gaps inside, or all columns.
    /// The rest may be empty, and is not used then.
    fn split_columns(&mut self, count: usize) -> Self {
        let (block, size) = (self.shape.dtype.block(), self.shape.dtype.block_bytes());
        let count = count.min(self.shape.ne[0]);
        let middle = (count >> block.trailing_zeros()) * size;
        let bytes = core::mem::take(&mut self.bytes);
        let (head, tail) = bytes.split_at_mut(middle.min(bytes.len()));
        let mut shape = self.shape;
        shape.ne[0] = count;
        let first = self.first;
        self.bytes = tail;
        self.shape.ne[0] -= count;
        self.first += count;
        Self {
            bytes: head,
            shape,
            base: self.base,
            order: self.order,
            rows: self.rows.clone(),
            first,
        }
    }

    /// Runs `run` on every row, several rows at a time, with the chunks of the row's task.
    ///
    /// - `packets`: of a row
    #[inline(always)]
    pub fn for_rows_with_chunks(
        self,
        engine: &Engine,
        packets: impl FnOnce() -> usize,
        run: impl Fn(Row<'_>, &mut Chunks) + Sync,
    ) {
        self.for_parts(engine, packets, |part| each_row_with_chunks(part, &run));
    }

    /// Does the same as [`Self::for_rows_with_chunks`] on parts of rows, as
    /// [`Self::for_column_parts`].
    #[inline(always)]
    pub fn for_row_parts_with_chunks(
        self,
        engine: &Engine,
        packets: impl FnOnce() -> usize,
        run: impl Fn(Row<'_>, &mut Chunks) + Sync,
    ) {
        self.for_column_parts(engine, packets, |part| each_row_with_chunks(part, &run));
    }

    /// Runs `run` on every row, several rows at a time.
    ///
    /// - `packets`: of a row
    #[inline(always)]
    pub fn for_rows(
        self,
        engine: &Engine,
        packets: impl FnOnce() -> usize,
        run: impl Fn(Row<'_>) + Sync,
    ) {
        self.for_parts(engine, packets, |part| part.for_each_row(&run));
    }

    /// Runs `run` on every row or on parts of rows, as [`Self::for_column_parts`].
    #[inline(always)]
    pub fn for_row_parts(
        self,
        engine: &Engine,
        packets: impl FnOnce() -> usize,
        run: impl Fn(Row<'_>) + Sync,
    ) {
        self.for_column_parts(engine, packets, |part| part.for_each_row(&run));
    }
}

/// Calls `run` with each row of a part, and with chunks that they share.
#[inline(always)]
fn each_row_with_chunks(part: &mut ViewMut<'_>, run: impl Fn(Row<'_>, &mut Chunks)) {
    let mut memory = hvx::zeros::<{ 4 * CHUNK / 32 }>();
    let chunks = bytemuck::cast_mut(&mut memory);
    part.for_each_row(|row| run(row, chunks));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_that_no_word_can_count_are_the_largest_number() {
        assert_eq!(row_packets(33, 4), ROW_PACKETS + 8);
        assert_eq!(row_packets(1 << 20, usize::MAX / 2), usize::MAX);
    }
}
