//! Squares of 32 rows and 32 columns of words, transposed by exchanging blocks of lanes.
//!
//! ```text
//! gathered   rows i, i + 8, i + 16 and i + 24 exchange blocks of 16 and of 8 words
//! columns    lines 8g to 8g + 7 exchange blocks of 4, 2 and 1 words: columns 8g to 8g + 7
//! ```
//!
//! Eight vectors at a time stay in registers; all 32 would not.

use crate::hvx::{self, FOURS, Square, StridedVectors, Vector, swap_blocks};
use crate::layout::{LINE_BYTES, Line, TILE_DIM};

/// Columns of a group, which are in registers together.
pub(super) const GROUP: usize = 8;

/// The lines between both parts of a transposition.
pub(super) type Gathered = [Line; TILE_DIM];

/// Exchanges the blocks of 16 and of 8 words of 32 rows.
#[inline(always)]
pub(super) fn gather(rows: Square<'_, false>, to: &mut Gathered) {
    let mut rows = rows.spaced();
    let (low, high) = to.split_at_mut(2 * GROUP);
    let ((first, second), (third, last)) = (low.split_at_mut(GROUP), high.split_at_mut(GROUP));
    let lines = first.iter_mut().zip(second);
    for ((first, second), (third, last)) in lines.zip(third.iter_mut().zip(last)).take(FOURS) {
        let (a, b, c, d) = (
            rows.load::<0>(),
            rows.load::<1>(),
            rows.load::<2>(),
            rows.load::<3>(),
        );
        rows.advance();
        let ((a, c), (b, d)) = (swap_blocks::<16>(a, c), swap_blocks::<16>(b, d));
        let ((a, b), (c, d)) = (swap_blocks::<8>(a, b), swap_blocks::<8>(c, d));
        hvx::store(first, a);
        hvx::store(second, b);
        hvx::store(third, c);
        hvx::store(last, d);
    }
}

/// Returns columns `8 · group` to `8 · group + 7` of the gathered rows; `group` is below 4.
#[inline(always)]
pub(super) fn columns(gathered: &Gathered, group: usize) -> [Vector; GROUP] {
    let (groups, _) = gathered.as_chunks::<GROUP>();
    let [a, b, c, d, e, f, g, h] = groups[group % (TILE_DIM / GROUP)].each_ref().map(hvx::load);
    let ((a, e), (b, f)) = (swap_blocks::<4>(a, e), swap_blocks::<4>(b, f));
    let ((c, g), (d, h)) = (swap_blocks::<4>(c, g), swap_blocks::<4>(d, h));
    let ((a, c), (b, d)) = (swap_blocks::<2>(a, c), swap_blocks::<2>(b, d));
    let ((e, g), (f, h)) = (swap_blocks::<2>(e, g), swap_blocks::<2>(f, h));
    let ((a, b), (c, d)) = (swap_blocks::<1>(a, b), swap_blocks::<1>(c, d));
    let ((e, f), (g, h)) = (swap_blocks::<1>(e, f), swap_blocks::<1>(g, h));
    [a, b, c, d, e, f, g, h]
}

/// Gathers up to 32 rows of f32, `stride` elements apart, starting at element `at`. Missing rows
/// become zeros, and so do elements after the end of `elems`; elements after the end of a row are
/// the next ones in memory.
pub(super) struct GatherRows<'a> {
    pub(super) elems: &'a [f32],
    pub(super) at: usize,
    pub(super) stride: usize,
    pub(super) count: usize,
    pub(super) to: &'a mut Gathered,
}

impl hvx::Kernel for GatherRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let bytes = bytemuck::cast_slice(self.elems.get(self.at..).unwrap_or_default());
        if self.count >= TILE_DIM
            && let Some(mut rows) = StridedVectors::<1>::new(bytes, 4 * self.stride, TILE_DIM)
            && let Some(square) = rows.next_square()
        {
            return gather(square, self.to);
        }
        hvx::widest(GatherPadded(self));
    }
}

/// Gathers rows of which some may not exist, or that end near the end of memory.
struct GatherPadded<'a>(GatherRows<'a>);

impl hvx::Kernel for GatherPadded<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let all = self.0;
        let mut padded: Gathered = hvx::zeros();
        for (i, row) in padded.iter_mut().enumerate().take(all.count) {
            hvx::store(row, load_before_end(all.elems, all.at + i * all.stride));
        }
        let padded: &[u8] = bytemuck::cast_slice(&padded);
        if let Some(mut rows) = StridedVectors::<1>::new(padded, LINE_BYTES, TILE_DIM)
            && let Some(square) = rows.next_square()
        {
            gather(square, all.to);
        }
    }
}

/// Writes the first eight columns of gathered rows.
pub(super) struct FirstColumns<'a> {
    pub(super) gathered: &'a Gathered,
    pub(super) to: &'a mut [Line; GROUP],
}

impl hvx::Kernel for FirstColumns<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (to, column) in self.to.iter_mut().zip(columns(self.gathered, 0)) {
            hvx::store(to, column);
        }
    }
}

/// Writes columns of gathered rows as rows of a result: up to 32, of up to 32 elements each.
pub(super) struct WriteColumns<'a> {
    pub(super) gathered: &'a Gathered,
    /// Elements starting with the first of the first row, and elements from one row to the next.
    pub(super) out: &'a mut [f32],
    pub(super) stride: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
}

impl hvx::Kernel for WriteColumns<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut out = self.out;
        let mut left = self.rows;
        for group in 0..TILE_DIM / GROUP {
            for column in columns(self.gathered, group) {
                if left == 0 {
                    return;
                }
                left -= 1;
                match out.first_chunk_mut() {
                    Some(line) if self.columns == TILE_DIM => hvx::store_f32(line, column),
                    _ => {
                        let mut lanes = [0.0; TILE_DIM];
                        hvx::store_f32(&mut lanes, column);
                        let n = self.columns.min(out.len());
                        hvx::copy_f32(&mut out[..n], &lanes);
                    }
                }
                out = out.get_mut(self.stride..).unwrap_or_default();
            }
        }
    }
}

/// Loads 32 elements starting with `at`, zeros after the end. Memory of at least 32 elements is
/// read by vectors only.
#[inline(always)]
fn load_before_end(elems: &[f32], at: usize) -> Vector {
    let rest = elems.get(at..).unwrap_or_default();
    if let Some(whole) = rest.first_chunk() {
        return hvx::load_f32(whole);
    }
    let mut two: [Line; 2] = hvx::zeros();
    let lanes: &mut [f32; 2 * TILE_DIM] = bytemuck::cast_mut(&mut two);
    let (first, _) = lanes.as_chunks_mut::<TILE_DIM>();
    let shift = match elems.last_chunk() {
        Some(last) => {
            hvx::store_f32(&mut first[0], hvx::load_f32(last));
            TILE_DIM - rest.len()
        }
        None => {
            lanes[..rest.len()].copy_from_slice(rest);
            0
        }
    };
    let shifted = lanes.get(shift..).and_then(|lanes| lanes.first_chunk());
    shifted.map_or(hvx::splat_w(0), hvx::load_f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns columns 0 to 31 of gathered rows.
    fn transposed(elems: &[f32], at: usize, stride: usize, count: usize) -> Vec<[f32; TILE_DIM]> {
        struct Transpose<'a>(&'a [f32], [usize; 3]);
        impl hvx::Kernel for Transpose<'_> {
            type Output = Vec<[f32; TILE_DIM]>;
            #[inline(always)]
            fn run(self) -> Self::Output {
                let [at, stride, count] = self.1;
                let mut gathered: Gathered = hvx::zeros();
                let elems = self.0;
                let to = &mut gathered;
                hvx::widest(GatherRows {
                    elems,
                    at,
                    stride,
                    count,
                    to,
                });
                let groups = 0..TILE_DIM / GROUP;
                let columns = groups.flat_map(|group| columns(&gathered, group));
                let mut out = vec![[0.0; TILE_DIM]; TILE_DIM];
                for (out, column) in out.iter_mut().zip(columns) {
                    hvx::store_f32(out, column);
                }
                out
            }
        }
        hvx::widest(Transpose(elems, [at, stride, count]))
    }

    #[test]
    fn columns_have_the_elements_of_rows_and_zeros_after_the_end() {
        let elems: Vec<f32> = (1_u16..4000).map(f32::from).collect();
        for (len, at, stride, count) in [
            (3999, 0, 32, 32),
            (3999, 5, 67, 32),
            (3999, 3900, 4, 32),
            (3999, 0, 67, 7),
            (1024, 0, 32, 32),
            (128, 3, 4, 32),
            (20, 1, 4, 5),
            (0, 0, 1, 1),
        ] {
            let elems = &elems[..len];
            let have = transposed(elems, at, stride, count);
            for (column, have) in have.iter().enumerate() {
                for (row, have) in have.iter().enumerate() {
                    let element = elems.get(at + row * stride + column).copied();
                    let want = element.filter(|_| row < count).unwrap_or(0.0);
                    assert_eq!(
                        *have, want,
                        "{len} at {at} by {stride}: row {row}, column {column}"
                    );
                }
            }
        }
    }
}
