//! Dequantizers of nibbles, with tables of their numbers.

use super::wide::table32;
use super::{
    Dequantizer, Numbers, PARTS, ahead, dequantize_fours, dequantize_tiles, f16_bits, times,
    times_plus, twice,
};
use crate::hvx::{self, Vector};
use crate::layout::{LINE_BYTES, Line, Tile, WeightType};

/// Returns the small integers of the nibbles 0 to 15; for MXFP4, twice the 4-bit floats.
///
/// Source: ggml `kvalues_iq4nl`, `kvalues_mxfp4`, ggml-common.h; Q4_0 is q - 8.
const fn nibble_values(weight: WeightType) -> [i8; 16] {
    match weight {
        WeightType::Iq4Nl | WeightType::Iq4Xs => [
            -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
        ],
        WeightType::Mxfp4 => [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12],
        WeightType::Q4_1 | WeightType::Q4K => {
            [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
        }
        WeightType::Q4_0
        | WeightType::Q4Tile
        | WeightType::Q5_0
        | WeightType::Q5_1
        | WeightType::Q5K
        | WeightType::Q6K
        | WeightType::Q3K
        | WeightType::Q2K
        | WeightType::Q8_0
        | WeightType::Q8Tile
        | WeightType::F16 => [-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7],
    }
}

/// Returns the 16-entry table of [`hvx::lookup16`]: entry e in halfword 2e.
const fn f16_table(weight: WeightType) -> Line {
    let values = nibble_values(weight);
    let mut line = [0; LINE_BYTES];
    let mut entry = 0;
    while entry < 16 {
        let [low, high] = f16_bits(values[entry]).to_le_bytes();
        line[4 * entry] = low;
        line[4 * entry + 1] = high;
        entry += 1;
    }
    Line(line)
}

/// Returns the 32-entry table of [`hvx::lookup16_b`]: entry e in byte 2e, each value XOR 0x80.
/// Entries 16 to 31 repeat the first 16.
pub(in crate::ops::matmul) const fn byte_table(weight: WeightType) -> Line {
    let values = nibble_values(weight);
    let mut line = [0; LINE_BYTES];
    let mut entry = 0;
    while entry < 32 {
        line[2 * entry] = values[entry % 16].cast_unsigned() ^ 0x80;
        entry += 1;
    }
    Line(line)
}

pub(super) static Q4_0_VALUES: Line = f16_table(WeightType::Q4_0);
/// The numbers -8 to 7 twice, for a lookup that sees a fifth bit.
pub(super) static Q4_0_VALUES_TWICE: Line = table32(8, 16);
/// The numbers 0 to 15.
pub(in crate::ops::matmul) static NIBBLES: Line = f16_table(WeightType::Q4_1);
/// The numbers 0 to 15 twice, for a lookup that sees a fifth bit.
static NIBBLES_TWICE: Line = table32(0, 16);
static IQ4_NL_VALUES: Line = f16_table(WeightType::Iq4Nl);
static MXFP4_VALUES: Line = f16_table(WeightType::Mxfp4);

/// Returns the nibbles of a part of a tile in the lower halves of bytes: alternately the low and
/// the high ones of a line.
#[inline(always)]
fn nibbles(quants: &[Line; 4], part: usize) -> Vector {
    let both = hvx::load(&quants[part / 2]);
    if part.is_multiple_of(2) {
        both
    } else {
        hvx::shr_by_mul_h::<4>(both)
    }
}

/// A table of 16 numbers that qfloat's kernels look up without the shift unit.
#[derive(Clone, Copy)]
pub(super) struct NibbleTable(Vector);

impl NibbleTable {
    /// Takes the table of [`hvx::lookup16`] or, repeated, that of [`hvx::lookup32_of`].
    #[inline(always)]
    pub(super) fn new(once: &Line, twice: &Line) -> Self {
        Self(hvx::load(if hvx::HAS_IEEE { once } else { twice }))
    }

    /// Returns the numbers of a part of a tile of nibbles.
    #[inline(always)]
    pub(super) fn numbers(self, quants: &[Line; 4], part: usize) -> Numbers {
        let index = nibbles(quants, part);
        if hvx::HAS_IEEE {
            hvx::lookup16(index, self.0)
        } else {
            hvx::lookup32_of::<0>(index, self.0)
        }
    }
}

/// Returns the first line of a part of a tile of nibbles.
pub(super) const fn nibble_line(part: usize) -> usize {
    PARTS * (part % 2) + part / 2 * 2
}

/// The lookup table of a type whose blocks have an f16 scale.
#[derive(Clone, Copy)]
pub(super) struct Scaled(Vector);

impl Scaled {
    #[inline(always)]
    pub(super) fn q4_0() -> Self {
        Self(hvx::load(&Q4_0_VALUES))
    }

    #[inline(always)]
    pub(super) fn iq4_nl() -> Self {
        Self(hvx::load(&IQ4_NL_VALUES))
    }
}

impl Dequantizer<4, 2> for Scaled {
    const AHEAD: usize = ahead(6, 6);
    type Scales = Vector;

    #[inline(always)]
    fn scales(self, scale: Vector, _: Vector, i: usize) -> Vector {
        twice(scale, i)
    }

    #[inline(always)]
    fn numbers(self, quants: &[Line; 4], part: usize) -> Numbers {
        hvx::lookup16(nibbles(quants, part), self.0)
    }

    #[inline(always)]
    fn scaled(self, numbers: Numbers, scale: Vector, _: usize) -> [Vector; 2] {
        times(numbers, scale)
    }

    #[inline(always)]
    fn line(part: usize) -> usize {
        nibble_line(part)
    }
}

/// The lookup table of a type whose blocks have an f16 scale and an f16 minimum.
#[derive(Clone, Copy)]
pub(super) struct ScaledAndShifted(NibbleTable);

impl ScaledAndShifted {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self(NibbleTable::new(&NIBBLES, &NIBBLES_TWICE))
    }
}

impl Dequantizer<4, 2> for ScaledAndShifted {
    const AHEAD: usize = ahead(1, 5);
    type Scales = [Vector; 2];

    #[inline(always)]
    fn scales(self, scale: Vector, min: Vector, i: usize) -> [Vector; 2] {
        [twice(scale, i), twice(min, i)]
    }

    #[inline(always)]
    fn numbers(self, quants: &[Line; 4], part: usize) -> Numbers {
        self.0.numbers(quants, part)
    }

    #[inline(always)]
    fn scaled(self, numbers: Numbers, scales: [Vector; 2], _: usize) -> [Vector; 2] {
        times_plus(numbers, scales)
    }

    /// With qfloat, four tiles in each iteration of the loop, because at its start the first
    /// products would have no other work to share packets with.
    #[inline(always)]
    fn group(self, quants: &[[Line; 4]], scales: &[Line], mins: &[Line], out: &mut [Tile]) {
        // The host also works in fours, so that its tests cover this path.
        let in_fours = cfg!(not(target_arch = "hexagon")) || !hvx::HAS_IEEE;
        let whole = if in_fours { quants.len() / 4 * 4 } else { 0 };
        let (fours, rest) = quants.split_at(whole);
        let (out_fours, out_rest) = out.split_at_mut(whole);
        dequantize_fours(self, fours, scales, mins, out_fours);
        if !rest.is_empty() {
            dequantize_tiles(
                self,
                rest,
                &scales[whole / 2..],
                &mins[whole / 2..],
                out_rest,
            );
        }
    }

    #[inline(always)]
    fn line(part: usize) -> usize {
        nibble_line(part)
    }
}

/// The lookup table of a type whose blocks have an E8M0 scale.
#[derive(Clone, Copy)]
pub(super) struct PowerOfTwo(Vector);

impl PowerOfTwo {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self(hvx::load(&MXFP4_VALUES))
    }
}

impl Dequantizer<4, 4> for PowerOfTwo {
    const AHEAD: usize = ahead(0, 0);
    type Scales = Vector;

    #[inline(always)]
    fn scales(self, scale: Vector, _: Vector, i: usize) -> Vector {
        e8m0_as_f16(scale, i)
    }

    #[inline(always)]
    fn numbers(self, quants: &[Line; 4], part: usize) -> Numbers {
        hvx::lookup16(nibbles(quants, part), self.0)
    }

    #[inline(always)]
    fn scaled(self, numbers: Numbers, scale: Vector, _: usize) -> [Vector; 2] {
        times(numbers, scale)
    }

    #[inline(always)]
    fn line(part: usize) -> usize {
        nibble_line(part)
    }
}

/// Returns the FP16 bits of 2^(e-128) for the E8M0 bytes of tile `i`, each twice; 0 below FP16's
/// range, 2^15 above it.
#[inline(always)]
fn e8m0_as_f16(four: Vector, i: usize) -> Vector {
    let e = e8m0_words(four, i);
    let zero = hvx::splat_w(0);
    // Normal numbers have the exponent field e - 113. Subnormal numbers are the bit of 2^-14
    // shifted right by 114 - e.
    let normal = hvx::shl_w(
        hvx::min_w(
            hvx::max_w(hvx::sub_w(e, hvx::splat_w(113)), zero),
            hvx::splat_w(30),
        ),
        10,
    );
    let below = hvx::min_w(
        hvx::max_w(hvx::sub_w(hvx::splat_w(114), e), zero),
        hvx::splat_w(31),
    );
    let bits = hvx::max_w(normal, hvx::shr_w_each(hvx::splat_w(0x400), below));
    hvx::interleave_even_h(bits, bits)
}

/// Returns the E8M0 bytes of tile `i` of a line for four tiles, as words.
#[inline(always)]
pub(in crate::ops::matmul) fn e8m0_words(four: Vector, i: usize) -> Vector {
    let shift = [0, 8, 16, 24][i];
    hvx::and(hvx::shr_w(four, shift), hvx::splat_w(0xff))
}
