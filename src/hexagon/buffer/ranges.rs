//! Sets of bytes of a buffer.

use std::collections::BTreeMap;
use std::ops::Range;

/// Ranges of bytes. Ranges that touch are stored as one.
#[derive(Debug, Default)]
pub(in crate::hexagon) struct Ranges(BTreeMap<usize, usize>);

impl Ranges {
    pub(in crate::hexagon) fn insert(&mut self, range: Range<usize>) {
        let (mut start, mut end) = (range.start, range.end);
        if start == end {
            return;
        }
        // Visits ranges that begin at or before `end`, from the last one down, while they touch the
        // new range.
        while let Some((&other, &other_end)) = self.0.range(..=end).next_back() {
            if other_end < start {
                break;
            }
            (start, end) = (start.min(other), end.max(other_end));
            self.0.remove(&other);
        }
        self.0.insert(start, end);
    }

    /// Returns `true` if a range has bytes in common with these.
    pub(in crate::hexagon) fn overlaps(&self, range: &Range<usize>) -> bool {
        let before = self.0.range(..range.end).next_back();
        !range.is_empty() && before.is_some_and(|(_, end)| range.start < *end)
    }

    /// Returns the bytes of the process's memory that it holds, as far as a map of the standard
    /// library lets one know.
    pub(in crate::hexagon) fn heap_bytes(&self) -> usize {
        // A B-tree node has room for 11 entries and is at least half full, unless it is the only
        // node.
        const NODE_BYTES: usize = 11 * 2 * size_of::<usize>() + 16;
        self.0.len().div_ceil(6) * NODE_BYTES
    }

    pub(in crate::hexagon) fn iter(&self) -> impl Iterator<Item = Range<usize>> {
        self.0.iter().map(|(start, end)| *start..*end)
    }
}

#[cfg(test)]
mod tests {
    use super::Ranges;

    #[test]
    fn ranges_that_touch_become_one() {
        let mut ranges = Ranges::default();
        for range in [10..20, 40..50, 30..40, 0..5, 25..25] {
            ranges.insert(range);
        }
        assert_eq!(ranges.iter().collect::<Vec<_>>(), [0..5, 10..20, 30..50]);
        ranges.insert(4..30);
        assert!(ranges.iter().eq(std::iter::once(0..50)));
    }

    #[test]
    fn one_byte_in_common_is_an_overlap() {
        let mut ranges = Ranges::default();
        for range in [10..20, 30..40] {
            ranges.insert(range);
        }
        for range in [0..11, 12..15, 19..25, 0..100, 39..40] {
            assert!(ranges.overlaps(&range), "{range:?}");
        }
        for (start, end) in [(0, 10), (20, 30), (40, 50), (15, 15), (35, 12)] {
            assert!(!ranges.overlaps(&(start..end)), "{start}..{end}");
        }
    }
}
