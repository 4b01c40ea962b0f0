//! Reading of Q8_0 rows as f16: 64 elements, which are two blocks, at a time.
//!
//! A quant times its scale is rounded once, as by way of f32: both have few bits.
//!
//! SOURCE: ggml `block_q8_0`, ggml-common.h: an f16 scale, then 32 signed bytes.

use crate::hvx::{self, Vector, larger_f16, splat_h, splat_w};
use crate::layout::Line;

/// Halfwords of a block.
const BLOCK: usize = 17;
/// Halfwords of a vector, and of all that is loaded for a row.
const HALVES: usize = 64;
const LOADED: usize = BLOCK + 1 + HALVES;

/// Rows of two blocks.
pub(super) struct ReadTwoBlocks<'a> {
    /// Starts with the first block of the first row.
    pub(super) bytes: &'a [u8],
    pub(super) stride_bytes: usize,
}

impl ReadTwoBlocks<'_> {
    /// Reads rows, a line each. Returns the bits of their largest magnitudes; `None` if the last
    /// row is too close to the end of the bytes.
    #[inline(always)]
    pub(super) fn read(&self, out: &mut [Line]) -> Option<Vector> {
        let bytes = self.bytes.get(..self.bytes.len() / 2 * 2)?;
        let halves: &[u16] = bytemuck::try_cast_slice(bytes).ok()?;
        let stride = self.stride_bytes / 2;
        let end = out
            .len()
            .checked_sub(1)?
            .checked_mul(stride)?
            .checked_add(LOADED)?;
        let mut rest = halves;
        if end > halves.len() {
            return None;
        }
        let mut largest = splat_w(0);
        for out in out {
            let row: &[u16; LOADED] = rest.first_chunk()?;
            rest = rest.get(stride..).unwrap_or_default();
            let elems = two_blocks(row);
            largest = larger_f16(largest, elems);
            hvx::store(out, elems);
        }
        Some(largest)
    }
}

/// Returns the elements of two blocks.
#[inline(always)]
fn two_blocks(row: &[u16; LOADED]) -> Vector {
    let quants = |first: usize| -> Option<Vector> {
        let halves: &[u16; HALVES] = row.get(first..)?.first_chunk()?;
        Some(hvx::load_bytes(bytemuck::cast_ref(halves)))
    };
    let (Some(first), Some(second)) = (quants(1), quants(BLOCK + 1)) else {
        return splat_w(0);
    };
    let (bytes, _) = hvx::swap_blocks::<8>(first, second);
    let (scales, _) = hvx::swap_blocks::<16>(splat_h(row[0]), splat_h(row[BLOCK]));
    hvx::mul_f16(hvx::f16_from_h(hvx::widen_b_to_h(bytes)), scales)
}
