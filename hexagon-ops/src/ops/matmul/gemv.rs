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

/// How one weight type's tiles become unsigned bytes and scales. `L` lines of quants a tile, `T` tiles a line of scales.
trait Format<const L: usize, const T: usize>: Copy {
    /// What is added to each weight to make it unsigned.
    const ZERO: i32;
    /// Whether the planes hold minima.
    const HAS_MIN: bool = false;

    /// The tile's bytes as 8 vectors: vector g holds elements 4g to 4g + 3 of each column.
    fn bytes(self, quants: &[Line; L]) -> [Vector; 8];

    /// f32 products of the weight scales in `line` and the activation scales in `act`, two blocks a word.
    fn joint_scales(self, line: Vector, act: &[i32]) -> [Vector; T];
}

/// Low and high nibbles of four lines, each cleaned by a given function.
#[inline(always)]
fn nibbles(quants: &[Line; 4], low: impl Fn(Vector) -> Vector, high: impl Fn(Vector) -> Vector) -> [Vector; 8] {
    let [a, b, c, d] = quants.each_ref().map(hvx::load);
    [low(a), low(b), low(c), low(d), high(a), high(b), high(c), high(d)]
}

/// f16 scales of two tiles times those of two blocks of activations.
#[inline(always)]
fn f16_scales(line: Vector, act: &[i32]) -> [Vector; 2] {
    let (even, odd) = hvx::widen_mul_f16(line, hvx::splat_w(act[0]));
    [even, odd]
}

/// Nibbles that are the weight plus `ZERO`.
#[derive(Clone, Copy)]
struct Plain<const ZERO: i32, const HAS_MIN: bool>;

impl<const ZERO: i32, const HAS_MIN: bool> Format<4, 2> for Plain<ZERO, HAS_MIN> {
    const ZERO: i32 = ZERO;
    const HAS_MIN: bool = HAS_MIN;

    #[inline(always)]
    fn bytes(self, quants: &[Line; 4]) -> [Vector; 8] {
        let mask = hvx::splat_b(15);
        nibbles(quants, |v| hvx::and(v, mask), |v| hvx::shr_b(v, 4))
    }

    #[inline(always)]
    fn joint_scales(self, line: Vector, act: &[i32]) -> [Vector; 2] {
        f16_scales(line, act)
    }
}

/// Flipped bytes.
#[derive(Clone, Copy)]
struct Bytes;

impl Format<8, 2> for Bytes {
    const ZERO: i32 = 128;

    #[inline(always)]
    fn bytes(self, quants: &[Line; 8]) -> [Vector; 8] {
        quants.each_ref().map(hvx::load)
    }

    #[inline(always)]
    fn joint_scales(self, line: Vector, act: &[i32]) -> [Vector; 2] {
        f16_scales(line, act)
    }
}

/// Nibbles that are an index into a table of flipped bytes, with f16 scales.
#[derive(Clone, Copy)]
struct Table(Vector);

impl Table {
    #[inline(always)]
    fn look_up(self, quants: &[Line; 4]) -> [Vector; 8] {
        // The table repeats after 16 entries, so the fifth bit that comes with a low nibble does not matter.
        nibbles(quants, |v| hvx::lookup32(v, self.0), |v| hvx::lookup32(hvx::shr_b(v, 4), self.0))
    }
}

impl Format<4, 2> for Table {
    const ZERO: i32 = 128;

    #[inline(always)]
    fn bytes(self, quants: &[Line; 4]) -> [Vector; 8] {
        self.look_up(quants)
    }

    #[inline(always)]
    fn joint_scales(self, line: Vector, act: &[i32]) -> [Vector; 2] {
        f16_scales(line, act)
    }
}

impl Format<4, 4> for Table {
    const ZERO: i32 = 128;

    #[inline(always)]
    fn bytes(self, quants: &[Line; 4]) -> [Vector; 8] {
        self.look_up(quants)
    }

    #[inline(always)]
    fn joint_scales(self, line: Vector, act: &[i32]) -> [Vector; 4] {
        let one = hvx::splat_h(0x3c00);
        let act = [f16_scales(one, act), f16_scales(one, &act[1..])];
        core::array::from_fn(|i| {
            // The f32 2^(e-128) has the exponent field e - 1; e = 0 is below f32's normal numbers and becomes 0.
            let e = hvx::max_w(hvx::sub_w(e8m0_words(line, i), hvx::splat_w(1)), hvx::splat_w(0));
            hvx::mul_f32(hvx::shl_w(e, 23), act[i / 2][i % 2])
        })
    }
}

/// Sums of `S` strips by `R` rows.
type Sums<const S: usize, const R: usize> = [[Accumulator; R]; S];

/// Adds `count` tiles (at most `T`) that share a line of scales to the sums. `at` is their index in the group of activations.
#[inline(always)]
fn add_tiles<F: Format<L, T>, const L: usize, const T: usize, const S: usize, const R: usize>(
    format: F,
    quants: [&[[Line; L]]; S],
    scales: [(&Line, &Line); S],
    acts: [&ActGroup; R],
    at: usize,
    sums: &mut Sums<S, R>,
) {
    let joints = scales.map(|(scale, _)| acts.map(|act| format.joint_scales(hvx::load(scale), &act.scales()[0][at / 2..])));
    for i in 0..quants[0].len() {
        for (s, quants) in quants.iter().enumerate() {
            let bytes = format.bytes(&quants[i]);
            for (r, act) in acts.iter().enumerate() {
                let mut dot = hvx::splat_w(-F::ZERO * act.sums()[at + i]);
                for (bytes, word) in bytes.iter().zip(&act.words()[at + i]) {
                    dot = hvx::dot4_acc(dot, *bytes, *word);
                }
                sums[s][r] = sums[s][r].mul_add(hvx::f32_from_w(dot), joints[s][r][i]);
            }
        }
    }
    if F::HAS_MIN {
        for (s, (_, min)) in scales.iter().enumerate() {
            for (r, act) in acts.iter().enumerate() {
                let [even, odd] = f16_scales(hvx::load(min), &act.scales()[1][at / 2..]);
                sums[s][r] = sums[s][r].plus(even).plus(odd);
            }
        }
    }
}

/// The products of `S` strips with `R` rows of activations.
#[inline(always)]
fn dot_strips<F: Format<L, T>, const L: usize, const T: usize, const S: usize, const R: usize>(
    format: F,
    panels: [&Panel<'_>; S],
    acts: [&[ActGroup]; R],
) -> [[Vector; R]; S] {
    let zero = hvx::splat_w(0);
    let mut totals: Sums<S, R> = [[Accumulator::from_f32(zero); R]; S];
    for g in 0..acts[0].len() {
        let group = acts.map(|act| &act[g]);
        let quants = panels.map(|panel| {
            let tiles = panel.quants.as_chunks::<L>().0;
            &tiles[g * GROUP_TILES..tiles.len().min((g + 1) * GROUP_TILES)]
        });
        let scales = panels.map(|panel| &panel.scales[g * GROUP_TILES / T..]);
        let mins = panels.map(|panel| if F::HAS_MIN { &panel.mins[g * GROUP_TILES / T..] } else { panel.scales });
        let mut sums: Sums<S, R> = [[Accumulator::from_f32(zero); R]; S];
        let runs = quants.map(|tiles| tiles.as_chunks::<T>());
        let n_runs = runs[0].0.len();
        for p in 0..n_runs {
            let run = runs.map(|run| run.0[p].as_slice());
            let lines = core::array::from_fn(|s| (&scales[s][p], &mins[s][p]));
            add_tiles(format, run, lines, group, p * T, &mut sums);
        }
        if !runs[0].1.is_empty() {
            let lines = core::array::from_fn(|s| (&scales[s][n_runs], &mins[s][n_runs]));
            add_tiles(format, runs.map(|run| run.1), lines, group, n_runs * T, &mut sums);
        }
        for (totals, sums) in totals.iter_mut().zip(&sums) {
            for ((total, sum), act) in totals.iter_mut().zip(sums).zip(&group) {
                *total = total.mul_add(sum.to_f32(), act.factor());
            }
        }
    }
    totals.map(|rows| rows.map(Accumulator::to_f32))
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
        WeightType::Iq4Nl => dot_strips::<_, 4, 2, S, R>(Table(hvx::load(&IQ4_NL_BYTES)), panels, acts),
        WeightType::Mxfp4 => dot_strips::<_, 4, 4, S, R>(Table(hvx::load(&MXFP4_BYTES)), panels, acts),
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
