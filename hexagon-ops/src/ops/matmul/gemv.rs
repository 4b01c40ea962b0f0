//! Integer dot products of packed quantized weights with quantized activations: M of 1 or 2.
//!
//! ```text
//! for each group of 1024 along K
//!   for each pair (MXFP4: four) of tiles
//!     joint = weight scales · activation scales                 one widening multiply for two tiles
//!     for each tile, each strip, each row of activations
//!       dot[n] = -zero · sum(q_act)  +  Σ over 8 words g of  quants[g][n] · act[g]       unsigned · signed bytes
//!       sum[n] += dot[n] · joint[n]
//!   total[n] += sum[n] · group factor
//! ```
//!
//! 1. Activations sit in scalar registers: a word of four multiplies all 32 columns, so no vector loads for them.
//! 2. Weights stay unsigned (q + zero); what that adds is taken off by the start value.
//! 3. Two strips share the scalar loads and the scale of the activations (M = 1), or two rows share the unpacked
//!    weights (M = 2).
//!
//! A dot product of 32 is at most 32 · 255 · 127 < 2^24: its conversion to f32 is exact.

use super::Panel;
use super::dequantize::{byte_table, e8m0_words};
use super::quantize::{ActGroup, GROUP_TILES, groups};
use crate::error::{Error, Result};
use crate::hvx::{self, Accumulator, Vector};
use crate::layout::{Line, TILE_DIM, WeightType};

/// How one weight type's tiles become integer dot products and scales.
///
/// `L` lines of quants a tile, `T` tiles a line of scales, `W = T / 2` words of activation scales for these.
trait Format<const L: usize, const T: usize, const W: usize>: Copy {
    /// What is added to each weight to make it unsigned.
    const ZERO: i32;
    /// The dot products are this many times what they stand for.
    const GAIN: i32 = 1;
    /// Whether the planes hold minima.
    const HAS_MIN: bool = false;
    /// Form of a tile that several rows of activations share.
    type Unpacked: Copy;

    /// Prepares a tile for [`Self::dot`].
    fn unpack(self, quants: &[Line; L]) -> Self::Unpacked;

    /// `start + GAIN · Σ quants · act`, for 8 words of activations.
    fn dot(self, start: Vector, quants: Self::Unpacked, act: &[i32; 8]) -> Vector;

    /// f32 products of the weight scales in `line` and the activation scales in `act`, two blocks a word.
    fn joint_scales(self, line: Vector, act: [i32; W]) -> [Vector; T];
}

/// `start` plus the products of 8 vectors with 8 words.
#[inline(always)]
fn dot8(start: Vector, quants: [Vector; 8], act: &[i32; 8]) -> Vector {
    let mut dot = start;
    for (quants, word) in quants.iter().zip(act) {
        dot = hvx::dot4_acc(dot, *quants, *word);
    }
    dot
}

/// f16 scales of two tiles times those of two blocks of activations.
#[inline(always)]
fn f16_scales(line: Vector, act: i32) -> [Vector; 2] {
    let (even, odd) = hvx::widen_mul_f16(line, hvx::splat_w(act));
    [even, odd]
}

/// Nibbles that are the weight plus `ZERO`.
///
/// Both nibbles are masked where they are, which costs no shift (one per packet at most): the high ones then count 16
/// times, the low ones are shifted once per tile instead, and the sum's scale takes 16 back.
#[derive(Clone, Copy)]
struct Plain<const ZERO: i32, const HAS_MIN: bool>;

impl<const ZERO: i32, const HAS_MIN: bool> Format<4, 2, 1> for Plain<ZERO, HAS_MIN> {
    const ZERO: i32 = ZERO;
    const GAIN: i32 = 16;
    const HAS_MIN: bool = HAS_MIN;
    type Unpacked = [[Vector; 4]; 2];

    #[inline(always)]
    fn unpack(self, quants: &[Line; 4]) -> Self::Unpacked {
        let (low_mask, high_mask) = (hvx::splat_b(0x0f), hvx::splat_b(0xf0));
        let mut both = [[low_mask; 4]; 2];
        for (v, line) in quants.iter().enumerate() {
            let line = hvx::load(line);
            both[0][v] = hvx::and(line, low_mask);
            both[1][v] = hvx::and(line, high_mask);
        }
        both
    }

    #[inline(always)]
    fn dot(self, start: Vector, [low, high]: Self::Unpacked, act: &[i32; 8]) -> Vector {
        let mut high_dot = start;
        let mut low_dot = hvx::dot4_word(low[0], act[0]);
        for v in 0..4 {
            high_dot = hvx::dot4_acc(high_dot, high[v], act[4 + v]);
            if v > 0 {
                low_dot = hvx::dot4_acc(low_dot, low[v], act[v]);
            }
        }
        hvx::shl_add_w(high_dot, low_dot, 4)
    }

    #[inline(always)]
    fn joint_scales(self, line: Vector, [act]: [i32; 1]) -> [Vector; 2] {
        f16_scales(line, act)
    }
}

/// Flipped bytes.
#[derive(Clone, Copy)]
struct Bytes;

impl Format<8, 2, 1> for Bytes {
    const ZERO: i32 = 128;
    type Unpacked = [Vector; 8];

    #[inline(always)]
    fn unpack(self, quants: &[Line; 8]) -> [Vector; 8] {
        let [a, b, c, d, e, f, g, h] = quants;
        [a, b, c, d, e, f, g, h].map(hvx::load)
    }

    #[inline(always)]
    fn dot(self, start: Vector, quants: [Vector; 8], act: &[i32; 8]) -> Vector {
        dot8(start, quants, act)
    }

    #[inline(always)]
    fn joint_scales(self, line: Vector, [act]: [i32; 1]) -> [Vector; 2] {
        f16_scales(line, act)
    }
}

/// Nibbles that are an index into a table of flipped bytes.
#[derive(Clone, Copy)]
struct Table(Vector);

impl Table {
    /// Bytes of a tile: the low nibbles' four vectors, then the high nibbles'.
    #[inline(always)]
    fn look_up(self, quants: &[Line; 4]) -> [Vector; 8] {
        let mut bytes = [self.0; 8];
        for (v, line) in quants.iter().enumerate() {
            let line = hvx::load(line);
            // The table repeats after 16 entries, so the fifth bit that comes with a low nibble does not matter.
            bytes[v] = hvx::lookup32(line, self.0);
            bytes[4 + v] = hvx::lookup32(hvx::shr_b(line, 4), self.0);
        }
        bytes
    }
}

impl Format<4, 2, 1> for Table {
    const ZERO: i32 = 128;
    type Unpacked = [Vector; 8];

    #[inline(always)]
    fn unpack(self, quants: &[Line; 4]) -> [Vector; 8] {
        self.look_up(quants)
    }

    #[inline(always)]
    fn dot(self, start: Vector, quants: [Vector; 8], act: &[i32; 8]) -> Vector {
        dot8(start, quants, act)
    }

    #[inline(always)]
    fn joint_scales(self, line: Vector, [act]: [i32; 1]) -> [Vector; 2] {
        f16_scales(line, act)
    }
}

impl Format<4, 4, 2> for Table {
    const ZERO: i32 = 128;
    type Unpacked = [Vector; 8];

    #[inline(always)]
    fn unpack(self, quants: &[Line; 4]) -> [Vector; 8] {
        self.look_up(quants)
    }

    #[inline(always)]
    fn dot(self, start: Vector, quants: [Vector; 8], act: &[i32; 8]) -> Vector {
        dot8(start, quants, act)
    }

    #[inline(always)]
    fn joint_scales(self, line: Vector, act: [i32; 2]) -> [Vector; 4] {
        let one = hvx::splat_h(0x3c00);
        let act = [f16_scales(one, act[0]), f16_scales(one, act[1])];
        let mut joint = [line; 4];
        for (i, joint) in joint.iter_mut().enumerate() {
            // The f32 2^(e-128) has the exponent field e - 1; e = 0 is below f32's normal numbers and becomes 0.
            let e = hvx::max_w(hvx::sub_w(e8m0_words(line, i), hvx::splat_w(1)), hvx::splat_w(0));
            *joint = hvx::mul_f32(hvx::shl_w(e, 23), act[i / 2][i % 2]);
        }
        joint
    }
}

/// Sums of `S` strips by `R` rows.
type Sums<const S: usize, const R: usize> = [[Accumulator; R]; S];

/// One strip's part of a group: runs of `T` tiles that share a line of scales, then fewer than `T`.
#[derive(Clone, Copy)]
struct StripRuns<'a, const L: usize, const T: usize> {
    quants: &'a [[[Line; L]; T]],
    rest: &'a [[Line; L]],
    scales: &'a [Line],
    mins: &'a [Line],
}

impl<'a, const L: usize, const T: usize> StripRuns<'a, L, T> {
    /// The `n_tiles` tiles of group `g`; every slice is trimmed so that one comparison bounds the loop over all.
    #[inline(always)]
    fn new(panel: &Panel<'a>, g: usize, n_tiles: usize, has_min: bool) -> Self {
        let tiles = &panel.quants.as_chunks::<L>().0[g * GROUP_TILES..][..n_tiles];
        let scales = &panel.scales[g * GROUP_TILES / T..][..n_tiles.div_ceil(T)];
        let mins = if has_min { &panel.mins[g * GROUP_TILES / T..][..n_tiles.div_ceil(T)] } else { scales };
        let (quants, rest) = tiles.as_chunks::<T>();
        Self { quants: &quants[..n_tiles / T], rest, scales, mins }
    }
}

/// One row's part of a group, in the same runs.
#[derive(Clone, Copy)]
struct ActRuns<'a, const T: usize, const W: usize> {
    words: &'a [[[i32; 8]; T]],
    sums: &'a [[i32; T]],
    scales: &'a [[i32; W]],
    products: &'a [[i32; W]],
}

impl<'a, const T: usize, const W: usize> ActRuns<'a, T, W> {
    /// The first `n_runs` runs of a group.
    #[inline(always)]
    fn new(group: &'a ActGroup, n_runs: usize) -> Self {
        let [scales, products] = group.scales();
        Self {
            words: &group.words().as_chunks::<T>().0[..n_runs],
            sums: &group.sums().as_chunks::<T>().0[..n_runs],
            scales: &scales.as_chunks::<W>().0[..n_runs],
            products: &products.as_chunks::<W>().0[..n_runs],
        }
    }
}

/// Adds the tiles of run `p` of one strip to its sums.
#[inline(always)]
fn add_run<F: Format<L, T, W>, const L: usize, const T: usize, const W: usize, const R: usize>(
    format: F,
    quants: &[[Line; L]],
    [scale, min]: [&Line; 2],
    acts: &[ActRuns<'_, T, W>; R],
    p: usize,
    sums: &mut [Accumulator; R],
) {
    let scale = hvx::load(scale);
    let mut joints = [[scale; T]; R];
    for r in 0..R {
        joints[r] = format.joint_scales(scale, acts[r].scales[p]);
    }
    for (i, quants) in quants.iter().enumerate().take(T) {
        let quants = format.unpack(quants);
        for r in 0..R {
            let start = hvx::splat_w(-F::ZERO * F::GAIN * acts[r].sums[p][i]);
            let dot = format.dot(start, quants, &acts[r].words[p][i]);
            sums[r] = sums[r].mul_add(hvx::f32_from_w(dot), joints[r][i]);
        }
    }
    if F::HAS_MIN {
        // The sums are GAIN times too large, so the minima's share must be as well: f16 holds powers of two exactly.
        let min = hvx::mul_f16(hvx::load(min), hvx::splat_h(F16_GAIN));
        for r in 0..R {
            let [even, odd] = f16_scales(min, acts[r].products[p][0]);
            sums[r] = sums[r].plus(even).plus(odd);
        }
    }
}

/// f16 bits of 16, the gain of the formats that have minima.
const F16_GAIN: u16 = 0x4c00;

/// The products of `S` strips with `R` rows of activations.
#[inline(always)]
fn dot_strips<F: Format<L, T, W>, const L: usize, const T: usize, const W: usize, const S: usize, const R: usize>(
    format: F,
    panels: [&Panel<'_>; S],
    acts: [&[ActGroup]; R],
) -> [[Vector; R]; S] {
    let zero = hvx::splat_w(0);
    let take_gain_back = hvx::splat_f32(1.0 / F::GAIN as f32);
    let mut totals: Sums<S, R> = [[Accumulator::from_f32(zero); R]; S];
    for g in 0..acts[0].len() {
        let n_tiles = (panels[0].layout.k_tiles() - g * GROUP_TILES).min(GROUP_TILES);
        let mut strips = [StripRuns::<L, T> { quants: &[], rest: &[], scales: &[], mins: &[] }; S];
        for s in 0..S {
            strips[s] = StripRuns::new(panels[s], g, n_tiles, F::HAS_MIN);
        }
        let mut rows = [ActRuns::<T, W> { words: &[], sums: &[], scales: &[], products: &[] }; R];
        for r in 0..R {
            rows[r] = ActRuns::new(&acts[r][g], n_tiles.div_ceil(T));
        }
        let mut sums: Sums<S, R> = [[Accumulator::from_f32(zero); R]; S];
        for p in 0..n_tiles / T {
            for s in 0..S {
                let StripRuns { quants, scales, mins, .. } = strips[s];
                add_run(format, &quants[p], [&scales[p], &mins[p]], &rows, p, &mut sums[s]);
            }
        }
        if !n_tiles.is_multiple_of(T) {
            let p = n_tiles / T;
            for s in 0..S {
                let StripRuns { rest, scales, mins, .. } = strips[s];
                add_run(format, rest, [&scales[p], &mins[p]], &rows, p, &mut sums[s]);
            }
        }
        for s in 0..S {
            for r in 0..R {
                let factor = hvx::mul_f32(acts[r][g].factor(), take_gain_back);
                totals[s][r] = totals[s][r].mul_add(sums[s][r].to_f32(), factor);
            }
        }
    }
    let mut out = [[zero; R]; S];
    for s in 0..S {
        for r in 0..R {
            out[s][r] = totals[s][r].to_f32();
        }
    }
    out
}

/// Columns of one strip for one row of activations.
pub type Columns = [f32; TILE_DIM];

/// Calls the kernel of a weight type for `S` strips and `R` rows.
#[inline(always)]
fn dispatch<const S: usize, const R: usize>(panels: [&Panel<'_>; S], acts: [&[ActGroup]; R]) -> Result<[[Vector; R]; S]> {
    let layout = panels[0].layout;
    if let Some(act) = acts.iter().find(|act| act.len() != groups(layout.k())) {
        return Err(Error::Length { what: "activation groups", have: act.len(), want: groups(layout.k()) });
    }
    if let Some(panel) = panels.iter().find(|panel| panel.layout != layout) {
        return Err(Error::Length { what: "second panel along K", have: panel.layout.k(), want: layout.k() });
    }
    let weight = layout.weight();
    Ok(match weight {
        WeightType::F16 => return Err(Error::NoKernel { weight, kernel: "GEMV" }),
        WeightType::Q4_0 => dot_strips(Plain::<8, false>, panels, acts),
        WeightType::Q4_1 => dot_strips(Plain::<0, true>, panels, acts),
        WeightType::Q8_0 => dot_strips(Bytes, panels, acts),
        WeightType::Iq4Nl => dot_strips::<_, 4, 2, 1, S, R>(Table(hvx::load(&IQ4_NL_BYTES)), panels, acts),
        WeightType::Mxfp4 => dot_strips::<_, 4, 4, 2, S, R>(Table(hvx::load(&MXFP4_BYTES)), panels, acts),
    })
}

static IQ4_NL_BYTES: Line = byte_table(WeightType::Iq4Nl);
static MXFP4_BYTES: Line = byte_table(WeightType::Mxfp4);

/// One row of activations by one strip: 32 columns into `out`.
///
/// # Errors
/// `Length` if the activations have another K than the panel; `NoKernel` for F16 weights.
pub fn gemv_strip(panel: &Panel<'_>, act: &[ActGroup], out: &mut Columns) -> Result<()> {
    let [[sums]] = dispatch([panel], [act])?;
    hvx::store_f32(out, sums);
    Ok(())
}

/// One row of activations by two strips: fewer scalar loads per weight than [`gemv_strip`] twice.
///
/// # Errors
/// As [`gemv_strip`]; `Length` if the panels differ in type or K.
pub fn gemv_two_strips(panels: [&Panel<'_>; 2], act: &[ActGroup], out: [&mut Columns; 2]) -> Result<()> {
    let sums = dispatch(panels, [act])?;
    for (out, [sums]) in out.into_iter().zip(sums) {
        hvx::store_f32(out, sums);
    }
    Ok(())
}

/// Two rows of activations by one strip: the weights are unpacked once.
///
/// # Errors
/// As [`gemv_strip`].
pub fn gemv_two_rows(panel: &Panel<'_>, acts: [&[ActGroup]; 2], out: [&mut Columns; 2]) -> Result<()> {
    let [sums] = dispatch([panel], acts)?;
    for (out, sums) in out.into_iter().zip(sums) {
        hvx::store_f32(out, sums);
    }
    Ok(())
}
