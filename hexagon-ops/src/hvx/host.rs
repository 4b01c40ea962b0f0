//! The vector operations on the host: their architectural meaning, on arrays.
//!
//! Every loop runs over all lanes with a fixed count and no branches, the form that compilers
//! vectorize. Rounding is IEEE's nearest even.

use bytemuck::{Pod, Zeroable, cast};

#[cfg(target_arch = "x86_64")]
use super::x86;
use crate::layout::Line;

/// A 128-byte vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(128))]
pub struct Vector([u8; 128]);

/// Applies `f` to the lanes at the same place in each argument.
macro_rules! lanes {
    ($lane:ty, $count:literal; $($arg:ident),+ => $f:expr) => {{
        $(let $arg: [$lane; $count] = cast($arg);)+
        let mut out = [<$lane>::default(); $count];
        for i in 0..$count {
            $(let $arg = $arg[i];)+
            out[i] = $f;
        }
        cast::<_, Vector>(out)
    }};
}

/// Declares a portable form that has an accelerated one on x86-64. It is a separate function:
/// inlined, every kernel would contain it many times, and most of the kernels' compile time would
/// be spent on it. Only the stand-in runs it.
macro_rules! portable {
    ($(#[$attribute:meta])* fn $($rest:tt)+) => {
        $(#[$attribute])*
        #[cfg_attr(target_arch = "x86_64", cold)]
        #[inline(never)]
        fn $($rest)+
    };
}

mod float;
pub use float::*;

/// Returns the line at `from`: an aligned `vmem` load.
#[must_use]
#[inline(always)]
pub fn load(from: &Line) -> Vector {
    Vector(from.0)
}

/// Writes the line at `to`: an aligned `vmem` store.
#[inline(always)]
pub fn store(to: &mut Line, v: Vector) {
    to.0 = v.0;
}

/// Writes a line that has no content yet.
#[inline(always)]
pub(super) fn store_first(to: &mut core::mem::MaybeUninit<Line>, v: Vector) {
    to.write(Line(v.0));
}

/// Returns 32 f32 at any address: a `vmemu` load.
#[must_use]
#[inline(always)]
pub fn load_f32(from: &[f32; 32]) -> Vector {
    cast(*from)
}

/// Writes 32 f32 at any address: a `vmemu` store.
#[inline(always)]
pub fn store_f32(to: &mut [f32; 32], v: Vector) {
    *to = cast(v);
}

/// Copies as many lines as both have.
#[inline(always)]
pub fn copy(to: &mut [Line], from: &[Line]) {
    let count = to.len().min(from.len());
    to[..count].copy_from_slice(&from[..count]);
}

/// Returns lines of zeros.
#[must_use]
#[inline(always)]
pub fn zeros<const LINES: usize>() -> [Line; LINES] {
    [Line::ZERO; LINES]
}

/// Sets lines to zero.
#[inline(always)]
pub fn clear(lines: &mut [Line]) {
    lines.fill(Line::ZERO);
}

/// Returns 128 bytes at any address: a `vmemu` load.
#[must_use]
#[inline(always)]
pub fn load_bytes(from: &[u8; 128]) -> Vector {
    Vector(*from)
}

/// Writes 128 bytes at any address: a `vmemu` store.
#[inline(always)]
pub fn store_bytes(to: &mut [u8; 128], v: Vector) {
    *to = v.0;
}

/// Returns `value` in every word: `Q6_V_vsplat_R`.
#[must_use]
#[inline(always)]
pub fn splat_w(value: i32) -> Vector {
    cast([value; 32])
}

/// Returns `value` in every halfword: `Q6_Vh_vsplat_R`.
#[must_use]
#[inline(always)]
pub fn splat_h(value: u16) -> Vector {
    cast([value; 64])
}

/// Returns `value` in every byte: `Q6_Vb_vsplat_R`.
#[must_use]
#[inline(always)]
pub fn splat_b(value: u8) -> Vector {
    Vector([value; 128])
}

/// Returns the bitwise and: `Q6_V_vand_VV`.
#[must_use]
#[inline(always)]
pub fn and(a: Vector, b: Vector) -> Vector {
    lanes!(u32, 32; a, b => a & b)
}

/// Returns the bitwise or: `Q6_V_vor_VV`.
#[must_use]
#[inline(always)]
pub fn or(a: Vector, b: Vector) -> Vector {
    lanes!(u32, 32; a, b => a | b)
}

/// Returns the bitwise exclusive or: `Q6_V_vxor_VV`.
#[must_use]
#[inline(always)]
pub fn xor(a: Vector, b: Vector) -> Vector {
    lanes!(u32, 32; a, b => a ^ b)
}

/// Moves bytes through seven levels, of distances 64, 32, 16, 8, 4, 2 and 1: at each, byte k
/// becomes the one at k or, where byte k of `route` has the distance's bit, at k ^ distance:
/// `Q6_V_vdelta_VV`.
#[must_use]
#[inline(always)]
pub fn move_bytes(a: Vector, route: Vector) -> Vector {
    let mut bytes = a.0;
    for level in (0..7).rev() {
        let distance = 1 << level;
        let from = bytes;
        for (k, (byte, route)) in bytes.iter_mut().zip(route.0).enumerate() {
            *byte = from[k ^ (usize::from(route) & distance)];
        }
    }
    Vector(bytes)
}

/// Returns the wrapping sum of words: `Q6_Vw_vadd_VwVw`.
#[must_use]
#[inline(always)]
pub fn add_w(a: Vector, b: Vector) -> Vector {
    lanes!(u32, 32; a, b => a.wrapping_add(b))
}

/// Returns the wrapping difference of words: `Q6_Vw_vsub_VwVw`.
#[must_use]
#[inline(always)]
pub fn sub_w(a: Vector, b: Vector) -> Vector {
    lanes!(u32, 32; a, b => a.wrapping_sub(b))
}

/// Returns the difference of signed words, limited to a word: `Q6_Vw_vsub_VwVw_sat`.
#[must_use]
#[inline(always)]
pub fn sub_sat_w(a: Vector, b: Vector) -> Vector {
    lanes!(i32, 32; a, b => a.saturating_sub(b))
}

/// Returns the larger ones of signed words: `Q6_Vw_vmax_VwVw`.
#[must_use]
#[inline(always)]
pub fn max_w(a: Vector, b: Vector) -> Vector {
    lanes!(i32, 32; a, b => a.max(b))
}

/// Returns the smaller ones of signed words: `Q6_Vw_vmin_VwVw`.
#[must_use]
#[inline(always)]
pub fn min_w(a: Vector, b: Vector) -> Vector {
    lanes!(i32, 32; a, b => a.min(b))
}

/// Returns the upper halves of the products of unsigned halfwords: `Q6_Vuh_vmpy_VuhVuh_rs16`.
#[must_use]
#[inline(always)]
pub fn mul_upper_h(a: Vector, b: Vector) -> Vector {
    lanes!(u16, 64; a, b => {
        let [_, _, low, high] = (u32::from(a) * u32::from(b)).to_le_bytes();
        u16::from_le_bytes([low, high])
    })
}

/// Returns the wrapping sum of halfwords: `Q6_Vh_vadd_VhVh`.
#[must_use]
#[inline(always)]
pub fn add_h(a: Vector, b: Vector) -> Vector {
    lanes!(u16, 64; a, b => a.wrapping_add(b))
}

/// Returns the larger ones of signed halfwords: `Q6_Vh_vmax_VhVh`.
#[must_use]
#[inline(always)]
pub fn max_h(a: Vector, b: Vector) -> Vector {
    lanes!(i16, 64; a, b => a.max(b))
}

/// Returns the smaller ones of signed halfwords: `Q6_Vh_vmin_VhVh`.
#[must_use]
#[inline(always)]
pub fn min_h(a: Vector, b: Vector) -> Vector {
    lanes!(i16, 64; a, b => a.min(b))
}

/// Returns the unsigned bytes shifted right by `count`: `Q6_Vub_vlsr_VubR`.
#[must_use]
#[inline(always)]
pub fn shr_b(a: Vector, count: i32) -> Vector {
    lanes!(u8, 128; a => a >> (count & 7))
}

/// Returns the halfwords shifted left by `count`: `Q6_Vh_vasl_VhR`.
#[must_use]
#[inline(always)]
pub fn shl_h(a: Vector, count: i32) -> Vector {
    lanes!(u16, 64; a => a << (count & 15))
}

/// Returns the low words of the products of words of `a` and the signed upper halves of words of
/// `b`: `Q6_Vw_vmpyio_VwVh`.
#[must_use]
#[inline(always)]
pub fn mul_odd(a: Vector, b: Vector) -> Vector {
    lanes!(i32, 32; a, b => a.wrapping_mul(b >> 16))
}

/// Returns the products of words of `a` and the signed upper halves of words of `b`, divided by
/// 2^15, rounded, and limited to a word: `Q6_Vw_vmpyo_VwVh_s1_rnd_sat`.
#[must_use]
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "limited to a word before")]
pub fn mul_odd_parts(a: Vector, b: Vector) -> Vector {
    lanes!(i32, 32; a, b => {
        let product = i64::from(a) * i64::from(b >> 16);
        let rounded = ((product >> 14) + 1) >> 1;
        rounded.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as i32
    })
}

/// Returns `acc` plus the low words of the products of words of `a` and the signed lower halves of
/// words of `b`: `Q6_Vw_vmpyieacc_VwVwVh`.
#[must_use]
#[inline(always)]
pub fn mul_even_acc(acc: Vector, a: Vector, b: Vector) -> Vector {
    lanes!(i32, 32; acc, a, b => acc.wrapping_add(a.wrapping_mul((b << 16) >> 16)))
}

/// Returns the halfwords shifted right by `count`, signs shifted in: `Q6_Vh_vasr_VhR`.
#[must_use]
#[inline(always)]
pub fn asr_h(a: Vector, count: i32) -> Vector {
    lanes!(i16, 64; a => a >> (count & 15))
}

/// Returns the halfwords shifted right by `count`, zeros shifted in: `Q6_Vuh_vlsr_VuhR`.
#[must_use]
#[inline(always)]
pub fn shr_h(a: Vector, count: i32) -> Vector {
    lanes!(u16, 64; a => a >> (count & 15))
}

/// Returns the words shifted right by `count`, zeros shifted in: `Q6_Vuw_vlsr_VuwR`.
#[must_use]
#[inline(always)]
pub fn shr_w(a: Vector, count: i32) -> Vector {
    lanes!(u32, 32; a => a >> (count & 31))
}

/// Returns the words shifted left by `count`: `Q6_Vw_vasl_VwR`.
#[must_use]
#[inline(always)]
pub fn shl_w(a: Vector, count: i32) -> Vector {
    lanes!(u32, 32; a => a << (count & 31))
}

/// Returns the unsigned halfwords of `a` shifted right by the counts in `count` (0 to 15):
/// `Q6_Vh_vlsr_VhVh`.
#[must_use]
#[inline(always)]
pub fn shr_h_each(a: Vector, count: Vector) -> Vector {
    lanes!(u16, 64; a, count => a >> (count & 15))
}

/// Returns the words of `a` shifted right by the counts in `count` (0 to 31), zeros shifted in:
/// `Q6_Vw_vlsr_VwVw`.
#[must_use]
#[inline(always)]
pub fn shr_w_each(a: Vector, count: Vector) -> Vector {
    lanes!(u32, 32; a, count => a >> (count & 31))
}

/// Returns the signed byte at `position` of a word.
#[inline(always)]
fn signed_byte(word: i32, position: u32) -> i32 {
    (word << (24 - 8 * position)) >> 24
}

/// Returns the unsigned byte at `position` of a word.
#[inline(always)]
fn unsigned_byte(word: i32, position: u32) -> i32 {
    (word >> (8 * position)) & 0xff
}

/// Returns the sum of four products of unsigned bytes of `a` and signed bytes of `b`.
#[inline(always)]
fn dot4(a: i32, b: i32) -> i32 {
    unsigned_byte(a, 0) * signed_byte(b, 0)
        + unsigned_byte(a, 1) * signed_byte(b, 1)
        + unsigned_byte(a, 2) * signed_byte(b, 2)
        + unsigned_byte(a, 3) * signed_byte(b, 3)
}

/// Returns, in each word, the sum of four products of unsigned bytes of `a` and signed bytes of
/// `b`: `Q6_Vw_vrmpy_VubVb`.
#[must_use]
#[inline(always)]
pub fn dot4_each(a: Vector, b: Vector) -> Vector {
    #[cfg(target_arch = "x86_64")]
    if let Some(result) = x86::dot4_each(a, b) {
        return result;
    }
    lanes!(i32, 32; a, b => dot4(a, b))
}

/// Returns, in each word, the sum of four products of unsigned bytes of `a` and the signed bytes of
/// `word`: `Q6_Vw_vrmpy_VubRb`.
#[must_use]
#[inline(always)]
pub fn dot4_word(a: Vector, word: i32) -> Vector {
    dot4_each(a, splat_w(word))
}

/// Returns `acc` plus words of `a` shifted right by `count`, signs shifted in:
/// `Q6_Vw_vasracc_VwVwR`.
#[must_use]
#[inline(always)]
pub fn shr_add_w(acc: Vector, a: Vector, count: i32) -> Vector {
    lanes!(i32, 32; acc, a => acc.wrapping_add(a >> (count & 31)))
}

/// Returns `acc` plus words of `a` shifted left by `count`: `Q6_Vw_vaslacc_VwVwR`.
#[must_use]
#[inline(always)]
pub fn shl_add_w(acc: Vector, a: Vector, count: i32) -> Vector {
    lanes!(i32, 32; acc, a => acc.wrapping_add(a << (count & 31)))
}

/// Returns `acc` plus, per word, the four products of unsigned bytes of `a` and the signed bytes of
/// `word`: `Q6_Vw_vrmpyacc_VwVubRb`.
#[must_use]
#[inline(always)]
pub fn dot4_acc(acc: Vector, a: Vector, word: i32) -> Vector {
    add_w(acc, dot4_each(a, splat_w(word)))
}

/// Returns the sum of two products of signed halfwords, limited to a word.
#[inline(always)]
fn dot2(a: i32, b: i32) -> i32 {
    let low = ((a << 16) >> 16) * ((b << 16) >> 16);
    low.saturating_add((a >> 16) * (b >> 16))
}

/// Returns, in each word, the sum of two products of signed halfwords of `a` and `b`, limited to a
/// word: `Q6_Vw_vdmpy_VhVh_sat`.
#[must_use]
#[inline(always)]
pub fn dot2_each(a: Vector, b: Vector) -> Vector {
    lanes!(i32, 32; a, b => dot2(a, b))
}

/// Returns `acc` plus, per word, the two products of signed halfwords of `a` and of `word`, limited
/// to a word: `Q6_Vw_vdmpyacc_VwVhRh_sat`. Both products must not be those of -32768.
#[must_use]
#[inline(always)]
pub fn dot2_acc(acc: Vector, a: Vector, word: i32) -> Vector {
    lanes!(i32, 32; acc, a => acc.saturating_add(dot2(a, word)))
}

/// Looks the low nibbles of `index` up among 16 halfwords: `Q6_Wh_vlut16_VbVhR_nomatch`.
///
/// Entry e is halfword 2e of `table`. Returns the entries of the even bytes, then those of the odd
/// bytes.
#[must_use]
#[inline(always)]
pub fn lookup16(index: Vector, table: Vector) -> (Vector, Vector) {
    portable! {
        fn portable(index: Vector, table: Vector) -> (Vector, Vector) {
            let table: [u16; 64] = cast(table);
            let mut even = [0_u16; 64];
            let mut odd = [0_u16; 64];
            for i in 0..64 {
                even[i] = table[2 * usize::from(index.0[2 * i] & 15)];
                odd[i] = table[2 * usize::from(index.0[2 * i + 1] & 15)];
            }
            (cast(even), cast(odd))
        }
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(result) = x86::lookup16(index, table) {
        return result;
    }
    portable(index, table)
}

/// As [`lookup16`], among one of the four tables that a vector holds: `Q6_Wh_vlut16_VbVhR_nomatch`.
///
/// Entry e of table `TABLE` is half `TABLE / 2` of word `16 · (TABLE % 2) + e`.
#[must_use]
#[inline(always)]
pub fn lookup16_of<const TABLE: i32>(index: Vector, table: Vector) -> (Vector, Vector) {
    const { assert!(0 <= TABLE && TABLE < 4) };
    let words: [u32; 32] = cast(table);
    let (first, shift) = if TABLE % 2 == 0 {
        (0, 8 * TABLE)
    } else {
        (16, 8 * (TABLE - 1))
    };
    let mut moved = [0_u32; 32];
    for (moved, word) in moved.iter_mut().zip(&words[first..first + 16]) {
        *moved = word >> shift;
    }
    lookup16(index, cast(moved))
}

/// Looks the low nibble of each byte of `index` up among 16 bytes: `Q6_Vb_vlut32_VbVbR_nomatch`.
///
/// Entry e is byte 2e of `table`, and again byte 2e + 32: the instruction looks at five bits, and
/// the fifth must not matter.
#[must_use]
#[inline(always)]
pub fn lookup16_b(index: Vector, table: Vector) -> Vector {
    portable! {
        fn portable(index: Vector, table: Vector) -> Vector {
            lanes!(u8, 128; index => table.0[2 * usize::from(index & 15)])
        }
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(result) = x86::lookup16_b(index, table) {
        return result;
    }
    portable(index, table)
}

/// Looks the five low bits of each byte of `index` up among the 32 halfwords of one of the two
/// tables that a vector holds: `Q6_Vb_vlut32_VbVbR_nomatch` for lower and for upper bytes,
/// [`interleave_b`].
///
/// Entry e of table `TABLE` is halfword 32 · `TABLE` + e. Returns the entries of the even bytes,
/// then those of the odd bytes.
#[must_use]
#[inline(always)]
pub fn lookup32_of<const TABLE: i32>(index: Vector, table: Vector) -> (Vector, Vector) {
    const { assert!(0 <= TABLE && TABLE < 2) };
    let first = if TABLE == 0 { 0 } else { 32 };
    let table: [u16; 64] = cast(table);
    let mut even = [0_u16; 64];
    let mut odd = [0_u16; 64];
    for i in 0..64 {
        even[i] = table[first + usize::from(index.0[2 * i] & 31)];
        odd[i] = table[first + usize::from(index.0[2 * i + 1] & 31)];
    }
    (cast(even), cast(odd))
}

/// Returns the bytes of `a` in even places and those of `b` in odd places, (from even bytes, from
/// odd bytes): `Q6_Wb_vshuffoe_VbVb`.
#[must_use]
#[inline(always)]
pub fn interleave_b(a: Vector, b: Vector) -> (Vector, Vector) {
    (interleave_even_b(a, b), interleave_odd_b(a, b))
}

/// Returns the even bytes of `a` in even places, even bytes of `b` in odd places:
/// `Q6_Vb_vshuffe_VbVb`.
#[must_use]
#[inline(always)]
pub fn interleave_even_b(a: Vector, b: Vector) -> Vector {
    lanes!(u16, 64; a, b => (a & 0xff) | (b << 8))
}

/// Returns the odd bytes of `a` in even places, odd bytes of `b` in odd places:
/// `Q6_Vb_vshuffo_VbVb`.
#[must_use]
#[inline(always)]
pub fn interleave_odd_b(a: Vector, b: Vector) -> Vector {
    lanes!(u16, 64; a, b => (a >> 8) | (b & 0xff00))
}

/// Returns the even halfwords of `a` in even places, even halfwords of `b` in odd places:
/// `Q6_Vh_vshuffe_VhVh`.
#[must_use]
#[inline(always)]
pub fn interleave_even_h(a: Vector, b: Vector) -> Vector {
    lanes!(u32, 32; a, b => (a & 0xffff) | (b << 16))
}

/// Returns the odd halfwords of `a` in even places, odd halfwords of `b` in odd places:
/// `Q6_Vh_vshuffo_VhVh`.
#[must_use]
#[inline(always)]
pub fn interleave_odd_h(a: Vector, b: Vector) -> Vector {
    lanes!(u32, 32; a, b => (a >> 16) | (b & 0xffff_0000))
}

/// Returns the low halves of the words of `a`, then those of `b`: `Q6_Vh_vpacke_VwVw`.
#[must_use]
#[inline(always)]
pub fn pack_low_h(a: Vector, b: Vector) -> Vector {
    let (a, b): ([u16; 64], [u16; 64]) = (cast(a), cast(b));
    let mut out = [0_u16; 64];
    for i in 0..32 {
        out[i] = a[2 * i];
        out[32 + i] = b[2 * i];
    }
    cast(out)
}

/// Returns (even words of `a` then `b`, odd words of `a` then `b`): `Q6_W_vdeal_VVR` by -4.
#[must_use]
#[inline(always)]
pub fn deal_w(a: Vector, b: Vector) -> (Vector, Vector) {
    let (a, b): ([u32; 32], [u32; 32]) = (cast(a), cast(b));
    let mut even = [0_u32; 32];
    let mut odd = [0_u32; 32];
    for i in 0..16 {
        even[i] = a[2 * i];
        even[16 + i] = b[2 * i];
        odd[i] = a[2 * i + 1];
        odd[16 + i] = b[2 * i + 1];
    }
    (cast(even), cast(odd))
}

/// Returns the interleaved words of `a` and `b`, (from the lower halves, from the upper halves):
/// `Q6_W_vshuff_VVR` by -4.
#[must_use]
#[inline(always)]
pub fn interleave_w(a: Vector, b: Vector) -> (Vector, Vector) {
    let (a, b): ([u32; 32], [u32; 32]) = (cast(a), cast(b));
    let mut low = [0_u32; 32];
    let mut high = [0_u32; 32];
    for i in 0..16 {
        low[2 * i] = a[i];
        low[2 * i + 1] = b[i];
        high[2 * i] = a[16 + i];
        high[2 * i + 1] = b[16 + i];
    }
    (cast(low), cast(high))
}

/// Exchanges the odd blocks of `WORDS` words of `a` with the even ones of `b`: `Q6_W_vshuff_VVR` by
/// 4 · `WORDS`.
///
/// `WORDS` is a power of two below 32. Returns (even blocks of both, interleaved; odd blocks of
/// both, interleaved).
#[must_use]
#[inline(always)]
pub fn swap_blocks<const WORDS: usize>(a: Vector, b: Vector) -> (Vector, Vector) {
    let (a, b): ([u32; 32], [u32; 32]) = (cast(a), cast(b));
    let mut even = a;
    let mut odd = b;
    for i in 0..32 {
        if i & WORDS == 0 {
            even[i + WORDS] = b[i];
            odd[i] = a[i + WORDS];
        }
    }
    (cast(even), cast(odd))
}

/// Returns the first 32 signed bytes as words: `Q6_Wh_vunpack_Vb`, `Q6_Ww_vunpack_Vh`.
#[must_use]
#[inline(always)]
pub fn widen_b(a: Vector) -> Vector {
    let mut out = [0_i32; 32];
    for (out, byte) in out.iter_mut().zip(a.0) {
        *out = i32::from(byte.cast_signed());
    }
    cast(out)
}

/// Returns the first 64 signed bytes as halfwords: `Q6_Wh_vunpack_Vb`.
#[must_use]
#[inline(always)]
pub fn widen_b_to_h(a: Vector) -> Vector {
    let mut out = [0_i16; 64];
    for (out, byte) in out.iter_mut().zip(a.0) {
        *out = i16::from(byte.cast_signed());
    }
    cast(out)
}

/// Writes the halfwords of `table` at the byte offsets in `offsets`, which are even:
/// `Q6_vgather_ARMVh`. Table and line are in VTCM.
#[inline(always)]
pub fn gather_h(table: &[Line; 512], offsets: Vector, out: &mut Line) {
    let table: &[u16] = bytemuck::cast_slice(table);
    let offsets: [u16; 64] = cast(offsets);
    let out: &mut [u16; 64] = bytemuck::cast_mut(out);
    for (out, offset) in out.iter_mut().zip(offsets) {
        *out = table[usize::from(offset >> 1)];
    }
}
