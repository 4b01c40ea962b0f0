//! Quantization of activations to signed 8 bits with one scale per block of 32, in the form that
//! the dot products read.
//!
//! ```text
//! factor       = power of two such that the row's largest magnitude / factor is in [512, 1024);
//!                for nibbles up to 16 times less
//! for each group of 1024 elements (32 blocks), missing ones zero
//!   amax[32]   = largest magnitude of each block / factor: a tree of 5 levels over 32 vectors;
//!                for nibbles, of low elements after subtracting the parts of high ones
//!   scale[32]  = f16(amax / 127), for nibbles f16(amax / 127 / 16); at least 2^-14 (the smallest normal f16)
//!   q          = round(x / (scale · factor)), bytes of each 4 in the order 0 2 1 3
//!   sum[32]    = sum of the block's q
//! ```
//!
//! 1. Scales are f16 because one widening multiply then joins them with the weights' f16 scales.
//!    The row's factor keeps them in range whatever the activations' magnitude; the sum over the
//!    row is multiplied by it once.
//! 2. The floor of 2^-14 avoids a division by zero for an empty block. A step of this size is 2^23
//!    times less than the largest element of the row, far below that element's rounding error; for
//!    nibbles see `Factors`.
//! 3. Rounding is the addition of 1.5·2^23: the low byte of the f32's fraction is then q in two's
//!    complement.
//! 4. Words, and scales with sums, are a plane each, so that a kernel goes through a whole row in
//!    one loop.
//!
//! 8-bit quants cannot carry infinity or NaN. The factor of a row with such an element is NaN after
//! the row is quantized, which makes the row's results NaN.
//!
//! # Activations for nibbles
//!
//! A byte of 4-bit weights holds those of elements k (low) and k + 16 (high) of a block. A kernel
//! saves the masks of the high nibbles by multiplying whole bytes, 16 · high + low, with the quant
//! of element k + 16, and low nibbles with that of element k:
//!
//! ```text
//! (16 · high + low) · q[k + 16] + 16 · low · q[k]  =  16 · (high · q[k + 16] + low · (q[k] + q[k + 16] / 16))
//! ```
//!
//! So element k counts as `q[k] + q[k + 16] / 16`, and [`ActForm::Nibbles`] rounds it to the
//! nearest number of that form: its error is at most half a step, as in [`ActForm::Bytes`]. A
//! block's scale follows from the largest q that it needs, and is a sixteenth of a step, because
//! the products are in sixteenths.

use crate::error::{Error, Result};
use crate::hvx::{self, Accumulator, LinePlanes, Vector};
use crate::layout::{LINE_BYTES, Line, TILE_DIM};
use crate::ops::rows::all_lanes;

/// Elements of a group.
pub const GROUP: usize = 1024;
/// Blocks (and weight tiles) of a group.
pub const GROUP_TILES: usize = GROUP / TILE_DIM;

/// 1.5 · 2^23: a small number plus this is rounded to an integer, which its low bits hold.
pub(super) const ROUNDER: f32 = 12_582_912.0;

/// The largest quant.
const MOST: f32 = 127.0;

/// The form of quantized activations that a kernel multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActForm {
    /// Weights, each with the quant of its element.
    Bytes,
    /// Bytes of two 4-bit weights, and their low nibbles alone; see the module's text.
    Nibbles,
    /// As [`ActForm::Bytes`], for weights whose minima count for half a block: the products of
    /// [`ActRow`] are powers of two.
    Halves,
}

/// Parts of a step in which elements are counted in [`ActForm::Nibbles`].
const PARTS: f32 = 16.0;
/// One of these parts, as a fraction of a step.
const PART: f32 = 1.0 / PARTS;
/// The sixteenths that a quant of a block adds to the sum of its elements: those of elements 16 to
/// 31 count in two elements.
static NIBBLE_WEIGHTS: Line = {
    let mut weights = [16; LINE_BYTES];
    let mut i = 0;
    while i < LINE_BYTES {
        if i % TILE_DIM >= TILE_DIM / 2 {
            weights[i] = 17;
        }
        i += 1;
    }
    Line(weights)
};

/// Lines of the quants of a group.
const WORD_LINES: usize = 8;
/// Lines of the [`Terms`] of a group.
const TERM_LINES: usize = 2;
/// Lines of a group.
const GROUP_LINES: usize = WORD_LINES + TERM_LINES;

/// The scales and sums of the quants of two blocks.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Terms {
    /// Two f16 scales relative to the row's factor.
    pub(super) scales: i32,
    /// Two f16 products `scale · sum`. In [`ActForm::Halves`], the largest power of two, from 1 to
    /// 128, with which all scales of the super-block stay under 8; without it, small elements in a
    /// super-block with a large one would lose precision in the fixed-point sums.
    pub(super) products: i32,
    /// Sums of the elements of each block, in multiples of its scale.
    pub(super) sums: [i32; 2],
}

/// Returns the size of a row of `k` quantized activations in lines.
#[must_use]
pub const fn act_lines(k: usize) -> usize {
    1 + groups(k) * GROUP_LINES
}

/// A row of quantized activations; blocks past the row's end are zero.
#[derive(Clone, Copy, Debug)]
pub struct ActRow<'a> {
    /// Power of two, f32, in all words.
    factor: &'a Line,
    /// Block b is words 8b to 8b + 7; each word holds four elements in
    /// [`crate::layout::WORD_ORDER`].
    words: &'a [[Line; WORD_LINES]],
    /// [`Terms`] of each pair of blocks.
    terms: &'a [[Line; TERM_LINES]],
}

impl<'a> ActRow<'a> {
    /// Returns the row that [`quantize_row`] wrote to `lines`. For K elements there must be
    /// [`act_lines`] of them.
    ///
    /// # Errors
    /// `Length` if no K has this number of lines.
    pub fn new(lines: &'a [Line]) -> Result<Self> {
        let groups = lines.len() / GROUP_LINES;
        let Some((factor, rest)) = lines
            .split_first()
            .filter(|(_, rest)| rest.len() == groups * GROUP_LINES)
        else {
            return Err(Error::Length {
                what: "lines of quantized activations",
                have: lines.len(),
                want: 1 + groups * GROUP_LINES,
            });
        };
        let (words, terms) = rest.split_at(groups * WORD_LINES);
        Ok(Self {
            factor,
            words: words.as_chunks().0,
            terms: terms.as_chunks().0,
        })
    }

    /// Returns the number of groups.
    #[inline(always)]
    pub(super) fn groups(self) -> usize {
        self.terms.len()
    }

    /// Returns the groups in their order.
    #[inline(always)]
    pub(super) fn each_group(self) -> impl Iterator<Item = ActGroup<'a>> {
        let planes = self.words.iter().zip(self.terms);
        planes.map(|(words, terms)| ActGroup { words, terms })
    }

    /// Returns the runs of the row.
    #[inline(always)]
    pub(super) fn runs<const T: usize, const W: usize>(
        self,
    ) -> impl Iterator<Item = ActRun<'a, T, W>> {
        runs(self.words.as_flattened(), self.terms.as_flattened())
    }

    /// Returns the row's power of two in all lanes, f32.
    #[inline(always)]
    pub(super) fn factor(self) -> Vector {
        hvx::load(self.factor)
    }
}

/// 1024 elements of an [`ActRow`].
#[derive(Clone, Copy)]
pub(super) struct ActGroup<'a> {
    words: &'a [Line; WORD_LINES],
    terms: &'a [Line; TERM_LINES],
}

impl<'a> ActGroup<'a> {
    /// Returns the quants of all blocks.
    #[inline(always)]
    pub(super) fn lines(self) -> &'a [Line; WORD_LINES] {
        self.words
    }

    /// Returns the quants of each block, as words of four.
    #[inline(always)]
    pub(super) fn words(self) -> &'a [[i32; 8]; GROUP_TILES] {
        bytemuck::cast_ref(self.words)
    }

    /// Returns the same words by doublewords, which the DSP loads at the price of one word.
    #[inline(always)]
    pub(super) fn word_pairs(self) -> &'a [WordPairs; GROUP_TILES] {
        bytemuck::cast_ref(self.words)
    }

    /// Returns the f32 scale of each block.
    #[inline(always)]
    pub(super) fn block_scales(self) -> Vector {
        self.block_terms()[0]
    }

    /// Returns the scale and the product of each block, f32.
    #[inline(always)]
    pub(super) fn block_terms(self) -> [Vector; 2] {
        let [first, second] = self.terms.each_ref().map(hvx::load);
        let (even, odd) = hvx::deal_w(first, second);
        [even, odd].map(|words| {
            let (terms, _) = hvx::deal_w(words, words);
            hvx::widen_in_order_f16(terms).0
        })
    }

    /// Returns the terms of each two blocks.
    #[inline(always)]
    pub(super) fn terms(self) -> &'a [Terms; GROUP_TILES / 2] {
        bytemuck::cast_ref(self.terms)
    }

    /// Returns the runs of the group.
    #[inline(always)]
    pub(super) fn runs<const T: usize, const W: usize>(
        self,
    ) -> impl Iterator<Item = ActRun<'a, T, W>> {
        runs(self.words, self.terms)
    }
}

/// The activations of one row for a run: `T` tiles that share a line of weight scales, two for each
/// of `W` [`Terms`].
#[derive(Clone, Copy)]
pub(super) struct ActRun<'a, const T: usize, const W: usize> {
    /// The quants.
    pub(super) words: &'a [[i32; 8]; T],
    /// The quants as doublewords.
    pub(super) pairs: &'a [WordPairs; T],
    /// Scales and sums.
    pub(super) terms: &'a [Terms; W],
}

/// Returns the runs of planes.
///
/// The slices are zipped because an iterator checks their bounds once instead of in each iteration
/// for each slice.
#[inline(always)]
fn runs<'a, const T: usize, const W: usize>(
    words: &'a [Line],
    terms: &'a [Line],
) -> impl Iterator<Item = ActRun<'a, T, W>> {
    let pairs: &[WordPairs] = bytemuck::cast_slice(words);
    let words: &[[i32; 8]] = bytemuck::cast_slice(words);
    let terms: &[Terms] = bytemuck::cast_slice(terms);
    let words = words.as_chunks().0.iter().zip(pairs.as_chunks().0);
    words
        .zip(terms.as_chunks().0)
        .map(|((words, pairs), terms)| ActRun {
            words,
            pairs,
            terms,
        })
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

/// Returns the number of groups of a row of `k` activations.
#[must_use]
pub const fn groups(k: usize) -> usize {
    k.div_ceil(GROUP)
}

/// [`ActRow`] to be written.
struct ActRowMut<'a> {
    factor: &'a mut Line,
    words: &'a mut [[Line; WORD_LINES]],
    terms: &'a mut [[Line; TERM_LINES]],
}

impl<'a> ActRowMut<'a> {
    /// Returns the planes of `lines`, which are for a row of `k` elements: whole blocks.
    fn new(k: usize, lines: &'a mut [Line]) -> Result<Self> {
        let whole = k / TILE_DIM * TILE_DIM;
        if whole != k {
            return Err(Error::Length {
                what: "activation row",
                have: k,
                want: whole,
            });
        }
        let (have, want) = (lines.len(), act_lines(k));
        let Some((factor, rest)) = lines.split_first_mut().filter(|_| have == want) else {
            return Err(Error::Length {
                what: "lines of quantized activations",
                have,
                want,
            });
        };
        let (words, terms) = rest.split_at_mut(groups(k) * WORD_LINES);
        Ok(Self {
            factor,
            words: words.as_chunks_mut().0,
            terms: terms.as_chunks_mut().0,
        })
    }

    /// Returns the groups in their order.
    #[inline(always)]
    fn each_group(self) -> impl Iterator<Item = ActGroupMut<'a>> {
        let planes = self.words.iter_mut().zip(self.terms);
        planes.map(|(words, terms)| ActGroupMut { words, terms })
    }
}

/// [`ActGroup`] to be written.
struct ActGroupMut<'a> {
    words: &'a mut [Line; WORD_LINES],
    terms: &'a mut [Line; TERM_LINES],
}

/// Quantizes one row of activations.
///
/// - `row`: K f32, a multiple of 32
/// - `form`: that of the kernel that reads them
/// - `out`: [`act_lines`] of K
///
/// # Errors
/// `Length` if `row` is not a multiple of 32 long, or if `out` has another length.
pub fn quantize_row(row: &[f32], form: ActForm, out: &mut [Line]) -> Result<()> {
    let out = ActRowMut::new(row.len(), out)?;
    hvx::widest(QuantizeRow {
        row,
        form,
        out,
        rest: None,
    });
    Ok(())
}

/// As [`quantize_row`], and quantizes the remainder again: together 16 bits.
///
/// - `out`: the lines of the row, then those of the remainder
///
/// # Errors
/// As [`quantize_row`].
pub fn quantize_row_twice(row: &[f32], form: ActForm, out: [&mut [Line]; 2]) -> Result<()> {
    let [first, rest] = out;
    let out = ActRowMut::new(row.len(), first)?;
    let rest = Some(ActRowMut::new(row.len(), rest)?);
    hvx::widest(QuantizeRow {
        row,
        form,
        out,
        rest,
    });
    Ok(())
}

/// The arguments of [`quantize_row`] and [`quantize_row_twice`] after their checks.
struct QuantizeRow<'a> {
    row: &'a [f32],
    form: ActForm,
    out: ActRowMut<'a>,
    rest: Option<ActRowMut<'a>>,
}

impl hvx::Kernel for QuantizeRow<'_> {
    type Output = ();
    const INLINED: bool = true;

    #[inline(always)]
    fn run(self) {
        match self.form {
            ActForm::Bytes => self.quantize::<false, false>(),
            ActForm::Nibbles => self.quantize::<true, false>(),
            ActForm::Halves => self.quantize::<false, true>(),
        }
    }
}

impl QuantizeRow<'_> {
    #[inline(always)]
    fn quantize<const NIBBLES: bool, const HALVES: bool>(self) {
        let Self { row, out, rest, .. } = self;
        let factors = Factors::of::<NIBBLES>(row);
        hvx::store(out.factor, factors.first);
        let factor = *out.factor;
        hvx::store(out.factor, hvx::or(factors.first, factors.nan));
        let Some(rest) = rest else {
            let (full, tail) = row.as_chunks::<GROUP>();
            let mut outs = out.each_group();
            for (elems, out) in full.iter().zip(&mut outs) {
                quantize_group::<NIBBLES, HALVES>(elems, &factor, out);
            }
            if let (false, Some(out)) = (tail.is_empty(), outs.next()) {
                let mut padded = hvx::zeros::<{ GROUP / TILE_DIM }>();
                let padded: &mut [f32; GROUP] = bytemuck::cast_mut(&mut padded);
                hvx::copy_f32(padded, tail);
                quantize_group::<NIBBLES, HALVES>(padded, &factor, out);
            }
            return;
        };
        hvx::store(rest.factor, factors.rest);
        let factors = [factor, *rest.factor];
        let outs = out.each_group().zip(rest.each_group());
        for (elems, (first, rest)) in row.chunks(GROUP).zip(outs) {
            quantize_group_twice::<NIBBLES, HALVES>(elems, &factors, first, rest);
        }
    }
}

/// Powers of two, f32 in all lanes: of a row, and of its quantization's remainder.
///
/// Scales and products are multiples of the factor in f16, normal and finite. With 2^e the exponent
/// of the row's largest element and `S` the sum of its magnitudes:
///
/// - Products: a block's sum is at most 32 elements, 2^15 times 2^(e - 9), and at most `S`. A
///   block's remainder is at most half a step, 17/16 / 254 of its largest element, so its sum is at
///   most 32 times as much, 17,150 times 2^(e - 16), and at most 0.134 · `S`.
/// - Scales for nibbles are a sixteenth of a step. Blocks that are 2^13 times smaller than the
///   largest keep 8 bits only with a factor under 2^(e - 9). Where a few elements are so large, `S`
///   is not much larger than they are, and allows for it: `S` / 2^15, but at least 2^(e - 13), at
///   which the largest scale is 8.6.
struct Factors {
    first: Vector,
    rest: Vector,
    /// NaN if an element is not finite, otherwise 0.
    nan: Vector,
}

impl Factors {
    #[inline(always)]
    fn of<const NIBBLES: bool>(row: &[f32]) -> Self {
        let (fours, rest) = row.as_chunks::<TILE_DIM>().0.as_chunks::<4>();
        let mut most = [RowMost::new(); 4];
        for four in fours {
            for (most, block) in most.iter_mut().zip(four) {
                most.take::<NIBBLES>(block);
            }
        }
        for (most, block) in most.iter_mut().zip(rest) {
            most.take::<NIBBLES>(block);
        }
        let [a, b, c, d] = most.map(|most| most.largest);
        let largest = hvx::max_w(hvx::max_w(a, b), hvx::max_w(c, d));
        // The lower limit keeps the factors and their inverses normal numbers.
        let lowest = hvx::splat_w(36 << 23);
        let e = hvx::max_w(exponent(all_lanes(largest, hvx::max_w)), lowest);
        let (first, rest) = (lower(e, 9), lower(e, 16));
        // Adding 1 to the exponent field of infinity and NaN, 255, sets the sign bit.
        let nan = hvx::sub_w(
            hvx::splat_w(0),
            hvx::shr_w(hvx::add_w(e, hvx::splat_w(1 << 23)), 31),
        );
        if !NIBBLES {
            return Self { first, rest, nan };
        }
        let [a, b, c, d] = most.map(|most| most.sum);
        let sum = hvx::add_f32(hvx::add_f32(a, b), hvx::add_f32(c, d));
        let sum = exponent(all_lanes(sum, hvx::add_f32));
        Self {
            first: hvx::min_w(first, hvx::max_w(lower(e, 13), lower(sum, 14))),
            rest: hvx::min_w(rest, hvx::max_w(lower(e, 20), lower(sum, 17))),
            nan,
        }
    }
}

/// The largest magnitudes of a row in each lane, as bits, and the sums of magnitudes.
#[derive(Clone, Copy)]
struct RowMost {
    largest: Vector,
    sum: Vector,
}

impl RowMost {
    #[inline(always)]
    fn new() -> Self {
        let zero = hvx::splat_w(0);
        Self {
            largest: zero,
            sum: zero,
        }
    }

    #[inline(always)]
    fn take<const NIBBLES: bool>(&mut self, block: &[f32; TILE_DIM]) {
        let elems = hvx::load_f32(block);
        self.largest = hvx::larger_f32(self.largest, elems);
        if NIBBLES {
            self.sum = hvx::add_f32(self.sum, hvx::and(elems, hvx::splat_w(0x7fff_ffff)));
        }
    }
}

/// Returns the exponent fields of f32 in their places: powers of two at most as large.
#[inline(always)]
pub(super) fn exponent(v: Vector) -> Vector {
    hvx::and(v, hvx::splat_w(0x7f80_0000))
}

/// Returns powers of two divided by 2^`exponents`; not powers of two if they are too small for
/// that.
#[inline(always)]
pub(super) fn lower(power: Vector, exponents: i32) -> Vector {
    hvx::sub_w(power, hvx::splat_w(exponents << 23))
}

/// Returns the inverse of a power of two.
#[inline(always)]
fn inverse(factor: &Line) -> Vector {
    hvx::sub_w(hvx::splat_w(254 << 23), hvx::load(factor))
}

/// Quantizes up to one group, and its remainder.
///
/// - `factors`: those of the row and of the remainder
#[cfg_attr(target_arch = "hexagon", inline(never))]
#[cfg_attr(not(target_arch = "hexagon"), inline(always))]
fn quantize_group_twice<const NIBBLES: bool, const HALVES: bool>(
    elems: &[f32],
    factors: &[Line; 2],
    first: ActGroupMut<'_>,
    rest: ActGroupMut<'_>,
) {
    let mut left = hvx::zeros::<{ GROUP / TILE_DIM }>();
    let left: &mut [f32; GROUP] = bytemuck::cast_mut(&mut left);
    hvx::copy_f32(left, elems);
    let ActGroupMut { words, terms } = first;
    let out = ActGroupMut {
        words: &mut *words,
        terms: &mut *terms,
    };
    quantize_group::<NIBBLES, HALVES>(left, &factors[0], out);
    subtract::<NIBBLES>(left, &factors[0], ActGroup { words, terms });
    quantize_group::<NIBBLES, HALVES>(left, &factors[1], rest);
}

/// Subtracts the quantized elements, of a row with `factor`, from the elements.
#[inline(always)]
fn subtract<const NIBBLES: bool>(elems: &mut [f32; GROUP], factor: &Line, quantized: ActGroup<'_>) {
    let scales = quantized.block_scales();
    let mut steps = Line::ZERO;
    hvx::store(&mut steps, hvx::mul_f32(scales, hvx::load(factor)));
    let multipliers = multipliers::<NIBBLES>(scales, inverse(factor));
    let steps: &[[i32; 2]; GROUP_TILES / 2] = bytemuck::cast_ref(&steps);
    let multipliers: &[[i32; 2]; GROUP_TILES / 2] = bytemuck::cast_ref(&multipliers);
    let pairs = elems.as_chunks_mut::<TILE_DIM>().0.as_chunks_mut::<2>().0;
    for ((pair, steps), multipliers) in pairs.iter_mut().zip(steps).zip(multipliers) {
        let exact = pair.each_ref().map(hvx::load_f32);
        // The same operations as in `quantize_group`, so the same integers.
        let rounded = round::<NIBBLES>(exact, multipliers.map(hvx::splat_w));
        for (i, block) in pair.iter_mut().enumerate() {
            let mut elem = hvx::unbias(rounded[i], ROUNDER);
            if NIBBLES {
                let (_, high) = hvx::swap_blocks::<16>(elem, hvx::splat_w(0));
                elem = hvx::add_f32(hvx::mul_f32(elem, hvx::splat_f32(PARTS)), high);
            }
            let taken = hvx::mul_f32(elem, hvx::splat_w(steps[i]));
            hvx::store_f32(block, hvx::sub_f32(exact[i], taken));
        }
    }
}

/// Returns the factors from elements to quants of 32 blocks.
#[inline(always)]
fn multipliers<const NIBBLES: bool>(scales: Vector, inverse_factor: Vector) -> Line {
    let mut per_step = hvx::mul_f32(reciprocal(scales), inverse_factor);
    if NIBBLES {
        per_step = hvx::mul_f32(per_step, hvx::splat_f32(PART));
    }
    let mut out = Line::ZERO;
    hvx::store(&mut out, per_step);
    out
}

/// Returns the quants of two blocks plus [`ROUNDER`], f32.
#[inline(always)]
fn round<const NIBBLES: bool>(elems: [Vector; 2], multipliers: [Vector; 2]) -> [Vector; 2] {
    let rounder = hvx::splat_f32(ROUNDER);
    let rounded =
        |elems: Vector, multiplier: Vector| hvx::add_f32(hvx::mul_f32(elems, multiplier), rounder);
    if !NIBBLES {
        return [
            rounded(elems[0], multipliers[0]),
            rounded(elems[1], multipliers[1]),
        ];
    }
    let (low, high) = hvx::swap_blocks::<16>(elems[0], elems[1]);
    let (multiplier, _) = hvx::swap_blocks::<16>(multipliers[0], multipliers[1]);
    let high = rounded(high, multiplier);
    let low = Accumulator::product(low, multiplier)
        .mul_add(hvx::unbias(high, ROUNDER), hvx::splat_f32(-PART))
        .plus_f32(rounder)
        .to_f32();
    let (first, second) = hvx::swap_blocks::<16>(low, high);
    [first, second]
}

/// Returns the largest magnitude of each of 32 blocks, in units of the factor; with `NIBBLES`, of
/// low elements after subtracting sixteenths of the high ones.
#[inline(always)]
fn largest_of<const NIBBLES: bool>(elems: &[f32; GROUP], inverse_factor: Vector) -> Vector {
    // Magnitudes compare like their bits, so the integer maximum is theirs.
    let bits = hvx::splat_w(0x7fff_ffff);
    let blocks = elems.as_chunks::<TILE_DIM>().0;
    if !NIBBLES {
        let mut partial = [bits; 4];
        for (eight, partial) in blocks.as_chunks::<8>().0.iter().zip(&mut partial) {
            let magnitudes = (eight.each_ref()).map(|block| hvx::and(hvx::load_f32(block), bits));
            *partial = reduce(magnitudes, hvx::max_w);
        }
        return hvx::mul_f32(reduce(partial, hvx::max_w), inverse_factor);
    }
    let part = hvx::mul_f32(inverse_factor, hvx::splat_f32(-PART));
    // Differences go to lines in memory as f32: too many at once would be stored as qfloat values.
    let mut pairs = LinePlanes::<{ GROUP_TILES / 2 }>::unfilled();
    pairs.fill_first(blocks.as_chunks().0.iter().map(|[first, second]| {
        let (low, high) = hvx::swap_blocks::<16>(hvx::load_f32(first), hvx::load_f32(second));
        // Scaled before subtracting, because a difference of the largest f32 would be infinite.
        let brought = hvx::mul_f32(high, part);
        let reach = Accumulator::product(low, inverse_factor).plus_f32(brought);
        [hvx::larger_f32(
            hvx::and(reach.to_f32(), bits),
            hvx::mul_f32(high, inverse_factor),
        )]
    }));
    let mut partial = [bits; 4];
    for (four, partial) in pairs.lines()[0].as_chunks::<4>().0.iter().zip(&mut partial) {
        *partial = reduce(four.each_ref().map(hvx::load), hvx::max_w);
    }
    reduce(partial, hvx::max_w)
}

/// Reduces 32 lanes of each of 32 vectors to one lane each: lane b of the result is vector b
/// reduced by `join`.
///
/// Each level joins the even and odd lanes of two vectors, which halves both and puts the halves
/// next to each other.
#[inline(always)]
pub(super) fn reduce<const N: usize>(
    vectors: [Vector; N],
    join: fn(Vector, Vector) -> Vector,
) -> Vector {
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
fn quantize_group<const NIBBLES: bool, const HALVES: bool>(
    elems: &[f32; GROUP],
    factor: &Line,
    out: ActGroupMut<'_>,
) {
    let inverse_factor = inverse(factor);
    let amax = largest_of::<NIBBLES>(elems, inverse_factor);
    let parts = if NIBBLES { PARTS } else { 1.0 };
    let scale = hvx::mul_f32(amax, hvx::splat_f32(1.0 / (MOST * parts)));
    let scale_f16 = hvx::max_h(hvx::narrow_f32(scale, scale), hvx::splat_h(0x0400));
    let (scale, _) = hvx::widen_mul_f16(scale_f16, hvx::splat_h(0x3c00));
    let multipliers = multipliers::<NIBBLES>(scale, inverse_factor);
    let weights = if NIBBLES {
        hvx::load(&NIBBLE_WEIGHTS)
    } else {
        hvx::splat_b(1)
    };
    let multipliers: &[[i32; 4]; 8] = bytemuck::cast_ref(&multipliers);
    let mut sums = [weights; 8];
    let fours = elems.as_chunks::<TILE_DIM>().0.as_chunks::<4>().0;
    for (((four, multiplier), words), sum) in
        fours.iter().zip(multipliers).zip(out.words).zip(&mut sums)
    {
        let [a, b, c, d] = multiplier.map(hvx::splat_w);
        let [first, second, third, fourth] = four.each_ref().map(hvx::load_f32);
        let [first, second] = round::<NIBBLES>([first, second], [a, b]);
        let [third, fourth] = round::<NIBBLES>([third, fourth], [c, d]);
        let (k01, k23) = hvx::deal_w(
            hvx::pack_low_h(first, second),
            hvx::pack_low_h(third, fourth),
        );
        let bytes = hvx::interleave_even_b(k01, k23);
        *sum = hvx::dot4_each(weights, bytes);
        hvx::store(words, bytes);
    }
    let sums = reduce(sums, hvx::add_w);
    let product = hvx::mul_f32(hvx::f32_from_w(sums), scale);
    let products = if HALVES {
        powers(scale)
    } else {
        hvx::narrow_f32(product, product)
    };
    // The f16, two in a word, and the sums of even and odd blocks fill half a vector each.
    let (even, odd) = hvx::deal_w(sums, sums);
    let (even, _) = hvx::interleave_w(hvx::pack_low_h(scale_f16, scale_f16), even);
    let (odd, _) = hvx::interleave_w(hvx::pack_low_h(products, products), odd);
    let (first, second) = hvx::interleave_w(even, odd);
    hvx::store(&mut out.terms[0], first);
    hvx::store(&mut out.terms[1], second);
}

/// Returns the powers of [`ActForm::Halves`] for the scales of 32 blocks, f16 in the order of the
/// blocks, twice.
#[inline(always)]
fn powers(scales: Vector) -> Vector {
    let mut largest = scales;
    for _ in 0..3 {
        let (even, odd) = hvx::deal_w(largest, largest);
        largest = hvx::max_w(even, odd);
    }
    // 4 divided by the largest scale's power of two.
    let exponents = hvx::sub_w(hvx::splat_w(129 << 23), exponent(largest));
    let exponents = hvx::max_w(exponents, hvx::splat_w(0));
    let exponents = hvx::min_w(exponents, hvx::splat_w(7 << 23));
    let mut powers = hvx::add_w(exponents, hvx::splat_f32(1.0));
    // Three steps spread each super-block's scale over its 8 blocks.
    for _ in 0..3 {
        (powers, _) = hvx::interleave_w(powers, powers);
    }
    hvx::narrow_f32(powers, powers)
}

/// Returns 1 / `d` for normal positive f32 lanes, to within 2^-22: an estimate by the exponent,
/// then three Newton steps.
///
/// SOURCE: the estimate's error is at most 12 %, squared by each step: 1.5e-2, 2.1e-4, 4.4e-8.
#[inline(always)]
pub(super) fn reciprocal(d: Vector) -> Vector {
    let two = hvx::splat_f32(2.0);
    let mut r = hvx::sub_w(hvx::splat_w(0x7ef3_11c7), d);
    for _ in 0..3 {
        r = hvx::mul_f32(r, hvx::sub_f32(two, hvx::mul_f32(d, r)));
    }
    r
}
