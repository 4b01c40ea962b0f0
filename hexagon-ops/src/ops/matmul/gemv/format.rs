//! The differences between weight types in the integer dot product: unpacking, the product of a
//! tile, scales.

use super::KEEPS_F32;
use crate::hvx::{self, Vector};
use crate::layout::{Line, WeightType};
use crate::ops::matmul::dequantize::nibbles::{byte_table, e8m0_words};
#[cfg(doc)]
use crate::ops::matmul::quantize::ActForm;

static IQ4_NL_BYTES: Line = byte_table(WeightType::Iq4Nl);
static MXFP4_BYTES: Line = byte_table(WeightType::Mxfp4);

/// Conversion of one weight type's tiles to integer dot products and scales.
///
/// `L` lines of quants a tile, `T` tiles a line of scales, `W = T / 2` words of activation scales
/// for these.
pub(super) trait TileFormat<const L: usize, const T: usize, const W: usize>: Copy {
    /// The number added to each weight to make it unsigned.
    const ZERO: i32;
    /// `true` if panels have a plane of minima.
    const HAS_MIN: bool = false;
    /// `true` if super-blocks have registers for a separate sum of the minima of odd tiles.
    const HAS_ODD_MINS: bool = true;
    /// `true` if there are registers to add the products of two rows one tile late.
    const HAS_LATE_ROWS: bool = T == 2;
    /// A tile in the form that several rows of activations share.
    type Unpacked: Copy;

    /// Returns `true` if the words of `rows` rows of activations are loaded in pairs, which saves
    /// packets where registers are left for it. Super-blocks load them so in any case.
    #[inline(always)]
    fn has_pairs(_rows: usize) -> bool {
        false
    }

    /// Prepares a tile for [`Self::dot`].
    fn unpack(self, quants: &[Line; L]) -> Self::Unpacked;

    /// Returns `start + Σ quants · act`, for 8 words of activations.
    fn dot(self, start: Vector, quants: Self::Unpacked, act: &[i32; 8]) -> Vector;

    /// Returns `Σ quants · act`. A start of 0 would be copied before each sum.
    #[inline(always)]
    fn dot_from_zero(self, quants: Self::Unpacked, act: &[i32; 8]) -> Vector {
        self.dot(hvx::splat_w(0), quants, act)
    }

    /// Returns the f32 products of the weight scales in `line` and the activation scales in `act`,
    /// two blocks a word.
    fn joint_scales(self, line: Vector, act: [i32; W]) -> [Vector; T];
}

/// Returns `start` plus the products of 8 vectors with 8 words.
#[inline(always)]
fn dot8(start: Vector, quants: [Vector; 8], act: &[i32; 8]) -> Vector {
    let mut dot = start;
    for (quants, word) in quants.iter().zip(act) {
        dot = hvx::dot4_acc(dot, *quants, *word);
    }
    dot
}

/// Returns the f16 scales of two tiles times those of two blocks of activations.
#[inline(always)]
fn f16_scales(line: Vector, act: i32) -> [Vector; 2] {
    let (even, odd) = hvx::widen_mul_f16(line, hvx::splat_w(act));
    [even, odd]
}

/// Nibbles that hold the weight plus `ZERO`.
///
/// Activations are in [`ActForm::Nibbles`]: whole bytes are multiplied with those of the high
/// nibbles, and only the low nibbles are masked. Sums are in sixteenths, as such activations are.
#[derive(Clone, Copy)]
pub(super) struct OffsetNibbles<const ZERO: i32, const HAS_MIN: bool>;

impl<const ZERO: i32, const HAS_MIN: bool> TileFormat<4, 2, 1> for OffsetNibbles<ZERO, HAS_MIN> {
    const ZERO: i32 = ZERO;
    const HAS_MIN: bool = HAS_MIN;
    /// Four vectors of whole bytes, then four of low nibbles.
    type Unpacked = [Vector; 8];

    #[inline(always)]
    fn unpack(self, quants: &[Line; 4]) -> [Vector; 8] {
        let [a, b, c, d] = quants.each_ref().map(hvx::load);
        let low = |bytes| hvx::and(bytes, hvx::splat_b(0x0f));
        [a, b, c, d, low(a), low(b), low(c), low(d)]
    }

    #[inline(always)]
    fn dot(self, start: Vector, quants: [Vector; 8], act: &[i32; 8]) -> Vector {
        dot_nibbles(hvx::dot4_acc(start, quants[0], act[4]), quants, act)
    }

    #[inline(always)]
    fn dot_from_zero(self, quants: [Vector; 8], act: &[i32; 8]) -> Vector {
        dot_nibbles(hvx::dot4_word(quants[0], act[4]), quants, act)
    }

    #[inline(always)]
    fn joint_scales(self, line: Vector, [act]: [i32; 1]) -> [Vector; 2] {
        f16_scales(line, act)
    }
}

/// Returns `first`, which has the products of the first vector of bytes, plus those of the other
/// vectors and of the low nibbles.
#[inline(always)]
fn dot_nibbles(first: Vector, quants: [Vector; 8], act: &[i32; 8]) -> Vector {
    let mut byte_dot = first;
    let mut low_dot = hvx::dot4_word(quants[4], act[0]);
    for v in 1..4 {
        // The order changes the compiler's schedule: the other order takes up to 0.7 packets more a
        // tile.
        if KEEPS_F32 {
            byte_dot = hvx::dot4_acc(byte_dot, quants[v], act[4 + v]);
            low_dot = hvx::dot4_acc(low_dot, quants[4 + v], act[v]);
        } else {
            low_dot = hvx::dot4_acc(low_dot, quants[4 + v], act[v]);
            byte_dot = hvx::dot4_acc(byte_dot, quants[v], act[4 + v]);
        }
    }
    hvx::shl_add_w(byte_dot, low_dot, 4)
}

/// Flipped bytes.
#[derive(Clone, Copy)]
pub(super) struct Bytes;

impl TileFormat<8, 2, 1> for Bytes {
    const ZERO: i32 = 128;
    type Unpacked = [Vector; 8];

    #[inline(always)]
    fn has_pairs(_: usize) -> bool {
        !KEEPS_F32
    }

    #[inline(always)]
    fn unpack(self, quants: &[Line; 8]) -> [Vector; 8] {
        let mut bytes = [hvx::splat_w(0); 8];
        for (bytes, line) in bytes.iter_mut().zip(quants) {
            *bytes = hvx::load(line);
        }
        bytes
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

/// Quants of 5 bits.
///
/// Bits of a value that are in several lines are multiplied where they are, and the sums are
/// shifted to their weights: shifts of the few sums replace shifts of all lines.
#[derive(Clone, Copy)]
pub(super) struct FiveBitTiles<const ZERO: i32, const HAS_MIN: bool>;

impl<const ZERO: i32, const HAS_MIN: bool> TileFormat<5, 2, 1> for FiveBitTiles<ZERO, HAS_MIN> {
    const ZERO: i32 = ZERO;
    const HAS_MIN: bool = HAS_MIN;
    const HAS_ODD_MINS: bool = false;
    const HAS_LATE_ROWS: bool = false;
    /// The values in the lower bits of lines 0 to 4; the upper three bits of values 5 to 7; the
    /// lower bits of values 5, 7, 6 and 7.
    type Unpacked = ([Vector; 5], [Vector; 3], [Vector; 4]);

    #[inline(always)]
    fn unpack(self, quants: &[Line; 5]) -> Self::Unpacked {
        let lines = quants.each_ref().map(hvx::load);
        let masked = |line: usize, mask: u8| hvx::and(lines[line], hvx::splat_b(mask));
        (
            lines.map(|line| hvx::and(line, hvx::splat_b(0x1f))),
            [masked(0, 0xe0), masked(1, 0xe0), masked(2, 0xe0)],
            [
                masked(3, 0x60),
                masked(4, 0x20),
                masked(4, 0xc0),
                masked(3, 0x80),
            ],
        )
    }

    #[inline(always)]
    fn dot(self, start: Vector, (low, upper, rest): Self::Unpacked, act: &[i32; 8]) -> Vector {
        // The order of these sums changes the compiler's schedule: on V73 other orders take up to 2
        // packets more a tile of two strips. The three kinds of sums are 8, 32 and 64 times too
        // large.
        let mut eights = hvx::dot4_word(upper[2], act[7]);
        eights = hvx::dot4_acc(eights, upper[1], act[6]);
        eights = hvx::dot4_acc(eights, upper[0], act[5]);
        let halves = hvx::dot4_acc(hvx::dot4_word(rest[1], act[7]), rest[0], act[5]);
        let wholes = hvx::dot4_acc(hvx::dot4_word(rest[3], act[7]), rest[2], act[6]);
        let halves = hvx::shr_add_w(halves, wholes, 1);
        let mut dot = start;
        for (low, word) in low.iter().zip(act) {
            dot = hvx::dot4_acc(dot, *low, *word);
        }
        hvx::shr_add_w(dot, hvx::shr_add_w(eights, halves, 2), 3)
    }

    #[inline(always)]
    fn joint_scales(self, line: Vector, [act]: [i32; 1]) -> [Vector; 2] {
        f16_scales(line, act)
    }
}

/// Nibbles that are indices into a table of flipped bytes.
#[derive(Clone, Copy)]
pub(super) struct LookupNibbles(Vector);

impl LookupNibbles {
    /// Returns the table of IQ4_NL.
    #[inline(always)]
    pub(super) fn iq4_nl() -> Self {
        Self(hvx::load(&IQ4_NL_BYTES))
    }

    /// Returns the table of MXFP4.
    #[inline(always)]
    pub(super) fn mxfp4() -> Self {
        Self(hvx::load(&MXFP4_BYTES))
    }

    /// Returns the bytes of a tile: four vectors of the low nibbles, then four of the high ones.
    #[inline(always)]
    fn look_up(self, quants: &[Line; 4]) -> [Vector; 8] {
        let mut bytes = [self.0; 8];
        for (v, line) in quants.iter().enumerate() {
            let line = hvx::load(line);
            // The table repeats after 16 entries, so the fifth bit that comes with a low nibble
            // does not matter.
            bytes[v] = hvx::lookup16_b(line, self.0);
            bytes[4 + v] = hvx::lookup16_b(hvx::shr_b(line, 4), self.0);
        }
        bytes
    }
}

impl TileFormat<4, 2, 1> for LookupNibbles {
    const ZERO: i32 = 128;
    type Unpacked = [Vector; 8];

    #[inline(always)]
    fn has_pairs(_: usize) -> bool {
        KEEPS_F32
    }

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

impl TileFormat<4, 4, 2> for LookupNibbles {
    const ZERO: i32 = 128;
    /// Otherwise, qfloat sums of two rows would be stored.
    const HAS_LATE_ROWS: bool = !KEEPS_F32;
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
        let each = [f16_scales(one, act[0]), f16_scales(one, act[1])];
        let mut joint = [line; 4];
        for (i, joint) in joint.iter_mut().enumerate() {
            // The exponent field e - 1 stands for the f32 2^(e-128). For e = 0, which is below
            // f32's normal numbers, it becomes 0.
            let e = hvx::max_w(
                hvx::sub_w(e8m0_words(line, i), hvx::splat_w(1)),
                hvx::splat_w(0),
            );
            // The order changes the compiler's schedule: the other order takes 0.7 packets more a
            // tile.
            let act = if KEEPS_F32 {
                each[i / 2][i % 2]
            } else {
                f16_scales(one, act[i / 2])[i % 2]
            };
            *joint = hvx::mul_f32(hvx::shl_w(e, 23), act);
        }
        joint
    }
}
