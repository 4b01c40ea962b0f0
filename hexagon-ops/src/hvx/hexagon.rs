//! The vector operations on the device: thin wrappers over `core::arch::hexagon`.
//!
//! Every intrinsic is an unsafe function only because it needs its target feature. The device build
//! enables `hvx`, `hvx-length128b` and the version's features for the whole crate, so one reason
//! makes every call below sound. It is written here once and cited in each block as [HVX]: *the
//! target features are enabled for this crate*.

use core::arch::hexagon::v128 as arch;

use crate::layout::Line;

/// A 128-byte vector.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Vector(arch::HvxVector);

/// An operation that is one intrinsic on one or more vectors.
macro_rules! vector_ops {
    ($($(#[$doc:meta])* $name:ident($($arg:ident),+) = $intrinsic:ident($($use:ident),+);)+) => {$(
        $(#[$doc])*
        #[must_use]
        #[inline(always)]
        pub fn $name($($arg: Vector),+) -> Vector {
            // SAFETY: [HVX] of the module doc.
            Vector(unsafe { arch::$intrinsic($($use.0),+) })
        }
    )+};
}

/// An operation on a vector and a scalar register that is one intrinsic.
macro_rules! scalar_ops {
    ($($(#[$doc:meta])* $name:ident($($arg:ident),*; $scalar:ident) = $intrinsic:ident;)+) => {$(
        $(#[$doc])*
        #[must_use]
        #[inline(always)]
        pub fn $name($($arg: Vector,)* $scalar: i32) -> Vector {
            // SAFETY: [HVX] of the module doc.
            Vector(unsafe { arch::$intrinsic($($arg.0,)* $scalar) })
        }
    )+};
}

vector_ops! {
    /// Returns the bitwise and: `Q6_V_vand_VV`.
    and(a, b) = Q6_V_vand_VV(a, b);
    /// Returns the bitwise or: `Q6_V_vor_VV`.
    or(a, b) = Q6_V_vor_VV(a, b);
    /// Returns the bitwise exclusive or: `Q6_V_vxor_VV`.
    xor(a, b) = Q6_V_vxor_VV(a, b);
    /// Moves bytes through seven levels, of distances 64, 32, 16, 8, 4, 2 and 1: at each, byte k
    /// becomes the one at k or, where byte k of `route` has the distance's bit, at k ^ distance:
    /// `Q6_V_vdelta_VV`.
    move_bytes(a, route) = Q6_V_vdelta_VV(a, route);
    /// Returns the wrapping sum of words: `Q6_Vw_vadd_VwVw`.
    add_w(a, b) = Q6_Vw_vadd_VwVw(a, b);
    /// Returns the wrapping difference of words: `Q6_Vw_vsub_VwVw`.
    sub_w(a, b) = Q6_Vw_vsub_VwVw(a, b);
    /// Returns the difference of signed words, limited to a word: `Q6_Vw_vsub_VwVw_sat`.
    sub_sat_w(a, b) = Q6_Vw_vsub_VwVw_sat(a, b);
    /// Returns the larger ones of signed words: `Q6_Vw_vmax_VwVw`.
    max_w(a, b) = Q6_Vw_vmax_VwVw(a, b);
    /// Returns the smaller ones of signed words: `Q6_Vw_vmin_VwVw`.
    min_w(a, b) = Q6_Vw_vmin_VwVw(a, b);
    /// Returns the wrapping sum of halfwords: `Q6_Vh_vadd_VhVh`.
    add_h(a, b) = Q6_Vh_vadd_VhVh(a, b);
    /// Returns the larger ones of signed halfwords: `Q6_Vh_vmax_VhVh`.
    max_h(a, b) = Q6_Vh_vmax_VhVh(a, b);
    /// Returns the smaller ones of signed halfwords: `Q6_Vh_vmin_VhVh`.
    min_h(a, b) = Q6_Vh_vmin_VhVh(a, b);
    /// Returns the words of `a` shifted right by the counts in `count` (0 to 31), zeros shifted in:
    /// `Q6_Vw_vlsr_VwVw`.
    shr_w_each(a, count) = Q6_Vw_vlsr_VwVw(a, count);
    /// Returns the unsigned halfwords of `a` shifted right by the counts in `count` (0 to 15):
    /// `Q6_Vh_vlsr_VhVh`.
    shr_h_each(a, count) = Q6_Vh_vlsr_VhVh(a, count);
    /// Returns the low words of the products of words of `a` and the signed upper halves of words
    /// of `b`: `Q6_Vw_vmpyio_VwVh`.
    mul_odd(a, b) = Q6_Vw_vmpyio_VwVh(a, b);
    /// Returns the products of words of `a` and the signed upper halves of words of `b`, divided by
    /// 2^15, rounded, and limited to a word: `Q6_Vw_vmpyo_VwVh_s1_rnd_sat`.
    mul_odd_parts(a, b) = Q6_Vw_vmpyo_VwVh_s1_rnd_sat(a, b);
    /// Returns `acc` plus the low words of the products of words of `a` and the signed lower halves
    /// of words of `b`: `Q6_Vw_vmpyieacc_VwVwVh`.
    mul_even_acc(acc, a, b) = Q6_Vw_vmpyieacc_VwVwVh(acc, a, b);
    /// Returns, in each word, the sum of four products of unsigned bytes of `a` and signed bytes of
    /// `b`: `Q6_Vw_vrmpy_VubVb`.
    dot4_each(a, b) = Q6_Vw_vrmpy_VubVb(a, b);
    /// Returns, in each word, the sum of two products of signed halfwords of `a` and `b`, limited
    /// to a word: `Q6_Vw_vdmpy_VhVh_sat`.
    dot2_each(a, b) = Q6_Vw_vdmpy_VhVh_sat(a, b);
    /// Returns the even bytes of `a` in even places, even bytes of `b` in odd places:
    /// `Q6_Vb_vshuffe_VbVb`.
    interleave_even_b(a, b) = Q6_Vb_vshuffe_VbVb(b, a);
    /// Returns the odd bytes of `a` in even places, odd bytes of `b` in odd places:
    /// `Q6_Vb_vshuffo_VbVb`.
    interleave_odd_b(a, b) = Q6_Vb_vshuffo_VbVb(b, a);
    /// Returns the even halfwords of `a` in even places, even halfwords of `b` in odd places:
    /// `Q6_Vh_vshuffe_VhVh`.
    interleave_even_h(a, b) = Q6_Vh_vshuffe_VhVh(b, a);
    /// Returns the odd halfwords of `a` in even places, odd halfwords of `b` in odd places:
    /// `Q6_Vh_vshuffo_VhVh`.
    interleave_odd_h(a, b) = Q6_Vh_vshuffo_VhVh(b, a);
    /// Returns the low halves of the words of `a`, then those of `b`: `Q6_Vh_vpacke_VwVw`.
    pack_low_h(a, b) = Q6_Vh_vpacke_VwVw(b, a);
    /// Returns the larger lanes of f16: `Q6_Vhf_vmax_VhfVhf`. NaN is not allowed; which zero is
    /// larger is not defined.
    max_f16(a, b) = Q6_Vhf_vmax_VhfVhf(a, b);
    /// Returns the larger lanes of f32: `Q6_Vsf_vmax_VsfVsf`. NaN is not allowed.
    max_f32(a, b) = Q6_Vsf_vmax_VsfVsf(a, b);
    /// Returns the smaller lanes of f32: `Q6_Vsf_vmin_VsfVsf`. NaN is not allowed.
    min_f32(a, b) = Q6_Vsf_vmin_VsfVsf(a, b);
}

#[cfg(target_feature = "hvxv69")]
vector_ops! {
    /// Returns the upper halves of the products of unsigned halfwords: `Q6_Vuh_vmpy_VuhVuh_rs16`.
    mul_upper_h(a, b) = Q6_Vuh_vmpy_VuhVuh_rs16(a, b);
}

#[cfg(target_feature = "hvxv73")]
vector_ops! {
    /// Returns the f32 value of each signed word: `Q6_Vsf_equals_Vw`.
    f32_from_w(a) = Q6_Vsf_equals_Vw(a);
    /// Returns the f16 value of each signed halfword: `Q6_Vhf_equals_Vh`.
    f16_from_h(a) = Q6_Vhf_equals_Vh(a);
}

#[cfg(not(target_feature = "hvxv73"))]
mod older;
#[cfg(not(target_feature = "hvxv69"))]
pub use older::mul_upper_h;
#[cfg(not(target_feature = "hvxv73"))]
pub use older::{f16_from_h, f16_from_small_h, f32_from_small_w, f32_from_w};
#[cfg(target_feature = "hvxv73")]
pub use {f16_from_h as f16_from_small_h, f32_from_w as f32_from_small_w};

scalar_ops! {
    /// Returns `value` in every word: `Q6_V_vsplat_R`.
    splat_w(; value) = Q6_V_vsplat_R;
    /// Returns the unsigned bytes shifted right by `count`: `Q6_Vub_vlsr_VubR`.
    shr_b(a; count) = Q6_Vub_vlsr_VubR;
    /// Returns the halfwords shifted left by `count`: `Q6_Vh_vasl_VhR`.
    shl_h(a; count) = Q6_Vh_vasl_VhR;
    /// Returns the halfwords shifted right by `count`, signs shifted in: `Q6_Vh_vasr_VhR`.
    asr_h(a; count) = Q6_Vh_vasr_VhR;
    /// Returns the halfwords shifted right by `count`, zeros shifted in: `Q6_Vuh_vlsr_VuhR`.
    shr_h(a; count) = Q6_Vuh_vlsr_VuhR;
    /// Returns the words shifted right by `count`, zeros shifted in: `Q6_Vuw_vlsr_VuwR`.
    shr_w(a; count) = Q6_Vuw_vlsr_VuwR;
    /// Returns the words shifted left by `count`: `Q6_Vw_vasl_VwR`.
    shl_w(a; count) = Q6_Vw_vasl_VwR;
    /// Returns, in each word, the sum of four products of unsigned bytes of `a` and the signed
    /// bytes of `word`: `Q6_Vw_vrmpy_VubRb`.
    dot4_word(a; word) = Q6_Vw_vrmpy_VubRb;
    /// Returns `acc` plus words of `a` shifted right by `count`, signs shifted in:
    /// `Q6_Vw_vasracc_VwVwR`.
    shr_add_w(acc, a; count) = Q6_Vw_vasracc_VwVwR;
    /// Returns `acc` plus words of `a` shifted left by `count`: `Q6_Vw_vaslacc_VwVwR`.
    shl_add_w(acc, a; count) = Q6_Vw_vaslacc_VwVwR;
    /// Returns `acc` plus, per word, the four products of unsigned bytes of `a` and the signed
    /// bytes of `word`: `Q6_Vw_vrmpyacc_VwVubRb`.
    dot4_acc(acc, a; word) = Q6_Vw_vrmpyacc_VwVubRb;
    /// Returns `acc` plus, per word, the two products of signed halfwords of `a` and of `word`,
    /// limited to a word: `Q6_Vw_vdmpyacc_VwVhRh_sat`.
    dot2_acc(acc, a; word) = Q6_Vw_vdmpyacc_VwVhRh_sat;
}

/// Returns `value` in every halfword: `Q6_Vh_vsplat_R`.
#[must_use]
#[inline(always)]
pub fn splat_h(value: u16) -> Vector {
    // SAFETY: [HVX] of the module doc.
    Vector(unsafe { arch::Q6_Vh_vsplat_R(i32::from(value)) })
}

/// Returns `value` in every byte: `Q6_Vb_vsplat_R`.
#[must_use]
#[inline(always)]
pub fn splat_b(value: u8) -> Vector {
    // SAFETY: [HVX] of the module doc.
    Vector(unsafe { arch::Q6_Vb_vsplat_R(i32::from(value)) })
}

/// Returns the line at `from`: an aligned `vmem` load.
#[must_use]
#[inline(always)]
pub fn load(from: &Line) -> Vector {
    // SAFETY: a `Line` has the size and alignment of a vector, and any bytes are a valid vector.
    Vector(unsafe { *core::ptr::from_ref(from).cast::<arch::HvxVector>() })
}

/// Writes the line at `to`: an aligned `vmem` store.
#[inline(always)]
pub fn store(to: &mut Line, v: Vector) {
    // SAFETY: a `Line` has the size and alignment of a vector.
    unsafe { *core::ptr::from_mut(to).cast::<arch::HvxVector>() = v.0 }
}

/// Writes a line that has no content yet: an aligned `vmem` store.
#[inline(always)]
pub(super) fn store_first(to: &mut core::mem::MaybeUninit<Line>, v: Vector) {
    // SAFETY: a `Line` has the size and alignment of a vector.
    unsafe { *to.as_mut_ptr().cast::<arch::HvxVector>() = v.0 }
}

/// Returns 32 f32 at any address: a `vmemu` load.
#[must_use]
#[inline(always)]
pub fn load_f32(from: &[f32; 32]) -> Vector {
    // SAFETY: 32 f32 have the size of a vector, any bytes are a valid vector, and the read assumes
    // no alignment.
    Vector(unsafe {
        core::ptr::from_ref(from)
            .cast::<arch::HvxVector>()
            .read_unaligned()
    })
}

/// Writes 32 f32 at any address: a `vmemu` store.
#[inline(always)]
pub fn store_f32(to: &mut [f32; 32], v: Vector) {
    // SAFETY: 32 f32 have the size of a vector, any bits are an f32, and the write assumes no
    // alignment.
    unsafe {
        core::ptr::from_mut(to)
            .cast::<arch::HvxVector>()
            .write_unaligned(v.0)
    }
}

/// Copies as many lines as both have, a packet each.
#[inline(always)]
pub fn copy(to: &mut [Line], from: &[Line]) {
    let zero = splat_w(0);
    for (to, from) in to.iter_mut().zip(from) {
        // Combining with `zero` hides the copy from the compiler, which would otherwise call its
        // function for copies of aligned doublewords, which moves 8 bytes a packet.
        store(to, or(load(from), zero));
    }
}

/// Returns lines of zeros, without a call of `memset`.
#[must_use]
#[inline(always)]
pub fn zeros<const LINES: usize>() -> [Line; LINES] {
    let zero = splat_w(0);
    let mut out = core::mem::MaybeUninit::<[Line; LINES]>::uninit();
    let first = out.as_mut_ptr().cast::<arch::HvxVector>();
    for i in 0..LINES {
        // SAFETY: the i-th of `LINES` lines, which have the size and alignment of a vector.
        unsafe { first.wrapping_add(i).write(zero.0) }
    }
    // SAFETY: every line has been written, and any bytes are a valid line.
    unsafe { out.assume_init() }
}

/// Sets lines to zero, without a call of `memset`.
#[inline(always)]
pub fn clear(lines: &mut [Line]) {
    for line in lines {
        store(line, splat_w(0));
    }
}

/// Returns 128 bytes at any address: a `vmemu` load.
#[must_use]
#[inline(always)]
pub fn load_bytes(from: &[u8; 128]) -> Vector {
    // SAFETY: the bytes have the size of a vector, any bytes are a valid vector, and the read
    // assumes no alignment.
    Vector(unsafe {
        core::ptr::from_ref(from)
            .cast::<arch::HvxVector>()
            .read_unaligned()
    })
}

/// Writes 128 bytes at any address: a `vmemu` store.
#[inline(always)]
pub fn store_bytes(to: &mut [u8; 128], v: Vector) {
    // SAFETY: the bytes have the size of a vector, any bits are valid bytes, and the write assumes
    // no alignment.
    unsafe {
        core::ptr::from_mut(to)
            .cast::<arch::HvxVector>()
            .write_unaligned(v.0)
    }
}

/// Writes the halfwords of `table` at the byte offsets in `offsets`, which are even:
/// `Q6_vgather_ARMVh`. Table and line are in VTCM.
#[inline(always)]
pub fn gather_h(table: &[Line; 512], offsets: Vector, out: &mut Line) {
    // CAST: addresses have 32 bits; the last offset is 65535.
    let base = core::ptr::from_ref(table).addr() as i32;
    // SAFETY: offsets have 16 bits, and the table 65536 bytes; the line has the size and alignment
    // of a vector.
    unsafe { arch::Q6_vgather_ARMVh(core::ptr::from_mut(out).cast(), base, 0xffff, offsets.0) }
}

/// Returns the two vectors of a pair: (low, high).
#[inline(always)]
fn split(pair: arch::HvxVectorPair) -> (Vector, Vector) {
    // SAFETY: [HVX] of the module doc.
    let low = unsafe { arch::Q6_V_lo_W(pair) };
    // SAFETY: [HVX] of the module doc.
    let high = unsafe { arch::Q6_V_hi_W(pair) };
    (Vector(low), Vector(high))
}

/// Looks the low nibbles of `index` up among 16 halfwords: `Q6_Wh_vlut16_VbVhR_nomatch`.
///
/// Entry e is halfword 2e of `table`. Returns the entries of the even bytes, then those of the odd
/// bytes.
#[must_use]
#[inline(always)]
pub fn lookup16(index: Vector, table: Vector) -> (Vector, Vector) {
    lookup16_of::<0>(index, table)
}

/// As [`lookup16`], among one of the four tables that a vector holds: `Q6_Wh_vlut16_VbVhR_nomatch`.
///
/// Entry e of table `TABLE` is half `TABLE / 2` of word `16 · (TABLE % 2) + e`.
#[must_use]
#[inline(always)]
pub fn lookup16_of<const TABLE: i32>(index: Vector, table: Vector) -> (Vector, Vector) {
    const { assert!(0 <= TABLE && TABLE < 4) };
    // SAFETY: [HVX] of the module doc.
    split(unsafe { arch::Q6_Wh_vlut16_VbVhR_nomatch(index.0, table.0, TABLE) })
}

/// Looks the low nibble of each byte of `index` up among 16 bytes: `Q6_Vb_vlut32_VbVbR_nomatch`.
///
/// Entry e is byte 2e of `table`, and again byte 2e + 32: the instruction looks at five bits, and
/// the fifth must not matter.
#[must_use]
#[inline(always)]
pub fn lookup16_b(index: Vector, table: Vector) -> Vector {
    // SAFETY: [HVX] of the module doc.
    Vector(unsafe { arch::Q6_Vb_vlut32_VbVbR_nomatch(index.0, table.0, 0) })
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
    // SAFETY: [HVX] of the module doc.
    let low = unsafe { arch::Q6_Vb_vlut32_VbVbR_nomatch(index.0, table.0, TABLE) };
    // SAFETY: [HVX] of the module doc.
    let high = unsafe { arch::Q6_Vb_vlut32_VbVbR_nomatch(index.0, table.0, TABLE + 2) };
    interleave_b(Vector(low), Vector(high))
}

/// Returns the bytes of `a` in even places and those of `b` in odd places, (from even bytes, from
/// odd bytes): `Q6_Wb_vshuffoe_VbVb`.
#[must_use]
#[inline(always)]
pub fn interleave_b(a: Vector, b: Vector) -> (Vector, Vector) {
    // SAFETY: [HVX] of the module doc.
    split(unsafe { arch::Q6_Wb_vshuffoe_VbVb(b.0, a.0) })
}

/// Returns (even words of `a` then `b`, odd words of `a` then `b`): `Q6_W_vdeal_VVR` by -4.
#[must_use]
#[inline(always)]
pub fn deal_w(a: Vector, b: Vector) -> (Vector, Vector) {
    // SAFETY: [HVX] of the module doc.
    split(unsafe { arch::Q6_W_vdeal_VVR(b.0, a.0, -4) })
}

/// Returns the interleaved words of `a` and `b`, (from the lower halves, from the upper halves):
/// `Q6_W_vshuff_VVR` by -4.
#[must_use]
#[inline(always)]
pub fn interleave_w(a: Vector, b: Vector) -> (Vector, Vector) {
    // SAFETY: [HVX] of the module doc.
    split(unsafe { arch::Q6_W_vshuff_VVR(b.0, a.0, -4) })
}

/// Exchanges the odd blocks of `WORDS` words of `a` with the even ones of `b`: `Q6_W_vshuff_VVR` by
/// 4 · `WORDS`.
///
/// `WORDS` is a power of two below 32. Returns (even blocks of both, interleaved; odd blocks of
/// both, interleaved).
#[must_use]
#[inline(always)]
pub fn swap_blocks<const WORDS: usize>(a: Vector, b: Vector) -> (Vector, Vector) {
    const { assert!(WORDS.is_power_of_two() && WORDS < 32) };
    let bytes = const { [4_i32, 8, 16, 32, 64][WORDS.trailing_zeros() as usize] };
    // SAFETY: [HVX] of the module doc.
    split(unsafe { arch::Q6_W_vshuff_VVR(b.0, a.0, bytes) })
}

/// Adds pairs of neighbouring blocks of `WORDS` lanes: those of `a` in even blocks,
/// those of `b` in odd ones. [`swap_blocks`], then [`add_f32`].
#[must_use]
#[inline(always)]
pub fn fold_f32<const WORDS: usize>(a: Vector, b: Vector) -> Vector {
    let (even, odd) = swap_blocks::<WORDS>(a, b);
    add_f32(even, odd)
}

/// Returns the first 32 signed bytes as words: `Q6_Wh_vunpack_Vb`, `Q6_Ww_vunpack_Vh`.
#[must_use]
#[inline(always)]
pub fn widen_b(a: Vector) -> Vector {
    // SAFETY: [HVX] of the module doc.
    let (halves, _) = split(unsafe { arch::Q6_Wh_vunpack_Vb(a.0) });
    // SAFETY: [HVX] of the module doc.
    split(unsafe { arch::Q6_Ww_vunpack_Vh(halves.0) }).0
}

/// Returns the first 64 signed bytes as halfwords: `Q6_Wh_vunpack_Vb`.
#[must_use]
#[inline(always)]
pub fn widen_b_to_h(a: Vector) -> Vector {
    // SAFETY: [HVX] of the module doc.
    split(unsafe { arch::Q6_Wh_vunpack_Vb(a.0) }).0
}

/// Returns the f32 values of f16 lanes in their order, (first 32, last 32): [`widen_mul_f16`] by 1,
/// [`interleave_w`].
#[must_use]
#[inline(always)]
pub fn widen_in_order_f16(v: Vector) -> (Vector, Vector) {
    let (even, odd) = widen_mul_f16(v, splat_h(0x3c00));
    interleave_w(even, odd)
}

/// Returns the signed words in the order of f32 numbers: the magnitude's bits, negative for
/// negative numbers.
#[inline(always)]
fn order_w(a: Vector) -> Vector {
    let magnitude = and(a, splat_w(0x7fff_ffff));
    let is_negative = sub_w(splat_w(0), shr_w(a, 31));
    sub_w(magnitude, and(shl_w(magnitude, 1), is_negative))
}

/// Returns `x` where `a > b` as f32, else `y`, by integer operations. `a` and `b` may not be NaN.
///
/// The nightly declares the intrinsics of vector predicates with signatures that its LLVM refuses.
#[must_use]
#[inline(always)]
pub fn select_gt_f32(a: Vector, b: Vector, x: Vector, y: Vector) -> Vector {
    let b = order_w(b);
    // `more` is nonzero where `a` is larger; the next step turns that into a word of ones.
    let more = sub_w(max_w(order_w(a), b), b);
    let is_more = shr_w(or(more, sub_w(splat_w(0), more)), 31);
    let mask = sub_w(splat_w(0), is_more);
    or(and(x, mask), and(y, sub_w(splat_w(-1), mask)))
}

#[cfg(target_feature = "hvx-ieee-fp")]
mod float {
    //! IEEE arithmetic: V73, V75.
    use super::{Vector, arch, split};

    vector_ops! {
        /// Returns the f16 product: `Q6_Vhf_vmpy_VhfVhf`.
        mul_f16(a, b) = Q6_Vhf_vmpy_VhfVhf(a, b);
        /// Returns the f16 `a · b + c`, rounded after the sum: `Q6_Vhf_vmpyacc_VhfVhfVhf`.
        mul_add_f16(a, b, c) = Q6_Vhf_vmpyacc_VhfVhfVhf(c, a, b);
        /// Returns the f16 difference: `Q6_Vhf_vsub_VhfVhf`.
        sub_f16(a, b) = Q6_Vhf_vsub_VhfVhf(a, b);
        /// Converts f32 pairs to f16, lanes of `even` in even places: `Q6_Vhf_vcvt_VsfVsf`.
        narrow_f32(even, odd) = Q6_Vhf_vcvt_VsfVsf(even, odd);
        /// Returns the f32 product: `Q6_Vsf_vmpy_VsfVsf`.
        mul_f32(a, b) = Q6_Vsf_vmpy_VsfVsf(a, b);
        /// Returns the f32 sum: `Q6_Vsf_vadd_VsfVsf`.
        add_f32(a, b) = Q6_Vsf_vadd_VsfVsf(a, b);
        /// Returns the f32 difference: `Q6_Vsf_vsub_VsfVsf`.
        sub_f32(a, b) = Q6_Vsf_vsub_VsfVsf(a, b);
    }

    /// Converts the products of two pairs of f32 to f16, lanes of the first in even places:
    /// [`mul_f32`], [`narrow_f32`].
    #[must_use]
    #[inline(always)]
    pub fn mul_narrow_f32(a: [Vector; 2], b: [Vector; 2]) -> Vector {
        narrow_f32(mul_f32(a[0], b[0]), mul_f32(a[1], b[1]))
    }

    /// Returns unsigned bytes as halfwords for [`f16_from_spread`], (even bytes, odd bytes):
    /// [`super::interleave_b`].
    #[must_use]
    #[inline(always)]
    pub fn spread_b(bytes: Vector, _zero: u8) -> (Vector, Vector) {
        super::interleave_b(bytes, super::splat_b(crate::hvx::SPREAD_EXPONENT))
    }

    /// Undoes [`spread_b`] for halfwords that it made with the same `zero`: returns the bytes less
    /// `zero` as f16, by [`sub_f16`].
    #[must_use]
    #[inline(always)]
    pub fn f16_from_spread(halves: Vector, zero: u8) -> Vector {
        sub_f16(halves, super::splat_h(0x6400 | u16::from(zero)))
    }

    /// Returns the exact f32 products of f16 lanes, (even lanes, odd lanes): `Q6_Wsf_vmpy_VhfVhf`.
    #[must_use]
    #[inline(always)]
    pub fn widen_mul_f16(a: Vector, b: Vector) -> (Vector, Vector) {
        // SAFETY: [HVX] of the module doc.
        split(unsafe { arch::Q6_Wsf_vmpy_VhfVhf(a.0, b.0) })
    }

    /// Returns the sums of `(even, odd)` and the exact f32 products of f16 lanes:
    /// `Q6_Wsf_vmpyacc_WsfVhfVhf`.
    #[must_use]
    #[inline(always)]
    pub fn widen_mul_add_f16(
        (even, odd): (Vector, Vector),
        a: Vector,
        b: Vector,
    ) -> (Vector, Vector) {
        // SAFETY: [HVX] of the module doc.
        let sums = unsafe { arch::Q6_W_vcombine_VV(odd.0, even.0) };
        // SAFETY: [HVX] of the module doc.
        split(unsafe { arch::Q6_Wsf_vmpyacc_WsfVhfVhf(sums, a.0, b.0) })
    }
}

#[cfg(not(target_feature = "hvx-ieee-fp"))]
#[path = "hexagon/qfloat.rs"]
mod float;
pub use float::*;
