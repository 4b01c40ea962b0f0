//! Rows that a graph stores in caches by number (SET_ROWS), for the CPU to see.
//!
//! ggml's scheduler lets the CPU read a cache in place without asking the device: for a layer
//! without a separate cache whose weights are on the CPU, and for a context without the device that
//! shares a cache. Invalidating the whole cache for each token would be slower than the token
//! itself, so the numbers of its rows are read.

use std::ops::Range;

use crate::graph::Tensor;
use crate::tensor::{DType, Shape};

/// Bytes of a cache line of the CPU, which is invalidated whole.
// SOURCE: Arm Cortex-A and Qualcomm Oryon: 64 bytes.
const LINE_BYTES: usize = 64;

/// The place of a tensor in its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    dtype: DType,
    shape: Shape,
    offset: usize,
}

impl Layout {
    pub(super) fn of(tensor: &Tensor) -> Self {
        Self {
            dtype: tensor.dtype,
            shape: tensor.shape,
            offset: tensor.packed_offset,
        }
    }

    /// Returns the bytes of its buffer from its first to its last.
    pub(super) fn span(&self) -> Range<usize> {
        let bytes = self.shape.span_bytes(self.dtype).unwrap_or(0);
        self.offset..self.offset + bytes
    }

    /// Returns a whole number of a tensor of them, whose bytes are `bytes`.
    fn number(&self, bytes: &[u8], at: [usize; 3]) -> Option<usize> {
        let start: usize = at.iter().zip(self.shape.nb).map(|(i, nb)| i * nb).sum();
        let rest = bytes.get(start..)?;
        match self.dtype {
            DType::I64 => usize::try_from(i64::from_le_bytes(*rest.first_chunk()?)).ok(),
            DType::I32 => usize::try_from(i32::from_le_bytes(*rest.first_chunk()?)).ok(),
            _ => None,
        }
    }
}

/// Ranges that are collected before those that touch are merged: without flash attention a row of
/// the cache of values is one element, and a batch of tokens stores many rows in one line.
const MERGED_FROM: usize = 1 << 14;

/// Sorts ranges and merges those that touch.
fn merge(ranges: &mut Vec<Range<usize>>) {
    // A stable sort, because it is fast for input of a few ascending runs, which the row numbers of
    // a batch are.
    ranges.sort_by_key(|range| range.start);
    ranges.dedup_by(|next, last| {
        let touches = next.start <= last.end;
        if touches {
            last.end = last.end.max(next.end);
        }
        touches
    });
}

/// Returns the lines of `cache` that contain the rows which `numbers` names: sorted, disjoint, and
/// cut at the cache's ends. If the cache has no more lines than there are rows, returns all of its
/// bytes. A number without a row is left out: the DSP refuses it.
///
/// - `numbers`: (rows, planes or a divisor, volumes or a divisor)
/// - `bytes`: the bytes of `numbers`
pub(super) fn stored(cache: &Layout, numbers: &Layout, bytes: &[u8]) -> Vec<Range<usize>> {
    let (shape, all) = (&cache.shape, cache.span());
    let row = Shape {
        ne: [shape.ne[0], 1, 1, 1],
        nb: shape.nb,
    };
    let row_bytes = row.span_bytes(cache.dtype).unwrap_or(0);
    let [count, planes, volumes, _] = numbers.shape.ne;
    let lines = shape.ne[2] * shape.ne[3] * count * row_bytes.div_ceil(LINE_BYTES);
    if lines >= all.len().div_ceil(LINE_BYTES) {
        return vec![all];
    }
    let mut stored: Vec<Range<usize>> = Vec::new();
    let mut most = MERGED_FROM;
    for i3 in 0..shape.ne[3] {
        for i2 in 0..shape.ne[2] {
            for i1 in 0..count {
                let number = numbers.number(bytes, [i1, i2 % planes.max(1), i3 % volumes.max(1)]);
                let Some(number) = number.filter(|number| *number < shape.ne[1]) else {
                    continue;
                };
                let start =
                    cache.offset + number * shape.nb[1] + i2 * shape.nb[2] + i3 * shape.nb[3];
                // Buffers begin at the start of a cache line.
                let first = (start / LINE_BYTES * LINE_BYTES).max(all.start);
                let end = (start + row_bytes)
                    .next_multiple_of(LINE_BYTES)
                    .min(all.end);
                match stored.last_mut() {
                    Some(last) if (last.start..=last.end).contains(&first) => {
                        last.end = last.end.max(end);
                    }
                    _ => stored.push(first..end),
                }
                if stored.len() == most {
                    merge(&mut stored);
                    most = MERGED_FROM.max(2 * stored.len());
                }
            }
        }
    }
    merge(&mut stored);
    stored
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(dtype: DType, ne: [usize; 4], offset: usize) -> Layout {
        let mut nb = [dtype.step_bytes().unwrap(); 4];
        for dim in 1..4 {
            nb[dim] = nb[dim - 1] * ne[dim - 1];
        }
        let shape = Shape { ne, nb };
        Layout {
            dtype,
            shape,
            offset,
        }
    }

    #[test]
    fn rows_are_where_their_numbers_say() {
        let cache = layout(DType::F16, [64, 100, 1, 1], 256);
        let wide = layout(DType::I64, [4, 1, 1, 1], 0);
        let numbers = [7i64, 8, -1, 99];
        let bytes = bytemuck::cast_slice(&numbers);
        let want = [
            256 + 7 * 128..256 + 9 * 128,
            256 + 99 * 128..256 + 100 * 128,
        ];
        assert_eq!(stored(&cache, &wide, bytes), want);
        let narrow = layout(DType::I32, [4, 1, 1, 1], 0);
        let numbers = [7i32, 8, 100, 99];
        let bytes = bytemuck::cast_slice(&numbers);
        assert_eq!(stored(&cache, &narrow, bytes), want);
        // Fewer bytes than the row numbers need, and invalid row numbers.
        assert_eq!(
            stored(&cache, &narrow, &bytes[..7]),
            want[..1]
                .iter()
                .map(|first| first.start..first.start + 128)
                .collect::<Vec<_>>()
        );
        assert!(stored(&cache, &layout(DType::F32, [4, 1, 1, 1], 0), bytes).is_empty());
    }

    #[test]
    fn planes_and_volumes_have_numbers_of_their_own_or_share_them() {
        // Planes of 6400 bytes; two planes form a volume.
        let cache = layout(DType::F32, [16, 100, 2, 2], 0);
        let own = layout(DType::I32, [1, 2, 1, 1], 0);
        let rows = |numbers: &Layout, values: &[i32]| -> Vec<(usize, usize)> {
            let rows = stored(&cache, numbers, bytemuck::cast_slice(values));
            rows.iter()
                .map(|row| (row.start / 64, row.len() / 64))
                .collect()
        };
        assert_eq!(rows(&own, &[3, 5]), [(3, 1), (105, 1), (203, 1), (305, 1)]);
        let shared = layout(DType::I32, [1, 1, 2, 1], 0);
        assert_eq!(
            rows(&shared, &[3, 5]),
            [(3, 1), (103, 1), (205, 1), (305, 1)]
        );
        // As many cache lines as the cache tensor has.
        let many = layout(DType::I32, [100, 1, 1, 1], 0);
        assert_eq!(rows(&many, &[5; 100]), [(0, 400)]);
        let fewer = layout(DType::I32, [99, 1, 1, 1], 0);
        let once = [(5, 1), (105, 1), (205, 1), (305, 1)];
        assert_eq!(rows(&fewer, &[5; 99]), once);
    }

    #[test]
    fn many_rows_are_the_whole_cache() {
        // Rows of one element: values are cached like this without flash attention.
        let cache = layout(DType::F16, [1, 3200, 1, 1], 128);
        let few: Vec<i32> = (0..49).map(|number| 64 * number).collect();
        let numbers = |values: &[i32]| layout(DType::I32, [values.len(), 1, 1, 1], 0);
        let rows = stored(&cache, &numbers(&few), bytemuck::cast_slice(&few));
        assert_eq!(rows.len(), 49);
        assert_eq!(rows[1], 128 + 128..128 + 192);
        // The last range is cut where the cache ends.
        let part = layout(DType::F16, [1, 3201, 1, 1], 128);
        let rows = stored(&part, &numbers(&[3200]), bytemuck::cast_slice(&[3200]));
        assert!(rows.into_iter().eq(std::iter::once(128 + 6400..128 + 6402)));
        let more: Vec<i32> = (0..100).collect();
        let rows = stored(&cache, &numbers(&more), bytemuck::cast_slice(&more));
        assert!(rows.into_iter().eq(std::iter::once(128..128 + 6400)));
    }

    /// Without flash attention: 256 channels of 4096 cells, in which a batch of 100 tokens stores
    /// cells from 96 on, one token after the other. Regression: each element was a range, 25,600
    /// here and half a million in a model.
    #[test]
    fn elements_in_the_same_lines_are_stored_together() {
        let (channels, cells, tokens) = (256, 4096, 100);
        let cache = layout(DType::F16, [1, channels * cells, 1, 1], 512);
        let values: Vec<i64> = (96..96 + tokens)
            .flat_map(|cell| (0..channels).map(move |channel| channel * cells + cell))
            .map(|number| i64::try_from(number).unwrap())
            .collect();
        assert!(values.len() > MERGED_FROM);
        let numbers = layout(DType::I64, [values.len(), 1, 1, 1], 0);
        let rows = stored(&cache, &numbers, bytemuck::cast_slice(&values));
        // 200 bytes starting at byte 192 of each channel: four cache lines.
        let want = (0..channels)
            .map(|channel| 512 + channel * cells * 2 + 192)
            .map(|start| start..start + 256);
        assert!(rows.into_iter().eq(want));
    }
}
