//! Moves of rows at equal distances, which are checked together. Moving a row of a few lines costs
//! a few packets, where a call of `memcpy` costs twenty.

use super::{load, load_bytes, store, store_bytes};
use crate::layout::{LINE_BYTES, Line};

/// Length in bytes of the rows from which `memcpy` is faster, because it aligns its stores. If all
/// lines are aligned, it is not faster.
const LONG: usize = 12 * LINE_BYTES;

/// Rows that are moved.
#[derive(Clone, Copy, Debug)]
pub struct Moved {
    /// Number of rows.
    pub count: usize,
    /// Bytes of a row.
    pub row_bytes: usize,
    /// Bytes from the start of a row of the result to that of the next; not less than a row.
    pub to_stride: usize,
    /// The same for the source.
    pub from_stride: usize,
}

impl Moved {
    /// Returns the bytes from the first row's first to the last row's last at `stride`; `None` if
    /// that overflows, or without rows.
    fn reach(&self, stride: usize) -> Option<usize> {
        let last = self.count.checked_sub(1)?.checked_mul(stride)?;
        last.checked_add(self.row_bytes)
    }
}

/// Moves rows; the first one is at the start of `from` and of `to`. Rows that would end after
/// either slice are left out.
pub fn move_rows(to: &mut [u8], from: &[u8], rows: Moved) {
    let bytes = rows.row_bytes;
    if (rows.to_stride, rows.from_stride) == (bytes, bytes) {
        let all = bytes.saturating_mul(rows.count);
        if let (Some(to), Some(from)) = (to.get_mut(..all), from.get(..all)) {
            to.copy_from_slice(from);
        }
        return;
    }
    let reaches = [rows.reach(rows.to_stride), rows.reach(rows.from_stride)];
    let ends = [to.len(), from.len()];
    let is_inside = (reaches.iter().zip(ends)).all(|(reach, end)| reach.is_some_and(|n| n <= end));
    let places = to.as_ptr().addr() | from.as_ptr().addr() | rows.to_stride | rows.from_stride;
    let is_aligned = places.is_multiple_of(LINE_BYTES);
    let are_words = (places | bytes).is_multiple_of(4);
    // States of a convolution.
    match (bytes, is_inside && are_words) {
        // SAFETY: the last row, and so each one, ends inside both; all are words.
        (8, true) => return unsafe { by_words::<2>(to.as_mut_ptr(), from.as_ptr(), rows) },
        // SAFETY: as above.
        (12, true) => return unsafe { by_words::<3>(to.as_mut_ptr(), from.as_ptr(), rows) },
        _ => {}
    }
    if !is_inside || bytes < LINE_BYTES || bytes >= LONG && !is_aligned {
        for row in 0..rows.count {
            let [to_start, from_start] = [rows.to_stride, rows.from_stride].map(|n| row * n);
            let to = to.get_mut(to_start..to_start + bytes);
            if let (Some(to), Some(from)) = (to, from.get(from_start..from_start + bytes)) {
                to.copy_from_slice(from);
            }
        }
        return;
    }
    // Rows of up to a few lines are moved without a loop over their lines.
    let lines = match bytes.is_multiple_of(LINE_BYTES) {
        true => bytes / LINE_BYTES,
        false => 0,
    };
    // A match instead of a function pointer, because the stack that a library for the DSP needs is
    // computed from its call graph, which indirect calls would hide.
    macro_rules! by {
        ($is_aligned:literal, $lines:literal) => {
            // SAFETY: `is_inside` has checked that the last row, and so every row, ends inside
            // both; alignment and number of lines are those of the rows.
            unsafe { by_lines::<$is_aligned, $lines>(to.as_mut_ptr(), from.as_ptr(), rows) }
        };
    }
    match (is_aligned, lines) {
        (true, 1) => by!(true, 1),
        (true, 2) => by!(true, 2),
        (true, 3) => by!(true, 3),
        (true, 4) => by!(true, 4),
        (true, _) => by!(true, 0),
        (false, 1) => by!(false, 1),
        (false, 2) => by!(false, 2),
        (false, _) => by!(false, 0),
    }
}

/// Moves rows of a few words.
///
/// # Safety
/// - `to` may be written, and `from` read, as far as `rows` reach; they do not overlap.
/// - Both pointers and strides are multiples of 4, and rows have `WORDS` words.
#[inline(never)]
unsafe fn by_words<const WORDS: usize>(to: *mut u8, from: *const u8, rows: Moved) {
    let (mut to, mut from) = (to.cast::<u32>(), from.cast::<u32>());
    let [to_step, from_step] = [rows.to_stride / 4, rows.from_stride / 4];
    for _ in 0..rows.count {
        for i in 0..WORDS {
            // SAFETY: a word of a row of the source.
            let word = unsafe { from.wrapping_add(i).read() };
            // SAFETY: the same word of the result.
            unsafe { to.wrapping_add(i).write(word) };
        }
        (to, from) = (to.wrapping_add(to_step), from.wrapping_add(from_step));
    }
}

/// Moves rows of at least a line.
///
/// # Safety
/// - `to` may be written, and `from` read, as far as `rows` reach; they do not overlap.
/// - If `ALIGNED`, both pointers and strides are multiples of a line.
/// - `LINES` is the number of lines of a row, or 0.
#[inline(never)]
unsafe fn by_lines<const ALIGNED: bool, const LINES: usize>(
    to: *mut u8,
    from: *const u8,
    rows: Moved,
) {
    let whole = match LINES {
        0 => rows.row_bytes / LINE_BYTES,
        lines => lines,
    };
    // Rows that do not end at a line: their last line overlaps the one before it.
    let last = rows.row_bytes - LINE_BYTES;
    let has_rest = LINES == 0 && !rows.row_bytes.is_multiple_of(LINE_BYTES);
    let (mut to, mut from) = (to, from);
    for _ in 0..rows.count {
        let (mut to_line, mut from_line) = (to, from);
        for _ in 0..whole {
            // SAFETY: a line of a row, aligned if all are.
            unsafe { move_line::<ALIGNED>(to_line, from_line) };
            (to_line, from_line) = (
                to_line.wrapping_add(LINE_BYTES),
                from_line.wrapping_add(LINE_BYTES),
            );
        }
        if has_rest {
            let (to, from) = (to.wrapping_add(last), from.wrapping_add(last));
            // SAFETY: the last line of a row.
            unsafe { move_line::<false>(to, from) };
        }
        (to, from) = (
            to.wrapping_add(rows.to_stride),
            from.wrapping_add(rows.from_stride),
        );
    }
}

/// Moves 128 bytes.
///
/// # Safety
/// - `to` may be written and `from` read, 128 bytes each.
/// - If `ALIGNED`, both are multiples of 128.
#[inline(always)]
unsafe fn move_line<const ALIGNED: bool>(to: *mut u8, from: *const u8) {
    if ALIGNED {
        // SAFETY: guaranteed by the caller.
        let from = unsafe { &*from.cast::<Line>() };
        // SAFETY: guaranteed by the caller.
        store(unsafe { &mut *to.cast::<Line>() }, load(from));
    } else {
        // SAFETY: guaranteed by the caller; bytes need no alignment.
        let from = unsafe { &*from.cast::<[u8; LINE_BYTES]>() };
        // SAFETY: as above.
        store_bytes(unsafe { &mut *to.cast() }, load_bytes(from));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_moved_and_nothing_between_them() {
        for (bytes, to_gap, from_gap, count, shift) in [
            (12, 4, 0, 5, 0),
            (12, 0, 2048, 3, 4),
            (12, 4, 0, 5, 2),
            (8, 0, 24, 6, 8),
            (128, 128, 0, 4, 0),
            (384, 128, 256, 5, 0),
            (384, 0, 0, 5, 1),
            (268, 4, 20, 3, 4),
            (200, 56, 56, 1, 0),
            (2000, 48, 0, 3, 8),
            (2048, 128, 0, 3, 0),
        ] {
            let (to_stride, from_stride) = (bytes + to_gap, bytes + from_gap);
            let rows = Moved {
                count,
                row_bytes: bytes,
                to_stride,
                from_stride,
            };
            let from: Vec<Line> = (0..128).map(|i| Line([i; 128])).collect();
            let from: &[u8] = bytemuck::cast_slice(&from);
            let mut lines = vec![Line([0xee; 128]); 128];
            let to: &mut [u8] = bytemuck::cast_slice_mut(&mut lines);
            let mut want = to.to_vec();
            for row in 0..count {
                for i in 0..bytes {
                    want[shift + row * to_stride + i] = from[shift + row * from_stride + i];
                }
            }
            move_rows(&mut to[shift..], &from[shift..], rows);
            assert_eq!(to, want, "{rows:?}");
        }
    }

    #[test]
    fn rows_that_end_after_either_side_are_left_out() {
        let rows = |count| Moved {
            count,
            row_bytes: 128,
            to_stride: 200,
            from_stride: 256,
        };
        let from = vec![1; 512];
        for count in [0, 3, usize::MAX / 64] {
            let mut to = vec![0; 512];
            move_rows(&mut to, &from[..500], rows(count.min(3)));
            let moved = to.iter().filter(|byte| **byte == 1).count();
            assert_eq!(moved, 128 * count.min(2), "{count}");
        }
    }
}
