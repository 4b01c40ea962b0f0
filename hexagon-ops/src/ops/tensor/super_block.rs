//! Super-blocks of 256 elements, as ggml stores them: read 32 elements at a time.
//!
//! ```text
//! for each 32 elements g
//!   q[i]   = quant of element i, put together from the bytes that hold its bits
//!   out[i] = q[i] · scale[i / 16] + min[i / 16]
//! ```
//!
//! A scale is `d` times a whole number, and exact in f32. Products and sums are rounded where ggml
//! rounds them.
//!
//! Source: ggml `block_q2_K` to `block_q6_K` and `block_iq4_xs`, ggml-common.h;
//! `dequantize_row_*`, ggml-quants.c.

use super::block::IQ4_TABLE;
use super::convert::{store, widen_one};
use super::shape::Type;
use crate::hvx::{self, Vector};
use crate::layout::{LINE_BYTES, Line, SUPER_BLOCK};

/// Elements that are read at a time.
const GROUP: usize = 32;
/// Halves of groups; each half may have a separate scale.
const HALVES: usize = SUPER_BLOCK / GROUP * 2;
/// Lines for a super-block, and for the bytes after it that a load of its last bytes also reads.
const LINES: usize = 3;

/// Scales and minima of a super-block, one for each 16 elements.
struct Scales {
    scales: [f32; HALVES],
    mins: [f32; HALVES],
}

/// The bytes of one super-block, followed by zeros.
struct BlockBytes([Line; LINES]);

impl BlockBytes {
    #[inline(always)]
    fn new(block: &[u8]) -> Self {
        let mut lines = hvx::zeros::<LINES>();
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut lines);
        let len = block.len().min(bytes.len());
        bytes[..len].copy_from_slice(&block[..len]);
        Self(lines)
    }

    #[inline(always)]
    fn all(&self) -> &[u8; LINES * LINE_BYTES] {
        bytemuck::cast_ref(&self.0)
    }

    /// Returns a byte.
    #[inline(always)]
    fn byte(&self, at: usize) -> u8 {
        self.all()[at]
    }

    /// Returns the f16 at byte `at`.
    #[inline(always)]
    fn half(&self, at: usize) -> f32 {
        widen_one([self.byte(at), self.byte(at + 1)])
    }

    /// Returns the bytes that start at `at`; the caller uses 32 of them.
    #[inline(always)]
    fn load(&self, at: usize) -> Vector {
        let bytes = self.all().get(at..).unwrap_or_default();
        bytes.first_chunk().map_or(hvx::splat_w(0), hvx::load_bytes)
    }

    /// Returns the bits of `mask`, once the bytes that start at `at` are shifted right.
    #[inline(always)]
    fn bits(&self, at: usize, shift: usize, mask: u8) -> Vector {
        // CAST: a shift within a byte.
        #[expect(clippy::cast_possible_truncation, reason = "see above")]
        let moved = hvx::shr_b(self.load(at), shift as i32);
        hvx::and(moved, hvx::splat_b(mask))
    }

    /// Returns the scale and the minimum of six bits of group `g` of Q4_K and Q5_K.
    ///
    /// Source: `get_scale_min_k4`, ggml-quants.c.
    #[inline(always)]
    fn six_bits(&self, g: usize) -> (u8, u8) {
        let at = |i: usize| self.byte(4 + i);
        if g < 4 {
            return (at(g) & 63, at(g + 4) & 63);
        }
        (
            at(g + 4) & 15 | at(g - 4) >> 6 << 4,
            at(g + 4) >> 4 | at(g) >> 6 << 4,
        )
    }

    /// Returns the scale of 16 elements, and the number that is multiplied by `dmin`.
    #[inline(always)]
    fn scale_and_min(&self, dtype: Type, half: usize) -> (i32, i32) {
        let six_bits = |low: u8, high: u8| i32::from(low & 15 | (high & 3) << 4) - 32;
        match dtype {
            Type::Q2K => {
                let both = self.byte(half);
                (i32::from(both & 15), i32::from(both >> 4))
            }
            Type::Q3K => {
                let low = self.byte(96 + half % 8) >> (4 * (half / 8));
                let high = self.byte(104 + half % 4) >> (2 * (half / 4));
                (six_bits(low, high), 0)
            }
            Type::Q6K => (i32::from(self.byte(192 + half).cast_signed()), 0),
            Type::Iq4Xs => {
                let group = half / 2;
                let low = self.byte(4 + group / 2) >> (4 * (group % 2));
                let high = self.byte(2 + group / 4) >> (2 * (group % 4));
                (six_bits(low, high), 0)
            }
            _ => {
                let (scale, min) = self.six_bits(half / 2);
                (scale.into(), min.into())
            }
        }
    }

    /// Returns the scales and minima of a super-block.
    #[inline(always)]
    fn scales(&self, dtype: Type) -> Scales {
        let (d, dmin) = match dtype {
            Type::Q2K => (self.half(80), self.half(82)),
            Type::Q3K => (self.half(108), 0.0),
            Type::Q6K => (self.half(208), 0.0),
            Type::Iq4Xs => (self.half(0), 0.0),
            _ => (self.half(0), self.half(2)),
        };
        let mut out = Scales {
            scales: [0.0; HALVES],
            mins: [0.0; HALVES],
        };
        let pairs = out.scales.iter_mut().zip(&mut out.mins);
        for (half, (scale, min)) in pairs.enumerate() {
            let (s, m) = self.scale_and_min(dtype, half);
            // CAST: numbers of at most eight bits.
            (*scale, *min) = (d * s as f32, -(dmin * m as f32));
        }
        out
    }

    /// Returns the quants of group `g`, as words.
    #[inline(always)]
    fn quants(&self, dtype: Type, g: usize) -> Vector {
        // Each half of a super-block has the bits of its four groups in the same bytes.
        let (half, part) = (g / 4, g % 4);
        let with = |low: Vector, upper: Vector, by: i32| hvx::or(low, hvx::shl_w(upper, by));
        let (bytes, zero) = match dtype {
            Type::Q2K => (self.bits(16 + 32 * half, 2 * part, 3), 0),
            Type::Q3K => {
                let low = self.bits(32 + 32 * half, 2 * part, 3);
                (with(low, self.bits(0, g, 1), 2), 4)
            }
            Type::Q4K => (self.bits(16 + 32 * (g / 2), 4 * (g % 2), 15), 0),
            Type::Q5K => {
                let low = self.bits(48 + 32 * (g / 2), 4 * (g % 2), 15);
                (with(low, self.bits(16, g, 1), 4), 0)
            }
            Type::Q6K => {
                let low = self.bits(64 * half + 32 * (part % 2), 4 * (part / 2), 15);
                let upper = self.bits(128 + 32 * half, 2 * part, 3);
                (with(low, upper, 4), 32)
            }
            _ => {
                // 16 bytes: first the low nibbles, then the high nibbles.
                let bytes = self.load(8 + 16 * g);
                let (nibbles, _) = hvx::swap_blocks::<4>(bytes, hvx::shr_b(bytes, 4));
                (hvx::lookup16_b(nibbles, hvx::load(&IQ4_TABLE)), 0)
            }
        };
        hvx::sub_w(hvx::widen_b(bytes), hvx::splat_w(zero))
    }
}

/// Reads the elements of a super-block; only the first ones if `out` is shorter.
#[inline(always)]
pub(super) fn dequantize(dtype: Type, block: &[u8], out: &mut [f32]) {
    let bytes = BlockBytes::new(block);
    let Scales { scales, mins } = bytes.scales(dtype);
    let halves = scales.as_chunks::<2>().0.iter().zip(mins.as_chunks().0);
    for (g, (out, (scales, mins))) in out.chunks_mut(GROUP).zip(halves).enumerate() {
        let quants = hvx::f32_from_w(bytes.quants(dtype, g));
        let products = hvx::mul_f32(quants, both_halves(*scales));
        store(hvx::add_f32(products, both_halves(*mins)), out);
    }
}

/// Returns the first number in 16 lanes, then the second one.
#[inline(always)]
fn both_halves([first, second]: [f32; 2]) -> Vector {
    let (halves, _) = hvx::swap_blocks::<16>(hvx::splat_f32(first), hvx::splat_f32(second));
    halves
}
