//! One number per vector operation, for the guest and for the host test that compares them.

use hexagon_ops::hvx::{self, Accumulator, Vector};
use hexagon_ops::layout::Line;

/// Names in order of their numbers; those from [`FIRST_FLOAT`] on need floating point.
pub const NAMES: [&str; 72] = [
    "splat_w",
    "splat_h",
    "splat_b",
    "and",
    "add_w",
    "sub_w",
    "max_w",
    "min_w",
    "max_h",
    "shr_b",
    "shr_w",
    "shl_w",
    "shr_w_each",
    "dot4_each",
    "dot4_acc",
    "dot4_word",
    "shr_add_w",
    "lookup16",
    "lookup16_b",
    "interleave_even_b",
    "interleave_odd_b",
    "interleave_even_h",
    "interleave_odd_h",
    "pack_low_h",
    "deal_w",
    "or",
    "interleave_w",
    "swap_blocks_16",
    "swap_blocks_4",
    "swap_blocks_1",
    "widen_b",
    "shl_h",
    "lookup16_of",
    "add_h",
    "shr_h",
    "asr_h",
    "mul_odd",
    "mul_even_acc",
    "dot2_each",
    "dot2_acc",
    "mul_upper_h",
    "lookup32_of",
    "interleave_b",
    "f16_from_h",
    "f32_from_w",
    "mul_f16",
    "mul_add_f16",
    "f16_from_b",
    "widen_mul_f16",
    "narrow_f32",
    "mul_f32",
    "add_f32",
    "sub_f32",
    "max_f32",
    "min_f32",
    "select_gt_f32",
    "sub_f16",
    "max_f16",
    "widen_in_order_f16",
    "fold_f32",
    "widen_mul_add",
    "unbias",
    "add_f16",
    "widen_b_to_h",
    "min_h",
    "shl_add_w",
    "sub_sat_w",
    "xor",
    "move_bytes",
    "f32_from_small_w",
    "mul_odd_parts",
    "shr_h_each",
];

/// Number of the first operation on floating point.
#[allow(dead_code, reason = "only the host test asks")]
pub const FIRST_FLOAT: usize = 43;

/// Operation number of an accumulator: `(c + a · b + a) · (a - b) + c`.
pub const ACCUMULATE: usize = NAMES.len();

/// Runs operation `op`; operations with one result return it twice.
pub fn run(op: usize, [a, b, c]: [Vector; 3], scalar: i32) -> (Vector, Vector) {
    let [s0, s1, ..] = scalar.to_le_bytes();
    let one = |v: Vector| (v, v);
    match op {
        0 => one(hvx::splat_w(scalar)),
        1 => one(hvx::splat_h(u16::from_le_bytes([s0, s1]))),
        2 => one(hvx::splat_b(s0)),
        3 => one(hvx::and(a, b)),
        4 => one(hvx::add_w(a, b)),
        5 => one(hvx::sub_w(a, b)),
        6 => one(hvx::max_w(a, b)),
        7 => one(hvx::min_w(a, b)),
        8 => one(hvx::max_h(a, b)),
        9 => one(hvx::shr_b(a, scalar & 7)),
        10 => one(hvx::shr_w(a, scalar & 31)),
        11 => one(hvx::shl_w(a, scalar & 31)),
        12 => one(hvx::shr_w_each(a, hvx::and(b, hvx::splat_w(31)))),
        13 => one(hvx::dot4_each(a, b)),
        14 => one(hvx::dot4_acc(c, a, scalar)),
        15 => one(hvx::dot4_word(a, scalar)),
        16 => one(hvx::shr_add_w(c, a, scalar & 31)),
        17 => hvx::lookup16(a, b),
        18 => one(hvx::lookup16_b(a, repeated(b))),
        19 => one(hvx::interleave_even_b(a, b)),
        20 => one(hvx::interleave_odd_b(a, b)),
        21 => one(hvx::interleave_even_h(a, b)),
        22 => one(hvx::interleave_odd_h(a, b)),
        23 => one(hvx::pack_low_h(a, b)),
        24 => hvx::deal_w(a, b),
        25 => one(hvx::or(a, b)),
        26 => hvx::interleave_w(a, b),
        27 => hvx::swap_blocks::<16>(a, b),
        28 => hvx::swap_blocks::<4>(a, b),
        29 => hvx::swap_blocks::<1>(a, b),
        30 => one(hvx::widen_b(a)),
        31 => one(hvx::shl_h(a, scalar & 15)),
        32 => match scalar & 3 {
            0 => hvx::lookup16_of::<0>(a, b),
            1 => hvx::lookup16_of::<1>(a, b),
            2 => hvx::lookup16_of::<2>(a, b),
            _ => hvx::lookup16_of::<3>(a, b),
        },
        33 => one(hvx::add_h(a, b)),
        34 => one(hvx::shr_h(a, scalar & 15)),
        35 => one(hvx::asr_h(a, scalar & 15)),
        36 => one(hvx::mul_odd(a, b)),
        37 => one(hvx::mul_even_acc(c, a, b)),
        38 => one(hvx::dot2_each(a, b)),
        39 => one(hvx::dot2_acc(c, a, scalar)),
        40 => one(hvx::mul_upper_h(a, b)),
        41 => match scalar & 1 {
            0 => hvx::lookup32_of::<0>(a, b),
            _ => hvx::lookup32_of::<1>(a, b),
        },
        42 => hvx::interleave_b(a, b),
        43 => one(hvx::f16_from_h(a)),
        44 => one(hvx::f32_from_w(a)),
        45 => one(hvx::mul_f16(a, b)),
        46 => one(hvx::mul_add_f16(a, b, c)),
        47 => hvx::f16_from_b(a, s0),
        48 => hvx::widen_mul_f16(a, b),
        49 => one(hvx::narrow_f32(a, b)),
        50 => one(hvx::mul_f32(a, b)),
        51 => one(hvx::add_f32(a, b)),
        52 => one(hvx::sub_f32(a, b)),
        53 => one(hvx::max_f32(a, b)),
        54 => one(hvx::min_f32(a, b)),
        55 => one(hvx::select_gt_f32(a, b, c, hvx::splat_w(scalar))),
        56 => one(hvx::sub_f16(a, b)),
        57 => one(hvx::max_f16(a, b)),
        58 => hvx::widen_in_order_f16(a),
        59 => (hvx::fold_f32::<8>(a, b), hvx::fold_f32::<2>(a, b)),
        60 => {
            let sum = Accumulator::from_f32(c);
            let (even, odd) = Accumulator::widen_mul_add((sum, sum), a, b);
            (even.to_f32(), odd.to_f32())
        }
        61 => {
            let bias = 12_582_912.0;
            one(hvx::unbias(hvx::add_f32(a, hvx::splat_f32(bias)), bias))
        }
        62 => {
            let sum = Accumulator::from_f32(c);
            let (even, odd) = Accumulator::add_f16((sum, sum), a);
            (even.to_f32(), odd.to_f32())
        }
        63 => one(hvx::widen_b_to_h(a)),
        64 => one(hvx::min_h(a, b)),
        65 => one(hvx::shl_add_w(c, a, scalar & 31)),
        66 => one(hvx::sub_sat_w(a, b)),
        67 => one(hvx::xor(a, b)),
        68 => one(hvx::move_bytes(a, b)),
        69 => one(hvx::f32_from_small_w(hvx::shr_add_w(hvx::splat_w(0), a, 7))),
        70 => one(hvx::mul_odd_parts(a, b)),
        71 => one(hvx::shr_h_each(a, hvx::and(b, hvx::splat_h(15)))),
        ACCUMULATE => {
            let sum = Accumulator::from_f32(c).mul_add(a, b).plus_f32(a);
            let product = sum.times(Accumulator::difference(a, b));
            one(product.plus(Accumulator::from_f32(c)).to_f32())
        }
        _ => one(hvx::splat_w(0)),
    }
}

/// Returns `table` with its entries 16 to 31 equal to 0 to 15, as [`hvx::lookup16_b`] requires.
fn repeated(table: Vector) -> Vector {
    let mut line = Line::ZERO;
    hvx::store(&mut line, table);
    line.0.copy_within(..32, 32);
    hvx::load(&line)
}
