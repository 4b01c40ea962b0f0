//! x86-64 versions of the operations that compilers do not vectorize well: byte shuffles for
//! lookups, products of bytes, F16C conversions.
//!
//! Results equal those of the portable forms, except for the payload of NaNs. Each function returns
//! `None` on a CPU without AVX2 and F16C.

use core::arch::x86_64::{
    __m128i, __m256, __m256i, _MM_FROUND_TO_NEAREST_INT, _mm_packus_epi16, _mm_unpackhi_epi16,
    _mm_unpacklo_epi16, _mm256_add_epi32, _mm256_add_ps, _mm256_and_si256, _mm256_blend_ps,
    _mm256_broadcastsi128_si256, _mm256_castsi256_si128, _mm256_cvtph_ps, _mm256_cvtps_ph,
    _mm256_extracti128_si256, _mm256_madd_epi16, _mm256_movehdup_ps, _mm256_moveldup_ps,
    _mm256_mul_ps, _mm256_or_si256, _mm256_packus_epi32, _mm256_permute2f128_ps,
    _mm256_permute4x64_epi64, _mm256_set1_epi8, _mm256_set1_epi16, _mm256_set1_epi32,
    _mm256_shuffle_epi8, _mm256_shuffle_ps, _mm256_slli_epi16, _mm256_srai_epi16,
    _mm256_srli_epi16, _mm256_srli_epi32, _mm256_sub_ps,
};

use bytemuck::cast;

use super::Vector;

/// Returns `true` if the functions below may run.
#[inline(always)]
fn available() -> bool {
    #[cfg(test)]
    if tests::PORTABLE.get() {
        return false;
    }
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")
}

/// Defines `$name`, which runs the inner function with the same arguments if the CPU has the
/// instructions.
macro_rules! accelerated {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $ty:ty),+) -> $ret:ty = $inner:ident;)+) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub(super) fn $name($($arg: $ty),+) -> Option<$ret> {
            if !available() {
                return None;
            }
            // SAFETY: AVX2 and F16C were detected on this CPU.
            Some(unsafe { $inner($($arg),+) })
        }
    )+};
}

accelerated! {
    /// [`super::lookup16`].
    lookup16(index: Vector, table: Vector) -> (Vector, Vector) = lookup16_avx2;
    /// [`super::dot4_each`].
    dot4_each(a: Vector, b: Vector) -> Vector = dot4_avx2;
    /// [`super::lookup16_b`].
    lookup16_b(index: Vector, table: Vector) -> Vector = lookup16_b_avx2;
    /// [`super::host::widen_f16`].
    widen_f16(v: Vector) -> (Vector, Vector) = widen_f16c;
    /// [`super::widen_in_order_f16`].
    widen_in_order_f16(v: Vector) -> (Vector, Vector) = widen_in_order_f16c;
    /// [`super::narrow_f32`].
    narrow_f32(even: Vector, odd: Vector) -> Vector = narrow_f16c;
    /// [`super::mul_f16`].
    mul_f16(a: Vector, b: Vector) -> Vector = mul_f16c;
    /// [`super::mul_add_f16`].
    mul_add_f16(a: Vector, b: Vector, c: Vector) -> Vector = mul_add_f16c;
    /// [`super::sub_f16`].
    sub_f16(a: Vector, b: Vector) -> Vector = sub_f16c;
}

/// Computes [`super::fold_f32`] for blocks of 1, 2 and 4 lanes.
#[inline(always)]
pub(super) fn fold_f32<const WORDS: usize>(a: Vector, b: Vector) -> Option<Vector> {
    if !available() {
        return None;
    }
    // SAFETY: AVX2 was detected on this CPU.
    Some(unsafe { fold_avx2::<WORDS>(a, b) })
}

#[target_feature(enable = "avx2")]
#[inline]
fn fold_avx2<const WORDS: usize>(a: Vector, b: Vector) -> Vector {
    let (a, b): ([__m256; 4], [__m256; 4]) = (cast(a), cast(b));
    let mut out = a;
    for i in 0..4 {
        let (a, b) = (a[i], b[i]);
        let [even, odd] = match WORDS {
            1 => [
                _mm256_blend_ps::<0b1010_1010>(a, _mm256_moveldup_ps(b)),
                _mm256_blend_ps::<0b1010_1010>(_mm256_movehdup_ps(a), b),
            ],
            2 => [
                _mm256_shuffle_ps::<0b01_00_01_00>(a, b),
                _mm256_shuffle_ps::<0b11_10_11_10>(a, b),
            ],
            _ => [
                _mm256_permute2f128_ps::<0x20>(a, b),
                _mm256_permute2f128_ps::<0x31>(a, b),
            ],
        };
        out[i] = _mm256_add_ps(even, odd);
    }
    cast(out)
}

/// Multiplies bytes as halfwords, those in even places and those in odd ones: the instruction for
/// bytes (`vpmaddubsw`) limits its sums to a halfword.
#[target_feature(enable = "avx2")]
#[inline]
fn dot4_avx2(a: Vector, b: Vector) -> Vector {
    let (mut a, b): ([__m256i; 4], [__m256i; 4]) = (cast(a), cast(b));
    for (a, b) in a.iter_mut().zip(b) {
        let even = _mm256_madd_epi16(
            _mm256_and_si256(*a, _mm256_set1_epi16(0xff)),
            _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(b)),
        );
        let odd = _mm256_madd_epi16(_mm256_srli_epi16::<8>(*a), _mm256_srai_epi16::<8>(b));
        *a = _mm256_add_epi32(even, odd);
    }
    cast(a)
}

/// Returns the low bytes of 16 words, in both halves of a vector.
#[target_feature(enable = "avx2")]
#[inline]
fn low_bytes(words: [__m256i; 2]) -> __m256i {
    let mask = _mm256_set1_epi32(0xff);
    let halves = _mm256_packus_epi32(
        _mm256_and_si256(words[0], mask),
        _mm256_and_si256(words[1], mask),
    );
    let ordered = _mm256_permute4x64_epi64::<0b11_01_10_00>(halves);
    let bytes = _mm_packus_epi16(
        _mm256_castsi256_si128(ordered),
        _mm256_extracti128_si256::<1>(ordered),
    );
    _mm256_broadcastsi128_si256(bytes)
}

#[target_feature(enable = "avx2")]
#[inline]
fn lookup16_avx2(index: Vector, table: Vector) -> (Vector, Vector) {
    let table: [__m256i; 4] = cast(table);
    // Entry e is in halfword 2e, which is the low half of word e.
    let low_table = low_bytes([table[0], table[1]]);
    let high_table = low_bytes([
        _mm256_srli_epi32::<8>(table[0]),
        _mm256_srli_epi32::<8>(table[1]),
    ]);
    let index: [__m256i; 4] = cast(index);
    let (mut even, mut odd) = (index, index);
    for i in 0..4 {
        let index = _mm256_and_si256(index[i], _mm256_set1_epi8(15));
        let low = _mm256_shuffle_epi8(low_table, index);
        let high = _mm256_shuffle_epi8(high_table, index);
        even[i] = _mm256_or_si256(
            _mm256_and_si256(low, _mm256_set1_epi16(0xff)),
            _mm256_slli_epi16::<8>(high),
        );
        odd[i] = _mm256_or_si256(
            _mm256_srli_epi16::<8>(low),
            _mm256_and_si256(high, _mm256_set1_epi16(-256)),
        );
    }
    (cast(even), cast(odd))
}

#[target_feature(enable = "avx2")]
#[inline]
fn lookup16_b_avx2(index: Vector, table: Vector) -> Vector {
    let table: [__m256i; 4] = cast(table);
    // Entry e is in byte 2e, which is the low byte of halfword e.
    let mask = _mm256_set1_epi16(0xff);
    let halves = _mm256_and_si256(table[0], mask);
    let bytes: __m128i = _mm_packus_epi16(
        _mm256_castsi256_si128(halves),
        _mm256_extracti128_si256::<1>(halves),
    );
    let table = _mm256_broadcastsi128_si256(bytes);
    let mut out: [__m256i; 4] = cast(index);
    for out in &mut out {
        *out = _mm256_shuffle_epi8(table, _mm256_and_si256(*out, _mm256_set1_epi8(15)));
    }
    cast(out)
}

/// Applies `f` to the f32 values of eight lanes at a time, and rounds to f16.
macro_rules! f16_lanes {
    ($($arg:ident),+ => $f:expr) => {{
        $(let $arg: [__m128i; 8] = cast($arg);)+
        let mut out: [__m128i; 8] = [cast([0_u8; 16]); 8];
        for i in 0..8 {
            $(let $arg: __m256 = _mm256_cvtph_ps($arg[i]);)+
            out[i] = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>($f);
        }
        cast::<_, Vector>(out)
    }};
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
fn mul_f16c(a: Vector, b: Vector) -> Vector {
    f16_lanes!(a, b => _mm256_mul_ps(a, b))
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
fn mul_add_f16c(a: Vector, b: Vector, c: Vector) -> Vector {
    f16_lanes!(a, b, c => _mm256_add_ps(_mm256_mul_ps(a, b), c))
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
fn sub_f16c(a: Vector, b: Vector) -> Vector {
    f16_lanes!(a, b => _mm256_sub_ps(a, b))
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
fn widen_f16c(v: Vector) -> (Vector, Vector) {
    let words: [__m256i; 4] = cast(v);
    let mut even: [__m256; 4] = cast(v);
    let mut odd = even;
    for i in 0..2 {
        let pair = [words[2 * i], words[2 * i + 1]];
        let mask = _mm256_set1_epi32(0xffff);
        let low = [
            _mm256_and_si256(pair[0], mask),
            _mm256_and_si256(pair[1], mask),
        ];
        let high = [
            _mm256_srli_epi32::<16>(pair[0]),
            _mm256_srli_epi32::<16>(pair[1]),
        ];
        for (out, [a, b]) in [(&mut even, low), (&mut odd, high)] {
            // The pack instruction works on halves of 128 bits each; the permutation restores the
            // order of the quarters.
            let halves = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(a, b));
            out[2 * i] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
            out[2 * i + 1] = _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves));
        }
    }
    (cast(even), cast(odd))
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
fn widen_in_order_f16c(v: Vector) -> (Vector, Vector) {
    let halves: [__m128i; 8] = cast(v);
    let mut out: [__m256; 8] = [cast([0_u8; 32]); 8];
    for (out, half) in out.iter_mut().zip(halves) {
        *out = _mm256_cvtph_ps(half);
    }
    let [low, high]: [Vector; 2] = cast(out);
    (low, high)
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
fn narrow_f16c(even: Vector, odd: Vector) -> Vector {
    let (even, odd): ([__m256; 4], [__m256; 4]) = (cast(even), cast(odd));
    let mut out: [[__m128i; 2]; 4] = [[cast([0_u8; 16]); 2]; 4];
    for i in 0..4 {
        let even = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(even[i]);
        let odd = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(odd[i]);
        out[i] = [_mm_unpacklo_epi16(even, odd), _mm_unpackhi_epi16(even, odd)];
    }
    cast(out)
}

#[cfg(test)]
mod tests {
    use core::cell::Cell;

    use super::super::{
        dot4_each, fold_f32, lookup16, lookup16_b, mul_add_f16, mul_f16, narrow_f32, sub_f16,
        widen_in_order_f16, widen_mul_f16,
    };
    use super::*;

    thread_local! {
        /// `true` if this thread uses the portable forms.
        pub static PORTABLE: Cell<bool> = const { Cell::new(false) };
    }

    /// Runs every accelerated operation; all lanes of `a`, `b`, `c` are finite f16.
    fn all([a, b, c]: [Vector; 3]) -> [Vector; 15] {
        let (even, odd) = lookup16(a, b);
        let (wide_even, wide_odd) = widen_mul_f16(a, b);
        let (low, high) = widen_in_order_f16(a);
        [
            even,
            odd,
            wide_even,
            wide_odd,
            lookup16_b(a, b),
            mul_f16(a, b),
            mul_add_f16(a, b, c),
            narrow_f32(wide_even, wide_odd),
            low,
            high,
            fold_f32::<1>(low, high),
            fold_f32::<2>(low, high),
            fold_f32::<4>(low, high),
            sub_f16(a, b),
            dot4_each(a, b),
        ]
    }

    #[test]
    fn accelerated_forms_equal_the_portable_ones() {
        let mut state = 1_u64;
        let mut vector = |mask: u16| {
            cast::<[u16; 64], Vector>(core::array::from_fn(|_| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                let [.., low, high] = state.to_le_bytes();
                u16::from_le_bytes([low, high]) & mask
            }))
        };
        for turn in 0..400 {
            // With bit 14 cleared, f16 are below 2; with bits 13 and 12 cleared too, many are
            // subnormal.
            let mask = [0xbfff, 0x8fff, 0xbbff][turn % 3];
            let inputs = [vector(mask), vector(mask), vector(mask)];
            let accelerated = all(inputs);
            PORTABLE.set(true);
            let portable = all(inputs);
            PORTABLE.set(false);
            assert_eq!(accelerated, portable, "{inputs:?}");
        }
    }
}
