//! Quantization of activations to signed 8 bits with one scale per block of 32, in the form that
//! the dot products read.
//!
//! ```text
//! for each group of 1024 elements (32 blocks), missing ones zero
//!   amax[32]   = largest magnitude of each block: a tree of 5 levels over 32 vectors
//!   factor     = power of two such that the largest amax / factor is in [512, 1024)
//!   scale[32]  = f16(amax / factor / 127), at least 2^-14 (the smallest normal f16)
//!   q          = round(x / (scale · factor)), bytes of each 4 in the order 0 2 1 3
//!   sum[32]    = sum of the block's q
//! ```
//!
//! 1. Scales are f16 because one widening multiply then joins them with the weights' f16 scales.
//!    The group's factor keeps them in range whatever the activations' magnitude; the sum over a
//!    group is multiplied by it once.
//! 2. The floor of 2^-14 avoids a division by zero for an empty block. It is 2^23 times less than
//!    the largest element of the group, far below that element's rounding error.
//! 3. Rounding is the addition of 1.5·2^23: the low byte of the f32's fraction is then q in two's
//!    complement.
//!
//! Activations must be finite: 8-bit quants cannot carry infinity or NaN.

use crate::error::{Error, Result};
use crate::hvx::{self, Vector};
use crate::layout::{Line, TILE_DIM};

/// Elements of a group.
pub const GROUP: usize = 1024;
/// Blocks (and weight tiles) of a group.
pub const GROUP_TILES: usize = GROUP / TILE_DIM;

/// 1.5 · 2^23: a small number plus this is rounded to an integer, which its low bits hold.
const ROUNDER: f32 = 12_582_912.0;

/// 1024 quantized activations; blocks past the row's end are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(128))]
pub struct ActGroup {
    /// Block b is words 8b to 8b + 7; each word holds four elements in
    /// [`crate::layout::WORD_ORDER`].
    words: [Line; 8],
    /// Sum of the quants of each block, i32.
    sums: Line,
    /// 32 f16 scales relative to `factor`, then 32 f16 products `scale · sum`.
    scales: Line,
    /// Power of two of the group, f32, in all words.
    factor: Line,
}

impl ActGroup {
    /// A group of zeros.
    pub const ZERO: Self = Self {
        words: [Line::ZERO; 8],
        sums: Line::ZERO,
        scales: Line::ZERO,
        factor: Line::ZERO,
    };

    /// Returns the quants of all blocks.
    #[inline(always)]
    pub(super) fn lines(&self) -> &[Line; 8] {
        &self.words
    }

    /// Returns the quants of each block, as words of four.
    #[inline(always)]
    pub(super) fn words(&self) -> &[[i32; 8]; GROUP_TILES] {
        bytemuck::cast_ref(&self.words)
    }

    /// Returns the same words by doublewords, which the DSP loads at the price of one word.
    #[inline(always)]
    pub(super) fn word_pairs(&self) -> &[WordPairs; GROUP_TILES] {
        bytemuck::cast_ref(&self.words)
    }

    /// Returns the sum of the quants of each block.
    #[inline(always)]
    pub(super) fn sums(&self) -> &[i32; GROUP_TILES] {
        bytemuck::cast_ref(&self.sums)
    }

    /// Returns the line of 32 f16 scales and 32 f16 products.
    #[inline(always)]
    pub(super) fn scale_line(&self) -> &Line {
        &self.scales
    }

    /// Returns the f16 scales of two blocks a word, then f16 `scale · sum` of two blocks a word.
    #[inline(always)]
    pub(super) fn scales(&self) -> &[[i32; GROUP_TILES / 2]; 2] {
        bytemuck::cast_ref(&self.scales)
    }

    /// Returns the group's power of two in all lanes, f32.
    #[inline(always)]
    pub(super) fn factor(&self) -> Vector {
        hvx::load(&self.factor)
    }
}

/// The quants of a block as doublewords: eight words of four.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub(super) struct WordPairs([u64; 4]);

impl WordPairs {
    /// Returns the words in their order.
    #[inline(always)]
    pub(super) fn words(self) -> [i32; 8] {
        // CAST: each half of a doubleword is one word.
        #[expect(clippy::cast_possible_truncation, reason = "halves of a doubleword")]
        let halves = |pair: u64| {
            let pair = pair.to_le();
            [pair as i32, (pair >> 32) as i32]
        };
        let Self([first, second, third, fourth]) = self;
        let ([a, b], [c, d]) = (halves(first), halves(second));
        let ([e, f], [g, h]) = (halves(third), halves(fourth));
        [a, b, c, d, e, f, g, h]
    }
}

/// Returns the number of groups that a row of `k` activations takes.
#[must_use]
pub const fn groups(k: usize) -> usize {
    k.div_ceil(GROUP)
}

/// Quantizes one row of activations.
///
/// - `row`: K f32, a multiple of 32
/// - `out`: [`groups`] of K
///
/// # Errors
/// `Length` if `row` is not a multiple of 32 long, or if `out` has another length.
pub fn quantize_row(row: &[f32], out: &mut [ActGroup]) -> Result<()> {
    check_row(row, out)?;
    hvx::widest(QuantizeRow { row, out });
    Ok(())
}

/// Checks that `out` has the groups of a row, which has whole blocks.
fn check_row(row: &[f32], out: &[ActGroup]) -> Result<()> {
    let whole = row.len() / TILE_DIM * TILE_DIM;
    if whole != row.len() {
        return Err(Error::Length {
            what: "activation row",
            have: row.len(),
            want: whole,
        });
    }
    if out.len() != groups(row.len()) {
        return Err(Error::Length {
            what: "activation groups",
            have: out.len(),
            want: groups(row.len()),
        });
    }
    Ok(())
}

/// As [`quantize_row`], with a second quantization of what the first one leaves: together 16 bits.
///
/// - `out`: the groups of the row, then those of what is left
///
/// # Errors
/// As [`quantize_row`].
pub fn quantize_row_twice(row: &[f32], out: [&mut [ActGroup]; 2]) -> Result<()> {
    let [first, rest] = out;
    check_row(row, first)?;
    check_row(row, rest)?;
    hvx::widest(QuantizeTwice { row, first, rest });
    Ok(())
}

/// The arguments of [`quantize_row_twice`] after its checks.
struct QuantizeTwice<'a> {
    row: &'a [f32],
    first: &'a mut [ActGroup],
    rest: &'a mut [ActGroup],
}

impl hvx::Kernel for QuantizeTwice<'_> {
    type Output = ();
    const INLINED: bool = true;

    #[inline(always)]
    fn run(self) {
        let outs = self.first.iter_mut().zip(self.rest);
        for (elems, (first, rest)) in self.row.chunks(GROUP).zip(outs) {
            quantize_group_twice(elems, first, rest);
        }
    }
}

/// Quantizes up to one group, and what is left of it.
#[cfg_attr(target_arch = "hexagon", inline(never))]
#[cfg_attr(not(target_arch = "hexagon"), inline(always))]
fn quantize_group_twice(elems: &[f32], first: &mut ActGroup, rest: &mut ActGroup) {
    let mut left = hvx::zeros::<{ GROUP / TILE_DIM }>();
    let left: &mut [f32; GROUP] = bytemuck::cast_mut(&mut left);
    hvx::copy_f32(left, elems);
    quantize_group(left, first);
    subtract(left, first);
    quantize_group(left, rest);
}

/// Takes the quantized elements from the elements.
#[inline(always)]
fn subtract(elems: &mut [f32; GROUP], quantized: &ActGroup) {
    let (scales, _) = hvx::widen_in_order_f16(hvx::load(quantized.scale_line()));
    let mut steps = Line::ZERO;
    hvx::store(&mut steps, hvx::mul_f32(scales, quantized.factor()));
    let mut inverses = Line::ZERO;
    let inverse_factor = hvx::sub_w(hvx::splat_w(254 << 23), quantized.factor());
    hvx::store(
        &mut inverses,
        hvx::mul_f32(reciprocal(scales), inverse_factor),
    );
    let steps: &[i32; GROUP_TILES] = bytemuck::cast_ref(&steps);
    let inverses: &[i32; GROUP_TILES] = bytemuck::cast_ref(&inverses);
    let rounder = hvx::splat_f32(ROUNDER);
    let blocks = elems.as_chunks_mut::<TILE_DIM>().0.iter_mut();
    for ((block, step), inverse) in blocks.zip(steps).zip(inverses) {
        let exact = hvx::load_f32(block);
        // The same operations as in `quantize_group`, so the same integer.
        let rounded = hvx::add_f32(hvx::mul_f32(exact, hvx::splat_w(*inverse)), rounder);
        let quant = hvx::sub_f32(rounded, rounder);
        let taken = hvx::mul_f32(quant, hvx::splat_w(*step));
        hvx::store_f32(block, hvx::sub_f32(exact, taken));
    }
}

/// The arguments of [`quantize_row`] after its checks.
struct QuantizeRow<'a> {
    row: &'a [f32],
    out: &'a mut [ActGroup],
}

impl hvx::Kernel for QuantizeRow<'_> {
    type Output = ();
    const INLINED: bool = true;

    #[inline(always)]
    fn run(self) {
        let (full, tail) = self.row.as_chunks::<GROUP>();
        for (elems, out) in full.iter().zip(self.out.iter_mut()) {
            quantize_group(elems, out);
        }
        if let (false, Some(out)) = (tail.is_empty(), self.out.last_mut()) {
            let mut padded = hvx::zeros::<{ GROUP / TILE_DIM }>();
            let padded: &mut [f32; GROUP] = bytemuck::cast_mut(&mut padded);
            hvx::copy_f32(padded, tail);
            quantize_group(padded, out);
        }
    }
}

/// Reduces 32 lanes of each of 32 vectors to one lane each: lane b of the result is vector b
/// reduced by `join`.
///
/// Each level joins the even and odd lanes of two vectors, which halves both and puts them side by
/// side.
#[inline(always)]
fn reduce<const N: usize>(vectors: [Vector; N], join: fn(Vector, Vector) -> Vector) -> Vector {
    let mut level = vectors;
    let mut count = N;
    while count > 1 {
        count /= 2;
        for i in 0..count {
            let (even, odd) = hvx::deal_w(level[2 * i], level[2 * i + 1]);
            level[i] = join(even, odd);
        }
    }
    level[0]
}

/// Quantizes one full group. It is not inlined on the device, so that `elems` and `out` are known
/// not to overlap.
#[cfg_attr(target_arch = "hexagon", inline(never))]
#[cfg_attr(not(target_arch = "hexagon"), inline(always))]
fn quantize_group(elems: &[f32; GROUP], out: &mut ActGroup) {
    let blocks = &elems.as_chunks::<TILE_DIM>().0.as_chunks::<8>().0;
    let magnitude_bits = hvx::splat_w(0x7fff_ffff);
    // The bits of magnitudes are ordered as the magnitudes are, so the integer maximum is the
    // maximum.
    let mut partial = [magnitude_bits; 4];
    for (eight, partial) in blocks.iter().zip(&mut partial) {
        let magnitudes = eight
            .each_ref()
            .map(|block| hvx::and(hvx::load_f32(block), magnitude_bits));
        *partial = reduce(magnitudes, hvx::max_w);
    }
    let amax = reduce(partial, hvx::max_w);

    // The factor's exponent field is that of the group's largest element minus nine, with a lower
    // limit that keeps both the factor and its inverse normal.
    let largest = all_lanes(amax, hvx::max_w);
    let exponent = hvx::max_w(
        hvx::and(largest, hvx::splat_w(0x7f80_0000)),
        hvx::splat_w(32 << 23),
    );
    let factor = hvx::sub_w(exponent, hvx::splat_w(9 << 23));
    let inverse_factor = hvx::sub_w(hvx::splat_w(254 << 23), factor);
    hvx::store(&mut out.factor, factor);

    let scale = hvx::mul_f32(
        hvx::mul_f32(amax, inverse_factor),
        hvx::splat_f32(1.0 / 127.0),
    );
    let scale_f16 = hvx::max_h(hvx::narrow_f32(scale, scale), hvx::splat_h(0x0400));
    let (scale, _) = hvx::widen_mul_f16(scale_f16, hvx::splat_h(0x3c00));
    let mut multipliers = Line::ZERO;
    hvx::store(
        &mut multipliers,
        hvx::mul_f32(reciprocal(scale), inverse_factor),
    );

    let rounder = hvx::splat_f32(ROUNDER);
    let multipliers: &[[i32; 4]; 8] = bytemuck::cast_ref(&multipliers);
    let mut sums = [rounder; 8];
    let fours = elems.as_chunks::<TILE_DIM>().0.as_chunks::<4>().0;
    for (((four, multiplier), words), sum) in fours
        .iter()
        .zip(multipliers)
        .zip(&mut out.words)
        .zip(&mut sums)
    {
        let round = |i: usize| {
            hvx::add_f32(
                hvx::mul_f32(hvx::load_f32(&four[i]), hvx::splat_w(multiplier[i])),
                rounder,
            )
        };
        let (k01, k23) = hvx::deal_w(
            hvx::pack_low_h(round(0), round(1)),
            hvx::pack_low_h(round(2), round(3)),
        );
        let bytes = hvx::interleave_even_b(k01, k23);
        *sum = hvx::dot4_each(hvx::splat_b(1), bytes);
        hvx::store(words, bytes);
    }
    let sums = reduce(sums, hvx::add_w);
    hvx::store(&mut out.sums, sums);
    let product = hvx::mul_f32(hvx::f32_from_w(sums), scale);
    hvx::store(
        &mut out.scales,
        hvx::pack_low_h(scale_f16, hvx::narrow_f32(product, product)),
    );
}

/// Returns a vector whose every lane is `join` of all lanes of `v`.
#[inline(always)]
fn all_lanes(v: Vector, join: fn(Vector, Vector) -> Vector) -> Vector {
    let mut v = v;
    for _ in 0..5 {
        let (even, odd) = hvx::deal_w(v, v);
        v = join(even, odd);
    }
    v
}

/// Returns 1 / `d` for normal positive f32 lanes, to within 2^-22: an estimate by the exponent,
/// then three Newton steps.
///
/// SOURCE: the estimate's error is at most 12 %, squared by each step: 1.5e-2, 2.1e-4, 4.4e-8.
#[inline(always)]
fn reciprocal(d: Vector) -> Vector {
    let two = hvx::splat_f32(2.0);
    let mut r = hvx::sub_w(hvx::splat_w(0x7ef3_11c7), d);
    for _ in 0..3 {
        r = hvx::mul_f32(r, hvx::sub_f32(two, hvx::mul_f32(d, r)));
    }
    r
}
