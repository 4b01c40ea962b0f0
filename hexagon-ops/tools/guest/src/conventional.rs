//! Kernels for the comparison in docs/results/tables/packets.md: straightforward versions of the
//! library's kernels. They are counted, but are not part of the DSP library.
//!
//! | kernel | does |
//! |---|---|
//! | [`dequantize_rows`] | Q4_0 in ggml's order, row by row, to FP16 tiles: arithmetic on nibbles, and a scatter |
//! | [`dequantize_tiles`] | Q4_0 in the library's order to FP16 tiles: arithmetic on nibbles in place of the lookup |
//! | [`exponentials`] | exponentials of a softmax by a polynomial in FP16, and their sums |
//!
//! Every intrinsic is an unsafe function only because it needs its target feature, which is enabled
//! for the whole guest. This reason is cited as [HVX].

use core::arch::hexagon::v128::{self as arch, HvxVector, HvxVectorPair};

use hexagon_ops::hvx::{self, Accumulator, Vector};
use hexagon_ops::layout::{F16_TILE_BYTES, LINE_BYTES, Line, TILE_DIM, Tile};

/// Bytes of a block of Q4_0: an f16 scale and 32 quants.
const BLOCK_BYTES: usize = 18;
/// The first f16 with a spacing of 1 above its bits; a sum with it is rounded to a whole number.
const ROUND: u16 = 0x6600;

/// Returns the vector in the intrinsics' type.
#[inline(always)]
fn raw(v: Vector) -> HvxVector {
    // SAFETY: `Vector` is a transparent wrapper of this type.
    unsafe { core::mem::transmute::<Vector, HvxVector>(v) }
}

/// Returns the vector in the library's type.
#[inline(always)]
fn wrapped(v: HvxVector) -> Vector {
    // SAFETY: as in `raw`.
    unsafe { core::mem::transmute::<HvxVector, Vector>(v) }
}

/// Returns both vectors of a pair, the low one first.
#[inline(always)]
fn split(pair: HvxVectorPair) -> (Vector, Vector) {
    // SAFETY: [HVX] of the module doc.
    let low = unsafe { arch::Q6_V_lo_W(pair) };
    // SAFETY: [HVX] of the module doc.
    let high = unsafe { arch::Q6_V_hi_W(pair) };
    (wrapped(low), wrapped(high))
}

/// Moves the bytes down by `count`, those at the front to the end: `Q6_V_vror_VR`.
#[inline(always)]
fn rotate(v: Vector, count: i32) -> Vector {
    // SAFETY: [HVX] of the module doc.
    wrapped(unsafe { arch::Q6_V_vror_VR(raw(v), count) })
}

/// Returns a line whose bytes in the given pieces of 16 are `value`, and the others 0.
const fn pieces(pieces: [usize; 2], value: u8) -> Line {
    let mut line = [0; LINE_BYTES];
    let mut byte = 0;
    while byte < LINE_BYTES {
        if byte / 16 == pieces[0] || byte / 16 == pieces[1] {
            line[byte] = value;
        }
        byte += 1;
    }
    Line(line)
}

/// Offsets of the 32 words of one column in two tiles.
const fn word_offsets() -> Line {
    let mut line = [0; LINE_BYTES];
    let mut word = 0;
    while word < LINE_BYTES / 4 {
        // CAST: the two bytes of an offset below 4096.
        #[expect(clippy::cast_possible_truncation, reason = "the bytes of a number")]
        let [low, high] = ((word * LINE_BYTES) as u16).to_le_bytes();
        line[4 * word] = low;
        line[4 * word + 1] = high;
        word += 1;
    }
    Line(line)
}

static FIRST: Line = pieces([0, 1], 0xff);
static SECOND: Line = pieces([2, 3], 0xff);
static LOW: Line = pieces([0, 2], 0x0f);
static HIGH: Line = pieces([1, 3], 0x0f);
static WORD_OFFSETS: Line = word_offsets();

/// Dequantizes 32 rows of Q4_0 in ggml's order to FP16 tiles, two blocks of a row at a time.
///
/// ```text
/// for each row n, for each two blocks of it
///   quants = 16 low nibbles, 16 high ones of the first block; the same of the second
///   f16(quants - 8) · scales      64 weights in their order
///   scatter 32 words, each two weights of column n, to the lines of two tiles
/// ```
///
/// - `weights`: 32 rows of `k_tiles` blocks each, and at least 92 bytes after them
/// - `k_tiles`: an even number
/// - `out`: `k_tiles` tiles, on a device in VTCM: scatters reach no other memory
///
/// Returns `false` and writes nothing if these do not fit.
#[inline(never)]
pub fn dequantize_rows(weights: &[u8], k_tiles: usize, out: &mut [Tile]) -> bool {
    let pairs = k_tiles / 2;
    let row_bytes = k_tiles * BLOCK_BYTES;
    let slack = LINE_BYTES - 2 * BLOCK_BYTES;
    if !k_tiles.is_multiple_of(2)
        || out.len() != k_tiles
        || weights.len() < TILE_DIM * row_bytes + slack
    {
        return false;
    }
    // CAST: addresses have 32 bits.
    let tiles = out.as_mut_ptr().expose_provenance() as i32;
    let masks = [&FIRST, &SECOND, &LOW, &HIGH].map(hvx::load);
    let mut from = weights.as_ptr();
    for n in 0..TILE_DIM as i32 {
        let offsets = hvx::add_w(hvx::load(&WORD_OFFSETS), hvx::splat_w(4 * n));
        let mut tile = tiles;
        for _ in 0..pairs {
            // SAFETY: two blocks start here, and `slack` bytes follow after the last two.
            let blocks = unsafe { &*from.cast::<[u8; LINE_BYTES]>() };
            let values = two_blocks(blocks, masks);
            // SAFETY: offsets are below 2 · F16_TILE_BYTES - 3, and `out` has that many bytes after
            // `tile`.
            unsafe {
                arch::Q6_vscatter_RMVwV(
                    tile,
                    2 * F16_TILE_BYTES as i32 - 1,
                    raw(offsets),
                    raw(values),
                );
            }
            tile += 2 * F16_TILE_BYTES as i32;
            from = from.wrapping_add(2 * BLOCK_BYTES);
        }
    }
    true
}

/// Returns the 64 weights of two blocks, as f16.
#[inline(always)]
fn two_blocks(blocks: &[u8; LINE_BYTES], [first, second, low, high]: [Vector; 4]) -> Vector {
    let bytes = hvx::load_bytes(blocks);
    // Moves the first block's 16 bytes of quants to piece 0, and the second block's to piece 2.
    let to_first = rotate(bytes, 2);
    let to_second = rotate(bytes, LINE_BYTES as i32 - (32 - 20));
    let both = hvx::or(hvx::and(to_first, first), hvx::and(to_second, second));
    // The high nibbles follow after the low ones.
    let upper = rotate(hvx::shr_b(both, 4), LINE_BYTES as i32 - 16);
    let quants = hvx::or(hvx::and(both, low), hvx::and(upper, high));
    // SAFETY: [HVX] of the module doc.
    let (wide, _) = split(unsafe { arch::Q6_Wuh_vunpack_Vub(raw(quants)) });
    let numbers = hvx::f16_from_h(hvx::add_h(wide, hvx::splat_h(8_u16.wrapping_neg())));
    let scale = |at: usize| hvx::splat_h(u16::from_le_bytes([blocks[at], blocks[at + 1]]));
    // SAFETY: [HVX] of the module doc.
    let scales = unsafe {
        arch::Q6_V_valign_VVR(
            raw(scale(BLOCK_BYTES)),
            raw(scale(0)),
            LINE_BYTES as i32 / 2,
        )
    };
    hvx::mul_f16(numbers, wrapped(scales))
}

/// Dequantizes tiles of Q4_0 in the library's order: nibbles are masked or shifted, widened,
/// converted to f16, and have 8 subtracted before the product with their scale.
///
/// - `quants`, `scales`: the planes of a panel
///
/// Tiles without a partner on their line of scales are left out.
#[inline(never)]
pub fn dequantize_tiles(quants: &[[Line; 4]], scales: &[Line], out: &mut [Tile]) {
    let pairs = quants.as_chunks::<2>().0.iter().zip(scales);
    for (([first, second], line), [first_out, second_out]) in pairs.zip(out.as_chunks_mut().0) {
        let scales = hvx::load(line);
        dequantize_tile(first, hvx::interleave_even_h(scales, scales), first_out);
        dequantize_tile(second, hvx::interleave_odd_h(scales, scales), second_out);
    }
}

/// Dequantizes a tile; `scale` has the scale of each column twice.
#[inline(always)]
fn dequantize_tile(quants: &[Line; 4], scale: Vector, out: &mut Tile) {
    for (v, line) in quants.iter().enumerate() {
        let both = hvx::load(line);
        let nibbles = [hvx::and(both, hvx::splat_b(0x0f)), hvx::shr_b(both, 4)];
        for (nibbles, at) in nibbles.into_iter().zip([2 * v, 8 + 2 * v]) {
            // SAFETY: [HVX] of the module doc.
            let (even, odd) = split(unsafe { arch::Q6_Wuh_vzxt_Vub(raw(nibbles)) });
            for (i, values) in [even, odd].into_iter().enumerate() {
                let quants =
                    hvx::f16_from_h(hvx::add_h(values, hvx::splat_h(8_u16.wrapping_neg())));
                hvx::store(&mut out.0[at + i], hvx::mul_f16(quants, scale));
            }
        }
    }
}

/// Replaces f16 scores by `e^(score - largest)`, and returns the sums of these, f32 (those of even
/// elements, those of odd ones).
///
/// With x the difference, n = round(x · log2 e) and r = x - n · ln 2, `e^x = 2^n · (1 + r + c2 ·
/// r² + c3 · r³)`. Everything is f16 but the sums. Each exponential is off by less than 1.8 units
/// in the last place, subnormal ones too.
///
/// - `row`: an even number of lines; the last of an odd number is left out
/// - `largest`: not smaller than any score, in all elements
#[inline(never)]
pub fn exponentials(row: &mut [Line], largest: Vector) -> (Vector, Vector) {
    let mut sums = (Accumulator::zero(), Accumulator::zero());
    for [first, second] in row.as_chunks_mut::<2>().0 {
        // Two vectors at a time, so that the steps of one fill the waiting times of the other.
        let x = [&*first, &*second].map(|line| hvx::sub_f16(hvx::load(line), largest));
        let weights = [exponential(x[0]), exponential(x[1])];
        hvx::store(first, weights[0]);
        hvx::store(second, weights[1]);
        sums = Accumulator::add_f16(sums, weights[0]);
        sums = Accumulator::add_f16(sums, weights[1]);
    }
    (sums.0.to_f32(), sums.1.to_f32())
}

/// f16 constants of [`exponential`]. The polynomial's are 2^11 times too large, so that the power
/// of two below FP16's normal numbers has an exponent, too; the last product undoes this.
const LOG2_E: u16 = 0x3dc5;
/// ln 2 in a part of four bits, whose products with n are exact, and the rest; negative.
const MINUS_LN_2: [u16; 2] = [0xb980, 0x9dc8];
/// Below this the result is 0.
const LOWEST: u16 = 0xcc60;
/// c3, c2, 1, 1.
const POWERS: [u16; 4] = [0x5d53, 0x6402, 0x6800, 0x6800];
/// 2^-11.
const DOWN: u16 = 0x1000;

/// Returns `e^x` of f16 that are zero or negative.
#[inline(always)]
fn exponential(x: Vector) -> Vector {
    let x = hvx::max_f16(x, hvx::splat_h(LOWEST));
    let (turns, p) = power_and_polynomial(x);
    // n is in the low bits of `turns`.
    let power = hvx::add_h(p, hvx::shl_h(turns, 10));
    hvx::mul_f16(power, hvx::splat_h(DOWN))
}

/// Returns n above [`ROUND`], and the polynomial in r: IEEE arithmetic, which rounds a product and
/// a sum at once.
#[cfg(target_feature = "hvx-ieee-fp")]
#[inline(always)]
fn power_and_polynomial(x: Vector) -> (Vector, Vector) {
    let turns = hvx::mul_add_f16(x, hvx::splat_h(LOG2_E), hvx::splat_h(ROUND));
    let n = hvx::sub_f16(turns, hvx::splat_h(ROUND));
    let [first, rest] = MINUS_LN_2.map(hvx::splat_h);
    let r = hvx::mul_add_f16(n, rest, hvx::mul_add_f16(n, first, x));
    let [mut p, powers @ ..] = POWERS.map(hvx::splat_h);
    for power in powers {
        p = hvx::mul_add_f16(p, r, power);
    }
    (turns, p)
}

/// Returns n above [`ROUND`], and the polynomial in r: qfloat, converted to f16 where bits are
/// needed.
#[cfg(not(target_feature = "hvx-ieee-fp"))]
#[inline(always)]
fn power_and_polynomial(x: Vector) -> (Vector, Vector) {
    let turns = f16_sum(product(x, LOG2_E), ROUND);
    // As integers, because a qf16 has more bits than an f16.
    let n = hvx::f16_from_h(hvx::add_h(turns, hvx::splat_h(ROUND.wrapping_neg())));
    let [first, rest] = MINUS_LN_2.map(|part| product(n, part));
    // SAFETY: [HVX] of the module doc.
    let r = unsafe { arch::Q6_Vqf16_vadd_Vqf16Vhf(first, raw(x)) };
    // SAFETY: [HVX] of the module doc.
    let r = unsafe { arch::Q6_Vqf16_vadd_Vqf16Vqf16(r, rest) };
    let [c3, c2, c1, c0] = POWERS;
    // SAFETY: [HVX] of the module doc.
    let mut p = unsafe { arch::Q6_Vqf16_vmpy_Vqf16Vhf(r, raw(hvx::splat_h(c3))) };
    for power in [c2, c1] {
        // SAFETY: [HVX] of the module doc.
        let sum = unsafe { arch::Q6_Vqf16_vadd_Vqf16Vhf(p, raw(hvx::splat_h(power))) };
        // SAFETY: [HVX] of the module doc.
        p = unsafe { arch::Q6_Vqf16_vmpy_Vqf16Vqf16(sum, r) };
    }
    (turns, f16_sum(p, c0))
}

/// Returns the product of f16 with a constant, qf16.
#[cfg(not(target_feature = "hvx-ieee-fp"))]
#[inline(always)]
fn product(a: Vector, b: u16) -> HvxVector {
    // SAFETY: [HVX] of the module doc.
    unsafe { arch::Q6_Vqf16_vmpy_VhfVhf(raw(a), raw(hvx::splat_h(b))) }
}

/// Returns the f16 sum of qf16 and a constant.
#[cfg(not(target_feature = "hvx-ieee-fp"))]
#[inline(always)]
fn f16_sum(a: HvxVector, b: u16) -> Vector {
    // SAFETY: [HVX] of the module doc.
    let sum = unsafe { arch::Q6_Vqf16_vadd_Vqf16Vhf(a, raw(hvx::splat_h(b))) };
    // SAFETY: [HVX] of the module doc.
    wrapped(unsafe { arch::Q6_Vhf_equals_Vqf16(sum) })
}
