//! GEMV: integer dot products of packed quantized weights with quantized activations, for M of 1 or
//! 2.
//!
//! With one or two rows, most of a 32-row tile for the matrix unit would be empty, and dequantizing
//! the weights would cost more than everything else. Here the weights stay integers: activations
//! are quantized to 8 bits ([`super::quantize`]), one instruction (`vrmpy`) multiplies four of them
//! with four weights in each 32-bit lane, and the 32 lanes of a vector are the 32 columns of a
//! strip.
//!
//! ```text
//! sum[n] = 0
//! for each run: the 2 (MXFP4: 4) tiles that share a line of weight scales
//!   joint[tile][n] = weight scale[tile][n] · activation scale[tile]
//!   for each tile of the run, each strip, each row of activations
//!     dot[n]  = -ZERO · sum of the block's activations
//!     dot[n] += Σ over 8 words g of  quants[g][n] · act[g]      u8 · i8, four products a lane
//!     sum[n] += f32(dot[n]) · joint[tile][n]
//! result[n] = sum[n] · factor of the row
//! ```
//!
//! `S` strips (1 or 2) and `R` rows (1 or 2) are constants of the kernel, as are the weight type's
//! lines and tiles, so all inner loops unroll. The reasons for the details:
//!
//! 1. **Activations are scalars.** A word of four activations is the same for all 32 columns, so it
//!    sits in a scalar register and the instruction spreads it over the vector. The inner loop
//!    loads weights only.
//! 2. **Weights stay unsigned.** The instruction multiplies unsigned by signed bytes, so a weight
//!    is used as q + ZERO (Q4_0: 8, flipped bytes: 128). The excess is ZERO · Σ act, the same for
//!    every column, and is subtracted through the start value; the sums come with the quantized
//!    activations.
//! 3. **One multiply for two scales.** Weight and activation scales are both f16: a widening
//!    multiply of a line of weight scales by a word of two activation scales gives the f32 factors
//!    of two tiles.
//! 4. **Two strips or two rows at a time.** Two strips (M = 1) share the scalar loads and the
//!    activation scales. Two rows (M = 2) share the unpacked weights.
//! 5. **The sum is one tile late** (`LateSum`). Conversion, multiplication and addition of a tile's
//!    dot product are a chain of dependent instructions. Delaying them by a tile lets them share
//!    packets with the next tile's dot products.
//! 6. **Integers are exact.** A dot product of 32 is at most 32 · 255 · 127 < 2^24, so its
//!    conversion to f32 loses nothing.
//! 7. **High nibbles are not masked.** Whole bytes of 4-bit weights are multiplied. This also
//!    multiplies the low nibbles in them, which the quantized activations compensate for
//!    ([`ActForm::Nibbles`]).

mod expanded;
mod few_bits;
mod format;
mod half_scaled;

use self::expanded::dot_super_blocks;
use self::few_bits::{ThreeBitDots, TwoBitDots, dot_few_bits};
use self::format::{Bytes, FiveBitTiles, LookupNibbles, OffsetNibbles, TileFormat};
use self::half_scaled::dot_half_scaled;
use super::Panel;
use super::quantize::{ActForm, ActRow, ActRun, groups};
use super::super_block::{SignedSixBits, UnsignedSixBits};
use crate::error::{Error, Result};
use crate::hvx::{self, Accumulator, Vector};
use crate::layout::{Line, TILE_DIM, WeightType};

/// A sum over tiles that adds each tile while the next one is multiplied. Conversion, product and
/// sum are a chain of dependent instructions, which would otherwise wait for each other at the end
/// of each iteration of the loop.
#[derive(Clone, Copy)]
struct LateSum {
    sum: Accumulator,
    /// The minima of odd tiles, if a multiply-add into two sums puts them apart.
    odd_mins: Accumulator,
    dot: Vector,
    joint: Vector,
}

impl LateSum {
    /// Returns a sum of 0 with a pending product of 0.
    #[inline(always)]
    fn new() -> Self {
        let zero = hvx::splat_w(0);
        Self {
            sum: Accumulator::zero(),
            odd_mins: Accumulator::zero(),
            dot: zero,
            joint: zero,
        }
    }

    /// Adds the pending tile, and makes `dot · joint` the pending one. If `is_late` is `false`,
    /// adds `dot · joint` at once instead.
    #[inline(always)]
    fn push(&mut self, dot: Vector, joint: Vector, is_late: bool) {
        if !is_late {
            self.sum = self.sum.mul_add(hvx::f32_from_small_w(dot), joint);
            return;
        }
        self.sum = self
            .sum
            .mul_add(hvx::f32_from_small_w(self.dot), self.joint);
        (self.dot, self.joint) = (dot, joint);
    }

    /// Adds the minima of two tiles, f16, times `products`; those of the odd tile to a second sum
    /// if `is_apart`.
    #[inline(always)]
    fn add_mins(&mut self, mins: Vector, products: Vector, is_apart: bool) {
        if is_apart {
            let sums = (self.sum, self.odd_mins);
            (self.sum, self.odd_mins) = Accumulator::widen_mul_add(sums, mins, products);
        } else {
            let (even, odd) = Accumulator::widen_mul(mins, products);
            self.sum = self.sum.plus(even).plus(odd);
        }
    }

    /// Adds the second sum of minima to the first.
    #[inline(always)]
    fn join_mins(&mut self) {
        self.sum = self.sum.plus(self.odd_mins);
    }

    /// Returns the sum of everything pushed, f32.
    #[inline(always)]
    fn finish(self, is_late: bool) -> Vector {
        if !is_late {
            return self.sum.to_f32();
        }
        self.sum
            .mul_add(hvx::f32_from_small_w(self.dot), self.joint)
            .to_f32()
    }
}

/// The tiles of one strip that share a line of scales.
#[derive(Clone, Copy)]
struct StripRun<'a, const L: usize> {
    quants: &'a [[Line; L]],
    scale: &'a Line,
    min: &'a Line,
}

/// Returns the whole runs of a strip.
///
/// The slices are zipped because an iterator checks their bounds once instead of in each iteration
/// for each slice.
#[inline(always)]
fn strip_runs<'a, const L: usize, const T: usize>(
    panel: &Panel<'a>,
    has_min: bool,
) -> impl Iterator<Item = StripRun<'a, L>> {
    let quants = panel.quants.as_chunks::<L>().0.as_chunks::<T>().0;
    let mins = if has_min { panel.mins } else { panel.scales };
    let lines = panel.scales.iter().zip(mins);
    (quants.iter().zip(lines)).map(|(quants, (scale, min))| StripRun { quants, scale, min })
}

/// Returns the tiles of a strip that do not fill its last run, which is run `first`.
#[inline(always)]
fn strip_rest<'a, const L: usize, const T: usize>(
    panel: &Panel<'a>,
    first: usize,
    has_min: bool,
) -> StripRun<'a, L> {
    let scale = &panel.scales[first];
    StripRun {
        quants: panel.quants.as_chunks::<L>().0.as_chunks::<T>().1,
        scale,
        min: if has_min { &panel.mins[first] } else { scale },
    }
}

/// The choices of [`add_run`] between loads or additions and registers.
#[derive(Clone, Copy)]
struct Registers {
    /// Words of activations are loaded in pairs.
    has_pairs: bool,
    /// The minima of odd tiles have a separate sum.
    has_odd_mins: bool,
    /// Without an excess to subtract, sums start with a product instead of 0.
    has_no_start: bool,
}

/// Adds the tiles of one run to the sums of one strip.
#[inline(always)]
fn add_run<
    F: TileFormat<L, T, W>,
    const L: usize,
    const T: usize,
    const W: usize,
    const R: usize,
>(
    format: F,
    strip: StripRun<'_, L>,
    acts: [ActRun<'_, T, W>; R],
    sums: &mut [LateSum; R],
    registers: Registers,
) {
    let scale = hvx::load(strip.scale);
    let mut joints = [[scale; T]; R];
    for r in 0..R {
        joints[r] = format.joint_scales(scale, acts[r].terms.map(|terms| terms.scales));
    }
    for (i, quants) in strip.quants.iter().enumerate().take(T) {
        let quants = format.unpack(quants);
        for r in 0..R {
            let from_pairs;
            let words = if registers.has_pairs {
                from_pairs = acts[r].pairs[i].words();
                &from_pairs
            } else {
                &acts[r].words[i]
            };
            let dot = if F::ZERO == 0 && registers.has_no_start {
                format.dot_from_zero(quants, words)
            } else {
                let start = hvx::splat_w(-F::ZERO * acts[r].terms[i / 2].sums[i % 2]);
                format.dot(start, quants, words)
            };
            sums[r].push(dot, joints[r][i], R == 1 || F::HAS_LATE_ROWS);
        }
    }
    if F::HAS_MIN {
        let min = hvx::load(strip.min);
        for r in 0..R {
            let products = hvx::splat_w(acts[r].terms[0].products);
            sums[r].add_mins(min, products, registers.has_odd_mins);
        }
    }
}

/// Returns the first `COUNT` of two values.
#[inline(always)]
fn first_of<V: Copy, const COUNT: usize>(pair: [V; 2]) -> [V; COUNT] {
    const {
        assert!(
            COUNT >= 1 && COUNT <= 2,
            "kernels have one or two strips, one or two rows"
        )
    };
    let mut out = [pair[0]; COUNT];
    out[COUNT - 1] = pair[COUNT - 1];
    out
}

/// Computes the products of `S` strips with `R` rows of activations.
#[cfg_attr(target_arch = "hexagon", inline(never))]
#[cfg_attr(not(target_arch = "hexagon"), inline(always))]
fn dot_strips<
    F: TileFormat<L, T, W>,
    const L: usize,
    const T: usize,
    const W: usize,
    const S: usize,
    const R: usize,
>(
    format: F,
    panels: [&Panel<'_>; S],
    acts: [ActRow<'_>; R],
) -> [[Vector; R]; S] {
    let zero = hvx::splat_w(0);
    let registers = Registers {
        has_pairs: F::has_pairs(R),
        has_odd_mins: false,
        // Chosen by counting: for one strip with qfloat, and for two rows with IEEE arithmetic,
        // Q4_1 takes more packets without a start.
        has_no_start: KEEPS_F32 == (R == 1),
    };
    let (panel0, panel1) = (panels[0], panels[S - 1]);
    let k_tiles = panel0.layout.k_tiles();
    let mut sums = [[LateSum::new(); R]; S];
    if S * R > 1 {
        // Each sum gets its own zero: a shared one would be copied, which qfloat values must not
        // be.
        sums[S - 1][R - 1] = LateSum::new();
    }
    let rows = || acts[0].runs::<T, W>().zip(acts[R - 1].runs::<T, W>());
    let strips = strip_runs::<L, T>(panel0, F::HAS_MIN);
    let strips = strips.zip(strip_runs::<L, T>(panel1, F::HAS_MIN));
    for ((strip0, strip1), (act0, act1)) in strips.zip(rows()) {
        let (strips, acts) = (
            first_of::<_, S>([strip0, strip1]),
            first_of::<_, R>([act0, act1]),
        );
        for s in 0..S {
            add_run(format, strips[s], acts, &mut sums[s], registers);
        }
    }
    if !k_tiles.is_multiple_of(T) {
        let last = k_tiles / T;
        let rest = [panel0, panel1].map(|panel| strip_rest::<L, T>(panel, last, F::HAS_MIN));
        if let Some((act0, act1)) = rows().nth(last) {
            let (strips, acts) = (first_of::<_, S>(rest), first_of::<_, R>([act0, act1]));
            for s in 0..S {
                add_run(format, strips[s], acts, &mut sums[s], registers);
            }
        }
    }
    let mut out = [[zero; R]; S];
    for s in 0..S {
        for r in 0..R {
            out[s][r] = sums[s][r].finish(R == 1 || F::HAS_LATE_ROWS);
        }
    }
    times_factors(out, acts)
}

/// Returns the sums of `S` strips times the factors of their rows.
#[inline(always)]
fn times_factors<const S: usize, const R: usize>(
    sums: [[Vector; R]; S],
    acts: [ActRow<'_>; R],
) -> [[Vector; R]; S] {
    let mut out = sums;
    for sums in &mut out {
        for (sum, act) in sums.iter_mut().zip(&acts) {
            *sum = hvx::mul_by_power(*sum, act.factor());
        }
    }
    out
}

/// `true` where sums are f32, which may be stored when registers run short; qfloat values may not.
const KEEPS_F32: bool = hvx::HAS_IEEE;

/// Returns the form of activations that the kernel of a weight type reads.
#[must_use]
pub const fn act_form(weight: WeightType) -> ActForm {
    match weight {
        WeightType::Q4_0 | WeightType::Q4_1 | WeightType::Q4K => ActForm::Nibbles,
        WeightType::Q2K => ActForm::Halves,
        _ => ActForm::Bytes,
    }
}

/// Results of one row of activations in the 32 columns of one strip.
pub type Columns = [f32; TILE_DIM];

/// Calls the kernel of a weight type for `S` strips and `R` rows.
// Not inlined on the host, where code of all types in each caller would take minutes to compile.
#[cfg_attr(target_arch = "hexagon", inline(always))]
#[cfg_attr(not(target_arch = "hexagon"), inline(never))]
fn dispatch<const S: usize, const R: usize>(
    panels: [&Panel<'_>; S],
    acts: [ActRow<'_>; R],
) -> Result<[[Vector; R]; S]> {
    let layout = panels[0].layout;
    if let Some(act) = acts.iter().find(|act| act.groups() != groups(layout.k())) {
        return Err(Error::Length {
            what: "activation groups",
            have: act.groups(),
            want: groups(layout.k()),
        });
    }
    if let Some(panel) = panels.iter().find(|panel| panel.layout != layout) {
        return Err(Error::Length {
            what: "second panel along K",
            have: panel.layout.k(),
            want: layout.k(),
        });
    }
    hvx::widest(Dot { panels, acts })
}

/// The arguments of [`dispatch`] after its checks.
struct Dot<'a, const S: usize, const R: usize> {
    panels: [&'a Panel<'a>; S],
    acts: [ActRow<'a>; R],
}

impl<const S: usize, const R: usize> hvx::Kernel for Dot<'_, S, R> {
    type Output = Result<[[Vector; R]; S]>;
    const INLINED: bool = true;

    #[inline(always)]
    fn run(self) -> Self::Output {
        let Self { panels, acts } = self;
        Ok(match panels[0].layout.weight() {
            // Four tiles of two strips need too many registers, so one strip at a time is faster.
            WeightType::Mxfp4 if S > 1 => {
                return Err(Error::NoKernel {
                    weight: WeightType::Mxfp4,
                    kernel: "GEMV of two strips",
                });
            }
            // Two sums and their minima need too many registers: qfloat values would be stored, and
            // two rows would be summed in another order than one row.
            weight @ (WeightType::Q5_1 | WeightType::Q5K) if R > 1 || S > 1 && !KEEPS_F32 => {
                return Err(Error::NoKernel {
                    weight,
                    kernel: "GEMV of two strips or rows",
                });
            }
            weight @ (WeightType::F16 | WeightType::Q4Tile | WeightType::Q8Tile) => {
                return Err(Error::NoKernel {
                    weight,
                    kernel: "GEMV",
                });
            }
            WeightType::Q4_0 => dot_strips(OffsetNibbles::<8, false>, panels, acts),
            WeightType::Q4_1 => dot_strips(OffsetNibbles::<0, true>, panels, acts),
            WeightType::Q8_0 => dot_strips(Bytes, panels, acts),
            WeightType::Q5_0 => dot_strips(FiveBitTiles::<16, false>, panels, acts),
            WeightType::Q5_1 => dot_strips(FiveBitTiles::<0, true>, panels, acts),
            WeightType::Q5K => {
                dot_super_blocks(UnsignedSixBits, FiveBitTiles::<0, true>, panels, acts)
            }
            WeightType::Iq4Nl => {
                let table = LookupNibbles::iq4_nl();
                dot_strips::<_, 4, 2, 1, S, R>(table, panels, acts)
            }
            WeightType::Q6K => dot_half_scaled(panels, acts),
            WeightType::Mxfp4 => {
                let table = LookupNibbles::mxfp4();
                dot_strips::<_, 4, 4, 2, S, R>(table, panels, acts)
            }
            WeightType::Q4K => {
                dot_super_blocks(UnsignedSixBits, OffsetNibbles::<0, true>, panels, acts)
            }
            WeightType::Iq4Xs => {
                let table = LookupNibbles::iq4_nl();
                dot_super_blocks::<_, _, 4, S, R>(SignedSixBits, table, panels, acts)
            }
            WeightType::Q3K => dot_few_bits(ThreeBitDots, panels, acts),
            WeightType::Q2K => dot_few_bits(TwoBitDots, panels, acts),
        })
    }
}

/// Multiplies one row of activations by one strip: 32 columns into `out`.
///
/// # Errors
/// `Length` if the activations have another K than the panel; `NoKernel` for F16 weights.
pub fn gemv_strip(panel: &Panel<'_>, act: ActRow<'_>, out: &mut Columns) -> Result<()> {
    let [[sums]] = dispatch([panel], [act])?;
    hvx::store_f32(out, sums);
    Ok(())
}

/// Multiplies one row of activations by two strips, with fewer scalar loads per weight than two
/// calls of [`gemv_strip`].
///
/// # Errors
/// As [`gemv_strip`]; `Length` if the panels differ in type or K.
pub fn gemv_two_strips(
    panels: [&Panel<'_>; 2],
    act: ActRow<'_>,
    out: [&mut Columns; 2],
) -> Result<()> {
    let sums = match dispatch(panels, [act]) {
        Err(Error::NoKernel { .. }) => {
            let [first, second] = out;
            gemv_strip(panels[0], act, first)?;
            return gemv_strip(panels[1], act, second);
        }
        sums => sums?,
    };
    for (out, [sums]) in out.into_iter().zip(sums) {
        hvx::store_f32(out, sums);
    }
    Ok(())
}

/// Multiplies one row of activations of 16 bits by one strip.
///
/// - `digits`: the row quantized to 8 bits, and the remainder
///
/// # Errors
/// As [`gemv_strip`].
pub fn gemv_two_digits(
    panel: &Panel<'_>,
    digits: [ActRow<'_>; 2],
    out: &mut Columns,
) -> Result<()> {
    let sums = match dispatch([panel], digits) {
        Err(Error::NoKernel { .. }) => {
            let [[first]] = dispatch([panel], [digits[0]])?;
            let [[rest]] = dispatch([panel], [digits[1]])?;
            [first, rest]
        }
        sums => sums?[0],
    };
    let sum = hvx::add_f32(sums[0], sums[1]);
    hvx::store_f32(out, hvx::or_nan(sum, digits[0].factor()));
    Ok(())
}

/// Multiplies two rows of activations by one strip, unpacking the weights once if there are
/// registers for that.
///
/// # Errors
/// As [`gemv_strip`].
pub fn gemv_two_rows(
    panel: &Panel<'_>,
    acts: [ActRow<'_>; 2],
    out: [&mut Columns; 2],
) -> Result<()> {
    let [sums] = match dispatch([panel], acts) {
        Err(Error::NoKernel { .. }) => {
            let [first, second] = out;
            gemv_strip(panel, acts[0], first)?;
            return gemv_strip(panel, acts[1], second);
        }
        sums => sums?,
    };
    for (out, sums) in out.into_iter().zip(sums) {
        hvx::store_f32(out, sums);
    }
    Ok(())
}
